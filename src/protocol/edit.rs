//! Changing the members of a JSON object in bytes that otherwise stay as they are: order, white space, numbers, escapes, and whatever
//! the members that nobody named hold.
//!
//! Values are stepped over, not parsed, and brackets counted, not matched: a body that the picker edits has been read before, and a
//! server reads it again. Called by `disagg`. Imports nothing of the crate but [`text`](super::text).

use super::text::unescaped;
use memchr::memchr;
use std::borrow::Cow;
use std::ops::Range;

/// Bytes that are looked at together outside of strings.
const STRIDE: usize = 32;

/// Why bytes can't be edited. Offsets are bytes from the beginning of what was given.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EditError {
    /// It is no object.
    #[error("expected a JSON object, got {got}")]
    NotAnObject { got: &'static str },
    /// A member that is to be edited inside is no object.
    #[error("`{key}` must be an object, got {got}")]
    NotAnObjectInside { key: &'static str, got: &'static str },
    /// A member that is to be edited inside is there more than once, and servers disagree on which one counts.
    #[error("`{key}` comes twice, once is allowed")]
    Twice { key: &'static str },
    /// It is no JSON.
    #[error("invalid JSON: {what} at byte offset {at}")]
    Malformed { what: &'static str, at: usize },
}

/// What is to become of the members of one object. Of several edits of one key the first counts.
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
    /// No edits.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The member `key` becomes `json`, which must be one JSON value: where it first stands, else behind the last member.
    #[must_use]
    pub fn set(self, key: &'static str, json: impl Into<Cow<'v, [u8]>>) -> Self {
        self.and(key, What::Set(json.into()))
    }

    /// The member `key` becomes `json` where it is there already.
    #[must_use]
    pub fn replace(self, key: &'static str, json: impl Into<Cow<'v, [u8]>>) -> Self {
        self.and(key, What::Replace(json.into()))
    }

    /// The member `key` goes.
    #[must_use]
    pub fn remove(self, key: &'static str) -> Self {
        self.and(key, What::Remove)
    }

    /// The member `key` goes if `goes` says so of its value.
    #[must_use]
    pub fn remove_if(self, key: &'static str, goes: fn(&[u8]) -> bool) -> Self {
        self.and(key, What::RemoveIf(goes))
    }

    /// The members `keys` go.
    #[must_use]
    pub fn remove_all(self, keys: &[&'static str]) -> Self {
        keys.iter().fold(self, |edits, key| edits.remove(key))
    }

    /// The members of the object `key` are edited likewise. An absent one and null count as an object without members.
    #[must_use]
    pub fn inside(self, key: &'static str, edits: Edits<'v>) -> Self {
        self.and(key, What::Inside(edits))
    }

    /// These edits and `others`; of two of one key the first counts.
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

    /// `object`, edited; borrowed when nothing of it changed. A key that is edited and comes several times, in whatever spelling, comes
    /// once afterwards.
    ///
    /// # Errors
    /// `object` is no JSON object, or one that is to be edited inside isn't.
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

    /// The member `key` edited inside; borrowed when nothing of it changed.
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

/// Copies an object and leaves out or puts in what is told, member after member.
#[derive(Debug)]
struct Splice<'b> {
    object: &'b [u8],
    out: Vec<u8>,
    /// The bytes before are copied, or left out.
    copied: usize,
    /// Where the member before ends, or the opening brace.
    end: usize,
    /// A member stays: what comes behind it needs a comma.
    any: bool,
    /// Where the members begin that go from the front of the object: with the first that stays goes the comma before it.
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
            // Whatever is added is small beside a prompt; a body that grows more is copied once more.
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

    /// Only behind the last member.
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

    /// All members went: from the first one on.
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

/// One member of an object.
#[derive(Clone, Copy, Debug)]
pub struct Member<'b> {
    /// What stands between the quotes of the key.
    key: &'b [u8],
    /// The value as it was written.
    pub value: &'b [u8],
    /// Where it stands in the object: from the key's quote to the end of its value.
    start: usize,
    end: usize,
}

impl<'b> Member<'b> {
    /// Whether `key` is its key, however that is spelled.
    #[must_use]
    pub fn is(&self, key: &str) -> bool {
        self.key == key.as_bytes() || (memchr(b'\\', self.key).is_some() && self.name() == key)
    }

    /// The key, unescaped.
    #[must_use]
    pub fn name(&self) -> Cow<'b, str> {
        match std::str::from_utf8(self.key) {
            Ok(plain) if !plain.contains('\\') => Cow::Borrowed(plain),
            Ok(escaped) => Cow::Owned(unescaped(escaped)),
            Err(_) => String::from_utf8_lossy(self.key),
        }
    }

    /// The value, unless it is null.
    #[must_use]
    pub fn given(&self) -> Option<&'b [u8]> {
        Some(self.value).filter(|value| *value != b"null")
    }
}

/// The members of an object, in order. Ends behind the first error.
#[derive(Clone, Debug)]
pub struct Members<'b> {
    object: &'b [u8],
    at: usize,
    first: bool,
    ended: bool,
}

impl<'b> Members<'b> {
    /// The members of `object`, white space around which doesn't matter.
    ///
    /// # Errors
    /// It is no object. What is wrong behind its opening brace is found on the way.
    pub fn new(object: &'b [u8]) -> Result<Self, EditError> {
        let at = space(object, 0);
        match object.get(at) {
            Some(b'{') => Ok(Self { object, at: at + 1, first: true, ended: false }),
            other => Err(EditError::NotAnObject { got: sort(other.copied()) }),
        }
    }

    fn malformed(&self, what: &'static str) -> EditError {
        EditError::Malformed { what, at: self.at }
    }

    fn peek(&mut self) -> Option<u8> {
        self.at = space(self.object, self.at);
        self.object.get(self.at).copied()
    }

    fn member(&mut self) -> Result<Option<Member<'b>>, EditError> {
        match (self.peek(), self.first) {
            (Some(b'}'), _) => {
                self.at += 1;
                return match self.peek() {
                    None => Ok(None),
                    Some(_) => Err(self.malformed("trailing characters")),
                };
            }
            (_, true) => {}
            (Some(b','), false) => self.at += 1,
            _ => return Err(self.malformed("expected `,` or `}`")),
        }
        self.first = false;
        if self.peek() != Some(b'"') {
            return Err(self.malformed("expected a key"));
        }
        let start = self.at;
        self.at = string_end(self.object, start).ok_or_else(|| self.malformed("unexpected end in a key"))?;
        let key = self.object.get(start + 1..self.at - 1).unwrap_or_default();
        if self.peek() != Some(b':') {
            return Err(self.malformed("expected `:`"));
        }
        self.at += 1;
        let value = self.value()?;
        Ok(Some(Member { key, value, start, end: self.at }))
    }

    fn value(&mut self) -> Result<&'b [u8], EditError> {
        self.peek();
        let start = self.at;
        self.at = value_end(self.object, start).ok_or_else(|| self.malformed("expected a value"))?;
        Ok(self.object.get(start..self.at).unwrap_or_default())
    }
}

impl<'b> Iterator for Members<'b> {
    type Item = Result<Member<'b>, EditError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let found = self.member().transpose();
        self.ended = !matches!(found, Some(Ok(_)));
        found
    }
}

/// The elements of a JSON array, as they were written; ends where it is no JSON.
pub fn elements(array: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut at = space(array, 0);
    let mut opened = false;
    std::iter::from_fn(move || {
        let before = if opened { b',' } else { b'[' };
        if array.get(at) != Some(&before) {
            return None;
        }
        opened = true;
        let start = space(array, at + 1);
        let end = value_end(array, start)?;
        at = space(array, end);
        array.get(start..end)
    })
}

/// What a value is, from its first byte.
fn sort(first: Option<u8>) -> &'static str {
    match first {
        None => "nothing",
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b'n') => "null",
        Some(b't' | b'f') => "a boolean",
        Some(b'-' | b'0'..=b'9') => "a number",
        Some(_) => "what is no JSON",
    }
}

/// The place of the next byte that is no white space.
fn space(bytes: &[u8], from: usize) -> usize {
    let rest = bytes.get(from..).unwrap_or_default();
    from + rest.iter().take_while(|b| matches!(b, b' ' | b'\n' | b'\t' | b'\r')).count()
}

/// Where the value that begins at `start` ends.
fn value_end(bytes: &[u8], start: usize) -> Option<usize> {
    match bytes.get(start)? {
        b'"' => string_end(bytes, start),
        b'{' | b'[' => nested_end(bytes, start),
        b'n' | b't' | b'f' | b'-' | b'0'..=b'9' => {
            let rest = bytes.get(start..)?;
            let inside = |b: &&u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.');
            Some(start + rest.iter().take_while(inside).count())
        }
        _ => None,
    }
}

/// Where the string whose opening quote stands at `start` ends: behind the first quote that an even number of backslashes precedes.
fn string_end(bytes: &[u8], start: usize) -> Option<usize> {
    let mut from = start + 1;
    loop {
        let quote = from + memchr(b'"', bytes.get(from..)?)?;
        let inside = bytes.get(start + 1..quote)?;
        let backslashes = inside.iter().rev().take_while(|b| **b == b'\\').count();
        from = quote + 1;
        if backslashes % 2 == 0 {
            return Some(from);
        }
    }
}

/// Where the array or object that opens at `start` ends: behind the bracket that closes as many as were opened.
fn nested_end(bytes: &[u8], start: usize) -> Option<usize> {
    let (mut at, mut depth) = (start, 0u32);
    loop {
        at += structural(bytes.get(at..)?)?;
        match bytes.get(at)? {
            b'"' => at = string_end(bytes, at)?,
            b'{' | b'[' => {
                depth = depth.checked_add(1)?;
                at += 1;
            }
            _ => {
                depth -= 1;
                at += 1;
                if depth == 0 {
                    return Some(at);
                }
            }
        }
    }
}

/// The place of the first quote, bracket or brace.
fn structural(bytes: &[u8]) -> Option<usize> {
    // Brackets and braces differ in one bit only.
    let special = |b: u8| b == b'"' || b | 0x20 == b'{' || b | 0x20 == b'}';
    let mut at = 0;
    // Without an early way out, so that a long array of token ids takes vector instructions.
    while let Some(chunk) = bytes.get(at..).and_then(<[u8]>::first_chunk::<STRIDE>) {
        if chunk.iter().fold(false, |any, b| any | special(*b)) {
            break;
        }
        at += STRIDE;
    }
    Some(at + bytes.get(at..)?.iter().position(|b| special(*b))?)
}

#[cfg(test)]
mod tests;
