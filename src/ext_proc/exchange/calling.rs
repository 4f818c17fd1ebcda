//! By which name the gateway calls the picker: what tells pools apart that are served by one process.

use super::*;

impl Exchange {
    /// The same, called by this `:authority`.
    #[must_use]
    pub fn called_as(mut self, authority: Option<Authority>) -> Self {
        self.called = authority;
        self
    }
}

/// The `:authority` by which the gateway has called; empty when there was none.
pub(super) fn name(called: &Option<Authority>) -> &str {
    called.as_ref().map_or("", Authority::as_str)
}
