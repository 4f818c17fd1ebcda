//! Export of estimated blocks in chunks, while the index changes.
//!
//! An export visits the table of run headers in order. A run keeps its header as long as it exists, so every run that
//! was there before the export began is visited. The writer's lock is held for about [`HOLD_WORK`] units of work at a
//! time, about 20 µs. One run with a thousand holders takes about 100 µs.

use super::arena::{Addr, LINE, high, low};
use super::cover::{Column, Cover, GUESS};
use super::guess::{NODE, key};
use super::run::{GUESSED, Run};
use super::transfer::{ExportChunk, ExportCursor, ExportHolder, ExportRun};
use super::writer::{HEADERS, Writer};
use super::{HolderId, PrefixIndex, ReaderView};
use crate::atomics::unlock_fair;
use attache_types::clock::Timestamp;
use attache_types::ids::EndpointId;
use std::collections::BTreeMap;

/// Work for which the lock is held at once. A header is one unit.
const HOLD_WORK: usize = 512;
/// Work of an exported run, and of each of its holders.
const RUN_WORK: usize = 8;
const HOLDER_WORK: usize = 4;
/// Blocks whose keys are copied in one unit of work.
const WORK_BLOCKS: usize = 32;

/// A run that this chunk has.
#[derive(Debug)]
struct Exported {
    generation: u32,
    /// Its index in the chunk; `None` when no endpoint of the export holds blocks of it.
    index: Option<u32>,
    /// The columns that hold it, sorted, with the number of blocks.
    reach: Vec<(Column, u32)>,
}

/// Result of one hold of the lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    /// There is more to do.
    Going,
    /// The chunk is full.
    Full,
    /// All runs were visited.
    Complete,
}

/// The chunk that is being built.
struct Exporter<'a> {
    sh: &'a ReaderView,
    now: Timestamp,
    max_bytes: usize,
    /// The endpoint of each holder, by slot.
    endpoints: Vec<Option<(HolderId, EndpointId)>>,
    position: u64,
    /// Number of runs in the chunk before the run at `position` and its predecessors were added.
    complete: usize,
    runs: Vec<ExportRun>,
    bytes: usize,
    exported: BTreeMap<Addr, Exported>,
    cover: Cover,
    path: Vec<Addr>,
}

impl PrefixIndex {
    /// Exports the estimated blocks of `endpoints` from `cursor` on. The chunk has at most `max_bytes` bytes by
    /// [`ExportChunk::bytes`], except that it always has one run with its predecessors.
    ///
    /// Between two chunks, and between short holds of the lock, the index may change. All chunks together contain every
    /// block that its endpoint held, with all blocks before it, from the first call to the last. Blocks that were
    /// stored or dropped meanwhile may be missing.
    #[must_use]
    pub fn export(
        &self,
        cursor: ExportCursor,
        max_bytes: usize,
        endpoints: &[(HolderId, EndpointId)],
        now: Timestamp,
    ) -> ExportChunk {
        let mut exporter = Exporter::new(&self.shared, cursor, max_bytes, endpoints, now);
        loop {
            let writer = self.writer.lock();
            let progress = exporter.advance(&writer);
            unlock_fair(writer);
            if progress != Progress::Going {
                let next = (progress == Progress::Full).then_some(ExportCursor(exporter.position));
                return ExportChunk { runs: exporter.runs, next };
            }
        }
    }
}

impl<'a> Exporter<'a> {
    fn new(
        sh: &'a ReaderView,
        cursor: ExportCursor,
        max_bytes: usize,
        holders: &[(HolderId, EndpointId)],
        now: Timestamp,
    ) -> Self {
        let slots = holders.iter().map(|(holder, _)| holder.slot() + 1).max().unwrap_or(0);
        let mut endpoints = vec![None; slots];
        for entry in holders {
            if let Some(place) = endpoints.get_mut(entry.0.slot()) {
                *place = Some(*entry);
            }
        }
        Self {
            sh,
            now,
            max_bytes,
            endpoints,
            position: cursor.0,
            complete: 0,
            runs: Vec::new(),
            bytes: 0,
            exported: BTreeMap::new(),
            cover: Cover::default(),
            path: Vec::new(),
        }
    }

    /// Visits runs for one hold of the lock.
    fn advance(&mut self, writer: &Writer) -> Progress {
        let mut work = 0;
        while work < HOLD_WORK {
            let page = usize::try_from(self.position / u64::from(HEADERS)).ok();
            let Some(page) = page.and_then(|page| writer.header_pages.get(page)) else { return Progress::Complete };
            let run = page + (self.position % u64::from(HEADERS)) as Addr * LINE;
            work += 1;
            if !self.visit(writer, run, &mut work) {
                continue;
            }
            if self.bytes > self.max_bytes && self.complete > 0 {
                self.runs.truncate(self.complete);
                return Progress::Full;
            }
            self.position += 1;
            self.complete = self.runs.len();
            if self.bytes >= self.max_bytes {
                return Progress::Full;
            }
        }
        Progress::Going
    }

    /// Adds a run and those of its predecessors that the chunk does not have. Returns false when the work for one hold
    /// of the lock ended before all were added.
    fn visit(&mut self, writer: &Writer, run: Addr, work: &mut usize) -> bool {
        let header = Run::at(&self.sh.arena, run);
        if header.is_free() || !header.has(GUESSED) || self.has(run, 0) {
            return true;
        }
        self.path.clear();
        let mut at = run;
        loop {
            self.path.push(at);
            *work += 1;
            let place = Run::at(&self.sh.arena, at).place();
            if place.run == self.sh.root || self.has(place.run, place.offset) {
                break;
            }
            at = place.run;
        }
        while let Some(at) = self.path.pop() {
            *work += self.add(writer, at);
            if *work >= HOLD_WORK && !self.path.is_empty() {
                return false;
            }
        }
        true
    }

    /// Whether the chunk has at least `blocks` blocks of a run. A run that has grown since it was added counts as
    /// another one.
    fn has(&self, run: Addr, blocks: u32) -> bool {
        let generation = Run::at(&self.sh.arena, run).shape().generation;
        let exported = self.exported.get(&run).filter(|exported| exported.generation == generation);
        exported.is_some_and(|exported| {
            let there = exported.index.and_then(|index| self.runs.get(index as usize));
            there.is_none_or(|there| there.keys.len() >= blocks as usize)
        })
    }

    /// Adds a run whose parent was added. Returns the work.
    fn add(&mut self, writer: &Writer, run: Addr) -> usize {
        let header = Run::at(&self.sh.arena, run);
        let (place, shape) = (header.place(), header.shape());
        let is_first = place.run == self.sh.root;
        let parent = self.exported.get(&place.run).filter(|_| !is_first);
        let parent_index = parent.and_then(|parent| parent.index);
        let mut added = Exported { generation: shape.generation, index: None, reach: Vec::new() };
        let mut holders = Vec::new();
        self.cover.read(&self.sh.arena, header, &writer.columns.live);
        for (column, _, blocks) in self.cover.all().filter(|(_, plane, _)| *plane == GUESS) {
            let holds_before = is_first || parent.is_some_and(|parent| parent.reaches(column, place.offset));
            let slot = writer.columns.slot(column);
            let endpoint = self.endpoints.get(slot).copied().flatten();
            if let Some((_, endpoint)) = endpoint.filter(|(holder, _)| writer.holders.slot(*holder) == Some(slot))
                && holds_before
            {
                added.reach.push((column, self.add_holder(writer, (run, column), (endpoint, blocks), &mut holders)));
            }
        }
        added.reach.sort_unstable();
        let len = added.reach.iter().map(|(_, blocks)| *blocks).max().unwrap_or(0);
        let work = RUN_WORK + HOLDER_WORK * holders.len() + len as usize / WORK_BLOCKS;
        if len > 0 {
            let exported = ExportRun {
                parent: parent_index,
                offset: place.offset,
                first_key_high: if is_first { high(header.key().0) } else { 0 },
                keys: self.keys(header, len),
                tenant: self.tenant(writer, run),
                holders,
            };
            added.index = Some(self.runs.len() as u32);
            self.bytes += exported.bytes();
            self.runs.push(exported);
        }
        self.exported.insert(run, added);
        work
    }

    /// Adds an endpoint's entries for its first `blocks` blocks of a run, one for each time of use. Returns how many
    /// blocks the entries have.
    fn add_holder(
        &self,
        writer: &Writer,
        (run, column): (Addr, Column),
        (endpoint, blocks): (EndpointId, u32),
        holders: &mut Vec<ExportHolder>,
    ) -> u32 {
        let mut listed = 0;
        for segment in writer.segments(self.sh, run, column) {
            // Where memory was short, a segment may have more blocks than the holder.
            let to = segment.to.min(blocks);
            if to > listed {
                holders.push(ExportHolder { endpoint, blocks: to, age_ms: segment.moment.age_ms(self.now) });
                listed = to;
            }
        }
        listed
    }

    /// The tenant that a run is billed to.
    fn tenant(&self, writer: &Writer, run: Addr) -> u32 {
        let node = writer.guesses.table.get(&self.sh.arena, key(run, NODE));
        node.map_or(0, |node| self.sh.arena.high(node as Addr))
    }

    /// Copies the low halves of the keys of a run's first blocks.
    fn keys(&self, header: Run<'_>, len: u32) -> Vec<u32> {
        let tags = header.tags();
        let words = (0..len.div_ceil(2)).map(|word| self.sh.arena.load(tags + word));
        let mut keys = Vec::with_capacity(len as usize + 1);
        words.for_each(|word| keys.extend([low(word), high(word)]));
        keys.truncate(len as usize);
        keys
    }
}

impl Exported {
    /// Whether a column holds at least `blocks` blocks of the run.
    fn reaches(&self, column: Column, blocks: u32) -> bool {
        let found = self.reach.binary_search_by_key(&column, |(column, _)| *column);
        found.ok().and_then(|at| self.reach.get(at)).is_some_and(|(_, held)| *held >= blocks)
    }
}
