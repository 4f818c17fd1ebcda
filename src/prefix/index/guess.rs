//! What is only believed: prompts that were routed to a holder, the least recently used of them forgotten first.
//!
//! Two orders are kept. For each holder, segments of runs by their last use: a prompt touches the beginning of a run, so a run is
//! cut into segments by age, and the oldest segment of a holder is always the tail of something. For each tenant, and for all
//! together, the runs that its prompts have made: these pay for the budget. Where that is used up, who has most of those that have more
//! than their share ([`super::tenants`]) gives way; within their shares, tenants are not told apart. A prompt touches its deepest run first,
//! so that a tail always goes before its head.
//!
//! Nodes lie in the arena, four words each. A segment: run and column; from and to; previous and next; the next deeper segment of
//! its run and the moment of use. A run's node: run and the tenant that pays; previous and next of all; previous and next of the tenant;
//! bytes, and another tenant that uses it or the same again.

use super::arena::{Addr, order_for, pair};
use super::cover::{Column, GUESS};
use super::list::{Ends, List, push, unlink};
use super::run::{GUESSED, MAX_RUN, Place, Run, same_tags};
use super::table::{NoRoom, Table};
use super::tenants::{OF_TENANT, Tenants};
use super::writer::{Claim, Writer};
use super::{Shared, TenantId};
use crate::key::BlockKey;
use attache_types::clock::Timestamp;

const NODE_WORDS: u32 = 4;
/// Bytes that a segment and its entry in the table cost.
const SEGMENT_BYTES: u32 = 56;
/// Bytes that a run's node, its entry in the table and its bucket cost.
const RUN_BYTES: u32 = 64;
/// In the table's keys, the column of a run's node.
const NODE: Column = Column::MAX;
/// Moments of use are kept in units of 2^24 ns, about 17 ms.
const MOMENT_SHIFT: u32 = 24;
/// Runs that are passed on at most before one is forgotten: nobody else writes as long as that takes.
const PASSED_AT_ONCE: u32 = 32;

/// The lists.
#[derive(Debug)]
pub(super) struct Guesses {
    /// (run, column) to the column's newest segment of it; (run, [`NODE`]) to the run's node.
    pub(super) table: Table,
    all: Ends,
    pub(super) tenants: Tenants,
    /// The runs of the prompt at hand, and how much of each: not to be evicted.
    path: Vec<(Addr, u32)>,
    /// A run that is being taken up, or 0: not to be evicted.
    pub(super) pinned: Addr,
}

fn key(run: Addr, column: Column) -> u64 {
    u64::from(run) << 16 | u64::from(column)
}

const OF_HOLDER: List = List(2);
const OF_ALL: List = List(1);

impl Guesses {
    /// `part` of what guesses can have is a tenant's share.
    pub(super) fn new(table: Table, part: f64) -> Self {
        Self { table, all: Ends::default(), tenants: Tenants::new(part), path: Vec::new(), pinned: 0 }
    }
}

impl Writer {
    /// A holder has served a prompt. Returns how many of its blocks are new to it.
    pub(super) fn record(
        &mut self,
        sh: &Shared,
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
        let claim = Claim { plane: GUESS, column };
        self.guesses.pinned = 0;
        self.guesses.tenants.recording = Some((tenant, u64::from(RUN_BYTES + SEGMENT_BYTES)));
        let known = self.walk(sh, keys);
        let rest = keys.get(known..).unwrap_or_default();
        let mut new = self.hold_path(sh, slot, claim);
        if new.1 {
            new.0 += self.grow_path(sh, slot, claim, rest, tenant);
        }
        let moment = (now.0 >> MOMENT_SHIFT).min(u64::from(u32::MAX)) as u32;
        // On the path until that is done: what makes room for it must not take it.
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

    /// Puts the runs that hold the prompt on the path. Returns how many blocks of it they have.
    fn walk(&mut self, sh: &Shared, keys: &[BlockKey]) -> usize {
        self.guesses.path.clear();
        let (mut at, mut done) = (Place { run: sh.root, offset: 0 }, 0);
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
            self.guesses.path.push((run, same));
            done += same as usize;
            at = Place { run, offset: same };
        }
        done
    }

    /// Holds what is on the path. Returns how many blocks were new, and whether there was room for all.
    fn hold_path(&mut self, sh: &Shared, slot: usize, claim: Claim) -> (u32, bool) {
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

    /// Adds the blocks that nobody has. Returns how many.
    fn grow_path(&mut self, sh: &Shared, slot: usize, claim: Claim, keys: &[BlockKey], tenant: TenantId) -> u32 {
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

    fn grow_once(&mut self, sh: &Shared, claim: Claim, keys: &[BlockKey], tenant: TenantId) -> Result<u32, NoRoom> {
        let at = match self.guesses.path.last() {
            Some((run, offset)) => Place { run: *run, offset: *offset },
            None => Place { run: sh.root, offset: 0 },
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
            self.forget(sh, run, claim.column);
            return Err(no_room);
        }
        Ok(keys.len() as u32)
    }

    /// A column's guesses of a run are dropped, segments and all.
    fn forget(&mut self, sh: &Shared, run: Addr, column: Column) {
        let slot = self.columns.slot(column);
        let mut segment = self.guesses.table.remove(&sh.arena, key(run, column)).unwrap_or(0) as Addr;
        while segment != 0 {
            let deeper = sh.arena.low(segment + 3);
            self.unlink_segment(sh, slot, segment);
            self.space.free(&sh.arena, segment, order_for(NODE_WORDS));
            segment = deeper;
        }
        let had = self.drop_range(sh, run, Claim { plane: GUESS, column }, (0, MAX_RUN));
        self.count(slot, GUESS, 0, had);
    }

    fn unlink_segment(&mut self, sh: &Shared, slot: usize, segment: Addr) {
        if let Some(holder) = self.holders.get_mut(slot) {
            let mut ends = Ends { newest: holder.newest, oldest: holder.oldest };
            unlink(sh, OF_HOLDER, &mut ends, segment);
            (holder.newest, holder.oldest) = (ends.newest, ends.oldest);
        }
    }

    /// The first `matched` blocks of a run are now a holder's most recently used.
    fn touch(
        &mut self,
        sh: &Shared,
        slot: usize,
        column: Column,
        (run, matched): (Addr, u32),
        moment: u32,
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
        sh.arena.store(segment + 3, pair(old, moment));
        if let Some(holder) = self.holders.get_mut(slot) {
            let mut ends = Ends { newest: holder.newest, oldest: holder.oldest };
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

    /// A run is now its tenant's most recently used. If nobody pays for it yet, `tenant` does; else it is noted as one who uses it too.
    fn touch_run(&mut self, sh: &Shared, run: Addr, tenant: TenantId) -> Result<(), NoRoom> {
        if let Some(node) = self.guesses.table.get(&sh.arena, key(run, NODE)) {
            let node = node as Addr;
            let owner = TenantId(sh.arena.high(node));
            unlink(sh, OF_ALL, &mut self.guesses.all, node);
            push(sh, OF_ALL, &mut self.guesses.all, node);
            self.remove_run(sh, owner, node);
            self.add_run(sh, owner, node);
            // One that has more than its share itself could not take it over.
            if tenant != owner && self.bytes_of(sh, tenant) <= self.share() {
                sh.arena.set_high(node + 3, tenant.0);
            }
        } else {
            let node = self.space.alloc(&sh.arena, order_for(NODE_WORDS)).ok_or(NoRoom)?;
            let set = self.guesses.table.set(&sh.arena, &mut self.space, key(run, NODE), u64::from(node));
            if let Err(no_room) = set {
                self.space.free(&sh.arena, node, order_for(NODE_WORDS));
                return Err(no_room);
            }
            sh.arena.store(node, pair(run, tenant.0));
            sh.arena.store(node + 3, pair(0, tenant.0));
            push(sh, OF_ALL, &mut self.guesses.all, node);
            self.add_run(sh, tenant, node);
            Run::at(&sh.arena, run).set_flags(GUESSED);
        }
        self.charge(sh, run);
        Ok(())
    }

    /// Brings the bill for a run up to date.
    fn charge(&mut self, sh: &Shared, run: Addr) {
        let Some(node) = self.guesses.table.get(&sh.arena, key(run, NODE)) else { return };
        let node = node as Addr;
        self.cover.read(&sh.arena, Run::at(&sh.arena, run), &self.columns.live);
        let holders = self.cover.all().filter(|(_, plane, _)| *plane == GUESS).count() as u32;
        let bytes = RUN_BYTES + 8 * self.words(sh, run) + SEGMENT_BYTES * holders;
        let before = sh.arena.low(node + 3);
        sh.arena.set_low(node + 3, bytes);
        self.bill(sh, TenantId(sh.arena.high(node)), before, bytes);
    }

    /// Has another tenant pay for a run that it uses too, if that stays within its share with it.
    fn pass_on(&mut self, sh: &Shared, node: Addr) -> bool {
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

    /// Nobody is believed to have a run any more.
    pub(super) fn forget_node(&mut self, sh: &Shared, run: Addr) {
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

    /// Forgets the guesses of one run, on all holders.
    fn evict(&mut self, sh: &Shared, node: Addr) -> u32 {
        let run = sh.arena.low(node);
        self.cover.read(&sh.arena, Run::at(&sh.arena, run), &self.columns.live);
        let columns: Vec<(Column, u32)> = self
            .cover
            .all()
            .filter(|(_, plane, _)| *plane == GUESS)
            .map(|(column, _, cutoff)| (column, cutoff))
            .collect();
        for (column, _) in &columns {
            self.forget(sh, run, *column);
        }
        if columns.is_empty() {
            self.forget_node(sh, run);
            self.clean(sh, run);
        }
        columns.iter().map(|(_, blocks)| *blocks).sum()
    }

    fn is_in_use(&self, run: Addr) -> bool {
        run == self.guesses.pinned || self.guesses.path.iter().any(|(r, _)| *r == run)
    }

    /// The first node that may go, from the oldest of a list on: a prompt that comes back after long may itself be the oldest.
    fn oldest_unused(&self, sh: &Shared, list: List, oldest: Addr) -> Option<Addr> {
        let mut node = oldest;
        while node != 0 && self.is_in_use(sh.arena.low(node)) {
            node = sh.arena.low(node + list.0);
        }
        (node != 0).then_some(node)
    }

    /// Forgets the least recently used run: of who has most of those that have more than their share, or else of all. False when there
    /// is none that may go, as where a prompt that takes its tenant over its share would cost others of theirs. What another tenant uses too, and
    /// has room for in its share, is that one's from then on, up to [`PASSED_AT_ONCE`].
    pub(super) fn make_room(&mut self, sh: &Shared) -> bool {
        if std::mem::take(&mut self.is_aside_short) {
            // Guesses take nothing of that.
            return false;
        }
        let greedy = self.oldest_of_greediest(sh);
        let oldest = self.oldest_unused(sh, OF_ALL, self.guesses.all.oldest);
        let Some(node) = greedy.or(oldest.filter(|_| !self.is_greedy(sh))) else { return false };
        let blocks = u64::from(self.evict(sh, node));
        if Some(node) == oldest {
            self.stats.evicted_for_budget += blocks;
        } else {
            self.stats.evicted_for_tenant += blocks;
        }
        true
    }

    /// Forgets guesses until the index has no more blocks than it may have, or none is left that may go.
    pub(super) fn keep_max_blocks(&mut self, sh: &Shared) {
        while self.max_blocks.is_some_and(|most| self.stats.blocks as u64 > most) && self.make_room(sh) {}
    }

    /// The oldest unused run of the tenant that is furthest over its share and has one. Those before it are passed on.
    fn oldest_of_greediest(&mut self, sh: &Shared) -> Option<Addr> {
        let mut left = PASSED_AT_ONCE;
        for tenant in self.greedy(sh) {
            while self.due(sh, tenant) > self.share()
                && let Some(node) = self.oldest_unused(sh, OF_TENANT, self.oldest_run(sh, tenant))
            {
                if left == 0 || !self.pass_on(sh, node) {
                    return Some(node);
                }
                left -= 1;
            }
        }
        None
    }

    /// Forgets a holder's oldest guesses until it has no more than its capacity.
    pub(super) fn keep_capacity(&mut self, sh: &Shared, slot: usize) {
        while let Some(holder) = self.holders.get(slot)
            && let Some(over) = holder.blocks[GUESS].checked_sub(holder.capacity)
            && over > 0
            && holder.oldest != 0
        {
            let oldest = holder.oldest;
            self.stats.evicted_for_capacity += u64::from(self.shorten_oldest(sh, slot, oldest, over));
        }
    }

    /// Takes up to `blocks` blocks off a holder's oldest segment. Returns how many.
    fn shorten_oldest(&mut self, sh: &Shared, slot: usize, segment: Addr, blocks: u32) -> u32 {
        let (run, column) = (sh.arena.low(segment), sh.arena.high(segment) as Column);
        let (from, to) = (sh.arena.low(segment + 1), sh.arena.high(segment + 1));
        let left = to.saturating_sub(blocks).max(from);
        if left == from {
            self.unlink_segment(sh, slot, segment);
            self.cut_chain(sh, run, column, segment);
            self.space.free(&sh.arena, segment, order_for(NODE_WORDS));
        } else {
            sh.arena.set_high(segment + 1, left);
        }
        let had = self.drop_range(sh, run, Claim { plane: GUESS, column }, (left, MAX_RUN));
        self.count(slot, GUESS, 0, had);
        self.charge(sh, run);
        had
    }

    /// Takes the deepest segment of a run out of the column's chain.
    fn cut_chain(&mut self, sh: &Shared, run: Addr, column: Column, segment: Addr) {
        let first = self.guesses.table.get(&sh.arena, key(run, column)).unwrap_or(0) as Addr;
        if first == segment {
            self.guesses.table.remove(&sh.arena, key(run, column));
            return;
        }
        let mut at = first;
        while at != 0 && sh.arena.low(at + 3) != segment {
            at = sh.arena.low(at + 3);
        }
        if at != 0 {
            sh.arena.set_low(at + 3, sh.arena.low(segment + 3));
        }
    }

    /// Frees one guess of a column that nobody has any more. Returns the next.
    pub(super) fn drop_retired_guess(&mut self, sh: &Shared, column: Column, segment: Addr) -> Addr {
        let next = sh.arena.high(segment + OF_HOLDER.0);
        let run = sh.arena.low(segment);
        self.guesses.table.remove(&sh.arena, key(run, column));
        self.space.free(&sh.arena, segment, order_for(NODE_WORDS));
        self.clean(sh, run);
        self.charge(sh, run);
        next
    }
}
