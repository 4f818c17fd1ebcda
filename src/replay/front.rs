//! The picker of one pool without Envoy: what `picker` and `ext_proc` do with a request, for simulated requests.
//!
//! Scheduler, strategies, prefix cache, ledger, learned speed and health are those of production, called in the order
//! in which the exchange calls them. Parsing, tokenizing, rewrites and subset hints are left out: a simulated request
//! already has its tokens. Called by [`super::world`]; pure.

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
use attache_scheduling::{Booking, Chosen, Decision, Order, PickContext, RequestFacts, Scheduler, Strategy, losses};
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

/// The part of a pool's configuration that a replay uses.
#[derive(Debug)]
pub struct FrontConfig {
    /// The scheduler, with the policy for split requests.
    pub scheduler: Scheduler,
    /// Time limits of prefills, and what follows when all attempts fail.
    pub patience: Patience,
    /// Age from which on metrics are stale.
    pub stale_after: Duration,
    /// Block size of prefix keys, tokens.
    pub block_size: u32,
    /// Memory limit of the prefix index, bytes.
    pub max_index_bytes: u64,
    /// Minimum fraction of the estimated entries that one tenant keeps when the index is full, 0.01..=1.
    pub tenant_share: f32,
    /// The header that names the tenant.
    pub tenant_header: Option<String>,
    /// How long a request without a response counts as a cached prefix.
    pub claim_life: Duration,
    /// The queues of flow control, if it is on.
    pub queues: Option<PoolQueues>,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// The prefix update that a decision causes, and the cache that receives it.
type CacheUpdate = Option<(Arc<PrefixCache>, learning::PrefixUpdate)>;

/// A request that was sent to a server.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) booking: Booking,
    /// Prompt tokens that its server is expected to have cached.
    pub(super) foretold: u32,
    /// The prefill on another server; `None` if its own server computes the prompt.
    pub(super) legs: Option<PrefillLegs>,
    /// Its admission by flow control, if there are queues.
    pub(super) passage: Option<Passage>,
    contents: Contents,
    /// Headers of the response that the client sends with its next request.
    echo: ResponseHeaders,
    /// It is the probe of a half-open server.
    pub(super) probe: bool,
}

/// A decision, with everything that its booking needs.
struct Placement {
    decision: Decision,
    /// First pick of the decision.
    picked: Arc<Endpoint>,
    strategy: Arc<dyn Strategy>,
    /// As [`Order::share`].
    share: f64,
    found: Option<Found>,
    keys: Vec<BlockKey>,
    contents: Contents,
    echo: ResponseHeaders,
}

/// The only source of endpoints.
const SOURCE: SourceId = SourceId(0);

/// The picker without Envoy: snapshot, scheduler, caches, queues.
#[derive(Debug)]
pub(super) struct Front {
    pub(super) config: FrontConfig,
    pub(super) queues: Option<PoolQueues>,
    writer: PoolWriter,
    pub(super) snapshot: PoolSnapshot,
    pub(super) cache: Arc<PrefixCache>,
    /// Number of random streams that were used.
    pub(super) sequence: u64,
    /// Response headers of each session, for the next request of that session.
    echoes: HashMap<u64, ResponseHeaders>,
    /// Models and adapters that requests have named.
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

    /// Sets the endpoints, as discovery does.
    pub(super) fn discover(&mut self, endpoints: Vec<Arc<EndpointSpec>>) {
        self.writer.apply(PoolEvent::Endpoints { source: SOURCE, endpoints });
        self.publish();
    }

    /// Records scraped metrics. `restarted`: another process reported the previous ones.
    pub(super) fn scraped(&mut self, id: EndpointId, metrics: EndpointMetrics, restarted: bool) {
        if restarted {
            self.writer.apply(PoolEvent::Restarted { id });
        }
        self.writer.apply(PoolEvent::Scraped { id, metrics: Arc::new(metrics) });
    }

    /// Publishes recorded events as a snapshot, which later decisions read.
    pub(super) fn publish(&mut self) {
        if let Some(snapshot) = self.writer.snapshot() {
            losses::drop_lost(&snapshot, &self.cache, Some(&self.config.scheduler.choices));
            self.snapshot = snapshot;
        }
    }

    /// The headers of a request: its own, and those of its session's last response.
    pub(super) fn headers_of(&self, request: &Request) -> BTreeMap<String, String> {
        let mut headers = client_headers(request, self.config.tenant_header.as_deref());
        let echo = request.session.and_then(|session| self.echoes.get(&session));
        headers.extend(echo.into_iter().flatten().map(|(name, value)| (name.to_string(), value.clone())));
        headers
    }

    /// Decides and books a request. `base` is the model of requests without an adapter.
    ///
    /// # Errors
    /// The error response that production would send.
    pub(super) fn send(&mut self, request: &Request, base: &str, now: Timestamp) -> Result<Sent, RequestError> {
        let rng = &mut rng::for_request(self.config.seed, self.sequence);
        self.sequence += 1;
        let headers = self.headers_of(request);
        let model = model(request, base);
        if !self.models.contains(model) {
            self.models.insert(model.into());
        }
        let facts = RequestFacts { waited: now.since(request.at), ..facts(request, base, &headers) };
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
        let decision = self.config.scheduler.decide(&*choice.strategy, &cx, None, Explain::No, rng)?;
        let no_pick =
            || RequestError::new(attache_types::error::Reason::NoReadyEndpoint, "the strategy chose no endpoint");
        let picked = decision.picks.first().cloned().ok_or_else(no_pick)?;
        let mut echo = ResponseHeaders::new();
        choice.strategy.response_headers(&picked, &mut echo);
        let share = choice.strategy.share(&cx, &picked);
        let strategy = choice.strategy;
        let placement = Placement { decision, picked, strategy, share, found, keys, contents, echo };
        Ok(self.book(request, base, placement, now))
    }

    /// Books a decision on its server, and on the prefill server if the request is split.
    fn book(&self, request: &Request, base: &str, placement: Placement, now: Timestamp) -> Sent {
        let Placement { mut decision, picked, strategy, share, found, keys, contents, echo } = placement;
        let (cached, [prefix_update, prefill_update]) = self.prefix_updates(request, &decision, found, keys);
        let foretold = |update: &CacheUpdate| update.as_ref().map_or(0, |(_, update)| update.foretold);
        let (foretold, prefill_foretold) = (foretold(&prefix_update), foretold(&prefill_update));
        let arrives = decision.split.is_some();
        let book = |endpoint: Arc<Endpoint>, cached_tokens, arrives, share, prefix_update| {
            let order = Order {
                model: model(request, base),
                prompt_tokens: request.prompt_tokens(),
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
            Some(PrefillLegs { prefilling, foretold: prefill_foretold, decision, strategy })
        });
        Sent { booking, foretold, legs, passage: None, contents, echo, probe }
    }

    /// Updates of the prefix cache for the prompt's `keys`: for the first pick, and for the prefill server. The number
    /// is the prompt tokens that the first pick is expected to have cached.
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
            let update = found.prefix_update(id, keys, whole);
            let tenant = tenant(request, &self.config);
            Some((self.cache.clone(), learning::PrefixUpdate { tenant, tells_cached, ..update }))
        };
        let second = prefill.and_then(|p| of(p.id, keys.clone(), true));
        // A response reports the cached tokens of the server that computed its prompt.
        (matched, [of(picked.id, keys, prefill.is_none()), second])
    }

    /// Records the first byte of the response: status 200 if `good`, otherwise an error of the server.
    pub(super) fn first_byte(&self, sent: &mut Sent, good: bool, now: Timestamp) {
        let outcome = if good { Outcome::Success } else { Outcome::Failure };
        self.judge(sent.booking.endpoint(), outcome, now);
        sent.booking.first_byte(good, true, now);
    }

    /// Records the outcome of a request in the health of `endpoint`.
    pub(super) fn judge(&self, endpoint: &Endpoint, outcome: Outcome, now: Timestamp) {
        // A simulated request never causes an error response itself.
        let outcome = if outcome == Outcome::ErrorResponse { Outcome::Failure } else { outcome };
        endpoint.health.record(outcome, now, self.config.scheduler.health());
    }

    pub(super) fn patience(&self) -> Patience {
        self.config.patience
    }

    pub(super) fn stale_after(&self) -> Duration {
        self.config.stale_after
    }

    /// Records the complete end of the response.
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

    /// Releases a request that is never sent. If it was a probe, another request may probe its server.
    pub(super) fn unsent(&mut self, sent: Sent, now: Timestamp) {
        if sent.probe {
            sent.booking.endpoint().health.probe_lost();
        }
        self.gave_back(sent.passage, &Usage::default(), now);
    }

    /// Records a failure: the server was unreachable, or the connection broke before the end of the response.
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

/// The model that a request names: its adapter, or `base`.
fn model<'r>(request: &'r Request, base: &'r str) -> &'r str {
    request.adapter.as_deref().unwrap_or(base)
}

/// Facts about a request before its prompt is looked up.
pub(super) fn facts<'r>(
    request: &'r Request,
    base: &'r str,
    headers: &'r BTreeMap<String, String>,
) -> RequestFacts<'r> {
    RequestFacts {
        model: model(request, base),
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

/// The value that the first key of a prompt is combined with, since adapters do not share cached blocks; 0 without an
/// adapter.
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

/// The prompt as text, for strategies that read it: four letters for each token, equal for equal tokens.
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
