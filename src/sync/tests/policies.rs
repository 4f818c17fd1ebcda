//! Policies of models that one picker's admin API changes.

use super::cluster::Cluster;
use crate::generated::v1;
use crate::wire::encode;
use crate::{HEARTBEAT_EVERY, MemoryBusSettings};
use attache_scheduling::policy::{MAX_MODELS, ModelPolicy, RoutePolicy};
use serde_json::json;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use v1::event::Kind;
use v1::message::Body;

const DELAY: Duration = Duration::from_millis(5);

fn cluster(pickers: usize) -> Cluster {
    let mut cluster = Cluster::new(pickers, MemoryBusSettings { delay: DELAY, ..MemoryBusSettings::default() });
    cluster.pass(2 * HEARTBEAT_EVERY);
    cluster
}

fn share(min_prefix_match: f64) -> ModelPolicy {
    ModelPolicy { min_prefix_match: Some(min_prefix_match), ..ModelPolicy::default() }
}

#[test]
fn policy_change_and_removal_reach_every_picker_at_once() {
    let mut cluster = cluster(3);
    cluster.change_policy(
        1,
        &json!({"model_name": "org/m", "route_policy": "round_robin", "balance_abs_threshold": 0,
                "balance_rel_threshold": 1.5, "min_prefix_match": 0}),
    );
    cluster.pass(2 * DELAY);
    let policy = ModelPolicy {
        route_policy: Some(RoutePolicy::RoundRobin),
        balance_abs_threshold: Some(0),
        balance_rel_threshold: Some(1.5),
        min_prefix_match: Some(0.0),
    };
    assert_eq!(cluster.policies(), vec![vec![("org/m".to_owned(), policy)]; 3]);
    // Another picker changes one field of what it has learned.
    cluster.change_policy(2, &json!({"model_name": "org/m", "route_policy": "prefix_cache"}));
    cluster.pass(2 * DELAY);
    let policy = ModelPolicy { route_policy: Some(RoutePolicy::PrefixCache), ..policy };
    assert_eq!(cluster.policies(), vec![vec![("org/m".to_owned(), policy)]; 3]);
    cluster.remove_policy(0, "org/m");
    cluster.pass(2 * DELAY);
    assert_eq!(cluster.policies(), vec![vec![]; 3]);
}

#[test]
fn picker_that_starts_later_learns_policies_also_those_of_a_picker_that_is_gone() {
    let mut cluster = cluster(3);
    for i in 1..MAX_MODELS {
        cluster.change_policy(2, &json!({"model_name": format!("m{i}"), "min_prefix_match": 0.25}));
    }
    cluster.change_policy(0, &json!({"model_name": "gone", "min_prefix_match": 0.5}));
    cluster.remove_policy(0, "gone");
    cluster.pass(2 * DELAY);
    cluster.bus.part(0, 2, true);
    cluster.bus.part(1, 2, true);
    cluster.restart(1);
    cluster.pass(3 * HEARTBEAT_EVERY);
    let all = cluster.policies();
    assert_eq!((all[1].len(), &all[1]), (MAX_MODELS - 1, &all[0]));
    // It has learned of the removal too: an older change of another picker does not bring the policy back.
    assert_eq!(cluster.members[1].policies.last_change("gone").map(|change| change.policy), Some(None));
}

#[test]
fn later_change_wins_over_partition_loss_and_restart() {
    let lossy = MemoryBusSettings { delay: DELAY, jitter: DELAY, loss: 0.3, duplicates: 0.2, seed: 3 };
    let mut cluster = Cluster::new(3, lossy);
    cluster.pass(2 * HEARTBEAT_EVERY);
    cluster.bus.part(0, 1, true);
    cluster.bus.part(0, 2, true);
    cluster.change_policy(0, &json!({"model_name": "m", "min_prefix_match": 0.1}));
    cluster.pass(Duration::from_secs(1));
    cluster.change_policy(1, &json!({"model_name": "m", "min_prefix_match": 0.2}));
    cluster.change_policy(2, &json!({"model_name": "other", "min_prefix_match": 0.3}));
    cluster.bus.part(0, 1, false);
    cluster.bus.part(0, 2, false);
    cluster.pass(Duration::from_secs(10));
    let wanted = vec![("m".to_owned(), share(0.2)), ("other".to_owned(), share(0.3))];
    assert_eq!(cluster.policies(), vec![wanted; 3]);
    // A picker that has just started knows no earlier change, and its own is still the last one.
    cluster.restart(0);
    cluster.change_policy(0, &json!({"model_name": "m", "min_prefix_match": 0.9}));
    cluster.pass(Duration::from_secs(10));
    let wanted = vec![("m".to_owned(), share(0.9)), ("other".to_owned(), share(0.3))];
    assert_eq!(cluster.policies(), vec![wanted; 3]);
}

#[test]
fn two_changes_at_one_moment_end_as_one_on_every_picker() {
    let mut cluster = cluster(3);
    cluster.change_policy(0, &json!({"model_name": "m", "min_prefix_match": 0.7}));
    cluster.change_policy(1, &json!({"model_name": "m", "min_prefix_match": 0.4}));
    cluster.pass(3 * HEARTBEAT_EVERY);
    assert_eq!(cluster.policies(), vec![vec![("m".to_owned(), share(0.7))]; 3]);
}

#[test]
fn invalid_policies_of_a_peer_are_refused_and_counted() {
    let mut cluster = cluster(2);
    let good = v1::Policy { model: "m".into(), number: 1, min_prefix_match: Some(0.5), ..v1::Policy::default() };
    let hour = cluster.members[0].replica.unix_ms(cluster.now) + 3_600_001;
    let bad = [
        v1::Policy { model: String::new(), ..good.clone() },
        v1::Policy { model: "x".repeat(257), ..good.clone() },
        v1::Policy { model: "a\nb".into(), ..good.clone() },
        v1::Policy { number: 0, ..good.clone() },
        v1::Policy { number: hour, ..good.clone() },
        v1::Policy { number: u64::MAX, removed: true, ..good.clone() },
        v1::Policy { min_prefix_match: Some(1.5), ..good.clone() },
        v1::Policy { min_prefix_match: Some(f64::NAN), ..good.clone() },
        v1::Policy { balance_rel_threshold: Some(0.5), ..good.clone() },
        v1::Policy { balance_rel_threshold: Some(f64::INFINITY), ..good.clone() },
    ];
    let send = |cluster: &mut Cluster, policies: Vec<v1::Policy>| {
        let event = |policy| v1::Event { kind: Some(Kind::Policy(policy)) };
        let batch = v1::Batch { number: 0, events: policies.into_iter().map(event).collect() };
        let sender = cluster.members[1].replica.sender();
        let message = encode(sender, None, Body::Batch(batch));
        cluster.members[0].replica.receive(Some(sender), &message, cluster.now);
        cluster.members[0].replica.stats().refused_policies.load(Relaxed)
    };
    let refused = bad.len() as u64;
    assert_eq!(send(&mut cluster, bad.to_vec()), refused);
    assert_eq!(cluster.policies()[0], []);
    assert_eq!(send(&mut cluster, vec![good.clone()]), refused);
    assert_eq!(cluster.policies()[0], [("m".to_owned(), share(0.5))]);
    // As many models as the admin API takes, and removals are bounded as well.
    let many = |removed, from: usize| {
        (from..from + MAX_MODELS)
            .map(|i| v1::Policy { model: format!("m{i}"), number: 2, removed, ..good.clone() })
            .collect()
    };
    let _ = send(&mut cluster, many(false, 0));
    cluster.pass(Duration::from_secs(1));
    assert_eq!(cluster.policies()[0].len(), MAX_MODELS);
    let _ = send(&mut cluster, many(true, MAX_MODELS));
    let _ = send(&mut cluster, many(true, 2 * MAX_MODELS));
    assert_eq!(cluster.policies()[0].len(), MAX_MODELS);
    assert_eq!(cluster.members[0].policies.last_changes().len(), 2 * MAX_MODELS);
}
