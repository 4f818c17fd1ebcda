//! How evenly load is spread over the endpoints. Called by [`super::Tally`]. Pure.

/// Unevenness of load in three figures. No single figure separates one hot endpoint from general unevenness.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LoadSpread {
    /// Largest load by mean load: 1 if all are equal, the number of endpoints if one has all load.
    pub max_over_mean: f64,
    /// Standard deviation (of the population) by mean: 0 if all are equal.
    pub variation: f64,
    /// [`jain`] of the loads.
    pub jain: f64,
}

/// Jain's index, `(sum x)^2 / (n * sum x^2)`: 1 when even, `1/n` when one has it all; `None` without positive values.
/// Jain, Chiu, Hawe, "A Quantitative Measure of Fairness", DEC-TR-301, 1984.
#[must_use]
pub fn jain(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let sums = |(n, sum, squares), value: f64| (n + 1.0, sum + value, squares + value * value);
    let (n, sum, squares): (f64, f64, f64) = values.into_iter().fold((0.0, 0.0, 0.0), sums);
    (sum > 0.0).then(|| sum * sum / (n * squares))
}

impl LoadSpread {
    /// The spread of `loads`, one for each endpoint, idle ones included. `None` if all are 0.
    #[must_use]
    pub fn of(loads: impl IntoIterator<Item = u64>) -> Option<Self> {
        let (mut n, mut sum, mut squares, mut max) = (0.0, 0.0, 0.0, 0.0_f64);
        for load in loads {
            let load = load as f64;
            n += 1.0;
            sum += load;
            squares += load * load;
            max = max.max(load);
        }
        if sum <= 0.0 {
            return None;
        }
        let mean = sum / n;
        Some(Self {
            max_over_mean: max / mean,
            variation: (squares / n - mean * mean).max(0.0).sqrt() / mean,
            jain: sum * sum / (n * squares),
        })
    }
}
