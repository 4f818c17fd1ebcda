//! A full pool behind real Envoy: urgent requests go first, others are queued or get `Retry-After`.

use crate::shipped::by_header;
use crate::support::Error;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http, Reply};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use crate::support::sim::SimProcess;
use bytes::Bytes;
use http::{HeaderValue, Request};
use serde_json::json;
use std::net::SocketAddr;

/// Requests that the pool serves concurrently.
const POOL_CAPACITY: usize = 4;
/// Three times as many clients, of both kinds together.
const CLIENTS: usize = 12;
/// Requests of each kind.
const REQUESTS: usize = 60;

fn configuration(echo: &Echo, more: &str) -> String {
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\n\
         exchange: {{trustClientHeaders: true, objectives: {{batch: -1, urgent: 10}}}}\n\
         pools:\n- name: default\n  endpoints: [{{address: \"{}\", engine: none}}]\n  flowControl:\n    enabled: true\n    \
         detector: {{name: concurrency-detector, parameters: {{maxConcurrency: {POOL_CAPACITY}}}}}\n{more}",
        echo.address
    )
}

fn body(number: usize) -> Bytes {
    json!({"model": "m", "messages": [{"role": "user", "content": format!("{number}")}], "stream": true})
        .to_string()
        .into()
}

/// A request with this objective. `how` is the query that shapes the echo server's response.
fn question(objective: &'static str, number: usize, how: &str, to: SocketAddr) -> Request<Payload> {
    let target = format!("/v1/chat/completions?{how}");
    let mut request = client::request("POST", to, Http::H1, &target, Payload::sized(body(number)));
    request.headers_mut().insert("x-gateway-inference-objective", HeaderValue::from_static(objective));
    request
}

async fn send(to: SocketAddr, objective: &'static str, number: usize, how: &str) -> Result<Reply, Error> {
    client::send(to, Http::H1, question(objective, number, how, to)).await
}

/// Sends a request whose response pauses a few times for `ms`.
async fn ask(to: SocketAddr, objective: &'static str, number: usize, ms: u64) -> Reply {
    let how = format!("kind=sse&size=1000&events=4&pace_ms={ms}");
    send(to, objective, number, &how).await.expect("an answer")
}

#[tokio::test(flavor = "multi_thread")]
async fn at_triple_load_urgent_requests_go_first_and_all_get_responses() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, "    maxRequests: 10\n    ttl: 30s\n")).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut clients = tokio::task::JoinSet::new();
    for objective in ["urgent", "batch"] {
        for client in 0..CLIENTS / 2 {
            clients.spawn(async move {
                let mut replies = Vec::new();
                for number in 0..REQUESTS * 2 / CLIENTS {
                    replies.push(ask(to, objective, client * 1_000 + number, 25).await);
                }
                (objective, replies)
            });
        }
    }
    let (mut served, mut lost) = ([0, 0], [0, 0]);
    for (objective, replies) in clients.join_all().await {
        let kind = usize::from(objective == "batch");
        for reply in replies {
            if reply.status == 200 {
                served[kind] += 1;
                continue;
            }
            lost[kind] += 1;
            assert!(["queue_full", "evicted"].contains(&reply.header("x-attache-reason")), "{:?}", reply.headers);
            assert_eq!(reply.status, 429);
            let retry: u64 = reply.header("retry-after").parse().expect("seconds");
            assert!((1..=60).contains(&retry), "{retry}");
        }
    }
    assert_eq!((served[0], lost[0]), (REQUESTS, 0), "nothing important is lost");
    assert_eq!(served[1] + lost[1], REQUESTS);
    assert!(picker.metric("attache_queue_wait_seconds_count").await > 0.0, "some have waited");
    picker.until_metric("attache_queued_requests", 0.0).await;
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// One client: sends `count` requests with these headers, one after another.
async fn ask_again(
    to: SocketAddr,
    headers: [(&'static str, &'static str); 2],
    client: usize,
    count: usize,
) -> Vec<Reply> {
    let mut replies = Vec::with_capacity(count);
    for number in 0..count {
        let body = chat(4_000, true, (client * 1_000 + number) as u64);
        let mut request = client::request("POST", to, Http::H1, "/v1/chat/completions", Payload::sized(body));
        for (name, value) in headers {
            request.headers_mut().insert(name, HeaderValue::from_static(value));
        }
        replies.push(client::send(to, Http::H1, request).await.expect("an answer"));
    }
    replies
}

#[tokio::test(flavor = "multi_thread")]
async fn overload_rejects_only_sheddable_and_flooding_clients() {
    let fleet = SimProcess::start(2, &["--output-tokens", "8"]).await;
    let [a, b] = [fleet.servers[0], fleet.servers[1]];
    let picker = AttacheProcess::configured(&format!(
        "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{trustClientHeaders: true, objectives: {{batch: -1, urgent: 10}}}}\n\
         pools:\n- name: default\n  endpoints: [\"{a}\", \"{b}\"]\n  flowControl:\n    enabled: true\n    \
         detector: {{name: concurrency-detector, parameters: {{maxConcurrency: 2}}}}\n    defaultBand: {{maxRequests: 6}}\n    \
         bands: [{{priority: -1, maxRequests: 2}}]\n"
    ))
    .await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    // Objective, tenant, number of clients, requests of each client.
    let kinds = [("urgent", "one", 4, 15), ("batch", "one", 8, 15), ("", "one", 2, 15), ("", "flood", 16, 15)];
    let mut clients = tokio::task::JoinSet::new();
    for (kind, (objective, tenant, count, requests)) in kinds.into_iter().enumerate() {
        let headers = [("x-gateway-inference-objective", objective), ("x-gateway-inference-fairness-id", tenant)];
        for client in 0..count {
            clients.spawn(async move { (kind, ask_again(to, headers, kind * 100 + client, requests).await) });
        }
    }
    let (mut served, mut lost) = ([0; 4], [0; 4]);
    for (kind, replies) in clients.join_all().await {
        for reply in replies {
            if reply.status == 200 {
                assert!(reply.body.ends_with(b"data: [DONE]\n\n"), "an answer is whole");
                served[kind] += 1;
                continue;
            }
            lost[kind] += 1;
            assert_eq!(reply.status, 429, "{:?}", reply.headers);
            let retry: u64 = reply.header("retry-after").parse().expect("seconds");
            assert!((1..=60).contains(&retry), "{retry}");
        }
    }
    let all = kinds.map(|(_, _, count, requests)| count * requests);
    assert_eq!([served[0] + lost[0], served[1] + lost[1], served[2] + lost[2], served[3] + lost[3]], all);
    assert_eq!((lost[0], lost[2]), (0, 0), "neither the important nor who asks for little");
    assert!(lost[1] > 0 && lost[3] > 0, "{lost:?}: it was no overload");
    picker.until_metric("attache_queued_requests", 0.0).await;
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// As GIE and llm-d behave without the feature gate `flowControl`, configured by flags alone and by their files.
#[tokio::test(flavor = "multi_thread")]
async fn saturated_pool_rejects_sheddable_requests_without_flow_control() {
    use crate::api::{EXPERIMENTAL, FakeApi, STABLE, pod, pool};
    let listener = tokio::net::TcpListener::bind("127.0.0.2:0").await.expect("a free port");
    let echo = Echo::on(listener);
    let api = FakeApi::start().await;
    api.install(EXPERIMENTAL, "inferenceobjectives");
    api.pod(pod("a", "vllm", &echo.address.ip().to_string()));
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[echo.address.port()]));
    for (name, priority) in [("batch", -1), ("urgent", 10)] {
        let spec = json!({"poolRef": {"name": "vllm"}, "priority": priority});
        api.apply(EXPERIMENTAL, "inferenceobjectives", json!({"metadata": {"name": name}, "spec": spec}));
    }
    let file = |more: &str| format!("apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n{more}");
    let scorer = "plugins: [{type: queue-scorer}]\nschedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]\n";
    for file in [None, Some(file(scorer)), Some(file(&format!("{scorer}saturationDetector: {{}}\n")))] {
        let more = file.iter().flat_map(|text| ["--config-text", text]);
        let arguments: Vec<&str> = ["--pool-name", "vllm", "--engine", "none"].into_iter().chain(more).collect();
        let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
        picker.until_ready().await;
        let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
        let to = envoy.listener("inference");
        assert_eq!(ask(to, "batch", 0, 0).await.status, 200, "{file:?}: the pool is empty");
        // `queueDepthThreshold` requests for the one server wait for their first token.
        let before = echo.requests();
        let mut slow = tokio::task::JoinSet::new();
        for number in 0..5 {
            slow.spawn(async move { send(to, "", number, "kind=sse&size=100&events=2&delay_ms=4000").await });
        }
        eventually("a full pool", || async { (echo.requests() >= before + 5).then_some(()) }).await;
        let shed = ask(to, "batch", 1, 0).await;
        assert_eq!((shed.status.as_u16(), shed.header("x-attache-reason")), (429, "shed"), "{file:?}");
        assert!(shed.header("retry-after").parse::<u64>().is_ok_and(|seconds| seconds >= 1), "{:?}", shed.headers);
        for objective in ["", "urgent", "unknown"] {
            assert_eq!(ask(to, objective, 2, 0).await.status, 200, "{file:?}: {objective}");
        }
        assert!(slow.join_all().await.iter().all(|reply| reply.as_ref().is_ok_and(|reply| reply.status == 200)));
        assert_eq!(ask(to, "batch", 3, 0).await.status, 200, "{file:?}: the pool has capacity again");
        envoy.assert_picker_was_correct().await;
        picker.assert_settled().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn queued_disconnects_and_timeouts_never_reach_a_server() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, "    ttl: 1s\n")).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut running = tokio::task::JoinSet::new();
    for number in 0..POOL_CAPACITY {
        running.spawn(ask(to, "", number, 2_000));
    }
    eventually("the pool to be full", || async { (echo.requests() >= POOL_CAPACITY).then_some(()) }).await;
    let waits = tokio::spawn(ask(to, "", 100, 0));
    picker.until_metric("attache_queued_requests", 1.0).await;
    waits.abort();
    picker.until_metric("attache_queued_requests", 0.0).await;
    let late = ask(to, "", 101, 0).await;
    assert_eq!((late.status.as_u16(), late.header("x-attache-reason")), (503, "queue_timeout"));
    let retry: u64 = late.header("retry-after").parse().expect("seconds");
    assert!((1..=60).contains(&retry), "{retry}");
    assert!(running.join_all().await.iter().all(|reply| reply.status == 200));
    assert_eq!(echo.requests(), POOL_CAPACITY, "who left or was too late never reached a server");
    picker.assert_settled().await;
}

/// Envoy ends and resets a stream at once, which is no half-close: queued requests are removed before their TTL, which
/// is longer than this test waits for anything.
#[tokio::test(flavor = "multi_thread")]
async fn clients_that_disconnect_while_queued_are_removed_at_once() {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, "    ttl: 60s\n")).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut running = tokio::task::JoinSet::new();
    for number in 0..POOL_CAPACITY {
        running.spawn(ask(to, "", number, 3_000));
    }
    eventually("the pool to be full", || async { (echo.requests() >= POOL_CAPACITY).then_some(()) }).await;
    for http in [Http::H1, Http::H2] {
        let waiting: Vec<_> = (0..CLIENTS)
            .map(|number| {
                let mut request =
                    client::request("POST", to, http, "/v1/chat/completions", Payload::sized(body(number)));
                request.headers_mut().insert("x-gateway-inference-objective", HeaderValue::from_static("urgent"));
                tokio::spawn(client::send(to, http, request))
            })
            .collect();
        picker.until_metric("attache_queued_requests", CLIENTS as f64).await;
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
        picker.until_metric("attache_queued_requests", 0.0).await;
    }
    let decisions = client::get(picker.metrics, "/decisions").await.expect("the decisions").json().to_string();
    assert!(!decisions.contains("unwatched"), "{decisions}");
    assert!(running.join_all().await.iter().all(|reply| reply.status == 200));
    assert_eq!(echo.requests(), POOL_CAPACITY, "none of them reached a server");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// Fills the pool with batch requests, then sends as many urgent requests whose responses do not end. Returns the batch
/// responses.
async fn preempt_batches(
    which: &str,
    how: &'static str,
    begun: bool,
    see: impl AsyncFn(&Echo),
) -> Vec<Result<Reply, Error>> {
    let echo = Echo::start().await;
    let picker = AttacheProcess::configured(&configuration(&echo, &format!("    evictRunning: {which}\n"))).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let mut batches = tokio::task::JoinSet::new();
    for number in 0..POOL_CAPACITY {
        batches.spawn(send(to, "batch", number, how));
    }
    eventually("the pool to be full", || async { (echo.requests() >= POOL_CAPACITY).then_some(()) }).await;
    if begun {
        picker.until_metric("attache_time_to_first_byte_seconds_count", POOL_CAPACITY as f64).await;
    }
    let mut urgent = Vec::new();
    for number in POOL_CAPACITY..2 * POOL_CAPACITY {
        let open =
            client::open(to, Http::H1, question("urgent", number, "kind=sse&size=1000&events=4&pace_ms=600000", to))
                .await;
        let open = open.expect("an answer");
        assert_eq!(open.response.status(), 200);
        urgent.push(open);
    }
    // The last urgent request could only start after the last batch request had ended.
    let batches = batches.join_all().await;
    see(&echo).await;
    drop(urgent);
    let books = picker.assert_settled().await;
    assert_eq!(
        (books.outcomes["routed"], books.opened),
        (2 * POOL_CAPACITY as u64, 2 * POOL_CAPACITY as u64),
        "{books:?}"
    );
    assert_eq!(echo.requests(), 2 * POOL_CAPACITY);
    batches
}

#[tokio::test(flavor = "multi_thread")]
async fn running_batch_is_preempted_for_urgent_request_with_retry_after() {
    // The batch requests run long: without preemption the test would time out.
    let batches = preempt_batches("unanswered", "delay_ms=600000", false, async |_| {}).await;
    for reply in batches {
        let reply = reply.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.header("x-attache-reason")), (429, "evicted"));
        let retry: u64 = reply.header("retry-after").parse().expect("seconds");
        assert!((1..=60).contains(&retry), "{retry}");
        assert_eq!(reply.json()["error"]["code"], "evicted");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn preempted_stream_is_cut_detectably() {
    let servers_see_it = async |echo: &Echo| {
        eventually("the server to see all of them go", || async { (echo.cut_short() == POOL_CAPACITY).then_some(()) })
            .await;
    };
    let batches = preempt_batches("any", "kind=sse&size=1000&events=4&pace_ms=600000", true, servers_see_it).await;
    assert!(batches.iter().all(Result::is_err), "no answer looks whole");
}
