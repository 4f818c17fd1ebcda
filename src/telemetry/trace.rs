//! One span for each request, a child of the W3C context in its headers; the model server gets the context of the span.
//!
//! Off unless a collector is configured. A request that is not sampled costs one random number.
//! The exporter is in `otlp`.

#[cfg(feature = "otlp")]
mod on {
    use attache_types::clock::{Clock, Timestamp};
    use opentelemetry::trace::{
        Span, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId, TraceState, Tracer,
    };
    use opentelemetry::{Context, KeyValue};
    use opentelemetry_sdk::trace::{SdkTracer, Span as SdkSpan};

    /// Creates spans, or nothing if traces are off.
    #[derive(Debug, Default)]
    pub struct Tracing(Option<(SdkTracer, Clock)>);

    impl Tracing {
        /// Creates spans with `tracer`; `clock` converts times to wall time.
        #[must_use]
        pub fn new(tracer: SdkTracer, clock: Clock) -> Self {
            Self(Some((tracer, clock)))
        }

        /// Starts the span of a request with this `traceparent`; `None` if traces are off.
        #[must_use]
        pub fn start(&self, traceparent: Option<&str>, now: Timestamp) -> Option<RequestSpan> {
            let (tracer, clock) = self.0.as_ref()?;
            let parent = traceparent
                .and_then(parse)
                .map_or_else(Context::new, |remote| Context::new().with_remote_span_context(remote));
            let builder =
                tracer.span_builder("gateway.request").with_kind(SpanKind::Server).with_start_time(clock.wall(now));
            Some(RequestSpan { span: tracer.build_with_context(builder, &parent), clock: *clock })
        }
    }

    /// The span of one request; ends at the latest on Drop.
    #[derive(Debug)]
    pub struct RequestSpan {
        span: SdkSpan,
        clock: Clock,
    }

    impl RequestSpan {
        /// The context for the model server, as a `traceparent` header.
        #[must_use]
        pub fn traceparent(&self) -> String {
            let cx = self.span.span_context();
            format!("00-{}-{}-{:02x}", cx.trace_id(), cx.span_id(), cx.trace_flags().to_u8())
        }

        /// Records the chosen endpoint and the reason.
        pub fn decided(&mut self, model: &str, endpoint: &str, reason: &'static str, now: Timestamp) {
            if self.span.is_recording() {
                self.span.set_attribute(KeyValue::new("gen_ai.request.model", model.to_owned()));
                self.span.set_attribute(KeyValue::new("attache.endpoint", endpoint.to_owned()));
                let why = vec![KeyValue::new("attache.reason", reason)];
                self.span.add_event_with_timestamp("attache.decided", self.clock.wall(now), why);
            }
        }

        /// Records the first byte of the response.
        pub fn first_byte(&mut self, now: Timestamp) {
            if self.span.is_recording() {
                self.span.add_event_with_timestamp("attache.first_byte", self.clock.wall(now), Vec::new());
            }
        }

        /// Records a rejection, or the end of the response.
        pub fn end(mut self, status: u16, completion_tokens: Option<u64>, now: Timestamp) {
            if self.span.is_recording() {
                self.span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status)));
                if let Some(tokens) = completion_tokens.and_then(|t| i64::try_from(t).ok()) {
                    self.span.set_attribute(KeyValue::new("gen_ai.usage.output_tokens", tokens));
                }
                if status >= 500 {
                    self.span.set_status(Status::error(""));
                }
            }
            self.span.end_with_timestamp(self.clock.wall(now));
        }
    }

    fn parse(traceparent: &str) -> Option<SpanContext> {
        let mut parts = traceparent.trim().split('-');
        let version = parts.next().filter(|v| v.len() == 2 && *v != "ff")?;
        let trace_id = parts.next().filter(|t| t.len() == 32).and_then(|t| TraceId::from_hex(t).ok())?;
        let span_id = parts.next().filter(|s| s.len() == 16).and_then(|s| SpanId::from_hex(s).ok())?;
        let flags = parts.next().filter(|f| f.len() == 2).and_then(|f| u8::from_str_radix(f, 16).ok())?;
        if version == "00" && parts.next().is_some() {
            return None;
        }
        let context = SpanContext::new(trace_id, span_id, TraceFlags::new(flags), true, TraceState::default());
        context.is_valid().then_some(context)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn a_span_continues_the_trace_of_the_request() {
            let provider = opentelemetry_sdk::trace::SdkTracerProvider::builder().build();
            let tracer = opentelemetry::trace::TracerProvider::tracer(&provider, "test");
            let tracing = Tracing::new(tracer, Clock::start());
            let got = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
            let span = tracing.start(Some(got), Timestamp(5)).unwrap();
            let sent = span.traceparent();
            assert_eq!(sent[..36], got[..36], "same trace");
            assert_ne!(sent[36..52], got[36..52], "another span");
            assert_eq!(sent.len(), got.len());
        }

        #[test]
        fn a_malformed_context_starts_a_new_trace() {
            let ok = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
            assert!(parse(ok).is_some());
            let zero = "00-00000000000000000000000000000000-00f067aa0ba902b7-01";
            for bad in [
                "",
                "00",
                "ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                zero,
                "00-zz-00-00",
                &format!("{ok}-x"),
            ] {
                assert!(parse(bad).is_none(), "{bad}");
            }
        }
    }
}

#[cfg(not(feature = "otlp"))]
mod off {
    use attache_types::clock::Timestamp;

    /// Creates no spans: built without the feature `otlp`.
    #[derive(Debug, Default)]
    pub struct Tracing(());

    impl Tracing {
        /// A tracer without spans.
        #[must_use]
        pub fn start(&self, _: Option<&str>, _: Timestamp) -> Option<RequestSpan> {
            None
        }
    }

    /// A span that can't exist without the feature `otlp`.
    #[derive(Debug)]
    pub enum RequestSpan {}

    impl RequestSpan {
        /// Can't be called, since no span exists.
        #[must_use]
        pub fn traceparent(&self) -> String {
            match *self {}
        }

        /// Can't be called, since no span exists.
        pub fn decided(&mut self, _: &str, _: &str, _: &'static str, _: Timestamp) {
            match *self {}
        }

        /// Can't be called, since no span exists.
        pub fn first_byte(&mut self, _: Timestamp) {
            match *self {}
        }

        /// Can't be called, since no span exists.
        pub fn end(self, _: u16, _: Option<u64>, _: Timestamp) {
            match self {}
        }
    }
}

#[cfg(not(feature = "otlp"))]
pub use off::{RequestSpan, Tracing};
#[cfg(feature = "otlp")]
pub use on::{RequestSpan, Tracing};
