//! Forms in each body mode: where the model is, aliases, rules by model, and forms that contradict themselves.

use super::limits::{NONE, limited, tenants};
use super::unshown::with_rule;
use super::*;
use attache_picker::event::Degraded;
use attache_quota as quota;

const MODES: [BodySendMode; 3] = [BodySendMode::Buffered, BodySendMode::Streamed, BodySendMode::FullDuplexStreamed];
/// APIs whose bodies are forms.
const PATHS: [&str; 6] = [
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/images/edits",
    "/v1/images/variations",
    "/v1/uploads/u-1/parts",
    "/v1/files",
];
const AUDIO: &str = PATHS[0];

fn model(name: &str) -> Vec<u8> {
    format!("--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{name}\r\n").into_bytes()
}

/// A file of this many bytes, with text that looks like a part and like a boundary.
fn file(length: usize) -> Vec<u8> {
    let head = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\n\
                name=\"model\"\r\n\r\nfake\r\n--bb\r\n";
    [head.as_bytes(), &vec![7; length], b"\r\n"].concat()
}

fn form(parts: &[Vec<u8>]) -> Vec<u8> {
    [parts.concat().as_slice(), b"--b--\r\n"].concat()
}

/// A form on its way to a server.
struct Upload {
    exchange: Exchange,
    told: Answered,
    /// The body that the server gets.
    served: Vec<u8>,
}

/// Sends a form in this body mode, in chunks of 16 KiB. Stops at a refusal.
fn upload(world: &World, mode: BodySendMode, path: &str, sent: &[u8]) -> Upload {
    let mut exchange = world.exchange();
    let length = sent.len().to_string();
    let kind = ("content-type", "multipart/form-data; boundary=b");
    let pairs = [(":path", path), (":method", "POST"), kind, ("content-length", &length)];
    let first = request(Message::RequestHeaders(headers(&pairs, false)));
    let protocol_config = Some(config(mode, BodySendMode::FullDuplexStreamed, mode == BodySendMode::Streamed));
    let mut all = send(&mut exchange, ProcessingRequest { protocol_config, ..first });
    let size = if mode == BodySendMode::Buffered { sent.len() } else { 16 << 10 };
    let mut chunks = sent.chunks(size).peekable();
    while let Some(chunk) = chunks.next() {
        all.extend(send(&mut exchange, request(Message::RequestBody(body(chunk, chunks.peek().is_none())))));
    }
    let bodies = all.iter().filter(|answer| matches!(answer.response, Some(Response::RequestBody(_))));
    let served = match mode {
        BodySendMode::FullDuplexStreamed => bodies.flat_map(|answer| applied(answer, &[])).collect(),
        _ => bodies.zip(sent.chunks(size)).flat_map(|(answer, chunk)| applied(answer, chunk)).collect(),
    };
    Upload { told: Answered::of(&all), served, exchange }
}

impl Upload {
    /// The server responds; the model of the request in the decision log.
    fn model(mut self, world: &World) -> String {
        send(&mut self.exchange, request(Message::ResponseHeaders(headers(&[(":status", "200")], true))));
        world.processor.decisions.snapshot().last().unwrap().model.to_string()
    }

    fn reason(&self) -> &str {
        self.told.set.get("x-attache-reason").map_or("", String::as_str)
    }
}

#[test]
fn alias_behind_a_file_reaches_the_server_as_its_target_in_every_form_api() {
    for path in PATHS {
        for mode in MODES {
            let world = with_rule().build();
            let sent = form(&[file(200_000), model("alias"), file(10)]);
            let upload = upload(&world, mode, path, &sent);
            let wanted = form(&[file(200_000), model("base"), file(10)]);
            assert!(upload.served == wanted, "{path} {mode:?}: {:?}", upload.told.refused);
            assert_eq!(upload.told.set["content-length"], wanted.len().to_string(), "{path} {mode:?}");
            assert_eq!(world.processor.picker.buffered.bytes(), 0);
            assert_eq!(upload.model(&world), "base");
            world.assert_books_closed(1);
        }
    }
}

#[test]
fn form_without_a_readable_model_is_refused_only_if_a_rule_depends_on_it() {
    let encoded = b"--b\r\nContent-Disposition: form-data; name*=utf-8''model\r\n\r\nalias\r\n".to_vec();
    let ambiguous = form(&[encoded, file(10)]);
    let late = form(&[file(200_000), model("alias")]);
    let limits = Limits { max_multipart_sniff_bytes: 100_000, ..Limits::default() };
    for mode in MODES {
        for (sent, why) in [(&ambiguous, "encoded name"), (&late, "`limits.maxMultipartSniffBytes` (100000)")] {
            // A message with the whole body has the model.
            let readable = mode == BodySendMode::Buffered && sent == &late;
            let world = Setup { limits: limits.clone(), ..with_rule() }.build();
            let told = upload(&world, mode, AUDIO, sent);
            if readable {
                assert!(told.told.refused.is_none(), "{mode:?}");
            } else {
                let (status, text) = told.told.refused.clone().expect(why);
                assert_eq!((status, told.reason()), (400, "invalid_model"), "{mode:?}: {text}");
                assert!(text.contains(why), "{mode:?}: {text}");
            }
            assert_eq!(world.processor.picker.buffered.bytes(), 0);
            drop(told);
            world.assert_books_closed(1);

            let world = Setup { limits: limits.clone(), ..Setup::default() }.build();
            let told = upload(&world, mode, AUDIO, sent);
            assert!(told.served == **sent, "{mode:?} {why}: {:?}", told.told.refused);
            let counted = world.processor.metrics.degraded.get(Degraded::UnreadForm);
            assert_eq!(counted, u64::from(!readable), "{mode:?} {why}");
            drop(told);
            world.assert_books_closed(1);
        }
    }
}

#[test]
fn form_that_names_no_model_is_handled_like_other_bodies() {
    for mode in MODES {
        // The only model that the pool knows is its default.
        let world = with_rule().build();
        let told = upload(&world, mode, AUDIO, &form(&[file(100)]));
        assert!(told.served == form(&[model("base"), file(100)]), "{mode:?}: {:?}", told.told.refused);
        drop(told);
        world.assert_books_closed(1);
        let mut setup = with_rule();
        let other = RewriteTarget { model: "base".into(), weight: 1 };
        setup.rewrites.exact.insert("other".to_owned(), vec![other]);
        let world = setup.build();
        let told = upload(&world, mode, AUDIO, &form(&[file(100)]));
        let (_, text) = told.told.refused.clone().expect("a refusal");
        assert!(told.reason() == "invalid_model" && text.contains("got nothing"), "{mode:?}: {text}");
        drop(told);
        // The upload of a file concerns no model.
        let told = upload(&world, mode, "/v1/files", &form(&[file(100)]));
        assert!(told.told.refused.is_none(), "{mode:?}");
        drop(told);
        world.assert_books_closed(2);
    }
}

#[test]
fn second_model_after_the_decision_ends_the_request() {
    for mode in [BodySendMode::Streamed, BodySendMode::FullDuplexStreamed] {
        for second in ["alias", "other"] {
            let world = with_rule().build();
            let upload = upload(&world, mode, AUDIO, &form(&[model("alias"), file(50_000), model(second)]));
            let (status, text) = upload.told.refused.clone().expect("a refusal");
            assert_eq!((status, upload.reason()), (400, "invalid_model"), "{text}");
            assert!(text.contains("comes twice"), "{text}");
            assert!(!upload.exchange.is_routed());
            assert!(world.snapshot.load().endpoints.iter().all(|s| s.endpoint.ledger.in_flight() == 0));
            drop(upload);
            let records = world.processor.decisions.snapshot();
            let ends: Vec<_> = records.iter().map(|record| (record.end, record.status, &*record.model)).collect();
            assert_eq!(ends, [("contradicted", 400, "base")]);
            world.assert_books_closed(1);
        }
        // Nobody reads the rest without a rule.
        let world = Setup::default().build();
        let upload = upload(&world, mode, AUDIO, &form(&[model("alias"), file(50_000), model("other")]));
        assert!(upload.told.refused.is_none());
    }
}

#[test]
fn limit_of_a_model_applies_to_forms_and_to_paths_below_responses() {
    let few = quota::Limits { requests_per_minute: Some(2), ..NONE };
    for mode in MODES {
        let world = Setup::default().build();
        limited(&world, Subject::Model, tenants(few), noon);
        let sent = form(&[file(100_000), model("m")]);
        let reasons = [(); 3].map(|()| upload(&world, mode, AUDIO, &sent).reason().to_owned());
        assert_eq!(reasons, ["", "", "rpm_exceeded"], "{mode:?}");
        world.assert_books_closed(3);
    }
    let world = with_rule().build();
    limited(&world, Subject::Model, tenants(few), noon);
    for path in ["/v1/responses/compact", "/v1/responses/compact/", "/v1/responses"] {
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[(":path", path), (":method", "POST")], false))));
        let sent = br#"{"model":"alias","input":"x"}"#;
        let told = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent, true)))));
        match path {
            "/v1/responses" => assert_eq!(told.set["x-attache-reason"], "rpm_exceeded"),
            _ => assert_eq!(told.text(), r#"{"model":"base","input":"x"}"#),
        }
    }
}

#[test]
fn pause_in_an_upload_is_not_the_end_of_a_form() {
    let world = with_rule().build();
    let mut exchange = world.exchange();
    let pairs = [(":path", AUDIO), (":method", "POST"), ("content-type", "multipart/form-data; boundary=b")];
    let first = request(Message::RequestHeaders(headers(&pairs, false)));
    let protocol_config = Some(config(BodySendMode::Streamed, BodySendMode::FullDuplexStreamed, true));
    send(&mut exchange, ProcessingRequest { protocol_config, ..first });
    send(&mut exchange, request(Message::RequestBody(body(&file(100), false))));
    assert!(exchange.deadline() > Some(NOW.after(PAUSE)));
    send(&mut exchange, request(Message::RequestBody(body(&model("alias"), false))));
    assert!(!exchange.is_routed(), "the last byte of the model is unknown");
    send(&mut exchange, request(Message::RequestBody(body(b"--b--\r\n", false))));
    assert!(exchange.is_routed());
}
