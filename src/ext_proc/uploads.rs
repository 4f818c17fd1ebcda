//! Memory of unfinished uploads: how much each holds, its owner, and its rate. At the limit of buffered request bodies,
//! Attaché evicts uploads that are too slow first. Then it evicts the largest uploads of the tenant or connection that
//! holds most.
//!
//! A stream is registered only while it waits for more bytes of a body or message. An ordinary request that arrives at
//! once is never registered.

use ahash::HashMap;
use attache_picker::body::Buffered;
use attache_types::clock::Timestamp;
use attache_types::limits::Limits;
use std::cmp::Reverse;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// 1 s: shortest interval over which the rate of an upload is measured.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// An eviction frees a sixteenth of the limit in addition, so that evictions are rare.
const EVICTED_SHARE: u64 = 16;

/// The owner of uploads; all uploads of one owner share a memory limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// A tenant.
    Tenant(Arc<str>),
    /// A client's connection, by Envoy's `connection.id`.
    Connection(u64),
}

/// Why an upload is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evicted {
    /// The limit of buffered request bodies is reached.
    Full,
    /// The uploads of its tenant or connection exceed their share.
    Share,
}

/// The progress of an upload, by which its rate is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Start of the measured interval.
    since: Timestamp,
    /// Bytes that had arrived at its start.
    from: u64,
    /// When the last bytes arrived.
    last: Timestamp,
}

impl Progress {
    /// The progress of an upload that begins now.
    #[must_use]
    pub fn begin(now: Timestamp) -> Self {
        Self { since: now, from: 0, last: now }
    }

    /// Records that `bytes` have arrived in total. A new interval begins if the upload reached `rate`, bytes a second.
    pub fn advance(&mut self, bytes: u64, now: Timestamp, rate: u64) {
        if now.since(self.since) >= MIN_INTERVAL && !self.is_slow(bytes, now, rate) {
            *self = Self { since: now, from: bytes, ..*self };
        }
    }

    /// Records that bytes arrive now.
    pub fn came(&mut self, now: Timestamp) {
        self.last = now;
    }

    /// Whether nothing has arrived for a second.
    #[must_use]
    pub fn is_stalled(&self, now: Timestamp) -> bool {
        now.since(self.last) >= MIN_INTERVAL
    }

    /// Whether the rate of this interval is below `rate`, bytes a second. False during its first second.
    #[must_use]
    pub fn is_slow(&self, bytes: u64, now: Timestamp, rate: u64) -> bool {
        let passed = now.since(self.since);
        let came = u128::from(bytes.saturating_sub(self.from)) * 1_000;
        passed >= MIN_INTERVAL && came < u128::from(rate) * passed.as_millis()
    }

    /// When the upload is rejected, unless it reaches the rate: `grace` after the start of the interval.
    #[must_use]
    pub fn ends(&self, grace: Duration) -> Timestamp {
        self.since.after(grace)
    }
}

/// The state of an upload.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// Memory, bytes.
    pub memory: u64,
    /// Bytes that have arrived.
    pub bytes: u64,
    /// Their rate.
    pub progress: Progress,
}

/// All unfinished uploads.
#[derive(Debug, Default)]
pub struct Uploads(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    entries: HashMap<u64, Entry>,
    owners: HashMap<Owner, Owned>,
    /// Memory of evicted uploads that is not freed yet.
    leaving: u64,
}

/// Totals of one owner's uploads.
#[derive(Clone, Copy, Debug, Default)]
struct Owned {
    uploads: usize,
    memory: u64,
}

#[derive(Debug)]
struct Entry {
    owner: Option<Owner>,
    standing: Standing,
    evicted: Option<Evicted>,
    waker: Waker,
}

impl Uploads {
    fn table(&self) -> MutexGuard<'_, Table> {
        // Every change is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Evicts uploads if `buffered` exceeds its limit. False if evictions can't bring it below the limit.
    pub fn make_way(&self, buffered: &Buffered, limits: &Limits, now: Timestamp) -> bool {
        if buffered.bytes() <= limits.max_buffered_bytes {
            return true;
        }
        let mut table = self.table();
        let over =
            |table: &Table| buffered.bytes().saturating_sub(table.leaving).saturating_sub(limits.max_buffered_bytes);
        let excess = over(&table);
        if excess > 0 {
            let enough = excess + limits.max_buffered_bytes / EVICTED_SHARE;
            table.evict(enough, Evicted::Full, limits.min_upload_rate, now, |_| true);
        }
        over(&table) == 0
    }
}

impl Table {
    /// Evicts uploads that `concern` selects, until `enough` bytes will be freed.
    fn evict(&mut self, enough: u64, why: Evicted, rate: u64, now: Timestamp, concern: impl Fn(&Entry) -> bool) {
        let owned = |entry: &Entry| Some(self.owners.get(entry.owner.as_ref()?)?.memory);
        let candidates = self.entries.iter().filter(|(_, entry)| entry.evicted.is_none() && concern(entry));
        let mut ranked: Vec<_> = candidates
            .map(|(id, entry)| {
                let standing = &entry.standing;
                let progress = standing.progress;
                let slow = progress.is_stalled(now) || progress.is_slow(standing.bytes, now, rate);
                (Reverse((slow, owned(entry).unwrap_or(standing.memory), standing.memory)), *id)
            })
            .collect();
        ranked.sort_unstable();
        let mut freed = 0;
        for (_, id) in ranked {
            if freed >= enough {
                break;
            }
            let Some(entry) = self.entries.get_mut(&id) else { continue };
            entry.evicted = Some(why);
            entry.waker.wake_by_ref();
            freed += entry.standing.memory;
        }
        self.leaving += freed;
    }

    /// Replaces the state of an upload, and corrects the totals of its owner.
    fn count(&mut self, id: u64, standing: Standing) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        let before = std::mem::replace(&mut entry.standing, standing).memory;
        if entry.evicted.is_some() {
            self.leaving = self.leaving.saturating_sub(before) + standing.memory;
        }
        if let Some(owned) = entry.owner.as_ref().and_then(|owner| self.owners.get_mut(owner)) {
            owned.memory = owned.memory.saturating_sub(before) + standing.memory;
        }
    }

    /// Evicts uploads of the owner of this one if together they exceed the owner's share.
    fn keep_share(&mut self, id: u64, limits: &Limits, now: Timestamp) {
        let Some(owner) = self.entries.get(&id).and_then(|entry| entry.owner.clone()) else { return };
        let (held, share) = (self.owners.get(&owner).map_or(0, |o| o.memory), limits.max_upload_bytes_per_client);
        if held > share {
            let leaving = |entry: &&Entry| entry.evicted.is_some() && entry.owner.as_ref() == Some(&owner);
            let leaving: u64 = self.entries.values().filter(leaving).map(|entry| entry.standing.memory).sum();
            if held - share > leaving {
                let enough = held - share - leaving + share / EVICTED_SHARE;
                let rate = limits.min_upload_rate;
                self.evict(enough, Evicted::Share, rate, now, |entry| entry.owner.as_ref() == Some(&owner));
            }
        }
    }
}

/// A registered upload. Dropping it removes the registration.
#[derive(Debug)]
pub struct Upload {
    id: u64,
    uploads: Arc<Uploads>,
}

impl Upload {
    /// Registers an upload.
    #[must_use]
    pub fn begin(uploads: &Arc<Uploads>, owner: Option<Owner>, now: Timestamp) -> Self {
        let mut table = uploads.table();
        let id = table.next;
        table.next += 1;
        if let Some(owner) = &owner {
            table.owners.entry(owner.clone()).or_default().uploads += 1;
        }
        let standing = Standing { memory: 0, bytes: 0, progress: Progress::begin(now) };
        table.entries.insert(id, Entry { owner, standing, evicted: None, waker: Waker::noop().clone() });
        drop(table);
        Self { id, uploads: uploads.clone() }
    }

    /// Records the state of the upload. Ready once it is evicted; an eviction wakes the task.
    pub fn poll(&self, cx: &Context<'_>, standing: Standing, limits: &Limits, now: Timestamp) -> Poll<Evicted> {
        let mut table = self.uploads.table();
        table.count(self.id, standing);
        let Some(entry) = table.entries.get_mut(&self.id) else { return Poll::Pending };
        entry.waker.clone_from(cx.waker());
        table.keep_share(self.id, limits, now);
        match table.entries.get(&self.id).and_then(|entry| entry.evicted) {
            Some(why) => Poll::Ready(why),
            None => Poll::Pending,
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        let mut table = self.uploads.table();
        let Some(entry) = table.entries.remove(&self.id) else { return };
        if entry.evicted.is_some() {
            table.leaving = table.leaving.saturating_sub(entry.standing.memory);
        }
        let Some(owner) = entry.owner else { return };
        let Some(owned) = table.owners.get_mut(&owner) else { return };
        owned.uploads -= 1;
        owned.memory = owned.memory.saturating_sub(entry.standing.memory);
        if owned.uploads == 0 {
            table.owners.remove(&owner);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const NOW: Timestamp = Timestamp(60_000_000_000);

    fn limits() -> Limits {
        let (max_buffered_bytes, max_upload_bytes_per_client) = (100 * MIB, 50 * MIB);
        Limits { max_buffered_bytes, max_upload_bytes_per_client, min_upload_rate: 4_096, ..Limits::default() }
    }

    fn at(memory: u64, since: u64) -> Standing {
        let since = Timestamp(NOW.0 - since * 1_000_000_000);
        Standing { memory, bytes: memory, progress: Progress { since, from: 0, last: since } }
    }

    /// An upload of this memory that has not progressed for so many seconds.
    fn upload(uploads: &Arc<Uploads>, owner: Option<Owner>, memory: u64, seconds: u64) -> Upload {
        let upload = Upload::begin(uploads, owner, NOW);
        assert!(evicted(&upload, at(memory, seconds)).is_none());
        upload
    }

    fn evicted(upload: &Upload, standing: Standing) -> Option<Evicted> {
        match upload.poll(&Context::from_waker(Waker::noop()), standing, &limits(), NOW) {
            Poll::Ready(why) => Some(why),
            Poll::Pending => None,
        }
    }

    fn is_evicted(upload: &Upload) -> bool {
        upload.uploads.table().entries[&upload.id].evicted.is_some()
    }

    #[test]
    fn full_memory_evicts_slow_uploads_before_large_ones() {
        let (uploads, buffered) = (Arc::<Uploads>::default(), Arc::<Buffered>::default());
        let large = upload(&uploads, None, 40 * MIB, 0);
        let slow: Vec<_> = (0..10).map(|_| upload(&uploads, None, 4 * MIB, 5)).collect();
        let _held = buffered.hold(100 * MIB);
        assert!(uploads.make_way(&buffered, &limits(), NOW));
        assert_eq!(slow.iter().filter(|u| is_evicted(u)).count(), 0, "within the limit");
        let _more = buffered.hold(2 * MIB);
        assert!(uploads.make_way(&buffered, &limits(), NOW));
        assert_eq!(slow.iter().filter(|u| is_evicted(u)).count(), 3, "2 MiB, and a sixteenth of 100");
        assert!(uploads.make_way(&buffered, &limits(), NOW));
        assert_eq!(slow.iter().filter(|u| is_evicted(u)).count(), 3, "evicted ones that are not freed yet count");
        let _much = buffered.hold(40 * MIB);
        assert!(uploads.make_way(&buffered, &limits(), NOW));
        assert!(is_evicted(&large));
        let _rest = buffered.hold(100 * MIB);
        assert!(!uploads.make_way(&buffered, &limits(), NOW), "nothing is left to evict");
    }

    #[test]
    fn full_memory_evicts_from_the_owner_that_holds_most() {
        let (uploads, buffered) = (Arc::<Uploads>::default(), Arc::<Buffered>::default());
        let honest = upload(&uploads, Some(Owner::Connection(1)), 10 * MIB, 0);
        let attackers: Vec<_> = (0..20).map(|_| upload(&uploads, Some(Owner::Connection(2)), 2 * MIB, 0)).collect();
        let _held = buffered.hold(105 * MIB);
        assert!(uploads.make_way(&buffered, &limits(), NOW));
        assert!(!is_evicted(&honest), "the largest upload, but its owner holds less");
        assert_eq!(attackers.iter().filter(|u| is_evicted(u)).count(), 6);
    }

    #[test]
    fn owner_over_its_share_evicts_only_its_own_uploads() {
        let uploads = Arc::<Uploads>::default();
        let tenant = |name: &str| Some(Owner::Tenant(name.into()));
        let other = upload(&uploads, tenant("other"), 45 * MIB, 9);
        let small = upload(&uploads, tenant("busy"), 10 * MIB, 0);
        let large = upload(&uploads, tenant("busy"), 39 * MIB, 0);
        let last = Upload::begin(&uploads, tenant("busy"), NOW);
        assert_eq!(evicted(&last, at(2 * MIB, 0)), None);
        assert_eq!((is_evicted(&large), is_evicted(&small), is_evicted(&other)), (true, false, false));
        assert_eq!(evicted(&last, at(3 * MIB, 0)), None, "that is enough");
        assert!(!is_evicted(&small));
        drop((large, small, last, other));
        let table = uploads.table();
        assert_eq!((table.entries.len(), table.owners.len(), table.leaving), (0, 0, 0));
    }

    #[test]
    fn evicted_upload_wakes_its_task_and_says_why() {
        let (uploads, buffered) = (Arc::<Uploads>::default(), Arc::<Buffered>::default());
        let one = upload(&uploads, None, 3 * MIB, 0);
        let _held = buffered.hold(101 * MIB);
        assert!(!uploads.make_way(&buffered, &Limits { max_buffered_bytes: 10, ..limits() }, NOW));
        assert_eq!(evicted(&one, at(3 * MIB, 0)), Some(Evicted::Full));
    }

    #[test]
    fn progress_is_judged_from_the_last_interval_that_kept_up() {
        let second = |n: u64| Timestamp(n * 1_000_000_000);
        let mut progress = Progress::begin(second(10));
        assert!(!progress.is_slow(0, Timestamp(second(10).0 + 999_000_000), 1_000), "too early to say");
        assert!(progress.is_slow(999, second(11), 1_000));
        progress.advance(1_000, second(11), 1_000);
        assert_eq!(progress.ends(Duration::from_secs(5)), second(16));
        progress.advance(1_001, second(14), 1_000);
        assert_eq!(progress.ends(Duration::from_secs(5)), second(16), "a trickle does not count");
        progress.advance(5_000, second(15), 1_000);
        assert_eq!(progress.ends(Duration::from_secs(5)), second(20), "it has caught up");
    }
}
