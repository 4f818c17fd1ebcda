//! The table of endpoints.

use super::Context;
use super::grid::{Column, Grid, plain, styled};
use crate::format::{self, or_missing};
use crate::rows::{EndpointRow, Severity};
use ratatui_core::text::Span;

/// Part of the KV cache from which its figure stands out.
const HIGH_USAGE: f64 = 0.9;

/// The sign of a row that needs attention, for terminals without colours.
pub(super) fn mark(severity: Severity) -> &'static str {
    match severity {
        Severity::Fine => " ",
        Severity::Warning => "~",
        Severity::Bad => "!",
    }
}

pub(super) fn grid(context: &Context<'_>, rows: &[EndpointRow<'_>]) -> Grid {
    let columns = vec![
        Column::text("", 2, 1, 1),
        Column::text("ENDPOINT", 0, 21, 36),
        Column::text("POOL", 6, 4, 20),
        Column::text("ROLE", 11, 4, 14),
        Column::text("STATUS", 1, 7, 11),
        Column::number("FLIGHT", 3),
        Column::number("RUN", 8),
        Column::number("WAIT", 4),
        Column::number("KV", 5),
        Column::number("HIT", 9),
        Column::number("SHARE", 7),
        Column::number("REQ/S", 14),
        Column::number("TOKENS", 15),
        Column::number("PREFILL", 12),
        Column::number("MS/TOK", 13),
        Column::text("WHY", 10, 16, 80),
        Column::text("ADDRESS", 16, 48, 48),
    ];
    let has_pools = context.watch.reading.as_ref().is_some_and(|reading| reading.pools.len() > 1);
    let has_roles = rows.windows(2).any(|pair| pair[0].endpoint.role != pair[1].endpoint.role);
    Grid { columns, rows: rows.iter().map(|row| cells(context, row, has_pools, has_roles)).collect() }
}

fn cells(context: &Context<'_>, row: &EndpointRow<'_>, has_pools: bool, has_roles: bool) -> Vec<Span<'static>> {
    let (endpoint, theme) = (row.endpoint, context.theme);
    let style = theme.of(row.severity);
    let busy = |value: Option<f64>| if value.unwrap_or(0.0) > 0.0 { theme.warning() } else { theme.plain_text() };
    let usage =
        if endpoint.kv_usage.is_some_and(|usage| usage >= HIGH_USAGE) { theme.bad() } else { theme.plain_text() };
    let role = if has_roles { endpoint.role.clone().unwrap_or_default() } else { String::new() };
    let fine = if row.severity == Severity::Fine { theme.good() } else { style };
    vec![
        styled(mark(row.severity), style),
        plain(endpoint.name.clone()),
        plain(if has_pools { row.pool.name.clone() } else { String::new() }),
        plain(role),
        styled(or_missing(endpoint.status.clone(), |status| status), fine),
        plain(or_missing(endpoint.in_flight, format::count)),
        plain(or_missing(endpoint.running, format::short)),
        styled(or_missing(endpoint.waiting, format::short), busy(endpoint.waiting)),
        styled(or_missing(endpoint.kv_usage, format::percent), usage),
        plain(or_missing(endpoint.hit_ratio, format::percent)),
        plain(or_missing(row.share(), format::percent)),
        plain(or_missing(row.track.and_then(|track| track.rate), format::rate)),
        plain(or_missing(endpoint.prefill_tokens, |tokens| format::short(tokens as f64))),
        plain(or_missing(endpoint.prefill_speed, format::short)),
        plain(or_missing(endpoint.token_seconds, |seconds| format::milliseconds(seconds * 1e3))),
        styled(row.trouble(context.watch.age(context.now)), style),
        plain(if endpoint.name == endpoint.address { String::new() } else { endpoint.address.clone() }),
    ]
}
