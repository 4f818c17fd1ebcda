//! Precedence of strategies: AIBrix's order and its table of profiles.

use super::*;
use crate::plugin::Headers;
use crate::tests::registry;
use serde_json::json;

fn spec(name: &str) -> StrategySpec {
    StrategySpec { name: name.to_owned(), parameters: Value::Null }
}

fn profile(name: &str, strategy: &str, bounds: [Option<u32>; 4]) -> ProfileSpec {
    let [prompt_tokens_gte, prompt_tokens_lt, max_tokens_gte, max_tokens_lt] = bounds;
    let when = Conditions { prompt_tokens_gte, prompt_tokens_lt, max_tokens_gte, max_tokens_lt };
    ProfileSpec { name: name.to_owned(), strategy: spec(strategy), when }
}

fn allow(names: &[&str]) -> RequestSpec {
    RequestSpec {
        filter_header: Some("external-filter".to_owned()),
        allowed: names.iter().map(|n| spec(n)).collect(),
        ..RequestSpec::default()
    }
}

fn choose(choices: &Choices, model: &str, headers: &[(&str, &str)]) -> Result<(String, Option<String>), RequestError> {
    choose_long(choices, model, headers, 0, None)
}

fn choose_long(
    choices: &Choices,
    model: &str,
    headers: &[(&str, &str)],
    prompt_tokens: u32,
    max_tokens: Option<u32>,
) -> Result<(String, Option<String>), RequestError> {
    let headers: BTreeMap<String, String> = headers.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let facts =
        RequestFacts { model, prompt_tokens, max_tokens, headers: Headers::of(&headers), ..RequestFacts::default() };
    let chosen = choices.choose(&facts)?;
    Ok((chosen.choice.name.to_string(), chosen.profile.map(|p| p.to_string())))
}

#[test]
fn locked_precedes_header_precedes_profile_precedes_model_precedes_pool() {
    let locked = ModelRule {
        models: vec!["locked".to_owned()],
        strategy: Some(spec("round-robin")),
        locked: true,
        profiles: vec![profile("default", "random", [None; 4])],
        ..ModelRule::default()
    };
    let profiled = ModelRule {
        models: vec!["profiled".to_owned(), "adapter".to_owned()],
        strategy: Some(spec("round-robin")),
        profiles: vec![profile("default", "random", [None; 4]), profile("other", "prefix-cache", [None; 4])],
        ..ModelRule::default()
    };
    let plain = ModelRule { models: vec!["plain".to_owned()], strategy: Some(spec("random")), ..ModelRule::default() };
    let rules = [locked, profiled, plain];
    let choices =
        Choices::build(&registry(), &spec("least-request"), &rules, Some(&allow(&["power-of-two"])), None).unwrap();
    let named = [("routing-strategy", "power-of-two"), ("config-profile", "other")];
    for (row, model, headers, strategy, profile) in [
        ("aibrix 8.1 locked", "locked", &named[..], "round-robin", None),
        ("aibrix 8.1 header", "profiled", &named[..], "power-of-two", None),
        ("aibrix 8.1 profile", "profiled", &named[1..], "prefix-cache", Some("other")),
        ("aibrix 8.1 default profile", "profiled", &[], "random", Some("default")),
        ("an adapter is a model of its own", "adapter", &[], "random", Some("default")),
        ("the model's", "plain", &named[1..], "random", None),
        ("aibrix 8.1 environment: the pool's", "another", &[], "least-request", None),
        ("the header for a model without a rule", "another", &named[..], "power-of-two", None),
    ] {
        let got = choose(&choices, model, headers).unwrap();
        assert_eq!((&*got.0, got.1.as_deref()), (strategy, profile), "{row}");
    }
    assert!(choose(&choices, "locked", &[("routing-strategy", "no-such")]).is_ok(), "a locked model has no choice");
    for named in ["", "  ", "no-such", "no-such:2,random"] {
        let refusal = choose(&choices, "another", &[("routing-strategy", named)]).unwrap_err();
        assert_eq!(refusal.reason, Reason::InvalidRoutingStrategy, "aibrix 8.2, `{named}`");
        assert_eq!(refusal.rejected_name.as_deref(), Some(named.trim()), "aibrix 8.2");
    }
}

#[test]
fn other_names_choose_the_same_strategy() {
    let choices =
        Choices::build(&registry(), &spec("random"), &[], Some(&allow(&["prefix-cache", "random"])), None).unwrap();
    for (named, expected) in [("prefix-aware", "prefix-cache"), ("prefix-aware:2,random:0", "prefix-cache")] {
        assert_eq!(choose(&choices, "m", &[("routing-strategy", named)]).unwrap().0, expected);
    }
}

#[test]
fn header_without_effect_reported_once() {
    for by_request in [None, Some(RequestSpec::default())] {
        let closed = Choices::build(&registry(), &spec("least-request"), &[], by_request.as_ref(), None).unwrap();
        assert_eq!([closed.report_ignored(), closed.report_ignored()], [true, false]);
    }
    let open = Choices::build(&registry(), &spec("least-request"), &[], Some(&allow(&["random"])), None).unwrap();
    assert!(!open.report_ignored());
}

#[test]
fn headers_have_no_effect_unless_configured() {
    let rule = ModelRule { profiles: vec![profile("a", "random", [None; 4])], ..ModelRule::default() };
    let closed = Choices::build(&registry(), &spec("least-request"), std::slice::from_ref(&rule), None, None).unwrap();
    let all = [("routing-strategy", "no-such"), ("config-profile", "a"), ("external-filter", "((")];
    assert_eq!(choose(&closed, "m", &all).unwrap(), ("least-request".to_owned(), None));
    let nobody = RequestSpec::default();
    let profiles_only = Choices::build(&registry(), &spec("least-request"), &[rule], Some(&nobody), None).unwrap();
    assert_eq!(choose(&profiles_only, "m", &all).unwrap(), ("random".to_owned(), Some("a".to_owned())));
}

#[test]
fn profiles_are_chosen_as_in_aibrix() {
    let some = |a, b, c, d| [a, b, c, d];
    let rule = ModelRule {
        profiles: vec![
            profile("default", "random", [None; 4]),
            profile("large-input", "prefix-cache", some(Some(8_192), None, None, None)),
            profile("offline-generation", "power-of-two", some(None, None, Some(2_048), None)),
            profile("combined", "least-request", some(Some(8_192), None, Some(2_048), None)),
            profile("short", "round-robin", some(None, Some(2_048), None, None)),
            profile("shorter", "session-affinity", some(None, Some(512), None, None)),
            profile("brief", "vtc-basic", some(None, None, None, Some(4_096))),
            profile("briefer", "prefix-cache-preble", some(None, None, None, Some(1_024))),
        ],
        ..ModelRule::default()
    };
    let choices = Choices::build(&registry(), &spec("pipeline"), &[rule], Some(&allow(&[])), None).unwrap();
    for (row, wanted, prompt, max, profile) in [
        ("aibrix 10.13 named", "offline-generation", 9_000, None, "offline-generation"),
        ("aibrix 10.13 auto, long prompt", "auto", 9_000, None, "large-input"),
        ("aibrix 10.13 auto, max 2048", "auto", 0, Some(2_048), "brief"),
        ("aibrix 10.13 auto, both", "auto", 9_000, Some(2_048), "combined"),
        ("aibrix 10.13 auto, prompt 2048", "auto", 2_048, None, "default"),
        ("aibrix 10.13 auto, prompt 100", "auto", 100, None, "shorter"),
        ("the wider of two", "auto", 600, None, "short"),
        ("aibrix 10.13 auto, max 512", "auto", 0, Some(512), "briefer"),
        ("aibrix 10.13 auto, max 4096", "auto", 0, Some(4_096), "offline-generation"),
        ("aibrix 10.13 unknown", "no-such", 100, None, "default"),
        ("aibrix 10.13 spelled otherwise", " AUTO ", 9_000, None, "large-input"),
    ] {
        let got = choose_long(&choices, "m", &[("config-profile", wanted)], prompt, max).unwrap();
        assert_eq!(got.1.as_deref(), Some(profile), "{row}");
    }
    assert_eq!(choose_long(&choices, "m", &[], 9_000, None).unwrap().1.as_deref(), Some("default"), "no header");
}

#[test]
fn default_profile_must_be_configured_or_named_default() {
    let rule = |default: Option<&str>| ModelRule {
        default_profile: default.map(str::to_owned),
        profiles: vec![profile("a", "random", [None; 4])],
        ..ModelRule::default()
    };
    let chosen = |default| {
        let choices =
            Choices::build(&registry(), &spec("least-request"), &[rule(default)], Some(&allow(&[])), None).unwrap();
        choose(&choices, "m", &[("config-profile", "no-such")]).unwrap().0
    };
    assert_eq!((&*chosen(None), &*chosen(Some("a"))), ("least-request", "random"));
}

#[test]
fn requests_may_name_allowed_strategies_alone_or_in_sums() {
    let request = allow(&["least-request", "prefix-cache", "random"]);
    let choices = Choices::build(&registry(), &spec("round-robin"), &[], Some(&request), None).unwrap();
    let ask = |name: &str| choose(&choices, "m", &[("routing-strategy", name)]);
    for (named, got) in [
        ("least-request", "least-request"),
        (" random ", "random"),
        ("prefix-cache:2,least-request", "prefix-cache:2,least-request"),
        ("prefix-cache:2", "prefix-cache"),
        ("random:1,least-request:0", "random"),
    ] {
        assert_eq!(ask(named).unwrap().0, got, "{named}");
        assert_eq!(ask(named).unwrap().0, got, "{named}, again");
    }
    for named in [
        "no-such",
        "round-robin",
        "prefix-cache,round-robin",
        "a,,b",
        "prefix-cache:-1",
        "random,least-request",
        "pd,random",
    ] {
        let error = ask(named).unwrap_err();
        assert_eq!((error.reason, error.reason.status()), (Reason::InvalidRoutingStrategy, 400), "{named}");
        assert!(error.message.contains("allowed here: least-request, prefix-cache, random"), "{named}: {error}");
    }
    let hostile: String = "x\n".repeat(40_000);
    assert!(ask(&hostile).unwrap_err().message.len() < 400);
}

#[test]
fn sums_of_requests_share_the_state_of_their_parts_and_are_bounded() {
    let request = allow(&["least-request", "vtc-basic"]);
    let choices = Choices::build(&registry(), &spec("vtc-basic"), &[], Some(&request), None).unwrap();
    let by_request = choices.by_request.as_ref().unwrap();
    assert!(Arc::ptr_eq(&choices.default.strategy, &by_request.allowed["vtc-basic"].strategy), "shared state");
    for weight in 1..1_000 {
        choose(&choices, "m", &[("routing-strategy", &format!("vtc-basic:{weight},least-request"))]).unwrap();
    }
    assert!(by_request.sums.len() <= SUMS_KEPT, "{}", by_request.sums.len());
}

#[test]
fn equal_names_with_equal_parameters_are_one_strategy() {
    let with = |parameters| StrategySpec { name: "prefix-cache".to_owned(), parameters };
    let rule = |model: &str, parameters| ModelRule {
        models: vec![model.to_owned()],
        strategy: Some(with(parameters)),
        ..ModelRule::default()
    };
    let rules =
        [rule("a", json!({"imbalance": 1})), rule("b", json!({"imbalance": 1})), rule("c", json!({"imbalance": 2}))];
    let choices = Choices::build(&registry(), &spec("random"), &rules, None, None).unwrap();
    let strategy = |model: &str| {
        let facts = RequestFacts { model, ..RequestFacts::default() };
        choices.choose(&facts).unwrap().choice.strategy
    };
    assert!(Arc::ptr_eq(&strategy("a"), &strategy("b")) && !Arc::ptr_eq(&strategy("a"), &strategy("c")));
    assert!(Choices::build(&registry(), &spec("no-such"), &[], None, None).is_err());
}

#[test]
fn reload_keeps_unchanged_strategies() {
    let rule = |window: u32| ModelRule {
        strategy: Some(StrategySpec { name: "vtc-basic".to_owned(), parameters: json!({"windowSize": window}) }),
        ..ModelRule::default()
    };
    let build = |window, previous: Option<&Choices>| {
        Choices::build(&registry(), &spec("round-robin"), &[rule(window)], Some(&allow(&["prefix-cache"])), previous)
            .unwrap()
    };
    let strategies = |c: &Choices| {
        let rule = c.other_models.as_ref().unwrap().strategy.as_ref().unwrap().strategy.clone();
        [c.default.strategy.clone(), rule, c.by_request.as_ref().unwrap().allowed["prefix-cache"].strategy.clone()]
    };
    let first = build(5, None);
    let (same, other) = (build(5, Some(&first)), build(6, Some(&first)));
    let kept =
        |c: &Choices| strategies(c).iter().zip(strategies(&first)).map(|(a, b)| Arc::ptr_eq(a, &b)).collect::<Vec<_>>();
    assert_eq!((kept(&same), kept(&other)), (vec![true; 3], vec![true, false, true]));
    assert_eq!(kept(&build(5, Some(&other))), [true, false, true], "a removed strategy is built anew");
}

#[test]
fn filter_header_is_read_where_configured() {
    let choices = Choices::build(&registry(), &spec("random"), &[], Some(&allow(&[])), None).unwrap();
    let headers = BTreeMap::from([("external-filter".to_owned(), "zone in (a,b)".to_owned())]);
    let facts = RequestFacts { headers: Headers::of(&headers), ..RequestFacts::default() };
    assert_eq!(choices.choose(&facts).unwrap().filter, LabelSelector::parse("zone in (a,b)").ok());
    let error = choose(&choices, "m", &[("external-filter", "zone in (a")]).unwrap_err();
    assert_eq!((error.reason, error.reason.status()), (Reason::InvalidEndpointFilter, 400));
    assert!(error.message.contains("external-filter"), "{error}");
}
