//! Which plots a report has. Called by [`super::html`] and [`super::svg`]. Pure.

use super::chart::{Axis, Bar, Curve, Ink, Plot, Scale, Scene, bars, range};
use super::json::{Cell, Distribution, Document, EndpointFigures, PointFigures, RunFigures};
use super::number::{Unit, seconds, three_digits, whole};
use crate::tally::share;

/// Width of a plot, pixels: two stand side by side on a laptop.
const WIDTH: f32 = 560.0;
/// Height of a plot with axes, pixels.
const HEIGHT: f32 = 300.0;
/// Width and height of one of many small plots, pixels.
const SMALL: (f32, f32) = (370.0, 210.0);
/// Points of a line over time. With more, crossing lines of several policies can't be
/// distinguished, and the page grows.
const TIME_POINTS: usize = 120;
/// The part of a distribution below which it is not drawn: single requests that found an idle
/// server would stretch the axis.
const FIRST_PART: f64 = 0.01;

/// The policies' colours: the same in all plots of a report.
pub struct Inks<'d>(Vec<&'d str>);

impl<'d> Inks<'d> {
    /// For all policies of a report.
    #[must_use]
    pub fn of(document: &'d Document) -> Self {
        Self(document.policies())
    }

    fn number(&self, run: &RunFigures) -> usize {
        self.0.iter().position(|policy| *policy == run.policy).unwrap_or_default()
    }

    fn ink(&self, run: &RunFigures) -> Ink {
        Ink::Series(self.number(run))
    }
}

/// The plots of a picture: for each cell the distribution and the mean of the time to the first token.
pub(super) fn summary(document: &Document) -> Vec<Scene> {
    let inks = Inks::of(document);
    let cells = document.cells();
    let of = |cell: &Cell<'_>| {
        let mut plot = first_token(cell, &inks);
        plot.title = format!("TTFT, share of requests up to this time: {}", cell.name);
        plot.size = (WIDTH * 1.4, HEIGHT * 1.2);
        [plot.draw(), mean_first_token(cell, &inks, WIDTH * 1.4)]
    };
    cells.iter().flat_map(of).collect()
}

/// All plots of a cell that show policies beside each other.
pub(super) fn all(cell: &Cell<'_>, inks: &Inks<'_>) -> Vec<Scene> {
    let mut scenes = vec![first_token(cell, inks).draw()];
    if cell.runs.iter().any(|run| run.tpot.count > 0) {
        let title = "TPOT: share of requests up to this time per output token";
        scenes.push(distribution(title, "time per output token, logarithmic", cell, inks, |run| &run.tpot).draw());
    }
    if cell.runs.iter().any(|run| !run.timeline.is_empty()) {
        let title = "Hit rate: cached part of the prompt tokens, %";
        scenes.push(over_time(title, Unit::Share, cell, inks, hit_rate));
        let title = "Requests in flight on all endpoints, mean";
        scenes.push(over_time(title, Unit::Plain, cell, inks, in_flight_in_all));
    }
    match cell.runs.as_slice() {
        // A single bar says nothing.
        [run] => scenes.push(work(run, inks)),
        _ => scenes.extend(figures(cell, inks)),
    }
    scenes
}

/// The figures in which policies differ, as bars.
fn figures(cell: &Cell<'_>, inks: &Inks<'_>) -> [Scene; 3] {
    let plain = |value: f64, unit: &str| (value, format!("{}{unit}", three_digits(value)));
    [
        mean_first_token(cell, inks, WIDTH),
        bar_plot("Imbalance: prompt tokens computed, busiest endpoint / mean", cell, inks, WIDTH, |run| {
            Some(plain(run.imbalance?.max_over_mean, ""))
        }),
        bar_plot("GPU time saved by cached prompt tokens, seconds", cell, inks, WIDTH, |run| {
            Some(plain(run.gpu_seconds_saved, " s"))
        }),
    ]
}

/// What each endpoint had to compute.
fn work(run: &RunFigures, inks: &Inks<'_>) -> Scene {
    let bar = |(number, endpoint): (usize, &EndpointFigures)| {
        let tokens = endpoint.prompt_tokens.saturating_sub(endpoint.cached_tokens);
        Bar { label: endpoint.label(number), value: tokens as f64, words: whole(tokens), ink: inks.ink(run) }
    };
    bars(
        "Prompt tokens computed by each endpoint",
        &run.endpoints.iter().enumerate().map(bar).collect::<Vec<_>>(),
        WIDTH,
    )
}

/// Requests in flight by endpoint: one small plot for each policy, all over the same axes.
pub(super) fn by_endpoint(cell: &Cell<'_>, inks: &Inks<'_>) -> Vec<Scene> {
    let start = start(cell);
    let runs: Vec<_> =
        cell.runs.iter().filter(|run| !run.timeline.is_empty()).map(|run| (run, in_flight(run, start))).collect();
    let values = |of: fn(&(f64, f64)) -> f64| {
        let points = runs.iter().flat_map(|(_, lines)| lines.iter().flatten());
        range(points.map(of).collect::<Vec<_>>(), Scale::Linear)
    };
    let x = Axis { name: SINCE_START, unit: Unit::Seconds, scale: Scale::Linear, range: values(|point| point.0) };
    let y = Axis { name: "", unit: Unit::Plain, scale: Scale::Linear, range: values(|point| point.1) };
    let plot = |(run, lines): &(&&RunFigures, Vec<Vec<(f64, f64)>>)| {
        let curve = |(endpoint, points): (usize, &Vec<(f64, f64)>)| Curve {
            label: run.endpoints.get(endpoint).map(|e| e.label(endpoint)).unwrap_or_default(),
            ink: Ink::Alone(inks.number(run)),
            width: 0.8,
            points: points.clone(),
        };
        let curves = lines.iter().enumerate().map(curve).collect();
        Plot { title: run.policy.clone(), x, y, curves, size: SMALL, legend: false }.draw()
    };
    runs.iter().map(plot).collect()
}

/// The name of axes of time.
const SINCE_START: &str = "virtual time since the first request";

/// Virtual time of the first request of a cell, seconds. All runs of a cell have the same requests.
fn start(cell: &Cell<'_>) -> f64 {
    let first = |run: &&RunFigures| run.timeline.iter().find(|point| is_busy(point)).map(|point| point.from_seconds);
    cell.runs.iter().filter_map(first).reduce(f64::min).unwrap_or_default()
}

/// Whether an endpoint had a request.
fn is_busy(point: &PointFigures) -> bool {
    point.prefix_queries > 0 || point.in_flight.iter().any(|requests| *requests > 0.0)
}

/// For each endpoint, its mean load over at most [`TIME_POINTS`] stretches of time.
fn in_flight(run: &RunFigures, start: f64) -> Vec<Vec<(f64, f64)>> {
    let endpoints = run.timeline.iter().map(|point| point.in_flight.len()).max().unwrap_or_default();
    let line =
        |endpoint: usize| over_stretches(run, start, |points| mean(points, |p| p.in_flight.get(endpoint).copied()));
    (0..endpoints).map(line).collect()
}

fn in_flight_in_all(run: &RunFigures, start: f64) -> Vec<(f64, f64)> {
    over_stretches(run, start, |points| mean(points, |point| Some(point.in_flight.iter().sum())))
}

fn hit_rate(run: &RunFigures, start: f64) -> Vec<(f64, f64)> {
    over_stretches(run, start, |points| {
        let sum = |of: fn(&PointFigures) -> u64| points.iter().map(of).sum();
        share(sum(|point| point.prefix_hits), sum(|point| point.prefix_queries))
    })
}

/// `(seconds since start, value)` at the end of at most [`TIME_POINTS`] stretches of time, and at the beginning of the
/// first one of each line. A NaN stands for a stretch without requests or without a value: no line crosses it.
fn over_stretches(run: &RunFigures, start: f64, of: impl Fn(&[PointFigures]) -> Option<f64>) -> Vec<(f64, f64)> {
    let step = run.timeline.len().div_ceil(TIME_POINTS).max(1);
    let mut line: Vec<(f64, f64)> = Vec::new();
    for points in run.timeline.chunks(step) {
        let ([first, ..], [.., last]) = (points, points) else { continue };
        let is_open = line.last().is_some_and(|(_, value)| !value.is_nan());
        let (from, until) = (first.from_seconds - start, last.until_seconds - start);
        match points.iter().any(is_busy).then(|| of(points)).flatten() {
            Some(value) => {
                if !is_open {
                    line.push((from, value));
                }
                line.push((until, value));
            }
            None if is_open => line.push((from, f64::NAN)),
            None => {}
        }
    }
    line
}

fn mean(points: &[PointFigures], of: impl Fn(&PointFigures) -> Option<f64>) -> Option<f64> {
    let values: Vec<f64> = points.iter().filter_map(of).collect();
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

fn first_token(cell: &Cell<'_>, inks: &Inks<'_>) -> Plot {
    let title = "TTFT: share of requests up to this time to first token";
    distribution(title, "time to first token, logarithmic", cell, inks, |run| &run.ttft)
}

fn distribution(
    title: &str,
    name: &'static str,
    cell: &Cell<'_>,
    inks: &Inks<'_>,
    of: fn(&RunFigures) -> &Distribution,
) -> Plot {
    let points = |run: &RunFigures| -> Vec<(f64, f64)> {
        let quantiles = of(run).quantiles.iter().filter(|(part, _)| *part >= FIRST_PART);
        quantiles.map(|(part, value)| (*value, *part)).collect()
    };
    let curve =
        |run: &&RunFigures| Curve { label: run.policy.clone(), ink: inks.ink(run), width: 2.0, points: points(run) };
    let curves: Vec<Curve> = cell.runs.iter().map(curve).collect();
    let times = curves.iter().flat_map(|curve| curve.points.iter().map(|point| point.0)).collect::<Vec<_>>();
    Plot {
        title: title.to_owned(),
        x: Axis { name, unit: Unit::Seconds, scale: Scale::Log, range: range(times, Scale::Log) },
        y: Axis { name: "", unit: Unit::Share, scale: Scale::Linear, range: (0.0, 1.0) },
        curves,
        size: (WIDTH, HEIGHT),
        legend: true,
    }
}

fn mean_first_token(cell: &Cell<'_>, inks: &Inks<'_>, width: f32) -> Scene {
    bar_plot("TTFT: mean time to first token", cell, inks, width, |run| Some((run.ttft.mean?, seconds(run.ttft.mean?))))
}

fn bar_plot(
    title: &str,
    cell: &Cell<'_>,
    inks: &Inks<'_>,
    width: f32,
    of: impl Fn(&&RunFigures) -> Option<(f64, String)>,
) -> Scene {
    let bar = |run: &&RunFigures| {
        let (value, words) = of(run)?;
        Some(Bar { label: run.policy.clone(), value, words, ink: inks.ink(run) })
    };
    bars(title, &cell.runs.iter().filter_map(bar).collect::<Vec<_>>(), width)
}

fn over_time(
    title: &str,
    unit: Unit,
    cell: &Cell<'_>,
    inks: &Inks<'_>,
    of: fn(&RunFigures, f64) -> Vec<(f64, f64)>,
) -> Scene {
    let start = start(cell);
    let curve =
        |run: &&RunFigures| Curve { label: run.policy.clone(), ink: inks.ink(run), width: 1.5, points: of(run, start) };
    let curves: Vec<Curve> = cell.runs.iter().map(curve).collect();
    let values = |of: fn(&(f64, f64)) -> f64| {
        range(curves.iter().flat_map(|curve| curve.points.iter().map(of)).collect::<Vec<_>>(), Scale::Linear)
    };
    let (low, high) = values(|point| point.1);
    let y = if unit == Unit::Share { (low, high.min(1.0)) } else { (low, high) };
    Plot {
        title: title.to_owned(),
        x: Axis { name: SINCE_START, unit: Unit::Seconds, scale: Scale::Linear, range: values(|point| point.0) },
        y: Axis { name: "", unit, scale: Scale::Linear, range: y },
        curves,
        size: (WIDTH, HEIGHT),
        legend: true,
    }
    .draw()
}
