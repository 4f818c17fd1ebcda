//! Load and hit rate over time. Called by [`super::Tally`] (writes) and `report` (reads). Pure.

use super::share;
use crate::served::Sample;
use attache_types::clock::Timestamp;

/// The most points that are kept: about one for each two pixels of a plot.
pub const MAX_POINTS: usize = 512;

/// One endpoint over one span of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EndpointSpan {
    /// Samples of this endpoint in this point.
    pub samples: u32,
    /// Sum over the samples of the requests in its batch and in its queue.
    pub in_flight: u64,
    /// Sum over the samples of the share of its blocks in use.
    pub kv_usage: f64,
    /// Prompt tokens that it looked up in its prefix cache in this span.
    pub queries: u64,
    /// Prompt tokens of these that were cached.
    pub hits: u64,
}

impl EndpointSpan {
    fn join(&mut self, other: &EndpointSpan) {
        self.samples += other.samples;
        self.in_flight += other.in_flight;
        self.kv_usage += other.kv_usage;
        self.queries += other.queries;
        self.hits += other.hits;
    }

    /// Mean number of requests in its batch and queue; zero without samples.
    #[must_use]
    pub fn mean_in_flight(&self) -> f64 {
        share(self.in_flight, u64::from(self.samples)).unwrap_or(0.0)
    }

    /// Mean share of its blocks in use, 0..=1; zero without samples.
    #[must_use]
    pub fn mean_kv_usage(&self) -> f64 {
        if self.samples == 0 { 0.0 } else { self.kv_usage / f64::from(self.samples) }
    }
}

/// All endpoints over one span of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TimelinePoint {
    /// The first sample in it.
    pub from: Timestamp,
    /// The last sample in it.
    pub until: Timestamp,
    /// Number of samples in this point.
    pub samples: u32,
    /// By the endpoint's position in the fleet.
    pub endpoints: Vec<EndpointSpan>,
}

impl TimelinePoint {
    fn join(&mut self, other: &TimelinePoint) {
        self.until = other.until;
        self.samples += other.samples;
        if self.endpoints.len() < other.endpoints.len() {
            self.endpoints.resize(other.endpoints.len(), EndpointSpan::default());
        }
        for (into, from) in self.endpoints.iter_mut().zip(&other.endpoints) {
            into.join(from);
        }
    }

    /// Prompt tokens that the endpoints looked up in this span.
    #[must_use]
    pub fn queries(&self) -> u64 {
        self.endpoints.iter().map(|endpoint| endpoint.queries).sum()
    }

    /// Prompt tokens of these that were cached.
    #[must_use]
    pub fn hits(&self) -> u64 {
        self.endpoints.iter().map(|endpoint| endpoint.hits).sum()
    }

    /// Share of these prompt tokens that were cached, 0..=1; `None` if none were looked up.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        share(self.hits(), self.queries())
    }
}

/// At most [`MAX_POINTS`] points, each of equally many samples (the last may have fewer); when they
/// are full, neighbours are joined.
#[derive(Clone, Debug, PartialEq)]
pub struct Timeline {
    /// Samples of one point; doubles when the points run out.
    stride: u32,
    points: Vec<TimelinePoint>,
    /// The counters of the last sample, by endpoint.
    last: Vec<(u64, u64)>,
}

impl Default for Timeline {
    fn default() -> Self {
        Self { stride: 1, points: Vec::new(), last: Vec::new() }
    }
}

impl Timeline {
    /// Adds the state of all endpoints.
    pub fn add(&mut self, at: Timestamp, samples: &[Sample]) {
        if self.last.len() < samples.len() {
            self.last.resize(samples.len(), (0, 0));
        }
        let endpoints = samples.iter().zip(&mut self.last).map(|(sample, last)| endpoint_span(sample, last)).collect();
        let point = TimelinePoint { from: at, until: at, samples: 1, endpoints };
        match self.points.last_mut() {
            Some(open) if open.samples < self.stride => open.join(&point),
            _ => {
                if self.points.len() == MAX_POINTS {
                    self.halve();
                }
                self.points.push(point);
            }
        }
    }

    fn halve(&mut self) {
        self.stride *= 2;
        let joined = self.points.chunks(2).map(|pair| {
            pair.iter().skip(1).fold(pair.first().cloned().unwrap_or_default(), |mut sum, point| {
                sum.join(point);
                sum
            })
        });
        self.points = joined.collect();
    }

    /// The points, in the order of time.
    #[must_use]
    pub fn points(&self) -> &[TimelinePoint] {
        &self.points
    }
}

fn endpoint_span(sample: &Sample, last: &mut (u64, u64)) -> EndpointSpan {
    // Counters that went back began anew with their server.
    let restarted = sample.prefix_queries < last.0 || sample.prefix_hits < last.1;
    let (queries, hits) = if restarted { (0, 0) } else { *last };
    *last = (sample.prefix_queries, sample.prefix_hits);
    EndpointSpan {
        samples: 1,
        in_flight: u64::from(sample.running) + u64::from(sample.waiting),
        kv_usage: f64::from(sample.kv_usage),
        queries: sample.prefix_queries - queries,
        hits: sample.prefix_hits - hits,
    }
}
