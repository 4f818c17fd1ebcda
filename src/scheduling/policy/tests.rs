use super::*;
use serde_json::json;

fn change(policies: &ModelPolicies, document: &Value) -> Result<ModelPolicy, PolicyError> {
    policies.change(&Document::read(document)?, 0)
}

#[test]
fn change_keeps_omitted_fields_and_zero_is_a_value() {
    let policies = ModelPolicies::default();
    assert_eq!(policies.of("m"), ModelPolicy::default());
    let change = |document| change(&policies, &document).unwrap();
    // "localai 1.11 scheduling API": {abs 3, min .4} round trip.
    let first = change(json!({"model_name": "m", "balance_abs_threshold": 3, "min_prefix_match": 0.4}));
    assert_eq!((first.balance_abs_threshold, first.min_prefix_match), (Some(3), Some(0.4)));
    assert_eq!(policies.of("m"), first);
    let second = change(json!({"model_name": "m", "route_policy": "round_robin"}));
    assert_eq!(second, ModelPolicy { route_policy: Some(RoutePolicy::RoundRobin), ..first });
    // "localai 1.4, follow-up": an explicit 0.
    let zero = change(json!({"model_name": "m", "balance_abs_threshold": 0, "min_prefix_match": 0}));
    assert_eq!((zero.balance_abs_threshold, zero.min_prefix_match), (Some(0), Some(0.0)));
    assert_eq!(change(json!({"model_name": "m", "balance_rel_threshold": 1})).balance_rel_threshold, Some(1.0));
    // "localai 1.8": a ratio of 0 inherits; so do null and the empty policy.
    assert_eq!(change(json!({"model_name": "m", "balance_rel_threshold": 0})).balance_rel_threshold, None);
    let inherits =
        change(json!({"model_name": "m", "route_policy": "", "balance_abs_threshold": null, "min_prefix_match": null}));
    assert_eq!(inherits, ModelPolicy::default());
    assert_eq!(policies.all().len(), 1);
    assert!(policies.remove("m", 0) && !policies.remove("m", 0) && policies.get("m").is_none());
}

#[test]
fn invalid_change_is_rejected_as_a_whole_and_names_the_field() {
    let policies = ModelPolicies::default();
    change(&policies, &json!({"model_name": "m", "min_prefix_match": 0.5})).unwrap();
    let before = policies.of("m");
    for (field, value) in [
        // "localai 1.11 scheduling API": min 2, policy bogus, rel .5.
        ("min_prefix_match", json!(2)),
        ("route_policy", json!("bogus")),
        ("balance_rel_threshold", json!(0.5)),
        ("min_prefix_match", json!(-0.1)),
        ("min_prefix_match", json!("0.3")),
        ("route_policy", json!(1)),
        ("balance_abs_threshold", json!(-1)),
        ("balance_abs_threshold", json!(1.5)),
        ("balance_rel_threshold", json!(-2)),
        ("min_replicas", json!(-1)),
        ("max_replicas", json!("2")),
        ("spread_all", json!(1)),
        ("node_selector", json!(7)),
        ("replica_count", json!(1)),
        ("model_name", json!("")),
        ("model_name", json!("a\nb")),
        ("model_name", json!("x".repeat(257))),
        ("model_name", json!(null)),
    ] {
        let mut document = json!({"model_name": "m", "balance_abs_threshold": 7});
        document[field] = value.clone();
        let error = change(&policies, &document).unwrap_err();
        assert_eq!(error.field, field, "{value}");
        assert!(error.message.contains(field) && error.message.len() < 400, "{error}");
        assert_eq!(policies.of("m"), before, "no part of an invalid change is applied");
    }
    assert_eq!(change(&policies, &json!([1])).unwrap_err().field, "");
}

#[test]
fn number_of_models_is_bounded() {
    let policies = ModelPolicies::default();
    for i in 0..MAX_MODELS {
        change(&policies, &json!({"model_name": format!("m{i}"), "min_prefix_match": 0})).unwrap();
    }
    assert_eq!(change(&policies, &json!({"model_name": "one more"})).unwrap_err().field, "model_name");
    change(&policies, &json!({"model_name": "m3", "min_prefix_match": 1})).unwrap();
    assert_eq!(policies.all().len(), MAX_MODELS);
}

/// LocalAI's form sends every field; replica fields are checked as there, and reported if they request something.
#[test]
fn replica_fields_are_accepted_checked_and_reported() {
    let read = |document: Value| Document::read(&document).map(|d| d.without_effect);
    let empty =
        json!({"model_name": "m", "node_selector": {}, "min_replicas": 0, "max_replicas": 0, "spread_all": false});
    assert_eq!(read(empty).unwrap(), Vec::<String>::new());
    let asks = json!({"model_name": "m", "node_selector": {"gpu": "a100"}, "min_replicas": 1, "max_replicas": 3});
    assert_eq!(read(asks).unwrap(), ["max_replicas", "min_replicas", "node_selector"]);
    assert_eq!(read(json!({"model_name": "m", "min_replicas": 2, "max_replicas": 0})).unwrap(), ["min_replicas"]);
    let error = |document: Value| read(document).unwrap_err().field;
    assert_eq!(error(json!({"model_name": "m", "min_replicas": 3, "max_replicas": 2})), "min_replicas");
    assert_eq!(error(json!({"model_name": "m", "min_replicas": 1, "spread_all": true})), "spread_all");
}

#[test]
fn configured_policies_apply_where_the_api_sets_nothing() {
    let policies = ModelPolicies::default();
    let configured = ModelPolicy { min_prefix_match: Some(0.5), balance_abs_threshold: Some(4), ..Default::default() };
    policies.configure(PolicyMap::from([("m".into(), configured)]));
    assert_eq!(policies.of("m"), configured);
    let changed = change(&policies, &json!({"model_name": "m", "min_prefix_match": 0.1})).unwrap();
    assert_eq!((changed.min_prefix_match, changed.balance_abs_threshold), (Some(0.1), Some(4)));
    policies.configure(PolicyMap::new());
    assert_eq!(policies.of("m").balance_abs_threshold, None, "a reload replaces only its own layer");
    assert_eq!(policies.all()["m"].min_prefix_match, Some(0.1));
    policies.configure(PolicyMap::from([("m".into(), configured)]));
    assert!(policies.remove("m", 0));
    assert_eq!((policies.of("m"), policies.remove("m", 0)), (configured, false));
}
