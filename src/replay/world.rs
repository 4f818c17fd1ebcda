//! Virtual time: simulated servers, the picker in front of them, and how late it hears of them.
//!
//! One thread, one queue of events, every tie settled by order: equal seeds give equal runs, told by [`Outcome::decisions`]. Called by
//! [`super::run`] and by tests.

mod fleet;
pub(super) mod hearsay;
mod parting;
mod turning;

use super::front::{Front, FrontConfig, Sent};
use super::page::Pages;
use super::queue::{Due, Queue};
use ahash::AHashMap;
use attache_flow::Passage;
use attache_pool::{EndpointSpec, PoolSnapshot};
use attache_prefix::by_endpoint::ByEndpoint;
use attache_prefix::cache::PrefixCache;
use attache_prefix::index::HolderId;
use attache_prefix::residents::{Cache, Resident};
use attache_prefix::trust::{Trust, TrustCell};
use attache_protocol::Usage;
use attache_report::Observer;
use attache_report::served::{Ending, Sample, Served};
use attache_sim::content::mix;
use attache_sim::engine::{Engine, EngineConfig, EngineEvent, FinishReason, JobId, JobReport};
use attache_sim::kv::KvEvent;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_workload::{Request, TraceError, Workload};
pub use fleet::{spec, with_role};
use parting::Parted;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How often the servers are looked at for the report.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// What happens to the fleet in mid-run.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// Another server of this kind joins, and is there for this (see [`attache_pool::role`]).
    Join(Box<EngineConfig>, Option<Arc<str>>),
    /// The server at this position dies: what it was working on is lost.
    Lose(usize),
    /// Its process is a new one: the same, but it comes back with an empty cache.
    Restart(usize),
}

/// A [`Change`] at a moment.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedChange {
    /// When.
    pub at: Timestamp,
    /// What.
    pub change: Change,
}

/// How the picker hears of its servers.
#[derive(Clone, Debug, PartialEq)]
pub struct Hearing {
    /// How often each page of metrics is read.
    pub metrics_every: Duration,
    /// How long a page is on its way.
    pub metrics_delay: Duration,
    /// How many blocks each page says that there are: engines that tell more than they have. The truth when `None`.
    pub blocks_told: Option<u32>,
    /// How long until discovery tells of a server that came or went.
    pub discovery_delay: Duration,
    /// KV events, when the engines publish them.
    pub kv_events: Option<KvHearing>,
}

/// How KV events come.
#[derive(Clone, Debug, PartialEq)]
pub struct KvHearing {
    /// How long a batch is on its way.
    pub delay: Duration,
    /// Part of the batches that get lost, 0..1: the next one shows the gap, and they come with a replay, which takes twice as long again.
    pub loss: f64,
}

/// What is simulated.
#[derive(Debug)]
pub struct WorldConfig {
    /// The picker.
    pub front: FrontConfig,
    /// The servers, with what discovery says of each.
    pub servers: Vec<(EndpointSpec, EngineConfig)>,
    /// How the picker hears of them.
    pub hearing: Hearing,
    /// What happens to them, in the order of time.
    pub changes: Vec<TimedChange>,
    /// Of losses of events; that of the picker is in its configuration.
    pub seed: u64,
}

/// What a run came to, beside what its observer saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Requests decided.
    pub requests: u64,
    /// A hash of all decisions in order: who, and where to.
    pub decisions: u64,
    /// When the last answer ended.
    pub ended: Timestamp,
}

#[derive(Debug)]
struct Server {
    spec: Arc<EndpointSpec>,
    engine: Engine,
    started: Timestamp,
    alive: bool,
    /// In the pool, as far as the picker was told.
    known: Option<EndpointId>,
    pages: Pages,
    /// When its engine is due, as it stands in the queue.
    due: Option<Timestamp>,
    events: Option<Link>,
}

/// The way of one engine's events to the index.
#[derive(Debug)]
struct Link {
    holder: HolderId,
    trust: Arc<TrustCell>,
    /// Lost, to be replayed with the next.
    missed: Vec<KvEvent>,
    /// When the last replay that was asked for is there.
    replayed: Timestamp,
    sequence: u64,
}

#[derive(Debug)]
struct Flying {
    request: Request,
    sent: Sent,
    server: usize,
    first_token: Option<Timestamp>,
    origin: Origin,
}

/// Who computes the prompt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// The server that answers it.
    Own,
    /// The same, as no other one did that was to.
    FellBack,
    /// Another one, whose leg was `job`, and which held so much of it.
    Server {
        server: usize,
        job: JobId,
        cached_tokens: u32,
        /// It keeps the prompt's blocks until they were received.
        pinned: bool,
    },
}

/// One run.
pub struct World<'w> {
    front: Front,
    hearing: Hearing,
    changes: Vec<TimedChange>,
    servers: Vec<Server>,
    /// Positions of the servers that the picker was told of, by what it calls them.
    places: AHashMap<EndpointId, usize>,
    queue: Queue,
    flying: AHashMap<u64, Flying>,
    parted: AHashMap<u64, Parted>,
    workload: &'w mut dyn Workload,
    observer: &'w mut dyn Observer,
    /// The next request that comes by itself.
    coming: Option<Request>,
    /// Requests that follow from others and have not come yet.
    follow_ups: usize,
    /// When those who wait are looked at next, as it stands in the queue for an event of this moment.
    turn: Option<Timestamp>,
    seed: u64,
    outcome: Outcome,
    scratch: Vec<EngineEvent>,
    samples: Vec<Sample>,
}

impl<'w> World<'w> {
    /// A world before its first request.
    pub fn new(config: WorldConfig, workload: &'w mut dyn Workload, observer: &'w mut dyn Observer) -> Self {
        let WorldConfig { front, servers, hearing, changes, seed } = config;
        let mut world = Self {
            front: Front::new(front),
            hearing,
            changes,
            servers: Vec::new(),
            places: AHashMap::new(),
            queue: Queue::default(),
            flying: AHashMap::new(),
            parted: AHashMap::new(),
            workload,
            observer,
            coming: None,
            follow_ups: 0,
            turn: None,
            seed,
            outcome: Outcome { requests: 0, decisions: 0, ended: Timestamp(0) },
            scratch: Vec::new(),
            samples: Vec::new(),
        };
        for (spec, engine) in servers {
            world.join(spec, engine, Timestamp(0));
        }
        world.discover();
        world.scrape(Timestamp(0));
        for i in 0..world.changes.len() {
            let at = world.changes.get(i).map_or(Timestamp(0), |c| c.at);
            world.queue.push(at, Due::Change(i));
        }
        world.queue.push(Timestamp(0).after(SAMPLE_EVERY), Due::Sample);
        world
    }

    /// Plays the workload to its end, and until the last answer has ended.
    ///
    /// # Errors
    /// What is wrong with the workload.
    pub fn run(&mut self) -> Result<Outcome, TraceError> {
        self.coming = self.workload.next()?;
        loop {
            let next = self.queue.next_at();
            match (&self.coming, next) {
                (Some(request), next) if next.is_none_or(|at| at > request.at) => {
                    let Some(request) = self.coming.take() else { break };
                    self.arrive(request);
                    self.coming = self.workload.next()?;
                }
                (None, _) if self.is_over() => break,
                _ => {
                    let Some((at, due)) = self.queue.pop() else { break };
                    self.happen(at, due);
                }
            }
        }
        Ok(self.outcome)
    }

    /// The pool as the picker was told of it last.
    #[must_use]
    pub fn snapshot(&self) -> &PoolSnapshot {
        &self.front.snapshot
    }

    /// The models that were asked for.
    #[must_use]
    pub fn models(&self) -> &BTreeSet<Arc<str>> {
        &self.front.models
    }

    /// What the picker thinks that servers hold.
    #[must_use]
    pub fn cache(&self) -> &PrefixCache {
        &self.front.cache
    }

    fn is_over(&self) -> bool {
        self.flying.is_empty() && self.parted.is_empty() && self.follow_ups == 0 && self.front.is_idle()
    }

    fn happen(&mut self, at: Timestamp, due: Due) {
        match due {
            Due::Engine(i) => self.advance(i, at),
            Due::Arrival(request) => {
                self.follow_ups -= 1;
                self.arrive(*request);
            }
            Due::Scrape => self.scrape(at),
            Due::Page(i, page, restarted) => {
                if let Some(id) = self.servers.get(i).and_then(|s| s.known) {
                    self.front.scraped(id, *page, restarted);
                    // Pages that come at one moment are shown together.
                    if !self.queue.has_page_at(at) {
                        self.front.publish();
                        self.freed(at);
                    }
                }
            }
            Due::Events(i, heard) => self.hear(i, &heard, at),
            Due::Change(i) => self.change(i, at),
            Due::Discovery => {
                self.discover();
                self.freed(at);
            }
            Due::Reply(number, attempt, report) => self.reply(number, attempt, report, at),
            Due::Late(number) => self.late(number, at),
            Due::Release(i, job) => self.release(i, job, at),
            Due::Turn => self.turn(at),
            Due::Sample => {
                self.sample(at);
                self.queue.push(at.after(SAMPLE_EVERY), Due::Sample);
            }
        }
    }

    /// Lets a server do what it has to do up to `now`.
    fn advance(&mut self, i: usize, now: Timestamp) {
        let mut events = std::mem::take(&mut self.scratch);
        if let Some(server) = self.servers.get_mut(i) {
            if server.due.is_some_and(|due| due <= now) {
                server.due = None;
            }
            server.engine.advance(now, &mut events);
        }
        events.drain(..).for_each(|event| self.take(event));
        self.scratch = events;
        self.publish_kv(i);
        self.schedule(i);
    }

    /// Puts a server's engine into the queue, if it is not there for that moment already.
    fn schedule(&mut self, i: usize) {
        let Some(server) = self.servers.get_mut(i) else { return };
        // Steps in which nothing happens are not asked for, unless somebody is told what their blocks hold.
        let next =
            if self.hearing.kv_events.is_some() { server.engine.next_event_at() } else { server.engine.quiet_until() };
        if let Some(at) = next.filter(|at| server.due.is_none_or(|due| *at < due)) {
            server.due = Some(at);
            self.queue.push(at, Due::Engine(i));
        }
    }

    fn take(&mut self, event: EngineEvent) {
        match event {
            EngineEvent::FirstToken { job, at } => {
                if let Some(flying) = self.flying.get_mut(&job.0) {
                    flying.first_token = Some(at);
                    self.front.first_byte(&mut flying.sent, true, at);
                    self.freed(at);
                }
            }
            EngineEvent::Finished { job, at, report } => self.finish(job, at, report),
            EngineEvent::Received { job, at } => self.received(job, at),
            EngineEvent::Token { .. } | EngineEvent::Preempted { .. } => {}
        }
    }

    fn finish(&mut self, job: JobId, at: Timestamp, report: JobReport) {
        if self.finish_leg(job, at, report) {
            return;
        }
        let Some(flying) = self.flying.remove(&job.0) else { return };
        let handover = self.handover(&flying, &report);
        let Flying { request, sent, server, first_token, origin } = flying;
        let ending = if report.reason == FinishReason::Abort { Ending::Lost } else { Ending::Answered };
        let served = Served {
            number: request.number,
            pair: self.workload.pair(request.number),
            at: request.at,
            endpoint: u32::try_from(server).ok(),
            prompt_tokens: report.prompt_tokens,
            foretold_tokens: sent.foretold,
            cached_tokens: match origin {
                Origin::Server { cached_tokens, .. } => cached_tokens,
                Origin::Own | Origin::FellBack => report.cached_tokens,
            },
            generated_tokens: report.generated_tokens,
            first_token: first_token.map(|first| first.since(request.at)),
            total: at.since(request.at),
            preemptions: report.preemptions,
            ending,
            handover,
            fell_back: origin == Origin::FellBack,
        };
        if ending == Ending::Lost {
            self.front.lost(sent, false, at);
        } else {
            let usage = Usage {
                prompt_tokens: Some(report.prompt_tokens.into()),
                completion_tokens: Some(report.generated_tokens.into()),
                cached_tokens: Some(report.cached_tokens.into()),
            };
            self.front.ended(sent, &request, &usage, at);
        }
        self.close(&served, at);
    }

    /// A request has ended, one way or another.
    fn close(&mut self, served: &Served, at: Timestamp) {
        self.freed(at);
        self.outcome.ended = self.outcome.ended.max(at);
        self.observer.served(served);
        if let Some(next) = self.workload.ended(served.number, at) {
            self.follow_ups += 1;
            self.queue.push(next.at.max(at), Due::Arrival(Box::new(next)));
        }
    }

    /// Decides where a request goes that has its turn, and sends it.
    fn decide(&mut self, request: Request, passage: Option<Passage>, now: Timestamp) {
        let mut sent = match self.front.send(&request, &self.base(), now) {
            Ok(sent) => sent,
            Err(_) => {
                self.front.gave_back(passage, &Usage::default(), now);
                return self.refuse(&request, None, now);
            }
        };
        sent.passage = passage;
        self.front.landed(&mut sent);
        // The books know better than what was thought of it on its way how much room is left.
        self.freed(now);
        let id = sent.booking.endpoint().id;
        let decided = mix(request.number ^ u64::from(id.0) << 40);
        self.outcome.decisions = mix(self.outcome.decisions ^ decided);
        match sent.legs.take() {
            None => self.submit(request, sent, Origin::Own, now),
            Some(legs) => {
                let prefill = legs.prefilling.server(0).map_or(0, |server| u64::from(server.id.0));
                self.outcome.decisions = mix(self.outcome.decisions ^ prefill << 20);
                self.part(request, sent, legs, now);
            }
        }
    }

    /// Nobody could take it, or its server would not.
    fn refuse(&mut self, request: &Request, sent: Option<Sent>, now: Timestamp) {
        let place = sent.as_ref().and_then(|s| self.places.get(&s.booking.endpoint().id));
        let endpoint = place.and_then(|i| u32::try_from(*i).ok());
        if let Some(mut sent) = sent {
            self.front.first_byte(&mut sent, false, now);
            self.front.gave_back(sent.passage.take(), &Usage::default(), now);
        }
        self.end_early(request, endpoint, Ending::Refused, now);
    }

    fn end_early(&mut self, request: &Request, endpoint: Option<u32>, ending: Ending, now: Timestamp) {
        let served = Served {
            number: request.number,
            pair: self.workload.pair(request.number),
            at: request.at,
            endpoint,
            prompt_tokens: request.prompt_tokens(),
            foretold_tokens: 0,
            cached_tokens: 0,
            generated_tokens: 0,
            first_token: None,
            total: now.since(request.at),
            preemptions: 0,
            ending,
            handover: None,
            fell_back: false,
        };
        self.close(&served, now);
    }

    /// Reads every server's page; what is read is known after its delay.
    fn scrape(&mut self, now: Timestamp) {
        let delay = self.hearing.metrics_delay;
        for i in 0..self.servers.len() {
            self.advance(i, now);
            let Some(server) = self.servers.get_mut(i).filter(|s| s.alive) else { continue };
            let Some(id) = server.known else { continue };
            let snapshot = &self.front.snapshot;
            let state = snapshot.position(server.spec.address).and_then(|p| snapshot.get(p));
            let in_flight = state.map_or(0, |s| s.endpoint.ledger.in_flight());
            let (mut page, restarted) = server.pages.read(&server.engine, server.started, in_flight, now);
            page.num_blocks = self.hearing.blocks_told.or(page.num_blocks);
            if delay.is_zero() {
                self.front.scraped(id, page, restarted);
            } else {
                self.queue.push(now.after(delay), Due::Page(i, Box::new(page), restarted));
            }
        }
        self.front.publish();
        self.freed(now);
        self.queue.push(now.after(self.hearing.metrics_every), Due::Scrape);
    }

    fn sample(&mut self, at: Timestamp) {
        for i in 0..self.servers.len() {
            self.advance(i, at);
        }
        self.samples.clear();
        self.samples.extend(self.servers.iter().map(|server| {
            let (load, stats) = (server.engine.load(), server.engine.stats());
            Sample {
                running: u32::try_from(load.running).unwrap_or(u32::MAX),
                waiting: u32::try_from(load.waiting).unwrap_or(u32::MAX),
                #[expect(clippy::cast_possible_truncation, reason = "a part of one")]
                kv_usage: load.kv_usage as f32,
                prefix_queries: stats.prefix_queries,
                prefix_hits: stats.prefix_hits,
            }
        }));
        self.observer.sampled(at, &self.samples);
    }

    fn join(&mut self, spec: EndpointSpec, mut engine: EngineConfig, now: Timestamp) {
        engine.every_token = false;
        engine.kv_events = self.hearing.kv_events.is_some();
        self.servers.push(Server {
            spec: spec.into(),
            engine: Engine::new(engine),
            started: now,
            alive: true,
            known: None,
            pages: Pages::default(),
            due: None,
            events: None,
        });
    }

    fn change(&mut self, i: usize, now: Timestamp) {
        let Some(TimedChange { change, .. }) = self.changes.get(i).cloned() else { return };
        match change {
            Change::Join(engine, role) => {
                let spec = with_role(spec(self.servers.len()), role.as_ref());
                self.join(spec, *engine, now);
                self.queue.push(now.after(self.hearing.discovery_delay), Due::Discovery);
            }
            Change::Lose(i) => {
                self.die(i, now);
                if let Some(server) = self.servers.get_mut(i) {
                    server.alive = false;
                }
                self.queue.push(now.after(self.hearing.discovery_delay), Due::Discovery);
            }
            Change::Restart(i) => {
                self.die(i, now);
                self.restart_kv(i, now);
            }
        }
    }

    /// The process of a server ends, and all that it was working on.
    fn die(&mut self, i: usize, now: Timestamp) {
        self.advance(i, now);
        let mut events = Vec::new();
        if let Some(server) = self.servers.get_mut(i) {
            server.engine.restart(now, &mut events);
            server.started = now;
            server.due = None;
        }
        events.into_iter().for_each(|event| self.take(event));
        self.forsake(i, now);
    }

    /// Discovery tells which servers there are.
    fn discover(&mut self) {
        let specs = self.servers.iter().filter(|s| s.alive).map(|s| s.spec.clone()).collect();
        self.front.discover(specs);
        self.places.clear();
        for (i, server) in self.servers.iter_mut().enumerate() {
            let at = self.front.snapshot.position(server.spec.address);
            server.known = at.and_then(|p| self.front.snapshot.get(p)).map(|state| state.endpoint.id);
            self.places.extend(server.known.map(|id| (id, i)));
            match (&server.events, server.known) {
                (None, Some(_)) if self.hearing.kv_events.is_some() => {
                    let trust = Arc::new(TrustCell::default());
                    trust.set(Trust::Exact);
                    let holder = self.front.cache.index().add_holder();
                    server.events =
                        Some(Link { holder, trust, missed: Vec::new(), replayed: Timestamp(0), sequence: 0 });
                }
                (Some(link), None) => {
                    self.front.cache.index().remove_holder(link.holder);
                    server.events = None;
                }
                _ => {}
            }
        }
        let resident = |server: &Server| {
            let link = server.events.as_ref()?;
            let cache = Cache { holder: link.holder, trust: link.trust.clone() };
            Some((server.known?, Resident { caches: [cache].into_iter().collect() }))
        };
        let residents: ByEndpoint<Resident> = self.servers.iter().filter_map(resident).collect();
        self.front.cache.residents().publish(residents);
    }
}
