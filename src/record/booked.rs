//! Bookings that record their changes, each under one lock together with the change.
//!
//! Created by the decision and kept until the response has ended. Without a recording, a [`Booked`] is only a
//! [`Booking`].

use super::line::{Ended, Line, RequestLeg};
use super::tape::{Recorder, Turn};
use attache_pool::health::{HealthPolicy, Observation, Verdict};
use attache_pool::ledger::Ticket;
use attache_pool::{Endpoint, PoolSnapshot, SnapshotStore};
use attache_prefix::key::BlockKey;
use attache_protocol::Usage;
use attache_scheduling::{Booking, Dispatch};
use attache_sync::SharedBooking;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;
use std::time::Duration;

/// The recording of one request, or of none when nothing is recorded.
#[derive(Clone, Debug, Default)]
pub struct RequestTape(Option<(Arc<Recorder>, u64)>);

impl RequestTape {
    /// The recording of the request with this number.
    #[must_use]
    pub fn new(recorder: Arc<Recorder>, request: u64) -> Self {
        Self(Some((recorder, request)))
    }

    /// Takes the recording's lock and writes the line that `line` makes of the request's number. Keep the result until
    /// the change is made.
    fn turn(&self, line: impl FnOnce(u64) -> Line) -> Option<Turn<'_>> {
        let (recorder, r) = self.0.as_ref()?;
        let mut turn = recorder.turn()?;
        turn.write(&line(*r));
        Some(turn)
    }

    /// Records the request's outcome for the health of `endpoint`, an endpoint of `pool`.
    pub fn judge(
        &self,
        endpoint: &Endpoint,
        observation: Observation,
        now: Timestamp,
        policy: &HealthPolicy,
        pool: &SnapshotStore,
    ) -> Verdict {
        let Observation { outcome, api, client } = observation;
        let _turn = self.turn(|r| Line::Health { r, at: now, id: endpoint.id, outcome, api, client });
        endpoint.health.observe(observation, now, policy, || pool.load().may_eject(endpoint, now, policy))
    }

    /// Records that the request was a probe of `endpoint` and ended without a result.
    pub fn probe_lost(&self, endpoint: &Endpoint) {
        let _turn = self.turn(|r| Line::ProbeLost { r, id: endpoint.id });
        endpoint.health.probe_lost();
    }
}

/// The booking of one leg of a routed request, with its recording if there is one.
#[derive(Debug)]
pub struct Booked {
    /// The booking; `None` when it has ended.
    booking: Option<Booking>,
    /// Bookings on encode servers for images and audio, until the response begins.
    encoding: Vec<Ticket>,
    /// The same bookings as other pickers see them.
    shared_encoding: Vec<SharedBooking>,
    leg: RequestLeg,
    endpoint: Arc<Endpoint>,
    tape: RequestTape,
    /// The booking as other pickers see it, if there are any.
    shared: Option<SharedBooking>,
}

impl Booked {
    /// Wraps the booking on the server of the response, and those on encode servers. They were made under the lock of
    /// their decision.
    #[must_use]
    pub fn new(booking: Booking, encoding: Vec<Ticket>, tape: RequestTape) -> Self {
        Self::of(RequestLeg::Response, booking, encoding, tape)
    }

    /// As [`Booked::new`], for the booking on the prefill server.
    #[must_use]
    pub fn prefill(booking: Booking, tape: RequestTape) -> Self {
        Self::of(RequestLeg::Prefill, booking, Vec::new(), tape)
    }

    fn of(leg: RequestLeg, booking: Booking, encoding: Vec<Ticket>, tape: RequestTape) -> Self {
        Self {
            endpoint: booking.endpoint().clone(),
            booking: Some(booking),
            encoding,
            shared_encoding: Vec::new(),
            leg,
            tape,
            shared: None,
        }
    }

    /// Reports all changes to other pickers, too.
    pub fn share(&mut self, shared: SharedBooking, encoding: Vec<SharedBooking>) {
        (self.shared, self.shared_encoding) = (Some(shared), encoding);
    }

    /// The recording of its request.
    #[must_use]
    pub fn tape(&self) -> &RequestTape {
        &self.tape
    }

    /// Returns the endpoint of the booking.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// As [`Booking::expected`].
    #[must_use]
    pub fn expected(&self) -> f64 {
        self.booking.as_ref().map_or(0.0, Booking::expected)
    }

    /// As [`Booking::foretold`].
    #[must_use]
    pub fn foretold(&self) -> u32 {
        self.booking.as_ref().map_or(0, Booking::foretold)
    }

    /// As [`Booking::learns_answer`].
    #[must_use]
    pub fn learns_answer(&self) -> bool {
        self.booking.as_ref().is_some_and(Booking::learns_answer)
    }

    /// As [`Booking::move_to`]; `also` is part of the same change.
    pub fn move_to(&mut self, endpoint: &Arc<Endpoint>, now: Timestamp, also: impl FnOnce()) {
        let leg = self.leg;
        let _turn = self.tape.turn(|r| Line::Moved { r, at: now, to: endpoint.id, leg });
        if let Some(booking) = &mut self.booking {
            booking.move_to(endpoint, now);
        }
        also();
        self.endpoint = endpoint.clone();
        self.shared.iter().for_each(|shared| shared.moved(endpoint, now));
    }

    /// As [`Booking::dispatch`].
    pub fn dispatch(&mut self, how: Dispatch<'_>, snapshot: &PoolSnapshot, stale_after: Duration, now: Timestamp) {
        let (from, seconds) = match how {
            Dispatch::Arrives(from, seconds) => (Some(from.id), seconds),
            Dispatch::Whole => (None, 0.0),
        };
        let _turn = self.tape.turn(|r| Line::Dispatch { r, at: now, from, seconds });
        if let Some(shared) = &self.shared {
            let from = if let Dispatch::Arrives(from, _) = how { Some(from) } else { None };
            shared.dispatched(from, seconds, now);
        }
        if let Some(booking) = &mut self.booking {
            booking.dispatch(how, snapshot, stale_after, now);
        }
    }

    /// As [`Booking::first_byte`]. Releases the encode servers.
    pub fn first_byte(&mut self, good: bool, tells: bool, now: Timestamp) {
        let leg = self.leg;
        let _turn = self.tape.turn(|r| Line::First { r, at: now, good, tells, leg });
        if let Some(booking) = &mut self.booking {
            booking.first_byte(good, tells, now);
        }
        self.encoding.clear();
        self.shared_encoding.clear();
        self.shared.iter().for_each(|shared| shared.first_byte(good, tells, now));
    }

    /// As [`Booking::end`].
    pub fn end(
        &mut self,
        complete: bool,
        usage: &Usage,
        extend: impl FnOnce(&mut Vec<BlockKey>) -> bool,
        now: Timestamp,
    ) {
        let Some(booking) = self.booking.take() else { return };
        let (encoding, shared) = (std::mem::take(&mut self.encoding), self.shared.take());
        self.shared_encoding.clear();
        let recording = self.tape.0.as_ref().and_then(|(recorder, r)| Some((recorder.turn()?, *r)));
        if recording.is_none() && shared.is_none() {
            return booking.end(complete, usage, extend, now);
        }
        let mut added = None;
        let noted = |keys: &mut Vec<BlockKey>| {
            let before = keys.len();
            let extended = extend(keys);
            added = extended.then(|| keys.get(before..).unwrap_or_default().to_vec());
            extended
        };
        booking.end(complete, usage, noted, now);
        drop(encoding);
        if let Some(shared) = shared {
            let keys = added.iter().flatten().map(|key| key.0).collect();
            shared.ended(complete, usage, keys, now);
        }
        if let Some((mut turn, r)) = recording {
            turn.write(&Line::End(Ended {
                r,
                at: now,
                complete,
                prompt_tokens: usage.prompt_tokens,
                completion_tokens: usage.completion_tokens,
                cached_tokens: usage.cached_tokens,
                keys: added,
                leg: self.leg,
            }));
        }
    }
}

/// The booking is released under the same lock as its record.
impl Drop for Booked {
    fn drop(&mut self) {
        if let Some(booking) = self.booking.take() {
            let leg = self.leg;
            let turn = self.tape.turn(|r| Line::Drop { r, leg });
            drop(booking);
            self.encoding.clear();
            drop(turn);
        }
    }
}

/// Returns the numbers of endpoints.
#[must_use]
pub fn ids<'a>(endpoints: impl IntoIterator<Item = &'a Arc<Endpoint>>) -> Vec<EndpointId> {
    endpoints.into_iter().map(|endpoint| endpoint.id).collect()
}
