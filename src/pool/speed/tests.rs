use super::*;
use crate::{Endpoint, EndpointSpec};
use attache_types::ids::EndpointId;
use proptest::prelude::*;
use std::time::Duration;

fn endpoint(pool: &Arc<PoolSpeed>, id: u32) -> Arc<Endpoint> {
    let port = 8000 + u16::try_from(id).unwrap();
    Arc::new(Endpoint::in_pool(EndpointId(id), EndpointSpec::at(([127, 0, 0, 1], port).into()), pool))
}

fn at(milliseconds: u64) -> Timestamp {
    Timestamp(1_000_000_000 + milliseconds * 1_000_000)
}

fn work(tokens: u32) -> Work {
    Work { prompt_tokens: tokens, uncached_tokens: tokens, adapter_cold: false }
}

/// One request alone, whose first token comes after `milliseconds`.
fn answer(endpoint: &Arc<Endpoint>, now: u64, tokens: u32, milliseconds: u64) {
    let mut one = Reservation::begin(endpoint.clone(), None, work(tokens), true, at(now));
    one.first_token(true, at(now + milliseconds));
}

fn predicted(endpoint: &Endpoint, now: u64, tokens: u32) -> f64 {
    endpoint.speed.forecast(&endpoint.ledger, None, work(tokens), at(now)).1.first_token
}

fn load(endpoint: &Endpoint, now: Timestamp) -> Load {
    endpoint.speed.forecast(&endpoint.ledger, None, work(0), now).0
}

#[test]
fn before_any_response_endpoints_are_equal_and_less_work_is_sooner() {
    let pool = Arc::default();
    let (a, b) = (endpoint(&pool, 0), endpoint(&pool, 1));
    assert_eq!(predicted(&a, 0, 4_000), predicted(&b, 0, 4_000));
    assert!(predicted(&a, 0, 1_000) < predicted(&a, 0, 4_000));
    let _on_a = Reservation::begin(a.clone(), None, work(2_000), true, at(0));
    assert!(predicted(&b, 0, 4_000) < predicted(&a, 0, 4_000), "at once, without a scrape");
    assert!(predicted(&a, 0, 4_000) < predicted(&b, 0, 9_000), "a cached prefix may outweigh a queue");
}

#[test]
fn each_endpoint_learns_its_own_speed() {
    let pool = Arc::default();
    let (fast, slow, new) = (endpoint(&pool, 0), endpoint(&pool, 1), endpoint(&pool, 2));
    for i in 0..100 {
        let tokens = 500 + i % 7 * 900;
        // 20,000 and 2,500 tokens a second, and 10 ms.
        answer(&fast, u64::from(i) * 10_000, tokens, 10 + u64::from(tokens) / 20);
        answer(&slow, u64::from(i) * 10_000, tokens, 10 + u64::from(tokens) * 2 / 5);
    }
    for (endpoint, tokens, seconds) in
        [(&fast, 4_000, 0.21), (&slow, 4_000, 1.61), (&fast, 1_000, 0.06), (&slow, 1_000, 0.41)]
    {
        let predicted = predicted(endpoint, 990_500, tokens);
        assert!((predicted / seconds - 1.0).abs() < 0.35, "{tokens} tokens: {predicted:.3} s for {seconds} s");
    }
    let stranger = predicted(&new, 990_500, 4_000);
    assert!((0.21..1.61).contains(&stranger), "a new endpoint starts with the pool's speed: {stranger}");
    assert!(
        slow.speed.learned().unwrap().prefill_tokens_per_second
            < fast.speed.learned().unwrap().prefill_tokens_per_second / 4.0
    );
    slow.speed.reset();
    assert_eq!(slow.speed.learned(), None);
    assert_eq!(predicted(&slow, 990_500, 4_000), stranger, "a restarted process starts with the pool's speed");
}

#[test]
fn outlier_changes_little() {
    let pool = Arc::default();
    let e = endpoint(&pool, 0);
    for i in 0..60 {
        answer(&e, i * 10_000, 2_000, 100);
    }
    let before = predicted(&e, 590_100, 2_000);
    answer(&e, 595_000, 2_000, 60_000);
    let after = predicted(&e, 655_000, 2_000);
    assert!(after < before * 1.3, "{before} then {after}");
}

#[test]
fn endpoint_that_was_slow_once_is_used_again() {
    let pool = Arc::default();
    let (busy, warming) = (endpoint(&pool, 0), endpoint(&pool, 1));
    for i in 0..3 {
        answer(&warming, i * 1_000, 1_000, 2_000);
    }
    for i in 0..200 {
        answer(&busy, 6_000 + i * 1_000, 1_000, 50);
        if i == 1 {
            assert!(predicted(&warming, 8_000, 1_000) > 3.0 * predicted(&busy, 8_000, 1_000));
        }
    }
    let (busy, warming) = (predicted(&busy, 205_500, 1_000), predicted(&warming, 205_500, 1_000));
    assert!(warming < 2.5 * busy, "{warming} beside {busy}");
}

#[test]
fn lasting_slowdown_is_learned() {
    let pool = Arc::default();
    let e = endpoint(&pool, 0);
    for i in 0..300 {
        answer(&e, i * 10_000, 2_000, 100);
    }
    for i in 300..500 {
        answer(&e, i * 10_000, 2_000, 400);
    }
    let now = predicted(&e, 4_990_400, 2_000);
    assert!((0.3..0.5).contains(&now), "{now}");
}

#[test]
fn reservation_counts_until_the_first_token_and_never_leaks() {
    let pool = Arc::default();
    let (a, b) = (endpoint(&pool, 0), endpoint(&pool, 1));
    let tokens = |e: &Endpoint, ms| load(e, at(ms)).kilotokens;
    let mut one = Reservation::begin(a.clone(), None, work(8_000), true, at(0));
    let two = Reservation::begin(a.clone(), None, work(8_000), true, at(0));
    assert_eq!(tokens(&a, 0), 16.0);
    assert!(tokens(&a, 100) < 16.0, "its computation has begun");
    assert_eq!(tokens(&a, 60_000), 8.0, "at most one of two can be computed without a first token");
    one.first_token(true, at(300));
    assert_eq!(tokens(&a, 300), 8.0);
    one.first_token(true, at(300));
    drop(two);
    assert_eq!(tokens(&a, 300), 0.0, "an aborted stream is removed");
    let mut moved = Reservation::begin(a.clone(), None, work(1_000), true, at(400));
    moved.move_to(b.clone(), at(410));
    assert_eq!((tokens(&a, 410), tokens(&b, 410)), (0.0, 1.0));
    drop((one, moved));
    assert_eq!((tokens(&a, 500), tokens(&b, 500)), (0.0, 0.0));
}

#[test]
fn prompts_without_an_observable_first_token_drain() {
    let pool = Arc::default();
    let e = endpoint(&pool, 0);
    let tokens = |ms| load(&e, at(ms)).kilotokens;
    let whole = Reservation::begin(e.clone(), None, work(5_000), false, at(0));
    assert!((tokens(0) - 5.0).abs() < 1e-3);
    let (early, late) = (tokens(100), tokens(1_000));
    assert!(early < 5.0 && early > 1.0, "{early}");
    assert_eq!(late, 0.0);
    drop(whole);
    assert_eq!(e.speed.learned(), None, "nothing was learned from it");
}

#[test]
fn time_between_tokens_is_learned_from_long_responses() {
    let pool = Arc::default();
    let e = endpoint(&pool, 0);
    for i in 0..200 {
        let mut one = Reservation::begin(e.clone(), None, work(100), true, at(i * 10_000));
        one.first_token(true, at(i * 10_000 + 30));
        // The time per token is 25 ms.
        one.ended(Some(101), at(i * 10_000 + 30 + 2_500));
    }
    let per_token = e.speed.forecast(&e.ledger, None, work(100), at(2_000_000)).1.per_token;
    assert!((0.02..0.03).contains(&per_token), "{per_token}");
}

proptest! {
    /// For any observations, predictions are finite and not negative, and more work is never sooner.
    #[test]
    fn predictions_of_any_history_are_finite_and_monotonic(
        answers in prop::collection::vec((0u32..200_000, 0u64..100_000, 0u64..5_000, any::<bool>()), 0..60),
        small in 0u32..50_000, more in 0u32..50_000,
    ) {
        let pool = Arc::default();
        let e = endpoint(&pool, 0);
        let mut now = 0;
        let mut open = Vec::new();
        for (tokens, took, pause, leave) in answers {
            let mut one = Reservation::begin(e.clone(), None, work(tokens), tokens % 3 > 0, at(now));
            one.first_token(true, at(now + took));
            one.ended(Some(took % 50), at(now + took * 2));
            if leave {
                open.push(Reservation::begin(e.clone(), None, work(tokens), true, at(now)));
            }
            now += pause;
        }
        let (a, b) = (predicted(&e, now, small), predicted(&e, now, small + more));
        prop_assert!(a.is_finite() && a >= 0.0 && b >= a, "{} {}", a, b);
        let load = load(&e, at(now).after(Duration::from_secs(1)));
        prop_assert!(load.kilotokens >= 0.0 && load.kilotokens.is_finite());
        drop(open);
        prop_assert_eq!(e.speed.pending(), 0);
        prop_assert_eq!(e.speed.pending.left().tokens, 0);
    }
}

#[test]
fn load_is_measured_by_what_was_sent() {
    let pool: Arc<PoolSpeed> = Arc::default();
    let e = endpoint(&pool, 0);
    assert_eq!(pool.demand(0, at(0)), Rates::default());
    // 10,000 tokens of 40 us, with 50 million pairs of 1 ns: 0.45 s of work a second.
    for second in 0..300 {
        drop(Reservation::begin(e.clone(), None, work(10_000), true, at(second * 1_000)));
        if second == 30 {
            let early = pool.demand(0, at(30_900));
            assert!((0.4..0.5).contains(&early.seconds), "known before the half-life has passed: {early:?}");
            assert!((0.9..1.1).contains(&early.requests), "{early:?}");
        }
    }
    let [now, minute, idle] = [300, 360, 900].map(|second| pool.demand(0, at(second * 1_000)));
    assert!((0.4..0.5).contains(&now.seconds) && (0.9..1.1).contains(&now.requests), "{now:?}");
    assert!((0.2..0.25).contains(&minute.seconds) && (0.45..0.55).contains(&minute.requests), "{minute:?}");
    assert!(idle.seconds < 0.001 && idle.requests < 0.002, "{idle:?}");
}

#[test]
fn factor_that_all_endpoints_share_belongs_to_the_pool() {
    let pool = Arc::default();
    let all: Vec<_> = (0..4).map(|i| endpoint(&pool, i)).collect();
    for i in 0..400u32 {
        // All endpoints are 4 times slower than initially assumed.
        let tokens = 500 + i % 7 * 900;
        answer(&all[(i % 4) as usize], u64::from(i) * 2_000, tokens, 80 + u64::from(tokens) * 4 / 25);
    }
    let stranger = endpoint(&pool, 9);
    let predicted: Vec<f64> = all.iter().chain([&stranger]).map(|e| predicted(e, 800_500, 4_000)).collect();
    assert!(predicted.iter().all(|p| (p / 0.72 - 1.0).abs() < 0.15), "{predicted:.3?}");
}

#[test]
fn ratios_age_and_a_restart_clears_both() {
    let pool = Arc::default();
    let (slow, usual) = (endpoint(&pool, 0), endpoint(&pool, 1));
    for i in 0..100 {
        for (endpoint, milliseconds) in [(&slow, 400u64), (&usual, 100)] {
            let mut one = Reservation::begin(endpoint.clone(), None, work(2_000), true, at(i * 10_000));
            one.first_token(true, at(i * 10_000 + milliseconds));
            one.ended(Some(101), at(i * 10_000 + milliseconds * 11));
        }
    }
    let slower = |seconds: u64| {
        slow.speed.slower(&pool.model(at(990_400 + seconds * 1_000))).map(|s| s / pool.centres.get()[0] as f64)
    };
    let [[fresh, _], [half, _], [old, _]] = [0, 30, 600].map(slower);
    assert!(fresh > 1.5, "{fresh}");
    assert!((half - fresh.sqrt()).abs() < 0.05 * half, "half of its logarithm after a half-life: {half} of {fresh}");
    assert!((old - 1.0).abs() < 1e-3, "{old}");
    slow.speed.reset();
    answer(&slow, 2_000_000, 2_000, 100);
    let [_, after] = slow.speed.slower(&pool.model(at(2_000_100)));
    assert!(after < 1.5, "only the old process was four times slower: {after}");
}

#[test]
fn prompt_is_not_done_early_when_steps_take_longer_than_its_tokens() {
    let pool: Arc<PoolSpeed> = Arc::default();
    let one = endpoint(&pool, 0);
    let left = |seconds: f64| {
        let (c, _) = one.speed.coefficients(at(0));
        one.speed.load(&c, &one.ledger, None, &pool.model(at((seconds * 1e3) as u64))).prefill_seconds
    };
    let _first = Reservation::begin(one.clone(), None, work(2_500), true, at(0));
    let own = left(0.0);
    assert!((left(own / 2.0) - own / 2.0).abs() < 0.01 * own && left(own) < 0.01 * own, "no pace was learned yet");
    let step = ComputedStep { thought: 0.1, passed: 0.2 };
    (0..200).for_each(|_| pool.pace.observe(step));
    assert!((left(own) - own / 2.0).abs() < 0.03 * own && left(2.2 * own) < 0.03 * own);
}

#[test]
fn pace_is_learned_from_the_first_of_a_queue() {
    let pool: Arc<PoolSpeed> = Arc::default();
    let one = endpoint(&pool, 0);
    // A server that is always busy: each prompt takes 200 ms and is sent 20 ms before the one ahead of it ends.
    let mut running = Reservation::begin(one.clone(), None, work(2_500), true, at(0));
    for i in 1..300 {
        let next = Reservation::begin(one.clone(), None, work(2_500), true, at(i * 200 - 20));
        running.first_token(true, at(i * 200));
        running = next;
    }
    let (c, _) = one.speed.coefficients(at(60_000));
    let takes = EndpointSpeed::prefill_seconds(&c, 2.5, work(2_500).mega_pairs()) * f64::from(pool.pace.get());
    assert!((takes / 0.2 - 1.0).abs() < 0.1, "{takes}");
    // A cancelled request does not change the pace.
    let before = pool.pace.get();
    drop(running);
    assert!((pool.pace.get() - before).abs() < 1e-6);
}

proptest! {
    #[test]
    fn ageing_moves_from_the_own_ratio_to_the_usual_one(usual in 0.2f32..5.0, own in 0.2f32..5.0, counts in 0.0f64..1.0) {
        let (usual64, own64) = (f64::from(usual), f64::from(own));
        prop_assert!((between(usual, own, 1.0) - own64).abs() < 1e-9);
        prop_assert!((between(usual, own, 0.0) - usual64).abs() < 1e-9);
        let aged = between(usual, own, counts);
        prop_assert!(aged >= usual64.min(own64) - 1e-9 && aged <= usual64.max(own64) + 1e-9);
        // A slow server and an equally fast one age by the same factor.
        prop_assert!((aged * between(1.0 / usual, 1.0 / own, counts) - 1.0).abs() < 1e-5);
    }
}

#[test]
fn learned_speed_is_taken_over_by_a_picker_that_knows_less() {
    let (learned, new) = (Arc::default(), Arc::default());
    let (here, there) = (endpoint(&learned, 0), endpoint(&new, 0));
    for i in 0..60 {
        let tokens = 500 + i % 7 * 900;
        answer(&here, u64::from(i) * 10_000, tokens, 10 + u64::from(tokens) * 2 / 5);
    }
    let before = predicted(&there, 590_500, 4_000);
    assert!(new.import(&learned.export()));
    // As for an endpoint of the other picker that has no response yet.
    let (expected, after) = (predicted(&endpoint(&learned, 1), 590_500, 4_000), predicted(&there, 590_500, 4_000));
    assert!((after / expected - 1.0).abs() < 1e-6, "{after} s, expected {expected} s");
    // A part of the slowness belongs to the endpoint alone, as long as it is the only one.
    assert!(after > 4.0 * before && after < 1.7, "{before} s, then {after} s");
    // What is observed here continues from there.
    answer(&there, 600_000, 4_000, 1_610);
    let continued = predicted(&there, 601_700, 4_000);
    assert!((continued / after - 1.0).abs() < 0.05, "{after} s, then {continued} s");
    // An export with fewer observations changes nothing.
    let known = new.export();
    assert!(new.import(&PoolSpeed::default().export()));
    assert_eq!(new.export(), known);
}

#[test]
fn impossible_speeds_of_another_picker_change_nothing() {
    let pool = PoolSpeed::default();
    let good = pool.export();
    let bad = |change: fn(&mut SpeedExport)| {
        let mut export = good.clone();
        change(&mut export);
        export
    };
    for export in [
        bad(|export| export.first[1] = f64::NAN),
        bad(|export| export.first[1] = -1.0),
        bad(|export| export.next.push(1.0)),
        bad(|export| export.next.truncate(3)),
        bad(|export| export.response_tokens = -1.0),
    ] {
        assert!(!pool.import(&export), "{export:?}");
        assert_eq!(pool.export(), good);
    }
}
