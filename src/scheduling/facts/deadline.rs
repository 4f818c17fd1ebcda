//! Whether a pool can serve a request within its deadline: the predictions of `predicted-latency`, compared with the
//! request's bounds.
//!
//! There is no outlook for a pool without learned speed, or without a response in the last [`DEFAULT_MEMORY`]. Old
//! predictions must not reject requests: otherwise a pool that was predicted too slow for all would never be tried
//! again.

use crate::facts::cost;
use crate::{Candidate, PickContext};
use attache_pool::speed::{Bounds, Fits};
use std::time::Duration;

/// 60 s: twice the half-life of learned values. After that long without a response, the pool's speed counts as
/// unknown.
pub const DEFAULT_MEMORY: Duration = Duration::from_secs(60);

/// What a request can expect of a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Seconds that the request could wait and still get its first token in time; below 0 if it would be late. The
    /// greatest of all endpoints whose tokens are fast enough.
    pub spare: f64,
    /// Seconds after which some endpoint would serve the request in time, if the client sends it again then. Assumes
    /// its full deadline and no other requests.
    pub fits_in: f64,
}

/// The outlook of the request in `cx` with the bounds `bounds`, `passed` seconds after its arrival; `None` if nothing
/// is known.
#[must_use]
pub fn outlook(cx: &PickContext<'_>, candidates: &[Candidate<'_>], bounds: Bounds, passed: f64) -> Option<Outlook> {
    let speed = |c: &Candidate<'_>| Some(&c.state.live().speed).filter(|s| s.is_learned())?.last_answer();
    let last = candidates.iter().filter_map(speed).max()?;
    if last.after(DEFAULT_MEMORY) < cx.now {
        return None;
    }
    let mut outlook = Outlook { spare: f64::NEG_INFINITY, fits_in: f64::INFINITY };
    for candidate in candidates {
        let (_, predicted) = cost::forecast(cx, candidate);
        if predicted.per_token <= bounds.per_token {
            outlook.spare = outlook.spare.max(bounds.first_token - passed - predicted.first_token);
        }
        let live = candidate.state.live();
        let fits = live.speed.fits(&live.ledger, candidate.reported(), candidate.work(cx), bounds, cx.now);
        outlook.fits_in = outlook.fits_in.min(match fits {
            Fits::In(seconds) => seconds,
            // After an idle time of this length, the pool's speed is unknown again.
            Fits::Never(seconds) => seconds + DEFAULT_MEMORY.as_secs_f64(),
        });
    }
    Some(outlook)
}

#[cfg(test)]
mod tests;
