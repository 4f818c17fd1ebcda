//! A trace replayed: `replay TRACE [only=attache,smg,crtc,radix] [modes=lookup,apply,mixed] [reps=5] [workers=64] [capacity=16384]`.

use attache_peers::backends::{Backend, NAMES, make};
use attache_peers::measure::{Runs, argument, cpu, table, trace_argument};
use attache_peers::workload::{Event, Fleet, Request, Rng, read, simulate};
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

struct Replay {
    requests: Vec<Request>,
    fleet: Fleet,
    workers: usize,
}

/// The mean of all and the values that half and 99 % of them are below of.
fn summary(mut micros: Vec<f64>) -> [f64; 3] {
    micros.sort_by(f64::total_cmp);
    let at = |p: f64| micros[((micros.len() - 1) as f64 * p) as usize];
    [micros.iter().sum::<f64>() / micros.len() as f64, at(0.5), at(0.99)]
}

fn main() {
    let names = argument("only", &NAMES.join(","));
    let names: Vec<&str> = NAMES.into_iter().filter(|n| names.split(',').any(|o| o == *n)).collect();
    let modes = argument("modes", "lookup,apply,mixed");
    let reps: usize = argument("reps", "5").parse().expect("a number");
    let workers: usize = argument("workers", "64").parse().expect("a number");
    let capacity: usize = argument("capacity", "16384").parse().expect("a number");
    let requests = read(&trace_argument());
    let fleet = simulate(&requests, workers, capacity, 10.0);
    println!(
        "{} requests, {} workers of {capacity} blocks, {} events, {} blocks stored, {} removed",
        requests.len(),
        workers,
        fleet.events.iter().map(Vec::len).sum::<usize>(),
        fleet.stored,
        fleet.removed
    );
    let replay = Replay { requests, fleet, workers };
    for mode in modes.split(',') {
        match mode {
            "lookup" => replay.lookup(&names, reps),
            "apply" => replay.apply(&names, reps),
            "mixed" => replay.mixed(&names, reps),
            other => panic!("`{other}` is none of lookup, apply, mixed"),
        }
    }
}

impl Replay {
    fn blocks(&self) -> f64 {
        (self.fleet.stored + self.fleet.removed) as f64
    }

    /// Each lookup timed, its events then applied untimed. A request's time is the median of the repetitions, as another process may
    /// have come between in one of them.
    fn lookup(&self, names: &[&str], reps: usize) {
        let mut times: Vec<Vec<Runs>> = names.iter().map(|_| vec![Runs::default(); self.requests.len()]).collect();
        let mut answers = Vec::new();
        for _ in 0..reps {
            for (name, times) in names.iter().zip(&mut times) {
                let index = make(name, self.workers);
                let mut answer = (0, 0);
                for ((request, events), time) in self.requests.iter().zip(&self.fleet.events).zip(times) {
                    let start = Instant::now();
                    let (holders, score) = index.query(&request.local);
                    time.0.push(start.elapsed().as_nanos() as f64 / 1e3);
                    answer = (answer.0 + holders, answer.1 + score);
                    index.writer(events.clone())();
                }
                answers.push((*name, answer));
            }
        }
        for (name, answer) in &answers {
            assert_eq!(*answer, answers[0].1, "{name} finds other holders or depths");
        }
        let figures: Vec<[f64; 3]> = times.iter().map(|t| summary(t.iter().map(Runs::median).collect())).collect();
        for (i, what) in ["mean", "p50", "p99"].into_iter().enumerate() {
            let of_each: Vec<(&str, Runs)> = names.iter().zip(&figures).map(|(n, f)| (*n, Runs(vec![f[i]]))).collect();
            table(&format!("in-order lookup, {what}"), "us", &of_each);
        }
    }

    /// All events in one go.
    fn apply(&self, names: &[&str], reps: usize) {
        let mut figures: Vec<(&str, Runs)> = names.iter().map(|n| (*n, Runs::default())).collect();
        for _ in 0..reps {
            for (name, runs) in &mut figures {
                let index = make(name, self.workers);
                let all = self.fleet.events.iter().flatten().cloned().collect();
                let seconds = index.writer(all)();
                runs.0.push(seconds * 1e9 / self.blocks());
            }
        }
        table("apply", "CPU ns a block", &figures);
    }

    /// The second half of the trace written by one thread while another looks up; then each of the two alone.
    fn mixed(&self, names: &[&str], reps: usize) {
        let half = self.requests.len() / 2;
        let second: Vec<Event> = self.fleet.events[half..].iter().flatten().cloned().collect();
        let blocks = second.iter().map(Event::blocks).sum::<usize>() as f64;
        let kinds = ["write, alone", "write, mixed", "lookup, alone", "lookup, mixed"];
        let mut figures: Vec<Vec<(&str, Runs)>> =
            kinds.iter().map(|_| names.iter().map(|n| (*n, Runs::default())).collect()).collect();
        for rep in 0..reps {
            for (i, name) in names.iter().enumerate() {
                if !make(name, self.workers).is_concurrent() {
                    continue;
                }
                let mut order: Vec<usize> = (half..self.requests.len()).collect();
                Rng::new(rep as u64 + 7).shuffle(&mut order);
                for mixed in [false, true] {
                    let index = make(name, self.workers);
                    index.writer(self.fleet.events[..half].iter().flatten().cloned().collect())();
                    let writer = index.writer(second.clone());
                    let (write, read) = self.side_by_side(&*index, writer, &order, mixed);
                    figures[usize::from(mixed)][i].1.0.push(write * 1e9 / blocks);
                    figures[2 + usize::from(mixed)][i].1.0.push(read * 1e6);
                }
            }
        }
        for (kind, figure) in kinds.iter().zip(&figures) {
            table(kind, if kind.starts_with("write") { "CPU ns a block" } else { "CPU us a lookup" }, figure);
        }
        for (i, name) in names.iter().enumerate() {
            let of = |kind: usize| figures[kind][i].1.median();
            println!("{name}: mixed against alone: write {:.2}, lookup {:.2}", of(1) / of(0), of(3) / of(2));
        }
    }

    /// CPU seconds of the writer, and of a lookup: at the same time, or the lookups after half of the writing and after all of it.
    fn side_by_side(
        &self,
        index: &dyn Backend,
        writer: Box<dyn FnOnce() -> f64 + Send + '_>,
        order: &[usize],
        mixed: bool,
    ) -> (f64, f64) {
        let look = |i: usize| {
            black_box(index.query(&self.requests[order[i % order.len()]].local));
        };
        if mixed {
            let stop = AtomicBool::new(false);
            return std::thread::scope(|scope| {
                let reader = scope.spawn(|| {
                    let (start, mut i) = (cpu(), 0);
                    while !stop.load(Ordering::Relaxed) {
                        look(i);
                        i += 1;
                    }
                    (cpu() - start) / i as f64
                });
                let write = writer();
                stop.store(true, Ordering::Relaxed);
                (write, reader.join().expect("the reader lives"))
            });
        }
        let timed = || {
            let start = cpu();
            (0..2 * order.len()).for_each(look);
            (cpu() - start) / (2 * order.len()) as f64
        };
        let before = timed();
        let write = writer();
        (write, (before + timed()) / 2.0)
    }
}
