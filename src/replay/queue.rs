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

/// Scraped metrics on their way to a picker.
#[derive(Debug)]
pub(super) struct ScrapedPage {
    /// Position of the picker.
    pub(super) picker: usize,
    pub(super) metrics: EndpointMetrics,
    /// Another process reported the previous metrics.
    pub(super) restarted: bool,
}

/// What waits in the queue. The order settles ties: engines first, so that who comes finds what has just become free.
#[derive(Debug)]
pub(super) enum SimEvent {
    /// The engine of the server at this position.
    Engine(usize),
    /// A picker receives metrics of the server at this position.
    Page(usize, Box<ScrapedPage>),
    /// News of a cache arrive: position of the server, and data-parallel rank.
    Events(usize, usize, KvNews),
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
    /// All images of the request with this number are encoded.
    Encoded(u64),
    /// The request with this number has waited for its prompt as long as it may, or so long that another
    /// server is asked as well.
    Late(u64),
    /// The blocks that the server at this position keeps of a job are free to go.
    Release(usize, JobId),
    /// Messages between pickers arrive, or a picker must send some.
    Exchange,
    /// The queues must be checked, although nothing else has happened.
    CheckQueues,
    /// The time of the request with this number in the queue has ended.
    Expire(u64),
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
            SimEvent::Encoded(_) => 9,
            SimEvent::Late(_) => 10,
            SimEvent::CheckQueues => 11,
            SimEvent::Expire(_) => 12,
            SimEvent::Exchange => 13,
            SimEvent::Arrival(_) => 14,
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
