//! Follows one kind of object: lists it, watches it from there, and begins anew when the API server no longer knows the place.
//!
//! Whatever goes wrong is told once when it begins and once when it is over, and is tried again, forever: less and less often while it lasts.
//! What was known stays meanwhile, since nothing is told of it.

use super::objects::{Kind, Meta, Naming, Object};
use super::table::Change;
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

/// The first repetition after a failure.
pub const FIRST_BACKOFF: Duration = Duration::from_millis(200);
/// Repetitions are at most this far apart, and spread by [`JITTER`]: an API server that comes back is noticed within 5 s.
pub const MAX_BACKOFF: Duration = Duration::from_secs(4);
/// A kind that nothing depends on and that is not installed, or may not be read, is looked for this often.
pub const ABSENT_INTERVAL: Duration = Duration::from_secs(30);
/// A kind that may be listed and not watched is listed this often: changes take effect that much later.
pub const RELIST_INTERVAL: Duration = Duration::from_secs(10);
/// Repetitions are spread by this part to both sides, so that replicas don't ask in step.
const JITTER: f64 = 0.2;
/// Objects on one page of a list, as client-go has it.
pub const PAGE: u32 = 500;
/// A page that takes longer counts as none.
pub const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// The API server ends a watch after this time, and it is begun anew from the same place. A connection that died without a word is
/// found out by then.
pub const WATCH_TIMEOUT: Duration = Duration::from_secs(120);
/// What a watch may be late to end.
const WATCH_GRACE: Duration = Duration::from_secs(5);
/// Watches of one kind begin no faster than this, however soon the API server ends them.
const MIN_WATCH: Duration = Duration::from_secs(1);

/// What a 401 means.
const NOT_KNOWN: &str = "the API server does not know who asks: the service account's token, or what the kubeconfig has in its place, is not valid";

/// What is followed.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Subject {
    /// The kind.
    pub kind: Kind,
    /// The namespace.
    pub namespace: String,
    /// Labels to ask for.
    pub labels: Option<String>,
}

/// What following tells.
#[derive(Clone, Debug)]
pub enum Told {
    /// Something about an object.
    Change(Change),
    /// A list or a watch came to nothing, and is tried again.
    Trouble(Setback),
    /// The trouble is over.
    Well,
}

/// What trouble means to those who listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setback {
    /// There is no such kind.
    pub not_installed: bool,
    /// A right is missing.
    pub refused: bool,
    /// What is known may no longer be so.
    pub is_loss: bool,
    /// The kind may be listed and not watched: it is listed anew every [`RELIST_INTERVAL`], and the setback lasts until it can be watched.
    pub unwatched: bool,
}

/// An object as it comes over the wire: whatever its kind, only what all objects have is looked at here.
#[derive(Clone, Debug, Deserialize)]
struct Raw {
    #[serde(default)]
    metadata: ObjectMeta,
    #[serde(default)]
    spec: Value,
    #[serde(default)]
    status: Value,
    /// What a ConfigMap has in place of a spec.
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

/// Versions are compared and never read, and the hash is the smaller.
fn hash(version: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    version.hash(&mut hasher);
    hasher.finish()
}

/// Why a list or a watch came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Trouble {
    /// A right is missing.
    Forbidden { verb: &'static str },
    /// The kind is not installed.
    NotInstalled,
    /// The API server no longer knows the place, or the kind that it was a place in.
    Gone,
    /// Anything else.
    Other { verb: &'static str, error: String },
}

impl Trouble {
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
            // Whether there is such a kind only a list says: an API server that restarts, or that aggregates, answers watches so for a moment.
            404 if verb == "list" => Self::NotInstalled,
            404 | 410 => Self::Gone,
            code => Self::Other { verb, error: format!("status {code}: {message}") },
        }
    }

    fn late(verb: &'static str) -> Self {
        Self::Other { verb, error: "no answer in time".to_owned() }
    }

    /// The same trouble, whatever its words.
    fn is_like(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Forbidden { verb }, Self::Forbidden { verb: before }) => verb == before,
            _ => std::mem::discriminant(self) == std::mem::discriminant(other),
        }
    }

    /// Lists are answered, watches are refused.
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

/// Follows a kind until whoever listens is gone.
pub struct Follower {
    subject: Subject,
    api: Api<Raw>,
    told: mpsc::Sender<Told>,
    rng: rng::PickRng,
    failures: u32,
    /// Times that the place was lost since something was heard of a watch.
    lost: u32,
    trouble: Option<Trouble>,
}

/// The place that a list or a watch has come to; or what went wrong, and the place to go on from if there is one.
type Reached = Result<String, (Trouble, Option<String>)>;

/// The listener has gone.
struct Unheard;

impl Follower {
    /// Follows `subject`, and tells of it through `told`.
    #[must_use]
    pub fn new(client: Client, subject: Subject, told: mpsc::Sender<Told>) -> Self {
        let Naming { group, version, kind, plural } = subject.kind.naming();
        let resource = ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk(group, version, kind), plural);
        let api = Api::namespaced_with(client, &subject.namespace, &resource);
        let rng = rng::PickRng::seed_from_u64(rng::system_seed());
        Self { subject, api, told, rng, failures: 0, lost: 0, trouble: None }
    }

    /// Lists and watches, again and again.
    pub async fn run(mut self) {
        // Heard of through the channel: whoever listens drops its end.
        let told = self.told.clone();
        tokio::select! {
            () = told.closed() => {}
            _ = self.follow() => {}
        }
    }

    async fn follow(&mut self) -> Result<(), Unheard> {
        let mut place: Option<String> = None;
        loop {
            let result = match place.take() {
                None => self.list().await?,
                Some(version) => self.watch(version).await?,
            };
            match result {
                Ok(version) => place = Some(version),
                // Not a failure: the next thing to do is to list.
                Err((Trouble::Gone, _)) => {
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

    async fn tell(&self, told: Told) -> Result<(), Unheard> {
        self.told.send(told).await.map_err(|_| Unheard)
    }

    /// Lists everything, page by page. Gives the place from which to watch.
    async fn list(&mut self) -> Result<Reached, Unheard> {
        let mut params =
            ListParams { label_selector: self.subject.labels.clone(), limit: Some(PAGE), ..ListParams::default() };
        self.tell(Told::Change(Change::ListBegun)).await?;
        loop {
            let page = match timeout(LIST_TIMEOUT, self.api.list(&params)).await {
                Ok(Ok(page)) => page,
                Ok(Err(error)) => return Ok(Err((Trouble::of("list", &error), None))),
                Err(_) => return Ok(Err((Trouble::late("list"), None))),
            };
            for raw in page.items {
                self.tell(Told::Change(Change::Listed(self.object(raw)))).await?;
            }
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => {
                    self.tell(Told::Change(Change::ListDone)).await?;
                    if !self.trouble.as_ref().is_some_and(Trouble::is_unwatched) {
                        self.well().await?;
                    }
                    return Ok(Ok(page.metadata.resource_version.unwrap_or_default()));
                }
            }
        }
    }

    /// Watches from a place until the watch ends. Gives the place that it has come to.
    async fn watch(&mut self, mut version: String) -> Result<Reached, Unheard> {
        let params = WatchParams {
            label_selector: self.subject.labels.clone(),
            timeout: u32::try_from(WATCH_TIMEOUT.as_secs()).ok(),
            bookmarks: true,
            ..WatchParams::default()
        };
        let begun = Instant::now();
        let stream = match timeout(LIST_TIMEOUT, self.api.watch(&params, &version)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Ok(Err((Trouble::of("watch", &error), Some(version)))),
            Err(_) => return Ok(Err((Trouble::late("watch"), Some(version)))),
        };
        let mut stream = std::pin::pin!(stream);
        // Being let in is the answer to a refusal; other trouble is over when something comes.
        if matches!(self.trouble, Some(Trouble::Forbidden { .. })) {
            self.well().await?;
        }
        loop {
            let (change, at) = match timeout(WATCH_TIMEOUT + WATCH_GRACE, stream.next()).await {
                // The server ended it, or it died without a word: both go on from here.
                Ok(None) | Err(_) => {
                    tokio::time::sleep_until(begun + MIN_WATCH).await;
                    self.lost = 0;
                    self.well().await?;
                    return Ok(Ok(version));
                }
                Ok(Some(Ok(WatchEvent::Added(raw) | WatchEvent::Modified(raw)))) => {
                    let at = raw.metadata.resource_version.clone();
                    (Some(Change::Applied(self.object(raw))), at)
                }
                Ok(Some(Ok(WatchEvent::Deleted(raw)))) => {
                    let at = raw.metadata.resource_version.clone();
                    let Object { meta, .. } = raw.into();
                    (Some(Change::Deleted { name: meta.name, uid: meta.uid }), at)
                }
                Ok(Some(Ok(WatchEvent::Bookmark(bookmark)))) => (None, Some(bookmark.metadata.resource_version)),
                Ok(Some(Ok(WatchEvent::Error(status)))) => {
                    let trouble = Trouble::of_status("watch", status.code, &status.message);
                    return Ok(Err((trouble, Some(version))));
                }
                Ok(Some(Err(error))) => return Ok(Err((Trouble::of("watch", &error), Some(version)))),
            };
            if let Some(at) = at.filter(|at| !at.is_empty()) {
                version = at;
            }
            self.lost = 0;
            self.well().await?;
            if let Some(change) = change {
                self.tell(Told::Change(change)).await?;
            }
        }
    }

    fn object(&self, raw: Raw) -> Object {
        Object::from(raw).trimmed(self.subject.kind)
    }

    /// All is well (again).
    async fn well(&mut self) -> Result<(), Unheard> {
        self.failures = 0;
        if self.trouble.take().is_none() {
            return Ok(());
        }
        let namespace = self.subject.namespace.as_str();
        tracing::info!(resource = self.resource(), namespace, "watch works again");
        self.tell(Told::Well).await
    }

    /// It costs something that this kind can't be followed.
    fn is_loss(&self, trouble: &Trouble) -> bool {
        // What nothing depends on may as well not be installed.
        self.subject.kind.is_needed() || matches!(trouble, Trouble::Other { .. })
    }

    async fn troubled(&mut self, trouble: Trouble) -> Result<(), Unheard> {
        let setback = Setback {
            not_installed: trouble == Trouble::NotInstalled,
            refused: matches!(trouble, Trouble::Forbidden { .. }),
            is_loss: self.is_loss(&trouble),
            unwatched: trouble.is_unwatched(),
        };
        self.tell(Told::Trouble(setback)).await?;
        if self.trouble.as_ref().is_some_and(|before| before.is_like(&trouble)) {
            return Ok(());
        }
        self.say(&trouble);
        self.trouble = Some(trouble);
        Ok(())
    }

    fn say(&self, trouble: &Trouble) {
        let Naming { group, version, plural, .. } = self.subject.kind.naming();
        let namespace = self.subject.namespace.as_str();
        let rule = self.subject.kind.role_rule();
        match trouble {
            Trouble::Forbidden { verb: "watch" } => tracing::warn!(
                namespace,
                group,
                resource = plural,
                "the API server refuses `watch` on `{plural}` (group `{group}`) in namespace `{namespace}`; Attaché lists them every {} s instead. \
                 The service account's Role there needs `{rule}`",
                RELIST_INTERVAL.as_secs()
            ),
            Trouble::Forbidden { verb } if self.subject.kind.is_needed() => tracing::error!(
                namespace,
                group,
                resource = plural,
                verb,
                "the API server refuses `{verb}` on `{plural}` (group `{group}`) in namespace `{namespace}`; \
                 the service account's Role there needs `{rule}`"
            ),
            Trouble::Forbidden { verb } if self.subject.kind == Kind::ConfigMap => tracing::warn!(
                namespace,
                group,
                resource = plural,
                verb,
                "the API server refuses `{verb}` on `{plural}` in namespace `{namespace}`; InferencePools there use the template, without \
                 settings of their own. The service account's Role there needs `{rule}`"
            ),
            // Roles of GIE's charts name neither llm-d's kinds nor those of old.
            Trouble::Forbidden { verb } => tracing::info!(
                namespace,
                group,
                resource = plural,
                verb,
                "the API server refuses `{verb}` on `{plural}` (group `{group}`) in namespace `{namespace}`; \
                 such objects have no effect unless the service account's Role there has `{rule}`"
            ),
            Trouble::NotInstalled if self.subject.kind.is_needed() => tracing::error!(
                namespace,
                group,
                resource = plural,
                "the API server does not know `{plural}` of `{group}/{version}`: its CustomResourceDefinition is not installed, \
                 or only in another group or version (`--pool-group`)"
            ),
            Trouble::NotInstalled => {
                tracing::debug!(group, resource = plural, "resource is not installed; Attaché checks again later");
            }
            Trouble::Gone => {}
            Trouble::Other { verb, error } => tracing::warn!(
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

/// From [`FIRST_BACKOFF`] doubling to [`MAX_BACKOFF`], after so many failures before this one.
fn backoff(failures: u32) -> Duration {
    FIRST_BACKOFF.saturating_mul(1 << failures.min(16)).min(MAX_BACKOFF)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repetitions_become_rarer_up_to_a_bound() {
        let delays: Vec<u128> = [0, 1, 2, 5, 6, 40].map(|n| backoff(n).as_millis()).to_vec();
        assert_eq!(delays, [200, 400, 800, 4_000, 4_000, 4_000]);
        let longest = MAX_BACKOFF.mul_f64(1.0 + JITTER);
        assert!(longest < Duration::from_secs(5), "an API server that comes back is noticed after {longest:?}");
    }

    #[test]
    fn statuses_are_told_apart() {
        for (code, want) in [
            (403, Trouble::Forbidden { verb: "list" }),
            (404, Trouble::NotInstalled),
            (410, Trouble::Gone),
            (503, Trouble::Other { verb: "list", error: "status 503: away".into() }),
        ] {
            assert_eq!(Trouble::of_status("list", code, "away"), want);
        }
        assert_eq!(Trouble::of_status("watch", 404, "away"), Trouble::Gone, "a list says whether there is such a kind");
        let Trouble::Other { error, .. } = Trouble::of_status("list", 401, "Unauthorized") else {
            panic!("a Role does not help who is not known");
        };
        assert!(error.contains("Unauthorized") && error.contains("token"), "{error}");
    }
}
