//! `attache explain`: explains the decision for one request.

use super::output::{colour, message, print};
use super::running::{AdminArgs, RunningPicker};
use super::source::ReloadSource;
use super::{EXIT_CONFIG, EXIT_INTERNAL, EXIT_USAGE};
use crate::app;
use anyhow::Context;
use attache_admin::DEFAULT_EXPLAINED_PATH;
use attache_ext_proc::warmer;
use attache_picker::explain::{ExplainQuery, explain};
use attache_types::clock::Clock;
use clap::Args;
use serde_json::Value;
use std::fmt::Write;
use std::io::Read;
use std::path::PathBuf;
use std::process::ExitCode;

mod past;
mod recorded;

const EXAMPLES: &str = "\
Examples:
  attache explain request.json                                  # by the picker on this machine
  attache explain request.json --admin http://127.0.0.1:9090 --pool llama
  attache explain request.json --header 'x-tenant: acme' --header 'x-priority: interactive'
  curl -s … | attache explain - --path /v1/messages
  attache explain request.json --config-file attache.yaml       # without a running picker
  attache explain request.json --json | jq '.endpoints'
  attache explain --request-id 7f0c-11 --admin http://127.0.0.1:9090  # a past decision, by its x-request-id
  attache explain --from-record run.jsonl --request-id 17       # a decision of `attache run --record run.jsonl`
  attache explain --from-record run.jsonl --request-id 17 --strategy least-request

Exit codes: 0 when the request can be routed, 1 when it would be rejected, 64 when a flag or file can't be used.";

/// A request that the picker would reject.
const EXIT_REFUSED: u8 = 1;
/// Blocks of a long prompt that are shown from each end.
const SHOWN_BLOCKS: usize = 12;

/// Explain where a request would go: its tokens and blocks, the endpoints that hold them, and
/// the score of each endpoint.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ExplainArgs {
    /// Body of the request, a JSON file; `-` reads standard input
    #[arg(value_name = "FILE")]
    #[arg(required_unless_present_any = ["from_record", "request"])]
    body: Option<PathBuf>,
    /// Explain the past decision about this request: its `x-request-id`, or its number in a recording
    #[arg(long = "request-id", visible_alias = "request", value_name = "ID")]
    #[arg(conflicts_with_all = ["body", "headers", "pool", "path", "config_file"])]
    request: Option<String>,
    #[command(flatten)]
    recorded: recorded::RecordedArgs,
    /// Path that the request would have
    #[arg(long, default_value = DEFAULT_EXPLAINED_PATH)]
    path: String,
    /// Pool of the request, if its model does not select one
    #[arg(long, value_name = "NAME")]
    pool: Option<String>,
    /// Header of the request, `name: value`; may be repeated
    #[arg(long = "header", value_name = "HEADER", value_parser = super::header)]
    headers: Vec<(String, String)>,
    #[command(flatten)]
    admin: AdminArgs,
    /// Use this configuration instead of a running picker; all servers then count as idle
    #[arg(long, value_name = "FILE", conflicts_with_all = ["admin", "token_file"])]
    config_file: Option<PathBuf>,
    /// Show every block, not only the first and last ones
    #[arg(long)]
    all_blocks: bool,
    /// Print the explanation as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &ExplainArgs) -> ExitCode {
    if let Some(file) = &args.recorded.from_record {
        return recorded::run(file, args.request.as_deref(), args.recorded.strategy.as_deref(), args.json);
    }
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(EXIT_INTERNAL, &error.into()),
    };
    if let Some(request) = &args.request {
        return runtime.block_on(explain_past(args, request));
    }
    let body = match args.body.as_ref().context("a file with the body of the request is missing").and_then(read) {
        Ok(body) => body,
        Err(error) => return fail(EXIT_USAGE, &error),
    };
    let explained = match &args.config_file {
        Some(file) => {
            let reading = ReloadSource::of_file_alone(file.clone()).read();
            message(reading.render(colour()));
            let Some(settings) = reading.settings else { return ExitCode::from(EXIT_CONFIG) };
            let picker = match app::offline(&settings) {
                Ok(picker) => picker,
                Err(error) => return fail(EXIT_CONFIG, &error),
            };
            let query = ExplainQuery {
                pool: args.pool.as_deref(),
                path: &args.path,
                headers: &args.headers,
                body: &body,
                now: Clock::start().now(),
            };
            let explained = runtime.block_on(explain(&picker, &picker.config(), query, warmer::run));
            explained.map_err(|e| format!("{}: {}", e.reason.code(), e.message)).map(|e| serde_json::json!(e))
        }
        None => {
            let picker = RunningPicker::at(&args.admin);
            match runtime.block_on(picker.explain(&args.path, args.pool.as_deref(), &args.headers, body)) {
                Ok(explained) => explained,
                Err(error) => return fail(EXIT_INTERNAL, &error),
            }
        }
    };
    match explained {
        Ok(explanation) => {
            if args.json {
                print(format_args!("{explanation:#}"));
            } else {
                print(show(&explanation, args.all_blocks));
            }
            if list(&explanation["picks"]).is_empty() { ExitCode::from(EXIT_REFUSED) } else { ExitCode::SUCCESS }
        }
        Err(refusal) => {
            message(format_args!("the request would be rejected: {refusal}"));
            ExitCode::from(EXIT_REFUSED)
        }
    }
}

fn fail(code: u8, error: &anyhow::Error) -> ExitCode {
    message(format_args!("error: {error:#}"));
    ExitCode::from(code)
}

fn read(path: &PathBuf) -> anyhow::Result<Vec<u8>> {
    if path.as_os_str() == "-" {
        let mut body = Vec::new();
        std::io::stdin().read_to_end(&mut body).context("can't read standard input")?;
        return Ok(body);
    }
    std::fs::read(path).with_context(|| format!("can't read {}", path.display()))
}

/// Explains the past decision about `request`, which the running picker has kept or recorded.
async fn explain_past(args: &ExplainArgs, request: &str) -> ExitCode {
    match RunningPicker::at(&args.admin).explain_past(request).await {
        Ok(Ok(explanation)) => past::print(&explanation, args.json),
        Ok(Err(unknown)) => fail(EXIT_USAGE, &unknown),
        Err(error) => fail(EXIT_INTERNAL, &error),
    }
}

/// The table of scores under `title`: a column for each part of the strategy, a row for each of `endpoints`.
fn scores(parts: &Value, title: &str, endpoints: &Value, out: &mut String) {
    let endpoints = endpoints.as_array().map(Vec::as_slice).unwrap_or_default();
    let parts = parts.as_array().map(Vec::as_slice).unwrap_or_default();
    if parts.is_empty() {
        return;
    }
    let head = |part: &Value| {
        let name = part["part"].as_str().unwrap_or_default();
        match part["weight"].as_f64() {
            Some(weight) if weight != 0.0 && weight != 1.0 => format!("{name} × {weight}"),
            _ => name.to_owned(),
        }
    };
    let heads: Vec<String> = parts.iter().map(head).collect();
    let _ = write!(out, "\n{title:<24}");
    for head in &heads {
        let _ = write!(out, "  {head:>width$}", width = head.chars().count().max(8));
    }
    for address in endpoints.iter().filter_map(|endpoint| endpoint["address"].as_str()) {
        let _ = write!(out, "\n{address:<24}");
        for (part, head) in parts.iter().zip(&heads) {
            let figure = part["endpoints"][address].as_f64().map_or_else(|| "–".to_owned(), |f| format!("{f:.3}"));
            let _ = write!(out, "  {figure:>width$}", width = head.chars().count().max(8));
        }
    }
    out.push('\n');
}

/// The table of endpoints; `blocks` is the number of blocks of the prompt.
fn endpoints(e: &Value, blocks: usize, out: &mut String) {
    let _ = writeln!(
        out,
        "\n{:<24} {:>14} {:>8} {:>8} {:>9}  {:<8}  EXCLUDED",
        "ENDPOINT", "HOLDS", "TOKENS", "PENDING", "REQUESTS", "KNOWN BY"
    );
    for h in list(&e["endpoints"]) {
        let of = format!("{} of {}", h["blocks"], blocks);
        let line = format!(
            "{:<24} {:>14} {:>8} {:>8} {:>9}  {:<8}  {}",
            text(&h["address"]),
            of,
            h["tokens"].to_string(),
            h["on_its_way_blocks"].to_string(),
            h["requests"].to_string(),
            text(&h["source"]),
            text(&h["excluded"])
        );
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

/// The table of blocks, without those in the middle of a long prompt unless `all_blocks` is set.
fn show_blocks(blocks: &[Value], all_blocks: bool, out: &mut String) {
    let _ = writeln!(out, "\n{:>5}  {:<16}  CONTENT", "BLOCK", "KEY");
    for (i, block) in blocks.iter().enumerate() {
        if !all_blocks && blocks.len() > 2 * SHOWN_BLOCKS && (SHOWN_BLOCKS..blocks.len() - SHOWN_BLOCKS).contains(&i) {
            if i == SHOWN_BLOCKS {
                let _ = writeln!(out, "       … {} more (`--all-blocks`) …", blocks.len() - 2 * SHOWN_BLOCKS);
            }
            continue;
        }
        let content = match &block["tokens"] {
            Value::Array(ids) => ids.iter().map(Value::to_string).collect::<Vec<_>>().join(" "),
            _ => format!("{:?}", text(&block["text"])),
        };
        let _ = writeln!(out, "{i:>5}  {:<16}  {content}", text(&block["key"]));
    }
}

fn text(v: &Value) -> String {
    v.as_str().unwrap_or_default().to_owned()
}

fn list(v: &Value) -> Vec<Value> {
    v.as_array().cloned().unwrap_or_default()
}

/// The line about the agent of the request.
fn agent(e: &Value, line: &mut impl FnMut(&str, String)) {
    let agent = &e["agent"];
    if let (Some(program), Some(chain)) = (agent["program"].as_str(), agent["chain"].as_str()) {
        let chain = if chain == program { String::new() } else { format!(", chain {chain}") };
        let parent = agent["parent"].as_str().map(|parent| format!(", parent {parent}")).unwrap_or_default();
        let [kind, source, field] = ["kind", "source", "field"].map(|key| text(&agent[key]));
        let kind = kind.replace('_', "-");
        line("agent", format!("{kind} of program {program}{chain}{parent} ({source}: {field})"));
    }
}

/// The lines about what was not chosen: the runner-up, and in pools that split requests the pair beside the whole
/// request, with the costs that decided.
fn alternatives(choice: &Value, line: &mut impl FnMut(&str, String)) {
    if let Some(runner_up) = choice["runner_up"].as_str() {
        line("runner-up", runner_up.to_owned());
    }
    let pair = &choice["pair"];
    if !pair.is_object() {
        return;
    }
    let costs = &pair["costs"];
    let cost = |of: &Value| of.as_f64().map(|cost| format!("{cost:.3} {}", text(&costs["unit"])));
    let with = |of: &str, name: &str| {
        cost(&costs[of]).map_or_else(|| text(&pair[name]), |c| format!("{} {c}", text(&pair[name])))
    };
    let sum = match (cost(&costs["transfer"]), cost(&costs["pair"])) {
        (Some(transfer), Some(pair)) => format!(" + transfer {transfer} = {pair}"),
        _ => String::new(),
    };
    line("pair", format!("prefill on {} + decode on {}{sum}", with("prefill", "prefill"), with("decode", "decode")));
    line("whole", with("whole", "whole"));
    let outcome = if pair["is_split"] == true { "split" } else { "not split" };
    line("decided", format!("{outcome}, by {}", text(&pair["decided_by"])));
}

/// Prints the explanation as text.
fn show(e: &Value, all_blocks: bool) -> String {
    let blocks = list(&e["blocks"]);
    let about = if e["counted"] == true { "" } else { "about " };
    let mut out = String::new();
    let mut line = |key: &str, value: String| {
        let _ = writeln!(out, "{key:<10} {value}");
    };
    line("pool", text(&e["pool"]));
    line("model", text(&e["model"]));
    line("tokenizer", format!("{}, blocks of {}", text(&e["tokenizer"]), text(&e["block"])));
    line(
        "prompt",
        format!(
            "{about}{} tokens, {} full block{}",
            e["prompt_tokens"],
            blocks.len(),
            if blocks.len() == 1 { "" } else { "s" }
        ),
    );
    if e["left_out_bytes"].as_u64().unwrap_or(0) > 0 {
        line("ignored", format!("{} bytes that change with each request", e["left_out_bytes"]));
    }
    let picks: Vec<String> = list(&e["picks"]).iter().map(text).collect();
    line(
        "goes to",
        format!(
            "{} ({}: {})",
            if picks.is_empty() { "no endpoint".into() } else { picks.join(", ") },
            text(&e["strategy"]),
            text(&e["reason"])
        ),
    );
    alternatives(e, &mut line);
    if let Some(profile) = e["profile"].as_str() {
        line("profile", profile.to_owned());
    }
    if e["priority"].as_i64().unwrap_or(0) != 0 {
        line("priority", e["priority"].to_string());
    }
    agent(e, &mut line);
    if let Some(warning) = e["warning"].as_str() {
        line("warning", warning.to_owned());
    }
    let prefill: Vec<String> = list(&e["prefill"]).iter().map(text).collect();
    if !prefill.is_empty() {
        line("prefill", prefill.join(", "));
    }
    let encode: Vec<String> = list(&e["encode"]).iter().map(text).collect();
    if !encode.is_empty() {
        line("encode", encode.join(", "));
    }
    endpoints(e, blocks.len(), &mut out);
    scores(&e["parts"], "WHY", &e["endpoints"], &mut out);
    show_blocks(&blocks, all_blocks, &mut out);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn agent_is_shown_with_its_parent_and_the_source_of_its_name() {
        let shown = |explanation: Value| {
            let mut lines = Vec::new();
            agent(&explanation, &mut |key, value| lines.push(format!("{key}: {value}")));
            lines.concat()
        };
        let sub_agent = json!({"program": "p", "chain": "c", "parent": "p", "kind": "sub_agent", "source": "body",
            "field": "session_id"});
        assert_eq!(
            shown(json!({"agent": sub_agent})),
            "agent: sub-agent of program p, chain c, parent p (body: session_id)"
        );
        let main = json!({"program": "p", "chain": "p", "kind": "main", "source": "inferred", "field": "tool_call_id"});
        assert_eq!(shown(json!({"agent": main})), "agent: main of program p (inferred: tool_call_id)");
        assert_eq!(shown(json!({})), "");
    }
}
