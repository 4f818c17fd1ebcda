//! Events of requests: how they end, degraded modes in use, limits that took effect.
//!
//! The picker counts nothing itself. It hands events to observers that the process supplies: [`Observer`] for the
//! process, [`PoolObserver`] for one pool, [`QueueObserver`] for one queue, [`NameObserver`] for one model or tenant,
//! [`RequestTrace`] and [`DecisionTrace`] for one request. `telemetry` implements all of them. An event costs one call through a reference
//! and no allocation.

use crate::agent::AgentIdentity;
use crate::settings::ExplainSettings;
use attache_disagg::Failure;
use attache_pool::Endpoint;
use attache_pool::health::Verdict;
use attache_protocol::Usage;
use attache_protocol::usage::UnreadCount;
use attache_quota::{Bound, Subject};
use attache_scheduling::Signal;
use attache_types::clock::Timestamp;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

/// An event that concerns no single pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A decision was made, or a response read, in degraded mode.
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
    /// A session was ended.
    SessionEnd(SessionEnd),
    /// A reservation was made, used or ended.
    Reservation(ReservationOutcome),
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
    /// The first byte of a streamed response came.
    FirstByte {
        /// Time since the request's headers.
        after: Duration,
        /// The request's trace, if it is sampled.
        exemplar: Option<Exemplar>,
    },
    /// The request ended.
    Ended {
        /// How.
        end: End,
        /// Time since the request's headers.
        after: Duration,
        /// Tokens that the server reported, none above what the request can cost.
        usage: Usage,
        /// The request's trace, if it is sampled.
        exemplar: Option<Exemplar>,
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

    /// The observer of one model or tenant. `now` is the moment of the request, by which bounded label sets choose
    /// names.
    fn named(&self, subject: Subject, name: &str, now: Timestamp) -> Arc<dyn NameObserver>;

    /// Whether [`Observer::log`] keeps records; else none need be made.
    fn keeps_decisions(&self) -> bool;

    /// Adds a request that has ended to the decision log.
    fn log(&self, record: DecisionRecord);

    /// The start of a decision at `now` whose explanation is kept; `None` if it is not kept, because `settings` keep
    /// none or explanations have taken the time that they allow.
    fn begin_explanation(&self, settings: &ExplainSettings, now: Timestamp) -> Option<Timestamp>;

    /// Keeps the explanation of the decision that `began` then.
    fn explained(&self, settings: &ExplainSettings, began: Timestamp, explanation: KeptExplanation);
}

/// The explanation of a decision.
#[derive(Clone, Debug)]
pub struct KeptExplanation {
    /// The request's `x-request-id`.
    pub request_id: Arc<str>,
    /// The explanation, JSON.
    pub json: Box<str>,
}

/// Takes no notice of events: the observer of dry runs and simulations.
#[derive(Clone, Copy, Debug)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn event(&self, _: Event) {}

    fn named(&self, _: Subject, _: &str, _: Timestamp) -> Arc<dyn NameObserver> {
        Arc::new(Self)
    }

    fn keeps_decisions(&self) -> bool {
        false
    }

    fn log(&self, _: DecisionRecord) {}

    fn begin_explanation(&self, _: &ExplainSettings, _: Timestamp) -> Option<Timestamp> {
        None
    }

    fn explained(&self, _: &ExplainSettings, _: Timestamp, _: KeptExplanation) {}
}

impl NameObserver for Unobserved {
    fn event(&self, _: NameEvent) {}
}

impl PoolObserver for Unobserved {
    fn event(&self, _: RequestEvent<'_>) {}
}

impl QueueObserver for Unobserved {
    fn event(&self, _: QueueEvent) {}
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

/// The trace of one sampled request, from its decision on.
pub trait RequestTrace: fmt::Debug + Send {
    /// Links a histogram's sample to this trace.
    fn exemplar(&self, now: Timestamp) -> Exemplar;

    /// The first byte of the response's body came.
    fn first_byte(&mut self, now: Timestamp);

    /// The request ended, with this record. `served`: the endpoint that responded.
    fn end(self: Box<Self>, record: &DecisionRecord, served: &Endpoint);
}

/// The steps of one decision about a sampled request. The decision itself reads no clock.
pub trait DecisionTrace: fmt::Debug + Sync {
    /// The pool is known, and the model name that the model server will get.
    fn entered(&self, pool: &Arc<str>, model: &Arc<str>);

    /// The prompt's lookup in the prefix index begins.
    fn lookup_begins(&self);

    /// The lookup has ended.
    fn lookup_ends(&self);
}

/// The trace of a request, as an example for a sample of a histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exemplar {
    /// The trace id of W3C Trace Context.
    pub trace_id: [u8; 16],
    /// Wall-clock time of the sample.
    pub at: SystemTime,
}

attache_types::labels! {
    /// The limit that a request exceeded.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Limit {
        BodyBytes => "body_bytes",
        BufferedBytes => "buffered_bytes",
        BodyMessages => "body_messages",
        UploadBytesPerClient => "upload_bytes_per_client",
        UploadRate => "upload_rate",
        HeaderBytes => "header_bytes",
        /// A request or response has as many headers as the gateway allows.
        Headers => "headers",
        RequestTimeout => "request_timeout",
        IdleTimeout => "idle_timeout",
        Parser => "parser",
        /// A server reported more tokens than the request can cost.
        ReportedTokens => "reported_tokens",
        /// A prompt needs more memory than its body's size allows, or has more text than is encoded of one prompt.
        PromptBytes => "prompt_bytes",
        /// Too many prompts, or bytes of them, wait to be tokenized.
        TokenizeQueue => "tokenize_queue",
        /// Too many ext-proc streams are open.
        Streams => "streams",
    }
}

attache_types::labels! {
    /// What ended a session.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum SessionEnd {
        /// The header of its last request.
        Header => "header",
        /// A call through the gateway.
        Gateway => "gateway",
        /// A call to the admin port.
        Admin => "admin",
        /// Another picker, in one of the other ways. Counted if the session was known here.
        Peer => "peer",
    }
}

attache_types::labels! {
    /// What happened to a reservation. Each that was made also ends in one of the other ways, except the last two.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum ReservationOutcome {
        /// It was made.
        Made => "made",
        /// Its request has taken it over.
        Used => "used",
        /// Its time ended before its request was sent.
        Expired => "expired",
        /// A call released it.
        Released => "released",
        /// The request that named it does not fit: another pool or model, or a larger request.
        Mismatched => "mismatched",
        /// Its endpoint left the pool, drains or is ejected: the request was decided again.
        EndpointGone => "endpoint_gone",
        /// A request named a wrong or expired id.
        Unknown => "unknown",
        /// It was not made: too many are open.
        Refused => "refused",
    }
}

attache_types::labels! {
    /// A degraded mode in which a decision was made or a response was read.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum Degraded {
        /// The body is compressed.
        EncodedBody => "encoded_body",
        /// The response is compressed: its tokens, its model name and its errors were not read.
        EncodedResponse => "encoded_response",
        /// The body is invalid, and the configuration routes such requests by load.
        Unparseable => "unparseable",
        /// The model of a form can't be read, and no rule depends on it.
        UnreadForm => "unread_form",
        /// The routing algorithm panicked.
        StrategyPanic => "strategy_panic",
        /// Every endpoint is ejected, so ejection is ignored.
        AllEjected => "all_ejected",
        /// The prefix lookup panicked.
        LookupPanic => "lookup_panic",
        /// The prompt's tokens were not available in time: routed without prefix lookup.
        ReadingLate => "reading_late",
        /// The prompt can't be tokenized, or its template not rendered: routed without prefix lookup.
        Untokenized => "untokenized",
        /// The gateway's body mode leaves no time for a prefill on another worker.
        NoTimeToSplit => "no_time_to_split",
        /// The gateway's body mode leaves no time to queue a request of a pool with a queue.
        NoTimeToQueue => "no_time_to_queue",
        /// The gateway shows no body before the decision.
        NoBody => "no_body",
        /// No prefill server was there for a request that would have been split, or might have been.
        NoPrefillEndpoint => "no_prefill_endpoint",
        /// The gateway does not report retries: blocks of a prefill that were not fetched are kept until their lease ends.
        AttemptsUntold => "attempts_untold",
        /// Endpoints and rules may be out of date, because the API server is unreachable.
        DiscoveryStale => "discovery_stale",
        ;
        /// The strategy lacked a signal that it decides by.
        Lacking(Signal),
        /// A response reported a token count that is no whole number.
        UnreadCount(UnreadCount),
    }
}

impl Degraded {
    /// The modes that a wrong setting of the gateway causes. They are warnings of the picker.
    pub const OF_GATEWAY: [Self; 3] = [Self::NoBody, Self::NoTimeToSplit, Self::NoTimeToQueue];
}

attache_types::labels! {
    /// How a stream ended; every stream has exactly one outcome.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum StreamOutcome {
        /// Attaché chose an endpoint after it had parsed the request.
        Routed => "routed",
        /// Attaché chose an endpoint by load alone: there was no body, or an invalid one.
        Skipped => "skipped",
        /// Attaché rejected the request because of an error of the client.
        Rejected => "rejected",
        /// Attaché rejected the request because the model servers or Attaché lack capacity.
        Shed => "shed",
        /// The client (or Envoy) disconnected before a decision.
        ClientAborted => "client_aborted",
        /// An error of Attaché.
        FailedInternal => "failed_internal",
        /// Attaché responded itself: with the list of models, or to the end of a session.
        Answered => "answered",
        /// Attaché could not decide and passed the request on: Envoy's own load balancing chose the endpoint.
        FellBack => "fell_back",
    }
}

attache_types::labels! {
    /// How a routed request ended.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum End {
        /// The response was complete.
        Complete => "complete",
        /// The gateway does not pass on the rest of the response: its body, or all of it if the gateway half-closes the
        /// stream after the request.
        Unwatched => "unwatched",
        /// The stream ended before the response did.
        ClientGone => "client_gone",
        /// Attaché ended it: no prefill worker prefilled the prompt.
        Aborted => "aborted",
        /// Attaché ended it: it was preempted for a more important request.
        Evicted => "evicted",
        /// Attaché ended it: the rest of its form contradicts the model that it was routed by.
        Contradicted => "contradicted",
        /// The gateway responded, because it could not connect to the endpoint.
        ConnectFailure => "connect_failure",
        /// The gateway responded in place of the endpoint for another reason: no route, a full circuit breaker.
        Gateway => "gateway",
    }
}

/// The [`DecisionRecord::end`] of rejected requests.
pub const REJECTED: &str = "rejected";
/// The [`DecisionRecord::end`] of reservations whose request was not sent in time.
pub const UNSENT: &str = "unsent";
/// The [`DecisionRecord::end`] of requests that were passed on without a decision.
pub const FELL_BACK: &str = "fell_back";

attache_types::labels! {
    /// How a request that could be split was served.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub enum SplitOutcome {
        /// By a prefill worker and a decode worker.
        Split => "split",
        /// By one endpoint, because that was predicted to be better, or by rule.
        Whole => "whole",
        /// The decode worker prefilled the prompt as well, because no prefill worker did or none was there.
        Local => "local",
        /// It was rejected: no prefill worker prefilled the prompt.
        Refused => "refused",
    }
}

attache_types::labels! {
    /// How admission handled a request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum QueueOutcome {
        /// The pool had capacity.
        Passed => "passed",
        /// It was queued, then dequeued.
        Dispatched => "dispatched",
        /// The queue was full.
        Full => "full",
        /// Its time to live in the queue ended.
        Expired => "expired",
        /// It was evicted from the queue or preempted.
        Evicted => "evicted",
        /// An admitter rejected it, or it was sheddable and could not wait.
        Shed => "shed",
        /// Its client disconnected while it was queued.
        Left => "left",
        /// The pool was full, and the gateway's body mode leaves no time to wait: it was dispatched.
        Unqueued => "unqueued",
    }
}

attache_types::labels! {
    /// How deadline admission handled a request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum DeadlineOutcome {
        /// Dispatched: it is predicted to meet its deadline.
        Fits => "fits",
        /// Queued: it is predicted to be dequeued in time.
        Waits => "waits",
        /// Dispatched or queued: the pool's speed is unknown.
        Unknown => "unknown",
        /// Rejected: no endpoint is predicted to serve it in time.
        Late => "late",
        /// Rejected: it is not predicted to be dequeued in time.
        Queue => "queue",
        /// Rejected: it was queued for as long as its deadline allows.
        Passed => "passed",
    }
}

/// The second best endpoint of a decision, with one of the margins.
#[derive(Clone, Debug, serde::Serialize)]
pub struct RunnerUp {
    /// `ip:port`.
    pub endpoint: Arc<str>,
    /// How much more it was predicted to cost than the chosen endpoint, milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin_ms: Option<f64>,
    /// How much worse its score was than that of the chosen endpoint, in the unit of the strategy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub margin_score: Option<f64>,
}

/// One request from decision to end, without the text of prompts and responses.
#[derive(Clone, Debug, Default, serde::Serialize)]
pub struct DecisionRecord {
    /// Sequence number, one more than that of the previous record.
    pub sequence: u64,
    /// Time at which the request ended.
    #[serde(skip)]
    pub ended: Timestamp,
    /// `x-request-id` of the request.
    pub request_id: String,
    /// The agent that sent the request, if the request names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<Box<AgentIdentity>>,
    /// The API, as in metric labels.
    pub api: &'static str,
    /// Name of the pool.
    pub pool: Arc<str>,
    /// Model name sent to the model server; empty if unknown.
    pub model: Arc<str>,
    /// Endpoint that Attaché chose; empty for a rejected request.
    pub endpoint: Arc<str>,
    /// Endpoint that served the request, if the gateway reports a different one.
    pub served: Option<Arc<str>>,
    /// Prefill worker of a split request.
    pub prefill: Option<Arc<str>>,
    /// Why no prefill worker was used although the request was to be split.
    pub prefill_failure: Option<&'static str>,
    /// Time from the decision until the prefill ended, milliseconds.
    pub prefill_ms: Option<f64>,
    /// The strategy that chose the endpoint; empty for a rejected request.
    pub strategy: Arc<str>,
    /// Why the endpoint was chosen, or the reason of the rejection.
    pub reason: &'static str,
    /// The second best endpoint, if scores decided and the request was not split.
    pub runner_up: Option<RunnerUp>,
    /// Time in the queue of the pool, milliseconds; `None` if the request was not queued.
    pub queued_ms: Option<f64>,
    /// Estimated length of the prompt, tokens.
    pub estimated_prompt_tokens: u32,
    /// Estimated number of prompt tokens that the chosen endpoint had cached.
    pub estimated_cached_tokens: u32,
    /// HTTP status of the response; 0 if there was none.
    pub status: u16,
    /// Predicted `ttft_ms`, as of the decision. `None` for a request that was not parsed, and until the speed of the
    /// pool is learned.
    pub predicted_ttft_ms: Option<f64>,
    /// From the request headers to the first byte of a streamed response, milliseconds. `None` if the response is not
    /// streamed: its first byte comes with its last token.
    pub ttft_ms: Option<f64>,
    /// From the request headers to the end, milliseconds.
    pub duration_ms: f64,
    /// Prompt tokens, as the model server reported.
    pub prompt_tokens: Option<u64>,
    /// Cached prompt tokens, as the model server reported.
    pub cached_tokens: Option<u64>,
    /// Generated tokens, as the model server reported.
    pub completion_tokens: Option<u64>,
    /// How the request ended.
    pub end: &'static str,
}
