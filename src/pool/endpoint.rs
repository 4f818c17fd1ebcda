//! One model server: what discovery says of it, and what the picker keeps beside it.

use super::health::EndpointHealth;
use super::ledger::EndpointLedger;
use super::place::Place;
use super::ranks::Ranks;
use super::role::{COMBINED_LABEL, Roles};
use super::speed::{EndpointSpeed, PoolSpeed};
use attache_types::ids::EndpointId;
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::Deref;
use std::sync::Arc;

/// Endpoints in the order in which they should be tried.
pub type Picks = SmallVec<[Arc<Endpoint>; 4]>;

/// The serving engine, which decides the names of its metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// vLLM, and servers that speak its metric names (`attache sim`, llm-d's simulator).
    #[default]
    Vllm,
    /// SGLang, started with `--enable-metrics`.
    Sglang,
    /// TensorRT-LLM's own `trtllm-serve`.
    TrtllmServe,
    /// Triton with the TensorRT-LLM backend.
    #[serde(rename = "triton-tensorrt-llm")]
    Triton,
    /// xLLM.
    Xllm,
    /// AstrAI, which tells its load as JSON at `/stats`.
    Astrai,
    /// A server without metrics that we know: never scraped, the ledger alone decides.
    None,
}

/// Where most servers have their metrics.
pub const DEFAULT_METRICS_PATH: &str = "/metrics";
/// Where AstrAI tells its load.
pub const ASTRAI_STATS_PATH: &str = "/stats";

/// Where an endpoint's metrics are read.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct MetricsSource {
    /// `http` or `https`.
    pub scheme: Arc<str>,
    /// The port, when it isn't the serving port.
    pub port: Option<u16>,
    /// The path. [`DEFAULT_METRICS_PATH`] of an AstrAI server stands for [`ASTRAI_STATS_PATH`].
    pub path: Arc<str>,
}

impl Default for MetricsSource {
    fn default() -> Self {
        Self { scheme: "http".into(), port: None, path: DEFAULT_METRICS_PATH.into() }
    }
}

/// What discovery says about one endpoint.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct EndpointSpec {
    /// The name people know it by (a pod's name, or the address).
    pub name: Arc<str>,
    /// What tells it from another endpoint that had the same address before it: a pod's UID where there is one.
    pub uid: Option<Arc<str>>,
    /// Where Envoy sends requests.
    pub address: SocketAddr,
    /// Labels as discovery gives them.
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// Decides the metric names.
    pub engine: Engine,
    /// Where the metrics are.
    pub metrics: MetricsSource,
    /// Gets nothing new: running requests end, then it goes.
    pub draining: bool,
}

impl EndpointSpec {
    /// An endpoint of which only the address is known.
    #[must_use]
    pub fn at(address: SocketAddr) -> Self {
        Self {
            name: address.to_string().into(),
            uid: None,
            address,
            labels: BTreeMap::new(),
            engine: Engine::default(),
            metrics: MetricsSource::default(),
            draining: false,
        }
    }

    /// The URL that is scraped; `None` for an engine without metrics.
    #[must_use]
    pub fn metrics_url(&self) -> Option<String> {
        if self.engine == Engine::None {
            return None;
        }
        let host = SocketAddr::new(self.address.ip(), self.metrics.port.unwrap_or(self.address.port()));
        // AstrAI has no page at the path that is everybody else's.
        let is_default = *self.metrics.path == *DEFAULT_METRICS_PATH;
        let path = if self.engine == Engine::Astrai && is_default { ASTRAI_STATS_PATH } else { &*self.metrics.path };
        Some(format!("{}://{host}{path}", self.metrics.scheme))
    }
}

/// What the picker keeps of an endpoint. Every decision reads it of every endpoint, so it lies in one piece: the ledger and the health share
/// the first cache line, the speed follows.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Live {
    /// What was sent there and has not ended.
    pub ledger: EndpointLedger,
    /// What became of what was sent there.
    pub health: EndpointHealth,
    /// How fast it has shown to be.
    pub speed: EndpointSpeed,
    /// What was sent to its data-parallel ranks and has not ended.
    pub ranks: Ranks,
}

/// One endpoint of a pool, shared by all snapshots that hold it.
#[derive(Debug)]
pub struct Endpoint {
    /// Its number in the pool.
    pub id: EndpointId,
    /// What discovery says.
    pub spec: Arc<EndpointSpec>,
    /// `ip:port` as Envoy wants it, IPv6 in brackets.
    pub authority: Arc<str>,
    /// What it is there for, by its labels.
    pub roles: Roles,
    /// Where it stands, by its labels.
    pub place: Place,
    /// What the picker keeps of it. Survives a change of the spec.
    pub live: Arc<Live>,
}

impl Deref for Endpoint {
    type Target = Live;

    #[inline]
    fn deref(&self) -> &Live {
        &self.live
    }
}

impl Endpoint {
    /// A new endpoint with an empty ledger, alone in its pool.
    #[must_use]
    pub fn new(id: EndpointId, spec: impl Into<Arc<EndpointSpec>>) -> Self {
        Self::in_pool(id, spec, &Arc::default())
    }

    /// A new endpoint with an empty ledger, thought to be as fast as its pool.
    #[must_use]
    pub fn in_pool(id: EndpointId, spec: impl Into<Arc<EndpointSpec>>, pool: &Arc<PoolSpeed>) -> Self {
        let spec = spec.into();
        Self {
            id,
            authority: spec.address.to_string().into(),
            roles: Roles::of_labels(&spec.labels),
            place: Place::of_labels(&spec.labels),
            spec,
            live: Arc::new(Live {
                ledger: EndpointLedger::default(),
                health: EndpointHealth::default(),
                speed: EndpointSpeed::of(pool.clone()),
                ranks: Ranks::default(),
            }),
        }
    }

    /// Whether AIBrix's label says that it does both stages of a request on its own.
    #[must_use]
    pub fn is_combined(&self) -> bool {
        self.spec.labels.get(COMBINED_LABEL).is_some_and(|value| &**value == "true")
    }

    /// The same endpoint with a new spec.
    #[must_use]
    pub fn respecified(&self, spec: Arc<EndpointSpec>) -> Self {
        let authority = spec.address.to_string().into();
        let (roles, place) = (Roles::of_labels(&spec.labels), Place::of_labels(&spec.labels));
        Self { id: self.id, authority, roles, place, spec, live: self.live.clone() }
    }
}
