//! `attache completions`.

use super::output::print;
use clap::{Args, Command};
use clap_complete::Shell;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  attache completions bash > ~/.local/share/bash-completion/completions/attache
  attache completions zsh > ~/.zfunc/_attache";

/// Print completions for a shell.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct CompletionsArgs {
    /// The shell
    shell: Shell,
}

pub(super) fn completions(args: &CompletionsArgs, mut command: Command) -> ExitCode {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "attache", &mut script);
    print(String::from_utf8_lossy(&script));
    ExitCode::SUCCESS
}
