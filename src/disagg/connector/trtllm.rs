//! `trtllm`: TensorRT-LLM (`trtllm-serve`).
//!
//! The prefill leg is a `context_only` request with an id that both legs share. Its response has
//! `disaggregated_params`, which the decode leg returns in a `generation_only` request, with the prompt's token ids if
//! the response has them, so that the decode worker need not tokenize. The decode worker continues from the prefill
//! worker's first token; a token that ends the response leaves nothing to continue. The server accepts only one name of
//! the token limit and rejects unknown fields, so `max_completion_tokens` is removed from the prefill leg.
//!
//! Source: AIBrix `pd` for TensorRT-LLM; TensorRT-LLM's `DisaggregatedParams`.

use super::{Connector, ConnectorDescriptor, object, reply_of, spoken};
use crate::api::LegApi;
use crate::leg::{DecodeBody, Leg, LegError};
use crate::prefill::{Allowed, distrust, first_token, splittable};
use attache_protocol::edit::Edits;

/// Entry of this connector in the registry.
pub const CONNECTOR: ConnectorDescriptor = ConnectorDescriptor {
    name: "trtllm",
    aliases: &[],
    summary: "TensorRT-LLM: context_only, then generation_only with the disaggregated_params of the response.",
    source: "TensorRT-LLM; AIBrix pd",
    connector: &TrtLlm,
};

const PARAMS: &str = "disaggregated_params";

/// The connector for TensorRT-LLM.
#[derive(Clone, Copy, Debug)]
pub struct TrtLlm;

impl Connector for TrtLlm {
    fn name(&self) -> &'static str {
        CONNECTOR.name
    }

    fn speaks(&self, api: LegApi) -> bool {
        matches!(api, LegApi::ChatCompletions | LegApi::Completions)
    }

    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
        spoken(self, leg)?;
        splittable(leg.api, leg.body, Allowed::One)?;
        let params = format!(r#"{{"request_type":"context_only","disagg_request_id":{}}}"#, leg.room);
        // If two edits have the same key, the first one is used.
        let edits = Edits::new().remove("max_completion_tokens").set(PARAMS, params.into_bytes());
        let edits = edits.or_else(first_token(leg.api, &[PARAMS]));
        Ok(edits.apply(leg.body).map_err(LegError::Request)?.into_owned())
    }

    fn decode_body<'a>(&self, leg: &Leg<'a>, reply: Option<&[u8]>) -> Result<DecodeBody<'a>, LegError> {
        let reply = reply_of(self, leg, reply)?;
        if reply.stopped() {
            return Err(LegError::Ended);
        }
        let params = reply.disaggregated_params.ok_or(LegError::NoParams { field: PARAMS })?;
        let params = Edits::new()
            .set("request_type", br#""generation_only""#)
            .apply(object(PARAMS, params)?)
            .map_err(LegError::Reply)?;
        let mut edits = distrust(leg.api, &[PARAMS]).set(PARAMS, params);
        if let Some(tokens) = reply.prompt_token_ids.filter(|tokens| tokens.starts_with(b"[")) {
            let prompt = if leg.api == LegApi::Completions { "prompt" } else { "prompt_token_ids" };
            edits = edits.set(prompt, tokens);
        }
        let body = edits.apply(leg.body).map_err(LegError::Request)?.into_owned();
        Ok(DecodeBody { body: body.into(), prefilled: reply.prefilled() })
    }
}

/// Smaller numbers belong to the servers themselves; an id that two servers share, [`Leg::room`],
/// must not be among them.
pub const LEAST_SHARED_ID: u64 = 1 << 42;
