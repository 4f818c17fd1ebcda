//! Rules that every strategy keeps, and the guarantees of each one.

mod decisions;
mod pairs;
mod sums;

use attache_pool::{Endpoint, PoolSnapshot};
use attache_scheduling::plugin::Better;
use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_scheduling::{Candidate, Ranking, Registry, Strategy};
use attache_types::rng::for_request;
use proptest::prelude::{Strategy as _, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The strategies of this crate and the `pipeline`.
pub(crate) fn registry() -> Registry {
    Registry::new(&[crate::PLUGINS, attache_pipeline::PLUGINS])
}

fn build(name: &str) -> Box<dyn Strategy> {
    registry().build(name, &Value::Null).unwrap()
}

fn candidates(snapshot: &PoolSnapshot) -> Vec<Candidate<'_>> {
    snapshot.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect()
}

fn pick(
    strategy: &dyn Strategy,
    snapshot: &PoolSnapshot,
    candidates: &[Candidate<'_>],
    wanted: usize,
    seed: u64,
) -> Vec<u32> {
    let mut ranking = Ranking::new(wanted);
    strategy.rank(&context(snapshot), candidates, &mut for_request(seed, 0), &mut ranking);
    ranking.decide().unwrap().picks.iter().map(|e| e.id.0).collect()
}

fn pools() -> impl proptest::strategy::Strategy<Value = Vec<(u32, u32)>> {
    prop::collection::btree_map(0u32..500, prop_oneof![0u32..4, any::<u32>()], 1..40)
        .prop_map(|loads| loads.into_iter().collect::<Vec<_>>())
        .prop_shuffle()
}

proptest! {
    #[test]
    fn strategies_pick_distinct_candidates_as_many_as_wanted(
        loads in pools(), wanted in 0usize..8, seed in any::<u64>(), reversed in any::<bool>(),
    ) {
        let snapshot = snapshot(&loads);
        let mut candidates = candidates(&snapshot);
        if reversed {
            candidates.reverse();
        }
        for plugin in registry().strategies() {
            let strategy = build(plugin.name);
            for round in 0..3 {
                let picks = pick(&*strategy, &snapshot, &candidates, wanted, seed + round);
                prop_assert_eq!(picks.len(), wanted.max(1).min(loads.len()), "{}", plugin.name);
                let distinct: BTreeSet<u32> = picks.iter().copied().collect();
                prop_assert_eq!(distinct.len(), picks.len(), "{}", plugin.name);
                prop_assert!(picks.iter().all(|id| loads.iter().any(|(known, _)| known == id)), "{}", plugin.name);
            }
        }
    }

    #[test]
    fn least_request_and_its_fallbacks_are_exact_and_ordered(
        loads in pools(), wanted in 1usize..8, seed in any::<u64>(),
    ) {
        let snapshot = snapshot(&loads);
        let by_id: BTreeMap<u32, u32> = loads.iter().copied().collect();
        let picks = pick(&*build("least-request"), &snapshot, &candidates(&snapshot), wanted, seed);
        let got: Vec<u32> = picks.iter().map(|id| by_id[id]).collect();
        let mut best: Vec<u32> = by_id.values().copied().collect();
        best.sort_unstable();
        best.truncate(wanted);
        prop_assert_eq!(got, best);
    }

    /// The second best endpoint follows the first pick in the order of scores, whether fallbacks are wanted or not.
    #[test]
    fn second_best_endpoint_and_its_margin_follow_from_the_scores(
        loads in pools(), wanted in 1usize..4, seed in any::<u64>(),
    ) {
        let snapshot = snapshot(&loads);
        let candidates = candidates(&snapshot);
        let cx = context(&snapshot);
        for (name, in_seconds) in [("least-request", false), ("least-kv-cache", false), ("predicted-latency", true)] {
            let strategy = build(name);
            let mut ranking = Ranking::new(wanted);
            strategy.rank(&cx, &candidates, &mut for_request(seed, 0), &mut ranking);
            let decision = ranking.decide().unwrap();
            let mut scores = vec![f64::NAN; candidates.len()];
            let better = strategy.scores(&cx, &candidates, &mut scores).unwrap();
            let mut sorted = scores.clone();
            sorted.sort_by(|a, b| if better == Better::Higher { b.total_cmp(a) } else { a.total_cmp(b) });
            let Some(second) = &decision.second else {
                prop_assert!(candidates.len() == 1 || scores.iter().any(|s| s.is_nan()), "{name}: {scores:?}");
                continue;
            };
            let score = |of: &Endpoint| candidates.iter().zip(&scores).find(|(c, _)| c.id == of.id).unwrap().1;
            prop_assert_eq!([*score(&decision.picks[0]), *score(&second.endpoint)], [sorted[0], sorted[1]], "{}", name);
            prop_assert_eq!(second.margin, (sorted[1] - sorted[0]).abs(), "{}", name);
            prop_assert!(decision.picks.get(1).is_none_or(|next| next.id == second.endpoint.id), "{name}");
            prop_assert_eq!(second.in_seconds, in_seconds, "{}", name);
        }
        for name in ["random", "round-robin", "power-of-two"] {
            let mut ranking = Ranking::new(wanted);
            build(name).rank(&cx, &candidates, &mut for_request(seed, 0), &mut ranking);
            prop_assert!(ranking.decide().unwrap().second.is_none(), "{name}");
        }
    }

    /// Only the ids of candidates matter, not their order. Exact for strategies that are deterministic or random only
    /// in ties.
    #[test]
    fn order_of_candidates_has_no_effect(
        loads in pools(), wanted in 1usize..8, turns in 1usize..5, seed in any::<u64>(),
    ) {
        // Without ties, so that the random draw of least-request has no effect.
        let loads: Vec<(u32, u32)> = loads.iter().zip(0..).map(|((id, _), load)| (*id, load)).collect();
        let snapshot = snapshot(&loads);
        let forwards = candidates(&snapshot);
        let backwards: Vec<Candidate<'_>> = forwards.iter().rev().copied().collect();
        for name in ["least-request", "round-robin"] {
            let (a, b) = (build(name), build(name));
            for _ in 0..turns {
                let a = pick(&*a, &snapshot, &forwards, wanted, seed);
                let b = pick(&*b, &snapshot, &backwards, wanted, seed);
                prop_assert_eq!(a, b, "{}", name);
            }
        }
    }

    #[test]
    fn power_of_two_never_takes_the_worse_of_two(loads in pools(), seed in any::<u64>()) {
        let snapshot = snapshot(&loads);
        let by_id: BTreeMap<u32, u32> = loads.iter().copied().collect();
        let picks = pick(&*build("power-of-two"), &snapshot, &candidates(&snapshot), 2, seed);
        if let [first, second] = picks[..] {
            prop_assert!(by_id[&first] <= by_id[&second]);
        }
    }

    /// When endpoints join and leave, each one that stays is served regularly. It waits at most as many picks as
    /// there are endpoints, plus the new ones.
    #[test]
    fn round_robin_is_fair_under_churn(
        churn in prop::collection::vec(prop::collection::btree_set(1u32..30, 1..12), 1..40),
    ) {
        let strategy = build("round-robin");
        let mut last_turn = BTreeMap::new();
        for (turn, members) in (0usize..).zip(&churn) {
            // Endpoint 0 is always present.
            let loads: Vec<(u32, u32)> = members.iter().chain([&0]).map(|id| (*id, 0)).collect();
            let snapshot = snapshot(&loads);
            let id = pick(&*strategy, &snapshot, &candidates(&snapshot), 1, 0)[0];
            last_turn.insert(id, turn);
            // The cursor passes every id at most once before it reaches 0 again.
            let waited = turn - last_turn.get(&0).copied().unwrap_or(0);
            prop_assert!(waited < 30, "endpoint 0 waited {} turns", waited);
        }
    }
}

#[test]
fn round_robin_visits_all_endpoints_and_skips_none_when_one_leaves() {
    let strategy = build("round-robin");
    let all = snapshot(&[(0, 0), (3, 0), (5, 0), (9, 0)]);
    let turns = |pool: &PoolSnapshot, n: usize| -> Vec<u32> {
        (0..n).map(|_| pick(&*strategy, pool, &candidates(pool), 1, 0)[0]).collect()
    };
    assert_eq!(turns(&all, 6), [0, 3, 5, 9, 0, 3]);
    let without_3 = snapshot(&[(0, 0), (5, 0), (9, 0)]);
    assert_eq!(turns(&without_3, 2), [5, 9], "the one after the one that left is not skipped");
    assert_eq!(turns(&snapshot(&[(0, 0), (5, 0), (9, 0), (11, 0)]), 3), [11, 0, 5], "an endpoint added last is next");
    assert_eq!(pick(&*strategy, &all, &candidates(&all), 3, 0), [9, 0, 3], "fallbacks are the next in rotation");
}

#[test]
fn round_robin_shares_turns_between_threads_without_loss() {
    let strategy = build("round-robin");
    let pool = snapshot(&[(0, 0), (1, 0), (2, 0), (3, 0)]);
    let counts: [std::sync::atomic::AtomicU32; 4] = Default::default();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..1_000 {
                    let id = pick(&*strategy, &pool, &candidates(&pool), 1, 0)[0];
                    counts[id as usize].fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(counts.map(|c| c.into_inner()), [1_000; 4]);
}

/// Chi-square statistic over `n` cells of equal probability.
fn chi_square(counts: &[u32]) -> f64 {
    let expected = f64::from(counts.iter().sum::<u32>()) / counts.len() as f64;
    counts.iter().map(|c| (f64::from(*c) - expected).powi(2) / expected).sum()
}

/// First picks over 20,000 seeds, counted by endpoint.
fn firsts(name: &str, loads: &[(u32, u32)]) -> Vec<u32> {
    let (strategy, pool) = (build(name), snapshot(loads));
    let mut counts = vec![0; loads.len()];
    for seed in 0..20_000 {
        counts[pick(&*strategy, &pool, &candidates(&pool), 1, seed)[0] as usize] += 1;
    }
    counts
}

#[test]
fn random_is_uniform_and_ties_are_drawn_evenly() {
    let equal: Vec<(u32, u32)> = (0..10).map(|id| (id, 7)).collect();
    for name in ["random", "least-request", "power-of-two"] {
        // 9 degrees of freedom: a chance of 1 in 1,000 to exceed 27.9. The seeds are fixed, so the result never
        // changes.
        let chi = chi_square(&firsts(name, &equal));
        assert!(chi < 27.9, "{name}: {chi}");
    }
    let unequal: Vec<(u32, u32)> = (0..10).map(|id| (id, id)).collect();
    let chi = chi_square(&firsts("random", &unequal));
    assert!(chi < 27.9, "load does not matter to random: {chi}");
}

#[test]
fn power_of_two_shares_follow_from_the_pairs() {
    // Of n endpoints with different loads, the k-th best wins 2(n-k) of n(n-1) ordered pairs.
    let counts = firsts("power-of-two", &[(0, 1), (1, 2), (2, 3), (3, 4)]);
    for (k, count) in (1u32..).zip(counts) {
        let expected = 20_000.0 * f64::from(2 * (4 - k)) / 12.0;
        assert!((f64::from(count) - expected).abs() < 300.0, "{k}: {count} of {expected}");
    }
}

#[test]
fn registry_is_consistent() {
    let registry = registry();
    assert!(crate::PLUGINS.strategies.is_sorted_by_key(|d| d.name), "the list is by name");
    for plugin in registry.strategies() {
        assert!(plugin.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'-'), "{}", plugin.name);
        assert!(!plugin.summary.is_empty() && !plugin.source.is_empty(), "{}", plugin.name);
        assert!((plugin.build)(&serde_json::json!({}), &registry).is_ok(), "{}", plugin.name);
        let error = (plugin.build)(&serde_json::json!({"wieght": 1}), &registry).unwrap_err();
        assert!(error.to_string().contains("wieght"), "{}: {error}", plugin.name);
    }
    assert!(registry.strategy("no-such").is_none());
}

#[test]
fn strategies_that_need_a_queue_are_known_as_such() {
    let queued = [crate::vtc_queue::FAIR, crate::vtc_queue::MAX_FAIR, crate::vtc_queue::PRED].map(|d| d.name);
    assert_eq!(attache_scheduling::registry::QUEUED, queued);
}
