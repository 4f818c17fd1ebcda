//! Where the endpoints of a pool come from: DNS names, a file, pods, and InferencePools as pools. `config` makes these
//! settings and `discovery` follows them; neither needs the other.

use crate::{Engine, MetricsSource};
use std::path::PathBuf;
use std::time::Duration;

/// Most data-parallel ranks of one pod, as in `InferencePool`.
const MAX_TARGET_PORTS: usize = 8;

/// A DNS name; each of its addresses is an endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsSource {
    /// Host name to resolve.
    pub host: String,
    /// Port of the model server at every address.
    pub port: u16,
    /// Time between two lookups.
    pub refresh: Duration,
    /// Inference engine of the endpoints, which decides the metric names.
    pub engine: Engine,
    /// Scheme, port and path of the metrics of each endpoint.
    pub metrics: MetricsSource,
}

/// A file that lists endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSource {
    /// Path of the endpoints file.
    pub path: PathBuf,
    /// Whether Attaché reads the file again when it changes.
    pub watch: bool,
    /// Inference engine of the endpoints, which decides the metric names.
    pub engine: Engine,
    /// Scheme, port and path of the metrics of each endpoint.
    pub metrics: MetricsSource,
}

/// The pods of a Kubernetes namespace that are the endpoints of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesSource {
    /// Namespace of the pods. `None` selects the variable NAMESPACE, then the namespace of the service account or of
    /// the kubeconfig's context, then `default`.
    pub namespace: Option<String>,
    /// Selects the pods.
    pub pods: PodsOf,
    /// Engine of a pod whose labels name none.
    pub engine: Engine,
    /// Scheme, port and path of the metrics of each endpoint.
    pub metrics: MetricsSource,
    /// Whether the pool exists because its `InferencePool` was found. It then ends as a whole with it, and its
    /// endpoints stay for requests in flight.
    pub found: bool,
}

/// Selects the pods of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodsOf {
    /// By an `InferencePool`, which also names the ports.
    Pool {
        /// Name of the `InferencePool`.
        name: String,
        /// API group of the `InferencePool`.
        group: PoolGroup,
    },
    /// By labels of the pods.
    Selector {
        /// Label selector in the syntax of `kubectl get -l`.
        selector: String,
        /// Port of each rank. If empty: the pod's label `model.aibrix.ai/port`, else 8000.
        target_ports: Vec<u16>,
    },
}

/// Selects the `InferencePool`s of a namespace that become pools while they exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSearch {
    /// Namespace of the objects; `None` as in [`KubernetesSource`].
    pub namespace: Option<String>,
    /// API group of the objects.
    pub group: PoolGroup,
    /// Label selector in the syntax of `kubectl get -l`.
    pub selector: String,
    /// Engine of a pod whose labels name none.
    pub engine: Engine,
    /// Scheme, port and path of the metrics of each endpoint.
    pub metrics: MetricsSource,
}

/// The API group of `InferencePool`, which also decides its version.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PoolGroup {
    /// `inference.networking.k8s.io/v1`.
    #[default]
    Stable,
    /// `inference.networking.x-k8s.io/v1alpha2`.
    Experimental,
}

impl PoolGroup {
    /// Every supported API group.
    pub const ALL: [Self; 2] = [Self::Stable, Self::Experimental];

    /// Name of the group, as in `apiVersion`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stable => "inference.networking.k8s.io",
            Self::Experimental => "inference.networking.x-k8s.io",
        }
    }

    /// Version of `InferencePool` in this group.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::Stable => "v1",
            Self::Experimental => "v1alpha2",
        }
    }

    /// The group of this name, if Attaché supports it.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.as_str() == name)
    }
}

/// Checks whether these can be the ports of a pod's ranks.
///
/// # Errors
/// If there are too many or too few, or one is 0 or repeated.
pub fn check_ports(ports: &[u16]) -> Result<(), String> {
    if !(1..=MAX_TARGET_PORTS).contains(&ports.len()) {
        return Err(format!("got {} ports, 1 to {MAX_TARGET_PORTS} are allowed", ports.len()));
    }
    if ports.contains(&0) {
        return Err("got port 0, 1 to 65535 are allowed".to_owned());
    }
    let twice = ports.iter().enumerate().find(|(i, port)| ports.iter().take(*i).any(|p| p == *port));
    twice.map_or(Ok(()), |(_, port)| Err(format!("port {port} is named twice")))
}
