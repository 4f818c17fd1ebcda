//! Unit tests of `plan.rs`.

use super::*;

#[test]
fn commas_split_where_they_are_not_inside() {
    assert_eq!(split("a, b ,,c"), ["a", "b", "c"]);
    assert_eq!(split(r#"a={"x":[1,2],"y":"},{"},b"#), [r#"a={"x":[1,2],"y":"},{"}"#, "b"]);
    assert_eq!(split(r#"a={"x":"\",{"},b"#), [r#"a={"x":"\",{"}"#, "b"]);
    assert_eq!(split(""), [""; 0]);
}

#[test]
fn compared_policies_take_labels_and_parameters_in_json_or_yaml() {
    let overrides = attache_config::Overrides { endpoints: vec!["127.0.0.1:1".to_owned()], ..Default::default() };
    let settings = crate::cli::source::ReloadSource::new(None, None, overrides).read().settings.unwrap();
    let base = &settings.pools[0];
    let read = |path: &Path| -> anyhow::Result<PoolSettings> { bail!("file {}", path.display()) };
    let compared = |spelling: &str| policies(base, &[spelling.to_owned()], read);
    for (spelling, name, strategy, parameters) in [
        ("random", "random", "random", Value::Null),
        ("a=least-request", "a", "least-request", Value::Null),
        ("a=least-request+at-once", "a+at-once", "least-request", Value::Null),
        (
            "predicted-latency={workPrice: 0}",
            "predicted-latency={workPrice: 0}",
            "predicted-latency",
            serde_json::json!({"workPrice": 0}),
        ),
        (r#"b=predicted-latency={"workPrice": 0.5}"#, "b", "predicted-latency", serde_json::json!({"workPrice": 0.5})),
    ] {
        let policy = compared(spelling).unwrap().pop().unwrap();
        assert_eq!((policy.name.as_str(), policy.pool.strategy.as_str()), (name, strategy), "{spelling}");
        assert_eq!(policy.pool.strategy_parameters, parameters, "{spelling}");
    }
    assert_eq!(compared("a=other.yaml").unwrap_err().to_string(), "file other.yaml");
    let error = format!("{:#}", compared("predicted-latency={workPrice: [}").unwrap_err());
    assert!(error.contains("as in `predicted-latency={key: 1, other: two}`"), "{error}");
}

#[test]
fn events_are_about_blocks_of_one_size() {
    let size = |list| block_size(&servers(list, None).unwrap());
    assert_eq!((size("prefill-6000*2").unwrap(), size("8b-h100*2").unwrap()), (512, 16));
    let error = size("prefill-6000,8b-h100").unwrap_err().to_string();
    assert!(error.contains("{16, 512}"), "{error}");
}

#[test]
fn servers_by_profile_speed_and_number() {
    let fleet = servers("8b-h100:prefill*2,small-l40s@0.5:decode,8b-h100", None).unwrap();
    let each: Vec<_> = fleet.iter().map(|s| (s.engine.latency.speed, s.role.as_deref())).collect();
    assert_eq!(each, [(1.0, Some("prefill")), (1.0, Some("prefill")), (0.5, Some("decode")), (1.0, None)]);
    assert_eq!(servers("8b-h100,small-l40s@0.5", Some(5)).unwrap().len(), 5);
    for (bad, part) in [
        ("", "no servers"),
        ("8b-h10", "did you mean `8b-h100`"),
        ("8b-h100*x", "`x` is no number"),
        ("8b-h100@fast", "`fast` is no speed"),
        ("8b-h100@0", "greater than 0"),
        ("8b-h100:prefil*2", "`prefil` is no role; decode, prefill, both"),
        ("8b-h100*99999", "at most"),
    ] {
        let error = format!("{:#}", servers(bad, None).unwrap_err());
        assert!(error.contains(part), "{bad}: {error}");
    }
    assert!(servers("8b-h100", Some(0)).is_err());
}

#[test]
fn changes_in_words() {
    let fleet = servers("8b-h100:decode", None).unwrap();
    let one = |text| change(text, &fleet).unwrap();
    assert_eq!(one("10m lose 3").at, Timestamp(600_000_000_000));
    assert_eq!(one("10m lose 3").change, FleetChange::Lose(3));
    assert_eq!(one("0 restart 0").change, FleetChange::Restart(0));
    assert_eq!(one("1s join").change, FleetChange::Join(Box::new(fleet[0].engine.clone()), Some("decode".into())));
    assert!(matches!(one("1s join small-l40s").change, FleetChange::Join(engine, None) if *engine != fleet[0].engine));
    for bad in ["", "10m", "lose 3", "10m lose", "10m lose x", "10m explode 3", "10m lose 3 4", "1s join nobody"] {
        assert!(change(bad, &fleet).is_err(), "{bad}");
    }
}

#[test]
fn changes_that_can_not_happen_are_refused() {
    let fleet = servers("8b-h100*2", None).unwrap();
    let changes = |words: &[&str]| words.iter().map(|word| change(word, &fleet).unwrap()).collect::<Vec<_>>();
    assert!(possible(&changes(&["1s restart 1", "2s lose 1", "3s join", "4s lose 2"]), 2).is_ok());
    for (words, part) in [
        (&["10m lose 30"][..], "after 600s: there is no server 30; there are 2"),
        (&["1s lose 2", "2s join"], "after 1s: there is no server 2"),
        (&["1s lose 0", "2s restart 0"], "after 2s: server 0 was lost before"),
    ] {
        let error = possible(&changes(words), 2).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn deciders_multiply_policies_and_give_them_names() {
    let base = || vec![Policy { name: "random".to_owned(), pool: pool() }];
    let named = |words: &[&str], with_roles| {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        let all = split_by(base(), &words, with_roles).unwrap().into_iter();
        all.map(|p| (p.name, p.pool.disaggregation.map(|d| d.split.decider))).collect::<Vec<_>>()
    };
    assert_eq!(named(&[], false), [("random".to_owned(), None)]);
    assert_eq!(named(&[], true), [("random".to_owned(), Some(Decider::Predicted))]);
    assert_eq!(named(&["never"], true), [("random".to_owned(), Some(Decider::Never))]);
    let two = named(&["always", "prefix-based:16"], true);
    let prefix = Decider::PrefixBased { non_cached_tokens: 16, prompt_tokens: 0 };
    assert_eq!(two[0], ("random+always".to_owned(), Some(Decider::Always)));
    assert_eq!(two[1], ("random+prefix-based:16".to_owned(), Some(prefix)));
    for bad in ["sometimes", "prefix-based", "prefix-based:x", "always:1"] {
        assert!(decider(bad).is_err(), "{bad}");
    }
}

fn pool() -> PoolSettings {
    let overrides = attache_config::Overrides { endpoints: vec!["127.0.0.1:8000".to_owned()], ..Default::default() };
    let settings = crate::cli::source::ReloadSource::new(None, None, overrides).read().settings;
    settings.unwrap().pools.remove(0)
}
