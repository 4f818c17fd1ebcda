//! Finding one key's values in a stream of JSON or server-sent events without parsing or keeping the stream.
//!
//! A quote inside a JSON string is escaped, so the bytes `"key"` that no backslash precedes and a colon follows are a key and
//! nothing else. That makes a substring search enough, and a substring search runs at memory speed.

use memchr::memmem;

/// 64 KiB: the longest value that is captured; a longer one passes unread.
pub const DEFAULT_MAX_VALUE_BYTES: usize = 64 << 10;

/// The longest needle, quotes included.
const MAX_NEEDLE: usize = 8;

/// Finds each value of one key, across chunk boundaries. Holds [`MAX_NEEDLE`] bytes between values and at most
/// [`DEFAULT_MAX_VALUE_BYTES`] inside one.
#[derive(Debug)]
pub(super) struct ValueScanner {
    finder: &'static memmem::Finder<'static>,
    /// The first byte of the values that are wanted: `{` or `"`.
    opening: u8,
    state: State,
    /// The last bytes before the chunk: a key may begin in them.
    carry: Carry,
    value: Vec<u8>,
}

#[derive(Clone, Copy, Debug)]
enum State {
    Key,
    Colon,
    Opening,
    Inside(Nesting),
}

/// Where in a value we are.
#[derive(Clone, Copy, Debug, Default)]
struct Nesting {
    depth: u32,
    in_string: bool,
    escaped: bool,
}

impl Nesting {
    /// Takes the next byte; true when it ends the value.
    fn ends_with(&mut self, byte: u8) -> bool {
        if self.escaped {
            self.escaped = false;
        } else if self.in_string {
            match byte {
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
        } else {
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth = self.depth.saturating_add(1),
                b'}' | b']' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
        }
        self.depth == 0 && !self.in_string
    }
}

/// The last few bytes of a stream.
#[derive(Clone, Copy, Debug, Default)]
struct Carry {
    bytes: [u8; MAX_NEEDLE],
    len: usize,
}

impl Carry {
    fn as_slice(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    fn remember(&mut self, chunk: &[u8]) {
        let mut joined = [0; 2 * MAX_NEEDLE];
        let tail = chunk.get(chunk.len().saturating_sub(MAX_NEEDLE)..).unwrap_or_default();
        let total = self.len + tail.len();
        for (to, from) in joined.iter_mut().zip(self.as_slice().iter().chain(tail)) {
            *to = *from;
        }
        let from = total.saturating_sub(MAX_NEEDLE);
        self.len = total - from;
        for (to, from) in self.bytes.iter_mut().zip(joined.iter().skip(from)) {
            *to = *from;
        }
    }
}

impl ValueScanner {
    /// A scanner for the values of a key that are objects (`opening` is `{`) or strings (`"`). its needle is the key in
    /// quotes; all scanners share its finder, which is larger than a scanner.
    pub(super) fn new(finder: &'static memmem::Finder<'static>, opening: u8) -> Self {
        debug_assert!(finder.needle().len() <= MAX_NEEDLE, "a carry is too short");
        Self { finder, opening, state: State::Key, carry: Carry::default(), value: Vec::new() }
    }

    /// Takes the next bytes and hands each value that is complete to `on`, as JSON.
    pub(super) fn push(&mut self, chunk: &[u8], mut on: impl FnMut(&[u8])) {
        let mut rest = chunk;
        while !rest.is_empty() {
            rest = match self.state {
                State::Key => self.seek(rest),
                State::Colon => self.expect(rest, b':', State::Opening),
                State::Opening => {
                    let inside = State::Inside(Nesting::default());
                    self.expect(rest, self.opening, inside)
                }
                State::Inside(nesting) => self.inside(rest, nesting, &mut on),
            };
        }
    }

    fn seek<'c>(&mut self, chunk: &'c [u8]) -> &'c [u8] {
        let needle = self.finder.needle().len();
        let mut end = self.straddling(chunk);
        let mut from = 0;
        while end.is_none() {
            let Some(at) = chunk.get(from..).and_then(|c| self.finder.find(c)) else { break };
            let at = from + at;
            let before = at.checked_sub(1).and_then(|i| chunk.get(i)).or(self.carry.as_slice().last());
            if before != Some(&b'\\') {
                end = Some(at + needle);
            }
            // The closing quote of one may be the opening quote of the next.
            from = at + needle - 1;
        }
        match end {
            Some(end) => {
                self.state = State::Colon;
                self.carry = Carry::default();
                chunk.get(end..).unwrap_or_default()
            }
            None => {
                self.carry.remember(chunk);
                &[]
            }
        }
    }

    /// Where in `chunk` a key ends that began in the bytes before it.
    fn straddling(&self, chunk: &[u8]) -> Option<usize> {
        let (before, needle) = (self.carry.as_slice(), self.finder.needle());
        (0..before.len()).find_map(|at| {
            let (head, end) = (before.get(at..)?, (at + needle.len()).checked_sub(before.len())?);
            let escaped = at.checked_sub(1).and_then(|i| before.get(i)) == Some(&b'\\');
            (end > 0 && !escaped && needle.starts_with(head) && chunk.get(..end)? == needle.get(head.len()..)?)
                .then_some(end)
        })
    }

    /// Steps over white space; then `byte` leads on to `next`, and anything else back to seeking the key. An opening byte stays:
    /// it belongs to the value.
    fn expect<'c>(&mut self, chunk: &'c [u8], byte: u8, next: State) -> &'c [u8] {
        let Some(at) = chunk.iter().position(|b| !b.is_ascii_whitespace()) else { return &[] };
        let found = chunk.get(at) == Some(&byte);
        self.state = if found { next } else { State::Key };
        chunk.get(at + usize::from(found && byte == b':')..).unwrap_or_default()
    }

    fn inside<'c>(&mut self, chunk: &'c [u8], mut nesting: Nesting, on: &mut impl FnMut(&[u8])) -> &'c [u8] {
        let end = chunk.iter().position(|b| nesting.ends_with(*b)).map(|at| at + 1);
        let (part, rest) = chunk.split_at(end.unwrap_or(chunk.len()));
        let fits = self.value.len() + part.len() <= DEFAULT_MAX_VALUE_BYTES;
        self.state = if end.is_some() || !fits { State::Key } else { State::Inside(nesting) };
        match (end, fits) {
            (Some(_), true) if self.value.is_empty() => on(part),
            (Some(_), true) => {
                self.value.extend_from_slice(part);
                on(&self.value);
            }
            (None, true) => self.value.extend_from_slice(part),
            (_, false) => {}
        }
        if matches!(self.state, State::Key) {
            self.value = Vec::new();
        }
        rest
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn values(chunks: &[&[u8]], needle: &'static str, opening: u8) -> Vec<String> {
        let mut scanner = ValueScanner::new(Box::leak(Box::new(memmem::Finder::new(needle))), opening);
        let mut found = Vec::new();
        for chunk in chunks {
            scanner.push(chunk, |v| found.push(String::from_utf8_lossy(v).into_owned()));
        }
        found
    }

    #[test]
    fn finds_values_of_the_key_and_nothing_else() {
        let cases: &[(&str, &[&str])] = &[
            (r#"{"usage":{"a":1}}"#, &[r#"{"a":1}"#]),
            ("{\"usage\" \n:\t {\"a\":\"}\\\"}\"} , \"usage\":{}}", &[r#"{"a":"}\"}"}"#, "{}"]),
            (r#"{"usage":null,"usage":{"b":[{}]}}"#, &[r#"{"b":[{}]}"#]),
            (r#"{"text":"\"usage\":{\"a\":1}"}"#, &[]),
            (r#"{"say \"usage":{"a":1}}"#, &[]),
            (r#"["usage",{"a":1}]"#, &[]),
            (r#"{"x":"usage","usage":{"a":1"#, &[]),
        ];
        for (input, expected) in cases {
            let input = input.as_bytes();
            assert_eq!(values(&[input], "\"usage\"", b'{'), *expected);
            for at in 0..=input.len() {
                let (a, b) = input.split_at(at);
                assert_eq!(values(&[a, b], "\"usage\"", b'{'), *expected, "split at {at}");
            }
            let bytes: Vec<&[u8]> = input.chunks(1).collect();
            assert_eq!(values(&bytes, "\"usage\"", b'{'), *expected);
        }
        assert_eq!(values(&[br#"{"id": "resp_1"}"#], "\"id\"", b'"'), [r#""resp_1""#]);
    }

    #[test]
    fn a_value_that_is_too_long_is_not_kept() {
        let long = format!(r#"{{"usage":{{"a":"{}"}},"usage":{{"b":1}}}}"#, "x".repeat(DEFAULT_MAX_VALUE_BYTES));
        assert_eq!(values(&[long.as_bytes()], "\"usage\"", b'{'), [r#"{"b":1}"#]);
        let chunks: Vec<&[u8]> = long.as_bytes().chunks(1000).collect();
        assert_eq!(values(&chunks, "\"usage\"", b'{'), [r#"{"b":1}"#]);
    }

    proptest! {
        #[test]
        fn chunking_changes_nothing(
            pieces in prop::collection::vec(prop::sample::select(vec![
                "\"usage\"", "\"usa", "ge\"", "\\", "\"", ":", " ", "{", "}", "[", "]", "a", "usage", "{\"n\":1}", "null", ",",
            ]), 0..40),
            cuts in prop::collection::vec(1usize..9, 1..20),
        ) {
            let input = pieces.concat();
            let mut rest = input.as_bytes();
            let mut chunks = Vec::new();
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (chunk, tail) = rest.split_at((*cut).min(rest.len()));
                chunks.push(chunk);
                rest = tail;
            }
            prop_assert_eq!(values(&chunks, "\"usage\"", b'{'), values(&[input.as_bytes()], "\"usage\"", b'{'));
        }
    }
}
