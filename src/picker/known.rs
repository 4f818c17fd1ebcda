//! Requests that are known without a body: those of a simulation, which has prompts as tokens and not as text, and
//! those of a recording, which has prompts as keys.
//!
//! They pass the same steps as a request with a body. Only parsing and tokenizing have nothing to do.

use super::decide::CallFacts;
use attache_prefix::key::{BlockKey, BlockKeys};
use attache_protocol::{Prompt, Request};
use attache_record::Kept;
use std::fmt;

/// A request without a body.
#[derive(Debug)]
pub struct KnownRequest<'a> {
    /// The pool that the request belongs to, whatever the conditions of the pool.
    pub pool: &'a str,
    /// The fields that the body would have; `None` if it could not be parsed. The prompt has its sizes and its media,
    /// and no text.
    pub request: Option<Request<'a>>,
    /// The text of the prompt, if a strategy of the pool reads it.
    pub text: Option<&'a Prompt<'a>>,
    /// Length of the body that the request would have, bytes. Queues count it.
    pub bytes: u64,
    /// Estimated length of the prompt before its lookup, tokens.
    pub prompt_tokens: u32,
    /// Priority of the request; objectives and rules for models are not read.
    pub priority: i32,
    /// Length of the response, tokens, for the fairness policy `vtc-oracle`.
    pub answer_tokens: u32,
    /// Computes the block keys of the prompt.
    pub keys: &'a (dyn KnownKeys + Sync),
    /// Facts about a request of a recording.
    pub recorded: Option<RecordedFacts<'a>>,
}

/// Facts about a recorded request that depend on more than its body. The decision uses them in place of its own.
#[derive(Debug)]
pub struct RecordedFacts<'a> {
    /// What its path, API and body permitted.
    pub call: CallFacts,
    /// The prompt was looked up. It is looked up again even if the strategy ignores the result, for statistics.
    pub looked_up: bool,
    /// What a decode worker keeps of the conversation's previous turn.
    pub carried: Option<&'a Kept>,
}

/// Block keys of a prompt that is known without its text.
pub trait KnownKeys: fmt::Debug {
    /// The keys of the prompt's blocks, for the model or adapter `model` of the servers; `None` if they are unknown.
    fn blocks(&self, model: &str) -> Option<KnownBlocks<'_>>;
}

/// The known blocks of a prompt.
#[derive(Clone, Copy, Debug, Default)]
pub struct KnownBlocks<'a> {
    /// Keys of the first full blocks.
    pub keys: &'a [BlockKey],
    /// The keys are Attaché's own and do not match those of KV events.
    pub own_keys: bool,
    /// There are further keys, which the decision does without.
    pub cold: bool,
    /// The text of the prompt was too long to be encoded completely.
    pub cut: bool,
    /// Length of the prompt, if the engine's tokenizer has counted its tokens.
    pub tokens: Option<u32>,
}

impl BlockKeys for KnownBlocks<'_> {
    fn upto(&mut self, n: usize) -> &[BlockKey] {
        self.keys.upto(n)
    }
}
