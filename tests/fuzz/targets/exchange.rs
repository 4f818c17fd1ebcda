//! Any messages in any order and mode: no panic, one outcome, no request or byte held at the end, and no message after
//! a rejection.

#![no_main]

use attache_types::clock::{Clock, Timestamp};
use attache_config::settings::ExchangeSettings;
use attache_ext_proc::exchange::Actions;
use attache_ext_proc::{Event, Exchange, Processor};
use attache_types::ids::EndpointId;
use attache_types::limits::Limits;
use attache_picker::event::StreamOutcome;
use attache_picker::prefix::{PoolPrefix, Tokenizer};
use attache_picker::{ActiveConfig, Picker, PoolRuntime};
use attache_pool::health::HealthPolicy;
use attache_pool::{Endpoint, EndpointSpec, EndpointState, PoolSnapshot, SnapshotStore};
use attache_prefix::cache::{BlockUnit, CacheConfig, PrefixCache};
use attache_prompt::characters::Characters;
use attache_scheduling::router::{Destination, ModelRewrites, RewriteTarget};
use attache_scheduling::{Choices, Pool, Scheduler};
use attache_telemetry::Telemetry;
use attache_telemetry::decisions::Decisions;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::trace::Tracing;
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::service::ext_proc::v3::processing_request::Request;
use envoy_types::pb::envoy::service::ext_proc::v3::processing_response::Response;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProtocolConfiguration,
};
use libfuzzer_sys::fuzz_target;
use std::sync::Arc;
use std::time::Duration;

const PATHS: [&str; 8] = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses/resp_1",
    "/v1/audio/transcriptions",
    "/vllm.grpc.engine.VllmEngine/Generate",
    "/unknown",
    "",
];

struct World {
    processor: Arc<Processor>,
    endpoint: Arc<Endpoint>,
}

fn world(rename: bool) -> World {
    let endpoint = Arc::new(Endpoint::new(EndpointId(0), EndpointSpec::at(([127, 0, 0, 1], 8000).into())));
    let store = Arc::new(SnapshotStore::default());
    store.publish(PoolSnapshot::new(1, true, vec![EndpointState::new(endpoint.clone(), None)]));
    let strategy = attache::plugins::registry().build("pipeline", &serde_json::Value::Null).unwrap();
    let target = RewriteTarget { model: "t".into(), weight: 1 };
    let scheduler = Scheduler::new(Choices::only("test", strategy), HealthPolicy::default(), 2);
    let pool = Pool {
        rewrites: ModelRewrites { any: if rename { vec![target] } else { Vec::new() }, ..ModelRewrites::default() },
        destination: Destination::List,
        ..Pool::new("p".into(), store, scheduler, Duration::from_secs(2))
    };
    let cache = Arc::new(PrefixCache::new(&CacheConfig {
        claim_every_block: false,
        unit: BlockUnit::Bytes(8),
        max_bytes: 1 << 20,
        tenant_share: 1.0,
        claim_life: Duration::from_secs(30),
        seed: 7,
    }));
    cache.reconcile(&pool.store.load());
    let characters = Characters { block_size: cache.block_size().clone(), ..Characters::new(cache.space()) };
    let tokenizer = Tokenizer::Characters(characters);
    let clock = Clock::start();
    let prefix = PoolPrefix {
        cache,
        tokenizer,
        tenant_header: None,
        isolate_tenants: false,
        named_by_adapter: false,
        choose_rank: false,
        ranks_tell: false,
        clock,
    };
    let metrics = Metrics::register(&mut prometheus_client::registry::Registry::default());
    let limits = Limits { max_body_bytes: 4_096, ..Limits::default() };
    let observer = Arc::new(metrics.pool("pool"));
    let runtime = PoolRuntime { pool: Arc::new(pool), observer, prefix: Some(Arc::new(prefix)), queue: None };
    let config = ActiveConfig::new(vec![Arc::new(runtime)], limits, ExchangeSettings::default());
    let telemetry = Arc::new(Telemetry { metrics, decisions: Arc::new(Decisions::new(2, clock)) });
    let picker = Picker::new(config, telemetry.clone(), 1);
    World { processor: Arc::new(Processor::new(picker, &telemetry, Tracing::default())), endpoint }
}

/// Takes `count` bytes from the front.
fn take<'a>(data: &mut &'a [u8], count: usize) -> &'a [u8] {
    let (head, tail) = data.split_at(count.min(data.len()));
    *data = tail;
    head
}

fn byte(data: &mut &[u8]) -> u8 {
    take(data, 1).first().copied().unwrap_or(0)
}

fn headers(data: &mut &[u8], eos: bool) -> HttpHeaders {
    let header =
        |key: &str, value: &[u8]| HeaderValue { key: key.into(), raw_value: value.into(), ..HeaderValue::default() };
    let choice = byte(data);
    let mut all = vec![
        header(":path", PATHS[usize::from(choice & 7)].as_bytes()),
        header(":status", if choice & 8 == 0 { b"200" } else { b"503" }),
    ];
    let length = usize::from(byte(data) & 63);
    let value = take(data, length);
    match choice >> 4 {
        1 => all.push(header("content-type", value)),
        2 => all.push(header("content-length", value)),
        3 => all.push(header("content-encoding", value)),
        4 => all.push(header("x-gateway-destination-endpoint", value)),
        5 => all.push(header("upgrade", value)),
        6 => all.push(header("traceparent", value)),
        _ => {}
    }
    HttpHeaders { headers: Some(HeaderMap { headers: all }), end_of_stream: eos, ..HttpHeaders::default() }
}

fn message(data: &mut &[u8]) -> Option<Request> {
    let op = byte(data);
    let eos = op & 8 != 0;
    let body = |data: &mut &[u8]| {
        let length = usize::from(byte(data)) * 4;
        HttpBody { body: take(data, length).to_vec(), end_of_stream: eos, ..HttpBody::default() }
    };
    Some(match op & 7 {
        0 => Request::RequestHeaders(headers(data, eos)),
        1 | 2 => Request::RequestBody(body(data)),
        3 => Request::RequestTrailers(HttpTrailers::default()),
        4 => Request::ResponseHeaders(headers(data, eos)),
        5 | 6 => Request::ResponseBody(body(data)),
        _ if eos => Request::ResponseTrailers(HttpTrailers::default()),
        _ => return None,
    })
}

fuzz_target!(|data: &[u8]| {
    let mut data = data;
    let setup = byte(&mut data);
    let world = world(setup & 1 != 0);
    let config = ProtocolConfiguration {
        request_body_mode: i32::from(setup >> 1 & 7),
        response_body_mode: i32::from(setup >> 4 & 7),
        send_body_without_waiting_for_header_response: setup & 128 != 0,
    };
    let mut exchange = Exchange::new(world.processor.clone(), Timestamp(1));
    let mut out = Actions::new();
    let mut now = Timestamp(2);
    while !data.is_empty() {
        now = Timestamp(now.0 + 1_000_000);
        let event = match message(&mut data) {
            None => Event::Deadline,
            Some(request) => Event::Message(Box::new(ProcessingRequest {
                request: Some(request),
                protocol_config: Some(config),
                ..ProcessingRequest::default()
            })),
        };
        if exchange.on(event, now, &mut out).is_err() {
            break;
        }
    }
    let refused = out.iter().position(|a| matches!(a.response, Some(Response::ImmediateResponse(_))));
    assert!(refused.is_none_or(|at| at + 1 == out.len()), "something was said after a refusal");
    drop(exchange);
    assert_eq!(world.endpoint.ledger.in_flight(), 0);
    assert_eq!(world.endpoint.ledger.prefill_tokens(), 0);
    assert_eq!(world.processor.picker.buffered.bytes(), 0);
    let outcomes: u64 = StreamOutcome::ALL.iter().map(|o| world.processor.metrics.outcomes.get(*o)).sum();
    assert_eq!(outcomes, 1);
});
