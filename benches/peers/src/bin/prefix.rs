//! Lookups by shape of the prefix: `prefix [only=…] [shapes=full,one,ragged,branchy] [lengths=128,1024,8192] [workers=64] [reps=5]`.
//!
//! full: all workers hold all of every chain. one: one worker does. ragged: each worker holds a random beginning. branchy: as full,
//! and a sibling of 8 blocks leaves every 64th block. A query is a whole chain and 16 blocks that nobody has.

use attache_peers::backends::{NAMES, make};
use attache_peers::measure::{Runs, argument, cpu, table};
use attache_peers::workload::{Event, Rng, chain, mix, names};
use std::hint::black_box;

const TOTAL_BLOCKS: usize = 262_144;

fn main() {
    let only = argument("only", &NAMES.join(","));
    let contenders: Vec<&str> = NAMES.into_iter().filter(|n| only.split(',').any(|o| o == *n)).collect();
    let workers: usize = argument("workers", "64").parse().expect("a number");
    let reps: usize = argument("reps", "5").parse().expect("a number");
    for shape in argument("shapes", "full,one,ragged,branchy").split(',') {
        for length in argument("lengths", "128,1024,8192").split(',') {
            measure(shape, length.parse().expect("a number"), workers, reps, &contenders);
        }
    }
}

fn events(shape: &str, length: usize, workers: usize, chains: &[Vec<u64>]) -> Vec<Event> {
    let mut all = Vec::new();
    let mut rng = Rng::new(42);
    for (c, local) in chains.iter().enumerate() {
        let whole = names(local);
        for w in 0..workers {
            let held = match shape {
                "full" | "branchy" => length,
                "one" => length * usize::from(w == c % workers),
                "ragged" => 1 + rng.below(length),
                other => panic!("`{other}` is none of full, one, ragged, branchy"),
            };
            all.extend(Event::prefill(w as u32, &local[..held], &whole[..held], 0));
        }
        if shape == "branchy" {
            for at in (64..length).step_by(64) {
                let branch: Vec<u64> = (0..8).map(|i| mix((c as u64) << 40 ^ (at as u64) << 8 ^ i ^ 0x5151)).collect();
                let mut parent = whole[at - 1];
                let called = branch.iter().map(|l| {
                    parent = chain(parent, *l);
                    parent
                });
                let (called, worker) = (called.collect(), ((at / 64 + c) % workers) as u32);
                all.push(Event::Store { worker, parent: Some(whole[at - 1]), local: branch, names: called });
            }
        }
    }
    all
}

fn measure(shape: &str, length: usize, workers: usize, reps: usize, contenders: &[&str]) {
    let count = (TOTAL_BLOCKS / length).max(4);
    let block = |c: usize, i: usize| mix(((c as u64) << 32) + i as u64 + 1);
    let chains: Vec<Vec<u64>> = (0..count).map(|c| (0..length + 16).map(|i| block(c, i)).collect()).collect();
    let told = events(shape, length, workers, &chains);
    let blocks: usize = told.iter().map(Event::blocks).sum();
    let mut load: Vec<(&str, Runs)> = Vec::new();
    let mut indexes = Vec::new();
    for name in contenders {
        let index = make(name, workers);
        let seconds: f64 = told.chunks(20_000).map(|part| index.writer(part.to_vec())()).sum();
        load.push((name, Runs(vec![seconds * 1e9 / blocks as f64])));
        indexes.push(index);
    }
    for c in 0..count {
        let answers: Vec<_> = indexes.iter().map(|i| i.query(&chains[c])).collect();
        assert!(answers.iter().all(|a| *a == answers[0]), "{contenders:?} find {answers:?}");
    }
    let mut lookups: Vec<(&str, Runs)> = contenders.iter().map(|n| (*n, Runs::default())).collect();
    let queries = (10_000_000 / length / (workers / 64).max(1)).clamp(200, 30_000);
    let mut order: Vec<usize> = (0..count).collect();
    for rep in 0..=reps {
        Rng::new(rep as u64).shuffle(&mut order);
        for (index, (_, runs)) in indexes.iter().zip(&mut lookups) {
            let start = cpu();
            for i in 0..queries {
                black_box(index.query(&chains[order[i % count]]));
            }
            // The first round warms.
            if rep > 0 {
                runs.0.push((cpu() - start) / queries as f64 * 1e6);
            }
        }
    }
    table(&format!("{shape}, {length} blocks, {workers} workers: lookup"), "CPU us", &lookups);
    table(&format!("{shape}, {length} blocks, {workers} workers: load"), "CPU ns a block", &load);
}
