//! The scorers of the pipeline, one file each (`context-length-aware`, a filter as well, is with the filters). A
//! score is in 0..=1 and higher is better; a scorer sees all candidates at once.

pub mod active_request;
pub mod endpoint_attribute;
pub mod header_label_affinity;
pub mod kv_cache;
pub mod latency;
pub mod lmetric;
pub mod load_aware;
pub mod lora_affinity;
pub mod mm_embeddings_cache;
pub mod no_hit_lru;
pub mod precise_prefix_cache;
pub mod prefix_cache;
pub mod queue;
pub mod running_requests;
pub mod session_affinity;
pub mod token_load;
pub mod topology_affinity;

use attache_scheduling::{Candidate, Signal};

/// The missing signal of a scorer of metrics if no endpoint has fresh ones.
fn no_metrics(candidates: &[Candidate<'_>]) -> Option<Signal> {
    candidates.iter().all(|c| !c.is_fresh).then_some(Signal::Metrics)
}

/// Scores `(max − count) / (max − min)`: 1 for the least count, 0 for the greatest, 1 for all when they are equal.
fn fewer_is_better(candidates: &[Candidate<'_>], count: impl Fn(&Candidate<'_>) -> u32, out: &mut [f32]) {
    let (mut min, mut max) = (u32::MAX, 0);
    for (score, candidate) in out.iter_mut().zip(candidates) {
        let count = count(candidate);
        (min, max) = (min.min(count), max.max(count));
        *score = count as f32;
    }
    let (min, max) = (min as f32, max as f32);
    if max > min {
        out.iter_mut().for_each(|score| *score = (max - *score) / (max - min));
    } else {
        out.fill(1.0);
    }
}

#[cfg(test)]
mod tests;
