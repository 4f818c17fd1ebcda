//! JSON of a request as template values: each list and object is parsed when the template accesses it, and not before.
//!
//! A value for every number and key of a body would take up to a hundred times the body's memory. Most templates pass
//! tools through `tojson`, which writes a [`Node`] directly from its JSON. Values that a template accesses are charged
//! to the request's [`WorkLimit`]. If the work does not allow them, the node is empty and the work is stopped, so the
//! render fails at its next output.

use crate::work::{Stopped, WorkLimit};
use attache_jinja::{Dict, Error, Json, Lazy, Value};
use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, LazyLock, OnceLock};
use xxhash_rust::xxh3::xxh3_64;

/// Memory of a value in a list.
const VALUE_BYTES: usize = size_of::<Value>();
/// Memory of an entry in an object: two values, a hash and its slot in the table.
const ENTRY_BYTES: usize = 2 * VALUE_BYTES + 24;
/// Memory of a list, an object or a text besides its content.
const ALLOCATION_BYTES: usize = 32;

/// A JSON list or object of a request.
#[derive(Debug)]
pub(super) struct Node {
    json: Arc<JsonText>,
    at: Range<usize>,
    /// Its values, once they have been accessed.
    level: OnceLock<Value>,
    /// Bytes that are charged for it.
    charged: AtomicUsize,
}

/// The JSON text that nodes refer to.
#[derive(Debug)]
struct JsonText {
    text: Box<str>,
    work: WorkLimit,
}

impl Drop for JsonText {
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
    let json = Arc::new(JsonText { text: json.into(), work: work.clone() });
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
    fn value(json: Arc<JsonText>, at: Range<usize>) -> Result<Value, Stopped> {
        let node = Self { json, at, level: OnceLock::new(), charged: AtomicUsize::new(0) };
        node.charge(size_of::<Self>() + ALLOCATION_BYTES)?;
        Ok(Value::Lazy(Arc::new(node)))
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

    /// Returns the work that the node is charged to.
    pub(super) fn work(&self) -> &WorkLimit {
        &self.json.work
    }

    /// Returns the value of a part of this node's JSON.
    fn part(&self, part: &RawValue) -> Result<Value, Stopped> {
        let part = part.get();
        if !is_nested(part) {
            self.charge(part.len() + ALLOCATION_BYTES)?;
            return Ok(scalar(part));
        }
        let start = part.as_ptr().addr().saturating_sub(self.json.text.as_ptr().addr());
        Self::value(self.json.clone(), start..start + part.len())
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.json.work.release(*self.charged.get_mut());
    }
}

impl Lazy for Node {
    fn is_list(&self) -> bool {
        self.text().starts_with('[')
    }

    fn level(&self) -> &Value {
        let take = || {
            self.work().check().ok()?;
            Level(self).deserialize(&mut serde_json::Deserializer::from_str(self.text())).ok()
        };
        self.level
            .get_or_init(|| take().unwrap_or_else(|| if self.is_list() { NO_ITEMS.clone() } else { NO_FIELDS.clone() }))
    }

    /// Writes it as `json.dumps` does. Where a key occurs twice, the values are needed, because only the last counts.
    fn dump(&self, out: &mut Json<'_>, depth: usize) -> Result<bool, Error> {
        let mut twice = false;
        let dump = Dump { out, depth, work: self.work(), twice: &mut twice };
        match dump.deserialize(&mut serde_json::Deserializer::from_str(self.text())) {
            Ok(()) => Ok(true),
            Err(_) if twice => Ok(false),
            // Its JSON was checked before, so only the work can have failed.
            Err(_) => Err(Error::stopped()),
        }
    }
}

/// What a list or an object of stopped work contains.
static NO_ITEMS: LazyLock<Value> = LazyLock::new(|| Value::List(Arc::default()));
static NO_FIELDS: LazyLock<Value> = LazyLock::new(|| Value::Dict(Arc::default()));

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
        Value::list(values).map_err(A::Error::custom)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(ObjectKey(key)) = map.next_key()? {
            // Once in the list of entries, once in the table.
            let bytes = ENTRY_BYTES + 2 * VALUE_BYTES + key.len() + ALLOCATION_BYTES;
            self.0.charge(bytes).map_err(A::Error::custom)?;
            entries.push((Value::from(&*key), self.0.part(map.next_value()?).map_err(A::Error::custom)?));
        }
        Value::dict(entries).map_err(A::Error::custom)
    }
}

/// A key, borrowed from the JSON where it has no escapes.
#[derive(serde::Deserialize)]
struct ObjectKey<'a>(#[serde(borrow)] Cow<'a, str>);

/// Writes a value from its JSON.
struct Dump<'o, 'j> {
    out: &'o mut Json<'j>,
    depth: usize,
    work: &'o WorkLimit,
    /// Set when a key occurs twice.
    twice: &'o mut bool,
}

impl<'j> Dump<'_, 'j> {
    fn part(&mut self) -> Dump<'_, 'j> {
        Dump { out: self.out, depth: self.depth + 1, work: self.work, twice: self.twice }
    }

    fn plain<E: serde::de::Error>(self, value: &Value) -> Result<(), E> {
        self.out.value(value, self.depth).map_err(E::custom)
    }
}

impl<'de> DeserializeSeed<'de> for Dump<'_, '_> {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Dump<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: serde::de::Error>(self) -> Result<(), E> {
        self.plain(&Value::None)
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
struct Before<'o, 'j, 'e> {
    dump: Dump<'o, 'j>,
    empty: &'e mut bool,
}

impl<'de> DeserializeSeed<'de> for Before<'_, '_, '_> {
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

/// An object that is made here, whose values are charged while it lives.
#[derive(Debug)]
pub(super) struct KnownFields {
    fields: Value,
    bytes: usize,
    work: WorkLimit,
}

/// The keys of such objects, so that each is in memory once.
static KEYS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let names = [
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "tool_call_id",
        "reasoning",
        "reasoning_content",
        "name",
        "function",
        "description",
        "parameters",
        "strict",
        "defer_loading",
        "task",
        "tools",
    ];
    names.map(Value::from).to_vec()
});

impl KnownFields {
    /// Returns a value that a template sees as an object with these keys.
    ///
    /// # Errors
    /// [`Stopped`] when the work does not allow it.
    pub(super) fn value(fields: Vec<(&'static str, Value)>, work: &WorkLimit) -> Result<Value, Stopped> {
        let bytes = fields.len() * 2 * VALUE_BYTES + size_of::<Self>() + size_of::<Dict>() + 3 * ALLOCATION_BYTES;
        let key = |name: &'static str| {
            KEYS.iter().find(|key| key.as_str() == Some(name)).cloned().unwrap_or_else(|| Value::from(name))
        };
        let fields = Value::dict(fields.into_iter().map(|(name, value)| (key(name), value)));
        let fields = Self { fields: fields.unwrap_or_default(), bytes, work: work.clone() };
        // Work over its limit stays stopped, so the release in the drop does not matter then.
        work.charge(bytes)?;
        Ok(Value::Lazy(Arc::new(fields)))
    }
}

impl Drop for KnownFields {
    fn drop(&mut self) {
        self.work.release(self.bytes);
    }
}

impl Lazy for KnownFields {
    fn is_list(&self) -> bool {
        false
    }

    /// Returns nothing once the work has ended: a template that joins messages one by one copies more
    /// with each, and fails here.
    fn level(&self) -> &Value {
        if self.work.check().is_ok() { &self.fields } else { &NO_FIELDS }
    }

    fn dump(&self, _: &mut Json<'_>, _: usize) -> Result<bool, Error> {
        Ok(false)
    }
}

#[cfg(test)]
mod tests;
