//! One simulated server: the engines behind its endpoint, one for each data-parallel rank. Owned by [`super::World`];
//! pure.

use super::kv_event_delivery::KvEventLink;
use crate::page::MetricsHistory;
use attache_pool::{EndpointMetrics, EndpointSpec};
use attache_report::served::Sample;
use attache_sim::engine::{Engine, EngineConfig, EngineEvent, Job, JobId, Refused};
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::sync::Arc;

/// A simulated server.
#[derive(Debug)]
pub(super) struct WorldServer {
    pub(super) spec: Arc<EndpointSpec>,
    /// Configuration of each engine.
    pub(super) config: EngineConfig,
    /// The engines by data-parallel rank, each with a cache of its own; at least one.
    pub(super) engines: Vec<Engine>,
    /// Start of the process.
    pub(super) started: Timestamp,
    pub(super) alive: bool,
    /// Id in the last snapshot; `None` while the picker does not know the server.
    pub(super) known: Option<EndpointId>,
    pages: MetricsHistory,
    /// Time of the engines' event that is in the queue, if any.
    pub(super) due: Option<Timestamp>,
    /// The paths of KV events by rank; empty while there are none.
    pub(super) events: Vec<KvEventLink>,
}

impl WorldServer {
    /// A server with `ranks` engines, at least one, whose process starts at `now`.
    pub(super) fn new(spec: EndpointSpec, config: EngineConfig, ranks: u16, now: Timestamp) -> Self {
        let engines = (0..ranks.max(1)).map(|_| Engine::new(config.clone())).collect();
        Self {
            spec: spec.into(),
            config,
            engines,
            started: now,
            alive: true,
            known: None,
            pages: MetricsHistory::default(),
            due: None,
            events: Vec::new(),
        }
    }

    /// Runs the engines up to `now` and appends their events.
    pub(super) fn advance(&mut self, now: Timestamp, events: &mut Vec<EngineEvent>) {
        if self.due.is_some_and(|due| due <= now) {
            self.due = None;
        }
        self.engines.iter_mut().for_each(|engine| engine.advance(now, events));
    }

    /// Ends the process and starts another one at `now`. Appends the ends of all jobs to `events`.
    pub(super) fn restart(&mut self, now: Timestamp, events: &mut Vec<EngineEvent>) {
        self.engines.iter_mut().for_each(|engine| engine.restart(now, events));
        self.started = now;
        self.due = None;
    }

    /// Time of the engines' next event. Without `each_step`, steps without events are skipped.
    pub(super) fn next_event_at(&self, each_step: bool) -> Option<Timestamp> {
        let next = |engine: &Engine| if each_step { engine.next_event_at() } else { engine.quiet_until() };
        self.engines.iter().filter_map(next).min()
    }

    /// Hands a job to the engine of `rank`. If the request names no rank, the least loaded engine gets it. As in vLLM,
    /// a waiting job counts four times.
    ///
    /// # Errors
    /// The engine rejects the job.
    pub(super) fn submit(&mut self, now: Timestamp, job: Job, rank: Option<usize>) -> Result<(), Refused> {
        let load = |engine: &Engine| {
            let load = engine.load();
            4 * load.waiting + load.running
        };
        let least = || (0..).zip(&self.engines).min_by_key(|(_, engine)| load(engine)).map_or(0, |(rank, _)| rank);
        let rank = rank.unwrap_or_else(least);
        self.engines.get_mut(rank).map_or(Err(Refused::Empty), |engine| engine.submit(now, job))
    }

    /// Ends a job early. Returns its rank; `None` if no engine has the job.
    pub(super) fn cancel(&mut self, now: Timestamp, job: JobId) -> Option<usize> {
        self.engines.iter_mut().position(|engine| engine.cancel(now, job, &mut Vec::new()))
    }

    /// Whether the server keeps the blocks of a job that has ended.
    pub(super) fn keeps(&self, now: Timestamp, job: JobId) -> bool {
        self.engines.iter().any(|engine| engine.pinned(now, job).is_some())
    }

    /// Releases the blocks that the server keeps for a job.
    pub(super) fn release(&mut self, now: Timestamp, job: JobId) {
        self.engines.iter_mut().for_each(|engine| _ = engine.release(now, job));
    }

    /// The metrics that a scrape at `now` reads, and whether another process reported the previous ones.
    pub(super) fn scrape(&mut self, now: Timestamp) -> (EndpointMetrics, bool) {
        self.pages.read(&self.engines, &self.config, self.started, now)
    }

    /// The load of all engines together.
    pub(super) fn sample(&self) -> Sample {
        let mut sample = Sample { running: 0, waiting: 0, kv_usage: 0.0, prefix_queries: 0, prefix_hits: 0 };
        for engine in &self.engines {
            let (load, stats) = (engine.load(), engine.stats());
            sample.running += u32::try_from(load.running).unwrap_or(u32::MAX);
            sample.waiting += u32::try_from(load.waiting).unwrap_or(u32::MAX);
            #[expect(clippy::cast_possible_truncation, reason = "a part of one")]
            let usage = load.kv_usage as f32;
            sample.kv_usage = sample.kv_usage.max(usage);
            sample.prefix_queries += stats.prefix_queries;
            sample.prefix_hits += stats.prefix_hits;
        }
        sample
    }
}
