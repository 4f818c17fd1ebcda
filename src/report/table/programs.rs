//! The table of programs of agents.

use super::{Column, Columns, or_none};
use crate::json::{Cell, ProgramFigures, RunFigures};
use crate::number::{NONE, percent, three_digits, whole};

/// The columns about programs; none if the workload has no programs.
pub(crate) fn program_columns(cell: &Cell<'_>, baseline: &str) -> Vec<Column> {
    let mut columns = Columns { cell, baseline, all: Vec::new() };
    if columns.any(|run| run.programs.is_some()) {
        columns.programs();
    }
    columns.all
}

impl Columns<'_> {
    fn programs(&mut self) {
        self.add("policy", 0, &|run| run.policy.clone());
        self.program_times();
        self.first_tokens();
        self.add("recomputed", 3, &|run| {
            or_none(
                run.programs.as_ref().map(|p| p.recomputed_tokens as f64 / run.tokens.prompt.max(1) as f64),
                percent,
            )
        });
        self.figure("moves", 2, |programs| programs.moves);
        self.figure("slowdown mean", 1, |programs| programs.slowdown.mean);
        self.figure("p99", 5, |programs| programs.slowdown.p99);
        self.figure("Jain", 4, |programs| programs.jain);
        self.add("complete", 6, &|run| {
            let of = |programs: &ProgramFigures| format!("{} of {}", whole(programs.complete), whole(programs.started));
            run.programs.as_ref().map_or_else(|| NONE.to_owned(), of)
        });
    }

    fn program_times(&mut self) {
        self.figure("program mean, s", 0, |programs| programs.time_seconds.mean);
        self.figure("p50", 5, |programs| programs.time_seconds.p50);
        self.figure("p99", 3, |programs| programs.time_seconds.p99);
        for (i, heading) in ["2-6 turns", "7-27", "28+"].into_iter().enumerate() {
            self.figure(heading, 4, move |programs| programs.by_turns.get(i)?.time_seconds.mean);
        }
        let baseline = self.cell.runs.iter().find(|run| run.policy == self.baseline);
        let before = baseline.and_then(|run| run.programs.as_ref()?.time_seconds.mean);
        if let Some(before) = before.filter(|before| *before > 0.0 && self.cell.runs.len() > 1) {
            self.figure("ratio", 1, |programs| programs.time_seconds.mean.map(|mean| mean / before));
        }
    }

    fn first_tokens(&mut self) {
        let unit = self.unit(|run| run.programs.as_ref()?.ttft_tool_seconds.mean);
        let mut first = |heading: &str, of: fn(&ProgramFigures) -> Option<f64>| {
            self.add(heading, 2, &|run| unit.write(run.programs.as_ref().and_then(of)).into());
        };
        first(&format!("TTFT first, {}", unit.name), |programs| programs.ttft_first_seconds.mean);
        first("tool", |programs| programs.ttft_tool_seconds.mean);
        first("person", |programs| programs.ttft_person_seconds.mean);
        first("long pause", |programs| programs.ttft_long_pause_seconds.mean);
    }

    /// A column of a plain number.
    fn figure(&mut self, heading: &str, goes: u8, of: impl Fn(&ProgramFigures) -> Option<f64>) {
        self.add(heading, goes, &|run: &RunFigures| or_none(run.programs.as_ref().and_then(&of), three_digits));
    }
}
