//! Pools that come and go with objects of the cluster, put beside those that the configuration names.

use super::feeds::Feeds;
use crate::config::Settings;
use crate::config::settings::{PoolSearch, PoolSettings, PoolTemplate};
use crate::discovery::kube::catalogue::{Finding, FoundConfig, FoundPool};
use crate::flow::SharedCapacity;
use crate::scheduling::router::Rivalry;
use futures_util::future::select_all;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Settings of another search are taken up when its answer is there, or after this time without it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Reads the configuration that a pool has of its own, given the name of what holds it and the text; what is wrong with it has been logged when
/// it gives `None`.
pub type PoolReader = Box<dyn Fn(&str, &str) -> Option<PoolSettings> + Send>;

/// One search, as long as it lasts.
struct Search {
    search: PoolSearch,
    namespace: String,
    found: watch::Receiver<Finding>,
    stop: CancellationToken,
}

/// What stands beside the settings that were made of a file: a reload that is refused changes none of it.
#[must_use]
pub(super) struct Expansion {
    own: BTreeMap<String, Own>,
    queued_bytes: u64,
}

/// What a pool's own configuration came to.
#[derive(Clone)]
struct Own {
    text: Arc<str>,
    /// The last that was good.
    settings: Option<PoolSettings>,
}

/// The searches of now and what they have found.
pub(super) struct FoundPools {
    read: PoolReader,
    searches: Vec<Search>,
    /// Those that are not wanted any more, until what is wanted in their place is taken up: else a reload that is refused would take what they have
    /// found.
    leaving: Vec<Search>,
    own: BTreeMap<String, Own>,
    /// What is odd about them, and has been told.
    told: BTreeSet<String>,
    /// What the requests may hold that wait before them: all of them together, however many there are.
    queued: Arc<SharedCapacity>,
    shutdown: CancellationToken,
}

impl FoundPools {
    /// Nothing is searched for yet. All searches end on `shutdown`.
    #[must_use]
    pub(super) fn new(read: PoolReader, shutdown: CancellationToken) -> Self {
        let (own, told) = (BTreeMap::new(), BTreeSet::new());
        Self { read, searches: Vec::new(), leaving: Vec::new(), own, told, queued: Arc::default(), shutdown }
    }

    /// Searches for what these templates want, in place of what was wanted before, which goes on until [`FoundPools::settle`].
    ///
    /// # Errors
    /// When no API server of Kubernetes is named anywhere. Nothing is another than before then.
    pub(super) async fn follow(&mut self, templates: &[PoolTemplate], feeds: &mut Feeds) -> anyhow::Result<()> {
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

    /// Ends the searches that are not wanted any more.
    pub(super) fn settle(&mut self) {
        self.leaving.drain(..).for_each(|gone| gone.stop.cancel());
    }

    /// What the queues share of all pools that are found.
    #[must_use]
    pub(super) fn queued(&self) -> Arc<SharedCapacity> {
        self.queued.clone()
    }

    /// Waits for a search to find something else than before.
    pub(super) async fn changed(&mut self) {
        if self.searches.is_empty() {
            return std::future::pending().await;
        }
        let changes = self.searches.iter_mut().map(|search| {
            Box::pin(async {
                if search.found.changed().await.is_err() {
                    // It has ended with the process.
                    std::future::pending::<()>().await;
                }
            })
        });
        select_all(changes).await;
    }

    /// Whether any search has come to something. One that waits holds up no other.
    #[must_use]
    pub(super) fn any_known(&self) -> bool {
        self.searches.iter().any(|search| *search.found.borrow() != Finding::Unknown)
    }

    /// Whether all searches have an answer, or it is known that they get none.
    #[must_use]
    pub(super) fn known(&self) -> bool {
        self.searches.iter().all(|search| *search.found.borrow() != Finding::Unknown)
    }

    /// Whether a picker that serves `pools` need not wait for any search. One that is refused is not waited for where there is something to serve:
    /// for want of a right to some pools nobody loses the others, and who has no right to any is told from who serves all that there are.
    #[must_use]
    pub(super) fn suffice(&self, pools: &[PoolSettings]) -> bool {
        let refused = |search: &Search| *search.found.borrow() == Finding::Refused;
        self.known() && !(pools.is_empty() && self.searches.iter().any(refused))
    }

    /// Waits until they have, but no longer than one may wait for an API server.
    pub(super) async fn until_known(&mut self) {
        let all = async {
            while !self.known() {
                self.changed().await;
            }
        };
        // What is not known then is taken up when it is.
        let _ = tokio::time::timeout(PATIENCE, all).await;
    }

    /// The settings of `file` with the pools that are found in place of their templates. Where searches are in several namespaces, a pool is called
    /// `namespace/name`, else by its name alone.
    pub(super) fn expand(&mut self, file: &Settings) -> (Settings, Expansion) {
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
            tracing::warn!("{message}");
        }
        self.told = odd;
        (Settings { pools, templates: Vec::new(), ..file.clone() }, Expansion { own, queued_bytes })
    }

    /// Goes by this from now on: its settings are taken up.
    pub(super) fn take_up(&mut self, expansion: Expansion) {
        self.own = expansion.own;
        self.queued.set(expansion.queued_bytes);
        self.settle();
    }
}

/// What is said of a pool whose name another one has.
fn taken(namespace: &str, name: &str, called: &str) -> String {
    format!(
        "the InferencePool `{name}` in namespace `{namespace}` is not served: another pool is called `{called}`. \
         A pool of the configuration needs another name; of two selectors that find the same InferencePool the second has no effect on it"
    )
}

/// By namespace and name, the ports of the Services that pools name.
type Ports<'a> = BTreeMap<(&'a str, &'a str), BTreeSet<u16>>;

/// Those of all findings, each with its namespace.
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

/// By which Service gateways ask for a pool: with its port, where another pool has another port of the same Service.
fn service_of(pool: &FoundPool, namespace: &str, ports: &Ports<'_>) -> Option<String> {
    let service = &**pool.service.as_ref()?;
    let is_shared = ports.get(&(namespace, service)).is_some_and(|ports| ports.len() > 1);
    let port = if is_shared { format!(":{}", pool.port) } else { String::new() };
    Some(format!("{service}.{namespace}{port}"))
}

/// Reads a configuration; one that is refused leaves the last good one in its place.
fn read_own(read: &PoolReader, pool: &str, config: &FoundConfig, before: Option<Own>) -> Own {
    let (text, name) = (config.text.clone(), &*config.name);
    match read(&format!("ConfigMap {name}"), &text) {
        Some(settings) => {
            tracing::info!(pool, config = name, "pool uses its own configuration");
            Own { text, settings: Some(settings) }
        }
        None => {
            let settings = before.and_then(|own| own.settings);
            let instead = if settings.is_some() { "its last valid one" } else { "the template" };
            tracing::error!(pool, config = name, "the pool's own configuration is invalid; keeping {instead}");
            Own { text, settings }
        }
    }
}

/// What is odd about a pool's way to get requests.
fn oddity(pool: &PoolSettings, others: &[PoolSettings]) -> Option<String> {
    let name = &pool.name;
    if pool.matches.is_empty() {
        return Some(format!(
            "the InferencePool `{name}` names no Service by `endpointPickerRef`, and its configuration no `match`: it gets what no other pool takes"
        ));
    }
    let rival = |how| others.iter().find(|other| other.matches.rivalry(&pool.matches) == Some(how));
    if let Some(twin) = rival(Rivalry::Whole) {
        return Some(format!(
            "the pools `{}` and `{name}` take the same requests, and the first gets them: give each InferencePool a Service of its own",
            twin.name
        ));
    }
    let neighbour = rival(Rivalry::AtNoPort)?;
    Some(format!(
        "only the port of their Service tells the pools `{}` and `{name}` apart, and of calls that name no port the first gets the requests: have \
         the gateway name it (Envoy: `grpc_service.envoy_grpc.authority`), or give each InferencePool a Service of its own",
        neighbour.name
    ))
}

#[cfg(test)]
mod tests;
