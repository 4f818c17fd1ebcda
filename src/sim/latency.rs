//! How long a step of a simulated engine takes. Called by `sim::engine`; pure arithmetic.
//!
//! A step takes a base and, on top of it, the longer one of two: what the card computes, and what it reads
//! from memory. Kernels overlap them.
//!
//! ```text
//! t        = base + max(compute, memory)
//! compute  = prompt tokens · c_prefill + pairs · c_pair + sequences that decode · c_decode
//! memory   = weights + tokens in the cache that those sequences read · c_context
//! ```
//!
//! So a batch that only decodes is bound by memory: the weights are read once for all of it, and each sequence adds its
//! context. A step with a long part of a prompt is bound by compute, and what decodes beside it is read meanwhile.
//!
//! # Where the constants come from
//!
//! An H100 SXM reads 3.35 TB/s and computes 989 TFLOP/s in bf16 (NVIDIA's data sheet). Of the bandwidth 80 % is assumed
//! for weights and for keys and values. With the base, a lone request of an 8B model then has 68 % of it. Published
//! curves that this was held against:
//!
//! | what | published | formula |
//! |---|---|---|
//! | Llama 3.1 8B, A100 40 GB (1.56 TB/s), vLLM 0.23, one request | 13.3 ms a token, 77 % of the bandwidth (johnmusgrave.com/p/vllm-throughput-latency-sweep-on) | 13.9 ms |
//! | Llama 3.1 8B, one H100, vLLM 0.8.4, fit to measured runs | 5.8 ms a step and 6 us a sequence (inference-sim, `defaults.yaml`) | 7.0 ms, 6 us where a sequence has 120 tokens |
//! | Llama 3.1 8B, one H200 (4.8 TB/s), vLLM of 2024, batch of 8 | 6.5 ms a step (vLLM's performance benchmark, build 9515) | 5.2 ms |
//! | Qwen3-32B, two H100, 15 to 35 sequences of 8,200 tokens | 20 to 30 ms a token (llm-d's "KV-cache wins you can see") | 21.2 to 29.3 ms |
//!
//! The older vLLM has more overhead on the host. Its steps set the upper end of what a base may be, 2.3 ms.

use std::time::Duration;

/// 1 ms: launch, scheduling and sampling of an engine that runs CUDA graphs (assumption).
pub const DEFAULT_STEP_BASE: Duration = Duration::from_millis(1);
/// 6 ms: the 16.06 GB of weights of an 8B model in bf16 at 80 % of an H100's 3.35 TB/s.
pub const DEFAULT_WEIGHT_READ: Duration = Duration::from_millis(6);
/// 40 us: 16 GFLOP a token at 40 % of an H100's 989 TFLOP/s, i.e. 25,000 prompt tokens a second.
pub const DEFAULT_PER_PREFILL_TOKEN: Duration = Duration::from_micros(40);
/// 40 us: one token costs the card as much to compute as one of a prompt. Up to 150 sequences the reading
/// of the weights hides it.
pub const DEFAULT_PER_DECODE_SEQUENCE: Duration = DEFAULT_PER_PREFILL_TOKEN;
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
    /// Prompt tokens that the step computes.
    pub prefill_tokens: u64,
    /// Pairs (prompt token computed, earlier token it looks at).
    pub prefill_pairs: u64,
    /// Sequences that get one more token.
    pub decode_sequences: u64,
    /// Tokens in the cache that those sequences read.
    pub context_tokens: u64,
}

/// Costs of a step and of a transfer; the module page has the formula of a step, `sim`'s that of a transfer.
#[derive(Clone, Debug, PartialEq)]
pub struct LatencyModel {
    /// Cost of any step, beside what it computes and reads.
    pub step_base: Duration,
    /// Reading the weights: once a step, while the step computes.
    pub weight_read: Duration,
    /// Computing a prompt token (cached ones cost nothing).
    pub per_prefill_token: Duration,
    /// Computing a pair of tokens in the attention of a prefill.
    pub per_prefill_pair: Duration,
    /// Computing the token of a sequence that decodes.
    pub per_decode_sequence: Duration,
    /// Reading a cached token of a sequence that decodes.
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
            weight_read: DEFAULT_WEIGHT_READ,
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
pub(crate) struct StepCosts {
    base: u64,
    weights: u64,
    prefill_token: u64,
    prefill_pair: u64,
    decode_sequence: u64,
    context_token: u64,
    transfer: u64,
    received_token: u64,
    speed: f64,
}

impl StepCosts {
    pub(crate) fn of(model: &LatencyModel) -> Self {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Self {
            base: nanos(model.step_base),
            weights: nanos(model.weight_read),
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
    pub(crate) fn step(&self, work: StepWork) -> Duration {
        // Whole nanoseconds until the division: the sum is the same on every machine.
        let compute = self
            .prefill_token
            .saturating_mul(work.prefill_tokens)
            .saturating_add(self.prefill_pair.saturating_mul(work.prefill_pairs))
            .saturating_add(self.decode_sequence.saturating_mul(work.decode_sequences));
        let memory = self.weights.saturating_add(self.context_token.saturating_mul(work.context_tokens));
        self.scaled(self.base.saturating_add(compute.max(memory)))
    }

    /// [`LatencyModel::transfer`].
    pub(crate) fn transfer(&self, tokens: u32) -> Duration {
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
    fn a_step_takes_its_base_and_the_longer_of_compute_and_memory() {
        let mut model = LatencyModel::default();
        assert_eq!(model.step(StepWork::default()), Duration::from_millis(7), "an empty step reads the weights");
        let work =
            StepWork { prefill_tokens: 1000, prefill_pairs: 500_000, decode_sequences: 10, context_tokens: 10_000 };
        // 6.49 ms of reading are hidden behind the prompt.
        assert_eq!(model.step(work), Duration::from_nanos(1_000_000 + 40_000_000 + 500_000 + 400_000));
        let decoding = StepWork { prefill_tokens: 0, prefill_pairs: 0, ..work };
        // 0.4 ms of computing are hidden behind the reading.
        assert_eq!(model.step(decoding), Duration::from_nanos(1_000_000 + 6_000_000 + 490_000));
        let many = StepWork { decode_sequences: 256, context_tokens: 25_600, ..StepWork::default() };
        assert_eq!(model.step(many), Duration::from_nanos(1_000_000 + 10_240_000), "a large batch is bound by compute");
        model.speed = 100.0;
        assert_eq!(model.step(work), Duration::from_nanos(419_000));
        assert_eq!(model.transfer(1_000), Duration::from_nanos((1_000_000 + 3_277_000) / 100));
    }

    #[test]
    fn time_moves_even_when_everything_is_free() {
        let zero = Duration::ZERO;
        let model = LatencyModel {
            step_base: zero,
            weight_read: zero,
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
