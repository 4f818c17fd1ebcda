//! Request headers for model servers: the rank with most cached blocks, the endpoint to fetch blocks from, and
//! encoders.

use super::splitting::{ROLES, direct, give_leg_result, good};
use super::*;
use attache_disagg::Mode;
use attache_picker::head::ENCODERS;
use attache_picker::hints::{RANK_HEADER, SOURCE_HEADER};
use attache_pool::health::{Availability, HealthOutcome};
use attache_prefix::key::Root;
use attache_prefix::residents::{Cache, Resident};
use attache_prefix::trust::{Trust, TrustCell};
use attache_prefix::{BlockKey, TenantId};
use attache_scheduling::Decider;
use serde_json::{Value as Json, json};

const TOKENS_A_BLOCK: usize = 16;

fn setup(mode: Option<Mode>, decider: Decider) -> Setup {
    let policy = SplitPolicy { decider, together: Vec::new(), whole: true, required: false };
    Setup {
        servers: vec![(0, 0.0, &[]); 4],
        roles: ROLES,
        disagg: mode.map(|mode| (policy, mode)),
        strategy: "predicted-latency",
        parameters: Json::Null,
        ..Setup::default()
    }
}

fn prompt() -> Vec<u32> {
    (7..407).collect()
}

/// The KV events for the first blocks of the prompt.
fn keys(cache: &PrefixCache, blocks: usize) -> Vec<BlockKey> {
    let (space, tokens) = (cache.space(), prompt());
    let bytes = |block: &[u32]| block.iter().flat_map(|id| id.to_le_bytes()).collect::<Vec<u8>>();
    let mut blocks = tokens.chunks_exact(TOKENS_A_BLOCK).take(blocks);
    let first = blocks.next().map(|block| space.first(space.root(&Root::default()), &bytes(block)));
    first.into_iter().chain(blocks.map(|block| space.next(&bytes(block)))).collect()
}

/// Every endpoint has one rank for each of `depths`, which is the number of the prompt's blocks that the rank has
/// cached.
fn ranked(mode: Option<Mode>, depths: &[usize]) -> World {
    ranked_by("predicted-latency", mode, depths)
}

fn ranked_by(strategy: &'static str, mode: Option<Mode>, depths: &[usize]) -> World {
    let world = Setup { engines_tell: true, strategy, ..setup(mode, Decider::Always) }.build();
    let config = world.processor.picker.config();
    let cache = &config.pools()[0].prefix.as_ref().unwrap().cache;
    let resident = |id: u32| {
        let caches = depths.iter().map(|depth| {
            let (holder, trust) = (cache.index().add_holder(), Arc::<TrustCell>::default());
            trust.set(Trust::Exact);
            cache.index().record(holder, &keys(cache, *depth), TenantId(0), NOW);
            Cache { holder, trust }
        });
        (EndpointId(id), Resident { caches: caches.collect(), ..Resident::default() })
    };
    cache.residents().publish((0..4).map(resident).collect());
    world
}

/// The reply to a request with the prompt, and the calls to prefill workers.
fn asked(world: &World, extra: &[(&str, &str)]) -> (Exchange, Answered, Vec<attache_picker::split::LegCall>) {
    let mut exchange = world.exchange();
    let all: Vec<(&str, &str)> = [PATH, (":method", "POST")].iter().chain(extra).copied().collect();
    send(&mut exchange, request(Message::RequestHeaders(headers(&all, false))));
    let sent = json!({"model": "m", "prompt": prompt()}).to_string();
    let out = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
    let asks = exchange.leg_calls();
    (exchange, out, asks)
}

fn rank(answer: &Answered) -> Option<&str> {
    answer.set.get(RANK_HEADER).map(String::as_str)
}

#[test]
fn rank_with_most_cached_blocks_is_chosen() {
    let world = ranked(None, &[2, 9, 5]);
    let (first, told, _) = asked(&world, &[(RANK_HEADER, "0")]);
    assert_eq!(rank(&told), Some("1"), "the picker's word counts");
    let (second, told, _) = asked(&world, &[]);
    assert_eq!(rank(&told), Some("1"));
    drop((first, second));
    let snapshot = world.snapshot.load_full();
    let ranks = |id: usize| snapshot.endpoints[id].endpoint.ranks.under_way();
    assert!((0..4).all(|id| ranks(id).is_empty()), "nothing stays booked");
    world.assert_books_closed(2);
    let by_load = ranked_by("least-request", None, &[2, 9, 5]);
    assert_eq!(rank(&asked(&by_load, &[]).1), Some("1"), "whatever the strategy goes by");
}

#[test]
fn ranks_without_cache_alternate_and_single_rank_is_not_named() {
    let world = Setup { servers: vec![(0, 0.0, &[])], roles: &[], ..setup(None, Decider::Never) };
    let world = Setup { engines_tell: true, ..world }.build();
    let resident = |count: usize| {
        let config = world.processor.picker.config();
        let cache = &config.pools()[0].prefix.as_ref().unwrap().cache;
        let caches = (0..count).map(|_| Cache { holder: cache.index().add_holder(), trust: Arc::default() });
        cache.residents().publish(
            [(EndpointId(0), Resident { caches: caches.collect(), ..Resident::default() })].into_iter().collect(),
        );
    };
    // No KV event has arrived yet.
    resident(3);
    let open: Vec<_> = (0..6).map(|_| asked(&world, &[])).collect();
    let ranks: Vec<_> = open.iter().filter_map(|(_, told, _)| rank(told)).collect();
    assert_eq!(ranks, ["0", "1", "2", "0", "1", "2"]);
    resident(1);
    let (_exchange, told, _) = asked(&world, &[(RANK_HEADER, "7")]);
    assert!(rank(&told).is_none() && told.removed.iter().any(|name| name == RANK_HEADER), "a client names none");
}

#[test]
fn retry_releases_the_rank_of_the_first_endpoint() {
    let world = ranked(None, &[2, 9, 5]);
    let (mut exchange, out, _) = asked(&world, &[]);
    let snapshot = world.snapshot.load_full();
    let booked = || snapshot.endpoints.iter().map(|s| s.endpoint.ranks.under_way().iter().sum()).collect::<Vec<u32>>();
    assert_eq!((rank(&out), booked().iter().sum::<u32>()), (Some("1"), 1));
    let addresses = snapshot.endpoints.iter().map(|s| s.endpoint.spec.address.to_string());
    let other = addresses.into_iter().find(|address| *address != out.set[DESTINATION]).unwrap();
    send(&mut exchange, answered_by(&other, false));
    assert_eq!(booked(), [0; 4], "Envoy has told the other one the rank that was meant for the first");
    drop(exchange);
    world.assert_books_closed(1);
}

/// Without data about their caches or the prompt, ranks are chosen by the scraped metrics.
#[test]
fn ranks_are_chosen_by_scraped_metrics_without_cache_data() {
    let world = Setup { servers: vec![(0, 0.0, &[])], roles: &[], ..setup(None, Decider::Never) };
    let world = Setup { chooses_rank: true, ..world }.build();
    let page = |ranks: &[u32], scraped_at| {
        let before = world.snapshot.load_full();
        let metrics = EndpointMetrics { ranks: ranks.to_vec(), scraped_at, ..EndpointMetrics::default() };
        let endpoint = before.endpoints[0].endpoint.clone();
        let state = EndpointState::new(endpoint, Some(Arc::new(metrics)));
        world.snapshot.publish(PoolSnapshot::new(before.generation + 1, true, vec![state]));
    };
    let chosen = |sent: &str| {
        let mut exchange = world.exchange();
        send(&mut exchange, request(Message::RequestHeaders(headers(&[PATH, (":method", "POST")], false))));
        let out = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
        rank(&out).map(str::to_owned)
    };
    let images = r#"{"model": "m", "prompt_embeds": "AAAA"}"#;
    for sent in [&*json!({"model": "m", "prompt": prompt()}).to_string(), images] {
        page(&[4, 1, 2], NOW);
        assert_eq!(chosen(sent).as_deref(), Some("1"), "{sent}");
        page(&[], NOW);
        assert_eq!(chosen(sent), None, "{sent}");
        page(&[4, 1, 2], Timestamp(0));
        assert_eq!(chosen(sent), None, "{sent}: the page is too old");
    }
}

/// If the KV events of ranks are not read, a lookup says nothing about ranks. The prompt is not looked up, and
/// nothing is recorded.
#[test]
fn ranks_known_only_from_metrics_need_no_prefix_lookup() {
    let world =
        Setup { servers: vec![(0, 0.0, &[])], roles: &[], strategy: "least-request", ..setup(None, Decider::Never) };
    let world = Setup { chooses_rank: true, ..world }.build();
    let endpoint = world.snapshot.load().endpoints[0].endpoint.clone();
    let metrics = EndpointMetrics { ranks: vec![4, 1, 2], scraped_at: NOW, ..EndpointMetrics::default() };
    let state = EndpointState::new(endpoint, Some(Arc::new(metrics)));
    world.snapshot.publish(PoolSnapshot::new(world.snapshot.load().generation + 1, true, vec![state]));
    let (_exchange, told, _) = asked(&world, &[]);
    assert_eq!(rank(&told), Some("1"));
    let config = world.processor.picker.config();
    assert_eq!(
        config.pools()[0].prefix.as_ref().unwrap().cache.stats().lookups.load(std::sync::atomic::Ordering::Relaxed),
        0
    );
}

#[test]
fn split_workers_get_their_own_rank_and_sidecars_none() {
    let world = ranked(Some(Mode::Direct(direct("nixl"))), &[3, 0, 7]);
    let (mut exchange, out, asks) = asked(&world, &[]);
    assert!(out.set.is_empty() && asks.len() == 1);
    let told_rank = asks[0].headers.iter().find(|(name, _)| *name == RANK_HEADER);
    assert_eq!(told_rank.map(|(_, rank)| &**rank), Some("2"));
    let out = give_leg_result(&mut exchange, 0, good(), 10);
    assert_eq!(rank(&out), Some("2"));
    let snapshot = world.snapshot.load_full();
    let ranks = |id: usize| snapshot.endpoints[id].endpoint.ranks.under_way();
    let under_way: u32 = (0..4).flat_map(ranks).sum();
    assert_eq!(under_way, 1, "the prefill is over");
    drop(exchange);
    assert!((0..4).all(|id| ranks(id).is_empty()));

    let world = ranked(Some(Mode::Header { source_tokens: None }), &[3, 0, 7]);
    let (_exchange, out, _) = asked(&world, &[]);
    assert_eq!(rank(&out), None, "it would tell both servers");

    let world = ranked(Some(Mode::Direct(direct("sglang"))), &[3, 0, 7]);
    let (_exchange, out, asks) = asked(&world, &[]);
    assert!(asks[0].headers.iter().all(|(name, _)| *name != RANK_HEADER), "the room says which rank computes");
    assert_eq!(rank(&out), Some("2"));
}

/// A pool whose workers have these numbers of the prompt's blocks cached.
fn holding(source_tokens: Option<u32>, decider: Decider, blocks: [usize; 4]) -> World {
    holding_by("predicted-latency", source_tokens, decider, blocks)
}

fn holding_by(strategy: &'static str, source_tokens: Option<u32>, decider: Decider, blocks: [usize; 4]) -> World {
    let world = Setup { strategy, ..setup(Some(Mode::Header { source_tokens }), decider) }.build();
    let config = world.processor.picker.config();
    let cache = &config.pools()[0].prefix.as_ref().unwrap().cache;
    let space = cache.space();
    let named = space.root(&Root { name: "m", ..Root::default() });
    for (id, blocks) in (0..4).zip(blocks) {
        let mut keys = keys(cache, blocks);
        let bytes: Vec<u8> = prompt().iter().take(TOKENS_A_BLOCK).flat_map(|id| id.to_le_bytes()).collect();
        if let Some(first) = keys.first_mut() {
            *first = space.first(named, &bytes);
        }
        cache.record(EndpointId(id), &keys, TenantId(0), NOW);
    }
    world
}

#[test]
fn sidecar_gets_fetch_source_with_more_cached_blocks() {
    // Both decode workers have more blocks than the prefill worker.
    let ids = ["a", "b", "c", "d", "e", "f", "g", "h"];
    let named = |world: &World| -> std::collections::BTreeSet<String> {
        ids.iter().filter_map(|id| asked(world, &[("x-request-id", id)]).1.set.get(SOURCE_HEADER).cloned()).collect()
    };
    let decode =
        |last: &[u8]| last.iter().map(|n| format!("192.168.1.{n}:8000")).collect::<std::collections::BTreeSet<_>>();
    for (what, least, blocks, sources) in [
        ("both hold as much, give or take a block", 16, [2, 2, 20, 19], &[3, 4][..]),
        ("one holds more", 16, [2, 2, 20, 11], &[3]),
        ("as much more as it takes", 9 * 16, [2, 2, 11, 2], &[3]),
        ("not enough more", 9 * 16 + 1, [2, 2, 11, 2], &[]),
        ("no endpoint has more", 1, [5, 5, 5, 5], &[]),
        ("nothing is cached", 1, [0; 4], &[]),
    ] {
        let world = holding(Some(least), Decider::Always, blocks);
        assert_eq!(named(&world), decode(sources), "{what}");
    }
    assert!(named(&holding(None, Decider::Always, [2, 2, 20, 19])).is_empty(), "not configured");
    assert_eq!(named(&holding_by("least-request", Some(16), Decider::Always, [2, 2, 20, 11])), decode(&[3]));
    // Served whole by a decode worker with fewer blocks than a prefill worker.
    assert_eq!(named(&holding(Some(16), Decider::Never, [20, 2, 1, 1])), decode(&[1]));
}

#[test]
fn sidecar_gets_encoders_booked_until_response_begins() {
    let policy = SplitPolicy { decider: Decider::Never, together: Vec::new(), whole: true, required: false };
    let world = |mode: Mode| {
        Setup {
            servers: vec![(0, 0.0, &[]); 3],
            roles: &["decode", "encode", "encode"],
            disagg: Some((policy.clone(), mode)),
            strategy: "predicted-latency",
            parameters: Json::Null,
            ..Setup::default()
        }
        .build()
    };
    let image = |url: &str| json!({"type": "image_url", "image_url": {"url": url}});
    let sent = |world: &World, content: Json| {
        let mut exchange = world.exchange();
        let all = [(":path", "/v1/chat/completions"), (":method", "POST"), (ENCODERS, "10.6.6.6:1")];
        send(&mut exchange, request(Message::RequestHeaders(headers(&all, false))));
        let sent = json!({"model": "m", "messages": [{"role": "user", "content": content}]}).to_string();
        let out = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
        let removed = out.removed.iter().any(|name| name == ENCODERS);
        (exchange, out.set.get(ENCODERS).cloned(), removed)
    };
    let header = world(Mode::Header { source_tokens: None });
    let encoding = || header.snapshot.load().endpoints[1..].iter().map(|s| s.endpoint.ledger.in_flight()).sum::<u32>();
    let (mut first, one, removed) = sent(&header, json!([image("https://a/1")]));
    assert!(!removed && encoding() == 1);
    let (second, other, _) = sent(&header, json!([image("https://a/2")]));
    assert!(one.is_some() && other.is_some() && one != other, "what is under way counts");
    assert_eq!(encoding(), 2);
    send(&mut first, request(Message::ResponseHeaders(headers(&[(":status", "200")], false))));
    send(&mut first, request(Message::ResponseBody(body(b"{", false))));
    assert_eq!(encoding(), 1, "its images are encoded when its answer begins");
    drop((first, second));
    assert_eq!(encoding(), 0);
    let (_third, both, _) = sent(&header, json!([image("https://a/1"), image("https://a/2")]));
    assert_eq!(both.map(|list| list.split(',').count()), Some(2));
    assert!(matches!(sent(&header, json!("a text")), (_, None, true)), "client headers are removed");
    let own = world(Mode::Direct(direct("nixl")));
    assert!(matches!(sent(&own, json!([image("https://a/1")])), (_, None, true)), "there is no sidecar");
}

#[test]
fn failing_encoder_is_ejected_and_probed_again() {
    let world = Setup {
        servers: vec![(0, 0.0, &[]); 4],
        roles: &["decode", "decode", "encode", "encode"],
        disagg: Some((
            SplitPolicy { decider: Decider::Never, together: Vec::new(), whole: true, required: false },
            Mode::Header { source_tokens: None },
        )),
        strategy: "least-request",
        parameters: Json::Null,
        ..Setup::default()
    }
    .build();
    let image = json!([{"type": "image_url", "image_url": {"url": "https://a/1"}}]);
    let sent = json!({"model": "m", "messages": [{"role": "user", "content": image}]}).to_string();
    let asked = || {
        let mut exchange = world.exchange();
        let all = [(":path", "/v1/chat/completions"), (":method", "POST")];
        send(&mut exchange, request(Message::RequestHeaders(headers(&all, false))));
        let out = Answered::of(&send(&mut exchange, request(Message::RequestBody(body(sent.as_bytes(), true)))));
        (exchange, out.set.get(ENCODERS).cloned())
    };
    let answered = |exchange: &mut Exchange, status: &str| {
        send(exchange, request(Message::ResponseHeaders(headers(&[(":status", status)], false))));
        send(exchange, request(Message::ResponseBody(body(b"{}", true))));
    };
    let sick = "192.168.1.3:8000";
    let mut failed = 0;
    for _ in 0..60 {
        let (mut exchange, named) = asked();
        let fails = named.as_deref() == Some(sick);
        failed += u32::from(fails);
        answered(&mut exchange, if fails { "502" } else { "200" });
    }
    let policy = HealthPolicy::default();
    let snapshot = world.snapshot.load();
    let health = |at: usize| &snapshot.endpoints[at].endpoint.health;
    let open = |at: usize| health(at).availability(NOW, &policy);
    assert_eq!(failed, policy.consecutive_failures);
    assert_eq!(
        [0, 1, 2, 3].map(open),
        [Availability::Open, Availability::Open, Availability::Ejected, Availability::Open]
    );
    // The ejection has ended: one request is the probe. No other request gets this encoder until the probe has ended.
    for _ in 0..2 {
        health(3).record(HealthOutcome::ConnectFailure, Timestamp(1), &policy);
    }
    let (probe, named) = asked();
    assert_eq!(named.as_deref(), Some("192.168.1.4:8000"));
    assert_eq!(asked().1, None);
    drop(probe);
    let (mut probe, named) = asked();
    assert_eq!(named.as_deref(), Some("192.168.1.4:8000"));
    answered(&mut probe, "200");
    assert!((0..20).all(|_| asked().1.as_deref() == Some("192.168.1.4:8000")), "it is back");
}

#[test]
fn client_fetch_source_header_is_removed() {
    let world = holding(Some(1), Decider::Always, [0; 4]);
    let (_exchange, out, _) = asked(&world, &[(SOURCE_HEADER, "10.6.6.6:1")]);
    assert!(!out.set.contains_key(SOURCE_HEADER) && out.removed.iter().any(|name| name == SOURCE_HEADER));
}
