//! `attache explain --from-record`: explains the decision about a recorded request.

use super::{EXIT_INTERNAL, EXIT_USAGE, fail, past};
use crate::plugins::registry;
use anyhow::Context;
use attache_replay::record::explain::{RecordedExplanation, explain};
use attache_scheduling::Strategy;
use clap::Args;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Flags without effect on a recording.
const NOT_RECORDED: [&str; 6] = ["body", "headers", "pool", "admin", "token_file", "config_file"];

/// Flags for recorded requests.
#[derive(Args, Debug)]
pub(super) struct RecordedArgs {
    /// Explain a decision of this recording (`attache run --record`) [default request: the last one]
    #[arg(long, value_name = "FILE", conflicts_with_all = NOT_RECORDED)]
    pub(super) from_record: Option<PathBuf>,
    /// Show what this strategy would have chosen, too
    #[arg(long, value_name = "NAME", requires = "from_record", conflicts_with_all = NOT_RECORDED)]
    pub(super) strategy: Option<String>,
}

/// Explains the decision about `request` in the recording `file`, and what the strategy `other` would have chosen.
pub(super) fn run(file: &Path, request: Option<&str>, other: Option<&str>, json: bool) -> ExitCode {
    let explanation = match load(file, request, other) {
        Ok(explanation) => explanation,
        Err(error) => return fail(EXIT_USAGE, &error),
    };
    match serde_json::to_value(explanation) {
        Ok(explanation) => past::print(&explanation, json),
        Err(error) => fail(EXIT_INTERNAL, &error.into()),
    }
}

fn load(file: &Path, request: Option<&str>, other: Option<&str>) -> anyhow::Result<RecordedExplanation> {
    let registry = registry();
    let build = |name: &str| registry.build(name, &Value::Null).with_context(|| format!("`--strategy {name}`"));
    let strategy: Option<Box<dyn Strategy>> = other.map(build).transpose()?;
    let found = explain(file, request, other.zip(strategy.as_deref()), &registry);
    found.with_context(|| file.display().to_string())?.with_context(|| match request {
        Some(request) => format!("{} has no decision about request {request}", file.display()),
        None => format!("{} has no decision", file.display()),
    })
}
