//! The tokenizer that needs nothing: blocks of bytes of the canonical stream.
//!
//! Nothing is loaded, nothing can fail, and most blocks are hashed where they lie in the request's body. It sees as much of a prefix as
//! the server does to within a block, and as deep as the prompt is long. What it can't do is name the server's own blocks: KV events need
//! real tokens. A prompt of token ids is cut into blocks of ids instead.

use crate::blocks::{Chain, DEFAULT_BLOCK_TOKENS, le_bytes};
use crate::pieces::{Field, Mark, Pieces, Shape, Volatile};
use attache_prefix::block_size::BlockSize;
use attache_prefix::cache::CHARACTERS_PER_TOKEN;
use attache_prefix::key::{BlockKey, BlockKeys, KeySpace};
use attache_protocol::prompt::Prompt;
use attache_protocol::text::canonical;
use std::borrow::Cow;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// So that depths come in about the engine's own blocks.
pub const DEFAULT_TOKEN_BYTES: NonZeroUsize = NonZeroUsize::new(CHARACTERS_PER_TOKEN as usize).unwrap();

/// Makes keys of prompts, byte by byte.
#[derive(Clone, Debug)]
pub struct Characters {
    /// What the keys are made in.
    pub space: KeySpace,
    /// Tokens in a block: ids of a prompt that is token ids, or what text stands for.
    pub block_size: Arc<BlockSize>,
    /// Bytes of text that stand for a token.
    pub token_bytes: NonZeroUsize,
    /// What is left out.
    pub volatile: Volatile,
}

impl Characters {
    /// With every default.
    #[must_use]
    pub fn new(space: KeySpace) -> Self {
        Self {
            space,
            block_size: Arc::new(BlockSize::given(DEFAULT_BLOCK_TOKENS.get() as u32)),
            token_bytes: DEFAULT_TOKEN_BYTES,
            volatile: Volatile::default(),
        }
    }

    /// Bytes of text in a block.
    fn block_bytes(&self) -> NonZeroUsize {
        self.block_size.at_least_one().saturating_mul(self.token_bytes)
    }

    /// The text of each full block of `prompt`, marks shown by their names, for people to look at; `None` for a prompt of token ids.
    #[must_use]
    pub fn blocks_as_text(&self, prompt: &Prompt<'_>) -> Option<Vec<String>> {
        let pieces = Pieces::new(prompt, &self.volatile);
        if let Shape::Ids(_) = pieces.shape() {
            return None;
        }
        let show = |block: &[u8]| block.utf8_chunks().map(|c| c.valid().to_owned() + &marks(c.invalid())).collect();
        Some(pieces.to_bytes().chunks_exact(self.block_bytes().get()).map(show).collect())
    }

    /// The keys of `prompt` under `root` ([`KeySpace::root`]), made as far as they are asked for.
    #[must_use]
    pub fn keys<'p>(&self, prompt: &'p Prompt<'_>, root: u64) -> CharacterKeys<'p> {
        let pieces = Pieces::new(prompt, &self.volatile);
        let left_out = pieces.left_out_bytes();
        let (current, fields, block, tail) = match pieces.shape() {
            Shape::Ids(ids) => {
                let block = self.block_size.at_least_one().saturating_mul(ID_BYTES);
                (le_bytes(ids), Vec::new(), block, After::Ids)
            }
            Shape::Bare(_) | Shape::Framed => {
                let after = if pieces.ends_in_text() { After::Text } else { After::Field };
                (Cow::Borrowed([].as_slice()), pieces.fields, self.block_bytes(), after)
            }
        };
        let (chain, fields) = (Chain::new(self.space, root, block), fields.into_iter());
        CharacterKeys { fields, current, at: 0, chain, keys: Vec::new(), tail, left_out }
    }
}

/// The names of the marks in bytes that are no text; other such bytes belong to a character that the border of a block cuts.
fn marks(bytes: &[u8]) -> String {
    bytes
        .iter()
        .map(|b| Mark::ALL.iter().find(|m| m.byte() == *b).map_or("\u{fffd}".to_owned(), |m| m.shown()))
        .collect()
}

const ID_BYTES: NonZeroUsize = NonZeroUsize::new(size_of::<u32>()).unwrap();

/// What an answer follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// Text: more text without a role goes on from it.
    Text,
    /// Any other field.
    Field,
    /// Token ids: text can't follow.
    Ids,
}

/// The keys of one prompt.
#[derive(Debug)]
pub struct CharacterKeys<'p> {
    fields: std::vec::IntoIter<Field<'p>>,
    /// What is being read, and how far it is.
    current: Cow<'p, [u8]>,
    at: usize,
    chain: Chain,
    keys: Vec<BlockKey>,
    tail: After,
    left_out: u64,
}

impl CharacterKeys<'_> {
    /// Bytes of text that were left out as volatile.
    #[must_use]
    pub fn left_out_bytes(&self) -> u64 {
        self.left_out
    }

    /// All keys, and what is needed to go on from them when the answer is known. `None` for a prompt of token ids: the answer is text.
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

/// The end of a prompt whose body is gone: at most one block of bytes. What the server generates goes on from here.
#[derive(Clone, Debug)]
pub struct CharacterTail {
    chain: Chain,
    in_text: bool,
}

impl CharacterTail {
    /// Full blocks up to here.
    #[must_use]
    pub fn blocks(&self) -> usize {
        self.chain.made()
    }

    /// The next message begins, as the next turn will present it. Keys of blocks that are full now go to `out`.
    pub fn role(&mut self, role: &str, out: &mut Vec<BlockKey>) {
        self.field(Mark::Role, role, out);
        self.in_text = false;
    }

    /// More text: of the message, or of the prompt when it was bare. May come in any parts. Keys of blocks that are full now go to `out`.
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
