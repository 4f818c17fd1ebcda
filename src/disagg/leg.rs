//! What a connector is given and what it gives back.

use super::api::LegApi;
use super::reply::Prefilled;
use attache_protocol::edit::EditError;
use std::borrow::Cow;
use std::net::SocketAddr;

/// One split request, as far as its bodies depend on it.
#[derive(Clone, Copy, Debug)]
pub struct Leg<'a> {
    /// The API, the same for both legs.
    pub api: LegApi,
    /// The client's body, the model's name as the servers know it. What it says in [`CONTROLLED`](super::CONTROLLED) members is not
    /// believed.
    pub body: &'a [u8],
    /// The prefill server as the decode server can reach it: an IP address or a name, without port and without brackets.
    pub prefill_host: &'a str,
    /// Where the prefill leg goes.
    pub prefill_address: SocketAddr,
    /// The port of the prefill server's bootstrap server (SGLang); [`DEFAULT_BOOTSTRAP_PORT`](super::connector::sglang::DEFAULT_BOOTSTRAP_PORT) unless told.
    pub bootstrap_port: u16,
    /// A number that no other request in flight has: SGLang's bootstrap room (63 bits count), TensorRT-LLM's
    /// `disagg_request_id`, from [`LEAST_SHARED_ID`](super::connector::trtllm::LEAST_SHARED_ID) on.
    pub room: u64,
    /// `x-request-id`, the same on both legs.
    pub request_id: &'a str,
    /// What the decode server of this conversation's last turn told in `kv_transfer_params`, verbatim: the prefill server pulls the old
    /// turns from there (vLLM's bidirectional transfer). One JSON object.
    pub carried: Option<&'a [u8]>,
}

/// The body of a decode leg.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeBody<'a> {
    /// The body; borrowed from the client's when nothing had to be changed.
    pub body: Cow<'a, [u8]>,
    /// What the prefill server told.
    pub prefilled: Prefilled,
}

/// A request that ends another one on a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbortRequest {
    /// Path; the method is POST.
    pub path: &'static str,
    /// JSON.
    pub body: Vec<u8>,
}

/// Why a leg has no body. All of them leave the way open to serve the request on one server.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LegError {
    /// The connector does not split requests of this API.
    #[error("`{connector}` can't split requests of {}", api.name())]
    Api { connector: &'static str, api: LegApi },
    /// The request asks for something that only one server can do.
    #[error("a request with `{field}` can't be split, {why}")]
    Unsplittable { field: &'static str, why: &'static str },
    /// The client's body can't be edited.
    #[error("the request: {0}")]
    Request(EditError),
    /// The prefill server's reply can't be read.
    #[error("the prefill server's reply: {0}")]
    Reply(EditError),
    /// The prefill server's reply is needed and was not given.
    #[error("`{connector}` makes the decode leg from the prefill server's reply, got none")]
    NoReply { connector: &'static str },
    /// The reply holds nothing that tells the decode server where the KV cache is.
    #[error("the prefill server's reply holds no `{field}`")]
    NoParams { field: &'static str },
    /// What tells it is of the wrong sort.
    #[error("`{field}` in the prefill server's reply must be an object, got {got}")]
    Params { field: &'static str, got: &'static str },
    /// The prefill ended otherwise than it should: what it computed is gone.
    #[error("the prefill ended with `{got}`, expected length or stop")]
    NotFinished { got: String },
    /// The prefill server's token is the last of the answer: there is nothing left for the decode server, which would go on from it.
    #[error("the answer ended with its first token")]
    Ended,
}

impl LegError {
    /// Whether another prefill server may do better: the reply was at fault, not the request.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(
            self,
            LegError::Reply(_) | LegError::NoParams { .. } | LegError::Params { .. } | LegError::NotFinished { .. }
        )
    }
}
