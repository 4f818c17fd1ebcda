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
pub const DEFAULT_MAX_CARRIED: usize = 16_384;
/// Default limit of memory, 64 MiB. The parameters of a conversation of 10,000 tokens take about 4 KiB.
pub const DEFAULT_MAX_CARRIED_BYTES: usize = 64 << 20;

/// Fewest tokens worth an entry, 64: vLLM recomputes fewer instead of fetching them.
pub const LEAST_CARRIED: usize = 64;
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SECOND: u64 = 1_000_000_000;
    const A: EndpointId = EndpointId(1);
    const B: EndpointId = EndpointId(2);

    fn at(seconds: u64) -> Timestamp {
        Timestamp(seconds * SECOND)
    }

    fn carried() -> Carried {
        Carried::new(DEFAULT_MAX_CARRIED, DEFAULT_MAX_CARRIED_BYTES, 7)
    }

    fn ids(count: u32) -> Vec<u32> {
        (0..count).map(|i| i.wrapping_mul(2_654_435_761) % 50_000).collect()
    }

    fn keep(carried: &Carried, endpoint: EndpointId, root: u64, tokens: &[u32], until: u64, words: &str) {
        let turn = KeptTurn { endpoint, root, tokens, until: at(until) };
        carried.keep(&turn, Bytes::from(words.to_owned()), at(0));
    }

    fn found(carried: &Carried, root: u64, tokens: &[u32]) -> Option<(EndpointId, u32)> {
        carried.find(root, tokens, at(1), |_| true).map(|carry| (carry.endpoint, carry.tokens))
    }

    #[test]
    fn prompt_that_begins_with_all_tokens_finds_them() {
        for length in [64, 79, 80, 81, 96, 205] {
            let carried = carried();
            let all = ids(300);
            keep(&carried, A, 9, &all[..length], 100, "{}");
            let tokens = u32::try_from(length).unwrap();
            assert_eq!(found(&carried, 9, &all), Some((A, tokens)));
            assert_eq!(found(&carried, 9, &all[..=length]), Some((A, tokens)), "one more token is enough");
            assert_eq!(found(&carried, 9, &all[..length]), None, "nothing would be left to compute");
            assert_eq!(found(&carried, 9, &all[..length - 1]), None, "a shortened history");
            assert_eq!(found(&carried, 8, &all), None, "another salt or adapter");
            for edited in [0, length / 2, length - 1] {
                let mut prompt = all.clone();
                prompt[edited] += 1;
                assert_eq!(found(&carried, 9, &prompt), None, "token {edited} of {length} differs");
            }
        }
    }

    #[test]
    fn longest_entry_is_found_and_each_is_given_once() {
        let carried = carried();
        let all = ids(300);
        keep(&carried, A, 9, &all[..140], 100, "first");
        keep(&carried, B, 9, &all[..142], 100, "second");
        keep(&carried, A, 9, &all[..142], 100, "again");
        let take = |tokens: u32, words: &str| {
            let carry = carried.find(9, &all, at(1), |_| true).unwrap();
            assert_eq!(carry.tokens, tokens);
            assert_eq!(carried.take(&carry, at(1)).as_deref(), Some(words.as_bytes()));
            assert_eq!(carried.take(&carry, at(1)), None, "given once");
        };
        take(142, "again");
        take(142, "second");
        take(140, "first");
        assert_eq!((carried.len(), carried.bytes(), found(&carried, 9, &all)), (0, 0, None));
        assert!(carried.table.lock().by_chain.is_empty(), "the index by hash is empty");
    }

    #[test]
    fn expired_entry_is_neither_found_nor_given() {
        let carried = carried();
        let all = ids(100);
        keep(&carried, A, 9, &all[..70], 10, "{}");
        let carry = carried.find(9, &all, at(9), |_| true).unwrap();
        assert_eq!(carried.find(9, &all, at(10), |_| true), None);
        assert_eq!(carried.take(&carry, at(10)), None);
        keep(&carried, A, 9, &all[..70], 0, "{}");
        assert!(carried.is_empty(), "an entry that has expired on arrival is not kept");
        keep(&carried, A, 9, &all[..LEAST_CARRIED - 1], 100, "{}");
        assert!(carried.is_empty(), "an entry with too few tokens is not kept");
    }

    #[test]
    fn entries_of_servers_that_left_or_do_not_serve_are_not_found() {
        let carried = carried();
        let all = ids(100);
        keep(&carried, A, 9, &all[..80], 100, "a");
        keep(&carried, B, 9, &all[..70], 100, "b");
        let serving = carried.find(9, &all, at(1), |endpoint| endpoint != A);
        assert_eq!(serving.map(|carry| carry.tokens), Some(70));
        carried.forget(|endpoint| endpoint == A);
        assert_eq!((carried.len(), found(&carried, 9, &all)), (1, Some((B, 70))));
    }

    #[test]
    fn oldest_entries_go_when_a_limit_is_exceeded() {
        let all = ids(100);
        let few = Carried::new(2, 1 << 20, 7);
        (70..74u32).for_each(|length| keep(&few, A, 9, &all[..length as usize], 100, "{}"));
        assert_eq!((few.len(), found(&few, 9, &all[..73])), (2, Some((A, 72))));

        let small = Carried::new(100, 3 * (ENTRY_BYTES + 1_000), 7);
        let words = "x".repeat(1_000);
        (70..74u32).for_each(|length| keep(&small, A, 9, &all[..length as usize], 100, &words));
        assert_eq!((small.len(), found(&small, 9, &all[..71])), (3, None));
        keep(&small, A, 9, &all, 100, &"x".repeat(4_000));
        assert_eq!(small.len(), 3, "an entry over the limit evicts no others");
    }

    #[test]
    fn repeated_conversation_keeps_a_few_entries() {
        let carried = carried();
        let all = ids(100);
        (0..1_000).for_each(|_| keep(&carried, A, 9, &all[..90], 100, "{}"));
        assert_eq!((carried.len(), found(&carried, 9, &all)), (MOST_ALIKE, Some((A, 90))));
        assert_eq!(carried.bytes(), MOST_ALIKE * (ENTRY_BYTES + 2));
    }

    #[test]
    fn expired_entries_are_evicted_first() {
        let carried = carried();
        let all = ids(100);
        (1..=50u64).for_each(|number| keep(&carried, A, number, &all, number, "{}"));
        let turn = KeptTurn { endpoint: A, root: 99, tokens: &all, until: at(100) };
        carried.keep(&turn, Bytes::from_static(b"{}"), at(40));
        assert_eq!(carried.len(), 11);
    }

    proptest! {
        /// Compares with a plain list of turns: the longest matching prefix is found, and all limits hold.
        #[test]
        fn result_equals_a_search_of_all_entries(
            turns in proptest::collection::vec((0u64..2, proptest::collection::vec(0u32..2, 1..40)), 1..30),
            (root, prompt) in (0u64..2, proptest::collection::vec(0u32..2, 1..60)),
            from in 0usize..30,
        ) {
            let carried = Carried::new(20, 1 << 20, 3);
            // All turns share a prefix that is long enough to be kept.
            let whole = |tokens: &[u32]| [&[7; LEAST_CARRIED][..], tokens].concat();
            let turns: Vec<_> = turns.iter().map(|(root, tokens)| (*root, whole(tokens))).collect();
            turns.iter().for_each(|(root, tokens)| keep(&carried, A, *root, tokens, 100, "{}"));
            // Half of the prompts continue one of the turns.
            let prompt = match turns.get(from) {
                Some((_, tokens)) => tokens.iter().chain(&prompt).copied().collect(),
                None => whole(&prompt),
            };
            let links = |tokens: &[u32]| tokens[..tokens.len() / LINK * LINK].to_vec();
            let mut kept: Vec<&(u64, Vec<u32>)> = Vec::new();
            for turn in &turns {
                kept.push(turn);
                let alike = |other: &(u64, Vec<u32>)| other.0 == turn.0 && links(&other.1) == links(&turn.1);
                if kept.iter().filter(|other| alike(other)).count() > MOST_ALIKE {
                    let oldest = kept.iter().position(|other| alike(other)).unwrap();
                    kept.remove(oldest);
                }
                if kept.len() > 20 {
                    kept.remove(0);
                }
            }
            let best = kept
                .into_iter()
                .filter(|(other, tokens)| *other == root && prompt.starts_with(tokens) && prompt.len() > tokens.len())
                .map(|(_, tokens)| tokens.len() as u32)
                .max();
            prop_assert_eq!(found(&carried, root, &prompt).map(|(_, tokens)| tokens), best);
            prop_assert!(carried.len() <= 20);
            prop_assert_eq!(carried.bytes(), carried.len() * (ENTRY_BYTES + 2));
            while let Some(carry) = carried.find(root, &prompt, at(1), |_| true) {
                prop_assert!(carried.take(&carry, at(1)).is_some());
            }
        }
    }
}
