//! Filters of lists.

use super::{Filter, FilterFn, is_true, whole};
use crate::predicates::Test;
use crate::render::{Args, Run};
use crate::syntax::ast::Binary;
use crate::value::compare::is_less;
use crate::value::{Items, check_hashable};
use crate::{Dict, Error, Result, Value};
use std::cmp::Ordering;
use std::sync::Arc;

pub(super) fn named(name: &str) -> Option<FilterFn> {
    Some(match name {
        "batch" => batch,
        "dictsort" => dictsort,
        "first" => first,
        "groupby" => groupby,
        "join" => join,
        "last" => last,
        "list" => |run, value, args| {
            args.exactly::<0>(0)?;
            Ok(Value::List(run.collect(value)?))
        },
        "map" => map,
        "max" => |run, value, args| extreme(run, value, args, true),
        "min" => |run, value, args| extreme(run, value, args, false),
        "reject" => |run, value, args| select(run, value, args, false, false),
        "rejectattr" => |run, value, args| select(run, value, args, false, true),
        "reverse" => reverse,
        "select" => |run, value, args| select(run, value, args, true, false),
        "selectattr" => |run, value, args| select(run, value, args, true, true),
        "slice" => slice,
        "sort" => sort,
        "sum" => sum,
        "unique" => unique,
        _ => return None,
    })
}

/// The keys of a path such as `a.0.b`.
fn path(attribute: &Value) -> Vec<Value> {
    let key = |part: &str| match part.parse::<i64>() {
        Ok(number) if part.bytes().all(|b| b.is_ascii_digit()) => Value::Int(number),
        _ => Value::from(part),
    };
    match attribute {
        Value::None => Vec::new(),
        Value::Text(text) | Value::Safe(text) => text.split('.').map(key).collect(),
        other => vec![other.clone()],
    }
}

/// The value at a path; `default` replaces an absent one.
fn walk(run: &mut Run<'_>, value: &Value, path: &[Value], default: Option<&Value>) -> Result<Value> {
    run.step()?;
    let mut value = value.clone();
    for key in path {
        value = run.item(&value, key)?;
        if let (true, Some(default)) = (value.is_undefined(), default) {
            value = default.clone();
        }
    }
    Ok(value)
}

/// A text in lower case, unless case matters.
fn folded(run: &mut Run<'_>, value: Value, case_sensitive: bool) -> Result<Value> {
    match value.as_str() {
        Some(text) if !case_sensitive => {
            run.allow(text.len())?;
            Ok(Value::from(text.to_lowercase()))
        }
        _ => Ok(value),
    }
}

/// Sorts in a stable way, as Python does, by the first values of the pairs.
fn sort_by_keys(pairs: &mut [(Value, Value)], reverse: bool) -> Result<()> {
    if pairs.iter().any(|(key, _)| matches!(key, Value::Float(number) if number.is_nan())) {
        return Err(Error::failed("numbers that are not comparable can't be sorted"));
    }
    let mut failed = None;
    let mut less = |a: &Value, b: &Value| {
        is_less(a, b).unwrap_or_else(|error| {
            failed = Some(error);
            false
        })
    };
    pairs.sort_by(|(a, _), (b, _)| {
        let (a, b) = if reverse { (b, a) } else { (a, b) };
        if less(a, b) {
            Ordering::Less
        } else if less(b, a) {
            Ordering::Greater
        } else {
            Ordering::Equal
        }
    });
    failed.map_or(Ok(()), Err)
}

fn seconds(pairs: Vec<(Value, Value)>) -> Vec<Value> {
    pairs.into_iter().map(|(_, value)| value).collect()
}

/// A positive count of `name`.
fn positive(name: &str, count: Option<Value>) -> Result<usize> {
    let count = usize::try_from(whole(count.or(Some(Value::Undefined)), 0)?).ok().filter(|count| *count > 0);
    count.ok_or_else(|| Error::failed(format!("`{name}` needs a positive number")))
}

fn batch(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [count, fill] = args.bind(["linecount", "fill_with"])?;
    let count = positive("batch", count)?;
    let fill = fill.filter(|fill| !fill.is_none());
    let items = run.collect(value)?;
    run.allow_values(items.len() * 2)?;
    let mut batches = Vec::new();
    for chunk in items.chunks(count) {
        let mut batch = chunk.to_vec();
        if let Some(fill) = &fill {
            run.allow_values(count)?;
            batch.resize(count, fill.clone());
        }
        batches.push(Value::list(batch)?);
    }
    run.iterator(batches)
}

fn slice(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [slices, fill] = args.bind(["slices", "fill_with"])?;
    let slices = positive("slice", slices)?;
    let fill = fill.filter(|fill| !fill.is_none());
    let items = run.collect(value)?;
    run.allow_values(items.len().saturating_add(slices.saturating_mul(2)))?;
    let (least, extra) = (items.len() / slices, items.len() % slices);
    let mut rest = &**items;
    let mut out = Vec::new();
    for at in 0..slices {
        let (taken, after) = rest.split_at(least + usize::from(at < extra));
        rest = after;
        let fill = fill.iter().filter(|_| at >= extra);
        out.push(Value::list(taken.iter().chain(fill).cloned().collect::<Vec<_>>())?);
    }
    run.iterator(out)
}

fn dictsort(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [case, by, reverse] = args.bind(["case_sensitive", "by", "reverse"])?;
    let case = is_true(case);
    let by = by.unwrap_or_else(|| Value::from("key"));
    let by_key = match by.as_str() {
        Some("key") => true,
        Some("value") => false,
        _ => return Err(Error::failed("`dictsort` sorts by key or value")),
    };
    let Some(dict) = value.as_dict() else {
        return Err(Error::failed(format!("`dictsort` needs a dictionary, not {}", value.type_name())));
    };
    run.allow_values(dict.len() * 4)?;
    let mut pairs = Vec::with_capacity(dict.len());
    for (key, value) in dict.iter() {
        let sorted = folded(run, if by_key { key.clone() } else { value.clone() }, case)?;
        pairs.push((sorted, Value::tuple(vec![key.clone(), value.clone()])?));
    }
    sort_by_keys(&mut pairs, is_true(reverse))?;
    Value::list(seconds(pairs))
}

fn sort(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [reverse, case, attribute] = args.bind(["reverse", "case_sensitive", "attribute"])?;
    let case = is_true(case);
    let items = run.collect(value)?;
    let paths: Vec<Vec<Value>> = match attribute.unwrap_or(Value::None) {
        Value::Text(text) | Value::Safe(text) => text.split(',').map(|part| path(&Value::from(part))).collect(),
        other => vec![path(&other)],
    };
    run.allow_values(items.len() * 4)?;
    let mut pairs = Vec::with_capacity(items.len());
    for item in items.iter() {
        let mut keys = Vec::with_capacity(paths.len());
        for path in &paths {
            let key = walk(run, item, path, None)?;
            keys.push(folded(run, key, case)?);
        }
        pairs.push((Value::list(keys)?, item.clone()));
    }
    sort_by_keys(&mut pairs, is_true(reverse))?;
    Value::list(seconds(pairs))
}

fn groupby(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [attribute, default, case] = args.bind(["attribute", "default", "case_sensitive"])?;
    let case = is_true(case);
    let Some(attribute) = attribute else { return Err(Error::failed("`groupby` needs an attribute")) };
    let default = default.filter(|default| !default.is_none());
    let path = path(&attribute);
    let items = run.collect(value)?;
    let mut pairs = Vec::with_capacity(items.len());
    for item in items.iter() {
        let key = walk(run, item, &path, default.as_ref())?;
        pairs.push((folded(run, key, case)?, item.clone()));
    }
    sort_by_keys(&mut pairs, false)?;
    let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
    for (key, item) in pairs {
        match groups.last_mut() {
            Some((last, group)) if *last == key => group.push(item),
            _ => groups.push((key, vec![item])),
        }
    }
    let mut out = Vec::with_capacity(groups.len());
    for (key, group) in groups {
        let key = match group.first() {
            Some(first) if !case => walk(run, first, &path, default.as_ref())?,
            _ => key,
        };
        let mut pair = Items::new(vec![key, Value::list(group)?])?;
        pair.is_group = true;
        out.push(Value::Tuple(Arc::new(pair)));
    }
    Value::list(out)
}

fn first(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    if let Some(text) = value.as_str() {
        return Ok(text.chars().next().map(|c| Value::from(c.to_string())).unwrap_or_default());
    }
    let mut iter = run.iterate(value)?;
    Ok(iter.next().unwrap_or_default())
}

fn last(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    match value {
        Value::Text(text) | Value::Safe(text) => {
            Ok(text.chars().next_back().map(|c| Value::from(c.to_string())).unwrap_or_default())
        }
        // Python can't reverse these.
        Value::Reader(_) | Value::State(..) => {
            Err(Error::failed(format!("a value of the type {} has no end", value.type_name())))
        }
        value => Ok(run.collect(value)?.last().cloned().unwrap_or_default()),
    }
}

fn reverse(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    if value.is_text() {
        return run.slice(value, [None, None, Some(-1)]);
    }
    let items = run.collect(value)?;
    run.allow_values(items.len())?;
    let values: Vec<Value> = items.iter().rev().cloned().collect();
    // Python has no reversed iterator for an iterator.
    if matches!(value, Value::Reader(_) | Value::State(..)) { Value::list(values) } else { run.iterator(values) }
}

fn join(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [separator, attribute] = args.bind(["d", "attribute"])?;
    let separator = separator.unwrap_or_else(|| Value::from(""));
    let separator = run.text(&separator)?;
    let path = attribute.as_ref().map_or_else(Vec::new, path);
    let items = run.collect(value)?;
    let mut out = String::new();
    for (at, item) in items.iter().enumerate() {
        let item = walk(run, item, &path, None)?;
        let text = run.text(&item)?;
        if at > 0 {
            out.push_str(&separator);
        }
        out.push_str(&text);
        run.spend_on_text(text.len(), out.len())?;
    }
    Ok(Value::from(out))
}

fn map(run: &mut Run<'_>, value: &Value, mut args: Args) -> Result<Value> {
    if !value.is_true() {
        return run.iterator(Vec::new());
    }
    let items = run.collect(value)?;
    run.allow_values(items.len())?;
    let mut values = Vec::with_capacity(items.len());
    if args.positional.is_empty() {
        let [attribute, default] = args.bind(["attribute", "default"])?;
        let Some(attribute) = attribute else { return Err(Error::failed("`map` needs a filter")) };
        let default = default.filter(|default| !default.is_none());
        let path = path(&attribute);
        for item in items.iter() {
            values.push(walk(run, item, &path, default.as_ref())?);
        }
        return run.iterator(values);
    }
    let name = args.positional.remove(0);
    let filter = name.as_str().and_then(Filter::named).ok_or_else(|| Error::failed("`map` needs a filter"))?;
    let mut bytes = 0;
    for item in items.iter() {
        let made = filter.apply(run, item, args.clone())?;
        let text = made.as_str().map_or(0, str::len);
        bytes += text;
        run.spend_on_text(text, bytes)?;
        run.push(&mut values, made)?;
    }
    run.iterator(values)
}

fn select(run: &mut Run<'_>, value: &Value, mut args: Args, wanted: bool, of_attribute: bool) -> Result<Value> {
    if !value.is_true() {
        return run.iterator(Vec::new());
    }
    let mut next = || (!args.positional.is_empty()).then(|| args.positional.remove(0));
    let path = match of_attribute {
        true => path(&next().ok_or_else(|| Error::failed("the name of an attribute is missing"))?),
        false => Vec::new(),
    };
    let test = match next() {
        Some(name) => Some(name.as_str().and_then(Test::named).ok_or_else(|| Error::failed("there is no such test"))?),
        None => None,
    };
    let items = run.collect(value)?;
    let mut values = Vec::new();
    for item in items.iter() {
        let tested = walk(run, item, &path, None)?;
        let truth = match test {
            Some(test) => test.apply(run, &tested, args.clone())?,
            None => tested.is_true(),
        };
        if truth == wanted {
            values.push(item.clone());
        }
    }
    run.iterator(values)
}

fn extreme(run: &mut Run<'_>, value: &Value, args: Args, most: bool) -> Result<Value> {
    let [case, attribute] = args.bind(["case_sensitive", "attribute"])?;
    let case = is_true(case);
    let path = attribute.as_ref().map_or_else(Vec::new, path);
    let items = run.collect(value)?;
    let mut best: Option<(Value, &Value)> = None;
    for item in items.iter() {
        let key = walk(run, item, &path, None)?;
        let key = folded(run, key, case)?;
        let better = match &best {
            Some((other, _)) if most => is_less(other, &key)?,
            Some((other, _)) => is_less(&key, other)?,
            None => true,
        };
        if better {
            best = Some((key, item));
        }
    }
    Ok(best.map(|(_, item)| item.clone()).unwrap_or_default())
}

fn sum(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [attribute, start] = args.bind(["attribute", "start"])?;
    let path = attribute.as_ref().map_or_else(Vec::new, path);
    let mut sum = start.unwrap_or(Value::Int(0));
    if sum.is_text() {
        return Err(Error::failed("`sum` can't add texts"));
    }
    let items = run.collect(value)?;
    let mut fractions = 0;
    for item in items.iter() {
        let item = walk(run, item, &path, None)?;
        fractions += usize::from(matches!(item, Value::Float(_)));
        sum = run.binary(Binary::Add, &sum, &item)?;
    }
    if fractions > 1 {
        // Python 3.12 rounds it in another way than 3.11.
        return Err(Error::failed("`sum` of several floats is not supported"));
    }
    Ok(sum)
}

fn unique(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [case, attribute] = args.bind(["case_sensitive", "attribute"])?;
    let case = is_true(case);
    let path = attribute.as_ref().map_or_else(Vec::new, path);
    let items = run.collect(value)?;
    run.allow_values(items.len() * 4)?;
    let mut keys = Vec::with_capacity(items.len());
    for (at, item) in items.iter().enumerate() {
        let key = walk(run, item, &path, None)?;
        let key = folded(run, key, case)?;
        check_hashable(key.level())?;
        keys.push((key, Value::from(at)));
    }
    // Built from the end, the value of a key is its first position.
    let seen = Dict::new(keys.iter().rev().cloned())?;
    let mut values = Vec::new();
    for ((key, at), item) in keys.iter().zip(items.iter()) {
        if seen.get(key)? == Some(at) {
            values.push(item.clone());
        }
    }
    run.iterator(values)
}
