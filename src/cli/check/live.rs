//! `attache check --live`: what is wrong in a running system.

use super::{CheckOutput, FileCheck};
use crate::cli::admin_url::AdminUrl;
use crate::cli::output::{may_colour, message, print};
use crate::cli::running::authorization;
use crate::cli::{EXIT_CONFIG, EXIT_INTERNAL, EXIT_USAGE};
use crate::plugins::registry;
use attache_config::Settings;
use attache_live_check::{Report, Severity, Targets, TextStyle};
use clap::Args;
use console::Term;
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// No target answered.
const EXIT_UNAVAILABLE: u8 = 69;
/// Errors were found.
const EXIT_FOUND: u8 = 1;
/// Columns of lines where there is no terminal.
const COLUMNS: usize = 100;
/// The admin port of the shipped bootstraps in `envoy/`.
const ENVOY_ADMIN: &str = "http://127.0.0.1:9901";
/// The default of `--metrics-port` of `attache run`.
const PICKER_ADMIN_PORT: u16 = 9090;

pub(super) const AFTER_HELP: &str = "\
Examples:
  attache check attache.yaml
  attache check attache.yaml --deny-warnings      # for CI
  attache check attache.yaml --inside             # for a file that Envoy's module reads
  attache check attache.yaml --output json | jq '.diagnostics[].message'
  attache check --live                            # Envoy and Attaché on this machine
  attache check attache.yaml --live --envoy-admin 127.0.0.1:19000 --admin 127.0.0.1:9190
                                                  # other ports, such as those of `kubectl port-forward`
  attache check --live --envoy-config envoy.yaml --output json | jq '.live.findings[] | select(.severity == \"error\")'

Exit codes: 0 when the file is good, 78 when it isn't.
With --live: 0 when nothing is wrong, 1 when there are errors (or warnings, with --deny-warnings), 69 when no target \
answered, 78 when the file is wrong.";

#[derive(Args, Debug)]
pub(super) struct LiveArgs {
    /// Check what runs: Envoy, Attaché, the model servers and what they use. Nothing is changed
    #[arg(long)]
    pub(super) live: bool,
    /// Admin port of an Envoy; may be repeated [default: http://127.0.0.1:9901]
    #[arg(long = "envoy-admin", value_name = "URL", requires = "live")]
    envoy_admins: Vec<AdminUrl>,
    /// Bootstrap file of an Envoy instead of its admin port; may be repeated
    #[arg(long = "envoy-config", value_name = "FILE", requires = "live")]
    envoy_files: Vec<PathBuf>,
    /// Admin port of Attaché [default: on 127.0.0.1, the port in FILE, or 9090 without FILE]
    #[arg(long, value_name = "URL", requires = "live")]
    admin: Option<AdminUrl>,
    /// File with the bearer token that the picker needs with `--metrics-endpoint-auth`
    #[arg(long, value_name = "FILE", requires = "live")]
    token_file: Option<PathBuf>,
}

/// Shows the diagnostics of the file, then what the live checks find.
pub(super) fn check(args: LiveArgs, output: CheckOutput, deny_warnings: bool, mut file: Option<FileCheck>) -> ExitCode {
    let is_json = output == CheckOutput::Json;
    if let Some(file) = file.as_ref().filter(|_| !is_json) {
        file.show();
    }
    let settings = file.as_mut().and_then(|file| file.reading.settings.take());
    let is_envoy_named = !args.envoy_admins.is_empty() || !args.envoy_files.is_empty();
    let envoy_admins = match is_envoy_named {
        true => args.envoy_admins.iter().map(AdminUrl::to_string).collect(),
        false => vec![ENVOY_ADMIN.to_owned()],
    };
    let token = match args.token_file.as_deref().map(authorization).transpose() {
        Ok(token) => token,
        Err(error) => {
            message(format_args!("error: {error:#}"));
            return ExitCode::from(EXIT_USAGE);
        }
    };
    let targets = Targets {
        envoy_admins,
        is_envoy_named,
        envoy_files: args.envoy_files,
        is_picker_named: args.admin.is_some(),
        picker: args.admin.map_or_else(|| picker_admin(settings.as_ref()), |admin| admin.to_string()),
        token,
        settings,
        registry: registry(),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            message(format_args!("error: {error}"));
            return ExitCode::from(EXIT_INTERNAL);
        }
    };
    let report = runtime.block_on(attache_live_check::check(&targets));
    if is_json {
        print(json!({"file": file.as_ref().map(FileCheck::to_json), "live": report.to_json()}));
    } else {
        print(report.to_text(style(output)));
    }
    code(&report, deny_warnings, file.is_some_and(|file| file.refused))
}

/// The admin port on this machine of a picker with these settings. A port that the system chooses is not known.
fn picker_admin(settings: Option<&Settings>) -> String {
    let port = settings.map(|settings| settings.server.metrics_port).filter(|port| *port != 0);
    format!("http://127.0.0.1:{}", port.unwrap_or(PICKER_ADMIN_PORT))
}

fn style(output: CheckOutput) -> TextStyle {
    let terminal = Term::stdout();
    let colour = terminal.is_term() && may_colour();
    let width = terminal.size_checked().map_or(COLUMNS, |(_, columns)| columns.into());
    TextStyle { colour, width, show_ok: output == CheckOutput::Text }
}

fn code(report: &Report, deny_warnings: bool, is_file_refused: bool) -> ExitCode {
    let is_wrong = report.count(Severity::Error) > 0 || (deny_warnings && report.count(Severity::Warning) > 0);
    match () {
        () if is_file_refused => ExitCode::from(EXIT_CONFIG),
        () if !report.is_reached() => ExitCode::from(EXIT_UNAVAILABLE),
        () if is_wrong => ExitCode::from(EXIT_FOUND),
        () => ExitCode::SUCCESS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attache_config::{ConfigText, Sources};

    #[test]
    fn admin_port_is_that_of_the_file() {
        let of = |server: &str| {
            let text = format!(
                "apiVersion: attache.dev/v1\nkind: Attache\n{server}\n\
                 pools: [{{name: a, strategy: least-request, endpoints: ['127.0.0.1:1']}}]\n"
            );
            let text = Some(ConfigText { name: "test".to_owned(), bytes: text.into_bytes() });
            let sources = Sources { text, registry: registry(), ..Sources::default() };
            let (settings, _) = attache_config::load(&sources).expect("a correct file");
            picker_admin(Some(&settings))
        };
        assert_eq!(of("server: {metricsPort: 9191}"), "http://127.0.0.1:9191");
        assert_eq!(of("server: {metricsPort: 0}"), "http://127.0.0.1:9090");
        assert_eq!(of(""), picker_admin(None));
    }
}
