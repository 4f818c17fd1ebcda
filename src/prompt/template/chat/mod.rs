//! From a request body to the input of a chat template, as vLLM prepares it.
//!
//! `openai`, `anthropic` and `responses` read the three conversation APIs into one form, [`Chat`], which is
//! normalised here: text parts are joined (or kept as parts, see [`ContentFormat`]), `developer` becomes `system`
//! where the template does not know it, tools are written again in the member order of vLLM's own types, and
//! arguments of tool calls are parsed.
//!
//! A `chat_template` in the body is ignored: vLLM rejects it unless it was started with
//! `--trust-request-chat-template`. `tool_choice: none` leaves the tools in the prompt, as in vLLM by default.
//!
//! Known differences: whole numbers above 64 bits become floats, and JSON that only Python reads
//! (`NaN`, lone surrogates) is rejected.

mod anthropic;
mod openai;
mod responses;
mod tools;

pub use openai::{Completion, completions};

use super::node::KnownFields;
use super::{ChatTemplate, ContentFormat, TemplateError};
use crate::work::{Stopped, WorkLimit};
use attache_jinja::Value;
use attache_protocol::{Api, MediaKind};
use serde::Deserialize;
use serde::de::{SeqAccess, Visitor};
use serde_json::value::RawValue;
use smallvec::{SmallVec, smallvec};
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::time::SystemTime;
use tools::{calls, dump_tool, parse_call};

/// Memory of a message or a tool besides its texts.
const ITEM_BYTES: usize = 128;

/// The tag that `transformers` appends to the last message, to find the message's end in the prompt.
const CONTINUE_TAG: &str = "CONTINUE_FINAL_MESSAGE_TAG ";

/// The reason for which a request was not converted to a prompt. None of these rejects the request:
/// the server decides about that.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RenderError {
    /// The body does not follow its API. The error never quotes the body.
    #[error("the body can't be read as {what}: {reason}")]
    Body {
        /// Name of the API.
        what: &'static str,
        /// The problem, and its position if known.
        reason: String,
    },
    /// The prompt has media, whose tokens come from the model's preprocessor.
    #[error("the prompt is not text alone, it holds media: {0:?}")]
    NotText(MediaKind),
    /// The prompt has a feature that is not rendered here, or that only the server knows.
    #[error("{0} is not rendered here")]
    Unsupported(&'static str),
    /// The model has no chat template.
    #[error("the model has no chat template")]
    NoTemplate,
    /// The template failed to render.
    #[error(transparent)]
    Template(TemplateError),
    /// The request's work was stopped.
    #[error(transparent)]
    Stopped(#[from] Stopped),
}

impl From<TemplateError> for RenderError {
    fn from(error: TemplateError) -> Self {
        match error {
            TemplateError::Stopped(stopped) => Self::Stopped(stopped),
            error => Self::Template(error),
        }
    }
}

/// A conversation, and how to render it.
#[derive(Debug)]
pub struct Chat {
    messages: Vec<ChatMessage>,
    /// Tools in the form in which vLLM passes them.
    tools: Option<Vec<Value>>,
    /// Variables that the client adds for the template (`chat_template_kwargs`, `reasoning_effort`, `documents`, …).
    variables: BTreeMap<String, Value>,
    continue_final_message: bool,
    /// Whether the tokenizer adds its special tokens to the rendered text: false by
    /// default, because templates contain them.
    pub add_special_tokens: bool,
    work: WorkLimit,
}

/// The texts of a message, nearly always one.
type Texts = SmallVec<[Value; 1]>;

/// A message in OpenAI's form.
#[derive(Debug, Default)]
struct ChatMessage {
    role: Value,
    content: Option<Texts>,
    more: Option<Box<More>>,
}

/// Fields that most messages do not have.
#[derive(Debug, Default)]
struct More {
    /// Tool calls whose arguments are not parsed yet.
    calls: Vec<Value>,
    tool_call_id: Option<Value>,
    reasoning: Option<Value>,
    name: Option<Value>,
    task: Option<Value>,
    tools: Option<Value>,
}

impl Chat {
    fn new(work: &WorkLimit) -> Self {
        Self {
            messages: Vec::new(),
            tools: None,
            variables: BTreeMap::new(),
            continue_final_message: false,
            add_special_tokens: false,
            work: work.clone(),
        }
    }

    /// Reads the conversation of a request; of a batch, the first one. Its memory is charged to `work`.
    ///
    /// # Errors
    /// See [`RenderError`].
    pub fn read(api: Api, body: &[u8], work: &WorkLimit) -> Result<Self, RenderError> {
        match api {
            Api::ChatCompletions => openai::chat(body, work),
            Api::Messages => anthropic::messages(body, work),
            Api::Responses => responses::responses(body, work),
            _ => Err(RenderError::Unsupported("this API")),
        }
    }

    /// Whether the conversation has tools: models may have a separate template for that.
    #[must_use]
    pub(crate) fn has_tools(&self) -> bool {
        self.tools.is_some()
    }

    /// Renders the conversation. `special` maps names to texts of the model's special tokens (`bos_token`, …);
    /// `input_bytes` is the length of the body.
    ///
    /// # Errors
    /// See [`RenderError`].
    pub fn render(
        self,
        template: &ChatTemplate,
        special: &BTreeMap<String, Value>,
        input_bytes: usize,
        time: SystemTime,
    ) -> Result<String, RenderError> {
        let mut messages = Vec::with_capacity(self.messages.len());
        for message in self.messages {
            messages.push(message.into_value(template, &self.work)?);
        }
        let last = if self.continue_final_message { Some(mark_end(&mut messages, &self.work)?) } else { None };
        let mut variables = special.clone();
        // Defined in every template, at least as None.
        variables.insert("documents".to_owned(), Value::None);
        variables.insert("tools".to_owned(), self.tools.map_or(Value::None, list));
        variables.extend(self.variables);
        variables.insert("messages".to_owned(), list(messages));
        let text = template.render(variables, input_bytes, time, &self.work)?;
        match last {
            Some(last) => cut_at_mark(text, &last),
            None => Ok(text),
        }
    }

    /// Sets the request's template variables. Null and `auto` count as absent, as in vLLM; variables that would replace
    /// the conversation or the template are ignored.
    fn set_variables(&mut self, kwargs: Option<Value>, given: impl IntoIterator<Item = (&'static str, Option<Value>)>) {
        for (key, value) in kwargs.iter().flat_map(pairs) {
            let Some(key) = key.as_str() else { continue };
            let reserved = matches!(key, "messages" | "conversation" | "chat_template" | "tokenize");
            if !reserved && is_given(&value) {
                self.variables.insert(key.to_owned(), value);
            }
        }
        for (key, value) in given {
            if let Some(value) = value.filter(is_given) {
                self.variables.insert(key.to_owned(), value);
            }
        }
    }

    /// Sets `reasoning_effort`, which also enables or disables thinking in templates that support the switch.
    fn set_effort(&mut self, effort: Option<Value>) {
        let Some(effort) = effort.filter(|e| !e.is_none()) else { return };
        let thinks = effort.as_str() != Some("none");
        self.variables.entry("enable_thinking".to_owned()).or_insert_with(|| Value::from(thinks));
        self.set_variables(None, [("reasoning_effort", Some(effort))]);
    }
}

fn is_given(value: &Value) -> bool {
    !value.is_none() && value.as_str() != Some("auto")
}

impl ChatMessage {
    fn new(role: &str) -> Self {
        Self { role: Value::from(role), ..Self::default() }
    }

    /// Returns the message with one text, or none.
    fn saying(self, text: Option<Value>) -> Self {
        Self { content: text.map(|text| smallvec![text]), ..self }
    }

    fn is_assistant(&self) -> bool {
        self.role.as_str() == Some("assistant")
    }

    fn more(&mut self) -> &mut More {
        self.more.get_or_insert_default()
    }

    /// Returns the message in the form that the template receives.
    fn into_value(self, template: &ChatTemplate, work: &WorkLimit) -> Result<Value, RenderError> {
        let role = match self.role.as_str() {
            Some("developer") if !template.knows_developer() => Value::from("system"),
            _ => self.role,
        };
        let is = |name: &str| role.as_str() == Some(name);
        let content = self.content.unwrap_or_default();
        let content = match template.content_format() {
            ContentFormat::Parts if !is("tool") => {
                let parts: Result<Vec<Value>, _> = content.into_iter().map(|text| text_part(text, work)).collect();
                list(parts?)
            }
            // Empty parts are dropped when they are joined. They stay where the template gets parts, and where a
            // tool's parts are joined afterwards.
            ContentFormat::Parts => join(content.iter(), work)?,
            ContentFormat::Text => join(content.iter().filter(|t| t.as_str() != Some("")), work)?,
        };
        let more = self.more.map(|more| *more).unwrap_or_default();
        let mut out = vec![("role", role.clone()), ("content", content)];
        let mut add = |key, value: Option<Value>| out.extend(value.map(|v| (key, v)));
        if is("assistant") {
            let calls: Result<Vec<Value>, _> = more.calls.iter().map(|call| parse_call(call, work)).collect();
            add("tool_calls", Some(calls?).filter(|calls| !calls.is_empty()).map(list));
            add("reasoning", more.reasoning.clone());
            add("reasoning_content", more.reasoning);
        } else if is("tool") {
            add("tool_call_id", more.tool_call_id);
        }
        let is_text = |v: &Value| v.is_text();
        add("name", more.name.filter(is_text));
        add("task", more.task.filter(is_text));
        if is("developer") {
            add("tools", Some(more.tools.unwrap_or(Value::None)));
        }
        Ok(KnownFields::value(out, work)?)
    }
}

/// Returns the texts of a message's content, in order.
fn texts(content: &Value) -> Result<Texts, RenderError> {
    match content {
        content if content.is_text() => Ok(smallvec![content.clone()]),
        Value::None | Value::Undefined => Ok(Texts::new()),
        content if content.is_list() => items(content).filter_map(|part| part_text(&part).transpose()).collect(),
        _ => Err(body_error("a chat request", "content must be a string or an array of parts")),
    }
}

/// Returns the text of one content part, or `None` where it counts as absent.
fn part_text(part: &Value) -> Result<Option<Value>, RenderError> {
    if part.is_text() {
        return Ok(Some(part.clone()));
    }
    let kind = get(part, "type");
    let key = match kind.as_ref().and_then(Value::as_str) {
        Some("text" | "input_text" | "output_text") => "text",
        Some("refusal") => "refusal",
        Some("thinking") => "thinking",
        Some(kind) => {
            return Err(media(kind).map_or(RenderError::Unsupported("this type of part"), RenderError::NotText));
        }
        None => return Err(RenderError::Unsupported("a part without a type")),
    };
    match get(part, key) {
        Some(text) if text.is_text() => Ok(Some(text)),
        Some(_) => Err(body_error("a chat request", "the text of a part must be a string")),
        None => Ok(None),
    }
}

/// Returns the media type of a part of this type.
fn media(kind: &str) -> Option<MediaKind> {
    Some(match kind {
        "image" | "image_url" | "input_image" | "image_embeds" | "image_pil" => MediaKind::Image,
        "audio" | "audio_url" | "input_audio" | "audio_embeds" => MediaKind::Audio,
        "video" | "video_url" | "input_video" => MediaKind::Video,
        "file" | "input_file" | "document" => MediaKind::Document,
        _ => return None,
    })
}

/// Marks the end of the last message's text; returns the text without the mark.
fn mark_end(messages: &mut [Value], work: &WorkLimit) -> Result<String, RenderError> {
    let nothing = || body_error("a chat request", "there is no text in the last message to continue");
    let last = messages.last_mut().ok_or_else(nothing)?;
    let content = get(last, "content").ok_or_else(nothing)?;
    if let Some(text) = content.as_str() {
        *last = with(last, "content", Value::from(format!("{text}{CONTINUE_TAG}")));
        return Ok(text.to_owned());
    }
    let mut parts: Vec<Value> = items(&content).collect();
    let part = parts.last_mut().ok_or_else(nothing)?;
    let text = get(part, "text").ok_or_else(nothing)?;
    let text = text.as_str().unwrap_or_default().to_owned();
    *part = text_part(Value::from(format!("{text}{CONTINUE_TAG}")), work)?;
    *last = with(last, "content", list(parts));
    Ok(text)
}

/// Returns the prompt up to the mark.
fn cut_at_mark(mut text: String, last: &str) -> Result<String, RenderError> {
    let lost = || TemplateError::Failed("it does not render the message that is to be continued".to_owned());
    let mark =
        text.rfind(CONTINUE_TAG.trim_end()).filter(|_| text.contains(attache_jinja::strip(last))).ok_or_else(lost)?;
    let kept_space = text.get(mark..).is_some_and(|t| t.starts_with(CONTINUE_TAG));
    text.truncate(mark);
    if !kept_space {
        // The template strips messages, so the end of this one is stripped too.
        text.truncate(attache_jinja::strip_end(&text).len());
    }
    Ok(text)
}

fn body_error(what: &'static str, reason: &str) -> RenderError {
    RenderError::Body { what, reason: reason.to_owned() }
}

/// Parses a body in the form of one of the APIs.
fn read_json<'a, T: Deserialize<'a>>(what: &'static str, body: &'a [u8]) -> Result<T, RenderError> {
    serde_json::from_slice(body).map_err(|error| json_error(what, &error))
}

/// The error names a position and never quotes the body.
fn json_error(what: &'static str, error: &serde_json::Error) -> RenderError {
    let reason = format!("{:?} error at line {} column {}", error.classify(), error.line(), error.column());
    RenderError::Body { what, reason: reason.to_lowercase() }
}

fn list(values: impl IntoIterator<Item = Value>) -> Value {
    Value::list(values.into_iter().collect::<Vec<_>>()).unwrap_or_default()
}

fn text_part(text: Value, work: &WorkLimit) -> Result<Value, RenderError> {
    Ok(KnownFields::value(vec![("type", Value::from("text")), ("text", text)], work)?)
}

fn join<'a>(texts: impl Iterator<Item = &'a Value>, work: &WorkLimit) -> Result<Value, RenderError> {
    let texts: SmallVec<[&Value; 4]> = texts.collect();
    match texts.as_slice() {
        // The common case costs no copy.
        [one] => Ok((*one).clone()),
        _ => {
            let texts: Vec<&str> = texts.iter().filter_map(|t| t.as_str()).collect();
            work.charge(texts.iter().map(|text| text.len() + 1).sum())?;
            Ok(Value::from(texts.join("\n")))
        }
    }
}

/// Calls `on` with each element of a JSON array, one after the other, so that they are never in memory together.
fn each<'a, T: Deserialize<'a>>(
    what: &'static str,
    array: &'a RawValue,
    on: impl FnMut(T) -> Result<(), RenderError>,
) -> Result<(), RenderError> {
    struct Elements<T, F> {
        on: F,
        failed: Option<RenderError>,
        element: PhantomData<T>,
    }

    impl<'de, T: Deserialize<'de>, F: FnMut(T) -> Result<(), RenderError>> Visitor<'de> for &mut Elements<T, F> {
        type Value = ();

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an array")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<(), A::Error> {
            while let Some(element) = seq.next_element()? {
                if let Err(error) = (self.on)(element) {
                    self.failed = Some(error);
                    return Err(serde::de::Error::custom("refused"));
                }
            }
            Ok(())
        }
    }

    let mut elements = Elements { on, failed: None, element: PhantomData };
    let done =
        serde::Deserializer::deserialize_seq(&mut serde_json::Deserializer::from_str(array.get()), &mut elements);
    done.map_err(|error| elements.failed.unwrap_or_else(|| json_error(what, &error)))
}

/// Returns the value of `key` in a JSON object; `None` also for null.
fn get(object: &Value, key: &str) -> Option<Value> {
    object.get(key).filter(|v| !v.is_none() && !v.is_undefined()).cloned()
}

fn items(list: &Value) -> impl Iterator<Item = Value> {
    list.items().into_iter().flatten().cloned()
}

fn pairs(object: &Value) -> impl Iterator<Item = (Value, Value)> {
    object.as_dict().into_iter().flat_map(|dict| dict.iter()).map(|(key, value)| (key.clone(), value.clone()))
}

/// Returns the object with one value set; an existing key keeps its position.
fn with(object: &Value, key: &str, value: Value) -> Value {
    dict(pairs(object).chain([(Value::from(key), value)]))
}

/// A dictionary. Requests are not nested too deeply for values.
fn dict<K: Into<Value>>(entries: impl IntoIterator<Item = (K, Value)>) -> Value {
    Value::dict(entries).unwrap_or_default()
}

#[cfg(test)]
mod tests;
