//! What goes into flow control and what comes out of it.

use super::fairness::Meter;
use super::running::Seat;
use attache_scheduling::split::{Decider, SplitPolicy};
use std::time::Duration;

/// A request that asks for its turn.
#[derive(Clone, Copy, Debug, Default)]
pub struct Arrival<'a> {
    /// Its band: more is more important, negative may be shed.
    pub priority: i32,
    /// Whose it is, the tenant or fairness id.
    pub flow: &'a str,
    /// What it holds in memory while it waits.
    pub bytes: u64,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens of its answer where they are known beforehand, as in a replay; `vtc-oracle` charges by them.
    pub answer_tokens: Option<u32>,
    /// What it needs of the pool.
    pub need: Need,
    /// How long it may wait; the settings' when it does not say.
    pub ttl: Option<Duration>,
    /// How soon it wants its first token.
    pub ttft: Option<Duration>,
    /// Seconds that it may wait and still meet its objective; below 0 when it misses it as it is.
    pub spare: Option<f64>,
    /// Nobody vouches for how long it says that it may wait: its place is that of one that says nothing.
    pub unvouched: bool,
}

/// The ways in which a request may be served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Way {
    /// By one server, or by a prefill server and a decode server.
    #[default]
    Either,
    /// By one server.
    Whole,
    /// By a prefill server and a decode server.
    Pair,
}

impl Way {
    /// The way of a request that `strategy` routes in a pool that splits requests by `policy`. A rule that does not ask how full servers are may
    /// name a pair whatever other servers could do: then the pair must have capacity.
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
            // It compares pairs with the servers that serve whole requests.
            Decider::Strategy if !policy.whole => Self::Either,
            Decider::Always | Decider::Strategy | Decider::PrefixBased { .. } => Self::Pair,
        }
    }
}

/// What a request needs of the pool.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Need {
    /// Seconds of an endpoint that it is expected to take.
    pub work: f64,
    /// Who may serve it.
    pub way: Way,
}

/// What is on the way to the pool and in nobody's books yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Requests.
    pub requests: u32,
    /// Tokens of their prompts.
    pub tokens: u64,
}

/// A request that waits. Never given twice, so that one kept too long names nobody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    pub(super) slot: u32,
    pub(super) generation: u32,
}

/// A request that was let through, for as long as its answer takes. Whoever holds it says how that goes:
/// [`FlowControl::landed`](super::FlowControl::landed), [`answered`](super::FlowControl::answered) and, always,
/// [`ended`](super::FlowControl::ended).
#[derive(Debug)]
#[must_use = "its flow is charged and kept until `ended`"]
pub struct Passage {
    pub(super) priority: i32,
    pub(super) flow: u32,
    pub(super) meter: Meter,
    /// What it adds to the load that is on its way; none once it is in the ledger.
    pub(super) load: Load,
    /// That it may be told to end before its answer does.
    pub(super) seat: Option<Seat>,
    /// How long it waited.
    pub waited: Duration,
}

impl Passage {
    /// By which it may be told to end; `None` when it is served whatever comes.
    #[must_use]
    pub fn seat(&self) -> Option<Seat> {
        self.seat
    }

    /// Its answer breaks off, or nobody has counted it: nobody learns from it how long answers are.
    pub fn cut(&mut self) {
        self.meter.cut = true;
    }
}

/// Why a request was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// Its band holds as much as it may.
    BandFull,
    /// All bands together hold as much as they may.
    Full,
    /// It would fit if no other pool had taken of the room that they share.
    RoomTaken,
    /// It has waited for as long as it may.
    Expired,
    /// It was sheddable, and a more important request needed its place, or another flow had less of the band.
    Evicted,
    /// It was sheddable and under way, and a more important request waited.
    Outranked,
}

/// A request that was turned away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub cause: Cause,
    /// When what stood before it will have gone, as things have gone of late.
    pub retry_after: Duration,
}

/// What becomes of an arrival.
#[derive(Debug)]
pub enum Verdict {
    /// There is room: it goes on.
    Dispatch(Passage),
    /// It waits; what becomes of it is told under this handle, perhaps in this very call.
    Parked(Handle),
    /// It can't wait here.
    Rejected(Refusal),
}

/// A request that waits no longer, with what was kept of it.
#[derive(Debug)]
pub enum Left<T> {
    /// Its turn has come.
    Dispatched(Handle, T, Passage),
    /// Its turn won't come.
    Refused(Handle, T, Refusal),
}
