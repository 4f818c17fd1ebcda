//! Pools and configurations that come, go and can't be read.

use super::*;
use crate::kube::objects::Meta;
use attache_pool::source::PoolGroup;
use serde_json::json;

const POOL: ObjectKind = ObjectKind::Pool(PoolGroup::Stable);

fn object(name: &str, created: i64, label: (&str, &str), spec: Value) -> Object {
    let labels = [(label.0.into(), label.1.into())].into();
    Object { meta: Meta { name: name.into(), created, labels, ..Meta::default() }, spec, status: Value::Null }
}

fn pool(name: &str, tier: &str, service: &str) -> Object {
    object(name, 0, ("tier", tier), json!({"endpointPickerRef": {"name": service, "port": {"number": 9002}}}))
}

fn config(name: &str, created: i64, pool: &str, text: &str) -> Object {
    object(name, created, (CONFIG_LABEL, pool), json!({"attache.yaml": text}))
}

fn listed(catalogue: &mut Catalogue, kind: ObjectKind, objects: Vec<Object>) {
    catalogue.apply(kind, ObjectChange::ListBegun).unwrap();
    for object in objects {
        catalogue.apply(kind, ObjectChange::Listed(object)).unwrap();
    }
    assert!(catalogue.apply(kind, ObjectChange::ListDone).unwrap());
}

fn shown(catalogue: &Catalogue) -> Vec<String> {
    let show = |(name, found): (String, FoundPool)| {
        let text = found.config.map(|config| config.text.to_string());
        format!("{name} {} {}", found.service.unwrap_or_default(), text.unwrap_or_default())
    };
    let Finding::Found(found) = catalogue.found() else { panic!("{:?}", catalogue.found()) };
    found.into_iter().map(show).collect()
}

fn ports(catalogue: &Catalogue) -> Vec<u16> {
    catalogue.found().iter().map(|(_, found)| found.port).collect()
}

#[test]
fn pools_are_found_by_their_labels_once_all_is_known() {
    let mut catalogue = Catalogue::new("tier in (gold,silver)".into());
    assert_eq!(catalogue.found(), Finding::Unknown);
    let old =
        object("old", 0, ("tier", "gold"), json!({"extensionRef": {"name": "old-epp", "portNumber": 9004, "port": 1}}));
    let alone = object("alone", 0, ("tier", "gold"), json!({}));
    let pools = vec![pool("a", "gold", "a-epp"), pool("b", "iron", "b-epp"), pool("c", "silver", "c-epp"), old, alone];
    listed(&mut catalogue, POOL, pools);
    assert_eq!(catalogue.found(), Finding::Unknown, "a pool is not served by the template when it has its own");
    listed(
        &mut catalogue,
        ObjectKind::ConfigMap,
        vec![config("of-c", 5, "c", "younger"), config("of-c-too", 1, "c", "older")],
    );
    assert_eq!(shown(&catalogue), ["a a-epp ", "alone  ", "c c-epp older", "old old-epp "]);
    assert_eq!(ports(&catalogue), [9002, DEFAULT_PORT, 9002, 9004]);

    let gone = ObjectChange::Deleted { name: "of-c-too".into(), uid: String::new() };
    assert!(catalogue.apply(ObjectKind::ConfigMap, gone).unwrap());
    assert!(catalogue.apply(POOL, ObjectChange::Applied(pool("b", "gold", "b-epp"))).unwrap());
    assert!(catalogue.apply(POOL, ObjectChange::Applied(pool("a", "iron", "a-epp"))).unwrap(), "a label takes it out");
    assert_eq!(shown(&catalogue), ["alone  ", "b b-epp ", "c c-epp younger", "old old-epp "]);
}

#[test]
fn ambiguous_configuration_key_is_reported() {
    let mut catalogue = Catalogue::new("tier=gold".into());
    listed(&mut catalogue, POOL, vec![pool("a", "gold", "a-epp")]);
    listed(&mut catalogue, ObjectKind::ConfigMap, vec![config("of-a", 0, "a", "first")]);
    let two = || object("of-a", 0, (CONFIG_LABEL, "a"), json!({"x": "1", "y": "2"}));
    let none = object("none", 0, (CONFIG_LABEL, "a"), Value::Null);
    let by_key = |mut object: Object, key: &str| {
        object.meta.annotations.insert(CONFIG_KEY_ANNOTATION.into(), key.into());
        object
    };
    for (odd, reason) in [
        (two(), "2 keys (`x`, `y`): the annotation `attache.dev/config-key` must name"),
        (none, "`data` has no key"),
        (by_key(two(), "z"), "names `z`, which is no key of `data`; there are: `x`, `y`"),
        (by_key(config("of-a", 0, "a", "only"), "z"), "there are: `attache.yaml`"),
    ] {
        let unreadable = catalogue.apply(ObjectKind::ConfigMap, ObjectChange::Applied(odd)).unwrap_err();
        assert!(unreadable.reason.contains(reason), "{unreadable:?}");
    }
    assert_eq!(shown(&catalogue), ["a a-epp first"], "what was known of it stays");
    for key in ["y", "x"] {
        assert!(catalogue.apply(ObjectKind::ConfigMap, ObjectChange::Applied(by_key(two(), key))).unwrap());
        assert_eq!(shown(&catalogue), [format!("a a-epp {}", if key == "y" { 2 } else { 1 })], "the key that is named");
    }
}

#[test]
fn refused_search_differs_from_pending_search() {
    let mut catalogue = Catalogue::new("tier=gold".into());
    assert!(catalogue.refused());
    assert_eq!(catalogue.found(), Finding::Refused);
    assert!(catalogue.configs_resolved());
    listed(&mut catalogue, POOL, vec![pool("a", "gold", "a-epp")]);
    assert_eq!(shown(&catalogue), ["a a-epp "], "it is allowed now");
    assert!(catalogue.refused());
    assert_eq!(shown(&catalogue), ["a a-epp "], "what is known stays");
}

#[test]
fn unreadable_configurations_do_not_delay_pools() {
    let mut catalogue = Catalogue::new("tier=gold".into());
    listed(&mut catalogue, POOL, vec![pool("a", "gold", "a-epp")]);
    assert!(catalogue.configs_resolved());
    assert_eq!(shown(&catalogue), ["a a-epp "]);
}
