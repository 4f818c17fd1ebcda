//! Estimated blocks: prompts that were routed to a holder, evicted least recently used first.
//!
//! Two orders are kept. For each holder, segments of runs by their last use: a prompt touches the first blocks
//! of a run, so a run is divided into segments by age, and the oldest segment of a holder is always a tail. For
//! each tenant, and for all together, the runs that its prompts have made; these count towards the memory limit.
//! When memory is exhausted, the tenant that is furthest over its share ([`super::tenants`]) loses runs first.
//! Among tenants within their shares, only age counts. A prompt touches its deepest run first, so that a tail is
//! always evicted before its head.
//!
//! Nodes are in the arena, four words each. A segment: run and column; first and last block; previous and next
//! segment of the holder; next deeper segment of its run and time of use. A run's node: run and the tenant that
//! is billed; previous and next of all; previous and next of the tenant; bytes, and another tenant that uses
//! it, or the same tenant.

use super::arena::{Addr, order_for, pair};
use super::cover::{Column, GUESS};
use super::list::{List, ListEnds, push, unlink};
use super::recency::Moment;
use super::run::{GUESSED, MAX_RUN, Run, RunPosition, same_tags};
use super::table::{NoRoom, WordTable};
use super::tenants::Tenants;
use super::writer::{HolderPlane, Writer};
use super::{ReaderView, TenantId};
use crate::key::BlockKey;
use attache_types::clock::Timestamp;

pub(super) const NODE_WORDS: u32 = 4;
/// Bytes of a segment and its entry in the table.
const SEGMENT_BYTES: u32 = 56;
/// Bytes of a run's node, its entry in the table and its bucket.
const RUN_BYTES: u32 = 64;
/// Column in the table's key that stands for a run's node.
pub(super) const NODE: Column = Column::MAX;
/// Most runs that change their tenant before one is evicted. It limits how long the writer holds the lock.
pub(super) const PASSED_AT_ONCE: u32 = 32;

/// The lists of segments and runs.
#[derive(Debug)]
pub(super) struct Guesses {
    /// Maps (run, column) to the column's newest segment of the run, and (run, [`NODE`]) to the run's node.
    pub(super) table: WordTable,
    pub(super) all: ListEnds,
    pub(super) tenants: Tenants,
    /// The runs of the prompt that is being recorded, with the number of matching blocks. They are not evicted.
    pub(super) path: Vec<(Addr, u32)>,
    /// A run whose blocks are being added, or 0; it is not evicted.
    pub(super) pinned: Addr,
}

pub(super) fn key(run: Addr, column: Column) -> u64 {
    u64::from(run) << 16 | u64::from(column)
}

pub(super) const OF_HOLDER: List = List(2);
pub(super) const OF_ALL: List = List(1);

impl Guesses {
    /// Empty lists; each tenant's share is `part` of the memory available to estimates.
    pub(super) fn new(table: WordTable, part: f64) -> Self {
        Self { table, all: ListEnds::default(), tenants: Tenants::new(part), path: Vec::new(), pinned: 0 }
    }
}

impl Writer {
    /// Records that a holder has served a prompt. Returns how many of its blocks are new to the holder.
    pub(super) fn record(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        column: Column,
        keys: &[BlockKey],
        tenant: TenantId,
        now: Timestamp,
    ) -> u32 {
        let capacity = self.holders.get(slot).map_or(0, |h| h.capacity);
        let keys = keys.get(..keys.len().min(capacity as usize)).unwrap_or_default();
        if keys.is_empty() || !self.admit(sh, tenant) {
            return 0;
        }
        let claim = HolderPlane { plane: GUESS, column };
        self.guesses.pinned = 0;
        self.shares.storing = None;
        self.guesses.tenants.recording = Some((tenant, u64::from(RUN_BYTES + SEGMENT_BYTES)));
        let known = self.walk(sh, keys);
        let rest = keys.get(known..).unwrap_or_default();
        let mut new = self.hold_path(sh, slot, claim);
        if new.1 {
            new.0 += self.grow_path(sh, slot, claim, rest, tenant);
        }
        let moment = Moment::of(now);
        // The run stays on the path meanwhile, so that freeing memory does not evict it.
        while let Some((run, matched)) = self.guesses.path.last().copied() {
            if self.touch(sh, slot, column, (run, matched), moment).is_err() {
                self.forget(sh, run, column);
            } else {
                let _ = self.touch_run(sh, run, tenant);
            }
            self.guesses.path.pop();
        }
        self.keep_capacity(sh, slot);
        self.guesses.tenants.recording = None;
        self.forget_tenant(sh, tenant);
        new.0
    }

    /// Collects the runs that match the prompt in the path. Returns how many blocks they match.
    pub(super) fn walk(&mut self, sh: &ReaderView, keys: &[BlockKey]) -> usize {
        let mut path = std::mem::take(&mut self.guesses.path);
        path.clear();
        let done = self.matching(sh, keys, |run, same| path.push((run, same)));
        self.guesses.path = path;
        done
    }

    /// Calls `each` for the runs that match the prompt, with the number of matching blocks. Returns their sum.
    pub(super) fn matching(&self, sh: &ReaderView, keys: &[BlockKey], mut each: impl FnMut(Addr, u32)) -> usize {
        let (mut at, mut done) = (RunPosition { run: sh.root, offset: 0 }, 0);
        while let Some(key) = keys.get(done)
            && let Some(run) = sh.children.find_still(&sh.arena, Run::at(&sh.arena, at.run).shape(), at, *key)
        {
            let header = Run::at(&sh.arena, run);
            let part = keys.get(done..).unwrap_or_default();
            let part = part.get(..part.len().min(header.shape().len as usize)).unwrap_or_default();
            let same = same_tags(&sh.arena, header.tags(), 0, part) as u32;
            if same == 0 {
                break;
            }
            each(run, same);
            done += same as usize;
            at = RunPosition { run, offset: same };
        }
        done
    }

    /// Adds the holder to the runs on the path. Returns how many blocks were new to it, and whether memory sufficed.
    fn hold_path(&mut self, sh: &ReaderView, slot: usize, claim: HolderPlane) -> (u32, bool) {
        let mut new = 0;
        for i in 0..self.guesses.path.len() {
            let Some((run, matched)) = self.guesses.path.get(i).copied() else { break };
            let held = loop {
                match self.hold(sh, run, claim, (0, matched), |_| ()) {
                    Ok(n) => break Some(n),
                    Err(NoRoom) if self.make_room(sh) => {}
                    Err(NoRoom) => break None,
                }
            };
            let Some(n) = held else {
                self.guesses.path.truncate(i);
                return (new, false);
            };
            self.count(slot, GUESS, n, 0);
            new += n;
        }
        (new, true)
    }

    /// Adds runs for blocks that no run has. Returns how many.
    fn grow_path(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        claim: HolderPlane,
        keys: &[BlockKey],
        tenant: TenantId,
    ) -> u32 {
        let mut rest = keys;
        let mut new = 0;
        while !rest.is_empty() {
            let mut most = rest.len().min(MAX_RUN as usize);
            let done = loop {
                let part = rest.get(..most).unwrap_or_default();
                let bytes = RUN_BYTES + SEGMENT_BYTES + 64 + 8 * part.len() as u32;
                self.guesses.tenants.recording = Some((tenant, u64::from(bytes)));
                match self.grow_once(sh, claim, part, tenant) {
                    Ok(n) => break Some(n),
                    Err(NoRoom) if self.make_room(sh) => {}
                    Err(NoRoom) if most > 64 => most /= 2,
                    Err(NoRoom) => break None,
                }
            };
            let Some(done) = done else {
                self.stats.refused_blocks += rest.len() as u64;
                break;
            };
            self.count(slot, GUESS, done, 0);
            new += done;
            rest = rest.get(done as usize..).unwrap_or_default();
        }
        new
    }

    fn grow_once(
        &mut self,
        sh: &ReaderView,
        claim: HolderPlane,
        keys: &[BlockKey],
        tenant: TenantId,
    ) -> Result<u32, NoRoom> {
        let at = match self.guesses.path.last() {
            Some((run, offset)) => RunPosition { run: *run, offset: *offset },
            None => RunPosition { run: sh.root, offset: 0 },
        };
        let pays = self.guesses.table.get(&sh.arena, key(at.run, NODE));
        let is_own = pays.is_some_and(|node| sh.arena.high(node as Addr) == tenant.0);
        if is_own && let Some(more) = self.extend(sh, at, keys.iter().copied(), claim)? {
            if let Some(last) = self.guesses.path.last_mut() {
                last.1 += more;
            }
            self.charge(sh, at.run);
            return Ok(more);
        }
        let run = self.hang(sh, at, keys.iter().copied(), claim)?;
        self.guesses.path.push((run, keys.len() as u32));
        if let Err(no_room) = self.touch_run(sh, run, tenant) {
            self.guesses.path.pop();
            // It counts what it drops.
            self.count(self.columns.slot(claim.column), GUESS, keys.len() as u32, 0);
            self.forget(sh, run, claim.column);
            return Err(no_room);
        }
        Ok(keys.len() as u32)
    }

    /// Drops a column's estimated blocks of a run, including all segments.
    pub(super) fn forget(&mut self, sh: &ReaderView, run: Addr, column: Column) {
        let slot = self.columns.slot(column);
        let mut segment = self.guesses.table.remove(&sh.arena, key(run, column)).unwrap_or(0) as Addr;
        while segment != 0 {
            let deeper = sh.arena.low(segment + 3);
            self.unlink_segment(sh, slot, segment);
            self.space.free(&sh.arena, segment, order_for(NODE_WORDS));
            segment = deeper;
        }
        let had = self.drop_range(sh, run, HolderPlane { plane: GUESS, column }, (0, MAX_RUN));
        self.count(slot, GUESS, 0, had);
    }

    pub(super) fn unlink_segment(&mut self, sh: &ReaderView, slot: usize, segment: Addr) {
        if let Some(holder) = self.holders.get_mut(slot) {
            let mut ends = ListEnds { newest: holder.newest, oldest: holder.oldest };
            unlink(sh, OF_HOLDER, &mut ends, segment);
            (holder.newest, holder.oldest) = (ends.newest, ends.oldest);
        }
    }

    /// Marks the first `matched` blocks of a run as the holder's most recently used.
    pub(super) fn touch(
        &mut self,
        sh: &ReaderView,
        slot: usize,
        column: Column,
        (run, matched): (Addr, u32),
        moment: Moment,
    ) -> Result<(), NoRoom> {
        let mut old = self.guesses.table.get(&sh.arena, key(run, column)).unwrap_or(0) as Addr;
        let mut reuse = 0;
        while old != 0 && sh.arena.high(old + 1) <= matched {
            let deeper = sh.arena.low(old + 3);
            self.unlink_segment(sh, slot, old);
            if reuse == 0 {
                reuse = old;
            } else {
                self.space.free(&sh.arena, old, order_for(NODE_WORDS));
            }
            old = deeper;
        }
        if old != 0 {
            sh.arena.set_low(old + 1, sh.arena.low(old + 1).max(matched));
        }
        let segment = if reuse != 0 {
            reuse
        } else {
            loop {
                match self.space.alloc(&sh.arena, order_for(NODE_WORDS)) {
                    Some(addr) => break addr,
                    None if self.make_room(sh) => {}
                    None => return Err(NoRoom),
                }
            }
        };
        sh.arena.store(segment, pair(run, u32::from(column)));
        sh.arena.store(segment + 1, pair(0, matched));
        sh.arena.store(segment + 3, pair(old, moment.0));
        if let Some(holder) = self.holders.get_mut(slot) {
            let mut ends = ListEnds { newest: holder.newest, oldest: holder.oldest };
            push(sh, OF_HOLDER, &mut ends, segment);
            (holder.newest, holder.oldest) = (ends.newest, ends.oldest);
        }
        while self.guesses.table.set(&sh.arena, &mut self.space, key(run, column), u64::from(segment)).is_err() {
            if !self.make_room(sh) {
                self.unlink_segment(sh, slot, segment);
                self.space.free(&sh.arena, segment, order_for(NODE_WORDS));
                return Err(NoRoom);
            }
        }
        Ok(())
    }

    /// Marks a run as its tenant's most recently used. A run without a tenant is billed to `tenant`; otherwise `tenant`
    /// is noted as another user of it.
    pub(super) fn touch_run(&mut self, sh: &ReaderView, run: Addr, tenant: TenantId) -> Result<(), NoRoom> {
        if let Some(node) = self.guesses.table.get(&sh.arena, key(run, NODE)) {
            let node = node as Addr;
            let owner = TenantId(sh.arena.high(node));
            unlink(sh, OF_ALL, &mut self.guesses.all, node);
            push(sh, OF_ALL, &mut self.guesses.all, node);
            self.remove_run(sh, owner, node);
            self.add_run(sh, owner, node);
            // A tenant over its share could not take the run over.
            if tenant != owner && self.bytes_of(sh, tenant) <= self.share() {
                sh.arena.set_high(node + 3, tenant.0);
            }
        } else {
            let node = self.create_node(sh, run, tenant)?;
            push(sh, OF_ALL, &mut self.guesses.all, node);
            self.add_run(sh, tenant, node);
        }
        self.charge(sh, run);
        Ok(())
    }

    /// Creates a run's node, which is in no list yet.
    pub(super) fn create_node(&mut self, sh: &ReaderView, run: Addr, tenant: TenantId) -> Result<Addr, NoRoom> {
        let node = self.space.alloc(&sh.arena, order_for(NODE_WORDS)).ok_or(NoRoom)?;
        let set = self.guesses.table.set(&sh.arena, &mut self.space, key(run, NODE), u64::from(node));
        if let Err(no_room) = set {
            self.space.free(&sh.arena, node, order_for(NODE_WORDS));
            return Err(no_room);
        }
        sh.arena.store(node, pair(run, tenant.0));
        sh.arena.store(node + 3, pair(0, tenant.0));
        Run::at(&sh.arena, run).set_flags(GUESSED);
        Ok(node)
    }

    /// Updates the bill of a run's tenant to the run's current size.
    pub(super) fn charge(&mut self, sh: &ReaderView, run: Addr) {
        let Some(node) = self.guesses.table.get(&sh.arena, key(run, NODE)) else { return };
        let node = node as Addr;
        self.cover.read(&sh.arena, Run::at(&sh.arena, run), &self.columns.live);
        let holders = self.cover.all().filter(|(_, plane, _)| *plane == GUESS).count() as u32;
        let bytes = RUN_BYTES + 8 * self.words(sh, run) + SEGMENT_BYTES * holders;
        let before = sh.arena.low(node + 3);
        sh.arena.set_low(node + 3, bytes);
        self.bill(sh, TenantId(sh.arena.high(node)), before, bytes);
    }

    /// Bills a run to another tenant that uses it, if that tenant stays within its share.
    pub(super) fn pass_on(&mut self, sh: &ReaderView, node: Addr) -> bool {
        let (owner, user) = (TenantId(sh.arena.high(node)), TenantId(sh.arena.high(node + 3)));
        let bytes = sh.arena.low(node + 3);
        if user == owner || self.due(sh, user) + u64::from(bytes) > self.share() || !self.add_tenant(sh, user) {
            return false;
        }
        self.remove_run(sh, owner, node);
        self.bill(sh, owner, bytes, 0);
        sh.arena.set_high(node, user.0);
        self.add_passed_run(sh, user, node);
        self.bill(sh, user, 0, bytes);
        self.forget_tenant(sh, owner);
        true
    }

    /// Removes the node of a run that has no estimated holder any more.
    pub(super) fn forget_node(&mut self, sh: &ReaderView, run: Addr) {
        Run::at(&sh.arena, run).clear_flags(GUESSED);
        let Some(node) = self.guesses.table.remove(&sh.arena, key(run, NODE)) else { return };
        let node = node as Addr;
        let owner = TenantId(sh.arena.high(node));
        unlink(sh, OF_ALL, &mut self.guesses.all, node);
        self.remove_run(sh, owner, node);
        self.bill(sh, owner, sh.arena.low(node + 3), 0);
        self.space.free(&sh.arena, node, order_for(NODE_WORDS));
        self.forget_tenant(sh, owner);
    }
}
