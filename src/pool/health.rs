//! Passive health: what became of the requests that were sent to an endpoint.
//!
//! Consecutive failures (a refused connection, a 5xx) eject an endpoint for a while that doubles with each ejection in a row;
//! then it is half open: one request at a time probes it, and the first success lets the others back in, slowly at first. A
//! success is proof of life whenever it comes, so a straggler's success ends an ejection too; a straggler's failure says nothing new.
//! All state is a handful of atomics that are read with `now` on every decision, so an ejection acts at once, without a new
//! snapshot; what must happen once (an ejection, the departure of a probe) is settled by compare-and-swap.

use crate::clock::Timestamp;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

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
}

impl Default for HealthPolicy {
    fn default() -> Self {
        Self {
            consecutive_failures: DEFAULT_CONSECUTIVE_FAILURES,
            consecutive_connect_failures: DEFAULT_CONSECUTIVE_CONNECT_FAILURES,
            ejection: DEFAULT_EJECTION,
            max_ejection: DEFAULT_MAX_EJECTION,
            slow_start: DEFAULT_SLOW_START,
        }
    }
}

/// What a request told about the endpoint that served it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// It answered, and not with a 5xx.
    Success,
    /// It answered with a 5xx.
    Failure,
    /// It could not be reached.
    ConnectFailure,
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
    failures: AtomicU32,
    connect_failures: AtomicU32,
    ejections: AtomicU32,
    /// Until when it is left alone, nanoseconds with the lowest bit cleared; 0 when it is in use. While a probe is out: until when
    /// that is waited for, with the lowest bit ([`PROBE_OUT`]) set. One word, so that every change of state is one swap.
    away_until: AtomicU64,
    /// When it came back from an ejection; 0 when it was never away.
    recovered_at: AtomicU64,
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

    /// Takes in what became of a request. Returns true when this very outcome ejected the endpoint.
    pub fn record(&self, outcome: Outcome, now: Timestamp, policy: &HealthPolicy) -> bool {
        if outcome == Outcome::Success {
            self.failures.store(0, Relaxed);
            self.connect_failures.store(0, Relaxed);
            if self.away_until.swap(0, Relaxed) != 0 {
                self.ejections.store(0, Relaxed);
                self.recovered_at.store(now.0.max(1), Relaxed);
            }
            return false;
        }
        if policy.consecutive_failures == 0 {
            return false;
        }
        let away_until = self.away_until.load(Relaxed);
        if away_until & PROBE_OUT == 0 && now.0 < away_until {
            return false; // a straggler that was sent before the ejection
        }
        let failures = self.failures.fetch_add(1, Relaxed) + 1;
        let connect_failures = match outcome {
            Outcome::ConnectFailure => self.connect_failures.fetch_add(1, Relaxed) + 1,
            _ => {
                self.connect_failures.store(0, Relaxed);
                0
            }
        };
        let probe_failed = away_until != 0;
        let unreachable = policy.consecutive_connect_failures;
        let eject = probe_failed
            || failures >= policy.consecutive_failures
            || (unreachable != 0 && connect_failures >= unreachable);
        eject && self.eject(away_until, now, policy)
    }

    /// Begins an ejection in place of the state `before`; false when another outcome was faster.
    fn eject(&self, before: u64, now: Timestamp, policy: &HealthPolicy) -> bool {
        let doublings = self.ejections.load(Relaxed).min(16);
        let length = policy.ejection.saturating_mul(1 << doublings).min(policy.max_ejection);
        let until = now.after(length).0 & !PROBE_OUT;
        if self.away_until.compare_exchange(before, until.max(HALF_OPEN), Relaxed, Relaxed).is_err() {
            return false;
        }
        self.ejections.fetch_add(1, Relaxed);
        self.failures.store(0, Relaxed);
        self.connect_failures.store(0, Relaxed);
        true
    }

    /// Forgets failures and ejections: the server's process is a new one. A slow start that is under way goes on.
    pub fn reset(&self) {
        self.failures.store(0, Relaxed);
        self.connect_failures.store(0, Relaxed);
        self.ejections.store(0, Relaxed);
        self.away_until.store(0, Relaxed);
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped to 0..=300")]
fn percent(value: f64) -> u32 {
    value.clamp(0.0, 300.0) as u32
}

#[cfg(test)]
mod tests;
