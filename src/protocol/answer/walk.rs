//! Walks JSON as it passes, in pieces of any size, without keeping it: brackets, keys and the strings that are asked for.
//!
//! Lenient where nothing depends on it (commas, colons, the spelling of numbers), strict where a mistake would put text in the wrong
//! place: brackets must match, keys must be strings, nesting is bounded.

use super::word::{Word, WordBuffer};
use memchr::memchr2;

/// Deepest nesting that is followed: what serde_json allows by default.
const MAX_DEPTH: u32 = 128;

/// What to do with a string value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sink {
    /// Nothing.
    Skip,
    /// It is text of the answer: hand it over, unescaped.
    Text,
    /// It says what something is: hand it over as a [`Word`].
    Word,
    /// It is a key.
    Key,
}

/// Sees what the walker walks over.
pub(super) trait Visitor {
    /// An object or array begins.
    fn open(&mut self, array: bool);
    /// The innermost object or array ends.
    fn close(&mut self);
    /// A key.
    fn key(&mut self, key: Word);
    /// A string value begins: what to do with it.
    fn string(&mut self) -> Sink;
    /// The next bytes of a string that is text.
    fn text(&mut self, part: &[u8]);
    /// A string that was asked for as a word.
    fn word(&mut self, word: Word);
    /// A number, `true`, `false` or `null`: whether it is spelled `0`.
    fn scalar(&mut self, zero: bool);
}

/// Where a walk stands after a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// In the middle.
    Open,
    /// The outermost object has ended.
    Done,
    /// This is not JSON.
    Broken,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    #[default]
    Between,
    String(Sink),
    /// In a number or a name, which so far is `0` or not.
    Scalar {
        zero: bool,
    },
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Escape {
    #[default]
    None,
    /// After the backslash.
    Begun,
    /// In `\uXXXX`.
    Unicode { digits: u8, unit: u16 },
}

/// One document on its way.
#[derive(Debug, Default)]
pub(super) struct Walker {
    state: State,
    escape: Escape,
    /// The first half of a surrogate pair, which waits for the second.
    high: Option<u16>,
    /// One bit for each open bracket, the innermost lowest: set for an object.
    objects: u128,
    depth: u32,
    /// The next string is a key.
    key_next: bool,
    word: WordBuffer,
}

impl Walker {
    /// Takes the next bytes of the document. Nothing may follow `Done` or `Broken`.
    pub(super) fn push(&mut self, chunk: &[u8], visitor: &mut impl Visitor) -> Progress {
        let mut rest = chunk;
        loop {
            rest = match self.state {
                State::String(sink) => self.string(rest, sink, visitor),
                State::Scalar { zero } => self.scalar(rest, zero, visitor),
                State::Between => {
                    let Some((byte, after)) = rest.split_first() else { return Progress::Open };
                    match self.between(*byte, visitor) {
                        Progress::Open if matches!(self.state, State::Scalar { .. }) => rest,
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
                let sink = if self.key_next { Sink::Key } else { visitor.string() };
                self.state = State::String(sink);
            }
            b',' => self.key_next = self.objects & 1 == 1,
            b':' | b' ' | b'\t' | b'\r' | b'\n' => {}
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
            _ => self.state = State::Scalar { zero: true },
        }
        Progress::Open
    }

    /// Inside a number or a name: up to what can't belong to it.
    fn scalar<'c>(&mut self, chunk: &'c [u8], zero: bool, visitor: &mut impl Visitor) -> &'c [u8] {
        let end =
            chunk.iter().position(|b| matches!(b, b',' | b'}' | b']' | b'"' | b':' | b' ' | b'\t' | b'\r' | b'\n'));
        let (part, rest) = chunk.split_at(end.unwrap_or(chunk.len()));
        // `00` is no number, so a zero that goes on is still taken for one: no harm in it.
        let zero = zero && part.iter().all(|b| *b == b'0');
        if end.is_some() {
            visitor.scalar(zero);
            self.state = State::Between;
        } else {
            self.state = State::Scalar { zero };
        }
        rest
    }

    fn string<'c>(&mut self, chunk: &'c [u8], sink: Sink, visitor: &mut impl Visitor) -> &'c [u8] {
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
        self.state = State::Between;
        match sink {
            Sink::Skip => {}
            Sink::Text => self.take(part, sink, visitor),
            Sink::Key | Sink::Word => {
                self.flush_high(sink, visitor);
                let word = self.word.finish(part);
                if sink == Sink::Key {
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

    /// Takes a part of a string that holds no escapes.
    fn take(&mut self, part: &[u8], sink: Sink, visitor: &mut impl Visitor) {
        self.flush_high(sink, visitor);
        match sink {
            Sink::Skip => {}
            Sink::Text => visitor.text(part),
            Sink::Key | Sink::Word => self.word.push(part),
        }
    }
}

/// Escapes.
impl Walker {
    fn escaped<'c>(&mut self, chunk: &'c [u8], sink: Sink, visitor: &mut impl Visitor) -> &'c [u8] {
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
                // What is no digit counts as 0: such a document is no JSON, and what becomes of it doesn't matter.
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

    /// Takes one UTF-16 unit.
    fn unit(&mut self, unit: u16, sink: Sink, visitor: &mut impl Visitor) {
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

    /// Half a pair that is followed by something else stands for nothing.
    fn flush_high(&mut self, sink: Sink, visitor: &mut impl Visitor) {
        if self.high.take().is_some() {
            let mut utf8 = [0; 4];
            let lost = char::REPLACEMENT_CHARACTER.encode_utf8(&mut utf8).as_bytes();
            self.take(lost, sink, visitor);
        }
    }
}
