//! Replaces the model's name in a request's body, and back in its response, without changing any other byte.
//!
//! Called by `ext_proc::exchange` when a pool rewrites model names. Imports nothing of the crate.

use memchr::memmem;
use std::ops::Range;
use std::sync::LazyLock;

const KEY: &[u8] = b"\"model\"";
static KEY_FINDER: LazyLock<memmem::Finder<'static>> = LazyLock::new(|| memmem::Finder::new(KEY));

/// Most white space on each side of the colon that is recognised. No server writes more, and it would
/// have to be held back.
const MAX_SPACE: usize = 32;

/// Returns `body` with the bytes of `span` replaced by `name` as a JSON string. An empty span changes nothing.
#[must_use]
pub fn replace_model(body: &[u8], span: Range<usize>, name: &str) -> Vec<u8> {
    let (Some(before), Some(after)) = (body.get(..span.start), body.get(span.end..)) else { return body.to_vec() };
    if span.is_empty() {
        return body.to_vec();
    }
    let name = json_string(name);
    [before, &name, after].concat()
}

/// Returns `body`, a form, with the bytes of `span` replaced by `name`.
#[must_use]
pub fn replace_form_model(body: &[u8], span: Range<usize>, name: &str) -> Vec<u8> {
    let (Some(before), Some(after)) = (body.get(..span.start), body.get(span.end..)) else { return body.to_vec() };
    [before, name.as_bytes(), after].concat()
}

/// Returns `body`, an object without a model, with this one as its first member.
#[must_use]
pub fn insert_model(body: &[u8], name: &str) -> Vec<u8> {
    let Some(brace) = body.iter().position(|byte| *byte == b'{') else { return body.to_vec() };
    let (before, after) = body.split_at(brace + 1);
    let is_empty = after.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'}');
    let comma: &[u8] = if is_empty { b"" } else { b"," };
    [before, KEY, b":", &json_string(name), comma, after].concat()
}

fn json_string(text: &str) -> Vec<u8> {
    // Writing a string into memory cannot fail.
    serde_json::to_vec(text).unwrap_or_default()
}

/// Replaces the server's model name with the client's in a response: every value of a `"model"` key that equals
/// `target`, in JSON or server-sent events, for any chunks.
///
/// A quote inside a JSON string is escaped, so the bytes `"model"` without a backslash before and with a colon after
/// are a key; text that quotes JSON stays unchanged. A possible start of such a pair at the end of a chunk is held
/// back, at most a few hundred bytes, until the next chunk decides.
#[derive(Clone, Debug)]
pub struct ModelRenamer {
    target: String,
    replacement: Vec<u8>,
    /// Bytes that were received and not sent yet.
    held: Vec<u8>,
    /// The byte before `held`.
    before: u8,
}

/// The value of a key.
#[derive(Debug, PartialEq, Eq)]
enum SplicedValue {
    /// The value is not the target.
    Other,
    /// The value matches the target as far as the bytes go.
    Unfinished,
    /// The value is the target: the bytes of the JSON string, including quotes.
    Target(Range<usize>),
}

impl ModelRenamer {
    /// Creates a renamer from `target`, the server's name, to `incoming`, the client's. `None` when the names are
    /// equal or one is empty.
    #[must_use]
    pub fn new(target: &str, incoming: &str) -> Option<Self> {
        (!target.is_empty() && !incoming.is_empty() && target != incoming).then(|| Self {
            target: target.to_owned(),
            replacement: json_string(incoming),
            held: Vec::new(),
            before: 0,
        })
    }

    /// Processes the next bytes of the response; `end` means that they are the last. Returns false when exactly these
    /// bytes are to be sent, and true when what was appended to `out` is to be sent instead (possibly nothing yet).
    pub fn push(&mut self, chunk: &[u8], end: bool, out: &mut Vec<u8>) -> bool {
        if self.held.is_empty() {
            return self.rename(chunk, end, out);
        }
        let mut joined = std::mem::take(&mut self.held);
        joined.extend_from_slice(chunk);
        if !self.rename(&joined, end, out) {
            out.extend_from_slice(&joined);
        }
        true
    }

    fn rename(&mut self, data: &[u8], end: bool, out: &mut Vec<u8>) -> bool {
        let mut copied = 0;
        let mut from = 0;
        let mut hold = None;
        while let Some(found) = data.get(from..).and_then(|d| KEY_FINDER.find(d)) {
            let at = from + found;
            let behind = at + KEY.len();
            // The closing quote of one key may be the opening quote of the next.
            from = behind - 1;
            if self.byte_before(data, at) == b'\\' {
                continue;
            }
            match value(data.get(behind..).unwrap_or_default(), &self.target) {
                SplicedValue::Other => {}
                SplicedValue::Unfinished => {
                    hold = Some(at);
                    break;
                }
                SplicedValue::Target(span) => {
                    out.extend_from_slice(data.get(copied..behind + span.start).unwrap_or_default());
                    out.extend_from_slice(&self.replacement);
                    copied = behind + span.end;
                    from = copied;
                }
            }
        }
        let hold = hold.or_else(|| begun_key(data, from)).filter(|_| !end);
        let keep = hold.unwrap_or(data.len());
        self.before = self.byte_before(data, keep);
        if copied == 0 && hold.is_none() {
            return false;
        }
        out.extend_from_slice(data.get(copied..keep).unwrap_or_default());
        self.held.extend_from_slice(data.get(keep..).unwrap_or_default());
        true
    }

    fn byte_before(&self, data: &[u8], at: usize) -> u8 {
        at.checked_sub(1).and_then(|i| data.get(i)).copied().unwrap_or(self.before)
    }
}

/// Returns where an incomplete key begins at the end of `data`, not before `from`.
fn begun_key(data: &[u8], from: usize) -> Option<usize> {
    let first = data.len().saturating_sub(KEY.len() - 1).max(from);
    (first..data.len()).find(|at| data.get(*at..).is_some_and(|tail| KEY.starts_with(tail)))
}

/// Compares what follows a key with `: "target"`, escapes resolved.
fn value(bytes: &[u8], target: &str) -> SplicedValue {
    let mut rest = bytes;
    for punctuation in [b':', b'"'] {
        let space = rest.iter().take(MAX_SPACE).take_while(|b| b.is_ascii_whitespace()).count();
        match rest.get(space) {
            None => return SplicedValue::Unfinished,
            Some(b) if *b == punctuation => rest = rest.get(space + 1..).unwrap_or_default(),
            Some(_) => return SplicedValue::Other,
        }
    }
    let start = bytes.len() - rest.len() - 1;
    for expected in target.chars() {
        match character(rest, expected) {
            Character::Same(len) => rest = rest.get(len..).unwrap_or_default(),
            Character::Unfinished => return SplicedValue::Unfinished,
            Character::Other => return SplicedValue::Other,
        }
    }
    match rest.first() {
        None => SplicedValue::Unfinished,
        Some(b'"') => SplicedValue::Target(start..bytes.len() - rest.len() + 1),
        Some(_) => SplicedValue::Other,
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Character {
    /// The characters are equal; the escape takes this many bytes.
    Same(usize),
    /// The bytes match as far as they go.
    Unfinished,
    Other,
}

/// Compares the first character of `bytes`, plain or in any of JSON's escapes, with `expected`.
fn character(bytes: &[u8], expected: char) -> Character {
    if bytes.first() != Some(&b'\\') {
        // Quotes and backslashes must be escaped.
        if bytes.first() == Some(&b'"') {
            return Character::Other;
        }
        return spelling(bytes, expected.encode_utf8(&mut [0; 4]).as_bytes(), <[u8]>::eq);
    }
    let Some(escape) = bytes.get(1) else { return Character::Unfinished };
    if *escape == b'u' {
        let mut units = [0; 2];
        let spelled: String = expected.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")).collect();
        return spelling(bytes, spelled.as_bytes(), <[u8]>::eq_ignore_ascii_case);
    }
    let stands_for = match escape {
        b'n' => '\n',
        b't' => '\t',
        b'r' => '\r',
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'"' | b'\\' | b'/' => char::from(*escape),
        _ => return Character::Other,
    };
    if stands_for == expected { Character::Same(2) } else { Character::Other }
}

fn spelling(bytes: &[u8], spelled: &[u8], same: fn(&[u8], &[u8]) -> bool) -> Character {
    let len = bytes.len().min(spelled.len());
    let same = bytes.get(..len).zip(spelled.get(..len)).is_some_and(|(a, b)| same(a, b));
    match same {
        false => Character::Other,
        true if len < spelled.len() => Character::Unfinished,
        true => Character::Same(len),
    }
}

#[cfg(test)]
mod tests;
