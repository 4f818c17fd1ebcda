//! An engine on the wall clock: one task that sleeps until the engine's next event, and a channel for every request.
//!
//! There is one timer for the whole engine, however many streams are open: a step of the engine is one
//! wake-up, and every stream that got a token is woken by its channel. Called by `sim::http`; may import
//! the engine, `clock` and tokio.

use crate::engine::{Engine, EngineConfig, EngineEvent, Job, JobId, JobReport, Load, Refused};
use crate::kv_events::encode::{KvEncoder, KvFrame};
use crate::spans::OpenSpan;
use crate::stats::EngineStats;
use crate::vllm_hash::Digest;
use ahash::RandomState;
use attache_types::clock::{Clock, Timestamp};
use parking_lot::Mutex;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};
use tokio::sync::{Notify, mpsc};

/// 32 label sets of `lora_requests_info` are remembered; a real server remembers them all.
const LORA_SETS_KEPT: usize = 32;

/// News about one job of a subscription.
#[derive(Clone, Copy, Debug)]
pub(super) struct Update {
    /// Which of the jobs, in the order in which they were handed in.
    pub(super) choice: usize,
    pub(super) news: JobNews,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum JobNews {
    Token,
    /// What another server had computed is here.
    Received,
    /// It had gone before it was here; no more news comes.
    Lost,
    Finished(JobReport),
}

/// Blocks that are kept of an ended job.
#[derive(Clone, Debug)]
pub(super) struct Pinned {
    pub(super) tokens: u32,
    pub(super) blocks: Vec<u32>,
    /// What is left of the lease.
    pub(super) left: Duration,
}

/// Adapters that ran and waited at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoraSet {
    pub(super) running: Vec<Arc<str>>,
    pub(super) waiting: Vec<Arc<str>>,
    pub(super) at: Timestamp,
}

/// What a metrics page is made of.
#[derive(Debug)]
pub(super) struct HostSnapshot {
    pub(super) load: Load,
    pub(super) stats: EngineStats,
    pub(super) loras: Vec<LoraSet>,
    /// Ended jobs whose blocks are kept, and the number of these blocks.
    pub(super) pins: (usize, usize),
    /// When the engine began, or began anew.
    pub(super) started: Timestamp,
}

/// The cache as KV events name it.
#[derive(Debug)]
pub(super) struct PageTable {
    /// The number that the next message of events will have.
    pub(super) next_sequence: u64,
    /// Every block that can be found, and the number of its copies; in order of their names.
    pub(super) blocks: Vec<(Digest, usize)>,
}

/// What becomes of an engine's KV events.
#[derive(Debug)]
pub(super) struct KvOutput {
    pub(super) encoder: KvEncoder,
    pub(super) frames: mpsc::UnboundedSender<KvFrame>,
}

#[derive(Debug)]
struct JobListener {
    sink: mpsc::UnboundedSender<Update>,
    choice: usize,
    /// The span of its request, for the first job.
    span: Option<OpenSpan>,
}

#[derive(Debug)]
struct HostState {
    engine: Engine,
    listeners: HashMap<JobId, JobListener, RandomState>,
    next_job: u64,
    events: Vec<EngineEvent>,
    /// Sets of adapters, oldest first.
    loras: VecDeque<LoraSet>,
    kv: Option<KvOutput>,
    started: Timestamp,
}

/// The engine and those who wait for it.
#[derive(Debug)]
pub(super) struct EngineHost {
    clock: Clock,
    state: Mutex<HostState>,
    wake: Notify,
}

impl EngineHost {
    /// The engine publishes the changes of its cache where `kv` is an output for them.
    pub(super) fn new(clock: Clock, config: EngineConfig, kv: Option<KvOutput>) -> Self {
        // Streams wait for every token.
        let config = EngineConfig { kv_events: kv.is_some(), every_token: true, ..config };
        Self {
            clock,
            state: Mutex::new(HostState {
                engine: Engine::new(config),
                listeners: HashMap::default(),
                next_job: 0,
                events: Vec::new(),
                loras: VecDeque::new(),
                kv,
                started: clock.now(),
            }),
            wake: Notify::new(),
        }
    }

    /// Runs the engine until the task is aborted.
    pub(super) async fn drive(self: Arc<Self>) {
        loop {
            let next = {
                let mut state = self.state.lock();
                state.advance(&self.clock);
                state.engine.next_event_at()
            };
            match next {
                Some(at) => tokio::select! {
                    () = tokio::time::sleep_until(self.clock.instant(at)) => {}
                    () = self.wake.notified() => {}
                },
                None => self.wake.notified().await,
            }
        }
    }

    /// Hands jobs in, all or none; their ids are given out here. `claim`: what the first one receives. `span`: that of
    /// the request, which ends with the first one.
    pub(super) fn submit(
        self: &Arc<Self>,
        jobs: Vec<Job>,
        claim: Option<Box<dyn RemoteBlocks>>,
        mut span: Option<OpenSpan>,
    ) -> Result<Subscription, Refused> {
        // Unbounded, yet small: a job sends at most one update a token, and a real server does not
        // wait for slow readers either.
        let (sink, updates) = mpsc::unbounded_channel();
        let mut subscription =
            Subscription { host: self.clone(), jobs: Vec::with_capacity(jobs.len()), open: 0, updates, claim };
        let mut state = self.state.lock();
        let now = state.advance(&self.clock);
        for (choice, mut job) in jobs.into_iter().enumerate() {
            let id = JobId(state.next_job);
            state.next_job += 1;
            job.id = id;
            if let Err(refused) = state.engine.submit(now, job) {
                // Dropping the subscription cancels those before; it takes the lock itself.
                drop(state);
                return Err(refused);
            }
            state.listeners.insert(id, JobListener { sink: sink.clone(), choice, span: span.take() });
            subscription.jobs.push(id);
            subscription.open += 1;
        }
        // No step is under way, whatever else the driver waits for.
        if state.engine.next_event_at().is_some_and(|at| at <= now) {
            state.advance(&self.clock);
            self.wake.notify_one();
        }
        Ok(subscription)
    }

    pub(super) fn snapshot(&self) -> HostSnapshot {
        let mut state = self.state.lock();
        let now = state.advance(&self.clock);
        state.note_loras(now);
        HostSnapshot {
            load: state.engine.load(),
            stats: state.engine.stats().clone(),
            loras: state.loras.iter().cloned().collect(),
            pins: state.engine.pins(),
            started: state.started,
        }
    }

    /// What the cache holds; `None` where KV events are off, which give blocks their names.
    pub(super) fn page_table(&self) -> Option<PageTable> {
        let mut state = self.state.lock();
        state.advance(&self.clock);
        let encoder = &state.kv.as_ref()?.encoder;
        // A block that was stored in a step that is not over yet has no name before its end.
        let named = state.engine.held_blocks().filter_map(|(block, copies)| Some((encoder.name(block)?, copies)));
        let mut blocks: Vec<(Digest, usize)> = named.collect();
        blocks.sort_unstable_by_key(|(digest, _)| (digest.event_hash(), *digest));
        Some(PageTable { next_sequence: encoder.next_sequence(), blocks })
    }

    /// Forgets the cache; false while requests have blocks.
    pub(super) fn reset_prefix_cache(&self) -> bool {
        let mut state = self.state.lock();
        state.advance(&self.clock);
        state.engine.reset_prefix_cache()
    }

    /// What is kept of a job that has ended; `None` when nothing is.
    pub(super) fn pinned(&self, job: JobId) -> Option<Pinned> {
        let mut state = self.state.lock();
        let now = state.advance(&self.clock);
        let pinned = state.engine.pinned(now, job)?;
        Some(Pinned {
            tokens: pinned.tokens,
            blocks: pinned.blocks.iter().map(|block| block.number()).collect(),
            left: pinned.until.since(now),
        })
    }

    /// Gives back what is kept of a job; false when nothing is.
    pub(super) fn release(&self, job: JobId) -> bool {
        let mut state = self.state.lock();
        let now = state.advance(&self.clock);
        let released = state.engine.release(now, job);
        // Somebody may have waited for these blocks.
        self.wake.notify_one();
        released
    }

    /// Begins the lease of what is kept of a job anew.
    pub(super) fn heartbeat(&self, job: JobId) {
        let mut state = self.state.lock();
        let now = state.advance(&self.clock);
        state.engine.heartbeat(now, job);
    }

    /// Takes note of where an adapter was loaded from.
    pub(super) fn adapter(&self, name: &Arc<str>, path: &str) {
        if let Some(kv) = &mut self.state.lock().kv {
            kv.encoder.adapter(name, path);
        }
    }

    /// Begins anew as a new process would: requests end, the cache is empty, counts begin at 0. The number of the new
    /// life, where there are KV events.
    pub(super) fn restart(&self) -> Option<u32> {
        let mut state = self.state.lock();
        let now = state.advance(&self.clock);
        let HostState { engine, events, .. } = &mut *state;
        engine.restart(now, events);
        state.tell();
        state.loras.clear();
        state.started = now;
        let process = state.kv.as_mut().map(|kv| kv.encoder.restart());
        self.wake.notify_one();
        process
    }

    fn cancel(&self, jobs: &[JobId]) {
        let mut state = self.state.lock();
        let now = state.advance(&self.clock);
        let HostState { engine, listeners, events, .. } = &mut *state;
        for job in jobs {
            if listeners.remove(job).is_some() {
                engine.cancel(now, *job, events);
            }
        }
        events.clear();
        // Somebody may have waited for these blocks.
        self.wake.notify_one();
    }
}

impl HostState {
    /// Step by step, so that an adapter whose jobs came and went between two wake-ups is noted all the same.
    fn advance(&mut self, clock: &Clock) -> Timestamp {
        let now = clock.now();
        while let Some(at) = self.engine.next_event_at().filter(|at| *at <= now) {
            self.engine.advance(at, &mut self.events);
            self.note_loras(at);
        }
        // Before the tokens: who has an answer finds the blocks under their names.
        self.publish(clock);
        self.tell();
        now
    }

    fn publish(&mut self, clock: &Clock) {
        let Some(KvOutput { encoder, frames }) = &mut self.kv else { return };
        for batch in self.engine.take_kv_batches() {
            let wall = clock.wall(batch.at).duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
            // Without a publisher the server is about to end.
            let _ = frames.send(encoder.frame(&batch, wall.as_secs_f64()));
        }
    }

    /// Hands events to those who wait for them.
    fn tell(&mut self) {
        for event in self.events.drain(..) {
            let (job, at, news) = match event {
                EngineEvent::FirstToken { job, at } | EngineEvent::Token { job, at } => (job, at, JobNews::Token),
                EngineEvent::Finished { job, at, report } => (job, at, JobNews::Finished(report)),
                EngineEvent::Received { job, at } => (job, at, JobNews::Received),
                EngineEvent::Preempted { .. } => continue,
            };
            let Some(listener) = self.listeners.get_mut(&job) else { continue };
            if matches!(event, EngineEvent::FirstToken { .. }) {
                listener.span.iter_mut().for_each(|span| span.first_token(at));
            }
            if let JobNews::Finished(report) = news
                && let Some(span) = listener.span.take()
            {
                span.finish(at, report.prompt_tokens, report.generated_tokens);
            }
            // A failed send means that the reader is going away; its drop cancels the job.
            let _ = listener.sink.send(Update { choice: listener.choice, news });
            if matches!(news, JobNews::Finished(_)) {
                self.listeners.remove(&job);
            }
        }
    }

    /// Remembers which adapters are busy. Like vLLM's, the newest set is the one with the greatest time.
    fn note_loras(&mut self, at: Timestamp) {
        let (running, waiting) = self.engine.loras();
        let set = LoraSet { running, waiting, at };
        self.loras.retain(|old| old.running != set.running || old.waiting != set.waiting);
        self.loras.push_back(set);
        if self.loras.len() > LORA_SETS_KEPT {
            self.loras.pop_front();
        }
    }
}

/// KV blocks that another server holds for a job to read. Dropping it releases them unread.
pub(super) trait RemoteBlocks: std::fmt::Debug + Send {
    /// The job has read all blocks. False when they were gone before and the request must fail.
    fn finish_read(self: Box<Self>) -> bool;
}

/// Jobs of one request. Dropping it cancels what has not ended.
#[derive(Debug)]
pub(super) struct Subscription {
    host: Arc<EngineHost>,
    jobs: Vec<JobId>,
    open: usize,
    updates: mpsc::UnboundedReceiver<Update>,
    /// Blocks of another server that the first job reads. Released after the read, or when the request is cancelled.
    claim: Option<Box<dyn RemoteBlocks>>,
}

impl Subscription {
    /// The job of a choice.
    pub(super) fn job(&self, choice: usize) -> Option<JobId> {
        self.jobs.get(choice).copied()
    }

    /// The next update; `None` when all jobs have ended.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Update>> {
        if self.open == 0 {
            return Poll::Ready(None);
        }
        let mut update = std::task::ready!(self.updates.poll_recv(cx));
        if let Some(Update { choice: 0, news: JobNews::Received }) = update
            && self.claim.take().is_some_and(|claim| !claim.finish_read())
        {
            update = Some(Update { choice: 0, news: JobNews::Lost });
        }
        if let Some(Update { news: JobNews::Finished(_), .. }) = update {
            self.open -= 1;
        }
        Poll::Ready(update)
    }

    /// Waits for the end of all jobs; their reports in the order in which the jobs were handed in. `None` when what one
    /// of them was to receive was lost.
    pub(super) async fn finished(&mut self) -> Option<Vec<JobReport>> {
        let mut reports: Vec<Option<JobReport>> = vec![None; self.jobs.len()];
        while let Some(update) = std::future::poll_fn(|cx| self.poll_next(cx)).await {
            match (update.news, reports.get_mut(update.choice)) {
                (JobNews::Finished(report), Some(slot)) => *slot = Some(report),
                (JobNews::Lost, _) => return None,
                _ => {}
            }
        }
        Some(reports.into_iter().flatten().collect())
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        if self.open > 0 {
            self.host.cancel(&self.jobs);
        }
    }
}
