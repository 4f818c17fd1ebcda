//! The task that follows a pool's pods and rules through the API server, and tells the pool's writer.

use super::conditions::Report;
use super::follow::{Follower, MAX_BACKOFF, Subject, Told};
use super::objects::Kind;
use super::rules::Rules;
use super::state::Members;
use super::stats::KubeStats;
use super::table::{Change, Unreadable};
use crate::config::settings::{KubernetesSource, PodsOf};
use crate::pool::PoolEvent;
use crate::pool::writer::SourceId;
use crate::scheduling::router::RuleStore;
use kube::Client;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Endpoints are told no more often than this; what changes meanwhile goes along. A change after a quiet time is told at once.
pub const TELL_INTERVAL: Duration = Duration::from_millis(10);
/// Changes that may wait to be taken in; a follower that finds the channel full waits.
const QUEUE: usize = 256;
/// Changes taken in at a time.
const BATCH: usize = 64;

/// What the task works on.
#[derive(Debug)]
pub struct KubeFeed {
    /// The pool's name here.
    pub pool: Arc<str>,
    /// Which pods.
    pub source: KubernetesSource,
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
    /// What is counted.
    pub stats: Arc<KubeStats>,
}

/// What is followed, by the end of its channel.
struct Followed {
    subject: Subject,
    told: mpsc::Receiver<Told>,
}

struct Run {
    feed: KubeFeed,
    client: Client,
    members: Members,
    rules: Rules,
    tasks: JoinSet<()>,
    pods: Option<Followed>,
    /// What the pods were asked for by.
    asked_for: Option<String>,
    others: Vec<Followed>,
    /// Kinds of rules that have not been listed, and of which it is not known either that they can't be. Endpoints wait for them: a request
    /// that comes before its rule would go to the wrong model.
    unheard: HashSet<Kind>,
    told_missing: bool,
    /// `InferenceModel`s that have been told to claim a name which is another's.
    disputed: HashSet<String>,
}

/// Follows until `shutdown`, or until the pool's writer is gone.
pub async fn run(client: Client, feed: KubeFeed, shutdown: CancellationToken) {
    let mut run = Run::new(client, feed);
    tokio::select! {
        () = shutdown.cancelled() => {}
        () = run.serve() => {}
    }
}

/// What has changed since it was told.
#[derive(Clone, Copy, Default)]
struct Unsaid {
    endpoints: bool,
    rules: bool,
}

impl Run {
    fn new(client: Client, feed: KubeFeed) -> Self {
        Self {
            members: Members::new(feed.source.clone()),
            feed,
            client,
            rules: Rules::default(),
            tasks: JoinSet::new(),
            pods: None,
            asked_for: None,
            others: Vec::new(),
            unheard: HashSet::new(),
            told_missing: false,
            disputed: HashSet::new(),
        }
    }

    async fn serve(&mut self) {
        if let PodsOf::Pool { name, group } = self.feed.source.pods.clone() {
            self.follow(Kind::Pool(group), None, Some(name));
        }
        for kind in Kind::OF_RULES {
            self.follow(kind, None, None);
            self.unheard.insert(kind);
        }
        self.follow_pods();
        let mut unsaid = Unsaid::default();
        let mut not_before = Instant::now();
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
                Some(ended) = self.tasks.join_next() => {
                    if let Err(error) = ended {
                        self.revive(&error);
                    }
                    continue;
                }
                batch = next_of(self.pods.as_mut()) => batch,
                batch = next_of_any(&mut self.others) => batch,
            };
            for told in batch {
                self.take_in(from, told, &mut unsaid);
            }
            self.follow_pods();
        }
    }

    fn follow(&mut self, kind: Kind, labels: Option<String>, name: Option<String>) {
        let subject = Subject { kind, namespace: self.feed.namespace.clone(), labels, name };
        let followed = self.start(subject, Duration::ZERO);
        self.others.push(followed);
    }

    fn start(&mut self, subject: Subject, delay: Duration) -> Followed {
        let (tell, told) = mpsc::channel(QUEUE);
        let follower = Follower::new(self.client.clone(), subject.clone(), tell, self.feed.stats.clone());
        self.tasks.spawn(async move {
            tokio::time::sleep(delay).await;
            follower.run().await;
        });
        Followed { subject, told }
    }

    /// Follows anew what a follower that has panicked followed: else the pool would stay as it was, in silence.
    fn revive(&mut self, error: &JoinError) {
        let all = self.others.iter().chain(&self.pods);
        let dead: Vec<Subject> = all.filter(|f| f.told.is_closed()).map(|f| f.subject.clone()).collect();
        for subject in dead {
            let resource = subject.kind.naming().plural;
            tracing::error!(pool = %self.feed.pool, resource, %error, "following has failed; it begins anew");
            let followed = self.start(subject, MAX_BACKOFF);
            let mut all = self.others.iter_mut().chain(&mut self.pods);
            if let Some(place) = all.find(|f| f.told.is_closed()) {
                // What the old one has told and nobody has taken in is told again.
                *place = followed;
            }
        }
    }

    /// Follows the pods that the selector of now means. Those of another one before are kept until these are listed.
    fn follow_pods(&mut self) {
        let Some(selector) = self.members.selector() else { return };
        if self.asked_for.as_ref() != Some(&selector) {
            // The end of the old channel goes, and its follower with it.
            let (namespace, labels) = (self.feed.namespace.clone(), Some(selector.clone()));
            let subject = Subject { kind: Kind::Pod, namespace, labels, name: None };
            self.pods = Some(self.start(subject, Duration::ZERO));
            self.asked_for = Some(selector);
        }
    }

    fn take_in(&mut self, kind: Kind, told: Told, unsaid: &mut Unsaid) {
        let change = match told {
            Told::Change(change) => change,
            Told::NotInstalled => {
                unsaid.rules |= self.rules.not_installed(kind);
                return self.heard(kind, unsaid);
            }
            Told::Failed => return self.heard(kind, unsaid),
        };
        match kind {
            Kind::Pod => {
                let result = self.members.pod(change);
                unsaid.endpoints |= self.judged(kind, result);
            }
            Kind::Pool(_) => {
                let listed = matches!(change, Change::ListDone);
                let result = self.members.pool(change);
                unsaid.endpoints |= self.judged(kind, result);
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

    /// A kind of rules is known, or known not to be had.
    fn heard(&mut self, kind: Kind, unsaid: &mut Unsaid) {
        if self.unheard.remove(&kind) && self.unheard.is_empty() {
            unsaid.endpoints = true;
        }
    }

    /// Whether something may have changed; an object that can't be read is told of.
    fn judged(&self, kind: Kind, result: Result<bool, Unreadable>) -> bool {
        result.unwrap_or_else(|Unreadable { name, reason }| {
            self.feed.stats.unread();
            let kind = kind.naming().kind;
            tracing::error!(pool = %self.feed.pool, kind, name, reason, "an object can't be read; what was known of it stays");
            true
        })
    }

    /// Says when the pool is not there, and when it is there again.
    fn tell_missing(&mut self, listed: bool) {
        let PodsOf::Pool { name, group } = &self.feed.source.pods else { return };
        let missing = self.members.pool_is_missing();
        if missing && !self.told_missing && (listed || self.asked_for.is_some()) {
            let (namespace, group) = (self.feed.namespace.as_str(), group.as_str());
            tracing::error!(pool = %self.feed.pool, name, namespace, group, "there is no such InferencePool");
        }
        self.told_missing = missing;
    }

    /// Tells what has changed. False when nobody listens any more.
    async fn tell(&mut self, unsaid: Unsaid) -> bool {
        if unsaid.rules {
            let name = match &self.feed.source.pods {
                PodsOf::Pool { name, .. } => name.as_str(),
                PodsOf::Selector { .. } => &*self.feed.pool,
            };
            let reports = self.rules.reports(name);
            let disputed: HashSet<String> =
                reports.iter().filter(|r| !r.has_its_name()).map(|r| r.name.clone()).collect();
            for report in reports.iter().filter(|r| disputed.contains(&r.name) && !self.disputed.contains(&r.name)) {
                let (object, message) = (&report.name, &report.wanted.message);
                tracing::warn!(pool = %self.feed.pool, object, message, "an older InferenceModel has the name; this one is not used");
            }
            self.disputed = disputed;
            self.feed.reports.send_replace(reports);
            self.feed.rules.store(self.rules.of_pool(name));
        }
        if unsaid.endpoints
            && self.unheard.is_empty()
            && let Some(endpoints) = self.members.endpoints()
        {
            let event = PoolEvent::Endpoints { source: self.feed.id, endpoints };
            return self.feed.events.send(event).await.is_ok();
        }
        true
    }
}

async fn next_of(followed: Option<&mut Followed>) -> (Kind, Vec<Told>) {
    let Some(followed) = followed else { return std::future::pending().await };
    let mut batch = Vec::new();
    if followed.told.recv_many(&mut batch, BATCH).await == 0 {
        return std::future::pending().await;
    }
    (followed.subject.kind, batch)
}

async fn next_of_any(followed: &mut [Followed]) -> (Kind, Vec<Told>) {
    std::future::poll_fn(|cx| {
        for f in followed.iter_mut() {
            let mut batch = Vec::new();
            if let std::task::Poll::Ready(n) = f.told.poll_recv_many(cx, &mut batch, BATCH)
                && n > 0
            {
                return std::task::Poll::Ready((f.subject.kind, batch));
            }
        }
        std::task::Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pool::{Engine, MetricsSource};

    #[tokio::test(start_paused = true)]
    async fn what_a_follower_leaves_is_followed_anew() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
        let client = Client::try_from(config).unwrap();
        let source = KubernetesSource {
            namespace: None,
            pods: PodsOf::Selector { selector: "app=vllm".into(), target_ports: Vec::new() },
            engine: Engine::default(),
            metrics: MetricsSource::default(),
        };
        let feed = KubeFeed {
            pool: "a".into(),
            source: source.clone(),
            namespace: "default".into(),
            id: SourceId(0),
            events: mpsc::channel(1).0,
            rules: Arc::default(),
            reports: watch::Sender::default(),
            stats: Arc::default(),
        };
        let mut run = Run::new(client, feed);
        run.follow(Kind::Model, None, None);
        run.follow_pods();
        run.tasks.abort_all();
        for _ in 0..2 {
            let ended = run.tasks.join_next().await.unwrap();
            run.revive(&ended.unwrap_err());
        }
        let all: Vec<_> = run.others.iter().chain(&run.pods).collect();
        assert!(all.iter().all(|f| !f.told.is_closed()), "somebody tells again");
        let followed: Vec<_> = all.iter().map(|f| (f.subject.kind, f.subject.labels.as_deref())).collect();
        assert_eq!(followed, [(Kind::Model, None), (Kind::Pod, Some("app=vllm"))]);
    }
}
