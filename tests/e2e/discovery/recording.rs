//! Recordings of a picker with Kubernetes discovery replay exactly.

use super::members::NO_METRICS;
use super::picks::{pick, until_known};
use crate::api::{FakeApi, STABLE, pod, pool};
use crate::support::attache::AttacheProcess;
use crate::support::grpc::Connection;
use crate::support::process::scratch;
use attache_replay::record::replay_file;

#[tokio::test(flavor = "multi_thread")]
async fn recorded_decisions_replay_exactly_while_pods_change() {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    api.pod(pod("a", "vllm", "10.0.0.1"));
    let files = scratch("recording");
    let record = files.path().join("run.jsonl");
    let arguments = ["--pool-name", "vllm", NO_METRICS, "--record", &record.display().to_string()];
    let mut picker = AttacheProcess::in_cluster(&api.kubeconfig(), &arguments).await;
    picker.until_ready().await;
    let connection = Connection::open(picker.grpc).await.expect("a connection");
    let mut picks = 0_u64;
    for round in 0..3 {
        let newcomer = format!("b{round}");
        api.pod(pod(&newcomer, "vllm", &format!("10.0.1.{round}")));
        until_known(&picker, &["a", &newcomer]).await;
        for _ in 0..20 {
            pick(&connection, "m").await;
            picks += 1;
        }
        api.delete_pod(&newcomer);
        until_known(&picker, &["a"]).await;
        pick(&connection, "m").await;
        picks += 1;
    }
    drop(connection);
    picker.assert_settled().await;
    picker.process.signal("TERM");
    assert!(picker.process.wait().await.success());
    let summary = replay_file(&record, None, &attache::plugins::registry()).expect("a replay");
    assert!(summary.is_exact() && summary.cut.is_none(), "{summary}");
    assert_eq!(summary.decisions, picks);
    assert!(summary.endpoints.len() > 1, "{summary}");
}
