//! Python's `==`, `<` and truth.

use super::dict::whole;
use super::{Range, Value, View};
use crate::{Error, Result};
use std::cmp::Ordering;

impl PartialEq for Value {
    /// Python's `==`.
    fn eq(&self, other: &Self) -> bool {
        if matches!((self, other), (Self::Lazy(_), _) | (_, Self::Lazy(_)))
            && (self.is_list(), self.is_dict()) != (other.is_list(), other.is_dict())
        {
            // Needs none of its values.
            return false;
        }
        let (a, b) = (self.level(), other.level());
        match (a, b) {
            (Self::Text(a) | Self::Safe(a), Self::Text(b) | Self::Safe(b)) => a == b,
            (Self::Undefined, Self::Undefined) | (Self::None, Self::None) => true,
            (Self::List(a), Self::List(b)) | (Self::Tuple(a), Self::Tuple(b)) => ***a == ***b,
            (Self::Dict(a), Self::Dict(b)) => {
                a.len() == b.len() && a.iter().all(|(key, value)| matches!(b.get(key), Ok(Some(v)) if v == value))
            }
            (Self::View(View::Values, a), Self::View(View::Values, b)) => std::sync::Arc::ptr_eq(a, b),
            (Self::View(kind, a), Self::View(other, b)) => {
                kind == other
                    && a.len() == b.len()
                    && a.iter()
                        .all(|(key, value)| matches!(b.get(key), Ok(Some(v)) if *kind == View::Keys || v == value))
            }
            (Self::Range(a), Self::Range(b)) => same_numbers(a, b),
            (Self::Method(a), Self::Method(b)) => a.name == b.name && a.receiver == b.receiver,
            (Self::Function(a), Self::Function(b)) => a == b,
            (Self::Reader(a), Self::Reader(b)) => std::sync::Arc::ptr_eq(a, b),
            (Self::State(a, x), Self::State(b, y)) => a == b && x == y,
            _ => numbers(a, b) == Some(Ordering::Equal),
        }
    }
}

fn same_numbers(a: &Range, b: &Range) -> bool {
    let len = a.len();
    len == b.len() && (len == 0 || a.start == b.start && (len == 1 || a.step == b.step))
}

/// Compares two numbers by their exact values.
fn numbers(a: &Value, b: &Value) -> Option<Ordering> {
    match (a, b) {
        (Value::Int(a), Value::Int(b)) => Some(a.cmp(b)),
        (Value::Float(a), Value::Float(b)) => a.partial_cmp(b),
        (Value::Float(a), b) => mixed(b.as_int()?, *a).map(Ordering::reverse),
        (a, Value::Float(b)) => mixed(a.as_int()?, *b),
        (a, b) => Some(a.as_int()?.cmp(&b.as_int()?)),
    }
}

fn mixed(a: i128, b: f64) -> Option<Ordering> {
    if b.is_nan() {
        return None;
    }
    match whole(b.floor()) {
        Some(floor) => Some(a.cmp(&floor).then(if b > b.floor() { Ordering::Less } else { Ordering::Equal })),
        None => Some(if b > 0.0 { Ordering::Less } else { Ordering::Greater }),
    }
}

fn is_number(value: &Value) -> bool {
    matches!(value, Value::Bool(_) | Value::Int(_) | Value::Big(_) | Value::Float(_))
}

/// Compares by Python's `<`; `None` for a number that is not comparable (NaN).
///
/// # Errors
/// When Python can't compare values of these types.
pub(crate) fn order(a: &Value, b: &Value) -> Result<Option<Ordering>> {
    let (a, b) = (a.level(), b.level());
    match (a, b) {
        (Value::Text(a) | Value::Safe(a), Value::Text(b) | Value::Safe(b)) => Ok(Some(a.cmp(b))),
        (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
            for (a, b) in a.iter().zip(b.iter()) {
                if a != b {
                    return order(a, b);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        _ if is_number(a) && is_number(b) => Ok(numbers(a, b)),
        _ => {
            let (a, b) = (a.type_name(), b.type_name());
            Err(Error::failed(format!("values of the types {a} and {b} can't be compared")))
        }
    }
}

/// Whether `a < b`, for sorting.
///
/// # Errors
/// As [`order`].
pub(crate) fn is_less(a: &Value, b: &Value) -> Result<bool> {
    Ok(order(a, b)? == Some(Ordering::Less))
}

impl Value {
    /// Python's truth of a value.
    #[must_use]
    pub fn is_true(&self) -> bool {
        match self {
            Self::Undefined | Self::None => false,
            Self::Bool(truth) => *truth,
            Self::Int(number) => *number != 0,
            Self::Float(number) => *number != 0.0,
            Self::Text(text) | Self::Safe(text) => !text.is_empty(),
            Self::List(items) | Self::Tuple(items) => !items.is_empty(),
            Self::Dict(dict) | Self::View(_, dict) => !dict.is_empty(),
            Self::Range(range) => range.len() > 0,
            Self::Lazy(lazy) => lazy.level().is_true(),
            Self::Big(_) | Self::Reader(_) | Self::Method(_) | Self::Function(_) | Self::State(..) => true,
        }
    }
}
