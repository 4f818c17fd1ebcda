//! Rules that every part of a pipeline keeps, and helpers for tests.

use attache_pool::PoolSnapshot;
use attache_pool::health::HealthPolicy;
use attache_scheduling::plugin::{Filter, Plugin, Scorer};
use attache_scheduling::registry::Registry;
use attache_scheduling::scheduler::Explain;
use attache_scheduling::testing::{context, eject, snapshot};
use attache_scheduling::{Choices, Decision, Scheduler};
use attache_types::error::{Reason, RequestError};
use attache_types::rng::for_request;
use serde_json::Value;
use std::sync::Arc;

/// The plugins of this crate.
pub(crate) fn registry() -> Registry {
    Registry::new(&[crate::PLUGINS])
}

pub(crate) fn filter(name: &str, parameters: &Value) -> Arc<dyn Filter> {
    match (registry().plugin(name).unwrap().build)(parameters).unwrap() {
        Plugin::Filter(filter) | Plugin::FilterAndScorer(filter, _) => filter,
        other => panic!("{name} is {other:?}"),
    }
}

pub(crate) fn scorer(name: &str, parameters: &Value) -> Arc<dyn Scorer> {
    match (registry().plugin(name).unwrap().build)(parameters).unwrap() {
        Plugin::Scorer(scorer) | Plugin::FilterAndScorer(_, scorer) => scorer,
        other => panic!("{name} is {other:?}"),
    }
}

/// The parameters that a part of a pipeline requires.
pub(crate) fn least_parameters(plugin: &str) -> Value {
    use serde_json::json;
    match plugin {
        "endpoint-attribute-filter" => json!({
            "attribute": "waiting-queue",
            "algorithm": {"type": "threshold", "threshold": {"operator": "LessThan", "value": 5}},
        }),
        "endpoint-attribute-scorer" => {
            json!({"attributeKey": "waiting-queue", "algorithm": {"type": "linear_lower_is_better"}})
        }
        "header-label-affinity-scorer" => json!({"headerName": "x-zone", "labelKey": "zone"}),
        "utilization-filter" => json!({"conditions": [{"metric": "waiting-queue", "maxValue": 5}]}),
        _ => Value::Null,
    }
}

#[test]
fn registry_of_parts_is_consistent() {
    let registry = registry();
    assert!(crate::PLUGINS.plugins.is_sorted_by_key(|d| d.name), "the list is by name");
    for plugin in registry.plugins() {
        assert!(plugin.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{}", plugin.name);
        assert!(!plugin.summary.is_empty() && !plugin.source.is_empty(), "{}", plugin.name);
        let kinds: Vec<&str> = plugin.kind.split(", ").collect();
        let made = match (plugin.build)(&least_parameters(plugin.name)).unwrap() {
            Plugin::Filter(_) => vec!["filter"],
            Plugin::Scorer(_) => vec!["scorer"],
            Plugin::FilterAndScorer(..) => vec!["filter", "scorer"],
            Plugin::Picker(_) => vec!["picker"],
            Plugin::Handler(_) => vec!["handler"],
            Plugin::Decider(_) => vec!["decider"],
        };
        assert_eq!(kinds, made, "{}", plugin.name);
        let error = (plugin.build)(&serde_json::json!({"wieght": 1})).unwrap_err();
        assert!(error.to_string().contains("wieght"), "{}: {error}", plugin.name);
        for alias in plugin.aliases {
            assert_eq!(registry.plugin(alias).map(|d| d.name), Some(plugin.name), "{alias}");
        }
    }
    assert!(registry.plugin("no-such").is_none());
}

/// Decides by a pipeline that accepts only endpoints with the label `role: decode`.
fn decide_by_role(pool: &PoolSnapshot) -> Result<Decision, RequestError> {
    let parameters = serde_json::json!({"filters": [
        {"type": "label-selector-filter", "parameters": {"matchLabels": {"role": "decode"}}},
    ]});
    let pipeline = registry().build("pipeline", &parameters).unwrap();
    let scheduler = Scheduler::new(Choices::only("pipeline", pipeline), HealthPolicy::default(), 1);
    let strategy = &*scheduler.choices.default.strategy;
    scheduler.decide(strategy, &context(pool), Explain::No, &mut for_request(0, 0))
}

#[test]
fn ejection_is_ignored_if_the_algorithm_accepts_no_other_endpoint() {
    let error = decide_by_role(&snapshot(&[(0, 0), (1, 0)])).unwrap_err();
    assert_eq!(error.reason, Reason::SubsetEmpty);
    assert!(error.message.contains("`label-selector-filter` left none"), "{}", error.message);

    let pool = || {
        let mut pool = snapshot(&[(0, 0), (1, 0)]);
        let mut spec = (*pool.endpoints[0].endpoint.spec).clone();
        spec.labels.insert("role".into(), "decode".into());
        pool.endpoints[0] = pool.endpoints[0].clone().respecified(spec);
        pool
    };
    let told = |pool: &PoolSnapshot| {
        let decision = decide_by_role(pool).unwrap();
        (decision.picks[0].id.0, decision.ejection_ignored, decision.probe)
    };
    let ejected = pool();
    assert_eq!(told(&ejected), (0, false, false));
    eject(&ejected, 0, false);
    assert_eq!(told(&ejected), (0, true, false), "the only one of its role");
    let half_open = pool();
    eject(&half_open, 0, true);
    assert_eq!(told(&half_open), (0, false, true));
    assert_eq!(told(&half_open), (0, true, false), "one probe, then as if all were ejected");
}
