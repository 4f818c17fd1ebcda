//! One endpoint: what is wrong, its figures with their history, its latest decisions, and all that the page says.

use super::grid::{sides, wrap};
use super::{Context, decisions, fields, missed, section, spark};
use crate::format::{self, MISSING, or_missing};
use crate::model::leaves;
use crate::rows::{self, EndpointRow, Severity};
use crate::watch::{EndpointKey, History, Track};
use ratatui_core::text::{Line, Span};

/// Decisions of an endpoint that are shown.
const SHOWN_DECISIONS: usize = 10;
/// Columns of the name and of the value of a figure.
const NAME: usize = 15;
const VALUE: usize = 8;

pub(super) fn lines(context: &Context<'_>, key: &EndpointKey) -> Vec<Line<'static>> {
    let Some(row) = rows::endpoint(context.watch, key) else {
        let text = format!("{} is no longer an endpoint of pool {}.", key.1, key.0);
        return wrap(&text, context.width).into_iter().map(Line::from).collect();
    };
    let mut lines = title(context, &row);
    lines.push(Line::default());
    lines.extend(figures(context, &row));
    lines.push(Line::default());
    lines.push(section("Latest decisions", missed(context.watch), context.theme, context.width));
    let latest: Vec<_> = rows::decisions_of(context.watch, &key.1).take(SHOWN_DECISIONS).collect();
    if latest.is_empty() {
        lines.push(Line::styled("None of the decisions that were read.", context.theme.soft()));
    } else {
        lines.extend(decisions::grid(context, &latest).all_lines(context.theme, context.width));
    }
    lines.push(Line::default());
    lines.push(section("All fields of /endpoints", String::new(), context.theme, context.width));
    lines.extend(fields(&leaves(&row.endpoint.all), context.theme, context.width));
    lines
}

fn title(context: &Context<'_>, row: &EndpointRow<'_>) -> Vec<Line<'static>> {
    let (endpoint, theme) = (row.endpoint, context.theme);
    let role = endpoint.role.as_ref().map(|role| format!(", role {role}")).unwrap_or_default();
    let left = vec![Span::styled(endpoint.title(), theme.title())];
    let right = vec![Span::styled(format!("pool {}{role}", row.pool.name), theme.soft())];
    let mut lines = vec![sides(left, right, context.width)];
    let status = or_missing(endpoint.status.clone(), |status| status);
    let trouble = row.trouble(context.watch.age(context.now));
    let style = if row.severity == Severity::Fine { theme.good() } else { theme.of(row.severity) };
    let text = if trouble.is_empty() { status } else { format!("{status}: {trouble}") };
    lines.extend(wrap(&text, context.width).into_iter().map(|line| Line::styled(line, style)));
    lines
}

/// The figures of now with a line for their history since the view started.
fn figures(context: &Context<'_>, row: &EndpointRow<'_>) -> Vec<Line<'static>> {
    let endpoint = row.endpoint;
    let none = Track::default();
    let track = row.track.unwrap_or(&none);
    let since = format!("history of {}", format::span(context.now.elapsed));
    let mut lines = vec![section("Figures", since, context.theme, context.width)];
    let rows: [(&str, String, Option<&History>, Option<f64>); 11] = [
        ("requests/s", or_missing(track.rate, format::rate), Some(&track.rates), None),
        ("share of pool", or_missing(track.share, format::percent), None, None),
        ("in flight", or_missing(endpoint.in_flight, format::count), Some(&track.in_flight), None),
        ("running", or_missing(endpoint.running, format::short), None, None),
        ("waiting", or_missing(endpoint.waiting, format::short), Some(&track.waiting), None),
        ("prefill tokens", or_missing(endpoint.prefill_tokens, format::count), None, None),
        ("KV cache", or_missing(endpoint.kv_usage, format::percent), Some(&track.kv_usage), Some(1.0)),
        ("hit ratio", or_missing(endpoint.hit_ratio, format::percent), Some(&track.hit_ratio), Some(1.0)),
        ("prefill tok/s", or_missing(endpoint.prefill_speed, format::short), Some(&track.prefill_speed), None),
        ("ms per token", or_missing(endpoint.token_seconds.map(|s| s * 1e3), format::figure), None, None),
        ("routed", or_missing(endpoint.routed, format::count), None, None),
    ];
    for (name, value, history, largest) in rows {
        let columns = context.width.saturating_sub(NAME + VALUE + 2);
        let line = history.map(|history| spark::line(history, columns, largest)).unwrap_or_default();
        let value = if value.is_empty() { MISSING.to_owned() } else { value };
        lines.push(Line::from(vec![
            Span::styled(format!("{name:<NAME$}"), context.theme.soft()),
            Span::raw(format!("{value:>VALUE$}  ")),
            Span::styled(line, context.theme.accent()),
        ]));
    }
    lines
}
