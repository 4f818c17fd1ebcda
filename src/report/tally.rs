//! Outcomes of all requests of one run, in memory that does not grow with their number.
//!
//! | module | owns |
//! |---|---|
//! | [`objective_counts`] | requests that met the objective of their pool |
//! | [`latency`] | the distribution of one duration |
//! | [`batches`] | means of consecutive requests, by which two runs are compared |
//! | [`programs`] | times of agents' programs, and their requests by what their agent had waited for |
//! | [`timeline`] | load and hit rate over time |
//! | [`spread`] | how evenly load is spread over the endpoints |
//! | [`queueing`] | time in queues, and requests that queues rejected |
//!
//! Written by `replay` and `loadgen`, one [`Served`] for each request and one [`Sample`] for each server about once a virtual
//! second; read by [`crate`]. Pure.

pub mod batches;
pub mod latency;
pub mod objective_counts;
pub mod programs;
pub mod queueing;
pub mod spread;
pub mod timeline;

#[cfg(test)]
mod tests;

use crate::served::{Ending, Queued, Sample, Served};
use attache_pool::Roles;
use attache_scheduling::Objective;
use attache_types::clock::Timestamp;
use batches::{Batches, RequestTimes};
use latency::Latency;
use objective_counts::ObjectiveCounts;
use programs::Programs;
use queueing::Queueing;
use spread::LoadSpread;
use std::time::Duration;
use timeline::Timeline;

/// The targets that a request must meet to count for goodput. An absent target is always met.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Targets {
    /// Maximum time to first token (TTFT).
    pub first_token: Option<Duration>,
    /// Maximum time per output token (TPOT).
    pub per_token: Option<Duration>,
}

impl Targets {
    fn given(self) -> bool {
        self.first_token.is_some() || self.per_token.is_some()
    }

    /// A response that is too short for a time per output token meets any target for it.
    fn met_by(self, served: &Served) -> bool {
        served.ending == Ending::Answered
            && self.first_token.is_none_or(|most| served.first_token.is_some_and(|time| time <= most))
            && self.per_token.is_none_or(|most| served.per_token().is_none_or(|time| time <= most))
    }
}

/// Tokens of all requests that a server accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TokenCounts {
    /// Prompt tokens of all requests.
    pub prompt: u64,
    /// Prompt tokens that the picker expected to be cached.
    pub expected_cached: u64,
    /// Prompt tokens that were cached.
    pub cached: u64,
    /// Generated tokens of all responses.
    pub generated: u64,
}

/// Requests and tokens of one endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndpointCounts {
    /// Requests that this endpoint served.
    pub requests: u64,
    /// Tokens of the prompts that it prefilled, also of those that another server decoded.
    pub prompt_tokens: u64,
    /// Prompt tokens of these that were cached.
    pub cached_tokens: u64,
    /// Prompts that it prefilled for decode workers.
    pub prefills: u64,
    /// Number of samples.
    pub samples: u64,
    /// Samples in which a request was running.
    pub busy: u64,
}

/// Requests that were split over a prefill and a decode worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SplitCounts {
    /// Requests whose prefill and decode ran on different servers.
    pub requests: u64,
    /// Requests that were to be split, and were served whole because the prefill failed.
    pub fell_back: u64,
    /// Tokens whose KV blocks were transferred.
    pub received_tokens: u64,
    /// Total duration of the transfers.
    pub transfer: Duration,
}

impl EndpointCounts {
    /// Prompt tokens that the endpoint computed.
    #[must_use]
    pub fn work(&self) -> u64 {
        self.prompt_tokens.saturating_sub(self.cached_tokens)
    }
}

/// Requests by how they ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EndingCounts {
    /// Requests with a whole response.
    pub answered: u64,
    /// Requests that the picker or a server rejected.
    pub refused: u64,
    /// Requests whose server died, or whose connection broke.
    pub lost: u64,
}

impl EndingCounts {
    /// Sum of the three counts.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.answered + self.refused + self.lost
    }

    /// Requests without a whole response.
    #[must_use]
    pub fn unanswered(&self) -> u64 {
        self.refused + self.lost
    }
}

/// Outcomes of all requests of one run.
///
/// The time to the first token is counted for each request that got one, also when its server died later; the
/// times between tokens and the total only for whole responses. A policy that rejects many requests can therefore have a
/// short time to first token. Therefore [`crate::compare`] does not call it better, and goodput counts what was
/// rejected or lost as missed.
#[derive(Clone, Debug)]
pub struct Tally {
    targets: Targets,
    good: u64,
    objective: Option<ObjectiveCounts>,
    endings: EndingCounts,
    first_token: Latency,
    per_token: Latency,
    inter_token: Latency,
    total: Latency,
    tokens: TokenCounts,
    preemptions: u64,
    endpoints: Vec<EndpointCounts>,
    roles: Vec<Roles>,
    split: SplitCounts,
    queueing: Option<Queueing>,
    programs: Option<Box<Programs>>,
    timeline: Timeline,
    batches: Batches,
    first_arrival: Option<Timestamp>,
    last_end: Timestamp,
}

impl Tally {
    /// An empty tally for `endpoints` servers. A server with a higher position is added with its first request.
    #[must_use]
    pub fn new(endpoints: usize) -> Self {
        Self {
            targets: Targets::default(),
            good: 0,
            objective: None,
            endings: EndingCounts::default(),
            first_token: Latency::default(),
            per_token: Latency::default(),
            inter_token: Latency::default(),
            total: Latency::default(),
            tokens: TokenCounts::default(),
            preemptions: 0,
            endpoints: vec![EndpointCounts::default(); endpoints],
            roles: Vec::new(),
            split: SplitCounts::default(),
            queueing: None,
            programs: None,
            timeline: Timeline::default(),
            batches: Batches::default(),
            first_arrival: None,
            last_end: Timestamp::default(),
        }
    }

    /// Counts also the requests that meet `targets`. Call it before the first request is added.
    #[must_use]
    pub fn with_targets(mut self, targets: Targets) -> Self {
        self.targets = targets;
        self
    }

    /// Counts also the requests that meet the pool's objective, if it has one. Call it before the first request is added.
    #[must_use]
    pub fn with_objective(mut self, objective: Option<Objective>) -> Self {
        self.objective = objective.map(ObjectiveCounts::new);
        self
    }

    /// Sets the roles of the servers, by their positions in the fleet.
    #[must_use]
    pub fn with_roles(mut self, roles: Vec<Roles>) -> Self {
        self.roles = roles;
        self
    }

    /// Counts one request that has ended. The order does not matter.
    pub fn add(&mut self, served: &Served) {
        match served.ending {
            Ending::Answered => self.endings.answered += 1,
            Ending::Refused => self.endings.refused += 1,
            Ending::Lost => self.endings.lost += 1,
        }
        let is_whole = served.ending == Ending::Answered;
        let times = RequestTimes {
            first_token: served.first_token,
            per_token: served.per_token().filter(|_| is_whole),
            total: is_whole.then_some(served.total),
        };
        if let Some(time) = times.first_token {
            self.first_token.add(time);
        }
        if let Some(time) = times.per_token {
            self.per_token.add(time);
        }
        if let Some((gap, gaps)) = served.gaps().filter(|_| is_whole) {
            self.inter_token.add_times(gap, gaps);
        }
        if let Some(time) = times.total {
            self.total.add(time);
        }
        self.objective.iter_mut().for_each(|counts| counts.add(served));
        self.good += u64::from(self.targets.met_by(served));
        self.batches.add(served.pair, times);
        if let Some(turn) = served.turn {
            self.programs.get_or_insert_default().add(served, turn);
        }
        self.first_arrival = Some(self.first_arrival.map_or(served.at, |first| first.min(served.at)));
        self.last_end = self.last_end.max(served.at.after(served.total));
        self.preemptions += u64::from(served.preemptions);
        match served.endpoint {
            Some(endpoint) => self.add_tokens(endpoint as usize, served),
            // A server responded, but the response does not name it.
            None if served.ending == Ending::Answered => self.count_tokens(served),
            None => {}
        }
    }

    /// Counts one request of a pool with flow control.
    pub fn queued(&mut self, queued: &Queued<'_>) {
        self.queueing.get_or_insert_default().add(queued);
    }

    /// Requests in queues; `None` in pools without flow control.
    #[must_use]
    pub fn queueing(&self) -> Option<&Queueing> {
        self.queueing.as_ref()
    }

    /// Programs of agents; `None` when the workload has none.
    #[must_use]
    pub fn programs(&self) -> Option<&Programs> {
        self.programs.as_deref()
    }

    fn count_tokens(&mut self, served: &Served) {
        self.tokens.prompt += u64::from(served.prompt_tokens);
        self.tokens.expected_cached += u64::from(served.expected_cached_tokens);
        self.tokens.cached += u64::from(served.cached_tokens);
        self.tokens.generated += u64::from(served.generated_tokens);
    }

    fn add_tokens(&mut self, endpoint: usize, served: &Served) {
        self.count_tokens(served);
        self.split.fell_back += u64::from(served.fell_back);
        // Cached tokens are those of the server that prefilled the prompt.
        let computed = match served.handover {
            None => endpoint,
            Some(handover) => {
                self.split.requests += 1;
                self.split.received_tokens += u64::from(handover.received_tokens);
                self.split.transfer += handover.transfer;
                self.counts(handover.prefill as usize).prefills += 1;
                handover.prefill as usize
            }
        };
        self.counts(endpoint).requests += 1;
        let counts = self.counts(computed);
        counts.prompt_tokens += u64::from(served.prompt_tokens);
        counts.cached_tokens += u64::from(served.cached_tokens);
    }

    fn counts(&mut self, endpoint: usize) -> &mut EndpointCounts {
        if self.endpoints.len() <= endpoint {
            self.endpoints.resize(endpoint + 1, EndpointCounts::default());
        }
        #[expect(clippy::indexing_slicing, reason = "it was resized above")]
        &mut self.endpoints[endpoint]
    }

    /// Records a sample of all servers, by their positions in the fleet. Call it in the order of time, at equal
    /// intervals.
    pub fn sample(&mut self, at: Timestamp, samples: &[Sample]) {
        for (i, sample) in samples.iter().enumerate() {
            let counts = self.counts(i);
            counts.samples += 1;
            counts.busy += u64::from(sample.running > 0);
        }
        self.timeline.add(at, samples);
    }

    /// Requests by how they ended.
    #[must_use]
    pub fn endings(&self) -> EndingCounts {
        self.endings
    }

    /// Share of the requests that were rejected or lost, 0..=1; `None` when there were no requests.
    #[must_use]
    pub fn error_rate(&self) -> Option<f64> {
        share(self.endings.unanswered(), self.endings.total())
    }

    /// From arrival to the first token (TTFT).
    #[must_use]
    pub fn first_token(&self) -> &Latency {
        &self.first_token
    }

    /// Per output token (TPOT): one figure for each response of at least
    /// [`MIN_TPOT_TOKENS`](super::served::MIN_TPOT_TOKENS) tokens.
    #[must_use]
    pub fn per_token(&self) -> &Latency {
        &self.per_token
    }

    /// Between two tokens (ITL): one figure for each gap, so that long responses count more. The gaps of one response
    /// count as their mean: the mean is exact, and percentiles are of responses by their gaps.
    #[must_use]
    pub fn inter_token(&self) -> &Latency {
        &self.inter_token
    }

    /// From arrival to the end of the response.
    #[must_use]
    pub fn total(&self) -> &Latency {
        &self.total
    }

    /// Tokens of all requests that a server accepted.
    #[must_use]
    pub fn tokens(&self) -> TokenCounts {
        self.tokens
    }

    /// Share of the prompt tokens that were cached, 0..=1; `None` if no server accepted a request.
    #[must_use]
    pub fn hit_rate(&self) -> Option<f64> {
        share(self.tokens.cached, self.tokens.prompt)
    }

    /// Number of preemptions.
    #[must_use]
    pub fn preemptions(&self) -> u64 {
        self.preemptions
    }

    /// Requests and tokens of each endpoint, by its position in the fleet.
    #[must_use]
    pub fn endpoints(&self) -> &[EndpointCounts] {
        &self.endpoints
    }

    /// Requests that were split.
    #[must_use]
    pub fn split(&self) -> SplitCounts {
        self.split
    }

    /// Roles of each endpoint, by its position in the fleet; may be shorter than the fleet.
    #[must_use]
    pub fn roles(&self) -> &[Roles] {
        &self.roles
    }

    /// Whether requests could be split.
    #[must_use]
    pub fn has_prefill_servers(&self) -> bool {
        self.roles.iter().any(|roles| roles.has(Roles::PREFILL))
    }

    /// Mean share of the time in which servers of one [`Roles::kind`] were busy, 0..=1; `None` if there are none.
    #[must_use]
    pub fn busy(&self, kind: usize) -> Option<f64> {
        let of_kind = || {
            self.endpoints.iter().zip(&self.roles).filter(|(_, roles)| roles.kind() == kind && **roles != Roles::ENCODE)
        };
        let sum = |of: fn(&EndpointCounts) -> u64| of_kind().map(|(counts, _)| of(counts)).sum();
        share(sum(|counts| counts.busy), sum(|counts| counts.samples))
    }

    /// How evenly computed prompt tokens were spread over the endpoints; `None` if there were none.
    #[must_use]
    pub fn spread(&self) -> Option<LoadSpread> {
        let computes = |i: usize| self.roles.get(i).is_none_or(|roles| *roles != Roles::ENCODE);
        let computing = (0..).zip(&self.endpoints).filter(|(i, _)| computes(*i));
        LoadSpread::of(computing.map(|(_, counts)| counts.work()))
    }

    /// Share of all requests that met the targets, 0..=1; `None` without targets or requests.
    #[must_use]
    pub fn goodput(&self) -> Option<f64> {
        share(self.good, self.endings.total()).filter(|_| self.targets.given())
    }

    /// Requests that met the pool's objective; `None` if it has none.
    #[must_use]
    pub fn objective(&self) -> Option<&ObjectiveCounts> {
        self.objective.as_ref()
    }

    /// From the first arrival to the last end.
    #[must_use]
    pub fn duration(&self) -> Duration {
        self.first_arrival.map_or(Duration::ZERO, |first| self.last_end.since(first))
    }

    /// Whole responses per second of [`Tally::duration`]; `None` if it is zero.
    #[must_use]
    pub fn throughput(&self) -> Option<f64> {
        self.per_second(self.endings.answered)
    }

    /// Generated tokens per second of [`Tally::duration`]; `None` if it is zero.
    #[must_use]
    pub fn output_rate(&self) -> Option<f64> {
        self.per_second(self.tokens.generated)
    }

    fn per_second(&self, count: u64) -> Option<f64> {
        let seconds = self.duration().as_secs_f64();
        (seconds > 0.0).then(|| count as f64 / seconds)
    }

    /// Load and hit rate over time.
    #[must_use]
    pub fn timeline(&self) -> &Timeline {
        &self.timeline
    }

    /// Means of consecutive requests, for comparisons.
    #[must_use]
    pub fn batches(&self) -> &Batches {
        &self.batches
    }
}

/// `part` by `whole`; `None` if `whole` is 0.
pub(crate) fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}
