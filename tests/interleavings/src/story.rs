//! The writes of a story, and what the index may return at each of their steps.

use attache_types::clock::Timestamp;
use crate::memory::{self, Step};
use crate::model::Model;
use crate::index::{HolderId, IndexConfig, Matches, PrefixIndex, StoredBlock, TenantId, Tier};
use crate::key::{BlockKey, EngineHash};
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// A write. Holders are numbered as they are added.
#[derive(Clone, Debug)]
pub enum Write {
    /// Adds a holder.
    Add,
    /// Removes a holder.
    RemoveHolder(usize),
    /// An engine has cleared its cache.
    Clear(usize),
    /// An engine has stored blocks after the first `behind` blocks of a prompt. Their hashes are chained.
    Store { holder: usize, tier: Tier, prompt: Vec<BlockKey>, behind: usize },
    /// An engine has evicted the blocks of a prompt from `from` on, the last one first.
    Remove { holder: usize, tier: Tier, prompt: Vec<BlockKey>, from: usize },
    /// A prompt was routed to a holder. The index evicts the blocks of `evicts` for it.
    Record { holder: usize, prompt: Vec<BlockKey>, evicts: Option<usize> },
}

/// An index, the writes before the look-ups, the writes concurrent with them, and the prompts to look up.
#[derive(Clone, Debug)]
pub struct Story {
    /// Memory budget of the index.
    pub budget_bytes: usize,
    /// Seed of the index's hash tables.
    pub seed: u64,
    /// Writes before the look-ups.
    pub before: Vec<Write>,
    /// Writes of the writer thread.
    pub writes: Vec<Write>,
    /// Prompts that the readers look up.
    pub prompts: Vec<Vec<BlockKey>>,
}

/// Blocks of a prompt by holder: in GPU memory, including host memory, on any tier.
pub type Answer = Vec<(HolderId, [u32; 3])>;

/// The true answer for each prompt after each step of the writer. `None` during a change of the path to the prompt.
#[derive(Debug)]
pub struct Truth {
    moments: Vec<Vec<Option<Answer>>>,
}

/// The keys of a prompt with one block for each letter of `blocks`.
pub fn prompt(blocks: &str) -> Vec<BlockKey> {
    blocks.bytes().map(|letter| BlockKey(xxh3_64_with_seed(&[letter], 7))).collect()
}

/// Blocks with chained hashes, as an engine makes them.
fn named(keys: &[BlockKey]) -> Vec<StoredBlock> {
    let mut parent = 0;
    let name = |key: &BlockKey| {
        parent = xxh3_64_with_seed(&key.0.to_le_bytes(), parent);
        StoredBlock { hash: EngineHash(parent), key: *key }
    };
    keys.iter().map(name).collect()
}

/// Looks a prompt up.
pub fn look_up(index: &PrefixIndex, prompt: &[BlockKey], matches: &mut Matches) -> Answer {
    index.lookup(&mut { prompt }, matches);
    let found = matches.iter().map(|m| (m.holder, [m.depth.gpu, m.depth.cpu, m.depth.any]));
    let mut answer: Answer = found.collect();
    answer.sort_unstable();
    answer
}

impl Write {
    /// Applies the write to the index. `holders` are the added holders.
    pub fn apply(&self, index: &PrefixIndex, holders: &mut Vec<HolderId>) {
        match self {
            Self::Add => holders.push(index.add_holder()),
            Self::RemoveHolder(holder) => index.remove_holder(holders[*holder]),
            Self::Clear(holder) => index.clear(holders[*holder]),
            Self::Store { holder, tier, prompt, behind } => {
                let (parent, blocks) = split(prompt, *behind);
                index.store(holders[*holder], *tier, parent, &blocks).expect("stories have no orphans");
            }
            Self::Remove { holder, tier, prompt, from } => {
                let names: Vec<EngineHash> = named(prompt)[*from..].iter().rev().map(|b| b.hash).collect();
                index.remove(holders[*holder], *tier, &names);
            }
            Self::Record { holder, prompt, .. } => index.record(holders[*holder], prompt, TenantId(0), Timestamp(0)),
        }
    }

    fn apply_to_model(&self, model: &mut Model, holders: usize) {
        match self {
            Self::Add => model.add(holders),
            Self::RemoveHolder(holder) | Self::Clear(holder) => model.clear(*holder),
            Self::Store { holder, tier, prompt, behind } => {
                let (parent, blocks) = split(prompt, *behind);
                model.store(*holder, *tier, parent, &blocks).expect("stories have no orphans");
            }
            Self::Remove { holder, tier, prompt, from } => {
                let names: Vec<EngineHash> = named(prompt)[*from..].iter().rev().map(|b| b.hash).collect();
                model.remove(*holder, *tier, &names);
            }
            Self::Record { holder, prompt, evicts } => {
                if let Some(evicted) = evicts {
                    model.clear(*evicted);
                }
                model.record(*holder, prompt);
            }
        }
    }
}

fn split(prompt: &[BlockKey], behind: usize) -> (Option<EngineHash>, Vec<StoredBlock>) {
    let mut blocks = named(prompt);
    let rest = blocks.split_off(behind);
    (blocks.last().map(|b| b.hash), rest)
}

/// Runs `act` once under shuttle, in a single thread.
pub fn alone<T: Send + 'static>(act: impl Fn() -> T + Send + Sync + 'static) -> T {
    let result = Arc::new(Mutex::new(None));
    let out = result.clone();
    shuttle::check_random_with_seed(move || *out.lock().unwrap() = Some(act()), 0, 1);
    let result = result.lock().unwrap().take();
    result.expect("it ran")
}

impl Story {
    /// The index before the look-ups, and its holders.
    pub fn begin(&self) -> (Arc<PrefixIndex>, Vec<HolderId>) {
        let (tenant_share, half_life) = (1.0, Duration::from_secs(60));
        let config = IndexConfig { budget_bytes: self.budget_bytes, tenant_share, half_life, seed: self.seed };
        let (index, mut holders) = (PrefixIndex::new(config), Vec::new());
        self.before.iter().for_each(|write| write.apply(&index, &mut holders));
        (Arc::new(index), holders)
    }

    /// Runs the writes with an observer that looks up all prompts after each step, and compares with the naive model.
    pub fn truth(&self) -> Truth {
        let story = self.clone();
        alone(move || story.truth_here())
    }

    fn truth_here(&self) -> Truth {
        let (index, mut holders) = self.begin();
        let mut model = Model::default();
        let mut count = 0;
        let mut apply_to_model = |write: &Write, model: &mut Model| {
            write.apply_to_model(model, count);
            count += usize::from(matches!(write, Write::Add));
        };
        self.before.iter().for_each(|write| apply_to_model(write, &mut model));
        let moments = Rc::new(Mutex::new(Vec::<Vec<Option<Answer>>>::new()));
        let observer = {
            let (index, moments, prompts) = (index.clone(), moments.clone(), self.prompts.clone());
            move || {
                let look = |prompt: &Vec<BlockKey>| {
                    catch_unwind(AssertUnwindSafe(|| look_up(&index, prompt, &mut Matches::default()))).ok()
                };
                moments.lock().unwrap().push(prompts.iter().map(look).collect());
            }
        };
        memory::watch_each_step(Rc::new(observer));
        let mut settled = 0;
        self.assert_agrees(&model, &holders, &moments.lock().unwrap(), settled);
        for write in &self.writes {
            write.apply(&index, &mut holders);
            apply_to_model(write, &mut model);
            self.assert_agrees(&model, &holders, &moments.lock().unwrap(), settled);
            settled = memory::steps();
        }
        memory::unwatch();
        let moments = std::mem::take(&mut *moments.lock().unwrap());
        Truth { moments }
    }

    /// Checks that the current answer equals the model's, and that all answers since the last write are between the old
    /// and the new one.
    fn assert_agrees(&self, model: &Model, holders: &[HolderId], moments: &[Vec<Option<Answer>>], last: Step) {
        for (number, prompt) in self.prompts.iter().enumerate() {
            let depths = holders.iter().enumerate().map(|(h, id)| (*id, model.depth(h, prompt)));
            let held = depths.filter(|(_, d)| d.any > 0).map(|(id, d)| (id, [d.gpu, d.cpu, d.any]));
            let mut expected: Answer = held.collect();
            expected.sort_unstable();
            let then = moments[last][number].as_ref().expect("a write has ended");
            let now = moments[moments.len() - 1][number].as_ref().expect("a write has ended");
            assert_eq!(*now, expected, "prompt {number} as the model has it");
            for (step, answers) in moments.iter().enumerate().skip(last) {
                let Some(answer) = &answers[number] else { continue };
                let lies_between = answer.windows(2).all(|two| two[0].0 != two[1].0)
                    && holders.iter().all(|id| {
                        let [is, was, will] = [answer, then, now].map(|a| depth(a, *id));
                        (0..3).all(|level| {
                            was[level].min(will[level]) <= is[level] && is[level] <= was[level].max(will[level])
                        })
                    });
                assert!(lies_between, "step {step}, prompt {number}: {answer:?} between {then:?} and {now:?}");
            }
        }
    }
}

fn depth(answer: &Answer, holder: HolderId) -> [u32; 3] {
    answer.iter().find(|(id, _)| *id == holder).map_or([0; 3], |(_, depth)| *depth)
}

impl Truth {
    /// Number of steps of the writer.
    pub fn steps(&self) -> Step {
        self.moments.len() - 1
    }

    /// Fails unless the answer was true at one of these steps.
    pub fn assert_was_true(&self, prompt: usize, answer: &Answer, steps: RangeInclusive<Step>) {
        let moments = &self.moments[steps.clone()];
        if moments.iter().any(|answers| answers[prompt].as_ref() == Some(answer)) {
            return;
        }
        let mut truths: Vec<&Answer> = moments.iter().filter_map(|answers| answers[prompt].as_ref()).collect();
        truths.dedup();
        panic!("prompt {prompt}: {answer:?} was never true from step {steps:?}, but {truths:?}");
    }
}
