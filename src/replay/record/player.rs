//! The picker of a recording: applies one line after the other, and compares its decisions with the recorded ones.

use super::decision::{PlayedDecision, Trail, decide};
use super::{Difference, MAX_DIFFERENCES, RecordError, Summary, settings, wrong};
use attache_config::Settings;
use attache_config::settings::PoolSettings;
use attache_pool::health::Observation;
use attache_pool::{Endpoint, PoolEvent, PoolSnapshot, PoolWriter};
use attache_prefix::cache::{CacheConfig, PrefixCache};
use attache_record::{Decided, Ended, Header, Line};
use attache_scheduling::{Booking, Registry, Scheduler};
use attache_scrape::slo_profiles;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// A recorded pool: endpoints, snapshot and prefix cache, which outlive reloads.
#[derive(Debug)]
pub(super) struct PoolState {
    name: Arc<str>,
    writer: PoolWriter,
    pub(super) snapshot: Arc<PoolSnapshot>,
    cache: Arc<PrefixCache>,
    /// All endpoints that the pool ever had, by id.
    pub(super) known: BTreeMap<EndpointId, Arc<Endpoint>>,
}

/// A pool in one configuration: what a reload replaces.
#[derive(Debug)]
pub(super) struct LivePool {
    /// Key of its [`PoolState`].
    number: u32,
    pub(super) cache: Arc<PrefixCache>,
    pub(super) scheduler: Scheduler,
    pub(super) stale_after: Duration,
}

/// One recorded configuration with its pools.
#[derive(Debug)]
struct RecordedConfig {
    settings: Settings,
    pools: BTreeMap<Arc<str>, LivePool>,
}

/// A request that has not ended.
#[derive(Debug)]
struct OpenRequest {
    /// Number of the configuration that decided it.
    live: u32,
    pool: Arc<str>,
    /// `None` if the replay rejected it.
    booking: Option<Booking>,
    trail: Option<Trail>,
    /// The endpoint that served it according to the recording.
    recorded: EndpointId,
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
            Line::Cache { pool, cache } => {
                let cache = Arc::new(PrefixCache::new(&self.cache_config(pool, cache)));
                let state = self.pool(pool, number)?;
                cache.reconcile(&state.snapshot);
                state.cache = cache;
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
            Line::Moved { r, at, to } => {
                self.moved(r, at, to);
                Ok(())
            }
            Line::Health { r, at, id, outcome, api, client } => {
                self.observe_health(r, at, id, Observation { outcome, api, client });
                Ok(())
            }
            Line::ProbeLost { r, id } => {
                if let Some(endpoint) = self.endpoint(r, id) {
                    endpoint.health.probe_lost();
                }
                Ok(())
            }
            Line::First { r, at, good, tells } => {
                if let Some(booking) = self.open.get_mut(&r).and_then(|open| open.booking.as_mut()) {
                    booking.first_byte(good, tells, at);
                }
                Ok(())
            }
            Line::End(ended) => {
                self.end(&ended);
                Ok(())
            }
            Line::Drop { r } => {
                self.open.remove(&r);
                Ok(())
            }
        }
    }

    /// Applies that Envoy sent a request to another endpoint than the first pick.
    fn moved(&mut self, r: u64, at: Timestamp, to: EndpointId) {
        let endpoint = self.endpoint(r, to);
        let (Some(open), Some(endpoint)) = (self.open.get_mut(&r), endpoint) else { return };
        let there = |b: &&mut Booking| b.endpoint().id == open.recorded;
        if let Some(booking) = open.booking.as_mut().filter(there) {
            booking.move_to(&endpoint, at);
            if let Some((strategy, model, trail)) = &open.trail {
                strategy.moved(model, trail, open.recorded, to, at);
            }
        }
        open.recorded = to;
    }

    fn observe_health(&self, r: u64, at: Timestamp, id: EndpointId, observation: Observation) {
        let (Some(endpoint), Some(pool)) = (self.endpoint(r, id), self.live_pool(r)) else { return };
        let (state, policy) = (self.pools.get(&pool.number), pool.scheduler.health());
        let may_eject = || state.is_none_or(|state| state.snapshot.may_eject(&endpoint, at, policy));
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
            Some(PoolSettings { prefix, .. }) => CacheConfig {
                max_bytes: prefix.max_bytes,
                tenant_share: prefix.tenant_share,
                claim_life: prefix.claim_life,
                ..recorded
            },
            None => recorded,
        }
    }

    fn begin_pool(&mut self, pool: u32, name: Arc<str>, cache: &CacheConfig, line: u64) -> Result<(), RecordError> {
        let state = PoolState {
            name: name.clone(),
            writer: PoolWriter::new(Vec::new()),
            snapshot: Arc::default(),
            cache: Arc::new(PrefixCache::new(cache)),
            known: BTreeMap::new(),
        };
        self.pools.insert(pool, state);
        let config = self.cache_config(pool, cache.clone());
        self.pool(pool, line)?.cache = Arc::new(PrefixCache::new(&config));
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
        let previous = before.map(|pool| &pool.scheduler.choices);
        let scheduler = p.scheduler(previous).map_err(|e| wrong(line, format!("the pool `{name}`: {e}")))?;
        slo_profiles::fill(&scheduler.choices).map_err(|e| wrong(line, format!("the pool `{name}`: {e}")))?;
        Ok(LivePool { number, cache: state.cache.clone(), scheduler, stale_after: p.scrape.stale_after })
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
            state.snapshot = Arc::new(snapshot);
        }
        let deciding = self.lives.values().flat_map(|live| live.pools.values()).filter(|p| p.number == pool);
        deciding.for_each(|p| p.scheduler.choices.forget(&lost));
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
        let played = decide(pool, state, d, &mut missing);
        let authority =
            |id: &EndpointId| state.known.get(id).map_or_else(|| id.to_string(), |e| e.authority.to_string());
        let recorded: Vec<String> = d.picks.iter().map(authority).collect();
        let replayed: Vec<String> = played.picks.iter().map(|e| e.authority.to_string()).collect();
        let summary = &mut self.summary;
        // The recorded configuration read what it needs, so that only another one can lack an input.
        if self.other.is_some() {
            summary.missing.append(&mut missing);
        }
        summary.prompt_tokens += u64::from(played.prompt_tokens);
        summary.matched_recorded += u64::from(d.matched);
        summary.matched_replayed += u64::from(played.matched);
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
            summary.equal += u64::from(recorded == replayed);
            if recorded != replayed && summary.differences.len() < MAX_DIFFERENCES {
                summary.differences.push(Difference {
                    line,
                    request: d.r,
                    recorded,
                    recorded_reason: d.reason.clone(),
                    replayed,
                    replayed_reason: played.reason,
                });
            }
        }
        // A recorded rejection has no end, so a booking would never be released.
        if let Some(recorded) = d.picks.first() {
            let PlayedDecision { booking, trail, .. } = played;
            let open = OpenRequest { live: d.live, pool: d.pool.clone(), booking, trail, recorded: *recorded };
            self.open.insert(d.r, open);
        }
        Ok(())
    }

    fn end(&mut self, ended: &Ended) {
        let Some(booking) = self.open.remove(&ended.r).and_then(|open| open.booking) else { return };
        let extend = |keys: &mut Vec<_>| match &ended.keys {
            Some(added) => {
                keys.extend(added);
                true
            }
            None => false,
        };
        booking.end(ended.complete, &ended.usage(), extend, ended.at);
    }
}
