//! The most recent decisions, for operators who ask where a request went and why.

use attache_request::event::{DecisionRecord, KeptExplanation, REJECTED};
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Ring buffers of the last records. Rejected requests have their own: a client that only sends bad requests does not
/// displace the others.
#[derive(Debug)]
pub struct Decisions {
    capacity: usize,
    rings: Mutex<Rings>,
    explanations: Mutex<Explanations>,
}

#[derive(Debug, Default)]
struct Rings {
    /// Number of records so far.
    sequence: u64,
    routed: VecDeque<DecisionRecord>,
    rejected: VecDeque<DecisionRecord>,
}

/// 64 MiB: most memory of kept explanations, whatever their number. Those of 1,000 endpoints take some 200 KB each.
const MAX_EXPLANATION_BYTES: usize = 64 << 20;

/// Explanations, oldest first.
#[derive(Debug, Default)]
struct Explanations {
    kept: VecDeque<KeptExplanation>,
    bytes: usize,
}

impl Explanations {
    /// Drops the oldest until `kept` are left, and their memory is within the limit.
    fn limit(&mut self, kept: usize) {
        while self.kept.len() > kept || self.bytes > MAX_EXPLANATION_BYTES {
            let Some(oldest) = self.kept.pop_front() else { return };
            self.bytes -= oldest.json.len();
        }
    }
}

impl Decisions {
    /// Creates buffers for `capacity` routed and as many rejected requests; 0 records nothing.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, rings: Mutex::default(), explanations: Mutex::default() }
    }

    /// Keeps an explanation, and at most `kept` of them.
    pub fn keep(&self, kept: usize, explanation: KeptExplanation) {
        let mut explanations = self.explanations.lock();
        explanations.bytes += explanation.json.len();
        explanations.kept.push_back(explanation);
        explanations.limit(kept);
    }

    /// The latest explanation of the request with this `x-request-id`, JSON, if it is among the `kept` latest ones.
    #[must_use]
    pub fn explanation(&self, kept: usize, request_id: &str) -> Option<String> {
        let mut explanations = self.explanations.lock();
        explanations.limit(kept);
        explanations.kept.iter().rev().find(|kept| kept.request_id == request_id).map(|kept| kept.json.clone())
    }

    /// Whether decisions are recorded.
    #[must_use]
    pub fn enabled(&self) -> bool {
        self.capacity > 0
    }

    /// Adds a record and sets its sequence number.
    pub fn push(&self, mut record: DecisionRecord) {
        if self.capacity == 0 {
            return;
        }
        let mut rings = self.rings.lock();
        record.sequence = rings.sequence;
        rings.sequence += 1;
        let ring = if record.end == REJECTED { &mut rings.rejected } else { &mut rings.routed };
        if ring.len() == self.capacity {
            ring.pop_front();
        }
        ring.push_back(record);
    }

    /// The records, oldest first.
    #[must_use]
    pub fn snapshot(&self) -> Vec<DecisionRecord> {
        self.latest(usize::MAX)
    }

    /// The latest `limit` records, oldest first.
    fn latest(&self, limit: usize) -> Vec<DecisionRecord> {
        let rings = self.rings.lock();
        // Each ring is sorted, so that no other record can be among the latest.
        let latest = |ring: &VecDeque<DecisionRecord>| ring.iter().rev().take(limit).cloned().collect::<Vec<_>>();
        let mut records = latest(&rings.routed);
        records.extend(latest(&rings.rejected));
        drop(rings);
        records.sort_by_key(|record| record.sequence);
        records.drain(..records.len().saturating_sub(limit));
        records
    }

    /// The latest `limit` records as a JSON list, newest first, each with its age.
    #[must_use]
    pub fn to_json(&self, now: Timestamp, limit: usize) -> serde_json::Value {
        #[derive(serde::Serialize)]
        struct Aged {
            age_ms: u64,
            #[serde(flatten)]
            record: DecisionRecord,
        }
        let aged = |record: DecisionRecord| {
            let age_ms = u64::try_from(now.since(record.ended).as_millis()).unwrap_or(u64::MAX);
            Aged { age_ms, record }
        };
        let newest_first: Vec<_> = self.latest(limit).into_iter().rev().map(aged).collect();
        serde_json::to_value(newest_first).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rejections_do_not_displace_routed_requests() {
        let decisions = Decisions::new(2);
        let ended = |end| DecisionRecord { end, ..DecisionRecord::default() };
        decisions.push(ended("complete"));
        (0..5).for_each(|_| decisions.push(ended(REJECTED)));
        decisions.push(ended("aborted"));
        let kept: Vec<_> = decisions.snapshot().iter().map(|record| (record.sequence, record.end)).collect();
        assert_eq!(kept, [(0, "complete"), (4, REJECTED), (5, REJECTED), (6, "aborted")]);
        let latest: Vec<_> = decisions.latest(3).iter().map(|record| record.sequence).collect();
        assert_eq!(latest, [4, 5, 6]);
    }
}
