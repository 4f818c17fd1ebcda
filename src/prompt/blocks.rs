//! Blocks of tokens: from an encoder's ids to block keys, computed only as far as they are requested.
//!
//! Text is encoded in parts that encode independently ([`Cuts`]), so a prompt that no endpoint holds costs only its
//! first part. Called by prefix lookups; [`characters`](super::characters) uses the same [`Chain`].

mod chain;

pub use chain::Chain;

use crate::memo::Cuts;
use crate::pieces::{FieldContent, Mark, Pieces, PromptForm, StreamField, Volatile, media_ids};
use crate::{EncodeError, Encoder};
use attache_prefix::block_size::BlockSize;
use attache_prefix::key::{BlockKey, BlockKeys, KeySpace};
use attache_protocol::prompt::Prompt;
use attache_protocol::text::{Text, Written};
use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Default block size: 16 tokens, as in vLLM.
pub const DEFAULT_BLOCK_TOKENS: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// Default limit of the text of one prompt, 4 MiB: a context of a million tokens, or some 0.1 s of CPU time.
pub const DEFAULT_MAX_PROMPT_BYTES: usize = 4 << 20;

/// Returns ids as little-endian bytes, from which block keys are computed.
#[must_use]
pub fn le_bytes(ids: &[u32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(ids))
    } else {
        Cow::Owned(ids.iter().flat_map(|id| id.to_le_bytes()).collect())
    }
}

/// Makes keys of prompts from the tokens of an [`Encoder`] without a chat template: each field of the canonical stream
/// is encoded by itself, after the id of its [`Mark`]. A bare prompt has no marks: its blocks equal the engine's, if
/// both use the same vocabulary.
#[derive(Clone)]
pub struct TokenBlocks {
    /// Key space of the pool.
    pub space: KeySpace,
    /// Tokens in a block.
    pub block_size: Arc<BlockSize>,
    /// Parts of a prompt that are left out of the keys.
    pub volatile: Volatile,
    /// The encoder that makes the tokens.
    pub encoder: Arc<dyn Encoder>,
    /// Where this encoder allows a text to be cut.
    pub cuts: Cuts,
    /// Bytes of text that are encoded of one prompt; its keys end there. Cached text counts as well, so that the keys
    /// of a prompt do not depend on earlier prompts.
    pub max_bytes: usize,
}

impl fmt::Debug for TokenBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenBlocks")
            .field("block_size", &self.block_size)
            .field("encoder", &self.encoder)
            .finish_non_exhaustive()
    }
}

impl TokenBlocks {
    /// Creates key makers with default settings.
    #[must_use]
    pub fn new(space: KeySpace, encoder: Arc<dyn Encoder>, cuts: Cuts) -> Self {
        Self {
            space,
            block_size: Arc::new(BlockSize::given(DEFAULT_BLOCK_TOKENS.get() as u32)),
            volatile: Volatile::default(),
            encoder,
            cuts,
            max_bytes: DEFAULT_MAX_PROMPT_BYTES,
        }
    }

    /// Returns the keys of `prompt` under `root` ([`KeySpace::root`]), made as they are requested.
    #[must_use]
    pub fn keys<'p>(&'p self, prompt: &'p Prompt<'_>, root: u64) -> TokenKeys<'p> {
        let pieces = Pieces::new(prompt, &self.volatile);
        let mut keys = match pieces.shape() {
            PromptForm::Ids(ids) => self.ids(Cow::Borrowed(ids), root),
            PromptForm::Bare(text) => TokenKeys { text: text.into(), ..self.ids(Cow::Borrowed(&[]), root) },
            PromptForm::Framed => TokenKeys { in_text: pieces.ends_in_text(), ..self.ids(Cow::Borrowed(&[]), root) },
        };
        keys.left_out = pieces.left_out_bytes();
        if pieces.shape() == PromptForm::Framed {
            keys.fields = pieces.fields.into_iter();
        }
        keys
    }

    /// Returns the keys of a text that is the whole prompt: rendered by a chat template, or bare.
    #[must_use]
    pub fn text<'p>(&'p self, text: &'p str, root: u64) -> TokenKeys<'p> {
        self.text_behind(&[], text, root)
    }

    /// Returns the keys of a text that is the whole prompt, after the ids that a tokenizer puts before it (BOS).
    #[must_use]
    pub fn text_behind<'p>(&'p self, before: &'p [u32], text: &'p str, root: u64) -> TokenKeys<'p> {
        let text = SourceText { text: Cow::Borrowed(text), escaped: false };
        TokenKeys { text, ..self.ids(Cow::Borrowed(before), root) }
    }

    /// Returns keys that were made before.
    #[must_use]
    pub fn made<'p>(&'p self, made: &MadeKeys) -> TokenKeys<'p> {
        let MadeKeys { keys, chain, tokens, left_out, in_text, error } = made.clone();
        TokenKeys { keys, chain, tokens, left_out, in_text, error, ..self.ids(Cow::Borrowed(&[]), 0) }
    }

    /// Returns the keys of a prompt whose ids are known.
    #[must_use]
    pub fn ids<'p>(&'p self, ids: Cow<'p, [u32]>, root: u64) -> TokenKeys<'p> {
        let block = self.block_size.at_least_one().saturating_mul(ID_BYTES);
        TokenKeys {
            blocks: self,
            fields: Vec::new().into_iter(),
            text: SourceText::default(),
            text_at: 0,
            encoded: 0,
            cold: usize::MAX,
            tokens: ids.len() as u64,
            ids,
            fed: 0,
            chain: Chain::new(self.space, root, block),
            keys: Vec::new(),
            left_out: 0,
            in_text: true,
            error: None,
        }
    }
}

impl TokenBlocks {
    /// Encodes the part of a prompt's text that follows its first `before` bytes.
    fn encode(
        &self,
        part: Written<'_>,
        before: usize,
        cold: &mut usize,
        ids: &mut Vec<u32>,
    ) -> Result<(), EncodeError> {
        let (Written::Plain(text) | Written::Escaped(text)) = part;
        let bytes = before + text.len();
        if bytes > self.max_bytes {
            return Err(EncodeError::Budget { done: before, bytes });
        }
        match part {
            Written::Plain(text) => self.encoder.encode_segment(text, cold, ids),
            Written::Escaped(raw) => self.encoder.encode_escaped(raw, cold, ids),
        }
    }
}

const ID_BYTES: NonZeroUsize = NonZeroUsize::new(size_of::<u32>()).unwrap();

/// All keys of a prompt whose text was dropped, made on another thread.
#[derive(Clone, Debug)]
pub struct MadeKeys {
    keys: Vec<BlockKey>,
    chain: Chain,
    tokens: u64,
    left_out: u64,
    in_text: bool,
    error: Option<EncodeError>,
}

/// The keys of one prompt.
#[derive(Debug)]
pub struct TokenKeys<'p> {
    blocks: &'p TokenBlocks,
    fields: std::vec::IntoIter<StreamField<'p>>,
    /// The text that is being encoded, and the position in it.
    text: SourceText<'p>,
    text_at: usize,
    /// Bytes of text that were encoded.
    encoded: usize,
    /// Bytes of uncached text that may still be encoded.
    cold: usize,
    /// Ids, and how many of their bytes are in blocks.
    ids: Cow<'p, [u32]>,
    fed: usize,
    chain: Chain,
    keys: Vec<BlockKey>,
    tokens: u64,
    left_out: u64,
    /// Whether more of the prompt's last text or ids may follow without a mark.
    in_text: bool,
    error: Option<EncodeError>,
}

impl TokenKeys<'_> {
    /// Limits the uncached text to encode to `bytes`; the keys end there.
    #[must_use]
    pub fn with_cold_bytes(self, bytes: usize) -> Self {
        Self { cold: bytes, ..self }
    }

    /// Whether more keys were requested than cached text could provide.
    #[must_use]
    pub fn is_cold(&self) -> bool {
        self.error == Some(EncodeError::Cold)
    }

    /// Makes all keys, as long as `goes_on` returns true, which is called after each part of the text. Appends the ids
    /// to `ids` if given. Returns `None` when `goes_on` stopped it.
    #[must_use]
    pub fn make_all(mut self, mut goes_on: impl FnMut() -> bool, mut ids: Option<&mut Vec<u32>>) -> Option<MadeKeys> {
        loop {
            if let Some(ids) = &mut ids {
                ids.extend_from_slice(&self.ids);
            }
            let bytes = le_bytes(&self.ids);
            let rest = bytes.get(self.fed..).unwrap_or_default();
            self.chain.feed(rest, usize::MAX, &mut self.keys);
            if !goes_on() {
                return None;
            }
            if !self.advance() {
                let Self { keys, chain, tokens, left_out, in_text, error, .. } = self;
                return Some(MadeKeys { keys, chain, tokens, left_out, in_text, error });
            }
        }
    }

    /// Whether the keys end before the prompt does, because the rest exceeds the limit of one prompt or one text.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        matches!(self.error, Some(EncodeError::Budget { .. }))
    }

    /// Returns the number of tokens made so far, including marks of fields.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Returns the number of tokens made so far, and the bytes of text from which no tokens were made yet. `None` if the
    /// prompt is longer than what may be encoded of it, or has further fields.
    #[must_use]
    pub fn length(&self) -> Option<(u64, u64)> {
        let is_last = self.fields.as_slice().is_empty() && !self.is_cut();
        let rest = self.text.text.len().saturating_sub(self.text_at);
        is_last.then_some((self.tokens, rest as u64))
    }

    /// Returns the reason for which the keys end before the prompt does.
    #[must_use]
    pub fn error(&self) -> Option<&EncodeError> {
        self.error.as_ref()
    }

    /// Returns the bytes of text that were left out as volatile.
    #[must_use]
    pub fn left_out_bytes(&self) -> u64 {
        self.left_out
    }

    /// Returns all ids of the prompt as far as it can be encoded, for display.
    #[must_use]
    pub fn into_ids(mut self) -> Vec<u32> {
        let mut all = self.ids.to_vec();
        while self.advance() {
            all.extend_from_slice(&self.ids);
        }
        all
    }

    /// Returns all keys as far as the prompt can be encoded, with the state to continue them with the response, or the
    /// reason for which they end before the prompt does.
    pub fn finish(mut self) -> (Vec<BlockKey>, Result<TokenTail, EncodeError>) {
        self.upto(usize::MAX);
        let tail = TokenTail { chain: self.chain, in_text: self.in_text };
        (self.keys, self.error.map_or(Ok(tail), Err))
    }

    /// Makes more ids: a part of the text, or the start of the next field. Returns false at the end.
    fn advance(&mut self) -> bool {
        self.fed = 0;
        let part = self.text.part(self.text_at, &self.blocks.cuts);
        let mut ids = match std::mem::take(&mut self.ids) {
            Cow::Owned(mut ids) => {
                ids.clear();
                ids
            }
            Cow::Borrowed(_) => Vec::new(),
        };
        if let Some(part) = part {
            if let Err(error) = self.blocks.encode(part, self.encoded, &mut self.cold, &mut ids) {
                self.error = Some(error);
                return false;
            }
            let (Written::Plain(text) | Written::Escaped(text)) = part;
            self.text_at += text.len();
            self.encoded += text.len();
        } else if let Some(field) = self.fields.next() {
            self.text_at = 0;
            self.text = begin(&field, &mut ids);
        } else {
            return false;
        }
        self.tokens += ids.len() as u64;
        self.ids = Cow::Owned(ids);
        true
    }
}

/// Text that is encoded to ids.
#[derive(Clone, Debug, Default)]
struct SourceText<'p> {
    text: Cow<'p, str>,
    /// Whether the text has JSON escapes; only uncached text must be unescaped.
    escaped: bool,
}

impl<'p> From<&'p Text<'_>> for SourceText<'p> {
    fn from(text: &'p Text<'_>) -> Self {
        match text.written() {
            Written::Plain(text) => Self { text: Cow::Borrowed(text), escaped: false },
            Written::Escaped(raw) => Self { text: Cow::Borrowed(raw), escaped: true },
        }
    }
}

impl SourceText<'_> {
    /// Returns the part that begins at `at` and encodes independently; `None` at the end.
    fn part(&self, at: usize, cuts: &Cuts) -> Option<Written<'_>> {
        let rest = self.text.get(at..).filter(|rest| !rest.is_empty())?;
        Some(match self.escaped {
            false => Written::Plain(rest.get(..cuts.first(rest)).unwrap_or(rest)),
            true => Written::Escaped(rest.get(..cuts.first_escaped(rest)).unwrap_or(rest)),
        })
    }
}

/// Appends the mark of a field and its ids, or returns the text to encode.
fn begin<'p>(field: &StreamField<'p>, ids: &mut Vec<u32>) -> SourceText<'p> {
    ids.push(field.mark.id());
    match field.body {
        FieldContent::Media(kind, reference) => ids.extend(media_ids(kind, reference)),
        FieldContent::Tokens(given) => ids.extend_from_slice(given),
        FieldContent::Text(text) => return text.into(),
        FieldContent::Nothing | FieldContent::Name(_) | FieldContent::Json(_) | FieldContent::Setting(..) => {
            return SourceText { text: field.content(), escaped: false };
        }
    }
    SourceText::default()
}

impl BlockKeys for TokenKeys<'_> {
    fn upto(&mut self, n: usize) -> &[BlockKey] {
        while self.keys.len() < n && self.error.is_none() {
            let bytes = le_bytes(&self.ids);
            let rest = bytes.get(self.fed..).unwrap_or_default();
            if !rest.is_empty() {
                self.fed += self.chain.feed(rest, n, &mut self.keys);
            } else if !self.advance() {
                break;
            }
        }
        &self.keys
    }
}

/// The end of a prompt whose body was dropped: less than a block of ids. The ids of the response continue it.
#[derive(Clone, Debug)]
pub struct TokenTail {
    chain: Chain,
    in_text: bool,
}

impl TokenTail {
    /// Returns the number of complete blocks so far.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.chain.made()
    }

    /// Appends a whole message in the form of the next turn, or, without a role, more of a bare prompt. In a bare
    /// prompt, the one token at the border to the response may then differ from the next turn's. Appends keys of blocks
    /// that are complete now to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] when the text cannot be encoded; then nothing has changed.
    pub fn extend(
        &mut self,
        encoder: &dyn Encoder,
        role: Option<&str>,
        text: &str,
        out: &mut Vec<BlockKey>,
    ) -> Result<(), EncodeError> {
        let mut ids = Vec::new();
        if let Some(role) = role {
            ids.push(Mark::Role.id());
            encoder.encode(role, &mut ids)?;
        }
        if role.is_some() || !self.in_text {
            ids.push(Mark::Text.id());
        }
        if role.is_some() {
            encoder.encode_coming(text, &mut ids)?;
        } else {
            encoder.encode(text, &mut ids)?;
        }
        self.in_text = true;
        self.chain.feed(&le_bytes(&ids), usize::MAX, out);
        Ok(())
    }
}

#[cfg(test)]
mod tests;
