//! The settings of the process, after flags, environment and file were merged and checked. The
//! serving code reads nothing else.

use attache_flow::PoolFlow;
use attache_pool::EndpointSpec;
use attache_pool::health::HealthPolicy;
use attache_scheduling::choice::{ModelRule, RequestSpec, StrategySpec};
use attache_scheduling::policy::PolicyMap;
use attache_scheduling::registry::{BuildError, Registry};
use attache_scheduling::router::{Destination, DestinationNames, ModelRewrites, PoolMatch, PoolSwitches};
use attache_scheduling::{Choices, Objective, Scheduler, SplitPolicy};
use attache_types::limits::Limits;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

mod kubernetes;
pub mod sync;
pub mod tenants;
pub use attache_pool::source::{DnsSource, FileSource, KubernetesSource, PodsOf, PoolGroup, PoolSearch};
pub use attache_quota::{CountIn, OnStoreFailure, OnUnknownUser, TenantSettings, UnknownPaths, UserRecordSettings};
pub use attache_request::settings::{
    ExchangeSettings, ExplainSettings, LabelSettings, ModelsAnswer, NameSettings, OnUnparseable, ReportUsage,
    TenantRule, TenantSource, UsageCount,
};
pub use attache_scrape::ScrapeSettings;
pub use attache_serving::tls::{ClientAuthSettings, ClientName};
pub use kubernetes::PoolTemplate;
pub use sync::{NatsSettings, SyncSettings};
pub use tenants::RedisSettings;

/// All settings of the process.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Ports, threads, TLS, drain.
    pub server: ServerSettings,
    /// Logs and traces.
    pub telemetry: TelemetrySettings,
    /// Limits on requests.
    pub limits: Limits,
    /// Rate limits of tenants.
    pub tenants: Option<TenantSettings>,
    /// Rate limits of models over all clients.
    pub models: Option<TenantSettings>,
    /// The Redis for quotas, tenant records and SLO profiles.
    pub redis: Option<RedisSettings>,
    /// State that is shared with other pickers.
    pub sync: Option<SyncSettings>,
    /// How `prefix-affinity` routes single models.
    pub model_policies: PolicyMap,
    /// How the ext-proc exchange behaves.
    pub exchange: ExchangeSettings,
    /// The pools; at least one, or a template.
    pub pools: Vec<PoolSettings>,
    /// Templates of pools that come and go with cluster objects.
    pub templates: Vec<PoolTemplate>,
}

/// Listeners, threads, TLS and shutdown. In JSON: the keys of the file, without those of its sections.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ServerSettings {
    /// IP address of all listeners.
    pub bind: IpAddr,
    /// Port of ext-proc, 9002 by default. 0 lets the system choose.
    pub grpc_port: u16,
    /// Port of gRPC health, 9003 by default.
    pub grpc_health_port: u16,
    /// Port of metrics and admin pages, 9090 by default.
    pub metrics_port: u16,
    /// Whether the ext-proc port answers health checks too, for Envoy's active health checking.
    pub health_checking: bool,
    /// Number of threads that serve ext-proc.
    pub workers: usize,
    /// Certificate of the ext-proc port.
    #[serde(skip)]
    pub tls: TlsSettings,
    /// Required client certificates on the ext-proc port. `None`: clients need none.
    #[serde(skip)]
    pub client_auth: Option<ClientAuthSettings>,
    /// Time from SIGTERM until new streams are refused, so that load balancers can notice.
    #[serde(skip)]
    pub drain_min_delay: Duration,
    /// Time from SIGTERM until open streams are cut.
    #[serde(skip)]
    pub drain_deadline: Duration,
    /// Whether only the replica that holds the lease of the pool, or of the search for pools, reports ready.
    pub leader_election: bool,
    /// Whether conditions of `InferenceModel`s are written, by the replica that holds the pool's lease. `None`: every
    /// replica writes missing conditions if it has the right. With `leader_election` the leader writes in any case.
    pub model_status: Option<bool>,
    /// Whether metrics and admin pages require a token that the cluster authorizes.
    pub metrics_auth: bool,
    /// Host names, in lower case, under which admin pages may be requested besides IP addresses and `localhost`.
    pub admin_hosts: Arc<[String]>,
    /// Seed of all random choices; `None` draws one from the system.
    pub seed: Option<u64>,
}

/// TLS of the ext-proc port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsSettings {
    /// Plain HTTP/2 without TLS.
    Off,
    /// A self-signed certificate made at start, as in the reference picker.
    SelfSigned,
    /// `tls.crt` and `tls.key` in a directory.
    Files {
        /// Path of that directory.
        directory: PathBuf,
        /// Whether changed files take effect without a restart.
        reload: bool,
    },
}

/// Settings of logs, traces and metric labels.
#[derive(Clone, Debug, PartialEq)]
pub struct TelemetrySettings {
    /// A `tracing` filter such as `info` or `attache=debug,info`.
    pub log_filter: String,
    /// Whether logs are one JSON object a line; otherwise text.
    pub log_json: bool,
    /// Collector of traces by OTLP over HTTP (`http://collector:4318`); `None` sends none.
    pub otlp_endpoint: Option<String>,
    /// Fraction of requests that are traced if the caller has not decided, 0..=1.
    pub trace_ratio: f64,
    /// Number of decisions kept for `/decisions`; 0 keeps none.
    pub decisions_kept: usize,
    /// Names that become metric labels.
    pub labels: LabelSettings,
}

/// Settings of one pool.
#[derive(Clone, Debug)]
pub struct PoolSettings {
    /// Unique name of the pool.
    pub name: Arc<str>,
    /// Conditions of requests for this pool.
    pub matches: PoolMatch,
    /// Settings that are on or off.
    pub switches: PoolSwitches,
    /// Model of requests that name none.
    pub default_model: Option<String>,
    /// Replacements of model names.
    pub rewrites: ModelRewrites,
    /// Name of the strategy in the registry, or several with weights.
    pub strategy: String,
    /// Parameters of the strategy.
    pub strategy_parameters: serde_json::Value,
    /// Strategies for single models.
    pub rules: Vec<ModelRule>,
    /// Strategies that requests may select by header.
    pub by_request: Option<RequestSpec>,
    /// Whether Envoy gets one endpoint or a list with fallbacks.
    pub destination: Destination,
    /// The names under which Envoy gets them.
    pub destination_names: DestinationNames,
    /// The plugins that the names of its strategies mean.
    pub registry: Registry,
    /// Most endpoints in that list, the primary included.
    pub max_destinations: usize,
    /// Endpoints that the configuration lists.
    pub endpoints: Vec<EndpointSpec>,
    /// DNS names whose addresses are endpoints.
    pub dns: Vec<DnsSource>,
    /// A file that lists endpoints.
    pub file: Option<FileSource>,
    /// Kubernetes pods that are endpoints.
    pub kubernetes: Option<KubernetesSource>,
    /// How metrics of endpoints are scraped.
    pub scrape: ScrapeSettings,
    /// When endpoints are ejected.
    pub health: HealthPolicy,
    /// Prefix index: tokenizer, block size, memory, KV events.
    pub prefix: PrefixSettings,
    /// Prefill and decode on different workers.
    pub disaggregation: Option<Disaggregation>,
    /// Latency objective of the pool.
    pub objective: Option<Objective>,
    /// Queues while the pool is saturated.
    pub flow: Option<PoolFlow>,
}

/// Which requests are split between prefill and decode workers, and how.
#[derive(Clone, Debug)]
pub struct Disaggregation {
    /// Which requests are split, and over which workers.
    pub split: SplitPolicy,
    /// Who sends the prefill request.
    pub mode: attache_disagg::Mode,
}

impl PoolSettings {
    /// Builds the pool's scheduler. Strategies that `previous` has as well keep their state.
    ///
    /// # Errors
    /// If a strategy can't be built.
    pub fn scheduler(&self, previous: Option<&Choices>) -> Result<Scheduler, BuildError> {
        let default = StrategySpec { name: self.strategy.clone(), parameters: self.strategy_parameters.clone() };
        let choices = Choices::build(&self.registry, &default, &self.rules, self.by_request.as_ref(), previous)?;
        let scheduler = Scheduler::new(choices, self.health.clone(), self.max_destinations);
        let scheduler = scheduler.aiming_at(self.objective.unwrap_or_default());
        Ok(scheduler.splitting(self.disaggregation.as_ref().map(|d| d.split.clone())))
    }

    /// Names and parameters of the pool's own strategy and of those of its rules.
    pub fn strategies(&self) -> impl Iterator<Item = (&str, &serde_json::Value)> {
        let rules = self.rules.iter().flat_map(|rule| {
            let profiles = rule.profiles.iter().map(|profile| &profile.strategy);
            rule.strategy.iter().chain(profiles).map(|spec| (&*spec.name, &spec.parameters))
        });
        std::iter::once((&*self.strategy, &self.strategy_parameters)).chain(rules)
    }

    /// Names and parameters of the strategies that requests may select.
    pub fn allowed_strategies(&self) -> impl Iterator<Item = (&str, &serde_json::Value)> {
        self.by_request.iter().flat_map(|spec| &spec.allowed).map(|spec| (&*spec.name, &spec.parameters))
    }

    /// Whether a strategy of the pool reads SLO profiles from Redis.
    #[must_use]
    pub fn reads_redis(&self) -> bool {
        let reads = |s: Scheduler| s.choices.slo_profiles().iter().any(|profiles| profiles.reads_redis());
        self.scheduler(None).is_ok_and(reads)
    }
}

/// How prompts become block keys, and where cached prefixes are learned from. A change starts with an empty index.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixSettings {
    /// Turns prompts into tokens.
    pub tokenizer: TokenizerSettings,
    /// Block size in tokens; `None`: that of most engines, from their events and metrics.
    pub block_size: Option<u32>,
    /// Memory limit of the index, bytes.
    pub max_bytes: u64,
    /// Most blocks in the index; `None`: as many as its bytes can hold.
    pub max_blocks: Option<u64>,
    /// Minimum fraction of the estimated entries that one tenant keeps when the index is full, 0.01..=1.
    pub tenant_share: f32,
    /// Header that names the tenant, lower case.
    pub tenant_header: Option<String>,
    /// Whether tenants do not share cached prefixes.
    pub isolate_tenants: bool,
    /// How long a request without a response counts as a cached prefix.
    pub claim_life: Duration,
    /// Whether prompts in flight match others to the block, as in AIBrix's table, and not only at powers of two.
    pub claim_every_block: bool,
    /// Whether Attaché chooses the data-parallel rank by cached prefix and load, instead of the model server.
    pub choose_rank: bool,
    /// Text blocks that change with every request and are left out of the keys, besides the built-in ones.
    pub volatile: Vec<VolatileRule>,
    /// Subscription to the KV events of engines; `None`: estimates only.
    pub kv_events: Option<KvEventSettings>,
}

/// A block of text that is left out of block keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolatileRule {
    /// Start of the text.
    pub prefix: String,
    /// End of the text; empty for any.
    pub suffix: String,
}

/// Turns prompts into tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSettings {
    /// No tokens: blocks of text.
    Characters,
    /// An encoding of OpenAI's tiktoken.
    Tiktoken {
        /// Name of the encoding; `None` selects it by the model's name.
        encoding: Option<String>,
    },
    /// A model's own tokenizer files.
    HuggingFace {
        /// Directory with `tokenizer.json`, `tokenizer_config.json` and, if it exists, `chat_template.jinja`.
        directory: PathBuf,
    },
    /// The tokenize API of the pool's model servers.
    Remote(RemoteTokenizer),
}

/// How model servers are asked for tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteTokenizer {
    /// URL for each endpoint: `{address}` stands for its address and port, `{ip}` for its address alone. `None`:
    /// plain HTTP at its address.
    pub url: Option<String>,
    /// URLs of tokenizers by model, used instead of the endpoints.
    pub model_urls: BTreeMap<String, String>,
    /// Whether vLLM's render API is used instead of `/tokenize`.
    pub render: bool,
    /// How long a decision waits for tokens.
    pub timeout: Duration,
    /// Longest time for a request, all its attempts together.
    pub request_timeout: Duration,
    /// Time without a response after which a model's tokenizer is probed.
    pub health_check_period: Duration,
    /// Time without a request after which a model is forgotten.
    pub ttl: Duration,
    /// Most models at once.
    pub max_models: u32,
    /// Source of the block keys of a prompt without tokens.
    pub fallback: TokenizerFallback,
}

/// Source of the block keys of a prompt for which the remote tokenizer returns no tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TokenizerFallback {
    /// None: the prompt has no keys, so its request is routed by load.
    #[default]
    None,
    /// Blocks of text instead of tokens.
    Characters,
    /// The tiktoken encoding for the model's name.
    Tiktoken,
}

/// How KV events are received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventSettings {
    /// Port of each endpoint's publisher; rank r adds r to it. Not used with `bind`.
    pub port: u16,
    /// Port of each endpoint's replay socket.
    pub replay_port: Option<u16>,
    /// Number of data-parallel ranks of each endpoint.
    pub ranks: u16,
    /// Prefix of the topics to subscribe to.
    pub topic: String,
    /// A socket that all publishers connect to, `tcp://0.0.0.0:5557`.
    pub bind: Option<String>,
    /// With `bind`, events count only if they come from the IP address of the endpoint that they name. Set `false`
    /// if publishers' addresses are translated.
    pub require_sender_address: bool,
}

impl ServerSettings {
    /// These settings, with the values of `new` that take effect without a restart.
    #[must_use]
    pub fn reloaded(&self, new: &Self) -> Self {
        let mut server = self.clone();
        if let (Some(auth), Some(new)) = (&mut server.client_auth, &new.client_auth) {
            auth.names.clone_from(&new.names);
        }
        server
    }
}

impl Settings {}
