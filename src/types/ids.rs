//! Identifiers that the whole crate shares. Imports nothing.

use std::fmt;

/// Number of an endpoint inside its pool: given out in order of discovery and never given again while the process lives, so that
/// state that is kept beside an endpoint (index entries, affinity) can't be inherited by a stranger at the same address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Deserialize, serde::Serialize)]
pub struct EndpointId(pub u32);

impl fmt::Display for EndpointId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A number of tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tokens(pub u32);
