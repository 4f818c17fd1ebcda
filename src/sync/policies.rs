//! Policies of models that the admin API of any picker has changed. Each picker knows the last change of each model,
//! and sends its own at once. Heartbeats have a digest of all of them; a picker whose digest differs asks for all, as
//! does one that has just started.

use crate::generated::v1;
use crate::paths::mix;
use attache_scheduling::ModelPolicies;
use attache_scheduling::policy::{ModelPolicy, PolicyChange, RoutePolicy};
use std::sync::Arc;
use v1::event::Kind;
use xxhash_rust::xxh3::xxh3_64;

/// The change as peers get it.
fn event(model: &str, change: &PolicyChange) -> Kind {
    let policy = change.policy.unwrap_or_default();
    Kind::Policy(v1::Policy {
        model: model.to_owned(),
        number: change.number,
        removed: change.policy.is_none(),
        route_policy: match policy.route_policy {
            None => v1::RoutePolicy::Unset,
            Some(RoutePolicy::RoundRobin) => v1::RoutePolicy::RoundRobin,
            Some(RoutePolicy::PrefixCache) => v1::RoutePolicy::PrefixCache,
        }
        .into(),
        balance_abs_threshold: policy.balance_abs_threshold,
        balance_rel_threshold: policy.balance_rel_threshold,
        min_prefix_match: policy.min_prefix_match,
    })
}

/// The change of a peer.
pub(crate) fn change(event: &v1::Policy) -> PolicyChange {
    let policy = ModelPolicy {
        // A policy of a newer version is none that this picker knows.
        route_policy: match v1::RoutePolicy::try_from(event.route_policy) {
            Ok(v1::RoutePolicy::RoundRobin) => Some(RoutePolicy::RoundRobin),
            Ok(v1::RoutePolicy::PrefixCache) => Some(RoutePolicy::PrefixCache),
            Ok(v1::RoutePolicy::Unset) | Err(_) => None,
        },
        balance_abs_threshold: event.balance_abs_threshold,
        balance_rel_threshold: event.balance_rel_threshold,
        min_prefix_match: event.min_prefix_match,
    };
    PolicyChange { number: event.number, policy: (!event.removed).then_some(policy) }
}

/// The last change of `model`, if there is one.
pub(crate) fn of_model(policies: &ModelPolicies, model: &str) -> Option<Kind> {
    policies.last_change(model).map(|change| event(model, &change))
}

/// The last change of each model.
pub(crate) fn all(policies: &ModelPolicies) -> Vec<Kind> {
    policies.last_changes().iter().map(|(model, change)| event(model, change)).collect()
}

/// Digest of the last change of each model; 0 without changes.
pub(crate) fn digest(policies: &ModelPolicies) -> u64 {
    let of = |(model, change): &(Arc<str>, PolicyChange)| {
        let (number, content) = change.order();
        content.into_iter().fold(mix(xxh3_64(model.as_bytes()) ^ mix(number)), |digest, part| mix(digest ^ part))
    };
    policies.last_changes().iter().map(of).fold(0, |all, one| all ^ one)
}
