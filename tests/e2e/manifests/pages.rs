//! The gateway examples and the migration pages. YAML before and after a migration must be valid, and the picker must
//! accept the result.

use super::picker::{attache, configuration, refused};
use super::render::{Rendered, documents, examples, helm, kustomize, list, text};
use super::shape;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;

fn pages() -> Vec<(PathBuf, String)> {
    let migrations =
        std::fs::read_dir(examples().join("migrate")).expect("pages").map(|entry| entry.expect("a page").path());
    let pages = migrations.chain([examples().join("README.md"), examples().join("conformance.md")]);
    pages.map(|page| (page.clone(), std::fs::read_to_string(&page).expect("a page"))).collect()
}

/// The code blocks of a page in one language.
fn blocks(page: &str, language: &str) -> Vec<String> {
    let start = format!("\n```{language}\n");
    let blocks =
        page.split(&start).skip(1).map(|rest| rest.split("\n```").next().unwrap_or_default().to_owned() + "\n");
    blocks.collect()
}

/// One side of a diff: its own lines and the common lines.
fn side(diff: &str, own: char) -> String {
    let lines = diff.lines().filter_map(|line| match line.chars().next() {
        Some(' ') => Some(&line[1..]),
        Some(c) if c == own => Some(&line[1..]),
        Some('+' | '-') => None,
        other => panic!("a line of a difference begins with {other:?}: {line}"),
    });
    lines.map(|line| format!("{line}\n")).collect()
}

/// All values under a key, at any depth.
fn every<'a>(key: &str, value: &'a Value, found: &mut Vec<&'a Value>) {
    match value {
        Value::Object(fields) => fields.iter().for_each(|(name, inner)| {
            found.extend((name == key).then_some(inner));
            every(key, inner, found);
        }),
        Value::Array(items) => items.iter().for_each(|item| every(key, item, found)),
        _ => {}
    }
}

/// Checks that the picker, Kubernetes and the chart accept this YAML.
fn assert_accepted(name: &str, yaml: &str) {
    for document in documents(name, yaml) {
        let mut arguments = Vec::new();
        every("args", &document, &mut arguments);
        for arguments in arguments {
            assert_eq!(refused(list(arguments)), None, "{name}");
        }
        match document["kind"].as_str() {
            Some("Attache" | "EndpointPickerConfig") => configuration(name, yaml),
            Some("EnvoyPatchPolicy") => {}
            Some(_) => shape::check(&document).unwrap_or_else(|problem| panic!("{name}: {problem}")),
            None if document.get("inferenceExtension").is_some() => {
                let rendered = helm("standalone", yaml);
                let config = rendered.named("ConfigMap", &"llm-epp".into());
                configuration(name, text(&config["data"]["attache.yaml"]));
                assert_eq!(refused(list(&rendered.picker()["args"])), None, "{name}");
            }
            None => assert!(document.get("args").is_some(), "{name}: what is this? {document}"),
        }
    }
}

#[test]
fn configurations_on_pages_are_accepted() {
    let (mut differences, mut whole) = (0, 0);
    for (page, text) in pages() {
        for (i, block) in blocks(&text, "diff").iter().enumerate() {
            let name = format!("{}, difference {i}", page.display());
            let (before, after) = (side(block, '-'), side(block, '+'));
            assert_ne!(before, after, "{name}");
            for document in documents(&name, &before) {
                if document["kind"] == "Deployment" || document["kind"] == "Service" {
                    shape::check(&document).unwrap_or_else(|problem| panic!("{name}, before: {problem}"));
                }
            }
            assert_accepted(&name, &after);
            differences += 1;
        }
        for (i, block) in blocks(&text, "yaml").iter().enumerate() {
            assert_accepted(&format!("{}, block {i}", page.display()), block);
            whole += 1;
        }
    }
    assert!(differences >= 8 && whole >= 3, "{differences} {whole}");
}

#[test]
fn links_of_pages_have_a_target() {
    let mut links = 0;
    for (page, text) in pages() {
        for link in text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            if !link.starts_with("http") {
                let target = page.parent().expect("a directory").join(link);
                assert!(target.exists(), "{}: {link}", page.display());
                links += 1;
            }
        }
    }
    assert!(links > 10);
}

/// Flags of other programs that pages name as replaced.
const FLAGS_OF_OTHER_PROGRAMS: &[&str] = &[
    "--branch",
    "--condition",
    "--docker",
    "--engine-stats-interval",
    "--for",
    "--host",
    "--k8s-label-selector",
    "--k8s-namespace",
    "--lmcache-controller-port",
    "--namespace",
    "--port",
    "--routing-logic",
    "--session-key",
    "--set",
    "--values",
];

#[test]
fn flags_on_pages_exist() {
    let mut seen = BTreeSet::new();
    for (_, text) in pages() {
        let words =
            text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-')).filter(|word| word.starts_with("--"));
        seen.extend(words.filter(|word| word.len() > 3 && !word.ends_with('-')).map(str::to_owned));
    }
    assert!(seen.len() > 20, "{seen:?}");
    for flag in seen.iter().filter(|flag| !FLAGS_OF_OTHER_PROGRAMS.contains(&flag.as_str())) {
        let values = ["true", "1", "name", "json", "10s", "/path", "http", "vllm", "8000"];
        let taken = values.iter().any(|value| attache(&["run", &format!("{flag}={value}"), "--help"]).status.success());
        assert!(taken, "{flag} is no flag");
    }
}

/// The objects in a file of examples/kubernetes/gateways.
fn gateway(file: &str) -> Rendered {
    let text = std::fs::read_to_string(examples().join("gateways").join(file)).expect("an example");
    Rendered { name: file.to_owned(), objects: documents(file, &text) }
}

#[test]
fn gateway_examples_match_their_routes_and_the_base() {
    let base = kustomize(&examples().join("base"));
    let routes = ["httproute.yaml", "httproute-canary.yaml"];
    let mut gateways = Vec::new();
    for entry in std::fs::read_dir(examples().join("gateways")).expect("examples") {
        let file = entry.expect("an example").file_name().into_string().expect("a name");
        let example = gateway(&file);
        for object in &example.objects {
            shape::check(object).unwrap_or_else(|problem| panic!("{file}: {}: {problem}", object["kind"]));
        }
        if !routes.contains(&file.as_str()) {
            gateways.push(example);
        }
    }
    assert!(gateways.len() >= 4);
    let pool = &base.one("InferencePool")["metadata"]["name"];
    for route in routes.map(gateway) {
        let spec = &route.one("HTTPRoute")["spec"];
        for gateway in &gateways {
            gateway.named("Gateway", &spec["parentRefs"][0]["name"]);
        }
        let mut backends = list(&spec["rules"]).iter().flat_map(|rule| list(&rule["backendRefs"]));
        assert!(backends.any(|backend| backend["name"] == *pool), "{}", route.name);
        // Otherwise gateways end requests after 15 s.
        assert!(list(&spec["rules"]).iter().all(|rule| rule["timeouts"]["request"] == "0s"), "{}", route.name);
    }
    for example in &gateways {
        for class in example.of("GatewayClass") {
            assert_eq!(
                example.one("Gateway")["spec"]["gatewayClassName"],
                class["metadata"]["name"],
                "{}",
                example.name
            );
        }
        for policy in example.of("HealthCheckPolicy").chain(example.of("GCPBackendPolicy")) {
            assert_eq!(policy["spec"]["targetRef"]["name"], *pool, "{}", example.name);
        }
        let at = &base.one("Service")["metadata"];
        let namespace = at["namespace"].as_str().unwrap_or("default");
        let host = format!("{}.{namespace}.svc.cluster.local", text(&at["name"]));
        for rule in example.of("DestinationRule") {
            assert_eq!(rule["spec"]["host"], host, "{}", example.name);
            assert_eq!(rule["spec"]["trafficPolicy"]["tls"]["sni"], host, "{}", example.name);
        }
        for filter in example.of("EnvoyFilter") {
            let cluster = &filter["spec"]["configPatches"][0]["match"]["cluster"];
            assert_eq!(cluster["service"], host, "{}", example.name);
        }
    }
}
