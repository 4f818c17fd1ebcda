//! What a prompt's keys cost: from ids beside the bare hash of the same blocks, from bytes beside parsing nothing, from text through the
//! memory beside the plain tokenizer, turn by turn. Each ratio is the median of nine rounds in which the two sides alternate.
//!
//! `cargo bench --bench tokenize`

use attache_prefix::key::{BlockKey, BlockKeys, KeySpace};
use attache_prompt::blocks::{TokenBlocks, le_bytes};
use attache_prompt::characters::Characters;
use attache_prompt::memo::{Memo, SegmentCache};
use attache_prompt::tiktoken::{Encoding, Tables, Tiktoken};
use attache_prompt::{EncodeError, Encoder};
use attache_protocol::prompt::{Piece, Prompt};
use std::borrow::Cow;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use xxhash_rust::xxh3::xxh3_64_with_seed;

const SEED: u64 = 7;
const ROUNDS: usize = 9;

#[expect(clippy::disallowed_methods, reason = "a benchmark is a shell: it may ask for the time")]
fn now() -> Instant {
    Instant::now()
}

fn micros<T>(calls: u32, mut call: impl FnMut() -> T) -> f64 {
    let start = now();
    (0..calls).for_each(|_| drop(black_box(call())));
    start.elapsed().as_secs_f64() * 1e6 / f64::from(calls)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Microseconds of both sides and the second in terms of the first, medians of alternating rounds of at least 10 ms.
fn beside<A, B>(mut one: impl FnMut() -> A, mut other: impl FnMut() -> B) -> (f64, f64, f64) {
    let mut calls = 1u32;
    let enough = Duration::from_millis(10).as_secs_f64() * 1e6;
    while micros(calls, &mut one).max(micros(calls, &mut other)) * f64::from(calls) < enough {
        calls *= 2;
    }
    let rounds: Vec<(f64, f64)> = (0..ROUNDS).map(|_| (micros(calls, &mut one), micros(calls, &mut other))).collect();
    (
        median(rounds.iter().map(|r| r.0).collect()),
        median(rounds.iter().map(|r| r.1).collect()),
        median(rounds.iter().map(|r| r.1 / r.0).collect()),
    )
}

/// Text like a person's, never the same twice.
struct Writer(u64);

const WORDS: &[&str] = &[
    "the",
    "picker",
    "reads",
    "a",
    "request",
    "and",
    "finds",
    "which",
    "server",
    "already",
    "holds",
    "most",
    "of",
    "its",
    "prompt",
    "because",
    "conversations",
    "share",
    "their",
    "beginning",
    "so",
    "we",
    "route",
    "them",
    "together",
    "unless",
    "that",
    "one",
    "is",
    "busy",
    "for",
    "example",
    "when",
    "many",
    "users",
    "ask",
    "about",
    "document",
    "at",
    "once",
    "latency",
    "tokens",
    "cache",
    "memory",
];

impl Writer {
    fn next(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap_or(0) % below
    }

    fn text(&mut self, bytes: usize) -> String {
        let mut out = String::with_capacity(bytes + 16);
        while out.len() < bytes {
            out.push_str(WORDS[self.next(WORDS.len())]);
            out.push_str(match self.next(40) {
                0 => ".\n",
                1 => ".\n\n- ",
                2..=4 => ", ",
                5 => " (42) ",
                _ => " ",
            });
        }
        out.truncate(bytes);
        out
    }
}

fn keys_of_ids() {
    println!("| token ids | raw xxh3 | keys | ratio |\n|---|---|---|---|");
    let blocks = TokenBlocks::new(KeySpace::new(SEED), Arc::new(encoder()), attache_prompt::memo::Cuts::none());
    for n in [2_048u32, 16_384, 131_072] {
        let ids: Vec<u32> = (0..n).map(|i| i.wrapping_mul(2_654_435_761) >> 15).collect();
        let floor = || -> Vec<BlockKey> {
            let (bytes, seed) = (le_bytes(black_box(&ids)), black_box(SEED));
            bytes.chunks_exact(64).map(|block| BlockKey(xxh3_64_with_seed(block, seed))).collect()
        };
        let ours = || blocks.ids(Cow::Borrowed(black_box(&ids)), 1).upto(usize::MAX).len();
        let (floor, ours, ratio) = beside(floor, ours);
        println!("| {n} | {floor:.2} µs | {ours:.2} µs | {ratio:.2} |");
    }
}

fn chat(texts: &[String]) -> Prompt<'_> {
    let role = |i: usize| Piece::Role(Cow::Borrowed(if i.is_multiple_of(2) { "user" } else { "assistant" }));
    let pieces = texts.iter().enumerate().flat_map(|(i, t)| [role(i), Piece::Text(t.as_str().into())]);
    Prompt { pieces: pieces.collect(), ..Prompt::default() }
}

fn keys_of_bytes() {
    println!("\n| 220 KB of text | raw xxh3 | all keys | ratio | the first 16 keys |\n|---|---|---|---|---|");
    let characters = Characters::new(KeySpace::new(SEED));
    let mut writer = Writer(1);
    for messages in [1, 20, 400] {
        let texts: Vec<String> = (0..messages).map(|_| writer.text((220 << 10) / messages)).collect();
        let all = texts.concat();
        let prompt = chat(&texts);
        let floor = || -> Vec<BlockKey> {
            let (blocks, seed) = (black_box(all.as_bytes()).chunks_exact(64), black_box(SEED));
            blocks.map(|block| BlockKey(xxh3_64_with_seed(block, seed))).collect()
        };
        let ours = || characters.keys(black_box(&prompt), 1).upto(usize::MAX).len();
        let (floor, ours, ratio) = beside(floor, ours);
        let (_, first, _) = beside(|| (), || characters.keys(black_box(&prompt), 1).upto(16).len());
        println!("| {messages} messages | {floor:.2} µs | {ours:.2} µs | {ratio:.2} | {first:.2} µs |");
    }
}

/// tiktoken-rs by itself, as fast as it is.
#[derive(Debug)]
struct Plain;

impl Encoder for Plain {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        out.extend(tiktoken_rs::o200k_base_singleton().encode_ordinary(text));
        Ok(())
    }
}

fn encoder() -> Tiktoken {
    thread_local!(static TABLES: Tables = Tables::default());
    TABLES.with(|tables| tables.encoder(Encoding::O200kBase))
}

/// Keys of prompts through a memory of its own.
fn through_memory() -> TokenBlocks {
    let encoder = encoder();
    let cuts = encoder.cuts().expect("the table is compiled in");
    let cache = Arc::new(SegmentCache::new(256 << 20, SEED));
    let memo = Memo::new(Arc::new(encoder), b"bench", cuts.clone(), cache);
    TokenBlocks::new(KeySpace::new(SEED), Arc::new(memo), cuts)
}

/// The same keys by the plain tokenizer.
fn plainly() -> TokenBlocks {
    let cuts = encoder().cuts().expect("the table is compiled in");
    TokenBlocks::new(KeySpace::new(SEED), Arc::new(Plain), cuts)
}

fn cold() {
    println!(
        "\n| never seen, o200k_base | plain | without a memory | ratio | through an empty memory | ratio | to without |"
    );
    println!("|---|---|---|---|---|---|---|");
    let cuts = encoder().cuts().expect("the table is compiled in");
    let (plain, alone) = (plainly(), TokenBlocks::new(KeySpace::new(SEED), Arc::new(encoder()), cuts));
    for (name, bytes, messages) in
        [("4 KB, 8 messages", 4 << 10, 8), ("64 KB, 32 messages", 64 << 10, 32), ("220 KB, one", 220 << 10, 1)]
    {
        let mut writer = Writer(2);
        let mut rounds = Vec::new();
        let memory = through_memory();
        let all = [&plain, &alone, &memory];
        for round in 0..(8 << 20) / bytes {
            let texts: Vec<String> = (0..messages).map(|_| writer.text(bytes / messages)).collect();
            let prompt = chat(&texts);
            let mut times = [0.0; 3];
            // The text is in the processor's cache for whoever comes later: take turns.
            for at in (0..3).map(|i| (i + round) % 3) {
                times[at] = micros(1, || all[at].keys(&prompt, 1).upto(usize::MAX).len());
            }
            rounds.push(times);
        }
        let time = |at: usize| median(rounds.iter().map(|times| times[at]).collect());
        let ratio = |at: usize, of: usize| median(rounds.iter().map(|times| times[at] / times[of]).collect());
        println!(
            "| {name} | {:.0} µs | {:.0} µs | {:.3} | {:.0} µs | {:.3} | {:.3} |",
            time(0),
            time(1),
            ratio(1, 0),
            time(2),
            ratio(2, 0),
            ratio(2, 1)
        );
    }
}

/// Conversations with a system prompt that all share: 6 KB; questions of 400 bytes, answers of 1,600.
fn turns() {
    println!("\n| turn | bytes | plain | answers not learned | ratio | answers learned | ratio | all seen | ratio |");
    println!("|---|---|---|---|---|---|---|---|---|");
    const TURNS: usize = 8;
    let mut writer = Writer(3);
    let system = writer.text(6 << 10);
    let plain = plainly();
    let memories = [through_memory(), through_memory()];
    let mut rows = vec![Vec::new(); TURNS];
    for _ in 0..60 {
        let mut texts = vec![system.clone()];
        for row in &mut rows {
            texts.push(writer.text(400));
            let prompt = chat(&texts);
            let one = |blocks: &TokenBlocks| micros(1, || blocks.keys(&prompt, 1).upto(usize::MAX).len());
            let bytes: usize = texts.iter().map(String::len).sum();
            row.push([one(&plain), one(&memories[0]), one(&memories[1]), one(&memories[1]), bytes as f64]);
            texts.push(writer.text(1_600));
            // The picker has read the answer as it went by.
            let answered = texts.last().map_or("", String::as_str);
            memories[1].encoder.encode(answered, &mut Vec::new()).expect("within bounds");
        }
    }
    for (i, row) in rows.iter().enumerate() {
        let [plain, unlearned, learned, seen, bytes] =
            [0, 1, 2, 3, 4].map(|column| median(row.iter().map(|r| r[column]).collect()));
        println!(
            "| {} | {bytes:.0} | {plain:.0} µs | {unlearned:.0} µs | {:.1} | {learned:.1} µs | {:.1} | {seen:.1} µs | {:.1} |",
            i + 1,
            plain / unlearned,
            plain / learned,
            plain / seen
        );
    }
}

fn main() {
    keys_of_ids();
    keys_of_bytes();
    cold();
    turns();
}
