//! The composition of the process: builds a running picker from settings. The only module that depends on every part.

mod certificates;
pub mod embedded;
mod instruments;
mod pages;
mod ports;
pub mod prompts;
mod queues;
mod quotas;
mod reach;
mod recording;
mod redis;
mod routing;
mod sync;
mod traces;

use arc_swap::ArcSwap;
use attache_admin::Source;
use attache_admin::guard::Guard;
use attache_admin::pools::{PoolView, PoolViews};
use attache_admin::status::CertificateStatus;
use attache_config::Settings;
use attache_config::pool::PoolStores;
use attache_config::settings::PoolSettings;
use attache_discovery::watch::{self, FileWatch};
use attache_ext_proc::Processor;
use attache_ext_proc::server::Shards;
use attache_ext_proc::service::Service;
use attache_feeds::found::{FoundPools, PoolReader};
use attache_feeds::{Feeds, Leased};
use attache_picker::event::StreamOutcome;
use attache_picker::{ActiveConfig, Picker, PoolRuntime};
use attache_pool::writer::SourceId;
use attache_pool::{PoolEvent, PoolWriter, SnapshotStore};
use attache_prompt::memo::{DEFAULT_MEMO_BYTES, SegmentCache};
use attache_record::{RecordSettings, Recorder};
use attache_serving::health::{Health, Latch, Readiness};
use attache_serving::shutdown::{self, DrainTimes, Phase, Shutdown};
use attache_telemetry::Telemetry;
use attache_telemetry::decisions::Decisions;
use attache_telemetry::logs::LogHandle;
use attache_telemetry::metrics::Metrics;
use attache_telemetry::process::{CertificateEnds, ProcessCollector};
use attache_telemetry::queues::QueuedBytesCollector;
use attache_telemetry::trace::Tracing;
use attache_types::clock::Clock;
use attache_types::rng;
use certificates::Certificates;
use instruments::{Instruments, PREFIX};
use pages::PageParts;
use ports::{Ports, Served};
use prometheus_client::registry::Registry;
use recording::{recorder, unrecordable};
use redis::Redis;
use routing::Prepared;
use sd_notify::NotifyState;
use std::path::PathBuf;
use std::sync::Arc;
use sync::{PeerSessions, Sync};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use traces::Traces;

/// Source of settings, which are read again when they change.
pub struct Reload {
    /// Path of the file to watch; `None` if there is none.
    pub path: PathBuf,
    /// Reads and checks the settings.
    pub load: LoadSettings,
}

/// Reads and checks settings. The error is why they are invalid, which has been logged.
pub type LoadSettings = Box<dyn Fn() -> Result<Settings, String> + Send>;

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
    // Feeds have this thread; requests, ports and pages have others.
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
    sync: Option<Sync>,
    clock: Clock,
    /// Subject of the lease, if leader election is enabled.
    leased: Option<Leased>,
}

/// The parts that exist before any pool.
struct Start<'a> {
    clock: Clock,
    seed: u64,
    readiness: &'a Readiness,
    metrics: &'a Arc<Metrics>,
    views: &'a Arc<PoolViews>,
    recorder: Option<Arc<Recorder>>,
    sync: Option<Sync>,
    tracing: Tracing,
    /// Cancelled at shutdown, so that another replica can take the lease.
    leading: CancellationToken,
}

impl Start<'_> {
    /// Starts the feeds of all pools and builds the picker, which serves nothing yet. Returns the guard of admin pages
    /// and the task of leader election with it, if they are enabled.
    async fn assemble(
        self,
        file: Settings,
        mut found: FoundPools,
        mut feeds: Feeds,
    ) -> anyhow::Result<(App, Option<Guard>, Option<JoinHandle<()>>)> {
        let Self { clock, seed, readiness, metrics, views, recorder, sync, tracing, leading } = self;
        feeds.hold(readiness);
        found.follow(&file.templates, &mut feeds).await?;
        let searching = (!file.templates.is_empty()).then(|| readiness.latch("InferencePools searched for"));
        let (settings, expansion) = found.expand(&file);
        found.take_up(expansion);
        feeds.apply(&settings, readiness).await?;
        let guard = if file.server.metrics_auth { Some(feeds.guard().await?) } else { None };
        let (leader, leased) = (feeds.lead(&file, readiness, leading), attache_feeds::leased(&file));
        let segments = Arc::new(SegmentCache::new(DEFAULT_MEMO_BYTES, seed));
        let decisions = Arc::new(Decisions::new(settings.telemetry.decisions_kept, clock));
        let telemetry = Arc::new(Telemetry { metrics: metrics.clone(), decisions });
        let prepared = Prepared::of(&settings, None, None, metrics)?;
        let (config, redis) = routing::config(&settings, prepared, &feeds, &segments, &telemetry, clock, None)?;
        if let Some(sync) = &sync {
            sync.set_pools(&config, &feeds);
            sync.hold(readiness);
        }
        let replica = sync.as_ref().map(|sync| sync.replica().clone());
        let picker = Picker::new(config, telemetry.clone(), seed).recorded(recorder).sharing(replica);
        picker.policies.configure(settings.model_policies.clone());
        let processor = Arc::new(Processor::new(picker, &telemetry, tracing));
        if let Some(replica) = &processor.picker.replica {
            replica.set_sessions(Arc::new(PeerSessions(Arc::downgrade(&processor))));
        }
        let app = App {
            dump: Arc::new(ArcSwap::from_pointee(settings.clone())),
            file,
            settings,
            found,
            searching,
            processor,
            telemetry,
            feeds,
            certificates: None,
            views: views.clone(),
            readiness: readiness.clone(),
            segments,
            redis,
            sync,
            clock,
            leased: leased.filter(|_| leader.is_some()),
        };
        Ok((app, guard, leader))
    }
}

/// The parts that end at shutdown.
struct RunningProcess {
    shards: Arc<Shards>,
    /// Ends the acceptor of ext-proc.
    accepting: CancellationToken,
    /// Ends the threads of ext-proc after their streams.
    drain: CancellationToken,
    /// Ends leader election, so that another replica can take the lease.
    leading: CancellationToken,
    leader: Option<JoinHandle<()>>,
    /// Ends all other tasks.
    stop: CancellationToken,
    recorder: Option<Arc<Recorder>>,
    traces: Traces,
}

impl RunningProcess {
    /// Drains the streams by the phases of `shutdown`, and then ends all tasks.
    async fn end(self, app: &App, shutdown: &Shutdown) {
        app.readiness.set_draining();
        notify_manager(&NotifyState::Stopping);
        self.leading.cancel();
        shutdown.reached(Phase::Draining).await;
        self.accepting.cancel();
        self.drain.cancel();
        tokio::select! {
            () = self.shards.drained() => {}
            () = shutdown.reached(Phase::Forced) => {}
        }
        if let Some(leader) = self.leader {
            // The task releases its lease, so that the next leader need not wait for its expiry.
            let _ = leader.await;
        }
        self.stop.cancel();
        report_end(&app.telemetry.metrics);
        if let Some(redis) = &app.redis {
            redis.part().await;
        }
        if let Some(recorder) = self.recorder {
            recorder.finish();
        }
        self.traces.shutdown().await;
    }
}

/// A process without ports: its pools and feeds run.
struct Assembled {
    app: App,
    guard: Option<Guard>,
    leader: Option<JoinHandle<()>>,
    /// Ends leader election.
    leading: CancellationToken,
    instruments: Instruments,
    recorder: Option<Arc<Recorder>>,
    traces: Traces,
    seed: u64,
}

/// Starts the pools of `file` and their feeds, until `stop` is cancelled.
async fn assemble(
    file: Settings,
    read_pool: PoolReader,
    record: Option<RecordSettings>,
    readiness: &Readiness,
    stop: &CancellationToken,
) -> anyhow::Result<Assembled> {
    let clock = Clock::start();
    let seed = file.server.seed.unwrap_or_else(rng::system_seed);
    let mut instruments = Instruments::register(&file, clock);
    let recorder = recorder(record, &file, seed, instruments.registry.sub_registry_with_prefix(PREFIX))?;
    let kv_connections = instruments.listeners.kv_events.clone();
    let pressure = instruments.metrics.pressure.shared().clone();
    let sync = Sync::start(&file, pressure, clock, stop.child_token()).await?;
    let shared = sync.as_ref().map(|sync| (sync.replica().clone(), sync.cache_seed()));
    let feeds = Feeds::new(clock, seed, recorder.clone(), kv_connections, stop.child_token()).sharing(shared);
    let found = FoundPools::new(read_pool, stop.child_token());
    let registry = instruments.registry.sub_registry_with_prefix(PREFIX);
    registry.register_collector(Box::new(QueuedBytesCollector(found.queued())));
    let traces = Traces::start(&file.telemetry)?;
    let leading = stop.child_token();
    let start = Start {
        clock,
        seed,
        readiness,
        metrics: &instruments.metrics,
        views: &instruments.views,
        recorder: recorder.clone(),
        sync,
        tracing: traces.tracing(clock),
        leading: leading.clone(),
    };
    let (app, guard, leader) = start.assemble(file, found, feeds).await?;
    Ok(Assembled { app, guard, leader, leading, instruments, recorder, traces, seed })
}

async fn serve(
    file: Settings,
    reload: Option<Reload>,
    read_pool: PoolReader,
    record: Option<RecordSettings>,
    logs: LogHandle,
) -> anyhow::Result<()> {
    let server = file.server.clone();
    let (stop, drain, accepting) = (CancellationToken::new(), CancellationToken::new(), CancellationToken::new());
    let readiness = Readiness::default();
    let listening = readiness.latch("listeners open");
    let assembled = assemble(file, read_pool, record, &readiness, &stop).await?;
    let Assembled { mut app, guard, leader, leading, instruments, recorder, traces, seed } = assembled;
    let clock = app.clock;
    let times = DrainTimes { min_delay: server.drain_min_delay, deadline: server.drain_deadline };
    let shutdown = Shutdown::start(shutdown::signals()?, times);
    let ports = Ports::open(&server).await?;
    app.certificates = Certificates::load(&server, clock, &stop)?;
    app.certificates.iter().for_each(|certificates| certificates.share_failures(&app.telemetry.metrics));
    let Instruments { registry: mut root, refusals, listeners, .. } = instruments;
    let registry = root.sub_registry_with_prefix(PREFIX);
    registry.register_collector(Box::new(app.process_collector(&traces)));

    let health = Health::new().await;
    app.sync.iter().for_each(|sync| registry.register_collector(Box::new(sync.collector(clock))));
    let service = Service::new(app.processor.clone(), clock);
    let on_grpc_port = server.health_checking.then(|| health.clone());
    let handshaker = app.certificates.as_ref().map(Certificates::handshaker);
    let max_streams = app.settings.limits.max_streams_per_connection;
    let shards =
        Arc::new(Shards::start(server.workers, max_streams, &service, handshaker, on_grpc_port.as_ref(), &drain)?);
    ports.tell(&server, seed, handshaker.is_some())?;
    app.show();
    tokio::spawn(reach::watch(app.views.clone(), clock));
    tokio::spawn(reach::summarize(app.views.clone(), ports.addresses()?, app.settings.telemetry.log_json));
    let rendering = ports::pages_thread(stop.clone())?;
    let pages = PageParts { rendering, registry: root, guard, refusals, logs }.assemble(&app);
    let (accepts, accepted_until, until) = (shards.clone(), accepting.clone(), stop.clone());
    let served =
        Served { shards: accepts, listeners, health, readiness, pages, accepting: accepted_until, stop: until };
    ports.serve(served)?;
    listening.release();
    notify_manager(&NotifyState::Ready);

    tokio::select! {
        () = shutdown.reached(Phase::Lame) => {}
        () = app.follow(reload) => {}
    }
    RunningProcess { shards, accepting, drain, leading, leader, stop, recorder, traces }.end(&app, &shutdown).await;
    Ok(())
}

/// Sends `state` to the service manager, if it has set the variable `NOTIFY_SOCKET`: systemd does for units of
/// `Type=notify`.
fn notify_manager(state: &NotifyState<'_>) {
    if let Err(error) = sd_notify::notify(std::slice::from_ref(state)) {
        tracing::warn!(%error, "can't notify the service manager ($NOTIFY_SOCKET)");
    }
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
        let cache = Arc::new(attache_feeds::cache(&p.prefix, seed));
        cache.reconcile(&store.load());
        pools.push(Arc::new(PoolRuntime {
            pool: Arc::new(
                p.pool(routing::scheduler(p, None)?, PoolStores { endpoints: store, ..PoolStores::default() }),
            ),
            observer: Arc::new(metrics.pool(&p.name)),
            prefix: Some(prompts::prefix(p, cache, None, &segments, clock)?),
            queue: None,
        }));
    }
    let config = ActiveConfig::new(pools, settings.limits.clone(), settings.exchange.clone());
    let telemetry = Telemetry { metrics, decisions: Arc::new(Decisions::new(0, clock)) };
    Ok(Picker::new(config, Arc::new(telemetry), seed))
}

fn report_end(metrics: &Metrics) {
    let ended: u64 = StreamOutcome::ALL.iter().map(|o| metrics.outcomes.get(*o)).sum();
    let opened = metrics.streams_opened.get();
    tracing::info!(drained = ended, aborted = opened.saturating_sub(ended), "ended");
}

impl App {
    /// The collector of metrics of the process as a whole.
    fn process_collector(&self, traces: &Traces) -> ProcessCollector {
        let certificates = self.certificates();
        let ends = move || certificates().into_iter().map(|one| (one.name, one.expires_at)).collect::<Vec<_>>();
        ProcessCollector {
            buffered: self.processor.picker.buffered.clone(),
            segments: self.segments.clone(),
            certificates: CertificateEnds(Box::new(ends)),
            tls: self.certificates.as_ref().map(Certificates::stats),
            otlp: traces.otlp.as_ref().map(|o| o.stats().clone()),
        }
    }

    /// Reads the state of the certificates in use.
    fn certificates(&self) -> Source<Vec<CertificateStatus>> {
        let of_port = self.certificates.as_ref().map(Certificates::status);
        let of_nats = self.sync.as_ref().and_then(Sync::certificate);
        Arc::new(move || {
            let of_port = of_port.iter().flat_map(|read| read());
            of_port.chain(of_nats.iter().filter_map(|read| read())).collect()
        })
    }

    /// Reloads whenever the file or the found InferencePools change; never returns.
    async fn follow(&mut self, reload: Option<Reload>) {
        let mut file = reload.map(|reload| (watch::watch([reload.path]), reload.load));
        loop {
            tokio::select! {
                loaded = next_load(file.as_mut()) => match loaded {
                    Err(refusal) => self.processor.metrics.reloads.record(Err(refusal), self.clock.now()),
                    Ok(settings) => self.reload(settings).await,
                },
                () = self.found.changed() => if self.found.any_known() {
                    self.refresh().await;
                },
            }
        }
    }

    async fn reload(&mut self, file: Settings) {
        let mut needs_restart = self.settings.restart_needed(&file);
        if self.leased.as_ref().is_some_and(|leased| attache_feeds::leased(&file).as_ref() != Some(leased)) {
            needs_restart.push("the pool or selector that the lease is of (`kubernetes`)".to_owned());
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
        let outcome = taken_up.as_ref().copied().map_err(|error| format!("{error:#}"));
        self.processor.metrics.reloads.record(outcome, self.clock.now());
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
        if let Some(sync) = &self.sync {
            sync.set_pools(&config, &self.feeds);
        }
        self.processor.picker.reload(config, || settings.to_json());
        // Settings that need a restart keep their values, in the dump too.
        self.settings = Settings {
            server: self.settings.server.reloaded(&settings.server),
            telemetry: self.settings.telemetry.clone(),
            sync: self.settings.sync.clone(),
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
                metrics: Arc::new(self.processor.metrics.pool(&settings.name)),
                queue: self.processor.metrics.queue_depth(&settings.name),
                bands: queues::band_depths(config.pool(&settings.name)?),
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

/// Waits for the next change of the file, and reads it; never returns without a file.
async fn next_load(file: Option<&mut (FileWatch, LoadSettings)>) -> Result<Settings, String> {
    let Some((watch, load)) = file else { return std::future::pending().await };
    watch.changed().await;
    load()
}
