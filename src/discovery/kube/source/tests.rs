//! Unit tests of `source.rs`.

use super::*;
use attache_scheduling::router::{MissingTarget, ModelRewrites, RewriteTarget};
use attache_types::clock::Timestamp;

#[test]
fn denied_target_outlives_older_status_of_available_targets() {
    let exact = [("m".to_owned(), vec![RewriteTarget { model: "v1".into(), weight: 1 }])].into();
    let rewrites = ModelRewrites { exact, any: Vec::new() };
    let store = RuleStore::default();
    store.store(PoolRules { rewrites, priorities: [("m".to_owned(), 0)].into(), ..PoolRules::default() });
    let v1 = || vec![MissingTarget { model: "m".into(), target: "v1".into() }];
    let said = |fingerprint: &str, are_missing| TargetStatus {
        uid: "u".into(),
        fingerprint: fingerprint.into(),
        targets: v1(),
        are_missing,
    };
    let mut before = HashMap::new();
    store.target_missing("m", "v1", Timestamp::default());
    apply_target_statuses(&mut before, vec![said("True 1", false)], &store);
    assert_eq!(store.missing(), v1(), "the status may be older than the denial");
    apply_target_statuses(&mut before, vec![said("False 2", true)], &store);
    apply_target_statuses(&mut before, vec![said("True 3", false)], &store);
    assert_eq!(store.missing(), [], "another replica saw the target served");
    store.target_missing("m", "v1", Timestamp::default());
    apply_target_statuses(&mut before, vec![said("True 3", false)], &store);
    assert_eq!(store.missing(), v1(), "the same status again");
    apply_target_statuses(&mut before, Vec::new(), &store);
    assert!(before.is_empty(), "the object was deleted");
}
