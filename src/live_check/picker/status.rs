//! Judges what the picker counted in the last minute: rejections and degraded modes; and its certificates. What was
//! counted earlier is over, and is no finding.

use super::degraded;
use super::pages::{CertificatePage, ModePage, RejectionPage, StatusPage};
use super::warnings::gateway_mode;
use crate::finding::{Check, Report, Severity};
use attache_types::certificate::Validity;
use attache_types::error::{Fault, Reason};

pub(super) static DEGRADED: Check = Check {
    id: "picker-degraded",
    about: "degraded modes of the last minute, and of body modes of Envoy since the start",
    why: "Decisions lacked a signal, so requests went to worse servers.",
};
static REJECTIONS: Check = Check {
    id: "picker-rejections",
    about: "requests that were rejected in the last minute because of a limit or of missing servers",
    why: "Clients got errors instead of responses.",
};
static CERTIFICATE: Check = Check {
    id: "picker-certificate",
    about: "validity of the certificates of the ext-proc port and for NATS, and their reloads",
    why: "After its end, Envoy, the picker or NATS refuses the connection.",
};

pub(super) const CHECKS: &[&Check] = &[&DEGRADED, &REJECTIONS, &CERTIFICATE];

pub(super) fn judge(subject: &str, page: &StatusPage, report: &mut Report) {
    degraded(subject, &page.degraded, report);
    rejections(subject, &page.rejections, report);
    page.certificates.iter().for_each(|one| certificate(subject, one, report));
}

/// Whether something was counted lately. Just after its start, a picker has no rates.
fn is_recent(per_second: Option<f64>) -> bool {
    per_second.is_none_or(|rate| rate > 0.0)
}

fn shown(per_second: Option<f64>) -> String {
    per_second.map_or_else(|| "since the start".to_owned(), |rate| format!("since the start, {rate:.2} a second now"))
}

fn degraded(subject: &str, modes: &[ModePage], report: &mut Report) {
    // The picker's own warnings have these.
    let is_own = |mode: &&ModePage| gateway_mode(&mode.mode).is_none();
    let (recent, past): (Vec<_>, Vec<_>) =
        modes.iter().filter(is_own).partition(|mode| is_recent(mode.times_per_second));
    let past: Vec<&str> = past.into_iter().map(|mode| mode.mode.as_str()).collect();
    if recent.is_empty() {
        let past = if past.is_empty() { String::new() } else { format!("; earlier: {}", past.join(", ")) };
        report.push(DEGRADED.ok(subject, format!("no degraded mode in the last minute{past}")));
    }
    for ModePage { mode: label, times, times_per_second } in recent {
        let mode = degraded::of(label);
        let meaning = mode.map_or("see the reference of metrics", |mode| mode.meaning);
        let fix = mode.map_or("look up the mode in the reference of metrics", |mode| mode.fix);
        let found = format!("`{label}` {times} times {}: {meaning}", shown(*times_per_second));
        report.push(match mode.map_or(Severity::Warning, |mode| mode.severity) {
            Severity::Error => DEGRADED.error(subject, found, fix),
            Severity::Ok => DEGRADED.ok(subject, found),
            Severity::Warning | Severity::Unknown => DEGRADED.warning(subject, found, fix),
        });
    }
}

/// The key or the place that a rejection is about; `None` for mistakes of clients alone, and for load, which the picker
/// warns of itself.
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
        Reason::QueueFull
        | Reason::QueueTimeout
        | Reason::Evicted
        | Reason::Shed
        | Reason::DeadlineUnmet
        | Reason::DeadlinePassed
        | Reason::EmptyBody
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
        | Reason::InvalidSessionId
        | Reason::InvalidGrpc
        | Reason::UnsupportedGrpcMethod
        | Reason::UnsupportedMediaType => return None,
    })
}

fn rejections(subject: &str, rejections: &[RejectionPage], report: &mut Report) {
    let mut any = false;
    for rejection in rejections.iter().filter(|rejection| is_recent(rejection.requests_per_second)) {
        let RejectionPage { reason: code, requests, requests_per_second } = rejection;
        let reason = Reason::ALL.iter().copied().find(|reason| reason.code() == code);
        let Some((reason, fix)) = reason.and_then(|reason| Some((reason, remedy(reason)?))) else { continue };
        any = true;
        let (status, shown) = (reason.status(), shown(*requests_per_second));
        let found = format!("{requests} requests rejected with {status} `{code}` {shown}");
        report.push(match reason.fault() {
            Fault::Internal => REJECTIONS.error(subject, found, fix),
            _ => REJECTIONS.warning(subject, found, fix),
        });
    }
    if !any {
        let past: u64 = rejections.iter().map(|rejection| rejection.requests).sum();
        let past = if past > 0 { format!("; {past} were rejected since the start") } else { String::new() };
        report.push(REJECTIONS.ok(subject, format!("no request was rejected in the last minute by a limit{past}")));
    }
}

fn certificate(subject: &str, page: &CertificatePage, report: &mut Report) {
    let CertificatePage { name, expires_in_seconds, refused_replacements } = page;
    let (files, condition) = match name.as_str() {
        "client CA" => ("the file `server.tls.clientCaFile`", ""),
        "NATS client certificate" => ("the files `sync.nats.tls.certFile` and `keyFile`", ""),
        _ => ("`tls.crt` and `tls.key` in `server.tls.directory`", " if `server.tls.reload` is true"),
    };
    if *refused_replacements > 0 {
        report.push(CERTIFICATE.error(
            subject,
            format!("{refused_replacements} new files of the {name} were refused; the previous one is in use"),
            format!("correct {files}; the log has the reason"),
        ));
    }
    let days = (expires_in_seconds / 86_400.0).abs();
    let fix = format!("renew {files}; the picker reads changed files again{condition}");
    report.push(match Validity::of(*expires_in_seconds) {
        Validity::Expired => CERTIFICATE.error(subject, format!("the {name} expired {days:.1} days ago"), fix),
        Validity::ExpiresSoon => CERTIFICATE.warning(subject, format!("the {name} expires in {days:.1} days"), fix),
        Validity::Valid => CERTIFICATE.ok(subject, format!("the {name} is valid for {days:.0} more days")),
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::severities;

    #[test]
    fn every_rejection_without_a_remedy_is_a_mistake_of_the_client_or_load() {
        for reason in Reason::ALL {
            let is_other = matches!(reason.fault(), Fault::Client | Fault::Overload);
            assert!(remedy(reason).is_some() || is_other, "{}", reason.code());
        }
    }

    #[test]
    fn rejections_and_modes_count_while_they_occur() {
        for (rate, severity) in [(None, Severity::Warning), (Some(0.5), Severity::Warning), (Some(0.0), Severity::Ok)] {
            let rejection = RejectionPage { reason: "rpm_exceeded".into(), requests: 9, requests_per_second: rate };
            assert_eq!(severities(|report| rejections("p", &[rejection], report)), [severity], "{rate:?}");
            let mode = ModePage { mode: "no_metrics".into(), times: 9, times_per_second: rate };
            assert_eq!(severities(|report| degraded("p", &[mode], report)), [severity], "{rate:?}");
        }
        let load = RejectionPage { reason: "queue_full".into(), requests: 9, requests_per_second: Some(1.0) };
        assert_eq!(severities(|report| rejections("p", &[load], report)), [Severity::Ok], "a warning has it");
    }

    #[test]
    fn certificate_is_reported_before_and_after_its_end() {
        for (days, severity) in [(60.0, Severity::Ok), (13.0, Severity::Warning), (-1.0, Severity::Error)] {
            let page = CertificatePage { expires_in_seconds: days * 86_400.0, ..CertificatePage::default() };
            assert_eq!(severities(|report| certificate("p", &page, report)), [severity], "{days}");
        }
    }

    #[test]
    fn fix_names_the_files_of_the_certificate() {
        for (name, key) in [
            ("server certificate", "`server.tls.directory`"),
            ("client CA", "`server.tls.clientCaFile`"),
            ("NATS client certificate", "`sync.nats.tls.certFile`"),
        ] {
            let page = CertificatePage { name: name.to_owned(), refused_replacements: 1, ..CertificatePage::default() };
            let mut report = Report::default();
            certificate("p", &page, &mut report);
            assert!(report.findings().iter().all(|finding| finding.fix.contains(key)), "{name}");
        }
    }
}
