//! `attache run`: serves Envoy.

use super::flags::RunArgs;
use super::output::{colour, message};
use super::source::ReloadSource;
use super::{EXIT_CONFIG, EXIT_INTERNAL, EXIT_USAGE};
use crate::app::embedded::{self, Embedded};
use crate::app::{self, Reload};
use attache_config::settings::PoolSettings;
use attache_config::{Diagnostic, Settings};
use attache_record::RecordSettings;
use attache_telemetry::logs::LogHandle;
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

/// Serves until shutdown. `converted` has warnings about flags of other pickers.
pub(super) fn run(args: &RunArgs, converted: &[String]) -> ExitCode {
    if !args.has_something_to_serve() {
        message(NOTHING_TO_SERVE);
        return ExitCode::from(EXIT_USAGE);
    }
    let source = ReloadSource::new(args.config_file.clone(), args.config_text.clone(), args.overrides());
    let reading = source.read();
    let log_json = reading.settings.as_ref().is_some_and(|settings| settings.telemetry.log_json);
    if !log_json {
        converted.iter().for_each(|warning| message(format_args!("warning: {warning}")));
        message(reading.render(colour()));
    }
    let Some(settings) = reading.settings else { return ExitCode::from(EXIT_CONFIG) };
    let logs = attache_telemetry::logs::init(&settings.telemetry.log_filter, log_json, colour());
    if logs.is_ok() {
        attache_telemetry::logs::log_panics();
    }
    if log_json {
        // A reader of JSON lines can't parse text between them.
        converted.iter().for_each(|warning| tracing::warn!("command line: {warning}"));
        log(&reading.diagnostics, reading.text.as_ref().map_or("", |text| &text.name));
    }
    let served = logs.map_err(Into::into).and_then(|logs| serve(settings, source, args.record(), logs));
    let Err(error) = served else { return ExitCode::SUCCESS };
    let error = format!("{error:#}");
    if log_json {
        tracing::error!(error, "start failed");
    } else {
        message(format_args!("error: {error}"));
    }
    ExitCode::from(EXIT_INTERNAL)
}

/// Serves until shutdown.
fn serve(
    settings: Settings,
    source: ReloadSource,
    record: Option<RecordSettings>,
    logs: LogHandle,
) -> anyhow::Result<()> {
    let of_pools = source.clone();
    let read_pool = Box::new(move |name: &str, text: &str| read_pool(&of_pools, name, text));
    let reload = source.path.clone().map(|path| Reload { path, load: Box::new(move || reread(&source)) });
    app::run(settings, reload, read_pool, record, logs)
}

/// Starts the picker of `source` inside another process.
///
/// # Errors
/// If its thread can't be created.
pub fn embed(
    settings: Settings,
    source: ReloadSource,
    logs: LogHandle,
    host: embedded::Host,
    loaded: impl FnOnce(Embedded) + Send + 'static,
) -> std::io::Result<()> {
    let of_pools = source.clone();
    let read_pool = Box::new(move |name: &str, text: &str| read_pool(&of_pools, name, text));
    let reload = source.path.clone().map(|path| Reload { path, load: Box::new(move || reread(&source)) });
    embedded::start(settings, reload, read_pool, logs, host, loaded)
}

/// Reads the configuration again; errors are logged and returned, and the last known good one stays.
fn reread(source: &ReloadSource) -> Result<Settings, String> {
    let reading = source.read();
    log(&reading.diagnostics, source.path.as_deref().and_then(|path| path.to_str()).unwrap_or_default());
    reading.settings.ok_or_else(|| refusal(&reading.diagnostics))
}

/// Why a configuration was refused, in one line: its first error, and the number of others.
fn refusal(diagnostics: &[Diagnostic]) -> String {
    let mut errors = diagnostics.iter().filter(|diagnostic| diagnostic.is_error());
    let Some(first) = errors.next() else { return "the configuration is invalid".to_owned() };
    let line = first.span.map(|span| format!("line {}: ", span.line)).unwrap_or_default();
    let path = if first.path.is_empty() { String::new() } else { format!("{}: ", first.path) };
    match errors.count() {
        0 => format!("{line}{path}{}", first.message),
        others => format!("{line}{path}{} (and {others} more)", first.message),
    }
}

/// Reads a pool's own configuration; errors are logged.
fn read_pool(source: &ReloadSource, name: &str, text: &str) -> Option<PoolSettings> {
    let (settings, diagnostics) = source.read_pool(name, text);
    log(&diagnostics, name);
    settings
}

/// Logs diagnostics of the configuration `source`. Those about flags and variables have no place in it.
pub fn log(diagnostics: &[Diagnostic], source: &str) {
    for diagnostic in diagnostics {
        let code = diagnostic.code.as_str();
        let (line, column) = diagnostic.span.map(|s| (s.line, s.column)).unzip();
        let source = (!source.is_empty() && diagnostic.is_of_text()).then_some(source);
        let (path, help) = (&diagnostic.path, diagnostic.help.as_deref());
        if diagnostic.is_error() {
            tracing::error!(code, source, line, column, path, help, "configuration refused: {}", diagnostic.message);
        } else {
            tracing::warn!(code, source, line, column, path, help, "configuration: {}", diagnostic.message);
        }
    }
}
