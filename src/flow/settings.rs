//! Settings of a pool's flow control, as an operator configures them.

use super::admitter::Admitter;
use super::capacity::SharedCapacity;
use super::ceiling::{Ceiling, fixed};
use super::fairness::{Fairness, global_strict};
use super::ordering::{Ordering, fcfs};
use super::registry::PolicyDescriptor;
use super::running::EvictRunning;
use super::saturation::recompute::Recompute;
use super::saturation::{Detector, Gauge, View};
use attache_scheduling::plugin::ParamError;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// 60 s without an endpoint: a model server usually starts within that time. llm-d's `defaultRequestTTL` is equal.
pub const DEFAULT_EMPTY_TTL: Duration = Duration::from_secs(60);
/// 5,000 requests in a band, as llm-d has it.
pub const DEFAULT_BAND_REQUESTS: u64 = 5_000;
/// 1 GB of bodies in a band, as in GIE and llm-d.
pub const DEFAULT_BAND_BYTES: u64 = 1_000_000_000;
/// 5 minutes: a flow with no request queued or in flight is forgotten after that time, as in GIE and llm-d.
pub const DEFAULT_FLOW_IDLE: Duration = Duration::from_secs(300);
/// 10,000 flows in a band. Further names share one flow, so that a client gains neither turns nor memory by new names.
pub(crate) const DEFAULT_MAX_FLOWS: usize = 10_000;

/// Which request is rejected or evicted when a band is at its limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// The newcomer, as in GIE and llm-d: one flow can fill a band.
    #[default]
    Newcomer,
    /// The last request of the longest flow, unless the newcomer belongs to that flow.
    LongestFlow,
}

/// Settings of one band, that is, of one priority.
#[derive(Clone, Debug)]
pub struct BandSettings {
    /// The order of requests within a flow.
    pub ordering: Arc<dyn Ordering>,
    /// Selects the next flow; each band gets an empty copy.
    pub fairness: Arc<dyn Fairness>,
    /// Most requests in the band's queue.
    pub max_requests: u64,
    /// Most bytes in the band's queue.
    pub max_bytes: u64,
    /// Which request leaves when the band is at its limit.
    pub overflow: Overflow,
    /// Time to live in this band's queue; `None` selects [`Settings::ttl`].
    pub ttl: Option<Duration>,
}

impl Default for BandSettings {
    fn default() -> Self {
        Self {
            ordering: Arc::new(fcfs::Fcfs),
            fairness: Arc::new(global_strict::GlobalStrict::default()),
            max_requests: DEFAULT_BAND_REQUESTS,
            max_bytes: DEFAULT_BAND_BYTES,
            overflow: Overflow::default(),
            ttl: None,
        }
    }
}

/// Settings of a pool's flow control.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bands with settings of their own, by priority.
    pub bands: BTreeMap<i32, BandSettings>,
    /// Settings of the other bands with a priority below 0; `None` selects `default_band`.
    pub sheddable_band: Option<BandSettings>,
    /// Settings of all other bands.
    pub default_band: BandSettings,
    /// Most queued requests in all bands together.
    pub max_requests: u64,
    /// Most queued bytes in all bands together.
    pub max_bytes: u64,
    /// Queue capacity in bytes that this pool shares with others.
    pub shared: Option<Arc<SharedCapacity>>,
    /// Time to live in the queue without one of the request or band; `None` waits as long as the client does.
    pub ttl: Option<Duration>,
    /// Time to live while the pool has no endpoints and none of the above applies.
    pub empty_ttl: Duration,
    /// Shares of flows other than 1: a flow of share 2 may get twice as much service.
    pub weights: HashMap<Arc<str>, f64>,
    /// Whether queued requests with a priority below 0 are evicted for more important ones when the queue is full.
    pub evict_sheddable: bool,
    /// Which requests in flight are preempted for queued ones.
    pub evict_running: EvictRunning,
    /// Idle time after which a flow is forgotten.
    pub flow_idle: Duration,
    /// Flows in a band that have a queue of their own; further ones share one.
    pub max_flows: usize,
    /// Request header that names the flow, where the configuration names no source of tenants.
    pub user_header: Option<&'static str>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            bands: BTreeMap::new(),
            sheddable_band: None,
            default_band: BandSettings::default(),
            max_requests: u64::MAX,
            max_bytes: u64::MAX,
            shared: None,
            ttl: None,
            empty_ttl: DEFAULT_EMPTY_TTL,
            weights: HashMap::new(),
            evict_sheddable: true,
            evict_running: EvictRunning::default(),
            flow_idle: DEFAULT_FLOW_IDLE,
            max_flows: DEFAULT_MAX_FLOWS,
            user_header: None,
        }
    }
}

impl Settings {
    /// Settings of the band of this priority.
    #[must_use]
    pub fn band(&self, priority: i32) -> &BandSettings {
        let sheddable = || self.sheddable_band.as_ref().filter(|_| priority < 0);
        self.bands.get(&priority).or_else(sheddable).unwrap_or(&self.default_band)
    }

    /// Time to live in the queue for a request of this priority that carries none; `None` if its age never rejects it.
    #[must_use]
    pub fn ttl(&self, priority: i32) -> Option<Duration> {
        self.band(priority).ttl.or(self.ttl)
    }

    /// The share of a flow, 1 by default.
    #[must_use]
    pub fn weight(&self, flow: &str) -> f64 {
        self.weights.get(flow).copied().filter(|w| w.is_finite() && *w > 0.0).unwrap_or(1.0)
    }
}

/// Which requests a pool queues.
#[derive(Clone, Debug)]
pub enum Queueing {
    /// All, while the detector finds the pool saturated.
    Saturated(Arc<dyn Detector>),
    /// Long prompts, while servers compute evicted conversations again: see [`recompute`](super::saturation::recompute).
    /// No request is rejected for that, so one that the queue can't hold proceeds.
    LongPrompts(Recompute),
}

impl Queueing {
    /// Measures the saturation of the pool.
    #[must_use]
    pub fn gauge(&self, view: &View<'_>) -> Gauge {
        match self {
            Self::Saturated(detector) => detector.gauge(view),
            Self::LongPrompts(recompute) => Gauge { delay: recompute.delay(view), ..Gauge::FREE },
        }
    }

    /// When the pool may become less full without any event; `None` if only events change it.
    #[must_use]
    pub fn changes_in(&self, view: &View<'_>) -> Option<Duration> {
        match self {
            Self::Saturated(detector) => detector.changes_in(view),
            Self::LongPrompts(recompute) => recompute.changes_in(view),
        }
    }
}

/// Everything that a pool's flow control is built from.
#[derive(Clone, Debug)]
pub struct PoolFlow {
    /// Bands, limits and shares of flows.
    pub settings: Settings,
    /// Which requests are queued; `None` queues none.
    pub queueing: Option<Queueing>,
    /// Refuses sheddable requests while it finds the pool saturated, and queues none of them for that.
    pub shedding: Option<Arc<dyn Detector>>,
    /// How much of the pool a band may use: the policy and its parameters.
    pub ceiling: (&'static PolicyDescriptor<dyn Ceiling>, Value),
    /// Policies that reject requests on arrival.
    pub admitters: Vec<Arc<dyn Admitter>>,
    /// The configuration that these values come from: equal ones with the same capacity make equal queues.
    pub said: Value,
}

impl PoolFlow {
    /// Flow control that holds long prompts back and otherwise sheds as `shedding` does. At most `max_bytes` of bodies
    /// are held. No request is rejected or evicted for another one, and priorities make no difference among them. A
    /// configuration has this without saying so.
    #[must_use]
    pub fn of_long_prompts(recompute: Recompute, shedding: Option<Self>, max_bytes: u64) -> Self {
        let default_band = BandSettings { ordering: Arc::new(recompute.ordering()), ..BandSettings::default() };
        let settings = Settings { default_band, max_bytes, evict_sheddable: false, ..Settings::default() };
        let ceiling = (&fixed::PLUGIN, Value::Null);
        let (queueing, shedding_by) = (Some(Queueing::LongPrompts(recompute)), shedding.and_then(|flow| flow.shedding));
        Self { settings, queueing, shedding: shedding_by, ceiling, admitters: Vec::new(), said: Value::Null }
    }

    /// Whether all requests are queued while the pool is saturated.
    #[must_use]
    pub fn queues_when_saturated(&self) -> bool {
        matches!(self.queueing, Some(Queueing::Saturated(_)))
    }

    /// Whether long prompts are all that is queued.
    #[must_use]
    pub fn holds_long_prompts(&self) -> bool {
        matches!(self.queueing, Some(Queueing::LongPrompts(_)))
    }

    /// Whether some band charges flows while their responses are generated.
    #[must_use]
    pub fn counts_output(&self) -> bool {
        let Settings { bands, sheddable_band, default_band, .. } = &self.settings;
        let mut all = bands.values().chain(sheddable_band).chain([default_band]);
        self.queueing.is_some() && all.any(|band| band.fairness.counts_output())
    }

    /// Creates a ceiling without state.
    ///
    /// # Errors
    /// When its parameters are invalid.
    pub fn ceiling(&self) -> Result<Box<dyn Ceiling>, ParamError> {
        let (descriptor, parameters) = &self.ceiling;
        (descriptor.build)(parameters)
    }
}
