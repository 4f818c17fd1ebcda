//! Parser of server-sent events in chunks of any size: the data and the name of each event, and its end.
//!
//! Lines end with LF or CRLF. The `data:` lines of one event belong together; comments and other fields are skipped. An
//! event with one line of data in one chunk, as model servers send it, is delivered whole.
//!
//! Called by [`super::UsageScanner`]. Imports nothing of the crate.

use memchr::memchr;

const DATA: &[u8] = b"data:";
const NAME: &[u8] = b"event:";

/// A part of an event stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EventPart<'c> {
    /// The single line of data of an event, which ends with it.
    Event(&'c [u8]),
    /// A line of data begins.
    Line,
    /// Bytes of a line of data.
    Data(&'c [u8]),
    /// Bytes of an event's name, including white space around it.
    Name(&'c [u8]),
    /// The event ends here.
    End,
}

/// Position in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LinePosition {
    Start,
    /// After a carriage return at the start of a line.
    Return,
    /// This many bytes match the name of this field.
    Field(&'static [u8], usize),
    Data,
    Name,
    Skip,
}

/// Splits a stream into events.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventLines {
    line: LinePosition,
    /// Whether the event has data already.
    has_data: bool,
    count: u32,
}

impl Default for EventLines {
    fn default() -> Self {
        Self { line: LinePosition::Start, has_data: false, count: 0 }
    }
}

impl EventLines {
    /// Processes the next bytes of the stream and passes their parts to `on`.
    pub(super) fn push(&mut self, chunk: &[u8], mut on: impl FnMut(EventPart<'_>)) {
        let mut rest = chunk;
        while !rest.is_empty() {
            rest = match self.whole_event(rest) {
                Some((data, after)) => {
                    on(EventPart::Event(data));
                    after
                }
                None => self.part(rest, &mut on),
            };
        }
    }

    /// Returns the number of lines with data so far.
    pub(super) fn count(&self) -> u32 {
        self.count
    }

    /// Returns the data of an event that lies completely in `rest` and has one line of data, and what follows it.
    fn whole_event<'c>(&mut self, rest: &'c [u8]) -> Option<(&'c [u8], &'c [u8])> {
        if self.line != LinePosition::Start || self.has_data {
            return None;
        }
        let line = rest.strip_prefix(DATA)?;
        let (data, behind) = line.split_at_checked(memchr(b'\n', line)?)?;
        let after = behind.strip_prefix(b"\n\n").or_else(|| behind.strip_prefix(b"\n\r\n"))?;
        self.count = self.count.saturating_add(1);
        Some((data, after))
    }

    fn part<'c>(&mut self, rest: &'c [u8], on: &mut impl FnMut(EventPart<'_>)) -> &'c [u8] {
        let Some((byte, after)) = rest.split_first() else { return rest };
        match (self.line, byte) {
            (LinePosition::Start | LinePosition::Return, b'\n') => {
                (self.line, self.has_data) = (LinePosition::Start, false);
                on(EventPart::End);
                after
            }
            (LinePosition::Start, b'\r') => {
                self.line = LinePosition::Return;
                after
            }
            (LinePosition::Start, first) => {
                let field = [DATA, NAME].into_iter().find(|field| field.first() == Some(first));
                self.line = field.map_or(LinePosition::Skip, |field| LinePosition::Field(field, 0));
                rest
            }
            (LinePosition::Field(field, agreed), byte) if field.get(agreed) == Some(byte) => {
                self.line = LinePosition::Field(field, agreed + 1);
                if agreed + 1 == field.len() {
                    self.begin(field == DATA, on);
                }
                after
            }
            (LinePosition::Field(..) | LinePosition::Return, _) => {
                self.line = LinePosition::Skip;
                rest
            }
            (LinePosition::Data | LinePosition::Name | LinePosition::Skip, _) => {
                let end = memchr(b'\n', rest);
                let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
                match self.line {
                    LinePosition::Data => on(EventPart::Data(part)),
                    LinePosition::Name => on(EventPart::Name(part)),
                    _ => {}
                }
                if end.is_some() {
                    self.line = LinePosition::Start;
                }
                after.get(1..).unwrap_or_default()
            }
        }
    }

    fn begin(&mut self, is_data: bool, on: &mut impl FnMut(EventPart<'_>)) {
        self.line = if is_data { LinePosition::Data } else { LinePosition::Name };
        if is_data {
            self.has_data = true;
            self.count = self.count.saturating_add(1);
            on(EventPart::Line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data and the name of each event, lines joined with LF.
    fn events(stream: &[u8], size: usize) -> (Vec<(String, String)>, u32) {
        let (mut lines, mut events) = (EventLines::default(), vec![Default::default()]);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        for chunk in stream.chunks(size) {
            lines.push(chunk, |part| {
                let last: &mut (Vec<String>, String) = events.last_mut().unwrap();
                match part {
                    EventPart::Line => last.0.push(String::new()),
                    EventPart::Data(data) => *last.0.last_mut().unwrap() += &text(data),
                    EventPart::Name(name) => last.1 += &text(name),
                    EventPart::Event(data) => {
                        last.0.push(text(data));
                        events.push(Default::default());
                    }
                    EventPart::End => events.push(Default::default()),
                }
            });
        }
        let joined = events.into_iter().map(|(data, name)| (data.join("\n"), name.trim().to_owned()));
        let trimmed = joined.map(|(data, name)| (data.replace('\r', ""), name));
        (trimmed.filter(|event| *event != Default::default()).collect(), lines.count())
    }

    #[test]
    fn events_are_the_same_for_any_chunks() {
        let stream = "data: {\"a\": \"data:\"}\n\n: comment data:\r\nevent: x\r\ndata:{}\r\n\r\ndat\ndata\n data: \
         no\ndadata: no\n\n\
                      data: one\ndata: two\nid: 7\n\nevent: y\n\nretry: 1\ndata: [DONE]";
        let expected = [(" {\"a\": \"data:\"}", ""), ("{}", "x"), (" one\n two", ""), ("", "y"), (" [DONE]", "")]
            .map(|(data, name)| (data.to_owned(), name.to_owned()));
        for size in 1..=stream.len() {
            assert_eq!(events(stream.as_bytes(), size), (expected.to_vec(), 5), "in chunks of {size}");
        }
    }
}
