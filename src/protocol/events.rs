//! Parser of server-sent events in chunks of any size: the data and the name of each event, and its end.
//!
//! Lines end with LF, CRLF or CR, mixed as the server likes, and a byte order mark may precede the first one. The
//! `data:` lines of one event belong together; comments and other fields are skipped. An event with one line of data in
//! one chunk, as model servers send it, is delivered whole.
//!
//! Called by [`super::documents`] and by the load generator. Imports nothing of the crate.

use memchr::memchr2;

const DATA: &[u8] = b"data:";
const NAME: &[u8] = b"event:";
/// The byte order mark of UTF-8, which decoders of event streams remove.
const BYTE_ORDER_MARK: &[u8] = b"\xEF\xBB\xBF";

/// A part of an event stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventPart<'c> {
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
    /// At the start of the stream, where this many bytes match the byte order mark.
    Mark(usize),
    Start,
    /// This many bytes match the name of this field.
    Field(&'static [u8], usize),
    Data,
    Name,
    Skip,
}

/// Splits a stream into events.
#[derive(Clone, Copy, Debug)]
pub struct EventLines {
    line: LinePosition,
    /// Whether the event has data already.
    has_data: bool,
    /// The last byte was a carriage return: a line feed after it belongs to the same line end.
    returned: bool,
}

impl Default for EventLines {
    fn default() -> Self {
        Self { line: LinePosition::Mark(0), has_data: false, returned: false }
    }
}

impl EventLines {
    /// Processes the next bytes of the stream and passes their parts to `on`.
    pub fn push(&mut self, chunk: &[u8], mut on: impl FnMut(EventPart<'_>)) {
        let Some(last) = chunk.last() else { return };
        let mut rest = if self.returned { chunk.strip_prefix(b"\n").unwrap_or(chunk) } else { chunk };
        self.returned = *last == b'\r';
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

    /// Returns the data of an event that lies completely in `rest` and has one line of data, and what follows it.
    fn whole_event<'c>(&mut self, rest: &'c [u8]) -> Option<(&'c [u8], &'c [u8])> {
        if self.line != LinePosition::Start || self.has_data {
            return None;
        }
        let line = rest.strip_prefix(DATA)?;
        let (data, behind) = line.split_at_checked(memchr2(b'\n', b'\r', line)?)?;
        Some((data, behind_line_end(behind_line_end(behind)?)?))
    }

    fn part<'c>(&mut self, rest: &'c [u8], on: &mut impl FnMut(EventPart<'_>)) -> &'c [u8] {
        let Some((byte, after)) = rest.split_first() else { return rest };
        match self.line {
            LinePosition::Mark(agreed) if BYTE_ORDER_MARK.get(agreed) == Some(byte) => {
                let whole = agreed + 1 == BYTE_ORDER_MARK.len();
                self.line = if whole { LinePosition::Start } else { LinePosition::Mark(agreed + 1) };
                after
            }
            LinePosition::Mark(0) => {
                self.line = LinePosition::Start;
                rest
            }
            LinePosition::Start => {
                if let Some(after) = behind_line_end(rest) {
                    self.has_data = false;
                    on(EventPart::End);
                    return after;
                }
                let field = [DATA, NAME].into_iter().find(|field| field.first() == Some(byte));
                self.line = field.map_or(LinePosition::Skip, |field| LinePosition::Field(field, 0));
                rest
            }
            LinePosition::Field(field, agreed) if field.get(agreed) == Some(byte) => {
                self.line = LinePosition::Field(field, agreed + 1);
                if agreed + 1 == field.len() {
                    self.begin(field == DATA, on);
                }
                after
            }
            LinePosition::Mark(_) | LinePosition::Field(..) => {
                self.line = LinePosition::Skip;
                rest
            }
            LinePosition::Data | LinePosition::Name | LinePosition::Skip => {
                let end = memchr2(b'\n', b'\r', rest);
                let (part, after) = rest.split_at(end.unwrap_or(rest.len()));
                match self.line {
                    LinePosition::Data => on(EventPart::Data(part)),
                    LinePosition::Name => on(EventPart::Name(part)),
                    _ => {}
                }
                if end.is_some() {
                    self.line = LinePosition::Start;
                }
                behind_line_end(after).unwrap_or_default()
            }
        }
    }

    fn begin(&mut self, is_data: bool, on: &mut impl FnMut(EventPart<'_>)) {
        self.line = if is_data { LinePosition::Data } else { LinePosition::Name };
        if is_data {
            self.has_data = true;
            on(EventPart::Line);
        }
    }
}

/// Returns the bytes behind the line end that `bytes` begin with; `None` if they begin with something else.
fn behind_line_end(bytes: &[u8]) -> Option<&[u8]> {
    bytes.strip_prefix(b"\r\n").or_else(|| bytes.strip_prefix(b"\n")).or_else(|| bytes.strip_prefix(b"\r"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The data and the name of each event, lines joined with LF.
    fn events(stream: &[u8], size: usize) -> Vec<(String, String)> {
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
        joined.filter(|event| *event != Default::default()).collect()
    }

    #[test]
    fn events_are_the_same_for_any_chunks_and_line_ends() {
        let stream = "data: {\"a\": \"data:\"}\n\n: comment data:\nevent: x\ndata:{}\n\ndat\ndata\n data: \
         no\ndadata: no\n\n\
                      data: one\ndata: two\nid: 7\n\nevent: y\n\nretry: 1\ndata: [DONE]";
        let expected = [(" {\"a\": \"data:\"}", ""), ("{}", "x"), (" one\n two", ""), ("", "y"), (" [DONE]", "")]
            .map(|(data, name)| (data.to_owned(), name.to_owned()));
        for ends in [&["\n"][..], &["\r\n"], &["\r"], &["\n", "\r\n", "\r"], &["\r", "\r\n"], &["\r\n", "\n"]] {
            let mut ends = ends.iter().cycle();
            let mut text = String::new();
            for line in stream.split('\n') {
                text += line;
                // A line feed after a carriage return would end the same line.
                let end = ends.next().unwrap();
                text += if line.is_empty() && text.ends_with('\r') && *end == "\n" { "\r\n" } else { end };
            }
            for mark in ["", "\u{feff}"] {
                let text = format!("{mark}{text}");
                for size in 1..=text.len() {
                    assert_eq!(events(text.as_bytes(), size), expected, "{text:?} in chunks of {size}");
                }
            }
        }
    }

    #[test]
    fn byte_order_mark_counts_only_at_the_start() {
        for (stream, expected) in [
            ("\u{feff}data:a\n\n", &["a"][..]),
            ("\u{feff}\u{feff}data:a\n\ndata:b\n\n", &["b"]),
            ("data:a\n\n\u{feff}data:b\n\ndata:c\n\n", &["a", "c"]),
        ] {
            for size in 1..=stream.len() {
                let events = events(stream.as_bytes(), size);
                assert_eq!(events.iter().map(|(data, _)| &**data).collect::<Vec<_>>(), expected, "{stream:?}");
            }
        }
        let part_of_a_mark = b"\xEF\xBBdata:a\n\ndata:b\n\n";
        assert_eq!(events(part_of_a_mark, 1), [("b".to_owned(), String::new())]);
    }
}
