//! The messages of a prompt as texts, for strategies whose keys are made of text.

use attache_protocol::Prompt;
use attache_protocol::prompt::Piece;
use std::borrow::Cow;

/// One message: its role, empty where there is none, and what follows it.
#[derive(Clone, Copy, Debug)]
pub struct Message<'p> {
    /// `user`, `system`, …
    pub role: &'p str,
    pieces: &'p [Piece<'p>],
}

impl<'p> Message<'p> {
    /// Its texts, which follow each other without anything between them.
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

/// The messages of `prompt`. What stands before the first role (a prompt without messages) is none.
pub fn messages<'p>(prompt: &'p Prompt<'p>) -> impl Iterator<Item = Message<'p>> {
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
        Some(Message { role, pieces })
    })
}

/// Everything that is text or token ids in `prompt`, roles included, in order: for prompts that a key has no rule for. Token ids come as
/// four little-endian bytes each. Says whether there was anything but roles.
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
