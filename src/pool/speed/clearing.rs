//! When an endpoint will serve a request in time, if nothing else is sent there meanwhile.
//!
//! What stands before the request goes in two stages, and in each of them the two predictions change in a straight line:
//!
//! ```text
//! prompts   until the last of those that wait there has its first token: as long as that is predicted to take
//! answers   until all of them have ended: the tokens of a usual answer, in a batch of all of them
//! then      nothing is left
//! ```
//!
//! So the least wait is where the later of two straight lines falls below its bound. Nobody is thought to be gone before the last of its stage
//! is: which prompt is computed first is not known here, and what was refused with a wait is to be admitted after it.

use super::{EndpointSpeed, Load, NEXT, Work, dot, first_features};
use crate::ledger::EndpointLedger;
use crate::metrics::Reported;
use attache_types::clock::Timestamp;

/// What a request asks for, seconds; infinite where it does not.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// To the first token.
    pub first_token: f64,
    /// For each token after it.
    pub per_token: f64,
}

/// When an endpoint will serve a request within its bounds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fits {
    /// After so many seconds; 0 is now.
    In(f64),
    /// Not even when it has nothing else to do, which is after so many seconds.
    Never(f64),
}

/// A moment of the two predictions.
type Moment = [f64; 2];

impl EndpointSpeed {
    /// When `work` will be served within `bounds`, if nothing else comes. `ledger` and `fresh` are the endpoint's own.
    #[must_use]
    pub fn fits(
        &self,
        ledger: &EndpointLedger,
        fresh: Option<&Reported>,
        work: Work,
        bounds: Bounds,
        now: Timestamp,
    ) -> Fits {
        let (first, next) = self.coefficients(now);
        let loaded = self.load(&first, ledger, fresh, now);
        let computed = Load { kilotokens: 0.0, mega_pairs: 0.0, decoding: loaded.decoding + loaded.waiting, ..loaded };
        let answering = Load { decoding: computed.decoding, ..Load::default() };
        let moment = |load: &Load| [dot(&first, &first_features(load, work)), dot(&next, &next_features(load))];
        let answers = moment(&answering);
        let [_, token] = answers;
        let stages = [
            (moment(&loaded), moment(&computed), dot(&first, &first_features(&loaded, Work::default()))),
            (answers, moment(&Load::default()), self.pool.answer_tokens() * token),
        ];
        let mut waited = 0.0;
        for (from, to, lasts) in stages {
            if let Some(part) = first_met(from, to, bounds) {
                return Fits::In(waited + part * lasts);
            }
            waited += lasts;
        }
        Fits::Never(waited)
    }
}

/// What the time of a token follows from for one more request on an endpoint that has `load`.
pub(super) fn next_features(load: &Load) -> [f64; NEXT] {
    [1.0, load.decoding + 1.0, load.kilotokens]
}

/// The least part, 0..=1, of the way between two moments at which both predictions are within `bounds`.
fn first_met(from: Moment, to: Moment, bounds: Bounds) -> Option<f64> {
    let (mut begins, mut ends) = (0.0f64, 1.0f64);
    for ((from, to), bound) in from.into_iter().zip(to).zip([bounds.first_token, bounds.per_token]) {
        match (from <= bound, to <= bound) {
            (true, true) => {}
            (false, true) => begins = begins.max((from - bound) / (from - to)),
            (true, false) => ends = ends.min((bound - from) / (to - from)),
            (false, false) => return None,
        }
    }
    (begins <= ends).then_some(begins)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::speed::Reservation;
    use crate::{Endpoint, EndpointSpec};
    use attache_types::ids::EndpointId;
    use proptest::prelude::*;
    use std::sync::Arc;
    use std::time::Duration;

    #[test]
    fn the_later_of_two_lines_decides() {
        let within = |first_token, per_token| Bounds { first_token, per_token };
        for (from, to, bounds, expected) in [
            ([1.0, 1.0], [0.0, 0.0], within(2.0, 2.0), Some(0.0)),
            ([1.0, 1.0], [0.0, 0.0], within(0.25, 2.0), Some(0.75)),
            ([1.0, 1.0], [0.0, 0.0], within(0.75, 0.5), Some(0.5)),
            ([1.0, 1.0], [0.5, 0.0], within(0.25, 2.0), None),
            // One falls below its bound when the other has risen above its own.
            ([1.0, 0.0], [0.0, 1.0], within(0.25, 0.5), None),
            ([1.0, 0.0], [0.0, 1.0], within(0.5, 0.75), Some(0.5)),
            ([1.0, 1.0], [1.0, 1.0], within(1.0, f64::INFINITY), Some(0.0)),
        ] {
            assert_eq!(first_met(from, to, bounds), expected, "{from:?} {to:?} {bounds:?}");
        }
    }

    fn work(tokens: u32) -> Work {
        Work { prompt_tokens: tokens, uncached_tokens: tokens, adapter_cold: false }
    }

    fn endpoint() -> Arc<Endpoint> {
        Arc::new(Endpoint::new(EndpointId(0), EndpointSpec::at(([127, 0, 0, 1], 8000).into())))
    }

    fn fits(endpoint: &Endpoint, tokens: u32, bounds: Bounds, now: Timestamp) -> Fits {
        endpoint.speed.fits(&endpoint.ledger, None, work(tokens), bounds, now)
    }

    #[test]
    fn an_idle_endpoint_fits_now_or_never() {
        let (endpoint, now) = (endpoint(), Timestamp(1_000_000_000));
        let bounds = |first_token| Bounds { first_token, per_token: f64::INFINITY };
        assert_eq!(fits(&endpoint, 1_000, bounds(10.0), now), Fits::In(0.0));
        assert!(matches!(fits(&endpoint, 1_000, bounds(0.001), now), Fits::Never(_)));
        let per_token = Bounds { first_token: f64::INFINITY, per_token: 1e-6 };
        assert!(matches!(fits(&endpoint, 1_000, per_token, now), Fits::Never(_)));
    }

    proptest! {
        /// A server that is as fast as predicted: what is said to fit after a while fits then, and not before.
        #[test]
        fn what_is_said_to_fit_later_fits_then(
            before in prop::collection::vec(100u32..50_000, 1..8), tokens in 100u32..20_000, share in 0.0..1.0f64,
        ) {
            let (endpoint, begun) = (endpoint(), Timestamp(1_000_000_000));
            let mut waiting: Vec<_> = before
                .iter()
                .map(|t| (Reservation::begin(endpoint.clone(), None, work(*t), true, begun), *t))
                .collect();
            let first = |now| endpoint.speed.forecast(&endpoint.ledger, None, work(tokens), now).1.first_token;
            let idle = {
                let alone = self::endpoint();
                alone.speed.forecast(&alone.ledger, None, work(tokens), begun).1.first_token
            };
            let loaded = first(begun);
            let bound = idle + 0.05 + (loaded - idle) * share;
            let bounds = Bounds { first_token: bound, per_token: f64::INFINITY };
            let Fits::In(seconds) = fits(&endpoint, tokens, bounds, begun) else { panic!("an idle one fits") };
            // The prompts are computed one after the other, each in its time; what a request costs beside that is done with its own.
            let then = begun.after(Duration::from_secs_f64(seconds + 1e-6));
            let (c, _) = endpoint.speed.coefficients(begun);
            let mut done = begun;
            waiting.retain_mut(|(reservation, t)| {
                let own = EndpointSpeed::prefill_seconds(&c, f64::from(*t) / 1e3, work(*t).mega_pairs());
                done = done.after(Duration::from_secs_f64(own));
                if done <= then {
                    reservation.first_token(false, done);
                }
                done > then
            });
            prop_assert!(first(then) <= bound + 1e-3, "{} after {seconds} s, asked for {bound}", first(then));
            if seconds > 0.0 {
                prop_assert!(loaded > bound);
            }
        }
    }
}
