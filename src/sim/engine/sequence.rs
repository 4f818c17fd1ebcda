//! One job inside the engine: how far it is, the blocks that hold it, and the store of all of
//! them. Private to the engine.

use crate::content::{Contents, Piece};
use crate::engine::{FinishReason, Job, JobId, JobPrompt, JobReport};
use crate::kv::{BlockHash, BlockId, KvBlock, KvCache, KvEvent, content_hash};
use crate::latency::StepWork;
use crate::tokenizer::answer_token;
use attache_types::clock::Timestamp;
use std::ops::{Index, IndexMut};
use std::sync::Arc;
use std::time::Duration;

/// What the events of a job's blocks tell beyond their hashes; kept only where events are recorded.
#[derive(Debug, Default)]
struct Telling {
    /// Hashes of all full blocks.
    contents: Vec<u64>,
    /// The tokens of all of `contents` and maybe more; none where the prompt came in pieces.
    tokens: Option<Vec<u32>>,
    cache_salt: Option<Arc<str>>,
}

/// The known tokens after the last block of the chain.
#[derive(Debug)]
enum Tail {
    Tokens(Vec<u32>),
    Pieces(Contents),
}

/// What a sequence is made with, beside its job.
#[derive(Clone, Copy, Debug)]
pub(super) struct SequenceContext {
    pub(super) now: Timestamp,
    pub(super) root: BlockHash,
    /// Tokens in a block, at least 1.
    pub(super) block_size: u32,
    /// Tokens that fit after the prompt.
    pub(super) room: u32,
    /// Events of its blocks are wanted.
    pub(super) tells: bool,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: JobId,
    pub(super) lora: Option<Arc<str>>,
    pub(super) prompt_tokens: u32,
    /// Found in the cache at the first admission.
    pub(super) cached_tokens: u32,
    /// The prefix cache was searched for the prompt.
    pub(super) looked_up: bool,
    /// Leading tokens of the prompt that another server has; 0 once they are here, or are to be computed after all.
    pub(super) received: u32,
    /// Those of them that came from there.
    pub(super) received_tokens: u32,
    /// How long its blocks stay after its end.
    pub(super) hold: Option<Duration>,
    /// Length of the response, tokens.
    pub(super) target: u32,
    /// Why it ends when it has said them.
    pub(super) ends_with: FinishReason,
    /// Tokens said; while it decodes, those before step `since`.
    pub(super) generated: u32,
    /// Known tokens (prompt and answer so far) whose keys and values are in `table`; while it decodes, those before
    /// step `since`.
    pub(super) computed: u32,
    /// Tokens of the step that is under way, while it reads.
    pub(super) scheduled: u32,
    /// The step before which it began to decode, or was last looked at; `None` while it doesn't decode.
    pub(super) since: Option<u64>,
    /// The number of its admission; 0 while it waits.
    pub(super) rank: u64,
    /// Hashes of full blocks of known tokens: all of the prompt's, and of the answer's those that were asked for.
    pub(super) chain: Vec<BlockHash>,
    /// Leading blocks of `table` that can be found by their hash.
    pub(super) sealed: usize,
    pub(super) table: Vec<BlockId>,
    pub(super) arrived: Timestamp,
    pub(super) admitted: Option<Timestamp>,
    pub(super) first_token: Option<Timestamp>,
    /// Time of the last token; `None` before the first.
    pub(super) last_token: Option<Timestamp>,
    preemptions: u32,
    root: BlockHash,
    block_size: u32,
    tail: Tail,
    /// Tokens of the answer that are in `chain` or `tail`.
    spelled: u32,
    answer_seed: u64,
    telling: Option<Telling>,
}

impl Sequence {
    /// `chain` and `table` are empty; they only bring their memory.
    fn new(job: Job, setting: SequenceContext, chain: Vec<BlockHash>, table: Vec<BlockId>) -> Self {
        let limit = job.max_tokens.min(setting.room);
        let (target, ends_with) = match job.stops_after {
            Some(stop) if stop <= limit => (stop, FinishReason::Stop),
            _ if limit == 0 => (0, FinishReason::Stop),
            _ => (limit, FinishReason::Length),
        };
        let prompt_tokens = job.prompt.tokens();
        let block_size = setting.block_size;
        let mut sequence = Self {
            id: job.id,
            lora: job.lora,
            prompt_tokens,
            cached_tokens: 0,
            looked_up: false,
            received: job.handoff.received.min(prompt_tokens),
            received_tokens: 0,
            hold: job.handoff.hold,
            target,
            ends_with,
            generated: 0,
            computed: 0,
            scheduled: 0,
            since: None,
            rank: 0,
            chain,
            sealed: 0,
            table,
            arrived: setting.now,
            admitted: None,
            first_token: None,
            last_token: None,
            preemptions: 0,
            root: setting.root,
            block_size,
            tail: Tail::Tokens(Vec::new()),
            spelled: 0,
            answer_seed: job.answer_seed,
            telling: setting.tells.then(|| Telling { cache_salt: job.cache_salt, ..Telling::default() }),
        };
        sequence.chain.reserve((prompt_tokens / block_size) as usize);
        match job.prompt {
            JobPrompt::Tokens(tokens) => {
                let blocks = tokens.chunks_exact(block_size as usize);
                sequence.tail = Tail::Tokens(blocks.remainder().to_vec());
                blocks.for_each(|block| sequence.push_block(content_hash(block)));
                if let Some(telling) = &mut sequence.telling {
                    telling.tokens = Some(tokens);
                }
            }
            JobPrompt::Pieces(pieces) => {
                let mut contents = Contents::new(block_size);
                for piece in pieces {
                    contents.push(piece, |content| sequence.push_block(content));
                }
                sequence.tail = Tail::Pieces(contents);
            }
        }
        sequence
    }

    /// Prompt and answer so far.
    pub(super) fn known_tokens(&self) -> u32 {
        self.prompt_tokens + self.generated
    }

    /// Known tokens that are still to be computed.
    pub(super) fn uncomputed(&self) -> u32 {
        self.known_tokens().saturating_sub(self.computed)
    }

    /// Blocks to add before `tokens` more can be computed.
    pub(super) fn missing_blocks(&self, tokens: u32) -> u32 {
        let held = u32::try_from(self.table.len()).unwrap_or(u32::MAX);
        (self.computed + tokens).div_ceil(self.block_size).saturating_sub(held)
    }

    /// Tokens to receive where the first `cached` are here.
    pub(super) fn to_receive(&self, cached: u32) -> u32 {
        self.received.saturating_sub(cached)
    }

    /// If it decodes, takes note of the tokens of all steps before `step`.
    pub(super) fn catch_up(&mut self, step: u64) {
        if let Some(since) = &mut self.since {
            // Never more than an answer has.
            let steps = u32::try_from(step - std::mem::replace(since, step)).unwrap_or(u32::MAX);
            self.computed += steps;
            self.generated += steps;
        }
    }

    /// Takes `tokens` into the step and adds their cost.
    pub(super) fn schedule(&mut self, tokens: u32, work: &mut StepWork) {
        self.scheduled = tokens;
        let before = u64::from(self.computed);
        // One that was preempted may have all but its last token in the cache still.
        if self.generated > 0 && self.uncomputed() == 1 {
            work.decode_sequences += 1;
            work.context_tokens += before;
        } else {
            let tokens = u64::from(tokens);
            work.prefill_tokens += tokens;
            // Token k of the chunk looks at everything before the chunk and at k tokens in it.
            work.prefill_pairs += tokens * before + tokens * (tokens + 1) / 2;
        }
    }

    /// Makes the blocks findable that are full with `computed` tokens computed. Before the step is over, as vLLM does:
    /// who comes in the same step may share.
    pub(super) fn seal(&mut self, kv: &mut KvCache, computed: u32, prefix_caching: bool) {
        let full = (computed / self.block_size) as usize;
        if prefix_caching && full > self.sealed {
            self.spell(full);
            if let (Some(blocks), Some(hashes)) = (self.table.get(self.sealed..full), self.chain.get(self.sealed..full))
            {
                kv.seal(blocks, hashes);
            }
            if let Some(event) = self.stored(full) {
                kv.note(event);
            }
        }
        self.sealed = self.sealed.max(full);
    }

    /// The event of the blocks after the sealed ones, up to the first `full`.
    fn stored(&self, full: usize) -> Option<KvEvent> {
        let telling = self.telling.as_ref()?;
        let block_size = self.block_size as usize;
        let hashes = self.chain.get(self.sealed..full)?;
        let contents = telling.contents.get(self.sealed..full)?;
        let tokens = telling.tokens.as_ref().and_then(|tokens| tokens.get(self.sealed * block_size..full * block_size));
        Some(KvEvent::Stored {
            parent: self.sealed.checked_sub(1).and_then(|last| self.chain.get(last)).copied(),
            blocks: hashes
                .iter()
                .zip(contents)
                .map(|(hash, content)| KvBlock { hash: *hash, content: *content })
                .collect(),
            tokens: tokens.unwrap_or_default().to_vec(),
            lora: self.lora.clone(),
            cache_salt: telling.cache_salt.clone(),
        })
    }

    /// Says a token at the end of a prefill; true when it is the first.
    pub(super) fn say(&mut self, at: Timestamp) -> bool {
        self.generated += 1;
        self.last_token = Some(at);
        let first = self.first_token.is_none();
        self.first_token = self.first_token.or(Some(at));
        first
    }

    /// Forgets what was computed: the job has to start again. Its blocks must have been released.
    pub(super) fn reset(&mut self) {
        self.preemptions += 1;
        self.received = 0;
        self.computed = 0;
        self.scheduled = 0;
        self.sealed = 0;
        self.rank = 0;
        self.spell((self.known_tokens() / self.block_size) as usize);
    }

    pub(super) fn report(&self, reason: FinishReason) -> JobReport {
        JobReport {
            reason,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            received_tokens: self.received_tokens,
            generated_tokens: self.generated,
            preemptions: self.preemptions,
        }
    }

    /// Brings the chain to `full` blocks. An answer's blocks are named when they are needed, and the last
    /// of most answers never is.
    fn spell(&mut self, full: usize) {
        while self.chain.len() < full {
            let tokens = match &mut self.tail {
                Tail::Tokens(tail) => self.block_size - u32::try_from(tail.len()).unwrap_or_default(),
                Tail::Pieces(contents) => self.block_size - contents.partial(),
            };
            let from = self.spelled;
            self.spelled += tokens;
            let mut block = None;
            match &mut self.tail {
                Tail::Tokens(tail) => {
                    let answer = (from..self.spelled).map(|index| answer_token(self.answer_seed, index));
                    tail.extend(answer);
                    if let Some(told) = self.telling.as_mut().and_then(|telling| telling.tokens.as_mut()) {
                        told.extend(tail.iter().skip(tail.len() - tokens as usize));
                    }
                    block = Some(content_hash(tail));
                    tail.clear();
                }
                Tail::Pieces(contents) => {
                    contents.push(Piece { name: self.answer_seed, from, tokens }, |content| block = Some(content));
                }
            }
            self.push_block(block.unwrap_or_default());
        }
    }

    fn push_block(&mut self, content: u64) {
        let parent = self.chain.last().copied().unwrap_or(self.root);
        self.chain.push(parent.then(content));
        if let Some(telling) = &mut self.telling {
            telling.contents.push(content);
        }
    }
}

/// All sequences of an engine, each in a slot that it keeps until it is removed. Slots, and the memory in them, are
/// used again. Indexed by slots that [`Sequences::add`] gave out.
#[derive(Debug, Default)]
pub(super) struct Sequences {
    slots: Vec<Sequence>,
    unused: Vec<u32>,
}

impl Sequences {
    pub(super) fn add(&mut self, job: Job, setting: SequenceContext) -> u32 {
        if let Some(slot) = self.unused.pop() {
            let old = &mut self[slot];
            let mut chain = std::mem::take(&mut old.chain);
            chain.clear();
            let table = std::mem::take(&mut old.table);
            *old = Sequence::new(job, setting, chain, table);
            return slot;
        }
        self.slots.push(Sequence::new(job, setting, Vec::new(), Vec::new()));
        // 2^32 sequences would not fit into memory.
        u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
    }

    /// Gives a slot back, and the sequence's blocks.
    pub(super) fn remove(&mut self, slot: u32, kv: &mut KvCache) {
        let sequence = &mut self[slot];
        kv.release(&mut sequence.table);
        sequence.rank = 0;
        sequence.since = None;
        self.unused.push(slot);
    }
}

impl Index<u32> for Sequences {
    type Output = Sequence;

    fn index(&self, slot: u32) -> &Sequence {
        &self.slots[slot as usize]
    }
}

impl IndexMut<u32> for Sequences {
    fn index_mut(&mut self, slot: u32) -> &mut Sequence {
        &mut self.slots[slot as usize]
    }
}
