//! What the picker tells of requests: how they end, what was done in degraded mode, which limits took effect.
//!
//! The picker counts nothing itself. It hands events to observers that the process supplies: [`Observer`] for the process,
//! [`PoolObserver`] for one pool, [`QueueObserver`] for one queue, [`NameObserver`] for one model or tenant, [`RequestTrace`]
//! for one request. `telemetry` implements all of them. An event costs one call through a reference and no allocation.

use attache_disagg::Failure;
use attache_pool::health::Verdict;
use attache_protocol::Usage;
use attache_quota::{Bound, Subject};
use attache_scheduling::Signal;
use attache_types::clock::Timestamp;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// An event that concerns no single pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A decision was made in degraded mode.
    Degraded(Degraded),
    /// A limit took effect.
    Limit(Limit),
    /// A panic was caught.
    Panic,
    /// Effect of a request's result on the health of an endpoint.
    Health(Verdict),
    /// A server sent an error inside a response with status 200.
    ErrorInStream,
    /// Result of a request to a prefill server; `Ok` when it computed the prompt.
    PrefillLeg(Result<(), Failure>),
}

/// An event of one routed request, counted for its pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestEvent<'e> {
    /// Whether two servers share the request, where they might have.
    Split(SplitOutcome),
    /// Load alone kept a request for `model` from the endpoint that its prompt belongs to.
    Diverted {
        /// The server's name for the model.
        model: &'e str,
        /// The moment of the decision.
        now: Timestamp,
    },
    /// A prefill server computed the prompt, so long after the decision.
    Prefilled(Duration),
    /// What was decided about a request with a deadline.
    Deadline(DeadlineOutcome),
    /// The response began with this HTTP status.
    Status(u16),
    /// The first byte of the response's body came so long after the request's headers.
    FirstByte(Duration),
    /// The request ended.
    Ended {
        /// How.
        end: End,
        /// Time since the request's headers.
        after: Duration,
        /// Tokens that the server reported, none above what the request can cost.
        usage: Usage,
    },
}

/// An event of the queue of one pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueEvent {
    /// A request that asked for admission left the queue, or never entered it.
    Outcome(QueueOutcome),
    /// A request was dequeued after this wait; counts as [`QueueOutcome::Dispatched`].
    Waited(Duration),
    /// What the queue holds now.
    Holds {
        /// Queued requests.
        requests: usize,
        /// Their bodies and headers, bytes.
        bytes: u64,
    },
    /// What was decided about a queued request with a deadline.
    Deadline(DeadlineOutcome),
}

/// An event of one request, counted for its model or its tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameEvent {
    /// It goes to a server.
    Routed,
    /// Load alone kept it from the endpoint that its prompt belongs to.
    Diverted,
    /// The chosen endpoint is estimated to hold `cached_tokens` of its `prompt_tokens`.
    Matched {
        /// Tokens in the prefix cache of the endpoint.
        cached_tokens: u32,
        /// Length of the prompt, tokens.
        prompt_tokens: u32,
    },
    /// Tokens that the server reported.
    Used(Usage),
    /// It was rejected because of this limit.
    Refused(Bound),
    /// Its decision took so long.
    Decided(Duration),
}

/// Observes what concerns the whole process, and supplies the observers of single models and tenants.
pub trait Observer: fmt::Debug + Send + Sync {
    /// Takes one event.
    fn event(&self, event: Event);

    /// The observer of one model or tenant. `now` is the moment of the request, by which bounded label sets choose names.
    fn named(&self, subject: Subject, name: &str, now: Timestamp) -> Arc<dyn NameObserver>;

    /// Whether [`Observer::log`] keeps records; else none need be made.
    fn keeps_decisions(&self) -> bool;

    /// Adds a request that has ended to the decision log.
    fn log(&self, record: DecisionRecord);
}

/// Observes the routed requests of one pool.
pub trait PoolObserver: fmt::Debug + Send + Sync {
    /// Takes one event.
    fn event(&self, event: RequestEvent<'_>);
}

/// Observes one queue.
pub trait QueueObserver: fmt::Debug + Send + Sync {
    /// Takes one event.
    fn event(&self, event: QueueEvent);
}

/// Observes the requests of one model or one tenant.
pub trait NameObserver: fmt::Debug + Send + Sync {
    /// Takes one event.
    fn event(&self, event: NameEvent);
}

/// The trace of one request, from its decision on.
pub trait RequestTrace: fmt::Debug + Send {
    /// The first byte of the response's body came.
    fn first_byte(&mut self, now: Timestamp);

    /// The response ended with this HTTP status; `completion_tokens` when the server reported them.
    fn end(self: Box<Self>, status: u16, completion_tokens: Option<u64>, now: Timestamp);
}

/// Which bound was hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Limit {
    BodyBytes,
    BufferedBytes,
    BodyMessages,
    UploadBytesPerClient,
    UploadRate,
    HeaderBytes,
    RequestTimeout,
    IdleTimeout,
    Parser,
    /// A server reported more tokens than the request can cost.
    ReportedTokens,
    /// A prompt takes more memory than its body's size allows, or more text than is encoded of one prompt.
    PromptBytes,
    /// Too many prompts, or bytes of them, wait to be tokenized.
    TokenizeQueue,
}

/// On which rung of the ladder a decision was made when it was not the top one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Degraded {
    /// The body is compressed.
    EncodedBody,
    /// The body could not be understood, and the configuration says to route it all the same.
    Unparseable,
    /// The routing algorithm panicked.
    StrategyPanic,
    /// Every endpoint is ejected; ejection is ignored.
    AllEjected,
    /// Looking a prompt up panicked.
    LookupPanic,
    /// The prompt's tokens were not there in time: routed without looking at caches.
    ReadingLate,
    /// The prompt can't be tokenized or its template not rendered: routed without looking at caches.
    Untokenized,
    /// The gateway's body mode leaves no time to have a prompt computed elsewhere.
    NoTimeToSplit,
    /// The gateway does not say whether a request was tried before: the prompt that its server has not taken is left to its lease.
    AttemptsUntold,
    /// What is known of the pool's endpoints and rules may be old: the API server can't be asked.
    DiscoveryStale,
    /// The routing algorithm had to do without something that it decides by.
    Lacking(Signal),
}

/// How a stream ended; every stream has exactly one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// An endpoint was named after the request had been understood.
    Routed,
    /// An endpoint was named by load alone: nothing to read, or nothing that can be read.
    Skipped,
    /// Refused for the client's fault.
    Rejected,
    /// Refused because the servers or the picker can't take it.
    Shed,
    /// The client (or Envoy) left before a decision.
    ClientAborted,
    /// The picker's own fault.
    FailedInternal,
    /// The picker knew the answer: the list of models.
    Answered,
}

impl Outcome {
    /// All of them.
    pub const ALL: [Outcome; 7] = [
        Outcome::Routed,
        Outcome::Skipped,
        Outcome::Rejected,
        Outcome::Shed,
        Outcome::ClientAborted,
        Outcome::FailedInternal,
        Outcome::Answered,
    ];

    /// The label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Outcome::Routed => "routed",
            Outcome::Skipped => "skipped",
            Outcome::Rejected => "rejected",
            Outcome::Shed => "shed",
            Outcome::ClientAborted => "client_aborted",
            Outcome::FailedInternal => "failed_internal",
            Outcome::Answered => "answered",
        }
    }
}

/// How a routed request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum End {
    /// The answer went by to its last byte.
    Complete,
    /// The gateway does not show the rest of the response: its body, or all of it where the gateway half-closes the stream behind the request.
    Unwatched,
    /// The stream ended before the answer did.
    ClientGone,
    /// The picker ended it: no prefill server computed the prompt.
    Aborted,
    /// The picker ended it: it gave way to a request that is more important.
    Evicted,
}

impl End {
    /// All of them.
    pub const ALL: [End; 5] = [End::Complete, End::Unwatched, End::ClientGone, End::Aborted, End::Evicted];

    /// The label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            End::Complete => "complete",
            End::Unwatched => "unwatched",
            End::ClientGone => "client_gone",
            End::Aborted => "aborted",
            End::Evicted => "evicted",
        }
    }
}

/// What became of a request that two servers might have shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SplitOutcome {
    /// They did.
    Split,
    /// One server served it: that was predicted to be better, or decided by rule.
    Whole,
    /// The server of the answer computed the prompt as well: no prefill server did.
    Local,
    /// It was refused: no prefill server computed the prompt.
    Refused,
}

impl SplitOutcome {
    /// All of them.
    pub const ALL: [SplitOutcome; 4] =
        [SplitOutcome::Split, SplitOutcome::Whole, SplitOutcome::Local, SplitOutcome::Refused];

    /// The label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            SplitOutcome::Split => "split",
            SplitOutcome::Whole => "whole",
            SplitOutcome::Local => "local",
            SplitOutcome::Refused => "refused",
        }
    }
}

/// What became of a request that asked for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueOutcome {
    /// There was room.
    Passed,
    /// It waited, and its turn came.
    Dispatched,
    /// There was no room for it to wait.
    Full,
    /// It waited for as long as it may.
    Expired,
    /// It gave way.
    Evicted,
    /// An admitter turned it away, or it is sheddable and can't wait.
    Shed,
    /// Its client left while it waited.
    Left,
    /// There was no room, and the gateway's body mode leaves no time to wait: it went on.
    Unqueued,
}

impl QueueOutcome {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::Passed,
        Self::Dispatched,
        Self::Full,
        Self::Expired,
        Self::Evicted,
        Self::Shed,
        Self::Left,
        Self::Unqueued,
    ];

    /// The label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Passed => "passed",
            Self::Dispatched => "dispatched",
            Self::Full => "full",
            Self::Expired => "expired",
            Self::Evicted => "evicted",
            Self::Shed => "shed",
            Self::Left => "left",
            Self::Unqueued => "unqueued",
        }
    }
}

/// What was made of a request with a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeadlineOutcome {
    /// It goes on: it is predicted to be served in time.
    Fits,
    /// It waits for its turn, which is predicted to come in time.
    Waits,
    /// It goes on or waits: nothing is known of the pool's speed.
    Unknown,
    /// Refused: no server is predicted to serve it in time.
    Late,
    /// Refused: its turn is not predicted to come in time.
    Queue,
    /// Refused: it has waited for as long as its deadline allows.
    Passed,
}

impl DeadlineOutcome {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Fits, Self::Waits, Self::Unknown, Self::Late, Self::Queue, Self::Passed];

    /// The label.
    #[must_use]
    pub fn label(self) -> &'static str {
        match self {
            Self::Fits => "fits",
            Self::Waits => "waits",
            Self::Unknown => "unknown",
            Self::Late => "late",
            Self::Queue => "queue",
            Self::Passed => "passed",
        }
    }
}

/// One request, from decision to end. Holds no text of prompts or answers.
#[derive(Clone, Debug, serde::Serialize)]
pub struct DecisionRecord {
    /// Grows by one with every record.
    pub sequence: u64,
    /// When it ended.
    #[serde(skip)]
    pub ended: Timestamp,
    /// `x-request-id`.
    pub request_id: String,
    /// The API, as a label.
    pub api: &'static str,
    /// The pool.
    pub pool: Arc<str>,
    /// The model the server was asked for; empty when unknown.
    pub model: Arc<str>,
    /// The endpoint that was picked.
    pub endpoint: Arc<str>,
    /// The endpoint that served, when the gateway says that it was another one.
    pub served: Option<Arc<str>>,
    /// The server that computed the prompt for it.
    pub prefill: Option<Arc<str>>,
    /// Why no other server computed the prompt, when one should have.
    pub prefill_failure: Option<&'static str>,
    /// From the decision until the prompt was computed elsewhere, milliseconds.
    pub prefill_ms: Option<f64>,
    /// Why.
    pub reason: &'static str,
    /// Estimated prompt length, tokens.
    pub estimated_prompt_tokens: u32,
    /// Tokens of the prompt that the picked endpoint was thought to hold in its cache.
    pub estimated_cached_tokens: u32,
    /// HTTP status of the answer; 0 when none came.
    pub status: u16,
    /// From the request's headers to the first byte of the answer's body, milliseconds.
    pub ttft_ms: Option<f64>,
    /// From the request's headers to the end, milliseconds.
    pub duration_ms: f64,
    /// As the server reports it.
    pub prompt_tokens: Option<u64>,
    /// As the server reports it.
    pub cached_tokens: Option<u64>,
    /// As the server reports it.
    pub completion_tokens: Option<u64>,
    /// How it ended.
    pub end: &'static str,
}
