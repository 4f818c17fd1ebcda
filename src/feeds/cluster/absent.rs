//! A build without the feature `full` has no Kubernetes client.

use super::Following;
use attache_admin::guard::Guard;
use attache_config::settings::{KubernetesSource, PoolSearch};
use attache_discovery::kube::catalogue::Finding;
use attache_discovery::kube::rules::Rules;
use attache_pool::PoolEvent;
use attache_pool::writer::SourceId;
use attache_scheduling::router::RuleStore;
use attache_serving::health::Readiness;
use attache_types::clock::Clock;
use std::sync::Arc;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A client that can't be connected.
#[derive(Debug)]
pub(crate) struct Cluster;

impl Cluster {
    /// Creates a cluster without function.
    #[must_use]
    pub(crate) fn new(_: Clock) -> Self {
        Self
    }

    /// Does nothing.
    pub(crate) fn trust_headers(&self, _: bool) {}

    /// Does nothing.
    pub(crate) fn write_unasked(&self) {}

    /// Always fails.
    ///
    /// # Errors
    /// Always, since this build has no Kubernetes client.
    #[expect(clippy::unused_async, reason = "its twin with the feature waits")]
    pub(crate) async fn connect(&mut self) -> anyhow::Result<()> {
        anyhow::bail!("this build can't ask Kubernetes (feature `full`)")
    }

    /// Does nothing.
    #[must_use]
    #[expect(clippy::too_many_arguments, reason = "all that one who follows needs")]
    pub(crate) fn follow(
        &self,
        _: &Arc<str>,
        _: &KubernetesSource,
        _: Option<Rules>,
        _: SourceId,
        _: mpsc::Sender<PoolEvent>,
        _: Arc<RuleStore>,
        _: CancellationToken,
    ) -> Option<Following> {
        None
    }

    /// Does nothing.
    #[must_use]
    pub(crate) fn search(&self, _: &PoolSearch, _: CancellationToken) -> Option<(String, watch::Receiver<Finding>)> {
        None
    }

    /// Always fails.
    ///
    /// # Errors
    /// Always, since this build has no Kubernetes client.
    pub(crate) fn guard(&self) -> anyhow::Result<Guard> {
        anyhow::bail!("this build can't ask Kubernetes (feature `full`)")
    }

    /// Does nothing.
    pub(crate) fn lead(
        &self,
        _: &str,
        _: Option<&str>,
        _: Option<&Readiness>,
        _: CancellationToken,
    ) -> Option<JoinHandle<()>> {
        None
    }
}
