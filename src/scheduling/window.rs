//! Sums over a sliding time window, in bounded memory.
//!
//! A window has [`SLOTS`] slots, so an amount expires at most one slot late. Used by `vtc-basic`,
//! `prefix-cache-preble` and the metric of pressure.

use attache_types::clock::Timestamp;
use std::collections::VecDeque;
use std::time::Duration;

/// Slots per window: 5 s each for 5 min.
const SLOTS: u64 = 60;

/// Length of a window.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    slot_nanos: u64,
}

impl Window {
    /// A window of `length`.
    #[must_use]
    pub fn new(length: Duration) -> Self {
        let nanos = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
        Self { slot_nanos: (nanos / SLOTS).max(1) }
    }

    /// The slot of the time `now`.
    #[must_use]
    pub fn slot(self, now: Timestamp) -> u64 {
        now.0 / self.slot_nanos
    }
}

/// A sum over one window.
#[derive(Debug, Default)]
pub struct SlidingSum {
    /// Slots with an amount, oldest first.
    slots: VecDeque<(u64, u64)>,
    total: u64,
}

impl SlidingSum {
    /// Adds `amount` to `slot`, the current one. If the clock steps back, the newest slot gets it.
    pub fn add(&mut self, slot: u64, amount: u64) {
        self.total = self.total.saturating_add(amount);
        match self.slots.back_mut() {
            Some((newest, held)) if *newest >= slot => *held = held.saturating_add(amount),
            _ => self.slots.push_back((slot, amount)),
        }
    }

    /// Drops amounts that are a window older than `slot`.
    pub fn expire(&mut self, slot: u64) {
        while self.expires().is_some_and(|at| at <= slot) {
            if let Some((_, amount)) = self.slots.pop_front() {
                self.total = self.total.saturating_sub(amount);
            }
        }
    }

    /// Removes at most `amount`, the oldest first; returns how much was removed.
    pub fn take(&mut self, amount: u64) -> u64 {
        let mut left = amount.min(self.total);
        let taken = left;
        self.total -= taken;
        while let Some((_, held)) = self.slots.front_mut().filter(|_| left > 0) {
            let part = left.min(*held);
            *held -= part;
            left -= part;
            if *held == 0 {
                self.slots.pop_front();
            }
        }
        taken
    }

    /// Removes at most `amount` of what expires first; returns how much was removed.
    pub fn take_oldest(&mut self, amount: u64) -> u64 {
        let oldest = self.slots.front().map_or(0, |(_, held)| *held);
        self.take(amount.min(oldest))
    }

    /// The slot in which the oldest amount expires; `None` if the sum is empty.
    #[must_use]
    pub fn expires(&self) -> Option<u64> {
        self.slots.front().map(|(slot, _)| slot + SLOTS)
    }

    /// The sum, as of the last call that changed it.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop, prop_assert, prop_assert_eq, proptest};

    #[test]
    fn amounts_are_forgotten_when_the_window_has_passed() {
        let window = Window::new(Duration::from_secs(60));
        let at = |seconds: u64| window.slot(Timestamp(seconds * 1_000_000_000));
        let mut sum = SlidingSum::default();
        sum.add(at(0), 5);
        sum.add(at(30), 7);
        sum.expire(at(59));
        assert_eq!((sum.total(), sum.expires()), (12, Some(at(60))));
        sum.expire(at(60));
        assert_eq!(sum.total(), 7);
        sum.expire(at(1_000));
        assert_eq!((sum.total(), sum.expires()), (0, None));
    }

    #[test]
    fn oldest_amounts_are_taken_first() {
        let mut sum = SlidingSum::default();
        (1..=3).for_each(|slot| sum.add(slot, 10));
        assert_eq!((sum.take(15), sum.total(), sum.expires()), (15, 15, Some(2 + SLOTS)));
        assert_eq!((sum.take_oldest(3), sum.take_oldest(99), sum.total()), (3, 2, 10));
        assert_eq!(sum.expires(), Some(3 + SLOTS));
        assert_eq!((sum.take(99), sum.total(), sum.expires(), sum.take(1)), (10, 0, None, 0));
        sum.add(4, 1);
        assert_eq!(sum.total(), 1);
    }

    proptest! {
        #[test]
        fn sliding_sum_is_that_of_the_last_slots_in_bounded_memory(
            steps in prop::collection::vec((0u64..20, 0u64..1_000), 1..300),
        ) {
            let (mut sum, mut all, mut now) = (SlidingSum::default(), Vec::new(), 0);
            for (step, amount) in steps {
                now += step;
                sum.expire(now);
                sum.add(now, amount);
                all.push((now, amount));
                let expected: u64 = all.iter().filter(|(at, _)| at + SLOTS > now).map(|(_, a)| a).sum();
                prop_assert_eq!(sum.total(), expected);
                prop_assert!(sum.slots.len() as u64 <= SLOTS);
            }
        }
    }
}
