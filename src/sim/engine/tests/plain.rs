//! The engine once more, the plain way: every step visits every sequence, every question to the cache looks at all
//! blocks. It has nothing of the real one but what a step costs and what blocks are called.

use super::*;
use crate::content::Contents;
use crate::kv::{KvBlock, KvEvent, content_hash};
use crate::stats::{Histogram, INTER_TOKEN_BUCKETS};
use std::collections::BTreeMap;

#[derive(Default)]
struct Block {
    refs: u32,
    /// What it holds, and when it came to.
    holds: Option<(u64, BlockHash)>,
}

struct Running {
    job: Job,
    arrived: Timestamp,
    target: u32,
    reason: FinishReason,
    generated: u32,
    computed: u32,
    scheduled: u32,
    table: Vec<usize>,
    sealed: usize,
    cached: Option<u32>,
    read: bool,
    last_token: Option<Timestamp>,
    preemptions: u32,
    received: u32,
    came: u32,
}

/// Blocks of a job that has ended.
struct Kept {
    id: JobId,
    tokens: u32,
    table: Vec<usize>,
    until: Timestamp,
}

impl Running {
    fn known(&self) -> u32 {
        self.job.prompt.tokens() + self.generated
    }

    fn known_ids(&self) -> Vec<u32> {
        let JobPrompt::Tokens(tokens) = &self.job.prompt else { return vec![] };
        tokens.iter().copied().chain((0..self.generated).map(|i| answer_token(self.job.answer_seed, i))).collect()
    }

    fn contents(&self, block_size: u32) -> Vec<u64> {
        let mut out = vec![];
        match &self.job.prompt {
            JobPrompt::Tokens(_) => {
                out.extend(self.known_ids().chunks_exact(block_size as usize).map(content_hash));
            }
            JobPrompt::Pieces(pieces) => {
                let mut contents = Contents::new(block_size);
                let answer = Piece::new(self.job.answer_seed, self.generated);
                pieces.iter().chain([&answer]).for_each(|piece| contents.push(*piece, |content| out.push(content)));
            }
        }
        out
    }

    fn chain(&self, config: &EngineConfig) -> Vec<BlockHash> {
        let root = BlockHash::root(&config.model, self.job.lora.as_deref(), self.job.cache_salt.as_deref());
        let then = |parent: &mut BlockHash, content| {
            *parent = parent.then(content);
            Some(*parent)
        };
        self.contents(config.block_size).into_iter().scan(root, then).collect()
    }

    fn report(&self, reason: FinishReason) -> JobReport {
        JobReport {
            reason,
            prompt_tokens: self.job.prompt.tokens(),
            cached_tokens: self.cached.unwrap_or(0),
            received_tokens: self.came,
            generated_tokens: self.generated,
            preemptions: self.preemptions,
        }
    }
}

pub(super) struct Plain {
    config: EngineConfig,
    blocks: Vec<Block>,
    free: VecDeque<usize>,
    sealings: u64,
    waiting: VecDeque<Running>,
    running: Vec<Running>,
    receiving: Vec<(Timestamp, Running)>,
    ready: VecDeque<Running>,
    kept: Vec<Kept>,
    pub(super) expired: u64,
    looked: Timestamp,
    /// Looked at when nobody could begin.
    stuck: bool,
    step_ends: Option<Timestamp>,
    deferred: usize,
    record: Vec<KvEvent>,
    pub(super) batches: Vec<KvBatch>,
    pub(super) steps: u64,
    pub(super) said: u64,
    pub(super) inter_token: Histogram,
    /// Prompts that were read to their end for the first time.
    pub(super) read: u64,
}

impl Plain {
    pub(super) fn new(config: EngineConfig) -> Self {
        Self {
            blocks: (0..config.num_blocks).map(|_| Block::default()).collect(),
            free: (0..config.num_blocks as usize).collect(),
            sealings: 0,
            waiting: VecDeque::new(),
            running: vec![],
            receiving: vec![],
            ready: VecDeque::new(),
            kept: vec![],
            expired: 0,
            looked: Timestamp(0),
            stuck: false,
            step_ends: None,
            deferred: 0,
            record: vec![],
            batches: vec![],
            steps: 0,
            said: 0,
            inter_token: Histogram::new(INTER_TOKEN_BUCKETS),
            read: 0,
            config,
        }
    }

    pub(super) fn load(&self) -> Load {
        Load {
            running: self.running.len(),
            waiting: self.queued(),
            deferred: (self.deferred + self.receiving.len()).min(self.queued()),
            kv_usage: (self.blocks.len() - self.free.len()) as f64 / self.blocks.len() as f64,
        }
    }

    fn queued(&self) -> usize {
        self.waiting.len() + self.receiving.len() + self.ready.len()
    }

    /// Ended jobs with the tokens, the number of blocks and the end of the lease.
    pub(super) fn pinned(&self) -> Vec<(JobId, u32, usize, Timestamp)> {
        self.kept.iter().map(|kept| (kept.id, kept.tokens, kept.table.len(), kept.until)).collect()
    }

    pub(super) fn held(&self) -> BTreeMap<BlockHash, usize> {
        let mut held = BTreeMap::new();
        let hashes = self.blocks.iter().filter_map(|block| block.holds);
        hashes.for_each(|(_, hash)| *held.entry(hash).or_default() += 1);
        held
    }

    pub(super) fn submit(&mut self, now: Timestamp, job: Job) -> bool {
        let (tokens, limit) = (job.prompt.tokens(), self.config.max_request_tokens());
        let full = self.config.max_num_queued.is_some_and(|most| self.queued() >= most as usize);
        if tokens == 0 || tokens > limit || (tokens == limit && job.max_tokens > 0) || full {
            return false;
        }
        let most = job.max_tokens.min(limit - tokens);
        let (target, reason) = match job.stops_after {
            Some(stop) if stop <= most => (stop, FinishReason::Stop),
            _ if most == 0 => (0, FinishReason::Stop),
            _ => (most, FinishReason::Length),
        };
        self.stuck = false;
        self.waiting.push_back(Running {
            received: job.handoff.received.min(tokens),
            came: 0,
            job,
            arrived: now,
            target,
            reason,
            generated: 0,
            computed: 0,
            scheduled: 0,
            table: vec![],
            sealed: 0,
            cached: None,
            read: false,
            last_token: None,
            preemptions: 0,
        });
        true
    }

    pub(super) fn cancel(&mut self, now: Timestamp, id: JobId, events: &mut Vec<EngineEvent>) {
        let place = self.running.iter().position(|r| r.job.id == id).map(|i| self.running.remove(i));
        let place =
            place.or_else(|| self.waiting.iter().position(|r| r.job.id == id).and_then(|i| self.waiting.remove(i)));
        let place = place
            .or_else(|| self.ready.iter().position(|r| r.job.id == id).and_then(|i| self.ready.remove(i)))
            .or_else(|| self.receiving.iter().position(|(_, r)| r.job.id == id).map(|i| self.receiving.remove(i).1));
        if let Some(running) = place {
            self.again(now);
            events.push(EngineEvent::Finished { job: id, at: now, report: running.report(FinishReason::Abort) });
            self.release(running.table);
        }
    }

    pub(super) fn next_event_at(&self) -> Option<Timestamp> {
        if self.step_ends.is_some() {
            return self.step_ends;
        }
        let mut moments: Vec<Timestamp> = vec![];
        if let Some(first) = self.waiting.front().filter(|r| !self.stuck || r.arrived > self.looked) {
            moments.push(first.arrived.max(self.looked));
        }
        if !self.stuck && !self.ready.is_empty() {
            moments.push(self.looked);
        }
        moments.extend(self.receiving.iter().map(|(ends, _)| *ends));
        moments.extend(self.kept.iter().map(|kept| kept.until));
        moments.into_iter().min()
    }

    fn again(&mut self, now: Timestamp) {
        self.stuck = false;
        self.looked = self.looked.max(now);
    }

    fn expire(&mut self, now: Timestamp) {
        self.kept.sort_by_key(|kept| (kept.until, kept.id));
        while self.kept.first().is_some_and(|kept| kept.until <= now) {
            let kept = self.kept.remove(0);
            self.release(kept.table);
            self.expired += 1;
            self.again(now);
        }
    }

    pub(super) fn let_go(&mut self, now: Timestamp, id: JobId) -> bool {
        self.expire(now);
        let Some(index) = self.kept.iter().position(|kept| kept.id == id) else { return false };
        let kept = self.kept.remove(index);
        self.release(kept.table);
        self.again(now);
        true
    }

    pub(super) fn heartbeat(&mut self, now: Timestamp, id: JobId, lease: Duration) -> bool {
        self.expire(now);
        let Some(kept) = self.kept.iter_mut().find(|kept| kept.id == id) else { return false };
        kept.until = now.after(lease);
        true
    }

    /// Takes in what has come.
    fn receive(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) {
        self.receiving.sort_by_key(|(ends, _)| *ends);
        while self.receiving.first().is_some_and(|(ends, _)| *ends <= at) {
            let (_, mut running) = self.receiving.remove(0);
            let full = (running.received / self.config.block_size) as usize;
            if self.config.prefix_caching && full > running.sealed {
                self.seal(&mut running, full);
            }
            running.computed = running.received.min(running.known() - 1);
            running.received = 0;
            events.push(EngineEvent::Received { job: running.job.id, at });
            self.ready.push_back(running);
        }
    }

    pub(super) fn step(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) {
        if self.step_ends.take().is_some() {
            self.complete(at, events);
        }
        self.looked = self.looked.max(at);
        self.expire(at);
        self.receive(at, events);
        let mut budget = self.config.max_num_batched_tokens;
        let mut work = StepWork::default();
        let (mut index, mut preempted) = (0, false);
        while budget > 0 && index < self.running.len() {
            let mut running = self.running.remove(index);
            let tokens = (running.known() - running.computed).min(budget);
            let needed = (running.computed + tokens).div_ceil(self.config.block_size) as usize - running.table.len();
            if needed <= self.free.len() {
                self.schedule(&mut running, tokens, needed, &mut work);
                budget -= tokens;
                self.running.insert(index, running);
                index += 1;
                continue;
            }
            self.running.insert(index, running);
            let victim = self.running.pop().expect("the one that was looked at");
            preempted = true;
            self.start_over(victim, at, events);
        }
        self.deferred = 0;
        if !preempted || self.running.is_empty() {
            self.admit(at, budget, &mut work, events);
        }
        self.stuck = self.running.is_empty();
        if !self.running.is_empty() {
            self.steps += 1;
            self.step_ends = Some(at.after(self.config.latency.step(work)));
        }
    }

    fn start_over(&mut self, mut victim: Running, at: Timestamp, events: &mut Vec<EngineEvent>) {
        events.push(EngineEvent::Preempted { job: victim.job.id, at });
        let table = std::mem::take(&mut victim.table);
        self.release(table);
        (victim.computed, victim.scheduled, victim.sealed, victim.received) = (0, 0, 0, 0);
        victim.preemptions += 1;
        self.waiting.push_front(victim);
    }

    fn adapter_fits(&self, candidate: &Running) -> bool {
        let mut loras: Vec<_> = self.running.iter().filter_map(|r| r.job.lora.clone()).collect();
        loras.sort_unstable();
        loras.dedup();
        let known = candidate.job.lora.as_ref().is_none_or(|lora| loras.contains(lora));
        known || loras.len() < self.config.max_loras as usize
    }

    fn admit_ready(
        &mut self,
        at: Timestamp,
        budget: &mut u32,
        work: &mut StepWork,
        events: &mut Vec<EngineEvent>,
    ) -> bool {
        let mut index = 0;
        while *budget > 0 && self.running.len() < self.config.max_num_seqs as usize && index < self.ready.len() {
            if !self.adapter_fits(&self.ready[index]) {
                self.deferred += 1;
                index += 1;
                continue;
            }
            let running = &self.ready[index];
            let tokens = (running.known() - running.computed).min(*budget);
            let blocks = (running.computed + tokens).div_ceil(self.config.block_size) as usize;
            let fresh = blocks.saturating_sub(running.table.len());
            if fresh <= self.free.len() {
                let mut running = self.ready.remove(index).expect("the candidate");
                self.schedule(&mut running, tokens, fresh, work);
                *budget -= tokens;
                self.running.push(running);
            } else if self.running.is_empty() && index + 1 < self.ready.len() {
                let last = self.ready.pop_back().expect("two or more");
                self.start_over(last, at, events);
            } else {
                return false;
            }
        }
        true
    }

    fn admit(&mut self, at: Timestamp, mut budget: u32, work: &mut StepWork, events: &mut Vec<EngineEvent>) {
        if !self.admit_ready(at, &mut budget, work, events) {
            return;
        }
        let mut index = 0;
        while budget > 0 && self.running.len() < self.config.max_num_seqs as usize {
            let Some(candidate) = self.waiting.get(index).filter(|r| r.arrived <= at) else { return };
            if !self.adapter_fits(candidate) {
                self.deferred += 1;
                index += 1;
                continue;
            }
            let reusable = (candidate.known() - 1) / self.config.block_size;
            let mut hits = vec![];
            for hash in candidate.chain(&self.config).into_iter().take(reusable as usize) {
                let holders = self.blocks.iter().enumerate().filter_map(|(id, b)| Some((b.holds?, id)));
                match holders.filter(|((_, held), _)| *held == hash).min() {
                    Some((_, id)) if self.config.prefix_caching => hits.push(id),
                    _ => break,
                }
            }
            let cached = hits.len() as u32 * self.config.block_size;
            let missing = candidate.received.saturating_sub(cached);
            let tokens = if missing > 0 { missing } else { (candidate.known() - cached).min(budget) };
            let fresh = tokens.div_ceil(self.config.block_size) as usize;
            if fresh + hits.iter().filter(|id| self.blocks[**id].refs == 0).count() > self.free.len() {
                return;
            }
            let mut running = self.waiting.remove(index).expect("the candidate");
            for id in &hits {
                self.blocks[*id].refs += 1;
                self.free.retain(|free| free != id);
            }
            (running.computed, running.sealed, running.table) = (cached, hits.len(), hits);
            running.cached = running.cached.or(Some(cached));
            if missing > 0 {
                running.came = missing;
                self.take_blocks(&mut running, fresh);
                self.receiving.push((at.after(self.config.latency.transfer(missing)), running));
                continue;
            }
            if std::mem::take(&mut running.received) > 0 {
                events.push(EngineEvent::Received { job: running.job.id, at });
            }
            self.schedule(&mut running, tokens, fresh, work);
            budget -= tokens;
            self.running.push(running);
        }
    }

    fn take_blocks(&mut self, running: &mut Running, fresh: usize) {
        for _ in 0..fresh {
            let id = self.free.pop_front().expect("there is room");
            if let Some((_, hash)) = self.blocks[id].holds.take() {
                self.record.push(KvEvent::Removed { hash });
            }
            self.blocks[id].refs = 1;
            running.table.push(id);
        }
    }

    fn schedule(&mut self, running: &mut Running, tokens: u32, fresh: usize, work: &mut StepWork) {
        self.take_blocks(running, fresh);
        let (before, n) = (u64::from(running.computed), u64::from(tokens));
        if running.generated > 0 && running.known() - running.computed == 1 {
            work.decode_sequences += 1;
            work.context_tokens += before;
        } else {
            work.prefill_tokens += n;
            work.prefill_pairs += (1..=n).map(|k| before + k).sum::<u64>();
        }
        running.scheduled = tokens;
        let full = ((running.computed + tokens) / self.config.block_size) as usize;
        if self.config.prefix_caching && full > running.sealed {
            self.seal(running, full);
        }
    }

    fn seal(&mut self, running: &mut Running, full: usize) {
        let (chain, contents) = (running.chain(&self.config), running.contents(self.config.block_size));
        let new = running.sealed..full;
        for index in new.clone() {
            self.sealings += 1;
            self.blocks[running.table[index]].holds = Some((self.sealings, chain[index]));
        }
        let size = self.config.block_size as usize;
        let ids = running.known_ids();
        self.record.push(KvEvent::Stored {
            parent: running.sealed.checked_sub(1).map(|last| chain[last]),
            blocks: new.map(|i| KvBlock { hash: chain[i], content: contents[i] }).collect(),
            tokens: ids.get(running.sealed * size..full * size).unwrap_or_default().to_vec(),
            lora: running.job.lora.clone(),
            cache_salt: running.job.cache_salt.clone(),
        });
        running.sealed = full;
    }

    fn release(&mut self, table: Vec<usize>) {
        for id in table.into_iter().rev() {
            self.blocks[id].refs -= 1;
            if self.blocks[id].refs == 0 {
                self.free.push_back(id);
            }
        }
    }

    fn complete(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) {
        let mut ends = vec![];
        for mut running in std::mem::take(&mut self.running) {
            running.computed += std::mem::take(&mut running.scheduled);
            let job = running.job.id;
            if running.computed < running.known() {
                self.running.push(running);
                continue;
            }
            let first = !std::mem::replace(&mut running.read, true);
            self.read += u64::from(first);
            if running.target > 0 {
                running.generated += 1;
                self.said += 1;
                if let Some(last) = running.last_token.replace(at) {
                    self.inter_token.observe_time(at.since(last));
                }
                events.push(if first { EngineEvent::FirstToken { job, at } } else { EngineEvent::Token { job, at } });
            }
            if running.generated >= running.target {
                ends.push(running);
            } else {
                self.running.push(running);
            }
        }
        for running in ends {
            let report = running.report(running.reason);
            let id = running.job.id;
            events.push(EngineEvent::Finished { job: id, at, report });
            match running.job.handoff.hold {
                Some(lease) => {
                    let (tokens, table) = (running.computed, running.table);
                    self.kept.push(Kept { id, tokens, table, until: at.after(lease) });
                }
                None => self.release(running.table),
            }
        }
        let events = std::mem::take(&mut self.record);
        if self.config.kv_events && !events.is_empty() {
            self.batches.push(KvBatch { at, events });
        }
    }
}
