//! A receiver of traces: OTLP over gRPC and over HTTP, on one port. It keeps all spans.

use super::body::hex;
use super::process::PATIENCE;
use axum::body::{Body, Bytes};
use axum::response::Response;
use axum::routing::post;
use http::{HeaderMap, HeaderValue};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue};
use opentelemetry_proto::tonic::trace::v1::Span;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::time::Instant;
use tonic::codegen::Service;

const GRPC: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
/// Bytes before a gRPC message: whether it is compressed, and its length.
const GRPC_PREFIX: usize = 5;

/// A received span.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// `service.name` of its process.
    pub(crate) service: String,
    /// Hexadecimal, as in `traceparent`.
    pub(crate) trace: String,
    pub(crate) id: String,
    /// Empty for a root.
    pub(crate) parent: String,
    pub(crate) span: Span,
}

impl Seen {
    /// An attribute as text; empty if it is absent.
    pub(crate) fn attribute(&self, key: &str) -> String {
        attribute(&self.span.attributes, key)
    }

    pub(crate) fn kind(&self) -> SpanKind {
        SpanKind::try_from(self.span.kind).expect("a known kind")
    }

    /// Its begin and its end, nanoseconds of Unix time.
    pub(crate) fn times(&self) -> (u64, u64) {
        (self.span.start_time_unix_nano, self.span.end_time_unix_nano)
    }
}

fn attribute(all: &[KeyValue], key: &str) -> String {
    let found = all.iter().find(|pair| pair.key == key).and_then(|pair| pair.value.as_ref());
    match found.and_then(|AnyValue { value }| value.as_ref()) {
        None => String::new(),
        Some(Value::StringValue(text)) => text.clone(),
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::BoolValue(truth)) => truth.to_string(),
        Some(other) => panic!("{key} is {other:?}"),
    }
}

#[derive(Clone, Debug, Default)]
struct Received(Arc<Mutex<Vec<Seen>>>);

impl Received {
    fn take(&self, export: ExportTraceServiceRequest) {
        let mut received = self.0.lock().expect("no panic");
        for resource in export.resource_spans {
            let attributes = resource.resource.map(|resource| resource.attributes).unwrap_or_default();
            let service = attribute(&attributes, "service.name");
            for span in resource.scope_spans.into_iter().flat_map(|scope| scope.spans) {
                let (trace, id, parent) = (hex(&span.trace_id), hex(&span.span_id), hex(&span.parent_span_id));
                received.push(Seen { service: service.clone(), trace, id, parent, span });
            }
        }
    }
}

/// The response to a gRPC call: an empty message, and success.
fn accepted() -> Response {
    let success = HeaderMap::from_iter([("grpc-status".parse().expect("a name"), HeaderValue::from_static("0"))]);
    let empty = Full::new(Bytes::from_static(&[0; GRPC_PREFIX]));
    let body = Body::new(empty.with_trailers(std::future::ready(Some(Ok(success)))));
    Response::builder().header("content-type", "application/grpc").body(body).expect("a response")
}

/// The running receiver.
pub(crate) struct Collector {
    pub(crate) address: SocketAddr,
    received: Received,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let received = Received::default();
        let (by_http, by_grpc) = (received.clone(), received.clone());
        let take_http = move |body: Bytes| async move {
            by_http.take(ExportTraceServiceRequest::decode(body).expect("an OTLP request"));
            Vec::new()
        };
        let take_grpc = move |body: Bytes| async move {
            by_grpc.take(ExportTraceServiceRequest::decode(&body[GRPC_PREFIX..]).expect("an OTLP request"));
            accepted()
        };
        let routes = axum::Router::new().route(GRPC, post(take_grpc)).route("/v1/traces", post(take_http));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let routes = routes.clone();
                tokio::spawn(async move {
                    let service = hyper::service::service_fn(move |request| routes.clone().call(request));
                    let http = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, received, task }
    }

    /// The URL for OTLP over HTTP.
    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All spans that have arrived.
    pub(crate) fn spans(&self) -> Vec<Seen> {
        self.received.0.lock().expect("no panic").clone()
    }

    /// The spans of a trace, as soon as `done` accepts them.
    pub(crate) async fn trace(&self, trace: &str, done: impl Fn(&[Seen]) -> bool) -> Vec<Seen> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let spans: Vec<Seen> = self.spans().into_iter().filter(|seen| seen.trace == trace).collect();
            if done(&spans) {
                return spans;
            }
            assert!(Instant::now() < deadline, "not within {PATIENCE:?}: trace {trace} has {:?}", names(&spans));
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// The services and names of spans.
pub(crate) fn names(spans: &[Seen]) -> Vec<(&str, &str)> {
    let mut names: Vec<_> = spans.iter().map(|seen| (&*seen.service, &*seen.span.name)).collect();
    names.sort_unstable();
    names
}
