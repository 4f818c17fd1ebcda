//! Numbers, times and lengths as people read them.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// What stands for a missing value.
pub(crate) const MISSING: &str = "–";

/// A value, or [`MISSING`].
pub(crate) fn or_missing<T>(value: Option<T>, show: impl FnOnce(T) -> String) -> String {
    value.map_or_else(|| MISSING.to_owned(), show)
}

/// A count with a comma at each thousand.
pub(crate) fn count(value: u64) -> String {
    let digits = value.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A figure with as many decimals as its size needs.
pub(crate) fn figure(value: f64) -> String {
    let magnitude = value.abs();
    match value {
        _ if !value.is_finite() => MISSING.to_owned(),
        _ if magnitude >= 9_999.5 => short(value),
        _ if magnitude >= 99.95 || value == 0.0 => format!("{value:.0}"),
        _ if magnitude >= 9.995 => format!("{value:.1}"),
        _ if magnitude >= 0.0995 => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

/// A figure of at most five columns: `950`, `9.5k`, `12M`.
pub(crate) fn short(value: f64) -> String {
    let magnitude = value.abs();
    match value {
        _ if !value.is_finite() => MISSING.to_owned(),
        _ if magnitude < 999.5 => format!("{value:.0}"),
        _ if magnitude < 9_950.0 => format!("{:.1}k", value / 1e3),
        _ if magnitude < 999_500.0 => format!("{:.0}k", value / 1e3),
        _ if magnitude < 9_950_000.0 => format!("{:.1}M", value / 1e6),
        _ => format!("{:.0}M", value / 1e6),
    }
}

/// A rate per second.
pub(crate) fn rate(per_second: f64) -> String {
    if per_second > 0.0 && per_second < 9.95 { format!("{per_second:.1}") } else { short(per_second) }
}

/// A ratio as a percentage.
pub(crate) fn percent(ratio: f64) -> String {
    if ratio.is_finite() { format!("{:.0}%", ratio * 100.0) } else { MISSING.to_owned() }
}

/// Milliseconds, with a decimal below ten.
pub(crate) fn milliseconds(value: f64) -> String {
    match value {
        _ if !value.is_finite() => MISSING.to_owned(),
        _ if value.abs() < 9.95 => format!("{value:.1}"),
        _ => count(value.round().max(0.0) as u64),
    }
}

/// A duration in its largest unit: `12 s`, `3 min`, `2 h`, `4 d`.
pub(crate) fn span(duration: Duration) -> String {
    match duration.as_secs() {
        seconds @ 0..60 => format!("{seconds} s"),
        seconds @ 60..3_600 => format!("{} min", seconds / 60),
        seconds @ 3_600..86_400 => format!("{} h", seconds / 3_600),
        seconds => format!("{} d", seconds / 86_400),
    }
}

/// A short duration with its unit, as an interval is given: `250 ms`, `2 s`.
pub(crate) fn interval(duration: Duration) -> String {
    if duration.subsec_millis() == 0 {
        format!("{} s", duration.as_secs())
    } else {
        format!("{} ms", duration.as_millis())
    }
}

/// The time of day, UTC.
pub(crate) fn time_of_day(at: SystemTime) -> String {
    let seconds = at.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs() % 86_400;
    format!("{:02}:{:02}:{:02} UTC", seconds / 3_600, seconds / 60 % 60, seconds % 60)
}

/// A label of the picker as words: `connect_failure` is `connect failure`.
pub(crate) fn words(label: &str) -> String {
    label.replace('_', " ")
}

/// `1 endpoint`, `2 endpoints`.
pub(crate) fn counted(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{} {what}{plural}", count(number as u64))
}
