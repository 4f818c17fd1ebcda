//! Requests that met the objective of their pool. Written and read by [`super::Tally`]; pure.

use super::{Targets, share};
use crate::served::{Ending, Served};
use attache_scheduling::Objective;

/// Counts of the requests that met an objective.
#[derive(Clone, Copy, Debug)]
pub struct ObjectiveCounts {
    objective: Objective,
    first: Targets,
    further: Targets,
    requests: u64,
    first_met: u64,
    further_met: u64,
    met: u64,
    /// Requests with a whole response, and the seconds that they took until their first token and after it.
    answered: u64,
    until_first: f64,
    after_first: f64,
}

impl ObjectiveCounts {
    /// An empty count for this objective.
    #[must_use]
    pub fn new(objective: Objective) -> Self {
        let slo = objective.slo;
        Self {
            objective,
            first: Targets { first_token: slo.and_then(|slo| slo.ttft), per_token: None },
            further: Targets { first_token: None, per_token: slo.and_then(|slo| slo.tpot) },
            requests: 0,
            first_met: 0,
            further_met: 0,
            met: 0,
            answered: 0,
            until_first: 0.0,
            after_first: 0.0,
        }
    }

    pub(super) fn add(&mut self, served: &Served) {
        let (first, further) = (self.first.met_by(served), self.further.met_by(served));
        self.requests += 1;
        self.first_met += u64::from(first);
        self.further_met += u64::from(further);
        self.met += u64::from(first && further);
        if let Some(time) = served.first_token.filter(|_| served.ending == Ending::Answered) {
            self.answered += 1;
            self.until_first += time.as_secs_f64();
            self.after_first += served.total.saturating_sub(time).as_secs_f64();
        }
    }

    /// The objective.
    #[must_use]
    pub fn objective(&self) -> Objective {
        self.objective
    }

    /// Share of the requests that met the target for the first token, 0..=1. Rejected and lost requests missed it. `None`
    /// without a target or without requests.
    #[must_use]
    pub fn first_met(&self) -> Option<f64> {
        self.first.first_token.and_then(|_| share(self.first_met, self.requests))
    }

    /// The same for the target of further tokens.
    #[must_use]
    pub fn further_met(&self) -> Option<f64> {
        self.further.per_token.and_then(|_| share(self.further_met, self.requests))
    }

    /// Part of the requests that met all targets.
    #[must_use]
    pub fn share_met(&self) -> Option<f64> {
        self.objective.slo.and_then(|_| share(self.met, self.requests))
    }

    /// Whether the required share of requests met all targets; `None` without targets or requests.
    #[must_use]
    pub fn is_met(&self) -> Option<bool> {
        Some(self.share_met()? >= self.objective.slo?.share)
    }

    /// The mean of the time to the first token and the time of all further tokens, by their
    /// weights, seconds; `None` without responses.
    #[must_use]
    pub fn weighted_mean(&self) -> Option<f64> {
        let Objective { ttft, tpot, .. } = self.objective;
        let sum = ttft * self.until_first + tpot * self.after_first;
        (self.answered > 0).then(|| sum / (ttft + tpot) / self.answered as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_scheduling::objective::Slo;
    use attache_types::clock::Timestamp;
    use std::time::Duration;

    /// One that took so many milliseconds until its first token and after it, for 11 tokens.
    fn served(first: u64, rest: u64, ending: Ending) -> Served {
        Served {
            number: 0,
            pair: 0,
            at: Timestamp(0),
            endpoint: Some(0),
            prompt_tokens: 9,
            expected_cached_tokens: 0,
            cached_tokens: 0,
            generated_tokens: 11,
            first_token: Some(Duration::from_millis(first)),
            total: Duration::from_millis(first + rest),
            preemptions: 0,
            ending,
            handover: None,
            fell_back: false,
            turn: None,
            alone: None,
        }
    }

    #[test]
    fn shares_count_each_target_and_both_and_what_was_lost() {
        let ms = Duration::from_millis;
        let slo = |share| Some(Slo { ttft: Some(ms(500)), tpot: Some(ms(50)), share });
        for (share, met) in [(0.5, true), (0.51, false)] {
            let mut counts = ObjectiveCounts::new(Objective { slo: slo(share), ..Objective::default() });
            assert_eq!((counts.share_met(), counts.is_met(), counts.weighted_mean()), (None, None, None));
            for (first, rest, ending) in [
                (500, 500, Ending::Answered),
                (100, 100, Ending::Answered),
                (501, 100, Ending::Answered),
                (100, 501, Ending::Lost),
            ] {
                counts.add(&served(first, rest, ending));
            }
            assert_eq!((counts.first_met(), counts.further_met()), (Some(0.5), Some(0.75)));
            assert_eq!((counts.share_met(), counts.is_met()), (Some(0.5), Some(met)));
        }
    }

    #[test]
    fn weights_make_one_mean_of_both_parts() {
        let mut counts = ObjectiveCounts::new(Objective { ttft: 1.0, tpot: 3.0, slo: None });
        counts.add(&served(1_000, 200, Ending::Answered));
        counts.add(&served(3_000, 400, Ending::Answered));
        counts.add(&served(9_000, 9_000, Ending::Lost));
        assert!((counts.weighted_mean().unwrap() - (2.0 + 3.0 * 0.3) / 4.0).abs() < 1e-9);
        assert_eq!(
            (counts.first_met(), counts.further_met(), counts.share_met(), counts.is_met()),
            (None, None, None, None)
        );
    }
}
