//! The end of a session: what later decisions remember of it is forgotten. It changes the cost and the order of later
//! requests, and nothing that a request may do.
//!
//! | what | by which id |
//! |---|---|
//! | program of sub-agents and stored responses | program or chain |
//! | service in the queue, where flows are programs | program |
//! | server of a session affinity | the id in its header |
//!
//! The end of an unknown session changes nothing, so a call may be repeated. A turn after the end begins a new program.

use super::Picker;
use super::identity::{KnownSession, MAX_ID_BYTES, valid};
use crate::event::{Event, SessionEnd};
use attache_record::{Line, headers};
use attache_request::agent::AgentIdentity;
use attache_types::clock::Timestamp;
use attache_types::error::{Reason, RequestError};
use serde::Serialize;

/// A session that was ended by a call.
#[derive(Clone, Debug, Serialize)]
pub struct EndedSession {
    /// The id of the call.
    pub session_id: String,
    /// Whether anything was known of the session.
    pub known: bool,
    /// What was known.
    #[serde(flatten)]
    pub was: KnownSession,
}

impl Picker {
    /// Ends the session of this id: a program of `tenant`, or else a chain. Pickers with which this one shares its state
    /// end it too.
    ///
    /// # Errors
    /// The id is missing or invalid.
    pub fn end_session(
        &self,
        tenant: Option<&str>,
        id: Option<&str>,
        by: SessionEnd,
        now: Timestamp,
    ) -> Result<EndedSession, RequestError> {
        let id = session_id(id)?;
        self.announce(tenant, id, now);
        let was = self.end_known(tenant, id, by);
        Ok(EndedSession { session_id: id.to_owned(), known: was.is_some(), was: was.unwrap_or_default() })
    }

    fn end_known(&self, tenant: Option<&str>, id: &str, by: SessionEnd) -> Option<KnownSession> {
        let program = self.programs.end_program(tenant, id);
        let chain = self.programs.end_chain(tenant, id);
        let is_chain = program.is_none() && chain.is_some();
        self.forget_session(tenant, id, !is_chain, by);
        program.or(chain)
    }

    /// Announces the end of a session to the other pickers, by its hash, because ids may be credentials.
    fn announce(&self, tenant: Option<&str>, id: &str, now: Timestamp) {
        if let Some(replica) = &self.replica {
            replica.session_ended(self.programs.session(tenant, id), now);
        }
    }

    /// Ends a session that a peer has ended, if it is known here.
    pub fn end_session_of_peer(&self, session: u64) {
        if let Some((tenant, id)) = self.programs.named(session) {
            self.end_known(tenant.as_deref(), &id, SessionEnd::Peer);
        }
    }

    /// Ends the session of an agent whose last request has ended: the program after a request of its main agent, else
    /// the chain.
    pub(super) fn end_agent(&self, agent: &AgentIdentity, now: Timestamp) {
        self.announce(agent.tenant.as_deref(), &agent.chain, now);
        let (tenant, is_program) = (agent.tenant.as_deref(), agent.chain == agent.program);
        if is_program {
            self.programs.end_program(tenant, &agent.program);
        } else {
            self.programs.end_chain(tenant, &agent.chain);
        }
        self.forget_session(tenant, &agent.chain, is_program, SessionEnd::Header);
    }

    /// Forgets what queues and strategies know of a session.
    fn forget_session(&self, tenant: Option<&str>, id: &str, is_program: bool, by: SessionEnd) {
        let config = self.config();
        // Of one lock with its line, as all changes of strategies.
        let mut turn = self.turn();
        if let Some(turn) = &mut turn {
            turn.write(&Line::SessionEnd { session: id.to_owned(), tenant: tenant.map(headers::hash) });
        }
        config.pools().iter().for_each(|runtime| runtime.pool.scheduler.choices.end_session(tenant, id));
        drop(turn);
        if is_program && config.settings.has_program_flows() {
            config.pools().iter().filter_map(|runtime| runtime.queue.as_ref()).for_each(|q| q.end_program(id));
        }
        self.observer.event(Event::SessionEnd(by));
    }
}

/// The id of a session, as a call names it.
fn session_id(id: Option<&str>) -> Result<&str, RequestError> {
    id.and_then(valid).ok_or_else(|| {
        let got = id.map_or_else(|| "is missing".to_owned(), |id| format!("has {} bytes", id.len()));
        let message = format!(
            "the query key `session_id` {got}; allowed are 1 to {MAX_ID_BYTES} bytes without control characters, not \
             only blanks"
        );
        RequestError::new(Reason::InvalidSessionId, message)
    })
}

#[cfg(test)]
mod tests;
