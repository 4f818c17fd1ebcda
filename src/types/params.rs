//! Parameters of plugins: parsing, and errors that name the wrong value and what is allowed.

use crate::spelling::closest;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::Segment;
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
}

/// Parameters that change nothing while others of their plugin have certain values.
#[derive(Clone, Copy, Debug)]
pub struct Inert {
    /// Names of the plugins.
    pub plugins: &'static [&'static str],
    /// Paths of the parameters, with `.` between the keys.
    pub keys: &'static [&'static str],
    /// Whether they change nothing; the argument is all parameters of the plugin, which are valid.
    pub when: fn(&Value) -> bool,
    /// The reason, for the message.
    pub why: &'static str,
}

impl Inert {
    /// The parameters among `given` that change nothing for the plugin called `name`, each as an error at its key.
    /// `all` are the parameters with those from other sources.
    pub fn find<'r>(
        rules: impl IntoIterator<Item = &'r Self>,
        name: &str,
        given: &Value,
        all: &Value,
    ) -> Vec<ParamError> {
        let mut found = Vec::new();
        for rule in rules.into_iter().filter(|rule| rule.plugins.contains(&name) && (rule.when)(all)) {
            for path in rule.keys {
                let steps: Vec<Step> = path.split('.').map(|key| Step::Key(key.to_owned())).collect();
                if at(given, &steps).is_some_and(|value| !value.is_null()) {
                    let message = format!("`{path}` has no effect: {}", rule.why);
                    found.push(ParamError { message, steps, of_key: true });
                }
            }
        }
        found
    }
}

/// The name by which `given` has a parameter with these `names`; the first of them if it has none.
#[must_use]
pub fn written<'n>(given: &Value, names: &[&'n str]) -> &'n str {
    let first = names.first().copied().unwrap_or_default();
    names.iter().copied().find(|name| given.get(name).is_some()).unwrap_or(first)
}

/// Parses the parameters of a plugin; `null` means the defaults.
///
/// # Errors
/// [`ParamError`] about the first wrong value: its expected type, or the known names.
pub fn params<P: DeserializeOwned + Default>(value: &Value) -> Result<P, ParamError> {
    match value {
        Value::Null => Ok(P::default()),
        Value::Object(_) => read(value),
        // Serde would accept a list as the values of the fields in their order.
        other => Err(ParamError::new(format!("parameters must be a mapping, got {}", describe(other)))),
    }
}

/// Parses a value that has no default.
///
/// # Errors
/// As [`params`].
pub fn read<P: DeserializeOwned>(value: &Value) -> Result<P, ParamError> {
    serde_path_to_error::deserialize(value).map_err(|error| {
        let mut steps = Vec::new();
        for segment in error.path() {
            match segment {
                Segment::Map { key } | Segment::Enum { variant: key } => steps.push(Step::Key(key.clone())),
                Segment::Seq { index } => steps.push(Step::Item(*index)),
                Segment::Unknown => break,
            }
        }
        explain(value, steps, &error.inner().to_string())
    })
}

/// Converts serde's message about the value at `steps` to terms of the configuration.
fn explain(root: &Value, steps: Vec<Step>, text: &str) -> ParamError {
    let name = steps.iter().rev().find_map(|step| match step {
        Step::Key(key) => Some(shorten(key)),
        Step::Item(_) => None,
    });
    let subject = match (&name, steps.last()) {
        (Some(name), Some(Step::Item(_))) => format!("each item of `{name}`"),
        (Some(name), _) => format!("`{name}`"),
        (None, _) => "the value".to_owned(),
    };
    let of_key = text.starts_with("unknown field");
    let message = if of_key {
        unknown("parameter", text)
    } else if let Some(problem) = text.strip_prefix("unknown variant ") {
        format!("{subject} is {}", unknown("", problem).trim_start())
    } else if let Some(own) = text.strip_prefix("duplicate field ") {
        format!("{subject} is another name of {own}, and both are given")
    } else if let Some(missing) = text.strip_prefix("missing field ") {
        format!("{missing} is missing")
    } else {
        let expected = text.strip_prefix("invalid ").and_then(|rest| rest.rsplit_once(", expected "));
        match (expected, at(root, &steps)) {
            (Some((_, expected)), Some(got)) => format!("{subject} must be {}, got {}", words(expected), describe(got)),
            _ => text.to_owned(),
        }
    };
    ParamError { message, steps, of_key }
}

/// Describes a name that is not in serde's list: `` `got`; did you mean `b`? `` or the whole list.
fn unknown(noun: &str, text: &str) -> String {
    let mut quoted = text.split('`').skip(1).step_by(2);
    let got = quoted.next().unwrap_or_default();
    let known: Vec<&str> = quoted.collect();
    let unknown = if noun.is_empty() { String::new() } else { format!("unknown {noun} ") };
    let shown = shorten(got);
    match closest(got, known.iter().copied()) {
        Some(meant) => format!("{unknown}`{shown}`; did you mean `{meant}`?"),
        None if known.is_empty() => format!("{unknown}`{shown}`; there are none"),
        None => format!("{unknown}`{shown}`, allowed: {}", known.join(", ")),
    }
}

/// Returns the term of the configuration for a Rust type or serde's own term.
fn words(expected: &str) -> &str {
    match expected {
        "f32" | "f64" => "a number",
        "u8" => "a whole number of 0 to 255",
        "u16" => "a whole number of 0 to 65535",
        "u32" => "a whole number of 0 to 4294967295",
        "u64" | "usize" => "a whole number of 0 or more",
        "i8" | "i16" | "i32" | "i64" | "isize" => "a whole number",
        "a boolean" => "`true` or `false`",
        "a string" | "string or map" => "text",
        "a sequence" => "a list",
        "a map" => "a mapping",
        other if other.starts_with("struct ") => "a mapping",
        other => other,
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

fn shorten(text: &str) -> String {
    text.chars().take(SHOWN_CHARS).collect()
}

/// Returns the value at `steps`.
fn at<'v>(root: &'v Value, steps: &[Step]) -> Option<&'v Value> {
    steps.iter().try_fold(root, |value, step| match step {
        Step::Key(key) => value.get(key),
        Step::Item(index) => value.get(index),
    })
}

/// The parameters of a plugin that has none.
#[derive(Debug, Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NoParams {}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::collections::BTreeMap;

    #[derive(Debug, Default, serde::Deserialize)]
    #[serde(default, deny_unknown_fields, rename_all = "camelCase")]
    struct Outer {
        weight: f32,
        most: u32,
        mode: Mode,
        header: String,
        inner: Inner,
        items: Vec<Inner>,
        bounds: BTreeMap<String, f64>,
        many: Vec<u16>,
    }

    #[derive(Debug, Default, serde::Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Mode {
        #[default]
        LeastRequest,
        Random,
    }

    #[derive(Debug, Default, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[expect(dead_code, reason = "only whether it can be read is asked")]
    struct Inner {
        on: bool,
    }

    #[derive(Debug, Default, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Nothing {}

    #[test]
    fn wrong_parameter_error_names_value_path_and_allowed() {
        for (given, path, message) in [
            (json!({"weight": "much"}), ".weight", "`weight` must be a number, got the text `much`"),
            (json!({"most": -1}), ".most", "`most` must be a whole number of 0 to 4294967295, got the number -1"),
            (json!({"most": 1.5}), ".most", "`most` must be a whole number of 0 to 4294967295, got the number 1.5"),
            (json!({"mode": "randon"}), ".mode", "`mode` is `randon`; did you mean `random`?"),
            (json!({"mode": "x"}), ".mode", "`mode` is `x`, allowed: least-request, random"),
            (json!({"mode": 3}), ".mode", "`mode` must be text, got the number 3"),
            (json!({"header": [1]}), ".header", "`header` must be text, got a list"),
            (json!({"inner": 1}), ".inner", "`inner` must be a mapping, got the number 1"),
            (json!({"inner": {"on": "yes"}}), ".inner.on", "`on` must be `true` or `false`, got the text `yes`"),
            (json!({"inner": {}}), ".inner", "`on` is missing"),
            (
                json!({"items": [{"on": true}, {"on": 1}]}),
                ".items[1].on",
                "`on` must be `true` or `false`, got the number 1",
            ),
            (json!({"items": {}}), ".items", "`items` must be a list, got a mapping"),
            (
                json!({"many": [1, "a"]}),
                ".many[1]",
                "each item of `many` must be a whole number of 0 to 65535, got the text `a`",
            ),
            (json!({"bounds": {"a": null}}), ".bounds.a", "`a` must be a number, got nothing"),
            (json!({"wieght": 1}), ".wieght", "unknown parameter `wieght`; did you mean `weight`?"),
            (
                json!({"colour": 1}),
                ".colour",
                "unknown parameter `colour`, allowed: weight, most, mode, header, inner, items, bounds, many",
            ),
            (json!({"inner": {"off": 1}}), ".inner.off", "unknown parameter `off`, allowed: on"),
            (json!([1]), "", "parameters must be a mapping, got a list"),
            (json!("text"), "", "parameters must be a mapping, got the text `text`"),
        ] {
            let Err(error) = params::<Outer>(&given) else { panic!("{given} was read") };
            let shown: String = error.steps().iter().map(ToString::to_string).collect();
            assert_eq!((shown.as_str(), error.to_string().as_str()), (path, message), "{given}");
            assert_eq!(error.is_of_key(), message.starts_with("unknown parameter"), "{given}");
        }
    }

    #[test]
    fn plugin_without_parameters_says_that_there_are_none() {
        let error = params::<Nothing>(&json!({"temperature": 3})).unwrap_err();
        assert_eq!(error.to_string(), "unknown parameter `temperature`; there are none");
    }

    #[test]
    fn error_of_a_part_keeps_the_whole_path() {
        let error =
            ParamError::value("windowSize", 0, "at least 1 is needed").under("parameters").in_item(2).under("plugins");
        let shown: String = error.steps().iter().map(ToString::to_string).collect();
        assert_eq!(shown, ".plugins[2].parameters.windowSize");
        assert_eq!(error.named("vtc-basic").to_string(), "`vtc-basic`: `windowSize` is 0; at least 1 is needed");
    }
}
