//! Walks JSON once and enforces every limit at every value.
//!
//! A [`ValueShape`] defines what is read from one value; the [`Walk`] finds the type of the value and calls the shape.
//! Values that no shape takes are walked all the same: values are counted, depth is limited, escapes are checked.

use super::reader::{Malformed, Number, Reader};
use crate::text::Text;
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;
use std::ops::Range;

/// Deepest nesting that is walked whatever the limits are: each level costs a stack frame.
const DEPTH_CEILING: u32 = 512;
/// Members that may occur twice, of which the last one counts: they say who sent the request, not what servers compute.
const REPEATABLE: &[&str] = &["session_id", "metadata", "user_id"];

/// The state of one walk over a body.
#[derive(Debug)]
pub(super) struct Walk<'l, 'de> {
    pub(super) limits: &'l Limits,
    reader: Reader<'de>,
    depth: u32,
    values: u32,
    /// The member whose raw value is being walked, for messages.
    field: Option<&'static str>,
}

/// Result of walking a value. The error is boxed, because every level of nesting has space for it on the stack.
pub(super) type Walked<T> = Result<T, Box<RequestError>>;

/// The remaining elements of an array.
#[derive(Debug)]
pub(super) struct Elements {
    first: bool,
}

impl<'l, 'de> Walk<'l, 'de> {
    /// Walks `json`, which must be exactly one value.
    pub(super) fn read<S: ValueShape<'de>>(
        json: &'de str,
        limits: &'l Limits,
        shape: S,
    ) -> Result<S::Out, RequestError> {
        let mut walk = Walk { limits, reader: Reader::new(json), depth: 0, values: 0, field: None };
        let out = walk.value(shape).map_err(|refusal| *refusal)?;
        match walk.reader.peek() {
            None => Ok(out),
            Some(_) => Err(*walk.invalid(Malformed("trailing characters"))),
        }
    }

    /// Returns the error for invalid JSON. It names the position, and never quotes the body.
    #[cold]
    fn invalid(&self, Malformed(what): Malformed) -> Box<RequestError> {
        let (line, column) = self.reader.position();
        let field = self.field.map(|field| format!(" in `{field}`")).unwrap_or_default();
        let message = format!("invalid JSON{field}: {what} at line {line} column {column}");
        let error = RequestError::new(Reason::InvalidJson, message);
        Box::new(match self.field {
            Some(field) => error.param(field),
            None => error,
        })
    }

    fn count(&mut self) -> Walked<()> {
        self.values += 1;
        let allowed = self.limits.max_json_values;
        if self.values <= allowed {
            return Ok(());
        }
        let message = format!("the body holds more than {allowed} JSON values and keys");
        Err(RequestError::new(Reason::JsonTooComplex, message).into())
    }

    fn enter(&mut self) -> Walked<()> {
        self.depth += 1;
        let allowed = self.limits.max_json_depth.min(DEPTH_CEILING);
        if self.depth <= allowed {
            return Ok(());
        }
        let message = format!("the body nests deeper than the {allowed} levels allowed");
        Err(RequestError::new(Reason::JsonTooDeep, message).into())
    }

    fn leave(&mut self) {
        self.depth -= 1;
    }

    /// Reads the next value with `shape`.
    pub(super) fn value<S: ValueShape<'de>>(&mut self, shape: S) -> Walked<S::Out> {
        let first = self.reader.peek();
        if !(S::NUMBERS_ARE_FREE && first.is_some_and(|byte| byte.is_ascii_digit() || byte == b'-')) {
            self.count()?;
        }
        match first {
            Some(b'"') => Ok(shape.string(self.string()?)?),
            Some(b'{') => {
                self.reader.step();
                self.enter()?;
                let out = shape.object(self)?;
                self.leave();
                Ok(out)
            }
            Some(b'[') => {
                self.reader.step();
                self.enter()?;
                let out = shape.array(self, Elements { first: true })?;
                self.leave();
                Ok(out)
            }
            Some(byte) => Ok(shape.other(self.scalar(byte)?)?),
            None => Err(self.invalid(Malformed("unexpected end of the text"))),
        }
    }

    /// Whether the next byte that is no white space is this one.
    pub(super) fn is_at(&mut self, byte: u8) -> bool {
        self.reader.peek() == Some(byte)
    }

    fn scalar(&mut self, byte: u8) -> Walked<ValueType> {
        let kind = match byte {
            b'n' => self.reader.name("null").map(|()| ValueType::Null),
            b't' => self.reader.name("true").map(|()| ValueType::Bool(true)),
            b'f' => self.reader.name("false").map(|()| ValueType::Bool(false)),
            b'-' | b'0'..=b'9' => self.reader.number().map(|number| match number {
                Number::Unsigned(value) => ValueType::Unsigned(value),
                Number::Negative => ValueType::Negative,
                Number::Fraction(value) => ValueType::Fraction(value),
            }),
            _ => Err(Malformed("expected a value")),
        };
        kind.map_err(|e| self.invalid(e))
    }

    fn string(&mut self) -> Walked<Text<'de>> {
        self.reader.string().map_err(|e| self.invalid(e))
    }

    /// Reads the next element of an array with `shape`; `None` after the last.
    pub(super) fn element<S: ValueShape<'de>>(&mut self, rest: &mut Elements, shape: S) -> Walked<Option<S::Out>> {
        if self.another(&mut rest.first, b']', "expected `,` or `]`")? { self.value(shape).map(Some) } else { Ok(None) }
    }

    /// Moves to the next element or key; returns false at `close`.
    fn another(&mut self, first: &mut bool, close: u8, expected: &'static str) -> Walked<bool> {
        if self.reader.peek() == Some(close) {
            self.reader.step();
            return Ok(false);
        }
        if !std::mem::take(first) {
            self.reader.expect(b',', expected).map_err(|e| self.invalid(e))?;
        }
        Ok(true)
    }

    /// Reads the next value with `shape`, and returns its range of bytes.
    pub(super) fn placed<S: ValueShape<'de>>(&mut self, shape: S) -> Walked<(S::Out, Range<usize>)> {
        self.reader.peek();
        let start = self.reader.place();
        let out = self.value(shape)?;
        Ok((out, start..self.reader.place()))
    }

    /// Whether the next value is `null`, as far as its first byte says.
    pub(super) fn is_null(&mut self) -> bool {
        self.reader.peek() == Some(b'n')
    }

    /// Reads the next value, and returns it as the client wrote it.
    pub(super) fn raw_of<S: ValueShape<'de>>(&mut self, shape: S) -> Walked<&'de str> {
        self.reader.peek();
        let start = self.reader.place();
        self.value(shape)?;
        Ok(self.reader.since(start))
    }

    /// Returns the next value as the client wrote it, after checking the limits.
    pub(super) fn raw(&mut self, field: &'static str) -> Walked<&'de str> {
        self.reader.peek();
        let start = self.reader.place();
        self.field = Some(field);
        self.value(Skim)?;
        self.field = None;
        Ok(self.reader.since(start))
    }

    /// Walks the members of an object. Each one in `table` (at most 64 names) is passed to `on`, which must read
    /// its value; others are skipped. A member of the table that occurs twice is rejected, because servers
    /// disagree on which one counts. Those in [`REPEATABLE`] are not.
    pub(super) fn fields(
        &mut self,
        table: &'static [&'static str],
        mut on: impl FnMut(&mut Self, &'static str) -> Walked<()>,
    ) -> Walked<()> {
        let (mut seen, mut first) = (0u64, true);
        while self.another(&mut first, b'}', "expected `,` or `}`")? {
            let Some((bit, name)) = self.key(table)? else {
                self.value(Skim)?;
                continue;
            };
            if seen & bit != 0 && !REPEATABLE.contains(&name) {
                let error = RequestError::new(Reason::DuplicateField, format!("`{name}` comes twice, once is allowed"));
                return Err(error.param(name).into());
            }
            seen |= bit;
            on(self, name)?;
        }
        Ok(())
    }

    /// Reads the next key and its colon. Returns its bit and its name if the table has it.
    fn key(&mut self, table: &'static [&'static str]) -> Walked<Option<(u64, &'static str)>> {
        self.count()?;
        if self.reader.peek() != Some(b'"') {
            return Err(self.invalid(Malformed("expected a key")));
        }
        let key = self.string()?;
        self.reader.expect(b':', "expected `:`").map_err(|e| self.invalid(e))?;
        let key = key.get();
        Ok((0u32..64).zip(table).find(|(_, name)| **name == key).map(|(i, name)| (1 << i, *name)))
    }
}

/// The type of a JSON value that is not a string and is not read further.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum ValueType {
    Null,
    Bool(bool),
    Unsigned(u64),
    Negative,
    Fraction(f64),
    String,
    Array,
    Object,
}

impl ValueType {
    /// Returns the name of the type, for messages.
    pub(super) fn describe(self) -> &'static str {
        match self {
            ValueType::Null => "null",
            ValueType::Bool(_) => "a boolean",
            ValueType::Unsigned(_) => "a number",
            ValueType::Negative => "a negative number",
            ValueType::Fraction(_) => "a fraction",
            ValueType::String => "a string",
            ValueType::Array => "an array",
            ValueType::Object => "an object",
        }
    }
}

/// Defines what is taken from one JSON value. Types without their own method go to [`ValueShape::other`].
pub(super) trait ValueShape<'de>: Sized {
    type Out;
    /// Whether a number does not count as one of [`Limits::max_json_values`]. Set for elements of flat lists of numbers,
    /// which cost no more memory than their bytes.
    const NUMBERS_ARE_FREE: bool = false;

    /// Any value that no other method takes. Returns its result, or the reason for which it is rejected. Arrays
    /// and objects are walked afterwards.
    fn other(self, got: ValueType) -> Result<Self::Out, RequestError>;

    fn string(self, _text: Text<'de>) -> Result<Self::Out, RequestError> {
        self.other(ValueType::String)
    }

    /// Must read all elements.
    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<Self::Out> {
        let out = self.other(ValueType::Array)?;
        while walk.element(&mut rest, Skim)?.is_some() {}
        Ok(out)
    }

    /// Must read all members.
    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<Self::Out> {
        let out = self.other(ValueType::Object)?;
        walk.fields(&[], |_, _| Ok(()))?;
        Ok(out)
    }
}

/// As [`Skim`], for prompts in the form of numbers: vectors of embeddings.
#[derive(Clone, Copy, Debug)]
pub(super) struct Opaque;

impl<'de> ValueShape<'de> for Opaque {
    type Out = ();
    const NUMBERS_ARE_FREE: bool = true;

    fn other(self, _got: ValueType) -> Result<(), RequestError> {
        Ok(())
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        while walk.element(&mut rest, Opaque)?.is_some() {}
        Ok(())
    }
}

/// Accepts any value and keeps nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Skim;

impl ValueShape<'_> for Skim {
    type Out = ();

    fn other(self, _got: ValueType) -> Result<(), RequestError> {
        Ok(())
    }
}
