//! What a server says about itself, its tokenizer, its adapters, and the switchboard of its faults.

use super::body::{SimBody, full_response, json_response};
use super::error::ApiError;
use super::requests::{DetokenizeRequest, LoraRequest, OpenAiRequest};
use super::{Call, LoraAdapter, Server};
use crate::config::Quirks;
use crate::faults::Faults;
use crate::host::HostSnapshot;
use crate::tokenizer;
use http::{Method, Response, StatusCode};
use serde_json::{Value, json};

pub(super) fn health(model_loaded: bool) -> Response<SimBody> {
    json_response(StatusCode::OK, &json!({"status": "ok", "model_loaded": model_loaded}))
}

pub(super) fn version() -> Response<SimBody> {
    json_response(StatusCode::OK, &json!({"version": env!("CARGO_PKG_VERSION")}))
}

pub(super) fn server_load(server: &Server) -> Response<SimBody> {
    let loads = server.hosts().map(|host| host.snapshot().load);
    json_response(StatusCode::OK, &json!({"server_load": loads.map(|load| load.running + load.waiting).sum::<usize>()}))
}

pub(super) fn stats(server: &Server) -> Response<SimBody> {
    let snapshots: Vec<HostSnapshot> = server.hosts().map(|host| host.snapshot()).collect();
    let counted = |count: fn(&HostSnapshot) -> u64| snapshots.iter().map(count).sum::<u64>();
    let (running, waiting) = (counted(|s| s.load.running as u64), counted(|s| s.load.waiting as u64));
    let (submitted, generated) = (counted(|s| s.stats.submitted), counted(|s| s.stats.generation_tokens));
    let usage = snapshots.iter().map(|s| s.load.kv_usage).sum::<f64>() / snapshots.len().max(1) as f64;
    let body = match server.config.quirks {
        Quirks::None | Quirks::AstraiDocumented => json!({
            "active_requests": running,
            "waiting_requests": waiting,
            "total_requests": submitted,
            "cache_usage": usage,
            "tokens_generated": generated,
        }),
        Quirks::Astrai => json!({
            "total_tasks": submitted,
            "total_tokens": generated,
            "active_tasks": running,
            "waiting_queue": waiting,
        }),
    };
    json_response(StatusCode::OK, &body)
}

pub(super) fn models(server: &Server) -> Response<SimBody> {
    let created = server.unix_seconds();
    let entry = |id: &str, root: &str, parent: Option<&str>, max_model_len: Option<u32>| {
        json!({
            "id": id, "object": "model", "created": created, "owned_by": "vllm", "root": root, "parent": parent,
            "max_model_len": max_model_len,
            "permission": [{
                "id": format!("modelperm-{:016x}", server.unique()), "object": "model_permission", "created": created,
                "allow_create_engine": false, "allow_sampling": true, "allow_logprobs": true,
                "allow_search_indices": false,
                "allow_view": true, "allow_fine_tuning": false, "organization": "*", "group": null,
                "is_blocking": false,
            }],
        })
    };
    let base = server.base_model();
    let length = Some(server.engine.max_request_tokens());
    let mut data: Vec<Value> = server.config.models.iter().map(|model| entry(model, base, None, length)).collect();
    data.extend(server.loras.read().iter().map(|lora| entry(&lora.name, &lora.path, Some(base), None)));
    json_response(StatusCode::OK, &json!({"object": "list", "data": data}))
}

/// The tokens of a request that was not asked to be answered: those of a conversation, or of each prompt.
fn tokens_of(server: &Server, request: &mut OpenAiRequest) -> Result<Vec<Vec<u32>>, ApiError> {
    server.model(request.model.as_deref())?;
    if request.is_chat() { Ok(vec![request.take_chat()?]) } else { request.take_prompts() }
}

/// vLLM's render API (`--enable-scale-out`): an object for a conversation, a list with an object for each prompt.
pub(super) fn render(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let mut request: OpenAiRequest = call.json()?;
    let is_chat = request.is_chat();
    let tokens = tokens_of(server, &mut request)?;
    let mut rendered = tokens.into_iter().map(|tokens| json!({"token_ids": tokens}));
    let body = if is_chat { rendered.next().unwrap_or_default() } else { rendered.collect() };
    Ok(json_response(StatusCode::OK, &body))
}

pub(super) fn tokenize(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let mut request: OpenAiRequest = call.json()?;
    let tokens = tokens_of(server, &mut request)?.into_iter().next().unwrap_or_default();
    let texts: Option<Vec<String>> = request
        .return_token_strs
        .unwrap_or(false)
        .then(|| tokens.iter().map(|token| tokenizer::decode(&[*token])).collect());
    let body = json!({
        "count": tokens.len(), "max_model_len": server.engine.max_request_tokens(), "tokens": tokens,
        "token_strs": texts,
    });
    Ok(json_response(StatusCode::OK, &body))
}

pub(super) fn detokenize(call: &Call) -> Result<Response<SimBody>, ApiError> {
    let request: DetokenizeRequest = call.json()?;
    Ok(json_response(StatusCode::OK, &json!({"prompt": tokenizer::decode(&request.tokens)})))
}

pub(super) fn load_lora(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let request: LoraRequest = call.json()?;
    let (Some(name), Some(path)) = (named(request.lora_name), named(request.lora_path)) else {
        return Err(user_input("Both 'lora_name' and 'lora_path' must be provided."));
    };
    let mut loras = server.loras.write();
    let known = loras.iter().position(|lora| *lora.name == *name);
    if known.is_some() && !request.load_inplace {
        return Err(user_input(format!(
            "The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set \
             'load_inplace' to True."
        )));
    }
    let adapter = LoraAdapter::new(&name, &path);
    server.hosts().for_each(|host| host.adapter(&adapter.name, &path));
    match known.and_then(|index| loras.get_mut(index)) {
        Some(slot) => *slot = adapter,
        None => loras.push(adapter),
    }
    Ok(full_response(StatusCode::OK, None, format!("Success: LoRA adapter '{name}' added successfully.")))
}

pub(super) fn unload_lora(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let request: LoraRequest = call.json()?;
    let Some(name) = named(request.lora_name) else { return Err(user_input("'lora_name' needs to be provided.")) };
    let mut loras = server.loras.write();
    let before = loras.len();
    loras.retain(|lora| *lora.name != *name);
    if loras.len() == before {
        return Err(ApiError::new(StatusCode::NOT_FOUND, format!("The lora adapter '{name}' cannot be found.")));
    }
    Ok(full_response(StatusCode::OK, None, format!("Success: LoRA adapter '{name}' removed successfully.")))
}

fn named(value: Option<String>) -> Option<String> {
    value.filter(|value| !value.is_empty())
}

fn user_input(message: impl Into<String>) -> ApiError {
    ApiError::bad_request(message).kind("InvalidUserInput")
}

/// GET returns the faults, POST replaces all of them.
pub(super) fn faults(server: &Server, method: &Method, call: &Call) -> Result<Response<SimBody>, ApiError> {
    if *method == Method::POST {
        let faults =
            Faults::parse(&call.body).map_err(|message| ApiError::bad_request(format!("faults: {message}")))?;
        server.faults.replace(faults);
    }
    let body = serde_json::to_value(server.faults.current()).unwrap_or_default();
    Ok(json_response(StatusCode::OK, &body))
}
