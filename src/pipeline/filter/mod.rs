//! The filters of the pipeline, one file each. A filter receives the candidates that earlier filters kept and decides
//! which of them stay.

pub mod concurrency_detector;
pub mod context_length_aware;
pub mod endpoint_attribute;
pub mod header_based_testing;
pub mod label_selector;
pub mod prefix_cache_affinity;
pub mod role;
pub mod session_affinity;
pub mod slo_headroom_tier;
pub mod topology_affinity;
pub mod utilization;
pub mod utilization_detector;

use attache_types::rng::PickRng;
use rand::RngExt;

/// Keeps the candidates that `stays` accepts, or all if it accepts none.
fn keep_or_all(keep: &mut [bool], stays: impl Fn(usize) -> bool) {
    if (0..keep.len()).any(&stays) {
        keep.iter_mut().enumerate().for_each(|(i, keep)| *keep = stays(i));
    }
}

/// True with this probability; uses no random number if it is 0.
fn happens(probability: f64, rng: &mut PickRng) -> bool {
    probability > 0.0 && rng.random::<f64>() < probability
}

#[cfg(test)]
mod tests;
