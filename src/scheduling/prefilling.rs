//! A prompt that another server computes, from the decision to its end: who is asked for it, what is booked for it, and what each who was
//! asked has shown of itself. The exchange and `replay` both keep one for each split request and tell it what happens, so that both
//! settle the same things in the same order. Pure.

use crate::Booking;
use attache_disagg::attempts::{Attempt, Attempts, AttemptLimits, Failure, Next};
use attache_pool::health::Outcome;
use attache_pool::{Endpoint, Picks};
use attache_protocol::Usage;
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// One prompt.
#[derive(Debug)]
pub struct Prefilling {
    /// What is booked on the server that is asked; `None` when that is settled.
    booking: Option<Box<Booking>>,
    attempts: Attempts,
    /// The first try is its server's probe, and nobody has said what became of it.
    probes: bool,
}

impl Prefilling {
    /// The first of `servers` is asked `now`, on which `booking` was made; `probes` says that it is half open and this its probe.
    #[must_use]
    pub fn begin(servers: Picks, booking: Option<Box<Booking>>, probes: bool, bounds: AttemptLimits, now: Timestamp) -> Self {
        Self { booking, attempts: Attempts::begin(servers, bounds, now), probes }
    }

    /// The server of a try.
    #[must_use]
    pub fn server(&self, attempt: Attempt) -> Option<&Arc<Endpoint>> {
        self.attempts.server(attempt)
    }

    /// Whether a try may still answer.
    #[must_use]
    pub fn awaits(&self, attempt: Attempt) -> bool {
        self.attempts.awaits(attempt)
    }

    /// When [`Prefilling::late`] is due.
    #[must_use]
    pub fn deadline(&self) -> Timestamp {
        self.attempts.deadline()
    }

    /// Seconds until the prompt is computed, as predicted at the booking.
    #[must_use]
    pub fn expected(&self) -> f64 {
        self.booking.as_ref().map_or(0.0, |booking| booking.expected())
    }

    /// When nobody is waited for any longer.
    #[must_use]
    pub fn end(&self) -> Timestamp {
        self.attempts.end()
    }

    /// Tries but `attempt` that have had time to answer and have not.
    pub fn overdue(&self, attempt: Option<Attempt>, now: Timestamp) -> impl Iterator<Item = Attempt> {
        self.attempts.overdue(now).filter(move |other| Some(*other) != attempt)
    }

    /// The server of `attempt` has computed the prompt, and told `usage`; false when nobody waits for it any longer. `judge` is told, here
    /// and below, what a server has shown of itself, before anything follows from it.
    pub fn computed(
        &mut self,
        attempt: Attempt,
        usage: &Usage,
        now: Timestamp,
        mut judge: impl FnMut(&Endpoint, Outcome),
    ) -> bool {
        let Some(server) = self.awaited(attempt) else { return false };
        self.blame(Some(attempt), now, &mut judge);
        self.shown(&server);
        judge(&server, Outcome::Success);
        if let Some(mut booking) = self.booking.take() {
            if booking.endpoint().id != server.id {
                booking.move_to(&server, now);
            }
            // What a second try took says nothing of its server's speed as the first try's beginning would have it.
            booking.first_byte(true, attempt == 0, now);
            booking.end(true, usage, |_| false, now);
        }
        self.attempts.answered();
        true
    }

    /// A try has failed. The booking moves on to the first of those that may still answer.
    pub fn failed(
        &mut self,
        attempt: Attempt,
        failure: Failure,
        now: Timestamp,
        judge: impl FnOnce(&Endpoint, Outcome),
    ) -> Next {
        let Some(server) = self.awaited(attempt) else { return Next::Wait };
        if let Some(outcome) = failure.outcome() {
            self.shown(&server);
            judge(&server, outcome);
        }
        let next = self.attempts.failed(attempt, failure, now);
        self.follow(next, now)
    }

    /// The moment of [`Prefilling::deadline`] has come.
    pub fn late(&mut self, now: Timestamp, mut judge: impl FnMut(&Endpoint, Outcome)) -> Next {
        if now >= self.attempts.end() {
            self.blame(None, now, &mut judge);
        }
        let next = self.attempts.on_deadline(now);
        self.follow(next, now)
    }

    /// What all who have had time and not answered have shown of themselves: they are not waited for any longer.
    fn blame(&mut self, but: Option<Attempt>, now: Timestamp, judge: &mut impl FnMut(&Endpoint, Outcome)) {
        let late: Picks = self.overdue(but, now).filter_map(|attempt| self.awaited(attempt)).collect();
        for server in &late {
            self.shown(server);
            judge(server, Outcome::Failure);
        }
    }

    /// The server of a try that may still answer.
    fn awaited(&self, attempt: Attempt) -> Option<Arc<Endpoint>> {
        self.attempts.server(attempt).filter(|_| self.attempts.awaits(attempt)).cloned()
    }

    /// A server is no longer being probed: it has shown how it is.
    fn shown(&mut self, server: &Endpoint) {
        self.probes &= self.attempts.server(0).is_none_or(|first| first.id != server.id);
    }

    fn follow(&mut self, next: Next, now: Timestamp) -> Next {
        if let Next::GiveUp(_) = next {
            self.give_up();
        }
        let first = (0..self.attempts.tried()).find_map(|attempt| self.awaited(attempt));
        if let (Some(server), Some(booking)) = (first, &mut self.booking)
            && booking.endpoint().id != server.id
        {
            booking.move_to(&server, now);
        }
        next
    }

    /// Nobody computes this prompt for another: what is booked for it is given back.
    pub fn give_up(&mut self) {
        self.booking = None;
    }
}

/// The client has left before the first server has shown how it is: another request may try.
impl Drop for Prefilling {
    fn drop(&mut self) {
        if let Some(first) = self.attempts.server(0).filter(|_| self.probes) {
            first.health.probe_lost();
        }
    }
}
