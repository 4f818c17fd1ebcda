//! Sequence numbers of one publisher's frames: the next one, missing ones, and requests for replay.
//!
//! A publisher numbers its frames from 0, per process. Frames may be lost, since a publisher drops them when Attaché
//! reads slowly. A publisher with a ring buffer can replay missed frames. The cursor does no I/O: [`super::lane`]
//! passes frames in and executes its requests.
//!
//! After a gap ([`Cursor::gap`], then [`replaying`]):
//!
//! | case | index entries | [`Trust`] |
//! |---|---|---|
//! | a replay is running; new frames wait in a bounded backlog | kept | `Syncing` |
//! | the replay returned all missing frames | kept, frames applied in order | as before the gap |
//! | the ring has lost some of them | dropped, later frames applied | `Incomplete` |
//! | [`MAX_FAILED_REPLAYS`] replays failed | dropped, later frames applied | `Suspect(ReplayFailed)` |
//! | the publisher has no ring, or its ring lacks the frames | dropped, later frames applied | `Suspect(Gap)` |
//!
//! With a ring, the lane calls [`Cursor::retry`] later, which requests all frames again. Without one, `Suspect` becomes
//! `Incomplete` when later events have filled a cache of the engine's size ([`Apply::relearned`]).
//!
//! After a reconnection, the cursor requests the last frame that it has. The same process returns it with the same
//! timestamp. Another process returns another frame or none, and its index entries start anew.

mod replaying;

use super::apply::BatchEffect;
use super::stats::{Count, KvEventStats};
use attache_prefix::trust::{Doubt, Trust};
use attache_prefix::wire;
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;

/// Number of consecutive failed replays without new frames after which gaps are final until [`Cursor::retry`].
const MAX_FAILED_REPLAYS: u32 = 3;

/// Tolerance in seconds for the start time that a process reports. No process publishes so soon after its start.
const CLOCK_SLACK: f64 = 1.0;

/// Applies frames that are in order.
pub(super) trait Apply {
    /// Applies the next batch.
    fn apply(&mut self, payload: &[u8]) -> BatchEffect;
    /// Drops all index entries of the holder, because lost frames may have removed blocks.
    fn clear(&mut self);
    /// Records that the publisher is another process.
    fn restart(&mut self);
    /// Returns whether as many blocks are known again as the engine's cache holds, although events were lost. This does
    /// not prove that they are the same.
    fn relearned(&self) -> bool;
}

/// Limits of the frames that wait during a replay.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backlog {
    pub(super) frames: usize,
    pub(super) bytes: usize,
}

/// Request for a replay from this sequence number on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Ask(pub(super) u64);

/// How a replay ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ReplayEnd {
    /// The replay ended with its end marker.
    Complete,
    /// The replay ended without its end marker.
    Failed,
}

/// Which of the engine's events have reached the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Knowledge {
    Nothing,
    /// All events since the cache was empty.
    Whole,
    /// All events since some frame: the oldest of the publisher's ring, or one after an old gap. Only a new start (a
    /// cleared cache, another process) or a replay of everything completes it.
    Recent,
    /// Some events are missing, or could not be applied.
    Partial(Doubt),
}

/// The purpose of a replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// Fetch missing frames.
    Fill,
    /// Check whether frames are missing.
    Check,
    /// Fetch everything again.
    Anew,
}

#[derive(Clone, Copy, Debug)]
struct Replay {
    purpose: Purpose,
    /// Whether the last known frame was returned unchanged.
    proven: bool,
    /// Whether the replay returned a frame that was missing.
    found_frames: bool,
}

/// State of a publisher's sequence.
#[derive(Debug)]
pub(super) struct Cursor {
    replayable: bool,
    bounds: Backlog,
    stats: Arc<KvEventStats>,
    /// The next sequence number; `None` while the publisher's process is unknown.
    next: Option<u64>,
    /// Time of the first frame received from this process, and of the frame before `next`.
    first_timestamp: Option<f64>,
    last_timestamp: Option<f64>,
    knowledge: Knowledge,
    connected: bool,
    /// Whether frames may have been missed (new connection, overflow) and neither a frame nor a replay has shown it.
    unproven: bool,
    /// The replay that is running.
    replay: Option<Replay>,
    /// Consecutive failed replays without new frames.
    failed_replays: u32,
    /// Whether replays fail: gaps are final until [`Cursor::retry`].
    given_up: bool,
    /// Whether the replay that has just ended returned no missing frame: the same gap needs no second request.
    last_replay_empty: bool,
    /// Live frames that arrived during a replay.
    backlog: VecDeque<(u64, Bytes)>,
    backlog_bytes: usize,
    /// Whether frames were dropped because the backlog was full.
    overflowed: bool,
    /// Whether a check has returned frames that the connection has not delivered. They may still arrive: the order
    /// between two connections is undefined.
    owed: bool,
    /// Whether the connection fails to deliver frames that a replay returns; the lane then replaces it.
    deaf: bool,
}

impl Cursor {
    /// Creates a cursor without knowledge. `replayable` means that the publisher has a ring that can be requested.
    pub(super) fn new(replayable: bool, bounds: Backlog, stats: Arc<KvEventStats>) -> Self {
        Self {
            replayable,
            bounds,
            stats,
            next: None,
            first_timestamp: None,
            last_timestamp: None,
            knowledge: Knowledge::Nothing,
            connected: false,
            unproven: false,
            replay: None,
            failed_replays: 0,
            given_up: false,
            last_replay_empty: false,
            backlog: VecDeque::new(),
            backlog_bytes: 0,
            overflowed: false,
            owed: false,
            deaf: false,
        }
    }

    /// Returns how far the holder's entries can be trusted.
    pub(super) fn trust(&self) -> Trust {
        let interrupted = !self.connected || self.unproven;
        match (self.knowledge, self.replay) {
            _ if self.next.is_none() && self.replay.is_none() && !self.connected => Trust::Unknown,
            (_, None) if interrupted && self.next.is_some() => Trust::Suspect(Doubt::Interrupted),
            (Knowledge::Whole, Some(Replay { purpose: Purpose::Check, .. })) if !interrupted => Trust::Exact,
            (Knowledge::Recent, Some(Replay { purpose: Purpose::Check, .. })) if !interrupted => Trust::Incomplete,
            (_, Some(_)) => Trust::Syncing,
            (Knowledge::Nothing, None) => Trust::Unknown,
            (Knowledge::Whole, None) => Trust::Exact,
            (Knowledge::Recent, None) => Trust::Incomplete,
            (Knowledge::Partial(doubt), None) => Trust::Suspect(doubt),
        }
    }

    /// Whether the publisher is connected and no replay is running.
    pub(super) fn is_idle(&self) -> bool {
        self.connected && self.replay.is_none()
    }

    /// Whether a later replay can restore the state.
    pub(super) fn wants_retry(&self) -> bool {
        self.is_idle() && self.replayable && (self.unproven || matches!(self.knowledge, Knowledge::Partial(_)))
    }

    /// Whether the connection still has to deliver frames that a check has returned.
    pub(super) fn is_owed(&self) -> bool {
        self.owed
    }

    /// Records that the connection has not delivered these frames in time.
    pub(super) fn overdue(&mut self) {
        self.deaf |= std::mem::take(&mut self.owed);
    }

    /// Whether the connection fails to deliver frames and must be replaced.
    pub(super) fn is_deaf(&self) -> bool {
        self.deaf
    }

    /// Records that the publisher's process started at `moment` (Unix time, seconds) according to its metrics.
    /// With replay, frames have usually shown this already. Otherwise the new process's numbers may continue
    /// where the old one's ended.
    pub(super) fn process_started<A: Apply>(&mut self, moment: f64, to: &mut A) -> Option<Ask> {
        if self.replay.is_some() || self.first_timestamp.is_none_or(|first| first + CLOCK_SLACK >= moment) {
            return None;
        }
        self.restarted(to);
        if self.connected { self.ask(Purpose::Fill) } else { None }
    }

    /// Records a change of the pool's block size; `fits` is whether the publisher has it. Blocks that were
    /// published while it did not are missing. With replay they are fetched at once, otherwise they return with
    /// later events, as after any gap.
    pub(super) fn resized<A: Apply>(&mut self, fits: bool, to: &mut A) -> Option<Ask> {
        match (fits, self.knowledge) {
            (true, Knowledge::Partial(Doubt::BlockSize)) => {
                self.knowledge = Knowledge::Partial(Doubt::Gap);
                self.retry()
            }
            (true, _) | (false, Knowledge::Partial(Doubt::BlockSize)) => None,
            (false, _) => {
                to.clear();
                self.knowledge = Knowledge::Partial(Doubt::BlockSize);
                None
            }
        }
    }

    /// Records a connection, the first one or a new one.
    pub(super) fn connected(&mut self) -> Option<Ask> {
        self.connected = true;
        (self.owed, self.deaf) = (false, false);
        self.given_up = false;
        self.failed_replays = 0;
        self.unproven = self.next.is_some();
        self.ask(Purpose::Fill)
    }

    /// Records a disconnection, which also ends a running replay.
    pub(super) fn disconnected(&mut self) {
        self.connected = false;
        self.replay = None;
        self.drop_backlog();
    }

    /// Records that an unknown number of frames was dropped before they arrived here.
    pub(super) fn overflowed(&mut self) -> Option<Ask> {
        if self.replay.is_some() {
            self.overflowed = true;
            return None;
        }
        self.unproven = self.next.is_some();
        self.ask(Purpose::Fill)
    }

    /// Checks whether the last known frame is the publisher's last one.
    pub(super) fn check(&mut self) -> Option<Ask> {
        if self.is_idle() && self.next.is_some() { self.ask(Purpose::Check) } else { None }
    }

    /// Requests a replay again, after failures or a doubt that only a replay of everything can resolve.
    pub(super) fn retry(&mut self) -> Option<Ask> {
        if !self.wants_retry() {
            return None;
        }
        self.given_up = false;
        self.failed_replays = 0;
        let partial = matches!(self.knowledge, Knowledge::Partial(_));
        self.ask(if partial { Purpose::Anew } else { Purpose::Fill })
    }

    fn ask(&mut self, purpose: Purpose) -> Option<Ask> {
        if !self.replayable || self.given_up {
            return None;
        }
        self.stats.add(Count::Replays, 1);
        self.replay = Some(Replay { purpose, proven: false, found_frames: false });
        let from = if purpose == Purpose::Anew { 0 } else { self.next.unwrap_or(0).saturating_sub(1) };
        Some(Ask(from))
    }

    /// Processes a frame from the live stream.
    pub(super) fn live<A: Apply>(&mut self, seq: u64, payload: Bytes, to: &mut A) -> Option<Ask> {
        self.owed = false;
        if self.replay.is_some() {
            self.wait(seq, payload);
            return None;
        }
        let unproven = std::mem::take(&mut self.unproven);
        if let Some(next) = self.next {
            // On a new connection, the next number proves nothing. With replay, a replay was requested on connect, and
            // `unproven` remains only if it failed.
            if seq == next && !(unproven && self.replayable) {
                self.apply(seq, &payload, to);
                return None;
            }
            if seq >= next {
                return self.gap(seq, payload, to);
            }
            // Frames of a replay and of the live stream overlap; only a new process restarts
            // its numbers with later timestamps.
            let newer = wire::timestamp(&payload) > self.last_timestamp;
            let fresh = unproven && !self.replayable;
            if !fresh && !newer {
                self.stats.add(Count::Duplicates, 1);
                return None;
            }
            self.restarted(to);
        }
        if seq == 0 {
            self.knowledge = Knowledge::Whole;
            self.apply(seq, &payload, to);
            return None;
        }
        if let Some(ask) = self.ask(Purpose::Fill) {
            self.wait(seq, payload);
            return Some(ask);
        }
        self.knowledge = Knowledge::Partial(if self.given_up { Doubt::ReplayFailed } else { Doubt::JoinedLate });
        self.apply(seq, &payload, to);
        None
    }

    /// Handles a gap between the last known frame and `seq`: requests a replay, or drops the index entries if no replay
    /// can help.
    fn gap<A: Apply>(&mut self, seq: u64, payload: Bytes, to: &mut A) -> Option<Ask> {
        self.stats.add(Count::Gaps, 1);
        if !std::mem::take(&mut self.last_replay_empty)
            && let Some(ask) = self.ask(Purpose::Fill)
        {
            self.wait(seq, payload);
            return Some(ask);
        }
        // The lost frames may contain removals: only later events are certain.
        to.clear();
        self.knowledge = Knowledge::Partial(if self.given_up { Doubt::ReplayFailed } else { Doubt::Gap });
        self.apply(seq, &payload, to);
        None
    }

    fn drop_backlog(&mut self) {
        self.backlog.clear();
        self.backlog_bytes = 0;
        self.overflowed = false;
    }

    fn restarted<A: Apply>(&mut self, to: &mut A) {
        self.stats.add(Count::Restarts, 1);
        to.restart();
        self.next = None;
        self.first_timestamp = None;
        self.last_timestamp = None;
        self.knowledge = Knowledge::Nothing;
    }

    fn apply<A: Apply>(&mut self, seq: u64, payload: &[u8], to: &mut A) {
        self.next = Some(seq.saturating_add(1));
        self.last_timestamp = wire::timestamp(payload);
        self.first_timestamp = self.first_timestamp.or(self.last_timestamp);
        let BatchEffect { cleared, doubt } = to.apply(payload);
        if cleared {
            self.knowledge = Knowledge::Whole;
        }
        if let Some(doubt) = doubt {
            to.clear();
            self.knowledge = Knowledge::Partial(doubt);
        } else if !self.replayable && matches!(self.knowledge, Knowledge::Partial(_)) && to.relearned() {
            self.knowledge = Knowledge::Recent;
        }
    }
}

#[cfg(test)]
mod tests;
