//! The values of expressions.

use super::{Args, Run};
use crate::numbers::too_large;
use crate::operators::{negative, positive};
use crate::syntax::ast::{Arguments, Binary, Call, Comparison, Expr};
use crate::value::{Dict, Range, compare};
use crate::{Error, Function, Result, Value};
use smallvec::SmallVec;
use std::cmp::Ordering;
use std::sync::Arc;

impl Expr {
    /// The operands of additions, or of `~`, whose texts can be written one by one.
    pub(super) fn sum_or_concat(&self) -> Option<SmallVec<[&Expr; 8]>> {
        match self {
            Self::Binary(first, rest) if rest.iter().all(|(operation, _)| *operation == Binary::Add) => {
                Some(std::iter::once(&**first).chain(rest.iter().map(|(_, expr)| expr)).collect())
            }
            Self::Concat(values) => Some(values.iter().collect()),
            _ => None,
        }
    }
}

impl<'a> Run<'a> {
    /// Writes a sum or a concatenation without making its text first.
    pub(super) fn output_parts(&mut self, expr: &'a Expr, parts: SmallVec<[&'a Expr; 8]>) -> Result<()> {
        let mut values = SmallVec::<[Value; 8]>::new();
        for part in parts {
            values.push(self.eval(part)?);
        }
        let is_concat = matches!(expr, Expr::Concat(_));
        if is_concat || values.iter().all(|value| matches!(value, Value::Text(_))) {
            return values.iter().try_for_each(|value| self.emit_value(value));
        }
        let mut values = values.into_iter();
        let mut sum = values.next().unwrap_or_default();
        for value in values {
            sum = self.binary(Binary::Add, &sum, &value)?;
        }
        self.emit_value(&sum)
    }

    /// Returns whether an expression is true.
    pub(super) fn is_true(&mut self, expr: &'a Expr) -> Result<bool> {
        match expr {
            Expr::Name(name) => {
                self.step()?;
                Ok(self.lookup(*name).is_true())
            }
            expr => Ok(self.eval(expr)?.is_true()),
        }
    }

    /// Returns the value of an expression.
    pub(super) fn eval(&mut self, expr: &'a Expr) -> Result<Value> {
        self.step()?;
        match expr {
            Expr::Constant(value) => Ok(value.clone()),
            Expr::Name(name) => Ok(self.lookup(*name).clone()),
            _ => self.nested(|run| run.composed(expr)),
        }
    }

    fn composed(&mut self, expr: &'a Expr) -> Result<Value> {
        match expr {
            Expr::Attribute(base, name) => self.attribute_of(base, name),
            Expr::Item(base, key) => self.item_of(base, key),
            Expr::Binary(first, rest) => self.operations(first, rest),
            Expr::Compare(first, rest) => self.compared(first, rest),
            Expr::Call(..) => self.call_expr(expr, None),
            Expr::Filter(base, call) => {
                let value = self.eval(base)?;
                self.filtered(value, std::slice::from_ref(call))
            }
            Expr::Test(base, test, arguments) => {
                let value = self.eval(base)?;
                let args = self.arguments(arguments)?;
                test.apply(self, &value, args).map(Value::Bool)
            }
            Expr::Not(base) => Ok(Value::Bool(!self.is_true(base)?)),
            Expr::And(values) => self.first_where(values, false),
            Expr::Or(values) => self.first_where(values, true),
            Expr::Condition(test, then, otherwise) => {
                if self.is_true(test)? {
                    return self.eval(then);
                }
                otherwise.as_ref().map_or(Ok(Value::Undefined), |otherwise| self.eval(otherwise))
            }
            other => self.made(other),
        }
    }

    /// The less common expressions.
    fn made(&mut self, expr: &'a Expr) -> Result<Value> {
        match expr {
            Expr::Slice(base, bounds) => self.slice_of(base, bounds),
            Expr::List(values) => Value::list(self.values(values)?),
            Expr::Tuple(values) => Value::tuple(self.values(values)?),
            Expr::Dict(entries) => {
                let mut out = Vec::with_capacity(entries.len());
                for (key, value) in entries {
                    out.push((self.eval(key)?, self.eval(value)?));
                }
                Ok(Value::Dict(Arc::new(Dict::new(out)?)))
            }
            Expr::Concat(values) => {
                let mut texts = String::new();
                for expr in values {
                    let value = self.eval(expr)?;
                    let text = self.text(&value)?;
                    self.allow(texts.len() + text.len())?;
                    texts.push_str(&text);
                }
                Ok(Value::from(texts))
            }
            Expr::Negative(base) => negative(&self.eval(base)?),
            Expr::Positive(base) => positive(&self.eval(base)?),
            _ => Ok(Value::Undefined),
        }
    }

    fn values(&mut self, exprs: &'a [Expr]) -> Result<Vec<Value>> {
        exprs.iter().map(|expr| self.eval(expr)).collect()
    }

    /// The first value whose truth is `wanted`, or the last one.
    fn first_where(&mut self, exprs: &'a [Expr], wanted: bool) -> Result<Value> {
        let mut value = Value::Undefined;
        for expr in exprs {
            value = self.eval(expr)?;
            if value.is_true() == wanted {
                break;
            }
        }
        Ok(value)
    }

    fn operations(&mut self, first: &'a Expr, rest: &'a [(Binary, Expr)]) -> Result<Value> {
        let mut value = self.eval(first)?;
        for (operation, expr) in rest {
            let other = self.eval(expr)?;
            if value.is_undefined() || other.is_undefined() {
                // Only a text before `%` takes an undefined value.
                if !(value.is_text() && *operation == Binary::Remainder) {
                    let undefined = if value.is_undefined() { first } else { expr };
                    return Err(self.undefined(undefined));
                }
            }
            value = self.binary(*operation, &value, &other)?;
        }
        Ok(value)
    }

    fn compared(&mut self, first: &'a Expr, rest: &'a [(Comparison, Expr)]) -> Result<Value> {
        let mut value = self.eval(first)?;
        for (comparison, expr) in rest {
            let other = self.eval(expr)?;
            if !self.compare(*comparison, &value, &other)? {
                return Ok(Value::Bool(false));
            }
            value = other;
        }
        Ok(Value::Bool(true))
    }

    /// Whether a comparison of two values is true.
    pub(crate) fn compare(&mut self, comparison: Comparison, a: &Value, b: &Value) -> Result<bool> {
        let ordered = |wanted: fn(Ordering) -> bool| Ok(compare::order(a, b)?.is_some_and(wanted));
        if a.is_list() && b.is_list() {
            self.visit(a.items().map_or(0, <[Value]>::len))?;
        }
        match comparison {
            Comparison::Equal => Ok(a == b),
            Comparison::NotEqual => Ok(a != b),
            Comparison::Less => ordered(Ordering::is_lt),
            Comparison::LessOrEqual => ordered(Ordering::is_le),
            Comparison::Greater => ordered(Ordering::is_gt),
            Comparison::GreaterOrEqual => ordered(Ordering::is_ge),
            Comparison::In => self.contains(b, a),
            Comparison::NotIn => Ok(!self.contains(b, a)?),
        }
    }

    /// The error for the use of an undefined value.
    pub(super) fn undefined(&self, expr: &Expr) -> Error {
        match expr {
            Expr::Name(name) => {
                let name = self.program.names.get(name.0 as usize).map_or("", |name| name);
                Error::failed(format!("`{name}` is undefined"))
            }
            Expr::Attribute(_, name) => Error::failed(format!("`{}` is undefined", name.as_str().unwrap_or_default())),
            _ => Error::failed("a value is undefined"),
        }
    }

    fn attribute_of(&mut self, base: &'a Expr, name: &'a Value) -> Result<Value> {
        // The common case needs no copy of the value before the point.
        let value = match base {
            Expr::Name(base) => {
                self.step()?;
                let value = self.lookup(*base);
                match value.level() {
                    Value::Dict(dict) => {
                        let key = name.as_str().unwrap_or_default();
                        if !crate::methods::is_dict_attribute(key) {
                            return Ok(dict.get_str(key).cloned().unwrap_or_default());
                        }
                        value.clone()
                    }
                    _ => value.clone(),
                }
            }
            base => self.eval(base)?,
        };
        if value.is_undefined() {
            return Err(self.undefined(base));
        }
        self.attribute(&value, name.as_str().unwrap_or_default())
    }

    fn item_of(&mut self, base: &'a Expr, key: &'a Expr) -> Result<Value> {
        let value = match (base, key) {
            (Expr::Name(base), Expr::Constant(Value::Text(key))) => {
                self.step()?;
                let value = self.lookup(*base);
                if let Some(found) = value.get(key) {
                    return Ok(found.clone());
                }
                value.clone()
            }
            _ => self.eval(base)?,
        };
        if value.is_undefined() {
            return Err(self.undefined(base));
        }
        let key = self.eval(key)?;
        self.item(&value, &key)
    }

    /// `value.name`: the attribute, or else the item.
    pub(crate) fn attribute(&mut self, value: &Value, name: &str) -> Result<Value> {
        let value = value.level();
        not_generic(value)?;
        if let Some(member) = self.member(value, name)? {
            return Ok(member);
        }
        Ok(value.get(name).cloned().unwrap_or_default())
    }

    /// `value[key]`: the item, or else the attribute.
    pub(crate) fn item(&mut self, value: &Value, key: &Value) -> Result<Value> {
        let value = value.level();
        not_generic(value)?;
        let found = match value {
            Value::Undefined => return Err(Error::failed("a value is undefined")),
            Value::Dict(dict) => dict.get(key).ok().flatten().cloned(),
            Value::List(items) | Value::Tuple(items) => {
                key.as_int().and_then(|at| position(at, items.len())).and_then(|at| items.get(at).cloned())
            }
            Value::Text(text) | Value::Safe(text) => match key.as_int() {
                Some(at) => self.character(text, at)?.map(|text| like(value, text)),
                None => None,
            },
            Value::Range(range) => key.as_int().and_then(|at| {
                let at = if at < 0 { at.checked_add(range.len())? } else { at };
                range.get(at)
            }),
            _ => None,
        };
        match (found, key.as_str()) {
            (Some(found), _) => Ok(found),
            (None, Some(name)) => Ok(self.member(value, name)?.unwrap_or_default()),
            (None, None) => Ok(Value::Undefined),
        }
    }

    /// The character at a position of a text.
    fn character(&mut self, text: &str, at: i128) -> Result<Option<String>> {
        self.spend(text.len())?;
        let forward = usize::try_from(at).ok().and_then(|at| text.chars().nth(at));
        let backward = || usize::try_from(-1 - at).ok().and_then(|at| text.chars().rev().nth(at));
        Ok(forward.or_else(backward).map(String::from))
    }

    fn slice_of(&mut self, base: &'a Expr, bounds: &'a [Option<Expr>; 3]) -> Result<Value> {
        let value = self.eval(base)?;
        if value.is_undefined() {
            return Err(self.undefined(base));
        }
        let mut numbers = [None; 3];
        let mut is_wrong = false;
        for (number, bound) in numbers.iter_mut().zip(bounds) {
            let Some(bound) = bound else { continue };
            match self.eval(bound)? {
                Value::None => {}
                bound => {
                    *number = bound.as_int();
                    is_wrong |= number.is_none();
                }
            }
        }
        if is_wrong {
            return Err(Error::failed("the bounds of a slice are whole numbers"));
        }
        self.slice(&value, numbers)
    }

    /// `value[start:stop:step]`.
    pub(crate) fn slice(&mut self, value: &Value, [start, stop, step]: [Option<i128>; 3]) -> Result<Value> {
        let value = value.level();
        if step == Some(0) {
            return Err(Error::failed("the step of a slice is zero"));
        }
        Ok(match value {
            Value::Text(text) | Value::Safe(text) => {
                self.allow(text.len())?;
                if step.is_none_or(|step| step == 1) {
                    return Ok(like(value, slice_text(text, start, stop).to_owned()));
                }
                let chars: Vec<char> = text.chars().collect();
                let picked = positions(chars.len(), start, stop, step);
                like(value, picked.filter_map(|at| chars.get(at)).collect())
            }
            Value::List(items) | Value::Tuple(items) => {
                self.allow_values(items.len())?;
                let picked: Vec<Value> =
                    positions(items.len(), start, stop, step).filter_map(|at| items.get(at).cloned()).collect();
                if matches!(value, Value::List(_)) { Value::list(picked)? } else { Value::tuple(picked)? }
            }
            Value::Range(range) => range.slice(start, stop, step)?,
            other => return Err(Error::failed(format!("a value of the type {} has no slices", other.type_name()))),
        })
    }

    pub(super) fn filtered(&mut self, value: Value, filters: &'a [Call]) -> Result<Value> {
        let mut value = value;
        for call in filters {
            let args = self.arguments(&call.arguments)?;
            value = call.filter.apply(self, &value, args)?;
        }
        Ok(value)
    }

    /// The values of a call's arguments.
    pub(super) fn arguments(&mut self, arguments: &'a Arguments) -> Result<Args> {
        let mut args = Args::default();
        for expr in &arguments.positional {
            args.positional.push(self.eval(expr)?);
        }
        for (name, expr) in &arguments.named {
            args.named.push((name.clone(), self.eval(expr)?));
        }
        if let Some(list) = &arguments.list {
            let list = self.eval(list)?;
            args.positional.extend(self.collect(&list)?.iter().cloned());
        }
        if let Some(dict) = &arguments.dict {
            let value = self.eval(dict)?;
            let Some(dict) = value.as_dict() else { return Err(Error::failed("`**` needs a dictionary")) };
            for (key, value) in dict.iter() {
                let Some(key) = key.as_str() else { return Err(Error::failed("`**` needs texts as keys")) };
                if args.named.iter().any(|(other, _)| **other == *key) {
                    return Err(Error::failed(format!("the argument `{key}` is given twice")));
                }
                args.named.push((key.into(), value.clone()));
            }
        }
        Ok(args)
    }
}

/// Python's `dict[key]` is a type, and `dict.keys` is a method without a receiver.
fn not_generic(value: &Value) -> Result<()> {
    match value {
        Value::Function(Function::Dict) => Err(Error::failed("attributes and items of `dict` are not supported")),
        _ => Ok(()),
    }
}

/// A text of the same type as `value`.
pub(crate) fn like(value: &Value, text: String) -> Value {
    if matches!(value, Value::Safe(_)) { Value::Safe(text.into()) } else { Value::from(text) }
}

/// The position that Python's index means, if it is in range.
fn position(at: i128, len: usize) -> Option<usize> {
    let at = if at < 0 { at + len as i128 } else { at };
    usize::try_from(at).ok().filter(|at| *at < len)
}

impl Range {
    fn slice(&self, start: Option<i128>, stop: Option<i128>, step: Option<i128>) -> Result<Value> {
        let (first, last, step) = bounds(self.len(), start, stop, step);
        let number =
            |at: i128| i64::try_from(i128::from(self.start) + at * i128::from(self.step)).map_err(|_| too_large());
        let step =
            step.checked_mul(i128::from(self.step)).and_then(|step| i64::try_from(step).ok()).ok_or_else(too_large)?;
        Ok(Value::Range(Arc::new(Self { start: number(first)?, stop: number(last)?, step })))
    }
}

/// A bound of a slice, in the range from `least` to `most`.
fn clamped(bound: i128, len: i128, least: i128, most: i128) -> i128 {
    (if bound < 0 { bound.saturating_add(len) } else { bound }).clamp(least, most)
}

/// Python's `slice.indices(len)`: the first position, the one after the last, and the distance.
fn bounds(len: i128, start: Option<i128>, stop: Option<i128>, step: Option<i128>) -> (i128, i128, i128) {
    let step = step.unwrap_or(1);
    let (least, most) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let first = start.map_or(if step > 0 { least } else { most }, |at| clamped(at, len, least, most));
    let last = stop.map_or(if step > 0 { most } else { least }, |at| clamped(at, len, least, most));
    (first, last, step)
}

/// The positions that a slice picks.
fn positions(len: usize, start: Option<i128>, stop: Option<i128>, step: Option<i128>) -> impl Iterator<Item = usize> {
    let (first, last, step) = bounds(len as i128, start, stop, step);
    let goes_on = move |at: &i128| if step > 0 { *at < last } else { *at > last };
    std::iter::successors(Some(first), move |at| at.checked_add(step))
        .take_while(goes_on)
        .filter_map(|at| usize::try_from(at).ok())
}

/// A slice of a text by characters, with step 1.
fn slice_text(text: &str, start: Option<i128>, stop: Option<i128>) -> &str {
    let offset = |bound: i128| {
        if bound >= 0 {
            let at = usize::try_from(bound).unwrap_or(usize::MAX);
            text.char_indices().nth(at).map_or(text.len(), |(at, _)| at)
        } else {
            let back = usize::try_from(-1 - bound).unwrap_or(usize::MAX);
            text.char_indices().rev().nth(back).map_or(0, |(at, _)| at)
        }
    };
    let start = start.map_or(0, offset);
    let stop = stop.map_or(text.len(), offset);
    text.get(start..stop).unwrap_or_default()
}
