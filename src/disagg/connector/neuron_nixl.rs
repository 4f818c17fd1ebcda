//! `neuron-nixl`: vLLM on AWS Neuron, which AIBrix calls `nixl`.
//!
//! The prefill leg asks for one token without any transfer parameter. The decode worker gets the client's body
//! with the whole response of the prefill worker as `disagg_prefill_resp`, byte for byte, and reads everything
//! from it, the first token included.
//!
//! Source: AIBrix `pd` router, connector `nixl`.

use super::{Connector, ConnectorDescriptor, reply_of, spoken};
use crate::api::LegApi;
use crate::leg::{DecodeBody, Leg, LegError};
use crate::prefill::{Allowed, distrust, first_token, splittable};

/// Entry of this connector in the registry.
pub const CONNECTOR: ConnectorDescriptor = ConnectorDescriptor {
    name: "neuron-nixl",
    aliases: &[],
    summary: "vLLM on Neuron: the decode worker gets the prefill worker's whole response. AIBrix calls it nixl.",
    source: "AIBrix pd, connector nixl",
    connector: &NeuronNixl,
};

const RESPONSE: &str = "disagg_prefill_resp";

/// The connector for vLLM on Neuron.
#[derive(Clone, Copy, Debug)]
pub struct NeuronNixl;

impl Connector for NeuronNixl {
    fn name(&self) -> &'static str {
        CONNECTOR.name
    }

    fn speaks(&self, api: LegApi) -> bool {
        matches!(api, LegApi::ChatCompletions | LegApi::Completions)
    }

    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
        spoken(self, leg)?;
        splittable(leg.api, leg.body, Allowed::One)?;
        Ok(first_token(leg.api, &[]).apply(leg.body).map_err(LegError::Request)?.into_owned())
    }

    fn decode_body<'a>(&self, leg: &Leg<'a>, reply: Option<&[u8]>) -> Result<DecodeBody<'a>, LegError> {
        let reply = reply_of(self, leg, reply)?;
        let edits = distrust(leg.api, &[RESPONSE]).set(RESPONSE, reply.raw);
        let body = edits.apply(leg.body).map_err(LegError::Request)?;
        Ok(DecodeBody { body, prefilled: reply.prefilled() })
    }
}
