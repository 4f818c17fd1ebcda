//! What the process runs by, after flags, environment and file have been merged and checked. The serving code reads only this.

use attache_flow::PoolFlow;
use attache_pool::EndpointSpec;
use attache_pool::health::HealthPolicy;
use attache_scheduling::choice::{ModelRule, RequestSpec, StrategySpec};
use attache_scheduling::policy::PolicyMap;
use attache_scheduling::registry::BuildError;
use attache_scheduling::router::{Destination, ModelRewrites, PoolMatch};
use attache_scheduling::{Choices, Objective, Scheduler, SplitPolicy};
use attache_types::limits::Limits;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

mod kubernetes;
pub mod tenants;
pub use attache_discovery::settings::{DnsSource, FileSource, KubernetesSource, PodsOf, PoolGroup, PoolSearch};
pub use attache_picker::settings::{
    ExchangeSettings, ExplainSettings, ModelsAnswer, OnUnparseable, ReportUsage, TenantRule, TenantSource, UsageCount,
};
pub use attache_quota::{CountIn, OnStoreFailure, OnUnknownUser, TenantSettings, UnknownPaths, UserRecordSettings};
pub use attache_scrape::ScrapeSettings;
pub use attache_serving::tls::{ClientAuthSettings, ClientName};
pub use kubernetes::PoolTemplate;
pub use tenants::{LabelSettings, NameSettings, RedisSettings};

/// Everything.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Ports, threads, TLS, drain. A change needs a restart, but for the names of clients.
    pub server: ServerSettings,
    /// Logs and traces. A change needs a restart.
    pub telemetry: TelemetrySettings,
    /// Bounds on requests. Reloaded.
    pub limits: Limits,
    /// What tenants may have. Reloaded.
    pub tenants: Option<TenantSettings>,
    /// What models may have, whoever asks for them. Reloaded.
    pub models: Option<TenantSettings>,
    /// The Redis for all that is kept in one. Reloaded.
    pub redis: Option<RedisSettings>,
    /// How `prefix-affinity` routes single models. Reloaded.
    pub model_policies: PolicyMap,
    /// How the ext-proc exchange behaves. Reloaded.
    pub exchange: ExchangeSettings,
    /// The pools; at least one, or a template. Reloaded.
    pub pools: Vec<PoolSettings>,
    /// Pools that come and go with objects of a cluster. Reloaded.
    pub templates: Vec<PoolTemplate>,
}

/// Listeners and lifetime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerSettings {
    /// Address of all listeners.
    pub bind: IpAddr,
    /// ext-proc, 9002. 0 lets the system choose.
    pub grpc_port: u16,
    /// gRPC health, 9003.
    pub grpc_health_port: u16,
    /// Metrics and admin pages, 9090.
    pub metrics_port: u16,
    /// Also answer health checks on the ext-proc port, for Envoy's active health checking.
    pub health_checking: bool,
    /// Threads that serve ext-proc.
    pub workers: usize,
    /// Transport security of the ext-proc port.
    pub tls: TlsSettings,
    /// Certificates of clients on the ext-proc port. `None`: clients need none.
    pub client_auth: Option<ClientAuthSettings>,
    /// From SIGTERM until new streams are refused: the time that load balancers need to look away.
    pub drain_min_delay: Duration,
    /// From SIGTERM until open streams are cut.
    pub drain_deadline: Duration,
    /// Only the replica that holds the lease of the pool, or of the search for pools, says that it is ready.
    pub leader_election: bool,
    /// Conditions of `InferenceModel`s are written by the replica that holds the pool's lease, or not at all. `None`: every replica writes those
    /// that are not written yet, as far as its rights go. With `leader_election` the leader writes in any case.
    pub model_status: Option<bool>,
    /// Metrics and admin pages are for those whom the cluster lets see them.
    pub metrics_auth: bool,
    /// Host names under which admin pages may be requested beside IP addresses and `localhost`, in lower case.
    pub admin_hosts: Arc<[String]>,
    /// Seed of all random choices; drawn from the system when `None`.
    pub seed: Option<u64>,
}

/// Transport security of the ext-proc port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TlsSettings {
    /// Plain HTTP/2.
    Off,
    /// A certificate made at start, as the reference picker does.
    SelfSigned,
    /// `tls.crt` and `tls.key` in a directory.
    Files {
        /// The directory.
        directory: PathBuf,
        /// Watch it and take new pairs.
        reload: bool,
    },
}

/// Logs and traces.
#[derive(Clone, Debug, PartialEq)]
pub struct TelemetrySettings {
    /// A `tracing` filter, `info` or `attache=debug,info`.
    pub log_filter: String,
    /// One JSON object a line; else text for people.
    pub log_json: bool,
    /// OTLP over HTTP (`http://collector:4318`); off when `None`.
    pub otlp_endpoint: Option<String>,
    /// Part of the requests that are traced when the caller has not decided, 0..=1.
    pub trace_ratio: f64,
    /// Decisions kept for `/decisions`; 0 keeps none.
    pub decisions_kept: usize,
    /// Whose names become labels of metrics.
    pub labels: LabelSettings,
}

/// One pool.
#[derive(Clone, Debug)]
pub struct PoolSettings {
    /// Its name, unique.
    pub name: Arc<str>,
    /// What sends requests here.
    pub matches: PoolMatch,
    /// Refuse models that neither `matches` nor `rewrites` names.
    pub reject_unknown_models: bool,
    /// The model of requests that name none.
    pub default_model: Option<String>,
    /// Model names.
    pub rewrites: ModelRewrites,
    /// The strategy's name in the registry, or several with weights.
    pub strategy: String,
    /// Its parameters.
    pub strategy_parameters: serde_json::Value,
    /// Strategies by model.
    pub rules: Vec<ModelRule>,
    /// What requests may choose.
    pub by_request: Option<RequestSpec>,
    /// One endpoint or a list.
    pub destination: Destination,
    /// Endpoints in a list, the primary included.
    pub max_destinations: usize,
    /// Endpoints that the configuration names.
    pub endpoints: Vec<EndpointSpec>,
    /// Names that are resolved again and again.
    pub dns: Vec<DnsSource>,
    /// A file that lists endpoints.
    pub file: Option<FileSource>,
    /// Pods that are endpoints.
    pub kubernetes: Option<KubernetesSource>,
    /// Scraping.
    pub scrape: ScrapeSettings,
    /// Ejection.
    pub health: HealthPolicy,
    /// What is known of the servers' KV caches.
    pub prefix: PrefixSettings,
    /// Prefill and decode on different servers.
    pub disaggregation: Option<Disaggregation>,
    /// What operators want of its latency.
    pub objective: Option<Objective>,
    /// Queues before it, when it is full.
    pub flow: Option<PoolFlow>,
    /// Requests that are predicted to miss the time that they ask for are refused.
    pub deadline_admission: bool,
}

/// Which requests are split between prefill and decode servers, and how.
#[derive(Clone, Debug)]
pub struct Disaggregation {
    /// Which requests, and over which servers.
    pub split: SplitPolicy,
    /// How.
    pub mode: attache_disagg::Mode,
}

impl PoolSettings {
    /// The pool's way to decide. Strategies that `previous` has as well keep their memory.
    ///
    /// # Errors
    /// When a strategy can't be built.
    pub fn scheduler(&self, previous: Option<&Choices>) -> Result<Scheduler, BuildError> {
        let default = StrategySpec { name: self.strategy.clone(), parameters: self.strategy_parameters.clone() };
        let choices = Choices::build(&default, &self.rules, self.by_request.as_ref(), previous)?;
        let scheduler = Scheduler::new(choices, self.health.clone(), self.max_destinations);
        let scheduler = scheduler.aiming_at(self.objective.unwrap_or_default());
        Ok(scheduler.splitting(self.disaggregation.as_ref().map(|d| d.split.clone())))
    }

    /// The names and parameters of its own strategy and of those of its rules.
    pub fn strategies(&self) -> impl Iterator<Item = (&str, &serde_json::Value)> {
        let rules = self.rules.iter().flat_map(|rule| {
            let profiles = rule.profiles.iter().map(|profile| &profile.strategy);
            rule.strategy.iter().chain(profiles).map(|spec| (&*spec.name, &spec.parameters))
        });
        std::iter::once((&*self.strategy, &self.strategy_parameters)).chain(rules)
    }

    /// The names and parameters of the strategies that requests may name.
    pub fn allowed_strategies(&self) -> impl Iterator<Item = (&str, &serde_json::Value)> {
        self.by_request.iter().flat_map(|spec| &spec.allowed).map(|spec| (&*spec.name, &spec.parameters))
    }

    /// Whether a strategy of it reads SLO profiles in Redis.
    #[must_use]
    pub fn reads_redis(&self) -> bool {
        let reads = |s: Scheduler| s.choices.slo_profiles().iter().any(|profiles| profiles.reads_redis());
        self.scheduler(None).is_ok_and(reads)
    }
}

/// How a pool's prompts become block keys, and where the knowledge of who holds them comes from. A change starts that knowledge anew.
#[derive(Clone, Debug, PartialEq)]
pub struct PrefixSettings {
    /// What turns prompts into tokens.
    pub tokenizer: TokenizerSettings,
    /// Tokens in a block; those of most engines, whose events and metrics tell, when `None`.
    pub block_size: Option<u32>,
    /// Bytes of the index.
    pub max_bytes: u64,
    /// Blocks of the index; as many as its bytes hold when `None`.
    pub max_blocks: Option<u64>,
    /// Part of what engines' own words leave of it that one tenant's guesses keep where all of it is used up, 0.01..=1.
    pub tenant_share: f32,
    /// The header that names the tenant, lower case.
    pub tenant_header: Option<String>,
    /// Tenants do not find each other's prefixes.
    pub isolate_tenants: bool,
    /// How long a request that has not answered yet counts as a cached prefix.
    pub claim_life: Duration,
    /// Requests are sent to the data-parallel rank that holds most of their prompt, or has least to do, not to whichever the server chooses.
    pub choose_rank: bool,
    /// Beginnings of text blocks that change with every request and are left out of the keys, besides the built-in ones.
    pub volatile: Vec<VolatileRule>,
    /// Engines' own word on what they hold.
    pub kv_events: Option<KvEventSettings>,
}

/// Text that is left out of the keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolatileRule {
    /// How it begins.
    pub prefix: String,
    /// How it ends, where that matters.
    pub suffix: String,
}

/// What turns prompts into tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerSettings {
    /// Nothing: blocks of text.
    Characters,
    /// A table of OpenAI's.
    Tiktoken {
        /// Its name; chosen by the model's when `None`.
        encoding: Option<String>,
    },
    /// A model's own files.
    HuggingFace {
        /// `tokenizer.json`, `tokenizer_config.json` and, where there is one, `chat_template.jinja` lie here.
        directory: PathBuf,
    },
    /// The pool's servers.
    Remote(RemoteTokenizer),
}

/// How servers are asked for tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteTokenizer {
    /// The URL of each endpoint: `{address}` stands for its address and port, `{ip}` for its address alone. `None`: plain HTTP at its address.
    pub url: Option<String>,
    /// The URL of a model's own tokenizer, asked in place of the endpoints.
    pub model_urls: BTreeMap<String, String>,
    /// vLLM's render API in place of `/tokenize`.
    pub render: bool,
    /// How long a decision waits.
    pub timeout: Duration,
    /// How long a request may take, all its attempts together.
    pub request_timeout: Duration,
    /// After how long without a response a model's tokenizer is probed.
    pub health_check_period: Duration,
    /// After how long without a request a model is forgotten.
    pub ttl: Duration,
    /// Models at once.
    pub max_models: u32,
    /// What makes the keys of a prompt without tokens.
    pub fallback: TokenizerFallback,
}

/// What makes the keys of a prompt of which the remote tokenizer gives no tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum TokenizerFallback {
    /// Nothing: the prompt has no keys, so that it is routed by load.
    #[default]
    None,
    /// Blocks of text.
    Characters,
    /// The table of OpenAI's that the model's name stands for.
    Tiktoken,
}

/// Where KV events come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEventSettings {
    /// Port of each endpoint's publisher; that of rank r is r higher. Not used with `bind`.
    pub port: u16,
    /// Port of each endpoint's replay socket.
    pub replay_port: Option<u16>,
    /// Data-parallel ranks of each endpoint.
    pub ranks: u16,
    /// Topics that begin so are read.
    pub topic: String,
    /// One socket that all publishers connect to, `tcp://0.0.0.0:5557`.
    pub bind: Option<String>,
    /// With `bind`, events count only if they come from the IP address of the endpoint that they name. `false` where
    /// publishers' addresses are translated.
    pub require_sender_address: bool,
}

impl ServerSettings {
    fn client_ca_file(&self) -> Option<&PathBuf> {
        self.client_auth.as_ref().map(|auth| &auth.ca_file)
    }

    /// These, with what of `new` counts without a restart.
    #[must_use]
    pub fn reloaded(&self, new: &Self) -> Self {
        let mut server = self.clone();
        if let (Some(auth), Some(new)) = (&mut server.client_auth, &new.client_auth) {
            auth.names.clone_from(&new.names);
        }
        server
    }
}

impl Settings {
    /// The settings of `new` that this process can't take without a restart, as the file spells them.
    #[must_use]
    pub fn restart_needed(&self, new: &Settings) -> Vec<&'static str> {
        let (a, b) = (&self.server, &new.server);
        let (t, u) = (&self.telemetry, &new.telemetry);
        let changed = [
            ("server.bind", a.bind != b.bind),
            ("server.grpcPort", a.grpc_port != b.grpc_port),
            ("server.grpcHealthPort", a.grpc_health_port != b.grpc_health_port),
            ("server.metricsPort", a.metrics_port != b.metrics_port),
            ("server.healthChecking", a.health_checking != b.health_checking),
            ("server.workers", a.workers != b.workers),
            ("server.tls", a.tls != b.tls || a.client_ca_file() != b.client_ca_file()),
            ("server.drain", (a.drain_min_delay, a.drain_deadline) != (b.drain_min_delay, b.drain_deadline)),
            ("server.leaderElection", a.leader_election != b.leader_election),
            ("server.modelStatus", a.model_status != b.model_status),
            ("server.metricsAuth", a.metrics_auth != b.metrics_auth),
            ("server.adminHosts", a.admin_hosts != b.admin_hosts),
            ("server.seed", a.seed != b.seed),
            ("telemetry.logLevel", t.log_filter != u.log_filter),
            ("telemetry.logFormat", t.log_json != u.log_json),
            ("telemetry.otlpEndpoint", t.otlp_endpoint != u.otlp_endpoint),
            ("telemetry.traceRatio", t.trace_ratio.to_bits() != u.trace_ratio.to_bits()),
            ("telemetry.decisionsKept", t.decisions_kept != u.decisions_kept),
            ("telemetry.labels", t.labels != u.labels),
        ];
        changed.into_iter().filter(|(_, changed)| *changed).map(|(name, _)| name).collect()
    }
}
