//! The JSON documents of a response: its body, or the data of each event of its stream.
//!
//! Called by all readers of responses. Imports the parser of event streams and the reader of documents.

use super::answer::AnswerFormat;
use super::events::{EventLines, EventPart};
use super::members::{DocumentState, MemberReader, Visitor};

/// Receives the members of documents, and what an event stream has around them.
pub(super) trait EventVisitor: Visitor {
    /// Whether these data of an event may have a wanted member. They are skipped if not.
    fn may_be_in(&mut self, _data: &[u8]) -> bool {
        true
    }
    /// An event with data begins.
    fn event_begins(&mut self) {}
    /// Bytes of the event's name, including white space around it.
    fn event_name(&mut self, _part: &[u8]) {}
    /// An event ends, whose data were read this far.
    fn event_ends(&mut self, _document: DocumentState) {}
}

/// Reads the documents of one response.
#[derive(Debug)]
pub(super) struct Documents<M> {
    /// Splits an event stream into events; `None` for a single document.
    events: Option<EventLines>,
    document: MemberReader<M>,
}

impl<M: Copy + Default> Documents<M> {
    pub(super) fn new(format: AnswerFormat, document: MemberReader<M>) -> Self {
        Self { events: (format == AnswerFormat::Events).then(EventLines::default), document }
    }

    /// How far the only document was read; `None` for an event stream.
    pub(super) fn only(&self) -> Option<DocumentState> {
        self.events.is_none().then(|| self.document.state())
    }

    /// Processes the next bytes of the response, split anywhere.
    pub(super) fn push(&mut self, chunk: &[u8], visitor: &mut impl EventVisitor<Member = M>) {
        let Self { events, document } = self;
        let Some(events) = events else {
            document.push(chunk, visitor);
            return;
        };
        events.push(chunk, |part| match part {
            EventPart::Event(data) => {
                visitor.event_begins();
                document.restart();
                if visitor.may_be_in(data) {
                    document.push(data, visitor);
                }
                visitor.event_ends(document.state());
                document.restart();
            }
            // The lines of one event are joined by line feeds: what is open goes on, and what is broken stays broken.
            EventPart::Line if matches!(document.state(), DocumentState::Open | DocumentState::Broken) => {
                document.push(b"\n", visitor);
            }
            EventPart::Line => {
                visitor.event_begins();
                document.restart();
            }
            EventPart::Data(data) => document.push(data, visitor),
            EventPart::Name(name) => visitor.event_name(name),
            EventPart::End => {
                visitor.event_ends(document.state());
                document.restart();
            }
        });
    }
}
