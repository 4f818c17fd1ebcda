//! The pickers of this process: one for each configuration file that Envoy's configuration names.
//!
//! Filters and the bootstrap extension with one file share its picker. It ends with the last of them. An update of a
//! listener creates the new filters before it drops the old ones, so the picker survives it.

use crate::log::{self, WriteLine};
use crate::settings::Outputs;
use attache::app::embedded::{Embedded, Host};
use attache::cli::run;
use attache::cli::source::ReloadSource;
use parking_lot::{Condvar, Mutex};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// The log filter while no configuration was read.
const DEFAULT_LOG_FILTER: &str = "info";

/// 2 s: the longest time that the end of Envoy waits for a picker.
const PARTING: Duration = Duration::from_secs(2);

static OPEN: Mutex<BTreeMap<PathBuf, Weak<Picker>>> = Mutex::new(BTreeMap::new());

/// What the process of Envoy is to pickers.
#[derive(Clone, Copy, Debug)]
pub struct Process {
    /// Whether Envoy only checks its configuration: nothing is started.
    pub validates: bool,
    /// Blocks all signals for the calling thread, because they are Envoy's.
    pub block_signals: fn(),
    /// Writes to Envoy's log.
    pub write_log: WriteLine,
}

/// The picker of one configuration file.
#[derive(Debug, Default)]
pub struct Picker {
    loaded: OnceLock<Embedded>,
    /// The pools are known. It stays true when a reload adds a pool.
    is_ready: AtomicBool,
    /// Guards a change of `is_ready` that a thread waits for.
    readying: Mutex<()>,
    became_ready: Condvar,
    stop: CancellationToken,
    /// Disconnected once the picker has ended; `None` if it was never started.
    ended: Mutex<Option<Receiver<()>>>,
}

impl Picker {
    /// The picker of `file`. The first caller starts it, and opens its outputs.
    ///
    /// # Errors
    /// If the file is no valid configuration, or a thread can't be created.
    pub fn open(file: &Path, outputs: Outputs, process: Process) -> Result<Arc<Self>, String> {
        let mut open = OPEN.lock();
        open.retain(|_, picker| picker.strong_count() > 0);
        if let Some(picker) = open.get(file).and_then(Weak::upgrade) {
            return Ok(picker);
        }
        let source = ReloadSource::of_file_alone(file.to_owned()).inside();
        let reading = source.read();
        let filter = reading.settings.as_ref().map_or(DEFAULT_LOG_FILTER, |settings| &settings.telemetry.log_filter);
        let logs = log::start(filter, process.write_log);
        run::log(&reading.diagnostics, &file.display().to_string());
        let settings = reading.settings.ok_or_else(|| format!("{}: the configuration is invalid", file.display()))?;
        let picker = Arc::new(Self::default());
        if process.validates {
            return Ok(picker);
        }
        let logs = logs.ok_or("the log can't be started")?;
        let Outputs { admin, record } = outputs;
        let (ended, has_ended) = mpsc::channel();
        *picker.ended.lock() = Some(has_ended);
        let host = Host { on_thread_start: process.block_signals, admin, record, stop: picker.stop.clone(), ended };
        let starting = Arc::downgrade(&picker);
        let loaded = move |embedded: Embedded| start_serving(&starting, embedded);
        run::embed(settings, source, logs, host, loaded)
            .map_err(|error| format!("no thread for the picker: {error}"))?;
        open.insert(file.to_owned(), Arc::downgrade(&picker));
        Ok(picker)
    }

    /// What has been loaded; `None` until then.
    #[must_use]
    pub fn loaded(&self) -> Option<&Embedded> {
        self.loaded.get()
    }

    /// What decides; `None` until the pools are known.
    #[must_use]
    pub fn serving(&self) -> Option<&Embedded> {
        self.loaded.get().filter(|_| self.is_ready.load(Ordering::Acquire))
    }

    /// Waits until the picker can decide; false after `patience`.
    #[must_use]
    pub fn wait_until_ready(&self, patience: Duration) -> bool {
        let mut readying = self.readying.lock();
        let is_waiting = |_: &mut ()| !self.is_ready.load(Ordering::Acquire);
        !self.became_ready.wait_while_for(&mut readying, is_waiting, patience).timed_out()
    }

    fn set_ready(&self) {
        let _readying = self.readying.lock();
        self.is_ready.store(true, Ordering::Release);
        self.became_ready.notify_all();
    }
}

/// Its threads end in the background.
impl Drop for Picker {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

/// Keeps what decides, and lets filters use it as soon as the pools are known.
fn start_serving(picker: &Weak<Picker>, embedded: Embedded) {
    let Some(strong) = picker.upgrade() else { return };
    let (readiness, runtime) = (embedded.readiness.clone(), embedded.runtime.clone());
    if strong.loaded.set(embedded).is_err() {
        return;
    }
    let waiting = picker.clone();
    drop(runtime.spawn(async move {
        readiness.ready().await;
        if let Some(picker) = waiting.upgrade() {
            picker.set_ready();
            tracing::info!("ready; requests are decided");
        }
    }));
}

/// Ends all pickers, because Envoy ends. Waits briefly until each has given back what other processes know of: its lease,
/// its requests in Redis, its last traces. Envoy's process ends before the picker's threads.
pub fn end_all() {
    let pickers: Vec<Arc<Picker>> = OPEN.lock().values().filter_map(Weak::upgrade).collect();
    for picker in &pickers {
        picker.stop.cancel();
        picker.loaded.get().iter().for_each(|embedded| embedded.end_recording());
    }
    for ended in pickers.iter().filter_map(|picker| picker.ended.lock().take()) {
        if ended.recv_timeout(PARTING) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("Envoy ends before the picker has given back its lease and its requests in Redis");
        }
    }
}
