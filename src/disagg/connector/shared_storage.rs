//! `shared-storage`: model servers with a shared store of KV blocks (vLLM's ExampleConnector on a
//! shared directory, LMCache, Mooncake's store).
//!
//! Nothing connects the legs: the prefill worker writes the prompt's blocks into the store, and the decode worker,
//! which gets the client's body, finds them there by content. Several prompts and choices are therefore supported.
//!
//! A client sets `cache_hit_threshold` to get an error if its server holds less than that fraction of the prompt.
//! llm-d's sidecar asks the decode worker first; Attaché's decision already considers cached prefixes, so a split
//! request has the threshold 0 on both legs.
//!
//! Source: llm-d `shared-storage` (before: `lmcache`), vLLM #24256.

use super::{Connector, ConnectorDescriptor};
use crate::api::LegApi;
use crate::leg::{DecodeBody, Leg, LegError};
use crate::prefill::{Allowed, distrust, one_token, splittable};
use crate::reply::{Prefilled, Reply};

/// Entry of this connector in the registry.
pub const CONNECTOR: ConnectorDescriptor = ConnectorDescriptor {
    name: "shared-storage",
    aliases: &["lmcache"],
    summary: "Servers with one store of KV blocks: the prompt is prefilled on one, then served on the other.",
    source: "llm-d shared-storage; vLLM ExampleConnector, LMCache",
    connector: &SharedStorage,
};

const THRESHOLD: &str = "cache_hit_threshold";

/// The connector for servers with a shared store.
#[derive(Clone, Copy, Debug)]
pub struct SharedStorage;

impl Connector for SharedStorage {
    fn name(&self) -> &'static str {
        CONNECTOR.name
    }

    /// The store keeps all blocks without a lease.
    fn pins(&self, _api: LegApi, _reply: &[u8]) -> bool {
        false
    }

    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
        splittable(leg.api, leg.body, Allowed::Several)?;
        let edits = one_token(leg.api, &[]).replace(THRESHOLD, b"0");
        Ok(edits.apply(leg.body).map_err(LegError::Request)?.into_owned())
    }

    /// The response, if given, must be complete: after an aborted prefill, blocks may be missing in the store.
    fn decode_body<'a>(&self, leg: &Leg<'a>, reply: Option<&[u8]>) -> Result<DecodeBody<'a>, LegError> {
        let prefilled = match reply {
            Some(reply) => {
                let reply = Reply::read(leg.api, reply).map_err(LegError::Reply)?;
                reply.finished()?;
                reply.prefilled()
            }
            None => Prefilled::default(),
        };
        let edits = distrust(leg.api, &[]).replace(THRESHOLD, b"0");
        Ok(DecodeBody { body: edits.apply(leg.body).map_err(LegError::Request)?, prefilled })
    }
}
