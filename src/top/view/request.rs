//! One request: its record, and all candidates of its decision.

use super::grid::{Column, Grid, plain, sides, styled, wrap};
use super::{Context, decisions, fields, section};
use crate::format::{self, MISSING, or_missing, words};
use crate::model::explanation::{Candidate, Explanation, Standing};
use crate::model::leaves;
use crate::state::{Explaining, OpenedRequest};
use crate::watch::Ended;
use ratatui_core::text::{Line, Span};

pub(super) fn lines(context: &Context<'_>, request: &OpenedRequest) -> Vec<Line<'static>> {
    let mut lines = record(context, &request.ended);
    lines.push(Line::default());
    lines.extend(candidates(context, &request.explanation));
    lines.push(Line::default());
    lines.push(section("All fields of /decisions", String::new(), context.theme, context.width));
    lines.extend(fields(&leaves(&request.ended.decision.all), context.theme, context.width));
    lines
}

/// What the request was and how it ended.
fn record(context: &Context<'_>, ended: &Ended) -> Vec<Line<'static>> {
    let (d, theme) = (&ended.decision, context.theme);
    let name = if d.request_id.is_empty() { "A request without x-request-id" } else { &*d.request_id };
    let age = format::span(context.now.wall.duration_since(ended.at).unwrap_or_default());
    let left = vec![Span::styled(name.to_owned(), theme.title())];
    let mut lines = vec![sides(left, vec![Span::styled(format!("ended {age} ago"), theme.soft())], context.width)];
    let pair = |name: &str, value: String| (name.to_owned(), value);
    let milliseconds = |value: Option<f64>| value.map(|value| format!("{} ms", format::milliseconds(value)));
    let mut pairs = vec![
        pair("endpoint", decisions::destination(d)),
        pair("reason", words(&d.reason)),
        pair("pool", if d.pool.is_empty() { MISSING.to_owned() } else { d.pool.clone() }),
        pair("model", if d.model.is_empty() { MISSING.to_owned() } else { d.model.clone() }),
        pair("status", format!("{}, {}", decisions::code(d), words(&d.end))),
        pair("cached/prompt", format!("{} tokens", decisions::prompt(d))),
        pair("generated", or_missing(d.completion_tokens, |tokens| format!("{} tokens", format::count(tokens)))),
    ];
    pairs.extend(d.runner_up.as_ref().map(|runner_up| {
        let margin = decisions::margin(d).map(|margin| format!(", {margin}")).unwrap_or_default();
        pair("runner-up", format!("{}{margin}", runner_up.endpoint))
    }));
    let times = [
        ("queued", d.queued_ms),
        ("TTFT", d.ttft_ms),
        ("predicted TTFT", d.predicted_ttft_ms),
        ("total", d.duration_ms),
    ];
    pairs.extend(times.into_iter().filter_map(|(name, value)| Some(pair(name, milliseconds(value)?))));
    pairs.extend(d.prefill.as_ref().map(|prefill| pair("prefill", prefill.clone())));
    lines.extend(fields(&pairs, theme, context.width));
    lines
}

fn candidates(context: &Context<'_>, explanation: &Explaining) -> Vec<Line<'static>> {
    let (theme, width) = (context.theme, context.width);
    let explanation = match explanation {
        Explaining::Known(explanation) => explanation,
        Explaining::Waiting => return vec![Line::styled("Reading the explanation …", theme.soft())],
        Explaining::Unknown(why) => {
            let text = format!("No explanation: {why}");
            return wrap(&text, width).into_iter().map(|line| Line::styled(line, theme.warning())).collect();
        }
    };
    let by = [explanation.strategy.as_ref(), explanation.profile.as_ref()];
    let by = by.into_iter().flatten().cloned().collect::<Vec<_>>().join(", profile ");
    let mut lines = vec![section("Candidates", by, theme, width)];
    if let Some(reason) = &explanation.reason {
        let tokens = or_missing(explanation.prompt_tokens, format::count);
        let text = format!("{}; {tokens} prompt tokens", words(reason));
        lines.extend(wrap(&text, width).into_iter().map(Line::from));
    }
    lines.extend(grid(context, explanation).all_lines(theme, width));
    if !explanation.pair.is_empty() {
        lines.push(Line::default());
        lines.push(section("Prefill and decode", String::new(), theme, width));
        lines.extend(fields(&explanation.pair, theme, width));
    }
    lines
}

fn grid(context: &Context<'_>, explanation: &Explanation) -> Grid {
    let mut columns = vec![
        Column::text("ENDPOINT", 0, 12, 30),
        Column::text("STANDING", 1, 10, 60),
        Column::number("CACHED", 2),
        Column::number("REQUESTS", 3),
    ];
    let ranks = 4..u8::MAX;
    columns.extend(explanation.parts.iter().zip(ranks).map(|(part, rank)| Column::number(part, rank)));
    let cells = |candidate: &Candidate| {
        let style = match &candidate.standing {
            Standing::Picked(0) => context.theme.good(),
            Standing::Excluded(_) => context.theme.soft(),
            _ => context.theme.plain_text(),
        };
        let mut cells = vec![
            styled(candidate.address.clone(), style),
            styled(candidate.standing.label(), style),
            plain(or_missing(candidate.cached_tokens, format::count)),
            plain(or_missing(candidate.requests, format::count)),
        ];
        cells.extend(candidate.figures.iter().map(|figure| plain(or_missing(*figure, format::figure))));
        cells
    };
    Grid { columns, rows: explanation.candidates.iter().map(cells).collect() }
}
