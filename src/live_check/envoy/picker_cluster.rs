//! Clusters of the picker: HTTP/2, health checks, limits of frames. `picker_tls.rs` checks their TLS.

use super::field::{at, duration, has, list, number, text};
use super::model_cluster::{check_breakers, check_buffer, http_options};
use super::picker_tls;
use super::process::hosts;
use super::traffic::Traffic;
use crate::finding::{Check, Report};
use serde_json::Value;
use std::time::Duration;

pub(super) const CHECKS: &[&Check] = &[&HTTP2, &FRAMES, &WINDOWS, &HEALTH_CHECKS, &HEALTH_SERVICE, &HEALTHY];

static HTTP2: Check = Check {
    id: "envoy-picker-http2",
    about: "Envoy speaks HTTP/2 to the picker",
    why: "The picker speaks gRPC, which needs HTTP/2: each request fails with 500.",
};

static FRAMES: Check = Check {
    id: "envoy-picker-frames",
    about: "a flood of small frames does not close the connection to the picker",
    why: "Above the limit, Envoy closes the connection with every request in flight; one client can cause it.",
};

static WINDOWS: Check = Check {
    id: "envoy-picker-windows",
    about: "HTTP/2 windows to the picker are Envoy's defaults",
    why: "Windows of 64 KiB halve the throughput of long prompts.",
};

static HEALTH_CHECKS: Check = Check {
    id: "envoy-picker-health-checks",
    about: "Envoy checks the health of the picker often",
    why: "Without it, Envoy sends requests to a picker that drains or is not ready yet.",
};

static HEALTH_SERVICE: Check = Check {
    id: "envoy-picker-health-service",
    about: "the health check asks for a service that the picker knows",
    why: "The picker answers that the service is unknown, and Envoy takes it for unhealthy.",
};

static HEALTHY: Check = Check {
    id: "envoy-picker-healthy",
    about: "Envoy finds the picker healthy",
    why: "Envoy sends no request to an unhealthy picker: each one fails with 500.",
};

/// Fewer frames are a finding. Envoy's default is 10,000.
const FRAMES_WANTED: u64 = 100_000;
/// Fewer control frames are a finding. Envoy's default is 1,000.
const CONTROL_FRAMES_WANTED: u64 = 10_000;
/// Smaller HTTP/2 windows are a finding.
const WINDOW_BYTES: u64 = 1 << 20;
/// A longer time between health checks is a finding.
const HEALTH_INTERVAL: Duration = Duration::from_secs(10);
/// Envoy's time between health checks of a cluster without traffic, by default.
const NO_TRAFFIC_INTERVAL: Duration = Duration::from_secs(60);
/// The names that the picker's health service answers.
const SERVICES: [&str; 5] =
    ["", "envoy.service.ext_proc.v3.ExternalProcessor", "liveness", "readiness", "inference-extension"];

pub(super) async fn check(traffic: &Traffic<'_>, out: &mut Report) {
    for (name, cluster) in &traffic.picker_clusters {
        let subject = traffic.cluster_subject(name);
        check_http2(&subject, cluster, out);
        out.push(check_breakers(&subject, cluster));
        out.push(check_buffer(&subject, cluster));
        picker_tls::check(traffic.source, &subject, cluster, &addresses(traffic, name, cluster), out).await;
        check_health_checks(&subject, cluster, out);
        check_healthy(traffic, &subject, name, cluster, out);
    }
}

fn check_http2(subject: &str, cluster: &Value, out: &mut Report) {
    let options = http_options(cluster);
    let http2 = match () {
        () if has(options, "explicit_http_config.http2_protocol_options") => {
            at(options, "explicit_http_config.http2_protocol_options")
        }
        () if has(options, "auto_config") => at(options, "auto_config.http2_protocol_options"),
        () if has(cluster, "http2_protocol_options") => at(cluster, "http2_protocol_options"),
        () => {
            let fix =
                "set `explicit_http_config: {http2_protocol_options: {}}` in `HttpProtocolOptions` of the cluster";
            out.push(HTTP2.error(subject, "Envoy speaks HTTP/1.1 to the picker", fix));
            return;
        }
    };
    out.push(HTTP2.ok(subject, "Envoy speaks HTTP/2 to the picker"));
    let frames = number(http2, "max_outbound_frames").unwrap_or(10_000);
    let control = number(http2, "max_outbound_control_frames").unwrap_or(1_000);
    out.push(if frames >= FRAMES_WANTED && control >= CONTROL_FRAMES_WANTED {
        FRAMES.ok(subject, format!("max_outbound_frames is {frames}"))
    } else {
        FRAMES.warning(
            subject,
            format!("max_outbound_frames is {frames}, max_outbound_control_frames is {control}"),
            "set `max_outbound_frames: 1000000` and `max_outbound_control_frames: 100000` in `http2_protocol_options`",
        )
    });
    for window in ["initial_stream_window_size", "initial_connection_window_size"] {
        if let Some(bytes) = number(http2, window).filter(|bytes| *bytes < WINDOW_BYTES) {
            let fix = format!("remove `{window}` from `http2_protocol_options`");
            out.push(WINDOWS.warning(subject, format!("{window} is {bytes}"), fix));
        }
    }
}

/// The addresses of the picker: resolved ones of a running Envoy, else those of the file.
fn addresses(traffic: &Traffic<'_>, name: &str, cluster: &Value) -> Vec<String> {
    let known = hosts(traffic.source, name).iter().map(|host| at(host, "address"));
    let localities = list(cluster, "load_assignment.endpoints").iter();
    let listed =
        localities.flat_map(|locality| list(locality, "lb_endpoints")).map(|endpoint| at(endpoint, "endpoint.address"));
    let address = |address: &Value| {
        let socket = at(address, "socket_address");
        let (host, port) = (text(socket, "address"), number(socket, "port_value")?);
        Some(if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
    };
    let mut all: Vec<String> = known.filter_map(address).collect();
    if all.is_empty() {
        all = listed.filter_map(address).collect();
    }
    all
}

fn check_health_checks(subject: &str, cluster: &Value, out: &mut Report) {
    let checks = list(cluster, "health_checks");
    let is_followed = text(cluster, "type") == "EDS";
    let fix = "set `health_checks` with `interval: 1s`, `no_traffic_interval: 1s` and `grpc_health_check`, as in `envoy/original-dst.yaml`";
    if checks.is_empty() {
        out.push(if is_followed {
            HEALTH_CHECKS.ok(subject, "the control plane says which pickers are ready")
        } else {
            HEALTH_CHECKS.warning(subject, "the cluster has no health checks", fix)
        });
    }
    for check in checks {
        let interval = duration(check, "interval").unwrap_or_default();
        let idle = duration(check, "no_traffic_interval").unwrap_or(NO_TRAFFIC_INTERVAL);
        let longest = interval.max(idle);
        out.push(if longest <= HEALTH_INTERVAL {
            HEALTH_CHECKS.ok(subject, format!("health checks every {longest:?}"))
        } else {
            let found = format!("health checks every {interval:?}, and every {idle:?} without traffic");
            HEALTH_CHECKS.warning(subject, found, fix)
        });
        let service = text(check, "grpc_health_check.service_name");
        if has(check, "grpc_health_check") && !SERVICES.contains(&service) {
            let fix = "set `grpc_health_check.service_name: envoy.service.ext_proc.v3.ExternalProcessor`";
            out.push(HEALTH_SERVICE.error(subject, format!("the health check asks for the service {service:?}"), fix));
        }
    }
}

fn check_healthy(traffic: &Traffic<'_>, subject: &str, name: &str, cluster: &Value, out: &mut Report) {
    if traffic.source.live.is_none() {
        return;
    }
    let hosts = hosts(traffic.source, name);
    if hosts.is_empty() {
        let fix = "correct `load_assignment` of the cluster, or the name in DNS";
        out.push(HEALTHY.error(subject, "the cluster has no host", fix));
    }
    for host in hosts {
        let status = at(host, "health_status");
        let address = format!(
            "{}:{}",
            text(host, "address.socket_address.address"),
            number(host, "address.socket_address.port_value").unwrap_or(0)
        );
        let is_failed = ["failed_active_health_check", "failed_outlier_check", "failed_active_degraded_check"]
            .iter()
            .any(|reason| at(status, reason) == true)
            || text(status, "eds_health_status") == "UNHEALTHY";
        let port = list(cluster, "load_assignment.endpoints")
            .iter()
            .flat_map(|locality| list(locality, "lb_endpoints"))
            .find_map(|endpoint| number(endpoint, "endpoint.health_check_config.port_value"));
        let fix = match port {
            Some(port) => format!(
                "start the picker; `health_check_config.port_value` is {port} and must be its `--grpc-health-port`"
            ),
            None => {
                "start the picker, without `--health-checking=false`; or set `health_check_config: {port_value: 9003}`"
                    .to_owned()
            }
        };
        out.push(if is_failed {
            HEALTHY.error(subject, format!("Envoy finds the picker at {address} unhealthy"), fix)
        } else {
            HEALTHY.ok(subject, format!("the picker at {address} is healthy"))
        });
    }
}
