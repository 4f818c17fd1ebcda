//! Follows one kind of object: lists it, watches it from there, and lists again when its resource version has expired.
//!
//! A failure is logged once when it begins and once when it ends. It is retried forever, with growing
//! delays. Known objects stay meanwhile.
//!
//! `watcher` of kube-runtime is not used: where `watch` is refused, it asks for it again and never lists, so a service
//! account that may only `list` would see no change. Objects that are invalid need their last valid version, which its
//! store does not keep.

use super::objects::{ApiNames, Meta, Object, ObjectKind};
use super::table::ObjectChange;
use attache_types::rng;
use futures_util::StreamExt;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::core::{ApiResource, DynamicResourceScope, GroupVersionKind};
use kube::{Client, Resource};
use rand::{RngExt, SeedableRng};
use serde::Deserialize;
use serde_json::Value;
use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

/// Delay before the first retry after a failure.
pub const FIRST_BACKOFF: Duration = Duration::from_millis(200);
/// Longest delay between retries, before [`JITTER`]. A restored API server is noticed within 5 s.
pub const MAX_BACKOFF: Duration = Duration::from_secs(4);
/// Time between retries for an optional kind that is not installed or may not be read.
pub const ABSENT_INTERVAL: Duration = Duration::from_secs(30);
/// Time between lists of a kind that may be listed but not watched; changes take effect that much later.
pub const RELIST_INTERVAL: Duration = Duration::from_secs(10);
/// Relative spread of delays to both sides, so that replicas don't send requests at the same time.
const JITTER: f64 = 0.2;
/// Objects on one page of a list, as in client-go.
pub const PAGE: u32 = 500;
/// A page that takes longer counts as failed.
pub const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// The API server ends a watch after this time, and the follower continues from the same resource version. A dead
/// connection is noticed by then.
pub const WATCH_TIMEOUT: Duration = Duration::from_secs(120);
/// How late the end of a watch may be.
const WATCH_GRACE: Duration = Duration::from_secs(5);
/// Shortest time between two watches of one kind, however soon the API server ends them.
const MIN_WATCH: Duration = Duration::from_secs(1);

/// Explains a response with status 401.
const NOT_KNOWN: &str = "the API server rejects the credentials: the token of the service account, or the credentials \
                         in the kubeconfig, are not valid";

/// Selects the objects that a follower lists and watches.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    /// Kind of the objects to follow.
    pub kind: ObjectKind,
    /// Namespace in which the objects are.
    pub namespace: String,
    /// Label selector for the list and the watch; `None` selects all.
    pub labels: Option<String>,
}

/// What a follower sends to its listener.
#[derive(Clone, Debug)]
pub enum WatchUpdate {
    /// A change of an object or a step of a list.
    Change(ObjectChange),
    /// A list or a watch failed, and is retried.
    Failed(Setback),
    /// The failure that was sent before has ended.
    Recovered,
}

/// What a failure means for listeners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setback {
    /// The kind is not installed.
    pub not_installed: bool,
    /// The service account lacks a right.
    pub refused: bool,
    /// Known objects may be out of date.
    pub is_loss: bool,
    /// The kind may be listed but not watched. It is listed every [`RELIST_INTERVAL`], and the setback lasts
    /// until it can be watched.
    pub unwatched: bool,
}

/// An object in a response of the API server: metadata, and the rest without interpretation.
#[derive(Clone, Debug, Deserialize)]
struct Raw {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Value,
    #[serde(default)]
    status: Value,
    /// Data of a ConfigMap, which has no spec.
    #[serde(default)]
    data: Value,
}

impl Resource for Raw {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn kind(r: &ApiResource) -> Cow<'_, str> {
        r.kind.as_str().into()
    }

    fn group(r: &ApiResource) -> Cow<'_, str> {
        r.group.as_str().into()
    }

    fn version(r: &ApiResource) -> Cow<'_, str> {
        r.version.as_str().into()
    }

    fn plural(r: &ApiResource) -> Cow<'_, str> {
        r.plural.as_str().into()
    }

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.metadata
    }
}

impl From<Raw> for Object {
    fn from(raw: Raw) -> Self {
        let meta = raw.metadata;
        let shared = |(k, v): (String, String)| (Arc::from(k), Arc::from(v));
        Self {
            meta: Meta {
                name: meta.name.unwrap_or_default(),
                uid: meta.uid.unwrap_or_default(),
                created: meta.creation_timestamp.map_or(0, |time| time.0.as_second()),
                generation: meta.generation.unwrap_or(0),
                version: meta.resource_version.map_or(0, |version| hash(&version)),
                deleting: meta.deletion_timestamp.is_some(),
                labels: meta.labels.unwrap_or_default().into_iter().map(shared).collect(),
                annotations: meta.annotations.unwrap_or_default(),
            },
            spec: if raw.data.is_null() { raw.spec } else { raw.data },
            status: raw.status,
        }
    }
}

/// Hash of a resource version, which is only compared and is smaller this way.
fn hash(version: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    version.hash(&mut hasher);
    hasher.finish()
}

/// Why a list or a watch failed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum WatchError {
    /// A right is missing.
    Forbidden { verb: &'static str },
    /// The kind is not installed.
    NotInstalled,
    /// The resource version has expired, or the kind was removed.
    Gone,
    /// Any other failure, with its message.
    Other { verb: &'static str, error: String },
}

impl WatchError {
    fn of(verb: &'static str, error: &kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::of_status(verb, status.code, &status.message),
            other => Self::Other { verb, error: with_causes(other) },
        }
    }

    fn of_status(verb: &'static str, code: u16, message: &str) -> Self {
        match code {
            401 => Self::Other { verb, error: format!("status 401: {message}: {NOT_KNOWN}") },
            403 => Self::Forbidden { verb },
            // Only a list decides whether a kind exists: an API server that restarts, or that aggregates, answers
            // watches with 404 for a moment.
            404 if verb == "list" => Self::NotInstalled,
            404 | 410 => Self::Gone,
            code => Self::Other { verb, error: format!("status {code}: {message}") },
        }
    }

    fn late(verb: &'static str) -> Self {
        Self::Other { verb, error: "no answer in time".to_owned() }
    }

    /// Whether both are the same failure, apart from the message.
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Forbidden { verb }, Self::Forbidden { verb: before }) => verb == before,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }

    /// Whether lists work and watches are refused.
    fn is_unwatched(&self) -> bool {
        *self == Self::Forbidden { verb: "watch" }
    }
}

pub(super) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let more = inner.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = inner.source();
    }
    text
}

/// Follows a kind until its listener is gone.
pub struct Follower {
    subject: Subject,
    api: Api<Raw>,
    updates: mpsc::Sender<WatchUpdate>,
    rng: rng::PickRng,
    failures: u32,
    /// How often the resource version expired since the last event of a watch.
    lost: u32,
    trouble: Option<WatchError>,
}

/// The resource version that a list or a watch has reached; or the failure, with the version to continue
/// from if there is one.
type Reached = Result<String, (WatchError, Option<String>)>;

/// Signals that the listener is gone, so that the follower ends.
struct ListenerGone;

impl Follower {
    /// Creates a follower that sends updates about `subject` to `updates`.
    #[must_use]
    pub fn new(client: Client, subject: Subject, updates: mpsc::Sender<WatchUpdate>) -> Self {
        let ApiNames { group, version, kind, plural } = subject.kind.naming();
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
        let api = Api::namespaced_with(client, &subject.namespace, &resource);
        let rng = rng::PickRng::seed_from_u64(rng::system_seed());
        Self { subject, api, updates, rng, failures: 0, lost: 0, trouble: None }
    }

    /// Lists and watches in a loop until the listener is gone.
    pub async fn run(mut self) {
        // The listener stops this loop by dropping its end of the channel.
        let updates = self.updates.clone();
        tokio::select! {
            () = updates.closed() => {}
            _ = self.follow() => {}
        }
    }

    async fn follow(&mut self) -> Result<(), ListenerGone> {
        let mut place: Option<String> = None;
        loop {
            let result = match place.take() {
                None => self.list().await?,
                Some(version) => self.watch(version).await?,
            };
            match result {
                Ok(version) => place = Some(version),
                // Not a failure: the next step is a list.
                Err((WatchError::Gone, _)) => {
                    tracing::debug!(
                        resource = self.resource(),
                        "watch expired (resource version too old); listing again"
                    );
                    if self.lost > 0 {
                        self.pause_for(backoff(self.lost)).await;
                    }
                    self.lost = self.lost.saturating_add(1);
                }
                Err((trouble, last)) => {
                    place = last.filter(|_| !trouble.is_unwatched());
                    self.troubled(trouble).await?;
                    self.pause().await;
                }
            }
        }
    }

    fn resource(&self) -> &'static str {
        self.subject.kind.naming().plural
    }

    async fn send(&self, update: WatchUpdate) -> Result<(), ListenerGone> {
        self.updates.send(update).await.map_err(|_| ListenerGone)
    }

    /// Lists all objects page by page, and returns the resource version to watch from.
    async fn list(&mut self) -> Result<Reached, ListenerGone> {
        let mut params =
            ListParams { label_selector: self.subject.labels.clone(), limit: Some(PAGE), ..ListParams::default() };
        self.send(WatchUpdate::Change(ObjectChange::ListBegun)).await?;
        loop {
            let page = match timeout(LIST_TIMEOUT, self.api.list(&params)).await {
                Ok(Ok(page)) => page,
                Ok(Err(error)) => return Ok(Err((WatchError::of("list", &error), None))),
                Err(_) => return Ok(Err((WatchError::late("list"), None))),
            };
            for raw in page.items {
                self.send(WatchUpdate::Change(ObjectChange::Listed(self.object(raw)))).await?;
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => {
                    self.send(WatchUpdate::Change(ObjectChange::ListDone)).await?;
                    if !self.trouble.as_ref().is_some_and(WatchError::is_unwatched) {
                        self.well().await?;
                    }
                    return Ok(Ok(page.metadata.resource_version.unwrap_or_default()));
                }
            }
        }
    }

    /// Watches from a resource version until the watch ends, and returns the version that it has reached.
    async fn watch(&mut self, mut version: String) -> Result<Reached, ListenerGone> {
        let params = WatchParams {
            label_selector: self.subject.labels.clone(),
            timeout: u32::try_from(WATCH_TIMEOUT.as_secs()).ok(),
            bookmarks: true,
            ..WatchParams::default()
        };
        let begun = Instant::now();
        let stream = match timeout(LIST_TIMEOUT, self.api.watch(&params, &version)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Ok(Err((WatchError::of("watch", &error), Some(version)))),
            Err(_) => return Ok(Err((WatchError::late("watch"), Some(version)))),
        };
        let mut stream = std::pin::pin!(stream);
        // A started watch ends a refusal; other failures end with the first event.
        if matches!(self.trouble, Some(WatchError::Forbidden { .. })) {
            self.well().await?;
        }
        loop {
            let (change, at) = match timeout(WATCH_TIMEOUT + WATCH_GRACE, stream.next()).await {
                // The API server ended the watch, or the connection died: both continue from here.
                Ok(None) | Err(_) => {
                    tokio::time::sleep_until(begun + MIN_WATCH).await;
                    self.lost = 0;
                    self.well().await?;
                    return Ok(Ok(version));
                }
                Ok(Some(Ok(WatchEvent::Added(raw) | WatchEvent::Modified(raw)))) => {
                    let at = raw.metadata.resource_version.clone();
                    (Some(ObjectChange::Applied(self.object(raw))), at)
                }
                Ok(Some(Ok(WatchEvent::Deleted(raw)))) => {
                    let at = raw.metadata.resource_version.clone();
                    let Object { meta, .. } = raw.into();
                    (Some(ObjectChange::Deleted { name: meta.name, uid: meta.uid }), at)
                }
                Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => (None, Some(bookmark.metadata.resource_version)),
                Ok(Some(Ok(WatchEvent::Error(status)))) => {
                    let trouble = WatchError::of_status("watch", status.code, &status.message);
                    return Ok(Err((trouble, Some(version))));
                }
                Ok(Some(Err(error))) => return Ok(Err((WatchError::of("watch", &error), Some(version)))),
            };
            if let Some(at) = at.filter(|at| !at.is_empty()) {
                version = at;
            }
            self.lost = 0;
            self.well().await?;
            if let Some(change) = change {
                self.send(WatchUpdate::Change(change)).await?;
            }
        }
    }

    fn object(&self, raw: Raw) -> Object {
        Object::from(raw).trimmed(self.subject.kind)
    }

    /// Records that list and watch work, and logs it after a failure.
    async fn well(&mut self) -> Result<(), ListenerGone> {
        self.failures = 0;
        if self.trouble.take().is_none() {
            return Ok(());
        }
        let namespace = self.subject.namespace.as_str();
        tracing::info!(resource = self.resource(), namespace, "watch works again");
        self.send(WatchUpdate::Recovered).await
    }

    /// Whether it matters that this kind can't be followed.
    fn is_loss(&self, trouble: &WatchError) -> bool {
        // An optional kind need not be installed.
        self.subject.kind.is_needed() || matches!(trouble, WatchError::Other { .. })
    }

    async fn troubled(&mut self, trouble: WatchError) -> Result<(), ListenerGone> {
        let setback = Setback {
            not_installed: trouble == WatchError::NotInstalled,
            refused: matches!(trouble, WatchError::Forbidden { .. }),
            is_loss: self.is_loss(&trouble),
            unwatched: trouble.is_unwatched(),
        };
        self.send(WatchUpdate::Failed(setback)).await?;
        if self.trouble.as_ref().is_some_and(|before| before.is_like(&trouble)) {
            return Ok(());
        }
        self.say(&trouble);
        self.trouble = Some(trouble);
        Ok(())
    }

    fn say(&self, trouble: &WatchError) {
        let ApiNames { group, version, plural, .. } = self.subject.kind.naming();
        let namespace = self.subject.namespace.as_str();
        let rule = self.subject.kind.role_rule();
        match trouble {
            WatchError::Forbidden { verb: "watch" } => tracing::warn!(
                namespace,
                group,
                resource = plural,
                "the API server refuses `watch` on `{plural}` (group `{group}`) in namespace `{namespace}`; Attaché \
                 lists them every {} s instead. The service account's Role there needs `{rule}`",
                RELIST_INTERVAL.as_secs()
            ),
            WatchError::Forbidden { verb } if self.subject.kind.is_needed() => tracing::error!(
                namespace,
                group,
                resource = plural,
                verb,
                "the API server refuses `{verb}` on `{plural}` (group `{group}`) in namespace `{namespace}`; \
                 the service account's Role there needs `{rule}`"
            ),
            WatchError::Forbidden { verb } if self.subject.kind == ObjectKind::ConfigMap => tracing::warn!(
                namespace,
                group,
                resource = plural,
                verb,
                "the API server refuses `{verb}` on `{plural}` in namespace `{namespace}`; InferencePools there use \
                 the template, without settings of their own. The service account's Role there needs `{rule}`"
            ),
            // Roles of GIE's charts contain neither llm-d's kinds nor older ones.
            WatchError::Forbidden { verb } => tracing::info!(
                namespace,
                group,
                resource = plural,
                verb,
                "the API server refuses `{verb}` on `{plural}` (group `{group}`) in namespace `{namespace}`; \
                 such objects have no effect unless the service account's Role there has `{rule}`"
            ),
            WatchError::NotInstalled if self.subject.kind.is_needed() => tracing::error!(
                namespace,
                group,
                resource = plural,
                "the API server does not know `{plural}` of `{group}/{version}`: its CustomResourceDefinition is \
                 not installed, or only in another group or version (`--pool-group`)"
            ),
            WatchError::NotInstalled => {
                tracing::debug!(group, resource = plural, "resource is not installed; Attaché checks again later");
            }
            WatchError::Gone => {}
            WatchError::Other { verb, error } => tracing::warn!(
                namespace,
                group,
                resource = plural,
                verb,
                error,
                "watch of `{plural}` failed; keeping the last known objects"
            ),
        }
    }

    async fn pause(&mut self) {
        let delay = match &self.trouble {
            Some(trouble) if trouble.is_unwatched() => RELIST_INTERVAL,
            Some(trouble) if !self.is_loss(trouble) => ABSENT_INTERVAL,
            _ => backoff(self.failures),
        };
        self.failures = self.failures.saturating_add(1);
        self.pause_for(delay).await;
    }

    async fn pause_for(&mut self, delay: Duration) {
        let spread = 1.0 + JITTER * (2.0 * self.rng.random::<f64>() - 1.0);
        tokio::time::sleep(delay.mul_f64(spread)).await;
    }
}

/// Delay after `failures` earlier failures: starts at [`FIRST_BACKOFF`] and doubles up to [`MAX_BACKOFF`].
fn backoff(failures: u32) -> Duration {
    FIRST_BACKOFF.saturating_mul(1 << failures.min(16)).min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests;
