//! The picker of a recording: applies one line after the other, and compares its decisions with the recorded ones.

use super::decision::{decide, differs_by_chance};
use super::in_flight::{OpenRequest, RecordedOrder};
use super::kv::EngineCaches;
use super::pools::{LivePool, PoolState};
use super::{Difference, RecordError, Summary, settings, wrong};
use attache_config::Settings;
use attache_config::settings::PoolSettings;
use attache_pool::health::Observation;
use attache_pool::{Endpoint, PoolEvent, PoolWriter};
use attache_prefix::cache::{CacheConfig, PrefixCache};
use attache_record::{Booked, Decided, Ended, Header, Line, RequestLeg};
use attache_scheduling::{Decision, Dispatch, Registry};
use attache_scrape::slo_profiles;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// One recorded configuration with its pools.
#[derive(Debug)]
struct RecordedConfig {
    settings: Settings,
    pools: BTreeMap<Arc<str>, LivePool>,
}

/// State of a replay.
#[derive(Debug)]
pub(super) struct RecordingPlayer<'a> {
    /// The configuration that replaces the recorded ones.
    other: Option<&'a Settings>,
    /// The plugins that recorded configurations name.
    registry: &'a Registry,
    pools: BTreeMap<u32, PoolState>,
    /// Number of the latest pool with each name.
    named: BTreeMap<Arc<str>, u32>,
    /// Configurations by number: 0 is that of the header, and each reload adds one.
    lives: BTreeMap<u32, RecordedConfig>,
    open: HashMap<u64, OpenRequest>,
    summary: Summary,
}

impl<'a> RecordingPlayer<'a> {
    pub(super) fn new(
        header: &Header,
        other: Option<&'a Settings>,
        registry: &'a Registry,
    ) -> Result<Self, RecordError> {
        let first = RecordedConfig { settings: settings(&header.settings, registry, 1)?, pools: BTreeMap::new() };
        Ok(Self {
            other,
            registry,
            pools: BTreeMap::new(),
            named: BTreeMap::new(),
            lives: BTreeMap::from([(0, first)]),
            open: HashMap::new(),
            summary: Summary::default(),
        })
    }

    pub(super) fn summary(self) -> Summary {
        self.summary
    }

    pub(super) fn apply(&mut self, line: Line, number: u64) -> Result<(), RecordError> {
        match line {
            Line::Pool { pool, name, cache } => self.begin_pool(pool, name, &cache, number),
            Line::Cache { pool, cache, number: cache_number } => {
                let cache = Arc::new(PrefixCache::new(&self.cache_config(pool, cache)));
                let state = self.pool(pool, number)?;
                cache.reconcile(&state.store.load());
                state.engines.insert(cache_number, EngineCaches::of(cache.clone()));
                state.cache = cache;
                Ok(())
            }
            Line::Kv { pool, number: cache_number, change } => {
                let state = self.pool(pool, number)?;
                let unknown = || wrong(number, format!("`number` is {cache_number}, which has not begun"));
                state.engines.get_mut(&cache_number).ok_or_else(unknown)?.apply(change);
                Ok(())
            }
            Line::Endpoints { pool, source, endpoints } => {
                let endpoints = endpoints.into_iter().map(Arc::new).collect();
                self.event(pool, PoolEvent::Endpoints { source, endpoints }, number)
            }
            Line::Gone { pool, source } => self.event(pool, PoolEvent::SourceGone { source }, number),
            Line::Expect { pool, sources } => self.event(pool, PoolEvent::Expect { sources }, number),
            Line::Page { pool, id, metrics } => self.event(pool, PoolEvent::Scraped { id, metrics }, number),
            Line::Restart { pool, id } => self.event(pool, PoolEvent::Restarted { id }, number),
            Line::Cleared { pool, id } => self.event(pool, PoolEvent::CacheCleared { id }, number),
            Line::Publish { pool } => self.publish(pool, number),
            Line::Live { live, settings: shown } => {
                self.begin_live(live, settings(&shown, self.registry, number)?, number)
            }
            Line::Decide(decided) => self.decide(&decided, number),
            Line::SessionEnd { session, tenant } => {
                let pools = self.lives.values().flat_map(|live| live.pools.values());
                pools.for_each(|pool| pool.choices().end_session(tenant.as_deref(), &session));
                Ok(())
            }
            line @ (Line::Moved { .. }
            | Line::Dispatch { .. }
            | Line::Health { .. }
            | Line::ProbeLost { .. }
            | Line::First { .. }
            | Line::End(_)
            | Line::Drop { .. }) => {
                self.apply_to_request(line);
                Ok(())
            }
        }
    }

    /// Applies a line about a request that was decided. Lines about pools have no effect.
    fn apply_to_request(&mut self, line: Line) {
        match line {
            Line::Moved { r, at, to, leg } => {
                if leg == RequestLeg::Response {
                    self.compare_fallback(r, to);
                }
                let endpoint = self.endpoint(r, to);
                if let (Some(open), Some(endpoint)) = (self.open.get_mut(&r), endpoint) {
                    open.moved(at, &endpoint, leg);
                }
            }
            Line::Dispatch { r, at, from, seconds } => self.dispatch(r, at, from, seconds),
            Line::Health { r, at, id, outcome, api, client } => {
                self.observe_health(r, at, id, Observation { outcome, api, client });
            }
            Line::ProbeLost { r, id } => {
                if let Some(endpoint) = self.endpoint(r, id) {
                    endpoint.health.probe_lost();
                }
            }
            Line::First { r, at, good, tells, leg } => {
                if let Some(booked) = self.open.get_mut(&r).and_then(|open| open.booked(leg)) {
                    booked.first_byte(good, tells, at);
                }
            }
            Line::End(ended) => self.end(&ended),
            Line::Drop { r, leg } => drop(self.take(r, leg)),
            _ => {}
        }
    }

    /// A request was sent, whose prompt was to be computed on another server.
    fn dispatch(&mut self, r: u64, at: Timestamp, from: Option<EndpointId>, seconds: f64) {
        let from = from.and_then(|id| self.endpoint(r, id));
        let how = from.as_ref().map_or(Dispatch::Whole, |from| Dispatch::Arrives(from, seconds));
        if let Some(plan) = self.open.get_mut(&r).and_then(|open| open.plan.as_mut()) {
            plan.dispatch(how, at);
        }
    }

    /// Takes the booking of a leg that has ended. The request ends with its last leg.
    fn take(&mut self, r: u64, leg: RequestLeg) -> Option<Booked> {
        let open = self.open.get_mut(&r)?;
        let booked = open.end(leg);
        if open.response.is_none() && open.prefill.is_none() {
            self.open.remove(&r);
        }
        booked
    }

    fn observe_health(&self, r: u64, at: Timestamp, id: EndpointId, observation: Observation) {
        let (Some(endpoint), Some(pool)) = (self.endpoint(r, id), self.live_pool(r)) else { return };
        let policy = pool.pool.scheduler.health();
        let may_eject = || pool.pool.store.load().may_eject(&endpoint, at, policy);
        endpoint.health.observe(observation, at, policy, may_eject);
    }

    fn pool(&mut self, pool: u32, line: u64) -> Result<&mut PoolState, RecordError> {
        self.pools.get_mut(&pool).ok_or_else(|| wrong(line, format!("`pool` is {pool}, which has not begun")))
    }

    /// The pool of a request in flight, in the configuration that decided it.
    fn live_pool(&self, r: u64) -> Option<&LivePool> {
        let open = self.open.get(&r)?;
        self.lives.get(&open.live)?.pools.get(&open.pool)
    }

    fn endpoint(&self, r: u64, id: EndpointId) -> Option<Arc<Endpoint>> {
        self.pools.get(&self.live_pool(r)?.number)?.known.get(&id).cloned()
    }

    /// The settings of a pool: the recorded ones, or those of the other configuration. If that has a single pool, it
    /// stands for every recorded pool.
    fn pool_settings<'s>(&'s self, recorded: &'s Settings, name: &str) -> Option<&'s PoolSettings> {
        let settings = self.other.unwrap_or(recorded);
        match (settings.pools.iter().find(|p| *p.name == *name), settings.pools.as_slice()) {
            (Some(pool), _) => Some(pool),
            (None, [only]) => Some(only),
            _ => None,
        }
    }

    /// The recorded block size with the limits of the configuration that is replayed.
    fn cache_config(&self, pool: u32, recorded: CacheConfig) -> CacheConfig {
        let settings = self.other.zip(self.pools.get(&pool));
        match settings.and_then(|(other, state)| self.pool_settings(other, &state.name)) {
            Some(pool) => pool.prefix.cache_config(recorded.unit, recorded.seed),
            None => recorded,
        }
    }

    fn begin_pool(&mut self, pool: u32, name: Arc<str>, cache: &CacheConfig, line: u64) -> Result<(), RecordError> {
        let state = PoolState {
            name: name.clone(),
            writer: PoolWriter::new(Vec::new()),
            store: Arc::default(),
            cache: Arc::new(PrefixCache::new(cache)),
            engines: BTreeMap::new(),
            known: BTreeMap::new(),
        };
        self.pools.insert(pool, state);
        let config = self.cache_config(pool, cache.clone());
        let (cache, state) = (Arc::new(PrefixCache::new(&config)), self.pool(pool, line)?);
        state.engines.insert(0, EngineCaches::of(cache.clone()));
        state.cache = cache;
        self.named.insert(name.clone(), pool);
        // The recording names the pools of the first configuration after it, and those of a reload before it.
        if let (1, Some(first)) = (self.lives.len(), self.lives.get(&0))
            && first.settings.pools.iter().any(|p| p.name == name)
        {
            let live = self.live_pool_of(&first.settings, &name, line)?;
            if let Some(first) = self.lives.get_mut(&0) {
                first.pools.insert(name, live);
            }
        }
        Ok(())
    }

    fn begin_live(&mut self, live: u32, settings: Settings, line: u64) -> Result<(), RecordError> {
        let mut pools = BTreeMap::new();
        for pool in &settings.pools {
            pools.insert(pool.name.clone(), self.live_pool_of(&settings, &pool.name, line)?);
        }
        self.lives.insert(live, RecordedConfig { settings, pools });
        Ok(())
    }

    fn live_pool_of(&self, recorded: &Settings, name: &Arc<str>, line: u64) -> Result<LivePool, RecordError> {
        let missing = || RecordError::Format(format!("the configuration has no pool `{name}`, which was recorded"));
        let p = self.pool_settings(recorded, name).ok_or_else(missing)?;
        let unknown = || wrong(line, format!("the pool `{name}` has not begun"));
        let number = *self.named.get(name).ok_or_else(unknown)?;
        let state = self.pools.get(&number).ok_or_else(unknown)?;
        let before = self.lives.values().next_back().and_then(|live| live.pools.get(name));
        let previous = before.map(LivePool::choices);
        let scheduler = p.scheduler(previous).map_err(|e| wrong(line, format!("the pool `{name}`: {e}")))?;
        slo_profiles::fill(&scheduler.choices).map_err(|e| wrong(line, format!("the pool `{name}`: {e}")))?;
        Ok(LivePool::new(number, state, scheduler, p))
    }

    fn event(&mut self, pool: u32, event: PoolEvent, line: u64) -> Result<(), RecordError> {
        self.pool(pool, line)?.writer.apply(event);
        Ok(())
    }

    fn publish(&mut self, pool: u32, line: u64) -> Result<(), RecordError> {
        let mut lost: Vec<EndpointId> = Vec::new();
        let state = self.pool(pool, line)?;
        if let Some(snapshot) = state.writer.snapshot() {
            state.cache.reconcile(&snapshot);
            lost.extend(&*snapshot.lost);
            for endpoint in snapshot.endpoints.iter().map(|s| &s.endpoint) {
                state.known.insert(endpoint.id, endpoint.clone());
            }
            state.store.publish(snapshot);
        }
        let deciding = self.lives.values().flat_map(|live| live.pools.values()).filter(|p| p.number == pool);
        deciding.for_each(|p| p.choices().forget(&lost));
        Ok(())
    }

    /// The pool of a decision with its state.
    pub(super) fn deciding(&self, d: &Decided, line: u64) -> Result<(&LivePool, &PoolState), RecordError> {
        let unknown = || wrong(line, format!("there is no pool `{}` in the configuration number {}", d.pool, d.live));
        let pool = self.lives.get(&d.live).and_then(|live| live.pools.get(&d.pool)).ok_or_else(unknown)?;
        Ok((pool, self.pools.get(&pool.number).ok_or_else(unknown)?))
    }

    fn decide(&mut self, d: &Decided, line: u64) -> Result<(), RecordError> {
        let (pool, state) = self.deciding(d, line)?;
        let mut missing = BTreeSet::new();
        let by_chance = !d.preset && differs_by_chance(pool, state, d);
        let played = decide(pool, state, d, &mut missing);
        let first = |ids: &[EndpointId]| ids.iter().take(1).map(|id| state.authority(*id)).collect();
        let encode = d.encode.iter().map(|id| state.authority(*id)).collect();
        let recorded = servers([first(&d.picks), first(&d.prefill), encode]);
        let replayed = played.as_ref().map(|plan| used_servers(&plan.decision)).unwrap_or_default();
        let is_equal = recorded == replayed;
        let summary = &mut self.summary;
        // The recorded configuration read what it needs, so that only another one can lack an input.
        if self.other.is_some() {
            summary.missing.append(&mut missing);
        }
        summary.matched_recorded += u64::from(d.matched);
        if let Ok(plan) = &played {
            summary.prompt_tokens += d.prompt.as_ref().map_or(0, |_| u64::from(plan.prompt_tokens));
            summary.matched_replayed += u64::from(plan.pick_matched_tokens);
        }
        if let Some(first) = recorded.first() {
            summary.endpoints.entry(first.clone()).or_default().recorded += 1;
        }
        if let Some(first) = replayed.first() {
            summary.endpoints.entry(first.clone()).or_default().replayed += 1;
        }
        if d.preset {
            summary.preset += 1;
        } else {
            summary.decisions += 1;
            summary.equal += u64::from(is_equal);
            if !is_equal {
                let reason = played.as_ref().map_or_else(|error| error.reason.code(), |plan| plan.decision.reason);
                summary.differs(|| Difference {
                    line,
                    request: d.r,
                    recorded,
                    recorded_reason: d.reason.clone(),
                    replayed,
                    replayed_reason: reason.to_owned(),
                    by_chance,
                });
                summary.by_chance += u64::from(by_chance);
            }
        }
        // A recorded rejection has no end, so a booking would never be released.
        if let Some(first) = d.picks.first() {
            let (response, prefill) = (Some(*first), d.prefill.first().copied());
            let order = || RecordedOrder { line, picks: d.picks.clone(), reason: d.reason.clone() };
            let fallbacks = (is_equal && !d.preset && d.picks.len() > 1).then(order);
            let (live, pool) = (d.live, d.pool.clone());
            let open = OpenRequest { live, pool, plan: played.ok(), response, prefill, fallbacks };
            self.open.insert(d.r, open);
        }
        Ok(())
    }

    /// Envoy used the fallback `to` of the recorded decision. The decision differs if the replay's next one is another.
    fn compare_fallback(&mut self, r: u64, to: EndpointId) {
        let Some(OpenRequest { fallbacks: Some(order), plan: Some(plan), .. }) = self.open.get(&r) else { return };
        // Envoy may have chosen an endpoint that the picker did not name.
        let Some(used) = order.used(to) else { return };
        let picks = plan.decision.picks.iter().take(used);
        if picks.clone().map(|endpoint| endpoint.id).eq(order.picks.iter().take(used).copied()) {
            return;
        }
        let names = order.picks.iter().take(used).filter_map(|id| self.endpoint(r, *id));
        let difference = Difference {
            line: order.line,
            request: r,
            recorded: names.map(|endpoint| endpoint.authority.to_string()).collect(),
            recorded_reason: order.reason.clone(),
            replayed: picks.map(|endpoint| endpoint.authority.to_string()).collect(),
            replayed_reason: plan.decision.reason.to_owned(),
            by_chance: false,
        };
        self.summary.equal -= 1;
        self.summary.differs(|| difference);
        if let Some(open) = self.open.get_mut(&r) {
            open.fallbacks = None;
        }
    }

    fn end(&mut self, ended: &Ended) {
        let Some(mut booked) = self.take(ended.r, ended.leg) else { return };
        let extend = |keys: &mut Vec<_>| match &ended.keys {
            Some(added) => {
                keys.extend(added);
                true
            }
            None => false,
        };
        booked.end(ended.complete, &ended.usage(), extend, ended.at);
    }
}

/// The servers of a decision for people: those of the response, then `prefill=` and `encode=` with theirs.
fn servers([picks, prefill, encode]: [Vec<String>; 3]) -> Vec<String> {
    let of = |role: &'static str, names: Vec<String>| names.into_iter().map(move |name| format!("{role}={name}"));
    picks.into_iter().chain(of("prefill", prefill)).chain(of("encode", encode)).collect()
}

/// As [`servers`], of a decision of the replay: those that a request uses without failures.
fn used_servers(decision: &Decision) -> Vec<String> {
    let names = |endpoints: &[Arc<Endpoint>]| endpoints.iter().map(|endpoint| endpoint.authority.to_string()).collect();
    let first = |endpoints: &[Arc<Endpoint>]| names(endpoints.get(..1).unwrap_or_default());
    let prefill = decision.split.as_ref().map_or(&[][..], |split| &split.prefill);
    servers([first(&decision.picks), first(prefill), names(&decision.encode)])
}
