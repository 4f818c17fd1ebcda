//! Blocks of tokens: from an encoder's ids to keys, no further than somebody asks.
//!
//! Text is encoded in parts that encode independently ([`Cuts`]), so a prompt that nobody holds costs its first part. Called by whoever
//! looks a prompt up; [`characters`](super::characters) shares the [`Chain`].

use crate::memo::Cuts;
use crate::pieces::{Body, Field, Mark, Pieces, Shape, Volatile, media_ids};
use crate::{EncodeError, Encoder};
use attache_prefix::block_size::BlockSize;
use attache_prefix::key::{BlockKey, BlockKeys, KeySpace};
use attache_protocol::prompt::Prompt;
use attache_protocol::text::{Text, Written};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// 16 tokens: vLLM's own default.
pub const DEFAULT_BLOCK_TOKENS: NonZeroUsize = NonZeroUsize::new(16).unwrap();

/// 4 MiB of text in one prompt, some 0.1 s of CPU time: a context of a million tokens.
pub const DEFAULT_MAX_PROMPT_BYTES: usize = 4 << 20;

/// Ids as the bytes that a block's key is made of.
#[must_use]
pub fn le_bytes(ids: &[u32]) -> Cow<'_, [u8]> {
    if cfg!(target_endian = "little") {
        Cow::Borrowed(bytemuck::cast_slice(ids))
    } else {
        Cow::Owned(ids.iter().flat_map(|id| id.to_le_bytes()).collect())
    }
}

/// Cuts bytes into blocks and hashes each where it lies; only a block that comes in parts is copied.
#[derive(Clone, Debug)]
pub struct Chain {
    space: KeySpace,
    root: u64,
    block: usize,
    made: usize,
    partial: SmallVec<[u8; 64]>,
}

impl Chain {
    /// Blocks of `block` bytes under `root`.
    #[must_use]
    pub fn new(space: KeySpace, root: u64, block: NonZeroUsize) -> Self {
        Self { space, root, block: block.get(), made: 0, partial: SmallVec::new() }
    }

    /// Keys made so far.
    #[must_use]
    pub fn made(&self) -> usize {
        self.made
    }

    /// Takes `bytes` in, until `limit` keys are made in all. Returns how many bytes were taken.
    pub fn feed(&mut self, bytes: &[u8], limit: usize, out: &mut Vec<BlockKey>) -> usize {
        if self.made >= limit {
            return 0;
        }
        let missing = self.block - self.partial.len();
        let Some((head, mut rest)) = bytes.split_at_checked(missing) else {
            self.partial.extend_from_slice(bytes);
            return bytes.len();
        };
        let whole = (rest.len() / self.block).min(limit - self.made - 1);
        out.reserve(1 + whole);
        if self.partial.is_empty() {
            out.push(self.key(head));
        } else {
            self.partial.extend_from_slice(head);
            out.push(self.key(&self.partial));
            self.partial.clear();
        }
        self.made += 1;
        if let Some((full, behind)) = rest.split_at_checked(whole * self.block) {
            // Even where all blocks have 64 bytes the compiler must not know it: it would put the halves of a block's words into vectors to add the
            // seed to them, and take them apart again to multiply, a third more time for each key.
            let space = self.space;
            out.extend(full.chunks_exact(self.block).map(|block| space.next(block)));
            self.made += whole;
            rest = behind;
        }
        if self.made < limit {
            self.partial.extend_from_slice(rest);
            rest = &[];
        }
        bytes.len() - rest.len()
    }

    fn key(&self, block: &[u8]) -> BlockKey {
        if self.made == 0 { self.space.first(self.root, block) } else { self.space.next(block) }
    }

    /// The bytes that are not in a block yet.
    #[must_use]
    pub fn partial(&self) -> &[u8] {
        &self.partial
    }
}

/// Makes keys of prompts from the tokens of an [`Encoder`] that knows no chat template: each field of the canonical stream is encoded by
/// itself, behind the id of its [`Mark`]. A bare prompt has no marks: its blocks are those of the engine, as long as both use the same
/// vocabulary.
#[derive(Clone)]
pub struct TokenBlocks {
    /// What the keys are made in.
    pub space: KeySpace,
    /// Tokens in a block.
    pub block_size: Arc<BlockSize>,
    /// What is left out.
    pub volatile: Volatile,
    /// Makes the tokens.
    pub encoder: Arc<dyn Encoder>,
    /// Where a text may be cut for this encoder.
    pub cuts: Cuts,
    /// Bytes of text that are encoded of one prompt; its keys end there. Counted whether remembered or not, so that the keys of a prompt
    /// do not depend on what came before it.
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
    /// With every default.
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

    /// The keys of `prompt` under `root` ([`KeySpace::root`]), made as far as they are asked for.
    #[must_use]
    pub fn keys<'p>(&'p self, prompt: &'p Prompt<'_>, root: u64) -> TokenKeys<'p> {
        let pieces = Pieces::new(prompt, &self.volatile);
        let mut keys = match pieces.shape() {
            Shape::Ids(ids) => self.ids(Cow::Borrowed(ids), root),
            Shape::Bare(text) => TokenKeys { text: text.into(), ..self.ids(Cow::Borrowed(&[]), root) },
            Shape::Framed => TokenKeys { in_text: pieces.ends_in_text(), ..self.ids(Cow::Borrowed(&[]), root) },
        };
        keys.left_out = pieces.left_out_bytes();
        if pieces.shape() == Shape::Framed {
            keys.fields = pieces.fields.into_iter();
        }
        keys
    }

    /// The keys of a text that is the whole prompt: rendered by a chat template, or bare.
    #[must_use]
    pub fn text<'p>(&'p self, text: &'p str, root: u64) -> TokenKeys<'p> {
        self.text_behind(&[], text, root)
    }

    /// The keys of a text that is the whole prompt, behind the ids that a tokenizer sets before it (BOS).
    #[must_use]
    pub fn text_behind<'p>(&'p self, before: &'p [u32], text: &'p str, root: u64) -> TokenKeys<'p> {
        let text = Source { text: Cow::Borrowed(text), escaped: false };
        TokenKeys { text, ..self.ids(Cow::Borrowed(before), root) }
    }

    /// Keys that were made before.
    #[must_use]
    pub fn made<'p>(&'p self, made: &MadeKeys) -> TokenKeys<'p> {
        let MadeKeys { keys, chain, tokens, left_out, in_text, error } = made.clone();
        TokenKeys { keys, chain, tokens, left_out, in_text, error, ..self.ids(Cow::Borrowed(&[]), 0) }
    }

    /// The keys of a prompt whose ids are known.
    #[must_use]
    pub fn ids<'p>(&'p self, ids: Cow<'p, [u32]>, root: u64) -> TokenKeys<'p> {
        let block = self.block_size.at_least_one().saturating_mul(ID_BYTES);
        TokenKeys {
            blocks: self,
            fields: Vec::new().into_iter(),
            text: Source::default(),
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
    /// Encodes the part of a prompt's text that comes behind `before` bytes of it.
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

/// All keys of a prompt whose text is gone: they were made somewhere else.
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
    fields: std::vec::IntoIter<Field<'p>>,
    /// The text that is being encoded, and how far that is.
    text: Source<'p>,
    text_at: usize,
    /// Bytes of text encoded.
    encoded: usize,
    /// Bytes that may still be encoded and were not remembered.
    cold: usize,
    /// Ids, and how many bytes of them are in blocks.
    ids: Cow<'p, [u32]>,
    fed: usize,
    chain: Chain,
    keys: Vec<BlockKey>,
    tokens: u64,
    left_out: u64,
    /// More of the prompt's last text, or of its ids, may follow without a mark.
    in_text: bool,
    error: Option<EncodeError>,
}

impl TokenKeys<'_> {
    /// The same, but of text that is not remembered no more than `bytes` are encoded; the keys end there.
    #[must_use]
    pub fn with_cold_bytes(self, bytes: usize) -> Self {
        Self { cold: bytes, ..self }
    }

    /// Whether more keys were wanted than could be made from what is remembered.
    #[must_use]
    pub fn is_cold(&self) -> bool {
        self.error == Some(EncodeError::Cold)
    }

    /// Makes all keys, as long as `goes_on` allows it, which is asked after each part of the text. Ids go to `ids` where they are wanted.
    /// `None` when it did not allow it to the end.
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

    /// Whether the keys end before the prompt does because the rest takes more than may be encoded of one prompt or one text.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        matches!(self.error, Some(EncodeError::Budget { .. }))
    }

    /// Tokens made so far, marks of fields included.
    #[must_use]
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Why the keys end before the prompt does.
    #[must_use]
    pub fn error(&self) -> Option<&EncodeError> {
        self.error.as_ref()
    }

    /// Bytes of text that were left out as volatile.
    #[must_use]
    pub fn left_out_bytes(&self) -> u64 {
        self.left_out
    }

    /// All ids of the prompt as far as it can be encoded, for people to look at.
    #[must_use]
    pub fn into_ids(mut self) -> Vec<u32> {
        let mut all = self.ids.to_vec();
        while self.advance() {
            all.extend_from_slice(&self.ids);
        }
        all
    }

    /// All keys as far as the prompt can be encoded, and what is needed to go on from them when the answer is known, or why they end before
    /// the prompt does.
    pub fn finish(mut self) -> (Vec<BlockKey>, Result<TokenTail, EncodeError>) {
        self.upto(usize::MAX);
        let tail = TokenTail { chain: self.chain, in_text: self.in_text };
        (self.keys, self.error.map_or(Ok(tail), Err))
    }

    /// Makes more ids: a part of the text, or the beginning of the next field. False at the end.
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

/// Text that ids are made of.
#[derive(Clone, Debug, Default)]
struct Source<'p> {
    text: Cow<'p, str>,
    /// As in JSON; only what is not remembered has to be unescaped.
    escaped: bool,
}

impl<'p> From<&'p Text<'_>> for Source<'p> {
    fn from(text: &'p Text<'_>) -> Self {
        match text.written() {
            Written::Plain(text) => Self { text: Cow::Borrowed(text), escaped: false },
            Written::Escaped(raw) => Self { text: Cow::Borrowed(raw), escaped: true },
        }
    }
}

impl Source<'_> {
    /// The part that begins at `at` and encodes independently; `None` at the end.
    fn part(&self, at: usize, cuts: &Cuts) -> Option<Written<'_>> {
        let rest = self.text.get(at..).filter(|rest| !rest.is_empty())?;
        Some(match self.escaped {
            false => Written::Plain(rest.get(..cuts.first(rest)).unwrap_or(rest)),
            true => Written::Escaped(rest.get(..cuts.first_escaped(rest)).unwrap_or(rest)),
        })
    }
}

/// The mark of a field and its ids, or else the text that they are made of.
fn begin<'p>(field: &Field<'p>, ids: &mut Vec<u32>) -> Source<'p> {
    ids.push(field.mark.id());
    match field.body {
        Body::Media(kind, reference) => ids.extend(media_ids(kind, reference)),
        Body::Tokens(given) => ids.extend_from_slice(given),
        Body::Text(text) => return text.into(),
        Body::Nothing | Body::Name(_) | Body::Json(_) => return Source { text: field.content(), escaped: false },
    }
    Source::default()
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

/// The end of a prompt whose body is gone: less than a block of ids. What the server generates goes on from here.
#[derive(Clone, Debug)]
pub struct TokenTail {
    chain: Chain,
    in_text: bool,
}

impl TokenTail {
    /// Full blocks up to here.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.chain.made()
    }

    /// Adds a whole message as the next turn will present it, or, without a role, more of a bare prompt; the one token where a bare
    /// prompt and its answer meet may then differ from the next turn's. Keys of blocks that are full now go to `out`.
    ///
    /// # Errors
    /// When the text can't be encoded; nothing has changed then.
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
