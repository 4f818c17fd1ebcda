//! Routes to model servers: destination, time-outs, retries.

use super::config::{Route, Steering};
use super::field::{at, duration, has, list, number, text};
use super::names::Names;
use super::traffic::{ModelListener, Traffic};
use crate::finding::{Check, Finding, Report};
use serde_json::Value;
use std::time::Duration;

pub(super) const CHECKS: &[&Check] = &[
    &DESTINATION,
    &ROUTE_TIMEOUT,
    &IDLE,
    &STREAM_DURATION,
    &RETRY_CONDITIONS,
    &RETRY_SAME,
    &NO_RETRY,
    &TRY_TIMEOUT,
    &RETRY_BODY,
];

static DESTINATION: Check = Check {
    id: "envoy-destination",
    about: "Envoy sends requests where the picker says",
    why: "Envoy's own load balancing spreads requests, whatever the picker decided.",
};

static ROUTE_TIMEOUT: Check = Check {
    id: "envoy-route-timeout",
    about: "the route's time-out is longer than a response",
    why: "Envoy cuts each response that takes longer, streams too. The default is 15 s.",
};

static IDLE: Check = Check {
    id: "envoy-stream-idle-timeout",
    about: "streams may be silent for as long as a prompt waits",
    why: "A request in a queue, a long prefill and a reasoning model are silent; then Envoy responds with 504.",
};

static STREAM_DURATION: Check = Check {
    id: "envoy-stream-duration",
    about: "no limit of a whole stream cuts responses",
    why: "Envoy cuts each response that takes longer.",
};

static RETRY_CONDITIONS: Check = Check {
    id: "envoy-retry-conditions",
    about: "Envoy repeats a request only if no server has begun to work on it",
    why: "A repeated POST is generated twice, and a request that crashes servers reaches the next one.",
};

static RETRY_SAME: Check = Check {
    id: "envoy-retry-same-server",
    about: "retries go to another server",
    why: "Envoy does not ask the picker again: each retry goes to the address that just failed.",
};

static NO_RETRY: Check = Check {
    id: "envoy-no-retry",
    about: "Envoy tries the next server of a list",
    why: "Without a retry policy, Envoy uses only the first server of the picker's list.",
};

static TRY_TIMEOUT: Check = Check {
    id: "envoy-try-timeout",
    about: "no time-out of a single try cuts responses",
    why: "Envoy cuts a response that takes longer, or sends the request again.",
};

static RETRY_BODY: Check = Check {
    id: "envoy-retry-buffer",
    about: "Envoy holds request bodies for retries",
    why: "Envoy never repeats a request whose body is larger than this limit.",
};

/// A shorter time for a whole response is a finding: 10 minutes.
const LONG: Duration = Duration::from_secs(600);
/// A shorter time without a byte is a finding: Envoy's default, 5 minutes.
const SILENCE: Duration = Duration::from_secs(300);
/// Envoy's default of `timeout` of routes.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(15);
/// Body size below which retries must be possible, 16 MiB: the picker's limit by default.
pub(super) const BODY_BYTES: u64 = 16 << 20;
/// Envoy's default of `per_connection_buffer_limit_bytes`.
pub(super) const DEFAULT_BUFFER_BYTES: u64 = 1 << 20;

/// Conditions under which Envoy repeats a request that a server may be working on.
const REPEATING: [&str; 6] =
    ["5xx", "gateway-error", "reset", "http3-post-connect-failure", "retriable-4xx", "deadline-exceeded"];

pub(super) fn check(traffic: &Traffic<'_>, names: &Names<'_>, out: &mut Report) {
    for listener in &traffic.managers {
        let mut findings: Vec<Finding> = Vec::new();
        for route in &listener.routes {
            check_route(traffic, listener, route, names, &mut findings);
        }
        merge(findings, out);
    }
}

/// Adds findings; those that differ only in their route become one.
fn merge(findings: Vec<Finding>, out: &mut Report) {
    let mut merged: Vec<Finding> = Vec::new();
    for finding in findings {
        let same = |other: &Finding| {
            std::ptr::eq(other.check, finding.check) && other.found == finding.found && other.subject == finding.subject
        };
        if !merged.iter().any(same) {
            merged.push(finding);
        }
    }
    merged.into_iter().for_each(|finding| out.push(finding));
}

fn check_route(
    traffic: &Traffic<'_>,
    listener: &ModelListener<'_>,
    route: &Route<'_>,
    names: &Names<'_>,
    out: &mut Vec<Finding>,
) {
    let is_one = listener.routes.len() == 1;
    let subject =
        if is_one { listener.subject.clone() } else { format!("{}, route {}", listener.subject, route.name()) };
    let steering = traffic.steering(std::slice::from_ref(route));
    check_destination(traffic, &subject, route, &steering, names, out);
    out.push(check_timeout(&subject, route));
    out.push(check_idle(&subject, listener, route));
    out.extend(check_duration(&subject, listener, route));
    let policy = [route.action(), route.host].into_iter().map(|level| at(level, "retry_policy")).find(|p| !p.is_null());
    match policy {
        Some(policy) => check_retries(&subject, listener, route, policy, &steering, out),
        None if steering.iter().any(|steering| matches!(steering, Steering::List(_))) => {
            let fix = "add `retry_policy: {retry_on: \"connect-failure,refused-stream,reset-before-request\", num_retries: 2}` to the route";
            out.push(NO_RETRY.warning(&subject, "the route has no retry policy", fix));
        }
        None => out.push(RETRY_CONDITIONS.ok(&subject, "the route repeats no request")),
    }
}

fn check_destination(
    traffic: &Traffic<'_>,
    subject: &str,
    route: &Route<'_>,
    steering: &[Steering<'_>],
    names: &Names<'_>,
    out: &mut Vec<Finding>,
) {
    let fix = "use `type: ORIGINAL_DST` with `original_dst_lb_config: {use_http_header: true, http_header_name: \
               x-gateway-destination-endpoint}`, or the policy `override_host`, as in `envoy/`";
    if steering.is_empty() && !traffic.is_steered && has(route.action(), "cluster_header") {
        let found = "a header selects the cluster";
        out.push(DESTINATION.unknown(subject, found, "name the cluster in `route.cluster`"));
    }
    for (name, steering) in route.clusters().into_iter().zip(steering) {
        out.push(match steering {
            Steering::Balanced => {
                DESTINATION.error(subject, format!("the cluster {name} balances requests itself"), fix)
            }
            Steering::ClientAddress => {
                let found = format!("the cluster {name} connects to the address that the client used");
                DESTINATION.error(subject, found, fix)
            }
            Steering::Header(header) if !is_named(names, header) => DESTINATION.error(
                subject,
                format!("the cluster {name} reads the header {header}, which the picker does not set"),
                "set `original_dst_lb_config.http_header_name: x-gateway-destination-endpoint`, or `--destination-header` of Attaché",
            ),
            Steering::Header(header) => DESTINATION.ok(subject, format!("the cluster {name} follows the header {header}")),
            Steering::Metadata(key) => check_key(subject, name, key, names),
            Steering::Subset(subset) if text(subset, "fallback_policy") == "ANY_ENDPOINT" => DESTINATION.warning(
                subject,
                format!("the cluster {name} uses any server when no subset matches the picker's choice"),
                "set `lb_subset_config.fallback_policy: NO_FALLBACK`, or use the policy `override_host`",
            ),
            Steering::Subset(_) => DESTINATION.ok(subject, format!("the cluster {name} selects a subset by metadata")),
            Steering::List(policy) => check_sources(subject, name, policy, names),
        });
    }
}

fn is_named(names: &Names<'_>, header: &str) -> bool {
    names.headers().iter().any(|name| name.eq_ignore_ascii_case(header))
}

/// The message `MetadataKey`.
fn check_key(subject: &str, cluster: &str, key: &Value, names: &Names<'_>) -> Finding {
    let path: Vec<&str> = list(key, "path").iter().map(|segment| text(segment, "key")).collect();
    let (namespace, path) = (text(key, "key"), path.join("/"));
    if names.metadata().contains(&(namespace, path.as_str())) {
        return DESTINATION.ok(subject, format!("the cluster {cluster} follows metadata {namespace}/{path}"));
    }
    DESTINATION.error(
        subject,
        format!("the cluster {cluster} reads metadata {namespace}/{path}, which the picker does not set"),
        "set the key `envoy.lb` with the path `x-gateway-destination-endpoint`, or `--destination-metadata-key` of Attaché",
    )
}

/// The message `OverrideHost`.
fn check_sources(subject: &str, cluster: &str, policy: &Value, names: &Names<'_>) -> Finding {
    let sources = list(policy, "override_host_sources");
    let keys = sources.iter().map(|source| at(source, "metadata")).filter(|key| !key.is_null());
    let of_keys: Vec<Finding> = keys.map(|key| check_key(subject, cluster, key, names)).collect();
    let headers = sources.iter().map(|source| text(source, "header")).filter(|header| !header.is_empty());
    let is_header = headers.clone().any(|header| is_named(names, header));
    let is_good = |finding: &Finding| finding.severity == crate::finding::Severity::Ok;
    if is_header || of_keys.iter().any(is_good) {
        return DESTINATION.ok(subject, format!("the cluster {cluster} follows the picker's list"));
    }
    of_keys.into_iter().next().unwrap_or_else(|| {
        let seen: Vec<&str> = headers.collect();
        DESTINATION.error(
            subject,
            format!("the cluster {cluster} reads the header {}, which the picker does not set", seen.join(", ")),
            "add `metadata: {key: envoy.lb, path: [{key: x-gateway-destination-endpoint}]}` to `override_host_sources`",
        )
    })
}

fn check_timeout(subject: &str, route: &Route<'_>) -> Finding {
    let timeout = duration(route.action(), "timeout");
    let fix = "set `timeout: 0s` in the route";
    match timeout {
        Some(Duration::ZERO) => ROUTE_TIMEOUT.ok(subject, "the route has no time-out"),
        Some(timeout) if timeout >= LONG => ROUTE_TIMEOUT.ok(subject, format!("the route's time-out is {timeout:?}")),
        Some(timeout) => ROUTE_TIMEOUT.error(subject, format!("the route's time-out is {timeout:?}"), fix),
        None => ROUTE_TIMEOUT.error(subject, format!("the route has the default time-out, {DEFAULT_TIMEOUT:?}"), fix),
    }
}

fn check_idle(subject: &str, listener: &ModelListener<'_>, route: &Route<'_>) -> Finding {
    let of_route = duration(route.action(), "idle_timeout");
    let (timeout, key) = match of_route {
        Some(timeout) => (timeout, "idle_timeout` of the route"),
        None => (
            duration(listener.manager.message, "stream_idle_timeout").unwrap_or(SILENCE),
            "stream_idle_timeout` of the HTTP connection manager",
        ),
    };
    if timeout.is_zero() || timeout >= SILENCE {
        return IDLE.ok(subject, format!("streams may be silent for {timeout:?}"));
    }
    IDLE.warning(subject, format!("streams may be silent for {timeout:?} only"), format!("set `{key} to 900s"))
}

fn check_duration(subject: &str, listener: &ModelListener<'_>, route: &Route<'_>) -> Option<Finding> {
    let of_manager = duration(listener.manager.message, "common_http_protocol_options.max_stream_duration");
    let of_route = duration(route.action(), "max_stream_duration.max_stream_duration");
    let limit = of_route.or(of_manager).filter(|limit| !limit.is_zero() && *limit < LONG)?;
    Some(STREAM_DURATION.error(
        subject,
        format!("a stream may take {limit:?}"),
        "remove `max_stream_duration` from the route and from `common_http_protocol_options`",
    ))
}

fn check_retries(
    subject: &str,
    listener: &ModelListener<'_>,
    route: &Route<'_>,
    policy: &Value,
    steering: &[Steering<'_>],
    out: &mut Vec<Finding>,
) {
    let conditions: Vec<&str> = text(policy, "retry_on").split(',').map(str::trim).collect();
    let mut repeating: Vec<String> =
        conditions.iter().filter(|condition| REPEATING.contains(condition)).map(|c| (*c).to_owned()).collect();
    if conditions.contains(&"retriable-status-codes") {
        let codes = list(policy, "retriable_status_codes").iter().filter_map(Value::as_u64);
        repeating.extend(codes.filter(|code| *code >= 500 && *code != 503).map(|code| format!("status {code}")));
    }
    out.push(if repeating.is_empty() {
        RETRY_CONDITIONS.ok(subject, format!("the route repeats requests on {}", conditions.join(", ")))
    } else {
        RETRY_CONDITIONS.warning(
            subject,
            format!("the route repeats requests on {}", repeating.join(", ")),
            "set `retry_policy.retry_on: connect-failure,refused-stream,reset-before-request`",
        )
    });
    if steering.iter().any(|steering| steering.needs_address()) {
        let found = "the route has a retry policy, but the cluster knows one address only";
        let fix = "remove `retry_policy`, or use the policy `override_host` with `destination: {mode: list}`";
        out.push(RETRY_SAME.warning(subject, found, fix));
    }
    for key in ["per_try_timeout", "per_try_idle_timeout"] {
        let limit = if key == "per_try_timeout" { LONG } else { SILENCE };
        if let Some(timeout) = duration(policy, key).filter(|timeout| !timeout.is_zero() && *timeout < limit) {
            let found = format!("{key} is {timeout:?}");
            out.push(TRY_TIMEOUT.error(subject, found, format!("remove `retry_policy.{key}`")));
        }
    }
    if steering.iter().any(|steering| matches!(steering, Steering::List(_))) {
        let bytes = buffer_limit(listener, route);
        out.push(if bytes >= BODY_BYTES {
            RETRY_BODY.ok(subject, format!("Envoy holds bodies of {bytes} bytes for retries"))
        } else {
            let found = format!("Envoy holds bodies of {bytes} bytes for retries; the picker accepts {BODY_BYTES}");
            RETRY_BODY.warning(subject, found, "set `request_body_buffer_limit: 20971520` of the virtual host")
        });
    }
}

/// The largest request body that Envoy collects on a route, bytes.
pub(super) fn buffer_limit(listener: &ModelListener<'_>, route: &Route<'_>) -> u64 {
    let of_route = [route.message, route.host].into_iter().find_map(|level| {
        number(level, "request_body_buffer_limit").or_else(|| number(level, "per_request_buffer_limit_bytes"))
    });
    let of_listener = || number(listener.manager.listener, "per_connection_buffer_limit_bytes");
    of_route.or_else(of_listener).unwrap_or(DEFAULT_BUFFER_BYTES)
}
