//! The `:authority` of the gateway's call, by which one process distinguishes pools.

use super::*;

impl Exchange {
    /// The same exchange, for a call with this `:authority`.
    #[must_use]
    pub fn called_as(mut self, authority: Option<Authority>) -> Self {
        self.called = authority;
        self
    }
}

/// The `:authority` of the gateway's call; empty if it had none.
pub(super) fn name(called: &Option<Authority>) -> &str {
    called.as_ref().map_or("", Authority::as_str)
}
