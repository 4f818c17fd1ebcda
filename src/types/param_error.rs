//! Errors about parameters of plugins, which name the wrong value and what is allowed.

use serde_json::Value;
use std::fmt;

/// Most characters of a value that an error quotes.
const SHOWN_CHARS: usize = 60;

/// One step of a path from a mapping or a list to a value in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The entry of a mapping with this key.
    Key(String),
    /// The item of a list at this position, from 0.
    Item(usize),
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Key(key) => write!(f, ".{key}"),
            Step::Item(at) => write!(f, "[{at}]"),
        }
    }
}

/// Parameters that a plugin does not accept.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ParamError {
    message: String,
    steps: Vec<Step>,
    of_key: bool,
}

impl ParamError {
    /// Creates an error about the parameters as a whole.
    #[must_use]
    pub fn new(message: impl Into<String>) -> Self {
        Self { message: message.into(), steps: Vec::new(), of_key: false }
    }

    /// Creates an error about `name` with the value `got`; `allowed` describes the allowed values.
    #[must_use]
    pub fn value(name: &str, got: impl fmt::Display, allowed: &str) -> Self {
        Self::new(format!("`{name}` is {got}; {allowed}")).under(name)
    }

    /// Creates an error about a value of a wrong type; `subject` is what messages call it.
    pub(crate) fn wrong_type(subject: &str, expected: &str, got: &Value) -> Self {
        Self::new(format!("{subject} must be {expected}, got {}", describe(got)))
    }

    /// Creates an error about an unknown name; `problem` quotes it.
    pub(crate) fn unknown_key(key: &str, problem: &str) -> Self {
        Self { of_key: true, ..Self::new(format!("unknown parameter {problem}")).under(key) }
    }

    /// Returns the error with its path below `key`.
    #[must_use]
    pub fn under(mut self, key: impl Into<String>) -> Self {
        self.steps.insert(0, Step::Key(key.into()));
        self
    }

    /// Returns the error with its path below the item at `index` of a list.
    #[must_use]
    pub fn in_item(mut self, index: usize) -> Self {
        self.steps.insert(0, Step::Item(index));
        self
    }

    /// Returns the error with the name of its plugin or parameter before the message.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.message = format!("`{name}`: {}", self.message);
        self
    }

    /// Returns the path from the parameters to the wrong value; empty when they are wrong as a whole.
    #[must_use]
    pub fn steps(&self) -> &[Step] {
        &self.steps
    }

    /// Whether the last key of [`Self::steps`] is wrong, instead of its value.
    #[must_use]
    pub fn is_of_key(&self) -> bool {
        self.of_key
    }

    /// Creates an error about the key at `steps`.
    pub(crate) fn of_key(message: String, steps: Vec<Step>) -> Self {
        Self { message, steps, of_key: true }
    }
}

/// Describes a value, for messages.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_owned(),
        Value::Bool(b) => format!("`{b}`"),
        Value::Number(n) => format!("the number {n}"),
        Value::String(text) => format!("the text `{}`", shorten(text)),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a mapping".to_owned(),
    }
}

pub(crate) fn shorten(text: &str) -> String {
    text.chars().take(SHOWN_CHARS).collect()
}
