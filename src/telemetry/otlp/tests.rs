use super::*;
use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::routing::post;
use opentelemetry::TraceId;
use opentelemetry::trace::{Span as _, Tracer, TracerProvider};
use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::mpsc;

/// The few fields of `ExportTraceServiceRequest` that the tests look at.
mod wire {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Request {
        #[prost(message, repeated, tag = "1")]
        pub(super) resource_spans: Vec<ResourceSpans>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ResourceSpans {
        #[prost(message, repeated, tag = "2")]
        pub(super) scope_spans: Vec<ScopeSpans>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct ScopeSpans {
        #[prost(message, repeated, tag = "2")]
        pub(super) spans: Vec<Span>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Span {
        #[prost(bytes = "vec", tag = "1")]
        pub(super) trace_id: Vec<u8>,
        #[prost(string, tag = "5")]
        pub(super) name: String,
    }
}

/// A collector that answers with `status` and passes on the spans that it was sent.
async fn collector(status: StatusCode) -> (String, mpsc::UnboundedReceiver<wire::Span>) {
    let (sender, spans) = mpsc::unbounded_channel();
    let take = move |State(sender): State<mpsc::UnboundedSender<wire::Span>>, headers: HeaderMap, body: Bytes| async move {
        assert_eq!(headers["content-type"], "application/x-protobuf");
        let request = wire::Request::decode(body).unwrap();
        for span in request.resource_spans.into_iter().flat_map(|r| r.scope_spans).flat_map(|s| s.spans) {
            sender.send(span).unwrap();
        }
        status
    };
    let app = Router::new().route("/v1/traces", post(take)).with_state(sender);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await });
    (url, spans)
}

fn span(otlp: &Otlp, name: &'static str) {
    otlp.provider().tracer("test").start(name).end();
}

/// The picker runs its workers on one-threaded runtimes, so both kinds are tested.
#[tokio::test]
async fn spans_arrive_on_single_threaded_runtime() {
    let (url, mut spans) = collector(StatusCode::OK).await;
    let otlp = Otlp::start(&url, Handle::current()).unwrap();
    span(&otlp, "pick");
    assert_eq!(spans.recv().await.unwrap().name, "pick");
    span(&otlp, "last");
    otlp.shutdown().await;
    assert_eq!(spans.recv().await.unwrap().name, "last", "the end flushes");
    assert_eq!((otlp.stats().exported(), otlp.stats().failed(), otlp.stats().dropped()), (2, 0, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_arrive_on_multi_threaded_runtime() {
    let (url, mut spans) = collector(StatusCode::OK).await;
    let otlp = Otlp::start(&url, Handle::current()).unwrap();
    for _ in 0..1_000 {
        span(&otlp, "pick");
    }
    otlp.shutdown().await;
    let mut got = 0;
    while let Ok(span) = spans.try_recv() {
        assert_eq!(span.name, "pick");
        got += 1;
    }
    assert_eq!((got, otlp.stats().exported()), (1_000, 1_000));
}

#[tokio::test]
async fn sampling_decision_of_caller_outranks_ratio() {
    let (url, mut spans) = collector(StatusCode::OK).await;
    let otlp = Otlp::start(&url, Handle::current()).unwrap();
    let tracing = otlp.tracing(0.0, attache_types::clock::Clock::start());
    let start = |traceparent: &str| {
        let contexts = crate::trace::TraceContexts { request: Some(traceparent), gateway: None };
        drop(tracing.start(contexts, attache_types::clock::Timestamp(1)).unwrap());
    };
    start("00-00000000000000000000000000000008-0000000000000001-00");
    start("");
    start("00-00000000000000000000000000000007-0000000000000001-01");
    otlp.shutdown().await;
    assert_eq!(spans.recv().await.unwrap().trace_id, TraceId::from(7).to_bytes().to_vec());
    assert!(spans.try_recv().is_err());
}

#[tokio::test]
async fn rejected_batches_are_counted() {
    let (url, mut spans) = collector(StatusCode::BAD_REQUEST).await;
    let otlp = Otlp::start(&url, Handle::current()).unwrap();
    span(&otlp, "pick");
    spans.recv().await.unwrap();
    otlp.shutdown().await;
    assert_eq!((otlp.stats().exported(), otlp.stats().failed()), (0, 1));
}

/// A collector that accepts connections and never answers: spans are dropped beyond the bound, ending a span never
/// waits, and neither does the end of the process.
#[tokio::test]
async fn unreachable_collector_does_not_block() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let otlp = Otlp::start(&url, Handle::current()).unwrap();
    let offered = 20_000;
    for _ in 0..offered {
        span(&otlp, "pick");
    }
    // What is neither in the queue nor in the batch on its way was dropped, and is counted.
    let kept = MAX_QUEUED_SPANS + 2 * BATCH_SPANS as u64;
    assert!(otlp.stats().dropped() >= offered - kept, "{:?}", otlp.stats());
    // The collector never answers: without a limit, this would not end.
    tokio::time::timeout(10 * FLUSH_TIMEOUT, otlp.shutdown()).await.expect("the flush has a limit");
}

#[test]
fn default_path_is_added_to_endpoint() {
    for (endpoint, url) in [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
    ] {
        assert_eq!(traces_url(endpoint), url);
    }
}
