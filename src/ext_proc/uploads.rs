//! Uploads that wait for more bytes: how much memory each takes, whose it is and how fast it comes. When the memory
//! for request bodies is used up, the ones that come too slowly end first, then the largest of the tenant or
//! connection that holds most.
//!
//! A stream is registered only while it waits for the next bytes of a body or message, so an ordinary request that
//! arrives at once is never here.

use ahash::HashMap;
use attache_picker::body::Buffered;
use attache_types::clock::Timestamp;
use attache_types::limits::Limits;
use std::cmp::Reverse;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

/// The speed of an upload is judged over at least 1 s.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Evictions free a sixteenth of the limit at once, so that they are rare.
const EVICTED_SHARE: u64 = 16;

/// Whose uploads share a part of the memory.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Owner {
    /// A tenant.
    Tenant(Arc<str>),
    /// A client's connection, by Envoy's number (`connection.id`).
    Connection(u64),
}

/// Why an upload is to end before its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Evicted {
    /// The memory for request bodies is used up.
    Full,
    /// Its tenant or connection holds more than its share.
    Share,
}

/// How an upload comes in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Since when it is judged.
    since: Timestamp,
    /// Bytes that had come by then.
    from: u64,
    /// When the last bytes came.
    last: Timestamp,
}

impl Progress {
    /// Of an upload that begins now.
    #[must_use]
    pub fn begin(now: Timestamp) -> Self {
        Self { since: now, from: 0, last: now }
    }

    /// Notes that `bytes` have come in all. The interval begins again where the upload has kept up `rate`, in bytes a
    /// second.
    pub fn advance(&mut self, bytes: u64, now: Timestamp, rate: u64) {
        if now.since(self.since) >= MIN_INTERVAL && !self.is_slow(bytes, now, rate) {
            *self = Self { since: now, from: bytes, ..*self };
        }
    }

    /// Notes that bytes come now.
    pub fn came(&mut self, now: Timestamp) {
        self.last = now;
    }

    /// Whether nothing has come for a second.
    #[must_use]
    pub fn is_stalled(&self, now: Timestamp) -> bool {
        now.since(self.last) >= MIN_INTERVAL
    }

    /// Whether it came slower than `rate` since the interval began, of which at least a second has passed.
    #[must_use]
    pub fn is_slow(&self, bytes: u64, now: Timestamp, rate: u64) -> bool {
        let passed = now.since(self.since);
        let came = u128::from(bytes.saturating_sub(self.from)) * 1_000;
        passed >= MIN_INTERVAL && came < u128::from(rate) * passed.as_millis()
    }

    /// When an upload that has been slow for as long as `grace` ends.
    #[must_use]
    pub fn ends(&self, grace: Duration) -> Timestamp {
        self.since.after(grace)
    }
}

/// What an upload holds now.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// Memory, bytes.
    pub memory: u64,
    /// Bytes that have come.
    pub bytes: u64,
    /// How they came.
    pub progress: Progress,
}

/// All uploads that wait for more bytes.
#[derive(Debug, Default)]
pub struct Uploads(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    next: u64,
    entries: HashMap<u64, Entry>,
    owners: HashMap<Owner, Owned>,
    /// Memory of uploads that are evicted and not gone yet.
    leaving: u64,
}

/// What the uploads of one owner are together.
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

    /// Whether `buffered` is within its limit, or will be when the uploads that this evicts are gone.
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
    /// Evicts uploads that `concern` selects until `enough` bytes are on their way out.
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

    /// Counts `memory` for the owner of an entry in the place of what it held.
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

    /// Evicts uploads of the owner of this one when they hold more than their share.
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

/// One upload's place among all. Gives it up on Drop.
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

    /// Notes how the upload stands. Ready when it is to end; the task is woken when that changes.
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
        assert_eq!(slow.iter().filter(|u| is_evicted(u)).count(), 3, "they are on their way out");
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
        assert!(!is_evicted(&honest), "the largest upload, of an owner that holds less");
        assert_eq!(attackers.iter().filter(|u| is_evicted(u)).count(), 6);
    }

    #[test]
    fn share_of_one_owner_is_kept_by_its_own_uploads() {
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
