//! `attache man`: manual pages of all subcommands, made from their help.

use super::EXIT_INTERNAL;
use super::output::message;
use clap::{Args, Command};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  attache man ~/.local/share/man/man1     # then `man attache` and `man attache-run`";

/// Write manual pages to a directory.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct ManArgs {
    /// An existing directory
    directory: PathBuf,
}

pub(super) fn man(args: &ManArgs, command: Command) -> ExitCode {
    match clap_mangen::generate_to(command, &args.directory) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            message(format_args!("error: can't write to {}: {error}", args.directory.display()));
            ExitCode::from(EXIT_INTERNAL)
        }
    }
}
