//! `backlog-detector`: how much the endpoints have before them that they have not begun to answer. Keeps their queues short and the rest here,
//! where it can still be put in order.
//!
//! ```text
//! saturation = mean over endpoints of min(1, max(prompt tokens still to be computed / maxPrefillTokens,
//!                                                requests that wait for a first token / maxWaiting,
//!                                                kv / maxKvUsage))
//! ```
//!
//! An endpoint counts as full and no fuller, so there is room in the pool while there is room on any endpoint. What waits is known from the
//! moment it is sent until its first token comes, and from pages what others have sent; answers that come whole drain at the speed that
//! was learned of the endpoint. The strategy should know the same figures, as `predicted-latency` does, or it sends to endpoints
//! that have no room.
//!
//! When not: servers with a scheduler of their own that wants to see all requests. Source: attache.

use super::{Detector, Gauge, View, by_stage, mean};
use crate::flow::registry::Descriptor;
use crate::pool::EndpointState;
use crate::pool::speed::Work;
use crate::scheduling::plugin::{ParamError, params};
use serde::Deserialize;
use serde_json::Value;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Detector> = Descriptor {
    name: "backlog-detector",
    aliases: &[],
    summary: "What the endpoints have not begun to answer; keeps their queues short.",
    source: "attache: the ledger and the learned speed",
    build: |value: &Value| Backlog::new(value).map(|p| Box::new(p) as Box<dyn Detector>),
};

/// 16,384 tokens: two of vLLM's usual steps of 8,192, one that is computed and one that stands ready, so that no endpoint runs dry between
/// two events.
pub const DEFAULT_MAX_PREFILL_TOKENS: u64 = 16_384;
/// 16 requests that wait for a first token: with short prompts the next step is full long before, and no more than a step's worth is bound
/// early.
pub const DEFAULT_MAX_WAITING: u32 = 16;
/// 95 % of the cache: beyond that servers admit nobody before somebody ends.
pub const DEFAULT_MAX_KV_USAGE: f64 = 0.95;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Backlog {
    max_prefill_tokens: u64,
    max_waiting: u32,
    max_kv_usage: f64,
}

impl Default for Backlog {
    fn default() -> Self {
        Self {
            max_prefill_tokens: DEFAULT_MAX_PREFILL_TOKENS,
            max_waiting: DEFAULT_MAX_WAITING,
            max_kv_usage: DEFAULT_MAX_KV_USAGE,
        }
    }
}

impl Backlog {
    fn new(parameters: &Value) -> Result<Self, ParamError> {
        let backlog: Self = params(parameters)?;
        if backlog.max_prefill_tokens == 0 {
            return Err(ParamError::value("maxPrefillTokens", 0, "at least 1 is needed"));
        }
        if backlog.max_waiting == 0 {
            return Err(ParamError::value("maxWaiting", 0, "at least 1 is needed"));
        }
        if !(backlog.max_kv_usage > 0.0 && backlog.max_kv_usage <= 1.0) {
            return Err(ParamError::value("maxKvUsage", backlog.max_kv_usage, "above 0 to 1 is allowed"));
        }
        Ok(backlog)
    }

    fn of(&self, state: &EndpointState, view: &View<'_>) -> f64 {
        let fresh = state.fresh(view.now, view.stale_after);
        let live = state.live();
        let (load, _) = live.speed.forecast(&live.ledger, fresh, Work::default(), view.now);
        let tokens = load.kilotokens * 1e3 / self.max_prefill_tokens as f64;
        let waiting = load.waiting / f64::from(self.max_waiting);
        let kv = fresh.map_or(0.0, |m| f64::from(m.kv_usage.max(0.0))) / self.max_kv_usage;
        tokens.max(waiting).max(kv).min(1.0)
    }
}

impl Detector for Backlog {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        by_stage(view, |endpoints| {
            let full = mean(endpoints, |e| self.of(e, view));
            let count = endpoints.len() as f64;
            Gauge {
                base: 0.0,
                requests: (full, 1.0 / (f64::from(self.max_waiting) * count)),
                tokens: (full, 1.0 / (self.max_prefill_tokens as f64 * count)),
            }
        })
    }
}
