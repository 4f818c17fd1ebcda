//! The reference picker's hermetic cases: requests, rejections, responses, gRPC.

use super::*;

/// The expected result in the reference's table.
enum Expected {
    /// Endpoint number, model in the body, `content-length` if the table has it.
    Route(u8, &'static str, Option<usize>),
    /// Status and reason.
    Refuse(i32, &'static str),
}
use Expected::{Refuse, Route};

struct Case {
    name: &'static str,
    servers: &'static [Server],
    model: &'static str,
    rewrite: &'static str,
    prompt: &'static str,
    /// Where the body is cut, if it arrives in two chunks.
    cut: Option<usize>,
    subset: Option<&'static [&'static str]>,
    expected: Expected,
}

const CASE: Case = Case {
    name: "",
    servers: &[],
    model: "",
    rewrite: "",
    prompt: "",
    cut: None,
    subset: None,
    expected: Route(0, "", None),
};

/// `endpoint-picker-protocol` §7.2, cases 1-4, 8-13 (their numbers in the names). Rejections are Attaché's own: JSON,
/// and 503 if no endpoint is ready.
const HERMETIC: &[Case] = &[
    Case {
        name: "1 lower queue and kv",
        servers: &[(3, 0.2, &[]), (0, 0.1, &[]), (10, 0.2, &[])],
        model: "my-model",
        rewrite: "my-model-12345",
        prompt: "test1",
        expected: Route(2, "my-model-12345", Some(76)),
        ..CASE
    },
    Case {
        name: "2 active lora, low queue",
        servers: &[(0, 0.2, &["foo", "bar"]), (0, 0.1, &["foo", "sql-lora-1fdg2"]), (10, 0.2, &["foo", "bar"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test2",
        expected: Route(2, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "3 lora beats kv",
        servers: &[(10, 0.2, &["foo", "bar"]), (10, 0.4, &["foo", "sql-lora-1fdg2"]), (10, 0.3, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test3",
        expected: Route(2, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "4 no shedding by default",
        servers: &[(6, 0.2, &["foo", "bar", "sql-lora-1fdg2"]), (0, 0.85, &["foo"]), (10, 0.9, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test4",
        expected: Route(1, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "8 split body",
        servers: &[(4, 0.2, &["foo", "bar", "sql-lora-1fdg3"]), (4, 0.85, &["foo", "sql-lora-1fdg3"])],
        model: "sql-lora-sheddable",
        rewrite: "sql-lora-1fdg3",
        prompt: "test6",
        cut: Some(34),
        expected: Route(1, "sql-lora-1fdg3", None),
        ..CASE
    },
    Case {
        name: "9 subset best",
        servers: &[(0, 0.2, &["foo"]), (0, 0.1, &["foo", "sql-lora-1fdg2"]), (10, 0.2, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test2",
        subset: Some(&["192.168.1.1:8000", "192.168.1.2:8000", "192.168.1.3:8000"]),
        expected: Route(2, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "10 subset partial",
        servers: &[(0, 0.2, &["foo"]), (0, 0.1, &["foo", "sql-lora-1fdg2"]), (10, 0.2, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test2",
        subset: Some(&["192.168.1.3:8000"]),
        expected: Route(3, "sql-lora-1fdg2", None),
        ..CASE
    },
    Case {
        name: "11 subset none",
        servers: &[(0, 0.2, &["foo"]), (0, 0.1, &["foo"])],
        model: "sql-lora",
        rewrite: "sql-lora-1fdg2",
        prompt: "test2",
        subset: Some(&["192.168.1.99:8000"]),
        expected: Refuse(503, "subset_empty"),
        ..CASE
    },
    Case {
        name: "11b subset present but empty",
        servers: &[(0, 0.2, &[])],
        model: "m",
        prompt: "p",
        subset: Some(&[]),
        expected: Refuse(503, "subset_empty"),
        ..CASE
    },
    Case {
        name: "11c subset with another port of a known address",
        servers: &[(0, 0.2, &[])],
        model: "m",
        prompt: "p",
        subset: Some(&["192.168.1.1:9000"]),
        expected: Refuse(503, "subset_empty"),
        ..CASE
    },
    Case {
        name: "12 model without target",
        servers: &[(4, 0.2, &["foo", "bar", "sql-lora-1fdg3"])],
        model: "direct-model",
        rewrite: "direct-model",
        prompt: "test6",
        cut: Some(34),
        expected: Route(1, "direct-model", None),
        ..CASE
    },
    Case {
        name: "13 rewrite rule",
        servers: &[(0, 0.1, &["foo", "rewritten-model"])],
        model: "model-to-be-rewritten",
        rewrite: "model-to-be-rewritten",
        prompt: "test-rewrite",
        expected: Route(1, "rewritten-model", Some(84)),
        ..CASE
    },
    Case { name: "no endpoint", model: "m", prompt: "p", expected: Refuse(503, "no_ready_endpoint"), ..CASE },
];

#[test]
fn reference_picker_hermetic_cases_pass() {
    for case in HERMETIC {
        let target = RewriteTarget { model: "rewritten-model".into(), weight: 1 };
        let exact = [("model-to-be-rewritten".to_owned(), vec![target])].into();
        let rewrites = ModelRewrites { exact, any: Vec::new() };
        let world = Setup { servers: case.servers.to_vec(), rewrites, ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let metadata_context = case.subset.map(subset);
        let mut pairs = vec![PATH, ("hi", "mom"), ("x-request-id", "test-request-id")];
        pairs.extend([("x-gateway-inference-objective", case.model), ("x-gateway-model-name-rewrite", case.rewrite)]);
        let with_hint = |m| ProcessingRequest { metadata_context: metadata_context.clone(), ..request(m) };
        let first = send(&mut exchange, with_hint(Message::RequestHeaders(headers(&pairs, false))));
        assert!(first.is_empty(), "{}: the headers wait for the body", case.name);
        let sent = completion(case.model, case.prompt);
        let (head, tail) = sent.split_at(case.cut.unwrap_or(0));
        if !head.is_empty() {
            assert!(send(&mut exchange, with_hint(Message::RequestBody(body(head.as_bytes(), false)))).is_empty());
        }
        let answers = send(&mut exchange, with_hint(Message::RequestBody(body(tail.as_bytes(), true))));
        check(case, &Answered::of(&answers));
        drop(exchange);
        world.assert_books_closed(1);
    }
}

fn check(case: &Case, got: &Answered) {
    let name = case.name;
    match case.expected {
        Route(server, model, length) => {
            let destination = format!("192.168.1.{server}:8000");
            assert_eq!(got.refused, None, "{name}");
            assert_eq!(got.set.get(DESTINATION), Some(&destination), "{name}");
            assert_eq!(got.metadata.as_ref(), Some(&destination), "{name}: header and metadata agree");
            assert_eq!(got.text(), completion(model, case.prompt), "{name}");
            assert_eq!(got.ended, 1, "{name}");
            assert_eq!(got.kinds, ["request_headers", "request_body"], "{name}: small pieces leave as one");
            let hidden = ["x-gateway-inference-objective", "x-gateway-model-name-rewrite"];
            assert_eq!(got.removed, hidden, "{name}: the picker's own headers don't reach the server");
            let renamed = model != case.model;
            let expected = renamed.then(|| completion(model, case.prompt).len().to_string());
            assert_eq!(got.set.get("content-length"), expected.as_ref(), "{name}");
            if let Some(length) = length {
                assert_eq!(got.body.len(), length, "{name}");
            }
        }
        Refuse(status, reason) => {
            assert_eq!(got.refused.as_ref().map(|r| r.0), Some(status), "{name}");
            assert_eq!(got.set.get("x-attache-reason").map(String::as_str), Some(reason), "{name}");
            assert_eq!(got.set.get(DESTINATION), None, "{name}: no destination with a refusal");
            assert_eq!(got.metadata, None, "{name}");
            let error: serde_json::Value = serde_json::from_str(&got.refused.as_ref().unwrap().1).unwrap();
            assert_eq!(error["error"]["code"], reason, "{name}");
        }
    }
}

#[test]
fn hermetic_5_and_15_header_only_requests() {
    let none = Setup { servers: vec![], ..Setup::default() }.build();
    let get = |pairs: &[(&str, &str)]| request(Message::RequestHeaders(headers(pairs, true)));
    let got = Answered::of(&send(&mut none.exchange(), get(&[(":path", "/v1/models"), (":method", "GET")])));
    assert_eq!(got.refused.map(|r| r.0), Some(503));

    // The endpoint with the fewest requests, not a random one.
    let world = Setup { servers: vec![(9, 0.0, &[]), (0, 0.9, &[]), (9, 0.0, &[])], ..Setup::default() }.build();
    let got = Answered::of(&send(&mut world.exchange(), get(&[(":path", "/v1/models"), (":method", "GET")])));
    assert_eq!(got.set[DESTINATION], "192.168.1.2:8000");
    assert_eq!(got.kinds, ["request_headers"]);
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Skipped), 1);
    world.assert_books_closed(1);
}

#[test]
fn hermetic_6_and_7_bad_bodies() {
    for (sent, reason) in
        [(r#"{"prompt":"hello world"}"#, "invalid_model"), ("no healthy upstream", "invalid_json"), ("", "empty_body")]
    {
        let world = Setup::default().build();
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
        let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
        assert_eq!(got.refused.as_ref().map(|r| r.0), Some(400), "{sent}");
        assert_eq!(got.set["x-attache-reason"], reason, "{sent}");
        drop(exchange);
        assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Rejected), 1);
        world.assert_books_closed(1);
    }
}

#[test]
fn hermetic_14_a_body_that_is_no_json_on_an_unknown_path_passes() {
    let world = Setup { servers: vec![(3, 0.2, &[]), (0, 0.1, &[]), (10, 0.2, &[])], ..Setup::default() }.build();
    let mut exchange = world.exchange();
    let pairs = [(":path", "/primary-gateway-test?x=1"), ("x-gateway-inference-objective", "my-model")];
    send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false))));
    let sent = b"passthrough-parser";
    let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent, true)))));
    assert_eq!(got.set[DESTINATION], "192.168.1.2:8000");
    assert_eq!(got.body, sent);
    assert_eq!(got.set.get("content-length"), None, "the body is as it was");
}

#[test]
fn hermetic_16_to_19_answers_pass_as_they_come() {
    let json = "application/json";
    let sse = "text/event-stream";
    let usage = r#"{"id":"x","usage":{"prompt_tokens":7,"total_tokens":17,"completion_tokens":10}}"#;
    let event = format!("data: {usage}\n\n");
    let cases: &[(&str, &str, &[&str], u64)] = &[
        ("16 json in two chunks", json, &[&usage[..20], &usage[20..]], 7),
        ("17 not json", json, &["no healthy upstream"], 0),
        ("18 empty end", json, &[usage, ""], 7),
        ("19 sse", sse, &["data: {}\n\n", &event, "data: [DONE]\n\n", ""], 7),
    ];
    for (name, content_type, chunks, prompt_tokens) in cases {
        let world = Setup::default().build();
        let mut exchange = routed(&world, None);
        let pairs = [(":status", "200"), ("content-type", *content_type)];
        let got = Answered::of(&send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false)))));
        assert_eq!((got.kinds.as_slice(), got.set.len()), (["response_headers"].as_slice(), 0), "{name}");
        for (at, chunk) in chunks.iter().enumerate() {
            let last = at + 1 == chunks.len();
            let sent = request(Message::ResponseBody(body(chunk.as_bytes(), last)));
            let got = Answered::of(&send(&mut exchange, sent));
            assert_eq!((got.text(), got.ended), (*chunk, u32::from(last)), "{name}");
        }
        let record = world.processor.decisions.snapshot().pop().unwrap();
        assert_eq!((record.end, record.status), ("complete", 200), "{name}");
        assert_eq!(record.prompt_tokens.unwrap_or(0), *prompt_tokens, "{name}");
        // Bookings end with the last byte, not with the stream.
        world.assert_books_closed_but_open_stream();
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn hermetic_20_and_21_the_last_message_tells_what_the_answer_cost() {
    let usage = r#"{"usage":{"completion_tokens":10,"prompt_tokens":32,"total_tokens":42}}"#;
    let event = format!("data: {usage}\n\n");
    let cases: &[(&str, &[&str])] =
        &[("application/json", &[usage]), ("text/event-stream", &["data: {}\n\n", &event, "data: [DONE]\n\n"])];
    for (content_type, chunks) in cases {
        let report = ReportUsage {
            namespace: "envoy.lb".to_owned(),
            key: "x-gateway-inference-request-cost".to_owned(),
            count: UsageCount::Completion,
        };
        let exchange = ExchangeSettings { report_usage: Some(report), ..ExchangeSettings::default() };
        let world = Setup { exchange, ..Setup::default() }.build();
        let mut exchange = routed(&world, None);
        let pairs = [(":status", "200"), ("content-type", *content_type)];
        send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
        for (at, chunk) in chunks.iter().enumerate() {
            let last = at + 1 == chunks.len();
            let got = send(&mut exchange, request(Message::ResponseBody(body(chunk.as_bytes(), last))));
            let expected = last.then(|| crate::metadata::number("envoy.lb", "x-gateway-inference-request-cost", 10.0));
            assert_eq!(got[0].dynamic_metadata, expected, "{content_type} {at}");
        }
    }
}

/// A gRPC frame around `message`.
fn frame(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    [&[0], &length[..], message].concat()
}

/// A length-delimited protobuf field.
fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    [&[number << 3 | 2, u8::try_from(bytes.len()).unwrap()], bytes].concat()
}

#[test]
fn hermetic_22_to_31_grpc_requests() {
    let generate = "/vllm.grpc.engine.VllmEngine/Generate";
    let embed = "/vllm.grpc.engine.VllmEngine/Embed";
    let text = |t: &str| frame(&field(3, t.as_bytes()));
    let stream = frame(&[&field(3, b"test-stream")[..], &[5 << 3, 1]].concat());
    let tokenized = frame(&field(2, &field(1, b"test1")));
    let three: &[Server] = &[(3, 0.2, &[]), (0, 0.1, &[]), (10, 0.2, &[])];
    let pair: &[Server] = &[(4, 0.2, &[]), (4, 0.85, &[])];
    let hint = |s: &[&str]| Some(subset(s));
    type Row<'a> = (&'a str, &'a str, Vec<u8>, usize, &'a [Server], Option<Metadata>, Expected);
    let rows: Vec<Row<'_>> = vec![
        ("22", generate, text("test1"), 0, three, None, Route(2, "", None)),
        ("23", embed, tokenized, 0, three, None, Route(2, "", None)),
        ("24", generate, stream, 0, three, None, Route(2, "", None)),
        ("25", generate, text("test2"), 0, &[(6, 0.2, &[]), (0, 0.85, &[]), (10, 0.9, &[])], None, Route(1, "", None)),
        ("26", generate, b"plain text not grpc payload style".to_vec(), 0, three, None, Refuse(400, "invalid_grpc")),
        ("27", "/vllm.grpc.engine.VllmEngine/Abort", text("x"), 0, three, None, Refuse(400, "unsupported_grpc_method")),
        ("28", generate, text("test3"), 6, pair, None, Route(1, "", None)),
        ("29", generate, text("t"), 0, three, hint(&["192.168.1.1:8000", "192.168.1.2:8000"]), Route(2, "", None)),
        ("30", generate, text("t"), 0, three, hint(&["192.168.1.3:8000"]), Route(3, "", None)),
        ("31", generate, text("t"), 0, three, hint(&["192.168.1.99:8000"]), Refuse(503, "subset_empty")),
    ];
    for (name, path, sent, cut, servers, metadata_context, expected) in rows {
        let world = Setup { servers: servers.to_vec(), ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let pairs = [(":path", path), ("content-type", "application/grpc"), ("te", "trailers")];
        let first = request(Message::RequestHeaders(headers(&pairs, false)));
        send(&mut exchange, ProcessingRequest { metadata_context, ..first });
        if cut > 0 {
            send(&mut exchange, request(Message::RequestBody(body(&sent[..cut], false))));
        }
        let got = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(&sent[cut..], true)))));
        match expected {
            Route(server, ..) => {
                assert_eq!(got.set.get(DESTINATION), Some(&format!("192.168.1.{server}:8000")), "{name}");
                assert!(got.body == sent, "{name}: the body is as it was");
            }
            Refuse(status, reason) => {
                assert_eq!(got.refused.as_ref().map(|r| r.0), Some(status), "{name}");
                assert_eq!(got.set["x-attache-reason"], reason, "{name}");
            }
        }
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn hermetic_32_to_35_grpc_answers_end_in_trailers() {
    let chunk = frame(&field(1, &field(1, &[1, 2, 3])));
    let complete = frame(&field(2, &[3 << 3, 7, 4 << 3, 10]));
    type Row = (&'static str, Vec<Vec<u8>>, Option<u64>);
    let rows: &[Row] = &[
        ("32", vec![chunk[..4].to_vec(), chunk[4..].to_vec()], None),
        ("33", vec![b"no healthy upstream".to_vec()], None),
        ("34", vec![complete[..7].to_vec(), complete[7..].to_vec()], Some(7)),
        ("35", vec![chunk.clone(), complete.clone()], Some(7)),
    ];
    for (name, pieces, prompt_tokens) in rows {
        let world = Setup::default().build();
        let mut exchange = world.exchange();
        let pairs = [(":path", "/vllm.grpc.engine.VllmEngine/Generate"), ("content-type", "application/grpc")];
        send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false))));
        send(&mut exchange, request(Message::RequestBody(body(&frame(&field(3, b"t")), true))));
        let pairs = [(":status", "200"), ("content-type", "application/grpc")];
        send(&mut exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
        for piece in pieces {
            let got = Answered::of(&send(&mut exchange, request(Message::ResponseBody(body(piece, false)))));
            assert_eq!((&got.body, got.ended), (piece, 0), "{name}");
        }
        let got = send(&mut exchange, request(Message::ResponseTrailers(HttpTrailers::default())));
        assert_eq!(Answered::of(&got).kinds, ["response_trailers"], "{name}");
        let record = world.processor.decisions.snapshot().pop().unwrap();
        assert_eq!((record.end, record.prompt_tokens), ("complete", *prompt_tokens), "{name}");
    }
}

#[test]
fn model_list_is_answered_by_attache_if_known() {
    let exchange = ExchangeSettings { models: ModelsAnswer::Pool, ..ExchangeSettings::default() };
    let world = Setup { exchange, ..Setup::default() }.build();
    let ask = |method: &str, path: &str, end: bool| {
        let pairs = [(":path", path), (":method", method)];
        Answered::of(&send(&mut world.exchange(), request(Message::RequestHeaders(headers(&pairs, end)))))
    };
    assert_eq!(ask("GET", "/v1/models", true).kinds, ["request_headers"], "no models are known yet");
    let list = ModelList::read(br#"{"data":[{"id":"b"},{"id":"a","root":"x"}]}"#).unwrap();
    world.processor.picker.config().router.pools()[0].models.store(list);
    let body = |answered: Answered| answered.refused.unwrap();
    assert_eq!(
        body(ask("GET", "/v1/models", true)),
        (200, r#"{"data":[{"id":"a","root":"x"},{"id":"b"}],"object":"list"}"#.into())
    );
    assert_eq!(
        body(ask("GET", "/v1/models/a", false)),
        (200, r#"{"id":"a","root":"x"}"#.into()),
        "a body that comes is ignored"
    );
    assert_eq!(body(ask("GET", "/v1/models/c", true)).0, 404);
    assert_eq!(ask("DELETE", "/v1/models/a", true).kinds, ["request_headers"], "a server's to do");
    assert_eq!(world.processor.metrics.outcomes.get(StreamOutcome::Answered), 2);
    world.assert_books_closed(5);
}
