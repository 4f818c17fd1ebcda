//! The canonical stream of a prompt: the parts of a request that determine its prefix cache, in a
//! fixed order and without ambiguity.
//!
//! Settings of the chat template come first, then tools, documents, and the messages in the order of the body. A system
//! prompt that the API separates is the first message, as engines make it one. Each field begins with its [`Mark`], a byte that never occurs in UTF-8 text, so no content can imitate another field. There are no
//! length prefixes: prompts with a common prefix have streams with a common prefix, and the stream of a conversation's
//! next turn begins with that of this one. Text has its canonical JSON form ([`Text::canonical`]), so that it is
//! usually hashed in place; JSON has no white space between tokens; media are represented by a hash of their reference.
//!
//! Parts that change with every request and are in no server's cache key ([`Volatile`]) are left out of keys; the body
//! keeps them. Called by [`characters`](super::characters) and [`blocks`](super::blocks).

use attache_protocol::prompt::{MediaKind, Piece, Prompt, TemplateSettings};
use attache_protocol::text::Text;
use std::borrow::Cow;
use std::mem;
use xxhash_rust::xxh3::xxh3_128;

/// Start of the billing line that Claude Code puts before the system prompt. Its `cch=` changes with every request, and
/// vLLM drops the block too.
pub(crate) const DEFAULT_VOLATILE_SYSTEM: &str = "x-anthropic-billing-header:";
/// Start of the message about remaining tokens that Claude Code adds to a conversation.
pub(crate) const DEFAULT_VOLATILE_MESSAGE_OPEN: &str = "<total_tokens>";
/// End of the message about remaining tokens that Claude Code adds.
pub(crate) const DEFAULT_VOLATILE_MESSAGE_CLOSE: &str = "</total_tokens>";

/// Role of a system prompt that the API separates from the messages.
const SYSTEM: &str = "system";

/// The type of the field that begins here. UTF-8 never uses these bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mark {
    /// A setting that changes what the chat template renders: its name, and its value as JSON.
    Setting = 0xF5,
    /// The tools as JSON follow.
    Tools = 0xF6,
    /// The documents as JSON follow.
    Documents = 0xF7,
    /// The pieces of the messages or the bare prompt follow.
    Prompt = 0xF8,
    /// A message begins; its role follows.
    Role = 0xF9,
    /// A name, or the id of a tool call.
    Label = 0xFA,
    /// Text of a message or prompt.
    Text = 0xFB,
    /// Tool calls as JSON follow.
    ToolCall = 0xFC,
    /// An image, audio clip, video or document.
    Media = 0xFD,
    /// Token ids between pieces of text.
    Tokens = 0xFE,
}

impl Mark {
    /// All marks, in the order of their bytes.
    pub const ALL: [Mark; 10] = [
        Mark::Setting,
        Mark::Tools,
        Mark::Documents,
        Mark::Prompt,
        Mark::Role,
        Mark::Label,
        Mark::Text,
        Mark::ToolCall,
        Mark::Media,
        Mark::Tokens,
    ];

    /// Returns the name for display: `⟨role⟩`.
    #[must_use]
    pub fn shown(self) -> String {
        format!("⟨{}⟩", format!("{self:?}").to_lowercase())
    }

    /// Returns its byte in the stream.
    #[must_use]
    pub fn byte(self) -> u8 {
        self as u8
    }

    /// Returns its id among token ids: at the top of the range, above all vocabularies (clients' own ids end at 2³¹).
    #[must_use]
    pub fn id(self) -> u32 {
        0xFFFF_FF00 | u32::from(self.byte())
    }
}

/// Matches a text by its prefix and, if necessary, its suffix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// How the text begins.
    pub prefix: String,
    /// How the text ends: its first occurrence after the prefix must be at the end. Empty:
    /// anything may follow the prefix.
    pub suffix: String,
}

impl Pattern {
    fn matches(&self, text: &Text<'_>) -> bool {
        // Nearly all texts fail this test, which needs no unescaping.
        if !text.begins_with(&self.prefix) {
            return false;
        }
        let text = text.get();
        let text = text.trim();
        let Some(rest) = text.strip_prefix(self.prefix.as_str()) else { return false };
        self.suffix.is_empty() || rest.find(self.suffix.as_str()).is_some_and(|at| at + self.suffix.len() == rest.len())
    }
}

/// Parts that are left out of keys (never out of the body), because they change with every request. White space
/// around a text is ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volatile {
    /// Patterns of blocks in the system prompt, where the API separates it from the messages.
    pub system: Vec<Pattern>,
    /// Patterns of whole messages, of any role.
    pub messages: Vec<Pattern>,
}

impl Volatile {
    /// Leaves nothing out.
    #[must_use]
    pub fn none() -> Self {
        Self { system: Vec::new(), messages: Vec::new() }
    }
}

impl Default for Volatile {
    fn default() -> Self {
        Self {
            system: vec![Pattern { prefix: DEFAULT_VOLATILE_SYSTEM.to_owned(), suffix: String::new() }],
            messages: vec![Pattern {
                prefix: DEFAULT_VOLATILE_MESSAGE_OPEN.to_owned(),
                suffix: DEFAULT_VOLATILE_MESSAGE_CLOSE.to_owned(),
            }],
        }
    }
}

/// The content of one field.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FieldContent<'p> {
    /// Nothing besides the mark.
    Nothing,
    /// A role, a name or an id.
    Name(&'p str),
    /// Text with its JSON escapes.
    Text(&'p Text<'p>),
    /// JSON including its white space.
    Json(&'p str),
    /// A name, and JSON including its white space.
    Setting(&'static str, &'p str),
    /// Media by their reference.
    Media(MediaKind, &'p str),
    /// Token ids from the client.
    Tokens(&'p [u32]),
}

/// One field of the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct StreamField<'p> {
    pub(super) mark: Mark,
    pub(super) body: FieldContent<'p>,
}

impl<'p> StreamField<'p> {
    fn of(piece: &'p Piece<'_>) -> Self {
        match piece {
            Piece::Role(role) => Self { mark: Mark::Role, body: FieldContent::Name(role) },
            Piece::Label(label) => Self { mark: Mark::Label, body: FieldContent::Name(label) },
            Piece::Text(text) => Self { mark: Mark::Text, body: FieldContent::Text(text) },
            Piece::ToolCall(json) => Self { mark: Mark::ToolCall, body: FieldContent::Json(json) },
            Piece::Media { kind, reference } => Self { mark: Mark::Media, body: FieldContent::Media(*kind, reference) },
            Piece::Tokens(ids) => Self { mark: Mark::Tokens, body: FieldContent::Tokens(ids) },
        }
    }

    /// Returns the content after the mark: always valid UTF-8, borrowed where possible.
    pub(super) fn content(&self) -> Cow<'p, str> {
        match self.body {
            FieldContent::Nothing => Cow::Borrowed(""),
            FieldContent::Name(name) => Cow::Borrowed(name),
            FieldContent::Text(text) => text.canonical(),
            FieldContent::Json(json) => compact(json),
            FieldContent::Setting(name, json) => Cow::Owned([name, &*compact(json)].concat()),
            FieldContent::Media(kind, reference) => {
                Cow::Owned(format!("{}{:032x}", letter(kind), xxh3_128(reference.as_bytes())))
            }
            FieldContent::Tokens(ids) => Cow::Owned(ids.iter().flat_map(|id| sevens(*id)).map(char::from).collect()),
        }
    }
}

fn letter(kind: MediaKind) -> char {
    match kind {
        MediaKind::Image => 'i',
        MediaKind::Audio => 'a',
        MediaKind::Video => 'v',
        MediaKind::Document => 'd',
    }
}

/// Returns a reference as ids that no vocabulary has: its hash in five groups of 31 bits below the top
/// bit, with the media's type.
pub(super) fn media_ids(kind: MediaKind, reference: &str) -> [u32; 5] {
    let hash = xxh3_128(reference.as_bytes());
    let group = |n: u32| u32::try_from(hash >> (31 * n) & 0x7FFF_FFFF).unwrap_or(0) | 0x8000_0000;
    // The fifth group has four bits of the hash; the letter is above them.
    [group(0), group(1), group(2), group(3), group(4) | u32::from(letter(kind)) << 8]
}

/// An id in five bytes of seven bits each, so that no byte is a mark.
fn sevens(id: u32) -> [u8; 5] {
    [0, 7, 14, 21, 28].map(|shift| (id >> shift & 0x7F) as u8)
}

/// The fields of a prompt in canonical order.
#[derive(Clone, Debug)]
pub struct Pieces<'p> {
    pub(super) fields: Vec<StreamField<'p>>,
    left_out: u64,
    shape: PromptForm<'p>,
}

/// Whether a prompt has more than one text or list of ids.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum PromptForm<'p> {
    /// One text, as `/v1/completions` receives it.
    Bare(&'p Text<'p>),
    /// One list of token ids.
    Ids(&'p [u32]),
    /// A conversation, or any other prompt.
    Framed,
}

impl<'p> Pieces<'p> {
    /// Puts the fields of `prompt` in order, without volatile ones. Inspects each piece in constant time.
    #[must_use]
    pub fn new(prompt: &'p Prompt<'_>, volatile: &Volatile) -> Self {
        let mut out = Self {
            fields: Vec::with_capacity(prompt.pieces.len() + prompt.system.len() + 4),
            left_out: 0,
            shape: PromptForm::Framed,
        };
        out.settings(prompt);
        for (mark, json) in [(Mark::Tools, prompt.tools), (Mark::Documents, prompt.documents)] {
            out.fields.extend(json.map(|json| StreamField { mark, body: FieldContent::Json(json) }));
        }
        out.fields.push(StreamField { mark: Mark::Prompt, body: FieldContent::Nothing });
        out.system(&prompt.system, volatile);
        if let ([_], [only]) = (out.fields.as_slice(), prompt.pieces.as_slice()) {
            out.shape = match only {
                Piece::Text(text) => PromptForm::Bare(text),
                Piece::Tokens(ids) => PromptForm::Ids(ids),
                _ => PromptForm::Framed,
            };
        }
        out.messages(&prompt.pieces, volatile);
        out
    }

    fn settings(&mut self, prompt: &'p Prompt<'_>) {
        let TemplateSettings { template, variables, effort, media } = prompt.settings;
        let media = media.filter(|_| prompt.has_media());
        let settings = [
            ("chat_template", template),
            ("chat_template_kwargs", variables),
            ("reasoning_effort", effort),
            ("mm_processor_kwargs", media),
        ];
        for (name, json) in settings {
            let field = |json| StreamField { mark: Mark::Setting, body: FieldContent::Setting(name, json) };
            self.fields.extend(json.map(field));
        }
    }

    fn system(&mut self, blocks: &'p [Piece<'_>], volatile: &Volatile) {
        let mut empty = true;
        for block in blocks {
            if let Piece::Text(text) = block
                && volatile.system.iter().any(|p| p.matches(text))
            {
                self.left_out += text.len() as u64;
                continue;
            }
            if mem::take(&mut empty) {
                self.fields.push(StreamField { mark: Mark::Role, body: FieldContent::Name(SYSTEM) });
            }
            self.fields.push(StreamField::of(block));
        }
    }

    fn messages(&mut self, mut pieces: &'p [Piece<'_>], volatile: &Volatile) {
        loop {
            pieces = match pieces {
                // The role and one text, then the next message or the end.
                [Piece::Role(_), Piece::Text(text), rest @ ..]
                    if matches!(rest.first(), None | Some(Piece::Role(_)))
                        && volatile.messages.iter().any(|p| p.matches(text)) =>
                {
                    self.left_out += text.len() as u64;
                    rest
                }
                [piece, rest @ ..] => {
                    self.fields.push(StreamField::of(piece));
                    rest
                }
                [] => return,
            };
        }
    }

    /// Returns the bytes of volatile text that are in no key.
    #[must_use]
    pub fn left_out_bytes(&self) -> u64 {
        self.left_out
    }

    pub(super) fn shape(&self) -> PromptForm<'p> {
        self.shape
    }

    /// Whether the last field is text, which a response without a role continues.
    pub(super) fn ends_in_text(&self) -> bool {
        self.fields.last().is_some_and(|f| f.mark == Mark::Text)
    }

    /// Returns the whole stream, for tests and display; keys are made without it.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for field in &self.fields {
            out.push(field.mark.byte());
            out.extend_from_slice(field.content().as_bytes());
        }
        out
    }
}

/// Returns `json` without the white space between its tokens; borrowed when there is none.
#[must_use]
pub(crate) fn compact(json: &str) -> Cow<'_, str> {
    let mut out = String::new();
    let mut kept = 0;
    let mut at = 0;
    let bytes = json.as_bytes();
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => at = end_of_string(bytes, at + 1),
            b' ' | b'\n' | b'\r' | b'\t' => {
                out.push_str(json.get(kept..at).unwrap_or_default());
                at += bytes.get(at..).unwrap_or_default().iter().take_while(|b| b" \n\r\t".contains(b)).count();
                kept = at;
            }
            _ => at += 1,
        }
    }
    if kept == 0 {
        return Cow::Borrowed(json);
    }
    out.push_str(json.get(kept..).unwrap_or_default());
    Cow::Owned(out)
}

/// Returns the position after the closing quote of the string whose content begins at `at`.
fn end_of_string(bytes: &[u8], mut at: usize) -> usize {
    while let Some(found) = bytes.get(at..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
        if bytes.get(at + found) == Some(&b'"') {
            return at + found + 1;
        }
        at += found + 2;
    }
    bytes.len()
}

#[cfg(test)]
pub(crate) mod tests;
