//! Methods of texts.

use super::{cases, unsupported};
use crate::characters::{capitalize, ends_line, is_space, lines, strip, strip_end, strip_start, swap_case, title};
use crate::render::{Args, Run, escaped, like};
use crate::{Error, Result, Value};

/// Calls a method of a text. A safe text gives safe ones.
pub(crate) fn call_text(run: &mut Run<'_>, value: &Value, name: &str, args: Args) -> Result<Value> {
    let text = value.as_str().unwrap_or_default();
    run.spend(text.len())?;
    let own = |text: &str| {
        if text.len() == value.as_str().map_or(0, str::len) { value.clone() } else { like(value, text.to_owned()) }
    };
    let changed = |args: Args, text: String| args.exactly::<0>(0).map(|_| like(value, text));
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.exactly(0)?;
            let chars = chars.filter(|chars| !chars.is_none());
            Ok(own(match (name, &chars) {
                ("strip", None) => strip(text),
                ("lstrip", None) => strip_start(text),
                (_, None) => strip_end(text),
                (_, Some(chars)) => {
                    let set = needed(chars)?;
                    let is = |c: char| set.contains(c);
                    match name {
                        "strip" => text.trim_matches(is),
                        "lstrip" => text.trim_start_matches(is),
                        _ => text.trim_end_matches(is),
                    }
                }
            }))
        }
        "lower" | "casefold" | "upper" | "title" | "capitalize" | "swapcase" => {
            run.allow(text.len().saturating_mul(2))?;
            changed(
                args,
                match name {
                    "lower" => text.to_lowercase(),
                    "casefold" if text.is_ascii() => text.to_ascii_lowercase(),
                    "casefold" => return Err(Error::failed("`casefold` of other letters than ASCII is not supported")),
                    "upper" => text.to_uppercase(),
                    "title" => title(text),
                    "capitalize" => capitalize(text),
                    _ => swap_case(text),
                },
            )
        }
        "startswith" | "endswith" => affix(run, text, name == "startswith", args),
        "split" | "rsplit" => split(run, value, name == "rsplit", args),
        "splitlines" => {
            let [keep] = args.bind(["keepends"])?;
            let lines = split_lines(run, text, keep.is_some_and(|keep| keep.is_true()))?;
            Value::list(lines.into_iter().map(|line| like(value, line.to_owned())).collect::<Vec<_>>())
        }
        "partition" | "rpartition" => {
            let [separator] = args.exactly(1)?;
            let separator = separator.unwrap_or_default();
            let separator = needed(&separator)?;
            if separator.is_empty() {
                return Err(Error::failed("the separator is empty"));
            }
            let found = if name == "partition" { text.split_once(separator) } else { text.rsplit_once(separator) };
            let parts = match found {
                Some((before, after)) => [before, separator, after],
                None if name == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Value::tuple(parts.map(|part| like(value, part.to_owned())).to_vec())
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = args.exactly(1)?;
            let affix = affix.unwrap_or_default();
            let affix = needed(&affix)?;
            let rest = if name == "removeprefix" { text.strip_prefix(affix) } else { text.strip_suffix(affix) };
            Ok(own(rest.unwrap_or(text)))
        }
        "replace" => replace(run, value, args),
        "join" => join(run, value, args),
        "count" | "find" | "rfind" | "index" | "rindex" => search(text, name, args),
        "center" | "ljust" | "rjust" | "zfill" => pad(run, value, name, args),
        "expandtabs" => expand_tabs(run, value, args),
        "format" => run.format(value, args),
        _ => match cases::ask(text, name)? {
            Some(answer) => args.exactly::<0>(0).map(|_| Value::Bool(answer)),
            None => Err(unsupported(name)),
        },
    }
}

/// The text of an argument.
fn needed(value: &Value) -> Result<&str> {
    value.as_str().ok_or_else(|| Error::failed(format!("a text is needed, not {}", value.type_name())))
}

/// The whole number of an argument.
fn int(value: Option<Value>, otherwise: i128) -> Result<i128> {
    let Some(value) = value else { return Ok(otherwise) };
    value.as_int().ok_or_else(|| Error::failed(format!("a whole number is needed, not {}", value.type_name())))
}

/// The part of `text` between two positions, and the number of characters before it; `None` if the start is behind
/// the end.
fn bounded(text: &str, start: Option<Value>, end: Option<Value>) -> Result<Option<(&str, usize)>> {
    let given = |value: Option<Value>| value.filter(|value| !value.is_none());
    let (start, end) = (given(start), given(end));
    if start.is_none() && end.is_none() {
        return Ok(Some((text, 0)));
    }
    let length = text.chars().count() as i128;
    let position = |at: i128| if at < 0 { (at + length).max(0) } else { at };
    let (start, end) = (position(int(start, 0)?), position(int(end, length)?).min(length));
    if start > end {
        return Ok(None);
    }
    let offset = |at: i128| {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        text.char_indices().nth(at).map_or(text.len(), |(at, _)| at)
    };
    let part = text.get(offset(start)..offset(end)).unwrap_or_default();
    Ok(Some((part, usize::try_from(start).unwrap_or(0))))
}

fn affix(run: &mut Run<'_>, text: &str, at_start: bool, args: Args) -> Result<Value> {
    let [affix, start, end] = args.exactly(1)?;
    let affix = affix.unwrap_or_default();
    let affixes = match &affix {
        Value::Tuple(_) => run.collect(&affix)?,
        other => {
            needed(other)?;
            run.collect(&Value::tuple(vec![other.clone()])?)?
        }
    };
    let part = bounded(text, start, end)?;
    for affix in affixes.iter() {
        let affix = needed(affix)?;
        if part.is_some_and(|(part, _)| if at_start { part.starts_with(affix) } else { part.ends_with(affix) }) {
            return Ok(Value::Bool(true));
        }
    }
    Ok(Value::Bool(false))
}

/// The lines of a text, if a list of them may be made.
pub(crate) fn split_lines<'t>(run: &mut Run<'_>, text: &'t str, keep_ends: bool) -> Result<Vec<&'t str>> {
    run.spend(text.len())?;
    run.allow_values(text.chars().filter(|c| ends_line(*c)).count().saturating_mul(2))?;
    Ok(lines(text, keep_ends))
}

fn split(run: &mut Run<'_>, value: &Value, from_end: bool, args: Args) -> Result<Value> {
    let text = value.as_str().unwrap_or_default();
    let [separator, most] = args.bind(["sep", "maxsplit"])?;
    let most = usize::try_from(int(most, -1)?).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    match separator.filter(|separator| !separator.is_none()) {
        Some(separator) => {
            let separator = needed(&separator)?;
            if separator.is_empty() {
                return Err(Error::failed("the separator is empty"));
            }
            let count = most.saturating_add(1);
            if from_end {
                text.rsplitn(count, separator).try_for_each(|part| run.push(&mut parts, part))?;
                parts.reverse();
            } else {
                text.splitn(count, separator).try_for_each(|part| run.push(&mut parts, part))?;
            }
        }
        None if from_end => {
            let mut rest = strip_end(text);
            while parts.len() < most && !rest.is_empty() {
                let from = rest.char_indices().rev().find(|(_, c)| is_space(*c)).map_or(0, |(at, c)| at + c.len_utf8());
                let (before, word) = rest.split_at(from);
                run.push(&mut parts, word)?;
                rest = strip_end(before);
            }
            parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
            parts.reverse();
        }
        None => {
            let mut rest = strip_start(text);
            while parts.len() < most && !rest.is_empty() {
                let (word, after) = rest.split_at(rest.find(is_space).unwrap_or(rest.len()));
                run.push(&mut parts, word)?;
                rest = strip_start(after);
            }
            parts.extend(Some(rest).filter(|rest| !rest.is_empty()));
        }
    }
    Value::list(parts.into_iter().map(|part| like(value, part.to_owned())).collect::<Vec<_>>())
}

fn replace(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let text = value.as_str().unwrap_or_default();
    let [old, new, count] = args.exactly(2)?;
    let (old, new) = (old.unwrap_or_default(), new.unwrap_or_default());
    let old = needed(&old)?;
    // Python escapes any object here; other types than texts are not needed.
    needed(&new)?;
    let new = if matches!(value, Value::Safe(_)) { escaped(&new) } else { new.as_str().unwrap_or_default().into() };
    let most = usize::try_from(int(count, -1)?).unwrap_or(usize::MAX);
    let matches = text.matches(old).count().min(most);
    if matches == 0 {
        return Ok(value.clone());
    }
    run.allow(text.len().saturating_add(matches.saturating_mul(new.len())))?;
    Ok(like(value, text.replacen(old, &new, most)))
}

fn join(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let separator = value.as_str().unwrap_or_default();
    let [list] = args.exactly(1)?;
    let items = run.collect(&list.unwrap_or_default())?;
    let is_safe = matches!(value, Value::Safe(_));
    let mut out = String::new();
    for (at, item) in items.iter().enumerate() {
        if at > 0 {
            out.push_str(separator);
        }
        let text = needed(item)?;
        if is_safe {
            out.push_str(&escaped(item));
        } else {
            out.push_str(text);
        }
        run.spend_on_text(text.len(), out.len())?;
    }
    Ok(like(value, out))
}

fn search(text: &str, name: &str, args: Args) -> Result<Value> {
    let [part, start, end] = args.exactly(1)?;
    let part = part.unwrap_or_default();
    let part = needed(&part)?;
    let bounded = bounded(text, start, end)?;
    if name == "count" {
        return Ok(Value::from(bounded.map_or(0, |(text, _)| text.matches(part).count())));
    }
    let found = bounded.and_then(|(text, before)| {
        let at = if name.starts_with('r') { text.rfind(part) } else { text.find(part) }?;
        Some(before + text.get(..at)?.chars().count())
    });
    match found {
        Some(at) => Ok(Value::from(at)),
        None if name.ends_with("find") => Ok(Value::Int(-1)),
        None => Err(Error::failed(format!("`{name}`: the text is not found"))),
    }
}

fn pad(run: &mut Run<'_>, value: &Value, name: &str, args: Args) -> Result<Value> {
    let text = value.as_str().unwrap_or_default();
    let is_number = name == "zfill";
    if is_number && args.positional.len() > 1 {
        return Err(Error::failed("`zfill` has one argument"));
    }
    let [width, fill] = args.exactly(1)?;
    let fill = fill.unwrap_or_else(|| Value::from(if is_number { "0" } else { " " }));
    let fill = if matches!(value, Value::Safe(_)) { escaped(&fill).into_owned() } else { needed(&fill)?.to_owned() };
    if fill.chars().count() != 1 {
        return Err(Error::failed("the fill character must be one character"));
    }
    let length = text.chars().count();
    let width = usize::try_from(int(width, 0)?).unwrap_or(0);
    let missing = width.saturating_sub(length);
    run.allow(text.len().saturating_add(missing.saturating_mul(4)))?;
    let (left, right) = match name {
        "ljust" => (0, missing),
        "center" => {
            let left = missing / 2 + (missing & width & 1);
            (left, missing - left)
        }
        _ => (missing, 0),
    };
    // The sign of a number stays first.
    let (sign, rest) = text.split_at(usize::from(is_number && text.starts_with(['+', '-'])));
    Ok(like(value, format!("{sign}{}{rest}{}", fill.repeat(left), fill.repeat(right))))
}

fn expand_tabs(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let text = value.as_str().unwrap_or_default();
    let [size] = args.bind(["tabsize"])?;
    let size = usize::try_from(int(size, 8)?).unwrap_or(0);
    run.allow(text.len().saturating_add(text.matches('\t').count().saturating_mul(size)))?;
    let (mut out, mut column) = (String::new(), 0);
    for c in text.chars() {
        match c {
            '\t' => {
                let width = if size == 0 { 0 } else { size - column % size };
                out.extend(std::iter::repeat_n(' ', width));
                column += width;
            }
            '\n' | '\r' => {
                out.push(c);
                column = 0;
            }
            c => {
                out.push(c);
                column += 1;
            }
        }
    }
    Ok(like(value, out))
}
