//! What happens in a step: who is scheduled, who has to give way, who is admitted, who says a token, who ends.

use super::batch::BatchSeat;
use super::sequence::Sequence;
use super::{Engine, EngineEvent, FinishReason, JobId, JobReport, KvBatch};
use crate::kv::{BlockHash, KvCache};
use crate::latency::StepWork;
use crate::stats::EngineStats;
use attache_types::clock::Timestamp;

/// A job that found no room. It finds none either while the budget is not smaller, no blocks were released, the blocks
/// that it found are cached, and the first block that it lacked is not. Another job that takes one of these blocks takes
/// as many free blocks as this job then saves.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoRoom {
    job: JobId,
    budget: u32,
    openings: u64,
    missing: Option<BlockHash>,
}

impl NoRoom {
    /// Whether `job` would find no room either with `budget` tokens.
    fn lasts(self, job: JobId, budget: u32, kv: &KvCache) -> bool {
        self.job == job
            && self.budget <= budget
            && self.openings == kv.openings()
            && self.missing.is_none_or(|hash| !kv.holds(hash))
    }
}

impl Engine {
    /// Chooses the work of the next step as vLLM's scheduler does: first what runs, in order of admission, then
    /// what has received its prompt, then what waits, as long as there are tokens in the budget, seats in the batch
    /// and blocks in the cache.
    pub(super) fn start_step(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) {
        self.looked = self.looked.max(at);
        self.expire(at);
        self.receive(at, events);
        self.work = StepWork::default();
        let mut preempted = self.schedule_decoding(at, events);
        let decoding = self.batch.decoding().len();
        self.work.decode_sequences = decoding as u64;
        self.work.context_tokens = self.batch.context;
        let decoding = u32::try_from(decoding).unwrap_or(u32::MAX);
        let mut budget = self.config.max_num_batched_tokens.max(1).saturating_sub(decoding);
        preempted |= self.schedule_reading(at, &mut budget, events);
        self.deferred = 0;
        if !preempted || self.batch.is_empty() {
            self.admit(at, budget, events);
        }
        self.blocked = self.batch.is_empty();
        if !self.batch.is_empty() {
            self.stats.steps += 1;
            self.step_began = at;
            self.step_ends = Some(at.after(self.costs.step(self.work)));
        }
    }

    /// Gives a block to each of those who decode that begins one, and seals the block of each that fills one. True when
    /// a job had to give way; nothing new is then admitted in this step.
    fn schedule_decoding(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) -> bool {
        let mut preempted = false;
        let (begun, filled) = self.batch.due();
        let (mut in_begun, mut in_filled) = (0, 0);
        loop {
            let begins = self.batch.listed(begun, in_begun);
            let fills = self.batch.listed(filled, in_filled).filter(|_| filled != begun);
            // In order of admission, since blocks are evicted in the order in which they are requested. A preempted
            // sequence stands behind, so the places before it stay.
            let seat = match (begins, fills) {
                (Some(begins), Some(fills)) if fills < begins => fills,
                (Some(begins), _) => begins,
                (None, Some(fills)) => fills,
                (None, None) => return preempted,
            };
            if Some(seat) == begins {
                in_begun += 1;
            } else {
                in_filled += 1;
            }
            self.sequences[seat.slot].catch_up(self.batch.step);
            while self.sequences[seat.slot].missing_blocks(1) > 0 {
                if self.kv.extend(&mut self.sequences[seat.slot].table, 1) {
                    break;
                }
                preempted = true;
                // Maybe this one itself, and then it was the last.
                if self.preempt_last(at, events) == Some(seat) {
                    return true;
                }
            }
            let sequence = &mut self.sequences[seat.slot];
            sequence.seal(&mut self.kv, sequence.computed + 1, self.config.prefix_caching);
        }
    }

    /// Goes on with the prompt that the last step left unfinished, if there is one. True when it had to give way.
    fn schedule_reading(&mut self, at: Timestamp, budget: &mut u32, events: &mut Vec<EngineEvent>) -> bool {
        let Some(seat) = self.batch.reading.first().copied() else { return false };
        let sequence = &mut self.sequences[seat.slot];
        let tokens = sequence.uncomputed().min(*budget);
        let fresh = sequence.missing_blocks(tokens);
        if self.kv.extend(&mut sequence.table, fresh) {
            self.schedule(seat.slot, tokens);
            *budget -= tokens;
            return false;
        }
        self.preempt_last(at, events);
        true
    }

    fn schedule(&mut self, slot: u32, tokens: u32) {
        let sequence = &mut self.sequences[slot];
        sequence.schedule(tokens, &mut self.work);
        sequence.seal(&mut self.kv, sequence.computed + tokens, self.config.prefix_caching);
    }

    /// The one that was admitted last goes back to the head of the queue.
    fn preempt_last(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) -> Option<BatchSeat> {
        let seat = self.batch.last()?;
        let decoded = self.sequences[seat.slot].since.is_some();
        self.leave(seat);
        if decoded {
            self.sequences[seat.slot].last_token = Some(at);
        }
        self.start_over(seat.slot, at, events);
        Some(seat)
    }

    /// Sends a sequence back to the queue without blocks.
    fn start_over(&mut self, slot: u32, at: Timestamp, events: &mut Vec<EngineEvent>) {
        let sequence = &mut self.sequences[slot];
        self.stats.preemptions += 1;
        events.push(EngineEvent::Preempted { job: sequence.id, at });
        self.kv.release(&mut sequence.table);
        sequence.reset();
        self.waiting.push_front(slot);
    }

    /// Takes a sequence out of the batch; it keeps its blocks.
    pub(super) fn leave(&mut self, seat: BatchSeat) {
        let sequence = &mut self.sequences[seat.slot];
        sequence.catch_up(self.batch.step);
        sequence.since = None;
        self.batch.leave(seat, sequence.computed);
        self.adapters.remove(sequence.lora.as_ref());
    }

    fn has_seat(&self) -> bool {
        self.batch.len() < self.config.max_num_seqs.max(1) as usize
    }

    /// Takes those into the batch whose prompt has come from elsewhere, in the order in which it came. False
    /// when one finds no room.
    fn admit_received(&mut self, at: Timestamp, budget: &mut u32, events: &mut Vec<EngineEvent>) -> bool {
        let mut index = 0;
        while *budget > 0 && self.has_seat() {
            let Some(slot) = self.transfers.ready.get(index).copied() else { return true };
            let sequence = &mut self.sequences[slot];
            if !self.adapters.admit(sequence.lora.as_ref(), self.config.max_loras) {
                self.deferred += 1;
                index += 1;
                continue;
            }
            let fresh = sequence.missing_blocks(sequence.uncomputed().min(*budget));
            if self.kv.extend(&mut sequence.table, fresh) {
                self.transfers.remove(slot);
                self.join(slot, at, budget);
                continue;
            }
            // With an empty batch, no running job frees blocks: sequences that hold blocks without going on must
            // not wait for each other.
            let last = self.transfers.ready.last().copied().filter(|last| self.batch.is_empty() && *last != slot);
            let Some(last) = last else { return false };
            self.transfers.remove(last);
            self.start_over(last, at, events);
        }
        true
    }

    fn admit(&mut self, at: Timestamp, mut budget: u32, events: &mut Vec<EngineEvent>) {
        if !self.admit_received(at, &mut budget, events) {
            return;
        }
        let mut index = 0;
        while budget > 0 && self.has_seat() {
            let Some(slot) = self.waiting.get(index).copied() else { return };
            let candidate = &self.sequences[slot];
            if candidate.arrived > at {
                return;
            }
            if !self.adapters.admit(candidate.lora.as_ref(), self.config.max_loras) {
                // Others may pass a job whose adapter has no slot.
                self.deferred += 1;
                index += 1;
                continue;
            }
            if !self.place(slot, budget) {
                return;
            }
            self.waiting.remove(index);
            let sequence = &mut self.sequences[slot];
            if !std::mem::replace(&mut sequence.looked_up, true) {
                self.stats.prefix_queries += u64::from(sequence.prompt_tokens);
                self.stats.prefix_hits += u64::from(sequence.cached_tokens);
            }
            if !self.begin_transfer(slot, at, events) {
                self.join(slot, at, &mut budget);
            }
        }
    }

    /// Makes a sequence, which has the blocks for that, the last one of the batch.
    fn join(&mut self, slot: u32, at: Timestamp, budget: &mut u32) {
        let sequence = &mut self.sequences[slot];
        if sequence.admitted.is_none() {
            sequence.admitted = Some(at);
            self.stats.queue.observe_time(at.since(sequence.arrived));
        }
        sequence.rank = self.batch.admit(slot).rank;
        self.adapters.add(sequence.lora.as_ref());
        let tokens = sequence.uncomputed().min(*budget);
        self.schedule(slot, tokens);
        *budget -= tokens;
    }

    /// Gives a sequence its cached blocks and those for what it receives or for its first chunk; false
    /// when there is no room.
    fn place(&mut self, slot: u32, budget: u32) -> bool {
        let block_size = self.config.block_size.max(1);
        let sequence = &mut self.sequences[slot];
        if self.no_room.is_some_and(|no_room| no_room.lasts(sequence.id, budget, &self.kv)) {
            return false;
        }
        // The last token is always computed: its output is what the answer starts from.
        let reusable = match self.config.prefix_caching {
            true => (sequence.known_tokens().saturating_sub(1) / block_size) as usize,
            false => 0,
        };
        let reusable = sequence.chain.get(..reusable).unwrap_or_default();
        self.kv.find(reusable, &mut sequence.table);
        let hits = sequence.table.len();
        let cached = u32::try_from(hits).unwrap_or(u32::MAX).saturating_mul(block_size);
        let tokens = match sequence.to_receive(cached) {
            0 => sequence.known_tokens().saturating_sub(cached).min(budget),
            tokens => tokens,
        };
        let fresh = (cached + tokens).div_ceil(block_size) - cached / block_size;
        if !self.kv.take(&mut sequence.table, fresh) {
            let (missing, openings) = (reusable.get(hits).copied(), self.kv.watch(&sequence.table));
            self.no_room = Some(NoRoom { job: sequence.id, budget, openings, missing });
            sequence.table.clear();
            return false;
        }
        sequence.computed = cached;
        sequence.sealed = hits;
        if !sequence.looked_up {
            sequence.cached_tokens = cached;
        }
        true
    }

    /// Ends the step: sequences whose known tokens are all computed generate the next one.
    pub(super) fn complete_step(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) {
        let decoding = self.batch.decoding();
        if !decoding.is_empty() {
            let said = decoding.len() as u64;
            self.stats.generation_tokens += said;
            // Each of them said its last token when this step began.
            self.stats.inter_token.observe_all(at.since(self.step_began).as_secs_f64(), said);
            if self.config.every_token {
                let token = |seat: &BatchSeat| EngineEvent::Token { job: self.sequences[seat.slot].id, at };
                events.extend(decoding.iter().map(token));
            }
        }
        self.batch.end_step();
        let ended_reading = self.complete_reading(at, events);
        while let Some(seat) = self.batch.ended() {
            if self.sequences[seat.slot].rank == seat.rank {
                self.leave(seat);
                self.finish(seat.slot, at, events);
            }
        }
        for slot in ended_reading {
            self.finish(slot, at, events);
        }
        let told = self.kv.take_events();
        if !told.is_empty() {
            self.kv_batches.push(KvBatch { at, events: told });
        }
    }

    /// Sequences that have read their whole prompt generate a token and decode from now on. Returns
    /// those that end with it.
    fn complete_reading(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) -> Vec<u32> {
        let mut ended = Vec::new();
        while let Some(seat) = self.batch.reading.first().copied() {
            let Self { sequences, stats, batch, .. } = self;
            let sequence = &mut sequences[seat.slot];
            sequence.computed += std::mem::take(&mut sequence.scheduled);
            if sequence.uncomputed() > 0 {
                break;
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
                if sequence.say(at) {
                    events.push(EngineEvent::FirstToken { job, at });
                } else if self.config.every_token {
                    events.push(EngineEvent::Token { job, at });
                }
            }
            let rest = sequence.target.saturating_sub(sequence.generated);
            if rest > 0 {
                sequence.since = Some(batch.step);
                batch.begin_to_decode(seat, sequence.computed, rest);
            } else {
                self.leave(seat);
                ended.push(seat.slot);
            }
        }
        ended
    }

    fn finish(&mut self, slot: u32, at: Timestamp, events: &mut Vec<EngineEvent>) {
        let sequence = &self.sequences[slot];
        let report = sequence.report(sequence.ends_with);
        record_end(&mut self.stats, at, sequence, report);
        events.push(EngineEvent::Finished { job: sequence.id, at, report });
        self.pin(slot, at);
        self.sequences.remove(slot, &mut self.kv);
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
