//! Text of a request as it stands in its body: whether anybody reads it is decided later, so its escapes stay where they are until then.
//!
//! Made by the parsers, read by `prompt` and `ext_proc`. Imports nothing.

use memchr::memchr;
use std::borrow::Cow;

/// A string of a request. Its length is known; unescaping it is left to whoever reads it.
#[derive(Clone, Debug)]
pub struct Text<'a>(Form<'a>);

#[derive(Clone, Debug)]
enum Form<'a> {
    /// As it is.
    Plain(Cow<'a, str>),
    /// What stands between the quotes of a JSON string, its escapes found good.
    Json {
        raw: &'a str,
        /// Bytes without escapes; as many as `raw` has when there are none.
        len: usize,
        /// Whether it is the text's [canonical form](Text::canonical).
        canonical: bool,
    },
}

/// What is known of the escapes of a JSON string once [`escape`] has taken them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Escapes {
    /// Bytes that they make it longer than its text.
    lost: usize,
    /// Some are written otherwise than [`Text::canonical`] writes them.
    odd: bool,
}

impl Escapes {
    /// One more, which stands for `made` and takes `length` bytes behind its backslash.
    #[inline]
    pub(super) fn add(&mut self, made: char, length: usize) {
        self.lost += 1 + length - made.len_utf8();
        self.odd |= length > 1 || made == '/';
    }
}

/// A text, or what of it stands in JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written<'t> {
    /// The text.
    Plain(&'t str),
    /// With escapes.
    Escaped(&'t str),
}

impl<'a> Text<'a> {
    /// The inside of a JSON string and what is known of its escapes.
    pub(super) fn of_json(raw: &'a str, escapes: Escapes) -> Self {
        Self(Form::Json { raw, len: raw.len().saturating_sub(escapes.lost), canonical: !escapes.odd })
    }

    /// Bytes of the text, UTF-8, without escapes.
    #[must_use]
    pub fn len(&self) -> usize {
        match &self.0 {
            Form::Plain(text) => text.len(),
            Form::Json { len, .. } => *len,
        }
    }

    /// Whether there is no text.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The text, borrowed from the body when it holds no escapes.
    #[must_use]
    pub fn get(&self) -> Cow<'_, str> {
        match self.written() {
            Written::Plain(text) => Cow::Borrowed(text),
            Written::Escaped(raw) => Cow::Owned(unescaped(raw)),
        }
    }

    /// As [`Text::get`], for as long as the body lives.
    #[must_use]
    pub fn into_cow(self) -> Cow<'a, str> {
        match self.0 {
            Form::Plain(text) => text,
            Form::Json { raw, len, .. } if raw.len() == len => Cow::Borrowed(raw),
            Form::Json { raw, .. } => Cow::Owned(unescaped(raw)),
        }
    }

    /// The text as it lies in memory.
    pub fn written(&self) -> Written<'_> {
        match &self.0 {
            Form::Plain(text) => Written::Plain(text),
            Form::Json { raw, len, .. } if raw.len() == *len => Written::Plain(raw),
            Form::Json { raw, .. } => Written::Escaped(raw),
        }
    }

    /// The one form that a text has however a client escapes it, which is the one that nearly all JSON has it in: quotes, backslashes and
    /// `\b \f \n \r \t` are escaped by two characters, nothing else is. No two texts share one, and of texts that begin alike it
    /// begins alike.
    pub fn canonical(&self) -> Cow<'_, str> {
        match &self.0 {
            Form::Plain(text) => canonical(text),
            Form::Json { raw, canonical: true, .. } => Cow::Borrowed(raw),
            Form::Json { raw, .. } => Cow::Owned(canonical(&unescaped(raw)).into_owned()),
        }
    }

    /// Whether the text, but for white space in front, begins with `prefix`. Looks no further than that takes.
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

/// [`Text::canonical`] of a text that was never in JSON.
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

/// Bytes that are looked at together.
const STRIDE: usize = 64;

/// The places of what is no plain text in a JSON string: quotes, backslashes, control characters.
#[derive(Clone, Debug)]
pub(super) struct Specials<'t> {
    bytes: &'t [u8],
    /// Where the bytes begin of which `bits` tell, and where those behind them do.
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

/// A bit for each byte of `chunk` that is special. Without branches: where escapes stand is what no processor foresees, so a loop that ends
/// at each of them costs more in wrong guesses than the work itself.
#[inline]
fn specials(chunk: &[u8; STRIDE]) -> u64 {
    let special = |byte: u8| u8::from(byte == b'"') | u8::from(byte == b'\\') | u8::from(byte < 0x20);
    let flags = chunk.map(|byte| special(byte).wrapping_neg());
    let (eights, _) = flags.as_chunks::<8>();
    // Of eight flags one bit each, brought together in the top byte by a multiplication.
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

/// The text of what stands in JSON, its escapes found good.
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

/// Text without escapes, and the character of the escape behind it.
struct Part<'a> {
    run: &'a str,
    escape: Option<char>,
}

/// The parts of the inside of a JSON string.
struct Parts<'a>(&'a str);

impl<'a> Iterator for Parts<'a> {
    type Item = Part<'a>;

    #[inline]
    fn next(&mut self) -> Option<Part<'a>> {
        if self.0.is_empty() {
            return None;
        }
        let escaped = memchr(b'\\', self.0.as_bytes()).and_then(|at| {
            let (run, behind) = (self.0.get(..at)?, self.0.get(at + 1..)?);
            let (made, length) = escape(behind.as_bytes()).ok()?;
            Some((Part { run, escape: Some(made) }, behind.get(length..)?))
        });
        let (part, rest) = escaped.unwrap_or((Part { run: self.0, escape: None }, ""));
        self.0 = rest;
        Some(part)
    }
}

/// The character that an escape stands for and the bytes that it takes; `behind` begins behind the backslash.
///
/// # Errors
/// What is wrong with it.
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
    // Half of a character: the other half must follow.
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
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(raw: &str) -> Text<'_> {
        let mut escapes = Escapes::default();
        let mut rest = raw;
        while let Some(at) = rest.find('\\') {
            let (made, length) = escape(&rest.as_bytes()[at + 1..]).unwrap();
            escapes.add(made, length);
            rest = &rest[at + 1 + length..];
        }
        Text::of_json(raw, escapes)
    }

    #[test]
    fn what_is_no_escape() {
        for (behind, says) in [
            ("", "end"),
            ("x", "invalid escape"),
            ("N", "invalid escape"),
            ("u", "end"),
            ("u12", "end"),
            ("u12g4", "invalid hex"),
            ("u+123", "invalid hex"),
            ("udc00", "lone"),
            ("ud800", "lone"),
            ("ud800xu", "lone"),
            ("ud800\\n", "lone"),
            ("ud800\\u12", "end"),
            ("ud800\\u0041", "lone"),
            ("ud800\\ud800", "lone"),
        ] {
            let error = escape(behind.as_bytes()).unwrap_err();
            assert!(error.contains(says), "{behind}: {error}");
        }
    }

    #[test]
    fn every_special_byte_is_found_wherever_it_stands() {
        let kinds = [b' ', b'!', b'#', b'[', b']', 0x7f, 0x80, 0xff];
        for length in [1, 63, 64, 65, 150] {
            let plain: Vec<u8> = (0..length).map(|i| kinds[i % 8]).collect();
            assert_eq!(Specials::new(&plain).next(), None);
            for at in 0..length {
                for special in (0..0x20).chain([b'"', b'\\']) {
                    let mut bytes = plain.clone();
                    bytes[at] = special;
                    bytes[length - 1] = b'"';
                    let mut expected = vec![at, length - 1];
                    expected.dedup();
                    assert_eq!(Specials::new(&bytes).collect::<Vec<_>>(), expected, "{special}");
                }
            }
        }
    }

    #[test]
    fn the_canonical_form_is_what_clients_send() {
        for usual in [r#""#, r#"plain é 😀"#, r#"a \"b\" \\ \n\t\r\b\f/ \\n"#] {
            let text = text(usual);
            assert_eq!(text.canonical(), usual);
            assert!(matches!(text.canonical(), Cow::Borrowed(_)));
            assert_eq!(canonical(&text.get()), usual);
        }
        for (odd, usual) in
            [(r"\/", "/"), (r"\u00e9\n", "é\\n"), (r"\u000a", "\\n"), (r"\u0001", "\u{1}"), (r"\ud83d\ude00", "😀")]
        {
            assert_eq!(text(odd).canonical(), usual);
        }
    }

    #[test]
    fn a_beginning_is_found_behind_white_space_and_escapes() {
        let begins = |raw: &str, prefix| text(raw).begins_with(prefix);
        assert!(begins(r"\n <a>\u0062\\c", "<a>b\\"));
        assert!(begins(" \t<a>b", "<a>b"));
        assert!(begins(r"\u2003\u003ca>", "<a>"));
        assert!(!begins(r"\n <a>\u0063", "<a>b"));
        assert!(!begins(r"\n <a", "<a>"));
        assert!(begins(r"\n", ""));
    }

    proptest! {
        #[test]
        fn it_reads_as_serde_reads_it(raw in r#"([a-zé漢😀 ]|\\n|\\"|\\\\|\\/|\\b|\\f|\\t|\\r|\\u00[0-9a-fA-F]{2}|\\u20aC|\\ud83d\\ude00){0,40}"#) {
            let theirs: String = serde_json::from_str(&format!("\"{raw}\"")).unwrap();
            let ours = text(&raw);
            prop_assert_eq!(ours.len(), theirs.len());
            prop_assert_eq!(ours.is_empty(), theirs.is_empty());
            prop_assert_eq!(&ours.get(), &theirs);
            prop_assert_eq!(matches!(ours.written(), Written::Plain(_)), !raw.contains('\\'));
            prop_assert_eq!(&ours, &Text::from(theirs.as_str()));
            prop_assert_eq!(ours.canonical(), canonical(&theirs));
            prop_assert_eq!(unescaped(&ours.canonical()), theirs.as_str());
            for (at, _) in theirs.char_indices() {
                prop_assert!(text(&raw).begins_with(theirs[..at].trim_start()));
            }
            prop_assert_eq!(ours.into_cow(), theirs);
        }
    }
}
