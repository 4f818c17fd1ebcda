//! What the README says is so: its tables, its configuration, its flags and the tests that it names.

use attache::config::{ConfigText, Overrides, Sources, Surroundings, load};
use attache::disagg::CONNECTORS;
use attache::flow::registry::{self as flow, Descriptor};
use attache::scheduling::registry;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const README: &str = include_str!("../README.md");
const SECURITY: &str = include_str!("../SECURITY.md");

/// The rows of README's table whose head begins with `head`, cell by cell.
fn rows(head: &str) -> Vec<Vec<&'static str>> {
    rows_of(README, head)
}

/// The same of another page.
fn rows_of(page: &'static str, head: &str) -> Vec<Vec<&'static str>> {
    let start = page.find(head).unwrap_or_else(|| panic!("no table {head:?}"));
    let lines = page[start..].lines().skip(2).take_while(|line| line.starts_with('|'));
    let rows: Vec<Vec<_>> = lines.map(|line| line.trim_matches('|').split('|').map(str::trim).collect()).collect();
    assert!(!rows.is_empty(), "{head}");
    rows
}

fn plain(cell: &str) -> &str {
    cell.trim_matches('`')
}

#[test]
fn the_plugin_tables_are_the_registry() {
    let said = |head: &str| -> Vec<Vec<&str>> {
        rows(head).into_iter().map(|row| [&[plain(row[0])], &row[1..]].concat()).collect()
    };
    let strategies: Vec<_> = registry::STRATEGIES.iter().map(|d| vec![d.name, d.summary, d.source]).collect();
    assert_eq!(said("| strategy |"), strategies);
    let plugins: Vec<_> = registry::PLUGINS.iter().map(|d| vec![d.name, d.kind, d.summary, d.source]).collect();
    assert_eq!(said("| plugin |"), plugins);
}

#[test]
fn the_policy_table_is_the_registry() {
    fn each<P: ?Sized>(kind: &str, policies: &[&Descriptor<P>]) -> Vec<Vec<String>> {
        policies.iter().map(|d| [d.name, kind, d.summary, d.source].map(str::to_owned).to_vec()).collect()
    }
    let known = [
        each("fairness", flow::FAIRNESS),
        each("ordering", flow::ORDERINGS),
        each("ceiling", flow::CEILINGS),
        each("detector", flow::DETECTORS),
        each("admitter", flow::ADMITTERS),
    ];
    let said: Vec<Vec<&str>> =
        rows("| policy |").into_iter().map(|row| [&[plain(row[0])], &row[1..]].concat()).collect();
    assert_eq!(said, known.concat());
}

#[test]
fn the_connector_table_is_the_registry() {
    let said: Vec<Vec<&str>> =
        rows("| connector |").into_iter().map(|row| [&[plain(row[0])], &row[1..]].concat()).collect();
    let known: Vec<_> = CONNECTORS.iter().map(|d| vec![d.name, d.summary, d.source]).collect();
    assert_eq!(said, known);
}

#[test]
fn the_configuration_is_accepted() {
    let (_, rest) = README.split_once("```yaml\n").expect("an example");
    let (text, _) = rest.split_once("```").expect("its end");
    let sources = Sources {
        text: Some(ConfigText { name: "README.md".into(), bytes: text.as_bytes().to_vec() }),
        overrides: Overrides::default(),
        surroundings: Surroundings { cores: 4, terminal: false },
    };
    let (settings, warnings) = load(&sources).expect("a configuration");
    assert!(warnings.is_empty(), "{warnings:?}");
    assert_eq!(settings.pools.len(), 2);
}

#[test]
fn every_flag_exists() {
    let mut known = String::new();
    for verb in ["run", "check", "sim", "replay"] {
        let output = Command::new(env!("CARGO_BIN_EXE_attache")).args([verb, "--help"]).output().unwrap();
        known.push_str(&String::from_utf8(output.stdout).unwrap());
    }
    let known: BTreeSet<&str> = flags(&known).collect();
    // cargo's and the quickstart's.
    let others = ["--path", "--locked", "--stay"];
    let said: BTreeSet<&str> = flags(README).filter(|flag| !others.contains(flag)).collect();
    assert!(said.contains("--grpc-port"), "{said:?}");
    assert_eq!(said.difference(&known).collect::<Vec<_>>(), Vec::<&&str>::new(), "flags that there are not");
}

fn flags(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !(c.is_ascii_lowercase() || c == '-'));
    words.filter(|word| word.starts_with("--") && word.len() > 3 && !word.starts_with("---"))
}

#[test]
fn every_test_that_shows_a_promise_exists() {
    let guarantees = ["| a client can't |", "| a pod can't |"].map(|head| rows_of(SECURITY, head));
    for row in rows("| promise |").into_iter().chain(guarantees.into_iter().flatten()) {
        let mut named = 0;
        for reference in row[1].split(", ") {
            let (name, path) = reference.trim_matches(['[', ')']).split_once("](").expect("a link");
            let file = std::fs::read_to_string(format!("{}/{path}", env!("CARGO_MANIFEST_DIR"))).expect(path);
            assert!(file.contains(&format!("fn {}(", plain(name))), "{name} is not in {path}");
            named += 1;
        }
        assert!(named > 0, "{row:?}");
    }
}

#[test]
fn every_attack_test_is_named_in_the_threat_model() {
    let directory = format!("{}/tests/attacks", env!("CARGO_MANIFEST_DIR"));
    // What the other tests compare with: no attack, or no protection.
    let controls = [
        "honest_clients_without_attack_complete",
        "picker_without_client_ca_takes_streams_of_any_pod",
        "servers_that_are_down_are_ejected_beyond_the_share_after_two_requests",
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
fn every_limit_of_the_threat_model_names_a_key_and_a_metric_that_exist() {
    let full = include_str!("../examples/configs/full.yaml");
    let known: BTreeSet<&str> = rows("| metric |").into_iter().map(|row| plain(row[0])).collect();
    for row in rows_of(SECURITY, "| resource | limit |") {
        for key in row[2].split(", ").filter(|key| *key != "–") {
            let last = plain(key).rsplit('.').next().expect("a key");
            assert!(full.contains(&format!("{last}:")), "{key} is not in full.yaml");
        }
        for metric in row[3].split(", ") {
            assert!(known.contains(plain(metric)), "{metric} is not in README.md");
        }
    }
}

/// A picker that is ended with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `/metrics` of a running picker with TLS and traces.
fn metrics() -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.args(["run", "--bind", "127.0.0.1", "--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"]);
    command.args(["--endpoint", "127.0.0.1:9", "--log-format", "json"]);
    if cfg!(feature = "otlp") {
        command.args(["--otlp-endpoint", "http://127.0.0.1:9"]);
    }
    let mut picker = Running(command.stderr(Stdio::piped()).spawn().unwrap());
    let log = BufReader::new(picker.0.stderr.take().unwrap());
    let address = log
        .lines()
        .map_while(Result::ok)
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(&line).ok())
        .find_map(|line| line.get("metrics").or_else(|| line["fields"].get("metrics"))?.as_str().map(str::to_owned))
        .expect("a line with the listeners");
    let mut connection = TcpStream::connect(address).unwrap();
    connection.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    connection.write_all(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").unwrap();
    let mut page = String::new();
    connection.read_to_string(&mut page).unwrap();
    page
}

#[test]
fn the_metrics_table_is_the_page() {
    let page = metrics();
    let said: BTreeMap<&str, BTreeSet<&str>> = rows("| metric |")
        .iter()
        .map(|row| (plain(row[0]), row[1].split(", ").map(plain).filter(|label| !label.is_empty()).collect()))
        .collect();
    let mut shown = BTreeSet::new();
    for line in page.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (family, kind) = line.split_once(' ').unwrap();
        let counter = format!("{family}_total");
        shown.insert(if kind == "counter" { counter } else { family.to_owned() });
    }
    assert_eq!(said.keys().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>(), shown);

    let mut samples = 0;
    for line in page.lines().filter(|line| line.starts_with("attache_")) {
        let series = line.rsplit_once(' ').unwrap().0;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let of = ["_bucket", "_count", "_sum"].iter().find_map(|suffix| said.get_key_value(name.strip_suffix(suffix)?));
        let (_, said) = said.get_key_value(name).or(of).unwrap_or_else(|| panic!("{name} is not in the table"));
        // No value of a label here holds these two characters.
        let labels = labels.split("=\"").filter_map(|part| part.rsplit(['"', ',']).next());
        let labels: BTreeSet<&str> = labels.filter(|label| !matches!(*label, "le" | "}" | "")).collect();
        assert_eq!(&labels, said, "{line}");
        samples += 1;
    }
    assert!(samples > 40, "{samples} samples");
}
