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
//! | `memory` | responses, for the turns that quote them | yes |
//! | `events` | tokens and times of an event stream | yes |
//!
//! **Called by** `cli::replay` for `--target`, and by tests.
//! **Must not** use the picker's crates: a gateway is measured from outside.
//!
//! Read first: `lib.rs`, `exchange.rs`, `gateway.rs`.
//!
//! # What is measured, and from when
//!
//! Requests of an open loop are sent at their own times, whether or not earlier ones were answered; those of a closed loop when the
//! workload says after an answer. All durations count from the moment at which a request was due, not from the one at which it was sent: a
//! load generator that falls behind, or waits for a place under `max_in_flight`, must not make the gateway look faster than its clients
//! see it. How late sending was is told in [`LiveOutcome`]; the making of a prompt's text is part of that.
//!
//! The first token is the first event that says anything, reasoning and tool calls included; without streaming there is none. Token
//! counts are the server's own (`usage`), else the workload's prompt and one token an event. Whether a server had a prompt in its cache is
//! what it says in `prompt_tokens_details.cached_tokens`; vLLM does so only with `--enable-prompt-tokens-details`. What the picker
//! foretold and what preempted a request can't be seen from here: `foretold_tokens` and `preemptions` are 0.
//!
//! # What is sent beside the body
//!
//! The headers that the virtual world's clients send ([`attache_workload::client_headers`]): session, user and, where its name is given,
//! tenant; what the last answer told the session, in the names that AIBrix and llm-d have for that; and the objective that stands for its
//! priority, in the header of Gateway API inference gateways, where one is named.

mod events;
mod exchange;
mod gateway;
mod memory;
mod text;

use attache_report::Observer;
use attache_report::served::Ending;
use attache_types::clock::{Clock, Timestamp};
use attache_workload::{Request, TraceError, Workload};
use exchange::{Done, exchange};
use gateway::Gateway;
use memory::Memory;
use reqwest::header::{HeaderName, HeaderValue};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// 1,024 requests under way: what Envoy's own limits let through unless they are raised, and what most systems let a process open.
pub const DEFAULT_MAX_IN_FLIGHT: usize = 1_024;
/// 300 s for one request: longer than the longest answers of the traces take on a loaded pool.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);
/// 30 s for what is under way when a run is stopped: most answers end within it, and nobody waits at a terminal for longer.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(30);
/// 64 MiB of answers are remembered: some 15,000 of 1,000 tokens, more than the open conversations of a run have.
pub const DEFAULT_MAX_REMEMBERED_BYTES: usize = 64 << 20;
/// Sent this much after it was due, a request is late: ten times the grain of the timers.
pub const LATE_AFTER: Duration = Duration::from_millis(10);
/// Where answers name their server, the first that is there: Gateway API inference gateways, llm-d's simulator, `attache sim`.
pub const DEFAULT_SERVED_HEADERS: &[&str] =
    &["x-gateway-destination-endpoint-served", "x-gateway-destination-endpoint", "x-inference-pod", "x-sim-server"];
/// Servers that are told apart; those beyond are counted as unknown.
const MAX_ENDPOINTS: usize = 4_096;
/// Reasons of failure that are told apart.
const MAX_REASONS: usize = 64;
/// All the others.
const OTHER_REASONS: &str = "other reasons";

/// Which API is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LiveApi {
    /// `/v1/chat/completions`: a message for each run of parts with one role. The chat template adds tokens to what the workload says.
    #[default]
    Chat,
    /// `/v1/completions`: one text, of exactly the workload's tokens for a simulated server.
    Completions,
}

/// How a workload is played.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveConfig {
    /// `http://HOST:PORT`, with or without a path below which `/v1` lies.
    pub target: String,
    /// Which API is asked.
    pub api: LiveApi,
    /// The model that requests without an adapter ask for; the first of `/v1/models` when `None`.
    pub model: Option<String>,
    /// Answers come as event streams: without it nothing is known of the first token.
    pub stream: bool,
    /// At most this many requests are under way, at least 1. Others wait; they are sent late, never dropped.
    pub max_in_flight: usize,
    /// From sending a request to the end of its answer.
    pub timeout: Duration,
    /// Sent with every request.
    pub headers: Vec<(String, String)>,
    /// What texts follow from, beside their names: runs with other seeds find nothing of theirs in the caches.
    pub seed: u64,
    /// The header that names the tenant of a request, beside `user`; none when `None`.
    pub tenant_header: Option<String>,
    /// The names of objectives by the priority that they have at the gateway; requests of others are sent without one.
    pub objectives: BTreeMap<i32, String>,
    /// The header of answers that names the server; one of [`DEFAULT_SERVED_HEADERS`] when `None`.
    pub served_header: Option<String>,
    /// How long what is under way may go on when the run is stopped.
    pub grace: Duration,
    /// How much of what servers said is remembered, bytes.
    pub max_remembered_bytes: usize,
}

impl LiveConfig {
    /// The defaults, for a gateway at `target`.
    #[must_use]
    pub fn new(target: impl Into<String>) -> Self {
        Self {
            target: target.into(),
            api: LiveApi::default(),
            model: None,
            stream: true,
            max_in_flight: DEFAULT_MAX_IN_FLIGHT,
            timeout: DEFAULT_TIMEOUT,
            headers: Vec::new(),
            seed: 0,
            tenant_header: None,
            objectives: BTreeMap::new(),
            served_header: None,
            grace: DEFAULT_GRACE,
            max_remembered_bytes: DEFAULT_MAX_REMEMBERED_BYTES,
        }
    }
}

/// Why a run could not be begun, or be played to its end.
#[derive(Debug, thiserror::Error)]
pub enum LiveError {
    /// A setting is wrong.
    #[error("{0}")]
    Setting(String),
    /// There is no HTTP client.
    #[error("can't set up the HTTP client: {0}")]
    Client(String),
    /// The model's name can't be had.
    #[error("no model is named, and {url} does not tell one: {why}")]
    Model {
        /// Who was asked.
        url: String,
        /// What went wrong.
        why: String,
    },
    /// The workload can't be read. What was under way has ended, and was observed.
    #[error(transparent)]
    Workload(#[from] TraceError),
}

/// What a run came to, beside what its observer saw.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveOutcome {
    /// The model that was asked for.
    pub model: String,
    /// Requests that were sent.
    pub sent: u64,
    /// Those with a whole answer.
    pub answered: u64,
    /// Those that nobody took: another status than 200, no connection.
    pub refused: u64,
    /// Those whose answer did not come to its end.
    pub lost: u64,
    /// Those that were cut because the run was stopped; the observer is not told of them.
    pub cut: u64,
    /// Requests that were refused or lost, by the reason.
    pub failures: BTreeMap<String, u64>,
    /// The servers as answers named them; `Served::endpoint` is a position in it.
    pub endpoints: Vec<String>,
    /// Requests that were sent more than [`LATE_AFTER`] after they were due.
    pub late: u64,
    /// The latest.
    pub latest: Duration,
    /// Requests whose priority, other than 0, no objective stands for: the gateway does not know of it.
    pub unranked: u64,
    /// Requests that had to wait for a place under `max_in_flight`.
    pub held: u64,
    /// Most requests under way at a time.
    pub most_in_flight: usize,
    /// Answers that had to be forgotten for lack of room: turns that quote them quote a text that no server has said.
    pub forgotten: u64,
    /// From the start to the last end.
    pub elapsed: Duration,
    /// The run was stopped before the workload's end.
    pub stopped: bool,
}

/// Plays `workload` to the gateway and tells `observer` of every request that ends, in the order in which they end. Servers are not
/// looked at: `Observer::sampled` is never called. When `stop` is cancelled nothing more is sent, what is under way gets
/// `config.grace` to end, and what was measured is returned. Must be called in a tokio runtime with time and I/O.
///
/// # Errors
/// See [`LiveError`]. That requests fail is no error but an outcome.
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
    let player = Player {
        config,
        gateway,
        workload,
        observer,
        coming: None,
        read_ahead: true,
        follow_ups: BTreeMap::new(),
        flying: JoinSet::new(),
        full_until: Timestamp(0),
        memory: Memory::new(config.max_remembered_bytes),
        places: HashMap::new(),
        echoes: HashMap::new(),
        failed: None,
        outcome,
    };
    player.run(stop).await
}

/// One run.
struct Player<'p> {
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
    memory: Memory,
    /// Positions of servers by their names.
    places: HashMap<String, u32>,
    /// What sessions were told by their last answers.
    echoes: HashMap<u64, Vec<(HeaderName, HeaderValue)>>,
    failed: Option<TraceError>,
    outcome: LiveOutcome,
}

impl Player<'_> {
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
            if let Some(next) = self.workload.ended(request.number, now) {
                self.follow_ups.insert((next.at, next.number), next);
            }
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
