//! The spans of a request: one for the request, a child for each step. Names and attributes are those of
//! OpenTelemetry's semantic conventions for GenAI and HTTP; Attaché's own begin with `attache.`.
//!
//! The parent is the gateway's span, or the client's if the gateway does not trace. The parent decides whether the
//! request is sampled. A request that is not sampled has no span and no attribute, and costs at most one random number.
//! Off unless a collector is configured. The exporter is in `otlp`.
//!
//! ```text
//! chat MODEL                       from the request headers to the end of the response
//! ├─ body                          until the request's body has arrived
//! ├─ quota, tokens, queue          what the decision waited for
//! ├─ decision                      parse, route, choose, book
//! │  └─ lookup                     in the prefix index
//! ├─ prefill                       the call to the prefill server of a split request
//! ├─ first_byte                    until the first byte of the response's body
//! └─ response                      until its end
//! ```

#[cfg_attr(not(feature = "full"), path = "trace/disabled.rs")]
mod recorded;

pub use recorded::*;

/// The contexts that a request comes with, as `traceparent` values.
#[derive(Clone, Copy, Debug, Default)]
pub struct TraceContexts<'a> {
    /// Of the gateway's call to Attaché. It outranks the other.
    pub gateway: Option<&'a str>,
    /// Of the request itself.
    pub request: Option<&'a str>,
}

/// What is known of a request by its headers.
#[derive(Clone, Copy, Debug)]
pub struct Received<'a> {
    /// HTTP method.
    pub method: &'a str,
    /// Path with its query, which is not recorded.
    pub path: &'a str,
}

/// A step of a request. Steps follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The body of the request arrives.
    Body,
    /// The shared store of quotas is asked.
    Quota,
    /// The prompt is rendered and tokenized.
    Tokens,
    /// The request is queued.
    Queue,
    /// The first byte of the response is awaited.
    FirstByte,
    /// The response is passed on.
    Response,
}

impl Step {
    /// The name of its span.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Body => "body",
            Self::Quota => "quota",
            Self::Tokens => "tokens",
            Self::Queue => "queue",
            Self::FirstByte => "first_byte",
            Self::Response => "response",
        }
    }
}
