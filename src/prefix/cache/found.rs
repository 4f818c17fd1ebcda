//! Result of one prompt's lookup: how much of it each endpoint holds, by KV events, by estimates
//! and by prompts in flight.

use super::Guesses;
use crate::claims::ClaimedDepths;
use crate::index::{Depth, Kept};
use crate::key::BlockKey;
use crate::learning::PrefixUpdate;
use crate::residents::{Resident, ResidentTable};
use arc_swap::Guard;
use attache_pool::place::Place;
use attache_protocol::Prompt;
use attache_types::ids::EndpointId;
use smallvec::SmallVec;
use std::sync::Arc;

/// Lookup result of one prompt, for the duration of one decision.
#[derive(Debug)]
pub struct Found {
    // Guards instead of clones of the `Arc`s: a shared reference count would have all threads write to one cache line.
    pub(super) guesses: Guard<Arc<Guesses>>,
    pub(super) residents: Guard<Arc<ResidentTable>>,
    pub(super) matches: Kept,
    pub(super) claimed: ClaimedDepths,
    /// Tokens that a decode worker keeps, the worker's topology, and the endpoints that can fetch them.
    pub(super) carried: Option<(u32, Place, Arc<[EndpointId]>)>,
    pub(super) tokens_per_block: f64,
    pub(super) own_block_tokens: f64,
    pub(super) bytes_per_token: f64,
    /// Attaché made the keys from its own tokens or text, so they match estimated blocks only, not engines' events.
    pub(super) own_keys: bool,
    /// The length of the prompt as far as it was tokenized, and the bytes of its text that were not.
    pub(super) counted: Option<(u64, u64)>,
}

impl Found {
    /// Returns the result with `own` set: whether Attaché made the keys itself, so that
    /// engines' events cannot match them.
    #[must_use]
    pub fn of_own_keys(self, own: bool) -> Self {
        Self { own_keys: own, ..self }
    }

    /// Notes that a decode worker at `place` keeps the prompt's first `tokens`, which the endpoints `by` can fetch.
    pub fn carry(&mut self, tokens: u32, place: Place, by: Arc<[EndpointId]>) {
        self.carried = Some((tokens, place, by));
    }

    /// Returns how many of the prompt's first tokens `by` can fetch from a decode worker, and that worker's topology.
    #[must_use]
    pub fn carried(&self, by: EndpointId) -> (u32, Place) {
        let carried = self.carried.as_ref().filter(|(_, _, servers)| servers.contains(&by));
        carried.map(|(tokens, place, _)| (*tokens, *place)).unwrap_or_default()
    }

    /// Whether Attaché made the prompt's keys from its own tokens or text.
    #[must_use]
    pub fn has_own_keys(&self) -> bool {
        self.own_keys
    }

    /// Returns how many blocks of the prompt `endpoint` holds, including prompts in flight: as its engine
    /// reports, or else as estimated.
    #[inline]
    #[must_use]
    pub fn depth(&self, endpoint: EndpointId) -> Depth {
        let mut depth = self.held(endpoint);
        let claimed = self.claimed.get(endpoint);
        for tier in [&mut depth.gpu, &mut depth.cpu, &mut depth.any] {
            *tier = claimed.max(*tier);
        }
        depth
    }

    /// As [`Found::depth`], without prompts in flight.
    #[inline]
    #[must_use]
    pub fn held(&self, endpoint: EndpointId) -> Depth {
        match self.residents.get(&endpoint) {
            Some(resident) if !self.own_keys => self.reported(resident, endpoint),
            _ => self.guessed(endpoint),
        }
    }

    #[inline]
    fn guessed(&self, endpoint: EndpointId) -> Depth {
        self.guesses.get(&endpoint).map(|guess| self.matches.depth(guess.holder)).unwrap_or_default()
    }

    /// As [`Found::held`], for an endpoint whose engine publishes KV events.
    fn reported(&self, resident: &Resident, endpoint: EndpointId) -> Depth {
        if !resident.is_certain() {
            return self.guessed(endpoint);
        }
        // The server itself picks the rank. A good balancer picks the one that holds most.
        let depths = resident.caches.iter().map(|cache| self.matches.depth(cache.holder));
        let reported = depths.max_by_key(|depth| depth.any).unwrap_or_default();
        if resident.is_complete() {
            return reported;
        }
        [reported, self.guessed(endpoint)].into_iter().max_by_key(|d| d.any).unwrap_or_default()
    }

    /// Returns the blocks of the prompt that each data-parallel rank of `endpoint` holds; empty
    /// when ranks are not known.
    #[must_use]
    pub fn ranks(&self, endpoint: EndpointId) -> SmallVec<[u32; 8]> {
        let Some(resident) = self.residents.get(&endpoint) else { return SmallVec::new() };
        let says = !self.own_keys && resident.is_certain();
        resident.caches.iter().map(|cache| if says { self.matches.depth(cache.holder).any } else { 0 }).collect()
    }

    /// Returns an upper bound of the prompt's first blocks that requests in flight use at `endpoint`. Claims exist at
    /// powers of two, so a common prefix is less than twice as long as the claim that it matches.
    #[must_use]
    pub fn in_use(&self, endpoint: EndpointId) -> u32 {
        self.claimed.get(endpoint).saturating_mul(2)
    }

    /// Whether what `endpoint` holds comes from its engine's events alone.
    #[must_use]
    pub fn is_exact(&self, endpoint: EndpointId) -> bool {
        !self.own_keys && self.residents.get(&endpoint).is_some_and(Resident::is_exact)
    }

    /// Returns the cache update for the case that this prompt goes to `endpoint`. `whole` means that
    /// `keys` holds all its keys.
    #[must_use]
    pub fn prefix_update(&self, endpoint: EndpointId, keys: Vec<BlockKey>, whole: bool) -> PrefixUpdate {
        let held = self.held(endpoint).any;
        // Blocks that the engine reports must not become estimated blocks.
        let learned = self.guessed(endpoint).any;
        let blocks = if whole { u32::try_from(keys.len()).unwrap_or(u32::MAX) } else { 0 };
        PrefixUpdate {
            keys: Arc::new(keys),
            whole,
            held: learned.min(held).min(blocks),
            // Prompts in flight have reserved capacity for their blocks already.
            fresh: blocks.saturating_sub(held.max(self.claimed.get(endpoint))),
            anywhere: self.matches.deepest().max(self.claimed.deepest()),
            foretold: self.tokens(held),
            own_keys: self.own_keys,
            tells_cached: true,
            ..PrefixUpdate::default()
        }
    }

    /// Notes that the prompt has `tokens` of the engine, and `rest` bytes of text that were not tokenized.
    pub fn count(&mut self, tokens: u64, rest: u64) {
        self.counted = Some((tokens, rest));
    }

    /// Returns the length of the prompt, tokens, if it was tokenized by the engine's tokenizer.
    #[must_use]
    pub fn counted(&self) -> Option<u32> {
        let (tokens, rest) = self.counted?;
        let total = tokens.saturating_add((rest as f64 / self.bytes_per_token).ceil() as u64);
        Some(u32::try_from(total).unwrap_or(u32::MAX))
    }

    /// Returns the length of `prompt` in the tokens of [`Found::tokens`], at least as many as any endpoint holds of it.
    /// Otherwise an estimate that is too low would hide differences between endpoints that hold much.
    #[must_use]
    pub fn prompt_tokens(&self, prompt: &Prompt<'_>) -> u32 {
        if let Some(tokens) = self.counted() {
            return tokens;
        }
        let text = prompt.text_bytes as f64 / self.bytes_per_token;
        let total = text.ceil() as u64 + prompt.token_ids + prompt.media_tokens;
        let known = self.tokens(self.matches.deepest().max(self.claimed.deepest()));
        u32::try_from(total).unwrap_or(u32::MAX).max(known)
    }

    /// Converts blocks to tokens.
    #[must_use]
    pub fn tokens(&self, blocks: u32) -> u32 {
        let tokens = if self.own_keys { self.own_block_tokens } else { self.tokens_per_block };
        (f64::from(blocks) * tokens) as u32
    }
}
