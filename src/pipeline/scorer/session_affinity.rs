//! `session-affinity-scorer`: 1 for the server of the request's session, 0 for the others and for requests without a
//! session.
//!
//! [`facts::session`](attache_scheduling::facts::session) describes how sessions are identified. A session whose
//! server is unavailable moves at once. When not: a session must stay on its server; with `session-affinity-filter`
//! nothing outweighs it. Source: llm-d `session-affinity-scorer`.

use attache_pool::Endpoint;
use attache_scheduling::facts::session::{Session, SessionParams};
use attache_scheduling::plugin::{Plugin, ResponseHeaders, Scorer, params, section};
use attache_scheduling::registry::PluginDescriptor;
use attache_scheduling::{Candidate, PickContext};
use std::sync::Arc;

/// Registry entry.
pub const PLUGIN: PluginDescriptor = PluginDescriptor {
    name: "session-affinity-scorer",
    aliases: &[],
    kind: "scorer",
    summary: "Prefers the endpoint that the request's session belongs to.",
    source: "llm-d `session-affinity-scorer`",
    parameters: section::<SessionParams>,
    build: |value| {
        params::<SessionParams>(value)?
            .build()
            .map(|session| Plugin::Scorer(Arc::new(SessionAffinityScorer { session })))
    },
};

#[derive(Debug)]
struct SessionAffinityScorer {
    session: Session,
}

impl Scorer for SessionAffinityScorer {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let bound = self.session.bound(cx);
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = f32::from(u8::from(bound.as_ref().is_some_and(|b| b.is(candidate))));
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
