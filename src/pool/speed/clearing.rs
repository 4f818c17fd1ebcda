//! When an endpoint will be able to serve a request in time, if nothing else is sent to it.
//!
//! The load ahead of the request ends in two stages, and the two predictions change linearly in each of them:
//!
//! ```text
//! prompts     until the last waiting request has its first token, after the predicted time
//! responses   until all of them have ended: the tokens of a usual response, in one batch
//! then        the endpoint is idle
//! ```
//!
//! The shortest wait is where the later of two straight lines falls below its bound. All requests of a stage count
//! until its end, because the order in which prompts are computed is unknown here, and a request that was rejected with
//! a retry time must be admitted after that time.

use super::{EndpointSpeed, Load, NEXT, Work, dot, first_features};
use crate::ledger::EndpointLedger;
use crate::metrics::Reported;
use attache_types::clock::Timestamp;

/// Objectives of a request in seconds; infinite where it has none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bounds {
    /// Objective for the first token.
    pub first_token: f64,
    /// Objective for each further token.
    pub per_token: f64,
}

/// When an endpoint can serve a request within its objectives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fits {
    /// After this many seconds; 0 is now.
    In(f64),
    /// Not even when it is idle, which it is after this many seconds.
    Never(f64),
}

/// The two predictions at one time: first token and further tokens.
type Moment = [f64; 2];

impl EndpointSpeed {
    /// Returns when `work` can be served within `bounds`, if nothing else is sent. `ledger` and
    /// `fresh` are the endpoint's own.
    #[must_use]
    pub fn fits(
        &self,
        ledger: &EndpointLedger,
        fresh: Option<&Reported>,
        work: Work,
        bounds: Bounds,
        now: Timestamp,
    ) -> Fits {
        let model = self.pool.model(now);
        let (first, next) = model.scaled(self.slower(&model));
        let loaded = self.load(&first, ledger, fresh, &model);
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

/// Features of the time per token for one more request on an endpoint with `load`.
pub(super) fn next_features(load: &Load) -> [f64; NEXT] {
    [1.0, load.decoding + 1.0, load.kilotokens]
}

/// Returns the smallest fraction, 0..=1, of the way between two times at which both predictions are within `bounds`.
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
    fn later_of_two_lines_decides() {
        let within = |first_token, per_token| Bounds { first_token, per_token };
        for (from, to, bounds, expected) in [
            ([1.0, 1.0], [0.0, 0.0], within(2.0, 2.0), Some(0.0)),
            ([1.0, 1.0], [0.0, 0.0], within(0.25, 2.0), Some(0.75)),
            ([1.0, 1.0], [0.0, 0.0], within(0.75, 0.5), Some(0.5)),
            ([1.0, 1.0], [0.5, 0.0], within(0.25, 2.0), None),
            // One prediction falls below its bound after the other has risen above its own.
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
    fn idle_endpoint_fits_now_or_never() {
        let (endpoint, now) = (endpoint(), Timestamp(1_000_000_000));
        let bounds = |first_token| Bounds { first_token, per_token: f64::INFINITY };
        assert_eq!(fits(&endpoint, 1_000, bounds(10.0), now), Fits::In(0.0));
        assert!(matches!(fits(&endpoint, 1_000, bounds(0.001), now), Fits::Never(_)));
        let per_token = Bounds { first_token: f64::INFINITY, per_token: 1e-6 };
        assert!(matches!(fits(&endpoint, 1_000, per_token, now), Fits::Never(_)));
    }

    proptest! {
        /// On a server that is as fast as predicted, a request fits after the predicted wait and not earlier.
        #[test]
        fn request_fits_after_the_predicted_wait(
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
            // The prompts are computed one after the other, each in its time; other costs of a request
            // occur with its own prompt.
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
