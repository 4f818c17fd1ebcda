//! Blocks that engines report: stored, removed, and the engines' names for them.

use super::arena::Addr;
use super::cover::{Column, Cover, ENGINE, Plane};
use super::holders::Aside;
use super::ranges::Range;
use super::run::{ALIASED, BEHIND, MAX_RUN, Run, RunPosition, same_tags};
use super::table::{BATCH, NoRoom, Spot, Spots, WordTable};
use super::writer::{ASIDE_ENTRY, HolderPlane, Writer};
use super::{EngineHash, Origin, ReaderView, StoreEffect, StoredBlock, UnknownParent};
use crate::key::BlockKey;
use std::collections::BTreeMap;

/// Bytes outside the arena for each directory of a holder's own tables.
const OWN_BYTES: usize = 64 << 10;

/// The value of a name: run, generation and offset of its block. The highest bit stays free.
pub(super) fn pack(run: Addr, generation: u32, offset: u32) -> u64 {
    debug_assert!(offset < MAX_RUN);
    u64::from(run / 8) << 34 | u64::from(generation) << 11 | u64::from(offset)
}

fn unpack(value: u64) -> (Addr, u32, u32) {
    (((value >> 34) as Addr) * 8, (value >> 11) as u32 & 0x7f_ffff, value as u32 & 0x7ff)
}

/// Returns the block of a name, if its run still has the same generation and the block.
pub(super) fn resolve(sh: &ReaderView, value: u64) -> Option<RunPosition> {
    let (run, generation, offset) = unpack(value);
    let shape = Run::at(&sh.arena, run).shape();
    (shape.generation == generation && offset < shape.len).then_some(RunPosition { run, offset })
}

/// Whether at least one engine has reported the block and not dropped it.
pub(super) fn is_held(
    sh: &ReaderView,
    behind: &BTreeMap<(Addr, Column, u8), Vec<Range>>,
    live: &[u64],
    value: u64,
) -> bool {
    let Some(place) = resolve(sh, value) else { return false };
    let run = Run::at(&sh.arena, place.run);
    if run.gpu() & live.first().copied().unwrap_or(0) != 0 {
        return true;
    }
    if run.cover() == 0 && !run.has(BEHIND) {
        return false;
    }
    let mut cover = Cover::default();
    cover.read(&sh.arena, run, live);
    cover.deepest(&ENGINE, None) > place.offset
        || behind
            .range((place.run, 0, 0)..=(place.run, Column::MAX, u8::MAX))
            .filter(|((_, column, _), _)| super::cover::bit(live, *column))
            .any(|(_, ranges)| ranges.iter().any(|(a, b)| *a <= place.offset && place.offset < *b))
}

pub(super) fn copy_key(place: RunPosition, plane: Plane) -> u64 {
    u64::from(place.run) << 14 | u64::from(place.offset) << 2 | plane as u64
}

impl Writer {
    pub(super) fn own(&self, slot: usize) -> Option<&Aside> {
        self.holders.get(slot).and_then(|h| h.aside.as_deref())
    }

    /// Inserts an entry in one of a holder's own tables.
    pub(super) fn set_own(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        which: fn(&mut Aside) -> &mut WordTable,
        key: u64,
        value: u64,
    ) -> Result<(), NoRoom> {
        let seed = sh.seed ^ slot as u64;
        let Some(holder) = self.holders.get_mut(slot) else { return Err(NoRoom) };
        let aside = match &mut holder.aside {
            Some(aside) => aside,
            empty => {
                let bytes = ASIDE_BYTES;
                if self.aside + bytes > self.aside_limit {
                    self.is_aside_short = true;
                    return Err(NoRoom);
                }
                self.aside += bytes;
                let tables = Aside { names: WordTable::new(OWN_BYTES, seed), copies: WordTable::new(OWN_BYTES, seed) };
                empty.insert(Box::new(tables))
            }
        };
        which(aside).set(&sh.arena, &mut self.space, key, value)
    }

    /// Frees a holder's own tables.
    pub(super) fn drop_own(&mut self, sh: &ReaderView, slot: usize) {
        let Some(mut aside) = self.holders.get_mut(slot).and_then(|h| h.aside.take()) else { return };
        aside.names.release(&sh.arena, &mut self.space);
        aside.copies.release(&sh.arena, &mut self.space);
        self.aside -= ASIDE_BYTES;
    }

    /// Returns the block that a holder's name stands for: the holder's own name first, then the common
    /// one, then any other holder's.
    fn parent(&mut self, sh: &ReaderView, slot: usize, hash: EngineHash) -> Option<RunPosition> {
        let own = self.own(slot).and_then(|a| a.names.get(&sh.arena, hash.0));
        if let Some(place) = own.and_then(|value| self.held_block(sh, value)) {
            return Some(place);
        }
        let common = self.names.get(&sh.arena, hash.0);
        if let Some(place) = common.and_then(|value| self.held_block(sh, value)) {
            return Some(place);
        }
        let others: Vec<u64> = self.holders.with_aside().filter_map(|a| a.names.get(&sh.arena, hash.0)).collect();
        others.into_iter().find_map(|value| self.held_block(sh, value))
    }

    /// Returns the block of a name, if at least one engine holds it.
    #[inline]
    fn held_block(&mut self, sh: &ReaderView, value: u64) -> Option<RunPosition> {
        let place = resolve(sh, value)?;
        self.anyone_holds(sh, place.run, place.offset).then_some(place)
    }

    /// Stores blocks that an engine reported.
    pub(super) fn store(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        claim: HolderPlane,
        parent: Option<EngineHash>,
        (blocks, origin): (&[StoredBlock], Origin),
    ) -> Result<StoreEffect, UnknownParent> {
        let mut spots = self.spots(sh, blocks);
        let mut at = match parent {
            None => RunPosition { run: sh.root, offset: 0 },
            Some(hash) => {
                let place = self.parent(sh, slot, hash).ok_or(UnknownParent)?;
                RunPosition { offset: place.offset + 1, ..place }
            }
        };
        let mut rest = blocks;
        let mut effect = StoreEffect::default();
        self.shares.storing = Some(slot);
        while let Some(first) = rest.first() {
            self.guesses.pinned = at.run;
            let shape = Run::at(&sh.arena, at.run).shape();
            let same = if at.run != sh.root && at.offset < shape.len { self.same_blocks(sh, at, rest) } else { 0 };
            let done = if same > 0 {
                let part = rest.get(..same).unwrap_or_default();
                let (done, new, again) = self.take_up(sh, slot, claim, at, (part, &spots), origin);
                at.offset += done;
                effect.again += again;
                (done, new)
            } else if let Some(child) = sh.children.find_still(&sh.arena, shape, at, first.key) {
                at = RunPosition { run: child, offset: 0 };
                continue;
            } else {
                let added = self.add(sh, slot, claim, &mut at, (rest, &spots));
                effect.first += added.0;
                added
            };
            effect.new += done.1;
            rest = rest.get(done.0 as usize..).unwrap_or_default();
            if done.0 == 0 {
                self.refuse(sh, slot, rest.len() as u64);
                break;
            }
            if !rest.is_empty() {
                spots = self.spots(sh, rest);
            }
        }
        Ok(effect)
    }

    /// The table positions of the first blocks' names.
    #[inline]
    fn spots<'a>(&self, sh: &'a ReaderView, blocks: &[StoredBlock]) -> Spots<'a> {
        self.names.spots(&sh.arena, blocks.iter().map(|b| b.hash.0))
    }

    fn same_blocks(&self, sh: &ReaderView, at: RunPosition, blocks: &[StoredBlock]) -> usize {
        let run = Run::at(&sh.arena, at.run);
        let most = (run.shape().len - at.offset) as usize;
        let mut keys = [BlockKey(0); 64];
        let mut same = 0;
        for part in blocks.get(..most.min(blocks.len())).unwrap_or_default().chunks(64) {
            for (key, block) in keys.iter_mut().zip(part) {
                *key = block.key;
            }
            let part_keys = keys.get(..part.len()).unwrap_or_default();
            let found = same_tags(&sh.arena, run.tags(), at.offset + same as u32, part_keys);
            same += found;
            if found < part.len() {
                break;
            }
        }
        same
    }

    /// Adds a holder to blocks that are in the index. Returns how many of them it covers, how many of these were new to
    /// it, and how many count as another copy.
    fn take_up(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        claim: HolderPlane,
        at: RunPosition,
        (blocks, spots): (&[StoredBlock], &Spots<'_>),
        origin: Origin,
    ) -> (u32, u32, u32) {
        let header = Run::at(&sh.arena, at.run);
        let generation = header.shape().generation;
        let flags = header.shape().flags;
        let end = at.offset + blocks.len() as u32;
        let live = self.columns.live.first().copied().unwrap_or(0);
        let mut named = header.shape().len;
        if header.gpu() & live == 0 {
            self.cover.read(&sh.arena, header, &self.columns.live);
            named = self.cover.deepest(&ENGINE, None);
        }
        // Blocks before `named` have common names; a holder that uses other names keeps them in its own table. If the
        // last name matches, all before it do, because an engine's name of a block covers the blocks before it.
        let expected = pack(at.run, generation, end - 1);
        let agrees = named >= end
            && flags & (BEHIND | ALIASED) == 0
            && blocks.last().is_some_and(|b| self.names.get(&sh.arena, b.hash.0) == Some(expected));
        if !agrees && flags & BEHIND != 0 {
            named = named.max(self.behind_of(at.run).flat_map(|(_, r)| r.iter().map(|r| r.1)).max().unwrap_or(0));
        }
        self.guesses.pinned = at.run;
        let range = (at.offset, at.offset + blocks.len() as u32);
        let mut again: Vec<u32> = Vec::new();
        let held = loop {
            again.clear();
            match self.hold(sh, at.run, claim, range, |offset| again.push(offset)) {
                Ok(new) => break Ok(new),
                Err(NoRoom) if self.make_room(sh) => {}
                Err(NoRoom) => break Err(NoRoom),
            }
        };
        let Ok(new) = held else { return (0, 0, 0) };
        self.count(slot, claim.plane, new, 0);
        if origin == Origin::Reused {
            again.clear();
        }
        let copies_made = again.len() as u32;
        for offset in again {
            let key = copy_key(RunPosition { run: at.run, offset }, claim.plane);
            let copies = self.own(slot).and_then(|a| a.copies.get(&sh.arena, key)).unwrap_or(0);
            if self.set_own(sh, slot, |a| &mut a.copies, key, copies + 1).is_err() {
                // Without memory for the count of copies, the first removal drops the block. That does no harm.
                self.is_aside_short = false;
            }
        }
        if !agrees {
            let unnamed = self.name(sh, slot, at, (blocks, spots), named);
            if unnamed > 0 {
                let taken = blocks.len() as u32 - unnamed;
                let lost = self.drop_range(sh, at.run, claim, (at.offset + taken, range.1));
                self.count(slot, claim.plane, 0, lost);
                return (taken, new.saturating_sub(lost), copies_made);
            }
        }
        (blocks.len() as u32, new, copies_made)
    }

    /// Names the blocks of a run from `at` on, whose first table positions are known. Blocks before `named` have names
    /// already. Returns how many names found no memory.
    fn name<'a>(
        &mut self,
        sh: &'a ReaderView,
        slot: usize,
        at: RunPosition,
        (blocks, spots): (&[StoredBlock], &Spots<'a>),
        named: u32,
    ) -> u32 {
        let first = pack(at.run, Run::at(&sh.arena, at.run).shape().generation, 0);
        let mut offset = at.offset;
        let mut rest = blocks;
        let mut spots = *spots;
        loop {
            let (part, behind) = rest.split_at(rest.len().min(BATCH));
            let next = if behind.is_empty() { None } else { Some(self.spots(sh, behind)) };
            let mut done = 0;
            loop {
                if offset >= named {
                    let hashes = part.iter().skip(done).map(|b| b.hash.0);
                    let put = self.names.put_rising(&spots, done, hashes, first + u64::from(offset));
                    (done, offset) = (done + put, offset + put as u32);
                }
                let Some(block) = part.get(done) else { break };
                let (hash, value) = (block.hash.0, first + u64::from(offset));
                let spot = self.names.prepared(&sh.arena, &spots, done, hash);
                match self.name_one(sh, slot, (spot, hash), value, offset < named) {
                    Ok(()) => (done, offset) = (done + 1, offset + 1),
                    Err(NoRoom) if self.purge_near(sh, slot, block.hash) || self.make_room(sh) => {}
                    Err(NoRoom) => return (rest.len() - done) as u32,
                }
            }
            let Some(next) = next else { return 0 };
            (rest, spots) = (behind, next);
        }
    }

    fn name_one<'a>(
        &mut self,
        sh: &'a ReaderView,
        slot: usize,
        name: (Spot<'a>, u64),
        value: u64,
        is_named: bool,
    ) -> Result<(), NoRoom> {
        let taken = if is_named {
            Some(WordTable::find(name.0, name.1).map_or(0, |found| found.value))
        } else {
            let Self { names, space, behind, columns, .. } = self;
            let live = columns.live.as_slice();
            let is_stale = |old| old != value && !is_held(sh, behind, live, old);
            names.claim(&sh.arena, space, name, value, is_stale)?
        };
        match taken {
            None => Ok(()),
            Some(same) if same == value => Ok(()),
            Some(_) => {
                Run::at(&sh.arena, unpack(value).0).set_flags(ALIASED);
                self.set_own(sh, slot, |a| &mut a.names, name.1, value)?;
                self.limit_own_names(sh, slot);
                Ok(())
            }
        }
    }

    /// Adds blocks that are not in the index behind `at`, as many as fit in one run. Returns the number of
    /// processed and of added blocks.
    fn add(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        claim: HolderPlane,
        at: &mut RunPosition,
        (blocks, spots): (&[StoredBlock], &Spots<'_>),
    ) -> (u32, u32) {
        let mut most = blocks.len().min(MAX_RUN as usize);
        let added = loop {
            let part = blocks.get(..most).unwrap_or_default();
            let keys = part.iter().map(|b| b.key);
            let done = match self.extend(sh, *at, keys.clone(), claim) {
                Ok(Some(more)) => Ok(more),
                Ok(None) => self.hang(sh, *at, keys, claim).map(|run| {
                    *at = RunPosition { run, offset: 0 };
                    part.len() as u32
                }),
                Err(no_room) => Err(no_room),
            };
            match done {
                Ok(done) => break done,
                Err(NoRoom) if self.make_room(sh) => {}
                // The free memory may be fragmented, so shorter runs are tried.
                Err(NoRoom) if most > 64 => most /= 2,
                Err(NoRoom) => return (0, 0),
            }
        };
        self.count(slot, claim.plane, added, 0);
        self.guesses.pinned = at.run;
        let unnamed = self.name(sh, slot, *at, (blocks.get(..added as usize).unwrap_or_default(), spots), 0);
        at.offset += added;
        if unnamed > 0 {
            let lost = self.drop_range(sh, at.run, claim, (at.offset - unnamed, at.offset));
            self.count(slot, claim.plane, 0, lost);
            // The rest would find no memory either.
            self.refuse(sh, slot, (blocks.len() as u32 - added + lost) as u64);
            return (blocks.len() as u32, added - lost);
        }
        (added, added)
    }

    /// Stores blocks on another tier by their names. Returns the number of names up to the first block that the holder
    /// does not have, and how many of these blocks are new on this tier.
    pub(super) fn copy(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        claim: HolderPlane,
        names: impl IntoIterator<Item = EngineHash>,
        origin: Origin,
    ) -> (usize, u32) {
        let (mut known, mut new) = (0, 0);
        self.shares.storing = Some(slot);
        for hash in names {
            let Some(at) = self.held_by(sh, slot, claim.column, hash) else { break };
            known += 1;
            // For a block in the index, only the name is used.
            let block = [StoredBlock { hash, key: BlockKey(0) }];
            let spots = self.spots(sh, &block);
            let (taken, more, _) = self.take_up(sh, slot, claim, at, (&block, &spots), origin);
            if taken == 0 {
                self.refuse(sh, slot, 1);
            }
            new += more;
        }
        (known, new)
    }

    /// Returns the block of a holder's name, if the holder has it on any tier.
    fn held_by(&mut self, sh: &ReaderView, slot: usize, column: Column, hash: EngineHash) -> Option<RunPosition> {
        let own = self.own(slot).and_then(|a| a.names.get(&sh.arena, hash.0));
        let common = self.names.get(&sh.arena, hash.0);
        let places = [own, common].into_iter().flatten().filter_map(|value| resolve(sh, value));
        places
            .into_iter()
            .find(|at| ENGINE.into_iter().any(|plane| self.holds(sh, at.run, at.offset, HolderPlane { plane, column })))
    }

    /// Returns the names of the blocks that a holder has on a tier.
    pub(super) fn names_of(&mut self, sh: &ReaderView, slot: usize, claim: HolderPlane) -> Vec<EngineHash> {
        let own = self.own(slot).map(|a| a.names.iter(&sh.arena).collect::<Vec<_>>()).unwrap_or_default();
        let common: Vec<(u64, u64)> = self.names.iter(&sh.arena).collect();
        let is_mine = |w: &mut Self, value: u64| {
            resolve(sh, value).is_some_and(|p| w.holds(sh, p.run, p.offset, claim)).then_some(value)
        };
        let mut found: Vec<EngineHash> = Vec::new();
        let mut by_own_name = std::collections::HashSet::new();
        for (hash, value) in own {
            if let Some(value) = is_mine(self, value) {
                by_own_name.insert(value);
                found.push(EngineHash(hash));
            }
        }
        for (hash, value) in common {
            // A block with an own name is not counted again under its common name.
            if is_mine(self, value).is_some_and(|v| !by_own_name.contains(&v)) {
                found.push(EngineHash(hash));
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// Memory charged for a holder's own tables outside the arena, in bytes.
const ASIDE_BYTES: usize = size_of::<Aside>() + ASIDE_ENTRY;
