//! Capacity of one server for estimated blocks, and the part of it that prompts in flight will fill.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Smallest part of a server's reported capacity that estimated blocks may fill, however wrong they are.
pub(super) const LEAST_CAPACITY: f64 = 0.1;

/// Block counts of one server.
#[derive(Debug, Default)]
pub(super) struct Capacity {
    /// Capacity for estimated blocks; 0 while unknown.
    blocks: AtomicU32,
    /// Blocks that prompts in flight will add. The index evicts for them when the prompts are sent, since later prompts
    /// will not find the evicted blocks.
    coming: AtomicU32,
    /// Capacity that the index was last given.
    given: AtomicU32,
}

/// Capacity reserved for a prompt in flight, until Drop.
#[derive(Debug)]
pub(super) struct Reserved {
    capacity: Arc<Capacity>,
    blocks: u32,
}

impl Capacity {
    /// Sets the capacity, in blocks.
    pub(super) fn set(&self, blocks: u32) {
        self.blocks.store(blocks, Relaxed);
    }

    /// Reserves capacity for this many blocks.
    pub(super) fn reserve(self: Arc<Self>, blocks: u32) -> Reserved {
        self.coming.fetch_add(blocks, Relaxed);
        Reserved { capacity: self, blocks }
    }

    /// Returns the capacity that the index should be given now. A change of less than 2 % is
    /// not worth the writer's lock.
    pub(super) fn update(&self) -> Option<u32> {
        let all = self.blocks.load(Relaxed);
        let least = (f64::from(all) * LEAST_CAPACITY) as u32;
        let blocks = all.saturating_sub(self.coming.load(Relaxed)).max(least).max(1);
        let given = self.given.load(Relaxed);
        let update = (all > 0 && blocks.abs_diff(given) > given / 50).then_some(blocks);
        update.inspect(|blocks| self.given.store(*blocks, Relaxed))
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.capacity.coming.fetch_sub(self.blocks, Relaxed);
    }
}
