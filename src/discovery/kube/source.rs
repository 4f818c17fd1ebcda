//! The task that follows a pool's pods and rules through the API server, and tells the pool's writer.

use super::conditions::{Heard, Report};
use super::follow::{Setback, Subject, Told};
use super::informer::Informers;
use super::objects::{Kind, ServedPool};
use super::rules::Rules;
use super::state::{MAX_ENDPOINTS, Members};
use super::stats::{KubeStats, Loss};
use super::table::{Change, Unreadable};
use crate::settings::{KubernetesSource, PodsOf, PoolGroup};
use attache_pool::PoolEvent;
use attache_pool::writer::SourceId;
use attache_scheduling::router::{PoolRules, RuleStore};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Endpoints are told no more often than this; what changes meanwhile goes along. A change after a quiet time is told at once.
pub const TELL_INTERVAL: Duration = Duration::from_millis(10);
/// 1 s: how often is looked whether servers lack the targets of `InferenceModel`s.
const MISSING_INTERVAL: Duration = Duration::from_secs(1);
/// Changes taken in at a time.
const BATCH: usize = 64;

/// What the task works on.
#[derive(Debug)]
pub struct KubeFeed {
    /// The pool's name here.
    pub pool: Arc<str>,
    /// Which pods.
    pub source: KubernetesSource,
    /// What another has known of the same pool's rules, where it has told of the pool before.
    pub before: Option<Rules>,
    /// The namespace of everything.
    pub namespace: String,
    /// Who speaks to the writer.
    pub id: SourceId,
    /// The writer.
    pub events: mpsc::Sender<PoolEvent>,
    /// Where rules for models go.
    pub rules: Arc<RuleStore>,
    /// Where what is to be said of objects goes.
    pub reports: watch::Sender<Vec<Report>>,
    /// Whether the header is believed by which requests name their objective.
    pub trusts_headers: watch::Receiver<bool>,
    /// What is counted.
    pub stats: Arc<KubeStats>,
}

/// What is followed, by the end of its channel.
struct Followed {
    kind: Kind,
    told: mpsc::Receiver<Told>,
}

struct Run {
    feed: KubeFeed,
    informers: Arc<Informers>,
    members: Members,
    rules: Rules,
    pods: Option<Followed>,
    /// What the pods were asked for by.
    asked_for: Option<String>,
    others: Vec<Followed>,
    /// Kinds that can't be followed at the moment, though they should be.
    lost: HashMap<Kind, Loss>,
    /// Those among them that are listed from time to time, which does not bring them back.
    unwatched: HashSet<Kind>,
    /// Kinds of rules that have not been listed, and of which it is not known either that they can't be. Endpoints wait for them: a request
    /// that comes before its rule would go to the wrong model.
    unheard: HashSet<Kind>,
    told_missing: bool,
    /// It has been told that objectives have no effect.
    told_untrusted: bool,
    /// Profiles in AIBrix's annotation were reported.
    told_profiles: bool,
    /// `InferenceModel`s that have been told to claim a name which is another's.
    disputed: HashSet<String>,
    /// Objects that have been told to name a pool of another API group: kind and name.
    strangers: HashSet<(&'static str, String)>,
    /// [`RuleStore::missing_changes`] when reports were made last.
    missing_seen: u64,
    /// What objects said of their targets when it was heard last, by their uid: all replicas write one status, and each knows its own requests.
    heard: HashMap<String, Heard>,
}

/// Follows until `shutdown`, or until the pool's writer is gone. Gives what is known of rules by then.
pub async fn run(informers: Arc<Informers>, feed: KubeFeed, shutdown: CancellationToken) -> Rules {
    let mut run = Run::new(informers, feed);
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = run.serve() => {}
    }
    run.feed.rules.set_stale(false);
    run.rules
}

/// What has changed since it was told.
#[derive(Clone, Copy, Default)]
struct Unsaid {
    endpoints: bool,
    rules: bool,
}

impl Run {
    fn new(informers: Arc<Informers>, mut feed: KubeFeed) -> Self {
        let before = feed.before.take();
        Self {
            members: Members::new(feed.source.clone(), before.is_some()),
            feed,
            informers,
            // Each kind's stay until it has been listed again.
            rules: before.unwrap_or_default(),
            pods: None,
            asked_for: None,
            others: Vec::new(),
            lost: HashMap::new(),
            unwatched: HashSet::new(),
            unheard: HashSet::new(),
            told_missing: false,
            told_untrusted: false,
            told_profiles: false,
            disputed: HashSet::new(),
            strangers: HashSet::new(),
            missing_seen: 0,
            heard: HashMap::new(),
        }
    }

    async fn serve(&mut self) {
        if let PodsOf::Pool { group, .. } = self.feed.source.pods {
            self.follow(Kind::Pool(group));
        }
        for kind in Kind::OF_RULES {
            self.follow(kind);
            self.unheard.insert(kind);
        }
        self.follow_pods();
        let mut unsaid = Unsaid::default();
        let mut not_before = Instant::now();
        let mut looks = tokio::time::interval(MISSING_INTERVAL);
        loop {
            let (from, batch) = tokio::select! {
                biased;
                () = tokio::time::sleep_until(not_before), if unsaid.endpoints || unsaid.rules => {
                    if !self.tell(std::mem::take(&mut unsaid)).await {
                        return;
                    }
                    not_before = Instant::now() + TELL_INTERVAL;
                    continue;
                }
                batch = next_of(self.pods.as_mut()) => batch,
                batch = next_of_any(&mut self.others) => batch,
                _ = looks.tick() => {
                    unsaid.rules |= self.feed.rules.missing_changes() != self.missing_seen;
                    continue;
                }
            };
            for told in batch {
                self.take_in(from, told, &mut unsaid);
            }
            self.feed.rules.set_stale(!self.lost.is_empty());
            self.follow_pods();
        }
    }

    fn follow(&mut self, kind: Kind) {
        let followed = self.listen(kind, None);
        self.others.push(followed);
    }

    fn listen(&self, kind: Kind, labels: Option<String>) -> Followed {
        let subject = Subject { kind, namespace: self.feed.namespace.clone(), labels };
        Followed { kind, told: self.informers.listen(&subject) }
    }

    /// Follows the pods that the selector of now means. Those of another one before are kept until these are listed.
    fn follow_pods(&mut self) {
        let Some(selector) = self.members.selector() else { return };
        if self.asked_for.as_ref() != Some(&selector) {
            // The end of the old channel goes, and its follower too if nobody else listens.
            self.pods = Some(self.listen(Kind::Pod, Some(selector.clone())));
            self.asked_for = Some(selector);
        }
    }

    fn take_in(&mut self, kind: Kind, told: Told, unsaid: &mut Unsaid) {
        let change = match told {
            Told::Change(change) if self.is_foreign(kind, &change) => return,
            Told::Change(change) => change,
            Told::Trouble(setback) => return self.troubled(kind, setback, unsaid),
            Told::Well => {
                self.unwatched.remove(&kind);
                return drop(self.lost.remove(&kind));
            }
        };
        match &change {
            Change::Applied(_) | Change::Deleted { .. } => self.feed.stats.event(),
            Change::ListDone => {
                self.feed.stats.list();
                // Who lists is in touch, also where whoever had lost it can say so no more: it listed by other labels, or has failed.
                if !self.unwatched.contains(&kind) {
                    self.lost.remove(&kind);
                }
            }
            Change::ListBegun | Change::Listed(_) => {}
        }
        match kind {
            Kind::Pod => {
                let result = self.members.pod(change);
                unsaid.endpoints |= self.judged(kind, result);
            }
            Kind::Pool(_) => {
                let listed = matches!(change, Change::ListDone);
                let result = self.members.pool(change);
                unsaid.endpoints |= self.judged(kind, result);
                self.feed.stats.pool_unreadable(self.members.pool_is_unreadable());
                self.tell_missing(listed);
            }
            _ => {
                let listed = matches!(change, Change::ListDone);
                let result = self.rules.apply(kind, change);
                unsaid.rules |= self.judged(kind, result);
                if listed {
                    self.heard(kind, unsaid);
                }
            }
        }
    }

    /// Whether a change is of another pool's `InferencePool`.
    fn is_foreign(&self, kind: Kind, change: &Change) -> bool {
        let (Kind::Pool(_), PodsOf::Pool { name, .. }) = (kind, &self.feed.source.pods) else { return false };
        match change {
            Change::Listed(object) | Change::Applied(object) => object.meta.name != *name,
            Change::Deleted { name: gone, .. } => gone != name,
            Change::ListBegun | Change::ListDone => false,
        }
    }

    /// A kind can't be followed at the moment. One that nothing depends on keeps nothing waiting.
    fn troubled(&mut self, kind: Kind, setback: Setback, unsaid: &mut Unsaid) {
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
            unsaid.rules |= self.rules.not_installed(kind);
        }
        self.heard(kind, unsaid);
    }

    /// A kind of rules is known, or known not to be had.
    fn heard(&mut self, kind: Kind, unsaid: &mut Unsaid) {
        if self.unheard.remove(&kind) && self.unheard.is_empty() {
            *unsaid = Unsaid { endpoints: true, rules: true };
        }
    }

    /// Whether something may have changed; an object that can't be read is told of.
    fn judged(&self, kind: Kind, result: Result<bool, Unreadable>) -> bool {
        result.unwrap_or_else(|Unreadable { name, reason, kept }| {
            self.feed.stats.unread();
            let (pool, is_pool, kind) = (&self.feed.pool, matches!(kind, Kind::Pool(_)), kind.naming().kind);
            match (kept, is_pool) {
                (true, _) => {
                    tracing::error!(%pool, kind, name, reason, "invalid object; keeping its last valid version");
                }
                (false, true) => {
                    tracing::error!(%pool, kind, name, reason, "invalid InferencePool; it has no endpoints until it is valid");
                }
                (false, false) => {
                    tracing::error!(%pool, kind, name, reason, "invalid object; it has no effect until it is valid");
                }
            }
            true
        })
    }

    /// Says when the pool is not there, and when it is there again.
    fn tell_missing(&mut self, listed: bool) {
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

    /// Says once that an objective can't raise the priority of requests.
    fn tell_untrusted(&mut self, rules: &PoolRules) {
        if self.told_untrusted || *self.feed.trusts_headers.borrow() {
            return;
        }
        if let Some((objective, _)) = rules.objectives.iter().find(|(_, priority)| **priority > 0) {
            self.told_untrusted = true;
            tracing::warn!(
                pool = %self.feed.pool,
                objective,
                "InferenceObjectives with a priority above 0 have no effect: Attaché does not trust the header `x-gateway-inference-objective`. \
                 Set `--trust-client-headers` (`exchange.trustClientHeaders`) if the gateway removes that header from client requests"
            );
        }
    }

    /// Reports once that AIBrix's annotation on a pod has no effect.
    fn tell_ignored_profiles(&mut self) {
        if self.told_profiles {
            return;
        }
        if let Some(pod) = self.members.with_ignored_profiles() {
            self.told_profiles = true;
            tracing::warn!(
                pool = %self.feed.pool,
                pod,
                "annotation `model.aibrix.ai/config` ignored; set routing profiles under `strategies` of the pool in the configuration"
            );
        }
    }

    /// Says when the pool has more endpoints than are served, and counts those that are not.
    fn tell_left_out(&self) {
        let left_out = self.members.left_out();
        if self.feed.stats.set_left_out(left_out) == 0 && left_out > 0 {
            tracing::error!(
                pool = %self.feed.pool,
                left_out,
                "the pool has more than {MAX_ENDPOINTS} endpoints; only the oldest serve. Narrow the selector of its InferencePool, or split it into several"
            );
        }
    }

    /// Tells what has changed. False when nobody listens any more.
    async fn tell(&mut self, unsaid: Unsaid) -> bool {
        // Some of the rules are none: those of before, perhaps another pool's, stay beside its endpoints until all are known.
        if unsaid.rules && self.unheard.is_empty() {
            let served = match &self.feed.source.pods {
                PodsOf::Pool { name, group } => ServedPool { name, group: Some(*group) },
                PodsOf::Selector { .. } => ServedPool { name: &self.feed.pool, group: None },
            };
            hear(&mut self.heard, self.rules.heard(served), &self.feed.rules);
            self.missing_seen = self.feed.rules.missing_changes();
            let reports = self.rules.reports(served, &self.feed.rules.missing());
            let disputed: HashSet<String> =
                reports.iter().filter(|r| r.dispute().is_some()).map(|r| r.name.clone()).collect();
            for report in reports.iter().filter(|r| !self.disputed.contains(&r.name)) {
                let Some(message) = report.dispute() else { continue };
                let object = &report.name;
                tracing::warn!(pool = %self.feed.pool, object, message, "InferenceModel ignored: an older one has the same model name");
            }
            for (kind, object, group) in self.rules.strangers(served) {
                if self.strangers.insert((kind, object.to_owned())) {
                    let of = served.group.map(PoolGroup::as_str);
                    tracing::warn!(
                        pool = %self.feed.pool, kind, object, group, served = of,
                        "object ignored: it names the pool in another API group; `spec.poolRef.group` must be the group of the InferencePool"
                    );
                }
            }
            let rules = self.rules.of_pool(served);
            self.disputed = disputed;
            self.feed.reports.send_replace(reports);
            self.tell_untrusted(&rules);
            self.feed.rules.store(rules);
        }
        if unsaid.endpoints
            && self.unheard.is_empty()
            && let Some(endpoints) = self.members.endpoints()
        {
            self.tell_left_out();
            self.tell_ignored_profiles();
            let event = PoolEvent::Endpoints { source: self.feed.id, endpoints };
            return self.feed.events.send(event).await.is_ok();
        }
        true
    }
}

/// Takes in what objects newly say of their targets, so that replicas do not write over each other's words. `before` is what they said last, by
/// uid.
///
/// That targets are there is news only after a replica said that they are missing. Else it may be older than what a server has denied here
/// since, and would end that denial.
fn hear(before: &mut HashMap<String, Heard>, said: Vec<Heard>, rules: &RuleStore) {
    before.retain(|uid, _| said.iter().any(|heard| heard.uid == *uid));
    for heard in said {
        let last = before.insert(heard.uid.clone(), heard.clone());
        if last.as_ref().is_some_and(|last| last.word == heard.word) {
            continue;
        }
        if heard.are_missing {
            rules.hear_missing(heard.targets);
        } else if last.is_some_and(|last| last.are_missing) {
            rules.hear_served(heard.targets);
        }
    }
}

async fn next_of(followed: Option<&mut Followed>) -> (Kind, Vec<Told>) {
    let Some(followed) = followed else { return std::future::pending().await };
    let mut batch = Vec::new();
    if followed.told.recv_many(&mut batch, BATCH).await == 0 {
        return std::future::pending().await;
    }
    (followed.kind, batch)
}

async fn next_of_any(followed: &mut [Followed]) -> (Kind, Vec<Told>) {
    std::future::poll_fn(|cx| {
        for f in followed.iter_mut() {
            let mut batch = Vec::new();
            if let std::task::Poll::Ready(n) = f.told.poll_recv_many(cx, &mut batch, BATCH)
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
mod tests {
    use super::*;
    use attache_scheduling::router::{MissingTarget, ModelRewrites, RewriteTarget};
    use attache_types::clock::Timestamp;

    #[test]
    fn what_servers_have_denied_outlives_the_first_word_that_targets_are_there() {
        let exact = [("m".to_owned(), vec![RewriteTarget { model: "v1".into(), weight: 1 }])].into();
        let rewrites = ModelRewrites { exact, any: Vec::new() };
        let store = RuleStore::default();
        store.store(PoolRules { rewrites, priorities: [("m".to_owned(), 0)].into(), ..PoolRules::default() });
        let v1 = || vec![MissingTarget { model: "m".into(), target: "v1".into() }];
        let said = |word: &str, are_missing| Heard { uid: "u".into(), word: word.into(), targets: v1(), are_missing };
        let mut before = HashMap::new();
        store.target_missing("m", "v1", Timestamp::default());
        hear(&mut before, vec![said("True 1", false)], &store);
        assert_eq!(store.missing(), v1(), "the word may be older than the denial");
        hear(&mut before, vec![said("False 2", true)], &store);
        hear(&mut before, vec![said("True 3", false)], &store);
        assert_eq!(store.missing(), [], "a replica has seen it served");
        store.target_missing("m", "v1", Timestamp::default());
        hear(&mut before, vec![said("True 3", false)], &store);
        assert_eq!(store.missing(), v1(), "the same word again");
        hear(&mut before, Vec::new(), &store);
        assert!(before.is_empty(), "the object is gone");
    }
}
