//! The report in a terminal. Called by `cli::replay`. Pure.
//!
//! One table for each cell, one row for each policy. Where the terminal is too narrow, the columns
//! that matter least go first.

mod programs;

use super::compare::{ComparisonVerdict, Interval, MeanChange};
use super::json::{Cell, Distribution, Document, FlowFigures, RunFigures, SplitFigures, Versus};
use super::number::{ColumnUnit, NONE, percent, seconds, three_digits, whole};
use super::objective::SloFigures;
pub(super) use programs::program_columns;
use std::fmt::Write as _;

/// The narrowest width that is kept to: below it a table says nothing any more.
pub const MIN_WIDTH: usize = 40;

/// More flows than these are in the JSON only.
const MOST_FLOWS: usize = 10;

/// How a table is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStyle {
    /// Columns of the terminal, at least [`MIN_WIDTH`]; `None` when they don't matter.
    pub width: Option<usize>,
    /// Verdicts are coloured with ANSI sequences.
    pub colour: bool,
}

/// One column of a table.
pub(super) struct Column {
    /// Text above the column, one line.
    pub(super) heading: String,
    /// Words stand at the left, figures at the right.
    pub(super) words: bool,
    /// How soon it goes when there is no room; 0 is never.
    goes: u8,
    /// One cell for each run.
    pub(super) cells: Vec<String>,
}

/// The heading of the column that says what a comparison shows.
pub(super) const VERDICT: &str = "verdict";

/// All tables of a report as text, for the terminal.
#[must_use]
pub fn render(document: &Document, style: TableStyle) -> String {
    let mut out = String::new();
    for cell in document.cells() {
        if !out.is_empty() {
            out.push('\n');
        }
        let _ = writeln!(out, "{}", cell.name);
        write_table(&mut out, columns(&cell, &document.baseline), &cell, style);
        if let Some(line) = cell.unanswered() {
            let _ = writeln!(out, "{line}");
        }
        if cell.runs.len() > 1 {
            let _ =
                writeln!(out, "ratio: of the mean TTFT (E2E) to that of {}, over the same requests", document.baseline);
        }
        cell.runs.iter().for_each(|run| write_flows(&mut out, run));
        let programs = program_columns(&cell, &document.baseline);
        if !programs.is_empty() {
            out.push('\n');
            write_table(&mut out, programs, &cell, style);
        }
    }
    out
}

/// Whose turns came when, where there is more than one flow.
fn write_flows(out: &mut String, run: &RunFigures) {
    let flows = run.queue.as_ref().map(|queue| queue.flows.as_slice()).filter(|flows| flows.len() > 1);
    for FlowFigures { priority, tenant, turns } in flows.unwrap_or_default().iter().take(MOST_FLOWS) {
        let tenant = if tenant.is_empty() { "no tenant" } else { tenant };
        let (mean, longest) =
            (turns.mean_seconds.map_or_else(|| NONE.to_owned(), seconds), seconds(turns.longest_seconds));
        let _ = writeln!(
            out,
            "{}, priority {priority}, {tenant}: {} had a turn after {mean} in the mean, {longest} at most; {} turned \
             away",
            run.policy,
            whole(turns.passed),
            whole(turns.turned_away()),
        );
    }
}

/// The columns for a cell; the first is the policy.
pub(super) fn columns(cell: &Cell<'_>, baseline: &str) -> Vec<Column> {
    let mut columns = Columns { cell, baseline, all: Vec::new() };
    columns.latencies();
    columns.outcomes();
    columns.split();
    columns.queueing();
    columns.objective();
    columns.comparison();
    columns.all
}

/// The columns that say which policy is best; the first is the policy.
pub(super) fn verdict_columns(cell: &Cell<'_>, baseline: &str) -> Vec<Column> {
    let mut columns = Columns { cell, baseline, all: Vec::new() };
    columns.verdict();
    columns.all
}

/// Columns of one cell, added group by group.
struct Columns<'c> {
    cell: &'c Cell<'c>,
    baseline: &'c str,
    all: Vec<Column>,
}

impl Columns<'_> {
    fn add(&mut self, heading: &str, goes: u8, of: &dyn Fn(&RunFigures) -> String) {
        self.all.push(Column {
            heading: heading.to_owned(),
            words: heading == "policy" || heading == VERDICT,
            goes,
            cells: self.cell.runs.iter().map(|run| of(run)).collect(),
        });
    }

    /// Whether a run of the cell has these figures.
    fn any(&self, has: impl Fn(&RunFigures) -> bool) -> bool {
        self.cell.runs.iter().any(|run| has(run))
    }

    /// The unit in which the smallest of these durations is written.
    fn unit(&self, of: fn(&RunFigures) -> Option<f64>) -> ColumnUnit {
        ColumnUnit::of(self.cell.runs.iter().filter_map(|run| of(run)).fold(f64::INFINITY, f64::min))
    }

    fn latencies(&mut self) {
        let (first, per) = (self.unit(|run| run.ttft.mean), self.unit(|run| run.tpot.mean));
        let (between, whole_time) = (self.unit(|run| run.itl.mean), self.unit(|run| run.latency.mean));
        self.add("policy", 0, &|run| run.policy.clone());
        self.add(&format!("TTFT mean, {}", first.name), 0, &|run| first.write(run.ttft.mean).into());
        self.add("p50", 5, &|run| first.write(run.ttft.p50).into());
        self.add("p90", 3, &|run| first.write(run.ttft.p90).into());
        self.add("p99", 2, &|run| first.write(run.ttft.p99).into());
        self.add(&format!("TPOT mean, {}", per.name), 8, &|run| per.write(run.tpot.mean).into());
        self.add("p99", 9, &|run| per.write(run.tpot.p99).into());
        self.add(&format!("ITL mean, {}", between.name), 9, &|run| between.write(run.itl.mean).into());
        self.add(&format!("E2E mean, {}", whole_time.name), 4, &|run| whole_time.write(run.latency.mean).into());
        self.add("p99", 9, &|run| whole_time.write(run.latency.p99).into());
    }

    fn outcomes(&mut self) {
        self.add("hit rate", 6, &|run| or_none(run.hit_rate, percent));
        self.add("imbalance", 7, &|run| {
            or_none(run.imbalance.map(|imbalance| imbalance.max_over_mean), |value| format!("{value:.2}"))
        });
        self.add("answered", 11, &|run| whole(run.requests.answered));
        self.add("rejected", 10, &|run| whole(run.requests.refused));
        self.add("lost", 10, &|run| whole(run.requests.lost));
    }

    fn split(&mut self) {
        if !self.any(|run| run.split.is_some()) {
            return;
        }
        let of =
            |run: &RunFigures, of: fn(&SplitFigures) -> Option<f64>| or_none(run.split.as_ref().and_then(of), percent);
        let transfer = self.unit(|run| run.split?.transfer_seconds);
        self.add("split", 3, &|run| of(run, |split| split.share));
        self.add(&format!("transfer mean, {}", transfer.name), 9, &|run| {
            transfer.write(run.split.and_then(|split| split.transfer_seconds)).into()
        });
        self.add("prefill busy", 8, &|run| of(run, |split| split.prefill_busy));
        self.add("decode busy", 8, &|run| of(run, |split| split.decode_busy));
    }

    fn queueing(&mut self) {
        if !self.any(|run| run.queue.is_some()) {
            return;
        }
        let waited = self.unit(|run| run.queue.as_ref()?.waited_seconds.mean);
        let wait = |of: fn(&Distribution) -> Option<f64>| {
            move |run: &RunFigures| waited.write(run.queue.as_ref().and_then(|queue| of(&queue.waited_seconds))).into()
        };
        self.add(&format!("wait mean, {}", waited.name), 4, &wait(|waited| waited.mean));
        self.add("p99", 8, &wait(|waited| waited.p99));
        self.add("longest", 8, &wait(|waited| waited.max));
        self.add("turned away", 7, &|run| {
            run.queue.as_ref().map_or_else(|| NONE.to_owned(), |queue| whole(queue.turns.turned_away()))
        });
    }

    fn objective(&mut self) {
        if self.any(|run| run.goodput.is_some()) {
            self.add("goodput", 4, &|run| or_none(run.goodput, percent));
        }
        let slo = |run: &RunFigures| run.objective.and_then(|objective| objective.slo);
        if self.any(|run| slo(run).is_some()) {
            let of = |of: fn(&SloFigures) -> Option<f64>| {
                move |run: &RunFigures| or_none(slo(run).and_then(|slo| of(&slo)), percent)
            };
            self.add("TTFT in time", 6, &of(|slo| slo.ttft_met));
            self.add("TPOT in time", 6, &of(|slo| slo.tpot_met));
            self.add("both", 3, &of(|slo| slo.share_met));
            let verdict = |run: &RunFigures| slo(run).and_then(|slo| slo.verdict()).unwrap_or(NONE).to_owned();
            self.add("SLO", 1, &verdict);
        }
        if self.any(|run| run.objective.is_some_and(|objective| objective.slo.is_none())) {
            let mean = self.unit(|run| run.objective?.weighted_mean_seconds);
            self.add(&format!("weighted mean, {}", mean.name), 2, &|run| {
                mean.write(run.objective.and_then(|objective| objective.weighted_mean_seconds)).into()
            });
        }
    }

    fn verdict(&mut self) {
        let (first, whole_time) = (self.unit(|run| run.ttft.mean), self.unit(|run| run.latency.mean));
        self.add("policy", 0, &|run| run.policy.clone());
        self.add(&format!("TTFT mean, {}", first.name), 0, &|run| first.write(run.ttft.mean).into());
        self.add(&format!("E2E mean, {}", whole_time.name), 0, &|run| whole_time.write(run.latency.mean).into());
        self.add("hit rate", 0, &|run| or_none(run.hit_rate, percent));
        if self.any(|run| run.requests.unanswered() > 0) {
            self.add("not answered", 0, &|run| or_none(run.error_rate, percent));
        }
        if self.cell.runs.len() > 1 {
            let baseline = self.baseline;
            self.add("TTFT ratio (95 % interval)", 0, &change(baseline, "1", with_interval));
            self.add(VERDICT, 0, &change(baseline, "baseline", |change| change.verdict.words().to_owned()));
        }
    }

    fn comparison(&mut self) {
        if self.cell.runs.len() < 2 {
            return;
        }
        let baseline = self.baseline;
        let change = |itself, of| change(baseline, itself, of);
        self.add("E2E ratio", 4, &|run| ratio(Some(run), baseline, |versus| versus.latency));
        self.add("ratio", 0, &change("1", |change| three_digits(change.ratio)));
        self.add("95 % interval", 4, &change(NONE, interval_words));
        self.add(VERDICT, 1, &change("baseline", |change| change.verdict.words().to_owned()));
    }
}

fn with_interval(change: &MeanChange) -> String {
    let ratio = three_digits(change.ratio);
    change.ratio_interval.map_or_else(|| ratio.clone(), |_| format!("{ratio} ({})", interval_words(change)))
}

/// A column about the comparison with the baseline, which has `itself`.
fn change<'b>(
    baseline: &'b str,
    itself: &'static str,
    of: fn(&MeanChange) -> String,
) -> impl Fn(&RunFigures) -> String + 'b {
    move |run: &RunFigures| match first_token(run) {
        Some(change) => of(&change),
        None => if run.policy == baseline { itself } else { NONE }.to_owned(),
    }
}

fn or_none(value: Option<f64>, write: fn(f64) -> String) -> String {
    value.map_or_else(|| NONE.to_owned(), write)
}

/// How a run's mean time to the first token compares with the baseline's.
pub(super) fn first_token(run: &RunFigures) -> Option<MeanChange> {
    run.versus_baseline.and_then(|versus| versus.ttft)
}

/// The ratio to the baseline, for tables of policies by cells.
pub(super) fn ratio(run: Option<&RunFigures>, baseline: &str, of: fn(&Versus) -> Option<MeanChange>) -> String {
    match run.map(|run| (run.versus_baseline.as_ref().and_then(of), run)) {
        Some((Some(change), _)) => three_digits(change.ratio),
        Some((None, run)) if run.policy == baseline => "1".to_owned(),
        _ => NONE.to_owned(),
    }
}

fn interval_words(change: &MeanChange) -> String {
    let words = |interval: Interval| format!("{} .. {}", three_digits(interval.low), three_digits(interval.high));
    change.ratio_interval.map_or_else(|| NONE.to_owned(), words)
}

fn length(text: &str) -> usize {
    text.chars().count()
}

fn wide(column: &Column) -> usize {
    column.cells.iter().map(|cell| length(cell)).fold(length(&column.heading), usize::max)
}

/// Width of a table in characters, with two spaces between columns.
fn total(columns: &[Column]) -> usize {
    columns.iter().map(|column| wide(column) + 2).sum::<usize>().saturating_sub(2)
}

/// Leaves out columns, and then cuts the names of policies, until the table fits.
fn fit(columns: &mut Vec<Column>, room: usize) {
    while total(columns) > room {
        let Some(goes) = columns.iter().map(|column| column.goes).max().filter(|goes| *goes > 0) else { break };
        columns.retain(|column| column.goes != goes);
    }
    let over = total(columns).saturating_sub(room);
    if let Some(policy) = columns.first_mut().filter(|_| over > 0) {
        let most = wide(policy).saturating_sub(over).max(length(&policy.heading));
        for cell in policy.cells.iter_mut().filter(|cell| length(cell) > most) {
            *cell = cell.chars().take(most.saturating_sub(2)).chain("..".chars()).collect();
        }
    }
}

fn write_table(out: &mut String, mut columns: Vec<Column>, cell: &Cell<'_>, style: TableStyle) {
    fit(&mut columns, style.width.map_or(usize::MAX, |width| width.max(MIN_WIDTH)));
    let widths: Vec<usize> = columns.iter().map(wide).collect();
    let mut line = |row: Option<usize>, colour: Option<&str>| {
        let mut text = String::new();
        for (column, width) in columns.iter().zip(&widths) {
            let of = row.map_or(Some(&column.heading), |row| column.cells.get(row));
            let of = of.map(String::as_str).unwrap_or_default();
            let pad = " ".repeat(width.saturating_sub(length(of)));
            let gap = if text.is_empty() { "" } else { "  " };
            let _ = match colour.filter(|_| column.heading == VERDICT) {
                Some(colour) => write!(text, "{gap}{colour}{of}\x1b[0m"),
                None if column.words => write!(text, "{gap}{of}{pad}"),
                None => write!(text, "{gap}{pad}{of}"),
            };
        }
        let _ = writeln!(out, "{}", text.trim_end());
    };
    line(None, None);
    for (row, run) in cell.runs.iter().enumerate() {
        let colour = match first_token(run).map(|change| change.verdict).filter(|_| style.colour) {
            Some(ComparisonVerdict::Better) => Some("\x1b[32m"),
            Some(ComparisonVerdict::Worse | ComparisonVerdict::AnswersFewer) => Some("\x1b[31m"),
            _ => None,
        };
        line(Some(row), colour);
    }
}
