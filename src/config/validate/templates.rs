//! Templates of pools for cluster objects: separated from named pools, and checked for settings that
//! can't apply to many pools.

use super::kubernetes::SelectedObjects;
use crate::Overrides;
use crate::schema;
use crate::settings::{KubernetesSource, PoolSearch, PoolSettings, PoolTemplate};
use attache_config_schema::decode::Sink;
use attache_config_schema::diagnostic::{Code, Diagnostic, Span};

/// A named pool, or the template of a search.
pub(super) type Entry = (PoolSettings, Option<PoolSearch>);

/// Whether an entry of the file searches for pools.
pub(super) fn searches(pool: &schema::Pool) -> bool {
    pool.kubernetes.as_ref().is_some_and(|at| at.value.pool_selector.is_some())
}

/// The named pools, and the templates with the bytes that may be queued for all pools of a search.
pub(super) fn apart(
    entries: impl IntoIterator<Item = Entry>,
    queued_bytes: u64,
) -> (Vec<PoolSettings>, Vec<PoolTemplate>) {
    let (mut pools, mut templates) = (Vec::new(), Vec::new());
    for (pool, search) in entries {
        match search {
            Some(search) => templates.push(PoolTemplate { search, pool, queued_bytes }),
            None => pools.push(pool),
        }
    }
    (pools, templates)
}

/// Pods of a pool, or a search for pools.
pub(super) fn pods_or_pools(named: Option<SelectedObjects>) -> (Option<KubernetesSource>, Option<PoolSearch>) {
    match named {
        Some(SelectedObjects::Pods(source)) => (Some(source), None),
        Some(SelectedObjects::Pools(search)) => (None, Some(search)),
        None => (None, None),
    }
}

/// Settings that can't apply to all pools of a search.
pub(super) fn check_template(pool: &schema::Pool, path: &str, flags: &Overrides, sink: &mut Sink) {
    if let Some(at) = &pool.matches {
        let message = "`match` would hold for every InferencePool that `poolSelector` finds";
        let diagnostic = Diagnostic::new(Code::Contradiction, format!("{path}.match"), message).at(at.span);
        sink.push(
            diagnostic.help(
                "each is known by the Service of its `endpointPickerRef`, or by `match` in its own configuration",
            ),
        );
    }
    let endpoints = pool.endpoints.first().map(|at| ("endpoints", at.span));
    let dns = pool.dns.first().map(|at| ("dns", at.span));
    let file = pool.endpoints_file.as_ref().map(|at| ("endpointsFile", at.span));
    for (key, span) in [endpoints, dns, file].into_iter().flatten() {
        no_endpoints_of_searched(&format!("{path}.{key}"), span, sink);
    }
    if !flags.endpoints.is_empty() {
        no_endpoints_of_searched("--endpoint", Span::default(), sink);
    }
    let events = pool.prefix_cache.as_ref().and_then(|at| at.value.kv_events.as_ref());
    if let Some(at) = events.and_then(|at| at.value.bind.as_ref()) {
        let message = "several pools can't listen at one socket";
        let diagnostic = Diagnostic::new(Code::Contradiction, format!("{path}.prefixCache.kvEvents.bind"), message);
        sink.push(diagnostic.at(at.span).help("have events read from each endpoint: `port` in place of `bind`"));
    }
}

/// Reports endpoints that are listed although pods come from InferencePools.
pub(super) fn no_endpoints_of_searched(path: &str, span: Span, sink: &mut Sink) {
    let message = "pools that `poolSelector` finds have the pods of their InferencePools, and no other endpoints";
    sink.push(Diagnostic::new(Code::Contradiction, path, message).at(span).help("name these in a pool of their own"));
}
