//! AIBrix's own cases: who holds what, who has how much to do, and who is picked.

use super::*;
use crate::rng::for_request;
use crate::scheduling::candidates::Cached;
use crate::scheduling::tests::{NOW, STALE_AFTER, context, snapshot};
use std::collections::BTreeSet;

/// The endpoints (from 1) that are picked over many draws when these have `counts` requests and hold `percent` of the prompt.
fn picked(params: serde_json::Value, counts: &[u32], percent: &[u32]) -> BTreeSet<u32> {
    let strategy = (PLUGIN.build)(&params).unwrap();
    let loads: Vec<(u32, u32)> = (1..).zip(counts.iter().copied()).collect();
    let snapshot = snapshot(&loads);
    let mut cx = context(&snapshot);
    cx.request.prompt_tokens = 100;
    let hold = |(s, percent): (_, &u32)| Candidate {
        cached: Cached { gpu: *percent, any: *percent },
        ..Candidate::new(s, NOW, STALE_AFTER, 0)
    };
    let candidates: Vec<_> = snapshot.endpoints.iter().zip(percent).map(hold).collect();
    let draw = |seed| {
        let mut ranking = Ranking::new(1);
        strategy.rank(&cx, &candidates, &mut for_request(seed, 0), &mut ranking);
        ranking.decide().unwrap().picks[0].id.0
    };
    (0..100).map(draw).collect()
}

fn plain(counts: &[u32], percent: &[u32]) -> BTreeSet<u32> {
    picked(serde_json::Value::Null, counts, percent)
}

#[test]
fn the_longest_match_below_the_bound_wins_and_load_breaks_ties() {
    assert_eq!(plain(&[1, 2, 3, 4], &[50, 60, 0, 0]), [2].into());
    assert_eq!(plain(&[1, 2, 3, 4], &[50, 50, 50, 0]), [1].into());
    assert_eq!(plain(&[1, 1, 1, 4], &[50, 50, 50, 50]), [1, 2, 3].into());
    assert_eq!(plain(&[0, 0, 0, 0], &[0, 0, 0, 0]), [1, 2, 3, 4].into());
}

#[test]
fn a_holder_above_mean_plus_deviation_is_passed_over() {
    assert_eq!(plain(&[4, 1, 1, 0], &[100, 0, 0, 0]), [4].into(), "nobody else holds it: the fewest requests");
    let wide = serde_json::json!({"imbalance": 1000, "deviations": 5});
    assert_eq!(picked(wide, &[11, 10, 12], &[100, 90, 80]), [1].into());
    let wide = serde_json::json!({"imbalance": 1000});
    assert_eq!(picked(wide.clone(), &[100, 10, 12], &[100, 80, 60]), [2].into());
    assert_eq!(picked(wide, &[20, 10, 30], &[50, 50, 50]), [2].into());
    let none = serde_json::json!({"imbalance": 1000, "deviations": -10});
    assert_eq!(picked(none, &[11, 10, 12], &[100, 90, 80]), [2].into(), "nobody is below: the fewest requests");
}

#[test]
fn when_load_differs_much_only_the_idle_count() {
    assert_eq!(plain(&[1, 1, 10, 10], &[90, 90, 90, 90]), [1, 2].into());
    assert_eq!(plain(&[0, 9], &[0, 100]), [1].into());
    assert_eq!(plain(&[0, 8], &[0, 100]), [2].into(), "8 is not above 8, and below 4 + 5.7");
}

#[test]
fn parameters_are_checked() {
    for (bad, word) in [(r#"{"imbalance": -1}"#, "-1"), (r#"{"deviation": 1}"#, "deviation")] {
        let error = (PLUGIN.build)(&serde_json::from_str(bad).unwrap()).unwrap_err();
        assert!(error.0.contains(word), "{bad}: {error}");
    }
}
