//! Where the endpoints of a pool are found: DNS names, a file, pods, and InferencePools as pools.

use attache_pool::{Engine, MetricsSource};
use std::path::PathBuf;
use std::time::Duration;

/// Data-parallel ranks of one pod, as `InferencePool` allows.
pub const MAX_TARGET_PORTS: usize = 8;

/// A DNS name whose addresses are endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsSource {
    /// The name.
    pub host: String,
    /// The port of every address.
    pub port: u16,
    /// How often it is resolved.
    pub refresh: Duration,
    /// The engine behind it.
    pub engine: Engine,
    /// Where its metrics are.
    pub metrics: MetricsSource,
}

/// A file that lists endpoints.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileSource {
    /// Where it is.
    pub path: PathBuf,
    /// It is read again when it changes.
    pub watch: bool,
    /// The engine of its endpoints.
    pub engine: Engine,
    /// Where their metrics are.
    pub metrics: MetricsSource,
}

/// Which pods of a Kubernetes namespace are the endpoints of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KubernetesSource {
    /// The namespace. When `None`: the variable NAMESPACE, else that of the service account or of the kubeconfig's context, else `default`.
    pub namespace: Option<String>,
    /// What tells them from other pods.
    pub pods: PodsOf,
    /// The engine of a pod whose labels name none.
    pub engine: Engine,
    /// Where metrics are.
    pub metrics: MetricsSource,
    /// The pool has been found, and goes as a whole when its `InferencePool` does: its endpoints stay for requests that are under way.
    pub found: bool,
}

/// What tells the pods of a pool from others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PodsOf {
    /// An `InferencePool`, which also names the ports.
    Pool {
        /// Its name.
        name: String,
        /// The API group that it is of.
        group: PoolGroup,
    },
    /// Labels.
    Selector {
        /// As `kubectl get -l` takes it.
        selector: String,
        /// The port of each rank. Empty: the pod's label `model.aibrix.ai/port`, else 8000.
        target_ports: Vec<u16>,
    },
}

/// Which `InferencePool`s of a namespace are pools, for as long as they are there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolSearch {
    /// The namespace; as in [`KubernetesSource`] when `None`.
    pub namespace: Option<String>,
    /// The API group that they are of.
    pub group: PoolGroup,
    /// Their labels, as `kubectl get -l` takes them.
    pub selector: String,
    /// The engine of a pod whose labels name none.
    pub engine: Engine,
    /// Where metrics are.
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
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Stable, Self::Experimental];

    /// Its name.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stable => "inference.networking.k8s.io",
            Self::Experimental => "inference.networking.x-k8s.io",
        }
    }

    /// The version of `InferencePool` in it.
    #[must_use]
    pub fn version(self) -> &'static str {
        match self {
            Self::Stable => "v1",
            Self::Experimental => "v1alpha2",
        }
    }

    /// The group of this name.
    #[must_use]
    pub fn of(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|group| group.as_str() == name)
    }
}

/// Whether these can be the ports of a pod's ranks.
///
/// # Errors
/// Why not.
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
