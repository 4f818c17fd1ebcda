//! How fast a real metrics page is read: `cargo bench --bench exposition`.
//!
//! The limit is `memchr` finding the lines and doing nothing with them; the scanner's time is shown as a multiple of it, so that a
//! busy machine does not spoil the figure.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]

use attache_pool::Engine;
use attache_scrape::engines::EngineMap;
use attache_types::clock::Timestamp;
use std::hint::black_box;
use std::time::{Duration, Instant};

/// Runs of one measurement; the best of several measurements counts.
const RUNS: u32 = 200;
const MEASUREMENTS: u32 = 30;

fn best(mut work: impl FnMut()) -> Duration {
    (0..MEASUREMENTS)
        .map(|_| {
            let start = Instant::now();
            (0..RUNS).for_each(|_| work());
            start.elapsed() / RUNS
        })
        .min()
        .unwrap_or_default()
}

fn main() {
    let pages: [(&str, &[u8]); 3] = [
        ("vLLM 0.22.1", include_bytes!("../tests/data/metrics/vllm_0.22.1.txt")),
        ("vLLM 0.32.0, idle", include_bytes!("../tests/data/metrics/vllm_0.32.0_idle_after_load.txt")),
        ("vLLM 0.32.0, load", include_bytes!("../tests/data/metrics/vllm_0.32.0_under_load_lora.txt")),
    ];
    let Some(map) = EngineMap::of(Engine::Vllm) else { return };
    println!(
        "{:<20} {:>8} {:>7} {:>12} {:>10} {:>8} {:>8}",
        "page", "bytes", "lines", "find lines", "read", "ratio", "GB/s"
    );
    for (name, page) in pages {
        let lines = memchr::memchr_iter(b'\n', page).count();
        // Not `count`, which is faster than finding each line, because nobody could do anything with the lines then.
        let limit = best(|| memchr::memchr_iter(b'\n', black_box(page)).for_each(|at| _ = black_box(at)));
        let read = best(|| drop(black_box(map.read(black_box(page), Timestamp(1), 0))));
        println!(
            "{name:<20} {:>8} {lines:>7} {limit:>12.2?} {read:>10.2?} {:>8.2} {:>8.2}",
            page.len(),
            read.as_secs_f64() / limit.as_secs_f64(),
            page.len() as f64 / read.as_secs_f64() / 1e9,
        );
    }
}
