use super::super::objects::{Meta, Object};
use super::*;
use serde_json::{Value, json};

/// A kind whose `spec` must be a number.
#[derive(Clone, Debug, PartialEq)]
struct Number(i64);

impl FromObject for Number {
    fn from_object(object: Object) -> Result<Self, String> {
        object.spec.as_i64().map(Self).ok_or_else(|| "`spec` is no number".to_owned())
    }
}

fn object(name: &str, uid: &str, spec: impl Into<Value>) -> Object {
    let meta = Meta { name: name.into(), uid: uid.into(), ..Meta::default() };
    Object { meta, spec: spec.into(), status: Value::Null }
}

fn held(table: &ObjectTable<Number>) -> Vec<(String, i64)> {
    table.iter().map(|(name, number)| (name.to_owned(), number.0)).collect()
}

fn listed(objects: &[(&str, i64)]) -> ObjectTable<Number> {
    let mut table = ObjectTable::default();
    table.apply(ObjectChange::ListBegun).unwrap();
    for (name, number) in objects {
        table.apply(ObjectChange::Listed(object(name, name, *number))).unwrap();
    }
    assert_eq!(table.apply(ObjectChange::ListDone), Ok(true));
    table
}

#[test]
fn incomplete_list_has_no_effect() {
    let mut table = listed(&[("a", 1), ("b", 2)]);
    for change in [ObjectChange::ListBegun, ObjectChange::Listed(object("b", "b", 3))] {
        assert_eq!(table.apply(change), Ok(false));
        assert_eq!(held(&table), [("a".into(), 1), ("b".into(), 2)]);
    }
    // It broke off; the next one is another.
    assert_eq!(table.apply(ObjectChange::ListBegun), Ok(false));
    assert_eq!(table.apply(ObjectChange::Listed(object("a", "a", 1))), Ok(false));
    assert_eq!(table.apply(ObjectChange::ListDone), Ok(true));
    assert_eq!(held(&table), [("a".into(), 1)]);
}

#[test]
fn equal_object_is_no_change() {
    let mut table = listed(&[("a", 1)]);
    assert_eq!(table.apply(ObjectChange::Applied(object("a", "a", 1))), Ok(false));
    assert_eq!(table.apply(ObjectChange::Applied(object("a", "other uid", 1))), Ok(true));
    assert_eq!(
        table.apply(ObjectChange::Deleted { name: "a".into(), uid: "a".into() }),
        Ok(false),
        "the old one's end"
    );
    assert_eq!(table.apply(ObjectChange::Deleted { name: "a".into(), uid: "other uid".into() }), Ok(true));
    assert_eq!(held(&table), []);
    for change in [ObjectChange::ListBegun, ObjectChange::ListDone] {
        assert_eq!(table.apply(change), Ok(false));
    }
    assert_eq!(ObjectTable::<Number>::default().apply(ObjectChange::ListDone), Ok(false), "the end of no list");
    assert!(!ObjectTable::<Number>::default().is_listed());
    assert!(listed(&[]).is_listed(), "an empty list is an answer");
}

#[test]
fn last_valid_version_stays() {
    let mut table = listed(&[("a", 1)]);
    let unreadable = Unreadable { name: "a".into(), reason: "`spec` is no number".into(), kept: true };
    assert_eq!(table.apply(ObjectChange::Applied(object("a", "a", "one"))), Err(unreadable.clone()));
    assert_eq!(held(&table), [("a".into(), 1)]);
    table.apply(ObjectChange::ListBegun).unwrap();
    assert_eq!(table.apply(ObjectChange::Listed(object("a", "a", json!({})))), Err(unreadable.clone()));
    assert_eq!(table.apply(ObjectChange::ListDone), Ok(false));
    assert_eq!(held(&table), [("a".into(), 1)]);
    assert!(table.is_unreadable("a"));
    // Another object of the same name has nothing to do with it.
    let another = Unreadable { kept: false, ..unreadable };
    assert_eq!(table.apply(ObjectChange::Applied(object("a", "b", "one"))), Err(another));
    assert_eq!(held(&table), []);
}

#[test]
fn invalid_object_is_known_until_deleted_or_valid() {
    let mut table = ObjectTable::<Number>::default();
    let unreadable = Unreadable { name: "a".into(), reason: "`spec` is no number".into(), kept: false };
    table.apply(ObjectChange::ListBegun).unwrap();
    assert_eq!(table.apply(ObjectChange::Listed(object("a", "a", "one"))), Err(unreadable.clone()));
    assert!(!table.is_unreadable("a"), "the list is not done");
    assert_eq!(table.apply(ObjectChange::ListDone), Ok(true));
    assert_eq!((table.is_unreadable("a"), table.is_unreadable("b"), held(&table)), (true, false, vec![]));
    // A list that names it no more, or as something that can be read.
    for change in [ObjectChange::ListBegun, ObjectChange::ListDone] {
        table.apply(change).unwrap();
    }
    assert!(!table.is_unreadable("a"));
    assert_eq!(table.apply(ObjectChange::Applied(object("a", "a", "one"))), Err(unreadable.clone()));
    assert!(table.is_unreadable("a"));
    assert_eq!(table.apply(ObjectChange::Applied(object("a", "a", 1))), Ok(true));
    assert!(!table.is_unreadable("a"));
    // As it was before: what was known stayed, and that it can be read again is news.
    assert_eq!(
        table.apply(ObjectChange::Applied(object("a", "a", "one"))),
        Err(Unreadable { kept: true, ..unreadable })
    );
    assert_eq!(table.apply(ObjectChange::Applied(object("a", "a", 1))), Ok(true));
    table.apply(ObjectChange::Applied(object("a", "a", "one"))).unwrap_err();
    assert_eq!(table.apply(ObjectChange::Deleted { name: "a".into(), uid: "of another".into() }), Ok(false));
    assert!(table.is_unreadable("a"));
    assert_eq!(table.apply(ObjectChange::Deleted { name: "a".into(), uid: "a".into() }), Ok(true));
    assert!(!table.is_unreadable("a"));
}
