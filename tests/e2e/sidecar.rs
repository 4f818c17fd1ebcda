//! Requests that a sidecar splits, through real Envoy: what it is told in headers, by nobody but the picker; and that
//! the picker is none the worse for what befalls the servers that the sidecar asks.

use crate::disagg::{CLIENTS, COURSE, Stack, long_stream, request};
use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use bytes::Bytes;
use http::HeaderValue;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const PREFILLER: &str = "x-prefiller-host-port";
const ENCODERS: &str = "x-encoder-hosts-ports";

/// Servers that tell the headers that they get, one for each role.
struct Told {
    servers: Vec<Echo>,
    picker: AttacheProcess,
    envoy: EnvoyProcess,
}

impl Told {
    async fn start(roles: &[&str], disaggregation: &str) -> Self {
        let (mut servers, mut endpoints) = (Vec::new(), String::new());
        for role in roles {
            let server = Echo::start().await;
            endpoints += &format!("  - {{address: \"{}\", role: {role}, engine: none}}\n", server.address);
            servers.push(server);
        }
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  disaggregation: {{{disaggregation}}}\n  endpoints:\n{endpoints}"
        );
        let picker = AttacheProcess::configured(&text).await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        Self { servers, picker, envoy }
    }

    /// What the server of the answer gets under `name` with a request that has its own idea of it.
    async fn tells(&self, name: &'static str, path: &str, body: Bytes) -> String {
        let to = self.envoy.listener("inference");
        let mut request = client::request("POST", to, Http::H1, &format!("{path}?tell={name}"), Payload::sized(body));
        request.headers_mut().append(name, HeaderValue::from_static("10.6.6.6:1"));
        let reply = client::send(to, Http::H1, request).await.expect("an answer");
        assert_eq!(reply.status, 200);
        reply.header("x-echo-told").to_owned()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sidecar_gets_prefill_worker_only_from_picker() {
    let told = Told::start(&["prefill", "decode"], "mode: header, decider: always").await;
    let [prefill, decode] = told.servers.as_slice() else { panic!("two servers") };
    let said = told.tells(PREFILLER, "/v1/completions", request(1, false)).await;
    assert_eq!(said, format!("{PREFILLER}={}", prefill.address));
    assert_eq!((prefill.requests(), decode.requests()), (0, 1), "the picker asks nobody itself");
    told.picker.assert_settled().await;
}

/// A chat with these images.
fn looking_at(images: &[&str]) -> Bytes {
    let images = images.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
    let content: Vec<Value> = [json!({"type": "text", "text": "what is this?"})].into_iter().chain(images).collect();
    json!({"model": "sim-8b", "messages": [{"role": "user", "content": content}]}).to_string().into()
}

#[tokio::test(flavor = "multi_thread")]
async fn sidecar_gets_encode_workers_only_from_picker() {
    const CHAT: &str = "/v1/chat/completions";
    for (case, roles, decider) in [
        ("E/PD", &["decode", "encode", "encode"][..], "never"),
        ("E/P/D", &["decode", "encode", "encode", "prefill"], "always"),
    ] {
        let told = Told::start(roles, &format!("mode: header, decider: {decider}")).await;
        let encoders: BTreeSet<String> = told.servers[1..3].iter().map(|server| server.address.to_string()).collect();
        let said = told.tells(ENCODERS, CHAT, looking_at(&["https://a/1"])).await;
        let named = said.strip_prefix(&format!("{ENCODERS}=")).unwrap_or_else(|| panic!("{case}: {said}"));
        assert!(encoders.contains(named), "{case}: {said}");
        let both = told.tells(ENCODERS, CHAT, looking_at(&["https://a/1", "https://a/2", "https://a/1"])).await;
        let both = both.strip_prefix(&format!("{ENCODERS}=")).unwrap_or_default();
        assert_eq!(both.split(',').map(str::to_owned).collect::<BTreeSet<_>>(), encoders, "{case}: one for each image");
        assert_eq!(told.tells(ENCODERS, CHAT, looking_at(&[])).await, "", "{case}: a text");
        assert_eq!(told.tells(ENCODERS, "/v1/completions", request(1, false)).await, "", "{case}: a text");
        let prefiller = told.tells(PREFILLER, CHAT, looking_at(&["https://a/1"])).await;
        assert_eq!(prefiller.is_empty(), decider == "never", "{case}: {prefiller}");
        assert_eq!(
            told.servers.iter().map(Echo::requests).collect::<Vec<_>>()[1..],
            vec![0; roles.len() - 1],
            "{case}"
        );
        told.picker.assert_settled().await;
    }
    let own = Told::start(&["encode-decode", "encode"], "mode: header").await;
    assert_eq!(own.tells(ENCODERS, CHAT, looking_at(&["https://a/1"])).await, "", "it encodes itself");
    own.picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sidecar_gets_endpoint_with_longer_prefix_by_llm_d_file() {
    const SOURCE: &str = "x-kv-cache-source-host-port";
    let servers = [Echo::start().await, Echo::start().await];
    let text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- {type: random-picker}\n\
                - {type: p2p-source-producer}\n";
    let addresses = [servers[0].address, servers[1].address];
    let picker = AttacheProcess::start(&addresses, &["--config-text", text]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let told = Told { servers: servers.into(), picker, envoy };
    let counts = || told.servers.iter().map(Echo::requests).collect::<Vec<usize>>();
    for number in 0..4 {
        let ask = || told.tells(SOURCE, "/v1/completions", request(number, false));
        let before = counts();
        assert_eq!(ask().await, "", "nobody holds any of it");
        let holder = usize::from(counts()[1] > before[1]);
        told.picker.assert_settled().await;
        // By chance it goes to the other one some time, which lacks what the first one holds.
        loop {
            let before = counts();
            let said = ask().await;
            if counts()[holder] == before[holder] {
                assert_eq!(said, format!("{SOURCE}={}", addresses[holder]));
                break;
            }
            assert_eq!(said, "", "who holds it computes it");
        }
    }
    told.picker.assert_settled().await;
}

fn status(reply: Reply) -> u16 {
    assert!(reply.status != 200 || reply.header(COURSE).is_empty() || reply.header(COURSE) == "split");
    reply.status.as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_come_whole_through_sidecars() {
    let stack = Stack::with_sidecars(&[]).await;
    let statuses = stack.load(40, status).await;
    assert_eq!(statuses, [200; 40]);
    assert_eq!(stack.count(stack.prefill(), "/prefills").await, 40);
    assert_eq!((stack.count(stack.decode(), "/decodes").await, stack.failed_loads().await), (40, 0));
    stack.assert_nothing_stays().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_servers_that_fail_behind_sidecars_are_left_alone_and_decode_servers_are_not() {
    let stack = Stack::with_sidecars(&[]).await;
    let both = stack.prefill().to_vec();
    for (what, servers) in [("one refuses", &both[..1]), ("both refuse", &both[..])] {
        stack.faults(servers, json!({"refuse": true})).await;
        let statuses = stack.load(80, status).await;
        assert!(statuses.iter().all(|status| [200, 503].contains(status)), "{what}: {statuses:?}");
        // Each is left alone after five failures in a row, those under way come on top, and once a second one tries
        // again.
        let failed = statuses.iter().filter(|status| **status != 200).count();
        assert!((1..=5 * servers.len() + 2 * CLIENTS).contains(&failed), "{what}: {failed} of 80 failed");
        stack.faults(&both, json!({})).await;
        eventually("both prefill servers to be asked again", || async {
            let before = [stack.count(&both[..1], "/prefills").await, stack.count(&both[1..], "/prefills").await];
            assert_eq!(stack.load(16, status).await, [200; 16], "{what}");
            let after = [stack.count(&both[..1], "/prefills").await, stack.count(&both[1..], "/prefills").await];
            (after[0] > before[0] && after[1] > before[1]).then_some(())
        })
        .await;
    }
    stack.picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_server_that_dies_behind_sidecars_costs_few_requests() {
    // It refuses from then on: until it is left alone, those under way come on top.
    let refused = 5 + CLIENTS;
    for (policy, most) in [("fail", refused + CLIENTS), ("recompute", refused)] {
        let stack = Stack::with_sidecars(&["--kv-load-failure-policy", policy]).await;
        stack.faults(&stack.prefill()[..1], json!({"prefill": {"die_after_reply": true}})).await;
        let statuses = stack.load(60, status).await;
        let failed = statuses.iter().filter(|status| **status != 200).count();
        assert!(failed <= most, "{policy}: {failed} of 60 failed");
        stack.picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_leave_while_a_sidecar_waits_leave_the_books_closed() {
    const LEAVING: u64 = 16;
    let stack = Stack::with_sidecars(&[]).await;
    stack.faults(stack.prefill(), json!({"prefill": {"hang": true}})).await;
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..LEAVING as usize {
        let to = stack.to();
        clients.spawn(async move {
            let body = Payload::sized(long_stream(number));
            client::open(to, Http::H1, client::request("POST", to, Http::H1, "/v1/completions", body)).await
        });
    }
    eventually("all prefills to hang", || async {
        let booked = stack.picker.endpoints().await.iter().filter_map(|e| e["in_flight"].as_u64()).sum::<u64>();
        (booked == 2 * LEAVING && stack.count(stack.prefill(), "/hanging").await == LEAVING).then_some(())
    })
    .await;
    clients.shutdown().await;
    stack.picker.assert_settled().await;
    eventually("the servers to see that nobody waits", || async {
        (stack.count(stack.prefill(), "/hanging").await == 0).then_some(())
    })
    .await;
}
