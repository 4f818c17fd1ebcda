//! Whether an endpoint is full by the requests in flight that Attaché has routed: the capacities of
//! `concurrency-detector`.
//!
//! The filter of that name and the detector of flow control have the same parameters. The filter checks one endpoint
//! at a time, flow control the whole pool.

use crate::plugin::{Inert, ParamError, params};
use attache_pool::Endpoint;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// 100 requests, the default of GIE and llm-d.
pub const DEFAULT_MAX_CONCURRENCY: u32 = 100;
/// A million tokens, the default of GIE and llm-d.
pub const DEFAULT_MAX_TOKEN_CONCURRENCY: u64 = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ConcurrencyMode {
    Requests,
    Tokens,
    Hybrid,
}

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    concurrency_mode: ConcurrencyMode,
    max_concurrency: u32,
    max_token_concurrency: u64,
    headroom: f64,
    compat: bool,
    // Accepted without effect: there is one ledger.
    #[serde(rename = "inFlightLoadProducerName")]
    _load: Option<IgnoredAny>,
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

impl Default for Params {
    fn default() -> Self {
        Self {
            concurrency_mode: ConcurrencyMode::Requests,
            max_concurrency: DEFAULT_MAX_CONCURRENCY,
            max_token_concurrency: DEFAULT_MAX_TOKEN_CONCURRENCY,
            headroom: 0.0,
            compat: false,
            _load: None,
        }
    }
}

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
        let Params {
            concurrency_mode: mode,
            max_concurrency: requests,
            max_token_concurrency: tokens,
            headroom,
            compat,
            ..
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
