//! Sheddable requests in flight, and which of them is preempted for a more important queued request.
//!
//! The lowest priority goes first, and the newest of equals, because it loses least work. One request is preempted at a
//! time: the next one only after the last has ended and its capacity has dispatched a queued request. If it dispatched
//! none, the limit is in scraped metrics (a full KV cache, for example), which get [`SETTLES`] to show the change.
//! Called by [`super::control`] alone. Source of the order: llm-d `priority-then-time-eviction-order-policy`.

use attache_types::clock::Timestamp;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

/// 500 ms, llm-d's grace period: by then the model server has freed its cache and Attaché has scraped that.
const SETTLES: Duration = Duration::from_millis(500);

/// Which sheddable requests in flight are preempted for more important queued ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictRunning {
    /// None: every dispatched request is served to its end.
    #[default]
    Never,
    /// Those whose client has received nothing yet. The client gets a status with `Retry-After`.
    Unanswered,
    /// All of them. A response that has begun is cut.
    Any,
}

/// Identifies a preemptible request in flight. It is never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Seat {
    priority: i32,
    number: Reverse<u64>,
}

impl Seat {
    pub(super) fn priority(self) -> i32 {
        self.priority
    }
}

#[derive(Debug)]
pub(super) struct PreemptibleRequests {
    which: EvictRunning,
    /// Requests that may be preempted, in the order of preemption.
    seats: BTreeSet<Seat>,
    number: u64,
    /// The request that was preempted and has not ended yet.
    leaving: Option<Seat>,
    /// Until when no further request is preempted.
    settles: Option<Timestamp>,
    /// Whether a preempted request has ended and the queue was not checked since.
    has_just_left: bool,
}

impl PreemptibleRequests {
    /// Number of preemptible requests.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn len(&self) -> usize {
        self.seats.len()
    }

    pub(super) fn new(which: EvictRunning) -> Self {
        Self { which, seats: BTreeSet::new(), number: 0, leaving: None, settles: None, has_just_left: false }
    }

    /// Records a dispatched request, and identifies it if it may be preempted.
    pub(super) fn enter(&mut self, priority: i32) -> Option<Seat> {
        // The preempted request freed capacity; what is found from now on may be another's.
        if self.has_just_left {
            self.settles = None;
        }
        if self.which == EvictRunning::Never || priority >= 0 {
            return None;
        }
        let seat = Seat { priority, number: Reverse(self.number) };
        self.number += 1;
        self.seats.insert(seat);
        Some(seat)
    }

    /// Records that a response has begun to reach its client. Returns whether that
    /// protects the request from preemption.
    pub(super) fn answers(&mut self, seat: Seat) -> bool {
        if self.which != EvictRunning::Unanswered {
            return false;
        }
        self.seats.remove(&seat);
        self.leaving.take_if(|leaving| *leaving == seat);
        true
    }

    /// Records that a request has ended, for whatever reason.
    pub(super) fn left(&mut self, seat: Seat, now: Timestamp) {
        self.seats.remove(&seat);
        if self.leaving.take_if(|leaving| *leaving == seat).is_some() {
            self.settles = Some(now.after(SETTLES));
            self.has_just_left = true;
        }
    }

    /// Records that the queue was checked after the last end.
    pub(super) fn looked(&mut self) {
        self.has_just_left = false;
    }

    /// The request to preempt for a queued one of this priority.
    pub(super) fn first(&self, priority: i32, now: Timestamp) -> Option<Seat> {
        if self.leaving.is_some() || self.settles.is_some_and(|until| now < until) {
            return None;
        }
        self.seats.first().copied().filter(|seat| seat.priority < priority.min(0))
    }

    /// Records that a request was preempted.
    pub(super) fn evict(&mut self, seat: Seat) {
        self.seats.remove(&seat);
        self.leaving = Some(seat);
    }
}
