//! Python's arithmetic, joining and membership.

use crate::numbers::too_large;
use crate::render::{Run, escaped};
use crate::syntax::ast::Binary;
use crate::value::Items;
use crate::{Error, Result, Value, View};
use std::sync::Arc;

fn unsupported(mark: &str, a: &Value, b: &Value) -> Error {
    let (a, b) = (a.type_name(), b.type_name());
    Error::failed(format!("`{mark}` does not work with values of the types {a} and {b}"))
}

impl Run<'_> {
    /// The result of an operator.
    pub(crate) fn binary(&mut self, operator: Binary, a: &Value, b: &Value) -> Result<Value> {
        let (a, b) = (a.level(), b.level());
        match operator {
            Binary::Add => self.add(a, b),
            Binary::Subtract => arithmetic("-", a, b, i128::checked_sub, |a, b| Ok(a - b)),
            Binary::Multiply => self.multiply(a, b),
            Binary::Divide => divide(a, b),
            Binary::FloorDivide => arithmetic("//", a, b, floor_div, |a, b| float_div_mod(a, b).map(|r| r.0)),
            Binary::Remainder => match a {
                Value::Text(text) => self.printf(text, b, false).map(Value::from),
                Value::Safe(text) => self.printf(text, b, true).map(|text| Value::Safe(text.into())),
                _ => arithmetic("%", a, b, floor_mod, |a, b| float_div_mod(a, b).map(|r| r.1)),
            },
            Binary::Power => power(a, b),
        }
    }

    fn add(&mut self, a: &Value, b: &Value) -> Result<Value> {
        Ok(match (a, b) {
            (Value::Text(a), Value::Text(b)) => Value::Text(self.joined(&[a, b])?),
            (Value::Safe(a), b) if b.is_text() => Value::Safe(self.joined(&[&**a, &*escaped(b)])?),
            (a, Value::Safe(b)) if a.is_text() => Value::Safe(self.joined(&[&*escaped(a), &**b])?),
            (Value::List(a), Value::List(b)) => Value::List(self.chained(a, b)?),
            (Value::Tuple(a), Value::Tuple(b)) => Value::Tuple(self.chained(a, b)?),
            _ => return arithmetic("+", a, b, i128::checked_add, |a, b| Ok(a + b)),
        })
    }

    fn chained(&mut self, a: &Items, b: &Items) -> Result<Arc<Items>> {
        self.allow_values(a.len() + b.len())?;
        Ok(Arc::new(Items::new(a.iter().chain(b.iter()).cloned().collect::<Vec<_>>())?))
    }

    fn multiply(&mut self, a: &Value, b: &Value) -> Result<Value> {
        let (list, count) = match (a.as_int(), b.as_int()) {
            (None, Some(count)) if a.is_text() || a.is_list() => (a, count),
            (Some(count), None) if b.is_text() || b.is_list() => (b, count),
            _ => return arithmetic("*", a, b, i128::checked_mul, |a, b| Ok(a * b)),
        };
        let count = usize::try_from(count.max(0)).map_err(|_| too_large())?;
        let repeated = |run: &mut Self, items: &Items| {
            run.allow_values(items.len().saturating_mul(count))?;
            let values = std::iter::repeat_n(&**items, count).flatten().cloned().collect::<Vec<_>>();
            Ok::<_, Error>(Arc::new(Items::new(values)?))
        };
        Ok(match list {
            Value::Text(text) => Value::Text(self.repeated(text, count)?),
            Value::Safe(text) => Value::Safe(self.repeated(text, count)?),
            Value::List(items) => Value::List(repeated(self, items)?),
            Value::Tuple(items) => Value::Tuple(repeated(self, items)?),
            _ => return arithmetic("*", a, b, i128::checked_mul, |a, b| Ok(a * b)),
        })
    }

    fn repeated(&mut self, text: &str, count: usize) -> Result<Arc<str>> {
        self.allow(text.len().saturating_mul(count))?;
        Ok(text.repeat(count).into())
    }

    /// Whether `list` contains `value`.
    pub(crate) fn contains(&mut self, list: &Value, value: &Value) -> Result<bool> {
        match list.level() {
            Value::Text(text) | Value::Safe(text) => {
                let Some(part) = value.as_str() else {
                    let name = value.type_name();
                    return Err(Error::failed(format!("`in` a text needs a text on its left, not {name}")));
                };
                self.spend(text.len())?;
                Ok(text.contains(part))
            }
            Value::List(items) | Value::Tuple(items) => {
                self.visit(items.len())?;
                Ok(items.iter().any(|item| item == value))
            }
            Value::Dict(dict) | Value::View(View::Keys, dict) => Ok(dict.get(value)?.is_some()),
            Value::View(View::Values, dict) => {
                self.visit(dict.len())?;
                Ok(dict.iter().any(|(_, item)| item == value))
            }
            Value::View(View::Items, dict) => match value.level() {
                Value::Tuple(pair) => match &***pair {
                    [key, item] => Ok(dict.get(key)? == Some(item)),
                    _ => Ok(false),
                },
                _ => Ok(false),
            },
            Value::Range(range) => match value {
                value if value.as_float().is_some() => {
                    self.visit(usize::try_from(range.len()).unwrap_or(usize::MAX))?;
                    Ok(range.values().any(|item| item == *value))
                }
                _ => Ok(false),
            },
            Value::Reader(_) | Value::State(..) => {
                let mut found = false;
                let mut items = self.iterate(list)?;
                while !found && let Some(item) = items.next() {
                    found = item == *value;
                }
                Ok(found)
            }
            Value::Undefined => Ok(false),
            other => {
                let name = other.type_name();
                Err(Error::failed(format!("a value of the type {name} is not iterable")))
            }
        }
    }
}

/// An operator on two whole numbers, or on two floats if one is a float.
fn arithmetic(
    mark: &str,
    a: &Value,
    b: &Value,
    whole: fn(i128, i128) -> Option<i128>,
    float: fn(f64, f64) -> Result<f64>,
) -> Result<Value> {
    if let (Some(x), Some(y)) = (a.as_int(), b.as_int()) {
        if y == 0 && mark.starts_with(['/', '%']) {
            return Err(zero());
        }
        return whole(x, y).map(Value::from).ok_or_else(too_large);
    }
    match (a.as_float(), b.as_float()) {
        (Some(a), Some(b)) => Ok(Value::Float(float(a, b)?)),
        _ => Err(unsupported(mark, a, b)),
    }
}

fn zero() -> Error {
    Error::failed("division by zero")
}

fn floor_div(a: i128, b: i128) -> Option<i128> {
    let quotient = a.checked_div(b)?;
    Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
}

fn floor_mod(a: i128, b: i128) -> Option<i128> {
    let rest = a.checked_rem(b)?;
    Some(if rest != 0 && (rest < 0) != (b < 0) { rest + b } else { rest })
}

/// Python's `divmod` of floats.
pub(crate) fn float_div_mod(a: f64, b: f64) -> Result<(f64, f64)> {
    if b == 0.0 {
        return Err(zero());
    }
    let mut rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest == 0.0 {
        rest = 0.0_f64.copysign(b);
    } else if (b < 0.0) != (rest < 0.0) {
        rest += b;
        quotient -= 1.0;
    }
    let quotient = if quotient == 0.0 {
        0.0_f64.copysign(a / b)
    } else {
        let floor = quotient.floor();
        if quotient - floor > 0.5 { floor + 1.0 } else { floor }
    };
    Ok((quotient, rest))
}

fn divide(a: &Value, b: &Value) -> Result<Value> {
    let (Some(x), Some(y)) = (a.as_float(), b.as_float()) else { return Err(unsupported("/", a, b)) };
    if y == 0.0 {
        return Err(zero());
    }
    if let (Some(a), Some(b)) = (a.as_int(), b.as_int()) {
        let is_exact = |number: i128| (number as f64) as i128 == number;
        if a != 0 && a % b == 0 {
            return Ok(Value::Float((a / b) as f64));
        }
        if !is_exact(a) || !is_exact(b) {
            return Err(Error::failed("division of whole numbers of more than 53 bits"));
        }
    }
    Ok(Value::Float(x / y))
}

fn power(a: &Value, b: &Value) -> Result<Value> {
    if let (Some(base), Some(exponent)) = (a.as_int(), b.as_int())
        && exponent >= 0
    {
        if matches!(base, -1..=1) {
            let number = if exponent == 0 || base == 1 || (base == -1 && exponent % 2 == 0) { 1 } else { base };
            return Ok(Value::from(number));
        }
        let exponent = u32::try_from(exponent).map_err(|_| too_large())?;
        return base.checked_pow(exponent).map(Value::from).ok_or_else(too_large);
    }
    let (Some(x), Some(y)) = (a.as_float(), b.as_float()) else { return Err(unsupported("**", a, b)) };
    if x == 0.0 && y < 0.0 {
        return Err(zero());
    }
    let power = x.powf(y);
    if x < 0.0 && x.is_finite() && y.is_finite() && y.trunc() != y {
        return Err(Error::failed("a power is a complex number"));
    }
    if power.is_infinite() && x.is_finite() && y.is_finite() {
        return Err(Error::failed("a power is too large"));
    }
    Ok(Value::Float(power))
}

/// `-value`.
pub(crate) fn negative(value: &Value) -> Result<Value> {
    match value {
        Value::Float(number) => Ok(Value::Float(-number)),
        value => match value.as_int() {
            Some(number) => number.checked_neg().map(Value::from).ok_or_else(too_large),
            None => Err(Error::failed(format!("`-` does not work with a value of the type {}", value.type_name()))),
        },
    }
}

/// `+value`.
pub(crate) fn positive(value: &Value) -> Result<Value> {
    match value {
        Value::Float(number) => Ok(Value::Float(*number)),
        value => value
            .as_int()
            .map(Value::from)
            .ok_or_else(|| Error::failed(format!("`+` does not work with a value of the type {}", value.type_name()))),
    }
}

/// Whether `a % b == wanted`.
pub(crate) fn remainder_is(run: &mut Run<'_>, a: &Value, b: &Value, wanted: i64) -> Result<bool> {
    Ok(run.binary(Binary::Remainder, a, b)? == Value::Int(wanted))
}
