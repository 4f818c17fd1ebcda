//! `/v1/embeddings`, `/rerank` and `/score`: prompts that are read and not answered.

use super::body::{SimBody, json_response};
use super::error::ApiError;
use super::legs::Legs;
use super::requests::{EmbeddingsRequest, OneOrMany, RerankRequest, ScoreRequest, encode};
use super::{Call, Generation, ServedModel, Server};
use crate::answer::AnswerLimits;
use crate::kv::content_hash;
use http::{Response, StatusCode};
use serde_json::{Value, json};
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// 64 numbers: a real model has 384 to 4,096.
const EMBEDDING_DIMENSIONS: u64 = 64;

pub(super) async fn embeddings(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let request: EmbeddingsRequest = call.json()?;
    let model = server.model(request.model.as_deref())?;
    let prompts = request.input.ok_or_else(|| required("input"))?.into_tokens();
    let data: Vec<Value> = prompts
        .iter()
        .enumerate()
        .map(|(index, prompt)| json!({"object": "embedding", "index": index, "embedding": embedding(prompt)}))
        .collect();
    let tokens = read(server, call, prompts, model.clone()).await?;
    let body = json!({
        "id": server.id("embd", call), "object": "list", "created": server.unix_seconds(), "model": model.name,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0,
        "prompt_tokens_details": null},
    });
    Ok(json_response(StatusCode::OK, &body))
}

pub(super) async fn rerank(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let request: RerankRequest = call.json()?;
    let model = server.model(request.model.as_deref())?;
    let query = request.query.ok_or_else(|| required("query"))?;
    let documents = request.documents.ok_or_else(|| required("documents"))?;
    let prompts: Vec<Vec<u32>> = documents.iter().map(|document| pair(&query, document)).collect();
    let mut ranked: Vec<(usize, f64)> = prompts.iter().map(|prompt| relevance(prompt)).enumerate().collect();
    ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
    ranked.truncate(request.top_n.filter(|n| *n > 0).unwrap_or(usize::MAX));
    let tokens = read(server, call, prompts, model.clone()).await?;
    let results: Vec<Value> = ranked
        .into_iter()
        .map(|(index, score)| {
            let document = json!({"text": documents.get(index)});
            json!({"index": index, "document": document, "relevance_score": score})
        })
        .collect();
    let body = json!({"id": server.id("rerank", call), "model": model.name, "usage": {"total_tokens": tokens},
    "results": results});
    Ok(json_response(StatusCode::OK, &body))
}

pub(super) async fn score(server: &Server, call: &Call) -> Result<Response<SimBody>, ApiError> {
    let request: ScoreRequest = call.json()?;
    let model = server.model(request.model.as_deref())?;
    let left = request.text_1.map(OneOrMany::into_vec).ok_or_else(|| required("text_1"))?;
    let right = request.text_2.map(OneOrMany::into_vec).ok_or_else(|| required("text_2"))?;
    let prompts: Vec<Vec<u32>> = match left.as_slice() {
        [one] => right.iter().map(|text| pair(one, text)).collect(),
        many if many.len() == right.len() => many.iter().zip(&right).map(|(a, b)| pair(a, b)).collect(),
        many => {
            let (left, right) = (many.len(), right.len());
            return Err(ApiError::bad_request(format!(
                "text_1 has {left} texts and text_2 {right}, they must pair up"
            )));
        }
    };
    let data: Vec<Value> = prompts
        .iter()
        .enumerate()
        .map(|(index, prompt)| json!({"index": index, "object": "score", "score": relevance(prompt)}))
        .collect();
    let tokens = read(server, call, prompts, model.clone()).await?;
    let body = json!({
        "id": server.id("score", call), "object": "list", "created": server.unix_seconds(), "model": model.name,
        "data": data,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0,
        "prompt_tokens_details": null},
    });
    Ok(json_response(StatusCode::OK, &body))
}

/// Has the engine read the prompts; how many tokens they have together.
async fn read(server: &Server, call: &Call, prompts: Vec<Vec<u32>>, model: ServedModel) -> Result<u64, ApiError> {
    let limits = AnswerLimits { max_tokens: Some(0), ..AnswerLimits::default() };
    let generation = Generation {
        prompts,
        choices: 1,
        model,
        limits,
        cache_salt: None,
        legs: Legs::default(),
        request_id: String::new(),
        traceparent: call.traceparent(),
        host: call.host.clone(),
    };
    Ok(server.start(generation).await?.finish().await?.totals.usage.prompt)
}

fn required(field: &'static str) -> ApiError {
    ApiError::bad_request(format!("Invalid request: {field} is required")).param(field)
}

fn pair(query: &str, document: &str) -> Vec<u32> {
    let mut tokens = encode(query);
    tokens.extend(encode(document));
    tokens
}

/// Follows from the tokens, 0..1.
fn relevance(prompt: &[u32]) -> f64 {
    unit(content_hash(prompt))
}

fn embedding(prompt: &[u32]) -> Vec<f64> {
    let seed = content_hash(prompt);
    (0..EMBEDDING_DIMENSIONS).map(|i| unit(xxh3_64_with_seed(&i.to_le_bytes(), seed)) * 2.0 - 1.0).collect()
}

/// A hash as a number from 0 to 1.
fn unit(hash: u64) -> f64 {
    f64::from(u32::try_from(hash >> 32).unwrap_or_default()) / f64::from(u32::MAX)
}
