//! Whose turn it is among the flows of a band, one file a policy. Each keeps its own order of the flows that have something queued, so that
//! a turn costs a look at the end of a tree, however many wait.

mod counters;
pub mod global_strict;
pub mod program_aware;
pub mod round_robin;
pub mod turn_priority;
pub mod vtc_fair;
pub mod vtc_max_fair;
pub mod vtc_oracle;
pub mod vtc_pred;

use attache_types::clock::Timestamp;
use attache_types::rng::PickRng;
use std::fmt::Debug;

pub use counters::{DEFAULT_INPUT_WEIGHT, DEFAULT_OUTPUT_WEIGHT};

/// The first in a flow's queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Head {
    /// Its place by the band's ordering; the least goes first.
    pub key: u64,
    /// Tells those apart whose keys are equal: the order in which they came.
    pub sequence: u64,
    /// When it came.
    pub arrived: Timestamp,
}

/// What a request was charged, and for what.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Meter {
    /// Tokens of its prompt.
    pub input: u32,
    /// Tokens of its answer where they are known beforehand.
    pub answer: Option<u32>,
    /// Tokens of its answer that have come.
    pub output: u32,
    /// Tokens of its answer that were charged before they came.
    pub charged: u32,
    /// Its answer broke off, or nobody counted it: how long answers are is not to be learned from it.
    pub cut: bool,
    /// Which of the dispatched requests of its policy it is.
    pub number: u64,
}

/// Whose turn it is. Flows are small numbers, which are used again after [`Fairness::forget`].
pub trait Fairness: Send + Sync + Debug {
    /// The same policy, of which nothing has been seen.
    fn fresh(&self) -> Box<dyn Fairness>;

    /// `flow`, whose share is `weight`, has its first queued request.
    fn wakes(&mut self, flow: u32, weight: f64, head: Head, now: Timestamp);

    /// Another request is the first of `flow`.
    fn head(&mut self, flow: u32, head: Head);

    /// `flow` has nothing queued any more.
    fn sleeps(&mut self, flow: u32);

    /// Whose turn it is, among those that have something queued.
    fn next(&mut self) -> Option<u32>;

    /// Who would come last.
    fn last(&mut self) -> Option<u32>;

    /// Of policies without turns: the flows of which some request goes before one at `head`, the first `most` of them. `None` where flows
    /// take turns.
    fn before(&self, _head: &Head, _most: usize) -> Option<Vec<u32>> {
        None
    }

    /// The first request of `flow` was let through. Comes before [`Fairness::sleeps`] or [`Fairness::head`].
    fn dispatched(&mut self, _flow: u32, _meter: &mut Meter, _now: Timestamp, _rng: &mut PickRng) {}

    /// So many tokens of an answer have come in all.
    fn answered(&mut self, _flow: u32, meter: &mut Meter, output: u32, _now: Timestamp) {
        meter.output = meter.output.max(output);
    }

    /// An answer has ended; its prompt had so many tokens, if the server has told.
    fn ended(&mut self, _flow: u32, _meter: &Meter, _input: Option<u32>, _now: Timestamp) {}

    /// `flow` is no more; it has nothing queued.
    fn forget(&mut self, flow: u32);
}

#[cfg(test)]
mod tests;
