//! `least-work` before a pool that serves one request at a time: short work goes first, and no request waits too long.
//!
//! ```text
//! wait ≤ maxDelay + backlog at (arrival + maxDelay)
//! ```
//!
//! First come, first served would give the same wait to a request that arrives `maxDelay` later.

use super::{at, gauge};
use crate::ceiling::fixed::Fixed;
use crate::ordering::{Ordering, least_work};
use crate::*;
use attache_types::rng::for_request;
use proptest::prelude::*;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// A request: arrival and service time in ms, and its expected work in seconds.
#[derive(Clone, Copy, Debug)]
struct Comer {
    at: u64,
    takes: u64,
    thought: f64,
}

fn takes(work: f64) -> Need {
    Need { work, ..Need::default() }
}

/// The waits of all requests, ms.
fn waits(ordering: Arc<dyn Ordering>, comers: &[Comer]) -> Vec<u64> {
    let default_band = BandSettings { ordering, ..BandSettings::default() };
    let settings = Settings { default_band, ..Settings::default() };
    let mut flow: FlowControl<usize> = FlowControl::new(settings, Box::new(Fixed::default()));
    let (mut rng, mut left) = (for_request(5, 5), Vec::new());
    let mut waits = vec![0; comers.len()];
    let mut seat: Option<(u64, Passage)> = None;
    let mut coming = comers.iter().enumerate().peekable();
    loop {
        let next = coming.peek().map(|(_, comer)| comer.at);
        match seat.take() {
            Some((end, passage)) if next.is_none_or(|next| end <= next) => {
                flow.ended(passage, None, at(end));
                flow.freed(&gauge(1, 0), at(end), &mut rng, &mut left);
                for left in left.drain(..) {
                    let Left::Dispatched(_, i, mut passage) = left else { panic!("nobody is turned away") };
                    flow.landed(&mut passage);
                    waits[i] = end - comers[i].at;
                    seat = Some((end + comers[i].takes, passage));
                }
            }
            busy => {
                let Some((i, comer)) = coming.next() else { return waits };
                let arrival = Arrival { need: takes(comer.thought), ..Arrival::default() };
                let gauge = gauge(1, u32::from(busy.is_some()));
                seat = match flow.enqueue(&arrival, |_| i, &gauge, at(comer.at), &mut rng, &mut left) {
                    Verdict::Dispatch(mut passage) => {
                        flow.landed(&mut passage);
                        Some((comer.at + comer.takes, passage))
                    }
                    Verdict::Parked(_) => busy,
                    Verdict::Rejected(refusal) => panic!("{refusal:?}"),
                };
            }
        }
    }
}

/// Unfinished work at `moment`, ms, of all arrivals until then.
fn backlog(comers: &[Comer], moment: u64) -> u64 {
    let come = comers.iter().filter(|comer| comer.at <= moment);
    come.fold(0, |free, comer| free.max(comer.at) + comer.takes).saturating_sub(moment)
}

fn least_work(stretch: f64, delay: u64) -> Arc<dyn Ordering> {
    let parameters = json!({"stretch": stretch, "maxDelay": format!("{delay}ms")});
    (least_work::PLUGIN.build)(&parameters).unwrap().into()
}

proptest! {
    #[test]
    fn least_work_wait_is_bounded_for_any_estimate(
        comers in prop::collection::vec((0..300u64, 1..400u64, prop_oneof![0.0..5f64, Just(f64::NAN)]), 1..80),
        delay in 0..3_000u64, stretch in 0.0..30f64,
    ) {
        let mut clock = 0;
        let comers: Vec<Comer> = comers.into_iter().map(|(gap, takes, thought)| {
            clock += gap;
            Comer { at: clock, takes, thought }
        }).collect();
        for (comer, wait) in comers.iter().zip(waits(least_work(stretch, delay), &comers)) {
            let bound = delay + backlog(&comers, comer.at + delay);
            prop_assert!(wait <= bound, "{comer:?} waits {wait} ms, more than {bound}");
        }
    }
}

#[test]
fn least_work_long_prompt_waits_for_short_ones_within_bound() {
    let mut comers = vec![Comer { at: 0, takes: 1_000, thought: 1.0 }, Comer { at: 1, takes: 10_000, thought: 10.0 }];
    comers.extend((0..100).map(|i| Comer { at: 10 + i, takes: 20, thought: 0.02 }));
    // Then more short requests than the pool can serve.
    comers.extend((0..2_000).map(|i| Comer { at: 1_000 + 10 * i, takes: 20, thought: 0.02 }));
    let fcfs: Arc<dyn Ordering> = Arc::new(crate::ordering::fcfs::Fcfs);
    let (fair, ours) = (waits(fcfs, &comers), waits(least_work(10.0, 10_000), &comers));
    let mean = |waits: &[u64]| waits[2..102].iter().sum::<u64>() / 100;
    assert!(mean(&ours) * 5 < mean(&fair), "{} and {} ms", mean(&ours), mean(&fair));
    // It goes before all that arrive more than 10 s later.
    let done = comers.iter().zip(&ours).skip(2).filter(|(comer, wait)| comer.at + **wait < 1 + ours[1]);
    assert!(ours[1] > 10_000 && done.clone().all(|(comer, _)| comer.at <= 10_001), "{} ms", ours[1]);
    assert!(done.count() > 500);
}

#[test]
fn short_prompt_before_long_head_is_dispatched_at_once() {
    let default_band = BandSettings { ordering: least_work(1.0, 10_000), ..BandSettings::default() };
    let settings = Settings { default_band, ..Settings::default() };
    let mut flow: FlowControl<&str> = FlowControl::new(settings, Box::new(Fixed::default()));
    let (mut rng, mut left) = (for_request(5, 5), Vec::new());
    let long = saturation::Long { from: 1.0, ways: gauge(1, 1).ways };
    let gauge = Gauge { long: Some(long), ..gauge(2, 1) };
    for (name, work, goes) in [("long", 5.0, false), ("short", 0.1, true), ("another", 0.1, false)] {
        let arrival = Arrival { need: takes(work), ..Arrival::default() };
        let verdict = flow.enqueue(&arrival, |_| name, &gauge, at(0), &mut rng, &mut left);
        assert!(matches!(verdict, Verdict::Parked(_)), "{verdict:?}");
        let went = matches!(left.pop(), Some(Left::Dispatched(_, who, _)) if who == name);
        assert_eq!(went, goes, "{name}");
    }
}

#[test]
fn long_prompt_at_head_dispatched_after_one_second() {
    let mut flow: FlowControl<()> = FlowControl::new(Settings::default(), Box::new(Fixed::default()));
    let (mut rng, mut left) = (for_request(7, 7), Vec::new());
    let mut comes = |flow: &mut FlowControl<()>, work: f64, gauge: &Gauge, ms: u64, left: &mut Vec<_>| {
        flow.enqueue(&Arrival { need: takes(work), ..Arrival::default() }, |_| (), gauge, at(ms), &mut rng, left)
    };
    // Traffic that bypasses the queue keeps the pool above the limit for long prompts.
    let busy = Gauge { long: Some(saturation::Long { from: 0.025, ways: Gauge::FULL.ways }), ..gauge(10, 1) };
    assert!(matches!(comes(&mut flow, 5.0, &busy, 0, &mut left), Verdict::Parked(_)));
    // It is at the head from the first check on. A later short request does not overtake it, and a second long one
    // does not wait for another second.
    assert!(matches!(comes(&mut flow, 0.0, &busy, 500, &mut left), Verdict::Parked(_)));
    assert!(matches!(comes(&mut flow, 5.0, &busy, 700, &mut left), Verdict::Parked(_)));
    let mut rng = for_request(8, 8);
    flow.freed(&busy, at(1_499), &mut rng, &mut left);
    assert!(left.is_empty());
    flow.freed(&busy, at(1_500), &mut rng, &mut left);
    let waits: Vec<Duration> = left
        .drain(..)
        .map(|left| {
            let Left::Dispatched(_, (), passage) = left else { panic!("nobody is turned away") };
            let waited = passage.waited;
            flow.ended(passage, None, at(1_500));
            waited
        })
        .collect();
    assert_eq!(waits, [1_500, 1_000, 800].map(Duration::from_millis));
    // The exception ends with that request.
    assert!(matches!(comes(&mut flow, 5.0, &busy, 1_600, &mut left), Verdict::Parked(_)));
    flow.freed(&busy, at(1_700), &mut rng, &mut left);
    assert!(left.is_empty());
    flow.freed(&gauge(10, 1), at(1_800), &mut rng, &mut left);
    let Some(Left::Dispatched(_, (), passage)) = left.pop() else { panic!("the pool has capacity") };
    flow.ended(passage, None, at(1_800));
    // The exception does not apply to a pool that is full for short requests too.
    assert!(matches!(comes(&mut flow, 5.0, &Gauge::FULL, 2_000, &mut left), Verdict::Parked(_)));
    flow.freed(&Gauge::FULL, at(9_000), &mut rng, &mut left);
    assert!(left.is_empty());
}
