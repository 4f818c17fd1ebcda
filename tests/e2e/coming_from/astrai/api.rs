//! Behaviour that AstrAI documents and every simulated server has.

use super::super::{Here, rows};
use super::*;

rows! { ROWS;
    a_chat_completion_has_the_documented_fields:
    "`POST /v1/chat/completions`", "`id` chatcmpl-…, `object`, `created`, `model`, `choices`, `usage`", Here::Same => {
        let (_sim, to) = server(&[]).await;
        let reply = chat(to, json!({})).await;
        let body = reply.json();
        assert_eq!((reply.status.as_u16(), &body["object"], &body["model"]), (200, &json!("chat.completion"), &json!("astrai")));
        assert!(body["id"].as_str().is_some_and(|id| id.starts_with("chatcmpl-")) && body["created"].is_u64(), "{body}");
        let choice = &body["choices"][0];
        assert_eq!((&choice["index"], &choice["message"]["role"]), (&json!(0), &json!("assistant")));
        assert!(choice["message"]["content"].is_string() && choice["finish_reason"].is_string(), "{body}");
        let usage = &body["usage"];
        let sum = usage["prompt_tokens"].as_u64().unwrap_or(0) + usage["completion_tokens"].as_u64().unwrap_or(0);
        assert_eq!((&usage["total_tokens"], &usage["completion_tokens"]), (&json!(sum), &json!(4)));
    }

    a_stream_begins_with_the_role_and_ends_with_the_usage:
    "`stream: true`", "role delta, token chunks, finish chunk with usage, `data: [DONE]`", Here::Same => {
        let (_sim, to) = server(&[]).await;
        let reply = chat(to, json!({"stream": true})).await;
        let chunks = events(&reply);
        assert_eq!(chunks.len(), 6);
        assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk"));
        assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
        assert!(chunks[1..5].iter().all(|chunk| chunk["choices"][0]["delta"]["content"].is_string()));
        assert_eq!((&chunks[5]["choices"][0]["delta"], &chunks[5]["usage"]["completion_tokens"]), (&json!({}), &json!(4)));
        assert!(chunks[5]["choices"][0]["finish_reason"].is_string());
        let text = String::from_utf8_lossy(&reply.body).into_owned();
        assert!(text.ends_with("\n\ndata: [DONE]\n\n"), "{text}");
    }

    anthropic_messages_get_a_response:
    "`POST /v1/messages`", "Anthropic's API, with `system`", Here::Same => {
        let (_sim, to) = server(&[]).await;
        let reply = post(to, "/v1/messages", hello(json!({"model": "astrai", "system": "You are helpful."}))).await;
        let body = reply.json();
        assert_eq!((reply.status.as_u16(), &body["role"], &body["type"]), (200, &json!("assistant"), &json!("message")));
        assert_eq!((&body["content"][0]["type"], &body["stop_reason"]), (&json!("text"), &json!("max_tokens")));
        assert!(body["id"].as_str().is_some_and(|id| id.starts_with("msg_")), "{body}");
    }

    anthropic_streams_have_their_events_in_order:
    "a stream of `/v1/messages`", "`message_start`, `content_block_start`, `content_block_delta`, `content_block_stop`, \
     `message_delta`, `message_stop`", Here::Same => {
        let (_sim, to) = server(&[]).await;
        let reply = post(to, "/v1/messages", hello(json!({"model": "astrai", "stream": true}))).await;
        let events = events(&reply);
        let kinds: Vec<&str> = events.iter().filter_map(|event| event["type"].as_str()).collect();
        let deltas = ["content_block_delta"; 4];
        let want = [&["message_start", "content_block_start"], &deltas[..], &["content_block_stop", "message_delta", "message_stop"]];
        assert_eq!(kinds, want.concat());
        assert_eq!((&events[0]["message"]["content"], &events[0]["message"]["stop_reason"]), (&json!([]), &Value::Null));
        assert_eq!(events[2]["delta"]["type"], "text_delta");
        assert!(String::from_utf8_lossy(&reply.body).starts_with("event: message_start\ndata: "));
    }

    stop_sequences_end_the_response:
    "`stop_sequences`", "the answer ends before the text, with the reason `stop_sequence`", Here::Same => {
        let (_sim, to) = server(&[]).await;
        let whole = post(to, "/v1/messages", hello(json!({"max_tokens": 8}))).await.json();
        let text = whole["content"][0]["text"].as_str().expect("a text").to_owned();
        let stop = text.get(9..13).expect("ASCII").to_owned();
        let before = text.find(&stop).expect("the text");
        let cut = post(to, "/v1/messages", hello(json!({"max_tokens": 8, "stop_sequences": [stop]}))).await.json();
        assert_eq!((&cut["content"][0]["text"], &cut["stop_reason"]), (&json!(text[..before]), &json!("stop_sequence")));
    }

    response_without_max_tokens_ends_by_itself:
    "no `max_tokens`", "`None`: the model decides", Here::Same => {
        let (_sim, to) = server(&["--output-tokens", "7"]).await;
        let body = chat(to, json!({"max_tokens": null})).await.json();
        assert_eq!((&body["usage"]["completion_tokens"], &body["choices"][0]["finish_reason"]), (&json!(7), &json!("stop")));
    }

    health_reports_a_loaded_model:
    "`GET /health`", r#"`{"status":"ok","model_loaded":true}`"#, Here::Same => {
        let (_sim, to) = server(&[]).await;
        let reply = client::get(to, "/health").await.expect("an answer");
        assert_eq!((reply.status.as_u16(), reply.json()), (200, json!({"status": "ok", "model_loaded": true})));
    }

    stats_have_the_documented_names:
    "`GET /stats`", "`active_requests`, `waiting_requests`, `total_requests`, `cache_usage` (0 to 1), `tokens_generated`", Here::Same => {
        let (_sim, to) = server(&[]).await;
        chat(to, json!({})).await;
        let stats = client::get(to, "/stats").await.expect("an answer").json();
        let usage = stats["cache_usage"].as_f64().expect("a number");
        assert!((0.0..=1.0).contains(&usage), "{stats}");
        let want = json!({"active_requests": 0, "waiting_requests": 0, "total_requests": 1, "cache_usage": usage, "tokens_generated": 4});
        assert_eq!(stats, want);
    }

    errors_have_the_documented_statuses_and_body:
    "error statuses and body", "400, 405, 422, 500 and 503; `{\"error\": {\"message\", \"type\", \"code\"}}`", Here::Same => {
        let (_sim, to) = documented().await;
        let refused = async |body: &'static str| client::post(to, "/v1/chat/completions", body.into()).await.expect("an answer");
        for (reply, status) in [
            (refused("{").await, 400),
            (refused("{}").await, 400),
            (client::get(to, "/v1/messages").await.expect("an answer"), 405),
            (refused(r#"{"messages":"Hello"}"#).await, 422),
        ] {
            assert_eq!((reply.status.as_u16(), &reply.json()["error"]["code"]), (status, &json!(status)));
            assert_eq!(reply.json()["error"]["type"], "invalid_request_error");
        }
        post(to, "/sim/faults", json!({"fail_next": {"count": 1, "status": 500}})).await;
        assert_eq!(chat(to, json!({})).await.status, 500);
        post(to, "/sim/faults", json!({"refuse": true})).await;
        assert_eq!(chat(to, json!({})).await.status, 503);
    }

    scheduler_is_that_of_vllm:
    "the scheduler: cleanup, refill, prefill by groups, decode of the largest group", "a loop of four phases", Here::Differs {
        default: "`attache sim` schedules as vLLM does, with every `--quirks`",
        exact: "not offered: measure timing with a real AstrAI",
    } => {
        let help = std::process::Command::new(env!("CARGO_BIN_EXE_attache")).args(["sim", "--help"]).output().expect("help");
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        assert!(help.contains("AstrAI's loop of four phases"), "{help}");
    }
}
