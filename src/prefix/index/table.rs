//! A map from words to words that only the writer uses: names of blocks, copies, guesses. Extendible hashing in the arena.
//!
//! A key's hash leads through a directory to a page of 2 KiB, and in it to a line of four slots; a search leaves that line only if
//! the line was full. A page in which an entry would come to lie too far from its line is split in two: the table grows a page at a
//! time, so that no growth takes long or needs memory beside the arena's. Keys are mixed with a secret: whoever may choose them
//! can't choose where they land. A deletion closes its gap, so there are no tombstones.

use super::arena::{Addr, Arena, Line, Space, order_for};
use super::children::{fold, spread};
use crate::prefix::atomics::{AtomicU64, Ordering::Relaxed};
use prefetch_index::prefetch_index;

/// Slots of a cache line; a slot is a key and a value, and a value of 0 marks it empty.
const LINE_SLOTS: u32 = 4;
const PAGE_LINES: u32 = 32;
const PAGE_SLOTS: u32 = LINE_SLOTS * PAGE_LINES;
const PAGE_WORDS: u32 = 2 * PAGE_SLOTS;
/// An entry lies at most so many lines behind its own, or the page is split.
const MAX_LINES: u32 = 10;
/// Two neighbours that hold no more than this together become one page.
const FEW: usize = PAGE_SLOTS as usize / 2;
/// How many keys are warmed together, while those before them are worked on.
pub(super) const BATCH: usize = 16;

/// There is no room left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom;

/// The map.
#[derive(Debug)]
pub(super) struct Table {
    /// By the first bits of a hash, the page; a page that was not split as often as others stands here several times.
    directory: Vec<Addr>,
    /// How many bits these are.
    bits: u32,
    max_bits: u32,
    pages: usize,
    seed: [u64; 2],
    len: usize,
}

/// The slots of a page.
#[derive(Clone, Copy)]
struct Slots<'a>(&'a [Line; PAGE_LINES as usize]);

/// An entry that is in the map.
#[derive(Clone, Copy)]
pub(super) struct Found<'a> {
    slots: Slots<'a>,
    index: u32,
    pub(super) value: u64,
}

impl<'a> Slots<'a> {
    #[inline]
    fn at(arena: &'a Arena, page: Addr) -> Option<Self> {
        arena.lines(page).first_chunk().map(Self)
    }

    #[inline]
    fn words(self, index: u32) -> (&'a AtomicU64, &'a AtomicU64) {
        let line = &self.0[(index / LINE_SLOTS % PAGE_LINES) as usize];
        let slot = (index % LINE_SLOTS) as usize * 2;
        (&line.0[slot], &line.0[slot + 1])
    }

    #[inline]
    fn get(self, index: u32) -> (u64, u64) {
        let (key, value) = self.words(index);
        (key.load(Relaxed), value.load(Relaxed))
    }

    #[inline]
    fn set(self, index: u32, key: u64, value: u64) {
        let words = self.words(index);
        words.0.store(key, Relaxed);
        words.1.store(value, Relaxed);
    }

    /// The first slot of the line that a key belongs in.
    #[inline]
    fn home(hash: u64) -> u32 {
        (hash as u32 % PAGE_LINES) * LINE_SLOTS
    }

    /// Where a key stands and its value, or the empty slot where it belongs, if there is one that is not too far.
    ///
    /// A line's slots are taken from the first on. All four are looked at without a branch, as nothing tells which it will be.
    #[inline]
    fn find(self, hash: u64, key: u64) -> (Option<u32>, u64) {
        let home = Self::home(hash) / LINE_SLOTS;
        for number in home..home + MAX_LINES {
            let number = number % PAGE_LINES;
            let line = &self.0[number as usize].0;
            let (mut used, mut hit, mut hit_value) = (0, 0, 0);
            for slot in 0..LINE_SLOTS {
                let found = line[2 * slot as usize].load(Relaxed);
                let value = line[2 * slot as usize + 1].load(Relaxed);
                used += u32::from(value != 0);
                let is_hit = (found == key) & (value != 0);
                hit = if is_hit { slot } else { hit };
                hit_value = if is_hit { value } else { hit_value };
            }
            if hit_value != 0 || used < LINE_SLOTS {
                let slot = if hit_value != 0 { hit } else { used };
                return (Some(number * LINE_SLOTS + slot), hit_value);
            }
        }
        (None, 0)
    }

    /// Puts in a key that is not there, unless the room for it is too far.
    fn add(self, hash: u64, key: u64, value: u64) -> bool {
        let home = Self::home(hash) / LINE_SLOTS;
        let free = (home..home + MAX_LINES).map(|line| (line, self.used(line))).find(|(_, used)| *used < LINE_SLOTS);
        free.map(|(line, used)| self.set(line * LINE_SLOTS + used, key, value)).is_some()
    }

    /// How many slots of a line are taken.
    #[inline]
    fn used(self, line: u32) -> u32 {
        let line = &self.0[(line % PAGE_LINES) as usize].0;
        (0..LINE_SLOTS).map(|slot| u32::from(line[2 * slot as usize + 1].load(Relaxed) != 0)).sum()
    }

    fn entries(self) -> impl Iterator<Item = (u64, u64)> + 'a {
        (0..PAGE_SLOTS).map(move |index| self.get(index)).filter(|(_, value)| *value != 0)
    }

    fn empty(self) {
        (0..PAGE_SLOTS).for_each(|index| self.set(index, 0, 0));
    }
}

impl Table {
    /// An empty map whose directory takes at most `bytes` outside the arena.
    pub(super) fn new(bytes: usize, seed: u64) -> Self {
        let max_bits = (bytes / size_of::<Addr>()).max(1).ilog2();
        Self { directory: Vec::new(), bits: 0, max_bits, pages: 0, seed: [spread(seed), spread(!seed) | 1], len: 0 }
    }

    /// Entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes outside the arena.
    pub(super) fn bytes(&self) -> usize {
        self.directory.capacity() * size_of::<Addr>()
    }

    /// Whether the pages have room for several times what is in them.
    pub(super) fn is_sparse(&self) -> bool {
        self.pages > 8 && self.len * 4 < self.pages * PAGE_SLOTS as usize
    }

    #[inline]
    fn hash(&self, key: u64) -> u64 {
        fold(key ^ self.seed[0], self.seed[1])
    }

    #[inline]
    fn entry(&self, hash: u64) -> usize {
        // Two shifts, as there may be no bits at all.
        (hash >> 1 >> (63 - self.bits)) as usize
    }

    #[inline]
    fn slots<'a>(&self, arena: &'a Arena, hash: u64) -> Option<Slots<'a>> {
        Slots::at(arena, *self.directory.get(self.entry(hash))?)
    }

    /// Asks for the lines where the first [`BATCH`] keys would be, so that they are in the cache when the keys are looked for.
    #[inline]
    pub(super) fn warm(&self, arena: &Arena, keys: impl Iterator<Item = u64>) {
        for key in keys.take(BATCH) {
            let hash = self.hash(key);
            if let Some(slots) = self.slots(arena, hash) {
                let line = hash as u32 % PAGE_LINES;
                prefetch_index(slots.0, line as usize);
                prefetch_index(slots.0, ((line + 1) % PAGE_LINES) as usize);
            }
        }
    }

    /// The value of a key.
    pub(super) fn get(&self, arena: &Arena, key: u64) -> Option<u64> {
        self.find(arena, key).map(|found| found.value)
    }

    /// The entry of a key.
    #[inline]
    pub(super) fn find<'a>(&self, arena: &'a Arena, key: u64) -> Option<Found<'a>> {
        let hash = self.hash(key);
        let slots = self.slots(arena, hash)?;
        match slots.find(hash, key) {
            (Some(index), value) if value != 0 => Some(Found { slots, index, value }),
            _ => None,
        }
    }

    /// Puts a value other than 0 in, over the one that was there.
    pub(super) fn set(&mut self, arena: &Arena, space: &mut Space, key: u64, value: u64) -> Result<(), NoRoom> {
        self.claim(arena, space, key, value, |_| true).map(|_| ())
    }

    /// Puts a value in for a key where there is none, or where `stale` says of the one that is there that it counts no
    /// more. Returns the value that stays in its way.
    #[inline]
    pub(super) fn claim(
        &mut self,
        arena: &Arena,
        space: &mut Space,
        key: u64,
        value: u64,
        stale: impl FnOnce(u64) -> bool,
    ) -> Result<Option<u64>, NoRoom> {
        let hash = self.hash(key);
        loop {
            if let Some(slots) = self.slots(arena, hash)
                && let (Some(index), old) = slots.find(hash, key)
            {
                if old != 0 && !stale(old) {
                    return Ok(Some(old));
                }
                slots.set(index, key, value);
                self.len += usize::from(old == 0);
                return Ok(None);
            }
            self.split(arena, space, hash)?;
        }
    }

    /// Takes a key out.
    pub(super) fn remove(&mut self, arena: &Arena, key: u64) -> Option<u64> {
        let found = self.find(arena, key)?;
        self.remove_found(found);
        Some(found.value)
    }

    /// Takes out what was found, if nothing has been changed since.
    #[inline]
    pub(super) fn remove_found(&mut self, found: Found<'_>) {
        let Found { slots, index: gap, .. } = found;
        // Whatever stands in a line may stand anywhere in it, so the last of the line fills the gap.
        let line = gap / LINE_SLOTS;
        let used = slots.used(line);
        let last = line * LINE_SLOTS + used.saturating_sub(1);
        let (key, value) = slots.get(last);
        slots.set(gap, key, value);
        slots.set(last, 0, 0);
        if used == LINE_SLOTS && slots.get((last + 1) % PAGE_SLOTS).1 != 0 {
            self.close_gap(slots, last);
        }
        self.len -= 1;
    }

    /// Closes a gap at the end of a line: an entry of a later line may belong in it.
    fn close_gap(&self, slots: Slots<'_>, mut gap: u32) {
        let first = gap + 1;
        // A page may be full: then the search ends where it began.
        for index in (first..first + PAGE_SLOTS - 1).map(|index| index % PAGE_SLOTS) {
            let (key, value) = slots.get(index);
            if value == 0 {
                break;
            }
            let home = Slots::home(self.hash(key));
            // It may move to the gap unless its home lies behind the gap.
            let stays = if gap < index { gap < home && home <= index } else { gap < home || home <= index };
            if !stays {
                slots.set(gap, key, value);
                gap = index;
            }
        }
        slots.set(gap, 0, 0);
    }

    fn page(&mut self, arena: &Arena, space: &mut Space) -> Result<Addr, NoRoom> {
        let page = space.alloc(arena, order_for(PAGE_WORDS)).ok_or(NoRoom)?;
        if let Some(slots) = Slots::at(arena, page) {
            slots.empty();
        }
        self.pages += 1;
        Ok(page)
    }

    fn free_page(&mut self, arena: &Arena, space: &mut Space, page: Addr) {
        space.free(arena, page, order_for(PAGE_WORDS));
        self.pages -= 1;
    }

    /// The entries of the directory that lead to the same page as `entry`.
    fn range(&self, entry: usize) -> std::ops::Range<usize> {
        let page = self.directory.get(entry);
        let mut width = 1;
        while width < self.directory.len() {
            let start = entry & !(2 * width - 1);
            let ends = [self.directory.get(start), self.directory.get(start + 2 * width - 1)];
            if ends != [page, page] {
                break;
            }
            width *= 2;
        }
        let start = entry & !(width - 1);
        start..start + width
    }

    /// Splits the page that a hash leads to, or makes the first one.
    #[cold]
    fn split(&mut self, arena: &Arena, space: &mut Space, hash: u64) -> Result<(), NoRoom> {
        if self.directory.is_empty() {
            let first = self.page(arena, space)?;
            self.directory.push(first);
            return Ok(());
        }
        let mut range = self.range(self.entry(hash));
        if range.len() == 1 {
            if self.bits == self.max_bits {
                return Err(NoRoom);
            }
            let mut wider = Vec::with_capacity(2 * self.directory.len());
            wider.extend(self.directory.iter().flat_map(|page| [*page, *page]));
            self.directory = wider;
            self.bits += 1;
            range = self.range(self.entry(hash));
        }
        let new = self.page(arena, space)?;
        let old = self.directory.get(range.start).copied().unwrap_or(0);
        for page in self.directory.get_mut(range.start + range.len() / 2..range.end).unwrap_or_default() {
            *page = new;
        }
        let Some(slots) = Slots::at(arena, old) else { return Err(NoRoom) };
        let moving: Vec<(u64, u64)> = slots.entries().collect();
        slots.empty();
        self.put_back(arena, space, moving);
        Ok(())
    }

    /// Puts entries in again whose pages were rebuilt.
    fn put_back(&mut self, arena: &Arena, space: &mut Space, entries: Vec<(u64, u64)>) {
        self.len -= entries.len();
        for (key, value) in entries {
            let hash = self.hash(key);
            if self.slots(arena, hash).is_some_and(|slots| slots.add(hash, key, value)) {
                self.len += 1;
                continue;
            }
            // What lay near its line with more beside it lies near with less; should it once not, its page is split again, and only
            // if there is no room for that it is lost.
            let _ = self.claim(arena, space, key, value, |_| true);
        }
    }

    /// Drops the entries of a page that `keep` does not want, and the page if its neighbour has room for the rest. Returns the
    /// directory's entry of the next page.
    pub(super) fn retain_page(
        &mut self,
        arena: &Arena,
        space: &mut Space,
        entry: usize,
        keep: impl Fn(u64) -> bool,
    ) -> Option<usize> {
        let range = self.range(entry.min(self.directory.len().checked_sub(1)?));
        let page = self.directory.get(range.start).copied()?;
        let slots = Slots::at(arena, page)?;
        let lost = slots.entries().filter(|(_, value)| !keep(*value)).count();
        if lost > 0 {
            let kept = slots.entries().filter(|(_, value)| keep(*value)).collect();
            slots.empty();
            self.len -= lost;
            self.put_back(arena, space, kept);
        }
        self.merge(arena, space, &range, page);
        (range.end < self.directory.len()).then_some(range.end)
    }

    /// Makes one page of two neighbours that hold little.
    fn merge(&mut self, arena: &Arena, space: &mut Space, range: &std::ops::Range<usize>, page: Addr) {
        let other = self.range(range.start ^ range.len());
        if range.len() == self.directory.len() || other.len() != range.len() {
            return;
        }
        let Some(emptied) = self.directory.get(other.start).copied() else { return };
        let (Some(from), Some(to)) = (Slots::at(arena, emptied), Slots::at(arena, page)) else { return };
        if from.entries().count() + to.entries().count() > FEW {
            return;
        }
        let moving = from.entries().collect();
        for entry in self.directory.get_mut(other).unwrap_or_default() {
            *entry = page;
        }
        self.free_page(arena, space, emptied);
        self.put_back(arena, space, moving);
    }

    /// Gives everything back.
    pub(super) fn release(&mut self, arena: &Arena, space: &mut Space) {
        let mut directory = std::mem::take(&mut self.directory);
        directory.dedup();
        directory.into_iter().for_each(|page| self.free_page(arena, space, page));
        (self.bits, self.len) = (0, 0);
    }

    /// All entries, in no order.
    pub(super) fn iter<'a>(&'a self, arena: &'a Arena) -> impl Iterator<Item = (u64, u64)> + 'a {
        let new = |i: &usize| *i == 0 || self.directory.get(*i) != self.directory.get(*i - 1);
        let pages = (0..self.directory.len()).filter(new).filter_map(|i| Slots::at(arena, *self.directory.get(i)?));
        pages.flat_map(Slots::entries)
    }
}
