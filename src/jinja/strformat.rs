//! Python's `str.format`.

use crate::numbers::float_text;
use crate::printf::{float_digits, general};
use crate::render::{Args, Run};
use crate::{Error, Result, Value};

/// Widest field in characters.
const MAX_WIDTH: usize = 4_096;

/// What is after the colon of a field.
#[derive(Default)]
struct Spec {
    fill: Option<char>,
    align: Option<char>,
    sign: Option<char>,
    hash: bool,
    zero: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Run<'_> {
    /// `text.format(…)`.
    pub(crate) fn format(&mut self, value: &Value, args: Args) -> Result<Value> {
        if matches!(value, Value::Safe(_)) {
            return Err(Error::failed("`format` of a safe text is not supported"));
        }
        let mut automatic = Some(0);
        let text = self.format_text(value.as_str().unwrap_or_default(), &args, &mut automatic, 2)?;
        Ok(Value::from(text))
    }

    fn format_text(
        &mut self,
        format: &str,
        args: &Args,
        automatic: &mut Option<usize>,
        depth: usize,
    ) -> Result<String> {
        if depth == 0 {
            return Err(Error::failed("`format`: fields are nested too deeply"));
        }
        let mut out = String::new();
        let mut rest = format;
        while let Some(at) = rest.find(['{', '}']) {
            out.push_str(rest.get(..at).unwrap_or_default());
            let mark = rest.get(at..=at).unwrap_or_default();
            let after = rest.get(at + 1..).unwrap_or_default();
            if let Some(after) = after.strip_prefix(mark) {
                out.push_str(mark);
                rest = after;
                continue;
            }
            if mark == "}" {
                return Err(Error::failed("`format`: a single `}`"));
            }
            let end = closing(after).ok_or_else(|| Error::failed("`format`: a single `{`"))?;
            let field = after.get(..end).unwrap_or_default();
            let text = self.field(field, args, automatic, depth)?;
            out.push_str(&text);
            self.spend_on_text(text.len(), out.len())?;
            rest = after.get(end + 1..).unwrap_or_default();
        }
        out.push_str(rest);
        Ok(out)
    }

    fn field(&mut self, field: &str, args: &Args, automatic: &mut Option<usize>, depth: usize) -> Result<String> {
        let end = name_end(field);
        let (name, rest) = field.split_at(end);
        let (conversion, spec) = match rest.strip_prefix('!') {
            Some(after) => {
                let (conversion, spec) = after.split_once(':').unwrap_or((after, ""));
                (Some(conversion), spec)
            }
            None => (None, rest.strip_prefix(':').unwrap_or("")),
        };
        let value = self.field_value(name, args, automatic)?;
        let value = match conversion {
            None => value,
            Some("s") => Value::from(self.text(&value)?.into_owned()),
            Some("r") => Value::from(self.repr(&value)?),
            Some(_) => return Err(Error::failed("`format`: the conversion is not supported")),
        };
        let spec =
            if spec.contains('{') { self.format_text(spec, args, automatic, depth - 1)? } else { spec.to_owned() };
        self.formatted(&value, &spec)
    }

    fn field_value(&mut self, name: &str, args: &Args, automatic: &mut Option<usize>) -> Result<Value> {
        let end = name.find(['.', '[']).unwrap_or(name.len());
        let (first, mut path) = name.split_at(end);
        let missing = || Error::failed("`format`: a value is missing");
        let mut value = if first.is_empty() {
            let at = automatic.as_mut().ok_or_else(|| Error::failed("`format`: numbers of fields are mixed"))?;
            *at += 1;
            args.positional.get(*at - 1).cloned().ok_or_else(missing)?
        } else if first.bytes().all(|b| b.is_ascii_digit()) {
            if automatic.is_some_and(|at| at > 0) {
                return Err(Error::failed("`format`: numbers of fields are mixed"));
            }
            *automatic = None;
            first.parse().ok().and_then(|at: usize| args.positional.get(at).cloned()).ok_or_else(missing)?
        } else {
            let found = args.named.iter().find(|(name, _)| **name == *first);
            found.map(|(_, value)| value.clone()).ok_or_else(missing)?
        };
        while !path.is_empty() {
            if value.is_undefined() {
                return Err(Error::failed("a value is undefined"));
            }
            if let Some(after) = path.strip_prefix('.') {
                let (name, after) = after.split_at(after.find(['.', '[']).unwrap_or(after.len()));
                value = self.attribute(&value, name)?;
                path = after;
            } else {
                let inside = path.strip_prefix('[').and_then(|inside| inside.split_once(']'));
                let (key, after) = inside.ok_or_else(|| Error::failed("`format`: a bracket has no end"))?;
                let key = match key.parse::<i64>() {
                    Ok(at) if key.bytes().all(|b| b.is_ascii_digit()) => Value::Int(at),
                    _ => Value::from(key),
                };
                value = self.item(&value, &key)?;
                path = after;
            }
        }
        Ok(value)
    }

    /// Python's `format(value, spec)`.
    fn formatted(&mut self, value: &Value, spec: &str) -> Result<String> {
        if spec.is_empty() {
            return self.text(value).map(std::borrow::Cow::into_owned);
        }
        let spec = Spec::parse(spec)?;
        match value {
            Value::Text(text) | Value::Safe(text) => spec.text(text),
            Value::Float(number) => spec.float(*number),
            other => match other.as_int() {
                Some(number) => spec.int(number),
                None => {
                    let name = other.type_name();
                    Err(Error::failed(format!("`format`: a value of the type {name} has no format")))
                }
            },
        }
    }
}

/// The position of the brace that closes a field.
fn closing(text: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => return Some(at),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The end of a field's name: `!` and `:` in brackets belong to it.
fn name_end(field: &str) -> usize {
    let mut inside = false;
    for (at, c) in field.char_indices() {
        match c {
            '[' => inside = true,
            ']' => inside = false,
            '!' | ':' if !inside => return at,
            _ => {}
        }
    }
    field.len()
}

impl Spec {
    fn parse(text: &str) -> Result<Self> {
        let wrong = || Error::failed("`format`: the format is invalid or not supported");
        let mut spec = Self::default();
        let mut rest = text;
        let mut chars = text.chars();
        let is_align = |c: Option<char>| c.filter(|c| matches!(c, '<' | '>' | '^' | '='));
        if let (Some(fill), Some(align)) = (chars.next(), is_align(chars.next())) {
            (spec.fill, spec.align) = (Some(fill), Some(align));
            rest = chars.as_str();
        } else if let Some(align) = is_align(text.chars().next()) {
            spec.align = Some(align);
            rest = text.get(1..).unwrap_or_default();
        }
        let mut skip = |marks: &[char]| {
            let c = rest.chars().next().filter(|c| marks.contains(c))?;
            rest = rest.get(c.len_utf8()..).unwrap_or_default();
            Some(c)
        };
        spec.sign = skip(&['+', '-', ' ']);
        spec.hash = skip(&['#']).is_some();
        spec.zero = skip(&['0']).is_some();
        let number = |rest: &mut &str| {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let (number, after) = rest.split_at(digits);
            *rest = after;
            number.parse::<usize>().ok()
        };
        spec.width = number(&mut rest).unwrap_or(0);
        if let Some(grouping) = rest.chars().next().filter(|c| matches!(c, ',' | '_')) {
            spec.grouping = Some(grouping);
            rest = rest.get(1..).unwrap_or_default();
        }
        if let Some(after) = rest.strip_prefix('.') {
            rest = after;
            spec.precision = Some(number(&mut rest).ok_or_else(wrong)?);
        }
        let mut chars = rest.chars();
        spec.kind = chars.next();
        if chars.next().is_some() || spec.hash || spec.width > MAX_WIDTH || spec.precision > Some(MAX_WIDTH) {
            return Err(wrong());
        }
        Ok(spec)
    }

    fn wrong() -> Error {
        Error::failed("`format`: the format does not fit the value")
    }

    fn padded(&self, sign: &str, body: &str, default: char) -> String {
        let length = sign.len() + body.chars().count();
        let missing = self.width.saturating_sub(length);
        let align = self.align.unwrap_or(if self.zero && default == '>' { '=' } else { default });
        let fill = self.fill.unwrap_or(if self.zero { '0' } else { ' ' });
        let fill = |count: usize| fill.to_string().repeat(count);
        match align {
            '<' => format!("{sign}{body}{}", fill(missing)),
            '^' => format!("{}{sign}{body}{}", fill(missing / 2), fill(missing - missing / 2)),
            '=' => format!("{sign}{}{body}", fill(missing)),
            _ => format!("{}{sign}{body}", fill(missing)),
        }
    }

    fn text(&self, text: &str) -> Result<String> {
        if self.sign.is_some() || self.grouping.is_some() || self.align == Some('=') {
            return Err(Self::wrong());
        }
        if self.kind.is_some_and(|kind| kind != 's') {
            return Err(Self::wrong());
        }
        let text: String = text.chars().take(self.precision.unwrap_or(usize::MAX)).collect();
        Ok(self.padded("", &text, '<'))
    }

    fn sign(&self, negative: bool) -> &'static str {
        match (negative, self.sign) {
            (true, _) => "-",
            (_, Some('+')) => "+",
            (_, Some(' ')) => " ",
            _ => "",
        }
    }

    /// The digits before the point in groups.
    fn grouped(&self, digits: &str) -> Result<String> {
        let Some(mark) = self.grouping else { return Ok(digits.to_owned()) };
        if self.zero || self.align == Some('=') {
            return Err(Error::failed("`format` of groups with leading zeros is not supported"));
        }
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        let (whole, rest) = digits.split_at(end);
        let mut out = String::new();
        for (at, digit) in whole.chars().enumerate() {
            if at > 0 && (whole.len() - at) % 3 == 0 {
                out.push(mark);
            }
            out.push(digit);
        }
        Ok(out + rest)
    }

    fn int(&self, number: i128) -> Result<String> {
        if matches!(self.kind, Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%')) {
            return self.float(number as f64);
        }
        let size = number.unsigned_abs();
        if self.kind == Some('c') {
            let c = u32::try_from(number).ok().and_then(char::from_u32).ok_or_else(Self::wrong)?;
            let is_plain = self.sign.is_none() && self.grouping.is_none() && self.precision.is_none();
            return if is_plain { Ok(self.padded("", &c.to_string(), '>')) } else { Err(Self::wrong()) };
        }
        let digits = match self.kind {
            None | Some('d') => size.to_string(),
            Some('x') if self.grouping.is_none() => format!("{size:x}"),
            Some('X') if self.grouping.is_none() => format!("{size:X}"),
            Some('o') if self.grouping.is_none() => format!("{size:o}"),
            Some('b') if self.grouping.is_none() => format!("{size:b}"),
            _ => return Err(Self::wrong()),
        };
        if self.precision.is_some() {
            return Err(Self::wrong());
        }
        Ok(self.padded(self.sign(number < 0), &self.grouped(&digits)?, '>'))
    }

    fn float(&self, number: f64) -> Result<String> {
        let size = number.abs();
        let digits = match self.kind {
            None => match self.precision {
                None => float_text(size),
                Some(precision) if size.is_finite() => general(size, precision.max(1), true),
                Some(_) => float_text(size),
            },
            Some('%') if size.is_finite() => float_digits(size * 100.0, 'f', self.precision.unwrap_or(6)) + "%",
            Some(kind @ ('e' | 'E' | 'f' | 'F' | 'g' | 'G')) => float_digits(size, kind, self.precision.unwrap_or(6)),
            _ => return Err(Self::wrong()),
        };
        let negative = number.is_sign_negative() && !number.is_nan();
        Ok(self.padded(self.sign(negative), &self.grouped(&digits)?, '>'))
    }
}
