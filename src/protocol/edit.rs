//! Edits members of a JSON object in its bytes. Order, white space, numbers, escapes and
//! all other members stay unchanged.
//!
//! Values are skipped, not parsed, and brackets are counted, not matched: a body that is edited was parsed before, and
//! a server parses it again. Called by `disagg`. Imports nothing of the crate but [`text`](super::text).

mod members;

pub use members::{Member, Members, elements};
use std::borrow::Cow;
use std::ops::Range;

/// The reason for which bytes cannot be edited. Offsets are in bytes from the start of the input.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// The bytes are not a JSON object.
    #[error("expected a JSON object, got {got}")]
    NotAnObject { got: &'static str },
    /// A member that should be edited inside is not an object.
    #[error("`{key}` must be an object, got {got}")]
    NotAnObjectInside { key: &'static str, got: &'static str },
    /// A member that should be edited inside occurs twice. Servers disagree on which one counts.
    #[error("`{key}` comes twice, once is allowed")]
    Twice { key: &'static str },
    /// The bytes are not valid JSON.
    #[error("invalid JSON: {what} at byte offset {at}")]
    Malformed { what: &'static str, at: usize },
}

/// Edits of the members of one object. Of several edits of the same key, the first counts.
#[derive(Clone, Debug, Default)]
pub struct Edits<'v> {
    edits: Vec<Edit<'v>>,
}

#[derive(Clone, Debug)]
struct Edit<'v> {
    key: &'static str,
    what: What<'v>,
}

#[derive(Clone, Debug)]
enum What<'v> {
    Set(Cow<'v, [u8]>),
    Replace(Cow<'v, [u8]>),
    Remove,
    RemoveIf(fn(&[u8]) -> bool),
    Inside(Edits<'v>),
}

impl<'v> Edits<'v> {
    /// Creates an empty set of edits.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the member `key` to `json`, which must be one JSON value: in place of its first occurrence,
    /// else after the last member.
    #[must_use]
    pub fn set(self, key: &'static str, json: impl Into<Cow<'v, [u8]>>) -> Self {
        self.and(key, What::Set(json.into()))
    }

    /// Sets the member `key` to `json` if it exists.
    #[must_use]
    pub fn replace(self, key: &'static str, json: impl Into<Cow<'v, [u8]>>) -> Self {
        self.and(key, What::Replace(json.into()))
    }

    /// Removes the member `key`.
    #[must_use]
    pub fn remove(self, key: &'static str) -> Self {
        self.and(key, What::Remove)
    }

    /// Removes the member `key` if `goes` returns true for its value.
    #[must_use]
    pub fn remove_if(self, key: &'static str, goes: fn(&[u8]) -> bool) -> Self {
        self.and(key, What::RemoveIf(goes))
    }

    /// Removes the members `keys`.
    #[must_use]
    pub fn remove_all(self, keys: &[&'static str]) -> Self {
        keys.iter().fold(self, |edits, key| edits.remove(key))
    }

    /// Applies edits to the members of the object `key`. If it is absent or null, it counts as an empty object.
    #[must_use]
    pub fn inside(self, key: &'static str, edits: Edits<'v>) -> Self {
        self.and(key, What::Inside(edits))
    }

    /// Combines these edits with `others`; of two edits of the same key, the first counts.
    #[must_use]
    pub fn or_else(mut self, others: Edits<'v>) -> Self {
        for Edit { key, what } in others.edits {
            self = self.and(key, what);
        }
        self
    }

    fn and(mut self, key: &'static str, what: What<'v>) -> Self {
        if self.edits.iter().all(|edit| edit.key != key) {
            self.edits.push(Edit { key, what });
        }
        self
    }

    /// Returns the edited `object`; borrowed when nothing changed. An edited key that occurs several times, in
    /// any spelling, occurs once afterwards.
    ///
    /// # Errors
    /// [`EditError`] when `object`, or a member to edit inside, is not a JSON object.
    pub fn apply<'b>(&self, object: &'b [u8]) -> Result<Cow<'b, [u8]>, EditError> {
        let mut members = Members::new(object)?;
        let mut splice = Splice::new(object, members.at);
        let mut seen = vec![false; self.edits.len()];
        for member in &mut members {
            let member = member?;
            // Unescaped once, whatever the number of edits.
            let name = member.name();
            let found = self.edits.iter().zip(&mut seen).find(|(edit, _)| name == edit.key);
            let Some((edit, seen)) = found else {
                splice.keep(&member);
                continue;
            };
            let again = std::mem::replace(seen, true);
            match &edit.what {
                What::Inside(_) if again => return Err(EditError::Twice { key: edit.key }),
                What::Remove => splice.remove(&member),
                _ if again => splice.remove(&member),
                What::RemoveIf(goes) if goes(member.value) => splice.remove(&member),
                What::RemoveIf(_) => splice.keep(&member),
                What::Set(json) | What::Replace(json) => splice.replace(&member, json),
                What::Inside(edits) => match edits.inner(edit.key, member.value)? {
                    Cow::Borrowed(_) => splice.keep(&member),
                    Cow::Owned(json) => splice.replace(&member, &json),
                },
            }
        }
        for (edit, _) in self.edits.iter().zip(&seen).filter(|(_, seen)| !**seen) {
            match &edit.what {
                What::Set(json) => splice.add(edit.key, json),
                What::Inside(edits) => {
                    if let Cow::Owned(json) = edits.apply(b"{}")? {
                        splice.add(edit.key, &json);
                    }
                }
                What::Replace(_) | What::Remove | What::RemoveIf(_) => {}
            }
        }
        Ok(splice.finish())
    }

    /// Returns the value of member `key` edited inside; borrowed when nothing changed.
    fn inner<'b>(&self, key: &'static str, value: &'b [u8]) -> Result<Cow<'b, [u8]>, EditError> {
        if value == b"null" {
            return Ok(match self.apply(b"{}")? {
                Cow::Owned(json) => Cow::Owned(json),
                Cow::Borrowed(_) => Cow::Borrowed(value),
            });
        }
        self.apply(value).map_err(|e| match e {
            EditError::NotAnObject { got } => EditError::NotAnObjectInside { key, got },
            other => other,
        })
    }
}

/// Copies an object member by member, and removes or inserts some.
#[derive(Debug)]
struct Splice<'b> {
    object: &'b [u8],
    out: Vec<u8>,
    /// The bytes before this offset were copied or removed.
    copied: usize,
    /// End of the previous member, or of the opening brace.
    end: usize,
    /// Whether a member was kept, so that the next one needs a comma.
    any: bool,
    /// Start of the members removed from the front of the object. The first member that is kept
    /// loses the comma before it.
    front: Option<usize>,
    changed: bool,
}

impl<'b> Splice<'b> {
    fn new(object: &'b [u8], start: usize) -> Self {
        let out = Vec::new();
        Self { object, out, copied: 0, end: start, any: false, front: None, changed: false }
    }

    fn copy_to(&mut self, to: usize) {
        if self.out.capacity() == 0 {
            // Insertions are small compared to a prompt; a body that grows more is copied once more.
            self.out.reserve(self.object.len() + 512);
        }
        self.out.extend_from_slice(self.object.get(self.copied..to).unwrap_or_default());
        self.copied = to;
    }

    fn cut(&mut self, span: Range<usize>) {
        self.copy_to(span.start);
        self.copied = span.end;
        self.changed = true;
    }

    fn keep(&mut self, member: &Member<'_>) {
        if let Some(front) = self.front.take() {
            self.cut(front..member.start);
        }
        self.any = true;
        self.end = member.end;
    }

    fn replace(&mut self, member: &Member<'_>, json: &[u8]) {
        self.keep(member);
        if member.value != json {
            self.cut(member.end - member.value.len()..member.end);
            self.out.extend_from_slice(json);
        }
    }

    fn remove(&mut self, member: &Member<'_>) {
        match self.any {
            true => self.cut(self.end..member.end),
            false => {
                self.front.get_or_insert(member.start);
            }
        }
        self.end = member.end;
    }

    /// Only after the last member.
    fn add(&mut self, key: &str, json: &[u8]) {
        self.settle();
        self.copy_to(self.end);
        if self.any {
            self.out.push(b',');
        }
        self.out.push(b'"');
        self.out.extend_from_slice(key.as_bytes());
        self.out.extend_from_slice(b"\":");
        self.out.extend_from_slice(json);
        self.any = true;
        self.changed = true;
    }

    /// If all members were removed, cuts them from the first one on.
    fn settle(&mut self) {
        if let Some(front) = self.front.take() {
            self.cut(front..self.end);
        }
    }

    fn finish(mut self) -> Cow<'b, [u8]> {
        self.settle();
        if !self.changed {
            return Cow::Borrowed(self.object);
        }
        self.copy_to(self.object.len());
        Cow::Owned(self.out)
    }
}

#[cfg(test)]
mod tests;
