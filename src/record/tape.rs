//! The recording of a running Attaché: one order of all changes to the inputs of decisions.
//!
//! Code that changes something takes a [`Turn`] before the change, writes a line, and drops it afterwards. The
//! file therefore has the lines in the order of the changes, across all threads. Lines go to memory; a writer
//! thread moves them to the file, so that a slow disk never delays a request. On a failure (the file or the
//! disk is full, or the disk is too slow), the recording ends with one log line and the gauge
//! `attache_recording`; requests are still served.

use super::file;
use super::kv::KvChange;
use super::line::{FORMAT, Header, Line};
use attache_pool::PoolEvent;
use attache_prefix::cache::CacheConfig;
use parking_lot::{Condvar, Mutex, MutexGuard};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::Value;
use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

/// Default limit of the file, 1 GiB: some hundred thousand requests of a few thousand tokens.
pub const DEFAULT_MAX_BYTES: u64 = 1 << 30;
/// Longest time until lines reach the file, and so the loss if the process is killed.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);
/// Bytes in memory at which the writer thread is woken, to keep memory small under load.
const WAKE_BYTES: usize = 256 << 10;
/// Bytes in memory at which the disk counts as too slow, and the recording ends.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Path and size limit of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordSettings {
    /// Path of the file; an existing recording is replaced.
    pub path: PathBuf,
    /// Size in bytes at which the recording ends.
    pub max_bytes: u64,
}

/// A recording in progress, which all threads share.
#[derive(Debug)]
pub struct Recorder {
    shared: Arc<TapeState>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct TapeState {
    tape: Mutex<Tape>,
    wake: Condvar,
    /// Signals that lines have reached the file.
    flushed: Condvar,
    /// Whether the recording still accepts lines.
    on: AtomicBool,
    path: PathBuf,
    max_bytes: u64,
    lines: Counter,
    bytes: Counter,
    recording: Gauge,
}

/// State under the recording's lock.
#[derive(Debug, Default)]
struct Tape {
    /// Lines that are not in the file yet.
    waiting: Vec<u8>,
    written: u64,
    /// Bytes of the lines that are in the file.
    in_file: u64,
    requests: u64,
    pools: u32,
    lives: u32,
    closing: bool,
}

/// The lock under which inputs of decisions are changed and the changes recorded.
#[derive(Debug)]
pub struct Turn<'a> {
    tape: MutexGuard<'a, Tape>,
    shared: &'a TapeState,
}

impl Recorder {
    /// Starts a recording with this seed and these settings.
    ///
    /// # Errors
    /// When the file cannot be created, or another file than a recording is there.
    pub fn start(settings: RecordSettings, seed: u64, config: Value) -> std::io::Result<Arc<Self>> {
        let named = |e: std::io::Error| {
            std::io::Error::new(e.kind(), format!("can't record to `{}`: {e}", settings.path.display()))
        };
        let file = file::create(&settings.path).map_err(named)?;
        let shared = Arc::new(TapeState {
            tape: Mutex::default(),
            wake: Condvar::new(),
            flushed: Condvar::new(),
            on: AtomicBool::new(true),
            path: settings.path.clone(),
            max_bytes: settings.max_bytes,
            lines: Counter::default(),
            bytes: Counter::default(),
            recording: Gauge::default(),
        });
        shared.recording.set(1);
        let header =
            Header { format: FORMAT.to_owned(), version: env!("CARGO_PKG_VERSION").to_owned(), seed, settings: config };
        Turn { tape: shared.tape.lock(), shared: &shared }.append(&header);
        let to_write = shared.clone();
        let writer = std::thread::Builder::new().name("record".to_owned()).spawn(move || to_write.write(file));
        Ok(Arc::new(Self { writer: Mutex::new(Some(writer.map_err(named)?)), shared }))
    }

    /// Registers the recording's counters and gauge in `registry`.
    pub fn register(&self, registry: &mut Registry) {
        let TapeState { lines, bytes, recording, .. } = &*self.shared;
        registry.register("recorded_lines", "Lines written to the recording", lines.clone());
        registry.register("recorded_bytes", "Bytes written to the recording", bytes.clone());
        registry.register("recording", "1 while a recording is made, 0 when it has ended", recording.clone());
    }

    /// Takes the lock; `None` when the recording has ended.
    #[must_use]
    pub fn turn(&self) -> Option<Turn<'_>> {
        let shared = &*self.shared;
        if !shared.on.load(Relaxed) {
            return None;
        }
        let tape = shared.tape.lock();
        // It may have ended while waiting for the lock.
        (shared.on.load(Relaxed) && !tape.closing).then_some(Turn { tape, shared })
    }

    /// Path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Waits until all lines so far are in the file, or the recording has ended. Blocks for as long as the disk takes.
    pub fn flush(&self) {
        let mut tape = self.shared.tape.lock();
        let wanted = tape.written;
        while tape.in_file < wanted && self.shared.on.load(Relaxed) {
            self.shared.wake.notify_one();
            self.shared.flushed.wait_for(&mut tape, FLUSH_INTERVAL);
        }
    }

    /// Ends the recording because of an event that it cannot represent.
    pub fn stop(&self, why: &str) {
        if let Some(turn) = self.turn() {
            turn.shared.stop(why);
        }
    }

    /// Ends the recording after writing all lines to the file.
    pub fn finish(&self) {
        self.shared.tape.lock().closing = true;
        self.shared.wake.notify_one();
        if let Some(writer) = self.writer.lock().take() {
            // If the writer has panicked, its lines are lost, and nothing more can be done.
            let _ = writer.join();
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.finish();
    }
}

impl TapeState {
    fn stop(&self, why: &str) {
        if self.on.swap(false, Relaxed) {
            self.recording.set(0);
            tracing::error!(path = %self.path.display(), why, "recording stopped; requests are still served");
        }
    }

    /// Moves lines to the file until the recording is closed.
    fn write(&self, mut file: File) {
        let mut lines = Vec::new();
        loop {
            let closing = {
                let mut tape = self.tape.lock();
                if !tape.closing && tape.waiting.len() < WAKE_BYTES {
                    self.wake.wait_for(&mut tape, FLUSH_INTERVAL);
                }
                std::mem::swap(&mut tape.waiting, &mut lines);
                tape.closing
            };
            if let Err(error) = file.write_all(&lines) {
                let _waits = self.tape.lock();
                self.stop(&error.to_string());
                return;
            }
            self.tape.lock().in_file += lines.len() as u64;
            self.flushed.notify_all();
            lines.clear();
            if closing {
                self.on.store(false, Relaxed);
                self.recording.set(0);
                return;
            }
        }
    }
}

impl Turn<'_> {
    /// Records a change made under this lock.
    pub fn write(&mut self, line: &Line) {
        self.append(line);
    }

    fn append(&mut self, line: &impl serde::Serialize) {
        // An earlier line under this lock may have ended the recording.
        if !self.shared.on.load(Relaxed) {
            return;
        }
        let before = self.tape.waiting.len();
        if let Err(error) = serde_json::to_writer(&mut self.tape.waiting, line) {
            self.tape.waiting.truncate(before);
            return self.shared.stop(&error.to_string());
        }
        self.tape.waiting.push(b'\n');
        let length = (self.tape.waiting.len() - before) as u64;
        if self.tape.written + length > self.shared.max_bytes {
            self.tape.waiting.truncate(before);
            return self.shared.stop(&format!("it has {} bytes, as many as it may have", self.tape.written));
        }
        self.tape.written += length;
        self.shared.lines.inc();
        self.shared.bytes.inc_by(length);
        if self.tape.waiting.len() > MAX_WAITING_BYTES {
            self.shared.stop("the disk does not keep up");
        } else if self.tape.waiting.len() > WAKE_BYTES {
            self.shared.wake.notify_one();
        }
    }

    /// Returns the number of the next request.
    pub fn request(&mut self) -> u64 {
        self.tape.requests += 1;
        self.tape.requests - 1
    }

    /// Records that a configuration takes effect, and returns its number.
    pub fn live(&mut self, settings: Value) -> u32 {
        self.tape.lives += 1;
        let live = self.tape.lives;
        self.write(&Line::Live { live, settings });
        live
    }
}

/// The recording of one pool, or of none when nothing is recorded.
#[derive(Clone, Debug, Default)]
pub struct PoolTape(Option<(Arc<Recorder>, u32)>);

impl PoolTape {
    /// Records the creation of a pool.
    #[must_use]
    pub fn begin(recorder: Option<&Arc<Recorder>>, name: &Arc<str>, cache: &CacheConfig) -> Self {
        let begun = recorder.and_then(|recorder| {
            let mut turn = recorder.turn()?;
            let pool = turn.tape.pools;
            turn.tape.pools += 1;
            turn.write(&Line::Pool { pool, name: name.clone(), cache: cache.clone() });
            Some((recorder.clone(), pool))
        });
        Self(begun)
    }

    /// The recording of KV events that change the pool's prefix cache with this number.
    #[must_use]
    pub fn of_kv_events(&self, cache: u32) -> KvTape {
        KvTape { tape: self.clone(), cache }
    }

    /// Runs `change` under the lock, and records the events that it reports.
    pub fn change<T>(&self, change: impl FnOnce(&mut dyn FnMut(PoolChange<'_>)) -> T) -> T {
        let Some((pool, mut turn)) = self.turn() else { return change(&mut |_| {}) };
        change(&mut |change| turn.write(&change.line(pool)))
    }

    /// The pool's number and the lock of the recording; `None` if nothing is recorded.
    fn turn(&self) -> Option<(u32, Turn<'_>)> {
        let (recorder, pool) = self.0.as_ref()?;
        Some((*pool, recorder.turn()?))
    }
}

/// The recording of what KV events change in one prefix cache of a pool, or of nothing.
#[derive(Clone, Debug, Default)]
pub struct KvTape {
    tape: PoolTape,
    cache: u32,
}

impl KvTape {
    /// Runs `change` under the lock, and records what `line` makes of its result. Without a recording, `line` is not
    /// called.
    pub fn change<T>(&self, change: impl FnOnce() -> T, line: impl FnOnce(&T) -> Option<KvChange>) -> T {
        let turn = self.tape.turn();
        let result = change();
        if let Some((pool, mut turn)) = turn
            && let Some(change) = line(&result)
        {
            turn.write(&Line::Kv { pool, number: self.cache, change });
        }
        result
    }
}

/// A change of a pool.
#[derive(Debug)]
pub enum PoolChange<'a> {
    /// The prefix cache was replaced by an empty one with this number.
    Cache(&'a CacheConfig, u32),
    /// The pool's writer applied this event.
    Event(&'a PoolEvent),
    /// The pool's writer published its state.
    Publish,
}

impl PoolChange<'_> {
    fn line(self, pool: u32) -> Line {
        match self {
            PoolChange::Cache(cache, number) => Line::Cache { pool, cache: cache.clone(), number },
            PoolChange::Publish => Line::Publish { pool },
            PoolChange::Event(event) => match event {
                PoolEvent::Endpoints { source, endpoints } => Line::Endpoints {
                    pool,
                    source: *source,
                    endpoints: endpoints.iter().map(|e| (**e).clone()).collect(),
                },
                PoolEvent::SourceGone { source } => Line::Gone { pool, source: *source },
                PoolEvent::Scraped { id, metrics } => Line::Page { pool, id: *id, metrics: metrics.clone() },
                PoolEvent::Restarted { id } => Line::Restart { pool, id: *id },
                PoolEvent::CacheCleared { id } => Line::Cleared { pool, id: *id },
                PoolEvent::Expect { sources } => Line::Expect { pool, sources: sources.clone() },
            },
        }
    }
}

#[cfg(test)]
mod tests;
