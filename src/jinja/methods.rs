//! Methods and attributes of Python's types.

mod cases;
mod text;

pub(crate) use cases::{is_lower, is_upper};
pub(crate) use text::{call_text, split_lines};

use crate::render::{Args, Run};
use crate::{Error, Result, Value, View};

/// An attribute of a type.
pub(crate) enum Member {
    /// A method, by its name.
    Method(&'static str),
    /// A value.
    Value(Value),
    /// One that Jinja2's sandbox hides, since it is private or changes the value.
    Hidden,
}

const TEXT: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];
const SAFE: [&str; 3] = ["escape", "striptags", "unescape"];
const DICT: [&str; 6] = ["get", "items", "keys", "values", "copy", "fromkeys"];
const CHANGES_DICT: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];
const SEQUENCE: [&str; 2] = ["count", "index"];
const CHANGES_LIST: [&str; 8] = ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const INT: [&str; 6] = ["as_integer_ratio", "bit_count", "bit_length", "conjugate", "from_bytes", "to_bytes"];
const FLOAT: [&str; 5] = ["as_integer_ratio", "conjugate", "fromhex", "hex", "is_integer"];

/// Whether an attribute of a dictionary is not one of its items.
pub(crate) fn is_dict_attribute(name: &str) -> bool {
    DICT.contains(&name) || CHANGES_DICT.contains(&name) || is_special(name)
}

/// Whether it is a name that every object of Python has.
fn is_special(name: &str) -> bool {
    name.starts_with("__") && name.ends_with("__")
}

/// Returns the attribute `name` of the type of `value`.
pub(crate) fn member(value: &Value, name: &str) -> Option<Member> {
    let one_of = |names: &[&'static str]| names.iter().find(|known| **known == name).map(|name| Member::Method(name));
    let hidden = |names: &[&str]| names.contains(&name).then_some(Member::Hidden);
    if is_special(name) {
        return Some(Member::Hidden);
    }
    match value {
        Value::Text(_) => one_of(&TEXT),
        Value::Safe(_) => one_of(&TEXT).or_else(|| one_of(&SAFE)),
        Value::Dict(_) => one_of(&DICT).or_else(|| hidden(&CHANGES_DICT)),
        Value::List(_) => one_of(&SEQUENCE).or_else(|| one_of(&["copy"])).or_else(|| hidden(&CHANGES_LIST)),
        Value::Tuple(items) => match (name, &***items) {
            ("grouper", [key, _]) if items.is_group => Some(Member::Value(key.clone())),
            ("list", [_, list]) if items.is_group => Some(Member::Value(list.clone())),
            _ => one_of(&SEQUENCE),
        },
        Value::Range(range) => match name {
            "start" => Some(Member::Value(Value::Int(range.start))),
            "stop" => Some(Member::Value(Value::Int(range.stop))),
            "step" => Some(Member::Value(Value::Int(range.step))),
            _ => one_of(&SEQUENCE),
        },
        Value::View(kind, _) => {
            one_of(&["mapping"]).or_else(|| if *kind == View::Values { None } else { one_of(&["isdisjoint"]) })
        }
        Value::Bool(_) | Value::Int(_) | Value::Big(_) => match name {
            "real" | "numerator" => Some(Member::Value(value.as_int().map_or(Value::None, Value::from))),
            "imag" => Some(Member::Value(Value::Int(0))),
            "denominator" => Some(Member::Value(Value::Int(1))),
            _ => one_of(&INT),
        },
        Value::Float(_) => match name {
            "real" => Some(Member::Value(value.clone())),
            "imag" => Some(Member::Value(Value::Float(0.0))),
            _ => one_of(&FLOAT),
        },
        _ => None,
    }
}

fn unsupported(name: &str) -> Error {
    Error::failed(format!("the method `{name}` is not supported"))
}

/// Calls a method of `value`.
pub(crate) fn call(run: &mut Run<'_>, value: &Value, name: &str, args: Args) -> Result<Value> {
    match value.level() {
        Value::Text(_) | Value::Safe(_) => call_text(run, value, name, args),
        Value::Dict(dict) => {
            let view = |kind| Ok(Value::View(kind, dict.clone()));
            match name {
                "get" => {
                    let [key, default] = args.exactly(1)?;
                    let found = dict.get(&key.unwrap_or_default())?.cloned();
                    Ok(found.or(default).unwrap_or(Value::None))
                }
                "items" => args.exactly::<0>(0).and_then(|_| view(View::Items)),
                "keys" => args.exactly::<0>(0).and_then(|_| view(View::Keys)),
                "values" => args.exactly::<0>(0).and_then(|_| view(View::Values)),
                "copy" => args.exactly::<0>(0).map(|_| Value::Dict(dict.clone())),
                _ => Err(unsupported(name)),
            }
        }
        list @ (Value::List(_) | Value::Tuple(_) | Value::Range(_)) => {
            if name == "copy" {
                return args.exactly::<0>(0).map(|_| list.clone());
            }
            let items = run.collect(list)?;
            run.spend(items.len())?;
            if name == "count" {
                let [item] = args.exactly(1)?;
                let item = item.unwrap_or_default();
                run.visit(items.len())?;
                return Ok(Value::from(items.iter().filter(|other| **other == item).count()));
            }
            let [item, start, stop] = args.exactly(1)?;
            run.visit(items.len())?;
            let item = item.unwrap_or_default();
            let bound = |value: Option<Value>, otherwise: usize| match value {
                None => Ok(otherwise),
                Some(value) if matches!(list, Value::Range(_)) => {
                    Err(Error::failed(format!("`index` of a range has one argument, not also {}", value.type_name())))
                }
                Some(value) => {
                    let at = value.as_int().ok_or_else(|| Error::failed("`index` needs whole numbers"))?;
                    let at = if at < 0 { (at + items.len() as i128).max(0) } else { at };
                    Ok(usize::try_from(at).unwrap_or(usize::MAX))
                }
            };
            let (start, stop) = (bound(start, 0)?, bound(stop, usize::MAX)?);
            let found = items.iter().enumerate().find(|(at, other)| (start..stop).contains(at) && **other == item);
            found.map(|(at, _)| Value::from(at)).ok_or_else(|| Error::failed("`index`: the value is not in the list"))
        }
        Value::Float(number) => {
            args.exactly::<0>(0)?;
            match name {
                "is_integer" => Ok(Value::Bool(number.is_finite() && number.trunc() == *number)),
                "conjugate" => Ok(Value::Float(*number)),
                _ => Err(unsupported(name)),
            }
        }
        number => {
            let Some(whole) = number.as_int() else { return Err(unsupported(name)) };
            args.exactly::<0>(0)?;
            match name {
                "bit_length" => Ok(Value::Int(i64::from(128 - whole.unsigned_abs().leading_zeros()))),
                "bit_count" => Ok(Value::Int(i64::from(whole.unsigned_abs().count_ones()))),
                "conjugate" => Ok(Value::from(whole)),
                "as_integer_ratio" => Value::tuple(vec![Value::from(whole), Value::Int(1)]),
                _ => Err(unsupported(name)),
            }
        }
    }
}
