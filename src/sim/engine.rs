//! The simulated inference engine: two queues, a step loop, a paged cache. No clock, no I/O: moments
//! come in, events go out.
//!
//! Called by `sim::host` with the wall clock and by `replay` with virtual time. May import `clock` and its siblings
//! `content`, `kv`, `latency`, `sequence`, `stats`, `tokenizer`. What goes in and comes out is in `job`, who is in the
//! batch in `batch`, what a step does in `step`, what passes between engines in `handoff`. The model is on the module
//! page of [`crate`].

use crate::engine::batch::RunningBatch;
use crate::engine::handoff::{Pins, Transfers};
use crate::engine::sequence::{SequenceContext, Sequences};
use crate::engine::step::NoRoom;
use crate::kv::{BlockHash, KvCache};
use crate::latency::{LatencyModel, StepCosts, StepWork};
use crate::stats::EngineStats;
use attache_types::clock::Timestamp;
use std::collections::VecDeque;
use std::sync::Arc;

mod alone;
mod batch;
mod handoff;
mod job;
mod sequence;
mod step;

pub use handoff::{DEFAULT_LEASE, Handoff, Pinned};
pub use job::{EngineEvent, FinishReason, Job, JobId, JobPrompt, JobReport, KvBatch, Load, Refused};

#[cfg(test)]
mod tests;

/// 16 tokens: vLLM's block on CUDA.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// 4,096 blocks, 65,536 tokens at the default block size: small enough for tests to see evictions. An 8B model on an 80
/// GB card has about 27,000.
pub const DEFAULT_NUM_BLOCKS: u32 = 4_096;
/// 256 sequences in a batch: vLLM's default.
pub const DEFAULT_MAX_NUM_SEQS: u32 = 256;
/// 8,192 tokens in a step: vLLM's default for an online server on an H100.
pub const DEFAULT_MAX_NUM_BATCHED_TOKENS: u32 = 8_192;
/// 32,768 tokens of prompt and answer together.
pub const DEFAULT_MAX_MODEL_LEN: u32 = 32_768;

/// What an engine is built with.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Model name, part of every block's identity.
    pub model: Arc<str>,
    /// Tokens in a block, at least 1.
    pub block_size: u32,
    /// Blocks in the cache, at least 1.
    pub num_blocks: u32,
    /// Sequences in a batch, at least 1.
    pub max_num_seqs: u32,
    /// Tokens computed in a step, at least 1.
    pub max_num_batched_tokens: u32,
    /// Tokens of prompt and answer together.
    pub max_model_len: u32,
    /// Jobs that may wait; more are refused. No bound when `None`.
    pub max_num_queued: Option<u32>,
    /// LoRA adapters in one batch, at least 1 where there are adapters.
    pub max_loras: u32,
    /// Reuse blocks of earlier requests.
    pub prefix_caching: bool,
    /// Tell what the cache stores and drops, see [`Engine::take_kv_batches`].
    pub kv_events: bool,
    /// Tell of every token. Without, an answer costs the machine what its blocks cost and not what its tokens
    /// cost; nothing else differs but [`Engine::quiet_until`]. Times between tokens are counted either way, those
    /// of a step all at once.
    pub every_token: bool,
    /// Cards that it runs on, at least 1: an hour of it is so many GPU hours.
    pub gpus: u32,
    /// Durations of steps and transfers.
    pub latency: LatencyModel,
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            model: Arc::from("sim"),
            block_size: DEFAULT_BLOCK_SIZE,
            num_blocks: DEFAULT_NUM_BLOCKS,
            max_num_seqs: DEFAULT_MAX_NUM_SEQS,
            max_num_batched_tokens: DEFAULT_MAX_NUM_BATCHED_TOKENS,
            max_model_len: DEFAULT_MAX_MODEL_LEN,
            max_num_queued: None,
            max_loras: 1,
            prefix_caching: true,
            kv_events: false,
            every_token: true,
            gpus: 1,
            latency: LatencyModel::default(),
        }
    }
}

impl EngineConfig {
    /// Tokens that one request may have, prompt and answer together: the model's bound or the whole cache.
    #[must_use]
    pub fn max_request_tokens(&self) -> u32 {
        self.max_model_len.min(self.num_blocks.saturating_mul(self.block_size))
    }
}

/// A simulated engine: waiting queue, running batch and paged KV cache.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    costs: StepCosts,
    /// Of prompts without adapter and salt.
    root: BlockHash,
    kv: KvCache,
    sequences: Sequences,
    /// Ordered by arrival; the preempted stand in front.
    waiting: VecDeque<u32>,
    /// Ordered by admission; the last is the first to be preempted.
    batch: RunningBatch,
    /// Those who receive, or have received, what another server computed, and are not in the batch yet.
    transfers: Transfers,
    /// Blocks of jobs that have ended.
    pins: Pins,
    /// When it was last looked whether something can begin.
    looked: Timestamp,
    /// Nothing could, for want of blocks that transfers or leases hold: it is of no use to look again before one ends.
    blocked: bool,
    /// The last job that found no room.
    no_room: Option<NoRoom>,
    adapters: Adapters,
    /// The step that is under way, or was last.
    step_began: Timestamp,
    /// End of the step that is under way.
    step_ends: Option<Timestamp>,
    /// Work of the step, from which its duration follows.
    work: StepWork,
    deferred: usize,
    stats: EngineStats,
    kv_batches: Vec<KvBatch>,
}

impl Engine {
    /// An idle engine with an empty cache.
    #[must_use]
    pub fn new(config: EngineConfig) -> Self {
        let kv = KvCache::new(config.num_blocks);
        let kv = if config.kv_events { kv.recording() } else { kv };
        Self {
            costs: StepCosts::of(&config.latency),
            root: BlockHash::root(&config.model, None, None),
            kv,
            sequences: Sequences::default(),
            waiting: VecDeque::new(),
            batch: RunningBatch::new(config.block_size),
            transfers: Transfers::default(),
            pins: Pins::default(),
            looked: Timestamp(0),
            blocked: false,
            no_room: None,
            adapters: Adapters::default(),
            step_began: Timestamp(0),
            step_ends: None,
            work: StepWork::default(),
            deferred: 0,
            stats: EngineStats::default(),
            kv_batches: Vec::new(),
            config,
        }
    }

    /// Ends all jobs and begins anew with an empty cache and nothing counted, as a new process would.
    pub fn restart(&mut self, now: Timestamp, events: &mut Vec<EngineEvent>) {
        let outside: Vec<u32> = self.transfers.slots().chain(self.waiting.iter().copied()).collect();
        for slot in self.batch.seats().iter().map(|seat| seat.slot).chain(outside) {
            let sequence = &mut self.sequences[slot];
            sequence.catch_up(self.batch.step);
            let report = sequence.report(FinishReason::Abort);
            events.push(EngineEvent::Finished { job: sequence.id, at: now, report });
        }
        *self = Self::new(self.config.clone());
    }

    /// What it was built with.
    #[must_use]
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Counters and histograms since the start.
    #[must_use]
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Queues and cache as they are.
    #[must_use]
    pub fn load(&self) -> Load {
        Load {
            running: self.batch.len(),
            waiting: self.queued(),
            deferred: (self.deferred + self.transfers.under_way()).min(self.queued()),
            kv_usage: f64::from(self.kv.used()) / f64::from(self.kv.total().max(1)),
        }
    }

    fn queued(&self) -> usize {
        self.waiting.len() + self.transfers.len()
    }

    /// Adapters with running and with waiting jobs, each name once, in order of admission.
    #[must_use]
    pub fn loras(&self) -> (Vec<Arc<str>>, Vec<Arc<str>>) {
        (
            self.distinct_loras(self.batch.seats().iter().map(|seat| seat.slot)),
            self.distinct_loras(self.transfers.slots().chain(self.waiting.iter().copied())),
        )
    }

    /// What the cache stored and dropped in the steps since the last call, oldest first. A caller that builds an engine
    /// with [`EngineConfig::kv_events`] must ask from time to time.
    pub fn take_kv_batches(&mut self) -> Vec<KvBatch> {
        std::mem::take(&mut self.kv_batches)
    }

    /// The page table: every block that can be found and the number of its copies, in no order.
    pub fn held_blocks(&self) -> impl Iterator<Item = (BlockHash, usize)> {
        self.kv.held()
    }

    /// Forgets the cache; false, and nothing changed, while a job has blocks. The event comes with the next step, as
    /// vLLM's does: an engine without work publishes nothing.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.kv.clear()
    }

    /// Takes a job into the queue. `now` must not lie before the `now` of an earlier call.
    ///
    /// # Errors
    /// When the job can never run or the queue is full; it then leaves no trace but a count.
    pub fn submit(&mut self, now: Timestamp, job: Job) -> Result<(), Refused> {
        let tokens = job.prompt.tokens();
        let limit = self.config.max_request_tokens();
        let room = limit.saturating_sub(tokens);
        if tokens == 0 {
            return Err(Refused::Empty);
        }
        if tokens > limit || (room == 0 && job.max_tokens > 0) {
            return Err(Refused::TooLong { tokens, limit });
        }
        if let Some(limit) = self.config.max_num_queued
            && self.queued() >= limit as usize
        {
            self.stats.rejected_queue_full += 1;
            return Err(Refused::QueueFull { waiting: self.queued(), limit });
        }
        let root = if job.lora.is_none() && job.cache_salt.is_none() {
            self.root
        } else {
            BlockHash::root(&self.config.model, job.lora.as_deref(), job.cache_salt.as_deref())
        };
        let setting = SequenceContext {
            now,
            root,
            block_size: self.config.block_size.max(1),
            room,
            tells: self.kv.is_recording(),
        };
        self.waiting.push_back(self.sequences.add(job, setting));
        self.blocked = false;
        self.stats.submitted += 1;
        Ok(())
    }

    /// Ends a job early and gives its blocks back at once. False when there is no such job any more.
    pub fn cancel(&mut self, now: Timestamp, id: JobId, events: &mut Vec<EngineEvent>) -> bool {
        let seat = self.batch.seats().iter().find(|seat| self.sequences[seat.slot].id == id).copied();
        let slot = if let Some(seat) = seat {
            self.leave(seat);
            seat.slot
        } else if let Some(slot) =
            self.waiting.iter().position(|slot| self.sequences[*slot].id == id).and_then(|i| self.waiting.remove(i))
        {
            slot
        } else {
            let found = self.transfers.slots().find(|slot| self.sequences[*slot].id == id);
            let Some(slot) = found else { return false };
            self.transfers.remove(slot);
            slot
        };
        self.look_again(now);
        self.stats.aborted += 1;
        let report = self.sequences[slot].report(FinishReason::Abort);
        events.push(EngineEvent::Finished { job: id, at: now, report });
        self.sequences.remove(slot, &mut self.kv);
        true
    }

    /// When [`Engine::advance`] has something to do next; `None` while there is nothing to do.
    #[must_use]
    pub fn next_event_at(&self) -> Option<Timestamp> {
        if self.step_ends.is_some() {
            return self.step_ends;
        }
        let arrived = self.waiting.front().map(|slot| self.sequences[*slot].arrived);
        let waiting = arrived.filter(|at| !self.blocked || *at > self.looked).map(|at| at.max(self.looked));
        let ready = (!self.blocked && !self.transfers.ready.is_empty()).then_some(self.looked);
        [waiting, ready, self.transfers.next_end(), self.pins.next_end()].into_iter().flatten().min()
    }

    /// No event of [`Engine::advance`] comes before this moment, as long as no job is submitted or cancelled and no
    /// blocks are released; `None` while there is nothing to do. A caller that waits for events need not come before,
    /// but must [`Engine::advance`] to the present before it asks for anything else or hands in a job; what the cache
    /// stores and drops meanwhile waits with its time in [`Engine::take_kv_batches`]. The bound is the end of the step
    /// where tokens are reported one by one, where a job is read or waits, and where blocks may run out.
    #[must_use]
    pub fn quiet_until(&self) -> Option<Timestamp> {
        let next = self.next_event_at()?;
        let decoding = self.batch.len() as u64;
        let steps = self.batch.steps_without_end();
        let blocks = (steps / u64::from(self.config.block_size.max(1)) + 2).saturating_mul(decoding);
        let queued = !self.waiting.is_empty() || !self.transfers.ready.is_empty();
        let quiet = !self.config.every_token && !queued && self.batch.reading.is_empty();
        if !quiet || blocks > u64::from(self.kv.free()) {
            return Some(next);
        }
        // Contexts only grow, and the batch stays: no later step is cheaper than one with the contexts of now.
        let work = StepWork { decode_sequences: decoding, context_tokens: self.batch.context, ..StepWork::default() };
        let step = u64::try_from(self.costs.step(work).as_nanos()).unwrap_or(u64::MAX);
        let quiet = Timestamp(next.0.saturating_add(step.saturating_mul(steps)));
        // A transfer that ends during a step is noticed when the step is over.
        Some(self.transfers.next_end().map_or(quiet, |ends| ends.min(quiet)).max(next))
    }

    /// Lets time pass up to `now` and appends what happened, in order. Steps follow each other without a gap while
    /// there is work, so a caller that comes late does not slow the engine down.
    pub fn advance(&mut self, now: Timestamp, events: &mut Vec<EngineEvent>) {
        while let Some(at) = self.next_event_at().filter(|at| *at <= now) {
            if self.step_ends.take().is_some() {
                self.complete_step(at, events);
            }
            self.start_step(at, events);
        }
    }

    fn distinct_loras(&self, slots: impl Iterator<Item = u32>) -> Vec<Arc<str>> {
        let mut names: Vec<Arc<str>> = Vec::new();
        for lora in slots.filter_map(|slot| self.sequences[slot].lora.as_ref()) {
            if !names.contains(lora) {
                names.push(lora.clone());
            }
        }
        names
    }
}

/// Adapters of the batch, each with the number of its sequences.
#[derive(Debug, Default)]
struct Adapters(Vec<(Arc<str>, usize)>);

impl Adapters {
    /// Whether a sequence with this adapter may join where `most` adapters may be.
    fn admit(&self, lora: Option<&Arc<str>>, most: u32) -> bool {
        lora.is_none_or(|lora| self.0.len() < most.max(1) as usize || self.0.iter().any(|(name, _)| name == lora))
    }

    fn add(&mut self, lora: Option<&Arc<str>>) {
        let Some(lora) = lora else { return };
        match self.0.iter_mut().find(|(name, _)| name == lora) {
            Some((_, count)) => *count += 1,
            None => self.0.push((lora.clone(), 1)),
        }
    }

    fn remove(&mut self, lora: Option<&Arc<str>>) {
        let Some(lora) = lora else { return };
        let Some(index) = self.0.iter().position(|(name, _)| name == lora) else { return };
        if let Some((_, count)) = self.0.get_mut(index) {
            *count -= 1;
            if *count == 0 {
                self.0.swap_remove(index);
            }
        }
    }
}
