//! The reader: one walk down the runs for all holders, without a lock and without a write that another thread could see.
//!
//! Each run that the walk passes is noted with its version; at the end all versions must still be the same, so the answer was true
//! as a whole at one moment between start and end. Otherwise the walk is made anew.

use super::arena::Addr;
use super::children::Found;
use super::cover::{Beside, Bits, Column, LEVELS};
use super::matches::{Depth, Match, Matches};
use super::run::{Run, same_tags};
use super::{HolderId, NOBODY, Shared};
use crate::prefix::key::BlockKeys;
use std::sync::atomic::{
    Ordering::{Acquire, Relaxed},
    fence,
};

/// Keys asked for at first; then twice as many as before, up to [`MAX_AHEAD`] at once.
const FIRST_KEYS: usize = 64;
const MAX_AHEAD: usize = 512;

/// Walks that the writer may spoil before the reader takes its lock.
pub(super) const TRIES: usize = 32;

/// Who has had everything so far, for one depth.
#[derive(Clone, Debug, Default)]
pub(super) struct Alive {
    first: u64,
    rest: Vec<u64>,
    gone: Vec<u64>,
}

/// What a walk needs besides its result; kept so that nothing is allocated.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch {
    passed: Vec<(Addr, u64)>,
    alive: [Alive; 3],
    /// For each column, how deep it was found on the stricter levels.
    stricter: Vec<[u32; 2]>,
}

/// A run as the walk sees it.
struct Step<'a> {
    run: Run<'a>,
    beside: Option<Beside<'a>>,
    /// Blocks before the run, and blocks of it that the prompt has.
    base: u32,
    matched: u32,
}

impl Alive {
    fn is_empty(&self) -> bool {
        self.first == 0 && self.rest.iter().all(|w| *w == 0)
    }

    /// Takes out who does not hold the matched part of a run; tells of them, 64 columns at a time, and how much of the prompt they have.
    #[inline]
    fn narrow(&mut self, step: &Step<'_>, level: usize, mut leaves: impl FnMut(usize, u64, u32)) {
        let is_first = step.base == 0;
        if is_first {
            self.rest.clear();
        }
        // These two are of every level, and all there is for columns that only the header tells of.
        let full = step.run.gpu() | step.run.guess();
        let Some(beside) = step.beside else {
            let gone = if is_first { 0 } else { self.first & !full };
            self.first = if is_first { full } else { self.first & full };
            if gone != 0 {
                leaves(0, gone, step.base);
            }
            for (i, word) in self.rest.iter().enumerate() {
                leaves(i + 1, *word, step.base);
            }
            self.rest.clear();
            return;
        };
        let planes = LEVELS.get(level).copied().unwrap_or_default();
        self.narrow_wide(step, &beside, planes, full, leaves);
    }

    fn narrow_wide(
        &mut self,
        step: &Step<'_>,
        beside: &Beside<'_>,
        planes: u8,
        full: u64,
        mut leaves: impl FnMut(usize, u64, u32),
    ) {
        let is_first = step.base == 0;
        let of_level = |word: usize| Bits(u64::from(planes)).fold(0, |f, plane| f | beside.full(plane, word));
        let full = full | of_level(0);
        let words = beside.words.saturating_sub(1).max(self.rest.len());
        self.gone.clear();
        self.gone.push(if is_first { u64::MAX } else { self.first } & !full);
        self.first = if is_first { full } else { self.first & full };
        self.rest.resize(words, 0);
        for (i, word) in self.rest.iter_mut().enumerate() {
            let full = of_level(i + 1);
            let before = if is_first { u64::MAX } else { *word };
            self.gone.push(before & !full);
            *word = before & full;
        }
        let mut index = 0;
        while index < beside.partials {
            let partial = beside.partial(index);
            index += 1;
            if planes & 1 << partial.plane() == 0 {
                continue;
            }
            let column = partial.column();
            let mut cutoff = partial.cutoff();
            // The same column may hold more of it on another plane.
            while index < beside.partials {
                let next = beside.partial(index);
                if next.column() != column {
                    break;
                }
                if planes & 1 << next.plane() != 0 {
                    cutoff = cutoff.max(next.cutoff());
                }
                index += 1;
            }
            self.place_partial(step, column, cutoff, &mut leaves);
        }
        if !is_first {
            for (i, word) in self.gone.iter().enumerate() {
                leaves(i, *word, step.base);
            }
        }
    }

    #[inline]
    fn place_partial(
        &mut self,
        step: &Step<'_>,
        column: Column,
        cutoff: u32,
        leaves: &mut impl FnMut(usize, u64, u32),
    ) {
        let (word, mask) = (usize::from(column) / 64, 1u64 << (column % 64));
        match self.gone.get_mut(word) {
            Some(gone) if *gone & mask != 0 => *gone &= !mask,
            // Behind all words: a column that only partial holders have told of.
            None if step.base == 0 => {}
            _ => return,
        }
        if cutoff < step.matched {
            leaves(word, mask, step.base + cutoff);
        } else if word == 0 {
            self.first |= mask;
        } else {
            if self.rest.len() < word {
                self.rest.resize(word, 0);
            }
            if let Some(rest) = self.rest.get_mut(word - 1) {
                *rest |= mask;
            }
        }
    }

    /// Tells of all who are left.
    fn leave_all(&self, depth: u32, mut leaves: impl FnMut(usize, u64, u32)) {
        leaves(0, self.first, depth);
        for (i, word) in self.rest.iter().enumerate() {
            leaves(i + 1, *word, depth);
        }
    }
}

impl Shared {
    /// One walk. False when the writer came between.
    pub(super) fn walk<K: BlockKeys>(&self, keys: &mut K, out: &mut Matches) -> bool {
        out.start();
        if self.tiers.load(Relaxed) {
            self.walk_levels::<3, K>(keys, out)
        } else {
            // Whoever has seen a block on another tier also sees the flag, as the walk ends with an acquire fence.
            self.walk_levels::<1, K>(keys, out) && !self.tiers.load(Relaxed)
        }
    }

    fn walk_levels<const N: usize, K: BlockKeys>(&self, keys: &mut K, out: &mut Matches) -> bool {
        let Matches { found, places, scratch } = out;
        let Scratch { passed, alive, stricter } = scratch;
        passed.clear();
        stricter.clear();
        // As many as were ever found, and some, so that finding them again costs no growth.
        found.reserve(places.len() + 64);
        let mut finds = Finds { shared: self, found, places, stricter };
        let (mut at, mut base, mut asked) = ((self.root, 0), 0, FIRST_KEYS);
        while let Some(key) = keys.upto(asked.max(base as usize + 1)).get(base as usize).copied() {
            let (child, version, tags) = match self.children.find(&self.arena, at.0, at.1, key) {
                Found::Run { run, version, tags } => (run, version, tags),
                Found::Nothing => break,
                Found::Again => return false,
            };
            let run = Run::at(&self.arena, child);
            let matched = self.matched(keys, base, tags, run, &mut asked);
            if matched == 0 || run.tags() != tags {
                return false;
            }
            let cover = run.cover();
            let beside = (cover != 0).then(|| Beside::at(&self.arena, cover));
            let step = Step { run, beside, base, matched };
            for (level, alive) in alive.iter_mut().enumerate().take(N) {
                alive.narrow(&step, level, |word, columns, depth| finds.leave::<N>(level, word, columns, depth));
            }
            passed.push((child, version));
            (at, base) = ((child, matched), base + matched);
            let nobody = alive.get(N - 1).is_none_or(Alive::is_empty);
            if nobody || !run.shape().may_fork_at(matched) {
                break;
            }
        }
        if base > 0 {
            for (level, alive) in alive.iter().enumerate().take(N) {
                alive.leave_all(base, |word, columns, depth| finds.leave::<N>(level, word, columns, depth));
            }
        }
        fence(Acquire);
        passed.iter().all(|(run, version)| Run::at(&self.arena, *run).is_still(*version))
    }

    /// How many blocks of a run stand in the prompt from `base` on; asks for keys as far as they go on being the same.
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

/// Where what is found goes.
struct Finds<'a> {
    shared: &'a Shared,
    found: &'a mut Vec<Match>,
    places: &'a mut Vec<u32>,
    stricter: &'a mut Vec<[u32; 2]>,
}

impl Finds<'_> {
    /// Up to 64 columns go no further on a level. On the last of them, all is known of them.
    #[inline]
    fn leave<const N: usize>(&mut self, level: usize, word: usize, columns: u64, depth: u32) {
        if depth == 0 {
            return;
        }
        if N == 1 {
            self.emit(word, columns, Depth { gpu: depth, cpu: depth, any: depth });
            return;
        }
        if self.stricter.len() < 64 * (word + 1) {
            self.stricter.resize(64 * (word + 1), [0; 2]);
        }
        for bit in Bits(columns) {
            let Some(levels) = self.stricter.get_mut(64 * word + bit) else { continue };
            if let Some(of_level) = levels.get_mut(level) {
                *of_level = depth;
            } else {
                let [gpu, cpu] = std::mem::take(levels);
                self.emit(word, 1 << bit, Depth { gpu, cpu, any: depth });
            }
        }
    }

    /// Puts the holders of up to 64 columns in the result.
    #[inline]
    fn emit(&mut self, word: usize, columns: u64, depth: Depth) {
        let owners = self.shared.owners.get(64 * word..).unwrap_or_default();
        for bit in Bits(columns) {
            let holder = owners.get(bit).map_or(NOBODY, |o| o.load(Relaxed));
            if holder == NOBODY {
                continue;
            }
            let holder = HolderId(holder);
            let slot = holder.slot();
            if slot >= self.places.len() {
                self.places.resize((slot + 1).next_multiple_of(64), 0);
            }
            if let Some(place) = self.places.get_mut(slot) {
                *place = self.found.len() as u32;
            }
            self.found.push(Match { holder, depth });
        }
    }
}
