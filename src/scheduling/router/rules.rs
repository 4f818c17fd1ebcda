//! What is said of a pool's models outside of the configuration, and may change at any moment.
//!
//! Written by discovery through Kubernetes (`InferenceModelRewrite`, `InferenceModel`, `InferenceObjective`), read by [`super::Router`] and by
//! the decision. The configuration outranks it where both speak of the same name. Pure.

use super::ModelRewrites;
use arc_swap::{ArcSwap, Guard};
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// 60 s: a target that some servers have and others lack is called missing until no server has denied it for this long, so that conditions of
/// an object change at most twice a minute.
pub const MISSING_FOR: Duration = Duration::from_secs(60);

/// The rules of one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolRules {
    /// What servers call the models.
    pub rewrites: ModelRewrites,
    /// Names that are taken but served by nothing yet: their requests are refused.
    pub reserved: BTreeSet<String>,
    /// Models that no rule names are refused.
    pub models_only: bool,
    /// Priorities by the client's name of the model.
    pub priorities: BTreeMap<String, i32>,
    /// Priorities by the name of an objective.
    pub objectives: BTreeMap<String, i32>,
}

/// The rules of now, replaced as a whole; and whether what is told of the pool may be old.
#[derive(Debug, Default)]
pub struct RuleStore {
    rules: ArcSwap<PoolRules>,
    stale: AtomicBool,
    /// Targets of models that a server has denied. Only those that rules name, so that clients can't make it grow.
    missing: Mutex<BTreeMap<MissingTarget, Denial>>,
    /// How many those are: nobody takes the lock for a response while there are none.
    missing_count: AtomicU64,
    missing_changes: AtomicU64,
}

/// How it is known that a target is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Denial {
    /// A server has denied it, the last time at this moment.
    Seen(Timestamp),
    /// Another replica has said so, in the status of the object; servers have served it here since this moment.
    Heard(Option<Timestamp>),
}

/// A name that servers are asked for in place of a client's, and that a server does not have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MissingTarget {
    /// The client's name.
    pub model: String,
    /// The server's.
    pub target: String,
}

impl PoolRules {
    /// Whether an object gives `model` this target.
    fn has_target(&self, missing: &MissingTarget) -> bool {
        let targets = self.rewrites.exact.get(&missing.model);
        self.priorities.contains_key(&missing.model)
            && targets.is_some_and(|targets| targets.iter().any(|t| *t.model == *missing.target))
    }
}

impl RuleStore {
    /// The rules of now.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<PoolRules>> {
        self.rules.load()
    }

    /// Replaces them.
    pub fn store(&self, rules: PoolRules) {
        let mut missing = self.missing.lock();
        missing.retain(|missing, _| rules.has_target(missing));
        self.missing_count.store(missing.len() as u64, Relaxed);
        drop(missing);
        self.rules.store(Arc::new(rules));
    }

    /// A server has answered at `now` that it lacks the model that it was asked for.
    pub fn target_missing(&self, model: &str, target: &str, now: Timestamp) {
        let key = MissingTarget { model: model.to_owned(), target: target.to_owned() };
        if !self.load().has_target(&key) {
            return;
        }
        let mut missing = self.missing.lock();
        if missing.insert(key, Denial::Seen(now)).is_none() {
            self.missing_count.store(missing.len() as u64, Relaxed);
            self.missing_changes.fetch_add(1, Relaxed);
        }
    }

    /// A server has served the model that it was asked for at `now`.
    pub fn target_served(&self, model: &str, target: &str, now: Timestamp) {
        if self.missing_count.load(Relaxed) == 0 {
            return;
        }
        let key = MissingTarget { model: model.to_owned(), target: target.to_owned() };
        let mut missing = self.missing.lock();
        let Some(denial) = missing.get_mut(&key) else { return };
        let since = match denial {
            Denial::Seen(at) => *at,
            Denial::Heard(served) => *served.get_or_insert(now),
        };
        if now.since(since) >= MISSING_FOR {
            missing.remove(&key);
            self.missing_count.store(missing.len() as u64, Relaxed);
            self.missing_changes.fetch_add(1, Relaxed);
        }
    }

    /// Another replica has said in the status of an object that these targets are missing.
    pub fn hear_missing(&self, targets: impl IntoIterator<Item = MissingTarget>) {
        let mut missing = self.missing.lock();
        for target in targets {
            missing.entry(target).or_insert(Denial::Heard(None));
        }
        self.missing_count.store(missing.len() as u64, Relaxed);
    }

    /// Another replica has said in the status of an object that these targets are there: servers have served them for a minute.
    pub fn hear_served(&self, targets: impl IntoIterator<Item = MissingTarget>) {
        let mut missing = self.missing.lock();
        for target in targets {
            missing.remove(&target);
        }
        self.missing_count.store(missing.len() as u64, Relaxed);
    }

    /// Targets that servers lack.
    #[must_use]
    pub fn missing(&self) -> Vec<MissingTarget> {
        self.missing.lock().keys().cloned().collect()
    }

    /// Another with each change of [`RuleStore::missing`] that servers cause.
    #[must_use]
    pub fn missing_changes(&self) -> u64 {
        self.missing_changes.load(Relaxed)
    }

    /// Whether whoever tells of the pool, its endpoints and its rules, is out of touch with what there is.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.stale.load(Relaxed)
    }

    /// Says so, or that it is not so any more.
    pub fn set_stale(&self, stale: bool) {
        self.stale.store(stale, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::RewriteTarget;
    use super::*;

    #[test]
    fn only_targets_of_objects_are_called_missing_and_for_a_minute_after_the_last_denial() {
        let store = RuleStore::default();
        let at = |seconds| Timestamp::default().after(Duration::from_secs(seconds));
        store.target_missing("m", "v1", at(0));
        assert_eq!(store.missing(), [], "no object names it");
        let targets = ["v1", "v2"].map(|model| RewriteTarget { model: model.into(), weight: 1 }).to_vec();
        let exact = BTreeMap::from([("m".to_owned(), targets)]);
        let rewrites = ModelRewrites { exact, any: Vec::new() };
        let rules = PoolRules { rewrites, priorities: [("m".to_owned(), 0)].into(), ..PoolRules::default() };
        store.store(rules.clone());
        for target in ["v1", "v3", "v1"] {
            store.target_missing("m", target, at(10));
        }
        assert_eq!(store.missing_changes(), 1);
        store.target_served("m", "v1", at(69));
        store.target_served("m", "v2", at(99));
        assert_eq!(store.missing(), [MissingTarget { model: "m".into(), target: "v1".into() }]);
        store.target_served("m", "v1", at(70));
        assert_eq!((store.missing(), store.missing_changes()), (vec![], 2));
        // What another replica says counts as long, from the first answer of a server here.
        let v1 = || [MissingTarget { model: "m".into(), target: "v1".into() }];
        store.hear_missing(v1());
        for second in [100, 159] {
            store.target_served("m", "v1", at(second));
            assert_eq!(store.missing(), v1());
        }
        store.target_served("m", "v1", at(160));
        assert_eq!((store.missing(), store.missing_changes()), (vec![], 3));
        store.target_missing("m", "v1", at(170));
        store.hear_served(v1());
        assert_eq!(store.missing(), []);
        store.target_missing("m", "v2", at(80));
        store.store(PoolRules { rewrites: ModelRewrites::default(), ..rules });
        assert_eq!(store.missing(), [], "its object is gone");
    }
}
