//! Bills of tenants for estimated blocks, and which tenants are over their share.
//!
//! A share is a part of the memory available to estimates: what is billed plus what is free. Blocks that engines
//! report belong to no tenant, so shares shrink when these grow. Tenants are in lists by class: those with 2^n bytes
//! and less than twice as many. A tenant over its share is therefore found without scanning all tenants; a few hundred
//! at most have half a share.
//!
//! A tenant's node in the arena has four words: bytes; its newest and oldest run; previous and next of its
//! class; its id, and the newest run that was passed on to it from another tenant and not used since, or 0.
//! Passed runs are its oldest ones.

use super::arena::Addr;
use super::arena::{high, low, order_for, pair};
use super::list::{List, ListEnds, insert, push, unlink};
use super::writer::Writer;
use super::{ReaderView, TenantId};
use std::cmp::Reverse;

const WORDS: u32 = 4;
const OF_CLASS: List = List(2);
/// The links of a run's node in its tenant's list.
pub(super) const OF_TENANT: List = List(2);
/// A bill is less than 2^47 bytes, since the arena has at most 2^32 words.
const CLASSES: usize = 48;

/// The bills of all tenants.
#[derive(Debug)]
pub(super) struct Tenants {
    /// A tenant's share, as a part of the memory available to estimates.
    part: f64,
    /// Bytes billed to all tenants.
    billed: u64,
    classes: [ListEnds; CLASSES],
    /// The tenant of the prompt that is being recorded, and the bytes that it is about to take. The tenant stays even
    /// if all its runs are evicted meanwhile.
    pub(super) recording: Option<(TenantId, u64)>,
}

fn key(tenant: TenantId) -> u64 {
    1 << 63 | u64::from(tenant.0)
}

fn class(bytes: u64) -> usize {
    ((u64::BITS - bytes.leading_zeros()) as usize).min(CLASSES - 1)
}

impl Tenants {
    pub(super) fn new(part: f64) -> Self {
        Self { part, billed: 0, classes: [ListEnds::default(); CLASSES], recording: None }
    }

    #[expect(clippy::indexing_slicing, reason = "the function `class` returns less than `CLASSES`")]
    fn class(&mut self, bytes: u64) -> &mut ListEnds {
        &mut self.classes[class(bytes)]
    }
}

impl Writer {
    fn tenant(&self, sh: &ReaderView, tenant: TenantId) -> Option<Addr> {
        self.guesses.table.get(&sh.arena, key(tenant)).map(|node| node as Addr)
    }

    /// Returns the bytes billed to a tenant.
    pub(super) fn bytes_of(&self, sh: &ReaderView, tenant: TenantId) -> u64 {
        self.tenant(sh, tenant).map_or(0, |node| sh.arena.load(node))
    }

    /// Returns the bytes billed to a tenant, including the prompt that is being recorded.
    pub(super) fn due(&self, sh: &ReaderView, tenant: TenantId) -> u64 {
        let coming = self.guesses.tenants.recording.filter(|(recording, _)| *recording == tenant);
        self.bytes_of(sh, tenant) + coming.map_or(0, |(_, bytes)| bytes)
    }

    /// Returns the bytes that a tenant keeps when memory is exhausted.
    pub(super) fn share(&self) -> u64 {
        let Tenants { part, billed, .. } = &self.guesses.tenants;
        ((billed + 8 * self.space.room() as u64) as f64 * part) as u64
    }

    /// Whether the prompt that is being recorded takes its tenant over its share.
    pub(super) fn is_greedy(&self, sh: &ReaderView) -> bool {
        self.guesses.tenants.recording.is_some_and(|(tenant, _)| self.due(sh, tenant) > self.share())
    }

    /// Returns the tenants over their share, including the prompt that is being recorded; the largest bill first.
    pub(super) fn greedy(&self, sh: &ReaderView) -> Vec<TenantId> {
        let (share, tenants) = (self.share(), &self.guesses.tenants);
        let recording = tenants.recording.and_then(|(tenant, _)| self.tenant(sh, tenant));
        let mut greedy = Vec::new();
        for ends in tenants.classes.iter().skip(class(share)) {
            let mut node = ends.newest;
            while node != 0 {
                if Some(node) != recording {
                    greedy.push((sh.arena.load(node), node));
                }
                node = high(sh.arena.load(node + OF_CLASS.0));
            }
        }
        greedy.extend(recording.map(|node| (self.due(sh, name(sh, node)), node)));
        greedy.retain(|(bytes, _)| *bytes > share);
        greedy.sort_unstable_by_key(|(bytes, node)| (Reverse(*bytes), name(sh, *node)));
        greedy.into_iter().map(|(_, node)| name(sh, node)).collect()
    }

    /// Returns a tenant's least recently used run, or 0.
    pub(super) fn oldest_run(&self, sh: &ReaderView, tenant: TenantId) -> Addr {
        self.tenant(sh, tenant).map_or(0, |node| runs(sh, node).oldest)
    }

    /// Adds a tenant if necessary, evicting runs to get memory for it. Returns false when that fails.
    pub(super) fn admit(&mut self, sh: &ReaderView, tenant: TenantId) -> bool {
        while !self.add_tenant(sh, tenant) {
            if !self.make_room(sh) {
                return false;
            }
        }
        true
    }

    /// Adds a tenant if necessary. Returns false when there is no memory for it.
    pub(super) fn add_tenant(&mut self, sh: &ReaderView, tenant: TenantId) -> bool {
        if self.tenant(sh, tenant).is_some() {
            return true;
        }
        let Some(node) = self.space.alloc(&sh.arena, order_for(WORDS)) else { return false };
        if self.guesses.table.set(&sh.arena, &mut self.space, key(tenant), u64::from(node)).is_err() {
            self.space.free(&sh.arena, node, order_for(WORDS));
            return false;
        }
        sh.arena.store(node, 0);
        sh.arena.store(node + 1, 0);
        sh.arena.store(node + 3, u64::from(tenant.0));
        push(sh, OF_CLASS, self.guesses.tenants.class(0), node);
        true
    }

    /// Removes a tenant that has no runs.
    pub(super) fn forget_tenant(&mut self, sh: &ReaderView, tenant: TenantId) {
        if self.guesses.tenants.recording.is_none_or(|(recording, _)| recording != tenant)
            && let Some(node) = self.tenant(sh, tenant)
            && runs(sh, node).newest == 0
        {
            unlink(sh, OF_CLASS, self.guesses.tenants.class(sh.arena.load(node)), node);
            self.guesses.table.remove(&sh.arena, key(tenant));
            self.space.free(&sh.arena, node, order_for(WORDS));
        }
    }

    /// Makes a run the most recently used of a tenant.
    pub(super) fn add_run(&mut self, sh: &ReaderView, tenant: TenantId, run: Addr) {
        self.of_tenant(sh, tenant, |ends, passed| {
            push(sh, OF_TENANT, ends, run);
            passed
        });
    }

    /// Passes a run on to a tenant: older than the tenant's own runs, so that it does not displace them, and newer
    /// than those passed on before.
    pub(super) fn add_passed_run(&mut self, sh: &ReaderView, tenant: TenantId, run: Addr) {
        self.of_tenant(sh, tenant, |ends, passed| {
            insert(sh, OF_TENANT, ends, run, passed);
            run
        });
    }

    /// Makes a run the least recently used of a tenant.
    pub(super) fn add_oldest_run(&mut self, sh: &ReaderView, tenant: TenantId, run: Addr) {
        self.of_tenant(sh, tenant, |ends, passed| {
            insert(sh, OF_TENANT, ends, run, 0);
            passed
        });
    }

    /// Removes a run from a tenant's list.
    pub(super) fn remove_run(&mut self, sh: &ReaderView, tenant: TenantId, run: Addr) {
        self.of_tenant(sh, tenant, |ends, passed| {
            unlink(sh, OF_TENANT, ends, run);
            if passed == run { sh.arena.high(run + OF_TENANT.0) } else { passed }
        });
    }

    /// Changes a tenant's list of runs. `change` receives and returns the newest of the runs that were passed on.
    fn of_tenant(&mut self, sh: &ReaderView, tenant: TenantId, change: impl FnOnce(&mut ListEnds, Addr) -> Addr) {
        if let Some(node) = self.tenant(sh, tenant) {
            let mut ends = runs(sh, node);
            let passed = change(&mut ends, sh.arena.high(node + 3));
            sh.arena.store(node + 1, pair(ends.newest, ends.oldest));
            sh.arena.set_high(node + 3, passed);
        }
    }

    /// Changes the bill of a run from `before` to `now` bytes.
    pub(super) fn bill(&mut self, sh: &ReaderView, tenant: TenantId, before: u32, now: u32) {
        let Some(node) = self.tenant(sh, tenant) else { return };
        let had = sh.arena.load(node);
        let bytes = (had + u64::from(now)).saturating_sub(u64::from(before));
        sh.arena.store(node, bytes);
        let tenants = &mut self.guesses.tenants;
        tenants.billed = tenants.billed + bytes - had;
        if class(had) != class(bytes) {
            unlink(sh, OF_CLASS, tenants.class(had), node);
            push(sh, OF_CLASS, tenants.class(bytes), node);
        }
    }
}

fn name(sh: &ReaderView, node: Addr) -> TenantId {
    TenantId(sh.arena.low(node + 3))
}

/// The list of a tenant's runs.
fn runs(sh: &ReaderView, node: Addr) -> ListEnds {
    let links = sh.arena.load(node + 1);
    ListEnds { newest: low(links), oldest: high(links) }
}

#[cfg(test)]
impl Writer {
    /// Panics where a bill differs from the sum of its runs, or a tenant is not in its class.
    pub(super) fn check_bills(&self, sh: &ReaderView) {
        let Tenants { billed, classes, recording, .. } = &self.guesses.tenants;
        assert!(recording.is_none());
        let (mut all, mut known) = (0, 0);
        for (at, ends) in classes.iter().enumerate() {
            let mut node = ends.newest;
            while node != 0 {
                let bytes = sh.arena.load(node);
                assert_eq!((class(bytes), self.tenant(sh, name(sh, node))), (at, Some(node)));
                let mut run = runs(sh, node).newest;
                let (mut bills, passed) = (0, sh.arena.high(node + 3));
                let mut is_passed_there = passed == 0;
                while run != 0 {
                    is_passed_there |= run == passed;
                    assert_eq!(sh.arena.high(run), name(sh, node).0);
                    bills += u64::from(sh.arena.low(run + 3));
                    run = sh.arena.high(run + 2);
                }
                assert!(bytes == bills && bytes > 0 && is_passed_there, "{bytes} for {bills}");
                (all, known) = (all + bytes, known + 1);
                node = high(sh.arena.load(node + OF_CLASS.0));
            }
        }
        assert_eq!(all, *billed, "of {known} tenants");
    }
}
