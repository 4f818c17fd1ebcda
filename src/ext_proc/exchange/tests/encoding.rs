//! Compressed responses: Attaché asks for none, and counts those that come nevertheless.

use super::*;
use attache_picker::event::Degraded;

const CODINGS: [&str; 5] = ["gzip", "deflate", "br", "zstd", "gzip, deflate;q=0.5, br, zstd, *;q=0.1"];
const CHAT: &str = r#"{"model":"m","messages":[{"role":"user","content":"hi"}]}"#;

/// What the server gets of a request with these headers, in these body modes, and the exchange.
fn ask(
    world: &World,
    path: &str,
    more: &[(&str, &str)],
    (to, from): (BodySendMode, BodySendMode),
    sent: &str,
) -> (Exchange, Answered) {
    let mut exchange = world.exchange();
    let pairs = [&[(":path", path), (":method", "POST")], more].concat();
    let first = request(Message::RequestHeaders(headers(&pairs, sent.is_empty())));
    let mut got = send(&mut exchange, ProcessingRequest { protocol_config: Some(config(to, from, false)), ..first });
    if !sent.is_empty() {
        got.extend(send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    }
    (exchange, Answered::of(&got))
}

#[test]
fn servers_are_asked_for_identity_in_every_body_mode() {
    use BodySendMode::{Buffered, BufferedPartial, FullDuplexStreamed, None as Off, Streamed};
    let world = Setup::default().build();
    for to in [FullDuplexStreamed, Streamed, Buffered, BufferedPartial, Off] {
        for from in [FullDuplexStreamed, Streamed, Buffered, Off] {
            for coding in CODINGS {
                let (_, got) = ask(&world, "/v1/chat/completions", &[("accept-encoding", coding)], (to, from), CHAT);
                let asked = got.set.get("accept-encoding").map(String::as_str);
                assert_eq!(asked, (from != Off).then_some("identity"), "{to:?} {from:?} {coding}");
            }
        }
    }
}

#[test]
fn accept_encoding_stays_where_no_response_is_read() {
    let modes = (BodySendMode::FullDuplexStreamed, BodySendMode::FullDuplexStreamed);
    let gzip: &[_] = &[("accept-encoding", "gzip")];
    let set = |setup: Setup, path: &str, more: &[(&str, &str)], sent: &str| {
        let names = ["accept-encoding", "grpc-accept-encoding"];
        let (_, got) = ask(&setup.build(), path, more, modes, sent);
        names.into_iter().filter(|name| got.set.contains_key(*name)).collect::<Vec<_>>()
    };
    for (path, sent) in [("/v1/models", ""), ("/tokenize", CHAT), ("/v9/things", "{}"), ("/docs", "")] {
        assert!(set(Setup::default(), path, gzip, sent).is_empty(), "{path}");
    }
    for (path, sent) in [
        ("/v1/completions", r#"{"model":"m","prompt":"p"}"#),
        ("/v1/embeddings", r#"{"model":"m","input":"p"}"#),
        ("/v1/messages", r#"{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"hi"}]}"#),
        ("/v1/responses", r#"{"model":"m","input":"p"}"#),
        ("/v1/responses/resp_1", ""),
        ("/rerank", r#"{"model":"m","query":"q","documents":["d"]}"#),
        ("/generate", r#"{"text":"p"}"#),
    ] {
        assert_eq!(set(Setup::default(), path, gzip, sent), ["accept-encoding"], "{path}");
    }
    for header in [&[][..], &[("accept-encoding", "identity")], &[("accept", "gzip")]] {
        assert!(set(Setup::default(), "/v1/chat/completions", header, CHAT).is_empty(), "{header:?}");
    }
    let keeps = ExchangeSettings { keep_accept_encoding: true, ..ExchangeSettings::default() };
    let setup = Setup { exchange: keeps, ..Setup::default() };
    assert!(set(setup, "/v1/chat/completions", gzip, CHAT).is_empty(), "as configured");
    // A rewritten model name must be replaced in the response, whatever the API.
    let target = RewriteTarget { model: "llama".into(), weight: 1 };
    let rewrites = ModelRewrites { exact: [("m".to_owned(), vec![target])].into(), any: Vec::new() };
    let setup = Setup { rewrites, ..Setup::default() };
    assert_eq!(set(setup, "/tokenize", gzip, CHAT), ["accept-encoding"]);
}

#[test]
fn compressed_responses_are_counted_whole_and_streamed() {
    let world = Setup::default().build();
    let counted = || world.processor.metrics.degraded.get(Degraded::EncodedResponse);
    let modes = (BodySendMode::FullDuplexStreamed, BodySendMode::FullDuplexStreamed);
    let respond = |path: &str, sent: &str, header: (&str, &str), content_type: &str| {
        let (mut exchange, _) = ask(&world, path, &[("accept-encoding", "gzip")], modes, sent);
        let head = [(":status", "200"), ("content-type", content_type), header];
        send(&mut exchange, request(Message::ResponseHeaders(headers(&head, false))));
        let bytes = b"\x1f\x8b\x08\x00";
        let passed = send(&mut exchange, request(Message::ResponseBody(body(bytes, true))));
        assert_eq!(Answered::of(&passed).body, bytes, "the client gets what the server sent");
    };
    let mut expected = 0;
    for coding in ["gzip", "deflate", "br", "zstd", "x-gzip", "GZIP", "identity, gzip"] {
        for content_type in ["application/json", "text/event-stream"] {
            respond("/v1/chat/completions", CHAT, ("content-encoding", coding), content_type);
            expected += 1;
            assert_eq!(counted(), expected, "{coding} {content_type}");
        }
    }
    respond("/v1/chat/completions", CHAT, ("content-encoding", "Identity"), "application/json");
    respond("/v1/chat/completions", CHAT, ("vary", "accept-encoding"), "application/json");
    respond("/v9/things", "{}", ("content-encoding", "gzip"), "application/json");
    assert_eq!(counted(), expected, "nothing is lost");
}

#[test]
fn media_type_of_a_stream_is_read_in_any_case() {
    let world = Setup::default().build();
    let modes = (BodySendMode::FullDuplexStreamed, BodySendMode::FullDuplexStreamed);
    for content_type in ["text/event-stream", "Text/Event-Stream; charset=utf-8"] {
        let (mut exchange, _) = ask(&world, "/v1/chat/completions", &[], modes, CHAT);
        let head = [(":status", "200"), ("content-type", content_type)];
        send(&mut exchange, request(Message::ResponseHeaders(headers(&head, false))));
        let usage = b"data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":2}}\r\r";
        send(&mut exchange, request(Message::ResponseBody(body(usage, true))));
        drop(exchange);
        let record = world.processor.decisions.snapshot().pop().unwrap();
        assert_eq!((record.prompt_tokens, record.completion_tokens), (Some(7), Some(2)), "{content_type}");
    }
}
