//! A tokenizer without a vocabulary: blocks of bytes of the canonical stream.
//!
//! It loads nothing, cannot fail, and hashes most blocks in place in the request's body. It finds the same common
//! prefixes as the server does, to within a block, for prompts of any length. Its keys do not match the server's own
//! blocks: KV events need real tokens. A prompt of token ids is divided into blocks of ids instead.

use crate::blocks::{Chain, DEFAULT_BLOCK_TOKENS, le_bytes};
use crate::pieces::{Mark, Pieces, PromptForm, StreamField, Volatile};
use attache_prefix::block_size::BlockSize;
use attache_prefix::cache::CHARACTERS_PER_TOKEN;
use attache_prefix::key::{BlockKey, BlockKeys, KeySpace};
use attache_protocol::prompt::Prompt;
use attache_protocol::text::canonical;
use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Bytes of text per token, so that depths are about equal to the engine's blocks.
pub(crate) const DEFAULT_TOKEN_BYTES: NonZeroUsize = NonZeroUsize::new(CHARACTERS_PER_TOKEN as usize).unwrap();

/// Makes keys of prompts from their bytes.
#[derive(Clone, Debug)]
pub struct Characters {
    /// Key space of the pool.
    pub space: KeySpace,
    /// Tokens in a block: ids of a prompt of token ids, or what text stands for.
    pub block_size: Arc<BlockSize>,
    /// Bytes of text that count as one token.
    pub token_bytes: NonZeroUsize,
    /// Parts of a prompt that are left out of the keys.
    pub volatile: Volatile,
}

impl Characters {
    /// Creates a key maker with default settings.
    #[must_use]
    pub fn new(space: KeySpace) -> Self {
        Self {
            space,
            block_size: Arc::new(BlockSize::given(DEFAULT_BLOCK_TOKENS.get() as u32)),
            token_bytes: DEFAULT_TOKEN_BYTES,
            volatile: Volatile::default(),
        }
    }

    /// Returns the bytes of text in a block.
    fn block_bytes(&self) -> NonZeroUsize {
        self.block_size.at_least_one().saturating_mul(self.token_bytes)
    }

    /// Returns the text of each complete block of `prompt` for display, with marks by their names; `None` for
    /// a prompt of token ids.
    #[must_use]
    pub fn blocks_as_text(&self, prompt: &Prompt<'_>) -> Option<Vec<String>> {
        let pieces = Pieces::new(prompt, &self.volatile);
        if let PromptForm::Ids(_) = pieces.shape() {
            return None;
        }
        let show = |block: &[u8]| block.utf8_chunks().map(|c| c.valid().to_owned() + &marks(c.invalid())).collect();
        Some(pieces.to_bytes().chunks_exact(self.block_bytes().get()).map(show).collect())
    }

    /// Returns the keys of `prompt` under `root` ([`KeySpace::root`]), made as they are requested.
    #[must_use]
    pub fn keys<'p>(&self, prompt: &'p Prompt<'_>, root: u64) -> CharacterKeys<'p> {
        let pieces = Pieces::new(prompt, &self.volatile);
        let left_out = pieces.left_out_bytes();
        let (current, fields, block, tail) = match pieces.shape() {
            PromptForm::Ids(ids) => {
                let block = self.block_size.at_least_one().saturating_mul(ID_BYTES);
                (le_bytes(ids), Vec::new(), block, After::Ids)
            }
            PromptForm::Bare(_) | PromptForm::Framed => {
                let after = if pieces.ends_in_text() { After::Text } else { After::StreamField };
                (Cow::Borrowed([].as_slice()), pieces.fields, self.block_bytes(), after)
            }
        };
        let (chain, fields) = (Chain::new(self.space, root, block), fields.into_iter());
        CharacterKeys { fields, current, at: 0, chain, keys: Vec::new(), tail, left_out }
    }
}

/// Returns the names of the marks in bytes that are not text; other such bytes belong to a character at
/// the border of a block.
fn marks(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|b| Mark::ALL.iter().find(|m| m.byte() == *b).map_or("\u{fffd}".to_owned(), |m| m.shown()))
        .collect()
}

const ID_BYTES: NonZeroUsize = NonZeroUsize::new(size_of::<u32>()).unwrap();

/// The part of a prompt that a response follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// Text: more text without a role continues it.
    Text,
    /// Any other field, which text cannot continue.
    StreamField,
    /// Token ids, which text cannot follow.
    Ids,
}

/// The keys of one prompt.
#[derive(Debug)]
pub struct CharacterKeys<'p> {
    fields: std::vec::IntoIter<StreamField<'p>>,
    /// The bytes that are being read, and the position in them.
    current: Cow<'p, [u8]>,
    at: usize,
    chain: Chain,
    keys: Vec<BlockKey>,
    tail: After,
    left_out: u64,
}

impl CharacterKeys<'_> {
    /// Returns the bytes of text that were left out as volatile.
    #[must_use]
    pub fn left_out_bytes(&self) -> u64 {
        self.left_out
    }

    /// Returns all keys, and the state to continue them with the response. `None` for a prompt of token ids,
    /// since the response is text.
    #[must_use]
    pub fn finish(mut self) -> (Vec<BlockKey>, Option<CharacterTail>) {
        self.upto(usize::MAX);
        let tail = match self.tail {
            After::Ids => None,
            after => Some(CharacterTail { chain: self.chain, in_text: after == After::Text }),
        };
        (self.keys, tail)
    }
}

impl BlockKeys for CharacterKeys<'_> {
    fn upto(&mut self, n: usize) -> &[BlockKey] {
        while self.keys.len() < n {
            let rest = self.current.get(self.at..).unwrap_or_default();
            if !rest.is_empty() {
                self.at += self.chain.feed(rest, n, &mut self.keys);
            } else if let Some(field) = self.fields.next() {
                self.chain.feed(&[field.mark.byte()], n, &mut self.keys);
                self.current = match field.content() {
                    Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
                    Cow::Owned(text) => Cow::Owned(text.into_bytes()),
                };
                self.at = 0;
            } else {
                break;
            }
        }
        &self.keys
    }
}

/// The end of a prompt whose body was dropped: at most one block of bytes. The text of the response continues it.
#[derive(Clone, Debug)]
pub struct CharacterTail {
    chain: Chain,
    in_text: bool,
}

impl CharacterTail {
    /// Returns the number of complete blocks so far.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.chain.made()
    }

    /// Begins the next message in the form of the next turn. Appends keys of blocks that are complete now to `out`.
    pub fn role(&mut self, role: &str, out: &mut Vec<BlockKey>) {
        self.field(Mark::Role, role, out);
        self.in_text = false;
    }

    /// Appends text to the message, or to a bare prompt, in parts of any size. Appends keys of blocks that
    /// are complete now to `out`.
    pub fn text(&mut self, part: &str, out: &mut Vec<BlockKey>) {
        let part = canonical(part);
        if self.in_text {
            self.chain.feed(part.as_bytes(), usize::MAX, out);
        } else {
            self.field(Mark::Text, &part, out);
            self.in_text = true;
        }
    }

    fn field(&mut self, mark: Mark, content: &str, out: &mut Vec<BlockKey>) {
        self.chain.feed(&[mark.byte()], usize::MAX, out);
        self.chain.feed(content.as_bytes(), usize::MAX, out);
    }
}

#[cfg(test)]
mod tests;
