//! From a message of KV events to the index: `wire [only=attache,dynamo] [messages=1x1,64x1,1x64,1x512,2x512] [reps=5] [blocks=131072]`,
//! where 64x1 are messages of 64 events of one block.
//!
//! Messages are what vLLM publishes (positional MessagePack, one event of as many blocks as a step has computed, or many events of
//! one block each): chains of 1,024 blocks of 16 tokens are stored, then every fourth is removed, its tail first. Ours is `wire`'s
//! decoder with `PrefixIndex` as its sink. Dynamo's is `decode_event_batch`, `ZmqEventNormalizer` and the single-threaded tree, which
//! takes events faster than its concurrent one. At the end both must have the same blocks.

use attache_peers::measure::{Runs, argument, cpu, table};
use attache_peers::prefix::wire::{Copied, Decoder, Refusal, Removed, Sink, Stored};
use attache_peers::prefix::{EngineHash, HolderId, IndexConfig, KeySpace, PrefixIndex, Tier};
use attache_peers::workload::{Rng, chain, mix};
use dynamo_kv_router::RadixTree;
use dynamo_kv_router::protocols::{KvCacheEventData, WorkerWithDpRank};
use dynamo_kv_router::zmq_wire::{ZmqEventNormalizer, decode_event_batch};
use std::collections::BTreeSet;
use std::time::Duration;

const BLOCK_TOKENS: usize = 16;
const CHAIN_BLOCKS: usize = 1024;
/// Ids of a tokenizer of today.
const VOCABULARY: usize = 150_000;

/// A message in the making.
#[derive(Default)]
struct Packer(Vec<u8>);

impl Packer {
    fn tagged(&mut self, tag: u8, bytes: &[u8]) {
        self.0.push(tag);
        self.0.extend_from_slice(bytes);
    }

    fn array(&mut self, len: usize) {
        match len {
            0..16 => self.0.push(0x90 | len as u8),
            _ => self.tagged(0xdc, &(len as u16).to_be_bytes()),
        }
    }

    fn text(&mut self, text: &str) {
        self.tagged(0xa0 | text.len() as u8, text.as_bytes());
    }

    fn number(&mut self, n: u64) {
        match n {
            0..0x80 => self.0.push(n as u8),
            0x80..0x100 => self.tagged(0xcc, &[n as u8]),
            0x100..0x1_0000 => self.tagged(0xcd, &(n as u16).to_be_bytes()),
            0x1_0000..0x1_0000_0000 => self.tagged(0xce, &(n as u32).to_be_bytes()),
            _ => self.tagged(0xcf, &n.to_be_bytes()),
        }
    }

    fn nil(&mut self) {
        self.0.push(0xc0);
    }

    fn numbers(&mut self, all: impl ExactSizeIterator<Item = u64>) {
        self.array(all.len());
        all.for_each(|n| self.number(n));
    }

    fn message(events: usize, pack: impl FnOnce(&mut Self)) -> Vec<u8> {
        let mut packer = Self::default();
        packer.array(3);
        packer.tagged(0xcb, &1.8e9f64.to_be_bytes());
        packer.array(events);
        pack(&mut packer);
        packer.number(0);
        packer.0
    }

    fn stored(&mut self, parent: Option<u64>, names: &[u64], tokens: &[u32]) {
        self.array(8);
        self.text("BlockStored");
        self.numbers(names.iter().copied());
        match parent {
            Some(name) => self.number(name),
            None => self.nil(),
        }
        self.numbers(tokens.iter().map(|t| u64::from(*t)));
        self.number(BLOCK_TOKENS as u64);
        self.nil();
        self.text("GPU");
        self.nil();
    }

    fn removed(&mut self, names: &[u64]) {
        self.array(3);
        self.text("BlockRemoved");
        self.numbers(names.iter().rev().copied());
        self.text("GPU");
    }
}

/// Messages of `events` events of `blocks` blocks, and the names that are there after them.
fn messages(total: usize, events: usize, blocks: usize) -> (Vec<Vec<u8>>, usize, BTreeSet<u64>) {
    let mut rng = Rng::new(11);
    let (mut all, mut told, mut left) = (Vec::new(), 0, BTreeSet::new());
    for number in 0..total / CHAIN_BLOCKS {
        let tokens: Vec<u32> = (0..CHAIN_BLOCKS * BLOCK_TOKENS).map(|_| rng.below(VOCABULARY) as u32).collect();
        let mut name = mix(number as u64 + 1);
        let next = |_| {
            name = chain(name, 7);
            name
        };
        let names: Vec<u64> = (0..CHAIN_BLOCKS).map(next).collect();
        let parts: Vec<usize> = (0..CHAIN_BLOCKS).step_by(blocks).collect();
        for group in parts.chunks(events) {
            all.push(Packer::message(group.len(), |packer| {
                for &at in group {
                    let end = (at + blocks).min(CHAIN_BLOCKS);
                    let parent = at.checked_sub(1).map(|p| names[p]);
                    packer.stored(parent, &names[at..end], &tokens[at * BLOCK_TOKENS..end * BLOCK_TOKENS]);
                }
            }));
        }
        told += CHAIN_BLOCKS;
        if number % 4 == 0 {
            for at in parts.into_iter().rev() {
                let end = (at + blocks).min(CHAIN_BLOCKS);
                all.push(Packer::message(1, |packer| packer.removed(&names[at..end])));
            }
            told += CHAIN_BLOCKS;
        } else {
            left.extend(names);
        }
    }
    (all, told, left)
}

struct IntoIndex<'a> {
    index: &'a PrefixIndex,
    holder: HolderId,
}

impl Sink for IntoIndex<'_> {
    fn stored(&mut self, event: Stored<'_>) {
        let stored = self.index.store(self.holder, event.tier, event.parent, event.blocks);
        stored.expect("parents come before their children");
    }

    fn copied(&mut self, event: Copied<'_>) {
        panic!("no event of this workload tells of a copy: {event:?}");
    }

    fn stored_apart(&mut self, group: Option<u32>) {
        panic!("no event of this workload is of a group of its own: {group:?}");
    }

    fn removed(&mut self, event: Removed<'_>) {
        self.index.remove(self.holder, event.tier, event.hashes);
    }

    fn cleared(&mut self) {
        self.index.clear(self.holder);
    }

    fn refused(&mut self, reason: Refusal) {
        panic!("refused: {reason}");
    }
}

/// CPU seconds for all messages, and the names that are there then.
fn ours(messages: &[Vec<u8>]) -> (f64, BTreeSet<u64>) {
    let config =
        IndexConfig { budget_bytes: 1 << 30, tenant_share: 0.25, half_life: Duration::from_secs(60), seed: 0x5eed };
    let index = PrefixIndex::new(config);
    let holder = index.add_holder();
    let mut decoder = Decoder::new(KeySpace::new(1));
    let mut sink = IntoIndex { index: &index, holder };
    let start = cpu();
    for message in messages {
        decoder.decode(message, &mut sink).expect("a batch");
    }
    (cpu() - start, index.held(holder, Tier::Gpu).into_iter().map(|EngineHash(name)| name).collect())
}

fn dynamo(messages: &[Vec<u8>]) -> (f64, BTreeSet<u64>) {
    let mut tree = RadixTree::new();
    let mut normalizer = ZmqEventNormalizer::new(BLOCK_TOKENS as u32);
    let worker = WorkerWithDpRank::new(1, 0);
    let start = cpu();
    for (number, message) in messages.iter().enumerate() {
        for event in decode_event_batch(message).expect("a batch").events {
            let event = normalizer.normalize(event, number as u64, worker).and_then(|e| e.into_router_event());
            tree.apply_event(event.expect("an event of a worker")).expect("parents come before their children");
        }
    }
    let seconds = cpu() - start;
    let dumped = tree.dump_tree_as_events().into_iter().flat_map(|event| match event.event.data {
        KvCacheEventData::Stored(stored) => stored.blocks,
        _ => Vec::new(),
    });
    (seconds, dumped.map(|block| block.block_hash.0).collect())
}

fn main() {
    let reps: usize = argument("reps", "5").parse().expect("a number");
    let total: usize = argument("blocks", "131072").parse().expect("a number");
    let only = argument("only", "attache,dynamo");
    let only: Vec<&str> = only.split(',').collect();
    for form in argument("messages", "1x1,64x1,1x64,1x512,2x512").split(',') {
        let (events, blocks) = form.split_once('x').expect("events x blocks");
        let (events, blocks) = (events.parse().expect("a number"), blocks.parse().expect("a number"));
        let (messages, told, left) = messages(total, events, blocks);
        let mut figures = [("attache", Runs::default()), ("dynamo", Runs::default())];
        for _ in 0..reps {
            let contenders = [ours, dynamo].into_iter().zip(&mut figures);
            for (run, (name, runs)) in contenders.filter(|(_, (name, _))| only.contains(name)) {
                let (seconds, held) = run(&messages);
                assert!(held == left, "{name} has {} blocks instead of {}", held.len(), left.len());
                runs.0.push(seconds * 1e9 / told as f64);
            }
        }
        table(&format!("messages of {events} x {blocks} blocks"), "CPU ns a block", &figures);
    }
}
