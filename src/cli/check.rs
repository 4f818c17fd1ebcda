//! `attache check`: reports every error of a configuration at once.

use super::EXIT_CONFIG;
use super::output::{colour, message, print};
use super::source::ReloadSource;
use crate::config::Diagnostic;
use crate::config::diagnostic::render_json;
use clap::{Args, ValueEnum};
use std::path::PathBuf;
use std::process::ExitCode;

const EXAMPLES: &str = "\
Examples:
  attache check attache.yaml
  attache check attache.yaml --deny-warnings      # for CI
  attache check attache.yaml --format json | jq '.diagnostics[].message'

Exit codes: 0 when the file is good, 78 when it isn't.";

/// Output format of diagnostics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum DiagnosticFormat {
    /// Text for people, on standard error.
    Text,
    /// JSON for programs, on standard output.
    Json,
}

/// Check a configuration file and report every error.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    which: Which,
    /// How diagnostics are printed
    #[arg(long, value_enum, default_value_t = DiagnosticFormat::Text)]
    format: DiagnosticFormat,
    /// Treat warnings as errors
    #[arg(long)]
    deny_warnings: bool,
}

/// The file, as an argument or with `--config-file`.
#[derive(Args, Debug)]
#[group(required = true, multiple = false)]
struct Which {
    /// The file
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// The file
    #[arg(short = 'f', long = "file", aliases = ["config-file", "config"], value_name = "FILE")]
    named: Option<PathBuf>,
}

pub(super) fn check(args: &CheckArgs) -> ExitCode {
    let file = args.which.file.as_ref().or(args.which.named.as_ref()).cloned().unwrap_or_default();
    let reading = ReloadSource::of_file_alone(file.clone()).read();
    let refused = reading.diagnostics.iter().any(|d| d.is_error() || args.deny_warnings);
    match (args.format, &reading.settings) {
        (DiagnosticFormat::Json, _) => print(render_json(&reading.diagnostics, file.to_str())),
        (DiagnosticFormat::Text, settings) => {
            message(reading.render(colour()));
            if let (Some(settings), false) = (settings, refused) {
                let endpoints: usize = settings.pools.iter().map(|p| p.endpoints.len()).sum();
                let pools = settings.pools.len() + settings.templates.len();
                let counted =
                    |number: usize, what| if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") };
                let (pools, endpoints) = (counted(pools, "pool"), counted(endpoints, "endpoint"));
                print(format_args!("{}: good ({pools}, {endpoints} named)", file.display()));
            }
        }
    }
    debug_assert_eq!(reading.settings.is_none(), reading.diagnostics.iter().any(Diagnostic::is_error));
    if refused { ExitCode::from(EXIT_CONFIG) } else { ExitCode::SUCCESS }
}
