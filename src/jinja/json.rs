//! `json.dumps` as `transformers` calls it for the filter `tojson`.

use crate::numbers::float_text;
use crate::render::{Args, Run};
use crate::{Error, Meter, Result, Value};
use std::fmt::Write as _;

/// Widest indentation in characters: more than any template uses, and little memory.
const MAX_INDENT: i128 = 64;

/// JSON that is being written.
pub struct Json<'m> {
    out: String,
    indent: Option<String>,
    separators: (String, String),
    ascii: bool,
    sorted: bool,
    meter: &'m dyn Meter,
}

/// `value | tojson(ensure_ascii, indent, separators, sort_keys)`.
pub(crate) fn tojson(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [ascii, indent, separators, sorted] = args.bind(["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match indent.unwrap_or(Value::None) {
        Value::None => None,
        Value::Text(text) | Value::Safe(text) => Some(text.to_string()),
        other => match other.as_int() {
            Some(width) if width <= MAX_INDENT => Some(" ".repeat(usize::try_from(width).unwrap_or(0))),
            Some(_) => return Err(Error::failed(format!("tojson: the indentation is wider than {MAX_INDENT}"))),
            None => return Err(Error::failed("tojson: `indent` must be a whole number or a text")),
        },
    };
    let separators = match separators.unwrap_or(Value::None) {
        Value::None => ((if indent.is_some() { "," } else { ", " }).to_owned(), ": ".to_owned()),
        pair => match &**run.collect(&pair)? {
            [items, keys] if items.is_text() && keys.is_text() => {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                (text(items), text(keys))
            }
            _ => return Err(Error::failed("tojson: `separators` must be two texts")),
        },
    };
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let mut json = Json {
        out: String::new(),
        indent,
        separators,
        ascii: is_true(ascii),
        sorted: is_true(sorted),
        meter: run.meter,
    };
    json.value(value, 0)?;
    let text = json.out;
    run.allow(text.len())?;
    Ok(Value::from(text))
}

impl Json<'_> {
    /// Writes a value. `depth` is the number of lists and objects around it.
    ///
    /// # Errors
    /// When it has no JSON, or the meter refuses the text.
    pub fn value(&mut self, value: &Value, depth: usize) -> Result<()> {
        if let Value::Lazy(lazy) = value
            && !self.sorted
        {
            let before = self.out.len();
            if lazy.dump(self, depth)? {
                return Ok(());
            }
            self.out.truncate(before);
        }
        match value.level() {
            Value::None => self.out.push_str("null"),
            Value::Bool(truth) => self.out.push_str(if *truth { "true" } else { "false" }),
            Value::Int(number) => {
                // Writing to a string cannot fail.
                let _ = write!(self.out, "{number}");
            }
            Value::Big(number) => self.out.push_str(&number.to_string()),
            Value::Float(number) => self.out.push_str(&number_text(*number)),
            Value::Text(text) | Value::Safe(text) => self.string(text)?,
            Value::List(items) | Value::Tuple(items) => {
                let mut empty = true;
                self.begin('[');
                for item in items.iter() {
                    self.next(&mut empty, depth + 1)?;
                    self.value(item, depth + 1)?;
                }
                self.end(empty, depth, ']')?;
            }
            Value::Dict(dict) => {
                let mut entries: Vec<(&Value, &Value)> = dict.iter().collect();
                if self.sorted {
                    let mut failed = None;
                    entries.sort_by(|a, b| {
                        crate::value::compare::order(a.0, b.0)
                            .unwrap_or_else(|error| {
                                failed = Some(error);
                                None
                            })
                            .unwrap_or(std::cmp::Ordering::Equal)
                    });
                    if let Some(error) = failed {
                        return Err(error);
                    }
                }
                let mut empty = true;
                self.begin('{');
                for (key, item) in entries {
                    self.next(&mut empty, depth + 1)?;
                    self.any_key(key)?;
                    self.value(item, depth + 1)?;
                }
                self.end(empty, depth, '}')?;
            }
            // As in Python, where `Undefined` cannot be serialised.
            other => return Err(Error::failed(format!("tojson: {} is not JSON serializable", other.type_name()))),
        }
        Ok(())
    }

    fn any_key(&mut self, key: &Value) -> Result<()> {
        match key {
            Value::Text(text) | Value::Safe(text) => self.key(text),
            Value::None => self.key("null"),
            Value::Bool(truth) => self.key(if *truth { "true" } else { "false" }),
            Value::Float(number) => self.key(&number_text(*number)),
            other => match other.as_int() {
                Some(number) => self.key(&number.to_string()),
                None => Err(Error::failed(format!("tojson: {} can't be a key", other.type_name()))),
            },
        }
    }

    /// Starts a list or an object.
    pub fn begin(&mut self, bracket: char) {
        self.out.push(bracket);
    }

    /// Moves to the next item of a list or object.
    ///
    /// # Errors
    /// When the meter refuses the text.
    pub fn next(&mut self, empty: &mut bool, depth: usize) -> Result<()> {
        if !std::mem::take(empty) {
            self.out.push_str(&self.separators.0);
        }
        self.line(depth);
        self.fits()
    }

    /// Writes a key and the separator before its value.
    ///
    /// # Errors
    /// As [`Json::next`].
    pub fn key(&mut self, key: &str) -> Result<()> {
        self.string(key)?;
        self.out.push_str(&self.separators.1);
        Ok(())
    }

    /// Ends a list or an object.
    ///
    /// # Errors
    /// As [`Json::next`].
    pub fn end(&mut self, empty: bool, depth: usize, bracket: char) -> Result<()> {
        if !empty {
            self.line(depth);
        }
        self.out.push(bracket);
        self.fits()
    }

    /// The text is copied once more, to the value of the filter.
    fn fits(&self) -> Result<()> {
        if self.meter.allows(self.out.len().saturating_mul(2)) { Ok(()) } else { Err(Error::stopped()) }
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
    /// As [`Json::next`].
    pub fn string(&mut self, text: &str) -> Result<()> {
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

/// A float as `json.dumps` writes it.
fn number_text(number: f64) -> String {
    if number.is_nan() {
        "NaN".to_owned()
    } else if number.is_infinite() {
        if number < 0.0 { "-Infinity" } else { "Infinity" }.to_owned()
    } else {
        float_text(number)
    }
}
