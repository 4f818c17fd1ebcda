//! Which profile chooses which server, and when: llm-d's handlers and deciders.

use super::*;
use attache_protocol::{MediaKind, Piece, Prompt};
use attache_scheduling::split::{Decider, SplitPolicy};
use attache_scheduling::testing::Sent;
use std::borrow::Cow;

/// Three profiles, one per stage, each with the fewest waiting requests; `extra` plugins come first in prefill and
/// decode.
fn three(handler: Value, deciders: &[Value], extra: &[Value]) -> Value {
    let named = |role: &str| {
        let extra = extra.iter().map(|p| json!({"pluginRef": p["type"]}));
        let own = [json!({"pluginRef": format!("{role}-filter")})].into_iter().chain(extra);
        json!({"name": role, "plugins": own.chain([json!({"pluginRef": "queue-scorer"})]).collect::<Vec<_>>()})
    };
    let fixed = ["encode-filter", "prefill-filter", "decode-filter", "queue-scorer"].map(|t| json!({"type": t}));
    let plugins: Vec<&Value> = [&handler].into_iter().chain(deciders).chain(extra).chain(&fixed).collect();
    let profiles = ["encode", "prefill", "decode"].map(named);
    json!({"plugins": plugins, "profiles": profiles})
}

fn disagg(parameters: Value) -> Value {
    json!({"type": "disagg-profile-handler", "parameters": parameters})
}

fn prefix_based(non_cached: u32) -> Value {
    json!({"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": non_cached}})
}

fn always() -> Value {
    json!({"type": "always-disagg-pd-decider"})
}

fn send(trial: &Trial, parameters: &Value) -> Sent {
    let policy = SplitPolicy {
        decider: Decider::Predicted,
        together: vec!["roleset-name".into()],
        whole: true,
        required: false,
    };
    trial.pair(&*pipeline(parameters), &policy, 2, 1).unwrap()
}

/// Two servers of each role but encode, which has one.
fn servers() -> Vec<TestServer> {
    vec![role("encode", 1), role("prefill", 3), role("prefill", 1), role("decode", 4), role("decode", 2).holding(84)]
}

#[test]
fn decider_determines_whether_the_prefill_profile_runs() {
    let always_runs = disagg(json!({"deciders": {"prefill": "always-disagg-pd-decider"}}));
    let by_prefix = disagg(json!({"deciders": {"prefill": "prefix-based-pd-decider"}}));
    let old = |parameters: Value| json!({"type": "pd-profile-handler", "parameters": parameters});
    for (case, handler, deciders, split) in [
        ("disagg, no decider", disagg(json!({})), vec![always()], false),
        ("disagg, always", always_runs.clone(), vec![always()], true),
        ("disagg, 16 of 16 lacking", by_prefix.clone(), vec![prefix_based(16)], true),
        ("disagg, 16 of 17 lacking", by_prefix.clone(), vec![prefix_based(17)], false),
        ("disagg, nonCachedTokens 0", by_prefix, vec![prefix_based(0)], false),
        ("pd, its own default", old(json!({})), vec![prefix_based(16)], true),
        ("pd, its own default, too few", old(json!({})), vec![prefix_based(17)], false),
        ("pd, a named one", old(json!({"deciderPluginName": "always-disagg-pd-decider"})), vec![always()], true),
        ("pd before deciders, no threshold", old(json!({})), vec![], true),
        ("pd before deciders, 64 characters lacking", old(json!({"threshold": 64, "hashBlockSize": 5})), vec![], true),
        ("pd before deciders, 65 wanted", old(json!({"threshold": 65})), vec![], false),
    ] {
        let sent = send(&among(servers()), &three(handler, &deciders, &[]));
        assert_eq!(sent.whole.picks[0].id.0, 4, "{case}");
        let expected = if split { (vec![2, 1], vec![4, 3]) } else { (vec![], vec![]) };
        assert_eq!(sent.ids(), expected, "llm-d {case}");
        assert!(sent.pair.is_none_or(|pair| pair.split == Some(true)), "{case}: the pool's decider has no effect");
    }
}

#[test]
fn stage_without_an_endpoint_is_dropped() {
    let handler = || disagg(json!({"deciders": {"prefill": "always-disagg-pd-decider"}}));
    let parameters = three(handler(), &[always()], &[]);
    for (case, servers) in [
        ("no prefill server", vec![role("decode", 0)]),
        ("one server for both", vec![role("both", 0)]),
        ("the best of both stages is one server", vec![role("both", 0), role("both", 5)]),
        (
            "another roleset",
            vec![role("prefill", 0).label("roleset-name", "a"), role("decode", 0).label("roleset-name", "b")],
        ),
    ] {
        let sent = send(&among(servers), &parameters);
        assert!(sent.pair.is_none(), "{case}: {:?}", sent.pair);
        assert_eq!(sent.whole.picks.len().min(1), 1, "{case}");
    }
    let busy = || vec![role("both", 0), role("prefill", 0)];
    // The server with both roles has the fewest requests, but another one has as few.
    let pairs: Vec<_> = (0..20)
        .filter_map(|seed| {
            let policy = SplitPolicy { decider: Decider::Always, together: Vec::new(), whole: true, required: false };
            among(busy()).pair(&*pipeline(&parameters), &policy, 2, seed)?.first()
        })
        .collect();
    assert!(!pairs.is_empty() && pairs.len() < 20 && pairs.iter().all(|p| *p == (1, 0)), "{pairs:?}");
    let mut without = three(handler(), &[always()], &[]);
    without["profiles"].as_array_mut().unwrap().remove(1);
    assert!(send(&among(servers()), &without).pair.is_none(), "no profile is called `prefill`");
}

#[test]
fn prefill_first_needs_no_decider_and_decode_is_near_prefill() {
    let handler = || disagg(json!({"stageOrder": "prefill-first"}));
    let near = json!({"type": "topology-affinity-filter", "parameters": {"minAffinity": "rack"}});
    let at = |server: TestServer, rack: &str| server.label("topology.kubernetes.io/rack", rack);
    let racks = || {
        vec![
            at(role("prefill", 0), "r1"),
            at(role("prefill", 1), "r2"),
            at(role("decode", 9), "r1"),
            at(role("decode", 0), "r2"),
            at(role("decode", 7), "r1"),
        ]
    };
    let sent = send(&among(racks()), &three(handler(), &[], &[]));
    assert_eq!((sent.first(), sent.whole.picks[0].id.0), (Some((0, 3)), 3));
    let sent = send(&among(racks()), &three(handler(), &[], std::slice::from_ref(&near)));
    assert_eq!((sent.ids(), sent.whole.picks[0].id.0), ((vec![0, 1], vec![4, 2]), 3), "near the prefill server");
    // Decode first: the prefill server is near the decode server.
    let decode_first = disagg(json!({"deciders": {"prefill": "always-disagg-pd-decider"}}));
    let sent = send(&among(racks()), &three(decode_first, &[always()], &[near]));
    assert_eq!(sent.ids(), (vec![1], vec![3, 4]));
    let both = send(&among(vec![role("both", 0), role("decode", 1)]), &three(handler(), &[], &[]));
    assert!(both.pair.is_none(), "one server for both stages");
    let alone = send(&among(vec![role("decode", 1)]), &three(handler(), &[], &[]));
    assert!(alone.pair.is_none(), "no prefill server");
}

fn with(piece: Piece<'static>) -> Prompt<'static> {
    Prompt { pieces: vec![Piece::Role(Cow::Borrowed("user")), piece], count: 1, ..Prompt::default() }
}

fn media(kind: MediaKind) -> Prompt<'static> {
    with(Piece::Media { kind, reference: Cow::Borrowed("https://a/b") })
}

/// Prefill and decode server, and the encode servers.
fn encoded(trial: &Trial, parameters: &Value) -> (Option<(u32, u32)>, Vec<u32>) {
    let sent = send(trial, parameters);
    let encoders = trial.encoders(&*pipeline(parameters), &sent, 1);
    (sent.first(), encoders)
}

#[test]
fn media_go_to_the_encode_profile() {
    let decides = json!({"type": "always-disagg-multimodal-decider"});
    let deciders = json!({"encode": "always-disagg-multimodal-decider", "prefill": "always-disagg-pd-decider"});
    let parameters = three(disagg(json!({"deciders": deciders})), &[decides.clone(), always()], &[]);
    for (case, prompt, encoders) in [
        ("image", media(MediaKind::Image), vec![0]),
        ("sound", media(MediaKind::Audio), vec![0]),
        ("video", media(MediaKind::Video), vec![0]),
        ("document", media(MediaKind::Document), vec![]),
        ("text", with(Piece::ToolCall("{}")), vec![]),
    ] {
        let trial = among(servers()).asking(prompt);
        assert_eq!(encoded(&trial, &parameters), (Some((2, 4)), encoders), "llm-d {case}");
    }
    let unread = among(servers());
    assert_eq!(encoded(&unread, &parameters), (Some((2, 4)), vec![]), "a body that could not be read");
    assert!(pipeline(&parameters).reads().prompt);
    // The decode server may also be the best for encoding.
    let own = || vec![role("encode-decode", 0), role("encode", 5), role("prefill", 0)];
    let image = |servers| among(servers).asking(media(MediaKind::Image));
    assert_eq!(encoded(&image(own()), &parameters).1, Vec::<u32>::new());
    let mut prefill_too_few = three(disagg(json!({"deciders": deciders})), &[decides.clone(), always()], &[]);
    prefill_too_few["plugins"][0]["parameters"]["deciders"] = json!({"encode": "always-disagg-multimodal-decider"});
    assert_eq!(encoded(&image(servers()), &prefill_too_few), (None, vec![0]), "llm-d E/PD: the prompt stays");
    assert_eq!(encoded(&image(own()), &prefill_too_few), (None, vec![]));
    let never = disagg(json!({"deciders": {"prefill": "always-disagg-pd-decider"}}));
    assert_eq!(encoded(&image(servers()), &three(never, &[always()], &[])), (Some((2, 4)), vec![]), "no decider");
    // As many as the picker wants, and at most one per item.
    let more = || (0..3).map(|waiting| role("encode", waiting)).chain([role("decode", 0)]).collect::<Vec<_>>();
    let mut several = prefill_too_few.clone();
    let most = json!({"name": "two", "type": "max-score-picker", "parameters": {"maxNumOfEndpoints": 2}});
    several["plugins"].as_array_mut().unwrap().push(most);
    several["profiles"][0]["plugins"].as_array_mut().unwrap().push(json!({"pluginRef": "two"}));
    let strategy = pipeline(&several);
    let sent = send(&image(more()), &several);
    assert_eq!(image(more()).encoders(&*strategy, &sent, 3), [0, 1]);
    assert_eq!(image(more()).encoders(&*strategy, &sent, 1), [0]);
}

#[test]
fn roles_are_filtered_before_or_by_the_profiles() {
    let filter = |name: &str| json!({"filters": [{"type": name}]});
    for (case, parameters, roles) in [
        ("the default", Value::Null, Roles::DECODE),
        ("one profile", filter("decode-filter"), Roles::DECODE),
        ("one profile for prefill", filter("prefill-filter"), Roles::NONE),
        ("one profile for encode", filter("encode-filter"), Roles::NONE),
        ("the caller names the profile", three(json!({"type": "header-profile-handler"}), &[], &[]), Roles::NONE),
        ("stages", three(disagg(json!({})), &[], &[]), Roles::DECODE),
        ("stages, older", three(json!({"type": "pd-profile-handler"}), &[], &[]), Roles::DECODE),
    ] {
        let trial = among(servers());
        assert_eq!(pipeline(&parameters).roles(&trial.context()), roles, "{case}");
    }
    let by_header = three(json!({"type": "header-profile-handler"}), &[], &[]);
    for (profile, expected) in [("encode", 0), ("prefill", 2), ("decode", 4)] {
        let sent = send(&among(servers()).header("epp-profile", profile), &by_header);
        assert_eq!(sent.whole.picks[0].id.0, expected, "llm-d's coordinator: {profile}");
        assert!(sent.pair.is_none(), "the caller splits");
    }
}

#[test]
fn each_stage_records_its_own_pick() {
    let pinned =
        |name: &str| json!({"name": name, "type": "session-affinity-filter", "parameters": {"strategy": "session_id"}});
    let parameters = json!({
        "plugins": [
            disagg(json!({"deciders": {"prefill": "always-disagg-pd-decider"}})), always(),
            {"type": "prefill-filter"}, {"type": "decode-filter"}, {"type": "queue-scorer"}, pinned("p"), pinned("d"),
        ],
        "profiles": [
            {
                "name": "prefill",
                "plugins": [{"pluginRef": "prefill-filter"}, {"pluginRef": "p"}, {"pluginRef": "queue-scorer"}],
            },
            {
                "name": "decode",
                "plugins": [{"pluginRef": "decode-filter"}, {"pluginRef": "d"}, {"pluginRef": "queue-scorer"}],
            },
        ],
    });
    let strategy = pipeline(&parameters);
    let policy = SplitPolicy { decider: Decider::Predicted, together: Vec::new(), whole: true, required: false };
    let trial = among(servers()).header("x-session-id", "s");
    let first = || trial.pair(&*strategy, &policy, 1, 0).unwrap().first();
    assert_eq!(first(), Some((2, 4)));
    strategy.picked(&trial.context(), trial.endpoint(3));
    assert_eq!(first(), Some((2, 3)), "only the decode profile records");
    strategy.picked_prefill(&trial.context(), trial.endpoint(1));
    assert_eq!(first(), Some((1, 3)));
}

#[test]
fn encode_profile_prefers_the_server_that_encoded_the_image_before() {
    let parameters = json!({
        "plugins": [
            disagg(json!({"deciders": {"encode": "always-disagg-multimodal-decider"}})),
            {"type": "always-disagg-multimodal-decider"}, {"type": "encode-filter"}, {"type": "decode-filter"},
            {"type": "queue-scorer"}, {"type": "mm-embeddings-cache-scorer"},
        ],
        "profiles": [
            {"name": "encode", "plugins": [
                {"pluginRef": "encode-filter"}, {"pluginRef": "mm-embeddings-cache-scorer", "weight": 4},
                {"pluginRef": "queue-scorer"},
            ]},
            {"name": "decode", "plugins": [{"pluginRef": "decode-filter"}, {"pluginRef": "queue-scorer"}]},
        ],
    });
    let strategy = pipeline(&parameters);
    let servers = vec![role("encode", 0), role("encode", 5), role("decode", 0)];
    let trial = among(servers).asking(media(MediaKind::Image));
    let sent = send(&trial, &parameters);
    let encoders = || trial.encoders(&*strategy, &sent, 1);
    assert_eq!(encoders(), [0], "the shorter queue");
    strategy.picked(&trial.context(), trial.endpoint(1));
    assert_eq!(encoders(), [0], "the decode profile records nothing");
    strategy.picked_encode(&trial.context(), trial.endpoint(1));
    assert_eq!(encoders(), [1]);
}

#[test]
fn pipeline_reads_what_its_stages_read() {
    let profile = |name: &str, plugin: &str| json!({"name": name, "plugins": [{"pluginRef": plugin}]});
    let file = |deciders: Value, decider: Value| {
        json!({
            "plugins": [
                disagg(json!({"deciders": deciders})), decider, {"type": "queue-scorer"},
                {"type": "prefix-cache-scorer"},
            ],
            "profiles": [profile("prefill", "prefix-cache-scorer"), profile("decode", "queue-scorer")],
        })
    };
    assert!(pipeline(&file(json!({"prefill": "always-disagg-pd-decider"}), always())).reads().prefix, "its profile");
    let mut by_prefix = file(json!({"prefill": "prefix-based-pd-decider"}), prefix_based(16));
    by_prefix["profiles"][0] = profile("prefill", "queue-scorer");
    assert!(pipeline(&by_prefix).reads().prefix, "its decider");
    by_prefix["plugins"][0] = disagg(json!({}));
    assert!(!pipeline(&by_prefix).reads().prefix, "neither runs");
}

#[test]
fn invalid_deciders_are_rejected() {
    let file = |handler: Value, deciders: &[Value]| (PLUGIN.build)(&three(handler, deciders, &[]), &registry());
    for (case, built, says) in [
        ("no such plugin", file(disagg(json!({"deciders": {"prefill": "mine"}})), &[]), "asks `mine`"),
        (
            "no decider",
            file(disagg(json!({"deciders": {"prefill": "queue-scorer"}})), &[]),
            "`queue-scorer` is no decider",
        ),
        (
            "llm-d: negative",
            file(
                disagg(json!({})),
                &[json!({"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": -1}})],
            ),
            "nonCachedTokens",
        ),
        ("llm-d: unknown order", file(disagg(json!({"stageOrder": "encode-first"})), &[]), "encode-first"),
        (
            "negative threshold",
            file(json!({"type": "pd-profile-handler", "parameters": {"threshold": -1}}), &[]),
            "threshold",
        ),
    ] {
        let error = built.expect_err(case).to_string();
        assert!(error.contains(says), "{case}: {error}");
    }
    let listed = json!({
        "plugins": [always()],
        "profiles": [{"name": "a", "plugins": [{"pluginRef": "always-disagg-pd-decider"}]}],
    });
    assert!((PLUGIN.build)(&listed, &registry()).unwrap_err().to_string().contains("is a decider"));
}
