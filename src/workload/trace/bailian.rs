//! Alibaba's traces of Qwen models on Bailian: one JSON object a row, prompts as the ids of their blocks, conversations.
//!
//! `{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132, "type":
//! "text", "turn": 2, "hash_ids": [1089, …]}`: seconds, tokens, tokens, and one id for each block of 16 tokens of the
//! prompt, the last of which may be cut. A request without an earlier turn has the parent -1. All turns of a
//! conversation have one session. Prompts do not quote responses: the trace does not say where. Source: KVCache Cache
//! in the Wild (USENIX ATC 2025), alibaba-edu/qwen-bailian-usagetraces-anon.

use super::RowParser;
use super::fields::{shown, time, tokens, wrong};
use super::mooncake::{checked_size, prompt};
use crate::names::{TextKind, name};
use crate::{Request, TraceError};
use attache_sim::content::Piece;
use serde::Deserialize;
use serde_json::value::RawValue;
use std::collections::{HashMap, VecDeque};

/// 16 tokens: what the files have in their names.
pub const DEFAULT_BLOCK_TOKENS: u32 = 16;
/// Fields that are read of a row.
pub(super) const FIELDS: [&str; 6] =
    ["chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids"];
/// Requests whose conversation is remembered; the first is forgotten for a new one. A later turn of a forgotten one
/// begins a session.
pub const MAX_CHATS: usize = 100_000;

/// The rule of the format.
#[derive(Debug)]
pub(super) struct Bailian {
    block_tokens: u32,
    /// The session of each request, by its `chat_id`.
    sessions: HashMap<u64, u64>,
    /// The keys of `sessions`, the oldest first.
    order: VecDeque<u64>,
}

/// The fields of a row, unread, so that an error can name the one that is wrong.
#[derive(Deserialize)]
struct BailianRow<'a> {
    #[serde(borrow)]
    chat_id: Option<&'a RawValue>,
    #[serde(borrow)]
    parent_chat_id: Option<&'a RawValue>,
    #[serde(borrow)]
    timestamp: Option<&'a RawValue>,
    #[serde(borrow)]
    input_length: Option<&'a RawValue>,
    #[serde(borrow)]
    output_length: Option<&'a RawValue>,
    #[serde(borrow)]
    hash_ids: Option<&'a RawValue>,
}

impl Bailian {
    /// Blocks of `block_tokens`.
    ///
    /// # Errors
    /// See [`checked_size`].
    pub(super) fn new(block_tokens: u32) -> Result<Self, TraceError> {
        Ok(Self { block_tokens: checked_size(block_tokens)?, sessions: HashMap::new(), order: VecDeque::new() })
    }

    /// The session of the request `chat`: that of its parent, else a new one.
    fn session(&mut self, chat: u64, parent: Option<u64>) -> u64 {
        let session = parent.and_then(|parent| self.sessions.get(&parent).copied()).unwrap_or(chat);
        if self.sessions.insert(chat, session).is_none() {
            self.order.push_back(chat);
            if self.order.len() > MAX_CHATS
                && let Some(oldest) = self.order.pop_front()
            {
                self.sessions.remove(&oldest);
            }
        }
        session
    }
}

fn id(field: &str, got: Option<&RawValue>, allowed: &str) -> Result<u64, String> {
    let got = got.map(RawValue::get);
    got.and_then(|id| id.parse().ok()).ok_or_else(|| wrong(field, got, allowed))
}

impl RowParser for Bailian {
    const FROM_FIRST: bool = true;

    fn request(&mut self, row: &str, number: u64) -> Result<Request, String> {
        let row: BailianRow<'_> = serde_json::from_str(row).map_err(|e| format!("it is {}: {e}", shown(row)))?;
        let chat = id("chat_id", row.chat_id, "a whole number")?;
        // -1 names no request.
        let parent = match row.parent_chat_id.map(RawValue::get) {
            Some("-1") => None,
            _ => Some(id("parent_chat_id", row.parent_chat_id, "a whole number, or -1 for none,")?),
        };
        let at = time("timestamp", row.timestamp.map(RawValue::get), "seconds", 0)?;
        let input = tokens("input_length", row.input_length.map(RawValue::get), 1)?;
        // A response that was cut off is still requested.
        let output = tokens("output_length", row.output_length.map(RawValue::get), 0)?.max(1);
        let prompt = prompt(row.hash_ids.map(RawValue::get), input, self.block_tokens)?;
        Ok(Request {
            number,
            at,
            prompt,
            answer: Piece::new(name(0, TextKind::Answer, number), output),
            adapter: None,
            session: Some(self.session(chat, parent)),
            tenant: None,
            priority: 0,
            headers: Vec::new(),
        })
    }
}
