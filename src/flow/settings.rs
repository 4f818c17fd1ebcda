//! What an operator says about a pool's queues.

use super::admitter::Admitter;
use super::ceiling::Ceiling;
use super::fairness::{Fairness, global_strict};
use super::ordering::{Ordering, fcfs};
use super::registry::Descriptor;
use super::room::SharedRoom;
use super::running::EvictRunning;
use super::saturation::Detector;
use attache_scheduling::plugin::ParamError;
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// 60 s without an endpoint: a server starts within that time, or none will. llm-d's `defaultRequestTTL` is as long.
pub const DEFAULT_EMPTY_TTL: Duration = Duration::from_secs(60);
/// 5,000 requests in a band, as llm-d has it.
pub const DEFAULT_BAND_REQUESTS: u64 = 5_000;
/// 1 GB of bodies in a band, as both have it.
pub const DEFAULT_BAND_BYTES: u64 = 1_000_000_000;
/// 5 minutes: a flow with nothing queued and nothing under way is forgotten after that time, as both have it.
pub const DEFAULT_FLOW_IDLE: Duration = Duration::from_secs(300);
/// 10,000 flows in a band: who names more shares one flow with all others beyond them, so that new names buy no turns and no memory.
pub const DEFAULT_MAX_FLOWS: usize = 10_000;

/// Who gives way when a band holds as much as it may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Overflow {
    /// Whoever comes, as GIE and llm-d have it: one flow can fill a band.
    #[default]
    Newcomer,
    /// The last of the flow that has most in the queue, if that is not the newcomer's.
    LongestFlow,
}

/// A band.
#[derive(Clone, Debug)]
pub struct BandSettings {
    /// The order within a flow.
    pub ordering: Arc<dyn Ordering>,
    /// Whose turn it is; copied empty into each band.
    pub fairness: Arc<dyn Fairness>,
    /// Requests that may wait.
    pub max_requests: u64,
    /// Bytes of those.
    pub max_bytes: u64,
    /// Who gives way.
    pub overflow: Overflow,
    /// How long a request may wait; as long as in all bands when `None`.
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

/// A pool's queues.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Requests wait while the pool is full. Without queues, sheddable requests are refused while the pool is saturated, and all others go on.
    pub queue: bool,
    /// Bands that are not like the others, by priority.
    pub bands: BTreeMap<i32, BandSettings>,
    /// Others of a priority below 0, where they are not like the rest.
    pub sheddable_band: Option<BandSettings>,
    /// All others.
    pub default_band: BandSettings,
    /// Requests that may wait in all bands together.
    pub max_requests: u64,
    /// Bytes of those.
    pub max_bytes: u64,
    /// What these queues and those of other pools may hold together.
    pub shared: Option<Arc<SharedRoom>>,
    /// How long a request may wait that does not say it; as long as its client does when `None`.
    pub ttl: Option<Duration>,
    /// How long it may wait while the pool has no endpoints.
    pub empty_ttl: Duration,
    /// Shares of flows that are not 1: a flow of 2 may have twice as much.
    pub weights: HashMap<Arc<str>, f64>,
    /// What waits with a priority below 0 gives way to what is more important when there is no room for both.
    pub evict_sheddable: bool,
    /// And so does what is under way.
    pub evict_running: EvictRunning,
    /// How long a flow is remembered that has nothing here.
    pub flow_idle: Duration,
    /// Flows that are told apart in a band.
    pub max_flows: usize,
    /// The header that names a request's flow where the process's configuration does not say how tenants are found.
    pub user_header: Option<&'static str>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            queue: true,
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
    /// The settings of the band of this priority.
    #[must_use]
    pub fn band(&self, priority: i32) -> &BandSettings {
        let sheddable = || self.sheddable_band.as_ref().filter(|_| priority < 0);
        self.bands.get(&priority).or_else(sheddable).unwrap_or(&self.default_band)
    }

    /// How long a request of this priority may wait that does not say it; `None` when its age is no reason to reject it.
    #[must_use]
    pub fn ttl(&self, priority: i32) -> Option<Duration> {
        self.band(priority).ttl.or(self.ttl)
    }

    /// The share of a flow.
    #[must_use]
    pub fn weight(&self, flow: &str) -> f64 {
        self.weights.get(flow).copied().filter(|w| w.is_finite() && *w > 0.0).unwrap_or(1.0)
    }
}

/// All that a pool's queues are made of.
#[derive(Clone, Debug)]
pub struct PoolFlow {
    /// Bands, limits and shares.
    pub settings: Settings,
    /// How full the pool is.
    pub detector: Arc<dyn Detector>,
    /// How much of it a band may use, and by which parameters.
    pub ceiling: (&'static Descriptor<dyn Ceiling>, Value),
    /// Who is turned away at once.
    pub admitters: Vec<Arc<dyn Admitter>>,
    /// The configuration that says so: equal ones make equal queues.
    pub said: Value,
}

impl PoolFlow {
    /// A new ceiling.
    ///
    /// # Errors
    /// When its parameters are none of its own.
    pub fn ceiling(&self) -> Result<Box<dyn Ceiling>, ParamError> {
        let (descriptor, parameters) = &self.ceiling;
        (descriptor.build)(parameters)
    }
}
