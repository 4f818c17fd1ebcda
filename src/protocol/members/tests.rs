use super::*;
use proptest::prelude::*;
use serde_json::{Value, json};

/// Selects the member `a` of the root, the members of `o`, and the member `a` of that.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen(Vec<(bool, Option<String>)>, usize);

impl Visitor for Seen {
    type Member = ();

    fn wants(&mut self, path: &[()], name: &[u8]) -> Wanted<()> {
        match name {
            b"a" => Wanted::Value(()),
            b"o" if path.is_empty() => Wanted::Members(()),
            _ => Wanted::No,
        }
    }

    fn begin(&mut self, path: &[()]) {
        if !path.is_empty() {
            self.0.retain(|(inner, _)| !inner);
        }
    }

    fn mistyped(&mut self, _: &[()], (): (), _: u8) {
        self.0.retain(|(inner, _)| !inner);
    }

    fn value(&mut self, path: &[()], (): (), value: Option<&[u8]>) {
        self.0.push((!path.is_empty(), value.map(|value| String::from_utf8_lossy(value).into_owned())));
    }

    fn end(&mut self, path: &[()], number: usize) {
        if path.is_empty() {
            assert_eq!(number, self.1);
            self.1 += 1;
        }
    }
}

fn seen<'c>(lists: bool, chunks: impl IntoIterator<Item = &'c [u8]>) -> Seen {
    let (mut reader, mut seen) = (MemberReader::new(lists, DEFAULT_MAX_VALUE_BYTES), Seen::default());
    chunks.into_iter().for_each(|chunk| reader.push(chunk, &mut seen));
    seen
}

/// A document, the delivered values (of an inner object or of the root), and how many objects end.
type Case = (&'static str, &'static [(bool, &'static str)], usize);

#[test]
fn members_are_found_only_at_their_position() {
    let cases: &[Case] = &[
        (r#"{"a":1}"#, &[(false, "1")], 1),
        (
            " { \"b\" : {\"a\":1} ,\n\"a\" : \"}\\\"\\\\\" , \"o\":{\"a\":[{}]} } ",
            &[(false, r#""}\"\\""#), (true, "[{}]")],
            1,
        ),
        (r#"{"a":true,"a":{"a":2}}"#, &[(false, "true"), (false, r#"{"a":2}"#)], 1),
        (r#"{"o":{"a":1,"o":{"a":2}},"p":[{"a":3}],"q":"\"a\":4,"}"#, &[(true, "1")], 1),
        (r#"{"o":{"a":1},"o":{"b":1}}"#, &[], 1),
        (r#"{"o":{"a":1},"o":7}"#, &[], 1),
        (r#"{"\u0061":1}"#, &[(false, "1")], 1),
        (r#"{"\a":1,"\u00":2,"a\\":3}"#, &[], 1),
        (r#"{"o":[{"a":1}]}"#, &[], 1),
        (r#"{"a":1"#, &[], 0),
        (r#"{"a":"1"#, &[], 0),
        (r#"{"a":1]"#, &[(false, "1")], 0),
        (r#"{"a":1}{"a":2}"#, &[(false, "1")], 1),
        (r#"[{"a":1}]"#, &[], 0),
        ("[DONE]", &[], 0),
        ("", &[], 0),
    ];
    for (input, members, ended) in cases {
        let members = members.iter().map(|(inner, value)| (*inner, Some((*value).to_owned()))).collect();
        let expected = Seen(members, *ended);
        for size in 1..=input.len().max(1) {
            assert_eq!(seen(false, input.as_bytes().chunks(size)), expected, "{input} in chunks of {size}");
        }
    }
}

#[test]
fn lists_report_the_end_of_each_object() {
    for (input, values, ended) in [
        (r#"[{"a":1},{"a":2}]"#, vec!["1", "2"], 2),
        (r#"[{"a":1},7,"{",[{"a":3}],{"b":2}] {"a":4}"#, vec!["1"], 2),
        (r#"{"a":1}"#, vec!["1"], 1),
        ("[]", vec![], 0),
        ("[DONE]", vec![], 0),
    ] {
        for size in 1..=input.len() {
            let found = seen(true, input.as_bytes().chunks(size));
            let expected = values.iter().map(|value| (false, Some((*value).to_owned()))).collect();
            assert_eq!(found, Seen(expected, ended), "{input}");
        }
    }
}

#[test]
fn value_over_the_limit_is_unreadable_and_the_next_is_read() {
    let long = format!(r#"{{"a":{{"x":"{}"}},"o":{{"a":1}}}}"#, "x".repeat(DEFAULT_MAX_VALUE_BYTES));
    for size in [1_000, usize::MAX] {
        let found = seen(false, long.as_bytes().chunks(size));
        assert_eq!(found, Seen(vec![(false, None), (true, Some("1".to_owned()))], 1), "in chunks of {size}");
    }
    let name = format!(r#"{{"{}":1,"a":2}}"#, "x".repeat(DEFAULT_MAX_VALUE_BYTES + 1));
    assert_eq!(seen(false, name.as_bytes().chunks(999)), Seen(vec![(false, Some("2".to_owned()))], 1));
}

/// Documents with the selected names everywhere, brackets and quotes in strings, runs of backslashes, and long
/// runs of numbers and prose.
fn document() -> impl Strategy<Value = Value> {
    let name = prop_oneof![Just("a"), Just("o"), Just("a\"b\\"), Just("\\"), Just("[{\"a\":1")];
    let leaf = prop_oneof![
        Just(json!(null)),
        Just(json!(-1.5e300)),
        Just(json!(true)),
        r#"([\\"{}\[\]a:,\n]|\\\\"a":){0,9}"#.prop_map(Value::from),
        (0usize..200).prop_map(|n| json!("\\".repeat(n))),
        (0usize..200).prop_map(|n| json!("x".repeat(n) + "\"")),
        (0usize..80).prop_map(|n| json!(vec![7; n])),
    ];
    leaf.prop_recursive(5, 60, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
            prop::collection::btree_map(name.clone(), inner, 0..5)
                .prop_map(|map| map.into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<Value>()),
        ]
    })
}

proptest! {
    #[test]
    fn result_agrees_with_a_strict_parser(
        document in document(),
        pretty: bool,
        sizes in prop::collection::vec(1usize..200, 1..5),
    ) {
        let text = if pretty { format!("{document:#}") } else { document.to_string() };
        let (mut rest, mut chunks) = (text.as_bytes(), Vec::new());
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (chunk, after) = rest.split_at((*size).min(rest.len()));
            chunks.push(chunk);
            rest = after;
        }
        let found = seen(false, chunks);
        let read = |inner: bool| {
            let values = found.0.iter().filter(move |value| value.0 == inner);
            let last = values.filter_map(|(_, value)| value.as_ref()).next_back();
            last.map(|value| serde_json::from_str::<Value>(value).unwrap())
        };
        prop_assert_eq!(read(false), document.as_object().and_then(|root| root.get("a")).cloned());
        let inner = document.as_object().and_then(|root| root.get("o")).and_then(Value::as_object);
        prop_assert_eq!(read(true), inner.and_then(|inner| inner.get("a")).cloned());
        prop_assert_eq!(found.1, usize::from(document.is_object()));
    }

    #[test]
    fn any_bytes_give_the_same_result_for_any_chunks(
        pieces in prop::collection::vec(prop::sample::select(vec![
            "{", "}", "[", "]", "\"", "\\", ":", ",", "\"a\":", "\"o\":{", "1", "null", " ", "\n", "x", "\"a\\",
        ]), 0..80),
        size in 1usize..70,
        lists: bool,
    ) {
        let input = pieces.concat();
        prop_assert_eq!(seen(lists, input.as_bytes().chunks(size)), seen(lists, [input.as_bytes()]));
    }
}
