//! Estimated blocks of prompts that a server works on. An engine evicts only blocks that no request uses, so their
//! blocks stay until all others of the server are evicted.
//!
//! A response can last longer than idle blocks stay in a full cache. By the times of use alone, the blocks of a running
//! request would then be evicted before those of an idle conversation. So an eviction that reaches the blocks of such a
//! prompt marks them as used instead.

use super::arena::Addr;
use super::holders::Holder;
use super::recency::{Moment, moment_of};
use super::writer::Writer;
use super::{Column, HolderId, PrefixIndex, ReaderView, TenantId};
use crate::key::BlockKey;
use attache_types::clock::Timestamp;
use std::sync::Arc;

/// A prompt that a holder works on.
#[derive(Debug)]
pub(super) struct PromptInUse {
    keys: Arc<Vec<BlockKey>>,
    tenant: TenantId,
    /// Time of use that its blocks were last given.
    moment: Moment,
    /// Evicted blocks of the holder when the prompt came into use.
    evicted: u64,
}

/// Keeps a prompt in use until Drop.
#[derive(Debug)]
pub struct InUse {
    index: Arc<PrefixIndex>,
    holder: HolderId,
    keys: Arc<Vec<BlockKey>>,
}

impl PrefixIndex {
    /// Records a prompt as [`Self::record`], and keeps its blocks until the guard is dropped.
    #[must_use]
    pub fn record_in_use(
        self: &Arc<Self>,
        holder: HolderId,
        keys: &Arc<Vec<BlockKey>>,
        tenant: TenantId,
        now: Timestamp,
    ) -> InUse {
        let mut writer = self.writer.lock();
        self.record_locked(&mut writer, holder, keys, tenant, now);
        let found = writer.holders.slot(holder).and_then(|slot| writer.holders.get_mut(slot));
        if let Some(holder) = found {
            let (keys, evicted) = (keys.clone(), holder.evicted);
            holder.in_use.push(PromptInUse { keys, tenant, moment: Moment::of(now), evicted });
        }
        InUse { index: self.clone(), holder, keys: keys.clone() }
    }
}

impl Drop for InUse {
    /// The engine frees the blocks now, so they become its most recently used.
    fn drop(&mut self) {
        let mut writer = self.index.writer.lock();
        let Some((slot, column)) = PrefixIndex::place(&writer, self.holder) else { return };
        let Some(holder) = writer.holders.get_mut(slot) else { return };
        let Some(at) = holder.in_use.iter().position(|prompt| Arc::ptr_eq(&prompt.keys, &self.keys)) else { return };
        let prompt = holder.in_use.swap_remove(at);
        // Without evictions meanwhile, the order of eviction hardly matters, and the walk is saved.
        if prompt.evicted != holder.evicted {
            let moment = newest_moment(&self.index.shared, holder).max(prompt.moment);
            writer.use_again(&self.index.shared, slot, column, &prompt, moment);
        }
    }
}

impl Writer {
    /// Marks the blocks of a prompt in use as used, if the holder's oldest segment may be among them: it was used when
    /// they were, or later by another prompt with the same blocks. False if there is no such prompt, or if all blocks of
    /// the holder are as recently used.
    pub(super) fn spare_in_use(&mut self, sh: &ReaderView, slot: usize, oldest: Addr) -> bool {
        let moment = moment_of(sh, oldest);
        let column = sh.arena.high(oldest) as Column;
        let Some(holder) = self.holders.get_mut(slot) else { return false };
        let newest = newest_moment(sh, holder);
        let Some(at) = holder.in_use.iter().position(|prompt| prompt.moment <= moment && moment < newest) else {
            return false;
        };
        let mut prompt = holder.in_use.swap_remove(at);
        prompt.moment = newest;
        self.use_again(sh, slot, column, &prompt, newest);
        if let Some(holder) = self.holders.get_mut(slot) {
            holder.in_use.push(prompt);
        }
        true
    }

    /// Marks those blocks of a prompt as used that the holder has.
    fn use_again(&mut self, sh: &ReaderView, slot: usize, column: Column, prompt: &PromptInUse, moment: Moment) {
        let recording = self.guesses.tenants.recording.take();
        self.walk(sh, &prompt.keys);
        while let Some((run, matched)) = self.guesses.path.last().copied() {
            let held = self.segments(sh, run, column).last().map_or(0, |last| last.to.min(matched));
            if held > 0 {
                if self.touch(sh, slot, column, (run, held), moment).is_err() {
                    self.forget(sh, run, column);
                } else {
                    let _ = self.touch_run(sh, run, prompt.tenant);
                }
            }
            self.guesses.path.pop();
        }
        self.guesses.tenants.recording = recording;
    }
}

/// The time of use of a holder's most recently used blocks.
fn newest_moment(sh: &ReaderView, holder: &Holder) -> Moment {
    if holder.newest == 0 { Moment(0) } else { moment_of(sh, holder.newest) }
}
