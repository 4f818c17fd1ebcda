//! Pickers that share state over a real NATS server, each behind an Envoy of its own.

pub(crate) mod away;
mod policies;
mod pressure;
mod prompts;
mod queues;
mod records;
pub(crate) mod strangers;

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http, Open};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::nats::NatsProcess;
use crate::support::process::{PATIENCE, Process, eventually};
use serde_json::Value;
use std::net::SocketAddr;
use tokio::time::timeout;

/// A response stream of two minutes.
pub(crate) const LONG_SSE: &str = "/v1/chat/completions?kind=sse&size=400000&events=2400&pace_ms=50";
/// A response stream of about a second.
pub(crate) const SHORT_SSE: &str = "/v1/chat/completions?kind=sse&size=10000&events=50&pace_ms=20";

/// A configuration with one pool of these servers.
pub(crate) fn pool(strategy: &str, servers: &[SocketAddr]) -> String {
    let endpoints: Vec<String> = servers.iter().map(|server| format!("\"{server}\"")).collect();
    format!(
        "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- name: default\n  strategy: {strategy}\n  \
         endpoints: [{}]\n",
        endpoints.join(", ")
    )
}

/// A picker that shares its state over the NATS server at `url`.
pub(crate) async fn picker(config: &str, name: &str, url: &str) -> AttacheProcess {
    let arguments = ["--config-text", config, "--sync-nats-url", url, "--sync-name", name];
    AttacheProcess::with_arguments(&arguments.map(str::to_owned)).await
}

/// Two pickers with names `a` and `b` and the same configuration.
pub(crate) struct Pair {
    /// The listeners of their Envoys.
    pub(crate) to: [SocketAddr; 2],
    pub(crate) pickers: [AttacheProcess; 2],
    /// The last one is dropped last: it holds the lock of the machine.
    envoys: [EnvoyProcess; 2],
}

impl Pair {
    async fn start(config: &str, url: &str) -> Self {
        let pickers = [picker(config, "a", url).await, picker(config, "b", url).await];
        Self::of(pickers).await
    }

    /// Like `start`, for a test that measures times: no other test with Envoy runs meanwhile.
    async fn alone(config: &str, url: &str) -> Self {
        let pickers = [picker(config, "a", url).await, picker(config, "b", url).await];
        let first = EnvoyProcess::alone(&by_header("original-dst.yaml", &pickers[0])).await;
        Self::behind(first, pickers).await
    }

    pub(crate) async fn of(pickers: [AttacheProcess; 2]) -> Self {
        let first = EnvoyProcess::start(&by_header("original-dst.yaml", &pickers[0])).await;
        Self::behind(first, pickers).await
    }

    /// The pair whose first picker has this Envoy.
    async fn behind(first: EnvoyProcess, pickers: [AttacheProcess; 2]) -> Self {
        let second = first.beside(&by_header("original-dst.yaml", &pickers[1])).await;
        Self { to: [first.listener("inference"), second.listener("inference")], pickers, envoys: [second, first] }
    }

    /// Waits until each picker knows the other one.
    pub(crate) async fn until_peers(&self) {
        let [a, b] = &self.pickers;
        until_peer(a, "b").await;
        until_peer(b, "a").await;
    }

    /// Waits until both pickers report these requests in flight for each endpoint, and nothing is missing.
    pub(crate) async fn until_both(&self, expected: &[u64]) {
        eventually(&format!("both pickers to report {expected:?}"), async || {
            let [a, b] = &self.pickers;
            let views = [in_flight(a).await, in_flight(b).await];
            views.iter().all(|view| view == expected).then_some(())
        })
        .await;
    }

    /// Checks that no request is left anywhere, and that Envoy accepted all responses of the pickers.
    pub(crate) async fn assert_settled(&self) {
        for picker in &self.pickers {
            picker.assert_settled().await;
            assert!(!picker.process.stderr().contains("panicked"), "{}", picker.process.stderr());
        }
        for envoy in &self.envoys {
            envoy.assert_picker_was_correct().await;
        }
    }
}

/// The peers of a picker.
pub(crate) async fn peers(picker: &AttacheProcess) -> Vec<Value> {
    let page = client::get(picker.metrics, "/api/peers").await.expect("the picker's peers").json();
    page["peers"].as_array().unwrap_or_else(|| panic!("no peers in {page}")).clone()
}

/// Waits until `picker` has received everything of the only peer with this name. Returns the identity of its process.
pub(crate) async fn until_peer(picker: &AttacheProcess, name: &str) -> String {
    eventually(&format!("the peer {name}"), async || match &peers(picker).await[..] {
        [peer] if peer["name"] == name && peer["behind"] == false => peer["process"].as_str().map(str::to_owned),
        _ => None,
    })
    .await
}

/// Requests in flight of each endpoint, as a picker reports them.
pub(crate) async fn in_flight(picker: &AttacheProcess) -> Vec<u64> {
    let endpoints = picker.endpoints().await;
    let count =
        |endpoint: &Value| endpoint["in_flight"].as_u64().unwrap_or_else(|| panic!("no in_flight in {endpoint}"));
    endpoints.iter().map(count).collect()
}

/// Opens a response stream, and returns after its first event.
pub(crate) async fn open(to: SocketAddr, target: &str) -> Open {
    let request = client::request("POST", to, Http::H1, target, Payload::sized(chat(300, true, 1)));
    let mut open = client::open(to, Http::H1, request).await.expect("a response");
    assert_eq!(open.response.status(), 200);
    assert!(open.next().await.expect("a first event").is_some());
    open
}

/// Sends a request, and checks that it is served. The time limit only ends a test that hangs.
pub(crate) async fn assert_served(to: SocketAddr) {
    let request = client::post(to, "/v1/chat/completions?size=2000", chat(300, false, 1));
    let reply = timeout(PATIENCE, request).await.expect("a response in time").expect("a response");
    assert_eq!((reply.status.as_u16(), reply.body.len()), (200, 2000));
}

/// Lines about NATS in the log of a picker.
fn lines_about_nats(process: &Process) -> Vec<String> {
    process.stderr().lines().filter(|line| line.contains("NATS") || line.contains("nats")).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn request_in_flight_counts_on_the_other_picker_until_its_end() {
    let (nats, echo) = (NatsProcess::start().await, Echo::start().await);
    let pair = Pair::start(&pool("{name: least-request}", &[echo.address]), &nats.url()).await;
    pair.until_peers().await;
    for (via, other) in [(0, 1), (1, 0)] {
        let (complete, cut) = (open(pair.to[via], SHORT_SSE).await, open(pair.to[via], LONG_SSE).await);
        pair.until_both(&[2]).await;
        assert_eq!(peers(&pair.pickers[other]).await[0]["requests_in_flight"], 2);
        assert_eq!(peers(&pair.pickers[via]).await[0]["requests_in_flight"], 0);
        complete.finish().await.expect("a whole response");
        pair.until_both(&[1]).await;
        drop(cut);
        pair.until_both(&[0]).await;
    }
    pair.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_avoid_the_server_that_the_other_picker_loads() {
    let (nats, servers) = (NatsProcess::start().await, [Echo::start().await, Echo::start().await]);
    let addresses = [servers[0].address, servers[1].address];
    let pair = Pair::start(&pool("{name: least-request}", &addresses), &nats.url()).await;
    pair.until_peers().await;
    let mut held = Vec::new();
    for round in 0..10 {
        held.push(open(pair.to[round % 2], LONG_SSE).await);
        eventually("the views to agree", async || {
            let views = [in_flight(&pair.pickers[0]).await, in_flight(&pair.pickers[1]).await];
            (views[0] == views[1] && views[0].iter().sum::<u64>() == round as u64 + 1).then_some(())
        })
        .await;
    }
    // Each picker has booked 5 of the 10 requests. By its own view alone, it would spread them as 3 and 2.
    pair.until_both(&[5, 5]).await;
    drop(held);
    pair.until_both(&[0, 0]).await;
    pair.assert_settled().await;
}
