//! `trtllm`: TensorRT-LLM (`trtllm-serve`).
//!
//! The prefill leg is a `context_only` request with a number that both legs share; its answer holds `disaggregated_params`, which the
//! decode leg sends back as a `generation_only` request, with the prompt's tokens where the answer tells them: the decode server need
//! not tokenise, and can't do so otherwise. The server takes the limit under one name only and refuses fields that it doesn't know, so
//! `max_completion_tokens` goes from the prefill leg.
//!
//! Source: AIBrix `pd` for TensorRT-LLM; TensorRT-LLM's `DisaggregatedParams`.

use super::{Connector, Descriptor, Sequence, object, reply_of};
use crate::disagg::api::LegApi;
use crate::disagg::leg::{DecodeBody, Leg, LegError};
use crate::disagg::prefill::{Allowed, distrust, one_token, splittable};
use crate::protocol::edit::Edits;
use std::time::Duration;

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

    fn sequence(&self) -> Sequence {
        Sequence::PrefillFirst
    }

    fn speaks(&self, api: LegApi) -> bool {
        matches!(api, LegApi::ChatCompletions | LegApi::Completions)
    }

    fn prefill_body(&self, leg: &Leg<'_>) -> Result<Vec<u8>, LegError> {
        if !self.speaks(leg.api) {
            return Err(LegError::Api { connector: self.name(), api: leg.api });
        }
        splittable(leg, Allowed::One)?;
        let params = format!(r#"{{"request_type":"context_only","disagg_request_id":{}}}"#, leg.room);
        // Of two edits of one key the first counts.
        let edits = Edits::new().remove("max_completion_tokens").set(PARAMS, params.into_bytes());
        let edits = edits.or_else(one_token(LegApi::ChatCompletions, &[PARAMS]));
        Ok(edits.apply(leg.body).map_err(LegError::Request)?.into_owned())
    }

    fn decode_body<'a>(&self, leg: &Leg<'a>, reply: Option<&[u8]>) -> Result<DecodeBody<'a>, LegError> {
        let reply = reply_of(self.name(), leg, reply)?;
        let params = reply.disaggregated_params.ok_or(LegError::NoParams { field: PARAMS })?;
        let params = Edits::new()
            .set("request_type", br#""generation_only""#)
            .apply(object(PARAMS, params)?)
            .map_err(LegError::Reply)?;
        let mut edits = distrust(&[PARAMS]).set(PARAMS, params);
        if let Some(tokens) = reply.prompt_token_ids.filter(|tokens| tokens.starts_with(b"[")) {
            let prompt = if leg.api == LegApi::Completions { "prompt" } else { "prompt_token_ids" };
            edits = edits.set(prompt, tokens);
        }
        let body = edits.apply(leg.body).map_err(LegError::Request)?.into_owned();
        Ok(DecodeBody { body: body.into(), prefilled: reply.prefilled() })
    }
}

/// Numbers below are the servers' own: a number that two servers share must not be one of them.
const MIN_SHARED_ID: u64 = 1 << 42;

/// The first of January 2023, from which the time in a number counts.
const EPOCH: Duration = Duration::from_millis(1_672_531_200_000);

/// A number for [`Leg::room`] that no other request has: 41 bits of milliseconds since 2023 (from `now`, since 1970), 10 of `machine`,
/// 12 of `counter`, moved above the numbers that servers give out themselves. As AIBrix and Dynamo make them, so that pickers of
/// several kinds can stand before one fleet. The counter wraps: 4,096 requests in one millisecond are told apart.
#[must_use]
pub fn disagg_request_id(now: Duration, machine: u16, counter: u64) -> u64 {
    let since = now.saturating_sub(EPOCH).as_millis().min((1 << 41) - 1);
    let time = u64::try_from(since).unwrap_or_default();
    let id = time << 22 | u64::from(machine & 0x3ff) << 12 | (counter & 0xfff);
    id % ((i64::MAX as u64) - MIN_SHARED_ID) + MIN_SHARED_ID
}
