//! Checks of README.md and SECURITY.md. `tests/in_process/docs` checks the other pages, and the links and sentences of
//! all pages.

use attache_config::{ConfigText, Overrides, Sources, Surroundings, load};
use std::collections::BTreeSet;
use std::process::Command;

const README: &str = include_str!("../../README.md");
const SECURITY: &str = include_str!("../../SECURITY.md");
const METRICS: &str = include_str!("../../docs/reference/metrics.md");

/// The rows of a page's tables whose header starts with `head`, cell by cell.
fn rows_of(page: &'static str, head: &str) -> Vec<Vec<&'static str>> {
    let tables = page.match_indices(head).map(|(start, _)| page[start..].lines().skip(2));
    let lines = tables.flat_map(|lines| lines.take_while(|line| line.starts_with('|')));
    let rows: Vec<Vec<_>> = lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect();
    assert!(!rows.is_empty(), "{head}");
    rows
}

fn plain(cell: &str) -> &str {
    cell.trim_matches(['*', '`'])
}

#[test]
fn readme_configuration_is_accepted() {
    let (_, rest) = README.split_once("```yaml\n").expect("an example");
    let (text, _) = rest.split_once("```").expect("its end");
    let sources = Sources {
        registry: attache::plugins::registry(),
        text: Some(ConfigText { name: "README.md".into(), bytes: text.as_bytes().to_vec() }),
        overrides: Overrides::default(),
        surroundings: Surroundings { cores: 4, terminal: false },
    };
    let (settings, warnings) = load(&sources).expect("a configuration");
    assert!(warnings.is_empty(), "{warnings:?}");
    assert_eq!(settings.pools.len(), 2);
}

#[test]
fn readme_flags_exist() {
    let mut known = String::new();
    for verb in ["run", "check", "quickstart", "sim", "replay"] {
        let output = Command::new(env!("CARGO_BIN_EXE_attache")).args([verb, "--help"]).output().unwrap();
        known.push_str(&String::from_utf8(output.stdout).unwrap());
    }
    let known: BTreeSet<&str> = flags(&known).collect();
    let said: BTreeSet<&str> = flags(README).collect();
    assert!(said.contains("--endpoint"), "{said:?}");
    assert_eq!(said.difference(&known).collect::<Vec<_>>(), Vec::<&&str>::new(), "flags that there are not");
}

fn flags(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_ascii_lowercase() || c == '-'));
    words.filter(|word| word.starts_with("--") && word.len() > 3 && !word.starts_with("---"))
}

#[test]
fn every_attack_test_is_named_in_the_threat_model() {
    let directory = format!("{}/tests/attacks", env!("CARGO_MANIFEST_DIR"));
    // Control tests: without an attack, or without the protection.
    let controls = [
        "honest_clients_without_attack_complete",
        "picker_without_client_ca_accepts_streams_of_any_pod",
        "unreachable_servers_are_ejected_beyond_the_limit",
    ];
    let mut tests = 0;
    for file in std::fs::read_dir(directory).expect("the attacks") {
        let text = std::fs::read_to_string(file.expect("a file").path()).expect("its text");
        for attribute in text.split("#[tokio::test").skip(1) {
            let name = attribute.split_once("fn ").and_then(|(_, rest)| rest.split('(').next()).expect("a test");
            assert!(controls.contains(&name) || SECURITY.contains(name), "{name} is not in SECURITY.md");
            tests += 1;
        }
    }
    assert!(tests > 30, "{tests}");
}

#[test]
fn threat_model_limits_name_existing_keys_and_metrics() {
    let keys = attache_config::keys::rows();
    let known: BTreeSet<&str> = rows_of(METRICS, "| metric |").into_iter().map(|row| plain(row[0])).collect();
    for row in rows_of(SECURITY, "| resource | limit |") {
        for key in row[2].split(", ").filter(|key| *key != "–") {
            let is_known = |path: &str| path == plain(key) || path.ends_with(&format!(".{}", plain(key)));
            assert!(keys.iter().any(|row| is_known(&row.path)), "{key} is no key");
        }
        for metric in row[3].split(", ").filter(|metric| *metric != "–") {
            assert!(known.contains(plain(metric)), "{metric} is not on the page of metrics");
        }
    }
}
