//! Chat templates: the Jinja sources that come with a model and turn a conversation into its prompt.
//!
//! Rendered as `transformers` does it (which is what vLLM calls): `trim_blocks` and `lstrip_blocks`, loop controls, Python's string
//! methods, `raise_exception`, `strftime_now`, and a `tojson` that is `json.dumps(ensure_ascii=False)`. Templates come from model
//! repositories, so they run with fuel, a depth and a cap on their output, and nothing can be loaded by name. What a request holds can't
//! break them. A template written for it still can: a list wrapped in itself 100,000 times overflows the stack when it is dropped, so
//! templates need the same trust as the models that they come with.
//!
//! [`chat`] turns request bodies into what a template is given. Called by [`super::huggingface`]; pure.

pub mod chat;
mod date;
mod format;
mod node;
mod python;

pub use format::ContentFormat;

use super::work::{Stopped, Work};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use std::io;
use std::time::SystemTime;

/// 5 million instructions: a conversation of 10,000 messages needs some 3 million in the longest templates known, and a runaway loop
/// ends within about 0.3 s.
pub const DEFAULT_TEMPLATE_FUEL: u64 = 5_000_000;
/// 400 levels of blocks and macros: a recursive macro over a tool schema takes about 12 a level, and real schemas stay below 20.
pub const DEFAULT_TEMPLATE_DEPTH: usize = 400;
/// The prompt may be 4 times as long as the request that it was made from…
pub const DEFAULT_OUTPUT_FACTOR: usize = 4;
/// …and 64 KiB longer: room for the system prompt that some templates carry.
pub const DEFAULT_OUTPUT_HEAD_ROOM: usize = 64 << 10;

/// Longest reason kept of a failed render, characters: templates may put text of the request into it.
const REASON_CHARS: usize = 200;
const NAME: &str = "chat_template";

/// A template that can't be used or refused a conversation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// It is not a Jinja template, or uses what is not known here.
    #[error("the chat template can't be compiled: {0}")]
    Syntax(String),
    /// It called `raise_exception`, met a value that it can't handle, or ran out of fuel or depth.
    #[error("the chat template failed: {0}")]
    Failed(String),
    /// The prompt grew past its cap.
    #[error("the rendered prompt is longer than the {allowed} bytes allowed")]
    TooLong {
        /// The cap.
        allowed: usize,
    },
    /// The request's work was stopped.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

/// A compiled chat template.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    content: ContentFormat,
    knows_developer: bool,
    tells_time: bool,
}

impl ChatTemplate {
    /// Compiles `source`.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] with the line.
    pub fn compile(source: &str) -> Result<Self, TemplateError> {
        let syntax = |e: minijinja::Error| TemplateError::Syntax(reason(&e));
        let mut env = Environment::new();
        env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(syntax)?);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_fuel(Some(DEFAULT_TEMPLATE_FUEL));
        env.set_recursion_limit(DEFAULT_TEMPLATE_DEPTH);
        env.set_debug(false);
        python::install(&mut env);
        env.add_template_owned(NAME, format::without_generation_marks(source)).map_err(syntax)?;
        Ok(Self {
            env,
            content: ContentFormat::detect(source),
            knows_developer: source.contains("'developer'") || source.contains("\"developer\""),
            tells_time: source.contains("strftime_now"),
        })
    }

    /// Whether the template wants the text of a message whole or in parts.
    #[must_use]
    pub fn content_format(&self) -> ContentFormat {
        self.content
    }

    /// Whether the template has a place for the role `developer`.
    #[must_use]
    pub fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    /// Renders with these variables. `input_bytes` is the length of the request that they come from; `time` is what `strftime_now`
    /// tells, in UTC, as servers in containers do. The text is charged to `work`.
    ///
    /// # Errors
    /// The template failed, the work was stopped, or the result would be longer than [`DEFAULT_OUTPUT_FACTOR`] times `input_bytes` plus
    /// [`DEFAULT_OUTPUT_HEAD_ROOM`].
    pub fn render(
        &self,
        variables: impl IntoIterator<Item = (String, Value)>,
        input_bytes: usize,
        time: SystemTime,
        work: &Work,
    ) -> Result<String, TemplateError> {
        let allowed = input_bytes.saturating_mul(DEFAULT_OUTPUT_FACTOR).saturating_add(DEFAULT_OUTPUT_HEAD_ROOM);
        let clock = self.tells_time.then(|| ("strftime_now".to_owned(), date::strftime_at(time)));
        // What the request names comes last, so that it wins, as it does in Python.
        let context = Value::from_pairs(clock.into_iter().chain(variables));
        let mut out = Capped { bytes: Vec::with_capacity(input_bytes.min(allowed)), allowed, over: false, work };
        let failed = |e: minijinja::Error| TemplateError::Failed(reason(&e));
        let template = self.env.get_template(NAME).map_err(failed)?;
        let done = template.render_captured_to(context, &mut out).map(|_| ());
        work.check()?;
        match done {
            Err(_) if out.over => Err(TemplateError::TooLong { allowed }),
            Err(e) => Err(failed(e)),
            Ok(()) => String::from_utf8(out.bytes).map_err(|_| TemplateError::Failed("not UTF-8".to_owned())),
        }
    }
}

/// What went wrong and where, in one clipped line.
fn reason(e: &minijinja::Error) -> String {
    let what = match (e.kind(), e.detail()) {
        (ErrorKind::OutOfFuel, _) => format!("it needs more than {DEFAULT_TEMPLATE_FUEL} instructions"),
        (_, Some(detail)) => detail.to_owned(),
        (kind, None) => kind.to_string(),
    };
    let what: String = what.chars().take(REASON_CHARS).collect();
    match e.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}

/// Output that ends in an error at its cap.
#[derive(Debug)]
struct Capped<'w> {
    bytes: Vec<u8>,
    allowed: usize,
    over: bool,
    work: &'w Work,
}

impl io::Write for Capped<'_> {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        if self.bytes.len().saturating_add(buf.len()) > self.allowed {
            self.over = true;
            return Err(io::Error::other("the output is too long"));
        }
        self.work.charge(buf.len()).map_err(io::Error::other)?;
        self.bytes.extend_from_slice(buf);
        Ok(buf.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests;
