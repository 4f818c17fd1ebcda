//! How Envoy sends bodies, by `protocol_config` in the first message of a stream.

use envoy_types::pb::envoy::extensions::filters::http::ext_proc::v3::processing_mode::BodySendMode;
use envoy_types::pb::envoy::service::ext_proc::v3::ProtocolConfiguration;

/// Envoy's body send modes, grouped by the replies that they need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyMode {
    /// The body is not sent.
    None,
    /// Chunk by chunk. Each chunk needs one reply, which may replace it.
    Streamed,
    /// In one message, complete. `BUFFERED_PARTIAL` cuts long bodies.
    Buffered,
    /// `FULL_DUPLEX_STREAMED` and `GRPC`: Envoy hands the chunks over. The replies are the body.
    FullDuplex,
    /// No mode of ext-proc: a filter inside Envoy holds the body and copies the chunks. Replies have changes only.
    Inside,
}

impl BodyMode {
    /// Whether a reply to the request may take any time. In the other modes, Envoy's `message_timeout` limits it.
    #[must_use]
    pub fn may_wait(self) -> bool {
        matches!(self, BodyMode::FullDuplex | BodyMode::Inside)
    }
}

/// The body modes of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// Of the request.
    pub request: BodyMode,
    /// Of the response.
    pub response: BodyMode,
    /// In `STREAMED` mode: Envoy sends body chunks before the reply to the headers.
    pub body_without_waiting: bool,
    /// In `BUFFERED` mode: the message with the request body is always complete. If trailers follow, it lacks
    /// `end_of_stream`, like a cut body in `BUFFERED_PARTIAL` mode.
    pub body_at_once: bool,
}

impl Modes {
    /// The modes of a gateway that sends no `protocol_config`: those that the endpoint picker protocol requires.
    pub const DEFAULT: Modes = Modes {
        request: BodyMode::FullDuplex,
        response: BodyMode::FullDuplex,
        body_without_waiting: false,
        body_at_once: false,
    };

    /// The modes of a filter inside Envoy.
    pub const INSIDE: Modes = Modes {
        request: BodyMode::Inside,
        response: BodyMode::Inside,
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

    /// Whether Envoy waits for the reply to the headers before it sends the body.
    #[must_use]
    pub fn headers_first(self) -> bool {
        match self.request {
            BodyMode::None => true,
            BodyMode::Streamed => !self.body_without_waiting,
            BodyMode::Buffered | BodyMode::FullDuplex | BodyMode::Inside => false,
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
