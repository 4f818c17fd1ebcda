use super::members::value_end;
use super::*;
use proptest::prelude::*;
use serde_json::{Map, Value};

fn edited(object: &str, edits: &Edits<'_>) -> String {
    String::from_utf8(edits.apply(object.as_bytes()).unwrap().into_owned()).unwrap()
}

#[test]
fn edits_change_no_other_byte() {
    let set = || Edits::new().set("a", b"1");
    let remove = || Edits::new().remove("a");
    let replace = || Edits::new().replace("a", b"1");
    let inside = || Edits::new().inside("p", Edits::new().set("a", b"1").remove("b"));
    for (object, edits, expected) in [
        ("{}", set(), r#"{"a":1}"#),
        ("{ \n}", set(), "{\"a\":1 \n}"),
        (r#" {"b": 2 } "#, set(), r#" {"b": 2,"a":1 } "#),
        (r#"{"a" : "}\"" ,"b":2}"#, set(), r#"{"a" : 1 ,"b":2}"#),
        (r#"{"a":0,"b":2,"a":[{}],"\u0061":3}"#, set(), r#"{"a":1,"b":2}"#),
        (r#"{"b":2, "\u0061":3 , "a":4}"#, set(), r#"{"b":2, "\u0061":1}"#),
        ("{}", remove(), "{}"),
        (r#"{ "a":1 }"#, remove(), "{  }"),
        (r#"{ "a":1, "b":2}"#, remove(), r#"{ "b":2}"#),
        (r#"{"b":2 , "a":1 }"#, remove(), r#"{"b":2 }"#),
        (r#"{"b":2,"a":1, "c":3}"#, remove(), r#"{"b":2, "c":3}"#),
        (r#"{"a":1,"a":2,"b":3,"a":4,"a":5,"c":6,"a":7}"#, remove(), r#"{"b":3,"c":6}"#),
        (r#"{"a":1,"a":2}"#, remove(), "{}"),
        (r#"{"a":1,"b":2}"#, remove().set("c", b"3").remove("b"), r#"{"c":3}"#),
        (r#"{"A":1,"aa":2,"":3}"#, remove(), r#"{"A":1,"aa":2,"":3}"#),
        (r#"{"b":2}"#, replace(), r#"{"b":2}"#),
        (r#"{"b":2,"a":null}"#, replace(), r#"{"b":2,"a":1}"#),
        (r#"{"p":{"b":3, "c":4},"a":5}"#, inside(), r#"{"p":{"c":4,"a":1},"a":5}"#),
        (r#"{"p": null}"#, inside(), r#"{"p": {"a":1}}"#),
        (r#"{"x":0}"#, inside(), r#"{"x":0,"p":{"a":1}}"#),
        (r#"{"x":0}"#, Edits::new().inside("p", remove()), r#"{"x":0}"#),
        (r#"{"p":null}"#, Edits::new().inside("p", remove()), r#"{"p":null}"#),
        // Of two edits of the same key, the first counts.
        ("{}", remove().set("a", b"1"), "{}"),
        ("{}", set().or_else(remove()).or_else(Edits::new().set("b", b"2")), r#"{"a":1,"b":2}"#),
    ] {
        assert_eq!(edited(object, &edits), expected, "{object}");
    }
}

#[test]
fn unchanged_object_is_not_copied() {
    let edits =
        Edits::new().remove("gone").replace("absent", b"1").set("same", b"[1]").inside("p", Edits::new().remove("x"));
    for object in [r#"{"same":[1]}"#, r#" {"same": [1], "p": {"y":1}, "p2":{"x":1}} "#] {
        assert!(
            matches!(edits.apply(object.as_bytes()), Ok(Cow::Borrowed(same)) if same == object.as_bytes()),
            "{object}"
        );
    }
}

#[test]
fn invalid_input_is_an_error() {
    let edits = Edits::new().set("a", b"1").inside("p", Edits::new().remove("x"));
    for (bytes, says) in [
        ("", "expected a JSON object, got nothing"),
        ("[{}]", "got an array"),
        (" \"a\"", "got a string"),
        ("null", "got null"),
        ("-1", "got a number"),
        ("true", "got a boolean"),
        ("{}\u{feff}", "trailing characters"),
        ("{", "expected a key at byte offset 1"),
        ("{,}", "expected a key"),
        (r#"{"a""#, "expected `:`"),
        (r#"{"a":"#, "expected a value at byte offset 5"),
        (r#"{"a":}"#, "expected a value"),
        (r#"{"a":1"#, "expected `,` or `}`"),
        (r#"{"a":1,}"#, "expected a key"),
        (r#"{"a":1 "b":2}"#, "expected `,` or `}`"),
        (r#"{"a":[1"#, "expected a value"),
        (r#"{"a":"x}"#, "expected a value"),
        (r#"{"a":"x\"}"#, "expected a value"),
        (r#"{"a"#, "unexpected end in a key"),
        (r#"{"a":1}}"#, "trailing characters at byte offset 7"),
        (r#"{"p":1}"#, "`p` must be an object, got a number"),
        (r#"{"p":[]}"#, "`p` must be an object, got an array"),
        (r#"{"p":{},"\u0070":{}}"#, "`p` comes twice"),
    ] {
        let error = edits.apply(bytes.as_bytes()).unwrap_err().to_string();
        assert!(error.contains(says), "{bytes}: {error}");
    }
}

#[test]
fn values_end_at_their_last_byte() {
    for length in 0..80 {
        let plain = "1,".repeat(length);
        for value in [
            format!("[{plain}2]"),
            format!("[{plain}\"]\\\\\\\"[{{\"]"),
            format!("{{\"a\":[{plain}{{}}]}}"),
            format!("\"{}\\\"\"", "x".repeat(length)),
            format!("\"{}\"", "\\\\".repeat(length)),
        ] {
            let bytes = [value.as_bytes(), b", \"]}"].concat();
            assert_eq!(value_end(&bytes, 0), Some(value.len()), "{value}");
            assert_eq!(value_end(&value.as_bytes()[..value.len() - 1], 0), None, "{value}");
        }
    }
}

#[test]
fn elements_of_arrays_are_found() {
    for (array, expected) in [
        ("[]", vec![]),
        (" [ 1 , \"a,]\",[2,3] ,{\"b\":[]}, null ] ", vec!["1", "\"a,]\"", "[2,3]", "{\"b\":[]}", "null"]),
        ("[1", vec!["1"]),
        ("[1 2]", vec!["1"]),
        ("{}", vec![]),
        ("", vec![]),
    ] {
        let found: Vec<_> = elements(array.as_bytes()).map(|e| std::str::from_utf8(e).unwrap()).collect();
        assert_eq!(found, expected, "{array}");
    }
}

/// One edit of a key, in the form of [`Edits`] and of a map.
#[derive(Clone, Debug)]
enum Step {
    Set(&'static str),
    Replace(&'static str),
    Remove,
    Inside(Vec<(&'static str, Step)>),
}

const KEYS: &[&str] = &["a", "b", "max_tokens", "p", ""];
const VALUES: &[&str] = &["1", "null", r#""x\"}""#, "[1,[2]]", r#"{"b":1}"#, "-2.50e3"];

fn edits_of(steps: &[(&'static str, Step)]) -> Edits<'static> {
    steps.iter().fold(Edits::new(), |edits, (key, step)| match step {
        Step::Set(json) => edits.set(key, json.as_bytes()),
        Step::Replace(json) => edits.replace(key, json.as_bytes()),
        Step::Remove => edits.remove(key),
        Step::Inside(steps) => edits.inside(key, edits_of(steps)),
    })
}

/// Applies the same edits to a map; `None` where an object is required and another type found.
fn map_of(mut map: Map<String, Value>, steps: &[(&'static str, Step)]) -> Option<Map<String, Value>> {
    let mut done = Vec::new();
    for (key, step) in steps {
        if done.contains(key) {
            continue;
        }
        done.push(*key);
        match step {
            Step::Set(json) => drop(map.insert((*key).to_owned(), serde_json::from_str(json).unwrap())),
            Step::Replace(json) if map.contains_key(*key) => {
                map.insert((*key).to_owned(), serde_json::from_str(json).unwrap());
            }
            Step::Replace(_) => {}
            Step::Remove => drop(map.remove(*key)),
            Step::Inside(steps) => match map.get(*key) {
                Some(Value::Object(inner)) => {
                    let inner = map_of(inner.clone(), steps)?;
                    map.insert((*key).to_owned(), Value::Object(inner));
                }
                None | Some(Value::Null) => {
                    let inner = map_of(Map::new(), steps)?;
                    if !inner.is_empty() {
                        map.insert((*key).to_owned(), Value::Object(inner));
                    }
                }
                Some(_) => return None,
            },
        }
    }
    Some(map)
}

fn step() -> impl Strategy<Value = Step> {
    let values = || prop::sample::select(VALUES);
    let flat = || prop_oneof![values().prop_map(Step::Set), values().prop_map(Step::Replace), Just(Step::Remove)];
    let inner = prop::collection::vec((prop::sample::select(KEYS), flat()), 0..3);
    prop_oneof![3 => flat(), 1 => inner.prop_map(Step::Inside)]
}

/// An object as a client might write it: white space anywhere, keys twice and in unusual spellings.
fn object() -> impl Strategy<Value = String> {
    let space = || prop::sample::select(&["", "", " ", "\n\t", "\r\n  "][..]);
    let key = prop::sample::select(
        &["a", r"\u0061", "b", "max_tokens", r"max\u005ftokens", "p", "", "other", r"a\\", r#"a\""#, "é", "aa"][..],
    );
    let value = prop::sample::select(
        &[
            "1",
            "null",
            "true",
            "-0.5e+2",
            r#""""#,
            r#""\\\"}{,""#,
            r#"{"a":1,"b":[{}],"p":null}"#,
            "[]",
            "[\"]\",{\"a\":2}]",
            "{ }",
            "{\"x\":\"漢\" , \"\\u0061\" : 3}",
            "12345678901234567890",
            "[ 1 , 22 ,333 ]",
        ][..],
    );
    let member = (space(), key, space(), space(), value, space());
    (prop::collection::vec(member, 0..7), space(), space()).prop_map(|(members, before, behind)| {
        let members: Vec<_> =
            members.iter().map(|(a, key, b, c, value, d)| format!("{a}\"{key}\"{b}:{c}{value}{d}")).collect();
        format!("{before}{{{}}}{behind}", members.join(","))
    })
}

/// The members that no edit names, as they were written.
fn untouched(object: &[u8], steps: &[(&'static str, Step)]) -> Vec<Vec<u8>> {
    let members = Members::new(object).unwrap().map(Result::unwrap);
    members
        .filter(|member| !steps.iter().any(|(key, _)| member.is(key)))
        .map(|member| object[member.start..member.end].to_vec())
        .collect()
}

proptest! {
    #[test]
    fn edited_bytes_equal_the_edited_map(object in object(), steps in prop::collection::vec((prop::sample::select(KEYS), step()), 0..5)) {
        let map: Map<String, Value> = serde_json::from_str(&object).unwrap();
        let edits = edits_of(&steps);
        match (edits.apply(object.as_bytes()), map_of(map, &steps)) {
            (Ok(edited), Some(expected)) => {
                let got: Map<String, Value> = serde_json::from_slice(&edited).unwrap();
                prop_assert_eq!(got, expected, "{}", String::from_utf8_lossy(&edited));
                prop_assert_eq!(untouched(&edited, &steps), untouched(object.as_bytes(), &steps));
                prop_assert_eq!(matches!(edited, Cow::Borrowed(_)), edited == object.as_bytes());
            }
            (Err(EditError::NotAnObjectInside { .. }), None) => {}
            // Servers disagree on which of two counts; a map takes the last.
            (Err(EditError::Twice { .. } | EditError::NotAnObjectInside { .. }), _) => {
                let members = Members::new(object.as_bytes()).unwrap().map(Result::unwrap);
                let inside = |m: &Member<'_>| steps.iter().any(|(k, step)| m.is(k) && matches!(step, Step::Inside(_)));
                prop_assert!(members.filter(inside).count() > 1, "{}", object);
            }
            (got, expected) => prop_assert!(false, "{object}: got {got:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn object_that_serde_accepts_can_be_edited(text in r#"[{]?(["{}\[\]:, a1]|\\"|"a":|null|\\u0061){0,12}[}]?"#) {
        let edited = Edits::new().set("a", b"7").remove("b").apply(text.as_bytes());
        if let Ok(mut map) = serde_json::from_str::<Map<String, Value>>(&text) {
            map.insert("a".to_owned(), 7.into());
            let got: Map<String, Value> = serde_json::from_slice(&edited.unwrap()).unwrap();
            prop_assert_eq!(got, map);
        }
    }

    #[test]
    fn truncated_object_is_an_error(object in object(), at in any::<prop::sample::Index>()) {
        let whole = object.trim_end();
        prop_assert!(Edits::new().remove("a").apply(&whole.as_bytes()[..at.index(whole.len())]).is_err());
    }
}
