//! What becomes of pools that are found: their names, by what they are reached, and what they share.

use super::*;
use attache_config::{ConfigText, Sources, load, load_pool};
use attache_scheduling::Registry;

const HEAD: &str = "apiVersion: attache.dev/v1\nkind: Attache\n";

fn sources(text: &str) -> Sources {
    let text = ConfigText { name: "test".into(), bytes: format!("{HEAD}{text}").into() };
    Sources {
        registry: Registry::new(&[attache_pipeline::PLUGINS, attache_strategies::PLUGINS]),
        text: Some(text),
        ..Sources::default()
    }
}

fn settings(text: &str) -> Settings {
    load(&sources(text)).unwrap_or_else(|diagnostics| panic!("{diagnostics:?}")).0
}

fn pool(name: &str, port: u16, config: Option<&str>) -> (String, FoundPool) {
    let config = config.map(|text| FoundConfig { name: "map".into(), text: text.into() });
    (name.to_owned(), FoundPool { service: Some(format!("{name}-epp")), port, config })
}

/// Searches of `file`, each with a namespace and what it has found.
fn found(file: &Settings, findings: Vec<(&str, Finding)>) -> FoundPools {
    let read: PoolReader = Box::new(|_, text| load_pool(&sources(text)).ok().map(|(pool, _)| pool));
    let mut found = FoundPools::new(read, CancellationToken::new());
    for (template, (namespace, finding)) in file.templates.iter().zip(findings) {
        let (search, (_, told)) = (template.search.clone(), watch::channel(finding));
        found.searches.push(Search {
            search,
            namespace: namespace.into(),
            found: told,
            stop: CancellationToken::new(),
        });
    }
    found
}

fn names(settings: &Settings) -> Vec<&str> {
    settings.pools.iter().map(|pool| &*pool.name).collect()
}

const TWO: &str =
    "pools: [{name: one, kubernetes: {poolSelector: a=b}}, {name: two, kubernetes: {poolSelector: c=d}}]\n";

#[test]
fn pools_of_several_namespaces_have_namespace_in_name() {
    let file = settings(TWO);
    let of = |names: &[&str]| Finding::Found(names.iter().map(|name| pool(name, 9002, None)).collect());
    let mut apart = found(&file, vec![("a", of(&["llama", "qwen"])), ("b", of(&["llama"]))]);
    let (all, _) = apart.expand(&file);
    assert_eq!(names(&all), ["a/llama", "a/qwen", "b/llama"]);
    let services: Vec<_> = all.pools.iter().map(|pool| pool.matches.service.as_deref()).collect();
    assert_eq!(services, [Some("llama-epp.a"), Some("qwen-epp.a"), Some("llama-epp.b")]);
    assert_eq!(apart.told, BTreeSet::new());
    // In one namespace two selectors may find the same.
    let mut together = found(&file, vec![("a", of(&["llama", "qwen"])), ("a", of(&["llama"]))]);
    assert_eq!(names(&together.expand(&file).0), ["llama", "qwen"]);
    let told = together.told.first().expect("that one is left out");
    assert!(
        told.starts_with("the InferencePool `llama` in namespace `a` is not served: another pool is called"),
        "{told}"
    );
}

#[test]
fn pools_with_one_service_are_selected_by_port() {
    let file = settings(TWO);
    let behind = |service: &str, port| FoundPool { service: Some(service.into()), port, config: None };
    let pools = [
        ("a", behind("shared", 9002)),
        ("b", behind("shared", 9012)),
        ("c", behind("alone", 9002)),
        ("d", behind("same", 9002)),
        ("e", behind("same", 9002)),
    ];
    let of = |pools: &[(&str, FoundPool)]| {
        Finding::Found(pools.iter().map(|(name, pool)| ((*name).to_owned(), pool.clone())).collect())
    };
    let services =
        |all: &Settings| -> Vec<String> { all.pools.iter().filter_map(|pool| pool.matches.service.clone()).collect() };
    let by_port = "only the port of their Service tells the pools `a` and `b` apart";
    // Which search finds which of them makes no difference.
    for at in [1, pools.len()] {
        let (one, two) = pools.split_at(at);
        let mut found = found(&file, vec![("n", of(one)), ("n", of(two))]);
        assert_eq!(
            services(&found.expand(&file).0),
            ["shared.n:9002", "shared.n:9012", "alone.n", "same.n", "same.n"],
            "{at}"
        );
        let told: Vec<_> = found.told.iter().collect();
        assert!(
            told.len() == 2 && told[0].starts_with(by_port) && told[1].contains("`d` and `e` take the same requests"),
            "{told:?}"
        );
    }
    // A pool of the configuration may leave out how its Service's name goes on, and comes first.
    let named = settings(&format!(
        "pools:\n- {{name: named, match: {{service: shared}}, endpoints: ['127.0.0.1:1']}}\n{}",
        "- {name: one, kubernetes: {poolSelector: a=b}}\n"
    ));
    let mut beside = found(&named, vec![("n", of(&pools[2..3]))]);
    let _ = beside.expand(&named);
    assert_eq!(beside.told, BTreeSet::new(), "`alone.n` is another Service");
    let mut beside = found(&named, vec![("n", of(&pools[..1]))]);
    let _ = beside.expand(&named);
    let told = beside.told.first().expect("that the found one gets nothing");
    assert!(told.starts_with("the pools `named` and `a` take the same requests"), "{told}");
    // In another namespace the same name is another Service.
    let mut apart = found(&file, vec![("m", of(&pools[..1])), ("n", of(&pools[1..2]))]);
    assert_eq!(services(&apart.expand(&file).0), ["shared.m", "shared.n"]);
    assert_eq!(apart.told, BTreeSet::new());
}

#[test]
fn found_pools_share_the_queue_capacity_of_one() {
    let file = settings(
        "limits: {maxBodyBytes: 1000, maxBufferedBytes: 9000}\npools:\n- {name: named, match: {service: x}, flowControl: {enabled: true}, \
         endpoints: ['127.0.0.1:1']}\n- {name: one, kubernetes: {poolSelector: a=b}, flowControl: {enabled: true}}\n\
         - {name: two, kubernetes: {poolSelector: c=d}}\n",
    );
    let greedy =
        "limits: {maxBufferedBytes: 1024Gi}\npools: [{name: own, flowControl: {enabled: true, maxBytes: 1Gi}}]\n";
    let usual = "limits: {maxBufferedBytes: 1024Gi}\npools: [{name: own, flowControl: {enabled: true}}]\n";
    let many = (0..20).map(|n| pool(&format!("p{n:02}"), 9002, [None, Some(greedy), Some(usual)][n % 3]));
    let own = Finding::Found([pool("q", 9002, Some(greedy)), pool("without", 9002, None)].into());
    let mut found = found(&file, vec![("n", Finding::Found(many.collect())), ("n", own)]);
    let (all, expansion) = found.expand(&file);
    assert_eq!(all.pools.len(), 1 + 20 + 2);
    assert_eq!(found.queued.most(), 0, "nothing is another than before until the settings are taken up");
    found.take_up(expansion);
    let flow = |pool: &PoolSettings| pool.flow.as_ref().map(|flow| flow.settings.clone());
    let named = flow(&all.pools[0]).expect("queues");
    assert_eq!((named.max_bytes, named.shared.is_none()), (1500, true), "a third of the half that may wait is its own");
    assert_eq!(found.queued.most(), 3000, "and two thirds are that of all that two searches find");
    let of_found: Vec<_> = all.pools[1..].iter().filter_map(flow).collect();
    assert_eq!(of_found.len(), 22, "one pool has no queue, and sheds");
    for settings in of_found {
        assert!(settings.shared.is_some_and(|room| Arc::ptr_eq(&room, &found.queued)));
    }
}

#[test]
fn refused_search_delays_readiness_only_without_other_pools() {
    let file = settings(TWO);
    let served = || vec![settings("pools: [{name: a, endpoints: ['127.0.0.1:1']}]\n").pools.remove(0)];
    let nothing = || Finding::Found(Default::default());
    for (findings, alone, beside_others) in [
        ([nothing(), nothing()], true, true),
        ([nothing(), Finding::Refused], false, true),
        ([Finding::Refused, Finding::Refused], false, true),
        ([Finding::Refused, Finding::Unknown], false, false),
        ([nothing(), Finding::Unknown], false, false),
    ] {
        let said = format!("{findings:?}");
        let found = found(&file, findings.into_iter().map(|finding| ("n", finding)).collect());
        assert_eq!((found.suffice(&[]), found.suffice(&served())), (alone, beside_others), "{said}");
    }
}
