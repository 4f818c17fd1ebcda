//! AIBrix's tables, row by row from its tests, and the rules between them.

use super::score::{BalanceWeights, DecodeLoads, DecodePolicy, PrefillPolicy};
use super::*;
use attache_pool::{EndpointMetrics, Means, Rates};
use attache_scheduling::Registry;
use attache_scheduling::split::{Decider, SplitPolicy};
use attache_scheduling::testing::{Sent, TestServer, Trial, among, reports, silent};
use attache_types::rng::for_request;
use serde_json::{Value, json};
use std::collections::BTreeSet;

fn pd(parameters: Value) -> Pd {
    Pd(params(&parameters).unwrap())
}

fn sent(trial: &Trial, parameters: Value, seed: u64) -> Option<Sent> {
    let policy = SplitPolicy {
        decider: Decider::Predicted,
        together: vec!["roleset-name".into()],
        whole: true,
        required: false,
    };
    trial.pair(&pd(parameters), &policy, 2, seed)
}

/// All pairs over many draws.
fn pairs(trial: &Trial, parameters: &Value) -> BTreeSet<(u32, u32)> {
    (0..40).filter_map(|seed| sent(trial, parameters.clone(), seed)?.first()).collect()
}

/// A server with running requests, tokens per second, KV cache usage and requests finished per second.
fn busy(running: u32, throughput: Option<f64>, kv_usage: f32, finished: Option<f64>) -> TestServer {
    let rates = Rates { generation_tokens: throughput, finished, ..Rates::default() };
    reports(EndpointMetrics { running, kv_usage, rates, ..EndpointMetrics::default() })
}

fn of(server: TestServer, role: &str, set: &str) -> TestServer {
    server.label("role-name", role).label("roleset-name", set)
}

fn requests(running: u32) -> TestServer {
    busy(running, None, 0.0, None)
}

#[test]
fn prefill_imbalance() {
    for (counts, expected) in [
        (&[5, 5, 5][..], &[][..]),
        (&[10, 15, 20], &[]),
        (&[5, 40, 45], &[0]),
        (&[2, 2, 50, 45], &[0, 1]),
        (&[0, 50], &[0]),
        (&[], &[]),
        (&[7], &[]),
        (&[0, 16], &[]),
        (&[0, 17], &[0]),
    ] {
        let trial = among(counts.iter().map(|n| requests(*n)).collect());
        let candidates = trial.candidates();
        let pd = pd(Value::Null);
        let picked: BTreeSet<u32> = (0..40)
            .filter_map(|seed| pd.idle_prefill(&candidates, &mut for_request(seed, 0)))
            .map(|c| c.state.endpoint.id.0)
            .collect();
        assert_eq!(picked.into_iter().collect::<Vec<_>>(), expected, "AIBrix prefill imbalance {counts:?}");
    }
}

#[test]
fn decode_imbalance() {
    let tokens = |throughput| busy(5, Some(throughput), 0.5, None);
    let drains = |running, rate| busy(running, None, 0.5, rate);
    for (case, servers, expected) in [
        ("balanced", vec![busy(5, Some(100.0), 0.5, None), busy(7, Some(120.0), 0.6, None)], None),
        ("requests", vec![requests(2), requests(40), requests(35)], Some(0)),
        ("requests differ by 16", vec![requests(20), requests(4)], Some(1)),
        ("requests differ by 15", vec![requests(19), requests(4)], None),
        ("throughput", vec![tokens(50.0), tokens(3_000.0)], Some(0)),
        ("throughput differs by 2048", vec![tokens(0.0), tokens(2_048.0)], None),
        ("drain", vec![drains(8, Some(2.0)), drains(6, Some(0.3))], Some(0)),
        ("drain below the ratio", vec![drains(8, Some(2.0)), drains(6, Some(1.5))], None),
        ("a drain rate is missing", vec![drains(8, Some(2.0)), drains(6, None)], None),
        ("a drain rate is 0", vec![drains(8, Some(2.0)), drains(6, Some(0.0))], None),
        ("nothing to do", vec![drains(0, Some(2.0)), drains(6, Some(0.3))], None),
        ("a server without metrics is not idle", vec![silent(), requests(17), requests(17)], None),
        ("one alone", vec![requests(90)], None),
    ] {
        let trial = among(servers);
        let candidates = trial.candidates();
        let found = pd(Value::Null).idle_decode(&candidates, &DecodeLoads::of(&candidates), &mut for_request(1, 0));
        assert_eq!(found.map(|(c, _)| c.state.endpoint.id.0), expected, "AIBrix decode imbalance: {case}");
    }
}

fn decode_scores(policy: DecodePolicy, servers: Vec<TestServer>) -> Vec<f64> {
    let trial = among(servers);
    let candidates = trial.candidates();
    let weights = BalanceWeights { running: 1.0, throughput: 1.0 };
    policy.scores(&candidates, &DecodeLoads::of(&candidates), weights).to_vec()
}

fn close(got: &[f64], expected: &[f64], case: &str) {
    assert_eq!(got.len(), expected.len(), "{case}");
    assert!(got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-6), "{case}: {got:?}, not {expected:?}");
}

#[test]
fn decode_policies() {
    let server = |running, throughput, free: f32| busy(running, Some(throughput), 1.0 - free / 100.0, None);
    close(&decode_scores(DecodePolicy::LeastRequest, vec![requests(3), requests(7)]), &[3.0, 7.0], "least_request");
    for (case, of, expected) in [
        ("4 requests, 50 tokens/s, 5 % free", server(4, 50.0, 5.0), 37.5),
        ("2 requests, no tokens", server(2, 0.0, 50.0), 30.0),
        ("no requests, 50 tokens/s", server(0, 50.0, 50.0), 40.0),
    ] {
        close(&decode_scores(DecodePolicy::Conductor, vec![of]), &[expected], case);
    }
    // Of 5 and 10 requests, 100 and 50 tokens/s, 50 and 25 % free.
    let two = || vec![server(5, 100.0, 50.0), server(10, 50.0, 25.0)];
    close(&decode_scores(DecodePolicy::LoadBalancing, two()), &[0.5, 3.0], "load_balancing");
    // A full cache counts as 0.1 % free; an unreported one as empty.
    let full = vec![busy(1, None, 1.0, None), requests(1)];
    close(&decode_scores(DecodePolicy::LoadBalancing, full), &[2_000.0, 2.0], "load_balancing, full");
    // Without metrics: 1 plus the requests in flight from this replica.
    let cold = vec![silent().sent(&[10, 10]), requests(3)];
    close(&decode_scores(DecodePolicy::LeastRequest, cold), &[3.0, 3.0], "a cold pod beside a warm one");
    let all_cold = vec![silent().sent(&[10, 10]), silent()];
    close(&decode_scores(DecodePolicy::LeastRequest, all_cold), &[2.0, 0.0], "all are cold");
}

#[test]
fn prefill_policies() {
    let measured = |running, seconds| {
        let means = Means { prefill_seconds: seconds, ..Means::default() };
        reports(EndpointMetrics { running, rates: Rates { means, ..Rates::default() }, ..EndpointMetrics::default() })
    };
    let score = |policy: PrefillPolicy, server, tokens| {
        let trial = among(vec![server]).long(tokens);
        policy.score(&trial.context(), &trial.candidates()[0], 4.0)
    };
    for (case, policy, server, tokens, expected) in [
        ("queue 3, mean 2 ms, 4 unmatched", PrefillPolicy::Conductor, measured(3, Some(0.002)), 4, 11.008),
        ("empty prompt", PrefillPolicy::Conductor, measured(3, Some(0.002)), 0, 6.0),
        ("all matched", PrefillPolicy::Conductor, measured(0, Some(0.002)).holding(100), 100, 1.5),
        ("no mean: that of 512 tokens", PrefillPolicy::Conductor, measured(1, None), 0, 0.001 * 512f64.powf(1.5) + 5.0),
        ("half held, 2 of 4 requests", PrefillPolicy::PrefixCache, measured(2, None).holding(50), 100, 5.5),
        ("nothing held", PrefillPolicy::PrefixCache, measured(0, None), 100, 10.0),
        ("requests", PrefillPolicy::LeastRequest, measured(3, None).holding(100), 100, 3.0),
    ] {
        close(&[score(policy, server, tokens)], &[expected], case);
    }
}

#[test]
fn servers_pair_within_a_roleset() {
    let two_sets = |a: [u32; 2], b: [u32; 2]| {
        among(vec![
            of(requests(a[0]), "prefill", "a"),
            of(requests(a[1]), "decode", "a"),
            of(requests(b[0]), "prefill", "b"),
            of(requests(b[1]), "decode", "b"),
        ])
    };
    for (case, a, b, expected) in [
        ("both better in a", [0, 0], [4, 4], &[(0, 1)][..]),
        ("both better in b", [4, 4], [0, 0], &[(2, 3)]),
        ("equal", [1, 1], [1, 1], &[(0, 1), (2, 3)]),
        ("prefill of b stands out", [20, 0], [0, 15], &[(2, 3)]),
        ("decode of b stands out", [0, 20], [15, 0], &[(2, 3)]),
        ("prefill of a, decode of b stand out", [0, 20], [20, 0], &[(0, 1)]),
    ] {
        let got = pairs(&two_sets(a, b), &json!({"prefillScorePolicy": "least_request"}));
        assert_eq!(got.into_iter().collect::<Vec<_>>(), expected, "{case}");
    }
    let incomplete = among(vec![of(requests(0), "prefill", "a"), of(requests(0), "decode", "b")]);
    assert!(sent(&incomplete, Value::Null, 0).unwrap().pair.is_none(), "AIBrix refuses; here one server does it all");
    let without_partner =
        among(vec![of(requests(9), "prefill", "a"), of(requests(9), "decode", "a"), of(requests(0), "decode", "b")]);
    assert_eq!(sent(&without_partner, Value::Null, 0).unwrap().first(), Some((0, 1)), "roleset b is not eligible");
    let second_machine =
        of(requests(0), "prefill", "a").label("stormservice.orchestration.aibrix.ai/pod-group-index", "1");
    let trial = among(vec![of(requests(9), "prefill", "a"), of(requests(9), "decode", "a"), second_machine]);
    assert_eq!(sent(&trial, Value::Null, 0).unwrap().ids(), (vec![0], vec![1]), "only the first machine speaks HTTP");
}

#[test]
fn cached_prefix_outweighs_load_until_load_is_far_higher() {
    let trial = |holder| {
        among(vec![
            of(requests(holder), "prefill", "a").holding(50),
            of(requests(1), "prefill", "a"),
            of(requests(1), "prefill", "a"),
            of(requests(0), "decode", "a"),
        ])
    };
    let policy = |factor: f64| json!({"standardDeviationFactor": factor});
    assert_eq!(pairs(&trial(3), &policy(2.0)), [(0, 3)].into());
    assert_eq!(pairs(&trial(3), &policy(1.0)), [(1, 3), (2, 3)].into(), "3 > 5/3 + 1.15");
    let least = json!({"prefillScorePolicy": "least_request"});
    assert_eq!(pairs(&trial(3), &least), [(1, 3), (2, 3)].into());
    let tries = sent(&trial(3), policy(2.0), 0).unwrap().ids().0;
    assert_eq!((tries[0], tries.len()), (0, 3), "the others are for retries");
}

#[test]
fn every_request_with_a_pair_is_split() {
    let trial = among(vec![of(requests(900), "prefill", "a"), of(requests(0), "decode", "a").holding(100)]);
    let got = sent(&trial, json!({"prefillLoadImbalanceMinSpread": 1000}), 0).unwrap();
    assert_eq!((got.split, got.ids()), (true, (vec![0], vec![1])));
}

fn lengths(server: TestServer, least: &str, most: &str) -> TestServer {
    server.label("promptLenBucketMinLength", least).label("promptLenBucketMaxLength", most)
}

#[test]
fn prompt_length_buckets() {
    let bucketing = || json!({"promptLengthBucketing": true, "promptLengthUnit": "tokens"});
    for (least, most, tokens, fits) in [
        ("10", "50", 10, true),
        ("10", "50", 30, true),
        ("10", "50", 50, true),
        ("10", "50", 9, false),
        ("10", "50", 51, false),
        ("50", "10", 30, false),
        ("10", "0", 1_000_000, true),
        ("0", "0", 1, true),
    ] {
        let trial = among(vec![
            lengths(of(silent(), "prefill", "a"), least, most),
            lengths(of(silent(), "decode", "a"), least, most),
        ]);
        let got = sent(&trial.long(tokens), bucketing(), 0);
        assert_eq!(got.is_some_and(|s| s.split), fits, "AIBrix bucket {least}..{most}, {tokens}");
    }
    let unset = among(vec![of(silent(), "prefill", "a"), of(silent(), "decode", "a")]);
    assert!(sent(&unset, bucketing(), 0).unwrap().split, "AIBrix: unset fits");
    let off = among(vec![lengths(of(silent(), "prefill", "a"), "1", "2"), of(silent(), "decode", "a")]);
    assert!(sent(&off, Value::Null, 0).unwrap().split, "without bucketing, lengths say nothing");
    // Lengths in bytes, four per token.
    let bytes = |tokens| {
        let trial = among(vec![lengths(of(silent(), "prefill", "a"), "0", "50"), of(silent(), "decode", "a")]);
        sent(&trial.long(tokens), json!({"promptLengthBucketing": true}), 0).is_some()
    };
    assert_eq!((bytes(12), bytes(13)), (true, false));
    // Each length has its roleset, whatever the load.
    let two = |tokens| {
        let set = |set: &str, running, least, most| {
            [("prefill", set), ("decode", set)]
                .map(|(role, set)| lengths(of(requests(running), role, set), least, most))
        };
        let servers = set("short", 30, "0", "1000").into_iter().chain(set("long", 0, "1001", "0"));
        sent(&among(servers.collect()).long(tokens), bucketing(), 0).unwrap().first()
    };
    assert_eq!((two(1_000), two(1_001)), (Some((0, 1)), Some((2, 3))));
}

#[test]
fn combined_servers() {
    let parameters = || json!({"promptLengthBucketing": true, "promptLengthUnit": "tokens"});
    let pressed = |waiting, role: &str| {
        let rates = Rates { finished: Some(1.0), ..Rates::default() };
        of(reports(EndpointMetrics { waiting, rates, ..EndpointMetrics::default() }), role, "a")
    };
    let combined = |waiting| pressed(waiting, "combined").label("combined", "true");
    for (case, prefill, decode, all_in_one, whole) in [
        ("AIBrix: prefill score 2.0 and combined 0", 2, 0, 0, true),
        ("AIBrix: combined 2.0", 2, 0, 2, false),
        ("decode score 2.0 and combined 0", 0, 2, 0, true),
        ("none above 1.0", 1, 1, 0, false),
    ] {
        let trial = among(vec![pressed(prefill, "prefill"), pressed(decode, "decode"), combined(all_in_one)]);
        let got = sent(&trial, parameters(), 0).unwrap();
        assert_eq!((got.split, got.whole.picks[0].id.0 == 2), (!whole, whole), "{case}");
        assert!(sent(&trial, Value::Null, 0).unwrap().split, "{case}, without bucketing");
    }
    let unknown = among(vec![of(silent(), "prefill", "a"), of(silent(), "decode", "a"), combined(0)]);
    assert!(sent(&unknown, parameters(), 0).unwrap().split, "a server without metrics has no pressure");
    let narrow = |labelled: bool| {
        let one = of(silent(), "combined", "a");
        let one = if labelled { one.label("combined", "true") } else { one.label("promptLenBucketMaxLength", "1") };
        among(vec![
            lengths(of(silent(), "prefill", "a"), "1", "2"),
            lengths(of(silent(), "decode", "a"), "1", "2"),
            one,
        ])
    };
    let got = sent(&narrow(true), parameters(), 0).unwrap();
    assert_eq!((got.split, got.whole.picks[0].id.0), (false, 2), "AIBrix: no bucket, a combined pod");
    assert!(sent(&narrow(false), parameters(), 0).is_none(), "AIBrix: no bucket, no combined pod, no endpoint");
    let trial = narrow(false);
    let mut ranking = Ranking::new(1);
    pd(parameters()).rank(&trial.context(), &trial.there_for(Roles::DECODE), &mut for_request(0, 0), &mut ranking);
    assert_eq!(ranking.emptied_by(), Some("promptLengthBucketing"));
}

#[test]
fn pd_alone_ranks_decode_servers() {
    let trial = among(vec![requests(5), requests(1), requests(3)]);
    let ids = |parameters: Value| {
        let mut ranking = Ranking::new(3);
        pd(parameters).rank(&trial.context(), &trial.candidates(), &mut for_request(0, 0), &mut ranking);
        ranking.decide().unwrap().picks.iter().map(|e| e.id.0).collect::<Vec<_>>()
    };
    assert_eq!(ids(Value::Null), [1, 2, 0]);
    assert_eq!(ids(json!({"decodeScorePolicy": "least_request", "decodeLoadImbalanceMinSpread": 1})), [1, 2, 0]);
}

#[test]
fn parameters() {
    for good in [
        json!({"prefillScorePolicy": "conductor", "decodeScorePolicy": "conductor"}),
        json!({"decodeLBWeightRunning": 0, "decodeLBWeightThroughput": 2.5, "standardDeviationFactor": 0}),
        json!({"decodeThroughputImbalanceMinSpread": 100, "decodeScoreRatioThreshold": 2}),
    ] {
        assert!((PLUGIN.build)(&good, &Registry::default()).is_ok(), "{good}");
    }
    for (bad, word) in [
        (json!({"prefillScorePolicy": "token_load"}), "token_load"),
        (json!({"decodeScorePolicy": "random"}), "random"),
        (json!({"decodeScoreRatioThreshold": -1}), "decodeScoreRatioThreshold"),
        (json!({"decodeLBWeightRunning": -0.5}), "decodeLBWeightRunning"),
        (json!({"promptLengthUnit": "words"}), "words"),
    ] {
        let error = (PLUGIN.build)(&bad, &Registry::default()).unwrap_err();
        assert!(error.to_string().contains(word), "{bad}: {error}");
    }
}

#[test]
fn compat_pairs_only_servers_with_the_role_label() {
    let compat = json!({"compat": true});
    let unlabelled = || busy(0, None, 0.0, None).label("roleset-name", "a");
    let servers = |with_prefill: bool, with_decode: bool| {
        let mut servers = vec![unlabelled(), of(requests(0), "worker", "a")];
        servers.extend(with_prefill.then(|| of(requests(0), "prefill", "a")));
        servers.extend(with_decode.then(|| of(requests(9), "decode", "a")));
        among(servers)
    };
    assert_eq!(pairs(&servers(true, true), &compat), [(2, 3)].into());
    for (prefill, decode) in [(false, true), (true, false)] {
        assert!(sent(&servers(prefill, decode), compat.clone(), 1).is_none(), "{prefill} {decode}: 503 in AIBrix");
        assert!(
            sent(&servers(prefill, decode), Value::Null, 1).is_some(),
            "{prefill} {decode}: served whole by default"
        );
    }
}

#[test]
fn compat_draws_the_decode_server() {
    let servers = || {
        among(vec![
            of(requests(0), "prefill", "a"),
            of(requests(0), "decode", "a"),
            of(requests(90), "decode", "a"),
            of(requests(40), "decode", "a"),
        ])
    };
    assert_eq!(pairs(&servers(), &json!({"compat": true})), [(0, 1), (0, 2), (0, 3)].into());
    assert_eq!(pairs(&servers(), &Value::Null), [(0, 1)].into(), "the default scores");
}
