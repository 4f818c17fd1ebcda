//! The gateway's call itself: the `:authority` by which one process distinguishes pools, and its trace context.

use super::Exchange;
use http::uri::{Authority, InvalidUri};
use http::{HeaderMap, HeaderValue, Uri};

/// The parts of the gateway's gRPC call that an exchange reads.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GatewayCall {
    /// `:authority`.
    authority: Option<Authority>,
    /// The context of the gateway's own span, if the gateway traces requests.
    traceparent: Option<HeaderValue>,
}

impl GatewayCall {
    /// The call with this URI and these headers.
    #[must_use]
    pub fn of(uri: &Uri, headers: &HeaderMap) -> Self {
        Self { authority: uri.authority().cloned(), traceparent: headers.get("traceparent").cloned() }
    }

    /// A call with this `:authority`, by a gateway that makes no call; with an empty one, it has none.
    ///
    /// # Errors
    /// `authority` is no authority of a URI.
    pub fn to(authority: &str) -> Result<Self, InvalidUri> {
        let authority = if authority.is_empty() { None } else { Some(authority.parse()?) };
        Ok(Self { authority, traceparent: None })
    }

    /// The `:authority`; empty if the call has none.
    pub(super) fn authority(&self) -> &str {
        self.authority.as_ref().map_or("", Authority::as_str)
    }

    /// The W3C context of the gateway's span.
    pub(super) fn traceparent(&self) -> Option<&str> {
        self.traceparent.as_ref()?.to_str().ok()
    }
}

impl Exchange {
    /// The same exchange, for this call.
    #[must_use]
    pub fn of_call(mut self, call: GatewayCall) -> Self {
        self.call = call;
        self
    }
}
