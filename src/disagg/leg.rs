//! Input and output of a connector.

use super::api::LegApi;
use super::reply::Prefilled;
use attache_protocol::edit::EditError;
use std::borrow::Cow;
use std::net::SocketAddr;

/// One split request, as far as the bodies of its legs depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Leg<'a> {
    /// The API, the same for both legs.
    pub api: LegApi,
    /// The client's body, with the model name as the servers know it. Its
    /// [`CONTROLLED`](super::CONTROLLED) members are not trusted.
    pub body: &'a [u8],
    /// The prefill worker as the decode worker can reach it: an IP address or a name,
    /// without port and without brackets.
    pub prefill_host: &'a str,
    /// URL of the prefill leg.
    pub prefill_address: SocketAddr,
    /// Port of the prefill worker's bootstrap server (SGLang), by default
    /// [`DEFAULT_BOOTSTRAP_PORT`](super::connector::sglang::DEFAULT_BOOTSTRAP_PORT).
    pub bootstrap_port: u16,
    /// A number unique among requests in flight: SGLang's bootstrap room (63 bits count), TensorRT-LLM's
    /// `disagg_request_id`, from [`LEAST_SHARED_ID`](super::connector::trtllm::LEAST_SHARED_ID) on.
    pub room: u64,
    /// `x-request-id`, the same on both legs.
    pub request_id: &'a str,
    /// `kv_transfer_params` from the decode worker of this conversation's last turn, verbatim: the prefill worker pulls
    /// the old turns from there (vLLM's bidirectional transfer). One JSON object.
    pub carried: Option<&'a [u8]>,
}

/// The body of a decode leg, with facts from the prefill.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeBody<'a> {
    /// The body; borrowed from the client's if nothing had to be changed.
    pub body: Cow<'a, [u8]>,
    /// Token counts that the prefill worker reported.
    pub prefilled: Prefilled,
}

/// A request that aborts another one on a model server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbortRequest {
    /// Path of the request; its method is POST.
    pub path: &'static str,
    /// JSON body of the request.
    pub body: Vec<u8>,
}

/// Why a leg has no body. In all cases the request can still be served by one server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LegError {
    /// The connector does not split requests of this API.
    #[error("`{connector}` can't split requests of {}", api.name())]
    Api { connector: &'static str, api: LegApi },
    /// The request needs something that only one server can do.
    #[error("a request with `{field}` can't be split, {why}")]
    Unsplittable { field: &'static str, why: &'static str },
    /// The client's body can't be edited.
    #[error("the request: {0}")]
    Request(EditError),
    /// The prefill worker's response can't be parsed.
    #[error("the prefill server's reply: {0}")]
    Reply(EditError),
    /// The prefill worker's response is needed and missing.
    #[error("`{connector}` makes the decode leg from the prefill server's reply, got none")]
    NoReply { connector: &'static str },
    /// The response does not contain where the KV cache is.
    #[error("the prefill server's reply holds no `{field}`")]
    NoParams { field: &'static str },
    /// The transfer parameters have the wrong type.
    #[error("`{field}` in the prefill server's reply must be an object, got {got}")]
    Params { field: &'static str, got: &'static str },
    /// The prefill ended unexpectedly, so its KV cache is gone.
    #[error("the prefill ended with `{got}`, expected length or stop")]
    NotFinished { got: String },
    /// The prefill worker's token ends the response, so nothing is left for the decode worker to continue.
    #[error("the answer ended with its first token")]
    Ended,
}

impl LegError {
    /// Whether another prefill worker may succeed: the response was at fault, not the request.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            LegError::Reply(_) | LegError::NoParams { .. } | LegError::Params { .. } | LegError::NotFinished { .. }
        )
    }
}
