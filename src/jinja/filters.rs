//! The filters after `|`.

mod lists;
mod texts;

use crate::numbers::{parse_float, parse_int, round, round_int, truncate};
use crate::operators::negative;
use crate::render::{Args, Run, escape_html};
use crate::{Error, Result, Value, View, json};

pub(crate) type FilterFn = fn(&mut Run<'_>, &Value, Args) -> Result<Value>;

/// A filter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Filter(Option<FilterFn>);

impl Filter {
    /// A filter that does not exist.
    pub(crate) const UNKNOWN: Self = Self(None);

    /// Returns the filter of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        let own: FilterFn = match name {
            "abs" => abs,
            "attr" => attr,
            "count" | "length" => length,
            "d" | "default" => default,
            "e" | "escape" => escape,
            "float" => float,
            "forceescape" => |run, value, args| {
                args.exactly::<0>(0)?;
                let text = run.text(value)?;
                Ok(Value::Safe(escape_html(&text).into()))
            },
            "int" => int,
            "items" => items,
            "round" => rounded,
            "safe" => |run, value, args| {
                args.exactly::<0>(0)?;
                Ok(Value::Safe(run.text(value)?.into()))
            },
            "string" => |run, value, args| {
                args.exactly::<0>(0)?;
                soft(run, value)
            },
            "tojson" => json::tojson,
            "random" => |_, _, _| Err(Error::failed("`random` depends on chance")),
            "urlize" => |_, _, _| Err(Error::failed("the filter `urlize` is not supported")),
            _ => return lists::named(name).or_else(|| texts::named(name)).map(|filter| Self(Some(filter))),
        };
        Some(Self(Some(own)))
    }

    /// Returns the filtered value.
    pub(crate) fn apply(self, run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
        match self.0 {
            Some(filter) => filter(run, value, args),
            None => Err(Error::failed("there is no such filter")),
        }
    }
}

/// The value as a text; a safe one stays safe.
fn soft(run: &mut Run<'_>, value: &Value) -> Result<Value> {
    if value.is_text() { Ok(value.clone()) } else { Ok(Value::from(run.text(value)?.into_owned())) }
}

/// The whole number of an argument.
fn whole(value: Option<Value>, otherwise: i128) -> Result<i128> {
    let Some(value) = value else { return Ok(otherwise) };
    value.as_int().ok_or_else(|| Error::failed(format!("a whole number is needed, not {}", value.type_name())))
}

fn is_true(value: Option<Value>) -> bool {
    value.is_some_and(|value| value.is_true())
}

fn abs(_: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    match value {
        Value::Float(number) => Ok(Value::Float(number.abs())),
        value => match value.as_int() {
            Some(number) if number < 0 => negative(value),
            Some(number) => Ok(Value::from(number)),
            None => Err(Error::failed(format!("`abs` needs a number, not {}", value.type_name()))),
        },
    }
}

fn attr(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [name] = args.bind(["name"])?;
    let name = name.unwrap_or_default();
    let Some(name) = name.as_str() else { return Err(Error::failed("`attr` needs the name of an attribute")) };
    if value.is_undefined() {
        return Err(Error::failed("a value is undefined"));
    }
    // Items do not count.
    Ok(run.member(value.level(), name)?.unwrap_or_default())
}

fn length(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    let len = run.len(value)?;
    len.map(Value::from)
        .ok_or_else(|| Error::failed(format!("a value of the type {} has no length", value.type_name())))
}

fn default(_: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [default, boolean] = args.bind(["default_value", "boolean"])?;
    let replaced = value.is_undefined() || (is_true(boolean) && !value.is_true());
    Ok(if replaced { default.unwrap_or_else(|| Value::from("")) } else { value.clone() })
}

fn escape(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    if matches!(value, Value::Safe(_)) {
        return Ok(value.clone());
    }
    let text = run.text(value)?;
    Ok(Value::Safe(escape_html(&text).into()))
}

fn float(_: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [default] = args.bind(["default"])?;
    if value.is_undefined() {
        return Err(Error::failed("a value is undefined"));
    }
    let number = match value.as_str() {
        Some(text) => parse_float(text),
        None => value.as_float(),
    };
    Ok(number.map(Value::Float).or(default).unwrap_or(Value::Float(0.0)))
}

fn int(_: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [default, base] = args.bind(["default", "base"])?;
    let default = default.unwrap_or(Value::Int(0));
    match value {
        Value::Undefined => Err(Error::failed("a value is undefined")),
        Value::Text(text) | Value::Safe(text) => {
            if let Some(number) = parse_int(text, whole(base, 10)?)? {
                return Ok(Value::from(number));
            }
            match parse_float(text) {
                Some(number) if number.is_finite() => truncate(number),
                _ => Ok(default),
            }
        }
        Value::Float(number) if number.is_nan() => Ok(default),
        // Python's error of an infinite number is not one that the filter catches.
        Value::Float(number) if number.is_infinite() => truncate(*number),
        Value::Float(number) => truncate(*number),
        value => Ok(value.as_int().map_or(default, Value::from)),
    }
}

fn items(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    let pairs = match value.level() {
        Value::Undefined => Vec::new(),
        Value::Dict(dict) => run.collect(&Value::View(View::Items, dict.clone()))?.to_vec(),
        _ => return Err(Error::failed("can only get item pairs from a mapping")),
    };
    run.iterator(pairs)
}

fn rounded(_: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [precision, method] = args.bind(["precision", "method"])?;
    let method = method.unwrap_or_else(|| Value::from("common"));
    let precision = whole(precision, 0)?;
    let method = match method.as_str() {
        Some(method @ ("common" | "ceil" | "floor")) => method,
        _ => return Err(Error::failed("the method of `round` is common, ceil or floor")),
    };
    let needs = || Error::failed(format!("`round` needs a number, not {}", value.type_name()));
    if method == "common" {
        return match value {
            Value::Float(number) => round(*number, precision).map(Value::Float),
            value => {
                let number = value.as_int().ok_or_else(needs)?;
                let unit = u32::try_from(-precision).ok().map(|digits| 10_i128.checked_pow(digits));
                match unit {
                    // Decimals do not change a whole number.
                    None => Ok(Value::from(number)),
                    Some(unit) => Ok(Value::from(unit.map_or(0, |unit| round_int(number, unit)))),
                }
            }
        };
    }
    let number = value.as_float().ok_or_else(needs)?;
    // Python's `10 ** precision` is a whole number, or a float if the precision is negative.
    let scale = 10_f64.powi(i32::try_from(precision).map_err(|_| Error::failed("the precision is too large"))?);
    let scaled = number * scale;
    if !scaled.is_finite() {
        return Err(Error::failed("the number is not finite"));
    }
    let whole = if method == "ceil" { scaled.ceil() } else { scaled.floor() };
    // Python's `math.floor` returns a whole number, which has no negative zero.
    Ok(Value::Float((whole + 0.0) / scale))
}
