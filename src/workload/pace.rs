//! The same requests at other times: faster or slower, fewer, at a steady rate or in bursts. `pace::closed` sends them
//! from clients that wait for their answers.
//!
//! Called by `cli::replay` and tests. Pure.

pub mod closed;

pub use closed::ClosedLoop;

use crate::draw;
use crate::{Request, TraceError, Workload};
use attache_types::clock::Timestamp;
use attache_types::params::ParamError;
use attache_types::rng::{PickRng, for_request};
use std::time::Duration;

/// Rates and speeds beyond this are misprints.
pub const MAX_RATE: f64 = 1_000_000.0;
/// Gaps more uneven than this hold all requests in one burst.
pub const MAX_CV: f64 = 100.0;

/// A workload whose gaps, think times included, are divided by a factor.
pub struct Scaled {
    inner: Box<dyn Workload>,
    speed: f64,
}

impl Scaled {
    /// `speed` times as fast: 2 halves every gap.
    ///
    /// # Errors
    /// When `speed` is not above 0 and at most [`MAX_RATE`].
    pub fn new(inner: Box<dyn Workload>, speed: f64) -> Result<Self, ParamError> {
        Ok(Self { inner, speed: checked("speed", speed, MAX_RATE)? })
    }

    fn outer(&self, at: Timestamp) -> Timestamp {
        // At the original speed, times stay exact to the nanosecond.
        if self.speed == 1.0 { at } else { Timestamp((at.0 as f64 / self.speed) as u64) }
    }

    fn inner(&self, at: Timestamp) -> Timestamp {
        if self.speed == 1.0 { at } else { Timestamp((at.0 as f64 * self.speed) as u64) }
    }
}

impl Workload for Scaled {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        let request = self.inner.next()?;
        Ok(request.map(|request| Request { at: self.outer(request.at), ..request }))
    }

    fn ended(&mut self, number: u64, now: Timestamp) -> Vec<Request> {
        let mut requests = self.inner.ended(number, self.inner(now));
        // Rounding must not send a request before its cause.
        requests.iter_mut().for_each(|request| request.at = self.outer(request.at).max(now));
        requests
    }

    fn pair(&self, number: u64) -> u64 {
        self.inner.pair(number)
    }

    fn total(&self) -> Option<u64> {
        self.inner.total()
    }
}

/// The beginning of a workload.
pub struct Limited {
    inner: Box<dyn Workload>,
    requests: Option<u64>,
    until: Option<Timestamp>,
    given: u64,
    /// Numbers of requests that came too late, ascending. One for each conversation that was open
    /// then, so they stay few.
    dropped: Vec<u64>,
    over: bool,
}

impl Limited {
    /// At most this many requests, and none that comes at `until` or later; `None` sets no limit.
    #[must_use]
    pub fn new(inner: Box<dyn Workload>, requests: Option<u64>, until: Option<Duration>) -> Self {
        let until = until.map(|until| Timestamp(0).after(until));
        Self { inner, requests, until, given: 0, dropped: Vec::new(), over: false }
    }

    fn has_given_all(&self) -> bool {
        self.requests.is_some_and(|requests| self.given >= requests)
    }

    /// The number that a request had before others were left out.
    fn inner_number(&self, number: u64) -> u64 {
        self.dropped.iter().fold(number, |number, dropped| number + u64::from(*dropped <= number))
    }

    /// Numbers stay without gaps when a request is left out.
    fn give(&mut self, request: Request) -> Option<Request> {
        if self.has_given_all() || self.until.is_some_and(|until| request.at >= until) {
            self.dropped.push(request.number);
            return None;
        }
        let number = self.given;
        self.given += 1;
        Some(Request { number, ..request })
    }
}

impl Workload for Limited {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        if self.over || self.has_given_all() {
            return Ok(None);
        }
        let request = self.inner.next()?;
        let request = request.and_then(|request| self.give(request));
        // Those that follow come later still.
        self.over = request.is_none();
        Ok(request)
    }

    fn ended(&mut self, number: u64, now: Timestamp) -> Vec<Request> {
        if self.has_given_all() {
            return Vec::new();
        }
        let requests = self.inner.ended(self.inner_number(number), now);
        requests.into_iter().filter_map(|request| self.give(request)).collect()
    }

    fn pair(&self, number: u64) -> u64 {
        self.inner.pair(self.inner_number(number))
    }

    fn total(&self) -> Option<u64> {
        match (self.until, self.inner.total(), self.requests) {
            (None, Some(total), Some(requests)) => Some(total.min(requests)),
            (None, Some(total), None) => Some(total),
            _ => None,
        }
    }
}

/// The requests of a workload in their order, at times of our own. What follows from answers follows as before.
pub struct Resampled {
    inner: Box<dyn Workload>,
    rate: f64,
    cv: f64,
    rng: PickRng,
    /// Time of the last arrival, seconds.
    clock: f64,
}

impl Resampled {
    /// A Poisson process: on the mean `rate` requests a second, each independent of the others.
    ///
    /// # Errors
    /// When `rate` is not above 0 and at most [`MAX_RATE`].
    pub fn poisson(inner: Box<dyn Workload>, rate: f64, seed: u64) -> Result<Self, ParamError> {
        Self::bursty(inner, rate, 1.0, seed)
    }

    /// On the mean `rate` requests a second with gamma gaps, whose deviation is `cv` times their mean: 1 is the Poisson
    /// process, more comes in bursts.
    ///
    /// # Errors
    /// When `rate` or `cv` is not above 0 and at most [`MAX_RATE`] or [`MAX_CV`].
    pub fn bursty(inner: Box<dyn Workload>, rate: f64, cv: f64, seed: u64) -> Result<Self, ParamError> {
        let (rate, cv) = (checked("rate", rate, MAX_RATE)?, checked("cv", cv, MAX_CV)?);
        Ok(Self { inner, rate, cv, rng: for_request(seed, 0), clock: 0.0 })
    }
}

impl Workload for Resampled {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        let Some(request) = self.inner.next()? else { return Ok(None) };
        self.clock += draw::gap(&mut self.rng, self.cv) / self.rate;
        Ok(Some(Request { at: seconds(self.clock), ..request }))
    }

    fn ended(&mut self, number: u64, now: Timestamp) -> Vec<Request> {
        self.inner.ended(number, now)
    }

    fn pair(&self, number: u64) -> u64 {
        self.inner.pair(number)
    }

    fn total(&self) -> Option<u64> {
        self.inner.total()
    }
}

/// The moment this many seconds from the start.
#[must_use]
pub(super) fn seconds(seconds: f64) -> Timestamp {
    // Casts of floats saturate.
    Timestamp((seconds * 1e9) as u64)
}

pub(super) fn checked(name: &str, value: f64, most: f64) -> Result<f64, ParamError> {
    if value > 0.0 && value <= most {
        Ok(value)
    } else {
        Err(ParamError::value(name, value, &format!("a number above 0 and at most {most} is allowed")))
    }
}

#[cfg(test)]
mod tests;
