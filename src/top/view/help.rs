//! The keys, and what marks mean.

use super::grid::wrap;
use super::{Theme, section};
use crate::state::KEYS;
use ratatui_core::text::{Line, Span};

/// What a frame shows beyond its titles.
const NOTES: [&str; 4] = [
    "! is an endpoint that is ejected or unreachable, ~ one that needs attention. The line above the keys says why.",
    "share is the part of its pool's requests in the last interval. RUN, WAIT, KV and HIT are scraped metrics.",
    "PREFILL is the learned speed of prefill in tokens per second, MS/TOK the learned time of one output token.",
    "A filter of several words shows the rows that have each word.",
];

pub(super) fn lines(theme: Theme, width: usize) -> Vec<Line<'static>> {
    let keys = if width < 60 { 12 } else { 16 };
    let mut lines = vec![section("Keys", String::new(), theme, width)];
    for (key, what) in KEYS {
        for (at, part) in wrap(what, width.saturating_sub(keys)).into_iter().enumerate() {
            let key = if at == 0 { key } else { "" };
            lines.push(Line::from(vec![Span::styled(format!("{key:<keys$}"), theme.accent()), Span::raw(part)]));
        }
    }
    lines.push(Line::default());
    lines.extend(NOTES.iter().flat_map(|note| wrap(note, width)).map(Line::from));
    lines
}
