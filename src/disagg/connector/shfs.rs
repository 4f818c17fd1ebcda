//! `shfs`: vLLM with AIBrix's defaults.
//!
//! As [`nixl`], with two differences. The decode worker gets the prefill worker's address as `remote_host`, whatever
//! the response contains (servers that listen on all addresses return one that can't be reached). And a response
//! without `kv_transfer_params` is not an error, because the decode worker may find the blocks in the shared pool:
//! it gets the client's body.
//!
//! Source: AIBrix `pd` router, connector `shfs`.

use super::nixl::{self, PARAMS};
use super::{Connector, ConnectorDescriptor, json_string, object, reply_of};
use crate::api::LegApi;
use crate::leg::{DecodeBody, Leg, LegError};
use crate::prefill::distrust;
use crate::reply::Reply;
use attache_protocol::edit::Edits;

/// Entry of this connector in the registry.
pub const CONNECTOR: ConnectorDescriptor = ConnectorDescriptor {
    name: "shfs",
    aliases: &[],
    summary: "vLLM as AIBrix runs it: as nixl, with the prefill worker's address as remote_host.",
    source: "AIBrix pd, connector shfs",
    connector: &Shfs,
};

/// The connector for AIBrix's vLLM.
#[derive(Clone, Copy, Debug)]
pub struct Shfs;

impl Connector for Shfs {
    fn name(&self) -> &'static str {
        CONNECTOR.name
    }

    /// Blocks in the shared pool have no lease.
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
