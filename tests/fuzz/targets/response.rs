//! Responses: the first byte says how they are split into chunks. The split changes neither the renamer's output nor
//! the scanner's results. A response without the model's name is unchanged.
#![no_main]

use attache_protocol::usage::Watch;
use attache_protocol::{AnswerFormat, Api, ModelRenamer, UsageScanner};
use libfuzzer_sys::fuzz_target;

fn rename<'c>(chunks: impl Iterator<Item = &'c [u8]>) -> Vec<u8> {
    let mut renamer = ModelRenamer::new("tiny", "mine").expect("the names differ");
    let mut sent = Vec::new();
    let mut chunks = chunks.peekable();
    while let Some(chunk) = chunks.next() {
        let mut out = Vec::new();
        let changed = renamer.push(chunk, chunks.peek().is_none(), &mut out);
        sent.extend_from_slice(if changed { &out } else { chunk });
    }
    sent
}

fn scan<'c>(chunks: impl Iterator<Item = &'c [u8]>) -> UsageScanner {
    let mut scanner =
        UsageScanner::new(Api::Responses, AnswerFormat::Events, Watch { errors: true, response_id: true });
    chunks.for_each(|chunk| scanner.push(chunk));
    scanner
}

fuzz_target!(|data: &[u8]| {
    let Some((size, answer)) = data.split_first() else { return };
    let size = usize::from(*size).max(1);
    let (whole, cut) = (rename(std::iter::once(answer)), rename(answer.chunks(size)));
    assert_eq!(whole, cut);
    if memchr::memmem::find(answer, b"\"model\"").is_none() {
        assert_eq!(whole, answer);
    }
    let (whole, cut) = (scan(std::iter::once(answer)), scan(answer.chunks(size)));
    assert_eq!(whole.usage(), cut.usage());
    assert_eq!(whole.error(), cut.error());
    assert_eq!(whole.response_id(), cut.response_id());
});
