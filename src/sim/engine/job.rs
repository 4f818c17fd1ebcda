//! What goes into an engine and what comes out of it: jobs, refusals, events, reports. Part of the engine's public
//! face; the engine makes the events, its owner the jobs.

use super::handoff::Handoff;
use crate::content::Piece;
use crate::kv::KvEvent;
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// Number of a job; its owner gives it out, each once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// What is to be read.
#[derive(Clone, Debug)]
pub enum JobPrompt {
    /// Token ids; the answer is made of [`crate::tokenizer::answer_token`]s.
    Tokens(Vec<u32>),
    /// Text that is known by name; no token is ever made. The answer is the text that [`Job::answer_seed`] names: a
    /// later prompt that brings it back as a piece finds its blocks.
    Pieces(Vec<Piece>),
}

impl JobPrompt {
    /// Length of the prompt, tokens.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        match self {
            JobPrompt::Tokens(tokens) => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            JobPrompt::Pieces(pieces) => pieces.iter().fold(0, |sum: u32, piece| sum.saturating_add(piece.tokens)),
        }
    }
}

/// A request for one sequence.
#[derive(Clone, Debug)]
pub struct Job {
    /// Id of the job, unique in the engine.
    pub id: JobId,
    /// What is to be read, at least one token.
    pub prompt: JobPrompt,
    /// Tokens to generate; 0 reads the prompt and ends (embeddings, scores).
    pub max_tokens: u32,
    /// Tokens after which the model is done by itself; no such moment when `None`.
    pub stops_after: Option<u32>,
    /// LoRA adapter; the base model when `None`.
    pub lora: Option<Arc<str>>,
    /// Keeps this prompt's blocks apart from those of other salts.
    pub cache_salt: Option<Arc<str>>,
    /// What the answer's tokens follow from; of a prompt in pieces, the answer's name.
    pub answer_seed: u64,
    /// What passes between this server and others.
    pub handoff: Handoff,
}

/// Why a job was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Prompt and at least one token of answer don't fit.
    #[error("prompt has {tokens} tokens, at most {limit} fit together with an answer")]
    TooLong {
        /// Length of the prompt, tokens.
        tokens: u32,
        /// Tokens that prompt and answer may have together.
        limit: u32,
    },
    /// As many jobs wait as may wait.
    #[error("{waiting} requests wait already, at most {limit} may")]
    QueueFull {
        /// Number of jobs in the waiting queue.
        waiting: usize,
        /// Capacity of the waiting queue, jobs.
        limit: u32,
    },
    /// The prompt has no tokens.
    #[error("prompt has no tokens, at least 1 is needed")]
    Empty,
}

/// Why a job ended, as APIs report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The response reached its own length.
    Stop,
    /// It reached its token limit.
    Length,
    /// The job was cancelled, or the engine restarted.
    Abort,
}

/// Totals of a job that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobReport {
    /// Why the job ended: length, stop or abort.
    pub reason: FinishReason,
    /// Length of the prompt, tokens.
    pub prompt_tokens: u32,
    /// Those of them that were found in the cache when it was first scheduled.
    pub cached_tokens: u32,
    /// Those of them that another server had computed and that came from there.
    pub received_tokens: u32,
    /// Tokens that the job generated.
    pub generated_tokens: u32,
    /// Times it had to start over.
    pub preemptions: u32,
}

/// Something that happened, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// The first token of the answer.
    FirstToken { job: JobId, at: Timestamp },
    /// A further token; only with [`EngineConfig::every_token`](super::EngineConfig::every_token).
    Token { job: JobId, at: Timestamp },
    /// What another server had computed of the prompt ([`Handoff::received`]) is here, or nothing of it was needed; the
    /// job is about to be read on, and the other server's blocks are free to go.
    Received { job: JobId, at: Timestamp },
    /// The blocks ran out and the job went back to the queue; what it said so far stands.
    Preempted { job: JobId, at: Timestamp },
    /// The end, exactly once for every job that was taken.
    Finished { job: JobId, at: Timestamp, report: JobReport },
}

/// What the cache has stored and dropped in one step, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvBatch {
    /// End of the step; engines publish events then.
    pub at: Timestamp,
    /// Changes of the cache, at least one.
    pub events: Vec<KvEvent>,
}

/// What the queues and the cache hold now.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Jobs in the running batch.
    pub running: usize,
    /// Jobs in the queue, and those that wait for what they receive.
    pub waiting: usize,
    /// Those of them that wait for an adapter's slot or a transfer.
    pub deferred: usize,
    /// Part of the blocks that jobs refer to, 0..=1.
    pub kv_usage: f64,
}
