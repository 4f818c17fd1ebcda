//! The picker of one pool without Envoy: what `picker` and `ext_proc` do with a request, for simulated requests.
//!
//! Scheduler, strategies, prefix cache, ledger, learned speed and health are those of production, called in the order
//! in which the exchange calls them. Parsing, tokenizing, rewrites and subset hints are left out: a simulated request
//! already has its tokens. Called by [`super::world`]; pure.

use super::legs::{Patience, PrefillLegs};
use super::queues::PoolQueues;
use super::quotas::{QuotaSettings, RunQuotas};
use attache_flow::Passage;
use attache_picker::placement::{BookingRequest, Bookings, LookedUp, PromptBlocks};
use attache_picker::prefilling::Prefilling;
use attache_pool::health::Outcome;
use attache_pool::writer::SourceId;
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, PoolEvent, PoolSnapshot, PoolWriter};
use attache_prefix::cache::{BlockUnit, CacheConfig, Found, PrefixCache};
use attache_prefix::key::BlockKey;
use attache_protocol::{Piece, Prompt, Usage};
use attache_record::{Booked, RequestTape};
use attache_scheduling::plugin::{Headers, ResponseHeaders};
use attache_scheduling::policy::PolicyMap;
use attache_scheduling::scheduler::Explain;
use attache_scheduling::{Chosen, Decision, PickContext, RequestFacts, Scheduler, Strategy, losses};
use attache_sim::content::{Contents, mix};
use attache_sim::tokenizer::answer_text;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
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
    /// The limits of tenants and models.
    pub quotas: QuotaSettings,
    /// Policies of single models, for `prefix-affinity`.
    pub policies: PolicyMap,
    /// Seed of all random numbers.
    pub seed: u64,
}

/// A request that was sent to a server.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) booking: Booked,
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
    strategy: Arc<dyn Strategy>,
    /// As [`BookingRequest::share`].
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
    pub(super) quotas: RunQuotas,
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
        let quotas = RunQuotas::new(std::mem::take(&mut config.quotas));
        let cache = Arc::new(PrefixCache::new(&CacheConfig {
            unit: BlockUnit::Tokens(config.block_size),
            max_bytes: config.max_index_bytes,
            tenant_share: config.tenant_share,
            claim_life: config.claim_life,
            seed: config.seed,
        }));
        let (writer, snapshot) = (PoolWriter::new(vec![SOURCE]), PoolSnapshot::default());
        let (echoes, models) = (HashMap::new(), BTreeSet::new());
        Self { config, queues, quotas, writer, snapshot, cache, sequence: 0, echoes, models }
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
            policy: self.config.policies.get(model).copied().unwrap_or_default(),
            splittable: self.config.scheduler.split().is_some(),
            generates: true,
            ..PickContext::new(&self.snapshot, now, self.config.stale_after)
        };
        let decision = self.config.scheduler.decide(&*choice.strategy, &cx, None, Explain::No, rng)?;
        let picked = decision.picks.first().ok_or_else(no_pick)?;
        let mut echo = ResponseHeaders::new();
        choice.strategy.response_headers(picked, &mut echo);
        let share = choice.strategy.share(&cx, picked);
        let strategy = choice.strategy;
        self.book(request, base, Placement { decision, strategy, share, found, keys, contents, echo }, now)
    }

    /// Books a decision on its server, and on the prefill server if the request is split.
    fn book(&self, request: &Request, base: &str, placement: Placement, now: Timestamp) -> Result<Sent, RequestError> {
        let Placement { mut decision, strategy, share, found, keys, contents, echo } = placement;
        let prompt_tokens = request.prompt_tokens();
        // The prompt has a length and no text.
        let prompt = Prompt { token_ids: prompt_tokens.into(), count: 1, ..Prompt::default() };
        let updates = found.and_then(|found| {
            let tenant = tenant(request, &self.config);
            let looked = LookedUp { cache: &self.cache, found: &found, prompt: &prompt, skips_cache: false, tenant };
            let all = looked.needs_all_blocks(&decision);
            looked.updates(&decision, PromptBlocks { keys, all, complete: true })
        });
        let foretold = updates.as_ref().map_or(0, |updates| updates.first.foretold);
        let prefill_foretold = updates.as_ref().and_then(|u| u.prefill.as_ref()).map_or(0, |update| update.foretold);
        let model = model(request, base);
        let booking = BookingRequest { model, prompt_tokens, understood: true, streams: true, share, updates };
        let Bookings { first, prefill, encoding } =
            Bookings::of(&decision, booking, &self.snapshot, self.config.stale_after, now).ok_or_else(no_pick)?;
        let probe = decision.probe;
        let legs = decision.split.take().map(|split| {
            let booking = prefill.map(|booking| Box::new(Booked::prefill(booking, RequestTape::default())));
            let bounds = self.config.patience.bounds;
            let prefilling = Prefilling::begin(split.prefill, booking, split.probe, bounds, now);
            PrefillLegs { prefilling, foretold: prefill_foretold, decision, strategy }
        });
        let booking = Booked::new(first, encoding, RequestTape::default());
        Ok(Sent { booking, foretold, legs, passage: None, contents, echo, probe })
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
        let Sent { mut booking, passage, mut contents, echo, .. } = sent;
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
    pub(super) fn lost(&mut self, mut sent: Sent, unreachable: bool, now: Timestamp) {
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

fn no_pick() -> RequestError {
    RequestError::new(Reason::NoReadyEndpoint, "the strategy chose no endpoint")
}

/// The model that a request names: its adapter, or `base`.
pub(super) fn model<'r>(request: &'r Request, base: &'r str) -> &'r str {
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
