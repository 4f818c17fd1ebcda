//! Identities of pickers on the bus, which belong to the name of the picker.
//!
//! A sender has 64 bits: a hash of the picker's name, then random bits of the process. The transport puts the name and
//! the sender in the subject of each message, so permissions for subjects decide which names a client can use.
//! Receivers drop messages whose sender does not have the hash of the name. Pure.

use xxhash_rust::xxh3::xxh3_64;

/// The name of a picker as one token of a subject: other characters than letters, digits, `-` and `_` become `=` and
/// two hexadecimal digits for each byte.
#[must_use]
pub fn token_of(name: &str) -> String {
    let mut token = String::with_capacity(name.len());
    for byte in name.bytes() {
        if byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_' {
            token.push(char::from(byte));
        } else {
            token.push_str(&format!("={byte:02X}"));
        }
    }
    token
}

/// The identity of a process of the picker with this token, from random bits.
#[must_use]
pub fn sender_of(token: &str, random: u64) -> u64 {
    u64::from(hash(token)) << 32 | random & 0xFFFF_FFFF
}

/// Whether `sender` is a process of the picker with this token.
#[must_use]
pub fn is_sender_of(token: &str, sender: u64) -> bool {
    member_of(sender) == hash(token)
}

/// The picker that a sender is a process of.
pub(crate) fn member_of(sender: u64) -> u32 {
    (sender >> 32) as u32
}

/// At least 1, so that no sender is 0.
fn hash(token: &str) -> u32 {
    (xxh3_64(token.as_bytes()) as u32).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sender_belongs_to_one_name() {
        let (a, b) = (token_of("epp-0"), token_of("epp-1"));
        let sender = sender_of(&a, u64::MAX);
        assert!(is_sender_of(&a, sender) && !is_sender_of(&b, sender));
        assert!(is_sender_of(&a, sender_of(&a, 0)) && sender_of(&a, 0) != sender);
    }

    #[test]
    fn token_has_no_separators_and_wildcards_and_is_unique() {
        assert_eq!(token_of("llm-epp-7d9_X"), "llm-epp-7d9_X");
        assert_eq!(token_of("a.b *>\n="), "a=2Eb=20=2A=3E=0A=3D");
        assert_eq!(token_of("é"), "=C3=A9");
        assert_ne!(token_of("a.b"), token_of("a=2Eb"));
    }
}
