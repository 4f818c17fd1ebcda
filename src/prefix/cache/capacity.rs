//! How many believed blocks lie on one server, and what prompts on their way there will fill.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Guesses keep at least a tenth of what a server says it has room for, however wrong they turn out.
pub(super) const LEAST_CAPACITY: f64 = 0.1;

/// Blocks that are believed to lie on one server.
#[derive(Debug, Default)]
pub(super) struct Capacity {
    /// That it has room for; 0 when it has not said.
    blocks: AtomicU32,
    /// That prompts on their way there will fill. What they will push out is forgotten when they are sent: whoever comes behind them
    /// will not find it any more.
    coming: AtomicU32,
    /// That the index was last told.
    told: AtomicU32,
}

/// Room that a prompt on its way will fill, until Drop.
#[derive(Debug)]
pub(super) struct Reserved {
    capacity: Arc<Capacity>,
    blocks: u32,
}

impl Capacity {
    /// The server has room for so many.
    pub(super) fn set(&self, blocks: u32) {
        self.blocks.store(blocks, Relaxed);
    }

    /// Keeps room for so many.
    pub(super) fn reserve(self: Arc<Self>, blocks: u32) -> Reserved {
        self.coming.fetch_add(blocks, Relaxed);
        Reserved { capacity: self, blocks }
    }

    /// What the index is to be told now. A change of less than 2 % is not worth the writer's lock.
    pub(super) fn news(&self) -> Option<u32> {
        let all = self.blocks.load(Relaxed);
        let least = (f64::from(all) * LEAST_CAPACITY) as u32;
        let blocks = all.saturating_sub(self.coming.load(Relaxed)).max(least).max(1);
        let told = self.told.load(Relaxed);
        let news = (all > 0 && blocks.abs_diff(told) > told / 50).then_some(blocks);
        news.inspect(|blocks| self.told.store(*blocks, Relaxed))
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.capacity.coming.fetch_sub(self.blocks, Relaxed);
    }
}
