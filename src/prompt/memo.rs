//! Memoised tokenization: the turns of a conversation and shared system prompts are encoded once.
//!
//! A text is cut where its parts encode independently ([`Cuts`]), and the ids of each part are kept by a hash of its bytes. The result is
//! the plain encoder's, id by id, as long as the cuts are true of the encoder; one that has no true cuts keeps whole texts. All encoders
//! share one [`SegmentCache`] and its byte budget. Called by `blocks` like any encoder.

mod cuts;

pub use cuts::{Cuts, DEFAULT_SEGMENT_BYTES, MIN_SEGMENT_BYTES};

use crate::{EncodeError, Encoder};
use attache_protocol::text::{canonical, unescaped};
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{OptionsBuilder, Weighter};
use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_secret};

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

    /// The ids under `key`, of a segment of so many bytes.
    fn known(&self, key: u128, bytes: usize) -> Option<Arc<[u32]>> {
        let ids = self.cache.get(&key)?;
        self.hits.fetch_add(1, Ordering::Relaxed);
        self.hit_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        Some(ids)
    }

    fn missed(&self, bytes: usize) {
        self.misses.fetch_add(1, Ordering::Relaxed);
        self.missed_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
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

/// What a hash begins from, made once: 192 bytes that a seed would be stretched to for every segment.
struct Secrets {
    /// For text.
    plain: [u8; 192],
    /// For text as it stands in JSON.
    escaped: [u8; 192],
}

/// Bytes that nobody who does not know `seed` can foretell.
fn secret(seed: u64) -> [u8; 192] {
    let mut secret = [0; 192];
    for (i, eight) in (0u64..).zip(secret.as_chunks_mut().0) {
        *eight = xxh3_64_with_seed(&i.to_le_bytes(), seed).to_le_bytes();
    }
    secret
}

/// An encoder that remembers.
#[derive(Clone)]
pub struct Memo {
    encoder: Arc<dyn Encoder>,
    cuts: Cuts,
    cache: Arc<SegmentCache>,
    secrets: Arc<Secrets>,
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
        let secrets = Arc::new(Secrets { plain: secret(seed), escaped: secret(!seed) });
        Self { encoder, cuts, cache, secrets, min_bytes: DEFAULT_MIN_MEMO_BYTES, roles: Arc::default() }
    }

    /// Where texts are cut.
    #[must_use]
    pub fn cuts(&self) -> &Cuts {
        &self.cuts
    }

    fn key(&self, segment: &str) -> u128 {
        xxh3_128_with_secret(segment.as_bytes(), &self.secrets.plain)
    }

    fn segment(&self, segment: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        if let Some((_, known)) = ROLES.iter().zip(self.roles.iter()).find(|(role, _)| **role == segment) {
            return self.role(segment, known, out);
        }
        if segment.len() < self.min_bytes {
            *cold = cold.checked_sub(segment.len()).ok_or(EncodeError::Cold)?;
            return self.encoder.encode(segment, out);
        }
        self.kept(segment, cold, out).map(|_| ())
    }

    /// The ids of a segment that is worth remembering, appended to `out` and as they are remembered.
    fn kept(&self, segment: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<Arc<[u32]>, EncodeError> {
        let key = self.key(segment);
        if let Some(ids) = self.cache.known(key, segment.len()) {
            out.extend_from_slice(&ids);
            return Ok(ids);
        }
        *cold = cold.checked_sub(segment.len()).ok_or(EncodeError::Cold)?;
        self.cache.missed(segment.len());
        let before = out.len();
        self.encoder.encode(segment, out)?;
        let ids: Arc<[u32]> = out.get(before..).unwrap_or_default().into();
        self.cache.cache.insert(key, ids.clone());
        Ok(ids)
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

    /// What is remembered is found without unescaping it, under a key of its own: the ids are shared with those of the text, which an answer
    /// or another way of escaping may have brought.
    fn encode_escaped(&self, raw: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        // To unescape so little costs less than an entry of its own.
        if raw.len() < 2 * self.min_bytes {
            return self.segment(&unescaped(raw), cold, out);
        }
        let key = xxh3_128_with_secret(raw.as_bytes(), &self.secrets.escaped);
        if let Some(ids) = self.cache.known(key, raw.len()) {
            out.extend_from_slice(&ids);
            return Ok(());
        }
        let ids = self.kept(&unescaped(raw), cold, out)?;
        self.cache.cache.insert(key, ids);
        Ok(())
    }

    /// Cuts the text where it will be cut in JSON, as nearly all clients write it.
    fn encode_coming(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        let Cow::Owned(raw) = canonical(text) else { return self.encode(text, out) };
        let before = out.len();
        let mut cold = usize::MAX;
        let mut rest = raw.as_str();
        while !rest.is_empty() {
            let (segment, behind) = rest.split_at_checked(self.cuts.first_escaped(rest)).unwrap_or((rest, ""));
            if let Err(error) = self.encode_escaped(segment, &mut cold, out) {
                out.truncate(before);
                return Err(error);
            }
            rest = behind;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
