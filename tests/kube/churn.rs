//! A thousand pods that change two hundred times a second, while requests are picked for.

use crate::api::{FakeApi, STABLE, pod, pool};
use crate::members::NO_METRICS;
use crate::picks::{known, pick};
use crate::support::attache::AttacheProcess;
use crate::support::grpc::Connection;
use crate::support::process::eventually;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

const PODS: usize = 1_000;
const CHANGES_PER_SECOND: u32 = 200;
/// A deleted pod may be picked for this long after its event.
const GRACE: Duration = Duration::from_millis(100);
/// How long it goes on; ATTACHE_CHURN_SECONDS says otherwise.
const DEFAULT_SECONDS: u64 = 12;

fn address(n: usize) -> String {
    format!("10.{}.{}.{}", 1 + n / 62_500, n / 250 % 250, n % 250 + 1)
}

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
    let seconds = std::env::var("ATTACHE_CHURN_SECONDS").ok().and_then(|s| s.parse().ok()).unwrap_or(DEFAULT_SECONDS);
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    let mut alive: Vec<usize> = (0..PODS).collect();
    for n in &alive {
        api.pod(pod(&format!("pod-{n}"), "vllm", &address(*n)));
    }
    let picker = AttacheProcess::in_cluster(
        &api.kubeconfig(),
        &["--pool-name", "vllm", "--strategy", "random", "--workers", "1", NO_METRICS],
    )
    .await;
    picker.until_ready().await;
    let notes = excuses(picker.process.id());
    let ended: Arc<Mutex<BTreeMap<String, Instant>>> = Arc::default();
    let deadline = Instant::now() + Duration::from_secs(seconds);
    let asking = {
        let ended = ended.clone();
        let grpc = picker.grpc;
        tokio::spawn(async move {
            let connection = Connection::open(grpc).await.expect("a connection");
            let (mut picks, mut late) = (0u64, Vec::new());
            while Instant::now() < deadline {
                let asked = Instant::now();
                let picked = pick(&connection, "m").await;
                picks += 1;
                let destination = picked.destination().rsplit_once(':').expect("a port").0.to_owned();
                let end = ended.lock().get(&destination).copied();
                // A pick that was asked for before the end is not late.
                if let Some(end) = end
                    && asked > end
                {
                    late.push((asked, asked - end));
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            (picks, late)
        })
    };
    // Half of the changes end a pod, the other half make one; each address is used once.
    let mut next = PODS;
    let mut beat = tokio::time::interval(Duration::from_secs(1) / CHANGES_PER_SECOND);
    let mut changes = 0usize;
    while Instant::now() < deadline {
        beat.tick().await;
        if changes.is_multiple_of(2) {
            let gone = alive.swap_remove(changes * 7_919 % alive.len());
            api.delete_pod(&format!("pod-{gone}"));
            ended.lock().insert(address(gone), Instant::now());
        } else {
            api.pod(pod(&format!("pod-{next}"), "vllm", &address(next)));
            alive.push(next);
            next += 1;
        }
        changes += 1;
    }
    let (picks, late) = asking.await.expect("the asking task");
    let notes = notes.lock().clone();
    let worst = late.iter().map(|(_, by)| *by).max().unwrap_or_default();
    let too_late: Vec<_> =
        late.iter().filter(|(asked, by)| *by > GRACE + excused(&notes, *asked - *by, *asked)).collect();
    println!("{changes} changes, {picks} picks, {} of pods just gone, the latest {worst:?} after its end", late.len());
    assert!(picks > 100, "only {picks} picks");
    assert_eq!(too_late, Vec::<&(Instant, Duration)>::new());
    let want: BTreeSet<String> = alive.iter().map(|n| format!("pod-{n}")).collect();
    eventually("the pods of the end", || async { (known(&picker).await == want).then_some(()) }).await;
    assert_eq!(picker.metric("attache_kube_unreadable_objects_total").await, 0.0);
}
