//! Distribution of response lengths by prompt length, from a pool's recent responses.
//!
//! Lengths are counted by their logarithm, so a small table holds all of them. Source: AIBrix's output predictor, which
//! keeps the same table for each model over a moving window and draws a random length for each query. Here it is the
//! mean, so that all predictions for a request use the same length.

use super::PoolSpeed;
use attache_types::clock::Timestamp;

/// Buckets of prompt lengths from 1 to 2^20 tokens.
const PROMPTS: usize = 21;
/// Buckets of response lengths from 1 to 4,096 tokens, AIBrix's limit; longer ones count as the last.
const ANSWERS: usize = 13;
/// Half-life of a response, 120 s: long enough for a few responses of each length, short enough
/// to follow a day's traffic.
const HALF_LIFE: f64 = 120.0;
/// Smallest weight with a result, a tenth of a response.
const LEAST: f32 = 0.1;

/// Weighted number of responses by length of prompt and response.
#[derive(Debug)]
pub(super) struct Lengths {
    counts: [[f32; ANSWERS]; PROMPTS],
    at: Timestamp,
}

impl Default for Lengths {
    fn default() -> Self {
        Self { counts: [[0.0; ANSWERS]; PROMPTS], at: Timestamp::default() }
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0 to 64")]
fn bucket(tokens: u64, most: usize) -> usize {
    ((tokens.max(1) as f64).log2().round() as usize).min(most - 1)
}

impl Lengths {
    /// Adds a response of this many tokens to such a prompt.
    #[expect(clippy::cast_possible_truncation, reason = "0 to 1")]
    pub(super) fn ended(&mut self, prompt: u32, answer: u64, now: Timestamp) {
        let keep = (-now.since(self.at).as_secs_f64() / HALF_LIFE).exp2() as f32;
        self.at = self.at.max(now);
        self.counts.iter_mut().flatten().for_each(|count| *count *= keep);
        let row = self.counts.get_mut(bucket(u64::from(prompt), PROMPTS));
        if let Some(count) = row.and_then(|row| row.get_mut(bucket(answer, ANSWERS))) {
            *count += 1.0;
        }
    }

    /// Returns the geometric mean of the response lengths for such prompts, in tokens; 1
    /// without observations, as in AIBrix.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "1 to 4,096")]
    pub(super) fn expected(&self, prompt: u32) -> u32 {
        let Some(row) = self.counts.get(bucket(u64::from(prompt), PROMPTS)) else { return 1 };
        let all: f32 = row.iter().sum();
        if all < LEAST {
            return 1;
        }
        let mean =
            row.iter().enumerate().map(|(at, count)| at as f64 * f64::from(*count)).sum::<f64>() / f64::from(all);
        mean.exp2().round() as u32
    }
}

impl PoolSpeed {
    /// Returns the expected response length for a prompt of this many tokens; 1 without observations.
    #[must_use]
    pub fn expected_answer(&self, prompt_tokens: u32) -> u32 {
        self.lengths.lock().expected(prompt_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expected_length_is_that_of_similar_prompts() {
        let mut lengths = Lengths::default();
        assert_eq!(lengths.expected(2_048), 1, "no response was observed");
        let at = |s: u64| Timestamp(s * 1_000_000_000);
        for _ in 0..10 {
            lengths.ended(2_048, 512, at(1));
            lengths.ended(128, 16, at(1));
        }
        assert_eq!([lengths.expected(2_048), lengths.expected(1_900), lengths.expected(128)], [512, 512, 16]);
        assert_eq!(lengths.expected(16_384), 1, "no such prompt was observed");
        lengths.ended(0, 1_000_000, at(1));
        assert_eq!(lengths.expected(1), 4_096, "the longest bucket");
    }

    #[test]
    fn old_responses_are_forgotten() {
        let mut lengths = Lengths::default();
        let at = |s: u64| Timestamp(s * 1_000_000_000);
        (0..10).for_each(|_| lengths.ended(1_024, 16, at(1)));
        (0..10).for_each(|_| lengths.ended(1_024, 1_024, at(1_000)));
        assert!(lengths.expected(1_024) > 900, "{}", lengths.expected(1_024));
    }
}
