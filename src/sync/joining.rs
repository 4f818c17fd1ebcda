//! Import of the prefix index of a peer, when this picker joins: which peer is asked for which chunk, and when it is
//! asked again.
//!
//! Pools are imported one after the other, and chunks one by one: the request for the next chunk is sent when a chunk
//! was imported. A cursor means something to one process only, so another peer is asked from the start.

use crate::generated::v1;
use crate::paths::mix;
use crate::pools::{PoolView, Pools};
use crate::snapshot::WireUnit;
use crate::wire::HEARTBEAT_EVERY;
use ahash::{AHashMap, AHashSet};
use attache_prefix::cache::PrefixCache;
use attache_types::clock::Timestamp;
use std::collections::VecDeque;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// A chunk that has not arrived after this time is requested again.
pub(crate) const CHUNK_WAIT: Duration = Duration::from_secs(1);
/// Requests for one chunk before another peer is asked.
const ATTEMPTS: u32 = 3;
/// A peer that did not answer is asked again after this time.
const RETRY_PEER: Duration = Duration::from_secs(10);
/// While all peers have nothing to give, others may still be heard for this long.
const NO_SOURCE_WAIT: Duration = Duration::from_millis(2 * HEARTBEAT_EVERY.as_millis() as u64);
/// After this time, the index of a picker without peers is as good as theirs.
const JOINS_FOR: Duration = Duration::from_secs(30);
/// After this time, the import of a pool ends with what has arrived. An index of 256 MiB takes some ten seconds.
const MAX_IMPORT: Duration = Duration::from_secs(120);
/// Without metrics of an endpoint, which tell the size of a block, a pool is imported after this time.
const METRICS_WAIT: Duration = Duration::from_secs(2);

/// Progress of the import of a peer's prefix index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SnapshotState {
    /// No peer that has an index was heard, or the endpoints are not known yet.
    Waiting,
    /// Chunks are being received.
    Importing,
    /// All pools were imported, or no peer has an index.
    Done,
}

/// Progress of the import, with its extent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotProgress {
    /// The state.
    pub state: SnapshotState,
    /// The process that is asked, while importing.
    pub peer: Option<u64>,
    /// Chunks imported since the start of the process.
    pub chunks: u64,
}

/// A peer that may be asked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Source {
    pub(crate) sender: u64,
    /// It joins itself, so its index is not complete.
    pub(crate) joins: bool,
}

/// Outcome of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ChunkOutcome {
    /// Imported; the next cursor is `None` after the last chunk.
    Imported(Option<u64>),
    /// The peer has nothing that this picker can use.
    Refused,
}

/// A request that has no chunk yet.
#[derive(Clone, Copy, Debug)]
struct Asked {
    at: Timestamp,
    attempts: u32,
}

/// A pool that is not imported yet.
#[derive(Clone, Copy, Debug)]
struct PendingPool {
    key: u64,
    /// When the import of this pool was first tried.
    since: Option<Timestamp>,
}

/// The import of this picker.
#[derive(Debug)]
pub(crate) struct Joining {
    own: u64,
    /// All caches that were seen, with the key of their pool.
    seen: Vec<(u64, Weak<PrefixCache>)>,
    /// Pools that are not imported yet; the first one is in progress.
    pending: VecDeque<PendingPool>,
    /// Whether pools were found since the start.
    has_pools: bool,
    started: Option<Timestamp>,
    peer: Option<u64>,
    cursor: u64,
    asked: Option<Asked>,
    /// When a peer was first asked for this pool.
    began: Option<Timestamp>,
    /// A chunk is being imported.
    busy: bool,
    timed_out: AHashMap<u64, Timestamp>,
    /// Peers that have nothing for the first pool.
    refused: AHashSet<u64>,
    no_source_since: Option<Timestamp>,
    chunks: u64,
}

impl Joining {
    /// The import of the picker `own`.
    pub(crate) fn new(own: u64) -> Self {
        Self {
            own,
            seen: Vec::new(),
            pending: VecDeque::new(),
            has_pools: false,
            started: None,
            peer: None,
            cursor: 0,
            asked: None,
            began: None,
            busy: false,
            timed_out: AHashMap::new(),
            refused: AHashSet::new(),
            no_source_since: None,
            chunks: 0,
        }
    }

    /// Takes the pools. Those with a new cache are imported.
    pub(crate) fn set_pools<'v>(&mut self, views: impl Iterator<Item = (u64, &'v PoolView)>) {
        let views: Vec<(u64, &PoolView)> = views.collect();
        self.has_pools |= !views.is_empty();
        let caches = views.into_iter().filter_map(|(key, view)| Some((key, Arc::downgrade(view.cache.as_ref()?))));
        let caches: Vec<(u64, Weak<PrefixCache>)> = caches.collect();
        let seen = std::mem::replace(&mut self.seen, caches);
        let is_new = |(key, cache): &&(u64, Weak<PrefixCache>)| {
            !seen.iter().any(|(other, before)| other == key && before.ptr_eq(cache))
        };
        let new: Vec<u64> = self.seen.iter().filter(is_new).map(|(key, _)| *key).collect();
        let stays =
            |pool: &PendingPool| !new.contains(&pool.key) && self.seen.iter().any(|(there, _)| *there == pool.key);
        let first_stays = self.pending.front().is_some_and(stays);
        self.pending.retain(stays);
        self.pending.extend(new.into_iter().map(|key| PendingPool { key, since: None }));
        if !first_stays {
            self.begin_pool();
        }
    }

    fn begin_pool(&mut self) {
        (self.cursor, self.asked, self.began) = (0, None, None);
        self.refused.clear();
    }

    /// Whether this picker has started recently and has imported nothing yet.
    pub(crate) fn joins(&self, now: Timestamp) -> bool {
        !self.is_done() && self.started.is_none_or(|started| started.after(JOINS_FOR) > now)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.has_pools && self.pending.is_empty()
    }

    /// Whether a peer that was just heard may be asked at once.
    pub(crate) fn wants_peer(&self) -> bool {
        !self.pending.is_empty() && self.peer.is_none()
    }

    pub(crate) fn progress(&self) -> SnapshotProgress {
        let state = match self.peer {
            _ if self.is_done() => SnapshotState::Done,
            Some(_) => SnapshotState::Importing,
            None => SnapshotState::Waiting,
        };
        SnapshotProgress { state, peer: self.peer.filter(|_| state == SnapshotState::Importing), chunks: self.chunks }
    }

    /// When [`Joining::step`] must be called again; `None` if it follows from messages and heartbeats.
    pub(crate) fn next(&self) -> Option<Timestamp> {
        self.asked.map(|asked| asked.at.after(CHUNK_WAIT))
    }

    /// What must be requested now, and from which of the peers `sources` that are heard.
    pub(crate) fn step(
        &mut self,
        sources: &[Source],
        pools: &Pools,
        now: Timestamp,
    ) -> Option<(u64, v1::SnapshotRequest)> {
        self.started.get_or_insert(now);
        for pool in &mut self.pending {
            pool.since.get_or_insert(now);
        }
        while !self.pending.is_empty() {
            if self.busy || !self.expire(sources, now) {
                return None;
            }
            let view = self.first_known(pools, now);
            let Some(peer) = self.choose(sources, now) else {
                if self.lacks_sources(sources, now) {
                    self.pending.pop_front();
                    self.begin_pool();
                    continue;
                }
                return None;
            };
            let unit = WireUnit::of(view?.cache.as_ref()?.unit());
            let attempts = self.asked.map_or(1, |asked| asked.attempts + 1);
            self.began.get_or_insert(now);
            (self.peer, self.asked) = (Some(peer), Some(Asked { at: now, attempts }));
            let (block_tokens, block_bytes) = (unit.tokens, unit.bytes);
            let pool = self.pending.front()?.key;
            return Some((peer, v1::SnapshotRequest { pool, cursor: self.cursor, block_tokens, block_bytes }));
        }
        None
    }

    /// The first pool, if it can be imported. A pool that can be comes before those that can't.
    fn first_known<'p>(&mut self, pools: &'p Pools, now: Timestamp) -> Option<&'p PoolView> {
        let known = |pool: &PendingPool| pools.by_key(pool.key).filter(|view| is_known(view, pool.since, now));
        let (at, view) = self.pending.iter().enumerate().find_map(|(at, pool)| Some((at, known(pool)?)))?;
        if at > 0 {
            self.pending.rotate_left(at);
            self.begin_pool();
        }
        Some(view)
    }

    /// Leaves a peer that is gone or does not answer. False while a chunk may still arrive.
    fn expire(&mut self, sources: &[Source], now: Timestamp) -> bool {
        let Some(peer) = self.peer else { return true };
        if !sources.iter().any(|source| source.sender == peer) {
            self.leave();
        }
        let Some(asked) = self.asked else { return true };
        if asked.at.after(CHUNK_WAIT) > now {
            return false;
        }
        if asked.attempts >= ATTEMPTS {
            self.timed_out.insert(peer, now);
            self.leave();
        }
        true
    }

    /// Leaves the peer. Its cursor means nothing to others.
    fn leave(&mut self) {
        (self.peer, self.asked, self.cursor) = (None, None, 0);
    }

    /// The peer that was asked before, or another one. Each picker has its own order of peers, which spreads the work.
    fn choose(&mut self, sources: &[Source], now: Timestamp) -> Option<u64> {
        self.timed_out.retain(|_, at| at.after(RETRY_PEER) > now);
        let order = mix(self.own);
        let can = |source: &&Source| {
            !source.joins && !self.refused.contains(&source.sender) && !self.timed_out.contains_key(&source.sender)
        };
        let first = || sources.iter().filter(can).map(|source| source.sender).min_by_key(|sender| mix(sender ^ order));
        self.peer.or_else(first)
    }

    /// Whether peers are heard and none has anything to give, for long enough.
    fn lacks_sources(&mut self, sources: &[Source], now: Timestamp) -> bool {
        let has_nothing = |source: &Source| source.joins || self.refused.contains(&source.sender);
        if sources.is_empty() || !sources.iter().all(has_nothing) {
            self.no_source_since = None;
            return false;
        }
        self.no_source_since.get_or_insert(now).after(NO_SOURCE_WAIT) <= now
    }

    /// Takes the time of the request that a chunk of `sender` answers; `None` if it answers none.
    pub(crate) fn accept(&mut self, sender: u64, chunk: &v1::SnapshotChunk) -> Option<Timestamp> {
        let is_next = self.peer == Some(sender)
            && self.pending.front().is_some_and(|pool| pool.key == chunk.pool)
            && self.cursor == chunk.cursor
            && !self.busy;
        let asked = self.asked.take_if(|_| is_next)?;
        self.busy = true;
        Some(asked.at)
    }

    /// Continues after the chunk at `cursor` that was accepted, unless the pool has changed meanwhile. Returns false if
    /// the import ends before the peer has said so.
    pub(crate) fn settle(&mut self, pool: u64, cursor: u64, outcome: ChunkOutcome, now: Timestamp) -> bool {
        self.busy = false;
        if self.pending.front().is_none_or(|first| first.key != pool) || self.cursor != cursor {
            return true;
        }
        let is_late = self.began.is_some_and(|began| began.after(MAX_IMPORT) <= now);
        match outcome {
            ChunkOutcome::Refused => {
                self.refused.extend(self.peer);
                self.leave();
                true
            }
            ChunkOutcome::Imported(next) => {
                self.chunks += 1;
                match next.filter(|_| !is_late) {
                    Some(next) => {
                        self.cursor = next;
                        true
                    }
                    None => {
                        self.pending.pop_front();
                        self.begin_pool();
                        // A peer that answers is asked for the next pool too.
                        if self.pending.is_empty() {
                            self.leave();
                        }
                        next.is_none()
                    }
                }
            }
        }
    }
}

/// Whether the endpoints of a pool and the size of its blocks are known, so that a chunk can be imported.
fn is_known(view: &PoolView, since: Option<Timestamp>, now: Timestamp) -> bool {
    let snapshot = view.store.load();
    let has_metrics = || snapshot.endpoints.iter().any(|state| state.metrics().is_some());
    snapshot.synced && (since.is_some_and(|since| since.after(METRICS_WAIT) <= now) || has_metrics())
}
