//! Python behaviour that templates expect and minijinja lacks: `json.dumps`, the text
//! of floats, `str.strip`, `is sequence`.

use super::node::{KnownFields, Node};
use crate::work::{Stopped, WorkLimit};
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};
use std::fmt::Write as _;

/// Deepest value that `tojson` writes. Request bodies are below it; only a template that builds its
/// own values can exceed it.
const MAX_JSON_DEPTH: usize = 256;

/// Adds the filters, tests, functions and methods to `env`.
pub(super) fn install(env: &mut Environment<'_>) {
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: &Value| text(value).unwrap_or_else(|| value.to_string()));
    env.add_filter("trim", |state: &mut State<'_, '_>, value: &Value, chars: Option<&str>| {
        let args: &[Value] = &chars.map(Value::from).into_iter().collect::<Vec<_>>();
        match value.as_str() {
            // Avoids a copy as long as the text.
            Some(text) if args.is_empty() && strip(text).len() == text.len() => Ok(value.clone()),
            Some(_) => method(state, value, "strip", args),
            None => method(state, &Value::from(value.to_string()), "strip", args),
        }
    });
    // Python's strings and dicts have a length and an item access too.
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    env.set_unknown_method_callback(method);
    env.set_formatter(|out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value| match text(value) {
        Some(text) => Ok(out.write_str(&text)?),
        None => minijinja::escape_formatter(out, state, value),
    });
}

/// Python's methods of strings, lists and dicts.
fn method(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    // Python strips four control characters (the ASCII separators) that Unicode does not call white space.
    if let ("strip" | "lstrip" | "rstrip" | "split", Some(text), []) = (name, value.as_str(), args) {
        return Ok(Value::from(match name {
            "strip" => strip(text),
            "lstrip" => text.trim_start_matches(is_space),
            "rstrip" => strip_end(text),
            _ => return Ok(text.split(is_space).filter(|word| !word.is_empty()).map(Value::from).collect()),
        }));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// As Python's `str.strip()`.
pub(super) fn strip(text: &str) -> &str {
    text.trim_matches(is_space)
}

/// As Python's `str.rstrip()`.
pub(super) fn strip_end(text: &str) -> &str {
    text.trim_end_matches(is_space)
}

fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1c'..='\x1f')
}

/// The text of a value where Python's differs from minijinja's: floats.
fn text(value: &Value) -> Option<String> {
    float(value).map(|f| {
        if f.is_nan() {
            "nan".to_owned()
        } else if f.is_infinite() {
            if f < 0.0 { "-inf" } else { "inf" }.to_owned()
        } else {
            repr(f)
        }
    })
}

fn float(value: &Value) -> Option<f64> {
    if value.kind() == ValueKind::Number && !value.is_integer() { f64::try_from(value.clone()).ok() } else { None }
}

/// Python's `repr` of a finite float: the shortest digits that read back the same, with an exponent below
/// 1e-4 and from 1e16 on.
fn repr(f: f64) -> String {
    let scientific = format!("{f:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let mut fixed = f.to_string();
        if !fixed.contains('.') {
            fixed.push_str(".0");
        }
        return fixed;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

/// `json.dumps(value, ensure_ascii=…, indent=…, separators=…, sort_keys=…)`, with the defaults of `transformers`.
fn tojson(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")? {
        None => None,
        Some(indent) if indent.is_none() => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            // More than any template uses, and little memory.
            None => " ".repeat(usize::try_from(indent)?.min(64)),
        }),
    };
    let between = if indent.is_some() { "," } else { ", " };
    let separators = match kwargs.get::<Option<Value>>("separators")? {
        None => (between.to_owned(), ": ".to_owned()),
        Some(pair) if pair.is_none() => (between.to_owned(), ": ".to_owned()),
        Some(pair) => (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()),
    };
    let mut json = Dumped {
        out: String::new(),
        indent,
        separators,
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sorted: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
        work: None,
    };
    kwargs.assert_all_used()?;
    json.value(value, 0)?;
    Ok(Value::from(json.out))
}

/// The output of `json.dumps`.
pub(super) struct Dumped {
    out: String,
    indent: Option<String>,
    separators: (String, String),
    ascii: bool,
    sorted: bool,
    /// The work of the request whose values are written. It must allow for the text twice, since the
    /// template's value is a copy.
    work: Option<WorkLimit>,
}

impl Dumped {
    pub(super) fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_JSON_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the value is nested too deeply"));
        }
        if let Some(node) = value.downcast_object_ref::<Node>() {
            self.work.get_or_insert_with(|| node.work().clone());
            let before = self.out.len();
            if !self.sorted && node.write(self, depth).map_err(stopped)? {
                return Ok(());
            }
            self.out.truncate(before);
        } else if let Some(fields) = value.downcast_object_ref::<KnownFields>() {
            self.work.get_or_insert_with(|| fields.work().clone());
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default())?,
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            // As in Python, where `Undefined` cannot be serialised.
            kind => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("tojson: {kind} is not JSON serializable"),
                ));
            }
        }
        Ok(())
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut empty = true;
        self.begin('[');
        for item in value.try_iter()? {
            self.next(&mut empty, depth + 1)?;
            self.value(&item, depth + 1)?;
        }
        self.end(empty, depth, ']')
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut pairs = Vec::new();
        for key in value.try_iter()? {
            let item = value.get_item(&key)?;
            pairs.push((key_text(&key)?, item));
        }
        if self.sorted {
            pairs.sort_by(|a, b| a.0.cmp(&b.0));
        }
        let mut empty = true;
        self.begin('{');
        for (key, item) in pairs {
            self.next(&mut empty, depth + 1)?;
            self.key(&key)?;
            self.value(&item, depth + 1)?;
        }
        self.end(empty, depth, '}')
    }

    pub(super) fn begin(&mut self, bracket: char) {
        self.out.push(bracket);
    }

    /// Moves to the next item of a list or map.
    ///
    /// # Errors
    /// When the request's work was stopped, or does not allow for the text.
    pub(super) fn next(&mut self, empty: &mut bool, depth: usize) -> Result<(), Error> {
        if !std::mem::take(empty) {
            self.out.push_str(&self.separators.0);
        }
        self.line(depth);
        self.fits()
    }

    /// Writes a key and the separator before its value.
    ///
    /// # Errors
    /// As [`Dumped::next`].
    pub(super) fn key(&mut self, key: &str) -> Result<(), Error> {
        self.string(key)?;
        self.out.push_str(&self.separators.1);
        Ok(())
    }

    /// Ends a list or map.
    ///
    /// # Errors
    /// As [`Dumped::next`].
    pub(super) fn end(&mut self, empty: bool, depth: usize, bracket: char) -> Result<(), Error> {
        if !empty {
            self.line(depth);
        }
        self.out.push(bracket);
        self.fits()
    }

    fn fits(&self) -> Result<(), Error> {
        self.work.as_ref().map_or(Ok(()), |work| work.fits(self.out.len().saturating_mul(2)).map_err(stopped))
    }

    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    /// Writes a text in quotes.
    ///
    /// # Errors
    /// As [`Dumped::next`].
    pub(super) fn string(&mut self, text: &str) -> Result<(), Error> {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\x08' => self.out.push_str("\\b"),
                '\x0c' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // Writing to a string cannot fail.
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
        self.fits()
    }
}

fn stopped(stopped: Stopped) -> Error {
    Error::new(ErrorKind::InvalidOperation, stopped.to_string())
}

/// Returns the text of a key.
fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.to_string(),
        ValueKind::None => "null".to_owned(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.to_owned(),
        ValueKind::Number => number(key),
        kind => return Err(Error::new(ErrorKind::InvalidOperation, format!("tojson: {kind} can't be a key"))),
    })
}

/// Returns a number as `json.dumps` writes it.
fn number(value: &Value) -> String {
    match float(value) {
        Some(f) if f.is_nan() => "NaN".to_owned(),
        Some(f) if f.is_infinite() => if f < 0.0 { "-Infinity" } else { "Infinity" }.to_owned(),
        Some(f) => repr(f),
        None => value.to_string(),
    }
}
