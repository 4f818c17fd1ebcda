//! The endpoints of a pool, from its known pods and its `InferencePool`.
//!
//! Each rank of a pod is an endpoint while the pod is ready and its deletion was not requested. The pod's UID
//! identifies endpoints, so a reused address inherits no state. No endpoints are sent before everything that is needed
//! was listed once; an interrupted list does not count. An existing pool that was never valid has no endpoints. Pure.

use super::objects::{InferencePool, Pod};
use super::table::{ObjectChange, ObjectTable, Unreadable};
use ahash::{AHashMap, AHashSet};
use attache_pool::ports::{AIBRIX_METRIC_PORT_LABEL, AIBRIX_PORT_LABEL, port};
use attache_pool::source::{KubernetesSource, PodsOf};
use attache_pool::{EndpointSpec, Engine, MetricsSource};
use attache_scheduling::selector::LabelSelector;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;

/// Annotation with the ports of the ranks that serve, `8000,8002`; all of them if absent.
pub const ACTIVE_PORTS_ANNOTATION: &str = "inference.networking.k8s.io/active-ports";
/// Labels that name the engine, in this order of precedence.
pub const ENGINE_LABELS: [&str; 3] =
    ["inference.networking.k8s.io/engine-type", "llm-d.ai/engine-type", "model.aibrix.ai/engine"];
/// Prefix of AIBrix's labels and annotations.
pub const AIBRIX_PREFIX: &str = "model.aibrix.ai/";
/// AIBrix's annotation with routing profiles. Attaché has them in its configuration instead.
const AIBRIX_CONFIG_ANNOTATION: &str = "model.aibrix.ai/config";
/// 63 bytes, the limit of Kubernetes for label values. Longer annotations of AIBrix are not taken as labels.
const MAX_LABEL_BYTES: usize = 63;
/// Default port of a pod: vLLM's own, and AIBrix's default.
pub const DEFAULT_TARGET_PORT: u16 = 8000;

/// Most endpoints of a pool. Each decision looks at all of them, and a selector that matches all pods of a cluster
/// must not stop the picker.
pub const MAX_ENDPOINTS: usize = 4_096;

/// The known pods of a pool.
#[derive(Debug)]
pub struct Members {
    source: KubernetesSource,
    /// Whether a previous task has sent endpoints of this pool.
    succeeds: bool,
    pool: ObjectTable<InferencePool>,
    pods: ObjectTable<Pod>,
    /// The pool's labels at the last list of pods. After a change, the old pods stay until the new ones are known.
    listed_by: BTreeMap<String, String>,
    /// The pool's ports while these were its labels, for the old pods.
    listed_ports: Vec<u16>,
    /// The endpoints of each pod by name: after a change only the changed pods of a thousand are processed.
    made: AHashMap<String, Vec<Arc<EndpointSpec>>>,
    left_out: usize,
}

/// How the pods are selected.
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
    /// The state before any object is known. If it `succeeds` another of the same pool, an invalid pool does
    /// not remove that one's endpoints.
    #[must_use]
    pub fn new(source: KubernetesSource, succeeds: bool) -> Self {
        Self {
            source,
            succeeds,
            pool: ObjectTable::default(),
            pods: ObjectTable::default(),
            listed_by: BTreeMap::new(),
            listed_ports: Vec::new(),
            made: AHashMap::new(),
            left_out: 0,
        }
    }

    /// Applies a change of the `InferencePool`. Returns whether the endpoints may differ.
    ///
    /// # Errors
    /// If the pool is invalid; its last valid version stays, unless it was another object.
    pub fn pool(&mut self, change: ObjectChange) -> Result<bool, Unreadable> {
        self.made.clear();
        let changed = self.pool.apply(change);
        if let Some(pool) = self.inference_pool().filter(|pool| pool.labels == self.listed_by) {
            self.listed_ports = pool.ports.clone();
        }
        changed
    }

    /// Applies a change of the pods. Returns whether the endpoints may differ.
    ///
    /// # Errors
    /// If the pod is invalid; its last valid version stays, unless it was another object.
    pub fn pod(&mut self, change: ObjectChange) -> Result<bool, Unreadable> {
        match &change {
            ObjectChange::ListBegun | ObjectChange::Listed(_) => {}
            ObjectChange::ListDone => self.made.clear(),
            ObjectChange::Applied(object) => drop(self.made.remove(&object.meta.name)),
            ObjectChange::Deleted { name, .. } => drop(self.made.remove(name)),
        }
        if let (ObjectChange::ListDone, Some(pool)) = (&change, self.inference_pool()) {
            let (labels, ports) = (pool.labels.clone(), pool.ports.clone());
            let others = labels != self.listed_by;
            self.listed_by = labels;
            self.listed_ports = ports;
            return self.pods.apply(change).map(|changed| changed || others);
        }
        self.pods.apply(change)
    }

    /// The `InferencePool`, once it is known.
    fn inference_pool(&self) -> Option<&InferencePool> {
        match &self.source.pods {
            PodsOf::Pool { name, .. } => self.pool.get(name),
            PodsOf::Selector { .. } => None,
        }
    }

    /// Label selector for the list of pods; `None` while the pool is not known.
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

    /// Whether the API server has answered that the pool does not exist.
    #[must_use]
    pub fn pool_is_missing(&self) -> bool {
        self.pool.is_listed() && self.inference_pool().is_none() && self.name_in(|pool, name| !pool.is_unreadable(name))
    }

    /// Whether the pool exists and is invalid. Its last valid version is used, and it has no endpoints without one.
    #[must_use]
    pub fn pool_is_unreadable(&self) -> bool {
        self.pool.is_listed() && self.name_in(ObjectTable::is_unreadable)
    }

    /// The result of `ask` for the pool's name; false without an `InferencePool`.
    fn name_in(&self, ask: impl Fn(&ObjectTable<InferencePool>, &str) -> bool) -> bool {
        matches!(&self.source.pods, PodsOf::Pool { name, .. } if ask(&self.pool, name))
    }

    /// The endpoints by name; `None` while they are not known. A deleted pool has none, unless it ends as a whole.
    pub fn endpoints(&mut self) -> Option<Vec<Arc<EndpointSpec>>> {
        let (selection, ports): (_, &[u16]) = match &self.source.pods {
            PodsOf::Pool { name, .. } => match self.pool.get(name) {
                Some(_) => (Selection::Labels(&self.listed_by), &self.listed_ports),
                // It is unknown which pods it selects. That is a result too, so that other pools need not wait.
                None if self.pool_is_unreadable() && !self.succeeds => return Some(Vec::new()),
                // Pods are followed only after the pool is known.
                None if self.source.found || self.pool_is_unreadable() => return None,
                None => return (self.pool_is_missing() && self.pods.is_listed()).then(Vec::new),
            },
            PodsOf::Selector { selector, target_ports } => {
                // The selector was validated with the settings; an invalid one selects nothing.
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

    /// Number of endpoints beyond the limit at the last call of `endpoints`.
    #[must_use]
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// A pod with routing profiles in AIBrix's annotation, which Attaché ignores.
    #[must_use]
    pub fn with_ignored_profiles(&self) -> Option<&str> {
        let mut pods = self.pods.iter();
        pods.find(|(_, pod)| pod.meta.annotations.contains_key(AIBRIX_CONFIG_ANNOTATION)).map(|(name, _)| name)
    }

    /// The endpoints of all pods, each with its time of creation.
    fn collected(
        pods: &ObjectTable<Pod>,
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

/// Of two pods with one address the younger has it, as the other one is terminating; of two equally old ones the first.
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

/// Keeps the oldest endpoints up to the limit, so that a new one replaces none. The order by name stays.
fn keep_oldest(all: &mut Vec<(i64, Arc<EndpointSpec>)>) {
    all.sort_by(|(a, one), (b, other)| (a, &one.name).cmp(&(b, &other.name)));
    all.truncate(MAX_ENDPOINTS);
    all.sort_by(|(_, one), (_, other)| one.name.cmp(&other.name));
}

/// A pod's labels, and AIBrix's annotations as labels, since AIBrix reads both.
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
    // With several ranks, each has metrics at its own port.
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
            rank: u16::try_from(rank).ok().filter(|_| several),
            labels: labels.clone(),
            engine,
            metrics: metrics.clone(),
            ..EndpointSpec::at(SocketAddr::new(pod.ip?, port))
        })
    })
}

/// The engine that a label names; `None` for an unknown one.
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
