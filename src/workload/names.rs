//! Names of texts that are made up: equal arguments give equal names, all others differ.
//!
//! Called by `replay::trace` and `replay::synthetic`. Pure.

use attache_sim::content::mix;

/// What a text is. Names of different kinds never meet, nor do two numbers of one kind below [`NUMBERS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum TextKind {
    /// A block of a trace, by its id.
    Block = 1,
    /// A block of a trace, by an id that is itself a hash.
    HashedBlock,
    /// The part of a prompt that no other request has.
    Prompt,
    /// The answer to a request.
    Answer,
    /// Instructions and tools that all requests of a workload or a group share.
    System,
    /// Instructions that one conversation keeps.
    Dynamic,
    /// A question that may be asked again.
    Question,
    /// The first lines of a prompt that change with every request.
    Volatile,
    /// A document or a file that prompts quote.
    Document,
    /// All that one recorded session has in its prompts, behind tools and instructions.
    Session,
    /// Definitions of tools that sessions share.
    Tools,
}

/// Numbers of one kind that have names of their own.
pub const NUMBERS: u64 = 1 << 56;

/// The name of text `number` (below [`NUMBERS`]) of a kind under `seed`.
#[must_use]
pub fn name(seed: u64, kind: TextKind, number: u64) -> u64 {
    // The kind sits above the numbers, and both `^` and `mix` are bijections: nothing can fall together.
    mix(((kind as u64) << 56 | (number & (NUMBERS - 1))) ^ mix(seed))
}

/// The name of text `second` of `first`, for texts that are counted in two steps: `second` is
/// below 2^20, `first` below 2^36.
#[must_use]
pub fn name_of_pair(seed: u64, kind: TextKind, first: u64, second: u64) -> u64 {
    name(seed, kind, first << 20 | (second & ((1 << 20) - 1)))
}

/// The name of a block that a trace calls `id`. Ids that are hashes themselves (2^56 and more) keep 56 bits.
#[must_use]
pub fn name_of_block(id: u64) -> u64 {
    if id < NUMBERS { name(0, TextKind::Block, id) } else { name(0, TextKind::HashedBlock, mix(id)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn kinds_numbers_and_seeds_differ() {
        let kinds = [
            TextKind::Block,
            TextKind::HashedBlock,
            TextKind::Prompt,
            TextKind::Answer,
            TextKind::System,
            TextKind::Document,
        ];
        let mut seen = HashSet::new();
        for kind in kinds {
            for number in (0..1_000).chain([NUMBERS - 1]) {
                assert!(seen.insert(name(7, kind, number)), "{kind:?} {number}");
                assert_ne!(name(7, kind, number), name(8, kind, number));
            }
        }
        assert!(
            seen.insert(name_of_pair(7, TextKind::Question, 1, 0))
                && seen.insert(name_of_pair(7, TextKind::Question, 0, 1))
        );
        assert_eq!(name_of_block(5), name(0, TextKind::Block, 5));
        assert_ne!(name_of_block(u64::MAX), name_of_block(u64::MAX - 1));
    }
}
