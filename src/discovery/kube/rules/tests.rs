use super::super::conditions::Condition;
use super::super::objects::{Meta, Object, ServedPool};
use super::*;
use attache_pool::source::PoolGroup;
use attache_types::rng::for_request;
use serde_json::{Value, json};

/// The pool of these tests.
const P: ServedPool<'static> = ServedPool { name: "p", group: Some(PoolGroup::Stable) };

fn object(name: &str, created: i64, spec: Value) -> Object {
    let meta = Meta { name: name.into(), uid: format!("{name}-uid"), created, ..Meta::default() };
    Object { meta, spec, status: Value::Null }
}

fn listed(rules: &mut Rules, kind: ObjectKind, objects: Vec<Object>) {
    rules.apply(kind, ObjectChange::ListBegun).unwrap();
    for object in objects {
        rules.apply(kind, ObjectChange::Listed(object)).unwrap();
    }
    rules.apply(kind, ObjectChange::ListDone).unwrap();
}

/// Models, and their targets with weights.
type Rule<'a> = (&'a [&'a str], &'a [(&'a str, u32)]);

fn rewrite(name: &str, created: i64, rules: &[Rule<'_>]) -> Object {
    let rule = |(models, targets): &Rule<'_>| {
        let matches: Vec<Value> = models.iter().map(|m| json!({"model": {"type": "Exact", "value": m}})).collect();
        let targets: Vec<Value> = targets.iter().map(|(m, w)| json!({"modelRewrite": m, "weight": w})).collect();
        json!({"matches": matches, "targets": targets})
    };
    let rules: Vec<Value> = rules.iter().map(rule).collect();
    object(name, created, json!({"poolRef": {"name": "p"}, "rules": rules}))
}

fn model(name: &str, created: i64, model: &str, targets: &[(&str, u32)]) -> Object {
    let targets: Vec<Value> = targets.iter().map(|(m, w)| json!({"name": m, "weight": w})).collect();
    object(name, created, json!({"poolRef": {"name": "p"}, "modelName": model, "targetModels": targets}))
}

fn shown(rules: &PoolRules, model: &str) -> Vec<(String, u32)> {
    let targets = rules.rewrites.exact.get(model).unwrap_or(&rules.rewrites.any);
    targets.iter().map(|t| (t.model.to_string(), t.weight)).collect()
}

fn one(model: &str, weight: u32) -> Vec<(String, u32)> {
    vec![(model.to_owned(), weight)]
}

#[test]
fn rule_precedence_exact_then_older_then_first() {
    let mut rules = Rules::default();
    listed(
        &mut rules,
        ObjectKind::Rewrite(KindOrigin::Gie),
        vec![
            rewrite("young", 20, &[(&["m"], &[("young", 1)]), (&[], &[("young-any", 1)]), (&["n"], &[("n", 1)])]),
            rewrite("old", 10, &[(&["m"], &[("first", 1)]), (&["m"], &[("second", 1)]), (&["empty"], &[])]),
            rewrite("a-twin", 20, &[(&["n"], &[("twin", 1)])]),
        ],
    );
    let of_pool = rules.of_pool(P);
    assert_eq!(shown(&of_pool, "m"), one("first", 1));
    assert_eq!(shown(&of_pool, "n"), one("twin", 1), "of the same second: by name");
    assert_eq!(shown(&of_pool, "empty"), one("young-any", 1), "a rule without targets says nothing");
    assert_eq!(shown(&of_pool, "other"), one("young-any", 1));
    assert_eq!(rules.of_pool(ServedPool { name: "another", ..P }), PoolRules::default());
    assert!(!of_pool.models_only);
}

#[test]
fn llm_d_kind_hides_gie_kind_if_installed() {
    let mut rules = Rules::default();
    let objective =
        |name: &str, priority: i32| object(name, 1, json!({"poolRef": {"name": "p"}, "priority": priority}));
    listed(&mut rules, ObjectKind::Objective(KindOrigin::Gie), vec![objective("fast", 1), objective("slow", -1)]);
    assert_eq!(rules.of_pool(P).objectives, [("fast".to_owned(), 1), ("slow".to_owned(), -1)].into());
    listed(&mut rules, ObjectKind::Objective(KindOrigin::LlmD), vec![objective("fast", 9)]);
    assert_eq!(rules.of_pool(P).objectives, [("fast".to_owned(), 9)].into());
    assert!(rules.not_installed(ObjectKind::Objective(KindOrigin::LlmD)), "it was");
    assert!(!rules.not_installed(ObjectKind::Objective(KindOrigin::LlmD)), "it was not");
    assert_eq!(rules.of_pool(P).objectives.len(), 2);
}

#[test]
fn inference_models_define_all_models_once_one_exists() {
    let mut rules = Rules::default();
    listed(&mut rules, ObjectKind::Model, vec![]);
    assert!(!rules.of_pool(P).models_only);
    let critical = json!({"poolRef": {"name": "p"}, "modelName": "split", "criticality": "Critical", "targetModels": [
        {"name": "v1", "weight": 50}, {"name": "v2", "weight": 50}]});
    listed(
        &mut rules,
        ObjectKind::Model,
        vec![
            model("plain", 1, "plain", &[]),
            model("late", 9, "plain", &[("stolen", 1)]),
            object("split", 2, critical),
            model("reserved", 3, "reserved", &[("nothing", 0)]),
            model("elsewhere", 4, "rewritten", &[("model", 1)]),
        ],
    );
    listed(
        &mut rules,
        ObjectKind::Rewrite(KindOrigin::Gie),
        vec![rewrite("r", 99, &[(&["rewritten"], &[("rewrite", 1)])])],
    );
    let of_pool = rules.of_pool(P);
    assert!(of_pool.models_only);
    assert_eq!(shown(&of_pool, "plain"), one("plain", 1), "the older one has the name");
    let nameless: Vec<String> =
        rules.reports(P, &[]).into_iter().filter(|r| r.dispute().is_some()).map(|r| r.name).collect();
    assert_eq!(nameless, ["late"]);
    assert_eq!(shown(&of_pool, "split"), [("v1".to_owned(), 50), ("v2".to_owned(), 50)]);
    assert_eq!(shown(&of_pool, "rewritten"), one("rewrite", 1), "an exact rewrite outranks a model");
    assert_eq!(of_pool.reserved, ["reserved".to_owned()].into());
    assert!(!of_pool.rewrites.exact.contains_key("reserved"));
    assert_eq!(of_pool.priorities.get("split"), Some(&10));
    assert_eq!(of_pool.priorities.get("plain"), Some(&0));
    assert_eq!(of_pool.priorities.get("unknown"), None);
}

#[test]
fn weights_share_the_traffic_and_all_zero_share_it_evenly() {
    let mut rules = Rules::default();
    let split: &[(&str, u32)] = &[("a", 70), ("b", 30)];
    let zero: &[(&str, u32)] = &[("a", 0), ("b", 0)];
    listed(
        &mut rules,
        ObjectKind::Rewrite(KindOrigin::LlmD),
        vec![rewrite("r", 1, &[(&["split"], split), (&["zero"], zero)])],
    );
    let rewrites = rules.of_pool(P).rewrites;
    let share = |model: &str| {
        let drawn = (0..4_000u64).filter(|n| rewrites.rewrite(model, &mut for_request(5, *n)).as_deref() == Some("a"));
        drawn.count() as f64 / 4_000.0
    };
    // Four standard deviations of 4,000 draws are below 0.032.
    assert!((share("split") - 0.7).abs() < 0.032, "{}", share("split"));
    assert!((share("zero") - 0.5).abs() < 0.032, "{}", share("zero"));
}

/// Who has which name, by object, as it is to be told: `True Accepted` or `False ModelNameInUse`, and who else has it.
fn told(rules: &Rules) -> Vec<(String, String)> {
    let report = |r: Report| {
        let [accepted, _] = r.wanted;
        (r.name, format!("{} {}: {}", accepted.status, accepted.reason, accepted.message))
    };
    rules.reports(P, &[]).into_iter().map(report).collect()
}

#[test]
fn oldest_object_owns_model_name_others_get_condition() {
    let accepted = |object: &str, name: &str| {
        (object.to_owned(), format!("True Accepted: the model name `{name}` is this object's"))
    };
    let in_use = |object: &str, name: &str, by: &str| {
        let message = format!("False ModelNameInUse: the model name `{name}` is the older InferenceModel `{by}`'s");
        (object.to_owned(), message)
    };
    let unnamed = |name: &str, created| object(name, created, json!({"poolRef": {"name": "p"}}));
    let elsewhere = object("other-pool", 0, json!({"poolRef": {"name": "q"}, "modelName": "a"}));
    type Case = (&'static str, Vec<Object>, Vec<(String, String)>);
    let cases: Vec<Case> = vec![
        ("nothing", vec![], vec![]),
        ("one", vec![model("x", 5, "a", &[])], vec![accepted("x", "a")]),
        (
            "two names",
            vec![model("x", 5, "a", &[]), model("y", 1, "b", &[])],
            vec![accepted("y", "b"), accepted("x", "a")],
        ),
        (
            "the oldest of three",
            vec![model("x", 5, "a", &[]), model("y", 1, "a", &[]), model("z", 3, "a", &[])],
            vec![accepted("y", "a"), in_use("z", "a", "y"), in_use("x", "a", "y")],
        ),
        (
            "of the same second the first by name",
            vec![model("y", 1, "a", &[]), model("x", 1, "a", &[])],
            vec![accepted("x", "a"), in_use("y", "a", "x")],
        ),
        ("another pool's are others", vec![elsewhere, model("x", 5, "a", &[])], vec![accepted("x", "a")]),
        (
            "the object's name where it gives none",
            vec![unnamed("a", 1), model("x", 5, "a", &[])],
            vec![accepted("a", "a"), in_use("x", "a", "a")],
        ),
        (
            "a name that is only reserved is taken",
            vec![model("x", 1, "a", &[("v", 0)]), model("y", 2, "a", &[])],
            vec![accepted("x", "a"), in_use("y", "a", "x")],
        ),
    ];
    for (case, objects, want) in cases {
        let mut rules = Rules::default();
        listed(&mut rules, ObjectKind::Model, objects);
        assert_eq!(told(&rules), want, "{case}");
    }
}

#[test]
fn unchanged_conditions_not_due_and_keep_their_time() {
    let wanted = {
        let mut rules = Rules::default();
        let mut fresh = model("x", 1, "a", &[]);
        fresh.meta.generation = 4;
        listed(&mut rules, ObjectKind::Model, vec![fresh]);
        rules.reports(P, &[]).remove(0)
    };
    assert!(wanted.is_due(), "it says nothing yet");
    let [good, ready] = wanted.conditions("2026-02-02T00:00:00Z");
    assert_eq!((good.observed_generation, &*good.last_transition_time), (4, "2026-02-02T00:00:00Z"));
    let with = |change: &dyn Fn(&mut Value)| {
        let mut condition = serde_json::to_value(&good).unwrap();
        change(&mut condition);
        let other = json!({"type": "Other", "status": "Unknown", "reason": "Pending", "lastTransitionTime": "1970-01-01T00:00:00Z"});
        let mut object = model("x", 1, "a", &[]);
        object.meta.generation = 4;
        object.status = json!({"conditions": [other, condition, ready, {"type": 7}]});
        let mut rules = Rules::default();
        listed(&mut rules, ObjectKind::Model, vec![object]);
        let report = rules.reports(P, &[]).remove(0);
        let [accepted, _] = report.conditions("2026-03-03T00:00:00Z");
        (report.is_due(), accepted.last_transition_time)
    };
    let (then, now) = ("2026-02-02T00:00:00Z".to_owned(), "2026-03-03T00:00:00Z".to_owned());
    assert_eq!(with(&|_| {}), (false, then.clone()));
    assert_eq!(with(&|c| c["message"] = json!("another")), (true, then.clone()), "the same status as before");
    assert_eq!(with(&|c| c["observedGeneration"] = json!(3)), (true, then.clone()));
    assert_eq!(with(&|c| c["status"] = json!("False")), (true, now.clone()), "it turns");
    assert_eq!(with(&|c| c["type"] = json!("Other")), (true, now.clone()), "only what speaks of the name");
    assert_eq!(with(&|c| c["lastTransitionTime"] = json!("")), (false, now));
}

#[test]
fn target_status_of_one_replica_reaches_others() {
    let heard = |generation: i64, status: &str, reason: &str, message: &str| {
        let mut object = model("split", 1, "split", &[("v1", 50), ("v2", 50)]);
        object.meta.generation = 4;
        object.status = json!({"conditions": [{"type": "Ready", "status": status, "reason": reason, "message": message,
            "observedGeneration": generation, "lastTransitionTime": "2026-02-02T00:00:00Z"}]});
        let mut rules = Rules::default();
        listed(&mut rules, ObjectKind::Model, vec![object]);
        let names = |targets: Vec<MissingTarget>| targets.into_iter().map(|t| t.target).collect::<Vec<_>>();
        rules.target_statuses(P).into_iter().map(|heard| (heard.are_missing, names(heard.targets))).collect::<Vec<_>>()
    };
    let message = "a model server has answered that it has no model `v2`";
    assert_eq!(heard(4, "False", "TargetModelNotFound", message), [(true, vec!["v2".to_owned()])]);
    assert_eq!(heard(3, "False", "TargetModelNotFound", message), [], "of another spec");
    assert_eq!(heard(4, "True", "Ready", ""), [(false, vec!["v1".to_owned(), "v2".to_owned()])]);
    assert_eq!(heard(4, "False", "NoTargetModel", ""), []);
}

/// Status and reason of both conditions, by object.
fn conditions(rules: &Rules, missing: &[MissingTarget]) -> Vec<(String, [String; 2])> {
    let words = |c: Condition| format!("{} {}", c.status, c.reason);
    rules.reports(P, missing).into_iter().map(|r| (r.name, r.wanted.map(words))).collect()
}

#[test]
fn conditions_state_whether_requests_are_served_and_why() {
    let mut rules = Rules::default();
    let odd = json!({"poolRef": {"name": "p"}, "criticality": "Urgent"});
    let odd_elsewhere = json!({"poolRef": {"name": "q"}, "criticality": "Urgent"});
    listed(&mut rules, ObjectKind::Model, vec![model("odd-now", 4, "odd-now", &[])]);
    for name in ["odd", "odd-now"] {
        assert!(rules.apply(ObjectKind::Model, ObjectChange::Applied(object(name, 1, odd.clone()))).is_err());
    }
    assert!(rules.apply(ObjectKind::Model, ObjectChange::Applied(object("elsewhere", 1, odd_elsewhere))).is_err());
    for object in [
        model("good", 1, "good", &[]),
        model("late", 2, "good", &[]),
        model("reserved", 3, "reserved", &[("nothing", 0)]),
        model("split", 3, "split", &[("v1", 50), ("v2", 50)]),
    ] {
        rules.apply(ObjectKind::Model, ObjectChange::Applied(object)).unwrap();
    }
    let missing = |target: &str| MissingTarget { model: "split".into(), target: target.into() };
    let want = |ready: &str| -> Vec<(String, [String; 2])> {
        [
            ("good", "True Accepted", "True Ready"),
            ("late", "False ModelNameInUse", "False ModelNameInUse"),
            ("reserved", "True Accepted", "False NoTargetModel"),
            ("split", "True Accepted", ready),
            ("odd", "False Invalid", "False Invalid"),
            ("odd-now", "False Invalid", "False Invalid"),
        ]
        .map(|(name, accepted, ready)| (name.to_owned(), [accepted.to_owned(), ready.to_owned()]))
        .to_vec()
    };
    assert_eq!(conditions(&rules, &[]), want("True Ready"));
    assert_eq!(conditions(&rules, &[missing("v2")]), want("False TargetModelNotFound"));
    let reports = rules.reports(P, &[missing("v2")]);
    let message = |name: &str| reports.iter().find(|r| r.name == name).unwrap().wanted[1].message.clone();
    assert_eq!(message("split"), "a model server has answered that it has no model `v2`");
    assert!(message("odd").contains("`spec.criticality`: got `Urgent`"), "{}", message("odd"));
    rules.apply(ObjectKind::Model, ObjectChange::Applied(model("odd", 9, "odd", &[]))).unwrap();
    rules
        .apply(ObjectKind::Model, ObjectChange::Deleted { name: "odd-now".into(), uid: "odd-now-uid".into() })
        .unwrap();
    let now = conditions(&rules, &[]);
    assert!(now.contains(&("odd".to_owned(), ["True Accepted".to_owned(), "True Ready".to_owned()])), "{now:?}");
    assert_eq!(now.len(), 5, "{now:?}");
}

#[test]
fn objects_for_pool_of_another_group_are_ignored() {
    let of = |group: &str| json!({"poolRef": {"name": "p", "group": group}});
    let mut rules = Rules::default();
    let groups = ["", PoolGroup::Stable.as_str(), PoolGroup::Experimental.as_str(), "example.com"];
    let objects = ["without-group", "stable", "experimental", "other"];
    listed(
        &mut rules,
        ObjectKind::Model,
        objects.iter().zip(groups).map(|(name, group)| object(name, 1, of(group))).collect(),
    );
    let served = |pool| rules.reports(pool, &[]).into_iter().map(|r| r.name).collect::<Vec<_>>();
    assert_eq!(served(P), ["stable", "without-group"]);
    assert_eq!(served(ServedPool { group: Some(PoolGroup::Experimental), ..P }), ["experimental", "without-group"]);
    assert_eq!(served(ServedPool { group: None, ..P }), ["experimental", "stable", "without-group"]);
    let strangers: Vec<_> = rules.strangers(P).map(|(_, name, group)| (name, group)).collect();
    assert_eq!(strangers, [("experimental", PoolGroup::Experimental.as_str()), ("other", "example.com")]);
    assert_eq!(rules.strangers(ServedPool { name: "q", ..P }).count(), 0);
}
