//! Checks of Envoy: what its admin port or its bootstrap file says.
//!
//! `source.rs` reads it, `config.rs` finds listeners, routes and clusters in it, and `traffic.rs` those that meet the
//! picker. Each other file checks one subject.

mod config;
mod field;
mod filter;
mod headers;
mod listener;
mod model_cluster;
mod names;
mod picker_cluster;
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
    filter::CHECKS,
    headers::CHECKS,
    listener::CHECKS,
    routes::CHECKS,
    model_cluster::CHECKS,
    picker_cluster::CHECKS,
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
            process::check(&source, report);
            let traffic = Traffic::of(&source);
            filter::check(&traffic, &names, report);
            headers::check(&traffic, &names, report);
            listener::check(&traffic, report);
            routes::check(&traffic, &names, report);
            model_cluster::check(&traffic, report);
            picker_cluster::check(&traffic, report).await;
            statistics::check(&traffic, report);
        }
        Err(unreachable) => report.push(unreachable),
    }
}
