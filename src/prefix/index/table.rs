//! A map from words to words that only the writer uses: names of blocks, copies, guesses. Extendible hashing in the arena.
//!
//! A key's hash leads through a directory to a [`Page`]. A page in which an entry would come to lie too far from its line is split in
//! two: the table grows a page at a time, so that no growth takes long or needs memory beside the arena's. Keys are mixed with a
//! secret: whoever may choose them can't choose where they land.

use super::arena::{Addr, Arena, PAGE, Space, order_for};
use super::children::{fold, spread};
use super::page::{Page, SLOTS};

pub(super) use super::page::Found;

/// Two neighbours that hold no more than this together become one page.
const FEW: usize = SLOTS as usize / 2;
/// How many keys are prepared together, while those before them are worked on.
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
    /// How often a page was added or given back: until then a key's page stays its page.
    changes: u64,
}

/// Where a key belongs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Spot<'a> {
    hash: u64,
    page: Option<Page<'a>>,
}

/// Where up to [`BATCH`] keys belong, worked out while their lines were on the way to the cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spots<'a> {
    spots: [Spot<'a>; BATCH],
    changes: u64,
}

impl Table {
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
        self.pages > 8 && self.len * 4 < self.pages * SLOTS as usize
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

    /// Where a key belongs.
    #[inline]
    fn spot<'a>(&self, arena: &'a Arena, key: u64) -> Spot<'a> {
        let hash = self.hash(key);
        Spot { hash, page: self.directory.get(self.entry(hash)).and_then(|page| Page::at(arena, *page)) }
    }

    /// Where the first [`BATCH`] keys belong; asks for their lines, so that they are in the cache when the keys are looked for.
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

    /// Where the key number `i` of those prepared belongs, which is `key`.
    #[inline]
    pub(super) fn prepared<'a>(&self, arena: &'a Arena, spots: &Spots<'a>, i: usize, key: u64) -> Spot<'a> {
        match spots.spots.get(i) {
            Some(spot) if spots.changes == self.changes => *spot,
            _ => self.spot(arena, key),
        }
    }

    /// The value of a key.
    pub(super) fn get(&self, arena: &Arena, key: u64) -> Option<u64> {
        Self::find(self.spot(arena, key), key).map(|found| found.value)
    }

    /// The entry of a key.
    #[inline]
    pub(super) fn find(spot: Spot<'_>, key: u64) -> Option<Found<'_>> {
        spot.page?.find(spot.hash, key)
    }

    /// Puts a value other than 0 in, over the one that was there.
    pub(super) fn set(&mut self, arena: &Arena, space: &mut Space, key: u64, value: u64) -> Result<(), NoRoom> {
        self.claim(arena, space, (self.spot(arena, key), key), value, |_| true).map(|_| ())
    }

    /// Puts a value in for a key where there is none, or where `stale` says of the one that is there that it counts no
    /// more. Returns the value that stays in its way.
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

    /// Puts in keys that are not there, the first of which is number `from` of those prepared: with `value` and, from key to key, one
    /// more. Returns how many were put in; what is another's to decide or needs memory ends it.
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

    /// Takes out keys, the first of which is number `from` of those prepared: as long as the first has `value` and, from key to key, one
    /// less. Returns how many.
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

    /// Takes a key out.
    pub(super) fn remove(&mut self, arena: &Arena, key: u64) -> Option<u64> {
        let found = Self::find(self.spot(arena, key), key)?;
        self.remove_found(found);
        Some(found.value)
    }

    /// Takes out what was found, if nothing has been changed since.
    #[inline]
    pub(super) fn remove_found(&mut self, found: Found<'_>) {
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
        let Some(page) = Page::at(arena, old) else { return Err(NoRoom) };
        let moving: Vec<(u64, u64)> = page.entries().collect();
        page.empty();
        self.put_back(arena, space, moving);
        Ok(())
    }

    /// Puts entries in again whose pages were rebuilt.
    fn put_back(&mut self, arena: &Arena, space: &mut Space, entries: Vec<(u64, u64)>) {
        self.len -= entries.len();
        for (key, value) in entries {
            let hash = self.hash(key);
            if self.spot(arena, key).page.is_some_and(|page| page.put(hash, key, value)) {
                self.len += 1;
                continue;
            }
            // What lay near its line with more beside it lies near with less; should it once not, its page is split again, and only
            // if there is no room for that it is lost.
            let _ = self.set(arena, space, key, value);
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
        let addr = self.directory.get(range.start).copied()?;
        // One by one, as what stays then lies no further from its line than before; put in anew, in another order, it might.
        let lost: Vec<u64> = Page::at(arena, addr)?.entries().filter(|(_, value)| !keep(*value)).map(|e| e.0).collect();
        for key in lost {
            self.remove(arena, key);
        }
        self.merge(arena, space, &range, addr);
        (range.end < self.directory.len()).then_some(range.end)
    }

    /// Makes one page of two neighbours that hold little.
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
            // They would lie too close together: those that have gone over are taken out again.
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
        let pages = (0..self.directory.len()).filter(new).filter_map(|i| Page::at(arena, *self.directory.get(i)?));
        pages.flat_map(Page::entries)
    }
}
