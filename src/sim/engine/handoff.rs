//! Keys and values that pass between servers: blocks that stay after their job has ended so that another server can
//! read them, and jobs that receive a part of their prompt in place of computing it.
//!
//! Owns who has blocks kept for how long, and who waits for a transfer. The engine calls it at the start of its steps;
//! the wire, and who may read what, are the servers' affair. The behaviour is vLLM's NIXL connector: a prefill's blocks
//! stay until they were read or their lease ends (`kv_lease_duration`, which heartbeats extend), and a request whose
//! prompt comes from elsewhere takes its blocks when it is admitted and waits outside the batch
//! (`WAITING_FOR_REMOTE_KVS`).

use super::{Engine, EngineEvent, JobId};
use crate::kv::{BlockId, KvCache};
use ahash::RandomState;
use attache_types::clock::Timestamp;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

/// 30 s: vLLM's `kv_lease_duration`.
pub const DEFAULT_LEASE: Duration = Duration::from_secs(30);

/// What a job has to do with other servers; by default nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Handoff {
    /// Keep the job's blocks for so long after its end, or until [`Engine::release`]. A cancelled job keeps none.
    pub hold: Option<Duration>,
    /// Leading tokens of the prompt that another server has computed. Those that are not in the own cache are received.
    pub received: u32,
}

/// Blocks that are kept for another server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pinned<'a> {
    /// Tokens that are in them.
    pub tokens: u32,
    /// KV blocks in the order of the prompt.
    pub blocks: &'a [BlockId],
    /// When the lease of the blocks ends.
    pub until: Timestamp,
}

#[derive(Debug)]
struct Pin {
    tokens: u32,
    table: Vec<BlockId>,
    lease: Duration,
    until: Timestamp,
}

/// Blocks of jobs that have ended.
#[derive(Debug, Default)]
pub(super) struct Pins {
    by_job: HashMap<JobId, Pin, RandomState>,
    /// By the end of the lease.
    ends: BTreeSet<(Timestamp, JobId)>,
    blocks: usize,
}

impl Pins {
    fn add(&mut self, id: JobId, pin: Pin) {
        self.blocks += pin.table.len();
        self.ends.insert((pin.until, id));
        self.by_job.insert(id, pin);
    }

    fn remove(&mut self, id: JobId, kv: &mut KvCache) -> bool {
        let Some(mut pin) = self.by_job.remove(&id) else { return false };
        self.ends.remove(&(pin.until, id));
        self.blocks -= pin.table.len();
        kv.release(&mut pin.table);
        true
    }

    /// Frees the blocks whose lease has ended, and returns the number of jobs that held them.
    fn expire(&mut self, now: Timestamp, kv: &mut KvCache) -> u64 {
        let mut expired = 0;
        while let Some((_, id)) = self.ends.first().copied().filter(|(until, _)| *until <= now) {
            self.remove(id, kv);
            expired += 1;
        }
        expired
    }

    #[cfg(test)]
    pub(super) fn tables(&self) -> impl Iterator<Item = &[BlockId]> {
        self.by_job.values().map(|pin| pin.table.as_slice())
    }

    pub(super) fn next_end(&self) -> Option<Timestamp> {
        self.ends.first().map(|(until, _)| *until)
    }
}

/// Sequences outside the batch that have blocks.
#[derive(Debug, Default)]
pub(super) struct Transfers {
    begun: u64,
    /// By the end of the transfer, and by its number where several end together.
    under_way: BTreeMap<(Timestamp, u64), u32>,
    /// Jobs with all their blocks, in the order in which the transfers ended.
    pub(super) ready: Vec<u32>,
}

impl Transfers {
    pub(super) fn under_way(&self) -> usize {
        self.under_way.len()
    }

    pub(super) fn len(&self) -> usize {
        self.under_way.len() + self.ready.len()
    }

    pub(super) fn slots(&self) -> impl Iterator<Item = u32> {
        self.ready.iter().copied().chain(self.under_way.values().copied())
    }

    pub(super) fn next_end(&self) -> Option<Timestamp> {
        self.under_way.first_key_value().map(|((ends, _), _)| *ends)
    }

    pub(super) fn add(&mut self, ends: Timestamp, slot: u32) {
        self.begun += 1;
        self.under_way.insert((ends, self.begun), slot);
    }

    /// Forgets a sequence; false when it is not here.
    pub(super) fn remove(&mut self, slot: u32) -> bool {
        let here = self.len();
        self.under_way.retain(|_, other| *other != slot);
        self.ready.retain(|other| *other != slot);
        self.len() < here
    }

    /// The next transfer that is over.
    fn arrived(&mut self, now: Timestamp) -> Option<u32> {
        self.under_way.first_key_value().filter(|((ends, _), _)| *ends <= now)?;
        let (_, slot) = self.under_way.pop_first()?;
        self.ready.push(slot);
        Some(slot)
    }
}

impl Engine {
    /// What is kept of a job that has ended; `None` when it was given back, or its lease is over.
    #[must_use]
    pub fn pinned(&self, now: Timestamp, id: JobId) -> Option<Pinned<'_>> {
        let pin = self.pins.by_job.get(&id).filter(|pin| pin.until > now)?;
        Some(Pinned { tokens: pin.tokens, blocks: &pin.table, until: pin.until })
    }

    /// Jobs that have ended and whose blocks are kept, and the number of these blocks; one that
    /// two jobs share counts twice.
    #[must_use]
    pub fn pins(&self) -> (usize, usize) {
        (self.pins.by_job.len(), self.pins.blocks)
    }

    /// Releases the blocks that are kept of a job, read or not. False when none are kept any more.
    pub fn release(&mut self, now: Timestamp, id: JobId) -> bool {
        self.expire(now);
        let released = self.pins.remove(id, &mut self.kv);
        if released {
            self.look_again(now);
        }
        released
    }

    /// Begins the lease of a job's blocks anew, as long as it was. False when it is over.
    pub fn heartbeat(&mut self, now: Timestamp, id: JobId) -> bool {
        self.expire(now);
        let Some(pin) = self.pins.by_job.get_mut(&id) else { return false };
        let until = now.after(pin.lease).max(pin.until);
        self.pins.ends.remove(&(pin.until, id));
        self.pins.ends.insert((until, id));
        pin.until = until;
        true
    }

    /// Keeps the blocks of a sequence that ends, if its job asks for that.
    pub(super) fn pin(&mut self, slot: u32, at: Timestamp) {
        let sequence = &mut self.sequences[slot];
        let Some(lease) = sequence.hold else { return };
        let table = std::mem::take(&mut sequence.table);
        self.pins.add(sequence.id, Pin { tokens: sequence.computed, table, lease, until: at.after(lease) });
    }

    /// Ends the leases that are over.
    pub(super) fn expire(&mut self, now: Timestamp) {
        let expired = self.pins.expire(now, &mut self.kv);
        self.stats.leases_expired += expired;
        if expired > 0 {
            self.look_again(now);
        }
    }

    /// Takes in the transfers that are over: what was received can be found from now on, as vLLM has it.
    pub(super) fn receive(&mut self, at: Timestamp, events: &mut Vec<EngineEvent>) {
        while let Some(slot) = self.transfers.arrived(at) {
            let sequence = &mut self.sequences[slot];
            let received = sequence.received;
            sequence.seal(&mut self.kv, received, self.config.prefix_caching);
            self.take_over(slot, at, events);
        }
    }

    /// The prompt up to `received` is in the blocks; its last token is computed all the same, as
    /// the answer starts from it.
    fn take_over(&mut self, slot: u32, at: Timestamp, events: &mut Vec<EngineEvent>) {
        let sequence = &mut self.sequences[slot];
        let received = std::mem::take(&mut sequence.received);
        sequence.computed = received.min(sequence.known_tokens().saturating_sub(1)).max(sequence.computed);
        events.push(EngineEvent::Received { job: sequence.id, at });
    }

    /// Begins the transfer of what a sequence, which has its blocks, lacks of its prompt. False when that is nothing.
    pub(super) fn begin_transfer(&mut self, slot: u32, at: Timestamp, events: &mut Vec<EngineEvent>) -> bool {
        let sequence = &mut self.sequences[slot];
        let tokens = sequence.to_receive(sequence.computed);
        if tokens == 0 {
            if sequence.received > 0 {
                self.take_over(slot, at, events);
            }
            return false;
        }
        let time = self.costs.transfer(tokens);
        sequence.received_tokens = tokens;
        self.stats.received_tokens += u64::from(tokens);
        self.stats.transfer.observe_time(time);
        self.transfers.add(at.after(time), slot);
        true
    }

    /// Something may fit now that did not.
    pub(super) fn look_again(&mut self, now: Timestamp) {
        self.blocked = false;
        self.looked = self.looked.max(now);
    }
}
