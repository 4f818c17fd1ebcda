//! All plugin types of GIE (to v1.5) and llm-d (to v1), and how each is handled. Extend this
//! list to support another type.

use super::super::defaults::BY_SYNC;
use super::mapping::{self, Mapped};
use attache_config_schema::decode::{Fields, Sink};
use attache_scheduling::Registry;

/// Reads a plugin's parameters, as far as they become settings.
pub(super) type Reads = fn(&mut Fields<'_>, &mut Mapped, &mut Sink);

/// How a plugin is handled.
#[derive(Clone, Copy, Debug)]
pub(super) enum PluginHandling {
    /// It is a part of the `pipeline`; the registry builds it.
    Part,
    /// The same, after some of its parameters became settings.
    PartAnd(Reads),
    /// It is a policy or an admitter of flow control; `flow` builds it.
    Policy,
    /// Its parameters become settings.
    Settings(Reads),
    /// It is always in effect.
    BuiltIn,
    /// Accepted without effect, with the reason. `None`: its parameters are not checked.
    Idle(&'static str, Option<&'static [&'static str]>),
    /// Rejected, with the reason: without it requests would go to other endpoints than its user expects.
    Absent(&'static str),
}

/// Where else than in a profile a plugin may be named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// `dataLayer.sources`
    Source,
    /// `extractors` of a source.
    Extractor,
    /// `dataLayer.discovery`
    Discovery,
    /// `dataLayer.crossReplica.syncerPluginRef`
    Syncer,
    /// `requestHandler.parsers`
    Parser,
    /// `saturationDetector`
    Detector,
    /// `fairnessPolicyRef`
    Fairness,
    /// `orderingPolicyRef`
    Ordering,
    /// `usageLimitPolicyPluginRef`
    UsageLimit,
}

impl Slot {
    /// The expected kind of plugin, for messages.
    pub(super) fn noun(self) -> &'static str {
        match self {
            Slot::Source => "data source",
            Slot::Extractor => "extractor",
            Slot::Discovery => "endpoint discovery",
            Slot::Syncer => "cross-replica syncer",
            Slot::Parser => "parser",
            Slot::Detector => "saturation detector",
            Slot::Fairness => "fairness policy",
            Slot::Ordering => "ordering policy",
            Slot::UsageLimit => "usage limit policy",
        }
    }
}

/// One plugin type.
#[derive(Clone, Copy, Debug)]
pub(super) struct PluginEntry {
    /// Name of the type.
    pub name: &'static str,
    /// Names of the type in other versions.
    pub aliases: &'static [&'static str],
    /// Where it may be named, besides profiles.
    pub slots: &'static [Slot],
    /// How it is handled.
    pub fate: PluginHandling,
    /// Its parameters that change nothing.
    pub inert: &'static [Inert],
}

/// Parameters of a plugin that change nothing, and why.
pub(super) type Inert = (&'static [&'static str], &'static str);

impl PluginEntry {
    const fn with(self, inert: &'static [Inert]) -> Self {
        Self { inert, ..self }
    }

    const fn also_called(self, aliases: &'static [&'static str]) -> Self {
        Self { aliases, ..self }
    }
}

/// The entry for a type, by any of its names.
pub(super) fn entry(name: &str) -> Option<&'static PluginEntry> {
    CATALOGUE.iter().find(|e| e.name == name || e.aliases.contains(&name))
}

/// All known names, for suggestions.
pub(super) fn names(registry: &Registry) -> impl Iterator<Item = &'static str> {
    let held = CATALOGUE.iter().filter(|e| !matches!(e.fate, PluginHandling::Absent(_))).map(|e| e.name);
    held.chain(registry.plugins().iter().map(|d| d.name))
}

/// Plugins that both projects create by themselves when a reference names them without a declaration.
pub(super) const IMPLICIT: &[&str] = &[
    "anthropic-parser",
    "core-metrics-extractor",
    "fcfs-ordering-policy",
    "global-strict-fairness-policy",
    "metrics-data-source",
    "openai-parser",
    "passthrough-parser",
    "static-usage-limit-policy",
    "utilization-detector",
    "vllmhttp-parser",
];

const DCGM: &str = "DCGM exporters are not scraped; `GPUUtilization` is `gpu_busy_time_ratio` of the server's own \
                    metrics page, and unknown where the page has none";
const BY_HANDLER: &str = "the profiles are those that the profile handler names";
const TOGETHER: &str = "servers whose `disaggregatedset.x-k8s.io/revision` differs are never paired, and all revisions \
                        serve; in Attaché's own file `disaggregation.together` names the labels";
const RESERVED: &str = "each decision counts on its endpoint at once, until the request ends; with `sync` it counts for \
                        the other pickers too; `POST /reservations` of the admin port books an endpoint before its \
                        request is sent";
const SESSIONS: &str = "turns and times of sessions are not recorded; `session-affinity-filter` or \
                        `session-affinity-scorer` keeps a session on its server, and `program-aware-fairness` orders \
                        sessions that wait";
const RETENTION: &str = "servers are not told how long to keep blocks, so their own rule decides; requests of a session \
                         go to the server that has its blocks by `prefix-cache-scorer` or a session affinity";
/// A parser: the request's path decides which one reads a body.
const BY_PATH: PluginHandling = PluginHandling::BuiltIn;
const MULTICLUSTER: &str = "the metrics of other clusters' pickers are not read; clusters are chosen by the \
                            requests that this picker has sent there and by their responses";

/// Why the parameters of latency predictors have no effect.
const LEARNED: &str = "each server's speed is learned from its responses";
/// The parameters of latency predictors.
const LEARNED_PARAMETERS: &[&str] = &[
    "contextTTL",
    "endpointRoleLabel",
    "maxDecodeTokenSamplesForPrediction",
    "maxSampledTokens",
    "predictInPrepareData",
    "predictInProduce",
    "prefixMatchInfoProducerName",
    "samplingMean",
    "sloBufferFactor",
    "streamingMode",
    "useEncoderCacheFeatures",
];
const ONE_INDEX: &str = "a pool has one index of prefixes";
const CALIBRATION: &[&str] = &["prefillCalibrationFile", "prefillCalibrationFingerprint", "prefillCalibrationRequired"];
const MEASURED: &str = "calibration records are not read; `peakPrefillThroughput` says the measured tokens per second";
const ROOM: &str = "each server reports how many blocks it can hold";
const TO_THE_END: &str = "prompts are compared to their end";

const PD: &[Inert] = &[
    (&["prefixPluginType", "prefixPluginName"], ONE_INDEX),
    (&["hashBlockSize"], "the pool's blocks are counted"),
    (&["primaryPort"], "each rank of a server is an endpoint of its own"),
];
/// llm-d's older files give `disagg-profile-handler` the parameters of `pd-profile-handler`.
const DISAGG: &[Inert] = &[
    PD[0],
    PD[1],
    PD[2],
    (&["threshold"], "a decider says which requests are split, such as `prefix-based-pd-decider`"),
];
/// Limits of the index that have no counterpart in Attaché.
const BOUNDS: &[Inert] = &[
    (&["autoTune", "lruCapacityPerServer"], ROOM),
    (&["maxPrefixBlocksToMatch", "maxPrefixTokensToMatch"], TO_THE_END),
];
const PREFIX_SCORER: &[Inert] =
    &[BOUNDS[0], BOUNDS[1], (&["kvCacheRedisAddr"], "what servers hold is read from their own events")];
const P2P: &[Inert] = &[
    (&["prefixMatchInfoProducerName"], ONE_INDEX),
    (&["prefillProfileName"], "the prefill profile is the one that the profile handler names"),
];
const BURST: &[Inert] = &[
    (
        &["windowDurationMs", "maxBatchSize"],
        "arrivals are not held back; `prefix-cache-scorer` sends a prompt to the server that computes the same prefix",
    ),
    (
        &["maxPerReplica", "balanceBy", "minColocateBlocks"],
        "scorers of load, such as `token-load-scorer`, limit how many requests go to one server",
    ),
];
const EMBEDDINGS: &[Inert] = &[(
    &["cacheSizeInEmbeddingsPerServer"],
    "items are counted, not their embeddings; `cacheSizeInMBPerServer` says how many, one for each 2 MiB",
)];
/// The scorer has the parameters of its producer under their older names.
const LATENCY: &[Inert] = &[
    (&["negHeadroomTTFTWeight", "negHeadroomTPOTWeight"], "`ttftWeight` and `tpotWeight` hold for it too"),
    (LEARNED_PARAMETERS, LEARNED),
    (
        &["affinityGateTau", "affinityGateTauGlobal", "epsilonExploreSticky", "epsilonExploreNeg"],
        "`prefix-cache-affinity-filter` and `slo-headroom-tier-filter` are the gates and say their figures",
    ),
    (
        &["explorationRate", "minInflightGap", "ttftPercentilesProducerName"],
        "predictions at the server's present load are compared, and each server's speed is learned from its responses",
    ),
    (&["selectionMode"], "the profile's picker says it: `max-score-picker` or `weighted-random-picker`"),
];
const METRICS_SOURCE: &[Inert] = &[(
    &["caCertPath", "clientCertPath", "clientKeyPath"],
    "certificates are checked against those that the system trusts, and none is shown",
)];
const CORE_METRICS: &[Inert] = &[
    (&["engineLabelKey"], "endpoints of `--endpoint` have no labels"),
    (
        &["engineConfigs", "queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec", "loraSpec", "cacheInfoSpec"],
        "an engine's metrics are read under the names that it gives them",
    ),
];

const fn part(name: &'static str) -> PluginEntry {
    other(name, &[], PluginHandling::Part)
}

const fn other(name: &'static str, slots: &'static [Slot], fate: PluginHandling) -> PluginEntry {
    PluginEntry { name, aliases: &[], slots, fate, inert: &[] }
}

/// All types: parts of the pipeline first, by kind.
pub(super) const CATALOGUE: &[PluginEntry] = &[
    // Filters.
    part("context-length-aware"),
    part("decode-filter"),
    part("encode-filter"),
    part("endpoint-attribute-filter"),
    part("header-based-testing-filter"),
    part("label-selector-filter").also_called(&["by-label-selector", "by-label"]),
    part("prefill-filter"),
    part("prefix-cache-affinity-filter").with(&[(CALIBRATION, MEASURED)]),
    part("session-affinity-filter").also_called(&["multicluster-session-affinity-filter"]),
    part("slo-headroom-tier-filter"),
    part("topology-affinity-filter"),
    part("utilization-filter"),
    other("concurrency-detector", &[Slot::Detector], PluginHandling::Part),
    other("utilization-detector", &[Slot::Detector], PluginHandling::Part),
    // Scorers.
    part("active-request-scorer"),
    part("endpoint-attribute-scorer"),
    part("header-label-affinity-scorer"),
    part("kv-cache-utilization-scorer").also_called(&["kv-cache-scorer", "multicluster-kv-cache-utilization-scorer"]),
    part("latency-scorer").with(LATENCY).also_called(&["predicted-latency-scorer", "latency-observation-scorer-hub"]),
    part("lmetric-scorer"),
    part("load-aware-scorer"),
    part("lora-affinity-scorer"),
    part("no-hit-lru-scorer").with(&[(&["prefixPluginType", "prefixPluginName"], ONE_INDEX)]),
    other("precise-prefix-cache-scorer", &[Slot::Extractor], PluginHandling::PartAnd(mapping::precise_prefix)),
    other("prefix-cache-scorer", &[], PluginHandling::PartAnd(mapping::prefix_scorer))
        .with(PREFIX_SCORER)
        .also_called(&["multicluster-prefix-cache-scorer"]),
    part("queue-scorer").also_called(&["multicluster-queue-scorer"]),
    part("running-requests-size-scorer"),
    part("session-affinity-scorer"),
    part("token-load-scorer"),
    part("topology-affinity-scorer"),
    part("mm-embeddings-cache-scorer"),
    other(
        "thunder-agent",
        &[Slot::Detector, Slot::Fairness],
        PluginHandling::Absent("programs of agents are not scheduled as a whole"),
    ),
    // Pickers and profile handlers.
    part("max-score-picker"),
    part("random-picker"),
    part("weighted-random-picker"),
    part("data-parallel-profile-handler"),
    part("disagg-profile-handler").with(DISAGG),
    part("header-profile-handler"),
    part("pd-profile-handler").with(PD),
    part("single-profile-handler"),
    // Prefill, decode and encode on servers of their own.
    part("always-disagg-multimodal-decider"),
    part("always-disagg-pd-decider"),
    // The exchange sets `x-prefiller-host-port` and `x-encoder-hosts-ports` of every request with such workers.
    other("disagg-headers-handler", &[], PluginHandling::BuiltIn)
        .also_called(&["prefill-header-handler"])
        .with(&[(&["prefillProfile", "encodeProfile"], BY_HANDLER)]),
    other("disaggregatedset-rollout-screener", &[], PluginHandling::Idle(TOGETHER, None)),
    other("disaggregatedset-rollout-pod-extractor", &[Slot::Extractor], PluginHandling::Idle(TOGETHER, None)),
    other("reserve-endpoint", &[], PluginHandling::Idle(RESERVED, None)),
    part("prefix-based-pd-decider").with(&[(&["prefixPluginType", "prefixPluginName"], ONE_INDEX)]),
    other("dp-rank-header-handler", &[], PluginHandling::Settings(mapping::choose_rank)),
    other("p2p-source-producer", &[], PluginHandling::Settings(mapping::p2p_source)).with(P2P),
    // Producers.
    other("approx-prefix-cache-producer", &[], PluginHandling::Settings(mapping::approx_prefix))
        .with(BOUNDS)
        .also_called(&["multicluster-approx-prefix-cache-producer"]),
    other("inflight-load-producer", &[], PluginHandling::BuiltIn).with(&[(
        &[
            "addEstimatedOutputTokens",
            "outputRatio",
            "maxEstimatedOutputTokens",
            "prefixMatchInfoProducerName",
            "syncCrossReplicaState",
        ],
        "requests and prompt tokens in flight are counted as they are",
    )]),
    other("precise-prefix-cache-producer", &[Slot::Extractor], PluginHandling::Settings(mapping::precise_prefix)),
    other("predicted-latency-producer", &[], PluginHandling::BuiltIn).with(&[(LEARNED_PARAMETERS, LEARNED)]),
    other("session-id-producer", &[], PluginHandling::BuiltIn)
        .with(&[(&["headerName", "cookieName"], "the plugin that uses sessions names the header")]),
    other("session-state-producer", &[], PluginHandling::Idle(SESSIONS, None)),
    other("session-manager", &[], PluginHandling::Idle(SESSIONS, None)),
    other("session-interturn-latency-producer", &[], PluginHandling::Idle(RETENTION, None)),
    other("kv-cache-hint-v2", &[], PluginHandling::Idle(RETENTION, None)),
    other("kv-cache-retention", &[], PluginHandling::Idle(RETENTION, None)),
    other("token-producer", &[], PluginHandling::Settings(mapping::tokens))
        .with(&[(&["udsTokenizerConfig"], "the tokenizer of `vllm` is asked over HTTP")])
        .also_called(&["tokenizer"]),
    other("burst-prefix-cache-producer", &[], PluginHandling::Settings(mapping::burst_prefix)).with(BURST),
    other("mm-embeddings-cache-producer", &[Slot::Extractor], PluginHandling::Settings(mapping::embeddings_cache))
        .with(EMBEDDINGS),
    // The data layer.
    other("metrics-data-source", &[Slot::Source], PluginHandling::Settings(mapping::metrics_source))
        .with(METRICS_SOURCE),
    other("core-metrics-extractor", &[Slot::Extractor], PluginHandling::Settings(mapping::core_metrics))
        .with(CORE_METRICS)
        .also_called(&["model-server-protocol-metrics"]),
    other("endpoint-notification-source", &[Slot::Source], PluginHandling::BuiltIn),
    other(
        "models-data-source",
        &[Slot::Source],
        PluginHandling::Idle("which adapters a server has is read from its metrics", None),
    ),
    other(
        "models-data-extractor",
        &[Slot::Extractor],
        PluginHandling::Idle("which adapters a server has is read from its metrics", None),
    ),
    other("models-responder", &[], PluginHandling::Settings(mapping::models_responder)),
    other("topology-extractor", &[Slot::Extractor], PluginHandling::BuiltIn),
    other(
        "k8s-notification-source",
        &[Slot::Source],
        PluginHandling::Idle("the pool's own objects in Kubernetes are watched without it", None),
    ),
    other("local-syncer", &[Slot::Syncer], PluginHandling::Idle(BY_SYNC, None)),
    other("redis-syncer", &[Slot::Syncer], PluginHandling::Idle(BY_SYNC, None)).also_called(&["redis-state-store"]),
    other("dcgm-data-source", &[Slot::Source], PluginHandling::Idle(DCGM, None)),
    other("dcgm-extractor", &[Slot::Extractor], PluginHandling::Idle(DCGM, None)),
    other("file-discovery", &[Slot::Discovery], PluginHandling::Settings(mapping::file_discovery)),
    // Parsers.
    other("anthropic-parser", &[Slot::Parser], BY_PATH),
    other("openai-parser", &[Slot::Parser], BY_PATH),
    other("passthrough-parser", &[Slot::Parser], BY_PATH),
    other("sglanghttp-parser", &[Slot::Parser], BY_PATH),
    other("vertexai-parser", &[Slot::Parser], BY_PATH),
    other("vllmgrpc-parser", &[Slot::Parser], BY_PATH),
    other("vllmhttp-parser", &[Slot::Parser], BY_PATH),
    // Admission and flow control.
    other("agent-identity", &[], PluginHandling::Settings(mapping::agent_identity)),
    other("latency-slo-admitter", &[], PluginHandling::Policy),
    other("probabilistic-admitter", &[], PluginHandling::Policy),
    other("global-strict-fairness-policy", &[Slot::Fairness], PluginHandling::Policy),
    other("program-aware-fairness", &[Slot::Fairness], PluginHandling::Policy)
        .also_called(&["program-aware-fairness-policy"]),
    other("round-robin-fairness-policy", &[Slot::Fairness], PluginHandling::Policy),
    other("edf-ordering-policy", &[Slot::Ordering], PluginHandling::Policy),
    other("fcfs-ordering-policy", &[Slot::Ordering], PluginHandling::Policy),
    other("slo-deadline-ordering-policy", &[Slot::Ordering], PluginHandling::Policy),
    other("priority-holdback-policy", &[Slot::UsageLimit], PluginHandling::Policy),
    other("soft-reflective-ceiling-policy", &[Slot::UsageLimit], PluginHandling::Policy),
    other("static-usage-limit-policy", &[Slot::UsageLimit], PluginHandling::Policy),
    other("sheddable-eviction-filter", &[], PluginHandling::BuiltIn).also_called(&["eviction-sheddable-filter"]),
    other("priority-then-time-eviction-order-policy", &[], PluginHandling::BuiltIn)
        .also_called(&["eviction-priority-then-time-ordering"]),
    // Reports about a request.
    other("destination-endpoint-served-verifier", &[], PluginHandling::Settings(mapping::served_verifier)),
    other("request-attribute-reporter", &[], PluginHandling::Settings(mapping::attribute_reporter)),
    // Several clusters.
    other("multicluster-file-discovery", &[Slot::Discovery], PluginHandling::Settings(mapping::cluster_discovery)),
    other("multicluster-metrics-data-source", &[Slot::Source], PluginHandling::Idle(MULTICLUSTER, None)),
    other("multicluster-metrics-extractor", &[Slot::Extractor], PluginHandling::Idle(MULTICLUSTER, None)),
    other("latency-observer-producer-hub", &[Slot::Source], PluginHandling::Idle(LEARNED, None)),
];
