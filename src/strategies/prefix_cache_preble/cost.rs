//! Prefill time of a GPU: regressions over Mistral 7B that Preble's authors published, as AIBrix has them.
//!
//! Two of them are corrected unless `compat` is set. The parabola for short prompts falls after 244 tokens and is
//! negative after 367; here it stays at its peak. AIBrix also omits that attention grows with the context.

use attache_types::keywords;

/// The GPU that was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gpu {
    /// 2.5 times slower than the A6000.
    V100,
    /// The GPU of the paper.
    A6000,
}

keywords! {
    Gpu: "V100" => V100, "A6000" => A6000;
}

/// Share of the time in which the GPU computes.
const UTILIZATION: f64 = 0.9;
/// Peak of the parabola for short prompts, in tokens.
const PEAK: f64 = 244.0;
/// Above this product of new tokens and context tokens, attention over the context takes measurable time.
const LEAST_SQUARE: f64 = 1024.0 * 1024.0;

impl Gpu {
    /// Seconds to prefill `new` uncached tokens of a prompt of `context` tokens; never negative. With `compat`,
    /// exactly AIBrix's value.
    #[must_use]
    pub fn prefill(self, new: u32, context: u32, compat: bool) -> f64 {
        if new == 0 {
            return 0.0;
        }
        let (n, c) = (f64::from(new), f64::from(context));
        let quadratic = if compat { self.attention_to_itself(n) } else { self.attention_to_context(n, c) };
        let short = (192.0..384.0).contains(&n) && !compat;
        ((self.linear(if short { n.min(PEAK) } else { n }) + self.attention(c) + quadratic) / UTILIZATION / 1e3)
            .max(0.0)
    }

    /// Milliseconds of all layers but attention.
    fn linear(self, n: f64) -> f64 {
        match (self, n) {
            (Gpu::A6000, ..192.0) => 22.0,
            (Gpu::A6000, ..384.0) => -118.0 + 1.25 * n - 2.56e-3 * n * n,
            (Gpu::A6000, _) => 0.108_425_71 * n + 4.209_777_054_806_409,
            (Gpu::V100, ..192.0) => 55.0,
            (Gpu::V100, ..384.0) => -295.0 + 3.125 * n - 6.4e-3 * n * n,
            (Gpu::V100, _) => 0.271_064_28 * n + 10.524_442_63,
        }
    }

    /// Milliseconds of attention; a single short request uses half of a kernel that is sized for a batch.
    fn attention(self, c: f64) -> f64 {
        match (self, c) {
            (Gpu::A6000, ..=1024.0) => 0.32 / 2.0,
            (Gpu::A6000, _) => 1.86e-4 * c + 0.159,
            (Gpu::V100, ..=1024.0) => 0.80 / 2.0,
            (Gpu::V100, _) => 4.65e-4 * c + 0.398,
        }
    }

    fn attention_to_itself(self, n: f64) -> f64 {
        match self {
            _ if n < 4_096.0 => 0.0,
            Gpu::A6000 => -7.37 + 3.86e-3 * n + 2.16e-6 * n * n,
            Gpu::V100 => -18.425 + 9.65e-3 * n + 5.4e-6 * n * n,
        }
    }

    fn attention_to_context(self, n: f64, c: f64) -> f64 {
        match self {
            _ if n * c <= LEAST_SQUARE => 0.0,
            Gpu::A6000 => 1.13e-3 * n + 1.75e-3 * c + 2.19e-6 * n * c,
            Gpu::V100 => 2.825e-3 * n + 4.375e-3 * c + 5.475e-6 * n * c,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With `compat`, and without.
    fn milliseconds(gpu: Gpu, new: u32, context: u32, expected: [f64; 2]) {
        for (compat, expected) in [true, false].into_iter().zip(expected) {
            let got = gpu.prefill(new, context, compat) * 1e3 * 0.9;
            assert!((got - expected).abs() < 1e-6, "{gpu:?} {new} of {context}, {compat}: {got}, not {expected}");
        }
    }

    #[test]
    fn regressions_match_the_published_ones() {
        milliseconds(Gpu::V100, 100, 100, [55.4; 2]);
        milliseconds(Gpu::V100, 200, 1_024, [-295.0 + 625.0 - 256.0 + 0.4; 2]);
        milliseconds(Gpu::V100, 400, 2_000, [0.271_064_28 * 400.0 + 10.524_442_63 + 0.93 + 0.398; 2]);
        milliseconds(Gpu::A6000, 191, 191, [22.16; 2]);
        milliseconds(Gpu::A6000, 300, 300, [-118.0 + 375.0 - 230.4 + 0.16, -118.0 + 305.0 - 152.412_16 + 0.16]);
        milliseconds(Gpu::A6000, 380, 380, [0.0, -118.0 + 305.0 - 152.412_16 + 0.16]);
        let linear = 0.108_425_71 * 5_000.0 + 4.209_777_054_806_409 + 0.93 + 0.159;
        milliseconds(Gpu::A6000, 5_000, 5_000, [linear - 7.37 + 19.3 + 54.0, linear + 5.65 + 8.75 + 54.75]);
        milliseconds(Gpu::V100, 0, 9_000, [0.0; 2]);
    }

    #[test]
    fn more_new_tokens_never_take_less_time() {
        for gpu in [Gpu::V100, Gpu::A6000] {
            let times = |compat| move |n| gpu.prefill(n, 20_000, compat);
            assert!((0..20_000).map(times(false)).is_sorted(), "{gpu:?}");
            // The original's, within each fit, as far as its parabola rises.
            for range in [1..192, 192..244, 384..4_096, 4_096..20_000] {
                assert!(range.clone().map(times(true)).is_sorted(), "{gpu:?} {range:?}");
            }
        }
    }
}
