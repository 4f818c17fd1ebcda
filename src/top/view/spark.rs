//! Histories as lines of blocks.

use crate::watch::History;

/// From the smallest to the largest value.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// The history in at most `columns` columns, oldest first. The highest block is `largest`, or the largest value.
pub(super) fn line(history: &History, columns: usize, largest: Option<f64>) -> String {
    blocks(&history.resampled(columns), largest)
}

/// One block for each value.
pub(super) fn blocks(values: &[f64], largest: Option<f64>) -> String {
    let largest = largest.unwrap_or_else(|| values.iter().copied().fold(0.0, f64::max));
    let level = |value: &f64| {
        let part = if largest > 0.0 { (value / largest).clamp(0.0, 1.0) } else { 0.0 };
        LEVELS[((part * (LEVELS.len() - 1) as f64).round() as usize).min(LEVELS.len() - 1)]
    };
    values.iter().map(level).collect()
}
