//! Fields of rows: read, or refused with their name, what they hold and what is allowed.

use attache_types::clock::Timestamp;
use smallvec::SmallVec;
use std::ops::RangeInclusive;

/// Times up to 100 years: those that count from 1970 fit, and sums of them don't overflow.
pub(super) const MAX_SECONDS: u64 = 3_155_760_000;
/// Bytes of a value that an error shows.
const SHOWN_BYTES: usize = 60;

/// A value as errors show it: cut, without control characters, `missing` when there is none.
pub(super) fn shown(text: &str) -> String {
    let mut shown: String = text.chars().filter(|c| !c.is_control()).take(SHOWN_BYTES).collect();
    if shown.len() < text.len() {
        shown.push('…');
    }
    if shown.is_empty() { "empty".to_owned() } else { shown }
}

/// `field` holds `got` and should not.
pub(super) fn wrong(field: &str, got: Option<&str>, allowed: &str) -> String {
    match got {
        Some(got) => format!("`{field}` is {}; {allowed} is allowed", shown(got)),
        None => format!("`{field}` is missing; {allowed} is allowed"),
    }
}

/// A whole number; `12.0`, which some tools write for 12, is one.
pub(super) fn whole(field: &str, got: Option<&str>, range: RangeInclusive<u64>) -> Result<u64, String> {
    let read = |text: &str| {
        let digits = match text.split_once('.') {
            Some((digits, zeros)) if !zeros.is_empty() && zeros.bytes().all(|b| b == b'0') => digits,
            Some(_) => return None,
            None => text,
        };
        // `parse` would take a plus sign.
        digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse::<u64>().ok()).flatten()
    };
    let value = got.and_then(read).filter(|value| range.contains(value));
    value.ok_or_else(|| {
        let (low, high) = (grouped(*range.start()), grouped(*range.end()));
        wrong(field, got, &format!("a whole number from {low} to {high}"))
    })
}

/// A number of tokens, from `least` to [`super::MAX_TOKENS`].
pub(super) fn tokens(field: &str, got: Option<&str>, least: u64) -> Result<u32, String> {
    let tokens = whole(field, got, least..=super::MAX_TOKENS)?;
    Ok(u32::try_from(tokens).unwrap_or(u32::MAX))
}

/// A time in units of which a second has 10^`digits_less` (0 for seconds, 3 for milliseconds), to the nanosecond.
pub(super) fn time(field: &str, got: Option<&str>, unit: &str, digits_less: u32) -> Result<Timestamp, String> {
    let nanoseconds = got.and_then(|text| scaled(text, 9_u32.saturating_sub(digits_less)));
    let at = nanoseconds.filter(|at| *at <= MAX_SECONDS * 1_000_000_000);
    at.map(Timestamp).ok_or_else(|| {
        let most = grouped(MAX_SECONDS * 10_u64.pow(digits_less));
        wrong(field, got, &format!("a number of {unit} from 0 to {most}"))
    })
}

/// A decimal number times 10^`digits`, what is left behind the point cut off; `None` when it is
/// none, negative or too large.
fn scaled(text: &str, digits: u32) -> Option<u64> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let is_plain = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !is_plain(whole) || !is_plain(fraction) {
        // With an exponent it is no exact decimal anyway.
        let value = text.parse::<f64>().ok()? * 10_f64.powi(i32::try_from(digits).ok()?);
        return (value >= 0.0 && value < u64::MAX as f64).then_some(value as u64);
    }
    let mut value = whole.parse::<u64>().ok()?;
    let mut fraction = fraction.bytes();
    for _ in 0..digits {
        let digit = fraction.next().map_or(0, |b| u64::from(b - b'0'));
        value = value.checked_mul(10)?.checked_add(digit)?;
    }
    Some(value)
}

/// `10000000` as `10,000,000`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// The columns of a CSV row, without spaces and quotes around them. A comma within quotes separates nothing.
pub(super) fn columns(row: &str) -> SmallVec<[&str; 12]> {
    let mut is_quoted = false;
    let separates = |c: char| {
        is_quoted ^= c == '"';
        c == ',' && !is_quoted
    };
    row.split(separates).map(|column| column.trim().trim_matches('"').trim()).collect()
}

/// Where in a heading the column `name` stands, in any case.
pub(super) fn position(columns: &[&str], name: &str) -> Option<usize> {
    columns.iter().position(|column| column.eq_ignore_ascii_case(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_are_read_exactly_or_refused() {
        assert_eq!(whole("n", Some("12.0"), 1..=12), Ok(12));
        assert_eq!(time("t", Some("1.000000001"), "seconds", 0), Ok(Timestamp(1_000_000_001)));
        assert_eq!(time("t", Some("1.5"), "milliseconds", 3), Ok(Timestamp(1_500_000)));
        assert_eq!(time("t", Some("2e3"), "milliseconds", 3), Ok(Timestamp(2_000_000_000)));
        for bad in ["", "-1", "+1", "1.5", "1e3", "NaN", "0x1", "13", "99999999999999999999999", "\"3\"", "null"] {
            assert!(whole("n", Some(bad), 1..=12).is_err(), "{bad}");
        }
        for bad in ["", ".", "-1", "NaN", "inf", "1e30", "99999999999999999999999", "4000000000", "1:00"] {
            assert!(time("t", Some(bad), "seconds", 0).is_err(), "{bad}");
        }
        let message = whole("input_length", Some("-3"), 1..=10_000_000).unwrap_err();
        assert_eq!(message, "`input_length` is -3; a whole number from 1 to 10,000,000 is allowed");
        let message = time("at", None, "seconds", 0).unwrap_err();
        assert_eq!(message, "`at` is missing; a number of seconds from 0 to 3,155,760,000 is allowed");
    }

    #[test]
    fn columns_are_split_outside_quotes() {
        assert_eq!(columns("a, \"b,c\" ,,d").as_slice(), ["a", "b,c", "", "d"]);
        assert_eq!(position(&columns("TIMESTAMP,ContextTokens"), "contexttokens"), Some(1));
    }

    #[test]
    fn long_values_are_cut() {
        let message = wrong("x", Some(&"a\n".repeat(1_000)), "y");
        assert!(message.len() < 120 && !message.contains('\n'), "{message}");
    }

    proptest! {
        #[test]
        fn seconds_keep_every_nanosecond(at in 0..=MAX_SECONDS * 1_000_000_000) {
            let text = format!("{}.{:09}", at / 1_000_000_000, at % 1_000_000_000);
            prop_assert_eq!(time("t", Some(&text), "seconds", 0), Ok(Timestamp(at)));
        }
    }
}
