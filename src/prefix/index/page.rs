//! A page of a [`super::table`]: 32 lines of four slots, a cache line each.
//!
//! An entry stands in the line that its hash names, or as little behind it as there was room. The slots of a line are taken from the
//! first on, and a line that an entry has passed on its way is full and says so; so most searches end in the line where they begin.
//! A deletion closes its gap, so there are no tombstones.

use super::arena::{Addr, Arena, LINE, Line, PAGE};
use crate::atomics::{AtomicU64, Ordering::Relaxed};
use prefetch_index::prefetch_index;

/// Slots of a line; a slot is a key and a value, and a value of 0 marks it empty.
const LINE_SLOTS: u32 = LINE / 2;
const LAST: usize = LINE as usize - 1;
const LINES: u32 = PAGE / LINE;
/// Slots of a page.
pub(super) const SLOTS: u32 = LINE_SLOTS * LINES;
/// An entry lies at most so many lines behind its own, or the page is split.
const MAX_LINES: u32 = 10;
/// In the value of a line's last slot: an entry that lies behind has passed this line, as it was full. No value has this bit.
const PASSED: u64 = 1 << 63;

/// The slots of a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Page<'a>(&'a [Line; LINES as usize]);

/// An entry that is in a page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found<'a> {
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

    /// Asks for the line that a hash names, and for the next, where an entry lies for which there was no room.
    #[inline]
    pub(super) fn prefetch(self, hash: u64) {
        let home = Self::home(hash);
        prefetch_index(self.0, home as usize);
        prefetch_index(self.0, ((home + 1) % LINES) as usize);
    }

    #[inline]
    fn line(self, number: u32) -> &'a [AtomicU64; LINE as usize] {
        &self.0[(number % LINES) as usize].0
    }

    #[inline]
    fn get(self, line: u32, slot: u32) -> (u64, u64) {
        let (words, at) = (self.line(line), (slot % LINE_SLOTS) as usize * 2);
        (words[at].load(Relaxed), words[at + 1].load(Relaxed) & !PASSED)
    }

    #[inline]
    fn set(self, line: u32, slot: u32, key: u64, value: u64) {
        let (words, at) = (self.line(line), (slot % LINE_SLOTS) as usize * 2);
        words[at].store(key, Relaxed);
        words[at + 1].store(value, Relaxed);
    }

    /// The line that a hash names.
    #[inline]
    fn home(hash: u64) -> u32 {
        hash as u32 % LINES
    }

    /// The slots of a line whose key is `key`, as bits. All are looked at without a branch, as nothing tells which it will be.
    #[inline]
    fn hits(line: &[AtomicU64; LINE as usize], key: u64) -> u32 {
        (0..LINE_SLOTS).fold(0, |hits, slot| hits | u32::from(line[2 * slot as usize].load(Relaxed) == key) << slot)
    }

    /// How many slots of a line are taken: its first ones.
    #[inline]
    fn used(line: &[AtomicU64; LINE as usize]) -> u32 {
        (0..LINE_SLOTS).map(|slot| u32::from(line[2 * slot as usize + 1].load(Relaxed) != 0)).sum()
    }

    /// The entry of a key.
    #[inline]
    pub(super) fn find(self, hash: u64, key: u64) -> Option<Found<'a>> {
        let home = Self::home(hash);
        for number in home..home + MAX_LINES {
            let line = self.line(number);
            let hits = Self::hits(line, key);
            if hits != 0 {
                // An empty slot's key is 0 too, but it stands behind all entries of its line.
                let slot = hits.trailing_zeros();
                let (_, value) = self.get(number, slot);
                return (value != 0).then_some(Found { page: self, line: number, slot, value });
            }
            if line[LAST].load(Relaxed) & PASSED == 0 {
                return None;
            }
        }
        None
    }

    /// Puts in a key if it is sure not to be there and there is room for it near.
    #[inline]
    pub(super) fn put_new(self, hash: u64, key: u64, value: u64) -> bool {
        debug_assert!(value != 0 && value & PASSED == 0);
        let home = Self::home(hash);
        let line = self.line(home);
        if line[LAST].load(Relaxed) != 0 {
            return self.put_behind(hash, key, value);
        }
        // What is hit may also be an empty slot, whose key is 0.
        let is_new = Self::hits(line, key) == 0;
        if is_new {
            self.set(home, Self::used(line), key, value);
        }
        is_new
    }

    /// [`Self::put_new`] where the line is full.
    #[inline(never)]
    fn put_behind(self, hash: u64, key: u64, value: u64) -> bool {
        self.find(hash, key).is_none() && self.put(hash, key, value)
    }

    /// Puts in a key of which it is known that it is not there. False when the room for it is too far.
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

    /// All entries, in no order.
    pub(super) fn entries(self) -> impl Iterator<Item = (u64, u64)> + 'a {
        let slots = (0..SLOTS).map(move |index| self.get(index / LINE_SLOTS, index % LINE_SLOTS));
        slots.filter(|(_, value)| *value != 0)
    }

    /// Takes all entries out.
    pub(super) fn empty(self) {
        self.0.iter().flat_map(|line| &line.0).for_each(|word| word.store(0, Relaxed));
    }

    /// Empties a slot. Whatever stands in a line may stand anywhere in it, so the last of the line fills the gap. True when entries that
    /// lie behind have passed this line.
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

    /// The last slot of a line that was passed is free: an entry that lies behind may belong in it, and leaves a gap there.
    #[inline(never)]
    fn close_gap(self, line: u32, hash: impl Fn(u64) -> u64) {
        let mut gap = line;
        // All lines may be full: then the search ends where it began.
        for at in (line + 1..line + LINES).map(|line| line % LINES) {
            let behind = |line: u32| at.wrapping_sub(line) % LINES;
            let distance = behind(gap);
            let may_move = (0..LINE_SLOTS).fold(0, |may_move, slot| {
                let (key, value) = self.get(at, slot);
                // Unless its home lies behind the gap.
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

impl Found<'_> {
    /// Puts another value in.
    #[inline]
    pub(super) fn replace(self, value: u64) {
        let word = &self.page.line(self.line)[(self.slot % LINE_SLOTS) as usize * 2 + 1];
        word.store(value | word.load(Relaxed) & PASSED, Relaxed);
    }

    /// Takes the entry out; `hash` is what keys are placed by.
    #[inline]
    pub(super) fn remove(self, hash: impl Fn(u64) -> u64) {
        if self.page.take_out(self.line, self.slot) {
            self.page.close_gap(self.line, hash);
        }
    }
}
