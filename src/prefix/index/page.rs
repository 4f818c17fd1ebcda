//! A page of a [`super::table`]: 32 cache lines of four slots each.
//!
//! An entry is in the line that its hash selects, or in the next one that had a free slot. The slots of a line are
//! filled in order, and a line that an entry was moved past is marked, so most searches end in the line where they
//! begin. Removing an entry closes its gap, so there are no tombstones.

use super::arena::{Addr, Arena, LINE, Line, PAGE};
use crate::atomics::{AtomicU64, Ordering::Relaxed};
use prefetch_index::prefetch_index;

/// Slots in a line. A slot is a key and a value; a value of 0 marks it free.
const LINE_SLOTS: u32 = LINE / 2;
const LAST: usize = LINE as usize - 1;
const LINES: u32 = PAGE / LINE;
/// Slots in a page.
pub(super) const SLOTS: u32 = LINE_SLOTS * LINES;
/// Largest distance of an entry from its line; beyond it the page is split.
const MAX_LINES: u32 = 10;
/// Bit in the value of a line's last slot: the line was full, and an entry was moved past it. No value has this bit.
const PASSED: u64 = 1 << 63;

/// The cache lines of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a>(&'a [Line; LINES as usize]);

/// An entry found in a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageEntry<'a> {
    page: Page<'a>,
    line: u32,
    slot: u32,
    pub(super) value: u64,
}

impl<'a> Page<'a> {
    #[inline]
    pub(super) fn at(arena: &'a Arena, page: Addr) -> Option<Self> {
        arena.page(page).map(Self)
    }

    /// Prefetches the line that a hash selects and the next one, where entries go when it is full.
    #[inline]
    pub(super) fn prefetch(self, hash: u64) {
        let home = Self::home(hash);
        prefetch_index(self.0, home as usize);
        prefetch_index(self.0, ((home + 1) % LINES) as usize);
    }

    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a remainder of the length")]
    fn line(self, number: u32) -> &'a [AtomicU64; LINE as usize] {
        &self.0[(number % LINES) as usize].0
    }

    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a slot is below `LINE_SLOTS`, and two words of its line")]
    fn get(self, line: u32, slot: u32) -> (u64, u64) {
        let (words, at) = (self.line(line), (slot % LINE_SLOTS) as usize * 2);
        (words[at].load(Relaxed), words[at + 1].load(Relaxed) & !PASSED)
    }

    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a slot is below `LINE_SLOTS`, and two words of its line")]
    fn set(self, line: u32, slot: u32, key: u64, value: u64) {
        let (words, at) = (self.line(line), (slot % LINE_SLOTS) as usize * 2);
        words[at].store(key, Relaxed);
        words[at + 1].store(value, Relaxed);
    }

    /// The line that a hash selects.
    #[inline]
    fn home(hash: u64) -> u32 {
        hash as u32 % LINES
    }

    /// The slots of a line whose key is `key`, as bits. All slots are compared without a branch,
    /// since the position is unpredictable.
    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a slot is below `LINE_SLOTS`, and two words of its line")]
    fn hits(line: &[AtomicU64; LINE as usize], key: u64) -> u32 {
        (0..LINE_SLOTS).fold(0, |hits, slot| hits | u32::from(line[2 * slot as usize].load(Relaxed) == key) << slot)
    }

    /// Number of used slots in a line; they are its first ones.
    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a slot is below `LINE_SLOTS`, and two words of its line")]
    fn used(line: &[AtomicU64; LINE as usize]) -> u32 {
        (0..LINE_SLOTS).map(|slot| u32::from(line[2 * slot as usize + 1].load(Relaxed) != 0)).sum()
    }

    /// Finds the entry of a key.
    #[inline]
    pub(super) fn find(self, hash: u64, key: u64) -> Option<PageEntry<'a>> {
        let home = Self::home(hash);
        for number in home..home + MAX_LINES {
            let line = self.line(number);
            let hits = Self::hits(line, key);
            if hits != 0 {
                // A free slot also has the key 0, but it comes after all entries of its line.
                let slot = hits.trailing_zeros();
                let (_, value) = self.get(number, slot);
                return (value != 0).then_some(PageEntry { page: self, line: number, slot, value });
            }
            if line[LAST].load(Relaxed) & PASSED == 0 {
                return None;
            }
        }
        None
    }

    /// Inserts a key if it is certainly absent and a slot is free near its line.
    #[inline]
    pub(super) fn put_new(self, hash: u64, key: u64, value: u64) -> bool {
        debug_assert!(value != 0 && value & PASSED == 0);
        let home = Self::home(hash);
        let line = self.line(home);
        if line[LAST].load(Relaxed) != 0 {
            return self.put_behind(hash, key, value);
        }
        // A match may also be a free slot, whose key is 0.
        let is_new = Self::hits(line, key) == 0;
        if is_new {
            self.set(home, Self::used(line), key, value);
        }
        is_new
    }

    /// As [`Self::put_new`], for a full line.
    #[inline(never)]
    fn put_behind(self, hash: u64, key: u64, value: u64) -> bool {
        self.find(hash, key).is_none() && self.put(hash, key, value)
    }

    /// Inserts a key that is known to be absent. Returns false when the next free slot is too far away.
    pub(super) fn put(self, hash: u64, key: u64, value: u64) -> bool {
        debug_assert!(value != 0 && value & PASSED == 0);
        let home = Self::home(hash);
        for number in home..home + MAX_LINES {
            let line = self.line(number);
            let last = line[LAST].load(Relaxed);
            if last == 0 {
                self.set(number, Self::used(line), key, value);
                return true;
            }
            line[LAST].store(last | PASSED, Relaxed);
        }
        false
    }

    /// Iterates over all entries, in no order.
    pub(super) fn entries(self) -> impl Iterator<Item = (u64, u64)> + 'a {
        let slots = (0..SLOTS).map(move |index| self.get(index / LINE_SLOTS, index % LINE_SLOTS));
        slots.filter(|(_, value)| *value != 0)
    }

    /// Removes all entries.
    pub(super) fn empty(self) {
        self.0.iter().flat_map(|line| &line.0).for_each(|word| word.store(0, Relaxed));
    }

    /// Frees a slot; the last entry of the line fills the gap. Returns true when entries were moved past this line.
    #[inline]
    fn take_out(self, line: u32, slot: u32) -> bool {
        let words = self.line(line);
        let was_passed = words[LAST].load(Relaxed) & PASSED != 0;
        let last = Self::used(words).saturating_sub(1);
        let (key, value) = self.get(line, last);
        self.set(line, slot, key, value);
        self.set(line, last, 0, 0);
        was_passed
    }

    /// Fills the free last slot of a line from the lines behind it, and repeats this for the gap that arises there.
    #[inline(never)]
    fn close_gap(self, line: u32, hash: impl Fn(u64) -> u64) {
        let mut gap = line;
        // All lines may be full; then the search ends where it began.
        for at in (line + 1..line + LINES).map(|line| line % LINES) {
            let behind = |line: u32| at.wrapping_sub(line) % LINES;
            let distance = behind(gap);
            let may_move = (0..LINE_SLOTS).fold(0, |may_move, slot| {
                let (key, value) = self.get(at, slot);
                // Unless its own line comes after the gap.
                let may = (value != 0) & (behind(Self::home(hash(key))) >= distance);
                may_move | u32::from(may) << slot
            });
            let was_passed = if may_move == 0 {
                self.line(at)[LAST].load(Relaxed) & PASSED != 0
            } else {
                let slot = may_move.trailing_zeros();
                let (key, value) = self.get(at, slot);
                self.set(gap, LINE_SLOTS - 1, key, value | PASSED);
                gap = at;
                self.take_out(at, slot)
            };
            if !was_passed {
                return;
            }
        }
    }
}

impl PageEntry<'_> {
    /// Replaces the value.
    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a slot is below `LINE_SLOTS`, and two words of its line")]
    pub(super) fn replace(self, value: u64) {
        let word = &self.page.line(self.line)[(self.slot % LINE_SLOTS) as usize * 2 + 1];
        word.store(value | word.load(Relaxed) & PASSED, Relaxed);
    }

    /// Removes the entry; `hash` is the hash function of the keys.
    #[inline]
    pub(super) fn remove(self, hash: impl Fn(u64) -> u64) {
        if self.page.take_out(self.line, self.slot) {
            self.page.close_gap(self.line, hash);
        }
    }
}
