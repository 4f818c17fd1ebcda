//! Hides hashes of text and of user names from readers of the bus that do not have the cluster's key. It is a Feistel
//! network, so that each value has one sealed form and no two share one.

use crate::paths::mix;

const ROUNDS: u64 = 4;

fn round(seed: u64, half: u64, number: u64) -> u64 {
    mix(seed ^ mix(half | (number + 1) << 32)) >> 32
}

/// The sealed form of `value`.
pub(crate) fn seal(seed: u64, value: u64) -> u64 {
    let halves = (value >> 32, value & 0xFFFF_FFFF);
    let (left, right) = (0..ROUNDS).fold(halves, |(left, right), i| (right, left ^ round(seed, right, i)));
    left << 32 | right
}

/// The value of a sealed form.
pub(crate) fn unseal(seed: u64, sealed: u64) -> u64 {
    let halves = (sealed >> 32, sealed & 0xFFFF_FFFF);
    let (left, right) = (0..ROUNDS).rev().fold(halves, |(left, right), i| (right ^ round(seed, left, i), left));
    left << 32 | right
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn sealed_value_is_read_with_the_same_key_only(seed: u64, other: u64, value: u64) {
            let sealed = seal(seed, value);
            prop_assert_eq!(unseal(seed, sealed), value);
            prop_assert!(sealed != value && (seed == other || unseal(other, sealed) != value));
        }
    }
}
