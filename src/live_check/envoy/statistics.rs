//! Counters of a running Envoy that show what went wrong since its start.

use super::process::uptime;
use super::source::Live;
use super::traffic::Traffic;
use crate::finding::{Check, Report};
use serde_json::Value;

pub(super) const CHECKS: &[&Check] =
    &[&STREAMS, &TIMEOUTS, &ALLOWED, &REFUSED, &OVERFLOWS, &CLOSED, &NO_SERVER, &INVALID, &PROTOCOL, &CUT, &HANDSHAKES];

static STREAMS: Check = Check {
    id: "envoy-stat-streams-failed",
    about: "no stream to the picker failed",
    why: "Each failed stream is a request that got 500, or passed without the picker.",
};

static TIMEOUTS: Check = Check {
    id: "envoy-stat-message-timeouts",
    about: "the picker answered in time",
    why: "Each one is a request that got 504, or passed without the picker.",
};

static ALLOWED: Check = Check {
    id: "envoy-stat-failure-mode-allowed",
    about: "no request passed without the picker",
    why: "Such a request went to any server: no prefix cache, no limits, no priorities.",
};

static REFUSED: Check = Check {
    id: "envoy-stat-refused-mutations",
    about: "Envoy accepted what the picker changed",
    why: "A destination that Envoy refuses has no effect.",
};

static OVERFLOWS: Check = Check {
    id: "envoy-stat-overflows",
    about: "no circuit breaker rejected requests",
    why: "Each overflow is a request that Envoy rejected, although a server or the picker could take it.",
};

static CLOSED: Check = Check {
    id: "envoy-stat-closed-connections",
    about: "no server closed a connection with a request",
    why: "Each one is a request that failed: a server that crashed, or closed an idle connection too early.",
};

static NO_SERVER: Check = Check {
    id: "envoy-stat-no-server",
    about: "Envoy had a server for each request",
    why: "Each one is a request that got 503 `no healthy upstream`: the destination did not reach the cluster.",
};

static INVALID: Check = Check {
    id: "envoy-stat-invalid-destination",
    about: "each destination was one address",
    why: "Envoy can't connect to a list or to an empty destination, and responds with 503.",
};

static PROTOCOL: Check = Check {
    id: "envoy-stat-protocol-errors",
    about: "no connection broke for its protocol",
    why: "Envoy closes the connection with every request in flight.",
};

static CUT: Check = Check {
    id: "envoy-stat-cut-responses",
    about: "no time-out cut a response",
    why: "Each one is a response that a client did not get whole.",
};

static HANDSHAKES: Check = Check {
    id: "envoy-stat-tls-failures",
    about: "TLS connections to the picker could be established",
    why: "Without a connection to the picker, each request fails with 500.",
};

/// Where a counter belongs.
#[derive(Clone, Copy, PartialEq)]
enum Owner {
    /// An ext-proc filter.
    Filter,
    /// The HTTP connection manager.
    Manager,
    Picker,
    Model,
    /// A cluster of the picker or of model servers.
    Any,
}

struct Counters {
    check: &'static Check,
    owner: Owner,
    names: &'static [&'static str],
    fix: &'static str,
}

const COUNTERS: &[Counters] = &[
    Counters {
        check: &STREAMS,
        owner: Owner::Filter,
        names: &["streams_failed"],
        fix: "look at the picker's log and at `attache_tls_handshake_failures_total`; check `transport_socket` and the circuit breakers of its cluster",
    },
    Counters {
        check: &TIMEOUTS,
        owner: Owner::Filter,
        names: &["message_timeouts"],
        fix: "set a longer `message_timeout` of the filter, or give the picker more CPU",
    },
    Counters {
        check: &ALLOWED,
        owner: Owner::Filter,
        names: &["failure_mode_allowed"],
        fix: "find out why the picker did not answer, or set `failure_mode_allow: false`",
    },
    Counters {
        check: &REFUSED,
        owner: Owner::Filter,
        names: &["rejected_header_mutations", "spurious_msgs_received"],
        fix: "remove `mutation_rules` from the filter; report spurious messages as a bug",
    },
    Counters {
        check: &OVERFLOWS,
        owner: Owner::Any,
        names: &["upstream_rq_pending_overflow", "upstream_cx_overflow", "upstream_rq_retry_overflow"],
        fix: "raise `circuit_breakers.thresholds` of the cluster to 40000, and `max_retries` to 1024",
    },
    Counters {
        check: &CLOSED,
        owner: Owner::Model,
        names: &["upstream_cx_destroy_remote_with_active_rq"],
        fix: "set `common_http_protocol_options: {idle_timeout: 4s}` of the cluster, and look at the servers' logs",
    },
    Counters {
        check: &NO_SERVER,
        owner: Owner::Model,
        names: &["upstream_cx_none_healthy"],
        fix: "find the filter or route behind the ext-proc filter that removes `x-gateway-destination-endpoint`: Lua and Wasm \
              filters can, too; or name one address with `destination: {mode: single}` in the pool",
    },
    Counters {
        check: &INVALID,
        owner: Owner::Model,
        names: &["original_dst_host_invalid"],
        fix: "set `destination: {mode: single}` in the pool",
    },
    Counters {
        check: &PROTOCOL,
        owner: Owner::Any,
        names: &["upstream_cx_protocol_error", "http2.outbound_flood", "http2.outbound_control_flood"],
        fix: "set `max_outbound_frames: 1000000` and `max_outbound_control_frames: 100000` for the picker, and check its TLS settings",
    },
    Counters {
        check: &CUT,
        owner: Owner::Model,
        names: &["upstream_rq_timeout", "upstream_rq_per_try_timeout", "upstream_rq_max_duration_reached"],
        fix: "set `timeout: 0s` of the route, and remove `per_try_timeout` and `max_stream_duration`",
    },
    Counters {
        check: &CUT,
        owner: Owner::Manager,
        names: &["downstream_rq_idle_timeout", "downstream_rq_max_duration_reached"],
        fix: "set `stream_idle_timeout: 900s` of the HTTP connection manager",
    },
    Counters {
        check: &HANDSHAKES,
        owner: Owner::Picker,
        names: &["ssl.connection_error", "ssl.fail_verify_error", "ssl.fail_verify_san", "ssl.fail_verify_no_cert"],
        fix: "check certificates on both sides: `--cert-path` and `--client-ca-file` of Attaché, `transport_socket` of the cluster",
    },
];

pub(super) fn check(traffic: &Traffic<'_>, out: &mut Report) {
    let Some(live) = &traffic.source.live else { return };
    for counters in COUNTERS {
        for (subject, prefix) in owners(traffic, counters.owner) {
            // A destination that is no address leaves Envoy without a server, too.
            let is_explained = total(live, &prefix, counters.owner, "original_dst_host_invalid") > 0;
            if counters.check.id == NO_SERVER.id && is_explained {
                continue;
            }
            let seen: Vec<String> = counters
                .names
                .iter()
                .map(|name| (name, total(live, &prefix, counters.owner, name)))
                .filter(|(_, number)| *number > 0)
                .map(|(name, number)| format!("{name}: {number}"))
                .collect();
            out.push(if seen.is_empty() {
                counters.check.ok(subject, format!("{}: 0", counters.names.join(", ")))
            } else {
                let found = format!("{}, since Envoy started {} ago", seen.join(", "), uptime(traffic.source));
                counters.check.warning(subject, found, counters.fix)
            });
        }
    }
}

/// The subjects that have the counters, and the beginning of the counters' names.
fn owners(traffic: &Traffic<'_>, owner: Owner) -> Vec<(String, String)> {
    let of_cluster = |name: &&str| (traffic.cluster_subject(name), format!("cluster.{name}."));
    let managers = traffic.managers.iter().map(|listener| {
        let prefix = super::field::text(listener.manager.message, "stat_prefix");
        (listener.subject.clone(), format!("http.{prefix}."))
    });
    match owner {
        Owner::Filter | Owner::Manager => managers.collect(),
        Owner::Picker => traffic.picker_clusters.keys().map(of_cluster).collect(),
        Owner::Model => traffic.model_clusters.keys().map(of_cluster).collect(),
        Owner::Any => traffic.model_clusters.keys().chain(traffic.picker_clusters.keys()).map(of_cluster).collect(),
    }
}

/// The sum of the counters of one owner with this name. An ext-proc filter may have a prefix of its own.
fn total(live: &Live, prefix: &str, owner: Owner, name: &str) -> u64 {
    let value = |value: &Value| value.as_u64().unwrap_or(0);
    if owner != Owner::Filter {
        return live.statistics.get(&format!("{prefix}{name}")).map_or(0, value);
    }
    let start = format!("{prefix}ext_proc.");
    let of_filter = live
        .statistics
        .iter()
        .filter(|(stat, _)| stat.strip_prefix(&start).is_some_and(|rest| rest.rsplit('.').next() == Some(name)));
    of_filter.map(|(_, number)| value(number)).sum()
}
