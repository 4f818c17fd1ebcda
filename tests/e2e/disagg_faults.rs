//! Failures between prefill and the end of the response, through real Envoy. Each request is served, or its client can
//! detect the failure. No blocks or requests are leaked.

use crate::disagg::{
    Bootstrap, CLIENTS, COURSE, End, SGLANG, Stack, course_of_complete_response, long_stream, request, request_end,
};
use crate::faults::refusing;
use crate::operation::replace;
use crate::shipped::{by_header, by_list};
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::{eventually, scratch};
use crate::support::sim::SimProcess;
use serde_json::{Value, json};
use std::net::SocketAddr;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// Status and machine-readable reason.
fn status_and_reason(reply: Reply) -> (u16, String) {
    (reply.status.as_u16(), reply.header("x-attache-reason").to_owned())
}

async fn until_split_again(stack: &Stack) {
    eventually("requests to be split again", || async {
        let reply = client::post(stack.to(), "/v1/completions", request(7_000, false)).await.ok()?;
        (reply.status == 200 && reply.header(COURSE) == "split").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_lease_recomputes_or_fails_by_the_server_policy() {
    for (policy, expected) in [("recompute", 200), ("fail", 500)] {
        let stack = Stack::start(&["--kv-lease", "100ms", "--kv-load-failure-policy", policy], "decider: always").await;
        // The decode workers request the blocks after their lease has ended.
        stack.faults(stack.decode(), json!({"first_byte_delay_ms": 700})).await;
        let reply = client::post(stack.to(), "/v1/completions", request(1, false)).await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.header(COURSE)), (expected, "split"), "{policy}");
        assert_eq!(stack.count(stack.prefill(), "/leases_expired").await, 1, "{policy}");
        assert_eq!(stack.count(stack.prefill(), "/pinned/requests").await, 0, "{policy}");
        stack.faults(stack.decode(), json!({})).await;
        until_split_again(&stack).await;
        stack.picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn aborted_decode_cuts_the_stream_and_releases_blocks() {
    let stack = Stack::start(&[], "decider: always").await;
    stack.faults(stack.decode(), json!({"cut_after_tokens": 300})).await;
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let to = stack.to();
        clients.spawn(async move {
            let prompt = format!("{number} {}", "word ".repeat(300));
            let body =
                json!({"model": "sim-8b", "prompt": prompt, "max_tokens": 400, "ignore_eos": true, "stream": true});
            let body = Payload::sized(body.to_string().into());
            let request = client::request("POST", to, Http::H1, "/v1/completions", body);
            let mut open = client::open(to, Http::H1, request).await.expect("an answer");
            let status = open.response.status();
            let (mut seen, mut cut) = (Vec::new(), false);
            loop {
                match open.next().await {
                    Ok(Some(chunk)) => seen.extend(chunk),
                    Ok(None) => break,
                    Err(_) => {
                        cut = true;
                        break;
                    }
                }
            }
            let text = String::from_utf8_lossy(&seen).into_owned();
            assert!(
                // Envoy may have detected the abort before it sent anything to the client.
                (status == 502 || status == 200 && cut) && !text.contains("[DONE]"),
                "{status}: an answer that is cut, not one that ends: {text}"
            );
        });
    }
    clients.join_all().await;
    stack.assert_nothing_stays().await;
    stack.faults(stack.decode(), json!({})).await;
    until_split_again(&stack).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sglang_hang_or_refusal_is_reported_within_prefill_timeout() {
    let stack = Stack::start(&SGLANG, "connector: sglang, prefillTimeout: 1s").await;
    for (what, faults) in [("hang", json!({"prefill": {"hang": true}})), ("refuse", json!({"refuse": true}))] {
        stack.faults(stack.prefill(), faults).await;
        let ends = stack.load(CLIENTS, request_end).await;
        assert!(ends.iter().all(|end| *end != End::Whole), "{what}: {ends:?}");
        // The headers of a stream are sent before its prefill ends, those of other responses are not.
        assert!(ends.iter().filter(|end| **end == End::Refused).count() >= CLIENTS / 2, "{what}: {ends:?}");
        stack.picker.assert_settled().await;
        stack.faults(stack.prefill(), json!({})).await;
        until_split_again(&stack).await;
    }
    stack.picker.assert_settled().await;
}

/// Request bodies in FULL_DUPLEX_STREAMED and no response bodies: Envoy closes the ext-proc stream at the response
/// headers.
fn bootstrap_without_response_bodies(picker: &AttacheProcess) -> String {
    let text = by_header("original-dst.yaml", picker);
    let unseen = text.replace("response_body_mode: FULL_DUPLEX_STREAMED", "response_body_mode: NONE");
    assert_ne!(unseen, text);
    unseen.replace("response_trailer_mode: SEND", "response_trailer_mode: SKIP")
}

/// SGLang sends the headers of a stream before it has the prompt.
#[tokio::test(flavor = "multi_thread")]
async fn sglang_streams_complete_without_response_bodies_in_ext_proc() {
    let buffered: Bootstrap = |picker| by_header("buffered.yaml", picker);
    for bootstrap in [bootstrap_without_response_bodies, buffered] {
        let stack = Stack::with_envoy(bootstrap, &SGLANG, "connector: sglang, prefillTimeout: 3s").await;
        // Longer than a prefill call lasts without a waiting request.
        stack.faults(stack.prefill(), json!({"first_byte_delay_ms": 500})).await;
        assert_eq!(stack.load(CLIENTS, course_of_complete_response).await, vec!["split"; CLIENTS]);
        stack.faults(stack.prefill(), json!({"prefill": {"hang": true}})).await;
        let ends = stack.load(CLIENTS, request_end).await;
        assert_eq!(ends.iter().filter(|end| **end == End::Aborted).count(), CLIENTS / 2, "{ends:?}");
        assert!(!ends.contains(&End::Whole), "{ends:?}");
        stack.faults(stack.prefill(), json!({})).await;
        until_split_again(&stack).await;
        stack.picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sglang_splits_short_prompts_and_rejects_unsplittable_requests() {
    let stack = Stack::start(&["--kv-connector", "sglang"], "connector: sglang").await;
    let to = stack.to();
    for number in 0..12 {
        let body = json!({"model": "sim-8b", "prompt": format!("{number}"), "max_tokens": 8, "n": 1 + number % 2});
        let reply = client::post(to, "/v1/completions", body.to_string().into()).await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.header(COURSE)), (200, "split"), "{number}");
    }
    let message = json!({"model": "sim-8b", "max_tokens": 8, "messages": [{"role": "user", "content": "hello"}]});
    let reply = client::post(to, "/v1/messages", message.to_string().into()).await.expect("an answer");
    let said = String::from_utf8_lossy(&reply.body).into_owned();
    assert!(said.contains("can't be split") && said.contains("`role: both`"), "{said}");
    assert_eq!(status_and_reason(reply), (503, "no_whole_endpoint".to_owned()));
    assert_eq!(stack.count(stack.decode(), "/whole").await, 0);
    stack.picker.assert_settled().await;
}

fn pool(servers: &[(&SocketAddr, &str)]) -> String {
    let line = |(address, role): &(&SocketAddr, &str)| format!("  - {{address: \"{address}\", role: {role}}}\n");
    let endpoints: String = servers.iter().map(line).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  disaggregation: {{decider: always}}\n  endpoints:\n{endpoints}"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn decode_worker_removed_during_prefill_gets_no_request() {
    let sim = SimProcess::with_roles("prefill=1,decode=2", 3, &["--speed", "20"]).await;
    let [prefill, leaves, stays] = &sim.servers[..] else { panic!("three servers") };
    let directory = scratch("config");
    let file = directory.path().join("attache.yaml");
    replace(&file, &pool(&[(prefill, "prefill"), (leaves, "decode"), (stays, "decode")]));
    let picker = AttacheProcess::with_file(&file, &[]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let faults = |faults: Value| client::post(*prefill, "/sim/faults", faults.to_string().into());
    faults(json!({"prefill": {"hang": true}})).await.expect("an answer");
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        clients.spawn(
            async move { client::post(to, "/v1/completions", request(number, false)).await.expect("an answer") },
        );
    }
    let hanging = || async {
        let page = client::get(*prefill, "/sim/pd").await.expect("a page").json();
        (page["hanging"].as_u64() == Some(CLIENTS as u64)).then_some(())
    };
    eventually("all prompts to be under way", hanging).await;
    replace(&file, &pool(&[(prefill, "prefill"), (stays, "decode")]));
    eventually("the decode server to be gone", || async { (picker.endpoints().await.len() == 2).then_some(()) }).await;
    faults(json!({})).await.expect("an answer");
    for reply in clients.join_all().await {
        assert_eq!(course_of_complete_response(reply), "split");
    }
    let decodes = |server: SocketAddr| async move {
        client::get(server, "/sim/pd").await.expect("a page").json()["decodes"].as_u64().expect("a count")
    };
    assert_eq!((decodes(*leaves).await, decodes(*stays).await), (0, CLIENTS as u64));
    picker.assert_settled().await;
}

/// Any decode worker may fetch prefilled blocks, so Envoy may try the next endpoint of the list and no request is lost.
#[tokio::test(flavor = "multi_thread")]
async fn unreachable_decode_worker_costs_no_request_with_endpoint_list() {
    let sim = SimProcess::with_roles("prefill=1,decode=2", 3, &["--speed", "20"]).await;
    let [prefill, first, second] = sim.servers[..] else { panic!("three servers") };
    let gone = refusing().await;
    let roles = [(&prefill, "prefill"), (&gone, "decode"), (&first, "decode"), (&second, "decode")];
    let text = format!("{}  destination: {{mode: list, max: 3}}\n", pool(&roles));
    let picker = AttacheProcess::configured(&text).await;
    let servers = [prefill, gone, first, second];
    let envoy = EnvoyProcess::start(&by_list("override-host.yaml", &picker, servers)).await;
    for number in 0..40 {
        let reply =
            client::post(envoy.listener("inference"), "/v1/completions", request(number, number % 2 == 0)).await;
        assert_eq!(course_of_complete_response(reply.expect("an answer")), "split", "request {number}");
    }
    assert!(envoy.stat("cluster.model-servers.upstream_rq_retry").await > 0, "it was never picked first");
    let page = client::get(prefill, "/sim/pd").await.expect("a page").json();
    assert_eq!((page["prefills"].as_u64(), page["pinned"]["requests"].as_u64()), (Some(40), Some(0)), "{page}");
    picker.assert_settled().await;
}

/// A proxy of `server` that closes as soon as the server responds, so the caller can't know the server's progress.
async fn proxy_that_closes_at_the_response(server: SocketAddr) -> (SocketAddr, JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = listener.local_addr().expect("an address");
    let task = tokio::spawn(async move {
        let mut scrapes = JoinSet::new();
        loop {
            let (mut client, _) = listener.accept().await.expect("a connection");
            let mut upstream = TcpStream::connect(server).await.expect("the server");
            let mut first = [0];
            client.peek(&mut first).await.expect("a request");
            if first != *b"P" {
                scrapes.spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut upstream).await });
                continue;
            }
            let ((mut from, _to), (answer, mut to)) = (client.split(), upstream.split());
            tokio::select! {
                done = tokio::io::copy(&mut from, &mut to) => panic!("the client left: {done:?}"),
                ready = answer.readable() => ready.expect("an answer"),
            }
            return drop(listener);
        }
    });
    (address, task)
}

/// Envoy retries at the same server, which refuses connections by then.
#[tokio::test(flavor = "multi_thread")]
async fn prompt_fetched_before_a_retry_is_not_fetched_again() {
    let sim = SimProcess::with_roles("prefill=1,decode=2", 3, &["--speed", "20"]).await;
    let [prefill, behind, other] = sim.servers[..] else { panic!("three servers") };
    let (gone, task) = proxy_that_closes_at_the_response(behind).await;
    let picker =
        AttacheProcess::configured(&pool(&[(&prefill, "prefill"), (&gone, "decode"), (&other, "decode")])).await;
    let retries = "timeout: 0s, retry_policy: {retry_on: \"connect-failure,reset\", num_retries: 1}}";
    let bootstrap = by_header("original-dst.yaml", &picker);
    let envoy = EnvoyProcess::start(&bootstrap.replace("timeout: 0s}", retries)).await;
    let ask = async |number| client::post(envoy.listener("inference"), "/v1/completions", request(number, false)).await;
    let mut number = 0;
    while !task.is_finished() {
        assert!(number < 100, "it was never picked");
        number += 1;
        assert!([200, 503].contains(&ask(number).await.expect("an answer").status.as_u16()));
    }
    assert!(envoy.stat("cluster.model-servers.upstream_rq_retry").await > 0);
    let page = async |server| client::get(server, "/sim/pd").await.expect("a page").json();
    assert_eq!(page(behind).await["received_tokens"].as_u64().map(|tokens| tokens > 0), Some(true));
    // Calls beside a request are sent before the next request.
    for number in 100..105 {
        ask(number).await.expect("an answer");
    }
    let other = page(other).await;
    assert!(
        other["failed_loads"].as_object().is_some_and(|failed| failed.values().all(|count| *count == 0)),
        "{other}"
    );
    picker.assert_settled().await;
}

/// The decode worker that waits for the prefill is the one that Envoy's retry chose.
#[tokio::test(flavor = "multi_thread")]
async fn sglang_decode_after_retry_is_aborted_when_prefill_fails() {
    let sim = [&["--speed", "20"], &SGLANG[..]].concat();
    let sim = SimProcess::with_roles("prefill=1,decode=2", 3, &sim).await;
    let [prefill, first, second] = sim.servers[..] else { panic!("three servers") };
    let gone = refusing().await;
    let roles = [(&prefill, "prefill"), (&gone, "decode"), (&first, "decode"), (&second, "decode")];
    let text = format!("{}  destination: {{mode: list, max: 3}}\n", pool(&roles));
    let text = text.replace("decider: always", "connector: sglang, prefillTimeout: 2s");
    let picker = AttacheProcess::configured(&text).await;
    let envoy = EnvoyProcess::start(&by_list("override-host.yaml", &picker, [prefill, gone, first, second])).await;
    let hang = json!({"prefill": {"hang": true}}).to_string();
    client::post(prefill, "/sim/faults", hang.into()).await.expect("an answer");
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..2 * CLIENTS {
        let to = envoy.listener("inference");
        clients.spawn(async move { client::post(to, "/v1/completions", request(number, true)).await });
    }
    for reply in clients.join_all().await {
        assert_eq!(request_end(reply.expect("an answer")), End::Aborted);
    }
    assert!(
        envoy.stat("cluster.model-servers.upstream_rq_retry").await > 0,
        "the one that is gone was never picked first"
    );
    picker.assert_settled().await;
}

/// A worker that accepts connections and never responds costs its requests the prefill timeout until it is ejected.
#[tokio::test(flavor = "multi_thread")]
async fn unresponsive_prefill_worker_is_ejected() {
    let sim = SimProcess::with_roles("prefill=1,decode=1", 2, &["--speed", "20"]).await;
    let [prefill, decode] = sim.servers[..] else { panic!("two servers") };
    let silent = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let address = silent.local_addr().expect("an address");
    let roles = [(&prefill, "prefill"), (&address, "prefill"), (&decode, "decode")];
    let text = pool(&roles).replace("decider: always", "decider: always, prefillTimeout: 500ms");
    let health = "strategy: random\n  health: {ejection: 60s, maxEjection: 60s}\n  disaggregation:";
    let text = text.replace("disaggregation:", health);
    let picker = AttacheProcess::configured(&text).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let late = "local; reason=prefill_late";
    let (mut seen, mut number) = (Vec::new(), 0);
    // Its fifth failure in a row ejects it.
    while seen.iter().filter(|course| *course == late).count() < 5 {
        assert!(number < 200, "{seen:?}");
        let reply = client::post(to, "/v1/completions", request(number, number % 2 == 0)).await.expect("an answer");
        seen.push(course_of_complete_response(reply));
        number += 1;
    }
    assert!(seen.iter().all(|course| course == late || course == "split"), "{seen:?}");
    for number in number..number + 20 {
        let reply = client::post(to, "/v1/completions", request(number, false)).await.expect("an answer");
        assert_eq!(course_of_complete_response(reply), "split", "it is left alone");
    }
    picker.assert_settled().await;
}

/// Requests in prefill, which get no response until the fault is removed.
async fn requests_in_prefill(stack: &Stack) -> tokio::task::JoinSet<Reply> {
    stack.faults(stack.prefill(), json!({"prefill": {"hang": true}})).await;
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..CLIENTS {
        let to = stack.to();
        clients.spawn(async move {
            client::post(to, "/v1/completions", request(number, number % 2 == 0)).await.expect("an answer")
        });
    }
    eventually("all prompts to be under way", || async {
        (stack.count(stack.prefill(), "/hanging").await == CLIENTS as u64).then_some(())
    })
    .await;
    clients
}

#[tokio::test(flavor = "multi_thread")]
async fn shutdown_completes_prefills_and_responses() {
    let mut stack = Stack::start(&[], "decider: always").await;
    let clients = requests_in_prefill(&stack).await;
    stack.picker.process.signal("TERM");
    eventually("the picker to look away", || async { (!stack.picker.is_ready().await).then_some(()) }).await;
    stack.faults(stack.prefill(), json!({})).await;
    for reply in clients.join_all().await {
        assert_eq!(course_of_complete_response(reply), "split");
    }
    let status = stack.picker.process.wait().await;
    assert!(status.success(), "the picker ended with {status}");
    stack.assert_nothing_pinned().await;
}

/// The killed picker's state is lost. Blocks on the servers are not.
#[tokio::test(flavor = "multi_thread")]
async fn killed_picker_fails_requests_and_leaves_no_pinned_blocks() {
    let mut stack = Stack::start(&[], "decider: always").await;
    let clients = requests_in_prefill(&stack).await;
    stack.picker.process.kill();
    for reply in clients.join_all().await {
        assert_eq!(reply.status, 500, "{}", String::from_utf8_lossy(&reply.body));
    }
    eventually("the servers to see that nobody waits", || async {
        (stack.count(stack.prefill(), "/hanging").await == 0).then_some(())
    })
    .await;
    stack.faults(stack.prefill(), json!({})).await;
    stack.assert_nothing_pinned().await;

    // Responses that pass through the picker are cut, which their clients detect.
    let mut stack = Stack::start(&[], "decider: always").await;
    let mut open = Vec::new();
    for number in 0..CLIENTS {
        let sent =
            client::request("POST", stack.to(), Http::H1, "/v1/completions", Payload::sized(long_stream(number)));
        let mut stream = client::open(stack.to(), Http::H1, sent).await.expect("an answer");
        assert!(stream.next().await.expect("a first event").is_some());
        open.push(stream);
    }
    stack.picker.process.kill();
    for mut stream in open {
        let mut text = Vec::new();
        let cut = loop {
            match stream.next().await {
                Ok(Some(chunk)) => text.extend(chunk),
                Ok(None) => break false,
                Err(_) => break true,
            }
        };
        let whole = String::from_utf8_lossy(&text).contains("[DONE]");
        assert!(cut != whole, "whole, or cut");
    }
    stack.assert_nothing_pinned().await;
}
