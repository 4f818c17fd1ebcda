//! Dashboards and alerting rules: dashboards equal the output of their generator and are complete, each alert has a
//! runbook, and metrics that either of them names exist.

use super::markdown::{page, root, rows};
use crate::tools;
use attache_kv_events::{EventUse, Trust};
use attache_types::labels::Listed;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

const RULES: [&str; 2] = ["examples/prometheus/recording.yaml", "examples/prometheus/alerts.yaml"];

/// The dashboards: file name and text.
fn dashboards() -> Vec<(String, String)> {
    let entries = std::fs::read_dir(root().join("examples/grafana")).expect("dashboards");
    let names = entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"));
    let mut names: Vec<_> = names.filter(|name| name.ends_with(".json")).collect();
    names.sort();
    names.into_iter().map(|name| (name.clone(), page(&format!("examples/grafana/{name}")))).collect()
}

/// The metrics that the reference lists, histograms with their suffixes.
fn metrics() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for row in rows(&page("docs/reference/metrics.md"), "| metric |") {
        let name = name_of(&row).to_owned();
        match row[1].as_str() {
            "histogram" => names.extend(["_bucket", "_count", "_sum"].map(|suffix| name.clone() + suffix)),
            _ => _ = names.insert(name),
        }
    }
    names
}

/// The names of metrics of Attaché in a text.
fn named(text: &str) -> BTreeSet<String> {
    let words = text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_' || c == ':'));
    words.filter(|word| word.starts_with("attache_") || word.starts_with("process_")).map(str::to_owned).collect()
}

#[test]
fn dashboards_equal_the_output_of_their_generator() {
    let output = tempfile::tempdir().expect("a directory");
    let generator = root().join("examples/grafana/dashboards.py");
    let status = Command::new("python3").arg(generator).arg(output.path()).status().expect("python3");
    assert!(status.success());
    let mut made = 0;
    for (name, text) in dashboards() {
        let generated = std::fs::read_to_string(output.path().join(&name)).expect("a dashboard of the generator");
        assert!(text == generated, "{name} is not what examples/grafana/dashboards.py writes: run it");
        made += 1;
    }
    assert_eq!(std::fs::read_dir(output.path()).expect("the output").count(), made);
    assert!(made >= 8, "{made}");
}

#[test]
fn dashboards_have_units_descriptions_and_variables() {
    let mut uids = BTreeSet::new();
    for (name, text) in dashboards() {
        let dashboard: Value = serde_json::from_str(&text).expect(&name);
        assert!(dashboard["schemaVersion"].as_u64().is_some_and(|version| version >= 39), "{name}: Grafana 11 has 39");
        assert!(uids.insert(dashboard["uid"].as_str().expect("a uid").to_owned()), "{name}: a second uid");
        let variables = dashboard["templating"]["list"].as_array().expect("variables");
        let known: BTreeSet<&str> = variables.iter().map(|v| v["name"].as_str().expect("a name")).collect();
        assert!(known.contains("datasource") && known.contains("job"), "{name}: {known:?}");
        let panels = dashboard["panels"].as_array().expect("panels");
        assert!(panels.len() >= 8, "{name}: {}", panels.len());
        let mut places = BTreeSet::new();
        for panel in panels {
            let said = format!("{name}: {}", panel["title"]);
            for text in [&panel["title"], &panel["description"], &panel["fieldConfig"]["defaults"]["unit"]] {
                assert!(text.as_str().is_some_and(|text| !text.is_empty()), "{said}");
            }
            assert_eq!(panel["datasource"]["uid"], "${datasource}", "{said}");
            let [x, y, w] = ["x", "y", "w"].map(|key| panel["gridPos"][key].as_u64().expect("a place"));
            assert!(x + w <= 24 && places.insert((x, y)), "{said}");
            for target in panel["targets"].as_array().expect("targets") {
                let expression = target["expr"].as_str().expect("an expression");
                assert!(target["legendFormat"].is_string(), "{said}");
                let used = expression.split('$').skip(1).filter_map(|rest| rest.split(['"', ']']).next());
                for variable in used.filter(|variable| *variable != "__rate_interval") {
                    assert!(known.contains(variable), "{said}: ${variable}");
                }
            }
        }
    }
}

#[test]
fn dashboards_have_the_types_of_grafana() {
    let program = tools::installed("grafana-schema");
    let faults = |files: &[PathBuf]| {
        let output = Command::new(&program).args(files).output().expect("grafana-schema");
        (output.status.success(), String::from_utf8(output.stdout).expect("UTF-8"))
    };
    let files: Vec<PathBuf> = dashboards().iter().map(|(name, _)| root().join("examples/grafana").join(name)).collect();
    assert_eq!(faults(&files), (true, String::new()));

    let (scratch, (_, text)) = (tempfile::tempdir().expect("a directory"), dashboards().swap_remove(0));
    let wrong = [("\"graphTooltip\": 1", "\"graphTooltip\": \"all\""), ("\"showPoints\":", "\"points\":")];
    for (right, wrong) in wrong {
        assert!(text.contains(right), "{right}");
        let file = scratch.path().join("wrong.json");
        std::fs::write(&file, text.replace(right, wrong)).expect("writing a dashboard");
        let (passes, found) = faults(&[file]);
        let key = wrong.split('"').nth(1).expect("a key");
        assert!(!passes && found.contains(key), "{wrong}: {found}");
    }
}

#[test]
fn dashboards_and_rules_name_only_metrics_of_the_reference() {
    let known = metrics();
    let texts = dashboards().into_iter().chain(RULES.map(|path| (path.to_owned(), page(path))));
    let mut seen = BTreeSet::new();
    for (path, text) in texts {
        for name in named(&text) {
            assert!(known.contains(&name), "{path}: {name} is not in docs/reference/metrics.md");
            seen.insert(name);
        }
    }
    assert!(seen.len() > 90, "{}", seen.len());
}

#[test]
fn each_alert_has_a_runbook_and_a_unit_test() {
    let (rules, runbooks, tests) =
        (page(RULES[1]), page("docs/how-to/alerts.md"), page("examples/prometheus/tests/alerts.yaml"));
    let sections: Vec<&str> = runbooks.lines().filter_map(|line| line.strip_prefix("### ")).collect();
    let mut alerts = Vec::new();
    for rule in rules.split("- alert: ").skip(1) {
        let name = rule.lines().next().expect("a name");
        let value = |key: &str| {
            let value = rule.lines().find_map(|line| line.trim_start().strip_prefix(key)?.strip_prefix(": "));
            value.unwrap_or_else(|| panic!("{name} has no {key}"))
        };
        assert!(
            ["{severity: critical}", "{severity: warning}", "{severity: info}"].contains(&value("labels")),
            "{name}"
        );
        assert!(value("summary").len() > 10 && value("description").len() > 10, "{name}");
        let (_, anchor) = value("runbook_url").split_once("docs/how-to/alerts.md#").expect("a path of the docs");
        assert_eq!(anchor, name.to_lowercase());
        assert!(
            tests.contains(&format!("    alertname: {name}\n    exp_alerts:\n")),
            "{name} has no test that it fires"
        );
        let silent =
            tests.lines().filter(|line| line.contains("{eval_time: ") && line.ends_with(&format!(" {name}}}")));
        assert!(silent.count() > 0, "{name} has no test that it is silent");
        alerts.push(name);
    }
    assert_eq!(alerts, sections, "alerts.yaml and docs/how-to/alerts.md have the same alerts in the same order");
}

#[test]
fn alerts_of_kv_events_fire_as_routing_uses_them() {
    let rules = page(RULES[1]);
    let fires_for = |alert: &str| {
        let (_, rule) = rules.split_once(&format!("- alert: {alert}\n")).expect("the alert");
        let (_, matcher) = rule.split_once("attache_kv_event_trust{trust").expect("a matcher of the label");
        let (matcher, _) = matcher.split_once("\"}").expect("the end of the matcher");
        let (operator, values) = matcher.split_once('"').expect("an operator and values");
        let is_negated = match operator {
            "=" => false,
            "!~" => true,
            other => panic!("{alert} compares with {other}"),
        };
        let values: Vec<&str> = values.split('|').collect();
        let fires = |trust: &Trust| values.contains(&trust.label()) != is_negated;
        Trust::values().filter(fires).collect::<Vec<_>>()
    };
    let used = |wanted: EventUse| Trust::values().filter(|trust| trust.event_use() == wanted).collect::<Vec<_>>();
    assert_eq!(fires_for("AttacheKvEventsUnused"), used(EventUse::Unused));
    assert_eq!(fires_for("AttacheKvEventsIncomplete"), used(EventUse::Partial));
}

/// The name of the metric that a row of `docs/reference/metrics.md` or of the metrics to watch describes.
pub(super) fn name_of(row: &[String]) -> &str {
    row[0].trim_matches(['*', '`'])
}

/// The metrics to watch.
pub(super) fn watched() -> BTreeSet<String> {
    let rows = rows(&page("docs/how-to/monitor.md"), "| metric | question |");
    rows.iter().map(|row| name_of(row).to_owned()).collect()
}

#[test]
fn metrics_to_watch_are_bold_in_the_reference() {
    let watched = watched();
    assert_eq!(watched.len(), 12);
    let rows = rows(&page("docs/reference/metrics.md"), "| metric |");
    let bold: BTreeSet<String> =
        rows.iter().filter(|row| row[0].starts_with("**")).map(|row| name_of(row).to_owned()).collect();
    assert_eq!(bold, watched);
}
