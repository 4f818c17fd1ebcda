//! The flags of `attache run`: the reference picker's names and defaults, and ours. Every flag has an environment variable; a
//! flag outranks it, it outranks the file, the file outranks the default.

use crate::config::Overrides;
use crate::config::aibrix_env::AibrixEnv;
use crate::config::units::parse_duration;
use crate::record::{DEFAULT_MAX_BYTES, RecordSettings};
use clap::{Args, ValueEnum};
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

  Certificates of a Kubernetes secret, replaced while running:
    attache run --config-file attache.yaml --cert-path /etc/attache/tls --enable-cert-reload

  Traces of every tenth request:
    attache run --config-file attache.yaml --otlp-endpoint http://collector:4318 --trace-ratio 0.1";

/// How logs look.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormatArg {
    /// For people; the default on a terminal.
    Text,
    /// One object a line; the default elsewhere.
    Json,
}

/// Serve Envoy: pick an endpoint for every request.
///
/// Endpoints come from `--endpoint`, from a configuration file, or from both. AIBrix's variables ROUTING_ALGORITHM, AIBRIX_PREFIX_CACHE_… and
/// AIBRIX_ROUTER_… hold where neither a flag nor the file says otherwise.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct RunArgs {
    /// Configuration file, Attaché's own or an EndpointPickerConfig; watched and reloaded
    #[arg(
        long,
        alias = "config",
        value_name = "FILE",
        env = "ATTACHE_CONFIG_FILE",
        conflicts_with = "config_text",
        help_heading = "What to serve"
    )]
    pub config_file: Option<PathBuf>,
    /// The configuration itself, instead of a file
    #[arg(
        long,
        value_name = "YAML",
        env = "ATTACHE_CONFIG_TEXT",
        hide_env_values = true,
        help_heading = "What to serve"
    )]
    pub config_text: Option<String>,
    /// A model server, `ip:port`; may be given several times
    #[arg(
        long = "endpoint",
        value_name = "IP:PORT",
        env = "ATTACHE_ENDPOINTS",
        value_delimiter = ',',
        help_heading = "What to serve"
    )]
    pub endpoints: Vec<String>,
    /// How endpoints are picked [default: predicted-latency]
    #[arg(long, value_name = "NAME", env = "ATTACHE_STRATEGY", help_heading = "What to serve")]
    pub strategy: Option<String>,
    /// How often metrics of a busy endpoint are read [default: 50ms]
    #[arg(long, value_name = "TIME", env = "ATTACHE_REFRESH_METRICS_INTERVAL", value_parser = parse_duration, help_heading = "What to serve")]
    pub refresh_metrics_interval: Option<Duration>,
    /// Metrics older than this are ignored [default: 2s]
    #[arg(long, value_name = "TIME", env = "ATTACHE_METRICS_STALENESS_THRESHOLD", value_parser = parse_duration, help_heading = "What to serve")]
    pub metrics_staleness_threshold: Option<Duration>,
    /// Ignore the gateway's subset hint [default: false]
    #[arg(long, value_name = "BOOL", env = "ATTACHE_DISABLE_ENDPOINT_SUBSET_FILTER", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "What to serve")]
    pub disable_endpoint_subset_filter: Option<bool>,

    /// Address of all listeners [default: 0.0.0.0]
    #[arg(long, value_name = "IP", env = "ATTACHE_BIND", help_heading = "Listeners")]
    pub bind: Option<IpAddr>,
    /// ext-proc; 0 lets the system choose [default: 9002]
    #[arg(long, value_name = "PORT", env = "ATTACHE_GRPC_PORT", help_heading = "Listeners")]
    pub grpc_port: Option<u16>,
    /// gRPC health [default: 9003]
    #[arg(long, value_name = "PORT", env = "ATTACHE_GRPC_HEALTH_PORT", help_heading = "Listeners")]
    pub grpc_health_port: Option<u16>,
    /// Metrics and admin pages, plain HTTP [default: 9090]
    #[arg(long, value_name = "PORT", env = "ATTACHE_METRICS_PORT", help_heading = "Listeners")]
    pub metrics_port: Option<u16>,
    /// Answer health checks on the ext-proc port too [default: false]
    #[arg(long, value_name = "BOOL", env = "ATTACHE_HEALTH_CHECKING", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Listeners")]
    pub health_checking: Option<bool>,
    /// TLS on the ext-proc port, self-signed without --cert-path [default: true]
    #[arg(long, value_name = "BOOL", env = "ATTACHE_SECURE_SERVING", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Listeners")]
    pub secure_serving: Option<bool>,
    /// Directory with `tls.crt` and `tls.key`
    #[arg(long, value_name = "DIR", env = "ATTACHE_CERT_PATH", help_heading = "Listeners")]
    pub cert_path: Option<PathBuf>,
    /// Take new certificates while running [default: false]
    #[arg(long, value_name = "BOOL", env = "ATTACHE_ENABLE_CERT_RELOAD", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Listeners")]
    pub enable_cert_reload: Option<bool>,

    /// Threads that serve ext-proc [default: one a core]
    #[arg(long, value_name = "N", env = "ATTACHE_WORKERS", help_heading = "Process")]
    pub workers: Option<usize>,
    /// Seed of random choices, to replay a run [default: from the system]
    #[arg(long, value_name = "N", env = "ATTACHE_SEED", help_heading = "Process")]
    pub seed: Option<u64>,
    /// From SIGTERM until new streams are refused [default: 5s]
    #[arg(long, value_name = "TIME", env = "ATTACHE_DRAIN_MIN_DELAY", value_parser = parse_duration, help_heading = "Process")]
    pub drain_min_delay: Option<Duration>,
    /// From SIGTERM until open streams are cut [default: 2m]
    #[arg(long, value_name = "TIME", env = "ATTACHE_DRAIN_DEADLINE", value_parser = parse_duration, help_heading = "Process")]
    pub drain_deadline: Option<Duration>,

    /// Log filter: `info`, `debug`, `attache=debug,info` [default: info]
    #[arg(long, value_name = "FILTER", env = "ATTACHE_LOG_LEVEL", help_heading = "What is told")]
    pub log_level: Option<String>,
    /// Verbosity as the reference picker counts it: up to 2 is info, 3 and 4 debug, 5 trace; --log-level outranks it
    #[arg(short = 'v', long = "v", value_name = "N", env = "ATTACHE_V", help_heading = "What is told")]
    pub verbosity: Option<u8>,
    /// How logs look [default: text on a terminal, else json]
    #[arg(long, value_enum, value_name = "FORMAT", env = "ATTACHE_LOG_FORMAT", help_heading = "What is told")]
    pub log_format: Option<LogFormatArg>,
    /// Send traces, when there is a collector [default: true]
    #[arg(long, value_name = "BOOL", env = "ATTACHE_TRACING", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "What is told")]
    pub tracing: Option<bool>,
    /// Trace collector, OTLP over HTTP
    #[arg(
        long,
        value_name = "URL",
        env = "OTEL_EXPORTER_OTLP_ENDPOINT",
        hide_env_values = true,
        help_heading = "What is told"
    )]
    pub otlp_endpoint: Option<String>,
    /// Part of the requests to trace when the caller has not decided [default: 0.1]
    #[arg(long, value_name = "0..1", env = "OTEL_TRACES_SAMPLER_ARG", help_heading = "What is told")]
    pub trace_ratio: Option<f64>,
    /// Decisions kept for the page `/decisions` [default: 256]
    #[arg(long, value_name = "N", env = "ATTACHE_DECISIONS_KEPT", help_heading = "What is told")]
    pub decisions_kept: Option<usize>,
    /// Write what is seen and decided to this file, without any text of prompts, for `attache replay --from-record`
    #[arg(long, value_name = "FILE", env = "ATTACHE_RECORD", help_heading = "What is told")]
    pub record: Option<PathBuf>,
    /// End the recording before its file gets longer than this, bytes
    #[arg(long, value_name = "N", env = "ATTACHE_RECORD_MAX_BYTES", default_value_t = DEFAULT_MAX_BYTES, help_heading = "What is told")]
    pub record_max_bytes: u64,
}

impl RunArgs {
    /// Whether anything says what to serve.
    #[must_use]
    pub fn has_something_to_serve(&self) -> bool {
        self.config_file.is_some() || self.config_text.is_some() || !self.endpoints.is_empty()
    }

    /// The recording that is asked for.
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
        // An empty variable means that nobody has set it, as OpenTelemetry's own rules have it.
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
            drain_min_delay: self.drain_min_delay,
            drain_deadline: self.drain_deadline,
            log_level: self.log_level.clone().or(by_verbosity),
            log_json: self.log_format.map(|f| f == LogFormatArg::Json),
            otlp_endpoint,
            tracing: self.tracing,
            trace_ratio: self.trace_ratio,
            decisions_kept: self.decisions_kept,
            disable_endpoint_subset_filter: self.disable_endpoint_subset_filter,
            endpoints: self.endpoints.clone(),
            endpoints_follow: false,
            strategy: self.strategy.clone(),
            aibrix: AibrixEnv::of(
                std::env::vars_os().filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?))),
            ),
            refresh_metrics_interval: self.refresh_metrics_interval,
            metrics_staleness_threshold: self.metrics_staleness_threshold,
        }
    }
}
