//! A build without the feature `full` has no live checks.

use super::{CheckOutput, FileCheck};
use crate::cli::EXIT_USAGE;
use crate::cli::output::message;
use clap::Args;
use std::process::ExitCode;

pub(super) const AFTER_HELP: &str = "\
Examples:
  attache check attache.yaml
  attache check attache.yaml --deny-warnings      # for CI
  attache check attache.yaml --inside             # for a file that Envoy's module reads
  attache check attache.yaml --output json | jq '.diagnostics[].message'

Exit codes: 0 when the file is good, 78 when it isn't.";

#[derive(Args, Debug)]
pub(super) struct LiveArgs {
    #[arg(long, hide = true)]
    pub(super) live: bool,
}

/// Says that nothing can be checked.
pub(super) fn check(_: LiveArgs, _: CheckOutput, _: bool, _: Option<FileCheck>) -> ExitCode {
    message("error: this build has no live checks (feature `full`)");
    ExitCode::from(EXIT_USAGE)
}
