//! The table of decisions.

use super::grid::{Column, Grid, plain, styled};
use super::{Context, Theme};
use crate::format::{self, MISSING, or_missing, words};
use crate::model::Decision;
use crate::watch::Ended;
use ratatui_core::style::Style;
use ratatui_core::text::Span;

pub(super) fn grid(context: &Context<'_>, rows: &[&Ended]) -> Grid {
    let columns = vec![
        Column::number("AGE", 2),
        Column::text("POOL", 12, 4, 20),
        Column::text("MODEL", 8, 12, 24),
        Column::text("ENDPOINT", 0, 21, 46),
        Column::number("CODE", 1),
        Column::number("TTFT MS", 3),
        Column::number("PREDICTED", 13),
        Column::number("TOTAL MS", 6),
        Column::number("QUEUED MS", 10),
        Column::number("CACHED/PROMPT", 5),
        Column::number("OUT", 11),
        Column::text("END", 7, 10, 16),
        Column::text("REASON", 4, 16, 44),
        Column::number("MARGIN", 9),
        Column::text("REQUEST", 14, 8, 36),
    ];
    let pools: std::collections::BTreeSet<&str> = rows.iter().map(|ended| &*ended.decision.pool).collect();
    let is_queued = rows.iter().any(|ended| ended.decision.queued_ms.is_some());
    let cells = |ended: &&Ended| cells(context, ended, pools.len() > 1, is_queued);
    Grid { columns, rows: rows.iter().map(cells).collect() }
}

fn cells(context: &Context<'_>, ended: &Ended, has_pools: bool, is_queued: bool) -> Vec<Span<'static>> {
    let (decision, theme) = (&ended.decision, context.theme);
    let age = context.now.wall.duration_since(ended.at).unwrap_or_default();
    let style = style(decision, theme);
    vec![
        styled(format::span(age), theme.soft()),
        plain(if has_pools { decision.pool.clone() } else { String::new() }),
        plain(decision.model.clone()),
        styled(destination(decision), if decision.is_rejected() { style } else { theme.plain_text() }),
        styled(code(decision), style),
        plain(or_missing(decision.ttft_ms, format::milliseconds)),
        plain(decision.predicted_ttft_ms.map(format::milliseconds).unwrap_or_default()),
        plain(or_missing(decision.duration_ms, format::milliseconds)),
        plain(if is_queued { or_missing(decision.queued_ms, format::milliseconds) } else { String::new() }),
        plain(prompt(decision)),
        plain(or_missing(decision.completion_tokens, format::count)),
        styled(if decision.end == "complete" { String::new() } else { words(&decision.end) }, style),
        plain(words(&decision.reason)),
        plain(margin(decision).unwrap_or_default()),
        styled(decision.request_id.clone(), theme.soft()),
    ]
}

/// Red for server errors and rejections by overload, yellow for other errors and for requests that did not complete.
pub(super) fn style(decision: &Decision, theme: Theme) -> Style {
    match decision.status {
        Some(500..) => theme.bad(),
        Some(400..) => theme.warning(),
        _ if decision.end != "complete" => theme.warning(),
        _ => theme.plain_text(),
    }
}

/// How much worse the second best endpoint was.
pub(super) fn margin(decision: &Decision) -> Option<String> {
    decision.runner_up.as_ref()?.margin.as_ref().map(|margin| format!("+{margin}"))
}

/// The endpoint, and the one that served the request if that is another one.
pub(super) fn destination(decision: &Decision) -> String {
    match &decision.served {
        _ if decision.is_rejected() => "rejected".to_owned(),
        Some(served) => format!("{} → {served}", decision.endpoint),
        None => decision.endpoint.clone(),
    }
}

pub(super) fn code(decision: &Decision) -> String {
    decision.status.filter(|status| *status > 0).map_or_else(|| MISSING.to_owned(), |status| status.to_string())
}

/// Cached tokens and length of the prompt.
pub(super) fn prompt(decision: &Decision) -> String {
    let tokens = |count: Option<u64>| or_missing(count, format::count);
    match (decision.cached_tokens, decision.prompt_tokens) {
        (None, None) => MISSING.to_owned(),
        (cached, prompt) => format!("{}/{}", tokens(cached), tokens(prompt)),
    }
}
