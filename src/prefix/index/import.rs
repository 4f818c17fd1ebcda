//! Import of chunks of estimated blocks that another index has exported.
//!
//! Imported blocks never evict others for lack of memory: blocks that do not fit are refused. The eviction for a
//! holder's capacity uses the age that the chunk gives. In the eviction for the memory limit, imported blocks count as
//! the oldest.

use super::arena::Addr;
use super::cover::{Column, GUESS};
use super::recency::Moment;
use super::run::{MAX_RUN, Run, RunPosition, same_tags};
use super::table::NoRoom;
use super::transfer::{ExportChunk, ExportHolder, ExportRun, ImportError};
use super::writer::{HolderPlane, Writer};
use super::{HolderId, PrefixIndex, ReaderView, TenantId};
use crate::atomics::unlock_fair;
use crate::key::BlockKey;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::time::Duration;

/// Holders for which the lock is held at once.
const HOLDERS_AT_ONCE: usize = 8;

/// Blocks of an imported run that lie in one run of this index.
#[derive(Clone, Copy, Debug)]
struct Piece {
    run: Addr,
    generation: u32,
    /// Index of its first block in the run of this index.
    from: u32,
    /// Number of blocks of the imported run up to the end of this piece.
    end: u32,
    /// Number of blocks of the run of this index up to the end of this piece.
    to: u32,
}

/// The entries of one holder of an imported run, fewer blocks before more.
struct Uses {
    holder: HolderId,
    entries: Vec<ExportHolder>,
}

/// A run that is being imported.
struct Import<'a> {
    keys: Vec<BlockKey>,
    tenant: TenantId,
    /// Where the run begins.
    parent: Option<(&'a [Piece], u32)>,
    now: Timestamp,
}

impl PrefixIndex {
    /// Records the blocks of a chunk under `holders`, and skips those of other endpoints. Importing a chunk again
    /// changes nothing. Returns the number of blocks that were new to a holder.
    ///
    /// A block that its holder has already keeps its own time of use. Each hold of the lock is short: one run of the
    /// chunk, for at most 8 holders.
    /// # Errors
    /// [`ImportError`] when the chunk is invalid; then nothing of it is imported.
    pub fn import(
        &self,
        chunk: &ExportChunk,
        holders: &dyn Fn(EndpointId) -> Option<HolderId>,
        now: Timestamp,
    ) -> Result<u64, ImportError> {
        chunk.check()?;
        self.shared.weights.see(now);
        let mut places: Vec<Vec<Piece>> = Vec::with_capacity(chunk.runs.len());
        let mut new = 0;
        for run in &chunk.runs {
            let parent = run.parent.map(|parent| places.get(parent as usize).map_or(&[][..], Vec::as_slice));
            let first_key = |at: usize| if at == 0 { u64::from(run.first_key_high) << 32 } else { 0 };
            let keys = run.keys.iter().enumerate().map(|(at, low)| BlockKey(first_key(at) | u64::from(*low))).collect();
            let import =
                Import { keys, tenant: TenantId(run.tenant), parent: parent.map(|parent| (parent, run.offset)), now };
            let mut pieces = Vec::new();
            for uses in uses_of(run, holders).chunks(HOLDERS_AT_ONCE) {
                let mut writer = self.writer.lock();
                new += writer.import(&self.shared, &import, uses, &mut pieces);
                writer.sweep_some(&self.shared, import.keys.len());
                unlock_fair(writer);
            }
            places.push(pieces);
        }
        Ok(new)
    }
}

/// Groups a run's entries by holder, the holder of the most blocks first.
fn uses_of(run: &ExportRun, holders: &dyn Fn(EndpointId) -> Option<HolderId>) -> Vec<Uses> {
    let mut entries = run.holders.clone();
    entries.sort_by_key(|entry| (entry.endpoint, entry.blocks));
    let groups = entries.chunk_by(|a, b| a.endpoint == b.endpoint).filter_map(|entries| {
        let holder = holders(entries.first()?.endpoint)?;
        let mut entries = entries.to_vec();
        // One for each block is enough, whatever was sent.
        entries.dedup_by_key(|entry| entry.blocks);
        Some(Uses { holder, entries })
    });
    let mut groups: Vec<Uses> = groups.collect();
    groups.sort_by_key(|uses| std::cmp::Reverse(uses.blocks()));
    groups
}

impl Uses {
    /// Number of blocks that the holder has.
    fn blocks(&self) -> u32 {
        self.entries.last().map_or(0, |entry| entry.blocks)
    }
}

impl Piece {
    /// Whether the run of this index still has the piece.
    fn is_there(&self, sh: &ReaderView) -> bool {
        let header = Run::at(&sh.arena, self.run);
        let shape = header.shape();
        !header.is_free() && shape.generation == self.generation && shape.len >= self.to
    }
}

impl Import<'_> {
    /// Where the run begins in this index; `None` when its predecessors are not there.
    fn start(&self, sh: &ReaderView) -> Option<RunPosition> {
        let Some((pieces, offset)) = self.parent else { return Some(RunPosition { run: sh.root, offset: 0 }) };
        let piece = pieces.iter().find(|piece| piece.end >= offset)?;
        let piece = Piece { to: piece.to - (piece.end - offset), ..*piece };
        piece.is_there(sh).then_some(RunPosition { run: piece.run, offset: piece.to })
    }

    /// Finds the blocks of the run that this index has.
    fn find(&self, sh: &ReaderView, start: RunPosition, pieces: &mut Vec<Piece>) {
        pieces.clear();
        let (mut at, mut done) = (start, 0);
        while let Some(rest) = self.keys.get(done..)
            && let Some(key) = rest.first()
        {
            let header = Run::at(&sh.arena, at.run);
            let shape = header.shape();
            let left = shape.len.saturating_sub(at.offset) as usize;
            let part = rest.get(..rest.len().min(left)).unwrap_or_default();
            let same = same_tags(&sh.arena, header.tags(), at.offset, part) as u32;
            if same > 0 {
                done += same as usize;
                let to = at.offset + same;
                let (from, end) = (at.offset, done as u32);
                pieces.push(Piece { run: at.run, generation: shape.generation, from, end, to });
                at.offset = to;
            } else if let Some(child) = sh.children.find_still(&sh.arena, shape, at, *key) {
                at = RunPosition { run: child, offset: 0 };
            } else {
                break;
            }
        }
    }
}

impl Writer {
    /// Imports a run for some of its holders, and sets `pieces` to where its blocks are. Returns the number of blocks
    /// that were new to a holder.
    fn import(&mut self, sh: &ReaderView, import: &Import<'_>, holders: &[Uses], pieces: &mut Vec<Piece>) -> u64 {
        pieces.clear();
        let mut all = 0;
        for uses in holders {
            let Some(start) = import.start(sh) else { break };
            // Where memory is short, blocks of the holder before were removed.
            if pieces.is_empty() || !pieces.iter().all(|piece| piece.is_there(sh)) {
                import.find(sh, start, pieces);
            }
            let Some((slot, column)) = PrefixIndex::place(self, uses.holder) else { continue };
            let claim = HolderPlane { plane: GUESS, column };
            // A holder without the blocks before has evicted them, and with them the use of these.
            if start.run != sh.root && self.cutoff(sh, start.run, claim) < start.offset {
                continue;
            }
            let new = self.import_uses(sh, import, (slot, column), uses, (start, &mut *pieces));
            let age = uses.entries.first().map_or(0, |entry| entry.age_ms);
            sh.weights.add_old(slot, new, Duration::from_millis(u64::from(age)));
            all += u64::from(new);
        }
        for uses in holders {
            if let Some((slot, _)) = PrefixIndex::place(self, uses.holder) {
                self.keep_capacity(sh, slot);
            }
        }
        all
    }

    /// Adds a holder to a run's blocks, and creates those that do not exist. Returns how many were new to it.
    fn import_uses(
        &mut self,
        sh: &ReaderView,
        import: &Import<'_>,
        (slot, column): (usize, Column),
        uses: &Uses,
        (start, pieces): (RunPosition, &mut Vec<Piece>),
    ) -> u32 {
        let claim = HolderPlane { plane: GUESS, column };
        let (mut new, mut done) = (0, 0);
        let blocks = uses.blocks();
        while done < blocks {
            let next = pieces.iter().position(|piece| piece.end > done);
            let (piece, added) = match next.and_then(|next| pieces.get(next)).copied() {
                Some(piece) => {
                    let to = piece.to - (piece.end - piece.end.min(blocks));
                    let Ok(added) = self.hold(sh, piece.run, claim, (piece.from, to), |_| ()) else { break };
                    (Piece { end: piece.end.min(blocks), to, ..piece }, added)
                }
                None => {
                    let at = pieces.last().map_or(start, |last| RunPosition { run: last.run, offset: last.to });
                    let keys = import.keys.get(done as usize..blocks as usize).unwrap_or_default();
                    let Ok(piece) = self.import_blocks(sh, at, keys, (done, claim)) else { break };
                    pieces.push(piece);
                    (piece, keys.len() as u32)
                }
            };
            self.count(slot, GUESS, added, 0);
            if self.import_recency(sh, import, (piece, column), uses).is_err() {
                break;
            }
            new += added;
            done = piece.end;
        }
        self.stats.refused_blocks += u64::from(blocks - done);
        new
    }

    /// Creates a run for imported blocks, if there is memory for them without an eviction.
    fn import_blocks(
        &mut self,
        sh: &ReaderView,
        at: RunPosition,
        keys: &[BlockKey],
        (before, claim): (u32, HolderPlane),
    ) -> Result<Piece, NoRoom> {
        let blocks = (self.stats.blocks + keys.len()) as u64;
        if self.max_blocks.is_some_and(|most| blocks > most) {
            return Err(NoRoom);
        }
        let run = self.hang(sh, at, keys.iter().copied(), claim)?;
        let len = keys.len() as u32;
        let generation = Run::at(&sh.arena, run).shape().generation;
        Ok(Piece { run, generation, from: 0, end: before + len, to: len })
    }

    /// Adds the times of use of a holder's new blocks in one run, and the run's bill. Without memory for them, the
    /// holder does not keep the new blocks.
    fn import_recency(
        &mut self,
        sh: &ReaderView,
        import: &Import<'_>,
        (piece, column): (Piece, Column),
        uses: &Uses,
    ) -> Result<(), NoRoom> {
        let (run, mut listed) = (piece.run, self.segments(sh, piece.run, column).last().map_or(0, |last| last.to));
        let mut result = Ok(());
        for entry in &uses.entries {
            // The last block of the entry in the piece, counted from the start of this index's run.
            let to = (entry.blocks.min(piece.end) + piece.to).saturating_sub(piece.end);
            if to > listed && result.is_ok() {
                result = self.add_segment(sh, column, (run, to), Moment::before(import.now, entry.age_ms));
                listed = if result.is_ok() { to } else { listed };
            }
        }
        if listed > 0 {
            result = result.and(self.adopt_run(sh, run, import.tenant));
        }
        if result.is_err() {
            self.forget_behind(sh, run, column, listed);
        }
        result
    }

    /// Drops a column's blocks behind its last segment of a run, or all of them when the run has no tenant.
    fn forget_behind(&mut self, sh: &ReaderView, run: Addr, column: Column, listed: u32) {
        if self.has_node(sh, run) && listed > 0 {
            let had = self.drop_range(sh, run, HolderPlane { plane: GUESS, column }, (listed, MAX_RUN));
            self.count(self.columns.slot(column), GUESS, 0, had);
            self.charge(sh, run);
        } else {
            self.forget(sh, run, column);
        }
    }
}
