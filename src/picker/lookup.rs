//! One prompt looked up in its pool's caches: before the decision who holds how much of it, after it what is to be learned.

use super::active::ActiveConfig;
use super::decide::{RequestView, PendingUpdate};
use super::picker::Picker;
use super::prefix::{PromptRef, PoolPrefix, PromptKeys, Read, Reading, Shown};
use super::warming::Warming;
use crate::event::{Degraded, Event, Limit};
use attache_pool::PoolSnapshot;
use attache_prefix::cache::Found;
use attache_prefix::key::{BlockKey, BlockKeys};
use attache_prefix::learning::Lesson;
use attache_protocol::Request;
use attache_record as record;
use attache_scheduling::Decision;
use attache_types::clock::Timestamp;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

/// A prompt that can be looked up.
#[derive(Debug)]
pub(super) struct Prepared<'p> {
    prefix: &'p Arc<PoolPrefix>,
    request: &'p Request<'p>,
    reading: Reading<'p>,
}

/// Reads the prompt; `None` when there is none that a cache would hold, or it can't be read.
///
/// # Errors
/// What must run before it can be read.
pub(super) fn prepare<'p>(
    picker: &Picker,
    prefix: &'p Arc<PoolPrefix>,
    q: &RequestView<'_>,
    asked: PromptRef<'_>,
    request: Option<&'p Request<'p>>,
) -> Result<Option<Prepared<'p>>, Warming> {
    let Some(request) = request.filter(|_| q.api.prefills()) else { return Ok(None) };
    match guarded(picker, || prefix.read(q, asked, request)) {
        Some(Read::Ready(reading)) => Ok(Some(Prepared { prefix, request, reading })),
        Some(Read::Warm(warming)) => Err(warming),
        Some(Read::Unreadable(why, limit)) => {
            picker.observer.event(Event::Degraded(why));
            limit.into_iter().for_each(|limit| picker.observer.event(Event::Limit(limit)));
            Ok(None)
        }
        None => Ok(None),
    }
}

impl Prepared<'_> {
    /// Who holds how much of the prompt by now, and its length in tokens: what it is expected to take, and nothing else comes of it. `None`
    /// when that failed.
    pub(super) fn glance(&self, picker: &Picker, now: Timestamp) -> Option<(Found, u32)> {
        let Self { prefix, request, reading } = self;
        guarded(picker, || {
            let mut keys = prefix.keys(reading).at_hand();
            let found = prefix.cache.lookup(&mut keys, now).of_own_keys(reading.has_own_keys());
            let tokens = found.prompt_tokens(&request.prompt);
            (found, tokens)
        })
    }
}

/// What was found of a prompt.
#[derive(Debug)]
pub(super) struct PromptLookup<'p> {
    prefix: &'p Arc<PoolPrefix>,
    request: &'p Request<'p>,
    reading: &'p Reading<'p>,
    keys: PromptKeys<'p>,
    /// Who holds how much of it.
    pub(super) found: Found,
}

impl<'p> PromptLookup<'p> {
    /// Looks a prompt up. Where caches are guessed all of its keys are made, since they are recorded later; where engines tell, what nobody
    /// holds need not be encoded unless the `whole` prompt is asked for. `None` when that failed.
    ///
    /// # Errors
    /// What must run before it can be looked up.
    pub(super) fn up(
        picker: &Picker,
        config: &ActiveConfig,
        prepared: &'p Prepared<'_>,
        q: &RequestView<'_>,
        asked: PromptRef<'_>,
        snapshot: &PoolSnapshot,
        whole: bool,
    ) -> Result<Option<Self>, Warming> {
        let Prepared { prefix, request, reading } = prepared;
        if !q.last {
            prefix.count_known(asked, reading);
        }
        let looked = guarded(picker, || {
            let mut keys = prefix.keys(reading).at_hand();
            let found = prefix.cache.lookup(&mut keys, q.now).of_own_keys(reading.has_own_keys());
            if whole || snapshot.endpoints.iter().any(|state| !found.is_exact(state.endpoint.id)) {
                keys.upto(usize::MAX);
            }
            PromptLookup { prefix, request, reading, keys, found }
        });
        let Some(looked) = looked else { return Ok(None) };
        if looked.keys.is_cold() {
            if !q.last {
                return Err(prefix.warming(asked, reading, &config.limits));
            }
            picker.observer.event(Event::Degraded(Degraded::ReadingLate));
        }
        if looked.keys.is_cut() {
            picker.observer.event(Event::Limit(Limit::PromptBytes));
        }
        Ok(Some(looked))
    }

    /// The prompt's length, tokens.
    pub(super) fn prompt_tokens(&self) -> u32 {
        self.found.prompt_tokens(&self.request.prompt)
    }

    /// Where its keys come from.
    pub(super) fn prefix(&self) -> &'p Arc<PoolPrefix> {
        self.prefix
    }

    /// What separates its cache from others.
    pub(super) fn root(&self) -> u64 {
        self.reading.root()
    }

    /// Whether [`PromptLookup::tokens`] are its server's.
    pub(super) fn has_engine_tokens(&self) -> bool {
        // What media become is not in the tokens.
        self.reading.has_engine_tokens() && self.request.prompt.media_tokens == 0 && !self.request.truncated
    }

    /// All tokens of the prompt; `None` when they are not at hand.
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

    /// The prompt as a recording holds it.
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
            tenant: self.prefix.tenant(q.head).map(record::headers::hash),
        }
    }

    /// The decision is made: the tokens that the first pick is thought to hold, and what is to be learned. Where caches are guessed all blocks
    /// are wanted for that, where engines tell only those that were asked for.
    pub(super) fn learn(self, decision: &Decision, q: &RequestView<'_>) -> (u32, PendingUpdate) {
        let tenant = self.prefix.tenant(q.head).map(str::to_owned);
        let Self { prefix, request, keys, found, .. } = self;
        let prompt = &request.prompt;
        let first = decision.picks.first().map(|e| e.id);
        let prefill = decision.split.as_ref().and_then(|split| split.prefill.first()).map(|e| e.id);
        let prompt_tokens = found.prompt_tokens(prompt);
        let held = |id| if request.skips_cache { 0 } else { found.tokens(found.depth(id).any).min(prompt_tokens) };
        let matched = first.map_or(0, held);
        // Whoever computes the prompt makes use of what it holds.
        prefix.cache.decided(prompt_tokens, prefill.map_or(matched, held));
        let whole = first.into_iter().chain(prefill).any(|id| !found.is_exact(id)) && !keys.is_cold();
        let (keys, complete, tail) = if whole { keys.finish() } else { (keys.made(), true, None) };
        let only_text = prompt.media_tokens == 0 && prompt.token_ids == 0 && prompt.count == 1;
        let base = Lesson {
            tenant,
            // Of a prompt too long to be encoded to its end only the beginning is known.
            text_bytes: if only_text && complete { prompt.text_bytes } else { 0 },
            tells_cached: !request.skips_cache && complete,
            ..Lesson::default()
        };
        let of = |id, keys: Vec<BlockKey>| {
            let whole = whole && !found.is_exact(id);
            let Lesson { tenant, text_bytes, tells_cached, .. } = base.clone();
            Lesson { tenant, text_bytes, tells_cached, ..found.lesson(id, keys, whole) }
        };
        let prefill = prefill.map(|id| of(id, keys.clone()));
        let lesson = first.map_or(base.clone(), |id| of(id, keys));
        // What an answer says to be cached was so where its prompt was computed.
        let lesson = Lesson { tells_cached: lesson.tells_cached && prefill.is_none(), ..lesson };
        (matched, PendingUpdate { prefix: prefix.clone(), lesson, prefill, tail })
    }
}

/// A panic in a tokenizer or in the index costs the request what it would have found or taught, nothing else.
pub(super) fn guarded<T>(picker: &Picker, look: impl FnOnce() -> T) -> Option<T> {
    let looked = catch_unwind(AssertUnwindSafe(look));
    if looked.is_err() {
        picker.observer.event(Event::Panic);
        picker.observer.event(Event::Degraded(Degraded::LookupPanic));
        tracing::error!("panic while reading a prompt or response; the request continues without prefix information");
    }
    looked.ok()
}
