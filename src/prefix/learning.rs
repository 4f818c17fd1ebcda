//! What a routed prompt teaches about the caches: a claim until its answer has ended, a record when its answer begins, a correction when the
//! answer tells how much was cached, and the answer itself, which the next turn will begin with.
//!
//! Owned by a `scheduling::Booking`; made of what the look-up before the decision found. Pure.

use super::cache::{Coming, PrefixCache};
use super::key::BlockKey;
use attache_protocol::Usage;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// What is known of a prompt when the decision has been made.
#[derive(Clone, Debug, Default)]
pub struct Lesson {
    /// All blocks of the prompt, when what the endpoint holds is learned; else as many as were asked for.
    pub keys: Vec<BlockKey>,
    /// Whether `keys` are all.
    pub whole: bool,
    /// Who asked.
    pub tenant: Option<String>,
    /// Blocks of the prompt that the picked endpoint is believed to hold and will use, where all are known.
    pub held: u32,
    /// Blocks of the prompt that it will have to find room for, where that is learned.
    pub fresh: u32,
    /// Tokens that the picked endpoint was thought to hold.
    pub foretold: u32,
    /// Bytes of the prompt's text, where nothing else is in the prompt.
    pub text_bytes: u64,
    /// Whether the keys are of our own making, so that what a block is in tokens must be measured.
    pub own_keys: bool,
    /// Whether what the answer says of cached tokens tells what the server holds.
    pub tells_cached: bool,
}

/// One prompt's teaching, from the decision to the end of its answer.
#[derive(Debug)]
pub struct Learning {
    cache: Arc<PrefixCache>,
    lesson: Lesson,
    claim: Option<Coming>,
    recorded: bool,
    /// What of the foretold tokens was still believed to be held when the answer began.
    believed: u32,
}

impl Learning {
    /// The prompt is on its way to `endpoint`.
    #[must_use]
    pub fn begin(cache: Arc<PrefixCache>, lesson: Lesson, endpoint: EndpointId, now: Timestamp) -> Self {
        let claim = (!lesson.keys.is_empty()).then(|| cache.claim(endpoint, &lesson, now));
        let believed = lesson.foretold;
        Self { cache, lesson, claim, recorded: false, believed }
    }

    /// Whether all of the prompt's blocks are known, so that those of the answer can follow.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.lesson.whole
    }

    /// Envoy served the request elsewhere.
    pub fn move_to(&mut self, endpoint: EndpointId, now: Timestamp) {
        (self.lesson.foretold, self.believed) = (0, 0);
        if self.claim.take().is_some() {
            let all = u32::try_from(self.lesson.keys.len()).unwrap_or(u32::MAX);
            (self.lesson.held, self.lesson.fresh) = (0, if self.lesson.whole { all } else { 0 });
            self.claim = Some(self.cache.claim(endpoint, &self.lesson, now));
        }
    }

    /// The answer begins: when it is a good one, `endpoint` has computed the prompt. The claim stays to the end all the same: an engine
    /// evicts nothing that it works with, however much else it has taken in since.
    pub fn first_byte(&mut self, good: bool, endpoint: EndpointId, now: Timestamp) {
        match &mut self.claim {
            Some(claim) if good => claim.arrived(),
            _ => self.claim = None,
        }
        if good && self.lesson.whole {
            // What others have pushed out while it waited there says nothing of the server's room.
            if self.lesson.tells_cached && self.believed > 0 {
                self.believed =
                    self.believed.min(self.cache.believed(endpoint, &self.lesson.keys, self.lesson.own_keys));
            }
            self.cache.record(endpoint, &self.lesson.keys, self.lesson.tenant.as_deref(), now);
            self.recorded = true;
        }
    }

    /// The answer has ended. `extend` adds the keys of the answer to those of the prompt, where it came whole; false when it can't.
    pub fn end(
        mut self,
        usage: &Usage,
        extend: impl FnOnce(&mut Vec<BlockKey>) -> bool,
        endpoint: EndpointId,
        now: Timestamp,
    ) {
        let Self { cache, lesson, recorded, believed, .. } = &mut self;
        let cached = usage.cached_tokens.filter(|_| lesson.tells_cached);
        let foretold = [lesson.foretold, *believed].map(u64::from);
        cache.correct(endpoint, foretold, usage.prompt_tokens, cached, lesson.text_bytes);
        if let (Some(tokens), true) = (usage.prompt_tokens, lesson.whole && lesson.own_keys && lesson.text_bytes > 0) {
            cache.measured(lesson.keys.len(), tokens);
        }
        let before = lesson.keys.len();
        if *recorded && extend(&mut lesson.keys) && lesson.keys.len() > before {
            cache.record(endpoint, &lesson.keys, lesson.tenant.as_deref(), now);
        }
    }
}
