//! The demonstration: simulated model servers, a picker and Envoy as processes of this machine, and one load that is
//! played with two strategies.
//!
//! # What is here
//!
//! | module | owns | pure |
//! |---|---|---|
//! | this one | the order: processes, load, comparison, end | no |
//! | `processes` | child processes, their logs and their end | no |
//! | `stack` | commands and configurations of the processes; waits until they serve | no |
//! | `envoy` | where Envoy is; the shipped bootstrap with other ports | no |
//! | `load` | the requests, and what a client sees of each response | no |
//! | `table` | what the terminal shows | no |
//!
//! **Called by** `cli::quickstart`. **Must not** use `picker` or `sim`: both run as processes of their own, as in
//! production.
//!
//! Read first: `lib.rs`, `stack.rs`.

mod envoy;
mod load;
mod processes;
mod stack;
mod table;

use load::Exchange;
use processes::Processes;
use stack::Stack;
use std::path::PathBuf;
use table::{Comparison, RunView, say};
use tempfile::TempDir;
use tokio::signal::unix::{SignalKind, signal};

/// The strategy that the other one is compared with.
pub const BASELINE: &str = "round-robin";
/// The strategy that is compared unless another one is named.
pub const DEFAULT_STRATEGY: &str = "predicted-latency";

/// What to show.
#[derive(Clone, Debug)]
pub struct Options {
    /// The program `attache`: its subcommands `sim` and `run` are started.
    pub attache: PathBuf,
    /// The program `envoy`; `None` looks for it.
    pub envoy: Option<PathBuf>,
    /// The strategy that is compared with [`BASELINE`].
    pub strategy: String,
    /// Whether everything keeps running on fixed ports until Ctrl-C.
    pub stay: bool,
}

/// Why the demonstration ends early.
#[derive(Debug, thiserror::Error)]
pub enum QuickstartError {
    /// Envoy is not there, or is not Envoy.
    #[error("{0}")]
    Envoy(String),
    /// A process can't be started, ended by itself, or does not serve in time.
    #[error("{0}")]
    Process(String),
    /// Requests failed, or their decisions are not on record.
    #[error("{0}")]
    Requests(String),
    /// The system refuses a file, a port or a signal handler.
    #[error("{0}: {1}")]
    System(&'static str, #[source] std::io::Error),
    /// Ctrl-C or SIGTERM came before the end.
    #[error("stopped")]
    Stopped,
}

/// Plays the load with [`BASELINE`] and with the strategy of `options`, and compares them on standard output. Every
/// process that it starts has ended when it returns. Must be called in a tokio runtime with time and I/O.
///
/// # Errors
/// See [`QuickstartError`]. The logs of the processes are kept then, and the message says where.
pub async fn run(options: &Options) -> Result<(), QuickstartError> {
    let envoy = envoy::find(options.envoy.as_deref(), &options.attache).await?;
    // Before the first process: whoever stops the demonstration stops them too.
    let mut terminate = signal(SignalKind::terminate()).map_err(|e| QuickstartError::System("SIGTERM", e))?;
    let logs = tempfile::Builder::new().prefix("attache-quickstart-").tempdir();
    let logs = logs.map_err(|e| QuickstartError::System("no directory for logs", e))?;
    say(format!("{} simulated model servers, attache and Envoy; logs in {}", stack::SERVERS, logs.path().display()));
    let mut processes = Processes::default();
    let outcome = tokio::select! {
        outcome = demonstrate(options, envoy, &logs, &mut processes) => outcome,
        _ = tokio::signal::ctrl_c() => Err(QuickstartError::Stopped),
        _ = terminate.recv() => Err(QuickstartError::Stopped),
    };
    let outcome = match outcome {
        Ok(()) if options.stay => tokio::select! {
            name = processes.first_end() => Err(QuickstartError::Process(format!("{name} ended by itself"))),
            _ = tokio::signal::ctrl_c() => Ok(()),
            _ = terminate.recv() => Ok(()),
        },
        outcome => outcome,
    };
    processes.stop().await;
    match outcome {
        Err(QuickstartError::Process(_) | QuickstartError::Requests(_)) => {
            let kept = logs.keep();
            eprintln!("logs are in {}", kept.display());
        }
        _ => drop(logs),
    }
    outcome
}

async fn demonstrate(
    options: &Options,
    envoy: PathBuf,
    logs: &TempDir,
    processes: &mut Processes,
) -> Result<(), QuickstartError> {
    let mut strategies = vec![BASELINE, &options.strategy];
    strategies.dedup();
    let mut comparison = Comparison::default();
    for (number, strategy) in strategies.iter().enumerate() {
        let is_last = number + 1 == strategies.len();
        let directory = logs.path().join(number.to_string());
        std::fs::create_dir(&directory).map_err(|e| QuickstartError::System("no directory for logs", e))?;
        processes.log_to(directory);
        let is_fixed = is_last && options.stay;
        let stack = Stack::start(options, &envoy, strategy, is_fixed, processes).await?;
        say(format!("\nplaying the load with {strategy}; status page: http://{}/", stack.pages));
        let view = if is_last { RunView::table() } else { RunView::bar() };
        comparison.add(strategy, &play(&stack, view).await?);
        if !is_last {
            processes.stop().await;
        }
    }
    comparison.show();
    table::hints(options.stay);
    Ok(())
}

/// Plays the load and shows it; what clients saw.
async fn play(stack: &Stack, mut view: RunView) -> Result<Vec<Exchange>, QuickstartError> {
    let mut exchanges = load::start(stack.clients)?;
    let mut seen = Vec::with_capacity(load::TOTAL);
    while let Some(mut exchange) = exchanges.recv().await {
        exchange.why = stack.explanation(&exchange.id).await;
        seen.push(exchange);
        view.show(&seen);
    }
    view.end(&seen);
    let failed = seen.iter().filter_map(|e| e.failure.as_ref().map(|failure| format!("{}: {failure}", e.label)));
    let unexplained = seen.iter().filter(|e| e.failure.is_none() && e.why.is_none());
    let unexplained = unexplained.map(|e| format!("{}: no decision is on record for request {}", e.label, e.id));
    let wrong: Vec<String> = failed.chain(unexplained).collect();
    match wrong.is_empty() && seen.len() == load::TOTAL {
        true => Ok(seen),
        false => Err(QuickstartError::Requests(format!(
            "{} of {} requests failed or have no decision\n{}",
            wrong.len() + load::TOTAL - seen.len(),
            load::TOTAL,
            wrong.join("\n")
        ))),
    }
}
