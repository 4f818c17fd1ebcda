//! 1,000 pods with 200 changes a second, while the picker serves requests.

use super::members::NO_METRICS;
use super::picks::known;
use crate::api::churn::{Churn, cluster};
use crate::support::attache::AttacheProcess;
use crate::support::process::eventually;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

const PODS: usize = 1_000;
/// A deleted pod may be picked for this long after its event.
const GRACE: Duration = Duration::from_millis(100);
/// Duration of the test. `benches/kubernetes.rs` runs for a minute and measures memory.
const LASTS: Duration = Duration::from_secs(12);

/// Total time in which threads of a process waited for a busy CPU, from Linux's `schedstat`.
fn cpu_wait(pid: u32) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let waits = tasks.filter_map(|task| {
        let figures = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        figures.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    Duration::from_nanos(waits.sum())
}

/// Samples the CPU wait of the picker and of the test every 10 ms. The picker is not responsible for this delay.
fn record_cpu_waits(picker: u32) -> Arc<Mutex<Vec<(Instant, Duration)>>> {
    let seen: Arc<Mutex<Vec<(Instant, Duration)>>> = Arc::default();
    let notes = seen.clone();
    tokio::spawn(async move {
        loop {
            let waited = cpu_wait(picker) + cpu_wait(std::process::id());
            notes.lock().push((Instant::now(), waited));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    seen
}

/// Upper bound of the CPU wait of both processes between two moments.
fn cpu_wait_between(notes: &[(Instant, Duration)], from: Instant, to: Instant) -> Duration {
    let before = notes.iter().rev().find(|(at, _)| *at <= from).map_or(Duration::ZERO, |(_, waited)| *waited);
    let after = notes.iter().find(|(at, _)| *at >= to).or(notes.last()).map_or(Duration::ZERO, |(_, waited)| *waited);
    after.saturating_sub(before)
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_pods_are_not_picked_during_fast_churn() {
    let api = cluster(PODS).await;
    let mut churn = Churn::of(api.clone(), PODS);
    let picker = AttacheProcess::in_cluster(
        &api.kubeconfig(),
        &["--pool-name", "vllm", "--strategy", "random", "--workers", "1", NO_METRICS],
    )
    .await;
    picker.until_ready().await;
    let notes = record_cpu_waits(picker.process.id());
    let deadline = Instant::now() + LASTS;
    let asking = churn.ask(picker.grpc, deadline);
    let changes = churn.until(deadline).await;
    let asked = asking.await.expect("the asking task");
    let notes = notes.lock().clone();
    let too_late: Vec<_> =
        asked.late.iter().filter(|(asked, by)| *by > GRACE + cpu_wait_between(&notes, *asked - *by, *asked)).collect();
    let (picks, gone, worst) = (asked.picks, asked.late.len(), asked.worst());
    println!("{changes} changes, {picks} picks, {gone} of pods just gone, the latest {worst:?} after its end");
    assert!(picks > 100, "only {picks} picks");
    assert_eq!(too_late, Vec::<&(Instant, Duration)>::new());
    let want = churn.pods();
    eventually("the pods of the end", || async { (known(&picker).await == want).then_some(()) }).await;
    assert_eq!(picker.metric("attache_kube_unreadable_objects_total").await, 0.0);
}
