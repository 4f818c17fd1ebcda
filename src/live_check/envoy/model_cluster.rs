//! Clusters of model servers: limits, idle connections, and what works against the picker.

use super::config::Steering;
use super::field::{at, duration, has, list, number, text};
use super::process::hosts;
use super::routes::DEFAULT_BUFFER_BYTES;
use super::traffic::Traffic;
use crate::finding::{Check, Finding, Report};
use serde_json::Value;
use std::time::Duration;

pub(super) const CHECKS: &[&Check] =
    &[&BREAKERS, &RETRY_BREAKER, &KEEP_ALIVE, &OUTLIERS, &CONNECT, &SERVED, &CLUSTER_BUFFER, &HOSTS];

static BREAKERS: Check = Check {
    id: "envoy-circuit-breakers",
    about: "the circuit breakers of model servers and of the picker allow more than 1,024 requests",
    why: "A response holds a connection to a server and a stream to the picker; above 1,024 Envoy responds with 503 or 500.",
};

static RETRY_BREAKER: Check = Check {
    id: "envoy-retry-breaker",
    about: "more than a few requests can be retried at once",
    why: "The limit counts the retries of all requests: one dead server uses it up, and other requests fail.",
};

static KEEP_ALIVE: Check = Check {
    id: "envoy-keep-alive",
    about: "Envoy closes idle connections before model servers do",
    why: "vLLM, SGLang and TensorRT-LLM close a connection after 5 s; a request that meets this gets 503.",
};

static OUTLIERS: Check = Check {
    id: "envoy-outlier-detection",
    about: "only the picker ejects model servers",
    why: "A server that Envoy ejects is still chosen by the picker, and requests fail or go elsewhere.",
};

static CONNECT: Check = Check {
    id: "envoy-connect-timeout",
    about: "Envoy gives up soon on a server that does not accept",
    why: "A request to a dead server waits for this time before it fails or is retried.",
};

static SERVED: Check = Check {
    id: "envoy-served-endpoint",
    about: "Envoy reports which server responded",
    why: "After a retry, the picker books the request on the wrong server.",
};

static CLUSTER_BUFFER: Check = Check {
    id: "envoy-cluster-buffer",
    about: "connections to the picker and to model servers have buffers of at least 1 MiB",
    why: "With 32 KiB, long prompts have a third of the throughput.",
};

static HOSTS: Check = Check {
    id: "envoy-hosts",
    about: "Envoy knows servers of the cluster",
    why: "Envoy skips an address of the picker's list that it does not know.",
};

/// Envoy's default of `max_connections`, `max_pending_requests` and `max_requests`.
const DEFAULT_LIMIT: u64 = 1024;
/// Envoy's default of `max_retries`.
const DEFAULT_RETRIES: u64 = 3;
/// A smaller `max_retries` is a finding.
const FEW_RETRIES: u64 = 32;
/// Idle connections live at most this long, 5 s: the keep-alive of uvicorn.
const KEEP_ALIVE_TIME: Duration = Duration::from_secs(5);
/// A longer time to connect is a finding, 10 s.
const CONNECT_TIME: Duration = Duration::from_secs(10);

pub(super) fn check(traffic: &Traffic<'_>, out: &mut Report) {
    for (name, cluster) in &traffic.model_clusters {
        let subject = traffic.cluster_subject(name);
        let steering = Steering::of(cluster);
        out.push(check_breakers(&subject, cluster));
        out.push(check_keep_alive(&subject, cluster));
        out.push(check_connect(&subject, cluster));
        out.push(check_buffer(&subject, cluster));
        if has(cluster, "outlier_detection") && steering.follows_picker() {
            let found = "the cluster has outlier detection";
            out.push(OUTLIERS.warning(&subject, found, "remove `outlier_detection` from the cluster"));
        }
        if let Steering::List(policy) = steering {
            out.push(check_retry_breaker(&subject, cluster));
            out.push(check_served(&subject, policy));
            check_hosts(traffic, &subject, name).into_iter().for_each(|finding| out.push(finding));
        }
    }
}

/// The thresholds of the default priority.
fn thresholds(cluster: &Value) -> &Value {
    let all = list(cluster, "circuit_breakers.thresholds");
    all.iter().find(|threshold| matches!(text(threshold, "priority"), "" | "DEFAULT")).unwrap_or(&Value::Null)
}

/// The check of the circuit breakers, also for the picker's cluster.
pub(super) fn check_breakers(subject: &str, cluster: &Value) -> Finding {
    const LIMITS: [&str; 3] = ["max_connections", "max_pending_requests", "max_requests"];
    let limit = |name: &str| number(thresholds(cluster), name).unwrap_or(DEFAULT_LIMIT);
    let low: Vec<String> = LIMITS
        .iter()
        .filter(|name| limit(name) <= DEFAULT_LIMIT)
        .map(|name| format!("{name} {}", limit(name)))
        .collect();
    if low.is_empty() {
        return BREAKERS.ok(subject, format!("max_requests is {}", limit("max_requests")));
    }
    BREAKERS.warning(
        subject,
        format!("circuit breakers: {}", low.join(", ")),
        "set `circuit_breakers: {thresholds: [{max_connections: 40000, max_pending_requests: 40000, max_requests: 40000, max_retries: 1024}]}`",
    )
}

fn check_retry_breaker(subject: &str, cluster: &Value) -> Finding {
    let thresholds = thresholds(cluster);
    let retries = number(thresholds, "max_retries").unwrap_or(DEFAULT_RETRIES);
    if has(thresholds, "retry_budget") || retries >= FEW_RETRIES {
        return RETRY_BREAKER.ok(subject, format!("max_retries is {retries}"));
    }
    let fix = "set `max_retries: 1024` in `circuit_breakers.thresholds`";
    RETRY_BREAKER.warning(subject, format!("max_retries is {retries}"), fix)
}

/// The message `HttpProtocolOptions` of a cluster.
pub(super) fn http_options(cluster: &Value) -> &Value {
    at(cluster, "typed_extension_protocol_options")
        .get("envoy.extensions.upstreams.http.v3.HttpProtocolOptions")
        .unwrap_or(&Value::Null)
}

fn check_keep_alive(subject: &str, cluster: &Value) -> Finding {
    let idle = duration(http_options(cluster), "common_http_protocol_options.idle_timeout")
        .or_else(|| duration(cluster, "common_http_protocol_options.idle_timeout"));
    let fix = "set `common_http_protocol_options: {idle_timeout: 4s}` in `HttpProtocolOptions` of the cluster, or a longer keep-alive of the servers (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`)";
    match idle {
        Some(idle) if !idle.is_zero() && idle < KEEP_ALIVE_TIME => {
            KEEP_ALIVE.ok(subject, format!("idle connections are closed after {idle:?}"))
        }
        Some(Duration::ZERO) => KEEP_ALIVE.warning(subject, "idle connections are never closed", fix),
        Some(idle) => KEEP_ALIVE.warning(subject, format!("idle connections are closed after {idle:?}"), fix),
        None => KEEP_ALIVE.warning(subject, "idle connections are closed after an hour, Envoy's default", fix),
    }
}

fn check_connect(subject: &str, cluster: &Value) -> Finding {
    let time = duration(cluster, "connect_timeout").unwrap_or(KEEP_ALIVE_TIME);
    if time <= CONNECT_TIME {
        return CONNECT.ok(subject, format!("connect_timeout is {time:?}"));
    }
    CONNECT.warning(subject, format!("connect_timeout is {time:?}"), "set `connect_timeout: 2s` of the cluster")
}

fn check_served(subject: &str, policy: &Value) -> Finding {
    if has(policy, "selected_host_key.key") {
        return SERVED
            .ok(subject, format!("the server is named in metadata of {}", text(policy, "selected_host_key.key")));
    }
    SERVED.warning(
        subject,
        "override_host has no selected_host_key",
        "set `selected_host_key: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint-served}]}`",
    )
}

/// The check of buffers, also for the picker's cluster.
pub(super) fn check_buffer(subject: &str, cluster: &Value) -> Finding {
    let bytes = number(cluster, "per_connection_buffer_limit_bytes").unwrap_or(DEFAULT_BUFFER_BYTES);
    if bytes >= DEFAULT_BUFFER_BYTES {
        return CLUSTER_BUFFER.ok(subject, format!("per_connection_buffer_limit_bytes is {bytes}"));
    }
    CLUSTER_BUFFER.warning(
        subject,
        format!("per_connection_buffer_limit_bytes is {bytes}"),
        "set `per_connection_buffer_limit_bytes: 1048576` of the cluster",
    )
}

fn check_hosts(traffic: &Traffic<'_>, subject: &str, name: &str) -> Option<Finding> {
    traffic.source.live.as_ref()?;
    let number = hosts(traffic.source, name).len();
    Some(if number > 0 {
        HOSTS.ok(subject, format!("Envoy knows {number} servers"))
    } else {
        let fix = "correct `load_assignment`, or the service discovery of the cluster";
        HOSTS.error(subject, "Envoy knows no server of the cluster", fix)
    })
}
