//! Flow control as a whole: its guarantees on random histories, and small histories that can be followed by hand.

use super::ceiling::fixed::Fixed;
use super::fairness::Fairness;
use super::registry::{CEILINGS, FAIRNESS, ORDERINGS, find};
use super::saturation::{StageSaturation, Ways};
use super::*;
use attache_types::clock::Timestamp;
use attache_types::rng::{PickRng, for_request};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;

mod ahead;
mod bounds;
mod eviction;
mod histories;
mod late_binding;
mod running;

/// A pool with capacity for `capacity` requests, of which `running` are in the ledger.
pub(super) fn gauge(capacity: u32, running: u32) -> Gauge {
    let one = 1.0 / f64::from(capacity);
    let answers = StageSaturation { requests: (f64::from(running) * one, one), ..StageSaturation::default() };
    Gauge { ways: Ways::whole(answers), long: None, delay: None }
}

pub(super) fn fairness(name: &str, parameters: &Value) -> Arc<dyn Fairness> {
    (find(FAIRNESS, name).unwrap().build)(parameters).unwrap().into()
}

fn band(fairness_name: &str, ordering: &str) -> BandSettings {
    let ordering = (find(ORDERINGS, ordering).unwrap().build)(&Value::Null).unwrap().into();
    BandSettings { ordering, fairness: fairness(fairness_name, &Value::Null), ..BandSettings::default() }
}

pub(super) fn at(ms: u64) -> Timestamp {
    Timestamp(1_000_000_000 + ms * 1_000_000)
}

/// A pool that serves one request at a time, and its queues. Requests have names.
struct Trial {
    flow: FlowControl<&'static str>,
    running: Vec<Passage>,
    capacity: u32,
    rng: PickRng,
    left: Vec<Left<&'static str>>,
}

impl Trial {
    fn new(settings: Settings) -> Self {
        let (running, left) = (Vec::new(), Vec::new());
        Self {
            flow: FlowControl::new(settings, Box::new(Fixed::default())),
            running,
            capacity: 1,
            rng: for_request(1, 1),
            left,
        }
    }

    fn gauge(&self) -> Gauge {
        gauge(self.capacity, u32::try_from(self.running.len()).unwrap())
    }

    /// The outcome of an arrival: "goes", "waits", or the cause of the refusal.
    fn comes(&mut self, name: &'static str, arrival: Arrival<'_>, ms: u64) -> String {
        let gauge = self.gauge();
        match self.flow.enqueue(&arrival, |_| name, &gauge, at(ms), &mut self.rng, &mut self.left) {
            Verdict::Dispatch(mut passage) => {
                self.flow.landed(&mut passage);
                self.running.push(passage);
                "goes".into()
            }
            Verdict::Parked(_) => "waits".into(),
            Verdict::Rejected(refusal) => format!("{:?}", refusal.cause),
        }
    }

    /// Ends the oldest request in flight after `output` tokens; returns the requests that are dispatched then.
    fn ends(&mut self, output: u32, ms: u64) -> Vec<String> {
        let mut passage = self.running.remove(0);
        self.flow.answered(&mut passage, output, at(ms));
        self.flow.ended(passage, None, at(ms));
        let gauge = self.gauge();
        self.flow.freed(&gauge, at(ms), &mut self.rng, &mut self.left);
        self.told()
    }

    /// Requests that have left the queue since the last call: "name", or "name: cause".
    fn told(&mut self) -> Vec<String> {
        let left = std::mem::take(&mut self.left);
        left.into_iter()
            .map(|left| match left {
                Left::Dispatched(_, name, mut passage) => {
                    self.flow.landed(&mut passage);
                    self.running.push(passage);
                    name.to_owned()
                }
                Left::Refused(_, name, refusal) => format!("{name}: {:?}", refusal.cause),
            })
            .collect()
    }
}

fn of(flow: &str) -> Arrival<'_> {
    Arrival { flow, prompt_tokens: 10, bytes: 100, ..Arrival::default() }
}

fn important(priority: i32) -> Arrival<'static> {
    Arrival { priority, ..of("a") }
}

#[test]
fn sheddable_priority_has_lower_ceiling() {
    let sheddable = BandSettings { max_requests: 1, ..BandSettings::default() };
    let bands = [(-2, BandSettings::default())].into();
    let mut trial = Trial::new(Settings { sheddable_band: Some(sheddable), bands, ..Settings::default() });
    assert_eq!(trial.comes("running", important(0), 0), "goes");
    for (priority, second) in [(-1, "BandFull"), (-2, "waits"), (0, "waits")] {
        assert_eq!(trial.comes("first", important(priority), 1), "waits");
        assert_eq!(trial.comes("second", important(priority), 1), second, "{priority}");
    }
}

#[test]
fn higher_band_is_dispatched_first() {
    let mut trial = Trial::new(Settings::default());
    assert_eq!(trial.comes("running", important(0), 0), "goes");
    for (name, priority) in [("batch", -1), ("usual", 0), ("urgent", 7), ("usual too", 0), ("urgent too", 7)] {
        assert_eq!(trial.comes(name, important(priority), 1), "waits");
    }
    assert_eq!(trial.flow.bands().collect::<Vec<_>>(), [(7, 2, 200), (0, 2, 200), (-1, 1, 100)]);
    let order: Vec<String> = (0..5).flat_map(|i| trial.ends(1, 2 + i)).collect();
    assert_eq!(order, ["urgent", "urgent too", "usual", "usual too", "batch"]);
    assert!(trial.flow.is_empty() && trial.flow.bytes() == 0);
}

#[test]
fn pending_requests_take_capacity() {
    let mut flow: FlowControl<()> = FlowControl::new(Settings::default(), Box::new(Fixed::default()));
    let (mut rng, mut left) = (for_request(1, 1), Vec::new());
    // The ledger is empty: five requests arrive before the first is booked.
    let verdicts: Vec<_> =
        (0..5).map(|_| flow.enqueue(&of("a"), |_| (), &gauge(3, 0), at(0), &mut rng, &mut left)).collect();
    assert_eq!(verdicts.iter().filter(|v| matches!(v, Verdict::Dispatch(_))).count(), 3);
    assert_eq!(flow.pending(), Load { requests: 3, tokens: 30 });
    // One request moves to the ledger, so the sum is unchanged.
    let mut passages = verdicts.into_iter().filter_map(|v| if let Verdict::Dispatch(p) = v { Some(p) } else { None });
    let mut first = passages.next().unwrap();
    flow.landed(&mut first);
    flow.landed(&mut first);
    flow.freed(&gauge(3, 1), at(1), &mut rng, &mut left);
    assert!(left.is_empty());
    // One client disconnects before its request is booked, which frees capacity.
    flow.ended(passages.next().unwrap(), None, at(2));
    flow.freed(&gauge(3, 1), at(2), &mut rng, &mut left);
    assert!(matches!(left.as_slice(), [Left::Dispatched(..)]) && flow.len() == 1);
}

#[test]
fn queued_request_expires_with_retry_after() {
    let settings = Settings { ttl: Some(Duration::from_secs(2)), ..Settings::default() };
    let mut trial = Trial::new(settings);
    trial.comes("running", of("a"), 0);
    trial.comes("patient", Arrival { ttl: Some(Duration::from_secs(9)), ..of("a") }, 0);
    trial.comes("usual", of("a"), 0);
    assert_eq!(trial.flow.next_deadline(), Some(at(2_000)));
    trial.flow.expire(at(1_999), &mut trial.left);
    assert!(trial.told().is_empty());
    trial.flow.expire(at(2_000), &mut trial.left);
    assert_eq!(trial.told(), ["usual: Expired"]);
    // An expired request is not dispatched, even if no timer has fired.
    assert_eq!(trial.ends(1, 9_000), ["patient: Expired"]);
    assert_eq!(trial.comes("late", of("a"), 9_001), "goes");
}

#[test]
fn request_without_ttl_expires_only_in_empty_pool() {
    let mut trial = Trial::new(Settings { empty_ttl: Duration::from_secs(60), ..Settings::default() });
    assert_eq!(trial.comes("running", of("a"), 0), "goes");
    assert_eq!(trial.comes("early", of("a"), 0), "waits");
    assert_eq!(trial.comes("hasty", Arrival { ttl: Some(Duration::from_secs(7_230)), ..of("a") }, 0), "waits");
    trial.flow.expire(at(7_199_000), &mut trial.left);
    assert_eq!(trial.told(), Vec::<String>::new(), "two hours do not expire it");
    // The last endpoint disappears for half a minute, and later for good.
    for (ms, serves) in [(7_200_000, false), (7_210_000, false), (7_235_000, true), (7_300_000, false)] {
        trial.flow.pool_serves(serves, at(ms));
        trial.flow.expire(at(ms + 1), &mut trial.left);
    }
    assert_eq!(trial.told(), ["hasty: Expired"], "it has a ttl of its own");
    assert_eq!(trial.comes("late", of("a"), 7_320_000), "waits");
    assert_eq!(trial.flow.next_deadline(), Some(at(7_360_000)));
    trial.flow.expire(at(7_359_999), &mut trial.left);
    assert_eq!(trial.told(), Vec::<String>::new());
    trial.flow.expire(at(7_360_000), &mut trial.left);
    assert_eq!(trial.told(), ["early: Expired"]);
    // A later request has waited for less, and a returning endpoint resets the time.
    assert_eq!(trial.flow.next_deadline(), Some(at(7_380_000)));
    trial.flow.pool_serves(true, at(7_379_999));
    trial.flow.expire(at(9_000_000), &mut trial.left);
    assert_eq!(trial.told(), Vec::<String>::new());
    assert_eq!(trial.ends(1, 9_000_001), ["late"]);
}

#[test]
fn way_of_serving_selects_saturation() {
    let stage = |running: u32| StageSaturation { requests: (f64::from(running), 1.0), ..StageSaturation::default() };
    // The prefill workers are full.
    let ways = Ways { whole: Some(stage(0)), pair: Some([stage(1), stage(0)]) };
    for (name, way, gauge, goes) in [
        ("either", Way::Either, ways, true),
        ("whole", Way::Whole, ways, true),
        ("pair", Way::Pair, ways, false),
        ("either way is full", Way::Either, Ways { whole: Some(stage(1)), ..ways }, false),
        ("no pair", Way::Pair, Ways { pair: None, ..ways }, true),
        ("no whole", Way::Whole, Ways { whole: None, pair: Some([stage(0), stage(0)]) }, true),
        ("no whole, full", Way::Either, Ways { whole: None, ..ways }, false),
        ("nothing", Way::Either, Ways { whole: None, pair: None }, false),
    ] {
        let mut flow = FlowControl::<()>::new(Settings::default(), Box::new(Fixed::default()));
        let arrival = Arrival { need: Need { way, ..Need::default() }, ..of("a") };
        let gauge = Gauge { ways: gauge, long: None, delay: None };
        let verdict = flow.enqueue(&arrival, |_| (), &gauge, at(0), &mut for_request(1, 1), &mut Vec::new());
        assert_eq!(matches!(verdict, Verdict::Dispatch(_)), goes, "{name}: {verdict:?}");
        // A further check does not dispatch it either: only its own need makes the pool full.
        let mut left = Vec::new();
        flow.freed(&gauge, at(1), &mut for_request(1, 1), &mut left);
        assert!(left.is_empty(), "{name}");
    }
}

#[test]
fn band_ttl_limits_wait() {
    let patient = BandSettings { ttl: Some(Duration::from_secs(9)), ..BandSettings::default() };
    let settings = Settings { bands: [(-1, patient)].into(), ttl: Some(Duration::from_secs(1)), ..Settings::default() };
    let mut trial = Trial::new(settings);
    assert_eq!(trial.comes("running", important(0), 0), "goes");
    for (name, priority) in [("batch", -1), ("usual", 0)] {
        assert_eq!(trial.comes(name, important(priority), 0), "waits");
    }
    trial.flow.expire(at(1_000), &mut trial.left);
    assert_eq!(trial.told(), ["usual: Expired"]);
    trial.flow.expire(at(8_999), &mut trial.left);
    assert_eq!(trial.told(), Vec::<String>::new());
    trial.flow.expire(at(9_000), &mut trial.left);
    assert_eq!(trial.told(), ["batch: Expired"]);
}

#[test]
fn retry_after_follows_dequeue_rate_of_band() {
    let mut trial = Trial::new(Settings {
        default_band: BandSettings { max_requests: 6, ..BandSettings::default() },
        ..Settings::default()
    });
    trial.comes("running", of("a"), 0);
    // One request leaves every two seconds, and six stay queued.
    for second in 0..60 {
        while trial.flow.len() < 6 {
            assert_eq!(trial.comes("one", of("a"), second * 1_000), "waits");
        }
        if second % 2 == 0 {
            assert_eq!(trial.ends(1, second * 1_000).len(), 1);
        }
    }
    let gauge = trial.gauge();
    let verdict = trial.flow.enqueue(&of("a"), |_| "no", &gauge, at(60_000), &mut trial.rng, &mut trial.left);
    let Verdict::Rejected(refusal) = verdict else { panic!("{verdict:?}") };
    assert_eq!(refusal.cause, Cause::BandFull);
    // Six requests at one departure every two seconds.
    assert!((11..=13).contains(&refusal.retry_after.as_secs()), "{refusal:?}");
    // A band without departures gives the longest value.
    trial.comes("batch", important(-1), 60_000);
    assert_eq!(trial.flow.clears(-1, at(60_001)), pace::LONGEST_RETRY);
}

#[test]
fn idle_time_before_burst_does_not_raise_retry_after() {
    let default_band = BandSettings { max_requests: 100, ..BandSettings::default() };
    let mut trial = Trial::new(Settings { default_band, ..Settings::default() });
    // Five minutes with few arrivals.
    for second in (0..300).step_by(10) {
        assert_eq!(trial.comes("one", of("a"), second * 1_000), "goes");
        trial.ends(1, second * 1_000 + 10);
    }
    // Then five arrive for each one that leaves, every 10 ms.
    let (refused, ms) = (300_000..)
        .step_by(10)
        .find_map(|ms| {
            let full = (0..5).map(|_| trial.comes("one", of("a"), ms)).find(|what| what == "BandFull");
            trial.ends(1, ms);
            full.map(|what| (what, ms))
        })
        .unwrap();
    assert_eq!(refused, "BandFull");
    let retry_after = trial.flow.clears(0, at(ms));
    assert!(retry_after <= Duration::from_secs(2), "a hundred go in a second: {retry_after:?}");
}

#[test]
fn ceiling_keeps_capacity_for_higher_band() {
    let holdback = (find(CEILINGS, "holdback").unwrap().build)(&json!({"minCeiling": 0.5})).unwrap();
    let mut flow: FlowControl<&str> = FlowControl::new(Settings::default(), holdback);
    let (mut rng, mut left) = (for_request(1, 1), Vec::new());
    let mut comes = |flow: &mut FlowControl<&'static str>, priority| {
        matches!(
            flow.enqueue(&important(priority), |_| "", &gauge(4, 0), at(0), &mut rng, &mut left),
            Verdict::Dispatch(_)
        )
    };
    // Capacity is kept for the band above once a request of it has arrived.
    assert!(comes(&mut flow, 1));
    let low: Vec<bool> = (0..3).map(|_| comes(&mut flow, -1)).collect();
    assert_eq!(low, [true, false, false], "half of four seats");
    let high: Vec<bool> = (0..3).map(|_| comes(&mut flow, 1)).collect();
    assert_eq!(high, [true, true, false]);
}

#[test]
fn ceiling_keeps_no_capacity_for_idle_band() {
    let holdback = (find(CEILINGS, "holdback").unwrap().build)(&json!({"minCeiling": 0.5})).unwrap();
    let settings = Settings { flow_idle: Duration::from_secs(10), ..Settings::default() };
    let mut flow: FlowControl<&str> = FlowControl::new(settings, holdback);
    let (mut rng, mut left) = (for_request(1, 1), Vec::new());
    let mut comes = |flow: &mut FlowControl<&'static str>, priority, running, ms| {
        flow.enqueue(&important(priority), |_| "", &gauge(4, running), at(ms), &mut rng, &mut left)
    };
    let Verdict::Dispatch(urgent) = comes(&mut flow, 1, 0, 0) else { panic!("the pool has capacity") };
    flow.ended(urgent, None, at(1));
    assert!(matches!(comes(&mut flow, -1, 2, 10_000), Verdict::Parked(_)), "two of four seats are kept");
    // Only arrivals advance the time.
    assert!(matches!(comes(&mut flow, -1, 2, 10_001), Verdict::Dispatch(_)));
    assert_eq!(flow.bands().map(|(priority, ..)| priority).collect::<Vec<_>>(), [-1]);
}

#[test]
fn long_flow_names_are_hashed_and_stay_distinct() {
    let settings = Settings { default_band: band("round-robin", "fcfs"), ..Settings::default() };
    let mut trial = Trial::new(settings);
    let long = "x".repeat(1 << 20);
    let (a, b) = (format!("{long}a"), format!("{long}b"));
    trial.comes("running", of("flow"), 0);
    for (name, flow) in [("a1", &a), ("a2", &a), ("b1", &b)] {
        assert_eq!(trial.comes(name, of(flow), 1), "waits");
    }
    assert!(format!("{:?}", trial.flow).len() < 100_000);
    let order: Vec<String> = (0..3).flat_map(|i| trial.ends(1, 2 + i)).collect();
    assert_eq!(order, ["a1", "b1", "a2"]);
}

#[test]
fn names_beyond_limit_share_one_flow_idle_flows_forgotten() {
    let default_band = band("round-robin", "fcfs");
    let settings = Settings { default_band, max_flows: 2, flow_idle: Duration::from_secs(10), ..Settings::default() };
    let mut trial = Trial::new(settings);
    trial.comes("running", of("a"), 0);
    for (name, flow) in [("a1", "a"), ("a2", "a"), ("b1", "b"), ("c1", "c"), ("d1", "d"), ("c2", "c")] {
        trial.comes(name, of(flow), 1);
    }
    let order: Vec<String> = (0..6).flat_map(|i| trial.ends(1, 2 + i)).collect();
    assert_eq!(order, ["a1", "b1", "c1", "a2", "d1", "c2"]);
    assert_eq!(trial.ends(1, 10), [""; 0]);
    // b has been idle since 4 ms, when b1 ended; all are by now.
    assert_eq!(trial.flow.next_deadline(), Some(at(10_004)));
    trial.flow.expire(at(10_004), &mut trial.left);
    assert_eq!(trial.flow.next_deadline(), Some(at(10_006)));
    assert_eq!(trial.flow.bands().count(), 1);
    trial.flow.expire(at(10_010), &mut trial.left);
    assert_eq!((trial.flow.next_deadline(), trial.flow.bands().count()), (None, 0));
}

#[test]
fn least_work_short_prompts_overtake_long_one() {
    let default_band = band("global-strict", "least-work");
    let mut trial = Trial::new(Settings { default_band, ..Settings::default() });
    let work = |seconds| Arrival { need: Need { work: seconds, ..Need::default() }, ..of("a") };
    trial.comes("running", work(1.0), 0);
    trial.comes("long", work(4.0), 1);
    for name in ["s1", "s2", "s3"] {
        trial.comes(name, work(0.05), 100);
    }
    trial.comes("much later", work(0.05), 11_000);
    let order: Vec<String> = (0..5).flat_map(|i| trial.ends(1, 11_001 + i)).collect();
    assert_eq!(order, ["s1", "s2", "s3", "long", "much later"]);
}

#[test]
fn handle_is_never_reused() {
    let mut flow: FlowControl<u32> = FlowControl::new(Settings::default(), Box::new(Fixed::default()));
    let (mut rng, mut left) = (for_request(1, 1), Vec::new());
    let mut park = |flow: &mut FlowControl<u32>, number: u32| match flow.enqueue(
        &of("a"),
        |_| number,
        &Gauge::FULL,
        at(0),
        &mut rng,
        &mut left,
    ) {
        Verdict::Parked(handle) => handle,
        other => panic!("{other:?}"),
    };
    let first = park(&mut flow, 1);
    assert_eq!((flow.cancel(first, at(1)), flow.cancel(first, at(1))), (Some(1), None));
    let second = park(&mut flow, 2);
    assert_ne!(first, second);
    assert_eq!((flow.cancel(first, at(2)), flow.len()), (None, 1));
    assert_eq!(flow.cancel(second, at(2)), Some(2));
    assert!(flow.is_empty() && flow.bytes() == 0);
}

#[test]
fn flow_not_charged_for_undispatched_prompt() {
    for (lands, expected) in [(true, ["a1", "b1"]), (false, ["a1", "a2"])] {
        let default_band = BandSettings { fairness: fairness("vtc-fair", &Value::Null), ..BandSettings::default() };
        let settings = Settings { default_band, ..Settings::default() };
        let mut flow: FlowControl<&str> = FlowControl::new(settings, Box::new(Fixed::default()));
        let (mut rng, mut left) = (for_request(3, 3), Vec::new());
        for name in ["a1", "b1", "a2", "b2"] {
            let arrival = Arrival { flow: &name[..1], prompt_tokens: 1_000, ..Arrival::default() };
            let verdict = flow.enqueue(&arrival, |_| name, &Gauge::FULL, at(0), &mut rng, &mut left);
            assert!(matches!(verdict, Verdict::Parked(_)));
        }
        let went = [1, 2].map(|ms| {
            flow.freed(&gauge(1, 0), at(ms), &mut rng, &mut left);
            let Some(Left::Dispatched(_, name, mut passage)) = left.pop() else { panic!("its turn has come") };
            if lands {
                flow.landed(&mut passage);
            }
            flow.ended(passage, None, at(ms));
            name
        });
        assert_eq!(went, expected, "lands: {lands}");
    }
}
