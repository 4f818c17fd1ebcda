//! The state machine of one request: Envoy's messages in, answers out. No I/O, no clock, no waiting.
//!
//! The request side and the response side move on their own, since an answer may begin before the request has ended:
//!
//! ```text
//! request:   Opened ─headers─▶ Collecting ─end of body─▶ (decide) ─▶ Ended
//!               │                   └─ refused ─▶ Refused: all that follows is ignored
//!               └─headers that must be answered at once─▶ (decide) ─▶ Flowing ─end─▶ Ended
//! response:  Awaited ─headers─▶ Streaming ─end of body or trailers─▶ Ended (books closed)
//! ```
//!
//! Every stream ends for us as a reset or an early end, normal ends and aborts alike, so the end is judged by these states. A stream is
//! counted under exactly one [`Outcome`], on Drop at the latest.

use super::metadata;
use super::mode::{BodyMode, Modes};
use super::processor::Processor;
use super::reply::{self, Direction};
use super::uploads::{Evicted, Progress};
use attache_disagg::attempts::Attempt;
use attache_flow::Refusal;
use attache_picker::active::ActiveConfig;
use attache_picker::body::{Body, too_large};
use attache_picker::decide::{self, Plan, RequestView, Seen, Step};
use attache_picker::event::{End, Limit, NameObserver, Outcome};
use attache_picker::head::Head;
use attache_picker::queues::Turn;
use attache_picker::quotas::Allowance;
use attache_picker::response::Routed;
use attache_picker::split::LegResult;
use attache_picker::tenant::Tenant;
use attache_picker::warming::Warming;
use attache_protocol::{self as protocol, Api, BodyFormat};
use attache_scheduling::scheduler::Subset;
use attache_telemetry::trace::RequestSpan;
use attache_types::clock::Timestamp;
use attache_types::error::{Fault, Reason, RequestError};
use attache_types::rng::PickRng;
use envoy_types::pb::envoy::config::core::v3::Metadata;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request as Message;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    CommonResponse, HeaderMutation, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
};
use envoy_types::pb::google::protobuf::Struct;
use http::uri::Authority;
use parking::Parking;
use splitting::Splitting;
use std::borrow::Cow;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use warming::{Stood, Waits};

mod answering;
mod calling;
mod destination;
mod listing;
mod parking;
mod parting;
mod splitting;
mod uploading;
mod warming;

/// How long a STREAMED body may pause where it may be a whole JSON object, before it is decided on.
const PAUSE_AFTER_JSON: Duration = Duration::from_millis(50);
/// And where it can't be one.
const PAUSE: Duration = Duration::from_secs(1);

/// What happens to a stream.
#[derive(Debug)]
pub enum Event {
    /// Envoy said something.
    Message(Box<ProcessingRequest>),
    /// Envoy's message has so many bytes, more than [`Exchange::max_message_bytes`], and is discarded.
    TooLarge(u64),
    /// The upload that [`Exchange::upload`] reports is evicted.
    UploadEvicted(Evicted),
    /// The moment of [`Exchange::deadline`] has come.
    Deadline,
    /// What [`Exchange::warming`] gave has run.
    Warmed,
    /// What came of [`Exchange::waiting`].
    Turn(Option<Turn>),
    /// What came of [`Exchange::eviction`].
    Evicted(Refusal),
    /// What came of a question that [`Exchange::asks`] gave.
    LegResult(Attempt, LegResult),
}

/// A message that the protocol does not allow here. The stream ends with it; the request was not ours to save.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct ProtocolError(pub &'static str);

/// Answers, in the order in which they go out.
pub type Actions = VecDeque<ProcessingResponse>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestSide {
    Opened,
    Collecting,
    /// It waits for its turn.
    Parked,
    /// Decided; another server computes the prompt.
    Prefilling,
    Flowing,
    Ended,
    Refused,
    /// Envoy reads no answers.
    Observed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResponseSide {
    Awaited,
    Streaming,
    Ended,
}

/// How a request's body stands when it is decided on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Close {
    /// There may be more of it.
    Cut,
    /// It is here.
    Whole,
    /// It is here, and so is what it takes to read it.
    WholeAndWarm,
    /// It is here, and trailers follow.
    Trailers,
}

/// One request on its way through.
#[derive(Debug)]
pub struct Exchange {
    processor: Arc<Processor>,
    config: Arc<ActiveConfig>,
    /// The `:authority` by which the gateway has called.
    called: Option<Authority>,
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
    /// How much of a form had come when it was last read, bytes.
    form_read: u64,
    /// The client's connection to Envoy.
    connection: Option<u64>,
    span: Option<Box<RequestSpan>>,
    routed: Option<Box<Routed>>,
    outcome: Option<Outcome>,
    last_seen: Timestamp,
    waits: Waits,
    allowance: Allowance,
    /// Each time that it is decided again it draws the same, so that the model that it was counted for is the one that is served.
    rng: PickRng,
    split: Splitting,
    parking: Parking,
}

impl Exchange {
    /// A stream that Envoy has just opened.
    #[must_use]
    pub fn new(processor: Arc<Processor>, now: Timestamp) -> Self {
        processor.metrics.streams_opened.inc();
        let picker = &processor.picker;
        Self {
            config: picker.config(),
            called: None,
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
            form_read: 0,
            connection: None,
            span: None,
            routed: None,
            outcome: None,
            last_seen: now,
            waits: Waits::default(),
            allowance: Allowance::default(),
            rng: picker.next_rng(),
            split: Splitting::default(),
            parking: Parking::default(),
            processor,
        }
    }

    /// When [`Event::Deadline`] is due; `None` when Envoy's own timeouts guard what is left.
    #[must_use]
    pub fn deadline(&self) -> Option<Timestamp> {
        match self.request {
            RequestSide::Opened => Some(self.opened.after(self.config.limits.idle_timeout)),
            RequestSide::Collecting => {
                let end = self.opened.after(self.config.limits.request_timeout);
                [self.patience_ends(), self.upload_ends()].into_iter().flatten().chain([end]).min()
            }
            RequestSide::Queued => self.parking.deadline(),
            _ => self.split.deadline(),
        }
    }

    /// In STREAMED mode Envoy holds the request's trailers until every chunk is answered, so a request that ends in trailers never shows
    /// its end: after a pause, what has come is decided on. Long where the body can't be whole.
    fn patience_ends(&self) -> Option<Timestamp> {
        if self.modes().request != BodyMode::Streamed || self.body.messages() == 0 {
            return None;
        }
        let pause = if self.body.may_be_whole() { PAUSE_AFTER_JSON } else { PAUSE };
        Some(self.last_seen.after(pause))
    }

    /// Whether an endpoint has been named: what is left is the answer.
    #[must_use]
    pub fn is_routed(&self) -> bool {
        self.routed.is_some()
    }

    /// What the request's model had; `None` when none is known.
    #[must_use]
    pub fn model_counts(&self) -> Option<&dyn NameObserver> {
        self.routed.as_ref()?.model_counts()
    }

    /// How the stream is counted, once that is settled.
    #[must_use]
    pub fn outcome(&self) -> Option<Outcome> {
        self.outcome
    }

    /// Takes in one event; what must be said goes to `out`.
    ///
    /// # Errors
    /// On a message that the protocol does not allow here.
    pub fn on(&mut self, event: Event, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        match event {
            Event::Message(message) => {
                self.last_seen = now;
                return self.on_message(*message, now, out);
            }
            Event::TooLarge(bytes) => return self.on_too_large(bytes, now, out),
            Event::UploadEvicted(why) => return self.on_upload_evicted(why, now, out),
            Event::Deadline => return self.on_deadline(now, out),
            Event::Warmed => self.on_warmed(now, out),
            Event::Turn(turn) => self.on_turn(turn, now, out),
            Event::Evicted(refusal) => self.on_evicted(&refusal, now, out),
            Event::LegResult(attempt, told) => self.on_leg_result(attempt, &told, now, out),
        }
        Ok(())
    }

    fn on_message(&mut self, m: ProcessingRequest, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        if self.modes.is_none() {
            self.modes = Some(m.protocol_config.as_ref().map_or(Modes::UNSAID, Modes::of));
        }
        if m.observability_mode {
            self.request = RequestSide::Observed;
            self.settle(Outcome::Skipped);
        }
        if matches!(self.request, RequestSide::Refused | RequestSide::Observed) {
            return Ok(());
        }
        let Some(message) = m.request else { return Err(ProtocolError("message without content")) };
        match message {
            Message::RequestHeaders(h) => {
                self.connection = metadata::connection(&m.attributes);
                self.on_request_headers(h, m.metadata_context, &m.attributes, now, out)
            }
            Message::RequestBody(b) => self.on_request_body(b, m.metadata_context, now, out),
            Message::RequestTrailers(_) => self.on_request_trailers(now, out),
            Message::ResponseHeaders(h) => self.on_response_headers(h, m.metadata_context, m.attributes, now, out),
            Message::ResponseBody(b) => self.on_response_body(b, now, out),
            Message::ResponseTrailers(_) => self.on_response_trailers(now, out),
        }
    }

    fn modes(&self) -> Modes {
        self.modes.unwrap_or(Modes::UNSAID)
    }

    // === the request ===

    fn on_request_headers(
        &mut self,
        message: HttpHeaders,
        metadata: Option<Metadata>,
        attributes: &HashMap<String, Struct>,
        now: Timestamp,
        out: &mut Actions,
    ) -> Result<(), ProtocolError> {
        if self.request != RequestSide::Opened {
            return Err(ProtocolError("request headers twice"));
        }
        self.request = RequestSide::Collecting;
        self.take_subset(metadata.as_ref());
        self.head = Head::read(metadata::request_headers(message.headers));
        let claim = |namespace: &str, path: &[String]| metadata::claim(metadata.as_ref(), namespace, path);
        let tenant = Tenant::of(self.config.settings.tenant.as_ref(), &self.head, claim);
        self.head.belongs_to(tenant);
        self.head.identify_client(metadata::client_address(attributes));
        let (api, id) = Api::from_path(self.head.path());
        self.response_id = id.map(Cow::into_owned);
        self.api = api;
        self.span = self.processor.tracing.start(self.head.traceparent(), now).map(Box::new);
        if let Some(error) = self.refusal_by_headers() {
            self.refuse(&error, now, out);
            return Ok(());
        }
        if self.lists_models(now, out) {
            return Ok(());
        }
        let modes = self.modes();
        if message.end_of_stream || modes.headers_first() || self.head.is_upgrade() {
            self.decide_at_headers(message.end_of_stream, now, out);
        } else if modes.request == BodyMode::Buffered {
            // Envoy sends the body only after this; the destination goes with the answer to the body.
            out.push_back(reply::request_headers(CommonResponse::default()));
        }
        Ok(())
    }

    fn refusal_by_headers(&self) -> Option<RequestError> {
        let limits = &self.config.limits;
        if self.head.bytes() > limits.max_header_bytes as usize {
            self.processor.metrics.limit(Limit::HeaderBytes);
            let got = self.head.bytes();
            let allowed = limits.max_header_bytes;
            return Some(RequestError::new(
                Reason::HeadersTooLarge,
                format!("the request's headers are {got} bytes, {allowed} are allowed"),
            ));
        }
        let announced = self.head.content_length().filter(|l| *l > limits.max_body_bytes && !self.flows_through())?;
        self.processor.metrics.limit(Limit::BodyBytes);
        Some(too_large(announced, limits.max_body_bytes))
    }

    /// A form with a file: its model stands in front or not at all, so the file passes without being held.
    fn flows_through(&self) -> bool {
        let passes = matches!(self.modes().request, BodyMode::FullDuplex | BodyMode::Streamed);
        passes && self.api.body_format() == BodyFormat::Multipart
    }

    /// Whether enough of a form has come to decide on. It is read again only when twice as much of it has come, so that a form in tiny pieces
    /// costs no more than one in large ones.
    fn form_suffices(&mut self) -> bool {
        if !self.flows_through() || self.body.len() < 2 * self.form_read {
            return false;
        }
        self.form_read = self.body.len();
        let limits = &self.config.limits;
        if self.body.len() >= u64::from(limits.max_multipart_sniff_bytes) {
            return true;
        }
        let mut scratch = Vec::new();
        let body = self.body.contiguous(&mut scratch);
        protocol::parse(self.api, self.head.content_type(), body, limits).is_ok_and(|r| r.model.is_some())
    }

    fn take_subset(&mut self, metadata: Option<&Metadata>) {
        if self.subset.is_some() || self.config.settings.disable_endpoint_subset_filter {
            return;
        }
        if let Some((subset, malformed)) = metadata.and_then(metadata::subset) {
            self.processor.metrics.subset_malformed.inc_by(malformed);
            self.subset = Some(subset);
        }
    }

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
                self.on_parked_body(message, now, out);
                return Ok(());
            }
            RequestSide::Refused | RequestSide::Observed => return Ok(()),
            RequestSide::Flowing => {
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
        self.collect(message.body, now);
        if let Some(error) = self.refusal_by_size(now) {
            self.refuse(&error, now, out);
        } else if complete || modes.request == BodyMode::Buffered || self.form_suffices() {
            self.decide_on_body(if complete { Close::Whole } else { Close::Cut }, now, out);
        }
        Ok(())
    }

    fn on_request_trailers(&mut self, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        match self.request {
            RequestSide::Opened => return Err(ProtocolError("request trailers before request headers")),
            RequestSide::Collecting => self.decide_on_body(Close::Trailers, now, out),
            RequestSide::Flowing | RequestSide::Ended => self.pass_trailers(out),
            RequestSide::Queued => self.parking.ends(Close::Trailers),
            // The body had its end: what comes after it is Envoy's to send on.
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
        // A POST that ends with its headers has an empty body, and the parser has the word; a GET has none.
        let empty_body = end_of_stream && self.head.method() == "POST" && self.api.body_format() == BodyFormat::Json;
        let stood = Stood::Headers(end_of_stream);
        match self.decide(if empty_body { Seen::Whole(&[]) } else { Seen::Nothing }, stood, now) {
            Err(error) => self.refuse(&error, now, out),
            Ok(Step::Allow(asking)) => self.wait(asking, stood),
            Ok(Step::Park(parked)) => self.park(parked, stood),
            // Without a body there is nothing to read.
            Ok(Step::Warm(..)) => {}
            Ok(Step::Decided(plan)) => {
                let (response, metadata) = self.destination(&plan);
                out.push_back(ProcessingResponse { dynamic_metadata: metadata, ..reply::request_headers(response) });
                let body_comes = !end_of_stream && self.modes().request != BodyMode::None;
                self.begin_routed(*plan, now);
                self.request = if body_comes { RequestSide::Flowing } else { RequestSide::Ended };
                // What has come while it waited for its turn.
                reply::stream_body(self.body.take(), false, out);
            }
        }
    }

    /// The request is here as far as it will come: decides and answers in the mode's own way.
    fn decide_on_body(&mut self, close: Close, now: Timestamp, out: &mut Actions) {
        let mut scratch = Vec::new();
        let body = std::mem::replace(&mut self.body, Body::new(&self.processor.picker.buffered));
        let bytes = body.contiguous(&mut scratch);
        if self.api == Api::Other && self.head.lacks_path() {
            self.api = Api::from_body(bytes);
            self.head.assume_path(self.api.usual_path());
        }
        let seen = if close == Close::Cut { Seen::Head(bytes) } else { Seen::Whole(bytes) };
        match self.decide(seen, Stood::Body(close), now) {
            Err(error) => self.refuse(&error, now, out),
            Ok(Step::Warm(warming, turn)) => {
                self.parking.keep(turn);
                self.body = body;
                self.wait(warming, Stood::Body(Close::WholeAndWarm));
            }
            Ok(Step::Allow(asking)) => {
                self.body = body;
                self.wait(asking, Stood::Body(close));
            }
            Ok(Step::Park(parked)) => {
                self.body = body;
                self.park(parked, Stood::Body(close));
            }
            Ok(Step::Decided(plan)) if plan.is_split() => self.begin_split(plan, body, close, now, out),
            Ok(Step::Decided(plan)) => self.go_on(plan, body, close, now, out),
        }
    }

    /// The request goes to its endpoint, its body answered in the mode's own way.
    fn go_on(&mut self, mut plan: Box<Plan>, body: Body, close: Close, now: Timestamp, out: &mut Actions) {
        let complete = close != Close::Cut;
        let (response, dynamic_metadata) = self.destination(&plan);
        let new_body = plan.new_body.take();
        let mode = self.modes().request;
        if mode == BodyMode::Buffered {
            out.push_back(ProcessingResponse { dynamic_metadata, ..reply::buffered_body(response, new_body) });
        } else {
            let head = ProcessingResponse { dynamic_metadata, ..reply::request_headers(response) };
            reply::forward(mode, head, body, new_body, complete && close != Close::Trailers, out);
        }
        let ended = complete || mode == BodyMode::Buffered;
        self.begin_routed(*plan, now);
        self.request = if ended { RequestSide::Ended } else { RequestSide::Flowing };
        if close == Close::Trailers {
            self.pass_trailers(out);
        }
    }

    /// On what is seen of the body of a request that stands like this.
    fn decide(&mut self, body: Seen<'_>, stood: Stood, now: Timestamp) -> Result<Step, RequestError> {
        // Envoy's clock runs in the other modes.
        let may_wait = self.modes().request == BodyMode::FullDuplex;
        let is_whole = matches!(stood, Stood::Body(Close::Whole | Close::WholeAndWarm));
        let question = RequestView {
            head: &self.head,
            called: calling::name(&self.called),
            api: self.api,
            response_id: self.response_id.as_deref(),
            subset: self.subset.as_ref(),
            body,
            now,
            opened: self.opened,
            // What ends in trailers or is cut has been read already, or can't be waited for.
            last: !matches!(stood, Stood::Body(Close::Whole)),
            made: self.waits.made.as_deref(),
            may_split: may_wait && is_whole,
            may_wait,
            opens: matches!(stood, Stood::Headers(false)),
            has_turn: self.parking.has_turn(),
        };
        let rng = &mut self.rng.clone();
        let mut step = decide::decide(&self.processor.picker, &self.config, &question, &mut self.allowance, rng);
        if let Ok(Step::Decided(plan)) = &mut step {
            self.waits.made = None;
            plan.permits = self.allowance.take();
            plan.admitted = self.parking.take_turn().or(plan.admitted.take());
            plan.admitted.iter_mut().for_each(|admitted| self.parking.landed(admitted));
        }
        step
    }

    fn refuse(&mut self, error: &RequestError, now: Timestamp, out: &mut Actions) {
        self.request = RequestSide::Refused;
        self.body = Body::new(&self.processor.picker.buffered);
        self.abandon_split();
        // Whoever is next need not wait until Envoy has closed this stream.
        self.parking = Parking::default();
        self.allowance = Allowance::default();
        self.settle(match error.reason.fault() {
            Fault::Client | Fault::Tenant => Outcome::Rejected,
            Fault::Upstream | Fault::Overload => Outcome::Shed,
            Fault::Internal => Outcome::FailedInternal,
        });
        self.processor.metrics.rejection(error.reason);
        tracing::debug!(reason = error.reason.code(), message = %error.message, path = self.head.path(), "request rejected");
        if let Some(span) = self.span.take() {
            span.end(error.reason.status(), None, now);
        }
        out.push_back(reply::refuse(error, self.api.dialect()));
    }

    fn on_deadline(&mut self, now: Timestamp, out: &mut Actions) -> Result<(), ProtocolError> {
        match self.request {
            RequestSide::Opened => {
                self.processor.metrics.limit(Limit::IdleTimeout);
                return Err(ProtocolError("stream opened and nothing sent within the idle timeout"));
            }
            RequestSide::Collecting if now < self.opened.after(self.config.limits.request_timeout) => {
                if self.patience_ends().is_some_and(|at| at <= now) {
                    self.decide_on_body(Close::Cut, now, out);
                } else if let Some(error) = self.refusal_by_speed(now) {
                    self.refuse(&error, now, out);
                }
            }
            RequestSide::Collecting => {
                self.processor.metrics.limit(Limit::RequestTimeout);
                let allowed = self.config.limits.request_timeout.as_secs_f64();
                let message = format!("the request's body did not end within {allowed} s");
                self.refuse(&RequestError::new(Reason::RequestTimeout, message), now, out);
            }
            RequestSide::Queued => self.on_parked_deadline(now, out),
            _ => self.on_split_deadline(now, out),
        }
        Ok(())
    }

    fn settle(&mut self, outcome: Outcome) {
        self.outcome.get_or_insert(outcome);
    }
}

/// The stream is gone, however that came: whatever was open is closed and counted.
impl Drop for Exchange {
    fn drop(&mut self) {
        self.leave();
        self.processor.metrics.outcome(self.outcome.unwrap_or(Outcome::ClientAborted));
    }
}

#[cfg(test)]
mod tests;
