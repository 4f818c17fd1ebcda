//! `attache run`: serves Envoy.

use super::flags::RunArgs;
use super::source::ReloadSource;
use super::{EXIT_CONFIG, EXIT_INTERNAL, EXIT_USAGE, colour};
use crate::app::{self, Reload};
use crate::config::settings::PoolSettings;
use crate::config::{Diagnostic, Settings};
use crate::record::RecordSettings;
use crate::telemetry;
use std::process::ExitCode;

const NOTHING_TO_SERVE: &str = "\
error: nothing says where requests can go

The shortest ways to start:
  attache run --endpoint 127.0.0.1:8000        # a model server's address; may be given several times
  attache run --pool-name vllm-pool            # the pods of an InferencePool, in a Kubernetes cluster
  attache run --pool-selector serving=attache  # every InferencePool with this label, each by a Service of its own
  attache run --config-file attache.yaml       # pools in a file; `attache check -f attache.yaml` checks it

For more information, try `attache run --help`.
";

pub(super) fn run(args: &RunArgs) -> ExitCode {
    if !args.has_something_to_serve() {
        eprint!("{NOTHING_TO_SERVE}");
        return ExitCode::from(EXIT_USAGE);
    }
    let source = ReloadSource::new(args.config_file.clone(), args.config_text.clone(), args.overrides());
    let reading = source.read();
    if !reading.diagnostics.is_empty() {
        eprint!("{}", reading.render(colour()));
    }
    let Some(settings) = reading.settings else { return ExitCode::from(EXIT_CONFIG) };
    match serve(settings, source, args.record()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(EXIT_INTERNAL)
        }
    }
}

/// Serves until shutdown; returns the exit code.
fn serve(settings: Settings, source: ReloadSource, record: Option<RecordSettings>) -> anyhow::Result<()> {
    let logs = telemetry::logs::init(&settings.telemetry.log_filter, settings.telemetry.log_json)?;
    let of_pools = source.clone();
    let read_pool = Box::new(move |name: &str, text: &str| read_pool(&of_pools, name, text));
    let reload = source.path.clone().map(|path| Reload { path, load: Box::new(move || reread(&source)) });
    app::run(settings, reload, read_pool, record, logs)
}

/// Reads the configuration again; errors are logged, and the last known good one stays.
fn reread(source: &ReloadSource) -> Option<Settings> {
    let reading = source.read();
    tell(&reading.diagnostics, source.path.as_deref().and_then(|path| path.to_str()).unwrap_or_default());
    reading.settings
}

/// Reads a pool's own configuration; errors are logged.
fn read_pool(source: &ReloadSource, name: &str, text: &str) -> Option<PoolSettings> {
    let (settings, diagnostics) = source.read_pool(name, text);
    tell(&diagnostics, name);
    settings
}

fn tell(diagnostics: &[Diagnostic], source: &str) {
    for diagnostic in diagnostics {
        let (line, column) = diagnostic.span.map_or((0, 0), |s| (s.line, s.column));
        let path = &diagnostic.path;
        if diagnostic.is_error() {
            tracing::error!(source, line, column, path, "configuration refused: {}", diagnostic.message);
        } else {
            tracing::warn!(source, line, column, path, "configuration: {}", diagnostic.message);
        }
    }
}
