//! AIBrix's cases of `vtc-basic`, with its own formula and with Attaché's.

use super::*;
use attache_pool::{EndpointMetrics, EndpointState, PoolSnapshot};
use attache_scheduling::Registry;
use attache_scheduling::plugin::Headers;
use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_types::rng::for_request;
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

fn build(value: &Value) -> VtcBasic {
    params::<Params>(value).unwrap().build().unwrap()
}

fn user(name: &str) -> BTreeMap<String, String> {
    [("user".to_owned(), name.to_owned())].into()
}

/// A pool of endpoints 1, 2, … with these running requests.
fn running(counts: &[u32]) -> PoolSnapshot {
    let mut pool = snapshot(&(1..).zip(counts.iter().map(|_| 0)).collect::<Vec<_>>());
    for (state, running) in pool.endpoints.iter_mut().zip(counts) {
        let page = EndpointMetrics { scraped_at: NOW, running: *running, ..EndpointMetrics::default() };
        *state = EndpointState::new(state.endpoint.clone(), Some(Arc::new(page)));
    }
    pool
}

fn picks(strategy: &VtcBasic, pool: &PoolSnapshot, headers: &BTreeMap<String, String>) -> BTreeSet<u32> {
    let mut cx = context(pool);
    cx.request.headers = Headers::of(headers);
    let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let backwards: Vec<_> = candidates.iter().rev().copied().collect();
    let draw = |seed: u64| {
        let mut ranking = Ranking::new(1);
        let order = if seed.is_multiple_of(2) { &candidates } else { &backwards };
        strategy.rank(&cx, order, &mut for_request(seed, 0), &mut ranking);
        ranking.decide().unwrap().picks[0].id.0
    };
    (0..60).map(draw).collect()
}

/// Records `served` weighted tokens for `name`.
fn serve(strategy: &VtcBasic, name: &str, served: u64) {
    strategy.tracker.lock().add(name_hash(name), served, NOW);
}

#[test]
fn request_costs_as_in_aibrix() {
    for (row, value, max_tokens, cost) in [
        ("aibrix 10.8, weights 1 and 1", json!({"inputTokenWeight": 1, "outputTokenWeight": 1}), None, 8),
        ("aibrix 10.8, defaults", Value::Null, None, 13),
        ("ours: no more than the request allows", Value::Null, Some(2), 7),
        ("aibrix guesses all the same", json!({"compat": true}), Some(2), 13),
    ] {
        let strategy = build(&value);
        let (pool, headers) = (running(&[0, 0]), user("a"));
        let mut cx = context(&pool);
        cx.request.headers = Headers::of(&headers);
        // "test message", 12 bytes.
        cx.request.prompt_tokens = 3;
        cx.request.max_tokens = max_tokens;
        strategy.picked(&cx, &pool.endpoints[0].endpoint);
        assert_eq!(strategy.usage("a", NOW).served, cost, "{row}");
    }
}

#[test]
fn compat_sends_a_lone_user_where_aibrix_does() {
    for (row, value, loads, served) in [
        ("aibrix 10.8: 2250 tokens", json!({"compat": true}), [80, 40, 10], 2_250),
        ("aibrix 10.8: very many, equal load", json!({"compat": true}), [10, 10, 10], 1_000_000),
        (
            "aibrix 10.8: weights of a half",
            json!({"compat": true, "fairnessWeight": 0.5, "utilizationWeight": 0.5}),
            [80, 40, 10],
            4_000,
        ),
    ] {
        let strategy = build(&value);
        serve(&strategy, "a", served);
        assert_eq!(picks(&strategy, &running(&loads), &user("a")), [2].into(), "{row}");
    }
    let strategy = build(&json!({"compat": true}));
    let mut last = 0;
    for (row, served) in [(10, 10), (50, 40), (90, 40), (900, 810), (2_000, 1_100)] {
        serve(&strategy, "a", served);
        let got = picks(&strategy, &running(&[0, 0, 0]), &user("a"));
        assert!(got.iter().all(|id| *id >= last), "aibrix 10.8, {row} tokens: {got:?} after {last}");
        last = *got.first().unwrap();
    }
    assert_eq!(last, 2, "alone, it never moves by more than one position");
}

#[test]
fn compat_prefers_only_three_endpoints_and_the_default_all() {
    let reached = |value: &Value| {
        let strategy = build(value);
        let mut reached = BTreeSet::new();
        for (i, served) in [0, 1_000, 2_000, 4_000, 6_000, 8_000].into_iter().enumerate() {
            serve(&strategy, &format!("user {i}"), served);
        }
        for i in 0..6 {
            reached.extend(picks(&strategy, &running(&[0; 8]), &user(&format!("user {i}"))));
        }
        reached
    };
    assert_eq!(reached(&json!({"compat": true})), [1, 2, 3].into());
    assert_eq!(reached(&Value::Null), (1..=8).collect());
}

#[test]
fn heavy_users_avoid_the_first_endpoints_and_light_ones_none() {
    let strategy = build(&Value::Null);
    serve(&strategy, "heavy", 100_000);
    serve(&strategy, "light", 100);
    let idle = running(&[0, 0, 0, 0]);
    assert_eq!(picks(&strategy, &idle, &user("heavy")), [4].into());
    assert_eq!(picks(&strategy, &idle, &user("light")), [1, 2, 3, 4].into());
    assert_eq!(picks(&strategy, &idle, &user("new")), [1, 2, 3, 4].into());
    let busy = running(&[0, 0, 40, 90]);
    assert_eq!(picks(&strategy, &busy, &user("heavy")), [2].into(), "load counts too");
    assert_eq!(picks(&strategy, &busy, &user("light")), [1, 2].into());
}

#[test]
fn single_user_or_equal_users_go_by_load() {
    let strategy = build(&Value::Null);
    serve(&strategy, "a", 1_000_000);
    assert_eq!(picks(&strategy, &running(&[3, 2, 1, 2]), &user("a")), [3].into());
    serve(&strategy, "b", 1_000_000);
    assert_eq!(picks(&strategy, &running(&[3, 1, 2, 2]), &user("b")), [2].into());
}

/// AIBrix, 5.1: the user with the most tokens goes to the second pod, a new one to the first.
#[test]
fn compat_sends_heavy_users_to_the_second_and_new_users_to_the_first() {
    let strategy = build(&json!({"compat": true}));
    serve(&strategy, "heavy", 50_000);
    for loads in [&[0, 0][..], &[10, 10, 10], &[40, 0, 0, 0]] {
        assert_eq!(picks(&strategy, &running(loads), &user("heavy")), [2].into(), "{loads:?}");
        assert_eq!(picks(&strategy, &running(loads), &user("new")), [1].into(), "{loads:?}");
    }
}

#[test]
fn without_a_user_the_fewest_requests_decide_or_with_compat_a_draw() {
    for (value, expected) in [(Value::Null, &[2][..]), (json!({"compat": true}), &[1, 2, 3])] {
        let strategy = build(&value);
        let pool = running(&[3, 1, 2]);
        for headers in [BTreeMap::new(), user(" ")] {
            assert_eq!(picks(&strategy, &pool, &headers), expected.iter().copied().collect(), "aibrix 5.1");
            let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
            let mut cx = context(&pool);
            cx.request.headers = Headers::of(&headers);
            let mut ranking = Ranking::new(1);
            strategy.rank(&cx, &candidates, &mut for_request(0, 0), &mut ranking);
            assert_eq!(ranking.decide().unwrap().lacking, Some(Signal::User));
            let mut scores = [0.0; 3];
            assert_eq!(strategy.scores(&cx, &candidates, &mut scores), Some(Better::Lower));
            assert!(scores.iter().all(|s| s.is_nan()));
            cx.request.prompt_tokens = 100;
            strategy.picked(&cx, &pool.endpoints[0].endpoint);
            assert_eq!(strategy.usage("", NOW).users, 0, "no user is charged");
        }
    }
}

#[test]
fn parameters_are_checked() {
    for (bad, word) in [
        (json!({"windowSize": 0}), "windowSize"),
        (json!({"timeUnit": "hours"}), "hours"),
        (json!({"fairnessWeight": -1}), "fairnessWeight"),
        (json!({"maxPodLoad": 0}), "maxPodLoad"),
        (json!({"userHeader": "no header"}), "userHeader"),
        (json!({"minToken": 1}), "minToken"),
    ] {
        let error = (PLUGIN.build)(&bad, &Registry::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{bad}: {error}");
    }
    assert!(
        (PLUGIN.build)(&json!({"windowSize": 4_000_000_000_u32, "timeUnit": "minutes"}), &Registry::default()).is_ok()
    );
}
