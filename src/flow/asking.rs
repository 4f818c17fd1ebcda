//! What flow control derives from a request: its flow, its expected work, and whether it may enter the queue at all.
//! Real and simulated requests use the same rules.

use super::control::FlowControl;
use super::item::{Arrival, Load, Need, Way};
use super::saturation::{Gauge, View};
use super::settings::PoolFlow;
use attache_pool::speed::Work;
use attache_pool::{PoolSnapshot, Roles};
use attache_prefix::cache::Found;
use attache_scheduling::facts::prediction::Targets;
use attache_scheduling::plugin::ParamError;
use attache_scheduling::{Candidate, PickContext, RequestFacts};
use attache_types::rng::PickRng;
use std::time::Duration;

/// The flow of requests without a tenant, as in GIE.
pub const DEFAULT_FLOW: &str = "default-flow";

/// A request that asks flow control for its turn, with the facts that the decision knows.
#[derive(Clone, Copy, Debug)]
pub struct Asking<'a> {
    /// Facts of the request that scheduling reads as well.
    pub facts: &'a RequestFacts<'a>,
    /// Name of the flow; `None` selects [`DEFAULT_FLOW`].
    pub flow: Option<&'a str>,
    /// Bytes that it holds in memory while it is queued.
    pub bytes: u64,
    /// Length of the response, tokens, where it is known beforehand, as in a replay.
    pub answer_tokens: Option<u32>,
    /// Cached prefix of the prompt on each endpoint, if it was looked up.
    pub found: Option<&'a Found>,
    /// How the pool's endpoints may serve it.
    pub way: Way,
    /// Time to live in the queue; `None` selects the settings'.
    pub ttl: Option<Duration>,
    /// Seconds that it may wait and still meet its objective, where that is known.
    pub spare: Option<f64>,
    /// The client may choose `ttl` freely. It may be rejected because of it, but gains no better position by it.
    pub unvouched: bool,
}

impl<'a> Asking<'a> {
    /// The request as the queues see it.
    #[must_use]
    pub fn arrival(&self, view: &View<'_>) -> Arrival<'a> {
        let ttft = Targets::of(self.facts).ttft_ms;
        Arrival {
            priority: self.facts.priority,
            flow: self.flow.unwrap_or(DEFAULT_FLOW),
            bytes: self.bytes,
            prompt_tokens: self.facts.prompt_tokens,
            answer_tokens: self.answer_tokens,
            need: Need { work: self.work(view), waited: 0.0, way: self.way },
            ttl: self.ttl,
            spare: self.spare,
            unvouched: self.unvouched,
            ttft: (ttft > 0.0 && !self.unvouched).then(|| Duration::from_secs_f64(ttft.min(1e9) / 1e3)),
        }
    }

    /// Expected prefill time, seconds, on the endpoint that has the most of the prompt cached, where
    /// the request will probably go.
    fn work(&self, view: &View<'_>) -> f64 {
        let prompt_tokens = self.facts.prompt_tokens;
        let serving = view.pool.endpoints.iter().filter(|e| e.serves(Roles::DECODE));
        let held = |id| self.found.map_or(0, |found| found.tokens(found.depth(id).any)).min(prompt_tokens);
        // The first of equals: in most pools nothing is cached most of the time.
        let best = serving.map(|e| (held(e.endpoint.id), e)).reduce(|a, b| if b.0 > a.0 { b } else { a });
        let Some((cached, best)) = best else { return 0.0 };
        let (uncached_tokens, live) = (prompt_tokens - cached, best.live());
        let work = Work { prompt_tokens, uncached_tokens, adapter_cold: false };
        live.speed.forecast(&live.ledger, None, work, view.now).1.own_prefill
    }
}

/// Whether the pool has endpoints that decode.
#[must_use]
pub fn serves(pool: &PoolSnapshot) -> bool {
    pool.endpoints.iter().any(|e| e.serves(Roles::DECODE))
}

impl PoolFlow {
    /// Creates empty queues.
    ///
    /// # Errors
    /// When the ceiling can't be built from its parameters.
    pub fn control<T>(&self) -> Result<FlowControl<T>, ParamError> {
        Ok(FlowControl::new(self.settings.clone(), self.ceiling()?))
    }

    /// Time to live in the queue for a request that arrives now with this priority and no limit of its own. `None` if
    /// only a pool without endpoints limits it.
    #[must_use]
    pub fn ttl(&self, pool: &PoolSnapshot, priority: i32) -> Option<Duration> {
        let ttl = self.settings.ttl(priority)?;
        Some(if serves(pool) { ttl } else { self.settings.empty_ttl })
    }

    /// Measures the saturation of the pool for its queue. A pool without a queue is never saturated.
    #[must_use]
    pub fn gauge(&self, view: &View<'_>) -> Gauge {
        self.queueing.as_ref().map_or(Gauge::FREE, |queueing| queueing.gauge(view))
    }

    /// Whether a request of this priority is refused because it is sheddable and the pool is saturated for requests
    /// that are served in this `way`. Measures the pool for sheddable requests only.
    #[must_use]
    pub fn sheds(&self, priority: i32, way: Way, view: &View<'_>) -> bool {
        let Some(detector) = self.shedding.as_ref().filter(|_| priority < 0) else { return false };
        detector.gauge(view).saturation(Load::default(), Need { way, ..Need::default() }) >= 1.0
    }

    /// Whether the admitters let a request into the pool or its queues.
    pub fn admits(&self, facts: &RequestFacts<'_>, view: &View<'_>, rng: &mut PickRng) -> bool {
        let View { pool, stale_after, now, .. } = *view;
        let cx = PickContext { request: *facts, ..PickContext::new(pool, now, stale_after) };
        let answering = view.answering();
        let candidates: Vec<_> = answering.into_iter().map(|e| Candidate::new(e, now, stale_after, 0)).collect();
        self.admitters.iter().all(|a| a.admits(&cx, &candidates, rng))
    }
}
