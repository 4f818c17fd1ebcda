//! Cached tokenization: turns of a conversation and shared system prompts are encoded once.
//!
//! A text is cut where its parts encode independently ([`Cuts`]), and the ids of each part are cached by a hash of its
//! bytes. The ids equal those of the plain encoder if the cuts are valid for it; an encoder without valid cuts caches
//! whole texts. All encoders share one [`SegmentCache`] and its memory limit. Called by `blocks` like any encoder.

mod cuts;

pub use cuts::Cuts;
#[cfg(test)]
pub(crate) use cuts::{DEFAULT_SEGMENT_BYTES, MIN_SEGMENT_BYTES};

use crate::{EncodeError, Encoder};
use attache_protocol::text::{canonical, unescaped};
use quick_cache::sync::{Cache, DefaultLifecycle};
use quick_cache::{OptionsBuilder, Weighter};
use std::borrow::Cow;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_secret};

/// Default memory of the cache, 64 MiB: some 50 MB of text, or ten thousand conversations of 5 KB.
pub const DEFAULT_MEMO_BYTES: u64 = 64 << 20;
/// Shortest cached segment in bytes. Encoding fewer takes at most 2 µs, of which lookup and insertion would
/// be a tenth and more.
pub(crate) const DEFAULT_MIN_MEMO_BYTES: usize = 128;

/// Role names precede every message and are too short for the cache: their ids are stored separately.
const ROLES: [&str; 6] = ["system", "user", "assistant", "tool", "developer", "function"];

/// Memory of an entry besides its ids: key, counters, slot in the table and its share of the ghost entries.
const ENTRY_BYTES: u64 = 96;
/// Number of shards: enough that cores rarely collide, few enough that a long text's ids fit in one shard.
const SHARDS: usize = 16;

/// Counters of the cache since its creation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoStats {
    /// Number of segments found in the cache.
    pub hits: u64,
    /// Number of segments that had to be encoded.
    pub misses: u64,
    /// Bytes of text in the hits.
    pub hit_bytes: u64,
    /// Bytes of text in the misses; segments too short for the cache are in neither.
    pub missed_bytes: u64,
    /// Current memory of the cache in bytes, as far as it is counted.
    pub held_bytes: u64,
    /// Current number of entries.
    pub entries: u64,
}

#[derive(Clone, Debug)]
struct Weight;

impl Weighter<u128, Arc<[u32]>> for Weight {
    fn weight(&self, _key: &u128, ids: &Arc<[u32]>) -> u64 {
        size_of_val::<[u32]>(ids) as u64 + ENTRY_BYTES
    }
}

/// Cache of segments' ids within a memory limit. Entries that were used once are evicted first.
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
    /// Creates a cache of at most `budget` bytes. `seed` must be a secret of this process: a client that knows it could
    /// construct two texts with the same key.
    #[must_use]
    pub fn new(budget: u64, seed: u64) -> Self {
        // A typical segment has some 2 KiB of text, and as much in ids.
        let entries = usize::try_from(budget / 2_048).unwrap_or(usize::MAX).clamp(64, 1 << 20);
        let hasher = ahash::RandomState::with_seeds(seed, !seed, seed.rotate_left(17), seed.rotate_left(43));
        let options =
            OptionsBuilder::new().estimated_items_capacity(entries).weight_capacity(budget).shards(SHARDS).build();
        let cache = match options {
            Ok(options) => Cache::with_options(options, Weight, hasher, DefaultLifecycle::default()),
            // The library only rejects a missing capacity, and both are set.
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

    /// Returns the ids under `key`, for a segment of `bytes` bytes.
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

    /// Returns the counters since the cache was created.
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

/// Keys of the hash function, computed once: xxh3 would otherwise derive 192 bytes from the seed for every segment.
struct Secrets {
    /// For plain text.
    plain: [u8; 192],
    /// For text with JSON escapes.
    escaped: [u8; 192],
}

/// Derives 192 bytes that are unpredictable without knowing `seed`.
fn secret(seed: u64) -> [u8; 192] {
    let mut secret = [0; 192];
    for (i, eight) in (0u64..).zip(secret.as_chunks_mut().0) {
        *eight = xxh3_64_with_seed(&i.to_le_bytes(), seed).to_le_bytes();
    }
    secret
}

/// An encoder with a cache.
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
    /// Caches what `encoder` makes of the segments between `cuts`. Encoders that may differ in any id must have
    /// different identities: a name for a built-in one, a hash of its files for a loaded one.
    #[must_use]
    pub fn new(encoder: Arc<dyn Encoder>, identity: &[u8], cuts: Cuts, cache: Arc<SegmentCache>) -> Self {
        let seed = xxh3_64_with_seed(identity, cache.seed);
        let secrets = Arc::new(Secrets { plain: secret(seed), escaped: secret(!seed) });
        Self { encoder, cuts, cache, secrets, min_bytes: DEFAULT_MIN_MEMO_BYTES, roles: Arc::default() }
    }

    /// Returns where texts are cut.
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

    /// Appends the ids of a segment that is long enough for the cache to `out`, and returns them as cached.
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
        // Another thread may have stored the same ids first.
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

    /// A cached text is found without unescaping it, under a key of its own. The ids are shared with those of the plain
    /// text, which a response or another escaping may have stored.
    fn encode_escaped(&self, raw: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        // Unescaping so little costs less than an entry of its own.
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
