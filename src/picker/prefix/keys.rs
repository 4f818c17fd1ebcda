//! The block keys of one prompt, whichever way they are computed.

use super::{DEFAULT_INLINE_BYTES, Tail};
use crate::known::KnownBlocks;
use attache_prefix::key::{BlockKey, BlockKeys};
use attache_prompt::blocks::TokenKeys;
use attache_prompt::characters::CharacterKeys;

/// The block keys of one prompt, computed on demand.
#[derive(Debug)]
pub enum PromptKeys<'p> {
    /// Of blocks of text.
    Characters(CharacterKeys<'p>),
    /// Of blocks of tokens.
    Tokens(TokenKeys<'p>),
    /// Of a prompt that is known without its text.
    Known(KnownBlocks<'p>),
}

impl PromptKeys<'_> {
    /// The same keys, limited to what may be computed on the serving thread: at most [`DEFAULT_INLINE_BYTES`] of new
    /// text are encoded.
    #[must_use]
    pub fn inline_only(self) -> Self {
        match self {
            Self::Characters(_) | Self::Known(_) => self,
            Self::Tokens(keys) => Self::Tokens(keys.with_cold_bytes(DEFAULT_INLINE_BYTES)),
        }
    }

    /// Whether keys are missing because of the limit of [`PromptKeys::inline_only`].
    #[must_use]
    pub fn is_cold(&self) -> bool {
        match self {
            Self::Characters(_) => false,
            Self::Tokens(keys) => keys.is_cold(),
            Self::Known(blocks) => blocks.cold,
        }
    }

    /// Whether keys are missing because the prompt exceeds the limit of encoded text.
    #[must_use]
    pub fn is_cut(&self) -> bool {
        match self {
            Self::Characters(_) => false,
            Self::Tokens(keys) => keys.is_cut(),
            Self::Known(blocks) => blocks.cut,
        }
    }

    /// The number of tokens of the prompt so far, and the bytes of text that were not tokenized. `None` for blocks of
    /// text, and for a prompt that is too long.
    #[must_use]
    pub fn length(&self) -> Option<(u64, u64)> {
        match self {
            Self::Characters(_) => None,
            Self::Tokens(keys) => keys.length(),
            Self::Known(blocks) => blocks.tokens.map(|tokens| (tokens.into(), 0)),
        }
    }

    /// All keys that can be computed, whether they cover the whole prompt, and its incomplete last block.
    #[must_use]
    pub fn finish(self) -> (Vec<BlockKey>, bool, Option<Tail>) {
        match self {
            Self::Characters(keys) => {
                let (keys, tail) = keys.finish();
                (keys, true, tail.map(Tail::Characters))
            }
            Self::Tokens(keys) => {
                let (keys, tail) = keys.finish();
                (keys, tail.is_ok(), tail.ok().map(Tail::Tokens))
            }
            Self::Known(blocks) => (blocks.keys.to_vec(), !blocks.cut, None),
        }
    }

    /// The keys computed so far.
    #[must_use]
    pub fn made(mut self) -> Vec<BlockKey> {
        self.upto(0).to_vec()
    }
}

impl BlockKeys for PromptKeys<'_> {
    fn upto(&mut self, n: usize) -> &[BlockKey] {
        match self {
            Self::Characters(keys) => keys.upto(n),
            Self::Tokens(keys) => keys.upto(n),
            Self::Known(blocks) => blocks.upto(n),
        }
    }
}
