//! Both legs of each connector, API and way to answer, as the references have them.

use super::*;

const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"a, \"b\"}"}],"tools":[{"z":1,"a":2}],"chat_template_kwargs":{"x":1.0},"cache_salt":"s","stream":true,"stream_options":{"include_usage":true},"max_tokens":9,"min_tokens":3,"stop":["x"],"logprobs":true,"top_logprobs":2,"response_format":{"type":"json_object"},"temperature":0.10}"#;
const COMPLETION: &str =
    r#"{"prompt":[1,2,3], "model":"m", "max_tokens":16, "n":1, "guided_json":{}, "truncate_prompt_tokens":7}"#;
const MESSAGE: &str =
    r#"{"model":"m","max_tokens":9,"stop_sequences":["x"],"messages":[],"stream":true,"thinking":{"type":"enabled"}}"#;
const RESPONSE: &str =
    r#"{"model":"m","input":"a","background":true,"text":{"format":{"type":"text"}},"max_output_tokens":4}"#;
const GENERATE: &str =
    r#"{"token_ids":[1,2],"sampling_params":{"n":1,"max_tokens":9,"top_p":0.50,"min_tokens":2},"stream":false}"#;

/// Of one connector and one body of a client: the bytes of the prefill leg, a reply, the bytes of the decode leg.
struct Shape {
    connector: &'static str,
    api: LegApi,
    client: &'static str,
    prefill: &'static str,
    reply: &'static str,
    decode: &'static str,
}

const SHAPES: &[Shape] = &[
    Shape {
        connector: "nixl",
        api: LegApi::ChatCompletions,
        client: CHAT,
        prefill: r#"{"model":"m","messages":[{"role":"user","content":"a, \"b\"}"}],"tools":[{"z":1,"a":2}],"chat_template_kwargs":{"x":1.0},"cache_salt":"s","stream":false,"max_tokens":1,"temperature":0.10,"max_completion_tokens":1,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#,
        reply: r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{"remote_block_ids": [[1,  2]],"newer":{"f":1.50}}}"#,
        decode: r#"{"model":"m","messages":[{"role":"user","content":"a, \"b\"}"}],"tools":[{"z":1,"a":2}],"chat_template_kwargs":{"x":1.0},"cache_salt":"s","stream":true,"stream_options":{"include_usage":true},"max_tokens":9,"min_tokens":3,"stop":["x"],"logprobs":true,"top_logprobs":2,"response_format":{"type":"json_object"},"temperature":0.10,"kv_transfer_params":{"remote_block_ids": [[1,  2]],"newer":{"f":1.50}}}"#,
    },
    Shape {
        connector: "nixl",
        api: LegApi::Completions,
        client: COMPLETION,
        prefill: r#"{"prompt":[1,2,3], "model":"m", "max_tokens":1, "truncate_prompt_tokens":7,"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#,
        reply: r#"{"choices":[{"finish_reason":"stop","kv_transfer_params":{"a":1}}]}"#,
        decode: r#"{"prompt":[1,2,3], "model":"m", "max_tokens":16, "n":1, "guided_json":{}, "truncate_prompt_tokens":7,"kv_transfer_params":{"a":1}}"#,
    },
    Shape {
        connector: "nixl",
        api: LegApi::Messages,
        client: MESSAGE,
        prefill: r#"{"model":"m","max_tokens":1,"messages":[],"stream":false,"thinking":{"type":"enabled"},"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#,
        reply: r#"{"stop_reason":"max_tokens","kv_transfer_params":{}}"#,
        decode: r#"{"model":"m","max_tokens":9,"stop_sequences":["x"],"messages":[],"stream":true,"thinking":{"type":"enabled"},"kv_transfer_params":{}}"#,
    },
    Shape {
        connector: "nixl",
        api: LegApi::Responses,
        client: RESPONSE,
        prefill: r#"{"model":"m","input":"a","text":{"format":{"type":"text"}},"max_output_tokens":1,"stream":false,"store":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#,
        reply: r#"{"status":"incomplete","incomplete_details":{"reason":"max_output_tokens"},"kv_transfer_params":{}}"#,
        decode: r#"{"model":"m","input":"a","background":true,"text":{"format":{"type":"text"}},"max_output_tokens":4,"kv_transfer_params":{}}"#,
    },
    Shape {
        connector: "nixl",
        api: LegApi::Generate,
        client: GENERATE,
        prefill: r#"{"token_ids":[1,2],"sampling_params":{"max_tokens":1,"top_p":0.50},"stream":false,"kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}}"#,
        reply: r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":{}}"#,
        decode: r#"{"token_ids":[1,2],"sampling_params":{"n":1,"max_tokens":9,"top_p":0.50,"min_tokens":2},"stream":false,"kv_transfer_params":{}}"#,
    },
    Shape {
        connector: "shfs",
        api: LegApi::Completions,
        client: r#"{"prompt":"a","kv_transfer_params":{"remote_host":"6.6.6.6"},"disagg_prefill_resp":{}}"#,
        prefill: r#"{"prompt":"a","kv_transfer_params":{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null},"stream":false,"max_tokens":1}"#,
        reply: r#"{"kv_transfer_params":{"remote_engine_id":"e", "remote_host":"0.0.0.0","remote_block_ids":["b1","b2"]}}"#,
        decode: r#"{"prompt":"a","kv_transfer_params":{"remote_engine_id":"e", "remote_host":"10.0.0.7","remote_block_ids":["b1","b2"]}}"#,
    },
    Shape {
        connector: "neuron-nixl",
        api: LegApi::ChatCompletions,
        client: r#"{"messages":[],"stream":true,"kv_transfer_params":{},"logprobs":true}"#,
        prefill: r#"{"messages":[],"stream":false,"logprobs":true,"max_tokens":1,"max_completion_tokens":1}"#,
        reply: " {\"id\":\"c\",\n \"choices\":[{\"finish_reason\":\"length\"}]}\n",
        decode: "{\"messages\":[],\"stream\":true,\"logprobs\":true,\"disagg_prefill_resp\":{\"id\":\"c\",\n \"choices\":[{\"finish_reason\":\"length\"}]}}",
    },
    Shape {
        connector: "sglang",
        api: LegApi::ChatCompletions,
        client: r#"{"messages":[{"b":1,"a":2}],"stream":true,"stream_options":{},"min_tokens":4,"stop":"x","n":2,"bootstrap_room":7}"#,
        prefill: r#"{"messages":[{"b":1,"a":2}],"stream":false,"stop":"x","n":2,"bootstrap_room":42,"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"rid":"req-1-000000000000002a","max_tokens":1,"max_completion_tokens":1}"#,
        reply: "{}",
        decode: r#"{"messages":[{"b":1,"a":2}],"stream":true,"stream_options":{},"min_tokens":4,"stop":"x","n":2,"bootstrap_room":42,"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"rid":"req-1-000000000000002a"}"#,
    },
    Shape {
        connector: "sglang",
        api: LegApi::Completions,
        client: r#"{"prompt":["a","b"],"max_tokens":5}"#,
        prefill: r#"{"prompt":["a","b"],"max_tokens":1,"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"bootstrap_room":42,"rid":"req-1-000000000000002a","stream":false}"#,
        reply: "{}",
        decode: r#"{"prompt":["a","b"],"max_tokens":5,"bootstrap_host":"10.0.0.7","bootstrap_port":8998,"bootstrap_room":42,"rid":"req-1-000000000000002a"}"#,
    },
    Shape {
        connector: "trtllm",
        api: LegApi::ChatCompletions,
        client: r#"{"messages":[],"stream":true,"max_completion_tokens":9,"min_tokens":2,"stop":"x"}"#,
        prefill: r#"{"messages":[],"stream":false,"stop":"x","disaggregated_params":{"request_type":"context_only","disagg_request_id":42},"max_tokens":1}"#,
        reply: r#"{"choices":[{"finish_reason":"length","disaggregated_params":{"request_type":"context_only","ctx_request_id":9223372036854775807,"encoded_opaque_state":"A=="}}],"prompt_token_ids":[5, 6]}"#,
        decode: r#"{"messages":[],"stream":true,"max_completion_tokens":9,"min_tokens":2,"stop":"x","disaggregated_params":{"request_type":"generation_only","ctx_request_id":9223372036854775807,"encoded_opaque_state":"A=="},"prompt_token_ids":[5, 6]}"#,
    },
    Shape {
        connector: "trtllm",
        api: LegApi::Completions,
        client: r#"{"prompt":"ab","max_tokens":9}"#,
        prefill: r#"{"prompt":"ab","max_tokens":1,"disaggregated_params":{"request_type":"context_only","disagg_request_id":42},"stream":false}"#,
        reply: r#"{"disaggregated_params":{"ctx_request_id":3},"prompt_token_ids":[5,6],"choices":[{"finish_reason":"not_finished"}]}"#,
        decode: r#"{"prompt":[5,6],"max_tokens":9,"disaggregated_params":{"ctx_request_id":3,"request_type":"generation_only"}}"#,
    },
    Shape {
        connector: "shared-storage",
        api: LegApi::ChatCompletions,
        client: r#"{"messages":[],"cache_hit_threshold":0.8,"stream":true,"n":3}"#,
        prefill: r#"{"messages":[],"cache_hit_threshold":0,"stream":false,"max_tokens":1,"max_completion_tokens":1}"#,
        reply: r#"{"choices":[{"finish_reason":"length"}],"kv_transfer_params":null}"#,
        decode: r#"{"messages":[],"cache_hit_threshold":0,"stream":true,"n":3}"#,
    },
    Shape {
        connector: "shared-storage",
        api: LegApi::Messages,
        client: MESSAGE,
        prefill: r#"{"model":"m","max_tokens":1,"messages":[],"stream":false,"thinking":{"type":"enabled"}}"#,
        reply: "{}",
        decode: MESSAGE,
    },
];

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn bodies_are_spliced() {
    for shape in SHAPES {
        let leg = leg(shape.api, shape.client.as_bytes());
        let connector = connector(shape.connector);
        assert_eq!(text(&connector.prefill_body(&leg).unwrap()), shape.prefill, "{} {:?}", shape.connector, shape.api);
        let decode = connector.decode_body(&leg, Some(shape.reply.as_bytes())).unwrap();
        assert_eq!(text(&decode.body), shape.decode, "{} {:?}", shape.connector, shape.api);
    }
    for descriptor in CONNECTORS {
        assert!(SHAPES.iter().any(|shape| shape.connector == descriptor.name), "{} has no bodies", descriptor.name);
    }
}

/// For every connector, API and way to answer: one token, not streamed, the prompt's bytes as they were; and the decode
/// leg holds all that the client sent.
#[test]
fn prefill_legs_ask_for_one_token() {
    let reply = br#"{"kv_transfer_params":{"a":1},"disaggregated_params":{"b":2}}"#;
    for descriptor in CONNECTORS {
        for api in LegApi::ALL.iter().filter(|api| descriptor.connector.speaks(**api)) {
            for stream in ["", r#","stream":true"#, r#","stream":false"#, r#","stream":true,"str\u0065am":true"#] {
                let client = format!(
                    r#"{{"messages":[ {{"k" : 1}} ],"prompt":"p","input":"i", "token_ids":[1 ,2]{stream},"max_tokens":7,"max_tokens":8,"stream_options":{{"include_usage":true}}}}"#
                );
                let leg = leg(*api, client.as_bytes());
                let prefill = descriptor.connector.prefill_body(&leg).unwrap();
                let body = map(&prefill);
                let name = format!("{} {api:?} {stream}", descriptor.name);
                assert_eq!(body.get("stream"), Some(&json!(false)), "{name}");
                assert_eq!(body.get("stream_options"), None, "{name}");
                let limit = match api {
                    LegApi::Responses => body.get("max_output_tokens"),
                    LegApi::Generate => body.get("sampling_params").and_then(|p| p.get("max_tokens")),
                    _ => body.get("max_tokens"),
                };
                assert_eq!(limit, Some(&json!(1)), "{name}");
                assert!(
                    text(&prefill)
                        .starts_with(r#"{"messages":[ {"k" : 1} ],"prompt":"p","input":"i", "token_ids":[1 ,2]"#)
                );
                assert_eq!(text(&prefill).matches("\"stream\"").count(), 1, "{name}");
                let decode = descriptor.connector.decode_body(&leg, Some(reply)).unwrap();
                let beginning = client.strip_suffix('}').unwrap();
                assert!(text(&decode.body).starts_with(beginning), "{name}");
            }
        }
    }
}

#[test]
fn transfer_members_from_clients_are_removed() {
    let client = br#"{"kv_transfer_params":{"evil":1},"kv\u005ftransfer_params":{"evil":2},"disaggregated_params":{"evil":3},"bootstrap_host":"evil","bootstrap_port":666,"bootstrap_room":"evil","disagg_prefill_resp":"evil"}"#;
    let reply = br#"{"kv_transfer_params":{"a":1},"disaggregated_params":{"b":2}}"#;
    for descriptor in CONNECTORS {
        let leg = leg(LegApi::Completions, client);
        let prefill = descriptor.connector.prefill_body(&leg).unwrap();
        let decode = descriptor.connector.decode_body(&leg, Some(reply)).unwrap();
        for body in [&prefill, decode.body.as_ref()] {
            assert!(!text(body).contains("evil") && !text(body).contains("666"), "{}: {}", descriptor.name, text(body));
            map(body);
        }
    }
}

#[test]
fn previous_decode_worker_feeds_next_prefill() {
    let carried = br#"{"do_remote_decode":true, "remote_block_ids":[[9]],"remote_blocks_expiry_time":12.5}"#;
    let leg = Leg { carried: Some(carried), ..leg(LegApi::ChatCompletions, b"{\"messages\":[]}") };
    let expected = r#"{"messages":[],"stream":false,"max_tokens":1,"max_completion_tokens":1,"kv_transfer_params":"#;
    let body = connector("nixl").prefill_body(&leg).unwrap();
    assert_eq!(text(&body), [expected, text(carried), "}"].concat());
    // What is no object is left out.
    for wrong in [&b""[..], b"null", b"[1]"] {
        let body = connector("nixl").prefill_body(&Leg { carried: Some(wrong), ..leg }).unwrap();
        assert_eq!(text(&body), [expected, text(nixl::KEEP), "}"].concat());
    }
}

#[test]
fn sglang_legs_can_be_aborted() {
    let leg = Leg { request_id: "a\"b", room: u64::MAX, ..leg(LegApi::ChatCompletions, b"{}") };
    let sglang = connector("sglang");
    let body = map(&sglang.decode_body(&leg, None).unwrap().body);
    assert_eq!(body.get("bootstrap_room"), Some(&json!(i64::MAX)));
    let rid = json!(format!("a\"b-{:x}", i64::MAX));
    assert_eq!(body.get("rid"), Some(&rid));
    assert_eq!(map(&sglang.prefill_body(&leg).unwrap()).get("rid"), Some(&rid));
    let abort = sglang.abort_request(&leg).unwrap();
    assert_eq!((abort.path, map(&abort.body)), ("/abort_request", [("rid".to_owned(), rid)].into_iter().collect()));
    assert_eq!(sglang.sequence(), Sequence::Together);
    for descriptor in CONNECTORS.iter().filter(|d| d.name != "sglang") {
        assert_eq!(descriptor.connector.sequence(), Sequence::PrefillFirst);
        assert_eq!(descriptor.connector.abort_request(&leg), None);
    }
}

#[test]
fn ended_response_has_no_decode_leg() {
    let reply =
        br#"{"choices":[{"finish_reason":"stop","disaggregated_params":{"a":1}}],"kv_transfer_params":{"a":1}}"#;
    let leg = leg(LegApi::Completions, b"{}");
    assert_eq!(connector("trtllm").decode_body(&leg, Some(reply)), Err(LegError::Ended));
    // vLLM throws the prefill's token away, so what it was doesn't matter.
    assert!(connector("nixl").decode_body(&leg, Some(reply)).is_ok());
}
