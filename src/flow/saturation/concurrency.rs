//! `concurrency-detector`: how much this picker has in flight, of what all endpoints together should have.
//!
//! ```text
//! saturation = Σ load / Σ capacity; `hybrid`: the greater of both kinds
//! load       = requests: sent and not ended; tokens: prompt tokens sent to endpoints that have not begun to answer
//! ```
//!
//! When not: other pickers or clients use the same servers; their requests are not seen. Source: GIE and llm-d.

use super::{Detector, Gauge, View, by_stage, mean};
use crate::flow::registry::Descriptor;
use crate::scheduling::filter::concurrency_detector::{DEFAULT_MAX_CONCURRENCY, DEFAULT_MAX_TOKEN_CONCURRENCY};
use crate::scheduling::plugin::{ParamError, params};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Detector> = Descriptor {
    name: "concurrency-detector",
    aliases: &[],
    summary: "What this picker has in flight, of what all endpoints together should have.",
    source: "GIE and llm-d `concurrency-detector`",
    build: |value: &Value| Concurrency::new(value).map(|p| Box::new(p) as Box<dyn Detector>),
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    #[default]
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
    // Room for bursts is the filter's of the same name.
    #[serde(rename = "headroom")]
    _headroom: Option<f64>,
    // There is one ledger.
    #[serde(rename = "inFlightLoadProducerName")]
    _load: Option<IgnoredAny>,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            concurrency_mode: Mode::default(),
            max_concurrency: DEFAULT_MAX_CONCURRENCY,
            max_token_concurrency: DEFAULT_MAX_TOKEN_CONCURRENCY,
            _headroom: None,
            _load: None,
        }
    }
}

#[derive(Debug)]
struct Concurrency {
    /// Requests of an endpoint, where they count.
    requests: Option<f64>,
    /// Tokens of an endpoint, where they count.
    tokens: Option<f64>,
}

impl Concurrency {
    fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params { concurrency_mode: mode, max_concurrency: requests, max_token_concurrency: tokens, .. } =
            params(parameters)?;
        if requests == 0 {
            return Err(ParamError::value("maxConcurrency", requests, "at least 1 is needed"));
        }
        if tokens == 0 {
            return Err(ParamError::value("maxTokenConcurrency", tokens, "at least 1 is needed"));
        }
        Ok(Self {
            requests: (mode != Mode::Tokens).then_some(f64::from(requests)),
            tokens: (mode != Mode::Requests).then_some(tokens as f64),
        })
    }
}

impl Detector for Concurrency {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        by_stage(view, |endpoints| {
            let share = |most: Option<f64>, load: f64| {
                most.map_or((0.0, 0.0), |most| (load / most, 1.0 / (most * endpoints.len() as f64)))
            };
            Gauge {
                base: 0.0,
                requests: share(self.requests, mean(endpoints, |e| f64::from(e.live().ledger.in_flight()))),
                tokens: share(self.tokens, mean(endpoints, |e| e.live().ledger.prefill_tokens() as f64)),
            }
        })
    }
}
