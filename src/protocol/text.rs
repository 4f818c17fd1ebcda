//! Text of a request as it is in the body. Its escapes are kept until it is read, since it may never be needed.
//!
//! Made by the parsers, read by `prompt` and `ext_proc`. Imports nothing.

use memchr::memchr;
use std::borrow::Cow;

/// A string of a request. Its length is known; its reader unescapes it.
#[derive(Clone, Debug)]
pub struct Text<'a>(Form<'a>);

#[derive(Clone, Debug)]
enum Form<'a> {
    /// Text without escapes.
    Plain(Cow<'a, str>),
    /// The bytes between the quotes of a JSON string, with valid escapes.
    Json {
        raw: &'a str,
        /// Length in bytes without escapes; equals that of `raw` when there are none.
        len: usize,
        /// Whether it is the text's [canonical form](Text::canonical).
        canonical: bool,
    },
}

/// Properties of the escapes in a JSON string that [`escape`] has read.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Escapes {
    /// Bytes that the escapes add to the text.
    lost: usize,
    /// Whether any escape is written differently from [`Text::canonical`].
    odd: bool,
}

impl Escapes {
    /// Adds an escape for the character `made` that takes `length` bytes after its backslash.
    #[inline]
    pub(super) fn add(&mut self, made: char, length: usize) {
        self.lost += 1 + length - made.len_utf8();
        self.odd |= length > 1 || made == '/';
    }
}

/// A text in the form in which it is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written<'t> {
    /// Text without escapes.
    Plain(&'t str),
    /// Text with JSON escapes.
    Escaped(&'t str),
}

impl<'a> Text<'a> {
    /// Creates a text from the inside of a JSON string and the properties of its escapes.
    pub(super) fn of_json(raw: &'a str, escapes: Escapes) -> Self {
        Self(Form::Json { raw, len: raw.len().saturating_sub(escapes.lost), canonical: !escapes.odd })
    }

    /// Returns the length in bytes of UTF-8, without escapes.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Form::Plain(text) => text.len(),
            Form::Json { len, .. } => *len,
        }
    }

    /// Whether the text is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the text, borrowed from the body when it has no escapes.
    #[must_use]
    pub fn get(&self) -> Cow<'_, str> {
        match self.written() {
            Written::Plain(text) => Cow::Borrowed(text),
            Written::Escaped(raw) => Cow::Owned(unescaped(raw)),
        }
    }

    /// As [`Text::get`], with the lifetime of the body.
    #[must_use]
    pub(crate) fn into_cow(self) -> Cow<'a, str> {
        match self.0 {
            Form::Plain(text) => text,
            Form::Json { raw, len, .. } if raw.len() == len => Cow::Borrowed(raw),
            Form::Json { raw, .. } => Cow::Owned(unescaped(raw)),
        }
    }

    /// Returns the text in the form in which it is in memory.
    pub fn written(&self) -> Written<'_> {
        match &self.0 {
            Form::Plain(text) => Written::Plain(text),
            Form::Json { raw, len, .. } if raw.len() == *len => Written::Plain(raw),
            Form::Json { raw, .. } => Written::Escaped(raw),
        }
    }

    /// Returns the one form that a text has, however a client escapes it: `"`, `\` and `\b \f \n \r \t` are escaped by
    /// two characters, nothing else is. Nearly all JSON has this form. Different texts have different forms, and texts
    /// with a common prefix have forms with a common prefix.
    pub fn canonical(&self) -> Cow<'_, str> {
        match &self.0 {
            Form::Plain(text) => canonical(text),
            Form::Json { raw, canonical: true, .. } => Cow::Borrowed(raw),
            Form::Json { raw, .. } => Cow::Owned(canonical(&unescaped(raw)).into_owned()),
        }
    }

    /// Whether the text begins with `prefix`, ignoring leading white space. Reads no further than necessary.
    pub fn begins_with(&self, prefix: &str) -> bool {
        match self.written() {
            Written::Plain(text) => text.trim_start().starts_with(prefix),
            Written::Escaped(raw) => {
                let chars = Parts(raw).flat_map(|part| part.run.chars().chain(part.escape));
                let mut chars = chars.skip_while(|c| c.is_whitespace());
                prefix.chars().all(|c| chars.next() == Some(c))
            }
        }
    }
}

/// [`Text::canonical`] of a text that never was in JSON.
pub fn canonical(text: &str) -> Cow<'_, str> {
    let letter = |byte: u8| match byte {
        b'"' | b'\\' => Some(char::from(byte)),
        b'\n' => Some('n'),
        b'\t' => Some('t'),
        b'\r' => Some('r'),
        0x8 => Some('b'),
        0xc => Some('f'),
        _ => None,
    };
    let (mut out, mut kept) = (String::new(), 0);
    for at in Specials::new(text.as_bytes()) {
        if let Some(letter) = text.as_bytes().get(at).copied().and_then(letter) {
            out.push_str(text.get(kept..at).unwrap_or_default());
            out.push('\\');
            out.push(letter);
            kept = at + 1;
        }
    }
    if kept == 0 {
        return Cow::Borrowed(text);
    }
    out.push_str(text.get(kept..).unwrap_or_default());
    Cow::Owned(out)
}

/// Bytes that are processed together.
const STRIDE: usize = 64;

/// Iterates over the special bytes of a JSON string: quotes, backslashes, control characters.
#[derive(Clone, Debug)]
pub(super) struct Specials<'t> {
    bytes: &'t [u8],
    /// Offset of the bytes that `bits` describes, and of those after them.
    base: usize,
    next: usize,
    bits: u64,
}

impl<'t> Specials<'t> {
    pub(super) fn new(bytes: &'t [u8]) -> Self {
        Self { bytes, base: 0, next: 0, bits: 0 }
    }
}

impl Iterator for Specials<'_> {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        while self.bits == 0 {
            let rest = self.bytes.get(self.next..).filter(|rest| !rest.is_empty())?;
            self.bits = match rest.first_chunk() {
                Some(chunk) => specials(chunk),
                None => {
                    let mut last = [b' '; STRIDE];
                    last.iter_mut().zip(rest).for_each(|(to, from)| *to = *from);
                    specials(&last)
                }
            };
            (self.base, self.next) = (self.next, self.next + STRIDE);
        }
        let at = self.base + self.bits.trailing_zeros() as usize;
        self.bits &= self.bits - 1;
        Some(at)
    }
}

/// Returns one bit for each special byte of `chunk`, without branches. Positions of escapes are unpredictable, so a
/// loop that stops at each of them would cost more in mispredictions.
#[inline]
fn specials(chunk: &[u8; STRIDE]) -> u64 {
    let special = |byte: u8| u8::from(byte == b'"') | u8::from(byte == b'\\') | u8::from(byte < 0x20);
    let flags = chunk.map(|byte| special(byte).wrapping_neg());
    let (eights, _) = flags.as_chunks::<8>();
    // A multiplication collects one bit of each of eight flags in the top byte.
    let gather = |flags: &[u8; 8]| {
        (u64::from_le_bytes(*flags) & 0x8040_2010_0804_0201).wrapping_mul(0x0101_0101_0101_0101) >> 56
    };
    eights.iter().rev().fold(0, |bits, eight| bits << 8 | gather(eight))
}

impl PartialEq for Text<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl PartialEq<str> for Text<'_> {
    fn eq(&self, other: &str) -> bool {
        self.get() == other
    }
}

impl<'a> From<&'a str> for Text<'a> {
    fn from(text: &'a str) -> Self {
        Self(Form::Plain(Cow::Borrowed(text)))
    }
}

impl From<String> for Text<'_> {
    fn from(text: String) -> Self {
        Self(Form::Plain(Cow::Owned(text)))
    }
}

/// Unescapes the inside of a JSON string with valid escapes.
pub fn unescaped(raw: &str) -> String {
    let mut out = String::with_capacity(raw.len());
    for part in Parts(raw) {
        out.push_str(part.run);
        if let Some(made) = part.escape {
            out.push(made);
        }
    }
    out
}

/// Text without escapes, and the character of the escape after it.
struct TextRun<'a> {
    run: &'a str,
    escape: Option<char>,
}

/// Iterates over the parts of the inside of a JSON string.
struct Parts<'a>(&'a str);

impl<'a> Iterator for Parts<'a> {
    type Item = TextRun<'a>;

    #[inline]
    fn next(&mut self) -> Option<TextRun<'a>> {
        if self.0.is_empty() {
            return None;
        }
        let escaped = memchr(b'\\', self.0.as_bytes()).and_then(|at| {
            let (run, behind) = (self.0.get(..at)?, self.0.get(at + 1..)?);
            let (made, length) = escape(behind.as_bytes()).ok()?;
            Some((TextRun { run, escape: Some(made) }, behind.get(length..)?))
        });
        let (part, rest) = escaped.unwrap_or((TextRun { run: self.0, escape: None }, ""));
        self.0 = rest;
        Some(part)
    }
}

/// Returns the character that an escape stands for and its length in bytes; `behind` begins after the backslash.
///
/// # Errors
/// A description of the invalid escape.
#[inline]
pub(super) fn escape(behind: &[u8]) -> Result<(char, usize), &'static str> {
    let made = match behind.first() {
        Some(b'n') => '\n',
        Some(b'"') => '"',
        Some(b'\\') => '\\',
        Some(b't') => '\t',
        Some(b'r') => '\r',
        Some(b'/') => '/',
        Some(b'b') => '\u{8}',
        Some(b'f') => '\u{c}',
        Some(b'u') => return hex_escape(behind),
        Some(_) => return Err("invalid escape"),
        None => return Err("unexpected end of an escape"),
    };
    Ok((made, 1))
}

#[cold]
fn hex_escape(behind: &[u8]) -> Result<(char, usize), &'static str> {
    let first = hex(behind.get(1..5))?;
    if let Some(made) = char::from_u32(first) {
        return Ok((made, 5));
    }
    // A first half of a surrogate pair: the other half must follow.
    let low = match behind.get(5..7) {
        Some(b"\\u") if first < 0xDC00 => hex(behind.get(7..11))?,
        _ => return Err("lone surrogate in a hex escape"),
    };
    let made = match low {
        0xDC00..=0xDFFF => char::from_u32(0x1_0000 + ((first - 0xD800) << 10) + (low - 0xDC00)),
        _ => None,
    };
    made.map(|made| (made, 11)).ok_or("lone surrogate in a hex escape")
}

fn hex(digits: Option<&[u8]>) -> Result<u32, &'static str> {
    let digits = digits.ok_or("unexpected end of a hex escape")?;
    digits.iter().try_fold(0, |sum, digit| {
        let digit = char::from(*digit).to_digit(16).ok_or("invalid hex escape")?;
        Ok(sum << 4 | digit)
    })
}

#[cfg(test)]
mod tests;
