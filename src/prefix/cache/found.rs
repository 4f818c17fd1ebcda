//! What a look-up has found of one prompt: who holds how much, by what is told, learned and on its way.

use super::Guesses;
use crate::claims::ClaimedDepths;
use crate::index::{Depth, Kept};
use crate::key::BlockKey;
use crate::learning::Lesson;
use crate::residents::{Resident, Table};
use arc_swap::Guard;
use attache_pool::place::Place;
use attache_protocol::Prompt;
use attache_types::ids::EndpointId;
use smallvec::SmallVec;
use std::sync::Arc;

/// What one prompt meets in a pool, for the length of one decision.
#[derive(Debug)]
pub struct Found {
    // Guards: to count who reads a table would have all threads write to one place.
    pub(super) guesses: Guard<Arc<Guesses>>,
    pub(super) residents: Guard<Arc<Table>>,
    pub(super) matches: Kept,
    pub(super) claimed: ClaimedDepths,
    /// Tokens that a decode server keeps, where it stands, and who can fetch them.
    pub(super) carried: Option<(u32, Place, Arc<[EndpointId]>)>,
    pub(super) tokens_per_block: f64,
    pub(super) own_block_tokens: f64,
    pub(super) bytes_per_token: f64,
    /// The keys are not those of engines' events: only what was learned can be compared with them.
    pub(super) own_keys: bool,
}

impl Found {
    /// The same for a prompt whose keys are of our own making when `own` is true: what engines tell says nothing about it.
    #[must_use]
    pub fn of_own_keys(self, own: bool) -> Self {
        Self { own_keys: own, ..self }
    }

    /// Notes that a decode server, which stands at `place`, keeps the prompt's first `tokens` for `by` to fetch.
    pub fn carry(&mut self, tokens: u32, place: Place, by: Arc<[EndpointId]>) {
        self.carried = Some((tokens, place, by));
    }

    /// Tokens of the prompt's beginning that `by` can fetch from a decode server, and where that stands.
    #[must_use]
    pub fn carried(&self, by: EndpointId) -> (u32, Place) {
        let carried = self.carried.as_ref().filter(|(_, _, servers)| servers.contains(&by));
        carried.map(|(tokens, place, _)| (*tokens, *place)).unwrap_or_default()
    }

    /// Whether the prompt's keys are of our own making.
    #[must_use]
    pub fn has_own_keys(&self) -> bool {
        self.own_keys
    }

    /// What `endpoint` holds, in blocks: what its engine tells, or else what was learned, and what is on its way there.
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

    /// As [`Found::depth`], without what is on its way.
    #[inline]
    #[must_use]
    pub fn held(&self, endpoint: EndpointId) -> Depth {
        match self.residents.get(&endpoint) {
            Some(resident) if !self.own_keys => self.told(resident, endpoint),
            _ => self.guessed(endpoint),
        }
    }

    #[inline]
    fn guessed(&self, endpoint: EndpointId) -> Depth {
        self.guesses.get(&endpoint).map(|guess| self.matches.depth(guess.holder)).unwrap_or_default()
    }

    /// As [`Found::held`], of an endpoint whose engine tells.
    fn told(&self, resident: &Resident, endpoint: EndpointId) -> Depth {
        if !resident.is_certain() {
            return self.guessed(endpoint);
        }
        // The server itself chooses the rank; one that balances well chooses the one that holds most.
        let depths = resident.caches.iter().map(|cache| self.matches.depth(cache.holder));
        let told = depths.max_by_key(|depth| depth.any).unwrap_or_default();
        if resident.is_exact() {
            return told;
        }
        [told, self.guessed(endpoint)].into_iter().max_by_key(|d| d.any).unwrap_or_default()
    }

    /// What each data-parallel rank of `endpoint` holds, in blocks; empty when they are not told apart.
    #[must_use]
    pub fn ranks(&self, endpoint: EndpointId) -> SmallVec<[u32; 8]> {
        let Some(resident) = self.residents.get(&endpoint) else { return SmallVec::new() };
        let says = !self.own_keys && resident.is_certain();
        resident.caches.iter().map(|cache| if says { self.matches.depth(cache.holder).any } else { 0 }).collect()
    }

    /// Blocks of the prompt's beginning that other requests use at `endpoint`, or will, at most. Claims are at powers of two, so what two prompts
    /// share goes less than twice as deep as what is seen of it.
    #[must_use]
    pub fn in_use(&self, endpoint: EndpointId) -> u32 {
        self.claimed.get(endpoint).saturating_mul(2)
    }

    /// Whether what `endpoint` holds is its engine's own word alone.
    #[must_use]
    pub fn is_exact(&self, endpoint: EndpointId) -> bool {
        !self.own_keys && self.residents.get(&endpoint).is_some_and(Resident::is_exact)
    }

    /// What a prompt of these `keys` teaches when it goes to `endpoint`; `whole` says that they are all of its keys.
    #[must_use]
    pub fn lesson(&self, endpoint: EndpointId, keys: Vec<BlockKey>, whole: bool) -> Lesson {
        let held = self.held(endpoint).any;
        // What engines tell does not become a guess by being asked for.
        let learned = self.guessed(endpoint).any;
        let blocks = if whole { u32::try_from(keys.len()).unwrap_or(u32::MAX) } else { 0 };
        Lesson {
            keys,
            whole,
            held: learned.min(held).min(blocks),
            // What others are bringing there has its room already.
            fresh: blocks.saturating_sub(held.max(self.claimed.get(endpoint))),
            foretold: self.tokens(held),
            own_keys: self.own_keys,
            tells_cached: true,
            ..Lesson::default()
        }
    }

    /// The length of `prompt` in the tokens that [`Found::tokens`] gives; never less than what somebody holds of it, so that an estimate
    /// that is too low does not make one who holds more look like one who holds less.
    #[must_use]
    pub fn prompt_tokens(&self, prompt: &Prompt<'_>) -> u32 {
        let text = prompt.text_bytes as f64 / self.bytes_per_token;
        let total = text.ceil() as u64 + prompt.token_ids + prompt.media_tokens;
        let known = self.tokens(self.matches.deepest().max(self.claimed.deepest()));
        u32::try_from(total).unwrap_or(u32::MAX).max(known)
    }

    /// Blocks in tokens.
    #[must_use]
    pub fn tokens(&self, blocks: u32) -> u32 {
        let tokens = if self.own_keys { self.own_block_tokens } else { self.tokens_per_block };
        (f64::from(blocks) * tokens) as u32
    }
}
