//! One model server: its specification from discovery, and the live state that Attaché keeps for it.

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

/// Endpoints in the order in which Envoy should try them.
pub type Picks = SmallVec<[Arc<Endpoint>; 4]>;

/// The serving engine of an endpoint, which determines the names of its metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// vLLM, and servers with its metric names (`attache sim`, llm-d's simulator).
    #[default]
    Vllm,
    /// SGLang, started with `--enable-metrics`.
    Sglang,
    /// TensorRT-LLM with its own `trtllm-serve`.
    TrtllmServe,
    /// Triton with the TensorRT-LLM backend.
    #[serde(rename = "triton-tensorrt-llm")]
    Triton,
    /// xLLM with its own metric names.
    Xllm,
    /// AstrAI, which reports its load as JSON at `/stats`.
    Astrai,
    /// A server without known metrics: never scraped, so the ledger alone shows its load.
    None,
}

impl Engine {
    /// The path at which the engine itself serves its metrics.
    #[must_use]
    pub fn metrics_path(self) -> &'static str {
        match self {
            // `/metrics` has statistics of iterations there, as JSON.
            Self::TrtllmServe => "/prometheus/metrics",
            Self::Astrai => "/stats",
            Self::Vllm | Self::Sglang | Self::Triton | Self::Xllm | Self::None => "/metrics",
        }
    }
}

/// Where Attaché scrapes an endpoint's metrics.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct MetricsSource {
    /// URL scheme: `http` or `https`.
    pub scheme: Arc<str>,
    /// The metrics port, if it differs from the serving port.
    pub port: Option<u16>,
    /// The metrics path, if it differs from the engine's own ([`Engine::metrics_path`]).
    pub path: Option<Arc<str>>,
}

impl Default for MetricsSource {
    fn default() -> Self {
        Self { scheme: "http".into(), port: None, path: None }
    }
}

/// Specification of one endpoint, from discovery.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
pub struct EndpointSpec {
    /// Display name: the pod's name, or the address.
    pub name: Arc<str>,
    /// Distinguishes endpoints that had the same address one after the other: the pod's UID, if there is one.
    pub uid: Option<Arc<str>>,
    /// The address to which Envoy sends requests.
    pub address: SocketAddr,
    /// Number of the endpoint among the ports of its pod; `None` if the pod has one port. Each port has an engine,
    /// whose data-parallel rank is this number.
    #[serde(default)]
    pub rank: Option<u16>,
    /// The endpoint's labels from discovery.
    pub labels: BTreeMap<Arc<str>, Arc<str>>,
    /// The serving engine, which determines the metric names.
    pub engine: Engine,
    /// Where the metrics are scraped.
    pub metrics: MetricsSource,
    /// Whether the endpoint is draining: it gets no new requests, and it leaves when its running requests have ended.
    pub draining: bool,
}

impl EndpointSpec {
    /// An endpoint of which only the address is known; all else has default values.
    #[must_use]
    pub fn at(address: SocketAddr) -> Self {
        Self {
            name: address.to_string().into(),
            uid: None,
            address,
            rank: None,
            labels: BTreeMap::new(),
            engine: Engine::default(),
            metrics: MetricsSource::default(),
            draining: false,
        }
    }

    /// Whether metrics are scraped at the port that requests go to.
    #[must_use]
    pub fn metrics_at_serving_port(&self) -> bool {
        self.metrics.port.is_none_or(|port| port == self.address.port())
    }

    /// Returns the URL to scrape; `None` for an engine without metrics.
    #[must_use]
    pub fn metrics_url(&self) -> Option<String> {
        if self.engine == Engine::None {
            return None;
        }
        let host = SocketAddr::new(self.address.ip(), self.metrics.port.unwrap_or(self.address.port()));
        let path = self.metrics.path.as_deref().unwrap_or(self.engine.metrics_path());
        Some(format!("{}://{host}{path}", self.metrics.scheme))
    }
}

/// Live state of an endpoint. Every decision reads it for every endpoint, so it is contiguous: ledger and health share
/// the first cache line, and the speed follows.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Live {
    /// Requests in flight to the endpoint.
    pub ledger: EndpointLedger,
    /// Outcomes of the endpoint's requests, and its ejection.
    pub health: EndpointHealth,
    /// The endpoint's learned speed.
    pub speed: EndpointSpeed,
    /// Requests in flight to each data-parallel rank.
    pub ranks: Ranks,
}

/// One endpoint of a pool, shared by all snapshots that contain it.
#[derive(Debug)]
pub struct Endpoint {
    /// Number of the endpoint in its pool; never reused.
    pub id: EndpointId,
    /// The specification from discovery.
    pub spec: Arc<EndpointSpec>,
    /// The address as `ip:port` for Envoy, IPv6 in brackets.
    pub authority: Arc<str>,
    /// Roles of the endpoint, from its labels.
    pub roles: Roles,
    /// Location of the endpoint (host, rack, zone, region), from its labels.
    pub place: Place,
    /// The live state, which survives a change of the specification.
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
    /// Creates an endpoint with an empty ledger in a pool of its own.
    #[must_use]
    pub fn new(id: EndpointId, spec: impl Into<Arc<EndpointSpec>>) -> Self {
        Self::in_pool(id, spec, &Arc::default())
    }

    /// Creates an endpoint with an empty ledger; its initial speed is the pool's.
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

    /// Whether AIBrix's label marks the server as one that does both prefill and decode itself.
    #[must_use]
    pub fn is_combined(&self) -> bool {
        self.spec.labels.get(COMBINED_LABEL).is_some_and(|value| &**value == "true")
    }

    /// Returns the endpoint with a new specification and the same live state.
    #[must_use]
    pub fn respecified(&self, spec: Arc<EndpointSpec>) -> Self {
        let authority = spec.address.to_string().into();
        let (roles, place) = (Roles::of_labels(&spec.labels), Place::of_labels(&spec.labels));
        Self { id: self.id, authority, roles, place, spec, live: self.live.clone() }
    }
}
