//! What a prompt's server keeps for an answer that does not come: who frees it, and when nobody may.

use super::splitting::{among, asked, direct, good, splitting, told};
use super::*;
use attache_disagg::Mode;
use attache_picker::event::Degraded;
use attache_picker::split::LegCall;
use attache_pool::health::{Availability, Outcome as Health};
use attache_scheduling::Decider;

const ONCE: (&str, &str) = ("upstream.request_attempt_count", "1");
const TWICE: (&str, &str) = ("upstream.request_attempt_count", "2");
const OVERFLOW: (&str, &str) = ("response.code_details", "upstream_reset_before_response_started{overflow}");
const REFUSED: (&str, &str) = ("response.code_details", "upstream_reset{connection_failure}");

/// A request whose prompt is computed, and the server that is named for it.
fn computed(world: &World) -> (Exchange, String) {
    let (mut exchange, ..) = asked(world, &[("x-request-id", "r-1")]);
    let all = told(&mut exchange, 0, good(), 40);
    (exchange, all.set[DESTINATION].clone())
}

/// What is asked of servers when an answer begins so, and where its first server stands.
fn freed(pairs: &[(&str, &str)], attributes: &[(&str, &str)], first_event: &str) -> (Vec<LegCall>, String) {
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let (mut exchange, named) = begun(&world, pairs, attributes);
    let mut asks = exchange.leg_calls();
    if !first_event.is_empty() {
        send(&mut exchange, request(Message::ResponseBody(body(first_event.as_bytes(), false))));
        asks.extend(exchange.leg_calls());
    }
    send(&mut exchange, request(Message::ResponseBody(body(b"", true))));
    assert!(exchange.leg_calls().is_empty());
    drop(exchange);
    world.assert_books_closed(1);
    (asks, named)
}

/// A request whose answer's head has come.
fn begun(world: &World, pairs: &[(&str, &str)], attributes: &[(&str, &str)]) -> (Exchange, String) {
    let (mut exchange, named) = computed(world);
    let text = |value: &str| Value { kind: Some(Kind::StringValue(value.to_owned())) };
    // As Envoy writes them: a count is a number.
    let value = |value: &str| match value.parse() {
        Ok(count) => Value { kind: Some(Kind::NumberValue(count)) },
        Err(_) => text(value),
    };
    let fields = attributes.iter().map(|(name, said)| ((*name).to_owned(), value(said))).collect();
    let head = request(Message::ResponseHeaders(headers(pairs, false)));
    let attributes = HashMap::from([("envoy.filters.http.ext_proc".to_owned(), Struct { fields })]);
    send(&mut exchange, ProcessingRequest { attributes, ..head });
    (exchange, named)
}

#[test]
fn a_prompt_is_freed_that_the_decode_server_has_declined_or_not_been_there_for() {
    let event = ("content-type", "text/event-stream");
    let busy = "data: {\"error\":{\"message\":\"busy\",\"code\":429}}\n\n";
    for (pairs, attributes, first, same) in [
        // Whoever was asked before would have refused such a body as well.
        (&[(":status", "400")][..], &[][..], "", true),
        (&[(":status", "422")], &[], "", true),
        (&[(":status", "422")], &[ONCE], "{}", true),
        (&[(":status", "404")], &[ONCE], "", true),
        (&[(":status", "429")], &[ONCE], "", false),
        (&[(":status", "503")], &[OVERFLOW, ONCE], "", false),
        (&[(":status", "503")], &[REFUSED, ONCE], "", false),
        (&[(":status", "200"), event], &[ONCE], busy, false),
    ] {
        let (asks, named) = freed(pairs, attributes, first);
        let [ask] = asks.as_slice() else { panic!("{pairs:?}: {asks:?}") };
        assert_eq!(ask.url.contains(&named), same, "{pairs:?}: {} after {named}", ask.url);
        assert!(["192.168.1.3:", "192.168.1.4:"].iter().any(|decode| ask.url.contains(decode)));
        assert_eq!(ask.attempt, None, "nobody waits for it");
        assert!(ask.headers.contains(&("x-request-id", "r-1".to_owned())));
        let sent: serde_json::Value = serde_json::from_slice(&ask.body).unwrap();
        assert_eq!((&sent["max_tokens"], &sent["stream"]), (&1.into(), &false.into()));
        assert_eq!(sent["kv_transfer_params"]["remote_engine_id"], "e");
    }
}

/// Blocks that were fetched once may hold another prompt by now.
#[test]
fn a_prompt_that_may_have_been_fetched_is_not_fetched_again() {
    let event = ("content-type", "text/event-stream");
    let lost = "data: {\"error\":{\"message\":\"gone\",\"code\":503}}\n\n";
    let failed = "data: {\"error\":{\"message\":\"dead\",\"code\":500}}\n\n";
    let unreadable = "data: {\"error\":{\"message\":\"no tool call came of it\",\"code\":400}}\n\n";
    let busy = "data: {\"error\":{\"message\":\"busy\",\"code\":429}}\n\n";
    for (pairs, attributes, first) in [
        (&[(":status", "200"), event][..], &[ONCE][..], "data: {}\n\n"),
        (&[(":status", "200"), event], &[ONCE], failed),
        (&[(":status", "200"), event], &[ONCE], unreadable),
        (&[(":status", "500")], &[ONCE], ""),
        // Any server can set this header.
        (&[(":status", "503"), ("x-envoy-overloaded", "true")], &[ONCE], ""),
        // The answer of Envoy, or of a proxy beside the server, when that was lost while it worked.
        (&[(":status", "503")], &[ONCE], ""),
        (&[(":status", "200"), event], &[ONCE], lost),
        (&[(":status", "504")], &[ONCE], ""),
        // It was lost while it worked, and refuses or declines what comes again.
        (&[(":status", "503")], &[REFUSED, TWICE], ""),
        (&[(":status", "400")], &[TWICE], ""),
        (&[(":status", "429")], &[TWICE], ""),
        // So it may be where Envoy does not tell.
        (&[(":status", "404")], &[], ""),
        (&[(":status", "503")], &[REFUSED], ""),
        (&[(":status", "503"), ("x-envoy-overloaded", "true")], &[], ""),
        (&[(":status", "429")], &[], ""),
        (&[(":status", "200"), event], &[], busy),
    ] {
        assert!(freed(pairs, attributes, first).0.is_empty(), "{pairs:?} {attributes:?}");
    }
    // The stream ends while the answer is awaited: nobody knows how far the decode server was, and it frees what it
    // has not fetched itself.
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let (mut exchange, _) = computed(&world);
    exchange.gone(NOW);
    assert!(exchange.leg_calls().is_empty());
    // A store keeps what it is given.
    let world = splitting(Mode::Direct(direct("shared-storage")), Decider::Always);
    let (mut exchange, _) = computed(&world);
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "400")], false))));
    assert!(exchange.leg_calls().is_empty());
}

#[test]
fn prompts_that_are_left_to_their_lease_since_tries_are_not_told_are_counted() {
    for (status, attributes, left) in [("429", &[][..], 1), ("404", &[], 1), ("400", &[], 0), ("429", &[ONCE], 0)] {
        let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
        let _answered = begun(&world, &[(":status", status)], attributes);
        let counted = world.processor.metrics.degraded_count(Degraded::AttemptsUntold);
        assert_eq!(counted, left, "{status} {attributes:?}");
    }
}

#[test]
fn where_no_other_server_can_fetch_it_a_prompt_waits_for_its_lease() {
    let world = among(&["prefill", "decode"], Mode::Direct(direct("nixl")), Decider::Always);
    assert!(begun(&world, &[(":status", "429")], &[ONCE]).0.leg_calls().is_empty());
}

/// An answer fails for the blocks that have gone with the server that kept them: who was to fetch them has done
/// nothing.
#[test]
fn a_decode_server_is_not_blamed_for_a_prompt_that_is_gone() {
    for gone in [false, true] {
        let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
        let health = |at: usize| world.snapshot.load().endpoints[at].endpoint.clone();
        let policy = HealthPolicy::default();
        for _ in 0..2 * policy.consecutive_failures {
            let (mut exchange, ..) = asked(&world, &[]);
            told(&mut exchange, 0, good(), 40);
            for prefill in [0, 1].into_iter().filter(|_| gone) {
                for _ in 0..2 {
                    health(prefill).health.record(Health::ConnectFailure, NOW, &policy);
                }
            }
            send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "500")], false))));
            (0..2).for_each(|prefill| health(prefill).health.reset());
        }
        let open = [2, 3].map(|decode| health(decode).health.availability(NOW, &policy) == Availability::Open);
        assert_eq!(open, [gone; 2]);
    }
}

/// A client that leaves while the prompt is computed has not tried the decode server: the next request may.
#[test]
fn a_decode_server_is_probed_by_the_next_request_when_the_client_has_left() {
    let world = among(&["prefill", "decode", "decode"], Mode::Direct(direct("nixl")), Decider::Always);
    let half_open = world.snapshot.load().endpoints[1].endpoint.clone();
    for _ in 0..2 {
        half_open.health.record(Health::ConnectFailure, Timestamp(1), &HealthPolicy::default());
    }
    let mut probes = 0;
    for _ in 0..60 {
        let (exchange, ..) = asked(&world, &[]);
        probes += half_open.ledger.in_flight();
        drop(exchange);
    }
    assert!(probes > 1, "{probes}");
}
