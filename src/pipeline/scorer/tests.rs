//! Each scorer's rows, from the references' own unit tests, and rules for all scorers.

use crate::tests::{least_parameters, registry, scorer};
use attache_pool::EndpointMetrics;
use attache_prefix::cache::Found;
use attache_prefix::key::BlockKey;
use attache_protocol::{MediaKind, Piece, Prompt};
use attache_scheduling::testing::NOW;
use attache_scheduling::testing::{
    TestServer, Trial, among, answer, load, lora, prefix_cache, reports, running, silent,
};
use attache_scheduling::{PickContext, Signal};
use attache_types::ids::EndpointId;
use proptest::prelude::*;
use serde_json::{Value, json};

fn scores(name: &str, parameters: &Value, servers: Vec<TestServer>) -> Vec<f32> {
    among(servers).scores(&*scorer(name, parameters))
}

fn refused(name: &str, parameters: Value) -> String {
    (registry().plugin(name).unwrap().build)(&parameters).unwrap_err().to_string()
}

fn waiting(waiting: u32) -> TestServer {
    load(waiting, 0.0)
}

fn sent(requests: usize) -> TestServer {
    silent().sent(&vec![0; requests])
}

/// Source, scorer, parameters, servers, scores.
type Row = (&'static str, &'static str, Value, Vec<TestServer>, &'static [f32]);

fn assert_rows(rows: Vec<Row>) {
    for (source, name, parameters, servers, expected) in rows {
        let got = scores(name, &parameters, servers);
        let near = got.len() == expected.len() && got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-6);
        assert!(near, "{source} {name}: {got:?}, not {expected:?}");
    }
}

#[test]
fn load_from_scraped_metrics() {
    let none = || Value::Null;
    assert_rows(vec![
        ("GIE", "queue-scorer", none(), vec![waiting(10), waiting(5), waiting(0)], &[0.0, 0.5, 1.0]),
        ("GIE", "queue-scorer", none(), vec![waiting(5), waiting(5)], &[1.0, 1.0]),
        ("GIE", "queue-scorer", none(), vec![waiting(0), waiting(0)], &[1.0, 1.0]),
        ("without metrics", "queue-scorer", none(), vec![waiting(4), silent(), sent(2)], &[0.0, 1.0, 0.5]),
        ("GIE", "running-requests-size-scorer", none(), vec![running(10), running(5), running(0)], &[0.0, 0.5, 1.0]),
        ("GIE", "running-requests-size-scorer", none(), vec![running(5), running(5)], &[1.0, 1.0]),
        ("without metrics", "running-requests-size-scorer", none(), vec![running(4), sent(1)], &[0.0, 1.0]),
        ("GIE", "kv-cache-utilization-scorer", none(), vec![load(0, 0.25), load(0, 1.0), silent()], &[0.75, 0.0, 0.0]),
        (
            "llm-d",
            "load-aware-scorer",
            none(),
            vec![waiting(0), waiting(64), waiting(128), waiting(500)],
            &[0.5, 0.25, 0.0, 0.0],
        ),
        (
            "llm-d",
            "load-aware-scorer",
            json!({"threshold": 10}),
            vec![waiting(2), waiting(9), silent()],
            &[0.4, 0.05, 0.5],
        ),
    ]);
    assert!(refused("load-aware-scorer", json!({"threshold": 0})).contains("at least 1"));
}

#[test]
fn load_from_own_requests() {
    let tokens = |tokens: &[u32]| silent().holding(100).sent(tokens);
    assert_rows(vec![
        ("llm-d", "active-request-scorer", json!({}), vec![sent(0), sent(2), sent(4)], &[1.0, 0.5, 0.0]),
        ("llm-d all idle", "active-request-scorer", json!({}), vec![sent(0), sent(0)], &[1.0, 1.0]),
        ("llm-d all busy", "active-request-scorer", json!({}), vec![sent(3), sent(3)], &[0.0, 0.0]),
        (
            "llm-d idle",
            "active-request-scorer",
            json!({"idleThreshold": 2}),
            vec![sent(2), sent(3), sent(4)],
            &[1.0, 0.25, 0.0],
        ),
        (
            "llm-d gap",
            "active-request-scorer",
            json!({"maxBusyScore": 0.5}),
            vec![sent(0), sent(1), sent(2)],
            &[1.0, 0.25, 0.0],
        ),
        ("llm-d none busy", "active-request-scorer", json!({"maxBusyScore": 0}), vec![sent(0), sent(1)], &[1.0, 0.0]),
        (
            "GIE threshold 1000",
            "token-load-scorer",
            json!({"queueThresholdTokens": 1000}),
            vec![tokens(&[]), tokens(&[500]), tokens(&[600, 400]), tokens(&[5000])],
            &[1.0, 0.5, 0.0, 0.0],
        ),
        (
            "llm-d look-ahead",
            "token-load-scorer",
            json!({"queueThresholdTokens": 1000}),
            vec![silent(), silent().holding(60), silent().sent(&[400])],
            &[0.9, 0.96, 0.5],
        ),
    ]);
    assert!(refused("active-request-scorer", json!({"maxBusyScore": 1.5})).contains("0 to 1"));
    assert!(refused("token-load-scorer", json!({"queueThresholdTokens": 0})).contains("at least 1"));
}

#[test]
fn caches_and_adapters() {
    let none = || Value::Null;
    let holds = |tokens| silent().holding(tokens);
    assert_rows(vec![
        ("GIE 5/10, 2/10", "prefix-cache-scorer", none(), vec![holds(50), holds(20), holds(0)], &[0.5, 0.2, 0.0]),
        (
            "llm-d",
            "precise-prefix-cache-scorer",
            json!({"kvEventsConfig": {"topicFilter": "kv@"}}),
            vec![holds(50)],
            &[0.5],
        ),
        (
            "llm-d length 50/100 of scale 100",
            "prefix-cache-scorer",
            json!({"matchLengthWeight": 0.4, "matchLengthScaleTokens": 100, "prefixMatchInfoProducerName": "x"}),
            vec![holds(50), holds(100)],
            &[0.4 * 0.25 + 0.6 * 0.5, 1.0],
        ),
        ("GIE active", "lora-affinity-scorer", none(), vec![lora(&["A"], &[], 2)], &[1.0]),
        ("GIE waiting, full", "lora-affinity-scorer", none(), vec![lora(&["B", "C"], &["A"], 2)], &[0.6]),
        ("GIE full", "lora-affinity-scorer", none(), vec![lora(&["B"], &["C"], 2)], &[0.0]),
        (
            "an adapter that runs and waits has one slot",
            "lora-affinity-scorer",
            none(),
            vec![
                lora(&["B"], &["B"], 2),
                lora(&["C", "B"], &["C", "B"], 2),
                lora(&["B"], &["B"], 1),
                lora(&[], &["B"], 1),
                lora(&["C", "B"], &["D", "B"], 4),
            ],
            &[0.8, 0.0, 0.0, 0.0, 0.8],
        ),
        ("GIE max 0", "lora-affinity-scorer", none(), vec![lora(&[], &[], 0), silent()], &[0.0, 0.0]),
        (
            "GIE mixed",
            "lora-affinity-scorer",
            none(),
            vec![
                lora(&["A"], &[], 5),
                lora(&["1", "2", "3", "4"], &["A"], 6),
                lora(&["1"], &[], 2),
                lora(&["1"], &["A"], 2),
                lora(&["1", "2"], &[], 2),
            ],
            &[1.0, 0.8, 0.8, 0.6, 0.0],
        ),
    ]);
    assert!(refused("prefix-cache-scorer", json!({"matchLengthWeight": 2})).contains("0 to 1"));
    assert!(refused("prefix-cache-scorer", json!({"matchLengthScaleTokens": 0})).contains("at least 1"));
}

#[test]
fn topology_and_labels() {
    let at = |host: &str, rack: &str, zone: &str, region: &str| {
        silent()
            .label("kubernetes.io/hostname", host)
            .label("topology.kubernetes.io/rack", rack)
            .label("topology.kubernetes.io/zone", zone)
            .label("topology.kubernetes.io/region", region)
    };
    let nearness = scorer("topology-affinity-scorer", &json!({"peerTopologyHeader": "x-peer-topology"}));
    let servers = || {
        vec![at("a", "r", "z", "g"), at("b", "r", "z", "g"), at("c", "s", "z", "g"), at("d", "t", "y", "g"), silent()]
    };
    let peer = among(servers()).header("x-peer-topology", "hostname=a,rack=r,zone=z,region=g");
    assert_eq!(peer.scores(&*nearness), [1.0, 0.2, 0.05, 0.02, 0.0], "llm-d");
    assert_eq!(among(servers()).scores(&*nearness), [0.0; 5], "llm-d: no peer");

    let parameters = json!({"headerName": "X-Zone", "labelKey": "zone"});
    let zone = scorer("header-label-affinity-scorer", &parameters);
    let servers = || vec![silent().label("zone", "a"), silent().label("zone", "b"), silent()];
    for (header, expected) in
        [(Some("b"), [0.0, 1.0, 0.0]), (Some("c"), [0.0; 3]), (Some(""), [0.0; 3]), (None, [0.0; 3])]
    {
        let trial = header.into_iter().fold(among(servers()), |t, v| t.header("x-zone", v));
        assert_eq!(trial.scores(&*zone), expected, "llm-d {header:?}");
    }
    let trial = among(servers());
    assert_eq!(answer(|headers| zone.response_headers(trial.endpoint(0), headers)), ["x-zone: a"], "llm-d: the server");
    assert!(answer(|headers| zone.response_headers(trial.endpoint(2), headers)).is_empty());
    let quiet = json!({"headerName": "x-zone", "labelKey": "zone", "stampResponseHeader": false});
    let quiet = scorer("header-label-affinity-scorer", &quiet);
    assert!(answer(|headers| quiet.response_headers(trial.endpoint(0), headers)).is_empty());
    for (parameters, says) in [(json!({"headerName": "x"}), "labelKey"), (json!({"labelKey": "x"}), "headerName")] {
        assert!(refused("header-label-affinity-scorer", parameters.clone()).contains(says), "{parameters}");
    }
}

#[test]
fn sessions() {
    let by_token = scorer("session-affinity-scorer", &json!({"headerName": "x-mine", "profileName": "decode"}));
    let servers = || vec![silent().named("pod-a"), silent().named("pod-b")];
    // base64 of `default/pod-b`.
    let trial = among(servers()).header("x-mine", "ZGVmYXVsdC9wb2QtYg==");
    assert_eq!(trial.scores(&*by_token), [0.0, 1.0], "llm-d");
    assert_eq!(among(servers()).scores(&*by_token), [0.0, 0.0], "llm-d: a new session");
    assert_eq!(answer(|headers| by_token.response_headers(trial.endpoint(0), headers)), ["x-mine: cG9kLWE="]);
    let by_id = json!({
        "algorithm": "session_id_header", "headerName": "x-mine", "evictionTtlSeconds": 600, "missThreshold": 3,
    });
    let by_id = scorer("session-affinity-scorer", &by_id);
    let trial = among(servers()).header("x-mine", "anything");
    by_id.picked(&trial.context(), trial.endpoint(0));
    assert_eq!(trial.scores(&*by_id), [1.0, 0.0], "llm-d: bound");
}

#[test]
fn endpoint_attributes() {
    let parameters = |direction: &str, normalization: Value| {
        let algorithm = json!({"type": direction, "normalization": normalization});
        json!({"attributeKey": "vllm:num_requests_waiting", "algorithm": algorithm})
    };
    let servers = || vec![waiting(0), waiting(5), waiting(10), silent()];
    let (lower, higher) = ("linear_lower_is_better", "linear_higher_is_better");
    let fixed = || json!({"fixedRange": {"min": 2, "max": 8}});
    let name = "endpoint-attribute-scorer";
    assert_rows(vec![
        ("llm-d", name, parameters(lower, json!({})), servers(), &[1.0, 0.5, 0.0, 0.0]),
        ("llm-d", name, parameters(higher, json!({"adaptiveRange": {}})), servers(), &[0.0, 0.5, 1.0, 0.0]),
        ("llm-d clamped", name, parameters(lower, fixed()), servers(), &[1.0, 0.5, 0.0, 0.0]),
        (
            "llm-d clamped",
            name,
            parameters(higher, fixed()),
            vec![waiting(2), waiting(3), waiting(99)],
            &[0.0, 1.0 / 6.0, 1.0],
        ),
        ("llm-d equal", name, parameters(lower, json!({})), vec![waiting(3), waiting(3), silent()], &[1.0, 1.0, 0.0]),
        ("none reports", name, parameters(lower, json!({})), vec![silent()], &[0.0]),
    ]);
    for (parameters, says) in [
        (json!({}), "`attributeKey` is missing"),
        (json!({"attributeKey": "waiting-queue"}), "`algorithm` is missing"),
        (json!({"attributeKey": "DCGM_FI_DEV_GPU_UTIL", "algorithm": {"type": lower}}), "known figures"),
        (parameters(lower, json!({"fixedRange": {"min": 8, "max": 8}})), "less than"),
        (parameters(lower, json!({"adaptiveRange": {}, "fixedRange": {"min": 0, "max": 8}})), "one of them"),
        (parameters("cubic", json!({})), "cubic"),
    ] {
        let error = refused(name, parameters.clone());
        assert!(error.contains(says), "{parameters}: {error}");
    }
}

/// Lookup of a prompt of two blocks that `holder` has cached.
fn found(trial: &Trial, holder: Option<u32>) -> Found {
    let cache = prefix_cache();
    cache.reconcile(&trial.pool);
    let keys = [BlockKey(11), BlockKey(22)];
    if let Some(holder) = holder {
        cache.record(EndpointId(holder), &keys, attache_prefix::TenantId(0), NOW);
    }
    cache.lookup(&mut &keys[..], NOW)
}

#[test]
fn uncached_prompts_rotate_over_the_endpoints() {
    let trial = among(vec![silent(), silent(), silent()]);
    let (cold, warm) = (found(&trial, None), found(&trial, Some(0)));
    let lru = scorer("no-hit-lru-scorer", &json!({"prefixPluginName": "unused"}));
    let goes = |found, endpoint: usize| {
        let cx = PickContext { prefix: Some(found), ..trial.context() };
        lru.picked(&cx, trial.endpoint(endpoint));
    };
    assert_eq!(trial.scores(&*lru), [1.0, 1.0, 1.0], "no uncached prompt yet: llm-d has 1, .5, 0 in list order");
    goes(&cold, 0);
    assert_eq!(trial.scores(&*lru), [0.0, 1.0, 1.0], "llm-d: unused before used");
    goes(&warm, 1);
    assert_eq!(trial.scores(&*lru), [0.0, 1.0, 1.0], "llm-d: a warm request leaves the order as it is");
    goes(&cold, 1);
    assert_eq!(trial.scores(&*lru), [0.5, 0.0, 1.0], "llm-d: second cold request");
    goes(&cold, 2);
    assert_eq!(trial.scores(&*lru), [1.0, 0.5, 0.0], "llm-d: back to the first");
    let warm = among(vec![silent(), silent().holding(1), silent()]);
    assert_eq!(warm.scores(&*lru), [0.5; 3], "llm-d: warm");
    assert_eq!(among(vec![silent()]).scores(&*lru), [1.0], "llm-d: alone");
    assert_eq!(among(vec![silent(), silent()]).scores(&*lru), [1.0, 0.0], "an absent endpoint does not count");
}

#[test]
fn lmetric_is_uncached_tokens_times_requests() {
    let scored = |servers| scores("lmetric-scorer", &json!({"inFlightLoadProducerName": "l"}), servers);
    // 100 · 1, 20 · 1, 20 · 3 tokens.
    let got = scored(vec![silent(), silent().holding(80), silent().holding(80).sent(&[0, 0])]);
    assert_eq!(got, [0.0, 1.0, 0.5]);
    assert_eq!(scored(vec![silent(), silent()]), [1.0, 1.0], "equal costs");
    assert_eq!(scored(vec![silent().holding(100).sent(&[0]), silent()]), [1.0, 0.0], "nothing to compute");
    assert!(refused("lmetric-scorer", json!({"weight": 1})).contains("weight"));
}

/// A prompt with these images.
fn images(references: &[&'static str]) -> Prompt<'static> {
    let image = |reference: &&'static str| Piece::Media { kind: MediaKind::Image, reference: (*reference).into() };
    Prompt { pieces: references.iter().map(image).collect(), ..Prompt::default() }
}

#[test]
fn media_go_to_the_server_that_encoded_them() {
    let name = "mm-embeddings-cache-scorer";
    let cache = scorer(name, &json!({"itemsPerServer": 2}));
    let asking = |references: &[&'static str]| among(vec![silent(), silent()]).asking(images(references));
    let goes = |references: &[&'static str], endpoint: usize| {
        let trial = asking(references);
        cache.picked(&trial.context(), trial.endpoint(endpoint));
    };
    assert_eq!(asking(&["a"]).scores(&*cache), [0.0, 0.0], "nothing is known");
    goes(&["a", "b"], 1);
    assert_eq!(asking(&["a", "c"]).scores(&*cache), [0.0, 0.5], "llm-d: matched items of all");
    assert_eq!(asking(&["a", "a"]).scores(&*cache), [0.0, 1.0], "llm-d: an item counts once");
    assert_eq!(asking(&[]).scores(&*cache), [0.0, 0.0], "llm-d: no items");
    assert_eq!(among(vec![silent(), silent()]).scores(&*cache), [0.0, 0.0], "a prompt that can't be read");
    for other in ["c", "d", "e", "f"] {
        goes(&[other], 1);
    }
    let held = asking(&["a", "b", "c", "d", "e", "f"]).scores(&*cache)[1];
    assert!((held - 2.0 / 6.0).abs() < 1e-6, "two items are recorded, not {held}");
    goes(&["a"], 0);
    assert_eq!(asking(&["a"]).scores(&*cache)[0], 1.0);
    assert!(cache.reads().prompt);
    for items in [0, 1_000_001] {
        assert!(refused(name, json!({"itemsPerServer": items})).contains("1 to 1000000"));
    }
}

#[test]
fn uncached_prompts_of_a_bounded_number_of_endpoints_are_recorded() {
    let trial = among((0..4).map(|_| silent()).collect());
    let lru = scorer("no-hit-lru-scorer", &json!({"lruSize": 2}));
    for endpoint in [0, 1, 2, 1] {
        lru.picked(&trial.context(), trial.endpoint(endpoint));
    }
    let third = 1.0 / 3.0;
    let got = trial.scores(&*lru);
    let expected = [1.0, 0.0, third, 1.0];
    assert!(got.iter().zip(expected).all(|(g, e)| (g - e).abs() < 1e-6), "0 is forgotten: {got:?}");
    assert!(refused("no-hit-lru-scorer", json!({"lruSize": 0})).contains("at least 1"));
}

#[test]
fn scorers_report_the_missing_signal() {
    let fresh = || among(vec![waiting(1), silent()]);
    let blind = || among(vec![silent(), load(0, 0.0).aged(4_000)]);
    for name in [
        "queue-scorer",
        "kv-cache-utilization-scorer",
        "running-requests-size-scorer",
        "load-aware-scorer",
        "lora-affinity-scorer",
    ] {
        let lacks = |trial: Trial| scorer(name, &Value::Null).lacks(&trial.context(), &trial.candidates());
        assert_eq!((lacks(fresh()), lacks(blind())), (None, Some(Signal::Metrics)), "{name}");
    }
    let trial = fresh();
    let found = found(&trial, None);
    let looked = PickContext { prefix: Some(&found), ..trial.context() };
    for name in ["prefix-cache-scorer", "precise-prefix-cache-scorer", "no-hit-lru-scorer"] {
        let scorer = scorer(name, &Value::Null);
        assert_eq!(scorer.lacks(&looked, &trial.candidates()), None, "{name}");
        assert_eq!(scorer.lacks(&trial.context(), &trial.candidates()), Some(Signal::Prefix), "{name}");
        assert!(scorer.reads().prefix, "{name}");
    }
}

/// Properties of a server in the property test.
#[derive(Clone, Debug)]
struct Sketch {
    page: Option<(u32, u32, f32, Vec<&'static str>, u32)>,
    age_ms: u64,
    cached: u32,
    sent: Vec<u32>,
    range: Option<String>,
}

impl Sketch {
    fn server(&self) -> TestServer {
        let server = match &self.page {
            None => silent(),
            Some((waiting, running, kv_usage, adapters, max)) => {
                let state = lora(adapters, adapters, *max).metrics.and_then(|m| m.lora);
                reports(EndpointMetrics {
                    waiting: *waiting,
                    running: *running,
                    kv_usage: *kv_usage,
                    lora: state,
                    ..EndpointMetrics::default()
                })
            }
        };
        let server = server.aged(self.age_ms).holding(self.cached).sent(&self.sent);
        self.range.iter().fold(server, |s, range| s.label("llm-d.ai/context-length-range", range))
    }
}

fn sketches() -> impl Strategy<Value = Vec<Sketch>> {
    let names = || prop::collection::vec(prop_oneof![Just("A"), Just("B"), Just("C")], 0..3);
    let page = (0u32..20, 0u32..20, 0f32..=1.0, names(), 0u32..4);
    let sent = prop::collection::vec(prop_oneof![0u32..100, any::<u32>()], 0..4);
    let range = prop::option::of((0u32..200, 0u32..400).prop_map(|(min, max)| format!("{min}-{max}")));
    let sketch = (prop::option::of(page), 0u64..4_000, 0u32..=100, sent, range);
    let sketch = sketch.prop_map(|(page, age_ms, cached, sent, range)| Sketch { page, age_ms, cached, sent, range });
    prop::collection::vec(sketch, 1..8)
}

proptest! {
    /// Only the ids of candidates matter, not their order.
    #[test]
    fn scores_are_in_range_and_follow_their_candidate(sketches in sketches(), turn in 0usize..8) {
        let trial = among(sketches.iter().map(Sketch::server).collect());
        let mut turned = trial.candidates();
        turned.rotate_left(turn % sketches.len());
        for plugin in registry().plugins().iter().filter(|p| p.kind.contains("scorer")) {
            let scorer = scorer(plugin.name, &least_parameters(plugin.name));
            let mut straight = trial.scores(&*scorer);
            prop_assert!(straight.iter().all(|s| (0.0..=1.0).contains(s)), "{} {straight:?}", plugin.name);
            straight.rotate_left(turn % sketches.len());
            let mut out = vec![f32::NAN; turned.len()];
            scorer.score(&trial.context(), &turned, &mut out);
            prop_assert_eq!(&straight, &out, "{}", plugin.name);
        }
    }
}
