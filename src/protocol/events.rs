//! The events of a stream, counted as they pass: about as many as the answer has tokens, since servers send each as soon as they have it. The few
//! that begin and end a stream are counted too; a server that sends several tokens at once has more than are counted.
//!
//! Called by [`super::UsageScanner`].

use memchr::memchr;

/// What an event's line begins with.
const DATA: &[u8] = b"data:";

/// Where in a line we are.
#[derive(Clone, Copy, Debug)]
enum Line {
    /// At its start, of which so many bytes agree with `data:`.
    Start(usize),
    /// In the rest of it.
    Rest,
}

/// Counts events.
#[derive(Clone, Copy, Debug)]
pub(super) struct EventCounter {
    line: Line,
    count: u32,
}

impl Default for EventCounter {
    fn default() -> Self {
        Self { line: Line::Start(0), count: 0 }
    }
}

impl EventCounter {
    /// Takes the next bytes of the stream, cut anywhere.
    pub(super) fn push(&mut self, chunk: &[u8]) {
        let mut rest = chunk;
        while let Some((first, after)) = rest.split_first() {
            match self.line {
                Line::Start(matched) if DATA.get(matched) == Some(first) => {
                    let matched = matched + 1;
                    self.line = if matched < DATA.len() { Line::Start(matched) } else { Line::Rest };
                    self.count = self.count.saturating_add(u32::from(matched == DATA.len()));
                    rest = after;
                }
                _ => {
                    let end = memchr(b'\n', rest);
                    self.line = if end.is_some() { Line::Start(0) } else { Line::Rest };
                    rest = end.and_then(|end| rest.get(end + 1..)).unwrap_or_default();
                }
            }
        }
    }

    /// Events so far.
    pub(super) fn count(&self) -> u32 {
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::EventCounter;

    #[test]
    fn events_are_counted_wherever_the_stream_is_cut() {
        let stream = "data: {\"a\": \"data:\"}\n\n: comment data:\r\nevent: x\r\ndata:{}\r\n\r\ndat\ndata\n data: no\ndadata: no\n\ndata: [DONE]";
        for size in 1..=stream.len() {
            let mut events = EventCounter::default();
            stream.as_bytes().chunks(size).for_each(|chunk| events.push(chunk));
            assert_eq!(events.count(), 3, "in chunks of {size}");
        }
    }
}
