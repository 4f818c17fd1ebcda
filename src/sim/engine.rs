//! The simulated inference engine: two queues, a step loop, a paged cache. No clock, no I/O: moments come in, events go out.
//!
//! Called by `sim::host` with the wall clock; a discrete-event loop can call it with virtual time. May import `clock` and its
//! siblings `kv`, `latency`, `sequence`, `stats`. The model is on the module page of [`crate::sim`].

use crate::clock::Timestamp;
use crate::sim::kv::{BlockHash, KvCache, KvEvent};
use crate::sim::latency::{LatencyModel, StepWork};
use crate::sim::sequence::Sequence;
use crate::sim::stats::EngineStats;
use std::collections::VecDeque;
use std::sync::Arc;

#[cfg(test)]
mod tests;

/// 16 tokens: vLLM's block on CUDA.
pub const DEFAULT_BLOCK_SIZE: u32 = 16;
/// 4,096 blocks, 65,536 tokens at the default block size: small enough for tests to see evictions. An 8B model on an 80 GB card has
/// about 27,000.
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
    /// What a step costs.
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

/// Number of a job; its owner gives it out, each once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// What is to be read.
#[derive(Clone, Debug)]
pub enum JobPrompt {
    /// Token ids.
    Tokens(Vec<u32>),
    /// A trace that tells blocks by a hash of their content: one for every block, the last of which may be partial.
    Blocks {
        /// `ceil(tokens / block_size)` content hashes.
        contents: Vec<u64>,
        /// Length in tokens.
        tokens: u32,
    },
}

/// One sequence to generate.
#[derive(Clone, Debug)]
pub struct Job {
    /// Its number.
    pub id: JobId,
    /// What is to be read, at least one token.
    pub prompt: JobPrompt,
    /// Tokens to generate; 0 reads the prompt and ends (embeddings, scores).
    pub max_tokens: u32,
    /// Tokens after which the model is done by itself; no such moment when `None`.
    pub stops_after: Option<u32>,
    /// LoRA adapter.
    pub lora: Option<Arc<str>>,
    /// Keeps this prompt's blocks apart from those of other salts.
    pub cache_salt: Option<Arc<str>>,
    /// What the answer's tokens follow from, see [`crate::sim::tokenizer::answer_token`].
    pub answer_seed: u64,
}

/// Why a job was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Prompt and at least one token of answer don't fit.
    #[error("prompt has {tokens} tokens, at most {limit} fit together with an answer")]
    TooLong {
        /// Tokens of the prompt.
        tokens: u32,
        /// Tokens that prompt and answer may have together.
        limit: u32,
    },
    /// As many jobs wait as may wait.
    #[error("{waiting} requests wait already, at most {limit} may")]
    QueueFull {
        /// Jobs waiting.
        waiting: usize,
        /// Jobs that may wait.
        limit: u32,
    },
    /// A prompt without tokens.
    #[error("prompt has no tokens, at least 1 is needed")]
    Empty,
}

/// How a job ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// The model was done.
    Stop,
    /// It reached its token limit.
    Length,
    /// It was cancelled.
    Abort,
}

/// What a job came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobReport {
    /// How it ended.
    pub reason: FinishReason,
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Those of them that were found in the cache when it was first scheduled.
    pub cached_tokens: u32,
    /// Tokens generated.
    pub generated_tokens: u32,
    /// Times it had to start over.
    pub preemptions: u32,
}

/// Something that happened, and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// The first token of the answer.
    FirstToken { job: JobId, at: Timestamp },
    /// A further token.
    Token { job: JobId, at: Timestamp },
    /// The blocks ran out and the job went back to the queue; what it said so far stands.
    Preempted { job: JobId, at: Timestamp },
    /// The end, exactly once for every job that was taken.
    Finished { job: JobId, at: Timestamp, report: JobReport },
}

/// What the cache has stored and dropped in one step, in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvBatch {
    /// The end of the step: when an engine tells of it.
    pub at: Timestamp,
    /// At least one.
    pub events: Vec<KvEvent>,
}

/// What the queues and the cache hold now.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Jobs in the batch.
    pub running: usize,
    /// Jobs in the queue.
    pub waiting: usize,
    /// Those of them that wait for an adapter's slot.
    pub deferred: usize,
    /// Part of the blocks that jobs refer to, 0..=1.
    pub kv_usage: f64,
}

/// The engine.
#[derive(Debug)]
pub struct Engine {
    config: EngineConfig,
    kv: KvCache,
    /// Ordered by arrival; the preempted stand in front.
    waiting: VecDeque<Sequence>,
    /// Ordered by admission; the last is the first to be preempted.
    running: Vec<Sequence>,
    /// End of the step that is under way.
    step_ends: Option<Timestamp>,
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
            config,
            kv,
            waiting: VecDeque::new(),
            running: Vec::new(),
            step_ends: None,
            deferred: 0,
            stats: EngineStats::default(),
            kv_batches: Vec::new(),
        }
    }

    /// Ends all jobs and begins anew with an empty cache and nothing counted, as a new process would.
    pub fn restart(&mut self, now: Timestamp, events: &mut Vec<EngineEvent>) {
        for sequence in self.running.iter().chain(&self.waiting) {
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

    /// Totals since the start.
    #[must_use]
    pub fn stats(&self) -> &EngineStats {
        &self.stats
    }

    /// Queues and cache as they are.
    #[must_use]
    pub fn load(&self) -> Load {
        Load {
            running: self.running.len(),
            waiting: self.waiting.len(),
            deferred: self.deferred.min(self.waiting.len()),
            kv_usage: f64::from(self.kv.used()) / f64::from(self.kv.total().max(1)),
        }
    }

    /// Adapters with running and with waiting jobs, each name once, in order of admission.
    #[must_use]
    pub fn loras(&self) -> (Vec<Arc<str>>, Vec<Arc<str>>) {
        (distinct_loras(self.running.iter()), distinct_loras(self.waiting.iter()))
    }

    /// What the cache stored and dropped in the steps since the last call, oldest first. Whoever builds an engine with
    /// [`EngineConfig::kv_events`] must ask from time to time.
    pub fn take_kv_batches(&mut self) -> Vec<KvBatch> {
        std::mem::take(&mut self.kv_batches)
    }

    /// The page table: every block that can be found and the number of its copies, in no order.
    pub fn held_blocks(&self) -> impl Iterator<Item = (BlockHash, usize)> {
        self.kv.held()
    }

    /// Forgets the cache; false, and nothing changed, while a job has blocks. The event comes with the next step, as vLLM's does: an
    /// engine without work tells nobody.
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
            && self.waiting.len() >= limit as usize
        {
            self.stats.rejected_queue_full += 1;
            return Err(Refused::QueueFull { waiting: self.waiting.len(), limit });
        }
        let root = BlockHash::root(&self.config.model, job.lora.as_deref(), job.cache_salt.as_deref());
        self.waiting.push_back(Sequence::new(now, job, root, self.config.block_size, room, self.kv.is_recording()));
        self.stats.submitted += 1;
        Ok(())
    }

    /// Ends a job early and gives its blocks back at once. False when there is no such job any more.
    pub fn cancel(&mut self, now: Timestamp, id: JobId, events: &mut Vec<EngineEvent>) -> bool {
        let sequence = if let Some(index) = self.running.iter().position(|sequence| sequence.id == id) {
            self.running.remove(index)
        } else if let Some(sequence) =
            self.waiting.iter().position(|sequence| sequence.id == id).and_then(|index| self.waiting.remove(index))
        {
            sequence
        } else {
            return false;
        };
        self.stats.aborted += 1;
        events.push(EngineEvent::Finished { job: id, at: now, report: sequence.report(FinishReason::Abort) });
        self.kv.release(sequence.table);
        true
    }

    /// When [`Engine::advance`] has something to do next; `None` while there is nothing to do.
    #[must_use]
    pub fn next_event_at(&self) -> Option<Timestamp> {
        self.step_ends.or_else(|| self.waiting.front().map(|sequence| sequence.arrived))
    }

    /// Lets time pass up to `now` and appends what happened, in order. Steps follow each other without a gap while there is work, so a
    /// caller that comes late does not slow the engine down.
    pub fn advance(&mut self, now: Timestamp, events: &mut Vec<EngineEvent>) {
        while let Some(at) = self.next_event_at().filter(|at| *at <= now) {
            if self.step_ends.take().is_some() {
                self.complete_step(at, events);
            }
            self.start_step(at, events);
        }
    }

    /// Chooses the work of the next step as vLLM's scheduler does: first what runs, in order of admission, then what waits, as long as
    /// there are tokens in the budget, seats in the batch and blocks in the cache.
    fn start_step(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) {
        let mut budget = self.config.max_num_batched_tokens.max(1);
        let mut work = StepWork::default();
        let preempted = self.schedule_running(at, &mut budget, &mut work, events);
        self.deferred = 0;
        if !preempted {
            self.admit(at, &mut budget, &mut work);
        }
        if self.running.iter().any(|sequence| sequence.scheduled > 0) {
            self.stats.steps += 1;
            self.step_ends = Some(at.after(self.config.latency.step(work)));
        }
    }

    /// True when a job had to give way; nothing new is then admitted in this step.
    fn schedule_running(
        &mut self,
        at: Timestamp,
        budget: &mut u32,
        work: &mut StepWork,
        events: &mut Vec<EngineEvent>,
    ) -> bool {
        let mut preempted = false;
        let mut index = 0;
        while *budget > 0 && index < self.running.len() {
            let Some(sequence) = self.running.get_mut(index) else { break };
            let tokens = sequence.uncomputed().min(*budget);
            let fresh = sequence.missing_blocks(tokens, self.config.block_size);
            if self.kv.extend(&mut sequence.table, fresh) {
                sequence.schedule(tokens, work);
                sequence.seal(&mut self.kv, self.config.block_size, self.config.prefix_caching);
                *budget -= tokens;
                index += 1;
                continue;
            }
            // The one that was admitted last gives way: maybe this one itself, and then the loop ends.
            if let Some(mut victim) = self.running.pop() {
                preempted = true;
                self.stats.preemptions += 1;
                events.push(EngineEvent::Preempted { job: victim.id, at });
                self.kv.release(victim.reset());
                self.waiting.push_front(victim);
            }
        }
        preempted
    }

    fn admit(&mut self, at: Timestamp, budget: &mut u32, work: &mut StepWork) {
        let mut active = distinct_loras(self.running.iter());
        let mut index = 0;
        while *budget > 0 && self.running.len() < self.config.max_num_seqs.max(1) as usize {
            let Some(candidate) = self.waiting.get(index).filter(|sequence| sequence.arrived <= at) else { break };
            if let Some(lora) = &candidate.lora
                && !active.contains(lora)
                && active.len() >= self.config.max_loras.max(1) as usize
            {
                // Others may pass a job whose adapter has no slot.
                self.deferred += 1;
                index += 1;
                continue;
            }
            let Some(mut sequence) = self.waiting.remove(index) else { break };
            if !self.place(&mut sequence, *budget) {
                self.waiting.insert(index, sequence);
                break;
            }
            if sequence.admitted.is_none() {
                sequence.admitted = Some(at);
                self.stats.queue.observe_time(at.since(sequence.arrived));
                self.stats.prefix_queries += u64::from(sequence.prompt_tokens);
                self.stats.prefix_hits += u64::from(sequence.cached_tokens);
            }
            let tokens = sequence.uncomputed().min(*budget);
            sequence.schedule(tokens, work);
            sequence.seal(&mut self.kv, self.config.block_size, self.config.prefix_caching);
            *budget -= tokens;
            if let Some(lora) = sequence.lora.as_ref().filter(|lora| !active.contains(lora)) {
                active.push(lora.clone());
            }
            self.running.push(sequence);
        }
    }

    /// Gives a sequence its cached blocks and those for its first chunk; false when there is no room.
    fn place(&mut self, sequence: &mut Sequence, budget: u32) -> bool {
        let block_size = self.config.block_size;
        // The last token is always computed: its output is what the answer starts from.
        let reusable = sequence.known_tokens().saturating_sub(1) / block_size;
        let chain = sequence.chain.get(..reusable as usize).unwrap_or_default();
        let hits = if self.config.prefix_caching { self.kv.matched(chain) } else { 0 };
        let cached = u32::try_from(hits).unwrap_or(u32::MAX).saturating_mul(block_size);
        let tokens = sequence.known_tokens().saturating_sub(cached).min(budget);
        let fresh = (cached + tokens).div_ceil(block_size) - cached / block_size;
        let Some(table) = self.kv.take(chain.get(..hits).unwrap_or_default(), fresh) else { return false };
        sequence.table = table;
        sequence.computed = cached;
        sequence.sealed = hits;
        if sequence.admitted.is_none() {
            sequence.cached_tokens = cached;
        }
        true
    }

    /// Ends the step: whoever has all its known tokens computed says the next one.
    fn complete_step(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) {
        let Self { kv, running, stats, config, kv_batches, .. } = self;
        for sequence in running.iter_mut() {
            sequence.computed += std::mem::take(&mut sequence.scheduled);
            if sequence.uncomputed() > 0 {
                continue;
            }
            if sequence.first_token.is_none() {
                stats.prompt_tokens += u64::from(sequence.prompt_tokens);
                stats.ttft.observe_time(at.since(sequence.arrived));
            }
            if sequence.target > 0 {
                if let Some(last) = sequence.last_token {
                    stats.inter_token.observe_time(at.since(last));
                }
                stats.generation_tokens += 1;
                let job = sequence.id;
                let first = sequence.say(at, config.block_size);
                events.push(if first { EngineEvent::FirstToken { job, at } } else { EngineEvent::Token { job, at } });
            }
            sequence.done = sequence.generated >= sequence.target;
        }
        for sequence in running.extract_if(.., |sequence| sequence.done) {
            let report = sequence.report(sequence.ends_with);
            record_end(stats, at, &sequence, report);
            events.push(EngineEvent::Finished { job: sequence.id, at, report });
            kv.release(sequence.table);
        }
        let events = kv.take_events();
        if !events.is_empty() {
            kv_batches.push(KvBatch { at, events });
        }
    }
}

fn record_end(stats: &mut EngineStats, at: Timestamp, sequence: &Sequence, report: JobReport) {
    match report.reason {
        FinishReason::Stop => stats.finished_stop += 1,
        FinishReason::Length => stats.finished_length += 1,
        FinishReason::Abort => stats.aborted += 1,
    }
    let admitted = sequence.admitted.unwrap_or(sequence.arrived);
    let first = sequence.first_token.unwrap_or(at);
    stats.e2e.observe_time(at.since(sequence.arrived));
    stats.inference.observe_time(at.since(admitted));
    stats.prefill.observe_time(first.since(admitted));
    stats.decode.observe_time(at.since(first));
    stats.request_prompt_tokens.observe(f64::from(report.prompt_tokens));
    stats.request_generation_tokens.observe(f64::from(report.generated_tokens));
}

fn distinct_loras<'a>(sequences: impl Iterator<Item = &'a Sequence>) -> Vec<Arc<str>> {
    let mut names: Vec<Arc<str>> = Vec::new();
    for lora in sequences.filter_map(|sequence| sequence.lora.as_ref()) {
        if !names.contains(lora) {
            names.push(lora.clone());
        }
    }
    names
}
