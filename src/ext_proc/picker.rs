//! What all streams share.

use super::affinity::{DEFAULT_REMEMBERED_RESPONSES, ResponseTable};
use super::body::Buffered;
use super::prefiller::Prefiller;
use super::prefix::PoolPrefix;
use super::queues::Queues;
use super::quotas::Quotas;
use super::uploads::Uploads;
use super::warmer::Warmer;
use arc_swap::ArcSwap;
use attache_picker::settings::ExchangeSettings;
use attache_picker::event::{Observer, PoolObserver};
use attache_record::{Recorder, Turn};
use attache_scheduling::plugin::Strategy;
use attache_scheduling::{ModelPolicies, Pool, Router, scheduler};
use attache_telemetry::Telemetry;
use attache_telemetry::decisions::Decisions;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::trace::Tracing;
use attache_types::limits::Limits;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The part that a reload replaces, all at once. A stream keeps the one it began with.
#[derive(Debug)]
pub struct Live {
    /// The pools.
    pub router: Router,
    /// Bounds.
    pub limits: Limits,
    /// Behaviour.
    pub exchange: ExchangeSettings,
    /// Observers by position of the pool in the router.
    pub observers: Vec<Arc<dyn PoolObserver>>,
    /// Which configuration it is, in a recording.
    pub number: u32,
    /// For requests that carry nothing to decide by.
    pub least_loaded: Arc<dyn Strategy>,
    /// What turns prompts into blocks, and who holds them, by position of the pool in the router.
    prefix: Vec<Arc<PoolPrefix>>,
    /// What stands before pools that are full, by position of the pool in the router.
    queues: Vec<Option<Arc<Queues>>>,
    /// What tenants and models may have.
    quotas: Vec<Arc<Quotas>>,
}

impl Live {
    /// Puts a configuration together.
    #[must_use]
    pub fn new(router: Router, limits: Limits, exchange: ExchangeSettings, metrics: &Metrics) -> Self {
        let observer = |pool: &Arc<Pool>| Arc::new(metrics.pool(&pool.name)) as Arc<dyn PoolObserver>;
        let observers = router.pools().iter().map(observer).collect();
        let least_loaded = scheduler::least_loaded();
        let (prefix, queues, quotas) = (Vec::new(), Vec::new(), Vec::new());
        Self { router, limits, exchange, observers, number: 0, least_loaded, prefix, queues, quotas }
    }

    /// With what turns the prompts of each pool into blocks, in the order of the router's pools. Without it no prompt is looked up.
    #[must_use]
    pub fn with_prefix(mut self, prefix: Vec<Arc<PoolPrefix>>) -> Self {
        self.prefix = prefix;
        self
    }

    /// With queues before pools, in the order of the router's pools. Without them nobody waits.
    #[must_use]
    pub fn with_queues(mut self, queues: Vec<Option<Arc<Queues>>>) -> Self {
        self.queues = queues;
        self
    }

    /// With limits for tenants and for models, one of each at most. Without them everybody may have everything.
    #[must_use]
    pub fn with_quotas(mut self, quotas: Vec<Arc<Quotas>>) -> Self {
        self.quotas = quotas;
        self
    }

    /// What tenants and models may have.
    #[must_use]
    pub fn quotas(&self) -> &[Arc<Quotas>] {
        &self.quotas
    }

    /// What stands before the pool at `position` when it is full.
    #[must_use]
    pub fn queues(&self, position: usize) -> Option<&Arc<Queues>> {
        self.queues.get(position)?.as_ref()
    }

    /// What turns the prompts of the pool at `position` into blocks.
    #[must_use]
    pub fn prefix(&self, position: usize) -> Option<&Arc<PoolPrefix>> {
        self.prefix.get(position)
    }
}

/// The endpoint picker.
#[derive(Debug)]
pub struct Picker {
    live: ArcSwap<Live>,
    /// Counters.
    pub metrics: Arc<Metrics>,
    /// Where answers of the Responses API live.
    pub responses: ResponseTable,
    /// The last decisions.
    pub decisions: Arc<Decisions>,
    /// Is told of all requests: `metrics` and `decisions`.
    pub observer: Arc<dyn Observer>,
    /// Memory of request bodies and unfinished messages.
    pub buffered: Arc<Buffered>,
    /// The part of it that waits for more bytes.
    pub uploads: Arc<Uploads>,
    /// Traces, when they are on.
    pub tracing: Tracing,
    /// What operators say about single models.
    pub policies: Arc<ModelPolicies>,
    /// Where long reading is done.
    pub warmer: Warmer,
    /// Asks prefill servers.
    pub prefiller: Prefiller,
    /// What is told of every decision, when a recording is made.
    pub recorder: Option<Arc<Recorder>>,
    seed: u64,
    sequence: AtomicU64,
}

impl Picker {
    /// A picker whose random choices follow from `seed`.
    #[must_use]
    pub fn new(live: Live, telemetry: &Arc<Telemetry>, tracing: Tracing, seed: u64) -> Self {
        let buffered = Arc::<Buffered>::default();
        let Telemetry { metrics, decisions } = (**telemetry).clone();
        Self {
            live: ArcSwap::from_pointee(live),
            policies: Arc::default(),
            warmer: Warmer::new(buffered.clone(), metrics.clone()),
            prefiller: Prefiller::default(),
            recorder: None,
            metrics,
            responses: ResponseTable::new(DEFAULT_REMEMBERED_RESPONSES),
            decisions,
            observer: telemetry.clone(),
            buffered,
            uploads: Arc::default(),
            tracing,
            seed,
            sequence: AtomicU64::new(0),
        }
    }

    /// The same, and `recorder` is told of all that it decides.
    #[must_use]
    pub fn recorded(self, recorder: Option<Arc<Recorder>>) -> Self {
        Self { recorder, ..self }
    }

    /// A turn in the recording, when one is made.
    #[must_use]
    pub fn turn(&self) -> Option<Turn<'_>> {
        self.recorder.as_deref().and_then(Recorder::turn)
    }

    /// The configuration of now.
    #[must_use]
    pub fn live(&self) -> Arc<Live> {
        self.live.load_full()
    }

    /// Replaces the configuration for the streams that open from now on; `shown` is what a recording is told of it.
    pub fn reload(&self, live: Live, shown: impl FnOnce() -> serde_json::Value) {
        let mut turn = self.turn();
        let number = turn.as_mut().map_or(0, |turn| turn.live(shown()));
        self.live.store(Arc::new(Live { number, ..live }));
    }

    /// The random numbers of the next request.
    #[must_use]
    pub fn next_rng(&self) -> attache_types::rng::PickRng {
        attache_types::rng::for_request(self.seed, self.sequence.fetch_add(1, Relaxed))
    }
}
