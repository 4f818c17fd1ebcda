//! The known objects of one kind, from a list and a watch.
//!
//! A list replaces the known objects only when it is complete: an interrupted one changes nothing, so a picker never
//! sees half a list. Of an invalid object the last valid version stays, and the object is known to exist. Pure.

use super::objects::{FromObject, Object};
use std::collections::BTreeMap;

/// A step of a list, or a change from a watch.
#[derive(Clone, Debug)]
pub enum ObjectChange {
    /// A list begins.
    ListBegun,
    /// An object in the list.
    Listed(Object),
    /// The list is complete: objects that it did not name were deleted.
    ListDone,
    /// An object was created or changed.
    Applied(Object),
    /// An object was deleted.
    Deleted {
        /// Name of the deleted object.
        name: String,
        /// UID of the deleted object: another one of the same name stays.
        uid: String,
    },
}

/// An invalid object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// Name of the object.
    pub name: String,
    /// The invalid field and why.
    pub reason: String,
    /// Whether the last valid version stays in effect.
    pub kept: bool,
}

#[derive(Clone, Debug)]
struct TableEntry<T> {
    uid: String,
    value: T,
}

/// The known objects of one kind.
#[derive(Clone, Debug)]
pub struct ObjectTable<T> {
    known: KnownObjects<T>,
    listing: Option<KnownObjects<T>>,
    listed: bool,
}

/// A complete set of objects.
#[derive(Clone, Debug)]
struct KnownObjects<T> {
    entries: BTreeMap<String, TableEntry<T>>,
    /// UIDs of the existing objects that are invalid now, by name.
    unreadable: BTreeMap<String, String>,
}

impl<T> Default for KnownObjects<T> {
    fn default() -> Self {
        Self { entries: BTreeMap::new(), unreadable: BTreeMap::new() }
    }
}

impl<T> Default for ObjectTable<T> {
    fn default() -> Self {
        Self { known: KnownObjects::default(), listing: None, listed: false }
    }
}

impl<T: FromObject + Clone + PartialEq> ObjectTable<T> {
    /// Applies a change. Returns whether the known objects differ afterwards.
    ///
    /// # Errors
    /// If the object is invalid; its last valid version stays.
    pub fn apply(&mut self, change: ObjectChange) -> Result<bool, Unreadable> {
        match change {
            ObjectChange::ListBegun => {
                self.listing = Some(KnownObjects::default());
                Ok(false)
            }
            ObjectChange::Listed(object) => {
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
            ObjectChange::ListDone => {
                let Some(listing) = self.listing.take() else { return Ok(false) };
                let first = !std::mem::replace(&mut self.listed, true);
                let changed = first
                    || self.known.unreadable != listing.unreadable
                    || !same(&self.known.entries, &listing.entries);
                self.known = listing;
                Ok(changed)
            }
            ObjectChange::Applied(object) => self.applied(object),
            ObjectChange::Deleted { name, uid } => {
                let KnownObjects { entries, unreadable } = &mut self.known;
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
        let KnownObjects { entries, unreadable } = &mut self.known;
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
                    // The last valid version was another object of the same name.
                    entries.remove(&name);
                }
                unreadable.insert(name.clone(), uid);
                Err(Unreadable { name, reason, kept })
            }
        }
    }
}

impl<T> ObjectTable<T> {
    /// Whether a list was complete; before that the objects are unknown.
    #[must_use]
    pub fn is_listed(&self) -> bool {
        self.listed
    }

    /// Forgets all objects, and that they were listed.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// The last valid version of the object of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&T> {
        self.known.entries.get(name).map(|entry| &entry.value)
    }

    /// Whether an object of this name exists and is invalid now. [`ObjectTable::get`] returns its last valid
    /// version, if there was one.
    #[must_use]
    pub fn is_unreadable(&self, name: &str) -> bool {
        self.known.unreadable.contains_key(name)
    }

    /// All objects by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &T)> {
        self.known.entries.iter().map(|(name, entry)| (name.as_str(), &entry.value))
    }
}

impl ObjectTable<Object> {
    /// The changes that make an empty table equal to this one.
    pub fn changes(&self) -> impl Iterator<Item = ObjectChange> {
        let objects = |known: &KnownObjects<Object>| -> Vec<ObjectChange> {
            let listed = known.entries.values().map(|entry| ObjectChange::Listed(entry.value.clone()));
            std::iter::once(ObjectChange::ListBegun).chain(listed).collect()
        };
        let whole = self.listed.then(|| objects(&self.known).into_iter().chain([ObjectChange::ListDone]));
        let begun = self.listing.as_ref().map(objects);
        whole.into_iter().flatten().chain(begun.into_iter().flatten())
    }
}

/// The name and the object; or the name, UID and error of an invalid one.
fn read<T: FromObject>(object: Object) -> Result<(String, TableEntry<T>), (String, String, String)> {
    let (name, uid) = (object.meta.name.clone(), object.meta.uid.clone());
    match T::from_object(object) {
        Ok(value) => Ok((name, TableEntry { uid, value })),
        Err(reason) => Err((name, uid, reason)),
    }
}

fn same<T: PartialEq>(a: &BTreeMap<String, TableEntry<T>>, b: &BTreeMap<String, TableEntry<T>>) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|((m, x), (n, y))| m == n && x.uid == y.uid && x.value == y.value)
}

#[cfg(test)]
mod tests;
