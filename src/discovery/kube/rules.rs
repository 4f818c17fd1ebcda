//! What the objects beside an `InferencePool` say of its models.
//!
//! Of the rules for a model an `InferenceModelRewrite`'s exact one comes first, then an `InferenceModel`'s, then a rewrite without a condition;
//! of two alike the older object's, and in it the first. Where llm-d's definition of a kind is installed, GIE's objects of that kind are not
//! looked at, as in llm-d. Pure.

use super::conditions::{Report, reports};
use super::objects::{InferenceModel, Kind, Objective, Origin, Rewrite};
use super::table::{Change, Table, Unreadable};
use crate::scheduling::router::{ModelRewrites, PoolRules, RewriteTarget};
use std::collections::BTreeMap;

/// What is known of the rules of a namespace.
#[derive(Debug, Default)]
pub struct Rules {
    objectives: ByOrigin<Objective>,
    rewrites: ByOrigin<Rewrite>,
    models: Table<InferenceModel>,
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
            Kind::Model => self.models.apply(change),
            Kind::Pod | Kind::Pool(_) | Kind::ConfigMap => Ok(false),
        }
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
    pub fn of_pool(&self, pool: &str) -> PoolRules {
        let mut rules = PoolRules { rewrites: self.rewrites_of(pool), ..PoolRules::default() };
        let of_pool = self.objectives.iter().filter(|(_, objective)| objective.pool == pool);
        rules.objectives = of_pool.map(|(name, objective)| (name.to_owned(), objective.priority)).collect();
        for (_, model) in oldest_first(self.models.iter().filter(|(_, m)| m.pool == pool), |m| m.created) {
            claim(&mut rules, model);
        }
        rules
    }

    fn rewrites_of(&self, pool: &str) -> ModelRewrites {
        let mut exact: BTreeMap<String, Vec<RewriteTarget>> = BTreeMap::new();
        let mut any: Option<&[RewriteTarget]> = None;
        for (_, rewrite) in oldest_first(self.rewrites.iter().filter(|(_, r)| r.pool == pool), |r| r.created) {
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

    /// What is to be said of the `InferenceModel`s of a pool: whether each has the name that it claims, or an older one has it.
    #[must_use]
    pub fn reports(&self, pool: &str) -> Vec<Report> {
        reports(oldest_first(self.models.iter().filter(|(_, m)| m.pool == pool), |m| m.created))
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
    if !model.targets.is_empty() && model.targets.iter().all(|t| t.weight == 0) {
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
