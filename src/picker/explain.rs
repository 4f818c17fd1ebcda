//! Explains one request: its tokens and blocks, how many of them each endpoint has cached, and the endpoint that it
//! would get. Changes no state. Called by `app` for `/explain`, and by `cli` for `attache explain`.

use super::active::{ActiveConfig, PoolRuntime};
use super::decide::{self, RequestView, Seen};
use super::head::Head;
use super::picker::Picker;
use super::prefix::{PoolPrefix, PromptRef, Read, Reading, Shown};
use super::reading::named;
use super::warming::Warming;
use crate::explained::parts;
use attache_pool::{Endpoint, EndpointState, PoolSnapshot, ledger};
use attache_prefix::cache::{BlockUnit, CHARACTERS_PER_TOKEN, Found};
use attache_prefix::key::{BlockKey, BlockKeys};
use attache_protocol::{self as protocol, Api, Request};
use attache_scheduling::router::RouteFacts;
use attache_scheduling::{Decision, PickContext, RequestFacts, Router};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use serde::Serialize;
use std::future::Future;
use std::sync::Arc;

/// The explanation of a request.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// The pool of the request.
    pub pool: String,
    /// The API, as in metric labels.
    pub api: &'static str,
    /// Model name sent to the model server.
    pub model: String,
    /// Name of the tokenizer, as in configurations.
    pub tokenizer: &'static str,
    /// Size of a block, as `16 tokens` or `64 bytes`.
    pub block: String,
    /// Length of the prompt, tokens: exact if the tokenizer produces tokens, otherwise estimated.
    pub prompt_tokens: u64,
    /// Whether `prompt_tokens` is exact.
    pub counted: bool,
    /// Bytes of text that are excluded from the keys because they differ in every request.
    pub left_out_bytes: u64,
    /// The full blocks, in order.
    pub blocks: Vec<Block>,
    /// The cached part of the prompt on each endpoint.
    pub endpoints: Vec<Holding>,
    /// The endpoints that the request would get now, the best first.
    pub picks: Vec<String>,
    /// Prefill workers for the first pick; empty if the request would not be split.
    pub prefill: Vec<String>,
    /// Encode workers for images and audio; empty if the prefill endpoint would encode them itself.
    pub encode: Vec<String>,
    /// Why the endpoints would be chosen.
    pub reason: String,
    /// Name of the strategy.
    pub strategy: String,
    /// Score of each part of the strategy for each endpoint.
    pub parts: serde_json::Value,
}

/// One full block of the prompt.
#[derive(Debug, Serialize)]
pub struct Block {
    /// The block's key, hexadecimal.
    pub key: String,
    /// The block's tokens, if the tokenizer produces tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<u32>>,
    /// The block's text, if blocks contain text. Marks between fields are shown as `⟨role⟩`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// The cached part of a prompt on one endpoint.
#[derive(Debug, Serialize)]
pub struct Holding {
    /// The endpoint's address, `ip:port`.
    pub address: String,
    /// `engine` if the blocks follow from the engine's KV events alone, `learned` if routed requests count as well.
    pub source: &'static str,
    /// Blocks from the start of the prompt in GPU memory.
    pub gpu_blocks: u32,
    /// Blocks from the start of the prompt in any cache tier.
    pub blocks: u32,
    /// Length of `blocks`, tokens.
    pub tokens: u32,
    /// Blocks from the start that requests in flight with the same prefix are prefilling; 0 if not more than `blocks`.
    pub on_its_way_blocks: u32,
    /// Requests in flight on the endpoint.
    pub requests: u32,
}

/// A request to explain.
#[derive(Clone, Copy, Debug)]
pub struct ExplainQuery<'a> {
    /// Name of the pool; `None`: the pool follows from the request.
    pub pool: Option<&'a str>,
    /// The request path.
    pub path: &'a str,
    /// The `content-type` header.
    pub content_type: Option<&'a str>,
    /// The whole body.
    pub body: &'a [u8],
    /// The time of the explanation.
    pub now: Timestamp,
}

/// Explains a request. `run` runs background work: tokenizing, here or on another server.
///
/// # Errors
/// The error response that the request would get, and:
///
/// * `no_pool` with the names of all pools if no pool matches.
/// * `invalid_json` if the request has no prompt to explain.
pub async fn explain<F: Future<Output = ()>>(
    picker: &Picker,
    config: &ActiveConfig,
    query: ExplainQuery<'_>,
    run: impl FnOnce(Warming) -> F,
) -> Result<Explanation, RequestError> {
    let (api, _) = Api::from_path(query.path);
    let head = Head::default();
    let first = request_view(&head, api, &query);
    let request = protocol::parse_unnamed(api, query.content_type, query.body, &config.limits)?;
    let request = named(config, &first, request)?;
    let runtime = route(config, query.pool, &request)?;
    let named = request.model.as_ref().map(|m| &*m.name);
    let rewritten = named.and_then(|m| runtime.pool.rewrite(m, &mut picker.next_rng()));
    let target = rewritten.unwrap_or_else(|| named.unwrap_or_default().into());
    let no_prompt = || RequestError::new(Reason::InvalidJson, "the request has no prompt that a KV cache can hold");
    let prefix = runtime.prefix.as_ref().filter(|_| api.prefills()).ok_or_else(no_prompt)?;
    let snapshot = runtime.pool.store.load_full();
    let ExplainQuery { body, content_type, .. } = query;
    let prompt_ref = PromptRef { api, body, content_type, target: &target, keeps_ids: true };
    let unreadable = || RequestError::new(Reason::InvalidJson, "the prompt can't be rendered or tokenized");
    let warming = match prefix.read(&first, prompt_ref, &request) {
        Read::Warm(warming) => warming,
        Read::Ready(reading) => prefix.warming(prompt_ref, &reading, &config.limits),
        Read::Unreadable(..) => return Err(unreadable()),
    };
    let made = warming.made();
    run(warming).await;
    let again = RequestView { last: true, made: made.as_deref(), ..first };
    let Read::Ready(reading) = prefix.read(&again, prompt_ref, &request) else { return Err(unreadable()) };
    let explainer = RequestExplainer {
        picker,
        runtime,
        prefix,
        snapshot: &snapshot,
        query,
        api,
        request: &request,
        target: &target,
    };
    explainer.finish(&reading)
}

/// The input of a decision without headers.
fn request_view<'a>(head: &'a Head, api: Api, query: &ExplainQuery<'a>) -> RequestView<'a> {
    RequestView {
        head,
        called: "",
        api,
        response_id: None,
        subset: None,
        body: Seen::Whole(query.body),
        now: query.now,
        opened: query.now,
        last: false,
        made: None,
        may_split: true,
        may_wait: false,
        opens: false,
        has_turn: false,
    }
}

/// The pool with the name `pool`, or the one that the router selects by the body.
fn route<'c>(
    config: &'c ActiveConfig,
    pool: Option<&str>,
    request: &Request<'_>,
) -> Result<&'c PoolRuntime, RequestError> {
    let model = request.model.as_ref().map(|m| &*m.name);
    let runtime = match pool {
        Some(name) => config.named(name, model)?,
        None => {
            let facts = RouteFacts { model, authority: "", called: "" };
            config.route(facts, |_| None).map_err(|refusal| with_pools(&config.router, refusal))?
        }
    };
    Ok(runtime)
}

/// A parsed request with its pool, ready to be explained.
struct RequestExplainer<'a> {
    picker: &'a Picker,
    runtime: &'a PoolRuntime,
    prefix: &'a PoolPrefix,
    snapshot: &'a PoolSnapshot,
    query: ExplainQuery<'a>,
    api: Api,
    request: &'a Request<'a>,
    target: &'a str,
}

impl RequestExplainer<'_> {
    /// Looks up the prompt, previews the decision, and composes the explanation.
    fn finish(&self, reading: &Reading<'_>) -> Result<Explanation, RequestError> {
        let Self { prefix, runtime, .. } = self;
        let mut keys = prefix.keys(reading);
        let found = prefix.cache.lookup(&mut keys, self.query.now).of_own_keys(reading.has_own_keys());
        let estimated = found.prompt_tokens(&self.request.prompt);
        let (strategy, decision) = self.decide(&found, estimated)?;
        let shown = prefix.show(reading);
        let keys = keys.upto(usize::MAX).to_vec();
        let split = decision.as_ref().and_then(|d| d.split.as_deref());
        let addresses = |endpoints: &[Arc<Endpoint>]| endpoints.iter().map(|e| e.authority.to_string()).collect();
        Ok(Explanation {
            pool: runtime.pool.name.to_string(),
            api: self.api.name(),
            model: self.target.to_owned(),
            tokenizer: prefix.tokenizer.name(),
            block: match prefix.cache.unit() {
                BlockUnit::Tokens(n) => format!("{n} tokens"),
                BlockUnit::Bytes(n) => format!("{n} bytes"),
            },
            counted: matches!(shown, Shown::Tokens(_)),
            prompt_tokens: match &shown {
                Shown::Tokens(ids) => ids.len() as u64,
                Shown::Bytes(_) => estimated.into(),
            },
            left_out_bytes: prefix.left_out_bytes(reading),
            blocks: blocks(&keys, &shown, prefix.cache.unit()),
            endpoints: self.holdings(&found),
            picks: decision.as_ref().map(|d| addresses(&d.picks)).unwrap_or_default(),
            prefill: split.map(|s| addresses(&s.prefill)).unwrap_or_default(),
            encode: decision.as_ref().map(|d| addresses(&d.encode)).unwrap_or_default(),
            strategy,
            parts: decision.as_ref().map_or_else(|| serde_json::json!([]), parts),
            reason: split
                .map_or_else(|| decision.as_ref().map_or("no endpoint is ready", |d| d.reason), |s| s.reason)
                .to_owned(),
        })
    }

    /// The name of the strategy, and its decision; no decision if no endpoint is ready.
    fn decide(&self, found: &Found, prompt_tokens: u32) -> Result<(String, Option<Decision>), RequestError> {
        let pool = &self.runtime.pool;
        let facts = RequestFacts {
            model: self.target,
            prompt_tokens,
            max_tokens: self.request.max_tokens,
            prompt: Some(&self.request.prompt),
            payload: Some(self.query.body),
            ..RequestFacts::default()
        };
        let cx = PickContext {
            request: facts,
            prefix: Some(found),
            policy: self.picker.policies.of(self.target),
            splittable: decide::splittable(pool, self.query.path, Some(self.request)),
            generates: self.api.generates(),
            encodable: decide::encodable(pool, self.query.path),
            ..PickContext::new(self.snapshot, self.query.now, pool.stale_after)
        };
        let chosen = pool.scheduler.choices.choose(&facts)?;
        let decision = pool.scheduler.preview(&*chosen.choice.strategy, &cx, &mut self.picker.next_rng());
        Ok((chosen.choice.name.to_string(), decision))
    }

    /// The cached part of the prompt on each endpoint.
    fn holdings(&self, found: &Found) -> Vec<Holding> {
        let holding = |state: &EndpointState| {
            let id = state.endpoint.id;
            let (held, with_claims) = (found.held(id), found.depth(id));
            Holding {
                address: state.endpoint.authority.to_string(),
                source: if found.is_exact(id) { "engine" } else { "learned" },
                gpu_blocks: held.gpu,
                blocks: held.any,
                tokens: found.tokens(held.any),
                on_its_way_blocks: if with_claims.any > held.any { with_claims.any } else { 0 },
                requests: ledger::requests(&state.endpoint, state.metrics()),
            }
        };
        self.snapshot.endpoints.iter().map(holding).collect()
    }
}

/// Adds the names of all pools to a `no_pool` error. If pools differ only by Service or host, the body does not select
/// one, so the caller must name it.
fn with_pools(router: &Router, refusal: RequestError) -> RequestError {
    if refusal.reason != Reason::NoPool {
        return refusal;
    }
    let message = format!("the body does not select a pool; name the pool (`pool`), one of: {}", router.names());
    RequestError::new(Reason::NoPool, message)
}

fn blocks(keys: &[BlockKey], shown: &Shown, unit: BlockUnit) -> Vec<Block> {
    let key = |key: &BlockKey| format!("{:016x}", key.0);
    match shown {
        Shown::Tokens(ids) => {
            let size = match unit {
                BlockUnit::Tokens(tokens) => tokens,
                // Prompts of token ids have blocks too: each has the estimated token count of a block of text.
                BlockUnit::Bytes(bytes) => bytes / CHARACTERS_PER_TOKEN,
            };
            let chunks = ids.chunks(size.max(1) as usize);
            let block = |(k, ids): (&BlockKey, &[u32])| Block { key: key(k), tokens: Some(ids.to_vec()), text: None };
            keys.iter().zip(chunks).map(block).collect()
        }
        Shown::Bytes(texts) => {
            let block = |(k, text): (&BlockKey, &String)| Block { key: key(k), tokens: None, text: Some(text.clone()) };
            keys.iter().zip(texts).map(block).collect()
        }
    }
}
