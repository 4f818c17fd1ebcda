//! The prompt of a request: what the server will have to read, in order.

use super::text::Text;
use attache_types::ids::Tokens;
use std::borrow::Cow;

/// 4 bytes of text to a token: what English and code come to with today's vocabularies; other scripts need more bytes a
/// character and more tokens a character alike.
pub const DEFAULT_BYTES_PER_TOKEN: u64 = 4;
/// 1,000 tokens for an image: between LLaVA's 576 and the 1,300 of a megapixel in Qwen-VL.
pub const DEFAULT_IMAGE_TOKENS: u64 = 1_000;
/// 750 tokens for a sound: 30 s at the 25 tokens a second of Qwen-Audio.
pub const DEFAULT_AUDIO_TOKENS: u64 = 750;
/// 4,000 tokens for a video: a few dozen frames at reduced size.
pub const DEFAULT_VIDEO_TOKENS: u64 = 4_000;
/// 2,000 tokens for a document: some pages of text.
pub const DEFAULT_DOCUMENT_TOKENS: u64 = 2_000;

/// One piece of a prompt is kept for every 48 bytes of the body: with what is made of it to look it up, a piece takes up to 80 bytes.
pub const DEFAULT_BYTES_PER_PIECE: usize = 48;
/// And 2,048 more, which short requests of many small parts have.
pub const DEFAULT_PIECES_HEAD_ROOM: usize = 2_048;

/// What sort of thing a prompt refers to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MediaKind {
    /// A picture.
    Image,
    /// A sound.
    Audio,
    /// A video.
    Video,
    /// A file of text or pages.
    Document,
}

impl MediaKind {
    /// A guess at what it costs, tokens: the true figure needs the decoded media and the model's preprocessor.
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

/// One piece of a prompt, borrowed from the body where that can be.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece<'a> {
    /// A message begins; its role, empty when it has none.
    Role(Cow<'a, str>),
    /// The name of a speaker or the id of the tool call that a message answers.
    Label(Cow<'a, str>),
    /// Text.
    Text(Text<'a>),
    /// The URL, data URI, base64 data or file id of something that is not text.
    Media {
        /// What it is.
        kind: MediaKind,
        /// Where or what it is, as the client wrote it.
        reference: Cow<'a, str>,
    },
    /// Calls of tools by the model: JSON as the client wrote it.
    ToolCall(&'a str),
    /// Token ids in place of text.
    Tokens(Vec<u32>),
}

/// The prompt, for estimating its length and for hashing its beginning.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt<'a> {
    /// The tools that the model may call: a JSON array as the client wrote it.
    pub tools: Option<&'a str>,
    /// The documents that a chat template puts into the prompt: a JSON array as the client wrote it.
    pub documents: Option<&'a str>,
    /// The system prompt, where the API keeps it apart from the messages (`system`, `instructions`).
    pub system: Vec<Piece<'a>>,
    /// The first prompt of the request, in the order of the body: the one whose beginning may lie in a cache. Of a rerank or score
    /// request, the first text of each side.
    pub pieces: Vec<Piece<'a>>,
    /// Bytes of text (UTF-8, unescaped) of all prompts together.
    pub text_bytes: u64,
    /// Token ids of all prompts together, when the client sent ids in place of text.
    pub token_ids: u64,
    /// A guess at the tokens of all media together.
    pub media_tokens: u64,
    /// How many prompts the request holds; 0 when none could be read.
    pub count: u32,
    /// The first prompt, or the system prompt, has more pieces than are kept ([`DEFAULT_BYTES_PER_PIECE`]): only the first ones are here.
    pub is_cut: bool,
}

impl Prompt<'_> {
    /// Whether it is one text or one list of token ids without any message around it.
    #[must_use]
    pub fn is_bare(&self) -> bool {
        let bare = matches!(self.pieces.as_slice(), [Piece::Text(_) | Piece::Tokens(_)]);
        bare && self.system.is_empty() && self.tools.is_none() && self.documents.is_none()
    }

    /// Whether there is anything but text, calls and ids in it.
    #[must_use]
    pub fn has_media(&self) -> bool {
        self.system.iter().chain(&self.pieces).any(|piece| matches!(piece, Piece::Media { .. }))
    }

    /// Whether the client sent token ids in place of text.
    #[must_use]
    pub fn is_token_ids(&self) -> bool {
        self.token_ids > 0 && self.text_bytes == 0 && self.media_tokens == 0
    }

    /// What the server will have to read for all prompts of the request: exact for token ids, [`DEFAULT_BYTES_PER_TOKEN`] for text
    /// and a fixed guess for each of the media. Template tokens are not counted.
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

/// Puts a prompt together: sums everything, keeps the pieces of the first prompt only.
#[derive(Debug)]
pub(super) struct Builder<'a> {
    pub(super) prompt: Prompt<'a>,
    keep: bool,
    /// Pieces that may be kept.
    max_pieces: usize,
}

impl<'a> Builder<'a> {
    /// Of the prompt in a body of so many bytes.
    pub(super) fn new(body_bytes: usize) -> Self {
        let max_pieces = body_bytes / DEFAULT_BYTES_PER_PIECE + DEFAULT_PIECES_HEAD_ROOM;
        Self { prompt: Prompt::default(), keep: true, max_pieces }
    }

    /// One prompt has ended: what follows is counted, not kept.
    pub(super) fn end_of_prompt(&mut self) {
        self.prompt.count = self.prompt.count.saturating_add(1);
        self.keep = false;
    }

    /// Says whether what follows is kept or only counted.
    pub(super) fn keep(&mut self, keep: bool) {
        self.keep = keep;
    }

    /// Reads the system prompt, which belongs to every prompt and is kept wherever it stands in the body.
    pub(super) fn system<T, E>(&mut self, read: impl FnOnce(&mut Builder<'a>) -> Result<T, E>) -> Result<T, E> {
        let mut head = Builder { prompt: Prompt::default(), keep: true, max_pieces: self.max_pieces };
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

    /// Whether one more piece is to be kept. When only the bound prevents it, the prompt is cut.
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

    pub(super) fn tokens(&mut self, ids: Vec<u32>) {
        self.prompt.token_ids = self.prompt.token_ids.saturating_add(ids.len() as u64);
        self.piece(|| Piece::Tokens(ids));
    }

    pub(super) fn media(&mut self, kind: MediaKind, reference: impl FnOnce() -> Cow<'a, str>) {
        self.prompt.media_tokens = self.prompt.media_tokens.saturating_add(kind.estimated_tokens());
        self.piece(|| Piece::Media { kind, reference: reference() });
    }

    /// A message begins. Its role may come later in the body: hand the mark to [`Builder::role`].
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
