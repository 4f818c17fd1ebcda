//! The head of a response, as far as the picker reads it.

use crate::split::NotAccepted;
use attache_protocol::AnswerFormat;
use std::borrow::Cow;
use std::net::SocketAddr;

/// Where a response comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Origin {
    /// The server, or Envoy in its place once it was connected: a reset, a time-out. So, too, where the gateway does
    /// not send `response.code_details`: a server that is down responds like one that fails on the request.
    #[default]
    Server,
    /// Envoy, which could not connect to the server.
    Unreachable,
    /// Envoy or one of its filters, for a reason that is not the server's: no route, a full circuit breaker.
    Gateway,
}

/// What the headers of a response say, and what the gateway says with them.
#[derive(Clone, Copy, Debug, Default)]
pub struct ResponseHead<'a> {
    /// HTTP status; 0 when there is none.
    pub status: u16,
    /// The body is compressed, so that it can't be read.
    pub encoded: bool,
    /// The body is an event stream.
    pub sse: bool,
    /// Where the response comes from.
    pub origin: Origin,
    /// The endpoint that served, after retries; `None` when the gateway does not say.
    pub served: Option<SocketAddr>,
    /// The same by the metadata of the endpoint picker protocol, as the gateway spells it.
    pub reported: Option<&'a str>,
    /// Whether another server was asked before; `None` when the gateway does not say.
    pub retried: Option<bool>,
    /// The body will be shown to the picker.
    pub shows_body: bool,
    /// What the gateway tried before the endpoint that served, in its order; empty if it does not say.
    pub earlier: &'a [EarlierAttempt],
}

/// An attempt of the gateway that it did not pass on to the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EarlierAttempt {
    /// The server; `None` if it is unknown.
    pub server: Option<SocketAddr>,
    /// HTTP status of its response; `None` without one.
    pub status: Option<u16>,
}

impl ResponseHead<'_> {
    pub(super) fn is_good(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// What the body is written in.
    pub(super) fn format(&self) -> AnswerFormat {
        if self.sse { AnswerFormat::Events } else { AnswerFormat::Json }
    }

    /// Why the endpoint did not accept the request; `None` if it may have.
    pub(super) fn untaken(&self) -> Option<NotAccepted> {
        if self.origin == Origin::Server { NotAccepted::of(self.status) } else { Some(NotAccepted::Away) }
    }
}

/// Changes of a response's headers.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HeaderChanges {
    /// Headers to set, replacing those of the same name.
    pub set: Vec<(Cow<'static, str>, String)>,
    /// The length of the body changes: its `content-length` goes.
    pub drops_length: bool,
}
