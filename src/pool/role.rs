//! What an endpoint is there for: the encoding of media, the prefill of prompts, the answers themselves.
//!
//! Read from its labels: llm-d's `llm-d.ai/role`, else AIBrix's `role-name`. An endpoint without either does everything on its own and is
//! never given a prompt whose answer another server makes, as in llm-d. Of AIBrix's servers over several machines only the first one
//! (`pod-group-index` 0) speaks HTTP; the others are there for nothing.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// llm-d's label.
pub const ROLE_LABEL: &str = "llm-d.ai/role";
/// AIBrix's label.
pub const AIBRIX_ROLE_LABEL: &str = "role-name";
/// Which machine of a server of several machines it is.
pub const AIBRIX_GROUP_INDEX_LABEL: &str = "stormservice.orchestration.aibrix.ai/pod-group-index";
/// AIBrix's label of a server that does both stages on its own, with the value `true`.
pub const COMBINED_LABEL: &str = "combined";

/// The words that [`ROLE_LABEL`] may have, and what each is there for.
const WORDS: &[(&str, Roles)] = &[
    ("decode", Roles::DECODE),
    ("prefill", Roles::PREFILL),
    ("both", Roles::PREFILL.and(Roles::DECODE)),
    ("prefill-decode", Roles::PREFILL.and(Roles::DECODE)),
    ("encode", Roles::ENCODE),
    ("encode-prefill", Roles::ENCODE.and(Roles::PREFILL)),
    ("encode-decode", Roles::ENCODE.and(Roles::DECODE)),
    ("encode-prefill-decode", Roles::ENCODE.and(Roles::PREFILL).and(Roles::DECODE)),
];

/// A set of roles.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Roles(u8);

impl Roles {
    /// None: it gets nothing.
    pub const NONE: Self = Self(0);
    /// Turns images and sounds into embeddings.
    pub const ENCODE: Self = Self(1);
    /// Computes prompts whose answers other servers make.
    pub const PREFILL: Self = Self(2);
    /// Makes answers, of prompts that it computes itself or receives.
    pub const DECODE: Self = Self(4);

    /// See [`Roles::kind`].
    pub const KINDS: usize = 3;

    /// Servers of different kinds are busy each on its own: 0 for those that serve whole requests and make answers, 1 for those that compute
    /// prompts for others, 2 for those that do both.
    #[must_use]
    pub const fn kind(self) -> usize {
        match (self.has(Self::PREFILL), self.has(Self::DECODE)) {
            (true, false) => 1,
            (true, true) => 2,
            _ => 0,
        }
    }

    /// What either is there for.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether all of `roles` are among them.
    #[must_use]
    pub const fn has(self, roles: Self) -> bool {
        self.0 & roles.0 == roles.0
    }

    /// What a role label's word means; `None` for a word that nobody knows.
    #[must_use]
    pub fn of_word(word: &str) -> Option<Self> {
        WORDS.iter().find(|(name, _)| *name == word).map(|(_, roles)| *roles)
    }

    /// All words, for messages.
    #[must_use]
    pub fn words() -> Vec<&'static str> {
        WORDS.iter().map(|(word, _)| *word).collect()
    }

    /// The roles of an endpoint with these labels. A word that nobody knows is no role at all: what such a server is for, it is not
    /// for everything.
    #[must_use]
    pub fn of_labels(labels: &BTreeMap<Arc<str>, Arc<str>>) -> Self {
        let label = |name: &str| labels.get(name).map(|value| &**value);
        if let Some(word) = label(ROLE_LABEL) {
            return Self::of_word(word).unwrap_or(Self::NONE);
        }
        if label(AIBRIX_GROUP_INDEX_LABEL).is_some_and(|index| index != "0") {
            return Self::NONE;
        }
        match label(AIBRIX_ROLE_LABEL) {
            Some("prefill") => Self::PREFILL,
            // Other roles of a StormService are names of the operator's own.
            _ => Self::DECODE,
        }
    }
}

impl fmt::Display for Roles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = [(Self::ENCODE, "encode"), (Self::PREFILL, "prefill"), (Self::DECODE, "decode")];
        let held: Vec<&str> = named.iter().filter(|(role, _)| self.has(*role)).map(|(_, name)| *name).collect();
        f.write_str(if held.is_empty() { "none".to_owned() } else { held.join("-") }.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(labels: &[(&str, &str)]) -> String {
        let labels = labels.iter().map(|(k, v)| ((*k).into(), (*v).into())).collect();
        Roles::of_labels(&labels).to_string()
    }

    #[test]
    fn labels_say_what_an_endpoint_is_there_for() {
        for (labels, roles) in [
            (&[][..], "decode"),
            (&[(ROLE_LABEL, "decode")], "decode"),
            (&[(ROLE_LABEL, "prefill")], "prefill"),
            (&[(ROLE_LABEL, "both")], "prefill-decode"),
            (&[(ROLE_LABEL, "prefill-decode")], "prefill-decode"),
            (&[(ROLE_LABEL, "encode")], "encode"),
            (&[(ROLE_LABEL, "encode-prefill")], "encode-prefill"),
            (&[(ROLE_LABEL, "encode-decode")], "encode-decode"),
            (&[(ROLE_LABEL, "encode-prefill-decode")], "encode-prefill-decode"),
            (&[(ROLE_LABEL, "Prefill")], "none"),
            (&[(AIBRIX_ROLE_LABEL, "prefill")], "prefill"),
            (&[(AIBRIX_ROLE_LABEL, "decode")], "decode"),
            (&[(AIBRIX_ROLE_LABEL, "worker")], "decode"),
            (&[(AIBRIX_ROLE_LABEL, "prefill"), (AIBRIX_GROUP_INDEX_LABEL, "0")], "prefill"),
            (&[(AIBRIX_ROLE_LABEL, "prefill"), (AIBRIX_GROUP_INDEX_LABEL, "1")], "none"),
            (&[(ROLE_LABEL, "both"), (AIBRIX_ROLE_LABEL, "prefill")], "prefill-decode"),
        ] {
            assert_eq!(of(labels), roles, "{labels:?}");
        }
    }
}
