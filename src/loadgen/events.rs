//! What an event stream shows of its pace: how many events brought something of the answer, and
//! whether its end was announced.
//!
//! Counts and texts are read elsewhere (`protocol::usage`, `protocol::answer`); here it matters when anything was said
//! at all, reasoning and tool calls included, since a client sees those come too. Called by [`mod@super::exchange`].
//! Pure.

use attache_protocol::events::{EventLines, EventPart};
use serde::Deserialize;
use serde::de::IgnoredAny;

/// 1 MiB: events are a few hundred bytes; a longer one is not looked at.
const MAX_EVENT_BYTES: usize = 1 << 20;

/// Watches a stream go by.
#[derive(Debug, Default)]
pub(super) struct EventWatch {
    lines: EventLines,
    /// The data of the event that has not ended.
    data: Vec<u8>,
    /// They are too long.
    skip: bool,
    pub(super) pace: Pace,
}

/// What was seen so far.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
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
        let Self { lines, data, skip, pace } = self;
        lines.push(chunk, |part| match part {
            EventPart::Event(whole) => pace.take(whole),
            EventPart::Data(part) if data.len() + part.len() > MAX_EVENT_BYTES => *skip = true,
            EventPart::Data(part) => data.extend_from_slice(part),
            EventPart::Line if data.is_empty() => {}
            EventPart::Line => data.push(b'\n'),
            EventPart::End => {
                if !std::mem::take(skip) {
                    pace.take(data);
                }
                data.clear();
            }
            EventPart::Name(_) => {}
        });
    }

    /// The stream has ended: its last event may have no end of its own.
    pub(super) fn finish(&mut self) {
        self.push(b"\n\n");
    }
}

impl Pace {
    fn take(&mut self, data: &[u8]) {
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
        (events.pace.spoken, events.pace.ended)
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
    fn an_event_that_is_too_long_is_passed_over() {
        let long = vec![b'x'; MAX_EVENT_BYTES / 2 + 1];
        let mut events = EventWatch::default();
        for piece in [b"data: ", &long[..], &long[..], b"\ndata: [DONE]\n\ndata: [DO"] {
            events.push(piece);
            assert!(events.data.len() <= MAX_EVENT_BYTES);
        }
        assert!(!events.pace.ended);
        events.push(b"NE]\n\n");
        assert!(events.pace.ended);
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
