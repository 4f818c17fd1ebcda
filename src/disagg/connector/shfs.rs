//! `shfs`: vLLM as AIBrix runs it unless told otherwise.
//!
//! As [`nixl`], with two differences: the decode server is told the prefill server's address as `remote_host`, whatever the
//! answer says there (servers that listen on all addresses answer with one that nobody can reach); and an answer without
//! `kv_transfer_params` is no error, because the decode server may find the blocks in the shared pool: it gets the client's body.
//!
//! Source: AIBrix `pd` router, connector `shfs`.

use super::nixl::{self, PARAMS};
use super::{Connector, Descriptor, json_string, object, reply_of};
use crate::api::LegApi;
use crate::leg::{DecodeBody, Leg, LegError};
use crate::prefill::distrust;
use crate::reply::Reply;
use attache_protocol::edit::Edits;

/// Its line in the registry.
pub const CONNECTOR: Descriptor = Descriptor {
    name: "shfs",
    aliases: &[],
    summary: "vLLM as AIBrix runs it: as nixl, with the prefill server's address as remote_host.",
    source: "AIBrix pd, connector shfs",
    connector: &Shfs,
};

/// The connector.
#[derive(Clone, Copy, Debug)]
pub struct Shfs;

impl Connector for Shfs {
    fn name(&self) -> &'static str {
        CONNECTOR.name
    }

    /// What lies in the shared pool is nobody's.
    fn pins(&self, api: LegApi, reply: &[u8]) -> bool {
        Reply::read(api, reply).is_ok_and(|reply| reply.kv_transfer_params.is_some())
    }

    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
        nixl::prefill_body(leg)
    }

    fn decode_body<'a>(&self, leg: &Leg<'a>, reply: Option<&[u8]>) -> Result<DecodeBody<'a>, LegError> {
        let reply = reply_of(self, leg, reply)?;
        let mut edits = distrust(leg.api, &[PARAMS]);
        edits = match reply.kv_transfer_params {
            None => edits.remove(PARAMS),
            Some(params) => {
                let host = Edits::new().set("remote_host", json_string(leg.prefill_host));
                let params = host.apply(object(PARAMS, params)?).map_err(LegError::Reply)?;
                edits.set(PARAMS, params.into_owned())
            }
        };
        let body = edits.apply(leg.body).map_err(LegError::Request)?;
        Ok(DecodeBody { body, prefilled: reply.prefilled() })
    }
}
