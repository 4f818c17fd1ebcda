//! `attache completions`.

use clap::{Args, Command};
use clap_complete::Shell;
use std::io::Write;
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
    // A reader may close the pipe before the end.
    let _ = std::io::stdout().write_all(&script);
    ExitCode::SUCCESS
}
