//! The metrics of the request path. The registry is a value and not a global, so that tests can run in parallel.
//!
//! Label values are pools, outcomes, reasons and limits, so their number is bounded. Names from requests become
//! label values only in [`super::by_name`].

use super::by_name::{ByName, ByNameCollector};
use super::counts::{self, PoolCounts, PoolLabel};
use super::latency::{LatencyCounts, LatencyHistogram};
use super::pressure::{PoolPressure, Pressure};
use super::queues::{QueueDepth, QueueFamilies, QueueMetrics};
use super::redis::RedisMetrics;
use super::rejections::{RejectionCollector, RejectionCount, Rejections};
use super::reloads::Reloads;
use attache_disagg::FailedCall;
use attache_request::event::{
    DeadlineOutcome, Degraded, End, Exemplar, Limit, ReservationOutcome, SessionEnd, SplitOutcome, StreamOutcome,
};
use attache_serving::tls::HandshakeFailures;
use attache_types::clock::Timestamp;
use attache_types::error::Reason;
use attache_types::labels::Counts;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Label of a successful call to a prefill worker.
pub const LEG_OK: &str = "ok";

attache_types::labels! {
    /// Class of a response's status code.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum StatusClass {
        Informational => "1xx",
        Success => "2xx",
        Redirect => "3xx",
        ClientError => "4xx",
        ServerError => "5xx",
    }
}

/// Buckets for the time of one decision, seconds.
pub(super) const DECISION: [f64; 11] =
    [0.000_002, 0.000_005, 0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.025];

/// Bounds of the buckets of calls by Envoy, seconds.
const HOOK: [f64; 9] = [0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.025];

/// Counters of the whole process.
#[derive(Debug)]
pub struct Metrics {
    /// Streams that Envoy opened.
    pub streams_opened: Counter,
    /// Panics that were caught in request handling.
    pub panics: Counter,
    /// Invalid entries of subset hints.
    pub subset_malformed: Counter,
    /// Ejections by error responses that did not happen, because `health.maxEjectionPercent` of the endpoints with
    /// the same roles are ejected.
    pub ejections_capped: Counter,
    /// Messages that violate the ext-proc protocol.
    pub protocol_errors: Counter,
    /// Errors that model servers reported inside a response with status 200.
    pub errors_in_stream: Counter,
    /// Reloads of the configuration.
    pub reloads: Reloads,
    /// Streams that ended, by outcome.
    pub outcomes: Arc<Counts<StreamOutcome>>,
    /// Requests that exceeded a limit.
    pub limits: Arc<Counts<Limit>>,
    /// Decisions and responses in degraded mode.
    pub degraded: Arc<Counts<Degraded>>,
    /// Reservations.
    pub reservations: Arc<Counts<ReservationOutcome>>,
    /// Ended sessions.
    pub session_ends: Arc<Counts<SessionEnd>>,
    decision_seconds: Histogram,
    hook_seconds: Histogram,
    rejections: Arc<Rejections>,
    queues: QueueFamilies,
    deadlines: PoolCounts<DeadlineOutcome>,
    requests: RequestFamilies,
    /// Counters of models and tenants by name.
    pub by_name: Arc<ByName>,
    /// Counters by pool and model, which [`PressureCollector`](super::pressure::PressureCollector) shows.
    pub pressure: Arc<Pressure>,
    /// Metrics of Redis: quotas, tenant records and SLO profiles.
    pub redis: RedisMetrics,
    /// Failed handshakes of the ext-proc port; empty without TLS.
    pub handshakes: OnceLock<Arc<HandshakeFailures>>,
}

fn plain(registry: &mut Registry, name: &str, help: &str) -> Counter {
    let counter = Counter::default();
    registry.register(name, help, counter.clone());
    counter
}

impl Metrics {
    /// Creates the metrics and registers them in `registry`, whose prefix is `attache`.
    pub fn register(registry: &mut Registry) -> Arc<Self> {
        // The fields are in the order of the page.
        let outcomes = counts::register(registry, "streams", "ext-proc streams that ended, by outcome", "outcome");
        let rejections = Arc::<Rejections>::default();
        registry.register_collector(Box::new(RejectionCollector(rejections.clone())));
        let help = "how often a configured limit took effect, by limit";
        let limits = counts::register(registry, "limit_hits", help, "limit");
        let help = "decisions and responses in degraded mode, by cause";
        let degraded = counts::register(registry, "degraded", help, "mode");
        let help = "sessions that were ended, by the `header` of their last request, by a call through the `gateway` or \
                    to the `admin` port, or by another picker (`peer`)";
        let session_ends = counts::register(registry, "sessions_ended", help, "by");
        let help = "reservations: `made`; then `used` by their request, `expired`, `released` by a call, `mismatched` with \
                    the request, `endpoint_gone`; `unknown` ids of requests; `refused` because too many are open";
        let reservations = counts::register(registry, "reservations", help, "outcome");
        let decision_seconds = Histogram::new(DECISION);
        let help = "time from the last byte of the request to the decision";
        registry.register_with_unit("decision", help, Unit::Seconds, decision_seconds.clone());
        let hook_seconds = Histogram::new(HOOK);
        let help = "inside Envoy: time for which Attaché keeps a worker in one call; nothing in the ext-proc service";
        registry.register_with_unit("hook", help, Unit::Seconds, hook_seconds.clone());
        let by_name = Arc::<ByName>::default();
        registry.register_collector(Box::new(ByNameCollector(by_name.clone())));
        Arc::new(Self {
            streams_opened: plain(registry, "streams_opened", "ext-proc streams that Envoy opened"),
            panics: plain(registry, "panics", "caught panics"),
            subset_malformed: plain(
                registry,
                "subset_entries_malformed",
                "entries of the subset hint that Attaché could not parse",
            ),
            ejections_capped: plain(
                registry,
                "ejections_capped",
                "error responses that ejected no endpoint, because `health.maxEjectionPercent` are ejected",
            ),
            protocol_errors: plain(registry, "protocol_errors", "ext-proc messages that violate the protocol"),
            errors_in_stream: plain(
                registry,
                "errors_in_stream",
                "errors that servers sent inside a response with status 200",
            ),
            reloads: Reloads::register(registry),
            outcomes,
            limits,
            degraded,
            reservations,
            session_ends,
            decision_seconds,
            hook_seconds,
            rejections,
            queues: QueueFamilies::register(registry),
            deadlines: PoolCounts::register(registry, "deadlines", DEADLINES, "outcome"),
            redis: RedisMetrics::register(registry),
            requests: RequestFamilies::register(registry),
            by_name,
            pressure: Arc::default(),
            handshakes: OnceLock::new(),
        })
    }

    /// Counts a rejection by reason, and by pool if it is known.
    pub fn rejection(&self, pool: Option<&str>, reason: Reason) {
        self.rejections.add(pool, reason);
    }

    /// Counts a call to a prefill worker: [`LEG_OK`] or a code of [`attache_disagg::Failure`].
    pub fn prefill_leg(&self, outcome: &'static str) {
        self.requests.legs.get_or_create_owned(&[("outcome", outcome)]).inc();
    }

    /// Records the time of a decision.
    pub fn decided_in(&self, duration: Duration) {
        self.decision_seconds.observe(duration.as_secs_f64());
    }

    /// Records how long a worker of Envoy was kept.
    pub fn hook_took(&self, duration: Duration) {
        self.hook_seconds.observe(duration.as_secs_f64());
    }

    /// The metrics of the queues of one pool.
    #[must_use]
    pub fn queues(&self, pool: &str) -> QueueMetrics {
        self.queues.pool(pool, self.deadlines.pool(pool))
    }

    /// The content of the queue of one pool.
    #[must_use]
    pub fn queue_depth(&self, pool: &str) -> QueueDepth {
        self.queues.depth(pool)
    }

    /// The reasons for which requests were rejected since the start, with the number of requests.
    #[must_use]
    pub fn rejection_counts(&self) -> Vec<(&'static str, u64)> {
        self.rejections.totals()
    }

    /// The rejections since the start, by pool and reason; reasons that never occurred are left out.
    #[must_use]
    pub fn rejections(&self) -> Vec<RejectionCount> {
        self.rejections.all()
    }

    /// The metrics of one pool, looked up once for all its requests.
    #[must_use]
    pub fn pool(&self, name: &str) -> PoolMetrics {
        self.rejections.know(name);
        let deadlines = self.deadlines.pool(name);
        // Pools without queues show a queue depth of 0.
        drop(self.queues.pool(name, deadlines.clone()));
        self.requests.pool(name, deadlines, self.pressure.pool(name))
    }

    /// Removes the series of a deleted pool. The outcomes of its last requests are not shown any more; a pool of the
    /// same name starts from zero.
    pub fn forget(&self, pool: &str) {
        self.requests.forget(pool);
        self.rejections.forget(pool);
        self.pressure.forget(pool);
        self.queues.forget(pool);
        self.deadlines.forget(pool);
    }
}

/// Help text of the deadline metric.
const DEADLINES: &str = "requests with a deadline, of pools with `deadlineAdmission`: `fits`, `waits` in the queue, \
                         `unknown` because nothing is learned; rejected are `late` (no server meets it), `queue` (too \
                         long), `passed` (dequeued too late)";

/// Metrics of routed requests, by pool.
#[derive(Debug)]
struct RequestFamilies {
    ends: PoolCounts<End>,
    statuses: PoolCounts<StatusClass>,
    ttft: Family<PoolLabel, LatencyHistogram>,
    duration: Family<PoolLabel, LatencyHistogram>,
    prompt_tokens: Family<PoolLabel, Counter>,
    cached_tokens: Family<PoolLabel, Counter>,
    completion_tokens: Family<PoolLabel, Counter>,
    diverted: Family<PoolLabel, Counter>,
    splits: PoolCounts<SplitOutcome>,
    legs: Family<[(&'static str, &'static str); 1], Counter>,
    prefill_seconds: Family<PoolLabel, LatencyHistogram>,
}

/// Registers a counter for each pool.
fn tokens(registry: &mut Registry, name: &str, help: &str) -> Family<PoolLabel, Counter> {
    let family = Family::default();
    registry.register(name, help, family.clone());
    family
}

/// Registers a histogram for each pool.
fn seconds(registry: &mut Registry, name: &str, help: &str) -> Family<PoolLabel, LatencyHistogram> {
    let family = Family::default();
    registry.register_with_unit(name, help, Unit::Seconds, family.clone());
    family
}

fn legs(registry: &mut Registry) -> Family<[(&'static str, &'static str); 1], Counter> {
    let legs = Family::<[(&'static str, &'static str); 1], Counter>::default();
    for outcome in FailedCall::ALL.map(FailedCall::label).into_iter().chain([LEG_OK]) {
        drop(legs.get_or_create_owned(&[("outcome", outcome)]));
    }
    registry.register("prefill_legs", "requests to prefill servers, by outcome", legs.clone());
    legs
}

impl RequestFamilies {
    fn register(registry: &mut Registry) -> Self {
        // The fields are in the order of the page.
        Self {
            ends: PoolCounts::register(
                registry,
                "requests_ended",
                "routed requests, by how they ended; `evicted` means preempted while in flight, `contradicted` that \
                 a later part of a form contradicts its model, `connect_failure` and `gateway` that Envoy responded in \
                 place of the endpoint",
                "end",
            ),
            statuses: PoolCounts::register(registry, "responses", "responses, by class of their status", "status"),
            ttft: seconds(
                registry,
                "time_to_first_byte",
                "time from the request headers to the first byte of a streamed response; others are in `request_duration`",
            ),
            duration: seconds(registry, "request_duration", "time from the request headers to the end of the response"),
            prompt_tokens: tokens(registry, "prompt_tokens", "prompt tokens, as servers report them"),
            cached_tokens: tokens(registry, "cached_tokens", "prompt tokens that servers found in a prefix cache"),
            completion_tokens: tokens(registry, "completion_tokens", "generated tokens"),
            diverted: tokens(
                registry,
                "diverted",
                "requests that went elsewhere than to the endpoint of their prefix because of its load; a high rate \
                 often means that the pool is too small",
            ),
            splits: PoolCounts::register(
                registry,
                "disaggregation",
                "requests of pools with `disaggregation`: `split`; `whole` by choice; `local` because no prefill server \
                 answered or none was there; `refused` for the same reasons",
                "course",
            ),
            legs: legs(registry),
            prefill_seconds: seconds(
                registry,
                "prefill",
                "time from the decision until another server had computed the prompt, over all attempts",
            ),
        }
    }

    fn pool(&self, name: &str, deadlines: Arc<Counts<DeadlineOutcome>>, pressure: Arc<PoolPressure>) -> PoolMetrics {
        let label = PoolLabel::of(name);
        PoolMetrics {
            ends: self.ends.pool(name),
            statuses: self.statuses.pool(name),
            ttft: self.ttft.get_or_create_owned(&label),
            duration: self.duration.get_or_create_owned(&label),
            prompt_tokens: self.prompt_tokens.get_or_create_owned(&label),
            cached_tokens: self.cached_tokens.get_or_create_owned(&label),
            completion_tokens: self.completion_tokens.get_or_create_owned(&label),
            diverted: self.diverted.get_or_create_owned(&label),
            pressure,
            splits: self.splits.pool(name),
            prefill_seconds: self.prefill_seconds.get_or_create_owned(&label),
            deadlines,
        }
    }

    fn forget(&self, pool: &str) {
        let label = PoolLabel::of(pool);
        self.ends.forget(pool);
        self.statuses.forget(pool);
        self.splits.forget(pool);
        for histograms in [&self.ttft, &self.duration, &self.prefill_seconds] {
            histograms.remove(&label);
        }
        for counters in [&self.prompt_tokens, &self.cached_tokens, &self.completion_tokens, &self.diverted] {
            counters.remove(&label);
        }
    }
}

/// Counts of one pool since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolTotals {
    /// Routed requests that ended.
    pub requests: u64,
    /// Responses with a 5xx status.
    pub errors: u64,
    /// Prompt tokens that model servers reported.
    pub prompt_tokens: u64,
    /// Prompt tokens that were found in a prefix cache.
    pub cached_tokens: u64,
    /// Times to the first byte of streamed responses.
    pub ttft: LatencyCounts,
    /// Times to the end of complete responses.
    pub duration: LatencyCounts,
}

/// The metrics of one pool.
#[derive(Debug)]
pub struct PoolMetrics {
    ends: Arc<Counts<End>>,
    statuses: Arc<Counts<StatusClass>>,
    ttft: LatencyHistogram,
    duration: LatencyHistogram,
    /// Prompt tokens that model servers reported.
    pub prompt_tokens: Counter,
    /// Prompt tokens that were found in a prefix cache.
    pub cached_tokens: Counter,
    /// Generated tokens that model servers reported.
    pub completion_tokens: Counter,
    diverted: Counter,
    pressure: Arc<PoolPressure>,
    /// Requests that could be split.
    pub splits: Arc<Counts<SplitOutcome>>,
    prefill_seconds: LatencyHistogram,
    /// Requests with a deadline.
    pub deadlines: Arc<Counts<DeadlineOutcome>>,
}

impl PoolMetrics {
    /// The current totals.
    #[must_use]
    pub fn totals(&self) -> PoolTotals {
        PoolTotals {
            requests: self.ends.sum(),
            errors: self.statuses.get(StatusClass::ServerError),
            prompt_tokens: self.prompt_tokens.get(),
            cached_tokens: self.cached_tokens.get(),
            ttft: self.ttft.counts(),
            duration: self.duration.counts(),
        }
    }

    /// Counts a request for `model` that was diverted from the endpoint of its prefix because of its load.
    pub fn diverted(&self, model: &str, now: Timestamp) {
        self.diverted.inc();
        self.pressure.divert(model, now);
    }

    /// Number of calls of [`PoolMetrics::diverted`].
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn all_diverted(&self) -> u64 {
        self.diverted.get()
    }

    /// Records the time of a prefill on another worker.
    pub fn prefilled(&self, after: Duration) {
        self.prefill_seconds.observe(after, None);
    }

    /// Counts the end of a routed request.
    pub fn ended(&self, end: End, duration: Duration, exemplar: Option<Exemplar>) {
        self.ends.count(end);
        if end == End::Complete {
            self.duration.observe(duration, exemplar);
        }
    }

    /// Counts the start of a response.
    pub fn status(&self, status: u16) {
        let class = usize::from(status / 100).checked_sub(1).and_then(|class| StatusClass::ALL.get(class));
        class.into_iter().for_each(|class| self.statuses.count(*class));
    }

    /// Records the time to the first byte of a streamed response.
    pub fn first_byte(&self, after: Duration, exemplar: Option<Exemplar>) {
        self.ttft.observe(after, exemplar);
    }
}
