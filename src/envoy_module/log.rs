//! Attaché's log as part of Envoy's, by its logger `dynamic_modules`.

use std::io;
use std::sync::OnceLock;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

/// Writes one line of Envoy's log.
pub type WriteLine = fn(Level, &str);

/// Creates a writer for each event.
#[derive(Clone, Copy, Debug)]
pub struct EnvoyLog(pub WriteLine);

/// One event.
#[derive(Debug)]
pub struct EventWriter(Level, WriteLine);

impl<'a> MakeWriter<'a> for EnvoyLog {
    type Writer = EventWriter;

    fn make_writer(&'a self) -> EventWriter {
        EventWriter(Level::INFO, self.0)
    }

    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> EventWriter {
        EventWriter(*meta.level(), self.0)
    }
}

impl io::Write for EventWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // One event is one call.
        (self.1)(self.0, String::from_utf8_lossy(bytes).trim_end());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Starts logging to Envoy's log, and logs panics there. The first filter counts: all pickers share one log.
pub fn start(filter: &str, write: WriteLine) -> Option<attache_telemetry::logs::LogHandle> {
    static HANDLE: OnceLock<Option<attache_telemetry::logs::LogHandle>> = OnceLock::new();
    let start = || {
        let handle = attache_telemetry::logs::init_in(filter, EnvoyLog(write)).ok()?;
        attache_telemetry::logs::log_panics();
        Some(handle)
    };
    HANDLE.get_or_init(start).clone()
}
