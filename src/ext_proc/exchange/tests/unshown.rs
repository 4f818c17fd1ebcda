//! Gateways that show no request body before the decision.

use super::*;
use attache_picker::event::Degraded;

/// Sends request headers in this body mode, and returns the reply and how often the degraded mode was counted.
fn headers_in(setup: Setup, mode: BodySendMode, pairs: &[(&str, &str)], end: bool) -> (Answered, u64) {
    let world = setup.build();
    let mut exchange = world.exchange();
    let protocol_config = Some(config(mode, BodySendMode::FullDuplexStreamed, false));
    let head = request(Message::RequestHeaders(headers(pairs, end)));
    let told = Answered::of(&send(&mut exchange, ProcessingRequest { protocol_config, ..head }));
    drop(exchange);
    world.assert_books_closed(1);
    (told, world.processor.metrics.degraded.get(Degraded::NoBody))
}

const POST: [(&str, &str); 2] = [PATH, (":method", "POST")];

/// A pool with a rule for a model.
pub(super) fn with_rule() -> Setup {
    let target = RewriteTarget { model: "base".into(), weight: 1 };
    let rewrites = ModelRewrites { exact: [("alias".to_owned(), vec![target])].into(), any: Vec::new() };
    Setup { rewrites, ..Setup::default() }
}

#[test]
fn request_without_its_body_is_counted_and_refused_if_a_rule_needs_the_model() {
    for mode in [BodySendMode::None, BodySendMode::Streamed] {
        let (told, counted) = headers_in(Setup::default(), mode, &POST, false);
        assert!(told.set.contains_key(DESTINATION) && counted == 1, "{mode:?}: {told:?}");
        let (told, counted) = headers_in(with_rule(), mode, &POST, false);
        let (status, text) = told.refused.expect("a refusal");
        assert_eq!((status, told.set["x-attache-reason"].as_str(), counted), (400, "invalid_model", 1), "{mode:?}");
        assert!(text.contains("`processing_mode.request_body_mode`"), "{text}");
    }
}

#[test]
fn request_without_a_body_or_with_a_shown_one_is_not_counted() {
    let get = [PATH, (":method", "GET")];
    let unknown = [(":path", "/custom"), (":method", "POST")];
    for (pairs, end) in [(&get, true), (&get, false), (&unknown, false)] {
        let (told, counted) = headers_in(with_rule(), BodySendMode::None, pairs, end);
        assert!(told.set.contains_key(DESTINATION) && counted == 0, "{pairs:?}: {told:?}");
    }
    for mode in [BodySendMode::Buffered, BodySendMode::FullDuplexStreamed] {
        let (told, counted) = headers_in(with_rule(), mode, &POST, false);
        assert!(told.refused.is_none() && counted == 0, "{mode:?}: {told:?}");
    }
}
