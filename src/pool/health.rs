//! Passive health of an endpoint: the outcomes of the requests that it served.
//!
//! 1. Consecutive failures eject an endpoint ([`EndpointHealth::observe`]), for a time that doubles with each
//!    consecutive ejection.
//! 2. After that time it is half open: one request at a time probes it ([`EndpointHealth::claim_probe`], which the
//!    scheduler calls).
//! 3. The first success readmits it (`EndpointHealth::succeeded`), and a slow start limits its load at first. A failed
//!    probe ejects it again.
//!
//! Any success proves that the endpoint works, so the success of a request from before the ejection readmits it too. A
//! failure of such a request changes nothing. A restart of the server's process also ends an ejection
//! ([`EndpointHealth::reset`]).
//!
//! | outcome | a client can cause it | ejects |
//! |---|---|---|
//! | [`HealthOutcome::ConnectFailure`] | no | at once, after two in a row |
//! | [`HealthOutcome::Failure`] | rarely, by a prefill that is late or interrupted | at once, after five in a row, see below |
//! | [`HealthOutcome::ErrorResponse`] | yes, by its content | after five of one API and a period ([`errors`]), see below |
//!
//! The last two eject at most a share of the pool ([`HealthPolicy::max_ejection_percent`]).
//!
//! Decisions read atomics together with the current time, so an ejection takes effect at once, without a new snapshot.
//! Changes that must happen once (an ejection, the start of a probe) use compare-and-swap.

use attache_protocol::Api;
use attache_types::clock::Timestamp;
use attache_types::labels::Counts;
use errors::ErrorRuns;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

mod errors;

pub use errors::ClientSlot;

/// Default of [`HealthPolicy::consecutive_failures`]: five, as for 5xx responses in Envoy's outlier detection.
pub(crate) const DEFAULT_CONSECUTIVE_FAILURES: u32 = 5;
/// Default of [`HealthPolicy::consecutive_connect_failures`]: a refused connection is stronger evidence than
/// a 5xx, so two suffice.
pub const DEFAULT_CONSECUTIVE_CONNECT_FAILURES: u32 = 2;
/// Default length of the first ejection, 5 s. A restart of a model server takes longer, which doubling covers.
pub(crate) const DEFAULT_EJECTION: Duration = Duration::from_secs(5);
/// Default length of the longest ejection, 5 min.
pub(crate) const DEFAULT_MAX_EJECTION: Duration = Duration::from_secs(300);
/// Default length of the slow start: after 10 s, a returned server gets its full load.
pub(crate) const DEFAULT_SLOW_START: Duration = Duration::from_secs(10);
/// Default error period, 5 s: as long as the first ejection. A working server has at least one success in this time,
/// unless only one client uses it.
pub(crate) const DEFAULT_ERROR_PERIOD: Duration = Duration::from_secs(5);
/// Default largest share of ejected endpoints, in percent. Envoy's default is 10, for clusters of many hosts. Pools of
/// model servers are small: half of them may fail on their own, and the other half must stay whatever clients send.
pub(crate) const DEFAULT_MAX_EJECTION_PERCENT: u32 = 50;

/// When an endpoint is ejected, for how long, and how it returns.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct HealthPolicy {
    /// Number of consecutive failures that eject an endpoint; 0 disables ejection.
    pub consecutive_failures: u32,
    /// Number of consecutive connect failures that eject an endpoint; 0 counts them like other failures.
    pub consecutive_connect_failures: u32,
    /// Length of the first ejection.
    #[serde(serialize_with = "attache_types::units::duration_text")]
    pub ejection: Duration,
    /// Length of the longest ejection.
    #[serde(serialize_with = "attache_types::units::duration_text")]
    pub max_ejection: Duration,
    /// Time after an ejection in which the endpoint's load counts higher.
    #[serde(serialize_with = "attache_types::units::duration_text")]
    pub slow_start: Duration,
    /// How long error responses to one client must continue, without a success of the endpoint, before they eject it.
    /// The time is divided by the number of clients that receive them, up to `consecutive_failures`. 0 ejects at the
    /// last of `consecutive_failures` error responses.
    #[serde(serialize_with = "attache_types::units::duration_text")]
    pub error_period: Duration,
    /// Largest share, in percent, of the endpoints with the same roles that error responses may eject; one endpoint may
    /// always be ejected. Connect failures eject regardless of it, since no client can cause them.
    pub max_ejection_percent: u32,
}

impl HealthPolicy {
    /// Whether error responses may eject one more endpoint, if `away` of the `total` endpoints with the same roles are
    /// ejected.
    #[must_use]
    pub fn may_eject(&self, away: usize, total: usize) -> bool {
        away == 0 || (away + 1).saturating_mul(100) <= total.saturating_mul(self.max_ejection_percent as usize)
    }
}

impl Default for HealthPolicy {
    fn default() -> Self {
        Self {
            consecutive_failures: DEFAULT_CONSECUTIVE_FAILURES,
            consecutive_connect_failures: DEFAULT_CONSECUTIVE_CONNECT_FAILURES,
            ejection: DEFAULT_EJECTION,
            max_ejection: DEFAULT_MAX_EJECTION,
            slow_start: DEFAULT_SLOW_START,
            error_period: DEFAULT_ERROR_PERIOD,
            max_ejection_percent: DEFAULT_MAX_EJECTION_PERCENT,
        }
    }
}

attache_types::labels! {
    /// How a request ended, as seen by the endpoint that served it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
    #[serde(rename_all = "snake_case")]
    pub enum HealthOutcome {
        /// The endpoint responded without an error of its own.
        Success => "success",
        /// Envoy or Attaché could not connect to the endpoint.
        ConnectFailure => "connect_failure",
        /// The endpoint failed, and the request's content is rarely the cause. Examples: a prefill that is interrupted
        /// or late, a simulated failure, a 5xx of an old recording.
        Failure => "failure",
        /// The endpoint was reached, and it responded with a 5xx or not at all. The request's content may be the cause.
        ErrorResponse => "error_response",
    }
}

impl HealthOutcome {
    /// Whether the outcome can eject an endpoint.
    #[must_use]
    pub fn is_failure(self) -> bool {
        self != Self::Success
    }

    /// Returns the outcome of a response with this status. `None` for 501 and 505, which only name features that a
    /// server lacks.
    #[must_use]
    pub fn of_status(status: u16) -> Option<Self> {
        match status {
            501 | 505 => None,
            500..=599 => Some(Self::ErrorResponse),
            _ => Some(Self::Success),
        }
    }
}

/// The outcome of a request, with its API and client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// How the request ended.
    pub outcome: HealthOutcome,
    /// The API of the request.
    pub api: Api,
    /// The client of the request.
    pub client: ClientSlot,
}

impl From<HealthOutcome> for Observation {
    fn from(outcome: HealthOutcome) -> Self {
        Self { outcome, api: Api::Other, client: ClientSlot::default() }
    }
}

/// An ejection in effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ejection {
    /// The outcome that ejected the endpoint.
    pub cause: HealthOutcome,
    /// Time until one request probes the endpoint; zero if it may do so now.
    pub returns_in: Duration,
}

/// The effect of an observation on the endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The endpoint's state is unchanged, or its ejection has ended.
    Kept,
    /// This observation ejected the endpoint.
    Ejected,
    /// The endpoint was not ejected, because [`HealthPolicy::max_ejection_percent`] of its peers are.
    Capped,
}

/// How a decision may use an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// Use it without restriction.
    Open,
    /// Use it, but count its load this many percent higher (0..=300), since it has just returned.
    SlowStart(u32),
    /// Send one probe, if [`EndpointHealth::claim_probe`] grants it.
    HalfOpen,
    /// Send no requests, it is ejected.
    Ejected,
}

/// Whether Attaché or the gateway could connect to an endpoint. No decision reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contact {
    /// Nothing is known: no scrape, request or response has shown it yet.
    Unknown,
    /// The endpoint has responded, and no later connection failed.
    Reached,
    /// The last attempt could not connect.
    Unreachable,
}

/// Flag in `away_until`: a probe is in flight.
const PROBE_OUT: u64 = 1;
/// Value of `away_until` for half open without a probe: a time in the past.
const HALF_OPEN: u64 = 2;

/// Passive health of one endpoint.
#[derive(Debug, Default)]
pub struct EndpointHealth {
    /// End of the ejection in nanoseconds, lowest bit cleared; 0 when the endpoint is in use. While a probe is in
    /// flight, the lowest bit ([`PROBE_OUT`]) is set, and the time is the deadline for its result. One word makes a
    /// change of state one swap.
    away_until: AtomicU64,
    /// Time of the return from an ejection; 0 when the endpoint was never ejected.
    recovered_at: AtomicU64,
    /// State that decisions do not read.
    record: Box<Record>,
}

/// The outcomes since the last success.
#[derive(Debug, Default)]
struct Record {
    failures: AtomicU32,
    connect_failures: AtomicU32,
    ejections: AtomicU32,
    /// A [`Contact`].
    contact: AtomicU8,
    /// The [`HealthOutcome`] that started the latest ejection.
    cause: AtomicU8,
    /// Ejections since the start, by cause.
    ejected: Counts<HealthOutcome>,
    errors: ErrorRuns,
}

impl Record {
    fn set_contact(&self, contact: Contact) {
        // Almost every response finds the value that it would write.
        if self.contact.load(Relaxed) != contact as u8 {
            self.contact.store(contact as u8, Relaxed);
        }
    }

    fn clear_failures(&self) {
        self.failures.store(0, Relaxed);
        self.connect_failures.store(0, Relaxed);
    }
}

impl EndpointHealth {
    /// Returns how a decision may use the endpoint at `now`.
    #[inline]
    #[must_use]
    pub fn availability(&self, now: Timestamp, policy: &HealthPolicy) -> Availability {
        let (away_until, recovered) = (self.away_until.load(Relaxed), self.recovered_at.load(Relaxed));
        // Most endpoints were never ejected.
        if away_until | recovered == 0 {
            Availability::Open
        } else {
            Self::returning(away_until, recovered, now, policy)
        }
    }

    fn returning(away_until: u64, recovered: u64, now: Timestamp, policy: &HealthPolicy) -> Availability {
        if away_until != 0 && policy.consecutive_failures != 0 {
            return if now.0 < away_until { Availability::Ejected } else { Availability::HalfOpen };
        }
        if recovered != 0 && !policy.slow_start.is_zero() {
            let since = now.since(Timestamp(recovered));
            if since < policy.slow_start {
                let left = 1.0 - since.as_secs_f64() / policy.slow_start.as_secs_f64();
                return Availability::SlowStart(percent(left * 300.0));
            }
        }
        Availability::Open
    }

    /// Returns why the endpoint is ejected or half open, and when it returns; `None` if it is in use.
    #[must_use]
    pub fn ejection(&self, now: Timestamp, policy: &HealthPolicy) -> Option<Ejection> {
        if !self.is_away(now, policy) {
            return None;
        }
        let cause = self.record.cause.load(Relaxed);
        let cause = HealthOutcome::ALL.into_iter().find(|outcome| outcome.is_failure() && *outcome as u8 == cause);
        // Another thread has started the ejection, and stores the cause next.
        let cause = cause.unwrap_or(HealthOutcome::Failure);
        Some(Ejection { cause, returns_in: Timestamp(self.away_until.load(Relaxed)).since(now) })
    }

    /// The number of ejections since the endpoint is known, by cause.
    pub fn ejection_counts(&self) -> impl Iterator<Item = (HealthOutcome, u64)> + '_ {
        self.record.ejected.each().filter(|(cause, _)| cause.is_failure())
    }

    /// Claims the probe of an endpoint that [`Self::availability`] reported as half open. Of several concurrent
    /// callers, one gets true; its request is the probe. The others must pick another endpoint.
    #[must_use]
    pub fn claim_probe(&self, now: Timestamp, policy: &HealthPolicy) -> bool {
        let away_until = self.away_until.load(Relaxed);
        if away_until == 0 {
            return true; // A success has readmitted the endpoint meanwhile.
        }
        // A client may disconnect before its probe has a result. The probe is awaited only for this long, so that the
        // endpoint can be probed again.
        let deadline = now.after(policy.max_ejection).0 | PROBE_OUT;
        now.0 >= away_until && self.away_until.compare_exchange(away_until, deadline, Relaxed, Relaxed).is_ok()
    }

    /// Records that the endpoint responded to Attaché.
    pub fn reached(&self) {
        self.record.set_contact(Contact::Reached);
    }

    /// Records that Attaché could not connect to the endpoint. Only requests eject it.
    pub fn unreachable(&self) {
        self.record.set_contact(Contact::Unreachable);
    }

    /// Whether the endpoint could be reached at last.
    #[must_use]
    pub fn contact(&self) -> Contact {
        match self.record.contact.load(Relaxed) {
            reached if reached == Contact::Reached as u8 => Contact::Reached,
            unreachable if unreachable == Contact::Unreachable as u8 => Contact::Unreachable,
            _ => Contact::Unknown,
        }
    }

    /// Records that the probe ended without a result, because its client disconnected. Another probe may start.
    pub fn probe_lost(&self) {
        let away_until = self.away_until.load(Relaxed);
        if away_until & PROBE_OUT != 0 {
            // On failure another thread has changed the state, which then stands.
            let _ = self.away_until.compare_exchange(away_until, HALF_OPEN, Relaxed, Relaxed);
        }
    }

    /// Whether the endpoint is ejected or half open.
    #[must_use]
    pub(crate) fn is_away(&self, now: Timestamp, policy: &HealthPolicy) -> bool {
        matches!(self.availability(now, policy), Availability::Ejected | Availability::HalfOpen)
    }

    /// As [`Self::observe`], without a limit on the share of ejected endpoints. Returns true when this outcome ejected
    /// the endpoint.
    pub fn record(&self, outcome: impl Into<Observation>, now: Timestamp, policy: &HealthPolicy) -> bool {
        self.observe(outcome.into(), now, policy, || true) == Verdict::Ejected
    }

    /// Records the outcome of a request. `may_eject` returns whether one more of the endpoints with the same roles may
    /// be ejected.
    pub fn observe(
        &self,
        observation: Observation,
        now: Timestamp,
        policy: &HealthPolicy,
        may_eject: impl FnOnce() -> bool,
    ) -> Verdict {
        let Observation { outcome, api, client } = observation;
        match outcome {
            HealthOutcome::Success => self.record.set_contact(Contact::Reached),
            HealthOutcome::ConnectFailure => self.record.set_contact(Contact::Unreachable),
            // A server that does not respond at all counts as an error response too.
            HealthOutcome::Failure | HealthOutcome::ErrorResponse => {}
        }
        if outcome == HealthOutcome::Success {
            self.succeeded(api, now);
            return Verdict::Kept;
        }
        if policy.consecutive_failures == 0 {
            return Verdict::Kept;
        }
        let away_until = self.away_until.load(Relaxed);
        if away_until & PROBE_OUT == 0 && now.0 < away_until {
            return Verdict::Kept; // The request was sent before the ejection.
        }
        let probe_failed = away_until != 0;
        let record = &*self.record;
        let connect_failures = match outcome {
            HealthOutcome::ConnectFailure => record.connect_failures.fetch_add(1, Relaxed) + 1,
            _ => {
                record.connect_failures.store(0, Relaxed);
                0
            }
        };
        if outcome == HealthOutcome::ErrorResponse {
            if probe_failed {
                // Probes of a single client lengthen the ejection only once.
                return self.eject(away_until, outcome, record.errors.probed_by(client), now, policy);
            }
            return match record.errors.failed(api, client, now, policy) {
                false => Verdict::Kept,
                true if !may_eject() => Verdict::Capped,
                true => self.eject(away_until, outcome, true, now, policy),
            };
        }
        let failures = record.failures.fetch_add(1, Relaxed) + 1;
        let unreachable = policy.consecutive_connect_failures;
        let ejects = probe_failed
            || failures >= policy.consecutive_failures
            || (unreachable != 0 && connect_failures >= unreachable);
        if !ejects {
            return Verdict::Kept;
        }
        // A late or interrupted prefill may be the fault of the request. Only unreachable servers are ejected beyond
        // the share.
        if outcome == HealthOutcome::Failure && !probe_failed && !may_eject() {
            return Verdict::Capped;
        }
        self.eject(away_until, outcome, true, now, policy)
    }

    /// Another picker has ejected the endpoint: the next failure here ejects it, unless a success comes first. It stays
    /// in use, because only the other picker may be unable to reach it.
    pub fn warn(&self, policy: &HealthPolicy) {
        let record = &*self.record;
        record.failures.fetch_max(policy.consecutive_failures.saturating_sub(1), Relaxed);
        record.connect_failures.fetch_max(policy.consecutive_connect_failures.saturating_sub(1), Relaxed);
    }

    /// Clears the failures, and readmits the endpoint if it is ejected or half open.
    fn succeeded(&self, api: Api, now: Timestamp) {
        self.record.clear_failures();
        self.record.errors.succeeded(api, now);
        if self.away_until.swap(0, Relaxed) != 0 {
            self.record.ejections.store(0, Relaxed);
            self.record.errors.clear();
            self.recovered_at.store(now.0.max(1), Relaxed);
        }
    }

    /// Starts an ejection if the state still is `before`. If `longer`, it takes twice as long as the previous one.
    /// Returns [`Verdict::Kept`] when another outcome changed the state first.
    fn eject(&self, before: u64, cause: HealthOutcome, longer: bool, now: Timestamp, policy: &HealthPolicy) -> Verdict {
        let ejections = self.record.ejections.load(Relaxed);
        let doublings = if longer { ejections } else { ejections.saturating_sub(1) }.min(16);
        let length = policy.ejection.saturating_mul(1 << doublings).min(policy.max_ejection);
        let until = now.after(length).0 & !PROBE_OUT;
        if self.away_until.compare_exchange(before, until.max(HALF_OPEN), Relaxed, Relaxed).is_err() {
            return Verdict::Kept;
        }
        self.record.ejections.fetch_add(u32::from(longer), Relaxed);
        self.record.cause.store(cause as u8, Relaxed);
        self.record.ejected.count(cause);
        self.record.clear_failures();
        if before == 0 {
            self.record.errors.clear();
        }
        Verdict::Ejected
    }

    /// Clears failures and ejections after a restart of the server's process. A slow start in progress continues.
    pub fn reset(&self) {
        self.record.clear_failures();
        self.record.errors.clear();
        self.record.ejections.store(0, Relaxed);
        self.away_until.store(0, Relaxed);
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 0..=300")]
fn percent(value: f64) -> u32 {
    value.clamp(0.0, 300.0) as u32
}

#[cfg(test)]
mod tests;
