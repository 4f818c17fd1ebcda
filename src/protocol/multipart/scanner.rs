//! Finds the parts of a form that arrives in chunks, and keeps the values of a few text fields.
//!
//! Each byte is read once, whatever the chunks are. Memory: the headers of one part and the value of one field, both
//! bounded, so that files of any size cost none.

use super::head::{PartHead, boundary, part_head};
use attache_types::limits::Limits;
use memchr::memmem::Finder;
use std::ops::Range;

/// Longest headers of a part, 8 KiB; python-multipart and Go accept no more for most of them.
const MAX_HEAD_BYTES: usize = 8 << 10;
/// Longest value of a field other than `model` that is kept, 64 bytes: numbers and flags are shorter.
const MAX_NUMBER_BYTES: usize = 64;
/// Bytes of the line end that begins a delimiter.
const LINE_END: usize = 2;

/// What a form says about its model, as far as it has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormModel {
    /// No part of the bytes so far names it.
    Pending,
    /// One part names it.
    Named,
    /// The form has ended, and no part names it.
    Absent,
    /// Servers may read another model than Attaché does, or none; for this reason.
    Unreadable(&'static str),
}

/// The fields that determine the amount of work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Numbers {
    pub(super) stream: bool,
    pub(super) max_tokens: Option<u32>,
    /// 0 when the form does not say.
    pub(super) choices: u32,
}

/// Reads one form.
#[derive(Clone, Debug)]
pub struct FormScanner {
    /// Finds a line end, two dashes and the boundary.
    delimiter: Finder<'static>,
    max_model_bytes: usize,
    place: Place,
    /// Number of the delimiter's bytes that the last bytes match.
    matched: usize,
    /// Bytes read.
    at: usize,
    /// Where the part's body begins; the largest number before the first part.
    begun: usize,
    /// The headers of the part, as far as they have arrived.
    head: Vec<u8>,
    /// The field whose value is read now, and where the value begins.
    field: Option<(Field, usize)>,
    /// The value, with a possible start of the delimiter after it.
    value: Vec<u8>,
    is_too_long: bool,
    model: Option<Range<usize>>,
    numbers: Numbers,
    problem: Option<&'static str>,
}

/// The part of the form that the next byte belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// The body of a part, or what precedes the first delimiter.
    Body,
    /// Behind the bytes of a delimiter, which count only if a line end or two dashes follow. One of them may have come.
    DelimiterEnd(Option<u8>),
    /// The headers of a part.
    Head,
    /// Behind the last delimiter, or a form that can't be read.
    Over,
}

/// A field whose value is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Model,
    Stream,
    MaxTokens,
    Choices,
}

impl FormScanner {
    /// Creates a scanner for a form with this content type, whose `model` has at most [`Limits::max_model_bytes`].
    #[must_use]
    pub fn new(content_type: Option<&str>, limits: &Limits) -> Self {
        let boundary = content_type.and_then(boundary);
        let problem = boundary.is_none().then_some("its content-type names no usable boundary");
        let delimiter = [b"\r\n--", boundary.unwrap_or_default().as_slice()].concat();
        Self {
            delimiter: Finder::new(&delimiter).into_owned(),
            max_model_bytes: limits.max_model_bytes as usize,
            place: if problem.is_some() { Place::Over } else { Place::Body },
            // No line end precedes the first delimiter if the form begins with it.
            matched: LINE_END,
            at: 0,
            begun: usize::MAX,
            head: Vec::new(),
            field: None,
            value: Vec::new(),
            is_too_long: false,
            model: None,
            numbers: Numbers::default(),
            problem,
        }
    }

    /// Reads the next bytes of the form.
    pub fn push(&mut self, chunk: &[u8]) {
        let mut rest = chunk;
        while !rest.is_empty() {
            let read = match self.place {
                Place::Body => self.body(rest),
                Place::DelimiterEnd(first) => self.delimiter_end(first, rest),
                Place::Head => self.part_head(rest),
                Place::Over => rest.len(),
            };
            self.at += read;
            rest = rest.get(read..).unwrap_or_default();
        }
    }

    /// What is known of the model so far.
    #[must_use]
    pub fn model(&self) -> FormModel {
        match (self.problem, &self.model) {
            (Some(why), _) => FormModel::Unreadable(why),
            (None, Some(_)) => FormModel::Named,
            (None, None) if self.place == Place::Over => FormModel::Absent,
            (None, None) => FormModel::Pending,
        }
    }

    /// The bytes of the form that name the model, without quotes; `None` if it can't be read.
    pub(super) fn model_span(&self) -> Option<Range<usize>> {
        self.model.clone().filter(|_| self.problem.is_none())
    }

    pub(super) fn numbers(&self) -> Numbers {
        self.numbers
    }

    #[cfg(test)]
    pub(super) fn memory(&self) -> usize {
        self.head.capacity() + self.value.capacity()
    }

    fn fail(&mut self, why: &'static str) {
        self.problem.get_or_insert(why);
        self.place = Place::Over;
    }

    /// Reads on to the end of the next delimiter.
    fn body(&mut self, rest: &[u8]) -> usize {
        let delimiter = self.delimiter.needle().len();
        let mut at = 0;
        // A delimiter that began in the last chunk. None of its bytes but the first is a carriage return, so a
        // mismatch can't be inside of another delimiter.
        while self.matched > 0 && self.matched < delimiter && at < rest.len() {
            let byte = rest.get(at).copied();
            self.matched = match byte == self.delimiter.needle().get(self.matched).copied() {
                true => self.matched + 1,
                false => usize::from(byte == Some(b'\r')),
            };
            at += 1;
        }
        if self.matched == 0 {
            let behind = rest.get(at..).unwrap_or_default();
            match self.delimiter.find(behind) {
                Some(found) => {
                    self.matched = delimiter;
                    at += found + delimiter;
                }
                None => {
                    self.matched = self.started(behind);
                    at = rest.len();
                }
            }
        }
        self.keep(rest.get(..at).unwrap_or_default());
        if self.matched == delimiter {
            self.place = Place::DelimiterEnd(None);
            if self.at + at == self.begun.saturating_add(delimiter - LINE_END) {
                self.fail("a part begins with its boundary");
            }
        }
        at
    }

    /// How many bytes of a delimiter end this text.
    fn started(&self, text: &[u8]) -> usize {
        let needle = self.delimiter.needle();
        let tail = text.get(text.len().saturating_sub(needle.len() - 1)..).unwrap_or_default();
        let begun = memchr::memrchr(b'\r', tail).and_then(|at| tail.get(at..)).unwrap_or_default();
        if needle.starts_with(begun) { begun.len() } else { 0 }
    }

    fn delimiter_end(&mut self, first: Option<u8>, rest: &[u8]) -> usize {
        let Some(byte) = rest.first().copied() else { return 0 };
        match (first, byte) {
            (None, b'\r' | b'-') => self.place = Place::DelimiterEnd(Some(byte)),
            (None, b' ' | b'\t') => self.fail("white space follows a boundary"),
            (Some(b'\r'), b'\n') => {
                self.end_part();
                self.head.clear();
                self.head.extend_from_slice(b"\r\n");
                if self.place != Place::Over {
                    self.place = Place::Head;
                }
            }
            (Some(b'-'), b'-') => {
                self.end_part();
                self.place = Place::Over;
            }
            // The boundary is the start of a longer line of the part's body.
            _ => {
                self.keep(first.as_slice());
                self.keep(&[byte]);
                self.matched = usize::from(byte == b'\r');
                self.place = Place::Body;
            }
        }
        1
    }

    fn part_head(&mut self, rest: &[u8]) -> usize {
        for (at, byte) in rest.iter().enumerate() {
            if *byte == b'\n' && self.head.last() != Some(&b'\r') {
                self.fail("a header of a part ends without a carriage return");
                return at + 1;
            }
            self.head.push(*byte);
            if self.head.ends_with(b"\r\n\r\n") {
                self.begin_part(self.at + at + 1);
                return at + 1;
            }
            if self.head.len() > MAX_HEAD_BYTES {
                self.fail("the headers of a part are longer than 8 KiB");
                return at + 1;
            }
        }
        rest.len()
    }

    /// The headers of a part have arrived; its body begins at `start`.
    fn begin_part(&mut self, start: usize) {
        // Some servers end an empty part at a boundary without a line end of its own.
        (self.place, self.matched, self.begun) = (Place::Body, LINE_END, start);
        let (name, is_plain) = match part_head(self.head.trim_ascii()) {
            PartHead::Skipped => return,
            PartHead::Ambiguous(why) => return self.fail(why),
            PartHead::Field { name, is_plain } => (name, is_plain),
        };
        let field = match name.as_slice() {
            b"model" => Field::Model,
            b"stream" => Field::Stream,
            b"max_completion_tokens" => Field::MaxTokens,
            b"n" => Field::Choices,
            _ => return,
        };
        if field == Field::Model && self.model.is_some() {
            self.fail("`model` comes twice");
        } else if field == Field::Model && !is_plain {
            self.fail("the part of `model` is encoded, or is no form-data");
        } else {
            self.field = Some((field, start));
        }
    }

    /// Keeps bytes of the value of the current field.
    fn keep(&mut self, bytes: &[u8]) {
        let Some((field, _)) = self.field else { return };
        let allowed = if field == Field::Model { self.max_model_bytes } else { MAX_NUMBER_BYTES };
        if self.value.len() + bytes.len() <= allowed + self.delimiter.needle().len() {
            self.value.extend_from_slice(bytes);
        } else {
            self.is_too_long = true;
        }
    }

    /// A part has ended: its value is all before the delimiter.
    fn end_part(&mut self) {
        let (length, is_too_long) = (self.value.len(), std::mem::take(&mut self.is_too_long));
        let mut value = std::mem::take(&mut self.value);
        value.truncate(length.saturating_sub(self.delimiter.needle().len()));
        let Some((field, start)) = self.field.take() else { return };
        let text = std::str::from_utf8(&value).ok().filter(|_| !is_too_long);
        match (field, text) {
            (Field::Model, None) if is_too_long => self.fail("`model` is too long"),
            (Field::Model, Some(text)) if !text.is_empty() && !text.chars().any(char::is_control) => {
                self.model = Some(start..start + text.len());
            }
            (Field::Model, _) => self.fail("`model` is empty, or has control characters, or is not UTF-8"),
            (Field::Stream, Some(text)) => self.numbers.stream = crate::json::flag(text) == Some(true),
            (Field::MaxTokens, Some(text)) => self.numbers.max_tokens = crate::json::count(text),
            (Field::Choices, Some(text)) => self.numbers.choices = crate::json::count(text).unwrap_or_default(),
            (_, None) => {}
        }
    }
}
