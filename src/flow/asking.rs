//! What flow control makes of a request that comes: whose it is, what it is expected to take, and whether it is let in at all. The same for
//! real requests and for simulated ones.

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

/// The flow of requests whose tenant nobody names, as GIE has it.
pub const DEFAULT_FLOW: &str = "default-flow";

/// A request that asks for its turn, and what is known of it.
#[derive(Clone, Copy, Debug)]
pub struct Asking<'a> {
    /// What it is.
    pub facts: &'a RequestFacts<'a>,
    /// Whose it is; [`DEFAULT_FLOW`]'s when nobody says.
    pub flow: Option<&'a str>,
    /// What it holds in memory while it waits.
    pub bytes: u64,
    /// Tokens of its answer where they are known beforehand, as in a replay.
    pub answer_tokens: Option<u32>,
    /// Who holds how much of its prompt, where that was looked up.
    pub found: Option<&'a Found>,
    /// The ways in which it may be served.
    pub way: Way,
    /// How long it may wait; as long as the queues allow when nobody says.
    pub ttl: Option<Duration>,
    /// Seconds that it may wait until it is late, where that is known.
    pub spare: Option<f64>,
    /// Nobody vouches for what it says of its own haste: it may be refused for it, and goes before nobody.
    pub unvouched: bool,
}

impl<'a> Asking<'a> {
    /// What the queues are told of it.
    #[must_use]
    pub fn arrival(&self, view: &View<'_>) -> Arrival<'a> {
        let ttft = Targets::of(self.facts).ttft_ms;
        Arrival {
            priority: self.facts.priority,
            flow: self.flow.unwrap_or(DEFAULT_FLOW),
            bytes: self.bytes,
            prompt_tokens: self.facts.prompt_tokens,
            answer_tokens: self.answer_tokens,
            need: Need { work: self.work(view), way: self.way },
            ttl: self.ttl,
            spare: self.spare,
            unvouched: self.unvouched,
            ttft: (ttft > 0.0 && !self.unvouched).then(|| Duration::from_secs_f64(ttft.min(1e9) / 1e3)),
        }
    }

    /// Seconds of an endpoint that its prompt is expected to take: on the one that holds most of it by now, where it is expected to go.
    fn work(&self, view: &View<'_>) -> f64 {
        let prompt_tokens = self.facts.prompt_tokens;
        let serving = view.pool.endpoints.iter().filter(|e| e.serves(Roles::DECODE));
        let held = |id| self.found.map_or(0, |found| found.tokens(found.depth(id).any)).min(prompt_tokens);
        // The first of equals: nothing is held in most pools most of the time.
        let best = serving.map(|e| (held(e.endpoint.id), e)).reduce(|a, b| if b.0 > a.0 { b } else { a });
        let Some((cached, best)) = best else { return 0.0 };
        let (uncached_tokens, live) = (prompt_tokens - cached, best.live());
        let work = Work { prompt_tokens, uncached_tokens, adapter_cold: false };
        live.speed.forecast(&live.ledger, None, work, view.now).1.own_prefill
    }
}

/// Whether the pool has endpoints that make answers.
#[must_use]
pub fn serves(pool: &PoolSnapshot) -> bool {
    pool.endpoints.iter().any(|e| e.serves(Roles::DECODE))
}

impl PoolFlow {
    /// Empty queues.
    ///
    /// # Errors
    /// When the ceiling can't be built.
    pub fn control<T>(&self) -> Result<FlowControl<T>, ParamError> {
        Ok(FlowControl::new(self.settings.clone(), self.ceiling()?))
    }

    /// How long a request of this priority may wait that comes now and does not say it; `None` when only a pool without endpoints limits it.
    #[must_use]
    pub fn ttl(&self, pool: &PoolSnapshot, priority: i32) -> Option<Duration> {
        let ttl = self.settings.ttl(priority)?;
        Some(if serves(pool) { ttl } else { self.settings.empty_ttl })
    }

    /// How full the pool is.
    #[must_use]
    pub fn gauge(&self, view: &View<'_>) -> Gauge {
        self.detector.gauge(view)
    }

    /// Whether a request of this priority is refused because the pool is saturated for requests served in this `way`: it is sheddable. The
    /// pool is looked at for sheddable requests only.
    #[must_use]
    pub fn sheds(&self, priority: i32, way: Way, view: &View<'_>) -> bool {
        priority < 0 && self.gauge(view).saturation(Load::default(), Need { work: 0.0, way }) >= 1.0
    }

    /// Whether a request is let in, to the pool or to its queues.
    pub fn admits(&self, facts: &RequestFacts<'_>, view: &View<'_>, rng: &mut PickRng) -> bool {
        let View { pool, stale_after, now, .. } = *view;
        let cx = PickContext { request: *facts, ..PickContext::new(pool, now, stale_after) };
        let answering = view.answering();
        let candidates: Vec<_> = answering.into_iter().map(|e| Candidate::new(e, now, stale_after, 0)).collect();
        self.admitters.iter().all(|a| a.admits(&cx, &candidates, rng))
    }
}
