//! Lines of bounded length, counted as editors count them.

use crate::TraceError;
use std::io::{BufRead, Read};

/// 16 MiB: a million tokens in blocks of 16 are a row of 600 KB.
const MAX_ROW_BYTES: usize = 16 << 20;

/// The rows of a trace; empty ones are passed over.
pub(super) struct Rows {
    source: Box<dyn BufRead + Send>,
    line: Vec<u8>,
    row: u64,
    is_put_back: bool,
}

impl Rows {
    pub(super) fn new(source: Box<dyn BufRead + Send>) -> Self {
        Self { source, line: Vec::new(), row: 0, is_put_back: false }
    }

    /// The next row gives the same line once more.
    pub(super) fn put_back(&mut self) {
        self.is_put_back = true;
    }

    /// The next row with its number; `None` at the end.
    ///
    /// # Errors
    /// When the source can't be read, or a row is too long or not UTF-8.
    pub(super) fn next(&mut self) -> Result<Option<(u64, &str)>, TraceError> {
        if !std::mem::take(&mut self.is_put_back) {
            loop {
                self.line.clear();
                let taken = (&mut self.source).take(MAX_ROW_BYTES as u64 + 1).read_until(b'\n', &mut self.line)?;
                if taken == 0 {
                    return Ok(None);
                }
                self.row += 1;
                if taken > MAX_ROW_BYTES && !self.line.ends_with(b"\n") {
                    // A reader that goes on reads the rest as rows of their own. No caller does so after an error.
                    return Err(self.wrong(format!("it has more than {MAX_ROW_BYTES} bytes")));
                }
                if self.row == 1 && self.line.starts_with(b"\xEF\xBB\xBF") {
                    self.line.drain(..3);
                }
                if !self.line.trim_ascii().is_empty() {
                    break;
                }
            }
        }
        match std::str::from_utf8(&self.line) {
            Ok(text) => Ok(Some((self.row, text.trim_ascii()))),
            Err(_) if self.row == 1 && self.line.starts_with(&[0x1f, 0x8b]) => {
                Err(TraceError::Format("the trace is compressed with gzip; unpack it first".to_owned()))
            }
            Err(e) => Err(self.wrong(format!("it is not UTF-8 from byte {} on", e.valid_up_to() + 1))),
        }
    }

    fn wrong(&self, message: String) -> TraceError {
        TraceError::Row { row: self.row, message }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Cursor;

    fn all(bytes: Vec<u8>) -> Result<Vec<(u64, String)>, TraceError> {
        let mut rows = Rows::new(Box::new(Cursor::new(bytes)));
        let mut found = Vec::new();
        while let Some((row, text)) = rows.next()? {
            found.push((row, text.to_owned()));
        }
        Ok(found)
    }

    #[test]
    fn rows_are_counted_as_editors_count_lines() {
        let found = all(b"\xEF\xBB\xBFa\r\n\r\n \nb\n\nc".to_vec()).unwrap();
        assert_eq!(found, [(1, "a".to_owned()), (4, "b".to_owned()), (6, "c".to_owned())]);
        assert_eq!(all(Vec::new()).unwrap(), []);
    }

    #[test]
    fn a_row_can_be_put_back_once() {
        let mut rows = Rows::new(Box::new(Cursor::new("a\nb\n")));
        assert_eq!(rows.next().unwrap(), Some((1, "a")));
        rows.put_back();
        assert_eq!(rows.next().unwrap(), Some((1, "a")));
        assert_eq!(rows.next().unwrap(), Some((2, "b")));
    }

    #[test]
    fn what_is_no_text_is_named_by_its_row() {
        assert_eq!(all(b"a\nb\xFFc".to_vec()).unwrap_err().to_string(), "row 2: it is not UTF-8 from byte 2 on");
        let mut long = b"a\n".to_vec();
        long.resize(MAX_ROW_BYTES + 3, b'x');
        assert_eq!(all(long).unwrap_err().to_string(), "row 2: it has more than 16777216 bytes");
        let mut fits = vec![b'x'; MAX_ROW_BYTES];
        fits.push(b'\n');
        assert_eq!(all(fits).unwrap()[0].1.len(), MAX_ROW_BYTES);
        let gzip = all(b"\x1f\x8b\x08\x00".to_vec()).unwrap_err().to_string();
        assert_eq!(gzip, "the trace is compressed with gzip; unpack it first");
    }
}
