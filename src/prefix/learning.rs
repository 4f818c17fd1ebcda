//! What a routed prompt changes in the prefix cache: a speculative entry until its response has ended, a record when
//! the response begins, a correction when the usage reports cached tokens, and a record of the response itself, which
//! the next turn will repeat.
//!
//! Owned by a `scheduling::Booking`; made from the lookup before the decision. No I/O.

use super::cache::{PrefixCache, PromptInFlight};
use super::index::{InUse, TenantId};
use super::key::BlockKey;
use attache_protocol::Usage;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// State of a prompt at the decision, from which the prefix cache is updated later.
#[derive(Clone, Debug, Default)]
pub struct PrefixUpdate {
    /// All block keys of the prompt when the endpoint's blocks are estimated; otherwise
    /// those that the lookup requested.
    pub keys: Arc<Vec<BlockKey>>,
    /// Whether `keys` holds all keys of the prompt.
    pub whole: bool,
    /// The tenant of the request, from [`PrefixCache::tenant`].
    pub tenant: TenantId,
    /// Blocks of the prompt that the picked endpoint is expected to hold and use, where `keys` is complete.
    pub held: u32,
    /// Blocks of the prompt that the picked endpoint will have to store, where its blocks are estimated.
    pub fresh: u32,
    /// Blocks of the prompt that some endpoint was expected to hold.
    pub anywhere: u32,
    /// Tokens of the prompt that the picked endpoint was expected to have cached.
    pub foretold: u32,
    /// Length of the prompt's text in bytes; 0 when it has other content too.
    pub text_bytes: u64,
    /// Whether Attaché made the keys from its own tokens or text, so that a block's engine tokens must be measured.
    pub own_keys: bool,
    /// Whether the response's count of cached tokens reflects what the server holds.
    pub tells_cached: bool,
}

/// The updates of one prompt, from the decision to the end of its response.
#[derive(Debug)]
pub struct Learning {
    cache: Arc<PrefixCache>,
    update: PrefixUpdate,
    claim: Option<PromptInFlight>,
    /// The prompt while its server works on it; `None` before the response begins.
    in_use: Option<InUse>,
    /// Expected cached tokens that were still estimated to be there when the response began.
    believed: u32,
}

impl Learning {
    /// Adds the speculative entry of a prompt that is in flight to `endpoint`.
    #[must_use]
    pub fn begin(cache: Arc<PrefixCache>, update: PrefixUpdate, endpoint: EndpointId, now: Timestamp) -> Self {
        let claim = (!update.keys.is_empty()).then(|| cache.claim(endpoint, &update, now));
        let believed = update.foretold;
        Self { cache, update, claim, in_use: None, believed }
    }

    /// The share of computed blocks that were computed before and evicted everywhere, in all recent prompts; 0..1.
    #[must_use]
    pub fn recomputed(&self) -> f64 {
        self.cache.recomputed()
    }

    /// Prompt tokens that the endpoint is expected to have cached.
    #[must_use]
    pub fn foretold(&self) -> u32 {
        self.update.foretold
    }

    /// Whether all blocks of the prompt are known, so that those of the response can follow.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.update.whole
    }

    /// Moves the speculative entry to the endpoint that Envoy used instead of the picked one.
    pub fn move_to(&mut self, endpoint: EndpointId, now: Timestamp) {
        (self.update.foretold, self.believed) = (0, 0);
        if self.claim.take().is_some() {
            let all = u32::try_from(self.update.keys.len()).unwrap_or(u32::MAX);
            (self.update.held, self.update.fresh) = (0, if self.update.whole { all } else { 0 });
            self.claim = Some(self.cache.claim(endpoint, &self.update, now));
        }
    }

    /// Records the begin of the response. A `good` one means that `endpoint` has computed the prompt. The speculative
    /// entry stays until the end, since an engine does not evict blocks that it uses.
    pub fn first_byte(&mut self, good: bool, endpoint: EndpointId, now: Timestamp) {
        match &mut self.claim {
            Some(claim) if good => claim.arrived(),
            _ => self.claim = None,
        }
        if good && self.update.whole {
            // Blocks that other prompts evicted while this one waited do not count against the server's capacity.
            if self.update.tells_cached && self.believed > 0 {
                self.believed =
                    self.believed.min(self.cache.believed(endpoint, &self.update.keys, self.update.own_keys));
            }
            self.cache.computed(&self.update, now);
            self.in_use = self.cache.record_in_use(endpoint, &self.update.keys, self.update.tenant, now);
        }
    }

    /// Records the end of the response. `extend` appends the keys of a complete response to those of the prompt; it
    /// returns false when it cannot.
    pub fn end(
        mut self,
        usage: &Usage,
        extend: impl FnOnce(&mut Vec<BlockKey>) -> bool,
        endpoint: EndpointId,
        now: Timestamp,
    ) {
        let Self { cache, update, in_use, believed, .. } = &mut self;
        let cached = usage.cached_tokens.filter(|_| update.tells_cached);
        let foretold = [update.foretold, *believed].map(u64::from);
        cache.correct(endpoint, foretold, usage.prompt_tokens, cached, update.text_bytes);
        if let (Some(tokens), true) = (usage.prompt_tokens, update.whole && update.own_keys && update.text_bytes > 0) {
            cache.measured(update.keys.len(), tokens);
        }
        let before = update.keys.len();
        if in_use.take().is_some() && extend(Arc::make_mut(&mut update.keys)) && update.keys.len() > before {
            cache.record(endpoint, &update.keys, update.tenant, now);
        }
    }
}
