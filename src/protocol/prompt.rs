//! The prompt of a request: what the server will have to read, in order.

use super::text::Text;
use attache_types::ids::Tokens;
use std::borrow::Cow;

/// Bytes of text per token, for estimates: the mean of English and code with today's vocabularies. Other scripts need
/// more bytes per character and more tokens per character alike.
pub const DEFAULT_BYTES_PER_TOKEN: u64 = 4;
/// Estimated tokens of an image, 1,000: between LLaVA's 576 and the 1,300 of a megapixel in Qwen-VL.
pub(crate) const DEFAULT_IMAGE_TOKENS: u64 = 1_000;
/// Estimated tokens of an audio clip, 750: 30 s at the 25 tokens per second of Qwen-Audio.
pub(crate) const DEFAULT_AUDIO_TOKENS: u64 = 750;
/// Estimated tokens of a video, 4,000: a few dozen frames at reduced size.
pub(crate) const DEFAULT_VIDEO_TOKENS: u64 = 4_000;
/// Estimated tokens of a document, 2,000: some pages of text.
pub(crate) const DEFAULT_DOCUMENT_TOKENS: u64 = 2_000;

/// Tokens of a part of a prompt that can't be read: as many as picker and quotas count for a whole prompt of that kind.
pub(crate) const DEFAULT_OPAQUE_TOKENS: u64 = 1_024;
/// Characters of base64 for one token of embeddings, at least: 512 dimensions of two bytes. Models that generate text
/// have more dimensions, so the true number of tokens is lower; usage that servers report corrects it.
pub(crate) const DEFAULT_BASE64_PER_EMBEDDING: u64 = 1_365;

/// Body bytes for each stored piece of a prompt. A piece takes up to 80 bytes, including its data for the lookup.
pub(crate) const DEFAULT_BYTES_PER_PIECE: usize = 48;
/// Number of pieces that any request may have, for short requests of many small parts.
pub(crate) const DEFAULT_PIECES_HEAD_ROOM: usize = 2_048;

/// Type of media in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MediaKind {
    /// An image in any format.
    Image,
    /// An audio clip.
    Audio,
    /// A video with its frames.
    Video,
    /// A file of text or pages.
    Document,
}

impl MediaKind {
    /// Returns an estimate of the media's tokens; the true number requires the decoded
    /// media and the model's preprocessor.
    #[must_use]
    pub fn estimated_tokens(self) -> u64 {
        match self {
            MediaKind::Image => DEFAULT_IMAGE_TOKENS,
            MediaKind::Audio => DEFAULT_AUDIO_TOKENS,
            MediaKind::Video => DEFAULT_VIDEO_TOKENS,
            MediaKind::Document => DEFAULT_DOCUMENT_TOKENS,
        }
    }
}

/// One piece of a prompt, borrowed from the body where possible.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece<'a> {
    /// A message begins; its role, empty if it has none.
    Role(Cow<'a, str>),
    /// The name of a speaker, or the id of the tool call that a message answers.
    Label(Cow<'a, str>),
    /// Text of a message or prompt.
    Text(Text<'a>),
    /// The URL, data URI, base64 data or file id of media.
    Media {
        /// Type of the media.
        kind: MediaKind,
        /// The reference as the client wrote it.
        reference: Cow<'a, str>,
    },
    /// Tool calls by the model: JSON as the client wrote it.
    ToolCall(&'a str),
    /// Token ids in place of text.
    Tokens(Vec<u32>),
}

/// Settings of a request that change what the chat template renders: JSON as the client wrote it. A setting that is
/// `null` or an empty object is absent.
///
/// `add_generation_prompt` and `continue_final_message` are not among them: they change only what follows the last
/// message. Neither is `tool_choice`: engines leave the tools in the prompt by default, whatever it says.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TemplateSettings<'a> {
    /// A template in place of the model's (`chat_template`).
    pub template: Option<&'a str>,
    /// Variables of the template (`chat_template_kwargs`).
    pub variables: Option<&'a str>,
    /// How much the model should reason: `reasoning_effort`, `reasoning.effort` or `output_config.effort`.
    pub effort: Option<&'a str>,
    /// How media become tokens (`mm_processor_kwargs`). Without media, it changes nothing.
    pub media: Option<&'a str>,
}

impl<'a> TemplateSettings<'a> {
    /// Sets `setting` to the JSON `raw`, if that says anything.
    pub(super) fn set(setting: &mut Option<&'a str>, raw: &'a str) {
        let is_empty = raw == "null" || raw.bytes().all(|b| matches!(b, b'{' | b'}' | b' ' | b'\n' | b'\r' | b'\t'));
        *setting = (!is_empty).then_some(raw);
    }
}

/// The prompt, for estimating its length and hashing its prefix.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt<'a> {
    /// What changes the rendering of the prompt.
    pub settings: TemplateSettings<'a>,
    /// The tools that the model may call: a JSON array as the client wrote it.
    pub tools: Option<&'a str>,
    /// The documents that a chat template inserts into the prompt: a JSON array as the client wrote it.
    pub documents: Option<&'a str>,
    /// The system prompt, where the API separates it from the messages (`system`, `instructions`).
    pub system: Vec<Piece<'a>>,
    /// The first prompt of the request, in the order of the body: its prefix may be cached. For a rerank or score
    /// request, the first text of each side.
    pub pieces: Vec<Piece<'a>>,
    /// Bytes of text (UTF-8, unescaped) of all prompts together.
    pub text_bytes: u64,
    /// Number of token ids in all prompts together, if the client sent ids in place of text.
    pub token_ids: u64,
    /// Estimated tokens of all media together.
    pub media_tokens: u64,
    /// Number of prompts in the request; 0 when none could be read.
    pub count: u32,
    /// Id of the first tool call whose result the conversation has. A server made it, and each later turn has it again.
    pub first_tool_call: Option<Cow<'a, str>>,
    /// Whether the first prompt, or the system prompt, has more pieces than are stored (`DEFAULT_BYTES_PER_PIECE`).
    pub is_cut: bool,
}

impl Prompt<'_> {
    /// Whether it is one text or one list of token ids without messages.
    #[must_use]
    pub fn is_bare(&self) -> bool {
        let bare = matches!(self.pieces.as_slice(), [Piece::Text(_) | Piece::Tokens(_)]);
        bare && self.system.is_empty() && self.tools.is_none() && self.documents.is_none()
    }

    /// Whether it has media.
    #[must_use]
    pub fn has_media(&self) -> bool {
        self.system.iter().chain(&self.pieces).any(|piece| matches!(piece, Piece::Media { .. }))
    }

    /// Whether the client sent only token ids.
    #[must_use]
    pub fn is_token_ids(&self) -> bool {
        self.token_ids > 0 && self.text_bytes == 0 && self.media_tokens == 0
    }

    /// Estimates the tokens that the server will read for all prompts: exact for token ids, [`DEFAULT_BYTES_PER_TOKEN`]
    /// for text and a fixed number for each of the media. Tokens of the chat template are not counted.
    #[must_use]
    pub fn estimated_tokens(&self) -> Tokens {
        let total = self
            .text_bytes
            .div_ceil(DEFAULT_BYTES_PER_TOKEN)
            .saturating_add(self.token_ids)
            .saturating_add(self.media_tokens);
        Tokens(u32::try_from(total).unwrap_or(u32::MAX))
    }
}

/// Token ids of one prompt, which are only counted unless they are part of the first prompt.
#[derive(Debug)]
pub(super) struct TokenIds {
    kept: Vec<u32>,
    count: u64,
    keeps: bool,
}

impl From<Vec<u32>> for TokenIds {
    fn from(kept: Vec<u32>) -> Self {
        Self { count: kept.len() as u64, kept, keeps: true }
    }
}

impl TokenIds {
    pub(super) fn push(&mut self, id: u32) {
        self.count += 1;
        if self.keeps {
            self.kept.push(id);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Builds a prompt: sums all sizes, and stores the pieces of the first prompt only.
#[derive(Debug)]
pub(super) struct Builder<'a> {
    pub(super) prompt: Prompt<'a>,
    keep: bool,
    /// Number of pieces that may be stored.
    max_pieces: usize,
    /// Whether a part of the prompt was counted and can't be keyed.
    pub(super) is_opaque: bool,
}

impl<'a> Builder<'a> {
    /// Creates the builder for a body of this many bytes.
    pub(super) fn new(body_bytes: usize) -> Self {
        let max_pieces = body_bytes / DEFAULT_BYTES_PER_PIECE + DEFAULT_PIECES_HEAD_ROOM;
        Self { prompt: Prompt::default(), keep: true, max_pieces, is_opaque: false }
    }

    /// Marks the end of one prompt: what follows is counted and not stored.
    pub(super) fn end_of_prompt(&mut self) {
        self.prompt.count = self.prompt.count.saturating_add(1);
        self.keep = false;
    }

    /// Sets whether what follows is stored or only counted.
    pub(super) fn keep(&mut self, keep: bool) {
        self.keep = keep;
    }

    /// Reads the system prompt, which belongs to every prompt and is stored wherever it is in the body.
    pub(super) fn system<T, E>(&mut self, read: impl FnOnce(&mut Builder<'a>) -> Result<T, E>) -> Result<T, E> {
        let mut head = Builder { max_pieces: self.max_pieces, ..Builder::new(0) };
        let out = read(&mut head)?;
        self.prompt.text_bytes = self.prompt.text_bytes.saturating_add(head.prompt.text_bytes);
        self.prompt.media_tokens = self.prompt.media_tokens.saturating_add(head.prompt.media_tokens);
        self.prompt.is_cut |= head.prompt.is_cut;
        self.prompt.system = head.prompt.pieces;
        Ok(out)
    }

    pub(super) fn piece(&mut self, piece: impl FnOnce() -> Piece<'a>) {
        if self.keeps_one_more() {
            self.prompt.pieces.push(piece());
        }
    }

    /// Whether one more piece is stored. If only the limit prevents it, the prompt counts as cut.
    fn keeps_one_more(&mut self) -> bool {
        let is_full = self.prompt.pieces.len() >= self.max_pieces;
        self.prompt.is_cut |= self.keep && is_full;
        self.keep && !is_full
    }

    pub(super) fn text(&mut self, text: Text<'a>) {
        self.add_text_bytes(text.len());
        self.piece(|| Piece::Text(text));
    }

    pub(super) fn add_text_bytes(&mut self, bytes: usize) {
        self.prompt.text_bytes = self.prompt.text_bytes.saturating_add(bytes as u64);
    }

    pub(super) fn tokens(&mut self, ids: TokenIds) {
        self.count_tokens(&ids);
        self.piece(|| Piece::Tokens(ids.kept));
    }

    /// Counts token ids that are not stored.
    pub(super) fn count_tokens(&mut self, ids: &TokenIds) {
        self.prompt.token_ids = self.prompt.token_ids.saturating_add(ids.count);
    }

    /// An empty list of token ids, which keeps them if the prompt does.
    pub(super) fn token_ids(&self) -> TokenIds {
        TokenIds { kept: Vec::new(), count: 0, keeps: self.keep }
    }

    pub(super) fn media(&mut self, kind: MediaKind, reference: impl FnOnce() -> Cow<'a, str>) {
        self.prompt.media_tokens = self.prompt.media_tokens.saturating_add(kind.estimated_tokens());
        self.piece(|| Piece::Media { kind, reference: reference() });
    }

    /// Adds a part that can't be read, of so many tokens.
    pub(super) fn opaque(&mut self, tokens: u64) {
        self.prompt.media_tokens = self.prompt.media_tokens.saturating_add(tokens);
    }

    /// Adds a prompt of embeddings, which gets a response of its own: `base64` characters of a tensor. A tensor that
    /// repeats its values can be long in few bytes, so each counts as [`DEFAULT_OPAQUE_TOKENS`] at least.
    pub(super) fn embedded_prompt(&mut self, base64: usize) {
        self.opaque((base64 as u64).div_ceil(DEFAULT_BASE64_PER_EMBEDDING).max(DEFAULT_OPAQUE_TOKENS));
        self.prompt.count = self.prompt.count.saturating_add(1);
    }

    /// Adds embeddings of media: `json` has the base64 characters of `count` tensors.
    pub(super) fn embedded_media(&mut self, kind: MediaKind, count: u64, json: &'a str) {
        let usual = kind.estimated_tokens().saturating_mul(count);
        self.opaque((json.len() as u64).div_ceil(DEFAULT_BASE64_PER_EMBEDDING).max(usual));
        self.piece(|| Piece::Media { kind, reference: Cow::Borrowed(json) });
    }

    /// Begins a message. Its role may come later in the body: pass the returned index to [`Builder::role`].
    pub(super) fn message(&mut self) -> Option<usize> {
        self.keeps_one_more().then(|| {
            self.prompt.pieces.push(Piece::Role(Cow::Borrowed("")));
            self.prompt.pieces.len() - 1
        })
    }

    pub(super) fn role(&mut self, mark: Option<usize>, role: Cow<'a, str>) {
        if let Some(piece) = mark.and_then(|at| self.prompt.pieces.get_mut(at)) {
            *piece = Piece::Role(role);
        }
    }
}
