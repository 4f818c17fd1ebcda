//! The most recent decisions, for operators who ask where a request went and why.

use super::explanations::{Explanations, TimeBudget};
use attache_request::event::{DecisionRecord, KeptExplanation, REJECTED};
use attache_request::settings::ExplainSettings;
use attache_types::clock::{Clock, Timestamp};
use parking_lot::Mutex;
use std::collections::VecDeque;

/// Ring buffers of the last records. Rejected requests have their own: a client that only sends bad requests does not
/// displace the others.
#[derive(Debug)]
pub struct Decisions {
    capacity: usize,
    rings: Mutex<Rings>,
    explanations: Mutex<Explanations>,
    budget: TimeBudget,
    /// Measures the time of explanations.
    clock: Clock,
}

#[derive(Debug, Default)]
struct Rings {
    /// Number of records so far.
    sequence: u64,
    routed: VecDeque<DecisionRecord>,
    rejected: VecDeque<DecisionRecord>,
}

impl Decisions {
    /// Creates buffers for `capacity` routed and as many rejected requests; 0 records nothing.
    #[must_use]
    pub fn new(capacity: usize, clock: Clock) -> Self {
        let (explanations, budget) = (Mutex::default(), TimeBudget::default());
        Self { capacity, rings: Mutex::default(), explanations, budget, clock }
    }

    /// The start of an explained decision at `now`; `None` if explanations have taken the time that the settings allow.
    #[must_use]
    pub fn begin_explanation(&self, settings: &ExplainSettings, now: Timestamp) -> Option<Timestamp> {
        (settings.kept > 0 && self.budget.admits(now)).then(|| self.clock.now())
    }

    /// Keeps the explanation of a decision that `began` then, and at most as many as `settings` allow.
    pub fn keep(&self, settings: &ExplainSettings, began: Timestamp, explanation: KeptExplanation) {
        self.explanations.lock().keep(settings.kept, explanation);
        let now = self.clock.now();
        self.budget.spend(now.since(began), settings.time_ratio, now);
    }

    /// The latest explanation of the request with this `x-request-id`, JSON, if it is among the `kept` latest ones.
    #[must_use]
    pub fn explanation(&self, kept: usize, request_id: &str) -> Option<String> {
        let mut explanations = self.explanations.lock();
        explanations.limit(kept);
        explanations.get(request_id).map(str::to_owned)
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

    /// The latest `limit` records as a JSON list, newest first, each with its age and whether it is among the `kept`
    /// latest explanations.
    #[must_use]
    pub fn to_json(&self, kept: usize, now: Timestamp, limit: usize) -> serde_json::Value {
        #[derive(serde::Serialize)]
        struct DecisionEntry {
            age_ms: u64,
            explained: bool,
            #[serde(flatten)]
            record: DecisionRecord,
        }
        let records = self.latest(limit);
        let mut explanations = self.explanations.lock();
        explanations.limit(kept);
        let shown = |record: DecisionRecord| {
            let age_ms = u64::try_from(now.since(record.ended).as_millis()).unwrap_or(u64::MAX);
            DecisionEntry { age_ms, explained: explanations.get(&record.request_id).is_some(), record }
        };
        let newest_first: Vec<_> = records.into_iter().rev().map(shown).collect();
        drop(explanations);
        serde_json::to_value(newest_first).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn record_says_whether_its_explanation_is_kept() {
        let decisions = Decisions::new(4, Clock::start());
        let settings = ExplainSettings { kept: 2, time_ratio: 1.0, ..ExplainSettings::default() };
        for id in ["a", "b", "c"] {
            let began = decisions.begin_explanation(&settings, decisions.clock.now()).unwrap();
            decisions.keep(&settings, began, KeptExplanation { request_id: id.into(), json: "{}".into() });
            decisions.push(DecisionRecord { request_id: id.to_owned(), ..DecisionRecord::default() });
        }
        let explained = |kept| {
            let shown = decisions.to_json(kept, decisions.clock.now(), 4);
            let of = |record: &serde_json::Value| record["explained"].as_bool().unwrap();
            shown.as_array().unwrap().iter().map(of).collect::<Vec<_>>()
        };
        assert_eq!(explained(2), [true, true, false], "newest first");
        assert_eq!(explained(1), [true, false, false], "a reload has lowered the number");
        assert_eq!(decisions.begin_explanation(&ExplainSettings::default(), decisions.clock.now()), None);
    }

    #[test]
    fn rejections_do_not_displace_routed_requests() {
        let decisions = Decisions::new(2, Clock::start());
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
