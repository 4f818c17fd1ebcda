//! The exchange of a request that waits for its turn.
//!
//! ```text
//! Collecting ─end of body─▶ (no room) ─▶ Parked ─its turn─▶ Collecting ─▶ (decide)
//!                                           └─ waited too long, gave way ─▶ Refused
//! ```

use super::*;
use crate::ext_proc::queues::{self, Admitted, Parked, Turn, Waiting};

/// What a request waits with.
#[derive(Debug, Default)]
pub(super) struct Parking {
    parked: Option<(Parked, Body, Close)>,
    /// Its turn has come, and it is not decided yet.
    admitted: Option<Admitted>,
}

impl Parking {
    pub(super) fn deadline(&self) -> Option<Timestamp> {
        self.parked.as_ref().map(|(parked, ..)| parked.until())
    }

    pub(super) fn has_turn(&self) -> bool {
        self.admitted.is_some()
    }

    pub(super) fn take_turn(&mut self) -> Option<Admitted> {
        self.admitted.take()
    }
}

impl Exchange {
    /// What is ready when the request's turn has come; [`Event::Turn`] tells of it. Given once.
    pub fn waiting(&mut self) -> Option<Waiting> {
        self.parking.parked.as_mut().and_then(|(parked, ..)| parked.waiting())
    }

    pub(super) fn park(&mut self, parked: Parked, body: Body, close: Close) {
        self.request = RequestSide::Parked;
        self.parking.parked = Some((parked, body, close));
    }

    pub(super) fn on_turn(&mut self, turn: Turn, now: Timestamp, out: &mut Actions) {
        let Some((parked, body, close)) = self.parking.parked.take() else { return };
        parked.settle();
        match turn {
            Ok(admitted) => {
                self.parking.admitted = Some(admitted);
                self.request = RequestSide::Collecting;
                self.body = body;
                self.decide_on_body(close, now, out);
            }
            Err(refusal) => {
                drop(body);
                self.refuse(&queues::refused(&refusal), now, out);
            }
        }
    }

    pub(super) fn on_parked_deadline(&mut self, now: Timestamp, out: &mut Actions) {
        let expired = self.parking.parked.as_mut().and_then(|(parked, ..)| parked.expire(now));
        if let Some(error) = expired {
            self.parking.parked = None;
            self.refuse(&error, now, out);
        }
    }
}
