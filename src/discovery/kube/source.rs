//! The task that follows a pool's pods and rules through the API server, and sends the endpoints to the pool's writer.

use super::conditions::{Report, TargetStatus};
use super::follow::{Setback, Subject, WatchUpdate};
use super::informer::Informers;
use super::objects::{ObjectKind, ServedPool};
use super::rules::Rules;
use super::state::{MAX_ENDPOINTS, Members};
use super::stats::{KubeStats, Loss};
use super::table::{ObjectChange, Unreadable};
use attache_pool::PoolEvent;
use attache_pool::source::{KubernetesSource, PodsOf, PoolGroup};
use attache_pool::writer::SourceId;
use attache_scheduling::router::{PoolRules, RuleStore};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Shortest time between two updates of the endpoints. Changes meanwhile are combined; the first one after a quiet
/// time is sent at once.
pub const SEND_INTERVAL: Duration = Duration::from_millis(10);
/// 1 s between two checks for missing targets of `InferenceModel`s.
const MISSING_INTERVAL: Duration = Duration::from_secs(1);
/// Most changes that are applied in one step.
const BATCH: usize = 64;

/// The inputs and outputs of the task.
#[derive(Debug)]
pub struct KubeFeed {
    /// Name of the pool in Attaché.
    pub pool: Arc<str>,
    /// Selects the pods.
    pub source: KubernetesSource,
    /// Known rules of a previous task for the same pool, if there was one.
    pub before: Option<Rules>,
    /// Namespace of all objects.
    pub namespace: String,
    /// Identity of this source at the writer.
    pub id: SourceId,
    /// Channel to the pool's writer.
    pub events: mpsc::Sender<PoolEvent>,
    /// Receives the rules for models.
    pub rules: Arc<RuleStore>,
    /// Receives the conditions of objects.
    pub reports: watch::Sender<Vec<Report>>,
    /// Whether Attaché trusts the header with which requests name their objective.
    pub trusts_headers: watch::Receiver<bool>,
    /// Counters of this pool.
    pub stats: Arc<KubeStats>,
}

/// A followed kind, with the receiver of its updates.
struct Followed {
    kind: ObjectKind,
    updates: mpsc::Receiver<WatchUpdate>,
}

struct FeedTask {
    feed: KubeFeed,
    informers: Arc<Informers>,
    members: Members,
    rules: Rules,
    pods: Option<Followed>,
    /// Label selector by which the pods are followed.
    asked_for: Option<String>,
    others: Vec<Followed>,
    /// Kinds that can't be followed at the moment, though they should be.
    lost: HashMap<ObjectKind, Loss>,
    /// Those of them that are listed periodically instead of watched.
    unwatched: HashSet<ObjectKind>,
    /// Kinds of rules that were neither listed yet nor are known to be unavailable. Endpoints wait for them: a request
    /// before its rule would go to the wrong model.
    unlisted: HashSet<ObjectKind>,
    told_missing: bool,
    /// Whether it was logged that objectives have no effect.
    logged_untrusted: bool,
    /// Whether profiles in AIBrix's annotation were logged.
    logged_profiles: bool,
    /// `InferenceModel`s that were logged for claiming a name which another has.
    disputed: HashSet<String>,
    /// Objects that were logged for naming a pool of another API group: kind and name.
    strangers: HashSet<(&'static str, String)>,
    /// [`RuleStore::missing_changes`] at the last reports.
    missing_seen: u64,
    /// Targets in the statuses of objects when they were last read, by UID. All replicas write one status, and each
    /// sees only its own requests.
    target_statuses: HashMap<String, TargetStatus>,
}

/// Follows until `shutdown`, or until the pool's writer is gone. Returns the known rules.
pub async fn run(informers: Arc<Informers>, feed: KubeFeed, shutdown: CancellationToken) -> Rules {
    let mut run = FeedTask::new(informers, feed);
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = run.serve() => {}
    }
    run.feed.rules.set_stale(false);
    run.rules
}

/// Changes that were not sent yet.
#[derive(Clone, Copy, Default)]
struct PendingChanges {
    endpoints: bool,
    rules: bool,
}

impl FeedTask {
    fn new(informers: Arc<Informers>, mut feed: KubeFeed) -> Self {
        let before = feed.before.take();
        Self {
            members: Members::new(feed.source.clone(), before.is_some()),
            feed,
            informers,
            // The rules of each kind stay until it has been listed again.
            rules: before.unwrap_or_default(),
            pods: None,
            asked_for: None,
            others: Vec::new(),
            lost: HashMap::new(),
            unwatched: HashSet::new(),
            unlisted: HashSet::new(),
            told_missing: false,
            logged_untrusted: false,
            logged_profiles: false,
            disputed: HashSet::new(),
            strangers: HashSet::new(),
            missing_seen: 0,
            target_statuses: HashMap::new(),
        }
    }

    async fn serve(&mut self) {
        if let PodsOf::Pool { group, .. } = self.feed.source.pods {
            self.follow(ObjectKind::Pool(group));
        }
        for kind in ObjectKind::OF_RULES {
            self.follow(kind);
            self.unlisted.insert(kind);
        }
        self.follow_pods();
        let mut pending = PendingChanges::default();
        let mut not_before = Instant::now();
        let mut looks = tokio::time::interval(MISSING_INTERVAL);
        loop {
            let (from, batch) = tokio::select! {
                biased;
                () = tokio::time::sleep_until(not_before), if pending.endpoints || pending.rules => {
                    if !self.send_changes(std::mem::take(&mut pending)).await {
                        return;
                    }
                    not_before = Instant::now() + SEND_INTERVAL;
                    continue;
                }
                batch = next_of(self.pods.as_mut()) => batch,
                batch = next_of_any(&mut self.others) => batch,
                _ = looks.tick() => {
                    pending.rules |= self.feed.rules.missing_changes() != self.missing_seen;
                    continue;
                }
            };
            for updates in batch {
                self.take_in(from, updates, &mut pending);
            }
            self.feed.rules.set_stale(!self.lost.is_empty());
            self.follow_pods();
        }
    }

    fn follow(&mut self, kind: ObjectKind) {
        let followed = self.listen(kind, None);
        self.others.push(followed);
    }

    fn listen(&self, kind: ObjectKind, labels: Option<String>) -> Followed {
        let subject = Subject { kind, namespace: self.feed.namespace.clone(), labels };
        Followed { kind, updates: self.informers.listen(&subject) }
    }

    /// Follows the pods that the current selector means. Those of a previous one stay until these are listed.
    fn follow_pods(&mut self) {
        let Some(selector) = self.members.selector() else { return };
        if self.asked_for.as_ref() != Some(&selector) {
            // Dropping the old receiver ends its follower if no other pool uses it.
            self.pods = Some(self.listen(ObjectKind::Pod, Some(selector.clone())));
            self.asked_for = Some(selector);
        }
    }

    fn take_in(&mut self, kind: ObjectKind, updates: WatchUpdate, pending: &mut PendingChanges) {
        let change = match updates {
            WatchUpdate::Change(change) if self.is_foreign(kind, &change) => return,
            WatchUpdate::Change(change) => change,
            WatchUpdate::Failed(setback) => return self.troubled(kind, setback, pending),
            WatchUpdate::Recovered => {
                self.unwatched.remove(&kind);
                return drop(self.lost.remove(&kind));
            }
        };
        match &change {
            ObjectChange::Applied(_) | ObjectChange::Deleted { .. } => self.feed.stats.event(),
            ObjectChange::ListDone => {
                self.feed.stats.list();
                // A list ends the loss of its kind, even if the follower that reported the loss can't say so: it used
                // other labels or has failed.
                if !self.unwatched.contains(&kind) {
                    self.lost.remove(&kind);
                }
            }
            ObjectChange::ListBegun | ObjectChange::Listed(_) => {}
        }
        match kind {
            ObjectKind::Pod => {
                let result = self.members.pod(change);
                pending.endpoints |= self.applied(kind, result);
            }
            ObjectKind::Pool(_) => {
                let listed = matches!(change, ObjectChange::ListDone);
                let result = self.members.pool(change);
                pending.endpoints |= self.applied(kind, result);
                self.feed.stats.pool_unreadable(self.members.pool_is_unreadable());
                self.log_missing_pool(listed);
            }
            _ => {
                let listed = matches!(change, ObjectChange::ListDone);
                let result = self.rules.apply(kind, change);
                pending.rules |= self.applied(kind, result);
                if listed {
                    self.resolved(kind, pending);
                }
            }
        }
    }

    /// Whether a change is about another pool's `InferencePool`.
    fn is_foreign(&self, kind: ObjectKind, change: &ObjectChange) -> bool {
        let (ObjectKind::Pool(_), PodsOf::Pool { name, .. }) = (kind, &self.feed.source.pods) else { return false };
        match change {
            ObjectChange::Listed(object) | ObjectChange::Applied(object) => object.meta.name != *name,
            ObjectChange::Deleted { name: gone, .. } => gone != name,
            ObjectChange::ListBegun | ObjectChange::ListDone => false,
        }
    }

    /// Records that a kind can't be followed at the moment. Endpoints don't wait for an optional kind.
    fn troubled(&mut self, kind: ObjectKind, setback: Setback, pending: &mut PendingChanges) {
        if setback.is_loss || setback.refused {
            self.feed.stats.failure(setback.refused);
        }
        if setback.is_loss {
            self.lost.entry(kind).or_insert_with(|| self.feed.stats.lose());
        } else {
            self.lost.remove(&kind);
        }
        if setback.unwatched {
            self.unwatched.insert(kind);
        } else {
            self.unwatched.remove(&kind);
        }
        if setback.not_installed {
            pending.rules |= self.rules.not_installed(kind);
        }
        self.resolved(kind, pending);
    }

    /// Records that a kind of rules is known, or known to be unavailable.
    fn resolved(&mut self, kind: ObjectKind, pending: &mut PendingChanges) {
        if self.unlisted.remove(&kind) && self.unlisted.is_empty() {
            *pending = PendingChanges { endpoints: true, rules: true };
        }
    }

    /// Whether something may have changed; logs and counts an invalid object.
    fn applied(&self, kind: ObjectKind, result: Result<bool, Unreadable>) -> bool {
        result.unwrap_or_else(|Unreadable { name, reason, kept }| {
            self.feed.stats.unread();
            let (pool, is_pool, kind) = (&self.feed.pool, matches!(kind, ObjectKind::Pool(_)), kind.naming().kind);
            match (kept, is_pool) {
                (true, _) => {
                    tracing::error!(%pool, kind, name, reason, "invalid object; keeping its last valid version");
                }
                (false, true) => {
                    tracing::error!(%pool, kind, name, reason, "invalid InferencePool; it has no endpoints until it \
                                                                is valid");
                }
                (false, false) => {
                    tracing::error!(%pool, kind, name, reason, "invalid object; it has no effect until it is valid");
                }
            }
            true
        })
    }

    /// Logs when the `InferencePool` is missing, and when it exists again.
    fn log_missing_pool(&mut self, listed: bool) {
        let PodsOf::Pool { name, group } = &self.feed.source.pods else { return };
        if self.feed.source.found {
            return;
        }
        let missing = self.members.pool_is_missing();
        if missing && !self.told_missing && (listed || self.asked_for.is_some()) {
            let (namespace, group) = (self.feed.namespace.as_str(), group.as_str());
            tracing::error!(pool = %self.feed.pool, name, namespace, group, "InferencePool not found");
        }
        self.told_missing = missing;
        self.feed.stats.set_pool_missing(missing);
    }

    /// Logs once that objectives can't raise the priority of requests.
    fn log_untrusted_objectives(&mut self, rules: &PoolRules) {
        if self.logged_untrusted || *self.feed.trusts_headers.borrow() {
            return;
        }
        if let Some((objective, _)) = rules.objectives.iter().find(|(_, priority)| **priority > 0) {
            self.logged_untrusted = true;
            tracing::warn!(
                pool = %self.feed.pool,
                objective,
                "InferenceObjectives with a priority above 0 have no effect: Attaché does not trust the header \
                 `x-gateway-inference-objective`. Set `--trust-client-headers` (`exchange.trustClientHeaders`) if \
                 the gateway removes that header from client requests"
            );
        }
    }

    /// Logs once that AIBrix's annotation on a pod has no effect.
    fn log_ignored_profiles(&mut self) {
        if self.logged_profiles {
            return;
        }
        if let Some(pod) = self.members.with_ignored_profiles() {
            self.logged_profiles = true;
            tracing::warn!(
                pool = %self.feed.pool,
                pod,
                "annotation `model.aibrix.ai/config` ignored; set routing profiles under `strategies` of the pool \
                 in the configuration"
            );
        }
    }

    /// Logs when the pool has too many endpoints, and counts those that are left out.
    fn log_left_out(&self) {
        let left_out = self.members.left_out();
        if self.feed.stats.set_left_out(left_out) == 0 && left_out > 0 {
            tracing::error!(
                pool = %self.feed.pool,
                left_out,
                "the pool has more than {MAX_ENDPOINTS} endpoints; only the oldest serve. \
                 Narrow the selector of its InferencePool, or split it into several"
            );
        }
    }

    /// Sends what has changed. Returns false when the writer is gone.
    async fn send_changes(&mut self, pending: PendingChanges) -> bool {
        // Until all kinds are known, the rules of a previous task stay beside its endpoints.
        if pending.rules && self.unlisted.is_empty() {
            let served = match &self.feed.source.pods {
                PodsOf::Pool { name, group } => ServedPool { name, group: Some(*group) },
                PodsOf::Selector { .. } => ServedPool { name: &self.feed.pool, group: None },
            };
            apply_target_statuses(&mut self.target_statuses, self.rules.target_statuses(served), &self.feed.rules);
            self.missing_seen = self.feed.rules.missing_changes();
            let reports = self.rules.reports(served, &self.feed.rules.missing());
            let disputed: HashSet<String> =
                reports.iter().filter(|r| r.dispute().is_some()).map(|r| r.name.clone()).collect();
            for report in reports.iter().filter(|r| !self.disputed.contains(&r.name)) {
                let Some(error) = report.dispute() else { continue };
                let object = &report.name;
                tracing::warn!(
                    pool = %self.feed.pool, object, error,
                    "InferenceModel ignored: an older one has the same model name"
                );
            }
            for (kind, object, group) in self.rules.strangers(served) {
                if self.strangers.insert((kind, object.to_owned())) {
                    let of = served.group.map(PoolGroup::as_str);
                    tracing::warn!(
                        pool = %self.feed.pool, kind, object, group, served = of,
                        "object ignored: it names the pool in another API group; `spec.poolRef.group` must be the \
                         group of the InferencePool"
                    );
                }
            }
            let rules = self.rules.of_pool(served);
            self.disputed = disputed;
            self.feed.reports.send_replace(reports);
            self.log_untrusted_objectives(&rules);
            self.feed.rules.store(rules);
        }
        if pending.endpoints
            && self.unlisted.is_empty()
            && let Some(endpoints) = self.members.endpoints()
        {
            self.log_left_out();
            self.log_ignored_profiles();
            let event = PoolEvent::Endpoints { source: self.feed.id, endpoints };
            return self.feed.events.send(event).await.is_ok();
        }
        true
    }
}

/// Applies new statements about targets in objects' statuses, so that replicas do not overwrite each other's. `before`
/// has the last statements by UID.
///
/// That targets are available counts only after a replica wrote that they are missing. Otherwise the statement may be
/// older than a denial that this replica got from a model server, and would end it.
fn apply_target_statuses(before: &mut HashMap<String, TargetStatus>, said: Vec<TargetStatus>, rules: &RuleStore) {
    before.retain(|uid, _| said.iter().any(|heard| heard.uid == *uid));
    for heard in said {
        let last = before.insert(heard.uid.clone(), heard.clone());
        if last.as_ref().is_some_and(|last| last.fingerprint == heard.fingerprint) {
            continue;
        }
        if heard.are_missing {
            rules.report_missing(heard.targets);
        } else if last.is_some_and(|last| last.are_missing) {
            rules.report_served(heard.targets);
        }
    }
}

async fn next_of(followed: Option<&mut Followed>) -> (ObjectKind, Vec<WatchUpdate>) {
    let Some(followed) = followed else { return std::future::pending().await };
    let mut batch = Vec::new();
    if followed.updates.recv_many(&mut batch, BATCH).await == 0 {
        return std::future::pending().await;
    }
    (followed.kind, batch)
}

async fn next_of_any(followed: &mut [Followed]) -> (ObjectKind, Vec<WatchUpdate>) {
    std::future::poll_fn(|cx| {
        for f in followed.iter_mut() {
            let mut batch = Vec::new();
            if let std::task::Poll::Ready(n) = f.updates.poll_recv_many(cx, &mut batch, BATCH)
                && n > 0
            {
                return std::task::Poll::Ready((f.kind, batch));
            }
        }
        std::task::Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests;
