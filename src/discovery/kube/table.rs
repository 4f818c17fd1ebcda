//! One kind's objects, as a list and a watch tell of them.
//!
//! A list replaces what was known only when it has come to its end: one that breaks off changes nothing, so that a picker never sees half a
//! list. An object that can't be read leaves the last one of its name that could. Pure.

use super::objects::{FromObject, Object};
use std::collections::BTreeMap;

/// What a watch tells.
#[derive(Clone, Debug)]
pub enum Change {
    /// A list begins.
    ListBegun,
    /// An object of the list.
    Listed(Object),
    /// The list is at its end: what it did not name is gone.
    ListDone,
    /// An object is new, or another than it was.
    Applied(Object),
    /// An object is gone.
    Deleted {
        /// Its name.
        name: String,
        /// Its UID: another one of the same name stays.
        uid: String,
    },
}

/// An object that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Its name.
    pub name: String,
    /// Why.
    pub reason: String,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    uid: String,
    value: T,
}

/// What is known of one kind.
#[derive(Clone, Debug)]
pub struct Table<T> {
    entries: BTreeMap<String, Entry<T>>,
    listing: Option<BTreeMap<String, Entry<T>>>,
    listed: bool,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), listing: None, listed: false }
    }
}

impl<T: FromObject + Clone + PartialEq> Table<T> {
    /// Takes in a change. True when what is known is another thing afterwards.
    ///
    /// # Errors
    /// The object that could not be read; what was known of it stays.
    pub fn apply(&mut self, change: Change) -> Result<bool, Unreadable> {
        match change {
            Change::ListBegun => {
                self.listing = Some(BTreeMap::new());
                Ok(false)
            }
            Change::Listed(object) => {
                let read = read(object);
                let Some(listing) = &mut self.listing else { return Ok(false) };
                match read {
                    Ok((name, entry)) => {
                        listing.insert(name, entry);
                        Ok(false)
                    }
                    Err((uid, unreadable)) => {
                        let last = self.entries.get(&unreadable.name).filter(|known| known.uid == uid);
                        if let Some(last) = last {
                            listing.insert(unreadable.name.clone(), last.clone());
                        }
                        Err(unreadable)
                    }
                }
            }
            Change::ListDone => {
                let Some(listing) = self.listing.take() else { return Ok(false) };
                let first = !std::mem::replace(&mut self.listed, true);
                let changed = first || !same(&self.entries, &listing);
                self.entries = listing;
                Ok(changed)
            }
            Change::Applied(object) => self.applied(object),
            Change::Deleted { name, uid } => {
                let gone = self.entries.get(&name).is_some_and(|known| known.uid == uid);
                if gone {
                    self.entries.remove(&name);
                }
                Ok(gone)
            }
        }
    }

    fn applied(&mut self, object: Object) -> Result<bool, Unreadable> {
        match read(object) {
            Ok((name, entry)) => {
                let known = self.entries.get(&name);
                let changed = known.is_none_or(|known| known.uid != entry.uid || known.value != entry.value);
                if changed {
                    self.entries.insert(name, entry);
                }
                Ok(changed)
            }
            Err((uid, unreadable)) => {
                // What was known of another object of the same name says nothing about this one.
                if self.entries.get(&unreadable.name).is_some_and(|known| known.uid != uid) {
                    self.entries.remove(&unreadable.name);
                }
                Err(unreadable)
            }
        }
    }
}

impl<T> Table<T> {
    /// Whether a list has come to its end: before that nobody knows what there is.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// Forgets that it was ever listed, and all of it.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The object of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&T> {
        self.entries.get(name).map(|entry| &entry.value)
    }

    /// All objects by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.entries.iter().map(|(name, entry)| (name.as_str(), &entry.value))
    }
}

fn read<T: FromObject>(object: Object) -> Result<(String, Entry<T>), (String, Unreadable)> {
    let (name, uid) = (object.meta.name.clone(), object.meta.uid.clone());
    match T::from_object(object) {
        Ok(value) => Ok((name, Entry { uid, value })),
        Err(reason) => Err((uid, Unreadable { name, reason })),
    }
}

fn same<T: PartialEq>(a: &BTreeMap<String, Entry<T>>, b: &BTreeMap<String, Entry<T>>) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|((m, x), (n, y))| m == n && x.uid == y.uid && x.value == y.value)
}

#[cfg(test)]
mod tests;
