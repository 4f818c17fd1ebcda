//! Traces over OTLP: one span per request, between the client's and the server's.

use crate::shipped::by_header;
use crate::support::attache::AttacheProcess;
use crate::support::body::{Payload, chat};
use crate::support::client::{self, Http};
use crate::support::echo::Echo;
use crate::support::envoy::EnvoyProcess;
use crate::support::process::eventually;
use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;

/// The parts of an `ExportTraceServiceRequest` that the tests read.
#[derive(Clone, PartialEq, Message)]
struct Export {
    #[prost(message, repeated, tag = "1")]
    resources: Vec<ResourceSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct ResourceSpans {
    #[prost(message, repeated, tag = "2")]
    scopes: Vec<ScopeSpans>,
}

#[derive(Clone, PartialEq, Message)]
struct ScopeSpans {
    #[prost(message, repeated, tag = "2")]
    spans: Vec<Span>,
}

#[derive(Clone, PartialEq, Message)]
struct Span {
    #[prost(bytes = "vec", tag = "1")]
    trace: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    parent: Vec<u8>,
    #[prost(string, tag = "5")]
    name: String,
}

/// An OTLP collector that stores spans.
struct Collector {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Collector {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let spans = Arc::default();
        let taken = Arc::clone(&spans);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let taken = Arc::clone(&taken);
                tokio::spawn(async move {
                    let service = hyper::service::service_fn(move |request| take(request, Arc::clone(&taken)));
                    let http = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                    let _ = http.serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, spans, task }
    }

    fn spans(&self) -> Vec<Span> {
        self.spans.lock().expect("no panic").clone()
    }
}

async fn take(request: Request<Incoming>, spans: Arc<Mutex<Vec<Span>>>) -> Result<Response<Empty<Bytes>>, Infallible> {
    let body = request.into_body().collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let export = Export::decode(body).expect("an OTLP request");
    let scopes = export.resources.into_iter().flat_map(|resource| resource.scopes);
    spans.lock().expect("no panic").extend(scopes.flat_map(|scope| scope.spans));
    Ok(Response::new(Empty::new()))
}

fn hex(bytes: &[u8]) -> String {
    crate::support::body::hex(bytes)
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
const PARENT: &str = "00f067aa0ba902b7";

async fn ask(to: SocketAddr, traceparent: &str) -> String {
    let target = "/v1/chat/completions?tell=traceparent";
    let mut request = client::request("POST", to, Http::H1, target, Payload::sized(chat(300, false, 1)));
    request.headers_mut().insert("traceparent", HeaderValue::from_str(traceparent).expect("a header value"));
    let reply = client::send(to, Http::H1, request).await.expect("an answer");
    assert_eq!(reply.status, 200);
    reply.header("x-echo-told").trim_start_matches("traceparent=").to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn picker_span_is_between_client_and_server_spans() {
    let (echo, collector) = (Echo::start().await, Collector::start().await);
    let endpoint = format!("http://{}", collector.address);
    let picker = AttacheProcess::start(&[echo.address], &["--otlp-endpoint", &endpoint, "--trace-ratio", "0"]).await;
    let envoy = EnvoyProcess::start(&by_header("original-dst.yaml", &picker)).await;
    let to = envoy.listener("inference");
    let unsampled = ask(to, &format!("00-{TRACE}-{PARENT}-00")).await;
    assert!(unsampled.starts_with(&format!("00-{TRACE}-")) && unsampled.ends_with("-00"), "{unsampled}");
    let sent = ask(to, &format!("00-{TRACE}-{PARENT}-01")).await;
    let span = eventually("a span", || async { collector.spans().into_iter().next() }).await;
    assert_eq!((hex(&span.trace), hex(&span.parent)), (TRACE.to_owned(), PARENT.to_owned()), "{span:?}");
    assert_eq!(sent, format!("00-{TRACE}-{}-01", hex(&span.id)), "the server continues our span");
    assert_eq!(span.name, "gateway.request");
    assert_eq!(collector.spans().len(), 1, "what its caller does not sample is not sampled");
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
