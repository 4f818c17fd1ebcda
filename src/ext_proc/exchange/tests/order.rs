//! Property tests: any order of events, and any cut of a body.

use super::*;
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    RequestHeaders { eos: bool, path: u8 },
    RequestBody { bytes: Vec<u8>, eos: bool },
    RequestTrailers,
    ResponseHeaders { status: u16, eos: bool },
    ResponseBody { bytes: Vec<u8>, eos: bool },
    ResponseTrailers,
    Deadline,
    Nothing,
}

fn step() -> impl Strategy<Value = Step> {
    let bytes = prop_oneof![
        Just(br#"{"model":"m","prompt":"p"}"#.to_vec()),
        Just(br#"{"model":"m","#.to_vec()),
        Just(br#""prompt":"p"}"#.to_vec()),
        Just(Vec::new()),
        Just(br#"data: {"model":"t","usage":{"prompt_tokens":3}}"#.to_vec()),
        prop::collection::vec(any::<u8>(), 0..40),
    ];
    prop_oneof![
        3 => (any::<bool>(), 0u8..5).prop_map(|(eos, path)| Step::RequestHeaders { eos, path }),
        4 => (bytes.clone(), any::<bool>()).prop_map(|(bytes, eos)| Step::RequestBody { bytes, eos }),
        1 => Just(Step::RequestTrailers),
        3 => (prop_oneof![Just(200u16), Just(503), Just(429), Just(0)], any::<bool>())
            .prop_map(|(status, eos)| Step::ResponseHeaders { status, eos }),
        4 => (bytes, any::<bool>()).prop_map(|(bytes, eos)| Step::ResponseBody { bytes, eos }),
        1 => Just(Step::ResponseTrailers),
        1 => Just(Step::Deadline),
        1 => Just(Step::Nothing),
    ]
}

fn event(step: &Step) -> Event {
    let paths = ["/v1/completions", "/v1/models", "/unknown", "/v1/responses/resp_1", "/v1/messages"];
    let message = match step {
        Step::RequestHeaders { eos, path } => {
            Message::RequestHeaders(headers(&[(":path", paths[usize::from(*path)])], *eos))
        }
        Step::RequestBody { bytes, eos } => Message::RequestBody(body(bytes, *eos)),
        Step::RequestTrailers => Message::RequestTrailers(HttpTrailers::default()),
        Step::ResponseHeaders { status, eos } => {
            Message::ResponseHeaders(headers(&[(":status", &status.to_string())], *eos))
        }
        Step::ResponseBody { bytes, eos } => Message::ResponseBody(body(bytes, *eos)),
        Step::ResponseTrailers => Message::ResponseTrailers(HttpTrailers::default()),
        Step::Deadline => return Event::Deadline,
        Step::Nothing => return Event::Message(Box::default()),
    };
    Event::Message(Box::new(request(message)))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn any_order_of_events_ends_in_exactly_one_outcome(
        steps in prop::collection::vec(step(), 0..14),
        modes in (0i32..6, 0i32..6, any::<bool>()),
        unsaid in any::<bool>(),
        rename in any::<bool>(),
    ) {
        let target = RewriteTarget { model: "t".into(), weight: 1 };
        let any = if rename { vec![target] } else { Vec::new() };
        let rewrites = ModelRewrites { any, ..ModelRewrites::default() };
        let world = Setup { rewrites, servers: vec![(0, 0.1, &[]); 2], ..Setup::default() }.build();
        let mut exchange = world.exchange();
        let mut out = Actions::new();
        for (at, step) in steps.iter().enumerate() {
            let mut event = event(step);
            if let (0, false, Event::Message(m)) = (at, unsaid, &mut event) {
                m.protocol_config = Some(ProtocolConfiguration {
                    request_body_mode: modes.0,
                    response_body_mode: modes.1,
                    send_body_without_waiting_for_header_response: modes.2,
                });
            }
            let before = exchange.outcome();
            let result = exchange.on(event, NOW, &mut out);
            prop_assert!(before.is_none() || exchange.outcome() == before, "an outcome never changes");
            if result.is_err() {
                break;
            }
        }
        let answered = Answered::of(out.make_contiguous());
        let refusals = answered.kinds.iter().filter(|k| **k == "immediate").count();
        let named = answered.kinds.iter().filter(|k| **k == "request_headers").count();
        prop_assert!(refusals <= 1 && named <= 1);
        if refusals == 1 {
            prop_assert_eq!(*answered.kinds.last().unwrap(), "immediate", "nothing follows a refusal");
            prop_assert_eq!(answered.metadata, None);
        }
        let first_body = answered.kinds.iter().position(|k| *k == "request_body");
        let first_head = answered.kinds.iter().position(|k| *k == "request_headers");
        prop_assert!(first_body.is_none() || first_head < first_body, "headers before body");
        drop(exchange);
        world.assert_books_closed(1);
    }

    #[test]
    fn full_duplex_bodies_pass_byte_for_byte(
        padding in 0usize..200_000,
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..6),
    ) {
        let world = Setup::default().build();
        let sent = completion("m", &"x".repeat(padding)).into_bytes();
        let mut cuts: Vec<usize> = cuts.iter().map(|c| c.index(sent.len())).collect();
        cuts.extend([0, sent.len()]);
        cuts.sort_unstable();
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH], false))));
        for pair in cuts.windows(2) {
            send(&mut exchange, request(Message::RequestBody(body(&sent[pair[0]..pair[1]], false))));
        }
        let answers = send(&mut exchange, request(Message::RequestBody(body(b"", true))));
        let all = Answered::of(&answers);
        prop_assert_eq!(all.ended, 1);
        prop_assert!(all.body == sent);
        for answer in &answers {
            if let Some(Response::RequestBody(_)) = &answer.response {
                prop_assert!(applied(answer, &[]).len() <= 64 << 10);
            }
        }
    }
}
