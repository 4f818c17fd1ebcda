use super::*;
use attache_pool::{EndpointSpec, Engine};
use attache_request::event::{End, REJECTED};
use attache_types::ids::EndpointId;
use opentelemetry::trace::TracerProvider;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{SdkTracerProvider, SpanData, SpanExporter};
use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const SAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const UNSAMPLED: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

#[derive(Clone, Debug, Default)]
struct Exported(Arc<Mutex<Vec<SpanData>>>);

impl SpanExporter for Exported {
    fn export(&self, batch: Vec<SpanData>) -> impl Future<Output = OTelSdkResult> + Send {
        self.0.lock().unwrap().extend(batch);
        std::future::ready(Ok(()))
    }
}

struct Fixture {
    tracing: Tracing,
    clock: Clock,
    exported: Exported,
}

/// A tracer that samples this fraction of the requests whose caller has not decided.
fn fixture(ratio: f64) -> Fixture {
    let (exported, clock) = (Exported::default(), Clock::start());
    let provider = SdkTracerProvider::builder().with_simple_exporter(exported.clone()).build();
    Fixture { tracing: Tracing::new(provider.tracer("test"), ratio, clock), clock, exported }
}

impl Fixture {
    fn start(&self, traceparent: &str) -> RequestSpan {
        let contexts = TraceContexts { request: Some(traceparent), ..TraceContexts::default() };
        let mut span = self.tracing.start(contexts, at(0)).unwrap();
        span.received(Received { method: "POST", path: "/v1/chat/completions?key=secret" });
        span
    }

    fn spans(&self) -> BTreeMap<String, SpanData> {
        let spans = self.exported.0.lock().unwrap().clone();
        spans.into_iter().map(|span| (span.name.to_string(), span)).collect()
    }
}

/// So many milliseconds after the request.
fn at(ms: u64) -> Timestamp {
    Timestamp(5_000_000_000 + ms * 1_000_000)
}

fn endpoint() -> Endpoint {
    let spec = EndpointSpec { engine: Engine::Sglang, ..EndpointSpec::at(([10, 0, 0, 7], 8000).into()) };
    Endpoint::new(EndpointId(3), spec)
}

fn record() -> DecisionRecord {
    DecisionRecord {
        ended: at(900),
        request_id: "r-1".into(),
        api: "chat_completions",
        pool: "chat".into(),
        model: "qwen".into(),
        endpoint: "10.0.0.7:8000".into(),
        strategy: "predicted-latency".into(),
        reason: "lowest_cost",
        queued_ms: Some(40.0),
        estimated_prompt_tokens: 1_000,
        estimated_cached_tokens: 800,
        predicted_ttft_ms: Some(250.0),
        status: 200,
        ttft_ms: Some(300.0),
        prompt_tokens: Some(1_010),
        cached_tokens: Some(790),
        completion_tokens: Some(64),
        end: End::Complete.label(),
        ..DecisionRecord::default()
    }
}

fn attributes(span: &SpanData) -> BTreeMap<&str, String> {
    span.attributes.iter().map(|pair| (pair.key.as_str(), pair.value.to_string())).collect()
}

/// The begin and the end of a span, milliseconds after the request.
fn times(fixture: &Fixture, span: &SpanData) -> (u128, u128) {
    let since = |wall: SystemTime| wall.duration_since(fixture.clock.wall(at(0))).unwrap_or(Duration::ZERO).as_millis();
    (since(span.start_time), since(span.end_time))
}

#[test]
fn steps_follow_each_other_within_the_request() {
    let fixture = fixture(0.0);
    let mut span = fixture.start(SAMPLED);
    span.enter(Step::Body, at(0));
    span.enter(Step::Tokens, at(10));
    span.enter(Step::Queue, at(30));
    let times_of_decision = span.times().unwrap();
    times_of_decision.lookup_begins();
    times_of_decision.lookup_ends();
    span.decided(times_of_decision, at(70));
    span.enter(Step::FirstByte, at(70));
    let mut trace = span.sampled().unwrap();
    trace.first_byte(at(300));
    trace.end(&record(), &endpoint());
    let spans = fixture.spans();
    let request = &spans["chat qwen"];
    assert_eq!(request.parent_span_id.to_string(), "00f067aa0ba902b7");
    assert_eq!((request.span_kind.clone(), times(&fixture, request)), (SpanKind::Server, (0, 900)));
    for (name, expected) in [
        ("body", (0, 10)),
        ("tokens", (10, 30)),
        ("queue", (30, 70)),
        ("response", (300, 900)),
        ("first_byte", (70, 300)),
    ] {
        let step = &spans[name];
        assert_eq!(step.parent_span_id, request.span_context.span_id(), "{name}");
        assert_eq!(step.span_context.trace_id().to_string(), TRACE);
        assert_eq!(times(&fixture, step), expected, "{name}");
    }
    let (decision, lookup) = (&spans["decision"], &spans["lookup"]);
    assert_eq!(decision.parent_span_id, request.span_context.span_id());
    assert_eq!(lookup.parent_span_id, decision.span_context.span_id());
    assert_eq!(times(&fixture, decision).0, 70);
}

#[test]
fn attributes_follow_the_conventions() {
    let fixture = fixture(0.0);
    let trace = fixture.start(SAMPLED).sampled().unwrap();
    assert_eq!(trace.exemplar(at(5)).trace_id, TraceId::from_hex(TRACE).unwrap().to_bytes());
    trace.end(&record(), &endpoint());
    let spans = fixture.spans();
    let expected = [
        ("attache.cached_tokens", "800"),
        ("attache.end", "complete"),
        ("attache.endpoint", "10.0.0.7:8000"),
        ("attache.pool", "chat"),
        ("attache.predicted_ttft", "0.25"),
        ("attache.prompt_tokens", "1000"),
        ("attache.queue_time", "0.04"),
        ("attache.reason", "lowest_cost"),
        ("attache.request_id", "r-1"),
        ("attache.strategy", "predicted-latency"),
        ("gen_ai.operation.name", "chat"),
        ("gen_ai.provider.name", "sglang"),
        ("gen_ai.request.model", "qwen"),
        ("gen_ai.request.stream", "true"),
        ("gen_ai.response.time_to_first_chunk", "0.3"),
        ("gen_ai.usage.cache_read.input_tokens", "790"),
        ("gen_ai.usage.input_tokens", "1010"),
        ("gen_ai.usage.output_tokens", "64"),
        ("http.request.method", "POST"),
        ("http.response.status_code", "200"),
        ("server.address", "10.0.0.7"),
        ("server.port", "8000"),
        ("url.path", "/v1/chat/completions"),
    ];
    let got = attributes(&spans["chat qwen"]);
    assert_eq!(got, expected.map(|(key, value)| (key, value.to_owned())).into());
    assert_eq!(spans["chat qwen"].status, Status::Unset);
}

#[test]
fn errors_have_a_type_and_only_server_errors_a_status() {
    let error = |status: u16, end: &'static str, reason: &'static str| {
        let fixture = fixture(0.0);
        let record = DecisionRecord { status, end, reason, ..record() };
        fixture.start(SAMPLED).sampled().unwrap().end(&record, &endpoint());
        let span = fixture.spans().remove("chat qwen").unwrap();
        (attributes(&span).remove("error.type"), span.status)
    };
    let unset = Status::Unset;
    let typed = |name: &str| Some(name.to_owned());
    assert_eq!(error(200, End::Complete.label(), "r"), (None, unset.clone()));
    assert_eq!(error(404, End::Complete.label(), "r"), (typed("404"), unset.clone()));
    assert_eq!(error(0, End::ClientGone.label(), "r"), (None, unset.clone()));
    assert_eq!(error(503, End::Complete.label(), "r"), (typed("503"), Status::error("")));
    assert_eq!(
        error(503, End::ConnectFailure.label(), "r"),
        (typed("connect_failure"), Status::error("connect_failure"))
    );
    assert_eq!(error(429, REJECTED, "queue_full"), (typed("queue_full"), unset));
    assert_eq!(error(503, REJECTED, "overloaded"), (typed("overloaded"), Status::error("overloaded")));
}

/// A client may send any model name, and a name of a span must have few values.
#[test]
fn rejected_request_has_its_model_as_attribute_only() {
    let fixture = fixture(0.0);
    let mut span = fixture.start(SAMPLED);
    let decided = span.times().unwrap();
    decided.entered(&"chat".into(), &"m".repeat(5_000).into());
    span.decided(decided, at(1));
    let record = DecisionRecord {
        ended: at(2),
        api: "chat_completions",
        reason: "unknown_model",
        status: 404,
        end: REJECTED,
        ..DecisionRecord::default()
    };
    span.end_unrouted(&record);
    let spans = fixture.spans();
    let got = attributes(&spans["chat"]);
    assert_eq!(got["gen_ai.request.model"], "m".repeat(256));
    assert_eq!((&*got["attache.pool"], &*got["attache.rejection.reason"]), ("chat", "unknown_model"));
    assert!(!got.contains_key("attache.reason"), "no endpoint was chosen");
}

#[test]
fn calls_that_run_no_model_are_named_by_their_method() {
    let fixture = fixture(0.0);
    let record =
        DecisionRecord { ended: at(1), api: "models", status: 200, end: "complete", ..DecisionRecord::default() };
    fixture.start(SAMPLED).end_unrouted(&record);
    assert!(fixture.spans().contains_key("POST"));
}

#[test]
fn prefill_span_is_the_parent_of_the_prefill_server() {
    let fixture = fixture(0.0);
    let span = fixture.start(SAMPLED);
    let prefill = span.prefill(at(10)).unwrap();
    let sent = prefill.traceparent();
    prefill.end(Some(&endpoint()), None, at(60));
    span.prefill(at(20)).unwrap().end(None, Some("timeout"), at(50));
    let exported = fixture.exported.0.lock().unwrap().clone();
    let [good, failed] = exported.as_slice() else { panic!("{exported:?}") };
    assert_eq!(sent, format!("00-{TRACE}-{}-01", good.span_context.span_id()));
    assert_eq!((good.span_kind.clone(), times(&fixture, good)), (SpanKind::Client, (10, 60)));
    assert_eq!((&*attributes(good)["server.address"], &good.status), ("10.0.0.7", &Status::Unset));
    assert_eq!((&*attributes(failed)["error.type"], &failed.status), ("timeout", &Status::error("timeout")));
}

#[test]
fn gateway_context_outranks_the_one_of_the_client() {
    let fixture = fixture(0.0);
    let other = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let start = |gateway| fixture.tracing.start(TraceContexts { gateway, request: Some(SAMPLED) }, at(0)).unwrap();
    assert!(start(Some(other)).header().unwrap().starts_with("00-0af7651916cd43dd8448eb211c80319c-"));
    assert!(start(Some("nonsense")).header().unwrap().starts_with(&SAMPLED[..36]));
    assert!(!start(Some(&other.replace("-01", "-00"))).is_sampled());
}

#[test]
fn unsampled_request_keeps_its_context_and_is_not_exported() {
    let fixture = fixture(0.0);
    let mut span = fixture.start(UNSAMPLED);
    assert_eq!(span.header(), None, "the request has it in its headers");
    span.enter(Step::Body, at(0));
    assert!(span.times().is_none() && span.prefill(at(0)).is_none());
    assert!(span.sampled().is_none());
    let undecided = fixture.tracing.start(TraceContexts::default(), at(0)).unwrap();
    let sent = undecided.header().unwrap();
    assert!(parse(&sent).is_some() && sent.ends_with("-00"), "servers must not sample it on their own: {sent}");
    undecided.end_unrouted(&record());
    assert!(fixture.spans().is_empty());
}

#[test]
fn ratio_is_the_fraction_of_undecided_requests_that_are_sampled() {
    for (ratio, expected) in [(0.0, 0..=0), (0.25, 2_100..=2_900), (1.0, 10_000..=10_000)] {
        let fixture = fixture(ratio);
        let sampled = |_: &u32| fixture.tracing.start(TraceContexts::default(), at(0)).unwrap().is_sampled();
        let count = (0..10_000).filter(sampled).count();
        assert!(expected.contains(&count), "{count} of 10,000 at {ratio}");
    }
}

#[test]
fn contexts_are_read_and_written_in_hexadecimal() {
    for at in 0..SAMPLED.len() {
        for wrong in ["g", "/", ":", "`", "\u{7f}"] {
            let mut text = SAMPLED.to_owned();
            text.replace_range(at..=at, wrong);
            assert!(parse(&text).is_none(), "{text}");
        }
    }
    for byte in 1..=255 {
        let (trace, span) = (TraceId::from_bytes([byte; 16]), SpanId::from_bytes([byte; 8]));
        let text = W3cContext { trace, span, flags: TraceFlags::SAMPLED }.traceparent();
        assert_eq!(text, format!("00-{trace}-{span}-01"));
        let context = parse(&text.to_uppercase()).unwrap();
        assert_eq!((context.trace_id(), context.span_id()), (trace, span));
    }
    let later = SAMPLED.replacen("00", "cc", 1);
    assert!(parse(&later).is_some() && parse(&format!("{later}-more")).is_some());
    assert!(parse(&format!("{later}more")).is_none());
}

#[test]
fn malformed_context_starts_a_new_trace() {
    assert!(parse(SAMPLED).is_some());
    let zero = "00-00000000000000000000000000000000-00f067aa0ba902b7-01";
    for bad in ["", "00", &SAMPLED.replacen("00", "ff", 1), zero, "00-zz-00-00", &format!("{SAMPLED}-x")] {
        assert!(parse(bad).is_none(), "{bad}");
        let fixture = fixture(1.0);
        let sent = fixture.start(bad).header().unwrap();
        assert!(parse(&sent).is_some_and(|context| context.is_sampled()), "{sent}");
        assert_ne!(sent[3..35], *TRACE);
    }
}
