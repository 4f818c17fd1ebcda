//! The report as Markdown, for a file that is kept beside the code. Called by `cli::replay`. Pure.
//!
//! The same tables as in the terminal, with all columns, and one of policies by cells above them. No time that a run really took is in
//! it, so that the same command gives the same file.

use super::json::{Cell, Document};
use super::table::{columns, ratio};
use std::fmt::Write as _;

/// The file.
#[must_use]
pub fn render(document: &Document) -> String {
    let cells = document.cells();
    let mut out = format!("```\n{}\n```\n", document.command.replace("```", ""));
    if cells.len() > 1 {
        overview(&mut out, document, &cells);
    }
    for cell in &cells {
        let _ = write!(out, "\n### {}\n\n", escape(&cell.name));
        let columns = columns(cell, &document.baseline);
        row(&mut out, columns.iter().map(|column| escape(&column.heading)));
        row(&mut out, columns.iter().map(|column| if column.words { "---" } else { "--:" }.to_owned()));
        for (number, run) in cell.runs.iter().enumerate() {
            let cells =
                columns.iter().map(|column| column.cells.get(number).map_or_else(String::new, |cell| escape(cell)));
            row(&mut out, cells.map(|text| if cell.is_lowest(run) { format!("**{text}**") } else { text }));
        }
    }
    if cells.iter().any(|cell| cell.runs.len() > 1) {
        let _ = write!(
            out,
            "\nRatio: of the mean TTFT to that of {}, over the same requests. ",
            escape(&document.baseline)
        );
        out.push_str("Bold: the lowest mean TTFT.\n");
    }
    out
}

fn overview(out: &mut String, document: &Document, cells: &[Cell<'_>]) {
    let _ = write!(out, "\nMean TTFT by that of {}:\n\n", escape(&document.baseline));
    row(out, std::iter::once("policy".to_owned()).chain(cells.iter().map(|cell| escape(&cell.name))));
    row(out, std::iter::once("---").chain(cells.iter().map(|_| "--:")).map(str::to_owned));
    for policy in document.policies() {
        let ratios = cells.iter().map(|cell| {
            let run = cell.runs.iter().find(|run| run.policy == policy).copied();
            let text = ratio(run, &document.baseline);
            if run.is_some_and(|run| cell.is_lowest(run)) { format!("**{text}**") } else { text }
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
