use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

fn capture(name: &str) -> Vec<u8> {
    let path = format!("{}/../../tests/data/protocol/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let capture: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    match &capture["body"] {
        Value::String(stream) => stream.clone().into_bytes(),
        body => serde_json::to_vec(body).unwrap(),
    }
}

fn collect<'c>(
    api: Api,
    format: AnswerFormat,
    chunks: impl IntoIterator<Item = &'c [u8]>,
) -> Result<String, Option<Stop>> {
    collect_up_to(DEFAULT_MAX_ANSWER_BYTES, api, format, chunks)
}

fn collect_up_to<'c>(
    max_bytes: usize,
    api: Api,
    format: AnswerFormat,
    chunks: impl IntoIterator<Item = &'c [u8]>,
) -> Result<String, Option<Stop>> {
    let mut answer = AnswerText::new(api, format, max_bytes).expect("the API has text");
    chunks.into_iter().for_each(|chunk| answer.push(chunk));
    answer.finish().map(str::to_owned).ok_or(answer.stopped())
}

/// Feeds the response whole, split in two at every byte, and byte by byte; all results must be equal.
fn text(api: Api, format: AnswerFormat, answer: &[u8]) -> Result<String, Option<Stop>> {
    let whole = collect(api, format, [answer]);
    for at in 0..=answer.len() {
        let (a, b) = answer.split_at(at);
        assert_eq!(collect(api, format, [a, b]), whole, "split at {at}");
    }
    assert_eq!(collect(api, format, answer.chunks(1)), whole, "byte by byte");
    whole
}

fn json_text(api: Api, answer: &Value) -> Result<String, Option<Stop>> {
    text(api, AnswerFormat::Json, answer.to_string().as_bytes())
}

fn stream(events: &[Value]) -> Vec<u8> {
    let mut body: Vec<u8> = events.iter().flat_map(|e| format!("data: {e}\n\n").into_bytes()).collect();
    body.extend_from_slice(b"data: [DONE]\n\n");
    body
}

fn stream_text(api: Api, events: &[Value]) -> Result<String, Option<Stop>> {
    text(api, AnswerFormat::Events, &stream(events))
}

#[test]
fn recorded_responses_give_their_text() {
    use AnswerFormat::*;
    let cases = [
        ("chat", Api::ChatCompletions, Json, "ures couldstatus importas ImportErrorlibc G"),
        ("chat_n2", Api::ChatCompletions, Json, "AG intern.iso"),
        ("chat_stream_usage", Api::ChatCompletions, Events, "ures couldstatus import"),
        ("chat_stream_cont_usage", Api::ChatCompletions, Events, "ures couldstatus"),
        ("completion_stream", Api::Completions, Events, "shot weekday deepcopy"),
        ("messages", Api::Messages, Json, "(context varargs.is main mis"),
        ("messages_stream", Api::Messages, Events, " mis                 _build"),
        ("responses", Api::Responses, Json, ".parsemake markerABLE$"),
        ("responses_stream", Api::Responses, Events, ".parsemake marker"),
    ];
    for (name, api, format, expected) in cases {
        assert_eq!(text(api, format, &capture(name)).as_deref(), Ok(expected), "{name}");
    }
}

#[test]
fn line_ends_marks_and_lines_of_an_event_change_no_text() {
    let stream = "event: a\ndata: {\"choices\":[{\"index\":0,\ndata: \"delta\":{\"content\":\"a b\"}}]}\n\n: ping\n\n\
                  data:{\"choices\":[{\"index\":0,\"delta\":{\"content\":\"c\"}}]}\n\ndata: [DONE]\n\n";
    for end in ["\n", "\r\n", "\r"] {
        for mark in ["", "\u{feff}"] {
            let stream = format!("{mark}{stream}").replace('\n', end);
            let read = text(Api::ChatCompletions, AnswerFormat::Events, stream.as_bytes());
            assert_eq!(read.as_deref(), Ok("a bc"), "{stream:?}");
        }
    }
    let document = "\u{feff}{\"choices\":[{\"index\":0,\"text\":\"abc\"}]}";
    assert_eq!(text(Api::Completions, AnswerFormat::Json, document.as_bytes()).as_deref(), Ok("abc"));
}

#[test]
fn reasoning_is_not_text() {
    let chat =
        json!({"choices": [{"index": 0, "message": {"reasoning_content": "hm", "reasoning": "hm", "content": "yes"}}]});
    assert_eq!(json_text(Api::ChatCompletions, &chat).as_deref(), Ok("yes"));
    let deltas = [
        json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
        json!({"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}}]}),
        json!({"choices": [{"index": 0, "delta": {"content": "yes"}, "logprobs": {"content": [{"token": "yes"}]}}]}),
    ];
    assert_eq!(stream_text(Api::ChatCompletions, &deltas).as_deref(), Ok("yes"));
    let messages =
        json!({"content": [{"type": "thinking", "thinking": "hm", "text": "no"}, {"text": "yes", "type": "text"}]});
    assert_eq!(json_text(Api::Messages, &messages).as_deref(), Ok("yes"));
    let blocks = [
        json!({"type": "content_block_start", "content_block": {"type": "thinking", "thinking": ""}, "index": 0}),
        json!({"type": "content_block_delta", "delta": {"type": "thinking_delta", "thinking": "hm"}, "index": 0}),
        json!({"type": "content_block_start", "content_block": {"type": "text", "text": ""}, "index": 1}),
        json!({"type": "content_block_delta", "delta": {"text": "yes", "type": "text_delta"}, "index": 1}),
    ];
    assert_eq!(stream_text(Api::Messages, &blocks).as_deref(), Ok("yes"));
    let response = json!({"output": [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}], "summary": [{"type": "summary_text", "text": "h"}]},
        {"content": [{"text": "yes", "type": "output_text"}], "type": "message"},
    ]});
    assert_eq!(json_text(Api::Responses, &response).as_deref(), Ok("yes"));
    let events = [
        json!({"type": "response.output_item.added", "item": {"type": "reasoning", "content": []}}),
        json!({"type": "response.reasoning_text.delta", "delta": "hm"}),
        json!({"type": "response.output_item.added", "item": {"type": "message", "content": []}}),
        json!({"type": "response.content_part.added", "part": {"type": "output_text", "text": ""}}),
        json!({"delta": "yes", "type": "response.output_text.delta"}),
    ];
    assert_eq!(stream_text(Api::Responses, &events).as_deref(), Ok("yes"));
}

#[test]
fn only_choice_0_counts() {
    let events = [
        json!({"choices": [{"delta": {"content": "b"}, "index": 1}, {"delta": {"content": "a"}, "index": 0}]}),
        json!({"choices": [{"delta": {"content": "b", "tool_calls": [{"id": "x"}]}, "index": 1}]}),
        json!({"choices": [{"index": 10, "delta": {"content": "c"}}]}),
        json!({"choices": [{"delta": {"content": "a"}}]}),
    ];
    assert_eq!(
        stream_text(Api::ChatCompletions, &events).as_deref(),
        Ok("aa"),
        "without an index, it is the only choice"
    );
    let batch = json!({"choices": [{"index": 1, "text": "b"}, {"index": 0, "text": "a"}]});
    assert_eq!(json_text(Api::Completions, &batch).as_deref(), Ok("a"));
}

#[test]
fn response_with_other_parts_than_one_text_has_none() {
    let not_plain = Err(Some(Stop::NotPlain));
    for message in [
        json!({"content": "let me see", "tool_calls": [{"id": "call_1", "function": {"name": "f", "arguments": "{}"}}]}),
        json!({"content": null, "function_call": {"name": "f", "arguments": "{}"}}),
        json!({"content": [{"type": "text", "text": "a"}]}),
    ] {
        assert_eq!(json_text(Api::ChatCompletions, &json!({"choices": [{"index": 0, "message": message}]})), not_plain);
        assert_eq!(
            stream_text(Api::ChatCompletions, &[json!({"choices": [{"index": 0, "delta": message}]})]),
            not_plain
        );
    }
    for content in [
        json!([{"type": "text", "text": "a"}, {"type": "tool_use", "name": "f", "input": {}}]),
        json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
    ] {
        assert_eq!(json_text(Api::Messages, &json!({"content": content})), not_plain);
        let starts: Vec<_> = (content.as_array().unwrap().iter())
            .map(|block| json!({"type": "content_block_start", "content_block": block}))
            .collect();
        assert_eq!(stream_text(Api::Messages, &starts), not_plain);
    }
    for output in [
        json!([{"content": [{"type": "output_text", "text": "a"}], "type": "message"}, {"type": "function_call", "name": "f"}]),
        json!([{"content": [{"type": "refusal", "refusal": "no"}], "type": "message"}]),
        json!([{"content": [{"type": "output_text", "text": "a"}, {"type": "output_text", "text": "b"}], "type": "message"}]),
    ] {
        assert_eq!(json_text(Api::Responses, &json!({"output": output})), not_plain);
        let events: Vec<_> = (output.as_array().unwrap().iter())
            .flat_map(|item| {
                let parts = item["content"].as_array().cloned().unwrap_or_default();
                let parts = parts.into_iter().map(|part| json!({"type": "response.content_part.added", "part": part}));
                [json!({"type": "response.output_item.added", "item": item})]
                    .into_iter()
                    .chain(parts)
                    .collect::<Vec<_>>()
            })
            .collect();
        assert_eq!(stream_text(Api::Responses, &events), not_plain);
    }
    // Null and an empty list mean that there are no calls.
    let none = json!({"choices": [{"index": 0, "message": {"content": "a", "tool_calls": [], "function_call": null}}]});
    assert_eq!(json_text(Api::ChatCompletions, &none).as_deref(), Ok("a"));
}

#[test]
fn escapes_are_decoded() {
    let answer = br#"{"choices":[{"\u0069ndex":0,"te\u0078t":"\"\\\/\b\f\n\r\t \u00e9\u20AC\ud83d\ude00 \ud83d \ude00\ud83d"}]}"#;
    assert_eq!(
        text(Api::Completions, AnswerFormat::Json, answer).as_deref(),
        Ok("\"\\/\u{8}\u{c}\n\r\t é€😀 \u{fffd} \u{fffd}\u{fffd}")
    );
}

#[test]
fn text_over_the_limit_stops_the_collection() {
    let event = |text: &str, index: u32| json!({"choices": [{"delta": {"content": text}, "index": index}]});
    let up_to_8 = |events: &[Value]| {
        let body = stream(events);
        let whole = collect_up_to(8, Api::ChatCompletions, AnswerFormat::Events, [body.as_slice()]);
        assert_eq!(collect_up_to(8, Api::ChatCompletions, AnswerFormat::Events, body.chunks(1)), whole);
        whole
    };
    assert_eq!(up_to_8(&[event("1234", 0), event("5678", 0)]).as_deref(), Ok("12345678"));
    assert_eq!(up_to_8(&[event("1234", 0), event("56789", 0), event("", 0)]), Err(Some(Stop::TooLong)));
    assert_eq!(up_to_8(&[event("1234", 0), event("123456789", 1), event("56", 0)]).as_deref(), Ok("123456"));
}

#[test]
fn interrupted_response_gives_whole_events_or_nothing() {
    let body =
        stream(&[json!({"choices": [{"delta": {"content": "a"}}]}), json!({"choices": [{"delta": {"content": "b"}}]})]);
    let second = body.windows(3).position(|w| w == b"\"b\"").unwrap();
    assert_eq!(collect(Api::ChatCompletions, AnswerFormat::Events, [&body[..second + 4]]).as_deref(), Ok("a"));
    assert_eq!(collect(Api::Completions, AnswerFormat::Json, [&br#"{"choices":[{"text":"a"}]"#[..]]), Err(None));
    assert_eq!(collect(Api::Completions, AnswerFormat::Json, []), Err(None));
    assert_eq!(json_text(Api::Completions, &json!({"error": {"message": "no", "code": 500}})), Err(None));
}

#[test]
fn response_of_another_api_is_not_read() {
    let malformed = Err(Some(Stop::Malformed));
    for garbage in ["[]", "1", "\"text\"", "{]", "{\"a\":}", "{1:2}", "{{", "data: {}"] {
        assert_eq!(text(Api::Completions, AnswerFormat::Json, garbage.as_bytes()), malformed, "{garbage}");
    }
    // Values without text are skipped unchecked: what does not end has no text either.
    for unended in ["{\"a\":[}".to_owned(), format!("{{\"a\":{}", "[".repeat(200))] {
        assert_eq!(text(Api::Completions, AnswerFormat::Json, unended.as_bytes()), Err(None), "{unended}");
    }
    let torn = "data: {\"choices\":[{\"text\":\"a\n\ndata: {\"choices\":[{\"text\":\"b\"}]}\n\n";
    assert_eq!(text(Api::Completions, AnswerFormat::Events, torn.as_bytes()), malformed);
    for api in Api::ALL {
        let has_text = AnswerText::new(*api, AnswerFormat::Json, 1).is_some();
        assert!(!has_text || api.generates(), "{}", api.name());
    }
}

#[test]
fn broken_line_breaks_its_event() {
    // What was read of the broken line is no text of the next one, wherever chunks end.
    let broken = format!(
        "data: {{\"choices\":[{{\"text\":\"{}\"]\ndata: {{\"choices\":[{{\"text\":\"b\"}}]}}\n\n",
        "a".repeat(9)
    );
    for size in 1..=broken.len() {
        let chunks = broken.as_bytes().chunks(size);
        let text = collect_up_to(8, Api::Completions, AnswerFormat::Events, chunks);
        assert_eq!(text, Err(Some(Stop::Malformed)), "chunks of {size} bytes");
    }
}

#[test]
fn lines_without_data_are_ignored() {
    let body = ": ping\n\nevent: x\r\nid: 1\r\ndata:{\"choices\":[{\"text\":\"a\"}]}\r\n\r\ndata\ndatum: {\ndata: 1\ndata: [DONE]\n\n";
    assert_eq!(text(Api::Completions, AnswerFormat::Events, body.as_bytes()).as_deref(), Ok("a"));
}

/// Texts, half of them with characters that JSON escapes.
fn any_text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-z ]{0,12}", "[\"\\\\\n\r\t\u{1}é€😀a/]{0,12}"]
}

/// Values that have the keys of responses at wrong positions.
fn decoy() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![Just(Value::Null), any::<i32>().prop_map(Value::from), any_text().prop_map(Value::from)];
    let key =
        prop::sample::select(vec!["text", "content", "index", "choices", "delta", "message", "type", "output", "x"]);
    leaf.prop_recursive(4, 24, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(key.clone().prop_map(str::to_owned), inner, 0..4)
                .prop_map(|m| Value::Object(m.into_iter().collect())),
        ]
    })
}

/// An object of `fields` and decoys under irrelevant names, in any order.
fn object(fields: Vec<(&'static str, Value)>) -> impl Strategy<Value = String> {
    let decoys = prop::collection::vec((prop::sample::select(vec!["a", "logprobs", "usage"]), decoy()), 0..3);
    decoys.prop_flat_map(move |decoys| {
        let mut all = fields.clone();
        for (key, value) in decoys {
            if all.iter().all(|(k, _)| *k != key) {
                all.push((key, value));
            }
        }
        Just(all).prop_shuffle().prop_map(|all| {
            let fields: Vec<_> = all.iter().map(|(k, v)| format!("{}:{v}", Value::from(*k))).collect();
            format!("{{{}}}", fields.join(" , "))
        })
    })
}

/// Events of a chat: texts of choices 0 and 1, and the text of choice 0 according to serde_json.
fn chat() -> impl Strategy<Value = (Vec<String>, String)> {
    let event = (any_text(), prop::bool::weighted(0.8)).prop_flat_map(|(text, first)| {
        object(vec![("content", text.into()), ("role", "assistant".into())])
            .prop_flat_map(move |delta| {
                let delta: Value = serde_json::from_str(&delta).unwrap();
                object(vec![("index", u8::from(!first).into()), ("delta", delta)])
            })
            .prop_flat_map(|choice| {
                object(vec![("choices", Value::from(vec![serde_json::from_str::<Value>(&choice).unwrap()]))])
            })
    });
    prop::collection::vec(event, 0..6).prop_map(|events| {
        let text = events.iter().map(|event| {
            let event: Value = serde_json::from_str(event).unwrap();
            let choice = &event["choices"][0];
            let text = choice["delta"]["content"].as_str().unwrap();
            if choice["index"] == 0 { text.to_owned() } else { String::new() }
        });
        let text = text.collect();
        (events, text)
    })
}

proptest! {
    #[test]
    fn agrees_with_serde_json((events, expected) in chat(), size in 1usize..40) {
        let body: Vec<u8> = events.iter().flat_map(|e| format!("data: {e}\n\n").into_bytes()).collect();
        let whole = collect(Api::ChatCompletions, AnswerFormat::Events, [body.as_slice()]);
        prop_assert_eq!(whole.clone().unwrap_or_default(), expected);
        prop_assert_eq!(collect(Api::ChatCompletions, AnswerFormat::Events, body.chunks(size)), whole);
        if let Some(event) = events.first() {
            let value: Value = serde_json::from_str(event).unwrap();
            let text = value["choices"][0]["delta"]["content"].as_str().filter(|_| value["choices"][0]["index"] == 0);
            let found = collect(Api::ChatCompletions, AnswerFormat::Json, event.as_bytes().chunks(size));
            prop_assert_eq!(found.unwrap_or_default(), text.unwrap_or_default());
        }
    }

    #[test]
    fn chunk_boundaries_change_nothing(
        pieces in prop::collection::vec(prop::sample::select(vec![
            "data: {", "data:", "\n", "\"choices\":[{", "\"delta\":{", "\"content\":\"", "\"index\":", "0", "1", "\\", "u", "d83d", "\"",
            ":", "{", "}", "[", "]", "}]}\n\n", ",", "a", "\u{20ac}", "\"type\":\"text\"", "\"text\":\"", "\"output\":[{\"content\":[{",
        ]), 0..40),
        size in 1usize..9,
        api in prop::sample::select(vec![Api::Completions, Api::ChatCompletions, Api::Messages, Api::Responses]),
        format in prop::sample::select(vec![AnswerFormat::Json, AnswerFormat::Events]),
    ) {
        let input = pieces.concat();
        let whole = collect(api, format, [input.as_bytes()]);
        prop_assert_eq!(collect(api, format, input.as_bytes().chunks(size)), whole);
    }
}
