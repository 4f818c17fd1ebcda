//! The writer's state behind one lock, and its basic changes: create, extend, shorten and free a run; add and remove a
//! column's part of a run.

use super::arena::{Addr, Space, order_for, words_of};
use super::columns::Columns;
use super::cover::{self, COUNTED, Column, Cover, ENGINE, GPU, GUESS, LEVELS, Plane, REACH};
use super::guess::Guesses;
use super::holders::{Holder, Holders};
use super::ranges::{Range, cut, cutoff_of, join, total};
use super::run::{BEHIND, FROZEN, GUESSED, MAX_RUN, Run, RunPosition, RunShape, write_tags};
use super::shares::Shares;
use super::table::{NoRoom, WordTable};
use super::{ReaderView, Stats};
use crate::key::BlockKey;
use std::collections::BTreeMap;

/// Headers that are allocated at once.
pub(super) const HEADERS: u32 = 64;

/// Estimated memory of a map entry outside the arena, in bytes.
pub(super) const ASIDE_ENTRY: usize = 96;

#[derive(Debug)]
pub(super) struct Writer {
    pub(super) space: Space,
    pub(super) names: WordTable,
    pub(super) holders: Holders,
    pub(super) columns: Columns,
    pub(super) guesses: Guesses,
    pub(super) shares: Shares,
    /// Blocks that columns hold behind a gap, by (run, column, plane).
    pub(super) behind: BTreeMap<(Addr, Column, u8), Vec<Range>>,
    pub(super) cover: Cover,
    pub(super) header_pages: Vec<Addr>,
    free_headers: Addr,
    pub(super) stats: Stats,
    /// Bytes of entries outside the arena, and their limit.
    pub(super) aside: usize,
    pub(super) aside_limit: usize,
    /// Whether the last allocation failed for memory outside the arena.
    pub(super) is_aside_short: bool,
    /// See `PrefixIndex::set_max_blocks`.
    pub(super) max_blocks: Option<u64>,
    ranges: Vec<Range>,
}

/// Column and plane that a new or longer run is for.
#[derive(Clone, Copy, Debug)]
pub(super) struct HolderPlane {
    pub(super) plane: Plane,
    pub(super) column: Column,
}

impl Writer {
    pub(super) fn new(
        space: Space,
        names: WordTable,
        holders: Holders,
        columns: Columns,
        guesses: Guesses,
        aside_limit: usize,
    ) -> Self {
        Self {
            space,
            names,
            holders,
            columns,
            guesses,
            shares: Shares::default(),
            behind: BTreeMap::new(),
            cover: Cover::default(),
            header_pages: Vec::new(),
            free_headers: 0,
            stats: Stats::default(),
            aside: 0,
            aside_limit,
            is_aside_short: false,
            max_blocks: None,
            ranges: Vec::new(),
        }
    }

    /// Takes a free header, which is not attached to a parent.
    pub(super) fn take_header(&mut self, sh: &ReaderView) -> Result<Addr, NoRoom> {
        if self.free_headers == 0 {
            let page = self.space.alloc(&sh.arena, order_for(HEADERS * 8)).ok_or(NoRoom)?;
            for word in 0..HEADERS * 8 {
                sh.arena.store(page + word, 0);
            }
            for header in (0..HEADERS).rev().map(|h| page + h * 8) {
                Run::at(&sh.arena, header).vacate();
                Run::at(&sh.arena, header).set_next(self.free_headers);
                self.free_headers = header;
            }
            self.header_pages.push(page);
        }
        let header = self.free_headers;
        self.free_headers = Run::at(&sh.arena, header).next();
        Ok(header)
    }

    pub(super) fn return_header(&mut self, sh: &ReaderView, header: Addr) {
        let run = Run::at(&sh.arena, header);
        // A header whose generations are used up is not reused: an old name could match a new run.
        if run.shape().generation != 0 {
            run.set_next(self.free_headers);
            self.free_headers = header;
        }
    }

    /// Attaches a new run of `keys` (1 to [`MAX_RUN`] of them) at `place`, held by `claim`.
    pub(super) fn hang<I>(
        &mut self,
        sh: &ReaderView,
        place: RunPosition,
        keys: I,
        claim: HolderPlane,
    ) -> Result<Addr, NoRoom>
    where
        I: ExactSizeIterator<Item = BlockKey> + Clone,
    {
        let len = keys.len() as u32;
        let Some(key) = keys.clone().next() else { return Err(NoRoom) };
        let header = self.take_header(sh)?;
        let order = order_for(len.div_ceil(2));
        let Some(tags) = self.space.alloc(&sh.arena, order) else {
            self.return_unused(sh, header);
            return Err(NoRoom);
        };
        write_tags(&sh.arena, tags, 0, keys);
        let run = Run::at(&sh.arena, header);
        run.open();
        run.fill(place, sh.children.part(place.run, key), tags, len, order);
        let covered = self.cover_new(sh, run, claim);
        self.stats.runs += 1;
        // Closed only after it is linked in its bucket: a reader may still be at this header from its previous use.
        if covered.is_err() || !self.children_insert(sh, header) {
            self.stats.runs -= 1;
            cover::drop_beside(&sh.arena, &mut self.space, run);
            run.vacate();
            run.close();
            self.space.free(&sh.arena, tags, order);
            self.return_header(sh, header);
            return Err(NoRoom);
        }
        run.close();
        self.stats.blocks += len as usize;
        let parent = Run::at(&sh.arena, place.run);
        parent.set_children(parent.children() + 1);
        parent.set_last_fork(parent.last_fork().max(place.offset));
        let shape = parent.shape();
        parent.set_shape(RunShape { forks: shape.forks | 1 << (place.offset % 16), ..shape });
        Ok(header)
    }

    fn children_insert(&mut self, sh: &ReaderView, header: Addr) -> bool {
        sh.children.insert(&sh.arena, &mut self.space, self.stats.runs, header)
    }

    fn return_unused(&mut self, sh: &ReaderView, header: Addr) {
        Run::at(&sh.arena, header).set_next(self.free_headers);
        self.free_headers = header;
    }

    fn cover_new(&mut self, sh: &ReaderView, run: Run<'_>, claim: HolderPlane) -> Result<(), NoRoom> {
        let bit = 1u64.checked_shl(u32::from(claim.column)).unwrap_or(0);
        match claim.plane {
            GPU if bit != 0 => run.set_gpu(bit),
            GUESS if bit != 0 => run.set_guess(bit),
            _ => {
                self.cover.read(&sh.arena, run, &self.columns.live);
                self.cover.set(claim.plane, claim.column, run.shape().len);
                self.cover.write(&sh.arena, &mut self.space, run)?;
            }
        }
        Ok(())
    }

    /// Whether `at` is the end of a run that `claim` alone holds completely, so that the run may be extended.
    fn may_extend(&mut self, sh: &ReaderView, header: Run<'_>, at: RunPosition, claim: HolderPlane) -> bool {
        let shape = header.shape();
        if at.run == sh.root || at.offset != shape.len || shape.len >= MAX_RUN || shape.flags & FROZEN != 0 {
            return false;
        }
        if header.cover() == 0 {
            let live = self.columns.live.first().copied().unwrap_or(0);
            let bit = 1u64.checked_shl(u32::from(claim.column)).unwrap_or(0);
            let own = if claim.plane == GUESS { header.guess() } else { header.gpu() };
            let inline = claim.plane == GPU || claim.plane == GUESS;
            return inline && own & bit != 0 && (header.gpu() | header.guess()) & live == bit;
        }
        self.cover.read(&sh.arena, header, &self.columns.live);
        self.cover.cutoff(claim.plane, claim.column) == shape.len && !self.cover.is_full_for_others(claim.column)
    }

    /// Extends the run that ends at `at` by as many of `keys` as fit, and returns how many. Returns `None` where the
    /// run must not be extended: others hold it, or it does not end at `at`.
    pub(super) fn extend<I>(
        &mut self,
        sh: &ReaderView,
        at: RunPosition,
        keys: I,
        claim: HolderPlane,
    ) -> Result<Option<u32>, NoRoom>
    where
        I: ExactSizeIterator<Item = BlockKey>,
    {
        let header = Run::at(&sh.arena, at.run);
        if !self.may_extend(sh, header, at, claim) {
            return Ok(None);
        }
        let shape = header.shape();
        let more = (keys.len() as u32).min(MAX_RUN - shape.len);
        let len = shape.len + more;
        let order = order_for(len.div_ceil(2)).max(shape.order);
        let mut tags = header.tags();
        if order > shape.order {
            let old = tags;
            tags = self.space.alloc(&sh.arena, order).ok_or(NoRoom)?;
            sh.arena.copy(old, tags, shape.len.div_ceil(2));
        }
        header.open();
        let live = self.columns.live.first().copied().unwrap_or(0);
        let alone = header.cover() == 0 && (header.gpu() & live == 0 || header.guess() & live == 0);
        if !alone {
            self.cover.read(&sh.arena, header, &self.columns.live);
            self.cover.resize(len);
            self.cover.set(claim.plane, claim.column, len);
            if let Err(no_room) = self.cover.write(&sh.arena, &mut self.space, header) {
                header.close();
                if tags != header.tags() {
                    self.space.free(&sh.arena, tags, order);
                }
                return Err(no_room);
            }
        }
        let old = header.tags();
        write_tags(&sh.arena, tags, shape.len, keys.take(more as usize));
        header.set_extents(tags, header.cover());
        header.set_shape(RunShape { len, order, ..header.shape() });
        header.close();
        if old != tags {
            sh.children.moved(&sh.arena, at.run);
            self.space.free(&sh.arena, old, shape.order);
        }
        self.stats.blocks += more as usize;
        Ok(Some(more))
    }

    /// Returns how many blocks from the run's start a column has on a plane.
    pub(super) fn cutoff(&mut self, sh: &ReaderView, run: Addr, claim: HolderPlane) -> u32 {
        let header = Run::at(&sh.arena, run);
        if header.cover() == 0 {
            let inline = match claim.plane {
                GPU => header.gpu(),
                GUESS => header.guess(),
                _ => 0,
            };
            let held = inline & 1u64.checked_shl(u32::from(claim.column)).unwrap_or(0) != 0;
            return if held { header.shape().len } else { 0 };
        }
        self.cover.read(&sh.arena, header, &self.columns.live);
        self.cover.cutoff(claim.plane, claim.column)
    }

    /// Whether a column has a block of a run on a plane.
    pub(super) fn holds(&mut self, sh: &ReaderView, run: Addr, offset: u32, claim: HolderPlane) -> bool {
        offset < self.cutoff(sh, run, claim)
            || (Run::at(&sh.arena, run).has(BEHIND)
                && self
                    .behind
                    .get(&(run, claim.column, claim.plane as u8))
                    .is_some_and(|r| r.iter().any(|(from, to)| *from <= offset && offset < *to)))
    }

    /// Whether at least one engine has reported a block and not dropped it.
    pub(super) fn anyone_holds(&mut self, sh: &ReaderView, run: Addr, offset: u32) -> bool {
        let header = Run::at(&sh.arena, run);
        let live = self.columns.live.first().copied().unwrap_or(0);
        if header.gpu() & live != 0 {
            return true;
        }
        if header.cover() == 0 && !header.has(BEHIND) {
            return false;
        }
        self.cover.read(&sh.arena, header, &self.columns.live);
        self.cover.deepest(&ENGINE, None) > offset
            || (header.has(BEHIND)
                && self.behind_of(run).any(|(_, ranges)| ranges.iter().any(|(a, b)| *a <= offset && offset < *b)))
    }

    pub(super) fn behind_of(&self, run: Addr) -> impl Iterator<Item = (&(Addr, Column, u8), &Vec<Range>)> {
        let all = self.behind.range((run, 0, 0)..=(run, Column::MAX, u8::MAX));
        all.filter(|((_, column, _), _)| cover::bit(&self.columns.live, *column))
    }

    /// Adds blocks `from..to` of a run to a column. Returns how many are new to it; calls `again` for each that it had.
    pub(super) fn hold(
        &mut self,
        sh: &ReaderView,
        run: Addr,
        claim: HolderPlane,
        (from, to): Range,
        mut again: impl FnMut(u32),
    ) -> Result<u32, NoRoom> {
        let header = Run::at(&sh.arena, run);
        let shape = header.shape();
        if header.cover() == 0 && shape.flags & BEHIND == 0 {
            let bit = 1u64.checked_shl(u32::from(claim.column)).unwrap_or(0);
            let inline = match claim.plane {
                GPU => Some(header.gpu()),
                GUESS => Some(header.guess()),
                _ => None,
            };
            if let Some(columns) = inline.filter(|_| bit != 0) {
                if columns & bit != 0 {
                    (from..to).for_each(again);
                    return Ok(0);
                }
                if from == 0 && to == shape.len {
                    header.open();
                    if claim.plane == GPU {
                        header.set_gpu(columns | bit)
                    } else {
                        header.set_guess(columns | bit)
                    }
                    header.close();
                    return Ok(to);
                }
            }
        }
        self.read_ranges(sh, run, claim);
        for (a, b) in &self.ranges {
            (from.max(*a)..to.min(*b)).for_each(&mut again);
        }
        let before = total(&self.ranges);
        join(&mut self.ranges, (from, to));
        let after = total(&self.ranges);
        if after == before {
            return Ok(0);
        }
        let first = cutoff_of(&self.ranges);
        if !self.remember_behind(sh, run, claim) {
            self.is_aside_short = true;
            return Err(NoRoom);
        }
        let before_it = self.cover.cutoff(claim.plane, claim.column);
        self.cover.set(claim.plane, claim.column, first);
        self.reach(sh, run, claim.column);
        header.open();
        let written = self.cover.write(&sh.arena, &mut self.space, header);
        header.close();
        if let Err(no_room) = written {
            // Blocks behind gaps are dropped together with those that would have filled the gaps.
            self.keep_less(sh, run, Some((claim, before_it)));
            let behind = before - before_it;
            self.holders.count(self.columns.slot(claim.column), claim.plane, 0, behind);
            return Err(no_room);
        }
        Ok(after - before)
    }

    /// Removes blocks `from..to` of a run from a column. Returns how many it had. The run may be freed.
    pub(super) fn drop_range(&mut self, sh: &ReaderView, run: Addr, claim: HolderPlane, (from, to): Range) -> u32 {
        let header = Run::at(&sh.arena, run);
        let shape = header.shape();
        if from < shape.len && shape.len <= to && from >= header.needed() && self.is_sole(header, claim) {
            // The usual case: a tail that no other holder has and that has no children.
            if header.children() == 0 && from == 0 {
                self.free_run(sh, run);
            } else {
                header.open();
                self.shorten(sh, header, from);
                header.close();
            }
            return shape.len - from;
        }
        self.read_ranges(sh, run, claim);
        let before = total(&self.ranges);
        cut(&mut self.ranges, (from, to));
        let mut after = total(&self.ranges);
        if after == before {
            return 0;
        }
        let first = cutoff_of(&self.ranges);
        if !self.remember_behind(sh, run, claim) {
            after = first;
            self.behind_remove(run, claim);
        }
        self.cover.set(claim.plane, claim.column, first);
        self.reach(sh, run, claim.column);
        if !self.settle(sh, run, Some(claim)) {
            after = 0;
        }
        before - after
    }

    /// Whether the header alone has the run's coverage, and only `claim` holds the run, all of it.
    fn is_sole(&self, header: Run<'_>, claim: HolderPlane) -> bool {
        let live = self.columns.live.first().copied().unwrap_or(0);
        let bit = 1u64.checked_shl(u32::from(claim.column)).unwrap_or(0);
        let gpu = header.gpu() & live;
        let is_told_of_here = header.cover() == 0 && !header.has(BEHIND | GUESSED) && header.guess() & live == 0;
        claim.plane == GPU && gpu != 0 && gpu == bit && is_told_of_here
    }

    /// Updates the combined length of each level's planes, where some hold blocks behind a gap.
    fn reach(&mut self, sh: &ReaderView, run: Addr, column: Column) {
        if !Run::at(&sh.arena, run).has(BEHIND) {
            return;
        }
        for (level, planes) in LEVELS.into_iter().enumerate() {
            let mut together: Vec<Range> = Vec::new();
            let mut alone = 0;
            for plane in COUNTED.into_iter().filter(|p| planes & 1 << p != 0) {
                let cutoff = self.cover.cutoff(plane, column);
                alone = alone.max(cutoff);
                let behind = self.behind.get(&(run, column, plane as u8)).into_iter().flatten().copied();
                for range in behind.chain((cutoff > 0).then_some((0, cutoff))) {
                    join(&mut together, range);
                }
            }
            let reach = cutoff_of(&together);
            self.cover.set(REACH + level, column, if reach > alone { reach } else { 0 });
        }
    }

    fn read_ranges(&mut self, sh: &ReaderView, run: Addr, claim: HolderPlane) {
        let header = Run::at(&sh.arena, run);
        self.cover.read(&sh.arena, header, &self.columns.live);
        self.ranges.clear();
        let cutoff = self.cover.cutoff(claim.plane, claim.column);
        if cutoff > 0 {
            self.ranges.push((0, cutoff));
        }
        if header.has(BEHIND)
            && let Some(more) = self.behind.get(&(run, claim.column, claim.plane as u8))
        {
            self.ranges.extend(more);
        }
    }

    /// Stores the ranges that do not begin at the run's start. Returns false when there is no memory for them.
    fn remember_behind(&mut self, sh: &ReaderView, run: Addr, claim: HolderPlane) -> bool {
        let holes = match self.ranges.as_slice() {
            [(0, _), rest @ ..] => rest,
            all => all,
        };
        let header = Run::at(&sh.arena, run);
        if holes.is_empty() {
            if header.has(BEHIND) {
                self.behind_remove(run, claim);
            }
            return true;
        }
        // A holder may have as much as is left for others, so that no holder takes all of it.
        let (bytes, left) = (ASIDE_ENTRY + size_of_val(holes), self.aside_limit.saturating_sub(self.aside));
        let own = self.holders.get(self.columns.slot(claim.column)).map_or(0, |holder| holder.behind);
        if own + bytes > left {
            return false;
        }
        let holes = holes.to_vec();
        self.behind_remove(run, claim);
        self.aside += bytes;
        if let Some(holder) = self.holder_of(claim.column) {
            holder.behind += bytes;
        }
        self.behind.insert((run, claim.column, claim.plane as u8), holes);
        header.set_flags(BEHIND);
        true
    }

    pub(super) fn behind_remove(&mut self, run: Addr, claim: HolderPlane) {
        if let Some(old) = self.behind.remove(&(run, claim.column, claim.plane as u8)) {
            let bytes = ASIDE_ENTRY + size_of_val(&*old);
            self.aside -= bytes;
            if let Some(holder) = self.holder_of(claim.column) {
                holder.behind = holder.behind.saturating_sub(bytes);
            }
        }
    }

    /// The holder that has this column now.
    fn holder_of(&mut self, column: Column) -> Option<&mut Holder> {
        self.holders.get_mut(self.columns.slot(column)).filter(|holder| holder.column == Some(column))
    }

    /// Words that a run takes in the arena, for the bill of its tenant.
    pub(super) fn words(&self, sh: &ReaderView, run: Addr) -> u32 {
        let header = Run::at(&sh.arena, run);
        8 + words_of(header.shape().order) + cover::beside_words(&sh.arena, header)
    }

    /// Number of blocks of a holder on all planes.
    pub(super) fn total(&self, slot: usize) -> u32 {
        self.holders.get(slot).map_or(0, |h| h.blocks.iter().sum())
    }

    /// Counts blocks by plane, for [`super::PrefixIndex::blocks`].
    pub(super) fn count(&mut self, slot: usize, plane: Plane, more: u32, less: u32) {
        debug_assert!(plane < COUNTED.len());
        self.holders.count(slot, plane, more, less);
    }
}
