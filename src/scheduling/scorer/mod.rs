//! The scorers of the pipeline, one file each. A score lies in 0..=1 and more is better; a scorer sees all candidates at once.

pub mod kv_cache;
pub mod lora_affinity;
pub mod prefix_cache;
pub mod queue;

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
