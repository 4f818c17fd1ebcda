//! `recompute-detector`: holds long prompts back while servers compute evicted conversations again. Each such prompt
//! would delay the requests of its server for longer than most of them need to end.
//!
//! ```text
//! saturation = share · requests · (work - waited / stretch) / remaining
//! share      = part of the computed blocks that were computed before and that no server holds any more
//! requests   = requests of one server, those of other clients included
//! work       = seconds to compute the prompt, on the server that holds most of it
//! remaining  = seconds for half a mean response on that one server
//! ```
//!
//! The one server is that with the lowest `requests / remaining`: a prompt delays its requests least.
//!
//! While a server computes a prompt, none of its requests receives a token. They keep their blocks meanwhile, so fewer
//! idle conversations stay in the cache, and those are computed again when they return. So a full pool computes more,
//! the more it has to compute. A prompt that is held back until others have ended delays fewer of them. Meanwhile
//! conversations that are still cached take their turns, which need little work.
//!
//! This is the rule of Smith (Various optimizers for single-stage production, 1956): of the `requests` that end within
//! `remaining` and the one that needs `work`, those with the most ends per second go first. It applies as far as the
//! computation repeats an earlier one: `share` is 0 where prompts don't return, and nothing is held back.
//!
//! A request waits for `stretch` times its work at most, and never longer than `maxWait`. The ordering `least-work`
//! should have the same `stretch`, and `maxWait` as its `maxDelay`. The detector has no other limit: servers may have
//! queues.
//!
//! When not: without the text of prompts, cached parts of prompts are unknown, and so is the work that is left.
//! Source: ours. ThunderAgent (arXiv 2602.13692) pauses programs for the same reason, by the size of their contexts.

use super::{Delay, Detector, Gauge, StageSaturation, View, by_stage};
use crate::ordering::least_work::LeastWork;
use crate::registry::PolicyDescriptor;
use attache_pool::PoolSnapshot;
use attache_pool::speed::Work;
use attache_scheduling::plugin::{params, section};
use attache_types::declare::above;
use attache_types::parameters;
use serde_json::Value;
use std::time::Duration;

/// Entry of this policy in the registry.
pub const PLUGIN: PolicyDescriptor<dyn Detector> = PolicyDescriptor {
    name: "recompute-detector",
    aliases: &[],
    summary: "Holds long prompts back while servers compute evicted conversations again.",
    source: "attache: the ledger, the learned speed and the learned share of recomputed blocks",
    parameters: section::<Recompute>,
    build: |value: &Value| params::<Recompute>(value).map(|p| Box::new(p) as Box<dyn Detector>),
};

/// 2 %: below, the delay of others is not worth holding a prompt back, and the pool is not measured.
const LEAST_SHARE: f64 = 0.02;
/// 250 ms between checks whether a request has waited long enough.
const CHECK: Duration = Duration::from_millis(250);
/// 20: a prompt of 2 s waits 40 s at most. Without `maxWait`, the mean end-to-end latency of 140 recorded sessions of
/// coding agents is 0.71 of that without holding; with 10, it is 0.90.
pub const DEFAULT_STRETCH: f64 = 20.0;
/// 2 minutes: coding agents give up after 5 minutes without a byte, and the server may have a queue too. On recorded
/// sessions, 1 minute gives away a third of the gain, and 4 minutes make the slowest first tokens much slower.
pub const DEFAULT_MAX_WAIT: Duration = Duration::from_secs(120);

parameters! {
    /// Holds long prompts back.
    #[derive(Clone)]
    pub struct Recompute {
        /// A prompt is held back for at most this multiple of its own prefill time.
        "stretch" => stretch: f64 { default: DEFAULT_STRETCH; range: above(0.0); unit: "factor"; },
        /// Longest time that a prompt is held back.
        "maxWait" => max_wait: Duration { default: DEFAULT_MAX_WAIT; },
    }
}

impl Default for Recompute {
    fn default() -> Self {
        Self { stretch: DEFAULT_STRETCH, max_wait: DEFAULT_MAX_WAIT }
    }
}

impl Recompute {
    /// The order in which held prompts go: those first that wait the least by the limits of this policy.
    pub(crate) fn ordering(&self) -> LeastWork {
        LeastWork::new(self.stretch, self.max_wait)
    }

    /// Whether the servers of the pool compute few or no prompts again, so that nothing is held back.
    #[must_use]
    pub fn is_idle(pool: &PoolSnapshot) -> bool {
        pool.endpoints.first().is_none_or(|e| e.live().speed.pool().recomputed() < LEAST_SHARE)
    }

    /// What a further prompt would delay; `None` if nothing is held back.
    pub(crate) fn delay(&self, view: &View<'_>) -> Option<Delay> {
        if Self::is_idle(view.pool) {
            return None;
        }
        let pool = view.pool.endpoints.first()?.live().speed.pool();
        let (share, answer) = (pool.recomputed(), pool.answer_tokens());
        if answer <= 0.0 {
            return None;
        }
        let (stretch, longest) = (self.stretch, self.max_wait.as_secs_f64());
        let mut least: Option<Delay> = None;
        for state in view.answering() {
            let (fresh, live) = (state.fresh(view.now, view.stale_after), state.live());
            let (_, predicted) = live.speed.forecast(&live.ledger, fresh, Work::default(), view.now);
            let requests = f64::from(live.ledger.in_flight()) + fresh.map_or(0.0, |m| f64::from(m.others));
            let remaining = answer / 2.0 * predicted.per_token;
            if least.is_none_or(|least| requests * least.remaining < least.requests * remaining) {
                least = Some(Delay { share, requests, remaining, stretch, longest });
            }
        }
        least.filter(|delay| delay.remaining > 0.0)
    }
}

impl Detector for Recompute {
    fn gauge(&self, view: &View<'_>) -> Gauge {
        Gauge { delay: self.delay(view), ..by_stage(view, |_| StageSaturation::default()) }
    }

    fn changes_in(&self, _: &View<'_>) -> Option<Duration> {
        Some(CHECK)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::item::{Load, Need};
    use attache_pool::health::HealthPolicy;
    use attache_pool::ledger::Ticket;
    use attache_pool::speed::{PoolSpeed, SpeedExport};
    use attache_pool::{Endpoint, EndpointSpec, EndpointState, PoolSnapshot};
    use attache_types::clock::Timestamp;
    use attache_types::ids::EndpointId;
    use std::sync::Arc;

    const NOW: Timestamp = Timestamp(1_000_000_000);

    /// The gauge of a pool whose servers have these numbers of requests.
    fn gauge(share: f64, answer: f64, requests: &[usize]) -> Gauge {
        let speed = Arc::new(PoolSpeed::default());
        speed.import(&SpeedExport { response_tokens: answer, ..speed.export() });
        speed.set_recomputed(share);
        let mut tickets = Vec::new();
        let states = (0u16..).zip(requests).map(|(id, requests)| {
            let spec = EndpointSpec::at(([127, 0, 0, 1], 8_000 + id).into());
            let endpoint = Arc::new(Endpoint::in_pool(EndpointId(id.into()), spec, &speed));
            tickets.extend((0..*requests).map(|_| Ticket::book(endpoint.clone(), 0)));
            EndpointState::new(endpoint, None)
        });
        let pool = PoolSnapshot::new(1, true, states.collect());
        let health = HealthPolicy::default();
        let view = View { pool: &pool, health: &health, split: None, stale_after: Duration::from_secs(2), now: NOW };
        Recompute { stretch: 10.0, ..Recompute::default() }.gauge(&view)
    }

    fn is_held(gauge: &Gauge, work: f64, waited: f64) -> bool {
        gauge.saturation(Load::default(), Need { work, waited, ..Need::default() }) >= 1.0
    }

    #[test]
    fn long_prompts_wait_while_each_server_has_requests() {
        // 100 tokens of 8 ms are left: 0.8 s.
        let busy = gauge(0.5, 200.0, &[3, 5]);
        assert!(is_held(&busy, 6.0, 0.0), "0.5 * 3 * 6 s is more than 0.8 s");
        assert!(!is_held(&busy, 0.1, 0.0), "a cached conversation takes its turn");
        assert!(is_held(&busy, 6.0, 50.0) && !is_held(&busy, 6.0, 60.0), "ten times its work is the longest wait");
        assert!(!is_held(&gauge(0.5, 200.0, &[3, 0]), 6.0, 0.0), "a server is idle");
        let one_comes = Load { requests: 1, tokens: 9 };
        let need = Need { work: 6.0, ..Need::default() };
        assert!(gauge(0.5, 200.0, &[3, 0]).saturation(one_comes, need) >= 1.0, "another request is on its way to it");
    }

    #[test]
    fn nothing_waits_where_no_prompt_is_computed_again() {
        for (share, answer) in [(0.0, 200.0), (0.01, 200.0), (0.5, 0.0)] {
            let gauge = gauge(share, answer, &[30, 50]);
            assert_eq!(gauge.delay, None, "{share} {answer}");
            assert!(!is_held(&gauge, 60.0, 0.0));
        }
        assert!(is_held(&gauge(0.5, 200.0, &[]), 0.0, 0.0), "a pool without servers takes none");
    }

    #[test]
    fn prompt_waits_no_longer_than_max_wait() {
        let busy = gauge(0.5, 200.0, &[3, 5]);
        let longest = DEFAULT_MAX_WAIT.as_secs_f64();
        assert!(is_held(&busy, 1e3, 0.9 * longest) && !is_held(&busy, 1e3, longest), "10,000 s by `stretch`");
        assert!(!is_held(&busy, f64::INFINITY, 2.0 * longest));
    }

    #[test]
    fn parameters_out_of_range_are_named() {
        for (parameters, name, says) in [
            (serde_json::json!({"stretch": 0.0}), "stretch", "above 0"),
            (serde_json::json!({"maxWait": "soon"}), "maxWait", "soon"),
        ] {
            let error = params::<Recompute>(&parameters).unwrap_err().to_string();
            assert!(error.contains(name) && error.contains(says), "{error}");
        }
        let given = params::<Recompute>(&serde_json::json!({"stretch": 3.5, "maxWait": "45s"})).unwrap();
        assert_eq!((given.stretch, given.max_wait), (3.5, Duration::from_secs(45)));
    }
}
