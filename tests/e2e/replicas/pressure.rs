//! Pressure of a model: counted for all pickers, consumed once, and what the example reconciler does with it.

use super::*;
use crate::api::FakeApi;
use crate::support::process::{repository, scratch};
use serde_json::json;
use std::process::Command;

const PRESSURE: &str = "/api/pressure/sim-8b";
const APPS: &str = "apps/v1";

/// The pressure that a picker shows.
async fn shown(picker: &AttacheProcess) -> u64 {
    client::get(picker.metrics, PRESSURE).await.expect("the pressure").json()["count"].as_u64().expect("a count")
}

async fn until_shown(pair: &Pair, count: u64) {
    for picker in &pair.pickers {
        eventually(&format!("a pressure of {count}"), async || (shown(picker).await == count).then_some(())).await;
    }
}

/// The sum of what the pickers' gauges show.
async fn gauges(pair: &Pair) -> f64 {
    let name = "attache_model_pressure{pool=\"default\",model=\"sim-8b\"}";
    pair.pickers[0].metric(name).await + pair.pickers[1].metric(name).await
}

/// Two pickers, and requests that are held open. Load diverts some requests of each prompt.
struct Diverted {
    pair: Pair,
    held: Vec<Open>,
    _echos: [Echo; 2],
    _nats: NatsProcess,
}

impl Diverted {
    async fn start() -> Self {
        let (nats, echos) = (NatsProcess::start().await, [Echo::start().await, Echo::start().await]);
        let addresses = [echos[0].address, echos[1].address];
        let pair = Pair::start(&pool("prefix-affinity", &addresses), &nats.url()).await;
        pair.until_peers().await;
        Self { pair, held: Vec::new(), _echos: echos, _nats: nats }
    }

    /// Sends requests with a new prompt through `envoy` until one more is diverted.
    async fn divert(&mut self, envoy: usize) {
        let before = shown(&self.pair.pickers[envoy]).await;
        let (to, prompt) = (self.pair.to[envoy], chat(1_000, true, self.held.len() as u64));
        while shown(&self.pair.pickers[envoy]).await == before {
            assert!(self.held.len() < 60, "a hot prompt moves");
            let request = client::request("POST", to, Http::H1, LONG_SSE, Payload::sized(prompt.clone()));
            let mut open = client::open(to, Http::H1, request).await.expect("a response");
            assert!(open.next().await.expect("a first event").is_some());
            self.held.push(open);
        }
        until_shown(&self.pair, before + 1).await;
    }

    async fn end(self) {
        drop(self.held);
        self.pair.until_both(&[0, 0]).await;
        self.pair.assert_settled().await;
    }
}

/// Deletes a count that was read. Returns how much was consumed.
async fn consume(picker: &AttacheProcess, count: u64) -> u64 {
    let target = format!("{PRESSURE}?count={count}");
    let request = client::request("DELETE", picker.metrics, Http::H1, &target, Payload::sized(Vec::new().into()));
    let reply = client::send(picker.metrics, Http::H1, request).await.expect("a response");
    reply.json()["consumed"].as_u64().unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&reply.body)))
}

#[tokio::test(flavor = "multi_thread")]
async fn diverted_requests_count_once_for_all_pickers_and_are_consumed_once() {
    let mut diverted = Diverted::start().await;
    diverted.divert(0).await;
    diverted.divert(1).await;
    assert_eq!(gauges(&diverted.pair).await, 2.0, "each picker's gauge has its own requests");
    // The second picker consumes what the first one counted.
    assert_eq!(consume(&diverted.pair.pickers[1], 1).await, 1);
    until_shown(&diverted.pair, 1).await;
    assert_eq!(gauges(&diverted.pair).await, 1.0);
    diverted.divert(0).await;
    let [a, b] = &diverted.pair.pickers;
    assert_eq!(consume(a, 2).await, 2);
    until_shown(&diverted.pair, 0).await;
    assert_eq!(consume(b, 2).await, 0);
    diverted.end().await;
}

/// A Deployment with this number of replicas, of which some are ready.
fn deployment(replicas: u64, ready: u64) -> Value {
    json!({
        "metadata": {"name": "llm"}, "spec": {"replicas": replicas},
        "status": {"replicas": replicas, "readyReplicas": ready},
    })
}

fn replicas(api: &FakeApi) -> u64 {
    let object = api.get(APPS, "deployments", "llm").expect("the Deployment");
    object["spec"]["replicas"].as_u64().expect("a number")
}

async fn until_replicas(api: &FakeApi, wanted: u64) {
    eventually(&format!("{wanted} replicas"), async || (replicas(api) == wanted).then_some(())).await;
}

/// Starts the example reconciler.
fn reconciler(api: &FakeApi, picker: &AttacheProcess, more: &[&str]) -> Process {
    let mut command = Command::new("python3");
    command.arg(repository().join("examples/kubernetes/reconciler/reconcile.py"));
    let (api, picker) = (format!("http://{}", api.address()), format!("http://{}", picker.metrics));
    command.args(["--api", &api, "--picker", &picker, "--model", "sim-8b", "--deployment", "llm"]);
    command.args(["--namespace", crate::api::NAMESPACE, "--max-replicas", "3", "--tick", "0.05"]).args(more);
    Process::spawn("reconcile.py", &mut command, scratch("reconciler"))
}

#[tokio::test(flavor = "multi_thread")]
async fn reconciler_adds_one_replica_at_a_time_up_to_the_maximum() {
    let (mut diverted, api) = (Diverted::start().await, FakeApi::start().await);
    api.install(APPS, "deployments");
    api.apply(APPS, "deployments", deployment(1, 1));
    let mut reconciler = reconciler(&api, &diverted.pair.pickers[0], &[]);
    for added in [2, 3] {
        diverted.divert(1).await;
        until_replicas(&api, added).await;
        // More pressure adds nothing before the replica is ready.
        diverted.divert(0).await;
        let ticks = api.request_count("get", "deployments");
        eventually("some ticks", async || (api.request_count("get", "deployments") > ticks + 6).then_some(())).await;
        assert_eq!((replicas(&api), shown(&diverted.pair.pickers[1]).await), (added, 2));
        api.apply(APPS, "deployments", deployment(added, added));
        until_shown(&diverted.pair, 0).await;
    }
    diverted.divert(0).await;
    reconciler
        .wait_for("the maximum", |process| process.stderr().contains("3 replicas of at most 3").then_some(()))
        .await;
    assert_eq!((replicas(&api), shown(&diverted.pair.pickers[0]).await), (3, 1));
    reconciler.signal("TERM");
    assert!(reconciler.wait().await.success(), "{}", reconciler.stderr());
    diverted.end().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reconciler_takes_back_a_replica_that_is_not_placed_and_backs_off() {
    let (mut diverted, api) = (Diverted::start().await, FakeApi::start().await);
    api.install(APPS, "deployments");
    api.apply(APPS, "deployments", deployment(1, 1));
    let options = ["--ready-within", "0.3", "--back-off", "3600"];
    let mut reconciler = reconciler(&api, &diverted.pair.pickers[0], &options);
    diverted.divert(0).await;
    until_replicas(&api, 2).await;
    until_replicas(&api, 1).await;
    reconciler
        .wait_for("the back-off", |process| process.stderr().contains("next attempt is in 3600 s").then_some(()))
        .await;
    let updates = api.request_count("update", "deployments");
    reconciler
        .wait_for("a tick with pressure", |process| process.stderr().contains("pressure is 1; the next").then_some(()))
        .await;
    assert_eq!((updates, api.request_count("update", "deployments")), (2, 2), "no attempt during the back-off");
    assert_eq!(shown(&diverted.pair.pickers[0]).await, 1, "nothing is consumed");
    // An operator's own number of replicas stays.
    api.apply(APPS, "deployments", deployment(7, 7));
    diverted.divert(1).await;
    reconciler
        .wait_for("the maximum", |process| process.stderr().contains("7 replicas of at most 3").then_some(()))
        .await;
    assert_eq!(replicas(&api), 7);
    diverted.end().await;
}
