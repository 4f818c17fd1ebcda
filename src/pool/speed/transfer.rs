//! How long a prompt's KV cache takes from the server that computed it to the one that goes on from it.
//!
//! ```text
//! seconds of a transfer = t · [1, kilotokens that the decode server lacks]
//! ```
//!
//! Learned by [`Fit`] from what a decode server's first token took longer than its queue, as the decision saw it, would have it: what others
//! were given there while the prompt was computed elsewhere is part of what a transfer costs. How far observations
//! are off says how well the mean is known, and that much a request's two ways must differ before a pool changes from one to the
//! other: below it, the difference is chance. A pool that sends nothing from server to server learns nothing of it either, so what was learned
//! is believed less the longer that is ago, and a network that was slow for a while is tried again. Servers whose labels say where they stand
//! are told apart by how near they are: a link within a rack and one between zones are learned on their own, from what the next nearer one has
//! shown on. Called by the exchange (what came of it) and by `scheduling` (predictions).

use super::fit::Fit;
use super::{Published, dot};
use crate::place::Nearness;
use attache_types::clock::Timestamp;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

/// What a pool is thought of before anything was transferred: 2 ms to ask for it and 4 ms for each thousand tokens (128 KiB a token, an
/// 8B model, at 32 GB/s). Rather too fast than too slow: a transfer that is never tried is never learned.
const DEFAULT_TRANSFER: [f64; 2] = [0.002, 0.004];
/// The size of each feature that makes it count.
const SCALE_TRANSFER: [f64; 2] = [1.0, 2.0];
/// The usual error is the mean of some 20 transfers.
const ERROR_RATE: f64 = 0.05;
/// No transfer is faster than this, seconds; what was measured as less is the error of a prediction.
const LEAST: f64 = 1e-4;
/// 60 s: one transfer in some minutes is what it costs to see whether a network has become faster.
const HALF_LIFE: f64 = 60.0;

/// What a pool's transfers have shown.
#[derive(Debug, Default)]
pub struct TransferSpeed {
    /// Those between servers that are as near as [`Nearness::ALL`] says, and those between servers that share nothing or say nothing.
    links: [Link; LINKS],
}

const LINKS: usize = Nearness::ALL.len() + 1;

/// Where servers as `near` as that stand among the links.
fn position(near: Option<Nearness>) -> usize {
    near.and_then(|near| Nearness::ALL.iter().position(|n| *n == near)).unwrap_or(LINKS - 1)
}

/// What transfers take, as far as is known at one moment.
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
    /// Seconds that `tokens` tokens are expected to take between servers as `near` as that; 0 for none, which nobody asks for.
    #[must_use]
    pub fn seconds(&self, tokens: u32, near: Option<Nearness>) -> f64 {
        self.links.get(position(near)).map_or(0.0, |link| seconds(link, tokens))
    }
}

fn seconds(link: &[f64; 2], tokens: u32) -> f64 {
    if tokens == 0 { 0.0 } else { dot(link, &features(tokens)) }
}

/// Transfers between servers of one nearness.
#[derive(Debug)]
struct Link {
    fit: Mutex<(Fit<2>, f64)>,
    published: Published<2>,
    /// Seconds by which the mean of the last transfers may be off; f32 bits.
    uncertainty: AtomicU32,
    /// When the last one was observed; 0 when none was.
    latest: AtomicU64,
    /// The last request that could go either way was split.
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
    /// How much of what was learned is believed still, 0 to 1.
    fn believed(&self, now: Timestamp) -> f64 {
        (-now.since(Timestamp(self.latest.load(Relaxed))).as_secs_f64() / HALF_LIFE).exp2()
    }

    /// `nearer` is what transfers between nearer servers are expected to take.
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
        // The standard error of a mean that forgets at this rate.
        let uncertainty = *error * (ERROR_RATE / (2.0 - ERROR_RATE)).sqrt();
        self.uncertainty.store((uncertainty as f32).to_bits(), Relaxed);
        self.latest.fetch_max(now.0, Relaxed);
    }
}

impl TransferSpeed {
    fn link(&self, near: Option<Nearness>) -> Option<&Link> {
        self.links.get(position(near))
    }

    /// What transfers are expected to take. What is not known of servers is thought to be as with nearer ones.
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

    /// `tokens` tokens took `seconds` between servers as `near` as that, or less than nothing when the decode server was faster than expected.
    /// The few transfers that a link has shown count beside what nearer ones have: held to what a pool is thought of at first, a far link of a
    /// slow network would seem faster than a near one.
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

    /// Whether a request is split that costs `whole` seconds in one place and `split` in two, which are as `near` as that. Nothing is remembered
    /// of a `preview`.
    pub fn decides(&self, whole: f64, split: f64, near: Option<Nearness>, now: Timestamp, preview: bool) -> bool {
        let Some(link) = self.link(near) else { return false };
        let margin = f64::from(f32::from_bits(link.uncertainty.load(Relaxed))) * link.believed(now);
        let gain = whole - split;
        let splits = if link.splits.load(Relaxed) { gain > -margin } else { gain > margin };
        if !preview {
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
    fn a_slow_network_is_learned() {
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
    fn near_and_far_servers_are_told_apart() {
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
        assert!((host - 0.006).abs() < 1e-9, "nothing is known of it: {host}");
        // Not thought to be faster than what is nearer.
        assert!((seconds(Some(Zone)) - rack).abs() < 1e-6 && (seconds(None) - region).abs() < 1e-3);
    }

    #[test]
    fn a_far_link_of_a_slow_network_is_not_thought_faster_than_a_near_one() {
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
    fn a_way_is_tried_again_by_what_was_done_on_it() {
        use Nearness::{Host, Zone};
        let speed = TransferSpeed::default();
        for near in [Host, Zone] {
            (0..200).for_each(|i| speed.observe(1_000, Some(near), if i % 2 == 0 { 0.010 } else { 0.050 }, NOW));
        }
        let decides = |near, split| speed.decides(0.100, split, Some(near), NOW, false);
        assert!(decides(Host, 0.080) && decides(Host, 0.101), "it was split before");
        assert!(!decides(Zone, 0.099), "nothing was split on this way");
        assert!(decides(Host, 0.101), "what was decided of another way changes nothing");
    }

    #[test]
    fn a_difference_within_the_uncertainty_changes_nothing() {
        let speed = TransferSpeed::default();
        // Transfers that take 10 or 50 ms by chance: the mean of the last of them is known to some 3 ms.
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
    fn a_network_that_was_slow_is_tried_again_now_and_then() {
        let speed = TransferSpeed::default();
        // One request in ten seconds, which takes 100 ms in one place, and 20 ms and the transfer in two.
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
        // A link that hangs: seconds for what takes milliseconds. That is first taken for chance.
        let hangs = (split(1..2, 8.0), split(2..3, 8.0));
        assert!(hangs.0 < 60 && (2..25).contains(&hangs.1), "{hangs:?}");
        let heals = (split(3..4, 0.018), split(4..5, 0.018));
        assert!(heals.0 > 100 && heals.1 == 360, "{heals:?}");
    }

    #[test]
    fn a_preview_changes_nothing() {
        let speed = TransferSpeed::default();
        for i in 0..200 {
            speed.observe(1_000, None, if i % 2 == 0 { 0.010 } else { 0.050 }, NOW);
        }
        assert!(speed.decides(0.100, 0.080, None, NOW, true));
        assert!(!speed.decides(0.100, 0.101, None, NOW, false), "as if nobody had asked");
    }

    #[test]
    fn what_is_no_number_teaches_nothing() {
        let speed = TransferSpeed::default();
        speed.observe(1_000, None, f64::NAN, NOW);
        speed.observe(0, None, 7.0, NOW);
        assert!((speed.expected(NOW).seconds(1_000, None) - 0.006).abs() < 1e-6);
        // Faster than nothing is the prediction's error.
        speed.observe(1_000, None, -3.0, NOW);
        assert!(speed.expected(NOW).seconds(1_000, None) >= 0.0);
    }
}
