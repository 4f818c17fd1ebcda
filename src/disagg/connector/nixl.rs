//! `nixl`: vLLM's NixlConnector and NixlPushConnector.
//!
//! The prefill server computes the prompt, keeps its blocks under a lease, and answers with `kv_transfer_params`; the decode server gets
//! the client's body with that object, byte for byte, and fetches the blocks (pull) or has them written to it (push). Fields that are
//! newer than this file go on with the rest.
//!
//! Both ways: a decode server with `bidirectional_kv_xfer` ends its answer with `kv_transfer_params` of its own, which the next turn's
//! prefill leg carries ([`Leg::carried`]) in place of the usual ones.
//!
//! Not split: several prompts or answers in one request (vLLM gives params for one of them, and frees the blocks when the first has
//! them: vllm#38900, vllm#43509), and what needs all of the prompt computed where the answer is made. Source: vLLM 0.32
//! (recorded bodies in `tests/data/pd`), llm-d's `nixlv2`.

use super::{Connector, Descriptor, object, reply_of};
use crate::leg::{DecodeBody, Leg, LegError};
use crate::prefill::{Allowed, distrust, one_token, splittable};

/// Its line in the registry.
pub const CONNECTOR: Descriptor = Descriptor {
    name: "nixl",
    aliases: &["nixlv2"],
    summary: "vLLM with NIXL: the decode server gets the kv_transfer_params of the prefill server's answer.",
    source: "vLLM NixlConnector, NixlPushConnector; llm-d nixlv2",
    connector: &Nixl,
};

/// What a prefill server is told: keep the blocks for somebody else. The nulls are what vLLM's own proxy and llm-d send.
pub(super) const KEEP: &[u8] = br#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}"#;

pub(super) const PARAMS: &str = "kv_transfer_params";

/// The connector.
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
        // Some servers tell nothing of an answer that ended with its first token: so would every other.
        let why = if reply.stopped() { LegError::Ended } else { LegError::NoParams { field: PARAMS } };
        let params = reply.kv_transfer_params.ok_or(why)?;
        let edits = distrust(leg.api, &[PARAMS]).set(PARAMS, object(PARAMS, params)?);
        let body = edits.apply(leg.body).map_err(LegError::Request)?;
        Ok(DecodeBody { body, prefilled: reply.prefilled() })
    }
}

/// The prefill leg, the same for AIBrix's `shfs`.
pub(super) fn prefill_body(leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
    splittable(leg.api, leg.body, Allowed::One)?;
    // What is no object would break the body.
    let carried = leg.carried.filter(|params| params.starts_with(b"{"));
    let edits = one_token(leg.api, &[PARAMS]).set(PARAMS, carried.unwrap_or(KEEP));
    Ok(edits.apply(leg.body).map_err(LegError::Request)?.into_owned())
}
