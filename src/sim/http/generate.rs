//! `/inference/v1/generate`: tokens in, tokens out. Streams are not offered.

use super::body::{SimBody, json_response};
use super::error::ApiError;
use super::legs::Legs;
use super::openai::{finish_reason, usage_json};
use super::requests::OpenAiRequest;
use super::{Call, Generation, Server};
use crate::tokenizer::answer_token;
use http::{Response, StatusCode};
use serde::Deserialize;
use serde_json::{Value, json};

#[derive(Debug, Deserialize)]
struct GenerateRequest {
    model: Option<String>,
    token_ids: Vec<u32>,
    /// The names are those of a completion.
    sampling_params: OpenAiRequest,
    #[serde(default)]
    stream: bool,
    cache_salt: Option<String>,
}

pub(super) async fn generate(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let mut request: GenerateRequest = call.json()?;
    if request.stream {
        return Err(ApiError::bad_request("stream is true, this server only gives whole answers here").param("stream"));
    }
    let model = server.model(request.model.as_deref())?;
    let id = server.id("generate-tokens", call);
    let name = model.name.clone();
    let generation = Generation {
        prompts: vec![request.token_ids],
        choices: request.sampling_params.choices()?,
        model,
        limits: request.sampling_params.limits()?,
        cache_salt: request.cache_salt.take(),
        legs: Legs::of(&call.body)?,
        request_id: id.clone(),
        traceparent: call.traceparent(),
        host: call.host.clone(),
    };
    let whole = server.start(generation).await?.finish().await?;
    let choices: Vec<Value> = whole
        .answers
        .iter()
        .zip(&whole.reports)
        .enumerate()
        .map(|(index, (answer, report))| {
            let tokens: Vec<u32> = (0..report.generated_tokens).map(|token| answer_token(answer.seed, token)).collect();
            json!({
                "index": index, "finish_reason": finish_reason(report.reason), "stop_reason": answer.stop_text(report),
                "token_ids": tokens, "routed_experts": null, "sampling_mask": null, "logprobs": null,
                "weight_versions": [{"version": "default", "start": 0, "end": tokens.len()}],
            })
        })
        .collect();
    let body = json!({
        "request_id": id, "model": name, "created": server.unix_seconds(), "usage": usage_json(&whole.totals.usage,
        false),
        "prompt_logprobs": null, "prompt_token_id_logprobs": null, "prompt_token_ids": null, "mm_placeholders": null,
        "metrics": null, "kv_transfer_params": whole.totals.kv_transfer_params, "ec_transfer_params": null,
        "output_mode": "tokens", "choices": choices,
    });
    Ok(json_response(StatusCode::OK, &body))
}
