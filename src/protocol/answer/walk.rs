//! Walks a JSON document that arrives in pieces of any size, without storing it: brackets,
//! keys, and the requested strings.
//!
//! It is lenient where nothing depends on it (commas, colons, the form of numbers) and strict where an error would put
//! text at a wrong position: brackets must match, keys must be strings, nesting is limited.

use super::word::{Word, WordBuffer};
use memchr::memchr2;

/// Deepest nesting that is followed: serde_json's default.
const MAX_DEPTH: u32 = 128;

/// What to do with a string value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ValueSink {
    /// Ignore the string.
    Skip,
    /// Deliver the string unescaped: it is text of the response.
    Text,
    /// Deliver the string as a [`Word`]: it is the type of something.
    Word,
    /// The string is a key.
    Key,
}

/// Receives what the walker finds.
pub(super) trait Visitor {
    /// An object or array begins.
    fn open(&mut self, array: bool);
    /// The innermost object or array ends.
    fn close(&mut self);
    /// A key was read.
    fn key(&mut self, key: Word);
    /// A string value begins. Returns what to do with it.
    fn string(&mut self) -> ValueSink;
    /// The next bytes of a string that is text.
    fn text(&mut self, part: &[u8]);
    /// A string that was requested as a word.
    fn word(&mut self, word: Word);
    /// A number, `true`, `false` or `null`; the flag is whether it is `0`.
    fn scalar(&mut self, zero: bool);
}

/// WalkState of a walk after a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// The document continues.
    Open,
    /// The outermost object has ended.
    Done,
    /// The bytes are not JSON.
    Broken,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum WalkState {
    #[default]
    Between,
    String(ValueSink),
    /// Inside a number or a name, which is `0` so far or not.
    Scalar {
        zero: bool,
    },
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

/// WalkState of one document.
#[derive(Debug, Default)]
pub(super) struct Walker {
    state: WalkState,
    escape: Escape,
    /// The first half of a surrogate pair, until the second half arrives.
    high: Option<u16>,
    /// One bit for each open bracket, the innermost lowest: set for an object.
    objects: u128,
    depth: u32,
    /// Whether the next string is a key.
    key_next: bool,
    word: WordBuffer,
}

impl Walker {
    /// Processes the next bytes of the document. Must not be called after `Done` or `Broken`.
    pub(super) fn push(&mut self, chunk: &[u8], visitor: &mut impl Visitor) -> Progress {
        let mut rest = chunk;
        loop {
            rest = match self.state {
                WalkState::String(sink) => self.string(rest, sink, visitor),
                WalkState::Scalar { zero } => self.scalar(rest, zero, visitor),
                WalkState::Between => {
                    let Some((byte, after)) = rest.split_first() else { return Progress::Open };
                    match self.between(*byte, visitor) {
                        Progress::Open if matches!(self.state, WalkState::Scalar { .. }) => rest,
                        Progress::Open => after,
                        end => return end,
                    }
                }
            };
            if rest.is_empty() {
                return Progress::Open;
            }
        }
    }

    fn between(&mut self, byte: u8, visitor: &mut impl Visitor) -> Progress {
        match byte {
            b'"' if self.depth > 0 => {
                let sink = if self.key_next { ValueSink::Key } else { visitor.string() };
                self.state = WalkState::String(sink);
            }
            b',' => self.key_next = self.objects & 1 == 1,
            b':' | b' ' | b'\t' | b'\r' | b'\n' => {}
            // A byte order mark, which JSON readers remove.
            0xEF | 0xBB | 0xBF if self.depth == 0 => {}
            b'{' | b'[' => {
                if self.key_next || self.depth == MAX_DEPTH || (self.depth == 0 && byte == b'[') {
                    return Progress::Broken;
                }
                let object = byte == b'{';
                visitor.open(!object);
                self.objects = self.objects << 1 | u128::from(object);
                self.depth += 1;
                self.key_next = object;
            }
            b'}' | b']' => {
                if self.depth == 0 || (self.objects & 1 == 1) != (byte == b'}') {
                    return Progress::Broken;
                }
                visitor.close();
                self.objects >>= 1;
                self.depth -= 1;
                self.key_next = false;
                if self.depth == 0 {
                    return Progress::Done;
                }
            }
            _ if self.key_next || self.depth == 0 => return Progress::Broken,
            _ => self.state = WalkState::Scalar { zero: true },
        }
        Progress::Open
    }

    /// Consumes a number or a name up to the first byte that cannot belong to it.
    fn scalar<'c>(&mut self, chunk: &'c [u8], zero: bool, visitor: &mut impl Visitor) -> &'c [u8] {
        let end =
            chunk.iter().position(|b| matches!(b, b',' | b'}' | b']' | b'"' | b':' | b' ' | b'\t' | b'\r' | b'\n'));
        let (part, rest) = chunk.split_at(end.unwrap_or(chunk.len()));
        // `00` is not a valid number; treating it as a zero does no harm.
        let zero = zero && part.iter().all(|b| *b == b'0');
        if end.is_some() {
            visitor.scalar(zero);
            self.state = WalkState::Between;
        } else {
            self.state = WalkState::Scalar { zero };
        }
        rest
    }

    fn string<'c>(&mut self, chunk: &'c [u8], sink: ValueSink, visitor: &mut impl Visitor) -> &'c [u8] {
        if self.escape != Escape::None {
            return self.escaped(chunk, sink, visitor);
        }
        let Some(at) = memchr2(b'"', b'\\', chunk) else {
            self.take(chunk, sink, visitor);
            return &[];
        };
        let (part, rest) = chunk.split_at(at);
        let Some((stop, after)) = rest.split_first() else { return &[] };
        if *stop == b'\\' {
            if !part.is_empty() {
                self.take(part, sink, visitor);
            }
            self.escape = Escape::Begun;
            return after;
        }
        self.state = WalkState::Between;
        match sink {
            ValueSink::Skip => {}
            ValueSink::Text => self.take(part, sink, visitor),
            ValueSink::Key | ValueSink::Word => {
                self.flush_high(sink, visitor);
                let word = self.word.finish(part);
                if sink == ValueSink::Key {
                    self.key_next = false;
                    visitor.key(word);
                } else {
                    visitor.word(word);
                }
            }
        }
        self.high = None;
        after
    }

    /// Processes a part of a string without escapes.
    fn take(&mut self, part: &[u8], sink: ValueSink, visitor: &mut impl Visitor) {
        self.flush_high(sink, visitor);
        match sink {
            ValueSink::Skip => {}
            ValueSink::Text => visitor.text(part),
            ValueSink::Key | ValueSink::Word => self.word.push(part),
        }
    }
}

/// Decoding of escapes.
impl Walker {
    fn escaped<'c>(&mut self, chunk: &'c [u8], sink: ValueSink, visitor: &mut impl Visitor) -> &'c [u8] {
        let Some((byte, after)) = chunk.split_first() else { return &[] };
        match self.escape {
            Escape::None | Escape::Begun if *byte == b'u' => self.escape = Escape::Unicode { digits: 0, unit: 0 },
            Escape::None | Escape::Begun => {
                self.escape = Escape::None;
                let plain = match byte {
                    b'n' => b'\n',
                    b't' => b'\t',
                    b'r' => b'\r',
                    b'b' => 8,
                    b'f' => 12,
                    other => *other,
                };
                self.take(&[plain], sink, visitor);
            }
            Escape::Unicode { digits, unit } => {
                // A character that is not a digit counts as 0: the document is not valid JSON, so
                // the result does not matter.
                let digit = char::from(*byte).to_digit(16).unwrap_or(0);
                let unit = unit << 4 | digit as u16;
                if digits < 3 {
                    self.escape = Escape::Unicode { digits: digits + 1, unit };
                } else {
                    self.escape = Escape::None;
                    self.unit(unit, sink, visitor);
                }
            }
        }
        after
    }

    /// Processes one UTF-16 unit.
    fn unit(&mut self, unit: u16, sink: ValueSink, visitor: &mut impl Visitor) {
        let decoded = match (self.high, unit) {
            (Some(high), 0xDC00..=0xDFFF) => {
                self.high = None;
                char::decode_utf16([high, unit]).next().and_then(Result::ok)
            }
            (_, 0xD800..=0xDBFF) => {
                self.flush_high(sink, visitor);
                self.high = Some(unit);
                return;
            }
            _ => char::from_u32(u32::from(unit)),
        };
        let mut utf8 = [0; 4];
        self.take(decoded.unwrap_or(char::REPLACEMENT_CHARACTER).encode_utf8(&mut utf8).as_bytes(), sink, visitor);
    }

    /// Replaces half a surrogate pair that was not completed.
    fn flush_high(&mut self, sink: ValueSink, visitor: &mut impl Visitor) {
        if self.high.take().is_some() {
            let mut utf8 = [0; 4];
            let lost = char::REPLACEMENT_CHARACTER.encode_utf8(&mut utf8).as_bytes();
            self.take(lost, sink, visitor);
        }
    }
}
