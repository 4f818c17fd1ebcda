//! The paged KV cache of a simulated engine: blocks with reference counts, reuse by hash chain, eviction of
//! the least recently freed block.
//!
//! Owns which block holds what and who refers to it, and on demand a record of what was stored and dropped; the engine
//! owns which request has which blocks. Called by `sim::engine`. Imports `sim::content`. The behaviour is vLLM's (v1
//! block pool): a freed block keeps its content until it is needed, a request's blocks are freed from the tail so that
//! shared heads live longest, and two blocks may hold the same content.

use crate::content::mix;
use std::sync::Arc;
use table::BlockTable;
use xxhash_rust::xxh3::{Xxh3, xxh3_64, xxh3_64_with_seed};

mod table;
#[cfg(test)]
mod tests;

/// 8 blocks ahead: what is to be looked up is asked for while eight lookups pass, about as long as memory takes.
const AHEAD: usize = 8;

/// Identity of a block's content together with everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u64);

impl BlockHash {
    /// What the first block of a prompt chains to. Prompts that differ in any of the three share no block.
    #[must_use]
    pub fn root(model: &str, lora: Option<&str>, cache_salt: Option<&str>) -> Self {
        let root = [Some(model), lora, cache_salt].into_iter().fold(0, |before, part| {
            // The length keeps ("ab", "c") apart from ("a", "bc"); u64::MAX keeps a missing part
            // apart from an empty one.
            let length = part.map_or(u64::MAX, |text| text.len() as u64);
            xxh3_64_with_seed(part.unwrap_or_default().as_bytes(), mix(before ^ length))
        });
        Self(root)
    }

    /// The block that holds `content` after this one.
    #[must_use]
    pub fn then(self, content: u64) -> Self {
        let mut bytes = [0; 16];
        let (parent, own) = bytes.split_at_mut(8);
        parent.copy_from_slice(&self.0.to_le_bytes());
        own.copy_from_slice(&content.to_le_bytes());
        Self(xxh3_64(&bytes))
    }
}

/// The content hash of one block of token ids, without its history.
#[must_use]
pub fn content_hash(tokens: &[u32]) -> u64 {
    if cfg!(target_endian = "little") {
        return xxh3_64(bytemuck::cast_slice(tokens));
    }
    let mut hasher = Xxh3::new();
    for token in tokens {
        hasher.update(&token.to_le_bytes());
    }
    hasher.digest()
}

/// Number of a block, 0..total.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The hash as a number.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }
}

/// A full block that can now be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvBlock {
    /// The block and everything before it.
    pub hash: BlockHash,
    /// The block alone: [`content_hash`] of its tokens, or what
    /// [`Contents`](crate::content::Contents) makes of its pieces.
    pub content: u64,
}

/// A change of the cache, as engines publish it to routers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks of one request, each behind the one before it. A block is stored once for every copy: an aligned prompt
    /// that comes again has its last block computed, and held, twice.
    Stored {
        /// The block before the first; `None` at the start of a prompt.
        parent: Option<BlockHash>,
        /// Blocks in the order of the prompt, at least one.
        blocks: Vec<KvBlock>,
        /// The token ids of all blocks; empty when the request came in pieces.
        tokens: Vec<u32>,
        /// LoRA adapter of the request.
        lora: Option<Arc<str>>,
        /// Cache salt of the request.
        cache_salt: Option<Arc<str>>,
    },
    /// One copy of a block made room.
    Removed {
        /// Hash of the block that was evicted.
        hash: BlockHash,
    },
    /// The cache was cleared completely.
    Cleared,
}

/// End of the free list.
const NIL: u32 = u32::MAX;

#[derive(Clone, Debug)]
struct CacheBlock {
    refs: u32,
    /// Whether the block can be found by its content; `hash` and its neighbours in the ring mean nothing otherwise.
    findable: bool,
    hash: BlockHash,
    /// Neighbours in the free list; meaningless while `refs > 0`.
    previous: u32,
    next: u32,
    /// Neighbours in the ring of blocks with equal content, in order of storing; the block itself when
    /// it is the only one.
    older: u32,
    newer: u32,
    /// The last watch that the block was part of, see [`KvCache::watch`].
    watch: u64,
}

const EMPTY: CacheBlock = CacheBlock {
    refs: 0,
    findable: false,
    hash: BlockHash(0),
    previous: NIL,
    next: NIL,
    older: NIL,
    newer: NIL,
    watch: 0,
};

/// The cache. Indexing inside is by ids that only this type gives out, all of them below `blocks.len()`.
#[derive(Debug)]
pub struct KvCache {
    blocks: Vec<CacheBlock>,
    /// Unreferenced blocks, the next to be taken first. A list through `blocks`, so that a hit leaves it in O(1).
    free_head: u32,
    free_tail: u32,
    free: u32,
    /// The oldest holder of each; the others follow in its ring.
    cached: BlockTable,
    evictions: u64,
    /// Number of changes that may let a job in: releases, and evictions of watched blocks.
    openings: u64,
    /// Number of the present watch.
    watch: u64,
    /// Changes since the last call of `take_events`; `None` when they are not recorded.
    record: Option<Vec<KvEvent>>,
}

impl KvCache {
    /// An empty cache of `total` blocks.
    #[must_use]
    pub fn new(total: u32) -> Self {
        let mut cache = Self {
            blocks: vec![EMPTY; total as usize],
            free_head: NIL,
            free_tail: NIL,
            free: 0,
            cached: BlockTable::new(total),
            evictions: 0,
            openings: 0,
            watch: 0,
            record: None,
        };
        for id in 0..total {
            cache.push_free(id);
        }
        cache
    }

    /// The same cache with a record of its events, to be emptied by [`KvCache::take_events`].
    #[must_use]
    pub fn recording(self) -> Self {
        Self { record: Some(Vec::new()), ..self }
    }

    /// Whether changes are recorded as events.
    #[must_use]
    pub fn is_recording(&self) -> bool {
        self.record.is_some()
    }

    /// Adds to the record, if there is one.
    pub fn note(&mut self, event: KvEvent) {
        if let Some(record) = &mut self.record {
            record.push(event);
        }
    }

    /// What happened since the last call, in order.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.record.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// What can be found, each with the number of its copies, in no order.
    pub fn held(&self) -> impl Iterator<Item = (BlockHash, usize)> {
        let ring = move |first: u32| {
            let newer = move |id: &u32| Some(self.blocks[*id as usize].newer).filter(|next| *next != first);
            std::iter::successors(Some(first), newer)
        };
        self.cached.blocks().map(move |first| (self.blocks[first as usize].hash, ring(first).count()))
    }

    /// Forgets what all blocks hold; false, and nothing changed, while a request refers to one.
    pub fn clear(&mut self) -> bool {
        if self.used() > 0 {
            return false;
        }
        self.cached.clear();
        for block in &mut self.blocks {
            block.findable = false;
        }
        self.note(KvEvent::Cleared);
        true
    }

    /// Number of blocks, free ones included.
    #[must_use]
    pub fn total(&self) -> u32 {
        u32::try_from(self.blocks.len()).unwrap_or(u32::MAX)
    }

    /// Blocks that no request refers to, whether they still hold something or not.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Blocks that requests refer to.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.total() - self.free
    }

    /// Blocks whose content was dropped to make room, since the start.
    #[must_use]
    pub fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Watches the blocks of `table` in place of others. Returns the number of openings, see [`KvCache::openings`].
    pub fn watch(&mut self, table: &[BlockId]) -> u64 {
        self.watch += 1;
        for id in table {
            self.blocks[id.0 as usize].watch = self.watch;
        }
        self.openings
    }

    /// Number of releases and of evictions of watched blocks so far. Until the next one, the number of free blocks only
    /// falls, and what was found with the watched blocks can be found with them.
    #[must_use]
    pub fn openings(&self) -> u64 {
        self.openings
    }

    /// Whether a block can be found.
    #[must_use]
    pub fn holds(&self, hash: BlockHash) -> bool {
        self.holder(hash).is_some()
    }

    /// Appends the holders of the leading blocks of `chain` that are held: what [`KvCache::take`] can take.
    pub fn find(&self, chain: &[BlockHash], table: &mut Vec<BlockId>) {
        for (index, hash) in chain.iter().enumerate() {
            if let Some(later) = chain.get(index + AHEAD) {
                self.cached.prefetch(*later);
            }
            match self.holder(*hash) {
                Some(id) => table.push(BlockId(id)),
                None => return,
            }
        }
    }

    /// Takes the blocks of `table`, which [`KvCache::find`] has just found, and appends `fresh` new ones; false, and
    /// nothing changed, when there is no room.
    pub fn take(&mut self, table: &mut Vec<BlockId>, fresh: u32) -> bool {
        // A hit on an unreferenced block leaves the free list too, so it can't also serve as a new block.
        let from_free = table.iter().filter(|id| self.blocks[id.0 as usize].refs == 0).count();
        if u64::from(fresh) + from_free as u64 > u64::from(self.free) {
            return false;
        }
        for BlockId(id) in table.iter() {
            if self.blocks[*id as usize].refs == 0 {
                self.unlink_free(*id);
            }
            self.blocks[*id as usize].refs += 1;
        }
        self.grow(table, fresh);
        true
    }

    /// Adds `fresh` new blocks to `table`; false, and nothing changed, when there is no room.
    pub fn extend(&mut self, table: &mut Vec<BlockId>, fresh: u32) -> bool {
        if fresh > self.free {
            return false;
        }
        self.grow(table, fresh);
        true
    }

    /// Makes blocks findable: they are full, and this is what they hold.
    pub fn seal(&mut self, blocks: &[BlockId], hashes: &[BlockHash]) {
        for (index, (BlockId(id), hash)) in blocks.iter().zip(hashes).enumerate() {
            if let Some(later) = hashes.get(index + AHEAD) {
                self.cached.prefetch(*later);
            }
            self.seal_one(*id, *hash);
        }
    }

    fn seal_one(&mut self, id: u32, hash: BlockHash) {
        if self.blocks[id as usize].findable {
            return;
        }
        let (older, newer) = match self.holder(hash) {
            // Behind the newest, which stands before the oldest in the ring.
            Some(oldest) => (self.blocks[oldest as usize].older, oldest),
            None => {
                self.cached.insert(hash, id);
                (id, id)
            }
        };
        self.blocks[older as usize].newer = id;
        self.blocks[newer as usize].older = id;
        let block = &mut self.blocks[id as usize];
        *block = CacheBlock { findable: true, hash, older, newer, ..*block };
    }

    fn holder(&self, hash: BlockHash) -> Option<u32> {
        self.cached.get(hash, |id| self.blocks[id as usize].hash == hash)
    }

    /// Gives a request's blocks back, the last one first: it is then also the first to be evicted, and the head, which
    /// others are more likely to share, the last. Leaves `table` empty.
    pub fn release(&mut self, table: &mut Vec<BlockId>) {
        self.openings += 1;
        for BlockId(id) in table.drain(..).rev() {
            let block = &mut self.blocks[id as usize];
            block.refs = block.refs.saturating_sub(1);
            if block.refs == 0 {
                self.push_free(id);
            }
        }
    }

    fn grow(&mut self, table: &mut Vec<BlockId>, fresh: u32) {
        let mut ahead = self.free_head;
        for _ in 0..AHEAD.min(fresh as usize) {
            ahead = self.prefetch_eviction(ahead);
        }
        for _ in 0..fresh {
            let id = self.free_head;
            if id == NIL {
                return;
            }
            ahead = self.prefetch_eviction(ahead);
            self.unlink_free(id);
            self.forget(id);
            self.blocks[id as usize].refs = 1;
            table.push(BlockId(id));
        }
    }

    /// Brings near what will be asked for when this free block is forgotten; the next one.
    fn prefetch_eviction(&self, id: u32) -> u32 {
        let Some(block) = self.blocks.get(id as usize) else { return NIL };
        if block.findable {
            self.cached.prefetch(block.hash);
        }
        block.next
    }

    fn forget(&mut self, id: u32) {
        let CacheBlock { findable, hash, older, newer, .. } = self.blocks[id as usize];
        if !findable {
            return;
        }
        self.blocks[id as usize].findable = false;
        self.evictions += 1;
        self.openings += u64::from(self.blocks[id as usize].watch == self.watch);
        if self.is_recording() {
            self.note(KvEvent::Removed { hash });
        }
        if newer == id {
            self.cached.remove(hash, id);
            return;
        }
        self.blocks[older as usize].newer = newer;
        self.blocks[newer as usize].older = older;
        if self.holder(hash) == Some(id) {
            self.cached.replace(hash, id, newer);
        }
    }

    fn push_free(&mut self, id: u32) {
        let tail = self.free_tail;
        let block = &mut self.blocks[id as usize];
        block.previous = tail;
        block.next = NIL;
        if tail == NIL {
            self.free_head = id;
        } else {
            self.blocks[tail as usize].next = id;
        }
        self.free_tail = id;
        self.free += 1;
    }

    fn unlink_free(&mut self, id: u32) {
        let CacheBlock { previous, next, .. } = self.blocks[id as usize];
        if previous == NIL {
            self.free_head = next;
        } else {
            self.blocks[previous as usize].next = next;
        }
        if next == NIL {
            self.free_tail = previous;
        } else {
            self.blocks[next as usize].previous = previous;
        }
        self.free -= 1;
    }
}
