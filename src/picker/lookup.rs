//! Lookup of one prompt in its pool's prefix index: the cached part on each endpoint for the decision, and the update
//! of the index after it.

use super::active::ActiveConfig;
use super::decide::RequestView;
use super::prefix::{PoolPrefix, PromptKeys, PromptRef, Read, Reading, Shown, Tail};
use super::warming::Warming;
use crate::event::{Degraded, Event, Limit, Observer};
use crate::placement::{CacheUpdates, LookedUp, PromptBlocks};
use attache_pool::PoolSnapshot;
use attache_pool::place::Place;
use attache_prefix::cache::Found;
use attache_prefix::key::BlockKeys;
use attache_protocol::Request;
use attache_record as record;
use attache_scheduling::Decision;
use attache_types::clock::Timestamp;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A prompt that is ready for the lookup.
#[derive(Debug)]
pub(super) struct Prepared<'p> {
    prefix: &'p Arc<PoolPrefix>,
    request: &'p Request<'p>,
    reading: Reading<'p>,
}

/// Reads the prompt; `None` if no cache can hold it or it can't be tokenized.
///
/// # Errors
/// Background work that must run first.
pub(super) fn prepare<'p>(
    observer: &dyn Observer,
    prefix: &'p Arc<PoolPrefix>,
    q: &RequestView<'p>,
    prompt_ref: PromptRef<'_>,
    request: Option<&'p Request<'p>>,
) -> Result<Option<Prepared<'p>>, Warming> {
    let Some(request) = request.filter(|_| q.api.prefills()) else { return Ok(None) };
    match guarded(observer, || prefix.read(q, prompt_ref, request)) {
        Some(Read::Ready(reading)) => Ok(Some(Prepared { prefix, request, reading })),
        Some(Read::Warm(warming)) => Err(warming),
        Some(Read::Unreadable(why, limit)) => {
            observer.event(Event::Degraded(why));
            limit.into_iter().for_each(|limit| observer.event(Event::Limit(limit)));
            Ok(None)
        }
        None => Ok(None),
    }
}

impl Prepared<'_> {
    /// The cached part on each endpoint and the length of the prompt, tokens, as an estimate for the queue. Has no side
    /// effects. `None` if the lookup panicked.
    pub(super) fn estimate(&self, observer: &dyn Observer, now: Timestamp) -> Option<(Found, u32)> {
        let Self { prefix, request, reading } = self;
        guarded(observer, || {
            let mut keys = prefix.keys(reading).inline_only();
            let mut found = prefix.cache.lookup(&mut keys, now).of_own_keys(reading.has_own_keys());
            if let Some((tokens, rest)) = reading.length(&keys, request) {
                found.count(tokens, rest);
            }
            let tokens = found.prompt_tokens(&request.prompt);
            (found, tokens)
        })
    }
}

/// The lookup of a prompt.
#[derive(Debug)]
pub(super) struct PromptLookup<'p> {
    prefix: &'p Arc<PoolPrefix>,
    request: &'p Request<'p>,
    reading: &'p Reading<'p>,
    keys: PromptKeys<'p>,
    /// The cached part on each endpoint.
    pub(super) found: Found,
}

impl<'p> PromptLookup<'p> {
    /// Looks a prompt up; `None` if the lookup panicked.
    ///
    /// The lookup stops at the first block that no endpoint has cached. The keys of the rest are computed in two
    /// cases: an endpoint reports no KV events, so they are recorded later, or the `whole` prompt is needed.
    ///
    /// # Errors
    /// Background work that must run first.
    pub(super) fn find(
        observer: &dyn Observer,
        config: &ActiveConfig,
        prepared: &'p Prepared<'_>,
        q: &RequestView<'_>,
        prompt_ref: PromptRef<'_>,
        snapshot: &PoolSnapshot,
        whole: bool,
    ) -> Result<Option<Self>, Warming> {
        let Prepared { prefix, request, reading } = prepared;
        if !q.last {
            prefix.count_known(prompt_ref, reading);
        }
        let lookup = guarded(observer, || {
            let mut keys = prefix.keys(reading).inline_only();
            let mut found = prefix.cache.lookup(&mut keys, q.now).of_own_keys(reading.has_own_keys());
            if let Some(kept) = q.body.known().and_then(|known| known.recorded.as_ref()?.carried) {
                let keeper = snapshot.endpoints.iter().find(|state| state.id() == kept.keeper);
                let place = keeper.map_or_else(Place::default, |state| state.endpoint.place);
                found.carry(kept.tokens, place, kept.by.clone().into());
            }
            if whole || snapshot.endpoints.iter().any(|state| !found.is_exact(state.endpoint.id)) {
                keys.upto(usize::MAX);
            }
            if let Some((tokens, rest)) = reading.length(&keys, request) {
                found.count(tokens, rest);
            }
            PromptLookup { prefix, request, reading, keys, found }
        });
        let Some(lookup) = lookup else { return Ok(None) };
        if lookup.keys.is_cold() {
            if !q.last {
                return Err(prefix.warming(prompt_ref, reading, &config.limits));
            }
            observer.event(Event::Degraded(Degraded::ReadingLate));
        }
        if lookup.keys.is_cut() {
            observer.event(Event::Limit(Limit::PromptBytes));
        }
        Ok(Some(lookup))
    }

    /// The prompt's length, tokens.
    pub(super) fn prompt_tokens(&self) -> u32 {
        self.found.prompt_tokens(&self.request.prompt)
    }

    /// The source of its keys.
    pub(super) fn prefix(&self) -> &'p Arc<PoolPrefix> {
        self.prefix
    }

    /// Hash of what separates caches: adapter, salt and tenant.
    pub(super) fn root(&self) -> u64 {
        self.reading.root()
    }

    /// Whether [`PromptLookup::tokens`] are exactly those of the model server.
    pub(super) fn has_engine_tokens(&self) -> bool {
        // The tokens do not contain those of images and audio.
        self.reading.has_engine_tokens() && self.request.prompt.media_tokens == 0 && !self.request.truncated
    }

    /// All tokens of the prompt; `None` if some are not computed yet.
    pub(super) fn tokens(&mut self) -> Option<Vec<u32>> {
        self.keys.upto(usize::MAX);
        if self.keys.is_cold() {
            return None;
        }
        match self.prefix.show(self.reading) {
            Shown::Tokens(ids) => Some(ids),
            Shown::Bytes(_) => None,
        }
    }

    /// The prompt in the form of a recording.
    pub(super) fn recorded(&mut self, q: &RequestView<'_>) -> record::Looked {
        let prompt = &self.request.prompt;
        record::Looked {
            keys: self.keys.upto(0).to_vec(),
            cold: self.keys.is_cold(),
            own_keys: self.found.has_own_keys(),
            skips_cache: self.request.skips_cache,
            text_bytes: prompt.text_bytes,
            token_ids: prompt.token_ids,
            media_tokens: prompt.media_tokens,
            count: prompt.count,
            tokens: self.found.counted(),
            tenant: self.prefix.tenant(q.head).map(record::headers::hash),
            ..record::Looked::default()
        }
    }

    /// What follows from this decision. `is_counted`: the decision counts in the statistics of the cache.
    pub(super) fn updates(self, decision: &Decision, q: &RequestView<'_>, is_counted: bool) -> PendingUpdates {
        let Self { prefix, request, keys, found, .. } = self;
        let looked = LookedUp {
            cache: &prefix.cache,
            found: &found,
            prompt: &request.prompt,
            skips_cache: request.skips_cache,
            is_counted,
            tenant: prefix.cache.tenant(prefix.tenant(q.head)),
        };
        let all = !keys.is_cold() && looked.needs_all_blocks(decision);
        let (keys, complete, tail) = if all { keys.finish() } else { (keys.made(), true, None) };
        let updates = looked.updates(decision, PromptBlocks { keys, all, complete });
        PendingUpdates { updates, cut: !complete, tail: tail.map(|tail| (prefix.clone(), tail)) }
    }
}

/// What a decision changes in the prefix cache, now and with the response.
#[derive(Debug, Default)]
pub(super) struct PendingUpdates {
    /// The updates for the chosen servers; `None` without a lookup.
    pub(super) updates: Option<CacheUpdates>,
    /// The prompt was too long to be encoded completely.
    pub(super) cut: bool,
    /// The end of the key chain, which the response extends.
    pub(super) tail: Option<(Arc<PoolPrefix>, Tail)>,
}

/// Runs `look` and catches a panic in a tokenizer or in the index. The request continues without the result.
pub(super) fn guarded<T>(observer: &dyn Observer, look: impl FnOnce() -> T) -> Option<T> {
    let result = catch_unwind(AssertUnwindSafe(look));
    if result.is_err() {
        observer.event(Event::Panic);
        observer.event(Event::Degraded(Degraded::LookupPanic));
    }
    result.ok()
}
