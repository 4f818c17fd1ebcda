//! Time of a KV cache transfer from the server that computed a prompt to the one that continues it.
//!
//! ```text
//! seconds of a transfer = t · [1, kilotokens that the decode worker lacks]
//! ```
//!
//! [`Fit`] learns it from the time to a decode worker's first token, minus the predicted time of its queue. The cost of
//! a transfer therefore includes delays by requests that the worker received during the prefill. The spread of the
//! observations shows how well the mean is known; a pool switches between whole and split requests only if the two
//! costs differ by more than that.
//!
//! A pool without transfers learns nothing, so what was learned fades with time, and a network that was slow is tried
//! again. Each topology level between servers has its own times: a link within a rack is learned separately from one
//! between zones, starting from the values of the next nearer level. Called by `ext_proc` (observations) and by
//! `scheduling` (predictions).

use super::fit::Fit;
use super::{Published, dot};
use crate::place::Nearness;
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// Coefficients before any transfer: 2 ms for the request, and 4 ms per thousand tokens (128 KiB per token, an 8B
/// model, at 32 GB/s). They are optimistic, because a transfer that is never tried is never learned.
const DEFAULT_TRANSFER: [f64; 2] = [0.002, 0.004];
/// Typical size of each feature, which scales the weight of its prior.
const SCALE_TRANSFER: [f64; 2] = [1.0, 2.0];
/// Weight of one transfer in the usual error, a mean of some 20.
const ERROR_RATE: f64 = 0.05;
/// Shortest time of a transfer in seconds; smaller measurements are errors of the prediction.
const LEAST: f64 = 1e-4;
/// Half-life of what was learned, 60 s: a transfer every few minutes detects that a network has become faster.
const HALF_LIFE: f64 = 60.0;

/// Learned transfer times of a pool.
#[derive(Debug, Default)]
pub struct TransferSpeed {
    /// One link for each level of [`Nearness::ALL`], and one for servers that share none or have no labels.
    links: [Link; LINKS],
}

const LINKS: usize = Nearness::ALL.len() + 1;

/// Index of the link between servers that are as `near` as given.
fn position(near: Option<Nearness>) -> usize {
    near.and_then(|near| Nearness::ALL.iter().position(|n| *n == near)).unwrap_or(LINKS - 1)
}

/// Expected transfer times at one moment.
#[derive(Clone, Copy, Debug)]
pub struct Transfers {
    links: [[f64; 2]; LINKS],
}

impl Default for Transfers {
    fn default() -> Self {
        Self { links: [DEFAULT_TRANSFER; LINKS] }
    }
}

impl Transfers {
    /// Returns the expected seconds to transfer `tokens` tokens between servers that are as `near` as
    /// given; 0 for no tokens.
    #[must_use]
    pub fn seconds(&self, tokens: u32, near: Option<Nearness>) -> f64 {
        self.links.get(position(near)).map_or(0.0, |link| seconds(link, tokens))
    }
}

fn seconds(link: &[f64; 2], tokens: u32) -> f64 {
    if tokens == 0 { 0.0 } else { dot(link, &features(tokens)) }
}

/// Transfers between servers of one topology level.
#[derive(Debug)]
struct Link {
    fit: Mutex<(Fit<2>, f64)>,
    published: Published<2>,
    /// Standard error of the mean transfer time in seconds; bits of an `f32`.
    uncertainty: AtomicU32,
    /// Time of the last transfer; 0 before the first.
    latest: AtomicU64,
    /// Whether the last request with a choice was split.
    splits: AtomicBool,
}

impl Default for Link {
    fn default() -> Self {
        let link = Self {
            fit: Mutex::new((Fit::new(DEFAULT_TRANSFER), 0.0)),
            published: Published::default(),
            uncertainty: AtomicU32::new(0),
            latest: AtomicU64::new(0),
            splits: AtomicBool::new(false),
        };
        link.published.set(&DEFAULT_TRANSFER);
        link
    }
}

fn features(tokens: u32) -> [f64; 2] {
    [1.0, f64::from(tokens) / 1e3]
}

impl Link {
    /// Weight of what was learned, 0 to 1.
    fn believed(&self, now: Timestamp) -> f64 {
        (-now.since(Timestamp(self.latest.load(Relaxed))).as_secs_f64() / HALF_LIFE).exp2()
    }

    /// Adds a transfer; `nearer` is the expectation for the next nearer level.
    #[expect(clippy::cast_possible_truncation, reason = "seconds; f32 is precise enough")]
    fn observe(&self, tokens: u32, seconds: f64, nearer: &[f64; 2], now: Timestamp) {
        let mut guard = self.fit.lock();
        let (fit, error) = &mut *guard;
        if !fit.is_learned() {
            *fit = Fit::new(*nearer);
        }
        let believed = self.believed(now);
        fit.fade(believed);
        *error *= believed;
        let features = features(tokens);
        let off = (seconds - fit.predict(&features)).abs();
        *error += (off - *error) * ERROR_RATE;
        fit.observe(&features, seconds.max(LEAST), nearer, &SCALE_TRANSFER);
        self.published.set(fit.coefficients());
        // The standard error of a mean with this rate of forgetting.
        let uncertainty = *error * (ERROR_RATE / (2.0 - ERROR_RATE)).sqrt();
        self.uncertainty.store((uncertainty as f32).to_bits(), Relaxed);
        self.latest.fetch_max(now.0, Relaxed);
    }
}

impl TransferSpeed {
    fn link(&self, near: Option<Nearness>) -> Option<&Link> {
        self.links.get(position(near))
    }

    /// Returns the expected transfer times. A level without observations takes the values of the next nearer one.
    #[must_use]
    pub fn expected(&self, now: Timestamp) -> Transfers {
        let mut expected = Transfers::default();
        let mut nearer = DEFAULT_TRANSFER;
        for (seconds, link) in expected.links.iter_mut().zip(&self.links) {
            if link.latest.load(Relaxed) > 0 {
                let believed = link.believed(now);
                nearer.iter_mut().zip(link.published.get()).for_each(|(c, own)| *c += (own - *c) * believed);
            }
            *seconds = nearer;
        }
        expected
    }

    /// Adds an observation: `tokens` tokens took `seconds`, negative if the decode worker was faster than predicted.
    /// The first observations of a link are combined with the next nearer level's values. The pool's initial values
    /// would make a far link of a slow network look faster than a near one.
    pub fn observe(&self, tokens: u32, near: Option<Nearness>, seconds: f64, now: Timestamp) {
        if tokens > 0
            && seconds.is_finite()
            && let Some(link) = self.link(near)
        {
            let expected = self.expected(now);
            let nearer = position(near).checked_sub(1).and_then(|nearer| expected.links.get(nearer));
            link.observe(tokens, seconds, nearer.unwrap_or(&DEFAULT_TRANSFER), now);
        }
    }

    /// Whether to split a request that costs `whole` seconds on one server and `split` seconds on two, which are as
    /// `near` as given. A `dry_run` changes no state.
    pub fn decides(&self, whole: f64, split: f64, near: Option<Nearness>, now: Timestamp, dry_run: bool) -> bool {
        let Some(link) = self.link(near) else { return false };
        let margin = f64::from(f32::from_bits(link.uncertainty.load(Relaxed))) * link.believed(now);
        let gain = whole - split;
        let splits = if link.splits.load(Relaxed) { gain > -margin } else { gain > margin };
        if !dry_run {
            link.splits.store(splits, Relaxed);
        }
        splits
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    const NOW: Timestamp = Timestamp(7_000_000_000);

    #[test]
    fn slow_network_is_learned() {
        let speed = TransferSpeed::default();
        assert!((speed.expected(NOW).seconds(1_000, None) - 0.006).abs() < 1e-6);
        assert_eq!(speed.expected(NOW).seconds(0, None), 0.0);
        for i in 0..400u32 {
            let tokens = 500 + (i * 379) % 8_000;
            speed.observe(tokens, None, 0.01 + f64::from(tokens) * 50e-6, NOW);
        }
        let seconds = speed.expected(NOW).seconds(4_000, None);
        assert!((0.19..0.23).contains(&seconds), "{seconds}");
    }

    #[test]
    fn topology_levels_are_learned_separately() {
        use Nearness::{Host, Rack, Region, Zone};
        let speed = TransferSpeed::default();
        for i in 0..100 {
            speed.observe(1_000, Some(Rack), 0.010, Timestamp(NOW.0 + i));
            speed.observe(1_000, Some(Region), 0.200, Timestamp(NOW.0 + i + 1));
        }
        let now = Timestamp(NOW.0 + 100);
        let seconds = |near| speed.expected(now).seconds(1_000, near);
        let ([rack, region], host) = ([Some(Rack), Some(Region)].map(seconds), seconds(Some(Host)));
        assert!((0.009..0.011).contains(&rack) && (0.15..0.21).contains(&region), "{rack} {region}");
        assert!((host - 0.006).abs() < 1e-9, "it has no observations: {host}");
        // A level without observations is not expected to be faster than a nearer one.
        assert!((seconds(Some(Zone)) - rack).abs() < 1e-6 && (seconds(None) - region).abs() < 1e-3);
    }

    #[test]
    fn far_link_of_a_slow_network_is_not_expected_to_be_faster() {
        use Nearness::{Rack, Zone};
        for takes in [0.200, 0.300] {
            let speed = TransferSpeed::default();
            (0..200).for_each(|i| speed.observe(500 + (i * 379) % 8_000, Some(Rack), 0.200, NOW));
            let seconds = |near| speed.expected(NOW).seconds(4_000, Some(near));
            let mut last = seconds(Rack);
            for count in 1..=5 {
                speed.observe(4_000, Some(Zone), takes, NOW);
                let (near, far) = (seconds(Rack), seconds(Zone));
                assert!(far >= last - 1e-9 && far < takes + 1e-9, "{count} of {takes}: {near} {far}");
                last = far;
            }
        }
    }

    #[test]
    fn each_link_remembers_its_last_decision() {
        use Nearness::{Host, Zone};
        let speed = TransferSpeed::default();
        for near in [Host, Zone] {
            (0..200).for_each(|i| speed.observe(1_000, Some(near), if i % 2 == 0 { 0.010 } else { 0.050 }, NOW));
        }
        let decides = |near, split| speed.decides(0.100, split, Some(near), NOW, false);
        assert!(decides(Host, 0.080) && decides(Host, 0.101), "the last request was split");
        assert!(!decides(Zone, 0.099), "no request was split on this link");
        assert!(decides(Host, 0.101), "decisions about another link do not matter");
    }

    #[test]
    fn difference_within_the_uncertainty_changes_nothing() {
        let speed = TransferSpeed::default();
        // Transfers take 10 or 50 ms by chance, so their mean is known to some 3 ms.
        for i in 0..200 {
            speed.observe(1_000, None, if i % 2 == 0 { 0.010 } else { 0.050 }, NOW);
        }
        assert!(!speed.decides(0.100, 0.099, None, NOW, false));
        assert!(speed.decides(0.100, 0.080, None, NOW, false));
        assert!(speed.decides(0.100, 0.101, None, NOW, false));
        assert!(!speed.decides(0.100, 0.120, None, NOW, false));
        assert!(!speed.decides(0.100, 0.099, None, NOW, false));
    }

    #[test]
    fn network_that_was_slow_is_tried_again() {
        let speed = TransferSpeed::default();
        // One request in ten seconds, which takes 100 ms on one server, or 20 ms plus the transfer on two.
        let split = |hours: std::ops::Range<u64>, takes: f64| {
            let splits = (hours.start * 360..hours.end * 360).filter(|i| {
                let now = NOW.after(Duration::from_secs(10 * i));
                let splits = speed.decides(0.100, 0.020 + speed.expected(now).seconds(4_000, None), None, now, false);
                if splits {
                    speed.observe(4_000, None, takes, now);
                }
                splits
            });
            splits.count()
        };
        assert_eq!(split(0..1, 0.018), 360);
        // A link hangs: seconds instead of milliseconds. At first this looks like chance.
        let hangs = (split(1..2, 8.0), split(2..3, 8.0));
        assert!(hangs.0 < 60 && (2..25).contains(&hangs.1), "{hangs:?}");
        let heals = (split(3..4, 0.018), split(4..5, 0.018));
        assert!(heals.0 > 100 && heals.1 == 360, "{heals:?}");
    }

    #[test]
    fn dry_run_changes_nothing() {
        let speed = TransferSpeed::default();
        for i in 0..200 {
            speed.observe(1_000, None, if i % 2 == 0 { 0.010 } else { 0.050 }, NOW);
        }
        assert!(speed.decides(0.100, 0.080, None, NOW, true));
        assert!(!speed.decides(0.100, 0.101, None, NOW, false), "as if there had been no dry run");
    }

    #[test]
    fn invalid_numbers_are_ignored() {
        let speed = TransferSpeed::default();
        speed.observe(1_000, None, f64::NAN, NOW);
        speed.observe(0, None, 7.0, NOW);
        assert!((speed.expected(NOW).seconds(1_000, None) - 0.006).abs() < 1e-6);
        // A negative time is the prediction's error.
        speed.observe(1_000, None, -3.0, NOW);
        assert!(speed.expected(NOW).seconds(1_000, None) >= 0.0);
    }
}
