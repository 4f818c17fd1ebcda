//! Roles of an endpoint: encoding media, prefill, decode.
//!
//! They are read from labels: llm-d's `llm-d.ai/role`, else AIBrix's `role-name`. An endpoint without either serves
//! whole requests and is never used as a prefill worker for another server, as in llm-d. Of an AIBrix server on several
//! machines, only the first one (`pod-group-index` 0) serves HTTP; the others have no role.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// llm-d's label for roles.
pub const ROLE_LABEL: &str = "llm-d.ai/role";
/// AIBrix's label for roles.
pub const AIBRIX_ROLE_LABEL: &str = "role-name";
/// AIBrix's label for the number of a machine in a server of several machines.
pub(crate) const AIBRIX_GROUP_INDEX_LABEL: &str = "stormservice.orchestration.aibrix.ai/pod-group-index";
/// AIBrix's label of a server that does both prefill and decode itself, with the value `true`.
pub const COMBINED_LABEL: &str = "combined";

/// The values of [`ROLE_LABEL`] and the roles that they stand for.
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
    /// No role: the endpoint gets no requests.
    pub const NONE: Self = Self(0);
    /// Encodes images and audio into embeddings.
    pub const ENCODE: Self = Self(1);
    /// Computes prompts (prefill) for other servers.
    pub const PREFILL: Self = Self(2);
    /// Generates responses (decode) from prompts that it computes itself or receives.
    pub const DECODE: Self = Self(4);

    /// Number of kinds that [`Roles::kind`] returns.
    pub const KINDS: usize = 3;

    /// Returns the kind of a server, since load is measured for each kind separately: 0 for servers of whole requests
    /// and for decode workers, 1 for prefill workers, 2 for servers with both roles.
    #[must_use]
    pub const fn kind(self) -> usize {
        match (self.has(Self::PREFILL), self.has(Self::DECODE)) {
            (true, false) => 1,
            (true, true) => 2,
            _ => 0,
        }
    }

    /// Returns the union of both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Whether the set contains all of `roles`.
    #[must_use]
    pub const fn has(self, roles: Self) -> bool {
        self.0 & roles.0 == roles.0
    }

    /// Returns the roles of a value of [`ROLE_LABEL`]; `None` for an unknown value.
    #[must_use]
    pub fn of_word(word: &str) -> Option<Self> {
        WORDS.iter().find(|(name, _)| *name == word).map(|(_, roles)| *roles)
    }

    /// All values of [`ROLE_LABEL`], for messages.
    #[must_use]
    pub fn words() -> Vec<&'static str> {
        WORDS.iter().map(|(word, _)| *word).collect()
    }

    /// Returns the roles of an endpoint with these labels. An unknown value means no role, since such a server
    /// is not for whole requests.
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
            // Operators choose other role names of a StormService freely.
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
    fn labels_determine_roles() {
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
