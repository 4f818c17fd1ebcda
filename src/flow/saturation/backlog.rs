//! `backlog-detector`: how much the endpoints have before them that they have not begun to answer. Keeps their queues short and the rest here,
//! where it can still be put in order.
//!
//! ```text
//! saturation = mean over endpoints of min(1, max(seconds that prompts there will still be computed / allowed,
//!                                                requests that wait for a first token / maxWaiting,
//!                                                kv / maxKvUsage))
//! allowed    = maxLongPrefillTime for a prompt that takes maxPrefillTime / 2 or more itself, else maxPrefillTime
//! ```
//!
//! An engine computes short prompts together, so it needs several at hand when a step begins. A long one fills a step by itself, and
//! needs to be there only just before the one before it is done; until then somebody more urgent may still come. A long one that has been next for a
//! second goes by the limit of the others: requests that don't wait here may keep every endpoint above its own for ever.
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

use super::{Detector, Gauge, Long, Stage, View, by_way};
use crate::registry::Descriptor;
use attache_pool::EndpointState;
use attache_pool::speed::Work;
use attache_scheduling::plugin::{ParamError, params};
use attache_types::units::{parse_duration, show_duration};
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
/// 5 ms: about the way to an endpoint and back. Who is next waits for what was let in before him all the same, so more is lost by the urgent than
/// is won by the endpoints.
pub const DEFAULT_MAX_LONG_PREFILL_TIME: Duration = Duration::from_millis(5);
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
    max_long_prefill_time: Option<String>,
    max_waiting: u32,
    max_kv_usage: f64,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            max_prefill_time: None,
            max_long_prefill_time: None,
            max_waiting: DEFAULT_MAX_WAITING,
            max_kv_usage: DEFAULT_MAX_KV_USAGE,
        }
    }
}

#[derive(Debug)]
struct Backlog {
    /// Seconds of prompts.
    prefill: f64,
    /// Seconds of prompts before one that is long.
    long: f64,
    waiting: f64,
    kv: f64,
}

impl Backlog {
    fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params { max_prefill_time, max_long_prefill_time, max_waiting, max_kv_usage } = params(parameters)?;
        let prefill = time("maxPrefillTime", max_prefill_time)?.unwrap_or(DEFAULT_MAX_PREFILL_TIME);
        let long = time("maxLongPrefillTime", max_long_prefill_time)?;
        if let Some(long) = long.filter(|long| *long > prefill) {
            let allowed = format!("at most `maxPrefillTime`, {}, is allowed", show_duration(prefill));
            return Err(ParamError::value("maxLongPrefillTime", show_duration(long), &allowed));
        }
        if max_waiting == 0 {
            return Err(ParamError::value("maxWaiting", 0, "at least 1 is needed"));
        }
        if !(max_kv_usage > 0.0 && max_kv_usage <= 1.0) {
            return Err(ParamError::value("maxKvUsage", max_kv_usage, "above 0 to 1 is allowed"));
        }
        let long = long.unwrap_or(DEFAULT_MAX_LONG_PREFILL_TIME.min(prefill));
        Ok(Self {
            prefill: prefill.as_secs_f64(),
            long: long.as_secs_f64(),
            waiting: f64::from(max_waiting),
            kv: max_kv_usage,
        })
    }

    fn of(&self, state: &EndpointState, view: &View<'_>) -> Fullness {
        let fresh = state.fresh(view.now, view.stale_after);
        let live = state.live();
        let more = Work { prompt_tokens: MEASURE, uncached_tokens: MEASURE, adapter_cold: false };
        let (load, prediction) = live.speed.forecast(&live.ledger, fresh, more, view.now);
        // A page knows of our own as well.
        let waiting = load.waiting.max(live.speed.awaited(view.now)) / self.waiting;
        let kv = fresh.map_or(0.0, |m| f64::from(m.kv_usage.max(0.0))) / self.kv;
        let full = |allowed: f64| (load.prefill_seconds / allowed).max(waiting).max(kv).min(1.0);
        let token = prediction.own_prefill / f64::from(MEASURE) / self.prefill;
        Fullness { short: full(self.prefill), long: full(self.long), token }
    }
}

fn time(name: &str, text: Option<String>) -> Result<Option<Duration>, ParamError> {
    let time = text.map(|text| match parse_duration(&text) {
        Ok(time) if time.is_zero() => Err("more than 0 is needed".to_owned()),
        other => other,
    });
    time.transpose().map_err(|e| ParamError::new(e).named(name).under(name))
}

/// How full an endpoint is for short prompts and for long ones, and what one more token adds to the first.
#[derive(Clone, Copy, Debug, Default)]
struct Fullness {
    short: f64,
    long: f64,
    token: f64,
}

impl Detector for Backlog {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        let both = by_way(view, |endpoints| {
            let all = endpoints.iter().fold(Fullness::default(), |all, e| {
                let Fullness { short, long, token } = self.of(e, view);
                Fullness { short: all.short + short, long: all.long + long, token: all.token + token }
            });
            let count = endpoints.len().max(1) as f64;
            let (short, long) = (all.short / count, all.long / count);
            let for_short = Stage {
                requests: (short, 1.0 / (self.waiting * count)),
                tokens: (short, all.token / (count * count)),
                request_tokens: 1.0 / count,
            };
            // Whatever is on its way takes one endpoint.
            (for_short, Stage { requests: (long, 1.0 / count), ..Stage::default() })
        });
        let long = Long { from: self.prefill / 2.0, ways: both.map(|(_, long)| long) };
        Gauge { ways: both.map(|(short, _)| short), long: Some(long) }
    }

    fn changes_in(&self, view: &View<'_>) -> Option<Duration> {
        view.computes_in()
    }
}
