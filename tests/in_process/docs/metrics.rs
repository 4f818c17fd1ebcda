//! The metrics page matches the metrics of a running picker.

use super::markdown::{page, rows};
use super::monitoring::{name_of, watched};
use super::reference::{code, compare, table};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const PAGE: &str = "docs/reference/metrics.md";
/// The headings of the page, and the beginnings of the names below each, without `attache_`. The longest one counts.
const GROUPS: [(&str, &[&str]); 13] = [
    (
        "Requests",
        &[
            "streams_",
            "requests_",
            "request_",
            "rejections_",
            "responses_",
            "errors_in_stream",
            "time_to_first_byte",
            "decision_",
            "degraded_",
            "diverted_",
            "prompt_tokens",
            "completion_tokens",
            "sessions_",
            "reservations_",
            "protocol_errors",
            "subset_entries",
            "buffered_request",
            "hook_",
        ],
    ),
    ("Models", &["model_", "served_models"]),
    ("Endpoints", &["pool_endpoints", "endpoint_", "ejections_", "scrape_", "prediction_"]),
    ("Prefix cache", &["cached_tokens", "prefix_"]),
    ("Tokenizers", &["tokenizer_"]),
    ("KV events", &["kv_event"]),
    ("Queues and flow control", &["queue_", "queued_", "deadlines_"]),
    ("Prefill and decode", &["disaggregation_", "prefill_", "carried_"]),
    ("Limits, tenants and Redis", &["limit_", "tenant_", "user_records", "redis_"]),
    ("Replicas (sync)", &["sync_"]),
    ("Discovery", &["dns_", "endpoints_file", "kube_"]),
    ("Connections and TLS", &["listener_", "tls_", "admin_requests"]),
    ("Configuration and process", &["config_", "build_info", "warnings", "panics_", "otlp_", "process_"]),
];

/// A picker that is killed at the end of the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// `/metrics` of a running picker with TLS, traces and peers.
fn metrics() -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_attache"));
    command.args(["run", "--bind", "127.0.0.1", "--grpc-port", "0", "--grpc-health-port", "0", "--metrics-port", "0"]);
    command.args(["--endpoint", "127.0.0.1:9", "--log-format", "json"]);
    command.args(["--otlp-endpoint", "http://127.0.0.1:9", "--sync-nats-url", "nats://127.0.0.1:9"]);
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

fn unit(name: &str) -> &'static str {
    let base = name.strip_suffix("_total").unwrap_or(name);
    match base.rsplit('_').next() {
        _ if base.ends_with("_in_flight") => "requests",
        Some("seconds") => "seconds",
        Some("bytes") => "bytes",
        Some("tokens") => "tokens",
        Some("blocks") => "blocks",
        Some("requests") => "requests",
        Some("ratio") => "ratio",
        Some(
            "weight" | "trust" | "connected" | "behind" | "done" | "unreadable" | "tokenizer" | "info" | "successful",
        ) => "–",
        _ => "count",
    }
}

/// The heading that a metric belongs to.
fn group(name: &str) -> &'static str {
    let own = name.strip_prefix("attache_").unwrap_or(name);
    let of = GROUPS.iter().flat_map(|(heading, starts)| starts.iter().map(move |start| (start, *heading)));
    let found = of.filter(|(start, _)| own.starts_with(**start)).max_by_key(|(start, _)| start.len());
    found.unwrap_or_else(|| panic!("{name} has no group: extend GROUPS")).1
}

/// `text` with links replaced by their words.
fn without_links(text: &str) -> String {
    let mut words = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once('[') {
        let (name, after) = link.split_once("](").expect("a link");
        words.push_str(before);
        words.push_str(name);
        rest = after.split_once(')').expect("its end").1;
    }
    words + rest
}

#[test]
fn metrics_page_matches_the_metrics_of_a_running_picker() {
    let served = metrics();
    let watched = watched();
    let mut rows_of_program = Vec::new();
    for line in served.lines().filter_map(|line| line.strip_prefix("# TYPE ")) {
        let (family, kind) = line.split_once(' ').unwrap();
        let name = if kind == "counter" { format!("{family}_total") } else { family.to_owned() };
        let shown = if watched.contains(&name) { format!("**{}**", code(&name)) } else { code(&name) };
        rows_of_program.push((name.clone(), vec![shown, kind.to_owned(), unit(&name).to_owned()]));
    }
    rows_of_program.sort();
    let part = |(heading, _): &(&str, &[&str])| {
        let rows = rows_of_program.iter().filter(|(name, _)| group(name) == *heading).map(|(_, row)| row.clone());
        format!("## {heading}\n\n{}", table(PAGE, &["metric", "type", "unit", "labels", "meaning"], 2, rows.collect()))
    };
    compare(PAGE, "metrics", &GROUPS.iter().map(part).collect::<Vec<_>>().join("\n"));

    // The page has the HELP text of each metric, and may add a link.
    let helps: BTreeMap<&str, &str> =
        served.lines().filter_map(|line| line.strip_prefix("# HELP ")?.split_once(' ')).collect();
    for row in &rows(&page(PAGE), "| metric |") {
        let name = name_of(row);
        let help = helps.get(name).or_else(|| helps.get(name.strip_suffix("_total")?));
        let help = help.unwrap_or_else(|| panic!("{name} has no HELP")).trim_end_matches('.');
        let said = without_links(&row[4]);
        assert!(
            said.strip_prefix(help).is_some_and(|more| more.is_empty() || more.starts_with("; see ")),
            "{name}: {said}\n{help}"
        );
    }

    // Each sample has the labels that the page lists.
    let text = page(PAGE);
    let table = rows(&text, "| metric |");
    let labels = |cell: &str| cell.split(", ").map(|l| l.trim_matches('`').to_owned()).filter(|l| l != "–").collect();
    let said: BTreeMap<&str, BTreeSet<String>> = table.iter().map(|row| (name_of(row), labels(&row[3]))).collect();
    let mut samples = 0;
    for line in served.lines().filter(|line| line.starts_with("attache_") || line.starts_with("process_")) {
        let series = line.rsplit_once(' ').unwrap().0;
        let (name, labels) = series.split_once('{').unwrap_or((series, ""));
        let of = ["_bucket", "_count", "_sum"].iter().find_map(|suffix| said.get_key_value(name.strip_suffix(suffix)?));
        let (_, said) = said.get_key_value(name).or(of).unwrap_or_else(|| panic!("{name} is not on the page"));
        // No label value here contains these two characters.
        let labels = labels.split("=\"").filter_map(|part| part.rsplit(['"', ',']).next());
        let labels: BTreeSet<String> =
            labels.filter(|label| !matches!(*label, "le" | "}" | "")).map(str::to_owned).collect();
        assert_eq!(&labels, said, "{line}");
        samples += 1;
    }
    assert!(samples > 40, "{samples} samples");
}
