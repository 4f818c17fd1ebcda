//! Both legs against what a real vLLM was sent and answered (`tests/data/pd`).

use super::*;
use crate::tests::{Recorded, recorded};

/// A body as a client would have sent it: without what a split puts in, with the limit and the
/// streaming that it takes away.
fn client_of(api: LegApi, request: &[u8], stream: bool) -> Vec<u8> {
    let mut client = map(request);
    client.remove("kv_transfer_params");
    client.remove("max_completion_tokens");
    client.remove("stream");
    match api {
        LegApi::Responses => drop(client.insert("max_output_tokens".into(), json!(512))),
        LegApi::Generate => {
            let sampling = client.get_mut("sampling_params").and_then(Value::as_object_mut).unwrap();
            sampling.insert("max_tokens".into(), json!(512));
            sampling.insert("min_tokens".into(), json!(5));
            sampling.insert("stop".into(), json!(["\n"]));
        }
        _ => {
            client.insert("max_tokens".into(), json!(512));
        }
    }
    if stream {
        client.insert("stream".into(), json!(true));
        client.insert("stream_options".into(), json!({"include_usage": true}));
    }
    // Never to be believed.
    client.insert("kv_transfer_params".into(), json!({"do_remote_prefill": true, "remote_host": "10.6.6.6"}));
    serde_json::to_vec_pretty(&client).unwrap()
}

/// A body whose absent `stream` is said, and so is that nobody asks for a response again.
fn said(api: LegApi, body: &[u8]) -> Map<String, Value> {
    let mut body = map(body);
    body.entry("stream").or_insert(json!(false));
    if api == LegApi::Responses {
        body.entry("store").or_insert(json!(false));
    }
    body
}

#[test]
fn prefill_bodies_equal_vllm_recordings() {
    for (file, api) in [
        ("01_prefill", LegApi::Completions),
        ("03_chat_prefill", LegApi::ChatCompletions),
        ("06_prefill_short", LegApi::Completions),
        ("11_prefill_again", LegApi::Completions),
        ("13_prefill_reqid", LegApi::Completions),
        ("14_responses_prefill", LegApi::Responses),
        ("15_messages_prefill", LegApi::Messages),
        ("16_inference_generate_prefill", LegApi::Generate),
    ] {
        let request = recorded(file).request;
        for stream in [false, true] {
            let client = client_of(api, &request, stream);
            for name in ["nixl", "shfs"] {
                let body = connector(name).prefill_body(&leg(api, &client)).unwrap();
                assert_eq!(map(&body), said(api, &request), "{name} {file} stream: {stream}");
            }
        }
    }
}

/// The three pairs of which the recordings hold both legs of one request.
const PAIRS: &[(&str, &str, LegApi)] = &[
    ("01_prefill", "02_decode", LegApi::Completions),
    ("03_chat_prefill", "04_chat_decode_stream", LegApi::ChatCompletions),
    ("11_prefill_again", "12_decode_again_cached", LegApi::Completions),
];

#[test]
fn decode_bodies_equal_vllm_recordings() {
    for (prefill, decode, api) in PAIRS {
        let (prefill, decode) = (recorded(prefill), recorded(decode));
        let params = Reply::read(*api, &prefill.reply).unwrap().kv_transfer_params.unwrap().to_vec();
        let mut client = map(&decode.request);
        client.remove("kv_transfer_params");
        let client = serde_json::to_vec(&client).unwrap();
        let leg = leg(*api, &client);
        let body = connector("nixl").decode_body(&leg, Some(&prefill.reply)).unwrap();
        assert_eq!(map(&body.body), map(&decode.request));
        // The client's bytes, then the server's.
        let (open, close) = client.split_at(client.len() - 1);
        assert_eq!(body.body.as_ref(), [open, b",\"kv_transfer_params\":", &params, close].concat());
        let prefill_body = connector("nixl").prefill_body(&leg).unwrap();
        assert_eq!(map(&prefill_body), said(*api, &prefill.request));
    }
}

#[test]
fn every_recorded_reply_feeds_a_decode_leg() {
    for (file, api) in [
        ("05_prefill_min", LegApi::Completions),
        ("06_prefill_short", LegApi::Completions),
        ("08_prefill_max5", LegApi::Completions),
        ("13_prefill_reqid", LegApi::Completions),
        ("14_responses_prefill", LegApi::Responses),
        ("15_messages_prefill", LegApi::Messages),
        ("16_inference_generate_prefill", LegApi::Generate),
    ] {
        let Recorded { request, reply } = recorded(file);
        let client = client_of(api, &request, true);
        let body = connector("nixl").decode_body(&leg(api, &client), Some(&reply)).unwrap();
        let mut expected = map(&client);
        expected.insert("kv_transfer_params".into(), map(&reply).remove("kv_transfer_params").unwrap());
        assert_eq!(map(&body.body), expected, "{file}");
    }
    // A prefill that was streamed tells nothing; neither does a server that has no connector.
    let streamed: String = serde_json::from_slice(&recorded("07_prefill_stream").reply).unwrap();
    let streamed = connector("nixl").decode_body(&leg(LegApi::Completions, b"{}"), Some(streamed.as_bytes()));
    assert!(matches!(streamed, Err(LegError::Reply(_))));
    let plain = recorded("00_reference_on_P_other_salt").reply;
    let plain = connector("nixl").decode_body(&leg(LegApi::Completions, b"{}"), Some(&plain));
    assert_eq!(plain, Err(LegError::NoParams { field: "kv_transfer_params" }));
}
