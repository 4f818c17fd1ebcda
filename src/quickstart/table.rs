//! What the terminal shows: a progress bar, a table of requests that is redrawn in place, and the comparison.

use crate::load::{Exchange, TOTAL};
use crate::stack::{CLIENTS, MODEL, PAGES};
use console::{Term, truncate_str};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeSet;
use std::fmt::Display;
use std::io::Write;
use std::time::Duration;

/// Rows of requests on a terminal that is high enough.
const ROWS: usize = 14;

/// Writes a line to standard output. A reader that has gone, as in `attache quickstart | head`, is no error.
pub(crate) fn say(text: impl Display) {
    let _ = writeln!(std::io::stdout().lock(), "{text}");
}

/// How a run is shown while it runs.
#[derive(Debug)]
pub(crate) enum RunView {
    /// The number of requests that have ended.
    Bar(ProgressBar),
    /// Each request, redrawn in place.
    Live { terminal: Term, drawn: usize },
    /// A line for each request: standard output is not a terminal.
    Lines,
}

impl RunView {
    /// A bar on a terminal; nothing elsewhere.
    pub(crate) fn bar() -> Self {
        let style = ProgressStyle::with_template("{bar:30} {pos} of {len} requests");
        Self::Bar(ProgressBar::new(TOTAL as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// A table of all requests.
    pub(crate) fn table() -> Self {
        let terminal = Term::stdout();
        if terminal.is_term() {
            return Self::Live { terminal, drawn: 0 };
        }
        say(head());
        Self::Lines
    }

    /// Shows the latest of `seen`.
    pub(crate) fn show(&mut self, seen: &[Exchange]) {
        match self {
            Self::Bar(bar) => bar.set_position(seen.len() as u64),
            Self::Live { terminal, drawn } => {
                let (height, width) = terminal.size();
                let totals = totals(seen);
                // What has scrolled off the screen can't be drawn again.
                let rows = ROWS.min(usize::from(height).saturating_sub(totals.len() + 3)).max(1);
                let latest = &seen[seen.len().saturating_sub(rows)..];
                let lines = [head()].into_iter().chain(latest.iter().map(row)).chain([String::new()]).chain(totals);
                let lines: Vec<String> = lines
                    .map(|line| truncate_str(&line, usize::from(width).saturating_sub(1), "").into_owned())
                    .collect();
                let _ = terminal.clear_last_lines(*drawn);
                *drawn = lines.len();
                let _ = terminal.write_line(&lines.join("\n"));
            }
            Self::Lines => seen.last().map(row).into_iter().for_each(say),
        }
    }

    /// Ends the display of a run.
    pub(crate) fn end(self, seen: &[Exchange]) {
        match self {
            Self::Bar(bar) => bar.finish_and_clear(),
            Self::Live { .. } => {}
            Self::Lines => say(format!("\n{}", totals(seen).join("\n"))),
        }
    }
}

fn head() -> String {
    format!("{:<18}{:<17}{:>8}{:>8}{:>8}{:>8}  why", "request", "server", "TTFT", "total", "prompt", "cached")
}

fn row(exchange: &Exchange) -> String {
    let Exchange { label, server, first_token, total, usage, failure, why, .. } = exchange;
    let start = format!("{label:<18}{server:<17}");
    if let Some(failure) = failure {
        return start + failure;
    }
    let why = match why {
        Some(why) => match &why.runner_up {
            Some(runner_up) => format!("{}; runner-up {runner_up}", why.reason),
            None => why.reason.clone(),
        },
        None => "no decision on record".to_owned(),
    };
    let (prompt, cached) = (optional(usage.prompt_tokens), optional(usage.cached_tokens));
    format!("{start}{:>8}{:>8}{prompt:>8}{cached:>8}  {why}", time(*first_token), time(Some(*total)))
}

fn totals(seen: &[Exchange]) -> Vec<String> {
    let servers: BTreeSet<&str> = seen.iter().map(|exchange| &*exchange.server).collect();
    let line = |name: &str, of: Vec<&Exchange>| {
        let failed = of.iter().filter(|exchange| exchange.failure.is_some()).count();
        let median = quantile(of.iter().filter_map(|exchange| exchange.first_token), 0.5);
        let [prompt, cached] = tokens(of.iter().copied()).map(number);
        format!("{name:<35}{:>8}{failed:>8}{:>11}{prompt:>10}{cached:>10}", of.len(), time(median))
    };
    let title = ["server", "requests", "failed", "TTFT p50", "prompt", "cached"];
    let [server, requests, failed, ttft, prompt, cached] = title;
    let mut lines = vec![format!("{server:<35}{requests:>8}{failed:>8}{ttft:>11}{prompt:>10}{cached:>10}")];
    lines.extend(servers.into_iter().map(|name| line(name, seen.iter().filter(|e| e.server == name).collect())));
    lines.push(line("total", seen.iter().collect()));
    lines
}

/// Figures of each run, side by side.
#[derive(Debug, Default)]
pub(crate) struct Comparison {
    strategies: Vec<String>,
    /// A figure's name, and its value with each strategy.
    figures: Vec<(&'static str, Vec<String>)>,
}

impl Comparison {
    /// Adds a run with `strategy`.
    pub(crate) fn add(&mut self, strategy: &str, seen: &[Exchange]) {
        self.strategies.push(strategy.to_owned());
        let chats = || seen.iter().filter(|exchange| exchange.is_chat()).filter_map(|exchange| exchange.first_token);
        let all = || seen.iter().map(|exchange| exchange.total);
        let mean = chats().sum::<Duration>().checked_div(u32::try_from(chats().count()).unwrap_or_default());
        let [prompt, cached] = tokens(seen);
        let percent = 100 * cached / prompt.max(1);
        let figures = [
            ("TTFT of chats, median", time(quantile(chats(), 0.5))),
            ("TTFT of chats, p90", time(quantile(chats(), 0.9))),
            ("TTFT of chats, mean", time(mean)),
            ("end-to-end latency, median", time(quantile(all(), 0.5))),
            ("end-to-end latency, p90", time(quantile(all(), 0.9))),
            ("prompt tokens", number(prompt)),
            ("cached tokens", format!("{} ({percent} %)", number(cached))),
            ("computed prompt tokens", number(prompt.saturating_sub(cached))),
        ];
        for (at, (name, value)) in figures.into_iter().enumerate() {
            match self.figures.get_mut(at) {
                Some((_, values)) => values.push(value),
                None => self.figures.push((name, vec![value])),
            }
        }
    }

    /// Prints it, unless there is nothing to compare.
    pub(crate) fn show(&self) {
        if self.strategies.len() > 1 {
            let line = |name: &str, values: &[String]| {
                let cells: String = values.iter().map(|value| format!("{value:>22}")).collect();
                format!("{name:<28}{cells}")
            };
            say("\nthe same load with each strategy:");
            say(line("", &self.strategies));
            self.figures.iter().for_each(|(name, values)| say(line(name, values)));
        }
        say("every request got a response");
    }
}

/// What a user can try next.
pub(crate) fn hints(stays: bool) {
    // Members in the order in which people write them.
    let body = |more: &str| {
        format!(r#"{{"model":"{MODEL}","messages":[{{"role":"user","content":"hello"}}],"max_tokens":16{more}}}"#)
    };
    let (chat, stream) = (body(""), body(r#","stream":true"#));
    say(if stays { "\ntry:" } else { "\nwith --stay everything keeps running, and you can try:" });
    for (flags, path, body) in [("-si", "/v1/chat/completions", chat), ("-sN", "/v1/messages", stream)] {
        say(format!("  curl {flags} http://127.0.0.1:{CLIENTS}{path} \\"));
        say(format!("    -H 'content-type: application/json' \\\n    -d '{body}'"));
    }
    say(format!("  curl -s http://127.0.0.1:{PAGES}/decisions"));
    say(format!("  curl -s http://127.0.0.1:{PAGES}/endpoints"));
    if stays {
        say(format!("status page: http://127.0.0.1:{PAGES}/     Ctrl-C stops everything"));
    }
}

/// Prompt tokens and cached tokens of all these exchanges.
fn tokens<'e>(of: impl IntoIterator<Item = &'e Exchange>) -> [u64; 2] {
    of.into_iter().map(|exchange| exchange.usage).fold([0; 2], |[prompt, cached], usage| {
        [prompt + usage.prompt_tokens.unwrap_or_default(), cached + usage.cached_tokens.unwrap_or_default()]
    })
}

/// The value below which this share of `times` lies; `None` without times.
fn quantile(times: impl Iterator<Item = Duration>, share: f64) -> Option<Duration> {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    let at = (times.len() as f64 * share) as usize;
    times.get(at.min(times.len().saturating_sub(1))).copied()
}

fn time(time: Option<Duration>) -> String {
    time.map_or_else(|| "-".to_owned(), |time| format!("{:.0} ms", time.as_secs_f64() * 1e3))
}

fn optional(count: Option<u64>) -> String {
    count.map_or_else(|| "-".to_owned(), number)
}

/// With commas between thousands.
fn number(count: u64) -> String {
    indicatif::HumanCount(count).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_of_the_list() {
        let of =
            |share| quantile([5, 1, 4, 2, 3].map(Duration::from_secs).into_iter(), share).map(|time| time.as_secs());
        assert_eq!([of(0.0), of(0.5), of(0.9), of(1.0)], [Some(1), Some(3), Some(5), Some(5)]);
        assert_eq!(quantile(std::iter::empty(), 0.5), None);
    }

    #[test]
    fn runs_stand_side_by_side() {
        let run = |milliseconds| Exchange {
            label: "chat 1.1".to_owned(),
            server: "127.0.0.1:8001".to_owned(),
            first_token: Some(Duration::from_millis(milliseconds)),
            usage: attache_protocol::usage::Usage {
                prompt_tokens: Some(1_000),
                completion_tokens: Some(1),
                cached_tokens: Some(250),
            },
            ..Exchange::default()
        };
        let mut comparison = Comparison::default();
        comparison.add("round-robin", &[run(100), run(300)]);
        comparison.add("predicted-latency", &[run(50)]);
        let of = |name: &str| comparison.figures.iter().find(|(known, _)| *known == name).unwrap().1.clone();
        assert_eq!(of("TTFT of chats, mean"), ["200 ms", "50 ms"]);
        assert_eq!(of("cached tokens"), ["500 (25 %)", "250 (25 %)"]);
        assert_eq!(of("computed prompt tokens"), ["1,500", "750"]);
        assert_eq!(totals(&[run(100), run(300)]).len(), 3, "a title, one server, the total");
    }
}
