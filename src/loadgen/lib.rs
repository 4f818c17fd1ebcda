//! Load generator: sends a workload to a real gateway in real time and measures what its clients see.
//!
//! # What is here
//!
//! | module | owns | pure |
//! |---|---|---|
//! | this one | when requests are sent, follow-up requests, counts of the run | no |
//! | `exchange` | one request: sent, response read, times measured | no |
//! | `gateway` | HTTP client, URL, headers, model name | no |
//! | `text` | request bodies: prompts as text, made from the names of their pieces | yes |
//! | `settings` | settings, totals and errors of a run | yes |
//! | `memory` | responses, for the turns that quote them | yes |
//! | `events` | tokens and times of an event stream | yes |
//!
//! **Called by** `cli::replay` for `--target`, and by tests.
//! **Must not** use `picker` or `scheduling`: a gateway is measured from outside.
//!
//! Read first: `lib.rs`, `exchange.rs`, `gateway.rs`.
//!
//! # What is measured, and from when
//!
//! Requests of an open loop are sent at their own times, whether or not earlier ones have ended. Those of a closed loop
//! are sent when the workload schedules them after a response. All durations count from the time at which a request was
//! due, not from the time at which it was sent. A load generator that is late, or waits for a slot under
//! `max_in_flight`, would otherwise hide latency that clients see. [`LiveOutcome`] reports how late requests were sent,
//! which includes the time for writing a prompt's text.
//!
//! The first token is the first event with content, including reasoning and tool calls. Without streaming there is
//! none. Token counts are those of the server (`usage`), else those of the workload's prompt and one token per event.
//! Cached tokens are the server's `prompt_tokens_details.cached_tokens`; vLLM reports them only with
//! `--enable-prompt-tokens-details`. The picker's predictions and the engine's preemptions are not visible to a client:
//! `expected_cached_tokens` and `preemptions` are 0.
//!
//! # What is sent beside the body
//!
//! * the headers of [`attache_workload::client_headers`]: session, user and, where its header is named, tenant;
//! * the session headers of the last response, under the names of AIBrix and llm-d;
//! * the objective of its priority, in the header of Gateway API inference gateways, where one is named.

mod events;
mod exchange;
mod gateway;
mod memory;
mod settings;
mod text;

use attache_report::Observer;
use attache_report::served::Ending;
use attache_types::clock::{Clock, Timestamp};
use attache_workload::{Request, TraceError, Workload};
use exchange::{Done, exchange};
use gateway::Gateway;
use memory::ResponseMemory;
use reqwest::header::{HeaderName, HeaderValue};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

pub use settings::{
    DEFAULT_GRACE, DEFAULT_MAX_IN_FLIGHT, DEFAULT_MAX_REMEMBERED_BYTES, DEFAULT_SERVED_HEADERS, DEFAULT_TIMEOUT,
    LATE_AFTER, LiveApi, LiveConfig, LiveError, LiveOutcome,
};

/// Servers with counts of their own. Further servers are counted as unknown.
const MAX_ENDPOINTS: usize = 4_096;
/// Reasons of failure with counts of their own.
const MAX_REASONS: usize = 64;
/// Name under which all further reasons are counted.
const OTHER_REASONS: &str = "other reasons";

/// Sends `workload` to the gateway and reports each request to `observer` when it ends, in the order of the ends.
/// Servers are not sampled: `Observer::sampled` is never called. When `stop` is cancelled, no further request is
/// sent, requests in flight get `config.grace` to end, and what was measured is returned. Must be called in a tokio
/// runtime with time and I/O.
///
/// # Errors
/// See [`LiveError`]. A failed request is an outcome, not an error.
pub async fn play(
    config: &LiveConfig,
    workload: &mut dyn Workload,
    observer: &mut dyn Observer,
    stop: &CancellationToken,
) -> Result<LiveOutcome, LiveError> {
    if config.max_in_flight == 0 {
        return Err(LiveError::Setting("max_in_flight is 0; at least 1 is allowed".to_owned()));
    }
    let Some(gateway) = stop.run_until_cancelled(Gateway::open(config, Clock::start())).await else {
        return Ok(LiveOutcome { stopped: true, ..LiveOutcome::default() });
    };
    let gateway = Arc::new(gateway?);
    let outcome = LiveOutcome { model: gateway.model.clone(), ..LiveOutcome::default() };
    let player = LoadPlayer {
        config,
        gateway,
        workload,
        observer,
        coming: None,
        read_ahead: true,
        follow_ups: BTreeMap::new(),
        flying: JoinSet::new(),
        full_until: Timestamp(0),
        memory: ResponseMemory::new(config.max_remembered_bytes),
        places: HashMap::new(),
        echoes: HashMap::new(),
        failed: None,
        outcome,
    };
    player.run(stop).await
}

/// State of one run: requests due, in flight and remembered.
struct LoadPlayer<'p> {
    config: &'p LiveConfig,
    gateway: Arc<Gateway>,
    workload: &'p mut dyn Workload,
    observer: &'p mut dyn Observer,
    /// The next request that comes by itself.
    coming: Option<Request>,
    /// There may be more of those.
    read_ahead: bool,
    /// Requests that follow from answers, by the moment when they are due and their number.
    follow_ups: BTreeMap<(Timestamp, u64), Request>,
    flying: JoinSet<Done>,
    /// Until this moment a request that was due found no place.
    full_until: Timestamp,
    memory: ResponseMemory,
    /// Positions of servers by their names.
    places: HashMap<String, u32>,
    /// Session headers of the last response of each session.
    echoes: HashMap<u64, Vec<(HeaderName, HeaderValue)>>,
    failed: Option<TraceError>,
    outcome: LiveOutcome,
}

impl LoadPlayer<'_> {
    async fn run(mut self, stop: &CancellationToken) -> Result<LiveOutcome, LiveError> {
        let mut cut_at: Option<Instant> = None;
        loop {
            let is_stopped = self.outcome.stopped;
            let next = if is_stopped { None } else { self.next_due() };
            if self.flying.is_empty() && next.is_none() {
                // Workloads that could not read on when an answer ended say so now.
                self.read_ahead = !is_stopped;
                if self.next_due().is_none() || is_stopped {
                    break;
                }
                continue;
            }
            let has_place = self.flying.len() < self.config.max_in_flight;
            tokio::select! {
                biased;
                () = stop.cancelled(), if !is_stopped => {
                    self.outcome.stopped = true;
                    cut_at = Instant::now().checked_add(self.config.grace);
                }
                () = until(next.map(|at| self.gateway.instant(at))), if has_place && next.is_some() => self.send(),
                Some(done) = self.flying.join_next(), if !self.flying.is_empty() => self.ended(done.ok(), is_stopped),
                () = until(cut_at), if is_stopped => break,
            }
        }
        self.outcome.cut = self.flying.len() as u64;
        self.flying.shutdown().await;
        self.outcome.elapsed = self.gateway.now().since(Timestamp(0));
        self.outcome.forgotten = self.memory.forgotten();
        match self.failed {
            Some(error) => Err(error.into()),
            None => Ok(self.outcome),
        }
    }

    /// When the next request is due, if one is known that may be sent.
    fn next_due(&mut self) -> Option<Timestamp> {
        if self.failed.is_none() && self.coming.is_none() && self.read_ahead {
            match self.workload.next() {
                Ok(request) => self.coming = request,
                Err(error) => self.failed = Some(error),
            }
            self.read_ahead = self.coming.is_some();
        }
        if self.failed.is_some() {
            return None;
        }
        let coming = self.coming.as_ref().map(|request| request.at);
        let follow_up = self.follow_ups.first_key_value().map(|((at, _), _)| *at);
        [coming, follow_up].into_iter().flatten().min()
    }

    /// Sends the request that is due next.
    fn send(&mut self) {
        let coming = self.coming.as_ref().map(|request| (request.at, request.number));
        let follow_up = self.follow_ups.first_key_value().map(|(key, _)| *key);
        let by_itself = match (coming, follow_up) {
            (Some(coming), Some(follow_up)) => coming < follow_up,
            (coming, _) => coming.is_some(),
        };
        let request = match by_itself {
            true => self.coming.take(),
            false => self.follow_ups.pop_first().map(|(_, request)| request),
        };
        let Some(request) = request else { return };
        self.read_ahead |= by_itself;
        let quotes = request.prompt.iter().map(|part| self.memory.quote(part.piece)).collect();
        self.outcome.sent += 1;
        let is_told = request.priority == 0 || self.config.objectives.contains_key(&request.priority);
        self.outcome.unranked += u64::from(!is_told);
        self.outcome.held += u64::from(request.at < self.full_until);
        let echo = request.session.and_then(|session| self.echoes.get(&session)).map_or(&[][..], Vec::as_slice);
        let headers = self.gateway.headers_of(&request, echo);
        self.flying.spawn(exchange(self.gateway.clone(), request, headers, quotes));
        self.outcome.most_in_flight = self.outcome.most_in_flight.max(self.flying.len());
    }

    /// Counts a request that has ended, and asks what follows from that. `None` is one whose task broke.
    fn ended(&mut self, done: Option<Done>, is_stopped: bool) {
        let now = self.gateway.now();
        if self.flying.len() + 1 >= self.config.max_in_flight && self.next_due().is_some_and(|due| due < now) {
            self.full_until = now;
        }
        let Some(Done { mut served, place, echo, failure, late, request, said }) = done else {
            self.outcome.lost += 1;
            self.count("the client failed".to_owned());
            return;
        };
        served.endpoint = place.and_then(|place| self.position(place));
        served.pair = self.workload.pair(request.number);
        if let Some(session) = request.session.filter(|_| !echo.is_empty()) {
            self.echoes.insert(session, echo);
        }
        match served.ending {
            Ending::Answered => self.outcome.answered += 1,
            Ending::Refused => self.outcome.refused += 1,
            Ending::Lost => self.outcome.lost += 1,
        }
        if let Some(reason) = failure {
            self.observer.failed(request.number, &reason);
            self.count(reason);
        }
        self.outcome.late += u64::from(late > LATE_AFTER);
        self.outcome.latest = self.outcome.latest.max(late);
        if let Some(said) = said {
            self.memory.said(request.answer, &said);
        }
        self.observer.served(&served);
        if !is_stopped && self.failed.is_none() {
            let now = served.at.after(served.total);
            let next = self.workload.ended(request.number, now);
            self.follow_ups.extend(next.into_iter().map(|next| ((next.at, next.number), next)));
        }
    }

    fn position(&mut self, place: String) -> Option<u32> {
        if let Some(position) = self.places.get(&place) {
            return Some(*position);
        }
        let position = u32::try_from(self.places.len()).ok().filter(|_| self.places.len() < MAX_ENDPOINTS)?;
        self.observer.named(position, &place);
        self.outcome.endpoints.push(place.clone());
        self.places.insert(place, position);
        Some(position)
    }

    fn count(&mut self, reason: String) {
        let is_known = self.outcome.failures.contains_key(&reason);
        let reason =
            if is_known || self.outcome.failures.len() < MAX_REASONS { reason } else { OTHER_REASONS.to_owned() };
        *self.outcome.failures.entry(reason).or_default() += 1;
    }
}

/// Waits for a moment; for ever when there is none.
async fn until(moment: Option<Instant>) {
    match moment {
        Some(moment) => tokio::time::sleep_until(moment).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
