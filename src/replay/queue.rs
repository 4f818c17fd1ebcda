//! What will happen, in the order of time. Owned by [`super::world`]; pure.

use super::world::kv_event_delivery::KvNews;
use attache_disagg::attempts::Attempt;
use attache_pool::EndpointMetrics;
use attache_sim::engine::{JobId, JobReport};
use attache_types::clock::Timestamp;
use attache_workload::Request;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Future events, ordered by time; ties keep the order in which they were added.
#[derive(Debug, Default)]
pub(super) struct EventQueue {
    heap: BinaryHeap<Reverse<Timed>>,
    pushed: u64,
}

impl EventQueue {
    /// Something happens at `at`.
    pub(super) fn push(&mut self, at: Timestamp, due: SimEvent) {
        self.pushed += 1;
        self.heap.push(Reverse(Timed { at, sequence: self.pushed, due }));
    }

    /// Time of the next event.
    pub(super) fn next_at(&self) -> Option<Timestamp> {
        self.heap.peek().map(|Reverse(timed)| timed.at)
    }

    /// Removes and returns the next event.
    pub(super) fn pop(&mut self) -> Option<(Timestamp, SimEvent)> {
        self.heap.pop().map(|Reverse(timed)| (timed.at, timed.due))
    }

    /// Whether the next thing is another page at this moment.
    pub(super) fn has_page_at(&self, at: Timestamp) -> bool {
        matches!(self.heap.peek(), Some(Reverse(next)) if next.at == at && matches!(next.due, SimEvent::Page(..)))
    }
}

/// What waits in the queue. The order settles ties: engines first, so that who comes finds what has just become free.
#[derive(Debug)]
pub(super) enum SimEvent {
    /// The engine of the server at this position.
    Engine(usize),
    /// A page of its metrics arrives; whether another process wrote the one before.
    Page(usize, Box<EndpointMetrics>, bool),
    /// Something of its cache is heard.
    Events(usize, KvNews),
    /// Something happens to the fleet.
    Change(usize),
    /// Discovery publishes the servers of the fleet.
    Discovery,
    /// The picker scrapes all servers at once.
    Scrape,
    /// All servers are looked at.
    Sample,
    /// A prefill server's answer is back at the picker: of the request with this number, which try it was,
    /// and what became of it.
    Reply(u64, Attempt, JobReport),
    /// The request with this number has waited for its prompt as long as it may, or so long that another
    /// server is asked as well.
    Late(u64),
    /// The blocks that the server at this position keeps of a job are free to go.
    Release(usize, JobId),
    /// The pool may have more room than before for those who wait, or one of them has waited for as long as it may.
    Turn,
    /// A request that follows from another comes.
    Arrival(Box<Request>),
}

impl SimEvent {
    fn rank(&self) -> u8 {
        match self {
            SimEvent::Engine(_) => 0,
            SimEvent::Release(..) => 1,
            SimEvent::Change(_) => 2,
            SimEvent::Events(..) => 3,
            SimEvent::Discovery => 4,
            SimEvent::Page(..) => 5,
            SimEvent::Scrape => 6,
            SimEvent::Sample => 7,
            SimEvent::Reply(..) => 8,
            SimEvent::Late(_) => 9,
            SimEvent::Turn => 10,
            SimEvent::Arrival(_) => 11,
        }
    }
}

#[derive(Debug)]
struct Timed {
    at: Timestamp,
    sequence: u64,
    due: SimEvent,
}

impl Timed {
    fn key(&self) -> (Timestamp, u8, u64) {
        (self.at, self.due.rank(), self.sequence)
    }
}

impl PartialEq for Timed {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Timed {}

impl PartialOrd for Timed {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Timed {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}
