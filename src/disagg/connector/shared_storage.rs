//! `shared-storage`: servers that share a store of KV blocks (vLLM's ExampleConnector on a shared directory, LMCache, Mooncake's store).
//!
//! Nothing ties the legs together: the prefill server puts the prompt's blocks into the store, and the decode server, sent the client's
//! body, finds them there by their content. Several prompts and answers are therefore fine.
//!
//! A request with `cache_hit_threshold` wants to be told when its server holds less than that share of the prompt. llm-d's sidecar asks the
//! decode server first; here the decision has looked at what it holds already, so a request that is split has the threshold 0 on both
//! legs.
//!
//! Source: llm-d `shared-storage` (before: `lmcache`), vLLM #24256.

use super::{Connector, Descriptor};
use crate::api::LegApi;
use crate::leg::{DecodeBody, Leg, LegError};
use crate::prefill::{Allowed, distrust, one_token, splittable};
use crate::reply::{Prefilled, Reply};

/// Its line in the registry.
pub const CONNECTOR: Descriptor = Descriptor {
    name: "shared-storage",
    aliases: &["lmcache"],
    summary: "Servers with one store of KV blocks: the prompt is prefilled on one, then served on the other.",
    source: "llm-d shared-storage; vLLM ExampleConnector, LMCache",
    connector: &SharedStorage,
};

const THRESHOLD: &str = "cache_hit_threshold";

/// The connector.
#[derive(Clone, Copy, Debug)]
pub struct SharedStorage;

impl Connector for SharedStorage {
    fn name(&self) -> &'static str {
        CONNECTOR.name
    }

    /// The store keeps what it is given.
    fn pins(&self, _api: LegApi, _reply: &[u8]) -> bool {
        false
    }

    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
        splittable(leg.api, leg.body, Allowed::Several)?;
        let edits = one_token(leg.api, &[]).replace(THRESHOLD, b"0");
        Ok(edits.apply(leg.body).map_err(LegError::Request)?.into_owned())
    }

    /// The reply, if it is given, must have come to its end: the store may lack what an aborted prefill did not write.
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
