//! Prompts as ids of their blocks, where ids count up: neighbouring ids become one piece of a text.

use crate::names::name_of_block;
use attache_sim::content::{Piece, mix};

/// The first `tokens` of the blocks `ids` of the text `text`; each id stands for `block` tokens.
///
/// Id `n` is the tokens from `n * block` on, so that a prompt of a thousand blocks has a few pieces. Ids too large for
/// that are texts of their own.
pub(super) fn pieces(text: u64, ids: &[u64], block: u32, tokens: u32) -> Vec<Piece> {
    let mut pieces: Vec<Piece> = Vec::new();
    let mut rest = tokens;
    for id in ids {
        let length = rest.min(block);
        rest -= length;
        let from = u32::try_from(id.saturating_mul(block.into())).ok().filter(|from| *from <= u32::MAX - block);
        let piece = match from {
            Some(from) => Piece { name: text, from, tokens: length },
            None => Piece::new(mix(text ^ name_of_block(*id)), length),
        };
        match pieces.last_mut() {
            Some(last) if last.name == piece.name && last.from + last.tokens == piece.from => last.tokens += length,
            _ if length > 0 => pieces.push(piece),
            _ => {}
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_ids_are_one_piece() {
        let text = |from, tokens| Piece { name: 7, from, tokens };
        assert_eq!(pieces(7, &[1, 2, 3, 9, 10], 64, 300), [text(64, 192), text(576, 108)]);
        assert_eq!(pieces(7, &[0], 64, 64), [text(0, 64)]);
        let large = pieces(7, &[u64::MAX - 1, u64::MAX], 16, 32);
        assert_eq!(large.iter().map(|piece| (piece.from, piece.tokens)).collect::<Vec<_>>(), [(0, 16), (0, 16)]);
        assert_ne!(large[0].name, large[1].name);
        assert_ne!(large[0].name, pieces(8, &[u64::MAX - 1], 16, 16)[0].name, "texts are apart");
    }
}
