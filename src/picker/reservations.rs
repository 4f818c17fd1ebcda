//! Reservations: requests that are decided and booked before their clients send them.
//!
//! ```text
//! POST /reservations ─▶ decide, as for a live request ─▶ held here ─▶ a request names it: decide takes it over
//!                                                          └─ time-out, DELETE: the booking is released
//! ```
//!
//! An id is a secret of 128 random bits, and only requests of its tenant can use it. At most [`MAX_RESERVATIONS`] are
//! held, each at most [`MAX_TIMEOUT`]. What a reservation holds counts as that of a request in flight: on endpoints, in
//! the queue, in the limits of its tenant and its model.

use super::Picker;
use super::active::PoolRuntime;
use super::ceiling::Ceiling;
use super::decide::Plan;
use super::head::Head;
use super::hints::Hints;
use super::queues::AdmittedRequest;
use super::quotas::Permits;
use super::tenant::Tenant;
use crate::event::{DecisionRecord, Event, ReservationOutcome, UNSENT};
use ahash::AHashMap;
use attache_record::{Booked, RequestTape};
use attache_scheduling::Decision;
use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use parking_lot::Mutex;
use serde::Serialize;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// Request header with the id of a reservation. Attaché removes it.
pub const RESERVATION_HEADER: &str = "x-attache-reservation";
/// 30 s: long for the time between a call and the request that follows it.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);
/// 5 minutes: longest time-out. A reservation keeps its capacity from other requests until its own request comes.
pub const MAX_TIMEOUT: Duration = Duration::from_secs(300);
/// 1,024 reservations: as many requests as wait for their clients at once, of some 10 KB each.
pub const MAX_RESERVATIONS: usize = 1_024;

/// The id of a reservation, which the caller draws from the operating system.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ReservationId(pub u128);

impl ReservationId {
    /// The id in this text; `None` if it has another form than ids have.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let digits =
            Some(text.trim()).filter(|text| text.len() == 32 && text.bytes().all(|b| b.is_ascii_hexdigit()))?;
        u128::from_str_radix(digits, 16).ok().map(Self)
    }
}

impl fmt::Display for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// The id is a secret, so logs have none.
impl fmt::Debug for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReservationId")
    }
}

/// What a request books on endpoints.
#[derive(Debug)]
struct HeldBookings {
    _response: Option<Booked>,
    _prefill: Option<Box<Booked>>,
    _hints: Hints,
}

/// A decided request that its client has not sent yet. Dropping it releases everything.
#[derive(Debug)]
pub(crate) struct ReservedRequest {
    pub(crate) decision: Decision,
    pub(crate) runtime: Arc<PoolRuntime>,
    /// The numbers that the decision drew, for the same choice of a weighted model.
    pub(crate) rng: PickRng,
    /// What the request may ask for.
    pub(crate) size: RequestSize,
    tenant: Tenant,
    record: DecisionRecord,
    began: Timestamp,
    expires: Timestamp,
    tape: RequestTape,
    bookings: Option<HeldBookings>,
    pub(crate) permits: Permits,
    /// Dropped last, as in [`Plan`].
    pub(crate) admitted: Option<AdmittedRequest>,
}

/// The size of a request, as limits count it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestSize {
    /// Name of the model on the server.
    pub(crate) model: Arc<str>,
    pub(crate) max_tokens: Option<u32>,
    /// Responses for each prompt.
    pub(crate) choices: u32,
    pub(crate) ceiling: Ceiling,
}

impl RequestSize {
    /// Whether a request of the size `other` takes no more than was reserved.
    pub(crate) fn covers(&self, other: &Self) -> bool {
        (&self.model, self.max_tokens, self.choices) == (&other.model, other.max_tokens, other.choices)
            && self.ceiling.covers(other.ceiling)
    }
}

impl ReservedRequest {
    /// Holds what `plan` has booked for the request with these headers, until `expires`.
    pub(crate) fn new(plan: Plan, head: &Head, api: &'static str, rng: PickRng, times: (Timestamp, Timestamp)) -> Self {
        let (began, expires) = times;
        let tape = plan.booked.as_ref().map(|booked| booked.tape().clone()).unwrap_or_default();
        let prefill = plan.decision.split.as_ref().and_then(|split| split.prefill.first());
        let record = DecisionRecord {
            request_id: head.request_id(),
            agent: plan.agent,
            api,
            pool: plan.runtime.pool.name.clone(),
            model: plan.target.clone(),
            endpoint: plan.decision.picks.first().map(|pick| pick.authority.clone()).unwrap_or_default(),
            prefill: prefill.map(|endpoint| endpoint.authority.clone()),
            strategy: plan.strategy_name,
            reason: plan.decision.reason,
            estimated_prompt_tokens: plan.prompt_tokens,
            estimated_cached_tokens: plan.matched_tokens,
            ..DecisionRecord::default()
        };
        let (model, max_tokens, choices, ceiling) = (plan.target, plan.max_tokens, plan.choices, plan.ceiling);
        Self {
            decision: plan.decision,
            runtime: plan.runtime,
            rng,
            size: RequestSize { model, max_tokens, choices, ceiling },
            tenant: head.tenant().clone(),
            record,
            began,
            expires,
            tape,
            bookings: Some(HeldBookings { _response: plan.booked, _prefill: plan.prefill, _hints: plan.hints }),
            permits: plan.permits,
            admitted: plan.admitted,
        }
    }

    /// Whether a request with these headers may take it over at `now`.
    fn is_usable(&self, head: &Head, now: Timestamp) -> bool {
        self.tenant == *head.tenant() && now < self.expires
    }

    /// Releases the bookings on endpoints: the request that takes them over is booked next.
    pub(crate) fn unbook(&mut self) {
        self.bookings = None;
    }

    /// The request that takes the reservation over judges its probes.
    pub(crate) fn hand_over_probes(&mut self) {
        self.decision.probe = false;
        self.decision.encode_probe = false;
        self.decision.split.iter_mut().for_each(|split| split.probe = false);
    }
}

/// Other requests may probe the endpoints that this one does not probe.
impl Drop for ReservedRequest {
    fn drop(&mut self) {
        let Decision { picks, split, encode, probe, encode_probe, .. } = &self.decision;
        let prefill = split.as_ref().filter(|split| split.probe).and_then(|split| split.prefill.first());
        let own = picks.first().filter(|_| *probe);
        for endpoint in own.into_iter().chain(prefill).chain(encode.first().filter(|_| *encode_probe)) {
            self.tape.probe_lost(endpoint);
        }
    }
}

/// One open reservation, as the admin port shows it. Its id is a secret.
#[derive(Clone, Debug, Serialize)]
pub struct OpenReservation {
    /// Name of the pool.
    pub pool: Arc<str>,
    /// Name of the model on the server.
    pub model: Arc<str>,
    /// The endpoint that gets the request.
    pub endpoint: Arc<str>,
    /// The prefill worker of a split request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Arc<str>>,
    /// The tenant whose requests may use it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// Time since the reservation, seconds.
    pub age_seconds: f64,
    /// Time until it ends, seconds.
    pub expires_in_seconds: f64,
}

/// All open reservations.
#[derive(Debug, Default)]
pub(crate) struct Reservations(Mutex<AHashMap<ReservationId, Box<ReservedRequest>>>);

impl Reservations {
    /// Holds a reservation. If [`MAX_RESERVATIONS`] are open, it is returned instead.
    pub(crate) fn hold(&self, id: ReservationId, reserved: Box<ReservedRequest>) -> Result<(), Box<ReservedRequest>> {
        let mut open = self.0.lock();
        if open.len() >= MAX_RESERVATIONS || open.contains_key(&id) {
            return Err(reserved);
        }
        open.insert(id, reserved);
        Ok(())
    }

    /// Whether no further reservation can be held.
    pub(crate) fn is_full(&self) -> bool {
        self.0.lock().len() >= MAX_RESERVATIONS
    }

    /// Takes the reservation that a request with these headers names; `None` if it is unknown, has expired, or is that
    /// of another tenant.
    pub(crate) fn take(&self, head: &Head, now: Timestamp) -> Option<Box<ReservedRequest>> {
        let id = head.get(RESERVATION_HEADER).and_then(ReservationId::read)?;
        let mut open = self.0.lock();
        if open.get(&id).is_some_and(|reserved| reserved.is_usable(head, now)) { open.remove(&id) } else { None }
    }

    /// Reads the reservation that such a request would take.
    pub(crate) fn peek<T>(
        &self,
        head: &Head,
        now: Timestamp,
        read: impl FnOnce(&ReservedRequest) -> Option<T>,
    ) -> Option<T> {
        let id = head.get(RESERVATION_HEADER).and_then(ReservationId::read)?;
        let open = self.0.lock();
        let reserved = open.get(&id).filter(|reserved| reserved.is_usable(head, now))?;
        read(reserved)
    }
}

impl Picker {
    /// The open reservations, the oldest first.
    #[must_use]
    pub fn reservations(&self, now: Timestamp) -> Vec<OpenReservation> {
        self.expire_reservations(now);
        let open = self.reservations.0.lock();
        let mut shown: Vec<(Timestamp, OpenReservation)> =
            open.values().map(|held| (held.began, held.shown(now))).collect();
        drop(open);
        shown.sort_by_key(|(began, _)| *began);
        shown.into_iter().map(|(_, shown)| shown).collect()
    }

    /// Releases the reservation of this id before its time; false if there is none.
    pub fn release_reservation(&self, id: ReservationId, now: Timestamp) -> bool {
        self.expire_reservations(now);
        let released = self.reservations.0.lock().remove(&id);
        let was_open = released.is_some();
        self.unsent(released, ReservationOutcome::Released, now);
        was_open
    }

    /// Releases the reservations whose time has come. To be called at each of these times.
    pub fn expire_reservations(&self, now: Timestamp) {
        let expired: Vec<_> = self.reservations.0.lock().extract_if(|_, held| held.expires <= now).collect();
        self.unsent(expired.into_iter().map(|(_, held)| held), ReservationOutcome::Expired, now);
    }

    /// Drops, logs and counts reservations whose requests were not sent. Called without their lock, since the end of a
    /// booking lets other requests leave the queue.
    fn unsent(&self, all: impl IntoIterator<Item = Box<ReservedRequest>>, outcome: ReservationOutcome, now: Timestamp) {
        for mut held in all {
            let (record, duration) = (std::mem::take(&mut held.record), now.since(held.began));
            drop(held);
            if self.observer.keeps_decisions() {
                let duration_ms = duration.as_secs_f64() * 1e3;
                self.observer.log(DecisionRecord { ended: now, duration_ms, end: UNSENT, ..record });
            }
            self.observer.event(Event::Reservation(outcome));
        }
    }
}

impl ReservedRequest {
    fn shown(&self, now: Timestamp) -> OpenReservation {
        OpenReservation {
            pool: self.record.pool.clone(),
            model: self.record.model.clone(),
            endpoint: self.record.endpoint.clone(),
            prefill: self.record.prefill.clone(),
            tenant: self.tenant.name().map(str::to_owned),
            age_seconds: now.since(self.began).as_secs_f64(),
            expires_in_seconds: self.expires.since(now).as_secs_f64(),
        }
    }
}

#[cfg(test)]
mod tests;
