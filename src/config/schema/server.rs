//! The process: listeners, threads, TLS, shutdown, logs, traces, labels of metrics.

use super::declare;
use super::{LogFormat, TlsMode};
use attache_config_schema::diagnostic::At;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

sections! {
    /// Listeners, threads, TLS and shutdown.
    Server {
        /// IP address of all listeners. `::` serves IPv6 and, on most systems, IPv4 too.
        "bind" => bind: IpAddr { default: Ipv4Addr::UNSPECIFIED.into(); flag: "bind"; },
        /// Port of ext-proc; 0 lets the system choose. The default is that of the reference picker, so that gateways and
        /// charts need no change.
        "grpcPort" => grpc_port: u16 { default: 9002; unit: "port"; flag: "grpc-port"; },
        /// Port of gRPC health, as in the reference picker.
        "grpcHealthPort" => grpc_health_port: u16 { default: 9003; unit: "port"; flag: "grpc-health-port"; },
        /// Port of metrics and admin pages, plain HTTP, as in the reference picker.
        "metricsPort" => metrics_port: u16 { default: 9090; unit: "port"; flag: "metrics-port"; },
        /// Whether `grpcPort` answers health checks too, for Envoy's active health checking.
        "healthChecking" => health_checking: bool { default: true; flag: "health-checking"; },
        /// Threads that serve ext-proc.
        "workers" => workers: usize {
            absent: "one for each core"; range: 1..=1024; unit: "threads"; flag: "workers";
        },
        /// Seed of all random choices.
        "seed" => seed: u64 { absent: "from the system"; unit: "seed"; flag: "seed"; },
        /// In a cluster: only the replica that holds the lease is ready.
        "leaderElection" => leader_election: bool { default: false; flag: "ha-enable-leader-election"; },
        /// Whether the replica that holds the lease writes the conditions of InferenceModels.
        "modelStatus" => model_status: bool {
            absent: "every replica that has the right writes them"; flag: "model-status";
        },
        /// In a cluster: metrics and admin pages need a token with the right to see them (TokenReview,
        /// SubjectAccessReview).
        "metricsAuth" => metrics_auth: bool { default: false; flag: "metrics-endpoint-auth"; },
        /// Names of hosts for admin pages, beside IP addresses and `localhost`.
        "adminHosts" => admin_hosts: Vec<At<String>> { absent: "none"; flag: "admin-hosts" as "NAME"; },
        "tls" => tls: Tls,
        "drain" => drain: Drain,
    }
    /// Certificates of the ext-proc port and of its clients.
    Tls {
        /// `files` needs `directory`. `self-signed` makes a certificate at start, as the reference picker does.
        "mode" => mode: TlsMode { absent: "`files` with `directory`, else `self-signed`"; },
        /// Directory with `tls.crt` and `tls.key`.
        "directory" => directory: String { absent: "none"; flag: "cert-path" as "DIR"; },
        /// Whether a changed certificate in the directory takes effect while running.
        "reload" => reload: bool { default: false; flag: "enable-cert-reload"; },
        /// PEM file with the authorities of client certificates, watched.
        "clientCaFile" => client_ca_file: String {
            absent: "clients need no certificate"; flag: "client-ca-file" as "FILE";
        },
        /// Names that the certificates of clients may have, such as `*.example.com` or
        /// `spiffe://cluster.local/ns/gateways/*`. A change needs no restart.
        "clientNames" => client_names: Vec<At<String>> {
            absent: "any certificate of these authorities"; restart: false;
            flag: "client-name" as "NAME" from "ATTACHE_CLIENT_NAMES";
        },
    }
    /// How the process shuts down.
    Drain {
        /// Time from SIGTERM until new streams are rejected; none after SIGINT (Ctrl-C). Kubernetes removes endpoints later
        /// than it ends pods, and Envoy needs one health check to notice.
        "minDelay" => min_delay: Duration { default: Duration::from_secs(5); flag: "drain-min-delay"; },
        /// Time from SIGTERM until open streams are closed. The chart of the reference picker allows 130 s for the end of a
        /// pod.
        "deadline" => deadline: Duration { default: Duration::from_secs(120); flag: "drain-deadline"; },
    }
    /// Logs, traces and labels of metrics.
    Telemetry {
        /// A filter such as `debug` or `attache=debug,info`. `info` logs nothing for each request.
        "logLevel" => log_level: String { default: "info".to_owned(); flag: "log-level" as "FILTER"; },
        /// Format of log lines: text for people, or one JSON object in each.
        "logFormat" => log_format: LogFormat {
            absent: "`text` on a terminal, else `json`"; flag: "log-format" as "FORMAT";
        },
        /// Collector of traces by OTLP over HTTP, such as `http://localhost:4318`.
        "otlpEndpoint" => otlp_endpoint: String {
            absent: "no traces"; flag: "otlp-endpoint" as "URL" from "OTEL_EXPORTER_OTLP_ENDPOINT";
        },
        /// Share of the requests that are traced if the caller has not decided. The variable `OTEL_TRACES_SAMPLER_ARG` outranks
        /// the file.
        "traceRatio" => trace_ratio: f64 {
            default: 0.1; range: 0.0..=1.0; unit: "share"; flag: "trace-ratio" as "0..1";
        },
        /// Latest decisions that `/decisions` of the admin port shows.
        "decisionsKept" => decisions_kept: usize {
            // A larger number is assumed to be a mistake.
            default: 256; range: 0..=100_000; unit: "decisions"; flag: "decisions-kept";
        },
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
