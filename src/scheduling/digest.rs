//! Digests of a prompt's text that algorithms compute. They are stored where a decision is recorded, and looked up
//! where it is replayed without the text.
//!
//! An algorithm reads [`super::plugin::RequestFacts::prompt`] through [`super::plugin::RequestFacts::digest`], under
//! a name that includes all of its relevant parameters. Pure.

use attache_protocol::Prompt;
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Hashes of text: one, or one per block.
pub type Digest = SmallVec<[u64; 64]>;

/// The digests of one prompt, by name.
#[derive(Debug, Default)]
pub struct Digests {
    known: RefCell<BTreeMap<String, Vec<u64>>>,
    /// Whether this is a replay, without text to compute others from.
    replayed: bool,
    missed: Cell<bool>,
}

impl Digests {
    /// Digests that were recorded with the decision.
    #[must_use]
    pub fn replayed(known: BTreeMap<String, Vec<u64>>) -> Self {
        Self { known: RefCell::new(known), replayed: true, missed: Cell::new(false) }
    }

    /// All digests that were requested.
    #[must_use]
    pub fn known(&self) -> BTreeMap<String, Vec<u64>> {
        self.known.borrow().clone()
    }

    /// Whether a digest was requested that was not recorded.
    #[must_use]
    pub fn missed(&self) -> bool {
        self.missed.get()
    }

    pub(super) fn get(
        &self,
        name: String,
        prompt: Option<&Prompt<'_>>,
        make: impl FnOnce(&Prompt<'_>) -> Digest,
    ) -> Option<Digest> {
        if let Some(known) = self.known.borrow().get(&name) {
            return Some(known.iter().copied().collect());
        }
        if self.replayed {
            self.missed.set(prompt.is_some());
            return None;
        }
        let digest = make(prompt?);
        self.known.borrow_mut().insert(name, digest.to_vec());
        Some(digest)
    }
}
