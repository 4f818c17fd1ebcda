//! The flags of `attache run`: the reference picker's names and defaults, and Attaché's own. Every flag has an
//! environment variable. A flag outranks it, it outranks the file, the file outranks the default. If a flag is given
//! twice, the last one counts, as in Go.

use attache_config::aibrix_env::AibrixEnv;
use attache_config::localai_env::LocalaiEnv;
use attache_config::own_env::OwnEnv;
use attache_config::reference_env::ReferenceEnv;
use attache_config::units::parse_duration;
use attache_config::{KubernetesFlags, Overrides};
use attache_pool::Engine;
use attache_record::{DEFAULT_MAX_BYTES, RecordSettings};
use clap::{Args, CommandFactory, ValueEnum};
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  Two servers on this machine, plain gRPC for an Envoy beside it:
    attache run --endpoint 127.0.0.1:8000 --endpoint 127.0.0.1:8001 --secure-serving=false

  From a file that is reloaded when it changes:
    attache run --config-file attache.yaml

  A file of GIE's picker or of llm-d, which names no endpoints:
    attache run --config-file epp-config.yaml --endpoint 10.0.0.11:8000

  The pods of an InferencePool, in a cluster:
    attache run --pool-name vllm-pool --pool-namespace default

  Every InferencePool with a label, each by a Service of its own:
    attache run --pool-selector serving=attache

  Certificates of a Kubernetes secret, replaced while running:
    attache run --config-file attache.yaml --cert-path /etc/attache/tls --enable-cert-reload

  Only gateways with a certificate may connect:
    attache run --config-file attache.yaml --cert-path /etc/attache/tls --enable-cert-reload --client-ca-file \
                        /etc/attache/tls/ca.crt \
      --client-name 'spiffe://cluster.local/ns/gateways/*'

  One of several pickers that share state over NATS:
    attache run --config-file attache.yaml --sync-nats-url nats://nats:4222

  Traces of every tenth request:
    attache run --config-file attache.yaml --otlp-endpoint http://collector:4318 --trace-ratio 0.1

Exit codes: 0 ended after SIGTERM or SIGINT, 64 wrong usage, 70 internal error or an error of the system such as a port in use, \
                        78 wrong configuration.";

/// OpenTelemetry's variable for the sampling ratio.
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";

/// Format of logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormatArg {
    /// Text for people; the default on a terminal.
    Text,
    /// One JSON object per line; the default elsewhere.
    Json,
}

/// Choose an endpoint for every request of Envoy.
///
/// Endpoints come from `--endpoint`, from a configuration file, or from both. AIBrix's variables ROUTING_ALGORITHM,
/// AIBRIX_PREFIX_CACHE_… and AIBRIX_ROUTER_… hold where neither a flag nor the file says otherwise.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES, args_override_self = true)]
pub struct RunArgs {
    /// Configuration file, Attaché's own or an EndpointPickerConfig; watched and reloaded
    #[arg(
        long,
        alias = "config",
        value_name = "FILE",
        env = "ATTACHE_CONFIG_FILE",
        conflicts_with = "config_text",
        help_heading = "Pools and routing"
    )]
    pub config_file: Option<PathBuf>,
    /// The configuration as text, instead of a file
    #[arg(
        long,
        value_name = "YAML",
        env = "ATTACHE_CONFIG_TEXT",
        hide_env_values = true,
        help_heading = "Pools and routing"
    )]
    pub config_text: Option<String>,
    /// A model server, `ip:port`; may be given several times
    #[arg(
        long = "endpoint",
        value_name = "IP:PORT",
        env = "ATTACHE_ENDPOINTS",
        value_delimiter = ',',
        help_heading = "Pools and routing"
    )]
    pub endpoints: Vec<String>,
    /// Strategy that chooses endpoints [default: predicted-latency]
    #[arg(long, value_name = "NAME", env = "ATTACHE_STRATEGY", help_heading = "Pools and routing")]
    pub strategy: Option<String>,
    /// As LocalAI's flag: `true` is `prefix-affinity` for pools that name no strategy, `false` its floor without
    /// prompts [default: the variable LOCALAI_DISTRIBUTED_PREFIX_CACHE]
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        help_heading = "Pools and routing"
    )]
    pub distributed_prefix_cache: Option<String>,
    /// Time for which `prefix-affinity` remembers prompts, as LocalAI's flag [default:
    /// the variable LOCALAI_DISTRIBUTED_PREFIX_CACHE_TTL, else 5m]
    #[arg(long, value_name = "TIME", help_heading = "Pools and routing")]
    pub distributed_prefix_cache_ttl: Option<String>,
    /// Interval of scrapes of a busy endpoint [default: 50ms]
    #[arg(
        long, value_name = "TIME", env = "ATTACHE_REFRESH_METRICS_INTERVAL", value_parser = parse_duration,
        help_heading = "Pools and routing"
    )]
    pub refresh_metrics_interval: Option<Duration>,
    /// Metrics older than this are ignored [default: 2s]
    #[arg(
        long, value_name = "TIME", env = "ATTACHE_METRICS_STALENESS_THRESHOLD", value_parser = parse_duration,
        help_heading = "Pools and routing"
    )]
    pub metrics_staleness_threshold: Option<Duration>,
    /// Ignore the gateway's subset hint [default: false]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_DISABLE_ENDPOINT_SUBSET_FILTER", num_args = 0..=1,
        require_equals = true, default_missing_value = "true", value_parser = parse_switch,
        help_heading = "Pools and routing"
    )]
    pub disable_endpoint_subset_filter: Option<bool>,
    /// Request header with the destination; may be given several times [default: x-gateway-destination-endpoint]
    #[arg(
        long = "destination-header",
        value_name = "NAME",
        env = "ATTACHE_DESTINATION_HEADERS",
        value_delimiter = ',',
        help_heading = "Pools and routing"
    )]
    pub destination_headers: Vec<String>,
    /// Dynamic metadata key with the destination; may be given several times [default:
    /// x-gateway-destination-endpoint]
    #[arg(
        long = "destination-metadata-key",
        value_name = "NAME",
        env = "ATTACHE_DESTINATION_METADATA_KEYS",
        value_delimiter = ',',
        help_heading = "Pools and routing"
    )]
    pub destination_metadata_keys: Vec<String>,
    /// Namespace of these metadata keys [default: envoy.lb]
    #[arg(
        long,
        value_name = "NAME",
        env = "ATTACHE_DESTINATION_METADATA_NAMESPACE",
        help_heading = "Pools and routing"
    )]
    pub destination_metadata_namespace: Option<String>,
    /// Trust the headers of clients that name objective, flow and model [default: false]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_TRUST_CLIENT_HEADERS", num_args = 0..=1,
        require_equals = true, default_missing_value = "true", value_parser = parse_switch,
        help_heading = "Pools and routing"
    )]
    pub trust_client_headers: Option<bool>,

    /// Answer as the conformance suite of the Gateway API Inference Extension expects: the header
    /// `test-epp-endpoint-selection` names endpoints. Lets every client choose its endpoint [default: false]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_CONFORMANCE_HEADERS", num_args = 0..=1,
        require_equals = true, default_missing_value = "true", value_parser = parse_switch,
        help_heading = "Pools and routing"
    )]
    pub conformance_headers: Option<bool>,

    /// The InferencePool whose pods are the endpoints
    #[arg(
        long,
        value_name = "NAME",
        env = "ATTACHE_POOL_NAME",
        conflicts_with_all = ["pool_selector", "endpoint_selector"],
        help_heading = "Kubernetes"
    )]
    pub pool_name: Option<String>,
    /// Serve every InferencePool with these labels, each as a separate pool: `serving=attache`
    #[arg(
        long,
        value_name = "SELECTOR",
        env = "ATTACHE_POOL_SELECTOR",
        conflicts_with = "endpoint_selector",
        help_heading = "Kubernetes"
    )]
    pub pool_selector: Option<String>,
    /// Namespace of the InferencePool and its pods [default: the variable NAMESPACE, else the namespace of Attaché]
    #[arg(long, value_name = "NAME", env = "ATTACHE_POOL_NAMESPACE", help_heading = "Kubernetes")]
    pub pool_namespace: Option<String>,
    /// API group of the InferencePool; inference.networking.x-k8s.io
    /// for v1alpha2 [default: inference.networking.k8s.io]
    #[arg(long, value_name = "GROUP", env = "ATTACHE_POOL_GROUP", help_heading = "Kubernetes")]
    pub pool_group: Option<String>,
    /// Labels of the pods that are endpoints, if there is no InferencePool: `app=vllm`
    #[arg(long, value_name = "SELECTOR", env = "ATTACHE_ENDPOINT_SELECTOR", help_heading = "Kubernetes")]
    pub endpoint_selector: Option<String>,
    /// Ports of these pods, one for each data-parallel rank [default: 8000, or the label model.aibrix.ai/port]
    #[arg(
        long,
        value_name = "PORT",
        env = "ATTACHE_ENDPOINT_TARGET_PORTS",
        value_delimiter = ',',
        help_heading = "Kubernetes"
    )]
    pub endpoint_target_ports: Vec<u16>,
    /// Engine of `--endpoint`s, and of pods whose labels name none [default: vllm]
    #[arg(long, value_name = "NAME", env = "ATTACHE_ENGINE", value_parser = parse_engine, help_heading = "Kubernetes")]
    pub engine: Option<Engine>,
    /// Scheme of the metrics of model servers: http or https [default: http]
    #[arg(
        long, value_name = "SCHEME", env = "ATTACHE_MODEL_SERVER_METRICS_SCHEME",
        value_parser = ["http", "https"], help_heading = "Kubernetes"
    )]
    pub model_server_metrics_scheme: Option<String>,
    /// Path of the metrics of model servers [default: /metrics]
    #[arg(
        long, value_name = "PATH", env = "ATTACHE_MODEL_SERVER_METRICS_PATH", value_parser = parse_path,
        help_heading = "Kubernetes"
    )]
    pub model_server_metrics_path: Option<String>,
    /// Port of the metrics of pods with one rank [default: the serving port]
    #[arg(long, value_name = "PORT", env = "ATTACHE_MODEL_SERVER_METRICS_PORT", help_heading = "Kubernetes")]
    pub model_server_metrics_port: Option<u16>,
    /// Accept any certificate of pods' metrics over https [default: true with that scheme]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_MODEL_SERVER_METRICS_HTTPS_INSECURE_SKIP_VERIFY",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = parse_switch,
        help_heading = "Kubernetes"
    )]
    pub model_server_metrics_https_insecure_skip_verify: Option<bool>,
    /// Only the replica that holds the Lease of the pool reports ready [default: false]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_HA_ENABLE_LEADER_ELECTION", num_args = 0..=1,
        require_equals = true, default_missing_value = "true", value_parser = parse_switch,
        help_heading = "Kubernetes"
    )]
    pub ha_enable_leader_election: Option<bool>,
    /// Which replicas write conditions of InferenceModels: true is the one that holds the Lease, false is none
    /// [default: every replica that has the right]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_MODEL_STATUS", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = parse_switch, help_heading = "Kubernetes"
    )]
    pub model_status: Option<bool>,

    /// Address of all listeners [default: 0.0.0.0]
    #[arg(long, value_name = "IP", env = "ATTACHE_BIND", help_heading = "Listeners")]
    pub bind: Option<IpAddr>,
    /// Port of ext-proc; 0 lets the system choose [default: 9002]
    #[arg(long, value_name = "PORT", env = "ATTACHE_GRPC_PORT", help_heading = "Listeners")]
    pub grpc_port: Option<u16>,
    /// Port of gRPC health checks [default: 9003]
    #[arg(long, value_name = "PORT", env = "ATTACHE_GRPC_HEALTH_PORT", help_heading = "Listeners")]
    pub grpc_health_port: Option<u16>,
    /// Port of metrics and admin pages, plain HTTP [default: 9090]
    #[arg(long, value_name = "PORT", env = "ATTACHE_METRICS_PORT", help_heading = "Listeners")]
    pub metrics_port: Option<u16>,
    /// Require a bearer token that the cluster authorizes for metrics and admin
    /// pages (TokenReview, SubjectAccessReview) [default: false]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_METRICS_ENDPOINT_AUTH", num_args = 0..=1,
        require_equals = true, default_missing_value = "true", help_heading = "Listeners"
    )]
    pub metrics_endpoint_auth: Option<bool>,
    /// Further host names of the admin pages, beside IP addresses and localhost
    #[arg(long, value_name = "NAME", env = "ATTACHE_ADMIN_HOSTS", value_delimiter = ',', help_heading = "Listeners")]
    pub admin_hosts: Vec<String>,
    /// Share requests in flight and prompts with the other pickers of this NATS server, `nats://host:port`; may be
    /// given several times, for the servers of one cluster
    #[arg(
        long = "sync-nats-url",
        value_name = "URL",
        env = "ATTACHE_SYNC_NATS_URL",
        hide_env_values = true,
        value_delimiter = ',',
        help_heading = "Replicas"
    )]
    pub sync_nats_urls: Vec<String>,
    /// Name of this picker on the status pages of the others [default: the host's name]
    #[arg(long, value_name = "NAME", env = "ATTACHE_SYNC_NAME", help_heading = "Replicas")]
    pub sync_name: Option<String>,
    /// Answer gRPC health checks on the ext-proc port too [default: true]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_HEALTH_CHECKING", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = parse_switch, help_heading = "Listeners"
    )]
    pub health_checking: Option<bool>,
    /// TLS on the ext-proc port; the certificate is self-signed without --cert-path [default: true]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_SECURE_SERVING", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = parse_switch, help_heading = "Listeners"
    )]
    pub secure_serving: Option<bool>,
    /// Directory with the certificate, `tls.crt` and `tls.key`
    #[arg(long, value_name = "DIR", env = "ATTACHE_CERT_PATH", help_heading = "Listeners")]
    pub cert_path: Option<PathBuf>,
    /// Reload the certificate when its files change [default: false]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_ENABLE_CERT_RELOAD", num_args = 0..=1,
        require_equals = true, default_missing_value = "true", value_parser = parse_switch,
        help_heading = "Listeners"
    )]
    pub enable_cert_reload: Option<bool>,
    /// PEM file with authorities: only clients with their certificates may connect; watched and reloaded
    #[arg(long, value_name = "FILE", env = "ATTACHE_CLIENT_CA_FILE", help_heading = "Listeners")]
    pub client_ca_file: Option<PathBuf>,
    /// Subject alternative name that clients must have: a DNS name, a URI, `*.name` or `uri/*`; may be
    /// given several times [default: any]
    #[arg(
        long = "client-name",
        value_name = "NAME",
        env = "ATTACHE_CLIENT_NAMES",
        value_delimiter = ',',
        help_heading = "Listeners"
    )]
    pub client_names: Vec<String>,

    /// Threads that serve ext-proc [default: one per core]
    #[arg(long, value_name = "N", env = "ATTACHE_WORKERS", help_heading = "Process")]
    pub workers: Option<usize>,
    /// Seed of random choices [default: from the system]
    #[arg(long, value_name = "N", env = "ATTACHE_SEED", help_heading = "Process")]
    pub seed: Option<u64>,
    /// Time from SIGTERM until new streams are rejected; none after SIGINT (Ctrl-C) [default: 5s]
    #[arg(
        long, value_name = "TIME", env = "ATTACHE_DRAIN_MIN_DELAY", value_parser = parse_duration,
        help_heading = "Process"
    )]
    pub drain_min_delay: Option<Duration>,
    /// Time from SIGTERM until open streams are closed [default: 2m]
    #[arg(
        long, value_name = "TIME", env = "ATTACHE_DRAIN_DEADLINE", value_parser = parse_duration,
        help_heading = "Process"
    )]
    pub drain_deadline: Option<Duration>,

    /// Log filter: `info`, `debug`, `attache=debug,info` [default: info]
    #[arg(long, value_name = "FILTER", env = "ATTACHE_LOG_LEVEL", help_heading = "Logs, traces and recordings")]
    pub log_level: Option<String>,
    /// Verbosity as the reference picker counts it: up to 2 is info, 3 and 4 debug, 5 trace; --log-level outranks it
    #[arg(short = 'v', long = "v", value_name = "N", env = "ATTACHE_V", help_heading = "Logs, traces and recordings")]
    pub verbosity: Option<u8>,
    /// Send the score of each endpoint to the gateway as dynamic metadata [default: false]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_EMIT_ENDPOINT_SCORES", num_args = 0..=1,
        require_equals = true, default_missing_value = "true", value_parser = parse_switch,
        help_heading = "Logs, traces and recordings"
    )]
    pub emit_endpoint_scores: Option<bool>,
    /// Format of logs [default: text on a terminal, else json]
    #[arg(
        long,
        value_enum,
        value_name = "FORMAT",
        env = "ATTACHE_LOG_FORMAT",
        help_heading = "Logs, traces and recordings"
    )]
    pub log_format: Option<LogFormatArg>,
    /// Send traces, if a collector is configured [default: true]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_TRACING", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = parse_switch,
        help_heading = "Logs, traces and recordings"
    )]
    pub tracing: Option<bool>,
    /// Trace collector, OTLP over HTTP
    #[arg(
        long,
        value_name = "URL",
        env = "OTEL_EXPORTER_OTLP_ENDPOINT",
        hide_env_values = true,
        help_heading = "Logs, traces and recordings"
    )]
    pub otlp_endpoint: Option<String>,
    /// Fraction of the requests to trace if the caller has not decided [default:
    /// the variable OTEL_TRACES_SAMPLER_ARG, else 0.1]
    #[arg(long, value_name = "0..1", help_heading = "Logs, traces and recordings")]
    pub trace_ratio: Option<f64>,
    /// Decisions kept for the page `/decisions` [default: 256]
    #[arg(long, value_name = "N", env = "ATTACHE_DECISIONS_KEPT", help_heading = "Logs, traces and recordings")]
    pub decisions_kept: Option<usize>,
    /// Record requests and decisions to this file, without text, for `attache replay --from-record`; a file that is no
    /// recording is not replaced
    #[arg(long, value_name = "FILE", env = "ATTACHE_RECORD", help_heading = "Logs, traces and recordings")]
    pub record: Option<PathBuf>,
    /// Largest size of the recording, bytes; it stops there
    #[arg(
        long, value_name = "N", env = "ATTACHE_RECORD_MAX_BYTES", default_value_t = DEFAULT_MAX_BYTES,
        help_heading = "Logs, traces and recordings"
    )]
    pub record_max_bytes: u64,
}

impl RunArgs {
    /// Whether any flag selects endpoints or a configuration.
    #[must_use]
    pub fn has_something_to_serve(&self) -> bool {
        let by_file = self.config_file.is_some() || self.config_text.is_some();
        by_file || !self.endpoints.is_empty() || self.kubernetes().any()
    }

    fn kubernetes(&self) -> KubernetesFlags {
        // Charts leave a flag unset by an empty value.
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let https = self.model_server_metrics_scheme.as_deref() == Some("https");
        KubernetesFlags {
            pool_name: given(&self.pool_name),
            pool_selector: given(&self.pool_selector),
            pool_namespace: given(&self.pool_namespace),
            pool_group: given(&self.pool_group),
            endpoint_selector: given(&self.endpoint_selector),
            endpoint_target_ports: self.endpoint_target_ports.clone(),
            engine: self.engine,
            metrics_scheme: self.model_server_metrics_scheme.clone(),
            metrics_path: self.model_server_metrics_path.clone(),
            metrics_port: self.model_server_metrics_port,
            // With https, the reference does not verify certificates by default.
            metrics_insecure_skip_verify: self
                .model_server_metrics_https_insecure_skip_verify
                .filter(|_| https)
                .or(https.then_some(true)),
        }
    }

    /// The requested recording, if any.
    #[must_use]
    pub fn record(&self) -> Option<RecordSettings> {
        let path = self.record.clone()?;
        Some(RecordSettings { path, max_bytes: self.record_max_bytes })
    }

    /// The values that outrank the file.
    #[must_use]
    pub fn overrides(&self) -> Overrides {
        let by_verbosity = self.verbosity.map(|v| match v {
            0..=2 => "info".to_owned(),
            3 | 4 => "debug".to_owned(),
            _ => "trace".to_owned(),
        });
        // Charts leave a list unset by an empty value.
        let listed = |names: &[String]| names.iter().filter(|name| !name.is_empty()).cloned().collect::<Vec<_>>();
        // An empty variable counts as unset, as OpenTelemetry specifies.
        let otlp_endpoint = self.otlp_endpoint.clone().filter(|url| !url.is_empty());
        Overrides {
            bind: self.bind,
            grpc_port: self.grpc_port,
            grpc_health_port: self.grpc_health_port,
            metrics_port: self.metrics_port,
            health_checking: self.health_checking,
            workers: self.workers,
            seed: self.seed,
            secure_serving: self.secure_serving,
            cert_path: self.cert_path.clone(),
            enable_cert_reload: self.enable_cert_reload,
            client_ca_file: self.client_ca_file.clone(),
            client_names: self.client_names.clone(),
            drain_min_delay: self.drain_min_delay,
            drain_deadline: self.drain_deadline,
            log_level: self.log_level.clone().or(by_verbosity),
            log_json: self.log_format.map(|f| f == LogFormatArg::Json),
            otlp_endpoint,
            tracing: self.tracing,
            trace_ratio: self.trace_ratio,
            // clap does not parse it: by OpenTelemetry's rules an invalid value is a warning, and the process starts.
            sampler_arg: std::env::var(SAMPLER_ARG).ok(),
            decisions_kept: self.decisions_kept,
            disable_endpoint_subset_filter: self.disable_endpoint_subset_filter,
            trust_client_headers: self.trust_client_headers,
            conformance_headers: self.conformance_headers,
            destination_headers: listed(&self.destination_headers),
            destination_metadata_keys: listed(&self.destination_metadata_keys),
            destination_metadata_namespace: self.destination_metadata_namespace.clone().filter(|name| !name.is_empty()),
            endpoints: self.endpoints.clone(),
            kubernetes: self.kubernetes(),
            leader_election: self.ha_enable_leader_election,
            model_status: self.model_status,
            metrics_auth: self.metrics_endpoint_auth,
            sync_nats_urls: listed(&self.sync_nats_urls),
            sync_name: self.sync_name.clone(),
            admin_hosts: listed(&self.admin_hosts),
            explain_metadata: self.emit_endpoint_scores,
            endpoints_follow: false,
            one_pool: false,
            strategy: self.strategy.clone(),
            aibrix: AibrixEnv::of(variables()),
            localai: LocalaiEnv::of(variables())
                .with_flags(self.distributed_prefix_cache.as_deref(), self.distributed_prefix_cache_ttl.as_deref()),
            own: own_variables(),
            reference: ReferenceEnv::of(variables()),
            refresh_metrics_interval: self.refresh_metrics_interval,
            metrics_staleness_threshold: self.metrics_staleness_threshold,
        }
    }
}

/// The variables of the environment that are valid UTF-8.
pub(super) fn variables() -> impl Iterator<Item = (String, String)> {
    std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
}

/// The variables of the environment that look like Attaché's and that no verb has a flag for.
pub(super) fn own_variables() -> OwnEnv {
    let command = super::Cli::command();
    let flags = command.get_subcommands().flat_map(clap::Command::get_arguments);
    OwnEnv::of(variables(), flags.filter_map(|flag| Some(flag.get_env()?.to_str()?.to_owned())))
}

/// Parses a boolean in any spelling that Go's flags accept.
pub(super) fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("true and false are allowed".to_owned()),
    }
}

fn parse_engine(text: &str) -> Result<Engine, String> {
    let value = serde_json::Value::String(text.to_owned());
    serde_json::from_value(value)
        .map_err(|_| "vllm, sglang, trtllm-serve, triton-tensorrt-llm, xllm, astrai and none are allowed".to_owned())
}

fn parse_path(text: &str) -> Result<String, String> {
    if text.starts_with('/') && format!("http://h{text}").parse::<http::Uri>().is_ok() {
        Ok(text.to_owned())
    } else {
        Err("a path that begins with `/` is needed".to_owned())
    }
}
