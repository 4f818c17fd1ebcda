//! The process: listeners, threads, TLS, shutdown, logs, traces, labels of metrics.

use super::declare;
use super::{LogFormat, TlsMode};
use attache_config_schema::diagnostic::At;
use std::net::{IpAddr, Ipv4Addr};
use std::ops::RangeInclusive;
use std::time::Duration;

/// Numbers of threads, also by flag.
pub(crate) const WORKERS: RangeInclusive<usize> = 1..=1024;
/// Shares of traced requests, also by flag.
pub(crate) const TRACE_RATIO: RangeInclusive<f64> = 0.0..=1.0;
/// Numbers of kept decisions, also by flag: a larger one is assumed to be a mistake.
pub(crate) const DECISIONS_KEPT: RangeInclusive<usize> = 0..=100_000;

sections! {
    /// Listeners, threads, TLS and shutdown.
    Server {
        /// IP address of all listeners. `::` serves IPv6 and, on most systems, IPv4 too.
        "bind" => bind: IpAddr { default: Ipv4Addr::UNSPECIFIED.into(); },
        /// Port of ext-proc, as in the reference picker, so that gateways and charts need no change. 0: any free port.
        "grpcPort" => grpc_port: u16 { default: 9002; unit: "port"; },
        /// Port of gRPC health, as in the reference picker.
        "grpcHealthPort" => grpc_health_port: u16 { default: 9003; unit: "port"; },
        /// Port of metrics and admin pages, as in the reference picker.
        "metricsPort" => metrics_port: u16 { default: 9090; unit: "port"; },
        /// Whether `grpcPort` answers health checks too, for Envoy's active health checking.
        "healthChecking" => health_checking: bool { default: true; },
        /// Threads that serve ext-proc.
        "workers" => workers: usize { absent: "one for each core"; range: WORKERS; unit: "threads"; },
        /// Seed of all random choices.
        "seed" => seed: u64 { absent: "from the system"; unit: "seed"; },
        /// In a cluster: only the replica that holds the lease is ready.
        "leaderElection" => leader_election: bool { default: false; },
        /// Whether the replica that holds the lease writes the conditions of InferenceModels.
        "modelStatus" => model_status: bool { absent: "every replica that has the right writes them"; },
        /// In a cluster: metrics and admin pages need a token with the right to see them (TokenReview,
        /// SubjectAccessReview).
        "metricsAuth" => metrics_auth: bool { default: false; },
        /// Names of hosts for admin pages, beside IP addresses and `localhost`.
        "adminHosts" => admin_hosts: Vec<At<String>> { absent: "none"; },
        "tls" => tls: Tls,
        "drain" => drain: Drain,
    }
    /// Certificates of the ext-proc port and of its clients.
    Tls {
        /// `files` needs `directory`. `self-signed` makes a certificate at start, as the reference picker does.
        "mode" => mode: TlsMode { absent: "`files` with `directory`, else `self-signed`"; },
        /// Directory with `tls.crt` and `tls.key`.
        "directory" => directory: String { absent: "none"; },
        /// Whether a changed certificate in the directory takes effect while running.
        "reload" => reload: bool { default: false; },
        /// PEM file with the authorities of client certificates, watched.
        "clientCaFile" => client_ca_file: String { absent: "clients need no certificate"; },
        /// Names in client certificates, such as `*.example.com` or `spiffe://cluster.local/ns/gateways/*`. A change needs no
        /// restart.
        "clientNames" => client_names: Vec<At<String>> { absent: "any certificate of these authorities"; restart: false; },
    }
    /// How the process shuts down.
    Drain {
        /// Time from SIGTERM until new streams are rejected: Kubernetes removes endpoints later than it ends pods, and Envoy
        /// needs one health check to notice.
        "minDelay" => min_delay: Duration { default: Duration::from_secs(5); },
        /// Time from SIGTERM until open streams are closed. The chart of the reference picker allows 130 s for the end of a
        /// pod.
        "deadline" => deadline: Duration { default: Duration::from_secs(120); },
    }
    /// Logs, traces and labels of metrics.
    Telemetry {
        /// A filter such as `debug` or `attache=debug,info`. `info` logs nothing for each request.
        "logLevel" => log_level: String { default: "info".to_owned(); },
        /// Format of log lines.
        "logFormat" => log_format: LogFormat { absent: "`text` on a terminal, else `json`"; },
        /// Collector of traces by OTLP over HTTP, such as `http://localhost:4318`.
        "otlpEndpoint" => otlp_endpoint: String { absent: "no traces"; },
        /// Share of the requests that are traced if the caller has not decided, as in the reference picker.
        "traceRatio" => trace_ratio: f64 { default: 0.1; range: TRACE_RATIO; unit: "share"; },
        /// Latest decisions that `/decisions` of the admin port shows.
        "decisionsKept" => decisions_kept: usize { default: 256; range: DECISIONS_KEPT; unit: "decisions"; },
        /// Names that are labels of metrics; all others are `other`.
        "labels" => labels: Labels,
    }
    /// Names that become labels of metrics.
    Labels {
        /// Names of models.
        "models" => models: Names,
        /// Names of tenants.
        "tenants" => tenants: Names,
    }
    /// Names that become values of a label.
    Names {
        /// Names that are always labels.
        "allow" => allow: Vec<At<String>> { absent: "none"; },
        /// How many further names are labels, the most frequent ones.
        "top" => top: usize {
            default: crate::settings::NameSettings::default().top;
            range: 0..=crate::settings::tenants::MAX_TOP_NAMES;
            unit: "names";
        },
    }
}
