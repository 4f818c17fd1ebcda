//! A hash map from words to words for the writer alone: names of blocks, copies, estimates.
//! Extendible hashing in the arena.
//!
//! A key's hash selects a [`Page`] through a directory. A page in which an entry would be too far from its line is
//! split in two: the table grows page by page, so no growth takes long or needs memory outside the arena. A secret seed
//! is mixed in, so that clients that choose keys cannot choose their positions.

use super::arena::{Addr, Arena, PAGE, Space, order_for};
use super::children::{fold, spread};
use super::page::{Page, SLOTS};

pub(super) use super::page::PageEntry;

/// Two neighbouring pages with at most this many entries together are merged.
const FEW: usize = SLOTS as usize / 2;
/// Number of keys that are prefetched together.
pub(super) const BATCH: usize = 16;

/// No memory is left within the limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoRoom;

/// A hash map in the arena.
#[derive(Debug)]
pub(super) struct WordTable {
    /// Pages by the first bits of a hash. A page that was split less often than others appears several times.
    directory: Vec<Addr>,
    /// Number of hash bits that the directory uses.
    bits: u32,
    max_bits: u32,
    pages: usize,
    seed: [u64; 2],
    len: usize,
    /// Number of pages added or freed so far. While it is unchanged, a key's page is unchanged.
    changes: u64,
}

/// The position of a key.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spot<'a> {
    hash: u64,
    page: Option<Page<'a>>,
}

/// The positions of up to [`BATCH`] keys, whose cache lines are being prefetched.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spots<'a> {
    spots: [Spot<'a>; BATCH],
    changes: u64,
}

impl WordTable {
    /// An empty map whose directory takes at most `bytes` outside the arena.
    pub(super) fn new(bytes: usize, seed: u64) -> Self {
        let max_bits = (bytes / size_of::<Addr>()).max(1).ilog2();
        Self {
            directory: Vec::new(),
            bits: 0,
            max_bits,
            pages: 0,
            seed: [spread(seed), spread(!seed) | 1],
            len: 0,
            changes: 0,
        }
    }

    /// Number of entries.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Bytes outside the arena.
    pub(super) fn bytes(&self) -> usize {
        self.directory.capacity() * size_of::<Addr>()
    }

    /// Whether less than a quarter of the slots are used.
    pub(super) fn is_sparse(&self) -> bool {
        self.pages > 8 && self.len * 4 < self.pages * SLOTS as usize
    }

    #[inline]
    fn hash(&self, key: u64) -> u64 {
        fold(key ^ self.seed[0], self.seed[1])
    }

    #[inline]
    fn entry(&self, hash: u64) -> usize {
        // Two shifts, because `bits` may be 0.
        (hash >> 1 >> (63 - self.bits)) as usize
    }

    /// Computes the position of a key.
    #[inline]
    fn spot<'a>(&self, arena: &'a Arena, key: u64) -> Spot<'a> {
        let hash = self.hash(key);
        Spot { hash, page: self.directory.get(self.entry(hash)).and_then(|page| Page::at(arena, *page)) }
    }

    /// Computes the positions of the first [`BATCH`] keys and prefetches their cache lines.
    #[inline]
    pub(super) fn spots<'a>(&self, arena: &'a Arena, keys: impl Iterator<Item = u64>) -> Spots<'a> {
        let mut spots = [Spot::default(); BATCH];
        for (spot, key) in spots.iter_mut().zip(keys) {
            *spot = self.spot(arena, key);
            if let Some(page) = spot.page {
                page.prefetch(spot.hash);
            }
        }
        Spots { spots, changes: self.changes }
    }

    /// Returns the position of `key`, which is number `i` of the prepared keys.
    #[inline]
    pub(super) fn prepared<'a>(&self, arena: &'a Arena, spots: &Spots<'a>, i: usize, key: u64) -> Spot<'a> {
        match spots.spots.get(i) {
            Some(spot) if spots.changes == self.changes => *spot,
            _ => self.spot(arena, key),
        }
    }

    /// Returns the value of a key.
    pub(super) fn get(&self, arena: &Arena, key: u64) -> Option<u64> {
        Self::find(self.spot(arena, key), key).map(|found| found.value)
    }

    /// Returns the entry at the position of a key.
    #[inline]
    pub(super) fn find(spot: Spot<'_>, key: u64) -> Option<PageEntry<'_>> {
        spot.page?.find(spot.hash, key)
    }

    /// Inserts or replaces a value, which must not be 0.
    pub(super) fn set(&mut self, arena: &Arena, space: &mut Space, key: u64, value: u64) -> Result<(), NoRoom> {
        self.claim(arena, space, (self.spot(arena, key), key), value, |_| true).map(|_| ())
    }

    /// Inserts a value where the key has none, or where `stale` returns true for the existing one. Returns the
    /// existing value if it stays.
    #[inline]
    pub(super) fn claim<'a>(
        &mut self,
        arena: &'a Arena,
        space: &mut Space,
        (mut spot, key): (Spot<'a>, u64),
        value: u64,
        stale: impl FnOnce(u64) -> bool,
    ) -> Result<Option<u64>, NoRoom> {
        if let Some(found) = Self::find(spot, key) {
            if !stale(found.value) {
                return Ok(Some(found.value));
            }
            found.replace(value);
            return Ok(None);
        }
        while !spot.page.is_some_and(|page| page.put(spot.hash, key, value)) {
            self.split(arena, space, spot.hash)?;
            spot = self.spot(arena, key);
        }
        self.len += 1;
        Ok(None)
    }

    /// Inserts new keys, the first of which is number `from` of the prepared keys, with the values `value`, `value` + 1
    /// and so on. Stops at a key that exists or needs memory; returns how many were inserted.
    pub(super) fn put_rising(
        &mut self,
        spots: &Spots<'_>,
        from: usize,
        keys: impl Iterator<Item = u64>,
        value: u64,
    ) -> usize {
        let spots = if spots.changes == self.changes { spots.spots.get(from..) } else { None };
        let mut put = 0;
        for (spot, key) in spots.unwrap_or_default().iter().zip(keys) {
            if !spot.page.is_some_and(|page| page.put_new(spot.hash, key, value + put)) {
                break;
            }
            put += 1;
        }
        self.len += put as usize;
        put as usize
    }

    /// Removes keys, the first of which is number `from` of the prepared keys, as long as their values are `value`,
    /// `value` - 1 and so on. Returns how many were removed.
    pub(super) fn remove_falling(
        &mut self,
        spots: &Spots<'_>,
        from: usize,
        keys: impl Iterator<Item = u64>,
        value: u64,
    ) -> usize {
        let spots = if spots.changes == self.changes { spots.spots.get(from..) } else { None };
        let mut removed = 0;
        for (spot, key) in spots.unwrap_or_default().iter().zip(keys) {
            match Self::find(*spot, key) {
                Some(found) if found.value + removed == value => self.remove_found(found),
                _ => break,
            }
            removed += 1;
        }
        removed as usize
    }

    /// Removes a key and returns its value.
    pub(super) fn remove(&mut self, arena: &Arena, key: u64) -> Option<u64> {
        let found = Self::find(self.spot(arena, key), key)?;
        self.remove_found(found);
        Some(found.value)
    }

    /// Removes an entry that was found, if nothing has changed since.
    #[inline]
    pub(super) fn remove_found(&mut self, found: PageEntry<'_>) {
        found.remove(|key| self.hash(key));
        self.len -= 1;
    }

    fn page(&mut self, arena: &Arena, space: &mut Space) -> Result<Addr, NoRoom> {
        let page = space.alloc(arena, order_for(PAGE)).ok_or(NoRoom)?;
        if let Some(page) = Page::at(arena, page) {
            page.empty();
        }
        self.pages += 1;
        self.changes += 1;
        Ok(page)
    }

    fn free_page(&mut self, arena: &Arena, space: &mut Space, page: Addr) {
        space.free(arena, page, order_for(PAGE));
        self.pages -= 1;
        self.changes += 1;
    }

    /// The directory entries that lead to the same page as `entry`.
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

    /// Splits the page that a hash selects, or allocates the first page.
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
        let Some(page) = Page::at(arena, old) else { return Err(NoRoom) };
        let moving: Vec<(u64, u64)> = page.entries().collect();
        page.empty();
        self.put_back(arena, space, moving);
        Ok(())
    }

    /// Inserts the entries of a split page again.
    fn put_back(&mut self, arena: &Arena, space: &mut Space, entries: Vec<(u64, u64)>) {
        self.len -= entries.len();
        for (key, value) in entries {
            let hash = self.hash(key);
            if self.spot(arena, key).page.is_some_and(|page| page.put(hash, key, value)) {
                self.len += 1;
                continue;
            }
            // An entry that was near its line in a fuller page is near it in an emptier one. In the exceptional case
            // its page is split again; without memory for that, the entry is lost.
            let _ = self.set(arena, space, key, value);
        }
    }

    /// Iterates over the entries of the page where `key` belongs.
    pub(super) fn near<'a>(&self, arena: &'a Arena, key: u64) -> impl Iterator<Item = (u64, u64)> + use<'a> {
        self.spot(arena, key).page.into_iter().flat_map(Page::entries)
    }

    /// Drops the entries whose value `keep` rejects from the page where `key` belongs. Returns whether there were any.
    pub(super) fn retain_near(&mut self, arena: &Arena, key: u64, keep: impl Fn(u64) -> bool) -> bool {
        let lost: Vec<u64> = self.near(arena, key).filter(|(_, value)| !keep(*value)).map(|(key, _)| key).collect();
        for key in &lost {
            self.remove(arena, *key);
        }
        !lost.is_empty()
    }

    /// Drops the entries of a page whose value `keep` rejects, and merges the page with its neighbour if both fit in
    /// one. Returns the directory entry of the next page.
    pub(super) fn retain_page(
        &mut self,
        arena: &Arena,
        space: &mut Space,
        entry: usize,
        keep: impl Fn(u64) -> bool,
    ) -> Option<usize> {
        let range = self.range(entry.min(self.directory.len().checked_sub(1)?));
        let addr = self.directory.get(range.start).copied()?;
        // One by one, so that remaining entries never move away from their lines. Reinserting them in
        // another order could do that.
        let lost: Vec<u64> = Page::at(arena, addr)?.entries().filter(|(_, value)| !keep(*value)).map(|e| e.0).collect();
        for key in lost {
            self.remove(arena, key);
        }
        self.merge(arena, space, &range, addr);
        (range.end < self.directory.len()).then_some(range.end)
    }

    /// Merges two neighbouring pages with few entries.
    fn merge(&mut self, arena: &Arena, space: &mut Space, range: &std::ops::Range<usize>, page: Addr) {
        let other = self.range(range.start ^ range.len());
        if range.len() == self.directory.len() || other.len() != range.len() {
            return;
        }
        let Some(emptied) = self.directory.get(other.start).copied() else { return };
        let (Some(from), Some(to)) = (Page::at(arena, emptied), Page::at(arena, page)) else { return };
        if from.entries().count() + to.entries().count() > FEW {
            return;
        }
        let moved = |(key, value)| to.put(self.hash(key), key, value);
        if !from.entries().all(moved) {
            // The entries do not fit in one page: those that were moved are removed again.
            for (key, _) in from.entries() {
                to.find(self.hash(key), key).into_iter().for_each(|found| found.remove(|key| self.hash(key)));
            }
            return;
        }
        for entry in self.directory.get_mut(other).unwrap_or_default() {
            *entry = page;
        }
        self.free_page(arena, space, emptied);
    }

    /// Frees all pages.
    pub(super) fn release(&mut self, arena: &Arena, space: &mut Space) {
        let mut directory = std::mem::take(&mut self.directory);
        directory.dedup();
        directory.into_iter().for_each(|page| self.free_page(arena, space, page));
        (self.bits, self.len) = (0, 0);
    }

    /// Iterates over all entries, in no order.
    pub(super) fn iter<'a>(&'a self, arena: &'a Arena) -> impl Iterator<Item = (u64, u64)> + 'a {
        let new = |i: &usize| *i == 0 || self.directory.get(*i) != self.directory.get(*i - 1);
        let pages = (0..self.directory.len()).filter(new).filter_map(|i| Page::at(arena, *self.directory.get(i)?));
        pages.flat_map(Page::entries)
    }
}
