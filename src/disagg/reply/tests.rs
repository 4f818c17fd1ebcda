use super::*;
use crate::tests::recorded;

fn read(api: LegApi, reply: &str) -> Reply<'_> {
    Reply::read(api, reply.as_bytes()).unwrap()
}

/// Recorded prefill responses: file, API, prompt tokens, cached prompt tokens, prefix of the request id.
const RECORDED: &[(&str, LegApi, u64, u64, &str)] = &[
    ("01_prefill", LegApi::Completions, 200, 0, "cmpl-a8c42cfe93bb0aab-0-b06a2f42"),
    ("03_chat_prefill", LegApi::ChatCompletions, 155, 0, "chatcmpl-9e49f9aee10a3145-9e9c7e6b"),
    ("06_prefill_short", LegApi::Completions, 5, 0, "cmpl-aba92c06162cb4e5-0-b419c69f"),
    ("11_prefill_again", LegApi::Completions, 200, 192, "cmpl-ae5a4d29b4cc6738-0-93524427"),
    ("14_responses_prefill", LegApi::Responses, 131, 0, "resp_aa85e606b9756558_0-b8afa885"),
    ("15_messages_prefill", LegApi::Messages, 131, 128, "chatcmpl-b24df559f1c517d1-81333179"),
    ("16_inference_generate_prefill", LegApi::Generate, 201, 0, "generate-tokens-a881539d3124982f-b4659fe0"),
];

#[test]
fn recorded_vllm_replies_are_parsed() {
    for (file, api, tokens, cached, request_id) in RECORDED {
        let reply = recorded(file).reply;
        let reply = Reply::read(*api, &reply).unwrap();
        reply.finished().unwrap();
        assert!(!reply.stopped(), "{file}");
        assert!(reply.disaggregated_params.is_none() && reply.prompt_token_ids.is_none(), "{file}");
        let prefilled = reply.prefilled();
        assert_eq!(prefilled.prompt_tokens, Some(*tokens), "{file}");
        assert_eq!(prefilled.cached_tokens, Some(*cached), "{file}");
        let transfer = Transfer {
            engine_id: Some("359eb248-5218-451f-8574-8ff735a16d28".to_owned()),
            request_id: Some((*request_id).to_owned()),
            host: Some("127.0.0.1".to_owned()),
            port: Some(10101),
            num_tokens: Some(*tokens),
            expiry_time: None,
            prefill_cached_tokens: Some(*cached),
            for_prefill: Some(false),
            transfer_mode: Some("pull".to_owned()),
        };
        assert_eq!(reply.kv_transfer_params.and_then(Transfer::read), Some(transfer), "{file}");
    }
    // A decode server's answer holds null.
    for file in ["02_decode", "10_decode_no_params", "12_decode_again_cached"] {
        let reply = recorded(file).reply;
        let reply = Reply::read(LegApi::Completions, &reply).unwrap();
        assert_eq!(reply.kv_transfer_params, None, "{file}");
    }
    let error = recorded("09_decode_bad_remote").reply;
    assert_eq!(Reply::read(LegApi::Completions, &error).unwrap().finish, None);
}

#[test]
fn transfer_params_found_at_all_known_places() {
    let deep = r#"{"choices":[{"index":0,"text":"\"kv_transfer_params\":{}","kv_transfer_params":{"a" : 1},
        "disaggregated_params":{"b":2},"prompt_token_ids":[1, 2]},{"kv_transfer_params":{"c":3}}]}"#;
    let reply = read(LegApi::Completions, deep);
    assert_eq!(reply.kv_transfer_params, Some(&br#"{"a" : 1}"#[..]));
    assert_eq!(reply.disaggregated_params, Some(&br#"{"b":2}"#[..]));
    assert_eq!(reply.prompt_token_ids, Some(&b"[1, 2]"[..]));
    // The top level goes first, wherever it stands.
    let both = r#" {"choices":[{"disaggregated_params":{"b":2}}],"disaggregated_params":{"top":1}} "#;
    let reply = read(LegApi::ChatCompletions, both);
    assert_eq!(reply.disaggregated_params, Some(&br#"{"top":1}"#[..]));
    assert_eq!(reply.raw, both.trim().as_bytes());
    for nothing in [r#"{"choices":[]}"#, r#"{"choices":null,"kv_transfer_params":null}"#, r#"{"choices":[1]}"#, "{}"] {
        assert_eq!(read(LegApi::Completions, nothing).kv_transfer_params, None, "{nothing}");
    }
    for wrong in ["", "[]", "data: {}\n\n", r#"{"choices":[{]}"#, "{\"a\":1"] {
        assert!(Reply::read(LegApi::Completions, wrong.as_bytes()).is_err(), "{wrong}");
    }
}

#[test]
fn finish_reason_read_for_each_api() {
    use LegApi::*;
    for (api, reply, finish, finished, stopped) in [
        (Completions, r#"{"choices":[{"finish_reason":"length"}]}"#, Some("length"), true, false),
        (ChatCompletions, r#"{"choices":[{"finish_reason":"stop"}]}"#, Some("stop"), true, true),
        (ChatCompletions, r#"{"choices":[{"finish_reason":"tool_calls"}]}"#, Some("tool_calls"), true, true),
        (Completions, r#"{"choices":[{"finish_reason":"not_finished"}]}"#, Some("not_finished"), true, false),
        (Completions, r#"{"choices":[{"finish_reason":"abort"}]}"#, Some("abort"), false, false),
        (Completions, r#"{"choices":[{"finish_reason":"error"}]}"#, Some("error"), false, false),
        (Completions, r#"{"choices":[{"finish_reason":"cache_threshold"}]}"#, Some("cache_threshold"), false, false),
        (Generate, r#"{"choices":[{"finish_reason":"\u0061bort"}]}"#, Some("abort"), false, false),
        (Completions, r#"{"choices":[{"finish_reason":null}]}"#, None, true, false),
        (Completions, r#"{"status":"failed","stop_reason":"abort"}"#, None, true, false),
        (Messages, r#"{"stop_reason":"max_tokens"}"#, Some("max_tokens"), true, false),
        (Messages, r#"{"stop_reason":"end_turn"}"#, Some("end_turn"), true, true),
        (Messages, r#"{"stop_reason":"abort"}"#, Some("abort"), false, false),
        (
            Responses,
            r#"{"incomplete_details":{"reason":"max_output_tokens"},"status":"incomplete"}"#,
            Some("max_output_tokens"),
            true,
            false,
        ),
        (Responses, r#"{"status":"completed","incomplete_details":null}"#, Some("completed"), true, true),
        (Responses, r#"{"status":"failed"}"#, Some("failed"), false, false),
        (Responses, r#"{"status":"queued"}"#, Some("queued"), false, false),
        (Responses, r#"{"status":"incomplete"}"#, Some("incomplete"), false, false),
    ] {
        let read = read(api, reply);
        assert_eq!(read.finish.as_deref(), finish, "{reply}");
        assert_eq!(read.finished().is_ok(), finished, "{reply}");
        assert_eq!(read.stopped(), stopped, "{reply}");
    }
    let long = format!(r#"{{"choices":[{{"finish_reason":"{}"}}]}}"#, "é".repeat(500));
    let error = read(Completions, &long).finished().unwrap_err();
    assert_eq!(error, LegError::NotFinished { got: "é".repeat(MAX_FINISH) });
}

#[test]
fn transfer_fields_of_wrong_type_are_ignored() {
    let params = br#"{"do_remote_decode":true,"remote_engine_id":7,"remote_request_id":"r","remote_port":70000,"remote_host":null,
        "remote_blocks_expiry_time":1234.5,"remote_num_tokens":-1,"remote_block_ids":[[1,2],[3]],"new":{"a":[]}}"#;
    let expected = Transfer {
        request_id: Some("r".to_owned()),
        expiry_time: Some(1234.5),
        for_prefill: Some(true),
        ..Transfer::default()
    };
    assert_eq!(Transfer::read(params), Some(expected));
    assert_eq!(Transfer::read(br#"{"remote_blocks_expiry_time":12}"#).unwrap().expiry_time, Some(12.0));
    assert_eq!(Transfer::read(b"{}"), Some(Transfer::default()));
    for other in [&b"[]"[..], b"[\"a\",\"b\"]", b"1", b"", b"{"] {
        assert_eq!(Transfer::read(other), None);
    }
}

#[test]
fn cached_tokens_come_from_transfer_params() {
    let reply =
        r#"{"usage":{"prompt_tokens":50,"prompt_tokens_details":{"cached_tokens":16}},"kv_transfer_params":{"a":1}}"#;
    assert_eq!(read(LegApi::Completions, reply).prefilled().cached_tokens, Some(16));
    let reply = reply.replace(r#""a":1"#, r#""remote_prefill_cached_tokens":32"#);
    let prefilled = read(LegApi::Completions, &reply).prefilled();
    assert_eq!((prefilled.prompt_tokens, prefilled.cached_tokens), (Some(50), Some(32)));
    assert_eq!(read(LegApi::Completions, r#"{"usage":null}"#).prefilled(), Prefilled::default());
}

#[test]
fn blocks_fetched_until_shortly_before_release() {
    let ttl = Duration::from_secs(480);
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_000_000);
    let told = |at: Option<f64>| Transfer { expiry_time: at, ..Transfer::default() };
    let seconds = |at, ttl| told(at).life(ttl, now).as_secs_f64();
    // vLLM 0.32: a clock that nobody else has.
    assert_eq!((seconds(Some(81_234.5), ttl), seconds(None, ttl)), (450.0, 450.0));
    assert_eq!(seconds(None, Duration::from_secs(4)), 3.0);
    // Unix time.
    assert_eq!(seconds(Some(1_800_000_100.0), ttl), 75.0);
    assert_eq!(seconds(Some(1_800_000_400.0), ttl), 370.0);
    for over in [1_799_999_999.0, 1_800_000_000.0, f64::INFINITY, 1e300] {
        assert_eq!(seconds(Some(over), ttl), 0.0, "{over}");
    }
    assert_eq!(seconds(Some(f64::NAN), ttl), 450.0);
}
