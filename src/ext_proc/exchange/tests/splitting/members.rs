//! Members of a body that clients may not set: they are removed, and a body that can't be read is rejected.

use super::*;

#[test]
fn clients_cannot_choose_which_kv_events_vllm_publishes() {
    const BODY: &str = r#"{"model":"m", "prompt":"p","vllm_xargs":{"a":1,"kv_cache_report_mode":"full"}}"#;
    const CLEAN: &str = r#"{"model":"m", "prompt":"p","vllm_xargs":{"a":1}}"#;
    let split = Setup { engines_tell: true, ..setup(ROLES, Mode::Direct(direct("nixl")), Decider::Always) };
    let (mut exchange, _, asks) = asked_for(&split.build(), BODY, &[]);
    let prefill = String::from_utf8(asks[0].body.to_vec()).unwrap();
    assert!(prefill.contains(r#""vllm_xargs":{"a":1}"#), "{prefill}");
    let answered = give_leg_result(&mut exchange, 0, good(), 40);
    let decode = answered.text();
    assert!(decode.contains(r#""vllm_xargs":{"a":1}"#), "{decode}");

    let generate = r#"{"model":"m","token_ids":[1],"sampling_params":{"extra_args":{"kv_cache_report_mode":"full"}}}"#;
    let clean = r#"{"model":"m","token_ids":[1],"sampling_params":{"extra_args":{}}}"#;
    for (path, sent, expected, engines_tell) in [
        ("/v1/completions", BODY, Some(CLEAN), true),
        ("/inference/v1/generate", generate, Some(clean), true),
        // Without the field, and in pools without KV events, the body passes.
        ("/v1/completions", CLEAN, None, true),
        ("/v1/completions", BODY, None, false),
    ] {
        let mut exchange = Setup { engines_tell, ..Setup::default() }.build().exchange();
        let pairs = [(":path", path), (":method", "POST"), ("content-type", "application/json")];
        send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false))));
        let out = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
        assert_eq!(out.text(), expected.unwrap_or(sent), "{path} {engines_tell}");
    }
}

#[test]
fn body_of_splitting_pool_must_be_valid() {
    let sent = |path: &str, body_of: &str| {
        let world = splitting(Mode::Direct(direct("nixl")), Decider::Never);
        let mut exchange = world.exchange();
        let pairs = [(":path", path), (":method", "POST"), ("content-type", "application/json")];
        send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false))));
        let out = send(&mut exchange, request(Message::RequestBody(body(body_of.as_bytes(), true))));
        Answered::of(&out)
    };
    let foreign = r#"{"model":"m","prompt":"p","kv_transfer_params":{"remote_host":"10.6.6.6"}}"#;
    for path in ["/invocations", "/generate", "/v1/complet%69ons"] {
        assert_eq!(sent(path, foreign).text(), r#"{"model":"m","prompt":"p"}"#, "{path}");
    }
    let nested = r#"{"model":"m","token_ids":[1,2],"sampling_params":{"extra_args":{"kv_transfer_params":{}}}}"#;
    for path in ["/inference/v1/generate", "/inference/v1/gener%61te"] {
        let clean = r#"{"model":"m","token_ids":[1,2],"sampling_params":{"extra_args":{}}}"#;
        assert_eq!(sent(path, nested).text(), clean, "{path}");
    }
    // SGLang accepts an array of `sampling_params`.
    let several = r#"{"text":"t","sampling_params":[{}],"bootstrap_room":7}"#;
    assert_eq!(sent("/generate", several).text(), r#"{"text":"t","sampling_params":[{}]}"#);
    // Python parses both, Attaché only the first.
    let marked = format!("\u{feff}{foreign}");
    let invalid = foreign.replacen('{', "{\"x\":NaN,", 1);
    for path in ["/v1/completions", "/invocations"] {
        assert_eq!(sent(path, &marked).text(), "\u{feff}{\"model\":\"m\",\"prompt\":\"p\"}", "{path}");
        assert_eq!(sent(path, &invalid).refused.unwrap().0, 400, "{path}");
    }
    assert!(sent("/upload", "no JSON at all").set.contains_key(DESTINATION));
}

/// A body with members that clients may not set, and the same without them.
const FOREIGN: &str = r#"{"model":"m","prompt":"p","kv_transfer_params":{"remote_host":"10.6.6.6"}}"#;
const CLEAN: &str = r#"{"model":"m","prompt":"p"}"#;

#[test]
fn controlled_members_are_removed_despite_content_headers() {
    let sent = |encoding: &str, bytes: &[u8]| {
        let world = splitting(Mode::Direct(direct("nixl")), Decider::Never);
        let mut exchange = world.exchange();
        let pairs = [PATH, (":method", "POST"), ("content-encoding", encoding)];
        send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, false))));
        Answered::of(&send(&mut exchange, request(Message::RequestBody(body(bytes, true)))))
    };
    let twice = FOREIGN.replace(r#""model":"m""#, r#""model":"m","model":"m""#);
    let wide: Vec<u8> = FOREIGN.encode_utf16().flat_map(u16::to_be_bytes).collect();
    for encoding in ["gzip", "br", "GZIP, br", "nonsense"] {
        assert_eq!(sent(encoding, FOREIGN.as_bytes()).text(), CLEAN, "{encoding}");
        // Model servers parse these, so they must be rejected.
        for unread in [twice.as_bytes(), wide.as_slice()] {
            assert_eq!(sent(encoding, unread).refused.unwrap().0, 400, "{encoding}");
        }
        let compressed = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\xab{}";
        let all = sent(encoding, compressed);
        assert!(all.set.contains_key(DESTINATION) && all.body == compressed, "{encoding}: {all:?}");
    }
}

#[test]
fn controlled_members_are_removed_if_trailers_follow() {
    use BodySendMode::{Buffered, BufferedPartial, FullDuplexStreamed, None as Off, Streamed};
    for (mode, nowait) in [(FullDuplexStreamed, false), (Buffered, false), (BufferedPartial, false), (Streamed, true)] {
        let sent = |text: &str| {
            let world = splitting(Mode::Direct(direct("nixl")), Decider::Never);
            let mut exchange = world.exchange();
            let protocol_config = Some(config(mode, Off, nowait));
            let first = request(Message::RequestHeaders(headers(&[PATH, (":method", "POST")], false)));
            let mut got = send(&mut exchange, ProcessingRequest { protocol_config, ..first });
            got.extend(send(&mut exchange, request(Message::RequestBody(body(text.as_bytes(), false)))));
            if mode == Streamed {
                let mut out = Actions::new();
                exchange.on(Event::Deadline, NOW.after(PAUSE), &mut out).unwrap();
                got.extend(out);
            }
            got.extend(send(&mut exchange, request(Message::RequestTrailers(HttpTrailers::default()))));
            Answered::of(&got)
        };
        let all = sent(FOREIGN);
        assert_eq!((all.text(), all.kinds.last()), (CLEAN, Some(&"request_trailers")), "{mode:?}");
        // A body that Envoy may have cut is not rejected for its missing end.
        let cut = sent(&FOREIGN[..40]);
        let whole = matches!(mode, FullDuplexStreamed | Buffered);
        assert_eq!(cut.refused.map(|(status, _)| status), whole.then_some(400), "{mode:?}");
    }
}
