//! Plots as one PNG picture, for where no page can be shown. Called by `cli::replay`. Pure.
//!
//! Drawn by `tiny-skia`, at twice the size in pixels so that it stays sharp; words with the glyphs of Noto Sans Mono (SIL Open Font
//! License) that `noto-sans-mono-bitmap` brings, so that a picture has its labels also on a machine without any font.

use super::chart::{Anchor, Ink, Mark, Scene};
use super::json::Document;
use super::plots;
use super::svg::{LIGHT, dashed};
use noto_sans_mono_bitmap::{FontWeight, RasterHeight, RasterizedChar, get_raster, get_raster_width};
use tiny_skia::{
    Color, FillRule, Paint, PathBuilder, Pixmap, PremultipliedColorU8, Rect, Stroke, StrokeDash, Transform,
};

/// Pixels of the picture for one of the plot.
const SCALE: f32 = 2.0;
/// The tallest picture, pixels of a plot: a few dozen cells; beyond it there is the page.
pub const MAX_HEIGHT: f32 = 12_000.0;
/// The height of a line of glyphs, pixels of the picture.
const GLYPHS: RasterHeight = RasterHeight::Size24;
/// From a glyph's upper edge to its base line, pixels of the picture.
const ASCENT: i32 = 19;

/// Why there is no picture.
#[derive(Debug, thiserror::Error)]
pub enum PngError {
    /// There is nothing to draw.
    #[error("no picture: the report has no runs")]
    Empty,
    /// The picture can't be made or written.
    #[error("no picture of {width} x {height} pixels: {message}")]
    Encode {
        /// Pixels.
        width: u32,
        /// Pixels.
        height: u32,
        /// Why.
        message: String,
    },
}

/// The main plots of each cell, one cell below the other: the distribution and the mean of the time to the first token. Cells that
/// would make it taller than [`MAX_HEIGHT`] are left out.
///
/// # Errors
/// When there are no runs, or the encoder fails.
pub fn render(document: &Document) -> Result<Vec<u8>, PngError> {
    draw(&plots::summary(document))
}

/// Scenes one below the other.
fn draw(scenes: &[Scene]) -> Result<Vec<u8>, PngError> {
    let mut tall = 0.0;
    let fitting = scenes.iter().take_while(|scene| {
        tall += scene.height;
        tall <= MAX_HEIGHT
    });
    let scenes: Vec<&Scene> = fitting.collect();
    let width = scenes.iter().map(|scene| scene.width).fold(0.0, f32::max);
    let height = scenes.iter().map(|scene| scene.height).sum::<f32>();
    let (width, height) = ((width * SCALE).ceil() as u32, (height * SCALE).ceil() as u32);
    let mut canvas = Canvas(Pixmap::new(width, height).ok_or(PngError::Empty)?);
    canvas.0.fill(colour("#ffffff"));
    let mut top = 0.0;
    for scene in scenes {
        for mark in &scene.marks {
            canvas.mark(mark, top);
        }
        top += scene.height;
    }
    canvas.0.encode_png().map_err(|error| PngError::Encode { width, height, message: error.to_string() })
}

struct Canvas(Pixmap);

impl Canvas {
    fn mark(&mut self, mark: &Mark, top: f32) {
        match mark {
            Mark::Line { points, ink, width, .. } => self.line(points, *ink, *width, top),
            Mark::Box { x, y, width, height, ink } => {
                let rect = Rect::from_xywh(*x, *y, *width, *height);
                if let Some(path) = rect.map(PathBuilder::from_rect) {
                    self.0.fill_path(&path, &paint(*ink), FillRule::Winding, placed(top), None);
                }
            }
            Mark::Words { x, y, text, ink, anchor, bold } => {
                self.words((*x * SCALE, (*y + top) * SCALE), text, *ink, *anchor, *bold);
            }
        }
    }

    fn line(&mut self, points: &[(f32, f32)], ink: Ink, width: f32, top: f32) {
        let mut path = PathBuilder::new();
        for (at, (x, y)) in points.iter().enumerate() {
            if at == 0 { path.move_to(*x, *y) } else { path.line_to(*x, *y) }
        }
        let dash = if dashed(ink) { StrokeDash::new(vec![6.0, 4.0], 0.0) } else { None };
        let stroke = Stroke { width, dash, ..Stroke::default() };
        if let Some(path) = path.finish() {
            self.0.stroke_path(&path, &paint(ink), &stroke, placed(top), None);
        }
    }

    fn words(&mut self, (x, y): (f32, f32), text: &str, ink: Ink, anchor: Anchor, bold: bool) {
        let weight = if bold { FontWeight::Bold } else { FontWeight::Regular };
        let step = get_raster_width(weight, GLYPHS) as i32;
        let wide = text.chars().count() as i32 * step;
        let left = match anchor {
            Anchor::Start => x as i32,
            Anchor::Middle => x as i32 - wide / 2,
            Anchor::End => x as i32 - wide,
        };
        let [red, green, blue] = rgb(LIGHT.of(ink));
        for (at, c) in text.chars().enumerate() {
            let glyph = get_raster(c, weight, GLYPHS).or_else(|| get_raster('?', weight, GLYPHS));
            if let Some(glyph) = glyph {
                self.glyph((left + at as i32 * step, y as i32 - ASCENT), &glyph, [red, green, blue]);
            }
        }
    }

    /// Lays a glyph over what is there, which is opaque.
    fn glyph(&mut self, (left, top): (i32, i32), glyph: &RasterizedChar, ink: [u8; 3]) {
        let (width, height) = (self.0.width() as i32, self.0.height() as i32);
        for (row, pixels) in glyph.rows().enumerate() {
            for (column, strength) in pixels.iter().enumerate().filter(|(_, strength)| **strength > 0) {
                let (x, y) = (left + column as i32, top + row as i32);
                if x < 0 || y < 0 || x >= width || y >= height {
                    continue;
                }
                if let Some(pixel) = self.0.pixels_mut().get_mut((y * width + x) as usize) {
                    let mix = |under: u8, over: u8| {
                        let strength = u16::from(*strength);
                        ((u16::from(under) * (255 - strength) + u16::from(over) * strength) / 255) as u8
                    };
                    let [red, green, blue] = ink;
                    let mixed = PremultipliedColorU8::from_rgba(
                        mix(pixel.red(), red),
                        mix(pixel.green(), green),
                        mix(pixel.blue(), blue),
                        255,
                    );
                    *pixel = mixed.unwrap_or(*pixel);
                }
            }
        }
    }
}

fn placed(top: f32) -> Transform {
    Transform::from_translate(0.0, top).post_scale(SCALE, SCALE)
}

fn paint(ink: Ink) -> Paint<'static> {
    let mut paint = Paint { anti_alias: true, ..Paint::default() };
    paint.set_color(colour(LIGHT.of(ink)));
    paint
}

fn colour(hex: &str) -> Color {
    let [red, green, blue] = rgb(hex);
    Color::from_rgba8(red, green, blue, 255)
}

/// Of `#rrggbb`.
fn rgb(hex: &str) -> [u8; 3] {
    let value = u32::from_str_radix(hex.trim_start_matches('#'), 16).unwrap_or_default();
    let [_, red, green, blue] = value.to_be_bytes();
    [red, green, blue]
}
