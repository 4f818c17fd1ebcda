//! What the objects beside an `InferencePool` say of its models.
//!
//! Of the rules for a model an `InferenceModelRewrite`'s exact one comes first, then an `InferenceModel`'s, then a rewrite without a condition;
//! of two alike the older object's, and in it the first. Where llm-d's definition of a kind is installed, GIE's objects of that kind are not
//! looked at, as in llm-d. Pure.

use super::conditions::{self, Heard, Report};
use super::objects::{InferenceModel, Kind, Objective, Origin, Rewrite, ServedPool, UnreadableModel};
use super::table::{Change, Table, Unreadable};
use attache_scheduling::router::{MissingTarget, ModelRewrites, PoolRules, RewriteTarget};
use std::collections::BTreeMap;

/// What is known of the rules of a namespace.
#[derive(Debug, Default)]
pub struct Rules {
    objectives: ByOrigin<Objective>,
    rewrites: ByOrigin<Rewrite>,
    models: Table<InferenceModel>,
    /// What can be read of `InferenceModel`s that can't be read as they are now, and why not. Some may be gone: `models` knows.
    unreadable: BTreeMap<String, (UnreadableModel, String)>,
}

/// The objects of a kind that is defined twice.
#[derive(Debug)]
struct ByOrigin<T> {
    llm_d: Table<T>,
    gie: Table<T>,
}

impl<T> Default for ByOrigin<T> {
    fn default() -> Self {
        Self { llm_d: Table::default(), gie: Table::default() }
    }
}

impl<T> ByOrigin<T> {
    fn of(&mut self, origin: Origin) -> &mut Table<T> {
        match origin {
            Origin::LlmD => &mut self.llm_d,
            Origin::Gie => &mut self.gie,
        }
    }

    fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        let table = if self.llm_d.is_listed() { &self.llm_d } else { &self.gie };
        table.iter()
    }
}

impl Rules {
    /// Takes in a change of a kind that speaks of models. True when the rules may be others afterwards.
    ///
    /// # Errors
    /// The object that can't be read; what was known of it stays, unless another one was known.
    pub fn apply(&mut self, kind: Kind, change: Change) -> Result<bool, Unreadable> {
        match kind {
            Kind::Objective(origin) => self.objectives.of(origin).apply(change),
            Kind::Rewrite(origin) => self.rewrites.of(origin).apply(change),
            Kind::Model => self.apply_model(change),
            Kind::Pod | Kind::Pool(_) | Kind::ConfigMap => Ok(false),
        }
    }

    fn apply_model(&mut self, change: Change) -> Result<bool, Unreadable> {
        let read = match &change {
            Change::Listed(object) | Change::Applied(object) => Some(UnreadableModel::of(object)),
            Change::ListBegun | Change::ListDone | Change::Deleted { .. } => None,
        };
        let ends = matches!(change, Change::ListDone | Change::Deleted { .. });
        let applied = self.models.apply(change);
        if let (Some(object), Err(error)) = (read, &applied) {
            self.unreadable.insert(error.name.clone(), (object, error.reason.clone()));
        }
        if ends {
            self.unreadable.retain(|name, _| self.models.is_unreadable(name));
        }
        applied
    }

    /// A kind is not installed (any more). True when the rules may be others afterwards.
    pub fn not_installed(&mut self, kind: Kind) -> bool {
        match kind {
            Kind::Objective(origin) => uninstall(self.objectives.of(origin)),
            Kind::Rewrite(origin) => uninstall(self.rewrites.of(origin)),
            Kind::Model => uninstall(&mut self.models),
            Kind::Pod | Kind::Pool(_) | Kind::ConfigMap => false,
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
            // A rule without targets says nothing.
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

    /// What is to be said of the `InferenceModel`s of a pool, of whose targets servers lack `missing`.
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

    /// What the statuses of a pool's `InferenceModel`s say of their targets.
    #[must_use]
    pub fn heard(&self, pool: ServedPool<'_>) -> Vec<Heard> {
        self.models_of(pool).into_iter().filter_map(|(_, model)| conditions::heard(model)).collect()
    }

    /// Objects that name a pool of this name in another API group: kind, name, and the group. They do not speak of this pool.
    pub fn strangers<'a>(&'a self, pool: ServedPool<'a>) -> impl Iterator<Item = (&'static str, &'a str, &'a str)> {
        let objectives = self.objectives.iter().map(|(name, o)| ("InferenceObjective", name, &o.pool));
        let rewrites = self.rewrites.iter().map(|(name, r)| ("InferenceModelRewrite", name, &r.pool));
        let models = self.models.iter().map(|(name, m)| ("InferenceModel", name, &m.pool));
        let all = objectives.chain(rewrites).chain(models);
        all.filter_map(move |(kind, name, named)| Some((kind, name, named.foreign_group(pool)?)))
    }
}

fn uninstall<T>(table: &mut Table<T>) -> bool {
    let was_listed = table.is_listed();
    table.clear();
    was_listed
}

/// Gives an `InferenceModel` its name, unless an older one has it.
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
    // Those of the same second by their names, so that every replica sees the same order.
    objects.sort_by_key(|(name, object)| (created(object), *name));
    objects
}

#[cfg(test)]
mod tests;
