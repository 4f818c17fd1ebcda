//! Decisions of a pipeline, and the configurations that it accepts.

use super::*;
use crate::tests::registry;
use attache_pool::EndpointMetrics;
use attache_scheduling::testing::{TestServer, Trial, among, load, reports, silent};
use attache_scheduling::{Decision, Signal};
use serde_json::{Value, json};

mod stages;

fn pipeline(parameters: &Value) -> Box<dyn Strategy> {
    (PLUGIN.build)(parameters, &registry()).unwrap_or_else(|e| panic!("{parameters}: {e}"))
}

fn ranked(trial: &Trial, parameters: &Value, wanted: usize) -> Ranking {
    let mut ranking = Ranking::new(wanted).explained();
    pipeline(parameters).rank(&trial.context(), &trial.candidates(), &mut for_request(1, 1), &mut ranking);
    ranking
}

fn decided(trial: &Trial, parameters: &Value, wanted: usize) -> Decision {
    ranked(trial, parameters, wanted).decide().unwrap()
}

fn ids(decision: &Decision) -> Vec<u32> {
    decision.picks.iter().map(|e| e.id.0).collect()
}

fn role(role: &str, waiting: u32) -> TestServer {
    load(waiting, 0.0).label("llm-d.ai/role", role)
}

#[test]
fn pipeline_adds_weighted_scores_and_fills_the_ranking_in_order() {
    let trial = among(vec![load(2, 0.0), load(0, 0.0), load(1, 0.0)]);
    assert_eq!(ids(&decided(&trial, &Value::Null, 3)), [1, 2, 0]);
    let trial = among(vec![load(0, 0.9).holding(0), load(4, 0.1).holding(100), load(4, 0.1)]);
    // Queue 1, 0, 0; KV 0.1, 0.9, 0.9; prefix 0, 1, 0.
    for (weights, expected) in [
        ((2.0, 2.0, 3.0), [1, 0, 2]),
        ((9.0, 2.0, 3.0), [0, 1, 2]),
        ((1.0, 2.0, 0.1), [1, 2, 0]),
        ((1.0, 0.0, 0.0), [0, 0, 0]),
    ] {
        let parameters = json!({"scorers": [
            {"type": "queue-scorer", "weight": weights.0},
            {"type": "kv-cache-utilization-scorer", "weight": weights.1},
            {"type": "prefix-cache-scorer", "weight": weights.2},
        ]});
        let got = ids(&decided(&trial, &parameters, 3));
        let compared = if expected[1] == 0 && expected[2] == 0 { 1 } else { 3 };
        assert_eq!(got[..compared], expected[..compared], "{weights:?}");
    }
}

#[test]
fn filters_apply_in_order() {
    let trial = among(vec![role("decode", 5), role("prefill", 0), role("decode", 1), load(9, 0.0)]);
    let parameters = json!({
        "filters": [
            {"type": "decode-filter"},
            {"type": "utilization-filter", "parameters": {"conditions": [{"metric": "waiting-queue", "maxValue": 6}]}},
        ],
        "scorers": [{"type": "queue-scorer", "weight": 2}],
        "picker": {"type": "max-score-picker"},
    });
    let decision = decided(&trial, &parameters, 4);
    assert_eq!(ids(&decision), [2, 0], "fallbacks too are from the filtered endpoints");
    let parts = decision.parts.unwrap();
    let said: Vec<String> = parts
        .iter()
        .map(|p| {
            let figures: Vec<String> = p.figures.iter().map(|(e, figure)| format!("{}={figure}", e.id)).collect();
            format!("{} x{}: {}", p.name, p.weight, figures.join(" "))
        })
        .collect();
    assert_eq!(
        said,
        [
            "decode-filter x0: 0=1 1=0 2=1 3=1",
            "utilization-filter x0: 0=1 2=1 3=0",
            "queue-scorer x2: 0=0 2=1",
            "sum x0: 0=0 2=2",
        ]
    );
}

#[test]
fn filter_that_keeps_no_endpoint_is_named() {
    let trial = among(vec![role("prefill", 0), role("encode", 0)]);
    let parameters =
        json!({"filters": [{"type": "label-selector-filter"}, {"type": "decode-filter"}, {"type": "encode-filter"}]});
    let ranking = ranked(&trial, &parameters, 1);
    assert_eq!(ranking.emptied_by(), Some("decode-filter"));
    assert!(ranking.decide().is_none());
}

#[test]
fn missing_signal_of_a_part_is_reported() {
    let lacking = |servers, parameters| decided(&among(servers), &parameters, 1).lacking;
    let queue = || json!({"scorers": [{"type": "queue-scorer"}]});
    assert_eq!(lacking(vec![load(1, 0.0), silent()], queue()), None);
    assert_eq!(lacking(vec![silent(), silent()], queue()), Some(Signal::Metrics));
    assert_eq!(
        lacking(vec![load(1, 0.0)], json!({"scorers": [{"type": "prefix-cache-scorer"}]})),
        Some(Signal::Prefix)
    );
    let filters = json!({"filters": [{"type": "utilization-detector"}], "picker": {"type": "random-picker"}});
    assert_eq!(lacking(vec![silent(), silent()], filters), Some(Signal::Metrics));
}

#[test]
fn sums_are_scores_for_other_strategies() {
    let trial =
        among(vec![role("decode", 5), role("prefill", 0), role("decode", 1), role("encode", 0), role("decode", 3)]);
    let parameters =
        json!({"filters": [{"type": "decode-filter"}], "scorers": [{"type": "queue-scorer", "weight": 4}]});
    let mut out = vec![7.0; 5];
    let better = pipeline(&parameters).scores(&trial.context(), &trial.candidates(), &mut out);
    assert_eq!(better, Some(Better::Higher));
    assert!(out[1].is_nan() && out[3].is_nan());
    assert_eq!([out[0], out[2], out[4]], [0.0, 4.0, 2.0]);
    let nobody = json!({"filters": [{"type": "header-based-testing-filter"}]});
    pipeline(&nobody).scores(&trial.context(), &trial.candidates(), &mut out);
    assert!(out.iter().all(|s| s.is_nan()));
}

/// A configuration with two profiles, one per stage.
fn two_profiles(handler: Value) -> Value {
    json!({
        "plugins": [
            handler,
            {"type": "prefill-filter"},
            {"type": "decode-filter"},
            {"type": "queue-scorer"},
            {"name": "pinned", "type": "session-affinity-filter", "parameters": {"strategy": "session_id"}},
        ],
        "profiles": [
            {"name": "prefill", "plugins": [{"pluginRef": "prefill-filter"}, {"pluginRef": "queue-scorer"}]},
            {"name": "decode", "plugins": [
                {"pluginRef": "decode-filter"}, {"pluginRef": "pinned"}, {"pluginRef": "queue-scorer", "weight": 2},
            ]},
        ],
    })
}

fn four() -> Trial {
    among(vec![role("prefill", 3), role("prefill", 1), role("decode", 4), role("decode", 2)])
}

#[test]
fn handlers_choose_the_profile() {
    let by_header = two_profiles(json!({"type": "header-profile-handler"}));
    for (header, expected) in
        [(None, vec![3, 2]), (Some("prefill"), vec![1, 0]), (Some("decode"), vec![3, 2]), (Some(" "), vec![3, 2])]
    {
        let trial = header.into_iter().fold(four(), |t, v| t.header("epp-profile", v));
        assert_eq!(ids(&decided(&trial, &by_header, 2)), expected, "llm-d header-profile-handler {header:?}");
    }
    let trial = four().header("epp-profile", "encode");
    assert_eq!(ranked(&trial, &by_header, 1).emptied_by(), Some("header-profile-handler"), "llm-d: no such profile");
    let own =
        json!({"type": "header-profile-handler", "parameters": {"headerName": "X-Stage", "defaultProfile": "prefill"}});
    assert_eq!(ids(&decided(&four(), &two_profiles(own.clone()), 1)), [1]);
    assert_eq!(ids(&decided(&four().header("x-stage", "decode"), &two_profiles(own), 1)), [3]);
    for handler in [
        json!({
            "type": "disagg-profile-handler",
            "parameters": {"stageOrder": "prefill-first", "deciders": {"prefill": "d"}},
        }),
        json!({"type": "disagg-profile-handler", "parameters": {"profiles": {"prefill": "prefill"}}}),
        json!({
            "type": "pd-profile-handler",
            "parameters": {"prefixPluginType": "prefix-cache-scorer", "primaryPort": 8000},
        }),
    ] {
        let trial = four().header("epp-profile", "prefill");
        assert_eq!(ids(&decided(&trial, &two_profiles(handler.clone()), 2)), [3, 2], "llm-d, not split: {handler}");
    }
    let prefill = json!({"type": "pd-profile-handler", "parameters": {"decodeProfile": "prefill"}});
    assert_eq!(ids(&decided(&four(), &two_profiles(prefill), 1)), [1]);
    let one = json!({
        "plugins": [{"type": "header-profile-handler"}, {"type": "queue-scorer"}],
        "profiles": [{"name": "mine", "plugins": [{"pluginRef": "queue-scorer"}]}],
    });
    let trial = four().header("epp-profile", "other");
    assert_eq!(ids(&decided(&trial, &one, 1)), [1], "llm-d: one profile is always the one");
}

#[test]
fn only_the_chosen_profile_records_the_pick() {
    let pinning = pipeline(&two_profiles(json!({"type": "header-profile-handler"})));
    let first = |trial: &Trial| {
        let mut ranking = Ranking::new(1);
        pinning.rank(&trial.context(), &trial.candidates(), &mut for_request(1, 1), &mut ranking);
        ids(&ranking.decide().unwrap())[0]
    };
    let session = || four().header("x-session-id", "s");
    let prefill = session().header("epp-profile", "prefill");
    pinning.picked(&prefill.context(), prefill.endpoint(0));
    assert_eq!(first(&session()), 3, "the other profile has no session plugin");
    let trial = session();
    pinning.picked(&trial.context(), trial.endpoint(2));
    assert_eq!(first(&session()), 2);
}

#[test]
fn plugin_of_two_kinds_records_and_adds_headers_once() {
    let both = json!({
        "filters": [
            {"type": "session-affinity-filter"},
            {"type": "context-length-aware", "parameters": {"enableFiltering": true}},
        ],
        "scorers": [{"type": "context-length-aware"}, {"type": "header-label-affinity-scorer", "parameters": {
            "headerName": "x-zone", "labelKey": "zone",
        }}],
    });
    let trial = among(vec![silent().label("zone", "a").named("p")]);
    let mut headers = ResponseHeaders::new();
    pipeline(&both).response_headers(trial.endpoint(0), &mut headers);
    assert_eq!(headers, [("x-session-token".into(), "cA==".to_owned()), ("x-zone".into(), "a".to_owned())]);
}

#[test]
fn pipeline_reads_what_its_parts_read() {
    for (parameters, prefix) in [
        (Value::Null, true),
        (json!({"scorers": [{"type": "queue-scorer"}]}), false),
        (json!({"filters": [{"type": "prefix-cache-affinity-filter"}]}), true),
        (json!({"plugins": [{"type": "queue-scorer"}, {"type": "token-load-scorer"}]}), true),
    ] {
        assert_eq!(pipeline(&parameters).reads().prefix, prefix, "{parameters}");
    }
    let unused = json!({
        "plugins": [{"type": "queue-scorer"}, {"type": "prefix-cache-scorer"}],
        "profiles": [{"name": "default", "plugins": [{"pluginRef": "queue-scorer"}]}],
    });
    assert!(!pipeline(&unused).reads().prefix, "what no profile lists is not read");
    let decode_only = json!({
        "plugins": [{"type": "disagg-profile-handler"}, {"type": "prefix-cache-scorer"}, {"type": "queue-scorer"}],
        "profiles": [
            {"name": "prefill", "plugins": [{"pluginRef": "prefix-cache-scorer"}]},
            {"name": "decode", "plugins": [{"pluginRef": "queue-scorer"}]},
        ],
    });
    assert!(!pipeline(&decode_only).reads().prefix, "nor what only a profile lists that never decides");
}

#[test]
fn accepted() {
    let queue = || json!({"type": "queue-scorer"});
    for (case, parameters) in [
        ("GIE: empty", Value::Null),
        ("GIE: empty", json!({})),
        ("GIE: plugins without profiles", json!({"plugins": [queue(), {"type": "random-picker"}]})),
        ("GIE: no plugins", json!({"plugins": []})),
        (
            "GIE: full",
            json!({
                "plugins": [
                    {"name": "test1", "type": "prefix-cache-scorer", "parameters": {"matchLengthWeight": 0.1}},
                    {"name": "picker", "type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 1}},
                    {"type": "single-profile-handler"},
                    {"type": "decode-filter"},
                ],
                "profiles": [{"name": "default", "plugins": [
                    {"pluginRef": "decode-filter"}, {"pluginRef": "test1", "weight": 50}, {"pluginRef": "picker"},
                ]}],
            }),
        ),
        (
            "GIE: scorer without weight, handler omitted, picker before scorer",
            json!({
                "plugins": [queue(), {"type": "max-score-picker"}],
                "profiles": [
                    {"name": "default", "plugins": [{"pluginRef": "max-score-picker"}, {"pluginRef": "queue-scorer"}]},
                ],
            }),
        ),
        ("an empty profile picks at random", json!({"plugins": [queue()], "profiles": [{"name": "default"}]})),
        (
            "one plugin in two profiles",
            json!({
                "plugins": [queue(), {"type": "header-profile-handler", "parameters": {"defaultProfile": "a"}}],
                "profiles": [
                    {"name": "a", "plugins": [{"pluginRef": "queue-scorer"}]},
                    {"name": "b", "plugins": [{"pluginRef": "queue-scorer"}]},
                ],
            }),
        ),
        ("llm-d: old type", json!({"filters": [{"type": "by-label-selector"}]})),
        ("filters alone", json!({"filters": [{"type": "decode-filter"}]})),
        ("a picker alone", json!({"picker": {"type": "random-picker"}})),
    ] {
        let built = (PLUGIN.build)(&parameters, &registry());
        assert!(built.is_ok(), "{case}: {}", built.unwrap_err());
        let trial = among(vec![load(1, 0.0)]);
        assert_eq!(ids(&decided(&trial, &parameters, 1)), [0], "{case}");
    }
}

#[test]
fn three_filters_keep_the_order_of_the_file() {
    let parameters = json!({"plugins": [
        {"type": "decode-filter"}, {"type": "label-selector-filter"}, {"type": "concurrency-detector"},
    ]});
    let parts = decided(&among(vec![silent()]), &parameters, 1).parts.unwrap();
    let names: Vec<&str> = parts.iter().map(|p| p.name).collect();
    assert_eq!(names, ["decode-filter", "label-selector-filter", "concurrency-detector", "sum"], "GIE");
}

#[test]
fn refused() {
    let queue = || json!({"type": "queue-scorer"});
    let profile = |plugins: Value| json!([{"name": "default", "plugins": plugins}]);
    let rows = [
        ("nothing in it", json!({"scorers": []}), "at least one"),
        ("GIE: malformed", json!({"plugins": "testing 1 2 3"}), "must be a list"),
        ("GIE: plugin without type", json!({"plugins": [{"name": "a"}]}), "type"),
        ("without type", json!({"scorers": [{"weight": 1}]}), "type"),
        ("GIE: unknown type", json!({"plugins": [{"type": "quue-scorer"}]}), "did you mean `queue-scorer`?"),
        ("unknown type, far off", json!({"scorers": [{"type": "queue"}]}), "known: "),
        (
            "GIE: bad parameter",
            json!({"plugins": [
                {"name": "p", "type": "prefix-cache-scorer", "parameters": {"matchLengthWeight": "asdf"}},
            ]}),
            "`p`: ",
        ),
        ("unknown parameter", json!({"scorers": [{"type": "queue-scorer", "parameters": {"x": 1}}]}), "`x`"),
        ("GIE: duplicate name", json!({"plugins": [queue(), queue()]}), "two plugins are called `queue-scorer`"),
        ("GIE: profile without name", json!({"plugins": [queue()], "profiles": [{"plugins": []}]}), "name"),
        ("GIE: profile with an empty name", json!({"plugins": [queue()], "profiles": [{"name": ""}]}), "empty `name`"),
        (
            "GIE: entry without pluginRef",
            json!({"plugins": [queue()], "profiles": profile(json!([{"weight": 1}]))}),
            "pluginRef",
        ),
        (
            "GIE: undefined pluginRef",
            json!({"plugins": [queue()], "profiles": profile(json!([{"pluginRef": "queue-score"}]))}),
            "did you mean `queue-scorer`?",
        ),
        (
            "undefined, far off",
            json!({"plugins": [queue()], "profiles": profile(json!([{"pluginRef": "x"}]))}),
            "`plugins` has: queue-scorer",
        ),
        (
            "listed twice",
            json!({
                "plugins": [queue()],
                "profiles": profile(json!([{"pluginRef": "queue-scorer"}, {"pluginRef": "queue-scorer"}])),
            }),
            "twice",
        ),
        (
            "GIE: duplicate profile",
            json!({"plugins": [queue()], "profiles": [{"name": "a"}, {"name": "a"}]}),
            "two profiles are called `a`",
        ),
        (
            "GIE: two pickers",
            json!({"plugins": [{"type": "max-score-picker"}, {"type": "random-picker"}]}),
            "the pickers `max-score-picker` and `random-picker`",
        ),
        (
            "GIE: two profile handlers",
            json!({"plugins": [{"type": "single-profile-handler"}, {"name": "h", "type": "pd-profile-handler"}]}),
            "`h` are both profile handlers",
        ),
        (
            "GIE: two profiles and no handler",
            json!({"plugins": [queue()], "profiles": [{"name": "a"}, {"name": "b"}]}),
            "(a, b) need a profile handler",
        ),
        (
            "GIE: two profiles with single-profile-handler",
            json!({"plugins": [{"type": "single-profile-handler"}], "profiles": [{"name": "a"}, {"name": "b"}]}),
            "`single-profile-handler`: it works with one profile",
        ),
        (
            "two profiles with data-parallel-profile-handler",
            json!({"plugins": [{"type": "data-parallel-profile-handler"}], "profiles": [{"name": "a"}, {"name": "b"}]}),
            "one profile",
        ),
        (
            "llm-d: no decode profile",
            json!({"plugins": [{"type": "disagg-profile-handler"}, queue()]}),
            "no profile is called `decode`",
        ),
        (
            "llm-d: no default profile",
            json!({"plugins": [{"type": "header-profile-handler"}], "profiles": [{"name": "a"}, {"name": "b"}]}),
            "no profile is called `decode`; there are: a, b",
        ),
        (
            "a handler in a profile",
            json!({
                "plugins": [{"type": "single-profile-handler"}],
                "profiles": profile(json!([{"pluginRef": "single-profile-handler"}])),
            }),
            "profile handler",
        ),
        ("weight below 0", json!({"scorers": [{"type": "queue-scorer", "weight": -1}]}), "0 or more"),
        ("a filter that is none", json!({"filters": [queue()]}), "`queue-scorer` is no filter; its kind is scorer"),
        ("a scorer that is none", json!({"scorers": [{"type": "decode-filter"}]}), "is no scorer"),
        ("a picker that is none", json!({"picker": queue()}), "is no picker"),
        ("both forms", json!({"scorers": [queue()], "plugins": [queue()]}), "use either"),
        ("unknown key", json!({"scorer": []}), "scorer"),
    ];
    for (case, parameters, says) in rows {
        let error = (PLUGIN.build)(&parameters, &registry()).expect_err(case).to_string();
        assert!(error.contains(says), "{case}: {error}");
    }
}

#[test]
fn pools_of_the_references() {
    // GIE hermetic cases 1 to 4: queue, KV cache, prefix and LoRA scorers, each with weight 1.
    let parameters = json!({"scorers": [
        {"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}, {"type": "prefix-cache-scorer"},
        {"type": "lora-affinity-scorer"},
    ]});
    let pod = |waiting, kv_usage, adapters: &[&str]| {
        let lora = attache_pool::LoraState {
            max: 0,
            running: adapters.iter().map(|a| (*a).into()).collect(),
            waiting: vec![],
        };
        reports(EndpointMetrics { waiting, kv_usage, lora: Some(lora), ..EndpointMetrics::default() })
    };
    for (case, pods, expected) in [
        ("GIE 1 lower queue and kv", vec![pod(3, 0.2, &[]), pod(0, 0.1, &[]), pod(10, 0.2, &[])], 1),
        (
            "GIE 2 active lora, low queue",
            vec![pod(0, 0.2, &["f", "b"]), pod(0, 0.1, &["f", "A"]), pod(10, 0.2, &["f", "b"])],
            1,
        ),
        ("GIE 3 lora beats kv", vec![pod(10, 0.2, &["f", "b"]), pod(10, 0.4, &["f", "A"]), pod(10, 0.3, &["f"])], 1),
        (
            "GIE 4 no shed by default",
            vec![pod(6, 0.2, &["f", "b", "A"]), pod(0, 0.85, &["f"]), pod(10, 0.9, &["f"])],
            0,
        ),
    ] {
        assert_eq!(ids(&decided(&among(pods), &parameters, 1)), [expected], "{case}");
    }
}
