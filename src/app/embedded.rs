//! The picker as a part of another process, which has the requests, the signals and the end: Envoy.
//!
//! It has the pools, feeds, queues and reloads of `attache run`, on threads of its own, and neither signals nor the
//! ports of ext-proc and health. The admin port is optional.

use super::instruments::{Instruments, PREFIX};
use super::pages::PageParts;
use super::{App, Assembled, Reload, assemble, ports, reach, report_end};
use anyhow::Context;
use attache_admin::MetricsPage;
use attache_config::Settings;
use attache_ext_proc::Processor;
use attache_feeds::found::PoolReader;
use attache_record::{DEFAULT_MAX_BYTES, RecordSettings};
use attache_serving::connections::Connections;
use attache_serving::health::Readiness;
use attache_telemetry::logs::LogHandle;
use attache_types::clock::Clock;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

/// 1 s between attempts to open the admin port. During Envoy's hot restart, the old process has it for some seconds.
const BIND_AGAIN: Duration = Duration::from_secs(1);

/// A picker that can decide.
#[derive(Clone, Debug)]
pub struct Embedded {
    /// Decides.
    pub processor: Arc<Processor>,
    /// Clock of its times.
    pub clock: Clock,
    /// Whether its pools are known.
    pub readiness: Readiness,
    /// Runtime with its timers and background work.
    pub runtime: Handle,
    metrics: Arc<MetricsPage>,
}

impl Embedded {
    /// All metrics, in Prometheus's text format 0.0.4; `None` if one can't be encoded.
    #[must_use]
    pub fn metrics(&self) -> Option<String> {
        self.metrics.plain(|| self.clock.now())
    }

    /// Writes the rest of the recording, if there is one. Nothing that comes later is in it.
    pub fn end_recording(&self) {
        if let Some(recorder) = &self.processor.picker.recorder {
            recorder.finish();
        }
    }
}

/// What the host gives to the picker.
pub struct Host {
    /// Runs first on each thread of the runtime, for example to block signals. Further threads inherit what it sets.
    pub on_thread_start: fn(),
    /// The admin port to open.
    pub admin: Option<SocketAddr>,
    /// The file to record to, as by `--record`.
    pub record: Option<PathBuf>,
    /// Cancelled when the picker must end.
    pub stop: CancellationToken,
    /// Dropped when the picker has ended.
    pub ended: Sender<()>,
}

/// Starts a picker on a thread of its own, and calls `loaded` there once its pools exist. An error ends the thread,
/// and is logged.
///
/// # Errors
/// If the thread can't be created.
pub fn start(
    settings: Settings,
    reload: Option<Reload>,
    read_pool: PoolReader,
    logs: LogHandle,
    host: Host,
    loaded: impl FnOnce(Embedded) + Send + 'static,
) -> std::io::Result<()> {
    // reqwest uses the process-wide provider; a second call finds it installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let run = move || {
        // Dropped at the end of this thread, after `serve` has dropped its own.
        let _ended = host.ended.clone();
        (host.on_thread_start)();
        let started = Builder::new_current_thread().enable_all().on_thread_start(host.on_thread_start).build();
        let served = started.map_err(anyhow::Error::from).and_then(|runtime| {
            let result = runtime.block_on(serve(settings, reload, read_pool, logs, host, loaded));
            runtime.shutdown_background();
            result
        });
        if let Err(error) = served {
            tracing::error!(error = format!("{error:#}"), "start failed; requests are passed on without a decision");
        }
    };
    std::thread::Builder::new().name("attache".to_owned()).spawn(run)?;
    Ok(())
}

async fn serve(
    file: Settings,
    reload: Option<Reload>,
    read_pool: PoolReader,
    logs: LogHandle,
    host: Host,
    loaded: impl FnOnce(Embedded),
) -> anyhow::Result<()> {
    let (stop, readiness) = (host.stop, Readiness::default());
    let record = host.record.map(|path| RecordSettings { path, max_bytes: DEFAULT_MAX_BYTES });
    let assembled = assemble(file, read_pool, record, &readiness, &stop).await?;
    let Assembled { mut app, guard, leader, leading, instruments, traces, .. } = assembled;
    let Instruments { registry: mut root, refusals, listeners, .. } = instruments;
    let registry = root.sub_registry_with_prefix(PREFIX);
    registry.register_collector(Box::new(app.process_collector(&traces)));
    app.sync.iter().for_each(|sync| registry.register_collector(Box::new(sync.collector(app.clock))));
    app.show();
    tokio::spawn(reach::watch(app.views.clone(), app.clock));
    let metrics = match host.admin {
        Some(address) => {
            let rendering = ports::pages_thread(stop.clone())?;
            let pages = PageParts { rendering, registry: root, guard, refusals, logs }.assemble(&app);
            let metrics = pages.metrics.clone();
            tokio::spawn(serve_admin(address, listeners.admin, pages, stop.clone()));
            metrics
        }
        None => Arc::new(MetricsPage::new(root)),
    };
    loaded(Embedded {
        processor: app.processor.clone(),
        clock: app.clock,
        readiness: readiness.clone(),
        runtime: Handle::current(),
        metrics,
    });
    tokio::select! {
        () = stop.cancelled() => {}
        () = app.follow(reload) => {}
    }
    end(&app, leading, leader).await;
    traces.shutdown().await;
    Ok(())
}

/// Ends what other processes know of.
async fn end(app: &App, leading: CancellationToken, leader: Option<tokio::task::JoinHandle<()>>) {
    app.readiness.set_draining();
    leading.cancel();
    if let Some(leader) = leader {
        // The task releases its lease, so that the next leader need not wait for its expiry.
        let _ = leader.await;
    }
    report_end(&app.telemetry.metrics);
    if let Some(redis) = &app.redis {
        redis.part().await;
    }
}

/// Opens the admin port, in further attempts if another process has it, and serves the admin pages until `stop`.
async fn serve_admin(
    address: SocketAddr,
    connections: Arc<Connections>,
    pages: attache_admin::AdminState,
    stop: CancellationToken,
) {
    let mut failed = false;
    let listener = loop {
        match TcpListener::bind(address).await.with_context(|| format!("can't listen on {address}")) {
            Ok(listener) => break listener,
            Err(error) if !failed => {
                failed = true;
                tracing::error!(error = format!("{error:#}"), "admin port not open; trying again every second");
            }
            Err(_) => {}
        }
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(BIND_AGAIN) => {}
        }
    };
    if let Ok(metrics) = listener.local_addr() {
        tracing::info!(%metrics, version = env!("CARGO_PKG_VERSION"), "listening");
    }
    attache_admin::serve(listener, connections, pages, stop.cancelled_owned()).await;
}
