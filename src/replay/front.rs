//! The picker of one pool without Envoy: `picker` decides and books each simulated request, as it does live.
//!
//! A simulated request has no body, and its prompt is known as tokens ([`attache_picker::known`]). So nothing is parsed
//! or tokenized. Everything else is the live path: rewrites, quotas, deadlines, queues, lookup, strategy, booking.
//! Called by [`super::world`]; pure.

use super::legs::{Patience, PrefillLegs};
pub(super) use arrival::{Arrival, Attempted, Waiting};
use attache_flow::{PoolFlow, Refusal};
use attache_picker::decide::{self, Plan, PrefillTime, RequestView, Seen, Step};
use attache_picker::event::Unobserved;
use attache_picker::head::{FAIRNESS_ID, Head, Header};
use attache_picker::prefilling::Prefilling;
use attache_picker::queues::{AdmittedRequest, QueueSignal, Queues};
use attache_picker::quotas::{Allowance, Quotas, Store};
use attache_picker::settings::{ExchangeSettings, ExplainSettings};
use attache_picker::tenant::Tenant;
use attache_picker::{ActiveConfig, Picker, PoolRuntime};
use attache_pool::ranks::RankBooking;
use attache_pool::writer::SourceId;
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, PoolEvent, PoolSnapshot, PoolWriter};
use attache_prefix::cache::{BlockUnit, PrefixCache};
use attache_protocol::Api;
use attache_quota::{Book, DEFAULT_MAX_TENANTS};
use attache_scheduling::Pool;
use attache_scheduling::losses;
use attache_scheduling::plugin::ResponseHeaders;
use attache_scheduling::router::PoolMatch;
use attache_sim::content::Contents;
use attache_sync::{CacheLossSink, PoolView, Replica};
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use attache_types::ids::EndpointId;
use attache_types::limits::Limits;
use attache_types::params::ParamError;
use attache_types::rng;
use attache_workload::{Request, client_headers};
pub(super) use config::known_prefix;
pub use config::{FrontConfig, simulated_prefix};
pub(super) use prompt::root;
use prompt::{PromptBlocks, known, text};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};
use wakes::Wakes;

mod arrival;
mod config;
mod outcomes;
mod prompt;
mod wakes;

/// A stream of random numbers beside those of all requests.
const QUEUE_STREAM: u64 = u64::MAX;
/// Path of all simulated requests.
const PATH: &str = "/v1/chat/completions";

/// A request that was sent to a server.
#[derive(Debug)]
pub(super) struct Sent {
    pub(super) plan: Box<Plan>,
    pub(super) head: Head,
    /// Prompt tokens that the server that computes the prompt is expected to have cached.
    pub(super) foretold: u32,
    /// The prefill on another server; `None` if its own server computes the prompt.
    pub(super) legs: Option<PrefillLegs>,
    /// Becomes ready when the request is preempted.
    preemption: Option<QueueSignal<Refusal>>,
    contents: Contents,
    /// Headers of the response that the client sends with its next request.
    echo: ResponseHeaders,
    /// Tokens of the response so far, if queues count them.
    output: u32,
}

impl Sent {
    /// A further token of the response was generated.
    pub(super) fn token(&mut self, now: Timestamp) {
        self.output += 1;
        if let Some(admitted) = &mut self.plan.admitted {
            // The first token is no event of its own here.
            admitted.answered(self.output + 1, now);
        }
    }

    /// The server of the response.
    pub(super) fn endpoint(&self) -> Option<&Arc<Endpoint>> {
        self.plan.booked.as_ref().map(|booked| booked.endpoint())
    }

    /// The data-parallel rank of the server of the response, if the picker chooses ranks.
    pub(super) fn rank(&self) -> Option<usize> {
        self.plan.hints.rank.as_ref().map(RankBooking::rank)
    }

    /// The servers that encode the images of the request: those of the decision, else the one that computes the prompt.
    pub(super) fn encoders(&self) -> Vec<EndpointId> {
        match self.plan.decision.encode.as_slice() {
            [] => {
                let prefill = self.legs.as_ref().and_then(|legs| legs.prefilling.server(0));
                prefill.or(self.endpoint()).map(|server| server.id).into_iter().collect()
            }
            encoders => encoders.iter().map(|server| server.id).collect(),
        }
    }

    /// The adapter that the request needs, if `base` is the model of the servers.
    pub(super) fn adapter(&self, base: &str) -> Option<Arc<str>> {
        Some(self.plan.target.clone()).filter(|target| **target != *base)
    }

    /// The request is preempted, if it is ready.
    pub(super) fn preempted(&mut self, number: u64, wakes: &Arc<Wakes>) -> bool {
        let signal = self.preemption.as_mut().and_then(|signal| wakes.poll(number, signal));
        if signal.is_some() {
            self.preemption = None;
        }
        // Its response may have begun since the signal, which protects it if `evictRunning` is `unanswered`.
        signal.flatten().is_some() && self.plan.admitted.as_ref().is_some_and(AdmittedRequest::is_preemptible)
    }
}

/// The only source of endpoints.
const SOURCE: SourceId = SourceId(0);

/// The picker without Envoy.
#[derive(Debug)]
pub(super) struct Front {
    picker: Picker,
    active: Arc<ActiveConfig>,
    runtime: Arc<PoolRuntime>,
    patience: Patience,
    /// The signals of queues.
    pub(super) wakes: Arc<Wakes>,
    /// The time of the latest event, nanoseconds. Quotas read it.
    now: Arc<AtomicU64>,
    writer: PoolWriter,
    /// The last snapshot.
    pub(super) snapshot: Arc<PoolSnapshot>,
    pub(super) cache: Arc<PrefixCache>,
    /// Block size of prefix keys, tokens.
    block_size: u32,
    /// Some strategy reads the text of prompts.
    reads_text: bool,
    /// Queues charge flows while their responses are generated.
    pub(super) counts_output: bool,
    /// Response headers of each session, for the next request of that session.
    echoes: HashMap<u64, ResponseHeaders>,
    /// Models and adapters that requests have named.
    pub(super) models: BTreeSet<Arc<str>>,
}

impl Front {
    /// # Errors
    /// The plugin of `flowControl.ceiling` rejects its parameters.
    pub(super) fn new(config: FrontConfig, replica: Option<Arc<Replica>>) -> Result<Self, ParamError> {
        let FrontConfig { pool, prefix, flow, quotas, exchange, policies, patience, seed } = config;
        let (wakes, now) = (Arc::new(Wakes::default()), Arc::new(AtomicU64::new(0)));
        // All simulated requests belong to the pool. Only the models are left of its conditions.
        let matches = PoolMatch { models: pool.matches.models, ..PoolMatch::default() };
        let pool = Arc::new(Pool { matches, ..pool });
        let counts_output = flow.as_ref().is_some_and(PoolFlow::counts_output);
        let queue = flow.map(|flow| {
            let (health, split) = (pool.scheduler.health().clone(), pool.scheduler.split().cloned());
            let (store, rng, timer) = (pool.store.clone(), rng::for_request(seed, QUEUE_STREAM), wakes.timer());
            Queues::new(flow, store, health, split, pool.stale_after, Box::new(Unobserved), rng, timer)
        });
        let queue = queue.transpose()?;
        let (cache, observer) = (prefix.cache.clone(), Arc::new(Unobserved));
        let block_size = match cache.unit() {
            BlockUnit::Tokens(tokens) | BlockUnit::Bytes(tokens) => tokens,
        };
        let reads_text = pool.scheduler.choices.all().any(|strategy| strategy.reads().prompt);
        let runtime = Arc::new(PoolRuntime { pool, observer: observer.clone(), prefix: Some(Arc::new(prefix)), queue });
        // Explanations of simulated requests are not read.
        let explain = ExplainSettings::default();
        let exchange = ExchangeSettings { trust_client_headers: true, explain, ..exchange };
        let quota = |(subject, settings)| {
            let (store, now) = (Store::Memory(Arc::new(Book::new(DEFAULT_MAX_TENANTS))), now.clone());
            // Minutes and days begin with the run.
            let wall = move || SystemTime::UNIX_EPOCH + Duration::from_nanos(now.load(Relaxed));
            Arc::new(Quotas::new(subject, settings, store, observer.clone(), wall))
        };
        let config = ActiveConfig::new(vec![runtime.clone()], Limits::default(), exchange)
            .with_quotas(quotas.into_iter().map(quota).collect());
        let picker = Picker::new(config, observer.clone(), seed).sharing(replica);
        picker.policies.configure(policies);
        let active = picker.config();
        let (writer, snapshot) = (PoolWriter::new(vec![SOURCE]), Arc::default());
        let (echoes, models) = (HashMap::new(), BTreeSet::new());
        Ok(Self {
            picker,
            active,
            runtime,
            patience,
            wakes,
            now,
            writer,
            snapshot,
            cache,
            block_size,
            reads_text,
            counts_output,
            echoes,
            models,
        })
    }

    /// The pool as the exchange with other pickers needs it.
    pub(super) fn shared_view(&self, losses: Arc<dyn CacheLossSink>) -> PoolView {
        self.runtime.shared_view(losses)
    }

    /// Sets the time of what follows.
    pub(super) fn set_time(&self, now: Timestamp) {
        self.now.store(now.0, Relaxed);
    }

    /// Sets the endpoints, as discovery does.
    pub(super) fn discover(&mut self, endpoints: Vec<Arc<EndpointSpec>>) {
        self.writer.apply(PoolEvent::Endpoints { source: SOURCE, endpoints });
        self.publish();
    }

    /// A change of the pool, which the next snapshot has.
    pub(super) fn apply(&mut self, event: PoolEvent) {
        self.writer.apply(event);
    }

    /// `metrics` of an endpoint, with the requests in flight that this picker counts at the time of the scrape.
    pub(super) fn seen_at_scrape(&self, spec: &EndpointSpec, metrics: EndpointMetrics) -> EndpointMetrics {
        let state = self.snapshot.position(spec.address).and_then(|p| self.snapshot.get(p));
        let endpoint = state.map(|state| &state.endpoint);
        EndpointMetrics {
            in_flight_at_scrape: endpoint.map_or(0, |endpoint| endpoint.ledger.in_flight()),
            ranks_at_scrape: endpoint.map(|endpoint| endpoint.ranks.under_way()).unwrap_or_default(),
            ..metrics
        }
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
            let pool = &self.runtime.pool;
            if let Some(replica) = &self.picker.replica {
                replica.announce_losses(&pool.name, &snapshot.lost, Timestamp(self.now.load(Relaxed)));
            }
            losses::drop_lost(&snapshot, &self.cache, Some(&pool.scheduler.choices));
            pool.store.publish(snapshot);
            self.snapshot = pool.store.load_full();
        }
    }

    /// The queues, if flow control is on.
    pub(super) fn queues(&self) -> Option<&Arc<Queues>> {
        self.runtime.queue.as_ref()
    }

    /// A request that arrives now.
    pub(super) fn arrival(&self, request: Request) -> Arrival {
        let (head, rng) = (self.head(&request), self.picker.next_rng());
        Arrival { request, head, rng, allowance: Allowance::default(), admitted: None }
    }

    /// Notes a model that a request names, or is rewritten to.
    fn note_model(&mut self, model: &str) {
        if !self.models.contains(model) {
            self.models.insert(model.into());
        }
    }

    /// The tenant of a request if the servers keep a cache for each tenant (`prefixCache.isolateTenants`).
    pub(super) fn isolated_tenant(&self, request: &Request) -> Option<Arc<str>> {
        let prefix = self.runtime.prefix.as_ref().filter(|prefix| prefix.isolate_tenants)?;
        let is_named = prefix.tenant_header.is_some() || self.active.settings.tenant.is_some();
        request.tenant.clone().filter(|_| is_named)
    }

    /// The headers of a request: its own, and those of its session's last response.
    fn head(&self, request: &Request) -> Head {
        let tenant_header = self.runtime.prefix.as_ref().and_then(|prefix| prefix.tenant_header.as_deref());
        let mut headers = client_headers(request, tenant_header);
        let echo = request.session.and_then(|session| self.echoes.get(&session));
        headers.extend(echo.into_iter().flatten().map(|(name, value)| (name.to_string(), value.clone())));
        // Tenants share the pool fairly, whether or not the configuration reads their names.
        headers.extend(request.tenant.as_ref().map(|tenant| (FAIRNESS_ID.to_owned(), tenant.to_string())));
        let header = |(name, value): (String, String)| Header { name, value: value.into_bytes() };
        let mut head = Head::read(headers.into_iter().map(header).collect());
        head.assume_path(PATH);
        if self.active.settings.tenant.is_some() {
            head.belongs_to(request.tenant.clone().map_or(Tenant::Missing, Tenant::Named));
        }
        head
    }

    /// Decides and books a request, as far as that is possible without waiting. `base` is the model of requests without
    /// an adapter.
    pub(super) fn decide(&mut self, arrival: Arrival, base: &str, now: Timestamp) -> Attempted {
        let Arrival { request, head, rng, mut allowance, admitted } = arrival;
        let tenant = self.isolated_tenant(&request);
        let prompt = PromptBlocks::new(&request, base, self.block_size, tenant.as_deref());
        let text = self.reads_text.then(|| text(&request));
        let pool = &self.runtime.pool;
        // Requests of pools with a default model name no other one.
        let base_named = Some(base).filter(|_| pool.default_model.is_none());
        let known = known(&request, &pool.name, request.adapter.as_deref().or(base_named), text.as_ref(), &prompt);
        let view = RequestView {
            head: &head,
            pool: None,
            called: "",
            api: Api::ChatCompletions,
            response_id: None,
            subset: None,
            body: Seen::Known(&known),
            now,
            opened: request.at,
            last: true,
            made: None,
            may_wait: true,
            opens: false,
            has_turn: admitted.is_some(),
            prefill_time: PrefillTime::Unbounded,
            trace: None,
        };
        let step = decide::decide(&self.picker, &self.active, &view, &mut allowance, &mut rng.clone());
        let contents = prompt.into_contents();
        request.adapter.as_deref().or(base_named).into_iter().for_each(|model| self.note_model(model));
        match step {
            Ok(Step::Decided(mut plan)) => {
                plan.permits = allowance.take();
                plan.admitted = admitted.or(plan.admitted.take());
                self.note_model(&plan.target);
                self.sent(request, head, plan, contents, now)
            }
            Ok(Step::Queue(mut queued)) => {
                let signal = queued.waiting();
                let arrival = Arrival { request, head, rng, allowance, admitted };
                Attempted::Waits(Box::new(Waiting { arrival, queued, signal }))
            }
            // A simulation has all keys, and no store outside of the process.
            Ok(Step::Warm(..) | Step::Allow(_)) => Attempted::Refused(request, no_pick()),
            Err(error) => Attempted::Refused(request, error),
        }
    }

    fn sent(&self, request: Request, head: Head, mut plan: Box<Plan>, contents: Contents, now: Timestamp) -> Attempted {
        let preemption = plan.admitted.as_mut().and_then(|admitted| {
            admitted.landed();
            admitted.eviction()
        });
        let Some(booked) = &plan.booked else { return Attempted::Refused(request, no_pick()) };
        let mut echo = ResponseHeaders::new();
        plan.strategy.response_headers(booked.endpoint(), &mut echo);
        let foretold = booked.foretold();
        let booking = plan.prefill.take();
        let legs = plan.decision.split.take().map(|split| {
            let foretold = booking.as_ref().map_or(0, |booking| booking.foretold());
            let prefilling = Prefilling::begin(split.prefill, booking, split.probe, self.patience.bounds, now);
            PrefillLegs { prefilling, foretold, chosen_rank: plan.hints.prefill_rank.take() }
        });
        let sent = Sent { plan, head, foretold, legs, preemption, contents, echo, output: 0 };
        Attempted::Sent(request, Box::new(sent))
    }

    /// Chooses another decode server for a request, if its own has left the pool during the prefill on `prefill`.
    ///
    /// # Errors
    /// When no other goes on from the prompt.
    pub(super) fn replace_target(
        &self,
        sent: &mut Sent,
        prefill: Option<&Endpoint>,
        now: Timestamp,
    ) -> Result<(), RequestError> {
        sent.plan.replace_target(&sent.head, None, prefill, now, &self.picker)
    }
}

fn no_pick() -> RequestError {
    RequestError::new(Reason::NoReadyEndpoint, "the strategy chose no endpoint")
}
