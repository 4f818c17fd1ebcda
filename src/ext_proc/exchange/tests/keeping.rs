//! Blocks that a prefill worker keeps when the decode worker does not fetch them: when they may be released.

use super::splitting::{among, asked, direct, give_leg_result, good, splitting};
use super::*;
use attache_disagg::Mode;
use attache_picker::event::Degraded;
use attache_picker::split::LegCall;
use attache_pool::health::{Availability, HealthOutcome};
use attache_scheduling::Decider;

const ONCE: (&str, &str) = ("upstream.request_attempt_count", "1");
const TWICE: (&str, &str) = ("upstream.request_attempt_count", "2");
const OVERFLOW: (&str, &str) = ("response.code_details", "upstream_reset_before_response_started{overflow}");
const REFUSED: (&str, &str) = ("response.code_details", "upstream_reset{connection_failure}");

/// A request whose prefill has ended, and its decode worker.
fn computed(world: &World) -> (Exchange, String) {
    let (mut exchange, ..) = asked(world, &[("x-request-id", "r-1")]);
    let all = give_leg_result(&mut exchange, 0, good(), 40);
    (exchange, all.set[DESTINATION].clone())
}

/// The calls after a response that begins like this, and the address of the planned decode worker.
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

/// A request whose response headers have arrived.
fn begun(world: &World, pairs: &[(&str, &str)], attributes: &[(&str, &str)]) -> (Exchange, String) {
    let (mut exchange, named) = computed(world);
    let text = |value: &str| Value { kind: Some(Kind::StringValue(value.to_owned())) };
    // Envoy writes the attempt count as a number.
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
fn blocks_are_released_if_decode_worker_declines_or_is_unreachable() {
    let event = ("content-type", "text/event-stream");
    let busy = "data: {\"error\":{\"message\":\"busy\",\"code\":429}}\n\n";
    for (pairs, attributes, first, same) in [
        // An earlier worker would have rejected such a body as well.
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
        assert_eq!(ask.attempt, None, "its result is not awaited");
        assert!(ask.headers.contains(&("x-request-id", "r-1".to_owned())));
        let sent: serde_json::Value = serde_json::from_slice(&ask.body).unwrap();
        assert_eq!((&sent["max_tokens"], &sent["stream"]), (&1.into(), &false.into()));
        assert_eq!(sent["kv_transfer_params"]["remote_engine_id"], "e");
    }
}

/// Blocks that were fetched once may already contain another prompt.
#[test]
fn possibly_fetched_blocks_are_not_fetched_again() {
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
        // Any model server can set this header.
        (&[(":status", "503"), ("x-envoy-overloaded", "true")], &[ONCE], ""),
        // The response of Envoy or a sidecar if the connection to the worker was lost during its work.
        (&[(":status", "503")], &[ONCE], ""),
        (&[(":status", "200"), event], &[ONCE], lost),
        (&[(":status", "504")], &[ONCE], ""),
        // The first connection was lost during the work, and the worker rejected the retry.
        (&[(":status", "503")], &[REFUSED, TWICE], ""),
        (&[(":status", "400")], &[TWICE], ""),
        (&[(":status", "429")], &[TWICE], ""),
        // The same is possible if Envoy does not report the attempt count.
        (&[(":status", "404")], &[], ""),
        (&[(":status", "503")], &[REFUSED], ""),
        (&[(":status", "503"), ("x-envoy-overloaded", "true")], &[], ""),
        (&[(":status", "429")], &[], ""),
        (&[(":status", "200"), event], &[], busy),
    ] {
        assert!(freed(pairs, attributes, first).0.is_empty(), "{pairs:?} {attributes:?}");
    }
    // The stream ends before the response: the decode worker may have fetched the blocks, and otherwise frees them
    // itself.
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let (mut exchange, _) = computed(&world);
    exchange.gone(NOW);
    assert!(exchange.leg_calls().is_empty());
    // A shared store has no lease.
    let world = splitting(Mode::Direct(direct("shared-storage")), Decider::Always);
    let (mut exchange, _) = computed(&world);
    send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "400")], false))));
    assert!(exchange.leg_calls().is_empty());
}

#[test]
fn unknown_attempts_leave_blocks_to_lease_and_are_counted() {
    for (status, attributes, left) in [("429", &[][..], 1), ("404", &[], 1), ("400", &[], 0), ("429", &[ONCE], 0)] {
        let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
        let _answered = begun(&world, &[(":status", status)], attributes);
        let counted = world.processor.metrics.degraded.get(Degraded::AttemptsUntold);
        assert_eq!(counted, left, "{status} {attributes:?}");
    }
}

#[test]
fn blocks_without_other_fetcher_are_left_to_lease() {
    let world = among(&["prefill", "decode"], Mode::Direct(direct("nixl")), Decider::Always);
    assert!(begun(&world, &[(":status", "429")], &[ONCE]).0.leg_calls().is_empty());
}

/// A response that fails because the blocks were lost with the prefill worker does not count against the decode worker.
#[test]
fn decode_worker_is_not_blamed_for_lost_blocks() {
    for gone in [false, true] {
        let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
        let health = |at: usize| world.snapshot.load().endpoints[at].endpoint.clone();
        let policy = HealthPolicy::default();
        for _ in 0..2 * policy.consecutive_failures {
            let (mut exchange, ..) = asked(&world, &[]);
            give_leg_result(&mut exchange, 0, good(), 40);
            for prefill in [0, 1].into_iter().filter(|_| gone) {
                for _ in 0..2 {
                    health(prefill).health.record(HealthOutcome::ConnectFailure, NOW, &policy);
                }
            }
            send(&mut exchange, request(Message::ResponseHeaders(headers(&[(":status", "500")], false))));
            (0..2).for_each(|prefill| health(prefill).health.reset());
        }
        let open = [2, 3].map(|decode| health(decode).health.availability(NOW, &policy) == Availability::Open);
        assert_eq!(open, [gone; 2]);
    }
}

/// A client that disconnects during the prefill has not probed the decode worker, so the next request may.
#[test]
fn next_request_probes_decode_worker_after_disconnect() {
    let world = among(&["prefill", "decode", "decode"], Mode::Direct(direct("nixl")), Decider::Always);
    let half_open = world.snapshot.load().endpoints[1].endpoint.clone();
    for _ in 0..2 {
        half_open.health.record(HealthOutcome::ConnectFailure, Timestamp(1), &HealthPolicy::default());
    }
    let mut probes = 0;
    for _ in 0..60 {
        let (exchange, ..) = asked(&world, &[]);
        probes += half_open.ledger.in_flight();
        drop(exchange);
    }
    assert!(probes > 1, "{probes}");
}
