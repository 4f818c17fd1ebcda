//! The scorers of the pipeline, one file each (`context-length-aware`, a filter as well, stands with the filters). A score lies in 0..=1 and
//! more is better; a scorer sees all candidates at once.

pub mod active_request;
pub mod endpoint_attribute;
pub mod header_label_affinity;
pub mod kv_cache;
pub mod latency;
pub mod load_aware;
pub mod lora_affinity;
pub mod no_hit_lru;
pub mod precise_prefix_cache;
pub mod prefix_cache;
pub mod queue;
pub mod running_requests;
pub mod session_affinity;
pub mod token_load;
pub mod topology_affinity;

use crate::scheduling::{Candidate, Signal};

/// What a scorer of reported figures lacks when nobody has a fresh page.
fn no_metrics(candidates: &[Candidate<'_>]) -> Option<Signal> {
    candidates.iter().all(|c| c.metrics.is_none()).then_some(Signal::Metrics)
}

/// Scores `(max − value) / (max − min)`: 1 for the least value, 0 for the greatest, 1 for all when they are equal.
fn fewer_is_better(values: &[f32], out: &mut [f32]) {
    let min = values.iter().copied().fold(f32::INFINITY, f32::min);
    let max = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for (score, value) in out.iter_mut().zip(values) {
        *score = if max > min { (max - value) / (max - min) } else { 1.0 };
    }
}

#[cfg(test)]
mod tests;
