//! The ways in which servers move a KV cache, one file each and one line in [`CONNECTORS`].
//!
//! | name | servers | legs | what ties them together |
//! |---|---|---|---|
//! | `nixl` | vLLM with NIXL, pull and push, one way and both ways | prefill first | `kv_transfer_params` of the reply, verbatim |
//! | `shfs` | vLLM as AIBrix runs it by default | prefill first | the same, with the prefill server's address as `remote_host` |
//! | `neuron-nixl` | vLLM on Neuron | prefill first | the whole reply as `disagg_prefill_resp` |
//! | `sglang` | SGLang, whose decode servers serve nothing whole | both at once | `bootstrap_host`, `bootstrap_port`, `bootstrap_room` |
//! | `trtllm` | TensorRT-LLM | prefill first | `disaggregated_params` of the reply |
//! | `shared-storage` | vLLM with a shared KV store (LMCache, a shared directory) | prefill first | nothing: blocks are found by their content |
//!
//! AIBrix's label `model.aibrix.ai/kv-connector-type` calls the Neuron one `nixl`, which everybody else calls vLLM's.
//!
//! Not here: Mooncake and MoRI-IO, whose legs carry engine ids and data-parallel ranks that have to be asked of the servers first, and
//! vLLM's OffloadingConnector.

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

/// All connectors, in the order in which they are listed.
pub const CONNECTORS: &[&Descriptor] = &[
    &neuron_nixl::CONNECTOR,
    &nixl::CONNECTOR,
    &sglang::CONNECTOR,
    &shared_storage::CONNECTOR,
    &shfs::CONNECTOR,
    &trtllm::CONNECTOR,
];

/// A connector and what is said of it.
#[derive(Debug)]
pub struct Descriptor {
    /// kebab-case, unique.
    pub name: &'static str,
    /// Other names for it, unique likewise.
    pub aliases: &'static [&'static str],
    /// One sentence: which servers it is for and how the legs hang together.
    pub summary: &'static str,
    /// Whose rules it follows.
    pub source: &'static str,
    /// It.
    pub connector: &'static dyn Connector,
}

/// In which order the legs are sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sequence {
    /// The prefill leg; when its reply is there, the decode leg.
    PrefillFirst,
    /// Both at once: the servers find each other, and the decode server waits for as long as it takes. Nobody but whoever sent the
    /// prefill leg can tell it that it failed.
    Together,
}

/// Makes the bodies of both legs of a split request.
pub trait Connector: Debug + Sync {
    /// Its name in [`CONNECTORS`].
    fn name(&self) -> &'static str;

    /// In which order the legs are sent.
    fn sequence(&self) -> Sequence {
        Sequence::PrefillFirst
    }

    /// Whether it splits requests of `api`.
    fn speaks(&self, _api: LegApi) -> bool {
        true
    }

    /// Whether its decode servers also serve requests that are not split. Where not, they answer them with an error.
    fn serves_whole(&self) -> bool {
        true
    }

    /// The body of the prefill leg: exactly one token, not streamed, and the prompt as the client wrote it.
    ///
    /// # Errors
    /// The request can't be split.
    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError>;

    /// The body of the decode leg: the client's, and what tells the server where the KV cache is. `reply` is the body of the prefill
    /// server's answer, with status 200.
    ///
    /// # Errors
    /// The request can't be split, or the reply doesn't tell what it should.
    fn decode_body<'a>(&self, leg: &Leg<'a>, reply: Option<&[u8]>) -> Result<DecodeBody<'a>, LegError>;

    /// Whether a prefill server that answered `reply` keeps memory for this one request until a decode server has fetched it. An answer of
    /// which [`Connector::decode_body`] makes no body can't be fetched in any case.
    fn pins(&self, _api: LegApi, _reply: &[u8]) -> bool {
        true
    }

    /// Whether decode servers may end an answer with `kv_transfer_params` for the next turn's prefill ([`Leg::carried`]).
    fn carries(&self) -> bool {
        false
    }

    /// What ends a leg of this request on a server that waits for the other leg in vain; `None` where closing the connection is enough.
    fn abort_request(&self, _leg: &Leg<'_>) -> Option<AbortRequest> {
        None
    }
}

/// The connector of this name, ours or llm-d's.
#[must_use]
pub fn named(name: &str) -> Option<&'static Descriptor> {
    CONNECTORS.iter().copied().find(|d| d.name == name || d.aliases.contains(&name))
}

/// Refuses requests of an API that the connector does not speak.
fn spoken(connector: &dyn Connector, leg: &Leg<'_>) -> Result<(), LegError> {
    match connector.speaks(leg.api) {
        true => Ok(()),
        false => Err(LegError::Api { connector: connector.name(), api: leg.api }),
    }
}

/// The prefill server's answer, read.
fn reply_of<'r>(connector: &dyn Connector, leg: &Leg<'_>, reply: Option<&'r [u8]>) -> Result<Reply<'r>, LegError> {
    spoken(connector, leg)?;
    let reply = reply.ok_or(LegError::NoReply { connector: connector.name() })?;
    let reply = Reply::read(leg.api, reply).map_err(LegError::Reply)?;
    reply.finished()?;
    Ok(reply)
}

/// `params` if it is an object.
fn object<'r>(field: &'static str, params: &'r [u8]) -> Result<&'r [u8], LegError> {
    match params.first() {
        Some(b'{') => Ok(params),
        Some(b'[') => Err(LegError::Params { field, got: "an array" }),
        Some(b'"') => Err(LegError::Params { field, got: "a string" }),
        _ => Err(LegError::Params { field, got: "a number or a boolean" }),
    }
}

/// `text` as a JSON string.
fn json_string(text: &str) -> Vec<u8> {
    // Writing a string into memory can't fail.
    serde_json::to_vec(text).unwrap_or_default()
}

#[cfg(test)]
mod tests;
