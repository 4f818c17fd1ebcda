//! A pool: which requests it takes, where they go, its endpoints, scrapes and ejection.

use super::declare::{self, Opt};
use super::{
    Disaggregation, Dns, EndpointsFile, FlowControl, Kubernetes, Objective, PrefixCache, RequestStrategy, Scheme,
    Strategy, StrategyRule,
};
use crate::defaults::MIN_INTERVAL;
use attache_config_schema::decode::Bytes;
use attache_config_schema::diagnostic::At;
use attache_pool::Engine;
use attache_pool::health::HealthPolicy;
use attache_scheduling::router::{DESTINATION_NAMESPACE, Destination, PoolSwitches};
use std::time::Duration;

sections! {
    /// One entry of `pools`.
    Pool fills PoolSwitches {
        /// Unique name of the pool.
        "name" => name: String [named],
        /// Conditions of requests for the pool.
        "match" => matches: Match { absent: "no condition"; },
        /// Whether requests for models that neither `match` nor `modelRewrites` names are rejected.
        "rejectUnknownModels" => reject_unknown_models: bool { default: false; },
        /// Model of requests that name none.
        "defaultModel" => default_model: String { absent: "the only known model of the only pool"; },
        /// How endpoints are chosen: a name, a sum such as `prefix-cache:2,least-request`, or a name with parameters. The
        /// default needs no tuning on any mix of servers.
        "strategy" => strategy: Strategy { absent: "`predicted-latency`"; },
        /// Strategies by model.
        "strategies" => strategies: Vec<At<StrategyRule>> [flat] { absent: "none"; },
        /// Strategies that requests may select by header.
        "requestStrategy" => request_strategy: RequestStrategy { absent: "requests cannot choose"; },
        "destination" => destination: DestinationSection [flat],
        /// Model servers: each an address, or a mapping.
        "endpoints" => endpoints: Vec<At<Endpoint>> [flat] { absent: "none"; },
        /// Names of hosts whose addresses are endpoints.
        "dns" => dns: Vec<At<Dns>> [flat] { absent: "none"; },
        /// A file that lists endpoints.
        "endpointsFile" => endpoints_file: EndpointsFile { absent: "none"; },
        /// Pods that are endpoints: those of an InferencePool, of a selector, or of all InferencePools with a label.
        "kubernetes" => kubernetes: Kubernetes { absent: "no pods"; },
        /// Other names of models.
        "modelRewrites" => rewrites: Vec<At<Rewrite>> [flat] { absent: "none"; },
        "scrape" => scrape: Scrape [flat],
        "health" => health: Health [flat],
        /// The prefix index, for strategies that read it: tokenizer, block size, memory, KV events.
        "prefixCache" => prefix_cache: PrefixCache,
        /// Prefill and decode on different servers.
        "disaggregation" => disaggregation: Disaggregation {
            absent: "requests are not split, except by the strategy `pd`";
        },
        /// What counts in a response. Only `predicted-latency` reads it.
        "objective" => objective: Objective { absent: "both weights are 1, and there are no targets"; },
        /// Queues while the pool is saturated.
        "flowControl" => flow_control: FlowControl {
            absent: "with `predicted-latency`, long prompts wait while evicted conversations are computed again";
        },
        /// Whether a request with a deadline is rejected at once if no server is predicted to meet it.
        "deadlineAdmission" => deadline_admission: bool { default: false; },
    }
    + {
        /// Set if the format of the file names no endpoints: all come from flags and share these properties.
        from_flags: Option<FromFlags>
    }
    /// Conditions of requests for a pool; all of them must hold.
    Match {
        /// Models, by the names that clients use.
        "models" => models: Vec<At<String>> { absent: "any"; },
        /// A header.
        "header" => header: Header { absent: "any"; },
        /// The request's `:authority`.
        "authority" => authority: String { absent: "any"; },
        /// Service that the gateway calls, with or without its namespace, and with `:9002` if pools share it.
        "service" => service: String { absent: "any"; },
    }
    /// A header and its value.
    Header {
        /// Name of the header.
        "name" => name: String { absent: "required"; },
        /// Its value.
        "value" => value: String { absent: "required"; },
    }
    /// How the gateway gets the destination.
    DestinationSection {
        /// One endpoint, or a list with fallbacks.
        "mode" => mode: Destination { default: Destination::default(); },
        /// With `list`: endpoints in it, the first one included.
        "max" => max: usize { absent: "3, the first one and two fallbacks"; range: 1..=16; unit: "endpoints"; },
        /// Headers of the request with the destination.
        "headers" => headers: Vec<At<String>> { absent: "`x-gateway-destination-endpoint`"; },
        /// Dynamic metadata with the destination.
        "metadata" => metadata: Vec<At<MetadataKey>> { absent: "`x-gateway-destination-endpoint` in `envoy.lb`"; },
        /// Header of the request with the name of the strategy.
        "strategyHeader" => strategy_header: String { absent: "none"; },
    }
    /// A key of dynamic metadata.
    MetadataKey {
        /// Namespace of the key.
        "namespace" => namespace: String { default: DESTINATION_NAMESPACE.to_owned(); },
        /// The key.
        "key" => key: String { absent: "required"; },
    }
    /// Where an endpoint's metrics are.
    MetricsSection {
        /// Scheme of their URL.
        "scheme" => scheme: Scheme { default: Scheme::Http; },
        /// Port of their URL.
        "port" => port: u16 { absent: "the serving port"; range: 1..=u16::MAX; unit: "port"; },
        /// Path of their URL.
        "path" => path: String {
            absent: "`/metrics`, of trtllm-serve `/prometheus/metrics`, of astrai `/stats`";
        },
    }
    /// How metrics of endpoints are scraped.
    Scrape {
        /// Interval for an endpoint with requests in flight, as in the reference picker.
        "interval" => interval: Duration { default: Duration::from_millis(50); range: MIN_INTERVAL..; },
        /// Interval for an idle endpoint: its metrics do not change. At least `interval`.
        "idleInterval" => idle_interval: Duration { default: Duration::from_secs(1); range: MIN_INTERVAL..; },
        /// Longest scrape: requests in flight describe a server better than metrics that take longer.
        "timeout" => timeout: Duration { default: Duration::from_millis(500); range: MIN_INTERVAL..; },
        /// Largest metrics page; forty times the largest seen.
        "maxBytes" => max_bytes: Bytes { default: Bytes(4 << 20); range: Bytes(1 << 10)..=Bytes(1 << 30); unit: "bytes"; },
        /// Age at which metrics are ignored, as in the reference picker.
        "staleAfter" => stale_after: Duration { default: Duration::from_secs(2); range: MIN_INTERVAL..; },
        /// Whether certificates of model servers are not checked.
        "insecureSkipVerify" => insecure_skip_verify: bool { default: false; },
        /// File with a token for metrics and lists of models, read every 10 s.
        "bearerTokenFile" => bearer_token_file: String { absent: "none"; },
    }
    /// When endpoints are ejected. `src/pool/health.rs` has the reason of each default.
    Health fills HealthPolicy {
        /// Failures in a row until an endpoint is ejected; 0: never.
        "consecutiveFailures" => consecutive_failures: u32 {
            default: HealthPolicy::default().consecutive_failures; unit: "failures";
        },
        /// Failed connections in a row until an endpoint is ejected.
        "consecutiveConnectFailures" => consecutive_connect_failures: u32 {
            default: HealthPolicy::default().consecutive_connect_failures; range: 1..; unit: "failures";
        },
        /// First ejection of an endpoint; each further one is twice as long.
        "ejection" => ejection: Duration { default: HealthPolicy::default().ejection; range: MIN_INTERVAL..; },
        /// Longest ejection. At least `ejection`.
        "maxEjection" => max_ejection: Duration { default: HealthPolicy::default().max_ejection; },
        /// Time after an ejection in which an endpoint's load counts higher.
        "slowStart" => slow_start: Duration { default: HealthPolicy::default().slow_start; },
        /// Error responses to one client eject an endpoint without a success in this time; those to five clients, in a fifth
        /// of it.
        "errorPeriod" => error_period: Duration { default: HealthPolicy::default().error_period; },
        /// Largest share that error responses may eject. Unreachable servers are ejected beyond it.
        "maxEjectionPercent" => max_ejection_percent: u32 {
            default: HealthPolicy::default().max_ejection_percent; range: 0..=100; unit: "%";
        },
    }
    /// A model server: its address, or a mapping.
    Endpoint = "address" {
        /// IP address and port.
        "address" => address: String [required],
        /// Name in metrics and logs.
        "name" => name: String { absent: "the address"; },
        /// `prefill`, `decode`, `encode` or a combination; the same as the label `llm-d.ai/role`.
        "role" => role: String { absent: "serves whole requests"; },
        /// Labels, as a pod has them.
        "labels" => labels: Vec<(At<String>, At<String>)> [flat] { absent: "none"; },
        /// Its inference engine.
        "engine" => engine: Engine { default: Engine::default(); },
        /// Where its metrics are.
        "metrics" => metrics: MetricsSection,
        /// Whether it gets no new requests.
        "draining" => draining: bool { default: false; },
    }
    /// Other names of a model.
    Rewrite {
        /// The name in requests; `*` for every model without a rule of its own.
        "model" => model: String { absent: "`*`"; },
        /// The names on the servers.
        "targets" => targets: Vec<At<Target>> [required],
    }
    /// A model's name on the servers.
    Target {
        /// The name.
        "model" => model: String { absent: "required"; },
        /// Its share of the requests, relative to the other targets.
        "weight" => weight: u32 { default: 1; range: 0..=1_000_000; unit: "weight"; },
    }
}

/// Properties of endpoints that flags name.
#[derive(Debug, Default)]
pub struct FromFlags {
    /// Inference engine of the endpoints.
    pub engine: Opt<Engine>,
    /// Scheme, port and path of their metrics.
    pub metrics: MetricsSection,
}
