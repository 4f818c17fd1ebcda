//! The agent of a request, as far as the request names it.

use serde::{Serialize, Serializer};
use std::sync::Arc;

/// The agent that sent a request. A client chooses these ids, so they may change the cost and the order of its requests,
/// but never what it may do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct AgentIdentity {
    /// The tenant of the request. Ids of different tenants have nothing to do with each other.
    #[serde(skip)]
    pub tenant: Option<Arc<str>>,
    /// The task: a main agent with its sub-agents, and the pauses while tools run.
    pub program: Arc<str>,
    /// The growing context to which the request belongs. That of the main agent has the id of its program.
    pub chain: Arc<str>,
    /// The chain of the agent that started this one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent: Option<Arc<str>>,
    /// What the request is for.
    pub kind: AgentKind,
    /// Where the program's id is from.
    pub source: IdentitySource,
    /// Name of the header or of the body's field that has the program's id.
    pub field: &'static str,
}

attache_types::labels! {
    /// What an agent's request is for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum AgentKind {
        /// A turn of the main agent.
        Main => "main",
        /// A turn of an agent that another agent started.
        SubAgent => "sub_agent",
        /// It summarizes the context, which then begins anew.
        Compaction => "compaction",
        /// A call beside the task: a title, a summary of memories, a prewarm.
        Auxiliary => "auxiliary",
    }
}

attache_types::labels! {
    /// Where the id of a program is from.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum IdentitySource {
        /// A request header.
        Header => "header",
        /// A field of the request body.
        Body => "body",
        /// An earlier request, whose response this one continues or has in its prompt.
        Inferred => "inferred",
    }
}

impl Serialize for AgentKind {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.label())
    }
}

impl Serialize for IdentitySource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.label())
    }
}
