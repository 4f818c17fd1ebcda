//! The tokenizer and chat templates of a Hugging Face model: `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`.
//!
//! Turns a request into the text and the token ids that vLLM computes for it. That holds for models whose prompts vLLM makes with their
//! chat template; a few have a renderer of their own there (gpt-oss, DeepSeek from V3.2, Kimi K3, Mistral with `mistral-common`), and for
//! those only `/v1/completions` is the same.
//!
//! Whoever calls it reads the files and decides what
//! follows from an error; nothing here blocks, waits or asks for the time. May import `prompt::template` and `protocol`.

mod config;
mod marks;
mod words;

use super::memo::Cuts;
use super::template::chat::{Chat, Completion, RenderError, completions};
use super::template::{ChatTemplate, TemplateError};
use super::work::Work;
use super::{EncodeError, Encoder};
use attache_protocol::Api;
use config::Config;
use minijinja::Value;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::SystemTime;
use tokenizers::Tokenizer;

/// 256 KiB of text at once, for a tokenizer whose texts can't be cut between words. The library takes some 100 times as much memory.
pub const DEFAULT_MAX_TEXT_BYTES: usize = 256 << 10;
/// 64 KiB of text at once, for a tokenizer whose texts are cut between words: more than any word or minified line of real text.
pub const DEFAULT_MAX_WORD_BYTES: usize = 64 << 10;
/// 32 KiB without a change between letters, digits, spaces and the rest: longer than any word or indentation of real text, and what
/// the regular expressions and merges of a tokenizer still get through in a few milliseconds.
pub const DEFAULT_MAX_RUN_BYTES: usize = 32 << 10;

/// Files of a model that can't be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// `tokenizer.json` is not a tokenizer.
    #[error("tokenizer.json can't be read: {0}")]
    Tokenizer(String),
    /// `tokenizer_config.json` is not what it should be.
    #[error("tokenizer_config.json can't be read: {0}")]
    Config(String),
    /// A chat template can't be compiled.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

/// A request that was read and is not rendered yet: it holds its own copies of what the body said.
#[derive(Debug)]
pub enum Unrendered {
    /// A conversation.
    Chat(Box<Chat>),
    /// The prompt of a completion.
    Bare(Rendered),
}

/// A request as the model reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rendered {
    /// Text to encode.
    Text {
        /// The text; special tokens stand in it as text.
        text: String,
        /// Whether [`HuggingFace::prefix`] and [`HuggingFace::suffix`] go around its tokens.
        add_special_tokens: bool,
    },
    /// The client sent token ids.
    Tokens(Vec<u32>),
}

/// What one call of [`Encoder::encode`] may cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EncodeBudget {
    /// Longest text, bytes.
    pub text_bytes: usize,
    /// Longest run of characters of one class, bytes: a tokenizer's cost grows faster than the length of a run.
    pub run_bytes: usize,
}

impl Default for EncodeBudget {
    fn default() -> Self {
        Self { text_bytes: DEFAULT_MAX_TEXT_BYTES, run_bytes: DEFAULT_MAX_RUN_BYTES }
    }
}

/// A model's tokenizer and templates.
#[derive(Debug)]
pub struct HuggingFace {
    tokenizer: Tokenizer,
    /// The template, and the one for conversations with tools where the model has one.
    template: Option<ChatTemplate>,
    tool_template: Option<ChatTemplate>,
    /// The special tokens that templates know by name.
    special: BTreeMap<String, Value>,
    marks: Option<Vec<String>>,
    splits_words: bool,
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    budget: EncodeBudget,
}

impl HuggingFace {
    /// Reads the files of a model. `chat_template` is `chat_template.jinja`, which goes before a template in the config.
    ///
    /// # Errors
    /// A file is not what it should be.
    pub fn from_parts(
        tokenizer_json: &[u8],
        tokenizer_config: Option<&[u8]>,
        chat_template: Option<&str>,
    ) -> Result<Self, LoadError> {
        let config = tokenizer_config.map(Config::parse).transpose().map_err(LoadError::Config)?.unwrap_or_default();
        let mut tokenizer = load(tokenizer_json)?;
        // Both are what a file was saved with; engines set their own for each request.
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

    /// The same with another budget.
    #[must_use]
    pub fn with_budget(self, budget: EncodeBudget) -> Self {
        Self { budget, ..self }
    }

    /// Renders a request as vLLM does it; of a batch, the first prompt. `body` has passed `protocol::parse`. `time` is what
    /// templates take for now.
    ///
    /// # Errors
    /// The prompt can't be known here: it holds media, lies on the server, is malformed, takes too much memory, or the template refuses it.
    pub fn render(&self, api: Api, body: &[u8], time: SystemTime) -> Result<Rendered, RenderError> {
        let read = self.read(api, body, &Work::for_body(body.len()))?;
        self.finish(read, body.len(), time)
    }

    /// The first half of [`HuggingFace::render`], after which the body is needed no more. What the request holds is charged to `work`.
    ///
    /// # Errors
    /// As [`HuggingFace::render`], and when the work is stopped.
    pub fn read(&self, api: Api, body: &[u8], work: &Work) -> Result<Unrendered, RenderError> {
        if api != Api::Completions {
            return Ok(Unrendered::Chat(Box::new(Chat::read(api, body, work)?)));
        }
        work.charge(body.len())?;
        Ok(Unrendered::Bare(match completions(body)? {
            Completion::Text { text, add_special_tokens } => Rendered::Text { text, add_special_tokens },
            Completion::Tokens(ids) => Rendered::Tokens(ids),
        }))
    }

    /// The second half. `input_bytes` is the length of the body.
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

    /// Appends the ids of a rendered request, whole.
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

    /// The special tokens at which a text may be cut: the pieces and the marks between them, each encoded by itself, give the ids of
    /// the whole. `None` where this tokenizer makes that untrue, or it can't be told.
    #[must_use]
    pub fn cut_marks(&self) -> Option<&[String]> {
        self.marks.as_deref()
    }

    /// Where texts may be cut without a change to their ids: at [`HuggingFace::cut_marks`], and between words where the tokenizer is known to
    /// split there.
    #[must_use]
    pub fn cuts(&self) -> Cuts {
        self.marks.as_ref().map_or_else(Cuts::none, |marks| Cuts::new(marks.iter().cloned(), self.splits_words))
    }

    /// The ids that stand before a prompt that special tokens are added to: mostly BOS or nothing.
    #[must_use]
    pub fn prefix(&self) -> &[u32] {
        &self.prefix
    }

    /// The ids that stand after such a prompt: mostly nothing.
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
        // The library checks little of what a tokenizer.json says, and its regular expressions can give up on a text.
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

/// The end of the first run of characters of one class that is longer than `allowed`, bytes from the beginning.
fn long_run(text: &str, allowed: usize) -> Option<usize> {
    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Class {
        Letter,
        Number,
        Space,
        Other,
    }
    // No run can be longer than the text: most texts of a conversation's turn end here.
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
    // A merge that names a token which is not there, for one, makes the library panic.
    match catch_unwind(|| Tokenizer::from_bytes(json)) {
        Ok(Ok(tokenizer)) => Ok(tokenizer),
        Ok(Err(e)) => Err(LoadError::Tokenizer(e.to_string())),
        Err(_) => Err(LoadError::Tokenizer("the library panicked".to_owned())),
    }
}

/// What the tokenizer adds before and after a text. An explicit `add_bos_token` or `add_eos_token` of the config goes before the
/// post-processor of `tokenizer.json`, which `transformers` replaces in that case.
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

/// A text with a token in every vocabulary.
const PROBE: &str = "a";

#[cfg(test)]
mod tests;
