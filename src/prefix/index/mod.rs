//! The index of which KV cache holds which block: a run-compressed trie with one writer, for which readers never wait.
//!
//! | module | content |
//! |---|---|
//! | [`memory`], [`arena`] | the memory range, its chunks and its buddy allocator |
//! | [`run`], [`cover`], [`ranges`] | a sequence of blocks; how much of it each holder has, gaps included |
//! | [`children`] | hash table of child runs |
//! | [`lookup`], [`mod@matches`] | the readers' walk and its result |
//! | [`writer`], [`shrink`] | runs created and extended; shortened and freed |
//! | [`store`], [`removal`] | blocks that engines report as stored; as dropped |
//! | [`guess`], [`eviction`] | estimated blocks; their eviction |
//! | [`transfer`], [`export`], [`import`], [`recency`] | copies of estimated blocks for another index; their age |
//! | [`tenants`], [`list`] | the tenants' bills for estimated blocks; linked lists in the arena |
//! | [`table`], [`page`], [`holders`], [`columns`] | the writer's hash map; holders; columns and their reuse |
//! | [`shares`] | shares of KV caches when memory is exhausted; eviction of reported blocks |
//! | [`weight`] | decayed count of the blocks that each holder stored |
//!
//! The first block of a prompt is identified by all 64 bits of its key, every other one by 32 bits. Where n contents
//! follow the same blocks, a further one is confused with one of them with a probability of n · 2^-32, at the block
//! where they diverge. Readers check versions instead of taking locks; see [`lookup`].

mod arena;
mod children;
mod columns;
mod cover;
mod eviction;
mod export;
mod guess;
mod holders;
mod import;
mod in_use;
mod list;
mod lookup;
mod matches;
mod memory;
mod page;
mod ranges;
mod recency;
mod removal;
mod run;
mod shares;
mod shrink;
mod store;
mod table;
mod tenants;
mod transfer;
mod types;
mod weight;
mod writer;

pub use in_use::InUse;
pub use matches::{Depth, Kept, Match, Matches};
pub use transfer::{ExportChunk, ExportCursor, ExportHolder, ExportRun, ImportError};
pub use types::{
    Blocks, HolderId, IndexConfig, LEAST_SHARE, Origin, Stats, StoreEffect, StoredBlock, TenantId, Tier, UnknownParent,
};

use crate::atomics::{
    AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering::Relaxed, Ordering::Release, spin_loop, unique,
};
use crate::key::{BlockKey, BlockKeys, EngineHash};
use arena::{Addr, Arena, Space};
use attache_types::clock::Timestamp;
use children::{Children, spread};
use columns::Columns;
use cover::{Column, MAX_COLUMNS};
use guess::Guesses;
use holders::Holders;
use table::WordTable;
use weight::HolderWeights;
use writer::{HolderPlane, Writer};

/// Owner of columns without a holder.
const NOBODY: u32 = u32::MAX;

/// The part of the index that readers see.
#[derive(Debug)]
struct ReaderView {
    arena: Arena,
    children: Children,
    /// The holder of each column, in groups of 64, and a version that is odd while one of them changes.
    owners: Box<[[AtomicU32; 64]]>,
    owners_version: AtomicU64,
    /// Unique identity of this index, by which copies of its owners are recognised.
    identity: u64,
    /// Number of columns that were ever assigned.
    columns: AtomicU32,
    weights: HolderWeights,
    /// How often a holder fell short: its reported blocks were refused or evicted for the first time.
    shortages: AtomicU64,
    /// Whether any block was ever stored outside GPU memory.
    tiers: AtomicBool,
    root: Addr,
    seed: u64,
}

/// The index of one pool.
#[derive(Debug)]
pub struct PrefixIndex {
    shared: ReaderView,
    writer: Mutex<Writer>,
    fixed_bytes: usize,
    budget_bytes: usize,
}

impl PrefixIndex {
    /// An empty index. Where the system refuses the memory limit, the index has a
    /// smaller one, which [`Self::stats`] reports.
    #[must_use]
    pub fn new(config: IndexConfig) -> Self {
        let budget = config.budget_bytes;
        let max_columns = (budget / 4096).clamp(64, MAX_COLUMNS as usize) as u32;
        let slots = max_columns as usize;
        // Structures outside the arena have a part of the limit of their own.
        let aside = budget / 32;
        let owners = slots.div_ceil(64);
        let fixed = owners * size_of::<[AtomicU32; 64]>()
            + HolderWeights::fixed_bytes(slots)
            + Columns::fixed_bytes(max_columns)
            + Holders::fixed_bytes(max_columns);
        let children = Children::new(budget, spread(config.seed));
        let fixed = fixed + children.fixed_bytes() + size_of::<Self>();
        // The directories of the two tables double in size; each may take this much of it.
        let directory = aside / 6;
        let names = WordTable::new(directory, spread(config.seed ^ 1));
        let guesses = WordTable::new(directory, spread(config.seed ^ 2));
        let left = budget.saturating_sub(aside + fixed);
        let arena = Arena::new(left.saturating_sub(left / 64));
        let budget_bytes = budget - arena.refused();
        let fixed = fixed + Space::fixed_bytes(&arena);
        let space = Space::new(&arena);
        let mut shared = ReaderView {
            arena,
            children,
            owners: (0..owners).map(|_| std::array::from_fn(|_| AtomicU32::new(NOBODY))).collect(),
            owners_version: AtomicU64::new(0),
            identity: unique(),
            columns: AtomicU32::new(0),
            weights: HolderWeights::new(slots, config.half_life),
            shortages: AtomicU64::new(0),
            tiers: AtomicBool::new(false),
            root: 0,
            seed: spread(config.seed ^ 3),
        };
        let share = f64::from(config.tenant_share.clamp(LEAST_SHARE, 1.0));
        let mut writer = Writer::new(
            space,
            names,
            Holders::new(max_columns),
            Columns::new(max_columns),
            Guesses::new(guesses, share),
            aside / 3,
        );
        shared.root = writer.take_header(&shared).unwrap_or(0);
        shared.children.set_root(shared.root);
        Self { shared, writer: Mutex::new(writer), fixed_bytes: fixed, budget_bytes }
    }

    /// Adds a KV cache. When the limit is reached (8,192, fewer with a small memory limit), the returned id stands for
    /// a holder that never has any block.
    #[must_use]
    pub fn add_holder(&self) -> HolderId {
        let mut writer = self.writer.lock();
        let Some((slot, holder)) = writer.holders.add() else { return HolderId(NOBODY) };
        let column = writer.take_column(&self.shared, slot, holder.0);
        if let Some(h) = writer.holders.get_mut(slot) {
            h.column = column;
        }
        self.shared.weights.clear(slot);
        holder
    }

    /// Removes a KV cache. Readers skip its blocks at once; later writes free their memory.
    pub fn remove_holder(&self, holder: HolderId) {
        let mut writer = self.writer.lock();
        let Some(slot) = writer.holders.slot(holder) else { return };
        self.retire(&mut writer, slot);
        writer.holders.remove(slot);
        writer.sweep_some(&self.shared, 0);
    }

    /// Removes all blocks of a KV cache, like [`Self::remove_holder`], but keeps the holder.
    pub fn clear(&self, holder: HolderId) {
        let mut writer = self.writer.lock();
        let Some(slot) = writer.holders.slot(holder) else { return };
        self.retire(&mut writer, slot);
        writer.sweep_some(&self.shared, 0);
        let column = writer.take_column(&self.shared, slot, holder.0);
        if let Some(h) = writer.holders.get_mut(slot) {
            h.column = column;
        }
    }

    fn retire(&self, writer: &mut Writer, slot: usize) {
        writer.drop_own(&self.shared, slot);
        let Some(h) = writer.holders.get_mut(slot) else { return };
        let (column, newest) = (h.column.take(), std::mem::take(&mut h.newest));
        h.oldest = 0;
        h.in_use.clear();
        (h.is_short, h.behind) = (false, 0);
        h.blocks = Default::default();
        if let Some(column) = column {
            writer.retire(&self.shared, column, newest);
        }
        self.shared.weights.clear(slot);
    }

    /// Stores new `blocks`, as [`Self::report`].
    /// # Errors
    /// [`UnknownParent`] when no holder has reported `parent`.
    pub fn store(
        &self,
        holder: HolderId,
        tier: Tier,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
    ) -> Result<(), UnknownParent> {
        self.report(holder, tier, parent, blocks, Origin::New).map(drop)
    }

    /// Stores `blocks` that an engine reported, each behind the one before it, the first behind `parent`. A new block
    /// that the holder has already counts as another copy, a reused one does not. Blocks for which there is no memory
    /// are counted and skipped.
    /// # Errors
    /// [`UnknownParent`] when no holder has reported `parent`.
    pub fn report(
        &self,
        holder: HolderId,
        tier: Tier,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
        origin: Origin,
    ) -> Result<StoreEffect, UnknownParent> {
        let mut writer = self.writer.lock();
        let Some((slot, column)) = Self::place(&writer, holder) else { return Ok(StoreEffect::default()) };
        if tier != Tier::Gpu {
            self.shared.tiers.store(true, Release);
        }
        let claim = HolderPlane { plane: tier as usize, column };
        let effect = writer.store(&self.shared, slot, claim, parent, (blocks, origin))?;
        self.shared.weights.add(slot, effect.new);
        writer.sweep_some(&self.shared, blocks.len());
        Ok(effect)
    }

    /// Stores blocks on another `tier` for which the engine reports only its names. Stops at the first block that the
    /// holder has on no tier; returns the number of names before it. Blocks that the holder has on the tier already
    /// count as in [`Self::report`].
    pub fn copy(
        &self,
        holder: HolderId,
        tier: Tier,
        names: impl IntoIterator<Item = EngineHash>,
        origin: Origin,
    ) -> usize {
        let mut writer = self.writer.lock();
        let Some((slot, column)) = Self::place(&writer, holder) else { return 0 };
        if tier != Tier::Gpu {
            self.shared.tiers.store(true, Release);
        }
        let claim = HolderPlane { plane: tier as usize, column };
        let (known, new) = writer.copy(&self.shared, slot, claim, names, origin);
        self.shared.weights.add(slot, new);
        writer.sweep_some(&self.shared, known);
        known
    }

    /// Removes one copy of each block that an engine has dropped, as [`Self::remove_to`].
    pub fn remove(&self, holder: HolderId, tier: Tier, hashes: &[EngineHash]) {
        self.remove_to(holder, tier, hashes, None);
    }

    /// Removes one copy of each block that an engine has dropped. If the engine says how many copies of each remain,
    /// that number counts instead of the own one. Names that it has not reported, or not for this tier, are ignored.
    pub fn remove_to(&self, holder: HolderId, tier: Tier, hashes: &[EngineHash], remaining: Option<&[u32]>) {
        let mut writer = self.writer.lock();
        let Some((slot, column)) = Self::place(&writer, holder) else { return };
        let before = writer.total(slot);
        let claim = HolderPlane { plane: tier as usize, column };
        let dropped = writer.remove(&self.shared, slot, claim, hashes, remaining);
        self.shared.weights.cut(slot, dropped, before);
        writer.sweep_some(&self.shared, hashes.len());
    }

    /// Records that a holder has served a prompt: its blocks become the most recently used estimated blocks.
    pub fn record(&self, holder: HolderId, keys: &[BlockKey], tenant: TenantId, now: Timestamp) {
        self.record_locked(&mut self.writer.lock(), holder, keys, tenant, now);
    }

    fn record_locked(
        &self,
        writer: &mut Writer,
        holder: HolderId,
        keys: &[BlockKey],
        tenant: TenantId,
        now: Timestamp,
    ) {
        self.shared.weights.see(now);
        let Some((slot, column)) = Self::place(writer, holder) else { return };
        let most = writer.max_blocks.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
        let keys = keys.get(..keys.len().min(most)).unwrap_or_default();
        let new = writer.record(&self.shared, slot, column, keys, tenant, now);
        writer.keep_max_blocks(&self.shared);
        self.shared.weights.add(slot, new);
        writer.sweep_some(&self.shared, keys.len());
    }

    /// How often a holder fell short: of the blocks that its engine had reported, some were refused or evicted for
    /// lack of memory, for the first time since the holder was cleared.
    #[must_use]
    pub fn shortages(&self) -> u64 {
        self.shared.shortages.load(Relaxed)
    }

    /// Whether blocks that the engine of `holder` reported were refused or evicted, since the holder was last cleared.
    #[must_use]
    pub fn is_short(&self, holder: HolderId) -> bool {
        if self.shortages() == 0 {
            return false;
        }
        let writer = self.writer.lock();
        writer.holders.slot(holder).and_then(|slot| writer.holders.get(slot)).is_some_and(|h| h.is_short)
    }

    /// Marks the blocks of a prompt as used, so that they are evicted after others. It takes the lock only after the
    /// first shortage.
    pub fn mark_used(&self, keys: &[BlockKey]) {
        if self.shortages() > 0 {
            self.writer.lock().mark_used(&self.shared, keys);
        }
    }

    /// Sets whether the estimates of a holder have a share of their own when memory is exhausted. Those of a server
    /// whose engine reports its blocks need none.
    pub fn set_share(&self, holder: HolderId, has_share: bool) {
        let mut writer = self.writer.lock();
        let slot = writer.holders.slot(holder);
        if let Some(h) = slot.and_then(|slot| writer.holders.get_mut(slot)) {
            h.has_share = has_share;
        }
    }

    /// Limits the number of blocks besides the memory limit. Recording a prompt evicts the least recently used
    /// estimated blocks above the limit; blocks that engines report stay.
    pub fn set_max_blocks(&self, blocks: Option<u64>) {
        self.writer.lock().max_blocks = blocks;
    }

    /// Sets the capacity of a holder's GPU memory in blocks. The least recently used estimated blocks beyond it are
    /// evicted, tails first. Without a call there is no such limit.
    pub fn set_capacity(&self, holder: HolderId, blocks: u32) {
        let mut writer = self.writer.lock();
        let Some(slot) = writer.holders.slot(holder) else { return };
        if let Some(h) = writer.holders.get_mut(slot) {
            h.capacity = blocks;
        }
        let before = writer.total(slot);
        writer.keep_capacity(&self.shared, slot);
        self.shared.weights.cut(slot, before.saturating_sub(writer.total(slot)), before);
    }

    /// Finds how much of a prompt each holder has, in one walk that stops when no holder has more. Requests only the
    /// keys that matter. Takes no lock, unless writers have interrupted it dozens of times.
    pub fn lookup<K: BlockKeys>(&self, keys: &mut K, out: &mut Matches) {
        for _ in 0..lookup::TRIES {
            if self.shared.walk(keys, out) {
                return;
            }
            spin_loop();
        }
        let _writer = self.writer.lock();
        self.shared.walk(keys, out);
    }

    /// As [`Self::lookup`], into a result that this thread keeps for the next lookup.
    #[must_use]
    pub fn find<K: BlockKeys>(&self, keys: &mut K) -> Kept {
        let mut found = Kept::of(self.shared.identity);
        self.lookup(keys, &mut found);
        found
    }

    /// Returns the number of blocks that a holder has, each counted half after every half-life. O(1), no lock.
    ///
    /// Stored blocks count from the latest time that any caller has passed in. Dropped blocks take an average part
    /// of the weight with them.
    #[must_use]
    pub fn weight(&self, holder: HolderId, now: Timestamp) -> f64 {
        self.shared.weights.get(holder.slot(), now)
    }

    /// Returns how many blocks a holder has on each tier. Copies count once.
    #[must_use]
    pub fn blocks(&self, holder: HolderId) -> Blocks {
        let writer = self.writer.lock();
        let slot = writer.holders.slot(holder);
        let [gpu, cpu, disk, guessed] = slot.and_then(|s| writer.holders.get(s)).map_or([0; 4], |h| h.blocks);
        Blocks { gpu, cpu, disk, guessed }
    }

    /// Returns the engine's names of the blocks that a holder has on `tier`, in no order. It scans all names, so
    /// requests must not call it.
    #[must_use]
    pub fn held(&self, holder: HolderId, tier: Tier) -> Vec<EngineHash> {
        let mut writer = self.writer.lock();
        let Some((slot, column)) = Self::place(&writer, holder) else { return Vec::new() };
        writer.names_of(&self.shared, slot, HolderPlane { plane: tier as usize, column })
    }

    /// Returns the size and the counters of the index.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let writer = self.writer.lock();
        let own: usize = writer.holders.with_aside().map(|a| a.names.bytes() + a.copies.bytes()).sum();
        let tables = writer.names.bytes() + writer.guesses.table.bytes() + own;
        let headers = writer.header_pages.capacity() * size_of::<Addr>();
        Stats {
            bytes: self.fixed_bytes + writer.space.bytes() + writer.aside + tables + headers,
            budget_bytes: self.budget_bytes,
            mapped_bytes: writer.space.mapped(),
            free_bytes: writer.space.room() * 8,
            names: writer.names.len(),
            holders: writer.holders.live(),
            ..writer.stats
        }
    }

    fn place(writer: &Writer, holder: HolderId) -> Option<(usize, Column)> {
        let slot = writer.holders.slot(holder)?;
        Some((slot, writer.holders.get(slot)?.column?))
    }
}

#[cfg(test)]
mod tests;
