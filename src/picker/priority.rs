//! The priority of a request, from its InferenceObjective and its model; and the flow that it is of without a tenant.
//!
//! Called by `decide`. Imports [`super::picker`].

use super::active::ActiveConfig;
use attache_scheduling::Pool;

/// The priority of a request of this objective, for this model. An objective raises it only where client headers are trusted; a client may always
/// lower the priority of its own request.
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

/// The flow of a request for `model` that neither a tenant nor a trusted header names: its `InferenceModel`, so that those of one criticality share
/// the throughput of tokens. Other names come from clients, who could make any number of flows.
pub(super) fn flow_of_model<'m>(pool: &Pool, model: Option<&'m str>) -> Option<&'m str> {
    model.filter(|name| pool.rules.load().priorities.contains_key(*name))
}
