//! Filters of texts.

use super::{FilterFn, is_true, soft, whole};
use crate::characters::{is_letter, is_space};
use crate::methods::{call_text, split_lines};
use crate::render::{Args, Run, escape_html, like};
use crate::syntax::ast::Binary;
use crate::{Error, Result, Value, View};

pub(super) fn named(name: &str) -> Option<FilterFn> {
    Some(match name {
        "capitalize" => |run, value, args| method(run, value, "capitalize", args),
        "center" => |run, value, args| {
            let [width] = args.bind(["width"])?;
            method(run, value, "center", Args::of([width.unwrap_or(Value::Int(80))]))
        },
        "filesizeformat" => filesizeformat,
        "format" => format,
        "indent" => indent,
        "lower" => |run, value, args| method(run, value, "lower", args),
        "upper" => |run, value, args| method(run, value, "upper", args),
        "pprint" => pprint,
        "replace" => replace,
        "striptags" => striptags,
        "title" => title,
        "trim" => |run, value, args| {
            let [chars] = args.bind(["chars"])?;
            method(run, value, "strip", Args::of(chars))
        },
        "truncate" => truncate,
        "urlencode" => urlencode,
        "wordcount" => wordcount,
        "wordwrap" => wordwrap,
        "xmlattr" => xmlattr,
        _ => return None,
    })
}

/// A method of the value as a text.
fn method(run: &mut Run<'_>, value: &Value, name: &str, args: Args) -> Result<Value> {
    if value.is_text() {
        return call_text(run, value, name, args);
    }
    let text = soft(run, value)?;
    call_text(run, &text, name, args)
}

/// The text of a value that must be one.
fn text_of<'v>(name: &str, value: &'v Value) -> Result<&'v str> {
    value.as_str().ok_or_else(|| Error::failed(format!("`{name}` needs a text, not {}", value.type_name())))
}

fn filesizeformat(_: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [binary] = args.bind(["binary"])?;
    let number = match value.as_str() {
        Some(text) => crate::numbers::parse_float(text),
        None => value.as_float(),
    };
    let bytes = number.filter(|n| n.is_finite()).ok_or_else(|| Error::failed("`filesizeformat` needs a number"))?;
    let (base, units) = match is_true(binary) {
        true => (1024.0_f64, ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB", "ZiB", "YiB"]),
        false => (1000.0, ["kB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB"]),
    };
    if bytes == 1.0 {
        return Ok(Value::from("1 Byte"));
    }
    if bytes < base {
        return Ok(Value::from(format!("{} Bytes", bytes.trunc() as i128)));
    }
    let mut unit = base * base;
    let mut name = units[0];
    for next in &units[1..] {
        if bytes < unit {
            break;
        }
        unit *= base;
        name = next;
    }
    Ok(Value::from(format!("{:.1} {name}", base * bytes / unit)))
}

fn format(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let text = soft(run, value)?;
    let values = match (args.positional.is_empty(), args.named.is_empty()) {
        (false, false) => return Err(Error::failed("`format` takes either positional or named arguments")),
        (_, true) => Value::tuple(args.positional.into_vec())?,
        (true, false) => Value::dict(args.named.into_iter().map(|(name, value)| (Value::Text(name), value)))?,
    };
    run.binary(Binary::Remainder, &text, &values)
}

fn indent(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [width, first, blank] = args.bind(["width", "first", "blank"])?;
    let text = text_of("indent", value)?;
    let indention = match (width, value) {
        (Some(Value::Text(text)), Value::Text(_)) => text.to_string(),
        (Some(Value::Text(_) | Value::Safe(_)), _) => {
            return Err(Error::failed("`indent` of or by a safe text is not supported"));
        }
        (width, _) => {
            let width = usize::try_from(whole(width, 4)?).unwrap_or(0);
            run.allow(width)?;
            " ".repeat(width)
        }
    };
    let (first, blank) = (is_true(first), is_true(blank));
    let text = format!("{text}\n");
    let all = split_lines(run, &text, false)?;
    run.allow(text.len() + all.len().saturating_mul(indention.len()))?;
    let mut out = String::with_capacity(text.len());
    if first {
        out.push_str(&indention);
    }
    for (at, line) in all.iter().enumerate() {
        if at > 0 {
            out.push('\n');
            if blank || !line.is_empty() {
                out.push_str(&indention);
            }
        }
        out.push_str(line);
    }
    Ok(like(value, out))
}

/// Short values are printed as their `repr`, with sorted keys.
fn pprint(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    let text = run.repr(&sorted_keys(value)?)?;
    if text.len() > 78 {
        return Err(Error::failed("`pprint` of a value that takes several lines is not supported"));
    }
    Ok(Value::from(text))
}

fn sorted_keys(value: &Value) -> Result<Value> {
    let inner = |values: &[Value]| values.iter().map(sorted_keys).collect::<Result<Vec<_>>>();
    Ok(match value.level() {
        Value::List(items) => Value::list(inner(items)?)?,
        Value::Tuple(items) => Value::tuple(inner(items)?)?,
        Value::Dict(dict) => {
            let mut entries = Vec::new();
            for (key, value) in dict.iter() {
                entries.push((text_of("pprint", key)?, sorted_keys(value)?));
            }
            entries.sort_by(|a, b| a.0.cmp(b.0));
            Value::dict(entries)?
        }
        other => other.clone(),
    })
}

fn replace(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [old, new, count] = args.bind(["old", "new", "count"])?;
    let (Some(old), Some(new)) = (old, new) else { return Err(Error::failed("`replace` needs two texts")) };
    // The result is never safe.
    let plain = |run: &mut Run<'_>, value: &Value| match value {
        Value::Text(_) => Ok(value.clone()),
        value => run.text(value).map(|text| Value::from(text.into_owned())),
    };
    let (text, old, new) = (plain(run, value)?, plain(run, &old)?, plain(run, &new)?);
    let count = count.filter(|count| !count.is_none()).unwrap_or(Value::Int(-1));
    call_text(run, &text, "replace", Args::of([old, new, count]))
}

/// Removes what is between `open` and `close`.
fn without(text: &str, open: &str, close: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find(open) {
        let Some(end) = rest.get(start..).and_then(|tag| tag.find(close)) else { break };
        out.push_str(rest.get(..start).unwrap_or_default());
        rest = rest.get(start + end + close.len()..).unwrap_or_default();
    }
    out.push_str(rest);
    out
}

fn striptags(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    let text = run.text(value)?;
    run.spend(text.len().saturating_mul(8))?;
    let text = without(&without(&text, "<!--", "-->"), "<", ">");
    if text.contains('<') {
        return Err(Error::failed("`striptags` of tags within tags is not supported"));
    }
    let words: Vec<&str> = text.split(is_space).filter(|word| !word.is_empty()).collect();
    let text = words.join(" ");
    let mut plain = String::new();
    let mut rest = text.as_str();
    while let Some((before, entity)) = rest.split_once('&') {
        plain.push_str(before);
        let known = [("amp;", '&'), ("lt;", '<'), ("gt;", '>'), ("quot;", '"'), ("#39;", '\''), ("#34;", '"')];
        if let Some((name, c)) = known.iter().find(|(name, _)| entity.starts_with(name)) {
            plain.push(*c);
            rest = entity.get(name.len()..).unwrap_or_default();
        } else if entity.starts_with(|c: char| c.is_ascii_alphabetic() || c == '#') {
            return Err(Error::failed("`striptags` knows few HTML entities"));
        } else {
            plain.push('&');
            rest = entity;
        }
    }
    plain.push_str(rest);
    Ok(Value::from(plain))
}

fn title(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    let text = run.text(value)?;
    run.spend(text.len())?;
    let separates = |c: char| matches!(c, '-' | '(' | '{' | '[' | '<') || is_space(c);
    let mut out = String::with_capacity(text.len());
    let mut rest: &str = &text;
    while let Some(first) = rest.chars().next() {
        let length = rest.find(|c| separates(c) != separates(first)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(length);
        let (head, tail) = word.split_at(first.len_utf8());
        out.push_str(&head.to_uppercase());
        out.push_str(&tail.to_lowercase());
        rest = after;
    }
    Ok(Value::from(out))
}

fn truncate(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [length, kill, end, leeway] = args.bind(["length", "killwords", "end", "leeway"])?;
    let Some(text) = value.as_str() else {
        // A short list is not changed, and a long one can't be joined to the end.
        let (length, leeway) = (whole(length, 255)?, whole(leeway.filter(|l| !l.is_none()), 5)?);
        return match run.len(value)? {
            Some(len) if len as i128 <= length + leeway => Ok(value.clone()),
            _ => text_of("truncate", value).map(Value::from),
        };
    };
    let end = end.unwrap_or_else(|| Value::from("..."));
    let (length, leeway) = (whole(length, 255)?, whole(leeway.filter(|l| !l.is_none()), 5)?);
    let kept = length - text_of("truncate", &end)?.chars().count() as i128;
    if kept < 0 || leeway < 0 {
        return Err(Error::failed("`truncate` needs a length for the end at least"));
    }
    run.spend(text.len())?;
    if text.chars().count() as i128 <= length + leeway {
        return Ok(value.clone());
    }
    let cut = run.slice(value, [None, Some(kept), None])?;
    let cut = match cut.as_str().and_then(|text| text.rsplit_once(' ')) {
        Some((before, _)) if !is_true(kill) => like(value, before.to_owned()),
        _ => cut,
    };
    run.binary(Binary::Add, &cut, &end)
}

/// Percent encoding of UTF-8.
fn quoted(text: &str, for_query: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => out.push(char::from(byte)),
            b'/' if !for_query => out.push('/'),
            b' ' if for_query => out.push('+'),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

fn urlencode(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    if value.is_text() || !Run::is_iterable(value) {
        let text = run.text(value)?;
        run.allow(text.len().saturating_mul(3))?;
        return Ok(Value::from(quoted(&text, false)));
    }
    let pairs = match value.as_dict() {
        Some(dict) => run.collect(&Value::View(View::Items, dict.clone()))?,
        None => run.collect(value)?,
    };
    let mut parts = Vec::new();
    for pair in pairs.iter() {
        match &**run.collect(pair)? {
            [key, value] => {
                let (key, value) = (run.text(key)?, run.text(value)?);
                run.allow((key.len() + value.len()).saturating_mul(3))?;
                parts.push(format!("{}={}", quoted(&key, true), quoted(&value, true)));
            }
            _ => return Err(Error::failed("`urlencode` needs pairs")),
        }
    }
    Ok(Value::from(parts.join("&")))
}

fn wordcount(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    args.exactly::<0>(0)?;
    let text = run.text(value)?;
    run.spend(text.len())?;
    // Rust counts more marks as letters than Python does.
    if text.chars().any(|c| !c.is_ascii() && c.is_alphanumeric() && !is_letter(c)) {
        return Err(Error::failed("`wordcount` of such letters is not supported"));
    }
    let words = text.split(|c: char| c != '_' && !c.is_alphanumeric()).filter(|word| !word.is_empty());
    Ok(Value::from(words.count()))
}

/// Texts whose lines are short, or consist of plain words with single spaces.
fn wordwrap(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [width, _, wrap, _] = args.bind(["width", "break_long_words", "wrapstring", "break_on_hyphens"])?;
    let text = text_of("wordwrap", value)?;
    run.spend(text.len())?;
    let width = whole(width, 79)?;
    let wrap = wrap.filter(|wrap| !wrap.is_none()).unwrap_or_else(|| Value::from("\n"));
    let wrap = text_of("wordwrap", &wrap)?;
    let size = |text: &str| text.chars().count() as i128;
    let is_plain = |word: &str| !word.is_empty() && size(word) <= width && word.chars().all(char::is_alphanumeric);
    let all = split_lines(run, text, false)?;
    let mut wrapped = Vec::new();
    for line in all {
        if !line.is_empty() && !line.split(' ').all(is_plain) {
            return Err(Error::failed("`wordwrap` of other texts than plain words is not supported"));
        }
        let (mut out, mut length) = (String::new(), 0);
        for word in line.split(' ') {
            if length > 0 && length + 1 + size(word) > width {
                out.push_str(wrap);
                length = 0;
            } else if length > 0 {
                out.push(' ');
                length += 1;
            }
            out.push_str(word);
            length += size(word);
        }
        run.allow(out.len())?;
        wrapped.push(out);
    }
    Ok(Value::from(wrapped.join(wrap)))
}

fn xmlattr(run: &mut Run<'_>, value: &Value, args: Args) -> Result<Value> {
    let [space] = args.bind(["autospace"])?;
    let Some(dict) = value.as_dict() else { return Err(Error::failed("`xmlattr` needs a dictionary")) };
    let mut parts = Vec::new();
    for (key, value) in dict.iter().filter(|(_, value)| !value.is_none() && !value.is_undefined()) {
        let name = text_of("xmlattr", key)?;
        if name.contains([' ', '\t', '\n', '\x0b', '\x0c', '\r', '/', '>', '=']) {
            return Err(Error::failed("invalid character in attribute name"));
        }
        let escaped = |run: &mut Run<'_>, value: &Value| match value {
            Value::Safe(text) => Ok(text.to_string()),
            value => run.text(value).map(|text| escape_html(&text).into_owned()),
        };
        let (key, text) = (escaped(run, key)?, escaped(run, value)?);
        run.allow(text.len())?;
        parts.push(format!("{key}=\"{text}\""));
    }
    let joined = parts.join(" ");
    let spaced = !parts.is_empty() && space.is_none_or(|space| space.is_true());
    Ok(Value::from(if spaced { format!(" {joined}") } else { joined }))
}
