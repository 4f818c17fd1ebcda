use crate::tests::registry;
use attache_pool::Endpoint;
use attache_scheduling::plugin::{Picker, Plugin};
use attache_scheduling::testing::{NOW, STALE_AFTER, snapshot};
use attache_scheduling::{Candidate, Ranking, SecondBest};
use attache_types::rng::for_request;
use serde_json::{Value, json};
use std::sync::Arc;

fn picker(name: &str, parameters: &Value) -> Arc<dyn Picker> {
    match (registry().plugin(name).unwrap().build)(parameters).unwrap() {
        Plugin::Picker(picker) => picker,
        other => panic!("{name} is {other:?}"),
    }
}

fn picks(picker: &dyn Picker, sums: &[f32], wanted: usize, seed: u64) -> Vec<u32> {
    let loads: Vec<(u32, u32)> = (0..sums.len()).map(|i| (u32::try_from(i).unwrap(), 0)).collect();
    let pool = snapshot(&loads);
    let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let mut ranking = Ranking::new(wanted);
    picker.pick(sums, &candidates, &mut for_request(seed, 0), &mut ranking);
    ranking.decide().unwrap().picks.iter().map(|e| e.id.0).collect()
}

/// Share of each candidate among the first picks, over 20,000 seeds.
fn shares(name: &str, sums: &[f32]) -> Vec<f64> {
    let picker = picker(name, &Value::Null);
    let mut counts = vec![0.0; sums.len()];
    for seed in 0..20_000 {
        counts[picks(&*picker, sums, 1, seed)[0] as usize] += 1.0 / 20_000.0;
    }
    counts
}

fn near(got: &[f64], expected: &[f64]) -> bool {
    // Four standard deviations of a share of one half among 20,000.
    got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 0.015)
}

#[test]
fn greatest_sum_wins_and_ties_are_random() {
    let max = picker("max-score-picker", &Value::Null);
    assert_eq!(picks(&*max, &[0.1, 3.5, 0.0, 2.0], 4, 0), [1, 3, 0, 2]);
    assert_eq!(picks(&*max, &[0.1, 3.5, 0.0, 2.0], 1, 0), [1]);
    assert_eq!(picks(&*max, &[1e-30, 0.0, f32::MAX], 3, 0), [2, 0, 1]);
    let got = shares("max-score-picker", &[2.0, 1.0, 2.0, 2.0]);
    assert!(near(&got, &[1.0 / 3.0, 0.0, 1.0 / 3.0, 1.0 / 3.0]), "{got:?}");
}

#[test]
fn second_greatest_sum_and_its_distance_are_recorded() {
    for (sums, margin) in [(&[0.25, 3.5, 0.0, 2.0][..], 1.5), (&[2.0, 1.0, 2.0], 0.0), (&[1.0, 3.0], 2.0)] {
        for (wanted, seed) in (1..4).flat_map(|wanted| [(wanted, 1), (wanted, 2), (wanted, 3)]) {
            let snapshot = snapshot(&(0..).zip(sums).map(|(id, _)| (id, 0)).collect::<Vec<_>>());
            let candidates: Vec<_> =
                snapshot.endpoints.iter().map(|state| Candidate::new(state, NOW, STALE_AFTER, 0)).collect();
            for (name, decides) in [("max-score-picker", true), ("random-picker", false)] {
                let mut ranking = Ranking::new(wanted);
                picker(name, &Value::Null).pick(sums, &candidates, &mut for_request(seed, 0), &mut ranking);
                let decision = ranking.decide().unwrap();
                let second = decision.second.as_ref();
                assert_eq!(second.map(|second| second.margin), decides.then_some(margin), "{name} {sums:?} {wanted}");
                let of = |endpoint: &Endpoint| sums[endpoint.id.0 as usize];
                let is_second = |next: &SecondBest| of(&decision.picks[0]) - of(&next.endpoint) == margin as f32;
                assert!(second.is_none_or(is_second), "{sums:?} {wanted}");
            }
        }
    }
    assert_eq!(picks(&*picker("max-score-picker", &Value::Null), &[1.0], 1, 0), [0], "no second one");
}

#[test]
fn random_ignores_the_sums() {
    let got = shares("random-picker", &[0.0, 100.0, 1.0, 2.0]);
    assert!(near(&got, &[0.25; 4]), "{got:?}");
}

#[test]
fn weighted_random_picks_in_proportion_to_sums() {
    for (sums, expected) in [
        (vec![3.0, 1.0], vec![0.75, 0.25]),
        (vec![1e-6, 3e-6], vec![0.25, 0.75]),
        (vec![0.0, 0.5], vec![0.0, 1.0]),
        (vec![0.0, 0.0, 0.0, 0.0], vec![0.25; 4]),
        (vec![1.0, 2.0, 3.0, 4.0], vec![0.1, 0.2, 0.3, 0.4]),
    ] {
        let got = shares("weighted-random-picker", &sums);
        assert!(near(&got, &expected), "{sums:?}: {got:?}");
    }
    // The second is drawn among the rest in proportion: after 0 (2 of 4), 1 and 2 have equal probability.
    let picker = picker("weighted-random-picker", &Value::Null);
    let pairs: Vec<Vec<u32>> = (0..20_000).map(|seed| picks(&*picker, &[2.0, 1.0, 1.0], 2, seed)).collect();
    let after = |first, second| pairs.iter().filter(|p| p[..] == [first, second]).count() as f64 / 20_000.0;
    assert!(near(&[after(0, 1), after(0, 2), after(1, 0)], &[0.25, 0.25, 1.0 / 6.0]));
}

#[test]
fn max_num_of_endpoints_only_lowers_the_number() {
    for name in ["max-score-picker", "random-picker", "weighted-random-picker"] {
        for (most, wanted, expected) in [(1, 4, 1), (2, 4, 2), (9, 4, 4), (2, 1, 1), (9, 9, 5)] {
            let picker = picker(name, &json!({"maxNumOfEndpoints": most}));
            assert_eq!(picks(&*picker, &[1.0; 5], wanted, 1).len(), expected, "{name} {most} {wanted}");
        }
        let error = (registry().plugin(name).unwrap().build)(&json!({"maxNumOfEndpoints": 0})).unwrap_err();
        assert!(error.to_string().contains("at least 1"), "{name}: {error}");
    }
}
