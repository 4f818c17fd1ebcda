//! AIBrix's own cases: cached prefixes, requests, and the pick.

use super::*;
use attache_pool::EndpointState;
use attache_pool::ledger::Ticket;
use attache_scheduling::Registry;
use attache_scheduling::candidates::Cached;
use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_types::rng::for_request;
use std::collections::BTreeSet;

/// The endpoints (from 1) that are picked over many draws when these have `counts` requests and have `percent` of the
/// prompt cached.
fn picked(params: serde_json::Value, counts: &[u32], percent: &[u32]) -> BTreeSet<u32> {
    let strategy = (PLUGIN.build)(&params, &Registry::default()).unwrap();
    // With `compat`, reported requests must not count: the busiest endpoint reports none, all others many.
    let is_compat = params["compat"] == true;
    let most = counts.iter().copied().max().unwrap_or(0);
    let reported = |count: u32| if is_compat { (most - count) * 3 } else { count };
    let loads: Vec<(u32, u32)> = (1..).zip(counts.iter().map(|count| reported(*count))).collect();
    let snapshot = snapshot(&loads);
    let own = |(state, count): (&EndpointState, &u32)| {
        let sent = if is_compat { *count } else { 0 };
        (0..sent).map(|_| Ticket::book(state.endpoint.clone(), 0)).collect::<Vec<_>>()
    };
    let _sent: Vec<_> = snapshot.endpoints.iter().zip(counts).map(own).collect();
    let mut cx = context(&snapshot);
    cx.request.prompt_tokens = 100;
    let hold = |(s, percent): (_, &u32)| Candidate {
        cached: Cached { gpu: *percent, any: *percent, in_use: 0 },
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

/// The same, for parameters whose result `compat` must not change.
fn both(params: &serde_json::Value, counts: &[u32], percent: &[u32]) -> BTreeSet<u32> {
    let mut compat = params.clone();
    compat["compat"] = true.into();
    let (plain, exact) = (picked(params.clone(), counts, percent), picked(compat, counts, percent));
    assert_eq!(plain, exact, "{counts:?} {percent:?}");
    exact
}

/// With the defaults of AIBrix's code, which its tests use.
fn coded(counts: &[u32], percent: &[u32]) -> BTreeSet<u32> {
    both(&serde_json::json!({"imbalance": 8, "deviations": 1}), counts, percent)
}

#[test]
fn longest_match_below_the_bound_wins_and_load_breaks_ties() {
    assert_eq!(coded(&[1, 2, 3, 4], &[50, 60, 0, 0]), [2].into(), "aibrix 10.4");
    assert_eq!(coded(&[1, 2, 3, 4], &[50, 50, 50, 0]), [1].into(), "aibrix 10.4");
    assert_eq!(coded(&[1, 1, 1, 4], &[50, 50, 50, 50]), [1, 2, 3].into(), "aibrix 10.4");
    assert_eq!(coded(&[0, 0, 0, 0], &[0, 0, 0, 0]), [1, 2, 3, 4].into(), "aibrix 10.5, step 1");
    assert_eq!(coded(&[0, 0, 1, 2], &[0, 0, 0, 100]), [1, 2].into(), "aibrix 10.5, step 4: above mean and deviation");
    assert_eq!(coded(&[0, 0, 1, 2], &[100, 0, 0, 33]), [1].into(), "aibrix 10.5, step 5");
    assert_eq!(coded(&[7], &[100]), [1].into(), "one endpoint has no deviation");
}

#[test]
fn holder_above_mean_plus_deviation_is_passed_over() {
    let wide = |deviations: f64| serde_json::json!({"imbalance": 1000, "deviations": deviations});
    assert_eq!(
        coded(&[4, 1, 1, 0], &[100, 0, 0, 0]),
        [4].into(),
        "aibrix 10.4: none of the holders, the fewest requests"
    );
    assert_eq!(both(&wide(1.0), &[1, 10, 1, 4], &[50, 100, 0, 0]), [1].into(), "aibrix 10.4");
    assert_eq!(both(&wide(5.0), &[11, 10, 12], &[100, 90, 80]), [1].into(), "aibrix 10.4");
    assert_eq!(both(&wide(1.0), &[100, 10, 12], &[100, 80, 60]), [2].into(), "aibrix 10.4");
    assert_eq!(both(&wide(1.0), &[20, 10, 30], &[50, 50, 50]), [2].into(), "aibrix 10.4");
    assert_eq!(both(&wide(-10.0), &[11, 10, 12], &[100, 90, 80]), [2].into(), "aibrix 10.4: none is below");
}

#[test]
fn under_imbalance_only_the_least_loaded_count() {
    assert_eq!(coded(&[1, 1, 10, 10], &[90, 90, 90, 90]), [1, 2].into(), "aibrix 10.5 under imbalance");
    for (counts, expected) in [
        (&[1, 2, 3, 9][..], &[4][..]),
        (&[2, 2, 8, 16], &[1, 2]),
        (&[0, 8], &[2]),
        (&[0, 9], &[1]),
        (&[0, 10, 20], &[1]),
    ] {
        // Only the last one holds anything, and only the imbalance keeps it from being picked.
        let held: Vec<u32> = counts.iter().map(|c| if c == counts.last().unwrap() { 100 } else { 0 }).collect();
        let params = serde_json::json!({"imbalance": 8, "deviations": 100});
        assert_eq!(both(&params, counts, &held), expected.iter().copied().collect(), "aibrix 10.4: {counts:?}");
    }
    let zero = serde_json::json!({"imbalance": 0, "deviations": 100});
    assert_eq!(both(&zero, &[5, 10, 15], &[0, 0, 100]), [1].into(), "aibrix 10.4: an imbalance of 0");
}

/// The two defaults of AIBrix's manifest.
#[test]
fn defaults_are_those_of_aibrixs_manifest() {
    let plain = |counts: &[u32], percent: &[u32]| both(&serde_json::json!({}), counts, percent);
    assert_eq!(plain(&[0, 16], &[0, 100]), [2].into(), "aibrix 0: 16 is not above 16, and below 8 + 2 x 11.3");
    assert_eq!(plain(&[0, 17], &[0, 100]), [1].into(), "aibrix 0");
    assert_eq!(plain(&[4, 1, 1, 0], &[100, 0, 0, 0]), [1].into(), "aibrix 0: 4 is below 1.5 + 2 x 1.7");
    assert_eq!(plain(&[9, 1, 1, 0, 1, 1], &[100, 0, 0, 0, 0, 0]), [4].into(), "aibrix 0: 9 is above 2.2 + 2 x 3.4");
}

/// AIBrix release 0.4 and its documentation: under imbalance, prefixes are ignored.
#[test]
fn compat_ignores_prefixes_under_imbalance() {
    let params = |compat: bool| serde_json::json!({"imbalance": 8, "deviations": 100, "compat": compat});
    for (compat, expected) in [(false, &[2][..]), (true, &[1, 2])] {
        let got = picked(params(compat), &[1, 1, 20], &[0, 90, 100]);
        assert_eq!(got, expected.iter().copied().collect(), "compat: {compat}");
    }
}

/// The example in AIBrix's documentation: 1, 2 and 20 requests, and a limit of 16.
#[test]
fn documented_imbalance_goes_to_the_least_loaded() {
    assert_eq!(both(&serde_json::json!({}), &[1, 2, 20], &[0, 100, 100]), [1].into());
}

#[test]
fn scores_are_cached_percentages_and_none_without_a_lookup() {
    let strategy = (PLUGIN.build)(&serde_json::Value::Null, &Registry::default()).unwrap();
    let snapshot = snapshot(&[(0, 0), (1, 0)]);
    let candidates: Vec<_> = snapshot.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let mut scores = [0.0; 2];
    assert_eq!(strategy.scores(&context(&snapshot), &candidates, &mut scores), Some(Better::Higher));
    assert!(scores.iter().all(|s| s.is_nan()));
    let mut ranking = Ranking::new(1);
    strategy.rank(&context(&snapshot), &candidates, &mut for_request(0, 0), &mut ranking);
    assert_eq!(ranking.decide().unwrap().lacking, Some(Signal::Prefix));
}

#[test]
fn parameters_are_checked() {
    for (bad, word) in [(r#"{"imbalance": -1}"#, "-1"), (r#"{"deviation": 1}"#, "deviation")] {
        let error = (PLUGIN.build)(&serde_json::from_str(bad).unwrap(), &Registry::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{bad}: {error}");
    }
}
