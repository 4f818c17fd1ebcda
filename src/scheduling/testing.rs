//! A small pool on which plugins are tried, for the tests of this crate and of those with plugins.

use crate::candidates::Cached;
use crate::plugin::{AnswerHeaders, Filter, Headers, Scorer};
use crate::scheduler::{Explain, Scheduler, Subset};
use crate::split::{self, Field, Pair, SplitPolicy};
use crate::{Candidate, Decision, PickContext, Ranking, RequestFacts, Strategy};
use attache_pool::Roles;
use attache_pool::health::{HealthPolicy, Outcome};
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

/// The moment of all tests.
pub const NOW: Timestamp = Timestamp(5_000_000_000);
/// Metrics older than this are stale.
pub const STALE_AFTER: Duration = Duration::from_secs(2);

/// A pool whose endpoints have these ids and report these requests.
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

/// A decision at [`NOW`] about a request of which nothing is known.
#[must_use]
pub fn context(snapshot: &PoolSnapshot) -> PickContext<'_> {
    PickContext::new(snapshot, NOW, STALE_AFTER)
}

/// The decision of a scheduler with its default strategy, about [`context`].
///
/// # Errors
/// When no endpoint can be chosen.
pub fn decide(
    scheduler: &Scheduler,
    pool: &PoolSnapshot,
    subset: Option<&Subset>,
    seed: u64,
) -> Result<Decision, RequestError> {
    let strategy = &*scheduler.choices.default.strategy;
    scheduler.decide(strategy, &context(pool), subset, Explain::No, &mut for_request(seed, 0))
}

/// Ejects the endpoint at `position` so that it is half open at [`NOW`] when `half_open`.
pub fn eject(pool: &PoolSnapshot, position: usize, half_open: bool) {
    let at = if half_open { Timestamp(1) } else { NOW };
    let policy = HealthPolicy { ejection: Duration::from_secs(1), ..HealthPolicy::default() };
    for _ in 0..2 {
        pool.endpoints[position].endpoint.health.record(Outcome::ConnectFailure, at, &policy);
    }
}

/// A pool of servers with these roles; a name in place of a role is none that is known.
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

/// One server, and what it holds of the prompt.
#[derive(Debug)]
pub struct Server {
    /// What it reported.
    pub metrics: Option<EndpointMetrics>,
    labels: BTreeMap<Arc<str>, Arc<str>>,
    name: Option<&'static str>,
    cached: u32,
    tickets: Vec<u32>,
}

/// A server that reports nothing.
pub fn silent() -> Server {
    Server { metrics: None, labels: BTreeMap::new(), name: None, cached: 0, tickets: Vec::new() }
}

/// A server that reports this.
pub fn reports(metrics: EndpointMetrics) -> Server {
    Server { metrics: Some(EndpointMetrics { scraped_at: NOW, ..metrics }), ..silent() }
}

/// A server with this queue and this part of its KV cache in use.
pub fn load(waiting: u32, kv_usage: f32) -> Server {
    reports(EndpointMetrics { waiting, kv_usage, ..EndpointMetrics::default() })
}

/// A server with so many running requests.
pub fn running(running: u32) -> Server {
    reports(EndpointMetrics { running, ..EndpointMetrics::default() })
}

/// A server with these adapters running and waiting, and room for `max`.
pub fn lora(running: &[&str], waiting: &[&str], max: u32) -> Server {
    let names = |list: &[&str]| list.iter().map(|n| Arc::from(*n)).collect();
    let lora = Some(LoraState { max, running: names(running), waiting: names(waiting) });
    reports(EndpointMetrics { lora, ..EndpointMetrics::default() })
}

impl Server {
    /// Read so many milliseconds ago.
    pub fn aged(mut self, ms: u64) -> Self {
        if let Some(metrics) = &mut self.metrics {
            metrics.scraped_at = Timestamp(NOW.0 - ms * 1_000_000);
        }
        self
    }

    /// It has this label.
    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.labels.insert(key.into(), value.into());
        self
    }

    /// It has this name.
    pub fn named(mut self, name: &'static str) -> Self {
        self.name = Some(name);
        self
    }

    /// It holds so many tokens of the prompt.
    pub fn holding(mut self, tokens: u32) -> Self {
        self.cached = tokens;
        self
    }

    /// Requests that we have sent there, by their uncached prompt tokens.
    pub fn sent(mut self, tokens: &[u32]) -> Self {
        self.tickets.extend(tokens);
        self
    }
}

/// The pool and the request.
#[derive(Debug)]
pub struct Trial {
    /// The servers.
    pub pool: PoolSnapshot,
    cached: Vec<u32>,
    headers: BTreeMap<String, String>,
    prompt: Option<Prompt<'static>>,
    prompt_tokens: u32,
    now: Timestamp,
    _tickets: Vec<Ticket>,
}

/// A request of 100 tokens for the model `A` among `servers`, whose ids count from 0.
pub fn among(servers: Vec<Server>) -> Trial {
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

/// Where a request goes that may be split.
#[derive(Debug)]
pub struct Sent {
    /// The decision for the whole request.
    pub whole: Decision,
    /// The pair of servers, where there is one.
    pub pair: Option<Pair>,
    /// The request goes to the pair.
    pub split: bool,
}

impl Sent {
    /// Prefill and decode server, in the order in which they are tried; nothing when it is not split.
    pub fn ids(&self) -> (Vec<u32>, Vec<u32>) {
        let ids = |picks: &split::Picks| picks.iter().map(|e| e.id.0).collect();
        self.pair.as_ref().filter(|_| self.split).map_or_else(Default::default, |p| (ids(&p.prefill), ids(&p.decode)))
    }

    /// The first of each; `None` when it is not split.
    pub fn first(&self) -> Option<(u32, u32)> {
        let (prefill, decode) = self.ids();
        Some((*prefill.first()?, *decode.first()?))
    }
}

impl Trial {
    /// The request has this header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The request has a prompt of so many tokens.
    pub fn long(self, prompt_tokens: u32) -> Self {
        Self { prompt_tokens, ..self }
    }

    /// This is its prompt.
    pub fn asking(self, prompt: Prompt<'static>) -> Self {
        Self { prompt: Some(prompt), ..self }
    }

    /// It comes so many milliseconds later.
    pub fn later(self, ms: u64) -> Self {
        Self { now: Timestamp(self.now.0 + ms * 1_000_000), ..self }
    }

    /// What a decision about the request may depend on.
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

    /// Those with all of `roles`.
    pub fn there_for(&self, roles: Roles) -> Vec<Candidate<'_>> {
        self.candidates().into_iter().filter(|c| c.state.endpoint.roles.has(roles)).collect()
    }

    /// Who serves the request whole by `strategy`, and in a pair; `None` without anybody.
    pub fn pair(&self, strategy: &dyn Strategy, policy: &SplitPolicy, wanted: usize, seed: u64) -> Option<Sent> {
        let cx = self.context();
        let rng = &mut for_request(seed, 0);
        let decode = self.there_for(strategy.roles(&cx));
        let prefill = self.there_for(Roles::PREFILL);
        let mut ranking = Ranking::new(wanted);
        strategy.rank(&cx, &decode, rng, &mut ranking);
        let whole = ranking.decide()?;
        let field = Field { prefill: &prefill, decode: &decode, whole: &whole, policy };
        let pair = strategy.pair(&cx, &field, rng, Ranking::new(wanted).explained());
        let split = pair
            .as_ref()
            .is_some_and(|pair| pair.split.unwrap_or_else(|| split::is_split(&cx, &field, pair, policy.decider)));
        Some(Sent { whole, pair, split })
    }

    /// Who encodes for the request that a decision by `strategy` has sent, `wanted` at most.
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

    /// All servers, with what they hold of the prompt.
    pub fn candidates(&self) -> Vec<Candidate<'_>> {
        let states = self.pool.endpoints.iter().zip(&self.cached);
        let candidate = |(state, cached): (_, &u32)| Candidate {
            cached: Cached { gpu: *cached, any: *cached, in_use: 0 },
            ..Candidate::new(state, self.now, STALE_AFTER, 0)
        };
        states.map(candidate).collect()
    }

    /// Who stays.
    pub fn kept(&self, filter: &dyn Filter) -> Vec<usize> {
        self.kept_by_draw(filter, 0)
    }

    /// Who stays, by the draw of this seed.
    pub fn kept_by_draw(&self, filter: &dyn Filter, seed: u64) -> Vec<usize> {
        let candidates = self.candidates();
        let mut keep = vec![true; candidates.len()];
        filter.keep(&self.context(), &candidates, &mut for_request(seed, 0), &mut keep);
        (0..keep.len()).filter(|i| keep[*i]).collect()
    }

    /// The score of each server.
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

/// What nobody's cache is known to hold yet, in blocks of 16 tokens.
pub fn prefix_cache() -> PrefixCache {
    PrefixCache::new(&CacheConfig {
        unit: BlockUnit::Tokens(16),
        max_bytes: 1 << 20,
        tenant_share: 1.0,
        claim_life: Duration::from_secs(30),
        seed: 7,
    })
}

/// The headers that a plugin has for the client when `endpoint` serves, as `name: value`.
pub fn answer(tell: impl Fn(&mut AnswerHeaders)) -> Vec<String> {
    let mut headers = AnswerHeaders::new();
    tell(&mut headers);
    headers.into_iter().map(|(name, value)| format!("{name}: {value}")).collect()
}

/// A server of this role, with this queue.
#[must_use]
pub fn role(role: &str, waiting: u32) -> Server {
    load(waiting, 0.0).label("llm-d.ai/role", role)
}

/// A server of this role in a zone.
#[must_use]
pub fn in_zone(role_: &str, waiting: u32, zone: &str) -> Server {
    role(role_, waiting).label(DEFAULT_ZONE_LABEL, zone)
}

/// A thousand tokens take so many milliseconds between servers of `trial` that are as near as that.
pub fn observe_transfers(trial: &Trial, near: Option<Nearness>, ms: u32) {
    for state in &trial.pool.endpoints {
        for _ in 0..50 {
            state.endpoint.speed.pool().transfer().observe(1_000, near, f64::from(ms) / 1e3, trial.context().now);
        }
    }
}
