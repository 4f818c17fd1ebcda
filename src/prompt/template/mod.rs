//! Chat templates: the Jinja sources that come with a model and convert a conversation to its prompt.
//!
//! They are rendered as `transformers` does, which vLLM calls: `trim_blocks` and `lstrip_blocks`, loop controls,
//! Python's string methods, `raise_exception`, `strftime_now`, and a `tojson` that equals
//! `json.dumps(ensure_ascii=False)`. Templates come from model repositories, so they run with limits on instructions,
//! depth and output, and cannot load anything by name. A request's content cannot break them. A malicious template
//! still can: a list nested in itself 100,000 times overflows the stack when it is dropped, so templates need the
//! same trust as their models.
//!
//! [`chat`] converts request bodies to the templates' input. Called by [`super::huggingface`]; no I/O.

pub mod chat;
mod date;
mod format;
mod node;
mod python;

pub use format::ContentFormat;

use super::work::{Stopped, WorkLimit};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use std::io;
use std::time::SystemTime;

/// Limit of instructions, 5 million: a conversation of 10,000 messages needs some 3 million in the longest known
/// templates, and an endless loop ends within about 0.3 s.
pub(crate) const DEFAULT_TEMPLATE_FUEL: u64 = 5_000_000;
/// Limit of nested blocks and macros, 400: a recursive macro over a tool schema takes about 12 per level, and real
/// schemas have fewer than 20 levels.
pub(crate) const DEFAULT_TEMPLATE_DEPTH: usize = 400;
/// The prompt may be 4 times as long as the request that it was made from, plus `DEFAULT_OUTPUT_HEAD_ROOM`.
pub(crate) const DEFAULT_OUTPUT_FACTOR: usize = 4;
/// Bytes by which a prompt may exceed the factor, 64 KiB: for the system prompts that some templates have.
pub(crate) const DEFAULT_OUTPUT_HEAD_ROOM: usize = 64 << 10;

/// Longest stored reason of a failed render in characters; templates may put text of the request into it.
const REASON_CHARS: usize = 200;
const NAME: &str = "chat_template";

/// A template that cannot be used, or that rejected a conversation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The source is not a Jinja template, or uses an unknown feature.
    #[error("the chat template can't be compiled: {0}")]
    Syntax(String),
    /// The template called `raise_exception`, met an invalid value, or exceeded its instructions or depth.
    #[error("the chat template failed: {0}")]
    Failed(String),
    /// The prompt exceeded its limit.
    #[error("the rendered prompt is longer than the {allowed} bytes allowed")]
    TooLong {
        /// The limit in bytes.
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

    /// Returns whether the template expects the text of a message whole or in parts.
    #[must_use]
    pub(crate) fn content_format(&self) -> ContentFormat {
        self.content
    }

    /// Whether the template knows the role `developer`.
    #[must_use]
    pub(crate) fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    /// Renders with these variables. `input_bytes` is the length of the request that they come from; `time` is the time
    /// for `strftime_now`, in UTC, as in servers in containers. The text is charged to `work`.
    ///
    /// # Errors
    /// [`TemplateError`] when the template failed, the work was stopped, or the result would be longer than
    /// `DEFAULT_OUTPUT_FACTOR` times `input_bytes` plus `DEFAULT_OUTPUT_HEAD_ROOM`.
    pub fn render(
        &self,
        variables: impl IntoIterator<Item = (String, Value)>,
        input_bytes: usize,
        time: SystemTime,
        work: &WorkLimit,
    ) -> Result<String, TemplateError> {
        let allowed = input_bytes.saturating_mul(DEFAULT_OUTPUT_FACTOR).saturating_add(DEFAULT_OUTPUT_HEAD_ROOM);
        let clock = self.tells_time.then(|| ("strftime_now".to_owned(), date::strftime_at(time)));
        // The request's variables come last, so that they win, as in Python.
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

/// Returns the problem and its position in one line of limited length.
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

/// Output that fails at its limit.
#[derive(Debug)]
struct Capped<'w> {
    bytes: Vec<u8>,
    allowed: usize,
    over: bool,
    work: &'w WorkLimit,
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
