//! `session-affinity-filter`: the server of the request's session, while it is a candidate; else all stay.
//!
//! [`facts::session`](attache_scheduling::facts::session) describes how sessions are identified. When not: sessions
//! are few and heavy, so pinning overloads a server; `session-affinity-scorer` can be outweighed. Source: llm-d
//! `session-affinity-filter`.

use super::keep_or_all;
use attache_pool::Endpoint;
use attache_scheduling::facts::session::{Session, SessionParams};
use attache_scheduling::plugin::{Filter, Plugin, ResponseHeaders, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use attache_types::rng::PickRng;
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "session-affinity-filter",
    aliases: &[],
    kind: "filter",
    summary: "Keeps the endpoint that the request's session belongs to, while it is available.",
    source: "llm-d `session-affinity-filter`",
    parameters: section::<SessionParams>,
    build: |value| {
        params::<SessionParams>(value)?
            .build()
            .map(|session| Plugin::Filter(Arc::new(SessionAffinityFilter { session })))
    },
};

#[derive(Debug)]
struct SessionAffinityFilter {
    session: Session,
}

impl Filter for SessionAffinityFilter {
    fn keep(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], _: &mut PickRng, keep: &mut [bool]) {
        if let Some(bound) = self.session.bound(cx) {
            keep_or_all(keep, |i| candidates.get(i).is_some_and(|c| bound.is(c)));
        }
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        self.session.picked(cx, endpoint);
    }

    fn end_session(&self, tenant: Option<&str>, id: &str) {
        self.session.end(tenant, id);
    }

    fn response_headers(&self, endpoint: &Endpoint, headers: &mut ResponseHeaders) {
        self.session.response_headers(endpoint, headers);
    }
}
