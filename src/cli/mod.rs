//! The command line: one verb a file. Parses arguments, reads files, and calls `config` and `app`.
//!
//! Exit codes (sysexits): 0 success, 2 an assertion of a replay does not hold, 64 wrong usage, 69 nothing to check
//! answered, 70 internal error, 78 wrong configuration. Output for programs goes to standard output, messages for people to standard error.

mod admin_url;
mod check;
mod completions;
mod config;
mod envoy_config;
mod envoy_module;
mod explain;
pub mod flags;
mod man;
mod output;
mod quickstart;
mod reference;
mod replay;
pub mod run;
mod running;
pub mod sim;
pub mod source;
#[cfg(feature = "full")]
mod top;
mod version;

use clap::{CommandFactory, Parser, Subcommand};
use std::process::ExitCode;

/// Exit code for wrong usage of the command line.
pub const EXIT_USAGE: u8 = 64;
/// Exit code for an internal error or one of the system.
pub const EXIT_INTERNAL: u8 = 70;
/// Exit code for a wrong configuration.
pub const EXIT_CONFIG: u8 = 78;

const EXAMPLES: &str = "\
Examples:
  attache run --endpoint 127.0.0.1:8000 --endpoint 127.0.0.1:8001
  attache run --config-file attache.yaml
  attache check -f attache.yaml
  attache explain request.json
  attache replay --workload multi-turn";

/// An Envoy external-processing endpoint picker for LLM inference.
#[derive(Debug, Parser)]
#[command(name = "attache", version, about, after_help = EXAMPLES, propagate_version = true, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Choose an endpoint for every request of Envoy.
    Run(Box<flags::RunArgs>),
    /// Try Attaché on this machine: simulated model servers, Attaché and Envoy.
    Quickstart(quickstart::QuickstartArgs),
    /// Simulate a fleet of model servers over real HTTP.
    Sim(Box<sim::Args>),
    /// Check a configuration file, or what runs.
    Check(Box<check::CheckArgs>),
    /// Print a JSON Schema of the configuration file, or a file with all defaults.
    Config(config::ConfigArgs),
    /// Print a bootstrap of Envoy for a configuration file, with Attaché inside Envoy.
    EnvoyConfig(envoy_config::EnvoyConfigArgs),
    /// Print the path of the library that Envoy loads, or copy it.
    EnvoyModule(envoy_module::EnvoyModuleArgs),
    /// Explain where a request would go, and why.
    Explain(explain::ExplainArgs),
    /// Watch a running picker in the terminal: endpoints, decisions, rejections.
    #[cfg(feature = "full")]
    Top(top::TopArgs),
    /// Play a workload to simulated servers and compare strategies.
    Replay(Box<replay::ReplayArgs>),
    /// Print the version.
    Version(version::VersionArgs),
    /// Print completions for a shell.
    Completions(completions::CompletionsArgs),
    /// Write manual pages to a directory.
    Man(man::ManArgs),
}

/// The whole program: parses the command line, runs the verb, and returns the exit code.
#[must_use]
pub fn main() -> ExitCode {
    let reference::Translated { words, warnings } = reference::translate(std::env::args_os().collect());
    match Cli::try_parse_from(words) {
        Ok(cli) => match cli.verb {
            Verb::Run(args) => run::run(&args, &warnings),
            Verb::Quickstart(args) => quickstart::run(args),
            Verb::Sim(args) => sim::run(*args).unwrap_or_else(|error| {
                output::message(format_args!("error: {error:#}"));
                ExitCode::from(EXIT_INTERNAL)
            }),
            Verb::Check(args) => check::check(*args),
            Verb::Config(args) => config::config(&args),
            Verb::EnvoyConfig(args) => envoy_config::envoy_config(&args),
            Verb::EnvoyModule(args) => envoy_module::envoy_module(&args),
            Verb::Explain(args) => explain::run(&args),
            #[cfg(feature = "full")]
            Verb::Top(args) => top::run(&args),
            Verb::Replay(args) => replay::run(&args),
            Verb::Version(args) => version::version(&args),
            Verb::Completions(args) => completions::completions(&args, Cli::command()),
            Verb::Man(args) => man::man(&args, Cli::command()),
        },
        Err(error) => {
            // A closed pipe (`attache --help | head -1`) is not an error.
            let _ = error.print();
            ExitCode::from(if error.use_stderr() { EXIT_USAGE } else { 0 })
        }
    }
}

/// Parses a header of a request, `name: value`.
///
/// # Errors
/// The name is missing.
fn header(text: &str) -> Result<(String, String), String> {
    let split = text.split_once(':').map(|(name, value)| (name.trim().to_owned(), value.trim().to_owned()));
    split.filter(|(name, _)| !name.is_empty()).ok_or_else(|| "a name, a colon and a value are needed".to_owned())
}
