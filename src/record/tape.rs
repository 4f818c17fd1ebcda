//! The recording of a running picker: one order of everything that changes what decisions see.
//!
//! Whoever changes something takes a [`Turn`] before it and drops it after it, and writes a line in between; so the file has the lines in
//! the order in which the changes were made, whatever threads made them. Lines go to memory; a thread of its own takes them to the file,
//! so that a slow disk never holds up a request. What goes wrong (the file is full, the disk is, or it is too slow) ends the recording
//! with one line of the log and the gauge `attache_recording`, never the serving.

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
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Duration;

/// 1 GiB: some hundred thousand requests of a few thousand tokens, and no disk that is full by surprise.
pub const DEFAULT_MAX_BYTES: u64 = 1 << 30;
/// Lines reach the file within 200 ms: as much is lost when the process is killed.
const FLUSH_INTERVAL: Duration = Duration::from_millis(200);
/// The writing thread is woken for this much, so that memory stays small while much is told.
const WAKE_BYTES: usize = 256 << 10;
/// A disk that is 64 MiB behind does not keep up.
const MAX_WAITING_BYTES: usize = 64 << 20;

/// Where to record to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordSettings {
    /// The file; one that is there is replaced.
    pub path: PathBuf,
    /// The recording ends before it gets longer than this.
    pub max_bytes: u64,
}

/// A recording.
#[derive(Debug)]
pub struct Recorder {
    shared: Arc<Shared>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Shared {
    tape: Mutex<Tape>,
    wake: Condvar,
    /// There is something to record to.
    on: AtomicBool,
    path: PathBuf,
    max_bytes: u64,
    lines: Counter,
    bytes: Counter,
    recording: Gauge,
}

/// What has an order.
#[derive(Debug, Default)]
struct Tape {
    /// Lines that are not in the file yet.
    waiting: Vec<u8>,
    written: u64,
    requests: u64,
    pools: u32,
    lives: u32,
    closing: bool,
}

/// The right to change something that decisions see, and to say so.
#[derive(Debug)]
pub struct Turn<'a> {
    tape: MutexGuard<'a, Tape>,
    shared: &'a Shared,
}

impl Recorder {
    /// Begins a recording of a picker with this seed and these settings.
    ///
    /// # Errors
    /// When the file can't be made.
    pub fn start(settings: RecordSettings, seed: u64, config: Value) -> std::io::Result<Arc<Self>> {
        let named = |e: std::io::Error| {
            std::io::Error::new(e.kind(), format!("can't record to `{}`: {e}", settings.path.display()))
        };
        let file = File::create(&settings.path).map_err(named)?;
        let shared = Arc::new(Shared {
            tape: Mutex::default(),
            wake: Condvar::new(),
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

    /// Shows what the recording does.
    pub fn register(&self, registry: &mut Registry) {
        let Shared { lines, bytes, recording, .. } = &*self.shared;
        registry.register("recorded_lines", "Lines written to the recording", lines.clone());
        registry.register("recorded_bytes", "Bytes written to the recording", bytes.clone());
        registry.register("recording", "1 while a recording is made, 0 when it has ended", recording.clone());
    }

    /// A turn; `None` when the recording has ended.
    #[must_use]
    pub fn turn(&self) -> Option<Turn<'_>> {
        let shared = &*self.shared;
        if !shared.on.load(Relaxed) {
            return None;
        }
        let tape = shared.tape.lock();
        // It may have ended while we waited.
        (shared.on.load(Relaxed) && !tape.closing).then_some(Turn { tape, shared })
    }

    /// Ends the recording because of something that it can't hold.
    pub fn stop(&self, why: &str) {
        if let Some(turn) = self.turn() {
            turn.shared.stop(why);
        }
    }

    /// Ends the recording; all of it is in the file then.
    pub fn finish(&self) {
        self.shared.tape.lock().closing = true;
        self.shared.wake.notify_one();
        if let Some(writer) = self.writer.lock().take() {
            // A writer that panicked has lost what it had; there is nothing to be done about it.
            let _ = writer.join();
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.finish();
    }
}

impl Shared {
    fn stop(&self, why: &str) {
        if self.on.swap(false, Relaxed) {
            self.recording.set(0);
            tracing::error!(path = %self.path.display(), why, "recording stopped; requests are still served");
        }
    }

    /// Takes lines to the file until the recording is closed.
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
    /// Says what is changed in this turn.
    pub fn write(&mut self, line: &Line) {
        self.append(line);
    }

    fn append(&mut self, line: &impl serde::Serialize) {
        // An earlier line of this turn may have been the last one.
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

    /// The number of the next request.
    pub fn request(&mut self) -> u64 {
        self.tape.requests += 1;
        self.tape.requests - 1
    }

    /// A configuration comes into force; its number.
    pub fn live(&mut self, settings: Value) -> u32 {
        self.tape.lives += 1;
        let live = self.tape.lives;
        self.write(&Line::Live { live, settings });
        live
    }
}

/// The recording of one pool; of none when nothing is recorded.
#[derive(Clone, Debug, Default)]
pub struct PoolTape(Option<(Arc<Recorder>, u32)>);

impl PoolTape {
    /// A pool begins.
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

    /// Does `change` with what it tells of itself written down, in a turn of its own.
    pub fn change<T>(&self, change: impl FnOnce(&mut dyn FnMut(Told<'_>)) -> T) -> T {
        let Some((pool, mut turn)) = self.0.as_ref().and_then(|(recorder, pool)| Some((*pool, recorder.turn()?)))
        else {
            return change(&mut |_| {});
        };
        change(&mut |told| turn.write(&told.line(pool)))
    }
}

/// What changes about a pool.
#[derive(Debug)]
pub enum Told<'a> {
    /// What is known of its caches begins anew.
    Cache(&'a CacheConfig),
    /// The writer takes this in.
    Event(&'a PoolEvent),
    /// What the writer has taken in is shown.
    Publish,
}

impl Told<'_> {
    fn line(self, pool: u32) -> Line {
        match self {
            Told::Cache(cache) => Line::Cache { pool, cache: cache.clone() },
            Told::Publish => Line::Publish { pool },
            Told::Event(event) => match event {
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
