//! The headers that a decision reads, noted on each access: only these are recorded.

use attache_scheduling::plugin::HeaderSource;
use std::cell::RefCell;
use std::collections::BTreeMap;
use xxhash_rust::xxh3::xxh3_128;

/// Headers whose values are recorded as hashes. An algorithm that uses them to distinguish clients decides the same in
/// a replay; one that computes with the value does not.
pub const CREDENTIALS: &[&str] = &["api-key", "authorization", "cookie", "proxy-authorization", "x-api-key"];

/// The name under which the hash of a request's tenant is recorded: no header has it.
pub const TENANT: &str = ":tenant";

/// A header source that notes which headers were read.
#[derive(Debug)]
pub struct Noted<'a> {
    source: &'a dyn HeaderSource,
    asked: RefCell<BTreeMap<String, Option<String>>>,
}

impl<'a> Noted<'a> {
    /// Wraps `source`, from which no header has been read.
    #[must_use]
    pub fn of(source: &'a dyn HeaderSource) -> Self {
        Self { source, asked: RefCell::default() }
    }

    /// Returns all headers that were read so far, in their recorded form.
    #[must_use]
    pub fn asked(&self) -> BTreeMap<String, Option<String>> {
        self.asked.borrow().clone()
    }
}

impl HeaderSource for Noted<'_> {
    fn header(&self, name: &str) -> Option<&str> {
        self.note(name, self.source.header(name))
    }

    /// Noted as a header, since a replay has only headers.
    fn user(&self, name: &str) -> Option<&str> {
        self.note(name, self.source.user(name))
    }

    fn tenant(&self) -> Option<&str> {
        let tenant = self.source.tenant()?;
        self.note(TENANT, Some(tenant))
    }
}

impl Noted<'_> {
    fn note<'v>(&self, name: &str, value: Option<&'v str>) -> Option<&'v str> {
        let mut asked = self.asked.borrow_mut();
        if !asked.contains_key(name) {
            let shown = |v: &str| if name == TENANT || CREDENTIALS.contains(&name) { hash(v) } else { v.to_owned() };
            asked.insert(name.to_owned(), value.map(shown));
        }
        value
    }
}

/// Returns the recorded form of a text that must not be in a recording; equal texts have equal hashes.
#[must_use]
pub fn hash(text: &str) -> String {
    format!("xxh3:{:032x}", xxh3_128(text.as_bytes()))
}
