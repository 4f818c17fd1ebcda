//! What a run reports while it goes on. Called by `replay` in virtual time and by `loadgen` in real time;
//! [`crate::tally`] is fed by implementations of it.

use crate::served::{Queued, Sample, Served};
use attache_types::clock::Timestamp;

/// Receives the outcome of each request, and the load of the servers, in the order of time.
pub trait Observer {
    /// A request has ended: answered, rejected or lost.
    fn served(&mut self, served: &Served);

    /// A request has left the queue of its pool, or was rejected before it. Called before [`Self::served`], and never
    /// for pools without flow control.
    fn queued(&mut self, _queued: &Queued<'_>) {}

    /// The first response of a server that names itself. `endpoint` is its position in [`Served::endpoint`]. Only
    /// `loadgen` calls it.
    fn named(&mut self, _endpoint: u32, _name: &str) {}

    /// Why a request was rejected or lost: a reason that many requests may share. Called before [`Self::served`].
    fn failed(&mut self, _number: u64, _reason: &str) {}

    /// The load of all servers, once per virtual second. Servers that have left the pool are
    /// included. `loadgen` never calls it.
    fn sampled(&mut self, at: Timestamp, servers: &[Sample]);
}
