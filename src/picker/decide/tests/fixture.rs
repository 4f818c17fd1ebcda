//! A picker with one pool, and requests for it.

use super::super::*;
use crate::event::{
    DecisionRecord, Event, KeptExplanation, NameEvent, NameObserver, Observer, PoolObserver, QueueEvent, QueueObserver,
    RequestEvent, Unobserved,
};
use crate::head::{Head, Header};
use crate::prefix::Tokenizer;
use crate::queues::Queues;
use crate::quotas::{Quotas, Store};
use crate::settings::{ExchangeSettings, ExplainSettings};
use attache_disagg::Mode;
use attache_flow::registry::{CEILINGS, DETECTORS, find};
use attache_flow::saturation::recompute::Recompute;
use attache_flow::{PoolFlow, Queueing, Settings};
use attache_pool::health::HealthPolicy;
use attache_pool::role::ROLE_LABEL;
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot, SnapshotStore};
use attache_prefix::cache::{BlockUnit, CacheConfig, PrefixCache};
use attache_prompt::characters::Characters;
use attache_protocol::Api;
use attache_quota::{Book, CountIn, Limits as QuotaLimits, Subject, TenantSettings};
use attache_scheduling::router::{ModelRewrites, PoolMatch, PoolSwitches};
use attache_scheduling::split::Decider;
use attache_scheduling::{Candidate, Choices, PickContext, Ranking, Scheduler, Strategy};
use attache_types::clock::{Clock, Timestamp};
use attache_types::ids::EndpointId;
use attache_types::limits::Limits;
use attache_types::rng;
use parking_lot::Mutex;
use serde_json::json;
use std::task::Waker;
use std::time::SystemTime;

pub(crate) const NOW: Timestamp = Timestamp(60_000_000_000);
pub(crate) const STALE_AFTER: Duration = Duration::from_secs(5);

/// Chooses the first endpoint that caches most of the prompt.
#[derive(Debug)]
pub(crate) struct MostCached;

impl Strategy for MostCached {
    fn rank(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, ranking: &mut Ranking) {
        let cached = |c: &&Candidate<'_>| cx.prefix.map_or(0, |found| found.depth(c.state.endpoint.id).any);
        let mut all: Vec<&Candidate<'_>> = candidates.iter().collect();
        all.sort_by_key(|c| (std::cmp::Reverse(cached(c)), c.state.endpoint.id.0));
        all.into_iter().for_each(|c| ranking.push(&c.state.endpoint));
    }

    fn reads(&self) -> attache_scheduling::Reads {
        attache_scheduling::Reads { prefix: true, ..Default::default() }
    }
}

/// Panics.
#[derive(Debug)]
pub(crate) struct Broken;

impl Strategy for Broken {
    fn rank(&self, _: &PickContext<'_>, _: &[Candidate<'_>], _: &mut PickRng, _: &mut Ranking) {
        panic!("a bug");
    }
}

/// Events, by their names.
#[derive(Clone, Debug, Default)]
pub(crate) struct Events(Arc<Mutex<Vec<String>>>);

impl Events {
    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock())
    }
}

impl Observer for Events {
    fn event(&self, event: Event) {
        self.0.lock().push(format!("{event:?}"));
    }

    fn named(&self, _: Subject, _: &str, _: Timestamp) -> Arc<dyn NameObserver> {
        Arc::new(self.clone())
    }

    fn keeps_decisions(&self) -> bool {
        true
    }

    fn log(&self, record: DecisionRecord) {
        self.0.lock().push(format!("{record:?}"));
    }

    fn begin_explanation(&self, settings: &ExplainSettings, now: Timestamp) -> Option<Timestamp> {
        (settings.kept > 0).then_some(now)
    }

    fn explained(&self, settings: &ExplainSettings, _: Timestamp, explanation: KeptExplanation) {
        self.0.lock().push(format!("explained {} {}", settings.kept, explanation.json));
    }
}

impl NameObserver for Events {
    fn event(&self, event: NameEvent) {
        self.0.lock().push(format!("{event:?}"));
    }
}

impl PoolObserver for Events {
    fn event(&self, event: RequestEvent<'_>) {
        self.0.lock().push(format!("{event:?}"));
    }
}

impl QueueObserver for Events {
    fn event(&self, event: QueueEvent) {
        if let QueueEvent::Outcome(outcome) = event {
            self.0.lock().push(format!("{outcome:?}"));
        }
    }
}

/// A picker with one pool of three endpoints, `10.0.0.1:8000` and so on.
pub(crate) struct Fixture {
    pub(crate) picker: Picker,
    pub(crate) snapshot: Arc<SnapshotStore>,
    pub(crate) cache: Arc<PrefixCache>,
    pub(crate) events: Events,
}

#[derive(Default)]
pub(crate) struct Parts {
    pub(crate) strategy: Option<Box<dyn Strategy>>,
    pub(crate) matches: PoolMatch,
    pub(crate) rewrites: ModelRewrites,
    pub(crate) exchange: ExchangeSettings,
    /// Requests in flight at which the pool is full, by sheddable requests or queues.
    pub(crate) full_at: Option<u32>,
    pub(crate) queues: bool,
    /// Long prompts are all that is queued, within these bytes.
    pub(crate) holds: Option<u64>,
    pub(crate) limits: Option<QuotaLimits>,
    pub(crate) deadline_admission: bool,
    pub(crate) roles: &'static [&'static str],
    pub(crate) disagg: Option<Mode>,
}

impl Parts {
    pub(crate) fn build(self) -> Fixture {
        let events = Events::default();
        let snapshot = Arc::new(SnapshotStore::default());
        let speed = Arc::default();
        let endpoint = |i: u32| {
            let mut spec = EndpointSpec::at(([10, 0, 0, i as u8 + 1], 8000).into());
            spec.labels.extend(self.roles.get(i as usize).map(|role| (ROLE_LABEL.into(), (*role).into())));
            let metrics = EndpointMetrics { scraped_at: NOW, ..EndpointMetrics::default() };
            EndpointState::new(Arc::new(Endpoint::in_pool(EndpointId(i), spec, &speed)), Some(Arc::new(metrics)))
        };
        snapshot.publish(PoolSnapshot::new(1, true, (0..3).map(endpoint).collect()));
        let strategy = self.strategy.unwrap_or_else(|| Box::new(MostCached));
        let split = self.disagg.is_some().then(|| attache_scheduling::SplitPolicy {
            decider: Decider::Always,
            together: Vec::new(),
            whole: true,
            required: false,
        });
        let scheduler = Scheduler::new(Choices::only("test", strategy), HealthPolicy::default(), 2).splitting(split);
        let pool = Pool {
            matches: self.matches,
            rewrites: self.rewrites,
            disagg: self.disagg.map(Arc::new),
            switches: PoolSwitches { deadline_admission: self.deadline_admission, ..PoolSwitches::default() },
            ..Pool::new("pool".into(), snapshot.clone(), scheduler, STALE_AFTER)
        };
        let cache = Arc::new(PrefixCache::new(&CacheConfig {
            claim_every_block: false,
            unit: BlockUnit::Bytes(64),
            max_bytes: 1 << 20,
            tenant_share: 1.0,
            claim_life: Duration::from_secs(30),
            seed: 7,
        }));
        cache.reconcile(&snapshot.load());
        let prefix = PoolPrefix {
            tokenizer: Tokenizer::Characters(Characters::new(cache.space())),
            cache: cache.clone(),
            tenant_header: None,
            isolate_tenants: false,
            named_by_adapter: false,
            choose_rank: false,
            ranks_tell: false,
            clock: Clock::start(),
        };
        let saturated = self.full_at.map(|full_at| {
            let detector = find(DETECTORS, "concurrency-detector").unwrap();
            // The strategy takes the first endpoint for every request. Without `compat` that one alone would be full.
            let detector: Arc<_> =
                (detector.build)(&json!({ "maxConcurrency": full_at, "compat": true })).unwrap().into();
            let (queueing, shedding) =
                if self.queues { (Some(Queueing::Saturated(detector)), None) } else { (None, Some(detector)) };
            PoolFlow {
                settings: Settings::default(),
                queueing,
                shedding,
                ceiling: (find(CEILINGS, "static-usage-limit-policy").unwrap(), serde_json::Value::Null),
                admitters: Vec::new(),
                said: serde_json::Value::Null,
            }
        });
        let held =
            |shedding: &Option<PoolFlow>, most| PoolFlow::of_long_prompts(Recompute::default(), shedding.clone(), most);
        let flow = self.holds.map(|most| held(&saturated, most)).or(saturated);
        let queue = flow.map(|flow| {
            let observer = Box::new(events.clone());
            let (health, rng) = (HealthPolicy::default(), rng::for_request(7, 0));
            Queues::new(flow, snapshot.clone(), health, None, STALE_AFTER, observer, rng, Waker::noop().clone())
                .unwrap()
        });
        let quotas = self.limits.map(|limits| {
            let settings = TenantSettings {
                default: limits,
                overrides: Default::default(),
                answer_tokens: 100,
                unknown_paths: Default::default(),
                unknown_path_tokens: 0,
                store: CountIn::Memory,
                user_records: None,
            };
            let (store, noon) =
                (Store::Memory(Arc::new(Book::new(8))), SystemTime::UNIX_EPOCH + Duration::from_secs(43_200));
            Arc::new(Quotas::new(Subject::Tenant, settings, store, Arc::new(Unobserved), move || noon))
        });
        let runtime = PoolRuntime {
            pool: Arc::new(pool),
            observer: Arc::new(events.clone()),
            prefix: Some(Arc::new(prefix)),
            queue,
        };
        let config = ActiveConfig::new(vec![Arc::new(runtime)], Limits::default(), self.exchange);
        let config = config.with_quotas(quotas.into_iter().collect());
        Fixture { picker: Picker::new(config, Arc::new(events.clone()), 7), snapshot, cache, events }
    }
}

pub(crate) fn head(pairs: &[(&str, &str)]) -> Head {
    let header = |(name, value): &(&str, &str)| Header { name: (*name).to_owned(), value: value.as_bytes().to_vec() };
    let mut head = Head::read(pairs.iter().map(header).collect());
    head.assume_path("/v1/chat/completions");
    head
}

pub(crate) fn view<'a>(head: &'a Head, body: Seen<'a>) -> RequestView<'a> {
    RequestView {
        head,
        pool: None,
        called: "",
        api: Api::ChatCompletions,
        response_id: None,
        subset: None,
        body,
        now: NOW,
        opened: NOW,
        last: true,
        made: None,
        may_wait: true,
        opens: false,
        has_turn: false,
        prefill_time: PrefillTime::Unbounded,
        trace: None,
    }
}

/// A request for `model` with this text.
pub(crate) fn chat(model: &str, text: &str) -> Vec<u8> {
    json!({"model": model, "stream": true, "messages": [{"role": "user", "content": text}]}).to_string().into_bytes()
}

impl Fixture {
    pub(crate) fn step(&self, q: &RequestView<'_>) -> Result<Step, RequestError> {
        decide(&self.picker, &self.picker.config(), q, &mut Allowance::default(), &mut self.picker.next_rng())
    }

    pub(crate) fn plan(&self, q: &RequestView<'_>) -> Result<Box<Plan>, RequestError> {
        match self.step(q)? {
            Step::Decided(plan) => Ok(plan),
            other => panic!("it waits: {other:?}"),
        }
    }

    pub(crate) fn chat(&self, text: &str) -> Result<Box<Plan>, RequestError> {
        self.plan(&view(&head(&[]), Seen::Whole(&chat("m", text))))
    }

    pub(crate) fn in_flight(&self) -> Vec<u32> {
        self.snapshot.load().endpoints.iter().map(|state| state.endpoint.ledger.in_flight()).collect()
    }
}
