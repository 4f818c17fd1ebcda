//! Bytes that requests hold which wait before a pool, and before all of several pools together.
//!
//! Pools that come and go can't have a share each that is known before. So they have one room, of which nobody takes more than is left free
//! then: who waits alone has half of it, of two who both want all each has a third, and something is always left for who comes next. This is how switches share
//! memory among queues (dynamic thresholds: Choudhury and Hahne, IEEE/ACM Transactions on Networking 6(2), 1998). All together never hold more than
//! the room, whoever takes at the same time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What the queues of several pools may hold together.
#[derive(Debug, Default)]
pub struct SharedRoom {
    most: AtomicU64,
    held: AtomicU64,
}

impl SharedRoom {
    /// From now on it is so many bytes. What is held stays.
    pub fn set(&self, most: u64) {
        self.most.store(most, Relaxed);
    }

    /// Bytes that it is.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.most.load(Relaxed)
    }

    /// Bytes that are held of it.
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

/// The bytes of one pool's queues, which goes with them.
#[derive(Debug)]
pub(super) struct Held {
    own: u64,
    most: u64,
    shared: Option<Arc<SharedRoom>>,
}

impl Held {
    /// None yet, and never more than `most`.
    pub(super) fn new(most: u64, shared: Option<Arc<SharedRoom>>) -> Self {
        Self { own: 0, most, shared }
    }

    /// So many.
    pub(super) fn bytes(&self) -> u64 {
        self.own
    }

    /// Whether `bytes` more fit when `gone` have left.
    pub(super) fn fits(&self, gone: u64, bytes: u64) -> bool {
        let own = self.own.saturating_sub(gone).saturating_add(bytes);
        let leaves_as_much = |shared: &Arc<SharedRoom>| {
            let all = shared.held().saturating_sub(gone).saturating_add(bytes);
            own <= shared.most().saturating_sub(all)
        };
        own <= self.most && self.shared.as_ref().is_none_or(leaves_as_much)
    }

    /// Whether `bytes` more would fit if nobody else held anything.
    pub(super) fn fits_alone(&self, bytes: u64) -> bool {
        let own = self.own.saturating_add(bytes);
        own <= self.most && self.shared.as_ref().is_none_or(|shared| own <= shared.most().saturating_sub(own))
    }

    /// Takes what fits. False when others have taken it meanwhile; then nothing is taken.
    pub(super) fn take(&mut self, bytes: u64) -> bool {
        let taken = self.shared.as_ref().is_none_or(|shared| shared.take(bytes));
        if taken {
            self.own += bytes;
        }
        taken
    }

    /// Gives back what was taken.
    pub(super) fn give(&mut self, bytes: u64) {
        self.own -= bytes;
        if let Some(shared) = &self.shared {
            shared.give(bytes);
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.give(self.own);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(held: &mut Held, bytes: u64) -> u64 {
        while held.fits(0, bytes) && held.take(bytes) {}
        held.bytes()
    }

    #[test]
    fn whoever_comes_finds_room_and_all_together_hold_no_more_than_there_is() {
        let room = Arc::new(SharedRoom::default());
        room.set(1_200);
        let of = |most| Held::new(most, Some(room.clone()));
        let mut first = of(u64::MAX);
        assert_eq!(fill(&mut first, 10), 600, "alone it has half");
        let mut second = of(u64::MAX);
        assert_eq!(fill(&mut second, 10), 300, "half of what is left");
        assert!(!first.fits(0, 10) && !first.fits_alone(10), "its own fill it");
        assert!(!second.fits(0, 10) && second.fits_alone(300) && !second.fits_alone(301), "others' fill it");
        first.give(300);
        assert_eq!(fill(&mut first, 10), 450, "what has left is shared anew");
        let mut others: Vec<Held> = (0..100).map(|_| of(u64::MAX)).collect();
        for other in &mut others {
            fill(other, 1);
            assert!(room.held() <= 1_200);
        }
        assert!(others.iter().filter(|other| other.bytes() > 0).count() > 5, "something is left for who comes next");
        let mut modest = of(0);
        assert_eq!(fill(&mut modest, 1), 0, "a pool's own bound holds besides");
        drop((first, second, others));
        assert_eq!(room.held(), 0, "who goes gives back");
        assert_eq!(fill(&mut of(u64::MAX), 10), 600);
    }

    #[test]
    fn what_gives_way_counts_as_gone() {
        let room = Arc::new(SharedRoom::default());
        room.set(100);
        let mut held = Held::new(u64::MAX, Some(room.clone()));
        assert!(held.fits(0, 50) && held.take(50));
        assert!(!held.fits(0, 1) && !held.fits(9, 10) && held.fits(10, 10));
        room.set(10);
        assert!(!held.fits(0, 0) && !held.take(1), "a smaller room is over-full until somebody goes");
        held.give(50);
        assert_eq!((held.bytes(), room.held(), held.fits(0, 5), held.fits(0, 6)), (0, 0, true, false));
    }

    /// Threads that take at the same time never hold more than there is between them.
    #[test]
    fn the_bound_holds_at_every_moment() {
        let room = Arc::new(SharedRoom::default());
        room.set(1_000);
        std::thread::scope(|scope| {
            for n in 1..=4 {
                let room = room.clone();
                scope.spawn(move || {
                    let mut held = Held::new(u64::MAX, Some(room.clone()));
                    for _ in 0..20_000 {
                        if held.fits(0, 7 * n) && held.take(7 * n) {
                            assert!(room.held() <= 1_000);
                        } else if held.bytes() > 0 {
                            held.give(7 * n);
                        }
                    }
                });
            }
        });
        assert_eq!(room.held(), 0);
    }
}
