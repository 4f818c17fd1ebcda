//! Plots as SVG: parts of an HTML page, or one image. Called by [`super::html`] and `cli::replay`. Pure.
//!
//! Colours are custom properties of the page (`--text`, `--muted`, `--grid`, `--s0` ..), so that they follow its light
//! or dark scheme. An image has no such properties and shows the colours of the light scheme.

use super::chart::{Anchor, ChartMark, Ink, PALETTE, Scene};
use super::json::Document;
use super::plots;
use std::borrow::Cow;
use std::fmt::Write as _;

/// Colours of a page: one scheme, light or dark.
#[derive(Clone, Copy, Debug)]
pub struct Colours {
    /// Background of the whole page.
    pub paper: &'static str,
    /// Text of titles, labels and tables.
    pub text: &'static str,
    /// Text of less weight: ticks and names of axes.
    pub muted: &'static str,
    /// Grid lines of plots, in little contrast.
    pub grid: &'static str,
    /// Series. Readers who can't see red or green can distinguish them, and each contrasts with the background.
    pub series: [&'static str; PALETTE],
}

/// Scheme for a light background.
pub const LIGHT: Colours = Colours {
    paper: "#fcfcfb",
    text: "#0b0b0b",
    muted: "#52514e",
    grid: "#e4e3df",
    series: ["#2a78d6", "#eb6834", "#1baf7a", "#b98000", "#d55181", "#008300", "#4a3aa7", "#e34948"],
};

/// Scheme for a dark background.
pub const DARK: Colours = Colours {
    paper: "#1a1a19",
    text: "#ffffff",
    muted: "#c3c2b7",
    grid: "#383835",
    series: ["#3987e5", "#d95926", "#199e70", "#c98500", "#d55181", "#2fa52f", "#9085e9", "#e66767"],
};

impl Colours {
    /// The colour of an ink, `#rrggbb`.
    #[must_use]
    pub fn of(&self, ink: Ink) -> &'static str {
        match ink {
            Ink::Text => self.text,
            Ink::Muted => self.muted,
            Ink::Grid => self.grid,
            Ink::Series(number) | Ink::Alone(number) => self.series.get(number % PALETTE).copied().unwrap_or(self.text),
        }
    }
}

/// Dashes and gaps of each series, pixels. The first series is solid. Lines are drawn in the order of the series, so a
/// line that another one covers shows in the gaps.
const DASHES: [&str; PALETTE] = ["", "9 5", "2 4", "12 4 3 4", "5 3", "2 7", "16 6", "6 3 2 3 2 3"];

/// The dashes of a series; empty for a solid line.
#[must_use]
pub fn dashes(ink: Ink) -> &'static str {
    let Ink::Series(number) = ink else { return "" };
    // A colour that comes again has other dashes than before.
    let at = (number + number / PALETTE * 3) % PALETTE;
    DASHES.get(at).copied().unwrap_or_default()
}

fn paint(ink: Ink) -> String {
    let name = match ink {
        Ink::Text => "text".to_owned(),
        Ink::Muted => "muted".to_owned(),
        Ink::Grid => "grid".to_owned(),
        Ink::Series(number) | Ink::Alone(number) => format!("s{}", number % PALETTE),
    };
    format!("var(--{name},{})", LIGHT.of(ink))
}

/// Text that can stand between tags and in attributes.
#[must_use]
pub fn escape(text: &str) -> Cow<'_, str> {
    if !text.contains(['&', '<', '>', '"', '\'']) && !text.contains(forbidden) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c if forbidden(c) => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// Control characters have no place in a page, escaped or not.
fn forbidden(c: char) -> bool {
    c.is_control() && !matches!(c, '\n' | '\t')
}

/// One SVG image with the main plots of each cell, one below the other: the distribution and the mean of the time to
/// the first token. An image without plots when the report has no runs.
#[must_use]
pub fn picture(document: &Document) -> String {
    let scenes = plots::summary(document);
    let width = scenes.iter().map(|scene| scene.width).fold(0.0, f32::max);
    let height = scenes.iter().map(|scene| scene.height).sum::<f32>();
    let mut out = format!(
        r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"><rect width="100%" height="100%" fill="{}"/>"#,
        LIGHT.paper
    );
    let mut top = 0.0;
    for scene in &scenes {
        element(&mut out, scene, &format!(r#"y="{top}" "#));
        top += scene.height;
    }
    out.push_str("</svg>\n");
    out
}

/// Writes a plot as an `<svg>` element.
#[must_use]
pub fn render(scene: &Scene) -> String {
    let mut out = String::new();
    element(&mut out, scene, "");
    out
}

/// Appends a plot as an `<svg>` element with these further attributes.
fn element(out: &mut String, scene: &Scene, attributes: &str) {
    let (width, height, name) = (scene.width, scene.height, escape(&scene.name));
    let _ = write!(
        out,
        r#"<svg {attributes}viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" aria-label="{name}" font-family="system-ui,sans-serif" font-size="12">"#
    );
    for mark in &scene.marks {
        let _ = match mark {
            ChartMark::Line { strokes, ink, width, label } => {
                let dash = match dashes(*ink) {
                    "" => String::new(),
                    dashes => format!(r#" stroke-dasharray="{dashes}""#),
                };
                let title = if label.is_empty() { String::new() } else { format!("<title>{}</title>", escape(label)) };
                let path: String = strokes.iter().map(|points| path(points)).collect();
                let paint = paint(*ink);
                write!(
                    out,
                    r#"<path d="{path}" fill="none" style="stroke:{paint}" stroke-width="{width}" stroke-linejoin="round"{dash}>{title}</path>"#
                )
            }
            ChartMark::Box { x, y, width, height, ink } => write!(
                out,
                r#"<rect x="{x:.1}" y="{y:.1}" width="{width:.1}" height="{height:.1}" rx="2" style="fill:{}"/>"#,
                paint(*ink)
            ),
            ChartMark::Words { x, y, text, ink, anchor, bold } => {
                let anchor = match anchor {
                    Anchor::Start => "start",
                    Anchor::Middle => "middle",
                    Anchor::End => "end",
                };
                let bold = if *bold { r#" font-weight="600""# } else { "" };
                let paint = paint(*ink);
                write!(
                    out,
                    r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}" style="fill:{paint}"{bold}>{}</text>"#,
                    escape(text)
                )
            }
        };
    }
    out.push_str("</svg>");
}

fn path(points: &[(f32, f32)]) -> String {
    let mut out = String::with_capacity(points.len() * 12);
    for (at, (x, y)) in points.iter().enumerate() {
        let _ = write!(out, "{}{x:.1} {y:.1}", if at == 0 { "M" } else { "L" });
    }
    out
}
