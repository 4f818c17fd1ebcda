//! The exchange without sockets: the reference picker's hermetic cases as a table, every body mode, and any order of events.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test that can't go on fails")]

use super::*;
use crate::config::settings::{ExchangeSettings, ReportUsage, UsageCount};
use crate::ids::EndpointId;
use crate::limits::Limits;
use crate::pool::health::HealthPolicy;
use crate::pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, LoraState, PoolSnapshot, SnapshotStore};
use crate::scheduling::router::{ModelRewrites, PoolMatch, RewriteTarget};
use crate::scheduling::{Pool, Router, Scheduler, registry};
use crate::telemetry::decisions::Decisions;
use crate::telemetry::metrics::Metrics;
use crate::telemetry::trace::Tracing;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpTrailers, ProtocolConfiguration};
use envoy_types::pb::google::protobuf::{ListValue, Value, value::Kind};
use proptest::prelude::*;
use std::time::Duration;

const NOW: Timestamp = Timestamp(5_000_000_000);

/// A server of the hermetic fixture: waiting requests, KV usage, active adapters. Number i is 192.168.1.(i+1):8000.
type Server = (u32, f32, &'static [&'static str]);

struct World {
    picker: Arc<Picker>,
    snapshot: Arc<SnapshotStore>,
}

struct Setup {
    servers: Vec<Server>,
    strategy: &'static str,
    parameters: serde_json::Value,
    destination: Destination,
    rewrites: ModelRewrites,
    exchange: ExchangeSettings,
    limits: Limits,
}

impl Default for Setup {
    fn default() -> Self {
        let scorers = ["queue-scorer", "kv-cache-utilization-scorer", "lora-affinity-scorer"];
        let scorers: Vec<_> = scorers.iter().map(|t| serde_json::json!({"type": t, "weight": 1})).collect();
        Self {
            servers: vec![(0, 0.1, &[])],
            strategy: "pipeline",
            parameters: serde_json::json!({ "scorers": scorers }),
            destination: Destination::Single,
            rewrites: ModelRewrites::default(),
            exchange: ExchangeSettings { trust_client_headers: true, ..ExchangeSettings::default() },
            limits: Limits::default(),
        }
    }
}

impl Setup {
    fn build(self) -> World {
        let endpoints = self.servers.iter().zip(0u32..).map(|(server, i)| state(i, *server)).collect();
        let store = Arc::new(SnapshotStore::default());
        store.publish(PoolSnapshot::new(1, true, endpoints));
        let strategy = (registry::strategy(self.strategy).unwrap().build)(&self.parameters).unwrap();
        let pool = Pool {
            name: "pool".into(),
            matches: PoolMatch::default(),
            store: store.clone(),
            scheduler: Scheduler::new(strategy, HealthPolicy::default(), 3),
            rewrites: self.rewrites,
            reject_unknown_models: false,
            stale_after: Duration::from_secs(2),
            destination: self.destination,
        };
        let metrics = Metrics::register(&mut prometheus_client::registry::Registry::default());
        let live = Live::new(Router::new(vec![Arc::new(pool)]), self.limits, self.exchange, &metrics);
        let picker = Arc::new(Picker::new(live, metrics, Decisions::new(16), Tracing::default(), 7));
        World { picker, snapshot: store }
    }
}

fn state(i: u32, (waiting, kv_usage, loras): Server) -> EndpointState {
    let address = ([192, 168, 1, u8::try_from(i + 1).unwrap()], 8000).into();
    let running = loras.iter().map(|l| Arc::from(*l)).collect();
    let metrics = EndpointMetrics {
        scraped_at: NOW,
        waiting,
        kv_usage,
        lora: Some(LoraState { max: 0, running, waiting: Vec::new() }),
        ..EndpointMetrics::default()
    };
    EndpointState {
        endpoint: Arc::new(Endpoint::new(EndpointId(i), EndpointSpec::at(address))),
        metrics: Some(Arc::new(metrics)),
    }
}

impl World {
    fn exchange(&self) -> Exchange {
        Exchange::new(self.picker.clone(), NOW)
    }

    /// Nothing is booked, nothing is held, every stream is counted once.
    fn assert_books_closed(&self, streams: u64) {
        for state in &self.snapshot.load().endpoints {
            let ledger = &state.endpoint.ledger;
            assert_eq!((ledger.in_flight(), ledger.prefill_tokens()), (0, 0), "{}", state.endpoint.authority);
        }
        assert_eq!(self.picker.buffered.bytes(), 0);
        let counted: u64 = Outcome::ALL.iter().map(|o| self.picker.metrics.outcome_count(*o)).sum();
        assert_eq!((self.picker.metrics.streams_opened.get(), counted), (streams, streams));
    }
}

fn send(exchange: &mut Exchange, message: ProcessingRequest) -> Vec<ProcessingResponse> {
    let mut out = Actions::new();
    exchange.on(Event::Message(Box::new(message)), NOW, &mut out).unwrap();
    out.into()
}

fn request(message: Message) -> ProcessingRequest {
    ProcessingRequest { request: Some(message), ..ProcessingRequest::default() }
}

fn headers(pairs: &[(&str, &str)], end_of_stream: bool) -> HttpHeaders {
    let header = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    HttpHeaders {
        headers: Some(HeaderMap { headers: pairs.iter().map(header).collect() }),
        end_of_stream,
        ..HttpHeaders::default()
    }
}

fn body(bytes: &[u8], end_of_stream: bool) -> HttpBody {
    HttpBody { body: bytes.to_vec(), end_of_stream, ..HttpBody::default() }
}

fn subset(entries: &[&str]) -> Metadata {
    let value = |e: &&str| Value { kind: Some(Kind::StringValue((*e).to_owned())) };
    let list = Value { kind: Some(Kind::ListValue(ListValue { values: entries.iter().map(value).collect() })) };
    let fields = HashMap::from([("x-gateway-destination-endpoint-subset".to_owned(), list)]);
    Metadata {
        filter_metadata: HashMap::from([("envoy.lb.subset_hint".to_owned(), Struct { fields })]),
        ..Metadata::default()
    }
}

fn config(request: BodySendMode, response: BodySendMode, nowait: bool) -> ProtocolConfiguration {
    ProtocolConfiguration {
        request_body_mode: request.into(),
        response_body_mode: response.into(),
        send_body_without_waiting_for_header_response: nowait,
    }
}

/// What an answer set in headers, metadata and body, told apart from how it was wrapped.
#[derive(Debug, Default)]
struct Answered {
    set: HashMap<String, String>,
    removed: Vec<String>,
    metadata: Option<String>,
    body: Vec<u8>,
    ended: u32,
    refused: Option<(i32, String)>,
    kinds: Vec<&'static str>,
}

impl Answered {
    fn of(answers: &[ProcessingResponse]) -> Self {
        let mut all = Self::default();
        answers.iter().for_each(|a| all.add(a));
        all
    }

    fn add(&mut self, answer: &ProcessingResponse) {
        if let Some(lb) = answer.dynamic_metadata.as_ref().and_then(|m| m.fields.get("envoy.lb"))
            && let Some(Kind::StructValue(fields)) = &lb.kind
            && let Some(Kind::StringValue(d)) = &fields.fields[DESTINATION].kind
        {
            self.metadata = Some(d.clone());
        }
        let (kind, common) = match answer.response.as_ref().unwrap() {
            Response::RequestHeaders(h) => ("request_headers", h.response.as_ref()),
            Response::ResponseHeaders(h) => ("response_headers", h.response.as_ref()),
            Response::RequestBody(b) => ("request_body", b.response.as_ref()),
            Response::ResponseBody(b) => ("response_body", b.response.as_ref()),
            Response::RequestTrailers(_) => ("request_trailers", None),
            Response::ResponseTrailers(_) => ("response_trailers", None),
            Response::ImmediateResponse(i) => {
                self.refused = Some((i.status.as_ref().unwrap().code, String::from_utf8(i.body.clone()).unwrap()));
                self.mutate(i.headers.as_ref());
                ("immediate", None)
            }
            Response::StreamedImmediateResponse(_) => ("streamed_immediate", None),
        };
        self.kinds.push(kind);
        let Some(common) = common else { return };
        self.mutate(common.header_mutation.as_ref());
        match common.body_mutation.as_ref().and_then(|m| m.mutation.as_ref()) {
            Some(Mutation::StreamedResponse(s)) => {
                self.body.extend_from_slice(&s.body);
                self.ended += u32::from(s.end_of_stream);
            }
            Some(Mutation::Body(b)) => self.body.extend_from_slice(b),
            Some(Mutation::ClearBody(_)) | None => {}
        }
    }

    fn mutate(&mut self, mutation: Option<&HeaderMutation>) {
        let Some(mutation) = mutation else { return };
        for option in &mutation.set_headers {
            let header = option.header.as_ref().unwrap();
            assert!(header.value.is_empty(), "Envoy ignores `value`");
            self.set.insert(header.key.clone(), String::from_utf8(header.raw_value.clone()).unwrap());
        }
        self.removed.extend(mutation.remove_headers.iter().cloned());
    }

    fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }
}

const PATH: (&str, &str) = (":path", "/v1/completions");

fn completion(model: &str, prompt: &str) -> String {
    format!(r#"{{"max_tokens":100,"model":"{model}","prompt":"{prompt}","temperature":0}}"#)
}

/// What the reference's table expects.
enum Expected {
    /// Server number, model in the body, content-length where the table names it.
    Route(u8, &'static str, Option<usize>),
    /// Status and reason.
    Refuse(i32, &'static str),
}
use Expected::{Refuse, Route};

struct Case {
    name: &'static str,
    servers: &'static [Server],
    model: &'static str,
    rewrite: &'static str,
    prompt: &'static str,
    /// Where the body is cut, when it comes in two pieces.
    cut: Option<usize>,
    subset: Option<&'static [&'static str]>,
    expected: Expected,
}

const CASE: Case = Case {
    name: "",
    servers: &[],
    model: "",
    rewrite: "",
    prompt: "",
    cut: None,
    subset: None,
    expected: Route(0, "", None),
};

/// `endpoint-picker-protocol` §7.2, cases 1-4, 8-13 (their numbers in the names). Refusals are ours: JSON, and 503 where nothing is ready.
const HERMETIC: &[Case] = &[
    Case {
        name: "1 lower queue and kv",
        servers: &[(3, 0.2, &[]), (0, 0.1, &[]), (10, 0.2, &[])],
        model: "my-model",
        rewrite: "my-model-12345",
        prompt: "test1",
        expected: Route(2, "my-model-12345", Some(76)),
        ..CASE
    },
    Case {
        name: "2 active lora, low queue",
        servers: &[(0, 0.2, &["foo", "bar"]), (0, 0.1, &["foo", "sql-lora-1fdg2"]), (10, 0.2, &["foo", "bar"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test2",
        expected: Route(2, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "3 lora beats kv",
        servers: &[(10, 0.2, &["foo", "bar"]), (10, 0.4, &["foo", "sql-lora-1fdg2"]), (10, 0.3, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test3",
        expected: Route(2, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "4 no shedding by default",
        servers: &[(6, 0.2, &["foo", "bar", "sql-lora-1fdg2"]), (0, 0.85, &["foo"]), (10, 0.9, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test4",
        expected: Route(1, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "8 split body",
        servers: &[(4, 0.2, &["foo", "bar", "sql-lora-1fdg3"]), (4, 0.85, &["foo", "sql-lora-1fdg3"])],
        model: "sql-lora-sheddable",
        rewrite: "sql-lora-1fdg3",
        prompt: "test6",
        cut: Some(34),
        expected: Route(1, "sql-lora-1fdg3", None),
        ..CASE
    },
    Case {
        name: "9 subset best",
        servers: &[(0, 0.2, &["foo"]), (0, 0.1, &["foo", "sql-lora-1fdg2"]), (10, 0.2, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test2",
        subset: Some(&["192.168.1.1:8000", "192.168.1.2:8000", "192.168.1.3:8000"]),
        expected: Route(2, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "10 subset partial",
        servers: &[(0, 0.2, &["foo"]), (0, 0.1, &["foo", "sql-lora-1fdg2"]), (10, 0.2, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test2",
        subset: Some(&["192.168.1.3:8000"]),
        expected: Route(3, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "11 subset none",
        servers: &[(0, 0.2, &["foo"]), (0, 0.1, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test2",
        subset: Some(&["192.168.1.99:8000"]),
        expected: Refuse(503, "subset_empty"),
        ..CASE
    },
    Case {
        name: "11b subset present but empty",
        servers: &[(0, 0.2, &[])],
        model: "m",
        prompt: "p",
        subset: Some(&[]),
        expected: Refuse(503, "subset_empty"),
        ..CASE
    },
    Case {
        name: "11c subset with another port of a known address",
        servers: &[(0, 0.2, &[])],
        model: "m",
        prompt: "p",
        subset: Some(&["192.168.1.1:9000"]),
        expected: Refuse(503, "subset_empty"),
        ..CASE
    },
    Case {
        name: "12 model without target",
        servers: &[(4, 0.2, &["foo", "bar", "sql-lora-1fdg3"])],
        model: "direct-model",
        rewrite: "direct-model",
        prompt: "test6",
        cut: Some(34),
        expected: Route(1, "direct-model", None),
        ..CASE
    },
    Case {
        name: "13 rewrite rule",
        servers: &[(0, 0.1, &["foo", "rewritten-model"])],
        model: "model-to-be-rewritten",
        rewrite: "model-to-be-rewritten",
        prompt: "test-rewrite",
        expected: Route(1, "rewritten-model", Some(84)),
        ..CASE
    },
    Case { name: "no endpoint", model: "m", prompt: "p", expected: Refuse(503, "no_ready_endpoint"), ..CASE },
];

#[test]
fn the_reference_pickers_hermetic_cases() {
    for case in HERMETIC {
        let target = RewriteTarget { model: "rewritten-model".into(), weight: 1 };
        let exact = [("model-to-be-rewritten".to_owned(), vec![target])].into();
        let rewrites = ModelRewrites { exact, any: Vec::new() };
        let world = Setup { servers: case.servers.to_vec(), rewrites, ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let metadata_context = case.subset.map(subset);
        let mut pairs = vec![PATH, ("hi", "mom"), ("x-request-id", "test-request-id")];
        pairs.extend([("x-gateway-inference-objective", case.model), ("x-gateway-model-name-rewrite", case.rewrite)]);
        let with_hint = |m| ProcessingRequest { metadata_context: metadata_context.clone(), ..request(m) };
        let first = send(&mut exchange, with_hint(Message::RequestHeaders(headers(&pairs, false))));
        assert!(first.is_empty(), "{}: the headers wait for the body", case.name);
        let sent = completion(case.model, case.prompt);
        let (head, tail) = sent.split_at(case.cut.unwrap_or(0));
        if !head.is_empty() {
            assert!(send(&mut exchange, with_hint(Message::RequestBody(body(head.as_bytes(), false)))).is_empty());
        }
        let answers = send(&mut exchange, with_hint(Message::RequestBody(body(tail.as_bytes(), true))));
        check(case, &Answered::of(&answers));
        drop(exchange);
        world.assert_books_closed(1);
    }
}

fn check(case: &Case, got: &Answered) {
    let name = case.name;
    match case.expected {
        Route(server, model, length) => {
            let destination = format!("192.168.1.{server}:8000");
            assert_eq!(got.refused, None, "{name}");
            assert_eq!(got.set.get(DESTINATION), Some(&destination), "{name}");
            assert_eq!(got.metadata.as_ref(), Some(&destination), "{name}: header and metadata agree");
            assert_eq!(got.text(), completion(model, case.prompt), "{name}");
            assert_eq!(got.ended, 1, "{name}");
            // A body that is not changed leaves in the pieces in which it came.
            let pieces = if model == case.model && case.cut.is_some() { 2 } else { 1 };
            assert_eq!(got.kinds, [vec!["request_headers"], vec!["request_body"; pieces]].concat(), "{name}");
            let hidden = ["x-gateway-inference-objective", "x-gateway-model-name-rewrite"];
            assert_eq!(got.removed, hidden, "{name}: the picker's own headers don't reach the server");
            let renamed = model != case.model;
            let expected = renamed.then(|| completion(model, case.prompt).len().to_string());
            assert_eq!(got.set.get("content-length"), expected.as_ref(), "{name}");
            if let Some(length) = length {
                assert_eq!(got.body.len(), length, "{name}");
            }
        }
        Refuse(status, reason) => {
            assert_eq!(got.refused.as_ref().map(|r| r.0), Some(status), "{name}");
            assert_eq!(got.set.get("x-attache-reason").map(String::as_str), Some(reason), "{name}");
            assert_eq!(got.set.get(DESTINATION), None, "{name}: no destination with a refusal");
            assert_eq!(got.metadata, None, "{name}");
            let error: serde_json::Value = serde_json::from_str(&got.refused.as_ref().unwrap().1).unwrap();
            assert_eq!(error["error"]["code"], reason, "{name}");
        }
    }
}

#[test]
fn hermetic_5_and_15_header_only_requests() {
    let none = Setup { servers: vec![], ..Setup::default() }.build();
    let get = |pairs: &[(&str, &str)]| request(Message::RequestHeaders(headers(pairs, true)));
    let got = Answered::of(&send(&mut none.exchange(), get(&[(":path", "/v1/models"), (":method", "GET")])));
    assert_eq!(got.refused.map(|r| r.0), Some(503));

    // Not a random endpoint: the one with the fewest requests.
    let world = Setup { servers: vec![(9, 0.0, &[]), (0, 0.9, &[]), (9, 0.0, &[])], ..Setup::default() }.build();
    let got = Answered::of(&send(&mut world.exchange(), get(&[(":path", "/v1/models"), (":method", "GET")])));
    assert_eq!(got.set[DESTINATION], "192.168.1.2:8000");
    assert_eq!(got.kinds, ["request_headers"]);
    assert_eq!(world.picker.metrics.outcome_count(Outcome::Skipped), 1);
    world.assert_books_closed(1);
}

#[test]
fn hermetic_6_and_7_bad_bodies() {
    for (sent, reason) in
        [(r#"{"prompt":"hello world"}"#, "invalid_model"), ("no healthy upstream", "invalid_json"), ("", "empty_body")]
    {
        let world = Setup::default().build();
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
        let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
        assert_eq!(got.refused.as_ref().map(|r| r.0), Some(400), "{sent}");
        assert_eq!(got.set["x-attache-reason"], reason, "{sent}");
        drop(exchange);
        assert_eq!(world.picker.metrics.outcome_count(Outcome::Rejected), 1);
        world.assert_books_closed(1);
    }
}

#[test]
fn hermetic_14_a_body_that_is_no_json_on_an_unknown_path_passes() {
    let world = Setup { servers: vec![(3, 0.2, &[]), (0, 0.1, &[]), (10, 0.2, &[])], ..Setup::default() }.build();
    let mut exchange = world.exchange();
    let pairs = [(":path", "/primary-gateway-test?x=1"), ("x-gateway-inference-objective", "my-model")];
    send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false))));
    let sent = b"passthrough-parser";
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent, true)))));
    assert_eq!(got.set[DESTINATION], "192.168.1.2:8000");
    assert_eq!(got.body, sent);
    assert_eq!(got.set.get("content-length"), None, "the body is as it was");
}

fn routed(world: &World, config: Option<ProtocolConfiguration>) -> Exchange {
    let mut exchange = world.exchange();
    let first = Message::RequestHeaders(headers(&[PATH], false));
    send(&mut exchange, ProcessingRequest { protocol_config: config, ..request(first) });
    let sent = completion("m", "p");
    send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true))));
    assert!(exchange.is_routed());
    exchange
}

#[test]
fn hermetic_16_to_19_answers_pass_as_they_come() {
    let json = "application/json";
    let sse = "text/event-stream";
    let usage = r#"{"id":"x","usage":{"prompt_tokens":7,"total_tokens":17,"completion_tokens":10}}"#;
    let event = format!("data: {usage}\n\n");
    let cases: &[(&str, &str, &[&str], u64)] = &[
        ("16 json in two chunks", json, &[&usage[..20], &usage[20..]], 7),
        ("17 not json", json, &["no healthy upstream"], 0),
        ("18 empty end", json, &[usage, ""], 7),
        ("19 sse", sse, &["data: {}\n\n", &event, "data: [DONE]\n\n", ""], 7),
    ];
    for (name, content_type, chunks, prompt_tokens) in cases {
        let world = Setup::default().build();
        let mut exchange = routed(&world, None);
        let pairs = [(":status", "200"), ("content-type", *content_type)];
        let got = Answered::of(&send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false)))));
        assert_eq!((got.kinds.as_slice(), got.set.len()), (["response_headers"].as_slice(), 0), "{name}");
        for (at, chunk) in chunks.iter().enumerate() {
            let last = at + 1 == chunks.len();
            let sent = request(Message::ResponseBody(body(chunk.as_bytes(), last)));
            let got = Answered::of(&send(&mut exchange, sent));
            assert_eq!((got.text(), got.ended), (*chunk, u32::from(last)), "{name}");
        }
        let record = world.picker.decisions.snapshot().pop().unwrap();
        assert_eq!((record.end, record.status), ("complete", 200), "{name}");
        assert_eq!(record.prompt_tokens.unwrap_or(0), *prompt_tokens, "{name}");
        // The books close with the last byte, not with the stream.
        world.assert_books_closed_but_open_stream();
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn hermetic_20_and_21_the_last_message_tells_what_the_answer_cost() {
    let usage = r#"{"usage":{"completion_tokens":10,"prompt_tokens":32,"total_tokens":42}}"#;
    let event = format!("data: {usage}\n\n");
    let cases: &[(&str, &[&str])] =
        &[("application/json", &[usage]), ("text/event-stream", &["data: {}\n\n", &event, "data: [DONE]\n\n"])];
    for (content_type, chunks) in cases {
        let report = ReportUsage {
            namespace: "envoy.lb".to_owned(),
            key: "x-gateway-inference-request-cost".to_owned(),
            count: UsageCount::Completion,
        };
        let exchange = ExchangeSettings { report_usage: Some(report), ..ExchangeSettings::default() };
        let world = Setup { exchange, ..Setup::default() }.build();
        let mut exchange = routed(&world, None);
        let pairs = [(":status", "200"), ("content-type", *content_type)];
        send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
        for (at, chunk) in chunks.iter().enumerate() {
            let last = at + 1 == chunks.len();
            let got = send(&mut exchange, request(Message::ResponseBody(body(chunk.as_bytes(), last))));
            let expected = last.then(|| metadata::number("envoy.lb", "x-gateway-inference-request-cost", 10.0));
            assert_eq!(got[0].dynamic_metadata, expected, "{content_type} {at}");
        }
    }
}

/// A gRPC frame around `message`.
fn frame(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0], &length[..], message].concat()
}

/// A length-delimited protobuf field.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
}

#[test]
fn hermetic_22_to_31_grpc_requests() {
    let generate = "/vllm.grpc.engine.VllmEngine/Generate";
    let embed = "/vllm.grpc.engine.VllmEngine/Embed";
    let text = |t: &str| frame(&field(3, t.as_bytes()));
    let stream = frame(&[&field(3, b"test-stream")[..], &[5 << 3, 1]].concat());
    let tokenized = frame(&field(2, &field(1, b"test1")));
    let three: &[Server] = &[(3, 0.2, &[]), (0, 0.1, &[]), (10, 0.2, &[])];
    let pair: &[Server] = &[(4, 0.2, &[]), (4, 0.85, &[])];
    let hint = |s: &[&str]| Some(subset(s));
    type Row<'a> = (&'a str, &'a str, Vec<u8>, usize, &'a [Server], Option<Metadata>, Expected);
    let rows: Vec<Row<'_>> = vec![
        ("22", generate, text("test1"), 0, three, None, Route(2, "", None)),
        ("23", embed, tokenized, 0, three, None, Route(2, "", None)),
        ("24", generate, stream, 0, three, None, Route(2, "", None)),
        ("25", generate, text("test2"), 0, &[(6, 0.2, &[]), (0, 0.85, &[]), (10, 0.9, &[])], None, Route(1, "", None)),
        ("26", generate, b"plain text not grpc payload style".to_vec(), 0, three, None, Refuse(400, "invalid_grpc")),
        ("27", "/vllm.grpc.engine.VllmEngine/Abort", text("x"), 0, three, None, Refuse(400, "unsupported_grpc_method")),
        ("28", generate, text("test3"), 6, pair, None, Route(1, "", None)),
        ("29", generate, text("t"), 0, three, hint(&["192.168.1.1:8000", "192.168.1.2:8000"]), Route(2, "", None)),
        ("30", generate, text("t"), 0, three, hint(&["192.168.1.3:8000"]), Route(3, "", None)),
        ("31", generate, text("t"), 0, three, hint(&["192.168.1.99:8000"]), Refuse(503, "subset_empty")),
    ];
    for (name, path, sent, cut, servers, metadata_context, expected) in rows {
        let world = Setup { servers: servers.to_vec(), ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let pairs = [(":path", path), ("content-type", "application/grpc"), ("te", "trailers")];
        let first = request(Message::RequestHeaders(headers(&pairs, false)));
        send(&mut exchange, ProcessingRequest { metadata_context, ..first });
        if cut > 0 {
            send(&mut exchange, request(Message::RequestBody(body(&sent[..cut], false))));
        }
        let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(&sent[cut..], true)))));
        match expected {
            Route(server, ..) => {
                assert_eq!(got.set.get(DESTINATION), Some(&format!("192.168.1.{server}:8000")), "{name}");
                assert!(got.body == sent, "{name}: the body is as it was");
            }
            Refuse(status, reason) => {
                assert_eq!(got.refused.as_ref().map(|r| r.0), Some(status), "{name}");
                assert_eq!(got.set["x-attache-reason"], reason, "{name}");
            }
        }
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn hermetic_32_to_35_grpc_answers_end_in_trailers() {
    let chunk = frame(&field(1, &field(1, &[1, 2, 3])));
    let complete = frame(&field(2, &[3 << 3, 7, 4 << 3, 10]));
    type Row = (&'static str, Vec<Vec<u8>>, Option<u64>);
    let rows: &[Row] = &[
        ("32", vec![chunk[..4].to_vec(), chunk[4..].to_vec()], None),
        ("33", vec![b"no healthy upstream".to_vec()], None),
        ("34", vec![complete[..7].to_vec(), complete[7..].to_vec()], Some(7)),
        ("35", vec![chunk.clone(), complete.clone()], Some(7)),
    ];
    for (name, pieces, prompt_tokens) in rows {
        let world = Setup::default().build();
        let mut exchange = world.exchange();
        let pairs = [(":path", "/vllm.grpc.engine.VllmEngine/Generate"), ("content-type", "application/grpc")];
        send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false))));
        send(&mut exchange, request(Message::RequestBody(body(&frame(&field(3, b"t")), true))));
        let pairs = [(":status", "200"), ("content-type", "application/grpc")];
        send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
        for piece in pieces {
            let got = Answered::of(&send(&mut exchange, request(Message::ResponseBody(body(piece, false)))));
            assert_eq!((&got.body, got.ended), (piece, 0), "{name}");
        }
        let got = send(&mut exchange, request(Message::ResponseTrailers(HttpTrailers::default())));
        assert_eq!(Answered::of(&got).kinds, ["response_trailers"], "{name}");
        let record = world.picker.decisions.snapshot().pop().unwrap();
        assert_eq!((record.end, record.prompt_tokens), ("complete", *prompt_tokens), "{name}");
    }
}

impl World {
    fn assert_books_closed_but_open_stream(&self) {
        assert!(self.snapshot.load().endpoints.iter().all(|s| s.endpoint.ledger.in_flight() == 0));
    }
}

#[test]
fn conformance_headers_only_when_asked_for() {
    let settings = ExchangeSettings { conformance_headers: true, ..ExchangeSettings::default() };
    let servers = vec![(0, 0.1, &[] as &[&str]); 3];
    let world =
        Setup { servers: servers.clone(), exchange: settings, destination: Destination::List, ..Setup::default() }
            .build();
    let mut exchange = world.exchange();
    let named = [
        PATH,
        ("test-epp-endpoint-selection", "192.168.1.3,192.168.1.1:8000"),
        ("test-epp-endpoint-selection", "192.168.1.1:9"),
    ];
    send(&mut exchange, request(Message::RequestHeaders(headers(&named, false))));
    let sent = completion("m", "p");
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    assert_eq!(got.set[DESTINATION], "192.168.1.3:8000,192.168.1.1:8000");
    assert_eq!(got.removed, ["test-epp-endpoint-selection"]);
    let served = Struct {
        fields: HashMap::from([(
            "x-gateway-destination-endpoint-served".to_owned(),
            Value { kind: Some(Kind::StringValue("192.168.1.1:8000".to_owned())) },
        )]),
    };
    let metadata =
        Metadata { filter_metadata: HashMap::from([("envoy.lb".to_owned(), served)]), ..Metadata::default() };
    let head = request(Message::ResponseHeaders(headers(&[(":status", "200")], true)));
    let got = Answered::of(&send(&mut exchange, ProcessingRequest { metadata_context: Some(metadata), ..head }));
    assert_eq!(got.set["x-conformance-test-served-endpoint"], "192.168.1.1:8000");
    assert_eq!(got.set["x-went-into-resp-headers"], "true");
    let record = world.picker.decisions.snapshot().pop().unwrap();
    assert_eq!((&*record.endpoint, record.served.as_deref()), ("192.168.1.3:8000", Some("192.168.1.1:8000")));

    let world = Setup { servers, ..Setup::default() }.build();
    let mut exchange = world.exchange();
    send(
        &mut exchange,
        request(Message::RequestHeaders(headers(&[PATH, ("test-epp-endpoint-selection", "192.168.1.99")], false))),
    );
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    assert_eq!(got.refused, None);
}

#[test]
fn each_mode_is_answered_in_kind() {
    use BodySendMode::{Buffered, BufferedPartial, FullDuplexStreamed, None as Off, Streamed};
    let sent = completion("m", "p");
    let cases: &[(BodySendMode, bool, &[&[&str]])] = &[
        (FullDuplexStreamed, false, &[&[], &[], &["request_headers", "request_body", "request_body"]]),
        (Streamed, true, &[&[], &[], &["request_headers", "request_body", "request_body"]]),
        (Streamed, false, &[&["request_headers"], &["request_body"], &["request_body"]]),
        (Buffered, false, &[&["request_headers"], &["request_body"]]),
        (BufferedPartial, false, &[&["request_headers"], &["request_body"]]),
        (Off, false, &[&["request_headers"]]),
    ];
    for (mode, nowait, expected) in cases {
        let world = Setup::default().build();
        let mut exchange = world.exchange();
        let protocol_config = Some(config(*mode, Off, *nowait));
        let first = request(Message::RequestHeaders(headers(&[PATH], false)));
        let mut got = vec![send(&mut exchange, ProcessingRequest { protocol_config, ..first })];
        let whole = matches!(mode, Buffered | BufferedPartial);
        let pieces: Vec<(&str, bool)> = match expected.len() {
            1 => vec![],
            _ if whole => vec![(&sent, true)],
            _ => vec![(&sent[..10], false), (&sent[10..], true)],
        };
        for (piece, end) in pieces {
            got.push(send(&mut exchange, request(Message::RequestBody(body(piece.as_bytes(), end)))));
        }
        let kinds: Vec<Vec<&str>> = got.iter().map(|g| Answered::of(g).kinds).collect();
        assert_eq!(kinds, *expected, "{mode:?} nowait={nowait}");
        let all = Answered::of(&got.concat());
        assert_eq!(all.set[DESTINATION], "192.168.1.1:8000", "{mode:?}");
        assert_eq!(all.metadata.as_deref(), Some("192.168.1.1:8000"), "{mode:?}");
        if *mode == FullDuplexStreamed {
            assert_eq!((all.text(), all.ended), (sent.as_str(), 1));
        } else {
            assert_eq!((all.text(), all.ended), ("", 0), "{mode:?}: nothing is changed, so nothing is sent back");
        }
        // The response mode is NONE: the headers are the last that we see.
        send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], false))));
        world.assert_books_closed_but_open_stream();
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn a_model_is_renamed_there_and_back_in_every_mode() {
    use BodySendMode::{Buffered, FullDuplexStreamed, Streamed};
    for (mode, nowait) in [(FullDuplexStreamed, false), (Streamed, true), (Buffered, false)] {
        let target = RewriteTarget { model: "llama-3.3-70b-instruct".into(), weight: 1 };
        let rewrites = ModelRewrites { exact: [("gpt-4".to_owned(), vec![target])].into(), any: Vec::new() };
        let world = Setup { rewrites, ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let protocol_config = Some(config(mode, mode, nowait));
        let first = request(Message::RequestHeaders(headers(&[PATH], false)));
        let mut got = send(&mut exchange, ProcessingRequest { protocol_config, ..first });
        let sent = r#"{ "prompt":"p" , "model" : "gpt-4" }"#;
        let cut = if mode == Buffered { 0 } else { 5 };
        if cut > 0 {
            got.extend(send(&mut exchange, request(Message::RequestBody(body(&sent.as_bytes()[..cut], false)))));
        }
        got.extend(send(&mut exchange, request(Message::RequestBody(body(&sent.as_bytes()[cut..], true)))));
        let all = Answered::of(&got);
        assert_eq!(all.text(), r#"{ "prompt":"p" , "model" : "llama-3.3-70b-instruct" }"#, "{mode:?}");
        assert_eq!(all.set["content-length"], all.body.len().to_string());

        let answer = r#"{"id":"1","model":"llama-3.3-70b-instruct","choices":[]}"#;
        let expected = r#"{"id":"1","model":"gpt-4","choices":[]}"#;
        let head = send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], false))));
        assert_eq!(Answered::of(&head).removed, ["content-length"]);
        let cuts: &[usize] = if mode == Buffered { &[0] } else { &[0, 12, 30] };
        let mut bytes = Vec::new();
        for (at, start) in cuts.iter().enumerate() {
            let end = cuts.get(at + 1).copied().unwrap_or(answer.len());
            let piece = body(&answer.as_bytes()[*start..end], end == answer.len());
            let got = send(&mut exchange, request(Message::ResponseBody(piece.clone())));
            assert_eq!(got.len(), 1, "one answer for each message");
            bytes.extend(applied(&got[0], &piece.body));
        }
        assert_eq!(String::from_utf8(bytes).unwrap(), expected, "{mode:?}");
    }
}

/// The bytes that Envoy passes on for a body message and the answer to it.
fn applied(answer: &ProcessingResponse, sent: &[u8]) -> Vec<u8> {
    let (Response::ResponseBody(b) | Response::RequestBody(b)) = answer.response.as_ref().unwrap() else {
        panic!("not a body answer")
    };
    match b.response.as_ref().unwrap().body_mutation.as_ref().and_then(|m| m.mutation.clone()) {
        Some(Mutation::StreamedResponse(s)) => s.body,
        Some(Mutation::Body(b)) => b,
        Some(Mutation::ClearBody(_)) => Vec::new(),
        None => sent.to_vec(),
    }
}

#[test]
fn request_trailers_end_the_body() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let sent = completion("m", "p");
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    assert!(send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), false)))).is_empty());
    let got = Answered::of(&send(&mut exchange, request(Message::RequestTrailers(HttpTrailers::default()))));
    assert_eq!(got.kinds, ["request_headers", "request_body", "request_trailers"]);
    assert_eq!((got.text(), got.ended), (sent.as_str(), 0), "the trailers end the stream, not the body");
}

#[test]
fn a_streamed_body_that_pauses_is_decided_on() {
    // Envoy keeps trailers back until the chunks before them are answered.
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let protocol_config = Some(config(BodySendMode::Streamed, BodySendMode::None, true));
    let first = request(Message::RequestHeaders(headers(&[PATH], false)));
    send(&mut exchange, ProcessingRequest { protocol_config, ..first });
    let sent = completion("m", "p");
    assert!(send(&mut exchange, request(Message::RequestBody(body(&sent.as_bytes()[..9], false)))).is_empty());
    assert_eq!(exchange.deadline(), Some(NOW.after(PAUSE)), "it can't be whole");
    assert!(send(&mut exchange, request(Message::RequestBody(body(&sent.as_bytes()[9..], false)))).is_empty());
    assert_eq!(exchange.deadline(), Some(NOW.after(PAUSE_AFTER_JSON)));
    let mut out = Actions::new();
    exchange.on(Event::Deadline, NOW.after(PAUSE_AFTER_JSON), &mut out).unwrap();
    let got = Answered::of(out.make_contiguous());
    assert_eq!(got.kinds, ["request_headers", "request_body", "request_body"]);
    assert_eq!(world.picker.metrics.outcome_count(Outcome::Routed), 0, "counted at the end");
    let got = Answered::of(&send(&mut exchange, request(Message::RequestTrailers(HttpTrailers::default()))));
    assert_eq!(got.kinds, ["request_trailers"]);
    drop(exchange);
    assert_eq!(world.picker.metrics.outcome_count(Outcome::Routed), 1);
    world.assert_books_closed(1);
}

#[test]
fn a_file_in_a_form_passes_without_being_held() {
    let limits = Limits { max_body_bytes: 1_000, max_multipart_sniff_bytes: 500, ..Limits::default() };
    let model = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n";
    let file = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n";
    let noise = "x".repeat(600);
    let in_front = [model, file, &noise];
    let behind = [file, &noise, model];
    for (pieces, decided_at, understood) in [(in_front, 1, "whisper"), (behind, 1, "")] {
        let world = Setup { limits: limits.clone(), ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let form = ("content-type", "multipart/form-data; boundary=b");
        let pairs = [(":path", "/v1/audio/transcriptions"), form, ("content-length", "5000")];
        assert!(send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false)))).is_empty(), "not a 413");
        let mut all = Vec::new();
        for (at, piece) in pieces.iter().enumerate() {
            all.extend(send(&mut exchange, request(Message::RequestBody(body(piece.as_bytes(), false)))));
            assert_eq!(exchange.is_routed(), at >= decided_at, "{at}");
        }
        assert_eq!(world.picker.buffered.bytes(), 0);
        all.extend(send(&mut exchange, request(Message::RequestBody(body(b"--b--", true)))));
        let got = Answered::of(&all);
        assert_eq!((got.text(), got.ended), (&*[pieces.concat().as_str(), "--b--"].concat(), 1));
        send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], true))));
        assert_eq!(&*world.picker.decisions.snapshot()[0].model, understood);
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn an_upgrade_is_answered_at_its_headers_and_flows() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let pairs = [(":path", "/v1/realtime"), (":method", "GET"), ("upgrade", "websocket"), ("connection", "Upgrade")];
    let got = Answered::of(&send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false)))));
    assert_eq!(got.kinds, ["request_headers"]);
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "101")], false))));
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(b"frame", false)))));
    assert_eq!((got.text(), got.ended), ("frame", 0));
    let got = Answered::of(&send(&mut exchange, request(Message::ResponseBody(body(b"frame back", false)))));
    assert_eq!(got.text(), "frame back");
}

#[test]
fn a_second_end_of_stream_is_ignored() {
    let world = Setup::default().build();
    let mut exchange = routed(&world, None);
    assert!(send(&mut exchange, request(Message::RequestBody(body(b"", true)))).is_empty());
}

#[test]
fn an_answer_may_begin_before_the_request_has_ended() {
    let world = Setup::default().build();
    let mut exchange = world.exchange();
    let protocol_config = Some(config(BodySendMode::Streamed, BodySendMode::FullDuplexStreamed, false));
    let first = request(Message::RequestHeaders(headers(&[PATH], false)));
    send(&mut exchange, ProcessingRequest { protocol_config, ..first });
    send(&mut exchange, request(Message::RequestBody(body(b"{", false))));
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "400")], false))));
    let got = Answered::of(&send(&mut exchange, request(Message::ResponseBody(body(b"early", true)))));
    assert_eq!((got.text(), got.ended), ("early", 1));
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(b"}", true)))));
    assert_eq!(got.kinds, ["request_body"]);
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn a_body_too_large_is_refused_by_its_length_or_at_the_byte_that_crosses() {
    let limits = Limits { max_body_bytes: 10, ..Limits::default() };
    let world = Setup { limits: limits.clone(), ..Setup::default() }.build();
    let mut exchange = world.exchange();
    let got = send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH, ("content-length", "11")], false))));
    assert_eq!(Answered::of(&got).refused.unwrap().0, 413);
    // Envoy keeps sending for a while.
    assert!(send(&mut exchange, request(Message::RequestBody(body(b"12345678901", false)))).is_empty());
    drop(exchange);

    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    assert!(send(&mut exchange, request(Message::RequestBody(body(b"1234567890", false)))).is_empty());
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(b"1", false)))));
    assert_eq!(got.set["x-attache-reason"], "body_too_large");
    assert_eq!(world.picker.buffered.bytes(), 0, "the buffer is given back at once");
    drop(exchange);
    world.assert_books_closed(2);
}

#[test]
fn bodies_held_at_once_are_bounded() {
    let limits = Limits { max_buffered_bytes: 100, ..Limits::default() };
    let world = Setup { limits, ..Setup::default() }.build();
    let mut holding = world.exchange();
    send(&mut holding, request(Message::RequestHeaders(headers(&[PATH], false))));
    send(&mut holding, request(Message::RequestBody(body(&[b' '; 80], false))));
    let mut refused = world.exchange();
    send(&mut refused, request(Message::RequestHeaders(headers(&[PATH], false))));
    let got = Answered::of(&send(&mut refused, request(Message::RequestBody(body(&[b' '; 30], false)))));
    assert_eq!(got.refused.as_ref().unwrap().0, 503);
    assert_eq!(got.set["retry-after"], "1");
    drop((holding, refused));
    world.assert_books_closed(2);
}

#[test]
fn headers_too_large_are_refused() {
    let world = Setup::default().build();
    let big = "x".repeat(70_000);
    let got = send(&mut world.exchange(), request(Message::RequestHeaders(headers(&[PATH, ("a", &big)], false))));
    assert_eq!(Answered::of(&got).refused.unwrap().0, 431);
}

#[test]
fn deadlines_are_ours() {
    let world = Setup::default().build();
    let limits = Limits::default();
    let mut exchange = world.exchange();
    assert_eq!(exchange.deadline(), Some(NOW.after(limits.idle_timeout)));
    assert!(exchange.on(Event::Deadline, NOW, &mut Actions::new()).is_err(), "an empty stream is closed");
    let mut exchange = world.exchange();
    send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
    assert_eq!(exchange.deadline(), Some(NOW.after(limits.request_timeout)));
    let mut out = Actions::new();
    exchange.on(Event::Deadline, NOW.after(limits.request_timeout), &mut out).unwrap();
    assert_eq!(Answered::of(out.make_contiguous()).refused.unwrap().0, 408);
    assert_eq!(exchange.deadline(), None);
    assert_eq!(routed(&world, None).deadline(), None, "an answer may take as long as it takes");
}

#[test]
fn messages_out_of_order_are_protocol_errors() {
    let world = Setup::default().build();
    let cases = [
        vec![Message::RequestBody(body(b"x", true))],
        vec![Message::RequestTrailers(HttpTrailers::default())],
        vec![Message::ResponseBody(body(b"x", true))],
        vec![Message::RequestHeaders(headers(&[PATH], false)), Message::RequestHeaders(headers(&[PATH], false))],
    ];
    let count = cases.len() as u64;
    for case in cases {
        let mut exchange = world.exchange();
        let results: Vec<_> = case
            .into_iter()
            .map(|m| exchange.on(Event::Message(Box::new(request(m))), NOW, &mut Actions::new()))
            .collect();
        assert!(results.last().unwrap().is_err());
    }
    let mut exchange = world.exchange();
    assert!(exchange.on(Event::Message(Box::default()), NOW, &mut Actions::new()).is_err(), "unknown oneof");
    drop(exchange);
    world.assert_books_closed(count + 1);
}

#[test]
fn a_continued_response_goes_where_its_state_is() {
    let world = Setup { servers: vec![(0, 0.1, &[]); 8], ..Setup::default() }.build();
    let ask = |body_text: &str| {
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[(":path", "/v1/responses")], false))));
        let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(body_text.as_bytes(), true)))));
        (exchange, got.set[DESTINATION].clone())
    };
    let (mut exchange, owner) = ask(r#"{"model":"m","input":"hello"}"#);
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], false))));
    let answer = br#"{"id":"resp_123","object":"response","output":[]}"#;
    send(&mut exchange, request(Message::ResponseBody(body(answer, true))));
    for _ in 0..8 {
        let (_, destination) = ask(r#"{"model":"m","input":"more","previous_response_id":"resp_123"}"#);
        assert_eq!(destination, owner);
        let path = (":path", "/v1/responses/resp_123/cancel");
        let get = request(Message::RequestHeaders(headers(&[path, (":method", "POST")], true)));
        assert_eq!(Answered::of(&send(&mut world.exchange(), get)).set[DESTINATION], owner);
    }
}

#[test]
fn failures_eject_and_a_retry_blames_who_was_passed_over() {
    let world = Setup { servers: vec![(0, 0.1, &[]); 2], ..Setup::default() }.build();
    let snapshot = world.snapshot.load_full();
    for _ in 0..2 {
        let mut exchange = routed(&world, None);
        let other = match world.picked(&exchange) {
            "192.168.1.1:8000" => "192.168.1.2:8000",
            _ => break,
        };
        let served = Value { kind: Some(Kind::StringValue(other.to_owned())) };
        let fields = HashMap::from([("x-gateway-destination-endpoint-served".to_owned(), served)]);
        let filter_metadata = HashMap::from([("envoy.lb".to_owned(), Struct { fields })]);
        let metadata_context = Some(Metadata { filter_metadata, ..Metadata::default() });
        let head = request(Message::ResponseHeaders(headers(&[(":status", "200")], false)));
        send(&mut exchange, ProcessingRequest { metadata_context, ..head });
        assert_eq!(snapshot.endpoints[1].endpoint.ledger.in_flight(), 1, "the booking follows");
        assert_eq!(snapshot.endpoints[0].endpoint.ledger.in_flight(), 0);
    }
    let fresh = Setup { servers: vec![(0, 0.1, &[])], ..Setup::default() }.build();
    for _ in 0..5 {
        let mut exchange = routed(&fresh, None);
        send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "503")], true))));
    }
    assert_eq!(fresh.picker.metrics.ejections.get(), 1);
    // The only endpoint is ejected: trying it beats refusing everything.
    drop(routed(&fresh, None));
}

impl World {
    fn picked(&self, _: &Exchange) -> &'static str {
        let snapshot = self.snapshot.load();
        let busy = snapshot.endpoints.iter().position(|s| s.endpoint.ledger.in_flight() == 1);
        ["192.168.1.1:8000", "192.168.1.2:8000"][busy.unwrap()]
    }
}

// === any order of events ===

#[derive(Clone, Debug)]
enum Step {
    RequestHeaders { eos: bool, path: u8 },
    RequestBody { bytes: Vec<u8>, eos: bool },
    RequestTrailers,
    ResponseHeaders { status: u16, eos: bool },
    ResponseBody { bytes: Vec<u8>, eos: bool },
    ResponseTrailers,
    Deadline,
    Nothing,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![
        Just(br#"{"model":"m","prompt":"p"}"#.to_vec()),
        Just(br#"{"model":"m","#.to_vec()),
        Just(br#""prompt":"p"}"#.to_vec()),
        Just(Vec::new()),
        Just(br#"data: {"model":"t","usage":{"prompt_tokens":3}}"#.to_vec()),
        prop::collection::vec(any::<u8>(), 0..40),
    ];
    prop_oneof![
        3 => (any::<bool>(), 0u8..5).prop_map(|(eos, path)| Step::RequestHeaders { eos, path }),
        4 => (bytes.clone(), any::<bool>()).prop_map(|(bytes, eos)| Step::RequestBody { bytes, eos }),
        1 => Just(Step::RequestTrailers),
        3 => (prop_oneof![Just(200u16), Just(503), Just(429), Just(0)], any::<bool>())
            .prop_map(|(status, eos)| Step::ResponseHeaders { status, eos }),
        4 => (bytes, any::<bool>()).prop_map(|(bytes, eos)| Step::ResponseBody { bytes, eos }),
        1 => Just(Step::ResponseTrailers),
        1 => Just(Step::Deadline),
        1 => Just(Step::Nothing),
    ]
}

fn event(step: &Step) -> Event {
    let paths = ["/v1/completions", "/v1/models", "/unknown", "/v1/responses/resp_1", "/v1/messages"];
    let message = match step {
        Step::RequestHeaders { eos, path } => {
            Message::RequestHeaders(headers(&[(":path", paths[usize::from(*path)])], *eos))
        }
        Step::RequestBody { bytes, eos } => Message::RequestBody(body(bytes, *eos)),
        Step::RequestTrailers => Message::RequestTrailers(HttpTrailers::default()),
        Step::ResponseHeaders { status, eos } => {
            Message::ResponseHeaders(headers(&[(":status", &status.to_string())], *eos))
        }
        Step::ResponseBody { bytes, eos } => Message::ResponseBody(body(bytes, *eos)),
        Step::ResponseTrailers => Message::ResponseTrailers(HttpTrailers::default()),
        Step::Deadline => return Event::Deadline,
        Step::Nothing => return Event::Message(Box::default()),
    };
    Event::Message(Box::new(request(message)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn any_order_of_events_ends_in_exactly_one_outcome(
        steps in prop::collection::vec(step(), 0..14),
        modes in (0i32..6, 0i32..6, any::<bool>()),
        unsaid in any::<bool>(),
        rename in any::<bool>(),
    ) {
        let target = RewriteTarget { model: "t".into(), weight: 1 };
        let any = if rename { vec![target] } else { Vec::new() };
        let world = Setup { rewrites: ModelRewrites { any, ..ModelRewrites::default() }, servers: vec![(0, 0.1, &[]); 2], ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let mut out = Actions::new();
        for (at, step) in steps.iter().enumerate() {
            let mut event = event(step);
            if let (0, false, Event::Message(m)) = (at, unsaid, &mut event) {
                m.protocol_config = Some(ProtocolConfiguration {
                    request_body_mode: modes.0,
                    response_body_mode: modes.1,
                    send_body_without_waiting_for_header_response: modes.2,
                });
            }
            let before = exchange.outcome();
            let result = exchange.on(event, NOW, &mut out);
            prop_assert!(before.is_none() || exchange.outcome() == before, "an outcome never changes");
            if result.is_err() {
                break;
            }
        }
        let answered = Answered::of(out.make_contiguous());
        let refusals = answered.kinds.iter().filter(|k| **k == "immediate").count();
        let named = answered.kinds.iter().filter(|k| **k == "request_headers").count();
        prop_assert!(refusals <= 1 && named <= 1);
        if refusals == 1 {
            prop_assert_eq!(*answered.kinds.last().unwrap(), "immediate", "nothing follows a refusal");
            prop_assert_eq!(answered.metadata, None);
        }
        let first_body = answered.kinds.iter().position(|k| *k == "request_body");
        let first_head = answered.kinds.iter().position(|k| *k == "request_headers");
        prop_assert!(first_body.is_none() || first_head < first_body, "headers before body");
        drop(exchange);
        world.assert_books_closed(1);
    }

    #[test]
    fn full_duplex_bodies_pass_byte_for_byte(
        padding in 0usize..200_000,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let world = Setup::default().build();
        let sent = completion("m", &"x".repeat(padding)).into_bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(sent.len())).collect();
        cuts.extend([0, sent.len()]);
        cuts.sort_unstable();
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
        for pair in cuts.windows(2) {
            send(&mut exchange, request(Message::RequestBody(body(&sent[pair[0]..pair[1]], false))));
        }
        let answers = send(&mut exchange, request(Message::RequestBody(body(b"", true))));
        let all = Answered::of(&answers);
        prop_assert_eq!(all.ended, 1);
        prop_assert!(all.body == sent);
        for answer in &answers {
            if let Some(Response::RequestBody(_)) = &answer.response {
                prop_assert!(applied(answer, &[]).len() <= 64 << 10);
            }
        }
    }
}
