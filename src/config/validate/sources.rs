//! The checks of endpoint sources outside the file and the cluster: an endpoints file and DNS names.

use super::kubernetes;
use super::pools::metrics;
use crate::Overrides;
use crate::schema;
use crate::settings::{DnsSource, FileSource};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{At, Code, Diagnostic};

/// The endpoints file. Missing keys come from flags and from the file given with `--config-file`.
pub(super) fn endpoints_file(
    pool: &schema::Pool,
    path: &str,
    flags: &Overrides,
    sink: &mut Sink,
) -> Option<FileSource> {
    let file = &pool.endpoints_file.as_ref()?.value;
    let (engine, metrics) = match &pool.from_flags {
        Some(like) => (
            flags.kubernetes.engine.or(like.engine.map(|at| at.value)).unwrap_or_default(),
            kubernetes::metrics_of_flags(&flags.kubernetes, Some(like), sink),
        ),
        None => {
            let path = format!("{path}.endpointsFile");
            (file.engine(), metrics(file.metrics.as_ref().map(|at| &at.value), &path, sink))
        }
    };
    Some(FileSource { path: file.path.value.as_str().into(), watch: file.watch(), engine, metrics })
}

/// The DNS name whose addresses are endpoints.
pub(super) fn dns(at: &At<schema::Dns>, path: &str, sink: &mut Sink) -> Option<DnsSource> {
    let d = &at.value;
    let host = d.host.value.trim();
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if host.is_empty() || host.len() > 253 || !host.chars().all(allowed) {
        let shown: String = host.chars().take(60).collect();
        let message = format!("`{shown}` is not a host name");
        sink.push(
            Diagnostic::new(Code::BadAddress, format!("{path}.host"), message)
                .at(d.host.span)
                .help("as in `vllm.default.svc`; the port has its own key"),
        );
        return None;
    }
    Some(DnsSource {
        host: host.to_owned(),
        port: d.port.value,
        refresh: d.refresh(),
        engine: d.engine(),
        metrics: metrics(d.metrics.as_ref().map(|at| &at.value), path, sink),
    })
}
