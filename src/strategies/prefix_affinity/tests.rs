//! LocalAI's own cases: chains, the prefix tree, hot endpoints and selection.

use super::*;
use crate::chwbl::tests::chat;
use attache_pool::PoolSnapshot;
use attache_protocol::Prompt;
use attache_protocol::prompt::Piece;
use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_scheduling::{Decision, ModelPolicy, Registry};
use attache_types::rng::for_request;
use proptest::prelude::{Just, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};
use std::collections::BTreeMap;

const A: EndpointId = EndpointId(0);
const B: EndpointId = EndpointId(1);
const C: EndpointId = EndpointId(2);
/// Hash of a model's name.
const M: u64 = 7;
const SECOND: u64 = 1_000_000_000;

fn bare(text: &str) -> Prompt<'_> {
    Prompt { pieces: vec![Piece::Text(text.into())], count: 1, ..Prompt::default() }
}

fn chain_of(model: &str, prompt: &Prompt<'_>, window: usize, depth: usize) -> Vec<u64> {
    chain::of_prompt(model, prompt, window, depth).to_vec()
}

#[test]
fn chains_match_localais_golden_vectors() {
    let default = |model: &str, text: &str| chain_of(model, &bare(text), 256, 64);
    assert_eq!(default("m", "abc"), [0xf725_79e7_baf1_aa6c]);
    assert_eq!(default("m1", "abc"), [0xba3e_6939_99a4_c072]);
    assert_eq!(default("m2", "abc"), [0xae99_ffe0_87bb_6bde]);
    assert_eq!(default("modelX", "hello world"), [0x7d32_cf95_c649_5399]);
    assert_eq!(default("m", "system\nYou are helpful.\nuser\nHi\n"), [0xd035_f6c5_dfd1_9c6d]);
    let head = [0xd21b_1d90_c789_6421, 0x8118_b678_681b_cb32];
    let short = |text: &str| chain_of("m", &bare(text), 4, 3);
    let stable = short("system-rules-stable-prefix-that-exceeds-the-budget");
    assert_eq!(stable, [head[0], head[1], 0x400b_11f0_fba5_b1e9]);
    assert_eq!(short("system-rDIFFERENT-tail"), [head[0], head[1], 0x47ad_62dc_9927_249d]);
    for (bytes, blocks) in [(0, 0), (1, 1), (256, 1), (257, 2), (100_000, 64)] {
        assert_eq!(default("m", &"x".repeat(bytes)).len(), blocks, "{bytes} bytes");
    }
}

#[test]
fn messages_are_written_as_in_localai() {
    let wanted = chain_of("m", &bare("system\nYou are helpful.\nuser\nHi\n"), 256, 64);
    assert_eq!(chain_of("m", &chat(&[("system", "You are helpful."), ("user", "Hi")]), 256, 64), wanted);
    let apart = Prompt { system: vec![Piece::Text("You are helpful.".into())], ..chat(&[("user", "Hi")]) };
    assert_eq!(chain_of("m", &apart, 256, 64), wanted, "a separate system prompt comes first");
    let parts = Prompt {
        pieces: vec![
            Piece::Role("system".into()),
            Piece::Text("You are ".into()),
            Piece::Text("helpful.".into()),
            Piece::Role("user".into()),
            Piece::Text("Hi".into()),
        ],
        ..Prompt::default()
    };
    assert_eq!(chain_of("m", &parts, 256, 64), wanted);
    let ids = |ids: &[u32]| Prompt { pieces: vec![Piece::Tokens(ids.to_vec())], ..Prompt::default() };
    let (one, two) = (chain_of("m", &ids(&[1, 2, 3]), 4, 8), chain_of("m", &ids(&[1, 2, 4]), 4, 8));
    assert_eq!((one.len(), &one[..2]), (3, &two[..2]));
    assert_ne!(one[2], two[2]);
}

fn retention(ttl: u64, half_life: u64) -> Retention {
    let (ttl, half_life) = (Duration::from_secs(ttl), Duration::from_secs(half_life));
    Retention { ttl, half_life, max_entries: 1_000, last_writer: false }
}

/// Endpoint and depth of the longest match if only `candidates` may serve.
fn longest(memory: &Memory, query: &[u64], now: Timestamp, candidates: &[EndpointId]) -> Option<(EndpointId, usize)> {
    let candidate = |id| candidates.iter().position(|c| *c == id).map(|i| (i, 0));
    memory.hot(query, now, candidate).map(|hot| (candidates[hot.candidate], hot.depth))
}

#[test]
fn prefix_tree_is_localais() {
    type Row = (&'static str, &'static [(&'static [u64], EndpointId)], &'static [u64], Option<(EndpointId, usize)>);
    let rows: [Row; 7] = [
        ("localai 1.11 extends", &[(&[1, 2, 3, 4], B), (&[7, 8], A)], &[1, 2, 3, 4, 5], Some((B, 4))),
        ("localai 1.11 other branch", &[(&[1, 2, 3, 4], B), (&[7, 8], A)], &[7, 8, 9], Some((A, 2))),
        ("localai 1.11 last writer", &[(&[1, 2], A), (&[1, 2, 3, 4], B)], &[1, 2, 9], Some((B, 2))),
        ("localai 1.11 partly", &[(&[1, 2, 3, 4, 5], A)], &[1, 2, 3, 9, 9], Some((A, 3))),
        ("localai 1.11 elsewhere", &[(&[7, 8], A)], &[1, 2], None),
        ("localai 1.11 replica 0", &[(&[1, 2, 3, 4], A), (&[1, 2, 5, 6], B)], &[1, 2, 3, 4, 9], Some((A, 4))),
        ("localai 1.11 replica 1", &[(&[1, 2, 3, 4], A), (&[1, 2, 5, 6], B)], &[1, 2, 5, 6, 9], Some((B, 4))),
    ];
    for last_writer in [false, true] {
        for (name, seen, query, wanted) in rows {
            let mut memory = Memory::new(Retention { last_writer, ..retention(60, 0) });
            for (i, (chain, endpoint)) in (0..).zip(seen) {
                memory.observe(M, chain, *endpoint, Timestamp(i));
            }
            assert_eq!(longest(&memory, query, Timestamp(9), &[A, B, C]), wanted, "{name}");
        }
    }
}

/// "localai 1.4 step 4": the owner may not serve. In LocalAI no endpoint is hot then; here it is the longest match
/// that may serve.
#[test]
fn match_of_an_endpoint_that_may_not_serve() {
    for (last_writer, wanted) in [(false, Some((A, 2))), (true, None)] {
        let mut memory = Memory::new(Retention { last_writer, ..retention(60, 0) });
        memory.observe(M, &[1, 2], A, Timestamp(0));
        memory.observe(M, &[1, 2, 3, 4], B, Timestamp(1));
        assert_eq!(longest(&memory, &[1, 2, 3, 4], Timestamp(2), &[A, C]), wanted);
        assert_eq!(longest(&memory, &[1, 2, 3, 4], Timestamp(2), &[C]), None, "localai 1.11 candidates {{B,C}}");
    }
}

#[test]
fn old_entries_expire() {
    let mut memory = Memory::new(retention(60, 0));
    memory.observe(M, &[1], A, Timestamp(0));
    let hit = |memory: &Memory, at| longest(memory, &[1], Timestamp(at), &[A]).is_some();
    assert!(hit(&memory, 60 * SECOND) && !hit(&memory, 60 * SECOND + 1), "localai 1.11 TTL 1m");
    memory.observe(M, &[1], A, Timestamp(50 * SECOND));
    assert!(hit(&memory, 90 * SECOND), "localai 1.11 seen again");
    assert!(!memory.is_stale(Timestamp(110 * SECOND)) && memory.is_stale(Timestamp(110 * SECOND + 1)));
    memory.expire(Timestamp(111 * SECOND));
    assert_eq!((memory.len(), memory.weight(M, A, Timestamp(111 * SECOND))), (0, 0.0));
    memory.observe(M, &[], A, Timestamp(112 * SECOND));
    assert_eq!(memory.len(), 0, "localai 1.11 empty key");
}

#[test]
fn weights_count_recent_prefixes() {
    let weights = |memory: &Memory, at| [A, B, C].map(|id| memory.weight(M, id, Timestamp(at)));
    let mut none = Memory::new(retention(3_600, 0));
    for (chain, id) in [(&[1][..], A), (&[1, 2], A), (&[9], B)] {
        none.observe(M, chain, id, Timestamp(0));
    }
    assert_eq!(weights(&none, 5), [2.0, 1.0, 0.0], "localai 1.11 no decay");
    let mut one = Memory::new(retention(3_600, 60));
    one.observe(M, &[1], A, Timestamp(0));
    assert_eq!(one.weight(M, A, Timestamp(60 * SECOND)), 0.5, "localai 1.11 half-life 1m");
    let mut both = Memory::new(retention(60, 30));
    both.observe(M, &[1], A, Timestamp(0));
    both.observe(M, &[9], B, Timestamp(0));
    both.observe(M, &[2], A, Timestamp(90 * SECOND));
    assert_eq!(weights(&both, 120 * SECOND), [0.5, 0.0, 0.0], "localai 1.11 TTL 1m, half-life 30s");
}

#[test]
fn entry_limit_holds_for_long_chains_and_drops_the_oldest_tail_first() {
    let mut memory = Memory::new(Retention { max_entries: 2, ..retention(60, 0) });
    for i in 1..=3 {
        memory.observe(M, &[i], A, Timestamp(i));
    }
    let known =
        |memory: &Memory, chain: &[u64]| longest(memory, chain, Timestamp(9), &[A]).map_or(0, |(_, depth)| depth);
    assert_eq!([1, 2, 3].map(|i| known(&memory, &[i])), [0, 1, 1], "localai 1.11 MaxEntries 2");
    memory.observe(M, &[4, 5, 6, 7], A, Timestamp(4));
    assert_eq!((memory.len(), known(&memory, &[4, 5, 6, 7])), (2, 2));
}

proptest! {
    /// Compared with a plain list of endpoints, prefixes and times.
    #[test]
    fn memory_agrees_with_a_list(
        steps in prop::collection::vec((prop::collection::vec(0u64..4, 0..5), 0u32..4, 0u64..20, 0u32..20), 1..60),
        query in prop::collection::vec(0u64..4, 1..5), may in any::<u8>(),
        max_entries in prop_oneof![5u32..60, Just(10_000)],
    ) {
        // A hash identifies everything before it.
        let hashes = |path: &[u64]| path.iter().scan(1, |h, p| { *h = *h * 5 + p; Some(*h) }).collect::<Vec<u64>>();
        let ttl = 30;
        let mut memory = Memory::new(Retention { max_entries, ..retention(ttl, 10) });
        let mut list = BTreeMap::<(u64, u32), u64>::new();
        let mut now = 0;
        for (path, owner, later, lost) in &steps {
            now += later;
            memory.observe(M, &hashes(path), EndpointId(*owner), Timestamp(now * SECOND));
            list.retain(|_, at| now - *at <= ttl);
            list.extend(hashes(path).into_iter().map(|h| ((h, *owner), now)));
            prop_assert!(memory.held() <= max_entries as usize);
            // Most numbers are no endpoint's id.
            memory.forget(&[EndpointId(*lost)]);
            list.retain(|(_, owner), _| owner != lost);
        }
        // With capacity for all entries, both agree exactly.
        if max_entries == 10_000 {
            prop_assert_eq!(memory.len(), list.len());
            let may_serve = |id: u32| may >> id & 1 == 1;
            let best = hashes(&query).iter().enumerate().rev().find_map(|(i, h)| {
                let owners: Vec<_> = list.iter().filter(|((k, id), _)| k == h && may_serve(*id)).collect();
                (!owners.is_empty()).then_some(i + 1)
            });
            let ids: Vec<EndpointId> = (0..4).filter(|id| may_serve(*id)).map(EndpointId).collect();
            prop_assert_eq!(longest(&memory, &hashes(&query), Timestamp(now * SECOND), &ids).map(|(_, d)| d), best);
            for id in 0..4 {
                let of_id = list.iter().filter(|((_, o), _)| *o == id);
                let wanted: f64 = of_id.map(|(_, at)| 0.5f64.powf((now - at) as f64 / 10.0)).sum();
                prop_assert!((memory.weight(M, EndpointId(id), Timestamp(now * SECOND)) - wanted).abs() < 1e-9);
            }
        }
    }
}

/// The strategy over a pool, with blocks of one character, so that tests can read match lengths from texts.
struct Router {
    strategy: Box<dyn Strategy>,
    policy: ModelPolicy,
}

impl Router {
    fn new(mut parameters: serde_json::Value) -> Self {
        parameters["windowBytes"] = 1.into();
        Self { strategy: (PLUGIN.build)(&parameters, &Registry::default()).unwrap(), policy: ModelPolicy::default() }
    }

    /// The decision for a prompt when the endpoints have these requests. With `send`, the pick is recorded.
    fn route(&self, text: &str, requests: &[u32], send: bool) -> Decision {
        let pool: PoolSnapshot = snapshot(&(0..).zip(requests.iter().copied()).collect::<Vec<_>>());
        let prompt = bare(text);
        let mut cx = context(&pool);
        cx.request.prompt = Some(&prompt);
        cx.policy = self.policy;
        let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
        let mut ranking = Ranking::new(1);
        self.strategy.rank(&cx, &candidates, &mut for_request(1, 0), &mut ranking);
        let decision = ranking.decide().unwrap();
        if send {
            self.strategy.picked(&cx, &decision.picks[0]);
        }
        decision
    }

    /// Records that the endpoint with this id was sent `text`, regardless of the strategy's own choice.
    fn record(&self, text: &str, id: u32) -> Option<Digest> {
        let pool = snapshot(&[(id, 0)]);
        let prompt = bare(text);
        let mut cx = context(&pool);
        cx.request.prompt = Some(&prompt);
        self.strategy.picked(&cx, &pool.endpoints[0].endpoint)
    }
}

#[test]
fn selection_is_localais() {
    // Name, prefixes recorded for A, B, … (in the order of their weights), prompt, requests, picked endpoint, whether
    // load diverted the request from the hot one.
    type Row = (&'static str, &'static [(u32, &'static str)], &'static str, &'static [u32], u32, bool);
    let rows: [Row; 9] = [
        ("localai 1.11 A=1,B=0 hot A .5", &[(0, "abcde")], "abcdeXXXXX", &[1, 0], 0, false),
        ("localai 1.11 A=5,B=0 hot A .9", &[(0, "abcdefghi")], "abcdefghiX", &[5, 0], 1, true),
        ("localai 1.11 hot .2 -> cold", &[(0, "ab")], "abXXXXXXXX", &[0, 0], 1, false),
        ("localai 1.11 cold [C,B,A], C=9 -> B", &[(0, "vwxyz"), (1, "tu")], "q", &[0, 0, 9], 1, false),
        ("localai 1.11 ties by replica", &[], "q", &[0, 0, 0], 0, false),
        ("localai 1.11 hot(A,0)=50,(A,1)=0", &[(0, "abcd")], "abcd", &[50, 0], 1, true),
        ("localai 1.11 hot=1, other 0", &[(1, "abcd")], "abcd", &[0, 1], 1, false),
        ("localai 1.4 rel binds at 0", &[(0, "abcd")], "abcd", &[2, 0], 1, true),
        ("localai 1.4 abs binds at 8", &[(0, "abcd")], "abcd", &[11, 8], 1, true),
    ];
    for (name, held, text, requests, wanted, diverted) in rows {
        for compat in [false, true] {
            let router = Router::new(serde_json::json!({"compat": compat}));
            held.iter().for_each(|(id, text)| drop(router.record(text, *id)));
            let decision = router.route(text, requests, false);
            assert_eq!((decision.picks[0].id.0, decision.diverted), (wanted, diverted), "{name}, compat {compat}");
        }
    }
}

/// "localai 1.4 step 5": the most requests that an endpoint may have when the least loaded one has 0, 1, 2, 3, … of
/// them.
#[test]
fn both_thresholds_bound_the_load() {
    let rules = Thresholds { on: true, min_match: 0.3, abs: 2, rel: 1.5 };
    assert_eq!([0, 1, 2, 3, 8].map(|fewest| rules.bound(fewest).floor()), [1.0, 2.0, 4.0, 5.0, 10.0]);
}

#[test]
fn repeated_prompt_returns_and_new_prompts_spread() {
    let router = Router::new(serde_json::json!({}));
    let first = router.route("hello world", &[0; 3], true).picks[0].id;
    let again = router.route("hello world, again", &[0; 3], true);
    assert_eq!((again.picks[0].id, again.reason), (first, "was sent the longest prefix"));
    let stranger = router.route("something else", &[0; 3], true).picks[0].id;
    let other = router.route("one more of them", &[0; 3], true).picks[0].id;
    assert_eq!([first, stranger, other].iter().collect::<std::collections::BTreeSet<_>>().len(), 3, "the least sent");
}

/// If several endpoints were sent the same prefix, LocalAI considers only the last one.
#[test]
fn several_holders_the_one_with_fewer_requests_wins() {
    for (compat, wanted) in [(false, 0), (true, 1)] {
        let router = Router::new(serde_json::json!({"compat": compat}));
        router.record("abcd", 0);
        router.record("abcd", 1);
        assert_eq!(router.route("abcd", &[1, 2, 1], false).picks[0].id.0, wanted);
    }
}

/// "localai 1.4 step 2" and the seed: the fallback order is by load, and `round_robin` turns prefix affinity off.
#[test]
fn round_robin_uses_the_fallback_order_and_records_nothing() {
    let mut router = Router::new(serde_json::json!({}));
    router.policy.route_policy = Some(RoutePolicy::RoundRobin);
    let picked = router.route("abcd", &[9, 0, 1], true);
    assert_eq!((picked.picks[0].id.0, picked.reason), (1, "fewest requests, then used the longest ago"));
    router.policy.route_policy = None;
    assert_eq!(router.route("abcd", &[9, 0, 0], false).reason, "was sent the least recently", "nothing was recorded");
    let off = Router::new(serde_json::json!({"routePolicy": "round_robin"}));
    assert_eq!(off.route("abcd", &[9, 1, 0], true).picks[0].id.0, 2);
}

/// LocalAI compares only what was sent, among endpoints within the bound; here an idle endpoint comes first.
#[test]
fn cold_prompt_goes_to_an_idle_endpoint_before_a_busy_one() {
    for (compat, wanted) in [(false, 0), (true, 1)] {
        let router = Router::new(serde_json::json!({"compat": compat}));
        router.record("vwxyz", 0);
        assert_eq!(router.route("q", &[0, 1], false).picks[0].id.0, wanted, "compat {compat}");
    }
}

/// Weights are per model: LocalAI has a tree for each model.
#[test]
fn weights_are_kept_for_each_model() {
    let mut memory = Memory::new(retention(3_600, 0));
    memory.observe(1, &[1, 2], A, Timestamp(0));
    memory.observe(2, &[11], B, Timestamp(0));
    let weights = |model| [A, B].map(|id| memory.weight(model, id, Timestamp(1)));
    assert_eq!([weights(1), weights(2)], [[2.0, 0.0], [0.0, 1.0]]);
}

#[test]
fn lost_endpoint_keeps_no_entries() {
    let router = Router::new(serde_json::json!({}));
    router.record("abcd", 1);
    assert_eq!(router.route("abcd", &[0, 0], false).picks[0].id, B);
    router.strategy.forget(&[A]);
    assert_eq!(router.route("abcd", &[0, 0], false).picks[0].id, B, "another one was lost");
    router.strategy.forget(&[B]);
    let cold = router.route("abcd", &[0, 0], false);
    assert_eq!((cold.picks[0].id, cold.reason), (A, "was sent the least recently"));
    let mut memory = Memory::new(retention(60, 0));
    memory.observe(M, &[1, 2, 3], A, Timestamp(0));
    memory.observe(M, &[1, 2], B, Timestamp(1));
    memory.forget(&[A]);
    assert_eq!((memory.len(), memory.weight(M, A, Timestamp(1))), (2, 0.0));
    assert_eq!(longest(&memory, &[1, 2, 3], Timestamp(1), &[A, B]), Some((B, 2)));
    // The endpoint may come back with an empty cache.
    memory.observe(M, &[7], A, Timestamp(2));
    assert_eq!(longest(&memory, &[1, 2, 3], Timestamp(2), &[A]), None);
    assert_eq!((memory.len(), memory.held(), memory.weight(M, A, Timestamp(2))), (3, 3, 1.0));
}

/// A loss visits no entry; later requests free the memory, some entries at a time.
#[test]
fn loss_of_an_endpoint_takes_the_same_time_for_any_number_of_entries() {
    let mut memory = Memory::new(retention(60, 0));
    (0..1_000).for_each(|hash| memory.observe(M, &[hash], if hash % 2 == 0 { A } else { B }, NOW));
    memory.forget(&[A]);
    assert_eq!((memory.len(), memory.held()), (500, 1_000));
    memory.observe(M, &[1], B, NOW);
    assert!((501..1_000).contains(&memory.held()), "{}", memory.held());
    (0..4).for_each(|_| memory.observe(M, &[1], B, NOW));
    assert_eq!((memory.len(), memory.held()), (500, 500));
}

#[test]
fn entries_of_lost_endpoints_are_the_first_to_go() {
    let mut memory = Memory::new(retention(60, 0));
    // More entries than one request checks, so that the lost one's entry is still there.
    (1_000..1_300).for_each(|hash| memory.observe(M, &[hash], EndpointId(9), Timestamp(0)));
    (0..8).for_each(|id| memory.observe(M, &[1], EndpointId(id), Timestamp(u64::from(id))));
    memory.forget(&[EndpointId(5)]);
    memory.observe(M, &[1], EndpointId(8), Timestamp(9));
    let held: Vec<u32> =
        (0..9).filter(|id| longest(&memory, &[1], Timestamp(9), &[EndpointId(*id)]).is_some()).collect();
    assert_eq!(held, [0, 1, 2, 3, 4, 6, 7, 8]);
}

/// One request that Envoy sent elsewhere does not affect the records of others.
#[test]
fn moved_request_keeps_the_records_of_other_requests() {
    let mut memory = Memory::new(retention(60, 0));
    memory.observe(M, &[1, 2, 3], A, Timestamp(0));
    memory.observe(M, &[1, 2, 9], A, Timestamp(1));
    memory.retract(&[1, 2, 9], A, Timestamp(2));
    memory.observe(M, &[1, 2, 9], B, Timestamp(2));
    assert_eq!(longest(&memory, &[1, 2, 3], Timestamp(3), &[A]), Some((A, 3)));
    assert_eq!(longest(&memory, &[1, 2, 9], Timestamp(3), &[A, B]), Some((B, 3)));
    assert_eq!(longest(&memory, &[1, 2, 9], Timestamp(3), &[A]), Some((A, 2)));
    memory.retract(&[1, 2, 3], A, Timestamp(3));
    assert_eq!((longest(&memory, &[1, 2, 3], Timestamp(3), &[A]), memory.len()), (None, 3));
}

#[test]
fn request_that_envoy_sends_elsewhere_is_recorded_there() {
    let router = Router::new(serde_json::json!({}));
    let trail = router.record("abcd", 0).unwrap();
    router.strategy.moved("", &trail, A, B, NOW);
    let next = router.route("abcd", &[0, 0], false);
    assert_eq!((next.picks[0].id, next.reason), (B, "was sent the longest prefix"));
}

/// The policy of a model overrides the parameters, and a 0 is a value.
#[test]
fn policy_of_a_model_overrides_parameters() {
    let mut router = Router::new(serde_json::json!({}));
    router.record("a", 1);
    assert_eq!(router.route("aXXXXXXXXX", &[0, 1], false).picks[0].id.0, 0, "a tenth is not enough");
    router.policy.min_prefix_match = Some(0.0);
    assert_eq!(router.route("aXXXXXXXXX", &[0, 1], false).picks[0].id.0, 1);
    router.policy.balance_abs_threshold = Some(0);
    let strict = router.route("aXXXXXXXXX", &[0, 1], false);
    assert_eq!((strict.picks[0].id.0, strict.diverted), (0, true));
    router.policy = ModelPolicy {
        balance_abs_threshold: Some(50),
        balance_rel_threshold: Some(30.0),
        min_prefix_match: Some(0.0),
        ..router.policy
    };
    assert_eq!(router.route("aXXXXXXXXX", &[1, 31], false).picks[0].id.0, 1);
}

#[test]
fn without_a_text_load_decides() {
    let router = Router::new(serde_json::json!({}));
    let decision = router.route("", &[2, 1], true);
    assert_eq!((decision.picks[0].id.0, decision.lacking), (1, Some(Signal::Prompt)));
}

#[test]
fn parameters_are_checked() {
    for (bad, word) in [
        (r#"{"minPrefixMatch": 2}"#, "0 to 1"),
        (r#"{"balanceRelThreshold": 0.5}"#, "at least 1"),
        (r#"{"balanceAbsThreshold": -1}"#, "-1"),
        (r#"{"routePolicy": "bogus"}"#, "bogus"),
        (r#"{"ttlSeconds": 0}"#, "at least 1"),
        (r#"{"windowBytes": 0}"#, "1 to 65536"),
        (r#"{"maxDepth": 0}"#, "1 to 1024"),
        (r#"{"maxEntries": 0}"#, "1 to 100000000"),
        (r#"{"ttl": 3}"#, "ttl"),
    ] {
        let error = (PLUGIN.build)(&serde_json::from_str(bad).unwrap(), &Registry::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{bad}: {error}");
    }
}
