//! Numbers as texts, and texts as numbers.

use crate::characters::{decimal, is_space, strip};
use crate::{Error, Result, Value};

/// Python's `repr` of a float: the shortest digits that read back the same, with an exponent below
/// 1e-4 and from 1e16 on.
pub(crate) fn float_text(f: f64) -> String {
    if f.is_nan() {
        return "nan".to_owned();
    }
    if f.is_infinite() {
        return if f < 0.0 { "-inf" } else { "inf" }.to_owned();
    }
    let scientific = format!("{f:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let mut fixed = f.to_string();
        if !fixed.contains('.') {
            fixed.push_str(".0");
        }
        return fixed;
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

/// Digits with single underscores between them, as ASCII.
fn plain_digits(text: &str, digit: impl Fn(char) -> Option<char>) -> Option<String> {
    let mut out = String::with_capacity(text.len());
    let mut after_digit = false;
    for c in text.chars() {
        if c == '_' {
            if !after_digit {
                return None;
            }
            after_digit = false;
        } else {
            out.push(digit(c)?);
            after_digit = true;
        }
    }
    after_digit.then_some(out)
}

/// Python's `int(text, base)`: `None` for a text that is no number.
///
/// # Errors
/// When the base is not one, or the number is too large.
pub(crate) fn parse_int(text: &str, base: i128) -> Result<Option<i128>> {
    let base = match u32::try_from(base) {
        Ok(base @ (0 | 2..=36)) => base,
        _ => return Ok(None),
    };
    let text = strip(text);
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let prefix = digits.get(..2).unwrap_or_default().to_ascii_lowercase();
    let prefixed = match prefix.as_str() {
        "0b" if matches!(base, 0 | 2) => 2,
        "0o" if matches!(base, 0 | 8) => 8,
        "0x" if matches!(base, 0 | 16) => 16,
        _ => 0,
    };
    let (digits, radix) = if prefixed > 0 {
        let digits = digits.get(2..).unwrap_or_default();
        (digits.strip_prefix('_').unwrap_or(digits), prefixed)
    } else {
        (digits, if base == 0 { 10 } else { base })
    };
    let digit = |c: char| {
        let value = decimal(c).or_else(|| c.to_digit(36)).filter(|value| *value < radix)?;
        char::from_digit(value, radix)
    };
    let Some(plain) = plain_digits(digits, digit) else { return Ok(None) };
    // With base 0, `010` is no number.
    if base == 0 && prefixed == 0 && plain.len() > 1 && plain.starts_with('0') && plain.bytes().any(|b| b != b'0') {
        return Ok(None);
    }
    let number = i128::from_str_radix(&plain, radix).map_err(|_| too_large())?;
    Ok(Some(if negative { -number } else { number }))
}

/// Python's `float(text)`: `None` for a text that is no number.
pub(crate) fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim_matches(is_space);
    let unsigned = text.strip_prefix(['+', '-']).unwrap_or(text);
    if ["inf", "infinity", "nan"].iter().any(|word| unsigned.eq_ignore_ascii_case(word)) {
        return text.to_ascii_lowercase().parse().ok();
    }
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, Some(exponent)),
        None => (unsigned, None),
    };
    let digit = |c: char| decimal(c).and_then(|value| char::from_digit(value, 10));
    let part = |text: &str| if text.is_empty() { Some(String::new()) } else { plain_digits(text, digit) };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let (whole, fraction) = (part(whole)?, part(fraction)?);
    if whole.is_empty() && fraction.is_empty() {
        return None;
    }
    let mut plain = if text.starts_with('-') { "-".to_owned() } else { String::new() };
    plain.push_str(&format!("{whole}.{fraction}"));
    if let Some(exponent) = exponent {
        let sign = if exponent.starts_with('-') { "-" } else { "" };
        plain.push_str(&format!(
            "e{sign}{}",
            plain_digits(exponent.strip_prefix(['+', '-']).unwrap_or(exponent), digit)?
        ));
    }
    plain.parse().ok()
}

/// Python's `int(number)` of a float.
///
/// # Errors
/// When it is not finite, or too large.
pub(crate) fn truncate(number: f64) -> Result<Value> {
    if !number.is_finite() {
        return Err(Error::failed("a number that is not finite can't be a whole number"));
    }
    if number.abs() >= 1.7e38 {
        return Err(too_large());
    }
    Ok(Value::from(number.trunc() as i128))
}

pub(crate) fn too_large() -> Error {
    Error::failed("a whole number has more than 127 bits")
}

/// Rounds to a number of decimals, half to even, by the exact value.
pub(crate) fn round(number: f64, digits: i128) -> Result<f64> {
    if !number.is_finite() || digits > 330 || number == 0.0 {
        return Ok(number);
    }
    if digits < -310 {
        return Ok(0.0_f64.copysign(number));
    }
    if digits >= 0 {
        // Rust prints the exact value, half to even.
        let text = format!("{number:.*}", usize::try_from(digits).unwrap_or(0));
        return text.parse().map_err(|_| too_large());
    }
    let unit = 10_i128.checked_pow(u32::try_from(-digits).unwrap_or(u32::MAX));
    match (unit, number.trunc() == number && number.abs() < 1e37) {
        (Some(unit), true) => Ok(round_int(number as i128, unit) as f64),
        (Some(unit), false) if number.abs() < 1e15 => {
            // Only the fraction decides between two equal distances.
            let whole = number.floor() as i128;
            let rest = whole.rem_euclid(unit);
            let up = rest * 2 > unit || (rest * 2 == unit && number > number.floor());
            let down = rest * 2 < unit && !(rest * 2 == unit - 1 && number - number.floor() > 0.5);
            let base = whole - rest;
            let tie_up = (base / unit) % 2 != 0;
            Ok(((if up || (!down && tie_up) { base + unit } else { base }) as f64).abs().copysign(number))
        }
        _ => Err(too_large()),
    }
}

/// Rounds a whole number to multiples of `unit`, half to even.
pub(crate) fn round_int(number: i128, unit: i128) -> i128 {
    let rest = number.rem_euclid(unit);
    let base = number - rest;
    let up = rest * 2 > unit || (rest * 2 == unit && (base / unit) % 2 != 0);
    if up { base + unit } else { base }
}
