//! From a request to what a server's KV cache is keyed by: chat template, tokens, blocks, and a cache of segments.
//!
//! A parsed prompt becomes one canonical stream ([`pieces`]). [`characters`] cuts the text itself into blocks; [`blocks`]
//! cuts the tokens that an [`Encoder`] makes.
//!
//! **Owns** tokenizers and their bounds ([`tiktoken`], `huggingface`), chat templates (`template`) and the segment cache
//! ([`memo`]).
//! **Called by** `ext_proc` for each request, and by `app` when it loads tokenizer files.
//! **Must not** open files, call servers, or run without a bound on its work ([`work`]).
//!
//! Read first: `pieces.rs`, `blocks.rs`, `memo.rs`.

pub mod blocks;
pub mod characters;
pub mod memo;
pub mod pieces;
pub mod remote;
pub mod tiktoken;
pub mod work;

#[cfg(feature = "hf-tokenizers")]
pub mod huggingface;
#[cfg(feature = "hf-tokenizers")]
pub mod template;

use attache_protocol::text::unescaped;
use std::fmt::Debug;

/// Turns text into token ids.
pub trait Encoder: Send + Sync + Debug {
    /// Appends the ids of `text`. Marks of the template (special tokens) that stand in it become their one id, as engines do it.
    ///
    /// # Errors
    /// When the text can't be encoded within bounds. It never panics.
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError>;

    /// As [`Encoder::encode`] of one segment as the encoder's own cuts make it, as long as it is remembered or `cold` allows for its bytes,
    /// of which then so many fewer are left.
    ///
    /// # Errors
    /// [`EncodeError::Cold`] when it does not, and those of [`Encoder::encode`].
    fn encode_segment(&self, segment: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        *cold = cold.checked_sub(segment.len()).ok_or(EncodeError::Cold)?;
        self.encode(segment, out)
    }

    /// As [`Encoder::encode_segment`] of the text of `raw`, the inside of a JSON string whose escapes are known to be good.
    ///
    /// # Errors
    /// Those of [`Encoder::encode_segment`].
    fn encode_escaped(&self, raw: &str, cold: &mut usize, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        self.encode_segment(&unescaped(raw), cold, out)
    }

    /// As [`Encoder::encode`] of a text that the next request will bring in JSON.
    ///
    /// # Errors
    /// Those of [`Encoder::encode`].
    fn encode_coming(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        self.encode(text, out)
    }
}

/// Text that was not encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// The tokenizer gave up on it.
    #[error("the tokenizer failed: {0}")]
    Failed(String),
    /// It is not remembered, and more of the prompt than may be encoded here and now is not.
    #[error("the tokens are not at hand")]
    Cold,
    /// It would have cost more than its share of CPU time.
    #[error("the tokenizer's budget is used up after {done} of {bytes} bytes")]
    Budget {
        /// Bytes encoded.
        done: usize,
        /// Bytes in all.
        bytes: usize,
    },
}
