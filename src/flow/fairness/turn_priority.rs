//! The strategy `turn-priority` of `program-aware-fairness`: the session that has had most turns goes first,
//! since its prefix is cached.
//!
//! ```text
//! score = requests dispatched + 1 + turnPriorityTimeWeight · seconds that the first request has waited
//!         the greatest score goes
//! ```
//!
//! A flow that had nothing in flight for longer than `turnPriorityInactivitySeconds` starts again at its first turn.
//! All scores grow at one rate, so their order changes only with a dispatch or another first request, and the next flow
//! is the end of a tree. When not: flows are tenants or clients instead of sessions; then the one with most requests
//! goes first. Source: llm-d `program-aware-fairness` (`turn-priority`).

use super::{Fairness, Meter, QueueHead};
use ahash::AHashMap;
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

/// A score without the part that grows with time, totally ordered.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Score(f64);

impl Eq for Score {}

impl PartialOrd for Score {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Score {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct SessionTurns {
    turns: u64,
    in_flight: u32,
    /// When the last request ended.
    ended: Option<Timestamp>,
    /// Its sort key among the flows that have something queued.
    place: Option<Score>,
}

/// The policy with the turns of each flow.
#[derive(Debug)]
pub(super) struct TurnPriority {
    time_weight: f64,
    inactivity: Duration,
    flows: AHashMap<u32, SessionTurns>,
    order: BTreeSet<(Score, Reverse<u32>)>,
}

impl TurnPriority {
    pub(super) fn new(time_weight: f64, inactivity: Duration) -> Self {
        Self { time_weight, inactivity, flows: AHashMap::new(), order: BTreeSet::new() }
    }

    /// Moves the flow to where its turns and its first request belong; removes it if it has none.
    fn place(&mut self, flow: u32, head: Option<QueueHead>) {
        let entry = self.flows.entry(flow).or_default();
        let arrived = |head: QueueHead| head.arrived.0 as f64 / 1e9;
        let score = head.map(|head| Score(entry.turns as f64 - self.time_weight * arrived(head)));
        if let Some(before) = std::mem::replace(&mut entry.place, score) {
            self.order.remove(&(before, Reverse(flow)));
        }
        if let Some(score) = score {
            self.order.insert((score, Reverse(flow)));
        }
    }
}

impl Fairness for TurnPriority {
    fn orders_programs(&self) -> bool {
        true
    }

    fn fresh(&self) -> Box<dyn Fairness> {
        Box::new(Self::new(self.time_weight, self.inactivity))
    }

    fn wakes(&mut self, flow: u32, _: f64, head: QueueHead, _: Timestamp) {
        let entry = self.flows.entry(flow).or_default();
        // From the end of the last response to the arrival of this request: time in the queue is not inactivity.
        let rested = entry.ended.filter(|_| entry.in_flight == 0).map(|ended| head.arrived.since(ended));
        if rested.is_some_and(|rested| rested > self.inactivity) {
            entry.turns = 0;
        }
        self.place(flow, Some(head));
    }

    fn head(&mut self, flow: u32, head: QueueHead) {
        self.place(flow, Some(head));
    }

    fn sleeps(&mut self, flow: u32) {
        self.place(flow, None);
    }

    fn next(&mut self) -> Option<u32> {
        self.order.last().map(|(_, Reverse(flow))| *flow)
    }

    fn last(&mut self) -> Option<u32> {
        self.order.first().map(|(_, Reverse(flow))| *flow)
    }

    fn dispatched(&mut self, flow: u32, _: &mut Meter, _: Timestamp, _: &mut PickRng) {
        let entry = self.flows.entry(flow).or_default();
        entry.turns = entry.turns.saturating_add(1);
        entry.in_flight = entry.in_flight.saturating_add(1);
    }

    fn ended(&mut self, flow: u32, _: &Meter, _: Option<u32>, now: Timestamp) {
        if let Some(entry) = self.flows.get_mut(&flow) {
            entry.in_flight = entry.in_flight.saturating_sub(1);
            entry.ended = Some(now);
        }
    }

    fn restart(&mut self, flow: u32) {
        let Some(entry) = self.flows.get_mut(&flow) else { return };
        let turns = std::mem::take(&mut entry.turns);
        if let Some(before) = entry.place {
            let place = Score(before.0 - turns as f64);
            entry.place = Some(place);
            self.order.remove(&(before, Reverse(flow)));
            self.order.insert((place, Reverse(flow)));
        }
    }

    fn forget(&mut self, flow: u32) {
        self.place(flow, None);
        self.flows.remove(&flow);
    }
}
