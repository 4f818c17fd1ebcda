//! JSON of a request as template values: each list and object is parsed when the template accesses it, and not before.
//!
//! A value for every number and key of a body would take up to a hundred times the body's memory. Most templates pass
//! tools through `tojson`, which writes a [`Node`] directly from its JSON. Values that a template accesses are charged
//! to the request's [`WorkLimit`]. If the work does not allow them, the node is empty and the work is stopped, so the
//! render fails at its next output.

use super::python::Dumped;
use crate::work::{Stopped, WorkLimit};
use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectRepr};
use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use xxhash_rust::xxh3::xxh3_64;

/// Memory of a value in a list.
const VALUE_BYTES: usize = size_of::<Value>();
/// Memory of an entry in an object: two values, a hash and its slot in the table.
const ENTRY_BYTES: usize = 2 * VALUE_BYTES + 24;
/// Memory of a list, an object or a text besides its content.
const ALLOCATION_BYTES: usize = 32;
/// Longest text that is stored inside its value, in bytes.
const SHORT_TEXT_BYTES: usize = 22;

/// A JSON list or object of a request.
#[derive(Debug)]
pub(super) struct Node {
    json: Arc<Json>,
    at: Range<usize>,
    /// Its values, once they have been accessed.
    level: OnceLock<Value>,
    /// Bytes that are charged for it.
    charged: AtomicUsize,
}

/// The JSON text that nodes refer to.
#[derive(Debug)]
struct Json {
    text: Box<str>,
    work: WorkLimit,
}

impl Drop for Json {
    fn drop(&mut self) {
        self.work.release(self.text.len());
    }
}

/// Returns the value of `json`, which has passed `protocol::parse`. A list or an object is charged while it
/// lives; the caller charges texts.
///
/// # Errors
/// [`Stopped`] when the work does not allow it.
pub(super) fn value(json: &RawValue, work: &WorkLimit) -> Result<Value, Stopped> {
    let json = json.get();
    if !is_nested(json) {
        return Ok(scalar(json));
    }
    work.charge(json.len())?;
    let json = Arc::new(Json { text: json.into(), work: work.clone() });
    let at = 0..json.text.len();
    Node::value(json, at)
}

/// Returns the value of a text that should be JSON; `None` when it is not.
///
/// # Errors
/// [`Stopped`] when the work does not allow it.
pub(super) fn parse(text: &str, work: &WorkLimit) -> Result<Option<Value>, Stopped> {
    if serde_json::from_str::<Sound>(text).is_err() {
        return Ok(None);
    }
    serde_json::from_str(text).ok().map(|json: &RawValue| value(json, work)).transpose()
}

fn is_nested(json: &str) -> bool {
    json.starts_with(['[', '{'])
}

/// Returns a string, a number, a boolean or null. A value that templates cannot represent counts as absent.
fn scalar(json: &str) -> Value {
    serde_json::from_str(json).unwrap_or_default()
}

impl Node {
    fn value(json: Arc<Json>, at: Range<usize>) -> Result<Value, Stopped> {
        let node = Self { json, at, level: OnceLock::new(), charged: AtomicUsize::new(0) };
        node.charge(size_of::<Self>() + ALLOCATION_BYTES)?;
        Ok(Value::from_object(node))
    }

    /// Charges `bytes` while the node lives.
    fn charge(&self, bytes: usize) -> Result<(), Stopped> {
        self.json.work.charge(bytes)?;
        self.charged.fetch_add(bytes, Relaxed);
        Ok(())
    }

    fn text(&self) -> &str {
        self.json.text.get(self.at.clone()).unwrap_or_default()
    }

    fn is_list(&self) -> bool {
        self.text().starts_with('[')
    }

    /// Returns the work that the node is charged to.
    pub(super) fn work(&self) -> &WorkLimit {
        &self.json.work
    }

    /// Returns the value of a part of this node's JSON.
    fn part(&self, part: &RawValue) -> Result<Value, Stopped> {
        let part = part.get();
        if !is_nested(part) {
            self.charge(if part.len() > SHORT_TEXT_BYTES { part.len() + ALLOCATION_BYTES } else { 0 })?;
            return Ok(scalar(part));
        }
        let start = part.as_ptr().addr().saturating_sub(self.json.text.as_ptr().addr());
        Self::value(self.json.clone(), start..start + part.len())
    }

    /// Returns its values: a list, or an object with each key once.
    fn level(&self) -> &Value {
        let take = || {
            self.work().check().ok()?;
            Level(self).deserialize(&mut serde_json::Deserializer::from_str(self.text())).ok()
        };
        self.level.get_or_init(|| take().unwrap_or_default())
    }

    /// Writes it as `json.dumps` does; returns false when a key occurs twice, of which only the last counts.
    ///
    /// # Errors
    /// [`Stopped`] when the work was stopped.
    pub(super) fn write(&self, out: &mut Dumped, depth: usize) -> Result<bool, Stopped> {
        let mut twice = false;
        let dump = Dump { out, depth, work: self.work(), twice: &mut twice };
        match dump.deserialize(&mut serde_json::Deserializer::from_str(self.text())) {
            Ok(()) => Ok(true),
            Err(_) if twice => Ok(false),
            // Its JSON was checked before, so only the work can have failed.
            Err(_) => Err(self.work().check().err().unwrap_or(Stopped::TooLarge)),
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.json.work.release(*self.charged.get_mut());
    }
}

impl Object for Node {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        if self.is_list() { ObjectRepr::Seq } else { ObjectRepr::Map }
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.level().get_item(key).ok().filter(|value| !value.is_undefined())
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.level().get_attr(key).ok().filter(|value| !value.is_undefined())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let level = self.level();
        if self.is_list() {
            return Enumerator::Seq(level.len().unwrap_or(0));
        }
        Enumerator::Values(level.try_iter().map(Iterator::collect).unwrap_or_default())
    }
}

/// Valid JSON, nested no deeper than serde_json allows.
struct Sound;

impl<'de> serde::Deserialize<'de> for Sound {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Sound)
    }
}

impl<'de> Visitor<'de> for Sound {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_str<E>(self, _: &str) -> Result<Self, E> {
        Ok(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self, A::Error> {
        while seq.next_element::<Sound>()?.is_some() {}
        Ok(self)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self, A::Error> {
        while map.next_entry::<ObjectKey<'de>, Sound>()?.is_some() {}
        Ok(self)
    }
}

/// Parses one level of a node.
struct Level<'n>(&'n Node);

impl<'de> DeserializeSeed<'de> for Level<'_> {
    type Value = Value;

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Level<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list or an object")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(part) = seq.next_element::<&RawValue>()? {
            self.0.charge(VALUE_BYTES).map_err(A::Error::custom)?;
            values.push(self.0.part(part).map_err(A::Error::custom)?);
        }
        Ok(Value::from(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(ObjectKey(key)) = map.next_key()? {
            let long = if key.len() > SHORT_TEXT_BYTES { key.len() + ALLOCATION_BYTES } else { 0 };
            // Once in the list of entries, once in the table.
            self.0.charge(ENTRY_BYTES + 2 * VALUE_BYTES + long).map_err(A::Error::custom)?;
            entries.push((Value::from(&*key), self.0.part(map.next_value()?).map_err(A::Error::custom)?));
        }
        Ok(Value::from_pairs(entries))
    }
}

/// A key, borrowed from the JSON where it has no escapes.
#[derive(serde::Deserialize)]
struct ObjectKey<'a>(#[serde(borrow)] Cow<'a, str>);

/// Writes a value from its JSON.
struct Dump<'o> {
    out: &'o mut Dumped,
    depth: usize,
    work: &'o WorkLimit,
    /// Set when a key occurs twice.
    twice: &'o mut bool,
}

impl Dump<'_> {
    fn part(&mut self) -> Dump<'_> {
        Dump { out: self.out, depth: self.depth + 1, work: self.work, twice: self.twice }
    }

    fn plain<E: serde::de::Error>(self, value: &Value) -> Result<(), E> {
        self.out.value(value, self.depth).map_err(E::custom)
    }
}

impl<'de> DeserializeSeed<'de> for Dump<'_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Dump<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.plain(&Value::from(()))
    }

    fn visit_bool<E: serde::de::Error>(self, value: bool) -> Result<(), E> {
        self.plain(&Value::from(value))
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<(), E> {
        self.plain(&Value::from(value))
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<(), E> {
        self.plain(&Value::from(value))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<(), E> {
        self.plain(&Value::from(value))
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<(), E> {
        self.out.string(text).map_err(E::custom)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        let (mut empty, depth) = (true, self.depth);
        self.out.begin('[');
        loop {
            let before = Before { dump: self.part(), empty: &mut empty };
            if seq.next_element_seed(before)?.is_none() {
                break;
            }
        }
        self.out.end(empty, depth, ']').map_err(A::Error::custom)
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        let (mut empty, depth) = (true, self.depth);
        // Keys are compared by their hashes. If two are equal, the slow path is used, as for a key that occurs twice.
        let mut seen = WrittenKeys { keys: HashSet::new(), work: self.work };
        self.out.begin('{');
        while let Some(ObjectKey(key)) = map.next_key()? {
            if !seen.insert(&key).map_err(A::Error::custom)? {
                *self.twice = true;
                return Err(A::Error::custom("a key occurs twice"));
            }
            self.out.next(&mut empty, depth + 1).map_err(A::Error::custom)?;
            self.out.key(&key).map_err(A::Error::custom)?;
            map.next_value_seed(self.part())?;
        }
        self.out.end(empty, depth, '}').map_err(A::Error::custom)
    }
}

/// An element of a list, with the separator before it.
struct Before<'o, 'e> {
    dump: Dump<'o>,
    empty: &'e mut bool,
}

impl<'de> DeserializeSeed<'de> for Before<'_, '_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        self.dump.out.next(self.empty, self.dump.depth).map_err(D::Error::custom)?;
        self.dump.deserialize(deserializer)
    }
}

/// The keys of an object that were written.
struct WrittenKeys<'w> {
    keys: HashSet<u64>,
    work: &'w WorkLimit,
}

/// Memory of a key in [`WrittenKeys`], including its share of empty slots.
const SEEN_BYTES: usize = 18;

impl WrittenKeys<'_> {
    /// Returns false when the key was there already.
    fn insert(&mut self, key: &str) -> Result<bool, Stopped> {
        let is_new = self.keys.insert(xxh3_64(key.as_bytes()));
        if is_new {
            self.work.charge(SEEN_BYTES)?;
        }
        Ok(is_new)
    }
}

impl Drop for WrittenKeys<'_> {
    fn drop(&mut self) {
        self.work.release(SEEN_BYTES * self.keys.len());
    }
}

/// An object with a few known keys: less than half the memory of the template engine's map.
#[derive(Debug)]
pub(super) struct KnownFields {
    fields: Box<[(&'static str, Value)]>,
    work: WorkLimit,
}

impl KnownFields {
    /// Returns a value that a template sees as an object with these keys.
    ///
    /// # Errors
    /// [`Stopped`] when the work does not allow it.
    pub(super) fn value(fields: Vec<(&'static str, Value)>, work: &WorkLimit) -> Result<Value, Stopped> {
        let fields = Self { fields: fields.into_boxed_slice(), work: work.clone() };
        // Work over its limit stays stopped, so the release in the drop does not matter then.
        work.charge(fields.bytes())?;
        Ok(Value::from_object(fields))
    }

    fn bytes(&self) -> usize {
        size_of_val(&*self.fields) + size_of::<Self>() + 2 * ALLOCATION_BYTES
    }

    /// Returns the work that it is charged to.
    pub(super) fn work(&self) -> &WorkLimit {
        &self.work
    }
}

impl Drop for KnownFields {
    fn drop(&mut self) {
        self.work.release(self.bytes());
    }
}

impl Object for KnownFields {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.get_value_by_str(key.as_str()?)
    }

    /// Returns nothing once the work has ended: a template that joins messages one by one copies more
    /// with each, and fails here.
    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        self.work.check().ok()?;
        self.fields.iter().find(|(name, _)| *name == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.fields.iter().map(|(name, _)| Value::from(*name)).collect())
    }
}

#[cfg(test)]
mod tests;
