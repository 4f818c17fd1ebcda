//! Spans of OpenTelemetry's SDK.

mod attributes;

use super::{Received, Step, TraceContexts};
use attache_pool::Endpoint;
use attache_request::event::{DecisionRecord, DecisionTrace, Exemplar, RequestTrace};
use attache_types::clock::{Clock, Timestamp};
use attributes::Reach;
use opentelemetry::trace::{
    Span, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer,
};
use opentelemetry::{Context, KeyValue};
use opentelemetry_sdk::trace::{
    IdGenerator, RandomIdGenerator, Sampler, SamplingDecision, SdkTracer, ShouldSample, Span as SdkSpan,
};
use parking_lot::Mutex;
use std::sync::Arc;

/// The name of a request's span until its end, when its operation and its model are known.
const UNNAMED: &str = "request";
const PREFILL: &str = "prefill";
const DECISION: &str = "decision";
const LOOKUP: &str = "lookup";

/// Creates spans, or nothing if traces are off.
#[derive(Debug, Default)]
pub struct Tracing(Option<Source>);

#[derive(Clone, Debug)]
struct Source {
    tracer: SdkTracer,
    /// Decides on requests whose caller has not.
    sampler: Sampler,
    /// Converts times to wall time.
    clock: Clock,
}

impl Source {
    fn span(&self, name: &'static str, kind: SpanKind, parent: &Context, start: Timestamp) -> SdkSpan {
        let builder = self.tracer.span_builder(name).with_kind(kind).with_start_time(self.clock.wall(start));
        self.tracer.build_with_context(builder, parent)
    }

    fn end(&self, mut span: SdkSpan, end: Timestamp) {
        span.end_with_timestamp(self.clock.wall(end));
    }

    /// The context of a request whose caller has not decided; `None` if it is sampled.
    ///
    /// Most requests of a traced picker are not sampled, and a span of the SDK costs them more than all the rest of it.
    fn unsampled(&self) -> Option<W3cContext> {
        let ids = RandomIdGenerator::default();
        let trace = ids.new_trace_id();
        let result = self.sampler.should_sample(None, trace, UNNAMED, &SpanKind::Server, &[], &[]);
        let is_sampled = result.decision == SamplingDecision::RecordAndSample;
        (!is_sampled).then(|| W3cContext { trace, span: ids.new_span_id(), flags: TraceFlags::default() })
    }
}

impl Tracing {
    /// Creates spans with `tracer`, which samples all that has no parent. `ratio` is the fraction of requests that are
    /// sampled if their caller has not decided, 0 to 1. `clock` converts times to wall time.
    #[must_use]
    pub fn new(tracer: SdkTracer, ratio: f64, clock: Clock) -> Self {
        Self(Some(Source { tracer, sampler: Sampler::TraceIdRatioBased(ratio), clock }))
    }

    /// Starts the span of a request that came with these contexts; `None` if traces are off.
    #[must_use]
    pub fn start(&self, contexts: TraceContexts<'_>, now: Timestamp) -> Option<RequestSpan> {
        let source = self.0.as_ref()?;
        let of_gateway = contexts.gateway.and_then(parse);
        let is_sent = of_gateway.is_none();
        let parent = of_gateway.or_else(|| contexts.request.and_then(parse));
        if let Some(parent) = parent.as_ref().filter(|parent| !parent.is_sampled()) {
            return Some(RequestSpan::Unsampled { context: W3cContext::of(parent), is_sent });
        }
        let parent = match parent {
            Some(parent) => Context::new().with_remote_span_context(parent),
            None => match source.unsampled() {
                Some(context) => return Some(RequestSpan::Unsampled { context, is_sent: false }),
                None => Context::new(),
            },
        };
        let span = source.span(UNNAMED, SpanKind::Server, &parent, now);
        let context = span.span_context();
        // After the shutdown of the exporter, spans have no id.
        if !context.is_valid() {
            return None;
        }
        let children = Context::new().with_remote_span_context(context.clone());
        let sampled =
            SampledSpan { span, children, step: None, since: now, reach: Reach::default(), source: source.clone() };
        Some(RequestSpan::Sampled(Box::new(sampled)))
    }
}

/// Each byte in hexadecimal.
#[expect(clippy::indexing_slicing, reason = "checked at compile time")]
const HEX: [[u8; 2]; 256] = {
    let (mut pairs, mut byte) = ([[0; 2]; 256], 0);
    while byte < 256 {
        pairs[byte] = [b"0123456789abcdef"[byte >> 4], b"0123456789abcdef"[byte & 15]];
        byte += 1;
    }
    pairs
};

/// Writes bytes in hexadecimal.
#[expect(clippy::indexing_slicing, reason = "each byte has an entry")]
fn write_hex(to: &mut [u8], bytes: &[u8]) {
    let (pairs, _) = to.as_chunks_mut();
    for (pair, byte) in pairs.iter_mut().zip(bytes) {
        *pair = HEX[usize::from(*byte)];
    }
}

/// The part of a span's context that `traceparent` has.
#[derive(Clone, Copy, Debug)]
pub struct W3cContext {
    trace: TraceId,
    span: SpanId,
    flags: TraceFlags,
}

impl W3cContext {
    fn of(context: &SpanContext) -> Self {
        Self { trace: context.trace_id(), span: context.span_id(), flags: context.trace_flags() }
    }

    /// The value of the header. Most requests of a traced picker get one, and `format!` takes ten times as long.
    fn traceparent(self) -> String {
        let mut text: [u8; TRACEPARENT_BYTES] = *b"00-________________________________-________________-__";
        let (trace, span) = (self.trace.to_bytes(), self.span.to_bytes());
        write_hex(&mut text[3..35], &trace);
        write_hex(&mut text[36..52], &span);
        write_hex(&mut text[53..], &[self.flags.to_u8()]);
        String::from_utf8(text.to_vec()).unwrap_or_default()
    }
}

/// The trace of one request.
#[derive(Debug)]
pub enum RequestSpan {
    /// The request is not sampled, so nothing is recorded of it.
    Unsampled {
        /// The context that the model server gets.
        context: W3cContext,
        /// The request has it in its headers already.
        is_sent: bool,
    },
    /// The request is sampled.
    Sampled(Box<SampledSpan>),
}

impl RequestSpan {
    /// Whether spans of the request are recorded.
    #[must_use]
    pub fn is_sampled(&self) -> bool {
        matches!(self, Self::Sampled(_))
    }

    /// The `traceparent` header for the model server; `None` if the request has the right one.
    #[must_use]
    pub fn header(&self) -> Option<String> {
        match self {
            Self::Unsampled { is_sent: true, .. } => None,
            Self::Unsampled { context, is_sent: false } => Some(context.traceparent()),
            Self::Sampled(sampled) => Some(W3cContext::of(sampled.span.span_context()).traceparent()),
        }
    }

    /// The request has this method and this path.
    pub fn received(&mut self, request: Received<'_>) {
        if let Self::Sampled(sampled) = self {
            sampled.reach.method = request.method.to_owned();
            sampled.span.set_attributes(attributes::received(request));
        }
    }

    /// The step before ends at `now`, and this one begins.
    pub fn enter(&mut self, step: Step, now: Timestamp) {
        if let Self::Sampled(sampled) = self {
            sampled.enter(step, now);
        }
    }

    /// Times the steps of a decision; `None` if the request is not sampled.
    #[must_use]
    pub fn times(&self) -> Option<DecisionTimes> {
        let Self::Sampled(sampled) = self else { return None };
        let clock = sampled.source.clock;
        Some(DecisionTimes { clock, noted: Mutex::default() })
    }

    /// The decision that began at `began` is made.
    pub fn decided(&mut self, times: DecisionTimes, began: Timestamp) {
        if let Self::Sampled(sampled) = self {
            sampled.decided(times, began);
        }
    }

    /// Begins the span of a call to a prefill server; `None` if the request is not sampled.
    #[must_use]
    pub fn prefill(&self, now: Timestamp) -> Option<PrefillSpan> {
        let Self::Sampled(sampled) = self else { return None };
        let began = now.max(sampled.since);
        let span = sampled.source.span(PREFILL, SpanKind::Client, &sampled.children, began);
        Some(PrefillSpan { span, began, source: sampled.source.clone() })
    }

    /// The trace of a routed request; `None` if it is not sampled.
    #[must_use]
    pub fn sampled(self) -> Option<Box<dyn RequestTrace>> {
        match self {
            Self::Unsampled { .. } => None,
            Self::Sampled(sampled) => Some(sampled),
        }
    }

    /// Ends the span of a request that no endpoint got.
    pub fn end_unrouted(self, record: &DecisionRecord) {
        if let Self::Sampled(sampled) = self {
            sampled.end_with(record, None);
        }
    }
}

/// The spans of a sampled request.
#[derive(Debug)]
pub struct SampledSpan {
    span: SdkSpan,
    /// The parent of the steps: `span`.
    children: Context,
    /// The step that has not ended.
    step: Option<SdkSpan>,
    /// The end of the step before. The next one does not begin earlier.
    since: Timestamp,
    reach: Reach,
    source: Source,
}

impl SampledSpan {
    fn enter(&mut self, step: Step, now: Timestamp) {
        self.leave(now);
        self.step = Some(self.source.span(step.name(), SpanKind::Internal, &self.children, self.since));
    }

    fn leave(&mut self, now: Timestamp) {
        self.since = self.since.max(now);
        if let Some(step) = self.step.take() {
            self.source.end(step, self.since);
        }
    }

    fn decided(&mut self, times: DecisionTimes, began: Timestamp) {
        self.leave(began);
        let decision = self.source.span(DECISION, SpanKind::Internal, &self.children, self.since);
        let Noted { entered, lookup, .. } = times.noted.into_inner();
        if let Some((begin, end)) = lookup {
            let parent = Context::new().with_remote_span_context(decision.span_context().clone());
            self.source.end(self.source.span(LOOKUP, SpanKind::Internal, &parent, begin.max(self.since)), end);
        }
        self.since = self.since.max(self.source.clock.now());
        self.source.end(decision, self.since);
        if let Some((pool, model)) = entered {
            (self.reach.pool, self.reach.model) = (pool, model);
        }
    }

    fn end_with(mut self, record: &DecisionRecord, served: Option<&Endpoint>) {
        self.leave(record.ended);
        self.span.update_name(self.reach.name(record));
        self.span.set_attributes(self.reach.ended(record, served));
        if attributes::is_error(record) {
            self.span.set_status(Status::error(attributes::description(record)));
        }
        self.source.end(self.span, self.since);
    }
}

impl RequestTrace for SampledSpan {
    fn exemplar(&self, now: Timestamp) -> Exemplar {
        let trace_id = self.span.span_context().trace_id().to_bytes();
        Exemplar { trace_id, at: self.source.clock.wall(now) }
    }

    fn first_byte(&mut self, now: Timestamp) {
        self.enter(Step::Response, now);
    }

    fn end(self: Box<Self>, record: &DecisionRecord, served: &Endpoint) {
        self.end_with(record, Some(served));
    }
}

/// The times of one decision, by the real clock.
#[derive(Debug)]
pub struct DecisionTimes {
    clock: Clock,
    noted: Mutex<Noted>,
}

#[derive(Debug, Default)]
struct Noted {
    /// The pool, and the model name that the model server will get.
    entered: Option<(Arc<str>, Arc<str>)>,
    lookup_began: Option<Timestamp>,
    /// Begin and end.
    lookup: Option<(Timestamp, Timestamp)>,
}

impl DecisionTrace for DecisionTimes {
    fn entered(&self, pool: &Arc<str>, model: &Arc<str>) {
        self.noted.lock().entered = Some((pool.clone(), model.clone()));
    }

    fn lookup_begins(&self) {
        self.noted.lock().lookup_began = Some(self.clock.now());
    }

    fn lookup_ends(&self) {
        let mut noted = self.noted.lock();
        noted.lookup = noted.lookup_began.take().map(|began| (began, self.clock.now()));
    }
}

/// The span of a call to a prefill server.
#[derive(Debug)]
pub struct PrefillSpan {
    span: SdkSpan,
    began: Timestamp,
    source: Source,
}

impl PrefillSpan {
    /// The context for the prefill server, as a `traceparent` header.
    #[must_use]
    pub fn traceparent(&self) -> String {
        W3cContext::of(self.span.span_context()).traceparent()
    }

    /// The call has ended. `server`: the one that computed the prompt; `failure`: why none did.
    pub fn end(mut self, server: Option<&Endpoint>, failure: Option<&'static str>, now: Timestamp) {
        self.span.set_attributes(server.into_iter().flat_map(attributes::server));
        if let Some(failure) = failure {
            self.span.set_attribute(KeyValue::new(attributes::ERROR_TYPE, failure));
            self.span.set_status(Status::error(failure));
        }
        self.source.end(self.span, now.max(self.began));
    }
}

/// The parent that a `traceparent` header names; `None` if it is malformed.
#[must_use]
pub fn parent_context(traceparent: &str) -> Option<Context> {
    Some(Context::new().with_remote_span_context(parse(traceparent)?))
}

/// Length of a `traceparent` of version 00.
const TRACEPARENT_BYTES: usize = 55;

/// By W3C Trace Context: `00-<trace>-<span>-<flags>`. Later versions may append fields. Requests that are not sampled pay for
/// this too, so that it reads hexadecimal digits by a table.
fn parse(traceparent: &str) -> Option<SpanContext> {
    let (fields, rest) = traceparent.trim().as_bytes().split_first_chunk::<TRACEPARENT_BYTES>()?;
    let [version] = read_hex(&fields[..2])?;
    let is_whole = match version {
        0 => rest.is_empty(),
        255 => false,
        _ => rest.is_empty() || rest.starts_with(b"-"),
    };
    if !is_whole || [fields[2], fields[35], fields[52]] != *b"---" {
        return None;
    }
    let (trace, span) =
        (TraceId::from_bytes(read_hex(&fields[3..35])?), SpanId::from_bytes(read_hex(&fields[36..52])?));
    let [flags] = read_hex(&fields[53..])?;
    let context = SpanContext::new(trace, span, TraceFlags::new(flags), true, TraceState::default());
    context.is_valid().then_some(context)
}

/// The value of each byte as a hexadecimal digit; 255 for others.
#[expect(clippy::indexing_slicing, reason = "checked at compile time")]
const DIGITS: [u8; 256] = {
    let (mut values, mut digit) = ([255; 256], 0);
    while digit < 16 {
        values[b"0123456789abcdef"[digit] as usize] = digit as u8;
        values[b"0123456789ABCDEF"[digit] as usize] = digit as u8;
        digit += 1;
    }
    values
};

/// The bytes that `text` has in hexadecimal.
#[expect(clippy::indexing_slicing, reason = "each byte has an entry")]
fn read_hex<const N: usize>(text: &[u8]) -> Option<[u8; N]> {
    let (mut bytes, mut all) = ([0; N], 0);
    let (pairs, _) = text.as_chunks();
    for (byte, pair) in bytes.iter_mut().zip(pairs) {
        let [high, low] = pair.map(|digit: u8| DIGITS[usize::from(digit)]);
        *byte = high << 4 | low & 15;
        all |= high | low;
    }
    (pairs.len() == N && all < 16).then_some(bytes)
}

#[cfg(test)]
mod tests;
