use super::super::objects::{Meta, Object};
use super::*;
use attache_pool::source::PoolGroup;
use proptest::prelude::*;
use serde_json::json;
use std::collections::BTreeSet;

fn by_pool() -> Members {
    members(PodsOf::Pool { name: "pool".into(), group: PoolGroup::Stable })
}

fn by_selector(selector: &str, target_ports: &[u16]) -> Members {
    members(PodsOf::Selector { selector: selector.into(), target_ports: target_ports.to_vec() })
}

fn members(pods: PodsOf) -> Members {
    Members::new(source(pods), false)
}

fn source(pods: PodsOf) -> KubernetesSource {
    KubernetesSource {
        namespace: None,
        pods,
        engine: Engine::default(),
        metrics: MetricsSource::default(),
        found: false,
    }
}

fn pool(app: &str, ports: &[u16]) -> Object {
    let meta = Meta { name: "pool".into(), uid: "pool-uid".into(), ..Meta::default() };
    let ports: Vec<_> = ports.iter().map(|number| json!({"number": number})).collect();
    let spec = json!({"selector": {"matchLabels": {"app": app}}, "targetPorts": ports});
    Object { meta, spec, status: json!(null) }
}

/// A ready pod whose name ends in its number, with `app=vllm`.
fn pod(n: u8) -> Object {
    let meta = Meta {
        name: format!("pod-{n}"),
        uid: format!("uid-{n}"),
        created: i64::from(n),
        labels: [("app".into(), "vllm".into())].into(),
        ..Meta::default()
    };
    let status = json!({"podIP": format!("10.0.0.{n}"), "conditions": [{"type": "Ready", "status": "True"}]});
    Object { meta, spec: json!(null), status }
}

fn labelled(n: u8, labels: &[(&str, &str)]) -> Object {
    let mut object = pod(n);
    object.meta.labels.extend(labels.iter().map(|(k, v)| ((*k).into(), (*v).into())));
    object
}

fn list(members: &mut Members, pods: Vec<Object>) {
    members.pod(ObjectChange::ListBegun).unwrap();
    for pod in pods {
        members.pod(ObjectChange::Listed(pod)).unwrap();
    }
    members.pod(ObjectChange::ListDone).unwrap();
}

fn list_pool(members: &mut Members, pools: Vec<Object>) {
    members.pool(ObjectChange::ListBegun).unwrap();
    for pool in pools {
        members.pool(ObjectChange::Listed(pool)).unwrap();
    }
    members.pool(ObjectChange::ListDone).unwrap();
}

fn names(members: &mut Members) -> Option<Vec<String>> {
    members.endpoints().map(|list| list.iter().map(|e| format!("{} {}", e.name, e.address)).collect())
}

fn some(list: &[&str]) -> Option<Vec<String>> {
    Some(list.iter().map(|s| (*s).to_owned()).collect())
}

#[test]
fn no_endpoints_before_pool_and_pods_are_known() {
    let mut members = by_pool();
    assert_eq!((names(&mut members), members.selector()), (None, None));
    list_pool(&mut members, vec![]);
    assert!(members.pool_is_missing());
    assert_eq!(names(&mut members), None, "a pool that never was has no endpoints, not none of them");
    members.pool(ObjectChange::Applied(pool("vllm", &[8000]))).unwrap();
    assert_eq!((names(&mut members), members.selector()), (None, Some("app=vllm".into())));
    list(&mut members, vec![pod(1), labelled(2, &[("app", "other")])]);
    assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:8000"]));
    assert_eq!(members.endpoints().unwrap()[0].uid.as_deref(), Some("uid-1"));
    members.pool(ObjectChange::Deleted { name: "pool".into(), uid: "pool-uid".into() }).unwrap();
    assert_eq!(names(&mut members), some(&[]), "a pool that was taken away has none");
}

#[test]
fn invalid_pool_keeps_last_valid_version_or_has_no_endpoints() {
    let without_labels =
        || Object { spec: json!({"selector": {}, "targetPorts": [{"number": 8000}]}), ..pool("", &[]) };
    for found in [false, true] {
        let mut members = by_pool();
        members.source.found = found;
        members.pool(ObjectChange::ListBegun).unwrap();
        members.pool(ObjectChange::Listed(without_labels())).unwrap_err();
        assert_eq!(names(&mut members), None, "the list is not done");
        members.pool(ObjectChange::ListDone).unwrap();
        assert!(members.pool_is_unreadable() && !members.pool_is_missing());
        assert_eq!((names(&mut members), members.selector()), (some(&[]), None), "that is known of it");
        // It can be read: its pods are looked for, and until they are known nothing is said.
        members.pool(ObjectChange::Applied(pool("vllm", &[8000]))).unwrap();
        assert_eq!((names(&mut members), members.selector()), (None, Some("app=vllm".into())));
        list(&mut members, vec![pod(1)]);
        assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:8000"]));
        // A change of it that is a mistake changes nothing.
        members.pool(ObjectChange::Applied(without_labels())).unwrap_err();
        assert!(members.pool_is_unreadable() && !members.pool_is_missing());
        assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:8000"]));
        members.pool(ObjectChange::Applied(pool("vllm", &[8001]))).unwrap();
        assert!(!members.pool_is_unreadable());
        assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:8001"]));
    }
    assert!(!by_selector("app=vllm", &[]).pool_is_missing() && !by_selector("app=vllm", &[]).pool_is_unreadable());
}

#[test]
fn reload_keeps_endpoints_of_currently_invalid_pool() {
    let unreadable = || {
        let mut object = pool("vllm", &[8000]);
        object.spec["selector"] = json!({});
        object
    };
    let pods = || PodsOf::Pool { name: "pool".into(), group: PoolGroup::Stable };
    for (succeeds, expected) in [(false, some(&[])), (true, None)] {
        let mut members = Members::new(source(pods()), succeeds);
        members.pool(ObjectChange::ListBegun).unwrap();
        members.pool(ObjectChange::Listed(unreadable())).unwrap_err();
        members.pool(ObjectChange::ListDone).unwrap();
        assert!(members.pool_is_unreadable());
        assert_eq!(names(&mut members), expected, "succeeds: {succeeds}");
    }
}

#[test]
fn old_pods_keep_old_ports_until_relist() {
    let mut members = by_pool();
    list_pool(&mut members, vec![pool("vllm", &[8000])]);
    list(&mut members, vec![pod(1)]);
    members.pool(ObjectChange::Applied(pool("vllm", &[8001]))).unwrap();
    assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:8001"]), "the same pods elsewhere");
    members.pool(ObjectChange::Applied(pool("new", &[9000]))).unwrap();
    assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:8001"]), "nobody listens at 9000 there");
    members.pool(ObjectChange::Applied(pool("new", &[9001]))).unwrap();
    assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:8001"]));
    list(&mut members, vec![labelled(5, &[("app", "new")])]);
    assert_eq!(names(&mut members), some(&["pod-5 10.0.0.5:9001"]));
    members.pool(ObjectChange::Applied(pool("new", &[9002]))).unwrap();
    assert_eq!(names(&mut members), some(&["pod-5 10.0.0.5:9002"]));
}

#[test]
fn only_ready_pods_without_deletion_serve() {
    let mut members = by_selector("app=vllm", &[8000]);
    let not_ready = |n| {
        let conditions = json!([{"type": "Ready", "status": "False"}]);
        Object { status: json!({"podIP": format!("10.0.0.{n}"), "conditions": conditions}), ..pod(n) }
    };
    let without_address = |n| Object { status: json!({"conditions": [{"type": "Ready", "status": "True"}]}), ..pod(n) };
    list(&mut members, vec![pod(1), not_ready(2), without_address(3), pod(4)]);
    assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:8000", "pod-4 10.0.0.4:8000"]));
    let mut deleting = pod(1);
    deleting.meta.deleting = true;
    assert_eq!(members.pod(ObjectChange::Applied(deleting)), Ok(true));
    assert_eq!(names(&mut members), some(&["pod-4 10.0.0.4:8000"]), "out at once, though it is still ready");
    assert_eq!(members.pod(ObjectChange::Applied(not_ready(4))), Ok(true));
    assert_eq!(names(&mut members), some(&[]));
    assert_eq!(members.pod(ObjectChange::Applied(pod(2))), Ok(true));
    assert_eq!(names(&mut members), some(&["pod-2 10.0.0.2:8000"]));
}

#[test]
fn selectors_of_every_form_are_parsed() {
    let pods =
        || vec![pod(1), labelled(2, &[("tier", "a")]), labelled(3, &[("tier", "b")]), labelled(4, &[("app", "x")])];
    for (selector, want) in [
        ("app=vllm", &["pod-1", "pod-2", "pod-3"][..]),
        ("tier in (a,c)", &["pod-2"]),
        ("app=vllm,tier notin (a)", &["pod-1", "pod-3"]),
        ("app!=vllm", &["pod-4"]),
        ("!tier", &["pod-1", "pod-4"]),
    ] {
        let mut members = by_selector(selector, &[8000]);
        list(&mut members, pods());
        let got: Vec<String> = members.endpoints().unwrap().iter().map(|e| e.name.to_string()).collect();
        assert_eq!(got, want, "{selector}");
    }
}

#[test]
fn each_target_port_is_a_rank() {
    let mut members = by_pool();
    members.pool(ObjectChange::Applied(pool("vllm", &[8000, 8002, 8004]))).unwrap();
    let mut limited = pod(2);
    limited.meta.annotations.insert(ACTIVE_PORTS_ANNOTATION.into(), "8004, 8000,9999,x".into());
    let mut none = pod(3);
    none.meta.annotations.insert(ACTIVE_PORTS_ANNOTATION.into(), String::new());
    list(&mut members, vec![pod(1), limited, none]);
    let want = [
        "pod-1-rank-0 10.0.0.1:8000",
        "pod-1-rank-1 10.0.0.1:8002",
        "pod-1-rank-2 10.0.0.1:8004",
        "pod-2-rank-0 10.0.0.2:8000",
        "pod-2-rank-2 10.0.0.2:8004",
    ];
    assert_eq!(names(&mut members), some(&want));
    let ranks = |members: &mut Members| members.endpoints().unwrap().iter().map(|e| e.rank).collect::<Vec<_>>();
    members.pool(ObjectChange::Applied(pool("vllm", &[8000, 8002, 8004, 8006]))).unwrap();
    assert_eq!(ranks(&mut members), [0, 1, 2, 3, 0, 2].map(Some), "a port that does not serve leaves its number");
    members.pool(ObjectChange::Applied(pool("vllm", &[9000]))).unwrap();
    assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:9000"]), "ports count at once");
    members.pool(ObjectChange::Applied(pool("vllm", &[9001]))).unwrap();
    assert_eq!(ranks(&mut members), [None]);
}

#[test]
fn labels_of_every_project_are_parsed() {
    let gie = "inference.networking.k8s.io/engine-type";
    for (labels, url, engine) in [
        (&[][..], "http://10.0.0.1:8000/metrics", Engine::Vllm),
        (&[(gie, "sglang")], "http://10.0.0.1:8000/metrics", Engine::Sglang),
        (&[("llm-d.ai/engine-type", "trtllm-serve")], "http://10.0.0.1:8000/prometheus/metrics", Engine::TrtllmServe),
        (&[("llm-d.ai/engine-type", "triton")], "http://10.0.0.1:8000/metrics", Engine::Triton),
        (&[("model.aibrix.ai/engine", "xllm")], "http://10.0.0.1:8000/metrics", Engine::Xllm),
        (&[("model.aibrix.ai/engine", "trtllm"), (gie, "vllm")], "http://10.0.0.1:8000/metrics", Engine::Vllm),
        (&[(gie, "an engine of next year")], "http://10.0.0.1:8000/metrics", Engine::Vllm),
        (&[("model.aibrix.ai/port", "9000")], "http://10.0.0.1:9000/metrics", Engine::Vllm),
        (&[("model.aibrix.ai/port", "http")], "http://10.0.0.1:8000/metrics", Engine::Vllm),
        (&[("model.aibrix.ai/metric-port", "9100")], "http://10.0.0.1:9100/metrics", Engine::Vllm),
    ] {
        let mut members = by_selector("app=vllm", &[]);
        list(&mut members, vec![labelled(1, labels)]);
        let endpoints = members.endpoints().unwrap();
        assert_eq!((endpoints[0].metrics_url().as_deref(), endpoints[0].engine), (Some(url), engine), "{labels:?}");
    }
    let mut ranks = by_selector("app=vllm", &[8000, 8001]);
    list(&mut ranks, vec![labelled(1, &[("model.aibrix.ai/metric-port", "9100"), ("llm-d.ai/role", "prefill")])]);
    let endpoints = ranks.endpoints().unwrap();
    assert_eq!(
        endpoints[1].metrics_url().as_deref(),
        Some("http://10.0.0.1:8001/metrics"),
        "each rank has its own page"
    );
    assert_eq!(endpoints[1].labels.get("llm-d.ai/role").map(|v| &**v), Some("prefill"));
}

#[test]
fn aibrix_annotations_count_as_labels_unless_label_exists() {
    let bootstrap = "model.aibrix.ai/sglang-bootstrap-port";
    let mut both = labelled(2, &[(bootstrap, "9100"), ("app", "vllm")]);
    let mut said = pod(1);
    for pod in [&mut said, &mut both] {
        pod.meta.annotations.insert(bootstrap.into(), "9200".into());
        pod.meta.annotations.insert("model.aibrix.ai/engine".into(), "sglang".into());
        pod.meta.annotations.insert("model.aibrix.ai/config".into(), "{}".repeat(40));
        pod.meta.annotations.insert("other.io/name".into(), "x".into());
    }
    let mut members = by_selector("app=vllm", &[]);
    list(&mut members, vec![said, both]);
    let endpoints = members.endpoints().unwrap();
    let label = |at: usize, name| endpoints[at].labels.get(name).map(|value| &**value);
    assert_eq!((label(0, bootstrap), label(1, bootstrap)), (Some("9200"), Some("9100")));
    assert_eq!(endpoints[0].engine, Engine::Sglang);
    assert_eq!((label(0, "model.aibrix.ai/config"), label(0, "other.io/name")), (None, None));
    assert!(members.with_ignored_profiles().is_some(), "the operator is told");
}

#[test]
fn old_pods_stay_until_new_selector_is_listed() {
    let mut members = by_pool();
    members.pool(ObjectChange::Applied(pool("vllm", &[8000]))).unwrap();
    list(&mut members, vec![pod(1)]);
    members.pool(ObjectChange::Applied(pool("new", &[8000]))).unwrap();
    assert_eq!(members.selector().as_deref(), Some("app=new"));
    assert_eq!(names(&mut members), some(&["pod-1 10.0.0.1:8000"]));
    list(&mut members, vec![labelled(2, &[("app", "new")])]);
    assert_eq!(names(&mut members), some(&["pod-2 10.0.0.2:8000"]));
    assert!(members.pool(ObjectChange::Applied(Object { spec: json!({"selector": {}}), ..pool("x", &[1]) })).is_err());
    assert_eq!(names(&mut members), some(&["pod-2 10.0.0.2:8000"]), "the last good pool stays");
}

#[test]
fn two_pods_with_one_address_younger_is_used() {
    let mut members = by_selector("app=vllm", &[8000]);
    let at = |n: u8, created: i64| {
        let mut object = pod(n);
        object.meta.created = created;
        object.status["podIP"] = json!("10.0.0.9");
        object
    };
    for (first, second, want) in [(1, 2, "pod-2"), (2, 1, "pod-1"), (5, 5, "pod-1")] {
        list(&mut members, vec![at(1, first), at(2, second)]);
        let endpoints = members.endpoints().unwrap();
        assert_eq!(endpoints.iter().map(|e| &*e.name).collect::<Vec<_>>(), [want]);
    }
}

/// What may happen to eight pods.
#[derive(Clone, Debug)]
enum Deed {
    Apply {
        n: u8,
        life: u8,
        ready: bool,
        deleting: bool,
    },
    Delete {
        n: u8,
        life: u8,
    },
    /// A list that breaks off after some of what there is.
    BrokenList {
        objects: usize,
    },
    List,
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        6 => (0u8..8, 0u8..3, any::<bool>(), prop::bool::weighted(0.2))
            .prop_map(|(n, life, ready, deleting)| Deed::Apply { n, life, ready, deleting }),
        2 => (0u8..8, 0u8..3).prop_map(|(n, life)| Deed::Delete { n, life }),
        1 => (0usize..8).prop_map(|objects| Deed::BrokenList { objects }),
        1 => Just(Deed::List),
    ]
}

proptest! {
    /// Whatever happens, the endpoints are those of the pods that the API server has now, and
    /// no broken list changes them.
    #[test]
    fn endpoints_are_the_ready_pods(deeds in prop::collection::vec(deed(), 0..60)) {
        let mut members = by_selector("app=vllm", &[8000, 8001]);
        list(&mut members, vec![]);
        let mut cluster: BTreeMap<u8, Object> = BTreeMap::new();
        for deed in deeds {
            match deed {
                Deed::Apply { n, life, ready, deleting } => {
                    let mut object = pod(n);
                    object.meta.uid = format!("uid-{n}-{life}");
                    object.meta.deleting = deleting;
                    object.status["conditions"][0]["status"] = json!(if ready { "True" } else { "False" });
                    cluster.insert(n, object.clone());
                    members.pod(ObjectChange::Applied(object)).unwrap();
                }
                Deed::Delete { n, life } => {
                    let uid = format!("uid-{n}-{life}");
                    if cluster.get(&n).is_some_and(|object| object.meta.uid == uid) {
                        cluster.remove(&n);
                    }
                    members.pod(ObjectChange::Deleted { name: format!("pod-{n}"), uid }).unwrap();
                }
                Deed::BrokenList { objects } => {
                    members.pod(ObjectChange::ListBegun).unwrap();
                    for object in cluster.values().take(objects) {
                        members.pod(ObjectChange::Listed(object.clone())).unwrap();
                    }
                }
                Deed::List => list(&mut members, cluster.values().cloned().collect()),
            }
            let serves = |object: &&Object| !object.meta.deleting && object.status["conditions"][0]["status"] == "True";
            let want: BTreeSet<(String, u16)> = cluster
                .values()
                .filter(serves)
                .flat_map(|object| [8000, 8001].map(|port| (object.meta.uid.clone(), port)))
                .collect();
            let got = members.endpoints().unwrap();
            let unique: BTreeSet<(String, u16)> =
                got.iter().map(|e| (e.uid.as_deref().unwrap_or_default().to_owned(), e.address.port())).collect();
            prop_assert_eq!(got.len(), unique.len());
            prop_assert_eq!(unique, want);
        }
    }
}

#[test]
fn endpoints_beyond_limit_oldest_are_served() {
    let ports: Vec<u16> = (8000..8008).collect();
    let mut members = by_selector("app=vllm", &ports);
    // The later in the alphabet the older.
    let of = |n: u32| {
        let mut pod = pod(0);
        pod.meta.name = format!("pod-{n:04}");
        pod.meta.uid = format!("uid-{n}");
        pod.meta.created = -i64::from(n);
        pod.status["podIP"] = json!(format!("10.0.{}.{}", n / 200, n % 200 + 1));
        pod
    };
    let pods_served = MAX_ENDPOINTS / ports.len();
    list(&mut members, (0..512).map(of).collect());
    assert_eq!((members.endpoints().unwrap().len(), members.left_out()), (pods_served * 8, 0), "as many as may be");
    list(&mut members, (0..520).map(of).collect());
    let names: Vec<String> = members.endpoints().unwrap().iter().map(|e| e.name.to_string()).collect();
    assert_eq!((names.len(), members.left_out()), (MAX_ENDPOINTS, 8 * 8));
    assert_eq!((names[0].as_str(), names[MAX_ENDPOINTS - 1].as_str()), ("pod-0008-rank-0", "pod-0519-rank-7"));
    assert!(names.is_sorted(), "by name");
    list(&mut members, (0..10).map(of).collect());
    assert_eq!((members.endpoints().unwrap().len(), members.left_out()), (80, 0));
}
