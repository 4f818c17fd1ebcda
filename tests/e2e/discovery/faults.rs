//! An API server that is down, slow, restarted or lacks rights.

use super::members::NO_METRICS;
use super::picks::{Picked, known, pick, until_known};
use crate::api::{FakeApi, Outage, STABLE, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::client;
use crate::support::grpc::Connection;
use crate::support::process::eventually;
use serde_json::json;
use std::collections::BTreeSet;
use std::time::Duration;

const ARGUMENTS: &[&str] = &["--pool-name", "vllm", NO_METRICS];

/// A cluster with a pool of `pods` pods.
async fn cluster(pods: usize) -> FakeApi {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    for n in 0..pods {
        api.pod(pod(&format!("pod-{n:04}"), "vllm", &format!("10.1.{}.{}", n / 250, n % 250 + 1)));
    }
    api
}

async fn started(api: &FakeApi) -> AttacheProcess {
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), ARGUMENTS).await;
    picker.until_ready().await;
    picker
}

/// Number of log lines that contain `text`.
fn log_lines_with(picker: &AttacheProcess, text: &str) -> usize {
    picker.process.stderr().lines().filter(|line| line.contains(text)).count()
}

/// Decisions with possibly outdated endpoints.
async fn stale_decisions(picker: &AttacheProcess) -> f64 {
    let page = client::get(picker.metrics, "/metrics").await.expect("the picker's metrics");
    let page = String::from_utf8_lossy(&page.body).into_owned();
    let value = page.lines().find_map(|line| line.strip_prefix("attache_degraded_total{mode=\"discovery_stale\"} "));
    value.and_then(|value| value.parse().ok()).expect("the metric")
}

/// Waits until the picker has sent more than `more_than` requests of this verb and kind.
async fn until_asked(api: &FakeApi, verb: &str, plural: &str, more_than: usize) {
    let what = format!("another `{verb}` of {plural}");
    eventually(&what, || async { (api.request_count(verb, plural) > more_than).then_some(()) }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_paged_and_expired_watches_relist() {
    let api = cluster(1_100).await;
    let picker = started(&api).await;
    assert_eq!(known(&picker).await.len(), 1_100);
    assert!(api.request_count("list", "pods") >= 3, "pages of 500");
    let lists = picker.metric("attache_kube_lists_total").await;
    // The picker gets no events for these changes.
    api.fail(Outage::Status(503));
    api.delete_pod("pod-0000");
    api.pod(pod("late", "vllm", "10.2.0.1"));
    api.forget();
    api.fail(Outage::None);
    let mut want: BTreeSet<String> = (1..1_100).map(|n| format!("pod-{n:04}")).collect();
    want.insert("late".into());
    eventually("what is there now", || async { (known(&picker).await == want).then_some(()) }).await;
    assert!(picker.metric("attache_kube_lists_total").await > lists);
}

#[tokio::test(flavor = "multi_thread")]
async fn api_server_outage_keeps_endpoints_and_is_logged_once() {
    let api = cluster(3).await;
    let picker = started(&api).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let before = known(&picker).await;
    for outage in [Outage::Status(503), Outage::Broken, Outage::Status(429)] {
        let questions = || api.request_count("list", "pods") + api.request_count("watch", "pods");
        let asked = questions();
        api.fail(outage.clone());
        // The resource version expires too, so the picker has to list during the outage.
        api.forget();
        for n in 0..3 {
            eventually("another question", || async { (questions() > asked + n).then_some(()) }).await;
            assert_eq!(known(&picker).await, before, "{outage:?}");
            assert!(pick(&connection, "m").await.destination().starts_with("10.1.0."), "{outage:?}");
        }
        assert!(picker.is_ready().await, "{outage:?}");
        assert!(picker.metric("attache_kube_out_of_touch").await >= 1.0, "{outage:?}");
        let by_what_was_known = stale_decisions(&picker).await;
        pick(&connection, "m").await;
        assert_eq!(stale_decisions(&picker).await, by_what_was_known + 1.0, "{outage:?}");
        api.fail(Outage::None);
        picker.until_metric("attache_kube_out_of_touch", 0.0).await;
        let by_what_was_known = stale_decisions(&picker).await;
        pick(&connection, "m").await;
        assert_eq!(stale_decisions(&picker).await, by_what_was_known, "{outage:?}");
    }
    api.delete_pod("pod-0001");
    until_known(&picker, &["pod-0000", "pod-0002"]).await;
    // The failure of the pod watch is logged at most once per outage.
    let times_logged = log_lines_with(&picker, "watch of `pods` failed");
    assert!((1..=3).contains(&times_logged), "logged {times_logged} times");
}

/// The failed watch of the old selector can no longer report that it recovered.
#[tokio::test(flavor = "multi_thread")]
async fn new_selector_is_in_sync_after_the_old_watch_failed() {
    let api = cluster(1).await;
    api.pod(pod("other", "other", "10.1.0.9"));
    let picker = started(&api).await;
    let watches = api.request_count("watch", "pods");
    // Its watches fail until the backoff is long: the next try is seconds away.
    api.fail(Outage::Watches("/pods", 503));
    until_asked(&api, "watch", "/pods", watches + 5).await;
    assert_eq!(picker.metric("attache_kube_out_of_touch").await, 1.0);
    api.fail(Outage::None);
    api.apply(STABLE, "inferencepools", pool("vllm", "other", &[8000]));
    until_known(&picker, &["other"]).await;
    picker.until_metric("attache_kube_out_of_touch", 0.0).await;
}

/// Any log line counts, because libraries may log each try in their own words.
#[tokio::test(flavor = "multi_thread")]
async fn unreachable_api_server_is_logged_once_per_kind() {
    let api = FakeApi::start().await;
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
    let text = std::fs::read_to_string(api.kubeconfig()).expect("the kubeconfig");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config["clusters"][0]["cluster"]["server"] = format!("http://{nobody}").into();
    std::fs::write(api.kubeconfig(), config.to_string()).expect("writing the kubeconfig");
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), ARGUMENTS).await;
    eventually("four tries of each kind", || async {
        (picker.metric("attache_kube_failures_total").await >= 24.0).then_some(())
    })
    .await;
    let lines = log_lines_with(&picker, "\"level\":\"WARN\"") + log_lines_with(&picker, "\"level\":\"ERROR\"");
    assert_eq!(lines, 6, "the pool, two kinds of two groups each, and models: {}", picker.process.stderr());
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_api_server_only_delays_readiness() {
    let api = cluster(600).await;
    api.delay(Duration::from_millis(300));
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), ARGUMENTS).await;
    assert!(!picker.is_ready().await, "four answers take longer than a start");
    picker.until_ready().await;
    assert_eq!(known(&picker).await.len(), 600, "ready means that all are known");
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_crd_pool_or_right_is_logged_and_awaited() {
    let api = cluster(2).await;
    api.uninstall(STABLE, "inferencepools");
    let picker = AttacheProcess::in_cluster(&api.kubeconfig(), ARGUMENTS).await;
    let no_crd = "does not know `inferencepools` of `inference.networking.k8s.io/v1`";
    eventually("the missing definition in the log", || async { (log_lines_with(&picker, no_crd) == 1).then_some(()) })
        .await;

    api.install(STABLE, "inferencepools");
    let no_pool = "InferencePool not found";
    eventually("the missing pool in the log", || async { (log_lines_with(&picker, no_pool) == 1).then_some(()) }).await;

    api.forbid("list", "pods", true);
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    let no_right = "refuses `list` on `pods` (group ``) in namespace `inference`; the service account's Role there needs \
                    `{apiGroups: [\\\"\\\"], resources: [pods], verbs: [list, watch]}`";
    eventually("the missing right in the log", || async { (log_lines_with(&picker, no_right) == 1).then_some(()) })
        .await;
    let asked = api.request_count("list", "pods");
    until_asked(&api, "list", "pods", asked + 1).await;
    assert!(!picker.is_ready().await);
    assert!(picker.metric("attache_kube_refused_total").await >= 1.0);
    assert_eq!((log_lines_with(&picker, no_crd), log_lines_with(&picker, no_right)), (1, 1), "each once");

    api.forbid("list", "pods", false);
    picker.until_ready().await;
    until_known(&picker, &["pod-0000", "pod-0001"]).await;
    // A deleted pool removes its endpoints.
    api.delete(STABLE, "inferencepools", "vllm");
    until_known(&picker, &[]).await;
    assert_eq!(log_lines_with(&picker, no_pool), 2);
}

/// As after a restart: there is no last valid version of the pool.
#[tokio::test(flavor = "multi_thread")]
async fn invalid_pool_is_logged_has_no_endpoints_and_allows_readiness() {
    let api = cluster(1).await;
    let good = || pool("vllm", "vllm", &[8000]);
    let mut without_labels = good();
    without_labels["spec"]["selector"] = json!({});
    api.apply(STABLE, "inferencepools", without_labels);
    let picker = started(&api).await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let Picked::Refused(503, _) = pick(&connection, "m").await else { panic!("somebody has answered") };
    let times_logged = |what: &str| log_lines_with(&picker, what);
    assert_eq!(times_logged("invalid InferencePool; it has no endpoints until it is valid"), 1);
    assert_eq!(
        times_logged("`spec.selector` is empty: it must name at least one label"),
        1,
        "{}",
        picker.process.stderr()
    );
    assert_eq!(times_logged("InferencePool not found"), 0);
    assert_eq!(picker.metric("attache_kube_pool_unreadable").await, 1.0);

    api.apply(STABLE, "inferencepools", good());
    until_known(&picker, &["pod-0000"]).await;
    picker.until_metric("attache_kube_pool_unreadable", 0.0).await;
    assert_eq!(pick(&connection, "m").await.destination(), "10.1.0.1:8000");
    // An invalid update of a valid pool changes nothing.
    let mut odd_port = good();
    odd_port["spec"]["targetPorts"] = json!([{"number": 70_000}]);
    api.apply(STABLE, "inferencepools", odd_port);
    picker.until_metric("attache_kube_pool_unreadable", 1.0).await;
    assert_eq!(times_logged("`spec.targetPorts`: got port 70000, 1 to 65535 are allowed"), 1);
    assert_eq!(pick(&connection, "m").await.destination(), "10.1.0.1:8000");
    assert!(picker.is_ready().await);
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_optional_kinds_do_not_delay_readiness() {
    let api = cluster(1).await;
    api.install(crate::api::LLM_D, "inferenceobjectives");
    api.forbid("list", "inferenceobjectives", true);
    api.fail(Outage::Of("inferencemodels", 503));
    let picker = started(&api).await;
    assert_eq!(known(&picker).await.len(), 1);
    // Once for llm-d's group and once for GIE's: rights are checked before it is known whether the kind exists.
    eventually("the refusals in the log", || async {
        (log_lines_with(&picker, "refuses `list` on `inferenceobjectives`") == 2).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rejected_credentials_are_not_reported_as_missing_rights() {
    let api = cluster(1).await;
    let picker = started(&api).await;
    api.fail(Outage::Of("pods", 401));
    let times_logged = "rejects the credentials";
    eventually("the rejected credentials in the log", || async {
        (log_lines_with(&picker, times_logged) == 1).then_some(())
    })
    .await;
    assert_eq!(log_lines_with(&picker, "refuses"), 0, "a Role would change nothing");
    assert_eq!(picker.metric("attache_kube_refused_total").await, 0.0);
    assert_eq!(known(&picker).await.len(), 1, "what is known stays");
    api.fail(Outage::None);
    picker.until_metric("attache_kube_out_of_touch", 0.0).await;
}

/// The service account has a Role without `watch`.
#[tokio::test(flavor = "multi_thread")]
async fn pods_without_watch_right_are_listed_repeatedly() {
    let api = cluster(1).await;
    api.forbid("watch", "pods", true);
    let picker = started(&api).await;
    assert_eq!(known(&picker).await.len(), 1);
    let refused = "refuses `watch` on `pods`";
    eventually("the missing right in the log", || async { (log_lines_with(&picker, refused) == 1).then_some(()) })
        .await;
    api.pod(pod("new", "vllm", "10.1.0.2"));
    until_known(&picker, &["new", "pod-0000"]).await;
    api.delete_pod("pod-0000");
    until_known(&picker, &["new"]).await;
    assert_eq!(log_lines_with(&picker, refused), 1, "logged once: {}", picker.process.stderr());
    assert_eq!(picker.metric("attache_kube_out_of_touch").await, 1.0, "a list does not bring it back");
    assert!(picker.is_ready().await);
    let lists = api.request_count("list", "pods");
    assert!(lists <= 8, "every 10 s: {lists}");

    api.forbid("watch", "pods", false);
    picker.until_metric("attache_kube_out_of_touch", 0.0).await;
    assert_eq!(log_lines_with(&picker, "watch works again"), 1, "{}", picker.process.stderr());
    let lists = api.request_count("list", "pods");
    api.pod(pod("later", "vllm", "10.1.0.3"));
    until_known(&picker, &["later", "new"]).await;
    assert_eq!(api.request_count("list", "pods"), lists, "by a watch");
}

#[tokio::test(flavor = "multi_thread")]
async fn picker_without_any_pool_is_not_ready() {
    let api = cluster(1).await;
    let picker = started(&api).await;
    api.delete(STABLE, "inferencepools", "vllm");
    eventually("a picker that is not ready", || async {
        let page = client::get(picker.metrics, "/ready").await.ok()?;
        let text = String::from_utf8_lossy(&page.body).into_owned();
        (!page.status.is_success() && text.contains("an InferencePool that exists")).then_some(())
    })
    .await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    picker.until_ready().await;
    until_known(&picker, &["pod-0000"]).await;

    // One remaining pool keeps the picker ready.
    let more = pool("other", "vllm", &[8000]);
    api.apply(STABLE, "inferencepools", more);
    let text = "apiVersion: attache.dev/v1\nkind: Attache\npools:\n- {name: a, kubernetes: {pool: vllm, engine: none}}\n\
                - {name: b, match: {models: [b]}, kubernetes: {pool: other, engine: none}}\n";
    let both = AttacheProcess::in_cluster(&api.kubeconfig(), &["--config-text", text]).await;
    both.until_ready().await;
    api.delete(STABLE, "inferencepools", "other");
    eventually("the missing pool in the log", || async {
        (log_lines_with(&both, "InferencePool not found") == 1).then_some(())
    })
    .await;
    assert!(both.is_ready().await);
    api.delete(STABLE, "inferencepools", "vllm");
    eventually("a picker that is not ready", || async { (!both.is_ready().await).then_some(()) }).await;
}
