//! Memoised tokenization: the turns of a conversation and shared system prompts are encoded once.
//!
//! A text is cut where its parts encode independently ([`Cuts`]), and the ids of each part are kept by a hash of its bytes. The result is
//! the plain encoder's, id by id, as long as the cuts are true of the encoder; one that has no true cuts keeps whole texts. All encoders
//! share one [`SegmentCache`] and its byte budget. Called by `blocks` like any encoder.

mod cuts;

pub use cuts::{Cuts, DEFAULT_SEGMENT_BYTES, MIN_SEGMENT_BYTES};

use crate::prompt::{EncodeError, Encoder};
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{OptionsBuilder, Weighter};
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

/// 64 MiB: some 50 MB of text, ten thousand conversations of 5 KB.
pub const DEFAULT_MEMO_BYTES: u64 = 64 << 20;
/// Below 128 bytes (2 µs of encoding) to look and to keep would be a tenth of the work and more.
pub const DEFAULT_MIN_MEMO_BYTES: usize = 128;

/// Too short to be looked up, and in front of every message: their ids are kept beside.
const ROLES: [&str; 6] = ["system", "user", "assistant", "tool", "developer", "function"];

/// What an entry takes beside its ids: key, counts, slot in the table and its share of the ghosts.
const ENTRY_BYTES: u64 = 96;
/// Shards: enough that cores seldom meet, few enough that a long text's ids fit into one shard's share.
const SHARDS: usize = 16;

/// What the memory has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoStats {
    /// Segments whose ids were there.
    pub hits: u64,
    /// Segments that had to be encoded.
    pub misses: u64,
    /// Bytes of text in the hits.
    pub hit_bytes: u64,
    /// Bytes of text in the misses; segments too short to be kept are in neither.
    pub missed_bytes: u64,
    /// Bytes that the memory holds now, as far as it counts them.
    pub held_bytes: u64,
    /// Entries that the memory holds now.
    pub entries: u64,
}

#[derive(Clone, Debug)]
struct Weight;

impl Weighter<u128, Arc<[u32]>> for Weight {
    fn weight(&self, _key: &u128, ids: &Arc<[u32]>) -> u64 {
        size_of_val::<[u32]>(ids) as u64 + ENTRY_BYTES
    }
}

/// The ids of segments, within a byte budget; what is used again stays, what was seen once goes first.
pub struct SegmentCache {
    cache: Cache<u128, Arc<[u32]>, Weight, ahash::RandomState>,
    seed: u64,
    hits: AtomicU64,
    misses: AtomicU64,
    hit_bytes: AtomicU64,
    missed_bytes: AtomicU64,
}

impl fmt::Debug for SegmentCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SegmentCache").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

impl SegmentCache {
    /// Holds at most `budget` bytes. `seed` must be a secret of this process: a client who knew it could make two texts that share a key.
    #[must_use]
    pub fn new(budget: u64, seed: u64) -> Self {
        // A typical segment is some 2 KiB of text, as much in ids.
        let entries = usize::try_from(budget / 2_048).unwrap_or(usize::MAX).clamp(64, 1 << 20);
        let hasher = ahash::RandomState::with_seeds(seed, !seed, seed.rotate_left(17), seed.rotate_left(43));
        let options =
            OptionsBuilder::new().estimated_items_capacity(entries).weight_capacity(budget).shards(SHARDS).build();
        let cache = match options {
            Ok(options) => Cache::with_options(options, Weight, hasher, DefaultLifecycle::default()),
            // Only a missing capacity is refused, and both are given.
            Err(_) => Cache::with(entries, budget, Weight, hasher, DefaultLifecycle::default()),
        };
        Self {
            cache,
            seed,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            hit_bytes: AtomicU64::new(0),
            missed_bytes: AtomicU64::new(0),
        }
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> MemoStats {
        MemoStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            hit_bytes: self.hit_bytes.load(Ordering::Relaxed),
            missed_bytes: self.missed_bytes.load(Ordering::Relaxed),
            held_bytes: self.cache.weight(),
            entries: self.cache.len() as u64,
        }
    }
}

/// An encoder that remembers.
#[derive(Clone)]
pub struct Memo {
    encoder: Arc<dyn Encoder>,
    cuts: Cuts,
    cache: Arc<SegmentCache>,
    seed: u64,
    min_bytes: usize,
    roles: Arc<[OnceLock<Box<[u32]>>; ROLES.len()]>,
}

impl fmt::Debug for Memo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Memo").field("encoder", &self.encoder).finish_non_exhaustive()
    }
}

impl Memo {
    /// Remembers what `encoder` makes of the segments between `cuts`. Encoders that may differ in any id must have different
    /// identities: a name for what is compiled in, a hash of its files for what is loaded.
    #[must_use]
    pub fn new(encoder: Arc<dyn Encoder>, identity: &[u8], cuts: Cuts, cache: Arc<SegmentCache>) -> Self {
        let seed = xxh3_64_with_seed(identity, cache.seed);
        Self { encoder, cuts, cache, seed, min_bytes: DEFAULT_MIN_MEMO_BYTES, roles: Arc::default() }
    }

    /// Where texts are cut.
    #[must_use]
    pub fn cuts(&self) -> &Cuts {
        &self.cuts
    }

    fn key(&self, segment: &str) -> u128 {
        xxh3_128_with_seed(segment.as_bytes(), self.seed)
    }

    fn segment(&self, segment: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        if let Some((_, known)) = ROLES.iter().zip(self.roles.iter()).find(|(role, _)| **role == segment) {
            return self.role(segment, known, out);
        }
        let worth_it = segment.len() >= self.min_bytes;
        let key = if worth_it { self.key(segment) } else { 0 };
        let bytes = segment.len() as u64;
        if worth_it && let Some(ids) = self.cache.cache.get(&key) {
            self.cache.hits.fetch_add(1, Ordering::Relaxed);
            self.cache.hit_bytes.fetch_add(bytes, Ordering::Relaxed);
            out.extend_from_slice(&ids);
            return Ok(());
        }
        *cold = cold.checked_sub(segment.len()).ok_or(EncodeError::Cold)?;
        if !worth_it {
            return self.encoder.encode(segment, out);
        }
        self.cache.misses.fetch_add(1, Ordering::Relaxed);
        self.cache.missed_bytes.fetch_add(bytes, Ordering::Relaxed);
        let before = out.len();
        self.encoder.encode(segment, out)?;
        if let Some(ids) = out.get(before..) {
            self.cache.cache.insert(key, Arc::from(ids));
        }
        Ok(())
    }

    fn role(&self, role: &str, known: &OnceLock<Box<[u32]>>, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        if let Some(ids) = known.get() {
            out.extend_from_slice(ids);
            return Ok(());
        }
        let before = out.len();
        self.encoder.encode(role, out)?;
        // Somebody else may have been faster, with the same ids.
        let _ = known.set(out.get(before..).unwrap_or_default().into());
        Ok(())
    }
}

impl Encoder for Memo {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        let before = out.len();
        let mut cold = usize::MAX;
        let mut rest = text;
        while !rest.is_empty() {
            let (segment, behind) = rest.split_at_checked(self.cuts.first(rest)).unwrap_or((rest, ""));
            if let Err(error) = self.segment(segment, &mut cold, out) {
                out.truncate(before);
                return Err(error);
            }
            rest = behind;
        }
        Ok(())
    }

    fn encode_segment(&self, segment: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        self.segment(segment, cold, out)
    }
}

#[cfg(test)]
mod tests;
