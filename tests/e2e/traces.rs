//! Traces over OTLP: Envoy, the picker and the model servers send their spans to one collector, which gets one trace.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http, Reply};
use crate::support::collector::{Collector, Seen, names};
use crate::support::echo::Echo;
use crate::support::envoy::{EnvoyProcess, shipped};
use crate::support::process::{eventually, scratch};
use crate::support::prometheus::PrometheusProcess;
use crate::support::sim::SimProcess;
use http::{HeaderValue, Request};
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode;
use serde_json::json;
use std::net::SocketAddr;
use tokio::net::TcpListener;

const PARENT: &str = "00f067aa0ba902b7";
/// Clocks of two processes on one machine differ by less, nanoseconds.
const CLOCKS: u64 = 5_000_000;

/// Envoy's bootstrap with its lines for traces enabled. Spans are sent as soon as they end.
fn traced(picker: &AttacheProcess, collector: &Collector) -> String {
    let (grpc, health, traces) = (picker.grpc.port(), picker.health.port(), collector.address.port());
    let bootstrap = shipped("original-dst.yaml", &[(8080, 0), (9901, 0), (9002, grpc), (9003, health), (4317, traces)]);
    assert!(bootstrap.contains("#traces "), "no lines to activate");
    let flush = "layered_runtime:\n  layers:\n  - name: tests\n    \
                 static_layer: {tracing.opentelemetry.min_flush_spans: 1}\n";
    format!("{}{flush}", bootstrap.replace("#traces ", ""))
}

/// The picker with three pools, Envoy and all servers, which send their spans to one collector.
struct Stack {
    collector: Collector,
    plain: SimProcess,
    _queued: SimProcess,
    split: SimProcess,
    picker: AttacheProcess,
    envoy: EnvoyProcess,
}

impl Stack {
    async fn start() -> Self {
        let collector = Collector::start().await;
        let url = collector.url();
        let sim = |model: &'static str| ["--model", model, "--speed", "4", "--otlp-traces-endpoint", &url];
        let plain = SimProcess::start(1, &sim("plain")).await;
        let queued = SimProcess::start(1, &sim("queued")).await;
        let split = SimProcess::with_roles("prefill=1,decode=1", 2, &sim("split")).await;
        let [prefill, decode] = split.servers[..] else { panic!("two servers") };
        let text = format!(
            "apiVersion: attache.dev/v1
kind: Attache
pools:
- name: plain
  match: {{models: [plain]}}
  prefixCache: {{tokenizer: remote}}
  endpoints: [\"{}\"]
- name: queued
  match: {{models: [queued]}}
  endpoints: [\"{}\"]
  flowControl:
    enabled: true
    detector: {{name: concurrency-detector, parameters: {{maxConcurrency: 1}}}}
- name: split
  match: {{models: [split]}}
  disaggregation: {{decider: always}}
  endpoints: [{{address: \"{prefill}\", role: prefill}}, {{address: \"{decode}\", role: decode}}]
",
            plain.servers[0], queued.servers[0]
        );
        let arguments = ["--config-text", &text, "--otlp-endpoint", &url, "--trace-ratio", "0"];
        let picker = AttacheProcess::with_arguments(&arguments.map(str::to_owned)).await;
        let envoy = EnvoyProcess::start(&traced(&picker, &collector)).await;
        Self { collector, plain, _queued: queued, split, picker, envoy }
    }

    fn to(&self) -> SocketAddr {
        self.envoy.listener("inference")
    }

    async fn ask(&self, trace: &str, model: &str) -> Reply {
        client::send(self.to(), Http::H1, question(self.to(), trace, model, 8)).await.expect("an answer")
    }

    /// The spans of a trace once Envoy's root is there, which ends last, and `count` spans of servers.
    async fn trace(&self, trace: &str, servers: usize) -> Trace {
        let complete = |spans: &[Seen]| {
            let of = |service: &str| spans.iter().filter(|seen| seen.service == service).count();
            let picked = spans.iter().any(|seen| seen.service == "attache" && seen.kind() == SpanKind::Server);
            spans.iter().any(|seen| seen.parent == PARENT) && picked && of("attache-sim") == servers
        };
        Trace(self.collector.trace(trace, complete).await)
    }

    async fn end(self) {
        self.envoy.assert_picker_was_correct().await;
        self.picker.assert_settled().await;
    }
}

/// A streamed chat of a client that has sampled this trace.
fn question(to: SocketAddr, trace: &str, model: &str, tokens: u32) -> Request<Payload> {
    let body = json!({
        "model": model, "stream": true, "stream_options": {"include_usage": true}, "max_tokens": tokens,
        "messages": [{"role": "user", "content": "How high is the tide? ".repeat(40)}],
    });
    let target = "/v1/chat/completions?key=secret";
    let mut request = client::request("POST", to, Http::H1, target, Payload::sized(body.to_string().into()));
    let context = format!("00-{trace}-{PARENT}-01");
    request.headers_mut().insert("traceparent", HeaderValue::from_str(&context).expect("a header value"));
    request
}

/// The spans of one trace.
struct Trace(Vec<Seen>);

impl Trace {
    fn one(&self, service: &str, name: &str) -> &Seen {
        let found: Vec<&Seen> =
            self.0.iter().filter(|seen| seen.service == service && seen.span.name == name).collect();
        let [one] = found[..] else { panic!("{} of {service} {name} in {:?}", found.len(), names(&self.0)) };
        one
    }

    fn parent(&self, of: &Seen) -> &Seen {
        let found = self.0.iter().find(|seen| seen.id == of.parent);
        found.unwrap_or_else(|| panic!("{} has no parent in {:?}", of.span.name, names(&self.0)))
    }

    /// The picker's span, which is named so.
    fn request(&self, name: &str) -> &Seen {
        let request = self.one("attache", name);
        let call = self.parent(request);
        assert_eq!((&*call.service, call.kind()), ("envoy", SpanKind::Client), "{}", call.span.name);
        assert!(call.span.name.contains("envoy.service.ext_proc.v3.ExternalProcessor"), "{}", call.span.name);
        assert_eq!(request.kind(), SpanKind::Server);
        let ingress = self.parent(call);
        assert_eq!((&*ingress.service, &*ingress.parent), ("envoy", PARENT), "{}", ingress.span.name);
        request
    }

    /// The picker's steps, in the order in which they began. Each is within the request, and the next one begins where
    /// it ends.
    fn steps(&self, request: &Seen) -> Vec<&str> {
        let mut steps: Vec<&Seen> = self.0.iter().filter(|seen| seen.parent == request.id).collect();
        steps.retain(|step| step.service == "attache");
        steps.sort_by_key(|step| step.times());
        let (begin, end) = request.times();
        for step in &steps {
            assert!(begin <= step.times().0 && step.times().1 <= end, "{} is not within the request", step.span.name);
        }
        for pair in steps.windows(2) {
            let ((_, end), (begin, _)) = (pair[0].times(), pair[1].times());
            assert!(end <= begin, "{} begins before {} ends", pair[1].span.name, pair[0].span.name);
        }
        steps.iter().map(|step| &*step.span.name).collect()
    }

    /// Asserts that each span is within its parent, of another process too.
    fn assert_nested(&self) {
        for seen in self.0.iter().filter(|seen| seen.parent != PARENT) {
            let parent = self.parent(seen);
            let ((begin, end), (outer_begin, outer_end)) = (seen.times(), parent.times());
            let within = outer_begin <= begin + CLOCKS && end <= outer_end + CLOCKS;
            assert!(within, "{} is not within {}", seen.span.name, parent.span.name);
        }
    }

    /// Asserts attributes of a span.
    fn assert_attributes(seen: &Seen, expected: &[(&str, &str)]) {
        for (key, value) in expected {
            assert_eq!(seen.attribute(key), *value, "{key} of {}", seen.span.name);
        }
    }
}

fn status(seen: &Seen) -> StatusCode {
    seen.span.status.as_ref().map_or(StatusCode::Unset, |status| status.code())
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_picker_and_servers_share_one_trace() {
    let stack = Stack::start().await;
    routed_request_has_all_steps(&stack).await;
    queued_request_shows_its_wait(&stack).await;
    split_request_shows_its_prefill(&stack).await;
    rejected_request_shows_the_reason(&stack).await;
    failing_server_is_an_error(&stack).await;
    cancelled_request_ends_without_error(&stack).await;
    stack.end().await;
}

async fn routed_request_has_all_steps(stack: &Stack) {
    let id = "4bf92f3577b34da6a3ce929d0e0e4701";
    assert_eq!(stack.ask(id, "plain").await.status, 200);
    let trace = stack.trace(id, 1).await;
    let request = trace.request("chat plain");
    assert_eq!(trace.steps(request), ["body", "tokens", "decision", "first_byte", "response"]);
    trace.assert_nested();
    assert_eq!(trace.parent(trace.one("attache", "lookup")).span.name, "decision");
    let server = trace.one("attache-sim", "llm_request");
    let forwarded = trace.parent(server);
    assert_eq!((&*forwarded.service, forwarded.kind()), ("envoy", SpanKind::Client), "{}", forwarded.span.name);
    let at = stack.plain.servers[0];
    Trace::assert_attributes(
        request,
        &[
            ("gen_ai.operation.name", "chat"),
            ("gen_ai.provider.name", "vllm"),
            ("gen_ai.request.model", "plain"),
            ("gen_ai.request.stream", "true"),
            ("gen_ai.usage.input_tokens", &server.attribute("gen_ai.usage.prompt_tokens")),
            ("gen_ai.usage.output_tokens", "8"),
            ("http.request.method", "POST"),
            ("http.response.status_code", "200"),
            ("url.path", "/v1/chat/completions"),
            ("server.address", "127.0.0.1"),
            ("server.port", &at.port().to_string()),
            ("error.type", ""),
            ("attache.pool", "plain"),
            ("attache.endpoint", &at.to_string()),
            ("attache.prompt_tokens", &server.attribute("gen_ai.usage.prompt_tokens")),
            ("attache.end", "complete"),
        ],
    );
    assert_ne!(request.attribute("attache.reason"), "");
    assert_ne!(request.attribute("attache.request_id"), "", "Envoy gives it one");
    let ttft: f64 = request.attribute("gen_ai.response.time_to_first_chunk").parse().expect("seconds");
    let (begin, end) = request.times();
    assert!(ttft > 0.0 && ttft < (end - begin) as f64 / 1e9, "{ttft}");
}

async fn queued_request_shows_its_wait(stack: &Stack) {
    let (first, second) = ("4bf92f3577b34da6a3ce929d0e0e4702", "4bf92f3577b34da6a3ce929d0e0e4703");
    let mut holder = client::open(stack.to(), Http::H1, question(stack.to(), first, "queued", 100)).await.expect("one");
    holder.next().await.expect("a chunk");
    let (holder, reply) = tokio::join!(holder.finish(), stack.ask(second, "queued"));
    assert_eq!((holder.expect("its rest").status.as_u16(), reply.status.as_u16()), (200, 200));
    let trace = stack.trace(second, 1).await;
    let request = trace.request("chat queued");
    assert_eq!(trace.steps(request), ["body", "queue", "decision", "first_byte", "response"]);
    trace.assert_nested();
    let (begin, end) = trace.one("attache", "queue").times();
    let queued: f64 = request.attribute("attache.queue_time").parse().expect("seconds");
    // The wait for the decision counts from the request's headers.
    assert!(queued * 1e9 >= (end - begin) as f64, "{queued} s in the queue, its span has {} ns", end - begin);
    let before = stack.trace(first, 1).await;
    assert_eq!(before.request("chat queued").attribute("attache.queue_time"), "");
}

async fn split_request_shows_its_prefill(stack: &Stack) {
    let id = "4bf92f3577b34da6a3ce929d0e0e4704";
    assert_eq!(stack.ask(id, "split").await.status, 200);
    let trace = stack.trace(id, 2).await;
    let request = trace.request("chat split");
    assert_eq!(trace.steps(request), ["body", "decision", "prefill", "first_byte", "response"]);
    trace.assert_nested();
    let prefill = trace.one("attache", "prefill");
    let [first, second] = [0, 1].map(|at| stack.split.servers[at]);
    assert_eq!(prefill.kind(), SpanKind::Client);
    Trace::assert_attributes(prefill, &[("server.port", &first.port().to_string()), ("error.type", "")]);
    Trace::assert_attributes(
        request,
        &[("attache.prefill.endpoint", &first.to_string()), ("attache.endpoint", &second.to_string())],
    );
    let servers: Vec<&Seen> = trace.0.iter().filter(|seen| seen.service == "attache-sim").collect();
    let parents: Vec<&str> = servers.iter().map(|server| &*trace.parent(server).service).collect();
    assert!(parents.contains(&"attache") && parents.contains(&"envoy"), "{parents:?}");
    let own = servers.iter().find(|server| server.parent == prefill.id).expect("the prefill server's span");
    assert_eq!(own.attribute("gen_ai.usage.completion_tokens"), "1", "it only computes the prompt");
}

async fn rejected_request_shows_the_reason(stack: &Stack) {
    let id = "4bf92f3577b34da6a3ce929d0e0e4705";
    assert_eq!(stack.ask(id, "unknown").await.status, 404);
    let trace = stack.trace(id, 0).await;
    let request = trace.request("chat");
    assert_eq!(trace.steps(request), ["body", "decision"]);
    trace.assert_nested();
    let reason = request.attribute("attache.rejection.reason");
    assert_ne!(reason, "");
    Trace::assert_attributes(
        request,
        &[
            ("error.type", &reason),
            ("http.response.status_code", "404"),
            ("attache.end", "rejected"),
            ("attache.endpoint", ""),
        ],
    );
    assert_eq!(status(request), StatusCode::Unset, "an error of the client");
}

async fn failing_server_is_an_error(stack: &Stack) {
    let id = "4bf92f3577b34da6a3ce929d0e0e4706";
    let fault = json!({"fail_next": {"count": 1, "status": 503}}).to_string();
    client::post(stack.plain.servers[0], "/sim/faults", fault.into()).await.expect("an answer");
    assert_eq!(stack.ask(id, "plain").await.status, 503);
    let trace = stack.trace(id, 0).await;
    let request = trace.request("chat plain");
    // The tokens of this prompt are known.
    assert_eq!(trace.steps(request), ["body", "decision", "first_byte", "response"]);
    trace.assert_nested();
    Trace::assert_attributes(
        request,
        &[("error.type", "503"), ("http.response.status_code", "503"), ("attache.end", "complete")],
    );
    assert_eq!(status(request), StatusCode::Error);
}

async fn cancelled_request_ends_without_error(stack: &Stack) {
    let id = "4bf92f3577b34da6a3ce929d0e0e4707";
    let mut open = client::open(stack.to(), Http::H1, question(stack.to(), id, "plain", 10_000)).await.expect("one");
    open.next().await.expect("a chunk");
    drop(open);
    let trace = stack.trace(id, 0).await;
    let request = trace.request("chat plain");
    let steps = trace.steps(request);
    assert_eq!(steps.last(), Some(&"response"), "{steps:?}");
    Trace::assert_attributes(
        request,
        &[("attache.end", "client_gone"), ("http.response.status_code", "200"), ("error.type", "")],
    );
    assert_eq!(status(request), StatusCode::Unset);
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

async fn ask(to: SocketAddr, traceparent: &str) -> String {
    let target = "/v1/chat/completions?tell=traceparent";
    let mut request = client::request("POST", to, Http::H1, target, Payload::sized(chat(300, false, 1)));
    request.headers_mut().insert("traceparent", HeaderValue::from_str(traceparent).expect("a header value"));
    let reply = client::send(to, Http::H1, request).await.expect("an answer");
    assert_eq!(reply.status, 200);
    reply.header("x-echo-told").trim_start_matches("traceparent=").to_owned()
}

/// An Envoy that does not trace passes on the contexts of the client and of the picker.
#[tokio::test(flavor = "multi_thread")]
async fn picker_span_is_between_client_and_server_spans() {
    let (echo, collector) = (Echo::start().await, Collector::start().await);
    let arguments = ["--otlp-endpoint", &collector.url(), "--trace-ratio", "0"];
    let picker = AttacheProcess::start(&[echo.address], &arguments).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let unsampled = format!("00-{TRACE}-{PARENT}-00");
    assert_eq!(ask(to, &unsampled).await, unsampled, "its caller has not sampled it");
    let sent = ask(to, &format!("00-{TRACE}-{PARENT}-01")).await;
    let request = |spans: &[Seen]| spans.iter().any(|seen| seen.parent == PARENT);
    let trace = Trace(collector.trace(TRACE, request).await);
    let span = trace.0.iter().find(|seen| seen.parent == PARENT).expect("it was awaited");
    assert_eq!(sent, format!("00-{TRACE}-{}-01", span.id), "the server continues our span");
    let requests = collector.spans().into_iter().filter(|seen| seen.kind() == SpanKind::Server).count();
    assert_eq!(requests, 1, "what its caller does not sample is not sampled");
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unreachable_collector_costs_no_request() {
    let echo = Echo::start().await;
    let nobody = TcpListener::bind("127.0.0.1:0").await.expect("a free port").local_addr().expect("an address");
    let endpoint = format!("http://{nobody}");
    let picker = AttacheProcess::start(&[echo.address], &["--otlp-endpoint", &endpoint, "--trace-ratio", "1"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    for _ in 0..20 {
        let sent = ask(to, "nonsense").await;
        assert_eq!((sent.len(), &sent[sent.len() - 3..]), (55, "-01"), "a new trace: {sent}");
    }
    envoy.assert_picker_was_correct().await;
    picker.assert_settled().await;
}

/// A sampled request is the exemplar of its histogram's buckets in a real Prometheus.
#[tokio::test(flavor = "multi_thread")]
async fn prometheus_links_histograms_to_traces() {
    let (sim, collector) = (SimProcess::start(1, &[]).await, Collector::start().await);
    let arguments = ["--otlp-endpoint", &collector.url(), "--trace-ratio", "0"];
    let picker = AttacheProcess::start(&[sim.servers[0]], &arguments).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let reply = client::send(to, Http::H1, question(to, TRACE, "sim-8b", 4)).await.expect("an answer");
    assert_eq!(reply.status, 200);
    let directory = scratch("exemplars");
    let file = directory.path().join("prometheus.yaml");
    let metrics = picker.metrics;
    let config = format!(
        "scrape_configs:\n- job_name: attache\n  scrape_interval: 1s\n  static_configs: [{{targets: [\"{metrics}\"]}}]\n"
    );
    std::fs::write(&file, config).expect("writing");
    let prometheus = PrometheusProcess::start_with(&file, &["--enable-feature=exemplar-storage"]).await;
    for name in ["attache_time_to_first_byte_seconds_bucket", "attache_request_duration_seconds_bucket"] {
        let path = format!("/api/v1/query_exemplars?query={name}&start=0&end=4000000000");
        let series = eventually("an exemplar", async || {
            let data = prometheus.get(&path).await;
            data.as_array().filter(|series| !series.is_empty()).cloned()
        })
        .await;
        let exemplar = &series[0]["exemplars"][0];
        assert_eq!(exemplar["labels"], json!({"trace_id": TRACE}), "{name}: {series:?}");
        assert_eq!(series[0]["seriesLabels"]["pool"], "default");
    }
    picker.assert_settled().await;
}
