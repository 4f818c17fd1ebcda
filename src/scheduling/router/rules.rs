//! Rules for a pool's models from outside the configuration, which may change at any time.
//!
//! Kubernetes discovery writes them (`InferenceModelRewrite`, `InferenceModel`, `InferenceObjective`);
//! [`super::Router`] and the decision read them. The configuration takes precedence for the same name. Pure.

use super::ModelRewrites;
use arc_swap::{ArcSwap, Guard};
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// 60 s: if some servers lack a target, it is reported missing until none has rejected it for this long. So an
/// object's conditions change at most twice a minute.
pub const MISSING_FOR: Duration = Duration::from_secs(60);

/// All rules at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolRules {
    /// Server names of the models.
    pub rewrites: ModelRewrites,
    /// Names that are reserved but not served yet: their requests are rejected.
    pub reserved: BTreeSet<String>,
    /// Reject models without a rule.
    pub models_only: bool,
    /// Priorities by the client's name of the model.
    pub priorities: BTreeMap<String, i32>,
    /// Priorities by the name of an objective.
    pub objectives: BTreeMap<String, i32>,
}

/// The current rules, replaced as a whole, and whether discovery is stale.
#[derive(Debug, Default)]
pub struct RuleStore {
    rules: ArcSwap<PoolRules>,
    stale: AtomicBool,
    /// Targets that a server has rejected. Only targets of rules are recorded, so clients cannot make it grow.
    missing: Mutex<BTreeMap<MissingTarget, Denial>>,
    /// Size of `missing`: responses take the lock only if it is above 0.
    missing_count: AtomicU64,
    missing_changes: AtomicU64,
}

/// How a target was found to be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Denial {
    /// A server rejected it, the last time at this time.
    Seen(Timestamp),
    /// Another replica reported it in the object's status; servers have served it here since this time.
    Reported(Option<Timestamp>),
}

/// A target of a rewrite that a server does not have.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MissingTarget {
    /// The client's name of the model.
    pub model: String,
    /// The server's name of the model.
    pub target: String,
}

impl PoolRules {
    /// Whether an object maps the model to this target.
    fn has_target(&self, missing: &MissingTarget) -> bool {
        let targets = self.rewrites.exact.get(&missing.model);
        self.priorities.contains_key(&missing.model)
            && targets.is_some_and(|targets| targets.iter().any(|t| *t.model == *missing.target))
    }
}

impl RuleStore {
    /// The current rules.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<PoolRules>> {
        self.rules.load()
    }

    /// Replaces the rules, and drops missing targets that they no longer have.
    pub fn store(&self, rules: PoolRules) {
        let mut missing = self.missing.lock();
        missing.retain(|missing, _| rules.has_target(missing));
        self.missing_count.store(missing.len() as u64, Relaxed);
        drop(missing);
        self.rules.store(Arc::new(rules));
    }

    /// Records that a server responded at `now` that it does not have the model `target`.
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

    /// Records that a server served `target` at `now`. A target that was served for [`MISSING_FOR`] is no longer
    /// missing.
    pub fn target_served(&self, model: &str, target: &str, now: Timestamp) {
        if self.missing_count.load(Relaxed) == 0 {
            return;
        }
        let key = MissingTarget { model: model.to_owned(), target: target.to_owned() };
        let mut missing = self.missing.lock();
        let Some(denial) = missing.get_mut(&key) else { return };
        let since = match denial {
            Denial::Seen(at) => *at,
            Denial::Reported(served) => *served.get_or_insert(now),
        };
        if now.since(since) >= MISSING_FOR {
            missing.remove(&key);
            self.missing_count.store(missing.len() as u64, Relaxed);
            self.missing_changes.fetch_add(1, Relaxed);
        }
    }

    /// Records missing targets that another replica reported in an object's status.
    pub fn report_missing(&self, targets: impl IntoIterator<Item = MissingTarget>) {
        let mut missing = self.missing.lock();
        for target in targets {
            missing.entry(target).or_insert(Denial::Reported(None));
        }
        self.missing_count.store(missing.len() as u64, Relaxed);
    }

    /// Drops targets that another replica reported as served for a minute.
    pub fn report_served(&self, targets: impl IntoIterator<Item = MissingTarget>) {
        let mut missing = self.missing.lock();
        for target in targets {
            missing.remove(&target);
        }
        self.missing_count.store(missing.len() as u64, Relaxed);
    }

    /// The targets that servers lack.
    #[must_use]
    pub fn missing(&self) -> Vec<MissingTarget> {
        self.missing.lock().keys().cloned().collect()
    }

    /// Counter of the changes of [`RuleStore::missing`] that servers caused.
    #[must_use]
    pub fn missing_changes(&self) -> u64 {
        self.missing_changes.load(Relaxed)
    }

    /// Whether discovery has lost its connection, so the pool's endpoints and rules may be outdated.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        self.stale.load(Relaxed)
    }

    /// Sets whether discovery is stale.
    pub fn set_stale(&self, stale: bool) {
        self.stale.store(stale, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::super::RewriteTarget;
    use super::*;

    #[test]
    fn missing_targets_are_those_of_objects_until_a_minute_after_the_last_denial() {
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
        // A target that another replica reported counts for as long, from the first time that a server here serves
        // it.
        let v1 = || [MissingTarget { model: "m".into(), target: "v1".into() }];
        store.report_missing(v1());
        for second in [100, 159] {
            store.target_served("m", "v1", at(second));
            assert_eq!(store.missing(), v1());
        }
        store.target_served("m", "v1", at(160));
        assert_eq!((store.missing(), store.missing_changes()), (vec![], 3));
        store.target_missing("m", "v1", at(170));
        store.report_served(v1());
        assert_eq!(store.missing(), []);
        store.target_missing("m", "v2", at(80));
        store.store(PoolRules { rewrites: ModelRewrites::default(), ..rules });
        assert_eq!(store.missing(), [], "its object is gone");
    }
}
