//! Prints the explanation of a past decision, which a running picker has kept or a recording has.

use super::{EXIT_REFUSED, list, text};
use crate::cli::output;
use serde_json::Value;
use std::fmt::Write;
use std::process::ExitCode;

/// Prints `explanation` and returns the exit code of the command.
pub(super) fn print(explanation: &Value, json: bool) -> ExitCode {
    if json {
        output::print(format_args!("{explanation:#}"));
    } else {
        output::print(show(explanation));
    }
    if list(&explanation["choice"]["picks"]).is_empty() { ExitCode::from(EXIT_REFUSED) } else { ExitCode::SUCCESS }
}

/// The explanation as text. The fields of a recording are missing in one that a picker has kept.
fn show(e: &Value) -> String {
    let mut out = String::new();
    let mut line = |key: &str, value: String| {
        let _ = writeln!(out, "{key:<10} {value}");
    };
    if let (Some(request), Some(row)) = (e["request"].as_u64(), e["line"].as_u64()) {
        line("request", format!("{request}, line {row} of the recording"));
    }
    for (label, key) in [("id", "request_id"), ("pool", "pool"), ("model", "model")] {
        if let Some(value) = e[key].as_str() {
            line(label, value.to_owned());
        }
    }
    let understood = if e["understood"] == false { ", not parsed" } else { "" };
    line("prompt", format!("{} tokens{understood}", e["prompt_tokens"]));
    if let Some(profile) = e["profile"].as_str() {
        line("profile", profile.to_owned());
    }
    if e["priority"].as_i64().unwrap_or(0) != 0 {
        line("priority", e["priority"].to_string());
    }
    super::agent(e, &mut line);
    if let Some(waited) = e["waited_ms"].as_f64().filter(|waited| *waited > 0.0) {
        line("queued", format!("{waited:.1} ms"));
    }
    let (choice, strategy) = (&e["choice"], text(&e["strategy"]));
    line("goes to", of(choice, &strategy));
    super::alternatives(choice, &mut line);
    if let Some(reason) = e["recorded_reason"].as_str() {
        let recorded = ["recorded", "recorded_prefill", "recorded_encode"].map(|key| list(&e[key]));
        let is_same = recorded == ["picks", "prefill", "encode"].map(|key| list(&choice[key]));
        let recorded = if is_same { "the same".to_owned() } else { servers(recorded) };
        line("recorded", format!("{recorded} ({reason})"));
    }
    let other = Some(&e["other"]).filter(|other| other.is_object());
    if let Some(other) = other {
        line("instead", of(other, &text(&other["strategy"])));
    }
    for missing in list(&e["missing"]) {
        line("warning", format!("the recording has no {}", text(&missing)));
    }
    endpoints(&e["endpoints"], &mut out);
    super::scores(&choice["parts"], &format!("WHY {strategy}"), &e["endpoints"], &mut out);
    if let Some(other) = other {
        super::scores(&other["parts"], &format!("WHY {}", text(&other["strategy"])), &e["endpoints"], &mut out);
    }
    out
}

fn of(choice: &Value, strategy: &str) -> String {
    let servers = servers(["picks", "prefill", "encode"].map(|key| list(&choice[key])));
    format!("{servers} ({strategy}: {})", text(&choice["reason"]))
}

/// The servers of a decision for the response, the prefill and the encoding.
fn servers(roles: [Vec<Value>; 3]) -> String {
    let [picks, prefill, encode] = roles.map(|servers| servers.iter().map(text).collect::<Vec<_>>().join(", "));
    let mut all = if picks.is_empty() { "no endpoint".to_owned() } else { picks };
    for (role, servers) in [("prefill", prefill), ("encoding", encode)] {
        if !servers.is_empty() {
            let _ = write!(all, "; {role} on {servers}");
        }
    }
    all
}

fn endpoints(endpoints: &Value, out: &mut String) {
    let _ = writeln!(out, "\n{:<24} {:>8} {:>8} {:>9}  EXCLUDED", "ENDPOINT", "CACHED", "ON GPU", "REQUESTS");
    for endpoint in list(endpoints) {
        let line = format!(
            "{:<24} {:>8} {:>8} {:>9}  {}",
            text(&endpoint["address"]),
            endpoint["cached_tokens"].to_string(),
            endpoint["gpu_tokens"].to_string(),
            endpoint["requests"].to_string(),
            text(&endpoint["excluded"])
        );
        let _ = writeln!(out, "{}", line.trim_end());
    }
}
