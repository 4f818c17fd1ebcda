//! The ways in which model servers transfer a KV cache, one file each and one line in [`CONNECTORS`].
//!
//! | name | servers | legs | what connects them |
//! |---|---|---|---|
//! | `nixl` | vLLM with NIXL: pull, push, bidirectional | prefill first | `kv_transfer_params` of the response |
//! | `shfs` | vLLM as AIBrix runs it by default | prefill first | the same, with the prefill worker's address |
//! | `neuron-nixl` | vLLM on Neuron | prefill first | the whole response as `disagg_prefill_resp` |
//! | `sglang` | SGLang: decode workers serve no whole request | both at once | `bootstrap_host`, `_port`, `_room` |
//! | `trtllm` | TensorRT-LLM | prefill first | `disaggregated_params` of the response |
//! | `shared-storage` | vLLM with a shared KV store (LMCache) | prefill first | nothing: blocks are found by content |
//!
//! AIBrix's label `model.aibrix.ai/kv-connector-type` uses `nixl` for the Neuron connector; all
//! others use it for vLLM's.
//!
//! Not supported: Mooncake and MoRI-IO, whose legs need engine ids and data-parallel ranks that must be queried from
//! the servers first, and vLLM's OffloadingConnector.

pub mod neuron_nixl;
pub mod nixl;
pub mod sglang;
pub mod shared_storage;
pub mod shfs;
pub mod trtllm;

use super::api::LegApi;
use super::leg::{AbortRequest, DecodeBody, Leg, LegError};
use super::reply::Reply;
use std::fmt::Debug;

/// All connectors, in the order of the reference.
pub const CONNECTORS: &[&ConnectorDescriptor] = &[
    &neuron_nixl::CONNECTOR,
    &nixl::CONNECTOR,
    &sglang::CONNECTOR,
    &shared_storage::CONNECTOR,
    &shfs::CONNECTOR,
    &trtllm::CONNECTOR,
];

/// A connector with its names and its description.
#[derive(Debug)]
pub struct ConnectorDescriptor {
    /// Unique kebab-case name in configurations.
    pub name: &'static str,
    /// Further unique names that select the same connector.
    pub aliases: &'static [&'static str],
    /// One sentence for the reference: which servers it is for and how the legs are connected.
    pub summary: &'static str,
    /// Project whose rules it follows.
    pub source: &'static str,
    /// The connector itself.
    pub connector: &'static dyn Connector,
}

/// The order in which the legs are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sequence {
    /// The prefill leg first; the decode leg once its response has arrived.
    PrefillFirst,
    /// Both at once: the servers find each other, and the decode worker waits without limit. Only the sender of the
    /// prefill leg can tell it that the prefill failed.
    Together,
}

/// Builds the bodies of both legs of a split request.
pub trait Connector: Debug + Sync {
    /// Name of the connector in [`CONNECTORS`].
    fn name(&self) -> &'static str;

    /// The order in which the legs are sent.
    fn sequence(&self) -> Sequence {
        Sequence::PrefillFirst
    }

    /// Whether the connector can split requests of `api`.
    fn speaks(&self, _api: LegApi) -> bool {
        true
    }

    /// Whether its decode workers also serve requests that are not split. Otherwise they respond with an error.
    fn serves_whole(&self) -> bool {
        true
    }

    /// The body of the prefill leg: exactly one token, not streamed, and the client's prompt unchanged.
    ///
    /// # Errors
    /// If the request can't be split.
    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError>;

    /// The body of the decode leg: the client's body, with the parameters of the transfer. `reply` is the body of the
    /// prefill worker's response with status 200.
    ///
    /// # Errors
    /// If the request can't be split, or the response lacks the transfer parameters.
    fn decode_body<'a>(&self, leg: &Leg<'a>, reply: Option<&[u8]>) -> Result<DecodeBody<'a>, LegError>;

    /// Whether a prefill worker that responded with `reply` keeps memory for this request until a decode worker has
    /// fetched it. A response without a valid [`Connector::decode_body`] can't be fetched in any case.
    fn pins(&self, _api: LegApi, _reply: &[u8]) -> bool {
        true
    }

    /// Whether decode workers may end a response with `kv_transfer_params` for the prefill
    /// of the next turn ([`Leg::carried`]).
    fn carries(&self) -> bool {
        false
    }

    /// The request that aborts a leg on a server which waits for the other leg; `None` if
    /// closing the connection is enough.
    fn abort_request(&self, _leg: &Leg<'_>) -> Option<AbortRequest> {
        None
    }
}

/// The connector of this name in Attaché or llm-d.
#[must_use]
pub fn named(name: &str) -> Option<&'static ConnectorDescriptor> {
    CONNECTORS.iter().copied().find(|d| d.name == name || d.aliases.contains(&name))
}

/// Checks that the connector supports the API of the leg.
fn spoken(connector: &dyn Connector, leg: &Leg<'_>) -> Result<(), LegError> {
    match connector.speaks(leg.api) {
        true => Ok(()),
        false => Err(LegError::Api { connector: connector.name(), api: leg.api }),
    }
}

/// Parses the prefill worker's response.
fn reply_of<'r>(connector: &dyn Connector, leg: &Leg<'_>, reply: Option<&'r [u8]>) -> Result<Reply<'r>, LegError> {
    spoken(connector, leg)?;
    let reply = reply.ok_or(LegError::NoReply { connector: connector.name() })?;
    let reply = Reply::read(leg.api, reply).map_err(LegError::Reply)?;
    reply.finished()?;
    Ok(reply)
}

/// `params` if it is a JSON object.
fn object<'r>(field: &'static str, params: &'r [u8]) -> Result<&'r [u8], LegError> {
    match params.first() {
        Some(b'{') => Ok(params),
        Some(b'[') => Err(LegError::Params { field, got: "an array" }),
        Some(b'"') => Err(LegError::Params { field, got: "a string" }),
        _ => Err(LegError::Params { field, got: "a number or a boolean" }),
    }
}

/// `text` as a JSON string literal.
fn json_string(text: &str) -> Vec<u8> {
    // Writing a string into memory can't fail.
    serde_json::to_vec(text).unwrap_or_default()
}

#[cfg(test)]
mod tests;
