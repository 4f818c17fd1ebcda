//! Random histories: no request is lost or returned twice, limits hold, bands are strict, capacity is used, and
//! no state is left over.

use super::{at, fairness, gauge};
use crate::ceiling::fixed::Fixed;
use crate::registry::{FAIRNESS, ORDERINGS};
use crate::*;
use attache_types::rng::for_request;
use proptest::prelude::*;
use serde_json::Value;
use std::collections::BTreeMap;
use std::time::Duration;

#[derive(Clone, Debug)]
enum Op {
    Comes { priority: i32, flow: u8, bytes: u64, prompt: u32, ttl: Option<u64>, ttft: Option<u64>, work: f64 },
    Expiry(usize),
    Passes(u64),
    Lands(usize),
    Answers(usize, u32),
    Ends(usize, bool),
    Grows(u32),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (-2..=2i32, 0..5u8, 0..400u64, 0..100u32, prop::option::of(0..200u64), prop::option::of(0..200u64), 0.0..5.0f64)
            .prop_map(|(priority, flow, bytes, prompt, ttl, ttft, work)| Op::Comes { priority, flow, bytes, prompt, ttl, ttft, work }),
        1 => any::<usize>().prop_map(Op::Expiry),
        2 => (0..60u64).prop_map(Op::Passes),
        2 => any::<usize>().prop_map(Op::Lands),
        2 => (any::<usize>(), 0..50u32).prop_map(|(i, n)| Op::Answers(i, n)),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(i, told)| Op::Ends(i, told)),
        1 => (1..6u32).prop_map(Op::Grows),
    ]
}

#[derive(Debug)]
struct Waiting {
    handle: Option<Handle>,
    priority: i32,
    bytes: u64,
    deadline: u64,
}

/// A plain model of the expected state.
struct Model {
    flow: FlowControl<u64>,
    settings: Settings,
    waiting: BTreeMap<u64, Waiting>,
    running: Vec<(Passage, bool)>,
    capacity: u32,
    next: u64,
    now: u64,
    left: Vec<Left<u64>>,
}

impl Model {
    fn gauge(&self) -> Gauge {
        let booked = self.running.iter().filter(|(_, landed)| *landed).count();
        gauge(self.capacity, u32::try_from(booked).unwrap())
    }

    /// Checks each request that has left the queue, and updates the model.
    fn settle(&mut self) {
        let mut dispatched = Vec::new();
        for left in std::mem::take(&mut self.left) {
            match left {
                Left::Dispatched(handle, number, passage) => {
                    let was = self.waiting.remove(&number).expect("waited, and left once");
                    assert!(was.handle.is_none_or(|h| h == handle));
                    assert!(was.deadline > self.now, "no expired request is dispatched");
                    dispatched.push(was.priority);
                    self.running.push((passage, false));
                }
                Left::Refused(handle, number, refusal) => {
                    let was = self.waiting.remove(&number).expect("waited, and left once");
                    assert!(was.handle.is_none_or(|h| h == handle));
                    assert!((pace::SHORTEST_RETRY..=pace::LONGEST_RETRY).contains(&refusal.retry_after));
                    match refusal.cause {
                        Cause::Expired => assert!(was.deadline <= self.now),
                        Cause::Evicted => {}
                        other => panic!("{other:?} is told at once"),
                    }
                }
            }
        }
        assert!(dispatched.is_sorted_by(|a, b| a >= b), "higher bands first: {dispatched:?}");
        let highest = self.waiting.values().map(|w| w.priority).max();
        assert!(dispatched.iter().all(|p| highest.is_none_or(|h| *p >= h)), "{highest:?} still waits: {dispatched:?}");
    }

    /// Invariants between calls.
    fn check(&self, looked: bool) {
        let flow = &self.flow;
        assert_eq!(flow.len(), self.waiting.len());
        assert_eq!(flow.bytes(), self.waiting.values().map(|w| w.bytes).sum::<u64>());
        assert!(flow.len() as u64 <= self.settings.max_requests && flow.bytes() <= self.settings.max_bytes);
        for (priority, requests, bytes) in flow.bands() {
            let settings = self.settings.band(priority);
            assert!(requests <= settings.max_requests && bytes <= settings.max_bytes);
            let mine = || self.waiting.values().filter(|w| w.priority == priority);
            assert_eq!((requests, bytes), (mine().count() as u64, mine().map(|w| w.bytes).sum()));
        }
        let on_the_way = self.running.iter().filter(|(_, landed)| !landed).count();
        assert_eq!(flow.pending().requests as usize, on_the_way);
        if looked && !flow.is_empty() {
            assert!(
                self.gauge().saturation(flow.pending(), Need::default()) >= 1.0,
                "somebody waits though there is gauge"
            );
        }
    }

    fn run(&mut self, op: Op, rng: &mut attache_types::rng::PickRng) {
        let now = at(self.now);
        let gauge = self.gauge();
        let looked = matches!(op, Op::Comes { .. } | Op::Ends(..));
        match op {
            Op::Comes { priority, flow, bytes, prompt, ttl, ttft, work } => {
                let (number, name, ms) = (self.next, format!("flow {flow}"), Duration::from_millis);
                self.next += 1;
                let arrival = Arrival {
                    priority,
                    flow: &name,
                    bytes,
                    prompt_tokens: prompt,
                    answer_tokens: Some(prompt),
                    need: Need { work, ..Need::default() },
                    ttl: ttl.map(ms),
                    ttft: ttft.map(ms),
                    spare: None,
                    unvouched: false,
                };
                // The same call may dispatch or refuse it.
                let deadline = self.now + ttl.unwrap_or(100);
                self.waiting.insert(number, Waiting { handle: None, priority, bytes, deadline });
                match self.flow.enqueue(&arrival, |_| number, &gauge, now, rng, &mut self.left) {
                    Verdict::Dispatch(passage) => {
                        self.waiting.remove(&number);
                        self.running.push((passage, false));
                    }
                    Verdict::Parked(handle) => self.waiting.get_mut(&number).unwrap().handle = Some(handle),
                    Verdict::Rejected(refusal) => {
                        assert!(matches!(refusal.cause, Cause::BandFull | Cause::Full));
                        self.waiting.remove(&number);
                    }
                }
            }
            Op::Expiry(i) => {
                if let Some((number, handle)) =
                    self.waiting.iter().nth(i % self.waiting.len().max(1)).map(|(n, w)| (*n, w.handle.unwrap()))
                {
                    assert_eq!(self.flow.cancel(handle, now), Some(number));
                    self.waiting.remove(&number);
                    assert_eq!(self.flow.cancel(handle, now), None);
                }
            }
            Op::Passes(ms) => {
                self.now += ms;
                self.flow.expire(at(self.now), &mut self.left);
            }
            Op::Lands(i) => {
                let count = self.running.len().max(1);
                if let Some((passage, landed)) = self.running.get_mut(i % count) {
                    self.flow.landed(passage);
                    *landed = true;
                }
            }
            Op::Answers(i, tokens) => {
                let count = self.running.len().max(1);
                if let Some((passage, _)) = self.running.get_mut(i % count) {
                    self.flow.answered(passage, tokens, now);
                }
            }
            Op::Ends(i, told) => {
                if !self.running.is_empty() {
                    let (passage, _) = self.running.swap_remove(i % self.running.len());
                    self.flow.ended(passage, told.then_some(7), now);
                }
                let gauge = self.gauge();
                self.flow.freed(&gauge, now, rng, &mut self.left);
            }
            // No call reports this; the next event sees it.
            Op::Grows(capacity) => self.capacity = capacity,
        }
        self.settle();
        self.check(looked);
    }
}

fn settings(fair: usize, order: usize, overflow: bool, most: (u64, u64), total: (u64, u64), evicts: bool) -> Settings {
    let default_band = BandSettings {
        ordering: (ORDERINGS[order].build)(&Value::Null).unwrap().into(),
        fairness: fairness(FAIRNESS[fair].name, &Value::Null),
        max_requests: most.0,
        max_bytes: most.1,
        overflow: if overflow { Overflow::LongestFlow } else { Overflow::Newcomer },
        ttl: None,
    };
    let weights = [("flow 1".into(), 2.0), ("flow 2".into(), 0.5)].into();
    Settings {
        default_band,
        max_requests: total.0,
        max_bytes: total.1,
        ttl: Some(Duration::from_millis(100)),
        weights,
        evict_sheddable: evicts,
        flow_idle: Duration::from_millis(50),
        max_flows: 4,
        ..Settings::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn invariants_hold_on_random_histories(
        ops in prop::collection::vec(op(), 1..120),
        fair in 0..FAIRNESS.len(), order in 0..ORDERINGS.len(), overflow: bool, evicts: bool,
        most in (1..8u64, 300..3_000u64), total in (2..16u64, 300..4_000u64), capacity in 1..5u32,
    ) {
        let settings = settings(fair, order, overflow, most, total, evicts);
        let mut model = Model {
            flow: FlowControl::new(settings.clone(), Box::new(Fixed::default())),
            settings, waiting: BTreeMap::new(), running: Vec::new(), capacity, next: 0, now: 0, left: Vec::new(),
        };
        let mut rng = for_request(7, 7);
        for op in ops {
            model.run(op, &mut rng);
        }
        // All requests leave, and no state of them stays.
        let now = at(model.now);
        for (passage, _) in model.running.drain(..) {
            model.flow.ended(passage, None, now);
        }
        for waiting in std::mem::take(&mut model.waiting).into_values() {
            prop_assert!(model.flow.cancel(waiting.handle.unwrap(), now).is_some());
        }
        prop_assert!(model.flow.is_empty() && model.flow.bytes() == 0 && model.flow.pending() == Load::default());
        model.flow.expire(at(model.now + 50), &mut model.left);
        prop_assert!(model.left.is_empty());
        prop_assert_eq!((model.flow.bands().count(), model.flow.next_deadline()), (0, None));
    }
}
