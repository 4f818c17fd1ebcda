//! The trace of an exchange: which step begins when. Requests that are not sampled have no steps.

use super::Exchange;
use attache_picker::decide::Step;
use attache_picker::event::DecisionRecord;
use attache_telemetry::trace::{DecisionTimes, Received, RequestSpan, Step as TraceStep, TraceContexts};
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;

impl Exchange {
    /// Begins the trace. The context of the gateway's own span outranks the client's: that span is a child of it.
    pub(super) fn begin_trace(&mut self, now: Timestamp) {
        let contexts = TraceContexts { gateway: self.call.traceparent(), request: self.head.traceparent() };
        self.span = self.processor.tracing.start(contexts, now);
        if let Some(span) = &mut self.span {
            span.received(Received { method: self.head.method(), path: self.head.path() });
        }
    }

    /// The step before ends, and this one begins.
    pub(super) fn enter_step(&mut self, step: TraceStep, now: Timestamp) {
        if let Some(span) = &mut self.span {
            span.enter(step, now);
        }
    }

    /// An attempt at the decision, which began at `now`, has this outcome.
    pub(super) fn trace_decision(&mut self, times: DecisionTimes, step: &Result<Step, RequestError>, now: Timestamp) {
        let Some(span) = &mut self.span else { return };
        match step {
            Ok(Step::Warm(..)) => span.enter(TraceStep::Tokens, now),
            Ok(Step::Allow(_)) => span.enter(TraceStep::Quota, now),
            Ok(Step::Queue(_)) => span.enter(TraceStep::Queue, now),
            Ok(Step::Decided(_)) | Err(_) => span.decided(times, now),
        }
    }

    /// Ends the trace of a request that no endpoint gets.
    pub(super) fn end_trace(&mut self, now: Timestamp, record: impl FnOnce(&Self) -> DecisionRecord) {
        let Some(span) = self.span.take().filter(RequestSpan::is_sampled) else { return };
        self.split.abandon_trace(now);
        span.end_unrouted(&record(self));
    }
}
