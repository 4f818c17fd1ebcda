//! Virtual time: simulated servers, the picker in front of them, and the delays of its signals.
//!
//! One thread and one queue of events; ties keep their order. Equal seeds give
//! equal runs, as [`RunOutcome::decisions`] shows.
//!
//! | module | owns |
//! |---|---|
//! | `settings` | configuration of a simulation |
//! | `server` | one server: the engines behind its endpoint |
//! | `fleet` | servers that join and die, discovery, scrapes |
//! | `kv_event_delivery` | KV events on their way to the prefix index |
//! | `encode_legs` | images on their way through encode servers |
//! | `pickers` | the pickers, and the bus between them |
//! | `prefill_legs` | requests whose prompt another server computes |
//! | `queueing` | requests in the queues of flow control |
//!
//! Called by `cli::replay` and by tests.

mod encode_legs;
mod fleet;
pub(super) mod kv_event_delivery;
mod pickers;
mod prefill_legs;
mod queueing;
mod server;
mod settings;

use super::front::{Front, Sent, Waiting};
use super::queue::{EventQueue, ScrapedPage, SimEvent};
use ahash::AHashMap;
use attache_pool::PoolSnapshot;
use attache_prefix::cache::PrefixCache;
use attache_protocol::Usage;
use attache_quota::Had;
use attache_report::Observer;
use attache_report::served::{Ending, Sample, Served};
use attache_sim::content::mix;
use attache_sim::engine::{EngineEvent, FinishReason, JobId, JobReport};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use attache_types::params::ParamError;
use attache_types::program::ProgramTurn;
use attache_workload::{Request, TraceError, Workload};
use encode_legs::PendingEncode;
pub use fleet::{spec, with_role};
pub use pickers::BusTotals;
use pickers::Pickers;
use prefill_legs::{PendingPrefill, PromptOrigin};
use server::WorldServer;
pub use settings::{FleetChange, KvEventSettings, SignalSettings, TimedChange, WorldConfig};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Reason of requests whose server failed before the end of the response.
const SERVER_FAILED: &str = "the server failed";
/// Reason of requests that are longer than their server allows.
pub const TOO_LONG: &str = "prompt and response exceed the server's context";
/// 1 s of virtual time between two samples of the servers' load.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// 7 days: longest virtual time without a request. Scrapes and samples go on meanwhile, so a year takes hours.
const MAX_IDLE: Duration = Duration::from_secs(7 * 86_400);

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
struct InFlight {
    request: Request,
    sent: Sent,
    server: usize,
    first_token: Option<Timestamp>,
    origin: PromptOrigin,
}

/// One simulation of a workload.
pub struct World<'w> {
    pickers: Pickers,
    /// Time of the next exchange between pickers for which an event is scheduled.
    exchange_at: Option<Timestamp>,
    signals: SignalSettings,
    changes: Vec<TimedChange>,
    /// Engines behind the endpoint of each server.
    ranks: u16,
    servers: Vec<WorldServer>,
    /// Positions of the servers in the last snapshot, by endpoint id.
    places: AHashMap<EndpointId, usize>,
    queue: EventQueue,
    flying: AHashMap<u64, InFlight>,
    encodes: AHashMap<u64, PendingEncode>,
    prefills: AHashMap<u64, PendingPrefill>,
    workload: &'w mut dyn Workload,
    observer: &'w mut dyn Observer,
    /// The next request of the open loop.
    coming: Option<Request>,
    /// Number of follow-up requests that have not arrived yet.
    follow_ups: usize,
    /// A request that comes too late to be simulated.
    too_late: Option<TraceError>,
    /// Requests in the queues of flow control.
    waiting: AHashMap<u64, Waiting>,
    /// Time of the next check of the queues for which an event is scheduled.
    check: Option<Timestamp>,
    seed: u64,
    outcome: RunOutcome,
    scratch: Vec<EngineEvent>,
    samples: Vec<Sample>,
}

/// The error about a request that comes more than [`MAX_IDLE`] after the one before it, which came at `before`.
fn too_late(request: &Request, before: Timestamp) -> Option<TraceError> {
    let gap = request.at.since(before);
    let days = |time: Duration| time.as_secs_f64() / 86_400.0;
    (gap > MAX_IDLE).then(|| {
        TraceError::Format(format!(
            "request {} comes {:.1} days after the one before it, at most {} are simulated; split the trace, replay it \
             faster or set a time limit",
            request.number,
            days(gap),
            days(MAX_IDLE)
        ))
    })
}

impl<'w> World<'w> {
    /// A simulation before its first request.
    ///
    /// # Errors
    /// The plugin of `flowControl.ceiling` rejects its parameters.
    pub fn new(
        config: WorldConfig,
        workload: &'w mut dyn Workload,
        observer: &'w mut dyn Observer,
    ) -> Result<Self, ParamError> {
        let WorldConfig { mut pickers, bus, servers, ranks, signals, changes, seed } = config;
        let ranks_tell = ranks > 1 && signals.kv_events.is_some();
        pickers.iter_mut().for_each(|picker| picker.prefix.ranks_tell = ranks_tell);
        let mut world = Self {
            pickers: Pickers::new(pickers, bus)?,
            exchange_at: None,
            signals,
            changes,
            ranks,
            servers: Vec::new(),
            places: AHashMap::new(),
            queue: EventQueue::default(),
            flying: AHashMap::new(),
            encodes: AHashMap::new(),
            prefills: AHashMap::new(),
            workload,
            observer,
            coming: None,
            follow_ups: 0,
            too_late: None,
            waiting: AHashMap::new(),
            check: None,
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
        Ok(world)
    }

    /// Plays the workload to its end, until the last response has ended.
    ///
    /// # Errors
    /// When a row of the workload can't be read, or a request comes more than [`MAX_IDLE`] after the one before.
    pub fn run(&mut self) -> Result<RunOutcome, TraceError> {
        self.pull(Timestamp(0))?;
        while self.step()? {}
        Ok(self.outcome)
    }

    /// Handles the next arrival or event. Returns false at the end of the run.
    fn step(&mut self) -> Result<bool, TraceError> {
        if self.coming.is_none() && self.is_over() {
            return Ok(false);
        }
        let next = self.queue.next_at();
        if let Some(request) = self.coming.take_if(|request| next.is_none_or(|at| at > request.at)) {
            let at = request.at;
            self.arrive(request);
            self.pull(at)?;
            return Ok(true);
        }
        let Some((at, due)) = self.queue.pop() else { return Ok(false) };
        self.happen(at, due);
        self.too_late.take().map_or(Ok(true), Err)
    }

    /// Reads the next request of the open loop; the one before it came at `before`.
    fn pull(&mut self, before: Timestamp) -> Result<(), TraceError> {
        self.coming = self.workload.next()?;
        self.coming.as_ref().and_then(|request| too_late(request, before)).map_or(Ok(()), Err)
    }

    /// The last snapshot that the first picker received.
    #[must_use]
    pub fn snapshot(&self) -> &PoolSnapshot {
        &self.pickers.first().snapshot
    }

    /// Models of the requests so far.
    #[must_use]
    pub fn models(&self) -> BTreeSet<Arc<str>> {
        self.pickers.iter().flat_map(|picker| picker.models.iter().cloned()).collect()
    }

    /// The prefix cache of the first picker.
    #[must_use]
    pub fn cache(&self) -> &PrefixCache {
        &self.pickers.first().cache
    }

    /// Messages between pickers so far.
    #[must_use]
    pub fn bus(&self) -> BusTotals {
        self.pickers.totals()
    }

    fn is_over(&self) -> bool {
        let in_flight = self.flying.len() + self.encodes.len() + self.prefills.len();
        in_flight == 0 && self.follow_ups == 0 && self.waiting.is_empty()
    }

    fn happen(&mut self, at: Timestamp, due: SimEvent) {
        self.pickers.iter().for_each(|picker| picker.set_time(at));
        match due {
            SimEvent::Engine(i) => self.advance(i, at),
            SimEvent::Arrival(request) => {
                self.follow_ups -= 1;
                self.arrive(*request);
            }
            SimEvent::Scrape => self.scrape(at),
            SimEvent::Page(i, page) => {
                if let Some(id) = self.servers.get(i).and_then(|s| s.known) {
                    let ScrapedPage { picker, metrics, restarted } = *page;
                    if let Some(picker) = self.pickers.get_mut(picker) {
                        picker.scraped(id, metrics, restarted);
                    }
                    // Metrics that arrive at the same time become one snapshot.
                    if !self.queue.has_page_at(at) {
                        self.pickers.iter_mut().for_each(Front::publish);
                        self.freed(at);
                    }
                }
            }
            SimEvent::Events(i, rank, heard) => self.hear(i, rank, &heard, at),
            SimEvent::Change(i) => self.change(i, at),
            SimEvent::Discovery => {
                self.discover();
                self.freed(at);
            }
            SimEvent::Reply(number, attempt, report) => self.reply(number, attempt, report, at),
            SimEvent::Encoded(number) => self.encoded(number, at),
            SimEvent::Late(number) => self.late(number, at),
            SimEvent::Release(i, job) => self.release(i, job, at),
            // The exchange follows each event.
            SimEvent::Exchange => {}
            SimEvent::CheckQueues => self.check_queues(at),
            SimEvent::Expire(number) => self.expire(number, at),
            SimEvent::Sample => {
                self.sample(at);
                self.queue.push(at.after(SAMPLE_EVERY), SimEvent::Sample);
            }
        }
        self.settle_queues(at);
        self.exchange(at);
    }

    /// Has the pickers exchange messages, and schedules the next exchange.
    fn exchange(&mut self, now: Timestamp) {
        let Some(next) = self.pickers.exchange(now) else { return };
        if self.exchange_at.is_none_or(|at| at <= now || next < at) {
            self.exchange_at = Some(next);
            self.queue.push(next, SimEvent::Exchange);
        }
    }

    /// Runs the engine of a server up to `now` and handles its events.
    fn advance(&mut self, i: usize, now: Timestamp) {
        let mut events = std::mem::take(&mut self.scratch);
        if let Some(server) = self.servers.get_mut(i) {
            server.advance(now, &mut events);
        }
        events.drain(..).for_each(|event| self.take(event));
        self.scratch = events;
        self.publish_kv(i);
        self.schedule(i);
    }

    /// Schedules the next event of a server's engine, unless it is scheduled already.
    fn schedule(&mut self, i: usize) {
        let Some(server) = self.servers.get_mut(i) else { return };
        // KV events need the contents of the blocks of each step.
        let next = server.next_event_at(self.signals.kv_events.is_some());
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
                    self.pickers.of(job.0).first_byte(&mut flying.sent, true, at);
                }
            }
            EngineEvent::Finished { job, at, report } => self.finish(job, at, report),
            EngineEvent::Received { job, at } => self.received(job, at),
            EngineEvent::Token { job, at } => {
                if let Some(flying) = self.flying.get_mut(&job.0) {
                    flying.sent.token(at);
                }
            }
            EngineEvent::Preempted { .. } => {}
        }
    }

    fn finish(&mut self, job: JobId, at: Timestamp, report: JobReport) {
        if self.finish_leg(job, at, report) || self.finish_image(job, at, report.reason) {
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
            expected_cached_tokens: sent.foretold,
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
            turn: request.turn,
            alone: request.turn.map(|turn| self.alone(&request, turn)),
        };
        if ending == Ending::Lost {
            self.observer.failed(request.number, SERVER_FAILED);
            self.pickers.of_mut(request.number).lost(sent, false, at);
        } else {
            let usage = Usage {
                prompt_tokens: Some(report.prompt_tokens.into()),
                completion_tokens: Some(report.generated_tokens.into()),
                cached_tokens: Some(report.cached_tokens.into()),
            };
            self.pickers.of_mut(request.number).ended(sent, &request, &usage, at);
        }
        self.close(&served, at);
    }

    /// Reports a request that has ended and schedules its follow-up requests.
    fn close(&mut self, served: &Served, at: Timestamp) {
        self.outcome.ended = self.outcome.ended.max(at);
        self.observer.served(served);
        for next in self.workload.ended(served.number, at) {
            self.too_late = self.too_late.take().or_else(|| too_late(&next, at));
            self.follow_ups += 1;
            self.queue.push(next.at.max(at), SimEvent::Arrival(Box::new(next)));
        }
    }

    /// Sends a request that is decided and booked.
    fn send(&mut self, request: Request, sent: Sent, now: Timestamp) {
        let mut note = |decided: u64| self.outcome.decisions = mix(self.outcome.decisions ^ decided);
        let id = sent.endpoint().map_or(0, |endpoint| endpoint.id.0);
        note(mix(request.number ^ u64::from(id) << 40));
        if let Some(legs) = &sent.legs {
            note(legs.prefilling.server(0).map_or(0, |server| u64::from(server.id.0)) << 20);
        }
        sent.plan.decision.encode.iter().for_each(|encoder| note(u64::from(encoder.id.0) << 10));
        let number = request.number;
        self.encode(request, sent, now);
        if self.pickers.first().queues().is_some() {
            self.wake(number, now);
        }
    }

    /// Has the prompt of a request computed, by its prefill server or its own.
    fn compute(&mut self, request: Request, mut sent: Sent, now: Timestamp) {
        match sent.legs.take() {
            None => self.submit(request, sent, PromptOrigin::Own, now),
            Some(legs) => self.part(request, sent, legs, now),
        }
    }

    /// No endpoint was available, or the server rejected the request. `reason` is a code of the picker, or says what a
    /// server did.
    fn refuse(&mut self, request: &Request, sent: Option<Sent>, reason: &str, now: Timestamp) {
        let place = sent.as_ref().and_then(Sent::endpoint).and_then(|endpoint| self.places.get(&endpoint.id));
        let endpoint = place.and_then(|i| u32::try_from(*i).ok());
        if let Some(mut sent) = sent {
            let picker = self.pickers.of_mut(request.number);
            picker.first_byte(&mut sent, false, now);
            picker.cut(sent, Had::Nothing, now);
        }
        self.end_early(request, endpoint, (Ending::Refused, reason), now);
    }

    /// Reports a request that ends without a response, and why.
    fn end_early(
        &mut self,
        request: &Request,
        endpoint: Option<u32>,
        (ending, reason): (Ending, &str),
        now: Timestamp,
    ) {
        self.observer.failed(request.number, reason);
        let served = Served {
            number: request.number,
            pair: self.workload.pair(request.number),
            at: request.at,
            endpoint,
            prompt_tokens: request.prompt_tokens(),
            expected_cached_tokens: 0,
            cached_tokens: 0,
            generated_tokens: 0,
            first_token: None,
            total: now.since(request.at),
            preemptions: 0,
            ending,
            handover: None,
            fell_back: false,
            turn: request.turn,
            alone: None,
        };
        self.close(&served, now);
    }

    /// Duration of a request if its program has the first server for itself, and the cache keeps all of its prompts.
    fn alone(&self, request: &Request, turn: ProgramTurn) -> Duration {
        let engine = self.servers.first().map(|server| &server.config);
        let known = turn.known_tokens;
        engine.map_or(Duration::ZERO, |engine| engine.alone(request.prompt_tokens(), known, request.answer.tokens))
    }
}

#[cfg(test)]
mod tests;
