//! Durations and sizes in text form: `250ms`, `1m30s`, `64KiB`. Imports nothing of the crate.

use std::time::Duration;

/// Parses a duration: one or more numbers with a unit (`ns`, `us`, `ms`, `s`, `m`, `h`, `d`), as in Go and Kubernetes.
///
/// # Errors
/// A message about the text that can be shown to the user.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let wrong =
        || format!("`{}` is not a duration; give a number and a unit, as in `250ms`, `5s` or `1m30s`", clip(text));
    let mut rest = text.trim();
    if rest == "0" {
        return Ok(Duration::ZERO);
    }
    if rest.is_empty() {
        return Err(wrong());
    }
    let mut total = Duration::ZERO;
    while !rest.is_empty() {
        let number_len = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (number, tail) = rest.split_at(number_len);
        let unit_len = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_len);
        let seconds_per_unit = match unit.trim() {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" | "min" => 60.0,
            "h" => 3_600.0,
            "d" => 86_400.0,
            _ => return Err(wrong()),
        };
        let number: f64 = number.parse().map_err(|_| wrong())?;
        let part = Duration::try_from_secs_f64(number * seconds_per_unit).map_err(|_| wrong())?;
        total = total.checked_add(part).ok_or_else(wrong)?;
        rest = tail;
    }
    Ok(total)
}

/// Parses a size in bytes: a number alone, or with `B`, `KB`/`KiB`/`Ki`, `MB`/`MiB`/`Mi`, `GB`/`GiB`/`Gi`.
///
/// # Errors
/// A message about the text that can be shown to the user.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let wrong =
        || format!("`{}` is not a size; give bytes, or a number and a unit, as in `64KiB` or `16MiB`", clip(text));
    let trimmed = text.trim();
    let split = trimmed.find(|c: char| !c.is_ascii_digit() && c != '.' && c != '_').unwrap_or(trimmed.len());
    let (number, unit) = trimmed.split_at(split);
    let number = number.replace('_', "");
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "k" | "kb" => 1_000,
        "ki" | "kib" => 1 << 10,
        "m" | "mb" => 1_000_000,
        "mi" | "mib" => 1 << 20,
        "g" | "gb" => 1_000_000_000,
        "gi" | "gib" => 1 << 30,
        _ => return Err(wrong()),
    };
    if let Ok(whole) = number.parse::<u64>() {
        return whole.checked_mul(factor).ok_or_else(wrong);
    }
    let number: f64 = number.parse().map_err(|_| wrong())?;
    #[expect(clippy::cast_precision_loss, reason = "factors are at most 2^30")]
    let bytes = number * factor as f64;
    if !(0.0..9e18).contains(&bytes) {
        return Err(wrong());
    }
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked to lie in 0..9e18")]
    Ok(bytes as u64)
}

/// Formats a duration in the short form: `250ms`, `1m30s`.
#[must_use]
pub fn show_duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    match ms {
        0 if duration.is_zero() => "0s".into(),
        0 => format!("{}us", duration.as_micros()),
        _ if !ms.is_multiple_of(1_000) => format!("{ms}ms"),
        _ => {
            let s = ms / 1_000;
            match (s / 60, s % 60) {
                (0, s) => format!("{s}s"),
                (m, 0) => format!("{m}m"),
                (m, s) => format!("{m}m{s}s"),
            }
        }
    }
}

/// Serializes a duration as [`show_duration`] formats it, for `#[serde(serialize_with)]`.
pub fn duration_text<S: serde::Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&show_duration(*duration))
}

fn clip(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_in_the_form_of_go_are_parsed() {
        for (text, ms) in [
            ("250ms", 250),
            ("1s", 1_000),
            ("1m30s", 90_000),
            ("1.5s", 1_500),
            ("2h", 7_200_000),
            ("0", 0),
            (" 5s ", 5_000),
        ] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(ms), "{text}");
        }
        for bad in ["", "5", "s", "-1s", "5 parsecs", "1e9s", "NaNs", "99999999999999999999999h", "1..2s", "1s-"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_in_decimal_and_binary_units_are_parsed() {
        for (text, bytes) in [
            ("0", 0),
            ("64KiB", 65_536),
            ("64Ki", 65_536),
            ("1kb", 1_000),
            ("1.5MiB", 1_572_864),
            ("1_000", 1_000),
            ("2 GiB", 2 << 30),
        ] {
            assert_eq!(parse_bytes(text).unwrap(), bytes, "{text}");
        }
        for bad in ["", "KiB", "-1", "1XiB", "99999999999999999999GiB", "nan", "1.2.3k"] {
            assert!(parse_bytes(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn formatted_durations_are_parsed_back() {
        for ms in [0, 1, 250, 1_000, 61_000, 90_000, 120_000] {
            let d = Duration::from_millis(ms);
            assert_eq!(parse_duration(&show_duration(d)).unwrap(), d);
        }
    }
}
