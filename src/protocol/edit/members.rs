//! Iteration over the members of a JSON object and the elements of an array, without parsing their values.

use super::super::text::unescaped;
use super::EditError;
use memchr::memchr;
use std::borrow::Cow;

/// Bytes that are processed together outside of strings.
const STRIDE: usize = 32;

/// One member of an object.
#[derive(Clone, Copy, Debug)]
pub struct Member<'b> {
    /// The bytes between the quotes of the key.
    key: &'b [u8],
    /// The value as it was written.
    pub value: &'b [u8],
    /// Start of the member in the object: the key's opening quote.
    pub(super) start: usize,
    pub(super) end: usize,
}

impl<'b> Member<'b> {
    /// Whether `key` is its key, in any spelling.
    #[must_use]
    pub fn is(&self, key: &str) -> bool {
        self.key == key.as_bytes() || (memchr(b'\\', self.key).is_some() && self.name() == key)
    }

    /// Returns the key, unescaped.
    #[must_use]
    pub fn name(&self) -> Cow<'b, str> {
        match std::str::from_utf8(self.key) {
            Ok(plain) if !plain.contains('\\') => Cow::Borrowed(plain),
            Ok(escaped) => Cow::Owned(unescaped(escaped)),
            Err(_) => String::from_utf8_lossy(self.key),
        }
    }

    /// Returns the value, unless it is null.
    #[must_use]
    pub fn given(&self) -> Option<&'b [u8]> {
        Some(self.value).filter(|value| *value != b"null")
    }
}

/// Iterates over the members of an object, in order. Ends after the first error.
#[derive(Clone, Debug)]
pub struct Members<'b> {
    object: &'b [u8],
    pub(super) at: usize,
    first: bool,
    ended: bool,
}

impl<'b> Members<'b> {
    /// Creates an iterator over the members of `object`, which may have white space around it, and a byte order mark
    /// before it.
    ///
    /// # Errors
    /// [`EditError::NotAnObject`]; errors after the opening brace are found during the iteration.
    pub fn new(object: &'b [u8]) -> Result<Self, EditError> {
        let at = space(object, object.len() - crate::without_mark(object).len());
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

/// Iterates over the elements of a JSON array as they were written; ends at invalid JSON.
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

/// Returns the type of a value, from its first byte.
fn sort(first: Option<u8>) -> &'static str {
    match first {
        None => "nothing",
        Some(b'{') => "an object",
        Some(b'[') => "an array",
        Some(b'"') => "a string",
        Some(b'n') => "null",
        Some(b't' | b'f') => "a boolean",
        Some(b'-' | b'0'..=b'9') => "a number",
        Some(_) => "invalid JSON",
    }
}

/// Returns the index of the next byte that is not white space.
fn space(bytes: &[u8], from: usize) -> usize {
    let rest = bytes.get(from..).unwrap_or_default();
    from + rest.iter().take_while(|b| matches!(b, b' ' | b'\n' | b'\t' | b'\r')).count()
}

/// Returns the end of the value that begins at `start`.
pub(super) fn value_end(bytes: &[u8], start: usize) -> Option<usize> {
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

/// Returns the end of the string whose opening quote is at `start`: after the first quote with an even
/// number of backslashes before it.
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

/// Returns the end of the array or object that begins at `start`: after the bracket that closes as many as were opened.
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

/// Returns the index of the first quote, bracket or brace.
fn structural(bytes: &[u8]) -> Option<usize> {
    // Brackets and braces differ in one bit only.
    let special = |b: u8| b == b'"' || b | 0x20 == b'{' || b | 0x20 == b'}';
    let mut at = 0;
    // Without an early exit, so that long arrays of token ids use vector instructions.
    while let Some(chunk) = bytes.get(at..).and_then(<[u8]>::first_chunk::<STRIDE>) {
        if chunk.iter().fold(false, |any, b| any | special(*b)) {
            break;
        }
        at += STRIDE;
    }
    Some(at + bytes.get(at..)?.iter().position(|b| special(*b))?)
}
