//! KV blocks of conversations that decode workers keep for the prefill of the next turn (vLLM's
//! `bidirectional_kv_xfer`): which server has which tokens, and the parameters with which another server fetches them.
//!
//! The fetching server puts such blocks under its own prompt by position and compares no tokens. An entry is therefore
//! given only to a prompt that begins with exactly the computed tokens under the same [`Root`](super::Root). A chain of
//! hashes finds the entry, the token ids after the last complete link are compared, and a SHA-256 digest of all tokens
//! confirms it. Requests do not name their conversation, and blocks of another `cache_salt` or adapter are never found.
//!
//! An entry is given once, because the server frees its blocks when they were read. It is removed when it expires, when
//! its server leaves or restarts, and, oldest first, when there are too many.
//!
//! Each [`PrefixCache`](super::cache::PrefixCache) owns one table; `ext_proc` fills and queries it.
//! No I/O: times are arguments.

use ahash::AHashMap;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use bytes::Bytes;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use smallvec::SmallVec;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Default limit of entries: 16,384 conversations, or 34 unused responses a second that are kept for 480 s each.
pub(crate) const DEFAULT_MAX_CARRIED: usize = 16_384;
/// Default limit of memory, 64 MiB. The parameters of a conversation of 10,000 tokens take about 4 KiB.
pub(crate) const DEFAULT_MAX_CARRIED_BYTES: usize = 64 << 20;

/// Fewest tokens worth an entry, 64: vLLM recomputes fewer instead of fetching them.
pub(crate) const LEAST_CARRIED: usize = 64;
/// Most entries with the same complete links. More of them are one repeated conversation, of which the latest suffice.
const MOST_ALIKE: usize = 8;
/// Tokens in a link of the hash chain; an entry stores up to 15 remaining ids as they are.
const LINK: usize = 16;
/// Memory of an entry besides its parameters, in bytes.
const ENTRY_BYTES: usize = 256;

/// Tokens of a conversation that a decode worker keeps.
#[derive(Clone, Copy, Debug)]
pub struct KeptTurn<'a> {
    /// The decode worker that keeps the tokens.
    pub endpoint: EndpointId,
    /// Hash of what separates caches: adapter, salt and tenant ([`KeySpace::root`](super::KeySpace::root)).
    pub root: u64,
    /// All tokens of the conversation, from the first one on.
    pub tokens: &'a [u32],
    /// Expiry: the entry is not used from this moment on.
    pub until: Timestamp,
}

/// An entry that matches a prompt. Another request may take it first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carry {
    /// The decode worker that keeps the tokens.
    pub endpoint: EndpointId,
    /// Number of the prompt's first tokens that the entry holds.
    pub tokens: u32,
    number: u64,
}

/// The entries of one pool.
#[derive(Debug)]
pub struct Carried {
    seed: u64,
    most: usize,
    most_bytes: usize,
    wanted: AtomicBool,
    stats: CarriedStats,
    table: Mutex<CarriedTable>,
}

/// Counters of a pool's entries since the start.
#[derive(Debug, Default)]
pub struct CarriedStats {
    /// Number of responses whose tokens a decode worker kept.
    pub kept: AtomicU64,
    /// Number of entries that were given to a prefill worker.
    pub given: AtomicU64,
    /// Tokens of the entries that were given to a prefill worker.
    pub given_tokens: AtomicU64,
}

#[derive(Debug, Default)]
struct CarriedTable {
    /// Entries by their number, the oldest first.
    entries: BTreeMap<u64, CarriedEntry>,
    /// Numbers of the entries by the hash of their complete links.
    by_chain: AHashMap<u128, SmallVec<[u64; 1]>>,
    bytes: usize,
    next: u64,
}

#[derive(Debug)]
struct CarriedEntry {
    endpoint: EndpointId,
    chain: u128,
    /// The token ids after the last complete link.
    rest: SmallVec<[u32; LINK]>,
    tokens: u32,
    /// SHA-256 of the root and all tokens.
    digest: [u8; 32],
    params: Bytes,
    until: Timestamp,
}

impl Carried {
    /// An empty table of at most `most` entries in `most_bytes` bytes. Equal seeds give equal tables.
    #[must_use]
    pub fn new(most: usize, most_bytes: usize, seed: u64) -> Self {
        let (wanted, stats, table) = (AtomicBool::new(false), CarriedStats::default(), Mutex::default());
        Self { seed, most, most_bytes, wanted, stats, table }
    }

    /// Returns the counters since the start.
    #[must_use]
    pub fn stats(&self) -> &CarriedStats {
        &self.stats
    }

    /// Whether a server of the pool has reported kept tokens. Only then must prompts be known to the last token.
    #[must_use]
    pub fn is_wanted(&self) -> bool {
        self.wanted.load(Relaxed)
    }

    /// Records that a server of the pool has reported kept tokens.
    pub fn want(&self) {
        self.wanted.store(true, Relaxed);
    }

    /// Records that a server keeps the tokens of `turn`, which `params` let another server fetch.
    pub fn keep(&self, turn: &KeptTurn<'_>, params: Bytes, now: Timestamp) {
        let Ok(tokens) = u32::try_from(turn.tokens.len()) else { return };
        let (links, rest) = turn.tokens.as_chunks::<LINK>();
        let chain = links.iter().fold(u128::from(turn.root), |chain, link| self.link(chain, link));
        let rest = SmallVec::from_slice(rest);
        let digest = digest(turn.root, turn.tokens);
        let entry = CarriedEntry { endpoint: turn.endpoint, chain, rest, tokens, digest, params, until: turn.until };
        if turn.tokens.len() < LEAST_CARRIED || turn.until <= now || entry.bytes() > self.most_bytes || self.most == 0 {
            return;
        }
        self.stats.kept.fetch_add(1, Relaxed);
        let mut table = self.table.lock();
        table.put(entry);
        // All entries live equally long, so expired ones are roughly the oldest.
        while table.entries.len() > self.most || table.bytes > self.most_bytes || table.oldest_is_over(now) {
            let Some(oldest) = table.entries.keys().next().copied() else { break };
            table.take(oldest);
        }
    }

    /// Finds the entry that covers most of the prompt: all its tokens must match, its server must satisfy `serves`, and
    /// at least one prompt token must remain, since engines always compute the last one.
    #[must_use]
    pub fn find(
        &self,
        root: u64,
        tokens: &[u32],
        now: Timestamp,
        serves: impl Fn(EndpointId) -> bool,
    ) -> Option<Carry> {
        if self.is_empty() {
            return None;
        }
        let mut chain = u128::from(root);
        let links = tokens.as_chunks::<LINK>().0.iter();
        // Hashed before taking the lock.
        let chains: Vec<u128> = links
            .map(|link| {
                chain = self.link(chain, link);
                chain
            })
            .collect();
        let table = self.table.lock();
        let mut found = None;
        for (depth, chain) in chains.into_iter().enumerate() {
            let behind = tokens.get((depth + 1) * LINK..)?;
            found = table.fitting(chain, behind, now, &serves).or(found);
        }
        let (carry, kept) = found.and_then(|carry| Some((carry, table.entries.get(&carry.number)?.digest)))?;
        drop(table);
        let same = tokens.get(..carry.tokens as usize).is_some_and(|tokens| digest(root, tokens) == kept);
        same.then_some(carry)
    }

    /// Takes an entry out and returns its parameters; `None` when another request took it or it has expired.
    #[must_use]
    pub fn take(&self, carry: &Carry, now: Timestamp) -> Option<Bytes> {
        let entry = self.table.lock().take(carry.number).filter(|entry| entry.until > now)?;
        self.stats.given.fetch_add(1, Relaxed);
        self.stats.given_tokens.fetch_add(u64::from(entry.tokens), Relaxed);
        Some(entry.params)
    }

    /// Removes the entries of the endpoints for which `gone` returns true.
    pub fn forget(&self, gone: impl Fn(EndpointId) -> bool) {
        let mut table = self.table.lock();
        let numbers: Vec<u64> =
            table.entries.iter().filter(|(_, entry)| gone(entry.endpoint)).map(|(number, _)| *number).collect();
        numbers.into_iter().for_each(|number| drop(table.take(number)));
    }

    /// Returns the number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.table.lock().entries.len()
    }

    /// Whether the table has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the memory of the entries, in bytes, as it counts towards the limit.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.table.lock().bytes
    }

    fn link(&self, chain: u128, tokens: &[u32; LINK]) -> u128 {
        let mut block = [0; 16 + 4 * LINK];
        let (before, ids) = block.split_at_mut(16);
        before.copy_from_slice(&chain.to_ne_bytes());
        ids.copy_from_slice(bytemuck::cast_slice(tokens));
        xxh3_128_with_seed(&block, self.seed)
    }
}

impl CarriedTable {
    fn put(&mut self, entry: CarriedEntry) {
        let number = self.next;
        self.next += 1;
        self.bytes += entry.bytes();
        let chain = entry.chain;
        self.entries.insert(number, entry);
        let alike = self.by_chain.entry(chain).or_default();
        alike.push(number);
        if alike.len() > MOST_ALIKE
            && let Some(oldest) = alike.first().copied()
        {
            self.take(oldest);
        }
    }

    fn take(&mut self, number: u64) -> Option<CarriedEntry> {
        let entry = self.entries.remove(&number)?;
        self.bytes -= entry.bytes();
        if let Some(here) = self.by_chain.get_mut(&entry.chain) {
            here.retain(|other| *other != number);
            if here.is_empty() {
                self.by_chain.remove(&entry.chain);
            }
        }
        Some(entry)
    }

    fn oldest_is_over(&self, now: Timestamp) -> bool {
        self.entries.first_key_value().is_some_and(|(_, oldest)| oldest.until <= now)
    }

    /// Returns the longest entry after whose complete links the prompt continues with `behind`; of
    /// equally long ones, the latest.
    fn fitting(
        &self,
        chain: u128,
        behind: &[u32],
        now: Timestamp,
        serves: &impl Fn(EndpointId) -> bool,
    ) -> Option<Carry> {
        let here = self.by_chain.get(&chain)?.iter().filter_map(|number| Some((*number, self.entries.get(number)?)));
        let fits = here.filter(|(_, entry)| {
            let all_there = behind.starts_with(&entry.rest) && behind.len() > entry.rest.len();
            all_there && entry.until > now && serves(entry.endpoint)
        });
        let (number, entry) = fits.max_by_key(|(number, entry)| (entry.tokens, *number))?;
        Some(Carry { endpoint: entry.endpoint, tokens: entry.tokens, number })
    }
}

/// A digest that a client cannot reproduce with other tokens.
fn digest(root: u64, tokens: &[u32]) -> [u8; 32] {
    Sha256::new().chain_update(root.to_ne_bytes()).chain_update(bytemuck::cast_slice(tokens)).finalize().into()
}

impl CarriedEntry {
    fn bytes(&self) -> usize {
        ENTRY_BYTES + self.params.len()
    }
}

#[cfg(test)]
mod tests;
