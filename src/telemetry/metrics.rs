//! The metrics of the request path. The registry is a value and not a global, so that tests can run in parallel.
//!
//! Label values are pools, outcomes, reasons and limits, so their number is bounded. Names from requests become
//! label values only in [`super::by_name`].

use super::by_name::{ByName, ByNameCollector};
use super::deadlines::{DeadlineFamily, DeadlineMetrics};
use super::latency::{LatencyCounts, LatencyHistogram};
use super::pressure::{PoolPressure, Pressure};
use super::queues::{QueueDepth, QueueFamilies, QueueMetrics};
use super::redis::RedisMetrics;
use super::rejections::{RejectionCollector, RejectionCount, Rejections};
use super::reloads::Reloads;
use attache_disagg::Failure;
use attache_protocol::usage::UnreadCount;
use attache_request::event::{Degraded, End, Exemplar, Limit, SplitOutcome, StreamOutcome};
use attache_scheduling::Signal;
use attache_serving::tls::HandshakeFailures;
use attache_types::clock::Timestamp;
use attache_types::error::Reason;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Label of a successful call to a prefill worker.
pub const LEG_OK: &str = "ok";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LimitLabel {
    limit: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModeLabel {
    mode: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolLabel {
    pool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolCourseLabel {
    pool: String,
    course: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolEndLabel {
    pool: String,
    end: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PoolStatusLabel {
    pool: String,
    status: &'static str,
}

/// Classes of response status codes.
const STATUSES: [&str; 5] = ["1xx", "2xx", "3xx", "4xx", "5xx"];

/// Buckets for the time of one decision, seconds.
pub(super) const DECISION: [f64; 11] =
    [0.000_002, 0.000_005, 0.000_01, 0.000_02, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.005, 0.025];

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
    decision_seconds: Histogram,
    outcomes: [Counter; 7],
    rejections: Arc<Rejections>,
    limits: [(Limit, Counter); 14],
    degraded: Vec<(Degraded, &'static str, Counter)>,
    ends: Family<PoolEndLabel, Counter>,
    statuses: Family<PoolStatusLabel, Counter>,
    ttft: Family<PoolLabel, LatencyHistogram>,
    duration: Family<PoolLabel, LatencyHistogram>,
    prompt_tokens: Family<PoolLabel, Counter>,
    cached_tokens: Family<PoolLabel, Counter>,
    completion_tokens: Family<PoolLabel, Counter>,
    diverted: Family<PoolLabel, Counter>,
    splits: Family<PoolCourseLabel, Counter>,
    prefill_seconds: Family<PoolLabel, LatencyHistogram>,
    legs: Family<OutcomeLabel, Counter>,
    queues: QueueFamilies,
    deadlines: DeadlineFamily,
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

fn limit_counters(registry: &mut Registry) -> [(Limit, Counter); 14] {
    let limits = Family::<LimitLabel, Counter>::default();
    registry.register("limit_hits", "how often a configured limit took effect, by limit", limits.clone());
    let limit = |l: Limit, label| (l, limits.get_or_create_owned(&LimitLabel { limit: label }));
    [
        limit(Limit::BodyBytes, "body_bytes"),
        limit(Limit::BufferedBytes, "buffered_bytes"),
        limit(Limit::BodyMessages, "body_messages"),
        limit(Limit::UploadBytesPerClient, "upload_bytes_per_client"),
        limit(Limit::UploadRate, "upload_rate"),
        limit(Limit::HeaderBytes, "header_bytes"),
        limit(Limit::Headers, "headers"),
        limit(Limit::RequestTimeout, "request_timeout"),
        limit(Limit::IdleTimeout, "idle_timeout"),
        limit(Limit::Parser, "parser"),
        limit(Limit::ReportedTokens, "reported_tokens"),
        limit(Limit::PromptBytes, "prompt_bytes"),
        limit(Limit::TokenizeQueue, "tokenize_queue"),
        limit(Limit::Streams, "streams"),
    ]
}

fn degraded_counters(registry: &mut Registry) -> Vec<(Degraded, &'static str, Counter)> {
    let degraded = Family::<ModeLabel, Counter>::default();
    registry.register("degraded", "decisions and responses in degraded mode, by cause", degraded.clone());
    let mode = |m: Degraded, label| (m, label, degraded.get_or_create_owned(&ModeLabel { mode: label }));
    let mut modes = vec![
        mode(Degraded::EncodedBody, "encoded_body"),
        mode(Degraded::EncodedResponse, "encoded_response"),
        mode(Degraded::Unparseable, "unparseable"),
        mode(Degraded::UnreadForm, "unread_form"),
        mode(Degraded::StrategyPanic, "strategy_panic"),
        mode(Degraded::AllEjected, "all_ejected"),
        mode(Degraded::LookupPanic, "lookup_panic"),
        mode(Degraded::ReadingLate, "reading_late"),
        mode(Degraded::Untokenized, "untokenized"),
        mode(Degraded::NoTimeToSplit, "no_time_to_split"),
        mode(Degraded::NoTimeToQueue, "no_time_to_queue"),
        mode(Degraded::NoBody, "no_body"),
        mode(Degraded::NoPrefillEndpoint, "no_prefill_endpoint"),
        mode(Degraded::AttemptsUntold, "attempts_untold"),
        mode(Degraded::DiscoveryStale, "discovery_stale"),
        mode(Degraded::Lacking(Signal::Metrics), "no_metrics"),
        mode(Degraded::Lacking(Signal::Prefix), "no_prefix"),
        mode(Degraded::Lacking(Signal::Prompt), "no_prompt"),
        mode(Degraded::Lacking(Signal::Latency), "no_latency"),
        mode(Degraded::Lacking(Signal::User), "no_user"),
        mode(Degraded::Lacking(Signal::Profile), "no_profile"),
    ];
    modes.extend(UnreadCount::ALL.map(|reason| mode(Degraded::UnreadCount(reason), reason.label())));
    modes
}

impl Metrics {
    /// Creates the metrics and registers them in `registry`, whose prefix is `attache`.
    pub fn register(registry: &mut Registry) -> Arc<Self> {
        let outcomes = Family::<OutcomeLabel, Counter>::default();
        registry.register("streams", "ext-proc streams that ended, by outcome", outcomes.clone());
        let rejections = Arc::<Rejections>::default();
        registry.register_collector(Box::new(RejectionCollector(rejections.clone())));
        let limits = limit_counters(registry);
        let degraded = degraded_counters(registry);
        let decision_seconds = Histogram::new(DECISION);
        let help = "time from the last byte of the request to the decision";
        registry.register_with_unit("decision", help, Unit::Seconds, decision_seconds.clone());
        let metrics = Self {
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
            decision_seconds,
            outcomes: StreamOutcome::ALL.map(|o| outcomes.get_or_create_owned(&OutcomeLabel { outcome: o.label() })),
            rejections,
            limits,
            degraded,
            ends: Family::default(),
            statuses: Family::default(),
            ttft: Family::default(),
            duration: Family::default(),
            prompt_tokens: Family::default(),
            cached_tokens: Family::default(),
            completion_tokens: Family::default(),
            diverted: Family::default(),
            splits: Family::default(),
            prefill_seconds: Family::default(),
            legs: Family::default(),
            queues: QueueFamilies::register(registry),
            deadlines: DeadlineFamily::register(registry),
            by_name: Arc::default(),
            pressure: Arc::default(),
            redis: RedisMetrics::register(registry),
            handshakes: OnceLock::new(),
        };
        metrics.register_families(registry);
        Arc::new(metrics)
    }

    /// Registers the metrics of routed requests.
    fn register_families(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(ByNameCollector(self.by_name.clone())));
        for outcome in Failure::CODES.into_iter().chain([LEG_OK]) {
            drop(self.legs.get_or_create_owned(&OutcomeLabel { outcome }));
        }
        registry.register(
            "requests_ended",
            "routed requests, by how they ended; `evicted` means preempted while in flight, `contradicted` that \
             a later part of a form contradicts its model, `connect_failure` and `gateway` that Envoy responded in \
             place of the endpoint",
            self.ends.clone(),
        );
        registry.register("responses", "responses, by class of their status", self.statuses.clone());
        let seconds = Unit::Seconds;
        registry.register_with_unit(
            "time_to_first_byte",
            "time from the request headers to the first byte of a streamed response; others are in `request_duration`",
            seconds.clone(),
            self.ttft.clone(),
        );
        registry.register_with_unit(
            "request_duration",
            "time from the request headers to the end of the response",
            seconds,
            self.duration.clone(),
        );
        registry.register("prompt_tokens", "prompt tokens, as servers report them", self.prompt_tokens.clone());
        registry.register(
            "cached_tokens",
            "prompt tokens that servers found in a prefix cache",
            self.cached_tokens.clone(),
        );
        registry.register("completion_tokens", "generated tokens", self.completion_tokens.clone());
        let help = "requests that went elsewhere than to the endpoint of their prefix because of its load; a high \
                    rate often means that the pool is too small";
        registry.register("diverted", help, self.diverted.clone());
        let help = "requests of pools with `disaggregation`: `split`; `whole` by choice; `local` because no prefill \
                    server answered or none was there; `refused` for the same reasons";
        registry.register("disaggregation", help, self.splits.clone());
        let help = "requests to prefill servers, by outcome";
        registry.register("prefill_legs", help, self.legs.clone());
        let help = "time from the decision until another server had computed the prompt, over all attempts";
        registry.register_with_unit("prefill", help, Unit::Seconds, self.prefill_seconds.clone());
    }

    /// Counts the outcome of a stream.
    pub fn outcome(&self, outcome: StreamOutcome) {
        if let Some(counter) = StreamOutcome::ALL.iter().position(|o| *o == outcome).and_then(|i| self.outcomes.get(i))
        {
            counter.inc();
        }
    }

    /// Number of streams that ended with `outcome`.
    #[must_use]
    pub fn outcome_count(&self, outcome: StreamOutcome) -> u64 {
        let position = StreamOutcome::ALL.iter().position(|o| *o == outcome);
        position.and_then(|i| self.outcomes.get(i)).map_or(0, Counter::get)
    }

    /// Counts a rejection by reason, and by pool if it is known.
    pub fn rejection(&self, pool: Option<&str>, reason: Reason) {
        self.rejections.add(pool, reason);
    }

    /// Counts a request that exceeded this limit.
    pub fn limit(&self, limit: Limit) {
        if let Some((_, counter)) = self.limits.iter().find(|(l, _)| *l == limit) {
            counter.inc();
        }
    }

    /// Counts a decision in this degraded mode.
    pub fn degraded(&self, mode: Degraded) {
        if let Some((.., counter)) = self.degraded.iter().find(|(m, ..)| *m == mode) {
            counter.inc();
        }
    }

    /// Number of requests that exceeded this limit.
    #[cfg(any(test, feature = "testing"))]
    pub fn limit_count(&self, limit: Limit) -> u64 {
        self.limits.iter().find(|(l, _)| *l == limit).map_or(0, |(_, counter)| counter.get())
    }

    /// Number of decisions in this degraded mode.
    #[cfg(any(test, feature = "testing"))]
    pub fn degraded_count(&self, mode: Degraded) -> u64 {
        self.degraded.iter().find(|(m, ..)| *m == mode).map_or(0, |(.., counter)| counter.get())
    }

    /// The degraded modes that have occurred since the start, by their labels, with the number of times.
    #[must_use]
    pub fn degraded_modes(&self) -> Vec<(&'static str, u64)> {
        let counts = self.degraded.iter().map(|(_, label, counter)| (*label, counter.get()));
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// Counts a call to a prefill worker: [`LEG_OK`] or a [`Failure::code`].
    pub fn prefill_leg(&self, outcome: &'static str) {
        self.legs.get_or_create_owned(&OutcomeLabel { outcome }).inc();
    }

    /// Records the time of a decision.
    pub fn decided_in(&self, duration: Duration) {
        self.decision_seconds.observe(duration.as_secs_f64());
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
        let label = PoolLabel { pool: name.to_owned() };
        self.rejections.know(name);
        // Pools without queues show a queue depth of 0.
        drop(self.queues.pool(name, self.deadlines.pool(name)));
        let end = |e: End| self.ends.get_or_create_owned(&PoolEndLabel { pool: name.to_owned(), end: e.label() });
        let status = |status| self.statuses.get_or_create_owned(&PoolStatusLabel { pool: name.to_owned(), status });
        PoolMetrics {
            ends: End::ALL.map(end),
            statuses: STATUSES.map(status),
            ttft: self.ttft.get_or_create_owned(&label),
            duration: self.duration.get_or_create_owned(&label),
            prompt_tokens: self.prompt_tokens.get_or_create_owned(&label),
            cached_tokens: self.cached_tokens.get_or_create_owned(&label),
            completion_tokens: self.completion_tokens.get_or_create_owned(&label),
            diverted: self.diverted.get_or_create_owned(&label),
            pressure: self.pressure.pool(name),
            splits: SplitOutcome::ALL.map(|outcome| {
                self.splits.get_or_create_owned(&PoolCourseLabel { pool: name.to_owned(), course: outcome.label() })
            }),
            prefill_seconds: self.prefill_seconds.get_or_create_owned(&label),
            deadlines: self.deadlines.pool(name),
        }
    }

    /// Removes the series of a deleted pool. The outcomes of its last requests are not shown any more; a pool of the
    /// same name starts from zero.
    pub fn forget(&self, pool: &str) {
        let label = PoolLabel { pool: pool.to_owned() };
        for end in End::ALL {
            self.ends.remove(&PoolEndLabel { pool: pool.to_owned(), end: end.label() });
        }
        for status in STATUSES {
            self.statuses.remove(&PoolStatusLabel { pool: pool.to_owned(), status });
        }
        for outcome in SplitOutcome::ALL {
            self.splits.remove(&PoolCourseLabel { pool: pool.to_owned(), course: outcome.label() });
        }
        self.prefill_seconds.remove(&label);
        for histograms in [&self.ttft, &self.duration] {
            histograms.remove(&label);
        }
        for counters in [&self.prompt_tokens, &self.cached_tokens, &self.completion_tokens, &self.diverted] {
            counters.remove(&label);
        }
        self.rejections.forget(pool);
        self.pressure.forget(pool);
        self.queues.forget(pool);
        self.deadlines.forget(pool);
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
    ends: [Counter; End::ALL.len()],
    statuses: [Counter; 5],
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
    splits: [Counter; 4],
    prefill_seconds: LatencyHistogram,
    /// Metrics of requests with a deadline.
    pub deadlines: DeadlineMetrics,
}

impl PoolMetrics {
    /// The current totals.
    #[must_use]
    pub fn totals(&self) -> PoolTotals {
        let [.., server_errors] = &self.statuses;
        PoolTotals {
            requests: self.ends.iter().map(Counter::get).sum(),
            errors: server_errors.get(),
            prompt_tokens: self.prompt_tokens.get(),
            cached_tokens: self.cached_tokens.get(),
            ttft: self.ttft.counts(),
            duration: self.duration.counts(),
        }
    }

    /// Counts the outcome of a request that could be split.
    pub fn split(&self, outcome: SplitOutcome) {
        if let Some(counter) = SplitOutcome::ALL.iter().position(|o| *o == outcome).and_then(|i| self.splits.get(i)) {
            counter.inc();
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
        if let Some(counter) = End::ALL.iter().position(|e| *e == end).and_then(|i| self.ends.get(i)) {
            counter.inc();
        }
        if end == End::Complete {
            self.duration.observe(duration, exemplar);
        }
    }

    /// Counts the start of a response.
    pub fn status(&self, status: u16) {
        if let Some(counter) = usize::from(status / 100).checked_sub(1).and_then(|i| self.statuses.get(i)) {
            counter.inc();
        }
    }

    /// Records the time to the first byte of a streamed response.
    pub fn first_byte(&self, after: Duration, exemplar: Option<Exemplar>) {
        self.ttft.observe(after, exemplar);
    }
}
