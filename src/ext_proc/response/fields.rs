//! The headers of an answer, as far as they are read.

use crate::head;
use crate::metadata::Origin;
use crate::split::Untaken;
use attache_protocol::AnswerFormat;
use envoy_types::pb::envoy::config::core::v3::HeaderMap;

/// What matters in the headers of an answer.
#[derive(Debug, Default)]
pub(super) struct ResponseFields {
    pub(super) status: u16,
    pub(super) encoded: bool,
    pub(super) sse: bool,
}

impl ResponseFields {
    pub(super) fn is_good(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// What the body is written in.
    pub(super) fn format(&self) -> AnswerFormat {
        if self.sse { AnswerFormat::Events } else { AnswerFormat::Json }
    }

    /// Why nobody has looked at the request's prompt, if so.
    pub(super) fn untaken(&self, origin: Origin) -> Option<Untaken> {
        if origin == Origin::Server { Untaken::of(self.status) } else { Some(Untaken::Away) }
    }

    pub(super) fn read(headers: Option<&HeaderMap>) -> Self {
        let mut found = Self::default();
        for header in headers.map(|h| h.headers.as_slice()).unwrap_or_default() {
            let value = head::value(header);
            match header.key.as_str() {
                ":status" => found.status = std::str::from_utf8(value).ok().and_then(|s| s.parse().ok()).unwrap_or(0),
                "content-encoding" => found.encoded = !value.is_empty() && value != b"identity",
                "content-type" => found.sse = value.starts_with(b"text/event-stream"),
                _ => {}
            }
        }
        found
    }
}
