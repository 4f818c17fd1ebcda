//! Walking JSON once, with every limit held at every value.
//!
//! serde's own `IgnoredAny` and `RawValue` take any depth, so nothing here uses them for values whose depth or size matters
//! without walking them too. A [`Shape`] says what it takes from one value; [`Any`] asks serde_json which sort of value comes and
//! calls the shape. What a shape does not want is walked all the same: values are counted, depth is bounded, escapes are checked.

use crate::error::{Reason, RequestError};
use crate::limits::Limits;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::fmt;

/// Deepest nesting that is walked whatever the limits say: each level costs a stack frame.
const DEPTH_CEILING: u32 = 512;

/// The state of one walk over a body.
#[derive(Debug)]
pub(super) struct Walk<'l> {
    pub(super) limits: &'l Limits,
    depth: u32,
    values: u32,
    failure: Option<RequestError>,
}

impl<'l> Walk<'l> {
    /// Reads `json`, which must hold one value and nothing behind it.
    pub(super) fn read<'de, S: Shape<'de>>(
        json: &'de str,
        limits: &'l Limits,
        shape: S,
    ) -> Result<S::Out, RequestError> {
        let mut walk = Walk { limits, depth: 0, values: 0, failure: None };
        walk.document(json, shape).map_err(|e| walk.refusal(&e))
    }

    fn document<'de, S: Shape<'de>>(&mut self, json: &'de str, shape: S) -> serde_json::Result<S::Out> {
        let mut deserializer = serde_json::Deserializer::from_str(json);
        deserializer.disable_recursion_limit();
        let out = Any { walk: self, shape }.deserialize(&mut deserializer)?;
        deserializer.end()?;
        Ok(out)
    }

    /// Notes why the walk ends; what comes back only unwinds serde_json.
    pub(super) fn fail<E: de::Error>(&mut self, error: RequestError) -> E {
        self.failure.get_or_insert(error);
        E::custom("refused")
    }

    fn refusal(&mut self, error: &serde_json::Error) -> RequestError {
        // serde_json's own messages name bytes and positions, never text of the body.
        self.failure.take().unwrap_or_else(|| RequestError::new(Reason::InvalidJson, format!("invalid JSON: {error}")))
    }

    fn count<E: de::Error>(&mut self) -> Result<(), E> {
        self.values += 1;
        if self.values <= self.limits.max_json_values {
            return Ok(());
        }
        let allowed = self.limits.max_json_values;
        Err(self.fail(RequestError::new(
            Reason::JsonTooComplex,
            format!("the body holds more than {allowed} JSON values and keys"),
        )))
    }

    fn enter<E: de::Error>(&mut self) -> Result<(), E> {
        self.depth += 1;
        let allowed = self.limits.max_json_depth.min(DEPTH_CEILING);
        if self.depth <= allowed {
            return Ok(());
        }
        Err(self.fail(RequestError::new(
            Reason::JsonTooDeep,
            format!("the body nests deeper than the {allowed} levels allowed"),
        )))
    }

    fn leave(&mut self) {
        self.depth -= 1;
    }

    /// The next value of `map`, as `shape` takes it.
    pub(super) fn value<'de, S: Shape<'de>, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
        shape: S,
    ) -> Result<S::Out, A::Error> {
        map.next_value_seed(Any { walk: self, shape })
    }

    /// The next element of `seq`, as `shape` takes it.
    pub(super) fn element<'de, S: Shape<'de>, A: SeqAccess<'de>>(
        &mut self,
        seq: &mut A,
        shape: S,
    ) -> Result<Option<S::Out>, A::Error> {
        seq.next_element_seed(Any { walk: self, shape })
    }

    /// The next value of `map` as the client wrote it, once it has been walked within the limits.
    pub(super) fn raw<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
        field: &'static str,
    ) -> Result<&'de str, A::Error> {
        let raw = map.next_value::<&'de RawValue>()?.get();
        self.nested(raw, field, Skim)?;
        Ok(raw)
    }

    /// Walks `raw`, a value inside the body that is being walked.
    pub(super) fn nested<'de, S: Shape<'de>, E: de::Error>(
        &mut self,
        raw: &'de str,
        field: &'static str,
        shape: S,
    ) -> Result<S::Out, E> {
        self.document(raw, shape).map_err(|error| {
            let error = RequestError::new(Reason::InvalidJson, format!("invalid JSON in `{field}`: {error} of it"));
            self.fail(error.param(field))
        })
    }

    /// Walks the fields of an object: each of `table` (at most 64) goes to `on`, which must take its value; the rest is skimmed. A
    /// field of the table that comes twice is refused, because servers disagree on which one counts.
    pub(super) fn fields<'de, A: MapAccess<'de>>(
        &mut self,
        map: &mut A,
        table: &'static [&'static str],
        mut on: impl FnMut(&mut Self, &mut A, &'static str) -> Result<(), A::Error>,
    ) -> Result<(), A::Error> {
        let mut seen = 0u64;
        while let Some(found) = map.next_key_seed(Any { walk: self, shape: Key { table } })? {
            let Some((bit, name)) = found else {
                self.value(map, Skim)?;
                continue;
            };
            if seen & bit != 0 {
                let error = RequestError::new(Reason::DuplicateField, format!("`{name}` comes twice, once is allowed"));
                return Err(self.fail(error.param(name)));
            }
            seen |= bit;
            on(self, map, name)?;
        }
        Ok(())
    }
}

/// One JSON value that is not a string and not taken apart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Kind {
    Null,
    Bool(bool),
    Unsigned(u64),
    Negative,
    Fraction,
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
            Kind::Fraction => "a fraction",
            Kind::String => "a string",
            Kind::Array => "an array",
            Kind::Object => "an object",
        }
    }
}

/// A string of the body: borrowed from it, or from serde_json's scratch space when it held escapes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Str<'de, 's> {
    Body(&'de str),
    Scratch(&'s str),
}

impl<'de> Str<'de, '_> {
    pub(super) fn get(&self) -> &str {
        match self {
            Str::Body(s) => s,
            Str::Scratch(s) => s,
        }
    }

    pub(super) fn into_cow(self) -> Cow<'de, str> {
        match self {
            Str::Body(s) => Cow::Borrowed(s),
            Str::Scratch(s) => Cow::Owned(s.to_owned()),
        }
    }
}

/// What is wanted from one JSON value. Sorts of values that a shape does not speak of go to [`Shape::other`].
pub(super) trait Shape<'de>: Sized {
    type Out;

    /// Any value that no other method takes: what it counts as, or why it is refused. An array or an object is walked after.
    fn other(self, got: Kind) -> Result<Self::Out, RequestError>;

    fn string(self, _text: Str<'de, '_>) -> Result<Self::Out, RequestError> {
        self.other(Kind::String)
    }

    fn array<A: SeqAccess<'de>>(self, walk: &mut Walk<'_>, seq: &mut A) -> Result<Self::Out, A::Error> {
        let out = self.other(Kind::Array).map_err(|e| walk.fail(e))?;
        while walk.element(seq, Skim)?.is_some() {}
        Ok(out)
    }

    fn object<A: MapAccess<'de>>(self, walk: &mut Walk<'_>, map: &mut A) -> Result<Self::Out, A::Error> {
        let out = self.other(Kind::Object).map_err(|e| walk.fail(e))?;
        walk.fields(map, &[], |_, _, _| Ok(()))?;
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

/// A key of an object: its bit and its name in the table, if it stands there.
#[derive(Clone, Copy, Debug)]
struct Key {
    table: &'static [&'static str],
}

impl Shape<'_> for Key {
    type Out = Option<(u64, &'static str)>;

    fn other(self, _got: Kind) -> Result<Self::Out, RequestError> {
        Ok(None)
    }

    fn string(self, text: Str<'_, '_>) -> Result<Self::Out, RequestError> {
        let text = text.get();
        Ok((0u32..64).zip(self.table).find(|(_, name)| **name == text).map(|(i, name)| (1 << i, *name)))
    }
}

/// Asks serde_json for the next value, whatever it is, and hands it to a shape.
struct Any<'w, 'l, S> {
    walk: &'w mut Walk<'l>,
    shape: S,
}

impl<'de, S: Shape<'de>> DeserializeSeed<'de> for Any<'_, '_, S> {
    type Value = S::Out;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Out, D::Error> {
        self.walk.count()?;
        deserializer.deserialize_any(self)
    }
}

impl<'de, S: Shape<'de>> Any<'_, '_, S> {
    fn scalar<E: de::Error>(self, kind: Kind) -> Result<S::Out, E> {
        self.shape.other(kind).map_err(|e| self.walk.fail(e))
    }
}

impl<'de, S: Shape<'de>> Visitor<'de> for Any<'_, '_, S> {
    type Value = S::Out;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E: de::Error>(self) -> Result<S::Out, E> {
        self.scalar(Kind::Null)
    }

    fn visit_bool<E: de::Error>(self, value: bool) -> Result<S::Out, E> {
        self.scalar(Kind::Bool(value))
    }

    fn visit_u64<E: de::Error>(self, value: u64) -> Result<S::Out, E> {
        self.scalar(Kind::Unsigned(value))
    }

    fn visit_i64<E: de::Error>(self, _value: i64) -> Result<S::Out, E> {
        self.scalar(Kind::Negative)
    }

    fn visit_f64<E: de::Error>(self, _value: f64) -> Result<S::Out, E> {
        self.scalar(Kind::Fraction)
    }

    fn visit_borrowed_str<E: de::Error>(self, value: &'de str) -> Result<S::Out, E> {
        self.shape.string(Str::Body(value)).map_err(|e| self.walk.fail(e))
    }

    fn visit_str<E: de::Error>(self, value: &str) -> Result<S::Out, E> {
        self.shape.string(Str::Scratch(value)).map_err(|e| self.walk.fail(e))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<S::Out, A::Error> {
        self.walk.enter()?;
        let out = self.shape.array(self.walk, &mut seq)?;
        self.walk.leave();
        Ok(out)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<S::Out, A::Error> {
        self.walk.enter()?;
        let out = self.shape.object(self.walk, &mut map)?;
        self.walk.leave();
        Ok(out)
    }
}
