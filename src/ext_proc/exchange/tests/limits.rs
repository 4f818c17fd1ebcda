//! Quotas of tenants and models: rejections, reservations and charges. Each request is counted once.

mod away;

use super::*;
use attache_flow::registry::{CEILINGS, DETECTORS, find};
use attache_flow::{EvictRunning, Queueing};
use attache_picker::event::Limit;
use attache_picker::settings::{TenantRule, TenantSource};
use attache_quota as quota;
use attache_quota::{CountIn, UnknownPaths};
use attache_scheduling::Decider;
use serde_json::json;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub(super) const NONE: quota::Limits = quota::Limits {
    requests_per_second: None,
    requests_per_minute: None,
    tokens_per_minute: None,
    concurrency: None,
    requests_per_day: None,
    tokens_per_day: None,
};

pub(super) fn by_header() -> ExchangeSettings {
    let rule = TenantRule { source: TenantSource::Header("x-tenant".to_owned()), strip: None };
    ExchangeSettings { tenant: Some(rule), ..ExchangeSettings::default() }
}

pub(super) fn tenants(default: quota::Limits) -> TenantSettings {
    let vip = quota::Limits { requests_per_minute: None, ..default };
    let overrides = [("vip".to_owned(), vip)].into();
    TenantSettings {
        default,
        overrides,
        answer_tokens: 50,
        unknown_paths: UnknownPaths::Estimate,
        unknown_path_tokens: 70,
        store: CountIn::Memory,
        user_records: None,
    }
}

fn world(limits: quota::Limits) -> World {
    Setup { exchange: by_header(), tenants: Some(tenants(limits)), ..Setup::default() }.build()
}

fn duplex() -> Option<ProtocolConfiguration> {
    Some(config(BodySendMode::FullDuplexStreamed, BodySendMode::FullDuplexStreamed, false))
}

/// A request of `tenant` with this body, and the replies.
fn ask(world: &World, tenant: &str, sent: &str) -> (Exchange, Answered) {
    let mut exchange = world.exchange();
    let all = [PATH, (":method", "POST"), ("x-tenant", tenant)];
    let first = Message::RequestHeaders(headers(&all, false));
    send(&mut exchange, ProcessingRequest { protocol_config: duplex(), ..request(first) });
    let told = send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true))));
    (exchange, Answered::of(&told))
}

/// The response of a model server.
fn answer(exchange: &mut Exchange, status: &str, bytes: &str) -> Answered {
    let fields = [(":status", status), ("content-type", "application/json")];
    let mut told = send(exchange, request(Message::ResponseHeaders(headers(&fields, false))));
    told.extend(send(exchange, request(Message::ResponseBody(body(bytes.as_bytes(), true)))));
    Answered::of(&told)
}

fn usage(prompt: u32, completion: u32) -> String {
    json!({"usage": {"prompt_tokens": prompt, "completion_tokens": completion}}).to_string()
}

/// A body with an estimated prompt of `prompt` tokens and a response limit of `answer` tokens.
fn costs(prompt: usize, answer: u32) -> String {
    json!({"model": "m", "prompt": "abcd".repeat(prompt), "max_tokens": answer}).to_string()
}

#[test]
fn exceeded_quota_gets_aibrix_message_and_retry_after() {
    let world = world(quota::Limits { requests_per_minute: Some(2), ..NONE });
    for count in ["1", "2"] {
        let (mut exchange, _) = ask(&world, "acme", &completion("m", "p"));
        assert!(exchange.is_routed());
        let told = answer(&mut exchange, "200", "{}");
        assert_eq!(told.set.get("x-update-rpm").map(String::as_str), Some(count));
        assert!(told.set.contains_key("x-update-tpm"));
    }
    let (exchange, told) = ask(&world, "acme", &completion("m", "p"));
    assert_eq!(exchange.outcome(), Some(StreamOutcome::Rejected));
    let (status, text) = told.refused.unwrap();
    assert_eq!(status, 429);
    let said: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(
        said,
        json!({"error": {
            "message": "user: acme has exceeded RPM: 2", "type": "rate_limit_error",
            "param": null, "code": "rpm_exceeded",
        }})
    );
    assert_eq!(told.set.get("x-error-rpm-exceeded").map(String::as_str), Some("true"));
    assert_eq!(told.set.get("x-attache-reason").map(String::as_str), Some("rpm_exceeded"));
    let retry: u64 = told.set["retry-after"].parse().unwrap();
    assert!((1..=60).contains(&retry), "{retry}");
    for other in ["other", "vip", "vip", "vip"] {
        assert!(ask(&world, other, &completion("m", "p")).0.is_routed(), "{other}");
    }
}

/// 50 tensors booked the tokens of one response, so 50 times the limit passed at once.
#[test]
fn burst_of_embeddings_exceeds_the_token_limit_before_any_response() {
    let tensor = "A".repeat(1_365 * 5_000);
    let fifty = json!({"model": "m", "prompt_embeds": vec!["AAAA"; 50], "max_tokens": 10});
    let long = json!({"model": "m", "prompt_embeds": tensor, "max_tokens": 10});
    let part = json!({"type": "image_embeds", "image_embeds": {"image_embeds": tensor}});
    let message = json!({"model": "m", "max_tokens": 10, "messages": [{"role": "user", "content": [part]}]});
    for (path, sent) in [("/v1/completions", fifty), ("/v1/completions", long), ("/v1/chat/completions", message)] {
        let world = world(quota::Limits { tokens_per_minute: Some(4_000), ..NONE });
        // The first request books the whole limit, which is less than it costs.
        let [first, second] = [(); 2].map(|()| ask_at(&world, path, &sent.to_string()));
        assert!(first.0.is_routed(), "{path}: {:?}", first.1.refused);
        assert_eq!(second.1.refused.map(|(status, _)| status), Some(429), "{path}");
    }
}

/// The replies to a GET with this many headers, pseudo-headers included.
fn with_headers(world: &World, count: usize) -> (Exchange, Answered) {
    let mut exchange = world.exchange();
    let names: Vec<String> = (0..count - 2).map(|i| format!("x-{i}")).collect();
    let all: Vec<(&str, &str)> = [(":path", "/v1/models/a"), (":method", "GET")]
        .into_iter()
        .chain(names.iter().map(|name| (name.as_str(), "1")))
        .collect();
    let told = send(&mut exchange, request(Message::RequestHeaders(headers(&all, true))));
    (exchange, Answered::of(&told))
}

/// Envoy responds 500 when headers that Attaché adds exceed its limit of 100.
#[test]
fn request_with_too_many_headers_gets_431_and_others_fit_with_those_added() {
    let world = Setup::default().build();
    let (exchange, told) = with_headers(&world, 96);
    assert!(exchange.is_routed());
    assert!(96 + told.set.len() <= 100, "{:?}", told.set);
    for count in [97, 100, 1_000] {
        let (exchange, told) = with_headers(&world, count);
        assert_eq!(exchange.outcome(), Some(StreamOutcome::Rejected));
        let (status, text) = told.refused.unwrap();
        assert!(status == 431 && text.contains(&format!("has {count} headers, 96 are allowed")), "{status} {text}");
    }
    assert_eq!(world.processor.metrics.limits.get(Limit::Headers), 3);
}

#[test]
fn response_with_as_many_headers_as_envoy_allows_gets_no_further_ones() {
    let world = world(quota::Limits { requests_per_minute: Some(20), ..NONE });
    for (received, added) in [(2, 2), (98, 2), (99, 1), (100, 0), (120, 0)] {
        let (mut exchange, _) = ask(&world, "acme", &completion("m", "p"));
        let names: Vec<String> = (0..received - 2).map(|i| format!("x-{i}")).collect();
        let all: Vec<(&str, &str)> = [(":status", "200"), ("content-type", "application/json")]
            .into_iter()
            .chain(names.iter().map(|name| (name.as_str(), "1")))
            .collect();
        let told = Answered::of(&send(&mut exchange, request(Message::ResponseHeaders(headers(&all, true)))));
        assert_eq!(told.set.len(), added, "{received} headers: {:?}", told.set);
    }
    assert_eq!(world.processor.metrics.limits.get(Limit::Headers), 3);
}

#[test]
fn requests_without_tenant_share_a_quota_and_get_requests_are_free() {
    let world = world(quota::Limits { requests_per_minute: Some(1), ..NONE });
    assert!(ask(&world, "", &completion("m", "p")).0.is_routed());
    let (exchange, told) = ask(&world, " ", &completion("m", "p"));
    assert!(!exchange.is_routed());
    let (_, text) = told.refused.unwrap();
    assert!(text.contains("user: anonymous has exceeded RPM: 1"), "{text}");
    for _ in 0..3 {
        let mut exchange = world.exchange();
        let models = [(":path", "/v1/models"), (":method", "GET")];
        send(&mut exchange, request(Message::RequestHeaders(headers(&models, true))));
        assert!(exchange.is_routed());
    }
}

#[test]
fn concurrency_slot_is_released_however_a_request_ends() {
    let world = world(quota::Limits { concurrency: Some(1), ..NONE });
    let (first, _) = ask(&world, "a", &completion("m", "p"));
    assert_eq!(ask(&world, "a", &completion("m", "p")).1.refused.unwrap().0, 429);
    drop(first);
    let (mut second, _) = ask(&world, "a", &completion("m", "p"));
    assert!(second.is_routed(), "the client had left");
    answer(&mut second, "200", &usage(1, 1));
    let mut third = world.exchange();
    let nowhere = subset(&["10.9.9.9:1"]);
    let first = request(Message::RequestHeaders(headers(&[PATH, (":method", "POST"), ("x-tenant", "a")], false)));
    let first = ProcessingRequest { metadata_context: Some(nowhere), protocol_config: duplex(), ..first };
    send(&mut third, first);
    let told = send(&mut third, request(Message::RequestBody(body(completion("m", "p").as_bytes(), true))));
    assert_eq!(Answered::of(&told).refused.unwrap().0, 503, "it was let through and found no server");
    let (fourth, _) = ask(&world, "a", &completion("m", "p"));
    assert!(fourth.is_routed(), "though the stream of the one that was refused is still open");
    drop((second, third, fourth));
    world.assert_books_closed(5);
}

#[test]
fn tokens_are_reserved_by_limit_and_corrected_by_usage() {
    let world = world(quota::Limits { tokens_per_minute: Some(1_000), ..NONE });
    let (mut first, _) = ask(&world, "a", &costs(100, 800));
    let (_, told) = ask(&world, "a", &costs(10, 200));
    assert_eq!(told.set.get("x-error-tpm-exceeded").map(String::as_str), Some("true"));
    answer(&mut first, "200", &usage(120, 80));
    let (mut second, _) = ask(&world, "a", &costs(10, 780));
    assert!(second.is_routed(), "200 of 1,000 are had");
    answer(&mut second, "500", "{}");
    let (third, _) = ask(&world, "a", &costs(10, 780));
    assert!(third.is_routed(), "what failed cost no tokens");
    drop(third);
    let (_, told) = ask(&world, "a", &costs(10, 780));
    assert_eq!(told.refused.unwrap().0, 429, "who leaves before the server tells pays what was booked");
    let (unbounded, _) = ask(&world, "b", r#"{"model":"m","prompt":"p"}"#);
    drop(unbounded);
    let (mut next, _) = ask(&world, "b", &costs(1, 1));
    let told = answer(&mut next, "200", "{}");
    let had: u64 = told.set["x-update-tpm"].parse().unwrap();
    assert!((50..60).contains(&had), "an answer without a bound is booked at 50: {had}");
}

/// A request of `tenant` with a limit of `most` tokens, whose client disconnects after this part of the response.
fn leaves(world: &World, tenant: &str, most: Option<u32>, came: &str) {
    let mut exchange = world.exchange();
    let all = [(":path", "/v1/messages"), (":method", "POST"), ("x-tenant", tenant)];
    let first = request(Message::RequestHeaders(headers(&all, false)));
    send(&mut exchange, ProcessingRequest { protocol_config: duplex(), ..first });
    let mut sent = json!({"model": "m", "stream": true, "messages": [{"role": "user", "content": "hi"}]});
    if let Some(most) = most {
        sent["max_tokens"] = most.into();
    }
    send(&mut exchange, request(Message::RequestBody(body(sent.to_string().as_bytes(), true))));
    assert!(exchange.is_routed());
    let fields = [(":status", "200"), ("content-type", "text/event-stream")];
    send(&mut exchange, request(Message::ResponseHeaders(headers(&fields, false))));
    send(&mut exchange, request(Message::ResponseBody(body(came.as_bytes(), false))));
}

#[test]
fn disconnect_is_charged_the_reservation_or_the_received_tokens_if_more() {
    let world = world(quota::Limits { tokens_per_minute: Some(1_000), ..NONE });
    let start = r#"{"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 1}}}"#;
    let begins = format!("event: message_start\ndata: {start}\n\n");
    leaves(&world, "a", Some(800), &begins);
    assert_eq!(ask(&world, "a", &costs(10, 300)).1.refused.unwrap().0, 429, "800 of 1,000 were booked");
    let goes_on = "event: content_block_delta\ndata: {}\n\n".repeat(500);
    leaves(&world, "b", None, &format!("{begins}{goes_on}"));
    assert_eq!(ask(&world, "b", &costs(10, 500)).1.refused.unwrap().0, 429, "50 of 1,000 were booked, and 500 came");
    assert!(ask(&world, "b", &costs(10, 400)).0.is_routed());
}

#[test]
fn reservation_covers_all_requested_responses() {
    let world = world(quota::Limits { tokens_per_minute: Some(1_000), ..NONE });
    let six = json!({"model": "m", "prompt": ["p", "q"], "n": 3, "max_tokens": 100}).to_string();
    let (open, _) = ask(&world, "a", &six);
    assert!(open.is_routed());
    assert_eq!(ask(&world, "a", &costs(10, 500)).1.refused.unwrap().0, 429, "600 of 1,000 are booked");
    assert!(ask(&world, "a", &costs(10, 300)).0.is_routed());
    let most = json!({"model": "m", "prompt": ["p", "q"], "n": u32::MAX, "max_tokens": u32::MAX}).to_string();
    let (open_too, told) = ask(&world, "b", &most);
    assert!(open_too.is_routed(), "{told:?}");
    assert_eq!(ask(&world, "b", &costs(1, 1)).1.refused.unwrap().0, 429);
}

#[test]
fn high_max_tokens_does_not_exhaust_the_model_quota() {
    let world = world(NONE);
    let daily = quota::Limits { tokens_per_day: Some(10_000), ..NONE };
    limited(&world, Subject::Model, tenants(daily), noon);
    let prompt = "abcd".repeat(10);
    let longest = json!({"model": "m", "prompt": prompt, "n": u32::MAX, "max_tokens": u32::MAX}).to_string();
    let (mut untold, _) = ask(&world, "a", &longest);
    answer(&mut untold, "200", "{}");
    let (open, _) = ask(&world, "a", &longest);
    assert!(open.is_routed(), "the usage of the response before is unknown");
    let (mut beyond, _) = ask(&world, "b", &costs(10, 9_720));
    assert!(beyond.is_routed(), "though another is served that may have all");
    answer(&mut beyond, "200", &usage(10, 9_720));
    drop(open);
    // About 60 for each of the first two, and 9,730.
    let [first, second, last] = [(), (), ()].map(|()| ask(&world, "b", &longest));
    assert!(first.0.is_routed() && second.0.is_routed(), "who leaves is charged for an answer as it usually is");
    assert_eq!(last.1.refused.unwrap().0, 429, "and what came beyond that is charged when it has");
}

/// A request to `path`, and the replies.
fn ask_at(world: &World, path: &str, sent: &str) -> (Exchange, Answered) {
    let mut exchange = world.exchange();
    let all = [(":path", path), (":method", "POST"), ("x-tenant", "a")];
    let first = Message::RequestHeaders(headers(&all, false));
    send(&mut exchange, ProcessingRequest { protocol_config: duplex(), ..request(first) });
    let told = send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true))));
    (exchange, Answered::of(&told))
}

#[test]
fn unknown_path_reserves_flat_estimate_and_is_charged_reported_usage() {
    // Each reserves 70 tokens.
    let world = world(quota::Limits { tokens_per_day: Some(200), ..NONE });
    let (mut first, _) = ask_at(&world, "/v9/things", "{\"model\":\"m\"}");
    answer(&mut first, "200", &usage(20, 10));
    let (mut second, _) = ask_at(&world, "/v9/things", "no JSON");
    answer(&mut second, "200", "{}");
    let (mut failed, _) = ask_at(&world, "/v9/things", "");
    answer(&mut failed, "404", "{}");
    let (_third, told) = ask_at(&world, "/v9/things", "");
    assert!(told.refused.is_none(), "30 + 70 + 0 + 70 tokens");
    assert_eq!(ask_at(&world, "/v9/things", "").1.refused.unwrap().0, 429);
}

#[test]
fn unknown_path_is_rejected_if_configured_and_tokens_are_limited() {
    let rejects = |limits| {
        let settings = TenantSettings { unknown_paths: UnknownPaths::Reject, ..tenants(limits) };
        let world = Setup { exchange: by_header(), tenants: Some(settings), ..Setup::default() }.build();
        assert!(ask_at(&world, "/v1/completions", &completion("m", "p")).0.is_routed());
        ask_at(&world, "/v9/things", "{}").1
    };
    let told = rejects(quota::Limits { tokens_per_minute: Some(1_000), ..NONE });
    assert_eq!((told.refused.unwrap().0, told.set["x-attache-reason"].as_str()), (403, "unknown_path"));
    assert!(rejects(quota::Limits { requests_per_minute: Some(1_000), ..NONE }).refused.is_none());
}

#[test]
fn reported_usage_is_capped_at_the_most_a_request_can_cost() {
    let capped = |world: &World| world.processor.metrics.limits.get(Limit::ReportedTokens);
    let world = world(quota::Limits { tokens_per_day: Some(1_000_000), ..NONE });
    let (mut honest, _) = ask(&world, "a", &costs(1_000, 10));
    answer(&mut honest, "200", &usage(4_000, 10));
    assert_eq!(capped(&world), 0);
    for bytes in [
        json!({"usage": {"prompt_tokens": u64::MAX, "completion_tokens": 1}}),
        json!({"usage": {"prompt_tokens": 1, "completion_tokens": u64::MAX}}),
        json!({"usage": {"prompt_tokens": u64::MAX, "completion_tokens": u64::MAX}}),
    ] {
        let (mut lies, _) = ask(&world, "a", &costs(1_000, 10));
        answer(&mut lies, "200", &bytes.to_string());
    }
    assert_eq!(capped(&world), 3);
    // Twice 8 tokens for each of 4,050 bytes and 16,384 of a template, three times 26 of a response.
    let (mut last, _) = ask(&world, "a", &costs(1, 1));
    let told = answer(&mut last, "200", "{}");
    let used: u64 = told.set["x-update-tpm"].parse().unwrap();
    assert!((95_000..120_000).contains(&used), "{used}");
}

/// Model servers treat a limit of 0 as no limit.
#[test]
fn max_tokens_of_zero_counts_as_no_limit() {
    let world = world(quota::Limits { tokens_per_day: Some(1_000_000), ..NONE });
    let (mut endless, _) = ask(&world, "a", &costs(100, 0));
    let told = answer(&mut endless, "200", &usage(100, 5_000));
    assert_eq!(world.processor.metrics.limits.get(Limit::ReportedTokens), 0);
    drop(told);
    let (mut last, _) = ask(&world, "a", &costs(1, 1));
    let used: u64 = answer(&mut last, "200", "{}").set["x-update-tpm"].parse().unwrap();
    assert!(used > 5_100, "{used}");
}

#[test]
fn preempted_request_is_not_charged() {
    let flow = attache_flow::Settings { evict_running: EvictRunning::Unanswered, ..attache_flow::Settings::default() };
    let objectives = [("batch".to_owned(), -1), ("urgent".to_owned(), 5)].into();
    let exchange = ExchangeSettings { trust_client_headers: true, objectives, ..by_header() };
    let limits = tenants(quota::Limits { tokens_per_day: Some(150), requests_per_day: Some(1), ..NONE });
    let world = Setup { exchange, tenants: Some(limits), flow: Some(queueing::flow(flow)), ..Setup::default() }.build();
    let comes = |tenant, objective| {
        let extra = [("x-tenant", tenant), ("x-gateway-inference-objective", objective)];
        queueing::One::of(&world, &extra, BodySendMode::FullDuplexStreamed)
    };
    let mut batch = comes("a", "batch");
    assert!(batch.goes());
    let urgent = comes("b", "urgent");
    assert!(batch.take_preemption());
    let again = comes("a", "batch");
    assert_eq!(again.told.refused, None, "it has its one request of the day, and its tokens");
    drop((batch, urgent, again));
    world.assert_books_closed(3);
}

#[test]
fn disconnect_during_prefill_is_charged_the_reservation() {
    let policy = SplitPolicy { decider: Decider::Always, together: Vec::new(), whole: true, required: false };
    let world = Setup {
        servers: vec![(0, 0.0, &[]); 4],
        roles: splitting::ROLES,
        disagg: Some((policy, disagg::Mode::Direct(splitting::direct("nixl")))),
        strategy: "predicted-latency",
        parameters: serde_json::Value::Null,
        exchange: by_header(),
        tenants: Some(tenants(quota::Limits { tokens_per_minute: Some(1_000), concurrency: Some(1), ..NONE })),
        ..Setup::default()
    }
    .build();
    let (mut first, _) = ask(&world, "a", &costs(100, 800));
    assert!(!first.is_routed() && !first.leg_calls().is_empty(), "its prompt is computed");
    drop(first);
    let (_, told) = ask(&world, "a", &costs(10, 200));
    assert_eq!(told.set.get("x-attache-reason").map(String::as_str), Some("tpm_exceeded"));
    let (small, told) = ask(&world, "a", &costs(10, 10));
    assert_eq!(told.refused, None, "its place is free");
    drop(small);
    world.assert_books_closed(3);
}

#[test]
fn quota_windows_follow_the_wall_clock() {
    static LATE: AtomicU64 = AtomicU64::new(600);
    fn wall() -> SystemTime {
        SystemTime::UNIX_EPOCH + Duration::from_secs(LATE.load(Relaxed))
    }
    let world = world(NONE);
    limited(&world, Subject::Tenant, tenants(quota::Limits { requests_per_minute: Some(1), ..NONE }), wall);
    let goes = || ask(&world, "a", &completion("m", "p")).0.is_routed();
    assert!(goes() && !goes());
    // The picker's monotonic clock stands still.
    LATE.store(660, Relaxed);
    assert!(goes() && !goes(), "another minute");
    LATE.store(60, Relaxed);
    assert!(goes() && !goes(), "the clock was wrong");
}

/// Configures quotas of `subject`s with `settings`, and no others.
pub(super) fn limited(world: &World, subject: Subject, settings: TenantSettings, wall: fn() -> SystemTime) {
    let config = world.processor.picker.config();
    let book = Store::Memory(Arc::new(quota::Book::new(100)));
    let quotas = Arc::new(Quotas::new(subject, settings, book, world.processor.picker.observer.clone(), wall));
    let again = ActiveConfig::new(config.pools().to_vec(), config.limits.clone(), config.settings.clone());
    world.processor.picker.reload(again.with_quotas(vec![quotas]), || serde_json::Value::Null);
}

#[test]
fn queued_request_is_counted_once() {
    let detector = find(DETECTORS, "concurrency-detector").unwrap();
    let flow = PoolFlow {
        settings: attache_flow::Settings::default(),
        queueing: Some(Queueing::Saturated((detector.build)(&json!({"maxConcurrency": 1})).unwrap().into())),
        shedding: None,
        ceiling: (find(CEILINGS, "static").unwrap(), serde_json::Value::Null),
        admitters: Vec::new(),
        said: serde_json::Value::Null,
    };
    let limits = quota::Limits { requests_per_minute: Some(2), concurrency: Some(2), ..NONE };
    let setup = Setup { exchange: by_header(), tenants: Some(tenants(limits)), flow: Some(flow), ..Setup::default() };
    let world = setup.build();
    let (mut first, _) = ask(&world, "a", &completion("m", "p"));
    let (mut second, _) = ask(&world, "a", &completion("m", "p"));
    let mut waiting = second.waiting().expect("the server is busy");
    assert_eq!(ask(&world, "a", &completion("m", "p")).1.refused.unwrap().0, 429, "who waits has its place");
    answer(&mut first, "200", &usage(1, 1));
    let turn = futures_util::FutureExt::now_or_never(&mut waiting).flatten().expect("its turn");
    let mut out = Actions::new();
    second.on(Event::Dequeued(Some(turn)), NOW, &mut out).unwrap();
    assert!(second.is_routed(), "{out:?}");
    let told = answer(&mut second, "200", &usage(1, 1));
    assert_eq!(told.set.get("x-update-rpm").map(String::as_str), Some("2"));
    drop((first, second));
    world.assert_books_closed(3);
}

#[test]
fn model_quota_applies_to_all_tenants() {
    let world = world(quota::Limits { requests_per_minute: Some(5), ..NONE });
    let few = quota::Limits { requests_per_second: Some(2), ..NONE };
    let models = TenantSettings { overrides: [("m".to_owned(), few)].into(), ..tenants(NONE) };
    let config = world.processor.picker.config();
    let (observer, book) = (world.processor.picker.observer.clone(), Store::Memory(Arc::new(quota::Book::new(10))));
    let of_models = Arc::new(Quotas::new(Subject::Model, models, book, observer, noon));
    let both = vec![config.quotas[0].clone(), of_models];
    let again = ActiveConfig::new(config.pools().to_vec(), config.limits.clone(), config.settings.clone());
    world.processor.picker.reload(again.with_quotas(both), || serde_json::Value::Null);

    let (mut first, _) = ask(&world, "a", &completion("m", "p"));
    let told = answer(&mut first, "200", "{}");
    assert_eq!(told.set.get("x-update-rpm").map(String::as_str), Some("1"), "the tenant's, not the model's");
    assert!(ask(&world, "b", &completion("m", "p")).0.is_routed());
    let (_, told) = ask(&world, "a", &completion("m", "p"));
    assert_eq!(told.set.get("x-error-model-rps-exceeded").map(String::as_str), Some("true"));
    assert_eq!(told.set.get("retry-after").map(String::as_str), Some("1"));
    let (status, text) = told.refused.unwrap();
    assert!(
        status == 429 && text.contains("model: m has exceeded RPS: 2") && text.contains("model_rps_exceeded"),
        "{text}"
    );
    // A request that the model's quota rejects is not charged to the tenant: four of its five are left.
    for _ in 0..4 {
        assert!(ask(&world, "a", &completion("other", "p")).0.is_routed());
    }
    assert_eq!(ask(&world, "a", &completion("other", "p")).1.refused.unwrap().0, 429);
}

#[test]
fn reload_keeps_quota_counters() {
    let world = world(quota::Limits { requests_per_minute: Some(2), ..NONE });
    ask(&world, "a", &completion("m", "p"));
    let (open, _) = ask(&world, "a", &completion("m", "p"));
    let config = world.processor.picker.config();
    let store = config.quotas[0].store().clone();
    let more = tenants(quota::Limits { requests_per_minute: Some(3), ..NONE });
    let observer = world.processor.picker.observer.clone();
    let quotas = Arc::new(Quotas::new(Subject::Tenant, more, store, observer, noon));
    let again = ActiveConfig::new(config.pools().to_vec(), config.limits.clone(), config.settings.clone());
    world.processor.picker.reload(again.with_quotas(vec![quotas]), || serde_json::Value::Null);
    assert!(ask(&world, "a", &completion("m", "p")).0.is_routed());
    assert!(!ask(&world, "a", &completion("m", "p")).0.is_routed());
    drop(open);
}

#[test]
fn tenant_by_token_ignores_headers() {
    let source = TenantSource::Metadata { namespace: "jwt".to_owned(), path: vec!["sub".to_owned()] };
    let rule = TenantRule { source, strip: Some("x-tenant".to_owned()) };
    let exchange = ExchangeSettings { tenant: Some(rule), ..ExchangeSettings::default() };
    let limits = tenants(quota::Limits { requests_per_minute: Some(1), ..NONE });
    let world = Setup { exchange, tenants: Some(limits), ..Setup::default() }.build();
    let send_as = |said: &str| {
        let value = Value { kind: Some(Kind::StringValue("acme".to_owned())) };
        let claims = Struct { fields: [("sub".to_owned(), value)].into() };
        let metadata = Metadata { filter_metadata: [("jwt".to_owned(), claims)].into(), ..Metadata::default() };
        let mut exchange = world.exchange();
        let first = request(Message::RequestHeaders(headers(&[PATH, (":method", "POST"), ("x-tenant", said)], false)));
        let first = ProcessingRequest { metadata_context: Some(metadata), protocol_config: duplex(), ..first };
        send(&mut exchange, first);
        let told = send(&mut exchange, request(Message::RequestBody(body(completion("m", "p").as_bytes(), true))));
        Answered::of(&told)
    };
    let told = send_as("liar");
    assert!(told.removed.contains(&"x-tenant".to_owned()), "{:?}", told.removed);
    assert_eq!(send_as("another").refused.unwrap().0, 429);
}
