//! How figures are written: short, with their units. Called by the forms of the report. Pure.

use std::borrow::Cow;

/// What a figure is, and so how it is written and read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A duration in seconds, written in ms below one second.
    Seconds,
    /// A part, 0..=1, written in percent.
    Share,
    /// A rate, per second of the run.
    PerSecond,
    /// A count, or a ratio.
    Plain,
}

/// What stands for a figure that does not exist.
pub const NONE: &str = "-";

/// A figure with its unit, to three digits.
#[must_use]
pub fn write(value: f64, unit: Unit) -> String {
    match unit {
        Unit::Seconds => seconds(value),
        Unit::Share => percent(value),
        Unit::PerSecond => format!("{}/s", three_digits(value)),
        Unit::Plain => three_digits(value),
    }
}

/// A duration in the unit that suits it.
#[must_use]
pub fn seconds(value: f64) -> String {
    let (factor, unit) = match value.abs() {
        v if v >= 0.9995 || v == 0.0 => (1.0, "s"),
        v if v >= 0.999_5e-3 => (1e3, "ms"),
        _ => (1e6, "us"),
    };
    format!("{} {unit}", three_digits(value * factor))
}

/// A part, in percent with one decimal.
#[must_use]
pub fn percent(value: f64) -> String {
    format!("{:.1} %", value * 100.0)
}

/// To three digits, without cutting off those before the point, which are grouped by thousands from five on.
#[must_use]
pub fn three_digits(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 99.95 || v == 0.0 => 0,
        v if v >= 9.995 => 1,
        v if v >= 0.9995 => 2,
        _ => 3,
    };
    let text = format!("{value:.decimals$}");
    if decimals == 0 && text.trim_start_matches('-').len() > 4 { grouped(&text) } else { text }
}

/// A whole number, grouped by thousands.
#[must_use]
pub fn whole(value: u64) -> String {
    grouped(&value.to_string())
}

/// A round number without decimals that say nothing, grouped by thousands.
#[must_use]
pub fn grouped_plain(value: f64) -> String {
    let text = format!("{value:.3}");
    let (whole, decimals) = text.split_once('.').unwrap_or((&text, ""));
    let whole = if whole.len() > 4 { grouped(whole) } else { whole.to_owned() };
    match decimals.trim_end_matches('0') {
        "" => whole,
        decimals => format!("{whole}.{decimals}"),
    }
}

fn grouped(digits: &str) -> String {
    let mut out = String::with_capacity(digits.len() * 4 / 3 + 1);
    for (at, digit) in digits.char_indices() {
        let behind = digits.len() - at;
        if at > 0 && behind.is_multiple_of(3) && !out.ends_with('-') {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The unit in which a column of durations is written, so that they can be compared by eye.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ColumnUnit {
    /// Name of the unit, for a column's heading.
    pub name: &'static str,
    factor: f64,
    decimals: usize,
}

impl ColumnUnit {
    /// For a column whose least mean is `least` seconds.
    #[must_use]
    pub fn of(least: f64) -> Self {
        match least {
            v if v >= 0.1 => Self { name: "s", factor: 1.0, decimals: 3 },
            v if v >= 0.1e-3 => Self { name: "ms", factor: 1e3, decimals: 2 },
            _ => Self { name: "us", factor: 1e6, decimals: 1 },
        }
    }

    /// A duration in this unit, without its name.
    #[must_use]
    pub fn write(self, seconds: Option<f64>) -> Cow<'static, str> {
        match seconds {
            Some(value) => format!("{:.*}", self.decimals, value * self.factor).into(),
            None => NONE.into(),
        }
    }
}
