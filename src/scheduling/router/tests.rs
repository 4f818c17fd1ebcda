use super::*;
use crate::Choices;
use attache_pool::health::HealthPolicy;
use attache_types::rng::for_request;

fn pool(name: &str, matches: PoolMatch) -> Pool {
    let strategy = crate::tests::build("random");
    let scheduler = Scheduler::new(Choices::only("test", strategy), HealthPolicy::default(), 1);
    Pool { matches, ..Pool::new(name.into(), Arc::default(), scheduler, Duration::from_secs(2)) }
}

fn by_model(name: &str, models: &[&str]) -> Pool {
    pool(name, PoolMatch { models: models.iter().map(|m| (*m).to_owned()).collect(), ..PoolMatch::default() })
}

fn router(pools: Vec<Pool>) -> Router {
    Router::new(pools.into_iter().map(Arc::new).collect())
}

fn route(
    router: &Router,
    model: Option<&str>,
    authority: &str,
    headers: &[(&str, &str)],
) -> Result<String, RequestError> {
    let header = |name: &str| headers.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
    router.route(RouteFacts { model, authority, called: "" }, header).map(|(_, p)| p.name.to_string())
}

#[test]
fn header_precedes_authority_precedes_model_precedes_the_catch_all() {
    let header = Some(("x-tier".to_owned(), "gold".to_owned()));
    let authority = Some("llm.test".to_owned());
    let models = vec!["m".to_owned()];
    let router = router(vec![
        pool("any", PoolMatch::default()),
        pool("any too", PoolMatch::default()),
        pool("model", PoolMatch { models: models.clone(), ..PoolMatch::default() }),
        pool("authority", PoolMatch { authority: authority.clone(), ..PoolMatch::default() }),
        pool(
            "authority and model",
            PoolMatch { authority: authority.clone(), models: models.clone(), ..PoolMatch::default() },
        ),
        pool("header", PoolMatch { header: header.clone(), ..PoolMatch::default() }),
        pool("all three", PoolMatch { header, authority, models, service: None }),
    ]);
    let gold = [("x-tier", "gold")];
    for (model, host, headers, expected) in [
        (None, "", &[][..], "any"),
        (Some("other"), "other.test", &[], "any"),
        (Some("m"), "", &[], "model"),
        (Some("other"), "llm.test", &[], "authority"),
        (None, "llm.test", &[], "authority"),
        (Some("m"), "llm.test", &[], "authority and model"),
        (Some("m"), "", &gold, "header"),
        (Some("other"), "llm.test", &gold, "header"),
        (Some("m"), "llm.test", &gold, "all three"),
        (Some("m"), "llm.test", &[("x-tier", "silver")], "authority and model"),
    ] {
        assert_eq!(route(&router, model, host, headers).unwrap(), expected, "{model:?} {host} {headers:?}");
    }
    assert_eq!(router.headers().collect::<Vec<_>>(), ["x-tier", "x-tier"]);
    assert_eq!(router.pools().len(), 7);
}

#[test]
fn authorities_are_compared_without_case_and_port() {
    for (configured, got, same) in [
        ("llm.test", "LLM.test", true),
        ("llm.test", "llm.test:8080", true),
        ("llm.test:8080", "llm.test:8080", true),
        ("llm.test:8080", "llm.test", false),
        ("llm.test:8080", "llm.test:8081", false),
        ("llm.test", "llm.test.evil", false),
        ("llm.test", "llm.test:80a", false),
        ("[::1]", "[::1]:80", true),
        ("llm.test", "", false),
    ] {
        assert_eq!(same_authority(configured, got), same, "{configured} {got}");
    }
}

#[test]
fn error_for_an_unknown_model_names_it() {
    let models: Vec<String> = (0..7).map(|i| format!("model-{i}")).collect();
    let models: Vec<&str> = models.iter().rev().map(String::as_str).collect();
    let router = router(vec![by_model("p", &models)]);
    let error = route(&router, Some("../../x\n"), "", &[]).unwrap_err();
    assert_eq!((error.reason, error.param), (Reason::ModelNotFound, Some("model")));
    assert_eq!(
        error.message,
        "the model `../../x` does not exist; known models: model-0, model-1, model-2, model-3, model-4, …"
    );
    let long = "x".repeat(1_000);
    assert!(route(&router, Some(&long), "", &[]).unwrap_err().message.len() < 200);
    let error = route(&router, None, "", &[]).unwrap_err();
    assert_eq!(error.reason, Reason::NoPool, "a request without a model has none that could be unknown");
}

#[test]
fn unknown_host_has_no_pool() {
    let only = pool("p", PoolMatch { authority: Some("a.test".into()), ..PoolMatch::default() });
    assert_eq!(route(&router(vec![only]), Some("m"), "b.test", &[]).unwrap_err().reason, Reason::NoPool);
    assert_eq!(route(&Router::default(), Some("m"), "", &[]).unwrap_err().reason, Reason::NoPool);
}

#[test]
fn pool_that_rejects_unknown_models_knows_its_rewrites() {
    let mut strict = pool("strict", PoolMatch::default());
    strict.switches.reject_unknown_models = true;
    strict.rewrites.exact.insert("alias".into(), vec![target("real", 1)]);
    let router = router(vec![strict]);
    assert!(route(&router, Some("alias"), "", &[]).is_ok());
    assert_eq!(route(&router, Some("other"), "", &[]).unwrap_err().reason, Reason::ModelNotFound);
    assert!(route(&router, None, "", &[]).is_ok(), "a request without a model is not rejected for it");

    let mut named = by_model("named", &["base"]);
    named.rewrites.exact.insert("alias".into(), vec![target("base", 1)]);
    let router = super::tests::router(vec![named]);
    assert!(route(&router, Some("alias"), "", &[]).is_ok(), "an alias leads to its pool");
}

/// A pool whose servers report these models.
fn serving(pool: Pool, models: &[&str]) -> Pool {
    let data: Vec<_> = models.iter().map(|id| serde_json::json!({"id": id, "owned_by": pool.name})).collect();
    pool.models.store(ModelList::read(serde_json::json!({ "data": data }).to_string().as_bytes()).unwrap());
    pool
}

#[test]
fn called_service_precedes_all_other_conditions() {
    let of = |service: &str| PoolMatch { service: Some(service.into()), ..PoolMatch::default() };
    let gold = PoolMatch { header: Some(("x-tier".into(), "gold".into())), ..PoolMatch::default() };
    let large = PoolMatch { models: vec!["m".into()], ..of("large-epp.team-a") };
    let router = router(vec![
        pool("gold", gold),
        pool("small", of("small-epp.team-a")),
        pool("large", large),
        pool("bare", of("bare")),
    ]);
    let asked = |called: &str, tier: &'static str| {
        let facts = RouteFacts { model: Some("m"), authority: "llm.test", called };
        router.route(facts, |name| (name == "x-tier").then_some(tier)).map(|(_, pool)| pool.name.to_string())
    };
    for (called, pool) in [
        ("small-epp.team-a.svc:9002", "small"),
        ("small-epp.team-a.svc.cluster.local:9002", "small"),
        ("outbound~9002~~small-epp.team-a.svc.cluster.local", "small"),
        ("Small-EPP", "small"),
        ("large-epp", "large"),
        ("bare.team-b:9002", "bare"),
        ("small-epp.team-b.svc:9002", "gold"),
        ("small", "gold"),
        ("", "gold"),
    ] {
        assert_eq!(asked(called, "gold").as_deref(), Ok(pool), "called {called:?}");
    }
    let refused = asked("picker:9002", "silver").unwrap_err();
    assert!(refused.to_string().contains("`picker:9002`"), "{refused}: an operator has to know");
}

#[test]
fn pools_behind_one_service_are_distinguished_by_port() {
    let of = |service: &str| PoolMatch { service: Some(service.into()), ..PoolMatch::default() };
    let router =
        router(vec![pool("a", of("epp.team:9002")), pool("b", of("epp.team:9012")), pool("any", of("epp.other"))]);
    let asked = |called: &str| {
        let facts = RouteFacts { model: None, authority: "llm.test", called };
        router.route(facts, |_| None).map(|(_, pool)| pool.name.to_string())
    };
    for (called, pool) in [
        ("epp.team.svc:9002", Some("a")),
        ("epp.team.svc:9012", Some("b")),
        ("outbound~9012~~epp.team.svc.cluster.local", Some("b")),
        ("outbound~9002~~epp.team.svc.cluster.local", Some("a")),
        ("epp.team.svc:9022", None),
        ("outbound~9022~~epp.team.svc.cluster.local", None),
        // A call without a port selects the first.
        ("epp.team", Some("a")),
        ("epp.other:1", Some("any")),
    ] {
        assert_eq!(asked(called).ok().as_deref(), pool, "called {called:?}");
    }
}

#[test]
fn called_port_precedes_a_service_without_a_port() {
    let of = |service: &str| PoolMatch { service: Some(service.into()), ..PoolMatch::default() };
    let gold = PoolMatch { header: Some(("x-tier".into(), "gold".into())), ..of("epp.team") };
    let router = router(vec![pool("any", of("epp.team")), pool("gold", gold), pool("port", of("epp.team:9012"))]);
    let asked = |called: &str, tier: &'static str| {
        let facts = RouteFacts { model: None, authority: "llm.test", called };
        router.route(facts, |_| Some(tier)).map(|(_, pool)| pool.name.to_string())
    };
    for (called, tier, pool) in [
        ("epp.team.svc:9012", "", "port"),
        ("outbound~9012~~epp.team.svc.cluster.local", "", "port"),
        ("epp.team.svc:9012", "gold", "port"),
        ("epp.team.svc:9002", "", "any"),
        ("epp.team.svc:9002", "gold", "gold"),
        // The call has no port, so a condition on the port has no precedence.
        ("epp.team", "", "any"),
        ("epp.team", "gold", "gold"),
    ] {
        assert_eq!(asked(called, tier).as_deref(), Ok(pool), "called {called:?} by {tier:?}");
    }
}

#[test]
fn models_are_listed_in_the_pool_that_serves_them() {
    let mut renaming = serving(by_model("renaming", &["named", "base"]), &["base", "adapter"]);
    renaming.rewrites.exact.insert("alias".into(), vec![target("absent", 1), target("base", 1)]);
    let mut rules = PoolRules { models_only: true, ..PoolRules::default() };
    rules.rewrites.exact.insert("told".into(), vec![target("told-v1", 1)]);
    rules.reserved.insert("soon".into());
    let strict = pool("strict", PoolMatch { authority: Some("strict.test".into()), ..PoolMatch::default() });
    strict.rules.store(rules);
    let gold = PoolMatch { header: Some(("x-tier".into(), "gold".into())), ..PoolMatch::default() };
    let router = router(vec![
        serving(pool("any", PoolMatch::default()), &["base", "other"]),
        renaming,
        serving(strict, &["told-v1", "soon"]),
        serving(pool("gold", gold), &["other", "large"]),
    ]);
    let listed = |authority, header: Option<(&str, &'static str)>| {
        let facts = RouteFacts { model: None, authority, called: "" };
        let list = router.models(facts, |name| header.filter(|(n, _)| *n == name).map(|(_, v)| v));
        let entry =
            |e: &serde_json::Value| format!("{}:{}", e["id"].as_str().unwrap(), e["owned_by"].as_str().unwrap());
        list.to_json()["data"].as_array().unwrap().iter().map(entry).collect::<Vec<_>>().join(" ")
    };
    // A pool with a condition on the model lists the models that it serves; the next pool lists the others.
    assert_eq!(listed("", None), "alias:renaming base:renaming named:attache other:any");
    assert_eq!(listed("strict.test", None), "told:strict", "what is reserved or unknown would be refused");
    assert_eq!(listed("", Some(("x-tier", "gold"))), "large:gold other:gold");
    for id in ["alias", "base", "named", "other"] {
        let owner = route(&router, Some(id), "", &[]).unwrap();
        assert_eq!(owner, if id == "other" { "any" } else { "renaming" }, "{id} is served where it is listed");
    }
}

fn target(model: &str, weight: u32) -> RewriteTarget {
    RewriteTarget { model: model.into(), weight }
}

/// How often each target is drawn in 10,000 requests for `model`.
fn drawn(rewrites: &ModelRewrites, model: &str) -> std::collections::BTreeMap<Option<Arc<str>>, u32> {
    let mut counts = std::collections::BTreeMap::new();
    for sequence in 0..10_000 {
        *counts.entry(rewrites.rewrite(model, &mut for_request(1, sequence))).or_default() += 1;
    }
    counts
}

#[test]
fn rewrites_draw_by_weight() {
    let exact = [
        ("split", vec![target("a", 70), target("b", 30)]),
        ("zero", vec![target("a", 0), target("b", 0)]),
        ("one", vec![target("a", 1)]),
        ("never b", vec![target("a", 5), target("b", 0), target("c", 5)]),
        ("huge", vec![target("a", u32::MAX), target("b", u32::MAX)]),
        ("empty", vec![]),
    ];
    let rewrites = ModelRewrites { exact: exact.map(|(n, t)| (n.to_owned(), t)).into(), any: vec![] };
    for (model, expected) in [
        ("split", vec![("a", 7_000), ("b", 3_000)]),
        ("zero", vec![("a", 5_000), ("b", 5_000)]),
        ("one", vec![("a", 10_000)]),
        ("never b", vec![("a", 5_000), ("c", 5_000)]),
        ("huge", vec![("a", 5_000), ("b", 5_000)]),
    ] {
        let counts = drawn(&rewrites, model);
        assert_eq!(counts.len(), expected.len(), "{model}: {counts:?}");
        for (name, share) in expected {
            let got = counts[&Some(Arc::from(name))];
            assert!(got.abs_diff(share) <= 200, "{model}: {got} of {share} for {name}");
        }
    }
    assert_eq!(drawn(&rewrites, "empty").into_keys().collect::<Vec<_>>(), [None]);
    assert_eq!(drawn(&rewrites, "unknown").into_keys().collect::<Vec<_>>(), [None], "no rule, no change");
}

#[test]
fn exact_rule_precedes_the_general_one() {
    let rewrites = ModelRewrites {
        exact: [("gpt-4".to_owned(), vec![target("llama", 1)])].into(),
        any: vec![target("default", 1)],
    };
    let one = |model| rewrites.rewrite(model, &mut for_request(0, 0)).unwrap();
    assert_eq!((&*one("gpt-4"), &*one("gpt-5")), ("llama", "default"));
}

#[test]
fn loopback_call_reaches_the_only_pool_whatever_its_service() {
    let of = |service: &str| PoolMatch { service: Some(service.into()), ..PoolMatch::default() };
    let asked = |router: &Router, called: &str| {
        let facts = RouteFacts { model: None, authority: "llm.test", called };
        router.route(facts, |_| None).map(|(_, pool)| pool.name.to_string()).map_err(|e| e.reason)
    };
    let (one, two) =
        (router(vec![pool("a", of("epp.team"))]), router(vec![pool("a", of("epp.team")), pool("b", of("other.team"))]));
    for called in ["localhost:9002", "LOCALHOST", "127.0.0.1:9002", "[::1]:9002"] {
        assert_eq!(asked(&one, called).as_deref(), Ok("a"), "called {called:?}");
        assert_eq!(asked(&two, called), Err(Reason::NoPool), "called {called:?}: which of the two is not known");
    }
    for called in ["other.team:9002", "localhost.team", "10.0.0.1:9002", ""] {
        assert_eq!(asked(&one, called), Err(Reason::NoPool), "called {called:?}");
    }
}

#[test]
fn requests_without_a_model_get_the_default_of_the_pool_that_serves_it() {
    let named = |model: &str| Some(DefaultModel::Named(model.to_owned()));
    let default_of = |router: &Router, headers: &[(&str, &str)]| {
        let header = |name: &str| headers.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
        router.default_model(RouteFacts { model: None, authority: "", called: "" }, header)
    };
    assert_eq!(default_of(&router(vec![by_model("only", &["m"])]), &[]), named("m"));
    assert_eq!(default_of(&router(vec![by_model("two", &["m", "n"])]), &[]), None);
    assert_eq!(default_of(&router(vec![serving(pool("served", PoolMatch::default()), &["m"])]), &[]), named("m"));
    assert_eq!(default_of(&router(vec![pool("unknown", PoolMatch::default())]), &[]), None);
    let with_default = |pool: Pool, model: &str| Pool { default_model: Some(model.to_owned()), ..pool };
    let gold = PoolMatch { header: Some(("x-tier".into(), "gold".into())), ..PoolMatch::default() };
    let several = router(vec![
        by_model("a", &["m"]),
        with_default(pool("gold", gold), "large"),
        with_default(by_model("b", &["n"]), "n"),
    ]);
    assert_eq!(default_of(&several, &[]), named("n"), "without a default, a pool has none beside other pools");
    assert_eq!(default_of(&several, &[("x-tier", "gold")]), named("large"));
    let elsewhere = router(vec![by_model("a", &["m"]), with_default(by_model("b", &["n"]), "m")]);
    assert_eq!(default_of(&elsewhere, &[]), None, "requests for that model go to another pool");
}
