//! How long a step of a simulated engine takes. Called by `sim::engine`; pure arithmetic.

use std::time::Duration;

/// 6 ms: reading the 16 GB of weights of an 8B model in bf16 at an H100's 3.35 TB/s takes 4.8 ms; the rest is launch and scheduling.
pub const DEFAULT_STEP_BASE: Duration = Duration::from_micros(6_000);
/// 40 us: 16 GFLOP a token at 40 % of an H100's 989 TFLOP/s, i.e. 25,000 prompt tokens a second.
pub const DEFAULT_PER_PREFILL_TOKEN: Duration = Duration::from_micros(40);
/// 30 us: sampling, detokenising and bookkeeping for one sequence in the batch (assumption).
pub const DEFAULT_PER_DECODE_SEQUENCE: Duration = Duration::from_micros(30);
/// 49 ns: 128 KiB of keys and values a token (32 layers, 8 KV heads of 128, bf16) at 80 % of 3.35 TB/s.
pub const DEFAULT_PER_CONTEXT_TOKEN: Duration = Duration::from_nanos(49);
/// 1 ns: 0.5 MFLOP for one token looking at one other (4 x 32 layers x 4,096) at half of an H100's 989 TFLOP/s.
pub const DEFAULT_PER_PREFILL_PAIR: Duration = Duration::from_nanos(1);
/// 1 ms to set up a transfer between servers: RDMA takes 0.5 to 2 ms (llm-d's simulator).
pub const DEFAULT_TRANSFER_SETUP: Duration = Duration::from_millis(1);
/// 3,277 ns: 128 KiB of keys and values a token over 400 Gbit/s InfiniBand, which moves 40 GB/s.
pub const DEFAULT_PER_RECEIVED_TOKEN: Duration = Duration::from_nanos(3_277);

/// The work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// Prompt tokens computed.
    pub prefill_tokens: u64,
    /// Pairs (prompt token computed, earlier token it looks at).
    pub prefill_pairs: u64,
    /// Sequences that get one more token.
    pub decode_sequences: u64,
    /// Tokens in the cache that those sequences read.
    pub context_tokens: u64,
}

/// Linear costs of a step and of a transfer; `sim`'s module page has the formulas.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyModel {
    /// Cost of any step.
    pub step_base: Duration,
    /// Cost of a prompt token that is computed (cached ones cost nothing).
    pub per_prefill_token: Duration,
    /// Cost of a pair of tokens in the attention of a prefill.
    pub per_prefill_pair: Duration,
    /// Cost of a sequence that decodes.
    pub per_decode_sequence: Duration,
    /// Cost of a cached token that a decoding sequence reads.
    pub per_context_token: Duration,
    /// Time from one server's blocks to another's before the first byte.
    pub transfer_setup: Duration,
    /// Time that a token's keys and values are under way.
    pub per_received_token: Duration,
    /// How many times faster than the model everything goes; greater than 0.
    pub speed: f64,
}

impl Default for LatencyModel {
    fn default() -> Self {
        Self {
            step_base: DEFAULT_STEP_BASE,
            per_prefill_token: DEFAULT_PER_PREFILL_TOKEN,
            per_prefill_pair: DEFAULT_PER_PREFILL_PAIR,
            per_decode_sequence: DEFAULT_PER_DECODE_SEQUENCE,
            per_context_token: DEFAULT_PER_CONTEXT_TOKEN,
            transfer_setup: DEFAULT_TRANSFER_SETUP,
            per_received_token: DEFAULT_PER_RECEIVED_TOKEN,
            speed: 1.0,
        }
    }
}

impl LatencyModel {
    /// How long a step with this work takes; at least 1 ns, so that time moves on.
    #[must_use]
    pub fn step(&self, work: StepWork) -> Duration {
        StepCosts::of(self).step(work)
    }

    /// How long the keys and values of so many tokens are under way from another server.
    #[must_use]
    pub fn transfer(&self, tokens: u32) -> Duration {
        StepCosts::of(self).transfer(tokens)
    }
}

/// The model as an engine asks it, millions of times: in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub(in crate::sim) struct StepCosts {
    base: u64,
    prefill_token: u64,
    prefill_pair: u64,
    decode_sequence: u64,
    context_token: u64,
    transfer: u64,
    received_token: u64,
    speed: f64,
}

impl StepCosts {
    pub(in crate::sim) fn of(model: &LatencyModel) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            base: nanos(model.step_base),
            prefill_token: nanos(model.per_prefill_token),
            prefill_pair: nanos(model.per_prefill_pair),
            decode_sequence: nanos(model.per_decode_sequence),
            context_token: nanos(model.per_context_token),
            transfer: nanos(model.transfer_setup),
            received_token: nanos(model.per_received_token),
            speed: model.speed,
        }
    }

    /// [`LatencyModel::step`].
    pub(in crate::sim) fn step(&self, work: StepWork) -> Duration {
        // Whole nanoseconds until the division: the sum is the same on every machine.
        let nanos = self
            .base
            .saturating_add(self.prefill_token.saturating_mul(work.prefill_tokens))
            .saturating_add(self.prefill_pair.saturating_mul(work.prefill_pairs))
            .saturating_add(self.decode_sequence.saturating_mul(work.decode_sequences))
            .saturating_add(self.context_token.saturating_mul(work.context_tokens));
        self.scaled(nanos)
    }

    /// [`LatencyModel::transfer`].
    pub(in crate::sim) fn transfer(&self, tokens: u32) -> Duration {
        self.scaled(self.transfer.saturating_add(self.received_token.saturating_mul(u64::from(tokens))))
    }

    fn scaled(&self, nanos: u64) -> Duration {
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a duration"
        )]
        let scaled = (nanos as f64 / self.speed) as u64;
        Duration::from_nanos(scaled.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_the_sum_of_its_parts_over_the_speed() {
        let mut model = LatencyModel::default();
        assert_eq!(model.step(StepWork::default()), Duration::from_millis(6));
        let work =
            StepWork { prefill_tokens: 1000, prefill_pairs: 500_000, decode_sequences: 10, context_tokens: 10_000 };
        assert_eq!(model.step(work), Duration::from_nanos(6_000_000 + 40_000_000 + 500_000 + 300_000 + 490_000));
        model.speed = 100.0;
        assert_eq!(model.step(work), Duration::from_nanos(472_900));
        assert_eq!(model.transfer(1_000), Duration::from_nanos((1_000_000 + 3_277_000) / 100));
    }

    #[test]
    fn time_moves_even_when_everything_is_free() {
        let zero = Duration::ZERO;
        let model = LatencyModel {
            step_base: zero,
            per_prefill_token: zero,
            per_prefill_pair: zero,
            per_decode_sequence: zero,
            per_context_token: zero,
            transfer_setup: zero,
            per_received_token: zero,
            speed: 1e9,
        };
        assert_eq!(model.step(StepWork::default()), Duration::from_nanos(1));
        assert_eq!(model.transfer(0), Duration::from_nanos(1));
    }
}
