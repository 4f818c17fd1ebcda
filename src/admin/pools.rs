//! Metrics of pools, endpoints and feeds, read from their stores at each scrape.
//!
//! They are here and not in `telemetry`: the request path uses that crate, and must not depend on discovery and scrapes.

use arc_swap::ArcSwap;
use attache_discovery::dns::DnsStats;
use attache_discovery::file::FileStats;
use attache_discovery::kube::KubeStats;
use attache_kv_events::{Count, KvEventStats};
use attache_pool::health::{Availability, Contact, HealthPolicy};
use attache_pool::{EndpointState, Engine, SnapshotStore};
use attache_prefix::cache::PrefixCache;
use attache_scrape::{ErrorReason, ScrapeStats};
use attache_telemetry::metrics::PoolMetrics;
use attache_telemetry::queues::{BandDepths, QueueDepth};
use attache_tokenize::stats::{Reason, RemoteStats};
use attache_types::clock::{Clock, Timestamp};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use std::fmt::Error;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

mod remote;
pub(crate) mod work;

/// The parts of one pool that the collector reads.
#[derive(Clone, Debug)]
pub struct PoolView {
    /// Name of the pool, the label `pool`.
    pub name: Arc<str>,
    /// Scheduler with the strategies of the pool.
    pub strategy: String,
    /// Age from which metrics are stale.
    pub stale_after: Duration,
    /// Snapshots of the endpoints.
    pub store: Arc<SnapshotStore>,
    /// Decides which endpoints are ejected.
    pub health: HealthPolicy,
    /// Counters of the scraper of this pool.
    pub scrape: Arc<ScrapeStats>,
    /// Counters of DNS lookups for this pool.
    pub dns: Arc<DnsStats>,
    /// Counters of the endpoints file.
    pub file: Arc<FileStats>,
    /// Counters of discovery through Kubernetes, if it is used.
    pub kube: Option<Arc<KubeStats>>,
    /// Metrics of the requests of the pool.
    pub metrics: Arc<PoolMetrics>,
    /// Content of the queue.
    pub queue: QueueDepth,
    /// Reads priority and queue depth of each band of the queue.
    pub bands: BandDepths,
    /// Tokenizer and caches of prompts.
    pub tokenizer: &'static str,
    /// Prefix index of the pool.
    pub prefix: Arc<PrefixCache>,
    /// Counters of KV events, if they are used.
    pub kv_events: Option<Arc<KvEventStats>>,
    /// Counters of remote tokenizers, if they are used.
    pub remote: Option<Arc<RemoteStats>>,
}

/// The views of all pools, replaced on a reload.
#[derive(Debug)]
pub struct PoolViews {
    views: ArcSwap<Vec<PoolView>>,
    clock: Clock,
}

attache_types::labels! {
    /// Whether an endpoint gets requests.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
    #[serde(rename_all = "kebab-case")]
    pub enum EndpointStanding {
        /// It gets requests without restriction. It has responded, or it is never scraped.
        Ready => "ready",
        /// It gets requests without restriction, but it has not responded yet.
        NotReached => "not-reached",
        /// It gets requests, but the last scrape or request could not connect.
        Unreachable => "unreachable",
        /// It gets a single request as a probe.
        HalfOpen => "half-open",
        /// It recovered recently and gets a growing share.
        SlowStart => "slow-start",
        /// It is ejected after failures.
        Ejected => "ejected",
        /// It is draining and gets no new requests.
        Draining => "draining",
    }
}

impl EndpointStanding {
    /// The standing of an endpoint at this time.
    #[must_use]
    pub fn of(state: &EndpointState, health: &HealthPolicy, now: Timestamp) -> Self {
        if state.endpoint.spec.draining {
            return EndpointStanding::Draining;
        }
        let asked = state.endpoint.spec.engine != Engine::None;
        match state.endpoint.health.availability(now, health) {
            Availability::Open => match state.endpoint.health.contact() {
                Contact::Unreachable => EndpointStanding::Unreachable,
                Contact::Unknown if asked => EndpointStanding::NotReached,
                Contact::Unknown | Contact::Reached => EndpointStanding::Ready,
            },
            Availability::SlowStart(_) => EndpointStanding::SlowStart,
            Availability::HalfOpen => EndpointStanding::HalfOpen,
            Availability::Ejected => EndpointStanding::Ejected,
        }
    }
}

impl PoolViews {
    /// Creates a set without pools.
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self { views: ArcSwap::default(), clock }
    }

    /// Replaces the views of all pools.
    pub fn set(&self, views: Vec<PoolView>) {
        self.views.store(Arc::new(views));
    }

    /// The current views of all pools.
    #[must_use]
    pub fn load(&self) -> Arc<Vec<PoolView>> {
        self.views.load_full()
    }

    /// Seconds since the endpoint's last successful scrape; `None` before the first.
    #[must_use]
    pub fn metrics_age(&self, state: &EndpointState) -> Option<f64> {
        state.metrics().map(|m| self.clock.now().since(m.scraped_at).as_secs_f64())
    }
}

/// The collector that adds [`PoolViews`] to the registry.
#[derive(Debug)]
pub struct PoolCollector(pub Arc<PoolViews>);

type EndpointGauge = (&'static str, &'static str, fn(&PoolViews, &PoolView, &EndpointState) -> Option<f64>);

/// A gauge for each endpoint: name, help, value.
const ENDPOINT_GAUGES: &[EndpointGauge] = &[
    ("endpoint_in_flight", "requests in flight on the endpoint", |_, _, s| {
        Some(f64::from(s.endpoint.ledger.in_flight()))
    }),
    ("endpoint_prefill_tokens", "prompt tokens of requests in flight without a first byte", |_, _, s| {
        u32::try_from(s.endpoint.ledger.prefill_tokens()).ok().map(f64::from)
    }),
    ("endpoint_waiting", "waiting requests, as the server reports them", |_, _, s| {
        s.metrics().map(|m| f64::from(m.waiting))
    }),
    ("endpoint_running", "running requests, as the server reports them", |_, _, s| {
        s.metrics().map(|m| f64::from(m.running))
    }),
    ("endpoint_kv_usage_ratio", "KV cache in use, 0 to 1, as the server reports it", |_, _, s| {
        s.metrics().map(|m| f64::from(m.kv_usage))
    }),
    (
        "endpoint_ejection_seconds",
        "time until a request probes the endpoint; absent while it is in use",
        |views, pool, s| {
            let ejection = s.endpoint.health.ejection(views.clock.now(), &pool.health)?;
            Some(ejection.returns_in.as_secs_f64())
        },
    ),
    ("endpoint_metrics_age_seconds", "age of the latest scraped metrics", |views, _, s| views.metrics_age(s)),
    (
        "endpoint_cache_weight",
        "blocks that the cache of the endpoint took in, with a half-life of two minutes",
        |views, pool, s| Some(pool.prefix.weight(s.endpoint.id, views.clock.now())),
    ),
];

type PoolCounter = (&'static str, &'static str, fn(&PoolView) -> u64);

/// A counter for each pool: name, help, value.
const POOL_COUNTERS: &[PoolCounter] = &[
    ("scrape_pages", "successful scrapes", |p| p.scrape.pages()),
    ("scrape_bytes", "bytes of scraped metrics", |p| p.scrape.bytes()),
    ("scrape_restarts", "restarts of servers that Attaché noticed", |p| p.scrape.restarts()),
    ("scrape_malformed_lines", "lines of scraped metrics that Attaché could not parse", |p| {
        p.scrape.malformed_lines()
    }),
    ("scrape_unusable_samples", "samples that are NaN, infinite, negative or not a number", |p| {
        p.scrape.unusable_samples()
    }),
    ("model_lists", "responses of servers to `/v1/models` that Attaché read", |p| p.scrape.model_lists()),
    ("model_list_failures", "failed requests for `/v1/models`", |p| p.scrape.model_list_failures()),
    ("dns_lookups", "successful DNS lookups", |p| p.dns.lookups()),
    ("dns_failures", "failed DNS lookups", |p| p.dns.failures()),
    ("dns_addresses_left_out", "addresses beyond 4,096 in one DNS answer, counted at each lookup", |p| {
        p.dns.left_out()
    }),
    ("endpoints_file_reads", "successful reads of the endpoints file", |p| p.file.reads()),
    ("endpoints_file_failures", "failed reads of the endpoints file", |p| p.file.failures()),
    ("endpoints_file_invalid_entries", "entries of the endpoints file that Attaché ignored", |p| p.file.invalid()),
    ("prefix_lookups", "prompts looked up in the prefix index", |p| p.prefix.stats().lookups.load(Relaxed)),
    ("prefix_lookup_tokens", "tokens of the prompts looked up in the prefix index", |p| {
        p.prefix.stats().prompt_tokens.load(Relaxed)
    }),
    (
        "prefix_matched_tokens",
        "tokens that the chosen endpoint was expected to hold, speculative entries included",
        |p| p.prefix.stats().matched_tokens.load(Relaxed),
    ),
    ("prefix_foretold_tokens", "tokens expected in the cache, of responses that report cached tokens", |p| {
        p.prefix.stats().foretold_tokens.load(Relaxed)
    }),
    ("prefix_reported_tokens", "cached tokens of those responses, as servers report them", |p| {
        p.prefix.stats().reported_tokens.load(Relaxed)
    }),
    (
        "prefix_adapter_names_dropped",
        "names of LoRA adapters beyond those that Attaché keeps of one server, or of a pool",
        |p| p.prefix.residents().adapters().dropped(),
    ),
    (
        "prefix_index_evicted_reported_blocks",
        "blocks of servers over their share that the full prefix index forgot, although they had been reported",
        |p| p.prefix.index().stats().evicted_reported,
    ),
    ("prefix_index_refused_blocks", "blocks that did not fit into the prefix index", |p| {
        p.prefix.index().stats().refused_blocks
    }),
    ("carried_kept_turns", "conversation turns that decode servers keep for the next prefill", |p| {
        p.prefix.carried().stats().kept.load(Relaxed)
    }),
    ("carried_given_turns", "turns that a prefill server was asked to fetch", |p| {
        p.prefix.carried().stats().given.load(Relaxed)
    }),
    ("carried_given_tokens", "tokens of those turns", |p| p.prefix.carried().stats().given_tokens.load(Relaxed)),
];

type PoolGauge = (&'static str, &'static str, fn(&PoolView) -> f64);

/// A gauge for each pool: name, help, value.
const POOL_GAUGES: &[PoolGauge] = &[
    ("served_models", "models that servers list, if `exchange.models` is `pool`", |p| p.scrape.served_models() as f64),
    ("prefix_index_bytes", "memory of the prefix index", |p| p.prefix.index().stats().bytes as f64),
    (
        "prefix_index_budget_bytes",
        "memory limit of the prefix index: `prefixCache.maxBytes`, or less if the system cannot reserve it",
        |p| p.prefix.index().stats().budget_bytes as f64,
    ),
    ("prefix_index_blocks", "blocks in the prefix index; a block counts once, however many endpoints hold it", |p| {
        p.prefix.index().stats().blocks as f64
    }),
    ("prefix_adapter_names", "names of LoRA adapters and base models that the servers of the pool report", |p| {
        p.prefix.residents().adapters().len() as f64
    }),
    ("prefix_claims", "speculative entries of prompts in flight", |p| p.prefix.claims().len() as f64),
    ("carried_turns", "turns that decode servers keep and no prefill server has fetched", |p| {
        p.prefix.carried().len() as f64
    }),
    ("carried_bytes", "memory of the table of those turns", |p| p.prefix.carried().bytes() as f64),
];

type RemoteCounter = (&'static str, &'static str, fn(&RemoteStats) -> u64);

/// A counter of a pool's remote tokenizer: name, help, value.
const REMOTE_COUNTERS: &[RemoteCounter] = &[
    ("tokenizer_requests", "prompts to tokenize", RemoteStats::requests),
    ("tokenizer_cache_hits", "prompts with tokens in the cache", RemoteStats::cache_hits),
    ("tokenizer_calls", "calls of remote tokenizers", RemoteStats::calls),
    ("tokenizer_probes", "health probes of remote tokenizers", RemoteStats::probes),
];

/// A gauge of a pool's remote tokenizer: name, help, value.
const REMOTE_GAUGES: &[RemoteCounter] = &[
    ("tokenizer_unhealthy_models", "models whose remote tokenizer does not respond", RemoteStats::unhealthy_models),
    ("tokenizer_active_models", "models that use the remote tokenizer", RemoteStats::active_models),
];

type KubeCounter = (&'static str, &'static str, fn(&KubeStats) -> u64);

/// A counter of a pool's discovery through Kubernetes: name, help, value.
const KUBE_COUNTERS: &[KubeCounter] = &[
    ("kube_events", "changes of objects from the API server", KubeStats::events),
    ("kube_lists", "completed lists of objects", KubeStats::lists),
    ("kube_unreadable_objects", "invalid objects", KubeStats::unreadable),
    ("kube_failures", "failed lists and watches", KubeStats::failures),
    ("kube_refused", "lists and watches that the API server denied because a right is missing", KubeStats::refused),
    ("kube_status_writes", "object statuses written", KubeStats::status_writes),
    ("kube_status_failures", "object statuses that could not be written", KubeStats::status_failures),
];

type KubeGauge = (&'static str, &'static str, fn(&KubeStats) -> i64);

/// A gauge of a pool's discovery through Kubernetes: name, help, value.
const KUBE_GAUGES: &[KubeGauge] = &[
    (
        "kube_out_of_touch",
        "kinds of objects that Attaché cannot follow now; the last known objects stay in effect",
        KubeStats::out_of_touch,
    ),
    (
        "kube_pool_unreadable",
        "1 while the InferencePool is invalid; its last valid version stays in effect, and without one it has no \
         endpoints",
        KubeStats::is_pool_unreadable,
    ),
    ("kube_endpoints_left_out", "endpoints beyond 4,096 in one pool; the oldest 4,096 are used", KubeStats::left_out),
];

impl Collector for PoolCollector {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> Result<(), Error> {
        let pools = self.0.load();
        let mut page = PoolEncoder { views: &self.0, pools: &pools, encoder };
        page.endpoints()?;
        page.rows(POOL_COUNTERS, ConstCounter::new, Some)?;
        page.rows(POOL_GAUGES, ConstGauge::new, Some)?;
        page.prompts()?;
        page.kv_events()?;
        page.remote()?;
        page.rows(KUBE_COUNTERS, ConstCounter::new, |pool| pool.kube.as_deref())?;
        page.rows(KUBE_GAUGES, ConstGauge::new, |pool| pool.kube.as_deref())?;
        page.labelled(("scrape_errors", "failed scrapes, by reason", "reason"), |pool| {
            ErrorReason::ALL.map(|reason| (reason.label(), ConstCounter::new(pool.scrape.errors(reason))))
        })
    }
}

/// Encodes the metrics of pools.
struct PoolEncoder<'p, 'e> {
    views: &'p PoolViews,
    pools: &'p [PoolView],
    encoder: DescriptorEncoder<'e>,
}

impl<'p> PoolEncoder<'p, '_> {
    /// Encodes metrics with one series for each pool: name, help and value of each. Pools without `stats` have none.
    fn rows<S: 'p, V, M: EncodeMetric + TypedMetric>(
        &mut self,
        rows: &[(&str, &str, impl Fn(&S) -> V)],
        metric: fn(V) -> M,
        stats: impl Fn(&'p PoolView) -> Option<&'p S>,
    ) -> Result<(), Error> {
        for (name, help, value) in rows {
            let mut family = self.encoder.encode_descriptor(name, help, None, M::TYPE)?;
            for pool in self.pools {
                let Some(stats) = stats(pool) else { continue };
                metric(value(stats)).encode(family.encode_family(&[("pool", &*pool.name)])?)?;
            }
        }
        Ok(())
    }

    /// Encodes a metric (name, help, second label) with the `series` of each pool: values of the label, and metrics.
    fn labelled<L: AsRef<str>, M: EncodeMetric + TypedMetric, I: IntoIterator<Item = (L, M)>>(
        &mut self,
        (name, help, label): (&str, &str, &str),
        series: impl Fn(&'p PoolView) -> I,
    ) -> Result<(), Error> {
        let mut family = self.encoder.encode_descriptor(name, help, None, M::TYPE)?;
        for pool in self.pools {
            for (value, metric) in series(pool) {
                metric.encode(family.encode_family(&[("pool", &*pool.name), (label, value.as_ref())])?)?;
            }
        }
        Ok(())
    }

    /// Encodes a metric (name, help) with the `series` of each endpoint: a third label, if there is one, and metrics.
    fn by_endpoint<M: EncodeMetric + TypedMetric, I: IntoIterator<Item = (Option<(&'static str, &'static str)>, M)>>(
        &mut self,
        (name, help): (&str, &str),
        series: impl Fn(&PoolView, &EndpointState) -> I,
    ) -> Result<(), Error> {
        let mut family = self.encoder.encode_descriptor(name, help, None, M::TYPE)?;
        for pool in self.pools {
            for state in &pool.store.load().endpoints {
                let [pool_label, endpoint] = [("pool", &*pool.name), ("endpoint", &*state.endpoint.authority)];
                for (third, metric) in series(pool, state) {
                    match third {
                        None => metric.encode(family.encode_family(&[pool_label, endpoint])?)?,
                        Some(third) => metric.encode(family.encode_family(&[pool_label, endpoint, third])?)?,
                    }
                }
            }
        }
        Ok(())
    }

    /// Encodes the state of endpoints and the requests that went to them.
    fn endpoints(&mut self) -> Result<(), Error> {
        let views = self.views;
        let help = "endpoints of the pool, by state: `ready`, `not-reached` (nothing received yet), `unreachable` (the last \
                    connection failed), `half-open`, `slow-start`, `ejected`, `draining`";
        self.labelled(("pool_endpoints", help, "state"), |pool| {
            let (snapshot, now) = (pool.store.load(), views.clock.now());
            EndpointStanding::ALL.map(|standing| {
                let is_so = |state: &&EndpointState| EndpointStanding::of(state, &pool.health, now) == standing;
                (standing.label(), gauge(snapshot.endpoints.iter().filter(is_so).count()))
            })
        })?;
        for (name, help, value) in ENDPOINT_GAUGES {
            self.by_endpoint((name, help), |pool, state| {
                value(views, pool, state).map(|value| (None, ConstGauge::new(value)))
            })?;
        }
        self.by_endpoint(("endpoint_requests", "requests sent to the endpoint"), |_, state| {
            [(None, ConstCounter::new(state.endpoint.ledger.routed()))]
        })?;
        let help = "ejections of the endpoint after failures, by cause: `connect_failure`, `error_response`, `failure` of \
                    a prefill";
        self.by_endpoint(("ejections", help), |_, state| {
            let counts = state.endpoint.health.ejection_counts();
            let counts = counts.map(|(cause, n)| (Some(("cause", cause.label())), ConstCounter::new(n)));
            counts.collect::<Vec<_>>()
        })
    }

    /// Encodes how prompts are queued, predicted and looked up.
    fn prompts(&mut self) -> Result<(), Error> {
        let help = "1 for the tokenizer in use; `characters` if the configured one is not usable";
        self.labelled(("prefix_tokenizer", help, "tokenizer"), |pool| [(pool.tokenizer, gauge(1))])?;
        let help = "requests in the queue, by the priority of their band";
        self.labelled(("queued_band_requests", help, "priority"), |pool| {
            let bands = pool.bands.read().into_iter();
            bands.map(|(priority, requests)| (priority.to_string(), gauge(requests)))
        })?;
        self.prediction_errors()?;
        let help = "1 for the source of the prefix index: `kv-events` of engines, or `routed` prompts";
        self.labelled(("prefix_indexer", help, "indexer"), |pool| {
            [(if pool.kv_events.is_some() { "kv-events" } else { "routed" }, gauge(1))]
        })?;
        let help = "blocks evicted from the index, by cause: the cache of the endpoint is full, the memory limit is \
                    reached, or a tenant exceeds its share";
        self.labelled(("prefix_index_evicted_blocks", help, "cause"), |pool| {
            let stats = pool.prefix.index().stats();
            [
                ("capacity", ConstCounter::new(stats.evicted_for_capacity)),
                ("tenant", ConstCounter::new(stats.evicted_for_tenant)),
                ("budget", ConstCounter::new(stats.evicted_for_budget)),
            ]
        })
    }

    /// Encodes the error of predictions, of pools that have learned from a response.
    fn prediction_errors(&mut self) -> Result<(), Error> {
        let help = "usual relative error of predicted times to the first token, as a mean of the endpoints; 1 is an error \
                    as large as the prediction";
        let mut errors = self.encoder.encode_descriptor("prediction_error_ratio", help, None, MetricType::Gauge)?;
        for pool in self.pools {
            let snapshot = pool.store.load();
            let learned = snapshot.endpoints.iter().filter_map(|state| state.endpoint.speed.learned());
            let (sum, count) = learned.fold((0.0, 0.0), |(sum, count), own| (sum + own.first_token_error, count + 1.0));
            if count > 0.0 {
                ConstGauge::new(sum / count).encode(errors.encode_family(&[("pool", &*pool.name)])?)?;
            }
        }
        Ok(())
    }

    /// Encodes the counters of KV events, and the trust in each cache.
    fn kv_events(&mut self) -> Result<(), Error> {
        let rows = Count::ALL.map(|count| (count.label(), count.help(), move |stats: &KvEventStats| stats.get(count)));
        self.rows(&rows, ConstCounter::new, |pool| pool.kv_events.as_deref())?;
        let help = "1 for the state of the KV events of the endpoint; those of `exact` and `uncounted` are used alone";
        self.by_endpoint(("kv_event_trust", help), |pool, state| {
            let residents = pool.kv_events.as_ref().map(|_| pool.prefix.residents().load());
            let trust = residents.and_then(|residents| Some(residents.get(&state.endpoint.id)?.trust()));
            trust.map(|trust| (Some(("trust", trust.label())), gauge(1)))
        })
    }

    /// Encodes the counters of remote tokenizers.
    fn remote(&mut self) -> Result<(), Error> {
        self.rows(REMOTE_COUNTERS, ConstCounter::new, |pool| pool.remote.as_deref())?;
        let help = "prompts that the remote tokenizer did not tokenize, by reason";
        self.labelled(("tokenizer_failures", help, "reason"), |pool| {
            let failures = |stats: &'p Arc<RemoteStats>| {
                Reason::ALL.map(|reason| (reason.label(), ConstCounter::new(stats.failures(reason))))
            };
            pool.remote.iter().flat_map(failures)
        })?;
        self.rows(REMOTE_GAUGES, gauge, |pool| pool.remote.as_deref())?;
        remote::by_model(self.pools, &mut self.encoder)
    }
}

/// A gauge with a whole number.
fn gauge(value: impl TryInto<i64>) -> ConstGauge<i64> {
    ConstGauge::new(value.try_into().unwrap_or(i64::MAX))
}
