//! The priority of a request, by its InferenceObjective and its model, and its flow if it has no tenant.

use super::active::ActiveConfig;
use attache_scheduling::Pool;

/// The priority of a request with this objective for this model. An objective raises the priority only if client
/// headers are trusted. A client may always lower the priority of its own request.
pub(super) fn priority(config: &ActiveConfig, pool: &Pool, objective: Option<&str>, model: Option<&str>) -> i32 {
    let rules = pool.rules.load();
    let configured = |name: &str| config.settings.objectives.get(name).copied();
    let of_objective = objective.and_then(|name| configured(name).or_else(|| rules.objectives.get(name).copied()));
    let of_model = model.and_then(|name| rules.priorities.get(name).copied()).unwrap_or(0);
    match of_objective {
        Some(priority) if config.settings.trust_client_headers => priority,
        Some(priority) if priority < 0 => of_model.min(priority),
        _ => of_model,
    }
}

/// The flow of a request for `model` without a tenant or a trusted fairness header: the `InferenceModel` of that
/// name, so that models of one criticality share the throughput. `None` if there is none: clients could otherwise
/// create any number of flows by inventing model names.
pub(super) fn flow_of_model<'m>(pool: &Pool, model: Option<&'m str>) -> Option<&'m str> {
    model.filter(|name| pool.rules.load().priorities.contains_key(*name))
}
