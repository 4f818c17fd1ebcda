use super::*;
use attache_protocol::edit::EditError;
use serde_json::{Map, Value, json};
use std::borrow::Cow;

mod recordings;
mod shapes;

/// A request on its way from a prefill server at 10.0.0.7.
fn leg(api: LegApi, body: &[u8]) -> Leg<'_> {
    Leg {
        api,
        body,
        prefill_host: "10.0.0.7",
        prefill_address: "10.0.0.7:8000".parse().unwrap(),
        bootstrap_port: sglang::DEFAULT_BOOTSTRAP_PORT,
        room: 42,
        request_id: "req-1",
        carried: None,
    }
}

fn map(body: &[u8]) -> Map<String, Value> {
    serde_json::from_slice(body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(body)))
}

fn connector(name: &str) -> &'static dyn Connector {
    named(name).unwrap().connector
}

#[test]
fn connector_names_are_unique() {
    let mut names = Vec::new();
    for descriptor in CONNECTORS {
        assert_eq!(descriptor.name, descriptor.connector.name());
        assert!(!descriptor.summary.is_empty() && !descriptor.source.is_empty());
        for name in std::iter::once(&descriptor.name).chain(descriptor.aliases) {
            assert!(name.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-'), "{name}");
            assert_eq!(named(name).map(|found| found.name), Some(descriptor.name));
            names.push(*name);
        }
    }
    let mut sorted: Vec<_> = CONNECTORS.iter().map(|d| d.name).collect();
    sorted.sort_unstable();
    assert!(CONNECTORS.iter().map(|d| d.name).eq(sorted), "listed by name");
    names.sort_unstable();
    let all = names.len();
    names.dedup();
    assert_eq!(names.len(), all);
    assert!(named("mooncake").is_none());
}

#[test]
fn requests_with_several_prompts_or_choices_not_split() {
    use LegApi::*;
    for (api, body, field, several) in [
        (ChatCompletions, r#"{"n":2}"#, Some("n"), true),
        (ChatCompletions, r#"{"n":1}"#, None, true),
        (ChatCompletions, r#"{"n":null,"best_of":1}"#, None, true),
        (Completions, r#"{"prompt":"a","best_of":3}"#, Some("best_of"), true),
        (Completions, r#"{"prompt":["a","b"]}"#, Some("prompt"), true),
        (Completions, r#"{"prompt":[[1,2] , [3]]}"#, Some("prompt"), true),
        (Completions, r#"{"prompt":["a"]}"#, None, true),
        (Completions, r#"{"prompt":[[1,2]]}"#, None, true),
        (Completions, r#"{"prompt":[1,2,3]}"#, None, true),
        (Completions, r#"{"prompt":[]}"#, None, true),
        (Completions, r#"{"prompt_embeds":"AAAA"}"#, Some("prompt_embeds"), true),
        (Completions, r#"{"prompt":"a","prompt_embeds":["AAAA","AAAA"]}"#, Some("prompt_embeds"), true),
        (Completions, r#"{"prompt":"a","prompt_embeds":null}"#, None, true),
        (Completions, r#"{"prompt":"[\"a\",\"b\"]"}"#, None, true),
        (Completions, r#"{"use_beam_search":true}"#, Some("use_beam_search"), true),
        (Generate, r#"{"sampling_params":{"n":4}}"#, Some("n"), true),
        (Generate, r#"{"n":4,"sampling_params":null}"#, None, true),
        (Messages, r#"{"n":4}"#, None, true),
        (ChatCompletions, r#"{"prompt_logprobs":0}"#, Some("prompt_logprobs"), false),
        (ChatCompletions, r#"{"prompt_logprobs":null}"#, None, false),
        (Completions, r#"{"echo":true,"logprobs":1}"#, Some("echo"), false),
        (Completions, r#"{"echo":true}"#, None, false),
        (Completions, r#"{"echo":false,"logprobs":1}"#, None, false),
        (Responses, r#"{"previous_response_id":"resp_1"}"#, Some("previous_response_id"), false),
        (Responses, r#"{"conversation":{"id":"c"}}"#, Some("conversation"), false),
        (Responses, r#"{"previous_response_id":null,"conversation":null}"#, None, false),
        (ChatCompletions, r#"{"conversation":"c"}"#, None, false),
        (Responses, r#"{"tools":[{"type":"function","name":"f"},{"type":"code_interpreter"}]}"#, Some("tools"), true),
        (Responses, r#"{"tools":[{"server_label":"s","type":"mcp"}]}"#, Some("tools"), true),
        (Responses, r#"{"tools":[{"name":"f","type":"function"}]}"#, None, true),
        (Responses, r#"{"tools":[],"truncation":"disabled"}"#, None, true),
        (Responses, r#"{"tools":null,"truncation":null}"#, None, true),
        (Responses, r#"{"truncation":"auto"}"#, Some("truncation"), true),
        (ChatCompletions, r#"{"tools":[{"type":"custom"}],"truncation":"auto"}"#, None, true),
        (ChatCompletions, r#"{"truncate_prompt_tokens":-1}"#, Some("truncate_prompt_tokens"), true),
        (Completions, r#"{"prompt":"a","truncate_prompt_tokens":7}"#, None, true),
        (Generate, r#"{"sampling_params":{"truncate_prompt_tokens":-1}}"#, Some("truncate_prompt_tokens"), true),
    ] {
        for descriptor in CONNECTORS.iter().filter(|d| d.connector.speaks(api)) {
            // SGLang counts rooms itself, and a shared store needs no rooms.
            let takes_several = several && matches!(descriptor.name, "sglang" | "shared-storage");
            let got = match descriptor.connector.prefill_body(&leg(api, body.as_bytes())) {
                Ok(_) => None,
                Err(LegError::Unsplittable { field, .. }) => Some(field),
                Err(other) => panic!("{other}"),
            };
            assert_eq!(got, field.filter(|_| !takes_several), "{}: {body}", descriptor.name);
        }
    }
}

/// A server that is to make a call of a single token fails on it; one whose token is the answer's first must make
/// it as it was asked.
#[test]
fn prefill_leg_has_no_forced_tool_call() {
    use LegApi::*;
    for (api, choice, goes) in [
        (ChatCompletions, r#""required""#, true),
        (ChatCompletions, r#"{"type":"function","function":{"name":"f"}}"#, true),
        (ChatCompletions, r#""auto""#, false),
        (ChatCompletions, r#""none""#, false),
        (ChatCompletions, "null", false),
        (Messages, r#"{"name":"f", "type": "tool"}"#, true),
        (Messages, r#"{"type":"any"}"#, true),
        (Messages, r#"{"type":"none"}"#, false),
        (Responses, r#""required""#, true),
        (Responses, r#"{"type":"function","name":"f"}"#, true),
    ] {
        let body = format!(r#"{{"model":"m","tools":[{{"type":"function"}}],"tool_choice":{choice}}}"#);
        for descriptor in CONNECTORS.iter().filter(|d| d.connector.speaks(api)) {
            let goes = goes && !matches!(descriptor.name, "sglang" | "trtllm" | "neuron-nixl");
            let leg = map(&descriptor.connector.prefill_body(&leg(api, body.as_bytes())).unwrap());
            assert_eq!(leg.contains_key("tool_choice"), !goes, "{}: {body}", descriptor.name);
            assert!(leg.contains_key("tools"), "they stand in the prompt");
        }
    }
}

#[test]
fn sidecar_gets_only_splittable_requests() {
    use LegApi::*;
    for (api, body, given) in [
        (ChatCompletions, r#"{"messages":[],"n":1}"#, true),
        (ChatCompletions, r#"{"tool_choice":"auto"}"#, true),
        (ChatCompletions, r#"{"tool_choice":"required"}"#, false),
        (ChatCompletions, r#"{"tool_choice":{"type":"function","function":{"name":"f"}}}"#, false),
        (Completions, r#"{"prompt":"a","best_of":3}"#, false),
        (Completions, r#"{"prompt":"a","use_beam_search":true}"#, false),
        (Completions, r#"{"prompt":"a","truncate_prompt_tokens":-1}"#, false),
        (Responses, r#"{"tools":[{"type":"web_search_preview"}]}"#, false),
        (Responses, "no JSON", false),
    ] {
        assert_eq!(crate::is_for_sidecars(api, body.as_bytes()), given, "{body}");
    }
}

#[test]
fn sglang_room_gives_both_workers_their_rank() {
    let body = br#"{"prompt":"a","routed_dp_rank":3,"data_parallel_rank":3,"disagg_prefill_dp_rank":5}"#;
    let leg = leg(LegApi::Completions, body);
    let sglang = connector("sglang");
    for body in [sglang.prefill_body(&leg).unwrap(), sglang.decode_body(&leg, None).unwrap().body.into_owned()] {
        assert!(map(&body).keys().all(|name| !name.ends_with("rank")), "{body:?}");
    }
}

#[test]
fn unsupported_api_is_rejected_by_connector() {
    for descriptor in CONNECTORS {
        for api in LegApi::ALL {
            let spoken = descriptor.connector.speaks(*api);
            let refused = descriptor.connector.prefill_body(&leg(*api, b"{}"))
                == Err(LegError::Api { connector: descriptor.name, api: *api });
            assert_eq!(refused, !spoken, "{} {api:?}", descriptor.name);
            let reply = br#"{"kv_transfer_params":{},"disaggregated_params":{}}"#;
            let decode = descriptor.connector.decode_body(&leg(*api, b"{}"), Some(reply));
            assert_eq!(decode.is_ok(), spoken, "{} {api:?}", descriptor.name);
        }
    }
}

#[test]
fn invalid_bodies_and_replies_are_errors() {
    let api = LegApi::Completions;
    for connector in CONNECTORS.iter().map(|d| d.connector) {
        for body in [&b""[..], b"[1]", b"null", b"{", b"{\"a\":1}x"] {
            let error = connector.prefill_body(&leg(api, body)).unwrap_err();
            assert!(matches!(error, LegError::Request(_)) && !error.retryable(), "{error}");
        }
        for reply in [&b""[..], b"[]", b"data: {}\n\n"] {
            let error = connector.decode_body(&leg(api, b"{}"), Some(reply)).unwrap_err();
            assert!(matches!(error, LegError::Reply(_)) && error.retryable(), "{error}");
        }
        let needs_reply = !matches!(connector.name(), "sglang" | "shared-storage");
        let missing = connector.decode_body(&leg(api, b"{}"), None);
        assert_eq!(missing == Err(LegError::NoReply { connector: connector.name() }), needs_reply);
        let aborted = br#"{"choices":[{"finish_reason":"abort"}],"kv_transfer_params":{},"disaggregated_params":{}}"#;
        let aborted = connector.decode_body(&leg(api, b"{}"), Some(aborted));
        // SGLang's decode leg is sent before there is a reply.
        let expected = LegError::NotFinished { got: "abort".to_owned() };
        assert_eq!(aborted == Err(expected), connector.name() != "sglang");
    }
}

#[test]
fn content_addressed_blocks_are_not_pinned() {
    let told = br#"{"kv_transfer_params":{"a":1},"disaggregated_params":{"a":1}}"#;
    for ConnectorDescriptor { name, connector, .. } in CONNECTORS {
        assert_eq!(connector.pins(LegApi::Completions, told), *name != "shared-storage", "{name}");
    }
    for reply in ["{}", r#"{"kv_transfer_params":null}"#, "no JSON"] {
        assert!(!connector("shfs").pins(LegApi::Completions, reply.as_bytes()), "{reply}");
    }
}

#[test]
fn replies_without_transfer_params() {
    let decode = |name, reply: &str| {
        connector(name).decode_body(&leg(LegApi::Completions, b"{\"a\":1}"), Some(reply.as_bytes()))
    };
    for reply in ["{}", r#"{"kv_transfer_params":null,"disaggregated_params":null}"#, r#"{"choices":[{"text":"a"}]}"#] {
        assert_eq!(decode("nixl", reply), Err(LegError::NoParams { field: "kv_transfer_params" }));
        assert_eq!(decode("trtllm", reply), Err(LegError::NoParams { field: "disaggregated_params" }));
        // AIBrix: the decode server may find the blocks in the pool.
        assert_eq!(decode("shfs", reply).unwrap().body, Cow::Borrowed(b"{\"a\":1}"));
    }
    for (params, got) in [("[{}]", "an array"), ("\"x\"", "a string"), ("7", "a number or a boolean")] {
        let reply = format!(r#"{{"kv_transfer_params":{params},"disaggregated_params":{params}}}"#);
        for (name, field) in
            [("nixl", "kv_transfer_params"), ("shfs", "kv_transfer_params"), ("trtllm", "disaggregated_params")]
        {
            assert_eq!(decode(name, &reply), Err(LegError::Params { field, got }));
        }
    }
    assert!(LegError::NoParams { field: "x" }.retryable());
    assert!(!LegError::Ended.retryable());
}

#[test]
fn errors_name_value_and_allowed_values() {
    for (error, text) in [
        (LegError::Api { connector: "trtllm", api: LegApi::Generate }, "`trtllm` can't split requests of generate"),
        (LegError::Request(EditError::NotAnObject { got: "null" }), "the request: expected a JSON object, got null"),
        (LegError::NotFinished { got: "abort".to_owned() }, "the prefill ended with `abort`, expected length or stop"),
        (
            connector("nixl").prefill_body(&leg(LegApi::ChatCompletions, br#"{"n":2}"#)).unwrap_err(),
            "a request with `n` can't be split, it asks for several answers",
        ),
    ] {
        assert_eq!(error.to_string(), text);
    }
}
