//! Each policy by itself: the flow that is next, and what changes it.

use super::*;
use crate::registry::{FAIRNESS, find};
use attache_types::rng::for_request;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::collections::BTreeMap;

fn policy(name: &str, parameters: &Value) -> Box<dyn Fairness> {
    (find(FAIRNESS, name).unwrap().build)(parameters).unwrap()
}

fn seconds(s: f64) -> Timestamp {
    Timestamp((s * 1e9) as u64)
}

fn head(arrived: f64, sequence: u64) -> QueueHead {
    QueueHead { key: seconds(arrived).0, sequence, arrived: seconds(arrived) }
}

/// One request of `flow` from its dispatch to its end.
fn serves(policy: &mut dyn Fairness, flow: u32, input: u32, output: u32, now: f64) {
    let mut meter = Meter { input, answer: Some(output), ..Meter::default() };
    policy.dispatched(flow, &mut meter, seconds(now), &mut for_request(1, 1));
    policy.answered(flow, &mut meter, output, seconds(now));
    policy.ended(flow, &meter, None, seconds(now));
}

fn wake(policy: &mut dyn Fairness, flows: &[(u32, f64)]) {
    for (flow, arrived) in flows {
        policy.wakes(*flow, 1.0, head(*arrived, u64::from(*flow)), seconds(*arrived));
    }
}

#[test]
fn global_strict_takes_the_first_head_and_last_the_last() {
    let mut policy = policy("global-strict", &Value::Null);
    wake(&mut *policy, &[(0, 3.0), (1, 1.0), (2, 2.0)]);
    assert_eq!((policy.next(), policy.last()), (Some(1), Some(0)));
    policy.head(1, head(4.0, 9));
    assert_eq!((policy.next(), policy.last()), (Some(2), Some(1)));
    policy.sleeps(2);
    assert_eq!(policy.next(), Some(0));
    policy.forget(0);
    policy.sleeps(1);
    assert_eq!((policy.next(), policy.last()), (None, None));
}

#[test]
fn round_robin_serves_each_flow_in_turn() {
    let mut policy = policy("round-robin", &Value::Null);
    wake(&mut *policy, &[(0, 0.0), (1, 0.0), (2, 0.0)]);
    let mut turns = Vec::new();
    for i in 0..7 {
        let flow = policy.next().unwrap();
        turns.push(flow);
        serves(&mut *policy, flow, 1, 1, 0.0);
        if i == 3 {
            policy.sleeps(2);
        }
    }
    assert_eq!(turns, [0, 1, 2, 0, 1, 0, 1]);
}

#[test]
fn program_aware_weighs_service_and_wait() {
    let fresh = || policy("program-aware-fairness", &Value::Null);
    let mut policy = fresh();
    wake(&mut *policy, &[(0, 0.0), (1, 5.0)]);
    assert_eq!(policy.next(), Some(0), "nothing but waits tells them apart");
    serves(&mut *policy, 0, 100, 50, 6.0);
    assert_eq!((policy.next(), policy.last()), (Some(1), Some(0)), "0.8 of service beats 0.2 of wait");
    // A flow in between in both: 0.8 · (1 − 60/200) + 0.2 · ½ = 0.66, against 0.8 and 0.2.
    wake(&mut *policy, &[(2, 2.5)]);
    serves(&mut *policy, 2, 60, 0, 6.0);
    assert_eq!(policy.next(), Some(1));
    policy.sleeps(1);
    assert_eq!(policy.next(), Some(2));
    // Two idle half-lives turn 200 tokens into 50, and 70 are more.
    let mut policy = fresh();
    let tied = |policy: &mut dyn Fairness, now: f64| {
        [0, 1].iter().for_each(|flow| policy.wakes(*flow, 1.0, head(0.0, u64::from(*flow)), seconds(now)));
    };
    tied(&mut *policy, 0.0);
    serves(&mut *policy, 0, 200, 0, 0.0);
    policy.sleeps(0);
    serves(&mut *policy, 1, 70, 0, 120.0);
    tied(&mut *policy, 120.0);
    assert_eq!(policy.next(), Some(0));
    // Service does not decay while the flow has something queued or in flight.
    serves(&mut *policy, 0, 21, 0, 120.0);
    assert_eq!(policy.next(), Some(1), "71 against 70");
    let mut meter = Meter::default();
    policy.dispatched(0, &mut meter, seconds(120.0), &mut for_request(1, 1));
    policy.sleeps(0);
    tied(&mut *policy, 1e6);
    assert_eq!(policy.next(), Some(1));
    // It decays from the end of its last request in flight.
    policy.sleeps(0);
    policy.ended(0, &meter, None, seconds(2e6));
    tied(&mut *policy, 2e6 + 60.0);
    assert_eq!(policy.next(), Some(0), "35 and a half against 70");
    let kept = (program_aware::PLUGIN.build)(&json!({"lasHalfLifeSeconds": 0, "lasDecayFactor": 1.0})).unwrap();
    let mut kept = kept.fresh();
    wake(&mut *kept, &[(0, 0.0), (1, 0.0)]);
    serves(&mut *kept, 0, 200, 0, 0.0);
    kept.sleeps(0);
    serves(&mut *kept, 1, 199, 0, 1e6);
    tied(&mut *kept, 1e6);
    assert_eq!(kept.next(), Some(1), "nothing fades");
    for (parameters, says) in [
        (json!({"strategy": "drr"}), "drr"),
        (json!({"strategy": "turn-priority", "turnPriorityTimeWeight": -1}), "turnPriorityTimeWeight"),
        (json!({"lasWeightService": -1}), "lasWeightService"),
        (json!({"lasDecayFactor": 0.0}), "lasDecayFactor"),
    ] {
        let error = (program_aware::PLUGIN.build)(&parameters).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn ended_program_begins_anew_in_both_orders() {
    let mut policy = policy("program-aware-fairness", &Value::Null);
    wake(&mut *policy, &[(0, 0.0), (1, 1.0)]);
    serves(&mut *policy, 0, 100, 50, 2.0);
    assert_eq!((policy.next(), policy.last()), (Some(1), Some(0)));
    policy.restart(0);
    assert_eq!((policy.next(), policy.last()), (Some(0), Some(1)), "no service is left, and it has waited longer");
    policy.restart(7);
    policy.sleeps(1);
    policy.sleeps(0);
    assert_eq!(policy.next(), None, "a flow that ends without a request is not queued");
    let mut turns = self::policy("program-aware-fairness", &json!({"strategy": "turn-priority"}));
    wake(&mut *turns, &[(0, 0.0), (1, 1.0)]);
    serves(&mut *turns, 1, 1, 1, 2.0);
    turns.head(1, head(2.0, 5));
    assert_eq!(turns.next(), Some(1), "it has had a turn");
    turns.restart(1);
    assert_eq!(turns.next(), Some(0));
    turns.restart(7);
    turns.sleeps(1);
    assert_eq!(turns.next(), Some(0));
    turns.sleeps(0);
    assert_eq!(turns.next(), None);
}

#[test]
fn turn_priority_takes_the_deepest_session_until_others_have_waited() {
    let parameters = json!({"strategy": "turn-priority", "turnPriorityInactivitySeconds": 100});
    let fresh = || policy("program-aware-fairness", &parameters);
    let mut policy = fresh();
    wake(&mut *policy, &[(0, 0.0), (1, 1.0)]);
    assert_eq!((policy.next(), policy.last()), (Some(0), Some(1)), "equal turns: the one that has waited");
    serves(&mut *policy, 1, 1, 1, 2.0);
    policy.head(1, head(2.0, 2));
    assert_eq!((policy.next(), policy.last()), (Some(1), Some(0)), "one turn is worth 20 s");
    policy.head(1, head(21.0, 3));
    assert_eq!(policy.next(), Some(0), "21 s of waiting are more");
    // Two turns, then 100 s without a request in flight: the first turn again.
    let mut policy = fresh();
    wake(&mut *policy, &[(0, 0.0)]);
    serves(&mut *policy, 0, 1, 1, 1.0);
    serves(&mut *policy, 0, 1, 1, 1.0);
    policy.sleeps(0);
    wake(&mut *policy, &[(1, 101.0), (0, 101.0)]);
    assert_eq!(policy.next(), Some(0), "100 s are not longer than 100 s");
    policy.sleeps(0);
    policy.sleeps(1);
    wake(&mut *policy, &[(1, 102.0), (0, 102.5)]);
    assert_eq!(policy.next(), Some(1));
    policy.sleeps(1);
    policy.forget(1);
    policy.sleeps(0);
    assert_eq!((policy.next(), policy.last()), (None, None));
}

proptest! {
    /// The walk down two orders finds the same flow as a scan of all flows.
    #[test]
    fn program_aware_walk_finds_best_flow(
        flows in prop::collection::vec((0..50u64, 0..2_000u32), 1..40), asleep in prop::collection::vec(0..40u32, 0..10),
    ) {
        let mut policy = policy("program-aware-fairness", &Value::Null);
        let mut queued = BTreeMap::new();
        for (flow, (arrived, tokens)) in (0u32..).zip(&flows) {
            wake(&mut *policy, &[(flow, *arrived as f64)]);
            serves(&mut *policy, flow, *tokens, 0, 0.0);
            queued.insert(flow, (f64::from(*tokens), seconds(*arrived as f64).0 as f64));
        }
        for flow in asleep {
            policy.sleeps(flow);
            queued.remove(&flow);
        }
        let span = |of: fn(&(f64, f64)) -> f64| {
            let each = || queued.values().map(of);
            (each().fold(f64::INFINITY, f64::min), each().fold(f64::NEG_INFINITY, f64::max))
        };
        let (services, arrivals) = (span(|f| f.0), span(|f| f.1));
        let part = |v: f64, (least, greatest): (f64, f64)| if greatest > least { (v - least) / (greatest - least) } else { 0.0 };
        let score = |flow: u32| {
            let (service, arrived) = queued[&flow];
            0.8 * (1.0 - part(service, services)) + 0.2 * (1.0 - part(arrived, arrivals))
        };
        let best = queued.keys().map(|f| score(*f)).fold(f64::NEG_INFINITY, f64::max);
        let worst = queued.keys().map(|f| score(*f)).fold(f64::INFINITY, f64::min);
        let (next, last) = (policy.next(), policy.last());
        prop_assert_eq!(next.is_none(), queued.is_empty());
        if let (Some(next), Some(last)) = (next, last) {
            prop_assert!((score(next) - best).abs() < 1e-9 && (score(last) - worst).abs() < 1e-9);
        }
    }
}

#[test]
fn program_aware_counts_the_service_of_other_pickers() {
    let mut policy = policy("program-aware-fairness", &Value::Null);
    assert!(policy.counts_service());
    wake(&mut *policy, &[(0, 0.0), (1, 0.0)]);
    serves(&mut *policy, 1, 100, 0, 0.0);
    assert_eq!(policy.next(), Some(0));
    policy.served(0, 51, 25);
    assert_eq!(policy.next(), Some(1), "100 against 101, while both are queued");
    // 101 decay to 50.5 in a half-life, and the service of another picker does not decay before it is given.
    policy.sleeps(0);
    serves(&mut *policy, 1, 0, 0, 60.0);
    policy.served(0, 50, 0);
    policy.wakes(0, 1.0, head(0.0, 0), seconds(60.0));
    assert_eq!(policy.next(), Some(1), "100 against 100.5");
    policy.sleeps(0);
    policy.served(0, 100, 0);
    serves(&mut *policy, 1, 0, 0, 120.0);
    policy.wakes(0, 1.0, head(0.0, 0), seconds(120.0));
    assert_eq!(policy.next(), Some(1), "100 against 100.25: all of it decays from then on");
    policy.restart(0);
    assert_eq!(policy.next(), Some(0));
}

#[test]
fn vtc_fair_charges_prompt_on_dispatch_and_tokens_on_arrival() {
    let mut policy = policy("vtc-fair", &Value::Null);
    wake(&mut *policy, &[(0, 0.0), (1, 0.0)]);
    let mut meter = Meter { input: 10, ..Meter::default() };
    policy.dispatched(0, &mut meter, seconds(0.0), &mut for_request(1, 1));
    assert_eq!(policy.next(), Some(1));
    serves(&mut *policy, 1, 11, 0, 0.0);
    assert_eq!(policy.next(), Some(0), "10 against 11");
    policy.answered(0, &mut meter, 1, seconds(0.0));
    assert_eq!(policy.next(), Some(1), "12 against 11");
    // Tokens that were reported before are not charged again.
    serves(&mut *policy, 1, 2, 0, 0.0);
    policy.answered(0, &mut meter, 1, seconds(0.0));
    policy.answered(0, &mut meter, 0, seconds(0.0));
    assert_eq!(policy.next(), Some(0), "12 against 13");
    // The model server reports a longer prompt than estimated.
    policy.ended(0, &meter, Some(14), seconds(0.0));
    assert_eq!(policy.next(), Some(1), "16 against 13");
    // With a share of 2, the same tokens count half.
    policy.wakes(2, 2.0, head(0.0, 2), seconds(0.0));
    serves(&mut *policy, 2, 5, 0, 0.0);
    assert_eq!(policy.next(), Some(1), "13 + 2.5 against 13");
    serves(&mut *policy, 1, 3, 0, 0.0);
    assert_eq!(policy.next(), Some(2), "15.5 against 16");
}

#[test]
fn vtc_fair_raises_counter_of_returning_flow() {
    let mut policy = policy("vtc-fair", &Value::Null);
    wake(&mut *policy, &[(0, 0.0)]);
    serves(&mut *policy, 0, 1_000, 0, 0.0);
    // To the least counter of the queued flows.
    wake(&mut *policy, &[(1, 1.0)]);
    serves(&mut *policy, 1, 1, 0, 1.0);
    assert_eq!(policy.next(), Some(0), "1,000 against 1,001");
    // No flow is queued: to the counter of the last queued flow.
    policy.sleeps(0);
    policy.sleeps(1);
    wake(&mut *policy, &[(2, 2.0), (1, 2.0)]);
    serves(&mut *policy, 2, 1, 0, 2.0);
    assert_eq!(policy.next(), Some(1), "1,001 against 1,002");
    // A counter is never lowered.
    serves(&mut *policy, 1, 500, 0, 2.0);
    policy.sleeps(1);
    wake(&mut *policy, &[(1, 3.0)]);
    assert_eq!((policy.next(), policy.last()), (Some(2), Some(1)));
}

#[test]
fn vtc_pred_charges_usual_response_on_dispatch() {
    let mut policy = policy("vtc-pred", &Value::Null);
    wake(&mut *policy, &[(0, 0.0), (1, 0.0)]);
    // The first responses have 100 tokens for flow 0 and 10 for flow 1.
    serves(&mut *policy, 0, 0, 100, 0.0);
    serves(&mut *policy, 1, 180, 10, 0.0);
    // Both counters are 200. On dispatch flow 0 is charged 200, flow 1 only 20.
    let (mut long, mut short) = (Meter::default(), Meter { input: 30, ..Meter::default() });
    let rng = &mut for_request(1, 1);
    policy.dispatched(0, &mut long, seconds(0.0), rng);
    policy.dispatched(1, &mut short, seconds(0.0), rng);
    assert_eq!((long.charged, short.charged), (100, 10));
    assert_eq!(policy.next(), Some(1));
    // Predicted tokens cost nothing more, further ones do.
    policy.answered(1, &mut short, 10, seconds(0.0));
    assert_eq!(policy.next(), Some(1), "250 against 400");
    policy.answered(1, &mut short, 90, seconds(0.0));
    assert_eq!(policy.next(), Some(0), "410 against 400");
    // Missing tokens are refunded.
    policy.answered(0, &mut long, 1, seconds(0.0));
    policy.ended(0, &long, None, seconds(0.0));
    serves(&mut *policy, 0, 0, 0, 0.0);
    assert_eq!(policy.next(), Some(0), "202 against 410");
    // (4 · 100 + 1) / 5 = 80.2, then 64.16.
    let mut next = Meter::default();
    policy.dispatched(0, &mut next, seconds(0.0), rng);
    assert_eq!(next.charged, 64);
    // Incomplete or uncounted responses do not change the prediction.
    policy.ended(0, &Meter { cut: true, ..next }, None, seconds(0.0));
    let mut after = Meter::default();
    policy.dispatched(0, &mut after, seconds(0.0), rng);
    assert_eq!(after.charged, 64);
}

#[test]
fn vtc_oracle_predicts_within_range() {
    let mut exact = policy("vtc-oracle", &Value::Null);
    let mut half = policy("vtc-oracle", &json!({"range": 0.5}));
    wake(&mut *exact, &[(0, 0.0)]);
    wake(&mut *half, &[(0, 0.0)]);
    let mut seen = Vec::new();
    for i in 0..200 {
        let rng = &mut for_request(5, i);
        let (mut known, mut guessed) = (Meter { answer: Some(100), ..Meter::default() }, Meter::default());
        exact.dispatched(0, &mut known, seconds(0.0), rng);
        assert_eq!(known.charged, 100);
        exact.dispatched(0, &mut guessed, seconds(0.0), rng);
        assert_eq!(guessed.charged, 0, "nobody knows");
        half.dispatched(0, &mut known, seconds(0.0), rng);
        seen.push(known.charged);
    }
    assert!(seen.iter().all(|c| (50..=150).contains(c)));
    let mean = f64::from(seen.iter().sum::<u32>()) / 200.0;
    assert!((mean - 100.0).abs() < 10.0 && seen.iter().any(|c| *c < 70) && seen.iter().any(|c| *c > 130), "{mean}");
    assert!((vtc_oracle::PLUGIN.build)(&json!({"range": 2.0})).unwrap_err().to_string().contains("range"));
}

#[test]
fn vtc_max_fair_gives_no_credit_for_missed_service() {
    let (mut fair, mut max_fair) = (policy("vtc-fair", &Value::Null), policy("vtc-max-fair", &Value::Null));
    for (policy, expected) in [(&mut fair, [1, 1, 1, 1]), (&mut max_fair, [1, 0, 1, 0])] {
        // Flow 1 is queued while flow 0 gets 90 more tokens; then both are served in turns of 10.
        wake(&mut **policy, &[(0, 0.0), (1, 0.0)]);
        serves(&mut **policy, 0, 90, 0, 0.0);
        let turns: Vec<u32> = (0..4)
            .map(|_| {
                let flow = policy.next().unwrap();
                serves(&mut **policy, flow, 10, 0, 0.0);
                flow
            })
            .collect();
        assert_eq!(turns, expected, "{policy:?}");
    }
    // While the last request is in flight, the floor is the counter of its flow before it.
    let mut policy = policy("vtc-max-fair", &Value::Null);
    wake(&mut *policy, &[(0, 0.0), (1, 0.0)]);
    let rng = &mut for_request(1, 1);
    let mut first = Meter { input: 50, ..Meter::default() };
    policy.dispatched(0, &mut first, seconds(0.0), rng);
    let mut second = Meter { input: 30, ..Meter::default() };
    policy.dispatched(1, &mut second, seconds(0.0), rng);
    assert_eq!(policy.next(), Some(1), "30 against 50: the floor was 0");
}

#[test]
fn vtc_token_weights_are_parameters() {
    let mut policy = policy("vtc-fair", &json!({"inputTokenWeight": 0.0, "outputTokenWeight": 1.5}));
    wake(&mut *policy, &[(0, 0.0), (1, 0.0)]);
    serves(&mut *policy, 0, 1_000, 2, 0.0);
    serves(&mut *policy, 1, 1, 3, 0.0);
    assert_eq!(policy.next(), Some(0), "3 against 4.5");
    for name in ["vtc-fair", "vtc-max-fair", "vtc-pred", "vtc-oracle"] {
        for weight in [-1.0, 1e9] {
            let error = (find(FAIRNESS, name).unwrap().build)(&json!({"inputTokenWeight": weight})).unwrap_err();
            assert!(error.to_string().contains("inputTokenWeight"), "{error}");
        }
    }
}

#[test]
fn forgotten_flow_leaves_no_state() {
    for descriptor in FAIRNESS {
        let mut policy = (descriptor.build)(&Value::Null).unwrap().fresh();
        // The last known time belongs to no flow.
        let size = |policy: &dyn Fairness| format!("{policy:?}").replace(|c: char| c.is_ascii_digit(), "").len();
        let empty = size(&*policy);
        wake(&mut *policy, &[(0, 0.0), (1, 1.0)]);
        policy.forget(0);
        assert_eq!((policy.next(), policy.last()), (Some(1), Some(1)), "{}", descriptor.name);
        policy.sleeps(1);
        policy.forget(1);
        assert_eq!((policy.next(), policy.last()), (None, None), "{}", descriptor.name);
        assert_eq!(size(&*policy), empty, "{policy:?}");
    }
}
