//! Judges the metrics of the picker: limits, connections, shared state, discovery.

use super::pages::PickerMetrics;
use crate::finding::{Check, Report};

static RELOAD: Check = Check {
    id: "picker-reload",
    about: "the last change of the configuration took effect",
    why: "The picker runs with an old configuration, and takes it again only until its next start.",
};
static LIMITS: Check = Check {
    id: "picker-limits",
    about: "limits that took effect",
    why: "Requests were cut, rejected or routed without their prompt.",
};
static FILES: Check = Check {
    id: "picker-file-descriptors",
    about: "open file descriptors against their limit",
    why: "Without descriptors, the picker takes no connections and scrapes no metrics.",
};
static CONNECTIONS: Check = Check {
    id: "picker-connections",
    about: "connections that the picker closed to keep a limit",
    why: "Streams of Envoy were cut, and their requests failed.",
};
static PANICS: Check =
    Check { id: "picker-panics", about: "caught panics", why: "Each is a bug, and a request failed by it." };
static PROTOCOL: Check = Check {
    id: "picker-protocol",
    about: "ext-proc messages that violate the protocol",
    why: "The picker ended these streams, and their requests failed.",
};
static SHARED: Check = Check {
    id: "picker-shared-state",
    about: "the picker's own connections to NATS and Redis",
    why: "Pickers then count alone, and limits apply to each of them.",
};
static TOKENIZER: Check = Check {
    id: "picker-remote-tokenizer",
    about: "models whose remote tokenizer does not respond",
    why: "Their prompts have no tokens, so requests are routed by load.",
};
static DISCOVERY: Check = Check {
    id: "picker-discovery",
    about: "the picker follows the objects of the cluster",
    why: "Endpoints and rules for models may be out of date.",
};

pub(super) const CHECKS: &[&Check] =
    &[&RELOAD, &LIMITS, &FILES, &CONNECTIONS, &PANICS, &PROTOCOL, &SHARED, &TOKENIZER, &DISCOVERY];

/// Part of the allowed file descriptors from which on it is reported.
const MANY_FILES: f64 = 0.8;

/// Adds findings for the counters.
pub(super) fn judge(subject: &str, metrics: &PickerMetrics, report: &mut Report) {
    reload(subject, metrics, report);
    limits(subject, metrics, report);
    files(subject, metrics, report);
    connections(subject, metrics, report);
    faults(subject, metrics, report);
    shared(subject, metrics, report);
    discovery(subject, metrics, report);
}

fn reload(subject: &str, metrics: &PickerMetrics, report: &mut Report) {
    match metrics.value("attache_config_last_reload_successful") {
        Some(0.0) => report.push(RELOAD.error(
            subject,
            "the last change of the file was refused: the previous configuration is in effect",
            "run `attache check FILE` and correct what it names; the log of the picker has the same",
        )),
        Some(_) => report.push(RELOAD.ok(subject, "the last configuration that was read is in effect")),
        None => {}
    }
}

/// The label of a metric; empty if it is missing.
fn label<'a>(sample: &'a super::pages::Sample, name: &str) -> &'a str {
    sample.0.get(name).map(String::as_str).unwrap_or_default()
}

fn limits(subject: &str, metrics: &PickerMetrics, report: &mut Report) {
    let hits: Vec<_> = metrics.each("attache_limit_hits_total").iter().filter(|(_, count)| *count > 0.0).collect();
    for sample in &hits {
        let limit = label(sample, "limit");
        report.push(LIMITS.warning(
            subject,
            format!("the limit `{limit}` took effect {:.0} times since the start", sample.1),
            "find the key of this limit in `limits` of the configuration reference, and raise it if it is not intended",
        ));
    }
    if hits.is_empty() {
        report.push(LIMITS.ok(subject, "no limit took effect since the start"));
    }
}

fn files(subject: &str, metrics: &PickerMetrics, report: &mut Report) {
    let (open, most) = (metrics.value("process_open_fds"), metrics.value("process_max_fds"));
    let Some((open, most)) = open.zip(most).filter(|(_, most)| *most > 0.0) else { return };
    let found = format!("{open:.0} of {most:.0} file descriptors are open");
    report.push(match open > most * MANY_FILES {
        true => FILES.warning(subject, found, "raise the limit: `ulimit -n`, or `LimitNOFILE` of the systemd unit"),
        false => FILES.ok(subject, found),
    });
}

fn connections(subject: &str, metrics: &PickerMetrics, report: &mut Report) {
    for sample in metrics.each("attache_listener_connections_closed_total") {
        let (listener, reason) = (label(sample, "listener"), label(sample, "reason"));
        // Clients of the admin port that are silent are closed by design.
        if sample.1 > 0.0 && reason != "timeout" {
            report.push(CONNECTIONS.warning(
                subject,
                format!("{:.0} connections of the listener `{listener}` were closed: {reason}", sample.1),
                "raise the limit of file descriptors (`ulimit -n`), from which the limits of connections follow, or \
                 `limits.maxStreamsPerConnection`",
            ));
        }
    }
}

fn faults(subject: &str, metrics: &PickerMetrics, report: &mut Report) {
    let (panics, violations) = (metrics.sum("attache_panics_total"), metrics.sum("attache_protocol_errors_total"));
    if panics > 0.0 {
        let found = format!("{panics:.0} caught panics since the start");
        report.push(PANICS.error(subject, found, "report the log lines of the picker: it is a bug"));
    }
    if violations > 0.0 {
        let found = format!("{violations:.0} messages violated the ext-proc protocol since the start");
        let fix = "compare `processing_mode` of the ext-proc filter with the bootstraps in `envoy/`";
        report.push(PROTOCOL.warning(subject, found, fix));
    }
}

fn shared(subject: &str, metrics: &PickerMetrics, report: &mut Report) {
    for (name, what, fix) in [
        ("attache_sync_connected", "NATS", "look at `sync.nats.servers`, its login, and the log of the picker"),
        ("attache_redis_connected", "Redis", "look at `redis.url`, its login, and the log of the picker"),
    ] {
        match metrics.value(name) {
            Some(0.0) if name == "attache_sync_connected" => {
                report.push(SHARED.error(subject, format!("the picker has no connection to {what}"), fix));
            }
            Some(value) if value > 0.0 => {
                report.push(SHARED.ok(subject, format!("the picker is connected to {what}")));
            }
            _ => {}
        }
    }
    let failed = metrics.sum("attache_limit_store_failures_total");
    if failed > 0.0 {
        report.push(SHARED.warning(
            subject,
            format!("Redis did not answer {failed:.0} requests about their limits"),
            "look at Redis, or raise `redis.timeout`",
        ));
    }
    let mismatches = metrics.sum("attache_sync_snapshot_block_mismatches_total");
    if mismatches > 0.0 {
        report.push(SHARED.warning(
            subject,
            format!("{mismatches:.0} chunks of a peer's prefix index have another block size"),
            "give all pickers the same `prefixCache.blockSize`",
        ));
    }
}

fn discovery(subject: &str, metrics: &PickerMetrics, report: &mut Report) {
    for sample in metrics.each("attache_tokenizer_unhealthy_models").iter().filter(|(_, count)| *count > 0.0) {
        report.push(TOKENIZER.warning(
            subject,
            format!("pool {}: the remote tokenizer of {:.0} models does not respond", label(sample, "pool"), sample.1),
            "look at `/tokenize` of the model servers, or at `prefixCache.tokenizer.url`",
        ));
    }
    for (name, meaning, fix) in [
        (
            "attache_kube_out_of_touch",
            "kinds of objects can't be followed",
            "give the service account the rights in the log of the picker, or look at the API server",
        ),
        (
            "attache_kube_pool_unreadable",
            "InferencePools are invalid",
            "correct the field that the log of the picker names",
        ),
        ("attache_kube_endpoints_left_out", "endpoints beyond 4,096 are left out", "divide the pool"),
    ] {
        for sample in metrics.each(name).iter().filter(|(_, count)| *count > 0.0) {
            let found = format!("pool {}: {:.0} {meaning}", label(sample, "pool"), sample.1);
            report.push(DISCOVERY.warning(subject, found, fix));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{Severity, severities};

    #[test]
    fn many_open_files_are_a_warning() {
        for (page, severity) in [
            (&b"process_open_fds 900\nprocess_max_fds 1000\n"[..], Severity::Warning),
            (&b"process_open_fds 90\nprocess_max_fds 1000\n"[..], Severity::Ok),
        ] {
            assert_eq!(severities(|report| files("picker", &PickerMetrics::read(page), report)), [severity]);
        }
    }

    #[test]
    fn counters_of_trouble_are_warnings_and_a_calm_picker_has_none() {
        let page = b"attache_listener_connections_closed_total{listener=\"ext-proc\",reason=\"refused\"} 2\n\
            attache_panics_total 1\nattache_config_last_reload_successful 0\n\
            attache_limit_hits_total{limit=\"body_bytes\"} 3\nattache_sync_connected 0\n";
        let mut report = Report::default();
        judge("picker", &PickerMetrics::read(page), &mut report);
        let ids: Vec<_> = report.findings().iter().map(|finding| finding.check.id).collect();
        let expected = ["picker-reload", "picker-limits", "picker-connections", "picker-panics", "picker-shared-state"];
        assert_eq!(ids, expected);
        let calm = b"attache_panics_total 0\n\
            attache_listener_connections_closed_total{listener=\"ext-proc\",reason=\"refused\"} 0\n\
            attache_config_last_reload_successful 1\nattache_sync_connected 1\n";
        let found = severities(|report| judge("picker", &PickerMetrics::read(calm), report));
        assert!(found.iter().all(|severity| *severity == Severity::Ok), "{found:?}");
    }
}
