//! The listener and its HTTP connection manager: buffers, uploads, upgrades, paths.

use super::config::Route;
use super::field::{duration, flag, list, number, text};
use super::routes::{BODY_BYTES, DEFAULT_BUFFER_BYTES, buffer_limit};
use super::traffic::{ModelListener, Traffic};
use crate::finding::{Check, Report};
use std::time::Duration;

pub(super) const CHECKS: &[&Check] = &[&BUFFER, &BODY, &UPLOAD, &UPGRADE, &PATHS];

static BUFFER: Check = Check {
    id: "envoy-listener-buffer",
    about: "the listener reads bodies in large chunks",
    why: "Each chunk is a message to the picker: with 32 KiB, long prompts have a third of the throughput.",
};

static BODY: Check = Check {
    id: "envoy-body-limit",
    about: "Envoy accepts bodies as large as the picker does",
    why: "Where Envoy holds bodies, it answers larger ones with 413 in plain text, without the picker.",
};

static UPLOAD: Check = Check {
    id: "envoy-request-timeout",
    about: "clients have time to upload a request",
    why: "Envoy answers with 408 while a client with a slow connection still sends a long prompt.",
};

static UPGRADE: Check = Check {
    id: "envoy-buffered-upgrade",
    about: "no websockets where bodies are buffered",
    why: "Envoy waits for the end of a body that an upgrade never has, so the client waits forever.",
};

static PATHS: Check = Check {
    id: "envoy-paths",
    about: "Envoy normalizes paths before the picker reads them",
    why: "With another spelling of a path, a client avoids limits: the picker takes the request for another API.",
};

/// A shorter time for an upload is a finding: the picker's limit, 60 s.
const UPLOAD_TIME: Duration = Duration::from_secs(60);

pub(super) fn check(traffic: &Traffic<'_>, out: &mut Report) {
    for listener in &traffic.managers {
        check_buffers(listener, out);
        check_manager(listener, out);
        check_paths(listener, out);
    }
}

fn check_buffers(listener: &ModelListener<'_>, out: &mut Report) {
    let subject = &listener.subject;
    let bytes = number(listener.manager.listener, "per_connection_buffer_limit_bytes").unwrap_or(DEFAULT_BUFFER_BYTES);
    out.push(if bytes >= DEFAULT_BUFFER_BYTES {
        BUFFER.ok(subject, format!("per_connection_buffer_limit_bytes is {bytes}"))
    } else {
        let found = format!("per_connection_buffer_limit_bytes is {bytes}");
        BUFFER.warning(subject, found, "set `per_connection_buffer_limit_bytes: 1048576` of the listener")
    });
    let is_held = |mode: &str| matches!(mode, "BUFFERED" | "BUFFERED_PARTIAL");
    let held = listener.filters.iter().filter(|filter| is_held(filter.body_mode("request_body_mode")));
    let limits = held.flat_map(|filter| filter.routes.iter()).map(|route: &Route<'_>| buffer_limit(listener, route));
    if let Some(bytes) = limits.min() {
        out.push(if bytes >= BODY_BYTES {
            BODY.ok(subject, format!("Envoy holds bodies of {bytes} bytes"))
        } else {
            let found = format!("Envoy holds bodies of {bytes} bytes; the picker accepts {BODY_BYTES}");
            BODY.error(subject, found, "set `request_body_buffer_limit: 20971520` of the virtual host")
        });
    }
}

fn check_manager(listener: &ModelListener<'_>, out: &mut Report) {
    let (subject, manager) = (&listener.subject, listener.manager.message);
    let upload = duration(manager, "request_timeout").filter(|timeout| !timeout.is_zero() && *timeout < UPLOAD_TIME);
    out.push(match upload {
        Some(timeout) => {
            UPLOAD.warning(subject, format!("request_timeout is {timeout:?}"), "set `request_timeout: 0s`")
        }
        None => UPLOAD.ok(subject, "clients have time to upload"),
    });
    let is_upgraded = list(manager, "upgrade_configs").iter().any(|upgrade| !text(upgrade, "upgrade_type").is_empty());
    let is_held = listener.filters.iter().any(|filter| filter.body_mode("request_body_mode") == "BUFFERED");
    if is_upgraded && is_held {
        let found = "upgrades are allowed, and request bodies are BUFFERED";
        let fix = "remove `upgrade_configs`, or set `request_body_mode: FULL_DUPLEX_STREAMED`";
        out.push(UPGRADE.warning(subject, found, fix));
    }
}

fn check_paths(listener: &ModelListener<'_>, out: &mut Report) {
    let manager = listener.manager.message;
    let slashes = text(manager, "path_with_escaped_slashes_action");
    let mut missing = Vec::new();
    if !flag(manager, "normalize_path") {
        missing.push("normalize_path: true");
    }
    if !flag(manager, "merge_slashes") {
        missing.push("merge_slashes: true");
    }
    if !matches!(slashes, "REJECT_REQUEST" | "UNESCAPE_AND_REDIRECT" | "UNESCAPE_AND_FORWARD") {
        missing.push("path_with_escaped_slashes_action: REJECT_REQUEST");
    }
    out.push(if missing.is_empty() {
        PATHS.ok(&listener.subject, "paths are normalized")
    } else {
        let keys: Vec<String> = missing.iter().map(|key| format!("`{key}`")).collect();
        let found = format!("paths are passed as clients write them; not set: {}", keys.join(", "));
        PATHS.warning(&listener.subject, found, format!("set {} of the HTTP connection manager", keys.join(", ")))
    });
}
