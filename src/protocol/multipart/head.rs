//! Headers of one part, and the parameters in a header: `name="value"; name=value`.

use std::borrow::Cow;

/// Longest boundary that is accepted, 256 bytes; RFC 2046 allows 70.
const MAX_BOUNDARY: usize = 256;

/// What the headers of a part say about it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PartHead {
    /// A file, or a part without a name.
    Skipped,
    /// A text field.
    Field {
        name: Vec<u8>,
        /// Whether every server reads the value as it is written.
        is_plain: bool,
    },
    /// Servers disagree about its name.
    Ambiguous(&'static str),
}

/// Reads the header lines of a part.
pub(super) fn part_head(lines: &[u8]) -> PartHead {
    let (mut disposition, mut is_plain) = (None, true);
    for line in lines.split(|byte| *byte == b'\n').map(|line| line.strip_suffix(b"\r").unwrap_or(line)) {
        if line.first().is_some_and(|byte| matches!(byte, b' ' | b'\t')) {
            return PartHead::Ambiguous("a part has a header of several lines");
        }
        let Some(colon) = memchr::memchr(b':', line) else { continue };
        let (name, value) = (line.get(..colon).unwrap_or_default(), line.get(colon + 1..).unwrap_or_default());
        let name = name.trim_ascii();
        if name.eq_ignore_ascii_case(b"content-disposition") && disposition.replace(value).is_some() {
            return PartHead::Ambiguous("a part has two Content-Disposition headers");
        }
        if name.eq_ignore_ascii_case(b"content-transfer-encoding") {
            let value = value.trim_ascii();
            is_plain &= [&b"7bit"[..], b"8bit", b"binary"].iter().any(|plain| value.eq_ignore_ascii_case(plain));
        }
    }
    let Some(disposition) = disposition else { return PartHead::Skipped };
    let (mut field, mut is_file) = (None, false);
    for parameter in Parameters::of(disposition) {
        let base = parameter.name.split(|byte| *byte == b'*').next().unwrap_or_default();
        if base.eq_ignore_ascii_case(b"filename") {
            is_file = true;
        } else if base.eq_ignore_ascii_case(b"name") {
            if base.len() < parameter.name.len() || parameter.is_escaped {
                return PartHead::Ambiguous("a part has an encoded name");
            }
            if field.replace(parameter.value).is_some() {
                return PartHead::Ambiguous("a part has two names");
            }
        }
    }
    let media = disposition.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    match field {
        Some(name) if !is_file => {
            PartHead::Field { name: name.into_owned(), is_plain: is_plain && media.eq_ignore_ascii_case(b"form-data") }
        }
        _ => PartHead::Skipped,
    }
}

/// Returns the boundary that a content type names. `None` if it names none, or two, or one with control characters.
pub(super) fn boundary(content_type: &str) -> Option<Vec<u8>> {
    super::is_form(Some(content_type)).then_some(())?;
    let mut boundaries = Parameters::of(content_type.as_bytes()).filter(|p| p.name.eq_ignore_ascii_case(b"boundary"));
    let boundary = boundaries.next().filter(|_| boundaries.next().is_none())?.value;
    let is_sound = (1..=MAX_BOUNDARY).contains(&boundary.len()) && !boundary.iter().any(u8::is_ascii_control);
    is_sound.then(|| boundary.into_owned())
}

/// One parameter of a header.
struct Parameter<'a> {
    name: &'a [u8],
    value: Cow<'a, [u8]>,
    /// Whether a backslash escapes a character of the value. Servers disagree about these.
    is_escaped: bool,
}

/// The parameters of a header value, after its first semicolon. A semicolon in quotes belongs to the value.
struct Parameters<'a> {
    rest: &'a [u8],
}

impl<'a> Parameters<'a> {
    fn of(header: &'a [u8]) -> Self {
        let start = memchr::memchr(b';', header).unwrap_or(header.len());
        Self { rest: header.get(start..).unwrap_or_default() }
    }
}

impl<'a> Iterator for Parameters<'a> {
    type Item = Parameter<'a>;

    fn next(&mut self) -> Option<Parameter<'a>> {
        loop {
            let at = self.rest.iter().position(|byte| !matches!(byte, b';' | b' ' | b'\t'))?;
            let parameter = self.rest.get(at..)?;
            let end = parameter.iter().position(|byte| matches!(byte, b'=' | b';')).unwrap_or(parameter.len());
            let name = parameter.get(..end)?.trim_ascii();
            let after = parameter.get(end..)?;
            let Some(value) = after.strip_prefix(b"=") else {
                self.rest = after;
                continue;
            };
            let value = value.trim_ascii_start();
            let Some(quoted) = value.strip_prefix(b"\"") else {
                let end = memchr::memchr(b';', value).unwrap_or(value.len());
                self.rest = value.get(end..)?;
                let value = Cow::Borrowed(value.get(..end)?.trim_ascii());
                return Some(Parameter { name, value, is_escaped: false });
            };
            let (value, rest, is_escaped) = unquoted(quoted);
            self.rest = rest;
            return Some(Parameter { name, value, is_escaped });
        }
    }
}

/// Returns the inside of a quoted string, what follows its closing quote, and whether it has an escape. Without a
/// closing quote, the string takes the rest.
fn unquoted(quoted: &[u8]) -> (Cow<'_, [u8]>, &[u8], bool) {
    let mut value = Vec::new();
    let mut is_escaped = false;
    let mut bytes = quoted.iter().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'"' => {
                let inside = quoted.get(..at).unwrap_or_default();
                let value = if is_escaped { Cow::Owned(value) } else { Cow::Borrowed(inside) };
                return (value, quoted.get(at + 1..).unwrap_or_default(), is_escaped);
            }
            b'\\' => {
                is_escaped = true;
                value.extend(bytes.next().map(|(_, escaped)| *escaped));
            }
            plain => value.push(*plain),
        }
    }
    (Cow::Owned(value), &[], true)
}
