//! The client of the API server and the tasks that use it.

use super::Following;
use attache_admin::guard::{AccessDecision, Caller, Guard};
use attache_config::settings::{KubernetesSource, PoolSearch};
use attache_discovery::kube::KubeStats;
use attache_discovery::kube::catalogue::Finding;
use attache_discovery::kube::informer::Informers;
use attache_discovery::kube::reviews::{Review, Reviews};
use attache_discovery::kube::rules::Rules;
use attache_discovery::kube::status::StatusWriter;
use attache_discovery::kube::{client, finder, lease, source};
use attache_pool::PoolEvent;
use attache_pool::writer::SourceId;
use attache_scheduling::router::RuleStore;
use attache_serving::health::Readiness;
use attache_types::clock::Clock;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Client of the API server, once it is needed.
pub(crate) struct Cluster {
    informers: Option<Arc<Informers>>,
    /// Whether this replica writes statuses: it holds the lease, or there is no lease.
    leads: watch::Sender<bool>,
    /// Whether an operator asked for conditions of `InferenceModel`s.
    asked: Arc<AtomicBool>,
    /// Whether Attaché trusts request headers about objective and priority.
    trusts_headers: watch::Sender<bool>,
    clock: Clock,
}

impl std::fmt::Debug for Cluster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cluster")
    }
}

/// Name of the readiness condition for leadership.
const LEADS: &str = "leadership (the Lease)";

impl Cluster {
    /// Creates a cluster without a connection.
    #[must_use]
    pub(crate) fn new(clock: Clock) -> Self {
        let (leads, trusts_headers) = (watch::Sender::new(false), watch::Sender::new(false));
        Self { informers: None, leads, asked: Arc::new(AtomicBool::new(true)), trusts_headers, clock }
    }

    /// Writes statuses without a lease, as far as this replica has the right.
    pub(crate) fn write_unasked(&self) {
        self.asked.store(false, Ordering::Relaxed);
        self.leads.send_replace(true);
    }

    /// Sets whether Attaché trusts request headers about objective and priority.
    pub(crate) fn trust_headers(&self, trusted: bool) {
        self.trusts_headers.send_replace(trusted);
    }

    /// Connects to the API server, unless that was done before.
    ///
    /// # Errors
    /// If this is not a pod of a cluster and there is no kubeconfig, or their content is invalid.
    pub(crate) async fn connect(&mut self) -> anyhow::Result<()> {
        if self.informers.is_none() {
            let context = "can't find a Kubernetes API server: this is no pod with a service account, and no usable \
                           kubeconfig (`KUBECONFIG`)";
            self.informers = Some(Informers::new(anyhow::Context::context(client::connect().await, context)?));
        }
        Ok(())
    }

    /// Follows the pods of `pool`, instead of the task whose rules are in `before`,
    /// if any. `None` without [`Cluster::connect`].
    #[must_use]
    #[expect(clippy::too_many_arguments, reason = "all that one who follows needs")]
    pub(crate) fn follow(
        &self,
        pool: &Arc<str>,
        source: &KubernetesSource,
        before: Option<Rules>,
        id: SourceId,
        events: mpsc::Sender<PoolEvent>,
        rules: Arc<RuleStore>,
        stop: CancellationToken,
    ) -> Option<Following> {
        let informers = self.informers.clone()?;
        let client = informers.client().clone();
        let namespace = source.namespace.clone().unwrap_or_else(|| client::default_namespace(&client));
        let stats: Arc<KubeStats> = Arc::default();
        let (pool, stats_kept) = (pool.clone(), stats.clone());
        let (reports, receiver) = watch::channel(Vec::new());
        let writes = (self.leads.subscribe(), self.asked.clone());
        let writer = StatusWriter::new(client, &namespace, receiver, writes, self.clock, stats.clone());
        tokio::spawn(writer.run(stop.clone()));
        let (source, trusts_headers) = (source.clone(), self.trusts_headers.subscribe());
        let feed = source::KubeFeed {
            pool,
            source: source.clone(),
            before,
            namespace,
            id,
            events,
            rules,
            reports,
            trusts_headers,
            stats,
        };
        let task = tokio::spawn(source::run(informers, feed, stop.clone()));
        Some(Following { source, stats: stats_kept, stop, task })
    }

    /// Searches for InferencePools until `stop`; returns the namespace and
    /// the findings. `None` without [`Cluster::connect`].
    #[must_use]
    pub(crate) fn search(
        &self,
        search: &PoolSearch,
        stop: CancellationToken,
    ) -> Option<(String, watch::Receiver<Finding>)> {
        let informers = self.informers.clone()?;
        let namespace = search.namespace.clone().unwrap_or_else(|| client::default_namespace(informers.client()));
        let (found, receiver) = watch::channel(Finding::default());
        let (group, selector) = (search.group, search.selector.clone());
        let sought = finder::PoolQuery { namespace: namespace.clone(), group, selector };
        tokio::spawn(finder::run(informers, sought, found, stop));
        Some((namespace, receiver))
    }

    /// Asks the API server who may see a page.
    ///
    /// # Errors
    /// Without an earlier [`Cluster::connect`].
    pub(crate) fn guard(&self) -> anyhow::Result<Guard> {
        let informers = anyhow::Context::context(self.informers.as_ref(), "no API server is known")?;
        let reviews = Arc::new(Reviews::new(informers.client().clone(), self.clock));
        Ok(Arc::new(move |caller: Caller| {
            let reviews = reviews.clone();
            Box::pin(async move {
                match reviews.review(&caller.token, &caller.verb, &caller.path).await {
                    Some(Review::Allowed) => AccessDecision::Allowed,
                    Some(Review::Unknown) => AccessDecision::Unknown,
                    Some(Review::Denied(user)) => AccessDecision::Denied(user),
                    None => AccessDecision::Unclear,
                }
            })
        }))
    }

    /// Competes for the lease of this name in `namespace`, and holds `readiness` back, if given, while
    /// another replica has it. While the API server is unreachable, the last holder stays ready. Releases the
    /// lease on `stop`, and then ends.
    pub(crate) fn lead(
        &self,
        pool: &str,
        namespace: Option<&str>,
        readiness: Option<&Readiness>,
        stop: CancellationToken,
    ) -> Option<JoinHandle<()>> {
        let client = self.informers.as_ref()?.client().clone();
        let namespace = namespace.map_or_else(|| client::default_namespace(&client), str::to_owned);
        let (serves, mut served) = watch::channel(false);
        let identity = lease::identity(attache_types::rng::system_seed());
        let claim = lease::LeaseClaim::new(
            client,
            &namespace,
            lease::name(&namespace, pool),
            identity,
            self.clock,
            self.leads.clone(),
            serves,
        );
        let task = tokio::spawn(claim.run(stop));
        let Some(readiness) = readiness.cloned() else { return Some(task) };
        let mut latch = Some(readiness.latch(LEADS));
        tokio::spawn(async move {
            while served.changed().await.is_ok() {
                if *served.borrow_and_update() {
                    if let Some(latch) = latch.take() {
                        latch.release();
                    }
                } else if latch.is_none() {
                    latch = Some(readiness.latch(LEADS));
                }
            }
        });
        Some(task)
    }
}
