//! Each declared key of the file is in the dump.

use crate::{ConfigText, Sources, document, keys, load, registry};
use serde_json::Value;

const FILE: &str = include_str!("tests/every_key.yaml");

/// Keys that the dump leaves out or shows under another name, and why.
const EXCEPTIONS: [(&str, &str); 3] = [
    ("pools.endpoints.role", "it is the label `llm-d.ai/role`, and the dump has it among the labels"),
    ("pools.flowControl.defaultBand.priority", "only the bands in `bands` have a priority"),
    ("pools.flowControl.sheddableBand.priority", "only the bands in `bands` have a priority"),
];

/// The values of a key, in all items of lists and in all values of mappings by name.
fn values<'v>(value: &'v Value, path: &[&str]) -> Vec<&'v Value> {
    let (Some((key, rest)), false) = (path.split_first(), value.is_null()) else { return vec![value] };
    match value {
        Value::Array(items) => items.iter().flat_map(|item| values(item, path)).collect(),
        Value::Object(map) => match map.get(*key) {
            Some(value) => values(value, rest),
            // The names of a mapping by name are no part of paths. All of its values are mappings.
            None if map.values().all(|value| value.get(key).is_some()) => {
                map.values().flat_map(|value| values(value, path)).collect()
            }
            None => Vec::new(),
        },
        _ => Vec::new(),
    }
}

/// Whether both are the same. A file may have `2` where the dump has `2.0`.
fn same(file: &Value, dump: &Value) -> bool {
    match (file, dump) {
        (Value::Array(file), Value::Array(dump)) => {
            file.len() == dump.len() && file.iter().zip(dump).all(|(file, dump)| same(file, dump))
        }
        // The dump also has the keys that the file leaves out.
        (Value::Object(file), Value::Object(dump)) => {
            file.iter().all(|(key, value)| dump.get(key).is_some_and(|dump| same(value, dump)))
        }
        (Value::Number(file), Value::Number(dump)) => file.as_f64() == dump.as_f64(),
        _ => file == dump,
    }
}

#[test]
fn dump_has_every_key_of_the_file_with_its_value() {
    let text = ConfigText { name: "every_key.yaml".to_owned(), bytes: FILE.as_bytes().to_vec() };
    let file = document::parse(&text.bytes, &mut Vec::new()).unwrap().value.to_json();
    let (settings, _) = load(&Sources { registry: registry(), text: Some(text), ..Sources::default() }).unwrap();
    let dump = settings.to_json();
    let mut wrong = Vec::new();
    let rows = keys::rows();
    for row in &rows {
        let path: Vec<&str> = row.path.split('.').collect();
        let given = values(&file, &path);
        if given.is_empty() {
            wrong.push(format!("{} is not in the file of this test", row.path));
        }
        let dumped = values(&dump, &path);
        let is_section = rows.iter().any(|other| other.path.starts_with(&format!("{}.", row.path)));
        let is_excepted = EXCEPTIONS.iter().any(|(path, _)| *path == row.path);
        let is_there = given.iter().all(|given| dumped.iter().any(|dumped| is_section || same(given, dumped)));
        if is_there == is_excepted {
            wrong.push(format!("{}: {given:?} in the file, {dumped:?} in the dump", row.path));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
