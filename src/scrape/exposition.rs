//! Scanner of the Prometheus text format for a few families; all other lines are skipped at the speed of `memchr`.
//!
//! Metrics of a model server have a thousand lines of histograms and a dozen that matter. [`Scan`] excludes most lines
//! by four of their bytes. Only lines of selected families are parsed, and nothing is copied unless a label value has
//! an escape. The metrics come from another process and are not trusted: every loop is linear, every size is limited,
//! and invalid lines are counted and skipped.
//!
//! Called by [`super::engines`]. Imports nothing of the crate.

use memchr::memchr;
use std::borrow::Cow;

/// Longest line of a selected family in bytes; vLLM's longest has 1,200.
pub const MAX_LINE_BYTES: usize = 64 << 10;
/// Most labels of one sample; vLLM's `cache_config_info` has 36.
pub(crate) const MAX_LABELS: usize = 256;
/// Most samples of selected families; a server with 64 engines and a thousand adapters has fewer.
pub(crate) const MAX_SAMPLES: usize = 16_384;
/// Longest number in bytes; the longest that a server prints has 24.
const MAX_NUMBER_BYTES: usize = 64;
/// Most families that can be selected at once: one bit each.
pub(crate) const MAX_FAMILIES: usize = 32;

/// The offsets in a line at which the table is used: the first excludes comments, the others distinguish
/// names with a common prefix.
const PROBES: [usize; 4] = [0, 5, 16, 33];

/// A set of selected families, prepared for scanning.
#[derive(Clone, Debug)]
pub struct Families {
    names: Box<[&'static str]>,
    /// For each probed offset and each byte value: the families whose lines may have that byte there, one bit each.
    table: Box<[[u32; 256]; PROBES.len()]>,
}

impl Families {
    /// Prepares `names`; names beyond `MAX_FAMILIES` are never found.
    #[must_use]
    pub fn new(names: &[&'static str]) -> Self {
        let names: Box<[&'static str]> = names.iter().copied().take(MAX_FAMILIES).collect();
        let mut table = Box::new([[0u32; 256]; PROBES.len()]);
        for (bit, name) in names.iter().enumerate() {
            for (row, offset) in table.iter_mut().zip(PROBES) {
                for (byte, mask) in (0u8..=255).zip(row.iter_mut()) {
                    let fits = match name.as_bytes().get(offset) {
                        Some(expected) => *expected == byte,
                        // A brace or a blank follows the name; after it, any byte or the end of the line.
                        None => offset > name.len() || matches!(byte, b'{' | b' ' | b'\t'),
                    };
                    *mask |= u32::from(fits) << bit;
                }
            }
        }
        Self { names, table }
    }

    /// Returns the names in the order of [`Sample::family`].
    #[must_use]
    pub fn names(&self) -> &[&'static str] {
        &self.names
    }

    /// Returns the family of `line` and the length of its name.
    #[inline]
    fn find(&self, line: &[u8]) -> Option<(usize, usize)> {
        let mut mask = u32::MAX;
        for (row, offset) in self.table.iter().zip(PROBES) {
            let byte = line.get(offset).copied().unwrap_or(b'\n');
            mask &= row.get(usize::from(byte)).copied().unwrap_or(0);
        }
        while mask != 0 {
            let bit = mask.trailing_zeros() as usize;
            mask &= mask - 1;
            let name = self.names.get(bit)?.as_bytes();
            // The byte after the name is compared first: it distinguishes a histogram's sum from its many buckets.
            if matches!(line.get(name.len()), Some(b'{' | b' ' | b'\t')) && line.starts_with(name) {
                return Some((bit, name.len()));
            }
        }
        None
    }
}

/// One sample of a selected family.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'p> {
    /// Position of its family in [`Families::names`].
    pub family: usize,
    /// The labels of the sample.
    pub labels: Labels<'p>,
    /// Its value; `None` when that is not a finite number of at least 0, or when the line is invalid.
    pub value: Option<f64>,
}

/// How many lines and samples of selected families a scan skipped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Skipped {
    /// Lines of selected families that are invalid, or exceed the limits of length or number.
    pub malformed: u64,
    /// Samples of selected families whose value is NaN, infinite or negative.
    pub unusable: u64,
}

/// Iterates over the samples of the selected families.
#[derive(Debug)]
pub struct Scan<'p, 'f> {
    rest: &'p [u8],
    families: &'f Families,
    samples: usize,
    skipped: Skipped,
}

impl<'p, 'f> Scan<'p, 'f> {
    /// Creates a scan of `page` for `families`.
    #[must_use]
    pub fn new(page: &'p [u8], families: &'f Families) -> Self {
        Self { rest: page, families, samples: 0, skipped: Skipped::default() }
    }

    /// Returns the counts of lines skipped so far.
    #[must_use]
    pub fn skipped(&self) -> Skipped {
        self.skipped
    }

    fn sample(&mut self, family: usize, after_name: &'p [u8]) -> Sample<'p> {
        let parsed = (after_name.len() <= MAX_LINE_BYTES).then(|| parse(after_name)).flatten();
        let Some((labels, number)) = parsed else {
            self.skipped.malformed += 1;
            return Sample { family, labels: Labels::EMPTY, value: None };
        };
        let value = (number.is_finite() && number >= 0.0).then_some(number);
        if value.is_none() {
            self.skipped.unusable += 1;
        }
        Sample { family, labels, value }
    }
}

impl<'p> Iterator for Scan<'p, '_> {
    type Item = Sample<'p>;

    fn next(&mut self) -> Option<Sample<'p>> {
        while !self.rest.is_empty() {
            let (line, rest) = match memchr(b'\n', self.rest) {
                Some(end) => (self.rest.get(..end)?, self.rest.get(end + 1..)?),
                None => (self.rest, [].as_slice()),
            };
            self.rest = rest;
            let line = match line.first() {
                Some(b' ' | b'\t') => line.trim_ascii_start(),
                _ => line,
            };
            let Some((family, name_len)) = self.families.find(line) else { continue };
            if self.samples >= MAX_SAMPLES {
                self.skipped.malformed += 1;
                continue;
            }
            self.samples += 1;
            let after_name = line.get(name_len..)?;
            return Some(self.sample(family, after_name));
        }
        None
    }
}

/// Splits the text after a name into labels and value. A timestamp and an exemplar after the value are ignored.
fn parse(after_name: &[u8]) -> Option<(Labels<'_>, f64)> {
    let after_name = after_name.trim_ascii();
    let (labels, after_labels) = match after_name.strip_prefix(b"{") {
        Some(inner) => {
            let end = labels_end(inner)?;
            (Labels { rest: inner.get(..end)? }, inner.get(end + 1..)?)
        }
        None => (Labels::EMPTY, after_name),
    };
    let mut words = after_labels.split(u8::is_ascii_whitespace).filter(|w| !w.is_empty());
    let value = number(words.next()?)?;
    match words.next() {
        None | Some([b'#', ..]) => {}
        Some(timestamp) => {
            number(timestamp)?;
            if !words.next().is_none_or(|w| w.starts_with(b"#")) {
                return None;
            }
        }
    }
    Some((labels, value))
}

/// Checks the labels at the start of `inner`; returns the position of the closing brace.
fn labels_end(inner: &[u8]) -> Option<usize> {
    let mut walk = Labels { rest: inner };
    for _ in 0..=MAX_LABELS {
        walk.skip_blanks();
        if walk.rest.first() == Some(&b'}') {
            return Some(inner.len() - walk.rest.len());
        }
        let (name, value) = walk.raw_pair()?;
        std::str::from_utf8(name).ok()?;
        std::str::from_utf8(value).ok()?;
        if !walk.skip_comma() && walk.rest.first() != Some(&b'}') {
            return None;
        }
    }
    None
}

fn number(word: &[u8]) -> Option<f64> {
    if word.len() > MAX_NUMBER_BYTES {
        return None;
    }
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// The valid labels of a sample; iterates over names and values.
#[derive(Clone, Copy, Debug)]
pub struct Labels<'p> {
    rest: &'p [u8],
}

impl<'p> Labels<'p> {
    const EMPTY: Labels<'static> = Labels { rest: &[] };

    /// Returns the value of the label `name`, the last one if it occurs repeatedly.
    #[must_use]
    pub fn get(self, name: &str) -> Option<Cow<'p, str>> {
        self.filter(|(n, _)| *n == name).last().map(|(_, value)| value)
    }

    fn skip_blanks(&mut self) {
        self.rest = self.rest.trim_ascii_start();
    }

    /// Consumes the comma that may follow a pair, and the blanks around it.
    fn skip_comma(&mut self) -> bool {
        self.skip_blanks();
        let after = self.rest.strip_prefix(b",");
        self.rest = after.unwrap_or(self.rest).trim_ascii_start();
        after.is_some()
    }

    /// Consumes `name="value"`; returns the value with its escapes.
    fn raw_pair(&mut self) -> Option<(&'p [u8], &'p [u8])> {
        let equals = memchr(b'=', self.rest)?;
        let name = self.rest.get(..equals)?.trim_ascii();
        let name_is_good =
            !name.is_empty() && name.iter().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b':'));
        let quoted = self.rest.get(equals + 1..)?.trim_ascii_start().strip_prefix(b"\"")?;
        if !name_is_good {
            return None;
        }
        let mut from = 0;
        loop {
            let at = from + memchr::memchr2(b'"', b'\\', quoted.get(from..)?)?;
            if quoted.get(at) == Some(&b'"') {
                self.rest = quoted.get(at + 1..)?;
                return Some((name, quoted.get(..at)?));
            }
            from = at + 2;
        }
    }
}

impl<'p> Iterator for Labels<'p> {
    type Item = (&'p str, Cow<'p, str>);

    fn next(&mut self) -> Option<Self::Item> {
        self.skip_blanks();
        let (name, value) = self.raw_pair()?;
        self.skip_comma();
        Some((std::str::from_utf8(name).ok()?, unescape(std::str::from_utf8(value).ok()?)))
    }
}

/// Resolves `\\`, `\"` and `\n`; another escape stays unchanged, as in Prometheus.
fn unescape(raw: &str) -> Cow<'_, str> {
    if !raw.contains('\\') {
        return Cow::Borrowed(raw);
    }
    let mut text = String::with_capacity(raw.len());
    let mut chars = raw.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            text.push(c);
            continue;
        }
        match chars.next() {
            Some('n') => text.push('\n'),
            Some(c @ ('\\' | '"')) => text.push(c),
            Some(other) => text.extend(['\\', other]),
            None => text.push('\\'),
        }
    }
    Cow::Owned(text)
}

#[cfg(test)]
mod tests;
