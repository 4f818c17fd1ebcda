//! The state machine of one ext-proc stream: takes Envoy's messages, returns replies. No I/O, no clock, no waiting.
//!
//! Request and response have separate states, because a response may begin before the request has ended:
//!
//! ```text
//! request:   Opened ─headers─▶ Collecting ─end of body─▶ (decide) ─▶ Ended
//!               │                   └─ refused ─▶ Refused: all that follows is ignored
//!               └─headers that must be answered at once─▶ (decide) ─▶ Flowing ─end─▶ Ended
//! response:  Awaited ─headers─▶ Streaming ─end of body or trailers─▶ Ended (books closed)
//! ```
//!
//! Envoy closes or resets every stream, after complete and aborted requests alike. So these states, and not the way the
//! stream ended, say how the request ended. A stream is counted under exactly one [`StreamOutcome`], on drop at the latest.

use super::metadata::Attributes;
use super::mode::{BodyMode, Modes};
use super::processor::Processor;
use super::reply::{self, Direction};
use super::uploads::{Evicted, Progress};
use attache_disagg::attempts::Attempt;
use attache_flow::Refusal;
use attache_picker::InFlight;
use attache_picker::active::ActiveConfig;
use attache_picker::body::Body;
use attache_picker::decide::{self, Plan, PrefillTime, RequestView, Seen, Step};
use attache_picker::event::{DecisionTrace, End, Limit, NameObserver, StreamOutcome};
use attache_picker::head::Head;
use attache_picker::queues::DequeueResult;
use attache_picker::quotas::Allowance;
use attache_picker::split::LegResult;
use attache_protocol::{Api, BodyFormat};
use attache_scheduling::Subset;
use attache_telemetry::trace::RequestSpan;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Message;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, ProcessingRequest, ProcessingResponse};
use form::FormUpload;
pub use gateway_call::GatewayCall;
use queueing::QueueState;
use splitting::Splitting;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use token_wait::{DecisionPoint, TokenWait};

mod answering;
mod destination;
mod disconnect;
mod ending;
mod form;
mod gateway_call;
mod listing;
mod queueing;
mod refusing;
mod request_headers;
mod spans;
mod splitting;
mod token_wait;
mod uploading;

/// 50 ms: the pause in a STREAMED body after which Attaché decides, if the part so far may be a complete JSON object.
const PAUSE_AFTER_JSON: Duration = Duration::from_millis(50);
/// 1 s: the same, if the part so far can't be a complete JSON object.
const PAUSE: Duration = Duration::from_secs(1);

/// The input of an exchange.
#[derive(Debug)]
pub enum Event {
    /// A message of Envoy.
    Message(Box<ProcessingRequest>),
    /// A message whose attributes are not in it: the host has read them, and gives them beside it.
    MessageWith(Box<(ProcessingRequest, Attributes)>),
    /// A message of this many bytes was discarded: it exceeds [`Exchange::max_message_bytes`].
    TooLarge(u64),
    /// The upload that [`Exchange::upload`] reports is evicted.
    UploadEvicted(Evicted),
    /// The time of [`Exchange::deadline`] has come.
    Deadline,
    /// The work that [`Exchange::warming`] returned has run.
    Warmed,
    /// The result of [`Exchange::waiting`].
    Dequeued(Option<DequeueResult>),
    /// The result of [`Exchange::eviction`].
    Evicted(Refusal),
    /// The result of a call that [`Exchange::leg_calls`] returned.
    LegResult(Attempt, LegResult),
}

/// A message that the ext-proc protocol does not allow in this state. It ends the stream with an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ProtocolError(pub &'static str);

/// Replies to Envoy, in sending order.
pub type Actions = VecDeque<ProcessingResponse>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestSide {
    Opened,
    Collecting,
    /// In the queue of its pool.
    Queued,
    /// Decided; a prefill worker computes the prompt.
    Prefilling,
    Flowing,
    Ended,
    Refused,
    /// Envoy's observability mode: it ignores replies.
    Observed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseSide {
    Awaited,
    Streaming,
    Ended,
}

/// How much of a request's body has arrived when the decision is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BodyEnd {
    /// A part: more may follow.
    Cut,
    /// All of it.
    Whole,
    /// All of it, and the background work on the prompt has run.
    WholeAndWarm,
    /// All of it, and trailers follow.
    Trailers,
}

/// One request, from its headers to the end of its response.
#[derive(Debug)]
pub struct Exchange {
    processor: Arc<Processor>,
    config: Arc<ActiveConfig>,
    call: GatewayCall,
    opened: Timestamp,
    modes: Option<Modes>,
    request: RequestSide,
    response: ResponseSide,
    head: Head,
    api: Api,
    response_id: Option<String>,
    subset: Option<Subset>,
    body: Body,
    progress: Progress,
    /// The form that is uploaded, unless Envoy sends it in one message.
    form: Option<Box<FormUpload>>,
    /// The client's connection to Envoy.
    connection: Option<u64>,
    span: Option<RequestSpan>,
    in_flight: Option<Box<InFlight>>,
    outcome: Option<StreamOutcome>,
    last_seen: Timestamp,
    waits: TokenWait,
    allowance: Allowance,
    /// Cloned for each decision attempt, so that all attempts draw the same numbers. Quotas are counted for the model
    /// of the first attempt, so the last one must choose the same model.
    rng: PickRng,
    split: Splitting,
    queueing: QueueState,
    /// The gateway has a load balancer of its own for requests without a decision.
    falls_back: bool,
}

impl Exchange {
    /// The exchange of a stream that Envoy opened at `now`.
    #[must_use]
    pub fn new(processor: Arc<Processor>, now: Timestamp) -> Self {
        processor.metrics.streams_opened.inc();
        let picker = &processor.picker;
        Self {
            config: picker.config(),
            call: GatewayCall::default(),
            opened: now,
            modes: None,
            request: RequestSide::Opened,
            response: ResponseSide::Awaited,
            head: Head::default(),
            api: Api::default(),
            response_id: None,
            subset: None,
            body: Body::new(&picker.buffered),
            progress: Progress::begin(now),
            form: None,
            connection: None,
            span: None,
            in_flight: None,
            outcome: None,
            last_seen: now,
            waits: TokenWait::default(),
            allowance: Allowance::default(),
            rng: picker.next_rng(),
            split: Splitting::default(),
            queueing: QueueState::default(),
            falls_back: false,
            processor,
        }
    }

    /// The same exchange, with these body modes instead of those in Envoy's first message.
    #[must_use]
    pub fn in_modes(mut self, modes: Modes) -> Self {
        self.modes = Some(modes);
        self
    }

    /// The same exchange. If `falls_back`, a request that can't be decided is passed on without a destination, and is
    /// not rejected.
    #[must_use]
    pub fn falling_back(mut self, falls_back: bool) -> Self {
        self.falls_back = falls_back;
        self
    }

    /// Whether a request that can't be decided is passed on. One that may go to some servers only is not: the gateway's
    /// load balancer would ignore its subset hint or its label selector.
    #[must_use]
    pub fn falls_back(&self) -> bool {
        self.falls_back && self.subset.is_none() && !self.config.selects(&self.head)
    }

    /// Whether the request is held until a decision.
    #[must_use]
    pub fn holds_request(&self) -> bool {
        match self.request {
            RequestSide::Opened | RequestSide::Collecting | RequestSide::Queued | RequestSide::Prefilling => true,
            RequestSide::Flowing | RequestSide::Ended | RequestSide::Refused | RequestSide::Observed => false,
        }
    }

    /// Whether the decision was made on a part of a form, and the rest may contradict it.
    #[must_use]
    pub fn reads_rest(&self) -> bool {
        self.request == RequestSide::Flowing && self.form.is_some()
    }

    /// Whether the exchange accepts no event but [`Event::Warmed`].
    #[must_use]
    pub fn is_deferred(&self) -> bool {
        self.waits.is_waiting()
    }

    /// Whether results of the queue or of calls may arrive that the caller has not asked for yet.
    #[must_use]
    pub fn expects_results(&self) -> bool {
        self.queueing.expects_results() || self.split.has_calls()
    }

    /// When [`Event::Deadline`] is due; `None` if only Envoy's own timeouts apply.
    #[must_use]
    pub fn deadline(&self) -> Option<Timestamp> {
        match self.request {
            RequestSide::Opened => Some(self.opened.after(self.config.limits.idle_timeout)),
            RequestSide::Collecting => {
                let end = self.opened.after(self.config.limits.request_timeout);
                [self.patience_ends(), self.upload_ends()].into_iter().flatten().chain([end]).min()
            }
            RequestSide::Queued => self.queueing.deadline(),
            _ => self.split.deadline(),
        }
    }

    /// When Attaché decides on the part of a STREAMED body that has arrived.
    ///
    /// In that mode, Envoy holds request trailers until each chunk is answered, so the end of a request with trailers
    /// never arrives. A pause counts as the end; it is longer if the body is not complete JSON. A form says where it ends.
    fn patience_ends(&self) -> Option<Timestamp> {
        if self.modes().request != BodyMode::Streamed || self.body.messages() == 0 || self.form.is_some() {
            return None;
        }
        let pause = if self.body.may_be_whole() { PAUSE_AFTER_JSON } else { PAUSE };
        Some(self.last_seen.after(pause))
    }

    /// Whether the request was routed to an endpoint.
    #[must_use]
    pub fn is_routed(&self) -> bool {
        self.in_flight.is_some()
    }

    /// The observer of the request's model; `None` if the model is unknown.
    #[must_use]
    pub fn model_counts(&self) -> Option<&dyn NameObserver> {
        self.in_flight.as_ref()?.model_counts()
    }

    /// How the stream is counted; `None` before that is known.
    #[must_use]
    pub fn outcome(&self) -> Option<StreamOutcome> {
        self.outcome
    }

    /// Handles one event, and appends replies to `out`.
    ///
    /// # Errors
    /// The ext-proc protocol does not allow the message in this state, or the gateway sent nothing within the idle
    /// timeout.
    pub fn on(&mut self, event: Event, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        match event {
            Event::Message(mut message) => {
                let attributes = Attributes::take(&mut message.attributes);
                return self.on_message(*message, &attributes, now, out);
            }
            Event::MessageWith(message) => {
                let (message, attributes) = *message;
                return self.on_message(message, &attributes, now, out);
            }
            Event::TooLarge(bytes) => return self.on_too_large(bytes, now, out),
            Event::UploadEvicted(why) => return self.on_upload_evicted(why, now, out),
            Event::Deadline => return self.on_deadline(now, out),
            Event::Warmed => self.on_warmed(now, out),
            Event::Dequeued(result) => self.on_dequeue(result, now, out),
            Event::Evicted(refusal) => self.on_evicted(&refusal, now, out),
            Event::LegResult(attempt, result) => self.on_leg_result(attempt, &result, now, out),
        }
        Ok(())
    }

    fn on_message(
        &mut self,
        m: ProcessingRequest,
        attributes: &Attributes,
        now: Timestamp,
        out: &mut Actions,
    ) -> Result<(), ProtocolError> {
        self.last_seen = now;
        if self.modes.is_none() {
            self.modes = Some(m.protocol_config.as_ref().map_or(Modes::DEFAULT, Modes::of));
        }
        if m.observability_mode {
            self.request = RequestSide::Observed;
            self.settle(StreamOutcome::Skipped);
        }
        if matches!(self.request, RequestSide::Refused | RequestSide::Observed) {
            return Ok(());
        }
        let Some(message) = m.request else { return Err(ProtocolError("message without content")) };
        match message {
            Message::RequestHeaders(h) => self.on_request_headers(h, m.metadata_context, attributes, now, out),
            Message::RequestBody(b) => self.on_request_body(b, m.metadata_context, now, out),
            Message::RequestTrailers(_) => self.on_request_trailers(now, out),
            Message::ResponseHeaders(h) => self.on_response_headers(h, m.metadata_context, attributes, now, out),
            Message::ResponseBody(b) => self.on_response_body(b, now, out),
            Message::ResponseTrailers(_) => self.on_response_trailers(now, out),
        }
    }

    fn modes(&self) -> Modes {
        self.modes.unwrap_or(Modes::DEFAULT)
    }

    // === the request ===

    fn on_request_body(
        &mut self,
        message: HttpBody,
        metadata: Option<Metadata>,
        now: Timestamp,
        out: &mut Actions,
    ) -> Result<(), ProtocolError> {
        match self.request {
            RequestSide::Opened => return Err(ProtocolError("request body before request headers")),
            // Envoy 1.35 to 1.37 ended long bodies twice.
            RequestSide::Ended | RequestSide::Prefilling => return Ok(()),
            RequestSide::Queued => {
                self.on_queued_body(message, now, out);
                return Ok(());
            }
            RequestSide::Refused | RequestSide::Observed => return Ok(()),
            RequestSide::Flowing => {
                if let Some(error) = self.contradiction_in_form(&message.body) {
                    self.refuse_in_flight(End::Contradicted, &error, now, out);
                    return Ok(());
                }
                if message.end_of_stream {
                    self.request = RequestSide::Ended;
                }
                out.push_back(reply::echo(Direction::Request, self.modes().request, message));
                return Ok(());
            }
            RequestSide::Collecting => {}
        }
        self.take_subset(metadata.as_ref());
        let modes = self.modes();
        let complete = message.end_of_stream || modes.body_at_once;
        self.read_form(&message.body);
        self.collect(message.body, now);
        if let Some(error) = self.refusal_by_size(now) {
            self.refuse(&error, now, out);
        } else if complete || modes.request == BodyMode::Buffered || self.form_suffices() {
            self.decide_on_body(if complete { BodyEnd::Whole } else { BodyEnd::Cut }, now, out);
        }
        Ok(())
    }

    fn on_request_trailers(&mut self, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        match self.request {
            RequestSide::Opened => return Err(ProtocolError("request trailers before request headers")),
            RequestSide::Collecting => self.decide_on_body(BodyEnd::Trailers, now, out),
            RequestSide::Flowing | RequestSide::Ended => self.pass_trailers(out),
            RequestSide::Queued => self.queueing.ends(BodyEnd::Trailers),
            // The body is complete, so Envoy forwards the trailers.
            RequestSide::Prefilling => {}
            RequestSide::Refused | RequestSide::Observed => {}
        }
        Ok(())
    }

    fn pass_trailers(&mut self, out: &mut Actions) {
        self.request = RequestSide::Ended;
        out.push_back(reply::request_trailers());
    }

    fn decide_at_headers(&mut self, end_of_stream: bool, now: Timestamp, out: &mut Actions) {
        // A POST that ends with its headers has an empty body, which the parser must reject. A GET has no body.
        let empty_body = end_of_stream && self.head.method() == "POST" && self.api.body_format() == BodyFormat::Json;
        let point = DecisionPoint::Headers(end_of_stream);
        match self.decide(if empty_body { Seen::Whole(&[]) } else { Seen::Nothing }, point, now) {
            Err(error) => self.refuse(&error, now, out),
            Ok(Step::Allow(asking)) => self.wait(asking, point),
            Ok(Step::Queue(queued)) => self.enqueue(queued, point),
            // Never returned without a body: there is no prompt to tokenize.
            Ok(Step::Warm(..)) => {}
            Ok(Step::Decided(plan)) => {
                let (response, metadata) = self.destination(&plan);
                out.push_back(ProcessingResponse { dynamic_metadata: metadata, ..reply::request_headers(response) });
                self.form = None;
                let host_holds_body = self.modes().request == BodyMode::Inside;
                let body_comes = !end_of_stream && self.modes().request != BodyMode::None;
                self.begin_in_flight(*plan, now);
                self.request = if body_comes { RequestSide::Flowing } else { RequestSide::Ended };
                // The part of the body that arrived while the request was queued.
                let body = self.body.take();
                if !host_holds_body {
                    reply::stream_body(body, false, out);
                }
            }
        }
    }

    /// Decides on the body as far as it has arrived, and replies as the body mode requires.
    fn decide_on_body(&mut self, close: BodyEnd, now: Timestamp, out: &mut Actions) {
        let mut scratch = Vec::new();
        let body = std::mem::replace(&mut self.body, Body::new(&self.processor.picker.buffered));
        let bytes = body.contiguous(&mut scratch);
        if self.api == Api::Other && self.head.lacks_path() {
            self.api = Api::from_body(bytes);
            self.head.assume_path(self.api.usual_path());
        }
        let seen = if close == BodyEnd::Cut { Seen::Head(bytes) } else { Seen::Whole(bytes) };
        match self.decide(seen, DecisionPoint::Body(close), now) {
            Err(error) => self.refuse(&error, now, out),
            Ok(Step::Warm(warming, admitted)) => {
                self.queueing.keep(admitted);
                self.body = body;
                self.wait(warming, DecisionPoint::Body(BodyEnd::WholeAndWarm));
            }
            Ok(Step::Allow(asking)) => {
                self.body = body;
                self.wait(asking, DecisionPoint::Body(close));
            }
            Ok(Step::Queue(queued)) => {
                self.body = body;
                self.enqueue(queued, DecisionPoint::Body(close));
            }
            Ok(Step::Decided(plan)) if plan.is_split() => self.begin_split(plan, body, close, now, out),
            Ok(Step::Decided(plan)) => self.go_on(plan, body, close, now, out),
        }
    }

    /// Routes the request to its endpoint, and replies as the body mode requires.
    fn go_on(&mut self, mut plan: Box<Plan>, body: Body, close: BodyEnd, now: Timestamp, out: &mut Actions) {
        let complete = close != BodyEnd::Cut;
        let (response, dynamic_metadata) = self.destination(&plan);
        let new_body = plan.new_body.take();
        let mode = self.modes().request;
        if matches!(mode, BodyMode::Buffered | BodyMode::Inside) {
            out.push_back(ProcessingResponse { dynamic_metadata, ..reply::buffered_body(response, new_body) });
        } else {
            let head = ProcessingResponse { dynamic_metadata, ..reply::request_headers(response) };
            reply::forward(mode, head, body, new_body, complete && close != BodyEnd::Trailers, out);
        }
        let ended = complete || mode == BodyMode::Buffered;
        self.begin_in_flight(*plan, now);
        self.request = if ended { RequestSide::Ended } else { RequestSide::Flowing };
        if close == BodyEnd::Trailers {
            self.pass_trailers(out);
        }
    }

    /// Makes one decision attempt with this part of the body.
    fn decide(&mut self, body: Seen<'_>, point: DecisionPoint, now: Timestamp) -> Result<Step, RequestError> {
        let may_wait = self.modes().request.may_wait();
        let is_whole = matches!(point, DecisionPoint::Body(BodyEnd::Whole | BodyEnd::WholeAndWarm));
        let times = self.span.as_ref().and_then(RequestSpan::times);
        let view = RequestView {
            head: &self.head,
            pool: None,
            called: self.call.authority(),
            api: self.api,
            response_id: self.response_id.as_deref(),
            subset: self.subset.as_ref(),
            body,
            now,
            opened: self.opened,
            // For a partial body, or one with trailers, there is no second attempt after background work.
            last: !matches!(point, DecisionPoint::Body(BodyEnd::Whole)),
            made: self.waits.made.as_deref(),
            prefill_time: match (is_whole, may_wait) {
                (false, _) => PrefillTime::None,
                (true, false) => PrefillTime::MessageTimeout,
                (true, true) => PrefillTime::Unbounded,
            },
            may_wait,
            opens: matches!(point, DecisionPoint::Headers(false)),
            has_turn: self.queueing.is_dequeued(),
            trace: times.as_ref().map(|times| times as &dyn DecisionTrace),
        };
        let rng = &mut self.rng.clone();
        let mut step = decide::decide(&self.processor.picker, &self.config, &view, &mut self.allowance, rng);
        if let Ok(Step::Decided(plan)) = &mut step {
            self.waits.made = None;
            plan.permits = self.allowance.take();
            plan.admitted = self.queueing.take_admitted().or(plan.admitted.take());
            plan.admitted.iter_mut().for_each(|admitted| self.queueing.landed(admitted));
        }
        if let Some(times) = times {
            self.trace_decision(times, &step, now);
        }
        step
    }

    fn on_deadline(&mut self, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        match self.request {
            RequestSide::Opened => {
                self.processor.metrics.limits.count(Limit::IdleTimeout);
                return Err(ProtocolError("stream opened and nothing sent within the idle timeout"));
            }
            RequestSide::Collecting if now < self.opened.after(self.config.limits.request_timeout) => {
                if self.patience_ends().is_some_and(|at| at <= now) {
                    self.decide_on_body(BodyEnd::Cut, now, out);
                } else if let Some(error) = self.refusal_by_speed(now) {
                    self.refuse(&error, now, out);
                }
            }
            RequestSide::Collecting => {
                self.processor.metrics.limits.count(Limit::RequestTimeout);
                let allowed = self.config.limits.request_timeout.as_secs_f64();
                let message = format!("the request's body did not end within {allowed} s");
                self.refuse(&RequestError::new(Reason::RequestTimeout, message), now, out);
            }
            RequestSide::Queued => self.on_queued_deadline(now, out),
            _ => self.on_split_deadline(now, out),
        }
        Ok(())
    }

    fn settle(&mut self, outcome: StreamOutcome) {
        self.outcome.get_or_insert(outcome);
    }
}

/// The stream is closed or reset: releases all bookings and counts the outcome.
impl Drop for Exchange {
    fn drop(&mut self) {
        self.leave();
        self.processor.metrics.outcomes.count(self.outcome.unwrap_or(StreamOutcome::ClientAborted));
    }
}

#[cfg(test)]
mod tests;
