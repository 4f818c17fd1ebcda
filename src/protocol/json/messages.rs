//! Conversations: OpenAI's messages, items of the Responses API, and Anthropic's messages. They are similar
//! enough for one parser. Message content that a server would reject, but that can be skipped here, is
//! passed on: the server decides.

use super::prompts::{check_prompts, invalid_prompt};
use super::scalars::Name;
use super::walk::{Elements, Skim, ValueShape, ValueType, Walk, Walked};
use crate::prompt::{Builder, MediaKind, Piece};
use crate::text::Text;
use attache_types::error::{Reason, RequestError};
use std::borrow::Cow;

/// The members that matter in a message, an item or a content part.
const NODE: &[&str] = &[
    "type",
    "role",
    "content",
    "text",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "arguments",
    "call_id",
    "output",
    "summary",
    "reasoning",
    "reasoning_content",
    "refusal",
    "thinking",
    "tool_use_id",
    "input",
    "image_url",
    "image_embeds",
    "image",
    "input_audio",
    "audio_url",
    "audio_embeds",
    "video_embeds",
    "prompt_embeds",
    "video_url",
    "file",
    "file_id",
    "file_data",
    "file_url",
    "source",
];

/// The members that matter in an object for media; the first one with a string is the reference.
const MEDIA: &[&str] = &["url", "data", "file_data", "file_id", "file_url", "content"];

/// A list of messages: one conversation.
#[derive(Debug)]
pub(super) struct Conversation<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
}

impl<'de> ValueShape<'de> for Conversation<'_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        match got {
            // Null has the same meaning as absent.
            ValueType::Null => Ok(()),
            _ => Err(invalid_messages(self.field, "an array of at least one message", got.describe())),
        }
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { out, field } = self;
        let mut count = 0u32;
        while walk.element(&mut rest, MessageNode { out: &mut *out, field, message: true })?.is_some() {
            count = count.saturating_add(1);
            let allowed = walk.limits.max_messages;
            if count > allowed {
                let allowed = format!("an array of at most {allowed} messages");
                return Err(invalid_messages(field, &allowed, "more").into());
            }
        }
        if count == 0 {
            let error = invalid_messages(field, "an array of at least one message", "an empty array");
            return Err(error.into());
        }
        out.end_of_prompt();
        Ok(())
    }
}

/// A list of conversations.
#[derive(Debug)]
pub(super) struct Conversations<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
}

impl<'de> ValueShape<'de> for Conversations<'_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        Err(invalid_messages(self.field, "an array of at least one conversation", got.describe()))
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { out, field } = self;
        let mut count = 0u32;
        while walk.element(&mut rest, Conversation { out: &mut *out, field })?.is_some() {
            count = count.saturating_add(1);
            check_prompts(walk.limits, field, count)?;
        }
        if count == 0 {
            let error = invalid_messages(field, "an array of at least one conversation", "an empty array");
            return Err(error.into());
        }
        Ok(())
    }
}

/// The `input` of the Responses API: a string, which is a message of the user, or a list of items, which may be empty.
/// Returns whether it is given.
#[derive(Debug)]
pub(super) struct Items<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
}

impl<'de> ValueShape<'de> for Items<'_, 'de> {
    type Out = bool;

    fn other(self, got: ValueType) -> Result<bool, RequestError> {
        match got {
            ValueType::Null => Ok(false),
            _ => Err(invalid_prompt(self.field, "a string or an array of items", got.describe())),
        }
    }

    fn string(self, text: Text<'de>) -> Result<bool, RequestError> {
        self.out.piece(|| Piece::Role(Cow::Borrowed("user")));
        self.out.text(text);
        self.out.end_of_prompt();
        Ok(true)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, rest: Elements) -> Walked<bool> {
        if walk.is_at(b']') {
            walk.element(&mut { rest }, Skim)?;
        } else {
            Conversation { out: self.out, field: self.field }.array(walk, rest)?;
        }
        Ok(true)
    }
}

/// One message, item or content part.
#[derive(Debug)]
pub(super) struct MessageNode<'p, 'de> {
    out: &'p mut Builder<'de>,
    field: &'static str,
    message: bool,
}

impl<'p, 'de> MessageNode<'p, 'de> {
    /// A content part, which has no role.
    pub(super) fn part(out: &'p mut Builder<'de>, field: &'static str) -> Self {
        Self { out, field, message: false }
    }
}

impl<'de> ValueShape<'de> for MessageNode<'_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        let allowed = if self.message { "an array of objects" } else { "made of strings and objects" };
        Err(invalid_messages(self.field, allowed, got.describe()))
    }

    fn string(self, text: Text<'de>) -> Result<(), RequestError> {
        if self.message {
            return self.other(ValueType::String);
        }
        self.out.text(text);
        Ok(())
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<()> {
        let Self { out, field, message } = self;
        let mark = if message { out.message() } else { None };
        // The `type` of a part may come before or after its `source` or `file`.
        let mut document = false;
        walk.fields(NODE, |walk, name| {
            match name {
                "type" => document |= walk.value(Name)?.as_deref() == Some("document"),
                "role" => {
                    if let Some(role) = walk.value(Name)? {
                        out.role(mark, role);
                    }
                }
                "content" => walk.value(Content { out: &mut *out, field })?,
                "text" | "arguments" | "output" | "summary" | "reasoning" | "reasoning_content" | "refusal"
                | "thinking" => walk.value(Loose { out: &mut *out, field })?,
                "name" | "tool_call_id" | "call_id" | "tool_use_id" => {
                    if let Some(label) = walk.value(Name)? {
                        if name != "name" && out.prompt.first_tool_call.is_none() {
                            out.prompt.first_tool_call = Some(label.clone());
                        }
                        out.add_text_bytes(label.len());
                        out.piece(|| Piece::Label(label));
                    }
                }
                "tool_calls" | "function_call" | "input" => {
                    let raw = walk.raw(name)?;
                    if raw != "null" {
                        out.add_text_bytes(raw.len());
                        out.piece(|| Piece::ToolCall(raw));
                    }
                }
                "image_embeds" | "audio_embeds" | "video_embeds" | "prompt_embeds" => {
                    let (raw, kind) = (walk.raw(name)?, media_kind(name, document));
                    if raw != "null" {
                        // A list has base64 strings only, which need no escapes.
                        let listed = raw.starts_with('[').then(|| raw.bytes().filter(|byte| *byte == b'"').count() / 2);
                        out.embedded_media(kind, listed.map_or(1, |count| count as u64), raw);
                    }
                }
                _ => {
                    let kind = media_kind(name, document);
                    if let Some(reference) = walk.value(Media)? {
                        out.media(kind, || reference);
                    }
                }
            }
            Ok(())
        })
    }
}

fn media_kind(field: &str, document: bool) -> MediaKind {
    match field {
        "input_audio" | "audio_url" | "audio_embeds" => MediaKind::Audio,
        "video_url" | "video_embeds" => MediaKind::Video,
        "file" | "file_id" | "file_data" | "file_url" => MediaKind::Document,
        _ if document => MediaKind::Document,
        _ => MediaKind::Image,
    }
}

/// The content of a message: a string, parts, or null.
#[derive(Debug)]
pub(super) struct Content<'p, 'de> {
    pub(super) out: &'p mut Builder<'de>,
    pub(super) field: &'static str,
}

impl<'de> ValueShape<'de> for Content<'_, 'de> {
    type Out = ();

    fn other(self, got: ValueType) -> Result<(), RequestError> {
        match got {
            ValueType::Null => Ok(()),
            _ => Err(invalid_messages(
                self.field,
                "made of messages whose content is a string, parts or null",
                got.describe(),
            )),
        }
    }

    fn string(self, text: Text<'de>) -> Result<(), RequestError> {
        self.out.text(text);
        Ok(())
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<()> {
        MessageNode::part(self.out, self.field).object(walk)
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { out, field } = self;
        while walk.element(&mut rest, MessageNode::part(&mut *out, field))?.is_some() {}
        Ok(())
    }
}

/// As [`Content`], for members that only some servers know: the server decides about values that
/// are neither text nor parts.
struct Loose<'p, 'de> {
    out: &'p mut Builder<'de>,
    field: &'static str,
}

impl<'de> ValueShape<'de> for Loose<'_, 'de> {
    type Out = ();

    fn other(self, _got: ValueType) -> Result<(), RequestError> {
        Ok(())
    }

    fn string(self, text: Text<'de>) -> Result<(), RequestError> {
        self.out.text(text);
        Ok(())
    }

    fn array(self, walk: &mut Walk<'_, 'de>, mut rest: Elements) -> Walked<()> {
        let Self { out, field } = self;
        while walk.element(&mut rest, LoosePart { out: &mut *out, field })?.is_some() {}
        Ok(())
    }
}

/// A part in a [`Loose`] list.
struct LoosePart<'p, 'de> {
    out: &'p mut Builder<'de>,
    field: &'static str,
}

impl<'de> ValueShape<'de> for LoosePart<'_, 'de> {
    type Out = ();

    fn other(self, _got: ValueType) -> Result<(), RequestError> {
        Ok(())
    }

    fn string(self, text: Text<'de>) -> Result<(), RequestError> {
        self.out.text(text);
        Ok(())
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<()> {
        MessageNode::part(self.out, self.field).object(walk)
    }
}

/// A URL, data or an id, as a string or in an object. It is borrowed, so that data URIs of any size cost nothing,
/// unless the client escaped characters in it (some write `\/` for `/`).
#[derive(Clone, Copy, Debug)]
struct Media;

impl<'de> ValueShape<'de> for Media {
    type Out = Option<Cow<'de, str>>;

    fn other(self, got: ValueType) -> Result<Self::Out, RequestError> {
        // An array or a number has an unknown meaning, but it counts as present.
        Ok((got != ValueType::Null).then_some(Cow::Borrowed("")))
    }

    fn string(self, text: Text<'de>) -> Result<Self::Out, RequestError> {
        Ok(Some(text.into_cow()))
    }

    fn object(self, walk: &mut Walk<'_, 'de>) -> Walked<Self::Out> {
        let mut reference = None;
        walk.fields(MEDIA, |walk, _| {
            if reference.is_none() {
                reference = walk.value(Name)?;
            } else {
                walk.value(Skim)?;
            }
            Ok(())
        })?;
        Ok(Some(reference.unwrap_or_default()))
    }
}

fn invalid_messages(field: &'static str, allowed: &str, got: &str) -> RequestError {
    RequestError::new(Reason::InvalidMessages, format!("`{field}` must be {allowed}, got {got}")).param(field)
}
