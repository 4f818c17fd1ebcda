//! The names of the destination, and headers by which clients could name a server themselves.

use super::*;
use attache_scheduling::router::DESTINATION_NAMESPACE;

fn aibrix() -> DestinationNames {
    DestinationNames {
        headers: vec![DESTINATION.into(), "target-pod".into()],
        metadata: vec![
            (DESTINATION_NAMESPACE.into(), DESTINATION.into()),
            (DESTINATION_NAMESPACE.into(), "second".into()),
            ("other".into(), "third".into()),
        ],
        strategy_header: Some("routing-strategy".into()),
    }
}

/// The replies to a request in this body mode whose client sends `extra` headers: to its headers, and to its body.
fn replies(world: &World, mode: BodySendMode, extra: &[(&str, &str)]) -> [Vec<ProcessingResponse>; 2] {
    let mut exchange = world.exchange();
    let pairs: Vec<(&str, &str)> = [PATH].iter().chain(extra).copied().collect();
    let first = Message::RequestHeaders(headers(&pairs, false));
    let first = ProcessingRequest { protocol_config: Some(config(mode, mode, false)), ..request(first) };
    let to_headers = send(&mut exchange, first);
    let sent = completion("m", "p");
    let to_body = match mode {
        BodySendMode::None => Vec::new(),
        _ => send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))),
    };
    [to_headers, to_body]
}

#[test]
fn destination_and_strategy_are_sent_under_every_name() {
    let world = Setup { destination_names: aibrix(), ..Setup::default() }.build();
    let all = replies(&world, BodySendMode::FullDuplexStreamed, &[]).concat();
    let got = Answered::of(&all);
    for (name, value) in
        [(DESTINATION, "192.168.1.1:8000"), ("target-pod", "192.168.1.1:8000"), ("routing-strategy", "test")]
    {
        assert_eq!(got.set.get(name).map(String::as_str), Some(value), "{name}");
    }
    let metadata = all.iter().find_map(|reply| reply.dynamic_metadata.clone()).expect("metadata");
    let at = |namespace: &str, key: &str| match &metadata.fields[namespace].kind {
        Some(Kind::StructValue(fields)) => fields.fields.get(key).and_then(|value| value.kind.clone()),
        other => panic!("{other:?}"),
    };
    for (namespace, key) in
        [(DESTINATION_NAMESPACE, DESTINATION), (DESTINATION_NAMESPACE, "second"), ("other", "third")]
    {
        assert_eq!(at(namespace, key), Some(Kind::StringValue("192.168.1.1:8000".to_owned())), "{namespace} {key}");
    }
    let none = DestinationNames { metadata: Vec::new(), ..DestinationNames::default() };
    let world = Setup { destination_names: none, ..Setup::default() }.build();
    let all = replies(&world, BodySendMode::FullDuplexStreamed, &[]).concat();
    assert!(all.iter().filter_map(|reply| reply.dynamic_metadata.as_ref()).all(|metadata| metadata.fields.is_empty()));
}

#[test]
fn destination_of_a_client_never_passes_in_any_mode() {
    use BodySendMode::{Buffered, FullDuplexStreamed, None as Off, Streamed};
    for trust_client_headers in [false, true] {
        for names in [DestinationNames::default(), aibrix()] {
            let exchange = ExchangeSettings { trust_client_headers, ..ExchangeSettings::default() };
            let setup = Setup { exchange, destination_names: names.clone(), ..Setup::default() };
            let world = setup.build();
            for mode in [FullDuplexStreamed, Streamed, Buffered, Off] {
                let own = [("target-pod", "10.6.6.6:1"), (DESTINATION, "10.6.6.6:1"), ("target-pod", "10.6.6.6:2")];
                let [to_headers, to_body] = replies(&world, mode, &own);
                let got = Answered::of(&[to_headers.clone(), to_body].concat());
                for name in ["target-pod", DESTINATION] {
                    let is_set = names.headers.iter().any(|set| **set == *name);
                    let set = is_set.then_some("192.168.1.1:8000");
                    assert_eq!(got.set.get(name).map(String::as_str), set, "{name} {mode:?}");
                    let is_removed = got.removed.iter().any(|removed| removed == name);
                    assert!(is_removed || is_set, "{name} {mode:?}");
                    if mode == Buffered {
                        // Envoy may fail open before the body is answered.
                        assert!(Answered::of(&to_headers).removed.iter().any(|removed| removed == name), "{name}");
                    }
                }
            }
        }
    }
}
