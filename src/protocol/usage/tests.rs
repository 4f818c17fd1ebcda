use super::*;

use serde_json::{Value, json};

mod hostile;

const ALL: Watch = Watch { errors: true, response_id: true };

fn capture(name: &str) -> Vec<u8> {
    let path = format!("{}/../../tests/data/protocol/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let capture: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    match &capture["body"] {
        Value::String(stream) => stream.clone().into_bytes(),
        body => serde_json::to_vec(body).unwrap(),
    }
}

fn scanner(api: Api, format: AnswerFormat) -> UsageScanner {
    UsageScanner::new(api, format, ALL)
}

/// Feeds the response whole, split in two at every byte, and byte by byte; all results must be equal.
fn scan(api: Api, format: AnswerFormat, answer: &[u8]) -> UsageScanner {
    let mut whole = scanner(api, format);
    whole.push(answer);
    let same = |scanner: &UsageScanner, how: &str| {
        assert_eq!(scanner.usage(), whole.usage(), "{how}");
        assert_eq!(scanner.error(), whole.error(), "{how}");
        assert_eq!(scanner.response_id(), whole.response_id(), "{how}");
        assert_eq!(scanner.events(), whole.events(), "{how}");
        assert_eq!(scanner.unread_count(), whole.unread_count(), "{how}");
    };
    for at in 0..=answer.len() {
        let (a, b) = answer.split_at(at);
        let mut scanner = scanner(api, format);
        scanner.push(a);
        scanner.push(b);
        same(&scanner, &format!("split at {at}"));
    }
    let mut scanner = scanner(api, format);
    answer.chunks(1).for_each(|chunk| scanner.push(chunk));
    same(&scanner, "byte by byte");
    whole
}

fn scan_json(answer: &str) -> UsageScanner {
    scan(Api::ChatCompletions, AnswerFormat::Json, answer.as_bytes())
}

fn scan_events(api: Api, stream: &str) -> UsageScanner {
    scan(api, AnswerFormat::Events, stream.as_bytes())
}

fn usage(prompt: u64, completion: u64, cached: impl Into<Option<u64>>) -> Option<Usage> {
    Some(Usage { prompt_tokens: Some(prompt), completion_tokens: Some(completion), cached_tokens: cached.into() })
}

/// AstrAI's streams: no blank lines, and an event that is nothing but the usage.
#[test]
fn events_with_nothing_but_usage_are_counted() {
    let token = r#"{"id":"a","choices":[{"delta":{"content":"\"prompt_tokens\": 9"}}]}"#;
    for bare in [
        r#"{"prompt_tokens": 34, "completion_tokens": 4, "total_tokens": 38}"#,
        r#" { "completion_tokens":4,"details":{"prompt_tokens":1},"prompt_tokens":34}"#,
        r#"{"total_tokens":38,"prompt_tokens":34,"completion_tokens":4}"#,
    ] {
        for end in ["\n", "\n\n", "\r\n\r\n"] {
            let stream = format!("data: {token}{end}data: {bare}{end}data: [DONE]\n\n");
            assert_eq!(scan_events(Api::ChatCompletions, &stream).usage(), usage(34, 4, None), "{stream}");
        }
    }
    for other in [
        // The first member is not a count, so this is not a usage.
        r#"{"id":"a","prompt_tokens":34,"completion_tokens":4}"#,
        r#"{"choices":[{"prompt_tokens":34}]}"#,
        r#"[{"prompt_tokens":34}]"#,
        r#"{"prompt_tokens_details":{"cached_tokens":1}}"#,
    ] {
        for end in ["\n", "\n\n"] {
            let stream = format!("data: {other}{end}data: [DONE]\n\n");
            assert_eq!(scan_events(Api::ChatCompletions, &stream).usage(), None, "{stream}");
        }
    }
    assert_eq!(scan_json(r#"{"prompt_tokens":34,"completion_tokens":4}"#).usage(), None, "not a stream");
}

#[test]
fn recorded_responses_report_their_counts() {
    let cases = [
        ("chat", Api::ChatCompletions, usage(34, 8, 0)),
        ("chat_n2", Api::ChatCompletions, usage(34, 6, 32)),
        ("chat_stream_usage", Api::ChatCompletions, usage(34, 4, 32)),
        ("chat_stream_cont_usage", Api::ChatCompletions, usage(34, 3, 32)),
        ("chat_stream_nousage", Api::ChatCompletions, None),
        ("responses", Api::Responses, usage(12, 5, 0)),
        ("responses_stream", Api::Responses, usage(12, 3, 0)),
        // Anthropic's `input_tokens` excludes the 16 tokens that were written to the cache.
        ("messages", Api::Messages, usage(22, 5, 0)),
        ("messages_stream", Api::Messages, usage(11, 3, 0)),
        ("batch_chat", Api::ChatBatch, usage(68, 4, None)),
        ("tokenize_chat", Api::Tokenize, None),
        ("err_badjson", Api::ChatCompletions, None),
    ];
    for (name, api, expected) in cases {
        let format = if name.contains("stream") { AnswerFormat::Events } else { AnswerFormat::Json };
        assert_eq!(scan(api, format, &capture(name)).usage(), expected, "{name}");
    }
}

#[test]
fn counts_in_every_spelling_are_read() {
    let cases: &[(&str, Option<Usage>)] = &[
        (r#"{"usage":{"prompt_tokens":10,"completion_tokens":20,"total_tokens":30}}"#, usage(10, 20, None)),
        (r#"{"object":"conversation","usage":{"input_tokens":15,"output_tokens":25}}"#, usage(15, 25, None)),
        (
            r#"{"usage":{"prompt_tokens":50,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":40}}}"#,
            usage(50, 1, 40),
        ),
        (
            r#"{"usage":{"prompt_tokens":50,"completion_tokens":1,"prompt_token_details":{"cached_tokens":40}}}"#,
            usage(50, 1, 40),
        ),
        (
            r#"{"usage":{"input_tokens":50,"output_tokens":1,"input_tokens_details":{"cached_tokens":40}}}"#,
            usage(50, 1, 40),
        ),
        (
            r#"{"usage":{"input_tokens":10,"output_tokens":1,"cache_read_input_tokens":40,"cache_creation_input_tokens":5}}"#,
            usage(55, 1, 40),
        ),
        (r#"{"usage":{"input_tokens":5,"completion_tokens":5}}"#, usage(5, 5, None)),
        (r#"{"choices":[]}"#, None),
        (r#"{"usage":null}"#, None),
        (r#"{"usage":{}}"#, None),
        (r#"{"usage":{"prompt_tokens":-1}}"#, None),
        (r#"{"usage":{"type":"object"}}"#, None),
        ("{malformed", None),
        (r#"{"content":"\"usage\":{\"prompt_tokens\":1}"}"#, None),
        (r#"{"tools":[{"usage":{"prompt_tokens":1}}],"x":{"usage":{"prompt_tokens":1}}}"#, None),
        (r#"[{"usage":{"prompt_tokens":1}}]"#, None),
        (r#"{"usage":[1,2]}"#, None),
        (
            r#"{"usage":{"prompt_tokens":9,"completion_tokens":9},"usage":{"completion_tokens":2,"prompt_tokens":1}}"#,
            usage(1, 2, None),
        ),
        (r#"{"usage":{"prompt_tokens":1},"usage":null}"#, None),
        (r#"{"usage":{"prompt_tokens":1}"#, None),
    ];
    for (answer, expected) in cases {
        assert_eq!(scan_json(answer).usage(), *expected, "{answer}");
    }
}

#[test]
fn counts_are_read_in_every_line_end_of_every_api() {
    let streams = [
        (Api::ChatCompletions, "data: {\"choices\":[{}]}\n\ndata:{\"usage\":COUNTS}\n\ndata: [DONE]\n\n", 3),
        (Api::Completions, "id: 1\n: ping\ndata: {\"choices\":[],\ndata: \"usage\":\ndata:COUNTS}\n\n", 1),
        (Api::Responses, "event: response.completed\ndata: {\"response\":{\"id\":\"resp_1\",\"usage\":COUNTS}}\n\n", 1),
        (
            Api::Messages,
            "event: message_start\ndata: {\"message\":{\"usage\":COUNTS}}\n\nevent: ping\ndata: {}\n\n\
             event: message_delta\ndata: {\"usage\":{\"output_tokens\":4}}\n\n",
            3,
        ),
        (Api::SglangGenerate, "data: {\"text\":\"a\",\"meta_info\":COUNTS}\n\ndata: [DONE]\n\n", 2),
    ];
    for (api, stream, events) in streams {
        let counts = match api {
            Api::Responses | Api::Messages => r#"{"input_tokens":"12","output_tokens":4.0}"#,
            _ => r#"{"prompt_tokens":1.2e1,"completion_tokens":"4"}"#,
        };
        for end in ["\n", "\r\n", "\r"] {
            let stream = format!("\u{feff}{stream}").replace("COUNTS", counts).replace('\n', end);
            let scanner = scan_events(api, &stream);
            assert_eq!((scanner.usage(), scanner.unread_count()), (usage(12, 4, None), None), "{stream:?}");
            assert_eq!(scanner.events(), events, "{stream:?}");
        }
    }
    let document = "\u{feff}{\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":4}}";
    assert_eq!(scan_json(document).usage(), usage(12, 4, None));
}

#[test]
fn line_end_separates_numbers_of_one_event() {
    let stream = "data: {\"usage\":{\"prompt_tokens\":1\ndata: 2}}\n\n";
    assert_eq!(scan_events(Api::ChatCompletions, stream).usage(), None);
}

#[test]
fn counts_that_are_not_read_have_a_reason_and_spoil_no_other() {
    use UnreadCount::*;
    let cases = [
        (r#"{"prompt_tokens":-1,"completion_tokens":4}"#, Negative),
        (r#"{"prompt_tokens":"-1","completion_tokens":"4"}"#, Negative),
        (r#"{"prompt_tokens":1.5,"completion_tokens":4}"#, Fraction),
        (r#"{"prompt_tokens":1e300,"completion_tokens":4}"#, OutOfRange),
        (r#"{"prompt_tokens":"Infinity","completion_tokens":4}"#, OutOfRange),
        (r#"{"prompt_tokens":"many","completion_tokens":4}"#, NotANumber),
        (r#"{"prompt_tokens":{},"completion_tokens":4}"#, NotANumber),
    ];
    for (counts, reason) in cases {
        let scanner = scan_json(&format!("{{\"usage\":{counts}}}"));
        let expected = Usage { completion_tokens: Some(4), ..Usage::default() };
        assert_eq!((scanner.usage(), scanner.unread_count()), (Some(expected), Some(reason)), "{counts}");
        let events = scan_events(Api::ChatCompletions, &format!("data: {{\"usage\":{counts}}}\n\n"));
        assert_eq!((events.usage(), events.unread_count()), (Some(expected), Some(reason)), "{counts}");
        let generated = scan_events(Api::SglangGenerate, &format!("data: {{\"meta_info\":{counts}}}\n\n"));
        assert_eq!((generated.usage(), generated.unread_count()), (Some(expected), Some(reason)), "{counts}");
    }
    for malformed in [r#"{"prompt_tokens":NaN,"completion_tokens":4}"#, r#"[4]"#, r#""4""#] {
        let scanner = scan_json(&format!("{{\"usage\":{malformed}}}"));
        assert_eq!((scanner.usage(), scanner.unread_count()), (None, Some(Malformed)), "{malformed}");
    }
    for counts in [r#"{"prompt_tokens":null,"completion_tokens":4,"prompt_tokens_details":"none"}"#, "null", "{}"] {
        assert_eq!(scan_json(&format!("{{\"usage\":{counts}}}")).unread_count(), None, "{counts}");
    }
    let details =
        r#"{"usage":{"prompt_tokens":9,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":"8"}}}"#;
    assert_eq!(scan_json(details).usage(), usage(9, 4, 8));
    let later = "data: {\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":4}}\n\n\
                 data: {\"usage\":{\"prompt_tokens\":-9,\"completion_tokens\":5}}\n\n";
    assert_eq!(scan_events(Api::ChatCompletions, later).usage(), usage(9, 5, None), "the last that was read");
}

#[test]
fn counts_at_the_end_of_streams_are_read() {
    let counts = r#"{"usage":{"prompt_tokens":5,"completion_tokens":10,"total_tokens":15}}"#;
    let started = r#"{"type":"message_start","message":{"usage":{"input_tokens":3,"cache_read_input_tokens":9,"output_tokens":1}}}"#;
    let cases: &[(Api, String, Option<Usage>)] = &[
        (Api::Completions, format!("data: {counts}\ndata: [DONE]\n\n"), usage(5, 10, None)),
        (Api::Completions, format!("data: {counts}\n\ndata: [DONE]\n\n"), usage(5, 10, None)),
        (Api::Completions, format!("data: {counts}\r\n\r\ndata: [DONE]\r\n\r\n"), usage(5, 10, None)),
        (Api::Completions, format!("data: {counts}\n\ndata: {{\"usage\":null}}\n\n"), usage(5, 10, None)),
        (
            Api::Completions,
            "data: {\"a\":{},\ndata: \"usage\":{\"prompt_tokens\":1,\ndata:\"completion_tokens\":2}}\n\n".to_owned(),
            usage(1, 2, None),
        ),
        (
            Api::Completions,
            format!("data: {{\"usage\":{{\"prompt_tokens\":1}}\n\ndata: {counts}\n\n"),
            usage(5, 10, None),
        ),
        (Api::Completions, format!(": {counts}\n\nid: {counts}\n\n data: {counts}\n\n"), None),
        (
            Api::ChatCompletions,
            format!("data: {{\"choices\":[{{}}]}}\n\ndata: {counts}\n\ndata: [DONE]\n\n"),
            usage(5, 10, None),
        ),
        (Api::ChatCompletions, "data: {\"choices\":[{}],\"usage\":null}\n\ndata: [DONE]\n\n".to_owned(), None),
        (
            Api::Responses,
            "event: response.in_progress\ndata: {\"response\":{\"usage\":{\"input_tokens\":7}}}\n\n\
             event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":31,\"output_tokens\":3}}}\n\n"
                .to_owned(),
            usage(31, 3, None),
        ),
        (
            Api::Messages,
            format!(
                "event: message_start\ndata: {started}\n\nevent: message_delta\ndata: {{\"usage\":{{\"output_tokens\":12}}}}\n\n"
            ),
            usage(12, 12, 9),
        ),
    ];
    for (api, answer, expected) in cases {
        assert_eq!(scan_events(*api, answer).usage(), *expected, "{answer}");
    }
}

#[test]
fn only_events_that_report_counts_are_read() {
    let event = |kind: &str, member: &str| {
        format!("data: {}\n\n", json!({"type": kind, member: {"usage": {"input_tokens": 4, "output_tokens": 2}}}))
    };
    for kind in ["response.completed", "response.incomplete", "response.failed"] {
        assert_eq!(scan_events(Api::Responses, &event(kind, "response")).usage(), usage(4, 2, None), "{kind}");
    }
    for kind in ["response.created", "response.in_progress", "response.output_item.done", "message_start", ""] {
        assert_eq!(scan_events(Api::Responses, &event(kind, "response")).usage(), None, "{kind}");
    }
    assert_eq!(scan_events(Api::Messages, &event("message_start", "message")).usage(), usage(4, 2, None));
    for kind in ["message_delta", "content_block_start", "response.completed"] {
        assert_eq!(scan_events(Api::Messages, &event(kind, "message")).usage(), None, "{kind}");
    }
    let at_root = "data: {\"type\":\"content_block_start\",\"usage\":{\"input_tokens\":4}}\n\n";
    assert_eq!(scan_events(Api::Messages, at_root).usage(), None);
    // The type of the data precedes the name of the event.
    let named = format!("event: message_start\n{}", event("content_block_start", "message"));
    assert_eq!(scan_events(Api::Messages, &named).usage(), None);
}

#[test]
fn sglang_reports_counts_of_each_response() {
    let meta = |prompt: u64, completion: u64, cached: u64| {
        json!({"text": "\"meta_info\":{", "meta_info": {
            "id": "x", "finish_reason": {"prompt_tokens": 99}, "prompt_tokens": prompt, "completion_tokens": completion, "cached_tokens": cached,
            "output_token_logprobs": [[-0.1, 5, null]],
        }})
    };
    let read = |answers: u32, format: AnswerFormat, text: &str| {
        let mut scanner = UsageScanner::of_answers(Api::SglangGenerate, format, ALL, answers);
        text.as_bytes().chunks(7).for_each(|chunk| scanner.push(chunk));
        let mut whole = UsageScanner::of_answers(Api::SglangGenerate, format, ALL, answers);
        whole.push(text.as_bytes());
        assert_eq!(whole.usage(), scanner.usage());
        whole.usage()
    };
    assert_eq!(read(1, AnswerFormat::Json, &meta(5, 8, 1).to_string()), usage(5, 8, 1));
    let batch = json!([meta(5, 8, 1), meta(6, 9, 2)]).to_string();
    assert_eq!(read(1, AnswerFormat::Json, &batch), usage(11, 17, 3));
    let sampled = json!([meta(5, 8, 1), meta(5, 9, 1), meta(6, 1, 0), meta(6, 2, 0)]).to_string();
    assert_eq!(read(2, AnswerFormat::Json, &sampled), usage(11, 20, 1), "each prompt counts once");
    let event = |index: Option<u64>, mut event: Value| {
        index.into_iter().for_each(|index| event["index"] = index.into());
        format!("data: {event}\n\n")
    };
    let growing = [event(None, meta(5, 1, 0)), event(None, meta(5, 2, 0)), "data: [DONE]\n\n".to_owned()].concat();
    assert_eq!(read(1, AnswerFormat::Events, &growing), usage(5, 2, 0));
    let two = [event(Some(1), meta(6, 1, 0)), event(Some(0), meta(5, 1, 0)), event(Some(1), meta(6, 7, 0))].concat();
    assert_eq!(read(1, AnswerFormat::Events, &two), usage(11, 8, 0));
    let forged = json!({"text": "", "echo": meta(1, 1, 1), "meta_info": {"echo": {"prompt_tokens": 1}}}).to_string();
    assert_eq!(read(1, AnswerFormat::Json, &forged), None);
    assert_eq!(
        read(1, AnswerFormat::Events, &event(Some(1 << 40), meta(1, 1, 1))),
        None,
        "more responses than are stored"
    );
    let error = scan_events(Api::SglangGenerate, "data: {\"error\":{\"message\":\"aborted\"}}\n\n");
    assert_eq!(error.error().map(|error| error.status), Some(500));
}

#[test]
fn usage_over_the_limit_is_skipped_and_the_next_one_read() {
    let long = [&b"data: {\"usage\":{\"x\":\""[..], &vec![b'x'; 4 << 20], b"\xFF\xFE broken\n\n"].concat();
    let mut scanner = scanner(Api::Completions, AnswerFormat::Events);
    for chunk in long.chunks(16 << 10) {
        scanner.push(chunk);
    }
    scanner.push(b"data: {\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}\n\n");
    assert_eq!(scanner.usage(), usage(1, 2, None));
}

#[test]
fn error_inside_a_stream_is_found() {
    let path = format!("{}/../../tests/data/protocol/failures.json", env!("CARGO_MANIFEST_DIR"));
    let failures: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let busy = failures["admission_reject_stream"][2].as_str().unwrap();
    let dead = failures["engine_death_inflight"][0][1].as_str().unwrap();
    let failed = "data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\",\"message\":\"m\"}}}\n\n";
    let anthropic =
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"m\"}}\n\n";
    let cases = [
        (Api::ChatCompletions, busy, Some((503, Some("Service Unavailable")))),
        (Api::Completions, dead, Some((500, Some("InternalServerError")))),
        (Api::Responses, failed, Some((500, None))),
        (Api::Messages, anthropic, Some((503, Some("overloaded_error")))),
        (Api::ChatCompletions, "data: {\"error\":{\"code\":\"429\"}}\n\n", Some((429, None))),
        (Api::ChatCompletions, "data: {\"error\":{\"code\":99999999,\"message\":\"m\"}}\n\n", Some((500, None))),
        (Api::ChatCompletions, "data: {\"error\":null,\"choices\":[]}\n\n", None),
        // Only the event's name marks it as an error.
        (Api::Responses, "event: error\ndata: {\"message\":\"m\"}\n\n", Some((500, None))),
        (
            Api::Responses,
            "data: {\"type\":\"error\",\"code\":\"rate_limit_exceeded\",\"message\":\"m\"}\n\n",
            Some((429, None)),
        ),
        (Api::Responses, "data: {\"type\":\"error\",\"code\":null,\"message\":\"m\"}\n\n", Some((500, None))),
        // Content that a client wrote.
        (Api::ChatCompletions, "data: {\"tools\":[{\"error\":{\"code\":429}}]}\n\n", None),
        (
            Api::Responses,
            "data: {\"type\":\"response.created\",\"response\":{\"error\":null,\"tools\":[{\"error\":{\"code\":429}}]}}\n\n",
            None,
        ),
        (Api::Responses, "data: {\"type\":\"response.created\",\"response\":{\"error\":{\"code\":429}}}\n\n", None),
        (Api::Messages, "data: {\"type\":\"content_block_start\",\"error\":{\"code\":429}}\n\n", None),
        (Api::Messages, "data: {\"type\":\"message_start\",\"message\":{\"error\":{\"code\":429}}}\n\n", None),
        (Api::ChatCompletions, "data: {\"error\":{}}\n\n", None),
        (
            Api::ChatCompletions,
            "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"error\\\":{\\\"code\\\":503}\"}}]}\n\n",
            None,
        ),
    ];
    for (api, answer, expected) in cases {
        let scanner = scan_events(api, answer);
        assert_eq!(scanner.error().map(|e| (e.status, e.kind.as_deref())), expected, "{answer}");
    }
}

#[test]
fn response_id_is_the_first_at_its_position() {
    let streamed = scan(Api::Responses, AnswerFormat::Events, &capture("responses_stream"));
    assert_eq!(streamed.response_id(), Some("resp_a471ddb4aeb52317"));
    let whole = scan(Api::Responses, AnswerFormat::Json, &capture("responses"));
    assert_eq!(whole.response_id(), Some("resp_84075ee845e088ac"));
    assert_eq!(scan(Api::ChatCompletions, AnswerFormat::Json, &capture("chat")).response_id(), None);
    let forged = r#"{"tools":[{"id":"resp_0"}],"id":"msg_1","x":{"id":"resp_1"}}"#;
    assert_eq!(scan(Api::Responses, AnswerFormat::Json, forged.as_bytes()).response_id(), None);
    let stream = "data: {\"type\":\"response.output_item.added\",\"response\":{\"id\":\"resp_0\"}}\n\n\
                  data: {\"type\":\"response.created\",\"response\":{\"tools\":[{\"id\":\"resp_1\"}],\"id\":\"resp_2\"}}\n\n\
                  data: {\"type\":\"response.completed\",\"response\":{\"id\":\"resp_3\"}}\n\n";
    assert_eq!(scan_events(Api::Responses, stream).response_id(), Some("resp_2"));
    let other = "data: {\"usage\":null,\"id\":\"resp_0\"}\n\n";
    assert_eq!(scan_events(Api::ChatCompletions, other).response_id(), None);
    let mut unasked = UsageScanner::new(Api::Responses, AnswerFormat::Json, Watch::default());
    unasked.push(&capture("responses"));
    assert_eq!((unasked.response_id(), unasked.error()), (None, None));
}
