//! Leader election: one replica is the leader, the others wait.

use super::members::NO_METRICS;
use crate::api::{FakeApi, NAMESPACE, Outage, STABLE, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::process::eventually;
use serde_json::{Value, json};

const ELECTION: &[&str] = &["--pool-name", "vllm", "--ha-enable-leader-election", "--drain-min-delay=0s", NO_METRICS];

fn holder(api: &FakeApi) -> Option<String> {
    holder_of(api, "vllm")
}

fn holder_of(api: &FakeApi, pool: &str) -> Option<String> {
    let name = format!("epp-{NAMESPACE}-{pool}.gateway-api-inference-extension.sigs.k8s.io");
    let lease: Value = api.get("coordination.k8s.io/v1", "leases", &name)?;
    lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
}

async fn until_only_the_lease_is_missing(picker: &AttacheProcess) {
    eventually("a picker to lack nothing but the lease", || async {
        let page = client::get(picker.metrics, "/ready").await.ok()?;
        let text = String::from_utf8_lossy(&page.body).into_owned();
        let others = ["discovered", "searched"].iter().any(|other| text.contains(other));
        (!page.status.is_success() && text.contains("leadership (the Lease)") && !others).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn reload_that_changes_the_lease_waits_for_a_restart() {
    let api = FakeApi::start().await;
    let directory = crate::support::process::scratch("kube-lease");
    let file = directory.path().join("attache.yaml");
    let write = |selector: &str, strategy: &str| {
        let pool = format!("{{name: a, strategy: {strategy}, kubernetes: {{poolSelector: {selector}, engine: none}}}}");
        let text =
            format!("apiVersion: attache.dev/v1\nkind: Attache\nserver: {{modelStatus: true}}\npools: [{pool}]\n");
        std::fs::write(&file, text).expect("writing the configuration");
    };
    write("tier=gold", "random");
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-file", &file.display().to_string()]).await;
    picker.until_ready().await;
    let waits = || picker.process.stderr().matches("that the lease is of (`kubernetes`)").count();
    write("tier=gold", "least-request");
    picker.until_metric("attache_config_reloads_total", 1.0).await;
    assert_eq!(waits(), 0, "it is the same");
    write("tier=iron", "least-request");
    picker.until_metric("attache_config_reloads_total", 2.0).await;
    assert_eq!(waits(), 1, "{}", picker.process.stderr());
}

#[tokio::test(flavor = "multi_thread")]
async fn second_replica_becomes_ready_when_the_leader_ends() {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    let mut first = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    first.until_ready().await;
    let led_by = holder(&api).expect("a lease");
    let second = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    until_only_the_lease_is_missing(&second).await;
    assert_eq!(holder(&api).as_ref(), Some(&led_by), "still the first");
    assert!(first.is_ready().await);
    first.process.signal("TERM");
    first.process.wait().await;
    second.until_ready().await;
    let led_by_now = holder(&api).expect("a lease");
    assert!(!led_by_now.is_empty() && led_by_now != led_by, "{led_by_now}");
}

#[tokio::test(flavor = "multi_thread")]
async fn pickers_with_different_selectors_hold_separate_leases() {
    let api = FakeApi::start().await;
    api.install("v1", "configmaps");
    for (name, ip) in [("a", "10.0.0.1"), ("b", "10.0.0.2")] {
        let mut pool = pool(name, name, &[8000]);
        pool["metadata"]["labels"] = json!({"tier": name});
        api.apply(STABLE, "inferencepools", pool);
        api.pod(pod(name, name, ip));
    }
    let started = async |selector: &str| {
        let arguments = [&["--pool-selector", selector], &ELECTION[2..]].concat();
        AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await
    };
    let (of_a, of_b) = (started("tier=a").await, started("tier=b").await);
    of_a.until_ready().await;
    of_b.until_ready().await;
    assert!(of_a.is_ready().await, "the one takes nothing from the other");
    until_only_the_lease_is_missing(&started("tier=a").await).await;
    // Other versions must use the same name.
    assert!(holder_of(&api, "search-ac9dee1be785").is_some_and(|holder| !holder.is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_lease_right_is_named() {
    for verb in ["get", "create"] {
        let api = FakeApi::start().await;
        api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
        api.pod(pod("a", "vllm", "10.0.0.1"));
        api.forbid(verb, "leases", true);
        let picker = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
        let refused = format!("refuses `{verb}` on `leases` (group `coordination.k8s.io`)");
        eventually("the missing right in the log", || async {
            picker.process.stderr().contains(&refused).then_some(())
        })
        .await;
        assert!(!picker.is_ready().await);
        api.forbid(verb, "leases", false);
        picker.until_ready().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn leader_stays_ready_during_an_api_server_outage() {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    let first = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    first.until_ready().await;
    let second = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    until_only_the_lease_is_missing(&second).await;
    api.fail(Outage::Status(503));
    let lost = || async { first.process.stderr().contains("this replica lost leadership").then_some(()) };
    eventually("a lease that could not be renewed", lost).await;
    assert!(first.is_ready().await, "it writes nothing, and goes on with what it knows");
    assert!(!second.is_ready().await);
    api.fail(Outage::None);
    // After the outage only the holder of the lease is ready.
    eventually("one ready replica", || async {
        let (first, second) = (first.is_ready().await, second.is_ready().await);
        (holder(&api).is_some() && first != second).then_some(())
    })
    .await;
}
