//! A request whose prompt another server computes, at the picker: which prefill server is asked, and what comes of it.
//!
//! The exchange's part without its wire (`ext_proc::split`), in its order: the prefill server's booking is settled by its answer, the
//! decode server's begins with it; tries and bounds are those of [`crate::disagg`]. A pool that leaves the prefill to sidecars is played
//! as if the picker asked. Called by [`super::world`]; pure.

use super::front::{Front, Sent};
use crate::clock::Timestamp;
use crate::disagg::attempts::{Attempt, Bounds};
use crate::disagg::{Attempts, Failure, Fallback, Next};
use crate::pool::Endpoint;
use crate::pool::health::Outcome;
use crate::protocol::Usage;
use crate::scheduling::{Booking, Dispatch};
use std::sync::Arc;

/// How long prefill servers are waited for, and what becomes of a request whose prompt none has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Over all tries.
    pub bounds: Bounds,
    /// When they have failed.
    pub fallback: Fallback,
}

impl Default for Patience {
    fn default() -> Self {
        let bounds = Bounds { timeout: crate::disagg::policy::DEFAULT_PREFILL_TIMEOUT, hedge_after: None };
        Self { bounds, fallback: Fallback::default() }
    }
}

/// The tries of one request.
#[derive(Debug)]
pub(super) struct Legs {
    /// What the prefill server has booked; `None` when that is settled.
    pub(super) booking: Option<Booking>,
    pub(super) attempts: Attempts,
    /// Tokens of the prompt that the prefill server was thought to hold.
    pub(super) foretold: u32,
}

/// What a request whose prompt was to be computed has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Came {
    /// Nothing yet.
    Waiting,
    /// The server of this try is to be asked.
    Ask(Attempt),
    /// It goes on to its decode server, and its prompt follows.
    Computed,
    /// It goes on to its decode server, which computes the prompt itself.
    Local,
    /// It can't be served.
    Refused,
}

impl Legs {
    /// The server of a try.
    pub(super) fn server(&self, attempt: Attempt) -> Option<&Arc<Endpoint>> {
        self.attempts.server(attempt)
    }
}

impl Front {
    /// A prefill server has computed the prompt, and has told `usage`.
    pub(super) fn computed(&self, legs: &mut Legs, attempt: Attempt, usage: &Usage, now: Timestamp) -> Came {
        let Some(server) = legs.server(attempt).filter(|_| legs.attempts.awaits(attempt)).cloned() else {
            return Came::Waiting;
        };
        self.judge(&server, Outcome::Success, now);
        if let Some(mut booking) = legs.booking.take() {
            if booking.endpoint().id != server.id {
                booking.move_to(&server, now);
            }
            booking.first_byte(true, attempt == 0, now);
            booking.end(true, usage, |_| false, now);
        }
        legs.attempts.answered();
        Came::Computed
    }

    /// A prefill server has not.
    pub(super) fn failed(&self, legs: &mut Legs, attempt: Attempt, failure: Failure, now: Timestamp) -> Came {
        let Some(server) = legs.server(attempt).filter(|_| legs.attempts.awaits(attempt)).cloned() else {
            return Came::Waiting;
        };
        let outcome = match failure {
            Failure::Refused => Outcome::ConnectFailure,
            Failure::Status(status) if status < 500 => Outcome::Success,
            _ => Outcome::Failure,
        };
        self.judge(&server, outcome, now);
        let next = legs.attempts.failed(attempt, failure, now);
        self.follow(legs, &next, now)
    }

    /// The moment of [`Attempts::deadline`] has come.
    pub(super) fn late(&self, legs: &mut Legs, now: Timestamp) -> Came {
        let asked: Vec<Arc<Endpoint>> = (0..legs.attempts.tried())
            .filter(|attempt| legs.attempts.awaits(*attempt))
            .filter_map(|attempt| legs.server(attempt).cloned())
            .collect();
        let next = legs.attempts.on_deadline(now);
        if let Next::GiveUp(_) = next {
            asked.iter().for_each(|server| self.judge(server, Outcome::Failure, now));
        }
        self.follow(legs, &next, now)
    }

    fn follow(&self, legs: &mut Legs, next: &Next, now: Timestamp) -> Came {
        match next {
            Next::Wait => Came::Waiting,
            Next::Send(attempt) => {
                let alone = (0..*attempt).all(|earlier| !legs.attempts.awaits(earlier));
                let server = legs.server(*attempt).cloned();
                if let (Some(server), Some(booking), true) = (server, &mut legs.booking, alone) {
                    booking.move_to(&server, now);
                }
                Came::Ask(*attempt)
            }
            Next::GiveUp(_) => {
                legs.booking = None;
                if self.patience().fallback == Fallback::Fail { Came::Refused } else { Came::Local }
            }
        }
    }

    /// A request whose prompt was to be computed elsewhere is sent to its decode server.
    pub(super) fn dispatch(&self, sent: &mut Sent, how: Dispatch, now: Timestamp) {
        sent.booking.dispatch(how, &self.snapshot, self.stale_after(), now);
    }
}
