//! Recorded workloads, read from files, also from those compressed with gzip. What is wrong is named by its row. Files
//! are read one row at a time, so memory does not grow with them. Only sessions are read whole: their player chooses
//! among them.
//!
//! | file | [`TraceFormat`] | prompts | source |
//! |---|---|---|---|
//! | [`agents`] | JSONL with `requests`: a session in each row | sessions, by the ids of their blocks | kv-cache-tester |
//! | [`mooncake`] | JSONL with `hash_ids` | by the ids of their blocks | Mooncake (FAST'25) |
//! | [`bailian`] | JSONL with `hash_ids` and `chat_id` | sessions, by the ids of their blocks | Qwen-Bailian (ATC'25) |
//! | [`azure`] | CSV `TIMESTAMP,ContextTokens,GeneratedTokens` | lengths, images | Azure inference traces 2023 to 2025 |
//! | [`burstgpt`] | CSV `Timestamp,Model,Request tokens,Response tokens,…` | lengths, conversations | BurstGPT |
//! | [`native`] | JSONL that begins with `{"format":"attache.trace.v1"}` | by the names of their parts | this project |
//! | [`recording`] | JSONL that begins with `{"format":"attache.record.v1",…}` | by the keys of their blocks, sessions | `attache run --record` |
//!
//! The first row decides the format; [`unused`] names its fields that are not read. Prompts of which only the length is known share nothing with each other. Times of
//! foreign traces count from their first row. Called by `cli::replay` and tests.

pub mod agents;
pub mod azure;
pub mod bailian;
mod blocks;
pub mod burstgpt;
mod fields;
pub mod mooncake;
pub mod native;
pub mod recording;
mod rows;

use crate::sessions::{SessionOptions, SessionPlayer, SessionTrace};
use crate::{Request, TraceError, Workload};
use attache_types::clock::Timestamp;
use rows::Rows;
use serde::Deserialize;
use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// A prompt or an answer of more tokens is a misprint; the longest context that is served anywhere is a tenth of it.
pub const MAX_TOKENS: u64 = 10_000_000;
/// Read in pieces of 256 KiB: rows of long prompts fit several times.
const BUFFER_BYTES: usize = 256 << 10;

/// A trace, from its beginning.
pub type Source = Box<dyn BufRead + Send>;

/// Settings for reading a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Options {
    /// Tokens of the block that one of a trace's `hash_ids` stands for; `None`: those of the published traces.
    pub block_tokens: Option<u32>,
    /// How sessions are played, in traces that have them.
    pub sessions: SessionOptions,
}

/// The formats that are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TraceFormat {
    /// See [`agents`].
    Agents,
    /// See [`mooncake`].
    Mooncake,
    /// See [`bailian`].
    Bailian,
    /// See [`azure`].
    Azure,
    /// See [`burstgpt`].
    BurstGpt,
    /// See [`native`].
    Native,
    /// As `Native`; its rows are turns of sessions.
    NativeSessions,
    /// See [`recording`].
    Recording,
}

/// Opens the trace at `path`.
///
/// # Errors
/// When the file can't be read, or its format is not known.
pub fn open(path: &Path, options: &Options) -> Result<Box<dyn Workload>, TraceError> {
    let file = File::open(path)?;
    read(BufReader::with_capacity(BUFFER_BYTES, file), options)
}

/// Reads a trace from `source`.
///
/// # Errors
/// As [`open`].
pub fn read(source: impl BufRead + Send + 'static, options: &Options) -> Result<Box<dyn Workload>, TraceError> {
    let mut rows = Rows::open(source)?;
    let Some((_, first)) = rows.next()? else { return Err(TraceError::Format("the trace is empty".to_owned())) };
    Ok(match format_of(first)? {
        TraceFormat::Mooncake => {
            rows.put_back();
            let block_tokens = options.block_tokens.unwrap_or(mooncake::DEFAULT_BLOCK_TOKENS);
            Box::new(Trace::new(rows, mooncake::Mooncake::new(block_tokens)?))
        }
        format @ (TraceFormat::Agents | TraceFormat::Bailian | TraceFormat::NativeSessions) => {
            Box::new(SessionPlayer::new(Arc::new(read_sessions(rows, format, options)?), options.sessions))
        }
        TraceFormat::Azure => {
            let azure = azure::Azure::new(first)?;
            Box::new(Trace::new(rows, azure))
        }
        TraceFormat::BurstGpt => {
            let burstgpt = burstgpt::BurstGpt::new(first)?;
            Box::new(Trace::new(rows, burstgpt))
        }
        TraceFormat::Native => Box::new(Trace::new(rows, native::Native)),
        TraceFormat::Recording => Box::new(recording::Recording::new(rows)),
    })
}

/// The sessions of the trace that `open` opens at its beginning; `None` if it has none. A recording has sessions if a
/// request of it names its agent; it is opened twice, so that one without sessions is not read into memory.
///
/// # Errors
/// As [`read`].
pub fn sessions(open: &dyn Fn() -> io::Result<Source>, options: &Options) -> Result<Option<SessionTrace>, TraceError> {
    let mut rows = Rows::open(open()?)?;
    let Some((_, first)) = rows.next()? else { return Err(TraceError::Format("the trace is empty".to_owned())) };
    match format_of(first)? {
        format @ (TraceFormat::Agents | TraceFormat::Bailian | TraceFormat::NativeSessions) => {
            read_sessions(rows, format, options).map(Some)
        }
        TraceFormat::Recording if recording::names_agents(rows)? => {
            let mut rows = Rows::open(open()?)?;
            rows.next()?;
            recording::sessions(rows).map(Some)
        }
        _ => Ok(None),
    }
}

/// Reads the sessions of a trace, the first row of which was read.
fn read_sessions(mut rows: Rows, format: TraceFormat, options: &Options) -> Result<SessionTrace, TraceError> {
    match format {
        TraceFormat::NativeSessions => native::sessions(rows),
        TraceFormat::Bailian => {
            rows.put_back();
            bailian::read(rows, options.block_tokens.unwrap_or(bailian::DEFAULT_BLOCK_TOKENS))
        }
        _ => {
            rows.put_back();
            agents::read(rows)
        }
    }
}

/// Fields that distinguish the formats of JSON rows.
#[derive(Deserialize)]
struct Marks<'a> {
    #[serde(borrow)]
    format: Option<&'a serde_json::value::RawValue>,
    hash_ids: Option<serde::de::IgnoredAny>,
    chat_id: Option<serde::de::IgnoredAny>,
    requests: Option<serde::de::IgnoredAny>,
    #[serde(borrow)]
    sessions: Option<&'a serde_json::value::RawValue>,
}

/// The fields of the first row of `source` that no loader reads, in the order of the row. Empty for formats whose
/// loader refuses unknown fields.
///
/// # Errors
/// As [`read`].
pub fn unused(source: impl BufRead + Send + 'static) -> Result<Vec<String>, TraceError> {
    let mut rows = Rows::open(source)?;
    let Some((_, first)) = rows.next()? else { return Ok(Vec::new()) };
    let (fields, read): (Vec<String>, Vec<&str>) = match format_of(first)? {
        TraceFormat::Mooncake => (keys(first), mooncake::FIELDS.into()),
        TraceFormat::Bailian => (keys(first), bailian::FIELDS.into()),
        TraceFormat::Azure => (headings(first), azure::HEADINGS.into_iter().chain([azure::IMAGES]).collect()),
        TraceFormat::BurstGpt => (headings(first), burstgpt::HEADINGS.into_iter().chain([burstgpt::SESSION]).collect()),
        TraceFormat::Agents => (keys(first), agents::FIELDS.into()),
        TraceFormat::Native | TraceFormat::NativeSessions | TraceFormat::Recording => return Ok(Vec::new()),
    };
    let is_read = |field: &String| read.iter().any(|name| name.eq_ignore_ascii_case(field));
    Ok(fields.into_iter().filter(|field| !is_read(field)).map(|field| fields::shown(&field)).collect())
}

/// The names of the fields of a JSON row.
fn keys(row: &str) -> Vec<String> {
    serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(row)
        .map(|row| row.into_iter().map(|(name, _)| name).collect())
        .unwrap_or_default()
}

/// The columns of a CSV heading that have a name.
fn headings(row: &str) -> Vec<String> {
    fields::columns(row).iter().filter(|name| !name.is_empty()).map(|name| (*name).to_owned()).collect()
}

/// The format of a trace with this first row.
///
/// # Errors
/// When it is none that is known.
pub fn format_of(first: &str) -> Result<TraceFormat, TraceError> {
    if first.trim_start().starts_with('{') {
        let marks: Option<Marks<'_>> = serde_json::from_str(first).ok();
        return match marks {
            Some(Marks { format: Some(format), sessions, .. }) if native::is_header(format.get()) => {
                match sessions.map(|sessions| sessions.get()) {
                    Some("true") => Ok(TraceFormat::NativeSessions),
                    Some("false") | None => Ok(TraceFormat::Native),
                    got => Err(TraceError::Format(fields::wrong("sessions", got, "true or false"))),
                }
            }
            Some(Marks { format: Some(format), .. }) if recording::is_header(format.get()) => {
                Ok(TraceFormat::Recording)
            }
            Some(Marks { format: Some(format), .. }) => Err(TraceError::Format(format!(
                "`format` is {}; \"{}\" and \"{}\" are allowed",
                fields::shown(format.get()),
                native::FORMAT,
                attache_record::FORMAT
            ))),
            Some(Marks { requests: Some(_), .. }) => Ok(TraceFormat::Agents),
            Some(Marks { hash_ids: Some(_), chat_id: Some(_), .. }) => Ok(TraceFormat::Bailian),
            Some(Marks { hash_ids: Some(_), .. }) => Ok(TraceFormat::Mooncake),
            _ => Err(unknown(first)),
        };
    }
    let columns = fields::columns(first);
    if azure::is_header(&columns) {
        Ok(TraceFormat::Azure)
    } else if burstgpt::is_header(&columns) {
        Ok(TraceFormat::BurstGpt)
    } else {
        Err(unknown(first))
    }
}

fn unknown(first: &str) -> TraceError {
    let shown = fields::shown(first);
    TraceError::Format(format!(
        "the first row is {shown}; allowed are rows with `hash_ids` (Mooncake, Qwen-Bailian), rows with `requests` (sessions), a row with \"format\": \"{}\", \
         and the headings {} (Azure) and {} (BurstGPT)",
        native::FORMAT,
        azure::HEADINGS.join(","),
        burstgpt::HEADINGS.join(",")
    ))
}

/// One format: turns rows into requests.
trait RowParser: Send {
    /// Times count from the first row in place of from 0.
    const FROM_FIRST: bool;

    /// The request in `row`, with `number`.
    ///
    /// # Errors
    /// The field, what it holds, and what is allowed.
    fn request(&mut self, row: &str, number: u64) -> Result<Request, String>;
}

/// A trace of one format.
struct Trace<R> {
    rows: Rows,
    rule: R,
    number: u64,
    first: Option<Timestamp>,
    last: Timestamp,
}

impl<R: RowParser> Trace<R> {
    fn new(rows: Rows, rule: R) -> Self {
        Self { rows, rule, number: 0, first: None, last: Timestamp(0) }
    }
}

impl<R: RowParser> Workload for Trace<R> {
    fn next(&mut self) -> Result<Option<Request>, TraceError> {
        let Some((row, text)) = self.rows.next()? else {
            return match self.number {
                0 => Err(TraceError::Format("the trace has no requests".to_owned())),
                _ => Ok(None),
            };
        };
        let mut request = self.rule.request(text, self.number).map_err(|message| TraceError::Row { row, message })?;
        let first = *self.first.get_or_insert(if R::FROM_FIRST { request.at } else { Timestamp(0) });
        if request.at < self.last.after(first.since(Timestamp(0))) {
            let message = out_of_order(self.last.after(first.since(Timestamp(0))).since(request.at));
            return Err(TraceError::Row { row, message });
        }
        request.at = Timestamp(0).after(request.at.since(first));
        self.last = request.at;
        self.number += 1;
        Ok(Some(request))
    }
}

/// The error about a row that is earlier than the row before it, by `by`.
fn out_of_order(by: Duration) -> String {
    format!("it comes {} s before the row before it; rows must be in the order of time", by.as_secs_f64())
}

#[cfg(test)]
mod tests;
