//! Mooncake's traces: one JSON object a row, prompts as the ids of their blocks.
//!
//! `{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …, 2354]}`: milliseconds,
//! tokens, tokens, and one id for each block of 512 tokens of the prompt, the last of which may be cut. Equal ids are
//! equal tokens, and an id implies all that comes before it. Other fields are passed over. Source: Mooncake
//! (FAST'25), `FAST25-release/traces` in kvcache-ai/Mooncake (conversation, toolagent and synthetic trace), and other
//! traces with the same fields. [`super::bailian`] reads blocks in the same way.

use super::RowParser;
use super::fields::{shown, time, tokens, wrong};
use crate::names::{TextKind, name, name_of_block};
use crate::{PromptPart, Request, Speaker, TraceError};
use attache_sim::content::Piece;
use attache_types::clock::Timestamp;
use serde::Deserialize;
use serde_json::value::RawValue;

/// 512 tokens: what Mooncake publishes.
pub const DEFAULT_BLOCK_TOKENS: u32 = 512;
/// A block of more tokens would hold most prompts whole.
pub const MAX_BLOCK_TOKENS: u32 = 65_536;

/// Fields that are read of a row.
pub(super) const FIELDS: [&str; 4] = ["timestamp", "input_length", "output_length", "hash_ids"];

/// Checks a block size.
///
/// # Errors
/// When it is 0 or more than [`MAX_BLOCK_TOKENS`].
pub(super) fn checked_size(block_tokens: u32) -> Result<u32, TraceError> {
    if (1..=MAX_BLOCK_TOKENS).contains(&block_tokens) {
        return Ok(block_tokens);
    }
    let allowed = format!("a whole number from 1 to {MAX_BLOCK_TOKENS}");
    Err(TraceError::Format(format!("the block size (`--trace-block-tokens`) is {block_tokens}; {allowed} is allowed")))
}

/// The rule of the format.
pub(super) struct Mooncake {
    block_tokens: u32,
}

/// The fields of a row, unread, so that an error can name the one that is wrong.
#[derive(Deserialize)]
struct MooncakeRow<'a> {
    #[serde(borrow)]
    timestamp: Option<&'a RawValue>,
    #[serde(borrow)]
    input_length: Option<&'a RawValue>,
    #[serde(borrow)]
    output_length: Option<&'a RawValue>,
    #[serde(borrow)]
    hash_ids: Option<&'a RawValue>,
}

impl Mooncake {
    /// Blocks of `block_tokens`.
    ///
    /// # Errors
    /// When that is 0 or more than [`MAX_BLOCK_TOKENS`].
    pub(super) fn new(block_tokens: u32) -> Result<Self, TraceError> {
        Ok(Self { block_tokens: checked_size(block_tokens)? })
    }
}

/// The ids of the blocks of a prompt of `input` tokens, of `block_tokens` each, the last of which may be cut.
///
/// # Errors
/// `ids` is no list of numbers, or has another length than the prompt needs.
pub(super) fn block_ids(ids: Option<&str>, input: u32, block_tokens: u32) -> Result<Vec<u64>, String> {
    let read = ids.and_then(|ids| serde_json::from_str::<Vec<u64>>(ids).ok());
    let read = read.ok_or_else(|| wrong("hash_ids", ids, "a list of whole numbers"))?;
    if u64::from(input.div_ceil(block_tokens)) != read.len() as u64 {
        return Err(format!(
            "`hash_ids` has {} ids, but {input} tokens are {} blocks of {block_tokens}; {}",
            read.len(),
            input.div_ceil(block_tokens),
            remedy(read.len(), input)
        ));
    }
    Ok(read)
}

/// The prompt of `input` tokens that consists of the blocks `ids`; see [`block_ids`].
fn prompt(ids: Option<&str>, input: u32, block_tokens: u32) -> Result<Vec<PromptPart>, String> {
    let ids = block_ids(ids, input, block_tokens)?;
    let mut rest = input;
    let mut prompt = Vec::with_capacity(ids.len());
    for id in ids {
        // What everybody begins with can only be the operator's.
        let role = if prompt.is_empty() { Speaker::System } else { Speaker::User };
        let tokens = rest.min(block_tokens);
        rest -= tokens;
        prompt.push(PromptPart::text(role, Piece::new(name_of_block(id), tokens)));
    }
    Ok(prompt)
}

/// The block size with which a prompt of `input` tokens has `ids` blocks, as advice: a power of two if one fits.
fn remedy(ids: usize, input: u32) -> String {
    let fits = |size: &u32| (1..=MAX_BLOCK_TOKENS).contains(size) && input.div_ceil(*size) as usize == ids;
    let powers = (0..=16).map(|power| 1 << power);
    let least = u32::try_from(ids).ok().filter(|ids| *ids > 0).map(|ids| input.div_ceil(ids));
    match powers.chain(least).find(fits) {
        Some(size) => format!("`--trace-block-tokens {size}` fits this row"),
        None => "no block size fits this row".to_owned(),
    }
}

impl RowParser for Mooncake {
    const FROM_FIRST: bool = true;

    fn request(&mut self, row: &str, number: u64) -> Result<Request, String> {
        let MooncakeRow { timestamp, input_length, output_length, hash_ids } =
            serde_json::from_str(row).map_err(|e| format!("it is {}: {e}", shown(row)))?;
        let at: Timestamp = time("timestamp", timestamp.map(RawValue::get), "milliseconds", 3)?;
        let input = tokens("input_length", input_length.map(RawValue::get), 1)?;
        // An answer that was broken off is still asked for.
        let output = tokens("output_length", output_length.map(RawValue::get), 0)?.max(1);
        let prompt = prompt(hash_ids.map(RawValue::get), input, self.block_tokens)?;
        let answer = Piece::new(name(0, TextKind::Answer, number), output);
        Ok(Request {
            number,
            at,
            prompt,
            answer,
            adapter: None,
            session: None,
            tenant: None,
            priority: 0,
            headers: Vec::new(),
            turn: None,
        })
    }
}
