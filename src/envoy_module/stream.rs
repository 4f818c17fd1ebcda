//! What the filters of a stream have in common: their hooks, and what Envoy does after one.

use crate::callbacks::Callbacks;
use attache_types::clock::Timestamp;

/// Values of Envoy's enums for the outcome of a hook.
const CONTINUE: u32 = 0;
const STOP: u32 = 1;
const STOP_WITHOUT_BUFFER: u32 = 3;

/// What Envoy does with the data of a hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Passes it on.
    Continue,
    /// Holds it back.
    Hold,
    /// Discards it: the stream has been answered.
    Discard,
}

impl Flow {
    /// Envoy's value for the outcome of a hook with headers or trailers.
    #[must_use]
    pub fn headers_status(self) -> u32 {
        if self == Self::Continue { CONTINUE } else { STOP }
    }

    /// Envoy's value for the outcome of a hook with a chunk of a body.
    #[must_use]
    pub fn body_status(self) -> u32 {
        match self {
            Self::Continue => CONTINUE,
            Self::Hold => STOP,
            Self::Discard => STOP_WITHOUT_BUFFER,
        }
    }
}

/// The hooks of a filter of one stream. Those that a filter lacks let the stream pass.
pub trait StreamFilter {
    /// The request headers; `end`: no body follows.
    fn request_headers(&self, envoy: &dyn Callbacks, end: bool) -> Flow;
    /// The response headers; `end`: no body follows.
    fn response_headers(&self, envoy: &dyn Callbacks, end: bool) -> Flow;

    /// A chunk of the request body; `end`: the last one.
    fn request_body(&self, _envoy: &dyn Callbacks, _end: bool) -> Flow {
        Flow::Continue
    }

    /// The request trailers.
    fn request_trailers(&self, _envoy: &dyn Callbacks) -> Flow {
        Flow::Continue
    }

    /// The waker of the stream was woken. The caller lets a request continue that was held before.
    fn scheduled(&self, _envoy: &dyn Callbacks) -> Flow {
        Flow::Continue
    }

    /// A chunk of the response body; `end`: the last one.
    fn response_body(&self, _envoy: &dyn Callbacks, _end: bool) -> Flow {
        Flow::Continue
    }

    /// The response trailers.
    fn response_trailers(&self, _envoy: &dyn Callbacks) -> Flow {
        Flow::Continue
    }

    /// The stream is over, complete or not.
    fn complete(&self) {}

    /// Whether the request is held back.
    fn holds(&self) -> bool {
        false
    }

    /// The time, if a picker decides.
    fn now(&self) -> Option<Timestamp> {
        None
    }

    /// A hook has panicked. The stream passes without Attaché from now on, unless it is answered.
    fn panicked(&self, _envoy: &dyn Callbacks) -> Flow {
        Flow::Continue
    }

    /// A hook ends that has kept Envoy's worker since `began`.
    fn hook_ended(&self, _began: Option<Timestamp>) {}
}
