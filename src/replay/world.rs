//! Virtual time: simulated servers, the picker in front of them, and the delays of its signals.
//!
//! One thread and one queue of events; ties keep their order. Equal seeds give
//! equal runs, as [`RunOutcome::decisions`] shows.
//!
//! | module | owns |
//! |---|---|
//! | `settings` | configuration of a simulation |
//! | `fleet` | servers that join and die, discovery, scrapes |
//! | `kv_event_delivery` | KV events on their way to the prefix index |
//! | `prefill_legs` | requests whose prompt another server computes |
//! | `queueing` | requests in the queues of flow control |
//!
//! Called by `cli::replay` and by tests.

mod fleet;
pub(super) mod kv_event_delivery;
mod prefill_legs;
mod queueing;
mod settings;

use super::front::{Front, Sent};
use super::page::MetricsHistory;
use super::queue::{EventQueue, SimEvent};
use ahash::AHashMap;
use attache_flow::Passage;
use attache_pool::{EndpointSpec, PoolSnapshot};
use attache_prefix::cache::PrefixCache;
use attache_prefix::index::HolderId;
use attache_prefix::trust::TrustCell;
use attache_protocol::Usage;
use attache_report::Observer;
use attache_report::served::{Ending, Sample, Served};
use attache_sim::content::mix;
use attache_sim::engine::{Engine, EngineEvent, FinishReason, JobId, JobReport};
use attache_sim::kv::KvEvent;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_workload::{Request, TraceError, Workload};
pub use fleet::{spec, with_role};
use prefill_legs::PendingPrefill;
pub use settings::{FleetChange, KvEventSettings, SignalSettings, TimedChange, WorldConfig};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// 1 s of virtual time between two samples of the servers' load.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// Totals of a run, beside what its observer received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunOutcome {
    /// Requests for which an endpoint was chosen.
    pub requests: u64,
    /// Hash of all decisions in their order: request and endpoints.
    pub decisions: u64,
    /// End of the last response.
    pub ended: Timestamp,
}

#[derive(Debug)]
struct WorldServer {
    spec: Arc<EndpointSpec>,
    engine: Engine,
    started: Timestamp,
    alive: bool,
    /// Id in the last snapshot; `None` while the picker does not know the server.
    known: Option<EndpointId>,
    pages: MetricsHistory,
    /// Time of the engine's event that is in the queue, if any.
    due: Option<Timestamp>,
    events: Option<KvEventLink>,
}

/// The path of one engine's KV events to the prefix index.
#[derive(Debug)]
struct KvEventLink {
    holder: HolderId,
    trust: Arc<TrustCell>,
    /// Events of lost batches, which the next replay brings.
    missed: Vec<KvEvent>,
    /// Arrival of the last replay that was requested.
    replayed: Timestamp,
    sequence: u64,
}

#[derive(Debug)]
struct InFlight {
    request: Request,
    sent: Sent,
    server: usize,
    first_token: Option<Timestamp>,
    origin: PromptOrigin,
}

/// The server that computes the prompt of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PromptOrigin {
    /// The server that decodes it.
    Own,
    /// The server that decodes it, since prefill on another server failed.
    FellBack,
    /// Another server. `job` is its prefill leg, and `cached_tokens` of the prompt were cached there.
    Server {
        server: usize,
        job: JobId,
        cached_tokens: u32,
        /// The server keeps the prompt's blocks; false after the transfer.
        pinned: bool,
    },
}

/// One simulation of a workload.
pub struct World<'w> {
    front: Front,
    signals: SignalSettings,
    changes: Vec<TimedChange>,
    servers: Vec<WorldServer>,
    /// Positions of the servers in the last snapshot, by endpoint id.
    places: AHashMap<EndpointId, usize>,
    queue: EventQueue,
    flying: AHashMap<u64, InFlight>,
    prefills: AHashMap<u64, PendingPrefill>,
    workload: &'w mut dyn Workload,
    observer: &'w mut dyn Observer,
    /// The next request of the open loop.
    coming: Option<Request>,
    /// Number of follow-up requests that have not arrived yet.
    follow_ups: usize,
    /// Time of the next check of the queues for which an event is scheduled.
    turn: Option<Timestamp>,
    seed: u64,
    outcome: RunOutcome,
    scratch: Vec<EngineEvent>,
    samples: Vec<Sample>,
}

impl<'w> World<'w> {
    /// A simulation before its first request.
    pub fn new(config: WorldConfig, workload: &'w mut dyn Workload, observer: &'w mut dyn Observer) -> Self {
        let WorldConfig { front, servers, signals, changes, seed } = config;
        let mut world = Self {
            front: Front::new(front),
            signals,
            changes,
            servers: Vec::new(),
            places: AHashMap::new(),
            queue: EventQueue::default(),
            flying: AHashMap::new(),
            prefills: AHashMap::new(),
            workload,
            observer,
            coming: None,
            follow_ups: 0,
            turn: None,
            seed,
            outcome: RunOutcome { requests: 0, decisions: 0, ended: Timestamp(0) },
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
            world.queue.push(at, SimEvent::Change(i));
        }
        world.queue.push(Timestamp(0).after(SAMPLE_EVERY), SimEvent::Sample);
        world
    }

    /// Plays the workload to its end, until the last response has ended.
    ///
    /// # Errors
    /// When a row of the workload can't be read.
    pub fn run(&mut self) -> Result<RunOutcome, TraceError> {
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

    /// The last snapshot that the picker received.
    #[must_use]
    pub fn snapshot(&self) -> &PoolSnapshot {
        &self.front.snapshot
    }

    /// Models of the requests so far.
    #[must_use]
    pub fn models(&self) -> &BTreeSet<Arc<str>> {
        &self.front.models
    }

    /// The prefix cache of the picker.
    #[must_use]
    pub fn cache(&self) -> &PrefixCache {
        &self.front.cache
    }

    fn is_over(&self) -> bool {
        self.flying.is_empty() && self.prefills.is_empty() && self.follow_ups == 0 && self.front.is_idle()
    }

    fn happen(&mut self, at: Timestamp, due: SimEvent) {
        match due {
            SimEvent::Engine(i) => self.advance(i, at),
            SimEvent::Arrival(request) => {
                self.follow_ups -= 1;
                self.arrive(*request);
            }
            SimEvent::Scrape => self.scrape(at),
            SimEvent::Page(i, page, restarted) => {
                if let Some(id) = self.servers.get(i).and_then(|s| s.known) {
                    self.front.scraped(id, *page, restarted);
                    // Metrics that arrive at the same time become one snapshot.
                    if !self.queue.has_page_at(at) {
                        self.front.publish();
                        self.freed(at);
                    }
                }
            }
            SimEvent::Events(i, heard) => self.hear(i, &heard, at),
            SimEvent::Change(i) => self.change(i, at),
            SimEvent::Discovery => {
                self.discover();
                self.freed(at);
            }
            SimEvent::Reply(number, attempt, report) => self.reply(number, attempt, report, at),
            SimEvent::Late(number) => self.late(number, at),
            SimEvent::Release(i, job) => self.release(i, job, at),
            SimEvent::Turn => self.turn(at),
            SimEvent::Sample => {
                self.sample(at);
                self.queue.push(at.after(SAMPLE_EVERY), SimEvent::Sample);
            }
        }
    }

    /// Runs the engine of a server up to `now` and handles its events.
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

    /// Schedules the next event of a server's engine, unless it is scheduled already.
    fn schedule(&mut self, i: usize) {
        let Some(server) = self.servers.get_mut(i) else { return };
        // Steps without events are skipped, unless KV events need the contents of their blocks.
        let next =
            if self.signals.kv_events.is_some() { server.engine.next_event_at() } else { server.engine.quiet_until() };
        if let Some(at) = next.filter(|at| server.due.is_none_or(|due| *at < due)) {
            server.due = Some(at);
            self.queue.push(at, SimEvent::Engine(i));
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
        let InFlight { request, sent, server, first_token, origin } = flying;
        let ending = if report.reason == FinishReason::Abort { Ending::Lost } else { Ending::Answered };
        let served = Served {
            number: request.number,
            pair: self.workload.pair(request.number),
            at: request.at,
            endpoint: u32::try_from(server).ok(),
            prompt_tokens: report.prompt_tokens,
            foretold_tokens: sent.foretold,
            cached_tokens: match origin {
                PromptOrigin::Server { cached_tokens, .. } => cached_tokens,
                PromptOrigin::Own | PromptOrigin::FellBack => report.cached_tokens,
            },
            generated_tokens: report.generated_tokens,
            first_token: first_token.map(|first| first.since(request.at)),
            total: at.since(request.at),
            preemptions: report.preemptions,
            ending,
            handover,
            fell_back: origin == PromptOrigin::FellBack,
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

    /// Reports a request that has ended and schedules its follow-up request.
    fn close(&mut self, served: &Served, at: Timestamp) {
        self.front.quotas.settle(served, at);
        self.freed(at);
        self.outcome.ended = self.outcome.ended.max(at);
        self.observer.served(served);
        if let Some(next) = self.workload.ended(served.number, at) {
            self.follow_ups += 1;
            self.queue.push(next.at.max(at), SimEvent::Arrival(Box::new(next)));
        }
    }

    /// Decides on a request that left its queue, and sends it.
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
        // The ledger has the exact load now; before, the queue used the estimate of the request.
        self.freed(now);
        let id = sent.booking.endpoint().id;
        let decided = mix(request.number ^ u64::from(id.0) << 40);
        self.outcome.decisions = mix(self.outcome.decisions ^ decided);
        match sent.legs.take() {
            None => self.submit(request, sent, PromptOrigin::Own, now),
            Some(legs) => {
                let prefill = legs.prefilling.server(0).map_or(0, |server| u64::from(server.id.0));
                self.outcome.decisions = mix(self.outcome.decisions ^ prefill << 20);
                self.part(request, sent, legs, now);
            }
        }
    }

    /// No endpoint was available, or the server rejected the request.
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
}
