//! Walking JSON once, with every limit held at every value.
//!
//! A [`Shape`] says what it takes from one value; the [`Walk`] finds out which sort of value comes and calls the shape. What a shape does
//! not want is walked all the same: values are counted, depth is bounded, escapes are checked.

use super::reader::{Malformed, Number, Reader};
use crate::text::Text;
use attache_types::error::{Reason, RequestError};
use attache_types::limits::Limits;
use std::ops::Range;

/// Deepest nesting that is walked whatever the limits say: each level costs a stack frame.
const DEPTH_CEILING: u32 = 512;

/// The state of one walk over a body.
#[derive(Debug)]
pub(super) struct Walk<'l, 'de> {
    pub(super) limits: &'l Limits,
    reader: Reader<'de>,
    depth: u32,
    values: u32,
    /// The field whose raw value is being walked, for messages.
    field: Option<&'static str>,
}

/// What comes of walking something. The refusal is boxed, because every level of nesting has a place for it on the stack.
pub(super) type Walked<T> = Result<T, Box<RequestError>>;

/// What is left of an array.
#[derive(Debug)]
pub(super) struct Elements {
    first: bool,
}

impl<'l, 'de> Walk<'l, 'de> {
    /// Reads `json`, which must hold one value and nothing behind it.
    pub(super) fn read<S: Shape<'de>>(json: &'de str, limits: &'l Limits, shape: S) -> Result<S::Out, RequestError> {
        let mut walk = Walk { limits, reader: Reader::new(json), depth: 0, values: 0, field: None };
        let out = walk.value(shape).map_err(|refusal| *refusal)?;
        match walk.reader.peek() {
            None => Ok(out),
            Some(_) => Err(*walk.invalid(Malformed("trailing characters"))),
        }
    }

    /// The refusal of what is no JSON: names the place, never text of the body.
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

    /// The next value, as `shape` takes it.
    pub(super) fn value<S: Shape<'de>>(&mut self, shape: S) -> Walked<S::Out> {
        self.count()?;
        match self.reader.peek() {
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

    fn scalar(&mut self, byte: u8) -> Walked<Kind> {
        let kind = match byte {
            b'n' => self.reader.name("null").map(|()| Kind::Null),
            b't' => self.reader.name("true").map(|()| Kind::Bool(true)),
            b'f' => self.reader.name("false").map(|()| Kind::Bool(false)),
            b'-' | b'0'..=b'9' => self.reader.number().map(|number| match number {
                Number::Unsigned(value) => Kind::Unsigned(value),
                Number::Negative => Kind::Negative,
                Number::Fraction(value) => Kind::Fraction(value),
            }),
            _ => Err(Malformed("expected a value")),
        };
        kind.map_err(|e| self.invalid(e))
    }

    fn string(&mut self) -> Walked<Text<'de>> {
        self.reader.string().map_err(|e| self.invalid(e))
    }

    /// The next element of the array that `rest` is of, as `shape` takes it.
    pub(super) fn element<S: Shape<'de>>(&mut self, rest: &mut Elements, shape: S) -> Walked<Option<S::Out>> {
        if self.another(&mut rest.first, b']', "expected `,` or `]`")? { self.value(shape).map(Some) } else { Ok(None) }
    }

    /// Steps to the next element or key; false where `close` ends them.
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

    /// The next value as `shape` takes it, and where it stands.
    pub(super) fn placed<S: Shape<'de>>(&mut self, shape: S) -> Walked<(S::Out, Range<usize>)> {
        self.reader.peek();
        let start = self.reader.place();
        let out = self.value(shape)?;
        Ok((out, start..self.reader.place()))
    }

    /// The next value as the client wrote it, walked within the limits.
    pub(super) fn raw(&mut self, field: &'static str) -> Walked<&'de str> {
        self.reader.peek();
        let start = self.reader.place();
        self.field = Some(field);
        self.value(Skim)?;
        self.field = None;
        Ok(self.reader.since(start))
    }

    /// Walks the fields of an object: each of `table` (at most 64) goes to `on`, which must take its value; the rest is skimmed. A
    /// field of the table that comes twice is refused, because servers disagree on which one counts.
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
            if seen & bit != 0 {
                let error = RequestError::new(Reason::DuplicateField, format!("`{name}` comes twice, once is allowed"));
                return Err(error.param(name).into());
            }
            seen |= bit;
            on(self, name)?;
        }
        Ok(())
    }

    /// The next key with its colon: its bit and its name in the table, if it stands there.
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

/// One JSON value that is not a string and not taken apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Null,
    Bool(bool),
    Unsigned(u64),
    Negative,
    Fraction(f64),
    String,
    Array,
    Object,
}

impl Kind {
    /// What it is, for messages.
    pub(super) fn describe(self) -> &'static str {
        match self {
            Kind::Null => "null",
            Kind::Bool(_) => "a boolean",
            Kind::Unsigned(_) => "a number",
            Kind::Negative => "a negative number",
            Kind::Fraction(_) => "a fraction",
            Kind::String => "a string",
            Kind::Array => "an array",
            Kind::Object => "an object",
        }
    }
}

/// What is wanted from one JSON value. Sorts of values that a shape does not speak of go to [`Shape::other`].
pub(super) trait Shape<'de>: Sized {
    type Out;

    /// Any value that no other method takes: what it counts as, or why it is refused. An array or an object is walked after.
    fn other(self, got: Kind) -> Result<Self::Out, RequestError>;

    fn string(self, _text: Text<'de>) -> Result<Self::Out, RequestError> {
        self.other(Kind::String)
    }

    /// Must take all elements.
    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<Self::Out> {
        let out = self.other(Kind::Array)?;
        while walk.element(&mut rest, Skim)?.is_some() {}
        Ok(out)
    }

    /// Must take all fields.
    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<Self::Out> {
        let out = self.other(Kind::Object)?;
        walk.fields(&[], |_, _| Ok(()))?;
        Ok(out)
    }
}

/// Takes anything and keeps nothing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Skim;

impl Shape<'_> for Skim {
    type Out = ();

    fn other(self, _got: Kind) -> Result<(), RequestError> {
        Ok(())
    }
}
