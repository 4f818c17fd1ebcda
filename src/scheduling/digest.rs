//! What algorithms make of a prompt's text: noted where a decision is recorded, and found again where it is replayed without the text.
//!
//! An algorithm that reads [`super::plugin::RequestFacts::prompt`] does it through [`super::plugin::RequestFacts::digest`], under a name
//! that holds all of its parameters that matter. Pure.

use attache_protocol::Prompt;
use smallvec::SmallVec;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// Hashes of text: one, or one for each block of it.
pub type Digest = SmallVec<[u64; 64]>;

/// The digests of one prompt.
#[derive(Debug, Default)]
pub struct Digests {
    known: RefCell<BTreeMap<String, Vec<u64>>>,
    /// There is no text to make others from.
    replayed: bool,
    missed: Cell<bool>,
}

impl Digests {
    /// Those that were noted before.
    #[must_use]
    pub fn replayed(known: BTreeMap<String, Vec<u64>>) -> Self {
        Self { known: RefCell::new(known), replayed: true, missed: Cell::new(false) }
    }

    /// All that were asked for.
    #[must_use]
    pub fn known(&self) -> BTreeMap<String, Vec<u64>> {
        self.known.borrow().clone()
    }

    /// Whether one was asked for that had not been noted.
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
