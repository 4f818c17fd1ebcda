//! Readers beside a writer: every result must have been true at one moment during the lookup.

use super::model::Model;
use super::{index, key, named};
use crate::index::children::spread;
use crate::index::{Depth, EngineHash, HolderId, Matches, PrefixIndex, StoredBlock, TenantId, Tier};
use crate::key::BlockKey;
use attache_types::clock::Timestamp;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

const HOLDERS: usize = 4;
const LETTER: u64 = 24;

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        spread(self.0) % n
    }
}

enum Op {
    Store(usize, Tier, Option<EngineHash>, Vec<StoredBlock>),
    Remove(usize, Tier, Vec<EngineHash>),
    Record(usize, Vec<BlockKey>),
    Clear(usize),
}

impl Op {
    fn random(random: &mut Random) -> Self {
        let holder = random.below(HOLDERS as u64) as usize;
        let letters: Vec<u64> = (0..1 + random.below(6)).map(|_| random.below(5) / 3).collect();
        let keys = prompt(&letters);
        let blocks = named(&keys, 0);
        let from = (random.below(letters.len() as u64) * LETTER) as usize;
        let tier = if random.below(4) == 0 { Tier::Cpu } else { Tier::Gpu };
        match random.below(20) {
            0..8 => Self::Store(holder, tier, from.checked_sub(1).map(|p| blocks[p].hash), blocks[from..].to_vec()),
            8..14 => {
                let from = from + random.below(LETTER) as usize;
                Self::Remove(holder, tier, blocks[from..].iter().rev().map(|b| b.hash).collect())
            }
            14..19 => Self::Record(holder, keys),
            _ => Self::Clear(holder),
        }
    }

    fn holder(&self) -> usize {
        match self {
            Self::Store(holder, ..) | Self::Remove(holder, ..) | Self::Record(holder, _) | Self::Clear(holder) => {
                *holder
            }
        }
    }

    fn apply(&self, index: &PrefixIndex, ids: &[HolderId]) {
        match self {
            Self::Store(holder, tier, parent, blocks) => {
                let _ = index.store(ids[*holder], *tier, *parent, blocks);
            }
            Self::Remove(holder, tier, names) => index.remove(ids[*holder], *tier, names),
            Self::Record(holder, keys) => index.record(ids[*holder], keys, TenantId(0), Timestamp(0)),
            Self::Clear(holder) => index.clear(ids[*holder]),
        }
    }

    fn apply_to_model(&self, model: &mut Model) {
        match self {
            Self::Store(holder, tier, parent, blocks) => {
                let _ = model.store(*holder, *tier, *parent, blocks);
            }
            Self::Remove(holder, tier, names) => model.remove(*holder, *tier, names),
            Self::Record(holder, keys) => model.record(*holder, keys),
            Self::Clear(holder) => model.clear(*holder),
        }
    }
}

fn prompt(letters: &[u64]) -> Vec<BlockKey> {
    letters.iter().flat_map(|l| (0..LETTER).map(move |i| key(l << 32 | i))).collect()
}

/// The holders' depths in one state.
type Depths = [Depth; HOLDERS];

fn between(a: u32, b: u32, x: u32) -> bool {
    a.min(b) <= x && x <= a.max(b)
}

/// Whether a result matches one state, or lies between two states while the change was under way.
fn may_be(answer: &Depths, before: &Depths, after: Option<(&Depths, usize)>) -> bool {
    (0..HOLDERS).all(|h| {
        let (is, was) = (answer[h], before[h]);
        match after {
            Some((after, holder)) if holder == h => {
                let will = after[h];
                between(was.gpu, will.gpu, is.gpu)
                    && between(was.cpu, will.cpu, is.cpu)
                    && between(was.any, will.any, is.any)
            }
            _ => is == was,
        }
    })
}

fn run(seed: u64, steps: usize) {
    let index = index(16 << 20);
    let ids: Vec<HolderId> = (0..HOLDERS).map(|_| index.add_holder()).collect();
    let mut model = Model::default();
    (0..HOLDERS).for_each(|h| model.add(h));
    let mut random = Random(spread(seed));
    let queries: Vec<Vec<BlockKey>> =
        (0..12).map(|_| prompt(&(0..6).map(|_| random.below(5) / 3).collect::<Vec<_>>())).collect();
    let ops: Vec<Op> = (0..steps).map(|_| Op::random(&mut random)).collect();
    let state =
        |model: &Model| -> Vec<Depths> { queries.iter().map(|q| std::array::from_fn(|h| model.depth(h, q))).collect() };
    let mut states = vec![state(&model)];
    for op in &ops {
        op.apply_to_model(&mut model);
        states.push(state(&model));
    }
    let (started, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for reader in 0..2 {
            let (index, ids, ops, states, queries, started, done) =
                (&index, &ids, &ops, &states, &queries, &started, &done);
            scope.spawn(move || {
                let mut matches = Matches::default();
                let mut random = Random(spread(seed ^ reader));
                let mut looked = 0;
                while done.load(SeqCst) < steps || looked < 100 {
                    let q = random.below(queries.len() as u64) as usize;
                    let from = done.load(SeqCst);
                    index.lookup(&mut queries[q].as_slice(), &mut matches);
                    let to = started.load(SeqCst);
                    let answer: Depths = std::array::from_fn(|h| matches.depth(ids[h]));
                    let was_true = (from..=to).any(|i| {
                        let after = (i < to).then(|| (&states[i + 1][q], ops[i].holder()));
                        may_be(&answer, &states[i][q], after)
                    });
                    assert!(was_true, "{answer:?} was never true from {from} to {to}: {:?}", &states[from][q]);
                    looked += 1;
                }
            });
        }
        for (i, op) in ops.iter().enumerate() {
            started.store(i + 1, SeqCst);
            op.apply(&index, &ids);
            done.store(i + 1, SeqCst);
        }
    });
}

#[test]
fn every_result_was_true_at_one_moment() {
    for seed in 0..4 {
        run(seed, 2000);
    }
}
