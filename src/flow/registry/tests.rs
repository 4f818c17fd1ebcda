//! Checks of every registered policy.

use super::*;
use serde_json::json;
use std::collections::BTreeSet;

fn check<P: ?Sized + std::fmt::Debug>(policies: &[&'static PolicyDescriptor<P>], needs: &[(&str, Value)]) {
    let mut names = BTreeSet::new();
    for policy in policies {
        for name in [policy.name].iter().chain(policy.aliases) {
            assert!(names.insert(*name), "{name} twice");
            assert!(name.chars().all(|c| c.is_ascii_lowercase() || c == '-'), "{name}");
            assert_eq!(find(policies, name).map(|p| p.name), Some(policy.name));
        }
        assert!(policy.summary.ends_with('.') && !policy.source.is_empty(), "{}", policy.name);
        let parameters = needs.iter().find(|(name, _)| *name == policy.name).map_or(Value::Null, |(_, p)| p.clone());
        let built = (policy.build)(&parameters);
        assert!(built.is_ok(), "{}: {built:?}", policy.name);
        let error = (policy.build)(&json!({"noSuchParameter": 1})).unwrap_err().to_string();
        assert!(error.contains("noSuchParameter"), "{}: {error}", policy.name);
    }
    assert!(policies.is_sorted_by_key(|p| p.name), "in the order of their names");
    assert!(find(policies, "nobody").is_none());
}

#[test]
fn every_policy_has_unique_name_and_valid_defaults() {
    check(FAIRNESS, &[]);
    check(ORDERINGS, &[]);
    check(CEILINGS, &[("priority-holdback-policy", json!({"minCeiling": 0.5}))]);
    check(DETECTORS, &[]);
    check(ADMITTERS, &[]);
}
