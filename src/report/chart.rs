//! Plots as lines, boxes and words at places: written by [`super::svg`]. Called by [`super::plots`]. Pure.
//!
//! Places are in pixels of a screen, from the top left.

use super::number::{Unit, grouped_plain};

/// Colours that a series may have; from the next on they come again, with other dashes.
pub const PALETTE: usize = 8;
/// Height of a line of words, pixels.
pub const LINE: f32 = 16.0;
/// Height of words above their base line, pixels, and depth below it: of the tallest letters of the fonts in use.
const ASCENT: f32 = 11.5;
const DESCENT: f32 = 3.0;
/// Space between words beside each other, pixels.
const GAP: f32 = 4.0;
/// Widest label, pixels; longer ones are cut, as a plot must keep its room.
const WIDEST_LABEL: f32 = 230.0;

/// What something is drawn with. The colours are the writer's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ink {
    /// Titles and labels, in the strongest contrast.
    Text,
    /// Words that step back: ticks, names of axes.
    Muted,
    /// Grid lines, behind all series.
    Grid,
    /// A series, by its number.
    Series(usize),
    /// The same in a plot of its own, where no other line can cover it: never dashed.
    Alone(usize),
}

/// Where words stand by their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The text begins at its position.
    Start,
    /// The text is centred on its position.
    Middle,
    /// The text ends at its position.
    End,
}

impl Anchor {
    /// The parts of words of this width before and after their anchor.
    fn parts(self, width: f32) -> (f32, f32) {
        match self {
            Anchor::Start => (0.0, width),
            Anchor::Middle => (width / 2.0, width / 2.0),
            Anchor::End => (width, 0.0),
        }
    }
}

/// One thing that is drawn.
#[derive(Clone, Debug, PartialEq)]
pub enum ChartMark {
    /// A line of one stroke or more, with gaps between them.
    Line {
        /// The points of each stroke as (x, y), pixels.
        strokes: Vec<Vec<(f32, f32)>>,
        /// What the line is drawn with.
        ink: Ink,
        /// Width of the stroke in pixels.
        width: f32,
        /// What is shown when it is pointed at; may be empty.
        label: String,
    },
    /// A filled box: a bar, or a legend's swatch.
    Box {
        /// X of the left edge, pixels.
        x: f32,
        /// Y of the upper edge, pixels.
        y: f32,
        /// Width, pixels; 0 draws nothing.
        width: f32,
        /// Height, pixels; 0 draws nothing.
        height: f32,
        /// What the box is filled with.
        ink: Ink,
    },
    /// Text on one line, at its anchor.
    Words {
        /// X of the anchor, pixels.
        x: f32,
        /// Y of the base line, pixels.
        y: f32,
        /// The text as it is shown, not escaped.
        text: String,
        /// What the text is drawn with.
        ink: Ink,
        /// Where they stand by their place.
        anchor: Anchor,
        /// The text is set in bold.
        bold: bool,
    },
}

impl ChartMark {
    /// The box that words fill, in any of the fonts in use: left, upper, right and lower edge. `None` for other marks.
    #[must_use]
    pub fn words_box(&self) -> Option<[f32; 4]> {
        let ChartMark::Words { x, y, text, anchor, bold, .. } = self else { return None };
        let (before, after) = anchor.parts(width_of(text, *bold));
        Some([x - before, y - ASCENT, x + after, y + DESCENT])
    }
}

/// Upper bound of the width of words of 12 pixels, in the sans-serif fonts of common systems. DejaVu Sans and Verdana
/// are the widest of them.
#[must_use]
pub fn width_of(text: &str, bold: bool) -> f32 {
    let width = |c: char| match c {
        'i' | 'j' | 'l' | 'I' | ' ' | '.' | ',' | ':' | ';' | '\'' | '|' => 4.5,
        'f' | 't' | 'r' | '-' | '(' | ')' | '[' | ']' | '!' | '/' | '\\' => 5.5,
        'm' | 'w' | 'M' | 'W' | '%' | '@' => 12.2,
        '0'..='9' | 'a'..='z' | '_' | '`' | '$' | '?' | '*' | '"' | '{' | '}' => 7.9,
        '!'..='~' => 10.2,
        // Letters of other scripts and pictures.
        _ => 17.0,
    };
    let sum: f32 = text.chars().map(width).sum();
    if bold { sum * 1.16 } else { sum }
}

/// `text`, cut to this width.
fn fit(text: &str, widest: f32, bold: bool) -> String {
    if width_of(text, bold) <= widest {
        return text.to_owned();
    }
    let mut cut = text.to_owned();
    while cut.pop().is_some() && width_of(&cut, bold) + width_of("..", bold) > widest {}
    cut + ".."
}

/// One plot, laid out in marks.
#[derive(Clone, Debug, PartialEq)]
pub struct Scene {
    /// Width of the plot, pixels.
    pub width: f32,
    /// Height of the plot, pixels.
    pub height: f32,
    /// What it shows, for those who don't see it.
    pub name: String,
    /// What is drawn, from the back to the front.
    pub marks: Vec<ChartMark>,
}

impl Scene {
    /// Adds words at `(x, y)`, moved to the left or right as far as the picture needs.
    fn words(&mut self, (x, y): (f32, f32), text: &str, ink: Ink, anchor: Anchor, bold: bool) {
        let (before, after) = anchor.parts(width_of(text, bold));
        let x = x.min(self.width - after).max(before);
        self.marks.push(ChartMark::Words { x, y, text: text.to_owned(), ink, anchor, bold });
    }

    fn line(&mut self, points: Vec<(f32, f32)>, ink: Ink, width: f32, label: &str) {
        self.marks.push(ChartMark::Line { strokes: vec![points], ink, width, label: label.to_owned() });
    }
}

/// How values are mapped to positions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Equal distances are equal differences.
    Linear,
    /// Equal distances are equal ratios; values above zero only.
    Log,
}

/// One axis of a plot.
#[derive(Clone, Copy, Debug)]
pub struct Axis {
    /// Name of the quantity, shown along the axis.
    pub name: &'static str,
    /// Unit of the values, for ticks.
    pub unit: Unit,
    /// Whether equal distances are differences or ratios.
    pub scale: Scale,
    /// The first and the last value shown.
    pub range: (f64, f64),
}

impl Axis {
    /// 0 at the first value, 1 at the last; what lies outside is put on the edge.
    fn place(&self, value: f64) -> f32 {
        let (low, high) = self.range;
        let part = match self.scale {
            Scale::Linear => (value - low) / (high - low),
            Scale::Log => (value / low).ln() / (high / low).ln(),
        };
        if part.is_finite() { part.clamp(0.0, 1.0) as f32 } else { 0.0 }
    }

    /// Round values, about `most` at the most.
    fn ticks(&self, most: usize) -> Vec<f64> {
        let (low, high) = self.range;
        match self.scale {
            Scale::Linear => linear_ticks(low, high, most),
            Scale::Log => {
                let decades = low.log10().floor() as i32..=high.log10().ceil() as i32;
                let of = |steps: &[f64]| -> Vec<f64> {
                    let all = decades.clone().flat_map(|d| steps.iter().map(move |step| step * 10f64.powi(d)));
                    all.filter(|v| *v >= low * 0.999 && *v <= high * 1.001).collect()
                };
                let forms: [&[f64]; 3] = [&[1.0, 2.0, 5.0], &[1.0, 3.0], &[1.0]];
                let ticks = forms.into_iter().map(of).find(|ticks| ticks.len() <= most).unwrap_or_else(|| of(&[1.0]));
                // Over a short range round ratios are too rare.
                if ticks.len() < 3 { linear_ticks(low, high, most) } else { ticks }
            }
        }
    }
}

fn linear_ticks(low: f64, high: f64, most: usize) -> Vec<f64> {
    let rough = (high - low) / most.max(1) as f64;
    if !rough.is_finite() || rough <= 0.0 {
        return vec![low];
    }
    let decade = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * decade).into_iter().find(|step| *step >= rough).unwrap_or(rough);
    let (first, last) = ((low / step).ceil() as i64, (high / step + 1e-9).floor() as i64);
    (first..=last).map(|tick| tick as f64 * step).collect()
}

/// A range of the values in `of` that has room for them; `(0, 1)` when there are none.
#[must_use]
pub fn range(of: impl IntoIterator<Item = f64>, scale: Scale) -> (f64, f64) {
    let usable = |value: &f64| value.is_finite() && (scale == Scale::Linear || *value > 0.0);
    let (low, high) = of
        .into_iter()
        .filter(usable)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
    match scale {
        _ if low > high => (if scale == Scale::Log { 0.1 } else { 0.0 }, 1.0),
        // A plot from zero shows sizes; one from the least value would show only differences.
        Scale::Linear => (low.min(0.0), if high > low.min(0.0) { high * 1.05 } else { low.min(0.0) + 1.0 }),
        Scale::Log if low == high => (low / 2.0, high * 2.0),
        Scale::Log => (low, high),
    }
}

/// One line of a plot.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Name of the series, for legend and tooltip.
    pub label: String,
    /// With what it is drawn.
    pub ink: Ink,
    /// Width of the stroke in pixels.
    pub width: f32,
    /// `(x, y)`, in the axes' values. No line is drawn to or from a point whose `y` is NaN.
    pub points: Vec<(f64, f64)>,
}

/// A plot of lines over two axes.
#[derive(Clone, Debug)]
pub struct Plot {
    /// Title, shown above the plot.
    pub title: String,
    /// The axis from left to right.
    pub x: Axis,
    /// The axis from below upwards.
    pub y: Axis,
    /// Lines, drawn in this order.
    pub curves: Vec<Curve>,
    /// Width and height of the whole, pixels; a legend comes on top of the height.
    pub size: (f32, f32),
    /// Whether it is said which line is which.
    pub legend: bool,
}

const LEFT: f32 = 58.0;
const RIGHT: f32 = 18.0;
/// Height below the axis from left to right: a line of ticks, and one with the name of the axis.
const BELOW: f32 = 48.0;
/// Length of the line before a name in the legend: long enough for its dashes, pixels.
const SWATCH: f32 = 32.0;
/// Least distance of two ticks on the axis from below upwards, pixels.
const TICK_STEP: f32 = 34.0;

impl Plot {
    /// Lays the plot out in marks.
    #[must_use]
    pub fn draw(&self) -> Scene {
        let (width, height) = self.size;
        let mut scene = Scene { width, height, name: self.title.clone(), marks: Vec::new() };
        let room = width - RIGHT - 2.0 * GAP - width_of(self.y.name, false);
        scene.words((4.0, LINE), &fit(&self.title, room - 4.0, true), Ink::Text, Anchor::Start, true);
        let legend = if self.legend { self.draw_legend(&mut scene, LINE * 2.2) } else { 0.0 };
        scene.height += legend;
        let (top, bottom) = (LINE * 2.0 + legend, scene.height - BELOW);
        let levels: Vec<(f64, String)> = {
            let ticks = self.y.ticks(((bottom - top) / TICK_STEP) as usize);
            ticks.into_iter().map(|tick| (tick, tick_words(tick, self.y.unit))).collect()
        };
        let widest = levels.iter().map(|(_, words)| width_of(words, false)).fold(0.0, f32::max);
        let (left, right) = (LEFT.max(widest + 8.0).min(width / 2.0), width - RIGHT);
        let x = |value: f64| left + (right - left) * self.x.place(value);
        let y = |value: f64| bottom - (bottom - top) * self.y.place(value);
        // Ticks with equal differences crowd at the end of an axis with equal ratios, and so do many decades: those
        // without space have no words.
        let mut free = f32::INFINITY;
        for (tick, words) in &levels {
            scene.line(vec![(left, y(*tick)), (right, y(*tick))], Ink::Grid, 1.0, "");
            if y(*tick) <= free {
                scene.words((left - 6.0, y(*tick) + 4.0), words, Ink::Muted, Anchor::End, false);
                free = y(*tick) - ASCENT - DESCENT;
            }
        }
        let mut free = 0.0;
        for tick in self.x.ticks(((right - left) / 64.0) as usize) {
            scene.line(vec![(x(tick), top), (x(tick), bottom)], Ink::Grid, 1.0, "");
            let words = tick_words(tick, self.x.unit);
            let half = width_of(&words, false) / 2.0;
            let at = x(tick).min(width - half).max(half);
            if at - half >= free {
                scene.words((at, bottom + LINE + 4.0), &words, Ink::Muted, Anchor::Middle, false);
                free = at + half + GAP;
            }
        }
        let middle = ((left + right) / 2.0, bottom + LINE * 2.2 + 4.0);
        scene.words(middle, self.x.name, Ink::Muted, Anchor::Middle, false);
        scene.words((width - RIGHT, LINE), self.y.name, Ink::Muted, Anchor::End, false);
        for curve in &self.curves {
            let strokes = curve.points.split(|(_, value)| value.is_nan()).filter(|stroke| !stroke.is_empty());
            let strokes =
                strokes.map(|points| points.iter().map(|(at, value)| (x(*at), y(*value))).collect()).collect();
            let (ink, width, label) = (curve.ink, curve.width, curve.label.clone());
            scene.marks.push(ChartMark::Line { strokes, ink, width, label });
        }
        scene
    }

    /// Gives the height that it took.
    fn draw_legend(&self, scene: &mut Scene, top: f32) -> f32 {
        let (mut x, mut y) = (4.0, top);
        for curve in &self.curves {
            let label = fit(&curve.label, WIDEST_LABEL, false);
            let wide = SWATCH + 6.0 + width_of(&label, false) + 14.0;
            if x > 4.0 && x + wide > self.size.0 {
                (x, y) = (4.0, y + LINE);
            }
            scene.line(vec![(x, y - 4.0), (x + SWATCH, y - 4.0)], curve.ink, 3.0, "");
            scene.words((x + SWATCH + 6.0, y), &label, Ink::Text, Anchor::Start, false);
            x += wide;
        }
        if self.curves.is_empty() { 0.0 } else { y - top + LINE }
    }
}

/// One bar of a bar chart.
#[derive(Clone, Debug)]
pub struct Bar {
    /// Label left of the bar.
    pub label: String,
    /// How long it is, from zero.
    pub value: f64,
    /// What stands at its end.
    pub words: String,
    /// With what it is drawn.
    pub ink: Ink,
}

/// Bars from left to right, one below the other.
#[must_use]
pub fn bars(title: &str, bars: &[Bar], width: f32) -> Scene {
    const STEP: f32 = 26.0;
    let height = LINE * 2.0 + bars.len() as f32 * STEP + 6.0;
    let mut scene = Scene { width, height, name: title.to_owned(), marks: Vec::new() };
    scene.words((4.0, LINE), &fit(title, width - 8.0, true), Ink::Text, Anchor::Start, true);
    // Half of the picture is for bars and what stands at their ends.
    let most_label = WIDEST_LABEL.min(width / 2.0);
    let labels: Vec<String> = bars.iter().map(|bar| fit(&bar.label, most_label, false)).collect();
    let ends: Vec<String> = bars.iter().map(|bar| fit(&bar.words, width / 2.0 - 60.0, false)).collect();
    let widest = |all: &[String]| all.iter().map(|words| width_of(words, false)).fold(0.0, f32::max);
    let left = 12.0 + widest(&labels);
    let room = (width - left - widest(&ends) - 14.0).max(20.0);
    let most = bars.iter().map(|bar| bar.value).fold(0.0, f64::max);
    for (row, ((bar, label), end)) in bars.iter().zip(&labels).zip(&ends).enumerate() {
        let y = LINE * 2.0 + row as f32 * STEP;
        let part = if most > 0.0 { (bar.value / most).max(0.0) as f32 } else { 0.0 };
        scene.words((left - 8.0, y + 12.0), label, Ink::Text, Anchor::End, false);
        scene.marks.push(ChartMark::Box {
            x: left,
            y,
            width: (room * part).max(1.0),
            height: STEP - 10.0,
            ink: bar.ink,
        });
        scene.words((left + room * part + 6.0, y + 12.0), end, Ink::Text, Anchor::Start, false);
    }
    scene
}

/// A round value, as short as it can be.
fn tick_words(value: f64, unit: Unit) -> String {
    let (factor, name) = match unit {
        Unit::Seconds if value != 0.0 && value.abs() < 0.999e-3 => (1e6, " us"),
        Unit::Seconds if value != 0.0 && value.abs() < 0.999 => (1e3, " ms"),
        Unit::Seconds => (1.0, " s"),
        Unit::Share => (100.0, " %"),
        Unit::PerSecond => (1.0, "/s"),
        Unit::Plain => (1.0, ""),
    };
    format!("{}{name}", grouped_plain(value * factor))
}
