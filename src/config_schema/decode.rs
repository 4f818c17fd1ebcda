//! Converts the tree to typed values and collects all mistakes.
//!
//! A type that can stand in the file implements [`Read`]. A mapping is read through [`Fields`], which afterwards
//! reports the keys that were not read.

use super::diagnostic::{At, Code, Diagnostic, Span, closest};
use super::document::{Node, Value};
use attache_types::declare::Show;
use attache_types::units::{parse_bytes, parse_duration};
use serde_json::{Value as Json, json};
use std::net::IpAddr;
use std::time::Duration;

/// Collects the mistakes of a configuration.
#[derive(Debug, Default)]
pub struct Sink {
    /// All mistakes so far, in the order of their discovery.
    pub diagnostics: Vec<Diagnostic>,
}

impl Sink {
    /// Adds one mistake to the list.
    pub fn push(&mut self, diagnostic: Diagnostic) {
        self.diagnostics.push(diagnostic);
    }

    /// Reports a value of the wrong type.
    pub fn wrong_type(&mut self, node: &Node, path: &str, expected: &str) {
        let scalar_text =
            expected.starts_with("text") && matches!(node.value, Value::Bool(_) | Value::Int(_) | Value::Float(_));
        let name = if path.is_empty() { "the configuration".to_owned() } else { format!("`{}`", last(path)) };
        let message = format!("{name} must be {expected}, got {}", node.value.describe());
        let mut diagnostic = Diagnostic::new(Code::WrongType, path, message).at(node.span);
        if scalar_text {
            diagnostic = diagnostic.help("put it in quotes to make it text");
        }
        self.push(diagnostic);
    }

    /// Reports a value of the right type that is not allowed.
    pub fn out_of_range(&mut self, span: Span, path: &str, got: impl std::fmt::Display, allowed: &str) {
        let message = format!("`{}` is {got}, allowed: {allowed}", last(path));
        self.push(Diagnostic::new(Code::OutOfRange, path, message).at(span));
    }
}

/// The last part of a path: the name under which users know the value.
fn last(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// A type that can be read from a node.
pub trait Read: Sized {
    /// Reads the value; reports to `sink` and returns `None` if it is invalid.
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self>;
}

/// The entries of one mapping.
#[derive(Debug)]
pub struct Fields<'n> {
    /// Path of the mapping in the configuration.
    pub path: String,
    /// Position of the mapping in the file.
    pub span: Span,
    entries: &'n [(At<String>, Node)],
    known: Vec<&'static str>,
    /// The key whose value alone is given instead of the mapping.
    alone: Option<&'static str>,
}

impl<'n> Fields<'n> {
    /// The fields of `node`; reports and returns `None` if it is not a mapping.
    pub fn of(node: &'n Node, path: &str, sink: &mut Sink) -> Option<Self> {
        let Value::Map(entries) = &node.value else {
            sink.wrong_type(node, path, "a mapping");
            return None;
        };
        Some(Self { path: path.to_owned(), span: node.span, entries, known: Vec::new(), alone: None })
    }

    /// The fields of an absent mapping.
    #[must_use]
    pub fn none(path: &str, span: Span) -> Self {
        Self { path: path.to_owned(), span, entries: &[], known: Vec::new(), alone: None }
    }

    /// These fields, where the file has the value of `key` in place of the mapping, so that its path is that of the mapping.
    #[must_use]
    pub fn alone(self, key: &'static str) -> Self {
        Self { alone: Some(key), ..self }
    }

    /// The path of `key` in this mapping.
    #[must_use]
    pub fn path_of(&self, key: &str) -> String {
        match self.path.as_str() {
            "" => key.to_owned(),
            path if self.alone == Some(key) => path.to_owned(),
            path => format!("{path}.{key}"),
        }
    }

    /// The node under `key`; an explicit `null` counts as absent.
    pub fn node(&mut self, key: &'static str) -> Option<&'n Node> {
        if !self.known.contains(&key) {
            self.known.push(key);
        }
        let (_, node) = self.entries.iter().find(|(k, _)| k.value == key)?;
        (!matches!(node.value, Value::Null)).then_some(node)
    }

    /// Accepts these keys with any value.
    pub fn expect(&mut self, keys: &[&'static str]) {
        self.known.extend(keys);
    }

    /// The value under `key`, if it is present and valid.
    pub fn get<T: Read>(&mut self, key: &'static str, sink: &mut Sink) -> Option<At<T>> {
        let path = self.path_of(key);
        let node = self.node(key)?;
        T::read(node, &path, sink).map(|value| At { value, span: node.span })
    }

    /// Reports `key` if it is absent.
    pub fn expect_present(&mut self, key: &'static str, sink: &mut Sink) {
        let present = self.entries.iter().any(|(k, n)| k.value == key && !matches!(n.value, Value::Null));
        if !present {
            let path = self.path_of(key);
            sink.push(Diagnostic::new(Code::MissingKey, path, format!("`{key}` is missing")).at(self.span));
        }
    }

    /// The value under `key`; reports if it is absent.
    pub fn required<T: Read>(&mut self, key: &'static str, sink: &mut Sink) -> Option<At<T>> {
        self.expect_present(key, sink);
        self.get(key, sink)
    }

    /// The entries that were not read.
    pub fn rest(&self) -> impl Iterator<Item = (&'n At<String>, &'n Node)> {
        let unasked = self.entries.iter().filter(|(key, _)| !self.known.contains(&key.value.as_str()));
        unasked.map(|(key, node)| (key, node))
    }

    /// Reports the keys that were not read.
    pub fn finish(self, sink: &mut Sink) {
        for (key, _) in self.rest() {
            let shown: String = key.value.chars().take(60).collect();
            let path = self.path_of(&shown);
            let mut diagnostic =
                Diagnostic::new(Code::UnknownKey, path, format!("unknown field `{shown}`")).at(key.span);
            diagnostic = match closest(&key.value, self.known.iter().copied()) {
                Some(meant) => diagnostic.help(format!("did you mean `{meant}`?")),
                None => diagnostic.help(format!("allowed here: {}", self.known.join(", "))),
            };
            sink.push(diagnostic);
        }
    }
}

impl Read for bool {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        if let Value::Bool(b) = node.value {
            return Some(b);
        }
        sink.wrong_type(node, path, "`true` or `false`");
        None
    }
}

/// Reads a whole number of any width.
fn integer<T: TryFrom<i128> + std::fmt::Display>(
    node: &Node,
    path: &str,
    sink: &mut Sink,
    min: T,
    max: T,
) -> Option<T> {
    let Value::Int(got) = node.value else {
        sink.wrong_type(node, path, "a whole number");
        return None;
    };
    if let Ok(value) = T::try_from(got) {
        return Some(value);
    }
    sink.out_of_range(node.span, path, got, &format!("{min} to {max}"));
    None
}

macro_rules! read_integer {
    ($($t:ty),*) => {$(
        impl Read for $t {
            fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
                integer(node, path, sink, <$t>::MIN, <$t>::MAX)
            }
        }
    )*};
}

read_integer!(u16, u32, u64, usize, i32);

impl Read for f64 {
    #[expect(clippy::cast_precision_loss, reason = "a configured number this large is out of range anyway")]
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        match node.value {
            Value::Float(f) => Some(f),
            Value::Int(i) => Some(i as f64),
            _ => {
                sink.wrong_type(node, path, "a number");
                None
            }
        }
    }
}

impl Read for String {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        let Value::Text(text) = &node.value else {
            sink.wrong_type(node, path, "text");
            return None;
        };
        if text.is_empty() {
            sink.out_of_range(node.span, path, "empty", "at least one character");
            return None;
        }
        Some(text.clone())
    }
}

impl Read for Duration {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        match &node.value {
            Value::Text(text) => unit(parse_duration(text), node, path, sink),
            Value::Int(0) => Some(Duration::ZERO),
            Value::Int(n) => {
                sink.push(
                    Diagnostic::new(Code::WrongType, path, format!("`{}` needs a unit, got {n}", last(path)))
                        .at(node.span)
                        .help(format!("write `{n}s` or `{n}ms`")),
                );
                None
            }
            _ => {
                sink.wrong_type(node, path, "a duration such as `250ms` or `5s`");
                None
            }
        }
    }
}

/// A size in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd)]
pub struct Bytes(pub u64);

impl Show for Bytes {
    fn show(&self) -> Json {
        let bytes = self.0;
        let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        match units.into_iter().find(|(shift, _)| bytes > 0 && bytes.trailing_zeros() >= *shift) {
            // Sizes in TiB are only bounds: the file knows no such unit.
            Some((shift, unit)) => json!(format!("{}{unit}", bytes >> shift)),
            None => json!(bytes),
        }
    }
}

impl Read for Bytes {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        match &node.value {
            Value::Text(text) => unit(parse_bytes(text), node, path, sink).map(Bytes),
            Value::Int(_) => u64::read(node, path, sink).map(Bytes),
            _ => {
                sink.wrong_type(node, path, "a size such as `64KiB` or `16MiB`");
                None
            }
        }
    }
}

fn unit<T>(parsed: Result<T, String>, node: &Node, path: &str, sink: &mut Sink) -> Option<T> {
    parsed
        .map_err(|e| sink.push(Diagnostic::new(Code::WrongType, path, format!("`{}`: {e}", last(path))).at(node.span)))
        .ok()
}

impl Read for IpAddr {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        let text = String::read(node, path, sink)?;
        text.trim_matches(['[', ']'])
            .parse()
            .map_err(|_| {
                let message = format!("`{}` is not an IP address", text.chars().take(60).collect::<String>());
                sink.push(
                    Diagnostic::new(Code::BadAddress, path, message).at(node.span).help("as in `0.0.0.0` or `::`"),
                );
            })
            .ok()
    }
}

/// Reads the items of a list with `read`, each with its path.
pub fn items<T>(
    node: &Node,
    path: &str,
    sink: &mut Sink,
    read: impl Fn(&Node, &str, &mut Sink) -> Option<T>,
) -> Option<Vec<At<T>>> {
    let Value::List(items) = &node.value else {
        sink.wrong_type(node, path, "a list");
        return None;
    };
    let read = items
        .iter()
        .enumerate()
        .filter_map(|(i, item)| read(item, &format!("{path}[{i}]"), sink).map(|value| At { value, span: item.span }));
    Some(read.collect())
}

impl<T: Read> Read for Vec<At<T>> {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        items(node, path, sink, T::read)
    }
}

/// The entries of a mapping, in the order of the file.
pub type Entries<T> = Vec<(At<String>, At<T>)>;

/// Reads the entries of a mapping with arbitrary keys, each value with `read`.
pub fn entries<T>(
    node: &Node,
    path: &str,
    sink: &mut Sink,
    read: impl Fn(&Node, &str, &mut Sink) -> Option<T>,
) -> Option<Entries<T>> {
    let Value::Map(entries) = &node.value else {
        sink.wrong_type(node, path, "a mapping");
        return None;
    };
    let read = entries.iter().filter_map(|(key, item)| {
        let value = read(item, &format!("{path}.{}", key.value), sink)?;
        Some((key.clone(), At { value, span: item.span }))
    });
    Some(read.collect())
}

impl<T: Read> Read for Entries<T> {
    fn read(node: &Node, path: &str, sink: &mut Sink) -> Option<Self> {
        entries(node, path, sink, T::read)
    }
}

/// A type with a fixed set of keywords.
pub trait Keyword: Copy + 'static {
    /// The keywords and their values.
    const WORDS: &'static [(&'static str, Self)];
}

/// Reads one of the keywords of the type.
pub fn keyword<K: Keyword>(node: &Node, path: &str, sink: &mut Sink) -> Option<K> {
    one_of(K::WORDS, node, path, sink)
}

/// Reads one of the keywords in `table`.
pub fn one_of<T: Copy>(table: &[(&'static str, T)], node: &Node, path: &str, sink: &mut Sink) -> Option<T> {
    let words = || table.iter().map(|(w, _)| *w).collect::<Vec<_>>();
    let got = match &node.value {
        Value::Text(text) => text.as_str(),
        _ => {
            sink.wrong_type(node, path, &format!("one of {}", words().join(", ")));
            return None;
        }
    };
    if let Some((_, value)) = table.iter().find(|(w, _)| *w == got) {
        return Some(*value);
    }
    let shown: String = got.chars().take(60).collect();
    let message = format!("`{}` is `{shown}`, allowed: {}", last(path), words().join(", "));
    let mut diagnostic = Diagnostic::new(Code::OutOfRange, path, message).at(node.span);
    if let Some(meant) = closest(got, words()) {
        diagnostic = diagnostic.help(format!("did you mean `{meant}`?"));
    }
    sink.push(diagnostic);
    None
}
