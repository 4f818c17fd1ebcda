//! What the picker makes of one request, in full: its tokens and blocks, who holds how many of them, and who would get
//! it. Decides nothing and books nothing.

use super::active::{ActiveConfig, PoolRuntime};
use super::decide::{self, RequestView, Seen};
use super::head::Head;
use super::picker::Picker;
use super::prefix::{PromptRef, PoolPrefix, Read, Reading, Shown};
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

/// What the picker makes of a request.
#[derive(Debug, Serialize)]
pub struct Explanation {
    /// The pool that it goes to.
    pub pool: String,
    /// The API, as a label.
    pub api: &'static str,
    /// The server's name for the model.
    pub model: String,
    /// What makes its blocks.
    pub tokenizer: &'static str,
    /// What a block holds: `16 tokens`, `64 bytes`.
    pub block: String,
    /// Length of the prompt, tokens: counted where the tokenizer knows tokens, else estimated.
    pub prompt_tokens: u64,
    /// Whether `prompt_tokens` is counted.
    pub counted: bool,
    /// Bytes of text that are left out of the keys because they change with every request.
    pub left_out_bytes: u64,
    /// The full blocks, in order.
    pub blocks: Vec<Block>,
    /// Who holds how many of them.
    pub endpoints: Vec<Holding>,
    /// Where the request would go now, the best first.
    pub picks: Vec<String>,
    /// Who would compute the prompt for the first of them; empty when that one would do so itself.
    pub prefill: Vec<String>,
    /// Who would encode its images and sounds; empty when whoever computes the prompt would do so itself.
    pub encode: Vec<String>,
    /// Why.
    pub reason: String,
    /// What chose.
    pub strategy: String,
    /// What each part of it made of each endpoint.
    pub parts: serde_json::Value,
}

/// One full block of the prompt.
#[derive(Debug, Serialize)]
pub struct Block {
    /// Its key, hexadecimal.
    pub key: String,
    /// Its tokens, where the tokenizer knows them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<u32>>,
    /// Its text, where blocks hold text; the marks between fields shown as `⟨role⟩`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// What one endpoint holds of a prompt.
#[derive(Debug, Serialize)]
pub struct Holding {
    /// `ip:port`.
    pub address: String,
    /// `engine` when its own KV events tell all, `learned` when what was routed there does, alone or beside them.
    pub source: &'static str,
    /// Blocks from the start in GPU memory.
    pub gpu_blocks: u32,
    /// Blocks from the start in any tier.
    pub blocks: u32,
    /// The same in tokens.
    pub tokens: u32,
    /// Blocks that other requests with the same beginning are bringing there at this moment.
    pub on_its_way_blocks: u32,
    /// Requests on it.
    pub requests: u32,
}

/// A request to explain.
#[derive(Clone, Copy, Debug)]
pub struct ExplainQuery<'a> {
    /// The pool that it goes to; `None` where the request says that itself.
    pub pool: Option<&'a str>,
    /// Its path.
    pub path: &'a str,
    /// Its content type.
    pub content_type: Option<&'a str>,
    /// Its body.
    pub body: &'a [u8],
    /// The moment.
    pub now: Timestamp,
}

/// Explains a request. `run` does the work that takes long: tokenizing, in the background or by another server.
///
/// # Errors
/// The refusal that the request would get, `no_pool` with the names of all pools where there is none to send it to, and
/// `invalid_json` where there is no prompt to explain.
pub async fn explain<F: Future<Output = ()>>(
    picker: &Picker,
    config: &ActiveConfig,
    query: ExplainQuery<'_>,
    run: impl FnOnce(Warming) -> F,
) -> Result<Explanation, RequestError> {
    let (api, _) = Api::from_path(query.path);
    let head = Head::default();
    let first = question(&head, api, &query);
    let request = protocol::parse_unnamed(api, query.content_type, query.body, &config.limits)?;
    let request = named(config, &first, request)?;
    let runtime = route(config, query.pool, &request)?;
    let asked = request.model.as_ref().map(|m| &*m.name);
    let rewritten = asked.and_then(|m| runtime.pool.rewrite(m, &mut picker.next_rng()));
    let target = rewritten.unwrap_or_else(|| asked.unwrap_or_default().into());
    let nothing = || RequestError::new(Reason::InvalidJson, "there is no prompt in it that a KV cache would hold");
    let prefix = runtime.prefix.as_ref().filter(|_| api.prefills()).ok_or_else(nothing)?;
    let snapshot = runtime.pool.store.load_full();
    let ExplainQuery { body, content_type, .. } = query;
    let asked = PromptRef { api, body, content_type, target: &target, keeps_ids: true };
    let unreadable = || RequestError::new(Reason::InvalidJson, "its prompt can't be rendered or tokenized here");
    let warming = match prefix.read(&first, asked, &request) {
        Read::Warm(warming) => warming,
        Read::Ready(reading) => prefix.warming(asked, &reading, &config.limits),
        Read::Unreadable(..) => return Err(unreadable()),
    };
    let made = warming.made();
    run(warming).await;
    let again = RequestView { last: true, made: made.as_deref(), ..first };
    let Read::Ready(reading) = prefix.read(&again, asked, &request) else { return Err(unreadable()) };
    let explained =
        Explained { picker, runtime, prefix, snapshot: &snapshot, query, api, request: &request, target: &target };
    explained.finish(&reading)
}

/// The request as a decision would see it, without headers.
fn question<'a>(head: &'a Head, api: Api, query: &ExplainQuery<'a>) -> RequestView<'a> {
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

/// A request whose prompt can be read.
struct Explained<'a> {
    picker: &'a Picker,
    runtime: &'a PoolRuntime,
    prefix: &'a PoolPrefix,
    snapshot: &'a PoolSnapshot,
    query: ExplainQuery<'a>,
    api: Api,
    request: &'a Request<'a>,
    target: &'a str,
}

impl Explained<'_> {
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

    /// The strategy, and where the request would go now.
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

    /// What each endpoint holds of the prompt.
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

/// Which Service or host a request comes by is not in its body: where pools are told apart by that, somebody has to
/// name one.
fn with_pools(router: &Router, refusal: RequestError) -> RequestError {
    if refusal.reason != Reason::NoPool {
        return refusal;
    }
    let message =
        format!("which pool it is for is not in its body; name the pool (`pool`), there are: {}", router.names());
    RequestError::new(Reason::NoPool, message)
}

fn blocks(keys: &[BlockKey], shown: &Shown, unit: BlockUnit) -> Vec<Block> {
    let key = |key: &BlockKey| format!("{:016x}", key.0);
    match shown {
        Shown::Tokens(ids) => {
            let size = match unit {
                BlockUnit::Tokens(tokens) => tokens,
                // Prompts of token ids have blocks of as many tokens as the bytes stand for.
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
