//! Makes recorded decisions again. With the recorded configuration, every decision must be equal. With another
//! configuration, the differences show which requests it would have sent elsewhere.
//!
//! The live picker decides and books each request, which it knows without a body ([`attache_picker::known`]). The lines
//! of the recording are applied to its state in the order in which the recorded picker changed its own. A decision uses
//! the recorded seed of its random numbers, and is booked on the endpoint that the replay chose.
//!
//! Metrics, first bytes, ends and failures are the recorded ones. With another configuration, servers therefore respond
//! as they did to the recorded decisions. For the effect on latency, play the recording as a workload
//! ([`attache_workload::trace`]) in a simulated pool.
//!
//! Tokenizer and block size are always those of the recording, since prompts are recorded as keys. Another
//! configuration may need inputs that were not recorded: a header, or a digest of the text. [`Summary::missing`] lists
//! them.
//!
//! Called by `cli::replay` and tests.

mod decision;
pub mod explain;
mod in_flight;
mod kv;
mod player;
mod pools;

use attache_config::{self as config, ConfigText, Settings, Sources};
use attache_record::{FORMAT, Header, Line};
use attache_scheduling::Registry;
use player::RecordingPlayer;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

/// Most differences that are listed; further ones are only counted.
pub const MAX_DIFFERENCES: usize = 20;
/// Most bytes of a line, 64 MiB. The keys of a prompt of ten million tokens take 7 MB.
const MAX_LINE_BYTES: u64 = 64 << 20;
/// Bytes of the read buffer, as for traces.
const BUFFER_BYTES: usize = 256 << 10;

/// A recording that can't be replayed.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// The file can't be read.
    #[error("{0}")]
    Read(#[from] io::Error),
    /// A line is invalid.
    #[error("line {line}: {message}")]
    Line {
        /// Line number in the recording, from 1.
        line: u64,
        /// What is wrong with it.
        message: String,
    },
    /// The recording is empty, or names a pool that the configuration does not have.
    #[error("{0}")]
    Format(String),
}

/// A decision that differs from the recorded one in an endpoint that the request used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// The line of the recording.
    pub line: u64,
    /// The request's number in it.
    pub request: u64,
    /// The endpoints (`ip:port`) that the request used: that of the live picker, and its fallbacks after failures.
    /// Empty if it rejected the request.
    pub recorded: Vec<String>,
    /// Reason of the recorded decision, as strategies name it.
    pub recorded_reason: String,
    /// As many endpoints that the replay chose; empty if it rejected the request.
    pub replayed: Vec<String>,
    /// Reason of the replayed decision.
    pub replayed_reason: String,
    /// The replay's choice depends on random numbers: on a tie, or the strategy chooses at random.
    pub by_chance: bool,
}

/// Number of requests with one endpoint as the first pick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Requests {
    /// Requests that the recorded picker sent there.
    pub recorded: u64,
    /// Requests that the replayed picker sent there.
    pub replayed: u64,
}

/// Result of a replay: counts, and the first decisions that differ.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Summary {
    /// Version of the Attaché that made the recording.
    pub version: String,
    /// Lines that were applied, the first included.
    pub lines: u64,
    /// Decisions of strategies, rejections included.
    pub decisions: u64,
    /// Decisions with the recorded endpoints, as far as the request used them: the first one, the first prefill server,
    /// the encode servers, and fallbacks that Envoy used after failures. The order of unused fallbacks has no effect.
    pub equal: u64,
    /// Decisions that differ and depend on random numbers: on a tie, or the strategy chooses at random.
    pub by_chance: u64,
    /// Requests whose endpoint no strategy chose, because a stored response, a reservation or a test header named it.
    /// The replay keeps it.
    pub preset: u64,
    /// The first [`MAX_DIFFERENCES`] decisions that differ.
    pub differences: Vec<Difference>,
    /// Requests of each endpoint, by `ip:port`.
    pub endpoints: BTreeMap<String, Requests>,
    /// Tokens of the prompts that were looked up.
    pub prompt_tokens: u64,
    /// Prompt tokens that the recorded picks were expected to have cached.
    pub matched_recorded: u64,
    /// Prompt tokens that the replayed picks were expected to have cached.
    pub matched_replayed: u64,
    /// Inputs that the configuration needs and the recording lacks. Decisions are made without them.
    pub missing: BTreeSet<String>,
    /// Number of the last line if it is incomplete, because Attaché was killed while it wrote.
    pub cut: Option<u64>,
}

impl Summary {
    /// Lists a decision that differs, if there is space.
    fn differs(&mut self, difference: impl FnOnce() -> Difference) {
        if self.differences.len() < MAX_DIFFERENCES {
            self.differences.push(difference());
        }
    }

    /// Whether every decision equals the recorded one.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        self.equal == self.decisions
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 };
        writeln!(f, "{} lines, recorded by attache {}", self.lines, self.version)?;
        let Self { decisions, equal, .. } = self;
        let used = "the endpoints that requests used are compared";
        writeln!(f, "{equal} of {decisions} decisions are equal ({:.2} %); {used}", percent(*equal, *decisions))?;
        if self.by_chance > 0 {
            let all = decisions - equal;
            writeln!(f, "{} of the other {all} depend on random numbers: ties, or a random choice", self.by_chance)?;
        }
        if self.preset > 0 {
            writeln!(f, "{} requests had a destination that no strategy chose; it is kept", self.preset)?;
        }
        let all = self.prompt_tokens;
        let (then, now) = (percent(self.matched_recorded, all), percent(self.matched_replayed, all));
        writeln!(f, "expected cached tokens: {then:.1} % of {all} when recorded, {now:.1} % now")?;
        for (name, requests) in &self.endpoints {
            writeln!(f, "  {name}: {} requests when recorded, {} now", requests.recorded, requests.replayed)?;
        }
        for d in &self.differences {
            let (then, now) = (d.recorded.join(","), d.replayed.join(","));
            writeln!(
                f,
                "line {}, request {}: [{then}] ({}) when recorded, [{now}] ({}) now{}",
                d.line,
                d.request,
                d.recorded_reason,
                d.replayed_reason,
                if d.by_chance { ", by chance" } else { "" }
            )?;
        }
        let listed = self.differences.len() as u64;
        if decisions - equal > listed {
            writeln!(f, "and {} more", decisions - equal - listed)?;
        }
        for missing in &self.missing {
            writeln!(f, "the recording has no {missing}, which this configuration needs")?;
        }
        if let Some(line) = self.cut {
            writeln!(f, "line {line} is cut off: Attaché was killed while it wrote; all lines before it count")?;
        }
        Ok(())
    }
}

/// Replays the recording at `path`, with the `other` configuration in place of the recorded one if there is one. The
/// plugins that the recorded configuration names come from `registry`.
///
/// # Errors
/// If the file can't be read, a line is invalid, or the other configuration has no pool for a recorded one.
pub fn replay_file(path: &Path, other: Option<&Settings>, registry: &Registry) -> Result<Summary, RecordError> {
    replay(open(path)?, other, registry)
}

/// Opens the recording at `path`.
///
/// # Errors
/// If the file can't be opened.
pub fn open(path: &Path) -> Result<impl BufRead, RecordError> {
    let named = |e: io::Error| io::Error::new(e.kind(), format!("`{}`: {e}", path.display()));
    let file = File::open(path).map_err(named)?;
    Ok(BufReader::with_capacity(BUFFER_BYTES, file))
}

/// Replays a recording, as [`replay_file`].
///
/// # Errors
/// As [`replay_file`].
pub fn replay(source: impl BufRead, other: Option<&Settings>, registry: &Registry) -> Result<Summary, RecordError> {
    let mut lines = Lines::open(source)?;
    let mut player = RecordingPlayer::new(&lines.header, other, registry)?;
    while let Some((line, number)) = lines.line()? {
        player.apply(line, number)?;
    }
    let Lines { header, number, cut, .. } = lines;
    Ok(Summary { version: header.version, lines: number, cut, ..player.summary() })
}

/// A recording that is read line by line.
#[derive(Debug)]
pub struct Lines<R> {
    source: R,
    text: Vec<u8>,
    /// First line of the recording.
    pub header: Header,
    /// Number of lines that were read, the first included.
    number: u64,
    /// Number of the last line if it is incomplete.
    cut: Option<u64>,
}

impl<R: BufRead> Lines<R> {
    /// Reads the first line and checks the format.
    ///
    /// # Errors
    /// If the file is empty, or the line is not the header of a recording.
    pub fn open(mut source: R) -> Result<Self, RecordError> {
        let mut text = Vec::new();
        if !next_line(&mut source, &mut text, 1)? {
            return Err(RecordError::Format("the recording is empty".to_owned()));
        }
        let header: Header = serde_json::from_slice(&text).map_err(|e| wrong(1, e.to_string()))?;
        if header.format != FORMAT {
            return Err(wrong(1, format!("`format` is `{}`; `{FORMAT}` is allowed", header.format)));
        }
        Ok(Self { source, text, header, number: 1, cut: None })
    }

    /// The next line with its number, from 1; `None` at the end, or if the last line is incomplete.
    ///
    /// # Errors
    /// If the line can't be read or is invalid.
    pub fn line(&mut self) -> Result<Option<(Line, u64)>, RecordError> {
        let number = self.number + 1;
        if self.cut.is_some() || !next_line(&mut self.source, &mut self.text, number)? {
            return Ok(None);
        }
        if !self.text.ends_with(b"\n") {
            self.cut = Some(number);
            return Ok(None);
        }
        self.number = number;
        let line: Line = serde_json::from_slice(&self.text).map_err(|e| wrong(number, e.to_string()))?;
        Ok(Some((line, number)))
    }
}

/// Reads one line, its end included; false at the end of the source.
fn next_line(source: &mut impl BufRead, text: &mut Vec<u8>, number: u64) -> Result<bool, RecordError> {
    text.clear();
    let taken = source.take(MAX_LINE_BYTES + 1).read_until(b'\n', text)?;
    if taken as u64 > MAX_LINE_BYTES {
        return Err(wrong(number, format!("it has more than {MAX_LINE_BYTES} bytes")));
    }
    Ok(taken > 0)
}

fn wrong(line: u64, message: String) -> RecordError {
    RecordError::Line { line, message }
}

/// The settings in a line of a recording.
fn settings(shown: &Value, registry: &Registry, line: u64) -> Result<Settings, RecordError> {
    let text = ConfigText { name: "recording".to_owned(), bytes: shown.to_string().into_bytes() };
    let sources = Sources { registry: registry.clone(), text: Some(text), ..Sources::default() };
    config::load(&sources).map(|(settings, _)| settings).map_err(|diagnostics| {
        let message = diagnostics.iter().find(|d| d.is_error()).map_or("", |d| d.message.as_str());
        wrong(line, format!("`settings` can't be used: {message}"))
    })
}

#[cfg(test)]
mod tests;
