//! Which batches of one peer have been received.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

/// Most batches behind a gap that are remembered. A larger gap is repaired by the full state.
const MAX_BEYOND: usize = 4_096;

/// The set of received batch numbers: all up to a number, and some beyond it.
#[derive(Debug, Default)]
pub(crate) struct Received {
    through: u64,
    beyond: BTreeSet<u64>,
}

impl Received {
    /// Adds a batch. False if it was there already.
    pub(crate) fn insert(&mut self, number: u64) -> bool {
        if number <= self.through || !self.beyond.insert(number) {
            return false;
        }
        self.advance();
        true
    }

    /// Counts all batches up to `number` as received.
    pub(crate) fn skip_to(&mut self, number: u64) {
        self.through = self.through.max(number);
        self.beyond = self.through.checked_add(1).map(|next| self.beyond.split_off(&next)).unwrap_or_default();
        self.advance();
    }

    fn advance(&mut self) {
        while let Some(next) = self.through.checked_add(1).filter(|next| self.beyond.remove(next)) {
            self.through = next;
        }
    }

    /// The highest received number; 0 before the first.
    pub(crate) fn last(&self) -> u64 {
        self.beyond.last().copied().unwrap_or(self.through)
    }

    /// Whether a batch up to `number` is missing.
    pub(crate) fn lacks(&self, number: u64) -> bool {
        self.through < number
    }

    /// Whether a batch before the last one is missing.
    pub(crate) fn has_gap(&self) -> bool {
        !self.beyond.is_empty()
    }

    /// Whether so much is missing that only the full state repairs it.
    pub(crate) fn is_hopeless(&self) -> bool {
        self.beyond.len() > MAX_BEYOND
    }

    /// Missing batches up to `last`, at most `most` ranges.
    pub(crate) fn missing(&self, last: u64, most: usize) -> Vec<RangeInclusive<u64>> {
        let Some(mut from) = self.through.checked_add(1) else { return Vec::new() };
        let mut missing = Vec::new();
        for have in self.beyond.iter().copied().chain([last.saturating_add(1)]) {
            if missing.len() >= most || from > last {
                break;
            }
            if have > from {
                missing.push(from..=(have - 1).min(last));
            }
            from = have.saturating_add(1);
        }
        missing
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_batches_are_the_gaps_up_to_the_last() {
        let mut received = Received::default();
        assert!([1, 2, 5, 6, 9].into_iter().all(|n| received.insert(n)));
        assert!(![1, 5, 9].into_iter().any(|n| received.insert(n)));
        assert_eq!(received.missing(11, 9), [3..=4, 7..=8, 10..=11]);
        assert_eq!(received.missing(11, 1), [3..=4]);
        assert_eq!(received.missing(7, 9), [3..=4, 7..=7]);
        assert_eq!((received.last(), received.has_gap()), (9, true));
        received.skip_to(7);
        assert_eq!(received.missing(9, 9), [8..=8]);
        assert!(received.insert(8));
        assert_eq!((received.last(), received.has_gap()), (9, false));
        assert_eq!(received.missing(9, 9), []);
    }

    #[test]
    fn largest_number_of_a_batch_does_not_overflow() {
        let mut received = Received::default();
        assert!(received.insert(u64::MAX) && received.has_gap());
        assert_eq!(received.missing(u64::MAX, 9), [1..=u64::MAX - 1]);
        received.skip_to(u64::MAX);
        assert!(!received.insert(u64::MAX) && !received.has_gap());
        assert_eq!((received.last(), received.missing(u64::MAX, 9)), (u64::MAX, Vec::new()));
    }
}
