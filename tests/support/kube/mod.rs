//! A fake Kubernetes API server over real HTTP with what a picker uses: paged lists, watches with bookmarks, expired
//! resource versions, rights, outages.

pub(crate) mod churn;
mod objects;
pub(crate) mod picks;
mod serve;

pub(crate) use objects::{object, pod, pool};

use crate::support::process::scratch;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;

/// The namespace of objects that name none.
pub(crate) const NAMESPACE: &str = "inference";
/// The stable API group of `InferencePool`.
pub(crate) const STABLE: &str = "inference.networking.k8s.io/v1";
/// GIE's experimental API group.
pub(crate) const EXPERIMENTAL: &str = "inference.networking.x-k8s.io/v1alpha2";
/// llm-d's API group.
pub(crate) const LLM_D: &str = "llm-d.ai/v1alpha2";

/// How the server fails.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum Outage {
    /// It does not fail.
    #[default]
    None,
    /// Every request gets this status.
    Status(u16),
    /// Responses break off after their first chunk.
    Broken,
    /// Requests for this resource get this status.
    Of(&'static str, u16),
    /// Watches of this resource get this status.
    Watches(&'static str, u16),
}

/// One change of an object.
#[derive(Clone, Debug)]
pub(super) struct Step {
    version: u64,
    resource: String,
    before: Option<Value>,
    after: Option<Value>,
}

/// State of the server.
#[derive(Debug, Default)]
pub(super) struct Store {
    version: u64,
    /// Objects by resource (`v1/pods`, `llm-d.ai/v1alpha2/inferenceobjectives`) and `namespace/name`. A resource that
    /// is absent here is not installed.
    resources: BTreeMap<String, BTreeMap<String, Value>>,
    history: VecDeque<Step>,
    /// Resource versions before this one have expired.
    oldest: u64,
    /// Users by bearer token.
    accounts: BTreeMap<String, String>,
    /// Users, and the verbs and non-resource pages that they are allowed.
    grants: BTreeSet<(String, String, String)>,
    /// Verbs and resources that are refused, in this namespace or in all.
    forbidden: BTreeSet<(&'static str, Option<String>, String)>,
    /// Plurals and names of objects whose writes an admission webhook rejects.
    denied: BTreeSet<(String, String)>,
    outage: Outage,
    delay: Duration,
    /// Requests so far: verb and resource, in order.
    asked: Vec<(&'static str, String)>,
}

/// The server, which ends with the test.
#[derive(Clone)]
pub(crate) struct FakeApi {
    address: SocketAddr,
    store: Arc<Mutex<Store>>,
    /// The version of the last change.
    changed: watch::Sender<u64>,
    /// Open watches of an older generation are cut.
    age: watch::Sender<u64>,
    directory: Arc<tempfile::TempDir>,
}

impl FakeApi {
    /// A server with pods, leases and the stable `InferencePool`, empty.
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port for the API server");
        let directory = Arc::new(scratch("kube"));
        let api = Self {
            address: listener.local_addr().expect("the API server's address"),
            store: Arc::default(),
            changed: watch::Sender::new(0),
            age: watch::Sender::new(0),
            directory,
        };
        for (group, plural) in [("v1", "pods"), ("coordination.k8s.io/v1", "leases"), (STABLE, "inferencepools")] {
            api.install(group, plural);
        }
        let kubeconfig = json!({
            "apiVersion": "v1", "kind": "Config", "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": format!("http://{}", api.address)}}],
            "users": [{"name": "fake", "user": {"token": "anyone"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": NAMESPACE}}],
        });
        std::fs::write(api.kubeconfig(), kubeconfig.to_string()).expect("writing the kubeconfig");
        tokio::spawn(serve::serve(listener, api.clone()));
        api
    }

    /// Where the server listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// A kubeconfig file for this server.
    pub(crate) fn kubeconfig(&self) -> PathBuf {
        self.directory.path().join("config")
    }

    /// Installs a kind, `group/version` and plural.
    pub(crate) fn install(&self, group: &str, plural: &str) {
        self.store.lock().resources.entry(format!("{group}/{plural}")).or_default();
    }

    /// Removes a kind with its objects.
    pub(crate) fn uninstall(&self, group: &str, plural: &str) {
        self.store.lock().resources.remove(&format!("{group}/{plural}"));
        self.cut();
    }

    /// Creates or changes an object in its namespace, or in [`NAMESPACE`]. It keeps its UID or gets a new one.
    pub(crate) fn apply(&self, group: &str, plural: &str, object: Value) {
        self.store.lock().apply(&format!("{group}/{plural}"), object);
        self.notify_watches();
    }

    /// Deletes an object.
    pub(crate) fn delete(&self, group: &str, plural: &str, name: &str) {
        self.store.lock().delete(&format!("{group}/{plural}"), name);
        self.notify_watches();
    }

    /// Creates or changes a pod.
    pub(crate) fn pod(&self, pod: Value) {
        self.apply("v1", "pods", pod);
    }

    /// Deletes a pod.
    pub(crate) fn delete_pod(&self, name: &str) {
        self.delete("v1", "pods", name);
    }

    /// An object as the server has it.
    pub(crate) fn get(&self, group: &str, plural: &str, name: &str) -> Option<Value> {
        self.store.lock().resources.get(&format!("{group}/{plural}"))?.get(&key(NAMESPACE, name)).cloned()
    }

    /// Fails in this way from now on; open watches are cut.
    pub(crate) fn fail(&self, outage: Outage) {
        self.store.lock().outage = outage;
        self.cut();
    }

    /// Refuses a verb on a resource in every namespace, or allows it again: on a plural of every group,
    /// or on one of `group/version/plural`.
    pub(crate) fn forbid(&self, verb: &'static str, resource: &str, refused: bool) {
        self.forbidden(verb, None, resource, refused);
    }

    /// The same in one namespace.
    pub(crate) fn forbid_in(&self, namespace: &str, verb: &'static str, resource: &str, refused: bool) {
        self.forbidden(verb, Some(namespace), resource, refused);
    }

    fn forbidden(&self, verb: &'static str, namespace: Option<&str>, resource: &str, refused: bool) {
        let right = (verb, namespace.map(str::to_owned), resource.to_owned());
        let mut store = self.store.lock();
        let _ = if refused { store.forbidden.insert(right) } else { store.forbidden.remove(&right) };
        drop(store);
        self.cut();
    }

    /// Rejects all writes of an object by clients, or accepts them again.
    pub(crate) fn deny(&self, plural: &str, name: &str, denied: bool) {
        let object = (plural.to_owned(), name.to_owned());
        let mut store = self.store.lock();
        let _ = if denied { store.denied.insert(object) } else { store.denied.remove(&object) };
    }

    /// Sets the user of `token`.
    pub(crate) fn account(&self, token: &str, user: &str) {
        self.store.lock().accounts.insert(token.to_owned(), user.to_owned());
    }

    /// `user` may do `verb` on the page `path`.
    pub(crate) fn grant(&self, user: &str, verb: &str, path: &str) {
        self.store.lock().grants.insert((user.to_owned(), verb.to_owned(), path.to_owned()));
    }

    /// Delays the start of every response by this time.
    pub(crate) fn delay(&self, delay: Duration) {
        self.store.lock().delay = delay;
    }

    /// Expires all current resource versions: watches that continue from them get status 410.
    pub(crate) fn forget(&self) {
        let mut store = self.store.lock();
        store.version += 1;
        store.oldest = store.version;
        store.history.clear();
        drop(store);
        self.cut();
    }

    /// Number of requests with this verb for this resource.
    pub(crate) fn request_count(&self, verb: &str, plural: &str) -> usize {
        self.store.lock().asked.iter().filter(|(v, resource)| *v == verb && resource.ends_with(plural)).count()
    }

    fn notify_watches(&self) {
        let version = self.store.lock().version;
        self.changed.send_replace(version);
    }

    fn cut(&self) {
        self.age.send_modify(|age| *age += 1);
    }
}

/// The key under which an object is stored.
pub(super) fn key(namespace: &str, name: &str) -> String {
    format!("{namespace}/{name}")
}

impl Store {
    /// Whether a user has this right.
    fn allows(&self, verb: &str, namespace: Option<&str>, resource: &str) -> bool {
        let speaks_of = |right: &String| resource == right || resource.ends_with(&format!("/{right}"));
        let mut refused = self.forbidden.iter().filter(|(v, _, right)| *v == verb && speaks_of(right));
        !refused.any(|(_, within, _)| within.is_none() || within.as_deref() == namespace)
    }

    /// Creates or changes an object, and returns it as stored.
    fn apply(&mut self, resource: &str, mut object: Value) -> Value {
        self.version += 1;
        let version = self.version;
        let name = object["metadata"]["name"].as_str().expect("an object with a name").to_owned();
        let namespace = object["metadata"]["namespace"].as_str().unwrap_or(NAMESPACE).to_owned();
        let name = key(&namespace, &name);
        let objects = self.resources.get_mut(resource).unwrap_or_else(|| panic!("{resource} is not installed"));
        let before = objects.get(&name).cloned();
        let meta = &mut object["metadata"];
        meta["namespace"] = json!(namespace);
        meta["resourceVersion"] = json!(version.to_string());
        if meta["uid"].is_null() {
            let known = before.as_ref().map(|b| b["metadata"]["uid"].clone());
            meta["uid"] = known.unwrap_or_else(|| json!(format!("uid-{version}")));
        }
        if meta["creationTimestamp"].is_null() {
            meta["creationTimestamp"] = json!("2026-01-01T00:00:00Z");
        }
        // A pod with another UID is another pod: the old one is deleted first.
        let replaced = before.as_ref().is_some_and(|b| b["metadata"]["uid"] != object["metadata"]["uid"]);
        objects.insert(name, object.clone());
        if replaced {
            self.step(resource, version, before, None);
            self.version += 1;
            self.step(resource, version + 1, None, Some(object.clone()));
        } else {
            self.step(resource, version, before, Some(object.clone()));
        }
        object
    }

    fn delete(&mut self, resource: &str, name: &str) {
        self.version += 1;
        let version = self.version;
        let objects = self.resources.get_mut(resource).unwrap_or_else(|| panic!("{resource} is not installed"));
        if let Some(before) = objects.remove(&key(NAMESPACE, name)) {
            self.step(resource, version, Some(before), None);
        }
    }

    fn step(&mut self, resource: &str, version: u64, before: Option<Value>, after: Option<Value>) {
        self.history.push_back(Step { version, resource: resource.to_owned(), before, after });
        if self.history.len() > 100_000 {
            self.oldest = self.history.pop_front().map_or(self.oldest, |step| step.version);
        }
    }
}
