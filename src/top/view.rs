//! A frame of the state: header, pools, the rows of a pane or what is opened, and the keys.

mod decisions;
mod endpoint;
mod endpoints;
mod grid;
mod help;
mod pools;
mod rejections;
mod request;
mod spark;
mod theme;

pub(crate) use theme::Theme;

use crate::format::{self, counted};
use crate::model::Warning;
use crate::state::{Opened, Pane, State};
use crate::watch::{Failure, Moment, Watch};
use grid::{Grid, sides, wrap};
use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Modifier, Style};
use ratatui_core::text::{Line, Span};

/// Most lines of a message about a failure.
const FAILURE_LINES: usize = 3;
/// Most warnings of the picker that are shown.
const WARNINGS: usize = 3;
/// Most lines about the row of the cursor.
const SELECTION_LINES: usize = 2;
/// Fewest lines of a pane: titles and some rows. Pools get what is left.
const PANE_LINES: usize = 8;
/// Decisions in a printed frame.
const PRINTED_DECISIONS: usize = 10;

/// What the parts of a frame need to know.
#[derive(Clone, Copy, Debug)]
struct Context<'a> {
    watch: &'a Watch,
    now: Moment,
    theme: Theme,
    width: usize,
}

/// Draws the state into `area`, and scrolls its list to the cursor.
pub(crate) fn draw(buffer: &mut Buffer, area: Rect, state: &mut State, now: Moment, theme: Theme) {
    let (width, height) = (usize::from(area.width), usize::from(area.height));
    let now = state.moment(now);
    let mut lines = header(state, now, theme, width);
    let footer = footer(state, now, theme, width);
    let room = height.saturating_sub(lines.len() + footer.len());
    if state.shows_help {
        lines.extend(help::lines(theme, width).into_iter().take(room));
    } else if state.opened.is_some() {
        let all = opened(state, now, theme, width);
        state.page = room.max(1);
        state.scroll = state.scroll.min(all.len().saturating_sub(room));
        lines.extend(all.into_iter().skip(state.scroll).take(room));
    } else {
        list(&mut lines, state, now, theme, (width, room));
    }
    lines.truncate(height.saturating_sub(footer.len()));
    lines.resize(height.saturating_sub(footer.len()), Line::default());
    lines.extend(footer);
    paint(buffer, area, &lines);
}

/// The whole state as lines, for a frame that is printed: every pool, endpoint and rejection, and the latest decisions.
pub(crate) fn all(state: &State, now: Moment, width: u16) -> Buffer {
    let (columns, theme) = (usize::from(width), Theme::plain());
    // Without space for it, the first line has no interval at its end.
    let mut lines = header(state, now, theme, 0);
    let context = Context { watch: state.shown(), now, theme, width: columns };
    lines.extend(pools::grid(&context, &state.filter).all_lines(theme, columns));
    lines.push(Line::default());
    lines.extend(endpoints::grid(&context, &state.endpoint_rows()).all_lines(theme, columns));
    let rejections = state.rejection_rows();
    if !rejections.is_empty() {
        lines.push(Line::default());
        lines.extend(rejections::grid(&context, &rejections, state.interval).all_lines(theme, columns));
    }
    let decisions: Vec<_> = state.decision_rows().into_iter().take(PRINTED_DECISIONS).collect();
    if !decisions.is_empty() {
        lines.push(Line::default());
        lines.extend(decisions::grid(&context, &decisions).all_lines(theme, columns));
    }
    let area = Rect::new(0, 0, width, u16::try_from(lines.len()).unwrap_or(u16::MAX));
    let mut buffer = Buffer::empty(area);
    paint(&mut buffer, area, &lines);
    buffer
}

/// The lines of a frame without styles, and without spaces at their ends.
pub(crate) fn text(buffer: &Buffer) -> String {
    let width = usize::from(buffer.area.width).max(1);
    let line = |cells: &[ratatui_core::buffer::Cell]| {
        let text: String = cells.iter().map(|cell| cell.symbol()).collect();
        text.trim_end().to_owned() + "\n"
    };
    buffer.content().chunks(width).map(line).collect()
}

fn paint(buffer: &mut Buffer, area: Rect, lines: &[Line<'_>]) {
    for (row, line) in (area.top()..area.bottom()).zip(lines) {
        buffer.set_line(area.x, row, line, area.width);
        if line.style != Style::default() {
            buffer.set_style(Rect::new(area.x, row, area.width, 1), line.style);
        }
    }
}

/// Program, address, readiness, and the failure if there is one.
fn header(state: &State, now: Moment, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let watch = state.shown();
    let address = state.url.trim_start_matches("http://").to_owned();
    let mut left = vec![Span::styled("Attaché", theme.title())];
    let reading = watch.reading.as_ref();
    if let Some(version) = reading.and_then(|reading| reading.version.as_ref()) {
        left.push(Span::raw(format!(" {version}")));
    }
    left.push(Span::raw(format!("  {address}  ")));
    left.push(match reading {
        None if watch.failure.is_none() => Span::styled("connecting", theme.warning()),
        None => Span::styled("no data yet", theme.bad()),
        Some(_) if watch.failure.is_some() => Span::styled("old data", theme.bad()),
        Some(reading) if reading.ready == Some(false) => {
            Span::styled(format!("waiting for {}", reading.missing.join(", ")), theme.warning())
        }
        Some(_) => Span::styled("ready", theme.good()),
    });
    let right = if state.is_paused() {
        Span::styled("PAUSED", theme.warning().add_modifier(Modifier::REVERSED))
    } else {
        Span::styled(format!("every {}", format::interval(state.interval)), theme.soft())
    };
    let mut lines = vec![sides(left, vec![right], width)];
    if let Some(failure) = &watch.failure {
        lines.extend(failed(failure, watch, now, theme, width));
    } else if let Some(reading) = reading {
        lines.extend(warnings(&reading.warnings, theme, width));
    }
    lines
}

/// What the picker warns of: a line each on a terminal, the whole texts where `width` is 0.
fn warnings(warnings: &[Warning], theme: Theme, width: usize) -> Vec<Line<'static>> {
    let shown = if width == 0 { warnings.len() } else { WARNINGS };
    let mut lines: Vec<_> = warnings
        .iter()
        .take(shown)
        .map(|Warning { pool, message }| {
            let pool = pool.as_ref().map(|pool| format!("{pool}: ")).unwrap_or_default();
            let text = format!("! {pool}{message}");
            Line::styled(if width == 0 { text } else { grid::clip(&text, width) }, theme.warning())
        })
        .collect();
    if warnings.len() > shown {
        lines.push(Line::styled(format!("! {} more warnings", warnings.len() - shown), theme.soft()));
    }
    lines
}

fn failed(failure: &Failure, watch: &Watch, now: Moment, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let silent = format::span(now.elapsed.saturating_sub(failure.since.elapsed));
    let since = format::time_of_day(failure.since.wall);
    let shown = watch.read_at.map(|at| format!(" The data is from {}.", format::time_of_day(at.wall)));
    let text = format!("No answer since {since} ({silent}): {}.{}", failure.why, shown.unwrap_or_default());
    let lines = wrap(&text, width).into_iter().take(FAILURE_LINES);
    lines.map(|line| Line::styled(line, theme.bad())).collect()
}

/// What is selected or typed, and the keys.
fn footer(state: &State, now: Moment, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let note = if state.is_typing {
        vec![Line::from(vec![Span::styled("filter: ", theme.title()), Span::raw(format!("{}▏", state.filter))])]
    } else if state.shows_help || state.opened.is_some() {
        Vec::new()
    } else {
        selection(state, now, theme, width)
    };
    let keys = match (&state.opened, state.is_typing, state.shows_help) {
        (_, true, _) => "Enter keep  Esc clear",
        (_, _, true) => "? back  q quit",
        (Some(Opened::Endpoint(_)), ..) if width >= 70 => {
            "↑↓ scroll  Esc back  Enter its decisions  p pause  ? help  q quit"
        }
        (Some(_), ..) if width >= 50 => "↑↓ scroll  Esc back  p pause  ? help  q quit",
        (Some(_), ..) => "Esc back  ? help  q quit",
        _ if width >= 74 => "↑↓ move  Enter open  Tab pane  s sort  r reverse  / filter  ? help  q quit",
        _ if width >= 50 => "Enter open  Tab pane  s sort  / filter  ? help  q quit",
        _ => "Tab pane  / filter  ? help  q quit",
    };
    let mut lines = note;
    lines.push(Line::styled(keys, theme.soft()));
    lines
}

/// What is wrong with the endpoint of the cursor, or the whole reason of its decision.
fn selection(state: &State, now: Moment, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let Some(place) = state.selected() else { return vec![Line::default()] };
    let selected = match state.pane {
        Pane::Endpoints => state.endpoint_rows().get(place).map(|row| {
            let trouble = row.trouble(state.shown().age(now));
            (row.endpoint.address.clone(), trouble, theme.of(row.severity))
        }),
        Pane::Decisions => state.decision_rows().get(place).map(|ended| {
            let decision = &ended.decision;
            (decision.request_id.clone(), format::words(&decision.reason), theme.plain_text())
        }),
        Pane::Rejections => {
            let rows = state.rejection_rows();
            rows.get(place).map(|row| (format::words(&row.name), row.note.clone(), theme.of(row.severity)))
        }
    };
    let Some((name, text, style)) = selected else { return vec![Line::default()] };
    let parts: Vec<String> = [name, text].into_iter().filter(|part| !part.is_empty()).collect();
    let lines = wrap(&parts.join(": "), width).into_iter().take(SELECTION_LINES);
    lines.map(|line| Line::styled(line, style)).collect()
}

/// What is opened, as lines.
fn opened(state: &State, now: Moment, theme: Theme, width: usize) -> Vec<Line<'static>> {
    let context = Context { watch: state.shown(), now, theme, width };
    match &state.opened {
        Some(Opened::Endpoint(key)) => endpoint::lines(&context, key),
        Some(Opened::Request(request)) => request::lines(&context, request),
        None => Vec::new(),
    }
}

/// Pools, titles of the panes, and the rows of one pane.
fn list(lines: &mut Vec<Line<'static>>, state: &mut State, now: Moment, theme: Theme, (width, height): (usize, usize)) {
    let context = Context { watch: state.shown(), now, theme, width };
    if context.watch.reading.is_none() {
        return;
    }
    let shown = pools::lines(&context, &state.filter, height.saturating_sub(PANE_LINES));
    let room = height.saturating_sub(shown.len() + 2);
    lines.extend(shown);
    lines.push(panes(state, theme, width));
    let grid = match state.pane {
        Pane::Endpoints => endpoints::grid(&context, &state.endpoint_rows()),
        Pane::Decisions => decisions::grid(&context, &state.decision_rows()),
        Pane::Rejections => rejections::grid(&context, &state.rejection_rows(), state.interval),
    };
    if grid.rows.is_empty() {
        lines.push(Line::styled(empty(state), theme.soft()));
        return;
    }
    rows(lines, &grid, state, theme, (width, room));
}

/// The rows of a grid around the cursor.
fn rows(lines: &mut Vec<Line<'static>>, grid: &Grid, state: &mut State, theme: Theme, (width, room): (usize, usize)) {
    let widths = grid.fit(width);
    lines.push(grid.head(&widths, theme));
    let first = state.scroll_to_cursor(grid.rows.len(), room);
    let selected = state.selected();
    for place in (first..grid.rows.len()).take(room) {
        let line = grid.line(&widths, place);
        lines.push(if selected == Some(place) { line.style(theme.selected()) } else { line });
    }
}

/// The titles of the panes with their counts, and the order.
fn panes(state: &State, theme: Theme, width: usize) -> Line<'static> {
    let mut left = Vec::new();
    for (pane, title) in Pane::ALL {
        let count = match pane {
            Pane::Endpoints => state.endpoint_rows().len(),
            Pane::Decisions => state.decision_rows().len(),
            Pane::Rejections => state.rejection_rows().len(),
        };
        // A narrow terminal has room for the title of one pane.
        let title = if width < 60 && pane != state.pane { title.get(..1).unwrap_or(title) } else { title };
        let style = if pane == state.pane { theme.tab() } else { theme.soft() };
        left.push(Span::styled(format!(" {title} {} ", format::count(count as u64)), style));
        left.push(Span::raw(" "));
    }
    if !state.filter.is_empty() {
        left.push(Span::styled(format!("/{}", state.filter), theme.warning()));
    }
    let arrow = if state.is_reversed() { " reversed" } else { "" };
    sides(left, vec![Span::styled(format!("by {}{arrow}", state.order_name()), theme.soft())], width)
}

fn empty(state: &State) -> String {
    if !state.filter.is_empty() {
        return format!("Nothing matches `{}`. Esc clears the filter.", state.filter);
    }
    match state.pane {
        Pane::Endpoints => "No endpoint is known.",
        Pane::Decisions => "No decision yet. Attaché keeps the latest ones, unless `telemetry.decisionsKept` is 0.",
        Pane::Rejections => "No rejection and no degraded mode since the start.",
    }
    .to_owned()
}

/// A title inside a longer text, with what belongs to it on the right.
fn section(title: &str, right: String, theme: Theme, width: usize) -> Line<'static> {
    sides(vec![Span::styled(title.to_owned(), theme.title())], vec![Span::styled(right, theme.soft())], width)
}

/// Lines of name and value. Long values continue below.
fn fields(pairs: &[(String, String)], theme: Theme, width: usize) -> Vec<Line<'static>> {
    let names = pairs.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0).min(width / 2);
    let mut lines = Vec::new();
    for (name, value) in pairs {
        let name = grid::clip(name, names);
        for (at, part) in wrap(value, width.saturating_sub(names + 2).max(8)).into_iter().enumerate() {
            let name = if at == 0 { name.as_str() } else { "" };
            lines.push(Line::from(vec![Span::styled(format!("{name:<names$}  "), theme.soft()), Span::raw(part)]));
        }
    }
    lines
}

/// `3 decisions, 12 not shown`: the picker no longer had some.
fn missed(watch: &Watch) -> String {
    let shown = counted(watch.decisions.len(), "decision");
    match watch.missed {
        0 => shown,
        missed => format!("{shown}, {} came too fast to be read", format::count(missed)),
    }
}
