//! What became of one request.

use attache_types::clock::Timestamp;
use std::time::Duration;

/// Shorter answers have no time per output token (TPOT): one step that computes another prompt would be most of it.
pub const MIN_TPOT_TOKENS: u32 = 8;

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Its answer came whole.
    Answered,
    /// Nobody took it: the picker or the server refused.
    Refused,
    /// Its server died, or the connection broke.
    Lost,
}

/// One request that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Served {
    /// Its number in the workload.
    pub number: u64,
    /// The number by which it is compared, see `Workload::pair`.
    pub pair: u64,
    /// When it came.
    pub at: Timestamp,
    /// The position in the fleet of the server that made its answer; `None` when nobody took it, or an answer does not tell who made it.
    pub endpoint: Option<u32>,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens of it that the picker thought to be held by the server that computed it.
    pub foretold_tokens: u32,
    /// Tokens of it that this server held.
    pub cached_tokens: u32,
    /// Tokens of the answer.
    pub generated_tokens: u32,
    /// From its coming to the first token; `None` when there was none.
    pub first_token: Option<Duration>,
    /// From its coming to its end.
    pub total: Duration,
    /// Times that its server started it over.
    pub preemptions: u32,
    /// How it ended.
    pub ending: Ending,
    /// How its prompt came from the server that computed it, when that was another one.
    pub handover: Option<Handover>,
    /// Another server was to compute the prompt, and none did.
    pub fell_back: bool,
}

/// What passed from the server that computed a prompt to the one that made the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Handover {
    /// The position in the fleet of the server that computed the prompt.
    pub prefill: u32,
    /// Tokens whose keys and values were transferred; the others were there.
    pub received_tokens: u32,
    /// How long that took.
    pub transfer: Duration,
}

impl Served {
    /// The mean time between two tokens of the answer, and how many such gaps it has; `None` for answers of fewer than two tokens.
    #[must_use]
    pub fn gaps(&self) -> Option<(Duration, u32)> {
        let gaps = self.generated_tokens.checked_sub(1).filter(|gaps| *gaps > 0)?;
        Some((self.total.saturating_sub(self.first_token?) / gaps, gaps))
    }

    /// The time per output token (TPOT): the mean of [`Self::gaps`]; `None` for answers of fewer than [`MIN_TPOT_TOKENS`].
    #[must_use]
    pub fn per_token(&self) -> Option<Duration> {
        self.gaps().filter(|_| self.generated_tokens >= MIN_TPOT_TOKENS).map(|(gap, _)| gap)
    }
}

/// What came of a request's asking for its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Fate {
    /// It was let through, at once or when its turn came.
    Passed,
    /// It was turned away at once: an admitter did not let it in.
    Shed,
    /// It was turned away at once: as many wait as may.
    Full,
    /// It has waited for as long as it may.
    Expired,
    /// It gave way to another while it waited.
    Evicted,
}

/// One request that has asked for its turn, where there are queues.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Queued<'a> {
    /// Its number in the workload.
    pub number: u64,
    /// When it came.
    pub at: Timestamp,
    /// Its band.
    pub priority: i32,
    /// Whose it is.
    pub tenant: Option<&'a str>,
    /// How long it has waited.
    pub waited: Duration,
    /// What came of that.
    pub fate: Fate,
}

/// One server at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Sample {
    /// Requests in its batch.
    pub running: u32,
    /// Requests in its queue.
    pub waiting: u32,
    /// Part of its blocks that requests refer to, 0..=1.
    pub kv_usage: f32,
    /// Prompt tokens that it has looked up in its cache since the start.
    pub prefix_queries: u64,
    /// Those of them that it held.
    pub prefix_hits: u64,
}
