//! Identifiers that all crates share. Imports nothing.

use std::fmt;

/// Number of an endpoint in its pool: assigned in the order of discovery and never reused while the process runs. State
/// that is kept per endpoint (index entries, affinity) can therefore not pass to another endpoint at the same address.
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
