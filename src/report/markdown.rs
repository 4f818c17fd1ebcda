//! The report as Markdown, for a file that is kept beside the code. Called by `cli::replay`. Pure.
//!
//! The same tables as in the terminal, with all columns, and three of policies by cells above them. No time that a run
//! really took is in it, so that the same command gives the same file.

use super::compare::MeanChange;
use super::json::{Cell, Document, RunFigures, Versus};
use super::table::{Column, columns, program_columns, ratio};
use std::fmt::Write as _;

/// All tables as one Markdown document.
#[must_use]
pub fn render(document: &Document) -> String {
    let cells = document.cells();
    let mut out = format!("```\n{}\n```\n", document.command.replace("```", ""));
    if cells.len() > 1 {
        overview(&mut out, document, &cells, ("TTFT", |run| run.ttft.mean, |versus| versus.ttft));
        overview(&mut out, document, &cells, ("TPOT", |run| run.tpot.mean, |versus| versus.tpot));
        overview(&mut out, document, &cells, ("end-to-end latency", |run| run.latency.mean, |versus| versus.latency));
    }
    for cell in &cells {
        let _ = write!(out, "\n### {}\n\n", escape(&cell.name));
        table(&mut out, cell, &columns(cell, &document.baseline));
        let programs = program_columns(cell, &document.baseline);
        if !programs.is_empty() {
            out.push_str("\nPrograms of agents:\n\n");
            table(&mut out, cell, &programs);
        }
        if let Some(line) = cell.unanswered() {
            let _ = write!(out, "\n{}.\n", escape(&line));
        }
    }
    if cells.iter().any(|cell| cell.runs.len() > 1) {
        let _ = write!(
            out,
            "\nRatio: of the mean TTFT, or of the mean end-to-end latency (E2E), to that of {}, over the same \
             requests. ",
            escape(&document.baseline)
        );
        out.push_str(
            "TPOT counts answers of at least 8 tokens, ITL each gap between tokens. Bold: the lowest mean TTFT.\n",
        );
    }
    out
}

/// One row for each run of a cell.
fn table(out: &mut String, cell: &Cell<'_>, columns: &[Column]) {
    row(out, columns.iter().map(|column| escape(&column.heading)));
    row(out, columns.iter().map(|column| if column.words { "---" } else { "--:" }.to_owned()));
    for (number, run) in cell.runs.iter().enumerate() {
        let cells = columns.iter().map(|column| column.cells.get(number).map_or_else(String::new, |cell| escape(cell)));
        row(out, cells.map(|text| if cell.is_lowest(run) { format!("**{text}**") } else { text }));
    }
}

/// A figure: its name, its mean in a run, and how that compares with the baseline's.
type Figure = (&'static str, fn(&RunFigures) -> Option<f64>, fn(&Versus) -> Option<MeanChange>);

fn overview(out: &mut String, document: &Document, cells: &[Cell<'_>], (name, mean, change): Figure) {
    let _ = write!(out, "\nMean {name} by that of {}:\n\n", escape(&document.baseline));
    row(out, std::iter::once("policy".to_owned()).chain(cells.iter().map(|cell| escape(&cell.name))));
    row(out, std::iter::once("---").chain(cells.iter().map(|_| "--:")).map(str::to_owned));
    for policy in document.policies() {
        let ratios = cells.iter().map(|cell| {
            let run = cell.runs.iter().find(|run| run.policy == policy).copied();
            let text = ratio(run, &document.baseline, change);
            let is_lowest = run.zip(cell.lowest_of(mean)).is_some_and(|(run, lowest)| std::ptr::eq(run, lowest));
            if is_lowest { format!("**{text}**") } else { text }
        });
        row(out, std::iter::once(escape(policy)).chain(ratios));
    }
}

fn row(out: &mut String, cells: impl Iterator<Item = String>) {
    out.push('|');
    for cell in cells {
        let _ = write!(out, " {cell} |");
    }
    out.push('\n');
}

/// Names may not end a column, begin markup or break the line.
fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '|' | '*' | '_' | '`' | '<' | '[' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push(' '),
            c => out.push(c),
        }
    }
    out
}
