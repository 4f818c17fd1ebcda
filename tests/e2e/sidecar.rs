//! Requests that a sidecar splits, through real Envoy: only the picker sets the sidecar's headers, and failures behind
//! sidecars do not harm the picker.

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

/// Echo servers that report the headers they get, one for each role.
struct HeaderStack {
    servers: Vec<Echo>,
    picker: AttacheProcess,
    envoy: EnvoyProcess,
}

impl HeaderStack {
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

    /// The value of `name` at the server for a request in which the client sets another value.
    async fn header_at_the_server(&self, name: &'static str, path: &str, body: Bytes) -> String {
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
    let header_stack = HeaderStack::start(&["prefill", "decode"], "mode: header, decider: always").await;
    let [prefill, decode] = header_stack.servers.as_slice() else { panic!("two servers") };
    let header_value = header_stack.header_at_the_server(PREFILLER, "/v1/completions", request(1, false)).await;
    assert_eq!(header_value, format!("{PREFILLER}={}", prefill.address));
    assert_eq!((prefill.requests(), decode.requests()), (0, 1), "the picker asks nobody itself");
    header_stack.picker.assert_settled().await;
}

/// A chat request with these images.
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
        let header_stack = HeaderStack::start(roles, &format!("mode: header, decider: {decider}")).await;
        let encoders: BTreeSet<String> =
            header_stack.servers[1..3].iter().map(|server| server.address.to_string()).collect();
        let header_value = header_stack.header_at_the_server(ENCODERS, CHAT, looking_at(&["https://a/1"])).await;
        let named =
            header_value.strip_prefix(&format!("{ENCODERS}=")).unwrap_or_else(|| panic!("{case}: {header_value}"));
        assert!(encoders.contains(named), "{case}: {header_value}");
        let both = header_stack
            .header_at_the_server(ENCODERS, CHAT, looking_at(&["https://a/1", "https://a/2", "https://a/1"]))
            .await;
        let both = both.strip_prefix(&format!("{ENCODERS}=")).unwrap_or_default();
        assert_eq!(both.split(',').map(str::to_owned).collect::<BTreeSet<_>>(), encoders, "{case}: one for each image");
        assert_eq!(header_stack.header_at_the_server(ENCODERS, CHAT, looking_at(&[])).await, "", "{case}: a text");
        assert_eq!(
            header_stack.header_at_the_server(ENCODERS, "/v1/completions", request(1, false)).await,
            "",
            "{case}: a text"
        );
        let prefiller = header_stack.header_at_the_server(PREFILLER, CHAT, looking_at(&["https://a/1"])).await;
        assert_eq!(prefiller.is_empty(), decider == "never", "{case}: {prefiller}");
        assert_eq!(
            header_stack.servers.iter().map(Echo::requests).collect::<Vec<_>>()[1..],
            vec![0; roles.len() - 1],
            "{case}"
        );
        header_stack.picker.assert_settled().await;
    }
    let own = HeaderStack::start(&["encode-decode", "encode"], "mode: header").await;
    assert_eq!(own.header_at_the_server(ENCODERS, CHAT, looking_at(&["https://a/1"])).await, "", "it encodes itself");
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
    let header_stack = HeaderStack { servers: servers.into(), picker, envoy };
    let counts = || header_stack.servers.iter().map(Echo::requests).collect::<Vec<usize>>();
    for number in 0..4 {
        let ask = || header_stack.header_at_the_server(SOURCE, "/v1/completions", request(number, false));
        let before = counts();
        assert_eq!(ask().await, "", "nobody holds any of it");
        let holder = usize::from(counts()[1] > before[1]);
        header_stack.picker.assert_settled().await;
        // At some point a request goes to the other endpoint, which lacks the first one's blocks.
        loop {
            let before = counts();
            let header_value = ask().await;
            if counts()[holder] == before[holder] {
                assert_eq!(header_value, format!("{SOURCE}={}", addresses[holder]));
                break;
            }
            assert_eq!(header_value, "", "who holds it computes it");
        }
    }
    header_stack.picker.assert_settled().await;
}

fn status(reply: Reply) -> u16 {
    let courses = ["split", "local; reason=no_prefill_endpoint"];
    assert!(reply.status != 200 || courses.contains(&reply.header(COURSE)), "{}", reply.header(COURSE));
    reply.status.as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn split_responses_through_sidecars_are_complete() {
    let stack = Stack::with_sidecars(&[]).await;
    let statuses = stack.load(40, status).await;
    assert_eq!(statuses, [200; 40]);
    assert_eq!(stack.count(stack.prefill(), "/prefills").await, 40);
    assert_eq!((stack.count(stack.decode(), "/decodes").await, stack.failed_loads().await), (40, 0));
    stack.assert_nothing_stays().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_prefill_workers_behind_sidecars_are_ejected() {
    let stack = Stack::with_sidecars(&[]).await;
    let both = stack.prefill().to_vec();
    for (what, servers) in [("one refuses", &both[..1]), ("both refuse", &both[..])] {
        stack.faults(servers, json!({"refuse": true})).await;
        let statuses = stack.load(80, status).await;
        assert!(statuses.iter().all(|status| [200, 503].contains(status)), "{what}: {statuses:?}");
        // Each is ejected after five failures in a row. Requests in flight at that moment fail too, and one probe a
        // second.
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
async fn prefill_worker_crash_behind_sidecars_costs_few_requests() {
    // It refuses connections from then on, and is ejected after five failures in a row; requests in flight then fail too.
    // Those in flight at the crash either fail, or are computed by the decode server: then they restart the count.
    let most = 5 + 2 * CLIENTS;
    for policy in ["fail", "recompute"] {
        let stack = Stack::with_sidecars(&["--kv-load-failure-policy", policy]).await;
        stack.faults(&stack.prefill()[..1], json!({"prefill": {"die_after_reply": true}})).await;
        let statuses = stack.load(60, status).await;
        let failed = statuses.iter().filter(|status| **status != 200).count();
        assert!(failed <= most, "{policy}: {failed} of 60 failed");
        stack.picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnects_during_sidecar_prefill_leave_no_request_in_flight() {
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
