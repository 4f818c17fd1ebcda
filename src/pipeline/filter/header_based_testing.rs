//! `header-based-testing-filter`: the endpoints that the header `test-epp-endpoint-selection` names, for conformance
//! tests.
//!
//! The header is a comma-separated list of `ip:port`, or of `ip` for every port there. Without the header no endpoint
//! stays. When not: in production, since clients would choose servers. Source: GIE `header-based-testing-filter`.

use attache_scheduling::plugin::{Filter, NoParams, Plugin, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext, Subset};
use attache_types::rng::PickRng;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "header-based-testing-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps the endpoints that the header `test-epp-endpoint-selection` names; for tests only.",
    source: "GIE `header-based-testing-filter`",
    parameters: section::<NoParams>,
    build: |value| params::<NoParams>(value).map(|NoParams {}| Plugin::Filter(Arc::new(HeaderBasedTesting))),
};

/// The header that names endpoints.
pub const SELECTION_HEADER: &str = "test-epp-endpoint-selection";

#[derive(Debug)]
struct HeaderBasedTesting;

impl Filter for HeaderBasedTesting {
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        let mut named = Subset::default();
        for entry in cx.request.headers.get(SELECTION_HEADER).unwrap_or_default().split(',') {
            named.add(entry);
        }
        for (keep, candidate) in keep.iter_mut().zip(candidates) {
            *keep = named.allows(candidate.state.endpoint.spec.address);
        }
    }
}
