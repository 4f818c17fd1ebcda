//! `backlog-detector`: how much the endpoints have before them that they have not begun to answer. Keeps their queues short and the rest here,
//! where it can still be put in order.
//!
//! ```text
//! saturation = mean over endpoints of min(1, max(seconds that prompts there will still be computed / maxPrefillTime,
//!                                                requests that wait for a first token / maxWaiting,
//!                                                kv / maxKvUsage))
//! ```
//!
//! An endpoint counts as full and no fuller, so there is room in the pool while there is room on any endpoint. What waits is known from the
//! moment it is sent until its first token comes, and from pages what others have sent; the seconds are those that `predicted-latency` has
//! learned of the endpoint, whose answers that come whole drain by them. The strategy should know the same figures, as `predicted-latency`
//! does, or it sends to endpoints that have no room.
//!
//! A request that has gone to an endpoint takes its place behind all that are there, whatever comes after it; one that waits here can still go
//! to another endpoint and be passed by a shorter one. So the less is sent early the better, down to what an endpoint needs to have the next
//! prompt at hand when one is done.
//!
//! When not: servers with a scheduler of their own that wants to see all requests. Source: attache.

use super::{Detector, Gauge, Stage, View, by_stage};
use crate::config::units::parse_duration;
use crate::flow::registry::Descriptor;
use crate::pool::EndpointState;
use crate::pool::speed::Work;
use crate::scheduling::plugin::{ParamError, params};
use serde::Deserialize;
use serde_json::Value;
use std::time::Duration;

/// Registry entry.
pub const PLUGIN: Descriptor<dyn Detector> = Descriptor {
    name: "backlog-detector",
    aliases: &[],
    summary: "What the endpoints have not begun to answer; keeps their queues short.",
    source: "attache: the ledger and the learned speed",
    build: |value: &Value| Backlog::new(value).map(|p| Box::new(p) as Box<dyn Detector>),
};

/// 50 ms: longer than the way to an endpoint and back and than a step of its answers, so that it does not run dry; less than people notice.
pub const DEFAULT_MAX_PREFILL_TIME: Duration = Duration::from_millis(50);
/// 16 requests that wait for a first token: with short prompts the next step is full long before, and no more than a step's worth is bound
/// early.
pub const DEFAULT_MAX_WAITING: u32 = 16;
/// 95 % of the cache: beyond that servers admit nobody before somebody ends.
pub const DEFAULT_MAX_KV_USAGE: f64 = 0.95;

/// What one more token takes is learned from so many.
const MEASURE: u32 = 1_000;

#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
struct Params {
    max_prefill_time: Option<String>,
    max_waiting: u32,
    max_kv_usage: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self { max_prefill_time: None, max_waiting: DEFAULT_MAX_WAITING, max_kv_usage: DEFAULT_MAX_KV_USAGE }
    }
}

#[derive(Debug)]
struct Backlog {
    /// Seconds of prompts.
    prefill: f64,
    waiting: f64,
    kv: f64,
}

impl Backlog {
    fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params { max_prefill_time, max_waiting, max_kv_usage } = params(parameters)?;
        let prefill = max_prefill_time.map(|text| match parse_duration(&text) {
            Ok(time) if time.is_zero() => Err("more than 0 is needed".to_owned()),
            other => other,
        });
        let prefill = prefill.transpose().map_err(|e| ParamError(format!("`maxPrefillTime`: {e}")))?;
        if max_waiting == 0 {
            return Err(ParamError::value("maxWaiting", 0, "at least 1 is needed"));
        }
        if !(max_kv_usage > 0.0 && max_kv_usage <= 1.0) {
            return Err(ParamError::value("maxKvUsage", max_kv_usage, "above 0 to 1 is allowed"));
        }
        let prefill = prefill.unwrap_or(DEFAULT_MAX_PREFILL_TIME).as_secs_f64();
        Ok(Self { prefill, waiting: f64::from(max_waiting), kv: max_kv_usage })
    }

    /// How full an endpoint is, and what one more token adds to that.
    fn of(&self, state: &EndpointState, view: &View<'_>) -> (f64, f64) {
        let fresh = state.fresh(view.now, view.stale_after);
        let live = state.live();
        let more = Work { prompt_tokens: MEASURE, uncached_tokens: MEASURE, adapter_cold: false };
        let (load, prediction) = live.speed.forecast(&live.ledger, fresh, more, view.now);
        let prefill = load.prefill_seconds / self.prefill;
        let waiting = load.waiting / self.waiting;
        let kv = fresh.map_or(0.0, |m| f64::from(m.kv_usage.max(0.0))) / self.kv;
        (prefill.max(waiting).max(kv).min(1.0), prediction.own_prefill / f64::from(MEASURE) / self.prefill)
    }
}

impl Detector for Backlog {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        by_stage(view, |endpoints| {
            let (full, token) = endpoints.iter().fold((0.0, 0.0), |(full, token), e| {
                let (own, more) = self.of(e, view);
                (full + own, token + more)
            });
            let count = endpoints.len().max(1) as f64;
            Stage {
                requests: (full / count, 1.0 / (self.waiting * count)),
                tokens: (full / count, token / (count * count)),
            }
        })
    }
}
