//! One policy against another on the same requests: how large is the difference, and can it be chance. Called by
//! [`super::json`]. Pure.
//!
//! Two runs of one workload see the same requests, so they are compared in pairs: batch `i` of the one with batch `i`
//! of the other, which hold the same requests, by `Workload::pair`: of an open loop by their numbers, of a closed one,
//! whose requests are numbered as they come, by their conversations. Where a limit cuts conversations off at other
//! turns, the last few differ. What makes a batch hard (a burst, long prompts) is hard for both and cancels out.
//!
//! The interval comes from a bootstrap over batches: draw as many batches as there are, with replacement, and take the
//! difference (and the ratio) of the means of what was drawn; the middle 95 % of many such draws is the interval. A
//! queue that is long stays long for a while, so neighbouring batches resemble each other, and drawing them one by one
//! would make the interval too narrow. Therefore runs of neighbours are drawn, of the length that suits the
//! autocorrelation that is found: the circular block bootstrap (Politis and Romano 1992) with the automatic length of
//! Politis and White, "Automatic block-length selection for the dependent bootstrap", Econometric Reviews 23 (2004), as
//! corrected by Patton, Politis and White (2009).
//!
//! On simulated autoregressive series of 300 to 1,000 batches, whose neighbours are correlated by up to 0.8, between
//! 90 % and 97 % of the intervals held the true difference: a little fewer than promised where the correlation is
//! strong. A test holds that.
//!
//! Requests that were rejected or lost have no times, and those that were answered then wait less. A run that leaves
//! more requests unanswered than the baseline is therefore not called better, however short its times: see
//! [`MeanChange::with_endings`].
//!
//! What an interval does not know: another trace, another seed of the workload, an error of the simulation. Of twenty
//! comparisons of policies that are equal, one shows a difference by chance.
//!
//! Percentiles have no interval. They can't be put together from means of batches, and sketches per batch would cost a
//! hundred times the memory for figures that are only read by their order.

use crate::tally::EndingCounts;
use crate::tally::batches::{Batches, Sum};
use attache_types::rng::{PickRng, for_request};
use rand::RngExt;
use serde::{Deserialize, Serialize};

/// Draws of the bootstrap: the ends of a 95 % interval then rest on 50 draws each, and move by less than
/// a tenth of its width.
pub const DEFAULT_RESAMPLES: usize = 2_000;
/// The part of the draws that an interval leaves out, both ends together: one in twenty is what most readers expect.
pub const DEFAULT_LEFT_OUT: f64 = 0.05;
/// With fewer batches than this no interval is given: it would be too narrow to be trusted.
pub const MIN_BATCHES: usize = 20;
/// The seed of the draws: equal runs are to give equal reports.
const SEED: u64 = 0xA77A_C4E5;

/// The quantity whose means are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantity {
    /// The mean time to the first token.
    FirstToken,
    /// The mean time per output token.
    PerToken,
    /// The mean time from coming to end.
    Total,
}

/// Conclusion of a comparison, for readers who look at no interval.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ComparisonVerdict {
    /// Shorter than the baseline, and not by chance.
    Better,
    /// Longer than the baseline, and not by chance.
    Worse,
    /// The difference can be chance, or there are too few requests to tell.
    NotShown,
    /// It leaves more requests unanswered than the baseline, and not by chance: its times say nothing for it.
    AnswersFewer,
    /// It leaves fewer requests unanswered than the baseline, and not by chance: longer times say nothing against it.
    AnswersMore,
}

impl ComparisonVerdict {
    /// The verdict in words, as tables and pages show it.
    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            ComparisonVerdict::Better => "better",
            ComparisonVerdict::Worse => "worse",
            ComparisonVerdict::NotShown => "no difference shown",
            ComparisonVerdict::AnswersFewer => "answers fewer",
            ComparisonVerdict::AnswersMore => "answers more",
        }
    }
}

/// The middle 95 % of what the draws gave.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Lower bound, in the unit of the quantity.
    pub low: f64,
    /// Upper bound, in the unit of the quantity.
    pub high: f64,
}

/// One mean against the baseline's, over the numbers of `Workload::pair` that both runs have.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeanChange {
    /// This run's mean by the baseline's; below 1 is better.
    pub ratio: f64,
    /// Where the ratio lies; `None` with fewer than [`MIN_BATCHES`] batches.
    pub ratio_interval: Option<Interval>,
    /// This run's mean less the baseline's, seconds; below 0 is better.
    pub difference_seconds: f64,
    /// Where the difference lies; `None` with fewer than [`MIN_BATCHES`] batches.
    pub difference_interval_seconds: Option<Interval>,
    /// Verdict that follows from the interval.
    pub verdict: ComparisonVerdict,
    /// Pairs of batches that the interval was computed from.
    pub batches: usize,
    /// Neighbouring batches that were drawn together.
    pub block: usize,
}

/// One pair of batches, or the sum of some: counts and sums, seconds.
#[derive(Clone, Copy, Default)]
struct Pair {
    count: f64,
    sum: f64,
    base_count: f64,
    base_sum: f64,
}

impl Pair {
    fn plus(self, other: Pair, times: f64) -> Pair {
        Pair {
            count: self.count + times * other.count,
            sum: self.sum + times * other.sum,
            base_count: self.base_count + times * other.base_count,
            base_sum: self.base_sum + times * other.base_sum,
        }
    }
}

/// Whether `count` requests are more than `other`, and not by chance: by two standard deviations of
/// the difference of such counts.
#[must_use]
pub fn is_more(count: u64, other: u64) -> bool {
    count > other && (count - other) as f64 > 2.0 * ((count + other) as f64).sqrt()
}

impl MeanChange {
    /// The same with what the endings of both runs say: shorter times of a run that answers fewer requests are not
    /// better, and longer ones of a run that answers more are not worse.
    #[must_use]
    pub fn with_endings(self, run: EndingCounts, baseline: EndingCounts) -> Self {
        let verdict = match self.verdict {
            ComparisonVerdict::Better | ComparisonVerdict::NotShown
                if is_more(run.unanswered(), baseline.unanswered()) =>
            {
                ComparisonVerdict::AnswersFewer
            }
            ComparisonVerdict::Worse | ComparisonVerdict::NotShown
                if is_more(baseline.unanswered(), run.unanswered()) =>
            {
                ComparisonVerdict::AnswersMore
            }
            verdict => verdict,
        };
        Self { verdict, ..self }
    }
}

/// Compares a run with the baseline; `None` when one of them has no such time in the requests that both have.
#[must_use]
pub fn compare(run: &Batches, baseline: &Batches, quantity: Quantity) -> Option<MeanChange> {
    compare_with(run, baseline, quantity, DEFAULT_RESAMPLES)
}

fn compare_with(run: &Batches, baseline: &Batches, quantity: Quantity, resamples: usize) -> Option<MeanChange> {
    let pairs = pairs(run, baseline, quantity);
    let (mean, base_mean) = means(pairs.iter().fold(Pair::default(), |all, pair| all.plus(*pair, 1.0)))?;
    let block = block_length(&influence(&pairs, mean, base_mean));
    let draws = (pairs.len() >= MIN_BATCHES).then(|| draw(&pairs, block, resamples));
    let difference_interval = draws.as_ref().and_then(|draws| middle(draws.iter().map(|(a, b)| a - b).collect()));
    let ratio_interval = draws.as_ref().and_then(|draws| middle(draws.iter().map(|(a, b)| a / b).collect()));
    let verdict = match difference_interval {
        Some(Interval { high, .. }) if high < 0.0 => ComparisonVerdict::Better,
        Some(Interval { low, .. }) if low > 0.0 => ComparisonVerdict::Worse,
        _ => ComparisonVerdict::NotShown,
    };
    Some(MeanChange {
        ratio: mean / base_mean,
        ratio_interval,
        difference_seconds: mean - base_mean,
        difference_interval_seconds: difference_interval,
        verdict,
        batches: pairs.len(),
        block,
    })
}

/// The batches of the same numbers, as wide as the wider ones of both.
fn pairs(run: &Batches, baseline: &Batches, quantity: Quantity) -> Vec<Pair> {
    let width = run.width().max(baseline.width());
    let of = |batches: &Batches| -> Vec<Sum> {
        let batches = batches.at_width(width);
        let sums = batches.batches().iter().map(|batch| match quantity {
            Quantity::FirstToken => batch.first_token,
            Quantity::PerToken => batch.per_token,
            Quantity::Total => batch.total,
        });
        sums.collect()
    };
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    let pair = |(run, base): (Sum, Sum)| Pair {
        count: run.count as f64,
        sum: seconds(run.nanos),
        base_count: base.count as f64,
        base_sum: seconds(base.nanos),
    };
    of(run).into_iter().zip(of(baseline)).map(pair).collect()
}

/// The means of both sides; `None` when one has no requests, or the baseline's is zero.
fn means(all: Pair) -> Option<(f64, f64)> {
    (all.count > 0.0 && all.base_count > 0.0 && all.base_sum > 0.0)
        .then(|| (all.sum / all.count, all.base_sum / all.base_count))
}

/// How much each pair moves the difference of the means: what the block length is chosen for.
fn influence(pairs: &[Pair], mean: f64, base_mean: f64) -> Vec<f64> {
    let n = pairs.len() as f64;
    let count = pairs.iter().map(|pair| pair.count).sum::<f64>() / n;
    let base_count = pairs.iter().map(|pair| pair.base_count).sum::<f64>() / n;
    let of = |pair: &Pair| {
        (pair.sum - mean * pair.count) / count - (pair.base_sum - base_mean * pair.base_count) / base_count
    };
    pairs.iter().map(of).collect()
}

/// Means of both sides in each draw of as many pairs as there are, in runs of `block` neighbours; the last
/// pair's neighbour is the first.
fn draw(pairs: &[Pair], block: usize, resamples: usize) -> Vec<(f64, f64)> {
    // Sums of the first pairs of a ring, so that a run costs two look-ups whatever its length.
    let ring = pairs.iter().chain(pairs);
    let sums: Vec<Pair> = std::iter::once(Pair::default())
        .chain(ring.scan(Pair::default(), |sum, pair| {
            *sum = sum.plus(*pair, 1.0);
            Some(*sum)
        }))
        .collect();
    let mut draws = Vec::with_capacity(resamples);
    for number in 0..resamples {
        let mut rng: PickRng = for_request(SEED, number as u64);
        let mut all = Pair::default();
        for drawn in (0..pairs.len()).step_by(block) {
            let start = rng.random_range(0..pairs.len());
            let end = start + block.min(pairs.len() - drawn);
            if let (Some(before), Some(until)) = (sums.get(start), sums.get(end)) {
                all = all.plus(*until, 1.0).plus(*before, -1.0);
            }
        }
        draws.extend(means(all));
    }
    draws
}

/// The interval that leaves out [`DEFAULT_LEFT_OUT`] of the draws, half at each end.
fn middle(mut draws: Vec<f64>) -> Option<Interval> {
    draws.retain(|draw| draw.is_finite());
    draws.sort_by(f64::total_cmp);
    let last = draws.len().checked_sub(1)? as f64;
    let at = |q: f64| draws.get((q * last).round() as usize).copied();
    Some(Interval { low: at(DEFAULT_LEFT_OUT / 2.0)?, high: at(1.0 - DEFAULT_LEFT_OUT / 2.0)? })
}

/// How many neighbours to draw together, by Politis and White's rule for the circular block
/// bootstrap: 1 for independent values.
fn block_length(values: &[f64]) -> usize {
    let n = values.len() as f64;
    let most = (3.0 * n.sqrt()).min(n / 3.0).ceil().max(1.0);
    let mean = values.iter().sum::<f64>() / n;
    let values: Vec<f64> = values.iter().map(|value| value - mean).collect();
    let variance = autocovariance(&values, 0);
    if variance <= 0.0 {
        return 1;
    }
    // After this many lags in a row without a visible correlation there is none (5 or more, and "visible"
    // twice the noise: the paper's).
    let quiet = n.log10().ceil().max(5.0) as usize;
    let visible = 2.0 * (n.log10() / n).sqrt();
    let furthest = n.sqrt().ceil() as usize + quiet;
    let covariances: Vec<f64> = (0..=furthest.min(values.len() - 1)).map(|lag| autocovariance(&values, lag)).collect();
    let small = |lag: usize| covariances.get(lag).is_none_or(|c| (c / variance).abs() < visible);
    let significant = (0..furthest).find(|m| (1..=quiet).all(|k| small(m + k))).unwrap_or(furthest);
    let window = (2 * significant.max(1)).min(furthest);
    let (mut long_run, mut slope) = (variance, 0.0);
    for (lag, covariance) in covariances.iter().enumerate().take(window + 1).skip(1) {
        let weight = (2.0 * (1.0 - lag as f64 / window as f64)).min(1.0);
        long_run += 2.0 * weight * covariance;
        slope += 2.0 * weight * lag as f64 * covariance;
    }
    if long_run.abs() <= f64::EPSILON * variance {
        return most as usize;
    }
    let length = (2.0 * slope * slope / (4.0 / 3.0 * long_run * long_run) * n).cbrt();
    length.round().clamp(1.0, most) as usize
}

/// Of values whose mean is zero.
fn autocovariance(values: &[f64], lag: usize) -> f64 {
    values.iter().zip(values.iter().skip(lag)).map(|(a, b)| a * b).sum::<f64>() / values.len() as f64
}

#[cfg(test)]
mod tests;
