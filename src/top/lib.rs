//! The terminal view of a running picker: pools, endpoints, decisions, rejections.
//!
//! # What is here
//!
//! | module | owns | pure |
//! |---|---|---|
//! | `model` | typed data of the admin pages; a missing field is `None` | yes |
//! | `watch` | what successive readings add up to: rates, shares, histories, decisions | yes |
//! | `state` | keys: pane, cursor, order, filter, opened endpoint or request | yes |
//! | `rows` | the rows of each pane, filtered and sorted | yes |
//! | `view` | a frame of the state | yes |
//! | `run` | the event loop: keys, readings, signals | no |
//! | `screen` | the terminal, restored at every end | no |
//!
//! **Owns** the terminal while it runs.
//! **Called by** `cli::top`, which supplies the pages ([`Pages`]).
//! **Must not** use another crate of the picker but the clock of `types`: it knows the admin pages alone, also those of
//! other versions.
//!
//! Read first: `run.rs`, `state.rs`, `view.rs`.

mod format;
mod model;
mod rows;
mod run;
mod screen;
mod state;
#[cfg(test)]
mod tests;
mod view;
mod watch;

pub use state::KEYS;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use std::io::IsTerminal;
use std::sync::Arc;
use std::time::Duration;

/// Reads a page of the admin port. The error is a message for people.
pub type Pages = Arc<dyn Fn(Page) -> BoxFuture<'static, Result<Bytes, String>> + Send + Sync>;

/// A page of the admin port, JSON.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Page {
    /// Pools with their endpoints, rejections, degraded modes.
    Endpoints,
    /// The latest decisions.
    Decisions,
    /// The other pickers.
    Peers,
    /// Requests that load kept from their cached prefix.
    Pressure,
    /// Rates and percentiles of each pool; those after this sample.
    History(u64),
    /// The explanation of the decision about the request with this `x-request-id`.
    Explanation(String),
}

impl Page {
    /// Its path on the admin port.
    #[must_use]
    pub fn path(&self) -> &'static str {
        match self {
            Page::Endpoints => "/endpoints",
            Page::Decisions => "/decisions",
            Page::Peers => "/api/peers",
            Page::Pressure => "/api/pressure",
            Page::History(_) => "/api/history",
            Page::Explanation(_) => "/explain",
        }
    }
}

/// Width of a frame that is printed without a terminal, columns: all columns fit at their full width.
const PRINTED_COLUMNS: u16 = 400;

/// What is shown, and how.
#[derive(Clone)]
pub struct Options {
    /// Reads the admin pages.
    pub pages: Pages,
    /// URL of the admin port, for the first line.
    pub url: String,
    /// Time between two readings.
    pub interval: Duration,
    /// Whether colours may be used.
    pub colour: bool,
}

impl std::fmt::Debug for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Options").field("url", &self.url).finish_non_exhaustive()
    }
}

/// Why the view ended before the user quit.
#[derive(Debug, thiserror::Error)]
pub enum TopError {
    /// Standard output is no terminal.
    #[error(
        "standard output is no terminal. `attache top --once` prints one frame as text; `attache explain --request ID` \
         explains one request; the page `/endpoints` of the admin port has the data as JSON"
    )]
    NoTerminal,
    /// The terminal can't be read or written.
    #[error("the terminal can't be used: {0}")]
    Terminal(#[from] std::io::Error),
    /// The admin port can't be read.
    #[error("{0}")]
    Page(String),
}

/// Shows the view until the user quits, or a signal ends the process.
///
/// # Errors
/// Standard output is no terminal, or the terminal fails. The view itself reports a picker that can't be reached.
pub async fn watch(options: Options) -> Result<(), TopError> {
    if !std::io::stdout().is_terminal() {
        return Err(TopError::NoTerminal);
    }
    run::run(options).await
}

/// One frame as text, after two readings that are one interval apart. It is as long as it needs. It is `columns` wide,
/// else as wide as the terminal, else as wide as it needs.
///
/// # Errors
/// The admin port can't be read.
pub async fn once(options: &Options, columns: Option<u16>) -> Result<String, TopError> {
    let terminal = || std::io::stdout().is_terminal().then(crossterm::terminal::size)?.ok();
    let columns = columns.or_else(|| terminal().map(|(columns, _)| columns));
    run::once(options, columns.unwrap_or(PRINTED_COLUMNS)).await
}
