//! Hash table of child runs: buckets of runs, chained through their headers, by (parent, offset, first key).
//!
//! Linear hashing: each new run adds a bucket by splitting one, so the table never rehashes and a chain has one
//! run on average. Readers follow a chain without a lock. They check that each run on the way was unchanged and
//! belongs to their bucket, so that a reused header cannot mislead them. The result "no child" is valid only if
//! no bucket was split meanwhile.

use super::arena::{Addr, Arena, Space, low, order_for};
use super::run::{FREE, Run, RunPosition, RunShape, pack_place};
use crate::atomics::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};
use crate::key::BlockKey;

/// Buckets in a page.
const PAGE: u32 = 128;
/// Readers treat a longer chain as one that changed while they followed it.
const MAX_CHAIN: usize = 1 << 16;

/// Result of a reader's search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ChildSearch {
    /// A run at this version. Its tags are at `tags` if the version is unchanged.
    Run { run: Addr, version: u64, tags: Addr },
    /// No run with this key is attached there.
    Nothing,
    /// The writer changed the chain meanwhile; the reader must retry.
    Again,
}

/// Hash table of child runs.
#[derive(Debug)]
pub(super) struct Children {
    /// Addresses of the pages of [`Bucket`]s.
    pages: Box<[AtomicU32]>,
    /// Number of buckets; the top bit is set while one is being split.
    buckets: AtomicU64,
    seed: [u64; 2],
    /// The run without blocks from which all others descend.
    root: Addr,
}

const SPLITTING: u64 = 1 << 63;

/// A bucket as one word: its first run, the address of that run's tags, and marks of all runs in its chain. The marks
/// exclude most keys without a child before any header is read.
#[derive(Clone, Copy)]
struct Bucket(u64);

impl Bucket {
    fn new(run: Addr, tags: Addr, marks: u64) -> Self {
        // Headers are at multiples of 8 words, extents at multiples of 2.
        Self(u64::from(run / 8) | u64::from(tags / 2) << 29 | marks << 60)
    }

    /// The mark of a run with this hash, one of four bits.
    #[inline]
    fn mark(hash: u64) -> u64 {
        1 << (hash >> 62)
    }

    /// The first run, or 0.
    #[inline]
    fn run(self) -> Addr {
        low(self.0 & 0x1fff_ffff) * 8
    }

    /// The address of the first run's tags.
    #[inline]
    fn tags(self) -> Addr {
        low(self.0 >> 29 & 0x7fff_ffff) * 2
    }

    #[inline]
    fn marks(self) -> u64 {
        self.0 >> 60
    }
}

/// Hashes two words by a 128-bit multiplication and combines both halves.
#[inline]
pub(super) fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}

/// Derives a secret from a seed so that it depends on all of its bits (the finaliser of SplitMix64).
pub(super) fn spread(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Children {
    /// An empty table, with pages for as many buckets as an arena of `bytes` bytes can need.
    pub(super) fn new(bytes: usize, seed: u64) -> Self {
        let pages = (bytes / (80 * PAGE as usize)).max(1) + 1;
        Self {
            pages: (0..pages).map(|_| AtomicU32::new(0)).collect(),
            buckets: AtomicU64::new(0),
            seed: [spread(seed), spread(!seed) | 1],
            root: 0,
        }
    }

    /// Sets the root, before the first run is inserted.
    pub(super) fn set_root(&mut self, root: Addr) {
        self.root = root;
    }

    /// Returns the part of a run's first key by which it is found behind `parent`: all of it behind the root, which has
    /// the most children, and else the part that tags have too. So a run can begin at any block of an exported run.
    #[inline]
    pub(super) fn part(&self, parent: Addr, key: BlockKey) -> BlockKey {
        if parent == self.root { key } else { BlockKey(u64::from(low(key.0))) }
    }

    /// Bytes that the table takes before any bucket.
    pub(super) fn fixed_bytes(&self) -> usize {
        self.pages.len() * size_of::<AtomicU32>()
    }

    #[inline]
    fn hash(&self, place: u64, key: BlockKey) -> u64 {
        fold(fold(key.0 ^ self.seed[0], 0x9e37_79b9_7f4a_7c15) ^ place, self.seed[1])
    }

    #[inline]
    fn bucket(hash: u64, buckets: u64) -> u32 {
        let mask = buckets.next_power_of_two().wrapping_sub(1);
        let bucket = hash & mask;
        low(if bucket < buckets { bucket } else { bucket & (mask >> 1) })
    }

    #[inline]
    fn slot(&self, bucket: u32) -> Addr {
        self.pages.get((bucket / PAGE) as usize).map_or(0, |p| p.load(Relaxed)) + bucket % PAGE
    }

    /// Finds the child attached at `run` and `offset` with this first key. Any thread may call it at any time.
    #[inline]
    pub(super) fn find(&self, arena: &Arena, run: Addr, offset: u32, key: BlockKey) -> ChildSearch {
        let place = pack_place(run, offset);
        let key = self.part(run, key);
        let buckets = self.buckets.load(Acquire);
        let hash = self.hash(place, key);
        let bucket = Self::bucket(hash, buckets & !SPLITTING);
        let head = Bucket(arena.load(self.slot(bucket)));
        let may_be = head.marks() & Bucket::mark(hash) != 0;
        let (mut at, mut hint) = (if may_be { head.run() } else { 0 }, head.tags());
        let mut passed = 0;
        while at != 0 {
            let run = Run::at(arena, at);
            let version = run.version();
            let (its_place, its_key) = (run.place_word(), run.key());
            if its_place == place && its_key == key {
                let tags = if hint == 0 { run.tags() } else { hint };
                return if version.is_multiple_of(2) {
                    ChildSearch::Run { run: at, version, tags }
                } else {
                    ChildSearch::Again
                };
            }
            let next = run.next();
            fence(Acquire);
            passed += 1;
            let strayed = its_place == FREE || {
                let its_hash = self.hash(its_place, its_key);
                Self::bucket(its_hash, buckets & !SPLITTING) != bucket
            };
            if strayed || !version.is_multiple_of(2) || !run.is_still(version) || passed > MAX_CHAIN {
                return ChildSearch::Again;
            }
            (at, hint) = (next, 0);
        }
        fence(Acquire);
        if buckets & SPLITTING != 0 || self.buckets.load(Relaxed) != buckets {
            ChildSearch::Again
        } else {
            ChildSearch::Nothing
        }
    }

    fn hash_of(&self, run: Run<'_>) -> u64 {
        self.hash(run.place_word(), run.key())
    }

    fn slot_of(&self, run: Run<'_>) -> Addr {
        self.slot(Self::bucket(self.hash_of(run), self.buckets.load(Relaxed)))
    }

    /// Makes a filled header visible to readers. Writer only.
    ///
    /// Returns false, and does nothing, when there is no bucket and no memory for one.
    pub(super) fn insert(&self, arena: &Arena, space: &mut Space, runs: usize, run: Addr) -> bool {
        while (self.buckets.load(Relaxed) as usize) < runs && self.split(arena, space) {}
        if self.buckets.load(Relaxed) == 0 {
            return false;
        }
        let header = Run::at(arena, run);
        let slot = self.slot_of(header);
        let head = Bucket(arena.load(slot));
        header.set_next(head.run());
        Self::set_head(arena, slot, run, head.marks() | Bucket::mark(self.hash_of(header)));
        true
    }

    /// Removes a header from its chain. Writer only.
    pub(super) fn remove(&self, arena: &Arena, run: Addr) {
        let slot = self.slot_of(Run::at(arena, run));
        let mut head = Bucket(arena.load(slot)).run();
        let (mut at, mut before, mut marks) = (head, 0, 0);
        while at != 0 {
            let passed = Run::at(arena, at);
            let next = passed.next();
            if at != run {
                marks |= Bucket::mark(self.hash_of(passed));
                before = at;
            } else if before == 0 {
                head = next;
            } else {
                Run::at(arena, before).set_next(next);
            }
            at = next;
        }
        Self::set_head(arena, slot, head, marks);
    }

    /// Updates the address of a run's tags. Writer only.
    pub(super) fn moved(&self, arena: &Arena, run: Addr) {
        let slot = self.slot_of(Run::at(arena, run));
        let head = Bucket(arena.load(slot));
        if head.run() == run {
            Self::set_head(arena, slot, run, head.marks());
        }
    }

    fn set_head(arena: &Arena, slot: Addr, run: Addr, marks: u64) {
        let tags = if run == 0 { 0 } else { Run::at(arena, run).tags() };
        arena.word(slot).store(Bucket::new(run, tags, marks).0, Release);
    }

    /// Adds a bucket, if there is memory for it.
    fn split(&self, arena: &Arena, space: &mut Space) -> bool {
        let buckets = self.buckets.load(Relaxed);
        let new = low(buckets);
        if new.is_multiple_of(PAGE) {
            let Some(page) = self.pages.get((new / PAGE) as usize) else { return false };
            let Some(addr) = space.alloc(arena, order_for(PAGE)) else { return false };
            for i in 0..PAGE {
                arena.store(addr + i, 0);
            }
            page.store(addr, Relaxed);
        }
        if new == 0 {
            self.buckets.store(1, Release);
            return true;
        }
        self.buckets.store(buckets | SPLITTING, Relaxed);
        fence(Release);
        let old = new - (new + 1).next_power_of_two() / 2;
        let (mut stay, mut go) = ((0, 0), (0, 0));
        let mut at = Bucket(arena.load(self.slot(old))).run();
        while at != 0 {
            let run = Run::at(arena, at);
            let next = run.next();
            let hash = self.hash_of(run);
            let chain = if Self::bucket(hash, buckets + 1) == new { &mut go } else { &mut stay };
            run.set_next(chain.0);
            *chain = (at, chain.1 | Bucket::mark(hash));
            at = next;
        }
        Self::set_head(arena, self.slot(old), stay.0, stay.1);
        Self::set_head(arena, self.slot(new), go.0, go.1);
        self.buckets.store(buckets + 1, Release);
        true
    }

    /// The writer's search for a child of a run of this shape.
    #[inline]
    pub(super) fn find_still(&self, arena: &Arena, shape: RunShape, place: RunPosition, key: BlockKey) -> Option<Addr> {
        // Most blocks follow the last block of their run, which has no children.
        if !shape.may_fork_at(place.offset) {
            return None;
        }
        match self.find(arena, place.run, place.offset, key) {
            ChildSearch::Run { run, .. } => Some(run),
            ChildSearch::Nothing | ChildSearch::Again => None,
        }
    }
}
