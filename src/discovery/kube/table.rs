//! One kind's objects, as a list and a watch tell of them.
//!
//! A list replaces what was known only when it has come to its end: one that breaks off changes nothing, so that a picker never sees half a
//! list. An object that can't be read leaves the last one of its name that could, and is known to be there. Pure.

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
    /// What was known of it before stays.
    pub kept: bool,
}

#[derive(Clone, Debug)]
struct Entry<T> {
    uid: String,
    value: T,
}

/// What is known of one kind.
#[derive(Clone, Debug)]
pub struct Table<T> {
    known: Known<T>,
    listing: Option<Known<T>>,
    listed: bool,
}

/// What is known at a moment.
#[derive(Clone, Debug)]
struct Known<T> {
    entries: BTreeMap<String, Entry<T>>,
    /// The UIDs of those that are there and can't be read as they are now, by name.
    unreadable: BTreeMap<String, String>,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), unreadable: BTreeMap::new() }
    }
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { known: Known::default(), listing: None, listed: false }
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
                self.listing = Some(Known::default());
                Ok(false)
            }
            Change::Listed(object) => {
                let read = read(object);
                let Some(listing) = &mut self.listing else { return Ok(false) };
                match read {
                    Ok((name, entry)) => {
                        listing.entries.insert(name, entry);
                        Ok(false)
                    }
                    Err((name, uid, reason)) => {
                        let last = self.known.entries.get(&name).filter(|known| known.uid == uid);
                        let kept = last.is_some();
                        listing.entries.extend(last.map(|last| (name.clone(), last.clone())));
                        listing.unreadable.insert(name.clone(), uid);
                        Err(Unreadable { name, reason, kept })
                    }
                }
            }
            Change::ListDone => {
                let Some(listing) = self.listing.take() else { return Ok(false) };
                let first = !std::mem::replace(&mut self.listed, true);
                let changed = first
                    || self.known.unreadable != listing.unreadable
                    || !same(&self.known.entries, &listing.entries);
                self.known = listing;
                Ok(changed)
            }
            Change::Applied(object) => self.applied(object),
            Change::Deleted { name, uid } => {
                let Known { entries, unreadable } = &mut self.known;
                let was_unreadable = unreadable.get(&name) == Some(&uid) && unreadable.remove(&name).is_some();
                let was_known = entries.get(&name).is_some_and(|known| known.uid == uid);
                if was_known {
                    entries.remove(&name);
                }
                Ok(was_known || was_unreadable)
            }
        }
    }

    fn applied(&mut self, object: Object) -> Result<bool, Unreadable> {
        let Known { entries, unreadable } = &mut self.known;
        match read(object) {
            Ok((name, entry)) => {
                let was_unreadable = unreadable.remove(&name).is_some();
                let known = entries.get(&name);
                let changed = known.is_none_or(|known| known.uid != entry.uid || known.value != entry.value);
                if changed {
                    entries.insert(name, entry);
                }
                Ok(changed || was_unreadable)
            }
            Err((name, uid, reason)) => {
                let kept = entries.get(&name).is_some_and(|known| known.uid == uid);
                if !kept {
                    // What was known of another object of the same name says nothing about this one.
                    entries.remove(&name);
                }
                unreadable.insert(name.clone(), uid);
                Err(Unreadable { name, reason, kept })
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
        self.known.entries.get(name).map(|entry| &entry.value)
    }

    /// Whether there is an object of this name that can't be read as it is now. [`Table::get`] gives what was known of it before, if anything was.
    #[must_use]
    pub fn is_unreadable(&self, name: &str) -> bool {
        self.known.unreadable.contains_key(name)
    }

    /// All objects by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.known.entries.iter().map(|(name, entry)| (name.as_str(), &entry.value))
    }
}

/// The object and its name; or its name, its UID and what can't be read.
fn read<T: FromObject>(object: Object) -> Result<(String, Entry<T>), (String, String, String)> {
    let (name, uid) = (object.meta.name.clone(), object.meta.uid.clone());
    match T::from_object(object) {
        Ok(value) => Ok((name, Entry { uid, value })),
        Err(reason) => Err((name, uid, reason)),
    }
}

fn same<T: PartialEq>(a: &BTreeMap<String, Entry<T>>, b: &BTreeMap<String, Entry<T>>) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|((m, x), (n, y))| m == n && x.uid == y.uid && x.value == y.value)
}

#[cfg(test)]
mod tests;
