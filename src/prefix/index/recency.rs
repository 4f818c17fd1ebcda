//! Times of use of estimated blocks, and the place of imported blocks among those that were used before.

use super::ReaderView;
use super::TenantId;
use super::arena::{Addr, order_for, pair};
use super::cover::Column;
use super::guess::{NODE, NODE_WORDS, OF_ALL, OF_HOLDER, key};
use super::list::{ListEnds, insert};
use super::run::Run;
use super::table::NoRoom;
use super::writer::Writer;
use attache_types::clock::Timestamp;

/// The unit is 2^24 ns, about 17 ms.
const SHIFT: u32 = 24;
/// The moment of the clock's origin. Imported blocks may have been used up to 52 days before it.
const ORIGIN: u64 = 1 << 28;
const NS_PER_MS: u64 = 1_000_000;
/// Most segments that are compared to find the place of one. It limits how long the writer holds the lock.
const MAX_COMPARED: usize = 512;

/// Time of use of a segment of estimated blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Moment(pub(super) u32);

impl Moment {
    pub(super) fn of(now: Timestamp) -> Self {
        Self((ORIGIN + (now.0 >> SHIFT)).min(u64::from(u32::MAX)) as u32)
    }

    /// The moment `age_ms` milliseconds before `now`.
    pub(super) fn before(now: Timestamp, age_ms: u32) -> Self {
        let age = u64::from(age_ms) * NS_PER_MS;
        let at = ((ORIGIN << SHIFT) + now.0).saturating_sub(age) >> SHIFT;
        Self(at.min(u64::from(u32::MAX)) as u32)
    }

    /// Returns the time from this moment to `now`, in milliseconds.
    pub(super) fn age_ms(self, now: Timestamp) -> u32 {
        let age = ((ORIGIN << SHIFT) + now.0).saturating_sub(u64::from(self.0) << SHIFT) / NS_PER_MS;
        age.min(u64::from(u32::MAX)) as u32
    }
}

/// A segment of estimated blocks: the blocks from the previous segment's end up to `to`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Segment {
    pub(super) addr: Addr,
    pub(super) to: u32,
    pub(super) moment: Moment,
}

impl Writer {
    /// Iterates over a column's segments of a run, from the run's start and from the newest on.
    pub(super) fn segments<'a>(
        &self,
        sh: &'a ReaderView,
        run: Addr,
        column: Column,
    ) -> impl Iterator<Item = Segment> + use<'a> {
        let mut at = self.guesses.table.get(&sh.arena, key(run, column)).unwrap_or(0) as Addr;
        std::iter::from_fn(move || {
            let addr = at;
            (addr != 0).then(|| {
                at = sh.arena.low(addr + 3);
                Segment { addr, to: sh.arena.high(addr + 1), moment: moment_of(sh, addr) }
            })
        })
    }

    /// Adds the blocks behind a column's last segment of a run, up to `to`, as used at `moment` or as long ago as the
    /// blocks before them.
    pub(super) fn add_segment(
        &mut self,
        sh: &ReaderView,
        column: Column,
        (run, to): (Addr, u32),
        moment: Moment,
    ) -> Result<(), NoRoom> {
        let slot = self.columns.slot(column);
        let mut ends = self.holders.get(slot).map(|h| ListEnds { newest: h.newest, oldest: h.oldest }).ok_or(NoRoom)?;
        let last = self.segments(sh, run, column).last();
        let before = last.or_else(|| self.segment_before(sh, run, column));
        let moment = before.map_or(moment, |before| moment.min(before.moment));
        let segment = self.space.alloc(&sh.arena, order_for(NODE_WORDS)).ok_or(NoRoom)?;
        if let Some(last) = last {
            sh.arena.set_low(last.addr + 3, segment);
        } else if let Err(no_room) =
            self.guesses.table.set(&sh.arena, &mut self.space, key(run, column), u64::from(segment))
        {
            self.space.free(&sh.arena, segment, order_for(NODE_WORDS));
            return Err(no_room);
        }
        let (older, moment) = place(sh, ends, before.map_or(0, |before| before.addr), moment);
        sh.arena.store(segment, pair(run, u32::from(column)));
        sh.arena.store(segment + 1, pair(last.map_or(0, |last| last.to), to));
        sh.arena.store(segment + 3, pair(0, moment.0));
        insert(sh, OF_HOLDER, &mut ends, segment, older);
        if let Some(holder) = self.holders.get_mut(slot) {
            (holder.newest, holder.oldest) = (ends.newest, ends.oldest);
        }
        Ok(())
    }

    /// The column's segment with the block before a run. It must be newer than the run's segments, since
    /// an eviction removes the blocks behind those that it evicts from other runs only if they are older.
    fn segment_before(&self, sh: &ReaderView, run: Addr, column: Column) -> Option<Segment> {
        let place = Run::at(&sh.arena, run).place();
        let mut segments = self.segments(sh, place.run, column);
        let mut last = None;
        for segment in segments.by_ref() {
            last = Some(segment);
            if segment.to >= place.offset {
                break;
            }
        }
        last
    }

    /// Whether a run is billed to a tenant.
    pub(super) fn has_node(&self, sh: &ReaderView, run: Addr) -> bool {
        self.guesses.table.get(&sh.arena, key(run, NODE)).is_some()
    }

    /// Bills a run that has no tenant yet to `tenant`, as the least recently used of all runs.
    pub(super) fn adopt_run(&mut self, sh: &ReaderView, run: Addr, tenant: TenantId) -> Result<(), NoRoom> {
        if !self.has_node(sh, run) {
            if !self.add_tenant(sh, tenant) {
                return Err(NoRoom);
            }
            let node = match self.create_node(sh, run, tenant) {
                Ok(node) => node,
                Err(no_room) => {
                    self.forget_tenant(sh, tenant);
                    return Err(no_room);
                }
            };
            insert(sh, OF_ALL, &mut self.guesses.all, node, 0);
            self.add_oldest_run(sh, tenant, node);
        }
        self.charge(sh, run);
        Ok(())
    }
}

pub(super) fn moment_of(sh: &ReaderView, segment: Addr) -> Moment {
    Moment(sh.arena.high(segment + 3))
}

/// Finds the segment before which one of `moment` belongs in its holder's list, or 0 for the end, behind `before`. It
/// searches from both ends. Where neither search finds the place, the segment becomes the oldest.
fn place(sh: &ReaderView, ends: ListEnds, before: Addr, moment: Moment) -> (Addr, Moment) {
    let older = |segment: Addr| sh.arena.high(segment + OF_HOLDER.0);
    let mut newer_end = if before == 0 { ends.newest } else { older(before) };
    let mut older_end = ends.oldest;
    for _ in 0..MAX_COMPARED / 2 {
        if newer_end == 0 || moment_of(sh, newer_end) < moment {
            return (newer_end, moment);
        }
        if older_end == before || moment_of(sh, older_end) >= moment {
            return (older(older_end), moment);
        }
        newer_end = older(newer_end);
        older_end = sh.arena.low(older_end + OF_HOLDER.0);
    }
    (0, moment.min(moment_of(sh, ends.oldest)))
}

#[cfg(test)]
impl Writer {
    /// Panics where a holder's segments are not in the order of their use, where one is older than a segment behind it,
    /// or where they differ from the blocks that the holder has.
    pub(super) fn check_recency(&self, sh: &ReaderView) {
        // An eviction for memory may leave blocks behind those that it evicts, which an import then brings back.
        // Without memory for its cutoff, a holder loses all blocks of a run, and its segments stay.
        let super::Stats { evicted_for_budget, evicted_for_tenant, refused_blocks, .. } = self.stats;
        let was_short = evicted_for_budget + evicted_for_tenant + refused_blocks > 0;
        for (slot, holder) in (0..).map_while(|slot| Some((slot, self.holders.get(slot)?))) {
            let (mut at, mut blocks, mut seen) = (holder.newest, 0, std::collections::BTreeSet::new());
            let mut last = Moment(u32::MAX);
            while at != 0 {
                let (run, column) = (sh.arena.low(at), sh.arena.high(at) as Column);
                assert_eq!(self.columns.slot(column), slot);
                let before = self.segments(sh, run, column).take_while(|segment| segment.addr != at).last();
                let before = before.or_else(|| self.segment_before(sh, run, column));
                let in_order = before.is_none_or(|before| seen.contains(&before.addr));
                assert!(in_order || was_short, "a segment is older than the next");
                assert!(moment_of(sh, at) <= last, "the list is sorted");
                last = moment_of(sh, at);
                blocks += sh.arena.high(at + 1) - sh.arena.low(at + 1);
                seen.insert(at);
                at = sh.arena.high(at + OF_HOLDER.0);
            }
            let held = holder.blocks[super::cover::GUESS];
            assert!(blocks == held || was_short && blocks > held, "{blocks} of {held} blocks of holder {slot}");
        }
    }
}
