//! Weighted least squares with a few columns, which says what it can't tell. Called by [`super`]; pure arithmetic.
//!
//! Every row is divided by what was seen, so that short and long times count alike and a miss is a part of what was
//! seen. A column is left at the value that it came with when it is nearly a sum of others that matter more, or when
//! its estimate is less than nothing or no better than [`UNSURE`]; the others are then fitted beside it.

/// Constants that are fitted together.
pub(super) const COLUMNS: usize = 7;
/// A column is identified when this share of its length, at least, is not explained by the columns before it. The noise
/// of real servers makes anything of less.
const APART: f64 = 0.03;
/// A standard error beyond this part of the estimate says nothing.
const UNSURE: f64 = 0.25;
/// A row that misses by so many times what rows miss in the median is not what the formula is about: a
/// server that waited for something.
const OUTLIER: f64 = 6.0;
/// So often is it looked for those.
const ROUNDS: usize = 3;
/// But one that misses by less than this is none.
const CLOSE: f64 = 0.05;

/// One time that was seen, seconds, and how often each constant is in it.
#[derive(Clone, Copy, Debug)]
pub(super) struct FitRow {
    pub(super) times: [f64; COLUMNS],
    pub(super) seen: f64,
}

/// What became of a constant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Estimate {
    /// Fitted, with its standard error as a part of it.
    Fitted {
        /// Value of the constant, seconds.
        value: f64,
        /// 0..=[`UNSURE`].
        error: f64,
    },
    /// As it came, and why.
    Kept(Why),
}

/// Why a constant could not be fitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// Nothing that was seen has it.
    Absent,
    /// It rises and falls with others.
    Together,
    /// It makes less difference than the times scatter.
    Unsure,
}

/// Estimates of all columns, with their errors.
#[derive(Clone, Debug)]
pub(super) struct Solution {
    pub(super) estimates: [Estimate; COLUMNS],
    /// By how much each row is missed, as a part of what was seen, ascending.
    pub(super) misses: Vec<f64>,
    /// Rows that were left out.
    pub(super) outliers: usize,
}

/// Fits all columns but those in `fixed`. Columns that the rows don't identify keep their value in `before`. The order
/// of the columns is that in which they matter.
pub(super) fn solve(rows: &[FitRow], before: &[f64; COLUMNS], fixed: [bool; COLUMNS]) -> Solution {
    let scaled: Vec<FitRow> =
        rows.iter().map(|row| FitRow { times: row.times.map(|t| t / row.seen), seen: 1.0 }).collect();
    let mut near = scaled.clone();
    // What is far off pulls the first fit towards itself.
    for _ in 0..ROUNDS {
        let first = missed(&scaled, &values(&estimate(&near, before, fixed), before));
        let mut sorted = first.clone();
        sorted.sort_by(f64::total_cmp);
        let bound = (OUTLIER * quantile(&sorted, 0.5)).max(CLOSE);
        near = scaled.iter().zip(first).filter(|(_, miss)| *miss <= bound).map(|(row, _)| *row).collect();
    }
    let estimates = estimate(&near, before, fixed);
    let mut misses = missed(&near, &values(&estimates, before));
    misses.sort_by(f64::total_cmp);
    Solution { estimates, misses, outliers: scaled.len() - near.len() }
}

/// The value of each constant, fitted or as it came.
pub(super) fn values(estimates: &[Estimate; COLUMNS], before: &[f64; COLUMNS]) -> [f64; COLUMNS] {
    let mut values = *before;
    for (value, estimate) in values.iter_mut().zip(estimates) {
        if let Estimate::Fitted { value: fitted, .. } = estimate {
            *value = *fitted;
        }
    }
    values
}

/// Of an ascending list; 0 of an empty one.
pub(super) fn quantile(sorted: &[f64], q: f64) -> f64 {
    let at = (q * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(at).copied().unwrap_or(0.0)
}

fn dot(a: &[f64; COLUMNS], b: &[f64; COLUMNS]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn missed(rows: &[FitRow], values: &[f64; COLUMNS]) -> Vec<f64> {
    rows.iter().map(|row| (row.seen - dot(&row.times, values)).abs()).collect()
}

fn estimate(rows: &[FitRow], before: &[f64; COLUMNS], fixed: [bool; COLUMNS]) -> [Estimate; COLUMNS] {
    let mut kept: [Option<Why>; COLUMNS] = fixed.map(|fixed| fixed.then_some(Why::Unsure));
    loop {
        let fitted = least_squares(rows, before, &mut kept);
        // The one that says least is kept as it came; without it others may say more.
        let worst = fitted.iter().enumerate().filter(|(_, (value, error))| !(*value > 0.0 && *error <= UNSURE * value));
        let doubt = |(value, error): &(f64, f64)| if *value > 0.0 { error / value } else { f64::INFINITY };
        let worst = worst.filter(|(i, _)| kept.get(*i).is_some_and(Option::is_none));
        let worst = worst.max_by(|(_, a), (_, b)| doubt(a).total_cmp(&doubt(b))).map(|(i, _)| i);
        match worst.and_then(|i| kept.get_mut(i)) {
            Some(kept) => *kept = Some(Why::Unsure),
            None => {
                let mut estimates = [Estimate::Kept(Why::Absent); COLUMNS];
                for ((estimate, kept), (value, error)) in estimates.iter_mut().zip(kept).zip(fitted) {
                    let fitted = Estimate::Fitted { value, error: error / value };
                    *estimate = kept.map_or(fitted, Estimate::Kept);
                }
                return estimates;
            }
        }
    }
}

/// Value and standard error of every column that is not `kept`. Columns that can't be identified are `kept` afterwards.
#[expect(clippy::indexing_slicing, reason = "matrices of a fixed size")]
fn least_squares(rows: &[FitRow], before: &[f64; COLUMNS], kept: &mut [Option<Why>; COLUMNS]) -> [(f64, f64); COLUMNS] {
    let known = std::array::from_fn(|i| if kept[i].is_some() { before[i] } else { 0.0 });
    let (mut gram, mut right, mut square) = ([[0.0; COLUMNS]; COLUMNS], [0.0; COLUMNS], 0.0);
    for row in rows {
        let rest = row.seen - dot(&row.times, &known);
        square += rest * rest;
        for i in 0..COLUMNS {
            right[i] += row.times[i] * rest;
            for (sum, time) in gram[i].iter_mut().zip(row.times).take(i + 1) {
                *sum += row.times[i] * time;
            }
        }
    }
    let lengths: [f64; COLUMNS] = std::array::from_fn(|i| gram[i][i].sqrt());
    // Cholesky of the columns at length 1: a pivot is the part of a column that those before it do not explain.
    let mut lower = [[0.0; COLUMNS]; COLUMNS];
    for i in 0..COLUMNS {
        if kept[i].is_none() && lengths[i] == 0.0 {
            kept[i] = Some(Why::Absent);
        }
        if kept[i].is_some() {
            continue;
        }
        for j in (0..i).filter(|j| kept[*j].is_none()) {
            let before: f64 = (0..j).map(|k| lower[i][k] * lower[j][k]).sum();
            lower[i][j] = (gram[i][j] / (lengths[i] * lengths[j]) - before) / lower[j][j];
        }
        let pivot = 1.0 - lower[i].iter().map(|l| l * l).sum::<f64>();
        if pivot < APART * APART {
            kept[i] = Some(Why::Together);
            // What it has of each row is taken off first.
            return least_squares(rows, before, kept);
        }
        lower[i][i] = pivot.sqrt();
    }
    let free: Vec<usize> = (0..COLUMNS).filter(|i| kept[*i].is_none()).collect();
    let solve = |right: [f64; COLUMNS]| {
        let mut x = right;
        for &i in &free {
            x[i] = (x[i] - free.iter().filter(|j| **j < i).map(|&j| lower[i][j] * x[j]).sum::<f64>()) / lower[i][i];
        }
        for &i in free.iter().rev() {
            x[i] = (x[i] - free.iter().filter(|j| **j > i).map(|&j| lower[j][i] * x[j]).sum::<f64>()) / lower[i][i];
        }
        x
    };
    let scaled = solve(std::array::from_fn(|i| if kept[i].is_none() { right[i] / lengths[i] } else { 0.0 }));
    let explained: f64 = free.iter().map(|&i| scaled[i] * right[i] / lengths[i]).sum();
    let degrees = rows.len().saturating_sub(free.len()).max(1) as f64;
    let variance = (square - explained).max(0.0) / degrees;
    std::array::from_fn(|i| {
        if kept[i].is_some() {
            return (0.0, 0.0);
        }
        let unit = std::array::from_fn(|j| if i == j { 1.0 } else { 0.0 });
        (scaled[i] / lengths[i], (variance * solve(unit)[i]).sqrt() / lengths[i])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_types::rng::for_request;
    use rand::RngExt;

    /// Rows of a formula whose constants are `truth`, which scatter by `noise`; `of` makes the columns of draws.
    fn rows(truth: [f64; COLUMNS], noise: f64, of: impl Fn([f64; COLUMNS]) -> [f64; COLUMNS]) -> Vec<FitRow> {
        let mut rng = for_request(7, 0);
        let mut draw = || rng.random_range(0.0..1.0_f64);
        let mut row = || {
            let times = of(std::array::from_fn(|_| draw()));
            FitRow { times, seen: dot(&times, &truth) * (1.0 + noise * (draw() - 0.5)) }
        };
        (0..500).map(|_| row()).collect()
    }

    const TRUTH: [f64; COLUMNS] = [6.0, 2.0, 1.0, 0.5, 3.0, 1.5, 0.1];
    const BEFORE: [f64; COLUMNS] = [1.0; COLUMNS];

    fn fitted(estimate: Estimate) -> Option<f64> {
        if let Estimate::Fitted { value, .. } = estimate { Some(value) } else { None }
    }

    #[test]
    fn constants_that_vary_on_their_own_are_found_beside_rows_that_are_about_something_else() {
        let mut rows = rows(TRUTH, 0.02, |draws| draws.map(|draw| draw + 0.1));
        rows.iter_mut().step_by(25).for_each(|row| row.seen *= 9.0);
        let Solution { estimates, misses, outliers } = solve(&rows, &BEFORE, [false; COLUMNS]);
        assert_eq!((outliers, misses.len()), (20, 480));
        assert!(quantile(&misses, 1.0) <= 0.02 && quantile(&misses, 0.0) < quantile(&misses, 0.9));
        for (estimate, truth) in estimates.into_iter().zip(TRUTH).take(6) {
            let value = fitted(estimate).unwrap();
            assert!((value / truth - 1.0).abs() < 0.03, "{value} for {truth}");
        }
    }

    #[test]
    fn what_can_not_be_told_stays_and_says_why() {
        // The second rises with the first, the third is never there, the fourth makes no difference that could be seen.
        let of = |[a, _, _, d, e, f, g]: [f64; COLUMNS]| [a + 1.0, 2.0 * (a + 1.0), 0.0, 1e-4 * d, e, f, g];
        let rows = rows([6.0, 1.0, 1.0, 1.0, 3.0, 4.0, 2.0], 0.02, of);
        let estimates = solve(&rows, &BEFORE, [false; COLUMNS]).estimates;
        assert_eq!(
            estimates[1..4],
            [Why::Together, Why::Absent, Why::Unsure].map(Estimate::Kept),
            "the first matters more than the second"
        );
        // With the second as it came, 1, the first is what is left.
        for (i, truth) in [(0, 6.0), (4, 3.0), (5, 4.0), (6, 2.0)] {
            assert!((fitted(estimates[i]).unwrap() / truth - 1.0).abs() < 0.02, "{estimates:?}");
        }
    }

    #[test]
    fn what_is_fixed_is_not_fitted() {
        let mut fixed = [false; COLUMNS];
        fixed[4] = true;
        let rows = rows(TRUTH, 0.0, |draws| draws);
        let estimates = solve(&rows, &TRUTH, fixed).estimates;
        assert_eq!(fitted(estimates[4]), None);
        assert!((fitted(estimates[0]).unwrap() - 6.0).abs() < 1e-6, "{estimates:?}");
    }
}
