//! Pools that come and go with InferencePools of the cluster, in addition to configured ones.

use crate::Feeds;
use attache_config::Settings;
use attache_config::settings::{PoolSearch, PoolSettings, PoolTemplate};
use attache_discovery::kube::catalogue::{Finding, FoundConfig, FoundPool};
use attache_flow::SharedCapacity;
use attache_scheduling::router::PoolOverlap;
use futures_util::future::select_all;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// The settings of another search take effect once it has a result, or after this time without one.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reads a pool's own configuration, given the name of its source and the text; `None` if it is
/// invalid, which has been logged.
pub type PoolReader = Box<dyn Fn(&str, &str) -> Option<PoolSettings> + Send>;

/// One search for InferencePools.
struct Search {
    search: PoolSearch,
    namespace: String,
    found: watch::Receiver<Finding>,
    stop: CancellationToken,
}

/// State beside the settings from the file. A rejected reload changes none of it.
#[must_use]
pub struct Expansion {
    own: BTreeMap<String, OwnConfiguration>,
    queued_bytes: u64,
}

/// The own configuration of a pool.
#[derive(Clone)]
struct OwnConfiguration {
    text: Arc<str>,
    /// The last known good configuration.
    settings: Option<PoolSettings>,
}

/// The current searches and their findings.
pub struct FoundPools {
    read: PoolReader,
    searches: Vec<Search>,
    /// Searches that are no longer needed. They continue until the new settings take effect, so that a
    /// rejected reload loses no finding.
    leaving: Vec<Search>,
    own: BTreeMap<String, OwnConfiguration>,
    /// Warnings about found pools that have been logged.
    told: BTreeSet<String>,
    /// Limit of the queued bytes of all found pools together.
    queued: Arc<SharedCapacity>,
    shutdown: CancellationToken,
}

impl FoundPools {
    /// Creates a set without searches. All searches end on `shutdown`.
    #[must_use]
    pub fn new(read: PoolReader, shutdown: CancellationToken) -> Self {
        let (own, told) = (BTreeMap::new(), BTreeSet::new());
        Self { read, searches: Vec::new(), leaving: Vec::new(), own, told, queued: Arc::default(), shutdown }
    }

    /// Starts the searches of these templates. The previous ones continue until [`FoundPools::settle`].
    ///
    /// # Errors
    /// If no API server of Kubernetes is configured. Nothing has changed then.
    pub async fn follow(&mut self, templates: &[PoolTemplate], feeds: &mut Feeds) -> anyhow::Result<()> {
        if !templates.is_empty() {
            feeds.connect().await?;
        }
        let mut before = std::mem::take(&mut self.searches);
        before.append(&mut self.leaving);
        for PoolTemplate { search, .. } in templates {
            let known = before.iter().position(|known| known.search == *search).map(|at| before.swap_remove(at));
            self.searches.extend(known.or_else(|| {
                let stop = self.shutdown.child_token();
                let (namespace, found) = feeds.search(search, stop.clone())?;
                Some(Search { search: search.clone(), namespace, found, stop })
            }));
        }
        self.leaving = before;
        Ok(())
    }

    /// Ends the searches that are no longer needed.
    pub fn settle(&mut self) {
        self.leaving.drain(..).for_each(|gone| gone.stop.cancel());
    }

    /// The limit of queued bytes that all found pools share.
    #[must_use]
    pub fn queued(&self) -> Arc<SharedCapacity> {
        self.queued.clone()
    }

    /// Waits until a search has another finding.
    pub async fn changed(&mut self) {
        if self.searches.is_empty() {
            return std::future::pending().await;
        }
        let changes = self.searches.iter_mut().map(|search| {
            Box::pin(async {
                if search.found.changed().await.is_err() {
                    // The search has ended with the process.
                    std::future::pending::<()>().await;
                }
            })
        });
        select_all(changes).await;
    }

    /// Whether any search has a result. One search does not wait for another.
    #[must_use]
    pub fn any_known(&self) -> bool {
        self.searches.iter().any(|search| *search.found.borrow() != Finding::Unknown)
    }

    /// Whether all searches have a result, or are known to get none.
    #[must_use]
    pub fn known(&self) -> bool {
        self.searches.iter().all(|search| *search.found.borrow() != Finding::Unknown)
    }

    /// Whether a picker with these `pools` need not wait for any search. It does not wait for a refused search if it
    /// has pools to serve: a missing right for some pools must not affect others. A picker without any right is thereby
    /// distinguished from one that serves all existing pools.
    #[must_use]
    pub fn suffice(&self, pools: &[PoolSettings]) -> bool {
        let refused = |search: &Search| *search.found.borrow() == Finding::Refused;
        self.known() && !(pools.is_empty() && self.searches.iter().any(refused))
    }

    /// Waits for results, at most as long as for an API server.
    pub async fn until_known(&mut self) {
        let all = async {
            while !self.known() {
                self.changed().await;
            }
        };
        // Later results are applied when they arrive.
        let _ = tokio::time::timeout(PATIENCE, all).await;
    }

    /// The settings of `file` with the found pools in place of their templates. If searches are in several namespaces,
    /// a pool is called `namespace/name`, else by its name alone.
    pub fn expand(&mut self, file: &Settings) -> (Settings, Expansion) {
        let mut pools = file.pools.clone();
        let (mut own, mut odd) = (BTreeMap::new(), BTreeSet::new());
        let queued_bytes = file.templates.iter().map(|template| template.queued_bytes).sum();
        let first = self.searches.first().map(|search| &search.namespace);
        let several = self.searches.iter().any(|search| Some(&search.namespace) != first);
        let findings: Vec<_> = self.searches.iter().map(|search| (&*search.namespace, search.found.borrow())).collect();
        let ports = ports(&findings);
        for (template, (namespace, finding)) in file.templates.iter().zip(&findings) {
            for (name, found) in finding.iter() {
                let called = if several { format!("{namespace}/{name}") } else { name.clone() };
                if pools.iter().any(|pool| *pool.name == *called) {
                    odd.insert(taken(namespace, name, &called));
                    continue;
                }
                let settings = found.config.as_ref().map(|config| match self.own.get(&called).cloned() {
                    Some(own) if own.text == config.text => own,
                    before => read_own(&self.read, &called, config, before),
                });
                let service = service_of(found, namespace, &ports);
                let like = settings.as_ref().and_then(|own| own.settings.as_ref());
                let mut pool = template.instance(&called, name, service, like);
                if let Some(flow) = &mut pool.flow {
                    flow.settings.shared = Some(self.queued.clone());
                }
                odd.extend(oddity(&pool, &pools));
                pools.push(pool);
                own.extend(settings.map(|settings| (called, settings)));
            }
        }
        for message in odd.difference(&self.told) {
            tracing::warn!("check which requests each InferencePool gets: {message}");
        }
        self.told = odd;
        (Settings { pools, templates: Vec::new(), ..file.clone() }, Expansion { own, queued_bytes })
    }

    /// Takes over this state, since its settings are in effect.
    pub fn take_up(&mut self, expansion: Expansion) {
        self.own = expansion.own;
        self.queued.set(expansion.queued_bytes);
        self.settle();
    }
}

/// The warning about a pool whose name another one has.
fn taken(namespace: &str, name: &str, called: &str) -> String {
    format!(
        "the InferencePool `{name}` in namespace `{namespace}` is not served: another pool is called `{called}`. A \
         pool of the configuration needs another name; of two selectors that find the same InferencePool the second \
         has no effect on it"
    )
}

/// Ports of the Services that pools name, by namespace and name.
type Ports<'a> = BTreeMap<(&'a str, &'a str), BTreeSet<u16>>;

/// The Services of all findings, each with its namespace.
fn ports<'a>(findings: &'a [(&str, impl Deref<Target = Finding>)]) -> Ports<'a> {
    let mut ports = Ports::new();
    for (namespace, finding) in findings {
        for (_, pool) in finding.iter() {
            if let Some(service) = &pool.service {
                ports.entry((*namespace, &**service)).or_default().insert(pool.port);
            }
        }
    }
    ports
}

/// The Service by which gateways ask for a pool, with its port if another pool has another port of the same Service.
fn service_of(pool: &FoundPool, namespace: &str, ports: &Ports<'_>) -> Option<String> {
    let service = &**pool.service.as_ref()?;
    let is_shared = ports.get(&(namespace, service)).is_some_and(|ports| ports.len() > 1);
    let port = if is_shared { format!(":{}", pool.port) } else { String::new() };
    Some(format!("{service}.{namespace}{port}"))
}

/// Reads a configuration; an invalid one leaves the last known good one in effect.
fn read_own(read: &PoolReader, pool: &str, config: &FoundConfig, before: Option<OwnConfiguration>) -> OwnConfiguration {
    let (text, name) = (config.text.clone(), &*config.name);
    match read(&format!("ConfigMap {name}"), &text) {
        Some(settings) => {
            tracing::info!(pool, config = name, "pool uses its own configuration");
            OwnConfiguration { text, settings: Some(settings) }
        }
        None => {
            let settings = before.and_then(|own| own.settings);
            let instead = if settings.is_some() { "its last valid one" } else { "the template" };
            tracing::error!(pool, config = name, "the pool's own configuration is invalid; keeping {instead}");
            OwnConfiguration { text, settings }
        }
    }
}

/// Warnings about the way in which a pool gets requests.
fn oddity(pool: &PoolSettings, others: &[PoolSettings]) -> Option<String> {
    let name = &pool.name;
    if pool.matches.is_empty() {
        return Some(format!(
            "the InferencePool `{name}` names no Service by `endpointPickerRef`, and its configuration no `match`: \
             it gets what no other pool takes"
        ));
    }
    let rival = |how| others.iter().find(|other| other.matches.overlap(&pool.matches) == Some(how));
    if let Some(twin) = rival(PoolOverlap::Whole) {
        return Some(format!(
            "the pools `{}` and `{name}` take the same requests, and the first gets them: give each InferencePool a \
             Service of its own",
            twin.name
        ));
    }
    let neighbour = rival(PoolOverlap::WithoutPort)?;
    Some(format!(
        "only the port of their Service tells the pools `{}` and `{name}` apart, and of calls that name no port the \
         first gets the requests: have the gateway name it (Envoy: `grpc_service.envoy_grpc.authority`), or give \
         each InferencePool a Service of its own",
        neighbour.name
    ))
}

#[cfg(test)]
mod tests;
