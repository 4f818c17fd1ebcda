//! Prefill legs at the picker: the choice of the prefill server, and the result of each attempt.
//!
//! The counterpart of `picker::split` without HTTP; [`Prefilling`] decides for both. Pools that leave the prefill
//! call to a sidecar are played as if the picker called the prefill server. Called by [`super::world`]; pure.

use super::front::Front;
use attache_disagg::attempts::{Attempt, AttemptLimits};
use attache_disagg::{Failure, Fallback, Next};
use attache_picker::prefilling::Prefilling;
use attache_pool::Endpoint;
use attache_pool::ranks::RankBooking;
use attache_protocol::Usage;
use attache_types::clock::Timestamp;

/// How long prefill servers are waited for, and what becomes of a request whose prompt none has computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// Time limits over all attempts of a prefill.
    pub bounds: AttemptLimits,
    /// What happens when all attempts have failed.
    pub fallback: Fallback,
}

impl Default for Patience {
    fn default() -> Self {
        let bounds = AttemptLimits { timeout: attache_disagg::policy::DEFAULT_PREFILL_TIMEOUT, hedge_after: None };
        Self { bounds, fallback: Fallback::default() }
    }
}

/// A request whose prompt is being computed.
#[derive(Debug)]
pub(super) struct PrefillLegs {
    pub(super) prefilling: Prefilling,
    /// Tokens of the prompt that the prefill server was thought to hold.
    pub(super) foretold: u32,
    /// The data-parallel rank of the first attempt, if the picker chooses ranks.
    pub(super) chosen_rank: Option<RankBooking>,
}

impl PrefillLegs {
    /// The data-parallel rank that an attempt names.
    pub(super) fn rank(&self, attempt: Attempt) -> Option<usize> {
        self.chosen_rank.as_ref().filter(|_| attempt == 0).map(RankBooking::rank)
    }
}

/// Progress of a prefill on another server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PrefillProgress {
    /// The prefill is still running.
    Waiting,
    /// The prefill server of this attempt must be called.
    Ask(Attempt),
    /// The prompt is computed: the request goes to its decode server, which receives the blocks.
    Computed,
    /// No prefill server succeeded: the decode server computes the prompt itself.
    Local,
    /// No server can serve the request.
    Refused,
}

impl Front {
    /// A prefill server has computed the prompt and reported `usage`.
    pub(super) fn computed(
        &self,
        legs: &mut PrefillLegs,
        attempt: Attempt,
        usage: &Usage,
        now: Timestamp,
    ) -> PrefillProgress {
        match legs.prefilling.computed(attempt, usage, now, |server, outcome| self.judge(server, outcome, now)) {
            true => PrefillProgress::Computed,
            false => PrefillProgress::Waiting,
        }
    }

    /// A prefill server has not.
    pub(super) fn failed(
        &self,
        legs: &mut PrefillLegs,
        attempt: Attempt,
        failure: Failure,
        now: Timestamp,
    ) -> PrefillProgress {
        let judge = |server: &Endpoint, outcome| self.judge(server, outcome, now);
        self.follow(&legs.prefilling.failed(attempt, failure, now, judge))
    }

    /// The moment of [`Prefilling::deadline`] has come.
    pub(super) fn late(&self, legs: &mut PrefillLegs, now: Timestamp) -> PrefillProgress {
        self.follow(&legs.prefilling.late(now, |server, outcome| self.judge(server, outcome, now)))
    }

    fn follow(&self, next: &Next) -> PrefillProgress {
        match next {
            Next::Wait => PrefillProgress::Waiting,
            Next::Send(attempt) => PrefillProgress::Ask(*attempt),
            Next::GiveUp(_) if self.patience().fallback == Fallback::Fail => PrefillProgress::Refused,
            Next::GiveUp(_) => PrefillProgress::Local,
        }
    }
}
