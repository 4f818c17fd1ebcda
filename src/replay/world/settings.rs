//! Configuration of a simulation: picker, servers, changes to the fleet, delays of the picker's signals. Read by
//! [`super::World`]; pure.

use crate::front::FrontConfig;
use attache_pool::EndpointSpec;
use attache_sim::engine::EngineConfig;
use attache_sync::MemoryBusSettings;
use attache_types::clock::Timestamp;
use std::sync::Arc;
use std::time::Duration;

/// A change to the fleet during a run.
#[derive(Clone, Debug, PartialEq)]
pub enum FleetChange {
    /// A server with this engine joins, with this value of the role label (see [`attache_pool::role`]).
    Join(Box<EngineConfig>, Option<Arc<str>>),
    /// The server at this position dies, and its requests are lost.
    Lose(usize),
    /// The server at this position restarts at once with an empty cache; its requests are lost.
    Restart(usize),
}

/// A [`FleetChange`] with its time.
#[derive(Clone, Debug, PartialEq)]
pub struct TimedChange {
    /// Time of the change, from the start of the workload.
    pub at: Timestamp,
    /// The change to the fleet.
    pub change: FleetChange,
}

/// Delays and losses of the signals that the picker receives.
#[derive(Clone, Debug, PartialEq)]
pub struct SignalSettings {
    /// Interval between two scrapes of each server.
    pub metrics_every: Duration,
    /// Delay from a scrape until the picker has the metrics.
    pub metrics_delay: Duration,
    /// Number of KV blocks that metrics report, for engines that report more than they have. The true number when
    /// `None`.
    pub reported_blocks: Option<u32>,
    /// Delay until discovery reports a server that joined or left.
    pub discovery_delay: Duration,
    /// KV events; `None` when the engines publish none.
    pub kv_events: Option<KvEventSettings>,
}

/// Delay and loss of KV events.
#[derive(Clone, Debug, PartialEq)]
pub struct KvEventSettings {
    /// Delay from an engine to the picker.
    pub delay: Duration,
    /// Share of the batches that are lost, 0..1. The next batch shows the gap, and a replay brings
    /// them after another two delays.
    pub loss: f64,
}

/// Configuration of one simulation: pickers, servers, signals, changes.
#[derive(Debug)]
pub struct WorldConfig {
    /// Configurations of the pickers, at least one. Each has a pool and a prefix cache of its own.
    pub pickers: Vec<FrontConfig>,
    /// Delay and loss of the bus between the pickers; `None` if they share nothing.
    pub bus: Option<MemoryBusSettings>,
    /// Servers with their endpoints, by position in the fleet.
    pub servers: Vec<(EndpointSpec, EngineConfig)>,
    /// Engines behind the endpoint of each server, at least 1: vLLM's data-parallel ranks, each with a cache of its
    /// own.
    pub ranks: u16,
    /// Delays and losses of the picker's signals.
    pub signals: SignalSettings,
    /// Changes to the fleet, in order of time.
    pub changes: Vec<TimedChange>,
    /// Seed of lost KV events. The picker's seed is in its configuration.
    pub seed: u64,
}
