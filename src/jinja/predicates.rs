//! The tests after `is`.

use crate::operators::remainder_is;
use crate::render::{Args, Run};
use crate::syntax::ast::Comparison;
use crate::value::{State, check_hashable};
use crate::{Error, Result, Value, methods};
use std::sync::Arc;

type TestFn = fn(&mut Run<'_>, &Value, Args) -> Result<bool>;

/// A test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Test(Option<TestFn>);

impl Test {
    /// A test that does not exist.
    pub(crate) const UNKNOWN: Self = Self(None);

    /// Returns the test of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Some(Self(Some(match name {
            "boolean" => |_, value, args| plain(args, matches!(value, Value::Bool(_))),
            "callable" => |run, value, args| plain(args, run.is_callable(value)),
            "defined" => |_, value, args| plain(args, !value.is_undefined()),
            "undefined" => |_, value, args| plain(args, value.is_undefined()),
            "divisibleby" => |run, value, args| {
                let [number] = args.bind(["num"])?;
                remainder_is(run, value, &needed(number)?, 0)
            },
            "odd" => |run, value, args| {
                args.exactly::<0>(0)?;
                remainder_is(run, value, &Value::Int(2), 1)
            },
            "even" => |run, value, args| {
                args.exactly::<0>(0)?;
                remainder_is(run, value, &Value::Int(2), 0)
            },
            "escaped" => |_, value, args| plain(args, matches!(value, Value::Safe(_))),
            "false" => |_, value, args| plain(args, matches!(value, Value::Bool(false))),
            "true" => |_, value, args| plain(args, matches!(value, Value::Bool(true))),
            "filter" => |_, value, args| {
                args.exactly::<0>(0)?;
                check_hashable(value.level())?;
                Ok(value.as_str().is_some_and(|name| crate::filters::Filter::named(name).is_some()))
            },
            "test" => |_, value, args| {
                args.exactly::<0>(0)?;
                check_hashable(value.level())?;
                Ok(value.as_str().is_some_and(|name| Self::named(name).is_some()))
            },
            "float" => |_, value, args| plain(args, matches!(value, Value::Float(_))),
            "integer" => |_, value, args| plain(args, matches!(value, Value::Int(_) | Value::Big(_))),
            "number" => |_, value, args| plain(args, value.as_float().is_some()),
            "in" => |run, value, args| {
                let [list] = args.bind(["seq"])?;
                run.contains(&needed(list)?, value)
            },
            "iterable" => |_, value, args| plain(args, Run::is_iterable(value)),
            "lower" => |run, value, args| {
                args.exactly::<0>(0)?;
                Ok(methods::is_lower(&run.text(value)?))
            },
            "upper" => |run, value, args| {
                args.exactly::<0>(0)?;
                Ok(methods::is_upper(&run.text(value)?))
            },
            "mapping" => |_, value, args| plain(args, value.is_dict()),
            "none" => |_, value, args| plain(args, value.is_none()),
            "sameas" => |_, value, args| {
                let [other] = args.bind(["other"])?;
                same(value, &needed(other)?)
            },
            "sequence" => |_, value, args| plain(args, is_sequence(value)),
            "string" => |_, value, args| plain(args, value.is_text()),
            "==" | "eq" | "equalto" => |run, value, args| compared(run, Comparison::Equal, value, args),
            "!=" | "ne" => |run, value, args| compared(run, Comparison::NotEqual, value, args),
            ">" | "gt" | "greaterthan" => |run, value, args| compared(run, Comparison::Greater, value, args),
            ">=" | "ge" => |run, value, args| compared(run, Comparison::GreaterOrEqual, value, args),
            "<" | "lt" | "lessthan" => |run, value, args| compared(run, Comparison::Less, value, args),
            "<=" | "le" => |run, value, args| compared(run, Comparison::LessOrEqual, value, args),
            _ => return None,
        })))
    }

    /// Returns whether the test is true for `value`.
    pub(crate) fn apply(self, run: &mut Run<'_>, value: &Value, args: Args) -> Result<bool> {
        match self.0 {
            Some(test) => test(run, value, args),
            None => Err(Error::failed("there is no such test")),
        }
    }
}

fn plain(args: Args, truth: bool) -> Result<bool> {
    args.exactly::<0>(0)?;
    Ok(truth)
}

fn needed(value: Option<Value>) -> Result<Value> {
    value.ok_or_else(|| Error::failed("a test lacks its argument"))
}

fn compared(run: &mut Run<'_>, comparison: Comparison, value: &Value, args: Args) -> Result<bool> {
    let [other] = args.exactly(1)?;
    run.compare(comparison, value, &needed(other)?)
}

/// Whether it has a length and items.
fn is_sequence(value: &Value) -> bool {
    matches!(
        value,
        Value::Undefined
            | Value::Text(_)
            | Value::Safe(_)
            | Value::List(_)
            | Value::Tuple(_)
            | Value::Dict(_)
            | Value::Range(_)
            | Value::Lazy(_)
    )
}

/// Python's `is`, where it does not depend on which equal values share their memory.
fn same(a: &Value, b: &Value) -> Result<bool> {
    Ok(match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::List(a), Value::List(b)) => Arc::ptr_eq(a, b),
        (Value::Dict(a), Value::Dict(b)) => Arc::ptr_eq(a, b),
        (Value::Lazy(a), Value::Lazy(b)) => std::ptr::addr_eq(Arc::as_ptr(a), Arc::as_ptr(b)),
        (Value::Reader(a), Value::Reader(b)) => Arc::ptr_eq(a, b),
        (Value::State(a, x), Value::State(b, y)) => a == b && x == y,
        (Value::Function(a), Value::Function(b)) => a == b,
        (Value::Int(a), Value::Int(b)) if a == b && (-5..=256).contains(a) => true,
        _ if a.type_name() == b.type_name() && a == b => {
            return Err(Error::failed("whether equal values are the same is not known"));
        }
        _ => false,
    })
}

impl Run<'_> {
    /// Whether Python can call it.
    fn is_callable(&self, value: &Value) -> bool {
        match value {
            Value::Undefined | Value::Method(_) | Value::Function(_) => true,
            Value::State(kind, _) => matches!(kind, State::Macro | State::Loop | State::Joiner),
            _ => false,
        }
    }
}
