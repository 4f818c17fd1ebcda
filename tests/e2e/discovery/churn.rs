//! A thousand pods that change two hundred times a second, while requests are picked for.

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
/// How long it goes on. `benches/kubernetes.rs` goes on for a minute, and looks at the memory.
const LASTS: Duration = Duration::from_secs(12);

/// How long the threads of a process have waited for a processor that others had, since they began. Linux counts it.
fn kept_waiting(pid: u32) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let waits = tasks.filter_map(|task| {
        let figures = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        figures.split_whitespace().nth(1)?.parse::<u64>().ok()
    });
    Duration::from_nanos(waits.sum())
}

/// What both sides were kept waiting by a busy machine, from time to time: no picker can be blamed for that.
fn excuses(picker: u32) -> Arc<Mutex<Vec<(Instant, Duration)>>> {
    let seen: Arc<Mutex<Vec<(Instant, Duration)>>> = Arc::default();
    let notes = seen.clone();
    tokio::spawn(async move {
        loop {
            let waited = kept_waiting(picker) + kept_waiting(std::process::id());
            notes.lock().push((Instant::now(), waited));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    seen
}

/// What both sides were kept waiting between two moments, at most.
fn excused(notes: &[(Instant, Duration)], from: Instant, to: Instant) -> Duration {
    let before = notes.iter().rev().find(|(at, _)| *at <= from).map_or(Duration::ZERO, |(_, waited)| *waited);
    let after = notes.iter().find(|(at, _)| *at >= to).or(notes.last()).map_or(Duration::ZERO, |(_, waited)| *waited);
    after.saturating_sub(before)
}

#[tokio::test(flavor = "multi_thread")]
async fn no_pod_is_picked_after_its_end_however_fast_pods_change() {
    let api = cluster(PODS).await;
    let mut churn = Churn::of(api.clone(), PODS);
    let picker = AttacheProcess::in_cluster(
        &api.kubeconfig(),
        &["--pool-name", "vllm", "--strategy", "random", "--workers", "1", NO_METRICS],
    )
    .await;
    picker.until_ready().await;
    let notes = excuses(picker.process.id());
    let deadline = Instant::now() + LASTS;
    let asking = churn.ask(picker.grpc, deadline);
    let changes = churn.until(deadline).await;
    let asked = asking.await.expect("the asking task");
    let notes = notes.lock().clone();
    let too_late: Vec<_> =
        asked.late.iter().filter(|(asked, by)| *by > GRACE + excused(&notes, *asked - *by, *asked)).collect();
    let (picks, gone, worst) = (asked.picks, asked.late.len(), asked.worst());
    println!("{changes} changes, {picks} picks, {gone} of pods just gone, the latest {worst:?} after its end");
    assert!(picks > 100, "only {picks} picks");
    assert_eq!(too_late, Vec::<&(Instant, Duration)>::new());
    let want = churn.pods();
    eventually("the pods of the end", || async { (known(&picker).await == want).then_some(()) }).await;
    assert_eq!(picker.metric("attache_kube_unreadable_objects_total").await, 0.0);
}
