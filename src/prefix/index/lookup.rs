//! The reader: one walk down the runs for all holders, without a lock and without writes that other threads see.
//!
//! The walk records the version of each run that it visits and the version of the columns' owners. At the end
//! all versions must be unchanged, so the result as a whole was true at one moment between start and end.
//! Otherwise the walk is repeated.

use super::ReaderView;
use super::arena::Addr;
use super::children::ChildSearch;
use super::cover::{Beside, Bits, LEVELS};
use super::matches::Matches;
use super::run::{Run, same_tags};
use crate::atomics::{
    Ordering::{Acquire, Relaxed},
    fence,
};
use crate::key::BlockKeys;

/// Keys requested first; each later request doubles the number, by up to [`MAX_AHEAD`] at once.
const FIRST_KEYS: usize = 64;
const MAX_AHEAD: usize = 512;

/// Walks that a writer may invalidate before the reader takes the writer's lock.
pub(super) const TRIES: usize = 32;

/// The columns that have held every block so far, for one depth.
#[derive(Clone, Debug, Default)]
pub(super) struct Alive {
    first: u64,
    rest: Vec<u64>,
}

/// Buffers of a walk, reused so that a lookup does not allocate.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    passed: Vec<(Addr, u64)>,
    alive: [Alive; 3],
}

/// One run of a walk.
struct WalkStep<'a> {
    run: Run<'a>,
    beside: Option<Beside<'a>>,
    /// Blocks before the run, and blocks of the run that match the prompt.
    base: u32,
    matched: u32,
}

impl Alive {
    fn is_empty(&self) -> bool {
        self.first == 0 && self.rest.iter().all(|w| *w == 0)
    }

    /// Removes the columns that do not hold the matched part of a run, and records how much of the prompt they hold.
    #[inline]
    fn narrow<const N: usize>(&mut self, step: &WalkStep<'_>, level: usize, finds: &mut Finds<'_>) {
        // These two planes belong to every level, and the header has no others.
        let full = step.run.gpu() | step.run.guess();
        if let Some(beside) = &step.beside {
            self.narrow_wide::<N>(step, beside, full, level, finds);
        } else if step.base == 0 {
            self.first = full;
            self.rest.clear();
        } else {
            finds.leave::<N>(level, 0, self.first & !full, step.base);
            self.first &= full;
            for (i, word) in self.rest.drain(..).enumerate() {
                finds.leave::<N>(level, i + 1, word, step.base);
            }
        }
    }

    fn narrow_wide<const N: usize>(
        &mut self,
        step: &WalkStep<'_>,
        beside: &Beside<'_>,
        in_header: u64,
        level: usize,
        finds: &mut Finds<'_>,
    ) {
        let planes = LEVELS.get(level).copied().unwrap_or_default();
        let is_first = step.base == 0;
        if is_first {
            self.rest.clear();
            self.rest.resize(beside.all_words().saturating_sub(1), u64::MAX);
            self.first = u64::MAX;
        }
        let mut partials = beside.partials(planes);
        let words = std::iter::once(&mut self.first).chain(&mut self.rest);
        for (i, alive) in words.enumerate() {
            let full = beside.full_on(planes, i) | if i == 0 { in_header } else { 0 };
            // Columns that do not hold the whole run hold none of it, unless they are partial holders.
            let mut gone = *alive & !full;
            *alive &= full;
            while let Some((column, cutoff)) = partials.next_in(i) {
                let mask = 1u64 << (column % 64);
                if gone & mask == 0 || cutoff == 0 {
                    continue;
                }
                gone &= !mask;
                if cutoff < step.matched {
                    finds.leave_one::<N>(level, usize::from(column), step.base + cutoff);
                } else {
                    *alive |= mask;
                }
            }
            if !is_first {
                finds.leave::<N>(level, i, gone, step.base);
            }
        }
    }

    /// Records `depth` for all remaining columns.
    fn leave_all<const N: usize>(&self, level: usize, depth: u32, finds: &mut Finds<'_>) {
        finds.leave::<N>(level, 0, self.first, depth);
        for (i, word) in self.rest.iter().enumerate() {
            finds.leave::<N>(level, i + 1, *word, depth);
        }
    }
}

impl ReaderView {
    /// Does one walk. Returns false when the writer changed something meanwhile.
    pub(super) fn walk<K: BlockKeys>(&self, keys: &mut K, out: &mut Matches) -> bool {
        let version = self.owners_version.load(Acquire);
        if !version.is_multiple_of(2) {
            return false;
        }
        out.owners.follow(self, version);
        let is_whole = if self.tiers.load(Relaxed) {
            self.walk_levels::<3, K>(keys, out)
        } else {
            // A reader that has seen a block on another tier also sees the flag, since the walk
            // ends with an acquire fence.
            self.walk_levels::<1, K>(keys, out) && !self.tiers.load(Relaxed)
        };
        let is_still = self.owners_version.load(Relaxed) == version;
        if !is_still {
            out.owners.forget();
        }
        is_whole && is_still
    }

    fn walk_levels<const N: usize, K: BlockKeys>(&self, keys: &mut K, out: &mut Matches) -> bool {
        out.start(N > 1);
        let Matches { found, depths, stricter, scratch, .. } = out;
        let Scratch { passed, alive } = scratch;
        passed.clear();
        let mut finds = Finds { found, depths, stricter, has_missed: false };
        let (mut base, mut asked) = (0, FIRST_KEYS);
        let mut next = self.child(keys, (self.root, 0), base, asked);
        loop {
            let (child, version, tags) = match next {
                ChildSearch::Run { run, version, tags } => (run, version, tags),
                ChildSearch::Nothing => break,
                ChildSearch::Again => return false,
            };
            let run = Run::at(&self.arena, child);
            let cover = run.cover();
            self.arena.prefetch(cover);
            let matched = self.matched(keys, base, tags, run, &mut asked);
            if matched == 0 || run.tags() != tags {
                return false;
            }
            // Prefetches the next run while this run's holders are processed.
            next = if run.shape().may_fork_at(matched) {
                self.child(keys, (child, matched), base + matched, asked)
            } else {
                ChildSearch::Nothing
            };
            let beside = (cover != 0).then(|| Beside::at(&self.arena, cover));
            let step = WalkStep { run, beside, base, matched };
            for (level, alive) in alive.iter_mut().enumerate().take(N) {
                alive.narrow::<N>(&step, level, &mut finds);
            }
            passed.push((child, version));
            base += matched;
            if alive.get(N - 1).is_none_or(Alive::is_empty) {
                break;
            }
        }
        if base > 0 {
            for (level, alive) in alive.iter().enumerate().take(N) {
                alive.leave_all::<N>(level, base, &mut finds);
            }
        }
        let has_missed = finds.has_missed;
        fence(Acquire);
        let is_whole = !has_missed && passed.iter().all(|(run, version)| Run::at(&self.arena, *run).is_still(*version));
        out.finish();
        is_whole
    }

    /// Finds the child at a position that continues with the prompt's block `base`.
    #[inline]
    fn child<K: BlockKeys>(&self, keys: &mut K, at: (Addr, u32), base: u32, asked: usize) -> ChildSearch {
        match keys.upto(asked.max(base as usize + 1)).get(base as usize) {
            Some(key) => self.children.find(&self.arena, at.0, at.1, *key),
            None => ChildSearch::Nothing,
        }
    }

    /// Counts the blocks of a run that match the prompt from `base` on; requests keys only as far as they match.
    #[inline]
    fn matched<K: BlockKeys>(&self, keys: &mut K, base: u32, tags: Addr, run: Run<'_>, asked: &mut usize) -> u32 {
        let len = run.shape().len as usize;
        let mut matched = 0;
        loop {
            let from = base as usize + matched;
            let known = keys.upto(*asked);
            let total = known.len();
            let part = known.get(from..total.min(base as usize + len)).unwrap_or_default();
            let same = same_tags(&self.arena, tags, matched as u32, part);
            matched += same;
            if same < part.len() || matched == len || total < *asked {
                return matched as u32;
            }
            if total > *asked {
                *asked = total;
            }
            *asked += (*asked).min(MAX_AHEAD);
            if keys.upto(*asked).len() == total {
                return matched as u32;
            }
        }
    }
}

/// Receives the results of a walk.
struct Finds<'a> {
    found: &'a mut [u64],
    depths: &'a mut [[u32; 64]],
    stricter: &'a mut [[[u32; 64]; 2]],
    /// Columns were added since the walk began, and the result has no space for them.
    has_missed: bool,
}

impl Finds<'_> {
    /// Records that up to 64 columns end at `depth` on a level. The last level completes their results.
    #[inline]
    #[expect(clippy::indexing_slicing, reason = "a remainder of the length")]
    fn leave<const N: usize>(&mut self, level: usize, word: usize, columns: u64, depth: u32) {
        if columns == 0 {
            return;
        }
        let depths = if level + 1 == N {
            self.found.get_mut(word).and_then(|found| {
                *found |= columns;
                self.depths.get_mut(word)
            })
        } else {
            self.stricter.get_mut(word).and_then(|levels| levels.get_mut(level))
        };
        let Some(depths) = depths else {
            self.has_missed = true;
            return;
        };
        for bit in Bits(columns) {
            depths[bit % 64] = depth;
        }
    }

    /// Records that one column ends at `depth` on a level.
    #[inline]
    fn leave_one<const N: usize>(&mut self, level: usize, column: usize, depth: u32) {
        self.leave::<N>(level, column / 64, 1 << (column % 64), depth);
    }
}
