//! Chunks of estimated blocks that one index exports and another imports.
//!
//! A chunk contains runs, each behind an earlier run of the same chunk or at the start of prompts. It contains all
//! predecessors of its blocks, so it can be imported alone, in any order with other chunks, and more than once.

use super::run::MAX_RUN;
use attache_types::ids::EndpointId;

/// Bytes of a run in [`ExportChunk::bytes`] without its blocks and holders.
const RUN_BYTES: usize = 24;
/// Bytes of a block.
const BLOCK_BYTES: usize = 4;
/// Bytes of a holder.
const HOLDER_BYTES: usize = 12;

/// Where an export continues: a position in the table of runs, and the default is its start. It is valid as long as the
/// exporting process runs.
///
/// The position does not depend on the run that is there. If that run was removed, the export continues with the run
/// that replaced it, or else with the next one. A cursor beyond the table ends the export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExportCursor(pub u64);

/// A part of an index: runs of estimated blocks with their holders.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportChunk {
    /// The runs, parents before children.
    pub runs: Vec<ExportRun>,
    /// Where the next chunk begins; `None` when the export is complete.
    pub next: Option<ExportCursor>,
}

/// A sequence of blocks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExportRun {
    /// Index of the run that precedes this one, which is smaller than this run's own; `None` at the start of prompts.
    pub parent: Option<u32>,
    /// Number of the parent's blocks that precede this run: 1 or more, and 0 without a parent.
    pub offset: u32,
    /// The high half of the first block's key; 0 with a parent, since only the first block of a prompt needs it.
    pub first_key_high: u32,
    /// The low halves of the keys of all blocks, 1 to 2,048 of them.
    pub keys: Vec<u32>,
    /// The [`super::TenantId`] that the run is billed to.
    pub tenant: u32,
    /// The endpoints that hold blocks of the run.
    pub holders: Vec<ExportHolder>,
}

/// An endpoint that holds the first blocks of a run. An endpoint has several entries for a run if it used the first
/// blocks more recently than those behind them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportHolder {
    /// The endpoint, as the exporting cache numbers it.
    pub endpoint: EndpointId,
    /// Number of blocks from the start of the run, 1 or more.
    pub blocks: u32,
    /// Time since the endpoint used these blocks, in milliseconds. A value above 49 days is exported as 49 days.
    pub age_ms: u32,
}

/// A chunk is invalid. Nothing of it was imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ImportError {
    /// The parent is not an earlier run of the chunk.
    #[error("runs[{run}].parent is {parent}, which is not an earlier run")]
    Parent {
        /// Index of the run.
        run: usize,
        /// The invalid value.
        parent: u32,
    },
    /// The parent has fewer blocks than the offset, or the offset does not fit to whether there is a parent.
    #[error("runs[{run}].offset is {offset}, expected {least} to {most} blocks")]
    Offset {
        /// Index of the run.
        run: usize,
        /// The invalid value.
        offset: u32,
        /// Smallest valid value.
        least: u32,
        /// Largest valid value.
        most: u32,
    },
    /// A run with a parent has the high half of a key.
    #[error("runs[{run}].first_key_high is set, but the run has a parent")]
    FirstKeyHigh {
        /// Index of the run.
        run: usize,
    },
    /// A run has no blocks or more than 2,048.
    #[error("runs[{run}].keys has {keys} keys, expected 1 to {MAX_RUN}")]
    Keys {
        /// Index of the run.
        run: usize,
        /// The invalid number of keys.
        keys: usize,
    },
    /// A holder has no blocks or more than the run.
    #[error("runs[{run}].holders[{holder}].blocks is {blocks}, expected 1 to {keys}")]
    HolderBlocks {
        /// Index of the run.
        run: usize,
        /// Index of the holder.
        holder: usize,
        /// The invalid value.
        blocks: u32,
        /// Number of blocks of the run.
        keys: usize,
    },
}

impl ExportChunk {
    /// Returns the size of the chunk in a compact encoding, in bytes: 24 for each run, 4 for each block and 12 for each
    /// holder. The limit of an export counts by it.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.runs.iter().map(ExportRun::bytes).sum()
    }

    /// Returns the first error of the chunk.
    pub(super) fn check(&self) -> Result<(), ImportError> {
        for (at, run) in self.runs.iter().enumerate() {
            self.check_place(at, run)?;
            let keys = run.keys.len();
            if keys == 0 || keys > MAX_RUN as usize {
                return Err(ImportError::Keys { run: at, keys });
            }
            let is_bad = |h: &ExportHolder| h.blocks == 0 || h.blocks as usize > keys;
            if let Some((holder, bad)) = run.holders.iter().enumerate().find(|(_, h)| is_bad(h)) {
                return Err(ImportError::HolderBlocks { run: at, holder, blocks: bad.blocks, keys });
            }
        }
        Ok(())
    }

    /// Checks where a run is attached. Parents come first, so there are no cycles.
    fn check_place(&self, at: usize, run: &ExportRun) -> Result<(), ImportError> {
        let (least, most) = match run.parent {
            None => (0, 0),
            Some(parent) => {
                let before = self.runs.get(parent as usize).filter(|_| (parent as usize) < at);
                let before = before.ok_or(ImportError::Parent { run: at, parent })?;
                if run.first_key_high != 0 {
                    return Err(ImportError::FirstKeyHigh { run: at });
                }
                (1, before.keys.len() as u32)
            }
        };
        if !(least..=most).contains(&run.offset) {
            return Err(ImportError::Offset { run: at, offset: run.offset, least, most });
        }
        Ok(())
    }
}

impl ExportRun {
    /// Returns the part of [`ExportChunk::bytes`] of this run.
    #[must_use]
    pub fn bytes(&self) -> usize {
        RUN_BYTES + BLOCK_BYTES * self.keys.len() + HOLDER_BYTES * self.holders.len()
    }
}
