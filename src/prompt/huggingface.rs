//! The tokenizer and chat templates of a Hugging Face model: `tokenizer.json`, `tokenizer_config.json`,
//! `chat_template.jinja`.
//!
//! Converts a request to the text and the token ids that vLLM computes for it. This holds for models whose prompts vLLM
//! makes with their chat template. A few models have their own renderer in vLLM (gpt-oss, DeepSeek from V3.2, Kimi K3,
//! Mistral with `mistral-common`); for these, only `/v1/completions` is the same.
//!
//! Callers read the files and handle errors; nothing here does I/O or asks for the time.
//! May import `prompt::template` and `protocol`.

mod config;
mod marks;
mod words;

use super::memo::Cuts;
pub use super::template::chat::RenderError;
use super::template::chat::{Chat, Completion, completions};
use super::template::{ChatTemplate, TemplateError};
use super::work::WorkLimit;
use super::{EncodeError, Encoder};
use attache_jinja::Value;
use attache_protocol::Api;
use config::Config;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::SystemTime;
use tokenizers::Tokenizer;

/// Longest text at once, 256 KiB, for a tokenizer whose texts cannot be cut between words. The library takes some
/// 100 times as much memory.
pub(crate) const DEFAULT_MAX_TEXT_BYTES: usize = 256 << 10;
/// Longest text at once, 64 KiB, for a tokenizer whose texts are cut between words: more than any word or
/// minified line of real text.
pub(crate) const DEFAULT_MAX_WORD_BYTES: usize = 64 << 10;
/// Longest run without a change between letters, digits, spaces and the rest, 32 KiB: more than any word or indentation
/// of real text. Regular expressions and merges of a tokenizer still process it in a few milliseconds.
pub(crate) const DEFAULT_MAX_RUN_BYTES: usize = 32 << 10;

/// Model files that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// `tokenizer.json` is not a valid tokenizer.
    #[error("tokenizer.json can't be read: {0}")]
    Tokenizer(String),
    /// `tokenizer_config.json` is not a valid configuration.
    #[error("tokenizer_config.json can't be read: {0}")]
    Config(String),
    /// A chat template cannot be compiled.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// A request that was parsed and not rendered yet. It owns copies of the body's data.
#[derive(Debug)]
pub enum Unrendered {
    /// A conversation for the chat template.
    Chat(Box<Chat>),
    /// The prompt of a completion, which needs no template.
    Bare(Rendered),
}

/// A request as the model receives it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendered {
    /// Text that must be encoded.
    Text {
        /// The text, with special tokens in text form.
        text: String,
        /// Whether [`HuggingFace::prefix`] and [`HuggingFace::suffix`] surround its tokens.
        add_special_tokens: bool,
    },
    /// Token ids sent by the client.
    Tokens(Vec<u32>),
}

/// Limits of one call of [`Encoder::encode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeBudget {
    /// Longest text in bytes.
    pub text_bytes: usize,
    /// Longest run of characters of one class in bytes: a tokenizer's cost grows faster than the length of a run.
    pub run_bytes: usize,
}

impl Default for EncodeBudget {
    fn default() -> Self {
        Self { text_bytes: DEFAULT_MAX_TEXT_BYTES, run_bytes: DEFAULT_MAX_RUN_BYTES }
    }
}

/// The tokenizer and the templates of a model.
#[derive(Debug)]
pub struct HuggingFace {
    tokenizer: Tokenizer,
    /// The template, and the one for conversations with tools if the model has one.
    template: Option<ChatTemplate>,
    tool_template: Option<ChatTemplate>,
    /// The special tokens that templates can use by name.
    special: BTreeMap<String, Value>,
    marks: Option<Vec<String>>,
    splits_words: bool,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    budget: EncodeBudget,
}

impl HuggingFace {
    /// Loads the files of a model. `chat_template` is the content of `chat_template.jinja`, which has priority over
    /// a template in the configuration.
    ///
    /// # Errors
    /// [`LoadError`] when a file is invalid.
    pub fn from_parts(
        tokenizer_json: &[u8],
        tokenizer_config: Option<&[u8]>,
        chat_template: Option<&str>,
    ) -> Result<Self, LoadError> {
        let config = tokenizer_config.map(Config::parse).transpose().map_err(LoadError::Config)?.unwrap_or_default();
        let mut tokenizer = load(tokenizer_json)?;
        // Padding and truncation are settings of the saved file; engines set their own for each request.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|e| LoadError::Tokenizer(e.to_string()))?;
        let compile = |source: Option<&str>| source.map(ChatTemplate::compile).transpose();
        let (template, tool_template) = match chat_template {
            Some(source) => (Some(ChatTemplate::compile(source)?), None),
            None => (compile(config.template("default"))?, compile(config.template("tool_use"))?),
        };
        let (prefix, suffix) = surroundings(&tokenizer, &config)?;
        let marks = marks::of(tokenizer_json);
        let splits_words = marks.is_some() && words::are_split(tokenizer_json);
        let text_bytes = if splits_words { DEFAULT_MAX_WORD_BYTES } else { DEFAULT_MAX_TEXT_BYTES };
        Ok(Self {
            tokenizer,
            template,
            tool_template,
            special: config.into_special_tokens(),
            marks,
            splits_words,
            prefix,
            suffix,
            budget: EncodeBudget { text_bytes, ..EncodeBudget::default() },
        })
    }

    /// Returns the tokenizer with other limits.
    #[cfg(test)]
    #[must_use]
    pub(crate) fn with_budget(self, budget: EncodeBudget) -> Self {
        Self { budget, ..self }
    }

    /// Renders a request as vLLM does; of a batch, the first prompt. `body` has passed `protocol::parse`. `time` is
    /// the current time for templates.
    ///
    /// # Errors
    /// [`RenderError`] when the prompt cannot be determined here: it has media, is stored on the server, is malformed,
    /// takes too much memory, or the template rejects it.
    pub fn render(&self, api: Api, body: &[u8], time: SystemTime) -> Result<Rendered, RenderError> {
        let read = self.read(api, body, &WorkLimit::for_body(body.len()))?;
        self.finish(read, body.len(), time)
    }

    /// The first half of [`HuggingFace::render`], after which the body is no longer needed. Memory of the request's
    /// data is charged to `work`.
    ///
    /// # Errors
    /// As [`HuggingFace::render`], and when the work was stopped.
    pub fn read(&self, api: Api, body: &[u8], work: &WorkLimit) -> Result<Unrendered, RenderError> {
        if api != Api::Completions {
            return Ok(Unrendered::Chat(Box::new(Chat::read(api, body, work)?)));
        }
        work.charge(body.len())?;
        Ok(Unrendered::Bare(match completions(body)? {
            Completion::Text { text, add_special_tokens } => Rendered::Text { text, add_special_tokens },
            Completion::Tokens(ids) => Rendered::Tokens(ids),
        }))
    }

    /// The second half of [`HuggingFace::render`]. `input_bytes` is the length of the body.
    ///
    /// # Errors
    /// As [`HuggingFace::read`].
    pub fn finish(&self, read: Unrendered, input_bytes: usize, time: SystemTime) -> Result<Rendered, RenderError> {
        let chat = match read {
            Unrendered::Chat(chat) => *chat,
            Unrendered::Bare(rendered) => return Ok(rendered),
        };
        let for_tools = self.tool_template.as_ref().filter(|_| chat.has_tools());
        let template = for_tools.or(self.template.as_ref()).ok_or(RenderError::NoTemplate)?;
        let add_special_tokens = chat.add_special_tokens;
        let text = chat.render(template, &self.special, input_bytes, time)?;
        Ok(Rendered::Text { text, add_special_tokens })
    }

    /// Appends all ids of a rendered request.
    ///
    /// # Errors
    /// As [`Encoder::encode`].
    pub fn encode_rendered(&self, rendered: &Rendered, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        match rendered {
            Rendered::Tokens(ids) => out.extend_from_slice(ids),
            Rendered::Text { text, add_special_tokens: false } => self.encode(text, out)?,
            Rendered::Text { text, add_special_tokens: true } => {
                out.extend_from_slice(&self.prefix);
                self.encode(text, out)?;
                out.extend_from_slice(&self.suffix);
            }
        }
        Ok(())
    }

    /// Returns the special tokens at which a text may be cut: the parts and the tokens between them, encoded
    /// separately, give the ids of the whole. `None` where this tokenizer may give other ids.
    #[must_use]
    pub fn cut_marks(&self) -> Option<&[String]> {
        self.marks.as_deref()
    }

    /// Returns where texts may be cut without changing their ids: at [`HuggingFace::cut_marks`], and between words if
    /// the tokenizer is known to split there.
    #[must_use]
    pub fn cuts(&self) -> Cuts {
        self.marks.as_ref().map_or_else(Cuts::none, |marks| Cuts::new(marks.iter().cloned(), self.splits_words))
    }

    /// Returns the ids before a prompt with special tokens: usually BOS or nothing.
    #[must_use]
    pub fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// Returns the ids after a prompt with special tokens: usually none.
    #[must_use]
    pub fn suffix(&self) -> &[u32] {
        &self.suffix
    }
}

impl Encoder for HuggingFace {
    fn encode(&self, text: &str, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        if text.len() > self.budget.text_bytes {
            return Err(EncodeError::Budget { done: 0, bytes: text.len() });
        }
        if let Some(done) = long_run(text, self.budget.run_bytes) {
            return Err(EncodeError::Budget { done, bytes: text.len() });
        }
        // The library checks little of a tokenizer.json, and its regular expressions can fail on a text.
        let encoded = catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode_fast(text, false)));
        match encoded {
            Ok(Ok(encoding)) => {
                out.extend_from_slice(encoding.get_ids());
                Ok(())
            }
            Ok(Err(e)) => Err(EncodeError::Failed(e.to_string())),
            Err(_) => Err(EncodeError::Failed("it panicked".to_owned())),
        }
    }
}

/// Returns the end of the first run of characters of one class that is longer than `allowed`, as an offset in bytes.
fn long_run(text: &str, allowed: usize) -> Option<usize> {
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Class {
        Letter,
        Number,
        Space,
        Other,
    }
    // No run can be longer than the text: most texts end here.
    if text.len() <= allowed {
        return None;
    }
    let (mut start, mut current) = (0, None);
    for (at, c) in text.char_indices() {
        let class = match c {
            c if c.is_alphabetic() => Class::Letter,
            c if c.is_whitespace() => Class::Space,
            c if c.is_numeric() => Class::Number,
            _ => Class::Other,
        };
        if current != Some(class) {
            (start, current) = (at, Some(class));
        } else if at + c.len_utf8() - start > allowed {
            return Some(at + c.len_utf8());
        }
    }
    None
}

fn load(json: &[u8]) -> Result<Tokenizer, LoadError> {
    // The library panics on some invalid files, for example if a merge names a missing token.
    match catch_unwind(|| Tokenizer::from_bytes(json)) {
        Ok(Ok(tokenizer)) => Ok(tokenizer),
        Ok(Err(e)) => Err(LoadError::Tokenizer(e.to_string())),
        Err(_) => Err(LoadError::Tokenizer("the library panicked".to_owned())),
    }
}

/// Returns the ids that the tokenizer adds before and after a text. An explicit `add_bos_token` or `add_eos_token` in
/// the configuration has priority over the post-processor of `tokenizer.json`, which `transformers` then replaces.
fn surroundings(tokenizer: &Tokenizer, config: &Config) -> Result<(Vec<u32>, Vec<u32>), LoadError> {
    if let Some((bos, eos)) = config.added_ends() {
        let ids = |token: Option<&str>| {
            let id = token.map(|t| tokenizer.token_to_id(t).ok_or(LoadError::Tokenizer(format!("no token {t:?}"))));
            id.transpose().map(|id| id.into_iter().collect())
        };
        return Ok((ids(bos)?, ids(eos)?));
    }
    let ids = |special| -> Result<Vec<u32>, LoadError> {
        let encoded = catch_unwind(AssertUnwindSafe(|| tokenizer.encode_fast(PROBE, special)));
        match encoded {
            Ok(Ok(encoding)) => Ok(encoding.get_ids().to_vec()),
            Ok(Err(e)) => Err(LoadError::Tokenizer(e.to_string())),
            Err(_) => Err(LoadError::Tokenizer("the library panicked".to_owned())),
        }
    };
    let (with, without) = (ids(true)?, ids(false)?);
    if without.is_empty() {
        return Ok((with, Vec::new()));
    }
    let at = with.windows(without.len()).position(|w| w == without);
    let at = at.ok_or_else(|| LoadError::Tokenizer("special tokens are not put around a text".to_owned()))?;
    let (prefix, rest) = with.split_at(at);
    Ok((prefix.to_vec(), rest.get(without.len()..).unwrap_or_default().to_vec()))
}

/// A text that every vocabulary has a token for.
const PROBE: &str = "a";

#[cfg(test)]
mod tests;
