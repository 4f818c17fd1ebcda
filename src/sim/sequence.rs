//! One job inside the engine: how far it is, and the blocks that hold it. Private to the engine.

use crate::clock::Timestamp;
use crate::sim::engine::{FinishReason, Job, JobId, JobPrompt, JobReport};
use crate::sim::kv::{BlockHash, BlockId, KvBlock, KvCache, KvEvent, content_hash};
use crate::sim::latency::StepWork;
use crate::sim::tokenizer::answer_token;
use std::sync::Arc;

impl JobPrompt {
    /// Length in tokens.
    #[must_use]
    pub fn tokens(&self) -> u32 {
        match self {
            JobPrompt::Tokens(tokens) => u32::try_from(tokens.len()).unwrap_or(u32::MAX),
            JobPrompt::Blocks { tokens, .. } => *tokens,
        }
    }
}

/// What the events of a job's blocks tell beyond their hashes; kept only where events are recorded.
#[derive(Debug, Default)]
struct Telling {
    /// Of all full blocks.
    contents: Vec<u64>,
    /// All known tokens; none where the prompt came as hashes of content.
    tokens: Option<Vec<u32>>,
    cache_salt: Option<Arc<str>>,
}

#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: JobId,
    pub(super) lora: Option<Arc<str>>,
    pub(super) prompt_tokens: u32,
    /// Found in the cache at the first admission.
    pub(super) cached_tokens: u32,
    /// Tokens it will say.
    pub(super) target: u32,
    /// Why it ends when it has said them.
    pub(super) ends_with: FinishReason,
    pub(super) generated: u32,
    /// Known tokens (prompt and answer so far) whose keys and values are in `table`.
    pub(super) computed: u32,
    /// Tokens of the step that is under way.
    pub(super) scheduled: u32,
    pub(super) done: bool,
    /// Hashes of all full blocks of known tokens.
    pub(super) chain: Vec<BlockHash>,
    /// Leading blocks of `table` that can be found by their hash.
    pub(super) sealed: usize,
    pub(super) table: Vec<BlockId>,
    pub(super) arrived: Timestamp,
    pub(super) admitted: Option<Timestamp>,
    pub(super) first_token: Option<Timestamp>,
    pub(super) last_token: Option<Timestamp>,
    preemptions: u32,
    root: BlockHash,
    /// Known tokens after the last full block.
    tail: Vec<u32>,
    answer_seed: u64,
    telling: Option<Telling>,
}

impl Sequence {
    /// `room`: tokens that fit after the prompt. `tells`: events of its blocks are wanted.
    pub(super) fn new(now: Timestamp, job: Job, root: BlockHash, block_size: u32, room: u32, tells: bool) -> Self {
        let prompt_tokens = job.prompt.tokens();
        let limit = job.max_tokens.min(room);
        let (target, ends_with) = match job.stops_after {
            Some(stop) if stop <= limit => (stop, FinishReason::Stop),
            _ if limit == 0 => (0, FinishReason::Stop),
            _ => (limit, FinishReason::Length),
        };
        let mut sequence = Self {
            id: job.id,
            lora: job.lora,
            prompt_tokens,
            cached_tokens: 0,
            target,
            ends_with,
            generated: 0,
            computed: 0,
            scheduled: 0,
            done: false,
            chain: Vec::with_capacity((prompt_tokens / block_size) as usize),
            sealed: 0,
            table: Vec::new(),
            arrived: now,
            admitted: None,
            first_token: None,
            last_token: None,
            preemptions: 0,
            root,
            tail: Vec::new(),
            answer_seed: job.answer_seed,
            telling: tells.then(|| Telling { cache_salt: job.cache_salt, ..Telling::default() }),
        };
        match job.prompt {
            JobPrompt::Tokens(tokens) => {
                let (blocks, tail) = tokens.split_at(tokens.len() - tokens.len() % block_size as usize);
                for block in blocks.chunks(block_size as usize) {
                    sequence.push_block(content_hash(block));
                }
                sequence.tail.extend_from_slice(tail);
                if let Some(telling) = &mut sequence.telling {
                    telling.tokens = Some(tokens);
                }
            }
            JobPrompt::Blocks { contents, .. } => {
                let full = (prompt_tokens / block_size) as usize;
                for content in contents.iter().take(full) {
                    sequence.push_block(*content);
                }
                // Stand-ins for the tokens of the last, partial block, so that an answer's first block follows from them.
                let partial = contents.get(full).copied().unwrap_or_default();
                sequence.tail.extend((0..prompt_tokens % block_size).map(|i| answer_token(partial, i)));
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
    pub(super) fn missing_blocks(&self, tokens: u32, block_size: u32) -> u32 {
        let held = u32::try_from(self.table.len()).unwrap_or(u32::MAX);
        (self.computed + tokens).div_ceil(block_size).saturating_sub(held)
    }

    /// Takes `tokens` into the step and adds their cost.
    pub(super) fn schedule(&mut self, tokens: u32, work: &mut StepWork) {
        self.scheduled = tokens;
        let before = u64::from(self.computed);
        let tokens = u64::from(tokens);
        if self.generated > 0 && self.uncomputed() == 1 {
            work.decode_sequences += 1;
            work.context_tokens += before;
        } else {
            work.prefill_tokens += tokens;
            // Token k of the chunk looks at everything before the chunk and at k tokens in it.
            work.prefill_pairs += tokens * before + tokens * (tokens + 1) / 2;
        }
    }

    /// Makes the blocks that this step fills findable. Before the step is over, as vLLM does: who comes in the same step may share.
    pub(super) fn seal(&mut self, kv: &mut KvCache, block_size: u32, prefix_caching: bool) {
        let full = ((self.computed + self.scheduled) / block_size) as usize;
        if prefix_caching && full > self.sealed {
            for (block, hash) in self.table.iter().zip(&self.chain).take(full).skip(self.sealed) {
                kv.seal(*block, *hash);
            }
            if let Some(event) = self.stored(full, block_size as usize) {
                kv.note(event);
            }
        }
        self.sealed = self.sealed.max(full);
    }

    /// The event of the blocks after the sealed ones, up to the first `full`.
    fn stored(&self, full: usize, block_size: usize) -> Option<KvEvent> {
        let telling = self.telling.as_ref()?;
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

    /// Says the next token; true when it is the first.
    pub(super) fn say(&mut self, at: Timestamp, block_size: u32) -> bool {
        let token = answer_token(self.answer_seed, self.generated);
        self.tail.push(token);
        if let Some(tokens) = self.telling.as_mut().and_then(|telling| telling.tokens.as_mut()) {
            tokens.push(token);
        }
        self.generated += 1;
        if self.tail.len() >= block_size as usize {
            self.push_block(content_hash(&self.tail));
            self.tail.clear();
        }
        self.last_token = Some(at);
        let first = self.first_token.is_none();
        self.first_token = self.first_token.or(Some(at));
        first
    }

    /// Forgets what was computed and hands the blocks over: the job has to start again.
    pub(super) fn reset(&mut self) -> Vec<BlockId> {
        self.preemptions += 1;
        self.computed = 0;
        self.scheduled = 0;
        self.sealed = 0;
        std::mem::take(&mut self.table)
    }

    pub(super) fn report(&self, reason: FinishReason) -> JobReport {
        JobReport {
            reason,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            generated_tokens: self.generated,
            preemptions: self.preemptions,
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
