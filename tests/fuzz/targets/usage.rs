//! Token counts of responses. The first byte selects the API and the format, the second says how the response is split.
//! The split changes no result. For a JSON document, the counts equal those of a strict parser, as one document and as
//! an event.
#![no_main]

use attache_protocol::usage::Watch;
use attache_protocol::{AnswerFormat, Api, Usage, UsageScanner};
use libfuzzer_sys::fuzz_target;
use serde_json::Value;

const WATCH: Watch = Watch { errors: true, response_id: true };

fn scan<'c>(api: Api, format: AnswerFormat, chunks: impl Iterator<Item = &'c [u8]>) -> UsageScanner {
    let mut scanner = UsageScanner::of_answers(api, format, WATCH, 2);
    chunks.for_each(|chunk| scanner.push(chunk));
    scanner
}

/// What a strict parser finds.
fn strict(api: Api, format: AnswerFormat, document: &Value) -> Option<Usage> {
    let kind = document["type"].as_str().unwrap_or_default();
    let usage = match (api, format, kind) {
        (Api::Messages, AnswerFormat::Events, "message_start") => &document["message"]["usage"],
        (Api::Messages, AnswerFormat::Events, "message_delta") => &document["usage"],
        (Api::Messages, AnswerFormat::Events, _) => return None,
        (Api::Responses, AnswerFormat::Events, "response.completed" | "response.incomplete" | "response.failed") => {
            &document["response"]["usage"]
        }
        (Api::Responses, AnswerFormat::Events, _) => return None,
        _ => &document["usage"],
    };
    Usage::read(usage.to_string().as_bytes())
}

fuzz_target!(|data: &[u8]| {
    let [which, size, answer @ ..] = data else { return };
    let apis = [Api::ChatCompletions, Api::Messages, Api::Responses, Api::SglangGenerate];
    let api = apis[usize::from(which / 2) % apis.len()];
    let format = if which % 2 == 0 { AnswerFormat::Json } else { AnswerFormat::Events };
    let size = usize::from(*size).max(1);
    let (whole, cut) = (scan(api, format, std::iter::once(answer)), scan(api, format, answer.chunks(size)));
    assert_eq!(whole.usage(), cut.usage());
    assert_eq!(whole.error(), cut.error());
    assert_eq!(whole.response_id(), cut.response_id());
    assert_eq!(whole.events(), cut.events());
    let Ok(document @ Value::Object(_)) = serde_json::from_slice(answer) else { return };
    if api == Api::SglangGenerate {
        return;
    }
    let text = match format {
        AnswerFormat::Json => document.to_string(),
        AnswerFormat::Events => format!("data: {document}\n\n"),
    };
    let read = scan(api, format, text.as_bytes().chunks(size));
    assert_eq!(read.usage(), strict(api, format, &document));
});
