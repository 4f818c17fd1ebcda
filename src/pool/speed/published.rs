//! Learned values that decisions read without a lock.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

/// Coefficients that every decision reads and every response writes; bits of `f32`s. A reader may see some from before
/// a change and some from after it.
#[derive(Debug)]
pub(super) struct Published<const N: usize>([AtomicU32; N]);

impl<const N: usize> Default for Published<N> {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl<const N: usize> Published<N> {
    #[expect(clippy::cast_possible_truncation, reason = "seconds per unit; f32 is precise enough")]
    pub(super) fn set(&self, coefficients: &[f64; N]) {
        for (slot, c) in self.0.iter().zip(coefficients) {
            slot.store((*c as f32).to_bits(), Relaxed);
        }
    }

    pub(super) fn get(&self) -> [f64; N] {
        self.0.each_ref().map(|c| f64::from(f32::from_bits(c.load(Relaxed))))
    }
}

/// Ratios to the pool's fit, for the first token and for further tokens; bits of `f32`s, 0 for a ratio of 1.
#[derive(Debug, Default)]
pub(super) struct Factors([AtomicU32; 2]);

impl Factors {
    #[expect(clippy::cast_possible_truncation, reason = "factors of a few units; f32 is precise enough")]
    pub(super) fn set(&self, which: usize, ln: f64) {
        if let Some(bits) = self.0.get(which) {
            bits.store((ln.exp() as f32).to_bits(), Relaxed);
        }
    }

    pub(super) fn get(&self) -> [f32; 2] {
        self.0.each_ref().map(|bits| match bits.load(Relaxed) {
            0 => 1.0,
            bits => f32::from_bits(bits),
        })
    }

    pub(super) fn reset(&self) {
        self.0.iter().for_each(|bits| bits.store(0, Relaxed));
    }
}
