//! Flags and environment variables that stand for one key of the file each. They are declared with the key, and outrank
//! the file: what they give is read as a file of its own and laid over the other one.
//!
//! The flags that stand for no single key are in [`Overrides`](crate::Overrides).

use crate::decode::Sink;
use crate::diagnostic::{At, Span};
use crate::document::{Node, Value};
use crate::keys;
use crate::schema::{File, Flag, Key, Kind, Section, Setting, below};
use crate::units::parse_duration;
use std::collections::BTreeMap;

/// A flag, and the key that it stands for.
#[derive(Clone, Debug)]
pub struct KeyFlag {
    /// Path of the key, such as `server.grpcPort`.
    pub path: String,
    /// Name and variable.
    pub flag: Flag,
    /// The key.
    pub key: Key,
}

/// The flags of all keys, in the order of the file.
#[must_use]
pub fn all() -> Vec<KeyFlag> {
    let mut flags = Vec::new();
    add(&File::keys(), "", &mut flags);
    flags
}

fn add(section: &Section, path: &str, flags: &mut Vec<KeyFlag>) {
    for key in &section.keys {
        let path = below(path.to_owned(), key.name);
        if let Kind::Section(section) = &key.kind {
            add(section, &path, flags);
        }
        if let Some(flag) = key.flag {
            flags.push(KeyFlag { path, flag, key: key.clone() });
        }
    }
}

impl KeyFlag {
    /// What happens without the flag and the key, as a part of the flag's help.
    #[must_use]
    pub fn default(&self) -> String {
        keys::default(&self.key).replace('`', "")
    }

    /// Checks a value as text; a list has one for each item.
    ///
    /// # Errors
    /// What is allowed.
    pub fn check(&self, text: &str) -> Result<(), String> {
        let kind = if let Kind::List(items) = &self.key.kind { items } else { &self.key.kind };
        value(kind, text).map(drop)
    }
}

/// The values of flags and variables, by the paths of their keys. A list has several.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyValues(BTreeMap<String, Vec<String>>);

impl KeyValues {
    /// The key at `path` has these values. An empty text is none: charts leave a flag unset by an empty value.
    pub fn set(&mut self, path: &str, values: impl IntoIterator<Item = String>) {
        let values: Vec<_> = values.into_iter().filter(|value| !value.is_empty()).collect();
        if !values.is_empty() {
            self.0.insert(path.to_owned(), values);
        }
    }

    /// Whether the key at `path` has a value.
    #[must_use]
    pub fn has(&self, path: &str) -> bool {
        self.0.contains_key(path)
    }

    /// Lays the values over those of the file.
    pub(crate) fn outrank(&self, file: &mut File, sink: &mut Sink) {
        if self.0.is_empty() {
            return;
        }
        let root = self.node(&File::keys(), "");
        if let Some(given) = <File as Setting>::read(&root, "", sink) {
            given.check_ranges(&String::new, sink);
            file.overlay(given);
        }
    }

    /// The section at `path`, with the values that are given for its keys.
    fn node(&self, section: &Section, path: &str) -> Node {
        let entry = |key: &Key| {
            let path = below(path.to_owned(), key.name);
            let is_below = |given: &String| given.strip_prefix(&*path).is_some_and(|rest| rest.starts_with('.'));
            let node = match (&key.kind, self.0.get(&path)) {
                (Kind::List(items), Some(texts)) => {
                    plain(Value::List(texts.iter().map(|text| scalar(items, text)).collect()))
                }
                (kind, Some(texts)) => scalar(kind, texts.last()?),
                (Kind::Section(section), None) if self.0.keys().any(is_below) => self.node(section, &path),
                _ => return None,
            };
            Some((At { value: key.name.to_owned(), span: Span::default() }, node))
        };
        plain(Value::Map(section.keys.iter().filter_map(entry).collect()))
    }
}

fn plain(value: Value) -> Node {
    Node { span: Span::default(), value }
}

/// The node of a value; a text that is not valid stays a text, which the reader of the key reports.
fn scalar(kind: &Kind, text: &str) -> Node {
    plain(value(kind, text).unwrap_or_else(|_| Value::Text(text.to_owned())))
}

fn value(kind: &Kind, text: &str) -> Result<Value, String> {
    let as_text = || Value::Text(text.to_owned());
    match kind {
        Kind::Switch => switch(text).map(Value::Bool),
        Kind::Whole(low, high) => {
            let number = text.parse::<i128>().ok().filter(|number| (low..=high).contains(&number));
            number.map(Value::Int).ok_or_else(|| format!("a whole number of {low} to {high} is allowed"))
        }
        Kind::Number => text.parse().map(Value::Float).map_err(|_| "a number is allowed".to_owned()),
        Kind::Duration => parse_duration(text).map(|_| as_text()),
        Kind::Address => match text.trim_matches(['[', ']']).parse::<std::net::IpAddr>() {
            Ok(_) => Ok(as_text()),
            Err(_) => Err("an IP address is allowed, such as 0.0.0.0 or ::".to_owned()),
        },
        Kind::Word(words) if !words.contains(&text) => Err(format!("{} are allowed", words.join(" and "))),
        _ => Ok(as_text()),
    }
}

/// Parses a boolean in any spelling that Go's flags accept.
///
/// # Errors
/// What is allowed.
pub fn switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("true and false are allowed".to_owned()),
    }
}
