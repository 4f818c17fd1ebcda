//! What callers pass to flow control, and what they get from it.

use super::fairness::Meter;
use super::running::Seat;
use attache_scheduling::split::{Decider, SplitPolicy};
use std::time::Duration;

/// A request that asks flow control to be dispatched.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrival<'a> {
    /// Priority, which selects the band: greater is more important, below 0 is sheddable.
    pub priority: i32,
    /// Name of the flow: the tenant or fairness id.
    pub flow: &'a str,
    /// Bytes that it holds in memory while it is queued.
    pub bytes: u64,
    /// Length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// Length of the response, tokens, where it is known beforehand, as in a replay. `vtc-oracle` charges by it.
    pub answer_tokens: Option<u32>,
    /// Work and kind of endpoints that the request needs.
    pub need: Need,
    /// Time to live in the queue; `None` selects the one in the settings.
    pub ttl: Option<Duration>,
    /// Target of the request for the time to its first token.
    pub ttft: Option<Duration>,
    /// Seconds that it may wait and still meet its objective; below 0 if it misses the objective already.
    pub spare: Option<f64>,
    /// The client may choose `ttl` freely, so it does not affect the request's position in the queue.
    pub unvouched: bool,
}

/// How the endpoints of a pool may serve a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// By one endpoint, or by a prefill worker and a decode worker.
    #[default]
    Either,
    /// By one endpoint alone.
    Whole,
    /// By a prefill worker and a decode worker.
    Pair,
}

impl Way {
    /// How a request is served that `strategy` routes in a pool which splits requests by `policy`. A rule that ignores
    /// load may choose a pair whatever other endpoints could do. Then the pair must have capacity.
    #[must_use]
    pub fn of(policy: Option<&SplitPolicy>, strategy: &str, splittable: bool, prompt_tokens: u32) -> Self {
        let Some(policy) = policy.filter(|policy| splittable && policy.asks(strategy)) else { return Self::Whole };
        match policy.decider {
            Decider::Never => Self::Whole,
            Decider::Predicted => Self::Either,
            Decider::PrefixBased { non_cached_tokens, prompt_tokens: least }
                if non_cached_tokens == 0 || prompt_tokens < least.max(non_cached_tokens) =>
            {
                Self::Whole
            }
            // The strategy compares pairs with the endpoints that serve whole requests.
            Decider::Strategy if !policy.whole => Self::Either,
            Decider::Always | Decider::Strategy | Decider::PrefixBased { .. } => Self::Pair,
        }
    }
}

/// What a request needs of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Need {
    /// Expected prefill time on one endpoint, seconds.
    pub work: f64,
    /// Seconds that it has waited in the queue.
    pub waited: f64,
    /// Endpoints that may serve it.
    pub way: Way,
}

/// Load of dispatched requests that are not in the ledger yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Number of requests in this load.
    pub requests: u32,
    /// Tokens of their prompts.
    pub tokens: u64,
}

/// Identifies a queued request. It is never reused, so a stale handle refers to no other request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    pub(super) slot: u32,
    pub(super) generation: u32,
}

/// A dispatched request, kept until its response ends. The holder reports progress by
/// [`FlowControl::landed`](super::FlowControl::landed),
/// [`answered`](super::FlowControl::answered) and, always, [`ended`](super::FlowControl::ended).
#[derive(Debug)]
#[must_use = "its flow is charged and kept until `ended`"]
pub struct Passage {
    pub(super) priority: i32,
    pub(super) flow: u32,
    pub(super) meter: Meter,
    /// What it adds to the pending load; zero once it is in the ledger.
    pub(super) load: Load,
    /// Its entry among the requests that may be preempted; `None` if it may not be.
    pub(super) seat: Option<Seat>,
    /// Time that it spent in the queue.
    pub waited: Duration,
}

impl Passage {
    /// Identifies the request among those that may be preempted; `None` if it is not preemptible.
    #[must_use]
    pub fn seat(&self) -> Option<Seat> {
        self.seat
    }

    /// Tokens of the prompt that the flow was charged for.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.meter.input
    }

    /// Marks the response as incomplete or not counted, so that no policy learns response lengths from it.
    pub fn cut(&mut self) {
        self.meter.cut = true;
    }
}

/// A flow as all pickers of a cluster know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedFlow {
    /// Priority of its band.
    pub priority: i32,
    /// Hash of its name.
    pub hash: u64,
}

/// Why flow control refused a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The band is at its limit of requests or bytes.
    BandFull,
    /// All bands of the pool together are at their limit.
    Full,
    /// Queues of other pools hold the capacity that this request needs and that all pools share.
    SharedFull,
    /// Its time to live in the queue has passed.
    Expired,
    /// It was evicted from the queue: it was sheddable and a more important request arrived, or another flow had fewer.
    Evicted,
    /// It was preempted: it was sheddable and in flight, and a more important request waited.
    Preempted,
}

/// The refusal of a request, with the time for `Retry-After`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Reason of the refusal.
    pub cause: Cause,
    /// Expected time until the requests before it have left, from recent dequeue rates.
    pub retry_after: Duration,
}

/// What happens to a request on arrival.
#[derive(Debug)]
pub enum Verdict {
    /// The pool has capacity: the request is dispatched.
    Dispatch(Passage),
    /// It is queued under this handle. Its [`Left`] follows, perhaps from the same call.
    Parked(Handle),
    /// The queue is full: the request is rejected.
    Rejected(Refusal),
}

/// A request that has left the queue, with its kept value.
#[derive(Debug)]
pub enum Left<T> {
    /// It was dequeued and is dispatched.
    Dispatched(Handle, T, Passage),
    /// It expired or was evicted.
    Refused(Handle, T, Refusal),
}
