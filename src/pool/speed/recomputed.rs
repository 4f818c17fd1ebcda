//! What evictions cost a pool, which its prefix cache has learned.

use super::PoolSpeed;
use std::sync::atomic::Ordering::Relaxed;

impl PoolSpeed {
    /// Share of the computed blocks that servers had computed before and evicted, 0..1; 0 if unknown.
    #[must_use]
    pub fn recomputed(&self) -> f64 {
        f64::from(f32::from_bits(self.recomputed.load(Relaxed)))
    }

    /// Sets the share of recomputed blocks.
    #[expect(clippy::cast_possible_truncation, reason = "a share; f32 is precise enough")]
    pub fn set_recomputed(&self, share: f64) {
        self.recomputed.store((share as f32).to_bits(), Relaxed);
    }
}
