//! The text of a response: the first byte says how it is split into chunks, the second selects API and format. The
//! split changes nothing, and no text exceeds its limit.
#![no_main]

use attache_protocol::{AnswerFormat, AnswerText, Api};
use libfuzzer_sys::fuzz_target;

const MAX_BYTES: usize = 256;

fn read<'c>(kind: u8, chunks: impl Iterator<Item = &'c [u8]>) -> AnswerText {
    let api = [Api::Completions, Api::ChatCompletions, Api::Messages, Api::Responses][usize::from(kind >> 1) % 4];
    let format = if kind & 1 == 1 { AnswerFormat::Events } else { AnswerFormat::Json };
    let mut answer = AnswerText::new(api, format, MAX_BYTES).expect("an API with text");
    chunks.for_each(|chunk| answer.push(chunk));
    answer
}

fuzz_target!(|data: &[u8]| {
    let [size, kind, answer @ ..] = data else { return };
    let size = usize::from(*size).max(1);
    let (whole, cut) = (read(*kind, std::iter::once(answer)), read(*kind, answer.chunks(size)));
    assert_eq!(whole.finish(), cut.finish());
    assert_eq!(whole.stopped(), cut.stopped());
    assert!(whole.finish().is_none_or(|text| text.len() <= MAX_BYTES));
});
