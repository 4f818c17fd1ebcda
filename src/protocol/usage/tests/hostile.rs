//! Responses that repeat content of a hostile client: for any chunks, the counts equal those that a strict JSON parser
//! finds at the API's position.

use super::*;
use proptest::prelude::*;

/// JSON that a client may write and a server may repeat: every name that the scanner looks for, at every depth,
/// in values and in strings.
fn echo() -> impl Strategy<Value = Value> {
    let name = prop::sample::select(vec![
        "usage",
        "error",
        "id",
        "type",
        "code",
        "response",
        "message",
        "meta_info",
        "index",
        "input_tokens",
        "output_tokens",
        "prompt_tokens",
        "completion_tokens",
        "a\"usage\":{",
        "\\",
        "\u{1F600}",
    ]);
    let leaf = prop_oneof![
        Just(json!(null)),
        any::<u64>().prop_map(Value::from),
        Just(json!("resp_forged")),
        Just(json!("response.completed")),
        Just(json!("message_start")),
        Just(json!("error")),
        Just(json!("data: {\"usage\":{\"prompt_tokens\":0}}\n\ndata: ")),
        Just(json!("\"usage\":{\"prompt_tokens\":0,\"completion_tokens\":0},\"error\":{\"code\":429}")),
        r#"[\\"{}\[\]:,\n\r/é😀]{0,12}"#.prop_map(Value::from),
        (0usize..150).prop_map(|n| json!("\\\"".repeat(n))),
        (any::<u32>(), any::<u32>()).prop_map(|(prompt, completion)| json!({"usage": {
            "prompt_tokens": prompt, "completion_tokens": completion, "input_tokens": 0, "output_tokens": 0,
        }})),
        Just(json!({"error": {"code": 429, "message": "busy", "type": "rate_limit_error"}})),
    ];
    leaf.prop_recursive(4, 40, 4, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(name.clone(), inner, 0..4)
                .prop_map(|map| map.into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<Value>()),
        ]
    })
}

/// The usage that the server itself reports.
fn reported() -> impl Strategy<Value = Value> {
    let counts = (any::<u32>(), any::<u32>(), any::<u32>());
    prop_oneof![
        counts.prop_map(|(prompt, completion, cached)| json!({
            "prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached},
        })),
        counts.prop_map(|(prompt, completion, cached)| json!({
            "input_tokens": prompt, "output_tokens": completion, "input_tokens_details": {"cached_tokens": cached},
        })),
        Just(json!(null)),
        Just(json!({"prompt_tokens": -1})),
        Just(json!({"prompt_tokens": "12", "completion_tokens": 3.0, "prompt_tokens_details": "none"})),
        Just(json!({"input_tokens": 1.5, "output_tokens": "seven", "input_tokens_details": [{"cached_tokens": 2}]})),
    ]
}

/// Members in a random order, as a server writes them; repeated client content has names of its own.
fn object(members: Vec<(&'static str, Value)>, order: usize) -> String {
    let count = members.len();
    let member = |(name, value): &(&str, Value)| format!("{}:{value}", json!(name));
    let members: Vec<_> = members.iter().cycle().skip(order % count).take(count).map(member).collect();
    format!("{{{}}}", members.join(","))
}

fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn counts(usage: &Value) -> Option<Counts> {
    serde_json::from_value::<Option<Counts>>(usage.clone()).ok().flatten()
}

/// The result of a strict parser at the positions of `api`: counts, the status of the error, the id.
fn strict(api: Api, format: AnswerFormat, documents: &[Value]) -> (Option<Usage>, Option<u16>, Option<String>) {
    let (mut total, mut error, mut id) = (Counts::default(), None, None);
    for document in documents {
        let kind = document.get("type").and_then(Value::as_str);
        let ended = matches!(kind, Some("response.completed" | "response.incomplete" | "response.failed"));
        let begun = matches!(kind, Some("response.created" | "response.in_progress"));
        let inner = &document["response"];
        let (usage, failed, named) = match (api, format) {
            (_, AnswerFormat::Json) => (&document["usage"], &Value::Null, &document["id"]),
            (Api::Messages, _) => {
                let usage = match kind {
                    Some("message_start") => &document["message"]["usage"],
                    Some("message_delta") => &document["usage"],
                    _ => &Value::Null,
                };
                (usage, &document["error"], &Value::Null)
            }
            (Api::Responses, _) => (
                if ended { &inner["usage"] } else { &Value::Null },
                if ended { &inner["error"] } else { &Value::Null },
                if ended || begun { &inner["id"] } else { &Value::Null },
            ),
            _ => (&document["usage"], &document["error"], &Value::Null),
        };
        if let Some(counts) = counts(usage) {
            total.merge(&counts);
        }
        let failed = failed.as_object().and_then(|_| StreamError::read(failed.to_string().as_bytes()));
        error = error.or(failed.map(|error| error.status));
        let named = named.as_str().filter(|id| id.starts_with("resp_") && api == Api::Responses);
        id = id.or(named.map(str::to_owned));
    }
    (total.total(), error, id)
}

/// The documents of one response, with `echoes` where servers repeat client content.
fn documents(
    api: Api,
    format: AnswerFormat,
    echoes: &[Value],
    usages: &[Value],
    order: usize,
    failed: bool,
) -> Vec<String> {
    let echo = |at: usize| echoes.get(at % echoes.len()).cloned().unwrap_or_default();
    let usage = |at: usize| usages.get(at % usages.len()).cloned().unwrap_or_default();
    let id = || json!("resp_real");
    let failure = if failed { json!({"code": "server_error", "message": "m"}) } else { json!(null) };
    let whole = |at: usize, error: &Value| {
        value(&object(
            vec![
                ("id", id()),
                ("tools", json!([echo(at), {"parameters": echo(at + 1)}])),
                ("metadata", echo(at + 2)),
                ("usage", usage(at)),
                ("error", error.clone()),
                ("output", json!([{"content": [{"text": echo(at).to_string()}], "arguments": echo(at + 1)}])),
            ],
            order,
        ))
    };
    let event = |kind: &str, members: Vec<(&'static str, Value)>| {
        let mut members = members;
        members.push(("type", json!(kind)));
        object(members, order)
    };
    match (api, format) {
        (_, AnswerFormat::Json) => vec![whole(0, &json!(null)).to_string()],
        (Api::Responses, _) => vec![
            event("response.created", vec![("response", whole(0, &json!(null)))]),
            event("response.output_item.done", vec![("item", echo(1)), ("response", echo(2)), ("usage", usage(0))]),
            event("response.completed", vec![("response", whole(1, &failure)), ("item", echo(3))]),
        ],
        (Api::Messages, _) => {
            let mut events = vec![
                event("message_start", vec![("message", json!({"content": [echo(0)], "usage": usage(0)}))]),
                event(
                    "content_block_start",
                    vec![("content_block", json!({"type": "tool_use", "input": echo(1)})), ("message", echo(2))],
                ),
                event("message_delta", vec![("delta", echo(3)), ("usage", usage(1))]),
            ];
            if failed {
                events.push(event("error", vec![("error", json!({"type": "overloaded_error", "message": "m"}))]));
            }
            events
        }
        _ => {
            let mut events = vec![
                object(
                    vec![
                        ("choices", json!([{"delta": {"tool_calls": [echo(0)], "content": echo(1).to_string()}}])),
                        ("usage", json!(null)),
                    ],
                    order,
                ),
                object(vec![("choices", json!([])), ("usage", usage(0)), ("system_fingerprint", echo(2))], order),
            ];
            if failed {
                events.push(object(vec![("error", json!({"code": 503, "message": "m"}))], order));
            }
            events
        }
    }
}

/// `ends` ends a line; a text of two line ends alternates between them.
fn stream(documents: &[String], names: bool, ends: &str, mark: bool) -> String {
    let name = |document: &str| value(document)["type"].as_str().map(|kind| format!("event: {kind}\n"));
    let event = |document: &String| {
        let name = names.then(|| name(document)).flatten().unwrap_or_default();
        format!(": {{\"usage\":{{\"prompt_tokens\":0}}}}\n{name}data: {document}\n\n")
    };
    let text: String = documents.iter().map(event).collect();
    let text = text + "data: [DONE]\n\n";
    let mut both = ends.split(' ').cycle();
    let lines = text.split_inclusive('\n').map(|line| line.replace('\n', both.next().unwrap_or_default()));
    [if mark { "\u{feff}" } else { "" }].into_iter().map(str::to_owned).chain(lines).collect()
}

proptest! {
    #[test]
    fn hostile_content_changes_no_result(
        echoes in prop::collection::vec(echo(), 1..5),
        usages in prop::collection::vec(reported(), 1..3),
        which in 0usize..8,
        order: usize,
        failed: bool,
        names: bool,
        ends in prop::sample::select(vec!["\n", "\r\n", "\r", "\r\n \r", "\n \r\n"]),
        mark: bool,
        sizes in prop::collection::vec(1usize..300, 1..6),
    ) {
        let api = [Api::Responses, Api::Messages, Api::ChatCompletions, Api::Completions][which / 2];
        let format = if which % 2 == 0 { AnswerFormat::Json } else { AnswerFormat::Events };
        let documents = documents(api, format, &echoes, &usages, order, failed);
        let text = match format {
            AnswerFormat::Json => documents.concat(),
            AnswerFormat::Events => stream(&documents, names, ends, mark),
        };
        let watch = Watch { errors: format == AnswerFormat::Events, response_id: api == Api::Responses };
        let (mut cut, mut whole) = (UsageScanner::new(api, format, watch), UsageScanner::new(api, format, watch));
        whole.push(text.as_bytes());
        let (mut rest, mut sizes) = (text.as_bytes(), sizes.iter().cycle());
        while !rest.is_empty() {
            let (chunk, after) = rest.split_at((*sizes.next().unwrap()).min(rest.len()));
            cut.push(chunk);
            rest = after;
        }
        let documents: Vec<_> = documents.iter().map(|document| value(document)).collect();
        let (usage, error, id) = strict(api, format, &documents);
        for (scanner, how) in [(whole, "whole"), (cut, "cut")] {
            prop_assert_eq!(scanner.usage(), usage, "{} {}", how, text);
            prop_assert_eq!(scanner.error().map(|error| error.status), error, "{} {}", how, text);
            prop_assert_eq!(scanner.response_id(), id.as_deref(), "{} {}", how, text);
        }
    }

    #[test]
    fn counts_of_sglang_are_those_of_meta_info(
        echoes in prop::collection::vec(echo(), 1..4),
        counts in prop::collection::vec((any::<u32>(), any::<u32>()), 1..4),
        events: bool,
        size in 1usize..200,
    ) {
        let echo = |at: usize| echoes[at % echoes.len()].clone();
        let answer = |(at, (prompt, completion)): (usize, &(u32, u32))| json!({
            "text": echo(at).to_string(), "index": at, "output": echo(at),
            "meta_info": {"weights": echo(at + 1), "prompt_tokens": prompt, "completion_tokens": completion, "finish": echo(at + 2)},
        });
        let answers: Vec<Value> = counts.iter().enumerate().map(answer).collect();
        let (format, text) = if events {
            let grows = |answer: &Value| {
                let mut before = answer.clone();
                before["meta_info"]["completion_tokens"] = 0.into();
                format!("data: {before}\n\ndata: {answer}\n\n")
            };
            (AnswerFormat::Events, answers.iter().map(grows).collect())
        } else {
            (AnswerFormat::Json, json!(answers).to_string())
        };
        let mut scanner = UsageScanner::new(Api::SglangGenerate, format, Watch::default());
        text.as_bytes().chunks(size).for_each(|chunk| scanner.push(chunk));
        let sum = |of: fn(&(u32, u32)) -> u32| counts.iter().map(|count| u64::from(of(count))).sum::<u64>();
        let expected = Usage { prompt_tokens: Some(sum(|c| c.0)), completion_tokens: Some(sum(|c| c.1)), cached_tokens: None };
        prop_assert_eq!(scanner.usage(), Some(expected), "{}", text);
    }
}
