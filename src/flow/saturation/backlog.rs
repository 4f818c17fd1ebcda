//! `backlog-detector`: the prefill work that the endpoints have queued, by the ledger and the learned speed. Keeps
//! their queues short, so that most requests wait in Attaché, which can still reorder them.
//!
//! ```text
//! saturation = mean over endpoints of min(1, max(seconds of queued prefill / allowed,
//!                                                requests without a first token / maxWaiting,
//!                                                kv / maxKvUsage))
//! allowed    = maxLongPrefillTime for a prompt of maxPrefillTime / 2 or more itself, else maxPrefillTime
//! ```
//!
//! An engine prefills short prompts together, so it needs several when a step begins. A long prompt fills a step by
//! itself. It need not be there before the previous one is nearly done, and until then a more urgent request may still
//! arrive. A long request that has been next for 1 s uses the limit of short ones, since requests that bypass the
//! queue may keep every endpoint above the limit for long ones forever.
//!
//! An endpoint counts as full at most, so the pool has capacity while one endpoint has. Waiting requests are counted
//! from dispatch to first token, and those of other clients from scraped metrics. The seconds are those that
//! `predicted-latency` has learned of the endpoint; they also drain the work of responses that do not stream. The
//! strategy should use the same figures, as `predicted-latency` does, or it chooses endpoints that have no capacity.
//!
//! A dispatched request stays behind all requests of its endpoint. A queued one can still go to another
//! endpoint, and a shorter one can overtake it. So the less is dispatched early the better, down to what an
//! endpoint needs to never idle.
//!
//! When not: model servers whose own scheduler needs to see all requests. Source: attache.

use super::{Detector, Gauge, Long, StageSaturation, View, by_way};
use crate::registry::PolicyDescriptor;
use attache_pool::EndpointState;
use attache_pool::speed::Work;
use attache_scheduling::plugin::{ParamError, params, section};
use attache_types::declare::above;
use attache_types::parameters;
use attache_types::units::show_duration;
use serde_json::Value;
use std::ops::Bound::{Excluded, Included};
use std::time::Duration;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Detector> = PolicyDescriptor {
    name: "backlog-detector",
    aliases: &[],
    summary: "Prefill work that the endpoints have queued; keeps their queues short.",
    source: "attache: the ledger and the learned speed",
    parameters: section::<Params>,
    build: |value: &Value| Backlog::new(value).map(|p| Box::new(p) as Box<dyn Detector>),
};

/// 50 ms: longer than a round trip to an endpoint and one decode step, so that no endpoint idles,
/// and hardly noticeable for people.
pub(crate) const DEFAULT_MAX_PREFILL_TIME: Duration = Duration::from_millis(50);
/// 5 ms: about one round trip to an endpoint. A longer time delays urgent requests more than it helps the endpoints,
/// because a request can't overtake those that were dispatched before it.
pub(crate) const DEFAULT_MAX_LONG_PREFILL_TIME: Duration = Duration::from_millis(5);
/// 16 requests without a first token: short prompts fill the next step long before that number, and at most one
/// step's worth is dispatched early.
pub const DEFAULT_MAX_WAITING: u32 = 16;
/// 95 % of the KV cache: beyond that, model servers admit no request before another ends.
pub(crate) const DEFAULT_MAX_KV_USAGE: f64 = 0.95;

/// Tokens over which the time for one more token is measured.
const MEASURE: u32 = 1_000;

parameters! {
    struct Params {
        /// Queued prefill at which an endpoint is full. With 50 ms, users hardly notice the delay, and no endpoint
        /// idles.
        "maxPrefillTime" => max_prefill_time: Duration {
            default: DEFAULT_MAX_PREFILL_TIME; range: above(Duration::ZERO);
        },
        /// As `maxPrefillTime`, for prompts that take half of that time or more. It is at most `maxPrefillTime`.
        "maxLongPrefillTime" => max_long_prefill_time: Option<Duration> {
            absent: "`5ms`, or `maxPrefillTime` if that is less"; range: above(Duration::ZERO);
        },
        /// Requests without a first token at which an endpoint is full.
        "maxWaiting" => max_waiting: u32 { default: DEFAULT_MAX_WAITING; range: 1..; unit: "requests"; },
        /// KV cache usage at which an endpoint is full. Beyond 0.95, servers admit no request before another ends.
        "maxKvUsage" => max_kv_usage: f64 {
            default: DEFAULT_MAX_KV_USAGE; range: (Excluded(0.0), Included(1.0)); unit: "share";
        },
    }
}

#[derive(Debug)]
struct Backlog {
    /// Allowed seconds of queued prefill.
    prefill: f64,
    /// Allowed seconds of queued prefill ahead of a long prompt.
    long: f64,
    waiting: f64,
    kv: f64,
}

impl Backlog {
    fn new(parameters: &Value) -> Result<Self, ParamError> {
        let Params { max_prefill_time: prefill, max_long_prefill_time: long, max_waiting, max_kv_usage } =
            params(parameters)?;
        if let Some(long) = long.filter(|long| *long > prefill) {
            let allowed = format!("at most `maxPrefillTime`, {}, is allowed", show_duration(prefill));
            return Err(ParamError::value("maxLongPrefillTime", show_duration(long), &allowed));
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
        // Scraped metrics include this process's own requests.
        let waiting = load.waiting.max(live.speed.awaited(view.now)) / self.waiting;
        let kv = fresh.map_or(0.0, |m| f64::from(m.kv_usage.max(0.0))) / self.kv;
        let full = |allowed: f64| (load.prefill_seconds / allowed).max(waiting).max(kv).min(1.0);
        let token = prediction.own_prefill / f64::from(MEASURE) / self.prefill;
        Fullness { short: full(self.prefill), long: full(self.long), token }
    }
}

/// How full an endpoint is for short prompts and for long ones, and what one more token adds to the former.
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
            let for_short = StageSaturation {
                requests: (short, 1.0 / (self.waiting * count)),
                tokens: (short, all.token / (count * count)),
                request_tokens: 1.0 / count,
            };
            // All pending requests count as one that goes to one endpoint.
            (for_short, StageSaturation { requests: (long, 1.0 / count), ..StageSaturation::default() })
        });
        let long = Long { from: self.prefill / 2.0, ways: both.map(|(_, long)| long) };
        Gauge { ways: both.map(|(short, _)| short), long: Some(long), delay: None }
    }

    fn changes_in(&self, view: &View<'_>) -> Option<Duration> {
        view.computes_in()
    }
}
