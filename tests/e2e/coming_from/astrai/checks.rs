//! Requests that AstrAI rejects. By default `attache sim` rejects what vLLM rejects.

use super::super::{Here, rows};
use super::*;

/// How to get the behaviour of AstrAI's documentation.
const EXACT: &str = "`attache sim --quirks astrai-documented`";

/// Checks status and message for each value of a field. A default server accepts the `lenient` values.
async fn refusals(field: &str, cases: &[(Value, u16)], lenient: &[Value]) {
    let (_sim, to) = documented().await;
    for (value, status) in cases {
        let reply = chat(to, json!({field: value})).await;
        assert_eq!(reply.status.as_u16(), *status, "{field}: {value}: {}", String::from_utf8_lossy(&reply.body));
        assert_eq!(error(&reply).1.contains(field), *status != 200, "{field}: {value}");
    }
    let (_sim, to) = server(&[]).await;
    for value in lenient {
        assert_eq!(chat(to, json!({field: value})).await.status, 200, "{field}: {value}");
    }
}

rows! { ROWS;
    temperature_is_above_zero:
    "`temperature`", "> 0 up to 2; else 400, or 422 for another type",
    Here::Differs { default: "0 is accepted, as by vLLM: it is greedy sampling", exact: EXACT } => {
        let cases = [(json!(0), 400), (json!(-1), 400), (json!(2.5), 400), (json!("1"), 422), (json!(0.1), 200), (json!(2), 200)];
        refusals("temperature", &cases, &[json!(0), json!(1)]).await;
    }

    top_p_is_between_0_and_1:
    "`top_p`", "0 to 1; else 400, or 422 for another type",
    Here::Differs { default: "not read", exact: EXACT } => {
        refusals("top_p", &[(json!(1.1), 400), (json!(-0.1), 400), (json!([1]), 422), (json!(0.9), 200)], &[json!(1.1)]).await;
    }

    top_k_is_at_least_one:
    "`top_k`", "an integer of at least 1; else 400, or 422 for another type",
    Here::Differs { default: "not read", exact: EXACT } => {
        refusals("top_k", &[(json!(0), 400), (json!(1.5), 422), (json!("50"), 422), (json!(50), 200)], &[json!(-1)]).await;
    }

    max_tokens_has_the_documented_message:
    "`max_tokens: 0`", "400, \"Invalid request: max_tokens must be > 0\"",
    Here::Differs { default: "400 in vLLM's words", exact: EXACT } => {
        let (_sim, to) = documented().await;
        let reply = chat(to, json!({"max_tokens": 0})).await;
        let want = json!({"message": "Invalid request: max_tokens must be > 0", "type": "invalid_request_error", "code": 400});
        assert_eq!((reply.status.as_u16(), reply.json()), (400, json!({"error": want})));
        let (_sim, to) = server(&[]).await;
        assert_eq!(error(&chat(to, json!({"max_tokens": 0})).await).0, 400);
    }

    messages_require_content:
    "a message without `content`", "400: the field is required",
    Here::Differs { default: "accepted, as by vLLM: a message of the assistant may be a tool call", exact: EXACT } => {
        let without = json!({"messages": [{"role": "user"}]});
        let (_sim, to) = documented().await;
        for path in ["/v1/chat/completions", "/v1/messages"] {
            let reply = post(to, path, hello(without.clone())).await;
            assert_eq!(error(&reply), (400, "Invalid request: messages: content is required".to_owned()));
        }
        let (_sim, to) = server(&[]).await;
        assert_eq!(chat(to, without).await.status, 200);
    }

    stream_is_a_boolean:
    "`stream`", "a boolean; else 422", Here::Same => {
        let (_sim, to) = server(&[]).await;
        assert_eq!(chat(to, json!({"stream": "yes"})).await.status, 422);
        let (_sim, to) = documented().await;
        assert_eq!(chat(to, json!({"stream": "yes"})).await.status, 422);
    }

    tool_choice_makes_the_model_call_the_tool:
    "`tools` and `tool_choice` (Anthropic: `any`, `tool`)", "a tool call, with the reason `tool_calls` or `tool_use`", Here::Same => {
        let (_sim, to) = server(&[]).await;
        let tools = json!([{"type": "function", "function": {"name": "first"}}, {"type": "function", "function": {"name": "second"}}]);
        let named = json!({"type": "function", "function": {"name": "second"}});
        let tool_request = |choice: &Value, stream: bool| json!({"tools": tools, "tool_choice": choice, "max_tokens": 9, "stream": stream});
        // This server ends responses by itself: a response that `max_tokens` cuts ends with `length`.
        let (_short, short) = server(&["--output-tokens", "4"]).await;
        for (choice, name) in [(json!("required"), "first"), (named.clone(), "second")] {
            let choices = chat(short, tool_request(&choice, false)).await.json()["choices"][0].clone();
            let call = &choices["message"]["tool_calls"][0]["function"];
            assert_eq!((&choices["finish_reason"], &call["name"]), (&json!("tool_calls"), &json!(name)));
            let arguments = call["arguments"].as_str().expect("arguments").to_owned();
            assert!(serde_json::from_str::<Value>(&arguments).is_ok_and(|a| a["text"].is_string()), "{arguments}");
            let deltas = events(&chat(short, tool_request(&choice, true)).await);
            let calls = deltas.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["tool_calls"][0].as_object());
            let streamed: String = calls.filter_map(|call| call["function"]["arguments"].as_str()).collect();
            assert_eq!(streamed, arguments, "the same in a stream");
        }
        let absent = json!({"type": "function", "function": {"name": "third"}});
        assert_eq!(chat(to, tool_request(&absent, false)).await.status, 400);
        let auto = chat(to, tool_request(&json!("auto"), false)).await.json();
        assert!(auto["choices"][0]["message"]["content"].is_string(), "{auto}");

        let tools = json!([{"name": "first", "input_schema": {}}]);
        for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "first"})] {
            let body = hello(json!({"tools": tools, "tool_choice": choice, "max_tokens": 9}));
            let answer = post(short, "/v1/messages", body.clone()).await.json();
            assert_eq!((&answer["stop_reason"], &answer["content"][0]["name"]), (&json!("tool_use"), &json!("first")));
            let mut stream = body;
            stream["stream"] = json!(true);
            let events = events(&post(short, "/v1/messages", stream).await);
            let input: String = events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
            assert_eq!(serde_json::from_str::<Value>(&input).expect("JSON"), answer["content"][0]["input"]);
        }
    }
}
