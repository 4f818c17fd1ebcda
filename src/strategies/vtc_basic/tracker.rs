//! What each user was served within the window, in bounded memory.

use ahash::{AHashMap, RandomState};
use attache_scheduling::window::{SlidingSum, Window};
use attache_types::clock::Timestamp;
use std::collections::BTreeSet;
use std::time::Duration;

/// 10,000 users in one window: 10 MB at most. Beyond it those who were served least are forgotten.
const MAX_USERS: usize = 10_000;
/// Users whose oldest slot is forgotten with each call: more than slots that each call can make, so that the work never piles up.
const EXPIRED_PER_CALL: usize = 4;

/// Where a user stands among all who were served within the window, weighted tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Standing {
    /// The user's own sum.
    pub(super) served: u64,
    /// The least sum of a user.
    pub(super) least: u64,
    /// The greatest.
    pub(super) greatest: u64,
    /// How many there are.
    pub(super) users: usize,
}

/// The sums. Users are kept as seeded hashes: their names are the clients' choice.
#[derive(Debug)]
pub(super) struct Tracker {
    window: Window,
    hasher: RandomState,
    sums: AHashMap<u64, SlidingSum>,
    /// All users by their sum.
    by_total: BTreeSet<(u64, u64)>,
    /// All users by the slot in which their oldest part is forgotten.
    by_expiry: BTreeSet<(u64, u64)>,
}

impl Tracker {
    pub(super) fn new(window: Duration) -> Self {
        Self {
            window: Window::new(window),
            hasher: RandomState::new(),
            sums: AHashMap::new(),
            by_total: BTreeSet::new(),
            by_expiry: BTreeSet::new(),
        }
    }

    /// Where `user` stands.
    pub(super) fn standing(&mut self, user: &str, now: Timestamp) -> Standing {
        let slot = self.window.slot(now);
        self.expire(slot);
        let key = self.hasher.hash_one(user);
        self.change(key, |sum| sum.expire(slot));
        Standing {
            served: self.sums.get(&key).map_or(0, SlidingSum::total),
            least: self.by_total.first().map_or(0, |(total, _)| *total),
            greatest: self.by_total.last().map_or(0, |(total, _)| *total),
            users: self.sums.len(),
        }
    }

    /// `user` was served `tokens`.
    pub(super) fn add(&mut self, user: &str, tokens: u64, now: Timestamp) {
        let slot = self.window.slot(now);
        self.expire(slot);
        let key = self.hasher.hash_one(user);
        self.change(key, |sum| {
            sum.expire(slot);
            sum.add(slot, tokens);
        });
        if self.sums.len() > MAX_USERS {
            // Not the one that was just added: it may be the next heavy one.
            let least = self.by_total.iter().map(|(_, user)| *user).find(|user| *user != key);
            if let Some(least) = least {
                self.change(least, |sum| *sum = SlidingSum::default());
            }
        }
    }

    fn expire(&mut self, slot: u64) {
        for _ in 0..EXPIRED_PER_CALL {
            match self.by_expiry.first() {
                Some((at, key)) if *at <= slot => {
                    let key = *key;
                    self.change(key, |sum| sum.expire(slot));
                }
                _ => return,
            }
        }
    }

    /// Changes one user's sum and keeps both orders; a sum that holds nothing goes.
    fn change(&mut self, key: u64, change: impl FnOnce(&mut SlidingSum)) {
        let sum = self.sums.entry(key).or_default();
        let before = (sum.total(), sum.expires());
        change(sum);
        let after = (sum.total(), sum.expires());
        if let (total, Some(at)) = before
            && before != after
        {
            self.by_total.remove(&(total, key));
            self.by_expiry.remove(&(at, key));
        }
        match after {
            (total, Some(at)) if before != after => {
                self.by_total.insert((total, key));
                self.by_expiry.insert((at, key));
            }
            (_, Some(_)) => {}
            (_, None) => {
                self.sums.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn sums_follow_the_window_and_idle_users_go() {
        let mut tracker = Tracker::new(Duration::from_secs(60));
        let at = |s: u64| Timestamp(s * SECOND);
        tracker.add("a", 8, at(0));
        tracker.add("b", 20, at(10));
        tracker.add("a", 5, at(30));
        assert_eq!(tracker.standing("a", at(30)), Standing { served: 13, least: 13, greatest: 20, users: 2 });
        assert_eq!(tracker.standing("nobody", at(59)), Standing { served: 0, least: 13, greatest: 20, users: 2 });
        assert_eq!(tracker.standing("a", at(61)), Standing { served: 5, least: 5, greatest: 20, users: 2 });
        assert_eq!(tracker.standing("a", at(71)), Standing { served: 5, least: 5, greatest: 5, users: 1 });
        assert_eq!(tracker.standing("a", at(1_000)), Standing::default());
        assert!(tracker.sums.is_empty() && tracker.by_total.is_empty() && tracker.by_expiry.is_empty());
    }

    #[test]
    fn users_are_bounded_and_the_heavy_ones_stay() {
        let mut tracker = Tracker::new(Duration::from_secs(60));
        tracker.add("heavy", 1_000_000, Timestamp(0));
        for i in 0..MAX_USERS as u64 * 2 {
            tracker.add(&format!("user {i}"), 1 + i % 100, Timestamp(i));
        }
        assert!(tracker.sums.len() <= MAX_USERS);
        assert_eq!((tracker.by_total.len(), tracker.by_expiry.len()), (tracker.sums.len(), tracker.sums.len()));
        assert_eq!(tracker.standing("heavy", Timestamp(0)).served, 1_000_000);
    }

    #[test]
    fn a_user_of_nothing_is_remembered_without_harm() {
        let mut tracker = Tracker::new(Duration::from_secs(60));
        tracker.add("a", 0, Timestamp(0));
        assert_eq!(tracker.standing("a", Timestamp(0)), Standing { users: 1, ..Standing::default() });
    }
}
