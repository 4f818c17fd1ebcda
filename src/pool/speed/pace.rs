//! The pace of a pool: actual time of a prompt, from when it is the first of its endpoint until its first token,
//! divided by the predicted time of its tokens. Called by [`super`] alone.
//!
//! Prompts that leave one engine step count together: the first one waited for the whole step, the others for no time.
//! A step of few tokens has little weight, since most of its time is fixed cost.

use super::{pack, unpack};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Weight of one step in the pace: a mean of some 20 steps.
const RATE: f64 = 0.05;
/// Seconds of predicted work from which on a step has full weight; one of half the length has a quarter of it.
const WHOLE_SECONDS: f64 = 0.05;
/// Limit of the pace and of its inverse; beyond it, something else must have delayed the prompts.
pub(super) const FARTHEST: f32 = 4.0;
/// A prompt that was the first for less than 2 ms left in the same step as the one before.
const SAME_STEP: f64 = 0.002;

/// The pace of a pool.
#[derive(Debug)]
pub(super) struct Pace {
    /// Weighted sums of the actual and the predicted seconds of recent steps: two `f32`s.
    sums: AtomicU64,
}

impl Default for Pace {
    fn default() -> Self {
        Self { sums: AtomicU64::new(pack(1.0, 1f32.to_bits())) }
    }
}

impl Pace {
    pub(super) fn get(&self) -> f32 {
        let (passed, thought) = unpack(self.sums.load(Relaxed));
        (passed / f32::from_bits(thought)).clamp(1.0 / FARTHEST, FARTHEST)
    }

    /// Adds a step that has ended.
    #[expect(clippy::cast_possible_truncation, reason = "seconds; f32 is precise enough")]
    pub(super) fn observe(&self, step: ComputedStep) {
        let counts = (step.thought / WHOLE_SECONDS).min(1.0).powi(2);
        let (passed, thought) = unpack(self.sums.load(Relaxed));
        let sum = |before: f32, more: f64| (f64::from(before) * (1.0 - RATE * counts) + more * counts) as f32;
        // Of two steps that end at the same moment, one may be lost.
        self.sums.store(pack(sum(passed, step.passed), sum(f32::from_bits(thought), step.thought).to_bits()), Relaxed);
    }
}

/// Prompts that were computed in one step.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ComputedStep {
    /// Predicted seconds of their tokens.
    pub(super) thought: f64,
    /// Actual seconds of the step.
    pub(super) passed: f64,
}

impl ComputedStep {
    /// Adds a prompt with `thought` predicted seconds that was the first for `time` seconds. If it begins a new
    /// step, returns the previous one.
    pub(super) fn computed(&mut self, thought: f64, time: f64) -> Option<Self> {
        if time >= SAME_STEP {
            return Some(std::mem::replace(self, Self { thought, passed: time }));
        }
        self.thought += thought;
        self.passed += time;
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of this many equal prompts each.
    fn steps(pace: &Pace, count: usize, prompts: usize, thought: f64, time: f64) {
        let mut step = ComputedStep::default();
        for i in 0..=count * prompts {
            let ended = step.computed(thought, if i % prompts == 0 { time } else { 0.0 });
            ended.into_iter().for_each(|step| pace.observe(step));
        }
    }

    fn assert_near(pace: &Pace, want: f32, by: f32) {
        assert!((pace.get() - want).abs() <= by * want, "{} is not {want}", pace.get());
    }

    #[test]
    fn steps_with_few_tokens_have_little_weight() {
        let pace = Pace::default();
        steps(&pace, 1_000, 1, 0.000_1, 0.02);
        assert_near(&pace, 1.0, 0.06);
        steps(&pace, 1_000, 1, 0.0, 0.02);
        assert_near(&pace, 1.0, 0.06);
        steps(&pace, 1_000, 16, 0.000_05, 0.02);
        assert_near(&pace, 1.0, 0.06);
        steps(&pace, 20, 1, 0.1, 0.1);
        assert_near(&pace, 1.0, 0.1);
    }

    #[test]
    fn prompts_of_one_step_count_together() {
        for (prompts, thought) in [(1, 0.1), (2, 0.05), (16, 0.006_25), (100, 0.001)] {
            let pace = Pace::default();
            steps(&pace, 200, prompts, thought, 0.2);
            assert_near(&pace, 2.0, 0.05);
        }
    }

    #[test]
    fn order_of_prompts_in_a_step_does_not_matter() {
        // A cached prompt and a long one leave each step, in either order.
        for order in [[0.000_1, 0.1], [0.1, 0.000_1]] {
            let (pace, mut step) = (Pace::default(), ComputedStep::default());
            for _ in 0..200 {
                for (thought, time) in order.into_iter().zip([0.15, 0.0]) {
                    step.computed(thought, time).into_iter().for_each(|step| pace.observe(step));
                }
            }
            assert_near(&pace, 1.5, 0.05);
        }
    }

    #[test]
    fn pace_is_limited_and_recovers() {
        let pace = Pace::default();
        steps(&pace, 200, 1, 0.1, 60.0);
        assert_near(&pace, FARTHEST, 1e-6);
        steps(&pace, 2_000, 1, 0.1, 0.0);
        steps(&pace, 2_000, 1, 0.1, 0.01);
        assert_near(&pace, 1.0 / FARTHEST, 1e-6);
        steps(&pace, 200, 1, 0.1, 0.1);
        assert_near(&pace, 1.0, 0.05);
    }
}
