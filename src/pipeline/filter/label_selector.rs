//! `label-selector-filter`: endpoints whose labels match a Kubernetes label selector.
//!
//! `matchLabels` and `matchExpressions` (`In`, `NotIn`, `Exists`, `DoesNotExist`) must all hold; an endpoint without
//! the label meets `NotIn` and `DoesNotExist`. An empty selector keeps all. When not: the label is a role; the role
//! filters know the combined roles.
//! Source: llm-d `label-selector-filter`, formerly `by-label-selector`; `by-label` is its older form (`label`,
//! `validValues`, `allowsNoLabel`).

use attache_pool::Endpoint;
use attache_scheduling::plugin::{Filter, ParamError, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use attache_types::{keywords, parameters};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "label-selector-filter",
    aliases: &["by-label-selector", "by-label"],
    kind: "filter",
    summary: "Keeps endpoints whose labels match a selector.",
    source: "llm-d `label-selector-filter`",
    parameters: section::<Params>,
    build: |value| params::<Params>(value)?.build().map(|p| Plugin::Filter(Arc::new(p))),
};

parameters! {
    struct Params {
        /// Labels that an endpoint must have, with their values.
        "matchLabels" => match_labels: BTreeMap<String, String> { absent: "none"; },
        /// Conditions on labels, all of which must hold.
        "matchExpressions" => match_expressions: Vec<Expression> { absent: "none"; },
        /// Older form: name of a label that must have one of `validValues`.
        "label" => label: Option<String> { absent: "none"; },
        /// Older form: allowed values of `label`.
        "validValues" => valid_values: Vec<String> { absent: "none"; },
        /// Older form: whether endpoints without `label` stay.
        "allowsNoLabel" => allows_no_label: bool { default: false; },
    }
    /// A condition on a label.
    struct Expression {
        /// Name of the label.
        "key" => key: String,
        /// Condition on the label. An endpoint without the label meets `NotIn` and `DoesNotExist`.
        "operator" => operator: Operator,
        /// Values of `In` and `NotIn`, at least one. The other operators allow none.
        "values" => values: Vec<String> { absent: "none"; },
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
}

keywords! {
    Operator: "In" => In, "NotIn" => NotIn, "Exists" => Exists, "DoesNotExist" => DoesNotExist;
}

impl Params {
    fn build(self) -> Result<LabelSelector, ParamError> {
        let equal = |(key, value)| Rule { key, values: Some(vec![value]), absent: false, negated: false };
        let mut rules: Vec<Rule> = self.match_labels.into_iter().map(equal).collect();
        for (index, Expression { key, operator, values }) in self.match_expressions.into_iter().enumerate() {
            let listed = matches!(operator, Operator::In | Operator::NotIn);
            if listed == values.is_empty() {
                let allowed = if listed { "at least one is needed" } else { "none are allowed with this operator" };
                return Err(ParamError::new(format!("`values` of `{key}` {operator:?}: {allowed}"))
                    .in_item(index)
                    .under("matchExpressions"));
            }
            let negated = matches!(operator, Operator::NotIn | Operator::DoesNotExist);
            rules.push(Rule { key, values: listed.then_some(values), absent: false, negated });
        }
        match self.label {
            Some(key) => {
                if self.valid_values.is_empty() && !self.allows_no_label {
                    return Err(ParamError::new("`validValues` is empty; at least one is needed"));
                }
                let (values, absent) = (Some(self.valid_values), self.allows_no_label);
                rules.push(Rule { key, values, absent, negated: false });
            }
            None if !self.valid_values.is_empty() || self.allows_no_label => {
                return Err(ParamError::new("`label` is missing; `validValues` and `allowsNoLabel` are about it"));
            }
            None => {}
        }
        Ok(LabelSelector { rules })
    }
}

#[derive(Debug)]
struct LabelSelector {
    rules: Vec<Rule>,
}

/// One condition on one label.
#[derive(Debug)]
struct Rule {
    key: String,
    /// Allowed values; `None` allows any value.
    values: Option<Vec<String>>,
    /// Whether an endpoint without the label meets the condition.
    absent: bool,
    /// Inverts the condition.
    negated: bool,
}

impl Rule {
    fn holds(&self, endpoint: &Endpoint) -> bool {
        let listed = |value: &Arc<str>| self.values.as_ref().is_none_or(|list| list.iter().any(|v| **v == **value));
        endpoint.spec.labels.get(self.key.as_str()).map_or(self.absent, listed) != self.negated
    }
}

impl Filter for LabelSelector {
    fn keep(&self, _: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        for (keep, candidate) in keep.iter_mut().zip(candidates) {
            *keep = self.rules.iter().all(|rule| rule.holds(&candidate.state.endpoint));
        }
    }
}
