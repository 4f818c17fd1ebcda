//! AIBrix's cases of session affinity.

use super::*;
use attache_scheduling::Registry;
use attache_scheduling::plugin::Headers;
use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_types::rng::for_request;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

const LOADS: [(u32, u32); 3] = [(1, 5), (2, 9), (3, 2)];

fn headers(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
}

/// All picks, and the best by `scores`, of requests with these headers.
fn route(sent: &[(&str, &str)], loads: &[(u32, u32)], reversed: bool) -> (Vec<u32>, BTreeSet<u32>) {
    route_by(&Value::Null, sent, loads, reversed)
}

fn route_by(params: &Value, sent: &[(&str, &str)], loads: &[(u32, u32)], reversed: bool) -> (Vec<u32>, BTreeSet<u32>) {
    let strategy = (PLUGIN.build)(params, &Registry::default()).unwrap();
    let (pool, sent) = (snapshot(loads), headers(sent));
    let mut cx = context(&pool);
    cx.request.headers = Headers::of(&sent);
    let mut candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    if reversed {
        candidates.reverse();
    }
    let mut ranking = Ranking::new(3);
    strategy.rank(&cx, &candidates, &mut for_request(1, 0), &mut ranking);
    let mut scores = vec![f64::NAN; candidates.len()];
    assert_eq!(strategy.scores(&cx, &candidates, &mut scores), Some(Better::Higher));
    let best = candidates.iter().zip(&scores).filter(|(_, s)| **s == 1.0).map(|(c, _)| c.state.endpoint.id.0).collect();
    let decision = ranking.decide().unwrap();
    assert_eq!(decision.lacking, None, "a first turn is no defect");
    (decision.picks.iter().map(|e| e.id.0).collect(), best)
}

fn id(address: &str) -> String {
    BASE64_STANDARD.encode(address)
}

#[test]
fn session_returns_to_its_endpoint() {
    let back = id("10.0.0.1:8002");
    let (picks, best) = route(&[("x-session-id", &back)], &LOADS, false);
    assert_eq!((picks, best), (vec![2, 3, 1], [2].into()), "aibrix 10.10: it, then the fewest requests");
    assert_eq!(route(&[("x-session-id", &format!(" {back} "))], &LOADS, false).0[0], 2);
}

#[test]
fn invalid_session_id_is_ignored() {
    let long = "A".repeat(4_096);
    let gone = id("10.0.0.9:8000");
    for (row, value) in [
        ("aibrix 10.10 none", ""),
        ("aibrix 10.10 invalid", "%%%INVALID"),
        ("aibrix 10.10 unknown", gone.as_str()),
        ("too long", long.as_str()),
        ("no address", "AAAA"),
        ("plain", "10.0.0.1:8002"),
    ] {
        let (picks, best) = route(&[("x-session-id", value)], &LOADS, false);
        assert_eq!((picks, best.len()), (vec![3, 1, 2], 0), "{row}: the fewest requests");
    }
    assert_eq!(route(&[], &LOADS, true).0, [3, 1, 2]);
}

#[test]
fn key_selects_one_endpoint_in_any_order_of_candidates() {
    let key = ("x-aibrix-session-key", "agent-session-42");
    let (picks, best) = route(&[key], &LOADS, false);
    assert_eq!(route(&[key], &LOADS, true), (picks.clone(), best.clone()), "aibrix 10.10");
    assert_eq!(best, [picks[0]].into());
    assert_eq!(picks.len(), 3);
    let other_loads: Vec<(u32, u32)> = LOADS.iter().map(|(id, load)| (*id, 100 - load)).collect();
    assert_eq!(route(&[key], &other_loads, false).0, picks, "load carries no meaning");
    let cookie = ("x-session-id", &*id("10.0.0.1:8003"));
    assert_eq!(route(&[key, cookie], &LOADS, false).0[0], 3, "aibrix 10.10: the id beats the key");
    let invalid = ("x-session-id", "%%%INVALID");
    assert_eq!(route(&[key, invalid], &LOADS, false).0, picks);
    for length in [0, 257] {
        let (_, best) = route(&[("x-aibrix-session-key", &"k".repeat(length))], &LOADS, false);
        assert_eq!(best.len(), 0, "aibrix 10.10: a key of {length} bytes is none");
    }
    assert_eq!(route(&[("x-aibrix-session-key", &"k".repeat(256))], &LOADS, false).1.len(), 1);
}

/// An endpoint that leaves moves only its own sessions. AIBrix's hash concentrates sessions; with the mixing step
/// they spread evenly.
#[test]
fn key_moves_only_when_its_endpoint_leaves_and_sessions_spread_evenly() {
    let all: Vec<(u32, u32)> = (0..10).map(|id| (id, 0)).collect();
    for (compat, allowed) in [(false, 70..=130), (true, 50..=300)] {
        let params = serde_json::json!({"compat": compat});
        let mut counts = [0_u32; 10];
        for key in 0..1_000 {
            let key = format!("session {key}");
            let sent = [("x-aibrix-session-key", &*key)];
            let before = route_by(&params, &sent, &all, false).0;
            counts[before[0] as usize] += 1;
            let after = route_by(&params, &sent, &all[..9], false).0;
            assert_eq!(after[0], if before[0] == 9 { before[1] } else { before[0] }, "{key}");
        }
        assert!(counts.iter().all(|n| allowed.contains(n)), "{compat}: {counts:?}");
        assert_eq!(counts.iter().any(|n| *n > 200), compat, "{counts:?}");
    }
}

/// Published test values of FNV-1a.
#[test]
fn hash_is_fnv_1a() {
    // The key and the zero byte come first, so the empty key hashes "\0a".
    let plain = |bytes: &[u8]| {
        bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x0000_0100_0000_01b3))
    };
    assert_eq!(plain(b"foobar"), 0x8594_4171_f739_67e8);
    assert_eq!(fnv_1a("foo", "bar"), plain(b"foo\0bar"));
}

#[test]
fn response_names_the_endpoint_and_not_the_key() {
    let strategy = (PLUGIN.build)(&Value::Null, &Registry::default()).unwrap();
    let pool = snapshot(&LOADS);
    let mut out = Vec::new();
    strategy.response_headers(&pool.endpoints[1].endpoint, &mut out);
    assert_eq!(out, [("x-session-id".into(), id("10.0.0.1:8002"))], "aibrix 10.10");
    assert!((PLUGIN.build)(&serde_json::json!({"keyHeader": "no header"}), &Registry::default()).is_err());
}
