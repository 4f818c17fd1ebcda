//! What a routed prompt teaches about the caches: a claim while it is on its way, a record when its answer begins, a correction when the
//! answer tells how much was cached, and the answer itself, which the next turn will begin with.

use super::prefix::{PoolPrefix, Tail};
use crate::clock::Timestamp;
use crate::ids::EndpointId;
use crate::prefix::cache::Coming;
use crate::prefix::key::BlockKey;
use crate::protocol::{Api, Usage};
use std::sync::Arc;

/// One prompt's teaching, from the decision to the end of its answer.
#[derive(Debug)]
pub struct Learning {
    prefix: Arc<PoolPrefix>,
    /// All blocks of the prompt, when what the endpoint holds is learned; else as many as were asked for.
    keys: Vec<BlockKey>,
    /// Whether `keys` are all.
    whole: bool,
    tail: Option<Tail>,
    tenant: Option<String>,
    claim: Option<Coming>,
    /// Tokens that the picked endpoint was thought to hold.
    foretold: u32,
    /// Bytes of the prompt's text, where nothing else is in the prompt.
    text_bytes: u64,
    /// Whether the keys are of our own making, so that what a block is in tokens must be measured.
    own_keys: bool,
    /// Whether what the answer says of cached tokens tells what the server holds.
    tells_cached: bool,
    recorded: bool,
}

/// What is known when the decision has been made.
#[derive(Debug)]
pub struct Lesson {
    /// As in [`Learning`].
    pub keys: Vec<BlockKey>,
    /// As in [`Learning`].
    pub whole: bool,
    /// What the answer goes on from.
    pub tail: Option<Tail>,
    /// Who asked.
    pub tenant: Option<String>,
    /// Blocks of the prompt that the picked endpoint will have to find room for, where that is learned.
    pub fresh: u32,
    /// As in [`Learning`].
    pub foretold: u32,
    /// As in [`Learning`].
    pub text_bytes: u64,
    /// As in [`Learning`].
    pub own_keys: bool,
    /// As in [`Learning`].
    pub tells_cached: bool,
}

impl Learning {
    /// The prompt is on its way to `endpoint`.
    #[must_use]
    pub fn begin(prefix: Arc<PoolPrefix>, lesson: Lesson, endpoint: EndpointId, now: Timestamp) -> Self {
        let claim = (!lesson.keys.is_empty()).then(|| prefix.cache.claim(endpoint, &lesson.keys, lesson.fresh, now));
        let Lesson { keys, whole, tail, tenant, foretold, text_bytes, own_keys, tells_cached, .. } = lesson;
        Self { prefix, keys, whole, tail, tenant, claim, foretold, text_bytes, own_keys, tells_cached, recorded: false }
    }

    /// Whether the text of the answer is wanted.
    #[must_use]
    pub fn wants_answer(&self, api: Api) -> bool {
        self.whole && self.tail.is_some() && api.generates()
    }

    /// Envoy served the request elsewhere.
    pub fn move_to(&mut self, endpoint: EndpointId, now: Timestamp) {
        self.foretold = 0;
        if self.claim.take().is_some() {
            let fresh = if self.whole { u32::try_from(self.keys.len()).unwrap_or(u32::MAX) } else { 0 };
            self.claim = Some(self.prefix.cache.claim(endpoint, &self.keys, fresh, now));
        }
    }

    /// The answer begins: when it is a good one, `endpoint` has computed the prompt. The claim goes when the index knows; where it waits
    /// for the engine's own events it stays to the end.
    pub fn first_byte(&mut self, good: bool, endpoint: EndpointId, now: Timestamp) {
        if good && self.whole {
            if let Some(claim) = &mut self.claim {
                claim.arrived();
            }
            self.prefix.cache.record(endpoint, &self.keys, self.tenant.as_deref(), now);
            self.recorded = true;
        }
        if self.recorded || !good {
            self.claim = None;
        }
    }

    /// The answer has ended; `answer` is its text when it came whole.
    pub fn end(mut self, api: Api, usage: &Usage, answer: Option<&str>, endpoint: EndpointId, now: Timestamp) {
        let cache = &self.prefix.cache;
        let cached = usage.cached_tokens.filter(|_| self.tells_cached);
        cache.correct(endpoint, u64::from(self.foretold), usage.prompt_tokens, cached, self.text_bytes);
        if let (Some(tokens), true) = (usage.prompt_tokens, self.whole && self.own_keys && self.text_bytes > 0) {
            cache.measured(self.keys.len(), tokens);
        }
        let (Some(answer), Some(tail), true) = (answer, &mut self.tail, self.recorded) else { return };
        let before = self.keys.len();
        if self.prefix.extend(tail, api, answer, &mut self.keys) && self.keys.len() > before {
            cache.record(endpoint, &self.keys, self.tenant.as_deref(), now);
        }
    }
}
