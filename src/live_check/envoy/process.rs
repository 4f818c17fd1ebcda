//! The process: its version, its admin port, updates that it refused.

use super::field::{at, has, list, text};
use super::source::EnvoySource;
use crate::finding::{Check, Report};

pub(super) const CHECKS: &[&Check] = &[&VERSION, &ADMIN, &REJECTED, &DYNAMIC];

static VERSION: Check = Check {
    id: "envoy-version",
    about: "Envoy's version has FULL_DUPLEX_STREAMED",
    why: "Older versions know no FULL_DUPLEX_STREAMED, so Envoy holds each request body and limits its size.",
};

static ADMIN: Check = Check {
    id: "envoy-admin-address",
    about: "Envoy has an admin port, and other machines can't reach it",
    why: "The admin port shows statistics and the configuration, and stops Envoy; it asks for no password.",
};

static REJECTED: Check = Check {
    id: "envoy-rejected-update",
    about: "Envoy accepted every update of its configuration",
    why: "After a refused update, Envoy keeps the configuration of before.",
};

static DYNAMIC: Check = Check {
    id: "envoy-dynamic-resources",
    about: "all listeners, routes and clusters are in view",
    why: "What a control plane sends is not in the file.",
};

/// The first version with the body mode FULL_DUPLEX_STREAMED.
const FIRST_WITH_DUPLEX: (u32, u32) = (1, 33);

pub(super) fn check(source: &EnvoySource, out: &mut Report) {
    if let Some(live) = &source.live {
        check_version(source, text(&live.info, "version"), out);
        for (what, error) in &source.config.rejected {
            let found = format!("Envoy refused an update of {what}: {error}");
            out.push(REJECTED.error(
                &source.name,
                found,
                "correct the resource, or its control plane; Envoy's log has the error too",
            ));
        }
        if source.config.rejected.is_empty() {
            out.push(REJECTED.ok(&source.name, "no update was refused"));
        }
    } else if is_dynamic(source) {
        let found = "listeners, routes or clusters come from a control plane or from other files";
        out.push(DYNAMIC.unknown(&source.name, found, "check the running Envoy with `--envoy-admin URL`"));
    }
    check_admin(source, out);
}

/// `version` is such as `9e5580933739/1.40.0/Clean/RELEASE/BoringSSL`.
fn check_version(source: &EnvoySource, version: &str, out: &mut Report) {
    let shown = version.split('/').nth(1).unwrap_or(version);
    let mut numbers = shown.split('.').map_while(|number| number.parse::<u32>().ok());
    out.push(match (numbers.next(), numbers.next()) {
        (Some(major), Some(minor)) if (major, minor) < FIRST_WITH_DUPLEX => VERSION.error(
            &source.name,
            format!("the version is {shown}"),
            "update Envoy to 1.33 or later; 1.40 is tested",
        ),
        (Some(_), Some(_)) => VERSION.ok(&source.name, format!("the version is {shown}")),
        _ => VERSION.unknown(&source.name, format!("the version {shown:?} is not a number"), "use a release of Envoy"),
    });
}

fn is_dynamic(source: &EnvoySource) -> bool {
    let resources = at(&source.config.bootstrap, "dynamic_resources");
    let is_remote = ["lds_config", "cds_config", "ads_config"].iter().any(|field| has(resources, field));
    is_remote || source.config.connection_managers().iter().any(|manager| manager.routes.is_none())
}

fn check_admin(source: &EnvoySource, out: &mut Report) {
    let address = at(&source.config.bootstrap, "admin.address.socket_address");
    let host = text(address, "address");
    let is_pipe = has(&source.config.bootstrap, "admin.address.pipe");
    out.push(match host {
        "" if is_pipe => ADMIN.ok(&source.name, "the admin port is a Unix socket"),
        "" if source.live.is_none() => ADMIN.warning(
            &source.name,
            "the file has no admin port",
            "add `admin: {address: {socket_address: {address: 127.0.0.1, port_value: 9901}}}`",
        ),
        "" => return,
        "127.0.0.1" | "::1" | "localhost" => ADMIN.ok(&source.name, format!("the admin port listens on {host}")),
        _ => ADMIN.warning(
            &source.name,
            format!("the admin port listens on {host}"),
            "set `admin.address.socket_address.address: 127.0.0.1`, and reach it with `kubectl port-forward`",
        ),
    });
}

/// Whether a finding about time since the start can be judged: the uptime, such as `3600s`.
pub(super) fn uptime(source: &EnvoySource) -> &str {
    source.live.as_ref().map_or("", |live| text(&live.info, "uptime_current_epoch"))
}

/// The addresses of the hosts of cluster `name`, with their health: null flags mean healthy.
pub(super) fn hosts<'a>(source: &'a EnvoySource, name: &str) -> &'a [serde_json::Value] {
    let live = source.live.as_ref().map_or(&serde_json::Value::Null, |live| &live.clusters);
    let cluster = list(live, "cluster_statuses").iter().find(|cluster| text(cluster, "name") == name);
    cluster.map_or(&[], |cluster| list(cluster, "host_statuses"))
}
