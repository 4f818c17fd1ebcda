//! Time that requests spent in queues, and requests that queues rejected. Called by [`super::Tally`]. Pure.

use super::latency::Latency;
use crate::served::{QueueOutcome, Queued};
use std::collections::BTreeMap;
use std::time::Duration;

/// 100 flows for each band. Further tenants are counted together, so that memory does not grow with a trace.
pub const MAX_FLOWS: usize = 100;
/// Name under which flows beyond [`MAX_FLOWS`] are counted.
pub const OTHERS: &str = "(others)";

/// Requests of a pool with flow control, by band and tenant.
#[derive(Clone, Debug, Default)]
pub struct Queueing {
    waited: Latency,
    counts: FlowCounts,
    flows: BTreeMap<(i32, String), FlowCounts>,
}

/// Requests by their outcome in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FlowCounts {
    /// Requests that were dequeued, or did not have to wait.
    pub passed: u64,
    /// Requests that an admitter rejected before the queue.
    pub shed: u64,
    /// Requests that were rejected because the queue was at its capacity.
    pub full: u64,
    /// Requests that waited for their time to live.
    pub expired: u64,
    /// Requests that a request of higher priority replaced.
    pub evicted: u64,
    /// Total time in the queue of dequeued requests.
    pub waited: Duration,
    /// Longest time in the queue of a dequeued request.
    pub longest: Duration,
}

impl FlowCounts {
    fn add(&mut self, queued: &Queued<'_>) {
        match queued.outcome {
            QueueOutcome::Passed => {
                self.passed += 1;
                self.waited += queued.waited;
                self.longest = self.longest.max(queued.waited);
            }
            QueueOutcome::Shed => self.shed += 1,
            QueueOutcome::Full => self.full += 1,
            QueueOutcome::Expired => self.expired += 1,
            QueueOutcome::Evicted => self.evicted += 1,
        }
    }

    /// Mean time in the queue of dequeued requests, seconds; `None` if there are none.
    #[must_use]
    pub fn mean_wait(&self) -> Option<f64> {
        (self.passed > 0).then(|| self.waited.as_secs_f64() / self.passed as f64)
    }
}

impl Queueing {
    /// Counts one request that left the queue.
    pub fn add(&mut self, queued: &Queued<'_>) {
        if queued.outcome == QueueOutcome::Passed {
            self.waited.add(queued.waited);
        }
        self.counts.add(queued);
        let tenant = queued.tenant.unwrap_or_default();
        let key = (queued.priority, tenant.to_owned());
        let is_known = self.flows.contains_key(&key) || self.flows.len() < MAX_FLOWS;
        let key = if is_known { key } else { (queued.priority, OTHERS.to_owned()) };
        self.flows.entry(key).or_default().add(queued);
    }

    /// Time in the queue of dequeued requests.
    #[must_use]
    pub fn waited(&self) -> &Latency {
        &self.waited
    }

    /// Counts of all flows together.
    #[must_use]
    pub fn counts(&self) -> FlowCounts {
        self.counts
    }

    /// Counts by priority and tenant; the tenant is empty if the workload names none.
    pub fn flows(&self) -> impl DoubleEndedIterator<Item = (i32, &str, FlowCounts)> {
        self.flows.iter().map(|((priority, tenant), counts)| (*priority, tenant.as_str(), *counts))
    }
}
