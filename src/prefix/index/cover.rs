//! Coverage: how much of a run each column holds. Bits mark columns that hold all of it, cutoffs those
//! that hold its first blocks.
//!
//! A column is a holder's position in every bitset. The run's header has the bits of the first 64 columns for GPU
//! memory and for estimates. All else is in one extent beside it: a head word, the bitsets of the planes that have one,
//! and the partial holders sorted by column.

use super::arena::{Addr, Arena, LINE, Line, Order, Space, high, low, order_for, words_of};
use super::run::Run;
use super::table::NoRoom;
use crate::atomics::Ordering::Relaxed;

/// A holder's position in bitsets.
pub(super) type Column = u16;

/// What a coverage is about: one of the three tiers, the estimates, or one of the planes from [`REACH`] on.
pub(super) type Plane = usize;
pub(super) const GPU: Plane = 0;
pub(super) const GUESS: Plane = 3;
/// First of three planes with the combined length of a level's planes, where that exceeds each of them: GPU memory has
/// the first blocks of a run, for example, and host memory the rest.
pub(super) const REACH: Plane = 4;
const PLANES: usize = 7;
/// Planes that KV events report: one per tier.
pub(super) const ENGINE: [Plane; 3] = [0, 1, 2];
/// Planes whose blocks are counted: the tiers and the estimates.
pub(super) const COUNTED: [Plane; 4] = [0, 1, 2, 3];
/// The planes of each depth as bits, from GPU memory alone to any tier.
pub(super) const LEVELS: [u8; 3] = [0b001_1001, 0b011_1011, 0b111_1111];

/// Limit of the number of columns; a partial holder stores a column in 16 bits.
pub(super) const MAX_COLUMNS: u32 = 8192;

/// A partial holder: column, plane and number of blocks from the run's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Partial(pub(super) u32);

impl Partial {
    /// Sorts behind all others; no column has this number.
    const NONE: Self = Self(u32::MAX);

    fn new(column: Column, plane: Plane, cutoff: u32) -> Self {
        Self(u32::from(column) << 16 | (plane as u32) << 13 | cutoff)
    }

    #[inline]
    pub(super) fn column(self) -> Column {
        (self.0 >> 16) as Column
    }

    #[inline]
    pub(super) fn plane(self) -> Plane {
        (self.0 >> 13) as Plane & 7
    }

    #[inline]
    pub(super) fn cutoff(self) -> u32 {
        self.0 & 0x1fff
    }

    fn same_as(self, column: Column, plane: Plane) -> std::cmp::Ordering {
        (self.0 >> 13).cmp(&(u32::from(column) << 3 | plane as u32))
    }
}

/// The coverage extent beside a header, as readers see it.
#[derive(Clone, Copy)]
pub(super) struct Beside<'a> {
    lines: &'a [Line],
    first: usize,
    pub(super) words: usize,
    planes: u8,
    order: Order,
    /// Words of all bitsets; the partial holders follow them.
    bits: usize,
    pub(super) partials: usize,
}

impl<'a> Beside<'a> {
    #[inline]
    pub(super) fn at(arena: &'a Arena, addr: Addr) -> Self {
        let head = arena.load(addr);
        let (words, planes) = ((head & 0xffff) as usize, ((head >> 16) & 0x7f) as u8);
        Self {
            lines: arena.lines(addr),
            first: (addr % LINE) as usize + 1,
            words,
            planes,
            bits: planes.count_ones() as usize * words,
            order: ((head >> 24) & 0xff) as Order,
            // A reader must not leave the extent when it sees a half-written head.
            partials: ((head >> 32) as usize).min(PLANES * MAX_COLUMNS as usize),
        }
    }

    #[inline]
    fn get(&self, index: usize) -> u64 {
        let at = self.first + index;
        self.lines.get(at / LINE as usize).map_or(0, |line| line.word(at as Addr).load(Relaxed))
    }

    /// The columns 64·`word`… that hold the whole run on a plane, as far as this extent knows.
    #[inline]
    pub(super) fn full(&self, plane: Plane, word: usize) -> u64 {
        if self.planes & (1 << plane) == 0 || word >= self.words {
            return 0;
        }
        let rank = (self.planes & ((1 << plane) - 1)).count_ones() as usize;
        self.get(rank * self.words + word)
    }

    /// The columns 64·`word`… that hold the whole run on at least one of several planes.
    #[inline]
    pub(super) fn full_on(&self, planes: u8, word: usize) -> u64 {
        Bits(u64::from(planes & self.planes)).fold(0, |full, plane| full | self.full(plane, word))
    }

    /// Returns the partial holder at position `index`.
    #[inline]
    pub(super) fn partial(&self, index: usize) -> Partial {
        let word = self.get(self.bits + index / 2);
        Partial(if index.is_multiple_of(2) { low(word) } else { high(word) })
    }

    /// Words of a bitset that has all columns of this extent.
    pub(super) fn all_words(&self) -> usize {
        let last = self.partials.checked_sub(1).map(|last| self.partial(last));
        let words = self.words.max(last.map_or(0, |p| usize::from(p.column()) / 64 + 1));
        words.min(MAX_COLUMNS as usize / 64)
    }

    /// Iterates over the partial holders on some planes, grouped by column.
    #[inline]
    pub(super) fn partials(&self, planes: u8) -> Partials<'_> {
        let mut partials = Partials { beside: self, planes, index: 0, next: Partial::NONE };
        partials.load();
        partials
    }
}

/// Partial holders in the order of their columns.
pub(super) struct Partials<'a> {
    beside: &'a Beside<'a>,
    planes: u8,
    index: usize,
    next: Partial,
}

impl Partials<'_> {
    #[inline]
    fn load(&mut self) {
        self.next = if self.index < self.beside.partials { self.beside.partial(self.index) } else { Partial::NONE };
    }

    /// Returns the next column if it is one of the 64 of `word`, with the most blocks that it has on any of the planes.
    #[inline]
    pub(super) fn next_in(&mut self, word: usize) -> Option<(Column, u32)> {
        let column = self.next.column();
        if usize::from(column) / 64 != word {
            return None;
        }
        let mut cutoff = 0;
        while self.next.column() == column {
            if self.planes & 1 << self.next.plane() != 0 {
                cutoff = cutoff.max(self.next.cutoff());
            }
            self.index += 1;
            self.load();
        }
        Some((column, cutoff))
    }
}

/// The coverage of one run, unpacked for the writer. Reused for each run.
#[derive(Debug, Default)]
pub(super) struct Cover {
    full: [Vec<u64>; PLANES],
    partials: Vec<Partial>,
    len: u32,
}

impl Cover {
    /// Reads the coverage of `run`, without columns that are not in `live`.
    pub(super) fn read(&mut self, arena: &Arena, run: Run<'_>, live: &[u64]) {
        self.partials.clear();
        self.len = run.shape().len;
        for (plane, full) in self.full.iter_mut().enumerate() {
            full.clear();
            match plane {
                GPU => full.push(run.gpu()),
                GUESS => full.push(run.guess()),
                _ => {}
            }
        }
        if run.cover() != 0 {
            let beside = Beside::at(arena, run.cover());
            for (plane, full) in self.full.iter_mut().enumerate() {
                for word in full.len()..beside.words {
                    full.push(beside.full(plane, word));
                }
            }
            let is_live = |p: &Partial| bit(live, p.column());
            self.partials.extend((0..beside.partials).map(|i| beside.partial(i)).filter(is_live));
        }
        for full in &mut self.full {
            for (i, word) in full.iter_mut().enumerate() {
                *word &= live.get(i).copied().unwrap_or(0);
            }
        }
    }

    /// Returns how many blocks of the run a column has on a plane, from its start.
    pub(super) fn cutoff(&self, plane: Plane, column: Column) -> u32 {
        if self.full.get(plane).is_some_and(|f| bit(f, column)) {
            return self.len;
        }
        let found = self.partials.binary_search_by(|p| p.same_as(column, plane));
        found.ok().and_then(|i| self.partials.get(i)).map_or(0, |p| p.cutoff())
    }

    /// Sets how many blocks of the run a column has on a plane.
    pub(super) fn set(&mut self, plane: Plane, column: Column, cutoff: u32) {
        let full = cutoff == self.len && cutoff > 0;
        if let Some(words) = self.full.get_mut(plane) {
            set_bit(words, column, full);
        }
        match self.partials.binary_search_by(|p| p.same_as(column, plane)) {
            Ok(i) if full || cutoff == 0 => {
                self.partials.remove(i);
            }
            Ok(i) => {
                if let Some(p) = self.partials.get_mut(i) {
                    *p = Partial::new(column, plane, cutoff);
                }
            }
            Err(i) if !full && cutoff > 0 => self.partials.insert(i, Partial::new(column, plane, cutoff)),
            Err(_) => {}
        }
    }

    /// Changes the run's length. Columns keep the blocks that still exist.
    pub(super) fn resize(&mut self, len: u32) {
        let old = std::mem::replace(&mut self.len, len);
        if len < old {
            for i in (0..self.partials.len()).rev() {
                let Some(p) = self.partials.get(i).copied() else { continue };
                if p.cutoff() >= len {
                    self.set(p.plane(), p.column(), len);
                }
            }
            return;
        }
        for plane in 0..PLANES {
            for column in self.full_columns(plane) {
                self.set(plane, column, old);
            }
        }
    }

    fn full_columns(&self, plane: Plane) -> Vec<Column> {
        let words = self.full.get(plane).map_or(&[][..], Vec::as_slice);
        words.iter().enumerate().flat_map(|(i, w)| Bits(*w).map(move |b| (64 * i + b) as Column)).collect()
    }

    /// Iterates over all coverage as (column, plane, cutoff).
    pub(super) fn all(&self) -> impl Iterator<Item = (Column, Plane, u32)> + '_ {
        let full = self.full.iter().enumerate().flat_map(move |(plane, words)| {
            words
                .iter()
                .enumerate()
                .flat_map(move |(i, w)| Bits(*w).map(move |b| ((64 * i + b) as Column, plane, self.len)))
        });
        full.chain(self.partials.iter().map(|p| (p.column(), p.plane(), p.cutoff())))
    }

    /// Returns the largest cutoff on any of `planes`, without the column and plane in `except`.
    pub(super) fn deepest(&self, planes: &[Plane], except: Option<(Column, Plane)>) -> u32 {
        let wanted = |c: Column, p: Plane| planes.contains(&p) && Some((c, p)) != except;
        for plane in planes {
            let words = self.full.get(*plane).map_or(&[][..], Vec::as_slice);
            let others = words.iter().enumerate().any(|(i, w)| match except {
                Some((c, p)) if p == *plane && usize::from(c) / 64 == i => w & !(1 << (c % 64)) != 0,
                _ => *w != 0,
            });
            if others {
                return self.len;
            }
        }
        let partials = self.partials.iter().filter(|p| wanted(p.column(), p.plane()));
        partials.map(|p| p.cutoff()).max().unwrap_or(0)
    }

    /// Whether a column other than `column` holds all of the run.
    pub(super) fn is_full_for_others(&self, column: Column) -> bool {
        self.full.iter().any(|words| {
            words
                .iter()
                .enumerate()
                .any(|(i, w)| if usize::from(column) / 64 == i { w & !(1 << (column % 64)) != 0 } else { *w != 0 })
        })
    }

    /// Writes the coverage back. The caller has opened the run.
    pub(super) fn write(&self, arena: &Arena, space: &mut Space, run: Run<'_>) -> Result<(), NoRoom> {
        let wide = |plane: Plane, full: &Vec<u64>| {
            let from = if plane == GPU || plane == GUESS { 1 } else { 0 };
            full.iter().skip(from).rposition(|w| *w != 0).map_or(0, |i| i + 1 + from)
        };
        let widths: [usize; PLANES] = std::array::from_fn(|p| self.full.get(p).map_or(0, |f| wide(p, f)));
        let words = widths.iter().copied().max().unwrap_or(0);
        let planes = widths.iter().enumerate().filter(|(_, w)| **w > 0).fold(0u8, |planes, (p, _)| planes | 1 << p);
        let old = run.cover();
        let old_order = if old == 0 { 0 } else { Beside::at(arena, old).order };
        if words == 0 && self.partials.is_empty() {
            if old != 0 {
                run.set_extents(run.tags(), 0);
                space.free(arena, old, old_order);
            }
        } else {
            let need = 1 + planes.count_ones() as usize * words + self.partials.len().div_ceil(2);
            let (mut addr, mut order) = (old, order_for(need as u32));
            if old == 0 || order > old_order {
                addr = space.alloc(arena, order).ok_or(NoRoom)?;
                run.set_extents(run.tags(), addr);
                if old != 0 {
                    space.free(arena, old, old_order);
                }
            } else if order + 1 < old_order {
                // Shrinks in place, since removing entries must not need memory.
                space.shrink(arena, old, old_order, order);
            } else {
                order = old_order;
            }
            self.fill(arena, addr, order, words, planes);
        }
        run.set_gpu(self.full[GPU].first().copied().unwrap_or(0));
        run.set_guess(self.full[GUESS].first().copied().unwrap_or(0));
        Ok(())
    }

    fn fill(&self, arena: &Arena, addr: Addr, order: Order, words: usize, planes: u8) {
        let head = words as u64 | u64::from(planes) << 16 | u64::from(order) << 24;
        arena.store(addr, head | (self.partials.len() as u64) << 32);
        let mut at = addr + 1;
        for (plane, full) in self.full.iter().enumerate() {
            if planes & (1 << plane) == 0 {
                continue;
            }
            for word in 0..words {
                arena.store(at, full.get(word).copied().unwrap_or(0));
                at += 1;
            }
        }
        for two in self.partials.chunks(2) {
            let word = two.iter().rev().fold(0, |w, p| w << 32 | u64::from(p.0));
            arena.store(at, word);
            at += 1;
        }
    }
}

/// Frees the extent of a run's coverage. The caller has opened the run.
pub(super) fn drop_beside(arena: &Arena, space: &mut Space, run: Run<'_>) {
    if run.cover() != 0 {
        let order = Beside::at(arena, run.cover()).order;
        space.free(arena, run.cover(), order);
    }
}

/// Words of the coverage extent beside a run.
pub(super) fn beside_words(arena: &Arena, run: Run<'_>) -> u32 {
    if run.cover() == 0 { 0 } else { words_of(Beside::at(arena, run.cover()).order) }
}

/// Iterates over the set bits of a word, lowest first.
#[derive(Clone, Copy)]
pub(super) struct Bits(pub(super) u64);

impl Iterator for Bits {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        if self.0 == 0 {
            return None;
        }
        let bit = self.0.trailing_zeros() as usize;
        self.0 &= self.0 - 1;
        Some(bit)
    }
}

/// Whether a column is in a bitset.
#[inline]
pub(super) fn bit(words: &[u64], column: Column) -> bool {
    words.get(usize::from(column) / 64).is_some_and(|w| w >> (column % 64) & 1 != 0)
}

/// Adds a column to a bitset, or removes it.
pub(super) fn set_bit(words: &mut Vec<u64>, column: Column, on: bool) {
    let word = usize::from(column) / 64;
    if word >= words.len() {
        if !on {
            return;
        }
        words.resize(word + 1, 0);
    }
    if let Some(w) = words.get_mut(word) {
        *w = if on { *w | 1 << (column % 64) } else { *w & !(1 << (column % 64)) };
    }
}
