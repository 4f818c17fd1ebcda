//! The HTTP side of the fake API server: maps paths to requests, and sends responses.

use super::{FakeApi, NAMESPACE, Outage, Step, key};
use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::serve::ListenerExt;
use futures_util::stream;
use http::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::Instant;

/// Interval of bookmarks: far shorter than a real server's, so that tests see some.
const BOOKMARK_INTERVAL: Duration = Duration::from_millis(200);

pub(super) async fn serve(listener: TcpListener, api: FakeApi) {
    let router = Router::new().fallback(answer).with_state(api);
    // Like Go's servers, it sends an event when it happens.
    let listener = listener.tap_io(|stream| stream.set_nodelay(true).expect("no delay"));
    let _ = axum::serve(listener, router).await;
}

/// The resource that a request names.
struct ResourceRequest {
    /// `v1/pods`, `llm-d.ai/v1alpha2/inferenceobjectives`
    resource: String,
    /// `None` for resources without a namespace.
    namespace: Option<String>,
    name: Option<String>,
    /// Only the number of replicas of the object.
    scale: bool,
    query: BTreeMap<String, String>,
}

impl ResourceRequest {
    fn of(uri: &http::Uri) -> Option<Self> {
        let words: Vec<&str> = uri.path().trim_matches('/').split('/').collect();
        let (group, rest) = match words.as_slice() {
            ["api", version, rest @ ..] => ((*version).to_owned(), rest),
            ["apis", group, version, rest @ ..] => (format!("{group}/{version}"), rest),
            _ => return None,
        };
        let (scale, rest) = match rest {
            [object @ .., "scale"] => (true, object),
            _ => (false, rest),
        };
        let (namespace, plural, name) = match rest {
            [plural] => (None, plural, None),
            ["namespaces", namespace, plural] => (Some(*namespace), plural, None),
            ["namespaces", namespace, plural, name] | ["namespaces", namespace, plural, name, "status"] => {
                (Some(*namespace), plural, Some((*name).to_owned()))
            }
            _ => return None,
        };
        let namespace = namespace.map(str::to_owned);
        let pairs = uri.query().unwrap_or_default().split('&').filter_map(|pair| pair.split_once('='));
        let decoded = |text: &str| percent_decoded(&text.replace('+', " "));
        let query = pairs.map(|(k, v)| (k.to_owned(), decoded(v))).collect();
        Some(Self { resource: format!("{group}/{plural}"), namespace, name, scale, query })
    }

    fn number(&self, key: &str) -> Option<u64> {
        self.query.get(key)?.parse().ok()
    }

    /// The key of the requested object.
    fn key(&self) -> String {
        key(self.namespace.as_deref().unwrap_or(NAMESPACE), self.name.as_deref().unwrap_or_default())
    }

    fn is_watch(&self) -> bool {
        self.query.get("watch").is_some_and(|value| value == "true" || value == "1")
    }

    /// Whether an object is selected: by its namespace, by labels `k=v` or `k` alone, and by name, as pickers select.
    fn wants(&self, object: &Value) -> bool {
        if self.namespace.as_ref().is_some_and(|namespace| object["metadata"]["namespace"] != namespace.as_str()) {
            return false;
        }
        let labels = self.query.get("labelSelector").map_or("", String::as_str);
        let pairs = labels.split(',').filter_map(|pair| pair.split_once('='));
        let by_labels = pairs.into_iter().all(|(k, v)| object["metadata"]["labels"][k] == v);
        let is_key =
            |word: &&str| !word.is_empty() && word.chars().all(|c| c.is_ascii_alphanumeric() || "-._/".contains(c));
        let by_labels =
            by_labels && labels.split(',').filter(is_key).all(|k| !object["metadata"]["labels"][k].is_null());
        let name = self.query.get("fieldSelector").and_then(|field| field.strip_prefix("metadata.name="));
        by_labels && name.is_none_or(|name| object["metadata"]["name"] == name)
    }
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let digits = [rest.next().unwrap_or(b'0'), rest.next().unwrap_or(b'0')];
        bytes.push(u8::from_str_radix(&String::from_utf8_lossy(&digits), 16).unwrap_or(b'?'));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

async fn answer(State(api): State<FakeApi>, request: Request) -> Response {
    let Some(question) = ResourceRequest::of(request.uri()) else { return status(404, "no such path") };
    let method = request.method().clone();
    let verb = match (&method, question.name.is_some(), question.is_watch()) {
        (&Method::GET, false, false) => "list",
        (&Method::GET, _, true) => "watch",
        (&Method::GET, true, _) => "get",
        (&Method::POST, ..) => "create",
        (&Method::PATCH, true, _) if request.uri().path().ends_with("/status") => "patch",
        _ => "update",
    };
    let (delay, outage, forbidden, denied, installed) = {
        let mut store = api.store.lock();
        store.asked.push((verb, question.resource.clone()));
        let plural = question.resource.rsplit('/').next().unwrap_or_default().to_owned();
        let object = (plural, question.name.clone().unwrap_or_default());
        let forbidden = !store.allows(verb, question.namespace.as_deref(), &question.resource);
        let denied = matches!(verb, "create" | "patch" | "update") && store.denied.contains(&object);
        (store.delay, store.outage.clone(), forbidden, denied, store.resources.contains_key(&question.resource))
    };
    tokio::time::sleep(delay).await;
    match outage {
        Outage::Status(code) => return status(code, "the server is currently unable to handle the request"),
        Outage::Of(plural, code) if question.resource.ends_with(plural) => return status(code, "not now"),
        Outage::Watches(plural, code) if verb == "watch" && question.resource.ends_with(plural) => {
            return status(code, "not now");
        }
        Outage::Broken => return broken(),
        Outage::None | Outage::Of(..) | Outage::Watches(..) => {}
    }
    if forbidden {
        return status(403, &format!("{} is forbidden: cannot {verb}", question.resource));
    }
    if denied {
        return status(422, "admission webhook \"strict.example.com\" denied the request");
    }
    if let Some(judge) = Review::of(&question.resource) {
        let Ok(body) = axum::body::to_bytes(request.into_body(), 1 << 20).await else {
            return status(400, "no body");
        };
        return judge.answer(&api, &body);
    }
    if !installed {
        return status(404, "the server could not find the requested resource");
    }
    match verb {
        "list" => list(&api, &question),
        "watch" => watch(api, question),
        "get" if question.scale => get_scale(&api, &question),
        "get" => get(&api, &question),
        _ => {
            let Ok(body) = axum::body::to_bytes(request.into_body(), 1 << 20).await else {
                return status(400, "no body");
            };
            if verb == "patch" { apply_status(&api, &question, &body) } else { write(&api, &question, verb, &body) }
        }
    }
}

/// Server-side apply of conditions, which are identified by their types. The rest of the object stays.
fn apply_status(api: &FakeApi, question: &ResourceRequest, body: &[u8]) -> Response {
    if question.query.get("fieldManager").is_none_or(String::is_empty) {
        return status(400, "fieldManager is required for apply patch");
    }
    let Ok(applied) = serde_json::from_slice::<Value>(body) else { return status(400, "no JSON") };
    let mut store = api.store.lock();
    let Some(known) = store.resources[&question.resource].get(&question.key()) else { return status(404, "not found") };
    let mut object = known.clone();
    if applied["metadata"]["uid"] != object["metadata"]["uid"] {
        return status(409, "Precondition failed: UID in precondition differs");
    }
    let list = |value: &Value| value["status"]["conditions"].as_array().cloned().unwrap_or_default();
    let (theirs, mut conditions) = (list(&applied), list(&object));
    conditions.retain(|condition| theirs.iter().all(|new| new["type"] != condition["type"]));
    conditions.extend(theirs);
    object["status"]["conditions"] = json!(conditions);
    let kept = store.apply(&question.resource, object);
    drop(store);
    api.notify_watches();
    good(&kept)
}

/// Reviews, which get a response and are not stored.
#[derive(Clone, Copy)]
enum Review {
    Token,
    Access,
}

impl Review {
    fn of(resource: &str) -> Option<Self> {
        match resource {
            "authentication.k8s.io/v1/tokenreviews" => Some(Self::Token),
            "authorization.k8s.io/v1/subjectaccessreviews" => Some(Self::Access),
            _ => None,
        }
    }

    fn answer(self, api: &FakeApi, body: &[u8]) -> Response {
        let Ok(mut review) = serde_json::from_slice::<Value>(body) else { return status(400, "no JSON") };
        let word = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let store = api.store.lock();
        review["status"] = match self {
            Self::Token => match store.accounts.get(&word(&review["spec"]["token"])) {
                Some(user) => {
                    json!({"authenticated": true, "user": {"username": user, "groups": ["system:authenticated"]}})
                }
                None => json!({"error": "invalid bearer token"}),
            },
            Self::Access => {
                let spec = &review["spec"];
                let (page, in_group) = (&spec["nonResourceAttributes"], &spec["groups"][0] == "system:authenticated");
                let asked = (word(&spec["user"]), word(&page["verb"]), word(&page["path"]));
                json!({"allowed": in_group && store.grants.contains(&asked)})
            }
        };
        good(&review)
    }
}

fn status(code: u16, message: &str) -> Response {
    let reason = match code {
        403 => "Forbidden",
        404 => "NotFound",
        409 => "Conflict",
        410 => "Expired",
        _ => "",
    };
    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
                      "reason": reason, "code": code});
    let code = StatusCode::from_u16(code).expect("a status code");
    (code, [("content-type", "application/json")], body.to_string()).into_response()
}

fn good(body: &Value) -> Response {
    ([("content-type", "application/json")], body.to_string()).into_response()
}

/// A valid beginning, after which the connection ends.
fn broken() -> Response {
    let pieces = [Ok(Bytes::from_static(b"{\"kind\":")), Err(std::io::Error::other("cut"))];
    Response::new(Body::from_stream(stream::iter(pieces)))
}

fn list(api: &FakeApi, question: &ResourceRequest) -> Response {
    let store = api.store.lock();
    let objects = &store.resources[&question.resource];
    // A further page follows a name, in the version of the first page.
    let token = question.query.get("continue").and_then(|token| token.split_once(':'));
    let version = token.and_then(|(version, _)| version.parse().ok()).unwrap_or(store.version);
    if version < store.oldest {
        return status(410, "the provided continue parameter is too old");
    }
    let behind = token.map(|(_, name)| name);
    let mut wanted = objects.iter().filter(|(name, o)| behind.is_none_or(|b| name.as_str() > b) && question.wants(o));
    let limit = question.number("limit").map_or(usize::MAX, |limit| limit as usize);
    let page: Vec<(&String, &Value)> = wanted.by_ref().take(limit).collect();
    let more = wanted.next().is_some();
    let last = page.last().map(|(name, _)| name.as_str()).unwrap_or_default();
    let mut meta = json!({"resourceVersion": version.to_string()});
    if more {
        meta["continue"] = json!(format!("{version}:{last}"));
    }
    let items: Vec<&Value> = page.iter().map(|(_, object)| *object).collect();
    good(&json!({"kind": "List", "apiVersion": "v1", "metadata": meta, "items": items}))
}

fn get(api: &FakeApi, question: &ResourceRequest) -> Response {
    let store = api.store.lock();
    store.resources[&question.resource].get(&question.key()).map_or_else(|| status(404, "not found"), good)
}

fn get_scale(api: &FakeApi, question: &ResourceRequest) -> Response {
    let store = api.store.lock();
    let Some(object) = store.resources[&question.resource].get(&question.key()) else {
        return status(404, "not found");
    };
    let (name, version) = (&object["metadata"]["name"], &object["metadata"]["resourceVersion"]);
    good(&json!({
        "kind": "Scale", "apiVersion": "autoscaling/v1",
        "metadata": {"name": name, "namespace": object["metadata"]["namespace"], "resourceVersion": version},
        "spec": {"replicas": object["spec"]["replicas"]}, "status": {"replicas": object["status"]["replicas"]},
    }))
}

/// Creates and replaces, with the resource version as an optimistic lock.
fn write(api: &FakeApi, question: &ResourceRequest, verb: &str, body: &[u8]) -> Response {
    let Ok(mut object) = serde_json::from_slice::<Value>(body) else { return status(400, "no JSON") };
    let mut store = api.store.lock();
    let namespace = question.namespace.as_deref().unwrap_or(NAMESPACE);
    object["metadata"]["namespace"] = json!(namespace);
    let name = key(namespace, object["metadata"]["name"].as_str().unwrap_or_default());
    let known = store.resources[&question.resource].get(&name);
    let conflict = match (verb, known) {
        ("create", Some(_)) => Some("it exists already"),
        ("create", None) => None,
        (_, None) => return status(404, "not found"),
        (_, Some(known)) => {
            let (have, got) = (&known["metadata"]["resourceVersion"], &object["metadata"]["resourceVersion"]);
            (!got.is_null() && have != got).then_some("the object has been modified")
        }
    };
    if let Some(conflict) = conflict {
        return status(409, conflict);
    }
    if let Some(known) = known.filter(|_| question.scale) {
        let replicas = object["spec"]["replicas"].take();
        object = known.clone();
        object["spec"]["replicas"] = replicas;
    }
    let kept = store.apply(&question.resource, object);
    drop(store);
    api.notify_watches();
    good(&kept)
}

/// An open watch.
struct Watching {
    api: FakeApi,
    question: ResourceRequest,
    version: u64,
    changed: watch::Receiver<u64>,
    age: watch::Receiver<u64>,
    end: Instant,
    ready: VecDeque<Value>,
    over: bool,
}

fn watch(api: FakeApi, question: ResourceRequest) -> Response {
    let version = question.number("resourceVersion").unwrap_or(0);
    // Before the checks: what changes after them cuts this watch.
    let (changed, age) = (api.changed.subscribe(), api.age.subscribe());
    let (oldest, installed) = {
        let store = api.store.lock();
        (store.oldest, store.resources.contains_key(&question.resource))
    };
    if !installed {
        return status(404, "the server could not find the requested resource");
    }
    if version < oldest {
        return status(410, "too old resource version");
    }
    let seconds = question.number("timeoutSeconds").unwrap_or(300);
    let watching = Watching {
        changed,
        age,
        end: Instant::now() + Duration::from_secs(seconds),
        ready: VecDeque::new(),
        over: false,
        api,
        question,
        version,
    };
    let events = stream::unfold(watching, |mut watching| async move {
        let event = watching.next().await?;
        let mut line = event.to_string();
        line.push('\n');
        Some((Ok::<_, std::io::Error>(Bytes::from(line)), watching))
    });
    let mut response = Response::new(Body::from_stream(events));
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("application/json"));
    response
}

impl Watching {
    async fn next(&mut self) -> Option<Value> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            if self.over {
                return None;
            }
            self.changed.borrow_and_update();
            self.collect();
            if !self.ready.is_empty() {
                continue;
            }
            tokio::select! {
                biased;
                _ = self.age.changed() => {
                    // A watch cut by expired versions gets that status; other watches just end.
                    if self.version < self.api.store.lock().oldest {
                        self.ready.push_back(json!({"type": "ERROR", "object": {
                            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
                            "message": "too old resource version", "reason": "Expired", "code": 410}}));
                    }
                    self.over = true;
                }
                _ = self.changed.changed() => {}
                () = tokio::time::sleep_until(self.end) => self.over = true,
                () = tokio::time::sleep(BOOKMARK_INTERVAL) => {
                    self.version = self.version.max(self.api.store.lock().version);
                    let version = self.version.to_string();
                    let meta = json!({"resourceVersion": version});
                    return Some(json!({"type": "BOOKMARK", "object": {"kind": "Bookmark", "apiVersion": "v1", "metadata": meta}}));
                }
            }
        }
    }

    /// Takes the steps that were not sent yet.
    fn collect(&mut self) {
        let store = self.api.store.lock();
        let from = store.history.partition_point(|step| step.version <= self.version);
        for step in store.history.iter().skip(from) {
            self.version = step.version;
            if step.resource == self.question.resource
                && let Some(event) = event_for(step, &self.question)
            {
                self.ready.push_back(event);
            }
        }
    }
}

/// The form of a step for a client that selects some objects only.
fn event_for(step: &Step, question: &ResourceRequest) -> Option<Value> {
    let wanted = |object: &&Value| question.wants(object);
    let before = step.before.as_ref().filter(wanted);
    let after = step.after.as_ref().filter(wanted);
    let (kind, object) = match (before, after) {
        (None, None) => return None,
        (None, Some(after)) => ("ADDED", after.clone()),
        (Some(_), Some(after)) => ("MODIFIED", after.clone()),
        (Some(before), None) => {
            let mut gone = before.clone();
            gone["metadata"]["resourceVersion"] = json!(step.version.to_string());
            ("DELETED", gone)
        }
    };
    Some(json!({"type": kind, "object": object}))
}
