//! A request's booking that records its changes, each under one lock together with the change.
//!
//! Created by the decision and kept until the response has ended. Without a recording, it is only a [`Booking`].

use super::line::{Ended, Line};
use super::tape::{Recorder, Turn};
use attache_pool::health::{HealthPolicy, Observation, Verdict};
use attache_pool::{Endpoint, PoolSnapshot, SnapshotStore};
use attache_prefix::key::BlockKey;
use attache_protocol::Usage;
use attache_scheduling::{Booking, Dispatch};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;
use std::time::Duration;

/// The booking of one routed request, with its recording if there is one.
#[derive(Debug)]
pub struct Booked {
    /// The booking; `None` when it has ended.
    booking: Option<Booking>,
    endpoint: Arc<Endpoint>,
    /// The recording, and the request's number in it.
    tape: Option<(Arc<Recorder>, u64)>,
}

impl Booked {
    /// Wraps a booking that was made under the lock of its decision, for the request with this number.
    #[must_use]
    pub fn new(booking: Booking, tape: Option<(Arc<Recorder>, u64)>) -> Self {
        Self { endpoint: booking.endpoint().clone(), booking: Some(booking), tape }
    }

    /// Returns the endpoint of the booking.
    #[must_use]
    pub fn endpoint(&self) -> &Arc<Endpoint> {
        &self.endpoint
    }

    /// As [`Booking::learns_answer`].
    #[must_use]
    pub fn learns_answer(&self) -> bool {
        self.booking.as_ref().is_some_and(Booking::learns_answer)
    }

    /// As [`Booking::move_to`].
    pub fn move_to(&mut self, endpoint: &Arc<Endpoint>, now: Timestamp) {
        let _turn = turn(self.tape.as_ref(), |r| Line::Moved { r, at: now, to: endpoint.id });
        if let Some(booking) = &mut self.booking {
            booking.move_to(endpoint, now);
        }
        self.endpoint = endpoint.clone();
    }

    /// As [`Booking::dispatch`]. Split requests are not recorded.
    pub fn dispatch(&mut self, how: Dispatch<'_>, snapshot: &PoolSnapshot, stale_after: Duration, now: Timestamp) {
        if let Some(booking) = &mut self.booking {
            booking.dispatch(how, snapshot, stale_after, now);
        }
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
        let _turn = turn(self.tape.as_ref(), |r| Line::Health { r, at: now, id: endpoint.id, outcome, api, client });
        endpoint.health.observe(observation, now, policy, || pool.load().may_eject(endpoint, now, policy))
    }

    /// Records that the request was a probe of `endpoint` and ended without a result.
    pub fn probe_lost(&self, endpoint: &Endpoint) {
        let _turn = turn(self.tape.as_ref(), |r| Line::ProbeLost { r, id: endpoint.id });
        endpoint.health.probe_lost();
    }

    /// As [`Booking::first_byte`].
    pub fn first_byte(&mut self, good: bool, tells: bool, now: Timestamp) {
        let _turn = turn(self.tape.as_ref(), |r| Line::First { r, at: now, good, tells });
        if let Some(booking) = &mut self.booking {
            booking.first_byte(good, tells, now);
        }
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
        let Some((recorder, r)) = &self.tape else { return booking.end(complete, usage, extend, now) };
        let Some(mut turn) = recorder.turn() else { return booking.end(complete, usage, extend, now) };
        let mut added = None;
        let noted = |keys: &mut Vec<BlockKey>| {
            let before = keys.len();
            let extended = extend(keys);
            added = extended.then(|| keys.get(before..).unwrap_or_default().to_vec());
            extended
        };
        booking.end(complete, usage, noted, now);
        turn.write(&Line::End(Ended {
            r: *r,
            at: now,
            complete,
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            cached_tokens: usage.cached_tokens,
            keys: added,
        }));
    }
}

/// The booking is released under the same lock as its record.
impl Drop for Booked {
    fn drop(&mut self) {
        if let Some(booking) = self.booking.take() {
            let turn = turn(self.tape.as_ref(), |r| Line::Drop { r });
            drop(booking);
            drop(turn);
        }
    }
}

/// Takes the recording's lock and writes the line that `line` makes of the request's number.
fn turn(tape: Option<&(Arc<Recorder>, u64)>, line: impl FnOnce(u64) -> Line) -> Option<Turn<'_>> {
    let (recorder, r) = tape?;
    let mut turn = recorder.turn()?;
    turn.write(&line(*r));
    Some(turn)
}

/// Returns the numbers of a decision's endpoints.
#[must_use]
pub fn ids<'a>(picks: impl IntoIterator<Item = &'a Arc<Endpoint>>) -> Vec<EndpointId> {
    picks.into_iter().map(|endpoint| endpoint.id).collect()
}
