#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that can't go on fails")]

use super::*;
use crate::registry;
use attache_pool::EndpointSpec;
use attache_pool::health::HealthOutcome;
use attache_pool::writer::SourceId;
use attache_prefix::cache::{BlockUnit, CacheConfig};
use attache_prefix::index::{Origin, StoredBlock, Tier};
use attache_prefix::key::{BlockKey, EngineHash};
use attache_prefix::trust::Trust;
use attache_record::{Decided, Ended, KvChange, Looked, RequestLeg};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use serde_json::json;
use std::time::Duration;

fn header(strategy: &str) -> String {
    let settings = json!({
        "apiVersion": "attache.dev/v1",
        "kind": "Attache",
        "pools": [{
            "name": "p",
            "strategy": {"name": strategy},
            "destination": {"mode": "list", "max": 1},
            "health": {"consecutiveFailures": 2, "ejection": "10s"},
            "endpoints": [{"address": "127.0.0.1:8000"}, {"address": "127.0.0.1:8001"}],
        }],
    });
    let header = Header { format: FORMAT.to_owned(), version: "0".to_owned(), seed: 7, settings };
    serde_json::to_string(&header).unwrap()
}

fn cache() -> CacheConfig {
    CacheConfig {
        claim_every_block: false,
        unit: BlockUnit::Tokens(16),
        max_bytes: 1 << 20,
        tenant_share: 1.0,
        claim_life: Duration::from_secs(1),
        seed: 7,
    }
}

/// A pool of two endpoints.
fn begin() -> Vec<Line> {
    let endpoint = |port: u16| EndpointSpec::at(([127, 0, 0, 1], port).into());
    vec![
        Line::Pool { pool: 0, name: "p".into(), cache: cache() },
        Line::Endpoints { pool: 0, source: SourceId(0), endpoints: vec![endpoint(8000), endpoint(8001)] },
        Line::Publish { pool: 0 },
    ]
}

/// Settings of a pool with this strategy and up to `max` destinations.
fn listing(strategy: &str, max: u32) -> Settings {
    let mut shown = serde_json::from_str::<Header>(&header(strategy)).unwrap().settings;
    shown["pools"][0]["destination"]["max"] = json!(max);
    settings(&shown, &registry(), 1).unwrap()
}

fn decide(r: u64, pick: u32) -> Line {
    Line::Decide(Box::new(Decided {
        r,
        at: Timestamp(1_000 + r),
        pool: "p".into(),
        model: "m".into(),
        readable: true,
        estimated: 10,
        picks: vec![EndpointId(pick)],
        reason: "fewest requests".to_owned(),
        ..Decided::default()
    }))
}

fn text(strategy: &str, lines: &[Line]) -> String {
    let lines = lines.iter().map(|line| serde_json::to_string(line).unwrap() + "\n");
    header(strategy) + "\n" + &lines.collect::<String>()
}

fn play(text: &str) -> Result<Summary, RecordError> {
    replay(text.as_bytes(), None, &registry())
}

#[test]
fn bookings_ends_moves_and_failures_change_later_decisions() {
    // Both endpoints tie for the first request. Each later one goes to the endpoint with fewer requests.
    for first in [0, 1] {
        let mut lines = begin();
        lines.extend([decide(0, first), decide(1, 1 - first)]);
        lines.push(Line::End(Ended { r: 0, complete: true, ..Ended::default() }));
        lines.push(decide(2, first));
        lines.push(Line::Moved { r: 2, at: Timestamp(2_000), to: EndpointId(1 - first), leg: RequestLeg::Response });
        lines.push(decide(3, first));
        lines.extend([
            decide(4, first),
            Line::Drop { r: 3, leg: RequestLeg::Response },
            Line::Drop { r: 4, leg: RequestLeg::Response },
        ]);
        let failure = |r| Line::Health {
            r,
            at: Timestamp(3_000),
            id: EndpointId(first),
            outcome: HealthOutcome::Failure,
            api: Default::default(),
            client: Default::default(),
        };
        lines.extend([failure(1), failure(1)]);
        lines.extend([decide(5, 1 - first), decide(6, 1 - first)]);
        let summary = play(&text("least-request", &lines)).unwrap();
        let tied = summary.differences.iter().filter(|d| d.request == 0).count() as u64;
        if tied == 1 {
            // The random numbers broke the tie the other way, which the other round of the loop expects.
            continue;
        }
        assert!(summary.is_exact(), "{summary}");
        assert_eq!((summary.decisions, summary.lines, summary.cut), (7, lines.len() as u64 + 1, None));
        assert_eq!(summary.endpoints["127.0.0.1:8000"].recorded + summary.endpoints["127.0.0.1:8001"].recorded, 7);
        return;
    }
    unreachable!("one of the two is the first pick");
}

#[test]
fn different_decision_is_listed_with_its_line() {
    let mut lines = begin();
    lines.extend((0..40).map(|r| decide(r, 0)));
    let summary = play(&text("least-request", &lines)).unwrap();
    assert_eq!((summary.decisions, summary.equal), (40, 20), "{summary}");
    assert_eq!(summary.differences.len(), MAX_DIFFERENCES);
    let first = &summary.differences[0];
    assert_eq!(first.line, first.request + 5, "the header and three lines are before the first");
    assert_eq!(
        (first.recorded.as_slice(), first.replayed.as_slice()),
        (["127.0.0.1:8000".to_owned()].as_slice(), ["127.0.0.1:8001".to_owned()].as_slice())
    );
    assert!(!summary.is_exact());
    let shown = summary.to_string();
    assert!(shown.contains("20 of 40 decisions are equal (50.00 %)"), "{shown}");
    assert!(shown.contains("127.0.0.1:8000: 40 requests when recorded, 20 now"), "{shown}");
}

/// Three endpoints: one request is on the second, two are on the third.
#[test]
fn order_of_fallbacks_counts_only_where_a_request_used_it() {
    let endpoint = |port: u16| EndpointSpec::at(([127, 0, 0, 1], port).into());
    let listed = |r, picks: &[u32]| {
        let Line::Decide(decided) = decide(r, 0) else { unreachable!() };
        Line::Decide(Box::new(Decided { picks: picks.iter().map(|id| EndpointId(*id)).collect(), ..*decided }))
    };
    let mut lines = begin();
    lines[1] = Line::Endpoints { pool: 0, source: SourceId(0), endpoints: [8000, 8001, 8002].map(endpoint).into() };
    let moved = |r, to| Line::Moved { r, at: Timestamp(2_000), to: EndpointId(to), leg: RequestLeg::Response };
    // The first three decisions have ties, and Envoy moves each request to where the test needs it.
    lines.extend([decide(0, 0), moved(0, 1), decide(1, 0), moved(1, 2), decide(2, 0), moved(2, 2)]);
    lines.extend([listed(3, &[0, 2, 1]), Line::Drop { r: 3, leg: RequestLeg::Response }]);
    lines.extend([listed(4, &[0, 1, 2]), moved(4, 1), Line::Drop { r: 4, leg: RequestLeg::Response }]);
    let play = |lines: &[Line], max| {
        replay(text("least-request", lines).as_bytes(), Some(&listing("least-request", max)), &registry()).unwrap()
    };
    let of = |summary: &Summary, request| summary.differences.iter().filter(|d| d.request == request).count();
    for max in [1, 3] {
        let summary = play(&lines, max);
        assert_eq!((of(&summary, 3), summary.decisions), (0, 5), "{max}: no request used the other order: {summary}");
    }
    assert_eq!(of(&play(&lines, 3), 4), 0, "the used fallback is the replay's, too");
    lines.extend([listed(5, &[0, 2, 1]), moved(5, 2)]);
    let summary = play(&lines, 3);
    let last = summary.differences.iter().find(|d| d.request == 5).unwrap();
    assert_eq!(last.recorded, ["127.0.0.1:8000", "127.0.0.1:8002"], "{summary}");
    assert_eq!(last.replayed, ["127.0.0.1:8000", "127.0.0.1:8001"]);
    assert_eq!(summary.equal + summary.differences.len() as u64, summary.decisions, "{summary}");
}

#[test]
fn ties_and_random_choices_are_told_from_rules() {
    let mut lines = begin();
    let drawn = |r| {
        let Line::Decide(decided) = decide(r, 0) else { unreachable!() };
        Line::Decide(Box::new(Decided { rng: r * 1_000, ..*decided }))
    };
    lines.extend((0..40).flat_map(|r| [drawn(r), Line::Drop { r, leg: RequestLeg::Response }]));
    let play = |strategy: &str, lines: &[Line]| {
        replay(text("least-request", lines).as_bytes(), Some(&listing(strategy, 1)), &registry()).unwrap()
    };
    // Both endpoints are always idle: each decision is a tie, or is random anyway.
    for strategy in ["least-request", "random"] {
        let summary = play(strategy, &lines);
        let others = summary.decisions - summary.equal;
        assert!(summary.by_chance == others && others > 5, "{strategy}: {summary}");
        let line = format!("\n{others} of the other {others} depend on random numbers: ties, or a random choice\n");
        assert!(summary.to_string().contains(&line), "{summary}");
        assert!(summary.differences.iter().all(|d| d.by_chance));
    }
    // A request on the first endpoint: the rule decides.
    lines.truncate(3);
    lines.extend([
        decide(0, 1),
        Line::Moved { r: 0, at: Timestamp(2_000), to: EndpointId(0), leg: RequestLeg::Response },
    ]);
    lines.extend((1..20).flat_map(|r| [decide(r, 0), Line::Drop { r, leg: RequestLeg::Response }]));
    let summary = play("least-request", &lines);
    assert!(summary.differences.iter().filter(|d| d.request > 0).all(|d| !d.by_chance), "{summary}");
    assert!(summary.decisions - summary.equal >= 19, "{summary}");
}

#[test]
fn inputs_that_were_not_recorded_are_listed() {
    let mut lines = begin();
    lines.push(decide(0, 0));
    let of = |strategy: &str| {
        settings(&serde_json::from_str::<Header>(&header(strategy)).unwrap().settings, &registry(), 1).unwrap()
    };
    for (strategy, missing) in
        [("chwbl", "`chwbl 2`"), ("session-affinity", "`x-session-id`"), ("predicted-latency", "keys")]
    {
        let summary = replay(text("random", &lines).as_bytes(), Some(&of(strategy)), &registry()).unwrap();
        assert!(summary.missing.iter().any(|m| m.contains(missing)), "{strategy}: {:?}", summary.missing);
    }
}

#[test]
fn invalid_line_is_an_error_with_its_number_and_incomplete_last_line_is_none() {
    let whole = text("random", &begin());
    let error = |text: &str| play(text).unwrap_err().to_string();
    assert_eq!(error(""), "the recording is empty");
    assert!(error("{}\n").starts_with("line 1: "), "{}", error("{}\n"));
    let other = whole.replacen("record.v1", "record.v9", 1);
    assert_eq!(error(&other), "line 1: `format` is `attache.record.v9`; `attache.record.v1` is allowed");
    let unknown = whole.clone() + "{\"publish\":{\"pool\":4}}\n";
    assert_eq!(error(&unknown), "line 5: `pool` is 4, which has not begun");
    let garbage = whole.clone() + "{\"publish\"\n" + "{\"publish\":{\"pool\":0}}\n";
    assert!(error(&garbage).starts_with("line 5: "), "{}", error(&garbage));
    let cut = whole.clone() + "{\"publish\":{\"po";
    let summary = play(&cut).unwrap();
    assert_eq!((summary.cut, summary.lines), (Some(5), 4));
    assert!(summary.to_string().contains("line 5 is cut off"));
}

/// A request that has waited goes to the fast deployment although it is full, another one to the slow deployment.
#[test]
fn recorded_wait_is_an_input_of_the_decision() {
    let folder = tempfile::tempdir().unwrap();
    let profile = |deployment: &str, seconds: f64, rate: f64| {
        let path = folder.path().join(format!("{deployment}.json"));
        let profile = json!({
            "gpu": deployment, "cost": 1.0, "created": 1_725_000_000.0, "indexes": [[4], [128]], "tputs": [[rate]],
            "e2e": [[seconds]], "slos": {"percentile": 99, "e2e": 5.0},
        });
        std::fs::write(&path, profile.to_string()).unwrap();
        path.display().to_string()
    };
    // A request takes 0.4 of the one and 0.098 of the other.
    let profiles = json!([profile("fast", 1.0, 2.5), profile("slow", 2.0, 5.102)]).to_string();
    let strategy = format!("\"name\":\"slo\",\"parameters\":{{\"profiles\":{profiles}}}");
    let endpoint = |port: u16, deployment: &str| {
        let mut spec = EndpointSpec::at(([127, 0, 0, 1], port).into());
        spec.labels.insert("app.kubernetes.io/name".into(), deployment.into());
        spec
    };
    let mut lines = begin();
    lines[1] = Line::Endpoints {
        pool: 0,
        source: SourceId(0),
        endpoints: vec![endpoint(8000, "fast"), endpoint(8001, "slow")],
    };
    lines.extend((0..11).map(|r| decide(r, u32::from(r > 1))));
    for (waited, pick) in [(0, 1), (4_200, 0)] {
        let Line::Decide(mut last) = decide(11, pick) else { unreachable!() };
        (last.at, last.waited) = (Timestamp(5_000_000_000), Duration::from_millis(waited));
        let all = [lines.clone(), vec![Line::Decide(last)]].concat();
        let summary = play(&text("slo", &all).replacen("\"name\":\"slo\"", &strategy, 1)).unwrap();
        assert!(summary.is_exact(), "after {waited} ms: {summary}");
    }
}

#[test]
fn recorded_decision_is_explained_in_its_state() {
    let mut lines = begin();
    lines.extend([decide(0, 0), decide(1, 1), decide(2, 0)]);
    // The replay of the first two leaves one request on each endpoint; the first ends.
    lines.insert(5, Line::End(Ended { r: 0, complete: true, ..Ended::default() }));
    let text = text("least-request", &lines);
    let other = registry().build("random", &serde_json::Value::Null).unwrap();
    let explain = |request, other| explain::explain_in(text.as_bytes(), request, other, &registry()).unwrap();
    let explained = explain(2, Some(("random", &*other))).unwrap();
    assert_eq!((explained.request, explained.line, &*explained.decision.strategy), (2, 8, "least-request"));
    let requests: Vec<u32> = explained.decision.endpoints.iter().map(|endpoint| endpoint.requests).collect();
    let free = requests.iter().position(|requests| *requests == 0).unwrap();
    assert_eq!(requests.iter().sum::<u32>(), 1);
    let address = |i: usize| format!("127.0.0.1:800{i}");
    assert_eq!(explained.decision.choice.picks, [address(free)]);
    assert_eq!(explained.recorded, [address(0)]);
    assert_eq!(explained.other.unwrap().choice.picks.len(), 1);
    assert!(explained.decision.endpoints.iter().all(|endpoint| endpoint.excluded.is_none()));
    assert!(explain(3, None).is_none());
}

#[test]
fn excluded_endpoints_are_explained() {
    let mut lines = begin();
    lines.push(decide(0, 0));
    let failure = |at| Line::Health {
        r: 0,
        at: Timestamp(at),
        id: EndpointId(0),
        outcome: HealthOutcome::ConnectFailure,
        api: Default::default(),
        client: Default::default(),
    };
    lines.extend([failure(2_000), failure(2_001)]);
    lines.push(decide(2_005, 1));
    let text = text("least-request", &lines);
    let explained = explain::explain_in(text.as_bytes(), 2_005, None, &registry()).unwrap().unwrap();
    assert_eq!(explained.decision.endpoints[0].excluded, Some("ejected"));
    assert_eq!((&*explained.decision.choice.picks[0], &*explained.recorded[0]), ("127.0.0.1:8001", "127.0.0.1:8001"));
}

/// A pool of two prefill servers and one decode server.
fn split_header() -> String {
    let settings = json!({
        "apiVersion": "attache.dev/v1",
        "kind": "Attache",
        "pools": [{
            "name": "p",
            "strategy": {"name": "least-request"},
            "disaggregation": {"decider": "always"},
            "endpoints": [
                {"address": "127.0.0.1:8000", "role": "decode"},
                {"address": "127.0.0.1:8001", "role": "prefill"},
                {"address": "127.0.0.1:8002", "role": "prefill"},
            ],
        }],
    });
    let header = Header { format: FORMAT.to_owned(), version: "0".to_owned(), seed: 7, settings };
    serde_json::to_string(&header).unwrap()
}

fn split_lines(lines: &[Line]) -> String {
    let endpoint = |port: u16, role: &str| {
        let mut spec = EndpointSpec::at(([127, 0, 0, 1], port).into());
        spec.labels.insert(attache_pool::role::ROLE_LABEL.into(), role.into());
        spec
    };
    let endpoints = vec![endpoint(8000, "decode"), endpoint(8001, "prefill"), endpoint(8002, "prefill")];
    let begin = [
        Line::Pool { pool: 0, name: "p".into(), cache: cache() },
        Line::Endpoints { pool: 0, source: SourceId(0), endpoints },
        Line::Publish { pool: 0 },
    ];
    let lines = begin.iter().chain(lines).map(|line| serde_json::to_string(line).unwrap() + "\n");
    split_header() + "\n" + &lines.collect::<String>()
}

/// A split request; the prefill server 1 is the first choice, if `first`.
fn split(r: u64, first: bool) -> Line {
    let Line::Decide(decided) = decide(r, 0) else { unreachable!() };
    let prefill = if first { vec![EndpointId(1), EndpointId(2)] } else { vec![EndpointId(2), EndpointId(1)] };
    Line::Decide(Box::new(Decided { splittable: true, generates: true, prefill, ..*decided }))
}

#[test]
fn prefill_leg_counts_until_its_own_end() {
    let ended = |r, leg| Line::End(Ended { r, complete: true, leg, ..Ended::default() });
    // Whichever prefill server gets the first request, the others follow from the bookings.
    for first in [true, false] {
        let lines = [
            split(0, first),
            Line::Dispatch { r: 0, at: Timestamp(1_500), from: Some(EndpointId(1)), seconds: 0.5 },
            ended(0, RequestLeg::Response),
            // A prefill server still works for request 0, so the other one is idle.
            split(1, !first),
            ended(0, RequestLeg::Prefill),
            split(2, first),
            Line::Drop { r: 1, leg: RequestLeg::Prefill },
            Line::Drop { r: 2, leg: RequestLeg::Prefill },
            Line::Moved { r: 2, at: Timestamp(1_600), to: EndpointId(0), leg: RequestLeg::Response },
        ];
        let summary = play(&split_lines(&lines)).unwrap();
        if summary.differences.iter().any(|difference| difference.request == 0) {
            continue;
        }
        assert!(summary.is_exact() && summary.decisions == 3, "{summary}");
        return;
    }
    unreachable!("one of the two is the first choice");
}

#[test]
fn explanation_finds_a_request_by_its_id_and_shows_its_prefill_servers() {
    let named = |r, id: &str| {
        let Line::Decide(decided) = split(r, true) else { unreachable!() };
        Line::Decide(Box::new(Decided { id: id.to_owned(), ..*decided }))
    };
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    std::fs::write(&path, split_lines(&[named(0, "a"), named(1, "b"), named(2, "a")])).unwrap();
    let explain = |request: Option<&str>| explain::explain(&path, request, None, &registry()).unwrap();
    let found = |request: Option<&str>| explain(request).map(|explained| explained.request);
    assert_eq!(
        [found(Some("b")), found(Some("a")), found(Some("0")), found(None)],
        [Some(1), Some(2), Some(0), Some(2)]
    );
    assert_eq!(found(Some("c")), None);
    let explained = explain(Some("b")).unwrap();
    assert_eq!((&*explained.decision.request_id, &*explained.recorded_prefill[0]), ("b", "127.0.0.1:8001"));
    assert_eq!((explained.decision.choice.picks.len(), explained.decision.choice.prefill.len()), (1, 2));
}

#[test]
fn kv_events_change_the_cache_that_they_belong_to() {
    let keys: Vec<BlockKey> = (1..=4).map(BlockKey).collect();
    let decide_by_prefix = |r, live, pick| {
        let Line::Decide(decided) = decide(r, pick) else { unreachable!() };
        let prompt = Some(Looked { keys: keys.clone(), token_ids: 64, count: 1, ..Looked::default() });
        Line::Decide(Box::new(Decided { live, prompt, ..*decided }))
    };
    let kv = |number, change| Line::Kv { pool: 0, number, change };
    let stored = |number, cache| {
        let blocks = keys.iter().map(|key| StoredBlock { hash: EngineHash(key.0), key: *key }).collect();
        kv(number, KvChange::Stored { cache, tier: Tier::Gpu, parent: None, blocks, origin: Origin::New })
    };
    let exact = |number, cache| kv(number, KvChange::Trust { cache, trust: Trust::Exact });
    let caches = |number| kv(number, KvChange::Caches(vec![(EndpointId(0), vec![5]), (EndpointId(1), vec![6])]));
    let dropped = |r| Line::Drop { r, leg: RequestLeg::Response };
    let header: Header = serde_json::from_str(&header("prefix-cache")).unwrap();
    let mut lines = begin();
    lines.extend([caches(0), exact(0, 5), exact(0, 6), stored(0, 6), decide_by_prefix(0, 0, 1), dropped(0)]);
    lines.push(Line::Cache { pool: 0, cache: cache(), number: 1 });
    lines.push(Line::Live { live: 1, settings: header.settings });
    lines.extend([caches(1), exact(1, 5), exact(1, 6), stored(1, 5), decide_by_prefix(1, 1, 0), dropped(1)]);
    // A stream that began before decides by the first cache, whose events end later.
    lines.extend([decide_by_prefix(2, 0, 1), dropped(2), kv(0, KvChange::Cleared { cache: 6 }), stored(0, 5)]);
    lines.extend([decide_by_prefix(3, 0, 0), dropped(3), decide_by_prefix(4, 1, 0)]);
    let summary = play(&text("prefix-cache", &lines)).unwrap();
    assert!(summary.is_exact() && summary.decisions == 5, "{summary}");
}
