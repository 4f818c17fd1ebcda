//! The table of rejections, degraded modes, prompts without tokens, diverted requests and peers.

use super::Context;
use super::endpoints::mark;
use super::grid::{Column, Grid, plain, styled};
use crate::format::{self, or_missing, words};
use crate::rows::RejectionRow;
use std::time::Duration;

pub(super) fn grid(context: &Context<'_>, rows: &[RejectionRow], interval: Duration) -> Grid {
    let last = format!("LAST {}", format::interval(interval));
    let columns = vec![
        Column::text("", 1, 1, 1),
        Column::text("KIND", 2, 8, 9),
        Column::text("WHAT", 0, 14, 40),
        Column::number("COUNT", 3),
        Column::number(&last, 4),
        Column::text("NOTE", 5, 12, 90),
    ];
    let cells = |row: &RejectionRow| {
        let style = context.theme.of(row.severity);
        vec![
            styled(mark(row.severity), style),
            styled(row.kind, context.theme.soft()),
            plain(words(&row.name)),
            plain(or_missing(row.count, format::count)),
            styled(row.last_interval.map(|count| format!("+{}", format::count(count))).unwrap_or_default(), style),
            plain(row.note.clone()),
        ]
    };
    Grid { columns, rows: rows.iter().map(cells).collect() }
}
