//! The certificates that a running Envoy has loaded, for clients, for the picker and for model servers.

use super::field::{at, list, number, text};
use super::source::EnvoySource;
use crate::finding::{Check, Report};
use attache_types::certificate::NOTICE;
use serde_json::Value;
use std::collections::BTreeSet;

pub(super) const CHECKS: &[&Check] = &[&CERTIFICATES];

static CERTIFICATES: Check = Check {
    id: "envoy-certificates",
    about: "the certificates and authorities of Envoy are valid for some time",
    why: "After the end of one, connections fail: those of clients, or those to the picker and to model servers.",
};

/// Days of [`NOTICE`].
const NOTICE_DAYS: u64 = NOTICE.as_secs() / 86_400;

pub(super) fn check(source: &EnvoySource, out: &mut Report) {
    let Some(live) = &source.live else { return };
    let entries = list(&live.certificates, "certificates").iter();
    let kinds = [("ca_cert", "authority"), ("cert_chain", "certificate")];
    let all = entries.flat_map(|entry| kinds.map(|(field, kind)| (kind, list(entry, field))));
    // Each listener and cluster with the same file lists it again.
    let mut seen = BTreeSet::new();
    let mut shortest = None;
    for (kind, certificate) in all.flat_map(|(kind, list)| list.iter().map(move |certificate| (kind, certificate))) {
        let Some(days) = number(certificate, "days_until_expiration") else { continue };
        if !seen.insert((text(certificate, "serial_number"), text(certificate, "expiration_time"))) {
            continue;
        }
        shortest = Some(shortest.map_or(days, |least: u64| least.min(days)));
        let end = text(certificate, "expiration_time");
        let found = |state: &str| format!("the {kind} {} {state}: valid until {end}", name(certificate));
        let fix = "renew it where Envoy reads it: the Secret or the files of `transport_socket`; for the picker also see \
                   `--client-ca-file` of Attaché";
        match days {
            0 => out.push(CERTIFICATES.error(&source.name, found("has expired, or does so within a day"), fix)),
            days if days < NOTICE_DAYS => {
                out.push(CERTIFICATES.warning(&source.name, found(&format!("expires in {days} days")), fix));
            }
            _ => {}
        }
    }
    if let Some(days) = shortest.filter(|days| *days >= NOTICE_DAYS) {
        let found = format!("all of {} certificates are valid for {days} days or more", seen.len());
        out.push(CERTIFICATES.ok(&source.name, found));
    }
}

/// Its first name, else its serial number; and its file, if it comes from one.
fn name(certificate: &Value) -> String {
    let names = list(certificate, "subject_alt_names").iter();
    let mut names = names.filter_map(|name| name.as_object()?.values().next()?.as_str());
    let name = names.next().map_or_else(|| format!("number {}", text(certificate, "serial_number")), str::to_owned);
    match at(certificate, "path").as_str() {
        Some(path) if path.starts_with('/') => format!("{name} in {path}"),
        _ => name,
    }
}

#[cfg(test)]
mod tests {
    use super::super::config::EnvoyConfig;
    use super::super::source::Live;
    use super::*;
    use crate::finding::{Severity, severities};
    use serde_json::{Map, json};

    fn judged(certificates: Value) -> Vec<Severity> {
        let live = Live { info: Value::Null, clusters: Value::Null, statistics: Map::new(), certificates };
        let config = EnvoyConfig::from_bootstrap(&json!({}));
        let source = EnvoySource { name: "Envoy".into(), config, live: Some(live) };
        severities(|report| check(&source, report))
    }

    fn ending(serial: &str, days: u64) -> Value {
        json!({"path": "<inline>", "serial_number": serial, "days_until_expiration": days.to_string(),
               "expiration_time": "2026-11-28T15:14:11Z", "subject_alt_names": [{"dns": "envoy"}]})
    }

    #[test]
    fn each_certificate_that_ends_soon_is_reported_once() {
        let page = |chain: &[Value]| json!({"certificates": [{"ca_cert": [ending("9", 900)], "cert_chain": chain}]});
        assert_eq!(judged(page(&[ending("1", 0)])), [Severity::Error]);
        assert_eq!(judged(page(&[ending("1", 13), ending("1", 13)])), [Severity::Warning]);
        assert_eq!(judged(page(&[ending("1", 14)])), [Severity::Ok]);
        assert_eq!(judged(json!({})), []);
    }
}
