//! YAML text as a tree with a position for each node.
//!
//! The tree allows all mistakes of a file to be reported at once; a typed parse would stop at the first. Hostile text
//! (binary, huge, alias bombs, deep nesting) is rejected here.

use super::diagnostic::{At, Code, Diagnostic, Span};
use attache_types::params::Step;
use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::{DuplicateKeyPolicy, NonFiniteFloatPolicy, Spanned};
use std::fmt;

/// Largest configuration, bytes: 20,000 endpoints fit.
pub const MAX_CONFIG_BYTES: usize = 4 << 20;
/// Most nodes that aliases may repeat: enough for shared defaults of hundreds of pools, too few for an alias bomb.
const MAX_ALIASED_NODES: usize = 20_000;

/// A value in the file, with its position.
#[derive(Clone, Debug)]
pub struct Node {
    /// Where it begins, and its length if it is a scalar.
    pub span: Span,
    /// The value with its YAML type.
    pub value: Value,
}

/// The content of a node. Plain scalars are typed by YAML 1.2's core schema.
#[derive(Clone, Debug)]
pub enum Value {
    /// `null`, `~` or nothing.
    Null,
    /// `true` or `false`.
    Bool(bool),
    /// A whole number, positive or negative.
    Int(i128),
    /// Any other number, including NaN and infinities.
    Float(f64),
    /// Text, quoted or plain.
    Text(String),
    /// A sequence of nodes, in order.
    List(Vec<Node>),
    /// A mapping, in the order of the file.
    Map(Vec<(At<String>, Node)>),
}

impl Node {
    /// The position of the value at the path `steps`, or of its key; if the path ends early, of the last value on it.
    #[must_use]
    pub fn place(&self, steps: &[Step], of_key: bool) -> Span {
        let (mut node, mut key) = (self, None);
        for step in steps {
            let next = match (step, &node.value) {
                (Step::Key(name), Value::Map(entries)) => {
                    entries.iter().find(|(key, _)| key.value == *name).map(|(key, node)| (Some(key.span), node))
                }
                (Step::Item(index), Value::List(items)) => items.get(*index).map(|node| (None, node)),
                _ => None,
            };
            let Some(found) = next else { return node.span };
            (key, node) = found;
        }
        key.filter(|_| of_key).unwrap_or(node.span)
    }
}

impl Value {
    /// A description of the value for messages.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Value::Null => "nothing".into(),
            Value::Bool(b) => format!("`{b}`"),
            Value::Int(i) => format!("the number {i}"),
            Value::Float(f) => format!("the number {f}"),
            Value::Text(t) => format!("the text `{}`", t.chars().take(40).collect::<String>()),
            Value::List(_) => "a list".into(),
            Value::Map(_) => "a mapping".into(),
        }
    }

    /// The value as JSON, for plugin parameters. Numbers that JSON can't express become `null`.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        use serde_json::Value as Json;
        match self {
            Value::Null => Json::Null,
            Value::Bool(b) => (*b).into(),
            Value::Int(i) => {
                i64::try_from(*i).map_or_else(|_| u64::try_from(*i).map_or(Json::Null, Json::from), Json::from)
            }
            Value::Float(f) => Json::from(*f),
            Value::Text(t) => t.as_str().into(),
            Value::List(items) => items.iter().map(|n| n.value.to_json()).collect(),
            Value::Map(entries) => entries.iter().map(|(k, n)| (k.value.clone(), n.value.to_json())).collect(),
        }
    }
}

/// Parses `bytes` into a tree. A duplicate key is reported, and the rest is still read with the first of the two.
///
/// # Errors
/// One E1xx diagnostic with the reason why there is no tree.
pub fn parse(bytes: &[u8], diagnostics: &mut Vec<Diagnostic>) -> Result<Node, Diagnostic> {
    let text = text_of(bytes)?;
    let first = serde_saphyr::from_str_with_options::<Spanned<Value>>(text, options(DuplicateKeyPolicy::Error));
    let node = match first {
        Ok(root) => node(root),
        Err(error) if matches!(error, serde_saphyr::Error::DuplicateMappingKey { .. }) => {
            diagnostics.push(explain(&error, text));
            serde_saphyr::from_str_with_options::<Spanned<Value>>(text, options(DuplicateKeyPolicy::FirstWins))
                .map(node)
                .map_err(|e| explain(&e, text))?
        }
        Err(error) => return Err(explain(&error, text)),
    };
    if matches!(node.value, Value::Null) {
        return Err(Diagnostic::new(Code::Empty, "", "the configuration is empty")
            .at(Span { line: 1, column: 1, length: 1 })
            .help("start with `apiVersion: attache.dev/v1` and `kind: Attache`"));
    }
    Ok(node)
}

/// The text in `bytes`, without a byte order mark.
pub fn text_of(bytes: &[u8]) -> Result<&str, Diagnostic> {
    let start = Span { line: 1, column: 1, length: 1 };
    if bytes.len() > MAX_CONFIG_BYTES {
        let message = format!("the configuration is larger than {} MiB", MAX_CONFIG_BYTES >> 20);
        return Err(Diagnostic::new(Code::TooLarge, "", message).at(start));
    }
    let not_text = |at: usize, what: &str| {
        let before = bytes.get(..at).unwrap_or_default();
        let line = before.split(|b| *b == b'\n').count();
        let column = before.rsplit(|b| *b == b'\n').next().map_or(0, |l| String::from_utf8_lossy(l).chars().count());
        Diagnostic::new(Code::NotText, "", format!("the configuration is not text: {what} at byte {at}"))
            .at(Span { line: narrow(line as u64), column: narrow(column as u64 + 1), length: 1 })
            .help("configurations are YAML in UTF-8")
    };
    if let Some(at) = memchr::memchr(0, bytes) {
        return Err(not_text(at, "a zero byte"));
    }
    let text = std::str::from_utf8(bytes).map_err(|e| not_text(e.valid_up_to(), "broken UTF-8"))?;
    Ok(text.strip_prefix('\u{feff}').unwrap_or(text))
}

fn options(duplicate_keys: DuplicateKeyPolicy) -> serde_saphyr::Options {
    let mut options = serde_saphyr::options! {
        with_snippet: false,
        // Comments are skipped: the parser refuses more than 32 lines of them in a row.
        emit_comments: false,
        duplicate_keys: duplicate_keys,
        // `y`, `n`, `on` and `off` are text, as in YAML 1.2: models and pools have such names.
        strict_booleans: true,
        // NaN is rejected with the name of the field, where the value is read.
        non_finite_float_policy: NonFiniteFloatPolicy::PassThrough,
    };
    options.alias_limits.max_total_replayed_events = MAX_ALIASED_NODES;
    options
}

fn explain(error: &serde_saphyr::Error, text: &str) -> Diagnostic {
    use serde_saphyr::Error as E;
    let span = error.location().map_or(Span { line: 1, column: 1, length: 1 }, |l| span(&l));
    let full = error.to_string();
    let message = full.split(" at line ").next().unwrap_or(&full).trim_end_matches(',').to_owned();
    let bomb = || {
        Diagnostic::new(Code::Bomb, "", "aliases or nesting make the configuration far larger than any real one")
            .help(format!("aliases may repeat {MAX_ALIASED_NODES} values in all"))
    };
    let diagnostic = match error {
        E::DuplicateMappingKey { key, .. } => {
            let key = key.as_deref().unwrap_or("?");
            Diagnostic::new(Code::DuplicateKey, "", format!("duplicate key `{key}`"))
                .help("remove one of the two; Attaché can't know which one was meant")
        }
        E::Budget { .. } => bomb(),
        _ if message.contains("limit exceeded") => bomb(),
        E::MultipleDocuments { .. } => {
            Diagnostic::new(Code::SeveralDocuments, "", "the file holds more than one YAML document")
                .help("keep one configuration in a file; remove the `---` line")
        }
        _ if message.contains("tab") && line_of(text, span).starts_with(['\t', ' ']) => {
            Diagnostic::new(Code::Tab, "", "a tab can't indent YAML").help("indent with spaces")
        }
        _ => Diagnostic::new(Code::Syntax, "", format!("not valid YAML: {message}")),
    };
    diagnostic.at(span)
}

fn line_of(text: &str, span: Span) -> &str {
    text.lines().nth((span.line as usize).saturating_sub(1)).unwrap_or("")
}

fn narrow(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

fn span(location: &serde_saphyr::Location) -> Span {
    Span {
        line: narrow(location.line()),
        column: narrow(location.column()),
        length: narrow(location.span().len()).max(1),
    }
}

fn node(spanned: Spanned<Value>) -> Node {
    Node { span: span(&spanned.referenced), value: spanned.value }
}

impl<'de> Deserialize<'de> for Value {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ValueVisitor)
    }
}

struct ValueVisitor;

impl<'de> Visitor<'de> for ValueVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a YAML value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_none<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Int(v.into()))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Int(v.into()))
    }

    fn visit_i128<E>(self, v: i128) -> Result<Value, E> {
        Ok(Value::Int(v))
    }

    fn visit_u128<E>(self, v: u128) -> Result<Value, E> {
        Ok(Value::Int(i128::try_from(v).unwrap_or(i128::MAX)))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Value::Float(v))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::Text(v.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element::<Spanned<Value>>()? {
            items.push(node(item));
        }
        Ok(Value::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Value, A::Error> {
        let mut entries = Vec::new();
        while let Some((key, value)) = map.next_entry::<Spanned<String>, Spanned<Value>>()? {
            let (key, mut value) = (At { span: span(&key.referenced), value: key.value }, node(value));
            // A block begins on a line below its key, whose name says more than the first line of the block.
            if matches!(value.value, Value::Map(_) | Value::List(_)) && value.span.line > key.span.line {
                value.span = key.span;
            }
            entries.push((key, value));
        }
        Ok(Value::Map(entries))
    }
}
