//! What a simulated engine costs the machine that it runs on: requests in a closed loop, with every token told and with none; and, where
//! a trace is given (JSON lines as Mooncake published them), the whole trace over eight engines by turns. Best of three rounds each.
//!
//! `cargo bench --bench engine [-- TRACE [SPEED]]`: the trace SPEED times as fast as it was recorded; 1 without.

use attache_sim::content::Piece;
use attache_sim::engine::{Engine, EngineConfig, EngineEvent, Handoff, Job, JobId, JobPrompt};
use attache_types::clock::Timestamp;

/// Tokens of a prompt: a beginning that every hundredth request has, and its own.
const SHARED: u32 = 64;
const OWN: u32 = 136;

/// Requests that one engine gets from clients who ask again as soon as they have their answer.
struct Load {
    name: &'static str,
    clients: u64,
    requests: u64,
    answer: u32,
}

const LOADS: &[Load] = &[
    Load { name: "30 in flight, answers of 50 tokens", clients: 30, requests: 100_000, answer: 50 },
    Load { name: "250 in flight, answers of 1,000 tokens", clients: 250, requests: 10_000, answer: 1_000 },
];

const ENGINES: usize = 8;
/// Tokens in a block of a trace.
const TRACE_BLOCK: u32 = 512;
/// An 8B model on an 80 GB card.
const NUM_BLOCKS: u32 = 27_000;

/// Seconds that this thread has had a core: what others do on the machine counts less than in wall time.
fn cpu() -> f64 {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux tells the time of a thread");
    stat.split(' ').next().and_then(|nanos| nanos.parse::<f64>().ok()).expect("nanoseconds") / 1e9
}

fn config(every_token: bool) -> EngineConfig {
    EngineConfig { num_blocks: NUM_BLOCKS, max_model_len: 1 << 20, every_token, ..EngineConfig::default() }
}

/// The answer's name lies away from those of prompts.
fn job(number: u64, prompt: Vec<Piece>, answer: u32) -> Job {
    Job {
        id: JobId(number),
        prompt: JobPrompt::Pieces(prompt),
        max_tokens: answer.max(1),
        stops_after: None,
        lora: None,
        cache_salt: None,
        answer_seed: u64::MAX - number,
        handoff: Handoff::default(),
    }
}

/// CPU seconds for a round, and its steps.
type Round = (f64, u64);

fn closed_loop(load: &Load, every_token: bool) -> Round {
    let mut engine = Engine::new(config(every_token));
    let mut events = Vec::new();
    let start = cpu();
    let mut submitted = 0;
    let mut submit = |engine: &mut Engine, at| {
        let prompt = vec![Piece::new(submitted % 100, SHARED), Piece::new(1_000 + submitted, OWN)];
        engine.submit(at, job(submitted, prompt, load.answer)).expect("room");
        submitted += 1;
    };
    (0..load.clients).for_each(|_| submit(&mut engine, Timestamp(0)));
    let mut ended = 0;
    while ended < load.requests {
        let at = engine.quiet_until().expect("work");
        engine.advance(at, &mut events);
        for event in events.drain(..) {
            if let EngineEvent::Finished { at, .. } = event {
                ended += 1;
                submit(&mut engine, at);
            }
        }
    }
    (cpu() - start, engine.stats().steps)
}

/// One request of a trace.
struct Row {
    at: Timestamp,
    prompt: Vec<Piece>,
    answer: u32,
}

fn rows(path: &str, speed: f64) -> Vec<Row> {
    let text = std::fs::read_to_string(path).expect("the trace can be read");
    let row = |line: &str| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line is JSON");
        let number = |name: &str| line[name].as_u64().expect("a number");
        let mut rest = number("input_length") as u32;
        let ids = line["hash_ids"].as_array().expect("hash_ids is a list").iter().map(|id| id.as_u64().expect("an id"));
        let piece = |id| {
            let tokens = rest.min(TRACE_BLOCK);
            rest -= tokens;
            Piece::new(id, tokens)
        };
        let prompt = ids.map(piece).collect();
        let at = Timestamp((number("timestamp") as f64 * 1e6 / speed) as u64);
        Row { at, prompt, answer: number("output_length") as u32 }
    };
    text.lines().map(row).collect()
}

fn by_turns(rows: &[Row], every_token: bool) -> (Round, f64) {
    let mut engines: Vec<Engine> = (0..ENGINES).map(|_| Engine::new(config(every_token))).collect();
    let mut events = Vec::new();
    let start = cpu();
    for (number, row) in rows.iter().enumerate() {
        let engine = &mut engines[number % ENGINES];
        engine.advance(row.at, &mut events);
        events.clear();
        engine.submit(row.at, job(number as u64, row.prompt.clone(), row.answer)).expect("room");
    }
    for engine in &mut engines {
        while let Some(at) = engine.quiet_until() {
            engine.advance(at, &mut events);
            events.clear();
        }
    }
    let seconds = cpu() - start;
    let sum = |of: fn(&Engine) -> u64| engines.iter().map(of).sum::<u64>();
    assert_eq!(sum(|e| e.stats().finished_length), rows.len() as u64);
    let hits = sum(|e| e.stats().prefix_hits) as f64 / sum(|e| e.stats().prefix_queries) as f64;
    ((seconds, sum(|e| e.stats().steps)), hits)
}

fn best<T>(mut round: impl FnMut() -> (Round, T)) -> (Round, T) {
    let mut all: Vec<_> = (0..3).map(|_| round()).collect();
    all.sort_by(|a, b| a.0.0.total_cmp(&b.0.0));
    all.swap_remove(0)
}

fn main() {
    println!(
        "| prompts of {} tokens | told | CPU µs a request | requests/s of a core | ns a step | ratio |",
        SHARED + OWN
    );
    println!("|---|---|---|---|---|---|");
    for load in LOADS {
        let (every, ()) = best(|| (closed_loop(load, true), ()));
        let (none, ()) = best(|| (closed_loop(load, false), ()));
        for (told, (seconds, steps)) in [("every token", every), ("no token", none)] {
            println!(
                "| {} | {told} | {:.2} | {:.0} | {:.0} | {:.2} |",
                load.name,
                seconds / load.requests as f64 * 1e6,
                load.requests as f64 / seconds,
                seconds / steps as f64 * 1e9,
                every.0 / seconds
            );
        }
    }
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let Some(path) = arguments.next() else { return };
    let speed = arguments.next().map_or(1.0, |speed| speed.parse().expect("SPEED is a number"));
    let rows = rows(&path, speed);
    println!(
        "\n| trace, {} requests, {ENGINES} engines by turns | CPU s | hit ratio | steps |\n|---|---|---|---|",
        rows.len()
    );
    for (name, every_token) in [("every token told", true), ("no token told", false)] {
        let ((seconds, steps), hits) = best(|| by_turns(&rows, every_token));
        println!("| {name} | {seconds:.2} | {hits:.3} | {steps} |");
    }
}
