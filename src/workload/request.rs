//! What a workload is: a stream of requests in the order of time, and the requests that follow from responses.

use attache_sim::content::Piece;
use attache_types::clock::Timestamp;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Who says a part of a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// The operator: system prompt, tools, documents.
    System,
    /// The client.
    User,
    /// The model, in an earlier turn.
    Assistant,
}

/// A part of a prompt. Neighbours with one role are one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Who says it.
    pub role: Role,
    /// What it says.
    pub piece: Piece,
}

/// One request of a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its number, unique in the workload; all that is drawn for it follows from that. From 0, without gaps, in the order in which the
    /// workload gives them out.
    pub number: u64,
    /// When it comes, from the start of the workload.
    pub at: Timestamp,
    /// The prompt, at least one token.
    pub prompt: Vec<Part>,
    /// The answer: its name, by which later prompts may bring it back, and its length in tokens, at least 1.
    pub answer: Piece,
    /// The LoRA adapter that it asks for; the base model when `None`.
    pub adapter: Option<Arc<str>>,
    /// The conversation that it belongs to.
    pub session: Option<u64>,
    /// Whose it is.
    pub tenant: Option<Arc<str>>,
    /// Its band where there are queues: more is more important, negative may be shed.
    pub priority: i32,
}

impl Request {
    /// Tokens of the prompt.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt.iter().fold(0, |sum: u32, part| sum.saturating_add(part.piece.tokens))
    }
}

/// Headers that a client of a gateway sends with `request`: `x-session-id`, `user`, and the tenant under the name `tenant_header`.
#[must_use]
pub fn client_headers(request: &Request, tenant_header: Option<&str>) -> BTreeMap<String, String> {
    let mut headers = BTreeMap::new();
    if let Some(session) = request.session {
        headers.insert("x-session-id".to_owned(), session.to_string());
    }
    if let Some(tenant) = &request.tenant {
        headers.insert("user".to_owned(), tenant.to_string());
        headers.extend(tenant_header.map(|name| (name.to_owned(), tenant.to_string())));
    }
    headers
}

/// A row of a trace that can't be used, or a trace that can't be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The row with this number (from 1, as editors count lines) is wrong.
    #[error("row {row}: {message}")]
    Row {
        /// Its number.
        row: u64,
        /// The field, what it holds, and what is allowed.
        message: String,
    },
    /// The file can't be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// The whole is wrong: no rows, an unknown format.
    #[error("{0}")]
    Format(String),
}

/// Requests, in the order of time. Reading it to its end takes constant memory, but for what must be remembered of open conversations.
pub trait Workload: Send {
    /// The next request that comes by itself (open loop); `None` when there are no more. Never earlier than the one before it.
    ///
    /// # Errors
    /// What is wrong with the source.
    fn next(&mut self) -> Result<Option<Request>, TraceError>;

    /// The answer to the request `number` has ended at `now`. What follows from that and only from that (closed loop: the next turn
    /// after a pause, or the next conversation of a client), not before `now`.
    fn ended(&mut self, _number: u64, _now: Timestamp) -> Option<Request> {
        None
    }

    /// By which number the request `number`, whose end was not told yet, is compared with those of another run: equal for what is the same
    /// in both. Requests of open loops have the same numbers in every run; those of closed ones are numbered in the order of asking.
    fn pair(&self, number: u64) -> u64 {
        number
    }

    /// How many requests there will be, when that is known.
    fn total(&self) -> Option<u64> {
        None
    }
}
