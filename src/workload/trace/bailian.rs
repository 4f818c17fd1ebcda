//! Alibaba's traces of Qwen models on Bailian: one JSON object a row, prompts as the ids of their blocks, conversations.
//!
//! `{"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521, "output_length": 132, "type":
//! "text", "turn": 2, "hash_ids": [1089, …]}`: seconds, tokens, tokens, and one id for each block of 16 tokens of the
//! prompt, the last of which may be cut. A request without an earlier turn has the parent -1, and so has one whose parent
//! is not in the trace. Its `turn`, which counts from 1, says which of both it is. A conversation is a session, in which
//! each turn waits for its parent and then for a person. The trace has no durations, so that a pause is the time since
//! the request before. Prompts do not quote responses: the trace does not say where. Source: KVCache Cache in the Wild
//! (USENIX ATC 2025), alibaba-edu/qwen-bailian-usagetraces-anon.

use super::blocks::pieces;
use super::fields::{shown, time, tokens, wrong};
use super::mooncake::{block_ids, checked_size};
use super::rows::Rows;
use crate::names::{NUMBERS, TextKind, name};
use crate::sessions::{Session, SessionTrace, Turn};
use crate::{PromptPart, Request, Speaker, TraceError};
use attache_sim::content::Piece;
use attache_types::clock::Timestamp;
use attache_types::program::TurnCause;
use serde::Deserialize;
use serde_json::value::RawValue;
use smallvec::SmallVec;
use std::collections::HashMap;
use std::time::Duration;

/// 16 tokens: what the files have in their names.
pub const DEFAULT_BLOCK_TOKENS: u32 = 16;
/// Fields that are read of a row.
pub(super) const FIELDS: [&str; 7] =
    ["chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "turn", "hash_ids"];

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
    turn: Option<&'a RawValue>,
    #[serde(borrow)]
    hash_ids: Option<&'a RawValue>,
}

/// A conversation so far.
struct Chat {
    at: Timestamp,
    turns: Vec<Turn>,
}

/// Reads all conversations, with blocks of `block_tokens`.
///
/// # Errors
/// When a row or the block size can't be used, or there are no rows.
pub(super) fn read(mut rows: Rows, block_tokens: u32) -> Result<SessionTrace, TraceError> {
    let block = checked_size(block_tokens)?;
    let mut chats: Vec<Chat> = Vec::new();
    // Conversation and position of each request, by its `chat_id`.
    let mut places: HashMap<u64, (usize, usize)> = HashMap::new();
    let (mut first, mut last) = (None, Timestamp(0));
    let mut number = 0;
    while let Some((row, text)) = rows.next()? {
        let wrong = |message| TraceError::Row { row, message };
        let Row { chat, parent, is_first, request } = request(text, number, block).map_err(wrong)?;
        if request.at < last {
            return Err(wrong(super::out_of_order(last.since(request.at))));
        }
        last = request.at;
        let first = *first.get_or_insert(request.at);
        number += 1;
        let before = parent.and_then(|parent| places.get(&parent).copied());
        let (i, before) = match before {
            Some((i, before)) => (i, Some(before)),
            None => {
                chats.push(Chat { at: Timestamp(0).after(request.at.since(first)), turns: Vec::new() });
                (chats.len() - 1, None)
            }
        };
        let Some(open) = chats.get_mut(i) else { continue };
        places.insert(chat, (i, open.turns.len()));
        let at = Timestamp(0).after(request.at.since(first.after(open.at.since(Timestamp(0)))));
        open.turns.push(turn(request, is_first, at, before, &open.turns));
    }
    if chats.is_empty() {
        return Err(TraceError::Format("the trace has no requests".to_owned()));
    }
    let sessions = chats.into_iter().map(|Chat { at, turns }| Session::new(Some(at), turns)).collect();
    Ok(SessionTrace { sessions, id_header: None })
}

/// The turn `at` after the start of its conversation in the trace, behind that at the position `before` of `turns`.
fn turn(request: Request, is_first: bool, at: Timestamp, before: Option<usize>, turns: &[Turn]) -> Turn {
    let parent = before.and_then(|before| turns.get(before));
    // All turns of a conversation have one session: that of its first request.
    let session = turns.first().map_or(request.session, |first| first.request.session);
    Turn {
        agent: 0,
        cause: if is_first && parent.is_none() { TurnCause::Start } else { TurnCause::Person },
        after: before.and_then(|before| u32::try_from(before).ok()).into_iter().collect::<SmallVec<_>>(),
        pause: parent.map_or(Duration::ZERO, |parent| at.since(parent.request.at)),
        request: Request { at, session, ..request },
    }
}

/// A row: the id of its request, that of the request before it, and the request.
struct Row {
    chat: u64,
    parent: Option<u64>,
    /// The first turn of its conversation.
    is_first: bool,
    request: Request,
}

/// The request in `row`, the `number`th.
///
/// # Errors
/// The field, what it holds, and what is allowed.
fn request(row: &str, number: u64, block: u32) -> Result<Row, String> {
    let row: BailianRow<'_> = serde_json::from_str(row).map_err(|e| format!("it is {}: {e}", shown(row)))?;
    let chat = id("chat_id", row.chat_id, "a whole number")?;
    // -1 names no request.
    let parent = match row.parent_chat_id.map(RawValue::get) {
        Some("-1") => None,
        _ => Some(id("parent_chat_id", row.parent_chat_id, "a whole number, or -1 for none,")?),
    };
    let is_first = match row.turn {
        None => true,
        turn => id("turn", turn, "a whole number")? <= 1,
    };
    let at = time("timestamp", row.timestamp.map(RawValue::get), "seconds", 0)?;
    let input = tokens("input_length", row.input_length.map(RawValue::get), 1)?;
    // A response that was cut off is still requested.
    let output = tokens("output_length", row.output_length.map(RawValue::get), 0)?.max(1);
    let ids = block_ids(row.hash_ids.map(RawValue::get), input, block)?;
    // Ids count in the whole trace. What all prompts begin with can only be the operator's.
    let text = name(0, TextKind::Block, NUMBERS - 1);
    let (first, rest) = ids.split_at(1.min(ids.len()));
    let system = pieces(text, first, block, input.min(block)).into_iter().map(|piece| (Speaker::System, piece));
    let user = pieces(text, rest, block, input.saturating_sub(block)).into_iter().map(|piece| (Speaker::User, piece));
    let request = Request {
        number: 0,
        at,
        prompt: system.chain(user).map(|(role, piece)| PromptPart::text(role, piece)).collect(),
        answer: Piece::new(name(0, TextKind::Answer, number), output),
        adapter: None,
        session: Some(chat),
        tenant: None,
        priority: 0,
        headers: Vec::new(),
        turn: None,
    };
    Ok(Row { chat, parent, is_first, request })
}

/// The number of a request.
fn id(field: &str, got: Option<&RawValue>, allowed: &str) -> Result<u64, String> {
    let got = got.map(RawValue::get);
    got.and_then(|id| id.parse().ok()).ok_or_else(|| wrong(field, got, allowed))
}
