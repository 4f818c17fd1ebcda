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

#[derive(Default)]
struct Lookups {
    mean: Runs,
    p50: Runs,
    p99: Runs,
}

impl Lookups {
    fn add(&mut self, mut nanos: Vec<u64>) {
        nanos.sort_unstable();
        let at = |p: f64| nanos[((nanos.len() - 1) as f64 * p) as usize] as f64 / 1e3;
        self.mean.0.push(nanos.iter().sum::<u64>() as f64 / nanos.len() as f64 / 1e3);
        self.p50.0.push(at(0.5));
        self.p99.0.push(at(0.99));
    }
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

    /// Each lookup timed, its events then applied untimed.
    fn lookup(&self, names: &[&str], reps: usize) {
        let mut figures: Vec<Lookups> = names.iter().map(|_| Lookups::default()).collect();
        let mut answers = Vec::new();
        for _ in 0..reps {
            for (name, figure) in names.iter().zip(&mut figures) {
                let index = make(name, self.workers);
                let mut nanos = Vec::with_capacity(self.requests.len());
                let mut answer = (0, 0);
                for (request, events) in self.requests.iter().zip(&self.fleet.events) {
                    let start = Instant::now();
                    let (holders, score) = index.query(&request.local);
                    nanos.push(start.elapsed().as_nanos() as u64);
                    answer = (answer.0 + holders, answer.1 + score);
                    index.writer(events.clone())();
                }
                figure.add(nanos);
                answers.push((*name, answer));
            }
        }
        for (name, answer) in &answers {
            assert_eq!(*answer, answers[0].1, "{name} finds other holders or depths");
        }
        let pick = |of: fn(&Lookups) -> &Runs| -> Vec<(&str, Runs)> {
            names.iter().zip(&figures).map(|(n, f)| (*n, of(f).clone())).collect()
        };
        table("in-order lookup, mean", "us", &pick(|f| &f.mean));
        table("in-order lookup, p50", "us", &pick(|f| &f.p50));
        table("in-order lookup, p99", "us", &pick(|f| &f.p99));
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
