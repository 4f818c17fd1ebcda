//! The contenders, each driven the way its own project drives it.

use crate::measure::{clock, cpu};
use crate::prefix::{BlockKey, EngineHash, HolderId, IndexConfig, PrefixIndex, StoredBlock, Tier};
use crate::workload::Event;
use dynamo_kv_router::indexer::{SyncIndexer, WorkerTask};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, RadixTree};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, SequenceHash};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

/// Ours first, then SMG's ChainIndex, Dynamo's concurrent tree (its production index) and its single-threaded one.
pub const NAMES: [&str; 4] = ["attache", "smg", "crtc", "radix"];

/// Applies what was prepared; returns the CPU seconds of the thread that applied it.
pub type Writer<'a> = Box<dyn FnOnce() -> f64 + Send + 'a>;

/// An index under test.
pub trait Backend: Sync + Send {
    /// Prepares events, untimed.
    fn writer(&self, events: Vec<Event>) -> Writer<'_>;
    /// Holders found and the sum of their depths.
    fn query(&self, prompt: &[u64]) -> (usize, u64);
    /// Whether reader and writer may be two threads.
    fn is_concurrent(&self) -> bool {
        true
    }
    /// Bytes that it has taken from the system without the allocator.
    fn mapped(&self) -> usize {
        0
    }
    /// What the index does from time to time.
    fn maintain(&self) {}
}

/// A contender by name.
#[must_use]
pub fn make(name: &str, workers: usize) -> Box<dyn Backend> {
    match name {
        "attache" => Box::new(Ours::new(workers)),
        "smg" => Box::new(Smg::new(workers)),
        "crtc" => Box::new(Crtc::new()),
        "radix" => Box::new(Radix(RefCell::new(RadixTree::new()))),
        other => panic!("`{other}` is none of {NAMES:?}"),
    }
}

struct Ours {
    index: PrefixIndex,
    holders: Vec<HolderId>,
}

enum OurEvent {
    Store(HolderId, Option<EngineHash>, Vec<StoredBlock>),
    Remove(HolderId, Vec<EngineHash>),
}

impl Ours {
    fn new(workers: usize) -> Self {
        let index = PrefixIndex::new(IndexConfig {
            budget_bytes: 1 << 30,
            tenant_share: 0.25,
            half_life: Duration::from_secs(60),
            seed: 0x5eed,
        });
        let holders = (0..workers).map(|_| index.add_holder()).collect();
        Self { index, holders }
    }

    fn event(&self, event: Event) -> OurEvent {
        match event {
            Event::Store { worker, parent, local, names } => {
                let blocks = names.into_iter().zip(local);
                let blocks = blocks.map(|(n, l)| StoredBlock { hash: EngineHash(n), key: BlockKey(l) }).collect();
                OurEvent::Store(self.holders[worker as usize], parent.map(EngineHash), blocks)
            }
            Event::Remove { worker, names } => {
                OurEvent::Remove(self.holders[worker as usize], names.into_iter().map(EngineHash).collect())
            }
        }
    }
}

impl Backend for Ours {
    fn writer(&self, events: Vec<Event>) -> Writer<'_> {
        let events: Vec<OurEvent> = events.into_iter().map(|e| self.event(e)).collect();
        Box::new(move || {
            let start = cpu();
            for event in events {
                match event {
                    OurEvent::Store(holder, parent, blocks) => {
                        let stored = self.index.store(holder, Tier::Gpu, parent, &blocks);
                        stored.expect("parents come before their children");
                    }
                    OurEvent::Remove(holder, names) => self.index.remove(holder, Tier::Gpu, &names),
                }
            }
            cpu() - start
        })
    }

    fn query(&self, prompt: &[u64]) -> (usize, u64) {
        let found = self.index.find(&mut as_keys(prompt));
        found.iter().fold((0, 0), |(holders, sum), m| (holders + 1, sum + u64::from(m.depth.gpu)))
    }

    fn mapped(&self) -> usize {
        self.index.stats().mapped_bytes
    }
}

fn as_keys(prompt: &[u64]) -> &[BlockKey] {
    // SAFETY: `BlockKey` is a transparent u64.
    unsafe { std::slice::from_raw_parts(prompt.as_ptr().cast(), prompt.len()) }
}

struct Smg {
    index: ChainIndex,
    maps: Mutex<Vec<ChainBlockMap>>,
    ids: Vec<u32>,
}

enum SmgEvent {
    Store(u32, Option<SequenceHash>, Vec<kv_index::StoredBlock>),
    Remove(u32, Vec<SequenceHash>),
}

impl Smg {
    fn new(workers: usize) -> Self {
        let index = ChainIndex::with_max_workers(workers.max(64));
        let ids = (0..workers).map(|w| index.intern_worker(&format!("w{w}")).expect("a free id")).collect();
        Self { index, maps: Mutex::new((0..workers).map(|_| ChainBlockMap::new()).collect()), ids }
    }
}

impl Backend for Smg {
    fn writer(&self, events: Vec<Event>) -> Writer<'_> {
        let block = |(n, l)| kv_index::StoredBlock { seq_hash: SequenceHash(n), content_hash: ContentHash(l) };
        let event = |event| match event {
            Event::Store { worker, parent, local, names } => {
                SmgEvent::Store(worker, parent.map(SequenceHash), names.into_iter().zip(local).map(block).collect())
            }
            Event::Remove { worker, names } => SmgEvent::Remove(worker, names.into_iter().map(SequenceHash).collect()),
        };
        let events: Vec<SmgEvent> = events.into_iter().map(event).collect();
        Box::new(move || {
            let mut maps = self.maps.lock().expect("nobody panicked");
            let start = cpu();
            for event in events {
                match event {
                    SmgEvent::Store(w, parent, blocks) => {
                        let (id, map) = (self.ids[w as usize], &mut maps[w as usize]);
                        let stored = self.index.apply_stored(id, &blocks, parent, map);
                        assert!(stored.is_ok(), "parents come before their children");
                    }
                    SmgEvent::Remove(w, names) => {
                        self.index.apply_removed(self.ids[w as usize], &names, &mut maps[w as usize]);
                    }
                }
            }
            cpu() - start
        })
    }

    fn query(&self, prompt: &[u64]) -> (usize, u64) {
        let (mut holders, mut sum) = (0, 0);
        self.index.score_into(
            prompt,
            |k| *k,
            false,
            |_, score| {
                holders += 1;
                sum += score as u64;
            },
        );
        (holders, sum)
    }
}

fn router_event(event: Event, id: u64) -> RouterEvent {
    let (worker, data) = match event {
        Event::Store { worker, parent, local, names } => {
            let block = |(l, n): (u64, u64)| KvCacheStoredBlockData {
                block_hash: ExternalSequenceBlockHash(n),
                tokens_hash: LocalBlockHash(l),
                mm_extra_info: None,
            };
            let data = KvCacheStoreData {
                parent_hash: parent.map(ExternalSequenceBlockHash),
                start_position: None,
                blocks: local.into_iter().zip(names).map(block).collect(),
            };
            (worker, KvCacheEventData::Stored(data))
        }
        Event::Remove { worker, names } => {
            let block_hashes = names.into_iter().map(ExternalSequenceBlockHash).collect();
            (worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
        }
    };
    RouterEvent::new(u64::from(worker), KvCacheEvent { event_id: id, dp_rank: 0, data })
}

fn local_hashes(prompt: &[u64]) -> &[LocalBlockHash] {
    const { assert!(size_of::<LocalBlockHash>() == 8 && align_of::<LocalBlockHash>() == 8) };
    // SAFETY: a struct of one u64, of the same size and alignment.
    unsafe { std::slice::from_raw_parts(prompt.as_ptr().cast(), prompt.len()) }
}

fn score(scores: &OverlapScores) -> (usize, u64) {
    (scores.scores.len(), scores.scores.values().map(|v| u64::from(*v)).sum())
}

/// Dynamo's concurrent tree, fed through the worker loop that it has for its events.
struct Crtc {
    tree: Arc<ConcurrentRadixTreeCompressed>,
    tasks: flume::Sender<WorkerTask>,
    receiver: Mutex<Option<flume::Receiver<WorkerTask>>>,
    worker_clock: Mutex<libc::clockid_t>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl Crtc {
    fn new() -> Self {
        let (tasks, receiver) = flume::unbounded();
        let tree = Arc::new(ConcurrentRadixTreeCompressed::new());
        Self {
            tree,
            tasks,
            receiver: Mutex::new(Some(receiver)),
            worker_clock: Mutex::new(0),
            worker: Mutex::default(),
        }
    }

    fn start(&self, receiver: flume::Receiver<WorkerTask>) {
        let tree = Arc::clone(&self.tree);
        let (clock_sender, clock_receiver) = std::sync::mpsc::channel();
        let worker = std::thread::spawn(move || {
            let mut id: libc::clockid_t = 0;
            // SAFETY: the thread asks for the clock of itself.
            unsafe { libc::pthread_getcpuclockid(libc::pthread_self(), &mut id) };
            clock_sender.send(id).expect("the starter waits");
            tree.worker(receiver, None).expect("the worker ends on request");
        });
        *self.worker.lock().expect("nobody panicked") = Some(worker);
        *self.worker_clock.lock().expect("nobody panicked") = clock_receiver.recv().expect("the thread has started");
    }

    fn flush(&self) {
        let (done, wait) = tokio::sync::oneshot::channel();
        self.tasks.send(WorkerTask::Flush(done)).expect("the worker runs");
        wait.blocking_recv().expect("the worker runs");
    }
}

impl Drop for Crtc {
    fn drop(&mut self) {
        let _ = self.tasks.send(WorkerTask::Terminate);
        // What it holds of the tree is freed before the next contender's memory is counted.
        let worker = self.worker.lock().ok().and_then(|mut worker| worker.take());
        let _ = worker.map(JoinHandle::join);
    }
}

impl Backend for Crtc {
    fn writer(&self, events: Vec<Event>) -> Writer<'_> {
        let events = events.into_iter().enumerate();
        let tasks: Vec<WorkerTask> = events.map(|(i, e)| WorkerTask::Event(router_event(e, i as u64))).collect();
        Box::new(move || {
            let first = self.receiver.lock().expect("nobody panicked").take();
            let is_first = first.is_some();
            let read = || clock(*self.worker_clock.lock().expect("nobody panicked"));
            let start = if is_first { 0.0 } else { read() };
            for task in tasks {
                self.tasks.send(task).expect("the worker runs");
            }
            if let Some(receiver) = first {
                self.start(receiver);
            }
            self.flush();
            read() - start
        })
    }

    fn query(&self, prompt: &[u64]) -> (usize, u64) {
        score(&self.tree.find_matches(local_hashes(prompt), false))
    }

    fn maintain(&self) {
        if self.receiver.lock().expect("nobody panicked").is_none() {
            self.tasks.send(WorkerTask::CleanupStaleChildren).expect("the worker runs");
            self.flush();
        }
    }
}

/// Dynamo's single-threaded tree.
struct Radix(RefCell<RadixTree>);

// SAFETY: the benches drive it from one thread at a time (`is_concurrent` says no).
unsafe impl Sync for Radix {}
// SAFETY: as above.
unsafe impl Send for Radix {}

struct Exclusive<'a>(&'a Radix);
// SAFETY: as above.
unsafe impl Send for Exclusive<'_> {}

impl Backend for Radix {
    fn writer(&self, events: Vec<Event>) -> Writer<'_> {
        let events: Vec<RouterEvent> = events.into_iter().enumerate().map(|(i, e)| router_event(e, i as u64)).collect();
        let exclusive = Exclusive(self);
        Box::new(move || {
            let exclusive = exclusive;
            let mut tree = exclusive.0.0.borrow_mut();
            let start = cpu();
            for event in events {
                let _ = tree.apply_event(event);
            }
            cpu() - start
        })
    }

    fn query(&self, prompt: &[u64]) -> (usize, u64) {
        score(&self.0.borrow().find_matches(local_hashes(prompt).to_vec(), false))
    }

    fn is_concurrent(&self) -> bool {
        false
    }
}
