//! Explains one request: its tokens and blocks, how many of them each endpoint has cached, and the endpoint that it
//! would get. It is the live decision as a dry run, and changes no state. Called by `app` for `/explain`, and by `cli`
//! for `attache explain`.

use super::active::ActiveConfig;
use super::decide::{PrefillTime, RequestState, RequestView, Scope, Seen, Unproposed};
use super::head::{Head, Header};
use super::picker::Picker;
use super::prefix::{PoolPrefix, PromptRef, Read, Reading, Shown};
use super::tenant::Tenant;
use super::warming::Warming;
use crate::event::Unobserved;
use attache_pool::{Endpoint, EndpointState, PoolSnapshot, ledger};
use attache_prefix::cache::{BlockUnit, CHARACTERS_PER_TOKEN, Found};
use attache_prefix::key::{BlockKey, BlockKeys};
use attache_protocol::{Api, Request};
use attache_request::agent::AgentIdentity;
use attache_scheduling::{Decision, PickContext, Router};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::rng::PickRng;
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
    /// Name of the tokenizer, as in configurations; `none` in a pool without prefix lookup.
    pub tokenizer: &'static str,
    /// Size of a block, as `16 tokens` or `64 bytes`; `none` in a pool without prefix lookup.
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
    /// The best endpoint that is not among `picks`, if the strategy gives scores.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runner_up: Option<String>,
    /// The pair that is compared with the whole request, with the costs that decide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pair: Option<serde_json::Value>,
    /// Why the endpoints would be chosen, or why the request would be rejected.
    pub reason: String,
    /// Name of the strategy.
    pub strategy: String,
    /// The profile that selected the strategy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    /// Priority of the request.
    pub priority: i32,
    /// The agent that sent the request, if the request names it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentIdentity>,
    /// Score of each part of the strategy for each endpoint.
    pub parts: serde_json::Value,
    /// What the decision does without.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warning: Option<&'static str>,
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
    /// Why the endpoint is no candidate; missing if it is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub excluded: Option<&'static str>,
}

/// A request to explain, or to reserve for.
#[derive(Clone, Copy, Debug)]
pub struct ExplainQuery<'a> {
    /// Name of the pool; `None`: the pool follows from the request.
    pub pool: Option<&'a str>,
    /// The request path.
    pub path: &'a str,
    /// The other headers; `host` is the authority.
    pub headers: &'a [(String, String)],
    /// The whole body.
    pub body: &'a [u8],
    /// The time of the explanation.
    pub now: Timestamp,
}

impl ExplainQuery<'_> {
    /// The request's headers, with its tenant. Dynamic metadata is not known here: a tenant that is named there is
    /// missing.
    pub(super) fn head(&self, config: &ActiveConfig) -> Head {
        let path = (":path".to_owned(), self.path.to_owned());
        let all = std::iter::once(&path).chain(self.headers);
        let header = |(name, value): &(String, String)| {
            let name = name.to_ascii_lowercase();
            let name = if name == "host" { ":authority".to_owned() } else { name };
            Header { name, value: value.clone().into_bytes() }
        };
        let mut head = Head::read(all.map(header).collect());
        let tenant = Tenant::of(config.settings.tenant.as_ref(), &head, |_, _| None);
        head.belongs_to(tenant);
        head
    }
}

/// Explains a request: the decision that the next live request like it would get. `run` runs background work:
/// tokenizing, here or on another server. Quotas, queues and deadlines are not asked.
///
/// # Errors
/// The error response that the request would get before endpoints are considered; `no_pool` with the names of all pools
/// if no pool matches.
pub async fn explain<F: Future<Output = ()>>(
    picker: &Picker,
    config: &ActiveConfig,
    query: ExplainQuery<'_>,
    run: impl FnOnce(Warming) -> F,
) -> Result<Explanation, RequestError> {
    let head = query.head(config);
    let (api, response_id) = Api::from_path(head.path());
    let first = request_view(&head, api, response_id.as_deref(), &query);
    let warming = match attempt(picker, config, &first)? {
        Ok(explanation) => return Ok(explanation),
        Err(warming) => warming,
    };
    let made = warming.made();
    run(warming).await;
    let again = RequestView { last: true, made: made.as_deref(), ..first };
    let late = |_| RequestError::new(Reason::Internal, "the prompt's tokens are not available");
    attempt(picker, config, &again)?.map_err(late)
}

/// The request with headers and body, and a gateway that leaves time for everything.
pub(super) fn request_view<'a>(
    head: &'a Head,
    api: Api,
    response_id: Option<&'a str>,
    query: &ExplainQuery<'a>,
) -> RequestView<'a> {
    RequestView {
        head,
        pool: query.pool,
        called: "",
        api,
        response_id,
        subset: None,
        body: if query.body.is_empty() { Seen::Nothing } else { Seen::Whole(query.body) },
        now: query.now,
        opened: query.now,
        last: false,
        made: None,
        prefill_time: PrefillTime::Unbounded,
        trace: None,
        may_wait: false,
        opens: false,
        has_turn: false,
    }
}

/// Explains the request, or returns the background work that must run first.
///
/// # Errors
/// The error response that the request would get before endpoints are considered.
fn attempt(
    picker: &Picker,
    config: &ActiveConfig,
    q: &RequestView<'_>,
) -> Result<Result<Explanation, Warming>, RequestError> {
    let scope = Scope { picker, config, observer: &Unobserved, dry_run: true };
    let rng = &mut picker.peek_rng();
    let parsed = scope.parse(q)?;
    let routed = scope.route(q, parsed.as_ref(), rng).map_err(|refusal| match q.pool {
        None => with_pools(&config.router, refusal),
        Some(_) => refusal,
    })?;
    let mut state = RequestState::new(scope, q, None, &routed)?;
    state.reserved = picker.reservations.peek(q.head, q.now, |reserved| state.honour(reserved).ok());
    Ok(Explainer { state: &state }.explain(rng))
}

/// A request whose pool and strategy are known.
struct Explainer<'a> {
    state: &'a RequestState<'a>,
}

/// A prompt whose blocks are shown.
struct ShownPrompt<'a> {
    prefix: &'a Arc<PoolPrefix>,
    request: &'a Request<'a>,
    reading: Reading<'a>,
}

impl<'a> Explainer<'a> {
    fn explain(&self, rng: &mut PickRng) -> Result<Explanation, Warming> {
        let (state, q) = (self.state, self.state.q);
        let (shown, warning) = self.show()?;
        let prepared = state.read_tokens()?;
        let snapshot = state.pool().store.load();
        let proposal = match state.dry_run(prepared.as_ref(), &snapshot, rng) {
            Ok(proposal) => Ok(proposal),
            Err(Unproposed::Refused(error)) => Err(error),
            Err(Unproposed::Warm(warming)) => return Err(warming),
        };
        let decision = proposal.as_ref().ok().map(|proposal| &proposal.decision);
        let reason = match &proposal {
            Ok(proposal) => {
                let decision = &proposal.decision;
                decision.split.as_ref().map_or(decision.reason, |split| split.reason).to_owned()
            }
            Err(error) => format!("{}: {}", error.reason.code(), error.message),
        };
        let estimated = proposal.as_ref().map_or(state.size.load, |proposal| proposal.prompt_tokens);
        let prompt = shown.map(|shown| shown.explain(q.now));
        let prompt = prompt.unwrap_or_else(|| PromptExplanation { tokens: estimated.into(), ..Default::default() });
        let prefix = state.routed.runtime.prefix.as_ref();
        let split = decision.and_then(|d| d.split.as_deref());
        let addresses = |endpoints: &[Arc<Endpoint>]| endpoints.iter().map(|e| e.authority.to_string()).collect();
        Ok(Explanation {
            pool: state.pool().name.to_string(),
            api: q.api.name(),
            model: state.facts.model.to_owned(),
            tokenizer: prefix.map_or("none", |prefix| prefix.tokenizer.name()),
            block: match prefix.map(|prefix| prefix.cache.unit()) {
                Some(BlockUnit::Tokens(n)) => format!("{n} tokens"),
                Some(BlockUnit::Bytes(n)) => format!("{n} bytes"),
                None => "none".to_owned(),
            },
            prompt_tokens: prompt.tokens,
            counted: prompt.counted,
            left_out_bytes: prompt.left_out_bytes,
            blocks: prompt.blocks,
            endpoints: self.endpoints(&snapshot, prompt.found.as_ref()),
            picks: decision.map(|d| addresses(&d.picks)).unwrap_or_default(),
            prefill: split.map(|s| addresses(&s.prefill)).unwrap_or_default(),
            encode: decision.map(|d| addresses(&d.encode)).unwrap_or_default(),
            runner_up: decision.and_then(|d| d.runner_up.as_ref()).map(|e| e.authority.to_string()),
            pair: decision.and_then(|d| d.compared.as_ref()).map(|pair| pair.to_json()),
            reason,
            strategy: state.chosen.choice.name.to_string(),
            profile: state.chosen.profile.as_ref().map(ToString::to_string),
            priority: state.facts.priority,
            agent: state.agent().cloned(),
            parts: decision.map_or_else(|| serde_json::json!([]), Decision::parts_json),
            warning,
        })
    }

    /// All endpoints of the pool, with the cached part of the prompt.
    fn endpoints(&self, snapshot: &PoolSnapshot, found: Option<&Found>) -> Vec<Holding> {
        let (state, q) = (self.state, self.state.q);
        let (chosen, pool) = (&state.chosen, state.pool());
        let cx = PickContext {
            request: state.facts,
            subset: q.subset,
            filter: chosen.filter.as_ref(),
            generates: state.call.generates,
            ..PickContext::new(snapshot, q.now, pool.stale_after)
        };
        let roles = chosen.choice.strategy.roles(&cx);
        let endpoint = |state| {
            let excluded = pool.scheduler.exclusion(&cx, roles, state);
            Holding { excluded, ..holding(state, found) }
        };
        snapshot.endpoints.iter().map(endpoint).collect()
    }

    /// The prompt with all its keys and tokens, if a KV cache can hold it; otherwise why it is not shown.
    ///
    /// # Errors
    /// Background work that must run first.
    fn show(&self) -> Result<(Option<ShownPrompt<'a>>, Option<&'static str>), Warming> {
        let (state, q) = (self.state, self.state.q);
        let prefix = state.routed.runtime.prefix.as_ref().filter(|_| q.api.prefills());
        let (Some(prefix), Some(request)) = (prefix, state.routed.request) else {
            return Ok((None, Some("the request has no prompt that a KV cache would hold")));
        };
        let prompt_ref = PromptRef { keeps_ids: true, ..state.prompt_ref };
        match prefix.read(q, prompt_ref, request) {
            Read::Warm(warming) => Err(warming),
            Read::Ready(reading) if !q.last => Err(prefix.warming(prompt_ref, &reading, &state.scope.config.limits)),
            Read::Ready(reading) => Ok((Some(ShownPrompt { prefix, request, reading }), None)),
            Read::Unreadable(..) => Ok((None, Some("the prompt can't be rendered or tokenized here"))),
        }
    }
}

/// What is shown of a prompt.
#[derive(Default)]
struct PromptExplanation {
    tokens: u64,
    counted: bool,
    left_out_bytes: u64,
    blocks: Vec<Block>,
    found: Option<Found>,
}

impl ShownPrompt<'_> {
    fn explain(self, now: Timestamp) -> PromptExplanation {
        let Self { prefix, request, reading } = &self;
        let mut keys = prefix.keys(reading);
        let found = prefix.cache.lookup(&mut keys, now).of_own_keys(reading.has_own_keys());
        let shown = prefix.show(reading);
        let keys = keys.upto(usize::MAX).to_vec();
        PromptExplanation {
            tokens: match &shown {
                Shown::Tokens(ids) => ids.len() as u64,
                Shown::Bytes(_) => found.prompt_tokens(&request.prompt).into(),
            },
            counted: matches!(shown, Shown::Tokens(_)),
            left_out_bytes: prefix.left_out_bytes(reading),
            blocks: blocks(&keys, &shown, prefix.cache.unit()),
            found: Some(found),
        }
    }
}

/// The cached part of the prompt on one endpoint.
fn holding(state: &EndpointState, found: Option<&Found>) -> Holding {
    let id = state.endpoint.id;
    let held = found.map(|found| found.held(id)).unwrap_or_default();
    let with_claims = found.map(|found| found.depth(id)).unwrap_or_default();
    Holding {
        address: state.endpoint.authority.to_string(),
        source: if found.is_some_and(|found| found.is_exact(id)) { "engine" } else { "learned" },
        gpu_blocks: held.gpu,
        blocks: held.any,
        tokens: found.map_or(0, |found| found.tokens(held.any)),
        on_its_way_blocks: if with_claims.any > held.any { with_claims.any } else { 0 },
        requests: ledger::requests(&state.endpoint, state.metrics()),
        excluded: None,
    }
}

/// Adds the names of all pools to a `no_pool` error. If pools differ only by Service or host, the request does not
/// select one, so the caller must name it.
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
                // A block of token ids has as many tokens as a block of text is estimated to have.
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
