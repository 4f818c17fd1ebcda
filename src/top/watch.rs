//! What successive readings add up to: rates, shares of traffic, histories of endpoints, and decisions.

use crate::model::{Decision, Pool, Reading, Samples};
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::time::{Duration, SystemTime};

/// Most decisions that are kept.
const KEPT_DECISIONS: usize = 1_000;
/// Most samples of a pool that are kept: half an hour at one each five seconds.
const KEPT_SAMPLES: usize = 360;
/// Most points of a history. Twice as many are averaged in pairs.
const POINTS: usize = 240;

/// A moment, by two clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Moment {
    /// Time since the view started. It never goes back.
    pub(crate) elapsed: Duration,
    /// Time of day.
    pub(crate) wall: SystemTime,
}

/// Pool and address of an endpoint.
pub(crate) type EndpointKey = (String, String);

/// Values at equal distances, from the start of the view until now.
#[derive(Clone, Debug)]
pub(crate) struct History {
    points: Vec<f64>,
    /// Readings in one point.
    stride: u32,
    /// Sum and number of readings of the point that is not full yet.
    open: (f64, u32),
}

impl Default for History {
    fn default() -> Self {
        Self { points: Vec::new(), stride: 1, open: (0.0, 0) }
    }
}

impl History {
    fn push(&mut self, value: f64) {
        self.open = (self.open.0 + value, self.open.1 + 1);
        if self.open.1 < self.stride {
            return;
        }
        self.points.push(self.open.0 / f64::from(self.open.1));
        self.open = (0.0, 0);
        if self.points.len() == 2 * POINTS {
            self.points = self.points.chunks(2).map(|pair| pair.iter().sum::<f64>() / pair.len() as f64).collect();
            self.stride *= 2;
        }
    }

    /// At most `width` values, oldest first. Each is the mean of the same number of points.
    pub(crate) fn resampled(&self, width: usize) -> Vec<f64> {
        resampled(&self.points, width)
    }
}

/// At most `width` values, oldest first. Each is the mean of the same number of points; only the first one may have
/// fewer.
pub(crate) fn resampled(points: &[f64], width: usize) -> Vec<f64> {
    let mean = |points: &[f64]| points.iter().sum::<f64>() / points.len() as f64;
    let each = points.len().div_ceil(width.max(1)).max(1);
    let (head, rest) = points.split_at(points.len() % each);
    let head = (!head.is_empty()).then(|| mean(head));
    head.into_iter().chain(rest.chunks(each).map(mean)).collect()
}

/// What the picker measured of a pool in the last half hour.
#[derive(Clone, Debug, Default)]
pub(crate) struct PoolHistory {
    /// Requests per second that ended, oldest first.
    pub(crate) requests: VecDeque<f64>,
    /// The latest median and 95th percentile of the time to the first token, milliseconds.
    pub(crate) ttft: [Option<f64>; 2],
}

/// What is known about one endpoint beyond the last reading.
#[derive(Clone, Debug, Default)]
pub(crate) struct Track {
    routed: Option<u64>,
    /// Requests routed to it in the last interval.
    delta: Option<u64>,
    /// Requests per second in the last interval.
    pub(crate) rate: Option<f64>,
    /// Part of its pool's requests in the last interval, 0 to 1. `None` if the pool had none.
    pub(crate) share: Option<f64>,
    pub(crate) rates: History,
    pub(crate) in_flight: History,
    pub(crate) waiting: History,
    pub(crate) kv_usage: History,
    pub(crate) hit_ratio: History,
    pub(crate) prefill_speed: History,
}

/// A decision and when its request ended.
#[derive(Clone, Debug)]
pub(crate) struct Ended {
    pub(crate) at: SystemTime,
    pub(crate) decision: Decision,
}

/// Why the picker could not be read, and since when.
#[derive(Clone, Debug)]
pub(crate) struct Failure {
    pub(crate) since: Moment,
    pub(crate) why: String,
}

/// Everything that is known of the picker.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watch {
    pub(crate) reading: Option<Reading>,
    pub(crate) read_at: Option<Moment>,
    /// The current failure; `None` after a good reading.
    pub(crate) failure: Option<Failure>,
    tracks: HashMap<EndpointKey, Track>,
    /// Requests per second of each pool in the last interval.
    pool_rates: HashMap<String, f64>,
    pool_histories: HashMap<String, PoolHistory>,
    /// Counts of rejections and degraded modes in the last interval.
    deltas: BTreeMap<String, u64>,
    counted: BTreeMap<String, u64>,
    /// Newest first.
    pub(crate) decisions: VecDeque<Ended>,
    /// Decisions that the picker no longer had when it was read.
    pub(crate) missed: u64,
}

impl Watch {
    /// Adds a reading.
    pub(crate) fn update(&mut self, mut reading: Reading, now: Moment) {
        let interval = self.read_at.map(|before| now.elapsed.saturating_sub(before.elapsed).as_secs_f64());
        let interval = interval.filter(|seconds| *seconds > 0.0);
        self.track(&reading.pools, interval);
        self.count(&reading, interval.is_some());
        if let Some(samples) = reading.samples.take() {
            self.add_samples(samples);
        }
        self.add_decisions(std::mem::take(&mut reading.decisions), now.wall);
        self.reading = Some(reading);
        self.read_at = Some(now);
        self.failure = None;
    }

    /// Notes that the picker could not be read.
    pub(crate) fn failed(&mut self, why: String, now: Moment) {
        let since = self.failure.take().map_or(now, |failure| failure.since);
        self.failure = Some(Failure { since, why });
    }

    pub(crate) fn track_of(&self, pool: &str, address: &str) -> Option<&Track> {
        self.tracks.get(&(pool.to_owned(), address.to_owned()))
    }

    /// Requests per second of the pool in the last interval.
    pub(crate) fn pool_rate(&self, pool: &str) -> Option<f64> {
        self.pool_rates.get(pool).copied()
    }

    /// The history of the pool, if the picker has one.
    pub(crate) fn pool_history(&self, pool: &str) -> Option<&PoolHistory> {
        self.pool_histories.get(pool)
    }

    /// How often the reason or mode was counted in the last interval; `None` before the second reading.
    pub(crate) fn delta(&self, kind: &str, name: &str) -> Option<u64> {
        self.deltas.get(&format!("{kind} {name}")).copied()
    }

    /// Time since the last good reading.
    pub(crate) fn age(&self, now: Moment) -> Duration {
        self.read_at.map(|at| now.elapsed.saturating_sub(at.elapsed)).unwrap_or_default()
    }

    fn track(&mut self, pools: &[Pool], interval: Option<f64>) {
        let mut seen = HashSet::new();
        self.pool_rates.clear();
        for pool in pools {
            let mut total = None;
            for endpoint in &pool.endpoints {
                let key = (pool.name.clone(), endpoint.address.clone());
                let track = self.tracks.entry(key.clone()).or_default();
                seen.insert(key);
                track.delta = endpoint.routed.zip(track.routed).map(|(now, before)| since(before, now));
                track.routed = endpoint.routed;
                track.rate = track.delta.zip(interval).map(|(delta, seconds)| delta as f64 / seconds);
                if let Some(delta) = track.delta {
                    *total.get_or_insert(0) += delta;
                }
                for (history, value) in [
                    (&mut track.rates, track.rate),
                    (&mut track.in_flight, endpoint.in_flight.map(|count| count as f64)),
                    (&mut track.waiting, endpoint.waiting),
                    (&mut track.kv_usage, endpoint.kv_usage),
                    (&mut track.hit_ratio, endpoint.hit_ratio),
                    (&mut track.prefill_speed, endpoint.prefill_speed),
                ] {
                    if let Some(value) = value {
                        history.push(value);
                    }
                }
            }
            for endpoint in &pool.endpoints {
                if let Some(track) = self.tracks.get_mut(&(pool.name.clone(), endpoint.address.clone())) {
                    let all = total.filter(|total| *total > 0);
                    track.share = track.delta.zip(all).map(|(delta, total)| delta as f64 / total as f64);
                }
            }
            if let (Some(total), Some(seconds)) = (total, interval) {
                self.pool_rates.insert(pool.name.clone(), total as f64 / seconds);
            }
        }
        self.tracks.retain(|key, _| seen.contains(key));
    }

    fn count(&mut self, reading: &Reading, is_later: bool) {
        let mut counted = BTreeMap::new();
        for (kind, counts) in [("rejected", &reading.rejections), ("degraded", &reading.degraded)] {
            counted.extend(counts.iter().map(|(name, count)| (format!("{kind} {name}"), *count)));
        }
        // A reason that is new since the last reading was counted from 0.
        let delta = |(name, now): (&String, &u64)| {
            let before = self.counted.get(name).copied().unwrap_or(0);
            is_later.then(|| (name.clone(), since(before, *now)))
        };
        self.deltas = counted.iter().filter_map(delta).collect();
        self.counted = counted;
    }

    /// Adds samples to those of before. Pools without new samples stay as they are, until a whole history comes.
    fn add_samples(&mut self, samples: Samples) {
        if samples.is_whole {
            self.pool_histories.clear();
        }
        for (pool, new) in samples.pools {
            let history = self.pool_histories.entry(pool).or_default();
            history.requests.extend(new.requests.into_iter().map(Option::unwrap_or_default));
            let excess = history.requests.len().saturating_sub(KEPT_SAMPLES);
            history.requests.drain(..excess);
            for (latest, values) in history.ttft.iter_mut().zip(new.ttft) {
                *latest = values.last().copied().unwrap_or(*latest);
            }
        }
    }

    /// Adds the decisions of a page, newest first, that are not known yet.
    fn add_decisions(&mut self, page: Vec<Decision>, now: SystemTime) {
        let newest = page.iter().filter_map(|decision| decision.sequence).max();
        let known = self.decisions.iter().filter_map(|ended| ended.decision.sequence).max();
        // Another process counts from 0 again, and a page without numbers can't be joined to the one before.
        let known = known.filter(|known| newest.is_some_and(|newest| newest >= *known));
        if known.is_none() {
            self.decisions.clear();
            self.missed = 0;
        }
        let is_new = |decision: &Decision| known.is_none_or(|known| decision.sequence.is_some_and(|s| s > known));
        let new: Vec<Ended> = page
            .into_iter()
            .filter(is_new)
            .map(|decision| Ended { at: now.checked_sub(decision.age).unwrap_or(now), decision })
            .collect();
        if let (Some(known), Some(newest)) = (known, newest) {
            self.missed += (newest - known).saturating_sub(new.len() as u64);
        }
        for ended in new.into_iter().rev() {
            self.decisions.push_front(ended);
        }
        self.decisions.truncate(KEPT_DECISIONS);
    }
}

/// How far a counter went. A counter that went back was started again.
fn since(before: u64, now: u64) -> u64 {
    now.checked_sub(before).unwrap_or(now)
}
