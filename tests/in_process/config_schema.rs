//! The JSON Schema of `attache config schema`, by a validator that is not Attaché's, and the file of `attache config
//! defaults`.

use crate::tools;
use attache::plugins::registry;
use attache_config::diagnostic::{Code, Diagnostic};
use attache_config::document::{self, Value};
use attache_config::{ConfigText, Overrides, Sources, Surroundings, keys, load};
use serde_json::{Value as Json, json};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Reads a schema and instances, and writes for each whether it is valid.
const VALIDATOR: &str = "\
import json, sys
from jsonschema import Draft202012Validator
given = json.load(sys.stdin)
Draft202012Validator.check_schema(given['schema'])
validator = Draft202012Validator(given['schema'])
errors = lambda it: [f'{error.json_path}: {error.message[:200]}' for error in validator.iter_errors(it)]
json.dump([errors(it) for it in given['instances']], sys.stdout)
";

/// The validator's errors for each instance.
fn validated(instances: &[Json]) -> Vec<Vec<String>> {
    let mut python = Command::new("python3")
        .args(["-c", VALIDATOR])
        .env("PYTHONPATH", tools::installed("jsonschema"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3");
    let given = json!({"schema": keys::json_schema(&registry()), "instances": instances}).to_string();
    let mut stdin = python.stdin.take().expect("its input");
    let writer = std::thread::spawn(move || stdin.write_all(given.as_bytes()));
    let output = python.wait_with_output().expect("its output");
    writer.join().expect("a thread").expect("written");
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).expect("JSON")
}

fn files(directory: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join(directory);
    let mut found: Vec<_> = std::fs::read_dir(&directory)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "yaml"))
        .map(|path| (path.clone(), std::fs::read(path).expect("its text")))
        .collect();
    found.sort();
    assert!(!found.is_empty(), "{}", directory.display());
    found
}

/// The file as JSON, if it is YAML and of Attaché's own kind or of none that is known.
fn instance(bytes: &[u8]) -> Option<Json> {
    let node = document::parse(bytes, &mut Vec::new()).ok()?;
    let is_of_llm_d = |value: &Value| value.to_json()["kind"] == "EndpointPickerConfig";
    (!is_of_llm_d(&node.value)).then(|| node.value.to_json())
}

fn diagnostics(bytes: &[u8]) -> Vec<Diagnostic> {
    let text = Some(ConfigText { name: "test.yaml".to_owned(), bytes: bytes.to_vec() });
    let overrides = Overrides { endpoints_follow: true, ..Overrides::default() };
    match load(&Sources { registry: registry(), text, overrides, surroundings: Surroundings::default() }) {
        Ok((_, diagnostics)) | Err(diagnostics) => diagnostics,
    }
}

/// Whether a mistake is one of structure: version, unknown key, type.
fn is_structural(diagnostic: &Diagnostic) -> bool {
    matches!(diagnostic.code, Code::Version | Code::UnknownKey | Code::WrongType)
}

#[test]
fn json_schema_accepts_every_valid_file() {
    let mut names = Vec::new();
    let mut instances = Vec::new();
    for directory in ["examples/configs", "tests/data/config/warn"] {
        for (path, bytes) in files(directory) {
            // Others are of llm-d, or have the configuration inside.
            if let Some(instance) = instance(&bytes).filter(|instance| instance["kind"] == "Attache") {
                names.push(path);
                instances.push(instance);
            }
        }
    }
    assert!(instances.len() > 15, "{}", instances.len());
    for (name, errors) in names.iter().zip(validated(&instances)) {
        assert_eq!(errors, Vec::<String>::new(), "{}", name.display());
    }
}

#[test]
fn json_schema_rejects_each_file_with_a_mistake_of_structure() {
    let mut names = Vec::new();
    let mut instances = Vec::new();
    for (path, bytes) in files("tests/data/config/bad") {
        let Some(instance) = instance(&bytes) else { continue };
        if diagnostics(&bytes).iter().any(is_structural) {
            names.push(path);
            instances.push(instance);
        }
    }
    assert!(instances.len() >= 5, "{names:?}");
    for (name, errors) in names.iter().zip(validated(&instances)) {
        assert!(!errors.is_empty(), "{} is valid by the schema", name.display());
    }
}

/// Each value of the file, by its path of keys and positions.
fn paths(value: &Json, path: &str, found: &mut Vec<String>) {
    let mut add = |key: String, value: &Json| {
        let path = format!("{path}/{key}");
        found.push(path.clone());
        paths(value, &path, found);
    };
    match value {
        Json::Object(entries) => entries.iter().for_each(|(key, value)| add(key.clone(), value)),
        Json::Array(items) => items.iter().enumerate().for_each(|(i, value)| add(i.to_string(), value)),
        _ => {}
    }
}

/// The schema and Attaché agree about single changes of a file with every key: wrong types, unknown keys, absent keys.
#[test]
fn json_schema_and_attache_reject_the_same_changes_of_structure() {
    let full = instance(include_bytes!("../../examples/configs/full.yaml")).expect("YAML");
    let mut all = Vec::new();
    paths(&full, "", &mut all);
    // Names that users choose, and parameters that plugins check.
    let is_free = |path: &str| {
        ["/parameters/", "/overrides/", "/labels/zone", "/objectives/", "/shares/"]
            .iter()
            .any(|part| path.contains(part))
    };
    let mut changed = Vec::new();
    for path in all.iter().filter(|path| !is_free(path)) {
        for value in [json!([[1]]), json!({"no-such-key": 1}), json!(-1.5), json!("?"), json!(true), json!(null)] {
            let mut other = full.clone();
            *other.pointer_mut(path).expect("the path") = value.clone();
            changed.push((format!("{path} = {value}"), other));
        }
    }
    assert!(changed.len() > 500, "{}", changed.len());
    let instances: Vec<Json> = changed.iter().map(|(_, instance)| instance.clone()).collect();
    let mut disagree = Vec::new();
    for ((what, instance), errors) in changed.iter().zip(validated(&instances)) {
        let told = diagnostics(instance.to_string().as_bytes());
        // A schema can't check everything that Attaché does. It rejects each mistake of structure, and nothing that is valid.
        if told.iter().any(is_structural) && errors.is_empty() {
            disagree.push(format!("{what}: only Attaché rejects it: {told:?}"));
        }
        if !errors.is_empty() && !told.iter().any(Diagnostic::is_error) {
            disagree.push(format!("{what}: only the schema rejects it: {errors:?}"));
        }
    }
    assert!(disagree.is_empty(), "{} of {}: {:#?}", disagree.len(), changed.len(), &disagree[..disagree.len().min(10)]);
}

#[test]
fn json_schema_and_attache_agree_about_parameters_of_plugins() {
    let of_strategy = |name: &str, parameters: Json| json!({"strategy": {"name": name, "parameters": parameters}});
    let of_flow = |key: &str, policy: Json| json!({"flowControl": {"enabled": true, key: policy}});
    let part = |kind: &str, parameters: Json| json!({"scorers": [{"type": kind, "parameters": parameters}]});
    let cases = [
        (of_strategy("vtc-basic", json!({"compat": true})), true),
        (of_strategy("vtc-basic", json!({"compat": null})), true),
        (of_strategy("vtc-basic", json!(null)), true),
        (of_strategy("vtc-basic", json!({"compatt": true})), false),
        (of_strategy("prefix-cache-preble", json!({"targetGPU": "H1"})), false),
        (of_strategy("chwbl", json!({"load_factor": 1.5})), true),
        (of_strategy("chwbl", json!({"load_factor": 0.5})), false),
        (of_strategy("fallback", json!({"primary": "random"})), true),
        (of_strategy("fallback", json!({"primary": {"name": "random", "parameters": {"x": 1}}})), false),
        (of_strategy("pipeline", part("load-aware-scorer", json!({"threshold": 9}))), true),
        (of_strategy("pipeline", part("load-aware-scorer", json!({"threshold": 0}))), false),
        (of_flow("detector", json!({"name": "backlog-detector", "parameters": {"maxPrefillTime": "20ms"}})), true),
        (of_flow("detector", json!({"name": "backlog-detector", "parameters": {"maxPrefillTime": "soon"}})), false),
        (of_flow("ceiling", json!({"name": "static", "parameters": {"threshold": -1}})), false),
        (of_flow("admitters", json!([{"name": "probabilistic-admitter", "parameters": {"power": 0}}])), false),
        (of_flow("defaultBand", json!({"fairness": {"name": "vtc-fair", "parameters": {"burstTokens": 100}}})), true),
        (of_flow("defaultBand", json!({"fairness": {"name": "vtc-fair", "parameters": {"burst": 100}}})), false),
    ];
    let file = |(pool, _): &(Json, bool)| {
        let mut pool = pool.clone();
        pool["name"] = json!("main");
        pool["endpoints"] = json!(["10.0.0.1:8000"]);
        json!({"apiVersion": "attache.dev/v1", "kind": "Attache", "pools": [pool]})
    };
    let files: Vec<Json> = cases.iter().map(file).collect();
    for ((file, (pool, is_valid)), errors) in files.iter().zip(&cases).zip(validated(&files)) {
        assert_eq!(errors.is_empty(), *is_valid, "{pool}: {errors:?}");
        let found = diagnostics(file.to_string().as_bytes());
        assert_eq!(!found.iter().any(Diagnostic::is_error), *is_valid, "{pool}: {found:?}");
    }
}

#[test]
fn file_of_defaults_changes_nothing() {
    const MINIMAL: &str = "apiVersion: attache.dev/v1\nkind: Attache\npools: [{name: default}]\n";
    let load = |text: &str| {
        let text = Some(ConfigText { name: "defaults.yaml".to_owned(), bytes: text.as_bytes().to_vec() });
        let overrides = Overrides { endpoints: vec!["127.0.0.1:8000".to_owned()], ..Overrides::default() };
        load(&Sources { registry: registry(), text, overrides, surroundings: Surroundings::default() })
    };
    let defaults = keys::defaults();
    let (with, told) = load(&defaults).unwrap_or_else(|told| panic!("{told:#?}"));
    assert_eq!(told, []);
    let (without, _) = load(MINIMAL).expect("a minimal file");
    assert_eq!(with.to_json(), without.to_json());
    for row in keys::rows() {
        let name = row.path.rsplit('.').next().expect("a name");
        assert!(defaults.contains(&format!("{name}:")), "{} is not in the file", row.path);
    }
}
