//! Unescapes a JSON string that arrives in chunks of any size.

use memchr::memchr2;

/// Position in a string.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Unescape {
    escape: Escape,
    /// The first half of a surrogate pair, until the second half arrives.
    high: Option<u16>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Escape {
    #[default]
    None,
    /// After a backslash.
    Begun,
    /// Inside a `\uXXXX` escape.
    Unicode { digits: u8, unit: u16 },
}

impl Unescape {
    /// Passes the text in `rest` to `on`. Returns how many bytes belong to the string, and whether it has ended.
    pub(super) fn push(&mut self, rest: &[u8], on: &mut impl FnMut(&[u8])) -> (usize, bool) {
        let mut from = 0;
        while let Some(text) = rest.get(from..).filter(|text| !text.is_empty()) {
            if self.escape != Escape::None {
                from += self.escaped(text, on);
                continue;
            }
            let at = memchr2(b'"', b'\\', text);
            let (part, behind) = text.split_at(at.unwrap_or(text.len()));
            let has_ended = behind.first() == Some(&b'"');
            if !part.is_empty() || has_ended {
                self.flush(on);
                on(part);
            }
            if has_ended {
                return (from + part.len() + 1, true);
            }
            if !behind.is_empty() {
                self.escape = Escape::Begun;
            }
            from += part.len() + 1;
        }
        (rest.len(), false)
    }

    /// Consumes the rest of an escape, or one byte of it. Returns how many bytes.
    fn escaped(&mut self, text: &[u8], on: &mut impl FnMut(&[u8])) -> usize {
        let Some(byte) = text.first() else { return 0 };
        match self.escape {
            Escape::None | Escape::Begun if *byte == b'u' => self.escape = Escape::Unicode { digits: 0, unit: 0 },
            Escape::None | Escape::Begun => {
                self.escape = Escape::None;
                self.flush(on);
                on(&[match byte {
                    b'n' => b'\n',
                    b't' => b'\t',
                    b'r' => b'\r',
                    b'b' => 8,
                    b'f' => 12,
                    other => *other,
                }]);
            }
            Escape::Unicode { digits, unit } => {
                // A character that is not a digit counts as 0: the document is not valid JSON, so the result does not
                // matter.
                let digit = char::from(*byte).to_digit(16).unwrap_or(0);
                let unit = unit << 4 | digit as u16;
                if digits < 3 {
                    self.escape = Escape::Unicode { digits: digits + 1, unit };
                } else {
                    self.escape = Escape::None;
                    self.unit(unit, on);
                }
            }
        }
        1
    }

    /// Processes one UTF-16 unit.
    fn unit(&mut self, unit: u16, on: &mut impl FnMut(&[u8])) {
        let decoded = match (self.high, unit) {
            (Some(high), 0xDC00..=0xDFFF) => {
                self.high = None;
                char::decode_utf16([high, unit]).next().and_then(Result::ok)
            }
            (_, 0xD800..=0xDBFF) => {
                self.flush(on);
                self.high = Some(unit);
                return;
            }
            _ => char::from_u32(u32::from(unit)),
        };
        self.flush(on);
        on(decoded.unwrap_or(char::REPLACEMENT_CHARACTER).encode_utf8(&mut [0; 4]).as_bytes());
    }

    /// Replaces half a surrogate pair that was not completed.
    fn flush(&mut self, on: &mut impl FnMut(&[u8])) {
        if self.high.take().is_some() {
            on(char::REPLACEMENT_CHARACTER.encode_utf8(&mut [0; 4]).as_bytes());
        }
    }
}
