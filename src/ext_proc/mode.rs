//! How Envoy sends bodies, told by `protocol_config` in the first message of a stream.

use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::ProtocolConfiguration;

/// A body send mode, grouped by how it wants to be answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMode {
    /// The body is not sent.
    None,
    /// Chunk by chunk, each answered once, with nothing or a replacement.
    Streamed,
    /// Once, whole (or, `BUFFERED_PARTIAL`, its head).
    Buffered,
    /// `FULL_DUPLEX_STREAMED` (and `GRPC`): chunks are taken out of the stream; what we send back is the body.
    FullDuplex,
}

/// The body modes of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// Of the request.
    pub request: BodyMode,
    /// Of the response.
    pub response: BodyMode,
    /// In `STREAMED` mode: body chunks come before the headers are answered.
    pub body_without_waiting: bool,
    /// In `BUFFERED` mode: the request's body comes in one message, whole. That message does not end the stream when trailers follow, and looks
    /// like the head of a longer body in `BUFFERED_PARTIAL` then.
    pub body_at_once: bool,
}

impl Modes {
    /// What to assume of a gateway that does not say: the mode that the endpoint picker protocol asks for.
    pub const UNSAID: Modes = Modes {
        request: BodyMode::FullDuplex,
        response: BodyMode::FullDuplex,
        body_without_waiting: false,
        body_at_once: false,
    };

    /// Reads the modes of a stream.
    #[must_use]
    pub fn of(config: &ProtocolConfiguration) -> Self {
        Self {
            request: mode(config.request_body_mode()),
            response: mode(config.response_body_mode()),
            body_without_waiting: config.send_body_without_waiting_for_header_response,
            body_at_once: config.request_body_mode() == BodySendMode::Buffered,
        }
    }

    /// Whether the answer to the headers must be given before the body is seen.
    #[must_use]
    pub fn headers_first(self) -> bool {
        match self.request {
            BodyMode::None => true,
            BodyMode::Streamed => !self.body_without_waiting,
            BodyMode::Buffered | BodyMode::FullDuplex => false,
        }
    }
}

fn mode(mode: BodySendMode) -> BodyMode {
    match mode {
        BodySendMode::None => BodyMode::None,
        BodySendMode::Streamed => BodyMode::Streamed,
        BodySendMode::Buffered | BodySendMode::BufferedPartial => BodyMode::Buffered,
        BodySendMode::FullDuplexStreamed | BodySendMode::Grpc => BodyMode::FullDuplex,
    }
}
