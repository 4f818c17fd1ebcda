use super::*;
use serde_json::json;

fn object(spec: Value) -> Object {
    Object { meta: Meta { name: "thing".into(), created: 7, ..Meta::default() }, spec, status: Value::Null }
}

fn read<T: FromObject>(spec: Value) -> Result<T, String> {
    T::from_object(object(spec))
}

fn target(model: &str, weight: u32) -> RewriteTarget {
    RewriteTarget { model: model.into(), weight }
}

#[test]
fn inference_pools_of_every_version_are_parsed() {
    let app: BTreeMap<String, String> = [("app".to_owned(), "vllm".to_owned())].into();
    for (spec, ports) in [
        (json!({"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}]}), vec![8000]),
        (
            json!({"selector": {"matchLabels": {"app": "vllm"}}, "targetPorts": [{"number": 8000}, {"number": 8001}],
                   "appProtocol": "http", "endpointPickerRef": {"name": "epp"}, "of a later version": [1]}),
            vec![8000, 8001],
        ),
        (json!({"selector": {"app": "vllm"}, "targetPortNumber": 8080, "extensionRef": {"name": "epp"}}), vec![8080]),
        // As the first proposal's example has it.
        (json!({"selector": {"app": "vllm"}, "targetNumber": 8080, "extensionRef": {"name": "epp"}}), vec![8080]),
    ] {
        let want = InferencePool { labels: app.clone(), ports };
        assert_eq!(read::<InferencePool>(spec.clone()), Ok(want), "{spec}");
    }
}

#[test]
fn inference_pools_invalid_for_the_api_are_invalid() {
    let labels = json!({"matchLabels": {"app": "vllm"}});
    let nine: Vec<Value> = (8000..8009).map(|number| json!({"number": number})).collect();
    for (spec, says) in [
        (json!(null), "`spec.selector` is empty"),
        (json!({"selector": {}, "targetPortNumber": 8000}), "`spec.selector` is empty"),
        (json!({"selector": {"matchLabels": {}}, "targetPortNumber": 8000}), "`spec.selector` is empty"),
        (json!({"selector": {"matchLabels": {"app": 7}}}), "`spec.selector.matchLabels`"),
        (json!({"selector": {"app": ["vllm"]}}), "`spec.selector`"),
        (json!({"selector": labels}), "got 0 ports"),
        (json!({"selector": labels, "targetPorts": nine}), "got 9 ports"),
        (json!({"selector": labels, "targetPorts": [{"number": 0}]}), "port 0"),
        (
            json!({"selector": labels, "targetPorts": [{"number": 70000}]}),
            "`spec.targetPorts`: got port 70000, 1 to 65535 are allowed",
        ),
        (json!({"selector": labels, "targetPortNumber": -1}), "`spec.targetPortNumber`: got port -1"),
        (json!({"selector": labels, "targetPortNumber": 0}), "`spec.targetPortNumber`: got port 0"),
        (json!({"selector": labels, "targetPorts": "8000"}), "`spec`"),
        (json!({"selector": labels, "targetPorts": [{"number": 8000}, {"number": 8000}]}), "port 8000 is named twice"),
        (json!("a string"), "`spec`"),
    ] {
        let error = read::<InferencePool>(spec.clone()).unwrap_err();
        assert!(error.contains(says), "{spec}: {error}");
    }
}

#[test]
fn a_pod_is_ready_by_its_condition_alone() {
    let pod = |status: Value| {
        let whole = Object { status, ..object(Value::Null) };
        let read = Pod::from_object(whole.clone());
        assert_eq!(read, Pod::from_object(whole.trimmed(ObjectKind::Pod)), "what is kept of it says the same");
        read
    };
    let ready = |status: &str| json!([{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": status}]);
    for (status, want) in [
        (json!({"podIP": "10.0.0.1", "conditions": ready("True")}), (Some("10.0.0.1"), true)),
        (json!({"podIP": "10.0.0.1", "conditions": ready("False")}), (Some("10.0.0.1"), false)),
        (json!({"podIP": "10.0.0.1", "conditions": ready("Unknown")}), (Some("10.0.0.1"), false)),
        (json!({"podIP": "10.0.0.1", "phase": "Running"}), (Some("10.0.0.1"), false)),
        (
            json!({"podIP": "fd00::1", "conditions": ready("True"), "podIPs": [{"ip": "fd00::1"}]}),
            (Some("fd00::1"), true),
        ),
        (json!({"podIP": "", "conditions": ready("True")}), (None, true)),
        (json!({"conditions": null}), (None, false)),
        (Value::Null, (None, false)),
    ] {
        let read = pod(status.clone()).unwrap();
        let ip = read.ip.map(|ip| ip.to_string());
        assert_eq!((ip.as_deref(), read.ready), want, "{status}");
    }
    assert!(pod(json!({"podIP": "localhost"})).unwrap_err().contains("`localhost` is not an address"));
    assert!(pod(json!({"conditions": "none"})).unwrap_err().contains("`status`"));
}

fn named(pool: &str) -> PoolRef {
    PoolRef { name: pool.into(), ..PoolRef::default() }
}

#[test]
fn objectives_and_models_have_a_priority() {
    let pool = json!({"name": "p"});
    for (priority, want) in [(json!(null), 0), (json!(5), 5), (json!(-3), -3)] {
        let read: Objective = read(json!({"poolRef": pool, "priority": priority})).unwrap();
        assert_eq!(read, Objective { pool: named("p"), priority: want });
    }
    for (criticality, want) in [
        (json!(null), None),
        (json!("Critical"), Some(CRITICAL_PRIORITY)),
        (json!("Standard"), Some(0)),
        (json!("Sheddable"), Some(SHEDDABLE_PRIORITY)),
    ] {
        let read: InferenceModel = read(json!({"poolRef": pool, "criticality": criticality})).unwrap();
        assert_eq!(read.priority, want, "{criticality}");
    }
    for (spec, says) in [
        (json!({}), "`spec.poolRef.name` is missing"),
        (json!({"poolRef": {"kind": "Service", "name": "p"}}), "only `InferencePool`"),
        (json!({"poolRef": {"name": "p"}, "priority": "high"}), "`spec`"),
    ] {
        assert!(read::<Objective>(spec.clone()).unwrap_err().contains(says), "{spec}");
    }
    let odd = read::<InferenceModel>(json!({"poolRef": {"name": "p"}, "criticality": "Urgent"})).unwrap_err();
    assert!(odd.contains("got `Urgent`"), "{odd}");
}

#[test]
fn rewrites_and_models_name_targets() {
    let rewrite: Rewrite = read(
        json!({"poolRef": {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "p"}, "rules": [
            {"matches": [{"model": {"type": "Exact", "value": "gpt"}}, {"model": {"value": "gpt-4"}}],
             "targets": [{"weight": 70, "modelRewrite": "a"}, {"weight": 30, "modelRewrite": "b"}]},
            {"targets": [{"modelRewrite": "c"}]},
            {"matches": [{"header": {"name": "x-team", "value": "red"}}], "targets": [{"modelRewrite": "never"}]},
        ]}),
    )
    .unwrap();
    let rules = vec![
        RewriteRule { models: vec!["gpt".into(), "gpt-4".into()], targets: vec![target("a", 70), target("b", 30)] },
        RewriteRule { models: vec![], targets: vec![target("c", 1)] },
    ];
    let pool =
        PoolRef { group: Some(PoolGroup::Stable.as_str().into()), kind: Some("InferencePool".into()), ..named("p") };
    assert_eq!(rewrite, Rewrite { pool, created: 7, rules });
    let odd = json!({"poolRef": {"name": "p"}, "rules": [{"matches": [{"model": {"type": "Prefix", "value": "g"}}]}]});
    assert!(read::<Rewrite>(odd).unwrap_err().contains("got `Prefix`"));

    // The two examples of the first proposal: a name of its own, and two targets.
    let plain: InferenceModel = read(json!({"poolRef": {"name": "base-model-pool"}})).unwrap();
    assert_eq!((plain.model.as_str(), plain.targets), ("thing", vec![]));
    let split: InferenceModel = read(json!({
        "modelName": "npc-bot", "criticality": "Critical", "poolRef": {"name": "base-model-pool"},
        "targetModels": [{"name": "npc-bot-v1", "weight": 50}, {"name": "npc-bot-v2", "weight": 50}],
    }))
    .unwrap();
    assert_eq!(split.model, "npc-bot");
    assert_eq!(split.targets, [target("npc-bot-v1", 50), target("npc-bot-v2", 50)]);
}
