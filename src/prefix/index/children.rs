//! Which run hangs where: buckets of runs, chained through their headers, by (parent, offset, first key).
//!
//! Linear hashing: each new run adds one bucket by splitting one, so there is no rehash and a chain has one run on average.
//! Readers walk a chain without a lock. A run that they pass must not have changed meanwhile and must belong to their bucket, so
//! that a header which was reused can't lead them astray; "nothing hangs here" counts only if no bucket was split meanwhile.

use super::arena::{Addr, Arena, Space, low, order_for};
use super::run::{FREE, Place, Run, Shape, pack_place};
use crate::atomics::{
    AtomicU32, AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};
use crate::key::BlockKey;

/// Buckets of a page.
const PAGE: u32 = 128;
/// A chain longer than this is taken for one that was changed under the reader.
const MAX_CHAIN: usize = 1 << 16;

/// What a reader finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// This run, at this version; its tags lie at `tags` if nothing has changed.
    Run { run: Addr, version: u64, tags: Addr },
    /// Nothing hangs there.
    Nothing,
    /// The writer came between.
    Again,
}

/// The table.
#[derive(Debug)]
pub(super) struct Children {
    /// Pages of [`Bucket`]s.
    pages: Box<[AtomicU32]>,
    /// Number of buckets; the top bit while one is being split.
    buckets: AtomicU64,
    seed: [u64; 2],
}

const SPLITTING: u64 = 1 << 63;

/// A bucket, in a word: its first run, where that run's tags lie, and marks of all runs in its chain, so that most keys that nothing
/// hangs by are told without a look at the chain's headers.
#[derive(Clone, Copy)]
struct Bucket(u64);

impl Bucket {
    fn new(run: Addr, tags: Addr, marks: u64) -> Self {
        // Headers lie at multiples of 8 words, extents at multiples of 2.
        Self(u64::from(run / 8) | u64::from(tags / 2) << 29 | marks << 60)
    }

    /// The one of four marks that a run with this hash has.
    #[inline]
    fn mark(hash: u64) -> u64 {
        1 << (hash >> 62)
    }

    /// The first run, or 0.
    #[inline]
    fn run(self) -> Addr {
        low(self.0 & 0x1fff_ffff) * 8
    }

    /// Where the first run's tags lie.
    #[inline]
    fn tags(self) -> Addr {
        low(self.0 >> 29 & 0x7fff_ffff) * 2
    }

    #[inline]
    fn marks(self) -> u64 {
        self.0 >> 60
    }
}

/// Mixes by a multiplication of which both halves count.
#[inline]
pub(super) fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    (product as u64) ^ (product >> 64) as u64
}

/// A number that depends on all of another one's bits (the finaliser of SplitMix64), to make secrets of one seed.
pub(super) fn spread(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Children {
    /// No buckets yet; as many as an arena of `bytes` can need.
    pub(super) fn new(bytes: usize, seed: u64) -> Self {
        let pages = (bytes / (80 * PAGE as usize)).max(1) + 1;
        Self {
            pages: (0..pages).map(|_| AtomicU32::new(0)).collect(),
            buckets: AtomicU64::new(0),
            seed: [spread(seed), spread(!seed) | 1],
        }
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

    /// What hangs at `place` with this first key. May be called by anyone at any time.
    #[inline]
    pub(super) fn find(&self, arena: &Arena, run: Addr, offset: u32, key: BlockKey) -> Found {
        let place = pack_place(run, offset);
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
                return if version.is_multiple_of(2) { Found::Run { run: at, version, tags } } else { Found::Again };
            }
            let next = run.next();
            fence(Acquire);
            passed += 1;
            let strayed = its_place == FREE || {
                let its_hash = self.hash(its_place, its_key);
                Self::bucket(its_hash, buckets & !SPLITTING) != bucket
            };
            if strayed || !version.is_multiple_of(2) || !run.is_still(version) || passed > MAX_CHAIN {
                return Found::Again;
            }
            (at, hint) = (next, 0);
        }
        fence(Acquire);
        if buckets & SPLITTING != 0 || self.buckets.load(Relaxed) != buckets { Found::Again } else { Found::Nothing }
    }

    fn hash_of(&self, run: Run<'_>) -> u64 {
        self.hash(run.place_word(), run.key())
    }

    fn slot_of(&self, run: Run<'_>) -> Addr {
        self.slot(Self::bucket(self.hash_of(run), self.buckets.load(Relaxed)))
    }

    /// Makes a filled header findable. The writer's.
    ///
    /// Returns false, and does nothing, when there is no bucket at all and no room for one.
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

    /// Makes a header unfindable. The writer's.
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

    /// A run's tags have moved. The writer's.
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

    /// One bucket more, if there is room for it.
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

    /// What hangs somewhere in a run of this shape, as the writer asks.
    #[inline]
    pub(super) fn find_still(&self, arena: &Arena, shape: Shape, place: Place, key: BlockKey) -> Option<Addr> {
        // Most blocks go behind the last one of their run, where nothing hangs.
        if !shape.may_fork_at(place.offset) {
            return None;
        }
        match self.find(arena, place.run, place.offset, key) {
            Found::Run { run, .. } => Some(run),
            Found::Nothing | Found::Again => None,
        }
    }
}
