//! Checks of Envoy: what its admin port or its bootstrap file says.
//!
//! `source.rs` reads it, `config.rs` finds listeners, routes and clusters in it, and `traffic.rs` those that meet the
//! picker. Each other file checks one subject.

mod certificates;
mod config;
mod field;
mod filter;
mod headers;
mod inside;
mod listener;
mod model_cluster;
mod names;
mod picker_cluster;
mod picker_tls;
mod probe;
mod process;
mod routes;
mod source;
mod statistics;
mod traffic;

use crate::Targets;
use crate::finding::{Check, Finding, Report};
use crate::http::Http;
use futures_util::future::join_all;
use names::Names;
use source::EnvoySource;
use traffic::Traffic;

/// The checks of each file.
pub(crate) const CHECKS: &[&[&Check]] = &[
    source::CHECKS,
    process::CHECKS,
    certificates::CHECKS,
    filter::CHECKS,
    headers::CHECKS,
    inside::CHECKS,
    listener::CHECKS,
    routes::CHECKS,
    model_cluster::CHECKS,
    picker_cluster::CHECKS,
    picker_tls::CHECKS,
    statistics::CHECKS,
];

/// Checks every Envoy at the same time.
pub(crate) async fn check(targets: &Targets, http: &Http) -> Report {
    let mut report = Report::default();
    let admins = targets.envoy_admins.iter().map(|admin| source::from_admin(http, admin, targets.is_envoy_named));
    let files = targets.envoy_files.iter().map(|file| source::from_file(file));
    let (admins, files) = tokio::join!(join_all(admins), join_all(files));
    for read in admins.into_iter().chain(files) {
        add(read, targets, &mut report).await;
    }
    report
}

async fn add(read: Result<(EnvoySource, Finding), Finding>, targets: &Targets, report: &mut Report) {
    let names = Names::new(targets.settings.as_ref());
    match read {
        Ok((source, reachable)) => {
            report.mark_reached();
            report.push(reachable);
            check_source(&source, &names, report).await;
        }
        Err(unreachable) => report.push(unreachable),
    }
}

async fn check_source(source: &EnvoySource, names: &Names<'_>, report: &mut Report) {
    process::check(source, report);
    certificates::check(source, report);
    let traffic = Traffic::of(source);
    filter::check(&traffic, names, report);
    headers::check(&traffic, names, report);
    inside::check(&traffic, report);
    listener::check(&traffic, report);
    routes::check(&traffic, names, report);
    model_cluster::check(&traffic, report);
    picker_cluster::check(&traffic, report).await;
    statistics::check(&traffic, report);
}

#[cfg(test)]
mod tests {
    use super::config::EnvoyConfig;
    use super::*;
    use crate::finding::Severity;
    use serde_json::{Value, json};
    use std::collections::BTreeSet;

    /// What a real istiod sends to an Envoy, as a config dump.
    fn istio() -> EnvoySource {
        let sent: Value = serde_json::from_str(include_str!("../../tests/data/istio/1.30.3.json")).unwrap();
        let clusters: Vec<Value> =
            sent["clusters"].as_array().unwrap().iter().map(|cluster| json!({"cluster": cluster})).collect();
        let admin = json!({"admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 15000}}}});
        let dump = json!({"configs": [
            {"@type": "x.BootstrapConfigDump", "bootstrap": admin},
            {"@type": "x.ListenersConfigDump",
             "dynamic_listeners": [{"name": "a", "active_state": {"listener": sent["listener"]}}]},
            {"@type": "x.ClustersConfigDump", "dynamic_active_clusters": clusters},
            {"@type": "x.RoutesConfigDump", "dynamic_route_configs": [
                {"route_config": sent["route_config"]},
                {"route_config": {"name": "b"}, "error_state": {"details": "no such field"}},
            ]},
        ]});
        EnvoySource { name: "Envoy".to_owned(), config: EnvoyConfig::from_dump(&dump), live: None }
    }

    #[tokio::test]
    async fn istio_filter_is_checked_as_its_routes_have_it() {
        let mut report = Report::default();
        let source = istio();
        check_source(&source, &Names::new(None), &mut report).await;
        let found = |severity: Severity| -> BTreeSet<&str> {
            let findings = report.findings().iter().filter(|finding| finding.severity == severity);
            findings.map(|finding| finding.check.id).collect()
        };
        // The filter itself skips headers and bodies, and its routes change that.
        let good = found(Severity::Ok);
        for id in ["envoy-request-body", "envoy-request-headers", "envoy-destination", "envoy-picker-service"] {
            assert!(good.contains(id), "{id}: {report:#?}");
        }
        assert_eq!(found(Severity::Error), BTreeSet::new(), "{report:#?}");
        let warnings = [
            "envoy-attributes",
            "envoy-failure-mode",
            "envoy-keep-alive",
            "envoy-paths",
            "envoy-picker-frames",
            "envoy-picker-identity",
            "envoy-retry-buffer",
        ];
        assert_eq!(found(Severity::Warning), BTreeSet::from(warnings), "{report:#?}");
        assert_eq!(source.config.rejected, [("route configuration b".to_owned(), "no such field".to_owned())]);
    }
}
