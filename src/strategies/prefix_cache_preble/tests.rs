//! AIBrix's cases of its Preble, and the cost model of the window.

use super::*;
use attache_pool::PoolSnapshot;
use attache_pool::ledger::Ticket;
use attache_protocol::Prompt;
use attache_protocol::prompt::Piece;
use attache_scheduling::Registry;
use attache_scheduling::candidates::Cached;
use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_types::clock::Timestamp;
use attache_types::rng::for_request;
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn build(value: &Value) -> Preble {
    params::<Params>(value).unwrap().build()
}

fn pool(counts: &[u32]) -> PoolSnapshot {
    snapshot(&(1..).zip(counts.iter().copied()).collect::<Vec<_>>())
}

/// The endpoints that may be picked when they have these tokens of the prompt cached.
fn picks(strategy: &Preble, pool: &PoolSnapshot, prompt: u32, held: &[u32], now: Timestamp) -> BTreeSet<u32> {
    let mut cx = PickContext { now, ..context(pool) };
    cx.request.prompt_tokens = prompt;
    let hold = |(state, held): (_, &u32)| Candidate {
        cached: Cached { gpu: *held, any: *held, in_use: 0 },
        ..Candidate::new(state, NOW, STALE_AFTER, 0)
    };
    let candidates: Vec<_> = pool.endpoints.iter().zip(held).map(hold).collect();
    let draw = |seed| {
        let mut ranking = Ranking::new(1);
        strategy.rank(&cx, &candidates, &mut for_request(seed, 0), &mut ranking);
        ranking.decide().unwrap().picks[0].id.0
    };
    (0..60).map(draw).collect()
}

/// Records `requests` prompts of this length for the endpoint with this id.
fn send(strategy: &Preble, pool: &PoolSnapshot, id: u32, requests: u32, prompt: u32, now: Timestamp) {
    let mut cx = PickContext { now, ..context(pool) };
    cx.request.prompt_tokens = prompt;
    let state = pool.endpoints.iter().find(|s| s.endpoint.id.0 == id).unwrap();
    (0..requests).for_each(|_| drop(strategy.picked(&cx, &state.endpoint)));
}

#[test]
fn uncached_prompt_goes_to_the_least_work() {
    let (strategy, pool) = (build(&Value::Null), pool(&[0, 0]));
    assert_eq!(picks(&strategy, &pool, 100, &[0, 0], NOW), [1, 2].into(), "aibrix 10.7 a: any of them");
    send(&strategy, &pool, 1, 1, 4_000, NOW);
    send(&strategy, &pool, 2, 3, 50, NOW);
    assert_eq!(picks(&strategy, &pool, 100, &[0, 0], NOW), [1].into(), "three responses outweigh a long prompt");
    send(&strategy, &pool, 1, 2, 4_000, NOW);
    assert_eq!(picks(&strategy, &pool, 100, &[0, 0], NOW), [2].into());
}

#[test]
fn prefix_over_half_of_the_prompt_goes_to_its_holder_with_fewest_requests() {
    let (strategy, pool) = (build(&Value::Null), pool(&[0, 0, 0]));
    assert_eq!(picks(&strategy, &pool, 100, &[100, 0, 100], NOW), [1, 3].into(), "aibrix 10.7 b");
    send(&strategy, &pool, 1, 5, 10, NOW);
    send(&strategy, &pool, 3, 4, 10_000, NOW);
    assert_eq!(picks(&strategy, &pool, 100, &[100, 0, 100], NOW), [3].into(), "requests count, not their work");
    assert_eq!(picks(&strategy, &pool, 100, &[100, 0, 90], NOW), [1].into(), "the longest, however loaded");
    assert_eq!(picks(&strategy, &pool, 100, &[50, 0, 0], NOW), [2].into(), "half is not more than half");
    assert_eq!(picks(&strategy, &pool, 100, &[51, 0, 0], NOW), [1].into());
}

#[test]
fn under_imbalance_only_the_least_loaded_count() {
    let strategy = build(&Value::Null);
    assert_eq!(picks(&strategy, &pool(&[1, 1, 10, 10]), 100, &[90; 4], NOW), [1, 2].into(), "aibrix 10.7 d");
    assert_eq!(picks(&strategy, &pool(&[0, 9]), 100, &[0, 100], NOW), [1].into());
    assert_eq!(picks(&strategy, &pool(&[0, 8]), 100, &[0, 100], NOW), [2].into(), "8 is not above 8");
}

#[test]
fn exploration_counts_the_uncached_part_of_the_prompt() {
    assert_eq!(picks(&build(&Value::Null), &pool(&[0, 0]), 4_000, &[0, 1_900], NOW), [2].into());
}

#[test]
fn gate_can_be_switched() {
    for (value, expected) in [(json!({}), 1), (json!({"gate": true}), 1), (json!({"gate": false}), 2)] {
        assert_eq!(picks(&build(&value), &pool(&[0, 9]), 100, &[0, 100], NOW), [expected].into(), "{value}");
    }
}

/// The endpoints that a prompt with this text may go to.
fn exact_picks(strategy: &Preble, pool: &PoolSnapshot, text: &str) -> BTreeSet<u32> {
    let prompt = Prompt { pieces: [Piece::Text(text.into())].into(), ..Prompt::default() };
    let mut cx = context(pool);
    cx.request.prompt = Some(&prompt);
    let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let draw = |seed| {
        let mut ranking = Ranking::new(1);
        strategy.rank(&cx, &candidates, &mut for_request(seed, 0), &mut ranking);
        ranking.decide().unwrap().picks[0].id.0
    };
    (0..60).map(draw).collect()
}

fn exact_send(strategy: &Preble, pool: &PoolSnapshot, id: u32, text: &str) {
    let prompt = Prompt { pieces: [Piece::Text(text.into())].into(), ..Prompt::default() };
    let mut cx = context(pool);
    cx.request.prompt = Some(&prompt);
    let state = pool.endpoints.iter().find(|s| s.endpoint.id.0 == id).unwrap();
    strategy.picked(&cx, &state.endpoint);
}

/// AIBrix's cases, decided by its own tree.
#[test]
fn compat_decides_as_aibrix() {
    let strategy = build(&json!({"compat": true}));
    assert_eq!(strategy.reads(), Reads::PROMPT);
    let three = pool(&[0, 0, 0]);
    let (shared, other) = ("the same beginning ".repeat(40), "something else ".repeat(60));
    assert_eq!(exact_picks(&strategy, &three, &shared), [1, 2, 3].into(), "aibrix 10.7 a: any of them");
    exact_send(&strategy, &three, 1, &shared);
    exact_send(&strategy, &three, 3, &shared);
    assert_eq!(exact_picks(&strategy, &three, &shared), [1, 3].into(), "aibrix 10.7 b");
    assert_eq!(exact_picks(&strategy, &three, &other), [2].into(), "no work there so far");
    exact_send(&strategy, &three, 3, &other);
    assert_eq!(exact_picks(&strategy, &three, &shared), [1].into(), "fewer requests on what it computed");
    let half = format!("{}{}", &shared[..640], &other[..640]);
    assert_eq!(exact_picks(&strategy, &three, &half), [2].into(), "half is not more than half: the least work");
    assert_eq!(exact_picks(&strategy, &three, &format!("{shared}{}", &other[..64])), [1].into());
}

#[test]
fn compat_gate_is_off_unless_switched_on() {
    for (value, expected) in [
        (json!({"compat": true}), &[1][..]),
        (json!({"compat": true, "gate": true}), &[2, 3]),
        (json!({"compat": true, "gate": true, "imbalance": 9}), &[1]),
    ] {
        let (strategy, three) = (build(&value), pool(&[0, 0, 0]));
        let text = "the same beginning ".repeat(40);
        exact_send(&strategy, &three, 1, &text);
        let _sent: Vec<_> = (0..9).map(|_| Ticket::book(three.endpoints[0].endpoint.clone(), 0)).collect();
        assert_eq!(exact_picks(&strategy, &three, &text), expected.iter().copied().collect(), "aibrix 10.7 d: {value}");
    }
}

#[test]
fn requests_older_than_the_window_stop_counting() {
    let (strategy, pool) = (build(&Value::Null), pool(&[0, 0]));
    send(&strategy, &pool, 1, 9, 4_000, NOW);
    let after = |seconds| NOW.after(Duration::from_secs(seconds));
    assert_eq!(picks(&strategy, &pool, 100, &[0, 0], after(170)), [2].into());
    assert_eq!(picks(&strategy, &pool, 100, &[0, 0], after(181)), [1, 2].into());
    assert!(strategy.work.lock().values().all(|w| w.nanos.total() == 0));
}

#[test]
fn eviction_loop_interval_delays_the_window() {
    let value = json!({"slidingWindowPeriod": 1, "evictionLoopInterval": 60_000});
    let (strategy, pool) = (build(&value), pool(&[0, 0]));
    let at = |seconds: u64| Timestamp(seconds * 1_000_000_000);
    send(&strategy, &pool, 1, 9, 4_000, at(121));
    assert_eq!(picks(&strategy, &pool, 100, &[0, 0], at(179)), [2].into());
    assert_eq!(picks(&strategy, &pool, 100, &[0, 0], at(250)), [1, 2].into());
}

#[test]
fn endpoints_that_left_are_dropped() {
    let strategy = build(&Value::Null);
    for id in 0..1_000 {
        let now = Timestamp(u64::from(id) * 1_000_000_000);
        let pool = snapshot(&[(id, 0), (id + 1, 0)]);
        send(&strategy, &pool, id, 1, 100, now);
    }
    assert!(strategy.work.lock().len() <= 182, "{}", strategy.work.lock().len());
}

#[test]
fn scores_change_no_state() {
    let (strategy, pool) = (build(&Value::Null), pool(&[0, 0]));
    send(&strategy, &pool, 1, 2, 100, NOW);
    let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let scores = || {
        let mut scores = vec![0.0; 2];
        strategy.scores(&context(&pool), &candidates, &mut scores);
        scores
    };
    let first = scores();
    assert!(first[0] > first[1] && first == scores(), "aibrix 10.7 d: {first:?}");
    assert_eq!(strategy.scores(&context(&pool), &[], &mut []), Some(Better::Lower), "aibrix 10.7 d: empty");
}

#[test]
fn parameters_are_aibrixs_and_checked() {
    let all = json!({
        "targetGPU": "A6000", "decodingLength": 90, "slidingWindowPeriod": 1, "matchThreshold": 0.3, "imbalance": 4,
        "evictionLoopInterval": 1000
    });
    assert!((PLUGIN.build)(&all, &Registry::default()).is_ok());
    for (bad, word) in [
        (json!({"targetGPU": "H100"}), "H100"),
        (json!({"slidingWindowPeriod": 0}), "slidingWindowPeriod"),
        (json!({"matchThreshold": 1.5}), "matchThreshold"),
    ] {
        let error = (PLUGIN.build)(&bad, &Registry::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{bad}: {error}");
    }
}
