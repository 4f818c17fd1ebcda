//! Live heap and mapped memory per (block, holder): `mem TRACE [only=…] [states=trace,unique,shared8,shared64,churn]`.
//!
//! trace: at the end of the trace. unique: 16,384 chains of 64 blocks, one holder each. shared8, shared64: 8,192 chains of 128
//! blocks on so many holders each. churn: 262,144 unique blocks stored and removed, five times over.

use attache_peers::backends::{Backend, NAMES, make};
use attache_peers::measure::{Runs, argument, table, trace_argument};
use attache_peers::workload::{Event, mix, names, read, simulate};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicIsize, Ordering::Relaxed};

struct Counting;

static LIVE: AtomicIsize = AtomicIsize::new(0);

fn count(bytes: isize) {
    LIVE.fetch_add(bytes, Relaxed);
}

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size as isize - layout.size() as isize);
        // SAFETY: as the caller promises.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const WORKERS: usize = 64;

fn chain(c: u64, length: u64) -> (Vec<u64>, Vec<u64>) {
    let local: Vec<u64> = (0..length).map(|i| mix((c << 20) + i + 7)).collect();
    let called = names(&local);
    (local, called)
}

fn tell(index: &dyn Backend, events: Vec<Event>) {
    index.writer(events)();
}

fn shared(index: &dyn Backend, chains: u64, length: u64, holders: u64) -> usize {
    for c in 0..chains {
        let (local, called) = chain(c, length);
        for k in 0..holders {
            let worker = ((c * 7 + k) % WORKERS as u64) as u32;
            let (local, names) = (local.clone(), called.clone());
            tell(index, vec![Event::Store { worker, parent: None, local, names }]);
        }
    }
    (chains * length * holders) as usize
}

fn churn(index: &dyn Backend, round: u64) {
    for c in 0..2048 {
        let (local, called) = chain(round << 30 | c, 128);
        let worker = (c % WORKERS as u64) as u32;
        let removed = called.iter().rev().copied().collect();
        tell(
            index,
            vec![Event::Store { worker, parent: None, local, names: called }, Event::Remove { worker, names: removed }],
        );
    }
    index.maintain();
}

fn main() {
    let only = argument("only", &NAMES.join(","));
    let contenders: Vec<&str> = NAMES.into_iter().filter(|n| only.split(',').any(|o| o == *n)).collect();
    let requests = read(&trace_argument());
    let fleet = simulate(&requests, WORKERS, 16_384, 10.0);
    for state in argument("states", "trace,unique,shared8,shared64,churn").split(',') {
        let mut figures = Vec::new();
        for name in &contenders {
            let before = LIVE.load(Relaxed);
            let index = make(name, WORKERS);
            let live = || (LIVE.load(Relaxed) - before) as f64 + index.mapped() as f64;
            let mut swept = 0;
            let mut rounds = Vec::new();
            let memberships = match state {
                "trace" => {
                    for (events, request) in fleet.events.iter().zip(&requests) {
                        if request.at - swept > 300_000 {
                            swept = request.at;
                            index.maintain();
                        }
                        tell(&*index, events.clone());
                    }
                    fleet.stored - fleet.removed
                }
                "unique" => shared(&*index, 16_384, 64, 1),
                "shared8" => shared(&*index, 8_192, 128, 8),
                "shared64" => shared(&*index, 8_192, 128, 64),
                "churn" => {
                    for round in 0..5 {
                        churn(&*index, round);
                        rounds.push(live() / 1e6);
                    }
                    0
                }
                other => panic!("`{other}` is none of trace, unique, shared8, shared64, churn"),
            };
            if memberships == 0 {
                println!("churn, {name}: MB after each round {rounds:.1?}");
            } else {
                figures.push((*name, Runs(vec![live() / memberships as f64])));
            }
        }
        if !figures.is_empty() {
            table(state, "bytes per block and holder", &figures);
        }
    }
}
