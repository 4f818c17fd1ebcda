//! The pools, those with trouble first.

use super::grid::{Column, Grid, plain, styled};
use super::{Context, spark};
use crate::format::{self, counted, or_missing};
use crate::rows::{self, PoolRow, Severity};
use crate::watch::resampled;
use ratatui_core::text::Line;

/// Columns for the requests per second of the last half hour.
const SAMPLES: usize = 24;

pub(super) fn grid(context: &Context<'_>, filter: &str) -> Grid {
    let columns = vec![
        Column::text("", 1, 1, 1),
        Column::text("POOL", 0, 8, 32),
        Column::text("STRATEGY", 6, 10, 28),
        Column::number("SERVING", 2),
        Column::number("QUEUED", 3),
        Column::number("REQ/S", 4),
        Column::number("FLIGHT", 5),
        Column::number("TTFT P50/P95 MS", 8),
        Column::text("TROUBLE", 7, 20, 60),
        Column::text("REQ/S, 30 MIN", 10, SAMPLES, SAMPLES),
    ];
    let rows = rows::pools(context.watch, filter);
    Grid { columns, rows: rows.iter().map(|row| cells(context, row)).collect() }
}

fn cells(context: &Context<'_>, row: &PoolRow<'_>) -> Vec<ratatui_core::text::Span<'static>> {
    let (pool, theme) = (row.pool, context.theme);
    let severity = match row {
        PoolRow { in_service: 0, .. } => Severity::Bad,
        PoolRow { bad: 0, warnings: 0, .. } => Severity::Fine,
        _ => Severity::Warning,
    };
    let style = theme.of(severity);
    let in_flight = pool.endpoints.iter().filter_map(|endpoint| endpoint.in_flight).reduce(|a, b| a + b);
    let history = context.watch.pool_history(&pool.name);
    let ttft = history.map(|history| history.ttft.map(|ms| or_missing(ms, format::milliseconds)));
    let ttft = ttft.map(|[median, high]| format!("{median}/{high}")).unwrap_or_default();
    let points = history.map(|history| Vec::from(history.requests.clone())).unwrap_or_default();
    let requests = spark::blocks(&resampled(&points, SAMPLES), None);
    vec![
        styled(super::endpoints::mark(severity), style),
        styled(pool.name.clone(), theme.title()),
        plain(pool.strategy.clone().unwrap_or_default()),
        styled(format!("{}/{}", row.in_service, pool.endpoints.len()), style),
        styled(
            or_missing(pool.queued, format::count),
            if pool.queued.unwrap_or(0) > 0 { theme.warning() } else { theme.plain_text() },
        ),
        plain(or_missing(context.watch.pool_rate(&pool.name), format::rate)),
        plain(or_missing(in_flight, format::count)),
        plain(ttft),
        styled(trouble(row), style),
        styled(requests, theme.accent()),
    ]
}

fn trouble(row: &PoolRow<'_>) -> String {
    let mut parts = Vec::new();
    if row.pool.synced == Some(false) {
        parts.push("its endpoints are not known yet".to_owned());
    }
    if row.bad > 0 {
        parts.push(format!("{} down", row.bad));
    }
    if row.warnings > 0 {
        parts.push(format!("{} to check", row.warnings));
    }
    parts.join(", ")
}

/// The table in at most `height` lines. A last line counts the pools that are not shown.
pub(super) fn lines(context: &Context<'_>, filter: &str, height: usize) -> Vec<Line<'static>> {
    if height < 3 {
        return Vec::new();
    }
    let grid = grid(context, filter);
    // A third of the screen is for pools.
    let room = (height / 2).max(2) - 1;
    let shown = if grid.rows.len() <= room { grid.rows.len() } else { room.saturating_sub(1).max(1) };
    let widths = grid.fit(context.width);
    let mut lines = vec![grid.head(&widths, context.theme)];
    lines.extend((0..shown).map(|row| grid.line(&widths, row)));
    if shown < grid.rows.len() {
        let more = counted(grid.rows.len() - shown, "more pool");
        lines.push(Line::styled(format!("  {more}; / filters by pool"), context.theme.soft()));
    }
    lines.push(Line::default());
    lines
}
