//! `attache top`: a live view of a running picker in the terminal.

use super::output::{may_colour, message, print};
use super::running::{AdminArgs, RunningPicker, encoded};
use super::{EXIT_INTERNAL, EXIT_USAGE};
use anyhow::bail;
use attache_config::units::parse_duration;
use attache_top::{Options, Page, TopError};
use bytes::Bytes;
use clap::Args;
use http::{Request, StatusCode};
use http_body_util::Full;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

const ABOUT: &str = "\
Watch a running picker in the terminal.

Shows pools, endpoints and their health, rejections and degraded modes, and decisions with their reasons as they come. \
Endpoints with trouble are first. Enter opens an endpoint, or a request with all candidates of its decision. The key ? \
lists all keys.";

const EXAMPLES: &str = "\
Examples:
  attache top                                        # the picker on this machine
  attache top --admin http://127.0.0.1:9091 --interval 250ms
  kubectl port-forward deploy/attache 9090 & attache top
  attache top --token-file /var/run/secrets/kubernetes.io/serviceaccount/token
  attache top --once > ticket.txt                    # one frame as text
  attache top --once | grep ejected

Exit codes: 0 when you quit, 64 when a flag can't be used or standard output is no terminal, 70 when the terminal fails \
or `--once` reaches no picker.";

/// Shortest time between two readings.
const SHORTEST_INTERVAL: Duration = Duration::from_millis(100);

/// Watch a running picker in the terminal: endpoints, decisions, rejections.
#[derive(Args, Debug)]
#[command(long_about = ABOUT, after_help = EXAMPLES)]
pub(super) struct TopArgs {
    #[command(flatten)]
    admin: AdminArgs,
    /// Time between two readings, 100ms or more
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = interval)]
    interval: Duration,
    /// Print one frame as text, after two readings, and exit
    #[arg(long)]
    once: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let interval = parse_duration(text)?;
    if interval < SHORTEST_INTERVAL { Err("the shortest is 100ms".to_owned()) } else { Ok(interval) }
}

impl RunningPicker {
    /// The page at `path`, which may have a query.
    ///
    /// # Errors
    /// The picker can't be reached, or its status is not 200.
    async fn page(&self, path: &str) -> anyhow::Result<Bytes> {
        let request = Request::get(format!("{}{path}", self.url)).body(Full::default())?;
        match self.ask(request).await? {
            (StatusCode::OK, page) => Ok(page),
            (status, text) => bail!(self.refused(status, String::from_utf8_lossy(&text).trim())),
        }
    }
}

pub(super) fn run(args: &TopArgs) -> ExitCode {
    let picker = Arc::new(RunningPicker::at(&args.admin));
    let url = picker.url.to_string();
    let pages: attache_top::Pages = Arc::new(move |page| {
        let picker = picker.clone();
        let query = match &page {
            Page::History(after) => format!("?after={after}"),
            Page::Explanation(id) => format!("?request_id={}", encoded(id)),
            _ => String::new(),
        };
        let path = format!("{}{query}", page.path());
        Box::pin(async move { picker.page(&path).await.map_err(|error| format!("{error:#}")) })
    });
    let options = Options { pages, url, interval: args.interval, colour: may_colour() };
    let outcome = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(TopError::from);
    let outcome = outcome.and_then(|runtime| {
        if args.once {
            runtime.block_on(attache_top::once(&options, columns())).map(print)
        } else {
            runtime.block_on(attache_top::watch(options))
        }
    });
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            message(format_args!("error: {error}"));
            ExitCode::from(if matches!(error, TopError::NoTerminal) { EXIT_USAGE } else { EXIT_INTERNAL })
        }
    }
}

/// The width that the shell or a script sets for output, columns.
fn columns() -> Option<u16> {
    std::env::var("COLUMNS").ok()?.parse().ok().filter(|columns| *columns > 0)
}
