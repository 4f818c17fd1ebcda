//! Passes on what the picker itself warns of, under the check that the warning belongs to.

use super::pages::{EndpointsPage, WarningPage};
use super::status::DEGRADED;
use crate::finding::{Check, Report, Severity};
use attache_request::event::Degraded;

static HANDSHAKES: Check = Check {
    id: "picker-tls-handshakes",
    about: "TLS handshakes on the ext-proc port fail",
    why: "Envoy does not reach the picker, so requests fail or are not routed.",
};
static QUEUE: Check = Check {
    id: "picker-queue",
    about: "requests wait, or are rejected, because a pool is full",
    why: "The pool is too small for its load, or its queue for the bursts.",
};
static TENANTS: Check = Check {
    id: "picker-tenants",
    about: "one tenant sends most requests while a pool is full",
    why: "Requests of the other tenants wait or are rejected, too.",
};
static ROLE_SIZES: Check = Check {
    id: "pool-role-sizes",
    about: "requests wait on prefill servers and on decode servers alike",
    why: "The servers of one role decide how fast all requests are, and the others idle.",
};
static CACHE_HITS: Check = Check {
    id: "pool-cache-hits",
    about: "the cached part of prompts is as before, and as the prefix index expects",
    why: "Servers compute prompts again that a cache has, or had.",
};
static KV_EVENTS: Check = Check {
    id: "pool-kv-events",
    about: "KV events come from each server that computes prompts",
    why: "The prefix index misses new blocks, so requests go to servers without their prefix.",
};
static OTHERS: Check = Check {
    id: "picker-warnings",
    about: "other warnings of the picker",
    why: "The picker shows it as a condition that an operator should change.",
};

pub(super) const CHECKS: &[&Check] = &[&HANDSHAKES, &QUEUE, &TENANTS, &ROLE_SIZES, &CACHE_HITS, &KV_EVENTS, &OTHERS];

/// The degraded mode with this label, if the picker warns of it.
pub(super) fn gateway_mode(label: &str) -> Option<Degraded> {
    Degraded::OF_GATEWAY.into_iter().find(|mode| mode.label() == label)
}

/// Warnings that other checks find in more detail.
const COVERED: [&str; 3] = ["no_endpoints", "no_endpoint_reached", "slow_endpoints"];

/// The check and the severity of a warning.
fn of(code: &str) -> (&'static Check, Severity) {
    match gateway_mode(code) {
        Some(Degraded::NoBody) => return (&DEGRADED, Severity::Error),
        Some(_) => return (&DEGRADED, Severity::Warning),
        None => {}
    }
    match code {
        "tls_handshakes_fail" => (&HANDSHAKES, Severity::Error),
        "rejects_for_load" | "queue_not_empty" | "servers_behind" => (&QUEUE, Severity::Warning),
        "tenant_flood" => (&TENANTS, Severity::Warning),
        "prefill_servers_behind" | "decode_servers_behind" => (&ROLE_SIZES, Severity::Warning),
        "cold_caches" | "cache_hits_fell" | "unexpected_cache_hits" => (&CACHE_HITS, Severity::Warning),
        "kv_events_silent" => (&KV_EVENTS, Severity::Error),
        _ => (&OTHERS, Severity::Warning),
    }
}

pub(super) fn judge(subject: &str, page: &EndpointsPage, report: &mut Report) {
    let shown: Vec<&WarningPage> = page.warnings.iter().filter(|w| !COVERED.contains(&w.code.as_str())).collect();
    if shown.is_empty() {
        report.push(OTHERS.ok(subject, "the picker warns of nothing else"));
    }
    for WarningPage { code, pool, message, help } in shown {
        let subject = pool.as_ref().map_or_else(|| subject.to_owned(), |pool| format!("pool {pool}"));
        let (check, severity) = of(code);
        report.push(match severity {
            Severity::Error => check.error(subject, message, help),
            _ => check.warning(subject, message, help),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn warning_is_a_finding_of_its_check_with_its_help() {
        let warning = |code: &str, pool: Option<&str>| WarningPage {
            code: code.into(),
            pool: pool.map(str::to_owned),
            message: "it waits".into(),
            help: "add servers".into(),
        };
        let warnings = vec![
            warning("no_body", None),
            warning("queue_not_empty", Some("chat")),
            warning("of another version", Some("chat")),
            warning("slow_endpoints", Some("chat")),
        ];
        let mut report = Report::default();
        judge("picker", &EndpointsPage { warnings, ..EndpointsPage::default() }, &mut report);
        let found: Vec<_> =
            report.findings().iter().map(|f| (f.check.id, f.subject.as_str(), f.severity, f.fix.as_str())).collect();
        let expected = [
            ("picker-degraded", "picker", Severity::Error, "add servers"),
            ("picker-queue", "pool chat", Severity::Warning, "add servers"),
            ("picker-warnings", "pool chat", Severity::Warning, "add servers"),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn picker_without_warnings_is_fine() {
        let mut report = Report::default();
        judge("picker", &EndpointsPage::default(), &mut report);
        assert_eq!(report.count(Severity::Ok), 1);
    }
}
