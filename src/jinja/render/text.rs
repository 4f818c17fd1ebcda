//! Python's `str` and `repr` of values.

use super::{Object, Run};
use crate::characters::is_printable;
use crate::numbers::float_text;
use crate::value::{Items, State};
use crate::{Error, Function, Result, Value, View};
use std::borrow::Cow;
use std::fmt::Write as _;

/// The text with `&`, `<`, `>` and quotes escaped, unless it is safe.
pub(crate) fn escaped(value: &Value) -> Cow<'_, str> {
    match value {
        Value::Safe(text) => Cow::Borrowed(text),
        value => escape_html(value.as_str().unwrap_or_default()),
    }
}

/// The text as HTML.
pub(crate) fn escape_html(text: &str) -> Cow<'_, str> {
    if !text.contains(['&', '<', '>', '\'', '"']) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// Appends Python's `repr` of a text.
pub(crate) fn repr_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            // Writing to a string cannot fail.
            c => {
                let code = c as u32;
                let _ = match code {
                    0..=0xff => write!(out, "\\x{code:02x}"),
                    0x100..=0xffff => write!(out, "\\u{code:04x}"),
                    _ => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

fn no_text() -> Error {
    Error::failed("the text of an object holds an address")
}

impl Run<'_> {
    /// Python's `str(value)`.
    pub(crate) fn text<'v>(&mut self, value: &'v Value) -> Result<Cow<'v, str>> {
        match value {
            Value::Text(text) | Value::Safe(text) => Ok(Cow::Borrowed(text)),
            Value::Undefined => Ok(Cow::Borrowed("")),
            value => self.repr(value).map(Cow::Owned),
        }
    }

    /// Python's `repr(value)`.
    pub(crate) fn repr(&mut self, value: &Value) -> Result<String> {
        let mut out = String::new();
        self.push_repr(value, &mut out)?;
        self.allow(out.len())?;
        Ok(out)
    }

    fn push_repr(&mut self, value: &Value, out: &mut String) -> Result<()> {
        match value.level() {
            Value::Undefined => out.push_str("Undefined"),
            Value::None => out.push_str("None"),
            Value::Bool(truth) => out.push_str(if *truth { "True" } else { "False" }),
            Value::Int(number) => out.push_str(&number.to_string()),
            Value::Big(number) => out.push_str(&number.to_string()),
            Value::Float(number) => out.push_str(&float_text(*number)),
            Value::Text(text) => repr_text(text, out),
            Value::Safe(text) => {
                out.push_str("Markup(");
                repr_text(text, out);
                out.push(')');
            }
            Value::List(items) => {
                out.push('[');
                self.push_items(items, out)?;
                out.push(']');
            }
            Value::Tuple(items) => {
                out.push('(');
                self.push_items(items, out)?;
                out.push_str(if items.len() == 1 { ",)" } else { ")" });
            }
            Value::Dict(dict) => {
                out.push('{');
                for (at, (key, value)) in dict.iter().enumerate() {
                    self.separate(at, out)?;
                    self.push_repr(key, out)?;
                    out.push_str(": ");
                    self.push_repr(value, out)?;
                }
                out.push('}');
            }
            view @ Value::View(kind, _) => {
                let values = self.collect(view)?;
                out.push_str(match kind {
                    View::Keys => "dict_keys([",
                    View::Values => "dict_values([",
                    View::Items => "dict_items([",
                });
                self.push_items(&values, out)?;
                out.push_str("])");
            }
            Value::Range(range) => {
                out.push_str(&format!("range({}, {}", range.start, range.stop));
                out.push_str(&if range.step == 1 { ")".to_owned() } else { format!(", {})", range.step) });
            }
            Value::Function(Function::Range) => out.push_str("<class 'range'>"),
            Value::Function(Function::Dict) => out.push_str("<class 'dict'>"),
            Value::Function(Function::Namespace) => out.push_str("<class 'jinja2.utils.Namespace'>"),
            Value::Function(Function::Cycler) => out.push_str("<class 'jinja2.utils.Cycler'>"),
            Value::Function(Function::Joiner) => out.push_str("<class 'jinja2.utils.Joiner'>"),
            Value::State(State::Loop, id) => out.push_str(&self.loop_text(*id)?),
            Value::State(_, id) => return self.push_object(*id, out),
            Value::Reader(_) => return Err(no_text()),
            other => {
                let name = other.type_name();
                return Err(Error::failed(format!("the text of a {name} holds an address")));
            }
        }
        Ok(())
    }

    fn push_object(&mut self, id: u32, out: &mut String) -> Result<()> {
        let fields = match self.objects.get(id as usize) {
            Some(Object::Macro { body, .. }) => {
                match &*body.name {
                    "caller" => out.push_str("<Macro anonymous>"),
                    name => {
                        out.push_str("<Macro ");
                        repr_text(name, out);
                        out.push('>');
                    }
                }
                return Ok(());
            }
            Some(Object::Namespace(fields)) => fields.clone(),
            _ => return Err(no_text()),
        };
        // A namespace may contain itself.
        self.nested(|run| {
            out.push_str("<Namespace {");
            for (at, (name, value)) in fields.iter().enumerate() {
                run.separate(at, out)?;
                repr_text(name, out);
                out.push_str(": ");
                run.push_repr(value, out)?;
            }
            out.push_str("}>");
            Ok(())
        })
    }

    fn push_items(&mut self, items: &Items, out: &mut String) -> Result<()> {
        for (at, item) in items.iter().enumerate() {
            self.separate(at, out)?;
            self.push_repr(item, out)?;
        }
        Ok(())
    }

    /// Appends a comma before all but the first value, within the limits.
    fn separate(&mut self, at: usize, out: &mut String) -> Result<()> {
        if at > 0 {
            out.push_str(", ");
        }
        self.step()?;
        if out.len() > self.limits.output || !self.meter.allows(out.len()) {
            return Err(Error::stopped());
        }
        Ok(())
    }
}
