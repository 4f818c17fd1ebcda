//! Whether an endpoint is full by the requests in flight that Attaché has routed: the capacities of
//! `concurrency-detector`.
//!
//! The filter of that name and the detector of flow control have the same parameters. The filter checks one endpoint
//! at a time, flow control the whole pool.

use crate::plugin::{Inert, ParamError, params};
use attache_pool::Endpoint;
use attache_types::{keywords, parameters};
use serde_json::Value;

/// 100 requests, the default of GIE and llm-d.
pub const DEFAULT_MAX_CONCURRENCY: u32 = 100;
/// A million tokens, the default of GIE and llm-d.
pub const DEFAULT_MAX_TOKEN_CONCURRENCY: u64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ConcurrencyMode {
    Requests,
    Tokens,
    Hybrid,
}

keywords! {
    ConcurrencyMode: "requests" => Requests, "tokens" => Tokens, "hybrid" => Hybrid;
}

parameters! {
    /// Parameters of `concurrency-detector`.
    pub struct ConcurrencyParams {
        /// Which limits apply: requests, tokens, or both (`hybrid`).
        "concurrencyMode" => mode: ConcurrencyMode { default: ConcurrencyMode::Requests; },
        /// Requests in flight at which an endpoint is full.
        "maxConcurrency" => requests: u32 { default: DEFAULT_MAX_CONCURRENCY; range: 1..; unit: "requests"; },
        /// Uncached prompt tokens in flight at which an endpoint is full.
        "maxTokenConcurrency" => tokens: u64 { default: DEFAULT_MAX_TOKEN_CONCURRENCY; range: 1..; unit: "tokens"; },
        /// Share of the limits by which the filter lets an endpoint exceed them. The detector ignores it.
        "headroom" => headroom: f64 { default: 0.0; range: 0.0..; unit: "share"; },
        /// Whether the detector counts load beyond the limits of an endpoint too, as in GIE and llm-d.
        "compat" => compat: bool { default: false; },
        ignored {
            /// Without effect: there is one ledger.
            "inFlightLoadProducerName": Value,
        }
    }
}

fn mode(parameters: &Value) -> &str {
    parameters.get("concurrencyMode").and_then(Value::as_str).unwrap_or("requests")
}

/// Parameters that change nothing.
pub const INERT: &[Inert] = &[
    Inert {
        plugins: &["concurrency-detector"],
        keys: &["maxConcurrency"],
        when: |all| mode(all) == "tokens",
        why: "it needs `concurrencyMode: requests` or `hybrid`; here tokens are counted",
    },
    Inert {
        plugins: &["concurrency-detector"],
        keys: &["maxTokenConcurrency"],
        when: |all| mode(all) == "requests",
        why: "it needs `concurrencyMode: tokens` or `hybrid`; here requests are counted",
    },
];

/// Limits of the requests and tokens in flight on an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct ConcurrencyLimits {
    /// Most requests per endpoint; `None` for no limit.
    pub requests: Option<f64>,
    /// Most uncached prompt tokens per endpoint; `None` for no limit.
    pub tokens: Option<f64>,
    /// The detector counts load beyond the capacity of an endpoint too.
    pub compat: bool,
    headroom: f64,
}

impl ConcurrencyLimits {
    /// Limits from the plugin's parameters.
    ///
    /// # Errors
    /// A capacity or the headroom is out of range.
    pub fn new(parameters: &Value) -> Result<Self, ParamError> {
        let ConcurrencyParams { mode, requests, tokens, headroom, compat } = params(parameters)?;
        Ok(Self {
            requests: (mode != ConcurrencyMode::Tokens).then_some(f64::from(requests)),
            tokens: (mode != ConcurrencyMode::Requests).then_some(tokens as f64),
            compat,
            headroom,
        })
    }

    /// Whether what is in flight on `endpoint` is below both limits, `headroom` included.
    #[must_use]
    pub fn has_capacity(&self, endpoint: &Endpoint) -> bool {
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
