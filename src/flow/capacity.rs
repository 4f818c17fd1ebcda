//! Memory limits for the bodies of queued requests: one limit for each pool, and one that several pools share.
//!
//! Pools come and go, so the shared limit has no fixed part for each. A pool may take at most as much as it leaves
//! free. One pool alone gets half of the shared limit; of two that both want all, each gets a third; a newcomer
//! always finds some. Switches share buffer memory among queues in this way (dynamic thresholds: Choudhury and
//! Hahne, IEEE/ACM Transactions on Networking 6(2), 1998). The total never exceeds the limit, even when several
//! threads take at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// A limit in bytes that the queues of several pools share.
#[derive(Debug, Default)]
pub struct SharedCapacity {
    most: AtomicU64,
    held: AtomicU64,
}

impl SharedCapacity {
    /// Changes the limit, bytes. What is held stays held.
    pub fn set(&self, most: u64) {
        self.most.store(most, Relaxed);
    }

    /// The limit in bytes.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.most.load(Relaxed)
    }

    /// Bytes that all pools hold together.
    #[must_use]
    pub fn held(&self) -> u64 {
        self.held.load(Relaxed)
    }

    fn take(&self, bytes: u64) -> bool {
        let most = self.most();
        let taken = |held: u64| held.checked_add(bytes).filter(|held| *held <= most);
        self.held.fetch_update(Relaxed, Relaxed, taken).is_ok()
    }

    fn give(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Relaxed);
    }
}

/// Bytes that one pool's queues hold; returned on drop.
#[derive(Debug)]
pub(super) struct QueuedBytes {
    own: u64,
    most: u64,
    shared: Option<Arc<SharedCapacity>>,
}

impl QueuedBytes {
    /// Nothing held yet, and at most `most` bytes.
    pub(super) fn new(most: u64, shared: Option<Arc<SharedCapacity>>) -> Self {
        Self { own: 0, most, shared }
    }

    /// Bytes that this pool holds.
    pub(super) fn bytes(&self) -> u64 {
        self.own
    }

    /// Whether `bytes` more fit after `gone` bytes have left.
    pub(super) fn fits(&self, gone: u64, bytes: u64) -> bool {
        let own = self.own.saturating_sub(gone).saturating_add(bytes);
        let leaves_as_much = |shared: &Arc<SharedCapacity>| {
            let all = shared.held().saturating_sub(gone).saturating_add(bytes);
            own <= shared.most().saturating_sub(all)
        };
        own <= self.most && self.shared.as_ref().is_none_or(leaves_as_much)
    }

    /// Whether `bytes` more would fit if no other pool held anything.
    pub(super) fn fits_alone(&self, bytes: u64) -> bool {
        let own = self.own.saturating_add(bytes);
        own <= self.most && self.shared.as_ref().is_none_or(|shared| own <= shared.most().saturating_sub(own))
    }

    /// Takes `bytes`. Returns false and takes nothing if other pools took the capacity meanwhile.
    pub(super) fn take(&mut self, bytes: u64) -> bool {
        let taken = self.shared.as_ref().is_none_or(|shared| shared.take(bytes));
        if taken {
            self.own += bytes;
        }
        taken
    }

    /// Returns `bytes` that were taken before.
    pub(super) fn give(&mut self, bytes: u64) {
        self.own -= bytes;
        if let Some(shared) = &self.shared {
            shared.give(bytes);
        }
    }
}

impl Drop for QueuedBytes {
    fn drop(&mut self) {
        self.give(self.own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(held: &mut QueuedBytes, bytes: u64) -> u64 {
        while held.fits(0, bytes) && held.take(bytes) {}
        held.bytes()
    }

    #[test]
    fn shared_limit_newcomer_finds_capacity_total_never_exceeds() {
        let shared = Arc::new(SharedCapacity::default());
        shared.set(1_200);
        let of = |most| QueuedBytes::new(most, Some(shared.clone()));
        let mut first = of(u64::MAX);
        assert_eq!(fill(&mut first, 10), 600, "one pool alone gets half");
        let mut second = of(u64::MAX);
        assert_eq!(fill(&mut second, 10), 300, "half of what is left");
        assert!(!first.fits(0, 10) && !first.fits_alone(10), "its own bytes fill its part");
        assert!(
            !second.fits(0, 10) && second.fits_alone(300) && !second.fits_alone(301),
            "another pool's bytes fill it"
        );
        first.give(300);
        assert_eq!(fill(&mut first, 10), 450, "freed bytes are shared again");
        let mut others: Vec<QueuedBytes> = (0..100).map(|_| of(u64::MAX)).collect();
        for other in &mut others {
            fill(other, 1);
            assert!(shared.held() <= 1_200);
        }
        assert!(others.iter().filter(|other| other.bytes() > 0).count() > 5, "newcomers get some capacity");
        let mut modest = of(0);
        assert_eq!(fill(&mut modest, 1), 0, "a pool's own limit holds as well");
        drop((first, second, others));
        assert_eq!(shared.held(), 0, "dropped pools return their bytes");
        assert_eq!(fill(&mut of(u64::MAX), 10), 600);
    }

    #[test]
    fn evicted_bytes_count_as_gone() {
        let shared = Arc::new(SharedCapacity::default());
        shared.set(100);
        let mut held = QueuedBytes::new(u64::MAX, Some(shared.clone()));
        assert!(held.fits(0, 50) && held.take(50));
        assert!(!held.fits(0, 1) && !held.fits(9, 10) && held.fits(10, 10));
        shared.set(10);
        assert!(!held.fits(0, 0) && !held.take(1), "a lowered limit rejects requests until enough have left");
        held.give(50);
        assert_eq!((held.bytes(), shared.held(), held.fits(0, 5), held.fits(0, 6)), (0, 0, true, false));
    }

    /// Threads that take at the same time never hold more than the limit together.
    #[test]
    fn shared_limit_holds_under_concurrency() {
        let shared = Arc::new(SharedCapacity::default());
        shared.set(1_000);
        std::thread::scope(|scope| {
            for n in 1..=4 {
                let shared = shared.clone();
                scope.spawn(move || {
                    let mut held = QueuedBytes::new(u64::MAX, Some(shared.clone()));
                    for _ in 0..20_000 {
                        if held.fits(0, 7 * n) && held.take(7 * n) {
                            assert!(shared.held() <= 1_000);
                        } else if held.bytes() > 0 {
                            held.give(7 * n);
                        }
                    }
                });
            }
        });
        assert_eq!(shared.held(), 0);
    }
}
