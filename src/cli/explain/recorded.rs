//! `attache explain --from-record`: explains the decision about a recorded request.

use super::{EXIT_REFUSED, EXIT_USAGE, fail};
use crate::cli::output::print;
use crate::picker::explained::{DecisionExplanation, StrategyChoice};
use crate::plugins::registry;
use crate::replay::record::explain::{RecordedExplanation, explain};
use crate::scheduling::Strategy;
use anyhow::Context;
use clap::Args;
use serde_json::Value;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Flags for recorded requests.
#[derive(Args, Debug)]
pub(super) struct RecordedArgs {
    /// Explain a decision of this recording (`attache run --record`)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["body", "headers", "pool", "admin", "config_file"])]
    pub(super) from_record: Option<PathBuf>,
    /// The request: its number in the recording, or its `x-request-id` [default: the last one]
    #[arg(long, value_name = "ID", requires = "from_record")]
    request: Option<String>,
    /// Show what this strategy would have chosen, too
    #[arg(long, value_name = "NAME", requires = "from_record")]
    strategy: Option<String>,
}

pub(super) fn run(file: &Path, args: &RecordedArgs, json: bool) -> ExitCode {
    let explanation = match load(file, args) {
        Ok(explanation) => explanation,
        Err(error) => return fail(EXIT_USAGE, &error),
    };
    if json {
        match serde_json::to_string_pretty(&explanation) {
            Ok(text) => print(text),
            Err(error) => return fail(super::EXIT_INTERNAL, &error.into()),
        }
    } else {
        print(show(&explanation));
    }
    if explanation.decision.choice.picks.is_empty() { ExitCode::from(EXIT_REFUSED) } else { ExitCode::SUCCESS }
}

fn load(file: &Path, args: &RecordedArgs) -> anyhow::Result<RecordedExplanation> {
    let registry = registry();
    let build = |name: &String| registry.build(name, &Value::Null).with_context(|| format!("`--strategy {name}`"));
    let other: Option<Box<dyn Strategy>> = args.strategy.as_ref().map(build).transpose()?;
    let other = args.strategy.as_deref().zip(other.as_deref());
    let found = explain(file, args.request.as_deref(), other, &registry).with_context(|| file.display().to_string())?;
    found.with_context(|| match &args.request {
        Some(request) => format!("{} has no decision about request {request}", file.display()),
        None => format!("{} has no decision", file.display()),
    })
}

/// The explanation as text.
fn show(e: &RecordedExplanation) -> String {
    let (mut out, d) = (String::new(), &e.decision);
    let mut line = |key: &str, value: String| {
        let _ = writeln!(out, "{key:<10} {value}");
    };
    line("request", format!("{}, line {} of the recording", e.request, e.line));
    if !d.request_id.is_empty() {
        line("id", d.request_id.clone());
    }
    line("pool", d.pool.clone());
    line("model", d.model.clone());
    line("prompt", format!("{} tokens{}", d.prompt_tokens, if d.understood { "" } else { ", not parsed" }));
    if let Some(profile) = &d.profile {
        line("profile", profile.clone());
    }
    if d.priority != 0 {
        line("priority", d.priority.to_string());
    }
    if d.waited_ms > 0.0 {
        line("queued", format!("{:.1} ms", d.waited_ms));
    }
    line("goes to", of(&d.choice, &d.strategy));
    if let Some(runner_up) = &d.choice.runner_up {
        line("then", runner_up.clone());
    }
    let recorded = [&e.recorded, &e.recorded_prefill, &e.recorded_encode];
    let is_same = recorded == [&d.choice.picks, &d.choice.prefill, &d.choice.encode];
    let recorded = if is_same { "the same".to_owned() } else { servers(recorded) };
    line("recorded", format!("{recorded} ({})", e.recorded_reason));
    if let Some(other) = &e.other {
        line("instead", of(&other.choice, &other.strategy));
    }
    for missing in &e.missing {
        line("warning", format!("the recording has no {missing}"));
    }
    endpoints(d, &mut out);
    scores(d, &d.choice, &d.strategy, &mut out);
    if let Some(other) = &e.other {
        scores(d, &other.choice, &other.strategy, &mut out);
    }
    out
}

fn of(choice: &StrategyChoice, strategy: &str) -> String {
    let servers = servers([&choice.picks, &choice.prefill, &choice.encode]);
    format!("{servers} ({strategy}: {})", choice.reason)
}

/// The servers of a decision for the response, the prefill and the encoding.
fn servers([picks, prefill, encode]: [&Vec<String>; 3]) -> String {
    let mut text = if picks.is_empty() { "no endpoint".to_owned() } else { picks.join(", ") };
    for (role, servers) in [("prefill", prefill), ("encoding", encode)] {
        if !servers.is_empty() {
            let _ = write!(text, "; {role} on {}", servers.join(", "));
        }
    }
    text
}

fn endpoints(d: &DecisionExplanation, out: &mut String) {
    let _ = writeln!(out, "\n{:<24} {:>8} {:>8} {:>9}  EXCLUDED", "ENDPOINT", "CACHED", "ON GPU", "REQUESTS");
    for endpoint in &d.endpoints {
        let excluded = endpoint.excluded.unwrap_or("");
        let (address, cached, gpu) = (&endpoint.address, endpoint.cached_tokens, endpoint.gpu_tokens);
        let line = format!("{address:<24} {cached:>8} {gpu:>8} {:>9}  {excluded}", endpoint.requests);
        let _ = writeln!(out, "{}", line.trim_end());
    }
}

/// A column for each part of the strategy.
fn scores(d: &DecisionExplanation, choice: &StrategyChoice, strategy: &str, out: &mut String) {
    let addresses = d.endpoints.iter().map(|endpoint| endpoint.address.as_str());
    super::scores(&choice.parts, &format!("WHY {strategy}"), addresses, out);
}
