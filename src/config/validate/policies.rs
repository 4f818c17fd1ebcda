//! The checks of `modelPolicies`: the fields of the admin API's `/api/nodes/scheduling`, under the keys of the file.

use crate::localai_env::STRATEGY;
use crate::schema::{self, Opt};
use crate::settings::Settings;
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use attache_scheduling::policy::{Document, MAX_MODELS, ModelPolicy, PolicyMap};
use serde_json::{Map, Value};
use std::collections::HashMap;

/// The policies in the file.
pub(super) fn policies(file: Opt<Vec<At<schema::ModelPolicy>>>, sink: &mut Sink) -> PolicyMap {
    let mut policies = PolicyMap::new();
    let mut seen: HashMap<String, Span> = HashMap::new();
    let section = file.as_ref().map(|at| at.span).unwrap_or_default();
    for (i, At { value, span }) in file.into_iter().flat_map(|at| at.value).enumerate() {
        let path = format!("modelPolicies[{i}]");
        let document = match Document::read(&document(&value)) {
            Ok(document) => document,
            Err(error) => {
                let key = keys().find(|(_, field)| *field == error.field).map_or("model", |(key, _)| key);
                let message = error.message.replace(&format!("`{}`", error.field), &format!("`{key}`"));
                sink.push(Diagnostic::new(Code::OutOfRange, format!("{path}.{key}"), message).at(span));
                continue;
            }
        };
        if let Some(first) = seen.insert(document.model.clone(), span) {
            let message = format!("two policies speak of the model `{}`", document.model);
            let diagnostic = Diagnostic::new(Code::DuplicateName, format!("{path}.model"), message);
            sink.push(diagnostic.at(span).related(first, "the first one"));
        }
        policies.insert(document.model.as_str().into(), document.change(ModelPolicy::default()));
    }
    if policies.len() > MAX_MODELS {
        sink.out_of_range(section, "modelPolicies", policies.len(), &format!("at most {MAX_MODELS} models"));
    }
    policies
}

/// Whether requests of any pool can reach the strategy that reads policies.
pub(super) fn are_used(settings: &Settings) -> bool {
    let pools = settings.pools.iter().chain(settings.templates.iter().map(|template| &template.pool));
    let mut reached = pools.flat_map(|pool| pool.strategies().chain(pool.allowed_strategies()));
    // `fallback` names its parts in its parameters.
    reached
        .any(|(name, parameters)| name == STRATEGY || name == "fallback" && parameters.to_string().contains(STRATEGY))
}

/// Warns of a section that no strategy reads.
pub(super) fn tell_unused(section: Option<Span>, sink: &mut Sink) {
    if let Some(span) = section {
        let message = format!("`modelPolicies` has no effect: no pool has the strategy `{STRATEGY}`");
        sink.push(Diagnostic::new(Code::NoEffect, "modelPolicies", message).at(span));
    }
}

/// The keys of the file, with the corresponding fields of the admin API.
fn keys() -> impl Iterator<Item = (&'static str, &'static str)> {
    [
        ("model", "model_name"),
        ("routePolicy", "route_policy"),
        ("balanceAbsThreshold", "balance_abs_threshold"),
        ("balanceRelThreshold", "balance_rel_threshold"),
        ("minPrefixMatch", "min_prefix_match"),
    ]
    .into_iter()
}

fn document(file: &schema::ModelPolicy) -> Value {
    let values = [
        file.model.as_ref().map(|at| Value::from(at.value.clone())),
        file.route_policy.as_ref().map(|at| Value::from(at.value.clone())),
        file.balance_abs_threshold.as_ref().map(|at| Value::from(at.value)),
        file.balance_rel_threshold.as_ref().map(|at| Value::from(at.value)),
        file.min_prefix_match.as_ref().map(|at| Value::from(at.value)),
    ];
    let fields = keys().zip(values).filter_map(|((_, field), value)| Some((field.to_owned(), value?)));
    Value::Object(fields.collect::<Map<_, _>>())
}
