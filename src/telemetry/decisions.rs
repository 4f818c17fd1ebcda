//! The last decisions, for people who ask where their requests went and why.

use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::Arc;

/// One request, from decision to end. Holds no text of prompts or answers.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DecisionRecord {
    /// Grows by one with every record.
    pub sequence: u64,
    /// When it ended.
    #[serde(skip)]
    pub ended: Timestamp,
    /// `x-request-id`.
    pub request_id: String,
    /// The API, as a label.
    pub api: &'static str,
    /// The pool.
    pub pool: Arc<str>,
    /// The model the server was asked for; empty when unknown.
    pub model: Arc<str>,
    /// The endpoint that was picked.
    pub endpoint: Arc<str>,
    /// The endpoint that served, when the gateway says that it was another one.
    pub served: Option<Arc<str>>,
    /// The server that computed the prompt for it.
    pub prefill: Option<Arc<str>>,
    /// Why no other server computed the prompt, when one should have.
    pub prefill_failure: Option<&'static str>,
    /// From the decision until the prompt was computed elsewhere, milliseconds.
    pub prefill_ms: Option<f64>,
    /// Why.
    pub reason: &'static str,
    /// Estimated prompt length, tokens.
    pub estimated_prompt_tokens: u32,
    /// Tokens of the prompt that the picked endpoint was thought to hold in its cache.
    pub estimated_cached_tokens: u32,
    /// HTTP status of the answer; 0 when none came.
    pub status: u16,
    /// From the request's headers to the first byte of the answer's body, milliseconds.
    pub ttft_ms: Option<f64>,
    /// From the request's headers to the end, milliseconds.
    pub duration_ms: f64,
    /// As the server reports it.
    pub prompt_tokens: Option<u64>,
    /// As the server reports it.
    pub cached_tokens: Option<u64>,
    /// As the server reports it.
    pub completion_tokens: Option<u64>,
    /// How it ended.
    pub end: &'static str,
}

/// A ring of the last records.
#[derive(Debug)]
pub struct Decisions {
    capacity: usize,
    ring: Mutex<(u64, VecDeque<DecisionRecord>)>,
}

impl Decisions {
    /// A ring of `capacity` records; 0 records nothing.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity, ring: Mutex::new((0, VecDeque::with_capacity(capacity))) }
    }

    /// Whether anything is recorded at all.
    #[must_use]
    pub fn enabled(&self) -> bool {
        self.capacity > 0
    }

    /// Adds a record, whose number is set here.
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
