//! Dictionaries that keep the order of their entries.

use super::{Value, deeper};
use crate::Result;
use ahash::RandomState;
use std::collections::HashMap;
use std::sync::OnceLock;

/// Up to this many entries are compared one by one.
const SMALL: usize = 8;

/// The key is a list or a dictionary, which Python can't hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Unhashable;

/// A dictionary.
#[derive(Debug, Default)]
pub struct Dict {
    entries: Vec<(Value, Value)>,
    /// The positions of the keys' hashes, in a large dictionary.
    index: Option<Box<Index>>,
    pub(super) depth: u16,
}

/// The position of the first key with each hash.
#[derive(Debug)]
struct Index(HashMap<u64, u32, RandomState>);

/// One seed for the process, so that the hash of a key is the same in every dictionary.
fn state() -> &'static RandomState {
    static STATE: OnceLock<RandomState> = OnceLock::new();
    STATE.get_or_init(RandomState::new)
}

impl Dict {
    /// Creates a dictionary. An equal key keeps its position and gets the last value.
    ///
    /// # Errors
    /// When a key can't be hashed, or a value is nested too deeply.
    pub fn new(entries: impl IntoIterator<Item = (Value, Value)>) -> Result<Self> {
        let entries = entries.into_iter();
        let mut dict = Self { entries: Vec::with_capacity(entries.size_hint().0), index: None, depth: 0 };
        for (key, value) in entries {
            dict.insert(key, value)?;
        }
        dict.depth = deeper(dict.entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(dict)
    }

    fn insert(&mut self, key: Value, value: Value) -> Result<()> {
        if let Some((_, old)) = self.find(&key)?.and_then(|at| self.entries.get_mut(at)) {
            *old = value;
            return Ok(());
        }
        let hashed = hash(&key)?;
        let at = self.entries.len();
        self.entries.push((key, value));
        if let Some(index) = &mut self.index {
            index.0.entry(hashed).or_insert(at as u32);
        } else if at == SMALL {
            let mut index = HashMap::with_hasher(state().clone());
            for (at, (key, _)) in self.entries.iter().enumerate() {
                index.entry(hash(key)?).or_insert(at as u32);
            }
            self.index = Some(Box::new(Index(index)));
        }
        Ok(())
    }

    /// The position of a key.
    fn find(&self, key: &Value) -> Result<Option<usize>, Unhashable> {
        if let Some(text) = key.as_str() {
            return Ok(self.find_str(text));
        }
        let hash = hash(key)?;
        let is_key = |(other, _): &(Value, Value)| other == key;
        Ok(self.candidate(hash, is_key))
    }

    fn find_str(&self, key: &str) -> Option<usize> {
        let is_key = |(other, _): &(Value, Value)| other.as_str() == Some(key);
        match &self.index {
            None => self.entries.iter().position(is_key),
            Some(_) => self.candidate(hash_str(key), is_key),
        }
    }

    fn candidate(&self, hash: u64, is_key: impl Fn(&(Value, Value)) -> bool) -> Option<usize> {
        let Some(index) = &self.index else { return self.entries.iter().position(is_key) };
        let at = *index.0.get(&hash)? as usize;
        // Keys with equal hashes are rare.
        if self.entries.get(at).is_some_and(&is_key) { Some(at) } else { self.entries.iter().position(is_key) }
    }

    /// The value of a key.
    ///
    /// # Errors
    /// When the key can't be hashed.
    pub fn get(&self, key: &Value) -> Result<Option<&Value>, Unhashable> {
        Ok(self.find(key)?.and_then(|at| self.entries.get(at)).map(|(_, value)| value))
    }

    /// The value of a text as key.
    #[must_use]
    pub fn get_str(&self, key: &str) -> Option<&Value> {
        self.find_str(key).and_then(|at| self.entries.get(at)).map(|(_, value)| value)
    }

    /// The entries in the order in which they were added.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (&Value, &Value)> + ExactSizeIterator {
        self.entries.iter().map(|(key, value)| (key, value))
    }

    /// The number of entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it has no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

/// Checks that Python can hash a value.
pub(crate) fn check_hashable(value: &Value) -> Result<(), Unhashable> {
    hash(value).map(|_| ())
}

fn hash_str(text: &str) -> u64 {
    state().hash_one((0u8, text))
}

/// Equal values have equal hashes.
fn hash(value: &Value) -> Result<u64, Unhashable> {
    Ok(match value {
        Value::Text(text) | Value::Safe(text) => hash_str(text),
        Value::Float(number) => match whole(*number) {
            Some(number) => state().hash_one((1u8, number)),
            None => state().hash_one((2u8, number.to_bits())),
        },
        Value::Tuple(items) => {
            let hashes: Result<Vec<u64>, Unhashable> = items.iter().map(hash).collect();
            state().hash_one((3u8, hashes?))
        }
        Value::List(_) | Value::Dict(_) | Value::Lazy(_) | Value::View(..) => return Err(Unhashable),
        value => match value.as_int() {
            Some(number) => state().hash_one((1u8, number)),
            None => state().hash_one((4u8, value.type_name())),
        },
    })
}

/// The float as a whole number, if it is one.
pub(super) fn whole(number: f64) -> Option<i128> {
    // Up to 2^120, every whole float is a whole number of 128 bits.
    (number.trunc() == number && number.abs() < 1.3e36).then_some(number as i128)
}
