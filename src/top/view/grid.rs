//! Tables that drop columns when the terminal is narrow, and text that fits a width.

use super::Theme;
use crate::format::MISSING;
use ratatui_core::style::Style;
use ratatui_core::text::{Line, Span};

/// A column of a table.
#[derive(Clone, Debug)]
pub(super) struct Column {
    head: String,
    /// Columns with the lowest numbers stay when the terminal is narrow.
    rank: u8,
    /// Fewest and most columns of the terminal; fewer if the content is shorter.
    min: usize,
    max: usize,
    is_number: bool,
}

impl Column {
    /// A column of text, at least `min` and at most `max` wide.
    pub(super) fn text(head: &str, rank: u8, min: usize, max: usize) -> Self {
        Self { head: head.to_owned(), rank, min, max, is_number: false }
    }

    /// A column of figures, which are never cut off.
    pub(super) fn number(head: &str, rank: u8) -> Self {
        Self { head: head.to_owned(), rank, min: usize::MAX, max: usize::MAX, is_number: true }
    }
}

/// A table.
#[derive(Clone, Debug)]
pub(super) struct Grid {
    pub(super) columns: Vec<Column>,
    pub(super) rows: Vec<Vec<Span<'static>>>,
}

/// The columns that are shown.
#[derive(Clone, Debug)]
pub(super) struct Widths {
    /// Their places and widths.
    columns: Vec<(usize, usize)>,
    /// Spaces between two of them.
    gap: usize,
}

impl Grid {
    /// The widths of the columns that fit. Columns without content are left out, and those whose values are all missing
    /// are the first to go.
    pub(super) fn fit(&self, width: usize) -> Widths {
        let gap = if width < 60 { 1 } else { 2 };
        let natural: Vec<usize> = (0..self.columns.len()).map(|place| self.natural(place)).collect();
        let mut by_rank: Vec<usize> =
            (0..self.columns.len()).filter(|place| self.has(*place, |text| !text.is_empty())).collect();
        by_rank.sort_by_key(|place| (!self.has(*place, |text| text != MISSING), self.columns[*place].rank));
        let mut left = width;
        let mut chosen: Vec<(usize, usize)> = Vec::new();
        for place in by_rank {
            let least = natural[place].min(self.columns[place].min);
            let needed = least + if chosen.is_empty() { 0 } else { gap };
            if needed <= left {
                left -= needed;
                chosen.push((place, least));
            }
        }
        for (place, width) in &mut chosen {
            let more = (natural[*place] - *width).min(left);
            *width += more;
            left -= more;
        }
        chosen.sort_unstable();
        Widths { columns: chosen, gap }
    }

    fn has(&self, place: usize, wanted: impl Fn(&str) -> bool) -> bool {
        self.rows.iter().filter_map(|row| row.get(place)).any(|cell| wanted(&cell.content))
    }

    /// The width that shows all of the column, within its limit.
    fn natural(&self, place: usize) -> usize {
        let column = &self.columns[place];
        let cells = self.rows.iter().filter_map(|row| row.get(place)).map(Span::width);
        cells.max().unwrap_or(0).max(width(&column.head)).min(column.max)
    }

    /// The titles of the columns.
    pub(super) fn head(&self, widths: &Widths, theme: Theme) -> Line<'static> {
        self.joined(widths, |place| Span::styled(self.columns[place].head.clone(), theme.soft()))
    }

    /// A row.
    pub(super) fn line(&self, widths: &Widths, row: usize) -> Line<'static> {
        let cells = self.rows.get(row).map(Vec::as_slice).unwrap_or_default();
        self.joined(widths, |place| cells.get(place).cloned().unwrap_or_default())
    }

    /// The titles and all rows.
    pub(super) fn all_lines(&self, theme: Theme, width: usize) -> Vec<Line<'static>> {
        let widths = self.fit(width);
        let head = self.head(&widths, theme);
        std::iter::once(head).chain((0..self.rows.len()).map(|row| self.line(&widths, row))).collect()
    }

    fn joined(&self, widths: &Widths, cell: impl Fn(usize) -> Span<'static>) -> Line<'static> {
        let mut spans = Vec::with_capacity(2 * widths.columns.len());
        for (at, (place, columns)) in widths.columns.iter().enumerate() {
            if at > 0 {
                spans.push(Span::raw(" ".repeat(widths.gap)));
            }
            let Span { content, style } = cell(*place);
            let text = clip(&content, *columns);
            let padding = " ".repeat(columns.saturating_sub(width(&text)));
            let padded = if self.columns[*place].is_number { padding + &text } else { text + &padding };
            spans.push(Span::styled(padded, style));
        }
        Line::from(spans)
    }
}

/// Columns that `text` takes.
fn width(text: &str) -> usize {
    Span::raw(text).width()
}

/// `text` in at most `columns` columns; `…` stands for what is cut off.
pub(super) fn clip(text: &str, columns: usize) -> String {
    if width(text) <= columns {
        return text.to_owned();
    }
    let (mut out, mut used) = (String::new(), 0);
    for character in text.chars() {
        let taken = width(character.encode_utf8(&mut [0; 4]));
        if used + taken + 1 > columns {
            break;
        }
        used += taken;
        out.push(character);
    }
    if columns > 0 {
        out.push('…');
    }
    out
}

/// A line with text on both sides; the right side goes first when both don't fit.
pub(super) fn sides(mut left: Vec<Span<'static>>, right: Vec<Span<'static>>, columns: usize) -> Line<'static> {
    let taken = |spans: &[Span<'_>]| spans.iter().map(Span::width).sum::<usize>();
    let (used, wanted) = (taken(&left), taken(&right));
    if used + 1 + wanted <= columns {
        left.push(Span::raw(" ".repeat(columns - used - wanted)));
        left.extend(right);
    }
    Line::from(left)
}

/// `text` in lines of at most `columns` columns, cut between words where possible.
pub(super) fn wrap(text: &str, columns: usize) -> Vec<String> {
    let columns = columns.max(1);
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let mut word = word.to_owned();
        let mut used = lines.last().map_or(0, |line| width(line));
        if used > 0 && used + 1 + width(&word) > columns {
            lines.push(String::new());
            used = 0;
        }
        while width(&word) > columns {
            let rest: String = word.chars().skip(columns).collect();
            let part: String = word.chars().take(columns).collect();
            lines.last_mut().into_iter().for_each(|line| line.push_str(&part));
            lines.push(String::new());
            word = rest;
        }
        if let Some(line) = lines.last_mut() {
            if used > 0 {
                line.push(' ');
            }
            line.push_str(&word);
        }
    }
    lines
}

/// A cell without style.
pub(super) fn plain(text: impl Into<String>) -> Span<'static> {
    Span::raw(text.into())
}

/// A cell with a style.
pub(super) fn styled(text: impl Into<String>, style: Style) -> Span<'static> {
    Span::styled(text.into(), style)
}
