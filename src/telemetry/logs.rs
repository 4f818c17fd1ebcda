//! Logs on standard error: JSON, one object a line, or text for people. The filter can be changed at run time.
//!
//! Used by `app` (once, at start) and `admin` (`PUT /log-level`). Imports nothing of the crate.

use attache_types::clock::Clock;
use attache_types::log_filter;
use attache_types::throttle::Throttle;
use parking_lot::Mutex;
use std::backtrace::BacktraceStatus;
use std::collections::HashMap;
use std::sync::Arc;
use tracing::Subscriber;
use tracing_subscriber::filter::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::reload;
use tracing_subscriber::{Layer, Registry};

/// Default levels of verbose libraries, unless the filter names them. The last three log at every retry; their
/// callers log the failure instead.
const QUIET: &[&str] = &[
    "h2=warn",
    "hyper=warn",
    "hyper_util=warn",
    "rustls=warn",
    "tower=warn",
    "reqwest=warn",
    "kube_client=off",
    "opentelemetry=off",
    "async_nats=off",
];

/// Why a log filter is invalid.
#[derive(Debug, thiserror::Error)]
#[error("`{filter}` is not a log filter: {why}; as in `info` or `attache=debug,info`")]
pub struct FilterError {
    filter: String,
    why: String,
}

/// Why logging could not start.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// The log filter is invalid.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// Another subscriber was installed before.
    #[error("logging has been started twice")]
    Twice,
}

/// Changes the log filter at run time. Cheap to clone.
#[derive(Clone)]
pub struct LogHandle(Arc<dyn Fn(Option<EnvFilter>) -> Result<String, String> + Send + Sync>);

impl std::fmt::Debug for LogHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("LogHandle").field(&self.current()).finish()
    }
}

impl LogHandle {
    /// Uses `filter` from now on. Returns the filter in effect.
    ///
    /// # Errors
    /// If it is invalid; the old one stays.
    pub fn set(&self, filter: &str) -> Result<String, FilterError> {
        let parsed = parse(filter)?;
        (self.0)(Some(parsed)).map_err(|why| FilterError { filter: filter.to_owned(), why })
    }

    /// The log filter in effect.
    #[must_use]
    pub fn current(&self) -> String {
        (self.0)(None).unwrap_or_default()
    }
}

/// Starts logging for the whole process; `colour` applies to text.
///
/// # Errors
/// If the filter is invalid or logging was started before.
pub fn init(filter: &str, json: bool, colour: bool) -> Result<LogHandle, LogError> {
    let (subscriber, handle) = subscriber(filter, json, colour, std::io::stderr)?;
    tracing::subscriber::set_global_default(subscriber).map_err(|_| LogError::Twice)?;
    Ok(handle)
}

/// Starts logging to the log of another process, whose lines have a time and a level already.
///
/// # Errors
/// If the filter is invalid or logging was started before.
pub fn init_in<W>(filter: &str, writer: W) -> Result<LogHandle, LogError>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let (filter, handle) = reloadable(filter)?;
    let layer = tracing_subscriber::fmt::layer().with_writer(writer).log_internal_errors(false);
    let layer = layer.without_time().with_level(false).with_ansi(false);
    let subscriber = Registry::default().with(filter).with(layer);
    tracing::subscriber::set_global_default(subscriber).map_err(|_| LogError::Twice)?;
    Ok(handle)
}

/// Logs panics as events, each place once a minute at most. The default of the standard library writes lines that are
/// no JSON. A panic that ends a request is caught, and `attache_panics_total` counts it.
pub fn log_panics() {
    let (clock, places) = (Clock::start(), Mutex::<HashMap<String, Throttle>>::default());
    std::panic::set_hook(Box::new(move |panic| {
        let location = panic.location().map(ToString::to_string).unwrap_or_default();
        let admitted = places.lock().entry(location.clone()).or_default().admit(clock.now());
        let Some(skipped) = admitted else { return };
        let payload = panic.payload();
        let text = payload.downcast_ref::<&str>().copied();
        let error = text.or_else(|| payload.downcast_ref().map(String::as_str)).unwrap_or("no message");
        let captured = std::backtrace::Backtrace::capture();
        let backtrace = (captured.status() == BacktraceStatus::Captured).then(|| captured.to_string());
        tracing::error!(location, error, backtrace, skipped, "panicked");
    }));
}

/// A filter that can be changed, and its handle.
fn reloadable(filter: &str) -> Result<(reload::Layer<EnvFilter, Registry>, LogHandle), FilterError> {
    let (filter, reload) = reload::Layer::new(parse(filter)?);
    let handle = LogHandle(Arc::new(move |new| {
        if let Some(new) = new {
            reload.reload(new).map_err(|e| e.to_string())?;
        }
        reload.with_current(ToString::to_string).map_err(|e| e.to_string())
    }));
    Ok((filter, handle))
}

/// A subscriber that writes to `writer`, and the handle of its filter.
fn subscriber<W>(
    filter: &str,
    json: bool,
    colour: bool,
    writer: W,
) -> Result<(impl Subscriber + Send + Sync, LogHandle), FilterError>
where
    W: for<'w> MakeWriter<'w> + Send + Sync + 'static,
{
    let (filter, handle) = reloadable(filter)?;
    // Without a reader of standard error, a report of the failed write would fail as well, by a panic.
    let layer = tracing_subscriber::fmt::layer().with_writer(writer).log_internal_errors(false);
    let layer: Box<dyn Layer<_> + Send + Sync> = if json {
        layer.json().flatten_event(true).with_current_span(false).with_span_list(false).boxed()
    } else {
        layer.with_ansi(colour).boxed()
    };
    Ok((Registry::default().with(filter).with(layer), handle))
}

/// A handle whose filter has no output, for tests of code that changes the filter.
///
/// # Panics
/// If `filter` is invalid.
#[cfg(any(test, feature = "testing"))]
#[expect(clippy::expect_used, reason = "a test that can't go on fails")]
pub fn detached(filter: &str) -> LogHandle {
    let (subscriber, handle) = subscriber(filter, false, false, std::io::sink).expect("a filter");
    // The handle refers to the filter by a weak reference, so the subscriber must stay alive.
    std::mem::forget(subscriber);
    handle
}

fn parse(filter: &str) -> Result<EnvFilter, FilterError> {
    let refuse = |why: String| FilterError { filter: filter.chars().take(200).collect(), why };
    // An empty filter would suppress everything, errors included.
    if filter.trim().is_empty() {
        return Err(refuse("it is empty".into()));
    }
    log_filter::check(filter).map_err(refuse)?;
    // The user's directives come last: the last directive for a target wins.
    let with_quiet = QUIET.iter().copied().chain([filter]).collect::<Vec<_>>().join(",");
    EnvFilter::builder().parse(with_quiet).map_err(|e| refuse(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[derive(Clone, Default)]
    struct CapturedLogs(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for CapturedLogs {
        fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(buf);
            Ok(buf.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    impl CapturedLogs {
        fn take(&self) -> String {
            String::from_utf8(std::mem::take(&mut *self.0.lock().unwrap())).unwrap()
        }
    }

    #[test]
    fn json_lines_carry_fields_at_the_top_and_the_filter_can_change() {
        let sink = CapturedLogs::default();
        let writer = sink.clone();
        let (subscriber, handle) = subscriber("info", true, false, move || writer.clone()).unwrap();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(grpc = "127.0.0.1:9002", "listening");
            tracing::debug!("not yet");
            let line = sink.take();
            let json: serde_json::Value = serde_json::from_str(line.trim()).unwrap();
            assert_eq!((json["message"].as_str(), json["level"].as_str()), (Some("listening"), Some("INFO")));
            assert_eq!(json["grpc"].as_str(), Some("127.0.0.1:9002"));

            assert!(handle.set("debug").unwrap().contains("debug"));
            tracing::debug!("now");
            assert!(sink.take().contains("now"));
            tracing::info!(target: "h2::codec", "chatter");
            assert_eq!(sink.take(), "");
            handle.set("h2=info").unwrap();
            tracing::info!(target: "h2::codec", "asked for");
            assert!(sink.take().contains("asked for"));
        });
    }

    #[test]
    fn a_wrong_filter_is_refused_and_the_old_one_stays() {
        let (_subscriber, handle) = subscriber("attache=warn", false, false, std::io::sink).unwrap();
        for bad in ["", "attache=loud", "=,=", "[[[", "verbos"] {
            assert!(handle.set(bad).is_err(), "{bad}");
        }
        assert!(handle.current().contains("attache=warn"), "{}", handle.current());
    }
}
