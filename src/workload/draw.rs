//! Random variables: the gaps, lengths and popularities of workloads.
//!
//! Called by `replay::pace` and `replay::synthetic`. Pure: the generator is an argument.

use attache_types::rng::PickRng;
use rand::RngExt;

/// A number from 0 to 1, 1 left out.
pub fn unit(rng: &mut PickRng) -> f64 {
    rng.random::<f64>()
}

/// A number of the normal distribution with mean 0 and deviation 1 (Box and Muller).
pub fn normal(rng: &mut PickRng) -> f64 {
    // 1 - u is never 0, so the logarithm is finite.
    (-2.0 * (1.0 - unit(rng)).ln()).sqrt() * (std::f64::consts::TAU * unit(rng)).cos()
}

/// A number of the gamma distribution with this shape (above 0) and scale 1 (Marsaglia and Tsang, 2000).
pub fn gamma(rng: &mut PickRng, shape: f64) -> f64 {
    if shape < 1.0 {
        return gamma(rng, shape + 1.0) * (1.0 - unit(rng)).powf(1.0 / shape);
    }
    let d = shape - 1.0 / 3.0;
    let c = 1.0 / (9.0 * d).sqrt();
    loop {
        let x = normal(rng);
        let v = (1.0 + c * x).powi(3);
        if v > 0.0 && (1.0 - unit(rng)).ln() < 0.5 * x * x + d - d * v + d * v.ln() {
            return d * v;
        }
    }
}

/// A gap with mean 1 whose deviation is `cv` times its mean: 0 is a metronome, 1 the gaps of a Poisson
/// process, more comes in bursts.
pub fn gap(rng: &mut PickRng, cv: f64) -> f64 {
    if cv <= 0.0 {
        1.0
    } else if (cv - 1.0).abs() < f64::EPSILON {
        -(1.0 - unit(rng)).ln()
    } else {
        let shape = 1.0 / (cv * cv);
        gamma(rng, shape) / shape
    }
}

/// Popularity that falls with the rank: rank r is asked for with weight 1 / (r + 1)^s.
#[derive(Clone, Debug)]
pub struct Zipf {
    /// Sum of the weights up to each rank.
    sums: Vec<f64>,
}

impl Zipf {
    /// Of `ranks` things (at least 1); with `exponent` 0 all are equally popular.
    #[must_use]
    pub fn new(ranks: u32, exponent: f64) -> Self {
        let mut sum = 0.0;
        let weight = |rank: u32| f64::from(rank).powf(-exponent);
        Self { sums: (1..=ranks.max(1)).map(|rank| (sum += weight(rank), sum).1).collect() }
    }

    /// Draws a rank, from 0 for the most frequent.
    pub fn draw(&self, rng: &mut PickRng) -> usize {
        let at = unit(rng) * self.sums.last().copied().unwrap_or(0.0);
        self.sums.partition_point(|sum| *sum <= at).min(self.sums.len().saturating_sub(1))
    }
}

/// How a length or a pause is spread.
///
/// Spelled `300` (always), `10..1000` (every value as likely), `10..1000~300~150` (lognormal with mean 300 and
/// deviation 150, cut to 10..=1000; without the deviation it is the mean), `normal:10..1000~300~150`. The cut would
/// move the mean; the middle of the distribution is placed so that what is drawn has the mean that is written.
#[derive(Clone, Debug, PartialEq)]
pub struct Spread {
    low: f64,
    high: f64,
    shape: DistributionShape,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum DistributionShape {
    /// All values between the bounds are equally likely.
    Uniform,
    /// `middle + deviation × z`.
    Normal { middle: f64, deviation: f64 },
    /// e to the power of that.
    LogNormal { middle: f64, deviation: f64 },
}

/// What [`Spread::parse`] reads.
pub const SPREAD_SPELLING: &str = "300, 10..1000, 10..1000~300~150 or normal:10..1000~300~150 are spellings";

/// Steps of the integral in [`Spread`]'s placing, and their length in deviations: ±8 deviations hold all
/// that a million draws show.
const STEPS: i32 = 400;
const STEP: f64 = 16.0 / STEPS as f64;

impl Spread {
    /// A distribution with a single value.
    #[must_use]
    pub fn always(value: f64) -> Self {
        Self { low: value, high: value, shape: DistributionShape::Uniform }
    }

    /// Reads a spelling; `None` when it is none, or when the mean does not lie between the ends.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (is_normal, text) = match text.strip_prefix("normal:") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let number = |text: &str| text.parse::<f64>().ok().filter(|n| n.is_finite() && *n >= 0.0);
        let Some((low, rest)) = text.split_once("..") else {
            return number(text).filter(|_| !is_normal).map(Self::always);
        };
        let mut rest = rest.split('~');
        let (low, high) = (number(low)?, number(rest.next()?)?);
        let mean = rest.next().map(number);
        let deviation = rest.next().map(number);
        if rest.next().is_some() || low > high {
            return None;
        }
        match mean {
            None if is_normal => None,
            None => Some(Self { low, high, shape: DistributionShape::Uniform }),
            Some(mean) => {
                let mean = mean.filter(|mean| low < *mean && *mean < high)?;
                let deviation = deviation.unwrap_or(Some(mean)).filter(|deviation| *deviation > 0.0)?;
                Some(Self::placed(low, high, mean, deviation, is_normal))
            }
        }
    }

    /// The least and the greatest value.
    #[must_use]
    pub fn ends(&self) -> (f64, f64) {
        (self.low, self.high)
    }

    /// Draws a value, within the bounds.
    pub fn draw(&self, rng: &mut PickRng) -> f64 {
        if self.low >= self.high {
            return self.low;
        }
        match self.shape {
            DistributionShape::Uniform => self.low + (self.high - self.low) * unit(rng),
            DistributionShape::Normal { .. } | DistributionShape::LogNormal { .. } => self.at(normal(rng)),
        }
    }

    /// A whole value, at least `least`.
    pub fn draw_whole(&self, rng: &mut PickRng, least: u32) -> u32 {
        // Casts of floats saturate.
        (self.draw(rng).round() as u32).max(least)
    }

    /// The value that stands `z` deviations from the middle.
    fn at(&self, z: f64) -> f64 {
        match self.shape {
            DistributionShape::Uniform => f64::midpoint(self.low, self.high),
            DistributionShape::Normal { middle, deviation } => (middle + deviation * z).clamp(self.low, self.high),
            DistributionShape::LogNormal { middle, deviation } => {
                (middle + deviation * z).exp().clamp(self.low, self.high)
            }
        }
    }

    fn placed(low: f64, high: f64, mean: f64, deviation: f64, is_normal: bool) -> Self {
        let spread = |middle: f64, deviation: f64| {
            let shape = if is_normal {
                DistributionShape::Normal { middle, deviation }
            } else {
                DistributionShape::LogNormal { middle, deviation }
            };
            Self { low, high, shape }
        };
        let (deviation, ends) = if is_normal {
            (deviation, (low, high))
        } else {
            let deviation = (1.0 + (deviation / mean).powi(2)).ln().sqrt();
            (deviation, (low.max(f64::MIN_POSITIVE).ln(), high.ln()))
        };
        let (mut left, mut right) = (ends.0 - 8.0 * deviation, ends.1 + 8.0 * deviation);
        for _ in 0..100 {
            let middle = f64::midpoint(left, right);
            if spread(middle, deviation).mean_by_integral() < mean {
                left = middle;
            } else {
                right = middle;
            }
        }
        spread(f64::midpoint(left, right), deviation)
    }

    fn mean_by_integral(&self) -> f64 {
        let (mut sum, mut weights) = (0.0, 0.0);
        for i in -STEPS / 2..=STEPS / 2 {
            let z = f64::from(i) * STEP;
            let weight = (-0.5 * z * z).exp();
            sum += weight * self.at(z);
            weights += weight;
        }
        sum / weights
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_types::rng::for_request;
    use proptest::prelude::*;

    fn moments(mut draw: impl FnMut(&mut PickRng) -> f64) -> (f64, f64) {
        let mut rng = for_request(1, 2);
        let all: Vec<f64> = (0..100_000).map(|_| draw(&mut rng)).collect();
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        let variance = all.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / all.len() as f64;
        (mean, variance.sqrt())
    }

    #[test]
    fn gaps_have_mean_one_and_the_deviation_that_was_asked_for() {
        for cv in [0.0, 0.3, 1.0, 1.5, 3.0] {
            let (mean, deviation) = moments(|rng| gap(rng, cv));
            assert!((mean - 1.0).abs() < 0.04, "cv {cv}: mean {mean}");
            assert!((deviation - cv).abs() < 0.05 * cv.max(0.1), "cv {cv}: deviation {deviation}");
        }
    }

    #[test]
    fn a_cut_distribution_has_the_mean_that_is_written() {
        for (text, mean) in [
            ("7", 7.0),
            ("10..20", 15.0),
            ("10..1000~50~40", 50.0),
            ("normal:10..1000~300~150", 300.0),
            ("10000..990000~160000~233000", 160_000.0),
            ("3000..100000~55000", 55_000.0),
            ("normal:2..20~6~4", 6.0),
            ("0..10~9.5", 9.5),
        ] {
            let spread = Spread::parse(text).unwrap_or_else(|| panic!("{text}"));
            let (low, high) = spread.ends();
            let mut rng = for_request(3, 4);
            assert!((0..1_000).all(|_| (low..=high).contains(&spread.draw(&mut rng))), "{text}");
            let (got, _) = moments(|rng| spread.draw(rng));
            assert!((got / mean - 1.0).abs() < 0.02, "{text}: {got}");
        }
    }

    #[test]
    fn other_spellings_are_refused() {
        for text in [
            "",
            "x",
            "-1",
            "inf",
            "NaN",
            "5..1",
            "1..",
            "..5",
            "1..9~10",
            "1..9~0",
            "1..9~5~0",
            "1..9~5~1~2",
            "normal:5",
        ] {
            assert_eq!(Spread::parse(text), None, "{text}");
        }
        assert_eq!(Spread::parse("normal:1..9"), None);
    }

    #[test]
    fn the_first_rank_is_the_most_popular() {
        let zipf = Zipf::new(100, 1.0);
        let mut counts = [0_u32; 100];
        let mut rng = for_request(5, 6);
        for _ in 0..100_000 {
            counts[zipf.draw(&mut rng)] += 1;
        }
        // 1 / H(100) = 0.1928 of all for the first, half of that for the second.
        assert!((18_500..20_000).contains(&counts[0]), "{}", counts[0]);
        assert!((9_100..10_200).contains(&counts[1]), "{}", counts[1]);
        assert!(counts.iter().all(|c| *c > 0));
        let even = Zipf::new(4, 0.0);
        let first = (0..10_000).filter(|_| even.draw(&mut rng) == 0).count();
        assert!((2_300..2_700).contains(&first), "{first}");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "[0-9.~a-z:-]{0,30}") {
            if let Some(spread) = Spread::parse(&text) {
                let value = spread.draw(&mut for_request(1, 1));
                prop_assert!(value.is_finite() && value >= spread.ends().0 && value <= spread.ends().1);
            }
        }
    }
}
