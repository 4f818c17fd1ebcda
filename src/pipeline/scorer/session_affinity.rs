//! `session-affinity-scorer`: 1 for the server that the request's session belongs to, 0 for the others and for requests of no session.
//!
//! How sessions are known is in [`facts::session`](attache_scheduling::facts::session). A session whose server is away moves at once: what it
//! had cached there is of no use meanwhile. When not: a session must stay where it is; `session-affinity-filter` lets nothing outweigh it.
//! Source: llm-d `session-affinity-scorer`.

use attache_pool::Endpoint;
use attache_scheduling::facts::session::{Session, SessionParams};
use attache_scheduling::plugin::{AnswerHeaders, Plugin, Scorer, params};
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
    build: |value| {
        params::<SessionParams>(value)?.build().map(|session| Plugin::Scorer(Arc::new(SessionAffinity { session })))
    },
};

#[derive(Debug)]
struct SessionAffinity {
    session: Session,
}

impl Scorer for SessionAffinity {
    fn score(&self, cx: &PickContext<'_>, candidates: &[Candidate<'_>], out: &mut [f32]) {
        let bound = self.session.bound(cx);
        for (score, candidate) in out.iter_mut().zip(candidates) {
            *score = f32::from(u8::from(bound.as_ref().is_some_and(|b| b.is(candidate))));
        }
    }

    fn picked(&self, cx: &PickContext<'_>, endpoint: &Endpoint) {
        self.session.picked(cx, endpoint);
    }

    fn answer_headers(&self, endpoint: &Endpoint, headers: &mut AnswerHeaders) {
        self.session.answer_headers(endpoint, headers);
    }
}
