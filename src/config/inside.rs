//! What is different for a configuration that is used inside Envoy, by the library `envoy_module`.

use super::decode::Sink;
use super::diagnostic::{Code, Diagnostic, Span};
use super::document::{Node, Value};
use super::settings::{TenantRule, TenantSource};
use super::{ConfigText, Settings, embedded};

const NO_PORTS: &str =
    "the library opens no port but the admin port, whose address `admin` is in Envoy's configuration";
const NO_STREAMS: &str = "there are no ext-proc streams";
const NO_DRAIN: &str = "Envoy ends its own streams: drain it before it gets SIGTERM";

/// Keys that have no effect inside Envoy, with the reason. A section stands for all of its keys.
const WITHOUT_EFFECT: &[(&str, &str)] = &[
    ("server.bind", NO_PORTS),
    ("server.grpcPort", NO_PORTS),
    ("server.grpcHealthPort", NO_PORTS),
    ("server.metricsPort", NO_PORTS),
    ("server.healthChecking", NO_PORTS),
    ("server.leaderElection", "each Envoy decides its own requests, and Kubernetes can't take it out of service"),
    ("server.workers", "requests are decided on the worker threads of Envoy (`--concurrency`)"),
    ("server.tls", "the library has no connection with Envoy"),
    ("server.drain", NO_DRAIN),
    ("telemetry.logFormat", "log lines go to the log of Envoy, in its format"),
    ("exchange.explain.metadata", "Envoy has no function for a library to set such metadata"),
    ("limits.idleTimeout", NO_STREAMS),
    ("limits.maxStreams", NO_STREAMS),
    ("limits.maxStreamsPerConnection", NO_STREAMS),
];

/// Warnings of keys in `text` that have no effect inside Envoy, and errors of settings that can't be used there.
#[must_use]
pub fn check(settings: Option<&Settings>, text: Option<&ConfigText>) -> Vec<Diagnostic> {
    let root = text.and_then(|text| embedded::root(&text.bytes, &mut Sink::default()).ok());
    let given = |path: &str| root.as_ref().and_then(|root| place(root, path));
    let mut found: Vec<Diagnostic> = WITHOUT_EFFECT
        .iter()
        .filter_map(|(path, reason)| {
            let message = format!("`{path}` has no effect inside Envoy: {reason}");
            Some(Diagnostic::new(Code::NoEffect, *path, message).at(given(path)?))
        })
        .collect();
    if let Some(length) = settings.and_then(|settings| nested(settings.exchange.tenant.as_ref())) {
        let path = "exchange.tenant.path";
        let message = format!("`{path}` has {length} keys, allowed inside Envoy: 1");
        let help =
            "Envoy shows a library no value inside another one; let a filter in front set a header with the name";
        found.push(Diagnostic::new(Code::OutOfRange, path, message).at(given(path).unwrap_or_default()).help(help));
    }
    found
}

/// The number of keys that lead to a tenant's name, if that is inside another value.
fn nested(tenant: Option<&TenantRule>) -> Option<usize> {
    match &tenant?.source {
        TenantSource::Metadata { path, .. } => Some(path.len()).filter(|length| *length > 1),
        _ => None,
    }
}

/// The position of the key at `path`, if the file has it.
fn place(root: &Node, path: &str) -> Option<Span> {
    path.split('.')
        .try_fold((root, Span::default()), |(node, _), name| {
            let Value::Map(entries) = &node.value else { return None };
            let (key, value) = entries.iter().find(|(key, _)| key.value == name)?;
            Some((value, key.span))
        })
        .map(|(_, span)| span)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Sources, keys, load, registry};

    fn checked(text: &str) -> Vec<Diagnostic> {
        let text = ConfigText { name: "attache.yaml".to_owned(), bytes: text.as_bytes().to_vec() };
        let sources = Sources { registry: registry(), text: Some(text.clone()), ..Sources::default() };
        let (settings, _) = load(&sources).unwrap();
        check(Some(&settings), Some(&text))
    }

    #[test]
    fn keys_without_effect_exist() {
        let rows = keys::rows();
        for (path, _) in WITHOUT_EFFECT {
            assert!(rows.iter().any(|row| row.path == *path), "{path}");
        }
    }

    #[test]
    fn keys_without_effect_are_named_where_they_are() {
        const POOLS: &str = "pools: [{name: a, endpoints: ['127.0.0.1:1']}]\n";
        let head = format!("apiVersion: attache.dev/v1\nkind: Attache\n{POOLS}");
        assert_eq!(checked(&head), []);
        let found = checked(&format!("{head}server:\n  seed: 1\n  grpcPort: 9\n  tls: {{mode: off}}\n"));
        let found: Vec<_> = found.iter().map(|d| (&*d.path, d.span.unwrap().line, d.is_error())).collect();
        assert_eq!(found, [("server.grpcPort", 6, false), ("server.tls", 7, false)]);
    }

    #[test]
    fn tenants_inside_other_values_are_refused() {
        let tenant = |path: &str| {
            checked(&format!(
                "apiVersion: attache.dev/v1\nkind: Attache\npools: [{{name: a, endpoints: ['127.0.0.1:1']}}]\n\
                 exchange: {{tenant: {{metadata: envoy.filters.http.jwt_authn, path: {path}}}}}\n"
            ))
        };
        assert_eq!(tenant("[sub]"), []);
        let found = tenant("[payload, sub]");
        assert!(found.len() == 1 && found[0].is_error() && found[0].span.is_some(), "{found:?}");
        assert!(found[0].message.contains("2 keys"), "{found:?}");
    }
}
