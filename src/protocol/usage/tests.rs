use super::*;

const ALL: Watch = Watch { errors: true, response_id: true, events: true };

fn capture(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/data/protocol/{name}.json", env!("CARGO_MANIFEST_DIR"));
    let capture: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    match &capture["body"] {
        serde_json::Value::String(stream) => stream.clone().into_bytes(),
        body => serde_json::to_vec(body).unwrap(),
    }
}

/// Feeds the answer whole, cut in two at every byte and byte by byte; all must agree.
fn scan(answer: &[u8]) -> UsageScanner {
    let mut whole = UsageScanner::new(ALL);
    whole.push(answer);
    let same = |scanner: &UsageScanner, how: &str| {
        assert_eq!(scanner.usage(), whole.usage(), "{how}");
        assert_eq!(scanner.error(), whole.error(), "{how}");
        assert_eq!(scanner.response_id(), whole.response_id(), "{how}");
    };
    for at in 0..=answer.len() {
        let (a, b) = answer.split_at(at);
        let mut scanner = UsageScanner::new(ALL);
        scanner.push(a);
        scanner.push(b);
        same(&scanner, &format!("split at {at}"));
    }
    let mut scanner = UsageScanner::new(ALL);
    answer.chunks(1).for_each(|chunk| scanner.push(chunk));
    same(&scanner, "byte by byte");
    whole
}

fn usage(prompt: u64, completion: u64, cached: impl Into<Option<u64>>) -> Option<Usage> {
    Some(Usage { prompt_tokens: Some(prompt), completion_tokens: Some(completion), cached_tokens: cached.into() })
}

#[test]
fn real_answers_tell_their_counts() {
    let cases = [
        ("chat", usage(34, 8, 0)),
        ("chat_n2", usage(34, 6, 32)),
        ("chat_stream_usage", usage(34, 4, 32)),
        ("chat_stream_cont_usage", usage(34, 3, 32)),
        ("chat_stream_nousage", None),
        ("responses", usage(12, 5, 0)),
        ("responses_stream", usage(12, 3, 0)),
        // Anthropic's `input_tokens` leaves out the 16 tokens that were written to the cache.
        ("messages", usage(22, 5, 0)),
        ("messages_stream", usage(11, 3, 0)),
        ("batch_chat", usage(68, 4, None)),
        ("tokenize_chat", None),
        ("err_badjson", None),
    ];
    for (name, expected) in cases {
        assert_eq!(scan(&capture(name)).usage(), expected, "{name}");
    }
}

#[test]
fn counts_in_every_spelling() {
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
    ];
    for (answer, expected) in cases {
        assert_eq!(scan(answer.as_bytes()).usage(), *expected, "{answer}");
    }
}

#[test]
fn streams_tell_their_counts_last() {
    let counts = r#"{"usage":{"prompt_tokens":5,"completion_tokens":10,"total_tokens":15}}"#;
    let cases: &[(String, Option<Usage>)] = &[
        (format!("data: {counts}\ndata: [DONE]\n\n"), usage(5, 10, None)),
        (format!("data: {counts}\n\ndata: [DONE]\n\n"), usage(5, 10, None)),
        (format!("data: {{\"choices\":[{{}}]}}\n\ndata: {counts}\n\ndata: [DONE]\n\n"), usage(5, 10, None)),
        ("data: {\"choices\":[{}],\"usage\":null}\n\ndata: [DONE]\n\n".to_owned(), None),
        (
            "event: response.in_progress\ndata: {\"response\":{\"usage\":null}}\n\n\
             event: response.completed\ndata: {\"response\":{\"usage\":{\"input_tokens\":31,\"output_tokens\":3}}}\n\n"
                .to_owned(),
            usage(31, 3, None),
        ),
        (
            "event: message_start\ndata: {\"message\":{\"usage\":{\"input_tokens\":3,\"cache_read_input_tokens\":9,\
             \"output_tokens\":1}}}\n\nevent: message_delta\ndata: {\"usage\":{\"output_tokens\":12}}\n\n"
                .to_owned(),
            usage(12, 12, 9),
        ),
    ];
    for (answer, expected) in cases {
        assert_eq!(scan(answer.as_bytes()).usage(), *expected, "{answer}");
    }
}

#[test]
fn hostile_streams_are_survived() {
    let long = [&b"data: {\"usage\":{\"x\":\""[..], &vec![b'x'; 4 << 20], b"\xFF\xFE broken\n\n"].concat();
    let mut scanner = UsageScanner::new(ALL);
    for chunk in long.chunks(16 << 10) {
        scanner.push(chunk);
    }
    scanner.push(b"data: {\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":2}}\n\n");
    assert_eq!(scanner.usage(), usage(1, 2, None));
}

#[test]
fn an_error_inside_a_stream_is_seen() {
    let path = format!("{}/tests/data/protocol/failures.json", env!("CARGO_MANIFEST_DIR"));
    let failures: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let busy = failures["admission_reject_stream"][2].as_str().unwrap();
    let dead = failures["engine_death_inflight"][0][1].as_str().unwrap();
    let failed = "data: {\"type\":\"response.failed\",\"response\":{\"error\":{\"code\":\"server_error\",\"message\":\"m\"}}}\n\n";
    let anthropic =
        "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"m\"}}\n\n";
    let cases = [
        (busy, Some((503, Some("Service Unavailable")))),
        (dead, Some((500, Some("InternalServerError")))),
        (failed, Some((500, None))),
        (anthropic, Some((503, Some("overloaded_error")))),
        ("data: {\"error\":{\"code\":\"429\"}}\n\n", Some((429, None))),
        ("data: {\"error\":{\"code\":99999999,\"message\":\"m\"}}\n\n", Some((500, None))),
        ("data: {\"error\":null,\"choices\":[]}\n\n", None),
        ("data: {\"error\":{}}\n\n", None),
        ("data: {\"choices\":[{\"delta\":{\"content\":\"\\\"error\\\":{\\\"code\\\":503}\"}}]}\n\n", None),
    ];
    for (answer, expected) in cases {
        let scanner = scan(answer.as_bytes());
        assert_eq!(scanner.error().map(|e| (e.status, e.kind.as_deref())), expected, "{answer}");
    }
}

#[test]
fn the_response_id_is_the_first_of_its_kind() {
    let streamed = scan(&capture("responses_stream"));
    assert_eq!(streamed.response_id(), Some("resp_a471ddb4aeb52317"));
    assert_eq!(scan(&capture("responses")).response_id(), Some("resp_84075ee845e088ac"));
    assert_eq!(scan(&capture("chat")).response_id(), None);
    assert_eq!(scan(br#"{"id":"msg_1","x":{"id":"resp_1"},"y":{"id":"resp_2"}}"#).response_id(), Some("resp_1"));
    let mut unasked = UsageScanner::new(Watch::default());
    unasked.push(&capture("responses"));
    assert_eq!((unasked.response_id(), unasked.error()), (None, None));
}
