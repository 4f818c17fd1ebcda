//! The prefill of a split request on another server, from the decision to its end. Keeps the servers that are tried
//! and the booking, and reports outcomes for the servers' health.
//!
//! [`crate::split`] and `replay` keep one per split request and report every event to it, so both settle the same
//! things in the same order. Pure.

use attache_disagg::attempts::{Attempt, AttemptLimits, Attempts, Failure, Next};
use attache_pool::health::HealthOutcome;
use attache_pool::{Endpoint, Picks};
use attache_protocol::Usage;
use attache_record::{Booked, RequestTape};
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// Prefill of one prompt.
#[derive(Debug)]
pub struct Prefilling {
    /// Booking on the server that is tried; `None` once it is settled.
    booking: Option<Box<Booked>>,
    attempts: Attempts,
    /// The recording of the request.
    tape: RequestTape,
    /// Whether the first attempt is its server's probe and has no outcome yet.
    probes: bool,
}

impl Prefilling {
    /// Starts the first attempt, on the first of `servers`, where `booking` was made. `probes`: that server is half
    /// open, and this request is its probe.
    #[must_use]
    pub fn begin(
        servers: Picks,
        booking: Option<Box<Booked>>,
        probes: bool,
        bounds: AttemptLimits,
        now: Timestamp,
    ) -> Self {
        let tape = booking.as_ref().map(|booking| booking.tape().clone()).unwrap_or_default();
        Self { booking, attempts: Attempts::begin(servers, bounds, now), tape, probes }
    }

    /// The server of an attempt.
    #[must_use]
    pub fn server(&self, attempt: Attempt) -> Option<&Arc<Endpoint>> {
        self.attempts.server(attempt)
    }

    /// Whether an attempt may still succeed.
    #[must_use]
    pub fn awaits(&self, attempt: Attempt) -> bool {
        self.attempts.awaits(attempt)
    }

    /// When to call [`Prefilling::late`].
    #[must_use]
    pub fn deadline(&self) -> Timestamp {
        self.attempts.deadline()
    }

    /// Predicted seconds until the prompt is computed, as of the booking.
    #[must_use]
    pub fn expected(&self) -> f64 {
        self.booking.as_ref().map_or(0.0, |booking| booking.expected())
    }

    /// The recording of the request.
    #[must_use]
    pub fn tape(&self) -> &RequestTape {
        &self.tape
    }

    /// When Attaché stops waiting for any attempt.
    #[must_use]
    pub fn end(&self) -> Timestamp {
        self.attempts.end()
    }

    /// Attempts other than `attempt` that are past their deadline.
    pub fn overdue(&self, attempt: Option<Attempt>, now: Timestamp) -> impl Iterator<Item = Attempt> {
        self.attempts.overdue(now).filter(move |other| Some(*other) != attempt)
    }

    /// Settles a successful attempt with the reported `usage`. Returns false if nothing waits for it any more.
    /// `judge` receives, here and below, the outcome of a server before any other effect.
    pub fn computed(
        &mut self,
        attempt: Attempt,
        usage: &Usage,
        now: Timestamp,
        mut judge: impl FnMut(&Endpoint, HealthOutcome),
    ) -> bool {
        let Some(server) = self.awaited(attempt) else { return false };
        self.blame(Some(attempt), now, &mut judge);
        self.shown(&server);
        judge(&server, HealthOutcome::Success);
        if let Some(mut booking) = self.booking.take() {
            if booking.endpoint().id != server.id {
                booking.move_to(&server, now, || {});
            }
            // A second attempt started later than the booking, so its time says nothing about the server's speed.
            booking.first_byte(true, attempt == 0, now);
            booking.end(true, usage, |_| false, now);
        }
        self.attempts.answered();
        true
    }

    /// Records a failed attempt. The booking moves to the first attempt that may still succeed.
    pub fn failed(
        &mut self,
        attempt: Attempt,
        failure: Failure,
        now: Timestamp,
        judge: impl FnOnce(&Endpoint, HealthOutcome),
    ) -> Next {
        let Some(server) = self.awaited(attempt) else { return Next::Wait };
        if let Some(outcome) = failure.outcome() {
            self.shown(&server);
            judge(&server, outcome);
        }
        let next = self.attempts.failed(attempt, failure, now);
        self.follow(next, now)
    }

    /// Handles the deadline of [`Prefilling::deadline`].
    pub fn late(&mut self, now: Timestamp, mut judge: impl FnMut(&Endpoint, HealthOutcome)) -> Next {
        if now >= self.attempts.end() {
            self.blame(None, now, &mut judge);
        }
        let next = self.attempts.on_deadline(now);
        self.follow(next, now)
    }

    /// Counts a failure for every attempt but `but` that is past its deadline.
    fn blame(&mut self, but: Option<Attempt>, now: Timestamp, judge: &mut impl FnMut(&Endpoint, HealthOutcome)) {
        let late: Picks = self.overdue(but, now).filter_map(|attempt| self.awaited(attempt)).collect();
        for server in &late {
            self.shown(server);
            judge(server, HealthOutcome::Failure);
        }
    }

    /// The server of an attempt that may still succeed.
    fn awaited(&self, attempt: Attempt) -> Option<Arc<Endpoint>> {
        self.attempts.server(attempt).filter(|_| self.attempts.awaits(attempt)).cloned()
    }

    /// Ends the probe of `server`, which now has an outcome.
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
            booking.move_to(&server, now, || {});
        }
        next
    }

    /// Drops the booking: no other server prefills this prompt any more.
    pub fn give_up(&mut self) {
        self.booking = None;
    }
}

/// If the client disconnected before the first server had an outcome, another request may probe it.
impl Drop for Prefilling {
    fn drop(&mut self) {
        if let Some(first) = self.attempts.server(0).filter(|_| self.probes) {
            self.tape.probe_lost(first);
        }
    }
}
