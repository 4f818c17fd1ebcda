//! The beginning of a prompt as a chain of hashes, one per block of bytes.

use crate::messages::{messages, texts};
use attache_protocol::Prompt;
use attache_protocol::prompt::Piece;
use attache_scheduling::digest::Digest;
use std::borrow::Cow;
use xxhash_rust::xxh64::{Xxh64, xxh64};

/// One hash per block; each identifies the prompt from its start to the end of that block.
pub(crate) type Chain = Digest;

/// Hashes block by block: `h[-1] = xxh64(model)`, then `h[i] = xxh64(h[i-1] little-endian, block i)`.
struct Chainer {
    window: usize,
    depth: usize,
    previous: u64,
    block: Xxh64,
    filled: usize,
    chain: Chain,
}

impl Chainer {
    fn new(model: &str, window: usize, depth: usize) -> Self {
        let previous = of_model(model);
        let mut chainer = Self { window, depth, previous, block: Xxh64::new(0), filled: 0, chain: Chain::new() };
        chainer.begin_block();
        chainer
    }

    fn begin_block(&mut self) {
        self.block.reset(0);
        self.block.update(&self.previous.to_le_bytes());
        self.filled = 0;
    }

    fn end_block(&mut self) {
        self.previous = self.block.digest();
        self.chain.push(self.previous);
        self.begin_block();
    }

    fn write(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() && self.chain.len() < self.depth {
            let (now, later) = bytes.split_at(bytes.len().min(self.window - self.filled));
            self.block.update(now);
            self.filled += now.len();
            bytes = later;
            if self.filled == self.window {
                self.end_block();
            }
        }
    }

    /// The last block may be a partial one.
    fn finish(mut self) -> Chain {
        if self.filled > 0 && self.chain.len() < self.depth {
            self.end_block();
        }
        self.chain
    }
}

/// Hash of the model's name, which every chain of that model starts from.
pub(super) fn of_model(model: &str) -> u64 {
    xxh64(model.as_bytes(), 0)
}

/// The chain of a prompt's first `depth` blocks of `window` bytes; empty if the prompt has no bytes to hash.
pub(crate) fn of_prompt(model: &str, prompt: &Prompt<'_>, window: usize, depth: usize) -> Chain {
    let mut chainer = Chainer::new(model, window, depth);
    let mut message = |role: &str, content: &mut dyn Iterator<Item = Cow<'_, str>>| {
        chainer.write(role.as_bytes());
        chainer.write(b"\n");
        content.for_each(|text| chainer.write(text.as_bytes()));
        chainer.write(b"\n");
    };
    if texts(&prompt.system).next().is_some() {
        message("system", &mut texts(&prompt.system));
    }
    for m in messages(prompt) {
        message(m.role, &mut m.texts());
    }
    if messages(prompt).next().is_none() {
        texts(&prompt.pieces).for_each(|text| chainer.write(text.as_bytes()));
        for piece in &prompt.pieces {
            if let Piece::Tokens(ids) = piece {
                // No more ids than the chain can hold are hashed.
                ids.iter().take(window.saturating_mul(depth)).for_each(|id| chainer.write(&id.to_le_bytes()));
            }
        }
    }
    chainer.finish()
}
