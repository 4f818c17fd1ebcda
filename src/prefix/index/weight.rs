//! How much each holder's cache has stored recently: a decayed count, O(1) to update and read, without a lock.

use crate::atomics::{AtomicU64, Ordering::Relaxed};
use attache_types::clock::Timestamp;
use std::time::Duration;

/// The decayed count of one holder.
#[derive(Debug)]
struct HolderWeight {
    /// The weight w at time t as log2(w) + t / half-life, which is constant while nothing is added; bits of an `f64`.
    kept: AtomicU64,
    /// Blocks (also an `f64`) added since then, all at the time `since`. Logarithms are computed once per
    /// time step, not per event.
    fresh: AtomicU64,
    since: AtomicU64,
}

/// The counts of all holders, by slot. They are written under the index's lock; a concurrent reader may miss one write.
#[derive(Debug)]
pub(super) struct HolderWeights {
    all: Box<[HolderWeight]>,
    half_life: f64,
    /// The latest time that any caller has passed in.
    now: AtomicU64,
}

impl HolderWeights {
    pub(super) fn new(slots: usize, half_life: Duration) -> Self {
        let empty = || HolderWeight {
            kept: AtomicU64::new(f64::NEG_INFINITY.to_bits()),
            fresh: AtomicU64::new(0),
            since: AtomicU64::new(0),
        };
        Self {
            all: (0..slots).map(|_| empty()).collect(),
            half_life: half_life.as_secs_f64().max(1e-9),
            now: AtomicU64::new(0),
        }
    }

    pub(super) fn fixed_bytes(slots: usize) -> usize {
        slots * size_of::<HolderWeight>()
    }

    /// Records the current time.
    pub(super) fn see(&self, now: Timestamp) {
        // Not on every call, to spare other cores a write to a shared cache line.
        if now.0 > self.now.load(Relaxed).saturating_add(1_000_000) {
            self.now.store(now.0, Relaxed);
        }
    }

    fn half_lives(&self, moment: u64) -> f64 {
        moment as f64 * 1e-9 / self.half_life
    }

    /// Returns the decayed count of a slot.
    pub(super) fn get(&self, slot: usize, now: Timestamp) -> f64 {
        self.see(now);
        let Some(weight) = self.all.get(slot) else { return 0.0 };
        let kept = f64::from_bits(weight.kept.load(Relaxed));
        let fresh = f64::from_bits(weight.fresh.load(Relaxed));
        let age = self.half_lives(now.0.saturating_sub(weight.since.load(Relaxed)));
        (kept - self.half_lives(now.0)).exp2() + fresh * (-age).exp2()
    }

    /// Adds blocks at the latest known time.
    pub(super) fn add(&self, slot: usize, blocks: u32) {
        self.add_weight(slot, f64::from(blocks));
    }

    /// Adds blocks that were stored some time ago: they count as much as if they had been added then.
    pub(super) fn add_old(&self, slot: usize, blocks: u32, age: Duration) {
        self.add_weight(slot, f64::from(blocks) * (-age.as_secs_f64() / self.half_life).exp2());
    }

    fn add_weight(&self, slot: usize, blocks: f64) {
        let Some(weight) = self.all.get(slot).filter(|_| blocks > 0.0) else { return };
        let now = self.now.load(Relaxed);
        let mut fresh = f64::from_bits(weight.fresh.load(Relaxed));
        if weight.since.load(Relaxed) != now {
            self.fold(weight);
            weight.since.store(now, Relaxed);
            fresh = 0.0;
        }
        weight.fresh.store((fresh + blocks).to_bits(), Relaxed);
    }

    /// Removes an average part of the weight when `dropped` of `before` blocks are gone.
    pub(super) fn cut(&self, slot: usize, dropped: u32, before: u32) {
        let Some(weight) = self.all.get(slot).filter(|_| dropped > 0) else { return };
        let left = f64::from(before.saturating_sub(dropped)) / f64::from(before.max(1));
        let fresh = f64::from_bits(weight.fresh.load(Relaxed)) * left;
        weight.fresh.store(fresh.to_bits(), Relaxed);
        let kept = f64::from_bits(weight.kept.load(Relaxed));
        if kept.is_finite() {
            weight.kept.store((kept + left.log2()).to_bits(), Relaxed);
        }
    }

    /// Resets the count of a slot.
    pub(super) fn clear(&self, slot: usize) {
        if let Some(weight) = self.all.get(slot) {
            weight.kept.store(f64::NEG_INFINITY.to_bits(), Relaxed);
            weight.fresh.store(0.0f64.to_bits(), Relaxed);
        }
    }

    /// Moves the fresh blocks into the kept weight.
    fn fold(&self, weight: &HolderWeight) {
        let moment = self.half_lives(weight.since.load(Relaxed));
        let kept = f64::from_bits(weight.kept.load(Relaxed));
        let sum = (kept - moment).exp2() + f64::from_bits(weight.fresh.load(Relaxed));
        weight.kept.store((sum.log2() + moment).to_bits(), Relaxed);
    }
}
