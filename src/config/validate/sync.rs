//! The checks of `sync`.

use super::is_of_flag;
use crate::schema;
use crate::settings::{NatsSettings, SyncSettings};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic, Span};
use std::path::PathBuf;

/// The shared state; `None` if it is off. A flag that names the picker alone does not turn it on: manifests always have
/// it.
pub(super) fn settings(file: schema::Opt<schema::Sync>, sink: &mut Sink) -> Option<SyncSettings> {
    let At { value: file, span } = file.filter(|at| !is_of_flag(at) || at.value.nats.is_some())?;
    let wait_for_snapshot = file.wait_for_snapshot();
    let nats = file.nats.map(|at| at.value).unwrap_or_default();
    let name = file.name;
    if let Some(at) = name.as_ref().filter(|at| at.value.is_empty() || at.value.len() > 253) {
        sink.out_of_range(at.span, "sync.name", format!("{} bytes", at.value.len()), "1 to 253 bytes");
    }
    Some(SyncSettings {
        name: name.map(|at| at.value),
        key_file: path(file.key_file),
        wait_for_snapshot,
        nats: self::nats(nats, span, sink),
    })
}

fn path(at: schema::Opt<String>) -> Option<PathBuf> {
    at.map(|at| at.value.into())
}

fn nats(file: schema::Nats, span: Span, sink: &mut Sink) -> NatsSettings {
    let servers = file.servers.as_ref().map(|at| at.value.clone()).unwrap_or_default();
    if servers.is_empty() {
        let message = "`sync` needs a NATS server";
        let help = "as in `nats: {servers: [\"nats://nats:4222\"]}`, or `--sync-nats-url`";
        sink.push(Diagnostic::new(Code::MissingKey, "sync.nats.servers", message).at(span).help(help));
    }
    for (i, at) in servers.iter().enumerate() {
        check_server(at, &format!("sync.nats.servers[{i}]"), sink);
    }
    let prefix_at = file.subject_prefix.as_ref().map_or(span, |at| at.span);
    let prefix = file.subject_prefix();
    let part = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
    if prefix.len() > 100 || !prefix.split('.').all(part) {
        let allowed = "letters, digits, `-` and `_`, in parts separated by dots; at most 100 bytes";
        sink.out_of_range(prefix_at, "sync.nats.subjectPrefix", format!("`{prefix}`"), allowed);
    }
    let tls = file.tls.map(|at| at.value).unwrap_or_default();
    let client_certificate = match (tls.cert_file, tls.key_file) {
        (Some(cert), Some(key)) => Some((cert.value.into(), key.value.into())),
        (None, None) => None,
        (Some(At { span, .. }), None) | (None, Some(At { span, .. })) => {
            let message = "`certFile` and `keyFile` belong together: one of them is missing";
            sink.push(Diagnostic::new(Code::MissingKey, "sync.nats.tls", message).at(span));
            None
        }
    };
    NatsSettings {
        servers: servers.into_iter().map(|at| at.value).collect(),
        subject_prefix: prefix,
        credentials: path(file.credentials),
        ca_file: path(tls.ca_file),
        client_certificate,
    }
}

fn check_server(at: &At<String>, path: &str, sink: &mut Sink) {
    let rest = ["nats://", "tls://"].into_iter().find_map(|scheme| at.value.strip_prefix(scheme));
    let host = rest.map(|rest| rest.rsplit('@').next().unwrap_or(rest));
    if host.is_none_or(|host| host.is_empty() || host.contains(['/', '?', '#', ' '])) {
        // A URL may contain a password.
        let shown = at.value.rsplit('@').next().unwrap_or_default();
        sink.out_of_range(at.span, path, format!("`{shown}`"), "`nats://host:port` or `tls://host:port`");
    }
}
