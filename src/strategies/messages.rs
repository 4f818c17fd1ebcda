//! The messages of a prompt as texts, for strategies whose keys are made of text.

use attache_protocol::Prompt;
use attache_protocol::prompt::Piece;
use std::borrow::Cow;

/// One chat message: its role and its content.
#[derive(Clone, Copy, Debug)]
pub struct ChatMessage<'p> {
    /// `user`, `system`, …
    pub role: &'p str,
    pieces: &'p [Piece<'p>],
}

impl<'p> ChatMessage<'p> {
    /// The text parts of the message, in order. They are hashed without a separator.
    pub fn texts(self) -> impl Iterator<Item = Cow<'p, str>> {
        texts(self.pieces)
    }
}

/// The texts among `pieces`.
pub fn texts<'p>(pieces: &'p [Piece<'p>]) -> impl Iterator<Item = Cow<'p, str>> {
    pieces.iter().filter_map(|p| match p {
        Piece::Text(text) => Some(text.get()),
        _ => None,
    })
}

/// The chat messages of `prompt`, in order. Pieces before the first role are skipped, so a completion prompt yields
/// no message.
pub fn messages<'p>(prompt: &'p Prompt<'p>) -> impl Iterator<Item = ChatMessage<'p>> {
    let mut rest = prompt.pieces.as_slice();
    std::iter::from_fn(move || {
        let (role, after) = rest.iter().enumerate().find_map(|(i, p)| match p {
            Piece::Role(role) => Some((&**role, i + 1)),
            _ => None,
        })?;
        let following = rest.get(after..).unwrap_or_default();
        let length = following.iter().position(|p| matches!(p, Piece::Role(_))).unwrap_or(following.len());
        let (pieces, left) = following.split_at(length);
        rest = left;
        Some(ChatMessage { role, pieces })
    })
}

/// Passes every role, text, media reference, tool call and token id of `prompt` to `to`, in order. Keys use it for
/// prompts that their own rule does not cover.
/// Each token id is four little-endian bytes. Returns whether there was anything besides roles.
pub fn everything(prompt: &Prompt<'_>, mut to: impl FnMut(&[u8])) -> bool {
    let mut any = false;
    for piece in prompt.system.iter().chain(&prompt.pieces) {
        match piece {
            Piece::Text(text) => {
                to(text.get().as_bytes());
                any |= !text.is_empty();
            }
            Piece::Role(role) => to(role.as_bytes()),
            Piece::Media { reference, .. } => {
                to(reference.as_bytes());
                any = true;
            }
            Piece::ToolCall(json) => {
                to(json.as_bytes());
                any = true;
            }
            Piece::Tokens(ids) => {
                for id in ids {
                    to(&id.to_le_bytes());
                    any = true;
                }
            }
            Piece::Label(_) => {}
        }
    }
    any
}
