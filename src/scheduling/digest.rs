//! Digests of a prompt's text that algorithms compute. They are stored where a decision is recorded, and looked up
//! where it is replayed without the text.
//!
//! An algorithm reads [`super::plugin::RequestFacts::prompt`] through [`super::plugin::RequestFacts::digest`], under
//! a name that includes all of its relevant parameters. Pure.

use attache_protocol::Prompt;
use sha2::{Digest as _, Sha256};
use smallvec::SmallVec;
use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};

/// Hashes of text: one, or one per block.
pub type Digest = SmallVec<[u64; 64]>;

/// Hash of the name of a user or tenant, equal on all pickers. Clients can't choose a name with the hash of another
/// one.
#[must_use]
pub fn name_hash(name: &str) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = <[u8; 32]>::from(Sha256::digest(name));
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

/// The digests of one prompt, by name.
#[derive(Debug, Default)]
pub struct Digests {
    known: RefCell<BTreeMap<String, Vec<u64>>>,
    /// Whether this is a replay, without text to compute others from.
    replayed: bool,
    /// Names of requested digests that were not recorded.
    missed: RefCell<BTreeSet<String>>,
}

impl Digests {
    /// Digests that were recorded with the decision.
    #[must_use]
    pub fn replayed(known: BTreeMap<String, Vec<u64>>) -> Self {
        Self { known: RefCell::new(known), replayed: true, missed: RefCell::default() }
    }

    /// All digests that were requested.
    #[must_use]
    pub fn known(&self) -> BTreeMap<String, Vec<u64>> {
        self.known.borrow().clone()
    }

    /// Names of all digests of a readable prompt that were requested and not recorded.
    #[must_use]
    pub fn missed(&self) -> BTreeSet<String> {
        self.missed.borrow().clone()
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
            self.missed.borrow_mut().extend(prompt.map(|_| name));
            return None;
        }
        let digest = make(prompt?);
        self.known.borrow_mut().insert(name, digest.to_vec());
        Some(digest)
    }
}
