//! Chat templates: the Jinja sources that come with a model and convert a conversation to its prompt.
//!
//! The crate `attache-jinja` renders them as `transformers` does, which vLLM calls. Templates come from model
//! repositories, so they run with limits on instructions, depth and output, and cannot load anything by name.
//!
//! [`chat`] converts request bodies to the templates' input. Called by [`super::huggingface`]; no I/O.

pub mod chat;
mod format;
mod node;

pub use attache_jinja::Value;
pub use format::ContentFormat;

use super::work::{Stopped, WorkLimit};
use attache_jinja::{ErrorKind, Limits, Meter, Template};
use std::time::{SystemTime, UNIX_EPOCH};

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
    template: Template,
    content: ContentFormat,
    knows_developer: bool,
}

impl ChatTemplate {
    /// Compiles `source`.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`] with the line.
    pub fn compile(source: &str) -> Result<Self, TemplateError> {
        Ok(Self {
            template: Template::compile(source).map_err(|error| TemplateError::Syntax(reason(&error)))?,
            content: ContentFormat::detect(source),
            knows_developer: source.contains("'developer'") || source.contains("\"developer\""),
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
        let limits = Limits { fuel: DEFAULT_TEMPLATE_FUEL, depth: DEFAULT_TEMPLATE_DEPTH, output: allowed };
        let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let rendered = self.template.render(variables, seconds, limits, work);
        work.check()?;
        rendered.map_err(|error| match error.kind() {
            ErrorKind::TooLong => TemplateError::TooLong { allowed },
            _ => TemplateError::Failed(reason(&error)),
        })
    }
}

impl Meter for WorkLimit {
    fn hold(&self, bytes: usize) -> bool {
        self.charge(bytes).is_ok()
    }

    fn release(&self, bytes: usize) {
        Self::release(self, bytes);
    }

    fn allows(&self, bytes: usize) -> bool {
        self.fits(bytes).is_ok()
    }
}

/// Returns the problem and its position in one line of limited length.
fn reason(error: &attache_jinja::Error) -> String {
    let what: String = error.message().chars().take(REASON_CHARS).collect();
    match error.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}

#[cfg(test)]
mod tests;
