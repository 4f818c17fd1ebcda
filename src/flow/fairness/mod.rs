//! The order between the flows of a band, one file a policy. Each policy sorts the flows that have something queued, so
//! the next flow is the end of a tree, whatever the queue depth.

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

/// The first request of a flow's queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct QueueHead {
    /// Its sort key by the band's ordering; the least goes first.
    pub key: u64,
    /// Order of arrival, which decides between equal keys.
    pub sequence: u64,
    /// When it arrived.
    pub arrived: Timestamp,
}

/// Tokens of a request, and what its flow was charged for them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Meter {
    /// Tokens of the prompt.
    pub input: u32,
    /// Tokens of the response where they are known beforehand.
    pub answer: Option<u32>,
    /// Tokens of the response that have arrived.
    pub output: u32,
    /// Tokens of the response that were charged before they arrived.
    pub charged: u32,
    /// The response is incomplete or was not counted, so response lengths are not learned from it.
    pub cut: bool,
    /// Number of this request among those that its policy dispatched.
    pub number: u64,
}

/// Selects the flow that is dequeued next. Flows are small numbers, which are reused after [`Fairness::forget`].
pub trait Fairness: Send + Sync + Debug {
    /// The same policy without state.
    fn fresh(&self) -> Box<dyn Fairness>;

    /// Whether this order is made for programs of agents. A request that names no flow then belongs to that of its program.
    fn orders_programs(&self) -> bool {
        false
    }

    /// `flow`, whose share is `weight`, gets its first queued request.
    fn wakes(&mut self, flow: u32, weight: f64, head: QueueHead, now: Timestamp);

    /// Another request is now the first of `flow`.
    fn head(&mut self, flow: u32, head: QueueHead);

    /// The queue of `flow` is empty.
    fn sleeps(&mut self, flow: u32);

    /// The flow that is next, among those that have something queued.
    fn next(&mut self) -> Option<u32>;

    /// The flow that would be dequeued last.
    fn last(&mut self) -> Option<u32>;

    /// For policies without turns: the flows that have requests before `head`, at most `most` of them.
    /// `None` if flows take turns.
    fn before(&self, _head: &QueueHead, _most: usize) -> Option<Vec<u32>> {
        None
    }

    /// The first request of `flow` is dispatched. Called before [`Fairness::sleeps`] or [`Fairness::head`].
    fn dispatched(&mut self, _flow: u32, _meter: &mut Meter, _now: Timestamp, _rng: &mut PickRng) {}

    /// Whether [`Fairness::answered`] charges the flow while a response is generated.
    fn counts_output(&self) -> bool {
        false
    }

    /// `output` tokens of a response have arrived in total.
    fn answered(&mut self, _flow: u32, meter: &mut Meter, output: u32, _now: Timestamp) {
        meter.output = meter.output.max(output);
    }

    /// A response has ended; `input` is the length of its prompt if the model server reported it.
    fn ended(&mut self, _flow: u32, _meter: &Meter, _input: Option<u32>, _now: Timestamp) {}

    /// Whether [`Fairness::served`] has an effect.
    fn counts_service(&self) -> bool {
        false
    }

    /// Another picker has served a request of `flow`, with these tokens of prompt and response.
    fn served(&mut self, _flow: u32, _input: u32, _output: u32) {}

    /// The program of `flow` has ended: what follows is a new one. Called where [`Fairness::orders_programs`].
    fn restart(&mut self, _flow: u32) {}

    /// Removes the state of `flow`, which has nothing queued.
    fn forget(&mut self, flow: u32);
}

#[cfg(test)]
mod tests;
