//! The bodies that a simulated server sends.

use super::stream::EventStream;
use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

/// A line that a scraper may read for ever; a valid comment, so that only size can stop it.
const FILLER: &[u8] =
    b"# this page does not end, and what follows on it is the same again and again and again ........\n";

/// A response body.
#[derive(Debug)]
pub(in crate::sim) enum SimBody {
    /// Sent at once.
    Full(Option<Bytes>),
    /// Server-sent events while the engine works.
    Events(Box<EventStream>),
    /// This many bytes of filler.
    Filler { left: u64 },
    /// Nothing, for ever.
    Hang,
}

impl Body for SimBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match self.get_mut() {
            SimBody::Full(data) => Poll::Ready(data.take().map(|data| Ok(Frame::data(data)))),
            SimBody::Events(stream) => stream.poll_frame(cx),
            SimBody::Filler { left: 0 } => Poll::Ready(None),
            SimBody::Filler { left } => {
                *left = left.saturating_sub(FILLER.len() as u64);
                Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(FILLER)))))
            }
            SimBody::Hang => Poll::Pending,
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

/// A JSON answer.
pub(super) fn json_response(status: StatusCode, body: &serde_json::Value) -> Response<SimBody> {
    full_response(status, Some("application/json"), body.to_string())
}

/// A stream of events.
pub(super) fn event_response(stream: EventStream) -> Response<SimBody> {
    let mut response = Response::new(SimBody::Events(Box::new(stream)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    response
}
