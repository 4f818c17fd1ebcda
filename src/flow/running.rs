//! Sheddable requests under way, and which of them ends for the sake of a more important one that waits.
//!
//! The lowest priority first, of equals the newest, in which least work is lost. One at a time: the next is told when the last has gone, and
//! somebody was let through by that. Where nobody was, the room is not in our own books but on pages of metrics (a cache that is full), which
//! get [`SETTLES`] to show it. Called by [`super::control`] alone. Source of the order: llm-d `priority-then-time-eviction-order-policy`.

use attache_types::clock::Timestamp;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::time::Duration;

/// 500 ms, llm-d's grace: a server's cache is freed and its page read by then.
const SETTLES: Duration = Duration::from_millis(500);

/// Which sheddable requests under way end for the sake of more important ones that wait.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictRunning {
    /// None: who was let through is served.
    #[default]
    Never,
    /// Those of whose answers nothing has gone on: each client is told, and when to come again.
    Unanswered,
    /// All of them: an answer that has begun is cut.
    Any,
}

/// A sheddable request under way. Never given twice.
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
pub(super) struct Running {
    which: EvictRunning,
    /// Those that may end, who goes first in front.
    seats: BTreeSet<Seat>,
    number: u64,
    /// Was told to end, and is still here.
    leaving: Option<Seat>,
    /// Until when nobody else is told.
    settles: Option<Timestamp>,
    /// Nobody has looked for room since it has gone.
    has_just_left: bool,
}

impl Running {
    /// Those that may end.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn len(&self) -> usize {
        self.seats.len()
    }

    pub(super) fn new(which: EvictRunning) -> Self {
        Self { which, seats: BTreeSet::new(), number: 0, leaving: None, settles: None, has_just_left: false }
    }

    /// One is let through; its seat, if it may end before its answer does.
    pub(super) fn enter(&mut self, priority: i32) -> Option<Seat> {
        // Room that is found later need not be its.
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

    /// Its answer goes on to the client: whether that keeps it from ending before its time.
    pub(super) fn answers(&mut self, seat: Seat) -> bool {
        if self.which != EvictRunning::Unanswered {
            return false;
        }
        self.seats.remove(&seat);
        self.leaving.take_if(|leaving| *leaving == seat);
        true
    }

    /// It has ended, however that came.
    pub(super) fn left(&mut self, seat: Seat, now: Timestamp) {
        self.seats.remove(&seat);
        if self.leaving.take_if(|leaving| *leaving == seat).is_some() {
            self.settles = Some(now.after(SETTLES));
            self.has_just_left = true;
        }
    }

    /// Those who wait were let through as far as there is room.
    pub(super) fn looked(&mut self) {
        self.has_just_left = false;
    }

    /// Who would end for one of this priority that waits.
    pub(super) fn first(&self, priority: i32, now: Timestamp) -> Option<Seat> {
        if self.leaving.is_some() || self.settles.is_some_and(|until| now < until) {
            return None;
        }
        self.seats.first().copied().filter(|seat| seat.priority < priority.min(0))
    }

    /// It is told to end.
    pub(super) fn evict(&mut self, seat: Seat) {
        self.seats.remove(&seat);
        self.leaving = Some(seat);
    }
}
