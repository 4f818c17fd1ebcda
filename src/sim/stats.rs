//! What a simulated engine counts. Called by `sim::engine` (writes) and by the pages that show it (read). Pure.

use std::time::Duration;

/// Buckets of the time to first token, seconds: vLLM's.
pub const TTFT_BUCKETS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
];
/// Buckets of the time between tokens, seconds: vLLM's.
pub const INTER_TOKEN_BUCKETS: &[f64] =
    &[0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
/// Buckets of times of whole requests, seconds: vLLM's.
pub const REQUEST_BUCKETS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
];
/// Buckets of token counts: vLLM's 1-2-5 series.
pub const TOKEN_BUCKETS: &[f64] =
    &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5];
/// Buckets of the time of a transfer between servers, seconds: vLLM's for NIXL.
pub const TRANSFER_BUCKETS: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0];

/// Observations by upper bound.
#[derive(Clone, Debug)]
pub struct Histogram {
    bounds: &'static [f64],
    /// One more than bounds: the last holds what exceeds them all.
    counts: Vec<u64>,
    sum: f64,
}

impl Histogram {
    /// An empty one with these upper bounds, ascending.
    #[must_use]
    pub fn new(bounds: &'static [f64]) -> Self {
        Self { bounds, counts: vec![0; bounds.len() + 1], sum: 0.0 }
    }

    /// Counts one value.
    pub fn observe(&mut self, value: f64) {
        self.observe_all(value, 1);
    }

    /// Counts one value `times` times.
    #[expect(clippy::cast_precision_loss, reason = "below 2^52 tokens in a step")]
    pub fn observe_all(&mut self, value: f64, times: u64) {
        let slot = self.bounds.partition_point(|bound| *bound < value);
        if let Some(count) = self.counts.get_mut(slot) {
            *count += times;
        }
        self.sum += value * times as f64;
    }

    /// Counts one duration, in seconds.
    pub fn observe_time(&mut self, time: Duration) {
        self.observe(time.as_secs_f64());
    }

    /// `(upper bound, observations up to it)`, ascending, without the infinite one.
    pub fn cumulative(&self) -> impl Iterator<Item = (f64, u64)> {
        self.bounds.iter().zip(&self.counts).scan(0, |total, (bound, count)| {
            *total += count;
            Some((*bound, *total))
        })
    }

    /// All observations.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Sum of all values.
    #[must_use]
    pub fn sum(&self) -> f64 {
        self.sum
    }
}

/// Totals since the start.
#[derive(Clone, Debug)]
pub struct EngineStats {
    /// Jobs that were taken in.
    pub submitted: u64,
    /// Jobs refused because the queue was full.
    pub rejected_queue_full: u64,
    /// Jobs that ended because the model was done.
    pub finished_stop: u64,
    /// Jobs that ended at their token limit.
    pub finished_length: u64,
    /// Jobs that were cancelled.
    pub aborted: u64,
    /// Times that a running job had to give up its blocks.
    pub preemptions: u64,
    /// Prompt tokens of jobs whose prefill is through, cached ones included.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub generation_tokens: u64,
    /// Prompt tokens looked up in the prefix cache.
    pub prefix_queries: u64,
    /// Prompt tokens found there.
    pub prefix_hits: u64,
    /// Prompt tokens that came from other servers.
    pub received_tokens: u64,
    /// Jobs that have ended and whose blocks nobody fetched in time.
    pub leases_expired: u64,
    /// Steps taken.
    pub steps: u64,
    /// Arrival to first token.
    pub ttft: Histogram,
    /// Token to token.
    pub inter_token: Histogram,
    /// Arrival to end.
    pub e2e: Histogram,
    /// Arrival to the first step.
    pub queue: Histogram,
    /// First step to first token.
    pub prefill: Histogram,
    /// First token to end.
    pub decode: Histogram,
    /// First step to end.
    pub inference: Histogram,
    /// Transfers from other servers, each when it began.
    pub transfer: Histogram,
    /// Prompt tokens a finished job.
    pub request_prompt_tokens: Histogram,
    /// Tokens generated a finished job.
    pub request_generation_tokens: Histogram,
}

impl Default for EngineStats {
    fn default() -> Self {
        Self {
            submitted: 0,
            rejected_queue_full: 0,
            finished_stop: 0,
            finished_length: 0,
            aborted: 0,
            preemptions: 0,
            prompt_tokens: 0,
            generation_tokens: 0,
            prefix_queries: 0,
            prefix_hits: 0,
            received_tokens: 0,
            leases_expired: 0,
            steps: 0,
            ttft: Histogram::new(TTFT_BUCKETS),
            inter_token: Histogram::new(INTER_TOKEN_BUCKETS),
            e2e: Histogram::new(REQUEST_BUCKETS),
            queue: Histogram::new(REQUEST_BUCKETS),
            prefill: Histogram::new(REQUEST_BUCKETS),
            decode: Histogram::new(REQUEST_BUCKETS),
            inference: Histogram::new(REQUEST_BUCKETS),
            transfer: Histogram::new(TRANSFER_BUCKETS),
            request_prompt_tokens: Histogram::new(TOKEN_BUCKETS),
            request_generation_tokens: Histogram::new(TOKEN_BUCKETS),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        let mut histogram = Histogram::new(&[1.0, 2.0]);
        for value in [0.5, 1.0, 1.5, 2.0, 3.0] {
            histogram.observe(value);
        }
        assert_eq!(histogram.cumulative().collect::<Vec<_>>(), vec![(1.0, 2), (2.0, 4)]);
        assert_eq!((histogram.count(), histogram.sum()), (5, 8.0));
    }
}
