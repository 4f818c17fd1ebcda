//! Python's `text % values`.

use crate::numbers::{float_text, truncate};
use crate::render::{Run, escape_html};
use crate::{Error, Result, Value};
use std::borrow::Cow;

/// One `%…` of a format.
#[derive(Default)]
struct Directive {
    key: Option<String>,
    minus: bool,
    plus: bool,
    space: bool,
    zero: bool,
    hash: bool,
    width: usize,
    precision: Option<usize>,
    kind: char,
}

/// Widest directive in characters.
const MAX_WIDTH: usize = 4_096;

impl Run<'_> {
    /// `format % values`; a safe format escapes the texts.
    pub(crate) fn printf(&mut self, format: &str, values: &Value, safe: bool) -> Result<String> {
        self.spend(format.len())?;
        let is_dict = matches!(values, Value::Dict(_));
        let list: Vec<Value> = match values {
            Value::Tuple(items) => items.to_vec(),
            other => vec![other.clone()],
        };
        let mut list = list.into_iter();
        let mut out = String::new();
        let mut rest = format;
        let mut used_key = false;
        while let Some((before, after)) = rest.split_once('%') {
            out.push_str(before);
            let (directive, after) = self.directive(after, &mut list)?;
            rest = after;
            if directive.kind == '%' {
                out.push('%');
                continue;
            }
            let value = match (&directive.key, values) {
                (Some(key), Value::Dict(dict)) => {
                    used_key = true;
                    dict.get_str(key)
                        .cloned()
                        .ok_or_else(|| Error::failed(format!("`%`: the key `{key}` is missing")))?
                }
                (Some(_), _) => return Err(Error::failed("`%` with names needs a dictionary")),
                (None, _) => list.next().ok_or_else(|| Error::failed("`%`: not enough values"))?,
            };
            let text = self.directed(&directive, &value, safe)?;
            out.push_str(&text);
            self.spend_on_text(text.len(), out.len())?;
        }
        out.push_str(rest);
        // Python ignores what is left over of a dictionary, a list, and the like.
        let may_be_left = is_dict || used_key || matches!(values, Value::List(_) | Value::Range(_) | Value::Undefined);
        if list.next().is_some() && !may_be_left {
            return Err(Error::failed("`%`: not all values are used"));
        }
        Ok(out)
    }

    fn directive<'f>(
        &mut self,
        format: &'f str,
        list: &mut impl Iterator<Item = Value>,
    ) -> Result<(Directive, &'f str)> {
        let incomplete = || Error::failed("`%`: incomplete format");
        let mut directive = Directive::default();
        let mut rest = format;
        if let Some(inside) = rest.strip_prefix('(') {
            let mut depth = 1;
            let end = inside.char_indices().find(|(_, c)| {
                depth += match c {
                    '(' => 1,
                    ')' => -1,
                    _ => 0,
                };
                depth == 0
            });
            let (end, _) = end.ok_or_else(incomplete)?;
            directive.key = Some(inside.get(..end).unwrap_or_default().to_owned());
            rest = inside.get(end + 1..).unwrap_or_default();
        }
        while let Some(flag) = rest.chars().next().filter(|c| "-+ 0#".contains(*c)) {
            match flag {
                '-' => directive.minus = true,
                '+' => directive.plus = true,
                ' ' => directive.space = true,
                '0' => directive.zero = true,
                _ => directive.hash = true,
            }
            rest = rest.get(1..).unwrap_or_default();
        }
        let mut number = |rest: &mut &'f str| -> Result<Option<i128>> {
            if let Some(after) = rest.strip_prefix('*') {
                *rest = after;
                let value = list.next().and_then(|value| value.as_int());
                return value.map(Some).ok_or_else(|| Error::failed("`%`: `*` wants a whole number"));
            }
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let text = rest.get(..digits).unwrap_or_default();
            *rest = rest.get(digits..).unwrap_or_default();
            Ok(text.parse().ok())
        };
        let width = number(&mut rest)?.unwrap_or(0);
        directive.minus |= width < 0;
        directive.width = usize::try_from(width.unsigned_abs()).unwrap_or(usize::MAX);
        if let Some(after) = rest.strip_prefix('.') {
            rest = after;
            let precision = number(&mut rest)?.unwrap_or(0);
            directive.precision = Some(usize::try_from(precision).unwrap_or(0));
        }
        if directive.width > MAX_WIDTH || directive.precision > Some(MAX_WIDTH) {
            return Err(Error::failed(format!("`%`: a width above {MAX_WIDTH} is not supported")));
        }
        rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
        directive.kind = rest.chars().next().ok_or_else(incomplete)?;
        let after = rest.get(directive.kind.len_utf8()..).unwrap_or_default();
        Ok((directive, after))
    }

    fn directed(&mut self, directive: &Directive, value: &Value, safe: bool) -> Result<String> {
        let body = match directive.kind {
            's' | 'r' => {
                let text = if directive.kind == 's' { self.text(value)? } else { Cow::Owned(self.repr(value)?) };
                let text = match (safe, value) {
                    (true, Value::Safe(_)) if directive.kind == 's' => text,
                    (true, _) => Cow::Owned(escape_html(&text).into_owned()),
                    _ => text,
                };
                match directive.precision {
                    Some(most) => text.chars().take(most).collect(),
                    None => text.into_owned(),
                }
            }
            'c' => {
                let c = match value {
                    Value::Text(text) if text.chars().count() == 1 => text.to_string(),
                    value => value
                        .as_int()
                        .and_then(|code| u32::try_from(code).ok())
                        .and_then(char::from_u32)
                        .map(String::from)
                        .ok_or_else(|| Error::failed("`%c` needs a character"))?,
                };
                if safe {
                    return Err(Error::failed("`%c` of a safe text is not supported"));
                }
                c
            }
            'd' | 'i' | 'u' => {
                let number = match value {
                    Value::Float(number) => truncate(*number)?,
                    value => value.clone(),
                };
                let number = number.as_int().ok_or_else(|| Error::failed("`%d` needs a number"))?;
                return Ok(directive.number(number < 0, "", format!("{}", number.unsigned_abs())));
            }
            'x' | 'X' | 'o' => {
                let number = value.as_int().ok_or_else(|| Error::failed("`%x` needs a whole number"))?;
                let size = number.unsigned_abs();
                let (prefix, digits) = match directive.kind {
                    'x' => ("0x", format!("{size:x}")),
                    'X' => ("0X", format!("{size:X}")),
                    _ => ("0o", format!("{size:o}")),
                };
                return Ok(directive.number(number < 0, if directive.hash { prefix } else { "" }, digits));
            }
            kind @ ('f' | 'F' | 'e' | 'E' | 'g' | 'G') => {
                let number = value.as_float().ok_or_else(|| Error::failed("`%f` needs a number"))?;
                if directive.hash {
                    return Err(Error::failed("`%#` of floats is not supported"));
                }
                let digits = float_digits(number.abs(), kind, directive.precision.unwrap_or(6));
                let own = Directive { precision: None, zero: directive.zero && number.is_finite(), ..directive.copy() };
                return Ok(own.number(number.is_sign_negative() && !number.is_nan(), "", digits));
            }
            kind => return Err(Error::failed(format!("`%{kind}` is not supported"))),
        };
        Ok(directive.padded(body))
    }
}

impl Directive {
    fn copy(&self) -> Self {
        Self { key: None, ..*self }
    }

    fn padded(&self, body: String) -> String {
        let missing = self.width.saturating_sub(body.chars().count());
        let fill = " ".repeat(missing);
        if self.minus { body + &fill } else { fill + &body }
    }

    fn number(&self, negative: bool, prefix: &str, mut digits: String) -> String {
        let sign = match (negative, self.plus, self.space) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (_, _, true) => " ",
            _ => "",
        };
        if let Some(least) = self.precision {
            digits.insert_str(0, &"0".repeat(least.saturating_sub(digits.len())));
        }
        if self.zero && !self.minus {
            let used = sign.len() + prefix.len() + digits.len();
            digits.insert_str(0, &"0".repeat(self.width.saturating_sub(used)));
        }
        self.padded(format!("{sign}{prefix}{digits}"))
    }
}

/// The digits of a number that is not negative, as C's `printf` writes them.
pub(crate) fn float_digits(number: f64, kind: char, precision: usize) -> String {
    let text = if number.is_nan() || number.is_infinite() {
        float_text(number)
    } else {
        match kind.to_ascii_lowercase() {
            'f' => format!("{number:.precision$}"),
            'e' => exponent(number, precision),
            _ => general(number, precision.max(1), false),
        }
    };
    if kind.is_ascii_uppercase() { text.to_uppercase() } else { text }
}

fn exponent(number: f64, precision: usize) -> String {
    let text = format!("{number:.precision$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

/// `g`: so many significant digits, without zeros at the end. `keeps_point` is the format of Python's `format`
/// without a type, which always writes a point or an exponent.
pub(crate) fn general(number: f64, precision: usize, keeps_point: bool) -> String {
    let text = exponent(number, precision - 1);
    let (mantissa, power) = text.split_once('e').unwrap_or((&text, "0"));
    let power: i64 = power.parse().unwrap_or(0);
    let trim = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    let most = precision as i64 - i64::from(keeps_point);
    if power < -4 || power >= most.max(i64::from(keeps_point)) {
        let sign = if power < 0 { '-' } else { '+' };
        return format!("{}e{sign}{:02}", trim(mantissa), power.unsigned_abs());
    }
    let decimals = usize::try_from(precision as i64 - 1 - power).unwrap_or(0);
    let text = trim(&format!("{number:.decimals$}"));
    if keeps_point && !text.contains('.') { text + ".0" } else { text }
}
