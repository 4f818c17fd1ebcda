//! The share of computed blocks that a server had computed before and that none holds any more.
//!
//! It says what an eviction costs. Where prompts do not return, it is 0. Where conversations return and the caches of
//! all servers together are too small for them, most of the computed blocks may be such blocks.
//!
//! One block in 64 is remembered, chosen by a hash of the prompt up to it. A prompt that returns has the same ones.
//! Memory is bounded by [`MOST`]; the oldest half is forgotten at once.
//!
//! The keys of a prompt are known where the server's blocks are estimated. Elsewhere KV events say which blocks a server
//! has stored. These blocks are known by their own content, since servers name the same prompt differently. The blocks of
//! responses are among them.

use super::claims::step;
use super::index::StoredBlock;
use super::key::BlockKey;
use ahash::AHashSet;
use attache_types::clock::Timestamp;
use parking_lot::Mutex;

/// A remembered block has these bits 0.
const SAMPLED: u64 = (64 - 1) << 40;
/// 32,768 remembered blocks in each half: with blocks of 16 tokens, 67 million tokens in both.
const MOST: usize = 1 << 15;
/// Half-life of the sums, 60 s: as that of the load, [`attache_pool::speed`].
const HALF_LIFE: f64 = 60.0;
/// 8 remembered blocks, about 8,000 tokens, count as computed for the first time, so that a few do not decide.
const PRIOR: f64 = 8.0;

/// Sums over recent prompts.
#[derive(Debug, Default)]
pub struct Recomputed {
    sums: Mutex<Sums>,
}

#[derive(Debug, Default)]
struct Sums {
    recent: AHashSet<u64>,
    older: AHashSet<u64>,
    computed: f64,
    again: f64,
    at: Timestamp,
}

impl Recomputed {
    /// Records a prompt that a server with its first `held` blocks has computed. At its decision, some server held
    /// `anywhere` blocks of it.
    pub(super) fn computed(&self, keys: &[BlockKey], held: u32, anywhere: u32, now: Timestamp) {
        let mut sums = self.sums.lock();
        sums.decay(now);
        let mut path = 0;
        for (depth, key) in (1usize..).zip(keys) {
            path = step(path, depth, *key);
            if path & SAMPLED != 0 {
                continue;
            }
            let is_new = sums.remember(path);
            if depth > held as usize {
                sums.computed += 1.0;
                sums.again += f64::from(u8::from(!is_new && depth > anywhere as usize));
            }
        }
    }

    /// Records blocks that a server reports as stored. No server had the `first` last ones of them.
    pub fn stored(&self, blocks: &[StoredBlock], first: u32, now: Timestamp) {
        let held = blocks.len().saturating_sub(first as usize);
        let sampled = |(at, block): (usize, &StoredBlock)| {
            let path = step(0, 1, block.key);
            (path & SAMPLED == 0).then_some((at, path))
        };
        let mut sampled = blocks.iter().enumerate().filter_map(sampled).peekable();
        if sampled.peek().is_none() {
            return;
        }
        let mut sums = self.sums.lock();
        sums.decay(now);
        for (at, path) in sampled {
            let is_new = sums.remember(path);
            sums.computed += 1.0;
            sums.again += f64::from(u8::from(!is_new && at >= held));
        }
    }

    /// The share, 0..1.
    pub(super) fn share(&self) -> f64 {
        let sums = self.sums.lock();
        sums.again / (sums.computed + PRIOR)
    }
}

impl Sums {
    fn decay(&mut self, now: Timestamp) {
        let kept = (-now.since(self.at).as_secs_f64() / HALF_LIFE).exp2();
        self.computed *= kept;
        self.again *= kept;
        self.at = self.at.max(now);
    }

    /// Returns whether the block was not remembered yet.
    fn remember(&mut self, path: u64) -> bool {
        if self.recent.contains(&path) {
            return false;
        }
        if self.recent.len() >= MOST {
            self.older = std::mem::take(&mut self.recent);
        }
        self.recent.insert(path);
        !self.older.contains(&path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::key::EngineHash;
    use xxhash_rust::xxh3::xxh3_64_with_seed;

    fn prompt(number: u64) -> Vec<BlockKey> {
        (0..6_400u64).map(|i| BlockKey(xxh3_64_with_seed(&i.to_le_bytes(), number))).collect()
    }

    fn second(n: u64) -> Timestamp {
        Timestamp(n * 1_000_000_000)
    }

    #[test]
    fn blocks_that_come_back_after_all_servers_evicted_them_count() {
        let recomputed = Recomputed::default();
        (0..10).for_each(|n| recomputed.computed(&prompt(n), 0, 0, second(n)));
        assert!(recomputed.share() == 0.0, "all are new");
        (0..10).for_each(|n| recomputed.computed(&prompt(n), 6_400, 6_400, second(10 + n)));
        assert!(recomputed.share() == 0.0, "none is computed");
        (0..10).for_each(|n| recomputed.computed(&prompt(n), 0, 6_400, second(20 + n)));
        assert!(recomputed.share() == 0.0, "another server holds them");
        (0..30).for_each(|n| recomputed.computed(&prompt(n % 10), 0, 0, second(30 + n)));
        assert!((0.5..0.8).contains(&recomputed.share()), "{}", recomputed.share());
        (0..300).for_each(|n| recomputed.computed(&prompt(100 + n), 0, 0, second(60 + n)));
        assert!(recomputed.share() < 0.05, "{}", recomputed.share());
        assert!(recomputed.sums.lock().recent.len() <= MOST);
    }

    #[test]
    fn blocks_that_no_server_has_when_one_stores_them_again_count() {
        let blocks = |number: u64| -> Vec<StoredBlock> {
            let stored = |(i, key): (u64, BlockKey)| StoredBlock { hash: EngineHash(number << 32 | i), key };
            (0..).zip(prompt(number)).map(stored).collect()
        };
        let recomputed = Recomputed::default();
        let store = |round: u64, first: u32| {
            (0..10).for_each(|n| recomputed.stored(&blocks(n), first, second(10 * round + n)));
        };
        store(0, 6_400);
        assert!(recomputed.share() == 0.0, "all are new");
        store(1, 0);
        assert!(recomputed.share() == 0.0, "another server has them");
        (2..5).for_each(|round| store(round, 6_400));
        assert!((0.4..0.8).contains(&recomputed.share()), "{}", recomputed.share());
        let half = Recomputed::default();
        (0..40).for_each(|n| half.stored(&blocks(n % 10), 3_200, second(n)));
        assert!((0.2..0.5).contains(&half.share()), "the first half was there: {}", half.share());
    }

    #[test]
    fn a_few_short_prompts_prove_nothing() {
        let recomputed = Recomputed::default();
        (0..200).for_each(|n| recomputed.computed(&prompt(n % 2)[..4], 0, 0, second(n)));
        assert!(recomputed.share() < 0.7, "{}", recomputed.share());
        let shared = Recomputed::default();
        (0..2_000).for_each(|n| shared.computed(&prompt(n)[..100], 0, 0, second(n / 10)));
        assert!(shared.share() == 0.0);
    }
}
