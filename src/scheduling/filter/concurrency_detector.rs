//! `concurrency-detector`: endpoints on which this picker has not too much in flight.
//!
//! ```text
//! filter = load < floor(capacity * (1 + headroom)), both kinds with `hybrid`; when nobody is left, all stay
//! load   = requests: sent and not ended; tokens: prompt tokens sent to endpoints that have not begun to answer
//! ```
//!
//! It acts at once, where reported figures lag by a scrape. When not: other pickers or clients use the same servers; their requests are not
//! seen. How full these capacities make a pool as a whole is `flow::saturation`'s. Source: GIE and llm-d.

use super::keep_or_all;
use crate::plugin::{Filter, ParamError, Plugin, PluginDescriptor, params};
use crate::{Candidate, PickContext};
use attache_pool::Endpoint;
use attache_types::rng::PickRng;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "concurrency-detector",
    aliases: &[],
    kind: "filter",
    summary: "Keeps endpoints on which this picker has not too many requests or tokens in flight.",
    source: "GIE and llm-d `concurrency-detector`",
    build: |value| ConcurrencyDetector::new(value).map(|p| Plugin::Filter(Arc::new(p))),
};

/// 100 requests, as both have it.
pub const DEFAULT_MAX_CONCURRENCY: u32 = 100;
/// A million tokens, as both have it.
pub const DEFAULT_MAX_TOKEN_CONCURRENCY: u64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Requests,
    Tokens,
    Hybrid,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    concurrency_mode: Mode,
    max_concurrency: u32,
    max_token_concurrency: u64,
    headroom: f64,
    // There is one ledger.
    #[serde(rename = "inFlightLoadProducerName")]
    _load: Option<IgnoredAny>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            concurrency_mode: Mode::Requests,
            max_concurrency: DEFAULT_MAX_CONCURRENCY,
            max_token_concurrency: DEFAULT_MAX_TOKEN_CONCURRENCY,
            headroom: 0.0,
            _load: None,
        }
    }
}

/// Judges endpoints by what was sent to them.
#[derive(Clone, Copy, Debug)]
pub struct ConcurrencyDetector {
    /// Most requests for one endpoint, where they count.
    pub requests: Option<f64>,
    /// Most tokens for one endpoint, where they count.
    pub tokens: Option<f64>,
    headroom: f64,
}

impl ConcurrencyDetector {
    /// Made from the plugin's parameters.
    ///
    /// # Errors
    /// A capacity or a headroom that none can be.
    pub fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params {
            concurrency_mode: mode, max_concurrency: requests, max_token_concurrency: tokens, headroom, ..
        } = params(parameters)?;
        if requests == 0 {
            return Err(ParamError::value("maxConcurrency", requests, "at least 1 is needed"));
        }
        if tokens == 0 {
            return Err(ParamError::value("maxTokenConcurrency", tokens, "at least 1 is needed"));
        }
        if !(0.0..f64::INFINITY).contains(&headroom) {
            return Err(ParamError::value("headroom", headroom, "0 or more is allowed"));
        }
        Ok(Self {
            requests: (mode != Mode::Tokens).then_some(f64::from(requests)),
            tokens: (mode != Mode::Requests).then_some(tokens as f64),
            headroom,
        })
    }

    fn has_room(&self, endpoint: &Endpoint) -> bool {
        let below =
            |load: f64, most: Option<f64>| most.is_none_or(|most| load < (most * (1.0 + self.headroom)).floor());
        below(requests(endpoint), self.requests) && below(tokens(endpoint), self.tokens)
    }
}

fn requests(endpoint: &Endpoint) -> f64 {
    f64::from(endpoint.ledger.in_flight())
}

fn tokens(endpoint: &Endpoint) -> f64 {
    endpoint.ledger.prefill_tokens() as f64
}

impl Filter for ConcurrencyDetector {
    fn keep(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        keep_or_all(keep, |i| candidates.get(i).is_some_and(|c| self.has_room(&c.state.endpoint)));
    }
}
