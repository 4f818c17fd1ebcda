//! Lines of bounded length, counted as editors count them.

use crate::TraceError;
use flate2::bufread::MultiGzDecoder;
use std::io::{self, BufRead, BufReader, Read};

/// 16 MiB: a million tokens in blocks of 16 are a row of 600 KB.
const MAX_ROW_BYTES: usize = 16 << 20;

/// The first bytes of a file that is compressed with gzip.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// The rows of a trace; empty ones are passed over.
pub(super) struct Rows {
    source: Box<dyn BufRead + Send>,
    line: Vec<u8>,
    row: u64,
    is_put_back: bool,
}

impl Rows {
    fn new(source: Box<dyn BufRead + Send>) -> Self {
        Self { source, line: Vec::new(), row: 0, is_put_back: false }
    }

    /// The rows of `source`, which may be compressed with gzip.
    ///
    /// # Errors
    /// When the source can't be read.
    pub(super) fn open(mut source: impl BufRead + Send + 'static) -> io::Result<Self> {
        let is_gzip = source.fill_buf()?.starts_with(&GZIP);
        Ok(Self::new(if is_gzip { Box::new(BufReader::new(MultiGzDecoder::new(source))) } else { Box::new(source) }))
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
    use flate2::Compression;
    use flate2::write::GzEncoder;
    use std::io::{Cursor, Write};

    fn all(bytes: Vec<u8>) -> Result<Vec<(u64, String)>, TraceError> {
        let mut rows = Rows::open(Cursor::new(bytes))?;
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
        let mut rows = Rows::open(Cursor::new("a\nb\n")).unwrap();
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
    }

    #[test]
    fn compressed_rows_are_unpacked() {
        let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
        packed.write_all(b"a\n\nb\n").unwrap();
        let packed = packed.finish().unwrap();
        // Two members, as `cat` of two files makes them.
        let found = all([packed.clone(), packed.clone()].concat()).unwrap();
        let rows: Vec<_> = found.iter().map(|(row, text)| (*row, text.as_str())).collect();
        assert_eq!(rows, [(1, "a"), (3, "b"), (4, "a"), (6, "b")]);
        assert!(matches!(all(packed[..packed.len() - 9].to_vec()), Err(TraceError::Read(_))), "a cut file is an error");
    }
}
