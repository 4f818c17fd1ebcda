//! `trtllm`: TensorRT-LLM (`trtllm-serve`).
//!
//! The prefill leg is a `context_only` request with a number that both legs share; its answer holds `disaggregated_params`, which the
//! decode leg sends back as a `generation_only` request, with the prompt's tokens where the answer tells them: the decode server need
//! not tokenise, and can't do so otherwise. The decode server goes on from the first token, which is the prefill server's; one that
//! ends the answer leaves nothing to go on from. The server takes the limit under one name only and refuses fields that it doesn't know, so
//! `max_completion_tokens` goes from the prefill leg.
//!
//! Source: AIBrix `pd` for TensorRT-LLM; TensorRT-LLM's `DisaggregatedParams`.

use super::{Connector, Descriptor, object, reply_of, spoken};
use crate::api::LegApi;
use crate::leg::{DecodeBody, Leg, LegError};
use crate::prefill::{Allowed, distrust, first_token, splittable};
use attache_protocol::edit::Edits;

/// Its line in the registry.
pub const CONNECTOR: Descriptor = Descriptor {
    name: "trtllm",
    aliases: &[],
    summary: "TensorRT-LLM: context_only, then generation_only with the disaggregated_params of the answer.",
    source: "TensorRT-LLM; AIBrix pd",
    connector: &TrtLlm,
};

const PARAMS: &str = "disaggregated_params";

/// The connector.
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
        // Of two edits of one key the first counts.
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

/// Numbers below are the servers' own: a number that two servers share, [`Leg::room`], must not be one of them.
pub const LEAST_SHARED_ID: u64 = 1 << 42;
