//! What will happen, in the order of time. Owned by [`super::world`]; pure.

use super::world::hearsay::Hearsay;
use attache_disagg::attempts::Attempt;
use attache_pool::EndpointMetrics;
use attache_sim::engine::{JobId, JobReport};
use attache_types::clock::Timestamp;
use attache_workload::Request;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The queue.
#[derive(Debug, Default)]
pub(super) struct Queue {
    heap: BinaryHeap<Reverse<Timed>>,
    pushed: u64,
}

impl Queue {
    /// Something happens at `at`.
    pub(super) fn push(&mut self, at: Timestamp, due: Due) {
        self.pushed += 1;
        self.heap.push(Reverse(Timed { at, sequence: self.pushed, due }));
    }

    /// When something happens next.
    pub(super) fn next_at(&self) -> Option<Timestamp> {
        self.heap.peek().map(|Reverse(timed)| timed.at)
    }

    /// What happens next.
    pub(super) fn pop(&mut self) -> Option<(Timestamp, Due)> {
        self.heap.pop().map(|Reverse(timed)| (timed.at, timed.due))
    }

    /// Whether the next thing is another page at this moment.
    pub(super) fn has_page_at(&self, at: Timestamp) -> bool {
        matches!(self.heap.peek(), Some(Reverse(next)) if next.at == at && matches!(next.due, Due::Page(..)))
    }
}

/// What waits in the queue. The order settles ties: engines first, so that who comes finds what has just become free.
#[derive(Debug)]
pub(super) enum Due {
    /// The engine of the server at this position.
    Engine(usize),
    /// A page of its metrics arrives; whether another process wrote the one before.
    Page(usize, Box<EndpointMetrics>, bool),
    /// Something of its cache is heard.
    Events(usize, Hearsay),
    /// Something happens to the fleet.
    Change(usize),
    /// Discovery tells which servers there are.
    Discovery,
    /// All pages are read.
    Scrape,
    /// All servers are looked at.
    Sample,
    /// A prefill server's answer is back at the picker: of the request with this number, which try it was, and what became of it.
    Reply(u64, Attempt, JobReport),
    /// The request with this number has waited for its prompt as long as it may, or so long that another server is asked as well.
    Late(u64),
    /// The blocks that the server at this position keeps of a job are free to go.
    Release(usize, JobId),
    /// The pool may have more room than before for those who wait, or one of them has waited for as long as it may.
    Turn,
    /// A request that follows from another comes.
    Arrival(Box<Request>),
}

impl Due {
    fn rank(&self) -> u8 {
        match self {
            Due::Engine(_) => 0,
            Due::Release(..) => 1,
            Due::Change(_) => 2,
            Due::Events(..) => 3,
            Due::Discovery => 4,
            Due::Page(..) => 5,
            Due::Scrape => 6,
            Due::Sample => 7,
            Due::Reply(..) => 8,
            Due::Late(_) => 9,
            Due::Turn => 10,
            Due::Arrival(_) => 11,
        }
    }
}

#[derive(Debug)]
struct Timed {
    at: Timestamp,
    sequence: u64,
    due: Due,
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
