//! Split requests: calls to prefill workers, replies to the gateway, fallbacks. Bookings end however the prefill ends.

mod members;

use super::*;
use attache_disagg::attempts::AttemptLimits;
use attache_disagg::connector::sglang::DEFAULT_BOOTSTRAP_PORT;
use attache_disagg::policy::{DEFAULT_DECODER_BLOCKS_TTL, DEFAULT_PREFILL_TIMEOUT};
use attache_disagg::{Direct, Failure, Fallback, Mode, connector};
use attache_picker::split::{DISAGGREGATION_HEADER, LegCall, LegResult, PREFILL_HEADER};
use attache_pool::health::Availability;
use attache_scheduling::Decider;
use bytes::Bytes;
use proptest::prelude::*;

const PARAMS: &str =
    r#"{"do_remote_prefill":true,"remote_block_ids":[[7,8]],"remote_engine_id":"e","new_in_2027":1.50}"#;
/// Two prefill workers, two decode workers: 192.168.1.1 to .4.
pub(super) const ROLES: &[&str] = &["prefill", "prefill", "decode", "decode"];

pub(super) fn direct(name: &str) -> Direct {
    Direct {
        connector: connector::named(name).unwrap().connector,
        by_label: false,
        bounds: AttemptLimits { timeout: DEFAULT_PREFILL_TIMEOUT, hedge_after: None },
        message_timeout: None,
        fallback: Fallback::Local,
        scheme: "http".into(),
        path_prefix: "".into(),
        insecure_skip_verify: false,
        bootstrap_port: DEFAULT_BOOTSTRAP_PORT,
        decoder_blocks_ttl: DEFAULT_DECODER_BLOCKS_TTL,
    }
}

pub(super) fn splitting(mode: Mode, decider: Decider) -> World {
    among(ROLES, mode, decider)
}

/// The same with workers of these roles, from 192.168.1.1.
pub(super) fn among(roles: &'static [&'static str], mode: Mode, decider: Decider) -> World {
    setup(roles, mode, decider).build()
}

pub(super) fn setup(roles: &'static [&'static str], mode: Mode, decider: Decider) -> Setup {
    let whole = !matches!(&mode, Mode::Direct(direct) if !direct.connector.serves_whole());
    let required = matches!(&mode, Mode::Direct(direct) if direct.fallback == Fallback::Fail);
    let policy = SplitPolicy { decider, together: vec!["roleset-name".into()], whole, required };
    Setup {
        servers: vec![(0, 0.0, &[]); roles.len()],
        roles,
        disagg: Some((policy, mode)),
        strategy: "predicted-latency",
        parameters: serde_json::Value::Null,
        ..Setup::default()
    }
}

/// Sends a streaming request up to its decision.
pub(super) fn asked(world: &World, extra: &[(&str, &str)]) -> (Exchange, Vec<ProcessingResponse>, Vec<LegCall>) {
    asked_for(world, SENT, extra)
}

/// Sends a completion with this body up to its decision.
pub(super) fn asked_for(
    world: &World,
    sent: &str,
    extra: &[(&str, &str)],
) -> (Exchange, Vec<ProcessingResponse>, Vec<LegCall>) {
    let mut exchange = world.exchange();
    let all: Vec<(&str, &str)> = [PATH, (":method", "POST")].iter().chain(extra).copied().collect();
    send(&mut exchange, request(Message::RequestHeaders(headers(&all, false))));
    let out = send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true))));
    let asks = exchange.leg_calls();
    (exchange, out, asks)
}

pub(super) const SENT: &str = concat!(
    r#"{"model":"m", "prompt":"a long prompt","stream":true,"stream_options":{"include_usage":true},"n":1,"#,
    r#""kv_transfer_params":{"remote_host":"10.6.6.6"}}"#
);

/// The result of a prefill call arrives `after` so many milliseconds; returns the replies to the gateway.
pub(super) fn give_leg_result(exchange: &mut Exchange, attempt: usize, result: LegResult, after: u64) -> Answered {
    let mut out = Actions::new();
    exchange.on(Event::LegResult(attempt, result), NOW.after(Duration::from_millis(after)), &mut out).unwrap();
    Answered::of(&Vec::from(out))
}

pub(super) fn reply(status: u16, body: &str) -> LegResult {
    LegResult::Reply { status, body: Bytes::copy_from_slice(body.as_bytes()) }
}

pub(super) fn good() -> LegResult {
    reply(
        200,
        &format!(
            r#"{{"id":"x","choices":[{{"finish_reason":"length"}}],"usage":{{"prompt_tokens":5}},"kv_transfer_params":{PARAMS}}}"#
        ),
    )
}

/// Sends a response, and returns the headers that the client gets.
pub(super) fn answer(exchange: &mut Exchange) -> Answered {
    let pairs = [(":status", "200"), ("content-type", "text/event-stream")];
    let first = send(exchange, request(Message::ResponseHeaders(headers(&pairs, false))));
    send(exchange, request(Message::ResponseBody(body(b"data: {}\n\n", false))));
    send(exchange, request(Message::ResponseBody(body(b"", true))));
    Answered::of(&first)
}

#[test]
fn prefill_runs_first_and_decode_gets_its_result() {
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let given = [("x-request-id", "r-1"), ("authorization", "Bearer k"), ("cookie", "c")];
    let (mut exchange, out, asks) = asked(&world, &given);
    assert!(out.is_empty() && !exchange.is_routed(), "the gateway waits");
    let [ask] = asks.as_slice() else { panic!("{asks:?}") };
    assert!(["http://192.168.1.1:8000/v1/completions", "http://192.168.1.2:8000/v1/completions"].contains(&&*ask.url));
    assert!(
        ask.headers.contains(&("x-request-id", "r-1".into()))
            && ask.headers.contains(&("authorization", "Bearer k".into()))
    );
    assert!(!ask.headers.iter().any(|(name, _)| *name == "cookie"));
    let prefill: serde_json::Value = serde_json::from_slice(&ask.body).unwrap();
    assert_eq!((&prefill["max_tokens"], &prefill["stream"]), (&1.into(), &false.into()));
    assert_eq!(prefill["kv_transfer_params"]["remote_host"], serde_json::Value::Null, "a client is not believed");
    let booked: Vec<u32> = world.snapshot.load().endpoints.iter().map(|s| s.endpoint.ledger.in_flight()).collect();
    assert_eq!((booked[0] + booked[1], booked[2] + booked[3]), (1, 1), "both servers have it on their books");

    let all = give_leg_result(&mut exchange, 0, good(), 40);
    assert!(["192.168.1.3:8000", "192.168.1.4:8000"].contains(&&*all.set[DESTINATION]), "{all:?}");
    assert_eq!(all.text(), SENT.replace(r#"{"remote_host":"10.6.6.6"}"#, PARAMS), "all else is as the client wrote it");
    assert_eq!(all.ended, 1);
    assert!(!all.set.contains_key("x-request-id"), "the client's own stays");
    let after: Vec<u32> = world.snapshot.load().endpoints.iter().map(|s| s.endpoint.ledger.in_flight()).collect();
    assert_eq!((after[0] + after[1], after[2] + after[3]), (0, 1));

    let seen = answer(&mut exchange);
    assert_eq!(seen.set[DISAGGREGATION_HEADER], "split");
    assert!(ask.url.contains(&seen.set[PREFILL_HEADER]));
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn prefill_calls_use_the_api_path_despite_gateway_rewrites() {
    for (prefix, path, expected) in [
        ("", "/v1/completions", "/v1/completions"),
        ("", "/team/v1/completions/?x=1", "/v1/completions"),
        ("/llm", "/team/v1/completions", "/llm/v1/completions"),
        ("", "/team/inference/v1/generate", "/inference/v1/generate"),
    ] {
        for name in ["nixl", "sglang"] {
            if name == "sglang" && path.contains("inference") {
                continue;
            }
            let mode = Mode::Direct(Direct { path_prefix: prefix.into(), ..direct(name) });
            let world = splitting(mode, Decider::Always);
            let mut exchange = world.exchange();
            let sent = SENT.replace(r#""prompt":"a long prompt""#, r#""prompt":"a long prompt","token_ids":[1,2]"#);
            let first = headers(&[(":path", path), (":method", "POST")], false);
            send(&mut exchange, request(Message::RequestHeaders(first)));
            send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true))));
            let ask = exchange.leg_calls().remove(0);
            assert_eq!(ask.url.split(":8000").nth(1), Some(expected), "{name} {path}");
            if name == "sglang" {
                give_leg_result(&mut exchange, 0, reply(500, ""), 5);
                assert!(exchange.leg_calls()[0].url.ends_with(&format!(":8000{prefix}/abort_request")));
            }
        }
    }
}

#[test]
fn request_without_id_gets_one_for_both_workers() {
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let (mut exchange, _, asks) = asked(&world, &[]);
    let id = asks[0].headers.iter().find(|(name, _)| *name == "x-request-id").unwrap().1.clone();
    let all = give_leg_result(&mut exchange, 0, good(), 40);
    assert_eq!(all.set["x-request-id"], id);
}

#[test]
fn failed_prefill_is_retried_on_another_worker_then_local() {
    for (failure, code) in [
        (LegResult::Failed(Failure::Refused), "prefill_refused"),
        (LegResult::Failed(Failure::Broken), "prefill_broken"),
        (reply(500, "{}"), "prefill_failed"),
        (reply(503, ""), "prefill_failed"),
        (reply(429, ""), "prefill_busy"),
        (reply(200, "{}"), "prefill_unusable"),
        (reply(200, r#"{"kv_transfer_params":null}"#), "prefill_unusable"),
        (reply(200, "no json"), "prefill_unusable"),
        (
            reply(200, &format!(r#"{{"choices":[{{"finish_reason":"abort"}}],"kv_transfer_params":{PARAMS}}}"#)),
            "prefill_unusable",
        ),
    ] {
        // The other prefill worker succeeds.
        let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
        let (mut exchange, _, first) = asked(&world, &[]);
        assert!(give_leg_result(&mut exchange, 0, failure.clone(), 5).kinds.is_empty(), "{code}");
        let second = exchange.leg_calls();
        assert_eq!(second.len(), 1, "{code}");
        assert_ne!(first[0].url, second[0].url);
        assert!(!exchange.awaits(0) && exchange.awaits(1));
        // The result of the first attempt arrives too late.
        assert!(give_leg_result(&mut exchange, 0, good(), 6).kinds.is_empty());
        assert!(give_leg_result(&mut exchange, 1, good(), 50).text().contains("new_in_2027"), "{code}");
        let seen = answer(&mut exchange);
        assert_eq!(seen.set[DISAGGREGATION_HEADER], "split");
        drop(exchange);
        world.assert_books_closed(1);

        // No prefill worker succeeds.
        let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
        let (mut exchange, ..) = asked(&world, &[]);
        give_leg_result(&mut exchange, 0, failure.clone(), 5);
        let home = give_leg_result(&mut exchange, 1, failure, 9);
        let clean = SENT.replace(r#","kv_transfer_params":{"remote_host":"10.6.6.6"}"#, "");
        assert_eq!(home.text(), clean, "{code}");
        let waits: u64 = world.snapshot.load().endpoints.iter().map(|s| s.endpoint.ledger.prefill_tokens()).sum();
        assert!(waits > 0, "the decode server computes the prompt now");
        assert_eq!(answer(&mut exchange).set[DISAGGREGATION_HEADER], format!("local; reason={code}"));
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn client_error_of_prefill_is_left_to_the_decode_worker() {
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let (mut exchange, ..) = asked(&world, &[]);
    let all = give_leg_result(&mut exchange, 0, reply(400, r#"{"error":{"message":"no"}}"#), 5);
    assert!(all.set.contains_key(DESTINATION) && exchange.leg_calls().is_empty());
    assert_eq!(answer(&mut exchange).set[DISAGGREGATION_HEADER], "local; reason=prefill_declined");
}

#[test]
fn client_error_is_no_prefill_failure_with_any_fallback() {
    let mode = |name| Mode::Direct(Direct { fallback: Fallback::Fail, ..direct(name) });
    let world = splitting(mode("nixl"), Decider::Always);
    let (mut exchange, ..) = asked(&world, &[]);
    assert!(give_leg_result(&mut exchange, 0, reply(400, "{}"), 5).set.contains_key(DESTINATION));
    assert_eq!(answer(&mut exchange).set[DISAGGREGATION_HEADER], "local; reason=prefill_declined");
    drop(exchange);
    world.assert_books_closed(1);

    let ended = r#"{"choices":[{"finish_reason":"stop"}],"disaggregated_params":{"request_type":"context_only"}}"#;
    for (name, ended) in [("trtllm", ended), ("nixl", r#"{"choices":[{"finish_reason":"stop"}]}"#)] {
        let world = splitting(mode(name), Decider::Always);
        let (mut exchange, ..) = asked(&world, &[]);
        assert!(give_leg_result(&mut exchange, 0, reply(200, ended), 5).set.contains_key(DESTINATION), "{name}");
        assert!(exchange.leg_calls().is_empty(), "{name}: no other server is asked");
        assert_eq!(answer(&mut exchange).set[DISAGGREGATION_HEADER], "local; reason=prefill_ended", "{name}");
    }

    // If the decode worker waits for the prefill, Attaché reports the error to the client.
    for (status, expected) in [(400, (400, "prefill_declined")), (429, (503, "prefill_failed"))] {
        let world = splitting(mode("sglang"), Decider::Always);
        let (mut exchange, ..) = asked(&world, &[]);
        let all = give_leg_result(&mut exchange, 0, reply(status, "{}"), 5);
        let refused = all.refused.as_ref().unwrap().0;
        assert_eq!((refused, all.set["x-attache-reason"].as_str()), expected, "{status}");
    }
}

#[test]
fn prefill_booking_follows_the_attempt() {
    let bounds = AttemptLimits { hedge_after: Some(Duration::from_secs(2)), ..direct("nixl").bounds };
    let world = splitting(Mode::Direct(Direct { bounds, ..direct("nixl") }), Decider::Always);
    let (mut exchange, _, first) = asked(&world, &[]);
    exchange.on(Event::Deadline, NOW.after(Duration::from_secs(2)), &mut Actions::new()).unwrap();
    let second = exchange.leg_calls();
    let is_booked = |ask: &LegCall| {
        let snapshot = world.snapshot.load();
        let booked = snapshot.endpoints.iter().filter(|state| state.endpoint.ledger.in_flight() == 1);
        booked.filter(|state| ask.url.contains(&*state.endpoint.authority)).count() == 1
    };
    assert!(is_booked(&first[0]) && !is_booked(&second[0]), "both are asked, the first to come will do");
    give_leg_result(&mut exchange, 0, LegResult::Failed(Failure::Broken), 2_050);
    assert!(!is_booked(&first[0]) && is_booked(&second[0]), "one is left");
    assert!(give_leg_result(&mut exchange, 1, good(), 2_100).set.contains_key(DESTINATION));
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn panic_abandons_the_prefill() {
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let (mut exchange, ..) = asked(&world, &[]);
    let mut out = Actions::new();
    exchange.fail(NOW, &mut out).unwrap();
    assert_eq!(Answered::of(&Vec::from(out)).refused.unwrap().0, 500);
    assert_eq!((exchange.deadline(), exchange.awaits(0)), (None, false));
    assert!(give_leg_result(&mut exchange, 0, good(), 40).kinds.is_empty(), "nothing follows a refusal");
    world.assert_books_closed_but_open_stream();
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn hanging_prefill_is_hedged_or_ends_at_its_deadline() {
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    let (mut exchange, ..) = asked(&world, &[]);
    let due = exchange.deadline().unwrap();
    assert_eq!(due, NOW.after(Duration::from_secs(30)));
    let mut out = Actions::new();
    exchange.on(Event::Deadline, due, &mut out).unwrap();
    assert!(Answered::of(&Vec::from(out)).set.contains_key(DESTINATION));
    assert!(!exchange.awaits(0), "the question is given up");
    assert_eq!(answer(&mut exchange).set[DISAGGREGATION_HEADER], "local; reason=prefill_late");

    let mode = Direct {
        bounds: AttemptLimits { hedge_after: Some(Duration::from_secs(2)), ..direct("nixl").bounds },
        ..direct("nixl")
    };
    let world = splitting(Mode::Direct(mode), Decider::Always);
    let (mut exchange, ..) = asked(&world, &[]);
    let mut out = Actions::new();
    exchange.on(Event::Deadline, NOW.after(Duration::from_secs(2)), &mut out).unwrap();
    assert!(out.is_empty() && exchange.leg_calls().len() == 1 && exchange.awaits(0) && exchange.awaits(1));
    assert!(give_leg_result(&mut exchange, 1, good(), 2_100).set.contains_key(DESTINATION));
    assert!(!exchange.awaits(0) && !exchange.awaits(1));
    answer(&mut exchange);
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn hanging_worker_is_ejected_but_not_a_late_started_one() {
    let hedging = |after| {
        let bounds = AttemptLimits { hedge_after: Some(Duration::from_secs(after)), ..direct("nixl").bounds };
        splitting(Mode::Direct(Direct { bounds, ..direct("nixl") }), Decider::Always)
    };
    let open = |world: &World| {
        let snapshot = world.snapshot.load();
        [0, 1].map(|at| snapshot.endpoints[at].endpoint.health.availability(NOW, &HealthPolicy::default()))
    };
    let hangs = |ask: &LegCall| ask.url.contains("192.168.1.1:");
    let due = |exchange: &mut Exchange| {
        let due = exchange.deadline().unwrap();
        exchange.on(Event::Deadline, due, &mut Actions::new()).unwrap();
    };
    // One worker hangs, and the other succeeds.
    let world = hedging(2);
    let mut hung = 0;
    while hung < HealthPolicy::default().consecutive_failures {
        assert_eq!(open(&world)[0], Availability::Open);
        let (mut exchange, _, asks) = asked(&world, &[]);
        let first = usize::from(hangs(&asks[0]));
        if first == 1 {
            due(&mut exchange);
        }
        hung += first as u32;
        assert!(give_leg_result(&mut exchange, first, good(), 2_100).set.contains_key(DESTINATION));
    }
    assert_eq!(open(&world), [Availability::Ejected, Availability::Open]);
    // Both hang, and the second attempt began one second before the end.
    let world = hedging(29);
    let mut first_at_fault = 0;
    for _ in 0..40 {
        let (mut exchange, _, asks) = asked(&world, &[]);
        if !hangs(&asks[0]) {
            continue;
        }
        first_at_fault += 1;
        due(&mut exchange);
        assert_eq!(exchange.leg_calls().len(), 1);
        due(&mut exchange);
        assert!(exchange.is_routed());
        if first_at_fault == HealthPolicy::default().consecutive_failures {
            break;
        }
    }
    assert_eq!(open(&world), [Availability::Ejected, Availability::Open]);
}

#[test]
fn failed_prefill_is_rejected_without_fallback() {
    let mode = Direct { fallback: Fallback::Fail, ..direct("nixl") };
    let world = splitting(Mode::Direct(mode), Decider::Always);
    let (mut exchange, ..) = asked(&world, &[]);
    give_leg_result(&mut exchange, 0, LegResult::Failed(Failure::Refused), 5);
    let all = give_leg_result(&mut exchange, 1, LegResult::Failed(Failure::Refused), 6);
    let (status, text) = all.refused.clone().unwrap();
    assert_eq!((status, all.set["x-attache-reason"].as_str()), (503, "prefill_failed"));
    assert!(text.contains("prefill_refused"), "{text}");
    drop(exchange);
    world.assert_books_closed(1);
}

#[test]
fn unsplittable_request_goes_whole_to_a_decode_worker() {
    let never = |decider| splitting(Mode::Direct(direct("nixl")), decider);
    for (world, sent, mode, why) in [
        (never(Decider::Never), SENT, BodySendMode::FullDuplexStreamed, "the decider"),
        (
            never(Decider::Always),
            r#"{"model":"m","prompt":"p","n":2}"#,
            BodySendMode::FullDuplexStreamed,
            "two answers",
        ),
        (
            never(Decider::Always),
            r#"{"model":"m","prompt":["p","q"]}"#,
            BodySendMode::FullDuplexStreamed,
            "two prompts",
        ),
        (
            splitting(Mode::Direct(direct("shared-storage")), Decider::Always),
            r#"{"model":"m","prompt":"p","prompt_embeds":["AAAA","AAAA"]}"#,
            BodySendMode::FullDuplexStreamed,
            "three prompts",
        ),
        (
            never(Decider::Always),
            r#"{"model":"m","prompt":"p","prompt_logprobs":1}"#,
            BodySendMode::FullDuplexStreamed,
            "all computed",
        ),
        (never(Decider::Always), SENT, BodySendMode::Buffered, "Envoy's message timeout"),
    ] {
        let mut exchange = world.exchange();
        let first = Message::RequestHeaders(headers(&[PATH, (":method", "POST")], false));
        send(&mut exchange, ProcessingRequest { protocol_config: Some(config(mode, mode, false)), ..request(first) });
        let out = send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true))));
        let all = Answered::of(&out);
        assert!(exchange.leg_calls().is_empty() && exchange.is_routed(), "{why}");
        assert!(["192.168.1.3:8000", "192.168.1.4:8000"].contains(&&*all.set[DESTINATION]), "{why}: {all:?}");
        assert!(!all.text().contains("10.6.6.6"), "{why}: a client's transfer parameters do not pass");
        assert!(!answer(&mut exchange).set.contains_key(DISAGGREGATION_HEADER), "{why}");
        drop(exchange);
        world.assert_books_closed(1);
    }
}

#[test]
fn bodyless_request_never_goes_to_a_prefill_worker() {
    let world = splitting(Mode::Direct(direct("nixl")), Decider::Always);
    for _ in 0..32 {
        let mut exchange = world.exchange();
        let pairs = [(":path", "/v1/models"), (":method", "GET")];
        let out = send(&mut exchange, request(Message::RequestHeaders(headers(&pairs, true))));
        let to = Answered::of(&out).set[DESTINATION].clone();
        assert!(["192.168.1.3:8000", "192.168.1.4:8000"].contains(&&*to), "{to}");
    }
}

proptest! {
    /// Any results in any order, and a disconnect at any time: each call is made once. The gateway gets one
    /// destination or one rejection, and no booking remains.
    #[test]
    fn any_event_history_releases_all_bookings(
        together: bool,
        fail: bool,
        hedge: bool,
        events in proptest::collection::vec((0usize..4, 0usize..3), 0..12),
    ) {
        let base = direct(if together { "sglang" } else { "nixl" });
        let mode = Direct {
            fallback: if fail { Fallback::Fail } else { Fallback::Local },
            bounds: AttemptLimits { hedge_after: hedge.then(|| Duration::from_secs(1)), ..base.bounds },
            ..base
        };
        let world = splitting(Mode::Direct(mode), Decider::Always);
        let (mut exchange, out, asks) = asked(&world, &[]);
        let mut urls: Vec<String> = asks.iter().map(|a| a.url.clone()).collect();
        let mut all = Answered::of(&out);
        let mut ended = false;
        for (step, (kind, attempt)) in events.into_iter().enumerate() {
            let mut out = Actions::new();
            let now = NOW.after(Duration::from_secs(step as u64 * 7));
            match kind {
                0 => exchange.on(Event::LegResult(attempt, good()), now, &mut out).unwrap(),
                1 => exchange.on(Event::LegResult(attempt, reply(500, "")), now, &mut out).unwrap(),
                2 => {
                    let due = exchange.deadline().map_or(now, |due| due.max(now));
                    exchange.on(Event::Deadline, due, &mut out).unwrap();
                }
                _ if exchange.is_routed() && !ended => {
                    ended = true;
                    answer(&mut exchange);
                }
                _ => {}
            }
            urls.extend(exchange.leg_calls().into_iter().filter(|a| a.attempt.is_some()).map(|a| a.url));
            Vec::from(out).iter().for_each(|a| all.add(a));
        }
        drop(exchange);
        let told = all.kinds.iter().filter(|k| ["request_headers", "immediate"].contains(k)).count();
        prop_assert!(told <= if together { 2 } else { 1 }, "{:?}", all.kinds);
        let asked = urls.len();
        urls.sort_unstable();
        urls.dedup();
        prop_assert_eq!(asked, urls.len(), "a server was asked twice");
        world.assert_books_closed(1);
    }
}
