use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

const PARAMS: &str =
    r#"{"do_remote_decode":true,"remote_block_ids":[[1,2],[3]],"remote_host":"h\"}{","newer":{"a":[1]}}"#;

fn whole(params: &str) -> String {
    format!(
        r#"{{"id":"x","choices":[{{"index":0,"text":"a \"kv_transfer_params\":{{\"b\":1}}","finish_reason":"length","token_ids":[5, 6,7],"prompt_token_ids":[1,2]}}],"metadata":{{"kv_transfer_params":{{"forged":1}},"choices":[{{"token_ids":[9]}}]}},"kv_transfer_params":{params}}}"#
    )
}

fn events(params: &str) -> String {
    let first = r#"{"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":null,"token_ids":[5]}]}"#;
    let last = r#"{"choices":[{"index":0,"delta":{},"finish_reason":"stop","token_ids":[6,7]}],"kv_transfer_params":"#;
    format!(
        "data: {first}\n\n: comment \"kv_transfer_params\":{{}}\nevent: x\ndata:{last}{params}}}\n\ndata: [DONE]\n\n"
    )
}

fn read(answer: &str, format: AnswerFormat, sizes: &[usize]) -> TransferScanner {
    read_as(Api::ChatCompletions, answer, format, sizes)
}

fn read_as(api: Api, answer: &str, format: AnswerFormat, sizes: &[usize]) -> TransferScanner {
    let mut scanner = TransferScanner::new(api, format).unwrap();
    let (mut rest, mut sizes) = (answer.as_bytes(), sizes.iter().cycle());
    while !rest.is_empty() {
        let (chunk, after) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
        scanner.push(chunk);
        rest = after;
    }
    scanner
}

fn assert_told(scanner: &TransferScanner, finish: Finish) {
    assert_eq!(scanner.params().map(|p| std::str::from_utf8(p).unwrap()), Some(PARAMS));
    assert_eq!(scanner.token_ids(), [5, 6, 7]);
    assert_eq!(scanner.finish(), Some(finish));
}

#[test]
fn response_reports_its_blocks_whole_and_streamed() {
    assert_told(&read(&whole(PARAMS), AnswerFormat::Json, &[usize::MAX]), Finish::Length);
    assert_told(&read(&events(PARAMS), AnswerFormat::Events, &[usize::MAX]), Finish::Stop);
    for end in ["\r\n", "\r"] {
        let stream = format!("\u{feff}{}", events(PARAMS)).replace('\n', end);
        for size in [usize::MAX, 1, 2, 3] {
            assert_told(&read(&stream, AnswerFormat::Events, &[size]), Finish::Stop);
        }
    }
    let lines = events(PARAMS).replace(",\"kv_transfer_params\"", ",\ndata: \"kv_transfer_params\"");
    assert_told(&read(&lines, AnswerFormat::Events, &[5]), Finish::Stop);
}

#[test]
fn values_at_other_positions_are_ignored() {
    for params in ["null", "[1]", "\"text\"", "7"] {
        assert_eq!(read(&whole(params), AnswerFormat::Json, &[7]).params(), None, "{params}");
        assert_eq!(read(&events(params), AnswerFormat::Events, &[7]).params(), None, "{params}");
    }
    for other in [
        json!([{"kv_transfer_params": {"a": 1}}]),
        json!({"choices": [{"kv_transfer_params": {"a": 1}, "message": {"token_ids": [1]}}]}),
        json!({"choices": {"a": {"token_ids": [1], "finish_reason": "stop"}}, "token_ids": [1]}),
    ] {
        let scanner = read(&other.to_string(), AnswerFormat::Json, &[3]);
        assert_eq!((scanner.params(), scanner.token_ids(), scanner.finish()), (None, &[][..], None), "{other}");
    }
}

/// Recorded responses of vLLM, with the finish reasons of a decode in place of a prefill's.
#[test]
fn messages_and_responses_report_them_where_vllm_writes_them() {
    let recorded = |text: &str| serde_json::from_str::<Value>(text).unwrap()["body"].clone();
    let message = recorded(include_str!("../../../tests/data/pd/15_messages_prefill.json"));
    let response = recorded(include_str!("../../../tests/data/pd/14_responses_prefill.json"));
    for (api, body) in [(Api::Messages, &message), (Api::Responses, &response)] {
        let scanner = read_as(api, &body.to_string(), AnswerFormat::Json, &[5]);
        let reported: Value = serde_json::from_slice(scanner.params().unwrap()).unwrap();
        assert_eq!((&reported, scanner.finish()), (&body["kv_transfer_params"], Some(Finish::Length)), "{api:?}");
        assert!(scanner.token_ids().is_empty());
    }
    let ended = |api, body: &Value, key: &str, word: &str| {
        let mut body = body.clone();
        body[key] = word.into();
        read_as(api, &body.to_string(), AnswerFormat::Json, &[64]).finish()
    };
    assert_eq!(ended(Api::Messages, &message, "stop_reason", "end_turn"), Some(Finish::Stop));
    assert_eq!(ended(Api::Responses, &response, "status", "completed"), Some(Finish::Stop));
    assert_eq!(ended(Api::Responses, &response, "status", "in_progress"), None);
    assert!(TransferScanner::new(Api::Generate, AnswerFormat::Json).is_none());
}

#[test]
fn events_of_messages_and_responses_have_them_inside() {
    let event = |data: Value| format!("event: x\ndata: {data}\n\n");
    let params = json!({"do_remote_decode": true});
    let forged = json!({"status": "incomplete", "stop_reason": "max_tokens", "kv_transfer_params": {"forged": 1}});
    let reported = |api, events: &[Value]| {
        let text: String = events.iter().map(|data| event(data.clone())).collect();
        let scanner = read_as(api, &text, AnswerFormat::Events, &[7]);
        let params = scanner.params().map(|raw| serde_json::from_slice::<Value>(raw).unwrap());
        (params, scanner.finish())
    };
    let responses = [
        json!({"type": "response.created", "response": {"status": "in_progress", "kv_transfer_params": null}}),
        json!({"type": "response.output_item.done", "item": forged}),
        json!({"type": "response.completed", "response": {
            "output": [forged], "status": "completed", "metadata": forged, "kv_transfer_params": params,
        }}),
    ];
    assert_eq!(reported(Api::Responses, &responses), (Some(params.clone()), Some(Finish::Stop)));
    let messages = [
        json!({"type": "message_start", "message": forged}),
        json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": forged}),
        json!({"type": "message_stop", "kv_transfer_params": params}),
    ];
    assert_eq!(reported(Api::Messages, &messages), (Some(params), Some(Finish::Stop)));
    assert_eq!(reported(Api::Messages, &messages[..2]), (None, Some(Finish::Stop)));
}

#[test]
fn last_value_counts_and_a_value_over_the_limit_does_not() {
    let twice = r#"{"kv_transfer_params":{"a":1},"kv_transfer_params":{"b":2}}"#;
    assert_eq!(read(twice, AnswerFormat::Json, &[9]).params(), Some(&br#"{"b":2}"#[..]));
    let long = json!({"kv_transfer_params": {"a": "x".repeat(MAX_VALUE)}});
    assert_eq!(read(&long.to_string(), AnswerFormat::Json, &[4_096]).params(), None);
    let ids = json!({"choices": [{"token_ids": [1, -1]}], "kv_transfer_params": {"a": 1}});
    assert_eq!(read(&ids.to_string(), AnswerFormat::Json, &[64]).params(), None, "invalid tokens");
}

/// JSON with keys that matter at random positions.
fn document() -> impl Strategy<Value = Value> {
    let key = prop_oneof![
        Just("kv_transfer_params"),
        Just("choices"),
        Just("token_ids"),
        Just("finish_reason"),
        Just("a\"b\\"),
    ];
    let leaf = prop_oneof![Just(json!(null)), Just(json!("length")), Just(json!("q\\\"{[")), Just(json!(17))];
    leaf.prop_recursive(5, 40, 4, move |inner| {
        prop_oneof![
            proptest::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            proptest::collection::btree_map(key.clone(), inner, 0..4)
                .prop_map(|map| map.into_iter().map(|(k, v)| (k.to_owned(), v)).collect::<Value>()),
        ]
    })
}

proptest! {
    /// For any chunks, the result equals that of a parser.
    #[test]
    fn result_agrees_with_a_parser(
        document in document(),
        sizes in proptest::collection::vec(1usize..9, 1..4),
        pretty: bool,
    ) {
        let text = if pretty { format!("{document:#}") } else { document.to_string() };
        let scanner = read(&text, AnswerFormat::Json, &sizes);
        let params = document.get("kv_transfer_params").filter(|params| params.is_object());
        let unreadable = document["choices"].as_array().into_iter().flatten().any(|choice| {
            choice.get("token_ids").is_some_and(|ids| {
                ids.is_array() && serde_json::from_value::<Vec<u32>>(ids.clone()).is_err()
            })
        });
        let reported = scanner.params().map(|raw| serde_json::from_slice::<Value>(raw).unwrap());
        prop_assert_eq!(reported.as_ref(), params.filter(|_| !unreadable));
        let finish = document["choices"].as_array().into_iter().flatten().rev().find_map(|choice| {
            choice.get("finish_reason").and_then(Value::as_str)
        });
        let finish = finish.map(|word| if word == "length" { Finish::Length } else { Finish::Stop });
        prop_assert_eq!(scanner.finish(), finish);
    }

    /// Any bytes are accepted without a panic.
    #[test]
    fn any_bytes_are_accepted(bytes: Vec<u8>, stream: bool) {
        let format = if stream { AnswerFormat::Events } else { AnswerFormat::Json };
        let mut scanner = TransferScanner::new(Api::Completions, format).unwrap();
        scanner.push(b"data: {\"kv_transfer_params\":");
        scanner.push(&bytes);
    }
}
