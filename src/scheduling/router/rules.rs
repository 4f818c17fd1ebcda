//! What is said of a pool's models outside of the configuration, and may change at any moment.
//!
//! Written by discovery through Kubernetes (`InferenceModelRewrite`, `InferenceModel`, `InferenceObjective`), read by [`super::Router`] and by
//! the decision. The configuration outranks it where both speak of the same name. Pure.

use super::ModelRewrites;
use arc_swap::{ArcSwap, Guard};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

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
}

impl RuleStore {
    /// The rules of now.
    #[must_use]
    pub fn load(&self) -> Guard<Arc<PoolRules>> {
        self.rules.load()
    }

    /// Replaces them.
    pub fn store(&self, rules: PoolRules) {
        self.rules.store(Arc::new(rules));
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
