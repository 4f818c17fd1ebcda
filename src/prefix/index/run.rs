//! A run: a sequence of blocks without a branch. Its header is one cache line, whose memory is
//! only ever reused for headers.
//!
//! The version is a seqlock: odd while the writer changes what readers see. The header has the part of the first
//! block's key by which the run is found; the run's tags have the low halves of all keys. Other runs attach at any
//! offset, so a branch never splits a run.

use super::arena::{Addr, Arena, LINE, Line, Order, high, low, pair};
use crate::atomics::{
    AtomicU64,
    Ordering::{Acquire, Relaxed, Release},
    fence,
};
use crate::key::BlockKey;

/// Most blocks of a run; longer sequences continue in a child.
pub(super) const MAX_RUN: u32 = 2048;

/// Bits of a header's generation.
pub(super) const GENERATION_BITS: u32 = 23;

const VERSION: usize = 0;
const KEY: usize = 1;
const PARENT: usize = 2;
const EXTENTS: usize = 3;
const SHAPE: usize = 4;
const GPU: usize = 5;
const GUESS: usize = 6;
const LINKS: usize = 7;

/// Parent word of a free header.
pub(super) const FREE: u64 = u64::MAX;

/// The run must not grow: names of its removed blocks may still point behind its end.
pub(super) const FROZEN: u8 = 1;
/// Blocks of the run have names that stay when their holder drops the blocks.
pub(super) const ALIASED: u8 = 2;
/// At least one holder has blocks behind a gap.
pub(super) const BEHIND: u8 = 4;
/// The run has a node in the lists of estimated blocks.
pub(super) const GUESSED: u8 = 8;
/// A prompt has used the run since the eviction's hand passed it.
pub(super) const USED: u8 = 16;

/// Where a run is attached: behind `offset` blocks of `run`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunPosition {
    pub(super) run: Addr,
    pub(super) offset: u32,
}

/// Length, flags, tag order, branches and generation, packed in one word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RunShape {
    pub(super) len: u32,
    /// Size class of the extent with its tags.
    pub(super) order: Order,
    pub(super) flags: u8,
    /// A bit for each offset (modulo 16) where children may be attached.
    pub(super) forks: u16,
    pub(super) generation: u32,
}

impl RunShape {
    fn pack(self) -> u64 {
        u64::from(self.len)
            | u64::from(self.order) << 12
            | u64::from(self.flags) << 16
            | u64::from(self.forks) << 24
            | u64::from(self.generation) << 40
    }

    #[inline]
    fn unpack(word: u64) -> Self {
        Self {
            len: low(word) & 0xfff,
            order: (low(word) >> 12) & 0xf,
            flags: ((word >> 16) & 0xff) as u8,
            forks: ((word >> 24) & 0xffff) as u16,
            generation: (high(word) >> 8) & ((1 << GENERATION_BITS) - 1),
        }
    }

    #[inline]
    pub(super) fn may_fork_at(self, offset: u32) -> bool {
        self.forks & (1 << (offset % 16)) != 0
    }
}

/// The header of a run.
#[derive(Clone, Copy)]
pub(super) struct Run<'a>(&'a Line);

impl<'a> Run<'a> {
    #[inline]
    pub(super) fn at(arena: &'a Arena, run: Addr) -> Self {
        Self(arena.line(run))
    }

    #[inline]
    fn get(self, word: usize) -> u64 {
        self.0.word(word as Addr).load(Relaxed)
    }

    fn set(self, word: usize, value: u64) {
        self.0.word(word as Addr).store(value, Relaxed);
    }

    /// Returns the version, with acquire ordering, before anything else is read.
    #[inline]
    pub(super) fn version(self) -> u64 {
        self.0.0[VERSION].load(Acquire)
    }

    /// Whether nothing that was read since [`Self::version`] can have changed. The caller has
    /// placed an acquire fence before.
    #[inline]
    pub(super) fn is_still(self, version: u64) -> bool {
        self.get(VERSION) == version
    }

    /// Begins a change of what readers see. Writer only.
    pub(super) fn open(self) {
        let version = self.get(VERSION);
        debug_assert!(version.is_multiple_of(2), "a run is opened once");
        self.set(VERSION, version.wrapping_add(1));
        fence(Release);
    }

    /// Ends the change. Writer only.
    pub(super) fn close(self) {
        self.0.0[VERSION].store(self.get(VERSION).wrapping_add(1), Release);
    }

    #[inline]
    pub(super) fn key(self) -> BlockKey {
        BlockKey(self.get(KEY))
    }

    /// Where the run is attached, as [`pack_place`] packs it.
    #[inline]
    pub(super) fn place_word(self) -> u64 {
        let word = self.get(PARENT);
        if word == FREE { FREE } else { word & 0xffff_ffff_ffff }
    }

    pub(super) fn place(self) -> RunPosition {
        let word = self.get(PARENT);
        RunPosition { run: low(word), offset: high(word) & 0xffff }
    }

    pub(super) fn is_free(self) -> bool {
        self.get(PARENT) == FREE
    }

    /// Largest offset at which a child may be attached.
    pub(super) fn last_fork(self) -> u32 {
        high(self.get(PARENT)) >> 16
    }

    /// Number of its blocks that must stay because children are attached behind them.
    pub(super) fn needed(self) -> u32 {
        if self.children() > 0 { self.last_fork() } else { 0 }
    }

    pub(super) fn set_last_fork(self, offset: u32) {
        let word = self.get(PARENT);
        self.set(PARENT, (word & 0xffff_ffff_ffff) | u64::from(offset) << 48);
    }

    #[inline]
    pub(super) fn tags(self) -> Addr {
        low(self.get(EXTENTS))
    }

    /// The extent of coverage that does not fit in the header, or 0.
    #[inline]
    pub(super) fn cover(self) -> Addr {
        high(self.get(EXTENTS))
    }

    pub(super) fn set_extents(self, tags: Addr, cover: Addr) {
        self.set(EXTENTS, pair(tags, cover));
    }

    #[inline]
    pub(super) fn shape(self) -> RunShape {
        RunShape::unpack(self.get(SHAPE))
    }

    pub(super) fn set_shape(self, shape: RunShape) {
        self.set(SHAPE, shape.pack());
    }

    pub(super) fn set_flags(self, flags: u8) {
        let shape = self.shape();
        self.set_shape(RunShape { flags: shape.flags | flags, ..shape });
    }

    pub(super) fn clear_flags(self, flags: u8) {
        let shape = self.shape();
        self.set_shape(RunShape { flags: shape.flags & !flags, ..shape });
    }

    pub(super) fn has(self, flags: u8) -> bool {
        self.shape().flags & flags != 0
    }

    /// The columns among the first 64 that hold the whole run in GPU memory.
    #[inline]
    pub(super) fn gpu(self) -> u64 {
        self.get(GPU)
    }

    /// The columns among the first 64 that are estimated to hold the whole run.
    #[inline]
    pub(super) fn guess(self) -> u64 {
        self.get(GUESS)
    }

    pub(super) fn set_gpu(self, columns: u64) {
        self.set(GPU, columns);
    }

    pub(super) fn set_guess(self, columns: u64) {
        self.set(GUESS, columns);
    }

    /// The next run in its bucket, or in the list of free headers.
    #[inline]
    pub(super) fn next(self) -> Addr {
        low(self.get(LINKS))
    }

    pub(super) fn set_next(self, next: Addr) {
        self.set(LINKS, pair(next, high(self.get(LINKS))));
    }

    pub(super) fn children(self) -> u32 {
        high(self.get(LINKS))
    }

    pub(super) fn set_children(self, children: u32) {
        self.set(LINKS, pair(self.next(), children));
    }

    /// Fills a free header. The caller has opened it.
    pub(super) fn fill(self, place: RunPosition, key: BlockKey, tags: Addr, len: u32, order: Order) {
        let generation = self.shape().generation;
        self.set(KEY, key.0);
        self.set(PARENT, pack_place(place.run, place.offset));
        self.set_extents(tags, 0);
        self.set_shape(RunShape { len, order, flags: 0, forks: 0, generation });
        self.set_gpu(0);
        self.set_guess(0);
        self.set(LINKS, 0);
    }

    /// Clears a header: no parent, no holders. The caller has opened it.
    pub(super) fn vacate(self) {
        let generation = (self.shape().generation + 1) & ((1 << GENERATION_BITS) - 1);
        self.set(PARENT, FREE);
        self.set_extents(0, 0);
        self.set_shape(RunShape { len: 0, order: 0, flags: 0, forks: 0, generation });
        self.set_gpu(0);
        self.set_guess(0);
    }
}

/// A position as one word.
#[inline]
pub(super) fn pack_place(run: Addr, offset: u32) -> u64 {
    pair(run, offset & 0xffff)
}

/// The tags of two keys as one word.
#[inline]
pub(super) fn pack_tags(first: BlockKey, second: BlockKey) -> u64 {
    (first.0 & 0xffff_ffff) | second.0 << 32
}

/// Counts how many of `keys` match the tags at `tags` from block `from` on.
#[inline]
pub(super) fn same_tags(arena: &Arena, tags: Addr, from: u32, keys: &[BlockKey]) -> usize {
    let mut at = tags + from / 2;
    let (mut rest, mut same) = (keys, 0);
    if !from.is_multiple_of(2) {
        match keys.split_first() {
            Some((key, behind)) if arena.high(at) == low(key.0) => (rest, same, at) = (behind, 1, at + 1),
            _ => return 0,
        }
    }
    let mut lines = arena.lines(at).iter();
    // To the end of a line, then whole lines, then the rest.
    let first = (at % LINE) as usize;
    if first > 0 {
        let words = lines.next().and_then(|l| l.0.get(first..)).unwrap_or_default();
        let (part, behind) = rest.split_at(rest.len().min(2 * words.len()));
        let found = same_words(words, part);
        same += found;
        if found < part.len() {
            return same;
        }
        rest = behind;
    }
    let (whole, last) = rest.as_chunks::<{ 2 * LINE as usize }>();
    for part in whole {
        let Some(line) = lines.next() else { return same };
        let found = same_words(&line.0, part);
        same += found;
        if found < part.len() {
            return same;
        }
    }
    same + lines.next().map_or(0, |line| same_words(&line.0, last))
}

/// Counts how many of `keys` match these words, two in each.
#[inline]
fn same_words(words: &[AtomicU64], keys: &[BlockKey]) -> usize {
    let (pairs, last) = keys.as_chunks::<2>();
    for (i, (word, [first, second])) in words.iter().zip(pairs).enumerate() {
        let (word, wanted) = (word.load(Relaxed), pack_tags(*first, *second));
        if word != wanted {
            return 2 * i + usize::from(low(word) == low(wanted));
        }
    }
    let same = 2 * pairs.len();
    match (last, words.get(pairs.len())) {
        ([key], Some(word)) if low(word.load(Relaxed)) == low(key.0) => same + 1,
        _ => same,
    }
}

/// Writes the tags of `keys` behind the first `from` blocks of an extent.
pub(super) fn write_tags(arena: &Arena, tags: Addr, from: u32, keys: impl Iterator<Item = BlockKey>) {
    let mut at = tags + from / 2;
    let mut keys = keys;
    if !from.is_multiple_of(2) {
        let Some(key) = keys.next() else { return };
        arena.set_high(at, low(key.0));
        at += 1;
    }
    let lines = arena.lines(at).iter().flat_map(|line| &line.0);
    for word in lines.skip((at % LINE) as usize) {
        let Some(first) = keys.next() else { return };
        let second = keys.next().unwrap_or(BlockKey(0));
        word.store(pack_tags(first, second), Relaxed);
    }
}
