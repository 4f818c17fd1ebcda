//! Where AstrAI's code differs from its documentation. By default `attache sim` follows the documentation.

use super::super::{Here, rows};
use super::*;

/// How to get the behaviour of AstrAI's code.
const EXACT: &str = "`attache sim --quirks astrai`";

rows! { ROWS;
    invalid_request_gets_422_with_a_list:
    "a request that is not valid", "422, `{\"detail\": […]}`",
    Here::Differs { default: "400 or 422, `{\"error\": {…}}`, as documented", exact: EXACT } => {
        let (_sim, to) = actual().await;
        for more in [json!({"temperature": 0}), json!({"max_tokens": 0}), json!({"messages": null}), json!({"top_k": "many"})] {
            let reply = chat(to, more).await;
            let detail = reply.json()["detail"].clone();
            assert_eq!(reply.status, 422, "{detail}");
            assert!(detail[0]["loc"][0] == "body" && detail[0]["msg"].is_string(), "{detail}");
        }
    }

    first_chunk_has_only_the_role:
    "the first chunk of a stream", "`delta` is `{\"role\": \"assistant\"}`",
    Here::Differs { default: "`content: \"\"` beside it, as from vLLM", exact: "`--quirks astrai`, `--quirks astrai-documented`" } => {
        for (sim, role_only) in [(actual().await, true), (documented().await, true), (server(&[]).await, false)] {
            let first = events(&chat(sim.1, json!({"stream": true})).await)[0]["choices"][0]["delta"].clone();
            assert_eq!(first == json!({"role": "assistant"}), role_only, "{first}");
        }
    }

    finish_reason_is_always_stop:
    "`finish_reason` of an answer that `max_tokens` has cut", "`stop`",
    Here::Differs { default: "`length`", exact: EXACT } => {
        let reason = async |to| chat(to, json!({})).await.json()["choices"][0]["finish_reason"].clone();
        assert_eq!(reason(actual().await.1).await, "stop");
        assert_eq!(reason(documented().await.1).await, "length");
        let (_sim, to) = actual().await;
        let chunks = events(&chat(to, json!({"stream": true})).await);
        assert!(chunks.iter().any(|chunk| chunk["choices"][0]["finish_reason"] == "stop"), "{chunks:?}");
    }

    stop_text_is_part_of_the_response:
    "`stop` of a chat completion that is no stream", "the text is part of the answer",
    Here::Differs { default: "the answer ends before it", exact: EXACT } => {
        let text = async |to, more| chat(to, more).await.json()["choices"][0]["message"]["content"].as_str().unwrap_or("").to_owned();
        let (_sim, to) = actual().await;
        let (_other, default) = server(&[]).await;
        let whole = text(to, json!({"max_tokens": 8})).await;
        let stop = whole.get(9..13).expect("ASCII").to_owned();
        let end = whole.find(&stop).expect("the text");
        let stop_request = || json!({"max_tokens": 8, "stop": stop});
        assert_eq!(text(to, stop_request()).await, whole[..end + 4]);
        assert_eq!(text(default, stop_request()).await, whole[..end]);
    }

    events_lack_blank_lines_and_usage_is_its_own_event:
    "streams", "events end with one newline; the usage is an event of its own; `created` is 0; `[DONE]` after `message_stop`",
    Here::Differs { default: "as documented", exact: EXACT } => {
        let (_sim, to) = actual().await;
        let reply = chat(to, json!({"stream": true})).await;
        assert_eq!(String::from_utf8_lossy(&reply.body).matches("\n\n").count(), 1);
        let chunks = events(&reply);
        let usage = chunks.last().expect("events");
        assert!(usage.get("choices").is_none() && usage["completion_tokens"] == 4, "{usage}");
        assert_eq!(chunks[1]["created"], 0);
        let messages = post(to, "/v1/messages", hello(json!({"stream": true}))).await;
        assert!(String::from_utf8_lossy(&messages.body).ends_with("data: [DONE]\n\n"));
    }

    stats_have_the_names_of_the_code:
    "`GET /stats`", "`active_tasks`, `waiting_queue`, `total_tasks`, `total_tokens`; no `cache_usage`",
    Here::Differs { default: "as documented", exact: EXACT } => {
        let (_sim, to) = actual().await;
        chat(to, json!({})).await;
        let stats = client::get(to, "/stats").await.expect("an answer").json();
        assert_eq!(stats, json!({"total_tasks": 1, "total_tokens": 4, "active_tasks": 0, "waiting_queue": 0}));
    }

    health_without_a_model_is_200:
    "`GET /health` while no model is loaded", "200 with `model_loaded: false`; other paths 503",
    Here::Differs {
        default: "503, as from vLLM, so that health checks fail",
        exact: "`--quirks astrai` or `--quirks astrai-documented`, with the fault `refuse`",
    } => {
        for (sim, status) in [(actual().await, 200), (documented().await, 200), (server(&[]).await, 503)] {
            post(sim.1, "/sim/faults", json!({"refuse": true})).await;
            let health = client::get(sim.1, "/health").await.expect("an answer");
            assert_eq!(health.status.as_u16(), status);
            if status == 200 {
                assert_eq!(health.json(), json!({"status": "ok", "model_loaded": false}));
            }
            assert_eq!(chat(sim.1, json!({})).await.status, 503);
        }
    }
}
