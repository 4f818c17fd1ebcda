//! Collects the text that a model generated while the response passes. Clients send it back as history in the next
//! turn, so the server's KV cache will be looked up for it.
//!
//! It reads the same bytes as [`super::UsageScanner`]. That scanner only looks for keys; this one follows the
//! structure, because text must be distinguished from reasoning, tool calls and other choices. Only the text is stored.
//!
//! Text counts under these conditions:
//! - Only text of choice 0; the other choices of `n` are other continuations.
//! - Without reasoning: chat templates drop the reasoning of past turns.
//! - Only if the response has nothing else. Templates render tool calls, refusals and several text blocks in their own
//!   way, so responses with these have no text here.
//!
//! Each event of a stream is one JSON document. A completion with `echo` repeats its prompt, which cannot be
//! distinguished from the response: callers must not collect those.
//!
//! Called by `picker`. Imports nothing but [`Api`] and the parser of event streams.

mod word;

use super::api::Api;
use super::documents::{Documents, EventVisitor};
use super::members::{DEFAULT_MAX_VALUE_BYTES, DocumentState, MemberReader, Visitor, Wanted, unquoted};
use word::Word;

/// Default limit of the text, 256 KiB or about 64,000 tokens: longer than the longest responses of models.
pub const DEFAULT_MAX_ANSWER_BYTES: usize = 256 << 10;

/// Format of a response's body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// The body is one JSON object.
    Json,
    /// The body is `text/event-stream`.
    Events,
}

/// The reason for which a response has no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// The text exceeds the limit.
    TooLong,
    /// The response has tool calls, a refusal, or more than one block of text.
    NotPlain,
    /// The response does not follow its API.
    Malformed,
}

/// Collects the text of one response.
#[derive(Debug)]
pub struct AnswerText {
    documents: Documents<Word>,
    collector: Collector,
}

impl AnswerText {
    /// Creates a collector of at most `max_bytes` of text; `None` when responses of `api` have no text.
    #[must_use]
    pub fn new(api: Api, format: AnswerFormat, max_bytes: usize) -> Option<Self> {
        let shape = match (api, format) {
            (Api::Completions, _) => TextLayout::Completions,
            (Api::ChatCompletions, _) => TextLayout::Chat,
            (Api::Messages, AnswerFormat::Json) => TextLayout::Messages,
            (Api::Messages, AnswerFormat::Events) => TextLayout::MessagesEvents,
            (Api::Responses, AnswerFormat::Json) => TextLayout::Responses,
            (Api::Responses, AnswerFormat::Events) => TextLayout::ResponsesEvents,
            _ => return None,
        };
        let documents = Documents::new(format, MemberReader::new(false, DEFAULT_MAX_VALUE_BYTES));
        Some(Self { documents, collector: Collector::new(shape, max_bytes) })
    }

    /// Processes the next bytes of the response, split anywhere.
    pub fn push(&mut self, chunk: &[u8]) {
        if self.collector.stopped.is_some() {
            return;
        }
        self.documents.push(chunk, &mut self.collector);
        if let Some(DocumentState::Foreign | DocumentState::Broken) = self.documents.only() {
            self.collector.stop(Stop::Malformed);
        }
    }

    /// Returns the text if the response is one plain text. Of an interrupted event stream, returns
    /// the text of complete events.
    #[must_use]
    pub fn finish(&self) -> Option<&str> {
        let collector = &self.collector;
        if collector.stopped.is_some() || self.documents.only().is_some_and(|state| state != DocumentState::Done) {
            return None;
        }
        let text = collector.text.get(..collector.committed)?;
        std::str::from_utf8(text).ok().filter(|text| !text.is_empty())
    }

    /// Returns the reason for which there is no text, as soon as it is known. Further chunks are
    /// then skipped at no cost.
    #[must_use]
    pub fn stopped(&self) -> Option<Stop> {
        self.collector.stopped
    }
}

/// Where an API puts its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextLayout {
    /// `choices[].text`
    Completions,
    /// `choices[].message.content`, `choices[].delta.content`
    Chat,
    /// `content[].text`
    Messages,
    /// `delta.text` of `content_block_delta`
    MessagesEvents,
    /// `output[].content[].text`
    Responses,
    /// `delta` of `response.output_text.delta`
    ResponsesEvents,
}

/// A unit that is taken or dropped as a whole once its type is known: a choice, a content block, an event.
#[derive(Clone, Copy, Debug, Default)]
struct AnswerUnit {
    /// Its own `type`, if it has one.
    kind: Word,
    /// The `type` of the block inside it.
    block: Word,
    /// Whether it belongs to another choice than the first.
    other_choice: bool,
    /// Whether it has tool calls.
    not_plain: bool,
    /// Whether its text exceeded the limit.
    cut: bool,
}

/// Extracts the text from the positions where the API puts it.
#[derive(Debug)]
struct Collector {
    shape: TextLayout,
    max_bytes: usize,
    text: Vec<u8>,
    /// Length of the text that is final; what follows belongs to a unit that has not ended.
    committed: usize,
    blocks: u32,
    stopped: Option<Stop>,
    piece: AnswerUnit,
}

impl Collector {
    fn new(shape: TextLayout, max_bytes: usize) -> Self {
        let (text, piece) = (Vec::new(), AnswerUnit::default());
        Self { shape, max_bytes, text, committed: 0, blocks: 0, stopped: None, piece }
    }

    fn stop(&mut self, why: Stop) {
        if self.stopped.is_none() {
            self.stopped = Some(why);
            self.text = Vec::new();
        }
    }

    /// Whether a unit is the object at this path.
    fn is_piece(&self, path: &[Word]) -> bool {
        match self.shape {
            TextLayout::Completions | TextLayout::Chat => path == [Word::Choices],
            TextLayout::Messages => path == [Word::Content],
            TextLayout::Responses => path == [Word::Output, Word::Content],
            TextLayout::MessagesEvents | TextLayout::ResponsesEvents => path.is_empty(),
        }
    }

    /// Decides what happens with the unit that has ended.
    fn verdict(&self) -> PieceAction {
        use PieceAction::*;
        let AnswerUnit { kind, block, other_choice, not_plain, .. } = self.piece;
        match (self.shape, kind, block) {
            (TextLayout::Completions | TextLayout::Chat, ..) if other_choice => Leave,
            (TextLayout::Completions | TextLayout::Chat, ..) if not_plain => Refuse,
            (TextLayout::Completions | TextLayout::Chat, ..) => Take,
            (TextLayout::Messages, _, Word::Text) | (TextLayout::Responses, _, Word::OutputText) => TakeBlock,
            (TextLayout::Messages, _, Word::Thinking | Word::RedactedThinking) => Leave,
            (TextLayout::Responses, _, Word::ReasoningText | Word::SummaryText) => Leave,
            (TextLayout::Messages | TextLayout::Responses, ..) => Refuse,
            (TextLayout::MessagesEvents, Word::ContentBlockStart, Word::Text) => TakeBlock,
            (TextLayout::MessagesEvents, Word::ContentBlockStart, Word::Thinking | Word::RedactedThinking) => Leave,
            (TextLayout::MessagesEvents, Word::ContentBlockStart, _) => Refuse,
            (TextLayout::MessagesEvents, Word::ContentBlockDelta, Word::TextDelta) => Take,
            (TextLayout::ResponsesEvents, Word::OutputTextDelta, _) => Take,
            (TextLayout::ResponsesEvents, Word::OutputItemAdded, Word::Message | Word::Reasoning) => Leave,
            (TextLayout::ResponsesEvents, Word::OutputPartAdded, Word::OutputText) => TakeBlock,
            (TextLayout::ResponsesEvents, Word::OutputPartAdded, Word::ReasoningText | Word::SummaryText) => Leave,
            (TextLayout::ResponsesEvents, Word::OutputItemAdded | Word::OutputPartAdded, _) => Refuse,
            (TextLayout::MessagesEvents | TextLayout::ResponsesEvents, ..) => Leave,
        }
    }

    fn end_of_piece(&mut self) {
        let verdict = self.verdict();
        match verdict {
            PieceAction::Refuse => self.stop(Stop::NotPlain),
            PieceAction::Leave => self.text.truncate(self.committed),
            PieceAction::Take | PieceAction::TakeBlock if self.piece.cut => self.stop(Stop::TooLong),
            PieceAction::Take | PieceAction::TakeBlock => {
                self.committed = self.text.len();
                self.blocks += u32::from(verdict == PieceAction::TakeBlock);
                if self.blocks > 1 {
                    self.stop(Stop::NotPlain);
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceAction {
    Take,
    /// Keep the text, which is a block of its own.
    TakeBlock,
    Leave,
    /// The response is not plain text.
    Refuse,
}

impl Visitor for Collector {
    type Member = Word;

    fn wants(&mut self, path: &[Word], name: &[u8]) -> Wanted<Word> {
        use TextLayout::{Chat, Completions, Messages, MessagesEvents, Responses, ResponsesEvents};
        if self.stopped.is_some() {
            return Wanted::No;
        }
        let word = Word::of(name);
        match (self.shape, path, word) {
            (Completions | Chat, [], Word::Choices)
            | (Chat, [Word::Choices, Word::Message | Word::Delta], Word::ToolCalls)
            | (Messages, [], Word::Content)
            | (Responses, [], Word::Output)
            | (Responses, [Word::Output], Word::Content) => Wanted::Elements(word),
            (Chat, [Word::Choices], Word::Message | Word::Delta)
            | (Chat, [Word::Choices, Word::Message | Word::Delta], Word::FunctionCall)
            | (MessagesEvents, [], Word::Delta | Word::ContentBlock)
            | (ResponsesEvents, [], Word::Item | Word::Part) => Wanted::Members(word),
            (Completions, [Word::Choices], Word::Text)
            | (Chat, [Word::Choices, Word::Message | Word::Delta], Word::Content)
            | (Messages, [Word::Content], Word::Text)
            | (MessagesEvents, [Word::Delta | Word::ContentBlock], Word::Text)
            | (Responses, [Word::Output, Word::Content], Word::Text)
            | (ResponsesEvents, [], Word::Delta) => Wanted::Text(word),
            (Completions | Chat, [Word::Choices], Word::Index)
            | (Messages | MessagesEvents | Responses | ResponsesEvents, _, Word::Type) => Wanted::Value(word),
            _ => Wanted::No,
        }
    }

    fn begin(&mut self, path: &[Word]) {
        if self.is_piece(path) {
            self.piece = AnswerUnit::default();
        }
        self.piece.not_plain |= matches!(path, [.., Word::ToolCalls | Word::FunctionCall]);
    }

    fn end(&mut self, path: &[Word], _number: usize) {
        if self.is_piece(path) {
            self.end_of_piece();
        }
    }

    fn value(&mut self, path: &[Word], member: Word, value: Option<&[u8]>) {
        let value = value.unwrap_or_default();
        if member == Word::Index {
            self.piece.other_choice = value.iter().any(|digit| *digit != b'0');
            return;
        }
        let kind = Word::of(unquoted(value));
        match (self.shape, path) {
            (TextLayout::MessagesEvents | TextLayout::ResponsesEvents, []) => self.piece.kind = kind,
            // Items of other types are tool calls.
            (TextLayout::Responses, [Word::Output]) if !matches!(kind, Word::Message | Word::Reasoning) => {
                self.stop(Stop::NotPlain);
            }
            (_, []) | (TextLayout::Responses, [Word::Output]) => {}
            _ => self.piece.block = kind,
        }
    }

    fn text(&mut self, part: &[u8]) {
        if self.piece.cut || self.text.len() + part.len() > self.max_bytes {
            self.piece.cut = true;
        } else {
            self.text.extend_from_slice(part);
        }
    }

    fn mistyped(&mut self, _path: &[Word], member: Word, first: u8) {
        // Parts of a message instead of its text, or a call in another form.
        let may_be_text = !matches!(member, Word::Content | Word::FunctionCall) || !matches!(first, b'{' | b'[');
        self.piece.not_plain |= self.shape == TextLayout::Chat && !may_be_text;
    }
}

impl EventVisitor for Collector {
    fn event_ends(&mut self, document: DocumentState) {
        if let DocumentState::Open | DocumentState::Broken = document {
            self.stop(Stop::Malformed);
        }
    }
}

#[cfg(test)]
mod tests;
