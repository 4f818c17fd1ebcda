//! Prefill and decode on different servers, through real Envoy and strict simulated servers. Responses equal those of
//! one server. Every fault ends in a response or a clear error, and no blocks or requests are leaked.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::Payload;
use crate::support::client::{self, Http, Reply};
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use crate::support::sidecar::Sidecar;
use crate::support::sim::SimProcess;
use bytes::Bytes;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

pub(crate) const COURSE: &str = "x-attache-disaggregation";
pub(crate) const PREFILL: &str = "x-attache-prefill-endpoint";
/// Concurrent clients while a server fails.
pub(crate) const CLIENTS: usize = 8;

/// Two prefill workers and two decode workers, the picker and Envoy.
pub(crate) struct Stack {
    sim: SimProcess,
    pub(crate) picker: AttacheProcess,
    pub(crate) envoy: EnvoyProcess,
    _sidecars: Vec<Sidecar>,
}

/// Makes Envoy's bootstrap for a picker.
pub(crate) type Bootstrap = fn(&AttacheProcess) -> String;

fn original_dst(picker: &AttacheProcess) -> String {
    by_header("original-dst.yaml", picker)
}

impl Stack {
    pub(crate) async fn start(sim: &[&str], disaggregation: &str) -> Self {
        Self::behind(false, sim, disaggregation, original_dst, &[]).await
    }

    /// Like `start`, with this Envoy bootstrap.
    pub(crate) async fn with_envoy(bootstrap: Bootstrap, sim: &[&str], disaggregation: &str) -> Self {
        Self::behind(false, sim, disaggregation, bootstrap, &[]).await
    }

    /// Like `start`, with a sidecar in front of each decode worker that sends the prefill call.
    pub(crate) async fn with_sidecars(sim: &[&str]) -> Self {
        Self::behind(true, sim, "mode: header, decider: always", original_dst, &[]).await
    }

    /// Like `start`, with further arguments of the picker, and sidecars if `sidecars`.
    pub(crate) async fn with_arguments(sidecars: bool, disaggregation: &str, more: &[&str]) -> Self {
        Self::behind(sidecars, &[], disaggregation, original_dst, more).await
    }

    async fn behind(sidecars: bool, sim: &[&str], disaggregation: &str, bootstrap: Bootstrap, more: &[&str]) -> Self {
        let sim = SimProcess::with_roles("prefill=2,decode=2", 4, &[&["--speed", "20"], sim].concat()).await;
        let roles = ["prefill", "prefill", "decode", "decode"];
        let (mut addresses, mut before) = (sim.servers.clone(), Vec::new());
        for decode in addresses[2..].iter_mut().filter(|_| sidecars) {
            let sidecar = Sidecar::start(*decode).await;
            *decode = sidecar.address;
            before.push(sidecar);
        }
        let endpoints = addresses.iter().zip(roles);
        let endpoints: String =
            endpoints.map(|(address, role)| format!("  - {{address: \"{address}\", role: {role}}}\n")).collect();
        let text = format!(
            "apiVersion: attache.dev/v1\nkind: Attache\nexchange: {{prefillEndpointHeader: true}}\npools:\n- name: default\n  \
             disaggregation: {{{disaggregation}}}\n  \
             health: {{ejection: 1s, maxEjection: 1s, slowStart: 0s, errorPeriod: 0s, maxEjectionPercent: 100}}\n  prefixCache: {{tenantHeader: x-tenant}}\n  endpoints:\n{endpoints}"
        );
        let arguments: Vec<String> = ["--config-text", &text].iter().chain(more).map(|&a| a.to_owned()).collect();
        let picker = AttacheProcess::with_arguments(&arguments).await;
        let envoy = EnvoyProcess::start(&bootstrap(&picker)).await;
        Self { sim, picker, envoy, _sidecars: before }
    }

    pub(crate) fn to(&self) -> SocketAddr {
        self.envoy.listener("inference")
    }

    pub(crate) fn prefill(&self) -> &[SocketAddr] {
        &self.sim.servers[..2]
    }

    pub(crate) fn decode(&self) -> &[SocketAddr] {
        &self.sim.servers[2..]
    }

    pub(crate) async fn faults(&self, servers: &[SocketAddr], faults: Value) {
        for server in servers {
            let reply = client::post(*server, "/sim/faults", faults.to_string().into()).await.expect("an answer");
            assert_eq!(reply.status, 200, "{faults}");
        }
    }

    /// The sum of one counter of `/sim/pd` over servers.
    pub(crate) async fn count(&self, servers: &[SocketAddr], pointer: &str) -> u64 {
        let mut sum = 0;
        for server in servers {
            let page = client::get(*server, "/sim/pd").await.expect("a page").json();
            sum += page.pointer(pointer).and_then(Value::as_u64).unwrap_or_else(|| panic!("{pointer} in {page}"));
        }
        sum
    }

    /// Failed loads of blocks on all servers.
    pub(crate) async fn failed_loads(&self) -> u64 {
        let mut sum = 0;
        for server in &self.sim.servers {
            let page = client::get(*server, "/sim/pd").await.expect("a page").json();
            let failed = page["failed_loads"].as_object().unwrap_or_else(|| panic!("{page}"));
            sum += failed.values().filter_map(Value::as_u64).sum::<u64>();
        }
        sum
    }

    /// No server keeps pinned blocks, no lease has expired, and the picker has no request in flight.
    pub(crate) async fn assert_nothing_stays(&self) {
        self.assert_nothing_pinned().await;
        self.picker.assert_settled().await;
    }

    /// Waits until no prefill worker keeps pinned blocks.
    async fn until_nothing_is_pinned(&self) {
        eventually("nothing to be pinned", || async {
            (self.count(self.prefill(), "/pinned/requests").await == 0).then_some(())
        })
        .await;
    }

    /// No prefill worker keeps pinned blocks, and no lease has expired.
    pub(crate) async fn assert_nothing_pinned(&self) {
        self.until_nothing_is_pinned().await;
        assert_eq!(self.count(&self.sim.servers, "/leases_expired").await, 0);
    }

    /// Waits until every prefill worker is used. Ejected workers return when there is enough load.
    async fn until_all_compute(&self) {
        let fresh = AtomicUsize::new(10_000);
        eventually("prompts to be computed by all", || async {
            let mut clients = tokio::task::JoinSet::new();
            for _ in 0..CLIENTS {
                let (to, body) = (self.to(), request(fresh.fetch_add(1, Ordering::SeqCst), false));
                clients.spawn(async move { client::post(to, "/v1/completions", body).await.expect("an answer") });
            }
            let replies = clients.join_all().await;
            let computes =
                |server: &SocketAddr| replies.iter().any(|reply| reply.header(PREFILL) == server.to_string());
            self.prefill().iter().all(computes).then_some(())
        })
        .await;
    }

    /// Sends `count` requests, [`CLIENTS`] at a time, and returns what `judge` makes of each response.
    pub(crate) async fn load<T: Send + 'static>(&self, count: usize, judge: fn(Reply) -> T) -> Vec<T> {
        load(self.to(), count, judge).await
    }
}

/// Sends `count` requests, [`CLIENTS`] at a time, and returns what `judge` makes of each response.
pub(crate) async fn load<T: Send + 'static>(to: SocketAddr, count: usize, judge: fn(Reply) -> T) -> Vec<T> {
    let next = Arc::new(AtomicUsize::new(0));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let next = next.clone();
        clients.spawn(async move {
            let mut seen = Vec::new();
            loop {
                let number = next.fetch_add(1, Ordering::SeqCst);
                if number >= count {
                    return seen;
                }
                let body = request(number, number.is_multiple_of(2));
                seen.push(judge(client::post(to, "/v1/completions", body).await.expect("an answer")));
            }
        });
    }
    clients.join_all().await.into_iter().flatten().collect()
}

/// A request with a prompt of about 300 tokens that shares no prefix with others.
pub(crate) fn request(number: usize, stream: bool) -> Bytes {
    let prompt = format!("{number} {}", "the quick brown fox jumps over the lazy dog ".repeat(30));
    json!({"model": "sim-8b", "prompt": prompt, "max_tokens": 8, "stream": stream}).to_string().into()
}

/// Checks that the response is complete, and returns how it was served.
pub(crate) fn course_of_complete_response(reply: Reply) -> String {
    assert_eq!(reply.status, 200, "{}", String::from_utf8_lossy(&reply.body));
    let text = String::from_utf8_lossy(&reply.body);
    assert!(text.contains("[DONE]") || reply.json()["usage"]["completion_tokens"] == 8, "a whole answer: {text}");
    reply.header(COURSE).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_prefill_workers_cost_no_request() {
    let stack = Stack::start(&[], "decider: always, prefillTimeout: 2s").await;
    let one = [stack.prefill()[0]];
    let both = stack.prefill().to_vec();
    let (split, absent) = ("split", "local; reason=no_prefill_endpoint");
    for (what, servers, faults, allowed) in [
        ("one refuses", &one[..], json!({"refuse": true}), &[split][..]),
        // Ejected workers are not called, so the decode worker computes the prompts.
        ("both refuse", &both, json!({"refuse": true}), &["local; reason=prefill_failed", absent]),
        ("one fails now and then", &one, json!({"fail_next": {"count": 10, "status": 500}}), &[split]),
        (
            "both fail now and then",
            &both,
            json!({"fail_next": {"count": 10, "status": 503}}),
            &["local; reason=prefill_failed", split, absent],
        ),
        ("both hang", &both, json!({"prefill": {"hang": true}}), &["local; reason=prefill_late", absent]),
        // Blocks without transfer parameters can't be fetched, so this case is the last.
        ("one sends no transfer parameters", &one, json!({"prefill": {"no_params": true}}), &[split]),
    ] {
        stack.assert_nothing_stays().await;
        stack.faults(servers, faults).await;
        let courses = stack.load(40, course_of_complete_response).await;
        assert_eq!(courses.len(), 40, "{what}");
        assert!(courses.iter().all(|course| allowed.contains(&&**course)), "{what}: {courses:?}");
        // Each fault is reported at least once.
        assert!(courses.iter().any(|course| course == allowed[0]), "{what}: {courses:?}");
        eventually("the servers to see that nobody waits", || async {
            (stack.count(&both, "/hanging").await == 0).then_some(())
        })
        .await;
        stack.faults(&both, json!({})).await;
        stack.until_all_compute().await;
    }
    assert_eq!(stack.failed_loads().await, 0);
    stack.picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_prefill_is_hedged_and_the_first_response_wins() {
    let stack = Stack::start(&[], "decider: always, hedgeAfter: 50ms").await;
    // One worker hangs. The other serves its requests, long before the prefill timeout.
    stack.faults(&stack.prefill()[..1], json!({"prefill": {"hang": true}})).await;
    let courses = stack.load(40, course_of_complete_response).await;
    assert!(courses.iter().all(|course| course == "split"), "{courses:?}");
    let asked = stack.count(&stack.prefill()[..1], "/prefills").await;
    assert!(asked > 0, "the slow one was asked");
    assert!(stack.count(&stack.prefill()[1..], "/prefills").await >= 40);
    // No request waits for the slow worker any longer.
    eventually("the slow questions to end", || async {
        (stack.count(stack.prefill(), "/hanging").await == 0).then_some(())
    })
    .await;
    stack.faults(&stack.prefill()[..1], json!({})).await;
    stack.assert_nothing_stays().await;
    assert_eq!(stack.failed_loads().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn prefill_worker_crash_fails_at_most_the_requests_it_held() {
    // By default vLLM fails such a request.
    for (policy, lost) in [("fail", true), ("recompute", false)] {
        let stack = Stack::start(&["--kv-load-failure-policy", policy], "decider: always").await;
        stack.faults(&stack.prefill()[..1], json!({"prefill": {"die_after_reply": true}})).await;
        let status_and_worker = |reply: Reply| (reply.status.as_u16(), reply.header(PREFILL).to_owned());
        let answers = stack.load(60, status_and_worker).await;
        let failed: Vec<_> = answers.iter().filter(|(status, _)| *status != 200).collect();
        let dead = stack.prefill()[0].to_string();
        assert!(failed.iter().all(|(status, prefill)| *status == 500 && *prefill == dead), "{failed:?}");
        assert!(failed.len() <= if lost { CLIENTS } else { 0 }, "{policy}: {failed:?}");
        stack.picker.assert_settled().await;
    }
}

/// A stream of many tokens.
pub(crate) fn long_stream(number: usize) -> Bytes {
    let prompt = format!("{number} {}", "word ".repeat(300));
    json!({"model": "sim-8b", "prompt": prompt, "max_tokens": 400, "stream": true}).to_string().into()
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnect_during_prefill_or_decode_releases_pinned_blocks() {
    const LEAVING: u64 = 24;
    let stack = Stack::start(&[], "decider: always").await;
    let to = stack.to();
    let send = move |number: usize| async move {
        let body = Payload::sized(long_stream(number));
        client::open(to, Http::H1, client::request("POST", to, Http::H1, "/v1/completions", body)).await
    };
    // All prompts are being prefilled when their clients disconnect.
    stack.faults(stack.prefill(), json!({"prefill": {"hang": true}})).await;
    let mut clients = tokio::task::JoinSet::new();
    (0..LEAVING as usize).for_each(|number| drop(clients.spawn(send(number))));
    eventually("all prefills to be under way", || async {
        let under_way = stack.picker.endpoints().await.iter().filter_map(|e| e["in_flight"].as_u64()).sum::<u64>();
        (under_way == 2 * LEAVING).then_some(())
    })
    .await;
    clients.shutdown().await;
    stack.picker.assert_settled().await;
    // A worker that continues before it notices the disconnect keeps its blocks until their lease ends, as vLLM does.
    eventually("the servers to see that nobody waits", || async {
        (stack.count(stack.prefill(), "/hanging").await == 0).then_some(())
    })
    .await;
    stack.faults(stack.prefill(), json!({})).await;
    stack.assert_nothing_stays().await;

    // All responses have started.
    let mut clients = tokio::task::JoinSet::new();
    for number in 100..100 + LEAVING as usize {
        clients.spawn(async move {
            let mut open = send(number).await.expect("an answer");
            assert!(open.next().await.expect("a first event").is_some());
        });
    }
    clients.join_all().await;
    stack.assert_nothing_stays().await;
    assert_eq!(stack.failed_loads().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn disconnects_at_any_moment_leave_no_request_in_flight() {
    let stack = Stack::start(&["--kv-lease", "500ms"], "decider: always").await;
    stack.faults(stack.prefill(), json!({"first_byte_delay_ms": 60})).await;
    let mut clients = tokio::task::JoinSet::new();
    for number in 0..48usize {
        let to = stack.to();
        clients.spawn(async move {
            let body = Payload::sized(long_stream(number));
            let request = client::request("POST", to, Http::H1, "/v1/completions", body);
            let leave = Duration::from_millis(5 + 4 * number as u64);
            let _ = tokio::time::timeout(leave, async {
                let mut open = client::open(to, Http::H1, request).await?;
                while open.next().await?.is_some() {}
                Ok::<_, crate::support::Error>(())
            })
            .await;
        });
    }
    clients.join_all().await;
    stack.picker.assert_settled().await;
    // After a disconnect between prefill and decode, only Envoy knows whether the decode request was sent. The lease
    // frees such blocks.
    stack.until_nothing_is_pinned().await;
    assert_eq!(stack.failed_loads().await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn failing_decode_worker_is_the_response_and_is_ejected() {
    let stack = Stack::start(&[], "decider: always").await;
    stack.faults(&stack.decode()[..1], json!({"refuse": true})).await;
    let began = Instant::now();
    let answers = stack.load(60, |reply| (reply.status.as_u16(), reply.header(COURSE).to_owned())).await;
    assert!(answers.iter().all(|(status, course)| [200, 503].contains(status) && course == "split"), "{answers:?}");
    let failed = answers.iter().filter(|(status, _)| *status == 503).count();
    // The failures that eject it, the requests in flight at that moment, and one probe a second.
    let probes = usize::try_from(began.elapsed().as_secs()).expect("few");
    assert!(failed <= 5 + CLIENTS + probes, "{failed} of 60");
    stack.picker.assert_settled().await;
    // A 503 does not show whether the blocks were fetched: their lease frees them.
    stack.until_nothing_is_pinned().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_declined_decodes_are_released() {
    let stack = Stack::start(&[], "decider: always").await;
    for status in [400, 422, 429] {
        stack.faults(&stack.decode()[..1], json!({"fail_next": {"count": 1, "status": status}})).await;
        let answers = stack.load(24, |reply| (reply.status.as_u16(), reply.header(COURSE).to_owned())).await;
        let declined = answers.iter().filter(|answer| **answer == (status, "split".to_owned())).count();
        let served = answers.iter().filter(|answer| **answer == (200, "split".to_owned())).count();
        assert_eq!((declined, served), (1, 23), "{answers:?}");
        stack.assert_nothing_stays().await;
    }
    assert_eq!(stack.failed_loads().await, 0);
}

/// How a request ended whose prefill may have failed.
#[derive(Debug, PartialEq)]
pub(crate) enum End {
    Whole,
    /// 503, before the response started.
    Refused,
    /// A stream whose response headers had already been sent.
    Aborted,
}

pub(crate) fn request_end(reply: Reply) -> End {
    let text = String::from_utf8_lossy(&reply.body).into_owned();
    match (reply.status.as_u16(), reply.header("x-attache-reason")) {
        (503, "prefill_failed") => End::Refused,
        (200, "") if text.contains("Abort in waiting queue") => End::Aborted,
        (status, reason) => {
            assert_eq!((status, reason), (200, ""), "{text}");
            course_of_complete_response(reply);
            End::Whole
        }
    }
}

/// A simulator of SGLang whose decode workers wait for a prefill for three minutes. Clients wait for one, so a request
/// that waits for the bootstrap's timeout fails its test.
pub(crate) const SGLANG: [&str; 4] = ["--kv-connector", "sglang", "--bootstrap-timeout", "180000ms"];

#[tokio::test(flavor = "multi_thread")]
async fn sglang_splits_requests_and_reports_failed_prefill_at_once() {
    let stack = Stack::start(&SGLANG, "decider: always, connector: sglang").await;
    let courses = stack.load(40, course_of_complete_response).await;
    assert!(courses.iter().all(|course| course == "split"), "{courses:?}");
    stack.faults(stack.prefill(), json!({"fail_next": {"count": 1, "status": 500}})).await;
    let ends = stack.load(20, request_end).await;
    assert_eq!(ends.iter().filter(|end| **end != End::Whole).count(), 2, "{ends:?}");
    stack.picker.assert_settled().await;
}
