//! `attache config`: what is known about the keys of the configuration file.

use super::output::print;
use attache_config::keys;
use clap::{Args, Subcommand};
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  A file with every key, its note and its default:
    attache config defaults > attache.yaml

  Completion and checks in an editor with the YAML language server, whose files then begin with
  `# yaml-language-server: $schema=attache.schema.json`:
    attache config schema > attache.schema.json";

/// Print what is known about the keys of the configuration file.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ConfigArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Clone, Copy, Debug, Subcommand)]
enum What {
    /// Print a JSON Schema of the file, for editors. `attache check` finds more: combinations, plugins, units
    Schema,
    /// Print a file with every key: those with a default have it, all others are disabled
    Defaults,
}

pub(super) fn config(args: &ConfigArgs) -> ExitCode {
    match args.what {
        What::Schema => print(format_args!("{:#}", keys::json_schema(&crate::plugins::registry()))),
        What::Defaults => print(keys::defaults().trim_end()),
    }
    ExitCode::SUCCESS
}
