//! The headers that a decision asks for, noted as it asks: only these are recorded.

use attache_scheduling::plugin::HeaderSource;
use std::cell::RefCell;
use std::collections::BTreeMap;
use xxhash_rust::xxh3::xxh3_128;

/// Headers whose values are recorded as hashes, whoever asks for them. An algorithm that tells clients apart by one decides alike in a
/// replay; one that computes with its value does not.
pub const CREDENTIALS: &[&str] = &["api-key", "authorization", "cookie", "proxy-authorization", "x-api-key"];

/// Headers that note who was asked for.
#[derive(Debug)]
pub struct Noted<'a> {
    source: &'a dyn HeaderSource,
    asked: RefCell<BTreeMap<String, Option<String>>>,
}

impl<'a> Noted<'a> {
    /// Nobody has asked yet.
    #[must_use]
    pub fn of(source: &'a dyn HeaderSource) -> Self {
        Self { source, asked: RefCell::default() }
    }

    /// All that was asked for so far, as it is recorded.
    #[must_use]
    pub fn asked(&self) -> BTreeMap<String, Option<String>> {
        self.asked.borrow().clone()
    }
}

impl HeaderSource for Noted<'_> {
    fn header(&self, name: &str) -> Option<&str> {
        self.note(name, self.source.header(name))
    }

    /// Noted as what the header said: a replay knows headers alone.
    fn user(&self, name: &str) -> Option<&str> {
        self.note(name, self.source.user(name))
    }
}

impl Noted<'_> {
    fn note<'v>(&self, name: &str, value: Option<&'v str>) -> Option<&'v str> {
        let mut asked = self.asked.borrow_mut();
        if !asked.contains_key(name) {
            let shown = |v: &str| if CREDENTIALS.contains(&name) { hash(v) } else { v.to_owned() };
            asked.insert(name.to_owned(), value.map(shown));
        }
        value
    }
}

/// What stands in a recording for a text that must not be in it; equal texts have equal hashes.
#[must_use]
pub fn hash(text: &str) -> String {
    format!("xxh3:{:032x}", xxh3_128(text.as_bytes()))
}
