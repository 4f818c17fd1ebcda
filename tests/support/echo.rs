//! A server that reports what it received and responds as the query asks. HTTP/1.1 and HTTP/2 on one port.
//!
//! Query: `kind=json|sse`, `size` bytes, `events` (approximate number), `chunked=1`, `pace_ms` between events,
//! `status`, `trailers=1`, `early=1` (respond before the request's body is read), `delay_ms` before the response,
//! `cut` (length of the first chunk of the body) and `piece` (of all chunks), `reset=1` (close the connection instead
//! of a response), `hold=1` (the response is the text given to [`Echo::answering`]), `reply=1` (the response is the
//! string `reply` of the request's JSON), `tell` (names of headers, with commas). `/metrics` and `/health` respond
//! like an idle model server.
//!
//! Response headers: `x-echo-server` (its address), `x-echo-sha256` and `x-echo-length` of the request's body,
//! `x-echo-trailers` (their number), `x-echo-destination` (the destination header as received), `x-echo-told` (the
//! headers of `tell` as `name=value`, with `;`).

use super::body::{Payload, completion, cut, events, hex};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};

/// Seed of response bodies; the tests build the same bytes to compare.
pub(crate) const RESPONSE_SEED: u64 = 2;

/// Runs until it is dropped; its open connections are cut then.
pub(crate) struct Echo {
    pub(crate) address: SocketAddr,
    counts: Arc<Counts>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct Counts {
    requests: AtomicUsize,
    cut_short: AtomicUsize,
    active: AtomicUsize,
    peak: AtomicUsize,
    answer: Bytes,
    fails: bool,
}

impl Echo {
    pub(crate) async fn start() -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.expect("a free port"))
    }

    /// Responds with these bytes if the query has `hold=1`.
    pub(crate) async fn answering(answer: impl Into<Bytes>) -> Self {
        let counts = Counts { answer: answer.into(), ..Counts::default() };
        Self::with(TcpListener::bind("127.0.0.1:0").await.expect("a free port"), counts)
    }

    /// Responds 503 to everything, and claims with `x-envoy-overloaded` that Envoy's circuit breaker is the cause.
    pub(crate) async fn failing() -> Self {
        let counts = Counts { fails: true, ..Counts::default() };
        Self::with(TcpListener::bind("127.0.0.1:0").await.expect("a free port"), counts)
    }

    /// Serves on a listener that is already bound.
    pub(crate) fn on(listener: TcpListener) -> Self {
        Self::with(listener, Counts::default())
    }

    fn with(listener: TcpListener, counts: Counts) -> Self {
        let address = listener.local_addr().expect("a bound address");
        let counts = Arc::new(counts);
        let task = tokio::spawn(accept(listener, address, counts.clone()));
        Self { address, counts, task }
    }

    /// Requests that were not for `/metrics` or `/health`.
    pub(crate) fn requests(&self) -> usize {
        self.counts.requests.load(Ordering::SeqCst)
    }

    /// Most requests in flight at the same time, from their headers to their response.
    pub(crate) fn peak(&self) -> usize {
        self.counts.peak.load(Ordering::SeqCst)
    }

    /// Number of response bodies that no client read to the end.
    pub(crate) fn cut_short(&self) -> usize {
        self.counts.cut_short.load(Ordering::SeqCst)
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn accept(listener: TcpListener, address: SocketAddr, counts: Arc<Counts>) {
    // Dropped with this task, and the connections with it.
    let mut connections = tokio::task::JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                connections.spawn(serve(stream, address, counts.clone()));
            }
            Some(_) = connections.join_next() => {}
        }
    }
}

async fn serve(stream: TcpStream, address: SocketAddr, counts: Arc<Counts>) {
    let _ = stream.set_nodelay(true);
    let service = hyper::service::service_fn(move |request| answer(request, address, counts.clone()));
    // An error here is a client that disconnected.
    let _ = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new())
        .serve_connection_with_upgrades(TokioIo::new(stream), service)
        .await;
}

async fn answer(
    request: Request<Incoming>,
    address: SocketAddr,
    counts: Arc<Counts>,
) -> Result<Response<Payload>, std::io::Error> {
    match request.uri().path() {
        "/metrics" => return Ok(plain(METRICS)),
        "/health" => return Ok(plain(r#"{"status":"ok"}"#)),
        _ => {}
    }
    counts.requests.fetch_add(1, Ordering::SeqCst);
    let mut options = ResponseOptions::from(request.uri().query().unwrap_or(""));
    if options.reset {
        return Err(std::io::ErrorKind::ConnectionReset.into());
    }
    let mut headers = HeaderMap::new();
    let mut put = |name: &'static str, value: String| {
        headers.insert(name, HeaderValue::from_str(&value).expect("a header value"));
    };
    put("x-echo-server", address.to_string());
    let destination = request.headers().get("x-gateway-destination-endpoint");
    put("x-echo-destination", destination.and_then(|v| v.to_str().ok()).unwrap_or("").to_owned());
    let reported =
        request.headers().iter().filter(|(name, _)| options.tell.iter().any(|reported| reported == name.as_str()));
    put(
        "x-echo-told",
        reported.map(|(n, v)| format!("{n}={}", v.to_str().unwrap_or("?"))).collect::<Vec<_>>().join(";"),
    );
    if request.headers().contains_key(header::UPGRADE) {
        return Ok(upgrade(request, headers));
    }
    counts.peak.fetch_max(counts.active.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
    let mut held = counts.answer.clone();
    if options.reply {
        held = replied(request.into_body()).await;
    } else if !options.early {
        let got = read(request.into_body()).await;
        put("x-echo-sha256", got.sha256);
        put("x-echo-length", got.length.to_string());
        put("x-echo-trailers", got.trailers.to_string());
    }
    if counts.fails {
        put("x-envoy-overloaded", "true".to_owned());
        options.status = StatusCode::SERVICE_UNAVAILABLE;
    }
    tokio::time::sleep(options.delay).await;
    counts.active.fetch_sub(1, Ordering::SeqCst);
    let body = options.body(&held).on_cut_short(Arc::new(move || {
        counts.cut_short.fetch_add(1, Ordering::SeqCst);
    }));
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(options.content_type()));
    let mut response = Response::new(body);
    *response.status_mut() = options.status;
    *response.headers_mut() = headers;
    Ok(response)
}

struct ReceivedBody {
    sha256: String,
    length: usize,
    trailers: usize,
}

async fn read(mut body: Incoming) -> ReceivedBody {
    let (mut digest, mut length, mut trailers) = (Sha256::new(), 0, 0);
    while let Some(Ok(frame)) = body.frame().await {
        match frame.into_data() {
            Ok(data) => {
                digest.update(&data);
                length += data.len();
            }
            Err(frame) => trailers = frame.trailers_ref().map_or(0, HeaderMap::len),
        }
    }
    ReceivedBody { sha256: hex(&digest.finalize()), length, trailers }
}

/// The string `reply` in a JSON body.
async fn replied(body: Incoming) -> Bytes {
    let bytes = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
    let request: serde_json::Value = serde_json::from_slice(&bytes).unwrap_or_default();
    request["reply"].as_str().unwrap_or_default().to_owned().into()
}

/// The parameters in the query.
struct ResponseOptions {
    sse: bool,
    size: usize,
    events: usize,
    chunked: bool,
    pace: Duration,
    status: StatusCode,
    trailers: bool,
    early: bool,
    delay: Duration,
    cut: usize,
    piece: usize,
    reset: bool,
    hold: bool,
    reply: bool,
    tell: Vec<String>,
}

impl From<&str> for ResponseOptions {
    fn from(query: &str) -> Self {
        let values: HashMap<&str, &str> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
        let number = |name: &str, default: u64| values.get(name).and_then(|v| v.parse().ok()).unwrap_or(default);
        let size = |name: &str, default| usize::try_from(number(name, default)).unwrap_or(0);
        Self {
            sse: values.get("kind") == Some(&"sse"),
            size: size("size", 300),
            events: size("events", 100),
            chunked: number("chunked", 0) == 1,
            pace: Duration::from_millis(number("pace_ms", 0)),
            status: u16::try_from(number("status", 200)).ok().and_then(|s| s.try_into().ok()).unwrap_or(StatusCode::OK),
            trailers: number("trailers", 0) == 1,
            early: number("early", 0) == 1,
            delay: Duration::from_millis(number("delay_ms", 0)),
            cut: size("cut", 0),
            piece: size("piece", 0),
            reset: number("reset", 0) == 1,
            hold: number("hold", 0) == 1,
            reply: number("reply", 0) == 1,
            tell: values.get("tell").map(|names| names.split(',').map(str::to_owned).collect()).unwrap_or_default(),
        }
    }
}

impl ResponseOptions {
    fn body(&self, held: &Bytes) -> Payload {
        let payload = Payload::chunked(self.pieces(held)).paced(self.pace);
        let payload = if self.chunked { payload } else { payload.with_length() };
        if !self.trailers {
            return payload;
        }
        payload.trailers(HeaderMap::from_iter([(
            header::HeaderName::from_static("x-echo-end"),
            HeaderValue::from_static("1"),
        )]))
    }

    fn pieces(&self, held: &Bytes) -> VecDeque<Bytes> {
        let pieces = match self.sse {
            _ if self.hold || self.reply => [held.clone()].into(),
            true => events(self.size, self.events, RESPONSE_SEED),
            false => cut(completion(self.size, RESPONSE_SEED), 256 << 10, RESPONSE_SEED),
        };
        if self.cut == 0 && self.piece == 0 {
            return pieces;
        }
        let mut whole = Bytes::from(Vec::from(pieces).concat());
        if self.cut > 0 {
            let first = whole.split_to(self.cut.min(whole.len()));
            return [first, whole].into_iter().filter(|piece| !piece.is_empty()).collect();
        }
        whole.chunks(self.piece).map(|piece| whole.slice_ref(piece)).collect()
    }

    fn content_type(&self) -> &'static str {
        if self.sse { "text/event-stream" } else { "application/json" }
    }
}

/// Accepts the upgrade and sends all received bytes back.
fn upgrade(request: Request<Incoming>, headers: HeaderMap) -> Response<Payload> {
    tokio::spawn(async move {
        if let Ok(upgraded) = hyper::upgrade::on(request).await {
            let (mut reader, mut writer) = tokio::io::split(TokioIo::new(upgraded));
            let _ = tokio::io::copy(&mut reader, &mut writer).await;
        }
    });
    let mut response = Response::new(Payload::chunked([].into()));
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *response.headers_mut() = headers;
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    response.headers_mut().insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    response
}

fn plain(text: &'static str) -> Response<Payload> {
    Response::new(Payload::sized(Bytes::from_static(text.as_bytes())))
}

const METRICS: &str = "\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine=\"0\",model_name=\"sim-8b\"} 0.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine=\"0\",model_name=\"sim-8b\"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"sim-8b\"} 0.0
";
