//! A small pool for tests of plugins, in this crate and in plugin crates.

#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that can't go on fails")]

use crate::candidates::Cached;
use crate::plugin::{Filter, Headers, ResponseHeaders, Scorer};
use crate::scheduler::{Explain, Scheduler};
use crate::split::{self, Pair, PairCandidates, SplitPolicy};
use crate::{Candidate, Decision, PickContext, Ranking, RequestFacts, Strategy, Subset};
use attache_pool::Roles;
use attache_pool::health::{HealthOutcome, HealthPolicy};
use attache_pool::ledger::Ticket;
use attache_pool::place::{DEFAULT_ZONE_LABEL, Nearness};
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, LoraState, PoolSnapshot};
use attache_prefix::cache::{BlockUnit, CacheConfig, PrefixCache};
use attache_protocol::Prompt;
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use attache_types::ids::EndpointId;
use attache_types::rng::for_request;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// The time of all tests.
pub const NOW: Timestamp = Timestamp(5_000_000_000);
/// Age at which metrics become stale.
pub const STALE_AFTER: Duration = Duration::from_secs(2);

/// A pool of endpoints with these ids and waiting requests.
#[must_use]
pub fn snapshot(loads: &[(u32, u32)]) -> PoolSnapshot {
    let state = |&(id, waiting): &(u32, u32)| {
        EndpointState::new(
            Arc::new(Endpoint::new(EndpointId(id), EndpointSpec::at(([10, 0, 0, 1], 8000 + id as u16).into()))),
            Some(Arc::new(EndpointMetrics { scraped_at: NOW, waiting, ..EndpointMetrics::default() })),
        )
    };
    PoolSnapshot::new(1, true, loads.iter().map(state).collect())
}

/// A decision at [`NOW`] about an unknown request.
#[must_use]
pub fn context(snapshot: &PoolSnapshot) -> PickContext<'_> {
    PickContext::new(snapshot, NOW, STALE_AFTER)
}

/// The decision of a scheduler with its default strategy, for [`context`].
///
/// # Errors
/// No endpoint can be picked.
pub fn decide(
    scheduler: &Scheduler,
    pool: &PoolSnapshot,
    subset: Option<&Subset>,
    seed: u64,
) -> Result<Decision, RequestError> {
    let strategy = &*scheduler.choices.default.strategy;
    scheduler.decide(strategy, &PickContext { subset, ..context(pool) }, Explain::No, &mut for_request(seed, 0))
}

/// Ejects the endpoint at `position`; with `half_open`, so long ago that it is half open at [`NOW`].
pub fn eject(pool: &PoolSnapshot, position: usize, half_open: bool) {
    let at = if half_open { Timestamp(1) } else { NOW };
    let policy = HealthPolicy { ejection: Duration::from_secs(1), ..HealthPolicy::default() };
    for _ in 0..2 {
        pool.endpoints[position].endpoint.health.record(HealthOutcome::ConnectFailure, at, &policy);
    }
}

/// A pool of servers with these roles; an unknown role counts as none.
#[must_use]
pub fn of_roles(roles: &[&str]) -> PoolSnapshot {
    let mut pool = snapshot(&(0..).zip(roles).map(|(id, _)| (id, 0)).collect::<Vec<_>>());
    for (state, role) in pool.endpoints.iter_mut().zip(roles) {
        let mut spec = (*state.endpoint.spec).clone();
        spec.labels.insert(attache_pool::role::ROLE_LABEL.into(), (*role).into());
        *state = state.clone().respecified(spec);
    }
    pool
}

/// One server and its cached prefix.
#[derive(Debug)]
pub struct TestServer {
    /// Reported metrics.
    pub metrics: Option<EndpointMetrics>,
    labels: BTreeMap<Arc<str>, Arc<str>>,
    name: Option<&'static str>,
    cached: u32,
    tickets: Vec<u32>,
}

/// A server that reports no metrics.
pub fn silent() -> TestServer {
    TestServer { metrics: None, labels: BTreeMap::new(), name: None, cached: 0, tickets: Vec::new() }
}

/// A server that reports these metrics.
pub fn reports(metrics: EndpointMetrics) -> TestServer {
    TestServer { metrics: Some(EndpointMetrics { scraped_at: NOW, ..metrics }), ..silent() }
}

/// A server with this queue depth and KV cache usage.
pub fn load(waiting: u32, kv_usage: f32) -> TestServer {
    reports(EndpointMetrics { waiting, kv_usage, ..EndpointMetrics::default() })
}

/// A server with this many running requests.
pub fn running(running: u32) -> TestServer {
    reports(EndpointMetrics { running, ..EndpointMetrics::default() })
}

/// A server with these adapters running and waiting, and a limit of `max`.
pub fn lora(running: &[&str], waiting: &[&str], max: u32) -> TestServer {
    let names = |list: &[&str]| list.iter().map(|n| Arc::from(*n)).collect();
    let lora = Some(LoraState::new(max, names(running), names(waiting)));
    reports(EndpointMetrics { lora, ..EndpointMetrics::default() })
}

impl TestServer {
    /// Scraped this many milliseconds ago.
    pub fn aged(mut self, ms: u64) -> Self {
        if let Some(metrics) = &mut self.metrics {
            metrics.scraped_at = Timestamp(NOW.0 - ms * 1_000_000);
        }
        self
    }

    /// Adds a label.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// Sets the name.
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self
    }

    /// Sets the cached tokens of the prompt.
    pub fn holding(mut self, tokens: u32) -> Self {
        self.cached = tokens;
        self
    }

    /// Adds requests in flight from this replica, with these uncached prompt tokens.
    pub fn sent(mut self, tokens: &[u32]) -> Self {
        self.tickets.extend(tokens);
        self
    }
}

/// A pool and a request.
#[derive(Debug)]
pub struct Trial {
    /// The pool.
    pub pool: PoolSnapshot,
    cached: Vec<u32>,
    headers: BTreeMap<String, String>,
    prompt: Option<Prompt<'static>>,
    prompt_tokens: u32,
    now: Timestamp,
    _tickets: Vec<Ticket>,
}

/// A request of 100 tokens for the model `A`, to a pool of `servers` with ids from 0.
pub fn among(servers: Vec<TestServer>) -> Trial {
    let (mut states, mut cached, mut tickets) = (Vec::new(), Vec::new(), Vec::new());
    for (id, server) in (0u32..).zip(servers) {
        let mut spec = EndpointSpec::at(([10, 0, 0, 1], 8000 + u16::try_from(id).unwrap()).into());
        spec.labels = server.labels;
        spec.name = server.name.map_or(spec.name, Into::into);
        let endpoint = Arc::new(Endpoint::new(EndpointId(id), spec));
        tickets.extend(server.tickets.iter().map(|tokens| Ticket::book(endpoint.clone(), *tokens)));
        cached.push(server.cached);
        states.push(EndpointState::new(endpoint, server.metrics.map(Arc::new)));
    }
    let pool = PoolSnapshot::new(1, true, states);
    Trial { pool, cached, headers: BTreeMap::new(), prompt: None, prompt_tokens: 100, now: NOW, _tickets: tickets }
}

/// Result of a decision that may be split.
#[derive(Debug)]
pub struct Sent {
    /// Decision for the whole request.
    pub whole: Decision,
    /// The pair, if there is one.
    pub pair: Option<Pair>,
    /// Whether the request is split.
    pub split: bool,
}

impl Sent {
    /// Ids of the prefill and decode servers, in the order of attempts; empty if the request is not split.
    pub fn ids(&self) -> (Vec<u32>, Vec<u32>) {
        let ids = |picks: &split::Picks| picks.iter().map(|e| e.id.0).collect();
        self.pair.as_ref().filter(|_| self.split).map_or_else(Default::default, |p| (ids(&p.prefill), ids(&p.decode)))
    }

    /// Ids of the first prefill and decode server; `None` if the request is not split.
    pub fn first(&self) -> Option<(u32, u32)> {
        let (prefill, decode) = self.ids();
        Some((*prefill.first()?, *decode.first()?))
    }
}

impl Trial {
    /// Adds a request header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Sets the prompt length in tokens.
    pub fn long(self, prompt_tokens: u32) -> Self {
        Self { prompt_tokens, ..self }
    }

    /// Sets the prompt.
    pub fn asking(self, prompt: Prompt<'static>) -> Self {
        Self { prompt: Some(prompt), ..self }
    }

    /// Moves the time of the request by this many milliseconds.
    pub fn later(self, ms: u64) -> Self {
        Self { now: Timestamp(self.now.0 + ms * 1_000_000), ..self }
    }

    /// Context of a decision about the request.
    pub fn context(&self) -> PickContext<'_> {
        let request = RequestFacts {
            model: "A",
            prompt_tokens: self.prompt_tokens,
            headers: Headers::of(&self.headers),
            prompt: self.prompt.as_ref(),
            ..RequestFacts::default()
        };
        PickContext { request, splittable: true, ..PickContext::new(&self.pool, self.now, STALE_AFTER) }
    }

    /// Candidates with all of `roles`.
    pub fn there_for(&self, roles: Roles) -> Vec<Candidate<'_>> {
        self.candidates().into_iter().filter(|c| c.state.endpoint.roles.has(roles)).collect()
    }

    /// Decision of `strategy` for the whole request and for a pair; `None` without a candidate.
    pub fn pair(&self, strategy: &dyn Strategy, policy: &SplitPolicy, wanted: usize, seed: u64) -> Option<Sent> {
        let cx = self.context();
        let rng = &mut for_request(seed, 0);
        let decode = self.there_for(strategy.roles(&cx));
        let prefill = self.there_for(Roles::PREFILL);
        let mut ranking = Ranking::new(wanted);
        strategy.rank(&cx, &decode, rng, &mut ranking);
        let whole = ranking.decide()?;
        let field = PairCandidates { prefill: &prefill, decode: &decode, whole: &whole, policy };
        let pair = strategy.pair(&cx, &field, rng, Ranking::new(wanted).explained());
        let split = pair
            .as_ref()
            .is_some_and(|pair| pair.split.unwrap_or_else(|| split::is_split(&cx, &field, pair, policy.decider).0));
        Some(Sent { whole, pair, split })
    }

    /// Encode servers of a request that `strategy` has decided, at most `wanted`.
    pub fn encoders(&self, strategy: &dyn Strategy, sent: &Sent, wanted: usize) -> Vec<u32> {
        let (cx, encode) = (self.context(), self.there_for(Roles::ENCODE));
        let decode = self.there_for(strategy.roles(&cx));
        let mut sent_as = sent.whole.clone();
        if let (Some(pair), true) = (&sent.pair, sent.split) {
            let (prefill, reason) = (pair.prefill.clone(), pair.reason);
            sent_as.picks = pair.decode.clone();
            sent_as.split = Some(Box::new(split::Split { prefill, prefill_cached: 0, probe: false, reason }));
        }
        let media = split::Media { encode: &encode, decode: &decode, sent: &sent_as };
        let chosen = strategy.encoders(&cx, &media, &mut for_request(1, 0), Ranking::new(wanted));
        chosen.iter().flat_map(|c| &c.picks).map(|e| e.id.0).collect()
    }

    /// All servers, with their cached prefixes.
    pub fn candidates(&self) -> Vec<Candidate<'_>> {
        let states = self.pool.endpoints.iter().zip(&self.cached);
        let candidate = |(state, cached): (_, &u32)| Candidate {
            cached: Cached { gpu: *cached, any: *cached, in_use: 0 },
            ..Candidate::new(state, self.now, STALE_AFTER, 0)
        };
        states.map(candidate).collect()
    }

    /// Positions of the candidates that the filter keeps.
    pub fn kept(&self, filter: &dyn Filter) -> Vec<usize> {
        self.kept_by_draw(filter, 0)
    }

    /// Positions of the candidates that the filter keeps, with this random seed.
    pub fn kept_by_draw(&self, filter: &dyn Filter, seed: u64) -> Vec<usize> {
        let candidates = self.candidates();
        let mut keep = vec![true; candidates.len()];
        filter.keep(&self.context(), &candidates, &mut for_request(seed, 0), &mut keep);
        (0..keep.len()).filter(|i| keep[*i]).collect()
    }

    /// Score of each server.
    pub fn scores(&self, scorer: &dyn Scorer) -> Vec<f32> {
        let candidates = self.candidates();
        let mut out = vec![f32::NAN; candidates.len()];
        scorer.score(&self.context(), &candidates, &mut out);
        out
    }

    /// The server with this id.
    pub fn endpoint(&self, i: usize) -> &Endpoint {
        &self.pool.endpoints[i].endpoint
    }
}

/// An empty prefix cache with blocks of 16 tokens.
pub fn prefix_cache() -> PrefixCache {
    PrefixCache::new(&CacheConfig {
        claim_every_block: false,
        unit: BlockUnit::Tokens(16),
        max_bytes: 1 << 20,
        tenant_share: 1.0,
        claim_life: Duration::from_secs(30),
        seed: 7,
    })
}

/// Response headers of a plugin, as `name: value`.
pub fn answer(add: impl Fn(&mut ResponseHeaders)) -> Vec<String> {
    let mut headers = ResponseHeaders::new();
    add(&mut headers);
    headers.into_iter().map(|(name, value)| format!("{name}: {value}")).collect()
}

/// A server with this role and queue depth.
#[must_use]
pub fn role(role: &str, waiting: u32) -> TestServer {
    load(waiting, 0.0).label("llm-d.ai/role", role)
}

/// A server with this role and queue depth, in a zone.
#[must_use]
pub fn in_zone(role_: &str, waiting: u32, zone: &str) -> TestServer {
    role(role_, waiting).label(DEFAULT_ZONE_LABEL, zone)
}

/// Observes that transfers of 1,000 tokens take this many milliseconds between servers of `trial` at this distance.
pub fn observe_transfers(trial: &Trial, near: Option<Nearness>, ms: u32) {
    for state in &trial.pool.endpoints {
        for _ in 0..50 {
            state.endpoint.speed.pool().transfer().observe(1_000, near, f64::from(ms) / 1e3, trial.context().now);
        }
    }
}
