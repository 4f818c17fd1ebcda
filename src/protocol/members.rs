//! Reads selected members of a JSON document that arrives in chunks of any size.
//!
//! A visitor selects members of the root object. It can also descend: into an object, or into each object of an array.
//! The reader passes the path from the root with each member. It skips all other objects and strings, so client text
//! that a server repeats is never mistaken for a member of the server's own.
//!
//! - Of members with the same name, the last one counts, as in Python's `json`.
//! - A skipped value is not checked. After a bracket that does not match, nothing more is found.
//!
//! Memory: one value up to a limit, and only when a chunk boundary splits it.
//!
//! Called by [`super::documents`]. Imports nothing of the crate.

mod skip;
mod text;

use skip::ValueEnd;
use std::borrow::Cow;
use text::Unescape;

/// Usual limit of a value that is read, 64 KiB. A longer one is reported as unreadable.
pub(crate) const DEFAULT_MAX_VALUE_BYTES: usize = 64 << 10;
/// Longest path from the root to an object whose members are read.
const MAX_PATH: usize = 4;

/// What to do with the value of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wanted<M> {
    /// Skip the value.
    No,
    /// Read the members of the object.
    Members(M),
    /// Read the members of each object in the array.
    Elements(M),
    /// Deliver the value as it is written.
    Value(M),
    /// Deliver the string as it arrives, unescaped.
    Text(M),
}

/// Selects the members, and receives their values. Each path has the members that lead from the root to an object; an
/// array adds one step, as an object does.
pub(super) trait Visitor {
    /// Identifies a selected member.
    type Member: Copy + Default;
    /// Returns what to do with the value of the member `name` of the object at `path`. Called for each member in order; a
    /// name that is too long is passed as an empty one.
    fn wants(&mut self, path: &[Self::Member], name: &[u8]) -> Wanted<Self::Member>;
    /// The members of the object at `path` follow.
    fn begin(&mut self, path: &[Self::Member]);
    /// The object at `path` has ended. `number` counts the objects of a list that is the root, from 0.
    fn end(&mut self, path: &[Self::Member], number: usize);
    /// The value of a selected member as it is written; `None` when it is too long.
    fn value(&mut self, path: &[Self::Member], member: Self::Member, value: Option<&[u8]>);
    /// The next bytes of a string that is wanted as text.
    fn text(&mut self, _part: &[u8]) {}
    /// The value of a selected member is not of the wanted type, and begins with `first`. It is skipped.
    fn mistyped(&mut self, _path: &[Self::Member], _member: Self::Member, _first: u8) {}
}

/// How far a document was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DocumentState {
    /// There is no byte of it yet.
    Empty,
    /// It has begun and not ended.
    Open,
    /// It has ended.
    Done,
    /// It is neither an object nor, where one is allowed, an array.
    Foreign,
    /// It is not JSON.
    Broken,
}

/// Reads one document after the other.
#[derive(Debug)]
pub(super) struct MemberReader<M> {
    /// Whether the root may be an array of objects.
    lists: bool,
    max_value_bytes: usize,
    /// Number of objects in the root's list that have ended.
    ended: usize,
    at: At,
    /// Number of open objects whose members are read.
    open: usize,
    /// The members that lead to the innermost of them: one less than objects are open.
    path: [M; MAX_PATH],
    /// Bit `n` is set while the reader is in an array of objects below `n` open objects.
    arrays: u32,
    wanted: Wanted<M>,
    end: ValueEnd,
    text: Unescape,
    /// The start of a name or value that a chunk boundary splits.
    kept: Vec<u8>,
    too_long: bool,
}

/// The part of the document that comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Start,
    Element,
    FirstName,
    Name,
    InName,
    Colon,
    Value,
    InValue,
    InText,
    Next,
    Done,
    Foreign,
    Broken,
}

impl<M: Copy + Default> MemberReader<M> {
    /// Creates a reader of objects, or with `lists` of objects and arrays of objects, and of values up to a length.
    pub(super) fn new(lists: bool, max_value_bytes: usize) -> Self {
        Self {
            lists,
            max_value_bytes,
            ended: 0,
            at: At::Start,
            open: 0,
            path: [M::default(); MAX_PATH],
            arrays: 0,
            wanted: Wanted::No,
            end: ValueEnd::default(),
            text: Unescape::default(),
            kept: Vec::new(),
            too_long: false,
        }
    }

    /// How far the document was read.
    pub(super) fn state(&self) -> DocumentState {
        match self.at {
            At::Start => DocumentState::Empty,
            At::Done => DocumentState::Done,
            At::Foreign => DocumentState::Foreign,
            At::Broken => DocumentState::Broken,
            _ => DocumentState::Open,
        }
    }

    /// Starts another document.
    pub(super) fn restart(&mut self) {
        self.kept.clear();
        let kept = std::mem::take(&mut self.kept);
        *self = Self { kept, ..Self::new(self.lists, self.max_value_bytes) };
    }

    /// Processes the next bytes of the document. Bytes after its end are ignored.
    pub(super) fn push(&mut self, chunk: &[u8], visitor: &mut impl Visitor<Member = M>) {
        let mut rest = chunk;
        while let Some(byte) = rest.first() {
            let taken = match self.at {
                At::InName => self.name(rest, visitor),
                At::InValue => self.value(rest, visitor),
                At::InText => {
                    let (taken, has_ended) = self.text.push(rest, &mut |part| visitor.text(part));
                    if has_ended {
                        self.at = At::Next;
                    }
                    taken
                }
                At::Done | At::Foreign | At::Broken => return,
                _ if byte.is_ascii_whitespace() => 1,
                At::Value => self.begin_value(*byte, visitor),
                _ => self.step(*byte, visitor),
            };
            rest = rest.get(taken..).unwrap_or_default();
        }
    }

    /// The members that lead to the innermost open object.
    fn path(&self) -> &[M] {
        self.path.get(..self.open.saturating_sub(1)).unwrap_or_default()
    }

    /// Whether the elements of an array come next, and not the members of an object.
    fn is_in_array(&self) -> bool {
        self.arrays >> self.open & 1 == 1
    }

    /// Consumes one byte between names and values, or none when it begins a value. Returns the number of bytes.
    fn step(&mut self, byte: u8, visitor: &mut impl Visitor<Member = M>) -> usize {
        self.at = match (self.at, byte) {
            // A byte order mark, which JSON readers remove.
            (At::Start, 0xEF | 0xBB | 0xBF) => At::Start,
            (At::Start | At::Element, b'{') => self.begin(visitor),
            (At::Start, b'[') if self.lists => {
                self.arrays = 1;
                At::Element
            }
            (At::Start, _) => At::Foreign,
            (At::FirstName | At::Name, b'"') => At::InName,
            (At::FirstName | At::Next, b'}') if !self.is_in_array() => self.close(visitor),
            (At::Colon, b':') => At::Value,
            (At::Next, b',') if self.is_in_array() => At::Element,
            (At::Next, b',') => At::Name,
            (At::Element | At::Next, b']') if self.is_in_array() => {
                self.arrays &= !(1 << self.open);
                if self.open > 0 { At::Next } else { At::Done }
            }
            (At::Element, b',' | b':' | b']' | b'}') => At::Broken,
            (At::Element, _) => {
                self.wanted = Wanted::No;
                return self.begin_other();
            }
            _ => At::Broken,
        };
        1
    }

    /// Consumes the first byte of a member's value, or none when the value is delivered or skipped as a whole.
    fn begin_value(&mut self, byte: u8, visitor: &mut impl Visitor<Member = M>) -> usize {
        self.at = match (self.wanted, byte) {
            (_, b',' | b':' | b']' | b'}') => At::Broken,
            (Wanted::Members(member), b'{') if self.follow(member) => self.begin(visitor),
            (Wanted::Elements(member), b'[') if self.follow(member) => {
                self.arrays |= 1 << self.open;
                At::Element
            }
            (Wanted::Text(_), b'"') => {
                self.text = Unescape::default();
                At::InText
            }
            (Wanted::Members(member) | Wanted::Elements(member) | Wanted::Text(member), _) => {
                visitor.mistyped(self.path(), member, byte);
                self.wanted = Wanted::No;
                return self.begin_other();
            }
            (Wanted::No | Wanted::Value(_), _) => return self.begin_other(),
        };
        1
    }

    fn begin_other(&mut self) -> usize {
        (self.end, self.at) = (ValueEnd::default(), At::InValue);
        0
    }

    /// Adds a member to the path of the objects that follow. False if the path is too long.
    fn follow(&mut self, member: M) -> bool {
        let step = self.open.checked_sub(1).and_then(|at| self.path.get_mut(at));
        step.map(|step| *step = member).is_some()
    }

    fn begin(&mut self, visitor: &mut impl Visitor<Member = M>) -> At {
        self.open += 1;
        visitor.begin(self.path());
        At::FirstName
    }

    fn close(&mut self, visitor: &mut impl Visitor<Member = M>) -> At {
        visitor.end(self.path(), self.ended);
        self.open = self.open.saturating_sub(1);
        if self.open > 0 {
            return At::Next;
        }
        self.ended += 1;
        if self.is_in_array() { At::Next } else { At::Done }
    }

    /// Consumes bytes of a name. Returns how many.
    fn name(&mut self, rest: &[u8], visitor: &mut impl Visitor<Member = M>) -> usize {
        let end = self.end.of_text(rest, 0);
        let part = rest.get(..end.map_or(rest.len(), |end| end - 1)).unwrap_or_default();
        if end.is_none() || !self.kept.is_empty() || self.too_long {
            self.keep(part);
        }
        let Some(end) = end else { return rest.len() };
        self.wanted = {
            let name = if self.kept.is_empty() { part } else { &self.kept };
            visitor.wants(self.path(), &unescaped(if self.too_long { &[] } else { name }))
        };
        self.forget();
        self.at = At::Colon;
        end
    }

    /// Consumes bytes of a value. Returns how many.
    fn value(&mut self, rest: &[u8], visitor: &mut impl Visitor<Member = M>) -> usize {
        let end = self.end.of_value(rest);
        if let Wanted::Value(member) = self.wanted {
            let part = rest.get(..end.unwrap_or(rest.len())).unwrap_or_default();
            let whole = end.is_some() && self.kept.is_empty() && !self.too_long;
            if !whole || part.len() > self.max_value_bytes {
                self.keep(part);
            }
            if end.is_some() {
                let value = if whole && !self.too_long { part } else { &self.kept };
                visitor.value(self.path(), member, Some(value).filter(|_| !self.too_long));
                self.forget();
            }
        }
        if end.is_some() {
            self.at = At::Next;
        }
        end.unwrap_or(rest.len())
    }

    fn keep(&mut self, part: &[u8]) {
        self.too_long |= self.kept.len() + part.len() > self.max_value_bytes;
        if self.too_long {
            self.kept = Vec::new();
        } else {
            self.kept.extend_from_slice(part);
        }
    }

    fn forget(&mut self) {
        self.kept.clear();
        self.too_long = false;
    }
}

/// A name without its escapes; as it is written if they are not valid.
fn unescaped(name: &[u8]) -> Cow<'_, [u8]> {
    if !name.contains(&b'\\') {
        return name.into();
    }
    let text = [b"\"", name, b"\""].concat();
    serde_json::from_slice::<String>(&text).map_or(Cow::Borrowed(name), |name| name.into_bytes().into())
}

/// Returns the bytes between the quotes of a JSON string; empty for any other value.
pub(super) fn unquoted(value: &[u8]) -> &[u8] {
    value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\"")).unwrap_or_default()
}

#[cfg(test)]
mod tests;
