//! What a fleet of engines would tell of a recorded trace: queries, stored and removed blocks.
//!
//! A Mooncake line names its prompt by ids of 512 tokens; each becomes 32 blocks of 16 tokens. A router that takes the worker with
//! the least to do sends it somewhere; each worker caches a fixed number of blocks, forgets the least recently used tails first,
//! tells of prefills in pieces of 512 blocks and of each block that it generates.

use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Blocks of 16 tokens that a worker prefills in a second of trace time.
const DRAIN: f64 = 400.0;
/// Blocks in one event of a prefill.
pub const EVENT_BLOCKS: usize = 512;

/// A 64-bit finaliser, so that ids become keys.
#[must_use]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Numbers that are the same in every run.
#[derive(Debug)]
pub struct Rng(u64);

impl Rng {
    /// From a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed ^ 0x9e37_79b9_7f4a_7c15)
    }

    /// Below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        ((u128::from(mix(self.0)) * n as u128) >> 64) as usize
    }

    /// In a new order.
    pub fn shuffle<T>(&mut self, all: &mut [T]) {
        for i in (1..all.len()).rev() {
            let j = self.below(i + 1);
            all.swap(i, j);
        }
    }
}

/// The engines' name of a block behind another one.
#[must_use]
pub fn chain(parent: u64, local: u64) -> u64 {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&parent.to_le_bytes());
    bytes[8..].copy_from_slice(&local.to_le_bytes());
    xxh3_64_with_seed(&bytes, 1337)
}

/// Names of a whole prompt.
#[must_use]
pub fn names(local: &[u64]) -> Vec<u64> {
    let mut names: Vec<u64> = Vec::with_capacity(local.len());
    for l in local {
        names.push(names.last().map_or(*l, |parent| chain(*parent, *l)));
    }
    names
}

/// A request of the trace.
#[derive(Clone, Debug)]
pub struct Request {
    /// Milliseconds since the trace began.
    pub at: u64,
    /// The prompt's blocks.
    pub local: Vec<u64>,
    /// Blocks that are generated.
    pub generated: usize,
}

/// What an engine tells.
#[derive(Clone, Debug)]
pub enum Event {
    /// Blocks behind `parent`.
    Store { worker: u32, parent: Option<u64>, local: Vec<u64>, names: Vec<u64> },
    /// Blocks by name.
    Remove { worker: u32, names: Vec<u64> },
}

impl Event {
    /// How many blocks it tells of.
    #[must_use]
    pub fn blocks(&self) -> usize {
        match self {
            Self::Store { names, .. } | Self::Remove { names, .. } => names.len(),
        }
    }

    /// A chain stored from its start in pieces.
    pub fn prefill(worker: u32, local: &[u64], names: &[u64], from: usize) -> impl Iterator<Item = Self> {
        (from..local.len()).step_by(EVENT_BLOCKS).map(move |at| {
            let end = (at + EVENT_BLOCKS).min(local.len());
            let parent = at.checked_sub(1).map(|p| names[p]);
            Self::Store { worker, parent, local: local[at..end].to_vec(), names: names[at..end].to_vec() }
        })
    }
}

#[derive(serde::Deserialize)]
struct Line {
    timestamp: u64,
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u64>,
}

/// Reads a trace.
#[must_use]
pub fn read(path: &str) -> Vec<Request> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{path}: {e}"));
    let lines = text.lines().filter(|l| !l.is_empty());
    lines
        .map(|line| {
            let line: Line = serde_json::from_str(line).unwrap_or_else(|e| panic!("{path}: {e}"));
            let blocks = line.hash_ids.iter().flat_map(|id| (0..32).map(move |j| mix(0xabcd_0000_0000 + id * 32 + j)));
            let mut local: Vec<u64> = blocks.collect();
            local.truncate((line.input_length / 16).max(1));
            Request { at: line.timestamp, local, generated: line.output_length / 16 }
        })
        .collect()
}

#[derive(Default)]
struct Worker {
    /// Name to last use and depth.
    cached: FxHashMap<u64, (u32, u32)>,
    /// The least recently used first, of equals the deepest.
    order: BTreeSet<(u32, Reverse<u32>, u64)>,
    queued: f64,
    seen: u64,
}

/// What the fleet tells for each request.
#[derive(Debug, Default)]
pub struct Fleet {
    /// By request.
    pub events: Vec<Vec<Event>>,
    /// Blocks stored.
    pub stored: usize,
    /// Blocks removed.
    pub removed: usize,
}

/// Sends a trace through a fleet; `speed` presses its time together, so that the fleet has to do.
#[must_use]
pub fn simulate(requests: &[Request], workers: usize, capacity: usize, speed: f64) -> Fleet {
    let mut all: Vec<Worker> = (0..workers).map(|_| Worker::default()).collect();
    let mut fleet = Fleet::default();
    for (number, request) in requests.iter().enumerate() {
        let prompt = names(&request.local);
        let (chosen, hit) = choose(&mut all, number, request, &prompt, speed);
        let worker = &mut all[chosen];
        let use_number = number as u32 + 1;
        worker.queued += (prompt.len() - hit + request.generated) as f64;
        let mut local = request.local.clone();
        let mut whole = prompt;
        for k in 0..request.generated {
            local.push(mix(0xdec0_de00_0000 ^ ((number as u64) << 16) ^ k as u64));
            whole.push(chain(*whole.last().expect("a prompt has a block"), *local.last().expect("just pushed")));
        }
        for (depth, name) in whole[..hit].iter().enumerate() {
            worker.use_block(*name, use_number, depth as u32);
        }
        let mut events = Vec::new();
        let gone = worker.evict(whole.len() - hit, capacity, use_number);
        fleet.removed += gone.len();
        if !gone.is_empty() {
            events.push(Event::Remove { worker: chosen as u32, names: gone });
        }
        let end = request.local.len();
        events.extend(Event::prefill(chosen as u32, &local[..end], &whole[..end], hit));
        for at in end..whole.len() {
            let (local, names) = (local[at..=at].to_vec(), whole[at..=at].to_vec());
            events.push(Event::Store { worker: chosen as u32, parent: Some(whole[at - 1]), local, names });
        }
        fleet.stored += whole.len() - hit;
        for (depth, name) in whole.iter().enumerate().skip(hit) {
            worker.use_block(*name, use_number, depth as u32);
        }
        fleet.events.push(events);
    }
    fleet
}

fn choose(all: &mut [Worker], number: usize, request: &Request, prompt: &[u64], speed: f64) -> (usize, usize) {
    let mut best = (f64::MAX, 0, 0);
    for (w, worker) in all.iter_mut().enumerate() {
        let elapsed = (request.at - worker.seen) as f64 / 1e3;
        worker.queued = (worker.queued - elapsed * DRAIN / speed).max(0.0);
        worker.seen = request.at;
        let hit = prompt.partition_point(|name| worker.cached.contains_key(name));
        let tie = (mix((number * 131 + w) as u64) % 1000) as f64 * 1e-6;
        let cost = (prompt.len() - hit) as f64 + worker.queued + tie;
        if cost < best.0 {
            best = (cost, w, hit);
        }
    }
    (best.1, best.2)
}

impl Worker {
    fn use_block(&mut self, name: u64, number: u32, depth: u32) {
        if let Some((used, at)) = self.cached.insert(name, (number, depth)) {
            self.order.remove(&(used, Reverse(at), name));
        }
        self.order.insert((number, Reverse(depth), name));
    }

    fn evict(&mut self, more: usize, capacity: usize, current: u32) -> Vec<u64> {
        let mut gone = Vec::new();
        while self.cached.len() + more > capacity {
            let Some(oldest) = self.order.first().copied().filter(|o| o.0 != current) else { break };
            self.order.remove(&oldest);
            self.cached.remove(&oldest.2);
            gone.push(oldest.2);
        }
        gone
    }
}
