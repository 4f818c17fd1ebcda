//! Judges the counters of the picker: limits, rejections, degraded modes, certificates, connections.

use super::degraded;
use super::pages::{EndpointsPage, PickerMetrics};
use crate::finding::{Check, Report, Severity};
use attache_types::clock::wall_now;
use attache_types::error::{Fault, Reason};
use std::time::UNIX_EPOCH;

static RELOAD: Check = Check {
    id: "picker-reload",
    about: "the last change of the configuration took effect",
    why: "The picker runs with an old configuration, and takes it again only until its next start.",
};
static DEGRADED: Check = Check {
    id: "picker-degraded",
    about: "degraded modes that were counted since the start",
    why: "Decisions lacked a signal, so requests went to worse servers.",
};
static REJECTIONS: Check = Check {
    id: "picker-rejections",
    about: "requests that were rejected because of a limit, overload or missing servers",
    why: "Clients got errors instead of responses.",
};
static LIMITS: Check = Check {
    id: "picker-limits",
    about: "limits that took effect",
    why: "Requests were cut, rejected or routed without their prompt.",
};
static QUEUE: Check = Check {
    id: "picker-queue",
    about: "requests that left a queue without an endpoint",
    why: "The pool is too small for its load, or its queue for the bursts.",
};
static CERTIFICATE: Check = Check {
    id: "picker-certificate",
    about: "validity of the certificate of the ext-proc port, and its reloads",
    why: "After its end, Envoy refuses the connection, and every request fails.",
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
static HANDSHAKES: Check = Check {
    id: "picker-tls-handshakes",
    about: "TLS handshakes on the ext-proc port that failed",
    why: "Envoy does not reach the picker, so requests fail or are not routed.",
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

pub(super) const CHECKS: &[&Check] = &[
    &RELOAD,
    &DEGRADED,
    &REJECTIONS,
    &LIMITS,
    &QUEUE,
    &CERTIFICATE,
    &FILES,
    &CONNECTIONS,
    &HANDSHAKES,
    &PANICS,
    &PROTOCOL,
    &SHARED,
    &TOKENIZER,
    &DISCOVERY,
];

/// Time before the end of a certificate from which on it is reported, 14 days.
const CERTIFICATE_NOTICE: f64 = 14.0 * 86_400.0;
/// Part of the allowed file descriptors from which on it is reported.
const MANY_FILES: f64 = 0.8;

/// Adds findings for the counters, and for those of `/endpoints`.
pub(super) fn judge(subject: &str, metrics: &PickerMetrics, page: Option<&EndpointsPage>, report: &mut Report) {
    if let Some(page) = page {
        degraded(subject, page, report);
        rejections(subject, page, report);
    }
    reload(subject, metrics, report);
    limits(subject, metrics, report);
    queue(subject, metrics, report);
    certificate(subject, metrics, seconds_now(), report);
    files(subject, metrics, report);
    connections(subject, metrics, report);
    faults(subject, metrics, report);
    shared(subject, metrics, report);
    discovery(subject, metrics, report);
}

fn seconds_now() -> f64 {
    wall_now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64()
}

fn degraded(subject: &str, page: &EndpointsPage, report: &mut Report) {
    let counted: Vec<_> = page.degraded.iter().filter(|(_, count)| **count > 0).collect();
    if counted.is_empty() {
        report.push(DEGRADED.ok(subject, "no degraded mode since the start"));
    }
    for (label, count) in counted {
        let mode = degraded::of(label);
        let meaning = mode.map_or("see the reference of metrics", |mode| mode.meaning);
        let fix = mode.map_or("look up the mode in the reference of metrics", |mode| mode.fix);
        let found = format!("`{label}` {count} times since the start: {meaning}");
        report.push(match mode.map_or(Severity::Warning, |mode| mode.severity) {
            Severity::Error => DEGRADED.error(subject, found, fix),
            Severity::Ok => DEGRADED.ok(subject, found),
            Severity::Warning | Severity::Unknown => DEGRADED.warning(subject, found, fix),
        });
    }
}

/// The key or the place that a rejection is about; `None` for mistakes of clients alone.
fn remedy(reason: Reason) -> Option<&'static str> {
    Some(match reason {
        Reason::BodyTooLarge => "raise `limits.maxBodyBytes` if such bodies are expected",
        Reason::HeadersTooLarge => "raise `limits.maxHeaderBytes` if such headers are expected",
        Reason::JsonTooDeep => "raise `limits.maxJsonDepth` if such bodies are expected",
        Reason::JsonTooComplex => "raise `limits.maxJsonValues` if such bodies are expected",
        Reason::TooManyPrompts => "raise `limits.maxPrompts` if such bodies are expected",
        Reason::RequestTimeout => "raise `limits.requestTimeout` if uploads take that long",
        Reason::UploadTooSlow => "lower `limits.minUploadRate` if clients have slow networks",
        Reason::UploadEvicted | Reason::Overloaded => "raise `limits.maxBufferedBytes` or `limits.maxStreams`",
        Reason::ModelNotFound => "add the model to `match.models` or `modelRewrites`, or drop `rejectUnknownModels`",
        Reason::NoPool => "correct `match` of the pools, or add a pool without `match`",
        Reason::NoReadyEndpoint => "look at the endpoints below and at the readiness of pods",
        Reason::SubsetEmpty => "correct the filter header or the subset hint of the gateway",
        Reason::NoPrefillEndpoint => "start servers with `role: prefill`",
        Reason::NoWholeEndpoint => "start a server with `role: both`",
        Reason::PrefillFailed | Reason::PrefillDeclined => "look at the prefill servers, or set `fallback: local`",
        Reason::QueueFull => "add servers, or raise `flowControl.maxRequests`",
        Reason::QueueTimeout => "add servers, or raise `flowControl.ttl`",
        Reason::Evicted => "add servers, or set `flowControl.evictRunning: never`",
        Reason::Shed => "add servers, or give these requests a priority of 0 or more",
        Reason::DeadlineUnmet | Reason::DeadlinePassed => "add servers, or let clients ask for a longer time",
        Reason::RequestsPerMinute
        | Reason::TokensPerMinute
        | Reason::RequestsPerDay
        | Reason::TokensPerDay
        | Reason::RequestsPerSecond
        | Reason::ModelRequestsPerSecond
        | Reason::Concurrency => {
            "nothing if the limit is intended; else raise it in `limits.tenants` or `limits.models`"
        }
        Reason::LimitsUnknown => "look at Redis, or set `redis.onFailure: allow`",
        Reason::UnknownUser => "add the record of the tenant, or set `userRecords.unknown: default`",
        Reason::UnknownPath => "set `limits.tenants.unknownPaths: estimate`",
        Reason::Internal => "report the log line with the request id: it is a bug",
        Reason::EmptyBody
        | Reason::InvalidJson
        | Reason::InvalidUtf8
        | Reason::DuplicateField
        | Reason::InvalidModel
        | Reason::InvalidMessages
        | Reason::InvalidPrompt
        | Reason::InvalidPromptTokens
        | Reason::InvalidType
        | Reason::InvalidCacheSalt
        | Reason::InvalidRoutingStrategy
        | Reason::InvalidEndpointFilter
        | Reason::InvalidGrpc
        | Reason::UnsupportedGrpcMethod
        | Reason::UnsupportedMediaType => return None,
    })
}

fn rejections(subject: &str, page: &EndpointsPage, report: &mut Report) {
    let mut by_clients = 0;
    let mut any = false;
    for (code, count) in page.rejections.iter().filter(|(_, count)| **count > 0) {
        let reason = Reason::ALL.iter().copied().find(|reason| reason.code() == code);
        let Some((reason, fix)) = reason.and_then(|reason| Some((reason, remedy(reason)?))) else {
            by_clients += count;
            continue;
        };
        any = true;
        let found = format!("{count} requests rejected with {} `{code}` since the start", reason.status());
        report.push(match reason.fault() {
            Fault::Internal => REJECTIONS.error(subject, found, fix),
            _ => REJECTIONS.warning(subject, found, fix),
        });
    }
    if !any {
        let clients = if by_clients > 0 { format!("; {by_clients} were wrong requests") } else { String::new() };
        report.push(REJECTIONS.ok(subject, format!("no request was rejected by a limit or overload{clients}")));
    }
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

fn queue(subject: &str, metrics: &PickerMetrics, report: &mut Report) {
    for sample in metrics.each("attache_queue_turns_total") {
        let (pool, outcome) = (label(sample, "pool"), label(sample, "outcome"));
        let (meaning, fix) = match outcome {
            "full" => ("found the queue full", "add servers, or raise `flowControl.maxRequests`"),
            "expired" => ("waited longer than `ttl`", "add servers, or raise `flowControl.ttl`"),
            "evicted" => ("gave their place to others", "add servers, or change `flowControl.evictSheddable`"),
            "unqueued" => (
                "were sent to a full pool, because the body mode of Envoy leaves no time to wait",
                "set `processing_mode.request_body_mode: FULL_DUPLEX_STREAMED` in the ext-proc filter",
            ),
            _ => continue,
        };
        if sample.1 > 0.0 {
            let found = format!("pool {pool}: {:.0} requests {meaning} since the start", sample.1);
            report.push(QUEUE.warning(subject, found, fix));
        }
    }
}

fn certificate(subject: &str, metrics: &PickerMetrics, now: f64, report: &mut Report) {
    let refused =
        metrics.sum("attache_tls_reload_failures_total") + metrics.sum("attache_tls_client_ca_reload_failures_total");
    if refused > 0.0 {
        report.push(CERTIFICATE.error(
            subject,
            format!("{refused:.0} changes of certificate files were refused; the previous ones are in use"),
            "correct `tls.crt` and `tls.key` in `server.tls.directory`, or `server.tls.clientCaFile`; the log has the reason",
        ));
    }
    let Some(end) = metrics.value("attache_tls_certificate_expiry_timestamp_seconds").filter(|end| *end > 0.0) else {
        return;
    };
    let left = end - now;
    let days = (left / 86_400.0).abs();
    let fix = "renew the files in `server.tls.directory`; the picker reads them again if `server.tls.reload` is true";
    report.push(match () {
        () if left <= 0.0 => CERTIFICATE.error(subject, format!("the certificate expired {days:.1} days ago"), fix),
        () if left < CERTIFICATE_NOTICE => {
            CERTIFICATE.warning(subject, format!("the certificate expires in {days:.1} days"), fix)
        }
        () => CERTIFICATE.ok(subject, format!("the certificate is valid for {days:.0} more days")),
    });
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
    for sample in metrics.each("attache_tls_handshake_failures_total").iter().filter(|(_, count)| *count > 0.0) {
        let cause = label(sample, "cause");
        report.push(HANDSHAKES.warning(
            subject,
            format!("{:.0} TLS handshakes failed: {cause}", sample.1),
            "compare `server.tls` (`--secure-serving`) with `transport_socket` of Envoy's cluster for the picker",
        ));
    }
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

    fn severities(judge: impl FnOnce(&mut Report)) -> Vec<Severity> {
        let mut report = Report::default();
        judge(&mut report);
        report.findings().iter().map(|finding| finding.severity).collect()
    }

    #[test]
    fn certificate_is_reported_before_and_after_its_end() {
        let page = b"attache_tls_certificate_expiry_timestamp_seconds 1000000000\n";
        let metrics = PickerMetrics::read(page);
        for (now, severity) in [
            (1e9 - 60.0 * 86_400.0, Severity::Ok),
            (1e9 - 13.0 * 86_400.0, Severity::Warning),
            (1e9 + 60.0, Severity::Error),
        ] {
            assert_eq!(severities(|report| certificate("picker", &metrics, now, report)), [severity], "{now}");
        }
    }

    #[test]
    fn every_rejection_without_a_remedy_is_a_fault_of_the_client() {
        for reason in Reason::ALL {
            assert!(remedy(*reason).is_some() || reason.fault() == Fault::Client, "{}", reason.code());
        }
    }

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
        let page = b"attache_queue_turns_total{pool=\"a\",outcome=\"full\"} 4\n\
            attache_queue_turns_total{pool=\"a\",outcome=\"passed\"} 9\n\
            attache_listener_connections_closed_total{listener=\"ext-proc\",reason=\"refused\"} 2\n\
            attache_panics_total 1\nattache_config_last_reload_successful 0\n\
            attache_limit_hits_total{limit=\"body_bytes\"} 3\nattache_sync_connected 0\n";
        let mut report = Report::default();
        judge("picker", &PickerMetrics::read(page), None, &mut report);
        let ids: Vec<_> = report.findings().iter().map(|finding| finding.check.id).collect();
        let expected = [
            "picker-reload",
            "picker-limits",
            "picker-queue",
            "picker-connections",
            "picker-panics",
            "picker-shared-state",
        ];
        assert_eq!(ids, expected);
        let calm = b"attache_queue_turns_total{pool=\"a\",outcome=\"full\"} 0\nattache_panics_total 0\n\
            attache_listener_connections_closed_total{listener=\"ext-proc\",reason=\"refused\"} 0\n\
            attache_config_last_reload_successful 1\nattache_sync_connected 1\n";
        let found = severities(|report| judge("picker", &PickerMetrics::read(calm), None, report));
        assert!(found.iter().all(|severity| *severity == Severity::Ok), "{found:?}");
    }
}
