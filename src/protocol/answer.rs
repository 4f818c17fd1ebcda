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

mod walk;
mod word;

use super::api::Api;
use super::events::{EventLines, EventPart};
use walk::{Progress, ValueSink, Visitor, Walker};
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
    /// Splits an event stream into events; `None` for a single document.
    events: Option<EventLines>,
    reader: DocumentReader,
}

/// Reads one JSON document after the other.
#[derive(Debug)]
struct DocumentReader {
    position: Position,
    walker: Walker,
    collector: Collector,
}

/// Position in a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    /// Before the first byte of an event's document.
    Before,
    /// Inside the document.
    Inside,
    /// After the document, or in data that is none.
    Behind,
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
        let (events, position) = match format {
            AnswerFormat::Json => (None, Position::Inside),
            AnswerFormat::Events => (Some(EventLines::default()), Position::Behind),
        };
        let collector = Collector::new(shape, max_bytes);
        Some(Self { events, reader: DocumentReader { position, walker: Walker::default(), collector } })
    }

    /// Processes the next bytes of the response, split anywhere.
    pub fn push(&mut self, chunk: &[u8]) {
        let Self { events, reader } = self;
        if reader.collector.stopped.is_some() {
            return;
        }
        let Some(events) = events else {
            reader.walk(chunk);
            return;
        };
        events.push(chunk, |part| match part {
            EventPart::Event(data) => {
                reader.begin();
                reader.value(data);
                reader.end();
            }
            // The lines of one event are joined by line feeds.
            EventPart::Line if reader.position == Position::Inside => reader.walk(b"\n"),
            EventPart::Line => reader.begin(),
            EventPart::Data(data) => reader.value(data),
            EventPart::Name(_) => {}
            EventPart::End => reader.end(),
        });
    }

    /// Returns the text if the response is one plain text. Of an interrupted event stream, returns
    /// the text of complete events.
    #[must_use]
    pub fn finish(&self) -> Option<&str> {
        let DocumentReader { position, collector, .. } = &self.reader;
        if collector.stopped.is_some() || self.events.is_none() && *position != Position::Behind {
            return None;
        }
        let text = collector.text.get(..collector.committed)?;
        std::str::from_utf8(text).ok().filter(|text| !text.is_empty())
    }

    /// Returns the reason for which there is no text, as soon as it is known. Further chunks are
    /// then skipped at no cost.
    #[must_use]
    pub fn stopped(&self) -> Option<Stop> {
        self.reader.collector.stopped
    }
}

impl DocumentReader {
    /// An event begins.
    fn begin(&mut self) {
        self.position = Position::Before;
    }

    /// Processes the next bytes of an event. Only objects are documents; `[DONE]` and similar values are ignored.
    fn value(&mut self, data: &[u8]) {
        let data = if self.position == Position::Before { data.trim_ascii_start() } else { data };
        let Some(first) = data.first() else { return };
        if self.position == Position::Before {
            self.walker = Walker::default();
            self.position = if *first == b'{' { Position::Inside } else { Position::Behind };
        }
        self.walk(data);
    }

    /// The event has ended.
    fn end(&mut self) {
        if self.position == Position::Inside {
            self.collector.stop(Stop::Malformed);
        }
        self.position = Position::Behind;
    }

    fn walk(&mut self, chunk: &[u8]) {
        if self.position != Position::Inside || self.collector.stopped.is_some() {
            return;
        }
        match self.walker.push(chunk, &mut self.collector) {
            Progress::Open => {}
            Progress::Done => self.position = Position::Behind,
            Progress::Broken => self.collector.stop(Stop::Malformed),
        }
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

/// Position in a document.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum TextPosition {
    #[default]
    Elsewhere,
    Root,
    Choices,
    Choice,
    /// The `message` or `delta` of a choice.
    Message,
    ToolCalls,
    /// A part of a message that is not text.
    NotText,
    Items,
    Item,
    Blocks,
    /// A content block or part; in events, the object that has the `type` of a change.
    Block,
}

/// Deepest position: `output[].content[].text` is inside five brackets.
const MAX_PLACES: usize = 6;

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
    depth: usize,
    places: [TextPosition; MAX_PLACES],
    key: Word,
    piece: AnswerUnit,
}

impl Collector {
    fn new(shape: TextLayout, max_bytes: usize) -> Self {
        Self {
            shape,
            max_bytes,
            text: Vec::new(),
            committed: 0,
            blocks: 0,
            stopped: None,
            depth: 0,
            places: [TextPosition::default(); MAX_PLACES],
            key: Word::Other,
            piece: AnswerUnit::default(),
        }
    }

    fn stop(&mut self, why: Stop) {
        if self.stopped.is_none() {
            self.stopped = Some(why);
            self.text = Vec::new();
        }
    }

    /// Returns the innermost position.
    fn place(&self) -> TextPosition {
        self.depth.checked_sub(1).and_then(|at| self.places.get(at)).copied().unwrap_or_default()
    }

    /// Returns the position inside the object or array that begins here.
    fn inner(&self, array: bool) -> TextPosition {
        use TextLayout::*;
        use TextPosition::*;
        if self.depth == 0 {
            return Root;
        }
        match (self.shape, self.place(), self.key, array) {
            (Completions | Chat, Root, Word::Choices, true) => Choices,
            (Completions | Chat, Choices, _, false) => Choice,
            (Chat, Choice, Word::Message | Word::Delta, false) => Message,
            (Chat, Message, Word::ToolCalls, true) => ToolCalls,
            (Chat, Message, Word::FunctionCall | Word::Content, _) | (Chat, ToolCalls, ..) => NotText,
            (TextLayout::Messages, Root, Word::Content, true) | (Responses, Item, Word::Content, true) => Blocks,
            (Responses, Root, Word::Output, true) => Items,
            (Responses, Items, _, false) => Item,
            (TextLayout::Messages | Responses, Blocks, _, false) => Block,
            (MessagesEvents, Root, Word::Delta | Word::ContentBlock, false) => Block,
            (ResponsesEvents, Root, Word::Item | Word::Part, false) => Block,
            _ => Elsewhere,
        }
    }

    /// Whether a unit begins and ends with this position.
    fn holds_piece(&self, place: TextPosition) -> bool {
        match self.shape {
            TextLayout::Completions | TextLayout::Chat => place == TextPosition::Choice,
            TextLayout::Messages | TextLayout::Responses => place == TextPosition::Block,
            TextLayout::MessagesEvents | TextLayout::ResponsesEvents => place == TextPosition::Root,
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
    fn open(&mut self, array: bool) {
        let place = self.inner(array);
        if let Some(slot) = self.places.get_mut(self.depth) {
            *slot = place;
        }
        self.depth += 1;
        self.key = Word::Other;
        if place == TextPosition::NotText {
            self.piece.not_plain = true;
        } else if self.holds_piece(place) {
            self.piece = AnswerUnit::default();
        }
    }

    fn close(&mut self) {
        let place = self.place();
        self.depth = self.depth.saturating_sub(1);
        self.key = Word::Other;
        if self.holds_piece(place) {
            self.end_of_piece();
        }
    }

    fn key(&mut self, key: Word) {
        self.key = key;
    }

    fn string(&mut self) -> ValueSink {
        match (self.shape, self.place(), self.key) {
            (TextLayout::Completions, TextPosition::Choice, Word::Text)
            | (TextLayout::Chat, TextPosition::Message, Word::Content)
            | (
                TextLayout::Messages | TextLayout::MessagesEvents | TextLayout::Responses,
                TextPosition::Block,
                Word::Text,
            )
            | (TextLayout::ResponsesEvents, TextPosition::Root, Word::Delta) => ValueSink::Text,
            (_, TextPosition::Root | TextPosition::Item | TextPosition::Block, Word::Type) => ValueSink::Word,
            _ => ValueSink::Skip,
        }
    }

    fn text(&mut self, part: &[u8]) {
        if self.piece.cut || self.text.len() + part.len() > self.max_bytes {
            self.piece.cut = true;
        } else {
            self.text.extend_from_slice(part);
        }
    }

    fn word(&mut self, word: Word) {
        match self.place() {
            TextPosition::Root => self.piece.kind = word,
            TextPosition::Block => self.piece.block = word,
            // Items of other types are tool calls.
            TextPosition::Item if !matches!(word, Word::Message | Word::Reasoning) => self.stop(Stop::NotPlain),
            _ => {}
        }
    }

    fn scalar(&mut self, zero: bool) {
        if self.place() == TextPosition::Choice && self.key == Word::Index {
            self.piece.other_choice = !zero;
        }
    }
}

#[cfg(test)]
mod tests;
