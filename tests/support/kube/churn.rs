//! Pods that are created and deleted at a high rate, with concurrent requests to the picker.

use super::picks::pick;
use super::{FakeApi, STABLE, pod, pool};
use crate::support::grpc::Connection;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Pod changes per second.
pub(crate) const CHANGES_PER_SECOND: u32 = 200;

/// The address of the pod with this number, which is used only once.
pub(crate) fn address(n: usize) -> String {
    format!("10.{}.{}.{}", 1 + n / 62_500, n / 250 % 250, n % 250 + 1)
}

/// An API server with the pool `vllm` of this many pods, `pod-0` and on.
pub(crate) async fn cluster(pods: usize) -> FakeApi {
    let api = FakeApi::start().await;
    api.apply(STABLE, "inferencepools", pool("vllm", "vllm", &[8000]));
    for n in 0..pods {
        api.pod(pod(&format!("pod-{n}"), "vllm", &address(n)));
    }
    api
}

/// Half of the changes delete a pod, the other half create one. Each address is used once.
pub(crate) struct Churn {
    api: FakeApi,
    alive: Vec<usize>,
    next: usize,
    changes: usize,
    ended: Arc<Mutex<BTreeMap<String, Instant>>>,
}

impl Churn {
    /// Churn in a cluster with this many pods.
    pub(crate) fn of(api: FakeApi, pods: usize) -> Self {
        Self { api, alive: (0..pods).collect(), next: pods, changes: 0, ended: Arc::default() }
    }

    /// Changes pods until `deadline`, and returns the number of changes.
    pub(crate) async fn until(&mut self, deadline: Instant) -> usize {
        let before = self.changes;
        let mut beat = tokio::time::interval(Duration::from_secs(1) / CHANGES_PER_SECOND);
        while Instant::now() < deadline {
            beat.tick().await;
            if self.changes.is_multiple_of(2) {
                let gone = self.alive.swap_remove(self.changes * 7_919 % self.alive.len());
                self.api.delete_pod(&format!("pod-{gone}"));
                self.ended.lock().insert(address(gone), Instant::now());
            } else {
                self.api.pod(pod(&format!("pod-{}", self.next), "vllm", &address(self.next)));
                self.alive.push(self.next);
                self.next += 1;
            }
            self.changes += 1;
        }
        self.changes - before
    }

    /// The current pods.
    pub(crate) fn pods(&self) -> BTreeSet<String> {
        self.alive.iter().map(|n| format!("pod-{n}")).collect()
    }

    /// Sends requests to the picker at `grpc` until `deadline`, in a task of its own.
    pub(crate) fn ask(&self, grpc: SocketAddr, deadline: Instant) -> tokio::task::JoinHandle<ChurnResult> {
        let ended = self.ended.clone();
        tokio::spawn(async move {
            let connection = Connection::open(grpc).await.expect("a connection");
            let mut result = ChurnResult { picks: 0, late: Vec::new() };
            while Instant::now() < deadline {
                let asked = Instant::now();
                let picked = pick(&connection, "m").await;
                result.picks += 1;
                let destination = picked.destination().rsplit_once(':').expect("a port").0.to_owned();
                let end = ended.lock().get(&destination).copied();
                // A pick for a request from before the deletion is not late.
                if let Some(end) = end
                    && asked > end
                {
                    result.late.push((asked, asked - end));
                }
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            result
        })
    }
}

/// Results of the requests.
pub(crate) struct ChurnResult {
    /// Number of picks.
    pub(crate) picks: u64,
    /// Picks of deleted pods: time of the request, and how long after the deletion.
    pub(crate) late: Vec<(Instant, Duration)>,
}

impl ChurnResult {
    /// The latest of them.
    pub(crate) fn worst(&self) -> Duration {
        self.late.iter().map(|(_, by)| *by).max().unwrap_or_default()
    }
}
