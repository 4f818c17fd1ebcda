use super::*;
use attache_prefix::cache::Found;
use attache_scheduling::Decision;
use attache_scheduling::Registry;
use attache_scheduling::candidates::Cached;
use attache_scheduling::testing::prefix_cache;
use attache_scheduling::testing::{NOW, STALE_AFTER, context, snapshot};
use attache_types::rng::for_request;

/// Result of a lookup in an empty index.
pub(crate) fn nothing_found() -> Found {
    prefix_cache().lookup(&mut &[][..], NOW)
}

/// The decision for endpoints with these requests and cached percentages of the prompt.
fn decide(parameters: serde_json::Value, requests: &[u32], percent: &[u32], seed: u64) -> Decision {
    let strategy = (PLUGIN.build)(&parameters, &Registry::default()).unwrap();
    let pool = snapshot(&(0..).zip(requests.iter().copied()).collect::<Vec<_>>());
    let found = nothing_found();
    let mut cx = context(&pool);
    cx.request.prompt_tokens = 100;
    cx.prefix = Some(&found);
    let hold = |(s, percent): (_, &u32)| Candidate {
        cached: Cached { any: *percent, ..Cached::default() },
        ..Candidate::new(s, NOW, STALE_AFTER, 0)
    };
    let candidates: Vec<_> = pool.endpoints.iter().zip(percent).map(hold).collect();
    let mut ranking = Ranking::new(requests.len());
    strategy.rank(&cx, &candidates, &mut for_request(seed, 0), &mut ranking);
    ranking.decide().unwrap()
}

#[test]
fn rule_is_sglangs() {
    // Name, requests, percent cached, picked endpoint, whether load diverted the request from a holder.
    type Row = (&'static str, &'static [u32], &'static [u32], u32, bool);
    let rows: [Row; 8] = [
        ("held more", &[9, 0], &[60, 40], 0, false),
        ("at the threshold", &[9, 0], &[30, 0], 1, false),
        ("above the threshold", &[9, 0], &[31, 0], 0, false),
        ("equal holders: load", &[9, 3, 0], &[50, 50, 0], 1, false),
        ("64 more is balanced", &[64, 0], &[100, 0], 0, false),
        ("65 more is not", &[65, 0], &[100, 0], 1, true),
        ("imbalanced by number, not by ratio", &[200, 135], &[100, 0], 0, false),
        ("imbalanced, but the holder has the fewest", &[0, 100], &[100, 0], 0, false),
    ];
    for (name, requests, percent, wanted, diverted) in rows {
        let decision = decide(serde_json::Value::Null, requests, percent, 0);
        assert_eq!((decision.picks[0].id.0, decision.diverted), (wanted, diverted), "sglang 3.3 {name}");
        assert_eq!(decision.picks.len(), requests.len(), "the rest are fallbacks");
        assert_eq!(decision.lacking, None);
    }
    let strict = serde_json::json!({"cacheThreshold": 0.5, "balanceAbsThreshold": 32, "balanceRelThreshold": 1.1});
    assert_eq!(decide(strict.clone(), &[9, 0], &[50, 0], 0).picks[0].id.0, 1);
    assert_eq!(decide(strict, &[33, 0], &[90, 0], 0).picks[0].id.0, 1);
}

#[test]
fn ties_are_random_and_a_missing_index_is_reported() {
    let firsts: std::collections::BTreeSet<u32> =
        (0..50).map(|seed| decide(serde_json::Value::Null, &[1, 1, 1], &[80, 80, 80], seed).picks[0].id.0).collect();
    assert_eq!(firsts.len(), 3);
    let pool = snapshot(&[(0, 1), (1, 0)]);
    let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).collect();
    let mut ranking = Ranking::new(1);
    let strategy = (PLUGIN.build)(&serde_json::Value::Null, &Registry::default()).unwrap();
    strategy.rank(&context(&pool), &candidates, &mut for_request(0, 0), &mut ranking);
    let decision = ranking.decide().unwrap();
    assert_eq!((decision.picks[0].id.0, decision.lacking), (1, Some(Signal::Prefix)));
}

#[test]
fn parameters_are_checked() {
    for (bad, word) in [
        (r#"{"cacheThreshold": 1.1}"#, "0 to 1"),
        (r#"{"balanceRelThreshold": 0.9}"#, "at least 1"),
        (r#"{"cache_threshold": 0.3}"#, "cache_threshold"),
    ] {
        let error = (PLUGIN.build)(&serde_json::from_str(bad).unwrap(), &Registry::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{bad}: {error}");
    }
}
