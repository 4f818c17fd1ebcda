//! `attache check`: reports every error of a configuration at once, and with `--live` what is wrong in a running system.

#[cfg_attr(not(feature = "full"), path = "check/absent.rs")]
mod live;

use super::EXIT_CONFIG;
use super::output::{colour, message, print};
use super::source::{ConfigReading, ReloadSource};
use attache_config::Diagnostic;
use attache_config::diagnostic::render_json;
use clap::{Args, ValueEnum};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// How results are printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum CheckOutput {
    /// Text for people; diagnostics of the file are on standard error.
    Text,
    /// Like `text`, without lines about what is right.
    Short,
    /// JSON for programs, on standard output.
    Json,
}

/// Check a configuration file and report every error; with `--live`, check what runs.
#[derive(Args, Debug)]
#[command(after_help = live::AFTER_HELP)]
pub(super) struct CheckArgs {
    #[command(flatten)]
    which: Which,
    /// How results are printed
    #[arg(long, alias = "format", value_enum, default_value_t = CheckOutput::Text)]
    output: CheckOutput,
    /// Treat warnings as errors
    #[arg(long)]
    deny_warnings: bool,
    /// Check the file for a use inside Envoy: warn of keys that have no effect there. All flags of `attache run` and
    /// their variables have none
    #[arg(long, conflicts_with_all = ["live", "envoy_admins", "envoy_files", "admin", "token_file"])]
    inside: bool,
    #[command(flatten)]
    live: live::LiveArgs,
}

/// The file, as an argument or with `--file`.
#[derive(Args, Debug)]
#[group(multiple = false)]
struct Which {
    /// The file
    #[arg(value_name = "FILE")]
    #[arg(required_unless_present_any = ["named", "live"])]
    file: Option<PathBuf>,
    /// The file
    #[arg(short = 'f', long = "file", aliases = ["config-file", "config"], value_name = "FILE")]
    named: Option<PathBuf>,
}

/// A file that was read.
struct FileCheck {
    path: PathBuf,
    reading: ConfigReading,
    /// Whether it has errors, or warnings that count as errors.
    refused: bool,
}

impl FileCheck {
    fn read(path: &Path, inside: bool, deny_warnings: bool) -> Self {
        let source = ReloadSource::of_file_alone(path.to_owned());
        let reading = if inside { source.inside() } else { source }.read();
        let refused = reading.diagnostics.iter().any(|d| d.is_error() || deny_warnings);
        debug_assert_eq!(reading.settings.is_none(), reading.diagnostics.iter().any(Diagnostic::is_error));
        Self { path: path.to_owned(), reading, refused }
    }

    /// The diagnostics, for programs.
    fn to_json(&self) -> serde_json::Value {
        render_json(&self.reading.diagnostics, self.path.to_str())
    }

    /// Shows the diagnostics to people.
    fn show(&self) {
        message(self.reading.render(colour()));
        if let (Some(settings), false) = (&self.reading.settings, self.refused) {
            let endpoints: usize = settings.pools.iter().map(|p| p.endpoints.len()).sum();
            let pools = settings.pools.len() + settings.templates.len();
            let counted =
                |number: usize, what| if number == 1 { format!("1 {what}") } else { format!("{number} {what}s") };
            let (pools, endpoints) = (counted(pools, "pool"), counted(endpoints, "endpoint"));
            print(format_args!("{}: good ({pools}, {endpoints} named)", self.path.display()));
        }
    }
}

pub(super) fn check(args: CheckArgs) -> ExitCode {
    let path = args.which.file.as_deref().or(args.which.named.as_deref());
    let file = path.map(|path| FileCheck::read(path, args.inside, args.deny_warnings));
    if args.live.live {
        return live::check(args.live, args.output, args.deny_warnings, file);
    }
    let Some(file) = file else { unreachable!("the arguments require a file") };
    match args.output {
        CheckOutput::Json => print(file.to_json()),
        CheckOutput::Text | CheckOutput::Short => file.show(),
    }
    if file.refused { ExitCode::from(EXIT_CONFIG) } else { ExitCode::SUCCESS }
}
