//! Tests of the exchange without sockets: the reference picker's hermetic cases as a table, every body mode, and any
//! order of events.

#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test that can't go on fails")]

mod affinity;
mod charging;
mod conversation;
mod deadline;
mod destinations;
mod encoding;
mod explaining;
mod forms;
mod half_closed;
mod hermetic;
mod hints;
mod keeping;
mod limits;
mod logged;
mod message_timeout;
mod modes;
mod order;
mod prefix;
mod queueing;
mod recording;
mod rest;
mod room;
mod sessions;
mod sglang;
mod shedding;
mod sidecar;
mod slow_store;
mod splitting;
mod succession;
mod traces;
mod unpaired;
mod unread;
mod unshown;

use super::*;
use crate::queue_timer::QueueTimer;
use crate::warmer;
use attache_disagg as disagg;
use attache_flow::PoolFlow;
use attache_picker::Picker;
use attache_picker::active::PoolRuntime;
use attache_picker::head::DESTINATION;
use attache_picker::prefix::{PoolPrefix, Tokenizer};
use attache_picker::queues::Queues;
use attache_picker::quotas::{Quotas, Store};
use attache_picker::settings::{ExchangeSettings, ExplainSettings, ModelsAnswer, ReportUsage, UsageCount};
use attache_picker::warming::{Job, Warming};
use attache_pool::health::HealthPolicy;
use attache_pool::role::ROLE_LABEL;
use attache_pool::speed::PoolSpeed;
use attache_pool::{
    Endpoint, EndpointMetrics, EndpointSpec, EndpointState, LoraState, ModelList, PoolSnapshot, SnapshotStore,
};
use attache_prefix::cache::{BlockUnit, CacheConfig, PrefixCache};
use attache_prompt::characters::Characters;
use attache_quota::TenantSettings;
use attache_quota::{Book, Subject};
use attache_record::Recorder;
use attache_scheduling::router::{Destination, DestinationNames, ModelRewrites, PoolSwitches, RewriteTarget};
use attache_scheduling::{Choices, Pool, Registry, Scheduler, SplitPolicy};
use attache_telemetry::Telemetry;
use attache_telemetry::decisions::Decisions;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::trace::Tracing;
use attache_types::ids::EndpointId;
use attache_types::limits::Limits;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::body_mutation::Mutation;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{HeaderMutation, HttpHeaders};
use envoy_types::pb::envoy::service::ext_proc::v3::{HttpTrailers, ProtocolConfiguration};
use envoy_types::pb::google::protobuf::Struct;
use envoy_types::pb::google::protobuf::{ListValue, Value, value::Kind};
use std::collections::HashMap;
use std::time::{Duration, SystemTime};

const NOW: Timestamp = Timestamp(5_000_000_000);

/// A wall-clock time shortly after which no quota window ends.
fn noon() -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_secs(12 * 3_600)
}

/// An endpoint of the fixture: queue depth, KV-cache usage, active adapters. Endpoint i is 192.168.1.(i+1):8000.
type Server = (u32, f32, &'static [&'static str]);

struct World {
    processor: Arc<Processor>,
    snapshot: Arc<SnapshotStore>,
    book: Arc<Book>,
    timer: QueueTimer,
}

struct Setup {
    servers: Vec<Server>,
    strategy: &'static str,
    parameters: serde_json::Value,
    destination: Destination,
    destination_names: DestinationNames,
    rewrites: ModelRewrites,
    exchange: ExchangeSettings,
    limits: Limits,
    tokenizer: Option<Tokenizer>,
    engines_tell: bool,
    chooses_rank: bool,
    /// `llm-d.ai/role` of each endpoint; the rest have none.
    roles: &'static [&'static str],
    disagg: Option<(SplitPolicy, disagg::Mode)>,
    flow: Option<PoolFlow>,
    deadline_admission: bool,
    stale_after: Duration,
    tenants: Option<TenantSettings>,
    isolate_tenants: bool,
    recorder: Option<Arc<Recorder>>,
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
            destination_names: DestinationNames::default(),
            rewrites: ModelRewrites::default(),
            exchange: ExchangeSettings {
                trust_client_headers: true,
                prefill_endpoint_header: true,
                ..ExchangeSettings::default()
            },
            limits: Limits::default(),
            tokenizer: None,
            engines_tell: false,
            chooses_rank: false,
            roles: &[],
            disagg: None,
            flow: None,
            deadline_admission: false,
            stale_after: Duration::from_secs(2),
            tenants: None,
            isolate_tenants: false,
            recorder: None,
        }
    }
}

impl Setup {
    fn build(self) -> World {
        let role = |i: u32| self.roles.get(i as usize).copied();
        let speed = Arc::default();
        let endpoints = self.servers.iter().zip(0u32..).map(|(server, i)| state(i, *server, role(i), &speed)).collect();
        let store = Arc::new(SnapshotStore::default());
        store.publish(PoolSnapshot::new(1, true, endpoints));
        let registry = Registry::new(&[attache_pipeline::PLUGINS, attache_strategies::PLUGINS]);
        let strategy = registry.build(self.strategy, &self.parameters).unwrap();
        let (policy, mode) = self.disagg.unzip();
        // A test has few endpoints, and its clock stands still.
        let at_once =
            HealthPolicy { error_period: Duration::ZERO, max_ejection_percent: 100, ..HealthPolicy::default() };
        let scheduler = Scheduler::new(Choices::only("test", strategy), at_once, 3).splitting(policy.clone());
        let pool = Pool {
            rewrites: self.rewrites,
            destination: self.destination,
            destination_names: self.destination_names,
            disagg: mode.map(Arc::new),
            switches: PoolSwitches { deadline_admission: self.deadline_admission, ..PoolSwitches::default() },
            ..Pool::new("pool".into(), store.clone(), scheduler, self.stale_after)
        };
        let metrics = Metrics::register(&mut prometheus_client::registry::Registry::default());
        let cache = Arc::new(PrefixCache::new(&cache_config()));
        cache.reconcile(&store.load());
        let tokenizer = self.tokenizer.unwrap_or_else(|| Tokenizer::Characters(Characters::new(cache.space())));
        let clock = attache_types::clock::Clock::start();
        let prefix = PoolPrefix {
            cache,
            tokenizer,
            tenant_header: self.isolate_tenants.then(|| "x-tenant".to_owned()),
            isolate_tenants: self.isolate_tenants,
            named_by_adapter: self.engines_tell,
            choose_rank: self.engines_tell || self.chooses_rank,
            ranks_tell: self.engines_tell,
            clock,
        };
        let rng = attache_types::rng::for_request(7, 0);
        let timer = QueueTimer::default();
        let queues = self.flow.map(|flow| {
            let split = policy;
            let (health, stale_after) = (HealthPolicy::default(), self.stale_after);
            let observer = Box::new(metrics.queues("pool"));
            Queues::new(flow, store.clone(), health, split, stale_after, observer, rng, timer.waker()).unwrap()
        });
        let runtime = PoolRuntime {
            observer: Arc::new(metrics.pool("pool")),
            pool: Arc::new(pool),
            prefix: Some(Arc::new(prefix)),
            queue: queues,
        };
        let telemetry = Arc::new(Telemetry { metrics, decisions: Arc::new(Decisions::new(16, clock)) });
        let book = Arc::new(Book::new(100));
        let accounts = Store::Memory(book.clone());
        let quotas = self
            .tenants
            .map(|tenants| Arc::new(Quotas::new(Subject::Tenant, tenants, accounts, telemetry.clone(), noon)))
            .into_iter()
            .collect();
        let config = ActiveConfig::new(vec![Arc::new(runtime)], self.limits, self.exchange).with_quotas(quotas);
        let picker = Picker::new(config, telemetry.clone(), 7).recorded(self.recorder);
        let processor = Arc::new(Processor::new(picker, &telemetry, Tracing::default()));
        World { processor, snapshot: store, book, timer }
    }
}

fn cache_config() -> CacheConfig {
    CacheConfig {
        claim_every_block: false,
        unit: BlockUnit::Bytes(64),
        max_bytes: 16 << 20,
        tenant_share: 1.0,
        claim_life: Duration::from_secs(30),
        seed: 7,
    }
}

/// Runs background work on this thread.
fn compute(warming: Warming) {
    match warming.job {
        Job::Cpu(computation) => computation.compute(),
        Job::Call(_) => panic!("it is a call"),
    }
}

fn state(i: u32, (waiting, kv_usage, loras): Server, role: Option<&str>, speed: &Arc<PoolSpeed>) -> EndpointState {
    let address = ([192, 168, 1, u8::try_from(i + 1).unwrap()], 8000).into();
    let running = loras.iter().map(|l| Arc::from(*l)).collect();
    let metrics = EndpointMetrics {
        scraped_at: NOW,
        waiting,
        kv_usage,
        lora: Some(LoraState { max: 0, running, waiting: Vec::new() }),
        ..EndpointMetrics::default()
    };
    let labels = role.iter().map(|role| (ROLE_LABEL.into(), (*role).into())).collect();
    let spec = EndpointSpec { labels, ..EndpointSpec::at(address) };
    EndpointState::new(Arc::new(Endpoint::in_pool(EndpointId(i), spec, speed)), Some(Arc::new(metrics)))
}

impl World {
    fn exchange(&self) -> Exchange {
        Exchange::new(self.processor.clone(), NOW)
    }

    /// Asserts that no booking and no memory is held, and that every stream is counted once.
    fn assert_books_closed(&self, streams: u64) {
        for state in &self.snapshot.load().endpoints {
            let ledger = &state.endpoint.ledger;
            let pending = state.endpoint.speed.pending();
            assert_eq!(
                (ledger.in_flight(), ledger.prefill_tokens(), pending),
                (0, 0, 0),
                "{}",
                state.endpoint.authority
            );
        }
        assert_eq!((self.processor.picker.buffered.bytes(), self.book.busy()), (0, 0));
        let config = self.processor.picker.config();
        config.pools()[0].queue.as_ref().into_iter().for_each(|queues| queues.assert_books_closed());
        assert!(config.pools()[0].prefix.as_ref().is_none_or(|prefix| prefix.cache.claims().is_empty()));
        let counted: u64 = StreamOutcome::ALL.iter().map(|o| self.processor.metrics.outcomes.get(*o)).sum();
        assert_eq!((self.processor.metrics.streams_opened.get(), counted), (streams, streams));
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

/// Response headers from the endpoint `address`, which need not be the one that Envoy tried first.
fn answered_by(address: &str, end: bool) -> ProcessingRequest {
    let served = Value { kind: Some(Kind::StringValue(address.to_owned())) };
    let fields = HashMap::from([(attache_picker::head::DESTINATION_SERVED.to_owned(), served)]);
    let filter_metadata = HashMap::from([("envoy.lb".to_owned(), Struct { fields })]);
    let metadata_context = Some(Metadata { filter_metadata, ..Metadata::default() });
    let head = request(Message::ResponseHeaders(headers(&[(":status", "200")], end)));
    ProcessingRequest { metadata_context, ..head }
}

fn config(request: BodySendMode, response: BodySendMode, nowait: bool) -> ProtocolConfiguration {
    ProtocolConfiguration {
        request_body_mode: request.into(),
        response_body_mode: response.into(),
        send_body_without_waiting_for_header_response: nowait,
    }
}

/// The headers, metadata and body that replies set, independent of the body mode.
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
fn scores_of_all_endpoints_are_in_metadata_if_configured() {
    for told in [false, true] {
        let explain = ExplainSettings { metadata: told, ..ExplainSettings::default() };
        let exchange = ExchangeSettings { explain, ..ExchangeSettings::default() };
        let setup =
            Setup { strategy: "predicted-latency", parameters: serde_json::Value::Null, exchange, ..Setup::default() };
        let world = setup.build();
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
        let got = send(&mut exchange, request(Message::RequestBody(body(completion("m", "p").as_bytes(), true))));
        let metadata = got.iter().find_map(|r| r.dynamic_metadata.clone()).expect("metadata");
        let Some(Kind::StructValue(lb)) = &metadata.fields["envoy.lb"].kind else { panic!("{metadata:?}") };
        let scores = lb.fields.get("x-gateway-destination-endpoint-scores").and_then(|v| v.kind.clone());
        let Some(Kind::StructValue(scores)) = scores else {
            assert!(!told, "{lb:?}");
            continue;
        };
        assert!(told);
        let number = |address: &str| match scores.fields[address].kind {
            Some(Kind::NumberValue(n)) => n,
            _ => panic!("{scores:?}"),
        };
        let picked = match &lb.fields["x-gateway-destination-endpoint"].kind {
            Some(Kind::StringValue(address)) => address.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!(scores.fields.len(), world.snapshot.load().endpoints.len());
        assert!(scores.fields.keys().all(|address| number(&picked) <= number(address)), "{picked} of {scores:?}");
    }
}

#[test]
fn endpoint_speed_is_learned_from_streamed_responses_only() {
    for (stream, content_type, learns) in
        [(true, "text/event-stream", true), (false, "application/json", false), (true, "application/json", false)]
    {
        let world =
            Setup { strategy: "predicted-latency", parameters: serde_json::Value::Null, ..Setup::default() }.build();
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
        let sent = format!(r#"{{"model":"m","prompt":"p","stream":{stream}}}"#);
        send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true))));
        let snapshot = world.snapshot.load_full();
        let pending: u32 = snapshot.endpoints.iter().map(|s| s.endpoint.speed.pending()).sum();
        assert_eq!(pending, u32::from(stream), "{stream} {content_type}");
        let pairs = [(":status", "200"), ("content-type", content_type)];
        send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
        let mut out = Actions::new();
        let first = Message::ResponseBody(body(b"data: {}\n\n", false));
        exchange.on(Event::Message(Box::new(request(first))), NOW.after(Duration::from_millis(300)), &mut out).unwrap();
        let learned = snapshot.endpoints.iter().filter(|s| s.endpoint.speed.learned().is_some()).count();
        assert_eq!(learned, usize::from(learns), "{stream} {content_type}");
        drop(exchange);
        world.assert_books_closed(1);
    }
}

impl World {
    fn assert_books_closed_but_open_stream(&self) {
        assert!(self.snapshot.load().endpoints.iter().all(|s| s.endpoint.ledger.in_flight() == 0));
    }
}

/// The bytes that Envoy passes on for a body message and its reply.
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
