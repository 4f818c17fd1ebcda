//! The most recent decisions, for operators who ask where a request went and why.

use attache_request::event::DecisionRecord;
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::collections::VecDeque;

/// A ring buffer of the last records.
#[derive(Debug)]
pub struct Decisions {
    capacity: usize,
    ring: Mutex<(u64, VecDeque<DecisionRecord>)>,
}

impl Decisions {
    /// Creates a buffer for `capacity` records; 0 records nothing.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ring: Mutex::new((0, VecDeque::with_capacity(capacity))) }
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
        let mut ring = self.ring.lock();
        record.sequence = ring.0;
        ring.0 += 1;
        if ring.1.len() == self.capacity {
            ring.1.pop_front();
        }
        ring.1.push_back(record);
    }

    /// The records, oldest first.
    #[must_use]
    pub fn snapshot(&self) -> Vec<DecisionRecord> {
        self.ring.lock().1.iter().cloned().collect()
    }

    /// The records as a JSON list, newest first, each with its age.
    #[must_use]
    pub fn to_json(&self, now: Timestamp) -> serde_json::Value {
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
        let newest_first: Vec<_> = self.snapshot().into_iter().rev().map(aged).collect();
        serde_json::to_value(newest_first).unwrap_or_default()
    }
}
