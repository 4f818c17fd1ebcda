//! The picker of one pool without its wire: what `ext_proc` does with a request, for requests that are known by name.
//!
//! The scheduler, the strategies, the prefix cache, the ledger, the learned speed and the health are those of
//! production, called in the order in which the exchange calls them. What is left out is what stands on the wire:
//! parsing, tokenizing (every prompt's tokens are known), rewrites, subset hints. Called by [`super::world`]; pure.

use super::legs::{Patience, PrefillLegs};
use super::queues::PoolQueues;
use attache_flow::Passage;
use attache_pool::health::Outcome;
use attache_pool::writer::SourceId;
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, PoolEvent, PoolSnapshot, PoolWriter};
use attache_prefix::cache::{BlockUnit, CacheConfig, Found, PrefixCache};
use attache_prefix::key::BlockKey;
use attache_prefix::learning;
use attache_protocol::{Piece, Prompt, Usage};
use attache_scheduling::plugin::{Headers, ResponseHeaders};
use attache_scheduling::prefilling::Prefilling;
use attache_scheduling::scheduler::Explain;
use attache_scheduling::{Booking, Chosen, Decision, Order, PickContext, RequestFacts, Scheduler, losses};
use attache_sim::content::{Contents, mix};
use attache_sim::tokenizer::answer_text;
use attache_types::clock::Timestamp;
use attache_types::error::RequestError;
use attache_types::ids::EndpointId;
use attache_types::rng;
use attache_workload::{Request, Speaker, client_headers};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// What the replay of a pool needs of its configuration.
#[derive(Debug)]
pub struct FrontConfig {
    /// How it decides; whether requests are split, too.
    pub scheduler: Scheduler,
    /// How it waits for prefill servers.
    pub patience: Patience,
    /// Metrics older than this say nothing.
    pub stale_after: Duration,
    /// Block size of prefix keys, tokens.
    pub block_size: u32,
    /// Memory limit of the prefix index, bytes.
    pub max_index_bytes: u64,
    /// Part of it that one tenant's guesses keep where all of it is used up, 0.01..=1.
    pub tenant_share: f32,
    /// The header that names the tenant.
    pub tenant_header: Option<String>,
    /// How long a request that has not answered yet counts as a cached prefix.
    pub claim_life: Duration,
    /// The queues before it, where there are any.
    pub queues: Option<PoolQueues>,
    /// Of all that is drawn.
    pub seed: u64,
}

/// The prefix update that a decision causes, and the cache that receives it.
type CacheUpdate = Option<(Arc<PrefixCache>, learning::PrefixUpdate)>;

/// A request that was sent to a server.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) booking: Booking,
    /// Tokens of the prompt that its server was thought to hold.
    pub(super) foretold: u32,
    /// How another server is to compute the prompt first; `None` when its own does.
    pub(super) legs: Option<PrefillLegs>,
    /// That it was let through, where there are queues.
    pub(super) passage: Option<Passage>,
    contents: Contents,
    /// The headers that its answer has for the client.
    echo: ResponseHeaders,
    /// It goes to a server that was ejected, to find out whether it is well again.
    pub(super) probe: bool,
}

/// The only source of endpoints.
const SOURCE: SourceId = SourceId(0);

/// The picker without ext-proc: snapshot, scheduler, caches, queues.
#[derive(Debug)]
pub(super) struct Front {
    pub(super) config: FrontConfig,
    pub(super) queues: Option<PoolQueues>,
    writer: PoolWriter,
    pub(super) snapshot: PoolSnapshot,
    pub(super) cache: Arc<PrefixCache>,
    /// Times that something was drawn.
    pub(super) sequence: u64,
    /// Response headers of each session, for the next request of that session.
    echoes: HashMap<u64, ResponseHeaders>,
    /// The models that were asked for.
    pub(super) models: BTreeSet<Arc<str>>,
}

impl Front {
    pub(super) fn new(mut config: FrontConfig) -> Self {
        let queues = config.queues.take();
        let cache = Arc::new(PrefixCache::new(&CacheConfig {
            unit: BlockUnit::Tokens(config.block_size),
            max_bytes: config.max_index_bytes,
            tenant_share: config.tenant_share,
            claim_life: config.claim_life,
            seed: config.seed,
        }));
        let (writer, snapshot) = (PoolWriter::new(vec![SOURCE]), PoolSnapshot::default());
        let (echoes, models) = (HashMap::new(), BTreeSet::new());
        Self { config, queues, writer, snapshot, cache, sequence: 0, echoes, models }
    }

    /// Discovery says which endpoints there are.
    pub(super) fn discover(&mut self, endpoints: Vec<Arc<EndpointSpec>>) {
        self.writer.apply(PoolEvent::Endpoints { source: SOURCE, endpoints });
        self.publish();
    }

    /// A page was read; `restarted` says that another process wrote it than the one before.
    pub(super) fn scraped(&mut self, id: EndpointId, metrics: EndpointMetrics, restarted: bool) {
        if restarted {
            self.writer.apply(PoolEvent::Restarted { id });
        }
        self.writer.apply(PoolEvent::Scraped { id, metrics: Arc::new(metrics) });
    }

    /// Shows the requests that come now what was said so far.
    pub(super) fn publish(&mut self) {
        if let Some(snapshot) = self.writer.snapshot() {
            losses::drop_lost(&snapshot, &self.cache, Some(&self.config.scheduler.choices));
            self.snapshot = snapshot;
        }
    }

    /// The headers of a request: its own, and those that the last response gave its session.
    pub(super) fn headers_of(&self, request: &Request) -> BTreeMap<String, String> {
        let mut headers = client_headers(request, self.config.tenant_header.as_deref());
        let echo = request.session.and_then(|session| self.echoes.get(&session));
        headers.extend(echo.into_iter().flatten().map(|(name, value)| (name.to_string(), value.clone())));
        headers
    }

    /// Decides and books. `base` is the model that a request without an adapter asks for.
    pub(super) fn send(&mut self, request: &Request, base: &str, now: Timestamp) -> Result<Sent, RequestError> {
        let rng = &mut rng::for_request(self.config.seed, self.sequence);
        self.sequence += 1;
        let headers = self.headers_of(request);
        let model = request.adapter.as_deref().unwrap_or(base);
        if !self.models.contains(model) {
            self.models.insert(model.into());
        }
        let facts = RequestFacts { waited: now.since(request.at), ..facts(request, base, &headers) };
        let prompt_tokens = facts.prompt_tokens;
        let Chosen { choice, filter, .. } = self.config.scheduler.choices.choose(&facts)?;
        let reads = choice.strategy.reads();
        let text = reads.prompt.then(|| text(request));
        let mut contents = Contents::new(self.config.block_size);
        let keys = if reads.prefix { keys(request, &mut contents) } else { Vec::new() };
        let found = reads.prefix.then(|| self.cache.lookup(&mut &keys[..], now));
        let cx = PickContext {
            request: RequestFacts { prompt: text.as_ref(), ..facts },
            filter: filter.as_ref(),
            prefix: found.as_ref(),
            splittable: self.config.scheduler.split().is_some(),
            generates: true,
            ..PickContext::new(&self.snapshot, now, self.config.stale_after)
        };
        let mut decision = self.config.scheduler.decide(&*choice.strategy, &cx, None, Explain::No, rng)?;
        let nobody =
            || RequestError::new(attache_types::error::Reason::NoReadyEndpoint, "the strategy chose no endpoint");
        let picked = decision.picks.first().cloned().ok_or_else(nobody)?;
        let mut echo = ResponseHeaders::new();
        choice.strategy.response_headers(&picked, &mut echo);
        let share = choice.strategy.share(&cx, &picked);
        let (cached, [prefix_update, prefill_update]) = self.prefix_updates(request, &decision, found, keys);
        let foretold =
            |prefix_update: &CacheUpdate| prefix_update.as_ref().map_or(0, |(_, prefix_update)| prefix_update.foretold);
        let (foretold, prefill_foretold) = (foretold(&prefix_update), foretold(&prefill_update));
        let arrives = decision.split.is_some();
        let book = |endpoint: Arc<Endpoint>, cached_tokens, arrives, share, prefix_update| {
            let order = Order {
                model,
                prompt_tokens,
                cached_tokens,
                understood: true,
                streams: true,
                arrives,
                share,
                prefix_update,
            };
            Booking::new(endpoint, &self.snapshot, self.config.stale_after, order, now)
        };
        let booking = book(picked, cached, arrives, share, prefix_update);
        let probe = decision.probe;
        let legs = decision.split.take().and_then(|split| {
            let first = split.prefill.first()?.clone();
            let booking = Some(Box::new(book(first, split.prefill_cached, false, 0.0, prefill_update)));
            let bounds = self.config.patience.bounds;
            let prefilling = Prefilling::begin(split.prefill, booking, split.probe, bounds, now);
            let strategy = choice.strategy.clone();
            Some(PrefillLegs { prefilling, foretold: prefill_foretold, decision, strategy })
        });
        Ok(Sent { booking, foretold, legs, passage: None, contents, echo, probe })
    }

    /// What the decision's servers learn of the prompt's `keys`: the one that answers and the one that computes the
    /// prompt for it. Also the tokens that the former is thought to hold.
    fn prefix_updates(
        &self,
        request: &Request,
        decision: &Decision,
        found: Option<Found>,
        keys: Vec<BlockKey>,
    ) -> (u32, [CacheUpdate; 2]) {
        let (Some(found), Some(picked)) = (found, decision.picks.first()) else { return (0, [None, None]) };
        let prompt_tokens = request.prompt_tokens();
        let held = |id| found.tokens(found.depth(id).any).min(prompt_tokens);
        let prefill = decision.split.as_ref().and_then(|split| split.prefill.first());
        let matched = held(picked.id);
        // The server that computes the prompt uses its cached blocks.
        self.cache.decided(prompt_tokens, prefill.map_or(matched, |p| held(p.id)));
        let of = |id, keys, tells_cached| {
            let whole = !found.is_exact(id);
            let prefix_update = found.prefix_update(id, keys, whole);
            Some((
                self.cache.clone(),
                learning::PrefixUpdate { tenant: tenant(request, &self.config), tells_cached, ..prefix_update },
            ))
        };
        let second = prefill.and_then(|p| of(p.id, keys.clone(), true));
        // What an answer says to be cached was so where its prompt was computed.
        (matched, [of(picked.id, keys, prefill.is_none()), second])
    }

    /// The answer begins with `status` 200 when `good`, else with an error of the server's.
    pub(super) fn first_byte(&self, sent: &mut Sent, good: bool, now: Timestamp) {
        let outcome = if good { Outcome::Success } else { Outcome::Failure };
        self.judge(sent.booking.endpoint(), outcome, now);
        sent.booking.first_byte(good, true, now);
    }

    pub(super) fn judge(&self, endpoint: &Endpoint, outcome: Outcome, now: Timestamp) {
        // No simulated request is the cause of an error response.
        let outcome = if outcome == Outcome::ErrorResponse { Outcome::Failure } else { outcome };
        endpoint.health.record(outcome, now, self.config.scheduler.health());
    }

    pub(super) fn patience(&self) -> Patience {
        self.config.patience
    }

    pub(super) fn stale_after(&self) -> Duration {
        self.config.stale_after
    }

    /// The response has ended completely.
    pub(super) fn ended(&mut self, sent: Sent, request: &Request, usage: &Usage, now: Timestamp) {
        let Sent { booking, passage, mut contents, echo, .. } = sent;
        if let Some(session) = request.session.filter(|_| !echo.is_empty()) {
            self.echoes.insert(session, echo);
        }
        let extend = |keys: &mut Vec<BlockKey>| {
            contents.push(request.answer, |content| keys.push(BlockKey(content)));
            true
        };
        booking.end(true, usage, extend, now);
        self.gave_back(passage, usage, now);
    }

    /// It is not sent at all: who was to answer it may be probed by another.
    pub(super) fn unsent(&mut self, sent: Sent, now: Timestamp) {
        if sent.probe {
            sent.booking.endpoint().health.probe_lost();
        }
        self.gave_back(sent.passage, &Usage::default(), now);
    }

    /// The server could not be reached, or its connection broke before or in the answer.
    pub(super) fn lost(&mut self, sent: Sent, unreachable: bool, now: Timestamp) {
        let outcome = if unreachable { Outcome::ConnectFailure } else { Outcome::Failure };
        let endpoint: &Arc<Endpoint> = sent.booking.endpoint();
        self.judge(endpoint, outcome, now);
        if sent.probe {
            endpoint.health.probe_lost();
        }
        sent.booking.end(false, &Usage::default(), |_| false, now);
        self.gave_back(sent.passage, &Usage::default(), now);
    }
}

/// What is known of a request before its prompt is looked up.
pub(super) fn facts<'r>(
    request: &'r Request,
    base: &'r str,
    headers: &'r BTreeMap<String, String>,
) -> RequestFacts<'r> {
    RequestFacts {
        model: request.adapter.as_deref().unwrap_or(base),
        prompt_tokens: request.prompt_tokens(),
        max_tokens: Some(request.answer.tokens),
        priority: request.priority,
        headers: Headers::of(headers),
        ..RequestFacts::default()
    }
}

fn tenant(request: &Request, config: &FrontConfig) -> Option<String> {
    config.tenant_header.as_ref().and(request.tenant.as_deref()).map(str::to_owned)
}

/// What the first key of an adapter's prompt is turned by: other adapters, other caches.
pub(super) fn root(adapter: Option<&str>) -> u64 {
    adapter.map_or(0, |name| name.bytes().fold(1, |hash, byte| mix(hash ^ u64::from(byte))))
}

/// The keys of the prompt's full blocks.
pub(super) fn keys(request: &Request, contents: &mut Contents) -> Vec<BlockKey> {
    let mut keys = Vec::new();
    for part in &request.prompt {
        contents.push(part.piece, |content| keys.push(BlockKey(content)));
    }
    if let Some(first) = keys.first_mut() {
        first.0 ^= root(request.adapter.as_deref());
    }
    keys
}

/// The prompt as text, for strategies that look at it: four letters a token, equal where the tokens are equal.
fn text(request: &Request) -> Prompt<'static> {
    let mut prompt = Prompt { count: 1, ..Prompt::default() };
    let mut said: Option<(Speaker, String)> = None;
    for part in &request.prompt {
        if said.as_ref().is_none_or(|(role, _)| *role != part.role) {
            finish(&mut prompt, said.replace((part.role, String::new())));
        }
        let Some((_, text)) = &mut said else { continue };
        let (name, from) = (part.piece.name, part.piece.from);
        for i in from..from.saturating_add(part.piece.tokens) {
            text.push_str(answer_text(name, i));
        }
    }
    finish(&mut prompt, said);
    prompt
}

fn finish(prompt: &mut Prompt<'static>, said: Option<(Speaker, String)>) {
    let Some((role, text)) = said else { return };
    prompt.text_bytes += text.len() as u64;
    let role = match role {
        Speaker::System => "system",
        Speaker::User => "user",
        Speaker::Assistant => "assistant",
    };
    prompt.pieces.push(Piece::Role(role.into()));
    prompt.pieces.push(Piece::Text(text.into()));
}
