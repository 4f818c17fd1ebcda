//! `active-request-scorer`: endpoints with fewer in-flight requests of this Attaché replica score higher.
//!
//! ```text
//! active <= idleThreshold: 1
//! else:                    (max − active) / max * maxBusyScore
//! ```
//!
//! It reacts at once; scraped metrics lag by a scrape interval. When not: other clients send to the same servers,
//! since their requests are not counted. Source: llm-d `active-request-scorer`.

use attache_scheduling::plugin::{Inert, ParamError, Plugin, Scorer, params};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use serde::Deserialize;
use serde::de::IgnoredAny;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "active-request-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers endpoints on which this replica has fewer requests in flight.",
    source: "llm-d `active-request-scorer`",
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Scorer(Arc::new(p))),
};

/// 0, llm-d's default: only an endpoint without requests is idle.
pub const DEFAULT_IDLE_THRESHOLD: u32 = 0;
/// 1, llm-d's default: no gap between idle and busy endpoints.
pub const DEFAULT_MAX_BUSY_SCORE: f32 = 1.0;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    idle_threshold: u32,
    max_busy_score: f32,
    // Accepted without effect: there is one ledger, which counts every request until it ends.
    #[serde(rename = "inFlightLoadProducerName")]
    _load: Option<IgnoredAny>,
    #[serde(rename = "requestTimeout")]
    _timeout: Option<IgnoredAny>,
}

/// Parameters that change nothing.
pub(crate) const INERT: &[Inert] = &[Inert {
    plugins: &[PLUGIN.name],
    keys: &["requestTimeout"],
    when: |_| true,
    why: "a request counts until it ends",
}];

impl Default for Params {
    fn default() -> Self {
        let (idle_threshold, max_busy_score) = (DEFAULT_IDLE_THRESHOLD, DEFAULT_MAX_BUSY_SCORE);
        Self { idle_threshold, max_busy_score, _load: None, _timeout: None }
    }
}

impl Params {
    fn build(self) -> Result<ActiveRequest, ParamError> {
        if !(0.0..=1.0).contains(&self.max_busy_score) {
            return Err(ParamError::value("maxBusyScore", self.max_busy_score, "0 to 1 is allowed"));
        }
        Ok(ActiveRequest { idle: self.idle_threshold, busy: self.max_busy_score })
    }
}

#[derive(Debug)]
struct ActiveRequest {
    idle: u32,
    busy: f32,
}

impl Scorer for ActiveRequest {
    fn score(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = candidate.state.live().ledger.in_flight() as f32;
        }
        let most = out.iter().copied().fold(0.0, f32::max);
        for score in out {
            *score = if *score <= self.idle as f32 { 1.0 } else { (most - *score) / most * self.busy };
        }
    }
}
