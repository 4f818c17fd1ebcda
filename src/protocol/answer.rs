//! The text that a model generated, collected from its answer as it passes: what the client will send back as history in the next
//! turn, and so what the server's KV cache will be asked for.
//!
//! Fed with the same bytes as [`super::UsageScanner`], which only looks for keys: text must be told from reasoning, tool calls and
//! other choices, so this one follows the structure. It keeps nothing but the text.
//!
//! What counts as the text of an answer:
//! - Only of choice 0; the other choices of `n` are other continuations.
//! - Without reasoning: chat templates drop the reasoning of past turns.
//! - Only when it is all there is. Tool calls, refusals and answers of several text blocks come back in a form that the template decides
//!   on, and so they have no text here.
//!
//! Each `data:` line of an event stream is taken for one JSON document, as all servers send them. A completion with `echo` repeats its
//! prompt, which can't be told from the answer: don't collect those.
//!
//! Called by `ext_proc`. Imports nothing but [`Api`].

mod walk;
mod word;

use super::api::Api;
use memchr::memchr;
use walk::{Progress, Sink, Visitor, Walker};
use word::Word;

/// 256 KiB of text, about 64,000 tokens: longer than the longest answers that models give.
pub const DEFAULT_MAX_ANSWER_BYTES: usize = 256 << 10;

/// What the body of an answer is written in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AnswerFormat {
    /// One JSON object.
    Json,
    /// `text/event-stream`.
    Events,
}

/// Why there is no text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// It is longer than allowed.
    TooLong,
    /// Tool calls, a refusal, or more than one block of text.
    NotPlain,
    /// It is not what the API sends.
    Malformed,
}

/// Collects the text of one answer.
#[derive(Debug)]
pub struct AnswerText {
    frame: Frame,
    walker: Walker,
    collector: Collector,
}

/// Where in the body we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Frame {
    /// In the one document.
    Document,
    /// Behind it.
    Ended,
    /// At the start of a line, of which so many bytes agree with `data:`.
    Line(usize),
    /// Between `data:` and its value.
    Value,
    /// In the value.
    Event,
    /// In a line, or the rest of one, that says nothing.
    Skip,
}

const DATA: &[u8] = b"data:";

impl AnswerText {
    /// A collector of at most `max_bytes` of text; `None` when answers of `api` hold none.
    #[must_use]
    pub fn new(api: Api, format: AnswerFormat, max_bytes: usize) -> Option<Self> {
        let shape = match (api, format) {
            (Api::Completions, _) => Shape::Completions,
            (Api::ChatCompletions, _) => Shape::Chat,
            (Api::Messages, AnswerFormat::Json) => Shape::Messages,
            (Api::Messages, AnswerFormat::Events) => Shape::MessagesEvents,
            (Api::Responses, AnswerFormat::Json) => Shape::Responses,
            (Api::Responses, AnswerFormat::Events) => Shape::ResponsesEvents,
            _ => return None,
        };
        let frame = match format {
            AnswerFormat::Json => Frame::Document,
            AnswerFormat::Events => Frame::Line(0),
        };
        Some(Self { frame, walker: Walker::default(), collector: Collector::new(shape, max_bytes) })
    }

    /// Takes the next bytes of the answer, cut anywhere.
    pub fn push(&mut self, chunk: &[u8]) {
        let mut rest = chunk;
        while !rest.is_empty() && self.collector.stopped.is_none() {
            rest = match self.frame {
                Frame::Document => {
                    self.walk(rest, Frame::Ended);
                    return;
                }
                Frame::Ended => return,
                Frame::Line(matched) => self.line_start(rest, matched),
                Frame::Value => self.value_start(rest),
                Frame::Event | Frame::Skip => {
                    let end = memchr(b'\n', rest);
                    let (line, after) = rest.split_at(end.unwrap_or(rest.len()));
                    if self.frame == Frame::Event {
                        self.walk(line, Frame::Skip);
                    }
                    if end.is_some() {
                        self.line_end();
                    }
                    after.get(1..).unwrap_or_default()
                }
            };
        }
    }

    /// The text, when the answer is one plain text; of an event stream that broke off, as far as whole events came.
    #[must_use]
    pub fn finish(&self) -> Option<&str> {
        if self.collector.stopped.is_some() || self.frame == Frame::Document {
            return None;
        }
        let text = self.collector.text.get(..self.collector.committed)?;
        std::str::from_utf8(text).ok().filter(|text| !text.is_empty())
    }

    /// Why there is no text, as soon as that is clear; from then on chunks cost nothing.
    #[must_use]
    pub fn stopped(&self) -> Option<Stop> {
        self.collector.stopped
    }

    fn walk(&mut self, chunk: &[u8], then: Frame) {
        match self.walker.push(chunk, &mut self.collector) {
            Progress::Open => {}
            Progress::Done => self.frame = then,
            Progress::Broken => self.collector.stop(Stop::Malformed),
        }
    }

    fn line_start<'c>(&mut self, chunk: &'c [u8], matched: usize) -> &'c [u8] {
        let wanted = DATA.get(matched..).unwrap_or_default();
        let length = wanted.len().min(chunk.len());
        let (head, rest) = chunk.split_at(length);
        if wanted.starts_with(head) {
            self.frame = if length == wanted.len() { Frame::Value } else { Frame::Line(matched + length) };
            return rest;
        }
        self.frame = Frame::Skip;
        chunk
    }

    /// Only objects are events: `[DONE]` and the like say nothing.
    fn value_start<'c>(&mut self, chunk: &'c [u8]) -> &'c [u8] {
        let Some(at) = chunk.iter().position(|b| *b != b' ') else { return &[] };
        let rest = chunk.get(at..).unwrap_or_default();
        self.frame = Frame::Skip;
        if rest.first() == Some(&b'{') {
            self.walker = Walker::default();
            self.frame = Frame::Event;
        }
        rest
    }

    fn line_end(&mut self) {
        if self.frame == Frame::Event {
            self.collector.stop(Stop::Malformed);
        }
        self.frame = Frame::Line(0);
    }
}

/// Where an API puts its text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
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

/// Where in a document we are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Elsewhere,
    Root,
    Choices,
    Choice,
    /// `message` or `delta` of a choice.
    Message,
    ToolCalls,
    /// Something in a message that is no text.
    NotText,
    Items,
    Item,
    Blocks,
    /// A content block or part; in events, whatever holds the `type` of what happens.
    Block,
}

/// Deepest place: `output[].content[].text` lies in the fifth bracket.
const MAX_PLACES: usize = 6;

/// What is taken or left as a whole, once it is known what it is: a choice, a content block, an event.
#[derive(Clone, Copy, Debug, Default)]
struct Piece {
    /// Its own `type`, if it has one.
    kind: Word,
    /// The `type` of the block in it.
    block: Word,
    /// It belongs to another choice than the first.
    other_choice: bool,
    /// It holds tool calls.
    not_plain: bool,
    /// Not all of its text could be kept.
    cut: bool,
}

/// Takes the text from where the API puts it.
#[derive(Debug)]
struct Collector {
    shape: Shape,
    max_bytes: usize,
    text: Vec<u8>,
    /// Text up to here is the answer's; what follows belongs to a piece that has not ended.
    committed: usize,
    blocks: u32,
    stopped: Option<Stop>,
    depth: usize,
    places: [Place; MAX_PLACES],
    key: Word,
    piece: Piece,
}

impl Collector {
    fn new(shape: Shape, max_bytes: usize) -> Self {
        Self {
            shape,
            max_bytes,
            text: Vec::new(),
            committed: 0,
            blocks: 0,
            stopped: None,
            depth: 0,
            places: [Place::default(); MAX_PLACES],
            key: Word::Other,
            piece: Piece::default(),
        }
    }

    fn stop(&mut self, why: Stop) {
        if self.stopped.is_none() {
            self.stopped = Some(why);
            self.text = Vec::new();
        }
    }

    /// The innermost place.
    fn place(&self) -> Place {
        self.depth.checked_sub(1).and_then(|at| self.places.get(at)).copied().unwrap_or_default()
    }

    /// The place that an object or array is, from where it stands.
    fn inner(&self, array: bool) -> Place {
        use Place::*;
        use Shape::*;
        if self.depth == 0 {
            return Root;
        }
        match (self.shape, self.place(), self.key, array) {
            (Completions | Chat, Root, Word::Choices, true) => Choices,
            (Completions | Chat, Choices, _, false) => Choice,
            (Chat, Choice, Word::Message | Word::Delta, false) => Message,
            (Chat, Message, Word::ToolCalls, true) => ToolCalls,
            (Chat, Message, Word::FunctionCall | Word::Content, _) | (Chat, ToolCalls, ..) => NotText,
            (Shape::Messages, Root, Word::Content, true) | (Responses, Item, Word::Content, true) => Blocks,
            (Responses, Root, Word::Output, true) => Items,
            (Responses, Items, _, false) => Item,
            (Shape::Messages | Responses, Blocks, _, false) => Block,
            (MessagesEvents, Root, Word::Delta | Word::ContentBlock, false) => Block,
            (ResponsesEvents, Root, Word::Item | Word::Part, false) => Block,
            _ => Elsewhere,
        }
    }

    /// Whether a piece begins and ends with this place.
    fn holds_piece(&self, place: Place) -> bool {
        match self.shape {
            Shape::Completions | Shape::Chat => place == Place::Choice,
            Shape::Messages | Shape::Responses => place == Place::Block,
            Shape::MessagesEvents | Shape::ResponsesEvents => place == Place::Root,
        }
    }

    /// What to do with the piece that has ended.
    fn verdict(&self) -> Verdict {
        use Verdict::*;
        let Piece { kind, block, other_choice, not_plain, .. } = self.piece;
        match (self.shape, kind, block) {
            (Shape::Completions | Shape::Chat, ..) if other_choice => Leave,
            (Shape::Completions | Shape::Chat, ..) if not_plain => Refuse,
            (Shape::Completions | Shape::Chat, ..) => Take,
            (Shape::Messages, _, Word::Text) | (Shape::Responses, _, Word::OutputText) => TakeBlock,
            (Shape::Messages, _, Word::Thinking | Word::RedactedThinking) => Leave,
            (Shape::Responses, _, Word::ReasoningText | Word::SummaryText) => Leave,
            (Shape::Messages | Shape::Responses, ..) => Refuse,
            (Shape::MessagesEvents, Word::ContentBlockStart, Word::Text) => TakeBlock,
            (Shape::MessagesEvents, Word::ContentBlockStart, Word::Thinking | Word::RedactedThinking) => Leave,
            (Shape::MessagesEvents, Word::ContentBlockStart, _) => Refuse,
            (Shape::MessagesEvents, Word::ContentBlockDelta, Word::TextDelta) => Take,
            (Shape::ResponsesEvents, Word::OutputTextDelta, _) => Take,
            (Shape::ResponsesEvents, Word::OutputItemAdded, Word::Message | Word::Reasoning) => Leave,
            (Shape::ResponsesEvents, Word::OutputPartAdded, Word::OutputText) => TakeBlock,
            (Shape::ResponsesEvents, Word::OutputPartAdded, Word::ReasoningText | Word::SummaryText) => Leave,
            (Shape::ResponsesEvents, Word::OutputItemAdded | Word::OutputPartAdded, _) => Refuse,
            (Shape::MessagesEvents | Shape::ResponsesEvents, ..) => Leave,
        }
    }

    fn end_of_piece(&mut self) {
        let verdict = self.verdict();
        match verdict {
            Verdict::Refuse => self.stop(Stop::NotPlain),
            Verdict::Leave => self.text.truncate(self.committed),
            Verdict::Take | Verdict::TakeBlock if self.piece.cut => self.stop(Stop::TooLong),
            Verdict::Take | Verdict::TakeBlock => {
                self.committed = self.text.len();
                self.blocks += u32::from(verdict == Verdict::TakeBlock);
                if self.blocks > 1 {
                    self.stop(Stop::NotPlain);
                }
            }
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Take,
    /// The same, and it is a block of its own.
    TakeBlock,
    Leave,
    /// The answer is not plain text.
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
        if place == Place::NotText {
            self.piece.not_plain = true;
        } else if self.holds_piece(place) {
            self.piece = Piece::default();
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

    fn string(&mut self) -> Sink {
        match (self.shape, self.place(), self.key) {
            (Shape::Completions, Place::Choice, Word::Text)
            | (Shape::Chat, Place::Message, Word::Content)
            | (Shape::Messages | Shape::MessagesEvents | Shape::Responses, Place::Block, Word::Text)
            | (Shape::ResponsesEvents, Place::Root, Word::Delta) => Sink::Text,
            (_, Place::Root | Place::Item | Place::Block, Word::Type) => Sink::Word,
            _ => Sink::Skip,
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
            Place::Root => self.piece.kind = word,
            Place::Block => self.piece.block = word,
            // An item of another kind is a call of a tool.
            Place::Item if !matches!(word, Word::Message | Word::Reasoning) => self.stop(Stop::NotPlain),
            _ => {}
        }
    }

    fn scalar(&mut self, zero: bool) {
        if self.place() == Place::Choice && self.key == Word::Index {
            self.piece.other_choice = !zero;
        }
    }
}

#[cfg(test)]
mod tests;
