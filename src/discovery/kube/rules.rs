//! The rules for models that objects define for an `InferencePool`.
//!
//! For one model, an exact rule of an `InferenceModelRewrite` takes precedence, then an `InferenceModel`, then a
//! rewrite without a condition. Of two equal ones the older object's is used, and within an object the first. Where
//! llm-d's definition of a kind is installed, GIE's objects of that kind are ignored, as in llm-d. Pure.

use super::conditions::{self, Report, TargetStatus};
use super::objects::{InferenceModel, KindOrigin, ObjectKind, Objective, Rewrite, ServedPool, UnreadableModel};
use super::table::{ObjectChange, ObjectTable, Unreadable};
use attache_scheduling::router::{MissingTarget, ModelRewrites, PoolRules, RewriteTarget};
use std::collections::BTreeMap;

/// The known rules of a namespace.
#[derive(Debug, Default)]
pub struct Rules {
    objectives: ByOrigin<Objective>,
    rewrites: ByOrigin<Rewrite>,
    models: ObjectTable<InferenceModel>,
    /// The valid fields of invalid `InferenceModel`s, and why they are invalid. Deleted ones
    /// are removed later, by `models`.
    unreadable: BTreeMap<String, (UnreadableModel, String)>,
}

/// The objects of a kind that two projects define.
#[derive(Debug)]
struct ByOrigin<T> {
    llm_d: ObjectTable<T>,
    gie: ObjectTable<T>,
}

impl<T> Default for ByOrigin<T> {
    fn default() -> Self {
        Self { llm_d: ObjectTable::default(), gie: ObjectTable::default() }
    }
}

impl<T> ByOrigin<T> {
    fn of(&mut self, origin: KindOrigin) -> &mut ObjectTable<T> {
        match origin {
            KindOrigin::LlmD => &mut self.llm_d,
            KindOrigin::Gie => &mut self.gie,
        }
    }

    fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        let table = if self.llm_d.is_listed() { &self.llm_d } else { &self.gie };
        table.iter()
    }
}

impl Rules {
    /// Applies a change of a kind that defines rules. Returns whether the rules may differ.
    ///
    /// # Errors
    /// If the object is invalid; its last valid version stays, unless it was another object of the name.
    pub fn apply(&mut self, kind: ObjectKind, change: ObjectChange) -> Result<bool, Unreadable> {
        match kind {
            ObjectKind::Objective(origin) => self.objectives.of(origin).apply(change),
            ObjectKind::Rewrite(origin) => self.rewrites.of(origin).apply(change),
            ObjectKind::Model => self.apply_model(change),
            ObjectKind::Pod | ObjectKind::Pool(_) | ObjectKind::ConfigMap => Ok(false),
        }
    }

    fn apply_model(&mut self, change: ObjectChange) -> Result<bool, Unreadable> {
        let read = match &change {
            ObjectChange::Listed(object) | ObjectChange::Applied(object) => Some(UnreadableModel::of(object)),
            ObjectChange::ListBegun | ObjectChange::ListDone | ObjectChange::Deleted { .. } => None,
        };
        let ends = matches!(change, ObjectChange::ListDone | ObjectChange::Deleted { .. });
        let applied = self.models.apply(change);
        if let (Some(object), Err(error)) = (read, &applied) {
            self.unreadable.insert(error.name.clone(), (object, error.reason.clone()));
        }
        if ends {
            self.unreadable.retain(|name, _| self.models.is_unreadable(name));
        }
        applied
    }

    /// Records that a kind is not installed (any more). Returns whether the rules may differ.
    pub fn not_installed(&mut self, kind: ObjectKind) -> bool {
        match kind {
            ObjectKind::Objective(origin) => uninstall(self.objectives.of(origin)),
            ObjectKind::Rewrite(origin) => uninstall(self.rewrites.of(origin)),
            ObjectKind::Model => uninstall(&mut self.models),
            ObjectKind::Pod | ObjectKind::Pool(_) | ObjectKind::ConfigMap => false,
        }
    }

    /// The rules for the pool of this name.
    #[must_use]
    pub fn of_pool(&self, pool: ServedPool<'_>) -> PoolRules {
        let mut rules = PoolRules { rewrites: self.rewrites_of(pool), ..PoolRules::default() };
        let of_pool = self.objectives.iter().filter(|(_, objective)| objective.pool.means(pool));
        rules.objectives = of_pool.map(|(name, objective)| (name.to_owned(), objective.priority)).collect();
        for (_, model) in self.models_of(pool) {
            claim(&mut rules, model);
        }
        rules
    }

    fn rewrites_of(&self, pool: ServedPool<'_>) -> ModelRewrites {
        let mut exact: BTreeMap<String, Vec<RewriteTarget>> = BTreeMap::new();
        let mut any: Option<&[RewriteTarget]> = None;
        for (_, rewrite) in oldest_first(self.rewrites.iter().filter(|(_, r)| r.pool.means(pool)), |r| r.created) {
            // A rule without targets has no effect.
            for rule in rewrite.rules.iter().filter(|rule| !rule.targets.is_empty()) {
                if rule.models.is_empty() {
                    any = any.or(Some(&rule.targets));
                }
                for model in &rule.models {
                    exact.entry(model.clone()).or_insert_with(|| rule.targets.clone());
                }
            }
        }
        ModelRewrites { exact, any: any.unwrap_or_default().to_vec() }
    }

    fn models_of(&self, pool: ServedPool<'_>) -> Vec<(&str, &InferenceModel)> {
        oldest_first(self.models.iter().filter(|(_, model)| model.pool.means(pool)), |model| model.created)
    }

    /// The conditions of the `InferenceModel`s of a pool, while servers lack the targets `missing`.
    #[must_use]
    pub fn reports(&self, pool: ServedPool<'_>, missing: &[MissingTarget]) -> Vec<Report> {
        let mut reports = conditions::reports(self.models_of(pool), missing);
        let is_unreadable = |name: &str| self.models.is_unreadable(name);
        reports.retain(|report| !is_unreadable(&report.name));
        let unreadable =
            self.unreadable.iter().filter(|(name, (object, _))| is_unreadable(name) && object.pool.means(pool));
        reports.extend(unreadable.map(|(name, (object, reason))| conditions::unreadable(name, object, reason)));
        reports
    }

    /// The targets in the statuses of a pool's `InferenceModel`s.
    #[must_use]
    pub fn target_statuses(&self, pool: ServedPool<'_>) -> Vec<TargetStatus> {
        self.models_of(pool).into_iter().filter_map(|(_, model)| conditions::target_status(model)).collect()
    }

    /// Objects that refer to a pool of this name in another API group: kind, name, and that group. They do
    /// not apply to this pool.
    pub fn strangers<'a>(&'a self, pool: ServedPool<'a>) -> impl Iterator<Item = (&'static str, &'a str, &'a str)> {
        let objectives = self.objectives.iter().map(|(name, o)| ("InferenceObjective", name, &o.pool));
        let rewrites = self.rewrites.iter().map(|(name, r)| ("InferenceModelRewrite", name, &r.pool));
        let models = self.models.iter().map(|(name, m)| ("InferenceModel", name, &m.pool));
        let all = objectives.chain(rewrites).chain(models);
        all.filter_map(move |(kind, name, named)| Some((kind, name, named.foreign_group(pool)?)))
    }
}

fn uninstall<T>(table: &mut ObjectTable<T>) -> bool {
    let was_listed = table.is_listed();
    table.clear();
    was_listed
}

/// Adds an `InferenceModel` to the rules, unless an older one has its model name.
fn claim(rules: &mut PoolRules, model: &InferenceModel) {
    rules.models_only = true;
    if rules.priorities.contains_key(&model.model) {
        return;
    }
    rules.priorities.insert(model.model.clone(), model.priority.unwrap_or(0));
    if rules.rewrites.exact.contains_key(&model.model) {
        return;
    }
    if model.is_reserved() {
        rules.reserved.insert(model.model.clone());
        return;
    }
    let itself = || vec![RewriteTarget { model: model.model.as_str().into(), weight: 1 }];
    let targets = if model.targets.is_empty() { itself() } else { model.targets.clone() };
    rules.rewrites.exact.insert(model.model.clone(), targets);
}

fn oldest_first<'a, T>(
    objects: impl Iterator<Item = (&'a str, &'a T)>,
    created: impl Fn(&T) -> i64,
) -> Vec<(&'a str, &'a T)> {
    let mut objects: Vec<_> = objects.collect();
    // Objects of the same second are ordered by name, so that every replica sees the same order.
    objects.sort_by_key(|(name, object)| (created(object), *name));
    objects
}

#[cfg(test)]
mod tests;
