//! The canonical stream of a prompt: what of a request decides about its prefix cache, in one order and without ambiguity.
//!
//! Tools come first, then documents, the system prompt and the messages as they stand in the body. Each field begins with its [`Mark`],
//! a byte that occurs in no UTF-8 text, so no content can pose as another field and none runs into the next. There is no length in front:
//! two prompts that begin alike begin with the same bytes, however they go on, and the stream of a conversation's next turn begins with
//! that of this one. Text is taken in the one form that JSON nearly always has it in ([`Text::canonical`]), so that it is hashed where it
//! lies in the body; JSON without the whitespace between its tokens; media by a hash of their reference.
//!
//! Parts that change with every request and stand in no server's cache key ([`Volatile`]) are left out here; the body keeps them.
//! Called by [`characters`](super::characters) and [`blocks`](super::blocks).

use attache_protocol::prompt::{MediaKind, Piece, Prompt};
use attache_protocol::text::Text;
use std::borrow::Cow;
use std::mem;
use xxhash_rust::xxh3::xxh3_128;

/// The billing line that Claude Code sets before the system prompt; its `cch=` changes with every request, and vLLM drops the block too.
pub const DEFAULT_VOLATILE_SYSTEM: &str = "x-anthropic-billing-header:";
/// The reminder of the tokens left that Claude Code adds to a conversation: its opening.
pub const DEFAULT_VOLATILE_MESSAGE_OPEN: &str = "<total_tokens>";
/// The same reminder's end.
pub const DEFAULT_VOLATILE_MESSAGE_CLOSE: &str = "</total_tokens>";

/// What begins here. The bytes are ones that UTF-8 never uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mark {
    /// The tools, JSON.
    Tools = 0xF5,
    /// The documents, JSON.
    Documents = 0xF6,
    /// The system prompt; its pieces follow.
    System = 0xF7,
    /// The messages or the bare prompt; its pieces follow.
    Prompt = 0xF8,
    /// A message; its role.
    Role = 0xF9,
    /// A name or the id of a tool call.
    Label = 0xFA,
    /// Text.
    Text = 0xFB,
    /// Calls of tools, JSON.
    ToolCall = 0xFC,
    /// An image, sound, video or document.
    Media = 0xFD,
    /// Token ids in the middle of text.
    Tokens = 0xFE,
}

impl Mark {
    /// All of them.
    pub const ALL: [Mark; 10] = [
        Mark::Tools,
        Mark::Documents,
        Mark::System,
        Mark::Prompt,
        Mark::Role,
        Mark::Label,
        Mark::Text,
        Mark::ToolCall,
        Mark::Media,
        Mark::Tokens,
    ];

    /// As people may read it: `⟨role⟩`.
    #[must_use]
    pub fn shown(self) -> String {
        format!("⟨{}⟩", format!("{self:?}").to_lowercase())
    }

    /// Its byte in the stream.
    #[must_use]
    pub fn byte(self) -> u8 {
        self as u8
    }

    /// Its id among token ids: the top of the range, where no vocabulary reaches (clients' own ids end at 2³¹).
    #[must_use]
    pub fn id(self) -> u32 {
        0xFFFF_FF00 | u32::from(self.byte())
    }
}

/// A text that is known by how it begins and, where that is not enough, by how it ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// How it begins.
    pub prefix: String,
    /// How it ends, and where: the first time that this stands behind the prefix must be the end. Empty: anything may follow.
    pub suffix: String,
}

impl Pattern {
    fn matches(&self, text: &Text<'_>) -> bool {
        // Nearly no text gets further, and to get here none has to be unescaped.
        if !text.begins_with(&self.prefix) {
            return false;
        }
        let text = text.get();
        let text = text.trim();
        let Some(rest) = text.strip_prefix(self.prefix.as_str()) else { return false };
        self.suffix.is_empty() || rest.find(self.suffix.as_str()).is_some_and(|at| at + self.suffix.len() == rest.len())
    }
}

/// What is left out of keys (never out of the body) because it changes with every request. Whitespace around a text is not looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volatile {
    /// Blocks of the system prompt, where the API keeps it apart from the messages.
    pub system: Vec<Pattern>,
    /// Messages of any role that consist of this text alone.
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
pub(super) enum Body<'p> {
    /// The mark says all.
    Nothing,
    /// A role, a name or an id.
    Name(&'p str),
    /// Text.
    Text(&'p Text<'p>),
    /// JSON, whose whitespace is still in it.
    Json(&'p str),
    /// By its reference.
    Media(MediaKind, &'p str),
    /// Ids.
    Tokens(&'p [u32]),
}

/// One field of the stream.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Field<'p> {
    pub(super) mark: Mark,
    pub(super) body: Body<'p>,
}

impl<'p> Field<'p> {
    fn of(piece: &'p Piece<'_>) -> Self {
        match piece {
            Piece::Role(role) => Self { mark: Mark::Role, body: Body::Name(role) },
            Piece::Label(label) => Self { mark: Mark::Label, body: Body::Name(label) },
            Piece::Text(text) => Self { mark: Mark::Text, body: Body::Text(text) },
            Piece::ToolCall(json) => Self { mark: Mark::ToolCall, body: Body::Json(json) },
            Piece::Media { kind, reference } => Self { mark: Mark::Media, body: Body::Media(*kind, reference) },
            Piece::Tokens(ids) => Self { mark: Mark::Tokens, body: Body::Tokens(ids) },
        }
    }

    /// What stands behind the mark: valid UTF-8 always, borrowed unless it has to be made.
    pub(super) fn content(&self) -> Cow<'p, str> {
        match self.body {
            Body::Nothing => Cow::Borrowed(""),
            Body::Name(name) => Cow::Borrowed(name),
            Body::Text(text) => text.canonical(),
            Body::Json(json) => compact(json),
            Body::Media(kind, reference) => {
                Cow::Owned(format!("{}{:032x}", letter(kind), xxh3_128(reference.as_bytes())))
            }
            Body::Tokens(ids) => Cow::Owned(ids.iter().flat_map(|id| sevens(*id)).map(char::from).collect()),
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

/// A reference as ids that no vocabulary has: its hash in five groups of 31 bits under the top bit, the kind with the first.
pub(super) fn media_ids(kind: MediaKind, reference: &str) -> [u32; 5] {
    let hash = xxh3_128(reference.as_bytes());
    let group = |n: u32| u32::try_from(hash >> (31 * n) & 0x7FFF_FFFF).unwrap_or(0) | 0x8000_0000;
    // The fifth group has four bits of the hash; the letter stands above them.
    [group(0), group(1), group(2), group(3), group(4) | u32::from(letter(kind)) << 8]
}

/// An id in five bytes of seven bits, so that no byte is a mark.
fn sevens(id: u32) -> [u8; 5] {
    [0, 7, 14, 21, 28].map(|shift| (id >> shift & 0x7F) as u8)
}

/// The fields of a prompt in canonical order.
#[derive(Clone, Debug)]
pub struct Pieces<'p> {
    pub(super) fields: Vec<Field<'p>>,
    left_out: u64,
    shape: Shape<'p>,
}

/// Whether a prompt is more than one run of text or ids.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Shape<'p> {
    /// Text and nothing else: what `/v1/completions` is sent.
    Bare(&'p Text<'p>),
    /// Token ids and nothing else.
    Ids(&'p [u32]),
    /// A conversation, or anything else.
    Framed,
}

impl<'p> Pieces<'p> {
    /// Puts the fields of `prompt` in order, without what is volatile. Costs a look at each piece, whatever its length.
    #[must_use]
    pub fn new(prompt: &'p Prompt<'_>, volatile: &Volatile) -> Self {
        let mut out = Self {
            fields: Vec::with_capacity(prompt.pieces.len() + prompt.system.len() + 4),
            left_out: 0,
            shape: Shape::Framed,
        };
        for (mark, json) in [(Mark::Tools, prompt.tools), (Mark::Documents, prompt.documents)] {
            out.fields.extend(json.map(|json| Field { mark, body: Body::Json(json) }));
        }
        out.system(&prompt.system, volatile);
        if let (true, [only]) = (out.fields.is_empty(), prompt.pieces.as_slice()) {
            out.shape = match only {
                Piece::Text(text) => Shape::Bare(text),
                Piece::Tokens(ids) => Shape::Ids(ids),
                _ => Shape::Framed,
            };
        }
        out.fields.push(Field { mark: Mark::Prompt, body: Body::Nothing });
        out.messages(&prompt.pieces, volatile);
        out
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
                self.fields.push(Field { mark: Mark::System, body: Body::Nothing });
            }
            self.fields.push(Field::of(block));
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
                    self.fields.push(Field::of(piece));
                    rest
                }
                [] => return,
            };
        }
    }

    /// Bytes of text that are volatile and stand in no key.
    #[must_use]
    pub fn left_out_bytes(&self) -> u64 {
        self.left_out
    }

    pub(super) fn shape(&self) -> Shape<'p> {
        self.shape
    }

    /// Whether the last field is text, which an answer without a role goes on from.
    pub(super) fn ends_in_text(&self) -> bool {
        self.fields.last().is_some_and(|f| f.mark == Mark::Text)
    }

    /// The whole stream, for tests and for explaining; keys are made without ever putting it together.
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

/// `json` without the whitespace between its tokens; borrowed when there is none.
#[must_use]
pub fn compact(json: &str) -> Cow<'_, str> {
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

/// The place behind the closing quote of the string whose content begins at `at`.
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
