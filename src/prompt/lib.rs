//! From a request to the keys of a server's KV cache: chat template, tokens, blocks, and a cache of segments.
//!
//! A parsed prompt becomes one canonical stream ([`pieces`]). [`characters`] divides the text itself into blocks;
//! [`blocks`] divides the tokens of an [`Encoder`].
//!
//! **Owns** tokenizers and their limits ([`tiktoken`], `huggingface`), chat templates (`template`) and the segment
//! cache ([`memo`]).
//! **Called by** `picker` for each request, by `ext_proc::warmer`, which runs the work, and by `app` when it loads
//! tokenizer files.
//! **Must not** open files, call servers, or run without a limit on its work ([`work`]).
//!
//! Read first: `pieces.rs`, `blocks.rs`, `memo.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

pub mod blocks;
pub mod characters;
pub mod memo;
pub mod pieces;
pub mod remote;
pub mod tiktoken;
pub mod work;

#[cfg_attr(not(feature = "full"), path = "huggingface/absent.rs")]
pub mod huggingface;
#[cfg(feature = "full")]
pub mod template;

use attache_protocol::text::unescaped;
use std::fmt::Debug;

/// Converts text to token ids.
pub trait Encoder: Send + Sync + Debug {
    /// Appends the ids of `text`. Special tokens in it become one id each, as in engines.
    ///
    /// # Errors
    /// [`EncodeError`] when the text cannot be encoded within its limits. Implementations never panic.
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError>;

    /// As [`Encoder::encode`], for one segment as the encoder's own cuts give it. A segment that is not cached must fit
    /// in `cold` bytes, which are reduced by its length.
    ///
    /// # Errors
    /// [`EncodeError::Cold`] when it does not fit, and those of [`Encoder::encode`].
    fn encode_segment(&self, segment: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        *cold = cold.checked_sub(segment.len()).ok_or(EncodeError::Cold)?;
        self.encode(segment, out)
    }

    /// As [`Encoder::encode_segment`], for the text of `raw`, the inside of a JSON string with valid escapes.
    ///
    /// # Errors
    /// Those of [`Encoder::encode_segment`].
    fn encode_escaped(&self, raw: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        self.encode_segment(&unescaped(raw), cold, out)
    }

    /// As [`Encoder::encode`], for a text that the next request will contain in JSON.
    ///
    /// # Errors
    /// Those of [`Encoder::encode`].
    fn encode_coming(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        self.encode(text, out)
    }
}

/// The reason for which text was not encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The tokenizer failed on the text.
    #[error("the tokenizer failed: {0}")]
    Failed(String),
    /// The text is not cached, and encoding it would exceed the limit of uncached text.
    #[error("the tokens are not cached")]
    Cold,
    /// The text would take more than its share of CPU time.
    #[error("the tokenizer's budget is used up after {done} of {bytes} bytes")]
    Budget {
        /// Bytes that were encoded.
        done: usize,
        /// Length of the text in bytes.
        bytes: usize,
    },
}
