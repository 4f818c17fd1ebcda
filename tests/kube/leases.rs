//! One replica leads, the others wait.

use crate::api::{FakeApi, NAMESPACE, STABLE, pod, pool};
use crate::members::NO_METRICS;
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::process::eventually;
use serde_json::Value;

const ELECTION: &[&str] = &["--pool-name", "vllm", "--ha-enable-leader-election", "--drain-min-delay=0s", NO_METRICS];

fn holder(api: &FakeApi) -> Option<String> {
    let name = format!("epp-{NAMESPACE}-vllm.gateway-api-inference-extension.sigs.k8s.io");
    let lease: Value = api.get("coordination.k8s.io/v1", "leases", &name)?;
    lease["spec"]["holderIdentity"].as_str().map(str::to_owned)
}

#[tokio::test(flavor = "multi_thread")]
async fn one_replica_is_ready_and_the_next_follows_when_it_ends() {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    let mut first = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    first.until_ready().await;
    let led_by = holder(&api).expect("a lease");
    let second = AttacheProcess::in_cluster(&api.kubeconfig(), ELECTION).await;
    eventually("the second to lack nothing but the lease", || async {
        let page = client::get(second.metrics, "/ready").await.ok()?;
        let text = String::from_utf8_lossy(&page.body).into_owned();
        (!page.status.is_success() && text.contains("this replica leads") && !text.contains("discovered")).then_some(())
    })
    .await;
    assert_eq!(holder(&api).as_ref(), Some(&led_by), "still the first");
    assert!(first.is_ready().await);
    first.process.signal("TERM");
    first.process.wait().await;
    second.until_ready().await;
    let led_by_now = holder(&api).expect("a lease");
    assert!(!led_by_now.is_empty() && led_by_now != led_by, "{led_by_now}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_right_that_is_missing_is_named() {
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
