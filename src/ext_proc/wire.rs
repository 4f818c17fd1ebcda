//! The gRPC method on the wire: messages out of the body of a request, and the stream of answers as the body of the response.
//!
//! What `envoy_types` generates would do the same, but it reserves 16 KiB of buffers for every stream and keeps what the longest message took. A
//! stream lives as long as its answer, and thousands may wait for their turn: here nothing is kept between two messages. Compressed messages
//! are not taken, as the server offers no compression. Called by `server`; imports [`super::service`].

use super::service::{Pump, Service};
use crate::connections::{Client, InFlight};
use bytes::{Buf, Bytes, BytesMut};
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use futures_core::Stream;
use http_body::Body;
use prost::Message;
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::task::{Context, Poll};
use tonic::Status;
use tonic::codec::{BufferSettings, EncodeBody, EncodeBuf, Encoder, SingleMessageCompressionOverride};
use tonic::codegen::{Service as HttpService, StdError};
use tonic::server::NamedService;

/// The service's only method.
const PROCESS: &str = "/envoy.service.ext_proc.v3.ExternalProcessor/Process";
/// Largest message that is decoded, 256 MiB: a BUFFERED body comes in one, and one that is over the body limit must be read to be refused with a
/// 413. What Envoy may send at once is bounded by its own buffer limits, far below this.
const MAX_MESSAGE_BYTES: usize = 256 << 20;
/// Before each message: whether it is compressed, and its length.
const PREFIX_BYTES: usize = 5;
/// Reserved for answers, 512 bytes: the one to headers fits, and what is longer gets what it needs.
const BUFFER_BYTES: usize = 512;
/// Answers are sent when so many bytes are there, tonic's own 32 KiB.
const YIELD_BYTES: usize = 32 << 10;

/// The service as tonic's server takes it.
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
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        if request.uri().path() != PROCESS {
            return ready(Ok(Status::unimplemented("").into_http()));
        }
        if request.headers().get("grpc-encoding").is_some_and(|encoding| encoding != "identity") {
            let mut response = Status::unimplemented("compressed messages are not taken").into_http();
            response.headers_mut().insert("grpc-accept-encoding", http::HeaderValue::from_static("identity"));
            return ready(Ok(response));
        }
        let called = request.uri().authority().cloned();
        let (mut parts, body) = request.into_parts();
        let in_flight = parts.extensions.remove::<Client>().map(Client::in_flight);
        let inbound = Inbound::new(tonic::body::Body::new(body), in_flight);
        ready(Ok(answer(self.0.open(inbound, called))))
    }
}

fn answer(pump: Pump) -> http::Response<tonic::body::Body> {
    let compression = SingleMessageCompressionOverride::default();
    let body = EncodeBody::new_server(Prost, pump, None, compression, Some(usize::MAX));
    let mut response = http::Response::new(tonic::body::Body::new(body));
    let content_type = http::HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(http::header::CONTENT_TYPE, content_type);
    response
}

/// The gateway's messages. Ends with the request side of the stream, by END_STREAM or by a reset; an error describes a message that can't be read,
/// and is the last item.
#[derive(Debug)]
pub struct Inbound {
    body: tonic::body::Body,
    /// What has come of messages that are not whole.
    buffer: BytesMut,
    end: Option<End>,
    /// Keeps the connection from being evicted.
    _in_flight: Option<InFlight>,
}

/// How the request side of a stream has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    HalfClosed,
    Reset,
}

impl Inbound {
    fn new(body: tonic::body::Body, in_flight: Option<InFlight>) -> Self {
        Self { body, buffer: BytesMut::new(), end: None, _in_flight: in_flight }
    }

    /// Whether the gateway has ended its side by END_STREAM: no more messages come, and it may still wait for responses. When it resets the stream
    /// afterwards, or its connection ends, hyper drops the stream.
    #[must_use]
    pub fn is_half_closed(&self) -> bool {
        self.end == Some(End::HalfClosed)
    }

    /// The next message, when it is whole.
    fn message(&mut self) -> Option<Result<ProcessingRequest, Status>> {
        let [compressed, length @ ..] = *self.buffer.first_chunk::<PREFIX_BYTES>()?;
        if compressed != 0 {
            return Some(Err(Status::invalid_argument(format!(
                "a message has the compression flag {compressed}, 0 is allowed"
            ))));
        }
        let length = u32::from_be_bytes(length) as usize;
        if length > MAX_MESSAGE_BYTES {
            let message = format!("a message is {length} bytes, {MAX_MESSAGE_BYTES} are allowed");
            return Some(Err(Status::resource_exhausted(message)));
        }
        if self.buffer.len() < PREFIX_BYTES + length {
            return None;
        }
        self.buffer.advance(PREFIX_BYTES);
        let message = ProcessingRequest::decode(self.buffer.split_to(length));
        if self.buffer.is_empty() {
            self.buffer = BytesMut::new();
        }
        Some(message.map_err(|error| Status::invalid_argument(error.to_string())))
    }
}

impl Stream for Inbound {
    type Item = Result<ProcessingRequest, Status>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = self.get_mut();
        loop {
            if let Some(message) = this.message() {
                return Poll::Ready(Some(message));
            }
            if this.end.is_some() {
                return Poll::Ready(None);
            }
            match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(frame))) => {
                    if let Ok(data) = frame.into_data() {
                        this.buffer.extend_from_slice(&data);
                    }
                }
                // A reset is how streams end, normal ends and aborts alike.
                Poll::Ready(Some(Err(_))) => this.end = Some(End::Reset),
                Poll::Ready(None) if this.buffer.is_empty() => this.end = Some(End::HalfClosed),
                Poll::Ready(None) => {
                    this.buffer = BytesMut::new();
                    this.end = Some(End::HalfClosed);
                    return Poll::Ready(Some(Err(Status::invalid_argument("the stream ended within a message"))));
                }
            }
        }
    }
}

/// Writes answers.
#[derive(Clone, Copy, Debug)]
struct Prost;

impl Encoder for Prost {
    type Item = ProcessingResponse;
    type Error = Status;

    fn encode(&mut self, item: ProcessingResponse, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        item.encode(buffer).map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(BUFFER_BYTES, YIELD_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use envoy_types::pb::envoy::service::ext_proc::v3::{HttpBody, processing_request::Request};
    use futures_util::{FutureExt, StreamExt};
    use http_body_util::{BodyExt, StreamBody};
    use proptest::prelude::*;

    fn message(bytes: usize) -> ProcessingRequest {
        let body = HttpBody { body: vec![7; bytes], end_of_stream: true, ..HttpBody::default() };
        ProcessingRequest { request: Some(Request::RequestBody(body)), ..ProcessingRequest::default() }
    }

    fn framed(message: &ProcessingRequest) -> Vec<u8> {
        let bytes = message.encode_to_vec();
        [&[0], &u32::try_from(bytes.len()).unwrap().to_be_bytes()[..], &bytes].concat()
    }

    #[test]
    fn a_clean_end_is_a_half_close_and_a_reset_is_not() {
        for (last, half_closed) in [(None, true), (Some(Err(Status::cancelled("reset"))), false)] {
            let first = Ok(http_body::Frame::data(Bytes::from(framed(&message(3)))));
            let body = StreamBody::new(futures_util::stream::iter([first].into_iter().chain(last)));
            let mut inbound = Inbound::new(tonic::body::Body::new(body.boxed_unsync()), None);
            assert!(inbound.next().now_or_never().unwrap().unwrap().is_ok());
            assert!(!inbound.is_half_closed());
            for _ in 0..2 {
                assert!(inbound.next().now_or_never().unwrap().is_none());
                assert_eq!(inbound.is_half_closed(), half_closed);
            }
        }
    }

    /// All that comes of these pieces, and what is kept in the end.
    fn read(pieces: Vec<Vec<u8>>) -> (Vec<Result<ProcessingRequest, tonic::Code>>, usize) {
        let frames = pieces.into_iter().map(|piece| Ok::<_, Status>(http_body::Frame::data(Bytes::from(piece))));
        let body = StreamBody::new(futures_util::stream::iter(frames));
        let mut inbound = Inbound::new(tonic::body::Body::new(body.boxed_unsync()), None);
        let mut got = Vec::new();
        while let Some(item) = inbound.next().now_or_never().unwrap() {
            let failed = item.is_err();
            got.push(item.map_err(|status| status.code()));
            if failed {
                break;
            }
        }
        (got, inbound.buffer.capacity())
    }

    #[test]
    fn what_is_no_message_is_named() {
        let whole = framed(&message(10));
        for (bytes, code) in [
            (whole[..whole.len() - 1].to_vec(), tonic::Code::InvalidArgument),
            (vec![0; 3], tonic::Code::InvalidArgument),
            (vec![1, 0, 0, 0, 0], tonic::Code::InvalidArgument),
            (vec![0, 0, 0, 0, 2, 255, 255], tonic::Code::InvalidArgument),
            (vec![0, 0x10, 0, 0, 1], tonic::Code::ResourceExhausted),
        ] {
            let (got, _) = read(vec![whole.clone(), bytes.clone()]);
            assert_eq!(got, [Ok(message(10)), Err(code)], "{bytes:?}");
        }
    }

    proptest! {
        /// Wherever the bytes are cut, the messages are the same, and nothing is kept of them.
        #[test]
        fn messages_do_not_depend_on_how_they_are_cut(
            sizes in prop::collection::vec(0..5_000usize, 0..6), cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let messages: Vec<_> = sizes.into_iter().map(message).collect();
            let all: Vec<u8> = messages.iter().flat_map(framed).collect();
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(all.len() + 1)).chain([0, all.len()]).collect();
            at.sort_unstable();
            let pieces = at.windows(2).map(|w| all[w[0]..w[1]].to_vec()).collect();
            let (got, kept) = read(pieces);
            prop_assert_eq!(got, messages.into_iter().map(Ok).collect::<Vec<_>>());
            prop_assert_eq!(kept, 0);
        }
    }
}
