//! `nixl`: vLLM's NixlConnector and NixlPushConnector.
//!
//! The prefill worker prefills the prompt, keeps its blocks under a lease, and responds with `kv_transfer_params`. The
//! decode worker gets the client's body with that object, byte for byte, and fetches the blocks (pull) or receives them
//! (push). Fields that are newer than this file are passed on too.
//!
//! Bidirectional: a decode worker with `bidirectional_kv_xfer` ends its response with `kv_transfer_params` of its own,
//! which the next turn's prefill leg carries ([`Leg::carried`]) instead of the usual ones.
//!
//! Not split: requests with several prompts or choices (vLLM returns parameters for one of them, and frees the blocks
//! after the first transfer: vllm#38900, vllm#43509), and requests that need the whole prefill on the decode worker.
//! Source: vLLM 0.32 (recorded bodies in `tests/data/pd`), llm-d's `nixlv2`.

use super::{Connector, ConnectorDescriptor, object, reply_of};
use crate::leg::{DecodeBody, Leg, LegError};
use crate::prefill::{Allowed, distrust, one_token, splittable};

/// Entry of this connector in the registry.
pub const CONNECTOR: ConnectorDescriptor = ConnectorDescriptor {
    name: "nixl",
    aliases: &["nixlv2"],
    summary: "vLLM with NIXL: the decode worker gets the kv_transfer_params of the prefill worker's response.",
    source: "vLLM NixlConnector, NixlPushConnector; llm-d nixlv2",
    connector: &Nixl,
};

/// Asks a prefill worker to keep the blocks for a transfer. vLLM's own proxy and llm-d send the nulls too.
pub(super) const KEEP: &[u8] = b"{\"do_remote_decode\":true,\"do_remote_prefill\":false,\"remote_engine_id\":null,\
      \"remote_block_ids\":null,\"remote_host\":null,\"remote_port\":null}";

pub(super) const PARAMS: &str = "kv_transfer_params";

/// The connector for vLLM with NIXL.
#[derive(Clone, Copy, Debug)]
pub struct Nixl;

impl Connector for Nixl {
    fn name(&self) -> &'static str {
        CONNECTOR.name
    }

    fn carries(&self) -> bool {
        true
    }

    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
        prefill_body(leg)
    }

    fn decode_body<'a>(&self, leg: &Leg<'a>, reply: Option<&[u8]>) -> Result<DecodeBody<'a>, LegError> {
        let reply = reply_of(self, leg, reply)?;
        // Some servers return no parameters for a response that ended with its first token; another
        // server would do the same.
        let why = if reply.stopped() { LegError::Ended } else { LegError::NoParams { field: PARAMS } };
        let params = reply.kv_transfer_params.ok_or(why)?;
        let edits = distrust(leg.api, &[PARAMS]).set(PARAMS, object(PARAMS, params)?);
        let body = edits.apply(leg.body).map_err(LegError::Request)?;
        Ok(DecodeBody { body, prefilled: reply.prefilled() })
    }
}

/// The prefill leg, which AIBrix's `shfs` shares.
pub(super) fn prefill_body(leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
    splittable(leg.api, leg.body, Allowed::One)?;
    // A value that is not an object would make the body invalid.
    let carried = leg.carried.filter(|params| params.starts_with(b"{"));
    let edits = one_token(leg.api, &[PARAMS]).set(PARAMS, carried.unwrap_or(KEEP));
    Ok(edits.apply(leg.body).map_err(LegError::Request)?.into_owned())
}
