//! The flags of `attache run`: the reference picker's names and defaults, and Attaché's own. Those that stand for one key
//! of the file are declared with the key, and the others here. Every flag has an environment variable. A flag outranks
//! it, it outranks the file, the file outranks the default. If a flag is given twice, the last one counts, as in Go.

mod of_keys;

use attache_config::aibrix_env::AibrixEnv;
use attache_config::flags::switch;
use attache_config::localai_env::LocalaiEnv;
use attache_config::own_env::OwnEnv;
use attache_config::reference_env::ReferenceEnv;
use attache_config::units::parse_duration;
use attache_config::{KubernetesFlags, Overrides};
use attache_pool::Engine;
use attache_record::{DEFAULT_MAX_BYTES, RecordSettings};
use clap::{Args, CommandFactory};
use of_keys::KeyFlags;
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
        num_args = 0..=1, require_equals = true, default_missing_value = "true", value_parser = switch,
        help_heading = "Kubernetes"
    )]
    pub model_server_metrics_https_insecure_skip_verify: Option<bool>,
    #[command(flatten)]
    pub keys: KeyFlags,
    /// TLS on the ext-proc port; the certificate is self-signed without --cert-path [default: true]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_SECURE_SERVING", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = switch, help_heading = "Listeners and process"
    )]
    pub secure_serving: Option<bool>,
    /// Verbosity as the reference picker counts it: up to 2 is info, 3 and 4 debug, 5 trace; --log-level outranks it
    #[arg(short = 'v', long = "v", value_name = "N", env = "ATTACHE_V", help_heading = "Logs, traces and recordings")]
    pub verbosity: Option<u8>,
    /// Send traces, if a collector is configured [default: true]
    #[arg(
        long, value_name = "BOOL", env = "ATTACHE_TRACING", num_args = 0..=1, require_equals = true,
        default_missing_value = "true", value_parser = switch,
        help_heading = "Logs, traces and recordings"
    )]
    pub tracing: Option<bool>,
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
        let mut keys = self.keys.0.clone();
        if let Some(verbosity) = self.verbosity.filter(|_| !keys.has("telemetry.logLevel")) {
            let level = match verbosity {
                0..=2 => "info",
                3 | 4 => "debug",
                _ => "trace",
            };
            keys.set("telemetry.logLevel", [level.to_owned()]);
        }
        // Charts leave a list unset by an empty value.
        let listed = |names: &[String]| names.iter().filter(|name| !name.is_empty()).cloned().collect::<Vec<_>>();
        Overrides {
            keys,
            secure_serving: self.secure_serving,
            tracing: self.tracing,
            // clap does not parse it: by OpenTelemetry's rules an invalid value is a warning, and the process starts.
            sampler_arg: std::env::var(SAMPLER_ARG).ok(),
            destination_headers: listed(&self.destination_headers),
            destination_metadata_keys: listed(&self.destination_metadata_keys),
            destination_metadata_namespace: self.destination_metadata_namespace.clone().filter(|name| !name.is_empty()),
            endpoints: self.endpoints.clone(),
            kubernetes: self.kubernetes(),
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
