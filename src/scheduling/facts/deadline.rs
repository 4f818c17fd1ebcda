//! Whether a pool can still serve a request in the time that it asks for: the predictions that `predicted-latency` ranks by, against the
//! request's own bounds.
//!
//! Nothing is said of a pool of which nothing has been learned, or nothing of late: predictions that nobody has checked for a while refuse
//! nobody, so that a pool that was thought too slow for everybody is tried again.

use crate::facts::cost;
use crate::{Candidate, PickContext};
use attache_pool::speed::{Bounds, Fits};
use std::time::Duration;

/// 60 s: twice the half-life of what endpoints show; what a pool without an answer for so long would do is not known.
pub const DEFAULT_MEMORY: Duration = Duration::from_secs(60);

/// What a request can expect of a pool.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outlook {
    /// Seconds by which it could wait and still have its first token in time, as things are now; below 0 when it would be late. Of the
    /// endpoint that leaves most, of those where its tokens come fast enough.
    pub spare: f64,
    /// Seconds after which some endpoint serves it in time, if it comes again then and nothing else comes: it has all of its time anew.
    pub fits_in: f64,
}

/// The outlook of the request in `cx`, which wants `bounds` and came `passed` seconds ago; `None` when nothing is known.
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
            // When the pool has had nothing to do for so long, nothing is known of it any more.
            Fits::Never(seconds) => seconds + DEFAULT_MEMORY.as_secs_f64(),
        });
    }
    Some(outlook)
}

#[cfg(test)]
mod tests;
