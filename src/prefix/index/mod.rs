//! Who holds which block: a run-compressed trie with one writer and any number of readers that never wait for it.
//!
//! | room | what is in it |
//! |---|---|
//! | [`memory`], [`arena`] | the one memory, its chunks and its buddy allocator |
//! | [`run`], [`cover`], [`ranges`] | a stretch of blocks: header, tags; who holds how much of it, holes included |
//! | [`children`] | which run hangs where |
//! | [`lookup`], [`matches`] | the readers' walk, its result |
//! | [`writer`], [`store`], [`guess`] | runs made and freed; what engines tell; what is only believed |
//! | [`tenants`], [`list`] | who pays for what is believed; lists in the arena |
//! | [`table`], [`page`], [`holders`], [`columns`] | the writer's map, its pages; who there is; columns and how they are swept |
//! | [`weight`] | how much each holder took in lately |
//!
//! Blocks are known by 32 bits of their keys inside a run and by all 64 where a run begins: two contents are taken for each other
//! with a chance of 2^-32 where they part. Readers check versions instead of taking locks; see [`lookup`].

mod arena;
mod children;
mod columns;
mod cover;
mod guess;
mod holders;
mod list;
mod lookup;
mod matches;
mod memory;
mod page;
mod ranges;
mod run;
mod store;
mod table;
mod tenants;
mod weight;
mod writer;

pub use matches::{Depth, Kept, Match, Matches};

use crate::atomics::{AtomicBool, AtomicU32, AtomicU64, Mutex, Ordering::Release, spin_loop, unique};
use crate::key::{BlockKey, BlockKeys, EngineHash};
use arena::{Addr, Arena, Space};
use attache_types::clock::Timestamp;
use children::{Children, spread};
use columns::Columns;
use cover::{Column, MAX_COLUMNS};
use guess::Guesses;
use holders::Holders;
use std::time::Duration;
use table::Table;
use weight::Weights;
use writer::{Claim, Writer};

/// One KV cache: an endpoint, or one data-parallel rank of it. Given out by [`PrefixIndex::add_holder`], and not again for another
/// one before 65,536 others have had its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HolderId(pub u32);

impl HolderId {
    fn slot(self) -> usize {
        (self.0 & 0xffff) as usize
    }
}

/// Who pays for approximate entries.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u32);

/// Where a block lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The accelerator's own memory.
    Gpu,
    /// The host's memory.
    Cpu,
    /// Anything slower.
    Disk,
}

/// How large an index may get, and how it forgets.
#[derive(Clone, Debug)]
pub struct IndexConfig {
    /// Bytes of all its structures together.
    pub budget_bytes: usize,
    /// Part of what approximate entries can have, which is what engines' own leave of the budget, that those of one tenant keep where all of it
    /// is used up, [`LEAST_SHARE`]..=1.
    pub tenant_share: f32,
    /// After this time a block counts half in [`PrefixIndex::weight`].
    pub half_life: Duration,
    /// Of its hash tables. Secret: whoever knows it can make lookups slow.
    pub seed: u64,
}

/// A block that an engine has stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// The engine's name for it.
    pub hash: EngineHash,
    /// Its content.
    pub key: BlockKey,
}

/// A block was stored behind one that the index does not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the parent block is not in the index")]
pub struct UnknownParent;

/// How many blocks a holder has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// In GPU memory.
    pub gpu: u32,
    /// In host memory.
    pub cpu: u32,
    /// On anything slower.
    pub disk: u32,
    /// Believed to be in GPU memory.
    pub guessed: u32,
}

/// What an index has and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Bytes that its structures take.
    pub bytes: usize,
    /// Bytes that they may take.
    pub budget_bytes: usize,
    /// Those of `bytes` that are mapped and not allocated. They come in huge pages where the system has them, so that it may have given up to one
    /// such page more.
    pub mapped_bytes: usize,
    /// Bytes of these that nothing stands in at the moment.
    pub free_bytes: usize,
    /// Runs of blocks.
    pub runs: usize,
    /// Blocks, each counted once however many hold it.
    pub blocks: usize,
    /// Engines' names for blocks.
    pub names: usize,
    /// Holders.
    pub holders: usize,
    /// Believed blocks forgotten because a holder has no room for more.
    pub evicted_for_capacity: u64,
    /// Believed blocks forgotten because the budget was used up and their tenant had more than its share, while others' were older.
    pub evicted_for_tenant: u64,
    /// Believed blocks forgotten because the budget was used up and none were older.
    pub evicted_for_budget: u64,
    /// Blocks that found no room.
    pub refused_blocks: u64,
}

/// No tenant's share is smaller: those that have half of it, which are looked through for who gives way, are no more than two hundred.
pub const LEAST_SHARE: f32 = 0.01;

/// No holder has this column.
const NOBODY: u32 = u32::MAX;

/// What readers see.
#[derive(Debug)]
struct Shared {
    arena: Arena,
    children: Children,
    /// The holder of each column, 64 of them to a word of a bitset, and a version that is odd while one of them changes.
    owners: Box<[[AtomicU32; 64]]>,
    owners_version: AtomicU64,
    /// Of this index alone: what copies of the owners are known by.
    identity: u64,
    /// Columns that were ever given out.
    columns: AtomicU32,
    weights: Weights,
    /// Whether any block was ever stored outside GPU memory.
    tiers: AtomicBool,
    root: Addr,
    seed: u64,
}

/// The index.
#[derive(Debug)]
pub struct PrefixIndex {
    shared: Shared,
    writer: Mutex<Writer>,
    fixed_bytes: usize,
    budget_bytes: usize,
}

impl PrefixIndex {
    /// An empty one. Where the system refuses to reserve its budget it has a smaller one, which [`Self::stats`] tells.
    #[must_use]
    pub fn new(config: IndexConfig) -> Self {
        let budget = config.budget_bytes;
        let max_columns = (budget / 4096).clamp(64, MAX_COLUMNS as usize) as u32;
        let slots = max_columns as usize;
        // What grows outside the arena gets a slice of its own.
        let aside = budget / 32;
        let owners = slots.div_ceil(64);
        let fixed = owners * size_of::<[AtomicU32; 64]>()
            + Weights::fixed_bytes(slots)
            + Columns::fixed_bytes(max_columns)
            + Holders::fixed_bytes(max_columns);
        let children = Children::new(budget, spread(config.seed));
        let fixed = fixed + children.fixed_bytes() + size_of::<Self>();
        // Of which the tables' directories, which double, may take this much each.
        let directory = aside / 6;
        let names = Table::new(directory, spread(config.seed ^ 1));
        let guesses = Table::new(directory, spread(config.seed ^ 2));
        let left = budget.saturating_sub(aside + fixed);
        let arena = Arena::new(left.saturating_sub(left / 64));
        let budget_bytes = budget - arena.refused();
        let fixed = fixed + Space::fixed_bytes(&arena);
        let space = Space::new(&arena);
        let mut shared = Shared {
            arena,
            children,
            owners: (0..owners).map(|_| std::array::from_fn(|_| AtomicU32::new(NOBODY))).collect(),
            owners_version: AtomicU64::new(0),
            identity: unique(),
            columns: AtomicU32::new(0),
            weights: Weights::new(slots, config.half_life),
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
        Self { shared, writer: Mutex::new(writer), fixed_bytes: fixed, budget_bytes }
    }

    /// Takes in a new KV cache. Where 8,192 of them (fewer in a small budget) are there already, the name given out stands for
    /// one that never holds anything.
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

    /// Forgets a KV cache for good. Its blocks are hidden at once; their memory comes back with the writes that follow.
    pub fn remove_holder(&self, holder: HolderId) {
        let mut writer = self.writer.lock();
        let Some(slot) = writer.holders.slot(holder) else { return };
        self.retire(&mut writer, slot);
        writer.holders.remove(slot);
        writer.sweep_some(&self.shared, 0);
    }

    /// Forgets all that a KV cache holds, like [`Self::remove_holder`], but the holder stays.
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
        h.blocks = Default::default();
        if let Some(column) = column {
            writer.retire(&self.shared, column, newest);
        }
        self.shared.weights.clear(slot);
    }

    /// An engine has stored `blocks`, each behind the one before it, the first behind `parent`. What the holder has already is
    /// another copy of it. Blocks that find no room are counted and left out.
    ///
    /// # Errors
    /// When `parent` is named and no holder has told of it.
    pub fn store(
        &self,
        holder: HolderId,
        tier: Tier,
        parent: Option<EngineHash>,
        blocks: &[StoredBlock],
    ) -> Result<(), UnknownParent> {
        let mut writer = self.writer.lock();
        let Some((slot, column)) = Self::place(&writer, holder) else { return Ok(()) };
        if tier != Tier::Gpu {
            self.shared.tiers.store(true, Release);
        }
        let claim = Claim { plane: tier as usize, column };
        let new = writer.store(&self.shared, slot, claim, parent, blocks)?;
        self.shared.weights.add(slot, new);
        writer.sweep_some(&self.shared, blocks.len());
        Ok(())
    }

    /// An engine has blocks on `tier` too, and says only how it calls them. Takes names up to the first of a block that the holder has
    /// on no tier; how many those are.
    pub fn copy(&self, holder: HolderId, tier: Tier, names: impl IntoIterator<Item = EngineHash>) -> usize {
        let mut writer = self.writer.lock();
        let Some((slot, column)) = Self::place(&writer, holder) else { return 0 };
        if tier != Tier::Gpu {
            self.shared.tiers.store(true, Release);
        }
        let (known, new) = writer.copy(&self.shared, slot, Claim { plane: tier as usize, column }, names);
        self.shared.weights.add(slot, new);
        writer.sweep_some(&self.shared, known);
        known
    }

    /// An engine has dropped blocks: one copy of each. Names that it has not told of, or not for this tier, are passed over.
    pub fn remove(&self, holder: HolderId, tier: Tier, hashes: &[EngineHash]) {
        let mut writer = self.writer.lock();
        let Some((slot, column)) = Self::place(&writer, holder) else { return };
        let before = writer.total(slot);
        let dropped = writer.remove(&self.shared, slot, Claim { plane: tier as usize, column }, hashes);
        self.shared.weights.cut(slot, dropped, before);
        writer.sweep_some(&self.shared, hashes.len());
    }

    /// A holder has served a prompt: its blocks are now believed to lie there, as the most recently used.
    pub fn record(&self, holder: HolderId, keys: &[BlockKey], tenant: TenantId, now: Timestamp) {
        self.shared.weights.see(now);
        let mut writer = self.writer.lock();
        let Some((slot, column)) = Self::place(&writer, holder) else { return };
        let most = writer.max_blocks.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
        let keys = keys.get(..keys.len().min(most)).unwrap_or_default();
        let new = writer.record(&self.shared, slot, column, keys, tenant, now);
        writer.keep_max_blocks(&self.shared);
        self.shared.weights.add(slot, new);
        writer.sweep_some(&self.shared, keys.len());
    }

    /// Blocks that the index may have, beside the bound on its bytes. When a prompt is recorded, guesses above it are dropped, the least
    /// recently used first; what engines tell stays.
    pub fn set_max_blocks(&self, blocks: Option<u64>) {
        self.writer.lock().max_blocks = blocks;
    }

    /// Blocks that a holder's GPU memory has room for: more guesses than that are dropped, the least recently used first, tails
    /// first. Without it there is no such bound.
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

    /// Finds how much of a prompt each holder has, in one walk that stops when nobody has more. Keys are asked for as far as they
    /// matter. Takes no lock, unless the writer has come between some dozens of times.
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

    /// As [`Self::lookup`], into a result that this thread keeps for the next one.
    #[must_use]
    pub fn find<K: BlockKeys>(&self, keys: &mut K) -> Kept {
        let mut found = Kept::of(self.shared.identity);
        self.lookup(keys, &mut found);
        found
    }

    /// Blocks that a holder has, each counted half as much after every half-life. O(1), no lock.
    ///
    /// Stored blocks count from the latest moment that the index has been told of; dropped ones take an average part with them.
    #[must_use]
    pub fn weight(&self, holder: HolderId, now: Timestamp) -> f64 {
        self.shared.weights.get(holder.slot(), now)
    }

    /// How many blocks a holder has on each tier. Copies count once.
    #[must_use]
    pub fn blocks(&self, holder: HolderId) -> Blocks {
        let writer = self.writer.lock();
        let slot = writer.holders.slot(holder);
        let [gpu, cpu, disk, guessed] = slot.and_then(|s| writer.holders.get(s)).map_or([0; 4], |h| h.blocks);
        Blocks { gpu, cpu, disk, guessed }
    }

    /// The engine's names of the blocks that a holder has on `tier`, in no order. Looks at every name there is: not for the road.
    #[must_use]
    pub fn held(&self, holder: HolderId, tier: Tier) -> Vec<EngineHash> {
        let mut writer = self.writer.lock();
        let Some((slot, column)) = Self::place(&writer, holder) else { return Vec::new() };
        writer.names_of(&self.shared, slot, Claim { plane: tier as usize, column })
    }

    /// What the index has and has done.
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
