//! Predicted and real number of requests before a newcomer.

use super::{at, band, gauge, of};
use crate::ceiling::fixed::Fixed;
use crate::*;
use attache_types::clock::Timestamp;
use attache_types::rng::{PickRng, for_request};
use proptest::prelude::*;

const FLOWS: [&str; 4] = ["a", "b", "c", "d"];

/// A pool that serves one request at a time, which is busy.
struct Queue {
    flow: FlowControl<u32>,
    seat: Option<Passage>,
    rng: PickRng,
}

impl Queue {
    fn new(fairness: &str, ordering: &str) -> Self {
        let settings = Settings {
            default_band: BandSettings { max_requests: u64::MAX, ..band(fairness, ordering) },
            max_requests: u64::MAX,
            max_flows: FLOWS.len(),
            ..Settings::default()
        };
        let mut flow = FlowControl::new(settings, Box::new(Fixed::default()));
        let mut rng = for_request(1, 1);
        let first = flow.enqueue(&of("a"), |_| 0, &gauge(1, 0), at(0), &mut rng, &mut Vec::new());
        let Verdict::Dispatch(mut first) = first else { panic!("{first:?}") };
        flow.landed(&mut first);
        Self { flow, seat: Some(first), rng }
    }

    fn ahead(&mut self, arrival: &Arrival<'_>) -> u64 {
        let (above, before) = self.flow.ahead(arrival, &gauge(1, 1), at(1)).unwrap();
        above + before
    }

    fn waits(&mut self, number: u32, arrival: &Arrival<'_>) {
        let verdict = self.flow.enqueue(arrival, |_| number, &gauge(1, 1), at(1), &mut self.rng, &mut Vec::new());
        assert!(matches!(verdict, Verdict::Parked(_)), "{verdict:?}");
    }

    /// Number of requests that are dispatched before the one with this number.
    fn turns_before(mut self, number: u32) -> u64 {
        (0..).find(|_| self.turn(at(2)) == number).unwrap()
    }

    /// Ends the running request and returns the number of the next one.
    fn turn(&mut self, now: Timestamp) -> u32 {
        let mut left = Vec::new();
        let passage = self.seat.take().unwrap();
        self.flow.ended(passage, None, now);
        self.flow.freed(&gauge(1, 0), now, &mut self.rng, &mut left);
        let Some(Left::Dispatched(_, next, mut passage)) = left.pop() else { panic!("{left:?}") };
        self.flow.landed(&mut passage);
        self.seat = Some(passage);
        next
    }
}

fn due(flow: &'static str, spare: Option<f64>) -> Arrival<'static> {
    Arrival { spare, ..of(flow) }
}

#[test]
fn ahead_flood_of_one_flow_counts_once_for_others() {
    for (fairness, of_another, of_the_flood) in
        [("vtc-fair", 1, 500), ("round-robin", 1, 500), ("global-strict", 500, 500)]
    {
        let mut queue = Queue::new(fairness, "fcfs");
        (1..=500).for_each(|number| queue.waits(number, &of("a")));
        assert_eq!(queue.ahead(&of("b")), of_another, "{fairness}");
        assert_eq!(queue.ahead(&of("a")), of_the_flood, "{fairness}");
        assert_eq!(queue.ahead(&Arrival { priority: 1, ..of("a") }), 0, "{fairness}: a band above");
        assert_eq!(queue.ahead(&Arrival { priority: -1, ..of("b") }), 500, "{fairness}: a band below");
    }
}

#[test]
fn ahead_more_urgent_request_is_first() {
    for fairness in ["vtc-fair", "global-strict"] {
        let mut queue = Queue::new(fairness, "slo-urgency");
        (1..=20).for_each(|number| queue.waits(number, &due("a", None)));
        queue.waits(21, &due("a", Some(1.0)));
        for (spare, ahead) in [(Some(0.5), 0), (Some(2.0), 1), (None, 21)] {
            assert_eq!(queue.ahead(&due("a", spare)), ahead, "{fairness} {spare:?}");
        }
    }
}

#[test]
fn wait_uses_dequeue_rate_of_own_band_below_busy_bands() {
    let mut queue = Queue::new("global-strict", "fcfs");
    let urgent = Arrival { priority: 10, ..of("a") };
    let wait = |queue: &mut Queue, arrival: &Arrival<'_>| {
        queue.flow.wait(arrival, &gauge(1, 1), at(10_001)).unwrap().as_secs_f64()
    };
    (0..20).for_each(|number| queue.waits(number, &of("a")));
    // Ten dequeued requests a second, nine of them of the band above.
    for turn in 0..100u64 {
        let now = Timestamp(at(1).0 + (turn + 1) * 100_000_000);
        if turn % 10 != 0 {
            let verdict = queue.flow.enqueue(&urgent, |_| 99, &gauge(1, 1), now, &mut queue.rng, &mut Vec::new());
            assert!(matches!(verdict, Verdict::Parked(_)), "{verdict:?}");
        }
        queue.turn(now);
    }
    assert!(wait(&mut queue, &urgent) < 0.2);
    let usual = wait(&mut queue, &of("a"));
    assert!((9.0..14.0).contains(&usual), "ten wait, and one has its turn a second: {usual}");
}

#[test]
fn ahead_deep_queue_is_never_underestimated() {
    let mut queue = Queue::new("global-strict", "slo-urgency");
    for number in 1..=10_000 {
        queue.waits(number, &due("a", Some(f64::from(number))));
    }
    for (spare, least, most) in [(10.5, 10, 10), (9_990.5, 9_990, 9_990), (5_000.5, 5_000, 9_000)] {
        let ahead = queue.ahead(&due("a", Some(spare)));
        assert!((least..=most).contains(&ahead), "{spare}: {ahead}");
    }
}

proptest! {
    /// Exact without turns, and with turns of one request each for a flow that has nothing
    /// queued. Otherwise never too low.
    #[test]
    fn ahead_prediction_is_exact_or_upper_bound(
        waiting in prop::collection::vec((0..FLOWS.len() + 1, prop::option::of(0.0..9.0)), 0..60),
        newcomer in (0..FLOWS.len() + 1, prop::option::of(0.0..9.0)), turns: bool, urgency: bool,
    ) {
        let ordering = if urgency { "slo-urgency" } else { "fcfs" };
        let mut queue = Queue::new(if turns { "round-robin" } else { "global-strict" }, ordering);
        // One more name than the limit of flows.
        let arrival = |(flow, spare): (usize, Option<f64>)| due(FLOWS.get(flow).copied().unwrap_or("e"), spare);
        for (number, one) in (1..).zip(&waiting) {
            queue.waits(number, &arrival(*one));
        }
        let told = queue.ahead(&arrival(newcomer));
        queue.waits(1_000, &arrival(newcomer));
        let came = queue.turns_before(1_000);
        let is_new = waiting.iter().all(|(flow, _)| *flow != newcomer.0);
        prop_assert!(came <= told && (came == told || turns && !is_new), "{told} told, {came} came");
    }
}
