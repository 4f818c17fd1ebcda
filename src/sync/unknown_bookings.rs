//! How many bookings of peers this picker does not know yet when it decides. Owned by [`super::Replica`]; pure.
//!
//! A booking takes some milliseconds to reach the other pickers. When requests arrive at several pickers at once, all
//! see the same loads, and would choose the same server. So each picker has a place in the order of all pickers, and
//! assumes that those before it have booked a request like its own. [`UnknownBookings::expected`] is the number of these
//! assumed bookings:
//! `(own bookings in the window · (pickers − 1) + place) · simultaneity − bookings received in the window`.
//!
//! Simultaneity is learned: which share of the other pickers booked within one window after an own booking, on average.
//! It is 0 while requests arrive one by one, so that a decision is then as without the rule.

use attache_types::clock::Timestamp;
use std::collections::VecDeque;
use std::time::Duration;

/// Bookings that are at most this old may not have reached all pickers: a few times the delay of a bus in one cluster.
const WINDOW: Duration = Duration::from_millis(10);
/// Weight of the latest own booking in the learned simultaneity.
const GAIN: f64 = 1.0 / 8.0;
/// Most assumed bookings, because each costs a decision.
const MOST: f64 = 32.0;

/// An own booking, and how many bookings of peers were received within the window after it.
#[derive(Debug)]
struct Recent {
    at: Timestamp,
    received: u32,
}

/// Recent bookings of all pickers.
#[derive(Debug, Default)]
pub(crate) struct UnknownBookings {
    /// Place of this picker in the order of all pickers, from 0, and their number.
    place: (usize, usize),
    own: VecDeque<Recent>,
    received: VecDeque<Timestamp>,
    simultaneity: f64,
    /// Mean of the tokens that a request has its endpoint compute, over recent bookings of all pickers.
    computed_tokens: f64,
}

impl UnknownBookings {
    /// Sets the place of this picker among all, from 0, and their number.
    pub(crate) fn set_place(&mut self, place: usize, pickers: usize) {
        self.place = (place, pickers);
    }

    /// This picker books a request that has `computed_tokens` uncached tokens.
    pub(crate) fn booked(&mut self, computed_tokens: u32, now: Timestamp) {
        self.expire(now);
        self.learn(computed_tokens);
        self.own.push_back(Recent { at: now, received: 0 });
    }

    fn learn(&mut self, computed_tokens: u32) {
        self.computed_tokens += GAIN * (f64::from(computed_tokens) - self.computed_tokens);
    }

    /// A peer's booking arrives.
    pub(crate) fn received(&mut self, computed_tokens: u32, now: Timestamp) {
        self.expire(now);
        self.learn(computed_tokens);
        self.own.iter_mut().for_each(|recent| recent.received += 1);
        self.received.push_back(now);
    }

    fn expire(&mut self, now: Timestamp) {
        let is_old = |at: Timestamp| at.after(WINDOW) < now;
        while self.received.front().is_some_and(|at| is_old(*at)) {
            self.received.pop_front();
        }
        while let Some(recent) = self.own.front().filter(|recent| is_old(recent.at)) {
            let others = self.place.1.saturating_sub(1).max(1);
            let share = (f64::from(recent.received) / others as f64).min(1.0);
            self.simultaneity += GAIN * (share - self.simultaneity);
            self.own.pop_front();
        }
    }

    /// Number of peers' bookings that this picker does not know yet, and the uncached tokens of each.
    pub(crate) fn expected(&mut self, now: Timestamp) -> (u32, u32) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a mean of u32")]
        let tokens = self.computed_tokens as u32;
        (self.count(now), tokens)
    }

    fn count(&mut self, now: Timestamp) -> u32 {
        self.expire(now);
        let (place, pickers) = self.place;
        if pickers < 2 {
            return 0;
        }
        let assumed = (self.own.len() * (pickers - 1) + place) as f64 * self.simultaneity;
        let unknown = assumed.round() - self.received.len() as f64;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 32")]
        let count = unknown.clamp(0.0, MOST) as u32;
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(milliseconds: u64) -> Timestamp {
        Timestamp(milliseconds * 1_000_000)
    }

    /// The third of four pickers after 100 own bookings, one a second; each peer books at the same moments if `bursts`.
    fn unknown_bookings(bursts: bool) -> UnknownBookings {
        let mut unknown_bookings = UnknownBookings::default();
        unknown_bookings.set_place(2, 4);
        for second in 0..100 {
            unknown_bookings.booked(100, at(second * 1_000));
            for peer in 0..3 {
                unknown_bookings.received(100, at(second * 1_000 + if bursts { 5 } else { 200 + 200 * peer }));
            }
        }
        unknown_bookings
    }

    #[test]
    fn requests_that_arrive_one_by_one_assume_no_bookings_of_peers() {
        assert_eq!(unknown_bookings(false).count(at(200_000)), 0);
    }

    #[test]
    fn requests_that_arrive_at_once_assume_bookings_of_the_pickers_before_this_one() {
        let mut unknown_bookings = unknown_bookings(true);
        assert_eq!(unknown_bookings.count(at(200_000)), 2, "of the pickers at the places 0 and 1");
        unknown_bookings.booked(100, at(200_000));
        assert_eq!(unknown_bookings.count(at(200_001)), 5, "the three peers of the first round, and two of the second");
        (0..3).for_each(|_| unknown_bookings.received(100, at(200_005)));
        assert_eq!(unknown_bookings.count(at(200_006)), 2, "those of the first round are known now");
        assert_eq!(unknown_bookings.count(at(200_100)), 2, "a new round");
        assert_eq!(unknown_bookings.expected(at(200_100)), (2, 99), "a mean of the tokens");
    }

    #[test]
    fn picker_without_peers_assumes_nothing() {
        let mut unknown_bookings = unknown_bookings(true);
        unknown_bookings.set_place(0, 1);
        assert_eq!(unknown_bookings.count(at(200_000)), 0);
    }
}
