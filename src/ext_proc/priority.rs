//! The priority of a request, from its InferenceObjective and its model.
//!
//! Called by `decide`. Imports [`super::picker`].

use super::picker::Live;
use crate::scheduling::Pool;

/// The priority of a request of this objective, for this model. An objective raises it only where client headers are trusted; a client may always
/// lower the priority of its own request.
pub(super) fn priority(live: &Live, pool: &Pool, objective: Option<&str>, model: Option<&str>) -> i32 {
    let rules = pool.rules.load();
    let configured = |name: &str| live.exchange.objectives.get(name).copied();
    let of_objective = objective.and_then(|name| configured(name).or_else(|| rules.objectives.get(name).copied()));
    let of_model = model.and_then(|name| rules.priorities.get(name).copied()).unwrap_or(0);
    match of_objective {
        Some(priority) if live.exchange.trust_client_headers => priority,
        Some(priority) if priority < 0 => of_model.min(priority),
        _ => of_model,
    }
}
