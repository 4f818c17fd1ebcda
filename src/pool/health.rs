//! Passive health: the outcomes of the requests that were sent to an endpoint.
//!
//! Consecutive failures eject an endpoint for a while that doubles with each ejection in a row; then it is half open: one request at
//! a time probes it, and the first success lets the others back in, slowly at first. A success is proof of life whenever it comes, so
//! a straggler's success ends an ejection too; a straggler's failure says nothing new.
//!
//! | outcome | a client can cause it | ejects |
//! |---|---|---|
//! | [`Outcome::ConnectFailure`] | no | at once, two in a row |
//! | [`Outcome::Failure`] | rarely, by a prefill that is late or breaks off | at once, five in a row, and never more than a share of the pool |
//! | [`Outcome::ErrorResponse`] | yes, by what it asks for | five in a row of one API, after a period without success ([`errors`]), and never more than a share of the pool |
//!
//! All that decisions read is atomics that are read with `now`, so an ejection acts at once, without a new snapshot; what must happen
//! once (an ejection, the departure of a probe) is settled by compare-and-swap.

use attache_protocol::Api;
use attache_types::clock::Timestamp;
use errors::ErrorRuns;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

mod errors;

pub use errors::ClientSlot;

/// Envoy's own outlier detection ejects after five 5xx in a row.
pub const DEFAULT_CONSECUTIVE_FAILURES: u32 = 5;
/// A refused connection says more than a 5xx: two in a row suffice.
pub const DEFAULT_CONSECUTIVE_CONNECT_FAILURES: u32 = 2;
/// First ejection; a model server that restarts needs longer, and gets it by doubling.
pub const DEFAULT_EJECTION: Duration = Duration::from_secs(5);
/// Doubling stops here.
pub const DEFAULT_MAX_EJECTION: Duration = Duration::from_secs(300);
/// A server that came back gets its full share after this long.
pub const DEFAULT_SLOW_START: Duration = Duration::from_secs(10);
/// As long as the first ejection: a server to which honest clients send anything succeeds at least once in this period.
pub const DEFAULT_ERROR_PERIOD: Duration = Duration::from_secs(5);
/// Envoy's default is 10, for clusters of many hosts. Pools of model servers are small: half of them must be able to fail on their own, and
/// the other half must remain whatever clients do.
pub const DEFAULT_MAX_EJECTION_PERCENT: u32 = 50;

/// When to eject, for how long, and how to let back in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthPolicy {
    /// Failures in a row that eject; 0 turns ejection off.
    pub consecutive_failures: u32,
    /// Connect failures in a row that eject; 0 counts them like any failure.
    pub consecutive_connect_failures: u32,
    /// Length of the first ejection.
    pub ejection: Duration,
    /// Longest ejection.
    pub max_ejection: Duration,
    /// How long a returned endpoint is favoured less.
    pub slow_start: Duration,
    /// How long error responses to one client must go on, without a success of the endpoint, before they eject it. Divided by the number of
    /// clients that receive them, up to `consecutive_failures`. 0 ejects at the last of `consecutive_failures`.
    pub error_period: Duration,
    /// Largest share of the endpoints with the same roles that may be ejected when error responses eject one more, percent. One endpoint may
    /// always be. An endpoint that can't be reached is ejected whatever this says: no client can cause that.
    pub max_ejection_percent: u32,
}

impl HealthPolicy {
    /// Whether error responses may eject one endpoint of `total` with the same roles, of which `away` are ejected.
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

/// How a request ended for the endpoint that it was sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// The endpoint responded, and not with an error of its own.
    Success,
    /// The endpoint failed, whatever was asked of it: a prefill server that breaks off or is late, a simulated endpoint, a 5xx of an old
    /// recording.
    Failure,
    /// The endpoint could not be reached.
    ConnectFailure,
    /// The endpoint was reached, and its response is a 5xx or did not come. The request may be the cause.
    ErrorResponse,
}

impl Outcome {
    /// The outcome of a response with this status; `None` for 501 and 505, which say what a server does not implement.
    #[must_use]
    pub fn of_status(status: u16) -> Option<Self> {
        match status {
            501 | 505 => None,
            500..=599 => Some(Self::ErrorResponse),
            _ => Some(Self::Success),
        }
    }
}

/// An outcome, and of what kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The outcome.
    pub outcome: Outcome,
    /// The request's API.
    pub api: Api,
    /// The request's client.
    pub client: ClientSlot,
}

impl From<Outcome> for Observation {
    fn from(outcome: Outcome) -> Self {
        Self { outcome, api: Api::Other, client: ClientSlot::default() }
    }
}

/// What an observation changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The endpoint keeps its standing, or has come back.
    Kept,
    /// This observation ejected it.
    Ejected,
    /// It would be ejected, but [`HealthPolicy::max_ejection_percent`] of its peers are.
    Capped,
}

/// What a decision may do with an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Availability {
    /// Use it.
    Open,
    /// It came back a moment ago: count its load this many percent higher (0..=300).
    SlowStart(u32),
    /// One probe may go there, if [`EndpointHealth::claim_probe`] grants it.
    HalfOpen,
    /// Leave it alone.
    Ejected,
}

/// Marks in `away_until` that a probe is out.
const PROBE_OUT: u64 = 1;
/// Half open, with no probe out: a moment in the past.
const HALF_OPEN: u64 = 2;

/// The passive health of one endpoint.
#[derive(Debug, Default)]
pub struct EndpointHealth {
    /// Until when it is left alone, nanoseconds with the lowest bit cleared; 0 when it is in use. While a probe is out: until when
    /// that is waited for, with the lowest bit ([`PROBE_OUT`]) set. One word, so that every change of state is one swap.
    away_until: AtomicU64,
    /// When it came back from an ejection; 0 when it was never away.
    recovered_at: AtomicU64,
    /// What decisions don't read.
    record: Box<Record>,
}

/// The outcomes since the last success.
#[derive(Debug, Default)]
struct Record {
    failures: AtomicU32,
    connect_failures: AtomicU32,
    ejections: AtomicU32,
    errors: ErrorRuns,
}

impl Record {
    fn clear_failures(&self) {
        self.failures.store(0, Relaxed);
        self.connect_failures.store(0, Relaxed);
    }
}

impl EndpointHealth {
    /// What may be done with the endpoint at `now`.
    #[inline]
    #[must_use]
    pub fn availability(&self, now: Timestamp, policy: &HealthPolicy) -> Availability {
        let (away_until, recovered) = (self.away_until.load(Relaxed), self.recovered_at.load(Relaxed));
        // Most were never away.
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

    /// Asks to send a request to an endpoint that [`Self::availability`] called half open. Of those who ask at the same time one is
    /// told true: its request is the probe, and what becomes of it decides. The others look elsewhere.
    #[must_use]
    pub fn claim_probe(&self, now: Timestamp, policy: &HealthPolicy) -> bool {
        let away_until = self.away_until.load(Relaxed);
        if away_until == 0 {
            return true; // another probe has come back well in between: it is open
        }
        // A probe that never reports (its client left) must not keep the endpoint away for ever: it is waited for so long.
        let deadline = now.after(policy.max_ejection).0 | PROBE_OUT;
        now.0 >= away_until && self.away_until.compare_exchange(away_until, deadline, Relaxed, Relaxed).is_ok()
    }

    /// The probe ended without telling anything (its client left): another may go.
    pub fn probe_lost(&self) {
        let away_until = self.away_until.load(Relaxed);
        if away_until & PROBE_OUT != 0 {
            // Lost to another change of state: then that one counts.
            let _ = self.away_until.compare_exchange(away_until, HALF_OPEN, Relaxed, Relaxed);
        }
    }

    /// Whether the endpoint is ejected or half open.
    #[must_use]
    pub fn is_away(&self, now: Timestamp, policy: &HealthPolicy) -> bool {
        matches!(self.availability(now, policy), Availability::Ejected | Availability::HalfOpen)
    }

    /// [`Self::observe`] where no share limits ejections. Returns true when this outcome ejected the endpoint.
    pub fn record(&self, outcome: impl Into<Observation>, now: Timestamp, policy: &HealthPolicy) -> bool {
        self.observe(outcome.into(), now, policy, || true) == Verdict::Ejected
    }

    /// Takes in the outcome of a request. `may_eject` says whether error responses may eject one more of the endpoint's peers.
    pub fn observe(
        &self,
        observation: Observation,
        now: Timestamp,
        policy: &HealthPolicy,
        may_eject: impl FnOnce() -> bool,
    ) -> Verdict {
        let Observation { outcome, api, client } = observation;
        if outcome == Outcome::Success {
            self.succeeded(api, now);
            return Verdict::Kept;
        }
        if policy.consecutive_failures == 0 {
            return Verdict::Kept;
        }
        let away_until = self.away_until.load(Relaxed);
        if away_until & PROBE_OUT == 0 && now.0 < away_until {
            return Verdict::Kept; // a straggler that was sent before the ejection
        }
        let probe_failed = away_until != 0;
        let record = &*self.record;
        let connect_failures = match outcome {
            Outcome::ConnectFailure => record.connect_failures.fetch_add(1, Relaxed) + 1,
            _ => {
                record.connect_failures.store(0, Relaxed);
                0
            }
        };
        if outcome == Outcome::ErrorResponse {
            if probe_failed {
                // One client's probes must not keep the endpoint away for longer and longer.
                return self.eject(away_until, record.errors.probed_by(client), now, policy);
            }
            return match record.errors.failed(api, client, now, policy) {
                false => Verdict::Kept,
                true if !may_eject() => Verdict::Capped,
                true => self.eject(away_until, true, now, policy),
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
        // A late or broken prefill may be the request's fault. Only a server that can't be reached is ejected whatever the share.
        if outcome == Outcome::Failure && !probe_failed && !may_eject() {
            return Verdict::Capped;
        }
        self.eject(away_until, true, now, policy)
    }

    fn succeeded(&self, api: Api, now: Timestamp) {
        self.record.clear_failures();
        self.record.errors.succeeded(api, now);
        if self.away_until.swap(0, Relaxed) != 0 {
            self.record.ejections.store(0, Relaxed);
            self.record.errors.clear();
            self.recovered_at.store(now.0.max(1), Relaxed);
        }
    }

    /// Begins an ejection in place of the state `before`, twice as long as the one before if it is `longer`. [`Verdict::Kept`] when another
    /// outcome was faster.
    fn eject(&self, before: u64, longer: bool, now: Timestamp, policy: &HealthPolicy) -> Verdict {
        let ejections = self.record.ejections.load(Relaxed);
        let doublings = if longer { ejections } else { ejections.saturating_sub(1) }.min(16);
        let length = policy.ejection.saturating_mul(1 << doublings).min(policy.max_ejection);
        let until = now.after(length).0 & !PROBE_OUT;
        if self.away_until.compare_exchange(before, until.max(HALF_OPEN), Relaxed, Relaxed).is_err() {
            return Verdict::Kept;
        }
        self.record.ejections.fetch_add(u32::from(longer), Relaxed);
        self.record.clear_failures();
        if before == 0 {
            self.record.errors.clear();
        }
        Verdict::Ejected
    }

    /// Forgets failures and ejections: the server's process is a new one. A slow start that is under way goes on.
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
