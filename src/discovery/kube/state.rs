//! Which endpoints a pool has, by the pods and the `InferencePool` that are known.
//!
//! A pod is an endpoint for each of its ranks while it is ready and nobody has asked for its end. What tells one endpoint from the next is the
//! pod's UID: an address that another pod gets inherits nothing. Nothing is said before everything that is needed has been listed once, and a
//! list that breaks off says nothing either. A pool that is there and could never be read has no endpoints. Pure.

use super::objects::{InferencePool, Pod};
use super::table::{Change, Table, Unreadable};
use crate::settings::{KubernetesSource, PodsOf};
use ahash::{AHashMap, AHashSet};
use attache_pool::{EndpointSpec, Engine, MetricsSource};
use attache_scheduling::selector::LabelSelector;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// The ranks of a pod that serve, `8000,8002`; all of them where it is absent.
pub const ACTIVE_PORTS_ANNOTATION: &str = "inference.networking.k8s.io/active-ports";
/// Labels that name the engine, in this order.
pub const ENGINE_LABELS: [&str; 3] =
    ["inference.networking.k8s.io/engine-type", "llm-d.ai/engine-type", "model.aibrix.ai/engine"];
/// AIBrix's label for the port that serves.
pub const AIBRIX_PORT_LABEL: &str = "model.aibrix.ai/port";
/// AIBrix's label for the port of the metrics.
pub const AIBRIX_METRIC_PORT_LABEL: &str = "model.aibrix.ai/metric-port";
/// What AIBrix's labels and annotations begin with.
pub const AIBRIX_PREFIX: &str = "model.aibrix.ai/";
/// AIBrix's annotation with routing profiles, which stand in the configuration here.
const AIBRIX_CONFIG_ANNOTATION: &str = "model.aibrix.ai/config";
/// 63 bytes: Kubernetes allows no longer value of a label. AIBrix's longer annotations are no labels.
const MAX_LABEL_BYTES: usize = 63;
/// The port of a pod that nothing names: vLLM's own, and AIBrix's default.
pub const DEFAULT_TARGET_PORT: u16 = 8000;

/// Endpoints that a pool may have: every decision looks at each of them, and a selector that means all pods of a cluster must not stop the picker.
pub const MAX_ENDPOINTS: usize = 4_096;

/// What is known of a pool's pods.
#[derive(Debug)]
pub struct Members {
    source: KubernetesSource,
    /// Others have told the endpoints of this pool before.
    succeeds: bool,
    pool: Table<InferencePool>,
    pods: Table<Pod>,
    /// The pool's labels when its pods were listed last. When they change, the pods of before stay until those of after are known.
    listed_by: BTreeMap<String, String>,
    /// The pool's ports as long as these were its labels: the pods of before are not at the ports of after.
    listed_ports: Vec<u16>,
    /// What each pod came to when it was looked at last, by its name: among a thousand pods only those that changed are looked at again.
    made: AHashMap<String, Vec<Arc<EndpointSpec>>>,
    left_out: usize,
}

/// What selects pods.
enum Selection<'a> {
    Labels(&'a BTreeMap<String, String>),
    Expression(LabelSelector<'a>),
}

impl Selection<'_> {
    fn matches(&self, labels: &BTreeMap<Arc<str>, Arc<str>>) -> bool {
        match self {
            Self::Labels(wanted) => {
                wanted.iter().all(|(k, v)| labels.get(k.as_str()).is_some_and(|have| **have == **v))
            }
            Self::Expression(selector) => selector.matches(labels),
        }
    }
}

impl Members {
    /// Nothing is known yet of the pods that `source` means. Where this one `succeeds` another of the same pool, a pool that can't be read is no
    /// reason to take back what that one told.
    #[must_use]
    pub fn new(source: KubernetesSource, succeeds: bool) -> Self {
        Self {
            source,
            succeeds,
            pool: Table::default(),
            pods: Table::default(),
            listed_by: BTreeMap::new(),
            listed_ports: Vec::new(),
            made: AHashMap::new(),
            left_out: 0,
        }
    }

    /// Takes in a change of the `InferencePool`. True when the endpoints may be others afterwards.
    ///
    /// # Errors
    /// The pool can't be read; what was known of it stays, unless another one was known.
    pub fn pool(&mut self, change: Change) -> Result<bool, Unreadable> {
        self.made.clear();
        let changed = self.pool.apply(change);
        if let Some(pool) = self.inference_pool().filter(|pool| pool.labels == self.listed_by) {
            self.listed_ports = pool.ports.clone();
        }
        changed
    }

    /// Takes in a change of the pods. True when the endpoints may be others afterwards.
    ///
    /// # Errors
    /// The pod that can't be read; what was known of it stays, unless another one was known.
    pub fn pod(&mut self, change: Change) -> Result<bool, Unreadable> {
        match &change {
            Change::ListBegun | Change::Listed(_) => {}
            Change::ListDone => self.made.clear(),
            Change::Applied(object) => drop(self.made.remove(&object.meta.name)),
            Change::Deleted { name, .. } => drop(self.made.remove(name)),
        }
        if let (Change::ListDone, Some(pool)) = (&change, self.inference_pool()) {
            let (labels, ports) = (pool.labels.clone(), pool.ports.clone());
            let others = labels != self.listed_by;
            self.listed_by = labels;
            self.listed_ports = ports;
            return self.pods.apply(change).map(|changed| changed || others);
        }
        self.pods.apply(change)
    }

    /// The pool, once it is known.
    fn inference_pool(&self) -> Option<&InferencePool> {
        match &self.source.pods {
            PodsOf::Pool { name, .. } => self.pool.get(name),
            PodsOf::Selector { .. } => None,
        }
    }

    /// What to ask the API server's list of pods for; `None` while the pool is not known.
    #[must_use]
    pub fn selector(&self) -> Option<String> {
        match &self.source.pods {
            PodsOf::Selector { selector, .. } => Some(selector.clone()),
            PodsOf::Pool { .. } => {
                let labels = &self.inference_pool()?.labels;
                Some(labels.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(","))
            }
        }
    }

    /// Whether the API server has said that there is no such pool.
    #[must_use]
    pub fn pool_is_missing(&self) -> bool {
        self.pool.is_listed() && self.inference_pool().is_none() && self.name_in(|pool, name| !pool.is_unreadable(name))
    }

    /// Whether there is such a pool that can't be read as it is now: it goes on as it was when it could be, and has no endpoints if it never could.
    #[must_use]
    pub fn pool_is_unreadable(&self) -> bool {
        self.pool.is_listed() && self.name_in(Table::is_unreadable)
    }

    /// What is asked of the pool's name; false where there is no pool to look for.
    fn name_in(&self, ask: impl Fn(&Table<InferencePool>, &str) -> bool) -> bool {
        matches!(&self.source.pods, PodsOf::Pool { name, .. } if ask(&self.pool, name))
    }

    /// The endpoints, by name; `None` while they are not known. A pool that was there and is gone has none, unless it goes as a whole.
    pub fn endpoints(&mut self) -> Option<Vec<Arc<EndpointSpec>>> {
        let (selection, ports): (_, &[u16]) = match &self.source.pods {
            PodsOf::Pool { name, .. } => match self.pool.get(name) {
                Some(_) => (Selection::Labels(&self.listed_by), &self.listed_ports),
                // Nobody knows which pods it means: that is an answer too, and others need not wait for it.
                None if self.pool_is_unreadable() && !self.succeeds => return Some(Vec::new()),
                // Pods are only known once the pool was.
                None if self.source.found || self.pool_is_unreadable() => return None,
                None => return (self.pool_is_missing() && self.pods.is_listed()).then(Vec::new),
            },
            PodsOf::Selector { selector, target_ports } => {
                // It was read when the settings were; a selector that can't be read selects nothing.
                (Selection::Expression(LabelSelector::parse(selector).ok()?), target_ports)
            }
        };
        if !self.pods.is_listed() {
            return None;
        }
        let mut all = Members::collected(&self.pods, &mut self.made, |pod| {
            let serves = !pod.meta.deleting && pod.ready && selection.matches(&pod.meta.labels);
            if serves { ranks(pod, ports, &self.source).map(Arc::new).collect() } else { Vec::new() }
        });
        let mut taken: AHashSet<SocketAddr> = AHashSet::with_capacity(all.len());
        if !all.iter().all(|(_, spec)| taken.insert(spec.address)) {
            keep_youngest(&mut all);
        }
        self.left_out = all.len().saturating_sub(MAX_ENDPOINTS);
        if self.left_out > 0 {
            keep_oldest(&mut all);
        }
        Some(all.into_iter().map(|(_, spec)| spec).collect())
    }

    /// How many endpoints were too many, when they were asked for last.
    #[must_use]
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// A pod with routing profiles in AIBrix's annotation, which is not read.
    #[must_use]
    pub fn with_ignored_profiles(&self) -> Option<&str> {
        let mut pods = self.pods.iter();
        pods.find(|(_, pod)| pod.meta.annotations.contains_key(AIBRIX_CONFIG_ANNOTATION)).map(|(name, _)| name)
    }

    /// What all pods come to, and when each was made.
    fn collected(
        pods: &Table<Pod>,
        made: &mut AHashMap<String, Vec<Arc<EndpointSpec>>>,
        make: impl Fn(&Pod) -> Vec<Arc<EndpointSpec>>,
    ) -> Vec<(i64, Arc<EndpointSpec>)> {
        let mut all = Vec::with_capacity(made.len());
        for (name, pod) in pods.iter() {
            if !made.contains_key(name) {
                made.insert(name.to_owned(), make(pod));
            }
            let specs = made.get(name).map(Vec::as_slice).unwrap_or_default();
            all.extend(specs.iter().map(|spec| (pod.meta.created, spec.clone())));
        }
        all
    }
}

/// Of two pods that claim an address the younger one has it, the other is on its way out; of two as old the first.
fn keep_youngest(all: &mut Vec<(i64, Arc<EndpointSpec>)>) {
    let mut youngest: AHashMap<SocketAddr, (i64, Arc<str>)> = AHashMap::new();
    for (created, spec) in all.iter() {
        match youngest.get(&spec.address) {
            Some((known, _)) if known >= created => {}
            _ => drop(youngest.insert(spec.address, (*created, spec.name.clone()))),
        }
    }
    all.retain(|(_, spec)| youngest.get(&spec.address).is_some_and(|(_, name)| *name == spec.name));
}

/// As many as a pool may have: the oldest, so that one that comes takes no other's place. They stay in the order of their names.
fn keep_oldest(all: &mut Vec<(i64, Arc<EndpointSpec>)>) {
    all.sort_by(|(a, one), (b, other)| (a, &one.name).cmp(&(b, &other.name)));
    all.truncate(MAX_ENDPOINTS);
    all.sort_by(|(_, one), (_, other)| one.name.cmp(&other.name));
}

/// A pod's labels, and what it says in AIBrix's annotations as if it were a label, which AIBrix reads from either.
fn labels(pod: &Pod) -> BTreeMap<Arc<str>, Arc<str>> {
    let mut labels = pod.meta.labels.clone();
    let said = pod.meta.annotations.iter().filter(|(name, value)| {
        name.starts_with(AIBRIX_PREFIX) && value.len() <= MAX_LABEL_BYTES && !labels.contains_key(name.as_str())
    });
    let said: Vec<_> = said.map(|(name, value)| (name.as_str().into(), value.as_str().into())).collect();
    labels.extend(said);
    labels
}

/// The endpoints of a pod, one for each port that serves.
fn ranks<'a>(pod: &'a Pod, ports: &'a [u16], source: &'a KubernetesSource) -> impl Iterator<Item = EndpointSpec> + 'a {
    let labels = labels(pod);
    let label = |name: &str| labels.get(name).map(|value| &**value);
    let own: Vec<u16> = match ports {
        [] => vec![label(AIBRIX_PORT_LABEL).and_then(port).unwrap_or(DEFAULT_TARGET_PORT)],
        ports => ports.to_vec(),
    };
    let several = own.len() > 1;
    let active: Option<Vec<u16>> =
        pod.meta.annotations.get(ACTIVE_PORTS_ANNOTATION).map(|list| list.split(',').filter_map(port).collect());
    let engine = ENGINE_LABELS.iter().find_map(|name| label(name)).and_then(engine).unwrap_or(source.engine);
    // Each rank of several has a page of its own, at its own port.
    let metrics_port = label(AIBRIX_METRIC_PORT_LABEL).and_then(port).or(source.metrics.port).filter(|_| !several);
    let metrics = MetricsSource { port: metrics_port, ..source.metrics.clone() };
    let uid: Arc<str> = pod.meta.uid.as_str().into();
    let serves = move |port: u16| active.as_ref().is_none_or(|active| active.contains(&port));
    let ranks = own.into_iter().enumerate().filter(move |(_, port)| serves(*port));
    ranks.filter_map(move |(rank, port)| {
        let name = if several { format!("{}-rank-{rank}", pod.meta.name) } else { pod.meta.name.clone() };
        Some(EndpointSpec {
            name: name.into(),
            uid: Some(uid.clone()),
            labels: labels.clone(),
            engine,
            metrics: metrics.clone(),
            ..EndpointSpec::at(SocketAddr::new(pod.ip?, port))
        })
    })
}

fn port(text: &str) -> Option<u16> {
    text.trim().parse().ok().filter(|port| *port != 0)
}

/// The engine of this name, as labels spell it; `None` for one that nobody knows.
fn engine(name: &str) -> Option<Engine> {
    match name {
        "vllm" => Some(Engine::Vllm),
        "sglang" => Some(Engine::Sglang),
        "trtllm-serve" | "trtllm" => Some(Engine::TrtllmServe),
        "triton-tensorrt-llm" | "triton" => Some(Engine::Triton),
        "xllm" => Some(Engine::Xllm),
        "astrai" => Some(Engine::Astrai),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
