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
    /// It is always in effect, as the text describes, so that the listed parameters change nothing.
    BuiltIn(&'static str, &'static [&'static str]),
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
const EVICTION: &str = "sheddable requests are evicted in this order";
const BY_HANDLER: &str = "the profiles are those that the profile handler names";
const TOGETHER: &str = "servers whose `disaggregatedset.x-k8s.io/revision` differs are never paired, and all revisions \
                        serve; in Attaché's own file `disaggregation.together` names the labels";
const RESERVED: &str = "each decision counts on its endpoint at once, until the request ends; with `sync` it counts for \
                        the other pickers too";
const SESSIONS: &str = "turns and times of sessions are not recorded; `session-affinity-filter` or \
                        `session-affinity-scorer` keeps a session on its server, and `program-aware-fairness` orders \
                        sessions that wait";
const RETENTION: &str = "servers are not told how long to keep blocks, so their own rule decides; requests of a session \
                         go to the server that has its blocks by `prefix-cache-scorer` or a session affinity";
/// A parser: the request's path decides which one reads a body.
const BY_PATH: PluginHandling = PluginHandling::BuiltIn("", &[]);
const MULTICLUSTER: &str = "the metrics of other clusters' pickers are not read; clusters are chosen by the \
                            requests that this picker has sent there and by their responses";

const fn part(name: &'static str) -> PluginEntry {
    PluginEntry { name, aliases: &[], slots: &[], fate: PluginHandling::Part }
}

const fn other(name: &'static str, slots: &'static [Slot], fate: PluginHandling) -> PluginEntry {
    PluginEntry { name, aliases: &[], slots, fate }
}

/// All types: parts of the pipeline first, by kind.
pub(super) const CATALOGUE: &[PluginEntry] = &[
    // Filters.
    part("context-length-aware"),
    part("decode-filter"),
    part("encode-filter"),
    part("endpoint-attribute-filter"),
    part("header-based-testing-filter"),
    PluginEntry {
        name: "label-selector-filter",
        aliases: &["by-label-selector", "by-label"],
        slots: &[],
        fate: PluginHandling::Part,
    },
    part("prefill-filter"),
    other("prefix-cache-affinity-filter", &[], PluginHandling::PartAnd(mapping::affinity)),
    PluginEntry {
        name: "session-affinity-filter",
        aliases: &["multicluster-session-affinity-filter"],
        slots: &[],
        fate: PluginHandling::Part,
    },
    part("slo-headroom-tier-filter"),
    part("topology-affinity-filter"),
    part("utilization-filter"),
    other("concurrency-detector", &[Slot::Detector], PluginHandling::Part),
    other("utilization-detector", &[Slot::Detector], PluginHandling::Part),
    // Scorers.
    part("active-request-scorer"),
    part("endpoint-attribute-scorer"),
    part("header-label-affinity-scorer"),
    PluginEntry {
        name: "kv-cache-utilization-scorer",
        aliases: &["kv-cache-scorer", "multicluster-kv-cache-utilization-scorer"],
        slots: &[],
        fate: PluginHandling::Part,
    },
    PluginEntry {
        name: "latency-scorer",
        aliases: &["predicted-latency-scorer", "latency-observation-scorer-hub"],
        slots: &[],
        fate: PluginHandling::PartAnd(mapping::latency),
    },
    part("lmetric-scorer"),
    part("load-aware-scorer"),
    part("lora-affinity-scorer"),
    other("no-hit-lru-scorer", &[], PluginHandling::PartAnd(mapping::one_index)),
    other("precise-prefix-cache-scorer", &[Slot::Extractor], PluginHandling::PartAnd(mapping::precise_prefix)),
    PluginEntry {
        name: "prefix-cache-scorer",
        aliases: &["multicluster-prefix-cache-scorer"],
        slots: &[],
        fate: PluginHandling::PartAnd(mapping::prefix_scorer),
    },
    PluginEntry {
        name: "queue-scorer",
        aliases: &["multicluster-queue-scorer"],
        slots: &[],
        fate: PluginHandling::Part,
    },
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
    other("disagg-profile-handler", &[], PluginHandling::PartAnd(mapping::disagg)),
    part("header-profile-handler"),
    other("pd-profile-handler", &[], PluginHandling::PartAnd(mapping::pd)),
    part("single-profile-handler"),
    // Prefill, decode and encode on servers of their own.
    part("always-disagg-multimodal-decider"),
    part("always-disagg-pd-decider"),
    // The exchange sets `x-prefiller-host-port` and `x-encoder-hosts-ports` of every request with such workers.
    PluginEntry {
        name: "disagg-headers-handler",
        aliases: &["prefill-header-handler"],
        slots: &[],
        fate: PluginHandling::BuiltIn(BY_HANDLER, &["prefillProfile", "encodeProfile"]),
    },
    other("disaggregatedset-rollout-screener", &[], PluginHandling::Idle(TOGETHER, None)),
    other("disaggregatedset-rollout-pod-extractor", &[Slot::Extractor], PluginHandling::Idle(TOGETHER, None)),
    other("reserve-endpoint", &[], PluginHandling::Idle(RESERVED, None)),
    other("prefix-based-pd-decider", &[], PluginHandling::PartAnd(mapping::one_index)),
    other("dp-rank-header-handler", &[], PluginHandling::Settings(mapping::choose_rank)),
    other("p2p-source-producer", &[], PluginHandling::Settings(mapping::p2p_source)),
    // Producers.
    PluginEntry {
        name: "approx-prefix-cache-producer",
        aliases: &["multicluster-approx-prefix-cache-producer"],
        slots: &[],
        fate: PluginHandling::Settings(mapping::approx_prefix),
    },
    other(
        "inflight-load-producer",
        &[],
        PluginHandling::BuiltIn(
            "requests and prompt tokens in flight are counted as they are",
            &[
                "addEstimatedOutputTokens",
                "outputRatio",
                "maxEstimatedOutputTokens",
                "prefixMatchInfoProducerName",
                "syncCrossReplicaState",
            ],
        ),
    ),
    other("precise-prefix-cache-producer", &[Slot::Extractor], PluginHandling::Settings(mapping::precise_prefix)),
    other("predicted-latency-producer", &[], PluginHandling::BuiltIn(mapping::LEARNED, mapping::LEARNED_PARAMETERS)),
    other(
        "session-id-producer",
        &[],
        PluginHandling::BuiltIn("the plugin that uses sessions names the header", &["headerName", "cookieName"]),
    ),
    other("session-state-producer", &[], PluginHandling::Idle(SESSIONS, None)),
    other("session-manager", &[], PluginHandling::Idle(SESSIONS, None)),
    other("session-interturn-latency-producer", &[], PluginHandling::Idle(RETENTION, None)),
    other("kv-cache-hint-v2", &[], PluginHandling::Idle(RETENTION, None)),
    other("kv-cache-retention", &[], PluginHandling::Idle(RETENTION, None)),
    PluginEntry {
        name: "token-producer",
        aliases: &["tokenizer"],
        slots: &[],
        fate: PluginHandling::Settings(mapping::tokens),
    },
    other("burst-prefix-cache-producer", &[], PluginHandling::Settings(mapping::burst_prefix)),
    other("mm-embeddings-cache-producer", &[Slot::Extractor], PluginHandling::Settings(mapping::embeddings_cache)),
    // The data layer.
    other("metrics-data-source", &[Slot::Source], PluginHandling::Settings(mapping::metrics_source)),
    PluginEntry {
        name: "core-metrics-extractor",
        aliases: &["model-server-protocol-metrics"],
        slots: &[Slot::Extractor],
        fate: PluginHandling::Settings(mapping::core_metrics),
    },
    other("endpoint-notification-source", &[Slot::Source], PluginHandling::BuiltIn("", &[])),
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
    other("topology-extractor", &[Slot::Extractor], PluginHandling::BuiltIn("", &[])),
    other(
        "k8s-notification-source",
        &[Slot::Source],
        PluginHandling::Idle("the pool's own objects in Kubernetes are watched without it", None),
    ),
    other("local-syncer", &[Slot::Syncer], PluginHandling::Idle(BY_SYNC, None)),
    PluginEntry {
        name: "redis-syncer",
        aliases: &["redis-state-store"],
        slots: &[Slot::Syncer],
        fate: PluginHandling::Idle(BY_SYNC, None),
    },
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
    PluginEntry {
        name: "program-aware-fairness",
        aliases: &["program-aware-fairness-policy"],
        slots: &[Slot::Fairness],
        fate: PluginHandling::Policy,
    },
    other("round-robin-fairness-policy", &[Slot::Fairness], PluginHandling::Policy),
    other("edf-ordering-policy", &[Slot::Ordering], PluginHandling::Policy),
    other("fcfs-ordering-policy", &[Slot::Ordering], PluginHandling::Policy),
    other("slo-deadline-ordering-policy", &[Slot::Ordering], PluginHandling::Policy),
    other("priority-holdback-policy", &[Slot::UsageLimit], PluginHandling::Policy),
    other("soft-reflective-ceiling-policy", &[Slot::UsageLimit], PluginHandling::Policy),
    other("static-usage-limit-policy", &[Slot::UsageLimit], PluginHandling::Policy),
    PluginEntry {
        name: "sheddable-eviction-filter",
        aliases: &["eviction-sheddable-filter"],
        slots: &[],
        fate: PluginHandling::BuiltIn(EVICTION, &[]),
    },
    PluginEntry {
        name: "priority-then-time-eviction-order-policy",
        aliases: &["eviction-priority-then-time-ordering"],
        slots: &[],
        fate: PluginHandling::BuiltIn(EVICTION, &[]),
    },
    // Reports about a request.
    other("destination-endpoint-served-verifier", &[], PluginHandling::Settings(mapping::served_verifier)),
    other("request-attribute-reporter", &[], PluginHandling::Settings(mapping::attribute_reporter)),
    // Several clusters.
    other("multicluster-file-discovery", &[Slot::Discovery], PluginHandling::Settings(mapping::cluster_discovery)),
    other("multicluster-metrics-data-source", &[Slot::Source], PluginHandling::Idle(MULTICLUSTER, None)),
    other("multicluster-metrics-extractor", &[Slot::Extractor], PluginHandling::Idle(MULTICLUSTER, None)),
    other("latency-observer-producer-hub", &[Slot::Source], PluginHandling::Idle(mapping::LEARNED, None)),
];
