//! A load generator for ext-proc servers: plays Envoy's side of FULL_DUPLEX_STREAMED exchanges, one bidirectional stream a request,
//! and checks every answer. Messages are encoded once; it speaks HTTP/2 directly, to cost little beside the server.

use crate::support::Error;
use bytes::{Buf, Bytes, BytesMut};
use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::{
    BodyResponse, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse, ProtocolConfiguration,
    body_mutation::Mutation, processing_request::Request as Event, processing_response::Response as Answer,
};
use hdrhistogram::Histogram;
use prost::Message;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// What Envoy reads from a socket at once, roughly: the size of the body pieces it sends.
const PIECE_BYTES: usize = 64 << 10;

/// One exchange, encoded.
pub(crate) struct Exchange {
    request: Bytes,
    request_body: Bytes,
    response_headers: Bytes,
    /// Sent one by one, each when the one before has come back, as tokens come from a model server.
    response_pieces: Vec<Bytes>,
    response_bytes: usize,
    /// Where in `request` and in `request_body` a text stands that is another one in each request.
    fresh: Option<[Range<usize>; 2]>,
}

/// Requests that were given a fresh text so far.
static FRESH: AtomicU64 = AtomicU64::new(0);

impl Exchange {
    /// A request with `body` that is answered with `response`, piece by piece.
    pub(crate) fn new(body: Bytes, response: &[Bytes], content_type: &str) -> Self {
        Self::with_headers(&[], body, response, content_type)
    }

    /// The same, with further request headers.
    pub(crate) fn with_headers(more: &[(&str, &str)], body: Bytes, response: &[Bytes], content_type: &str) -> Self {
        let length = body.len().to_string();
        let mut headers = vec![
            (":authority", "inference.example.com"),
            (":path", "/v1/chat/completions"),
            (":method", "POST"),
            (":scheme", "http"),
            ("user-agent", "OpenAI/Python 2.8.1"),
            ("accept", "application/json"),
            ("content-type", "application/json"),
            ("content-length", &length),
            ("x-forwarded-proto", "http"),
            ("x-request-id", "5e2b7e6c-2f9c-4a1d-9a55-0c0b1f3d8f11"),
        ];
        headers.extend(more);
        let mut request = BytesMut::new();
        let mode = BodySendMode::FullDuplexStreamed as i32;
        frame(
            &mut request,
            ProcessingRequest {
                protocol_config: Some(ProtocolConfiguration {
                    request_body_mode: mode,
                    response_body_mode: mode,
                    send_body_without_waiting_for_header_response: false,
                }),
                request: Some(Event::RequestHeaders(http_headers(&headers))),
                ..ProcessingRequest::default()
            },
        );
        for piece in body.chunks(PIECE_BYTES) {
            frame(&mut request, request_body(piece, false));
        }
        frame(&mut request, request_body(&[], true));
        let mut response_headers = BytesMut::new();
        frame(
            &mut response_headers,
            ProcessingRequest {
                request: Some(Event::ResponseHeaders(http_headers(&[
                    (":status", "200"),
                    ("content-type", content_type),
                ]))),
                ..ProcessingRequest::default()
            },
        );
        let ends = std::iter::repeat_n(false, response.len()).chain([true]);
        let pieces = response.iter().map(|piece| &piece[..]).chain([&[][..]]);
        let response_pieces = pieces.zip(ends).map(|(piece, end)| {
            let mut framed = BytesMut::new();
            frame(&mut framed, response_body(piece, end));
            framed.freeze()
        });
        Self {
            request: request.freeze(),
            request_body: body,
            response_headers: response_headers.freeze(),
            response_pieces: response_pieces.collect(),
            response_bytes: response.iter().map(Bytes::len).sum(),
            fresh: None,
        }
    }

    /// The same, but `placeholder`, which stands in the body once, is replaced by a text that no request has had before.
    pub(crate) fn with_fresh(self, placeholder: &[u8]) -> Self {
        let find = |within: &[u8]| {
            let at = within.windows(placeholder.len()).position(|part| part == placeholder).expect("the placeholder");
            at..at + placeholder.len()
        };
        // The body is cut into messages; its last part is long enough for the placeholder to stand in one of them.
        let fresh = Some([find(&self.request), find(&self.request_body)]);
        Self { fresh, ..self }
    }

    /// The messages of one request, and its body.
    fn request(&self) -> (Bytes, Bytes) {
        let Some(places) = &self.fresh else { return (self.request.clone(), self.request_body.clone()) };
        // Common words, as hard to encode as any text; which they are follows from a number.
        const WORDS: [&[u8]; 16] = [
            b"the ", b"of ", b"to ", b"and ", b"in ", b"is ", b"it ", b"you ", b"that ", b"was ", b"for ", b"are ",
            b"on ", b"what ", b"with ", b"from ",
        ];
        let mut state = FRESH.fetch_add(1, Ordering::Relaxed).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut text = Vec::with_capacity(places[0].len() + 8);
        while text.len() < places[0].len() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            text.extend_from_slice(WORDS[(state >> 60) as usize]);
        }
        text.truncate(places[0].len());
        let [request, body] = [(&self.request, &places[0]), (&self.request_body, &places[1])].map(|(bytes, place)| {
            let mut bytes = BytesMut::from(&bytes[..]);
            bytes[place.clone()].copy_from_slice(&text);
            bytes.freeze()
        });
        (request, body)
    }
}

/// What a run has measured.
pub(crate) struct Run {
    pub(crate) exchanges: u64,
    /// From the request's last byte to the last byte of the answer to it, microseconds.
    pub(crate) pick: Histogram<u64>,
}

/// Plays `exchanges` again and again for `time`, `streams` at once over `connections`; each stream keeps to one of them.
pub(crate) async fn run(
    to: SocketAddr,
    exchanges: &[Arc<Exchange>],
    connections: usize,
    streams: usize,
    time: Duration,
) -> Result<Run, Error> {
    let end = Instant::now() + time;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..connections {
        let client = connect(to).await?;
        for exchange in exchanges.iter().cycle().take(streams.div_ceil(connections)) {
            tasks.spawn(play_until(client.clone(), exchange.clone(), end));
        }
    }
    let mut total = Run { exchanges: 0, pick: Histogram::new(3)? };
    while let Some(result) = tasks.join_next().await {
        let part = result??;
        total.exchanges += part.len();
        total.pick.add(part)?;
    }
    Ok(total)
}

async fn play_until(
    mut client: h2::client::SendRequest<Bytes>,
    exchange: Arc<Exchange>,
    end: Instant,
) -> Result<Histogram<u64>, Error> {
    let mut times = Histogram::new(3)?;
    while Instant::now() < end {
        let took = play(&mut client, &exchange).await?;
        times.record(u64::try_from(took.as_micros())?)?;
    }
    Ok(times)
}

/// Plays each of `exchanges` once, `streams` at once over `connections`.
#[allow(dead_code, reason = "for the row `sizing`")]
pub(crate) async fn run_once(
    to: SocketAddr,
    exchanges: Vec<Exchange>,
    connections: usize,
    streams: usize,
) -> Result<(), Error> {
    let mut clients = Vec::new();
    for _ in 0..connections {
        clients.push(connect(to).await?);
    }
    let left = Arc::new(std::sync::Mutex::new(exchanges));
    let mut tasks = tokio::task::JoinSet::new();
    for mut client in clients.into_iter().cycle().take(streams) {
        let left = left.clone();
        tasks.spawn(async move {
            loop {
                let next = left.lock().expect("no panic under this lock").pop();
                let Some(exchange) = next else { return Ok::<(), Error>(()) };
                play(&mut client, &exchange).await?;
            }
        });
    }
    while let Some(result) = tasks.join_next().await {
        result??;
    }
    Ok(())
}

/// Plays `exchange` this number of times, one after the other.
#[allow(dead_code, reason = "for the bench that counts instructions")]
pub(crate) async fn play_count(to: SocketAddr, exchange: &Exchange, count: u64) -> Result<(), Error> {
    let mut client = connect(to).await?;
    for _ in 0..count {
        play(&mut client, exchange).await?;
    }
    Ok(())
}

/// One exchange from the first message to the end; the time of its request phase.
async fn play(client: &mut h2::client::SendRequest<Bytes>, exchange: &Exchange) -> Result<Duration, Error> {
    let (messages, body) = exchange.request();
    std::future::poll_fn(|cx| client.poll_ready(cx)).await?;
    let (response, mut outbound) = client.send_request(call()?, false)?;
    let started = Instant::now();
    outbound.send_data(messages, false)?;
    let response = response.await?;
    let mut inbound = Inbound { stream: response.into_body(), buffer: BytesMut::new() };
    check_request_phase(&mut inbound, &body).await?;
    let took = started.elapsed();
    outbound.send_data(exchange.response_headers.clone(), false)?;
    let Answer::ResponseHeaders(_) = inbound.next().await? else { return Err("expected response headers".into()) };
    let mut received = 0;
    for piece in &exchange.response_pieces {
        outbound.send_data(piece.clone(), false)?;
        let Answer::ResponseBody(body) = inbound.next().await? else { return Err("expected a response body".into()) };
        received += streamed(&body)?.0.len();
    }
    if received != exchange.response_bytes {
        return Err(format!("{received} bytes of the response came back, {} were sent", exchange.response_bytes).into());
    }
    // Envoy too half-closes and then resets.
    outbound.send_data(Bytes::new(), true)?;
    Ok(took)
}

/// Streams whose requests have been sent, and that stay open.
#[allow(dead_code, reason = "for the bench of streams that wait")]
pub(crate) struct ConnectionMemory(Vec<(h2::client::ResponseFuture, h2::SendStream<Bytes>)>);

/// Opens `streams` over `connections` and sends each request of `exchange`, without waiting for answers.
#[allow(dead_code, reason = "for the bench of streams that wait")]
pub(crate) async fn open(
    to: SocketAddr,
    exchange: &Exchange,
    connections: usize,
    streams: usize,
) -> Result<ConnectionMemory, Error> {
    let mut held = Vec::with_capacity(streams);
    for _ in 0..connections {
        let mut client = connect(to).await?;
        for _ in 0..streams.div_ceil(connections) {
            std::future::poll_fn(|cx| client.poll_ready(cx)).await?;
            let (response, mut outbound) = client.send_request(call()?, false)?;
            outbound.send_data(exchange.request().0, false)?;
            held.push((response, outbound));
        }
    }
    Ok(ConnectionMemory(held))
}

async fn connect(to: SocketAddr) -> Result<h2::client::SendRequest<Bytes>, Error> {
    let socket = tokio::net::TcpStream::connect(to).await?;
    socket.set_nodelay(true)?;
    let mut builder = h2::client::Builder::new();
    builder.initial_window_size(4 << 20).initial_connection_window_size(16 << 20).max_frame_size(64 << 10);
    let (client, connection) = builder.handshake::<_, Bytes>(socket).await?;
    tokio::spawn(connection);
    Ok(client)
}

/// The request that opens a stream.
fn call() -> Result<http::Request<()>, http::Error> {
    http::Request::builder()
        .method("POST")
        .uri("http://picker/envoy.service.ext_proc.v3.ExternalProcessor/Process")
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
}

async fn check_request_phase(inbound: &mut Inbound, mut left: &[u8]) -> Result<(), Error> {
    match inbound.next().await? {
        Answer::RequestHeaders(headers) => {
            let mutation = headers.response.and_then(|common| common.header_mutation).unwrap_or_default();
            let mut set = mutation.set_headers.iter().filter_map(|option| option.header.as_ref());
            if !set.any(|h| h.key == "x-gateway-destination-endpoint" && !h.raw_value.is_empty()) {
                return Err("no destination in the answer to the headers".into());
            }
        }
        other => return Err(format!("expected request headers, got {other:?}").into()),
    }
    loop {
        let Answer::RequestBody(body) = inbound.next().await? else { return Err("expected a request body".into()) };
        let (bytes, end) = streamed(&body)?;
        left = left.strip_prefix(bytes).ok_or("the request's body came back changed")?;
        if end {
            return if left.is_empty() { Ok(()) } else { Err("the request's body came back cut".into()) };
        }
    }
}

/// The server's messages.
struct Inbound {
    stream: h2::RecvStream,
    buffer: BytesMut,
}

impl Inbound {
    async fn next(&mut self) -> Result<Answer, Error> {
        loop {
            if let Some(header) = self.buffer.first_chunk::<5>() {
                let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
                if self.buffer.len() >= 5 + length {
                    self.buffer.advance(5);
                    let message = ProcessingResponse::decode(self.buffer.split_to(length))?;
                    return message.response.ok_or_else(|| "an answer without content".into());
                }
            }
            let data = self.stream.data().await.ok_or("the server ended the stream")??;
            self.stream.flow_control().release_capacity(data.len())?;
            self.buffer.extend_from_slice(&data);
        }
    }
}

fn streamed(body: &BodyResponse) -> Result<(&[u8], bool), Error> {
    let mutation = body.response.as_ref().and_then(|common| common.body_mutation.as_ref()?.mutation.as_ref());
    match mutation {
        Some(Mutation::StreamedResponse(streamed)) => Ok((&streamed.body, streamed.end_of_stream)),
        other => Err(format!("expected a streamed body, got {other:?}").into()),
    }
}

fn request_body(piece: &[u8], end_of_stream: bool) -> ProcessingRequest {
    let body = HttpBody { body: piece.to_vec(), end_of_stream, ..HttpBody::default() };
    ProcessingRequest { request: Some(Event::RequestBody(body)), ..ProcessingRequest::default() }
}

fn response_body(piece: &[u8], end_of_stream: bool) -> ProcessingRequest {
    let body = HttpBody { body: piece.to_vec(), end_of_stream, ..HttpBody::default() };
    ProcessingRequest { request: Some(Event::ResponseBody(body)), ..ProcessingRequest::default() }
}

fn http_headers(pairs: &[(&str, &str)]) -> HttpHeaders {
    let header = |(key, value): &(&str, &str)| HeaderValue {
        key: (*key).to_owned(),
        raw_value: value.as_bytes().to_vec(),
        ..HeaderValue::default()
    };
    HttpHeaders { headers: Some(HeaderMap { headers: pairs.iter().map(header).collect() }), ..HttpHeaders::default() }
}

/// Appends a gRPC message: uncompressed, its length, its bytes.
fn frame(to: &mut BytesMut, message: ProcessingRequest) {
    to.extend_from_slice(&[0]);
    to.extend_from_slice(&u32::try_from(message.encoded_len()).expect("a message under 4 GiB").to_be_bytes());
    message.encode(to).expect("room in a growing buffer");
}
