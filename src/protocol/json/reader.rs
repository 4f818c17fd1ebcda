//! Tokens of JSON text with their positions: strings, numbers, names and white space. [`walk`](super::walk) combines
//! them.
//!
//! It accepts exactly what serde_json accepts; numbers that are more than digits are passed to serde_json.

use crate::text::{Escapes, Specials, Text, escape};

/// A position in JSON text.
#[derive(Debug)]
pub(super) struct Reader<'de> {
    text: &'de str,
    at: usize,
}

/// A violation of the JSON syntax at the reader's position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed(pub(super) &'static str);

/// A number, as precisely as callers need it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Number {
    Unsigned(u64),
    Negative,
    Fraction(f64),
}

impl<'de> Reader<'de> {
    pub(super) fn new(text: &'de str) -> Self {
        Self { text, at: 0 }
    }

    /// Returns the current offset in bytes.
    pub(super) fn place(&self) -> usize {
        self.at
    }

    /// Returns the text from `start` to the current position.
    pub(super) fn since(&self, start: usize) -> &'de str {
        self.text.get(start..self.at).unwrap_or_default()
    }

    /// Returns line and column of the current byte, both counted from 1.
    pub(super) fn position(&self) -> (usize, usize) {
        let before = self.text.as_bytes().get(..self.at).unwrap_or(self.text.as_bytes());
        let line = memchr::memchr_iter(b'\n', before).count();
        let column = memchr::memrchr(b'\n', before).map_or(before.len(), |end| before.len() - end - 1);
        (line + 1, column + 1)
    }

    fn rest(&self) -> &'de [u8] {
        self.text.as_bytes().get(self.at..).unwrap_or_default()
    }

    /// Skips white space and returns the next byte without consuming it.
    #[inline]
    pub(super) fn peek(&mut self) -> Option<u8> {
        let mut byte = self.rest().first().copied();
        while let Some(b' ' | b'\n' | b'\t' | b'\r') = byte {
            self.at += 1;
            byte = self.rest().first().copied();
        }
        byte
    }

    /// Consumes the byte that was peeked at.
    #[inline]
    pub(super) fn step(&mut self) {
        self.at += 1;
    }

    /// Consumes `byte`, or returns an error with `expected`.
    #[inline]
    pub(super) fn expect(&mut self, byte: u8, expected: &'static str) -> Result<(), Malformed> {
        match self.peek() {
            Some(found) if found == byte => {
                self.at += 1;
                Ok(())
            }
            found => Err(unexpected(found, expected)),
        }
    }

    /// Reads a string, from its opening quote.
    pub(super) fn string(&mut self) -> Result<Text<'de>, Malformed> {
        self.at += 1;
        let (start, inside) = (self.at, self.rest());
        let mut escapes = Escapes::default();
        for place in Specials::new(inside) {
            // This is the second byte of an escape.
            if start + place < self.at {
                continue;
            }
            self.at = start + place;
            match inside.get(place) {
                Some(b'\\') => {
                    let (made, length) = escape(inside.get(place + 1..).unwrap_or_default()).map_err(Malformed)?;
                    escapes.add(made, length);
                    self.at += 1 + length;
                }
                Some(b'"') => {
                    let raw = self.since(start);
                    self.at += 1;
                    return Ok(Text::of_json(raw, escapes));
                }
                _ => return Err(Malformed("control character in a string")),
            }
        }
        self.at = self.text.len();
        Err(Malformed("unexpected end in a string"))
    }

    /// Reads `null`, `true` or `false`, whichever `name` is.
    pub(super) fn name(&mut self, name: &'static str) -> Result<(), Malformed> {
        if !self.rest().starts_with(name.as_bytes()) {
            return Err(unexpected(Some(b'?'), "expected a value"));
        }
        self.at += name.len();
        Ok(())
    }

    /// Reads a number, from its sign or first digit.
    pub(super) fn number(&mut self) -> Result<Number, Malformed> {
        let rest = self.rest();
        let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
        let further = matches!(rest.get(digits), Some(b'.' | b'e' | b'E' | b'+' | b'-'));
        // Any 19 digits fit in 64 bits; JSON allows no leading zero.
        if (1..=19).contains(&digits) && !further && (digits == 1 || rest.first() != Some(&b'0')) {
            self.at += digits;
            return Ok(Number::Unsigned(
                rest.iter().take(digits).fold(0, |sum, digit| sum * 10 + u64::from(digit - b'0')),
            ));
        }
        let length = rest.iter().take_while(|b| b.is_ascii_digit() || b"+-.eE".contains(b)).count();
        let token = self.text.get(self.at..self.at + length).unwrap_or_default();
        let number: serde_json::Number = serde_json::from_str(token).map_err(|_| Malformed("invalid number"))?;
        self.at += length;
        Ok(match (number.as_u64(), number.as_i64()) {
            (Some(value), _) => Number::Unsigned(value),
            (None, Some(_)) => Number::Negative,
            (None, None) => Number::Fraction(number.as_f64().unwrap_or(f64::MAX)),
        })
    }
}

/// The error for a byte, or the end, in place of what was expected.
fn unexpected(found: Option<u8>, expected: &'static str) -> Malformed {
    Malformed(if found.is_none() { "unexpected end of the text" } else { expected })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn position_counts_lines_and_columns() {
        let mut reader = Reader::new("ab\n\ncd");
        let positions: Vec<_> = (0..=6)
            .map(|at| {
                reader.at = at;
                reader.position()
            })
            .collect();
        assert_eq!(positions, [(1, 1), (1, 2), (1, 3), (2, 1), (3, 1), (3, 2), (3, 3)]);
    }

    proptest! {
        #[test]
        fn strings_equal_those_of_serde(
            inside in r#"([a-zé漢 \x00-\x22]|\\.|\\u[0-9a-fA-F]{3,4}|\\u[dD][89abcdefAB][0-9a-f]{2}){0,12}"#,
        ) {
            let json = format!("\"{inside}\"");
            let mut reader = Reader::new(&json);
            let ours = reader.string().ok().filter(|_| reader.at == json.len());
            let ours = ours.map(|text| text.into_cow().into_owned());
            prop_assert_eq!(ours, serde_json::from_str::<String>(&json).ok());
        }

        #[test]
        fn long_strings_equal_those_of_serde(
            parts in prop::collection::vec((0usize..90, r#"\\[n"\\/u]|\\u00[0-9a-f]{2}|é|"|\n"#), 0..6),
        ) {
            let json = format!("\"{}\"", parts.iter().map(|(n, part)| "x".repeat(*n) + part).collect::<String>());
            let mut reader = Reader::new(&json);
            let ours = reader.string().ok().filter(|_| reader.at == json.len());
            let ours = ours.map(|text| text.into_cow().into_owned());
            prop_assert_eq!(ours, serde_json::from_str::<String>(&json).ok());
        }

        #[test]
        fn numbers_equal_those_of_serde(json in r"-?[0-9]{0,22}[0-9+.eE-]{0,6}") {
            let mut reader = Reader::new(&json);
            let ours = reader.number().ok().filter(|_| reader.at == json.len());
            let theirs = serde_json::from_str::<serde_json::Number>(&json).ok().map(|n| match (n.as_u64(), n.as_i64()) {
                (Some(value), _) => Number::Unsigned(value),
                (None, Some(_)) => Number::Negative,
                (None, None) => Number::Fraction(n.as_f64().unwrap()),
            });
            prop_assert_eq!(ours, theirs);
        }
    }
}
