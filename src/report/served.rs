//! Outcome of one request, as players of workloads report it. Called by `replay` and `loadgen` (write) and
//! [`crate::tally`] (read). Pure.

use attache_types::clock::Timestamp;
use attache_types::program::ProgramTurn;
use std::time::Duration;

/// 8 tokens. Shorter responses have no time per output token (TPOT): one step with another prompt would dominate it.
pub const MIN_TPOT_TOKENS: u32 = 8;

/// How a request ended, as its client saw it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The client received the whole response.
    Answered,
    /// The picker or the model server rejected the request.
    Refused,
    /// The server died, or the connection broke before the end of the response.
    Lost,
}

/// The outcome of one request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// Number of the request in the workload.
    pub number: u64,
    /// Number by which the request is compared across runs, see `Workload::pair`.
    pub pair: u64,
    /// When the request arrived, from the start of the workload.
    pub at: Timestamp,
    /// Position in the fleet of the server that generated the response. `None` when no server accepted the request, or
    /// when the response names no server.
    pub endpoint: Option<u32>,
    /// Length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// Prompt tokens that the picker expected to be cached on the server that computed them.
    pub expected_cached_tokens: u32,
    /// Prompt tokens that were cached on that server.
    pub cached_tokens: u32,
    /// Tokens that the server generated.
    pub generated_tokens: u32,
    /// From arrival to the first token (TTFT); `None` when no token was generated.
    pub first_token: Option<Duration>,
    /// From arrival to the end of the response, or to the rejection.
    pub total: Duration,
    /// Times that the engine preempted the request and computed it anew.
    pub preemptions: u32,
    /// How the request ended: answered, rejected or lost.
    pub ending: Ending,
    /// The KV transfer, when another server computed the prompt.
    pub handover: Option<Handover>,
    /// Prefill on another server had been decided, and failed; the decode worker computed the prompt.
    pub fell_back: bool,
    /// Place of the request in a program; `None` when the workload has no programs.
    pub turn: Option<ProgramTurn>,
    /// Duration of the request if its program has a server for itself; `None` if that is not known.
    pub alone: Option<Duration>,
}

/// KV transfer of one prompt from its prefill worker to its decode worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// Position of the prefill worker in the fleet.
    pub prefill: u32,
    /// Tokens whose KV blocks were transferred; the decode worker had the others cached.
    pub received_tokens: u32,
    /// Duration of the transfer, in virtual time.
    pub transfer: Duration,
}

impl Served {
    /// The mean time between two tokens, and the number of these gaps; `None` for responses of fewer than two tokens.
    #[must_use]
    pub fn gaps(&self) -> Option<(Duration, u32)> {
        let gaps = self.generated_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some((self.total.saturating_sub(self.first_token?) / gaps, gaps))
    }

    /// The time per output token (TPOT): the mean of [`Self::gaps`]; `None` for responses of fewer than
    /// [`MIN_TPOT_TOKENS`].
    #[must_use]
    pub fn per_token(&self) -> Option<Duration> {
        self.gaps().filter(|_| self.generated_tokens >= MIN_TPOT_TOKENS).map(|(gap, _)| gap)
    }
}

/// Why a request left the queue, or did not enter it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum QueueOutcome {
    /// It was dequeued, or did not have to wait.
    Passed,
    /// An admitter rejected it before the queue.
    Shed,
    /// The queue was at its capacity.
    Full,
    /// It waited for its time to live (`ttl`).
    Expired,
    /// A request of higher priority replaced it in the queue.
    Evicted,
}

/// The queueing of one request, in pools with flow control.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Queued<'a> {
    /// Number of the request in the workload.
    pub number: u64,
    /// When the request arrived, from the start of the workload.
    pub at: Timestamp,
    /// Priority band: larger values are dequeued first.
    pub priority: i32,
    /// Tenant of the request; `None` when the workload has no tenants.
    pub tenant: Option<&'a str>,
    /// Time spent in the queue.
    pub waited: Duration,
    /// Why the request left the queue.
    pub outcome: QueueOutcome,
}

/// The load of one server at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Requests in the running batch.
    pub running: u32,
    /// Requests in the waiting queue.
    pub waiting: u32,
    /// Share of the KV blocks in use by requests, 0..=1.
    pub kv_usage: f32,
    /// Prompt tokens looked up in the prefix cache since the start.
    pub prefix_queries: u64,
    /// Prompt tokens found in the prefix cache since the start.
    pub prefix_hits: u64,
}
