//! The gRPC method on the wire: decodes messages from the body of the HTTP request, encodes replies into the body of
//! the response.
//!
//! The server that `envoy_types` generates reserves 16 KiB of buffers for each stream, and keeps the memory of the
//! longest message. A stream lives as long as its response, and thousands may be queued, so this module keeps no
//! buffer between two messages. Compressed messages are rejected, because the server offers no compression.

use super::exchange::GatewayCall;
use super::opening::{First, Opening};
use super::service::{Pump, Service};
use attache_picker::body::Held;
use attache_serving::connections::{Client, OpenStream};
use bytes::{Buf, Bytes, BytesMut};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures_core::Stream;
use http::HeaderMap;
use http_body::{Body, Frame};
use prost::Message;
use prost::encoding::{DecodeContext, decode_key, skip_field};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tonic::Status;
use tonic::codegen::{Service as HttpService, StdError};
use tonic::server::NamedService;

/// The service's only method.
const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
/// 1 MiB and 64 KiB: most bytes of headers, metadata and attributes in one message. By default, Envoy sends at most
/// 60 KiB of headers. Decoded, they take up to 36 times as much memory.
const MAX_BYTES_BESIDE_BODIES: u64 = (1 << 20) + (64 << 10);
/// 64 KiB: after a longer message, the rest of the buffer is copied, so that the memory of the message is freed.
const LARGE_MESSAGE_BYTES: usize = 64 << 10;
/// 4: memory for a whole message is reserved once a quarter of it has arrived. That copies less often than doubling. A
/// sender that announces a long message and sends little of it uses at most four times the bytes that it sent.
const RESERVED_TIMES_RECEIVED: usize = 4;
/// The protobuf fields that hold bodies: `request_body`, `response_body`.
const BODY_FIELDS: [u32; 2] = [4, 5];
/// 5: length of the prefix of each message, which has a compression flag and the message's length.
const PREFIX_BYTES: usize = 5;
/// 32 KiB, as in tonic: replies are sent once so many bytes are encoded.
const YIELD_BYTES: usize = 32 << 10;

/// The service in the form that tonic's server needs.
#[derive(Clone, Debug)]
pub struct Wire(Service);

impl Wire {
    /// Serves `service`.
    #[must_use]
    pub fn new(service: Service) -> Self {
        Self(service)
    }
}

impl NamedService for Wire {
    const NAME: &'static str = "envoy.service.ext_proc.v3.ExternalProcessor";
}

impl<B> HttpService<http::Request<B>> for Wire
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Opening;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        if request.uri().path() != PROCESS {
            return Opening::refused(Status::unimplemented("").into_http());
        }
        if request.headers().get("grpc-encoding").is_some_and(|encoding| encoding != "identity") {
            let mut response = Status::unimplemented("compressed messages are not supported").into_http();
            response.headers_mut().insert("grpc-accept-encoding", http::HeaderValue::from_static("identity"));
            return Opening::refused(response);
        }
        let call = GatewayCall::of(request.uri(), request.headers());
        let (mut parts, body) = request.into_parts();
        let stream = match parts.extensions.remove::<Client>().map(Client::open) {
            Some(None) => return Opening::refused(self.0.refuse_stream().into_http()),
            stream => stream.flatten(),
        };
        Opening::of(self.0.clone(), tonic::body::Body::new(body), stream, call)
    }
}

/// The response whose body has the replies of `pump`.
pub(super) fn answer(pump: Pump) -> http::Response<tonic::body::Body> {
    let mut response = http::Response::new(tonic::body::Body::new(Replies { pump, state: Sending::Replies }));
    let content_type = http::HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(http::header::CONTENT_TYPE, content_type);
    response
}

/// An item of the stream from Envoy.
#[derive(Debug, PartialEq)]
pub enum Incoming {
    /// A message.
    Message(Box<ProcessingRequest>),
    /// A message of this many bytes, which are discarded because they exceed a limit.
    TooLarge(u64),
}

/// How the request side of a stream has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    HalfClosed,
    /// Envoy ends most streams by a reset, after complete and aborted requests alike.
    Reset,
}

/// The stream of the gateway's messages. It ends when the gateway half-closes (END_STREAM) or resets the gRPC stream.
/// An error describes an invalid message and is the last item.
#[derive(Debug)]
pub struct Inbound {
    body: tonic::body::Body,
    /// The unread rest of the last DATA frame. Most messages are whole in one, and are decoded from it without a copy.
    frame: Bytes,
    /// Received bytes before those in `frame`, which begin with an incomplete message.
    buffer: BytesMut,
    /// Accounts the memory of `buffer` while the rest of a message is awaited.
    held: Held,
    /// Largest message that is buffered, bytes.
    max_message: usize,
    /// Bytes of a discarded message that have not arrived yet.
    discard: usize,
    end: Option<End>,
    /// Counts the stream, and keeps its connection from being evicted.
    _stream: Option<OpenStream>,
}

impl Inbound {
    /// Reads the messages of a stream after its `first` bytes, at most `max_message` bytes each. Memory is accounted in
    /// `held`.
    pub(super) fn new(first: First, max_message: usize, held: Held) -> Self {
        let First { body, data, end, stream } = first;
        let (frame, buffer) = (Bytes::new(), BytesMut::new());
        let mut inbound = Self { body, frame, buffer, held, max_message, discard: 0, end, _stream: stream };
        inbound.take(data);
        inbound
    }

    /// Whether the gateway has half-closed the stream: it sends no more messages, but may still wait for replies. If it
    /// resets the stream afterwards, or disconnects, hyper drops the stream.
    #[must_use]
    pub fn is_half_closed(&self) -> bool {
        self.end == Some(End::HalfClosed)
    }

    /// Memory of an incomplete message, bytes.
    pub(super) fn unfinished(&self) -> u64 {
        self.held.bytes()
    }

    /// Discards the incomplete message and the rest of it.
    pub(super) fn abandon(&mut self) {
        self.keep();
        if let Some(length) = length_of(&self.buffer) {
            self.discard = (PREFIX_BYTES + length).saturating_sub(self.buffer.len());
            self.buffer = BytesMut::new();
            self.account();
        }
    }

    /// Buffers received bytes while no message is needed, up to the size of the largest message. Otherwise they would
    /// fill HTTP/2's buffers, whose limit on small frames is shared by all streams of the connection.
    pub(super) fn absorb(&mut self, cx: &mut Context<'_>) {
        while self.end.is_none() && self.buffer.len() < self.max_message && self.read(cx).is_ready() {}
        self.account();
    }

    /// Accounts the buffer, which gets the rest of the last frame: a frame keeps the memory of others that were read with
    /// it.
    fn account(&mut self) {
        self.keep();
        let memory = if self.buffer.is_empty() { 0 } else { self.buffer.capacity() as u64 };
        if memory != self.held.bytes() {
            self.held.resize(memory);
        }
    }

    /// The next message, if it is complete.
    fn message(&mut self) -> Option<Result<Incoming, Status>> {
        self.complete();
        let unread = self.unread();
        let length = length_of(unread)?;
        let compressed = unread.first().copied().unwrap_or_default();
        if compressed != 0 {
            return Some(Err(Status::invalid_argument(format!(
                "a message has the compression flag {compressed}, 0 is allowed"
            ))));
        }
        if length > self.max_message {
            self.keep();
            let here = (PREFIX_BYTES + length).min(self.buffer.len());
            drop(self.cut(here));
            self.discard = PREFIX_BYTES + length - here;
            return Some(Ok(Incoming::TooLarge(length as u64)));
        }
        let bytes = unread.get(PREFIX_BYTES..PREFIX_BYTES + length)?;
        let may_be_too_large = length as u64 > MAX_BYTES_BESIDE_BODIES;
        let beside = if may_be_too_large { bytes_beside_bodies(bytes) } else { 0 };
        let mut bytes = self.cut(PREFIX_BYTES + length);
        bytes.advance(PREFIX_BYTES);
        let message = if beside > MAX_BYTES_BESIDE_BODIES {
            Ok(Incoming::TooLarge(beside))
        } else {
            // From a slice, prost copies bodies twice.
            let message = ProcessingRequest::decode(bytes);
            message.map(|message| Incoming::Message(Box::new(message)))
        };
        if self.held.bytes() > 0 {
            self.account();
        }
        Some(message.map_err(|error| Status::invalid_argument(error.to_string())))
    }

    /// The bytes from the start of the next message.
    fn unread(&self) -> &[u8] {
        if self.buffer.is_empty() { &self.frame } else { &self.buffer }
    }

    /// Moves to the buffer what the message in it lacks, as far as the last frame has it.
    fn complete(&mut self) {
        while !self.buffer.is_empty() && !self.frame.is_empty() {
            let whole =
                length_of(&self.buffer).map_or(PREFIX_BYTES, |length| PREFIX_BYTES + length.min(self.max_message));
            let lacks = whole.saturating_sub(self.buffer.len()).min(self.frame.len());
            if lacks == 0 {
                return;
            }
            let piece = self.frame.split_to(lacks);
            self.append(&piece);
        }
    }

    /// Takes so many bytes of the unread ones, which are there. The others keep no memory of a large message before them.
    fn cut(&mut self, bytes: usize) -> Bytes {
        let of_frame = self.buffer.is_empty();
        let whole = if of_frame { self.frame.len() } else { self.buffer.len() };
        let cut = match (of_frame, bytes == whole) {
            (true, true) => return std::mem::take(&mut self.frame),
            (false, true) => return std::mem::take(&mut self.buffer).freeze(),
            (true, false) => self.frame.split_to(bytes),
            (false, false) => self.buffer.split_to(bytes).freeze(),
        };
        if bytes > LARGE_MESSAGE_BYTES {
            let rest = self.unread().into();
            (self.frame, self.buffer) = if of_frame { (Bytes::new(), rest) } else { (self.frame.clone(), rest) };
        }
        cut
    }

    /// Moves the rest of the last frame to the buffer.
    fn keep(&mut self) {
        if !self.frame.is_empty() {
            let frame = std::mem::take(&mut self.frame);
            self.append(&frame);
        }
    }

    /// Appends `data` to the buffer.
    fn append(&mut self, data: &[u8]) {
        self.reserve_for(data);
        self.buffer.extend_from_slice(data);
    }

    /// Reserves memory for `data`, and for the rest of its message once enough of it has arrived.
    fn reserve_for(&mut self, data: &[u8]) {
        let received = self.buffer.len() + data.len();
        if received <= self.buffer.capacity() {
            return;
        }
        let begun = if self.buffer.is_empty() { data } else { &self.buffer };
        let announced = length_of(begun).map_or(0, |length| PREFIX_BYTES + length);
        let wanted = announced.min(RESERVED_TIMES_RECEIVED * received).max(received);
        self.buffer.reserve(wanted - self.buffer.len());
    }

    /// Takes over received bytes, except those of a discarded message.
    fn take(&mut self, mut data: Bytes) {
        let unwanted = data.len().min(self.discard);
        self.discard -= unwanted;
        data.advance(unwanted);
        if !data.is_empty() {
            self.keep();
            self.frame = data;
        }
    }

    /// Reads one frame.
    fn read(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            Some(Ok(frame)) => {
                if let Ok(data) = frame.into_data() {
                    self.take(data);
                }
            }
            Some(Err(_)) => self.end = Some(End::Reset),
            None => self.end = Some(End::HalfClosed),
        }
        Poll::Ready(())
    }
}

impl Stream for Inbound {
    type Item = Result<Incoming, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(message) = this.message() {
                return Poll::Ready(Some(message));
            }
            match this.end {
                Some(End::HalfClosed) if this.discard > 0 || !this.unread().is_empty() => {
                    this.discard = 0;
                    (this.frame, this.buffer) = (Bytes::new(), BytesMut::new());
                    return Poll::Ready(Some(Err(Status::invalid_argument("the stream ended within a message"))));
                }
                Some(_) => return Poll::Ready(None),
                None => {}
            }
            if this.read(cx).is_pending() {
                this.account();
                return Poll::Pending;
            }
        }
    }
}

/// The length of the message at the start of `bytes`; `None` if its prefix is incomplete.
fn length_of(bytes: &[u8]) -> Option<usize> {
    let [_, length @ ..] = *bytes.first_chunk::<PREFIX_BYTES>()?;
    Some(u32::from_be_bytes(length) as usize)
}

/// Bytes of an encoded message outside of body fields. Stops at invalid fields, which the decoder rejects.
fn bytes_beside_bodies(mut message: &[u8]) -> u64 {
    let mut beside = 0;
    while let Ok((field, wire_type)) = decode_key(&mut message) {
        let before = message.len();
        if skip_field(wire_type, field, &mut message, DecodeContext::default()).is_err() {
            break;
        }
        if !BODY_FIELDS.contains(&field) {
            beside += (before - message.len()) as u64;
        }
    }
    beside
}

/// The body of the response: a frame has all replies that are ready, and the trailers have the status.
#[derive(Debug)]
struct Replies {
    pump: Pump,
    state: Sending,
}

/// What the response continues with.
#[derive(Debug)]
enum Sending {
    Replies,
    Trailers(Status),
    Nothing,
}

impl Replies {
    /// Appends the replies that are ready to `frame`. Ready once no more follow, or enough are there.
    fn poll_replies(&mut self, frame: &mut Vec<u8>, cx: &mut Context<'_>) -> Poll<()> {
        while matches!(self.state, Sending::Replies) && frame.len() < YIELD_BYTES {
            let appended = match ready!(Pin::new(&mut self.pump).poll_next(cx)) {
                Some(reply) => reply.and_then(|reply| append(frame, &reply)),
                None => Err(Status::ok("")),
            };
            if let Err(status) = appended {
                self.state = Sending::Trailers(status);
            }
        }
        Poll::Ready(())
    }
}

/// Appends a reply with its prefix. If it can't be sent, the frame is as before.
fn append(frame: &mut Vec<u8>, reply: &ProcessingResponse) -> Result<(), Status> {
    let bytes = reply.encoded_len();
    let length = u32::try_from(bytes).map_err(|_| Status::resource_exhausted("a reply of more than 4 GiB"))?;
    frame.reserve(PREFIX_BYTES + bytes);
    frame.push(0);
    frame.extend_from_slice(&length.to_be_bytes());
    // A vector has room for everything, so that the encoder's own check is not needed.
    reply.encode_raw(frame);
    Ok(())
}

impl Body for Replies {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let mut frame = Vec::new();
        let polled = this.poll_replies(&mut frame, cx);
        if !frame.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(frame.into()))));
        }
        ready!(polled);
        Poll::Ready(match std::mem::replace(&mut this.state, Sending::Nothing) {
            Sending::Trailers(status) => {
                let mut trailers = HeaderMap::new();
                Some(status.add_header(&mut trailers).map(|()| Frame::trailers(trailers)))
            }
            _ => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.state, Sending::Nothing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_picker::body::Buffered;
    use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, processing_request::Request};
    use futures_util::{FutureExt, StreamExt};
    use http_body_util::{BodyExt, StreamBody};
    use proptest::prelude::*;
    use std::sync::Arc;

    fn message(bytes: usize) -> ProcessingRequest {
        let body = HttpBody { body: vec![7; bytes], end_of_stream: true, ..HttpBody::default() };
        ProcessingRequest { request: Some(Request::RequestBody(body)), ..ProcessingRequest::default() }
    }

    fn framed(message: &ProcessingRequest) -> Vec<u8> {
        let bytes = message.encode_to_vec();
        [&[0], &u32::try_from(bytes.len()).unwrap().to_be_bytes()[..], &bytes].concat()
    }

    /// Largest message in these tests.
    const MOST: usize = 6_000;

    #[test]
    fn clean_end_is_a_half_close_and_a_reset_is_not() {
        for (last, half_closed) in [(None, true), (Some(Err(Status::cancelled("reset"))), false)] {
            let first = Ok(http_body::Frame::data(Bytes::from(framed(&message(3)))));
            let body = StreamBody::new(futures_util::stream::iter([first].into_iter().chain(last)));
            let held = Arc::<Buffered>::default().nothing();
            let mut inbound = Inbound::new(First::new(tonic::body::Body::new(body.boxed_unsync())), MOST, held);
            assert!(inbound.next().now_or_never().unwrap().unwrap().is_ok());
            assert!(!inbound.is_half_closed());
            for _ in 0..2 {
                assert!(inbound.next().now_or_never().unwrap().is_none());
                assert_eq!(inbound.is_half_closed(), half_closed);
            }
        }
    }

    fn inbound(pieces: Vec<Vec<u8>>, buffered: &Arc<Buffered>) -> Inbound {
        let frames = pieces.into_iter().map(|piece| Ok::<_, Status>(http_body::Frame::data(Bytes::from(piece))));
        let body = StreamBody::new(futures_util::stream::iter(frames));
        Inbound::new(First::new(tonic::body::Body::new(body.boxed_unsync())), MOST, buffered.nothing())
    }

    /// The items that these pieces give, and the memory that is kept in the end.
    fn read(pieces: Vec<Vec<u8>>) -> (Vec<Result<Incoming, tonic::Code>>, usize) {
        let buffered = Arc::default();
        let mut inbound = inbound(pieces, &buffered);
        let mut got = Vec::new();
        while let Some(item) = inbound.next().now_or_never().unwrap() {
            let failed = item.is_err();
            got.push(item.map_err(|status| status.code()));
            if failed {
                break;
            }
        }
        assert_eq!(inbound.unfinished(), buffered.bytes());
        (got, inbound.frame.len() + inbound.buffer.capacity())
    }

    fn whole(bytes: usize) -> Result<Incoming, tonic::Code> {
        Ok(Incoming::Message(Box::new(message(bytes))))
    }

    #[test]
    fn invalid_message_ends_the_stream_with_invalid_argument() {
        let first = framed(&message(10));
        for (bytes, code) in [
            (first[..first.len() - 1].to_vec(), tonic::Code::InvalidArgument),
            (vec![0; 3], tonic::Code::InvalidArgument),
            (vec![1, 0, 0, 0, 0], tonic::Code::InvalidArgument),
            (vec![0, 0, 0, 0, 2, 255, 255], tonic::Code::InvalidArgument),
        ] {
            let (got, _) = read(vec![first.clone(), bytes.clone()]);
            assert_eq!(got, [whole(10), Err(code)], "{bytes:?}");
        }
    }

    #[test]
    fn message_over_the_limit_is_reported_by_length_and_not_buffered() {
        let (large, small) = (framed(&message(50_000)), framed(&message(10)));
        let length = (large.len() - PREFIX_BYTES) as u64;
        let too_large = || Ok(Incoming::TooLarge(length));
        let all = [small.clone(), large.clone(), small.clone()].concat();
        for cut in [7, 1_000, all.len()] {
            let (got, kept) = read(all.chunks(cut).map(<[u8]>::to_vec).collect());
            assert_eq!(got, [whole(10), too_large(), whole(10)], "pieces of {cut} bytes");
            assert_eq!(kept, 0);
        }
        // The length in the prefix is enough to reject it.
        let (got, _) = read(vec![vec![0, 0xff, 0xff, 0xff, 0xff]]);
        assert_eq!(got, [Ok(Incoming::TooLarge(u32::MAX.into())), Err(tonic::Code::InvalidArgument)]);
    }

    /// A body whose rest never arrives.
    fn unfinished(bytes: Vec<u8>, buffered: &Arc<Buffered>) -> Inbound {
        let frames = futures_util::stream::iter([Ok::<_, Status>(http_body::Frame::data(Bytes::from(bytes)))]);
        let body = StreamBody::new(frames.chain(futures_util::stream::pending()));
        Inbound::new(First::new(tonic::body::Body::new(body.boxed_unsync())), MOST, buffered.nothing())
    }

    #[test]
    fn unfinished_message_is_accounted_until_it_is_abandoned() {
        let buffered = Arc::<Buffered>::default();
        let mut inbound = unfinished(framed(&message(5_000))[..4_000].to_vec(), &buffered);
        assert!(inbound.next().now_or_never().is_none());
        assert_eq!(inbound.unfinished(), buffered.bytes());
        assert!((4_000..8_500).contains(&buffered.bytes()), "{} bytes", buffered.bytes());
        inbound.abandon();
        assert_eq!(buffered.bytes(), 0);
        assert!(inbound.next().now_or_never().is_none(), "the rest is not there");
        assert!((1_000..1_100).contains(&inbound.discard), "{} bytes", inbound.discard);

        let mut inbound = unfinished(framed(&message(5_000))[..4_000].to_vec(), &buffered);
        assert!(inbound.next().now_or_never().is_none());
        drop(inbound);
        assert_eq!(buffered.bytes(), 0);
    }

    #[test]
    fn absorbed_bytes_are_messages_later() {
        let buffered = Arc::<Buffered>::default();
        let bytes = framed(&message(10)).repeat(1_000);
        let mut inbound = inbound(bytes.chunks(20).map(<[u8]>::to_vec).collect(), &buffered);
        inbound.absorb(&mut Context::from_waker(std::task::Waker::noop()));
        assert!((MOST..3 * MOST).contains(&(buffered.bytes() as usize)), "{} bytes", buffered.bytes());
        let mut count = 0;
        while let Some(item) = inbound.next().now_or_never().unwrap() {
            assert_eq!(item.unwrap(), Incoming::Message(Box::new(message(10))));
            count += 1;
        }
        assert_eq!((count, buffered.bytes()), (1_000, 0));
    }

    /// Headers of two bytes each take 36 times as much memory once they are decoded.
    #[test]
    fn message_with_more_than_a_mebibyte_beside_bodies_is_not_decoded() {
        use envoy_types::pb::envoy::service::ext_proc::v3::HttpHeaders;
        let most = usize::try_from(MAX_BYTES_BESIDE_BODIES).unwrap();
        let headers = |count| {
            let headers = vec![envoy_types::pb::envoy::config::core::v3::HeaderValue::default(); count];
            let map = envoy_types::pb::envoy::config::core::v3::HeaderMap { headers };
            let headers = HttpHeaders { headers: Some(map), ..HttpHeaders::default() };
            ProcessingRequest { request: Some(Request::RequestHeaders(headers)), ..ProcessingRequest::default() }
        };
        assert!(bytes_beside_bodies(&headers(most / 2 - 10).encode_to_vec()) <= MAX_BYTES_BESIDE_BODIES);
        assert!(bytes_beside_bodies(&headers(most / 2 + 10).encode_to_vec()) > MAX_BYTES_BESIDE_BODIES);
        assert_eq!(bytes_beside_bodies(&message(2 * most).encode_to_vec()), 0, "a body has a limit of its own");
        let buffered = Arc::default();
        let whole = framed(&headers(most / 2 + 10));
        let mut inbound = inbound(vec![whole], &buffered);
        inbound.max_message = 4 * most;
        let got = inbound.next().now_or_never().unwrap().unwrap();
        assert!(matches!(got, Ok(Incoming::TooLarge(_))), "{got:?}");
    }

    /// The rest of a buffer would keep the memory of the large message before it.
    #[test]
    fn beginning_of_a_message_keeps_no_memory_of_the_one_before() {
        let buffered = Arc::default();
        let bytes = [framed(&message(1 << 20)), vec![0]].concat();
        let mut inbound = inbound(vec![bytes], &buffered);
        inbound.max_message = 2 << 20;
        assert!(inbound.next().now_or_never().unwrap().is_some());
        assert_eq!(inbound.buffer.len(), 1);
        assert!(inbound.buffer.capacity() < 100, "{}", inbound.buffer.capacity());
    }

    proptest! {
        /// However the bytes are cut, the messages are the same, and no memory is kept.
        #[test]
        fn messages_do_not_depend_on_how_they_are_cut(
            sizes in prop::collection::vec(0..5_000usize, 0..6),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let messages: Vec<_> = sizes.into_iter().map(message).collect();
            let all: Vec<u8> = messages.iter().flat_map(framed).collect();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(all.len() + 1)).chain([0, all.len()]).collect();
            at.sort_unstable();
            let pieces = at.windows(2).map(|w| all[w[0]..w[1]].to_vec()).collect();
            let (got, kept) = read(pieces);
            prop_assert_eq!(got, messages.into_iter().map(|m| Ok(Incoming::Message(Box::new(m)))).collect::<Vec<_>>());
            prop_assert_eq!(kept, 0);
        }
    }
}
