//! What each user was served within the window, in bounded memory.

use ahash::AHashMap;
use attache_scheduling::window::{SlidingSum, Window};
use attache_types::clock::Timestamp;
use std::collections::BTreeSet;
use std::time::Duration;

/// 10,000 users in one window: at most 10 MB. Beyond it the users that were served least are dropped.
const MAX_USERS: usize = 10_000;
/// Users whose oldest slot expires with each call. More than the slots that a call can add, so expired slots do not
/// accumulate.
const EXPIRED_PER_CALL: usize = 4;

/// Weighted tokens of one user, compared with all users served within the window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct UserUsage {
    /// The user's own sum.
    pub(super) served: u64,
    /// The lowest sum of any user.
    pub(super) least: u64,
    /// The highest sum of any user.
    pub(super) greatest: u64,
    /// Number of users within the window.
    pub(super) users: usize,
}

/// The sums of all users. Users are hashes of their names, because clients choose the names.
#[derive(Debug)]
pub(super) struct Tracker {
    window: Window,
    sums: AHashMap<u64, SlidingSum>,
    /// All users by their sum.
    by_total: BTreeSet<(u64, u64)>,
    /// All users by the slot in which their oldest part expires.
    by_expiry: BTreeSet<(u64, u64)>,
}

impl Tracker {
    pub(super) fn new(window: Duration) -> Self {
        Self {
            window: Window::new(window),
            sums: AHashMap::new(),
            by_total: BTreeSet::new(),
            by_expiry: BTreeSet::new(),
        }
    }

    /// Usage of the user `key` and of all users.
    pub(super) fn usage(&mut self, key: u64, now: Timestamp) -> UserUsage {
        let slot = self.window.slot(now);
        self.expire(slot);
        self.change(key, |sum| sum.expire(slot));
        UserUsage {
            served: self.sums.get(&key).map_or(0, SlidingSum::total),
            least: self.by_total.first().map_or(0, |(total, _)| *total),
            greatest: self.by_total.last().map_or(0, |(total, _)| *total),
            users: self.sums.len(),
        }
    }

    /// Adds `tokens` to what the user `key` was served.
    pub(super) fn add(&mut self, key: u64, tokens: u64, now: Timestamp) {
        let slot = self.window.slot(now);
        self.expire(slot);
        self.change(key, |sum| {
            sum.expire(slot);
            sum.add(slot, tokens);
        });
        if self.sums.len() > MAX_USERS {
            // Keeps the user just added: it may become a heavy one.
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

    /// Applies `change` to one user's sum and updates both orders; removes a sum without slots.
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
        tracker.add(1, 8, at(0));
        tracker.add(2, 20, at(10));
        tracker.add(1, 5, at(30));
        assert_eq!(tracker.usage(1, at(30)), UserUsage { served: 13, least: 13, greatest: 20, users: 2 });
        assert_eq!(tracker.usage(3, at(59)), UserUsage { served: 0, least: 13, greatest: 20, users: 2 });
        assert_eq!(tracker.usage(1, at(61)), UserUsage { served: 5, least: 5, greatest: 20, users: 2 });
        assert_eq!(tracker.usage(1, at(71)), UserUsage { served: 5, least: 5, greatest: 5, users: 1 });
        assert_eq!(tracker.usage(1, at(1_000)), UserUsage::default());
        assert!(tracker.sums.is_empty() && tracker.by_total.is_empty() && tracker.by_expiry.is_empty());
    }

    #[test]
    fn users_are_bounded_and_the_heavy_ones_stay() {
        let mut tracker = Tracker::new(Duration::from_secs(60));
        tracker.add(u64::MAX, 1_000_000, Timestamp(0));
        for i in 0..MAX_USERS as u64 * 2 {
            tracker.add(i, 1 + i % 100, Timestamp(i));
        }
        assert!(tracker.sums.len() <= MAX_USERS);
        assert_eq!((tracker.by_total.len(), tracker.by_expiry.len()), (tracker.sums.len(), tracker.sums.len()));
        assert_eq!(tracker.usage(u64::MAX, Timestamp(0)).served, 1_000_000);
    }

    #[test]
    fn user_without_tokens_is_counted() {
        let mut tracker = Tracker::new(Duration::from_secs(60));
        tracker.add(1, 0, Timestamp(0));
        assert_eq!(tracker.usage(1, Timestamp(0)), UserUsage { users: 1, ..UserUsage::default() });
    }
}
