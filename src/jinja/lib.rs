//! Jinja2 for chat templates, with the values and texts of Python.
//!
//! Servers render chat templates by `transformers`, which uses Jinja2's `ImmutableSandboxedEnvironment` with
//! `trim_blocks`, `lstrip_blocks`, loop controls, the tag `generation`, and its own `tojson`. A [`Template`] renders the
//! same text, character by character, or fails. `tests/data/jinja` has a table of cases that Jinja2 itself rendered.
//!
//! Templates come from model repositories. They run with limits on instructions, depth, the length of texts, and output
//! ([`Limits`]), and cannot load anything by name.
//!
//! **Owns** the syntax, the values, and the filters, tests and methods of templates.
//! **Called by** `prompt`, which makes the values from a request.
//! **Must not** read files or the clock: the time of `strftime_now` is an argument.
//!
//! A template that uses one of these fails:
//!
//! * what depends on addresses or chance: the text of a method, a generator or a lambda; `random`, `lipsum`
//! * `loop` after the end of its loop, and a loop over `loop`
//! * `import`, `include`, `extends`, `self` and `super`, the tag `autoescape`
//! * whole numbers above 127 bits, complex numbers, sets, bytes, and items of the type `dict`
//! * the filters `urlize`, `wordwrap` of other texts than plain words, and `pprint` of long values
//! * `str.isdigit` of digits such as `²`
//!
//! The list `REFUSED` in `tests.rs` is complete for the types of values that a request has.
//!
//! Read first: `value.rs`, `syntax/ast.rs`, `render.rs`.

#![cfg_attr(not(test), deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod characters;
mod date;
mod filters;
mod json;
mod methods;
mod numbers;
mod operators;
mod predicates;
mod printf;
mod render;
mod strformat;
mod syntax;
mod value;

pub use characters::{strip, strip_end};
pub use json::Json;
pub use render::{Limits, Meter, Unmetered};
pub use value::{Dict, Function, Items, Lazy, MAX_DEPTH, Method, Range, Reader, State, Unhashable, Value, View};

use std::fmt;

/// A compiled template.
#[derive(Debug)]
pub struct Template {
    program: syntax::Program,
}

impl Template {
    /// Compiles `source`.
    ///
    /// # Errors
    /// [`ErrorKind::Syntax`] with the line.
    pub fn compile(source: &str) -> Result<Self> {
        Ok(Self { program: syntax::parse(source)? })
    }

    /// Renders the template with these variables. `seconds` is the Unix time for `strftime_now`, in UTC.
    ///
    /// # Errors
    /// When the template fails, or exceeds a limit.
    pub fn render<N: AsRef<str>>(
        &self,
        variables: impl IntoIterator<Item = (N, Value)>,
        seconds: u64,
        limits: Limits,
        meter: &dyn Meter,
    ) -> Result<String> {
        render::render(&self.program, variables, seconds, limits, meter)
    }
}

/// Result of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The kind of an [`Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// The source is not a Jinja template.
    Syntax,
    /// The template failed.
    Failed,
    /// It needs more instructions than allowed.
    OutOfFuel,
    /// The rendered text is longer than allowed.
    TooLong,
    /// The meter refused memory, or asked for the end.
    Stopped,
}

/// A template that cannot be compiled or rendered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(Box<Problem>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Problem {
    kind: ErrorKind,
    message: String,
    line: u32,
}

impl Error {
    fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Problem { kind, message: message.into(), line: 0 }))
    }

    /// Creates an error of the running template.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Failed, message)
    }

    /// Creates the error of a meter that refused.
    #[must_use]
    pub fn stopped() -> Self {
        Self::new(ErrorKind::Stopped, "the render was stopped")
    }

    /// Sets the line, unless it is known.
    fn at(mut self, line: u32) -> Self {
        if self.0.line == 0 {
            self.0.line = line;
        }
        self
    }

    /// The kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The problem, without its line.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The line in the template, from 1.
    #[must_use]
    pub fn line(&self) -> Option<u32> {
        Some(self.0.line).filter(|line| *line > 0)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        match self.line() {
            Some(line) => write!(f, " (line {line})"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<Unhashable> for Error {
    fn from(_: Unhashable) -> Self {
        Self::failed("a list or a dictionary can't be a key")
    }
}

#[cfg(test)]
mod tests;
