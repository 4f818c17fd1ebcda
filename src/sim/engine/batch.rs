//! Who is in the batch, and who of them needs something in which step.
//!
//! A sequence that decodes gets one token in every step until it ends, so between two steps that concern it nothing
//! about it changes but a count. The batch therefore does not visit it: it knows how many steps have passed, in which
//! steps the sequence fills a block and needs another, and in which it ends. A step costs what happens in it, however
//! many sequences decode. Private to the engine.
//!
//! Why that is exact: the sequences that run are scheduled in the order of their admission, and a new one is only
//! admitted where tokens of the budget are left over. So there are never more of them than tokens in the budget, at
//! most the last one has a part of its prompt still to read, and each one before it gets its token in every step.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Above 4,096 tokens in a block a list for each place in a block would be mostly empty; the sequences that decode then
/// share one. Tests walk both ways with small blocks.
const MAX_LISTS: u32 = if cfg!(test) { 4 } else { 4_096 };

/// A sequence of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BatchSeat {
    /// Counts admissions: the order of the batch.
    pub(super) rank: u64,
    /// Index of the sequence among all sequences.
    pub(super) slot: u32,
}

/// The batch. All lists are in the order of admission.
#[derive(Debug)]
pub(super) struct RunningBatch {
    admitted: u64,
    /// Steps completed; the number of the one that is under way, or of the next.
    pub(super) step: u64,
    seats: Vec<BatchSeat>,
    /// Those that have not yet all known tokens computed; when a step begins at most one, the last of `seats`.
    pub(super) reading: Vec<BatchSeat>,
    /// Tokens in the cache that those who decode read in this step.
    pub(super) context: u64,
    /// Those who decode, by the step, modulo the length, in which they begin a block.
    by_block: Vec<Vec<BatchSeat>>,
    /// Those who decode, by the step at whose end they end. Some of them may have left the batch before.
    ends: BinaryHeap<Reverse<(u64, BatchSeat)>>,
}

impl RunningBatch {
    /// An empty batch; `block_size` at least 1.
    pub(super) fn new(block_size: u32) -> Self {
        let lists = if block_size > MAX_LISTS { 1 } else { block_size };
        Self {
            admitted: 0,
            step: 0,
            seats: Vec::new(),
            reading: Vec::new(),
            context: 0,
            by_block: vec![Vec::new(); lists as usize],
            ends: BinaryHeap::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.seats.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.seats.is_empty()
    }

    pub(super) fn seats(&self) -> &[BatchSeat] {
        &self.seats
    }

    /// Those who decode: all before those who read.
    pub(super) fn decoding(&self) -> &[BatchSeat] {
        self.seats.get(..self.seats.len().saturating_sub(self.reading.len())).unwrap_or_default()
    }

    /// Adds a sequence, as the last one, which reads.
    pub(super) fn admit(&mut self, slot: u32) -> BatchSeat {
        self.admitted += 1;
        let seat = BatchSeat { rank: self.admitted, slot };
        self.seats.push(seat);
        self.reading.push(seat);
        seat
    }

    /// From the next step on one of those who read decodes: it has `computed` tokens computed, and `rest` more
    /// to say, at least 1.
    pub(super) fn begin_to_decode(&mut self, seat: BatchSeat, computed: u32, rest: u32) {
        remove(&mut self.reading, seat);
        self.context += u64::from(computed);
        let list = self.list_of(self.step, computed);
        if let Some(list) = self.by_block.get_mut(list) {
            list.push(seat);
        }
        self.ends.push(Reverse((self.step + u64::from(rest) - 1, seat)));
    }

    /// The one that was admitted last.
    pub(super) fn last(&self) -> Option<BatchSeat> {
        self.seats.last().copied()
    }

    /// Takes out a sequence, which has `computed` tokens computed before this step if it decodes.
    pub(super) fn leave(&mut self, seat: BatchSeat, computed: u32) {
        remove(&mut self.seats, seat);
        if !remove(&mut self.reading, seat) {
            self.context -= u64::from(computed);
            let list = self.list_of(self.step, computed);
            if let Some(list) = self.by_block.get_mut(list) {
                remove(list, seat);
            }
        }
    }

    /// Seats that begin a block in this step, and seats that fill one, in two lists; the same list twice when
    /// sequences are not distinguished.
    pub(super) fn due(&self) -> (usize, usize) {
        (self.list_of(self.step, 0), self.list_of(self.step + 1, 0))
    }

    /// Entry `index` of a list of [`RunningBatch::due`].
    pub(super) fn listed(&self, list: usize, index: usize) -> Option<BatchSeat> {
        self.by_block.get(list)?.get(index).copied()
    }

    /// The step is over; who decodes has one more token.
    pub(super) fn end_step(&mut self) {
        self.context += self.decoding().len() as u64;
        self.step += 1;
    }

    /// The next one that ends with the step before this one.
    pub(super) fn ended(&mut self) -> Option<BatchSeat> {
        let Reverse((step, seat)) = self.ends.peek().copied()?;
        (step < self.step).then(|| {
            self.ends.pop();
            seat
        })
    }

    /// Number of steps after this one in which no decoding sequence ends.
    pub(super) fn steps_without_end(&self) -> u64 {
        self.ends.peek().map_or(0, |Reverse((step, _))| step.saturating_sub(self.step))
    }

    /// A sequence with `computed` tokens computed before step `step` begins a block `-computed` steps later.
    fn list_of(&self, step: u64, computed: u32) -> usize {
        let lists = self.by_block.len() as u64;
        usize::try_from((step + lists - u64::from(computed) % lists) % lists).unwrap_or_default()
    }
}

/// False when it is not there.
fn remove(list: &mut Vec<BatchSeat>, seat: BatchSeat) -> bool {
    let place = list.binary_search(&seat);
    place.map(|index| list.remove(index)).is_ok()
}
