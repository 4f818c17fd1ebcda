//! Tasks of discovery through Kubernetes: one client and one follower of each kind for all pools, a task for each pool
//! with pods, one for the lease with leader election, and the guard of the admin port if the cluster authorizes access.

#[cfg_attr(not(feature = "full"), path = "cluster/absent.rs")]
mod connected;

use attache_config::settings::KubernetesSource;
use attache_discovery::kube::KubeStats;
use attache_discovery::kube::rules::Rules;
pub(crate) use connected::Cluster;
use std::sync::Arc;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A task that follows the pods of a pool.
#[derive(Debug)]
pub(crate) struct Following {
    source: KubernetesSource,
    stats: Arc<KubeStats>,
    stop: CancellationToken,
    task: JoinHandle<Rules>,
}

impl Following {
    /// Selection of the pods.
    #[must_use]
    pub(crate) fn source(&self) -> &KubernetesSource {
        &self.source
    }

    /// Counters of the task.
    #[must_use]
    pub(crate) fn stats(&self) -> Arc<KubeStats> {
        self.stats.clone()
    }

    /// Ends the task, which sends nothing afterwards. Returns its known rules.
    pub(crate) async fn end(self) -> Rules {
        self.stop.cancel();
        // A task that has panicked sends nothing either.
        self.task.await.unwrap_or_default()
    }
}
