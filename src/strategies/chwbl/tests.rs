use super::*;
use attache_pool::PoolSnapshot;
use attache_protocol::prompt::Piece;
use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_scheduling::{Decision, Registry};
use attache_types::rng::for_request;
use proptest::prelude::{any, prop, prop_assert, prop_assume, proptest};
use rand::RngExt;
use std::collections::BTreeMap;

/// A prompt of messages: role and text.
pub(crate) fn chat<'a>(messages: &[(&'a str, &'a str)]) -> Prompt<'a> {
    let pieces = messages.iter().flat_map(|(role, text)| {
        let text = (!text.is_empty()).then(|| Piece::Text((*text).into()));
        std::iter::once(Piece::Role((*role).into())).chain(text)
    });
    Prompt { pieces: pieces.collect(), count: 1, ..Prompt::default() }
}

fn key(prompt: &Prompt<'_>, max_user_messages: u32) -> String {
    let mut key = Vec::new();
    let known = write_key(prompt, None, max_user_messages, |bytes| key.extend_from_slice(bytes));
    assert_eq!(known, !key.is_empty() && key != b"assistant");
    String::from_utf8(key).unwrap()
}

#[test]
fn keys_match_neutrees() {
    let bare = Prompt { pieces: vec![Piece::Text("once upon".into())], count: 1, ..Prompt::default() };
    let apart = Prompt { system: vec![Piece::Text("S".into())], ..chat(&[("user", "U")]) };
    let parts = Prompt {
        pieces: vec![Piece::Role("user".into()), Piece::Text("a".into()), Piece::Text("b".into())],
        ..Prompt::default()
    };
    let ids = Prompt { pieces: vec![Piece::Tokens(vec![0x6261, 0x6463])], ..Prompt::default() };
    let rows: [(&str, Prompt<'_>, u32, &str); 15] = [
        ("neutree 2.5 system and user", chat(&[("system", "S"), ("user", "U")]), 2, "system:S|user_0:U"),
        ("neutree 2.5 two users", chat(&[("user", "A"), ("user", "B")]), 2, "user_0:A|user_1:B"),
        ("neutree 2.5 third user", chat(&[("user", "A"), ("user", "B"), ("user", "C")]), 2, "user_0:A|user_1:B"),
        ("neutree 2.5 N=1", chat(&[("user", "A"), ("user", "B")]), 1, "user_0:A"),
        ("neutree 2.5 N=0", chat(&[("user", "A"), ("user", "B")]), 0, "user_0:A"),
        (
            "neutree 2.5 answers between",
            chat(&[("user", "A"), ("assistant", "x"), ("user", "B")]),
            2,
            "user_0:A|user_1:B",
        ),
        ("neutree 2.5 role missing", chat(&[("", "x"), ("user", "A")]), 2, "user_0:A"),
        ("neutree 2.5 system without content", chat(&[("system", ""), ("user", "A")]), 2, "user_0:A"),
        (
            "neutree 2.2 last system wins",
            chat(&[("system", "S"), ("system", "T"), ("user", "A")]),
            1,
            "system:T|user_0:A",
        ),
        ("neutree 2.2 system after the last user", chat(&[("user", "A"), ("system", "S")]), 1, "user_0:A"),
        ("neutree 2.5 payload is a text", bare, 2, "once upon"),
        ("ours: only an assistant message: the whole prompt", chat(&[("assistant", "x")]), 2, "assistantx"),
        ("ours: a separate system prompt", apart, 2, "system:S|user_0:U"),
        ("ours: parts are one text", parts, 2, "user_0:ab"),
        ("ours: token ids", ids, 2, "ab\0\0cd\0\0"),
    ];
    for (name, prompt, n, wanted) in rows {
        assert_eq!(key(&prompt, n), wanted, "{name}");
    }
    assert!(
        !write_key(&Prompt::default(), None, 2, |_| {}),
        "neutree 2.5 nothing: a random place; here the fewest requests"
    );
    assert!(!write_key(&chat(&[("assistant", "")]), None, 2, |_| {}));
}

#[test]
fn points_and_keys_are_the_first_16_digits_of_md5() {
    // printf 'pod-0:0' | md5sum; printf 'system:S|user_0:U' | md5sum
    assert_eq!(first_64_bits(Md5::new().chain_update("pod-0:0")), POD_0_0);
    let strategy = params_of(&Value::Null, false).unwrap().build();
    assert_eq!(strategy.key(&chat(&[("system", "S"), ("user", "U")]), None), Some(SYSTEM_USER));
}

const POD_0_0: u64 = 0x8112_94a1_7d12_f45a;
const SYSTEM_USER: u64 = 0x7fb2_0cb1_2130_ea8a;

/// A pool of endpoints with these requests, by id.
fn pool(requests: &[u32]) -> PoolSnapshot {
    snapshot(&(0..).zip(requests.iter().copied()).collect::<Vec<_>>())
}

fn candidates(pool: &PoolSnapshot) -> Vec<Candidate<'_>> {
    pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect()
}

/// The decision of `strategy` for a prompt with this text when the endpoints whose ids pass `may_serve` may serve it.
fn decide(strategy: &dyn Strategy, pool: &PoolSnapshot, text: &str, may_serve: impl Fn(u32) -> bool) -> Decision {
    let prompt = chat(&[("user", text)]);
    let mut cx = context(pool);
    cx.request.prompt = Some(&prompt);
    let mut candidates = candidates(pool);
    candidates.retain(|c| may_serve(c.state.endpoint.id.0));
    let mut ranking = Ranking::new(1);
    strategy.rank(&cx, &candidates, &mut for_request(0, 0), &mut ranking);
    let decision = ranking.decide().unwrap();
    // P3
    candidates.reverse();
    let mut again = Ranking::new(1);
    strategy.rank(&cx, &candidates, &mut for_request(9, 9), &mut again);
    assert_eq!(again.decide().unwrap().picks[0].id, decision.picks[0].id);
    decision
}

/// A pool whose requests are counted here.
struct Fleet {
    strategy: Box<dyn Strategy>,
    requests: Vec<u32>,
}

impl Fleet {
    fn new(parameters: serde_json::Value, n: usize) -> Self {
        Self { strategy: (PLUGIN.build)(&parameters, &Registry::default()).unwrap(), requests: vec![0; n] }
    }

    fn decide(&self, text: &str, requests: &[u32]) -> (usize, bool) {
        let decision = decide(&*self.strategy, &pool(requests), text, |_| true);
        (decision.picks[0].id.0 as usize, decision.diverted)
    }

    fn home(&self, text: &str) -> usize {
        self.decide(text, &vec![0; self.requests.len()]).0
    }

    fn send(&mut self, text: &str) -> (usize, bool) {
        let (to, diverted) = self.decide(text, &self.requests);
        self.requests[to] += 1;
        (to, diverted)
    }

    /// Share of requests that leave their home, with `in_flight` random ones in flight, drawn from 2,000 keys.
    fn spill(&mut self, in_flight: usize) -> f64 {
        let mut rng = for_request(11, 0);
        let homes: Vec<usize> = (0..2_000).map(|k| self.home(&format!("k{k}"))).collect();
        let mut running: Vec<usize> = Vec::new();
        let (mut away, rounds) = (0, 2_000 + in_flight);
        for round in 0..rounds {
            if running.len() >= in_flight {
                let ended = running.swap_remove(rng.random_range(0..running.len()));
                self.requests[ended] -= 1;
            }
            let key = rng.random_range(0..homes.len());
            let (to, _) = self.send(&format!("k{key}"));
            away += u32::from(round >= in_flight && to != homes[key]);
            running.push(to);
        }
        f64::from(away) / (rounds - in_flight) as f64
    }
}

fn compat() -> serde_json::Value {
    serde_json::json!({"compat": true})
}

/// Neutree's first defect: below n / loadFactor requests no endpoint has capacity, so all of a hot prompt stays on
/// its home.
#[test]
fn hot_prompt_on_an_idle_pool_spreads() {
    let busiest = |parameters| {
        let mut fleet = Fleet::new(parameters, 16);
        for _ in 0..16 {
            fleet.send("hot");
        }
        (*fleet.requests.iter().max().unwrap(), fleet.requests.iter().filter(|r| **r == 0).count())
    };
    assert_eq!(busiest(compat()), (12, 11), "neutree 2.3: one endpoint gets 12 of 16, eleven get none");
    let (most, idle) = busiest(serde_json::Value::Null);
    assert!(most <= 4 && idle <= 11, "{most} on one, {idle} idle");
}

/// Neutree's second defect: at a mean of 1, 2 or 3 requests the only free slot wins, and nearly every request leaves
/// its home.
#[test]
fn affinity_holds_where_the_mean_load_is_an_integer() {
    for in_flight in [16, 48] {
        let (theirs, ours) =
            (Fleet::new(compat(), 16).spill(in_flight), Fleet::new(serde_json::Value::Null, 16).spill(in_flight));
        assert!(theirs > 0.85, "neutree 3.4, {in_flight} in flight: {theirs}");
        assert!(ours < 0.05, "{in_flight} in flight: {ours}");
    }
    // A ceiling without a margin is not enough.
    let ceiling = Fleet::new(serde_json::json!({"margin": 0}), 16).spill(16);
    assert!((0.15..0.35).contains(&ceiling), "3.4, ceil with c=1.25 at a mean of 1: {ceiling}");
}

/// If fewer endpoints may serve than the pool has, Neutree divides by all of them.
#[test]
fn mean_is_over_the_endpoints_that_may_serve() {
    // Two of eight may serve, with 8 requests each; the other six have none.
    let pool = pool(&[8, 8, 0, 0, 0, 0, 0, 0]);
    for (parameters, wanted) in [(serde_json::Value::Null, false), (compat(), true)] {
        let strategy = (PLUGIN.build)(&parameters, &Registry::default()).unwrap();
        let decision = decide(&*strategy, &pool, "x", |id| id < 2);
        assert_eq!(decision.reason.ends_with("every endpoint is at its bound"), wanted);
    }
}

proptest! {
    /// P1, P2, P3 and P5: some endpoint that may serve has capacity, and the pick has no more than the bound.
    #[test]
    fn bound_holds_after_a_request_is_added(
        requests in prop::collection::vec(0u32..60, 1..24), text in "[a-z]{0,4}", factor in 1.0f64..3.0,
        margin in 0.0f64..4.0,
        filter in any::<u32>(),
    ) {
        let parameters = serde_json::json!({"loadFactor": factor, "margin": margin});
        let strategy = (PLUGIN.build)(&parameters, &Registry::default()).unwrap();
        let may_serve = |id: u32| filter >> id & 1 == 0;
        let those: Vec<u32> = requests.iter().zip(0..).filter(|(_, id)| may_serve(*id)).map(|(r, _)| *r).collect();
        prop_assume!(!those.is_empty());
        let decision = decide(&*strategy, &pool(&requests), &text, may_serve);
        prop_assert!(!decision.reason.ends_with("every endpoint is at its bound"));
        let mean = f64::from(those.iter().sum::<u32>() + 1) / those.len() as f64;
        let bound = (factor * mean).ceil().max((mean + margin * mean.sqrt()).floor() + 1.0);
        let after = requests[decision.picks[0].id.0 as usize] + 1;
        prop_assert!(f64::from(after) <= bound, "{} above {}", after, bound);
    }
}

#[test]
fn diverted_request_is_reported_and_one_without_a_key_goes_by_load() {
    let fleet = Fleet::new(serde_json::Value::Null, 4);
    let home = fleet.home("x");
    assert_eq!(fleet.decide("x", &[0; 4]), (home, false));
    let mut requests = [0; 4];
    requests[home] = 9;
    let (to, diverted) = fleet.decide("x", &requests);
    assert!(to != home && diverted);
    let mut ranking = Ranking::new(4);
    let pool = pool(&[3, 2, 1, 0]);
    fleet.strategy.rank(&context(&pool), &candidates(&pool), &mut for_request(0, 0), &mut ranking);
    let decision = ranking.decide().unwrap();
    assert_eq!(decision.lacking, Some(Signal::Prompt));
    assert_eq!(decision.picks.iter().map(|e| e.id.0).collect::<Vec<_>>(), [3, 2, 1, 0]);
}

#[test]
fn keys_spread_over_the_pool() {
    let fleet = Fleet::new(serde_json::Value::Null, 8);
    let mut counts = BTreeMap::<usize, u32>::new();
    for i in 0..2_000 {
        *counts.entry(fleet.home(&format!("prompt {i}"))).or_default() += 1;
    }
    assert!(counts.len() == 8 && counts.values().all(|n| (150..400).contains(n)), "{counts:?}");
}

#[test]
fn parameters_are_checked() {
    for (bad, word) in [
        (r#"{"virtualNodes": 0}"#, "1 to 4096"),
        (r#"{"virtualNodes": 5000}"#, "1 to 4096"),
        (r#"{"loadFactor": 0.9}"#, "at least 1"),
        (r#"{"margin": -1}"#, "at least 0"),
        (r#"{"virtual_nodes": 0}"#, "`virtual_nodes` is 0; 1 to 4096"),
        (r#"{"virtual_nodes_per_replica": 0}"#, "`virtual_nodes_per_replica` is 0; 1 to 4096"),
        (r#"{"virtualNodesPerReplica": 5000}"#, "`virtualNodesPerReplica` is 5000"),
        (r#"{"load_factor": 0.5}"#, "`load_factor` is 0.5; at least 1"),
        (r#"{"virtual_nodes_per_replica": "many"}"#, "`virtual_nodes_per_replica` must be a whole number"),
        (r#"{"load_factor": "high"}"#, "`load_factor` must be a number"),
        (r#"{"max_user_messages_for_cache": -1}"#, "`max_user_messages_for_cache` must be a whole number"),
        (r#"{"virtual_nodes": 3, "virtualNodes": 3}"#, "another name of `virtualNodes`, and both are given"),
        (r#"{"nodes": 3}"#, "nodes"),
    ] {
        let error = (PLUGIN.build)(&serde_json::from_str(bad).unwrap(), &Registry::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{bad}: {error}");
    }
}

/// Neutree's name or spelling of the parameters selects Neutree's rule; `margin` and `compat` override that.
#[test]
fn neutrees_parameters_select_neutrees_rule() {
    for (parameters, compat) in [
        (r#"{}"#, false),
        (r#"{"loadFactor": 1.25}"#, false),
        (r#"{"load_factor": 1.25}"#, true),
        (r#"{"virtual_nodes_per_replica": 100}"#, true),
        (r#"{"virtual_nodes": 100}"#, true),
        (r#"{"max_user_messages_for_cache": 2}"#, true),
        (r#"{"load_factor": 1.25, "margin": 2}"#, false),
        (r#"{"load_factor": 1.25, "compat": false}"#, false),
    ] {
        let value: Value = serde_json::from_str(parameters).unwrap();
        assert_eq!(params_of(&value, is_neutrees(&value)).unwrap().compat, compat, "{parameters}");
    }
    assert!(params_of(&Value::Null, true).unwrap().compat);
    let all = serde_json::json!({"virtual_nodes_per_replica": 7, "load_factor": 2, "max_user_messages_for_cache": 5});
    let read = params_of(&all, true).unwrap();
    assert_eq!((read.virtual_nodes, read.load_factor, read.max_user_messages_for_cache), (7, 2.0, 5));
}

/// "neutree 2.2": without messages the key is the whole payload, so another temperature gives another key; here only
/// with `compat`.
#[test]
fn payload_without_messages_is_the_key_in_compat() {
    let bare = Prompt { pieces: vec![Piece::Text("once upon".into())], count: 1, ..Prompt::default() };
    let keys = |parameters: &str, payloads: [&str; 2]| {
        let value: Value = serde_json::from_str(parameters).unwrap();
        let strategy = params_of(&value, false).unwrap().build();
        let [a, b] = payloads.map(|payload| strategy.key(&bare, Some(payload.as_bytes())));
        a == b
    };
    let other = [r#"{"prompt": "once upon"}"#, r#"{"prompt": "once upon", "temperature": 1}"#];
    assert!(keys("{}", other) && !keys(r#"{"compat": true}"#, other));
    assert!(keys(r#"{"compat": true}"#, [other[0]; 2]));
}
