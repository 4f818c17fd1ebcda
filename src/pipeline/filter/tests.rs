//! Each filter's rows, named after their source.

use crate::tests::{filter, registry, scorer};
use attache_pool::EndpointMetrics;
use attache_scheduling::testing::{TestServer, among, answer, load, reports, running, silent};
use serde_json::{Value, json};

/// Positions of the servers that stay.
fn kept(name: &str, parameters: Value, servers: Vec<TestServer>) -> Vec<usize> {
    among(servers).kept(&*filter(name, &parameters))
}

/// The error for these parameters.
fn refused(name: &str, parameters: Value) -> String {
    (registry().plugin(name).unwrap().build)(&parameters).unwrap_err().to_string()
}

fn labelled(values: &[&str]) -> Vec<TestServer> {
    let server = |value: &&str| if value.is_empty() { silent() } else { silent().label("role", value) };
    values.iter().map(server).collect()
}

#[test]
fn label_selectors() {
    let servers = || labelled(&["a", "b", "", "a"]);
    for (parameters, expected) in [
        (json!({}), vec![0, 1, 2, 3]),
        (json!({"matchLabels": {"role": "a"}}), vec![0, 3]),
        (json!({"matchLabels": {"role": "a", "other": "x"}}), vec![]),
        (json!({"matchExpressions": [{"key": "role", "operator": "In", "values": ["b", "c"]}]}), vec![1]),
        (json!({"matchExpressions": [{"key": "role", "operator": "NotIn", "values": ["a"]}]}), vec![1, 2]),
        (json!({"matchExpressions": [{"key": "role", "operator": "Exists"}]}), vec![0, 1, 3]),
        (json!({"matchExpressions": [{"key": "role", "operator": "DoesNotExist"}]}), vec![2]),
        (
            json!({"matchLabels": {"role": "a"}, "matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}),
            vec![0, 3],
        ),
        // llm-d by-label.
        (json!({"label": "role", "validValues": ["b"]}), vec![1]),
        (json!({"label": "role", "validValues": ["b"], "allowsNoLabel": true}), vec![1, 2]),
        (json!({"label": "role", "allowsNoLabel": true}), vec![2]),
    ] {
        assert_eq!(kept("label-selector-filter", parameters.clone(), servers()), expected, "{parameters}");
    }
    assert_eq!(registry().plugin("by-label-selector").unwrap().name, "label-selector-filter");
    for (parameters, says) in [
        (json!({"matchExpressions": [{"key": "role", "operator": "In"}]}), "at least one"),
        (json!({"matchExpressions": [{"key": "role", "operator": "Exists", "values": ["a"]}]}), "none are allowed"),
        (json!({"matchExpressions": [{"key": "role", "operator": "Has"}]}), "Has"),
        (json!({"label": "role"}), "validValues"),
        (json!({"validValues": ["a"]}), "`label` is missing"),
    ] {
        let error = refused("by-label", parameters.clone());
        assert!(error.contains(says), "{parameters}: {error}");
    }
}

#[test]
fn roles() {
    let all =
        ["encode", "prefill", "decode", "encode-prefill", "encode-decode", "prefill-decode", "encode-prefill-decode"];
    let servers = || {
        let known = all.iter().map(|role| silent().label("llm-d.ai/role", role));
        known
            .chain([silent().label("llm-d.ai/role", "both"), silent(), silent().label("llm-d.ai/role", "cook")])
            .collect()
    };
    assert_eq!(kept("encode-filter", Value::Null, servers()), [0, 3, 4, 6]);
    assert_eq!(kept("prefill-filter", Value::Null, servers()), [1, 3, 5, 6, 7]);
    assert_eq!(kept("decode-filter", Value::Null, servers()), [2, 4, 5, 6, 7, 8]);
}

#[test]
fn prefix_cache_affinity() {
    let name = "prefix-cache-affinity-filter";
    // 159,280 tokens in flight take 10 s at 15,928 tokens/s.
    for (row, parameters, servers, expected) in [
        ("llm-d: sticky", json!({}), vec![silent().holding(80), silent().holding(79)], vec![0]),
        ("llm-d: none sticky", json!({}), vec![silent().holding(79), silent()], vec![0, 1]),
        ("llm-d: busy, within the penalty", json!({}), vec![silent().holding(90).sent(&[159_280]), silent()], vec![0]),
        ("llm-d: load override", json!({}), vec![silent().holding(90).sent(&[159_280, 159_280]), silent()], vec![0, 1]),
        (
            "llm-d: only the best of each side counts",
            json!({}),
            vec![silent().holding(90).sent(&[900_000]), silent().holding(99), silent().sent(&[5])],
            vec![0, 1],
        ),
        (
            "GIE: 5 s",
            json!({"maxTTFTPenaltyMs": 5000}),
            vec![silent().holding(90).sent(&[159_280]), silent()],
            vec![0, 1],
        ),
        (
            "llm-d: 0 is always stick",
            json!({"maxTTFTPenaltyMs": 0}),
            vec![silent().holding(90).sent(&[900_000]), silent()],
            vec![0],
        ),
        (
            "llm-d: own throughput",
            json!({"peakPrefillThroughput": 1000, "maxTTFTPenaltyMs": 100}),
            vec![silent().holding(90).sent(&[101]), silent()],
            vec![0, 1],
        ),
        (
            "llm-d: tokens within the penalty",
            json!({"maxTTFTPenaltyMs": 0, "maxTokensInFlightPenalty": 1000}),
            vec![silent().holding(90).sent(&[1_050]), silent().sent(&[50])],
            vec![0],
        ),
        (
            "llm-d: tokens above the penalty",
            json!({"maxTTFTPenaltyMs": 0, "maxTokensInFlightPenalty": 100}),
            vec![silent().holding(90).sent(&[500]), silent().sent(&[50])],
            vec![0, 1],
        ),
        ("llm-d: explores", json!({"explorationProbability": 1}), vec![silent().holding(90), silent()], vec![0, 1]),
        ("llm-d: threshold", json!({"affinityThreshold": 0.3}), vec![silent().holding(30), silent()], vec![0]),
        (
            "llm-d: missing signal",
            json!({"ttftSource": "latencyPredictor"}),
            vec![silent().holding(90), silent()],
            vec![0, 1],
        ),
        ("one candidate", json!({}), vec![silent()], vec![0]),
    ] {
        assert_eq!(kept(name, parameters, servers), expected, "{row}");
    }
    let exploring = filter(name, &json!({"explorationProbability": 0.25}));
    let trial = among(vec![silent().holding(90), silent()]);
    let explored = (0..4_000).filter(|seed| trial.kept_by_draw(&*exploring, *seed).len() == 2).count();
    assert!((900..1_100).contains(&explored), "{explored}");
    for (parameters, says) in [
        (json!({"affinityThreshold": 1.1}), "0 to 1"),
        (json!({"explorationProbability": -0.1}), "explorationProbability"),
        (json!({"maxTTFTPenaltyMs": -1}), "maxTTFTPenaltyMs"),
        (json!({"maxTokensInFlightPenalty": -1}), "maxTokensInFlightPenalty"),
        (json!({"peakPrefillThroughput": 0}), "above 0"),
        (json!({"ttftSource": "guess"}), "latencyPredictor"),
    ] {
        assert!(refused(name, parameters.clone()).contains(says), "{parameters}");
    }
}

#[test]
fn sessions_by_token() {
    let by_token = filter("session-affinity-filter", &Value::Null);
    let servers = || vec![silent().named("pod-a"), silent().named("pod-b")];
    // base64 of `default/pod-b`, `pod-b`, `default/pod-c`.
    for (token, expected) in [
        (Some("ZGVmYXVsdC9wb2QtYg=="), vec![1]),
        (Some("cG9kLWI="), vec![1]),
        (Some("ZGVmYXVsdC9wb2QtYw=="), vec![0, 1]),
        (Some("not base64!"), vec![0, 1]),
        (Some(""), vec![0, 1]),
        (None, vec![0, 1]),
    ] {
        let trial = among(servers());
        let trial = token.into_iter().fold(trial, |t, token| t.header("x-session-token", token));
        assert_eq!(trial.kept(&*by_token), expected, "llm-d encoded_endpoint_header {token:?}");
    }
    let trial = among(servers());
    let told = answer(|headers| by_token.response_headers(trial.endpoint(1), headers));
    assert_eq!(told, ["x-session-token: cG9kLWI="], "what it says is what it reads");
    let other = filter("session-affinity-filter", &json!({"encodedEndpointHeaderConfig": {"header": "X-Mine"}}));
    assert_eq!(answer(|headers| other.response_headers(trial.endpoint(0), headers)), ["x-mine: cG9kLWE="]);
}

#[test]
fn sessions_by_id() {
    let parameters = json!({
        "strategy": "session_id",
        "sessionIdConfig": {
            "sources": [{"header": "x-a"}, {"header": "x-b"}], "evictionTtlSeconds": 1, "evictionSweepSeconds": 10,
        },
    });
    let by_id = filter("session-affinity-filter", &parameters);
    let new = |id: &str| among(vec![silent(), silent(), silent()]).header("x-b", id);
    let one = new("one");
    assert_eq!(one.kept(&*by_id), [0, 1, 2], "llm-d: an unbound session has no preference");
    by_id.picked(&one.context(), one.endpoint(2));
    assert_eq!(one.kept(&*by_id), [2], "llm-d: bound");
    assert_eq!(new("two").kept(&*by_id), [0, 1, 2], "other sessions are free");
    assert_eq!(new("two").header("x-a", "one").kept(&*by_id), [2], "llm-d: the first source that is there counts");
    let gone = among(vec![silent(), silent()]).header("x-b", "one");
    assert_eq!(gone.kept(&*by_id), [0, 1], "llm-d: a session whose server is absent passes through");
    by_id.picked(&gone.context(), gone.endpoint(0));
    assert_eq!(one.kept(&*by_id), [0], "llm-d: and is bound anew");
    let later = |ms: u64| new("one").later(ms);
    assert_eq!((later(1_000).kept(&*by_id), later(1_001).kept(&*by_id)), (vec![0], vec![0, 1, 2]), "llm-d: expires");
    by_id.picked(&later(900).context(), one.endpoint(0));
    assert_eq!(later(1_800).kept(&*by_id), [0], "each request renews it");
    by_id.end_session(Some("tenant"), "one");
    by_id.end_session(None, "two");
    assert_eq!(later(1_800).kept(&*by_id), [0], "another tenant's session and another session have ended");
    by_id.end_session(None, "one");
    assert_eq!(later(1_800).kept(&*by_id), [0, 1, 2], "the session has ended");
    assert!(answer(|headers| by_id.response_headers(one.endpoint(0), headers)).is_empty());
    assert_eq!(among(vec![silent(), silent()]).kept(&*by_id), [0, 1], "no session at all");
    for (parameters, says) in [
        (json!({"strategy": "sticky"}), "sticky"),
        (json!({"strategy": "session_id", "sessionIdConfig": {"evictionTtlSeconds": 0}}), "evictionTtlSeconds"),
        (json!({"strategy": "session_id", "sessionIdConfig": {"sources": [{"attribute": "agent"}]}}), "header"),
        (json!({"encodedEndpointHeaderConfig": {"header": "a b"}}), "`a b`"),
    ] {
        let error = refused("session-affinity-filter", parameters.clone());
        assert!(error.contains(says), "{parameters}: {error}");
    }
}

#[test]
fn endpoint_attributes() {
    let parameters = |operator: &str, more: Value| {
        let mut all = json!({
            "attribute": "num_requests_waiting",
            "algorithm": {"type": "threshold", "threshold": {"operator": operator, "value": 5}},
        });
        all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        all
    };
    let servers = || vec![load(4, 0.0), load(5, 0.0), load(6, 0.0), silent()];
    for (operator, more, expected) in [
        ("LessThan", json!({}), vec![0, 3]),
        ("LessThanOrEqual", json!({}), vec![0, 1, 3]),
        ("GreaterThan", json!({}), vec![2, 3]),
        ("GreaterThanOrEqual", json!({"onMissing": "Pass"}), vec![1, 2, 3]),
        ("Equal", json!({"onMissing": "Fail"}), vec![1]),
        ("NotEqual", json!({"onMissing": "Fail"}), vec![0, 2]),
    ] {
        assert_eq!(kept("endpoint-attribute-filter", parameters(operator, more), servers()), expected, "{operator}");
    }
    let none = || vec![load(9, 0.0), load(8, 0.0)];
    for (fallback, expected) in [(false, vec![]), (true, vec![0, 1])] {
        let parameters = parameters("LessThan", json!({"fallbackOnEmpty": fallback}));
        assert_eq!(kept("endpoint-attribute-filter", parameters, none()), expected);
    }
    for (parameters, says) in [
        (json!({}), "`attribute` is missing"),
        (json!({"attribute": "waiting-queue"}), "`algorithm` is missing"),
        (parameters("Equal", json!({"attribute": "waiting-queues"})), "did you mean `waiting-queue`?"),
        (parameters("Below", json!({})), "Below"),
    ] {
        let error = refused("endpoint-attribute-filter", parameters.clone());
        assert!(error.contains(says), "{parameters}: {error}");
    }
}

#[test]
fn topology() {
    let at = |host: &str, rack: &str, zone: &str| {
        silent()
            .label("kubernetes.io/hostname", host)
            .label("topology.kubernetes.io/rack", rack)
            .label("topology.kubernetes.io/zone", zone)
    };
    let servers = || vec![at("h1", "r1", "z1"), at("h2", "r1", "z1"), at("h3", "r3", "z1"), at("", "", ""), silent()];
    let name = "topology-affinity-filter";
    for (least, peer, expected) in [
        ("host", "host=h2,rack=r1,zone=z1", vec![1]),
        ("rack", "host=h2,rack=r1,zone=z1", vec![0, 1]),
        ("zone", "host=h2, rack=r1, zone=z1", vec![0, 1, 2]),
        ("zone", "host=h2", vec![1]),
        ("host", "host=h9,zone=z1", vec![0, 1, 2, 3, 4]),
        ("host", "host=", vec![0, 1, 2, 3, 4]),
        ("host", "nonsense", vec![0, 1, 2, 3, 4]),
    ] {
        let filter = filter(name, &json!({"minAffinity": least, "peerTopologyHeader": "x-peer-topology"}));
        let trial = among(servers()).header("x-peer-topology", peer);
        assert_eq!(trial.kept(&*filter), expected, "llm-d {least} {peer}");
    }
    let unset = among(servers()).header("x-peer-topology", "host=h2");
    assert_eq!(unset.kept(&*filter(name, &Value::Null)), [0, 1, 2, 3, 4], "without the parameter, no header counts");
    let own = filter(name, &json!({"peerTopologyHeader": "x-peer", "labels": {"hostname": "slice"}}));
    let trial = among(vec![silent().label("slice", "0"), silent().label("slice", "1")]).header("x-peer", "host=1");
    assert_eq!(trial.kept(&*own), [1]);
    assert!(refused(name, json!({"minAffinity": "room"})).contains("room"));
}

#[test]
fn utilization() {
    let busy = || vec![load(3, 0.5).sent(&[1, 1]), load(4, 0.9), running(7), silent().sent(&[1, 1, 1])];
    for (metric, most, expected) in [
        ("active-requests", 2.0, vec![0, 1, 2]),
        ("running-requests", 6.0, vec![0, 1, 3]),
        ("waiting-queue", 3.0, vec![0, 2, 3]),
        ("kv-cache-utilization", 0.5, vec![0, 2, 3]),
    ] {
        let parameters = json!({"conditions": [{"metric": metric, "maxValue": most}]});
        assert_eq!(kept("utilization-filter", parameters, busy()), expected, "llm-d {metric}");
    }
    let both = json!({"conditions": [
        {"metric": "waiting-queue", "maxValue": 3}, {"metric": "active-requests", "maxValue": 1},
    ]});
    assert_eq!(kept("utilization-filter", both, busy()), [2]);
    for (fallback, expected) in [(false, vec![]), (true, vec![0, 1])] {
        let parameters =
            json!({"conditions": [{"metric": "waiting-queue", "maxValue": 0}], "fallbackOnEmpty": fallback});
        assert_eq!(kept("utilization-filter", parameters, vec![load(1, 0.0), load(2, 0.0)]), expected);
    }
    for (parameters, says) in [
        (json!({}), "at least one"),
        (json!({"conditions": [{"metric": "kv", "maxValue": 1}]}), "kv-cache-utilization"),
        (json!({"conditions": [{"metric": "kv-cache-utilization", "maxValue": 80}]}), "0 to 1"),
        (json!({"conditions": [{"metric": "waiting-queue"}]}), "maxValue"),
        (json!({"conditions": [{"metric": "waiting-queue", "maxValue": -1}]}), "at least 0"),
    ] {
        let error = refused("utilization-filter", parameters.clone());
        assert!(error.contains(says), "{parameters}: {error}");
    }
}

#[test]
fn header_based_testing() {
    for (header, expected) in [
        (Some("10.0.0.1"), vec![0, 1]),
        (Some("10.0.0.1:8001"), vec![1]),
        (Some(" 10.0.0.1:8001 , 10.0.0.1:8000"), vec![0, 1]),
        (Some("10.0.0.2"), vec![]),
        (Some(""), vec![]),
        (None, vec![]),
    ] {
        let trial = among(vec![silent(), silent()]);
        let trial = header.into_iter().fold(trial, |t, v| t.header("test-epp-endpoint-selection", v));
        assert_eq!(trial.kept(&*filter("header-based-testing-filter", &Value::Null)), expected, "GIE {header:?}");
    }
}

#[test]
fn utilization_detector_as_a_filter() {
    let parameters = || json!({"queueDepthThreshold": 5, "kvCacheUtilThreshold": 0.8, "headroom": 0.2});
    for (row, servers, expected) in [
        ("GIE: limits 6 and .96", vec![load(6, 0.1), load(1, 0.96), load(7, 0.1), load(1, 0.97)], vec![0, 1]),
        ("GIE: stale and silent ones go", vec![load(0, 0.1), load(0, 0.1).aged(2_001), silent()], vec![0]),
        ("GIE: all stale", vec![load(0, 0.1).aged(3_000), silent()], vec![0, 1]),
        ("GIE: all saturated", vec![load(70, 0.1), load(0, 0.99)], vec![0, 1]),
    ] {
        assert_eq!(kept("utilization-detector", parameters(), servers), expected, "{row}");
    }
    let brim = json!({"kvCacheUtilThreshold": 0.9, "headroom": 0.5});
    assert_eq!(kept("utilization-detector", brim, vec![load(0, 1.0), load(8, 0.0)]), [0], "a full cache is the limit");
    let whole = json!({"kvCacheUtilThreshold": 1});
    assert_eq!(kept("utilization-detector", whole, vec![load(0, 1.0), load(8, 0.0)]), [0], "as the originals allow");
    for (parameters, says) in [
        (json!({"queueDepthThreshold": 0}), "at least 1"),
        (json!({"kvCacheUtilThreshold": 1.01}), "above 0 and at most 1"),
        (json!({"headroom": -0.1}), "at least 0"),
        (json!({"metricsStalenessThreshold": "soon"}), "duration"),
        (json!({"metricsStalenessThreshold": "0"}), "above 0"),
    ] {
        let error = refused("utilization-detector", parameters.clone());
        assert!(error.contains(says), "{parameters}: {error}");
    }
}

#[test]
fn concurrency() {
    let sent = |requests: &[u32]| silent().sent(requests);
    for (row, parameters, servers, expected) in [
        ("llm-d: below", json!({"maxConcurrency": 2}), vec![sent(&[1]), sent(&[1, 1])], vec![0]),
        ("llm-d: headroom", json!({"maxConcurrency": 2, "headroom": 0.5}), vec![sent(&[1, 1]), sent(&[1; 3])], vec![0]),
        ("llm-d: floor", json!({"maxConcurrency": 1, "headroom": 0.9}), vec![sent(&[]), sent(&[1])], vec![0]),
        ("GIE: none left", json!({"maxConcurrency": 1}), vec![sent(&[1]), sent(&[1])], vec![0, 1]),
        (
            "llm-d: tokens",
            json!({"concurrencyMode": "tokens", "maxTokenConcurrency": 100}),
            vec![sent(&[99]), sent(&[50, 50]), sent(&[1; 101])],
            vec![0],
        ),
        (
            "llm-d: hybrid",
            json!({"concurrencyMode": "hybrid", "maxConcurrency": 3, "maxTokenConcurrency": 100}),
            vec![sent(&[1, 1]), sent(&[1; 3]), sent(&[100])],
            vec![0],
        ),
    ] {
        assert_eq!(kept("concurrency-detector", parameters, servers), expected, "{row}");
    }
    for (parameters, says) in [
        (json!({"maxConcurrency": 0}), "maxConcurrency"),
        (json!({"maxTokenConcurrency": 0}), "maxTokenConcurrency"),
        (json!({"headroom": -1}), "at least 0"),
        (json!({"concurrencyMode": "vibes"}), "vibes"),
    ] {
        assert!(refused("concurrency-detector", parameters.clone()).contains(says), "{parameters}");
    }
}

#[test]
fn context_lengths() {
    let label = "llm-d.ai/context-length-range";
    let servers = || {
        let ranges = ["0-100", "100-500", "0-2000", "0-100-200", "abc-100", "200-50", "-5"];
        ranges.iter().map(|range| silent().label(label, range)).chain([silent()]).collect()
    };
    let with = |tokens| among(servers()).long(tokens);
    let filters = filter("context-length-aware", &json!({"enableFiltering": true}));
    assert_eq!(with(0).kept(&*filters), [0, 2, 7], "llm-d filter: an empty prompt");
    assert_eq!(with(100).kept(&*filters), [0, 1, 2, 7], "both ends belong to a range");
    let passes = filter("context-length-aware", &Value::Null);
    assert_eq!(with(9_000).kept(&*passes), [0, 1, 2, 3, 4, 5, 6, 7], "llm-d: off by default");

    let scores = |tokens: u32, ranges: &[&str]| {
        let servers = ranges.iter().map(|range| silent().label(label, range)).collect();
        among(servers).long(tokens).scores(&*scorer("context-length-aware", &Value::Null))
    };
    let got = scores(0, &["0-20", "0-10000", "500-1000", "x", "0-0"]);
    let expected = [0.3 + 0.7 * (0.7 / 1.002 + 0.3), 0.3 + 0.7 * (0.35 + 0.3), 0.2, 0.0, 1.0];
    assert!(got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-6), "llm-d score: {got:?}");
    assert_eq!(with(50).scores(&*scorer("context-length-aware", &Value::Null))[7], 0.5, "llm-d: no label");
    let ascending = |got: Vec<f32>| got.windows(2).all(|pair| pair[0] < pair[1]);
    assert!(ascending(scores(9_000, &["0-2048", "0-8192"])), "llm-d: above its range, the longer wins");
    assert!(ascending(scores(50, &["500-2048", "100-1024"])), "llm-d: below its range, the nearer wins");
    assert!(ascending(scores(14_999, &["15001-20000", "0-15000"])), "llm-d: in range beats out of range");
    assert!(refused("context-length-aware", json!({"label": ""})).contains("label"));
}

#[test]
fn filters_report_the_missing_signal() {
    use attache_scheduling::Signal;
    let fresh = || vec![reports(EndpointMetrics::default()), silent()];
    for (name, servers, expected) in [
        ("utilization-detector", fresh(), None),
        ("utilization-detector", vec![silent(), load(0, 0.0).aged(4_000)], Some(Signal::Metrics)),
        ("prefix-cache-affinity-filter", fresh(), Some(Signal::Prefix)),
        ("slo-headroom-tier-filter", fresh(), Some(Signal::Latency)),
        ("decode-filter", vec![silent()], None),
    ] {
        let trial = among(servers);
        assert_eq!(filter(name, &Value::Null).lacks(&trial.context(), &trial.candidates()), expected, "{name}");
    }
}
