//! The composition of the process: builds a running picker from settings. The only module that depends on every part.

mod certificates;
pub mod feeds;
mod found;
mod kubernetes;
mod presence;
pub mod prompts;
mod queues;
mod quotas;
mod redis;
mod routing;

use crate::admin::guard::Guard;
use crate::admin::{self, AdminState, Refusals};
use crate::clock::{Clock, Timestamp};
use crate::config::Settings;
use crate::config::settings::{PoolSettings, ServerSettings, TelemetrySettings};
use crate::connections::{Listeners, descriptor_limit};
use crate::discovery::watch::{self, FileWatch};
use crate::error::{Reason, RequestError};
use crate::ext_proc::service::Service;
use crate::ext_proc::{Processor, warmer};
use crate::health::{self, Health, Latch, Readiness};
use crate::picker::event::Outcome;
use crate::picker::explain::{self, ExplainQuery};
use crate::picker::{ActiveConfig, Picker, PoolRuntime};
use crate::pool::writer::SourceId;
use crate::pool::{PoolEvent, PoolWriter, SnapshotStore};
use crate::prompt::memo::{DEFAULT_MEMO_BYTES, SegmentCache};
use crate::record::{RecordSettings, Recorder};
use crate::rng;
use crate::server::Shards;
use crate::shutdown::{self, DrainTimes, Phase, Shutdown};
use crate::telemetry::Telemetry;
use crate::telemetry::decisions::Decisions;
use crate::telemetry::listeners::ListenerCollector;
use crate::telemetry::logs::LogHandle;
use crate::telemetry::metrics::Metrics;
#[cfg(feature = "otlp")]
use crate::telemetry::otlp::Otlp;
use crate::telemetry::pools::{PoolCollector, PoolView, PoolViews};
use crate::telemetry::pressure::PressureCollector;
use crate::telemetry::process::ProcessCollector;
use crate::telemetry::queues::QueuedBytesCollector;
use crate::telemetry::trace::Tracing;
use anyhow::Context;
use arc_swap::ArcSwap;
use certificates::Certificates;
use feeds::{Feeds, Leased};
use found::FoundPools;
pub use found::PoolReader;
#[cfg(feature = "otlp")]
use opentelemetry::trace::TracerProvider;
use prometheus_client::registry::Registry;
use redis::Redis;
use routing::Prepared;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

/// Source of settings, which are read again when they change.
pub struct Reload {
    /// Path of the file to watch; `None` if there is none.
    pub path: PathBuf,
    /// Reads and checks the settings.
    pub load: LoadSettings,
}

/// Reads and checks settings; `None` if they are invalid, which has been logged.
pub type LoadSettings = Box<dyn Fn() -> Option<Settings> + Send>;

/// Runs the picker until shutdown, and records it if `record` is set. `read_pool` reads the own configurations of
/// pools. Logging must be initialised; `logs` changes its level.
///
/// # Errors
/// If a port can't be bound, a certificate can't be read, a thread can't be created, or the settings can't be recorded.
pub fn run(
    settings: Settings,
    reload: Option<Reload>,
    read_pool: PoolReader,
    record: Option<RecordSettings>,
    logs: LogHandle,
) -> anyhow::Result<()> {
    // reqwest uses the process-wide provider; a second call, in tests, finds it installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    // Feeds and admin share one thread, apart from those that serve requests.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let result = runtime.block_on(serve(settings, reload, read_pool, record, logs));
    runtime.shutdown_background();
    result
}

/// The state that a reload changes.
struct App {
    /// Settings as they were read.
    file: Settings,
    /// Settings in effect, with the pools that were found in the cluster.
    settings: Settings,
    found: FoundPools,
    /// Holds readiness back until the first pools from the cluster are served.
    searching: Option<Latch>,
    processor: Arc<Processor>,
    telemetry: Arc<Telemetry>,
    feeds: Feeds,
    certificates: Option<Certificates>,
    views: Arc<PoolViews>,
    readiness: Readiness,
    dump: Arc<ArcSwap<Settings>>,
    segments: Arc<SegmentCache>,
    redis: Option<Redis>,
    clock: Clock,
    /// Subject of the lease, if leader election is enabled.
    leased: Option<Leased>,
}

async fn serve(
    file: Settings,
    reload: Option<Reload>,
    read_pool: PoolReader,
    record: Option<RecordSettings>,
    logs: LogHandle,
) -> anyhow::Result<()> {
    let clock = Clock::start();
    let server = file.server.clone();
    let seed = server.seed.unwrap_or_else(rng::system_seed);
    let stop = CancellationToken::new();
    let readiness = Readiness::default();
    let listening = readiness.latch("listeners open");

    let mut registry = Registry::with_prefix("attache");
    let metrics = Metrics::register(&mut registry);
    let refusals = Refusals::register(&mut registry);
    let listeners = Listeners::of(descriptor_limit());
    registry.register_collector(Box::new(ListenerCollector(listeners.clone())));
    metrics.by_name.bound(&file.telemetry.labels);
    metrics.pressure.bound(&file.telemetry.labels.models);
    registry.register_collector(Box::new(PressureCollector { pressure: metrics.pressure.clone(), clock }));
    let views = Arc::new(PoolViews::new(clock));
    registry.register_collector(Box::new(PoolCollector(views.clone())));
    let recorder = recorder(record, &file, seed, &mut registry)?;
    let mut feeds = Feeds::new(clock, seed, recorder.clone(), listeners.kv_events.clone(), stop.child_token());
    let mut found = FoundPools::new(read_pool, stop.child_token());
    registry.register_collector(Box::new(QueuedBytesCollector(found.queued())));
    feeds.hold(&readiness);
    found.follow(&file.templates, &mut feeds).await?;
    let searching = (!file.templates.is_empty()).then(|| readiness.latch("InferencePools searched for"));
    let (settings, expansion) = found.expand(&file);
    found.take_up(expansion);
    feeds.apply(&settings, &readiness).await?;
    let guard = if server.metrics_auth { Some(feeds.guard().await?) } else { None };
    let leading = stop.child_token();
    let (leader, leased) = (feeds.lead(&file, &readiness, leading.clone()), feeds::leased(&file));
    let traces = Traces::start(&settings.telemetry)?;
    let segments = Arc::new(SegmentCache::new(DEFAULT_MEMO_BYTES, seed));
    let decisions = Arc::new(Decisions::new(settings.telemetry.decisions_kept));
    let telemetry = Arc::new(Telemetry { metrics, decisions });
    let prepared = Prepared::of(&settings, None, None, &telemetry.metrics)?;
    let (config, redis) = routing::config(&settings, prepared, &feeds, &segments, &telemetry, clock, None)?;
    let picker = Picker::new(config, telemetry.clone(), seed).recorded(recorder.clone());
    picker.policies.configure(settings.model_policies.clone());
    let processor = Arc::new(Processor::new(picker, &telemetry, traces.tracing(clock)));

    let shutdown = Shutdown::start(
        shutdown::signals()?,
        DrainTimes { min_delay: server.drain_min_delay, deadline: server.drain_deadline },
    );
    let ports = Ports::open(&server).await?;
    let certificates = Certificates::load(&server, clock, &stop)?;
    registry.register_collector(Box::new(ProcessCollector {
        buffered: processor.picker.buffered.clone(),
        segments: segments.clone(),
        tls: certificates.as_ref().map(Certificates::stats),
        #[cfg(feature = "otlp")]
        otlp: traces.otlp.as_ref().map(|o| o.stats().clone()),
    }));

    let health = Health::new().await;
    let drain = CancellationToken::new();
    let service = Service::new(processor.clone(), clock);
    let on_grpc_port = server.health_checking.then(|| health.clone());
    let handshaker = certificates.as_ref().map(Certificates::handshaker);
    let shards = Arc::new(Shards::start(server.workers, &service, handshaker, on_grpc_port.as_ref(), &drain)?);
    ports.tell(&server, seed, handshaker.is_some())?;
    let on_health_port = listeners.health.clone();
    tokio::spawn(health::serve(
        ports.health,
        on_health_port,
        health,
        readiness.clone(),
        stop.clone().cancelled_owned(),
    ));
    let mut app = App {
        dump: Arc::new(ArcSwap::from_pointee(settings.clone())),
        file,
        settings,
        found,
        searching,
        processor: processor.clone(),
        telemetry,
        feeds,
        certificates,
        views: views.clone(),
        readiness: readiness.clone(),
        segments,
        redis,
        clock,
        leased: leased.filter(|_| leader.is_some()),
    };
    app.show();
    let state = pages(registry, &app, guard, refusals, logs, clock);
    tokio::spawn(admin::serve(ports.admin, listeners.admin.clone(), state, stop.clone().cancelled_owned()));
    let accepting = CancellationToken::new();
    let (accepting_shards, until) = (shards.clone(), accepting.clone());
    tokio::spawn(async move { accepting_shards.accept(ports.grpc, listeners.ext_proc, until).await });
    listening.release();

    tokio::select! {
        () = shutdown.reached(Phase::Lame) => {}
        () = app.follow(reload) => {}
    }
    readiness.set_draining();
    leading.cancel();
    shutdown.reached(Phase::Draining).await;
    accepting.cancel();
    drain.cancel();
    tokio::select! {
        () = shards.drained() => {}
        () = shutdown.reached(Phase::Forced) => {}
    }
    if let Some(leader) = leader {
        // The task releases its lease, so that the next leader need not wait for its expiry.
        let _ = leader.await;
    }
    stop.cancel();
    report_end(&processor.metrics);
    if let Some(redis) = &app.redis {
        redis.part().await;
    }
    if let Some(recorder) = recorder {
        recorder.finish();
    }
    traces.shutdown().await;
    Ok(())
}

/// Why decisions by these settings can't be recorded; `None` if they can.
fn unrecordable(settings: &Settings) -> Option<&'static str> {
    let any = |has: fn(&PoolSettings) -> bool| settings.pools.iter().any(has);
    if any(|pool| pool.prefix.kv_events.is_some()) {
        return Some("a pool has `prefixCache.kvEvents`, and recordings hold no KV events");
    }
    if any(PoolSettings::reads_redis) {
        return Some("a strategy has `profilesFromRedis`, and recordings hold nothing from Redis");
    }
    any(|pool| asks_for_split(pool, pool.strategies()))
        .then_some("a pool splits requests (`disaggregation`, `pd`), and recordings hold no prefill requests")
}

/// Whether requests of `strategies` may be split.
fn asks_for_split<'s>(
    pool: &PoolSettings,
    mut strategies: impl Iterator<Item = (&'s str, &'s serde_json::Value)>,
) -> bool {
    pool.disaggregation.as_ref().is_some_and(|d| strategies.any(|(name, _)| d.split.asks(name)))
}

/// Opens the recording, if one is requested.
fn recorder(
    record: Option<RecordSettings>,
    settings: &Settings,
    seed: u64,
    registry: &mut Registry,
) -> anyhow::Result<Option<Arc<Recorder>>> {
    let Some(record) = record else { return Ok(None) };
    if let Some(why) = unrecordable(settings) {
        anyhow::bail!("--record can't be had here: {why}");
    }
    for pool in settings.pools.iter().filter(|pool| asks_for_split(pool, pool.allowed_strategies())) {
        tracing::warn!(
            pool = %pool.name,
            "requests may name the strategy `pd`; what prefill servers do for them is not recorded (`requestStrategy.allow` \
             of the pool says what they may name)"
        );
    }
    let recorder = Recorder::start(record, seed, settings.to_json())?;
    recorder.register(registry);
    Ok(Some(recorder))
}

/// The content of the admin pages.
fn pages(
    registry: Registry,
    app: &App,
    guard: Option<Guard>,
    refusals: Refusals,
    logs: LogHandle,
    clock: Clock,
) -> AdminState {
    let (views, decisions, dump) = (app.views.clone(), app.processor.decisions.clone(), app.dump.clone());
    let (to_explain, to_limit) = (app.processor.clone(), app.processor.clone());
    let policies = app.processor.picker.policies.clone();
    AdminState {
        registry: Arc::new(registry),
        readiness: app.readiness.clone(),
        pools: Arc::new(move || views.load().to_vec()),
        decisions: Arc::new(move || decisions.to_json(clock.now())),
        config: Arc::new(move || dump.load().to_json()),
        explain: Arc::new(move |asked: admin::Asked| {
            let processor = to_explain.clone();
            Box::pin(async move { explain(&processor.picker, &asked, clock.now()).await })
        }),
        max_explained_bytes: Arc::new(move || {
            usize::try_from(to_limit.picker.config().limits.max_body_bytes).unwrap_or(usize::MAX)
        }),
        policies,
        guard,
        hosts: app.settings.server.admin_hosts.clone(),
        refusals,
        logs,
        clock,
    }
}

async fn explain(picker: &Picker, asked: &admin::Asked, now: Timestamp) -> Result<serde_json::Value, RequestError> {
    let query = ExplainQuery {
        pool: asked.pool.as_deref(),
        path: &asked.path,
        content_type: asked.content_type.as_deref(),
        body: &asked.body,
        now,
    };
    let explained = explain::explain(picker, &picker.config(), query, warmer::run).await?;
    serde_json::to_value(explained).map_err(|e| RequestError::new(Reason::Internal, e.to_string()))
}

/// A picker without listeners that knows the endpoints in `settings`, for `attache explain` without a running picker.
///
/// # Errors
/// If a tokenizer's files can't be read.
pub fn offline(settings: &Settings) -> anyhow::Result<Picker> {
    let clock = Clock::start();
    let seed = settings.server.seed.unwrap_or_else(rng::system_seed);
    let segments = Arc::new(SegmentCache::new(DEFAULT_MEMO_BYTES, seed));
    let metrics = Metrics::register(&mut Registry::default());
    let mut pools = Vec::new();
    for p in &settings.pools {
        let source = SourceId(0);
        let mut writer = PoolWriter::new(vec![source]);
        writer.apply(PoolEvent::Endpoints { source, endpoints: p.endpoints.iter().cloned().map(Arc::new).collect() });
        let store = Arc::new(SnapshotStore::default());
        if let Some(snapshot) = writer.snapshot() {
            store.publish(snapshot);
        }
        let cache = Arc::new(feeds::cache(&p.prefix, seed));
        cache.reconcile(&store.load());
        pools.push(Arc::new(PoolRuntime {
            pool: routing::pool(p, routing::scheduler(p, None)?, store, Default::default()),
            observer: Arc::new(metrics.pool(&p.name)),
            prefix: Some(prompts::prefix(p, cache, None, &segments, clock)?),
            queue: None,
        }));
    }
    let config = ActiveConfig::new(pools, settings.limits.clone(), settings.exchange.clone());
    let telemetry = Telemetry { metrics, decisions: Arc::new(Decisions::new(0)) };
    Ok(Picker::new(config, Arc::new(telemetry), seed))
}

/// Starts the trace pipeline, if a collector is configured.
struct Traces {
    #[cfg(feature = "otlp")]
    otlp: Option<Otlp>,
}

#[cfg(feature = "otlp")]
impl Traces {
    fn start(settings: &TelemetrySettings) -> anyhow::Result<Self> {
        let start = |endpoint: &String| Otlp::start(endpoint, settings.trace_ratio, tokio::runtime::Handle::current());
        Ok(Self { otlp: settings.otlp_endpoint.as_ref().map(start).transpose()? })
    }

    fn tracing(&self, clock: Clock) -> Tracing {
        self.otlp.as_ref().map_or_else(Tracing::default, |o| Tracing::new(o.provider().tracer("attache"), clock))
    }

    async fn shutdown(&self) {
        if let Some(otlp) = &self.otlp {
            otlp.shutdown().await;
        }
    }
}

#[cfg(not(feature = "otlp"))]
impl Traces {
    fn start(settings: &TelemetrySettings) -> anyhow::Result<Self> {
        anyhow::ensure!(settings.otlp_endpoint.is_none(), "this build has no OTLP exporter (feature `otlp`)");
        Ok(Self {})
    }

    fn tracing(&self, _: Clock) -> Tracing {
        Tracing::default()
    }

    async fn shutdown(&self) {}
}

fn report_end(metrics: &Metrics) {
    let ended: u64 = Outcome::ALL.iter().map(|o| metrics.outcome_count(*o)).sum();
    let opened = metrics.streams_opened.get();
    tracing::info!(drained = ended, aborted = opened.saturating_sub(ended), "ended");
}

/// The open listeners of the process.
struct Ports {
    grpc: TcpListener,
    health: TcpListener,
    admin: TcpListener,
}

impl Ports {
    async fn open(server: &ServerSettings) -> anyhow::Result<Self> {
        let bind = async |port, flag| {
            let address = SocketAddr::new(server.bind, port);
            TcpListener::bind(address).await.with_context(|| format!("can't listen on {address} ({flag})"))
        };
        Ok(Self {
            grpc: bind(server.grpc_port, "--grpc-port").await?,
            health: bind(server.grpc_health_port, "--grpc-health-port").await?,
            admin: bind(server.metrics_port, "--metrics-port").await?,
        })
    }

    /// Logs the addresses: the system chooses the port for 0.
    fn tell(&self, server: &ServerSettings, seed: u64, tls: bool) -> anyhow::Result<()> {
        tracing::info!(
            grpc = %self.grpc.local_addr()?,
            health = %self.health.local_addr()?,
            metrics = %self.admin.local_addr()?,
            seed,
            workers = server.workers,
            tls,
            version = env!("CARGO_PKG_VERSION"),
            "listening"
        );
        Ok(())
    }
}

impl App {
    /// Reloads whenever the file or the found InferencePools change; never returns.
    async fn follow(&mut self, reload: Option<Reload>) {
        let mut file = reload.map(|reload| (watch::watch([reload.path]), reload.load));
        loop {
            tokio::select! {
                loaded = next_load(file.as_mut()) => match loaded {
                    None => self.processor.metrics.reload(false),
                    Some(settings) => self.reload(settings).await,
                },
                () = self.found.changed() => if self.found.any_known() {
                    self.refresh().await;
                },
            }
        }
    }

    async fn reload(&mut self, file: Settings) {
        let mut needs_restart = self.settings.restart_needed(&file);
        if self.leased.as_ref().is_some_and(|leased| feeds::leased(&file).as_ref() != Some(leased)) {
            needs_restart.push("the pool or selector that the lease is of (`kubernetes`)");
        }
        if !needs_restart.is_empty() {
            tracing::warn!(fields = needs_restart.join(", "), "some changes need a restart to take effect");
        }
        let taken_up = match self.found.follow(&file.templates, &mut self.feeds).await {
            Ok(()) => {
                self.found.until_known().await;
                let readiness = self.readiness.clone();
                self.take_up(&file, &readiness).await
            }
            Err(error) => Err(error),
        };
        self.processor.metrics.reload(taken_up.is_ok());
        match taken_up {
            Ok(()) => {
                self.file = file;
                tracing::info!(pools = self.settings.pools.len(), "configuration reloaded");
            }
            Err(error) => {
                // The API server was found before, if it is needed.
                let _ = self.found.follow(&self.file.templates, &mut self.feeds).await;
                self.found.settle();
                let error = format!("{error:#}");
                tracing::error!(error, "configuration reload failed; keeping the last known good configuration");
            }
        }
    }

    /// Applies the currently found InferencePools. Later ones do not hold back readiness.
    async fn refresh(&mut self) {
        let file = self.file.clone();
        let readiness = if self.searching.is_some() { self.readiness.clone() } else { Readiness::default() };
        match self.take_up(&file, &readiness).await {
            Ok(()) => tracing::info!(pools = self.settings.pools.len(), "InferencePools reloaded"),
            Err(error) => {
                let error = format!("{error:#}");
                tracing::error!(error, "InferencePool reload failed; keeping the last known good pools");
            }
        }
    }

    /// Serves the pools of `file` and the found ones. New pools hold latches of `readiness`.
    async fn take_up(&mut self, file: &Settings, readiness: &Readiness) -> anyhow::Result<()> {
        let (settings, found) = self.found.expand(file);
        let (before, telemetry) = (self.processor.picker.config(), self.telemetry.clone());
        let prepared = Prepared::of(&settings, Some(&before), self.redis.as_ref(), &telemetry.metrics)?;
        let config = match self.feeds.apply(&settings, readiness).await {
            Ok(()) => {
                routing::config(&settings, prepared, &self.feeds, &self.segments, &telemetry, self.clock, Some(&before))
            }
            Err(error) => Err(error),
        };
        if config.is_err() {
            self.end_others(&self.settings.pools.clone());
        }
        let (config, redis) = config?;
        self.redis = redis;
        self.processor.picker.policies.configure(settings.model_policies.clone());
        self.found.take_up(found);
        self.end_others(&settings.pools);
        if let (Some(recorder), Some(why)) = (&self.processor.picker.recorder, unrecordable(&settings)) {
            recorder.stop(why);
        }
        self.processor.picker.reload(config, || settings.to_json());
        // Settings that need a restart keep their values, in the dump too.
        self.settings = Settings {
            server: self.settings.server.reloaded(&settings.server),
            telemetry: self.settings.telemetry.clone(),
            ..settings
        };
        if let Some(certificates) = &self.certificates {
            certificates.follow(&self.settings.server);
        }
        self.dump.store(Arc::new(self.settings.clone()));
        self.show();
        // A reload may have added the first pool, or removed the search.
        if let Some(latch) = self.searching.take_if(|_| self.found.suffice(&self.settings.pools)) {
            latch.release();
        }
        Ok(())
    }

    /// Ends the pools that these settings do not name, and removes their metrics.
    fn end_others(&mut self, settings: &[PoolSettings]) {
        for pool in self.feeds.keep(settings) {
            self.processor.metrics.forget(&pool);
        }
    }

    /// Shows the current pools in metrics and admin pages.
    fn show(&self) {
        let config = self.processor.picker.config();
        let view = |settings: &PoolSettings| {
            let feeds = self.feeds.pool(&settings.name)?;
            Some(PoolView {
                tokenizer: config.pool(&settings.name)?.prefix.as_ref()?.tokenizer.name(),
                name: settings.name.clone(),
                strategy: settings.strategy.clone(),
                stale_after: settings.scrape.stale_after,
                store: feeds.store.clone(),
                health: settings.health.clone(),
                scrape: feeds.scrape_stats.clone(),
                dns: feeds.dns_stats.clone(),
                file: feeds.file_stats.clone(),
                prefix: feeds.prefix(),
                kv_events: feeds.kv_event_stats(),
                kube: feeds.kube_stats(),
                remote: feeds.remote().map(|r| r.stats()),
            })
        };
        self.views.set(self.settings.pools.iter().filter_map(view).collect());
    }
}

/// Waits for the next valid settings from the file; never returns without a file.
async fn next_load(file: Option<&mut (FileWatch, LoadSettings)>) -> Option<Settings> {
    let Some((watch, load)) = file else { return std::future::pending().await };
    watch.changed().await;
    load()
}
