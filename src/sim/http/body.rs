//! The bodies that a simulated server sends.

use super::stream::EventStream;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

/// A line that a scraper may read for ever; a valid comment, so that only size can stop it.
const FILLER: &[u8] =
    b"# this page does not end, and what follows on it is the same again and again and again ........\n";

/// Body of a response: bytes, stream, or nothing.
#[derive(Debug)]
pub(crate) enum SimBody {
    /// Bytes that are sent at once.
    Full(Option<Bytes>),
    /// Server-sent events while the engine works.
    Events(Box<EventStream>),
    /// What this comes to, whose status and headers were sent before.
    Late(Late),
    /// This many bytes of filler.
    Filler { left: u64 },
    /// No byte, and no end.
    Hang,
}

/// A body that is not known yet.
pub(crate) struct Late(Pin<Box<dyn Future<Output = SimBody> + Send>>);

impl fmt::Debug for Late {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Late")
    }
}

impl Body for SimBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let this = self.get_mut();
        if let SimBody::Late(Late(body)) = this {
            *this = ready!(body.as_mut().poll(cx));
        }
        match this {
            SimBody::Full(data) => Poll::Ready(data.take().map(|data| Ok(Frame::data(data)))),
            SimBody::Events(stream) => stream.poll_frame(cx),
            SimBody::Filler { left: 0 } => Poll::Ready(None),
            SimBody::Filler { left } => {
                *left = left.saturating_sub(FILLER.len() as u64);
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(FILLER)))))
            }
            SimBody::Late(_) | SimBody::Hang => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, SimBody::Full(None))
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            SimBody::Full(data) => SizeHint::with_exact(data.as_ref().map_or(0, |data| data.len() as u64)),
            _ => SizeHint::default(),
        }
    }
}

/// An answer that is known whole.
pub(super) fn full_response(
    status: StatusCode,
    content_type: Option<&'static str>,
    body: impl Into<Bytes>,
) -> Response<SimBody> {
    let mut response = Response::new(SimBody::Full(Some(body.into()).filter(|bytes| !bytes.is_empty())));
    *response.status_mut() = status;
    if let Some(content_type) = content_type {
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    }
    response
}

/// A response with a JSON body.
pub(super) fn json_response(status: StatusCode, body: &serde_json::Value) -> Response<SimBody> {
    full_response(status, Some("application/json"), body.to_string())
}

/// A response with an event stream.
pub(super) fn event_response(stream: EventStream) -> Response<SimBody> {
    events(SimBody::Events(Box::new(stream)))
}

/// A stream of events of which nothing is known yet.
pub(super) fn late_response(body: impl Future<Output = SimBody> + Send + 'static) -> Response<SimBody> {
    events(SimBody::Late(Late(Box::pin(body))))
}

fn events(body: SimBody) -> Response<SimBody> {
    let mut response = Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response
}
