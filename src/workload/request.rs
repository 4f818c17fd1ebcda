//! What a workload is: a stream of requests in the order of time, and the requests that follow from responses.

use attache_sim::content::Piece;
use attache_types::clock::Timestamp;
use attache_types::program::ProgramTurn;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Author of a part of a prompt: the role of its chat message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Speaker {
    /// The operator: system prompt, tools, documents.
    System,
    /// The client, in a user message.
    User,
    /// The model, in an earlier turn.
    Assistant,
}

/// A part of a prompt. Neighbouring parts with one role form one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PromptPart {
    /// Author of the text, as chat role.
    pub role: Speaker,
    /// Name and length of the text, or of the image: the tokens that it takes in the prompt.
    pub piece: Piece,
    /// The part is an image.
    pub is_image: bool,
}

impl PromptPart {
    /// A text.
    #[must_use]
    pub fn text(role: Speaker, piece: Piece) -> Self {
        Self { role, piece, is_image: false }
    }

    /// An image in a user message, which takes `tokens` in the prompt. Equal names are equal images.
    #[must_use]
    pub fn image(name: u64, tokens: u32) -> Self {
        Self { role: Speaker::User, piece: Piece::new(name, tokens), is_image: true }
    }
}

/// One request of a workload.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its number, unique in the workload, which seeds all random draws for it. Numbers start at 0 and have no gaps, in
    /// the order in which the workload returns requests.
    pub number: u64,
    /// Arrival time, from the start of the workload.
    pub at: Timestamp,
    /// The prompt, at least one token.
    pub prompt: Vec<PromptPart>,
    /// The response: its name, by which later prompts can quote it, and its length in tokens, at least 1.
    pub answer: Piece,
    /// LoRA adapter of the request; the base model when `None`.
    pub adapter: Option<Arc<str>>,
    /// Conversation of the request. Clients send it as a session.
    pub session: Option<u64>,
    /// Tenant of the request; `None` when the workload has no tenants.
    pub tenant: Option<Arc<str>>,
    /// Priority band of flow control: larger values go first, negative ones may be shed.
    pub priority: i32,
    /// Further headers of the request, such as `x-slo-ttft-ms`: names in lower case, and values.
    pub headers: Headers,
    /// Place of the request in the program of an agent; `None` when the workload has no programs.
    pub turn: Option<ProgramTurn>,
}

/// Names of headers in lower case, and their values.
pub type Headers = Vec<(Arc<str>, Arc<str>)>;

impl Request {
    /// Length of the prompt, tokens.
    #[must_use]
    pub fn prompt_tokens(&self) -> u32 {
        self.prompt.iter().fold(0, |sum: u32, part| sum.saturating_add(part.piece.tokens))
    }

    /// The images of the prompt, each once.
    #[must_use]
    pub fn images(&self) -> Vec<Piece> {
        let mut images: Vec<Piece> = Vec::new();
        for part in self.prompt.iter().filter(|part| part.is_image) {
            if !images.iter().any(|image| image.name == part.piece.name) {
                images.push(part.piece);
            }
        }
        images
    }
}

/// Headers that a client of a gateway sends with `request`: `x-session-id`, `user`, the tenant under the name
/// `tenant_header`, and those of the request itself.
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
    headers.extend(request.headers.iter().map(|(name, value)| (name.to_string(), value.to_string())));
    headers
}

/// A row of a trace that can't be used, or a trace that can't be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// The row with this number (from 1, as editors count lines) is wrong.
    #[error("row {row}: {message}")]
    Row {
        /// Row number in the file, from 1.
        row: u64,
        /// The field, its value, and what is allowed.
        message: String,
    },
    /// The file can't be read.
    #[error(transparent)]
    Read(#[from] std::io::Error),
    /// The whole file is wrong: it has no rows, or an unknown format.
    #[error("{0}")]
    Format(String),
}

/// A stream of requests in order of arrival. Reading it takes constant memory, plus the state of open conversations.
pub trait Workload: Send {
    /// The next request of the open loop, never earlier than the one before it; `None` after the last one.
    ///
    /// # Errors
    /// What is wrong with the source.
    fn next(&mut self) -> Result<Option<Request>, TraceError>;

    /// The answer to the request `number` has ended at `now`. Returns the requests that follow from that, each not before
    /// `now`: in a closed loop the next turn after a pause, the first turns of sub-agents, or the next conversation of
    /// a client.
    fn ended(&mut self, _number: u64, _now: Timestamp) -> Vec<Request> {
        Vec::new()
    }

    /// The number by which the request `number` is compared across runs: equal for the same request of two runs.
    /// Called before `ended`. Requests of open loops keep their number. Those of closed loops are numbered in the
    /// order in which they arrive.
    fn pair(&self, number: u64) -> u64 {
        number
    }

    /// Number of requests, when it is known in advance.
    fn total(&self) -> Option<u64> {
        None
    }
}
