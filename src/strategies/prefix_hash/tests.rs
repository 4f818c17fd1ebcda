use super::*;
use crate::chwbl::tests::chat;
use attache_pool::{Endpoint, EndpointMetrics, EndpointSpec, EndpointState, PoolSnapshot};
use attache_scheduling::testing::{NOW, STALE_AFTER, context};
use attache_scheduling::{Decision, Registry};
use attache_types::ids::EndpointId;
use attache_types::rng::for_request;
use std::sync::Arc;

/// A pool of endpoints with these names and requests.
fn pool(names: &[&str], requests: &[u32]) -> PoolSnapshot {
    let state = |(id, (name, requests)): (u16, (&&str, &u32))| {
        let spec = EndpointSpec { name: (*name).into(), ..EndpointSpec::at(([10, 0, 0, 1], 8000 + id).into()) };
        let metrics = EndpointMetrics { scraped_at: NOW, waiting: *requests, ..EndpointMetrics::default() };
        let endpoint = Arc::new(Endpoint::new(EndpointId(id.into()), spec));
        EndpointState::new(endpoint, Some(Arc::new(metrics)))
    };
    PoolSnapshot::new(1, true, (0u16..).zip(names.iter().zip(requests)).map(state).collect())
}

fn build(parameters: serde_json::Value) -> PrefixHash {
    params::<Params>(&parameters).unwrap().build()
}

/// The decision of `strategy` for a prompt with this text when the first `n` endpoints may serve it.
fn decide(strategy: &PrefixHash, pool: &PoolSnapshot, text: &str, n: usize) -> Decision {
    let prompt = chat(&[("user", text)]);
    let mut cx = context(pool);
    cx.request.prompt = Some(&prompt);
    let candidates: Vec<_> = pool.endpoints.iter().map(|s| Candidate::new(s, NOW, STALE_AFTER, 0)).take(n).collect();
    let mut ranking = Ranking::new(1);
    strategy.rank(&cx, &candidates, &mut for_request(0, 0), &mut ranking);
    ranking.decide().unwrap()
}

/// A prompt whose home is the endpoint at `home`.
fn prompt_of(strategy: &PrefixHash, pool: &PoolSnapshot, home: u32) -> String {
    (0..).map(|i| format!("p{i}")).find(|text| decide(strategy, pool, text, usize::MAX).picks[0].id.0 == home).unwrap()
}

/// "kubeai 3.1 [T]": factor 150 %, one point per endpoint, 10 requests on each.
#[test]
fn load_rule_is_kubeais() {
    for compat in [false, true] {
        let strategy = build(serde_json::json!({"meanLoadFactor": 150, "replication": 1, "compat": compat}));
        let idle = pool(&["A", "B"], &[0, 0]);
        let (to_a, to_b) = (prompt_of(&strategy, &idle, 0), prompt_of(&strategy, &idle, 1));
        let mut requests = [10, 10];
        let mut send = |text: &str, times: usize| {
            let went: Vec<usize> = (0..times)
                .map(|_| {
                    let to = decide(&strategy, &pool(&["A", "B"], &requests), text, 2).picks[0].id.0 as usize;
                    requests[to] += 1;
                    to
                })
                .collect();
            (went, requests)
        };
        assert_eq!(send(&to_a, 1), (vec![0], [11, 10]));
        assert_eq!(send(&to_a, 20), (vec![0; 20], [31, 10]));
        assert_eq!(send(&to_a, 4), (vec![0, 0, 0, 1], [34, 11]));
        assert_eq!(send(&to_b, 20), (vec![1; 20], [34, 31]));
    }
}

#[test]
fn key_is_the_adapter_and_the_start_of_the_first_user_message() {
    let strategy = build(serde_json::json!({"prefixCharLength": 3}));
    let theirs = build(serde_json::json!({"prefixCharLength": 3, "compat": true}));
    let key = |prompt: &Prompt<'_>| (strategy.key("m", prompt), theirs.key("m", prompt));
    let of = |text: &str| Some(xxh64(text.as_bytes(), 0));
    let bare = |piece| Prompt { pieces: vec![piece], count: 1, ..Prompt::default() };
    let parts = Prompt {
        pieces: vec![Piece::Role("user".into()), Piece::Text("a".into()), Piece::Text("bcd".into())],
        ..Prompt::default()
    };
    for (name, prompt, wanted) in [
        ("first user", chat(&[("system", "S"), ("user", "abcd"), ("user", "x")]), "mabc"),
        ("runes, not bytes", chat(&[("user", "äöüß")]), "mäöü"),
        ("shorter", chat(&[("user", "ab")]), "mab"),
        ("parts", parts, "mabc"),
        ("completions", bare(Piece::Text("abcd".into())), "mabc"),
    ] {
        assert_eq!(key(&prompt), (of(wanted), of(wanted)), "kubeai 3.1 {name}");
    }
    let ids = bare(Piece::Tokens(vec![7, 8]));
    let (ours, theirs) = key(&ids);
    assert_eq!(theirs, of("m"), "kubeai 3.1 token arrays: all share one key");
    assert!(ours.is_some() && ours != key(&bare(Piece::Tokens(vec![9, 8]))).0);
    assert_eq!(key(&chat(&[("system", "S")])), (None, of("m")), "kubeai 3.1 no user message: all share one key");
}

/// "kubeai 3.1": without a separator, `pod-1` + `11` is the point of `pod-11` + `1`.
#[test]
fn names_that_end_in_digits_share_no_points() {
    let points = |compat| {
        let strategy = build(serde_json::json!({"compat": compat}));
        let ring = strategy.ring.of(&pool(&["pod-1", "pod-11"], &[0, 0]));
        ring.distinct_points()
    };
    assert_eq!(points(false), 512);
    // 1, 10 to 19, 100 to 199 of `pod-1` but for the last two digits' range of `pod-11`.
    assert!(points(true) < 512 - 10, "{}", points(true));
}

/// "kubeai 3.1 n = all endpoints even when the adapter filter leaves fewer": 2 of 8 may serve and have all the load.
#[test]
fn mean_is_over_the_endpoints_that_may_serve() {
    let pool = pool(&["a", "b", "c", "d", "e", "f", "g", "h"], &[8, 8, 0, 0, 0, 0, 0, 0]);
    for (compat, nobody) in [(false, false), (true, true)] {
        let strategy = build(serde_json::json!({"compat": compat}));
        assert_eq!(decide(&strategy, &pool, "x", 2).reason.ends_with("every endpoint is at its bound"), nobody);
    }
}

#[test]
fn parameters_are_checked() {
    for (bad, word) in [
        (r#"{"meanLoadFactor": 99}"#, "at least 100"),
        (r#"{"replication": 0}"#, "1 to 4096"),
        (r#"{"prefixCharLength": 0}"#, "at least 1"),
        (r#"{"prefixLength": 3}"#, "prefixLength"),
    ] {
        let error = (PLUGIN.build)(&serde_json::from_str(bad).unwrap(), &Registry::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{bad}: {error}");
    }
}
