//! What an event stream shows of its pace: how many events brought something of the answer, and
//! whether its end was announced.
//!
//! Counts and texts are read elsewhere (`protocol::usage`, `protocol::answer`); here it matters when anything was said
//! at all, reasoning and tool calls included, since a client sees those come too. Called by [`mod@super::exchange`].
//! Pure.

use memchr::memchr2;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// 1 MiB: events are a few hundred bytes; a longer line is not looked at.
const MAX_LINE_BYTES: usize = 1 << 20;

/// Watches a stream go by.
#[derive(Debug, Default)]
pub(super) struct EventWatch {
    /// The line that has not ended.
    line: Vec<u8>,
    /// The rest of a line that is too long is being skipped.
    skip: bool,
    /// Number of events with content: text, reasoning or tool calls.
    pub(super) spoken: u32,
    /// `[DONE]` or a finish reason was seen.
    pub(super) ended: bool,
}

#[derive(Deserialize)]
struct ChunkEvent {
    #[serde(default)]
    choices: Vec<ChunkChoice>,
}

#[derive(Deserialize)]
struct ChunkChoice {
    /// Content of a completion chunk.
    text: Option<String>,
    /// Content of a chat chunk.
    delta: Option<Delta>,
    finish_reason: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct Delta {
    content: Option<String>,
    reasoning: Option<String>,
    /// Reasoning under the older field name.
    reasoning_content: Option<String>,
    tool_calls: Option<Vec<IgnoredAny>>,
}

impl ChunkChoice {
    fn says_something(&self) -> bool {
        let some = |text: &Option<String>| text.as_ref().is_some_and(|text| !text.is_empty());
        some(&self.text)
            || self.delta.as_ref().is_some_and(|delta| {
                [&delta.content, &delta.reasoning, &delta.reasoning_content].into_iter().any(some)
                    || delta.tool_calls.as_ref().is_some_and(|calls| !calls.is_empty())
            })
    }
}

impl EventWatch {
    /// Takes the next bytes of the stream, cut anywhere.
    pub(super) fn push(&mut self, chunk: &[u8]) {
        let mut rest = chunk;
        // A CRLF ends a line and an empty one.
        while let Some(end) = memchr2(b'\n', b'\r', rest) {
            let (head, tail) = rest.split_at(end);
            rest = tail.get(1..).unwrap_or_default();
            if self.line.is_empty() && !self.skip {
                self.take(head);
            } else {
                self.keep(head);
                let line = std::mem::take(&mut self.line);
                if !std::mem::take(&mut self.skip) {
                    self.take(&line);
                }
                self.line = line;
                self.line.clear();
            }
        }
        self.keep(rest);
    }

    /// The stream has ended: its last line may have no end of its own.
    pub(super) fn finish(&mut self) {
        self.push(b"\n");
    }

    fn keep(&mut self, part: &[u8]) {
        if self.line.len() + part.len() > MAX_LINE_BYTES {
            self.skip = true;
            self.line.clear();
        } else if !self.skip {
            self.line.extend_from_slice(part);
        }
    }

    fn take(&mut self, line: &[u8]) {
        let Some(data) = line.strip_prefix(b"data:") else { return };
        let data = data.trim_ascii();
        if data == b"[DONE]" {
            self.ended = true;
        } else if let Ok(event) = serde_json::from_slice::<ChunkEvent>(data) {
            self.spoken += u32::from(event.choices.iter().any(ChunkChoice::says_something));
            self.ended |= event.choices.iter().any(|choice| choice.finish_reason.is_some());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn watched(pieces: &[&[u8]]) -> (u32, bool) {
        let mut events = EventWatch::default();
        pieces.iter().for_each(|piece| events.push(piece));
        events.finish();
        (events.spoken, events.ended)
    }

    const CHAT: &[u8] = b": hello\n\ndata: \
     {\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"reasoning_content\":\"hm\"}}]}\r\n\r\n\
        data:{\"choices\":[{\"delta\":{\"content\":\"a\\nb\"},\"finish_reason\":null}]}\n\n\
        data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]}}]}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3}}\n\ndata: [DONE]";

    #[test]
    fn what_says_something_is_counted_whatever_it_is() {
        assert_eq!(watched(&[CHAT]), (3, true));
        assert_eq!(watched(&[b"data: {\"choices\":[{\"text\":\"a\"}]}\n\n"]), (1, false));
        assert_eq!(watched(&[b"data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}]}\n\n"]), (0, true));
        assert_eq!(watched(&[b"data: {\"choices\":[{\"text\":\"a\"}]}\r\rdata: [DONE]\r\r"]), (1, true));
        assert_eq!(watched(&[b"data: {\"error\":{\"code\":500}}\n\ndata: nonsense\n\nevent: x\n"]), (0, false));
    }

    #[test]
    fn a_line_that_is_too_long_is_passed_over() {
        let long = vec![b'x'; MAX_LINE_BYTES / 2 + 1];
        let mut events = EventWatch::default();
        for piece in [b"data: ", &long[..], &long[..], b"\ndata: [DO", b"NE]\n"] {
            events.push(piece);
            assert!(events.line.len() <= MAX_LINE_BYTES);
        }
        assert!(events.ended);
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(cuts in prop::collection::vec(0usize..CHAT.len(), 0..12)) {
            let mut cuts = cuts;
            cuts.extend([0, CHAT.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|pair| &CHAT[pair[0]..pair[1]]).collect();
            prop_assert_eq!(watched(&pieces), (3, true));
        }
    }
}
